"""What golfnb defines, read from golfnb/*.py without importing it: modules, public names, their parameters and comments."""
import ast
import io
import re
import tokenize
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass
class Row:
    "One parameter, field or result: a line of a table."
    name: str
    type: str = ""
    default: str = ""
    meaning: str = ""


@dataclass
class Name:
    "A public name of a module, or a public method of a class."
    name: str
    kind: str  # data, function, class, method, property
    doc: str = ""
    signature: str = ""
    rows: list[Row] = field(default_factory=list)
    returns: Row | None = None
    members: list["Name"] = field(default_factory=list)


@dataclass
class Module:
    name: str
    chapter: str  # stem of its notebook
    summary: str
    names: dict[str, Name]
    imports: set[str]  # golfnb modules it builds on


def comments_of(source: str) -> dict[int, str]:
    "Line -> the comment on it."
    return {t.start[0]: t.string.lstrip("# ").strip() for t in tokenize.generate_tokens(io.StringIO(source).readline) if t.type == tokenize.COMMENT}


def shown(node: ast.AST | None) -> str:
    return "" if node is None else ast.unparse(node)


def table_of(function: ast.FunctionDef, notes: dict[int, str]) -> tuple[list[Row], Row | None]:
    "Parameters and result with their comments; a comment belongs to the last parameter of its line, and below the last line to the result."
    a = function.args
    given = [*a.posonlyargs, *a.args]
    defaults = dict(zip([p.arg for p in given][len(given) - len(a.defaults):], a.defaults))
    defaults |= {p.arg: d for p, d in zip(a.kwonlyargs, a.kw_defaults) if d is not None}
    every = [*given, *([a.vararg] if a.vararg else []), *a.kwonlyargs, *([a.kwarg] if a.kwarg else [])]
    stars = {a.vararg.arg if a.vararg else "": "*", a.kwarg.arg if a.kwarg else "": "**"}
    last = function.body[0].lineno - 1
    closing = function.returns.end_lineno if function.returns else last  # the line of `) -> X:`
    by_line = {p.end_lineno: p.arg for p in every}
    rows = [Row(stars.get(p.arg, "") + p.arg, shown(p.annotation), shown(defaults.get(p.arg)),
                notes.get(p.end_lineno, "") if by_line[p.end_lineno] == p.arg and p.end_lineno != closing else "")
            for p in every if p.arg not in ("self", "cls")]
    returns = Row("", shown(function.returns), "", notes.get(closing, "")) if function.returns or notes.get(closing) else None
    return rows, returns


def signature_of(function: ast.FunctionDef) -> str:
    "The head of a function as Sphinx reads it, without self."
    args = ast.parse(f"def f({ast.unparse(function.args)}): pass").body[0].args
    for group in (args.posonlyargs, args.args):
        if group and group[0].arg in ("self", "cls"):
            del group[0]
    return f"({ast.unparse(args)})" + (f" -> {ast.unparse(function.returns)}" if function.returns else "")


def read_function(node: ast.FunctionDef, notes: dict[int, str], kind: str) -> Name:
    if any(shown(d) in ("property", "cached_property") for d in node.decorator_list):
        kind = "property"
    rows, returns = table_of(node, notes)
    doc = ast.get_docstring(node) or ""
    return Name(node.name, kind, doc, signature_of(node), rows, returns)


def read_class(node: ast.ClassDef, notes: dict[int, str]) -> Name:
    "A class: its fields (with the sentence given to `setting`, or the comment), its constructor, its public methods."
    found = Name(node.name, "class", ast.get_docstring(node) or "")
    for item in node.body:
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name) and not item.target.id.startswith("_"):
            default, meaning = shown(item.value), notes.get(item.end_lineno, "")
            if isinstance(item.value, ast.Call) and shown(item.value.func) == "setting":
                default, meaning = shown(item.value.args[0]), item.value.args[1].value
            found.rows.append(Row(item.target.id, shown(item.annotation), default, meaning))
        elif isinstance(item, FUNCTION) and item.name == "__init__":
            found.rows, _ = table_of(item, notes)
            found.signature = signature_of(item)
        elif isinstance(item, FUNCTION) and not item.name.startswith("_") and not any(shown(d).endswith(".setter") for d in item.decorator_list):
            found.members.append(read_function(item, notes, "method"))
    return found


def target_names(node: ast.stmt) -> list[str]:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return [n.id for t in targets for n in ast.walk(t) if isinstance(n, ast.Name)]


def read_module(path: Path) -> Module:
    source = path.read_text(encoding="utf-8")
    tree, notes = ast.parse(source), comments_of(source)
    chapter = re.search(r"File to edit: \.\./nbs/(\w+)\.ipynb", source)[1]
    public, names, imports = set(), {}, set()
    for node in tree.body:
        if "__all__" in target_names(node):
            public = set(ast.literal_eval(node.value))
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level == 1 and node.module:
            imports.add(node.module)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("golfnb."):
            imports.add(node.module.split(".")[1])

    def visit(body):
        for node in body:
            if isinstance(node, FUNCTION) and node.name in public:
                names.setdefault(node.name, read_function(node, notes, "function"))
            elif isinstance(node, ast.ClassDef) and node.name in public:
                names.setdefault(node.name, read_class(node, notes))
            elif isinstance(node, (ast.If, ast.Try)):
                visit(node.body)
                visit(node.orelse)
            for name in target_names(node):
                if name in public:
                    value = shown(node.value)
                    names.setdefault(name, Name(name, "data", notes.get(node.end_lineno, ""), value if len(value) <= 60 else ""))

    visit(tree.body)
    missing = public - names.keys()
    if missing:
        raise SystemExit(f"book: {path.name} lists {sorted(missing)} in __all__ and defines them nowhere at the top level")
    return Module(path.stem, chapter, " ".join((ast.get_docstring(tree) or "").split()), names, imports)


@cache
def modules() -> dict[str, Module]:
    "All modules that a notebook makes, in the order of the chapters."
    found = [read_module(p) for p in sorted((ROOT / "golfnb").glob("*.py")) if p.name not in ("__init__.py", "_modidx.py", "train_gpt.py")]
    return {m.name: m for m in sorted(found, key=lambda m: m.chapter)}


def chapter_page(name: str, module: Module) -> str:
    return f"{module.chapter}.html#{name}"


def api_page(module: Module, *path: str) -> str:
    return f"api/{module.name}.html" + (f"#golfnb.{module.name}.{'.'.join(path)}" if path else "")


@cache
def places() -> dict[str, str]:
    "Everything that prose may name -> its place in the site: names (their chapter), modules, methods and fields (their API entry), settings."
    found = {}
    for m in modules().values():
        found[f"golfnb.{m.name}"] = api_page(m)
        for n in m.names.values():
            for key in (n.name, f"{m.name}.{n.name}", f"golfnb.{m.name}.{n.name}"):
                found.setdefault(key, chapter_page(n.name, m))
            if n.kind == "class":
                for member in n.members:
                    found.setdefault(f"{n.name}.{member.name}", api_page(m, n.name, member.name))
                for row in n.rows:
                    found.setdefault(f"{n.name}.{row.name}", api_page(m, n.name, row.name))
                    if n.name.endswith("Settings"):
                        found.setdefault(row.name.upper(), api_page(m, n.name, row.name))
                        found.setdefault(f"cfg.{row.name}", api_page(m, n.name, row.name))
                        found.setdefault(f"Config.{row.name}", api_page(m, n.name, row.name))
    return found


@cache
def methods(chapter: str) -> dict[str, str]:
    "Methods that only one class of a chapter has: in its prose their bare names are enough."
    found = [(n.name, api_page(m, c.name, n.name)) for m in modules().values() if m.chapter == chapter for c in m.names.values() for n in c.members]
    return {name: place for name, place in found if [n for n, _ in found].count(name) == 1}


def place_of(text: str, page: str = "") -> str | None:
    "Where an inline code leads: `name`, `name(...)`, `golfnb.module.name`, `Class.method`, `SETTING`, `SETTING=value`, a method of the page's own chapter; None when it is not golfnb's."
    match = re.fullmatch(r"([A-Za-z_][\w.]*)(\(.*\))?(=\S+)?", text, re.S)
    if not match or match[3] and not match[1].isupper():
        return None
    return places().get(match[1]) or methods(page).get(match[1])

"""What golfnb defines, read from the modules without importing it: modules, names, signatures, docstrings, settings."""
import ast
import json
import re
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass
class Name:
    "A name of a module, or a method or field of a class."
    name: str
    kind: str  # data, function, class, method, property, attribute; setting: a field whose value is `setting(...)`
    doc: str = ""
    signature: str = ""  # of data, fields and settings: the value
    type: str = ""
    public: bool = True
    patched: bool = False  # a method that stands in a cell of its own
    members: list["Name"] = field(default_factory=list)


@dataclass
class Module:
    name: str
    chapter: str  # stem of its notebook
    summary: str
    names: dict[str, Name]
    imports: set[str]  # golfnb modules it builds on

    @property
    def public(self) -> list[Name]:
        return [n for n in self.names.values() if n.public]


def shown(node: ast.AST | None) -> str:
    return "" if node is None else ast.unparse(node)


def signature_of(function: ast.FunctionDef) -> str:
    "The head of a function in one line, without self."
    args = re.sub(r"^(?:self|cls)(?:: [\w.]+)?(?:, |$)", "", ast.unparse(function.args))
    return f"({args})" + (f" -> {ast.unparse(function.returns)}" if function.returns else "")


def patched_class(node: ast.AST) -> str:
    "The class to which `@patch` binds a function, or nothing."
    is_patch = isinstance(node, FUNCTION) and any(shown(d) == "patch" for d in node.decorator_list)
    return shown(node.args.args[0].annotation).strip("'\"") if is_patch else ""


def own_cells(notebook: Path) -> set[str]:
    "`Class.method` for every method that stands in a cell of its own; in the module it is in its class."
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    sources = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    nodes = [node for source in sources if "@patch" in source for node in ast.parse(source).body]
    return {f"{patched_class(node)}.{node.name}" for node in nodes if patched_class(node)}


def read_function(node: ast.FunctionDef, kind: str) -> Name:
    if {"property", "cached_property"} & {shown(d) for d in node.decorator_list}:
        kind = "property"
    return Name(node.name, kind, ast.get_docstring(node) or "", signature_of(node))


def read_field(node: ast.AnnAssign, remark) -> Name:
    name, kind, value = node.target.id, shown(node.annotation), node.value
    if isinstance(value, ast.Call) and shown(value.func) == "setting":
        options = {k.arg: k.value.value for k in value.keywords}
        allowed = ", ".join(shown(a).strip("'\"") for a in value.args[2:]) or options.get("bounds", "")
        return Name(name, "setting", value.args[1].value + (f" ({allowed})" if allowed else "") + ("; fixed in a script" if options.get("fixed") == "yes" else ""), shown(value.args[0]), kind)
    return Name(name, "attribute", remark(node), shown(value), kind)


def read_class(node: ast.ClassDef, remark) -> Name:
    "A class: its constructor, its fields, its public methods."
    found = Name(node.name, "class", ast.get_docstring(node) or "")
    for item in node.body:
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name) and not item.target.id.startswith("_"):
            found.members.append(read_field(item, remark))
        elif isinstance(item, FUNCTION) and item.name == "__init__":
            found.signature = signature_of(item)
        elif isinstance(item, FUNCTION) and not item.name.startswith("_") and not any(shown(d).endswith(".setter") for d in item.decorator_list):
            found.members.append(read_function(item, "method"))
    return found


def imported_module(n: ast.ImportFrom, package: tuple[str, ...]) -> str:
    "The module of ours that an import in `package` takes from, without golfnb in front."
    if not n.level:
        return n.module.removeprefix("golfnb.")
    kept = package[:len(package) - n.level + 1]
    return ".".join((*kept, n.module))


def read_module(path: Path) -> Module:
    source = path.read_text(encoding="utf-8")
    lines, tree = source.splitlines(), ast.parse(source)
    remark = lambda node: lines[node.end_lineno - 1].encode()[node.end_col_offset:].decode().partition("# ")[2]
    notebook = ROOT / re.search(r"File to edit: (?:\.\./)+(nbs/(?:\w+/)*\w+\.ipynb)", source)[1]
    package = path.parent.relative_to(ROOT / "golfnb").parts if path.is_relative_to(ROOT / "golfnb") else ()
    imports = set()
    for n in ast.walk(tree):
        if isinstance(n, ast.ImportFrom) and n.module and (n.level or n.module.startswith("golfnb.")):
            origin = imported_module(n, package)
            imports |= {origin, *(f"{origin}.{a.name}" for a in n.names)}  # a module, or what is in one
    public, names = set(), {}

    def visit(body):
        for node in body:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
            stored = [n.id for t in targets for n in ast.walk(t) if isinstance(n, ast.Name)]
            if stored == ["__all__"]:
                public.update(ast.literal_eval(node.value))
                continue
            if patched_class(node) in names and not node.name.startswith("_"):
                names[patched_class(node)].members.append(read_function(node, "method"))
            elif isinstance(node, FUNCTION) and not patched_class(node):
                names.setdefault(node.name, read_function(node, "function"))
            elif isinstance(node, ast.ClassDef):
                names.setdefault(node.name, read_class(node, remark))
            elif isinstance(node, (ast.If, ast.Try)):
                visit([*node.body, *node.orelse])
            for name in stored:
                names.setdefault(name, Name(name, "data", remark(node), value if len(value := shown(node.value)) <= 60 else ""))

    visit(tree.body)
    apart = own_cells(notebook)
    for n in names.values():
        n.public = n.name in public
        for member in n.members:
            member.patched = f"{n.name}.{member.name}" in apart
    passed_on = {a.name for n in tree.body if isinstance(n, ast.ImportFrom) for a in n.names}  # another module's page has them
    if missing := public - names.keys() - passed_on:
        raise SystemExit(f"book: {path.name} lists {sorted(missing)} in __all__ and defines them nowhere at the top level")
    return Module(".".join((*package, path.stem)), notebook.stem, " ".join((ast.get_docstring(tree) or "").split()), names, imports)


@cache
def modules() -> dict[str, Module]:
    "All modules that a chapter makes, in the order of the chapters; a recipe's program and a command stand whole on their pages."
    paths = [p for p in sorted((ROOT / "golfnb").rglob("*.py")) if p.parent.name not in ("recipes", "commands")]
    found = [read_module(p) for p in paths if p.name not in ("__init__.py", "__main__.py", "_modidx.py", "train_gpt.py")]
    return {m.name: m for m in sorted(found, key=lambda m: m.chapter)}


@cache
def module_of(chapter: str) -> Module | None:
    return next((m for m in modules().values() if m.chapter == chapter), None)


def chapter_page(name: str, module: Module) -> str:
    return f"{module.chapter}.html#{name}"


def api_page(module: Module, *path: str) -> str:
    return f"api/{module.name}.html" + (f"#golfnb.{module.name}.{'.'.join(path)}" if path else "")


@cache
def places() -> dict[str, str]:
    "Everything that prose may name -> its place in the site: names (their chapter), modules, methods and fields (their API entry), settings."
    found = {"golfnb": "api/index.html", **{f"golfnb.{name}": chapter_page(name, modules()[home]) for name, home in front_door().items()}}
    for m in modules().values():
        found[f"golfnb.{m.name}"] = api_page(m)
        for n in m.public:
            for key in (n.name, f"{m.name.split('.')[-1]}.{n.name}", f"{m.name}.{n.name}", f"golfnb.{m.name}.{n.name}"):
                found.setdefault(key, chapter_page(n.name, m))
            for member in n.members:
                setting, place = member.kind == "setting", api_page(m, n.name, member.name)
                for key in (f"{n.name}.{member.name}", *((member.name.upper(), f"cfg.{member.name}", f"Config.{member.name}") if setting else ())):
                    found.setdefault(key, f"settings.html#envvar-{member.name.upper()}" if setting else place)
    return found


@cache
def front_door() -> dict[str, str]:
    "What `import golfnb` offers -> the module it comes from."
    tree = ast.parse((ROOT / "golfnb" / "__init__.py").read_text(encoding="utf-8"))
    return next(ast.literal_eval(n.value) for n in tree.body if isinstance(n, ast.Assign) and n.targets[0].id == "_HOME")


@cache
def methods(chapter: str) -> dict[str, str]:
    "Methods that only one class of a chapter has: in its prose their bare names are enough."
    module = module_of(chapter)
    found = [(n.name, api_page(module, c.name, n.name)) for c in (module.public if module else ()) for n in c.members if n.kind == "method"]
    return {name: place for name, place in found if [n for n, _ in found].count(name) == 1}


def place_of(text: str, page: str = "") -> str | None:
    "Where an inline code leads: `name`, `name(...)`, `golfnb.module.name`, `Class.method`, `SETTING`, `SETTING=value`, a method of the page's own chapter; None when it is not golfnb's."
    match = re.fullmatch(r"([A-Za-z_][\w.]*)(\(.*\))?(=\S+)?", text, re.S)
    if not match or match[3] and not match[1].isupper():
        return None
    return places().get(match[1]) or methods(page).get(match[1])

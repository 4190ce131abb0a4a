"""What Sphinx reads, written from the notebooks: chapters, the API by module, the map, the negative results."""
import ast
import json
import re
import shutil
from pathlib import Path

import nbformat
from names import ROOT, FUNCTION, Module, Name, Row, modules

NBS, PAGES = ROOT / "nbs", Path(__file__).parent / "pages"
PARTS = ((0, "The data"), (4, "The model"), (9, "The optimizer"), (14, "The run"), (20, "Around the run"), (30, "Studies"))
FRONT = {"start": "index", "index": "readme"}  # notebooks whose page has another name
LOOK_UP = ("published", "negative", "glossary", "api/index")


def stems() -> list[str]:
    return sorted(p.stem for p in NBS.glob("*.ipynb"))


def number(stem: str) -> int | None:
    return int(stem[:2]) if re.match(r"\d\d[a-z]?_", stem) else None


def parts() -> list[tuple[str, list[str]]]:
    "The chapters, part by part."
    numbered = [s for s in stems() if number(s) is not None]
    ends = [first for first, _ in PARTS[1:]] + [100]
    return [(title, [s for s in numbered if first <= number(s) < end]) for (first, title), end in zip(PARTS, ends)]


def title_of(nb: nbformat.NotebookNode) -> str:
    return next(m[1] for c in nb.cells if c.cell_type == "markdown" and (m := re.search(r"^# (.+)$", c.source, re.M)))


def summary_of(nb: nbformat.NotebookNode) -> str:
    return next((m[1] for c in nb.cells if c.cell_type == "markdown" and (m := re.search(r"^> (.+)$", c.source, re.M))), "")


def numbered_title(stem: str) -> str:
    title = title_of(nbformat.read(NBS / f"{stem}.ipynb", as_version=4))
    return f"{stem.split('_')[0]} {title}" if number(stem) is not None else title


# pictures

KINDS = {"plot": "line plot", "semilogx": "line plot, horizontal axis logarithmic", "semilogy": "line plot, vertical axis logarithmic", "bar": "bar chart", "barh": "horizontal bar chart",
         "hist": "histogram", "imshow": "map of values in colour", "scatter": "scatter plot", "step": "step plot", "fill_between": "bands", "add_patch": "diagram of boxes", "Rectangle": "diagram of boxes",
         "broken_barh": "timeline", "stem": "stem plot", "boxplot": "box plot", "errorbar": "points with error bars"}
ROLES = {"title": "title", "suptitle": "title", "set_title": "title", "xlabel": "across", "set_xlabel": "across", "ylabel": "up", "set_ylabel": "up", "label": "series"}


def words(node: ast.AST) -> str:
    "The fixed text of a string in code; what is computed there becomes an ellipsis."
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(words(v) if isinstance(v, ast.Constant) else "…" for v in node.values)
    return ""


def helpers_of(nb: nbformat.NotebookNode) -> dict[str, ast.AST]:
    "Functions that a cell of this notebook may draw with: its own, and those of the report page."
    found = {n.name: n for n in ast.parse((ROOT / "golfnb" / "report.py").read_text(encoding="utf-8")).body if isinstance(n, FUNCTION)}
    for cell in nb.cells:
        if cell.cell_type == "code":
            try:
                found |= {n.name: n for n in ast.parse(cell.source).body if isinstance(n, FUNCTION)}
            except SyntaxError:
                pass
    return found


def alt_text(source: str, helpers: dict[str, ast.AST]) -> str:
    "What a picture shows, in words: the cell's `#| fig-alt:`, else its kind, title, axes and series as the code names them."
    given = re.search(r"^#\|\s*fig-alt:\s*(.+)$", source, re.M)
    if given:
        return given[1].strip()
    found = {"kind": [], "title": [], "across": [], "up": [], "series": []}
    todo, seen = [ast.parse(source)], set()
    while todo:
        for node in ast.walk(todo.pop(0)):
            if not isinstance(node, ast.Call):
                continue
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in KINDS and (called != "step" or len(node.args) > 1):  # an optimizer steps too
                found["kind"].append(KINDS[called])
            if called in helpers and called not in seen:
                seen.add(called)
                todo.append(helpers[called])
            said = [(ROLES[called], words(node.args[0]))] if called in ROLES and node.args else []
            said += [(ROLES[k.arg], words(k.value)) for k in node.keywords if k.arg in ROLES]
            for role, text in said:
                if text.strip(" …") and text.strip() not in found[role]:
                    found[role].append(text.strip())
    kinds = list(dict.fromkeys(found["kind"]))
    parts = [" and ".join(kinds[:2]) or "picture"]
    parts += [f"{name}: {'; '.join(found[role])}" for name, role in (("titles", "title"), ("horizontal axis", "across"), ("vertical axis", "up"), ("series", "series")) if found[role]]
    text = ". ".join(parts)
    return text[0].upper() + text[1:] + "."


# chapters

def directives(source: str) -> tuple[dict[str, str], str]:
    "The `#| name: value` lines of a cell, and the cell without them."
    found = {m[1]: m[2].strip() for m in re.finditer(r"^#\|\s*([\w-]+):?(.*)$", source, re.M)}
    return found, re.sub(r"^#\|.*\n?", "", source, flags=re.M).strip("\n")


def page_of(stem: str) -> str:
    return FRONT.get(stem, stem)


def as_page(stem: str) -> nbformat.NotebookNode:
    "A notebook as the site shows it: no hidden cells, no directives; cells marked for folding, definition and alt text."
    nb = nbformat.read(NBS / f"{stem}.ipynb", as_version=4)
    helpers, cells = helpers_of(nb), []
    for cell in nb.cells:
        if cell.cell_type == "markdown":
            cell.source = re.sub(r"\]\((\w+)\.ipynb", lambda m: f"]({page_of(m[1])}.ipynb", cell.source).replace("](../book/pages/", "](")
        elif cell.cell_type == "code":
            marks, source = directives(cell.source)
            if "hide" in marks or "default_exp" in marks or not source.strip():
                continue
            pictures = any("image/png" in o.get("data", {}) for o in cell.outputs)
            alt = alt_text(cell.source, helpers) if pictures else ""
            tags = [tag for mark, tag in (("exports", "exported"), ("code-fold", "hide-input"), ("hide_input", "remove-input")) if mark in marks]
            cell.source, cell.metadata = source, {"tags": tags} | ({"mystnb": {"image": {"alt": alt}}} if alt else {})
        cells.append(cell)
    if number(stem) is not None:
        first = next(c for c in cells if c.cell_type == "markdown")
        first.source = re.sub(r"^# ", f"# {stem.split('_')[0]} ", first.source, count=1, flags=re.M)
    nb.cells = cells
    nb.metadata = {"kernelspec": {"display_name": "Python", "language": "python", "name": "python3"}, "language_info": {"name": "python", "pygments_lexer": "ipython3"}}
    return nb


# the API

def escaped(text: str) -> str:
    "A docstring as MyST: what looks like markup is text, except code between backticks; names in capitals stay words."
    pieces = re.split(r"(`[^`]*`)", " ".join(text.split()))
    return "".join(p if p.startswith("`") else re.sub(r"([*_<>$\[\]{}|\\])", r"\\\1", p) for p in pieces)


def code(text: str) -> str:
    return f"`` {text} ``" if "`" in text else f"`{text}`" if text else ""


def row_table(rows: list[Row], word: str, anchor: str = "") -> list[str]:
    "A table of parameters or fields: name, type with default, meaning; a column that nobody fills is left out."
    cells = {"type": [code(f"{r.type} = {r.default}".strip() if r.default else r.type).replace("|", r"\|") for r in rows], "meaning": [escaped(r.meaning) for r in rows]}
    columns = {head: column for head, column in cells.items() if any(column)}
    names = [f"{{golf-field}}`{anchor}.{r.name}`" if anchor else code(r.name) for r in rows]
    return ["| " + " | ".join((word, *columns)) + " |", "|---" * (len(columns) + 1) + "|", *("| " + " | ".join(line) + " |" for line in zip(names, *columns.values()))]


def entry(module: Module, n: Name, owner: str = "") -> list[str]:
    "One name as a py directive."
    path = f"{owner}.{n.name}" if owner else n.name
    lines = [("````" if n.members else "```") + f"{{py:{n.kind}}} {path}{n.signature if n.kind not in ('data', 'property') else ''}"]
    lines += [f":module: golfnb.{module.name}"]
    if n.kind == "data" and n.signature:
        lines += [f":value: {n.signature}"]
    lines += ["", escaped(n.doc), ""]
    anchor = f"golfnb.{module.name}.{path}" if n.kind == "class" else ""
    if n.rows and (n.kind == "class" or any(r.meaning for r in n.rows)):
        lines += [*row_table(n.rows, "field" if n.kind == "class" and not n.signature else "parameter", anchor), ""]
    if n.returns and n.returns.meaning:
        lines += [f"**Returns** {code(n.returns.type)} {escaped(n.returns.meaning)}" if n.returns.type not in ("", "None") else f"**Note**: {escaped(n.returns.meaning)}", ""]
    for member in n.members:
        lines += [*entry(module, member, n.name), ""]
    if not owner:
        lines += [f"{{golf-chapter}}`{module.name}.{n.name}`", ""]
    return [*lines, "````" if n.members else "```", ""]


def api_module(module: Module) -> str:
    lines = [f"# golfnb.{module.name}", "", f"> {escaped(module.summary)}", "", f"Explained, defined and tried in [chapter {numbered_title(module.chapter)}](../{module.chapter}.ipynb).", ""]
    for title, kind in (("Functions", "function"), ("Classes", "class"), ("Constants", "data")):
        group = [n for n in module.names.values() if n.kind == kind]
        if group:
            lines += [f"## {title}", ""]
            for n in group:
                lines += entry(module, n)
    return "\n".join(lines) + "\n"


def api_index() -> str:
    lines = ["# The API by module", "", "Every public name with its signature, the meaning, shape, dtype and unit of each parameter, and what it raises. Each entry leads to the chapter that explains and defines it.", "",
             "| module | what lives there | names |", "|---|---|---|"]
    lines += [f"| [golfnb.{m.name}]({m.name}.md) | {escaped(m.summary)} | {len(m.names)} |" for m in modules().values()]
    return "\n".join(lines) + "\n\n" + toctree("", [m.name for m in modules().values()]) + "\n"


# gathered pages

def map_rooms() -> str:
    "The rooms, part by part: what each gives, what it builds on, who uses it."
    by_chapter = {m.chapter: m for m in modules().values()}
    link = lambda stem: f"[{stem.split('_')[0]}]({stem}.ipynb)"
    lines = []
    for title, group in parts():
        lines += [f"## {title}", "", "| room | what it gives | builds on | used by |", "|---|---|---|---|"]
        for stem in group:
            nb = nbformat.read(NBS / f"{stem}.ipynb", as_version=4)
            m = by_chapter.get(stem)
            down = " ".join(link(modules()[i].chapter) for i in sorted(m.imports, key=lambda i: modules()[i].chapter)) if m else ""
            up = " ".join(link(o.chapter) for o in modules().values() if m and m.name in o.imports)
            lines.append(f"| [{stem.split('_')[0]} {title_of(nb)}]({stem}.ipynb) | {summary_of(nb)} | {down} | {up} |")
        lines.append("")
    return "\n".join(lines)


FAILED = re.compile(r"^## What (did not work|was rejected)")
INPUT = re.compile(r"GolfError|[Bb]ad input|one sentence|:$|is refused|is raised|CPU run time")


def negative_results() -> str:
    "What did not work, gathered from the chapters; what they say of bad input stays there."
    lines = []
    for stem in stems():
        nb, inside, found = nbformat.read(NBS / f"{stem}.ipynb", as_version=4), False, []
        if number(stem) is None:
            continue
        for cell in nb.cells:
            if cell.cell_type != "markdown":
                continue
            for block in re.split(r"\n(?=[*-] )|\n\s*\n", cell.source):
                block = block.strip()
                if block.startswith("#"):
                    inside = bool(FAILED.match(block))
                elif inside and block and not INPUT.search(block):
                    found.append(block if re.match(r"[*-] ", block) else f"* {block}")
        if found:
            lines += [f"## {numbered_title(stem)}", "", *[re.sub(r"^[*-] ", "* ", b) for b in found], "", f"[From chapter {stem.split('_')[0]}]({stem}.ipynb).", ""]
    return "\n".join(lines)


def toctree(caption: str, entries: list[str]) -> str:
    head = [f":caption: {caption}"] if caption else []
    return "\n".join(["```{toctree}", ":hidden:", *head, *entries, "```", ""])


def tables_of_contents() -> str:
    groups = [("Begin", ["Install, run, use <readme>", "map"]), *parts(), ("Look up", list(LOOK_UP))]
    return "\n".join(toctree(caption, entries) for caption, entries in groups if entries)


def write(folder: Path) -> None:
    "Everything Sphinx reads, in an empty folder."
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "api").mkdir(parents=True)
    for stem in stems():
        nb = as_page(stem)
        if page_of(stem) == "index":
            nb.cells.append(nbformat.v4.new_markdown_cell(tables_of_contents()))
        (folder / f"{page_of(stem)}.ipynb").write_text(json.dumps(nb), encoding="utf-8")
    gathered = {"map": map_rooms, "negative": negative_results, "glossary": lambda: ""}
    for path in sorted(PAGES.glob("*.md")):
        (folder / path.name).write_text(path.read_text(encoding="utf-8").replace("<!-- gathered -->", gathered[path.stem]()), encoding="utf-8")
    (folder / "api" / "index.md").write_text(api_index(), encoding="utf-8")
    for m in modules().values():
        (folder / "api" / f"{m.name}.md").write_text(api_module(m), encoding="utf-8")

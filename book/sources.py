"""What Sphinx reads, written from the notebooks: chapters, the API by module, the map, the negative results."""
import json
import re
import shutil
from functools import cache
from pathlib import Path

import nbformat
from names import ROOT, Module, Name, chapter_page, front_door, modules

NBS, PAGES = ROOT / "nbs", Path(__file__).parent / "pages"
PARTS = {"lessons": "Lessons", "story": "Source", "reference": "Reference", "recipes": "Recipes", "tools": "Tools", "studies": "Studies"}  # folder -> caption
FRONT = {"start": "index", "index": "readme"}  # notebooks whose page has another name
LOOK_UP = ("settings", "published", "rely", "tried", "glossary", "contributing", "api/index")
MARKS = {"export": "exported", "exports": "exported", "exporti": "exported", "code-fold": "hide-input", "hide_input": "remove-input"}  # directive -> tag of the site

GUESSED = {"code_prompt_show": "Show what came", "code_prompt_hide": "Hide what came"}  # what a reader was to guess is folded


def paths() -> dict[str, Path]:
    "Stem -> notebook: each stem is there once."
    return {p.stem: p for p in sorted(NBS.rglob("*.ipynb"), key=lambda p: p.stem) if ".ipynb_checkpoints" not in p.parts}


def stems() -> list[str]:
    return list(paths())


def notebook(stem: str) -> nbformat.NotebookNode:
    return nbformat.read(paths()[stem], as_version=4)


def number(stem: str) -> int | None:
    return int(stem[:2]) if re.match(r"\d\d[a-z]?_", stem) else None


def parts() -> list[tuple[str, list[str]]]:
    "The chapters, part by part."
    return [(title, [stem for stem, path in paths().items() if path.parent.name == folder]) for folder, title in PARTS.items()]


def is_aside(stem: str) -> bool:
    "Whether only one page leads to a page: a lesson to its answers, the chapter of the command line to a command."
    return paths()[stem].parent.name in ("answers", "commands")


def title_of(nb: nbformat.NotebookNode) -> str:
    return next(m[1] for c in nb.cells if c.cell_type == "markdown" and (m := re.search(r"^# (.+)$", c.source, re.M)))


def summary_of(nb: nbformat.NotebookNode) -> str:
    return next((m[1] for c in nb.cells if c.cell_type == "markdown" and (m := re.search(r"^> (.+)$", c.source, re.M))), "")


@cache  # many pages name the same chapters
def title_at(path: Path) -> str:
    return title_of(nbformat.read(path, as_version=4))


def numbered_title(stem: str) -> str:
    title = title_at(paths()[stem])
    return f"{stem.split('_')[0]} {title}" if number(stem) is not None else title


# chapters

def directives(source: str) -> tuple[dict[str, str], str]:
    "The `#| name: value` lines of a cell, and the cell without them."
    found = {m[1]: m[2].strip() for m in re.finditer(r"^#\|\s*([\w-]+):?(.*)$", source, re.M)}
    return found, re.sub(r"^#\|.*\n?", "", source, flags=re.M).strip("\n")


def page_of(stem: str) -> str:
    return FRONT.get(stem, stem)


def site_links(text: str) -> str:
    "Links to notebooks and pages as the site has them: all in one folder."
    text = re.sub(r"\]\((?:\.\./)*(?:\w+/)?(\w+)\.ipynb", lambda m: f"]({page_of(m[1])}.ipynb", text)
    return re.sub(r"\]\((?:\.\./)+book/pages/", "](", text)


def as_page(stem: str) -> nbformat.NotebookNode:
    "A notebook as the site shows it: no hidden cells, no directives; cells marked for folding and definition, pictures with caption and alt text."
    nb, cells = notebook(stem), []
    unnamed = f"A picture of chapter {numbered_title(stem)}"
    for cell in nb.cells:
        if cell.cell_type == "markdown":
            cell.source = site_links(cell.source)
        elif cell.cell_type == "code":
            marks, source = directives(cell.source)
            if "hide" in marks or "default_exp" in marks or not source.strip():
                continue
            tags = [tag for mark, tag in MARKS.items() if marks.get(mark, "false") != "false"]
            guessed = GUESSED if re.search(r"^compare\(", source, re.M) else {}
            tags += ["hide-output"] * bool(guessed)
            image = {"image": {"alt": marks.get("fig-alt") or marks.get("fig-cap") or unnamed}}
            for out in cell.outputs:
                if "text/markdown" in out.get("data", {}):
                    links = site_links(out.data["text/markdown"])  # no reader of notebooks turns these into pages
                    out.data["text/markdown"] = re.sub(r"\]\((\w+)\.ipynb", r"](\1.html", links)
            cell.source, cell.metadata = source, {"tags": tags, "mystnb": guessed | image | ({"figure": {"caption": marks["fig-cap"]}} if "fig-cap" in marks else {})}
        if cell.cell_type != "raw":
            cells.append(cell)
    if number(stem) is not None:
        first = next(c for c in cells if c.cell_type == "markdown")
        first.source = re.sub(r"^# ", f"# {stem.split('_')[0]} ", first.source, count=1, flags=re.M)
    nb.cells = cells
    nb.metadata = {"kernelspec": {"display_name": "Python", "language": "python", "name": "python3"}, "language_info": {"name": "python", "pygments_lexer": "ipython3"}}
    if is_aside(stem):
        nb.metadata["orphan"] = True
    return nb


# the API

def escaped(text: str) -> str:
    "A docstring as MyST: what looks like markup is text, except code between backticks; a line that ends a sentence or comes before a list ends there."
    pieces = re.split(r"(`[^`]*`)", text)
    text = "".join(p if p.startswith("`") else re.sub(r"([*_<>$\[\]{}|\\#])", r"\\\1", p) for p in pieces)
    return re.sub(r"(?<=[.:;])\n(?=\S)(?!- )", r"\\\n", text)


def directive(kind: str, head: str, *lines: str, ticks: int = 3) -> list[str]:
    return ["`" * ticks + f"{{{kind}}} {head}", *lines, "`" * ticks, ""]


def entry(module: Module, n: Name, owner: str = "") -> list[str]:
    "One name as a py directive: its signature, its docstring, its members, and the way to its chapter."
    if n.kind == "setting":
        return []
    options = [f":module: golfnb.{module.name}"]
    if n.kind in ("data", "attribute"):
        options += [f":type: {n.type}"] * bool(n.type) + [f":value: {n.signature}"] * bool(n.signature)
    lines = [line for m in n.members for line in entry(module, m, f"{n.name}.")]
    if any(m.kind == "setting" for m in n.members):
        lines += [f"Its settings stand under [{n.name}](../settings.md#{n.name.lower()}).", ""]
    if not owner or n.patched:
        lines += [f'<a class="golf-defined" href="../{chapter_page(owner + n.name, module)}">Defined in chapter {module.chapter.split("_")[0]}</a>']
    head = owner + n.name + (n.signature if n.kind in ("function", "class", "method") else "")
    return directive(f"py:{n.kind}", head, *options, "", escaped(n.doc), "", *lines, ticks=3 if owner else 4)


def api_module(module: Module) -> str:
    lines = [f"# golfnb.{module.name}", "", f"> {escaped(module.summary)}", "", f"Explained, defined and tried in [chapter {numbered_title(module.chapter)}](../{module.chapter}.ipynb).", ""]
    for title, kind in (("Functions", "function"), ("Classes", "class"), ("Constants", "data")):
        group = [line for n in module.public if n.kind == kind for line in entry(module, n)]
        lines += [f"## {title}", "", *group] if group else []
    return "\n".join(lines) + "\n"


def api_index() -> str:
    lines = ["# The API by module", "", "Every public name with its signature and what it does. Each entry leads to the chapter that explains and defines it.", "", f"`import golfnb` offers `{'`, `'.join(front_door())}`.", "", "| module | what lives there | names |", "|---|---|---|"]
    lines += [f"| [golfnb.{m.name}]({m.name}.md) | {escaped(m.summary)} | {len(m.public)} |" for m in modules().values()]
    return "\n".join(lines) + "\n\n" + toctree("", [m.name for m in modules().values()]) + "\n"


# gathered pages

def all_settings() -> str:
    "Every setting once, under the first group that declares it."
    lines, seen = [], set()
    for m in modules().values():
        for group in m.public:
            rows = [n for n in group.members if n.kind == "setting" and n.name not in seen]
            seen |= {n.name for n in rows}
            lines += [f"## {group.name}", "", f"{escaped(group.doc)} It acts in [chapter {numbered_title(m.chapter)}]({m.chapter}.ipynb).", ""] if rows else []
            for n in rows:
                lines += directive("envvar", n.name.upper(), "", f"{escaped(n.doc)}. Default: `{n.signature}`.")
    return "\n".join(lines)


def map_rooms() -> str:
    "The rooms, part by part: what each gives, what it builds on, who uses it."
    by_chapter = {m.chapter: m for m in modules().values()}
    link = lambda stem: f"[{stem.split('_')[0]}]({stem}.ipynb)"
    lines = []
    for title, group in parts():
        lines += [f"## {title}", "", "| room | what it gives | builds on | used by |", "|---|---|---|---|"]
        for stem in group:
            nb = notebook(stem)
            m = by_chapter.get(stem)
            down = " ".join(link(modules()[i].chapter) for i in sorted(m.imports & modules().keys(), key=lambda i: modules()[i].chapter)) if m else ""
            up = " ".join(link(o.chapter) for o in modules().values() if m and m.name in o.imports)
            lines.append(f"| [{numbered_title(stem)}]({stem}.ipynb) | {summary_of(nb)} | {down} | {up} |")
        lines.append("")
    return "\n".join(lines)


FAILED = re.compile(r"^## What (did not work|was rejected)")
INPUT = re.compile(r"GolfError|[Bb]ad input|one sentence|:$|is refused|is raised|CPU run time")
GATHERED = "<!-- gathered -->"  # stands in a page where what is gathered shall be


def beginning(line: str) -> str:
    "The first words of a line, by which book/pages/tried.json knows it."
    return " ".join(re.findall(r"\w+", line))[:50]


def failures(stem: str) -> list[str]:
    "The lines of a chapter that say what did not work; what they say of bad input stays there."
    inside, found = False, []
    for cell in notebook(stem).cells:
        if cell.cell_type != "markdown":
            continue
        for block in re.split(r"\n(?=[*-] )|\n\s*\n", site_links(cell.source)):
            block = block.strip()
            if block.startswith("#"):
                inside = bool(FAILED.match(block))
            elif inside and block and not INPUT.search(block):
                found.append(re.sub(r"^[*-] ", "", block))
    return found


def verdicts() -> dict[str, tuple[str, str, str]]:
    "Beginning of a line -> the day on which it stood there, what it cost, the verdict."
    days = json.loads((PAGES / "tried.json").read_text(encoding="utf-8"))
    return {begins: (day, *known) for day, lines in days.items() for begins, known in lines.items()}


def negative_results() -> str:
    "What did not work, chapter by chapter, each line with date, cost and verdict."
    known, lines = verdicts(), []
    for stem in (stem for _, group in parts() for stem in group):
        rows = []
        for line in failures(stem):
            day, cost, verdict = known.get(beginning(line), ("no date", "no cost", "no verdict"))
            rows.append(f"* {day}, {cost}, *{verdict}*. {line}")
        lines += [f"### [{numbered_title(stem)}]({stem}.ipynb)", "", *rows, ""] if rows else []
    return "\n".join(lines)


def toctree(caption: str, entries: list[str]) -> str:
    head = [f":caption: {caption}"] if caption else []
    return "\n".join(["```{toctree}", ":hidden:", *head, *entries, "```", ""])


def in_sidebar(stem: str) -> str:
    "A chapter in the sidebar: what stands before the colon of its title; of a study, after it."
    number, _, words = numbered_title(stem).partition(" ")
    head, _, rest = words.partition(": ")
    return f"{number} {rest[0].upper() + rest[1:] if head == 'Study' else head} <{stem}>"


def tables_of_contents() -> str:
    chapters = [(title, [in_sidebar(stem) for stem in group]) for title, group in parts()]
    (learn, lessons), *others = chapters  # lessons first: "Next" of page one leads to the first of them
    use = ["Install, run, use <readme>", "The optimizer alone <pytorch>", "Your own recipe <own>", "Eight H100s <eight>", "One card of 24 GB <one>", "map"]
    groups = [(learn, [*lessons, "Two ladders: bits and milliseconds <ladder>"]), ("Use it", use), *others, ("Look up", list(LOOK_UP))]
    return "\n".join(toctree(caption, entries) for caption, entries in groups if entries)


def write(folder: Path) -> None:
    "Everything Sphinx reads, in an empty folder."
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "api").mkdir(parents=True)
    for stem in stems():
        nb = as_page(stem)
        if stem == "tried":
            last = next(c for c in nb.cells if GATHERED in c.source)
            last.source = last.source.replace(GATHERED, negative_results())
        if page_of(stem) == "index":
            nb.cells.append(nbformat.v4.new_markdown_cell(tables_of_contents()))
        (folder / f"{page_of(stem)}.ipynb").write_text(json.dumps(nb), encoding="utf-8")
    gathered = {"map": map_rooms, "settings": all_settings}
    for path in sorted(PAGES.glob("*.md")):
        text = path.read_text(encoding="utf-8")
        (folder / path.name).write_text(text.replace(GATHERED, gathered[path.stem]()) if path.stem in gathered else text, encoding="utf-8")
    (folder / "api" / "index.md").write_text(api_index(), encoding="utf-8")
    for m in modules().values():
        (folder / "api" / f"{m.name}.md").write_text(api_module(m), encoding="utf-8")

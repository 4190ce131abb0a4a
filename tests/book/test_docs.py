"""One lint over the chapters, with few rules: docstrings, the length of lines and cells, pictures with captions."""
import ast
import re
import tokenize
from io import StringIO
from pathlib import Path
from statistics import median, quantiles

import nbformat
import pytest

NBS = Path(__file__).resolve().parents[2] / "nbs"
CHAPTERS = sorted(NBS.glob("*/[0-9]*_*.ipynb"))
FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)
WIDTH, CELL, KERNEL = 110, 45, 60


def in_scripts(path: Path) -> bool:
    "Whether a chapter's code stands in scripts, where lines are read without a screen's width."
    return path.parent.name in ("story", "reference")


def exported(cell, how: str = "export(?:s|i)?") -> bool:
    return cell.cell_type == "code" and bool(re.search(rf"^#\|\s*{how}\s*$", cell.source, re.M))


def length(cell) -> int:
    "Lines of a cell that are neither blank nor directives."
    return sum(bool(line.strip()) and not line.startswith("#|") for line in cell.source.splitlines())


def documented(source: str) -> list[str]:
    "What the public names of a cell lack: a docstring, or the word GolfError in it where their own body raises one."
    found = []
    for node in ast.parse(source).body:
        inner = [m for m in getattr(node, "body", ()) if isinstance(m, FUNCTION)] if isinstance(node, ast.ClassDef) else []
        for n in (node, *inner):
            if not isinstance(n, (*FUNCTION, ast.ClassDef)) or n.name.startswith("_") or isinstance(node, ast.ClassDef) and node.name.startswith("_"):
                continue
            doc = ast.get_docstring(n) or ""
            raised = [r for r in ast.walk(n) if isinstance(r, ast.Raise) and "GolfError" in ast.dump(r)] if isinstance(n, FUNCTION) else []
            found += [f"{n.name}: no docstring"] * (not doc) + [f"{n.name}: raises GolfError and does not say so"] * bool(raised and not re.search("GolfError|[Rr]aise", doc))
    return found


def parameter_comments(source: str) -> list[str]:
    heads = {i: n.name for n in ast.walk(ast.parse(source)) if isinstance(n, FUNCTION) for i in range(n.lineno, n.body[0].lineno)}
    return [f"{heads[t.start[0]]}: a comment behind a parameter: {t.string}" for t in tokenize.generate_tokens(StringIO(source).readline) if t.type == tokenize.COMMENT and t.start[0] in heads]


def prints_the_time(cell) -> bool:
    "Whether a cell shows what a clock said: another machine says something else. Timings are plotted from nbs/results."
    shown = "".join(out.get("text", "") for out in cell.get("outputs", ()))
    clock = re.search(r"\b(perf_counter|process_time|monotonic|time\.time)\(", cell.source)
    return bool(clock and re.search(r"\d (s|ms|us)\b", shown))


def problems(core: bool, cells) -> list[str]:
    "What a chapter's cells do not hold."
    found, captions = [], 0
    for cell in cells:
        if cell.cell_type == "markdown":
            continue
        if exported(cell):
            found += parameter_comments(cell.source) + (documented(cell.source) if exported(cell, "exports?") else [])
            limit = KERNEL if "@triton.jit" in cell.source else CELL
            found += [f"an exported cell of {length(cell)} lines, at most {limit}: {cell.source[:60]!r}"] * (length(cell) > limit)
        if core:
            width = WIDTH - 4 * ("@patch" in cell.source)  # in a script the method stands in its class
            found += [f"a line of {len(line)} characters: {line[:60]}..." for line in cell.source.splitlines() if len(line) > width and not line.startswith("#|")]
        found += [f"prints what a clock said: {cell.source[:60]!r}"] * prints_the_time(cell)
        if any(re.match("image/", kind) for out in cell.get("outputs", ()) for kind in out.get("data", ())):
            wanted = [d for d in ("fig-cap", "code-fold") if not re.search(rf"^#\|\s*{d}: \S", cell.source, re.M)]
            found += [f"a picture without `#| {d}:`: {cell.source[:60]!r}" for d in wanted]
            captions += not wanted
    return found + ["no picture with a caption"] * (not captions)


@pytest.mark.parametrize("path", CHAPTERS, ids=lambda p: p.stem)
def test_a_chapter_holds_the_rules(path):
    found = problems(in_scripts(path), nbformat.read(path, as_version=4).cells)
    assert not found, "\n".join(found)


def test_an_exported_cell_is_one_idea():
    lengths = [length(c) for p in CHAPTERS for c in nbformat.read(p, as_version=4).cells if exported(c)]
    assert median(lengths) <= 12 and quantiles(lengths, n=10)[-1] <= 25, (median(lengths), quantiles(lengths, n=10)[-1])


PICTURE = nbformat.v4.new_code_cell("#| code-fold: true\n#| fig-cap: A line.\nplot()", outputs=[nbformat.v4.new_output("display_data", {"image/png": "x"})])
LONG = "#| export\n" + "x = 1\n" * 50
WRONG = [  # a cell, what is said of it
    ("#| exports\ndef f(): pass", "f: no docstring"),
    ("#| exports\n@patch\ndef f(self: A): pass", "f: no docstring"),
    ("#| exports\nclass A:\n    'Doc.'\n    def go(self): pass", "go: no docstring"),
    ("#| exports\ndef f():\n    'Doc.'\n    raise GolfError('no')", "raises GolfError"),
    ("#| exporti\ndef f(\n    x: int,  # rows\n): pass", "a comment behind a parameter: # rows"),
    ("x = 1  #" + "y" * 110, "a line of 118"),
    (LONG, "an exported cell of 50 lines, at most 45"),
]


@pytest.mark.parametrize("source, words", WRONG)
def test_each_rule_can_fail(source, words):
    found = problems(True, [PICTURE, nbformat.v4.new_code_cell(source)])
    assert len(found) == 1 and words in found[0], found


def test_what_is_in_order_passes_and_a_picture_is_wanted():
    good = ["#| exporti\ndef f(): pass", "#| exports\ndef _f(): pass", "#| exports\ndef f(x: int):\n    'Raises GolfError always.'\n    raise GolfError(x)", "#| export\n@triton.jit\ndef _k(): pass\n" + "x = 1\n" * 50]
    assert not problems(True, [PICTURE, *map(nbformat.v4.new_code_cell, good)]) and problems(True, []) == ["no picture with a caption"]
    assert len(problems(True, [PICTURE, nbformat.v4.new_code_cell("plot()", outputs=PICTURE.outputs)])) == 2


def test_what_a_clock_said_is_not_printed():
    timed = nbformat.v4.new_code_cell("start = time.perf_counter()", outputs=[nbformat.v4.new_output("stream", text="taken 0.03 s\n")])
    assert problems(True, [PICTURE, timed]) == ["prints what a clock said: 'start = time.perf_counter()'"]


SOURCES = {  # chapter -> papers and pull requests whose ideas it takes, and names
    "layers": "1910.07467 2104.09864 2010.04245 2305.13245 2109.08668 2408.00118 #399", "loader": "#726", "banks": "#399", "golf": "#549", "spans": "#1530 #2135", "frontier": "#2135 #1667 2505.06708", "newton_schulz": "2505.16932", "grid": "#399 #414",
    "average": "#549 Izmailov", "rules": "Jordan 2510.05491 2502.16982 1711.05101", "engine": "#399 Jordan", "optimizer": "#399", "quantize": "#399 2210.17323 #1394", "trellis": "2603.04956 Ungerboeck Marcellin Viterbi", "bits": "2603.04956 Kolmogorov 1412.1193 2210.17323", "rans": "1311.2540 1402.3392", "ttt": "#549", "adapters": "#77 #1626",
}


@pytest.mark.parametrize("module", SOURCES)
def test_what_others_found_names_its_source(module):
    path = next(p for p in CHAPTERS if p.stem.split("_", 1)[1] == module)
    text = " ".join(c.source for c in nbformat.read(path, as_version=4).cells)
    assert not [s for s in SOURCES[module].split() if s not in text]


def defined(path: Path) -> set[str]:
    "The names that a chapter's exported cells define."
    code = "\n".join(re.sub(r"(?m)^[!%].*", "", cell.source) for cell in nbformat.read(path, 4).cells if exported(cell))
    nodes = ast.parse(code).body
    names = {n.name for n in nodes if isinstance(n, (*FUNCTION, ast.ClassDef))}
    return names | {n.id for node in nodes if isinstance(node, (ast.Assign, ast.AnnAssign)) for n in ast.walk(node) if isinstance(n, ast.Name)}


def stray_references(text: str, names: dict[str, set[str]]) -> list[str]:
    "Chapters that do not exist, and names of a chapter's last lines that the chapter behind them does not define."
    found = [f"chapter {n}" for said in re.findall(r"[Cc]hapters? (\d\d\w?(?:(?:, | and | or | to )\d\d\w?)*)", text)
             for n in re.findall(r"\d\d\w?", said) if n not in names]
    for listed in re.findall(r"Symbols: (.*)", text):
        waiting = []
        for name, chapter in re.findall(r"`(\w+)`|\((?:chapter )?(\d\d\w?)\)", listed):
            if name:
                waiting.append(name)
            else:
                found += [f"{x} ({chapter})" for x in waiting if x not in names.get(chapter, ())]
                waiting = []
    return found


def test_chapters_and_their_names_are_where_others_say():
    names = {path.stem.split("_")[0]: defined(path) for path in CHAPTERS}
    assert stray_references("As chapters 01, 99 and 02b say. Symbols: `bits_per_byte`, `nowhere` (chapter 01), `Loader` (02).", names) == ["chapter 99", "nowhere (01)", "Loader (02)"]
    for path in NBS.rglob("*.ipynb"):
        text = "\n".join(cell.source for cell in nbformat.read(path, 4).cells)
        assert stray_references(text, names) == [], path.name

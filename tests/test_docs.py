"""Every public name says what it is: a docstring; what each parameter means, tensors with shape and dtype, numbers with their unit; and the errors it raises.

Rules that a program can check, over golfnb/*.py as exported:
  - a public function, class or method has a docstring, or a remark on its own line;
  - a parameter has a comment on its line, or is named in the docstring, or is annotated with a type that says it all (a class of golfnb,
    a path, a module of torch's, a command's parsed arguments), or its name is explained elsewhere in the same chapter, or in a table
    of names: its chapter's, or chapter 00's of those that mean the same everywhere;
  - a tensor or array has its shape there: brackets, or the words 0-dim, scalar, shape or any;
  - it has its dtype there too: a dtype's name (float alone is any floating dtype), or the word dtype, as in "dtype of x";
  - a result that holds a tensor or array has both on the line of its type, or in the docstring;
  - a float has its unit there, as parameter, result or field: a unit, a word for a number without one (ratio, factor, share, ...),
    or a name that carries it (`_ms`, `_bytes`, `_bpb`, `lr`, ...); so has an int whose name is that of a size, a length or a time;
  - a field of a public dataclass or named tuple is explained as a parameter is; the meaning of a setting is its comment;
  - a row of such a table that gives a shape gives the dtype;
  - a function whose own body raises GolfError says so, or says what else it raises.
"""
import ast
import io
import re
import tokenize
from collections import Counter
from functools import cache
from pathlib import Path

import nbformat
import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "golfnb"
MODULES = sorted(p for p in PACKAGE.glob("*.py") if p.name not in ("__init__.py", "_modidx.py", "train_gpt.py"))
TENSOR = re.compile(r"\b(?:Tensor|ndarray)\b")
SHAPE = re.compile(r"\[|0-dim|\bscalars?\b|\bshapes?\b|\bany\b", re.I)
DTYPE = re.compile(r"\bu?int(?:8|16|32|64)?\b|\bbf(?:loat)?16\b|\bfp(?:16|32|64)\b|\bfloat(?:16|32|64|s)?\b|\bfloating\b|\bintegers?\b|\bbool\b|\bdtypes?\b")
FLOAT, INT = re.compile(r"\bfloat\b"), re.compile(r"\bint\b")
UNIT = re.compile(  # of a float
    r"(?<!['’])\b(?:s|ms|us|[KMG]i?B|(?i:(?:milli|micro)?seconds?|minutes?|hours?|bytes?|bits?|nats?|bpb|T?FLOPs?|logits|per step|units?"
    r"|ratios?|factors?|shares?|fractions?|rates?|probabilit(?:y|ies)|multipliers?|L2 norm|exponents?|decays?|momentum|standard (?:deviation|error)s?|number(?! of)|count))\b"
    r"|\[0, 1\]|\b0 ?(?:to|\.\.) ?1\b|%")
COUNTED = re.compile(r"\b(?:tokens?|steps?|elements?|characters?|channels?|rows|columns|slots|blocks|batches|windows|documents|values|targets|pieces|runs|chunks|samples|snapshots)\b")  # or of an int
CARRIES = re.compile(r"_s$|(?:^|_)(?:ms|us|seconds|bytes|bpb|loss|nats|tokens|gbps|tflops|lr|wd|decay|momentum|share|ratio|eps|steps|multiplier|factor)$")
SIZED = re.compile(r"(?:^|_)(?:size|length|len|timeout|wait|time|budget|limit|cap|every|stride|reserve|capacity|space|width)(?:_|$)")
PLAIN = {"Path", "Path | str", "str | Path", "Path | None", "nn.Module", "argparse.ArgumentParser"}
DEFS = (ast.FunctionDef, ast.AsyncFunctionDef)


def comments(source: str) -> dict[int, str]:  # line -> comment
    return {t.start[0]: t.string for t in tokenize.generate_tokens(io.StringIO(source).readline) if t.type == tokenize.COMMENT}


@cache
def classes() -> set[str]:
    "Names of golfnb's own classes."
    return {n.name for p in MODULES for n in ast.parse(p.read_text(encoding="utf-8")).body if isinstance(n, ast.ClassDef)}


@cache
def glossary(chapter: Path) -> dict[str, str]:  # name -> meaning
    "The names that a chapter explains in a table whose section is called 'Names ...'."
    text = "\n".join(c.source + "\n" for c in nbformat.read(chapter, as_version=4).cells if c.cell_type == "markdown")
    tables = [part.split("\n## ")[0] for part in re.split(r"^## Names\b.*$", text, flags=re.M)[1:]]
    return {name: meaning for names, meaning in re.findall(r"^\| (`.+?`) \| (.+?) \|$", "\n".join(tables), re.M) for name in re.findall(r"`(\w+)`", names)}


def names_for(module: Path) -> dict[str, str]:
    "Chapter 00's names and those of the module's own chapter."
    own = re.search(r"File to edit: \.\./(nbs/\S+\.ipynb)", module.read_text(encoding="utf-8"))[1]
    return glossary(PACKAGE.parent / "nbs" / "00_config.ipynb") | glossary(PACKAGE.parent / own)


def explained(tree, said: dict[int, str]) -> dict[str, str]:  # name -> remarks
    "The parameters that a module explains somewhere."
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, DEFS):
            for name, remark in remarks(node, said).items():
                found[name] = f"{found.get(name, '')} {remark}"
    return found


def remarks(node, said: dict[int, str]) -> dict[str, str]:  # parameter -> the comment on its line
    "A line's comment is about all its parameters; on the last line of a signature it may be about the result, so there it counts for a single one."
    args = [a for a in node.args.posonlyargs + node.args.args + node.args.kwonlyargs if a.arg not in ("self", "cls")]
    alone, last = Counter(a.lineno for a in args), node.returns.end_lineno if node.returns else max((a.lineno for a in args), default=0)
    return {a.arg: said[a.lineno] for a in args if a.lineno in said and (alone[a.lineno] == 1 or a.lineno < last)}


def raises_golf_error(node) -> bool:
    return any(isinstance(n, ast.Raise) and isinstance(n.exc, ast.Call) and getattr(n.exc.func, "id", "") == "GolfError" for n in ast.walk(node))


def unitless(name: str, kind: str, told: str) -> bool:
    "Whether a float, or an int named like a size or a time, is without a unit."
    if CARRIES.search(name) or UNIT.search(told):
        return False
    kind = re.sub(r"Callable\[\[.*?\], .*\]", "", kind)  # a function's own numbers are another matter
    return bool(FLOAT.search(kind) or INT.search(kind) and SIZED.search(name) and not COUNTED.search(told))


def tensor_problems(name: str, kind: str, told: str) -> list[str]:
    "What is not told about a tensor."
    return [f"{name} has no {word}" for word, rule in (("shape", SHAPE), ("dtype", DTYPE)) if TENSOR.search(kind) and not rule.search(told)]


def field_problems(name: str, node: ast.AnnAssign, doc: str, said: dict[int, str], own: set[str], known: dict[str, str]) -> list[str]:
    "What a field of a public class does not say."
    arg, kind, value = node.target.id, ast.unparse(node.annotation), node.value
    meaning = ast.unparse(value) if isinstance(value, ast.Call) and getattr(value.func, "id", "") == "setting" else ""
    told = " ".join(filter(None, (said.get(node.lineno), meaning, known.get(arg), doc if re.search(rf"\b{arg}\b", doc) else "")))
    found = [] if told or kind in PLAIN or own & set(re.findall(r"\w+", kind)) else [f"{name}: field {arg} has no remark"]
    return found + tensor_problems(f"{name}: tensor {arg}", kind, told) + ([f"{name}: field {arg} has no unit"] if unitless(arg, kind, told) else [])


def function_problems(name: str, node, said: dict[int, str], own: set[str], known: dict[str, str]) -> list[str]:
    "What a function does not say."
    doc, first = ast.get_docstring(node) or "", node.body[0].lineno
    heads = [said[i] for i in range(node.lineno, first + 1) if i in said]
    found = [] if doc or heads else [f"{name}: no docstring"]
    args = [a for a in node.args.posonlyargs + node.args.args + node.args.kwonlyargs if a.arg not in ("self", "cls")]
    for a in args:
        kind, remark = ast.unparse(a.annotation) if a.annotation else "", f"{remarks(node, said).get(a.arg, '')} {known.get(a.arg, '')}".strip()
        named = " ".join(part for part in (doc, *heads) if re.search(rf"\b{re.escape(a.arg)}\b", part))
        plain = kind in PLAIN or a.arg == "args" or bool(own & set(re.findall(r"\w+", kind))) or kind == "tl.constexpr"
        if not (remark or named or plain):
            found.append(f"{name}: parameter {a.arg} has no remark")
        found += tensor_problems(f"{name}: tensor {a.arg}", kind, f"{remark} {named}")
        if unitless(a.arg, kind, f"{remark} {named}"):
            found.append(f"{name}: {a.arg} has no unit")
    if node.returns:
        kind, told = ast.unparse(node.returns), f"{doc} {said.get(node.returns.end_lineno, '')}"
        found += tensor_problems(f"{name}: the result", kind, told)
        if unitless(node.name, kind, told):
            found.append(f"{name}: the result has no unit")
    if raises_golf_error(node) and not re.search(r"GolfError|[Rr]aises|[Rr]efuse", " ".join((doc, *heads))):
        found.append(f"{name}: raises GolfError and does not say so")
    return found


def problems(source: str, own: set[str], names: dict[str, str]) -> list[str]:
    "What a module's public names do not say."
    tree, said, found = ast.parse(source), comments(source), []
    here = explained(tree, said)
    known = {n: f"{names.get(n, '')} {here.get(n, '')}".strip() for n in names.keys() | here.keys()}
    public = next((ast.literal_eval(n.value) for n in tree.body if isinstance(n, ast.Assign) and getattr(n.targets[0], "id", "") == "__all__"), None)
    for node in tree.body:
        if isinstance(node, DEFS) and (public is None or node.name in public):
            found += function_problems(node.name, node, said, own, known)
        if isinstance(node, ast.ClassDef) and (public is None or node.name in public):
            found += [] if ast.get_docstring(node) else [f"{node.name}: no docstring"]
            for m in node.body:
                if isinstance(m, ast.AnnAssign):
                    found += field_problems(node.name, m, ast.get_docstring(node) or "", said, own, known)
                if isinstance(m, DEFS) and (not m.name.startswith("_") or m.name == "__init__"):
                    lost = function_problems(f"{node.name}.{m.name}", m, said, own, known)
                    found += [f for f in lost if not (m.name == "__init__" and f.endswith("no docstring"))]  # the class has one
    return found


@pytest.mark.parametrize("path", MODULES, ids=lambda p: p.stem)
def test_public_names_say_what_they_are(path):
    found = problems(path.read_text(encoding="utf-8"), classes(), names_for(path))
    assert not found, f"golfnb/{path.name} (write it in the notebook):\n" + "\n".join(found)


def rows_without_dtype(table: dict[str, str]) -> list[str]:
    "The names of a table that have a shape and no dtype."
    return [name for name, meaning in table.items() if re.search(r"\[|0-dim", meaning) and not DTYPE.search(meaning)]


def test_tables_of_names_say_dtypes():
    for chapter in sorted((PACKAGE.parent / "nbs").glob("[0-9]*.ipynb")):
        assert not rows_without_dtype(glossary(chapter)), chapter.name
    assert rows_without_dtype({"x": "the input, [rows, cols]", "y": "fp32 [rows]", "n": "a count"}) == ["x"]


SILENT = [  # source, what it does not say
    ("def f(): pass", "no docstring"),
    ('def f(n: int):\n    "Doc."', "n has no remark"),
    ('def f(\n    x: torch.Tensor,  # the input, float\n):\n    "Doc."', "x has no shape"),
    ('def f(\n    x: torch.Tensor,  # [rows]\n):\n    "Doc."', "x has no dtype"),
    ('def f(\n    x: torch.Tensor,  # [rows], any\n):\n    "Doc."', "x has no dtype"),
    ('def f(\n    n: int,  # rows\n) -> dict[str, np.ndarray]:  # name -> int64\n    "Doc."', "result has no shape"),
    ('def f(\n    n: int,  # rows\n) -> torch.Tensor:  # [n]\n    "Doc."', "result has no dtype"),
    ('def f(\n    x: torch.Tensor,  # float [rows], the row\'s\n    start: float,  # the row\'s start\n):\n    "Doc."', "start has no unit"),
    ('def f(\n    x: float | None,  # a share\n) -> tuple[float, int]:  # the mean\n    "Doc."', "result has no unit"),
    ('def f(\n    timeout: int = 3,  # how long\n):\n    "Doc."', "timeout has no unit"),
    ('def f():\n    "Doc."\n    raise GolfError("no")', "raises GolfError"),
    ("class A:\n    pass", "no docstring"),
    ('class A:\n    "Doc."\n    def go(self): pass', "no docstring"),
    ('class A:\n    "Doc."\n    n: int', "n has no remark"),
    ('class A:\n    "Doc."\n    x: torch.Tensor  # [rows]', "x has no dtype"),
    ('class A:\n    "Doc."\n    x: np.ndarray  # int64', "x has no shape"),
    ('class A:\n    "Doc."\n    x: float = 1.0  # what it is', "x has no unit"),
    ('class A:\n    "Doc."\n    x: float = setting(1.0, "what it is")', "x has no unit"),
]
SAID = [
    "def _f(): pass",
    'def f(n: int):\n    "Doc of `n`."',
    'def f(\n    x: torch.Tensor,  # float [rows, width]\n    n: int,  # rows: count\n):\n    "Doc."',
    'def f(\n    x: torch.Tensor,  # any shape and dtype\n) -> torch.Tensor:  # shape and dtype of x\n    "Doc."',
    'def f(x: torch.Tensor) -> np.ndarray:\n    "int64 [n], from `x`, bool [n]."',
    'def f(x: float, y_ms: float) -> float:  # seconds\n    "Doc of `x`, a share, and of `y_ms`."',
    'def f(\n    fn: Callable[[float], int],  # bytes at a scale\n    timeout: int,  # seconds\n    size: int,  # tokens\n):\n    "Doc."',
    'def f():\n    "Raises GolfError always."\n    raise GolfError("no")',
    'def f(cfg: Config):\n    "Doc."',
    'class A:\n    "Doc."\n    n: int  # rows\n    cfg: Config\n    x: torch.Tensor  # int64 [n]\n    lr: float = setting(1.0, "learning rate: per step")',
]


@pytest.mark.parametrize("source, words", SILENT)
def test_a_silent_name_is_found(source, words):
    "Each rule can fail."
    found = problems("__all__ = ['f', 'A']\n" + source, {"Config"}, {})
    assert len(found) == 1 and words in found[0], found


@pytest.mark.parametrize("source", SAID)
def test_a_name_that_says_it_all_passes(source):
    assert not problems("__all__ = ['f', 'A']\n" + source, {"Config"}, {})


SOURCES = {  # what comes from a paper or a pull request -> words of its docstring that say which
    "layers": {"rms_norm": "1910.07467", "rotary_tables": "2104.09864", "qk_norm_rope_gain": "2010.04245", "attend": "2305.13245", "exclusive": "PR #399", "squared_leaky": "2109.08668",
               "bigram_rows": "PR #399", "smear": "PR #399", "softcap": "2408.00118"},
    "loader": {"CoprimeSampler": "PR #726", "mixture": "PR #726"}, "banks": {"make_banks": "PR #399"}, "model": {"drawn_state": "PR #549", "skip_factors": "#125"},
    "newton_schulz": {"newton_schulz": "2505.16932"}, "grid": {"best_clip": "PR #399"}, "averaging": {"Ema": "PR #549", "Swa": "Izmailov"},
    "parallel_muon": {"Engine": "PR #399", "muon_update": "Jordan"}, "any_model": {"ParallelMuon": "PR #399"}, "train": {"GridProjector": "PR #399"},
    "quantize": {"quantize_state": "PR #399", "gptq_columns": "2210.17323", "spread_scale": "PR #1794"}, "artifact": {"rans_encode": "1311.2540"},
    "ttt": {"score_first": "PR #549"}, "adapters": {"score_documents": "PR #77"},
}


@pytest.mark.parametrize("module", SOURCES)
def test_what_others_found_names_its_source(module):
    tree = ast.parse((MODULES[0].parent / f"{module}.py").read_text(encoding="utf-8"))
    docs = {n.name: ast.get_docstring(n) or "" for n in tree.body if isinstance(n, (*DEFS, ast.ClassDef))}
    assert {n: docs.get(n, "no such name") for n, words in SOURCES[module].items() if words not in docs.get(n, "")} == {}

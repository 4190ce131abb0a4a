"""Every public name says what it is: a docstring; what each parameter means, tensors with their shape; and the errors it raises.

Rules that a program can check, over golfnb/*.py as exported:
  - a public function, class or method has a docstring, or a remark on its own line;
  - a parameter has a comment on its line, or is named in the docstring, or is annotated with a type that says it all (a class of golfnb,
    a path, a module of torch's, a command's parsed arguments), or its name is explained elsewhere in the same chapter, or in a table
    of names: its chapter's, or chapter 00's of those that mean the same everywhere;
  - a tensor or array has its shape there: brackets, or the words 0-dim, scalar, shape or any;
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
                found[name] = found.get(name, "") + remark
    return found


def remarks(node, said: dict[int, str]) -> dict[str, str]:  # parameter -> the comment on its line
    "A line's comment is about all its parameters; on the last line of a signature it may be about the result, so there it counts for a single one."
    args = [a for a in node.args.posonlyargs + node.args.args + node.args.kwonlyargs if a.arg not in ("self", "cls")]
    alone, last = Counter(a.lineno for a in args), node.returns.end_lineno if node.returns else max((a.lineno for a in args), default=0)
    return {a.arg: said[a.lineno] for a in args if a.lineno in said and (alone[a.lineno] == 1 or a.lineno < last)}


def raises_golf_error(node) -> bool:
    return any(isinstance(n, ast.Raise) and isinstance(n.exc, ast.Call) and getattr(n.exc.func, "id", "") == "GolfError" for n in ast.walk(node))


def function_problems(name: str, node, said: dict[int, str], own: set[str], known: dict[str, str]) -> list[str]:
    "What a function does not say."
    doc, first = ast.get_docstring(node) or "", node.body[0].lineno
    head = " ".join(said[i] for i in range(node.lineno, first + 1) if i in said)
    found = [] if doc or head else [f"{name}: no docstring"]
    args = [a for a in node.args.posonlyargs + node.args.args + node.args.kwonlyargs if a.arg not in ("self", "cls")]
    for a in args:
        kind, remark = ast.unparse(a.annotation) if a.annotation else "", remarks(node, said).get(a.arg, "") + known.get(a.arg, "")
        named = bool(re.search(rf"\b{re.escape(a.arg)}\b", doc + head))
        plain = kind in PLAIN or a.arg == "args" or bool(own & set(re.findall(r"\w+", kind))) or kind == "tl.constexpr"
        if not (remark or named or plain):
            found.append(f"{name}: parameter {a.arg} has no remark")
        if TENSOR.search(kind) and not SHAPE.search(remark + (doc + head if named else "")):
            found.append(f"{name}: tensor {a.arg} has no shape")
    if raises_golf_error(node) and not re.search(r"GolfError|[Rr]aises|[Rr]efuse", doc + head):
        found.append(f"{name}: raises GolfError and does not say so")
    return found


def problems(source: str, own: set[str], names: dict[str, str]) -> list[str]:
    "What a module's public names do not say."
    tree, said, found = ast.parse(source), comments(source), []
    here = explained(tree, said)
    known = {n: names.get(n, "") + here.get(n, "") for n in names.keys() | here.keys()}
    public = next((ast.literal_eval(n.value) for n in tree.body if isinstance(n, ast.Assign) and getattr(n.targets[0], "id", "") == "__all__"), None)
    for node in tree.body:
        if isinstance(node, DEFS) and (public is None or node.name in public):
            found += function_problems(node.name, node, said, own, known)
        if isinstance(node, ast.ClassDef) and (public is None or node.name in public):
            found += [] if ast.get_docstring(node) else [f"{node.name}: no docstring"]
            for m in node.body:
                if isinstance(m, DEFS) and (not m.name.startswith("_") or m.name == "__init__"):
                    lost = function_problems(f"{node.name}.{m.name}", m, said, own, known)
                    found += [f for f in lost if not (m.name == "__init__" and f.endswith("no docstring"))]  # the class has one
    return found


@pytest.mark.parametrize("path", MODULES, ids=lambda p: p.stem)
def test_public_names_say_what_they_are(path):
    found = problems(path.read_text(encoding="utf-8"), classes(), names_for(path))
    assert not found, f"golfnb/{path.name} (write it in the notebook):\n" + "\n".join(found)


def test_a_silent_name_is_found():
    "Each rule can fail, and what keeps it passes."
    bad = ["def f(): pass", 'def f(n: int):\n    "Doc."', 'def f(\n    x: torch.Tensor,  # the input\n):\n    "Doc."', 'def f():\n    "Doc."\n    raise GolfError("no")', "class A:\n    pass", 'class A:\n    "Doc."\n    def go(self): pass']
    good = ["def _f(): pass", 'def f(n: int):\n    "Doc of `n`."', 'def f(\n    x: torch.Tensor,  # [rows, width]\n    n: int,  # rows: count\n):\n    "Doc."', 'def f():\n    "Raises GolfError always."\n    raise GolfError("no")', 'def f(cfg: Config):\n    "Doc."']
    assert all(len(problems("__all__ = ['f', 'A']\n" + b, {"Config"}, {})) == 1 for b in bad)
    assert not any(problems("__all__ = ['f', 'A']\n" + g, {"Config"}, {}) for g in good)


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

"""The core is what scripts are made of: it imports neither tools nor studies nor recipes, and a chapter imports earlier ones only."""
import ast
import re
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).resolve().parent.parent
REFERENCE = ("settings", "config", "run", "any_model", "program")
STORY = ("bpb", "shards", "loader", "layers", "newton_schulz", "layout", "banks", "model", "plan", "parallel_muon", "averaging", "train", "kernels",
         "grid", "quantize", "rans", "artifact", "evaluate", "ttt", "adapters")
CORE = (*REFERENCE, *STORY)
AHEAD = {  # imports of a story's chapter from a later one
    ("model", "kernels"), ("newton_schulz", "kernels"), ("parallel_muon", "kernels"), ("quantize", "evaluate"), ("train", "evaluate"), ("train", "grid")}


def imports(module: str) -> set[str]:
    "Modules of ours that a module imports, anywhere in it, without golfnb in front."
    tree = ast.parse((ROOT / "golfnb" / f"{module}.py").read_text(encoding="utf-8"))
    found = [n for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and n.module]
    return {n.module.removeprefix("golfnb.") for n in found if n.level or n.module.startswith("golfnb.")}


def test_the_core_is_these_files():
    assert sorted(p.stem for p in (ROOT / "golfnb").glob("*.py")) == sorted([*CORE, "__init__", "__main__", "_modidx", "train_gpt"])
    for folder, modules in (("story", STORY), ("reference", REFERENCE)):
        assert {p.stem.split("_", 1)[1] for p in (ROOT / "nbs" / folder).glob("*.ipynb")} == set(modules)


def test_the_core_imports_itself_alone():
    assert not {(m, i) for m in CORE for i in imports(m) if i not in CORE}


def test_a_chapter_of_the_story_imports_earlier_ones():
    at = {m: i for i, m in enumerate(STORY)}
    assert {(m, i) for m in STORY for i in imports(m) if i in at and at[i] > at[m]} == AHEAD


def test_the_story_is_in_the_order_of_its_numbers():
    numbers = {p.stem.split("_", 1)[1]: p.stem.split("_")[0] for p in (ROOT / "nbs" / "story").glob("*.ipynb")}
    assert [*STORY] == sorted(STORY, key=numbers.get)


@pytest.mark.parametrize("path", sorted((ROOT / "nbs").glob("*/[0-9]*.ipynb")), ids=lambda p: p.stem)
def test_a_chapter_makes_a_module_of_its_folder(path):
    found = [m[1] for c in nbformat.read(path, as_version=4).cells if (m := re.search(r"^#\| default_exp (\S+)$", c.source, re.M))]
    name = path.stem.split("_", 1)[1]
    core = path.parent.name in ("story", "reference")
    assert found == ([] if "_study_" in path.stem else [name if core else f"{path.parent.name}.{name}"])

"""Every chapter ends with two exercises whose answers are asserts, and states how long it takes on a CPU."""
import re
from pathlib import Path

import nbformat
import pytest
from notebooks import stated_seconds, untrue_seconds

WITHOUT = ("config", "rans", "harness", "checkpoint", "watch", "drill")  # chapters that ask nothing yet
CHAPTERS = sorted(p for p in (Path(__file__).resolve().parents[2] / "nbs").glob("*/[0-9]*_*.ipynb") if not p.stem.endswith(WITHOUT) and "_study_" not in p.stem)
ASSERTS = re.compile(r"^\s*assert\b|\bassert_close\(|raise AssertionError", re.M)


@pytest.mark.parametrize("path", CHAPTERS, ids=lambda p: p.stem)
def test_two_exercises_with_asserted_answers(path):
    cells = nbformat.read(path, as_version=4).cells
    start = next((i for i, c in enumerate(cells) if c.cell_type == "markdown" and re.search(r"^## Exercises$", c.source, re.M)), None)
    assert start is not None, "a section '## Exercises' at the end"
    asked = "\n".join([cells[start].source.split("## Exercises")[1], *(c.source for c in cells[start + 1:] if c.cell_type == "markdown")])
    answers = [c.source for c in cells[start + 1:] if c.cell_type == "code"]
    assert len(re.findall(r"^\d\. ", asked, re.M)) >= 2, "two questions, numbered"
    assert sum(len(ASSERTS.findall(a)) for a in answers) >= 2, "each answer asserts what it claims"
    assert not re.search(r"^#\|\s*exports?\b", "\n".join(answers), re.M), "answers are no part of the package"


@pytest.mark.parametrize("path", CHAPTERS, ids=lambda p: p.stem)
def test_a_chapter_states_its_run_time(path):
    assert stated_seconds(nbformat.read(path, as_version=4)), "write: CPU run time of this chapter: about N s."


def test_a_wrong_run_time_is_refused():
    "notebooks.py compares what is stated with what a run takes; a slow machine is forgiven, a false figure is not."
    assert not untrue_seconds(5, 2) and not untrue_seconds(5, 35) and untrue_seconds(2, 60) and untrue_seconds(60, 4)

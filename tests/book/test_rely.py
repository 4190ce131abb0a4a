"""What the page of promises says: each promise names tests, and they are there."""
import ast
import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def promises() -> dict[str, list[str]]:
    "The promises of the page, each with the tests that it names."
    cells = json.loads((ROOT / "nbs/rely.ipynb").read_text())["cells"]
    found = {}
    for cell in cells:
        if cell["cell_type"] != "code" or "table(\n" not in "".join(cell["source"]):
            continue
        for call in ast.walk(ast.parse("".join(cell["source"]))):
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "table":
                found |= {ast.unparse(row.elts[0]): ast.literal_eval(row.elts[2]).split() for row in call.args}
    return found


PROMISES = promises()


def test_the_page_makes_promises():
    assert len(PROMISES) > 30


@pytest.mark.parametrize("promise", PROMISES)
def test_a_promise_names_tests_that_are_there(promise):
    assert PROMISES[promise]
    for name in PROMISES[promise]:
        file, test = name.split("::")
        (path,) = (ROOT / "tests").rglob(f"{file}.py")
        assert re.search(rf"^def {test}\(", path.read_text(), re.M), name


def test_a_checkpoint_a_minute_cost_what_is_said():
    "When it was measured, on a CPU and on GPUs."
    for name in ("checkpoints_h200_2", "checkpoints_cpu_2"):
        facts = json.loads((ROOT / f"nbs/results/{name}.json").read_text())["facts"]
        assert facts["share_at_60_s"] < 0.01
    assert json.loads((ROOT / "nbs/results/checkpoints_h200_2.json").read_text())["facts"]["next"] < 1.02


def test_every_figure_says_when_it_was_made():
    "With commit and day; no figure without its source."
    for cell in json.loads((ROOT / "nbs/rely.ipynb").read_text())["cells"]:
        for output in cell.get("outputs", []):
            for line in "".join(output.get("data", {}).get("text/markdown", [])).splitlines():
                if "**" in line:
                    assert re.search(r"commit [0-9a-f]{7,}\+?, \d{4}-\d\d-\d\d\)", line), line

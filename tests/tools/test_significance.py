"""Statistics against tables, against SciPy where it is installed, and against themselves; `golfnb compare` from outside."""
import json
import random
from pathlib import Path

import pytest
from tiny import golfnb, one_sentence

from golfnb.settings import GolfError
from golfnb.tools.significance import below_target, compare_runs, run_summary, runs_needed, student_tail, welch

RESULTS = Path(__file__).resolve().parents[2] / "nbs/results"


def runs(folder, scores: dict) -> list:
    "Run directories: (recipe, seed) -> bpb."
    made = []
    for (recipe, seed), value in scores.items():
        path = folder / f"{recipe}-{seed}"
        path.mkdir()
        (path / "summary.json").write_text(json.dumps({"config": {"recipe": recipe, "seed": seed, "run_id": path.name}, "seed": seed, "world": 2, "ema_bpb": value}))
        made.append(str(path))
    return made


@pytest.mark.parametrize("freedom, row", [(1, (3.0777, 12.7062, 63.6567)), (2, (1.8856, 4.3027, 9.9248)), (4, (1.5332, 2.7764, 4.6041)), (10, (1.3722, 2.2281, 3.1693)), (29, (1.3114, 2.0452, 2.7564)), (1000, (1.2824, 1.9623, 2.5808))])
def test_the_table_of_every_textbook(freedom, row):
    for t, p in zip(row, (0.1, 0.025, 0.005)):
        assert abs(student_tail(t, freedom) - p) < 2e-6 + 2e-4 * p and abs(student_tail(-t, freedom) - 1 + p) < 2e-5


def test_against_scipy():
    stats = pytest.importorskip("scipy.stats")
    r = random.Random(0)
    for _ in range(200):
        t, v = r.uniform(-8, 8), 10 ** r.uniform(0, 3)
        assert abs(student_tail(t, v) - stats.t.sf(t, v)) < 1e-11
        a, b = ([r.gauss(m, s) for _ in range(r.randint(2, 9))] for m, s in ((0, 1), (r.uniform(-1, 1), 3)))
        assert abs(welch(a, b)[2] - stats.ttest_ind(a, b, equal_var=False).pvalue) < 1e-10
        assert abs(below_target(a, 0.2) - stats.ttest_1samp(a, 0.2, alternative="less").pvalue) < 1e-10


def test_the_tail_is_a_probability():
    for v in (1, 2.5, 30, 1e5):
        tails = [student_tail(t / 4, v) for t in range(-80, 81)]
        assert all(1 >= a >= b >= 0 for a, b in zip(tails, tails[1:])) and abs(student_tail(0, v) - 0.5) < 1e-9
    assert student_tail(float("inf"), 3) == 0


def test_how_often_it_cries_wolf():
    "Under the null, p <= 0.05 in about 5 % of draws, also for Welch with unequal spreads and sizes."
    r, n = random.Random(1), 3000
    one = sum(below_target([r.gauss(0, 1) for _ in range(4)], 0) <= 0.05 for _ in range(n)) / n
    two = sum(welch([r.gauss(0, 1) for _ in range(4)], [r.gauss(0, 5) for _ in range(7)])[2] <= 0.05 for _ in range(n)) / n
    assert 0.035 < one < 0.065 and 0.03 < two < 0.07


def test_equal_values():
    assert abs(below_target([1, 1], 1) - 0.5) < 1e-12 and below_target([1, 1], 2) == 0 and below_target([1, 1], 0) == 1
    assert welch([1, 1], [1, 1])[2] == 1 and welch([1, 1], [2, 2])[2] == 0 and runs_needed([3.0, 3.1], 2.0) is None


def test_groups_differ_by_more_than_the_seed(tmp_path):
    said = compare_runs(runs(tmp_path, {("a", 1): 1.10, ("b", 1): 1.21, ("a", 2): 1.11, ("b", 2): 1.20, ("b", 3): 1.22, ("c", 1): 1.0}), target=1.3)
    assert "ema_bpb, 6 runs in 3 groups" in said and "recipe=a: n = 2, mean 1.10500" in said and "recipe=b: n = 3" in said and "recipe=c: n = 1" in said
    assert said.count("Welch") == 1 and "one run has no spread" in said
    assert run_summary(tmp_path / "a-1")["seed"] == 1


def test_a_run_whose_artifact_was_replaced_is_refused(tmp_path):
    some = runs(tmp_path, {("a", 1): 1.1, ("a", 2): 1.2})
    (tmp_path / "a-2" / "artifact.golf").write_bytes(b"packed again")
    assert "2 runs in 1 group" in compare_runs(some), "older summaries do not tell"
    path = tmp_path / "a-2" / "summary.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"artifact_sha256": "0" * 64}))
    with pytest.raises(GolfError, match="a-2.*another file .*artifact.golf"):
        compare_runs(some)


def test_result_files_are_runs_too():
    said = compare_runs([RESULTS / f"parity_4gpu_seed{seed}.json" for seed in (1337, 42)], target=3.0)
    assert "2 runs in 1 group" in said and "n = 2" in said


def test_the_command(tmp_path):
    some = runs(tmp_path, {("a", s): 1.1 + 0.001 * s for s in range(3)})
    done = golfnb("compare", *some, "--target", 1.2, cwd=tmp_path)
    assert done.returncode == 0 and "n = 3" in done.stdout and "proved at the level" in done.stdout
    done = golfnb("compare", "nowhere", cwd=tmp_path)
    assert done.returncode == 2 and one_sentence(done.stderr)


def test_compare_leaves_a_page_of_the_runs_that_have_curves(tmp_path):
    some = runs(tmp_path, {("pr549", s): 1.1 + 0.001 * s for s in range(2)})
    done = golfnb("compare", *some, cwd=tmp_path)
    assert done.returncode == 0 and "page" not in done.stdout, "there is nothing to draw"
    for i, run in enumerate(some):
        (tmp_path / run / "metrics.jsonl").write_text("".join(json.dumps({"event": "step", "step": s, "loss": 3.0 - s / 9 + i, "ms": 5.0}) + "\n" for s in range(9)))
    done = golfnb("compare", *some, "--target", 1.2, cwd=tmp_path)
    assert done.returncode == 0 and f"page: {tmp_path}/compare.html" in done.stdout and "Welch" not in done.stdout
    page = (tmp_path / "compare.html").read_text()
    assert "n = 2, mean 1.10050" in page and "proved at the level" in page and all(f"pr549-{s}, running mean" in page for s in range(2))
    done = golfnb("report", some[0], "--against", some[1], cwd=tmp_path)
    assert done.returncode == 2 and one_sentence(done.stderr), "one way to compare"


def test_runs_with_and_without_checkpoints_are_one_group(tmp_path):
    some = runs(tmp_path, {("a", s): 1.1 for s in range(2)})
    path = tmp_path / "a-1" / "summary.json"
    found = json.loads(path.read_text())
    found["config"]["checkpoint_every_s"] = 60.0
    path.write_text(json.dumps(found))
    assert "2 runs in 1 group" in compare_runs(some)


def test_one_value_is_refused_in_a_sentence():
    for call in (lambda: welch([1.0], [1.0, 2.0]), lambda: welch([1.0, 2.0], []), lambda: below_target([1.0], 2.0), lambda: runs_needed([1.0], 2.0)):
        with pytest.raises(GolfError, match="two values .*[01]"):
            call()

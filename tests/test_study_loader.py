"""The study's own tool on a tiny model: it runs, writes what chapter 31 reads, and goes on where it stopped."""
import json
import subprocess
import sys

from conftest import ROOT
from tiny import TINY, clean_env, tiny_data


def test_orders_are_compared_and_taken_up_again(tmp_path):
    (tmp_path / "d").mkdir()
    env = clean_env(**TINY, **tiny_data(tmp_path / "d"), STUDY_FOLDER=str(tmp_path / "r"), STUDY_STEPS="2", STUDY_SEEDS="1,2", STUDY_ORDERS="sequential,packed", PYTHONPATH=str(ROOT))
    done = subprocess.run([sys.executable, str(ROOT / "tests" / "study_loader.py"), "orders"], env=env, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    path = tmp_path / "r" / "loader_study.json"
    found = json.loads(path.read_text())
    runs = found["facts"]["runs"]
    assert [(r["order"], r["steps"], r["seed"]) for r in runs] == [(o, 2, s) for s in (1, 2) for o in ("sequential", "packed")]
    assert {name: len(v) for name, v in found["samples"].items()} == {"sequential, 2 steps": 2, "packed, 2 steps": 2}
    assert len({r["val_loss"] for r in runs}) == 4 and all(r["passes"] > 0 for r in runs)
    first = {k: v for k, v in runs[0].items()}
    path.write_text(json.dumps({**found, "samples": {"sequential, 2 steps": [first["val_loss"]]}, "facts": {**found["facts"], "runs": [first]}}))
    env["STUDY_SEEDS"], env["STUDY_ORDERS"] = "1", "sequential,packed"
    done = subprocess.run([sys.executable, str(ROOT / "tests" / "study_loader.py"), "orders"], env=env, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    again = json.loads(path.read_text())["facts"]["runs"]
    assert [r["order"] for r in again] == ["sequential", "packed"] and again[0] == first and again[1]["val_loss"] == runs[1]["val_loss"], "alone or after others, a run is the same run"

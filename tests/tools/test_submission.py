"""The submission folder of real (tiny) runs is accepted; each planted fault is refused with its own reason."""
import hashlib
import json
import re
import shutil
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
from forked import fork_judged
from tiny import TINY, run_quietly, tiny_data

from golfnb.tools.cli import main_cli
from golfnb.settings import GolfError
from golfnb.recipes import demo
from golfnb.text.shards import write_shard
from golfnb.tools.submission import beats_target, check_submission, make_submission, read_log, run_command

SCRIPT = b"LATE_STEPS = 2\n" + b"# and so on\n" * 2000  # the script itself is checked in chapter 28
WORDS = dict.fromkeys(("author", "github_id", "name", "blurb"), "a")
WHO = ["--author", "A. Reader", "--github-id", "areader", "--name", "A tiny run"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    "Two finished and audited runs of different seeds: their directories."
    root, made = tmp_path_factory.mktemp("submission"), []
    (root / "data").mkdir()
    data = tiny_data(root / "data")
    write_shard(root / "other.bin", np.random.default_rng(0).integers(0, 400, 5000).astype(np.uint16))  # the tiny data's documents repeat, which the audit rightly reports
    for seed in (1, 2):
        folder = root / "runs" / f"s{seed}"
        folder.mkdir(parents=True)
        (folder / "train_gpt.py").write_bytes(SCRIPT)
        run_quietly(demo, {**TINY, **data, "SEED": str(seed), "RUN_ID": f"s{seed}", "RUNS_DIR": str(root / "runs"), "ITERATIONS": "2"}, SCRIPT)
        made.append(folder)
    words = ["--val", str(root / "data" / "fineweb_val_*.bin"), "--tokenizer", str(root / "data" / "tokenizer.model"), "--audit", "--ttt", "--train", str(root / "other.bin")]
    with patch("golfnb.tools.judge.start_process", fork_judged):
        assert main_cli(["score", str(made[0] / "artifact.golf"), *words]) == 0
    audit = json.loads((made[0] / "artifact.audit.json").read_text())  # one audit is enough of a wait: the other run gets the same findings under its own hash
    audit["artifact_sha256"] = hashlib.sha256((made[1] / "artifact.golf").read_bytes()).hexdigest()
    other = read_log((made[1] / "train.log").read_text())
    audit["compared"]["score-first training"]["the log"] = [other.val_loss, other.val_bpb]
    (made[1] / "artifact.audit.json").write_text(json.dumps(audit))
    return made


@pytest.fixture(scope="module")
def folder(runs, tmp_path_factory):
    "Their submission folder, made by the command."
    out = tmp_path_factory.mktemp("out") / "2026-11-21_Tiny"
    assert main_cli(["submission", *map(str, runs), *WHO, "-o", str(out), "--track", "non-record", "--target", "9"]) == 0
    return out


def test_the_folder_of_real_runs_is_accepted(runs, folder, capsys):
    assert sorted(p.name for p in folder.iterdir()) == ["README.md", "audit_seed1.json", "audit_seed2.json", "submission.json", "train_gpt.py", "train_seed1.log", "train_seed2.log"]
    assert main_cli(["submission", "--check", str(folder)]) == 0 and "accepted" in capsys.readouterr().out
    said, summaries = json.loads((folder / "submission.json").read_text()), [json.loads((r / "summary.json").read_text()) for r in runs]
    assert said["val_bpb"] == pytest.approx(np.mean([s["ttt_bpb"] for s in summaries]), abs=1e-7) and said["val_bpb_std"] == pytest.approx(np.std([s["ttt_bpb"] for s in summaries], ddof=1), abs=1e-7)
    assert said["bytes_total"] == max(s["total_bytes"] for s in summaries) and said["target"]["p"] < 0.05
    assert (folder / "train_gpt.py").read_bytes() == (runs[0] / "train_gpt.py").read_bytes()
    readme = (folder / "README.md").read_text()
    assert f"{said['val_bpb']:.4f}" in readme and "RECIPE=demo" in readme and "ITERATIONS=2" in readme and "--nproc_per_node=1" in readme and "one-sided t-test over 2 seeds" in readme


def rewrite(name: str, pattern: str, new: str):
    def change(folder: Path):
        text = (folder / name).read_text()
        assert re.search(pattern, text), pattern
        (folder / name).write_text(re.sub(pattern, new, text))
    return change


FAULTS = {
    "bytes": (rewrite("train_seed2.log", r"Serialized model (\S+): \d+", r"Serialized model \1: 15999000"), "16,000,000"),
    "training time": (rewrite("train_seed2.log", r"train_time:\d+ms", "train_time:600001ms"), "600 s"),
    "evaluation time": (rewrite("train_seed1.log", r"(legal_ttt .*eval_time:)\d+", r"\g<1>600001"), "600 s"),
    "code": (rewrite("train_gpt.py", "LATE_STEPS = 2", "LATE_STEPS = 3"), "train_gpt.py"),
    "seeds": (lambda f: shutil.copy(f / "train_seed1.log", f / "train_seed2.log"), "seed 1"),
    "score": (rewrite("submission.json", r'"val_bpb": (\d)\.\d', r'"val_bpb": \1.0'), "val_bpb"),
    "audit": (rewrite("audit_seed1.json", r'"artifact_sha256": "\w{8}', '"artifact_sha256": "00000000'), "audit_seed1.json"),
    "log": (rewrite("train_seed1.log", r"(?s)artifact_sha256.*", ""), "artifact_sha256"),
    "settings": (rewrite("train_seed1.log", r"device:cpu", "device:NVIDIA H100"), "device"),
    "README": (rewrite("README.md", r"\d\.\d{4}", "0.9999"), "README.md"),
    "files": (lambda f: (f / "README.md").unlink(), "README.md"),
    "submission.json": (rewrite("submission.json", r'"github_id": "\w+"', '"github_id": ""'), "github_id"),
    "hardware": (rewrite("submission.json", r'"track": "non-record"', '"track": "systems"'), "8 H100"),
}


@pytest.mark.parametrize("rule", FAULTS)
def test_a_planted_fault_is_refused_with_its_reason(rule, folder, tmp_path):
    change, words = FAULTS[rule]
    shutil.copytree(folder, tmp_path / "f")
    change(tmp_path / "f")
    found = [f.sentence for f in check_submission(tmp_path / "f") if f.rule == rule]
    assert found and words in found[0], check_submission(tmp_path / "f")


def test_an_audit_of_adapters_is_taken_where_it_compared_their_score_with_the_log(folder, tmp_path):
    for compared in (True, False):
        there = shutil.copytree(folder, tmp_path / str(compared))
        for path in there.glob("audit_seed*.json"):
            audit = json.loads(path.read_text().replace("score-first training", "adapters per document"))
            if not compared:
                del audit["compared"]["adapters per document"]
            path.write_text(json.dumps(audit))
        found = [f.sentence for f in check_submission(there) if f.rule == "audit"]
        assert bool(found) != compared and all("compared no score" in said for said in found), found


@pytest.mark.parametrize("name, pattern, new, words", [
    ("audit_seed1.json", r'(?s)"compared": \{.*?\n \}', '"compared": {}', "compared no score"),
    ("audit_seed1.json", r'"compared": \{', '"compared": 1, "was": {', "compared no score"),
    ("train_seed1.log", r"(legal_ttt_exact val_loss:\S+ val_bpb:)\d\.\d\d", r"\g<1>3.00", "audit what is submitted"),
])
def test_an_audit_that_compared_nothing_or_another_log_is_refused(folder, tmp_path, name, pattern, new, words):
    shutil.copytree(folder, tmp_path / "f")
    rewrite(name, pattern, new)(tmp_path / "f")
    assert any(f.rule == "audit" and words in f.sentence for f in check_submission(tmp_path / "f")), check_submission(tmp_path / "f")


@pytest.mark.parametrize("rule, change, words", [
    ("artifact", lambda r: (r / "artifact.golf").write_bytes((r / "artifact.golf").read_bytes()[:-1] + b"x"), "artifact.golf"),
    ("artifact", rewrite("summary.json", r'"artifact_sha256": "\w{8}', '"artifact_sha256": "00000000'), "summary.json"),
    ("audit", lambda r: (r / "artifact.audit.json").unlink(), "audit_seed2.json"),
    ("settings", rewrite("summary.json", r'"matrix_lr": 0.025', '"matrix_lr": 0.03'), "MATRIX_LR"),
    ("seeds", rewrite("train.log", r"seed:2 ", "seed:1 "), "[1, 1]"),
    ("files", lambda r: (r / "artifact.golf").rename(r / "artifact.golf.over"), "artifact.golf"),
    ("code", rewrite("train.log", r"code_sha256:\w{8}", "code_sha256:00000000"), "train_gpt.py"),
])
def test_a_run_that_does_not_fit_makes_no_folder(rule, change, words, runs, tmp_path):
    other = tmp_path / "s2"
    shutil.copytree(runs[1], other)
    change(other)
    found = make_submission([runs[0], other], tmp_path / "out", WORDS | {"track": "non-record"})
    assert any(f.rule == rule and words in f.sentence for f in found), found
    assert [p.name for p in tmp_path.iterdir()] == ["s2"], "nothing is left behind"


def test_a_record_needs_its_machine_and_its_proof(runs, tmp_path, capsys):
    assert main_cli(["submission", *map(str, runs), *WHO, "-o", str(tmp_path / "f"), "--target", "9.9"]) == 1
    out = capsys.readouterr().out
    assert "hardware: a record" in out and "nothing was written" in out and not (tmp_path / "f").exists()
    rules = {f.rule for f in make_submission(runs[:1], tmp_path / "f", WORDS | {"track": "record"}, 9.9)}
    assert rules == {"hardware", "significance"}, "one seed proves nothing"


def test_bad_input_is_one_sentence(runs, folder, tmp_path):
    for bad, words in ((lambda: check_submission(tmp_path / "no"), str(tmp_path / "no")), (lambda: make_submission(runs, folder, WORDS), f"{folder.name} .*exists"), (lambda: make_submission([], tmp_path, WORDS), "one run")):
        with pytest.raises(GolfError, match=words):
            bad()


def test_what_a_log_says_is_read_as_it_stands(runs):
    t = 0.02 / (0.01 / 3**0.5)
    assert beats_target([1.12, 1.13, 1.14], 1.16, 0.01)["p"] == pytest.approx(0.5 - t / (2 * (2 + t * t) ** 0.5)), "two degrees of freedom"
    facts, text = read_log((runs[1] / "train.log").read_text()), (runs[1] / "train.log").read_text()
    assert facts.seed == 2 and facts.world == 1 and facts.device == "cpu" and facts.steps == 2 and facts.label == "legal_ttt"
    for line in ("gptq: 64 of 64 calibration batches per rank", "sensitivities: 20 of 20 calibration batches on rank 0"):
        assert read_log(f"{text}{line}, 9000ms of 14000ms kept back\n").train_ms == facts.train_ms + 9000, "calibration is training time"
        assert read_log(text + 2 * f"{line}, 9000ms of 14000ms kept back\n").train_ms == facts.train_ms + 9000, "killed in it, and once more"
    claim = {"seeds": [5], "val_tokens": 9, "hardware": "1 x cpu"}
    command = run_command(claim, {"recipe": "pr549", "matrix_lr": 0.03, "qat_banks": True, "seed": 5, "run_id": "x"})
    assert command.startswith("RECIPE=pr549 MATRIX_LR=0.03 QAT_BANKS=1 SEED=5 DATA_PATH=SHARDS") and "--nproc_per_node=1" in command

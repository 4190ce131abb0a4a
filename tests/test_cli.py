"""The command: every subcommand works on a tiny run; bad input gets one line, status 2 and no traceback; --help is fast."""
import json
import re
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from tiny import TINY, golfnb, one_sentence, tiny_data

from golfnb.cli import find_tokenizer, main_cli, read_command, read_settings
from golfnb.config import GolfError
from golfnb.shards import write_shard
from golfnb.ttt import finding

WORDS = [f"{k}={v}" for k, v in TINY.items() if k != "RECIPE"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    "A tiny run made by `golfnb train` on two ranks: (working directory, run directory, data directory)."
    root = tmp_path_factory.mktemp("cli")
    (root / "data").mkdir()
    data = tiny_data(root / "data")
    done = golfnb("train", "--recipe", "demo", *WORDS[:4], "--nproc", 2, *WORDS[4:], *[f"{k}={v}" for k, v in data.items()], "RUN_ID=tiny", cwd=root)
    assert done.returncode == 0, done.stderr[-2000:]
    return root, root / "runs" / "tiny", root / "data", done


def summary(run: Path) -> dict:
    return json.loads((run / "summary.json").read_text())


def test_train_prints_the_table_and_leaves_everything(trained):
    _, run, _, done = trained
    for name in ("train_gpt.py", "train.log", "metrics.jsonl", "summary.json", "artifact.golf", "ema.golf", "raw.golf", "report.html"):
        assert (run / name).is_file(), name
    said = summary(run)
    assert {"unigram_bpb", "raw_bpb", "ema_bpb", "int6_bpb", "sliding_bpb", "ttt_bpb", "artifact_bytes", "code_bytes", "seconds"} <= said.keys()
    assert {"training", "packing", "scoring", "adapting", "compiling"} <= said["seconds"].keys()
    for words in ("score-first TTT", f"{said['ttt_bpb']:.4f}", "room left", "adapting", "bytes readable", "bytes packed", "report: "):
        assert words in done.stdout, words
    page = (run / "report.html").read_text()
    assert page.count("<figure>") == page.count("aria-label=") == 10 and not re.search(r'(src|href)="[^"#]', page)


def test_a_finished_run_is_not_overwritten(trained):
    root, run, data, _ = trained
    before = (run / "train_gpt.py").stat().st_mtime_ns
    done = golfnb("train", "--recipe", "demo", *WORDS, f"DATA_PATH={data}", f"TOKENIZER_PATH={data / 'tokenizer.model'}", "RUN_ID=tiny", cwd=root)
    assert done.returncode == 2 and one_sentence(done.stderr) and "already holds a finished run" in done.stderr
    assert (run / "train_gpt.py").stat().st_mtime_ns == before


def test_score_from_the_file_alone_gives_the_runs_numbers(trained):
    root, run, data, _ = trained
    words = [w for w in WORDS if w.split("=")[0] in ("EVAL_SEQ_LEN", "EVAL_STRIDE", "VAL_BATCH_SIZE", "TTT_CHUNK_TOKENS", "TTT_EPOCHS", "TTT_BATCH_SEQS")]
    done = golfnb("score", run / "artifact.golf", "--val", data / "fineweb_val_*.bin", "--tokenizer", data / "tokenizer.model", "--ttt", *words, cwd=root)
    assert done.returncode == 0, done.stderr
    found = {m[1]: float(m[2]) for m in re.finditer(r"^(\w+)_exact val_loss:\S+ val_bpb:(\S+)$", done.stdout, re.M)}
    assert found["final_int6_sliding_window"] == pytest.approx(summary(run)["sliding_bpb"], abs=1e-6)
    assert found["legal_ttt"] == pytest.approx(summary(run)["ttt_bpb"], abs=1e-4)


@pytest.mark.parametrize("form", ["chunks", "adapters"])
def test_score_gives_the_same_numbers_on_two_ranks(trained, capfd, form):
    _, run, data, _ = trained
    words = [w for w in WORDS if w.split("=")[0] in ("EVAL_SEQ_LEN", "EVAL_STRIDE", "VAL_BATCH_SIZE", "TTT_CHUNK_TOKENS", "TTT_EPOCHS", "TTT_BATCH_SEQS")]
    score = ["score", str(run / "artifact.golf"), "--val", str(data / "fineweb_val_*.bin"), "--tokenizer", str(data / "tokenizer.model"), "--ttt", *words, f"TTT_FORM={form}", "TTT_CHUNK_SIZE=32", "TTT_BATCH_SIZE=16", "TTT_LORA_RANK=4"]
    found = []
    for more in ([], ["--nproc", "2"]):
        status = main_cli([*score, *more])
        out, err = capfd.readouterr()
        assert status == 0 and f"{len(found) + 1} rank" in out and out.count("_exact") == 2, err
        found.append({m[1]: float(m[2]) for m in re.finditer(r"^(\w+)_exact val_loss:(\S+) val_bpb:\S+$", out, re.M)})
    assert found[1] == pytest.approx(found[0], abs=1e-5) and found[0].keys() == {"final_int6_sliding_window", "legal_ttt"}
    assert main_cli([*score, "--nproc", "2", "--audit"]) == 2 and one_sentence(capfd.readouterr().err)


def test_audit_writes_its_report_beside_the_artifact(trained, tmp_path, capsys, monkeypatch):
    _, run, data, _ = trained
    copy = tmp_path / "copy.golf"
    copy.write_bytes((run / "artifact.golf").read_bytes())
    words = [w for w in WORDS if w.split("=")[0] in ("EVAL_SEQ_LEN", "VAL_BATCH_SIZE")] + ["EVAL_STRIDE=64"]
    score = ["score", str(copy), "--val", str(data / "fineweb_val_*.bin"), "--tokenizer", str(data / "tokenizer.model"), *words, "--audit", "--train"]
    write_shard(tmp_path / "other.bin", np.random.default_rng(0).integers(0, 400, 5000).astype(np.uint16))  # the tiny data's documents repeat, which the audit rightly reports
    assert main_cli([*score, str(tmp_path / "other.bin")]) == 0
    report = json.loads((tmp_path / "copy.audit.json").read_text())
    assert report["legal"] and len(report["findings"]) == 9 and report["artifact"] == "copy.golf" and "every condition holds" in capsys.readouterr().out
    monkeypatch.setattr("golfnb.ttt.audit_score", lambda *a: {"legal": False, "findings": [finding("single pass", "files", False, "planted") | {"scorer": "files"}]})
    assert main_cli([*score, str(tmp_path / "other.bin")]) == 1, "what fails is no success"
    assert not json.loads((tmp_path / "copy.audit.json").read_text())["legal"] and "NOT legal" in capsys.readouterr().out


def test_quantize_with_gptq(trained, tmp_path, capsys):
    _, run, _, _ = trained
    before = summary(run)
    target = before["code_bytes"] + int(0.8 * before["artifact_bytes"])
    assert main_cli(["quantize", str(run), "--gptq", "--target-bytes", str(target), "-o", str(tmp_path / "g.golf")]) == 0
    size = (tmp_path / "g.golf").stat().st_size + before["code_bytes"]
    assert "full-Hessian GPTQ" in capsys.readouterr().out and 0.98 * (target - before["code_bytes"]) < size - before["code_bytes"] <= target - before["code_bytes"]


def test_score_refuses_another_tokenizer_and_a_model_setting(trained, tmp_path):
    root, run, data, _ = trained
    other = tmp_path / "other.model"
    other.write_bytes((data / "tokenizer.model").read_bytes() + b"\x00")
    done = golfnb("score", run / "artifact.golf", "--val", data / "fineweb_val_*.bin", "--tokenizer", other, cwd=root)
    assert done.returncode == 2 and one_sentence(done.stderr) and "tokenizer" in done.stderr
    done = golfnb("score", run / "artifact.golf", "--val", data / "fineweb_val_*.bin", "--tokenizer", data / "tokenizer.model", "NUM_LAYERS=3", cwd=root)
    assert done.returncode == 2 and one_sentence(done.stderr) and "fixed by the artifact" in done.stderr
    done = golfnb("score", run / "artifact.golf", "--val", data / "nothing_*.bin", "--tokenizer", data / "tokenizer.model", cwd=root)
    assert done.returncode == 2 and one_sentence(done.stderr) and "nothing_" in done.stderr


def test_sample_continues_the_prompt(trained):
    root, run, data, _ = trained
    done = [golfnb("sample", run / "artifact.golf", "Return the", "--tokenizer", data / "tokenizer.model", "--tokens", 12, cwd=root) for _ in range(2)]
    assert done[0].returncode == 0, done[0].stderr
    assert done[0].stdout.startswith("Return the") and len(done[0].stdout) > 15 and done[0].stdout == done[1].stdout
    done = golfnb("sample", run / "artifact.golf", "x", cwd=root)
    assert done.returncode == 2 and one_sentence(done.stderr) and "--tokenizer" in done.stderr


def test_quantize_again_and_to_a_target(trained, tmp_path):
    root, run, _, _ = trained
    before = summary(run)
    again = golfnb("quantize", run, "-o", tmp_path / "same.golf", cwd=root)
    assert again.returncode == 0, again.stderr
    assert (tmp_path / "same.golf").read_bytes() == (run / "artifact.golf").read_bytes()
    target = before["code_bytes"] + int(0.9 * before["artifact_bytes"])
    done = golfnb("quantize", run, "--target-bytes", target, "-o", tmp_path / "small.golf", cwd=root)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "small.golf").stat().st_size + before["code_bytes"] <= target and "standard deviations" in done.stdout
    done = golfnb("quantize", run, "--target-bytes", 1000, "-o", tmp_path / "none.golf", cwd=root)
    assert done.returncode == 2 and one_sentence(done.stderr) and not (tmp_path / "none.golf").exists()


def test_artifact_inspect_needs_the_file_only(trained, tmp_path):
    root, run, _, _ = trained
    done = golfnb("artifact", "inspect", run / "artifact.golf", "--tensors", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "blocks.1.mlp.fc.weight" in done.stdout and "int6" in done.stdout and "room left" in done.stdout and "num_layers=2" in done.stdout
    torn = tmp_path / "torn.golf"
    torn.write_bytes((run / "artifact.golf").read_bytes()[:-7])
    done = golfnb("artifact", "inspect", torn, cwd=tmp_path)
    assert done.returncode == 2 and one_sentence(done.stderr) and "torn.golf" in done.stderr


def test_data_inspect_goes_on_after_a_bad_file(trained, tmp_path):
    root, _, data, _ = trained
    (tmp_path / "empty.bin").write_bytes(b"")
    done = golfnb("data", "inspect", data / "fineweb_val_000000.bin", tmp_path / "empty.bin", data / "fineweb_train_000000.bin", cwd=root)
    assert done.returncode == 2 and one_sentence(done.stderr) and "empty.bin" in done.stderr
    assert done.stdout.count("highest token") == 2


def test_data_build_from_files(tmp_path):
    text = "The quick brown fox jumps over the lazy dog, number {}. " * 30
    (tmp_path / "docs.jsonl").write_text("\n".join(json.dumps({"text": text.replace("{}", str(i * i))}) for i in range(40)))
    done = golfnb("data", "build", "docs.jsonl", "--out", "shards", "--vocab-size", 300, "--val-fraction", 0.3, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "shards" / "fineweb_train_000000.bin").is_file() and (tmp_path / "shards" / "manifest.json").is_file()
    done = golfnb("data", "build", "docs.jsonl", "--out", "shards", "--tokenizer", "shards/tokenizer.model", cwd=tmp_path)
    assert done.returncode == 2 and one_sentence(done.stderr)
    done = golfnb("data", "build", "nowhere.txt", "--out", "other", cwd=tmp_path)
    assert done.returncode == 2 and one_sentence(done.stderr) and not (tmp_path / "other").exists()


def test_report_again_and_script(trained, tmp_path):
    root, run, _, _ = trained
    done = golfnb("report", run, cwd=root)
    assert done.returncode == 0 and done.stdout.strip().endswith("report.html")
    done = golfnb("script", "--recipe", "golf", "--pack", "--explain", "-o", tmp_path / "out" / "t.py", cwd=root)
    assert done.returncode == 0, done.stderr
    assert "left out" in done.stdout and "# recipe golf" in (tmp_path / "out" / "t.py").read_text()[:400]
    done = golfnb("script", "-o", tmp_path, cwd=root)
    assert done.returncode == 2 and one_sentence(done.stderr)


@pytest.mark.parametrize("argv, words", [
    ([], "COMMAND"), (["tarin"], "tarin"), (["train", "ITERATIONS=many"], "ITERATIONS"), (["train", "ITERATION=3"], "did you mean ITERATIONS"), (["train", "--nproc", "0"], "at least 1"),
    (["train", "--recipe", "pr000"], "pr000"), (["train", "RECIPE=pr000"], "pr000"), (["train", "NUM_HEADS=7"], "NUM_HEADS"), (["train", "GATED_ATTENTION=1"], "not built"), (["train", "--frob"], "--frob"),
    (["train", "--nproc", "5"], "5"), (["script"], "-o"), (["score", "x.golf"], "--val"), (["data"], "build|inspect"), (["data", "inspect"], "FILE"), (["artifact", "inspect", "no.golf"], "no.golf"),
    (["report", "no-run"], "no-run"), (["quantize", "no-run"], "ema.golf"), (["quantize", ".", "--target-bytes", "x"], "whole number"), (["data", "build", "--val-fraction", "2"], "between 0 and 1"),
])
def test_bad_input_gets_one_line_and_status_2(argv, words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    try:
        status = main_cli(argv)
    except SystemExit as e:
        status = e.code
    said = capsys.readouterr()
    assert status == 2 and said.out == "" and one_sentence(said.err) and words in said.err, said.err
    assert not list(tmp_path.rglob("*"))


def test_a_failing_preflight_under_torchrun_is_one_line_too(tmp_path):
    done = golfnb("train", "--recipe", "demo", "--nproc", 2, "DATA_PATH=nowhere", "TOKENIZER_PATH=nowhere.model", "RUN_ID=x", cwd=tmp_path)
    assert done.returncode == 2 and one_sentence(done.stderr), done.stderr
    assert not (tmp_path / "runs" / "x" / "summary.json").exists()


def test_help_is_fast_and_heavy_modules_are_not_imported(tmp_path):
    code = "import sys\nfrom golfnb.cli import main_cli\ntry:\n    main_cli(['--help'])\nexcept SystemExit as e:\n    assert e.code == 0\nprint(sorted({'torch', 'numpy', 'matplotlib'} & set(sys.modules)))"
    start = time.time()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert done.stdout.endswith("[]\n"), done.stdout[-300:] + done.stderr
    assert time.time() - start < 5
    for command in ("demo", "train", "script", "data", "quantize", "artifact", "score", "sample", "report", "submission", "lab", "doctor"):
        assert re.search(rf"^    {command}\s", done.stdout, re.M), command


def test_doctor_ends_with_a_verdict(tmp_path):
    done = golfnb("doctor", cwd=tmp_path)
    assert done.returncode == 0 and done.stdout.splitlines()[-1].startswith("verdict: ready")
    assert all(re.match(r"(ok|note|FAIL) +\S", line) for line in done.stdout.splitlines()[:-1])


def test_settings_may_stand_around_options():
    args = read_command(["train", "SEED=1", "--nproc", "2", "iterations=5"])
    assert read_settings(args.settings) == {"SEED": "1", "ITERATIONS": "5"} and args.nproc == 2


def test_demo_data_is_made_once_and_again_when_documents_change(tmp_path, monkeypatch, capsys):
    import golfnb.data
    from golfnb.cli import DEMO_DATA, demo_data

    docs = golfnb_docs = golfnb.data.stdlib_documents(["json", "csv", "email"])
    monkeypatch.setattr(golfnb.data, "stdlib_documents", lambda: docs)
    monkeypatch.setitem(DEMO_DATA, "vocab_size", 400)
    monkeypatch.setitem(DEMO_DATA, "val_fraction", 0.1)
    demo_data(tmp_path / "data")
    first = (tmp_path / "data" / "fineweb_train_000000.bin").stat().st_mtime_ns
    demo_data(tmp_path / "data")
    assert (tmp_path / "data" / "fineweb_train_000000.bin").stat().st_mtime_ns == first
    assert "sha256" in capsys.readouterr().out
    docs = golfnb_docs[:-3]
    demo_data(tmp_path / "data")
    assert (tmp_path / "data" / "fineweb_train_000000.bin").stat().st_mtime_ns != first


def test_tokenizer_is_looked_for_beside_the_artifact(tmp_path, monkeypatch):
    monkeypatch.delenv("TOKENIZER_PATH", raising=False)
    with pytest.raises(GolfError, match="--tokenizer"):
        find_tokenizer(str(tmp_path / "a.golf"), None)
    (tmp_path / "tokenizer.model").write_bytes(b"x")
    assert find_tokenizer(str(tmp_path / "a.golf"), None) == str(tmp_path / "tokenizer.model")


def test_over_the_cap_keeps_everything_and_says_how_to_go_on(trained):
    root, _, data, _ = trained
    code = (Path(__file__).parent.parent / "golfnb" / "train_gpt.py").stat().st_size
    small, room = code + 50_000, code + 160_000  # the weights take about 152,000 bytes on the coarsest grid
    done = golfnb("train", "--recipe", "demo", *WORDS, f"DATA_PATH={data}", f"TOKENIZER_PATH={data / 'tokenizer.model'}", "RUN_ID=big", "SCALE_FLOOR=1", f"TARGET_BYTES={small}", "TTT_ENABLED=0", cwd=root)
    run = root / "runs" / "big"
    assert done.returncode not in (0, 1) and one_sentence(done.stderr), (done.returncode, done.stderr[-2000:])
    assert f"golfnb quantize runs/big --target-bytes {small}" in done.stderr
    assert not (run / "artifact.golf").exists() and (run / "artifact.golf.over").is_file() and (run / "ema.golf").is_file()
    assert "sliding window" in done.stdout and "over" in (run / "report.html").read_text()
    done = golfnb("quantize", "runs/big", "--target-bytes", room, cwd=root)
    assert done.returncode == 0, done.stderr
    assert (run / "artifact.golf").stat().st_size + (run / "train_gpt.py").stat().st_size <= room

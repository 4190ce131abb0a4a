"""The command: every subcommand works on a tiny run; bad input gets one line, status 2 and no traceback; --help is fast."""
import ast
import hashlib
import json
import re
import shlex
import shutil
import subprocess
import sys
from configparser import ConfigParser
from importlib import metadata
from pathlib import Path

import numpy as np
import pytest
from forked import fork_judged
from tiny import TINY, clean_env, golfnb, one_sentence, tiny_data

from golfnb.tools.cli import GROUPS, every_command, help_text, main_cli, read_command
from golfnb.tools.commands import doctor as doctor_page
from golfnb.tools.programs import RECIPES, every_setting, read_words, recipe_program, setting_groups
from golfnb.tools.report import find_tokenizer
from golfnb.settings import GolfError
from golfnb.text.shards import write_shard
from golfnb.score.ttt import finding

ROOT = Path(__file__).resolve().parents[2]
WORDS = [f"{k}={v}" for k, v in TINY.items() if k != "RECIPE"]
SCORING = [w for w in WORDS if w.split("=")[0] in ("EVAL_SEQ_LEN", "EVAL_STRIDE", "VAL_BATCH_SIZE", "TTT_CHUNK_TOKENS", "TTT_EPOCHS", "TTT_BATCH_SEQS")]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    "A tiny run made by `golfnb train` on two ranks: (working directory, run directory, data directory, what was printed)."
    root = tmp_path_factory.mktemp("cli")
    (root / "data").mkdir()
    data = [f"{k}={v}" for k, v in tiny_data(root / "data").items()]
    done = golfnb("train", "--recipe", "demo", *WORDS[:4], "--nproc", 2, *WORDS[4:], *data, "RUN_ID=tiny", cwd=root)
    assert done.returncode == 0, done.stderr[-2000:]
    return root, root / "runs" / "tiny", root / "data", done


@pytest.fixture(scope="module")
def score(trained):
    "Score the run's artifact: (more words) -> what the command said."
    root, run, data, _ = trained

    def call(*more, artifact=run / "artifact.golf", tokenizer=data / "tokenizer.model", val=data / "fineweb_val_*.bin"):
        return golfnb("score", artifact, "--val", val, "--tokenizer", tokenizer, *more, cwd=root)
    return call


def exact(out: str, what: str) -> dict[str, float]:
    return {m[1]: float(m[2]) for m in re.finditer(rf"^(\w+)_exact .*{what}:(\S+)", out, re.M)}


def summary(run: Path) -> dict:
    return json.loads((run / "summary.json").read_text())


def test_train_prints_the_table_and_leaves_everything(trained):
    _, run, _, done = trained
    for name in ("train_gpt.py", "train.log", "metrics.jsonl", "summary.json", "artifact.golf", "ema.golf", "raw.golf", "report.html", "tokenizer.model"):
        assert (run / name).is_file(), name
    found = summary(run)
    assert {"unigram_bpb", "raw_bpb", "ema_bpb", "int6_bpb", "sliding_bpb", "ttt_bpb", "artifact_bytes", "code_bytes", "seconds"} <= found.keys()
    assert {"training", "packing", "scoring", "adapting", "compiling"} <= found["seconds"].keys()
    for words in ("score-first TTT", f"{found['ttt_bpb']:.4f}", "room left", "adapting", "bytes readable", "bytes packed", "report: ", "step:1/4 train_loss"):
        assert words in done.stdout, words
    page, chunks = (run / "report.html").read_text(), (run / "metrics.jsonl").read_text().count('"ttt"')
    assert page.count("<figure id=") == 2 + (chunks > 1) and not re.search(r'(src|href)="(?!data:,)[^"#]', page)


def test_the_log_says_whose_the_training_loss_is(trained):
    "On two ranks a step's line has rank 0's own loss, and the event has both."
    _, run, _, done = trained
    assert re.search(r"^note: train_loss is of rank 0's micro-batches, .*mean of all ranks$", done.stdout, re.M)
    events = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [e for e in events if e["event"] == "step"]
    printed = [float(x) for x in re.findall(r"^step:\d+/4 train_loss:(\S+)", (run / "train.log").read_text(), re.M)]
    assert printed == pytest.approx([e["own_loss"] for e in steps], abs=6e-5)
    assert summary(run)["losses"] == [e["loss"] for e in steps] != [e["own_loss"] for e in steps]


def test_a_report_has_a_text_where_the_tokenizer_is_known_by_its_hash(trained, tmp_path):
    from golfnb.tools.report import sampled_text, write_report

    text = "256 tokens that the artifact drew, at temperature 0.8 with seed 0, after the beginning of the validation text (grey)"
    assert text in (trained[1] / "report.html").read_text()
    run, config = shutil.copytree(trained[1], tmp_path / "run"), summary(trained[1])["config"]
    (run / "summary.json").write_text(json.dumps(summary(run) | {"config": config | {"tokenizer_path": "gone.model"}}))
    (run / "tokenizer.model").unlink()
    assert "no sampled text: " in write_report(run).read_text()
    (run / "tokenizer.model").write_text("of another run")
    (run / "data").mkdir()
    shutil.copy(config["tokenizer_path"], run / "data" / "tokenizer.model")
    assert text in write_report(run).read_text()
    assert sampled_text(run) == sampled_text(run), "drawn with a seed"
    (run / "summary.json").unlink()
    assert sampled_text(run)[0] == "", "no validation text, no prompt"


def test_weights_go_out_as_safetensors(trained, tmp_path):
    from golfnb.file.artifact import load_weights

    _, run, _, _ = trained
    done = golfnb("artifact", "export", run / "ema.golf", "w.safetensors", cwd=tmp_path)
    assert done.returncode == 0 and "w.safetensors: " in done.stdout, done.stderr
    (_, ours), theirs = load_weights(run / "ema.golf"), pytest.importorskip("safetensors.torch").load_file(tmp_path / "w.safetensors")
    assert ours.keys() == theirs.keys() and all((ours[n].float() == theirs[n]).all() for n in ours)


def test_a_training_without_data_says_how_to_get_some(tmp_path):
    done = golfnb("train", cwd=tmp_path)
    assert done.returncode == 2 and one_sentence(done.stderr) and not list(tmp_path.iterdir()), done.stderr
    assert re.search("fineweb_1024_bpe.model; .*golfnb data build.*golfnb data download", done.stderr), done.stderr


def test_a_finished_run_is_not_overwritten(trained):
    root, run, data, _ = trained
    before = (run / "train_gpt.py").stat().st_mtime_ns
    done = golfnb("train", "--recipe", "demo", *WORDS, f"DATA_PATH={data}", f"TOKENIZER_PATH={data / 'tokenizer.model'}", "RUN_ID=tiny", cwd=root)
    assert done.returncode == 2 and one_sentence(done.stderr) and "runs/tiny" in done.stderr and "RUN_ID" in done.stderr
    assert (run / "train_gpt.py").stat().st_mtime_ns == before


def test_a_score_takes_its_settings_from_the_run(trained, score):
    "Those that `golfnb train` was given, which summary.json has; the command line may say others."
    root, run, _, _ = trained
    done = golfnb("score", run, "--ttt", cwd=root)
    assert done.returncode == 0, done.stderr
    found = exact(done.stdout, "val_bpb")
    assert found["final_int6_sliding_window"] == pytest.approx(summary(run)["sliding_bpb"], abs=1e-6)
    assert found["legal_ttt"] == pytest.approx(summary(run)["ttt_bpb"], abs=1e-4)
    line = re.search(r"^settings: .*", done.stdout, re.M)[0]
    for word in SCORING:
        assert f" {word}" in line
    assert "runs/tiny/summary.json" in line
    other = golfnb("score", run, "EVAL_STRIDE=64", cwd=root)
    assert "stride 64" in other.stdout and " EVAL_STRIDE=64 " in other.stdout
    assert exact(other.stdout, "val_bpb")["final_int6_sliding_window"] != pytest.approx(summary(run)["sliding_bpb"], abs=1e-6)


def test_shards_that_their_manifest_gives_to_another_tokenizer_are_refused(trained, score, tmp_path):
    "Also as calibration; but shards without a manifest, or fewer than it lists, are scored."
    root, run, data, _ = trained
    mine = shutil.copytree(data, tmp_path / "mine")
    for path in mine.glob("*_train_*.bin"):
        path.unlink()
    (shard,) = mine.glob("*_val_*.bin")
    right = exact(score(val=shard).stdout, "val_bpb")
    other = json.loads((mine / "manifest.json").read_text()) | {"tokenizer_sha256": "0123456789abcdef" * 4}
    (mine / "manifest.json").write_text(json.dumps(other))
    shutil.copytree(data, tmp_path / "theirs")
    shutil.copy(mine / "manifest.json", tmp_path / "theirs")
    for done in (score(val=mine / "*_val_*.bin"), score("--audit", "--train", shard), golfnb("quantize", run, "--gptq", cwd=root, DATA_PATH=str(tmp_path / "theirs"))):
        assert done.returncode == 2 and one_sentence(done.stderr) and "0123456789ab" in done.stderr and "tokenizer" in done.stderr, done.stderr
    unknown = shutil.copy(shard, mine / "wiki_val_000001.bin")
    assert exact(score(val=unknown).stdout, "val_bpb") == right, "the manifest does not list it"
    (mine / "manifest.json").unlink()
    assert exact(score(val=shard).stdout, "val_bpb") == right and right


def test_a_score_without_its_runs_summary_says_so(trained, score, tmp_path):
    "A file on its own, then beside the summary of another run."
    copy = shutil.copy(trained[1] / "artifact.golf", tmp_path / "copy.golf")
    for steps in (None, 5):
        if steps:
            (tmp_path / "summary.json").write_text(json.dumps(summary(trained[1]) | {"steps": steps}))
        done = score(artifact=copy)
        assert done.returncode == 0 and "stride 64" in done.stdout and "no summary.json of its run" in done.stdout, done.stderr
    found = exact(score(*SCORING, artifact=copy).stdout, "val_bpb")
    assert found["final_int6_sliding_window"] == pytest.approx(summary(trained[1])["sliding_bpb"], abs=1e-6)


def test_score_gives_the_same_numbers_on_two_ranks(score):
    words = ["--adapters", *SCORING, "TTT_CHUNK_SIZE=32", "TTT_BATCH_SIZE=16", "TTT_LORA_RANK=4"]
    one, two = score(*words), score(*words, "--nproc", 2)
    assert one.returncode == two.returncode == 0 and "1 rank\n" in one.stdout and "2 ranks\n" in two.stdout, two.stderr
    found = exact(one.stdout, "val_loss")
    assert found == pytest.approx(exact(two.stdout, "val_loss"), abs=1e-5) and found.keys() == {"final_int6_sliding_window", "legal_ttt"}
    done = score(*words, "--nproc", 2, "--audit")
    assert done.returncode == 2 and one_sentence(done.stderr)


def test_audit_writes_its_report_beside_the_artifact(trained, score, tmp_path, monkeypatch):
    copy, report = shutil.copy(trained[1] / "artifact.golf", tmp_path / "copy.golf"), tmp_path / "copy.audit.json"
    write_shard(tmp_path / "other.bin", np.random.default_rng(0).integers(0, 400, 5000).astype(np.uint16))  # the tiny data's documents repeat, which the audit rightly reports
    monkeypatch.setattr("golfnb.tools.judge.start_process", fork_judged)
    words = [w for w in SCORING if not w.startswith(("EVAL_STRIDE", "TTT"))] + ["EVAL_STRIDE=64", "--audit", "--train", tmp_path / "other.bin"]
    done = score(*words, artifact=copy)
    found = json.loads(report.read_text())
    assert done.returncode == 0 and found["legal"] and found["artifact"] == "copy.golf" and "every condition holds" in done.stdout and "nothing was compared" in done.stdout, done.stdout + done.stderr
    assert {"files", "plain rows", "sliding window"} <= {f["scorer"] for f in found["findings"]} and not found["compared"]
    monkeypatch.setattr("golfnb.tools.judge.judge", lambda *a: {"legal": False, "compared": False, "findings": [finding("single pass", "files", False, "planted") | {"scorer": "files"}]})
    done = score(*words, artifact=copy)
    assert done.returncode == 1 and not json.loads(report.read_text())["legal"] and "NOT legal" in done.stdout, "what fails is no success"


def test_score_refuses_another_tokenizer_and_a_model_setting(trained, score, tmp_path):
    other = tmp_path / "other.model"
    other.write_bytes((trained[2] / "tokenizer.model").read_bytes() + b"\x00")
    for done, words in ((score(tokenizer=other), "tokenizer"), (score("NUM_LAYERS=3"), "NUM_LAYERS"), (score(val=tmp_path / "nothing_*.bin"), "nothing_")):
        assert done.returncode == 2 and one_sentence(done.stderr) and words in done.stderr


@pytest.mark.parametrize("words, said", [([], "neither; add a text"), (["hi", "-i"], "both; leave one out")])
def test_a_sample_wants_a_prompt_or_asks_for_it(trained, words, said):
    done = golfnb("sample", trained[1], *words, cwd=trained[0])
    assert done.returncode == 2 and one_sentence(done.stderr) and said in done.stderr, done.stderr


def test_sample_continues_the_prompt(trained, tmp_path):
    root, run, data, _ = trained
    done = [golfnb("sample", run / "artifact.golf", "Return the", "--tokenizer", data / "tokenizer.model", "--tokens", 12, cwd=root) for _ in range(2)]
    assert done[0].returncode == 0, done[0].stderr
    assert done[0].stdout.startswith("Return the") and len(done[0].stdout) > 15 and done[0].stdout == done[1].stdout
    assert golfnb("sample", run, "Return the", "--tokens", 12, cwd=root).stdout == done[0].stdout, "the tokenizer beside the artifact"
    done = golfnb("sample", shutil.copy(run / "artifact.golf", tmp_path), "x", cwd=root)
    assert done.returncode == 2 and one_sentence(done.stderr) and "--tokenizer" in done.stderr


@pytest.mark.parametrize("gptq, share", [([], 0.9), (["--gptq"], 0.8)])
def test_quantize_to_a_target(trained, tmp_path, gptq, share):
    root, run, _, _ = trained
    before, room = summary(run), int(share * summary(run)["artifact_bytes"])
    done = golfnb("quantize", run, *gptq, "--target-bytes", before["code_bytes"] + room, "-o", tmp_path / "small.golf", cwd=root)
    assert done.returncode == 0 and ("calibrating on " in done.stdout) == bool(gptq), done.stderr
    assert 0.97 * room < (tmp_path / "small.golf").stat().st_size <= room


def test_a_file_packed_again_stands_beside_and_is_scored_by_the_command_told(trained, tmp_path):
    root, run, data, _ = trained
    run, before = shutil.copytree(run, tmp_path / "it"), summary(run)
    sha = hashlib.sha256((run / "artifact.golf").read_bytes()).hexdigest()
    assert before["artifact_sha256"] == sha and f"artifact_sha256:{sha}" in (run / "train.log").read_text()
    done = golfnb("quantize", run, "--target-bytes", int(0.9 * before["total_bytes"]), cwd=root)
    assert done.returncode == 0 and hashlib.sha256((run / "artifact.golf").read_bytes()).hexdigest() == sha, "the scored file stays"
    words = shlex.split(re.search(r"^this file has no score yet: .*?golfnb (.*)$", done.stdout, re.M)[1])
    assert words[:2] == ["score", str(run / "artifact.requantized.golf")] and words[-1] == "--ttt"
    done = golfnb(*words[:-1], cwd=root)
    assert done.returncode == 0 and "summary.json" in done.stdout and words[1] in done.stdout, done.stderr
    assert exact(done.stdout, "val_bpb")["final_int6_sliding_window"] > before["sliding_bpb"] - 0.01
    assert "another file" not in golfnb("score", run / "artifact.golf", *words[2:-1], cwd=root).stdout


def test_a_file_packed_to_another_place_is_scored_by_the_command_told(trained, tmp_path):
    root, run, _, _ = trained
    done = golfnb("quantize", run, "-o", tmp_path / "same.golf", cwd=root)
    assert "settings: those of the run, from " in done.stdout
    words = shlex.split(re.search(r"^this file has no score yet: .*?golfnb (.*)$", done.stdout, re.M)[1])
    assert {"EVAL_STRIDE=32", "TTT_CHUNK_TOKENS=1024", "--ttt"} <= {*words}
    done = golfnb(*words, cwd=root)
    assert done.returncode == 0, done.stderr
    assert exact(done.stdout, "val_bpb") == pytest.approx({"final_int6_sliding_window": summary(run)["sliding_bpb"], "legal_ttt": summary(run)["ttt_bpb"]}, abs=1e-4)


def test_quantize_again_and_below_what_is_possible(trained, tmp_path):
    root, run, _, _ = trained
    assert golfnb("quantize", run, "-o", tmp_path / "same.golf", cwd=root).returncode == 0
    assert (tmp_path / "same.golf").read_bytes() == (run / "artifact.golf").read_bytes()
    done = golfnb("quantize", run, "--target-bytes", 1000, "-o", tmp_path / "none.golf", cwd=root)
    assert done.returncode == 3 and one_sentence(done.stderr) and "earlier" not in done.stderr and not (tmp_path / "none.golf").exists()
    assert "--target-bytes 1000" not in done.stderr, "what has just failed is no advice"
    least = int(re.search(r"found ([\d,]+)", done.stderr)[1].replace(",", ""))
    assert least == summary(run)["code_bytes"] + (tmp_path / "none.golf.over").stat().st_size, "what --target-bytes counts"
    assert golfnb("quantize", run, "--target-bytes", least, "-o", tmp_path / "none.golf", cwd=root).returncode == 0
    assert not (tmp_path / "none.golf.over").exists()
    kept = (tmp_path / "none.golf").read_bytes()
    done = golfnb("quantize", run, "--target-bytes", 1000, "-o", tmp_path / "none.golf", cwd=root)
    assert done.returncode == 3 and re.search(r"none\.golf\.over, and \S+none\.golf is an earlier one", done.stderr), done.stderr
    assert (tmp_path / "none.golf").read_bytes() == kept
    done = golfnb("quantize", run / "artifact.golf", cwd=root)
    assert done.returncode == 2 and one_sentence(done.stderr) and f"give {run}, " in done.stderr, done.stderr
    done = golfnb("quantize", run, "-o", tmp_path, cwd=root)
    assert done.returncode == 2 and one_sentence(done.stderr) and "directory" in done.stderr and "settings:" not in done.stdout, "said before the work"


def test_a_run_that_has_not_ended_has_nothing_to_score_yet(tmp_path):
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / "progress.json").write_text("{}")
    for command in (["score", "half"], ["sample", "half", "x"], ["play", "half"]):
        done = golfnb(*command, cwd=tmp_path)
        assert done.returncode == 2 and one_sentence(done.stderr) and "golfnb train --resume half" in done.stderr, done.stderr


def test_a_run_over_the_cap_has_a_report_and_can_be_packed_again(trained, tmp_path):
    "As tests/run/test_run.py leaves one."
    run = shutil.copytree(trained[1], tmp_path / "runs" / "big")
    (run / "artifact.golf").rename(run / "artifact.golf.over")
    (run / "summary.json").write_text(json.dumps(summary(run) | {"over_budget": "9 bytes over <the> cap"}))
    done = golfnb("report", run, cwd=tmp_path)
    assert done.returncode == 0 and done.stdout.strip().endswith("report.html")
    page = (run / "report.html").read_text()
    assert "over &lt;the&gt; cap" in page and page.count("<figure id=") == (trained[1] / "report.html").read_text().count("<figure id=")
    room = summary(run)["total_bytes"] - 5000
    done = golfnb("quantize", "runs/big", "--target-bytes", room, cwd=tmp_path)
    assert done.returncode == 0 and (run / "artifact.requantized.golf").stat().st_size + (run / "train_gpt.py").stat().st_size <= room
    assert (run / "artifact.golf.over").is_file() and not (run / "artifact.golf").exists()


def test_artifact_inspect_needs_the_file_only(trained, tmp_path):
    _, run, _, _ = trained
    done = golfnb("artifact", "inspect", run / "artifact.golf", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "int6" in done.stdout and "room left" in done.stdout and "num_layers=2" in done.stdout
    torn = tmp_path / "torn.golf"
    torn.write_bytes((run / "artifact.golf").read_bytes()[:-7])
    done = golfnb("artifact", "inspect", torn, cwd=tmp_path)
    assert done.returncode == 2 and one_sentence(done.stderr) and "torn.golf" in done.stderr


def test_data_build_and_inspect(trained, tmp_path):
    text = "The quick brown fox jumps over the lazy dog, number {}. " * 30
    (tmp_path / "docs.jsonl").write_text("\n".join(json.dumps({"text": text.replace("{}", str(i * i))}) for i in range(40)))
    done = golfnb("data", "build", "docs.jsonl", "--out", "shards", "--vocab-size", 300, "--val-fraction", 0.3, cwd=tmp_path)
    assert done.returncode == 0 and "golfnb train --recipe demo DATA_PATH=shards TOKENIZER_PATH=shards/tokenizer.model" in done.stdout, done.stderr
    assert (tmp_path / "shards" / "docs_train_000000.bin").is_file() and (tmp_path / "shards" / "manifest.json").is_file()
    done = golfnb("data", "build", "docs.jsonl", "--out", "shards", "--tokenizer", "shards/tokenizer.model", cwd=tmp_path)
    assert done.returncode == 2 and one_sentence(done.stderr)
    done = golfnb("data", "build", "nowhere.txt", "--out", "other", cwd=tmp_path)
    assert done.returncode == 2 and one_sentence(done.stderr) and not (tmp_path / "other").exists()
    (tmp_path / "empty.bin").write_bytes(b"")
    done = golfnb("data", "inspect", "shards/docs_val_000000.bin", "empty.bin", cwd=tmp_path)
    assert done.returncode == 2 and one_sentence(done.stderr) and "empty.bin" in done.stderr and done.stdout.count("highest token") == 1


def test_script_of_a_recipe(tmp_path):
    done = golfnb("script", "--recipe", "golf", "-o", "out/t.py", cwd=tmp_path)
    assert done.returncode == 0 and "bytes packed" in done.stdout, done.stderr
    assert "golf" in (tmp_path / "out" / "t.py").read_text()[:400]
    done = golfnb("script", "-o", tmp_path, cwd=tmp_path)
    assert done.returncode == 2 and one_sentence(done.stderr)
    done = golfnb("script", "SEED=7", "ITERATIONS=3", "-o", "other.py", cwd=tmp_path)
    assert done.returncode == 2 and one_sentence(done.stderr) and "found SEED=7" in done.stderr


@pytest.mark.parametrize("argv, words", [
    ([], "COMMAND"), (["tarin"], "did you mean train"), (["train", "ITERATIONS=many"], "ITERATIONS"), (["train", "ITERATION=3"], "did you mean ITERATIONS"), (["train", "--nproc", "0"], "at least 1"),
    (["train", "--recipe", "pr000"], "pr000"), (["train", "RECIPE=pr000"], "pr000"), (["train", "NUM_HEADS=7"], "NUM_HEADS"), (["train", "GATED_ATTENTION=1"], "not built"), (["train", "--frob"], "--frob"),
    (["train", "--nproc", "5"], "5"), (["script"], "-o"), (["score", "x.golf"], "--val"), (["data"], "data build"), (["data", "inspect"], "FILE"), (["artifact", "inspect", "no.golf"], "no.golf"),
    (["report", "no-run"], "no-run"), (["quantize", "no-run"], "ema.golf"), (["quantize", ".", "--target-bytes", "x"], "whole number"), (["data", "build", "--val-fraction", "2"], "between 0 and 1"),
    (["study", "nothing"], "nothing"), (["bench", "nothing"], "nothing"), (["compare", "nowhere"], "nowhere"),
])
def test_bad_input_gets_one_line_and_status_2(argv, words, tmp_path):
    done = golfnb(*argv, cwd=tmp_path)
    assert done.returncode == 2 and done.stdout == "" and one_sentence(done.stderr) and words in done.stderr, done.stderr
    assert not list(tmp_path.rglob("*"))


def test_a_failing_preflight_under_torchrun_is_one_line_too(tmp_path):
    done = golfnb("train", "--recipe", "demo", "--nproc", 1, "DATA_PATH=nowhere", "TOKENIZER_PATH=nowhere.model", "RUN_ID=x", cwd=tmp_path)
    assert done.returncode == 2 and one_sentence(done.stderr), done.stderr
    assert not list(tmp_path.iterdir()), "a run that never began leaves nothing"


def told_without(modules: str, folder: Path, *argv: str) -> str:
    "What `golfnb ARGV` prints where these modules cannot be imported."
    code = f"import sys\nfor name in {modules.split()}: sys.modules[name] = None\nfrom golfnb.tools.cli import main_cli\nsys.exit(main_cli())"
    done = subprocess.run([sys.executable, "-c", code, *argv], capture_output=True, text=True, cwd=folder, env=clean_env())
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_help_imports_nothing_heavy(tmp_path):
    for argv in (["--help"], ["score", "--help"]):
        assert told_without("torch numpy matplotlib sentencepiece", tmp_path, *argv).startswith("usage:")
    with pytest.raises(AssertionError, match="torch"):  # this can fail
        told_without("torch", tmp_path, "doctor")


def test_lists_of_helps_are_what_an_import_would_tell(tmp_path):
    "Without importing torch."
    from golfnb.studies.bench import BENCHES, bench_function
    from golfnb.studies.harness import STUDIES

    for command, functions in (("bench", {what: bench_function(what) for what in BENCHES}), ("study", STUDIES)):
        said = told_without("torch", tmp_path, command, "--help")
        lines = [f"  {name:13s}{function.__doc__ or 'variants side by side'}" for name, function in functions.items()]
        assert said.endswith("\n" + "\n".join(lines) + "\n")
    assert "def build(s: Settings" in told_without("torch", tmp_path, "recipe", "show", "golf")
    assert "recipe mine" in told_without("torch", tmp_path, "recipe", "copy", "golf", "mine.py")


def imports_upwards(path: Path) -> list[str]:
    "What a file of tools imports of the command line, anywhere in it, as an import or as a module's name."
    tree = ast.parse(path.read_text())
    above = ("golfnb.tools.cli", "golfnb.tools.commands")
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            name = node.module if not node.level else f"golfnb.tools.{node.module}"
            found += [name] if name.startswith(above) else []
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "import_module" and node.args:
            found += [node.args[0].value] if isinstance(node.args[0], ast.Constant) and node.args[0].value.startswith(above) else []
    return found


def test_what_commands_do_imports_no_command():
    "The command line is the top: tools and core know nothing of it."
    for path in sorted(ROOT.glob("golfnb/**/*.py")):
        if path.stem not in ("cli", "__main__") and path.parent.name != "commands":
            assert imports_upwards(path) == [], path.name


def test_an_import_of_the_command_line_would_be_found(tmp_path):
    for line in ("from .cli import main_cli", "def f():\n    from golfnb.tools.commands.demo import demo_data", 'x = import_module("golfnb.tools.cli")'):
        (tmp_path / "x.py").write_text(line)
        assert len(imports_upwards(tmp_path / "x.py")) == 1, line


def test_each_file_of_commands_is_of_one_name():
    "The folder is the list: each file's commands begin with its name, and every file has some."
    homes = {name: function.__module__.split(".")[-1] for name, (function, *_) in every_command().items()}
    assert all(name.split()[0] == home for name, home in homes.items() if home != "test_cli")
    assert {*homes.values()} == {path.stem for path in (ROOT / "golfnb/tools/commands").glob("[!_]*.py")}


def test_help_lists_every_command_once(tmp_path):
    done = golfnb("--help", cwd=tmp_path)
    for command in every_command():
        assert len(re.findall(rf"^    {command}\s", done.stdout, re.M)) == 1, command
    assert re.findall(r"^(\w.*):$", done.stdout, re.M) == ["options", *GROUPS], "every command has its group"
    some = golfnb("data", "--help", cwd=tmp_path)
    assert some.returncode == 0 and re.findall(r"^    (data \w+)", some.stdout, re.M) == [name for name in every_command() if name.startswith("data ")]


def test_recipes_and_their_settings_are_listed_without_torch(tmp_path):
    (tmp_path / "mine.py").write_text("raise RuntimeError('a help runs no program')")
    helps = [told_without("torch", tmp_path, "train", *words, "--help") for words in ([], ["mine.py"], ["--recipe", "demo"])]
    assert len({*helps}) == 1 and helps[0].endswith(help_text("train") + "\n")
    listed = told_without("torch", tmp_path, "recipe", "list")
    for name in RECIPES:
        assert f"{name:8s}{recipe_program(name).__doc__}\n" in listed


@pytest.mark.parametrize("name", RECIPES)
def test_the_help_says_of_each_setting_what_the_program_says(name):
    "Groups, settings in their order, defaults, meanings, choices, and published words."
    parts = [part.splitlines() for part in help_text("train").split("\n\n")]
    told = {lines[0]: lines[1:] for lines in parts}
    for group, specs in setting_groups(recipe_program(name)).items():
        heading = f"{group.__module__.removeprefix('golfnb.')} ({group.__name__})"
        for line, spec in zip(told[heading], specs, strict=True):
            start, words = f"{spec.name.upper()}={spec.default} ", spec.metadata["meaning"]
            if spec.metadata["choices"]:
                words += f" ({', '.join(spec.metadata['choices'])})"
            assert line.strip().startswith(start) and line.endswith(f" {words}"), line


def test_the_package_is_the_command(tmp_path):
    done = subprocess.run([sys.executable, "-m", "golfnb", "--version"], capture_output=True, text=True, cwd=tmp_path, env=clean_env())
    assert done.returncode == 0 and done.stdout.startswith("golfnb "), done.stderr
    done = subprocess.run([sys.executable, "-m", "golfnb", "tarin"], capture_output=True, text=True, cwd=tmp_path, env=clean_env())
    assert done.returncode == 2 and one_sentence(done.stderr)


@pytest.mark.parametrize("problem, status", [("GolfError('no room')", 2), ("KeyboardInterrupt", 130)])
def test_what_was_printed_before_an_error_reaches_a_pipe(problem, status):
    "The process ends at once, and may not take along what it has not handed on."
    code = f"""from types import SimpleNamespace
import golfnb.tools.cli as cli
from golfnb.settings import GolfError
def run(args):
    print("half")
    raise {problem}
cli.read_command = lambda argv: SimpleNamespace(run=run)
cli.main_process()"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=clean_env())
    assert (done.returncode, done.stdout) == (status, "half\n") and re.fullmatch("golfnb: .*\n", done.stderr)


def test_train_help_lists_every_setting_once_with_its_chapter(tmp_path):
    done = golfnb("train", "--help", cwd=tmp_path)
    for name in every_setting():
        assert len(re.findall(rf"^  {name.upper()}=", done.stdout, re.M)) == 1, name
    assert re.search(r"^text.loader \(LoaderSettings\)\n(  .*\n)*  TRAIN_BATCH_TOKENS=", help_text("train"), re.M) and "golf" in help_text("train")


def test_doctor_ends_with_a_verdict(tmp_path):
    done = golfnb("doctor", cwd=tmp_path)
    assert done.returncode == 0 and done.stdout.splitlines()[-1].startswith("verdict: ready")
    assert all(re.match(r"(ok|note|FAIL) +\S", line) for line in done.stdout.splitlines()[:-1])


def doctor(monkeypatch, capsys, missing=(), requires=None) -> tuple[int, dict[str, str]]:
    "Status and rows of `golfnb doctor` where some packages are missing, and golfnb requires these."
    def version(name: str) -> str:
        if name in missing:
            raise metadata.PackageNotFoundError(name)
        return "1.0"

    monkeypatch.setattr(doctor_page.metadata, "version", version)
    if requires:
        monkeypatch.setattr(doctor_page.metadata, "requires", lambda name: requires)
    status = main_cli(["doctor"])
    rows = [line.split(maxsplit=2) for line in capsys.readouterr().out.splitlines()]
    return status, {name: f"{verdict} {rest}" for verdict, name, rest in rows}


def declared() -> tuple[list[str], dict[str, list[str]]]:
    "What setup.py says golfnb needs, and each of its extras; of the pins of dev only their file."
    tree = ast.parse((ROOT / "setup.py").read_text())
    (call,) = [node.value for node in tree.body if "setup(" in ast.unparse(node) and isinstance(node, ast.Expr)]
    (extras,) = [word.value for word in call.keywords if word.arg == "extras_require"]
    ini = ConfigParser(delimiters=["="])
    ini.read(ROOT / "settings.ini")
    return ini["DEFAULT"]["requirements"].split(), {key.value: [name.value for name in value.elts if isinstance(name, ast.Constant)] for key, value in zip(extras.keys, extras.values)}


def test_doctor_looks_at_every_package_and_every_extra_of_setup(monkeypatch, capsys):
    needed, extras = declared()
    extras["dev"].append("nbdev==2.4.14")
    requires = needed + [f'{package}; extra == "{extra}"' for extra, names in extras.items() for package in names]
    status, rows = doctor(monkeypatch, capsys, requires=requires)
    assert status == 0 and {f"[{extra}]" for extra in extras} <= rows.keys() and {re.match(r"\w+", name)[0] for name in needed} <= rows.keys()
    for extra, names in extras.items():
        package = re.match(r"[\w-]+", names[-1])[0]
        assert f"{package} 1.0" in rows[f"[{extra}]"] and rows[f"[{extra}]"].startswith("ok")
        status, found = doctor(monkeypatch, capsys, [package], requires)
        row = found[f"[{extra}]"]
        assert status == 0 and row.startswith("note") and package in row and f"pip install golfnb[{extra}]" in row


def test_doctor_fails_without_what_golfnb_needs(monkeypatch, capsys):
    status, rows = doctor(monkeypatch, capsys, ["torch"], ["torch>=2.11", "numpy"])
    assert status == 1 and rows["torch"].startswith("FAIL") and rows["numpy"].startswith("ok") and "torch" in rows["not"]


def test_doctor_says_where_it_cannot_know_the_extras(monkeypatch, capsys):
    def requires(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(doctor_page.metadata, "requires", requires)
    status, rows = doctor(monkeypatch, capsys)
    assert status == 0 and rows["extras"].startswith("note") and "pip install" in rows["extras"]


def test_settings_may_stand_around_options():
    args = read_command(["train", "SEED=1", "--nproc", "2", "iterations=5"])
    assert read_words(args.settings) == {"SEED": "1", "ITERATIONS": "5"} and args.nproc == 2
    assert read_words(["SEED=1", "seed=2"]) == {"SEED": "2"}, "as the help says"


def test_a_study_gets_its_words(monkeypatch, capsys):
    from golfnb.studies import harness as studies

    monkeypatch.setitem(studies.STUDIES, "gates", lambda words: print(*words) or 5)
    assert main_cli(["study", "gates", "run", "A=1"]) == 5 and capsys.readouterr().out == "run A=1\n"


def test_demo_data_is_made_once_and_again_when_documents_change(tmp_path, monkeypatch, capsys):
    from golfnb.tools import data
    from golfnb.tools.commands import demo

    texts = tmp_path / "texts"
    texts.mkdir()
    for i, text in enumerate(data.stdlib_documents(["json", "csv", "email"])):
        (texts / f"{i:03}.txt").write_text(text)
    monkeypatch.setattr(demo, "DEMO_DATA", [str(texts), "--vocab-size", "400", "--val-fraction", "0.1", "--shard-tokens", "100000"])

    def made():
        demo.demo_data(tmp_path / "data")
        return (tmp_path / "data" / "texts_train_000000.bin").stat().st_mtime_ns

    first = made()
    assert made() == first and "sha256" in capsys.readouterr().out
    (texts / "000.txt").unlink()
    assert made() != first


def test_tokenizer_is_looked_for_beside_the_artifact(tmp_path):
    with pytest.raises(GolfError, match="--tokenizer"):
        find_tokenizer(str(tmp_path / "a.golf"))
    (tmp_path / "tokenizer.model").write_bytes(b"x")
    assert find_tokenizer(str(tmp_path / "a.golf")) == str(tmp_path / "tokenizer.model")

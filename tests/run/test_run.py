"""Whole runs: ranks that die or hang, a disk that fills up, and everything a preflight refuses."""
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import time
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from forked import fork_python, run_python
from tiny import TINY, clean_env, one_sentence, run_quietly, settings_for, own_program, tiny_data, waiting
from workers import Batches, machine, settings, spawn, trained

from golfnb.run.average import EmaAndSwa, Swa
from golfnb.text.bpb import tokenizer_hash
from golfnb.model.engine import Ranks
from golfnb.recipes import demo, pr1060
from golfnb.run.run import Run, keep_traces, open_run
from golfnb.settings import GolfError
from golfnb.text.shards import write_shard
from golfnb.tools.cli import main_cli
from golfnb.tools.guard import check_manifest, preflight
from golfnb.tools.programs import find_program, script_text
from golfnb.run.train import RunLog, Trainer, training_loss



@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return tiny_data(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    path = tmp_path_factory.mktemp("script") / "train_gpt.py"
    path.write_text(script_text(demo))
    return path


def children(pid: int) -> list[int]:
    "Processes whose parent is `pid`."
    found = []
    for p in Path("/proc").glob("[0-9]*"):
        try:
            if int((p / "stat").read_text().rsplit(")", 1)[1].split()[1]) == pid:
                found.append(int(p.name))
        except (OSError, ValueError, IndexError):
            pass
    return found


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="looks for the ranks in /proc")
def test_a_rank_that_dies_mid_step_ends_the_run(script, data, tmp_path):
    "The others end, non-zero, and no summary is written."
    env = clean_env(**{**TINY, **data, "ITERATIONS": "100000", "TRAIN_LOG_EVERY": "1000000", "RUN_ID": "dead"})
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", script]
    with open(tmp_path / "log", "w") as log:
        job = fork_python(command, log, log, tmp_path, env)
        while "step:5/" not in (tmp_path / "log").read_text() and job.is_alive():
            time.sleep(0.2)
        ranks = children(job.pid)
        try:
            assert len(ranks) == 2 and "step:5/" in (tmp_path / "log").read_text()
            os.kill(max(ranks), signal.SIGKILL)
            job.join(600)
            assert job.exitcode
        finally:
            for p in [*ranks, job.pid]:
                try:
                    os.kill(p, signal.SIGKILL)
                except ProcessLookupError:
                    pass
    assert not (tmp_path / "runs" / "dead" / "summary.json").exists()


def test_a_late_rank_is_waited_for_and_a_silent_one_is_not():
    "Late by twice the group's timeout, where ranks may finish minutes apart; silent in a collective of a step."
    (before, late, waited), _ = spawn(2, "all_checks", [("limit_waiting", (2.0,)), ("late_partner", (4.0,)), ("silent_partner", ())], timeout_s=100.0)
    assert before == 100.0 and late == 2.0 and 1.5 < waited < 100


def test_disk_full_while_writing_weights(script, data, tmp_path):
    "No file may grow over 20 kB: the weights cannot be written; one sentence, status 2, nothing under a final name."
    (tmp_path / "runs" / "full").mkdir(parents=True)
    shutil.copy(script, tmp_path / "runs" / "full" / "train_gpt.py")  # larger than that, and there already
    done = run_python([script], tmp_path, clean_env(**{**TINY, **data, "RUN_ID": "full", "TMPDIR": str(tmp_path)}),
                      partial(resource.setrlimit, resource.RLIMIT_FSIZE, (20_000, 20_000)))
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert re.search(r"^golfnb: .*raw\.golf.*", done.stderr, re.M), done.stderr
    left = {p.name for p in (tmp_path / "runs" / "full").iterdir()}
    assert left == {"train.log", "metrics.jsonl", "train_gpt.py"}


def test_a_log_that_cannot_be_written_waits(tmp_path, capsys):
    "The file's lines come when there is room; one sentence, whatever the number of lines and files."
    log = RunLog(tmp_path)
    log.line("one")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4, before[1]))
    try:
        log.line("two")
        log.event("three")
        log.line("four")
        assert (tmp_path / "train.log").read_text() == "one\n"
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    log.line("five")
    log.close()
    out, err = capsys.readouterr()
    assert (tmp_path / "train.log").read_text() == "one\ntwo\nfour\nfive\n" and json.loads((tmp_path / "metrics.jsonl").read_text()) == {"event": "three"}
    assert out == "one\ntwo\nfour\nfive\n" and one_sentence(err) and "train.log" in err and "the run goes on" in err


def test_nobody_reads_the_terminal(script, data, tmp_path):
    "As in `python train_gpt.py | head -1`: the run ends well, and its log is whole."
    ours, theirs = (open(fd, mode) for fd, mode in zip(os.pipe(), "rw"))
    with open(tmp_path / "said", "w") as err, theirs:
        job = fork_python([script], theirs, err, tmp_path, clean_env(**{**TINY, **data, "RUN_ID": "unread", "TTT_ENABLED": "0"}))
    ours.readline()
    ours.close()
    job.join(600)
    said = (tmp_path / "said").read_text()
    assert job.exitcode == 0 and one_sentence(said) and "Broken pipe" in said
    assert "final_int6_sliding_window_exact" in (tmp_path / "runs" / "unread" / "train.log").read_text() and (tmp_path / "runs" / "unread" / "summary.json").is_file()


@pytest.fixture
def small_disk(tmp_path):
    "A disk of 70 MiB: a run wants 64 to begin."
    place = tmp_path / "disk"
    place.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=70m", "none", str(place)], capture_output=True).returncode:
        pytest.skip("only root may mount a small disk")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def test_a_disk_that_fills_up_in_training_loses_no_weights(script, data, tmp_path, small_disk):
    "Another program takes all room after step 9 and never gives it back: the run ends well, with its files in the temporary folder."
    wait, slow = tmp_path / "wait", tmp_path / "slow.py"
    wait.touch()
    slow.write_text(waiting(script.read_text()))
    env = clean_env(**{**TINY, **data, "RUN_ID": "full", "RUNS_DIR": str(small_disk), "ITERATIONS": "40", "TRAIN_LOG_EVERY": "1", "TTT_ENABLED": "0", "TMPDIR": str(tmp_path), "CHECKPOINT_EVERY_S": "0"})
    ours, theirs = (open(fd, mode) for fd, mode in zip(os.pipe(), "rw"))
    with open(tmp_path / "said", "w") as err, theirs:
        job = fork_python(["-m", "golfnb.tools.checkpoint", slow], theirs, err, tmp_path, env)
    out = ""
    while "step:5/" not in out and (line := ours.readline()):
        out += line
    with open(small_disk / "other", "wb", buffering=0) as other, suppress(OSError):
        while other.write(bytes(4096)):
            pass
    wait.unlink()
    rest = ours.read()
    job.join(600)
    said = (tmp_path / "said").read_text()
    assert job.exitcode == 0 and "step:40/40" in rest, said
    log, moved = said.splitlines()
    assert "cannot write" in log and "the run goes on" in log and (found := re.search(r"raw\.golf .*this run's files go to (\S+)$", moved)), said
    assert {p.name for p in Path(found[1]).iterdir()} == {"raw.golf", "ema.golf", "artifact.golf", "summary.json"}
    assert {p.name for p in (small_disk / "full").iterdir()} == {"train.log", "metrics.jsonl", "train_gpt.py"}


def test_over_the_byte_budget_the_weights_are_kept(script, data, tmp_path):
    done = run_python([script], tmp_path, clean_env(**{**TINY, **data, "RUN_ID": "over", "TARGET_BYTES": str(script.stat().st_size + 10_000)}))
    run = tmp_path / "runs" / "over"
    assert done.returncode == 3 and "Traceback" not in done.stderr and "--target-bytes" in done.stderr and "too many" in done.stderr
    assert (run / "train_gpt.py").read_bytes() == script.read_bytes()
    assert (run / "artifact.golf.over").is_file() and (run / "ema.golf").is_file() and not (run / "artifact.golf").exists()
    assert "final_int6_sliding_window_exact" in done.stdout
    assert re.search(r"^final_int8_zlib_roundtrip_exact val_loss:\S+ val_bpb:\S+ \(.*by the name of published logs\)$", done.stdout, re.M)


def run_here(data, tmp_path, code=b"", program=demo, **more) -> tuple[dict, str]:
    "A whole run in this process: its summary and its log."
    env = {**TINY, "MODEL_DIM": "48", "NUM_HEADS": "3", "ROPE_DIMS": "8", "SMALL_TENSOR": "4096", **data, "RUNS_DIR": str(tmp_path), "RUN_ID": "here", "RECIPE": program.OWN["recipe"]}
    out = run_quietly(program, {**env, "TTT_ENABLED": "0", **more}, code)
    return out, (tmp_path / "here" / "train.log").read_text()


@pytest.mark.parametrize("asked, left, average", [("swa", "none", lambda tensors: Swa(tensors, 50)), ("ema+swa", "ema", lambda tensors: EmaAndSwa(tensors, 0.9, 50))])
def test_a_capped_run_without_a_snapshot_exports_what_it_has(data, tmp_path, asked, left, average, monkeypatch):
    build = demo.build
    monkeypatch.setattr(demo, "build", lambda *inputs: replace(build(*inputs), make_average=average))
    out, log = run_here(data, tmp_path, MAX_WALLCLOCK_SECONDS="600")
    assert f"AVERAGING={asked} became {left}" in log and out["sliding_bpb"] > 0 and (tmp_path / "here" / "artifact.golf").is_file()


@pytest.mark.parametrize("gptq", [False, True])
def test_a_budget_that_no_grid_meets_keeps_the_coarsest(data, tmp_path, gptq):
    program = own_program("golf_more") if gptq else demo
    out, log = run_here(data, tmp_path, b"#" * 30_000, program, TARGET_BYTES="30000", TTT_CHUNK_SIZE="32", MAX_WALLCLOCK_SECONDS="0")
    assert "over_budget" in out and out["sliding_bpb"] > 0 and (tmp_path / "here" / "artifact.golf.over").is_file() and "cannot quantize" in log


@pytest.mark.parametrize("name, more", [("golf_more", {}), ("pr1060", {"WEIGHT_DTYPE": "bf16"})])
def test_gptq_packs_a_run_again_byte_for_byte(data, tmp_path, name, more):
    "Whatever its weights were kept and computed in; on the published grid, and on one without its floor, by a program of one's own."
    program, named = pr1060, []
    if name != "pr1060":
        text = (Path(__file__).parents[1] / "programs" / f"{name}.py").read_text()
        (tmp_path / "mine.py").write_text(text.replace('recipe="golf"', 'recipe="mine"'))
        program, named = find_program(tmp_path / "mine.py"), ["--program", str(tmp_path / "mine.py")]
    run_here(data, tmp_path, b"", program, MAX_WALLCLOCK_SECONDS="0", GPTQ_CALIB_SAMPLES="2", TTT_CHUNK_SIZE="32", **more)
    assert main_cli(["quantize", str(tmp_path / "here"), *named, "-o", str(tmp_path / "again.golf")]) == 0
    assert (tmp_path / "again.golf").read_bytes() == (tmp_path / "here" / "artifact.golf").read_bytes()


def test_gptq_packs_a_run_that_ended_before_its_summary(data, tmp_path, monkeypatch, capsys):
    "The file of the weights says what model it is; the recipe says the rest."
    run_here(data, tmp_path, MAX_WALLCLOCK_SECONDS="0")
    (tmp_path / "here" / "summary.json").unlink()
    monkeypatch.setenv("DATA_PATH", data["DATA_PATH"])
    command = ["quantize", str(tmp_path / "here"), "--gptq", "-o", str(tmp_path / "again.golf")]
    assert main_cli(command) == 0
    write_shard(tmp_path / "fineweb_train_000000.bin", np.full(100_000, 700, dtype=np.uint16))
    monkeypatch.setenv("DATA_PATH", str(tmp_path))
    assert main_cli(command) == 2 and re.search("VOCAB_SIZE=400, found 700", capsys.readouterr().err)


def test_calibration_ends_in_its_time(data, tmp_path):
    "A batch takes longer than a thousandth of a second, so the first is the last, and the log says so."
    out, log = run_here(data, tmp_path, b"", pr1060, GPTQ_RESERVE_MS="1", MAX_WALLCLOCK_SECONDS="600")
    assert "gptq: 1 of 64 calibration batches per rank, " in log and out["sliding_bpb"] > 0


def test_score_reads_what_the_run_read(data, tmp_path, capfd):
    "Rows shorter than in training, an MLP of a fraction of a channel, a batch that the recipe's rows do not fill, gates: the run's figures from its file."
    out, _ = run_here(data, tmp_path, TRAIN_SEQ_LEN="80", TRAIN_BATCH_TOKENS="640", EVAL_SEQ_LEN="32", MLP_MULT="1.3", TTT_ENABLED="1", TTT_CHUNK_SIZE="16",
                      SMALL_TENSOR="500", MAX_WALLCLOCK_SECONDS="0", program=own_program("golf_more"), GPTQ_CALIB_SAMPLES="2")
    words = [f"{k}={v}" for k, v in {"EVAL_SEQ_LEN": 32, "EVAL_STRIDE": 32, "TTT_CHUNK_SIZE": 16, "TTT_CHUNK_TOKENS": 1024}.items()]
    assert main_cli(["score", str(tmp_path / "here" / "artifact.golf"), "--val", f"{data['DATA_PATH']}/fineweb_val_*.bin", "--tokenizer", data["TOKENIZER_PATH"], "--adapters", *words]) == 0
    found = {m[1]: float(m[2]) for m in re.finditer(r"^(\w+)_exact val_loss:\S+ val_bpb:(\S+)$", capfd.readouterr().out, re.M)}
    assert found["final_int6_sliding_window"] == pytest.approx(out["sliding_bpb"], abs=1e-6) and found["legal_ttt"] == pytest.approx(out["ttt_bpb"], abs=1e-5)
    assert abs(out["ttt_bpb"] - out["sliding_bpb"]) < 0.1, "so small a rate changes little"


def broken(tmp_path: Path, data: dict, kind: str) -> dict:
    "Settings for a run with one thing wrong."
    folder = tmp_path / "shards"
    folder.mkdir()
    for p in Path(data["DATA_PATH"]).glob("*.bin"):
        (folder / p.name).write_bytes(p.read_bytes())
    train, val = folder / "fineweb_train_000000.bin", folder / "fineweb_val_000000.bin"
    header = np.fromfile(train, dtype="<i4", count=256)
    body = train.read_bytes()[1024:]
    env = {**TINY, **data, "DATA_PATH": str(folder), "RUNS_DIR": str(tmp_path / "runs"), "RUN_ID": "x"}
    if kind in ("magic", "version"):
        header[0 if kind == "magic" else 1] = 7
        train.write_bytes(header.tobytes() + body)
    elif kind == "length":
        train.write_bytes(header.tobytes() + body[:-2])
    elif kind == "zero bytes":
        train.write_bytes(b"")
    elif kind == "empty shard":
        write_shard(train, np.zeros(0, np.uint16))
    elif kind == "token over vocabulary":
        write_shard(train, np.full(5000, 60000, np.uint16))
    elif kind == "short validation":
        for p in folder.glob("fineweb_val*"):
            p.unlink()
        write_shard(val, np.ones(20, np.uint16))
    elif kind == "no train shards":
        for p in folder.glob("fineweb_train*"):
            p.unlink()
    elif kind == "shared file":
        val.write_bytes(train.read_bytes())
    return env | {"no tokenizer": {"TOKENIZER_PATH": "gone.model"}, "other vocabulary": {"VOCAB_SIZE": "500"}, "heads": {"NUM_HEADS": "7"},
                  "over cap": {}, "unknown recipe": {"RECIPE": "pr1"}, "does not parse": {"MATRIX_LR": "fast"}, "not built": {"MTP_NUM_HEADS": "2"}}.get(kind, {})


def guarded_open(s):
    "A run as `golfnb train` opens it."
    preflight(s, Ranks())
    return open_run(s, Ranks(), quiet=True)


@pytest.mark.parametrize("kind, words", [
    ("magic", "magic"), ("version", "version"), ("length", "bytes"), ("zero bytes", "bytes"), ("empty shard", "token"), ("token over vocabulary", "60000"), ("short validation", "window|shorter|at least"),
    ("no train shards", "_train_"), ("shared file", "validation"), ("no tokenizer", "gone.model"), ("other vocabulary", "500"), ("heads", "NUM_HEADS"), ("unknown recipe", "pr1"),
    ("does not parse", "MATRIX_LR"), ("not built", "MTP_NUM_HEADS")])
def test_bad_input_is_one_clear_sentence(kind, words, data, tmp_path):
    with pytest.raises(GolfError) as e:
        env = broken(tmp_path, data, kind)
        guarded_open(settings_for(env["RECIPE"], **env))
    said = str(e.value)
    assert re.search(words, said) and "\n" not in said and 30 < len(said) < 500, said
    assert not (tmp_path / "runs").exists()


@pytest.fixture
def named(data, tmp_path):
    "A copy of the shards with their manifest: its folder, and a function that prepares a run on them."
    folder = Path(shutil.copytree(data["DATA_PATH"], tmp_path / "named"))
    env = {**TINY, **data, "DATA_PATH": str(folder), "RUNS_DIR": str(tmp_path / "runs"), "RUN_ID": "x"}
    return folder, lambda **more: guarded_open(settings_for("demo", **env | more))


@pytest.mark.parametrize("change, words", [
    (lambda f: (f / "fineweb_train_000001.bin").unlink(), "4000 .*'fineweb_train_000001.bin'.*None"),
    (lambda f: write_shard(f / "fineweb_train_000001.bin", range(99)), "4000 .*'fineweb_train_000001.bin'.*99"),
    (lambda f: write_shard(f / "fineweb_train_000099.bin", range(99)), "None .*'fineweb_train_000099.bin'.*99"),
    (lambda f: (f / "other.model").write_bytes((f / "tokenizer.model").read_bytes() + b"\xa0\x06\x00"), "another tokenizer"),  # a field nobody reads
])
def test_shards_that_do_not_belong_together_do_not_start(change, words, named, tmp_path):
    folder, session = named
    session().log.close()
    shutil.rmtree(tmp_path / "runs")
    change(folder)
    model = folder / ("other.model" if (folder / "other.model").exists() else "tokenizer.model")
    with pytest.raises(GolfError, match=words) as e:
        session(TOKENIZER_PATH=str(model))
    assert "\n" not in str(e.value) and "manifest.json" in str(e.value) and not (tmp_path / "runs").exists()
    (folder / "manifest.json").unlink()
    session(TOKENIZER_PATH=str(model)).log.close()


def test_no_manifest_makes_a_traceback(named):
    "One place after the other becomes something else, or is gone; and what is no JSON object at all."
    folder, _ = named
    path, sha = folder / "manifest.json", tokenizer_hash(folder / "tokenizer.model")
    whole, places, refused = path.read_text(), [], 0

    def walk(node, way=()):
        for key in node if isinstance(node, dict) else range(min(len(node), 1)) if isinstance(node, list) else ():
            places.append((*way, key))
            walk(node[key], (*way, key))

    walk(json.loads(whole))
    texts = ["", "[]", "3", '"x"', "null", "[" * 10**5, '{"train": 3}', "\ud800", f'{{"x": {"9" * 5000}}}']
    for way in places:
        for new in (None, -1, "\ud800\n", [], {}, [[]], True, 1e400, ...):
            made = node = json.loads(whole)
            for key in way[:-1]:
                node = node[key]
            node.pop(way[-1]) if new is ... else node.__setitem__(way[-1], new)
            texts.append(json.dumps(made))
    for text in texts:
        path.write_bytes(text.encode("utf-8", "surrogatepass"))
        try:
            check_manifest(folder, sha)
        except GolfError as e:
            refused += 1
            assert str(e).encode() and "\n" not in str(e) and len(str(e)) < 500
    assert refused >= len(texts) / 2 > 100


def test_a_world_that_cannot_share_the_batch(data, tmp_path):
    with pytest.raises(GolfError, match="3 ranks"):
        open_run(settings_for("demo", **TINY, **data, RUNS_DIR=str(tmp_path / "runs")), Ranks(0, 3), quiet=True)


def test_traces_of_the_compiled_loss_may_be_kept_on_disk():
    "A warm start skips tracing only if torch finds nothing in the graph that it does not trust."
    import torch
    from torch._functorch._aot_autograd.autograd_cache import check_cacheable

    from golfnb.muon.jit import KERNELS
    from golfnb.model.kernels import fuse

    class Seen(Exception):
        pass

    def backend(gm, inputs):
        graphs.append(gm)
        raise Seen

    p, graphs = demo.build(settings_for("demo", **TINY, DATA_PATH="none"), Ranks()), []
    keep_traces()
    for kernels in ((), KERNELS):
        fuse(p.model, kernels)
        torch._dynamo.reset()
        with pytest.raises(Exception):
            torch.compile(training_loss(p.model, p.model.cap), backend=backend, fullgraph=True)(*torch.randint(300, (2, 2, 16)))
        check_cacheable(graphs[-1])
    assert len(graphs) == 2 and "golfnb" not in str(graphs[0].graph) and "autograd_function_apply" in str(graphs[1].graph)


@pytest.mark.parametrize("more, words", [
    ({"QK_GAIN_INIT": "1e30", "WARMUP_STEPS": "0", "ITERATIONS": "30"}, "gradient .*10 steps .*step 1\\d"),
    ({"TTT_LR": "1e30"}, "test-time training .*nan")])
def test_a_run_that_diverges_ends_in_a_sentence(script, data, tmp_path, more, words):
    "Not as a success whose scores are null."
    done = run_python([script], tmp_path, clean_env(**{**TINY, **data, **more, "RUN_ID": "nan"}))
    said = [line for line in done.stderr.splitlines() if line.startswith("golfnb: ")]
    assert done.returncode == 2 and len(said) == 1 and re.search(words, said[0]) and "Traceback" not in done.stderr, done.stderr[-2000:]
    assert not (tmp_path / "runs" / "nan" / "summary.json").exists()


@pytest.mark.parametrize("more, words", [
    ({"WARMUP_STEPS": str(2**63 - 1)}, "at most 10000"), ({"BIGRAM_DIM": str(2**31 - 1)}, "fit into memory"), ({"MUON_WD": "1e308"}, "int32 or float32")])
def test_what_no_machine_can_hold_ends_in_a_sentence(script, data, tmp_path, more, words):
    "Before anything is built, not as a traceback, and not after training."
    done = run_python(["-m", "golfnb.tools.checkpoint", script], tmp_path, clean_env(**{**TINY, **data, **more, "RUN_ID": "vast"}))
    assert done.returncode == 2 and one_sentence(done.stderr) and re.search(words, done.stderr), done.stderr[-2000:]
    assert not (tmp_path / "runs").exists()


def test_a_score_that_is_not_finite_is_not_kept():
    cfg, model, engine = machine(settings(2), Ranks(), torch.float32)
    with pytest.raises(GolfError, match="validation .*step 0 .*nan"):
        trained(cfg, training_loss(model, model.cap), Batches(cfg, Ranks()), engine, lambda: (float("nan"), float("nan")))
    kept = SimpleNamespace(summary={}, results={}, extras=[])
    kept.once = partial(Run.once, kept)
    with pytest.raises(GolfError, match="legal_ttt .*inf"):
        Run.scored(kept, "legal_ttt", "ttt", lambda: (float("inf"), float("inf")))
    assert kept.summary == kept.results == {}


def test_weights_that_are_not_finite_end_a_training():
    cfg, model, engine = machine(settings(2), Ranks(), torch.float32)

    def score():
        engine.parts[0].fp32_shard.view(-1)[3] = float("inf")
        return 3.0, 1.0

    with pytest.raises(GolfError, match="weights .*step 5"):
        trained(cfg, training_loss(model, model.cap), Batches(cfg, Ranks()), engine, score)


def test_skipped_steps_count_in_a_row():
    trainer = SimpleNamespace(skipped=0, skipped_in_a_row=0, log=RunLog(quiet=True))
    for step in range(1, 40):
        Trainer.count_skipped(trainer, step, 1.0 if step % 10 == 0 else float("nan"))
    assert trainer.skipped == 36
    with pytest.raises(GolfError, match="10 .*step 40"):
        Trainer.count_skipped(trainer, 40, float("inf"))

"""Checkpoints: a run stopped anywhere goes on as if nothing had happened, on any number of ranks; damage and full disks cost a checkpoint, not a run."""
import hashlib
import json
import os
import re
import shutil
import signal
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from golfnb.recipes import demo
from golfnb.tools.checkpoint import LATE_VOTES, SPAN, SPANS, Keeper, Progress, Stopped, named_tensors, open_kept, shard_identity
from golfnb.tools.data import build_shards, stdlib_documents
from golfnb.text.loader import grad_accum
from golfnb.model.layout import packed_as
from golfnb.model.golf import named_state
from golfnb.model.engine import Ranks
from golfnb.tools.report import read_run
from golfnb.settings import GolfError, finite
from golfnb.text.shards import HEADER_BYTES, write_shard
from golfnb.run.train import RunLog, training_loss
from forked import run_python
from tiny import TINY, clean_env, golfnb, one_sentence, tiny_data
from workers import Batches, machine, settings, spawn, trained

ENV = settings(3, ITERATIONS="12", WARMDOWN_ITERS="8", QAT_BANKS="1", LATE_QAT_THRESHOLD="0.7", SCALE_FLOOR="0", SMALL_TENSOR="64", AVERAGING="ema+swa", SWA_EVERY="1")
STOPS = 3, 9  # before and after weights begin to be rounded


class StopAt(Keeper):
    "SIGTERM comes in time to stop after step `last`, on the last rank alone."
    def after_step(self, t):
        if t.steps == self.last - LATE_VOTES and self.ranks.rank == self.ranks.world - 1:
            os.kill(os.getpid(), signal.SIGTERM)
        super().after_step(t)


class Steps(Batches):
    "Its place is counted in steps, whatever number of micro-batches they have."
    def __init__(self, cfg, ranks):
        super().__init__(cfg, ranks, grad_accum(ranks.world))
    def state(self): return self.at // self.accum
    def rewind(self, at): self.at = at * self.accum


@pytest.fixture(autouse=True)
def handler():
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def one_run(ranks, keeper=None):
    "Averages and masters by published name, losses, when rounding began."
    cfg, model, engine = machine(ENV, ranks)
    t = trained(cfg, training_loss(model, model.cap), Steps(cfg, ranks), engine, extras=[keeper] if keeper else [])
    if keeper:
        keeper.wait()
    averaged, last = named_state(model, *engine.gather(t.average.weights())), named_state(model, *engine.gather())
    return [{n: t.numpy() for n, t in state.items()} for state in (averaged, last)], t.losses, t.rounded_from


def lives(ranks, folder: str):
    "A run without interruption, and one that was stopped twice."
    whole = one_run(ranks)
    for last in STOPS:
        keeper = StopAt(Path(folder) / "checkpoints", 1e9, ranks, RunLog(quiet=True))
        keeper.last = last
        try:
            one_run(ranks, keeper)
            raise AssertionError("it did not stop")
        except Stopped as end:
            assert f"after step {last}" in str(end)
    return whole, one_run(ranks, Keeper(Path(folder) / "checkpoints", 1e9, ranks, RunLog(quiet=True)))


def last_life(ranks, folder: str):
    return one_run(ranks, Keeper(Path(folder), 1e9, ranks, RunLog(quiet=True)))


def distance(a, b) -> float:
    return max(float(np.abs(x[n] - y[n]).max()) for x, y in zip(a[0], b[0]) for n in x | y)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_a_stopped_run_goes_on_bit_for_bit_and_on_any_number_of_ranks(tmp_path, world):
    for whole, resumed in spawn(world, "lives", str(tmp_path), module="test_checkpoint"):
        assert distance(whole, resumed) == 0 and whole[1:] == resumed[1:] and whole[2] not in (None, 0)
    kept = tmp_path / "checkpoints"
    assert sorted(p.name for p in kept.iterdir()) == ["step-00000009", "step-00000012"], "the newest two, nothing half written"
    shutil.rmtree(kept / "step-00000012")
    for other in {1, 2, 4} - {world}:
        shutil.copytree(kept, tmp_path / str(other))
        for found in spawn(other, "last_life", str(tmp_path / str(other)), module="test_checkpoint"):
            assert distance(whole, found) < 1e-9 and np.allclose(found[1], whole[1], atol=1e-9)


ASKED = """
import os
import signal
import sys
from pathlib import Path
from golfnb.run import run
from golfnb.tools.checkpoint import Keeper
from golfnb.tools.guard import guarded_rank

def work(ranks):
    keeper = Keeper(Path("runs/x/checkpoints"), 1e9, ranks, None)
    keeper.training = True
    for word in sys.argv[1:]:
        print(word)
        os.kill(os.getpid(), getattr(signal, word))
    keeper.after_training(training)

class training: steps = None

guarded_rank(run, work)
"""


@pytest.mark.parametrize("signals, status, said", [
    ("SIGTERM SIGTERM", 5, "golfnb: stopped by SIGTERM; .*--resume runs/x\n"),
    ("SIGTERM SIGINT", 5, "golfnb: Ctrl-C.*\ngolfnb: stopped by Ctrl-C; .*--resume runs/x\n"),
    ("SIGINT SIGINT SIGTERM", 130, "golfnb: Ctrl-C.*\ngolfnb: interrupted\n"),
    ("SIGINT SIGTERM SIGTERM", 130, "golfnb: Ctrl-C.*\ngolfnb: interrupted\n")])
def test_a_second_signal_after_a_ctrl_c_ends_at_once(tmp_path, signals, status, said):
    "Torchrun sends its ranks SIGTERM where it gets a second SIGINT; some clusters send SIGTERM twice."
    (tmp_path / "asked.py").write_text(ASKED)
    done = run_python([tmp_path / "asked.py", *signals.split()], tmp_path, clean_env())
    assert done.returncode == status and re.fullmatch(said, done.stderr), done.stderr


def test_outside_a_guarded_rank_ctrl_c_stays_as_it_was(tmp_path):
    "In a notebook, for instance."
    before = signal.getsignal(signal.SIGINT)
    keeper = Keeper(tmp_path, 1e9, Ranks(), RunLog(quiet=True))
    assert signal.getsignal(signal.SIGINT) is before and signal.getsignal(signal.SIGTERM) == keeper.on_signal
    keeper.close()
    assert signal.getsignal(signal.SIGTERM) != keeper.on_signal


def test_a_damaged_checkpoint_is_passed_over_and_another_models_refused(tmp_path):
    lines = []
    class Log(RunLog):
        def line(self, text): lines.append(text)
    whole, _ = lives(Ranks(), str(tmp_path))
    newest = tmp_path / "checkpoints" / "step-00000012"
    tensors = next(newest.glob("rank*.pt"))
    good = tensors.read_bytes()
    flipped = bytearray(good)
    flipped[len(good) // 2] ^= 0x40
    def cut(): tensors.write_bytes(good[:len(good) // 2])
    def flip(): tensors.write_bytes(flipped)
    for harm in (cut, flip, tensors.unlink, lambda: (newest / "trainer.json").write_text("{"), (newest / "trainer.json").unlink, lambda: shutil.rmtree(newest)):
        harm()
        lines.clear()
        damaged, keeper = newest.exists(), Keeper(tmp_path / "checkpoints", 1e9, Ranks(), Log(quiet=True))
        again = one_run(Ranks(), keeper)
        assert distance(whole, again) == 0 and any("resumed" in line and "step:9" in line for line in lines)
        assert any("cannot be read" in line for line in lines) == damaged and not any("\n" in line for line in lines)
        keeper.wait()  # it writes the newest again
    cfg, model, engine = machine(ENV | {"NUM_LAYERS": "4", "VE_LAYERS": "3"}, Ranks())
    with pytest.raises(GolfError, match="blocks.3"):
        trained(cfg, training_loss(model, model.cap), Steps(cfg, Ranks()), engine, extras=[Keeper(tmp_path / "checkpoints", 1e9, Ranks(), Log(quiet=True))])


def test_damaged_checkpoints_of_high_numbers_devour_no_later_ones(tmp_path):
    "The newest two are kept, and a damaged one is none of them."
    for name in ("step-00000110", "step-00000113"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "trainer.json").write_text("{")
    lines = []
    class Log(RunLog):
        def line(self, text): lines.append(text)
    keeper = Keeper(tmp_path, 0.0, Ranks(), Log(quiet=True))
    one_run(Ranks(), keeper)
    keeper.wait()
    kept = sorted(p.name for p in tmp_path.glob("step-*"))
    assert len(kept) == 2 and kept[0] < kept[1] == "step-00000012"
    assert sorted(p.name for p in tmp_path.glob("damaged-*")) == ["damaged-step-00000110", "damaged-step-00000113"]
    assert all(any(f"set aside as damaged-{name}" in line for line in lines) for name in ("step-00000110", "step-00000113"))
    assert keeper.newest()[0]["steps"] == 12


def test_what_is_whole_and_cannot_be_loaded_is_not_called_damaged(tmp_path, monkeypatch):
    keeper = Keeper(tmp_path, 1e9, Ranks(), RunLog(quiet=True))
    one_run(Ranks(), keeper)
    keeper.wait()
    def fails(*args, **how): raise RuntimeError("of another version")
    monkeypatch.setattr(torch, "load", fails)
    with pytest.raises(GolfError, match="step-00000012.*of another version"):
        keeper.newest()
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000012"]


def test_a_disk_without_room_costs_the_checkpoint_not_the_run(tmp_path):
    lines = []
    class Log(RunLog):
        def line(self, text): lines.append(text)
    class Full(Keeper):
        def put(self, facts, folder):
            if facts["steps"] < 8:
                raise OSError(28, "No space left on device")
            super().put(facts, folder)
    whole, keeper = one_run(Ranks()), Full(tmp_path, 0.0, Ranks(), Log(quiet=True))
    assert distance(whole, one_run(Ranks(), keeper)) == 0
    keeper.wait()
    assert any("no checkpoint of step" in line and "No space left" in line and "goes on" in line for line in lines)
    assert (tmp_path / "step-00000012").exists() and not [p for p in tmp_path.iterdir() if p.name.startswith(".")]


def last_disk_full(ranks, folder: str) -> list[str]:
    "What the log of a run says whose last rank can write nothing."
    lines = []
    class Log(RunLog):
        def line(self, text): lines.append(text)
    def full(fd): raise OSError(28, "No space left on device")
    if ranks.rank == ranks.world - 1:
        os.fsync = full
    keeper = Keeper(Path(folder), 0.0, ranks, Log(quiet=True))
    one_run(ranks, keeper)
    keeper.wait()
    return lines


@pytest.mark.parametrize("world", [1, 2])
def test_a_rank_whose_disk_is_full_costs_all_the_checkpoint(tmp_path, world):
    for lines in spawn(world, "last_disk_full", str(tmp_path), module="test_checkpoint"):
        assert any("no checkpoint of step" in line and "No space left" in line for line in lines) and not any("\n" in line for line in lines)
    assert not list(tmp_path.glob("step-*"))


def test_every_tensor_that_a_step_changes_is_kept():
    cfg, model, engine = machine(ENV, Ranks())
    t = trained(cfg, training_loss(model, model.cap), Steps(cfg, Ranks()), engine)
    kept = {tensor.data_ptr() for tensor in named_tensors(t).values()}
    whole = [*engine.state(), *[tensor for tensors in t.average.state().values() for tensor in tensors]]
    assert all(tensor.data_ptr() in kept for tensor in whole) and t.project is not None
    assert sum(name.endswith(" clip") for name in named_tensors(t)) == sum(packed_as(m) == "int6" for _, _, m in engine.layout)


def test_a_cap_counts_the_time_of_what_was_trained(tmp_path):
    "A clock of 10 ms a look: stopped and resumed hours later, a run makes as many steps as without the break."
    def capped(keeper=None, clock=0.0):
        def now():
            nonlocal clock
            clock += 0.010
            return clock
        cfg, model, engine = machine(ENV | {"ITERATIONS": "1000", "MAX_WALLCLOCK_SECONDS": "0.3"}, Ranks())
        return trained(cfg, training_loss(model, model.cap), Steps(cfg, Ranks()), engine, now=now, extras=[keeper] if keeper else [])
    class Idle(Keeper):
        "Looks at the clock only when it saves."
        def after_step(self, t):
            if self.last and t.steps >= self.last:
                self.save(t)
                self.wait()
                raise Stopped("enough")
    whole, keeper = capped(), Idle(tmp_path, 1e9, Ranks(), RunLog(quiet=True))
    keeper.last = 12
    with pytest.raises(Stopped):
        capped(keeper)
    keeper.last = 0
    again = capped(keeper, clock=7200.0)
    assert 0 <= whole.steps - again.steps <= 1 and whole.steps > 20 and 300 <= again.train_ms <= 350, "saving looks at the clock once"


def test_two_lives_at_once_are_refused_and_what_is_half_written_goes(tmp_path):
    for left in (".ema.golf.999999999-7.tmp", "checkpoints/.step-00000007/x"):
        (tmp_path / left).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / left).write_text("half")
    one, two = (SimpleNamespace(path=tmp_path / "progress.json") for _ in range(2))
    assert Progress.take_notes(one) == {} and Progress.take_notes(two) is None
    assert sorted(p.name for p in tmp_path.rglob("*")) == [".lock", "checkpoints"]
    with pytest.raises(GolfError, match=f"{tmp_path.name}.*goes on"):
        Progress(SimpleNamespace(folder=tmp_path, ranks=Ranks(), val=torch.zeros(3), tokenizer_sha256="", code=b"", train_paths=[]))


def test_the_events_of_two_lives_are_one_run(tmp_path):
    for steps, cut in (((1, 2, 3), True), ((3, 4), False)):
        log = RunLog(tmp_path, quiet=True)
        for step in steps:
            log.event("step", step=step, loss=1.0 / step)
        log.close()
        if cut:
            with open(tmp_path / "metrics.jsonl", "a") as file:
                file.write('{"event": "step", "st')
    assert [e["step"] for e in read_run(tmp_path)["events"]] == [1, 2, 3, 4]
    assert finite({"a": float("nan"), "b": 1.0, "c": "x"}) == {"a": None, "b": 1.0, "c": "x"}


@pytest.fixture
def life(tmp_path):
    "The data of a tiny run, and a function that begins a life of it; what it has come to so far is given."
    data = tmp_path / "data"
    data.mkdir()
    env = {**TINY, **tiny_data(data), "RUNS_DIR": str(tmp_path / "runs"), "RUN_ID": "x", "CHECKPOINT_EVERY_S": "60"}
    (data / "manifest.json").unlink()
    def begin(code=b"script", made=demo, **more):
        run = open_kept(made, env | more, Ranks(), code, quiet=True)
        _, keeper, progress = run.extras
        keeper.close()
        progress.lock.close()
        run.log.close()
        return run
    return data, begin


def rebuilt(data: Path):
    "Shards of other documents, under the same names."
    docs = stdlib_documents(["json", "csv", "email"])[60:120]
    for path in data.glob("*.bin"):
        path.unlink()
    build_shards(docs, data / "tokenizer.model", data, 4_000, 0.05)
    (data / "manifest.json").unlink()


def other_validation(data: Path):
    path = next(data.glob("*_val_*"))
    old = path.read_bytes()
    path.write_bytes(old[:HEADER_BYTES] + b"\x07\x01" + old[HEADER_BYTES + 2:])


def other_last_shard(data: Path):
    path = max(data.glob("*_train_*"))
    path.write_bytes(path.read_bytes()[:-2] + b"\x07\x01")


def other_tokenizer(data: Path):
    "A field that nobody reads: as many pieces, and the same."
    path = data / "tokenizer.model"
    path.write_bytes(path.read_bytes() + b"\xa0\x06\x00")


@pytest.mark.parametrize("change, words", [
    (rebuilt, "validation .*[0-9,]+ tokens .*found [0-9,]+ tokens"),
    (other_validation, "validation .*tokens"),
    (other_last_shard, "fineweb_train_0.*tokens.*found .*tokens"),
    (lambda data: max(data.glob("*_train_*")).unlink(), "fineweb_train_0.*tokens.*found none"),
    (other_tokenizer, "tokenizer .*hash"),
])
def test_a_run_goes_on_with_what_it_was_started_with_in_every_phase(change, words, life, tmp_path):
    data, begin = life
    first = begin()
    good = shutil.copytree(data, tmp_path / "elsewhere")
    change(data)
    for summary in ({}, {"ema_bpb": 2.0, "ema_loss": 1.0}, {"ema_bpb": 2.0, "artifact_bytes": 9, "int6_bpb": 2.0, "int6_loss": 1.0}):
        first.summary = summary
        first.note("scored int6")
        notes = (tmp_path / "runs" / "x" / "progress.json").read_text()
        with pytest.raises(GolfError, match=words) as refused:
            begin(RESUME="1")
        assert f"DATA_PATH={data}" in str(refused.value) and "\n" not in str(refused.value)
        assert (tmp_path / "runs" / "x" / "progress.json").read_text() == notes
        moved = begin(RESUME="1", DATA_PATH=str(good), TOKENIZER_PATH=str(good / "tokenizer.model"))
        assert moved.summary == summary


def test_a_run_goes_on_with_its_script_and_its_threads(life):
    _, begin = life
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        begin()
        torch.set_num_threads(threads)
        with pytest.raises(GolfError, match="script .*6 bytes.*found 5 bytes"):
            begin(RESUME="1", code=b"other")
        assert torch.get_num_threads() == threads
        begin(RESUME="1")
        assert torch.get_num_threads() == threads + 1
    finally:
        torch.set_num_threads(threads)


def test_a_recipes_program_goes_on_with_what_it_has_come_to(life):
    _, begin = life
    first = begin(made=demo)
    first.summary = {"ema_bpb": 2.0}
    first.note("scored ema")
    again = begin(made=demo, RESUME="1")
    assert again.summary == first.summary and type(again.settings) is demo.Settings
    with pytest.raises(GolfError, match="CLIP.*global.*demo"):
        begin(made=demo, RESUME="1", CLIP="local")


def test_notes_hold_absolute_paths(life, tmp_path, monkeypatch):
    data, begin = life
    monkeypatch.chdir(tmp_path)
    begin(DATA_PATH="data", TOKENIZER_PATH="data/tokenizer.model")
    kept = json.loads((tmp_path / "runs" / "x" / "progress.json").read_text())["config"]
    assert kept["data_path"] == str(data) and kept["tokenizer_path"] == str(data / "tokenizer.model")


def test_spans_of_a_large_shard_tell_its_text(tmp_path):
    tokens = np.random.default_rng(0).integers(0, 1000, 3 * SPAN * SPANS).astype(np.uint16)
    found = set()
    for change in (0, SPAN, tokens.size // 2, tokens.size - 2 * tokens.size // SPANS):
        write_shard(tmp_path / "x.bin", np.concatenate([tokens[:change], tokens[change + 1:], tokens[:1]]))
        found.add(shard_identity(tmp_path / "x.bin"))
    write_shard(tmp_path / "x.bin", tokens)
    assert len(found | {shard_identity(tmp_path / "x.bin")}) == 5


FLIPS = (r'("state": \{"state": \d{5})(\d)', r'("losses": \[\d\.\d)(\d)', r'("elapsed_ms": \d*)(\d)', r'("steps": \d*)(\d)', r'(_fr)(o)', r'("checksum": ")(\w)')


def flipped(text: str, pattern: str) -> str:
    "A digit or a letter changed, at the end of what a pattern finds."
    changed = re.sub(pattern, lambda m: m[1] + ("1" if m[2] != "1" else "2"), text, count=1)
    assert changed != text and len(changed) == len(text), pattern
    return changed


def test_a_changed_digit_in_the_facts_of_a_checkpoint_sets_it_aside(tmp_path):
    "One that changes the random state, a loss, the time, a step, a name, the checksum itself: what holds the checksums has one."
    keeper = Keeper(tmp_path, 1e9, Ranks(), RunLog(quiet=True))
    one_run(Ranks(), keeper)
    keeper.wait()
    (newest,) = tmp_path.glob("step-*")
    text = (newest / "trainer.json").read_text()
    for number, pattern in enumerate(FLIPS):
        if not re.search(pattern, text):
            continue  # the batches of this test draw nothing
        (newest / "trainer.json").write_text(flipped(text, pattern))
        assert keeper.newest() is None and len(list(tmp_path.glob("damaged-*"))) == 1, pattern
        next(tmp_path.glob("damaged-*")).rename(newest)
        (newest / "trainer.json").write_text(text)
    assert number == 5 and keeper.newest()[0]["steps"] == 12


def test_what_cannot_be_read_is_not_called_damaged(tmp_path, monkeypatch):
    keeper = Keeper(tmp_path, 1e9, Ranks(), RunLog(quiet=True))
    one_run(Ranks(), keeper)
    keeper.wait()
    for fault in (PermissionError(13, "Permission denied"), OSError(5, "Input/output error")):
        def closed(path, fault=fault): raise type(fault)(*fault.args, str(path))
        with monkeypatch.context() as patch:
            patch.setattr("golfnb.tools.checkpoint.read_sealed", closed)
            with pytest.raises(GolfError, match=f"trainer.json must be readable.*{fault.strerror}.*nothing was changed"):
                keeper.newest()
    def full(*_, **__): raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes")
    monkeypatch.setattr(torch, "load", full)
    with pytest.raises(RuntimeError, match="allocate memory"):  # the rank's sentence is of memory, not of torch
        keeper.newest()
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000012"]


@pytest.mark.parametrize("pattern", [r'("seed": \d*)(\d)', r'("threads": \d*)(\d)', r'("format": )(\d)', r'("ema_bpb": )(\d)', r'("confi)(g)', r'(^)(.)', r'("checksum": ")(\w)'])
def test_changed_notes_are_refused(life, tmp_path, pattern):
    _, begin = life
    first = begin()
    first.summary = {"ema_bpb": 2.0, "ema_loss": 1.0}
    first.note("scored ema")
    path = tmp_path / "runs" / "x" / "progress.json"
    path.write_text(flipped(path.read_text(), pattern))
    before = path.read_bytes()
    with pytest.raises(GolfError, match="damage|another version"):
        begin(RESUME="1")
    done = golfnb("train", "--resume", path.parent, cwd=tmp_path)
    assert done.returncode == 2 and one_sentence(done.stderr) and path.read_bytes() == before


def test_an_artifact_that_is_not_the_one_of_the_notes_is_refused(life, tmp_path):
    _, begin = life
    first = begin()
    (first.folder / "artifact.golf").write_bytes(b"packed")
    first.summary = {"artifact_bytes": 6, "artifact_sha256": hashlib.sha256(b"packed").hexdigest()}
    first.note("packed")
    assert begin(RESUME="1").results["packed"] == b"packed"
    (first.folder / "artifact.golf").write_bytes(b"pakced")
    with pytest.raises(GolfError, match="artifact.golf must be the artifact that was packed"):
        begin(RESUME="1")


@pytest.mark.parametrize("at_once", [True, False])
def test_a_run_goes_on_with_no_token_changed_anywhere(life, monkeypatch, at_once):
    "Also between the spans that are hashed before the first step; of more than a gigabyte beside training."
    data, begin = life
    for name, value in (("SPANS", 4), ("SPAN", 16), *([("HASHED_AT_START", 0)] if not at_once else [])):
        monkeypatch.setattr(f"golfnb.tools.checkpoint.{name}", value)
    first = begin()
    first.extras[-1].hashes.finish()
    first.note("hashed")
    path = max(data.glob("*_train_*"))
    before = shard_identity(path)
    tokens = bytearray(path.read_bytes())
    tokens[HEADER_BYTES + 40:HEADER_BYTES + 42] = b"\x07\x01"
    times = path.stat()
    path.write_bytes(tokens)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))  # as whoever wants to hide it would
    assert shard_identity(path) == before, "it lies between the spans"
    with pytest.raises(GolfError, match=f"tokens of {path} must have SHA-256.*before it stopped"):
        begin(RESUME="1").extras[-1].after_training(None)


class Trap:
    def __init__(self, folder):
        self.folder = folder

    def __reduce__(self):
        return os.mkdir, (self.folder,)


def test_no_code_of_a_checkpoint_is_run(tmp_path):
    torch.save({"w": Trap(str(tmp_path / "ran"))}, tmp_path / "rank0.pt")
    with pytest.raises(GolfError, match="cannot load it"):
        Keeper.read_tensors(None, tmp_path)
    assert not (tmp_path / "ran").exists()
    torch.load(tmp_path / "rank0.pt", weights_only=False)
    assert (tmp_path / "ran").exists(), "it is a trap"


def test_a_shard_of_the_same_size_and_time_is_not_read_again(life, monkeypatch):
    data, begin = life
    begin()
    monkeypatch.setattr("golfnb.tools.checkpoint.check_tokens_of", None)
    monkeypatch.setattr("golfnb.tools.checkpoint.tokens_sha256", None)
    assert len(begin(RESUME="1").extras[-1].hashes.found) == len(list(data.glob("*_train_*")))


def test_a_run_does_not_start_on_tokens_that_are_not_its_manifests(tmp_path):
    (tmp_path / "data").mkdir()
    env = TINY | tiny_data(tmp_path / "data") | {"RUN_ID": "x", "RUNS_DIR": str(tmp_path / "runs"), "CHECKPOINT_EVERY_S": "60"}
    other_last_shard(tmp_path / "data")
    with pytest.raises(GolfError, match="fineweb_train.*as its manifest says"):
        open_kept(demo, env, Ranks(), b"script", quiet=True)
    assert not (tmp_path / "runs").exists()

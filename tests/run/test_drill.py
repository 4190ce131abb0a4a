"""The drill, small; torchrun that starts the ranks again; SIGTERM and Ctrl-C that leave a run to go on with; what is said where there is nothing to go on with."""
import os
import re
import shutil
import signal
import time
from contextlib import suppress
from pathlib import Path

import pytest

from forked import fork_python
from golfnb.tools import drill as chapter
from golfnb.tools import programs
from golfnb.tools.data import build_shards, stdlib_documents
from golfnb.model.engine import Ranks
from golfnb.tools.checkpoint import DRILL_CLOCK, Keeper, open_kept
from golfnb.tools.guard import Watcher
from golfnb.tools.report import read_file
from golfnb.tools.drill import SIGNALS, differences, drawn_pairs, drill, half_files
from tiny import LOOPS, TINY, clean_env, golfnb, loaded, one_sentence, tiny_data, waiting, without_torchrun


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    tiny_data(folder)
    return folder


def test_two_kills(data, tmp_path, monkeypatch):
    monkeypatch.setattr(chapter, "SMALL", chapter.SMALL | {"VOCAB_SIZE": 400, "ITERATIONS": 60})
    found = drill(data, kills=2, seed=3, out=tmp_path / "drill", say=lambda *a, **k: None)
    assert len(found["kills"]) == 2 and not found["lost"], found
    assert not any(kill["left"] or kill["half"] for kill in found["kills"]), found
    whole, victim = tmp_path / "drill" / "whole-3", tmp_path / "drill" / "victim-3-1"
    (victim / "ema.golf").write_bytes((victim / "ema.golf").read_bytes()[:-1])
    assert differences(whole, victim) == ["ema.golf"] and half_files(victim) == ["ema.golf"], "it would have found a fault"


class Copied(Watcher):
    "Copies a run's folder after a step, as a kill would leave it; a checkpoint is whole before the next step begins."

    def __init__(self, run, after: int, to: Path):
        self.run, self.after, self.to = run, after, to

    def after_step(self, t):
        next(extra for extra in self.run.extras if isinstance(extra, Keeper)).wait()
        if t.steps == self.after:
            shutil.copytree(self.run.folder, self.to)


class Stumble(Watcher):
    "Changes a momentum after the last step: no weight and no score shows it."

    def after_step(self, t):
        if t.steps == 20:
            next(iter(t.engine.parts[0].state.values())).add_(1)


def test_a_recipe_that_goes_by_the_clock_ends_with_the_same_bytes(data, tmp_path):
    "By that of drills, which a checkpoint holds: steps, rates and calibration depend on the time; it is left before its first block runs again, and after."
    program, places = programs.find_program("pr2135"), (4, 13)
    given = TINY | LOOPS | {"RECIPE": "pr2135", "RUNS_DIR": tmp_path, "DATA_PATH": data, "TOKENIZER_PATH": data / "tokenizer.model", "ITERATIONS": 90, "MAX_WALLCLOCK_SECONDS": 1.5, "GPTQ_RESERVE_MS": 250, "GPTQ_CALIB_SAMPLES": 3, "TTT_ENABLED": 0,
                    "CHECKPOINT_EVERY_S": 0.125, DRILL_CLOCK: "1"}
    env = {name: str(value) for name, value in given.items() if not name.startswith(("BIGRAM", "VE_"))}
    run = open_kept(program, env | {"RUN_ID": "whole"}, Ranks(), quiet=True)
    run.extras += [Copied(run, place, tmp_path / f"x{place}") for place in places]
    whole = program.main(run)
    shares = [chapter.kept_share(tmp_path / f"x{place}") for place in places]
    assert 0 < shares[0] < run.settings.enable_looping_at < shares[1], shares
    shutil.copytree(tmp_path / "x13", tmp_path / "stumbling")
    for place in places:
        folder = tmp_path / f"x{place}"
        assert (folder / "checkpoints").is_dir() and not (folder / "raw.golf").exists()
        again = program.main(open_kept(program, env | {"RUN_ID": folder.name, "RESUME": "1"}, Ranks(), quiet=True))
        assert whole["steps"] == again["steps"] == 20 and whole["train_ms"] == 1000 * 20 / 16, whole["steps"]
        log = (folder / "train.log").read_text()
        assert re.search(r"^resumed:\S+ step:\d+ ", log, re.M) and f"{DRILL_CLOCK} is set" in log and "stopping_early" in log, log
        assert differences(tmp_path / "whole", folder) == []
    run = open_kept(program, env | {"RUN_ID": "stumbling", "RESUME": "1"}, Ranks(), quiet=True)
    run.extras.append(Stumble())
    program.main(run)
    assert differences(tmp_path / "whole", tmp_path / "stumbling") == ["states-0.json"]


def test_a_drill_draws_every_recipe_ranks_and_signals():
    every = {(recipe, ranks) for recipe in programs.RECIPES for ranks in (1, 2)}
    assert len(drawn_pairs(1000, 1)) == len(every) and {*drawn_pairs(1000, 1)} == every
    assert len(drawn_pairs(10, 1)) == 2 and {pair for seed in range(200) for pair in drawn_pairs(10, seed)} == every
    assert {*SIGNALS} == {"SIGKILL", "SIGTERM", "SIGINT"}


@pytest.mark.parametrize("recipe", programs.RECIPES)
def test_every_recipe_can_be_run_as_small_as_a_drill_wants_it(recipe):
    "One that is added and cannot is named here: what it needs belongs in SMALL."
    program = programs.find_program(recipe)
    found = programs.settings_of(program, dict(word.split("=") for word in chapter.small_run(recipe) if not word.startswith("CHECKPOINT")))
    assert (found.num_layers, found.model_dim, found.vocab_size, found.iterations) == (2, 64, 1024, 120)


def launched(words: list, folder: Path, until: str, prepare=dict, **env):
    "A process in a session of its own, once its run's log says `until`: the run waits after step 9, until the file `wait` is gone or SIGTERM or SIGINT has come."
    (folder / "wait").touch()
    with open(folder / "said", "w") as said:
        child = fork_python(words, said, said, folder, clean_env(**env), prepare)
    while child.is_alive():
        log = next(folder.glob("runs/*/train.log"), None)
        if log and re.search(until, log.read_text()) and any(folder.glob("runs/*/checkpoints/step-*")):
            return child
        time.sleep(0.1)
    raise AssertionError((folder / "said").read_text())


def words(data: Path, **more) -> list[str]:
    env = TINY | {"DATA_PATH": data, "TOKENIZER_PATH": data / "tokenizer.model", "ITERATIONS": 16, "CHECKPOINT_EVERY_S": 1e-3, "TTT_ENABLED": 0} | more
    return [f"{name}={value}" for name, value in env.items()]


def wait_in_scripts():
    "What programs make in this process are scripts whose runs wait."
    script_text = programs.script_text
    programs.script_text = lambda *args: waiting(script_text(*args))


def test_sigterm_leaves_a_run_that_goes_on(data, tmp_path):
    "Also from another working directory, with relative paths, and with a damaged checkpoint."
    shutil.copytree(data, tmp_path / "data")
    relative = {"DATA_PATH": "data", "TOKENIZER_PATH": "data/tokenizer.model"}
    child = launched(["-m", "golfnb.tools.cli", "train", "--nproc", "2", *words(data, RUN_ID="x", **relative)], tmp_path, "step:5/", wait_in_scripts)
    os.kill(child.pid, signal.SIGTERM)
    said = (tmp_path / "said")
    child.join(600)
    assert child.exitcode == 5, said.read_text()
    (tmp_path / "wait").unlink()
    assert re.fullmatch(r"golfnb: .*SIGTERM .*step \d+; .*golfnb train --resume runs/x", said.read_text().splitlines()[-1]), said.read_text()
    again = golfnb("train", *words(data, RUN_ID="x"), cwd=tmp_path)
    assert again.returncode == 2 and "RUN_ID" in again.stderr and "--resume runs/x" in again.stderr
    other = golfnb("train", "--resume", "runs/x", "MATRIX_LR=0.5", cwd=tmp_path)
    assert other.returncode == 2 and one_sentence(other.stderr) and "MATRIX_LR=0.025" in other.stderr and "0.5" in other.stderr
    damaged = tmp_path / "runs" / "x" / "checkpoints" / "step-00000990"
    damaged.mkdir()
    (tmp_path / "elsewhere").mkdir()
    done = without_torchrun("train", "--resume", "../runs/x", "--nproc", "1", cwd=tmp_path / "elsewhere")
    assert done.returncode == 0 and "resumed:../runs/x step:" in done.stdout and "step:16/16" in done.stdout, done.stderr
    assert "set aside as damaged-step-00000990" in done.stdout
    left = {p.name for p in (tmp_path / "runs" / "x").iterdir()}
    assert "summary.json" in left and not left & {"progress.json", "checkpoints"}
    again = golfnb("train", "--resume", "runs/x", cwd=tmp_path)
    assert again.returncode == 2 and one_sentence(again.stderr) and "runs/x" in again.stderr


def test_ctrl_c_leaves_a_run_that_goes_on_and_says_where_it_begins(data, tmp_path):
    "The terminal sends it to the whole group of processes."
    child = launched(["-m", "golfnb.tools.cli", "train", "--nproc", "2", *words(data, RUN_ID="x")], tmp_path, "step:5/", wait_in_scripts)
    os.killpg(child.pid, signal.SIGINT)
    child.join(600)
    said = (tmp_path / "said").read_text()
    assert child.exitcode == 5 and re.search(r"^golfnb: Ctrl-C: .*at once$", said, re.M), said
    assert re.fullmatch(r"golfnb: .*Ctrl-C .*step \d+; .*golfnb train --resume runs/x", said.splitlines()[-1]) and "interrupted" not in said, said
    (tmp_path / "wait").unlink()
    stopped, again = tmp_path / "runs" / "x", shutil.copytree(tmp_path / "runs" / "x", tmp_path / "runs" / "y")
    shutil.rmtree(again / "checkpoints")
    for folder, begins in ((stopped, r"resumed:\S+ step:\d\d? "), (again, "note: .*runs/y has no checkpoint: .*anew")):
        done = without_torchrun("train", "--resume", folder, "--nproc", 1, cwd=tmp_path)
        assert done.returncode == 0 and re.search(f"^{begins}", done.stdout, re.M), done.stderr
        assert ("resumed:" in done.stdout, "anew" in done.stdout) == (folder == stopped, folder == again)


def test_a_run_that_was_scored_goes_on_with_no_other_text(data, tmp_path, monkeypatch):
    "A run as a kill after its int6 score leaves it; its data folder is built again from other documents, then lies elsewhere as it was."
    whole, folder, script, mine = tmp_path / "runs" / "whole", tmp_path / "runs" / "x", tmp_path / "x.py", tmp_path / "data"
    shutil.copytree(data, mine)
    env = dict(word.split("=", 1) for word in words(mine, RUNS_DIR=tmp_path / "runs", RUN_ID="whole", ITERATIONS=4))
    assert golfnb("script", "--recipe", "demo", "-o", script, cwd=tmp_path).returncode == 0
    chapter = loaded(script.read_text(), "script_scored")
    scored = chapter.Run.scored
    def copied(run, label, name, *rest, **how):
        if name == "sliding":
            shutil.copytree(whole, folder)
        return scored(run, label, name, *rest, **how)
    monkeypatch.setattr(chapter.Run, "scored", copied)
    chapter.main(open_kept(chapter, env, chapter.Ranks(), script.read_bytes()))
    for path in (*mine.glob("*.bin"), mine / "manifest.json"):
        path.unlink()
    build_shards(stdlib_documents(["json", "csv", "email"])[60:120], mine / "tokenizer.model", mine, 4_000, 0.05)
    notes = (folder / "progress.json").read_text()
    assert "int6_bpb" in notes and "sliding_bpb" not in notes
    other = golfnb("train", "--resume", folder, cwd=tmp_path)
    assert other.returncode == 2 and one_sentence(other.stderr), other.stderr
    assert re.search("validation .*[0-9,]+ tokens .*[0-9,]+ tokens", other.stderr), other.stderr
    assert (folder / "progress.json").read_text() == notes
    done = without_torchrun("train", "--resume", folder, f"DATA_PATH={data}", f"TOKENIZER_PATH={data}/tokenizer.model", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    by_clock = {"train_ms", "step_ms"}  # from the last checkpoint on training ends once more, by a real clock; the second is the first by the steps
    assert {*differences(whole, folder)} - by_clock == {"config"}, differences(whole, folder)
    ended, again = (read_file(run / "summary.json") for run in (whole, folder))
    assert again["train_ms"] > 0 and again["step_ms"] == again["train_ms"] / again["steps"]
    first, then = ended["config"], again["config"]
    moved = {name for name in {*first, *then} if first.get(name) != then.get(name)}
    assert moved == {"run_id", "data_path", "tokenizer_path"}, "a folder of its own, and data that lie elsewhere"


def children(parent: int) -> list[int]:
    "The processes that a process has started, and that have not ended."
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended meanwhile
            state, its_parent = (path / "stat").read_text().rsplit(")", 1)[1].split()[:2]
            if int(its_parent) == parent and state != "Z":
                found.append(int(path.name))
    return found


def test_torchrun_goes_on_by_itself(data, tmp_path):
    assert golfnb("script", "--recipe", "demo", "-o", "x.py", cwd=tmp_path).returncode == 0
    (tmp_path / "x.py").write_text(waiting((tmp_path / "x.py").read_text()))
    env = dict(word.split("=", 1) for word in words(data) if not word.startswith("RECIPE"))
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "--max-restarts=1", "-m", "golfnb.tools.checkpoint", "x.py"]
    child = launched(command, tmp_path, "step:5/", **env)
    os.kill(max(children(child.pid)), signal.SIGKILL)
    (tmp_path / "wait").unlink()
    child.join(600)
    assert child.exitcode == 0, (tmp_path / "said").read_text()
    assert len(list(tmp_path.glob("runs/*"))) == 1 and "resumed:runs/demo-1337-" in (tmp_path / "said").read_text()

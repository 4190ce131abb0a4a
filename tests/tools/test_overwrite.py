"""What lies where a command writes: neither its own input nor a file of another kind is ever replaced, and nothing is deleted by a guess."""
import json
import shutil

import pytest
from tiny import TINY, golfnb, one_sentence, run_quietly, tiny_data

from golfnb.file.artifact import Plain, save_artifact, save_weights
from golfnb.recipes import demo
from golfnb.settings import GolfError
from golfnb.tools.commands import demo as demo_page
from golfnb.tools.checkpoint import clear_checkpoints, clear_half_written
from golfnb.tools.data import stdlib_documents
from score_workers import random_state

MINE = b"my own text, which no command of golfnb has written"


@pytest.fixture
def folder(tmp_path):
    save_weights(tmp_path / "w.golf", random_state(), {"recipe": "demo"})
    (tmp_path / "mine").write_bytes(MINE)
    run = tmp_path / "run"
    run.mkdir()
    (run / "metrics.jsonl").write_text('{"event": "val", "step": 1, "loss": 2.0, "ms": 1.0}\n')
    save_weights(run / "ema.golf", random_state(), {"recipe": "demo"})
    for name in ("report.html", "compare.html"):
        (run / name).write_bytes(MINE)
        (tmp_path / name).write_bytes(MINE)
    (tmp_path / "run2").mkdir()
    (tmp_path / "run2" / "metrics.jsonl").write_bytes((run / "metrics.jsonl").read_bytes())
    (tmp_path / "built").mkdir()
    (tmp_path / "built" / "tokenizer.model").write_bytes(MINE)
    (tmp_path / "runs" / "demo").mkdir(parents=True)
    (tmp_path / "runs" / "demo" / "thesis.txt").write_bytes(MINE)
    (tmp_path / "runs" / "mine").mkdir()
    (tmp_path / "runs" / "mine" / "train_gpt.py").write_bytes(MINE)
    (tmp_path / "runs" / "drilled" / "data").mkdir(parents=True)
    for name in ("drill", "rotated"):  # runs whose logs were moved away
        shutil.copytree(run, tmp_path / "runs" / name)
    (tmp_path / "packed.golf.over").write_bytes(MINE)
    for name in ("both", "ended"):
        stopped_and_ended(tmp_path / "runs" / name, seeds=(1, 2) if name == "both" else (1, 1))
    (tmp_path / "runs" / "paged").mkdir()
    (tmp_path / "runs" / "paged" / "report.html").write_bytes(MINE)
    (tmp_path / "texts").mkdir()
    for number, text in enumerate(stdlib_documents(["json", "csv", "email"])[:40]):
        (tmp_path / "texts" / f"{number}.txt").write_text(text)
    (tmp_path / "result.json").write_bytes(MINE)
    (tmp_path / "w.audit.json").write_bytes(MINE)
    return tmp_path


def stopped_and_ended(run, seeds):
    "A run with checkpoints and a summary, of these seeds."
    (run / "checkpoints" / "step-00000007").mkdir(parents=True)
    (run / "checkpoints" / "step-00000007" / "rank0.pt").write_bytes(MINE)
    (run / "train_gpt.py").write_text("# golfnb script\n")
    for name, seed in zip(("progress.json", "summary.json"), seeds):
        (run / name).write_text(json.dumps({"format": 3, "config": {"seed": seed, "data_path": name}}))


def files(folder) -> dict:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


COMMANDS = {
    "export over the artifact": ("artifact", "export", "w.golf", "w.golf"),
    "export over the artifact by another path": ("artifact", "export", "w.golf", "run/../w.golf"),
    "export over a text": ("artifact", "export", "w.golf", "mine"),
    "a script over a text": ("script", "-o", "mine"),
    "quantize over the weights": ("quantize", "run", "-o", "run/ema.golf"),
    "quantize over a text": ("quantize", "run", "-o", "mine"),
    "data build over a tokenizer": ("data", "build", "texts", "--out", "built", "--vocab-size", "400", "--val-fraction", "0.3"),
    "an audit over a text": ("score", "w.golf", "--audit", "--val", "x_*.bin", "--tokenizer", "t.model"),
    "a report over a text": ("report", "run"),
    "a comparison over a text": ("compare", "run", "run2"),
    "a bench over a text": ("bench", "step", "-o", "result.json"),
    "train in a folder with a script": ("train", "--recipe", "demo", "RUN_ID=mine"),
    "train over a run whose log was moved away": ("train", "--recipe", "demo", "RUN_ID=rotated"),
    "train where a text is called report.html": ("train", "--recipe", "demo", "RUN_ID=paged"),
    "quantize beside a text": ("quantize", "run", "-o", "packed.golf"),
    "a drill over a run": ("drill", "--kills", "1"),
    "resume with another run's summary": ("train", "--resume", "runs/both"),
    "a submission over a file": ("submission", "run", "-o", "mine"),
    "demo in a folder with a text": ("demo", "ITERATIONS=1"),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_what_lies_there_stays(folder, monkeypatch, name):
    for starts in ("starting.start_run", "commands.demo.demo_data", "commands.drill.demo_data"):  # nothing trains here: what is lost is lost before
        monkeypatch.setattr(f"golfnb.tools.{starts}", lambda *a: 0)
    before = files(folder)
    done = golfnb(*COMMANDS[name], cwd=folder)
    assert done.returncode == 2 and one_sentence(done.stderr), done.stdout + done.stderr
    assert files(folder) == before


def test_what_a_command_wrote_itself_it_may_write_again(folder):
    for _ in range(2):
        done = golfnb("artifact", "export", "w.golf", "w.safetensors", cwd=folder)
        assert done.returncode == 0, done.stderr


def test_demo_data_of_ones_own_stays(folder):
    data = folder / "runs" / "demo" / "data"
    data.mkdir()
    (data / "essays_train_000000.bin").write_bytes(MINE)
    before = files(folder)
    done = golfnb("demo", cwd=folder)
    assert done.returncode == 2 and one_sentence(done.stderr) and files(folder) == before


def tiny_training(folder) -> list[str]:
    (folder / "data").mkdir()
    return ["train", "--recipe", "demo", "--nproc", 1, *(f"{name}={value}" for name, value in (TINY | tiny_data(folder / "data")).items() if name != "RECIPE"), "RUN_ID=x"]


def test_a_run_whose_log_is_moved_away_stays_with_all_that_it_made(tmp_path, monkeypatch):
    "As logrotate does, while the run goes on."
    run = tmp_path / "runs" / "x"
    def trains(script, *rest, **how):
        (run / "train.log").write_text("step:1")
        (run / "train.log").rename(tmp_path / "rotated.log")
        save_weights(run / "ema.golf", random_state(), {})
        return 0
    monkeypatch.setattr("golfnb.tools.starting.run_script", trains)
    assert golfnb(*tiny_training(tmp_path), cwd=tmp_path).returncode == 0
    assert {path.name for path in run.iterdir()} == {"train_gpt.py", "tokenizer.model", "ema.golf"}


@pytest.mark.parametrize("left", [0, 1, 2])
def test_a_run_that_never_began_goes_again_and_one_that_began_does_not(tmp_path, monkeypatch, left):
    "`left`: how far a rank came: not to its folder, to a log that is gone again, to one that is not."
    run = tmp_path / "runs" / "x"
    def refused(*rest, **how):
        if left:
            (run / "train.log").write_text("")
        if left == 1:
            (run / "train.log").unlink()
        return 2
    monkeypatch.setattr("golfnb.tools.starting.run_script", refused)
    assert golfnb(*tiny_training(tmp_path), cwd=tmp_path).returncode == 2
    assert (tmp_path / "runs").exists() == run.exists() == (left > 0)


def test_a_directory_that_was_there_stays_if_the_run_never_begins(tmp_path, monkeypatch):
    (tmp_path / "runs" / "x").mkdir(parents=True)
    monkeypatch.setattr("golfnb.tools.starting.run_script", lambda *rest, **how: 2)
    assert golfnb(*tiny_training(tmp_path), cwd=tmp_path).returncode == 2 and (tmp_path / "runs" / "x" / "train_gpt.py").is_file()


@pytest.mark.parametrize("config", [{"recipe": "golf"}, {"recipe": "demo", "data_path": "mine"}, None])
def test_the_demo_replaces_no_run_but_a_demos(folder, monkeypatch, config):
    monkeypatch.setattr(demo_page, "demo_data", lambda *a: 0)
    run = folder / "runs" / "demo"
    (run / "thesis.txt").unlink()
    (run / "train.log").write_text("step:1")
    if config:
        (run / "summary.json").write_text(json.dumps({"config": config}))
    before = files(folder)
    done = golfnb("demo", cwd=folder)
    assert done.returncode == 2 and one_sentence(done.stderr) and "not a demo's" in done.stderr and files(folder) == before


def test_a_run_that_died_while_it_cleared_up_is_cleared_up(folder):
    done = golfnb("train", "--resume", "runs/ended", cwd=folder)
    assert done.returncode == 2 and one_sentence(done.stderr)
    assert {path.name for path in (folder / "runs" / "ended").iterdir()} == {"train_gpt.py", "summary.json"}


def test_only_what_a_run_wrote_itself_is_cleared(tmp_path):
    kept = tmp_path / "checkpoints"
    ours, theirs = ("step-00000007", ".step-00000008", "damaged-step-00000003", "damaged-2-step-00000003"), ("best", "step-7", "old-step-00000003")
    for name in ours + theirs:
        (kept / name).mkdir(parents=True)
    for name in (".notes.tmp", ".draft.7.tmp", ".ema.golf.999999999-7.tmp", ".ema.golf.1-7.tmp"):
        (tmp_path / name).write_bytes(MINE)
    clear_half_written(tmp_path)
    assert sorted(p.name for p in tmp_path.glob(".*")) == [".draft.7.tmp", ".ema.golf.1-7.tmp", ".notes.tmp"], "process 1 lives"
    assert not (kept / ".step-00000008").exists()
    clear_checkpoints(kept)
    assert {p.name for p in kept.iterdir()} == set(theirs)


def test_a_script_that_starts_in_a_folder_with_another_leaves_it(tmp_path):
    (tmp_path / "runs" / "x").mkdir(parents=True)
    (tmp_path / "runs" / "x" / "train_gpt.py").write_bytes(MINE)
    (tmp_path / "data").mkdir()
    with pytest.raises(GolfError, match="train_gpt.py must be the script that runs.*RUN_ID"):
        run_quietly(demo, TINY | tiny_data(tmp_path / "data") | {"RUNS_DIR": str(tmp_path / "runs"), "RUN_ID": "x"}, code=b"a script")
    assert (tmp_path / "runs" / "x" / "train_gpt.py").read_bytes() == MINE


def test_an_artifact_that_fits_removes_no_text_beside_it(folder):
    with pytest.raises(GolfError, match="packed.golf.over must be free"):
        save_artifact(folder / "packed.golf", {}, {}, Plain())
    assert (folder / "packed.golf.over").read_bytes() == MINE

"""What lies where a command writes: neither its own input nor a file of another kind is ever replaced."""
import pytest
from tiny import golfnb, one_sentence

from golfnb.artifact import save_weights
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
    (tmp_path / "texts").mkdir()
    for number, text in enumerate(stdlib_documents(["json", "csv", "email"])[:40]):
        (tmp_path / "texts" / f"{number}.txt").write_text(text)
    (tmp_path / "result.json").write_bytes(MINE)
    (tmp_path / "w.audit.json").write_bytes(MINE)
    return tmp_path


def files(folder) -> dict:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


COMMANDS = {
    "export over the artifact": ("artifact", "export", "w.golf", "w.golf"),
    "export over the artifact by another path": ("artifact", "export", "w.golf", "run/../w.golf"),
    "export over a text": ("artifact", "export", "w.golf", "mine"),
    "import over its input": ("artifact", "import", "mine", "mine"),
    "import over a text": ("artifact", "import", "w.safetensors", "mine"),
    "a script over a text": ("script", "-o", "mine"),
    "quantize over the weights": ("quantize", "run", "-o", "run/ema.golf"),
    "quantize over a text": ("quantize", "run", "-o", "mine"),
    "data build over a tokenizer": ("data", "build", "texts", "--out", "built", "--vocab-size", "400", "--val-fraction", "0.3"),
    "an audit over a text": ("score", "w.golf", "--audit", "--val", "x_*.bin", "--tokenizer", "t.model"),
    "a report over a text": ("report", "run"),
    "a comparison over a text": ("compare", "run", "run2"),
    "a bench over a text": ("bench", "step", "-o", "result.json"),
    "train in a folder with a script": ("train", "--recipe", "demo", "RUN_ID=mine"),
    "a submission over a file": ("submission", "run", "-o", "mine"),
    "demo in a folder with a text": ("demo", "ITERATIONS=1"),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_what_lies_there_stays(folder, monkeypatch, name):
    for starts in ("start_run", "demo_data"):  # nothing trains here: what is lost is lost before
        monkeypatch.setattr(f"golfnb.tools.cli.{starts}", lambda *a: 0)
    before = files(folder)
    done = golfnb(*COMMANDS[name], cwd=folder)
    assert done.returncode == 2 and one_sentence(done.stderr), done.stdout + done.stderr
    assert files(folder) == before


def test_what_a_command_wrote_itself_it_may_write_again(folder):
    for _ in range(2):
        for words in (("artifact", "export", "w.golf", "w.safetensors"), ("artifact", "import", "w.safetensors", "back.golf")):
            done = golfnb(*words, cwd=folder)
            assert done.returncode == 0, done.stderr


def test_demo_data_of_ones_own_stays(folder, monkeypatch):
    monkeypatch.setattr("golfnb.tools.data.stdlib_documents", lambda *a: ["a text"])
    data = folder / "runs" / "demo" / "data"
    data.mkdir()
    (data / "essays_train_000000.bin").write_bytes(MINE)
    before = files(folder)
    done = golfnb("demo", cwd=folder)
    assert done.returncode == 2 and one_sentence(done.stderr) and files(folder) == before

"""Files of a program of one's own, whatever Python allows in them: its script does what they do, or is refused; every byte of them counts."""
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from tiny import TINY, clean_env, golfnb, tiny_data, without_torchrun

from golfnb.tools.joiner import join_program, pack_program
from golfnb.tools.programs import copied_program, program_sha256

BATTERY = Path(__file__).with_name("battery.py")
START = 'if __name__ == "__main__":\n    main()\n'


def test_a_script_does_what_its_program_does_or_is_refused():
    "Plain Python, the script and the packed script of every program of the battery, in children of one process."
    done = subprocess.run([sys.executable, BATTERY], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(found) >= 175 and len({case["title"] for case in found}) == len(found)
    assert [case for case in found if case["kind"] not in ("same", "refused")] == []
    refused = [case["said"] for case in found if case["kind"] == "refused"]
    assert len(refused) <= 20 and not [said for said in refused if "\n" in said or ": " not in said]


FILES = {
    "mine.py": "from sub.parts import X\ndef main():\n    from late import Y\n    print(X, Y)\n",
    "sub/__init__.py": "", "sub/parts.py": "X = 1\n", "late.py": "Y = 2\n", "other.py": "Z = 3\n"}


def put(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder / "mine.py"


def test_every_byte_of_every_file_counts(tmp_path):
    def sha256(name: str = "", more: str = "") -> str:
        program = put(tmp_path, FILES | ({name: FILES[name] + more} if name else {}))
        return program_sha256(SimpleNamespace(OWN={"recipe": "mine"}, __file__=str(program)))

    before = sha256()
    assert sha256("other.py", "# no matter\n") == before
    found = {sha256(name, "# more\n") for name in ("mine.py", "sub/__init__.py", "sub/parts.py", "late.py")}
    assert len(found | {before}) == 5


SPAWNED = """
import multiprocessing
from parts import Rows
def main():
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print(pool.apply(Rows(3).total))
"""


@pytest.mark.parametrize("pack", [False, True])
def test_a_process_that_is_spawned_finds_the_files(pack, tmp_path):
    program = put(tmp_path / "from", {"mine.py": SPAWNED, "parts.py": "class Rows:\n    def __init__(self, n): self.n = n\n    def total(self): return sum(range(self.n))\n"})
    text = join_program(program, START)
    path = tmp_path / "script.py"
    path.write_text(pack_program(text) if pack else text)
    done = subprocess.run([sys.executable, path], capture_output=True, text=True, cwd=tmp_path)
    assert done.stdout == "3\n", done.stderr


WORKS = """def doubled(rows):
    return [2 * row for row in rows]


def data(run: Run) -> Loader:
    "Batches, once a worker has had its turn: with a class of the second file, and a function of the first."
    rows = DataLoader(Rows(4), 2, collate_fn=doubled, num_workers=1, multiprocessing_context="spawn")
    assert list(rows) == [[0, 2], [4, 6]]
"""
PARTS = """class Rows:
    def __init__(self, n):
        self.n = n

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        return i
"""


def test_workers_that_a_run_spawns_find_the_files(tmp_path):
    "By the command, and by the judge's, which asks the program for its rows."
    text = copied_program("demo", "mine").replace("def data(run: Run) -> Loader:\n", WORKS, 1)
    put(tmp_path, {"mine.py": text.replace("from functools import partial\n", "from functools import partial\nfrom torch.utils.data import DataLoader\nfrom parts import Rows\n", 1), "parts.py": PARTS})
    words = [f"{k}={v}" for k, v in (TINY | tiny_data(tmp_path) | {"RUN_ID": "a", "ITERATIONS": "2", "WARMDOWN_ITERS": "1", "TTT_ENABLED": "0"}).items() if k != "RECIPE"]
    done = without_torchrun("train", "mine.py", "--nproc", 1, *words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    done = golfnb("score", "runs/a", "--audit", "--program", "mine.py", cwd=tmp_path)
    assert "rows that training reads are not validation text" in done.stdout, done.stderr


BUILDS = """
def doubled(n):
    return 2 * n


def build(s: Settings, ranks: Ranks) -> Parts:
    "The model, once workers have had their turn."
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        print("doubled to", pool.submit(doubled, 3).result(), "and counted", pool.submit(len, Rows(4)).result(), flush=True)
    return made(s, ranks)
"""
STARTS = ([Path(sys.executable).with_name("golfnb")], [sys.executable, "-m", "golfnb"], [sys.executable, "-m", "golfnb.tools.cli"])


@pytest.fixture(scope="module")
def spawning(tmp_path_factory):
    "A folder with data and a run whose program starts a worker where it builds its model, and a pickle.py that must not run."
    folder = tmp_path_factory.mktemp("spawning")
    text = copied_program("demo", "mine")
    text = text.replace("def build(", "def made(", 1) + BUILDS
    text = text.replace("from functools import partial\n", "import multiprocessing\nfrom concurrent.futures import ProcessPoolExecutor\nfrom functools import partial\nfrom parts import Rows\n", 1)
    put(folder, {"mine.py": text, "parts.py": PARTS})
    words = [f"{k}={v}" for k, v in (TINY | tiny_data(folder) | {"RUN_ID": "a", "ITERATIONS": "2", "WARMDOWN_ITERS": "1", "TTT_ENABLED": "0"}).items() if k != "RECIPE"]
    done = golfnb("train", "mine.py", "--nproc", 1, *words, cwd=folder)
    assert done.returncode == 0, done.stderr
    (folder / "pickle.py").write_text("open('ran', 'w')\n")
    return folder


@pytest.mark.parametrize("start", STARTS, ids=lambda start: " ".join(start[1:]) or "golfnb")
def test_workers_that_a_score_spawns_find_the_files(start, spawning):
    "However the command is started, and nothing that lies in the current folder is run in their place."
    done = subprocess.run([*start, "score", "runs/a", "--program", "mine.py"], capture_output=True, text=True, cwd=spawning, env=clean_env(PYTHONPATH=""), timeout=300)
    assert done.returncode == 0 and "doubled to 6 and counted 4\n" in done.stdout, done.stderr
    assert "val_bpb" in done.stdout and not (spawning / "ran").exists()


@pytest.mark.parametrize("words", [["score", "--nproc", "2"], ["sample", "a", "--tokens", "1"]], ids=lambda words: words[0])
def test_workers_of_other_commands_find_the_files(words, spawning):
    command, *more = words
    done = subprocess.run([*STARTS[0], command, "runs/a", *more, "--program", "mine.py"], capture_output=True, text=True, cwd=spawning, env=clean_env(PYTHONPATH=""), timeout=300)
    assert done.returncode == 0 and "doubled to 6 and counted 4\n" in done.stdout, done.stderr
    assert not (spawning / "ran").exists()


def test_workers_that_play_spawns_find_the_files(spawning):
    command = [*STARTS[0], "play", "runs/a", "--program", "mine.py", "--no-browser"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=spawning, env=clean_env(PYTHONPATH="")) as page:
        said = [next(page.stdout, ""), next(page.stdout, "")]
        page.terminate()
    assert said[0] == "doubled to 6 and counted 4\n" and "http://127.0.0.1" in said[1], said


def test_a_traceback_names_the_file_and_the_line(tmp_path):
    program = put(tmp_path / "from", {"mine.py": "from parts import fail\ndef main(): fail()\n", "parts.py": "def fail():\n    return 1 / 0  # here\n"})
    path = tmp_path / "script.py"
    path.write_text(join_program(program, START))
    done = subprocess.run([sys.executable, path], capture_output=True, text=True)
    assert 'File "<mine.py>", line 2, in main\n' in done.stderr and 'File "<parts.py>", line 2, in fail\n' in done.stderr

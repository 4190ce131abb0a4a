"""The guard: what is looked at before a run, full disks, lost ranks, and the one sentence with which a rank ends."""
import os
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from forked import run_python

from golfnb.model.engine import Ranks
from golfnb.settings import GolfError
from golfnb.text.shards import atomic_write
from golfnb.tools import guard
from tiny import TINY, settings_for, tiny_data

ENDING = """
import os
import sys
import torch
from golfnb.run import run
from golfnb.settings import GolfError
from golfnb.tools import guard
guard.full_gpu_sentence = lambda ranks: f"rank {ranks.rank} is full" if ranks else "no rank began"

class OurError(run.GolfError):
    status = 5

def work(ranks):
    WORK

guard.guarded_rank(run, work)
print("on")
"""


def ending(folder: Path, work: str) -> subprocess.CompletedProcess:
    "What a guarded rank comes to that does some work."
    script = folder / "ending.py"
    script.write_text(ENDING.replace("WORK", work))
    return run_python([script], folder, dict(os.environ))


@pytest.mark.parametrize("work, status, said", [
    ("raise GolfError('no shard')", 2, "golfnb: no shard\n"),
    ("raise OurError('stopped')", 5, "golfnb: stopped\n"),
    ("return 'too large'", 3, "golfnb: too large\n"),
    ("raise torch.OutOfMemoryError('CUDA out of memory')", 2, "golfnb: rank 0 is full\n"),
    ("raise RuntimeError('CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`')", 2, "golfnb: rank 0 is full\n"),
    ("raise RuntimeError('NCCL Error 1: Failed to CUDA calloc async 608 bytes')", 2, "golfnb: rank 0 is full\n"),
    ("try:\n        raise torch.OutOfMemoryError('no')\n    finally:\n        raise RuntimeError('a capture that failed')", 2, "golfnb: rank 0 is full\n"),
    ("torch.empty(2**60)", 2, "golfnb: the memory of this process must suffice"),
    ("raise PermissionError(13, 'Permission denied', 'x/train.log')", 2, "golfnb: x/train.log must be usable, found that it is not (Permission denied)"),
    ("raise OSError(30, 'Read-only file system', 'x/.lock')", 2, "golfnb: x/.lock must be usable"),
    ("raise RuntimeError('NCCL timeout')", 4, "golfnb: rank 0 lost the others in a collective (NCCL timeout)"),
    ("os.kill(os.getpid(), 2)", 130, "golfnb: interrupted\n"),
    ("return None", 0, "")])
def test_a_rank_ends_with_a_sentence_and_a_status(tmp_path, work, status, said):
    done = ending(tmp_path, work)
    assert done.returncode == status and done.stderr.startswith(said) and done.stderr.count("\n") == bool(said), done.stderr
    assert done.stdout == ("on\n" if status == 0 else "")


def test_a_fault_of_the_program_keeps_its_traceback(tmp_path):
    done = ending(tmp_path, "raise RuntimeError('shapes differ')")
    assert done.returncode == 1 and "Traceback" in done.stderr and "shapes differ" in done.stderr


@pytest.fixture
def run_with(tmp_path, monkeypatch):
    "A run with a folder, which survives full disks; and TMPDIR."
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    run = SimpleNamespace(folder=tmp_path / "runs" / "x")
    guard.survive_full_disks(run)
    return run


def full_below(folder: Path, name: str, data: str):
    "Write a file, but no disk below a folder has room."
    def write(where: Path):
        if where.is_relative_to(folder):
            raise GolfError(f"cannot write {where / name}") from OSError(28, "No space left on device")
        atomic_write(where / name, data)
    return write


def test_after_a_full_disk_all_files_go_elsewhere(tmp_path, run_with, capsys):
    first = run_with.folder
    run_with.save(full_below(first, "raw.golf", "weights"))
    assert (run_with.folder / "raw.golf").read_text() == "weights" and run_with.folder.is_relative_to(tmp_path / "tmp")
    run_with.save(lambda where: atomic_write(where / "ema.golf", "more"))
    assert sorted(p.name for p in run_with.folder.iterdir()) == ["ema.golf", "raw.golf"] and not first.exists()
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and str(run_with.folder) in said and "raw.golf" in said


def test_other_errors_of_a_write_are_raised(run_with):
    def write(where: Path):
        raise GolfError("over the budget")

    before = run_with.folder
    with pytest.raises(GolfError, match="over the budget"):
        run_with.save(write)
    assert run_with.folder == before


def test_a_folder_without_room_is_refused_and_none_is_made(tmp_path, monkeypatch):
    guard.check_room(tmp_path / "a" / "b")
    monkeypatch.setattr(guard.shutil, "disk_usage", lambda path: SimpleNamespace(free=3 << 20))
    with pytest.raises(GolfError, match="3 MiB"):
        guard.check_room(tmp_path / "a" / "b")
    (tmp_path / "file").write_text("")
    with pytest.raises(GolfError, match="RUNS_DIR"):
        guard.check_room(tmp_path / "file" / "b")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file"]


def test_a_gpu_too_small_is_named(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=24 * 2**30))
    assert "rank 3" in guard.full_gpu_sentence(Ranks(3, 8)) and "24 GiB" in guard.full_gpu_sentence(Ranks(3, 8))
    assert "nvidia-smi" in guard.full_gpu_sentence(None)


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_a_folder_that_cannot_be_written_is_refused(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(GolfError, match="RUNS_DIR"):
        guard.check_room(tmp_path / "runs")


def test_a_run_looks_at_memory_and_disk_before_it_starts(tmp_path):
    (tmp_path / "file").write_text("x")
    s = settings_for("demo", **{name: value for name, value in (TINY | tiny_data(tmp_path / "data")).items() if name != "RECIPE"}, RUNS_DIR=tmp_path / "file/runs")
    with pytest.raises(GolfError, match="cannot make the run directory"):
        guard.preflight(s, Ranks())
    large = settings_for("pr549", VOCAB_SIZE=65536, MODEL_DIM=2097152, MLP_MULT=1000)
    with pytest.raises(GolfError, match="must fit into memory"):
        guard.preflight(large, Ranks())


def test_other_tokens_in_the_same_place_are_refused_where_a_manifest_has_their_hash(tmp_path):
    "As many, and of the same vocabulary."
    tiny_data(tmp_path)
    guard.check_hashes(tmp_path)
    for path in sorted(tmp_path.glob("*.bin")):
        good = path.read_bytes()
        path.write_bytes(good[:-2] + bytes([good[-2] ^ 1, good[-1]]))
        with pytest.raises(GolfError, match=f"tokens of {path} must have SHA-256.*its manifest.*build it again"):
            guard.check_hashes(tmp_path)
        path.write_bytes(good)
    path.write_bytes(good[:-2] + bytes([good[-2] ^ 1, good[-1]]))
    (tmp_path / "manifest.json").unlink()
    guard.check_hashes(tmp_path)  # nothing is known of them

"""`golfnb lab` serves a scratch copy of the notebooks, leaves the book alone, and stops with everything it started."""
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
from tiny import clean_env

ROOT = Path(__file__).resolve().parent.parent


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def family(root: int) -> list[int]:
    "A process and all that came from it, as far as they live; kernels have sessions of their own, so parents are followed."
    parents = {}
    for p in Path("/proc").glob("[0-9]*/stat"):
        try:
            words = p.read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue
        if words[0] != "Z":
            parents[int(p.parent.name)] = int(words[1])
    found = [root] if root in parents else []
    for pid in found:
        found += [child for child, parent in parents.items() if parent == pid]
    return found


def alive(pids: list[int]) -> list[int]:
    "Those that still run."
    return [p for p in pids if p in family(p)]


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="looks for processes in /proc")
def test_lab_serves_the_copy_and_stops_with_its_kernels(tmp_path):
    port, before = free_port(), {p.name: p.stat().st_mtime_ns for p in (ROOT / "nbs").glob("*.ipynb")}
    env = clean_env(JUPYTER_TOKEN="secret", JUPYTER_CONFIG_DIR=str(tmp_path / "config"), JUPYTER_DATA_DIR=str(tmp_path / "data"), JUPYTER_RUNTIME_DIR=str(tmp_path / "run"))
    command = [sys.executable, "-c", "from golfnb.cli import main_cli; raise SystemExit(main_cli())", "lab", "--no-browser", "--port", str(port), "--dir", str(tmp_path / "lab")]
    with open(tmp_path / "log", "w") as log:
        job = subprocess.Popen(command, cwd=tmp_path, env=env, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))  # a shell may start us with it ignored

    def fetch(path: str, data: bytes | None = None) -> bytes:
        request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data, {"Authorization": "token secret", "Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=10) as answer:
            return answer.read()

    try:
        end = time.time() + 60
        while True:
            try:
                page = fetch("/lab/tree/00_settings.ipynb")
                break
            except OSError:
                assert job.poll() is None and time.time() < end, (tmp_path / "log").read_text()[-2000:]
                time.sleep(0.2)
        assert b"JupyterLab" in page and b'"00_settings.ipynb"' in fetch("/api/contents")
        fetch("/api/kernels", b"{}")
        members = family(job.pid)
        assert len(members) >= 2, "the server and a kernel"
        job.send_signal(signal.SIGINT)
        assert job.wait(timeout=30) == 0, (tmp_path / "log").read_text()[-2000:]
        end = time.time() + 10
        while alive(members) and time.time() < end:
            time.sleep(0.1)
        assert not alive(members), "a process was left behind"
    finally:
        for pid in alive(family(job.pid)):
            os.kill(pid, signal.SIGKILL)
        job.wait()
    assert before == {p.name: p.stat().st_mtime_ns for p in (ROOT / "nbs").glob("*.ipynb")}, "the book was touched"
    assert "notebooks copied" in (tmp_path / "log").read_text() and (tmp_path / "lab" / "results").is_dir()

"""Starting the ranks: what they say is said once, nobody is left behind, cores are shared; and the script in the tree."""
import ast
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

import golfnb.tools.launcher as launcher
from golfnb.tools.joiner import END_WITH_TORCHRUN, pack_program
from golfnb.tools.launcher import TORCHRUN, Relay, first_failures, package_dir, python_module, run_script, safe_environment, this_golfnb, usable_cores
from golfnb.tools.programs import recipe_program, script_text
from tiny import clean_env, golfnb, one_sentence


def told(lines: list[str], status: int) -> tuple[int, list[str]]:
    "The status of a run whose ranks say these lines, when torchrun ends with `status`; and what is passed on."
    out = []
    relay = Relay(out.append)
    for line in lines:
        relay.take(line)
    return relay.finish(status), out


def test_relay_passes_tracebacks_and_warnings_on():
    lines = ["Traceback (most recent call last):\n", "ValueError: ours\n", "warning: x\n"]
    assert told(lines, 1) == (1, lines) and told(lines, 0) == (0, lines)


def test_torchrun_says_it_once_and_hands_on_the_status(tmp_path):
    path, said = tmp_path / "s.py", []
    path.write_text("import os, sys, time\nprint('golfnb: bad', file=sys.stderr, flush=True)\ntime.sleep(1)\nos._exit(3)\n")
    assert run_script(path, 2, {}, said.append) == 3
    assert said == ["golfnb: bad\n"]
    path.write_text("import os, signal, time\nif os.environ['RANK'] == '1': os.kill(os.getpid(), signal.SIGKILL)\ntime.sleep(900)\n")
    said.clear()
    assert run_script(path, 2, {}, said.append) == 1
    assert len(said) == 1 and re.fullmatch("golfnb: rank 1 .*signal 9.*\n", said[0])
    path.write_text("raise ValueError('ours')\n")
    said.clear()
    assert run_script(path, 1, {}, said.append) == 1
    assert said[0].startswith("Traceback") and said[-1] == "ValueError: ours\n" and "ChildFailedError" not in "".join(said)


ENVIRONMENT = """import json, os
print(json.dumps({n: os.environ.get(n) for n in ("OMP_NUM_THREADS", "OMP_WAIT_POLICY")}), flush=True)
"""


def told_environment(code: str, **own: str) -> dict:
    "What ENVIRONMENT prints when a process with `own` variables alone for OpenMP runs `code`."
    env = {n: v for n, v in os.environ.items() if not n.startswith(("OMP_", "GOMP_", "KMP_"))}
    done = subprocess.run([sys.executable, "-c", "import golfnb.tools.launcher as launcher\n" + code], env=env | own, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


AS_TORCHRUN = f"launcher.TORCHRUN = {ENVIRONMENT.replace('{', '{{').replace('}', '}}')!r}\n"  # prints what ranks would get


@pytest.mark.parametrize("allowed, usable, busy, ranks, threads", [
    (4, 4, 0.2, 1, 4), (4, 4, 0.9, 1, 3), (2, 2, 1.1, 1, 1), (2, 2, 2.0, 1, 1), (4, 4, 0.0, 2, 2), (4, 4, 1.0, 2, 1), (1, 1, 0.0, 2, 1), (64, 2, 10.0, 1, 2)])
def test_ranks_share_the_cores_that_nothing_keeps_busy(allowed, usable, busy, ranks, threads):
    code = f"launcher.allowed_cores = lambda: {allowed}\nlauncher.usable_cores = lambda: {usable}\nlauncher.busy_cores = lambda: {busy}\nraise SystemExit(launcher.run_script('none', {ranks}, {{}}))"
    assert told_environment(AS_TORCHRUN + code) == {"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": None}


@pytest.mark.parametrize("usable, free, ranks, words", [
    (4, 4, 1, ""), (4, 2, 1, "OMP_NUM_THREADS=2 for each rank, because other processes keep 2 of 4 cores busy"), (2, 1, 2, ""), (1, 1, 4, "")])
def test_that_others_take_threads_is_said(monkeypatch, usable, free, ranks, words):
    said = []
    monkeypatch.setattr(launcher, "usable_cores", lambda: usable)
    monkeypatch.setattr(launcher, "free_cores", lambda: free)
    assert launcher.rank_threads(ranks, said.append) == max(1, free // ranks)
    assert words in "".join(said) and bool(words) == bool(said)


def test_a_rank_gets_the_threads(tmp_path):
    path = tmp_path / "s.py"
    path.write_text(ENVIRONMENT)
    code = f"launcher.free_cores = lambda: 3\nraise SystemExit(launcher.run_script({str(path)!r}, 1, {{}}))"
    assert told_environment(code) == {"OMP_NUM_THREADS": "3", "OMP_WAIT_POLICY": None}


def test_what_the_user_says_of_threads_stays():
    code = AS_TORCHRUN + "raise SystemExit(launcher.run_script('none', 1, {'OMP_NUM_THREADS': '5'}))"
    assert told_environment(code, OMP_NUM_THREADS="3", OMP_WAIT_POLICY="ACTIVE") == {"OMP_NUM_THREADS": "5", "OMP_WAIT_POLICY": "ACTIVE"}


@pytest.mark.skipif(sys.platform != "linux", reason="/proc/stat is Linux's")
def test_cores_that_others_keep_busy_are_counted(tmp_path, monkeypatch):
    "Core 1 works all the time, core 2 half of it, core 3 is not ours."
    stat = tmp_path / "stat"
    stat.write_text("cpu  9 9 9 9 9 9 9 9\ncpu0 0 0 0 50 0 0 0 0\ncpu1 5 0 0 50 0 0 0 0\ncpu2 0 0 0 50 0 0 0 0\ncpu3 0 0 0 50 0 0 0 0\nintr 5\n")
    later = "cpu0 0 0 0 90 10 0 0 0\ncpu1 45 0 5 50 0 0 0 5\ncpu2 25 0 0 75 0 0 0 0\ncpu3 50 0 0 50 0 0 0 0\n"
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2})
    monkeypatch.setattr(launcher.time, "sleep", lambda seconds: stat.write_text(later))
    assert abs(launcher.busy_cores(5.0, stat) - 1.5) < 0.1
    assert launcher.busy_cores(5.0, tmp_path / "none") == 0


@pytest.mark.parametrize("line, files, cores", [
    ("0::/box/inner", {"box/cpu.max": "300000 100000", "box/inner/cpu.max": "max 100000"}, 3),
    ("0::/box", {"cpu.max": "150000 100000"}, 1),
    ("0::/box", {"cpu.max": "50000 100000"}, 1),
    ("4:cpuacct,cpu:/box", {"cpu/box/cpu.cfs_quota_us": "200000", "cpu/box/cpu.cfs_period_us": "100000"}, 2),
    ("4:cpu:/", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 8),
    ("4:memory:/box", {"cpu/box/cpu.cfs_quota_us": "200000", "cpu/box/cpu.cfs_period_us": "100000"}, 8),
    ("0::/gone", {}, 8)])
def test_a_quota_of_a_control_group_counts(tmp_path, monkeypatch, line, files, cores):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    groups = tmp_path / "groups"
    groups.write_text(f"1:name=systemd:/\n{line}\n")
    assert usable_cores(groups, tmp_path) == cores


LOST = "golfnb: rank 0 lost the others in a collective (closed): see which rank ended first, and why\n"
STOPPED = "golfnb: stopped by SIGTERM after step 7\n"
KILLED = "golfnb: rank 1 was ended by signal 9; the others were stopped\n"


@pytest.mark.parametrize("codes, ranks, code", [
    ({0: 4, 1: -9}, [1], -9), ({0: 4, 1: -9, 2: -15}, [1], -9), ({0: -15, 1: -15}, [0, 1], -15), ({0: 5, 1: -9}, [1], -9), ({0: 4, 1: 1}, [1], 1),
    ({0: -9, 1: 2}, [1], 2), ({0: -9, 1: -11}, [1], -11), ({0: 4, 1: -15}, [0], 4), ({0: -9, 1: 4, 2: -9}, [0, 2], -9), ({1: 130}, [1], 130)])
def test_the_rank_that_began_is_blamed(codes, ranks, code):
    assert first_failures(codes) == (ranks, code)


@pytest.mark.parametrize("lines, ended, status, words", [
    ([LOST, KILLED], 1, 1, "rank 1 .*signal 9"), ([LOST, LOST], 4, 4, re.escape(LOST[8:-1])), ([LOST], 143, 143, "signal 15"),
    ([STOPPED, LOST], 143, 5, "SIGTERM .*step 7"), ([STOPPED], 5, 5, "SIGTERM .*step 7"), ([STOPPED.replace("SIGTERM", "Ctrl-C")], 130, 5, "Ctrl-C .*step 7"), (["golfnb: interrupted\n"], 130, 130, "interrupted"),
    ([STOPPED, KILLED], 1, 1, "rank 1 .*signal 9"), ([], 130, 130, "interrupted"), (["golfnb: no shard\n", STOPPED, LOST], 2, 2, "no shard")])
def test_who_ended_a_run_is_said_once(lines, ended, status, words):
    found, out = told(lines, ended)
    assert found == status
    assert len(out) == 1 and re.fullmatch(f"golfnb: .*{words}.*\n", out[0])


linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process that its parent has ended")
WAITING = END_WITH_TORCHRUN + """import os, sys, time; from golfnb.run import run; from golfnb.tools.guard import guarded_rank
def work(ranks):
    os.mkdir(sys.argv[0] + os.environ["RANK"]); time.sleep(900)
guarded_rank(run, work)
"""


def running(mark: str) -> list[int]:
    "The processes that have a word in their environment, and still run."
    found = []
    for p in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if mark.encode() in (p / "environ").read_bytes() and ") Z " not in (p / "stat").read_text():
                found.append(int(p.name))
    return found


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])


@linux
@pytest.mark.parametrize("to, number, status, words", [
    ("golfnb", signal.SIGKILL, -9, ""), ("torchrun", signal.SIGKILL, 137, "golfnb: .*signal 9\n"), ("golfnb", signal.SIGTERM, 143, "golfnb: .*signal 15\n"),
    ("golfnb", signal.SIGINT, 130, "golfnb: interrupted\n")])
def test_nobody_is_left_behind(tmp_path, to, number, status, words):
    path = tmp_path / "s.py"
    path.write_text(WAITING)
    code = f"import sys; from golfnb.tools.launcher import run_script; sys.exit(run_script({str(path)!r}, 1, {{}}))"
    job = subprocess.Popen([sys.executable, "-c", code], env={**os.environ, "MARK": str(tmp_path)}, stderr=subprocess.PIPE, text=True)
    try:
        while not Path(f"{path}0").exists() and job.poll() is None:
            time.sleep(0.1)
        torchrun = next(p for p in running(str(tmp_path)) if parent(p) == job.pid)
        os.kill(job.pid if to == "golfnb" else torchrun, number)
        assert job.wait(600) == status
        end = time.time() + 300
        while running(str(tmp_path)) and time.time() < end:
            time.sleep(0.1)
        assert running(str(tmp_path)) == [] and re.fullmatch(words, job.stderr.read())
    finally:
        for p in running(str(tmp_path)):
            os.kill(p, signal.SIGKILL)


def test_torchrun_does_not_begin_where_its_parent_has_ended():
    done = subprocess.run([sys.executable, "-c", TORCHRUN.format(parent=-1, golfnb=this_golfnb()), "--standalone", "none.py"], capture_output=True, timeout=300)
    assert done.returncode == 143


START = "import subprocess, sys; {}; sys.exit(subprocess.run([sys.executable, sys.argv[1]], start_new_session={}).returncode)"


@linux
@pytest.mark.parametrize("holds, own_session, status", [("pass", True, 143), ("import torch", True, 0), ("pass", False, 0)])
def test_a_rank_whose_torchrun_has_ended_does_not_begin(tmp_path, holds, own_session, status):
    "Its parent then holds no torch; a wrapper between torchrun and rank holds none either, but shares its session."
    (tmp_path / "rank.py").write_text(END_WITH_TORCHRUN + "print('begun')\n")
    done = subprocess.run([sys.executable, "-c", START.format(holds, own_session), str(tmp_path / "rank.py")], capture_output=True, text=True, timeout=300, env={**os.environ, "TORCHELASTIC_RUN_ID": "x"})
    assert done.returncode == status and done.stdout == "begun\n" * (status == 0), done.stderr


@linux
def test_ranks_end_with_a_torchrun_that_is_killed_as_it_starts_them(tmp_path):
    "A plain torchrun, as a judge calls it; its ranks have not imported torch yet."
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", package_dir() / "train_gpt.py"]
    job = subprocess.Popen(command, cwd=tmp_path, env={**os.environ, "MARK": str(tmp_path)}, stderr=subprocess.DEVNULL)
    try:
        end = time.time() + 300
        while len(running(str(tmp_path))) < 3 and time.time() < end:
            time.sleep(0.01)
        assert len(running(str(tmp_path))) == 3
        job.kill()
        end = time.time() + 90
        while len(running(str(tmp_path))) > 0 and time.time() < end:
            time.sleep(0.1)
        assert running(str(tmp_path)) == []
    finally:
        for p in running(str(tmp_path)):
            os.kill(p, signal.SIGKILL)
        job.wait()


# ---- a folder that somebody else has filled ----

HOSTILE = ("random", "numpy", "triton", "torch", "argparse", "json", "typing", "runpy", "warnings", "ctypes", "logging", "sitecustomize", "usercustomize")


@pytest.fixture
def hostile(tmp_path, monkeypatch):
    "The current folder, whose files tell beside it that they were executed; PYTHONPATH ends with nothing, which is the current folder."
    folder = tmp_path / "run"
    (folder / "golfnb").mkdir(parents=True)
    for name in (*HOSTILE, "golfnb/__init__"):
        (folder / f"{name}.py").write_text(f"open({str(tmp_path)!r} + '/executed', 'a').write({name!r})\nraise ImportError('hostile')\n")
    (folder / "mine.pth").write_text("import random\n")
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PYTHONPATH", f"{package_dir().parent}{os.pathsep}")
    return folder


def executed(folder: Path) -> str:
    return (folder.parent / "executed").read_text() if (folder.parent / "executed").exists() else ""


@pytest.mark.parametrize("ranks", [1, 2])
def test_ranks_run_nothing_that_lies_in_the_current_folder(hostile, ranks):
    "Also where their script lies there, as that of a run."
    said = []
    (hostile / "s.py").write_text("import random, sys, typing\nassert not any('executed' in open(p.__file__).read() for p in (random, typing))\n")
    assert run_script(hostile / "s.py", ranks, {}, said.append) == 0 and not said
    status = run_script(hostile / "none.py", ranks, {}, said.append, module="golfnb.tools.checkpoint")
    assert status == 2 and len(said) == 1 and re.fullmatch("golfnb: .*none.py.*No such file.*\n", said[0]), said
    assert not executed(hostile)


def test_a_score_on_two_ranks_runs_nothing_that_lies_in_the_run(hostile):
    done = golfnb("score", ".", "--nproc", 2, cwd=hostile)
    assert done.returncode == 2 and one_sentence(done.stderr), done.stderr
    assert not executed(hostile)


@pytest.mark.parametrize("module", ["golfnb", "golfnb.tools.cli", "golfnb.tools.checkpoint"])
def test_python_m_runs_nothing_that_lies_in_the_current_folder(hostile, module):
    "But for a package golfnb, which is then what was asked for."
    shutil.rmtree(hostile / "golfnb")
    env = safe_environment({})
    del env["PYTHONSAFEPATH"]
    words = ["-m", module, "none.py" if module.endswith("checkpoint") else "--version"]
    done = subprocess.run([sys.executable, *words], env=env, capture_output=True, text=True)
    assert done.returncode == 2 * module.endswith("checkpoint") and "Traceback" not in done.stderr and not executed(hostile), done.stderr


def test_a_module_of_golfnb_is_that_of_the_package_that_runs(hostile):
    "Without a PYTHONPATH that leads to it, and in the folder of another."
    env = safe_environment({"PYTHONPATH": ""})
    done = subprocess.run([*python_module("golfnb.settings", "import random\n"), "x"], env=env, capture_output=True, text=True)
    assert done.returncode == 0 and not done.stderr and "PYTHONPATH" not in env and not executed(hostile)


# ---- the real package ----

def test_the_script_in_the_tree_is_the_joined_one_and_stands_alone():
    text = script_text(recipe_program("pr549"))
    assert text == (package_dir() / "train_gpt.py").read_text(encoding="utf-8")
    tree = ast.parse(text)
    roots = {a.name.split(".")[0] for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names} | {n.module.split(".")[0] for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
    allowed = {"torch", "triton", "numpy", "sentencepiece"} | set(sys.stdlib_module_names)
    assert roots <= allowed, f"the script imports {roots - allowed}"
    assert len(pack_program(text).encode()) < len(text.encode()) / 3
    marks = re.findall(r"(?m)^# ---- golfnb/(.+)\.py ----$", text)
    assert marks[:2] == ["muon/errors", "settings"] and marks[-1] == "recipes/pr549" and marks.index("run/train") < marks.index("run/run") and max(map(len, text.splitlines())) <= 110


def test_torch_that_does_not_fit_ends_a_command_in_a_sentence(tmp_path):
    "Its libraries end the process from C++, so another process imports it first where there is a limit."
    (tmp_path / "torch.py").write_text("import os\nos.abort()\n")
    limited = partial(resource.setrlimit, resource.RLIMIT_AS, (2**42, resource.getrlimit(resource.RLIMIT_AS)[1]))
    done = subprocess.run([sys.executable, "-m", "golfnb", "artifact", "inspect", "a.golf"], capture_output=True, text=True, cwd=tmp_path,
                          env=clean_env(PYTHONPATH=str(tmp_path)), preexec_fn=limited)
    assert done.returncode == 2 and one_sentence(done.stderr) and "memory of this process must suffice" in done.stderr, done.stderr

"""Processes that need not import torch each: they are forked from a server that has."""
import atexit
import gc
import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from copy import copy
from multiprocessing.reduction import DupFd
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

HERE = Path(__file__).resolve().parent


def run_frozen(rank: int, entry, *args) -> None:
    "What the server imported is no garbage; to search it takes time, and copies memory that the processes share."
    gc.freeze()
    entry(rank, *args)


@contextmanager
def server():
    "The server, started by the first call, imports what any of the tests' entries need."
    import torch.multiprocessing as mp

    mp.set_forkserver_preload(["workers", "score_workers", "optimizer_workers", "transformers.models.gpt2.modeling_gpt2"])
    path = os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])
    with patch.dict(os.environ, PYTHONPATH=path):
        yield mp


def fork_processes(entry, args: tuple, nprocs: int):
    "Run entry(i, *args) in `nprocs` processes."
    with server() as mp:
        mp.start_processes(run_frozen, args=(entry, *args), nprocs=nprocs, start_method="forkserver")


class Passed:
    "An open file whose descriptor goes along to a forked process, where `detach()` gives it."

    def __init__(self, file):
        self.file = file

    def __reduce__(self):
        return copy, (DupFd(self.file.fileno()),)


def python(words: list[str], out, err, cwd: str, env: dict, prepare) -> None:
    "What `python WORDS` does, where the first word is a script, or -m and a module."
    gc.freeze()  # as in run_frozen
    multiprocessing.current_process()._config.pop("daemon")  # it may fork processes of its own
    os.setsid()
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    for fd, where in enumerate((out, err), 1):
        os.dup2(where.detach(), fd)
    sys.stdout, sys.stderr = (open(fd, "w", buffering=1, closefd=False) for fd in (1, 2))
    prepare()
    run, sys.argv = (runpy.run_module, words[1:]) if words[0] == "-m" else (runpy.run_path, words)
    run(sys.argv[0], run_name="__main__", **({"alter_sys": True} if words[0] == "-m" else {}))


def fork_python(words: list, out, err, cwd: Path, env: dict, prepare=dict):
    """Start `python WORDS`, its output into two open files; a process of multiprocessing. `prepare()` is called in it before.

    It gets SIGTERM if it still runs when the tests end.
    """
    with server() as mp:
        child = mp.get_context("forkserver").Process(target=python, args=([str(word) for word in words], Passed(out), Passed(err), str(cwd), env, prepare), daemon=True)
        child.start()
    return child


def run_python(words: list, cwd: Path, env: dict, prepare=dict) -> subprocess.CompletedProcess:
    "As subprocess.run([sys.executable, *words]) with its output as text."
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        child = fork_python(words, out, err, cwd, env, prepare)
        child.join()
        for file in (out, err):
            file.seek(0)
        return subprocess.CompletedProcess(words, child.exitcode, out.read(), err.read())


def judged(pipe, place: dict, env: dict) -> None:
    "What a child of the judge does."
    from golfnb.tools.judge import answer

    gc.freeze()  # as in run_frozen
    os.environ.update(env)
    answer(pipe, place)


def fork_judged(number: int, place: dict, env: dict):
    "In place of golfnb.tools.judge.start_process."
    ours, theirs = multiprocessing.Pipe()
    with server() as mp, theirs:
        child = mp.get_context("forkserver").Process(target=judged, args=(theirs, place, env), daemon=True)
        child.start()
    return ours, child


def kernel(argv: list[str], folder: str) -> None:
    "What `python -m ipykernel_launcher` does."
    import numpy
    from ipykernel.kernelapp import IPKernelApp

    gc.freeze()  # as in run_frozen
    os.setsid()
    os.chdir(folder)
    numpy.random.seed()
    sys.argv, sys.path[:] = ["ipykernel_launcher.py", *argv], [str(HERE.parent), *(p for p in sys.path if p != str(HERE))]
    IPKernelApp.launch_instance([*argv, f"--IPKernelApp.parent_handle={os.getppid()}"])
    atexit._run_exitfuncs()


def fork_kernel(command: list[str], cwd: str, **_) -> SimpleNamespace:
    "In place of jupyter_client's launch_kernel; what it returns is used as a Popen."
    forks = multiprocessing.get_context("forkserver")
    # what torch imports at the first step of an optimizer or the first sum of tensors without data; but for Triton, and what needs it:
    # a notebook may choose before it imports Triton whether kernels are interpreted
    late = ["torch.fx.experimental.symbolic_shapes", "torch.distributed.fsdp", "torch.distributed.checkpoint"]
    forks.set_forkserver_preload(["ipykernel.kernelapp", "matplotlib.pyplot", "sentencepiece", "torch", *late])
    child = forks.Process(target=kernel, args=(command[command.index("-f"):], cwd))
    child.start()
    while os.getpgid(child.pid) == os.getpgrp():  # signals go to its group
        time.sleep(0.01)
    return SimpleNamespace(pid=child.pid, poll=lambda: child.exitcode, wait=lambda: child.join() or child.exitcode, kill=child.kill, terminate=child.terminate,
                           send_signal=lambda n: os.kill(child.pid, n), stdin=None, stdout=None, stderr=None)

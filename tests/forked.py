"""Processes that need not import torch each: they are forked from a server that has."""
import atexit
import gc
import multiprocessing
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

HERE = Path(__file__).resolve().parent


def run_frozen(rank: int, entry, *args) -> None:
    "What the server imported is no garbage; to search it takes time, and copies memory that the processes share."
    gc.freeze()
    entry(rank, *args)


def fork_processes(entry, args: tuple, nprocs: int):
    "Run entry(i, *args) in `nprocs` processes; the server, started by the first call, imports what any of the tests' entries need."
    import torch.multiprocessing as mp

    mp.set_forkserver_preload(["workers", "score_workers", "optimizer_workers", "transformers.models.gpt2.modeling_gpt2"])
    path = os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])
    with patch.dict(os.environ, PYTHONPATH=path):
        mp.start_processes(run_frozen, args=(entry, *args), nprocs=nprocs, start_method="forkserver")


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
    # torch imports torch._dynamo, which takes two seconds, for the first step of an optimizer or the first sum of tensors without data
    forks.set_forkserver_preload(["ipykernel.kernelapp", "matplotlib.pyplot", "sentencepiece", "torch._dynamo"])
    child = forks.Process(target=kernel, args=(command[command.index("-f"):], cwd))
    child.start()
    while os.getpgid(child.pid) == os.getpgrp():  # signals go to its group
        time.sleep(0.01)
    return SimpleNamespace(pid=child.pid, poll=lambda: child.exitcode, wait=lambda: child.join() or child.exitcode, kill=child.kill, terminate=child.terminate,
                           send_signal=lambda n: os.kill(child.pid, n), stdin=None, stdout=None, stderr=None)

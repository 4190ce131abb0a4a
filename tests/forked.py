"""Processes that need not import torch each: they are forked from a server that has."""
import os
from pathlib import Path
from unittest.mock import patch

import torch.multiprocessing as mp


def fork_processes(entry, args: tuple, nprocs: int):
    "Run entry(i, *args) in `nprocs` processes; the server, started by the first call, imports what any of the tests' entries need."
    mp.set_forkserver_preload(["workers", "score_workers", "any_workers", "transformers.models.gpt2.modeling_gpt2"])
    path = os.pathsep.join([str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    with patch.dict(os.environ, PYTHONPATH=path):
        mp.start_processes(entry, args=args, nprocs=nprocs, start_method="forkserver")

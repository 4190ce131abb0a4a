"""What torchrun starts on the nodes of test_nodes: python node_worker.py WHAT FOLDER [JSON]."""
from golfnb.tools.joiner import END_WITH_TORCHRUN

exec(END_WITH_TORCHRUN)
import json
import os
import pickle
import re
import sys
import time
from functools import partial
from pathlib import Path

import torch
import workers
from tiny import own_program

from golfnb.recipes import demo
from golfnb.run import run as core
from golfnb.tools.checkpoint import open_kept
from golfnb.tools.guard import guarded_rank


def sent() -> int:
    "Bytes that this node has sent."
    eth0 = re.search(r"eth0:(.*)", Path("/proc/self/net/dev").read_text())
    return int(eth0[1].split()[8])


def spent(now, ranks, env: dict) -> list[float]:
    "What `now` counts in four optimizer steps after the first, slowest rank."
    _, model, engine = workers.machine(env, ranks, torch.float32)
    took = []
    for _ in range(5):
        for p in model.parameters():
            p.grad = torch.full_like(p, 1e-3)
        ranks.barrier()
        start = now()
        engine.step()
        ranks.barrier()
        took.append(now() - start)
    return took[1:]


def work(ranks):
    what, folder, *words = sys.argv[1:]
    if what == "run":
        env = {"CHECKPOINT_EVERY_S": "0", **os.environ}
        program = own_program("two_level") if env["RECIPE"] == "two_level" else demo
        return program.main(open_kept(program, env, ranks)).get("over_budget")
    measure = {"steps": workers.five_steps, "seconds": partial(spent, time.perf_counter), "bytes": partial(spent, sent)}[what]
    found = [measure(ranks, env) for env in json.loads(words[0])]
    Path(folder, f"{ranks.rank}.pkl").write_bytes(pickle.dumps(found))


guarded_rank(core, work)

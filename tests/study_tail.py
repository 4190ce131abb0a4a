"""From the end of backward to published weights, with a sync around it: the figures of chapter 13.

    OUT=FOLDER PYTHONPATH=. torchrun --standalone --nproc_per_node=N tests/study_tail.py [NAME=VALUE ...]

Gradients are random, so no forward is compiled. Clip local and global, both plans; updates recorded, recorded with the library's products instead of chapter 09's kernels, or eager (launched one by one); writes FOLDER/tail_N.json.
"""
import os
import sys
import time
from statistics import median

import torch

from golfnb.bench import record_result, wait_for
from golfnb.config import load_config
from golfnb.kernels import KERNELS_ON
from golfnb.layout import model_layout
from golfnb.model import Golf, init_model
from golfnb.parallel_muon import Ranks, make_engine, start_ranks, stop_ranks
from golfnb.train import Averages

ROUNDS, WARM = 40, 10


def measure(ranks: Ranks, settings: dict, mode: str) -> dict:
    "Samples in ms: `tail` to published weights, `host` until all is launched, `ema`."
    (KERNELS_ON.discard if mode == "library" else KERNELS_ON.add)("ns")
    cfg = load_config({"RECIPE": "pr549", **settings})
    layout = model_layout(cfg, ranks.world)
    model = Golf(cfg, layout, dtype=torch.bfloat16, device=ranks.device)
    init_model(model, cfg, 1)
    engine = make_engine(model, layout, cfg, ranks)
    for step in [engine.small_step, *engine.bank_steps.values()] if mode == "eager" else []:
        step.left = -1
    averages, params = Averages(cfg, engine), [p for group in model.role_params().values() for p in group.values()]
    grads, one = [1e-3 * torch.randn_like(p) for p in params], torch.ones((), device=ranks.device)
    said = {"tail": [], "host": [], "ema": []}
    for i in range(ROUNDS):
        for p, g in zip(params, grads):
            p.grad = g.clone()
        wait_for(ranks.device)
        ranks.barrier()
        start = time.perf_counter()
        engine.launch(loss=one, elapsed_ms=1.0)
        engine.finish(one, 0.95)
        launched = time.perf_counter()
        wait_for(ranks.device)
        published = time.perf_counter()
        averages.update(i, 1.0)
        wait_for(ranks.device)
        if i >= WARM:
            for name, a, b in (("tail", start, published), ("host", start, launched), ("ema", published, time.perf_counter())):
                said[name].append(1e3 * (b - a))
    return said


def main(words: list[str]):
    ranks, samples = start_ranks(), {}
    given = dict(w.split("=", 1) for w in words)
    for clip in ("local", "global"):
        for plan in ("pr399", "shared_mlp"):
            for mode in ("recorded", "library", "eager"):
                found = measure(ranks, {"CLIP": clip, "PLAN": plan, **given}, mode)
                samples |= {f"{clip} {plan} {mode}: {k}": v for k, v in found.items()}
                if ranks.master:
                    print(f"{clip} {plan} {mode}: tail {median(found['tail']):.3f} ms, host {median(found['host']):.3f}, EMA {median(found['ema']):.3f}", flush=True)
    if ranks.master:
        record_result(f"tail_{ranks.world}", samples, "ms", "Post-backward to published weights (tail), host part of it, and EMA, synchronised around each, bf16, random gradients",
                      {"ranks": ranks.world, "recipe": "pr549", "settings": given}, os.environ.get("OUT", "nbs/results"))
    stop_ranks(ranks)


if __name__ == "__main__":
    main(sys.argv[1:])

"""Forward and backward with each kernel and without, on one GPU: the figures of chapter 07.

    PYTHONPATH=. python3 tests/study_kernels.py FOLDER [VARIANT ...]     about 100 s; writes FOLDER/kernels_h200_ab.json and prints a table

A variant is "plain" or kernels joined by +, e.g. heads+xsa+fold+mlp. Also: the loss and gradients of one step, and 20 training steps,
with the last variant against plain; and the kernels of the last variant by time.
"""
import sys
import time
from collections import Counter

import torch
from torch.profiler import ProfilerActivity, profile

from golfnb.bench import interleave, record_result, spread
from golfnb.config import load_config
from golfnb.kernels import KERNELS_ON
from golfnb.layers import softcap_loss
from golfnb.layout import model_layout
from golfnb.model import Golf, init_model
from golfnb.parallel_muon import Ranks, make_engine, restore, snapshot

ROWS, T, START = 48, 2048, time.time()


def say(*words):
    print(f"[{time.time() - START:5.1f}]", *words, flush=True)


def switched(names: str, f):
    "`f` with these kernels on."
    def g(*args):
        KERNELS_ON.clear()
        KERNELS_ON.update(() if names == "plain" else names.split("+"))
        return f(*args)
    return g


def main(folder: str, variants: list[str]):
    torch._dynamo.config.recompile_limit = torch._dynamo.config.accumulated_recompile_limit = 64
    cfg, g = load_config({}), torch.Generator().manual_seed(0)
    walk = (torch.randint(0, 12, (20, ROWS * T + 1), generator=g).cumsum(1) % cfg.vocab_size).cuda()
    batches = [(row[:-1].view(ROWS, T), row[1:].view(ROWS, T)) for row in walk]
    model = Golf(cfg, model_layout(cfg, 1), torch.bfloat16, "cuda")
    init_model(model, cfg, 1337)
    engine = make_engine(model, model.layout, cfg, Ranks(device="cuda"))  # before compiling: it moves the parameters' storage
    saved = snapshot(engine)
    loss = torch.compile(lambda ids, targets: softcap_loss(model(ids), targets, model.cap), fullgraph=True, dynamic=False)

    def step(batch=batches[0]):
        for p in model.parameters():
            p.grad = None
        out = loss(*batch)
        out.backward()
        return out.detach()

    steps = {v: switched(v, step) for v in variants}
    last, first = variants[-1], {}
    for v, f in steps.items():
        t = time.time()
        say(v, "loss at the initial weights", f().item(), f"compiled in {time.time() - t:.0f} s")
    with torch.no_grad():
        for p in model.parameters():
            p += 0.02 * torch.randn(p.shape, generator=torch.Generator("cuda").manual_seed(1), device="cuda").to(p.dtype)
    for v, f in steps.items():
        first[v] = f().item(), {n: p.grad.double() for n, p in model.named_parameters()}
        worst = sorted(((float((a - first[variants[0]][1][n]).norm() / a.norm()), n) for n, a in first[v][1].items()), reverse=True)[:4]
        say(v, "loss", first[v][0], "gradients against", variants[0], [(n, f"{e:.1e}") for e, n in worst])
    samples = interleave(steps, rounds=12, warmup=2, loops=3, device="cuda")
    for v, s in samples.items():
        say(f"{v:24s}", {k: round(x, 3) for k, x in spread(s).items()})
    for v in (variants[0], last):
        restore(engine, saved)
        got = []
        for batch in batches:
            got.append(steps[v](batch))
            engine.launch(loss=got[-1])
            engine.finish(1.0, 0.92)
        samples[f"loss of 20 steps, {v}"] = torch.stack(got).tolist()
    a, b = (samples[f"loss of 20 steps, {v}"] for v in (variants[0], last))
    say("20 steps, worst difference", max(abs(x - y) for x, y in zip(a, b)), a, b)
    record_result("kernels_h200_ab", samples, "ms", "Forward and backward of pr549 with kernels on and off, 3 in a row per sample, interleaved; the loss series are in nats",
                  {"rows": ROWS, "seq_len": T, "gradient distance": {n: float((x - first[variants[0]][1][n]).norm() / x.norm()) for n, x in first[last][1].items()}}, folder)
    with profile(activities=[ProfilerActivity.CUDA]) as prof:
        steps[last]()
        torch.cuda.synchronize()
    time_of, count = Counter(), Counter()
    for e in prof.events():
        if e.device_type == torch.autograd.DeviceType.CUDA:
            time_of[e.name[:90]] += e.time_range.elapsed_us() / 1e3
            count[e.name[:90]] += 1
    say(last, "kernels", round(sum(time_of.values()), 2), "ms in", sum(count.values()), "launches")
    print("\n".join(f"{ms:8.3f} ms {count[n]:4d} x  {n}" for n, ms in time_of.most_common(40)))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:] or ["plain", "heads+xsa", "heads+xsa+fold", "heads+xsa+fold+mlp"])

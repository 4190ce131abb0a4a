"""Measure what PRODUCT_TILES of chapter 04 says, on a GPU: python tests/products.py FOLDER [an earlier newton_schulz.py].

Every product of newton_schulz by the library and by each tile, and all of it against the library (or the earlier file), in turns. Writes newton_schulz_products_h100.json."""
import importlib.util
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from golfnb.muon.newton_schulz import half_product, newton_schulz
from golfnb.tools.results import record_result

TILES = ((64, 4), (128, 4), (128, 8))
SIDES = (256, 384, 512, 768, 1024, 1536, 2048, 4096)
MODELS = {"512 x 11": ((44, 512, 512), (11, 2048, 512), (11, 512, 2048)), "1024 x 16": ((64, 1024, 1024), (16, 4096, 1024), (16, 1024, 4096)),
          "2048 x 24": ((96, 2048, 2048), (24, 8192, 2048), (24, 2048, 8192))}  # width x blocks, its batches
RECIPE = ((22, 512, 512), (22, 256, 512), (22, 1536, 512), (3, 512, 512), (3, 256, 512), (3, 1536, 512), (11, 512, 512), (11, 1536, 512))  # banks of pr549 on one GPU, and shares of them
ODD = ((11, 576, 1536), (11, 960, 2560), (4, 1600, 6400), (11, 640, 640), (1, 1024, 4096), (1, 2048, 2048))


def shapes():
    "Batches of (n, short, long) that fit into a few seconds."
    found = [(n, s, l) for s in SIDES for l in (s, 3 * s, 4 * s) for n in (4, 11, 22, 44) if n * s * l <= 22 * 2048 * 8192 and n * s * s * l <= 16 * 4096 ** 3]
    return found + [(n, *sorted(rc)) for n, *rc in ODD]


def replayed(call: Callable, ms: float = 3.0) -> Callable:
    "A function that gives the ms of a call: of a CUDA graph of calls that lasts about so many ms."
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    call(), call()
    start.record(), call(), end.record()
    torch.cuda.synchronize()
    calls = max(1, min(30, int(ms / start.elapsed_time(end))))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            call()

    def timed():
        start.record(), graph.replay(), end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) / calls
    timed()
    return timed


def in_turns(calls: dict[str, Callable], rounds: int = 3) -> dict[str, list[float]]:
    timers = {name: replayed(call) for name, call in calls.items()}
    found = {name: [] for name in calls}
    for _ in range(rounds):
        for name, timed in timers.items():
            found[name].append(timed())
    return found


def launched(call: Callable, calls: int = 20) -> float:
    "ms of a call without a graph."
    call(), torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        call()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) * 1e3 / calls


def products(n: int, short: int, long: int) -> dict[str, list[float]]:
    X = torch.randn(n, short, long, device="cuda").bfloat16()
    A, norm, polynomial = torch.bmm(X, X.mT), X.float().norm(dim=(1, 2)), (3.4, -4.7, 2.0)
    calls = {"first library": lambda: torch.bmm(X, X.mT), "second library": lambda: torch.baddbmm(A, A, A, beta=-4.7, alpha=2.0),
             "third library": lambda: torch.bmm(A, X), "third added": lambda: torch.baddbmm(X, A, X, beta=3.4)}
    exact, bounds = X.float() @ X.float().mT, {}
    for side, warps in TILES:
        if short % side == 0:
            calls[f"second {side} {warps}"] = lambda side=side, warps=warps: half_product(A, side, warps, norm, polynomial)
            if long % 64 == 0:
                calls[f"first {side} {warps}"] = lambda side=side, warps=warps: half_product(X, side, warps)
                bounds[side, warps] = ((half_product(X, side, warps).float() - exact).norm() / exact.norm()).item()
    assert all(error < 4e-3 for error in bounds.values()), (n, short, long, bounds)
    return {f"{n}x{short}x{long} {name}": times for name, times in in_turns(calls).items()}


def main(folder: str, earlier: str = "") -> None:
    before = lambda G: newton_schulz(G, kernels=False)
    if earlier:
        spec = importlib.util.spec_from_file_location("golfnb.earlier", earlier)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        before = module.newton_schulz
    samples, eager, begun = {}, {}, time.time()
    for whole in dict.fromkeys((*RECIPE, *(shape for model in MODELS.values() for shape in model), *((n, s, l) for n, s, l in shapes() if n == 11 or s in (576, 960, 1600)))):
        G = torch.randn(whole, device="cuda").bfloat16()
        name = "x".join(map(str, whole))
        samples |= {f"{name} {way}": times for way, times in in_turns({"before": lambda: before(G), "after": lambda: newton_schulz(G)}).items()}
        if G.numel() < 2 ** 24:
            eager[name] = [min(launched(lambda: call(G)) for _ in range(3)) for call in (before, newton_schulz)]
    print("whole", time.time() - begun)
    for shape in shapes():
        samples |= products(*shape)
    print("products", time.time() - begun)
    torch.cuda.empty_cache()
    facts = {"models": {name: ["x".join(map(str, shape)) for shape in batches] for name, batches in MODELS.items()}, "recipe": ["x".join(map(str, shape)) for shape in RECIPE],
             "launched ms before and after": eager}
    note = ("bf16 products of newton_schulz (first: X X^T, second: of that with itself, third: times X), by the library and by tiles of a side and so many warps, and all of it before and after, five steps; "
            "CUDA graphs, in turns")
    print(record_result("newton_schulz_products_h100", samples, "ms", note, facts, folder))


if __name__ == "__main__":
    main(*sys.argv[1:])

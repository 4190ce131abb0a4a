"""ParallelMuon on the GPUs of one host: exact on NCCL, whole training steps in turns, memory.

    torchrun --standalone --nproc_per_node=2 tests/several_gpus.py nbs/results/optimizer_nccl.json

Not part of `make test`. Blocks of separate matrices with a forward and a backward in bf16, fp32 weights.
"""
import os
import sys
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from golfnb.muon.optimizer import ParallelMuon
from golfnb.studies.bench import record_result

SIZES = ((512, 11), (1024, 16), (2048, 8))
WAYS = ("no optimizer", "plain", "overlap", "DDP")
INPUTS, ROUNDS, STEPS = 64, 3, 8


class Block(nn.Module):
    def __init__(self, d: int):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(d, d, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(d, 4 * d, bias=False), nn.Linear(4 * d, d, bias=False)
        self.before, self.between = nn.LayerNorm(d), nn.LayerNorm(d)

    def forward(self, x: Tensor) -> Tensor:
        h = self.before(x)
        x = x + self.o(torch.tanh(self.q(h)) * self.k(h) + self.v(h))
        return x + self.down(torch.relu(self.up(self.between(x))).square())


def build(d: int, blocks: int, dtype: torch.dtype) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(INPUTS, d), *(Block(d) for _ in range(blocks)), nn.Linear(d, INPUTS)).to("cuda", dtype)


def rows(step: int, count: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(count, INPUTS, device="cuda", generator=torch.Generator("cuda").manual_seed(step)).to(dtype)


def trained(how: str, rank: int, world: int, alone: dist.ProcessGroup) -> list[Tensor]:
    "Weights after four steps in float64, the gradient clipped."
    model, mesh = build(64, 3, torch.float64), None
    if how == "one process":
        rank, world, mesh = 0, 1, alone
    if how == "DDP":
        model = nn.parallel.DistributedDataParallel(model)
    if how == "sharded":
        for block in list(model)[1:-1]:
            fully_shard(block)
        fully_shard(model)
    optimizer = ParallelMuon(model, lr=0.02, adam_lr=0.01, max_norm=0.5, mesh=mesh, overlap=how == "overlap", reduce="none" if how == "DDP" else "mean")
    for step in range(4):
        optimizer.zero_grad()
        model(rows(step, 4096, torch.float64).chunk(world)[rank]).square().mean().backward()
        optimizer.step()
    return [p.full_tensor() if hasattr(p, "full_tensor") else p.detach() for p in model.parameters()]


def distances(rank: int, world: int) -> dict[str, float]:
    "How far each way ends from one process."
    alone = [dist.new_group([r]) for r in range(world)][rank]
    want = trained("one process", rank, world, alone)
    found = {how: trained(how, rank, world, alone) for how in ("plain", "overlap", "DDP", "sharded")}
    return {how: max((a - b).abs().max().item() for a, b in zip(want, weights, strict=True)) for how, weights in found.items()}


class Rig:
    "A model and its optimizer, if it has one."

    def __init__(self, how: str, d: int, blocks: int):
        self.model, self.optimizer = build(d, blocks, torch.float32), None
        if how == "DDP":
            self.model = nn.parallel.DistributedDataParallel(self.model, gradient_as_bucket_view=True)
        if how != "no optimizer":
            self.optimizer = ParallelMuon(self.model, lr=0.02, overlap=how == "overlap", reduce="none" if how == "DDP" else "mean")
        self.rows = rows(dist.get_rank(), 8192, torch.float32)

    def step(self) -> None:
        for p in self.model.parameters():
            p.grad = None
        with torch.autocast("cuda", torch.bfloat16):
            loss = self.model(self.rows).float().square().mean()
        loss.backward()
        if self.optimizer:
            self.optimizer.step()


def timed(call, count: int) -> list[float]:
    "Milliseconds of calls that follow each other."
    torch.cuda.synchronize()
    dist.barrier()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    marks[0].record()
    for mark in marks[1:]:
        call()
        mark.record()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) for a, b in zip(marks, marks[1:])]


def step_times(d: int, blocks: int) -> dict[str, list[float]]:
    "Of whole steps in turns, and of the optimizer's alone."
    rigs = {how: Rig(how, d, blocks) for how in WAYS}
    samples: dict[str, list[float]] = {how: [] for how in WAYS}
    for turn in range(ROUNDS):
        for how, rig in rigs.items():
            timed(rig.step, 3 if turn == 0 else 1)
            samples[how] += timed(rig.step, STEPS)
    samples["optimizer alone"] = timed(rigs["plain"].optimizer.step, STEPS)
    return {f"{d}x{blocks} {how}": found for how, found in samples.items()}


def memory(dtype: torch.dtype) -> dict[str, float]:
    "Bytes an element of a matrix, gradients included: held between steps, and the most during one."
    weights = [p for p in build(1024, 16, dtype).parameters() if p.ndim == 2 and min(p.shape) > INPUTS]
    for p in weights:
        p.grad = torch.randn_like(p)
    before = torch.cuda.memory_allocated()
    optimizer = ParallelMuon(weights, lr=0.01)
    for _ in range(3):
        optimizer.step()
    held = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    optimizer.step()
    elements = sum(p.numel() for p in weights)
    size = 2 * weights[0].element_size()
    return {"held": (held - before) / elements + size, "peak": (torch.cuda.max_memory_allocated() - before) / elements + size}


def main(path: Path) -> None:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
    facts: dict = {"distance from one process, float64": distances(rank, world), "memory, bytes an element": {}}
    for dtype in (torch.float32, torch.bfloat16):
        facts["memory, bytes an element"][str(dtype)] = memory(dtype)
        torch.cuda.empty_cache()
    samples: dict[str, list[float]] = {}
    for d, blocks in SIZES:
        samples |= step_times(d, blocks)
        torch.cuda.empty_cache()
    if rank == 0:
        print({k: round(median(v), 2) for k, v in samples.items()}, facts, sep="\n", flush=True)
        record_result(path.stem, samples, "ms", f"forward, backward and step of blocks of separate matrices on {world} GPUs, in turns; {world} x 8192 rows", facts, path.parent)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))

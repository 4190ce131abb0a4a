"""What ranks do with weights whose parts alternate, and the same by plain loops over matrices that are unfused by hand."""
import math

import torch
import torch.distributed.checkpoint as dcp
from optimizer_workers import MU, SETTINGS, VOCAB, Encoder, Reference, backward, backward_under, data_place, schedule, weights_of, wrapped
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from golfnb.muon.errors import OptimizerError
from golfnb.muon.grouping import param_groups
from golfnb.muon.newton_schulz import quintic
from golfnb.muon.optimizer import ParallelMuon
from golfnb.muon.sharded import ShardedState

HEADS, WIDTH = 12, 12


class Layer(nn.Module):
    "Queries of two outputs a head, a key and a value, head after head; experts whose gate and up alternate column by column."

    def __init__(self):
        super().__init__()
        self.qkv, self.proj = nn.Linear(WIDTH, 4 * HEADS), nn.Linear(2 * HEADS, WIDTH)
        self.gate_up, self.down = nn.Parameter(torch.randn(3, WIDTH, 10) / 3), nn.Parameter(torch.randn(3, 5, WIDTH) / 3)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (HEADS, 4)).split([2, 1, 1], -1)
        x = x + self.proj((q * k.sigmoid() + v).flatten(-2))
        gated = torch.einsum("btd,edf->btef", x, self.gate_up)
        return x + torch.einsum("btef,efd->btd", gated[..., ::2].sigmoid() * gated[..., 1::2], self.down)


class Alternating(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.layers = nn.ModuleList(Layer() for _ in range(2))

    def forward(self, ids):
        x = self.table(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)

    loss = Encoder.loss


def build() -> nn.Module:
    torch.manual_seed(0)
    return Alternating().double()


def filter_of(name: str, p: Tensor) -> dict | None:
    if name.endswith("qkv.weight"):
        return {"rule": "muon", "split_sizes": (2, 1, 1), "repeats": HEADS}
    return {"rule": "muon", "split_sizes": (1, 1), "repeats": 5, "transposed": True} if name.endswith("gate_up") else None


def groups_of(model, rule: str = "muon") -> list[dict]:
    groups = param_groups(model, filter=filter_of)
    for group in groups:
        group["rule"] = rule if group["rule"] == "muon" else group["rule"]
    return groups


# --- by hand: the numbers of a part's outputs, and no view

def outputs_of(group: dict, total: int) -> list[list[int]]:
    "For each part the numbers of its outputs."
    sizes, repeats = group.get("split_sizes", (total,)), group.get("repeats", 1)
    begins = [sum(sizes[:i]) for i in range(len(sizes))]
    return [[turn * sum(sizes) + begin + i for turn in range(repeats) for i in range(size)] for begin, size in zip(begins, sizes, strict=True)]


def unfused(t: Tensor, group: dict) -> list[Tensor]:
    "Copies of the matrices [outputs, inputs] of a weight."
    stack = [one.T if group.get("transposed") else one for one in (t if t.ndim == 3 else t[None])]
    return [one[rows].clone() for one in stack for rows in outputs_of(group, len(one))]


def fuse(t: Tensor, group: dict, matrices: list[Tensor]) -> None:
    "Writes such matrices back."
    stack = [one.T if group.get("transposed") else one for one in (t if t.ndim == 3 else t[None])]
    left = iter(matrices)
    for one in stack:
        for rows in outputs_of(group, len(one)):
            one[rows] = next(left)


class ByHand(Reference):
    def muon(self, p, grad, state, group, factor):
        state["a"].mul_(MU).add_(grad)
        lr, moved = SETTINGS["lr"] * factor, []
        for w, u in zip(unfused(p, group), unfused(grad + MU * state["a"], group), strict=True):
            moved.append(w * (1 - lr * SETTINGS["weight_decay"]) - lr * math.sqrt(max(1, w.shape[0] / w.shape[1])) * quintic(u))
        fuse(p, group, moved)


def plain(world: int, steps: int) -> dict:
    model = build()
    reference = ByHand(groups_of(model))
    for step in range(steps):
        model.zero_grad()
        for rank in range(world):
            backward(model, step, rank, world, 1, 1 / world)
        reference.step(schedule(step))
    return {n: t.detach().clone() for n, t in model.state_dict().items()}


# --- what ranks do

def walk(ranks, model, optimizer, how: str, steps: range) -> None:
    for step in steps:
        for group in optimizer.param_groups:
            group["lr"] = schedule(step) * SETTINGS["lr" if "ns_steps" in group else "adam_lr"]
        optimizer.zero_grad()
        backward_under(model, how, step, *data_place(ranks, how), 1, optimizer)
        optimizer.step()


def trained(ranks, how: str, rule: str = "muon") -> dict:
    "Weights after five steps, of which the last two are of an optimizer that has loaded the first's state."
    model = wrapped(build(), how)
    first = ParallelMuon(groups_of(model, rule), **SETTINGS)
    walk(ranks, model, first, how, range(3))
    second = ParallelMuon(groups_of(model, rule), **SETTINGS)
    second.load_state_dict(first.state_dict())
    walk(ranks, model, second, how, range(3, 5))
    return weights_of(model)


def parts(ranks, how: str, folder: str, saved: bool, rule: str = "normuon") -> dict:
    "Three steps saved by torch.distributed.checkpoint, or read and gone on with, by the same gradients on every rank."
    model = wrapped(build(), how)
    optimizer = ParallelMuon(groups_of(model, rule), **SETTINGS)
    found = {"model": model.state_dict(), "optimizer": ShardedState(optimizer)}
    if saved:
        steps_alike(model, optimizer, how, 3)
        dcp.save(found, checkpoint_id=folder)
    else:
        dcp.load(found, checkpoint_id=folder)
    steps_alike(model, optimizer, how, 2)
    return weights_of(model)


def steps_alike(model, optimizer, how: str, steps: int) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        backward_under(model, how, step, 0, 1, 1, optimizer)
        optimizer.step()


def narrow(ranks) -> dict:
    "bf16 weights, of which owners alone have masters."
    model = build().bfloat16()
    optimizer = ParallelMuon(groups_of(model, "normuon"), **SETTINGS)
    for step in range(3):
        for p in model.parameters():
            p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(step + p.numel())).to(p)
        optimizer.step()
    return weights_of(model)


def cut_inside(ranks) -> str:
    "What is said of parts of three rows in turns of four, sixteen rows, on three ranks."
    model = nn.Sequential(nn.Linear(5, 16, bias=False))
    fully_shard(model, mesh=init_device_mesh("cpu", (ranks.world,)))
    try:
        ParallelMuon([{"params": [*model.named_parameters()], "split_sizes": (3, 1), "repeats": 4}])
    except OptimizerError as error:
        return str(error)
    return "nothing"


def all_cases(ranks, cases) -> list:
    return [globals()[name](ranks, *args) for name, *args in cases]

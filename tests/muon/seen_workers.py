"""What ranks do with rules that see weights, and the same by plain loops in one process."""
import math

import torch
from optimizer_workers import MU, SETTINGS, Reference, backward, backward_under, build, data_place, pieces, schedule, weights_of, wrapped

from golfnb.muon.grouping import param_groups
from golfnb.muon.newton_schulz import quintic
from golfnb.muon.optimizer import ParallelMuon
from golfnb.muon.rules import MuonRule, apply_direction, replace


class Pull(MuonRule):
    "Muon whose weights are also pulled towards a norm of 1 an element: a rule that looks at the weight."

    def move(self, weight, direction, group, ok, factor=1.0):
        pulled = weight - group["lr"] * 0.5 * (weight - weight.sign())
        replace(weight, pulled, ok)
        apply_direction(weight, direction, group, ok, factor)


def groups_of(model, way: str) -> list[dict]:
    "Groups whose decay is cautious, in Muon's and AdamW's, or Muon's with a rule of one's own."
    groups = param_groups(model)
    for group in groups:
        if way == "cautious":
            group["cautious_wd"] = True
        elif group["rule"] == "muon":
            group["rule"] = Pull()
    return groups


class Seen(Reference):
    "Plain loops whose decay is cautious, or that pull."

    def __init__(self, groups, way: str):
        super().__init__(groups)
        self.way = way

    def muon(self, p, grad, state, group, factor):
        state["a"].mul_(MU).add_(grad)
        lr = SETTINGS["lr"] * factor
        for w, u in zip(pieces(p, group), pieces(grad + MU * state["a"], group), strict=True):
            if self.way == "pull":
                w.sub_(lr * 0.5 * (w - w.sign()))
            self.decay_and_step(w, math.sqrt(max(1, w.shape[0] / w.shape[1])) * quintic(u), lr, SETTINGS["weight_decay"])

    def decay_and_step(self, w, direction, lr, decay):
        same = torch.ones_like(w) if self.way == "pull" else (w * direction >= 0).to(w.dtype)
        w.sub_(lr * decay * same * w + lr * direction)

    def adamw(self, p, grad, state, group, factor):
        state["n"] += 1
        a, b = state["a"], state["b"]
        a.mul_(0.9).add_(grad * 0.1)
        b.mul_(0.95).add_(grad * grad * (1 - 0.95))
        direction = (a / (1 - 0.9 ** state["n"])) / ((b / (1 - 0.95 ** state["n"])).sqrt() + 1e-8)
        self.decay_and_step(p, direction, SETTINGS["adam_lr"] * factor, SETTINGS["adam_weight_decay"])


def plain(kind: str, world: int, way: str) -> dict:
    "Weights by name after five steps in one process."
    model = build(kind)
    reference = Seen(param_groups(model), way)
    for step in range(5):
        model.zero_grad()
        for rank in range(world):
            backward(model, step, rank, world, 1, 1 / world)
        reference.step(schedule(step))
    return {n: t.detach().clone() for n, t in model.state_dict().items()}


def trained(ranks, kind: str, way: str, how: str) -> dict:
    "The same by ParallelMuon, on all ranks."
    model = wrapped(build(kind), how)
    optimizer = ParallelMuon(groups_of(model, way), **SETTINGS)
    plan = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule)
    for step in range(5):
        optimizer.zero_grad()
        backward_under(model, how, step, *data_place(ranks, how), 1, optimizer)
        optimizer.step()
        plan.step()
    return weights_of(model)


def all_cases(ranks, cases) -> list:
    return [trained(ranks, *case) for case in cases]

"""What ranks do with momentum in bf16."""
import torch
from optimizer_workers import SETTINGS, backward_under, build, data_place, full, weights_of, wrapped

from golfnb.muon.grouping import param_groups
from golfnb.muon.optimizer import ParallelMuon


def narrow_groups(model, dtype=torch.bfloat16) -> list[dict]:
    "Groups of a model with Muon's momentum in bf16."
    groups = param_groups(model)
    for group in groups:
        if group["rule"] == "muon":
            group["state_dtype"] = dtype
    return groups


def walk(ranks, model, optimizer, how: str, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        backward_under(model, how, step, *data_place(ranks, how), 1, optimizer)
        optimizer.step()


def trained(ranks, kind: str, how: str, bits: torch.dtype) -> tuple[dict, dict]:
    "Weights and state after four steps, of which the last two are another optimizer's that has loaded the first's state."
    model = wrapped(build(kind).to(bits), how)
    first = ParallelMuon(narrow_groups(model), **SETTINGS)
    walk(ranks, model, first, how, range(2))
    second = ParallelMuon(narrow_groups(model), **SETTINGS)
    second.load_state_dict(first.state_dict())
    walk(ranks, model, second, how, range(2, 4))
    state = second.state_dict()["state"]
    return weights_of(model), {number: full(of_one) for number, of_one in state.items()}


def all_cases(ranks, cases) -> list:
    return [trained(ranks, *case) for case in cases]

"""golfnb-muon as it is installed: its steps are those of plain loops, its state goes on, and it says what is wrong in a sentence."""
import io
import sys
from importlib import metadata, resources

import golfnb_muon
import pytest
import torch
from golfnb_muon import GolfError, ParallelMuon, Rule, ShardedState, group_table, param_groups
from torch import nn

LR, DECAY, MOMENTUM, ADAM_LR, ADAM_DECAY, BETAS = 0.02, 0.1, 0.95, 3e-4, 0.01, (0.9, 0.95)


def small(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Embedding(9, 8), *(nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 8)) for _ in range(2)), nn.Linear(8, 9)).double()


def backward(model: nn.Module, step: int) -> None:
    torch.manual_seed(100 + step)
    tokens = torch.randint(9, (2, 16))
    model.zero_grad()
    nn.functional.cross_entropy(model(tokens[0]), tokens[1]).backward()


def orthogonal(matrix: torch.Tensor) -> torch.Tensor:
    "Five steps of Newton-Schulz."
    x = matrix / (matrix.norm() + 1e-7)
    for _ in range(5):
        product = x @ x.T
        x = 3.4445 * x + (-4.7750 * product + 2.0315 * product @ product) @ x
    return x


class Plain:
    "Muon on the matrices of the blocks, AdamW on the rest, a weight at a time."

    def __init__(self, model: nn.Module):
        self.weights = dict(model.named_parameters())
        self.first = {n: torch.zeros_like(p) for n, p in self.weights.items()}
        self.second = {n: torch.zeros_like(p) for n, p in self.weights.items()}
        self.count = 0

    def muon(self, name: str, p: torch.Tensor) -> None:
        self.first[name] = MOMENTUM * self.first[name] + p.grad
        rows, cols = p.shape
        p.mul_(1 - LR * DECAY).sub_(LR * max(1, rows / cols) ** 0.5 * orthogonal(p.grad + MOMENTUM * self.first[name]))

    def adamw(self, name: str, p: torch.Tensor) -> None:
        self.first[name] = BETAS[0] * self.first[name] + (1 - BETAS[0]) * p.grad
        self.second[name] = BETAS[1] * self.second[name] + (1 - BETAS[1]) * p.grad.square()
        mean, square = (kept[name] / (1 - beta ** self.count) for kept, beta in zip((self.first, self.second), BETAS))
        p.mul_(1 - ADAM_LR * ADAM_DECAY).sub_(ADAM_LR * mean / (square.sqrt() + 1e-8))

    @torch.no_grad()
    def step(self) -> None:
        self.count += 1
        for name, p in self.weights.items():
            in_block = name[0] in "12" and p.ndim == 2
            (self.muon if in_block else self.adamw)(name, p)


def apart(a: nn.Module, b: nn.Module) -> float:
    return max(float((x - y).detach().abs().max()) for x, y in zip(a.parameters(), b.parameters()))


def optimizer_of(model: nn.Module) -> ParallelMuon:
    return ParallelMuon(model, lr=LR, weight_decay=DECAY, momentum=MOMENTUM, adam_lr=ADAM_LR, adam_weight_decay=ADAM_DECAY, betas=BETAS)


def test_steps_are_those_of_plain_loops():
    ours, theirs = small(), small()
    before = small()
    optimizer, plain = optimizer_of(ours), Plain(theirs)
    for step in range(6):
        backward(ours, step)
        optimizer.step()
        backward(theirs, step)
        plain.step()
    assert apart(ours, theirs) < 1e-10 < 1e-3 < apart(ours, before)


def test_a_saved_state_goes_on():
    model = small()
    optimizer = optimizer_of(model)
    for step in range(3):
        backward(model, step)
        optimizer.step()
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    other = small(seed=1)
    later = optimizer_of(other)
    other.load_state_dict(saved["model"])
    later.load_state_dict(saved["optimizer"])
    for step in range(3, 6):
        for m, o in ((model, optimizer), (other, later)):
            backward(m, step)
            o.step()
    assert apart(model, other) == 0


def test_what_is_wrong_is_one_sentence():
    with pytest.raises(GolfError, match=r"^lr must be a number of 0 or more.*, found -1: ") as error:
        ParallelMuon(small(), lr=-1)
    assert isinstance(error.value, ValueError) and "\n" not in str(error.value)
    with pytest.raises(GolfError, match=r"derives from golfnb_muon\.rules\.Rule"):
        ParallelMuon([dict(params=list(small()[1].parameters()), rule="nothing")])


def test_names_are_there_with_their_types():
    assert {ParallelMuon, param_groups, group_table, ShardedState, Rule, GolfError} <= {getattr(golfnb_muon, n) for n in golfnb_muon.__all__}
    assert "muon" in group_table(param_groups(small())) and resources.files("golfnb_muon").joinpath("py.typed").is_file()
    with pytest.raises(AttributeError, match="golfnb_muon"):
        golfnb_muon.Nothing


def test_torch_is_all_that_it_asks_for():
    assert metadata.requires("golfnb-muon") == ["torch>=2.11"] and metadata.version("golfnb-muon") == golfnb_muon.__version__
    assert not [name for name in sys.modules if name.split(".")[0] == "golfnb"]

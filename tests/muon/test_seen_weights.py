"""Rules that see the weight: cautious decay, nanochat's default step, and a rule with a move of its own, alone and on several ranks."""
import math

import pytest
import torch
from seen_workers import Pull, all_cases, plain
from torch import Tensor, nn
from workers import spawn

import golfnb.muon.multi_tensor as M
from golfnb.muon.newton_schulz import POLAR_EXPRESS_COEFFS
from golfnb.muon.optimizer import ParallelMuon
from golfnb.model.engine import Ranks
from golfnb.muon.rules import RULES, MuonRule, OptimizerError, apply_direction, replace

F64 = torch.float64
HOWS = {1: ("plain",), 2: ("plain", "sharded"), 4: ("plain", "sharded", "sharded tensor")}


@pytest.mark.parametrize("world", HOWS)
def test_ranks_decay_and_move_as_plain_loops_do(world):
    """Fused matrices, experts, and AdamW's groups too; sharded, and cut for tensor parallelism.

    Not the model with biases of keys: their gradients are rounding alone, whose sign says nothing.
    """
    cases = [(kind, way, how) for how in HOWS[world] for way in ("cautious", "pull") for kind in (("mlp",) if how == "sharded tensor" else ("encoder", "experts"))]
    outs = spawn(world, "all_cases", cases, module="seen_workers") if world > 1 else [all_cases(Ranks(), cases)]
    for i, (kind, way, how) in enumerate(cases):
        want = plain(kind, 2 if how == "sharded tensor" else world, way)
        for out in outs:
            assert out[i].keys() == want.keys()
            assert max(float((out[i][n] - want[n]).abs().max()) for n in want) < 1e-10, f"{kind} {way} {how} at {world}"


def test_without_the_word_no_bit_changes():
    "The usual decay is what it was, and cautious decay is another."
    for rule, numbers in RULES.items():
        group = {"rule": rule, "lr": 0.03, "weight_decay": 0.1, **numbers.defaults}
        weight, direction = torch.randn(7, 9), torch.randn(7, 9)
        formula = weight * (1 - 0.03 * 0.1) - direction * 0.03
        found = [weight.clone() for _ in range(3)]
        for t, more in zip(found, ({}, {"cautious_wd": False}, {"cautious_wd": True})):
            RULES[rule].move(t, direction, {**group, **more}, torch.tensor(True))
        assert torch.equal(found[0], formula) and torch.equal(found[1], formula)
        assert torch.equal(found[2], torch.where(weight * direction < 0, weight - direction * 0.03, formula))


# ---- nanochat's default

def nanochat_direction(stack: Tensor, kept: dict, beta2: float) -> Tensor:
    "Rows made alike in length, Polar Express, the norm of an orthogonal matrix, then rows or columns balanced over time."
    rows, cols = stack.shape[-2:]
    size = stack.norm(dim=(-2, -1), keepdim=True)
    x = stack * (size / math.sqrt(rows)) / stack.norm(dim=-1, keepdim=True)
    x = x / (x.norm(dim=(-2, -1), keepdim=True) * 1.01)
    for a, b, c in POLAR_EXPRESS_COEFFS[:5]:
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    x = x * math.sqrt(min(rows, cols)) / x.norm(dim=(-2, -1), keepdim=True)
    along = -1 if rows >= cols else -2
    square = x.square().mean(along, keepdim=True)
    kept["v"] = beta2 * kept.get("v", torch.zeros_like(square)) + (1 - beta2) * square
    balanced = x / kept["v"].sqrt()
    return balanced * x.norm(dim=(-2, -1), keepdim=True) / balanced.norm(dim=(-2, -1), keepdim=True)


class Nanochat(MuonRule):
    "nanochat's default as a rule of one's own; the decay is multiplied by the shape's factor, too."
    defaults = {**MuonRule.defaults, "beta2": 0.9}

    def matrix_state(self, rows, cols, group):
        return {"moment": (rows, 1) if rows >= cols else (1, cols)}

    def direction(self, stack, state, group, ok):
        kept = {"v": state["moment"]}
        made = nanochat_direction(stack, kept, group["beta2"])
        replace(state["moment"], kept["v"], ok)
        return made

    def move(self, weight, direction, group, ok, factor=1.0):
        apply_direction(weight, direction, {**group, "weight_decay": group["weight_decay"] * factor, "cautious_wd": True}, ok, factor)


@pytest.mark.parametrize("shape", [(12, 5), (5, 12), (8, 8)])
def test_nanochat_s_default_step(shape):
    "Its momentum is an average, its mask the sign of update times weight, its decay scaled like its step; in float64."
    generator = torch.Generator().manual_seed(3)
    start = torch.randn(shape, generator=generator, dtype=F64)
    grads = [torch.randn(shape, generator=generator, dtype=F64) for _ in range(6)]
    p, w = nn.Parameter(start.clone()), start.clone()
    optimizer = ParallelMuon([{"params": [p], "rule": Nanochat(), "lr": 0.05, "weight_decay": 0.3}])
    by_word = nn.Parameter(start.clone())
    factor = math.sqrt(max(1.0, shape[0] / shape[1]))
    worded = ParallelMuon([{"params": [by_word], "rule": "muon", "lr": 0.05, "weight_decay": 0.3 * factor, "cautious_wd": True}])
    by_rule = nn.Parameter(start.clone())
    plain_muon = ParallelMuon([{"params": [by_rule], "rule": Scaled(), "lr": 0.05, "weight_decay": 0.3}])
    average, kept = torch.zeros(shape, dtype=F64), {}
    for step, grad in enumerate(grads):
        momentum = 0.95
        average.lerp_(grad, 1 - momentum)
        g = nanochat_direction(grad.lerp(average, momentum), kept, 0.9)
        lr = (0.05 - 0.005 * step) * factor
        mask = (g * w) >= 0
        w -= lr * g + lr * 0.3 * w * mask
        for opt, q in ((optimizer, p), (worded, by_word), (plain_muon, by_rule)):
            opt.param_groups[0]["lr"] = 0.05 - 0.005 * step
            q.grad = grad.clone()
            opt.step()
    torch.testing.assert_close(p.detach(), w, rtol=0, atol=1e-11)
    torch.testing.assert_close(by_word.detach(), by_rule.detach(), rtol=0, atol=1e-13)


class Scaled(MuonRule):
    "Muon with nanochat's decay."
    move = Nanochat.move


# ---- which of the two ways

def test_a_move_of_ones_own_goes_by_the_plain_loop(monkeypatch):
    def kernel(*args):
        raise AssertionError("a kernel")

    monkeypatch.setattr(M, "kernels_fit", lambda *args: True)
    for name in ("kernel_apply", "kernel_update"):
        monkeypatch.setattr(M, name, kernel)
    weight, ok = torch.ones(2, 3), torch.tensor(True)
    group = {"rule": Pull(), "lr": 0.1, "weight_decay": 0.0}
    M.apply_each([weight], [torch.ones(2, 3)], group, [ok], [2.0])
    torch.testing.assert_close(weight, torch.full((2, 3), 0.8))
    with pytest.raises(AssertionError, match="a kernel"):
        M.apply_each([weight], [torch.ones(2, 3)], {**group, "rule": "muon", "cautious_wd": True}, [ok], [2.0])


def test_a_step_with_cautious_decay_is_recorded_and_a_change_of_it_is_another_step():
    model = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
    groups = [{"params": [m.weight for m in model], "rule": "muon", "cautious_wd": True}, {"params": [m.bias for m in model], "rule": "adamw"}]
    optimizer = ParallelMuon(groups)
    assert optimizer.cannot_record() == ""
    before = optimizer.fixed_words()
    optimizer.param_groups[0]["cautious_wd"] = False
    assert optimizer.fixed_words() != before
    optimizer.param_groups[0]["rule"] = Pull()
    assert "Pull does not say that it is recordable" in optimizer.cannot_record()


def test_a_file_does_not_change_the_kind_of_decay(caplog):
    def made(cautious):
        return ParallelMuon([{"params": [("w", nn.Parameter(torch.ones(3, 2)))], "rule": "muon", "cautious_wd": cautious}])

    caplog.set_level("INFO", "golfnb")
    there, here = made(True), made(False)
    here.load_state_dict(there.state_dict())
    assert here.param_groups[0]["cautious_wd"] is False and "cautious_wd" in caplog.text


@pytest.mark.parametrize("value", [1, "yes", None])
def test_the_word_is_yes_or_no(value):
    with pytest.raises(OptimizerError, match="cautious_wd must be True or False"):
        ParallelMuon([{"params": [nn.Parameter(torch.ones(3, 2))], "cautious_wd": value}])

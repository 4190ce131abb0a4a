"""Hidden tests of lesson 10: few bits for a weight."""
import math

import torch

from golfnb.tools.check import Score


def bug(rounded):
    """
    1. Print the gradient of the weights after a backward through it.
    2. Rounding is flat between its jumps, so its derivative is zero almost everywhere and nothing is ever learnt.
    3. The values must be the rounded ones, the gradient that of the weights as if nothing had been rounded: keep the difference of the two out of the graph.
    """
    torch.manual_seed(3)
    w = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    scale = torch.full((4, 1), 0.1, dtype=torch.float64)
    out = rounded(w, scale)
    want = (w.detach() / scale).round().clamp(-31, 31) * scale
    assert torch.allclose(out, want, atol=1e-12), "the forward must use weights on the grid"
    assert out.requires_grad, "the weights must be trained through it, found that no gradient comes back"
    weights = torch.randn(4, 6, dtype=torch.float64)
    (grad,) = torch.autograd.grad((out * weights).sum(), w, allow_unused=True)
    assert grad is not None and grad.abs().max() > 0, "the gradient of the weights is zero everywhere, so they never move"
    assert torch.allclose(grad, weights), "the gradient must be that of the loss by the rounded weights"


def weights(million_weights):
    """
    1. Bytes first, then bits, then weights.
    2. Take the script's bytes off; a byte holds eight bits.
    3. Ask how many bits remain, and share them out by what a weight costs.
    """
    want = (16_000_000 - 67_000) * 8 / 4.0 / 1e6
    assert abs(million_weights / want - 1) < 0.01, f"{million_weights} million is not it"


def bits(bits):
    """
    1. What is the step of this grid, in spreads of the row?
    2. The clip of 12.85 spreads has 31 steps.
    3. Put that step into the formula above the section on outputs.
    """
    want = math.log2(math.sqrt(2 * math.pi * math.e)) - math.log2(12.85 / 31)
    assert abs(bits - want) < 0.05, f"{bits} bits is not it"


def _entropy(q):
    p = torch.unique(q, return_counts=True)[1].double() / q.numel()
    return -(p * p.log2()).sum().item()


def pack(pack):
    """
    1. What is scored is the output, not the weights: which way of this lesson makes it small?
    2. GPTQ at the same step has other integers, and so another entropy: the step has to be found again.
    3. Search the smallest step at which the integers of GPTQ still need at most 2.5 bits, for each matrix anew.
    """
    total = 0.0
    for seed in range(4):
        g = torch.Generator().manual_seed(100 + seed)
        x = torch.randn(500, 12, generator=g).double() @ torch.randn(12, 48, generator=g).double()
        x += 0.3 * torch.randn(500, 48, generator=g).double()
        h, w = x.T @ x / len(x), torch.randn(32, 48, generator=g).double()
        q, scale = pack(w.clone(), h.clone())
        assert q.shape == w.shape and torch.equal(q, q.round()), "q must be integers of the shape of w"
        assert tuple(scale.shape) == (32,), f"one scale for each of 32 rows, found shape {tuple(scale.shape)}"
        needed = _entropy(q)
        assert needed <= 2.5, f"the integers must need at most 2.5 bits a weight, found {needed:.3f}"
        e = w - q * scale[:, None]
        total += (((e @ h) * e).sum() / ((w @ h) * w).sum()).item()
    return Score(100 * total / 4, "% of the output", 0.7343, 5.197)

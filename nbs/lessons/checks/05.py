"""Hidden tests of lesson 5: banks."""
import random
from collections import Counter

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from golfnb.tools.check import Score


class _Large(TorchDispatchMode):
    "Counts operations that make a tensor with so many elements."

    def __init__(self, numel):
        super().__init__()
        self.numel, self.count = numel, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        large = isinstance(out, torch.Tensor) and out.numel() == self.numel
        self.count += large and func.overloadpacket.__name__ != "detach"
        return out


def bug(forward):
    """
    1. Count, as the lesson does, the operations of the backward whose result is as large as the bank. What should the count be?
    2. Each unbind has a backward of its own, which stacks a whole bank. How often is unbind called in one forward?
    3. Take the bank apart once, before the loop, and let the loop use the parts.
    """
    torch.manual_seed(5)
    bank = (torch.randn(8, 6, 6, dtype=torch.float64) / 3).requires_grad_()
    x = torch.randn(5, 6, dtype=torch.float64)
    want = x
    for i in range(7):
        want = want + torch.tanh(want @ bank[i].T)
    by_hand = torch.autograd.grad(want.square().mean(), bank)[0]
    found = forward(bank, x, 7)
    assert torch.allclose(found, want, atol=1e-12), "the output must stay as it was, found another one"
    loss = found.square().mean()
    with _Large(bank.numel()) as large:
        loss.backward()
    assert torch.allclose(bank.grad, by_hand, atol=1e-12), "the gradient must stay as it was, found another one"
    assert large.count == 1, f"backward must make one tensor as large as the bank, found {large.count} for 7 matrices"


def gated(padding_apart, padding_together):
    """
    1. How many slots does a bank of 12 matrices need so that 8 ranks hold equally many?
    2. How many banks are there when the kinds lie apart, and how many matrices has each? And when they lie together?
    3. Round the matrices of each bank up to what the ranks can share equally, and take away what is real.
    """
    assert padding_apart == 12, f"apart it is not {padding_apart} slots"
    assert padding_together == 4, f"together it is not {padding_together} slots"


def traffic(indexed_mb, unbound_mb):
    """
    1. How many bytes has the bank, padding included, with two bytes a number?
    2. The lesson counts how many tensors of that size backward makes in either way.
    3. Multiply the bytes of one by both counts; padding is in the bytes, and not in the count.
    """
    bank = 24 * 512 * 512 * 2 / 1e6
    assert abs(indexed_mb / (43 * bank) - 1) < 0.02, f"indexed it is not {indexed_mb} MB"
    assert abs(unbound_mb / bank - 1) < 0.02, f"unbound it is not {unbound_mb} MB"


def _elements(shapes, ranks):
    short, long = max(min(s) for s in shapes), max(max(s) for s in shapes)
    return -(-len(shapes) // ranks) * ranks * short * long


def banks(group):
    """
    1. Two shapes that are each other's transpose may share a bank. What does that alone bring?
    2. A matrix may lie in a slot that is larger than itself: a few left over from one bank can fill empty slots of another.
    3. Start with a bank for each shape. As long as it helps, move some matrices of one shape from one bank into another, and take the best move.
    """
    dice, total = random.Random(5), 0.0
    for _ in range(10):
        sides = (256, 384, 512, 768, 1024, 1536, 2048)
        shapes = dice.sample([(r, c) for r in sides for c in sides], 8)
        shapes += [(c, r) for r, c in shapes[:3] if r != c]
        matrices = {f"{i}.{j}": shape for i, shape in enumerate(dict.fromkeys(shapes)) for j in range(dice.randint(3, 30))}
        found = [list(bank) for bank in group(dict(matrices), 8)]
        times = Counter(name for bank in found for name in bank)
        assert times == Counter(list(matrices)), "each matrix must lie in one bank, once"
        held = sum(_elements([matrices[name] for name in bank], 8) for bank in found if bank)
        total += held / sum(r * c for r, c in matrices.values()) - 1
    return Score(100 * total / 10, "% padding", 9.159, 20.6)

"""Hidden tests of lesson 4: why Muon."""
import torch

from golfnb.muon.newton_schulz import newton_schulz_flops, quintic
from golfnb.tools.check import Score


def bug(orthogonalize_bank):
    """
    1. Give it a stack of two matrices, one a thousand times as large as the other, and look at the singular values of both results.
    2. What one matrix becomes must not depend on its neighbours in the bank. Which line mixes them?
    3. Each matrix must be divided by its own norm: a norm over the last two dimensions, kept so that it broadcasts.
    """
    dice = torch.Generator().manual_seed(4)
    sizes = torch.tensor([1.0, 1e-3, 30.0, 0.0], dtype=torch.float64)[:, None, None]
    for shape in ((4, 6, 10), (4, 10, 6)):
        bank = sizes * torch.randn(*shape, dtype=torch.float64, generator=dice)
        found = orthogonalize_bank(bank.clone())
        assert found.shape == bank.shape, f"the result must have the shape of the bank, {tuple(bank.shape)}, found {tuple(found.shape)}"
        assert found.isfinite().all(), "a matrix of zeros must stay zero, found values that are not finite"
        want = torch.cat([quintic(one[None]) for one in bank])
        values = torch.linalg.svdvals(found[1])
        assert torch.allclose(found, want, atol=1e-3), (
            "each matrix must become what it becomes alone; of one that is small beside its neighbours "
            f"the singular values are {values.min():.3f} to {values.max():.3f}")


def flops(gflop, times_untransposed):
    """
    1. The three products of a step are in the section on what it costs; there are five steps.
    2. With sides m and l a step takes four times m squared times l, plus twice m cubed; m is the shorter side.
    3. For the second number put the longer side for m and the shorter one for l, and divide.
    """
    want = newton_schulz_flops(4096, 1024) / 1e9
    wrong = 5 * (4 * 4096 ** 2 * 1024 + 2 * 4096 ** 3) / 1e9
    assert abs(gflop / want - 1) < 0.01, f"{gflop} GFLOP is not it"
    assert abs(times_untransposed * want / wrong - 1) < 0.01, f"{times_untransposed} times is not it"


def tiny(after_five, steps_to_half):
    """
    1. Each step multiplies a tiny value by a; its cube and fifth power are nothing beside it.
    2. So a step is one product, always with the same number. What do several steps in a row make of the value?
    3. For the second, count how often one multiplies by a until the value passes a half.
    """
    assert abs(after_five / (3.4445 ** 5 * 1e-5) - 1) < 0.02, f"after five steps it is not {after_five}"
    steps = next(n for n in range(99) if 3.4445 ** n * 1e-5 > 0.5)
    assert steps_to_half == steps, f"it is not {steps_to_half} steps"


def coefficients(coefficients):
    """
    1. The first step decides how far the smallest value is lifted, and the largest pays for it.
    2. On an interval from low to high, the best odd quintic strays by the same amount at both ends and at its two turning points, now above 1 and now below.
    3. Solve that for the first interval; what it leaves is the interval of the next step, about 1. Five times.
    """
    triples = [tuple(map(float, triple)) for triple in coefficients]
    assert len(triples) == 5 and all(len(triple) == 3 for triple in triples), f"there must be five triples (a, b, c), found {len(triples)}"
    s = torch.logspace(-3, 0, 20001, dtype=torch.float64)
    for a, b, c in triples:
        s = a * s + b * s ** 3 + c * s ** 5
    worst = 100 * (s - 1).abs().max().item()
    assert worst < 100, f"no singular value may end farther from 1 than zero is, found one that is {worst:.3g} % away"
    return Score(worst, "%", 11.34, 52.95)

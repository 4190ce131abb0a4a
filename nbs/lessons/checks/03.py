"""Hidden tests of lesson 3: a block."""
import torch

from golfnb.model.layers import attend as right_attend
from golfnb.tools.check import Score


def bug(attend):
    """
    1. Change the last token of a row, and look at the outputs of the tokens before it.
    2. No share is given to a future key; but what are the shares of one query divided by?
    3. The shares that one query gives to its keys must add up to one: softmax over the keys, not over the queries.
    """
    dice = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(2, 12, heads, 8, dtype=torch.float64, generator=dice) for heads in (4, 2, 2))
    want, found = right_attend(q, k, v), attend(q, k, v)
    assert found.shape == want.shape, f"the output must have the shape {tuple(want.shape)}, found {tuple(found.shape)}"
    other = q.clone()
    other[:, 11] += 1
    ahead = (attend(other, k, v) - found)[:, :11].abs().max()
    assert ahead < 1e-12, f"a change of the last token must not change what stands before it, found a difference of {ahead:.3f}"
    assert torch.allclose(found, want, atol=1e-9), f"it must be causal attention with grouped queries, found a difference of {(found - want).abs().max():.3f}"


def weights(million):
    """
    1. Queries and output are D by D; keys and values have 4 heads of 64 rows each.
    2. The MLP has two matrices, each three times D by D.
    3. Write each of the six matrices as rows times columns, and add them up.
    """
    want = (2 * 768 ** 2 + 2 * 256 * 768 + 6 * 768 ** 2) / 1e6
    assert abs(million / want - 1) < 0.01, f"{million} million is not it"


def cache(mb_grouped, mb_each):
    """
    1. A token has, in each block, a key and a value for each key head, 64 numbers each.
    2. The bytes of one token in one block first; then all blocks, then all tokens.
    3. For the second number only the heads change: how does the first depend on them?
    """
    want = 2 * 4 * 64 * 2 * 11 * 2048 / 1e6
    assert abs(mb_grouped / want - 1) < 0.02, f"{mb_grouped} MB is not it"
    assert abs(mb_each / want / 2 - 1) < 0.02, f"{mb_each} MB is not it"


def frequencies(frequencies):
    """
    1. Look at the score at distance 1 first: which of the eight cosines have moved at all?
    2. Slow pairs say 1 for all small distances. Fast ones come round again, but each at another distance.
    3. Take frequencies between 0 and pi that have little to do with each other: draw many at random, keep the best, move it a little while that helps.
    """
    f = torch.tensor([float(one) for one in frequencies], dtype=torch.float64)
    assert len(f) == 8, f"there must be eight frequencies, found {len(f)}"
    assert f.isfinite().all(), "a frequency must be a number"
    distance = torch.arange(1, 1025, dtype=torch.float64)[:, None]
    return Score(100 * torch.cos(distance * f).mean(1).max().item(), "%", 55.44, 93.56)

"""Hidden tests of lesson 9: what the GPU does."""
from collections import OrderedDict

import torch
import torch.nn.functional as F

from golfnb.tools.check import Score


def bug(loss):
    """
    1. Try it with logits that rise from block to block, and with logits that fall. Which is right?
    2. The sum so far is relative to the highest logit so far. When a later block holds a higher one, what is it relative to then?
    3. Before anything is added, the old sum must be scaled down to the new highest.
    """
    g = torch.Generator().manual_seed(4)
    for n, block in ((64, 64), (64, 16), (70, 16), (5, 2), (300, 32)):
        logits = 12 * torch.randn(n, generator=g, dtype=torch.float64)
        for row in (logits, logits.sort().values, logits.sort(descending=True).values):
            for target in (0, n // 2, n - 1):
                want = F.cross_entropy(15 * torch.tanh(row / 15), torch.tensor(target)).item()
                found = float(loss(row.clone(), target, 15.0, block))
                assert abs(found - want) < 1e-9 * max(1, want), f"with {n} logits in blocks of {block} the loss must be that of cross_entropy, found it {abs(found - want):.3g} nats away"


def floor(floor_us):
    """
    1. How many bytes has the tensor? How often does it pass through memory?
    2. Numbers times bytes of a number, once for each pass, whether it reads or writes.
    3. Divide the bytes by the bandwidth; first say how many bytes it moves in a microsecond.
    """
    want = 3 * 98_304 * 512 * 2 / 4.2e6
    assert abs(floor_us / want - 1) < 0.02, f"{floor_us} us is not it"


def graph(saved_us):
    """
    1. Who is the slower of the two without a graph: the host or the device?
    2. The host needs 7 us for each of 400 kernels, the device 2 us.
    3. With the graph the device's time and one launch remain. Take them off the host's time and the last kernel.
    """
    want = (400 * 7 + 2) - (7 + 400 * 2)
    assert abs(saved_us / want - 1) < 0.02, f"{saved_us} us is not it"


def _panels(order, cache=8):
    held, loaded = OrderedDict(), 0
    for i, j in order:
        for panel in (("A", i), ("B", j)):
            if panel not in held:
                loaded += 1
                if len(held) == cache:
                    held.popitem(last=False)
            held[panel] = None
            held.move_to_end(panel)
    return loaded


def tiles(order):
    """
    1. Row after row keeps a panel of A and asks for every panel of B again. How many panels may stay instead?
    2. Take a few rows at a time and walk through the columns: each panel of B then serves several tiles.
    3. As many rows as fit beside an old and a new panel of B; and turn round at the end instead of going back to the first column.
    """
    total = 0
    for rows, cols in ((16, 16), (10, 24)):
        found = [tuple(tile) for tile in order(rows, cols)]
        assert sorted(found) == [(i, j) for i in range(rows) for j in range(cols)], f"the order must name each of {rows} x {cols} tiles once"
        total += _panels(found)
    return Score(total, "panels", 119, 522)

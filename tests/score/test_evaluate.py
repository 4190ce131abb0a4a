"""Scoring: every target once, shares and batches do not matter, the future does not reach back."""
import random

import pytest
import torch

from golfnb.text.bpb import ByteTable, bits_per_byte, target_bytes
from golfnb.settings import GolfError
from golfnb.score.evaluate import plain_loss, score_windows, share_of, sliding_loss, window_batches, windows
from golfnb.model.layers import token_nll
from golfnb.model.engine import Ranks
from score_workers import CFG, golf_on, random_table, stream

ALONE = Ranks()


class PairModel:
    "Predicts from the current token alone: no window can change its score."
    cap = 30.0

    def __init__(self, vocab=32):
        self.table = torch.randn(vocab, vocab, generator=torch.Generator().manual_seed(4), dtype=torch.float64)

    def __call__(self, ids, keep):
        return self.table[ids[:, -keep:]]


@pytest.mark.parametrize("seed", range(200))
def test_every_target_once(seed):
    r = random.Random(seed)
    seq = r.randint(1, 40)
    n, stride, world = r.randint(1, 300), r.randint(1, seq), r.randint(1, 9)
    starts, keeps = windows(n, seq, stride)
    counts, row = torch.zeros(n, dtype=torch.int64), min(seq, n)
    assert starts.dtype == keeps.dtype == torch.int64 and keeps.min() >= 1 and starts.min() >= 0 and starts.max() + row <= n
    for rank in range(world):
        lo, hi = share_of(len(starts), Ranks(rank, world))
        for a, b, keep in window_batches(keeps[lo:hi], 3):
            assert (keeps[lo + a:lo + b] == keep).all() and b - a <= 3
            for s in starts[lo + a:lo + b].tolist():
                counts[s + row - keep:s + row] += 1
    assert (counts == 1).all()
    assert keeps[0] == row and (keeps[1:-1] == stride).all()
    assert (starts[:-1] == torch.arange(len(starts) - 1) * stride).all(), "windows start every stride tokens, as published"


@pytest.mark.parametrize("n", [1, 15, 16, 17, 96, 100, 333])
@pytest.mark.parametrize("stride", [1, 5, 16])
def test_context_free_model_has_one_score(n, stride):
    tokens, table, model = stream(n), random_table(), PairModel()
    nll = token_nll(model.table[tokens[:-1]][None], tokens[None, 1:], 30.0)
    n_bytes = target_bytes(table, tokens[:-1], tokens[1:]).sum().item()
    loss, bpb = sliding_loss(model, tokens, table, 16, stride, 4, ALONE)
    assert loss == pytest.approx(nll.mean().item(), abs=1e-12) and bpb == pytest.approx(bits_per_byte(nll.sum().item(), n_bytes), abs=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_scores_are_those_of_single_rows(dtype):
    "Each target's nats equal a one-row forward of its own window, cut by hand."
    model, _ = golf_on(CFG, ALONE, dtype)
    tokens, n = stream(200), 200
    out = torch.full((n,), float("nan"), dtype=torch.float64)
    sliding_loss(model, tokens, random_table(), 16, 6, 4, ALONE, out=out)
    tolerance = {torch.float32: 1e-5, torch.float64: 1e-12, torch.bfloat16: 0.15}[dtype]
    for t in range(n):
        start = 0 if t < 16 else min(6 * -(-(t - 15) // 6), n - 16)
        x, y = tokens[None, start:start + 16], tokens[None, start + 1:start + 17]
        with torch.no_grad():
            expected = token_nll(model(x), y, model.cap)[0, t - start]
        assert abs(out[t].item() - expected.item()) <= tolerance


def test_batch_size_does_not_matter():
    model, _ = golf_on(CFG, ALONE, torch.float64)
    losses = [sliding_loss(model, stream(333), random_table(), 16, 6, b, ALONE)[0] for b in (1, 2, 7, 1000)]
    assert max(losses) - min(losses) < 1e-12


def test_token_dtypes():
    model, _ = golf_on(CFG, ALONE)
    scores = {sliding_loss(model, stream(100).to(d), random_table(), 16, 6, 4, ALONE) for d in (torch.int64, torch.int32, torch.int16)}
    assert len(scores) == 1


@pytest.mark.parametrize("at", [1, 16, 17, 50, 123, 200])
def test_future_cannot_reach_back(at):
    "Flipping token `at` leaves the scores of all targets before it equal, bit for bit."
    model, _ = golf_on(CFG, ALONE)
    tokens = stream(200)
    flipped = tokens.clone()
    flipped[at] = (flipped[at] + 1) % 32
    before, after = torch.zeros(200), torch.zeros(200)
    sliding_loss(model, tokens, random_table(), 16, 6, 4, ALONE, out=before)
    sliding_loss(model, flipped, random_table(), 16, 6, 4, ALONE, out=after)
    assert torch.equal(before[:at - 1], after[:at - 1]) and before[at - 1] != after[at - 1]


def test_probabilities_sum_to_one():
    model, _ = golf_on(CFG, ALONE, torch.float64)
    x = stream(15)[None].expand(32, 16)
    nll = token_nll(model(x, 1), torch.arange(32)[:, None], model.cap)
    assert abs(torch.logsumexp(-nll, 0).item()) < 1e-12


def test_scoring_leaves_no_graph():
    model, _ = golf_on(CFG, ALONE)
    out = torch.zeros(100)
    starts, keeps = windows(100, 16, 6)
    total = score_windows(model, stream(100), random_table(), starts, keeps, 16, 4, out)
    assert not total.requires_grad and not out.requires_grad and total.dtype == torch.float64


def test_disagreeing_ranks_are_caught():
    "A rank whose share is missing from the sum."
    class Deaf(Ranks):
        def sum_late(self, t):
            return t
    with pytest.raises(GolfError, match="targets.*scored"):
        sliding_loss(PairModel(), stream(100), random_table(), 16, 6, 4, Deaf(0, 2))


@pytest.mark.parametrize("n, seq, stride", [(0, 16, 4), (10, 16, 0), (10, 16, 17), (10, 16, -3)])
def test_impossible_windows(n, seq, stride):
    with pytest.raises(GolfError, match="EVAL_STRIDE"):
        windows(n, seq, stride)


def test_text_without_bytes():
    silent = ByteTable(torch.zeros(32, dtype=torch.int16), torch.zeros(32, dtype=torch.bool), torch.zeros(32, dtype=torch.bool))
    with pytest.raises(GolfError, match="byte.*0"):
        plain_loss(PairModel(), stream(50), silent, 16, 4, ALONE)

"""Test-time training: the order is enforced, lr 0 is plain scoring, the movement is SGD's, and the number of ranks does not matter."""
import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from golfnb.score import ttt
from golfnb.settings import GolfError
from golfnb.score.evaluate import sliding_loss, windows
from golfnb.model.layers import softcap_loss
from golfnb.model.golf import FreezeBlocks, FreezeControls, named_state
from golfnb.model.engine import Ranks
from golfnb.score.ttt import Ledger, adapt_steps, chunk_windows, score_first
from score_workers import CFG, adapt, golf_on, random_state, random_table, stream

ALONE = Ranks()


def moved(named: dict) -> torch.Tensor:
    state = random_state()
    return torch.cat([(torch.as_tensor(named[n]).double() - state[n].double()).flatten() for n in state])


def test_ledger():
    book = Ledger([[0, 5], [5, 9]])
    for crime in ((0, 1, 2), (0, 0, 6), (1, 0, 6), (1, 6, 7), ([0, 0], [0, 0], [1, 1])):
        with pytest.raises(GolfError, match="targets .*once"):
            book.scored(*crime)
    for crime in ((0, 0, 1), (1, 5, 6)):
        with pytest.raises(GolfError, match="update"):
            book.train(*crime)
    book.scored(0, 0, 4)
    book.train(0, 0, 4)
    for crime in ((0, 0, 5), (0, 3, 5), (0, -1, 3), (0, 2, 2), (1, 4, 5), (1, 0, 4), ([0, 1], [0, 5], [4, 6])):
        with pytest.raises(GolfError, match="update"):
            book.train(*crime)
    for crime in ((0, 0, 4), (0, 3, 5), (0, 4, 3)):
        with pytest.raises(GolfError, match="targets .*once"):
            book.scored(*crime)
    upto = book.upto  # what is booked does not follow the caller's arrays
    book.scored([0, 1], upto, upto + 1)
    assert [(what, *(x.tolist() for x in event)) for what, *event in book.history] == [
        ("score", [0], [0], [4]), ("train", [0], [0], [4]), ("score", [0, 1], [4, 5], [5, 6])]


@pytest.mark.parametrize("seed", range(100))
def test_a_chunk_is_scored_when_its_windows_are(seed):
    r = random.Random(seed)
    seq = r.randint(1, 30)
    n, stride, chunk = r.randint(1, 400), r.randint(1, seq), r.randint(seq, 100)
    starts, keeps = windows(n, seq, stride)
    row, upto, parts = min(seq, n), 0, chunk_windows(starts, keeps, min(seq, n), chunk)
    assert len(parts) == -(-n // chunk) and parts[0][0] == 0 and parts[-1][1] == len(starts)
    for c, (lo, hi) in enumerate(parts):
        assert lo == (parts[c - 1][1] if c else 0)
        for s, k in zip(starts[lo:hi].tolist(), keeps[lo:hi].tolist()):
            assert s + row - k == upto and (s + row - k) // chunk == c
            upto = s + row
        assert upto >= min((c + 1) * chunk, n), "training on this chunk now is legal"


@pytest.mark.parametrize("seed", range(50))
def test_every_rank_joins_every_step(seed):
    r = random.Random(seed)
    n_rows, batch, world = r.randint(1, 40), r.randint(1, 6), r.randint(1, 9)
    plans = [adapt_steps(n_rows, batch, Ranks(k, world)) for k in range(world)]
    assert len({len(p) for p in plans}) == 1
    assert sorted(i for p in plans for a, b, _ in p for i in range(a, b)) == list(range(n_rows))
    for step in zip(*plans):
        assert {total for _, _, total in step} == {sum(b - a for a, b, _ in step)} and all(b - a <= batch for a, b, _ in step)
        assert sum((b - a) * world / total for a, b, total in step) / world == pytest.approx(1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_lr_zero_is_plain_scoring(dtype):
    loss, bpb, _, nats, _ = adapt(ALONE, dtype, ttt_lr=0.0)
    plain, (model, _) = torch.zeros(700, dtype=torch.float64), golf_on(CFG, ALONE, dtype)
    expected = sliding_loss(model, stream(), random_table(), 16, 6, 4, ALONE, out=plain)
    near = 1e-12 if dtype == torch.float64 else 0.0  # rows are scored in other batches: sums in another order show in float64
    torch.testing.assert_close(nats, plain, rtol=near, atol=near)
    assert (loss, bpb) == pytest.approx(expected, abs=max(near, 1e-13))


def oracle_weights(cfg, dtype) -> dict:
    "One chunk of torch's own SGD on fp32 masters, with gradients of a model that holds their rounding."
    (model, _), (masters, _) = golf_on(cfg, ALONE, dtype), golf_on(cfg, ALONE)
    optimizer, rows = torch.optim.SGD(masters.parameters(), cfg.ttt_lr, cfg.ttt_momentum), cfg.ttt_chunk_tokens // 16
    x, y = (stream()[i:rows * 16 + i].view(rows, 16) for i in (0, 1))
    for _ in range(cfg.ttt_epochs):
        for p, m in zip(model.parameters(), masters.parameters()):
            p.data.copy_(m.data)
        grads = torch.autograd.grad(softcap_loss(model(x), y, model.cap), list(model.parameters()))
        for m, g in zip(masters.parameters(), grads):
            m.grad = g.to(m.dtype)
        torch.nn.utils.clip_grad_norm_(masters.parameters(), cfg.ttt_grad_clip or 1e9)
        optimizer.step()
    return named_state(masters)


@pytest.mark.parametrize("clip, dtype, tolerance", [(1.0, torch.float32, 1e-3), (0.05, torch.float32, 1e-3), (0.0, torch.float32, 1e-3), (1.0, torch.bfloat16, 0.02)])
def test_movement_is_sgd(monkeypatch, clip, dtype, tolerance):
    "Also of a bf16 replica under fp32 masters; the replica itself would lose most of it."
    engines, make = [], ttt.ttt_engine
    monkeypatch.setattr(ttt, "ttt_engine", lambda *a: engines.append(make(*a)) or engines[-1])
    more = dict(ttt_lr=0.002, ttt_grad_clip=clip)
    adapt(ALONE, dtype, n=2 * 128, tokens=stream()[:257], **more)
    ours = moved(named_state(golf_on(CFG, ALONE, dtype)[0], *engines[0].gather()))
    theirs = moved(oracle_weights(replace(CFG, **more), dtype))
    assert theirs.norm() > 0 and (ours - theirs).norm() <= tolerance * theirs.norm()


def test_future_cannot_reach_back_through_the_weights():
    *_, nats, _ = adapt(ALONE)
    flipped = stream()
    flipped[3 * 128 + 40] = (flipped[3 * 128 + 40] + 1) % 32
    *_, other, _ = adapt(ALONE, tokens=flipped)
    assert torch.equal(nats[:3 * 128 + 39], other[:3 * 128 + 39]) and nats[3 * 128 + 39] != other[3 * 128 + 39]
    assert (nats[4 * 128:] != other[4 * 128:]).float().mean() > 0.9, "later chunks did learn from it"


def test_unscored_updates_are_impossible(monkeypatch):
    "Lose the booking of the scores: the pass must stop before any weight moves."
    model, _ = golf_on(CFG, ALONE)
    monkeypatch.setattr(Ledger, "scored", lambda self, *a: None)
    with pytest.raises(GolfError, match="update"):
        score_first(model, random_state(), stream(), random_table(), CFG, ALONE)
    assert all(torch.equal(t, random_state()[n]) for n, t in named_state(model).items())


def test_a_compiled_forward_scores_as_the_model_does():
    "torch.compile's module has no length, so nobody may ask whether it is true."
    model, _ = golf_on(CFG, ALONE)
    loss, *_ = score_first(model, random_state(), stream(), random_table(), CFG, ALONE, torch.compile(model, backend="eager"))
    assert loss == pytest.approx(score_first(golf_on(CFG, ALONE)[0], random_state(), stream(), random_table(), CFG, ALONE)[0])


def test_the_last_chunk_is_not_trained_on():
    *_, history = adapt(ALONE)
    trained = [b.item() for what, _, _, b in history if what == "train"]
    assert max(trained) == 5 * 128 and len(trained) == 5 * 3 and history[-1][0] == "score"


def test_frozen_blocks_stay():
    state = random_state()
    for freeze, count in ((FreezeBlocks(2), 2 * 10), (FreezeControls(2), 2 * 4)):
        after = adapt(ALONE, freeze=freeze)[2]
        still = [n for n in after if np.array_equal(after[n], state[n].double().numpy())]
        assert len(still) == count and all(n.startswith(("blocks.0.", "blocks.1.")) for n in still)


@pytest.mark.parametrize("n", [1, 15, 16, 127, 128, 129, 300])
def test_any_length(n):
    loss, bpb, _, nats, _ = adapt(ALONE, n=n, tokens=stream()[:n + 1])
    assert nats.isfinite().all() and loss == pytest.approx(nats.mean().item(), abs=1e-12) and bpb > 0


def test_shared_mlp_plan_adapts_alike():
    "Matrices stored transposed move like the others."
    a, b = adapt(ALONE, torch.float64), adapt(ALONE, torch.float64, plan="shared_mlp")
    assert a[0] == pytest.approx(b[0], abs=1e-11) and torch.allclose(moved(a[2]), moved(b[2]), atol=1e-10)


@pytest.mark.parametrize("world, lost, words", [(2, None, "2 ranks.* 1 "), (1, "skip_weights", "skip_weights")])
def test_a_layout_of_another_world_or_a_state_of_another_model_is_refused(world, lost, words):
    model, state = golf_on(CFG, Ranks(0, world))[0], random_state()
    state.pop(lost, None)
    with pytest.raises(GolfError, match=words):
        score_first(model, state, stream(), random_table(), CFG, ALONE)


def test_frozen_blocks_have_no_gradient_to_compute():
    "Backward stops at a frozen block's weights: their slots get zeros from unbind, and everything above the same gradient as without freezing."
    model, _ = golf_on(CFG, ALONE, torch.float64)
    x = stream()[:64].view(4, 16)
    loss = lambda: softcap_loss(model(x), x.roll(-1, 1), model.cap)
    loss().backward()
    whole = {n: p.grad.clone() for n, p in model.named_parameters()}
    for freeze in (FreezeBlocks(2), FreezeControls(2)):
        model.zero_grad()
        model.freeze = freeze
        loss().backward()
        for n, p in model.named_parameters():
            stacked = n in ("attn_scale", "mlp_scale", "resid_mix", "q_gain")
            for i in range(len(p) if stacked or n.startswith("banks.") else 0):
                matrix = n.startswith("banks.") and [m for b, s, m in model.layout if b.name == n[6:] and s == i]
                frozen = (i < 2 if stacked else type(freeze) is FreezeBlocks and bool(matrix) and matrix[0].name.startswith(("blocks.0.", "blocks.1.")))
                assert torch.equal(p.grad[i], torch.zeros_like(p.grad[i]) if frozen else whole[n][i]), (n, i)


def test_bfloat16_scores_alike():
    sliding, exact = (sliding_loss(golf_on(CFG, ALONE, d)[0], stream(), random_table(), 16, 6, 4, ALONE)[0] for d in (torch.bfloat16, torch.float32))
    assert abs(sliding - exact) < 2e-3
    for freeze in (None, FreezeBlocks(1)):
        learnt = adapt(ALONE, torch.bfloat16, freeze=freeze)[0]
        assert learnt < sliding - 0.005 and abs(learnt - adapt(ALONE, freeze=freeze)[0]) < 2e-3

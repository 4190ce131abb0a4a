"""Test-time training: the order is enforced, lr 0 is plain scoring, the movement is SGD's, and the number of ranks does not matter."""
import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from golfnb import ttt
from golfnb.config import GolfError
from golfnb.evaluate import sliding_loss, windows
from golfnb.layers import softcap_loss
from golfnb.model import named_state
from golfnb.parallel_muon import Ranks
from golfnb.ttt import Ledger, adapt_steps, chunk_windows, score_first, ttt_multiplier
from score_workers import CFG, adapt, golf_on, random_state, random_table, stream

ALONE = Ranks()


def moved(named: dict) -> torch.Tensor:
    state = random_state()
    return torch.cat([(torch.as_tensor(named[n]).double() - state[n].double()).flatten() for n in state])


def test_ledger():
    book = Ledger(10)
    for a, b in ((0, 1), (5, 6)):
        with pytest.raises(GolfError, match="scored targets only"):
            book.train(a, b)
    book.scored(0, 6)
    book.train(0, 6)
    for a, b in ((0, 6), (7, 8), (6, 11), (5, 7)):
        with pytest.raises(GolfError, match="scored once"):
            book.scored(a, b)
    for a, b in ((0, 7), (6, 7), (-1, 3), (3, 3)):
        with pytest.raises(GolfError, match="scored targets only"):
            book.train(a, b)
    assert book.history == [("score", 0, 6), ("train", 0, 6)]


@pytest.mark.parametrize("seed", range(100))
def test_a_chunk_is_scored_when_its_windows_are(seed):
    r = random.Random(seed)
    seq = r.randint(1, 30)
    n, stride, chunk = r.randint(1, 400), r.randint(1, seq), r.randint(seq, 100)
    starts, keeps = windows(n, seq, stride)
    row, upto, parts = min(seq, n), 0, chunk_windows(starts, keeps, min(seq, n), chunk, n)
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


def test_cosine():
    assert [ttt_multiplier(c, 3) for c in range(3)] == pytest.approx([1, 0.5, 0]) and ttt_multiplier(0, 1) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_lr_zero_is_plain_scoring(dtype):
    loss, bpb, _, nats, _ = adapt(ALONE, dtype, ttt_lr=0.0)
    plain, (model, _) = torch.zeros(700, dtype=torch.float64), golf_on(CFG, ALONE, dtype)
    expected = sliding_loss(model, stream(), random_table(), 16, 6, 4, ALONE, out=plain)
    assert torch.equal(plain, nats) and (loss, bpb) == pytest.approx(expected, abs=1e-13)


def oracle_weights(cfg, dtype) -> dict:
    "One chunk of textbook SGD with momentum; fp32 masters, gradients of a model that holds their rounding."
    model, _ = golf_on(cfg, ALONE, dtype)
    params = dict(model.named_parameters())
    from golfnb.ttt import named_masters
    banks, others = named_masters(model, random_state(cfg))
    masters = {**{f"banks.{n}": t for n, t in banks.items()}, **others}
    momenta = {n: torch.zeros_like(t) for n, t in masters.items()}
    rows = cfg.ttt_chunk_tokens // 16
    x, y = stream()[:rows * 16].view(rows, 16), stream()[1:rows * 16 + 1].view(rows, 16)
    for _ in range(cfg.ttt_epochs):
        for p, m in ((params[n], masters[n]) for n in masters):
            p.data.copy_(m)
        grads = dict(zip(params, torch.autograd.grad(softcap_loss(model(x), y, model.cap), list(params.values()))))
        norm = sum(g.double().square().sum() for g in grads.values()).sqrt().item()
        for n in masters:
            momenta[n] = cfg.ttt_momentum * momenta[n] + grads[n].to(masters[n].dtype) * min(1.0, cfg.ttt_grad_clip / (norm + 1e-6))
            masters[n] -= cfg.ttt_lr * momenta[n]
    return named_state(model, {n: masters[f"banks.{n}"] for n in banks}, {n: masters[n] for n in others})


@pytest.mark.parametrize("clip", [1.0, 0.05, 0.0])
def test_movement_is_sgd(clip):
    more = dict(ttt_lr=0.002, ttt_grad_clip=clip)
    ours = moved(adapt(ALONE, n=2 * 128, tokens=stream()[:257], **more)[2])
    theirs = moved(oracle_weights(replace(CFG, ttt_lr=0.002, ttt_grad_clip=clip or 1e9), torch.float32))
    assert theirs.norm() > 0 and (ours - theirs).norm() <= 1e-3 * theirs.norm()


def test_masters_of_a_bf16_model_are_fp32(monkeypatch):
    "A bf16 replica under fp32 masters moves as the oracle does; the replica itself would lose most of it."
    engines, make = [], ttt.ttt_engine
    monkeypatch.setattr(ttt, "ttt_engine", lambda *a: engines.append(make(*a)) or engines[-1])
    adapt(ALONE, torch.bfloat16, n=2 * 128, tokens=stream()[:257], ttt_lr=0.002)
    model, _ = golf_on(CFG, ALONE, torch.bfloat16)
    from golfnb.parallel_muon import engine_gather
    ours = moved(named_state(model, *engine_gather(engines[0])))
    theirs = moved(oracle_weights(replace(CFG, ttt_lr=0.002), torch.bfloat16))
    assert theirs.norm() > 0 and (ours - theirs).norm() <= 0.02 * theirs.norm()


def test_future_cannot_reach_back_through_the_weights():
    *_, nats, _ = adapt(ALONE)
    flipped = stream()
    flipped[3 * 128 + 40] = (flipped[3 * 128 + 40] + 1) % 32
    *_, other, _ = adapt(ALONE, tokens=flipped)
    assert torch.equal(nats[:3 * 128 + 39], other[:3 * 128 + 39]) and nats[3 * 128 + 39] != other[3 * 128 + 39]
    assert (nats[4 * 128:] != other[4 * 128:]).float().mean() > 0.9, "later chunks did learn from it"


def test_unscored_updates_are_impossible(monkeypatch):
    "Lose the booking of the scores: the pass must stop before any weight moves."
    model, layout = golf_on(CFG, ALONE)
    monkeypatch.setattr(Ledger, "scored", lambda self, a, b: None)
    with pytest.raises(GolfError, match="scored targets only"):
        score_first(model, layout, random_state(), stream(), random_table(), CFG, ALONE)
    assert all(torch.equal(t, random_state()[n]) for n, t in named_state(model).items())


def test_the_last_chunk_is_not_trained_on():
    *_, history = adapt(ALONE)
    assert max(b for what, _, b in history if what == "train") == 5 * 128 and sum(what == "train" for what, *_ in history) == 5 * 3
    assert [what for what, *_ in history][-1] == "score"


def test_frozen_blocks_stay():
    state = random_state()
    for scope, count in (("all", 2 * 10), ("controls", 2 * 4)):
        after = adapt(ALONE, ttt_freeze_blocks=2, ttt_freeze_scope=scope)[2]
        still = [n for n in after if np.array_equal(after[n], state[n].double().numpy())]
        assert len(still) == count and all(n.startswith(("blocks.0.", "blocks.1.")) for n in still)


@pytest.mark.parametrize("n", [1, 15, 16, 127, 128, 129, 300])
def test_any_length(n):
    loss, bpb, _, nats, history = adapt(ALONE, n=n, tokens=stream()[:n + 1])
    assert nats.isfinite().all() and loss == pytest.approx(nats.mean().item(), abs=1e-12) and bpb > 0


def test_shared_mlp_plan_adapts_alike():
    "Matrices stored transposed move like the others."
    a, b = adapt(ALONE, torch.float64), adapt(ALONE, torch.float64, plan="shared_mlp")
    assert a[0] == pytest.approx(b[0], abs=1e-11) and torch.allclose(moved(a[2]), moved(b[2]), atol=1e-10)


def test_layout_of_another_world_is_refused():
    model, layout = golf_on(CFG, Ranks(0, 2))
    with pytest.raises(GolfError, match="made for 2 ranks, but 1"):
        score_first(model, layout, random_state(), stream(), random_table(), CFG, ALONE)


def test_state_of_another_model_is_refused():
    model, layout = golf_on(CFG, ALONE)
    state = random_state()
    state.pop("skip_weights")
    with pytest.raises(GolfError, match="skip_weights"):
        score_first(model, layout, state, stream(), random_table(), CFG, ALONE)


def test_warming_leaves_no_trace():
    "Steps on random tokens before the pass: masters, momenta and replica as if they had not been."
    model, layout = golf_on(CFG, ALONE)
    engine = ttt.ttt_engine(model, layout, random_state(), CFG, ALONE)
    before = [t.clone() for t in ttt.snapshot(engine)]
    ttt.warm_adapting(engine, ttt.RowStep(engine, ttt.row_loss(model, model.cap), 2, 16), 32)
    assert all(torch.equal(a, b) for a, b in zip(before, ttt.snapshot(engine)))
    assert all(torch.equal(t, random_state()[n]) for n, t in named_state(model).items())


def test_frozen_blocks_have_no_gradient_to_compute():
    "Backward stops at a frozen block's weights: their slots get zeros from unbind, and everything above the same gradient as without freezing."
    model, _ = golf_on(CFG, ALONE, torch.float64)
    x = stream()[:64].view(4, 16)
    loss = lambda: softcap_loss(model(x), x.roll(-1, 1), model.cap)
    loss().backward()
    whole = {n: p.grad.clone() for n, p in model.named_parameters()}
    for scope in ("all", "controls"):
        model.zero_grad()
        model.frozen = 2, scope
        loss().backward()
        for n, p in model.named_parameters():
            stacked = n in ("attn_scale", "mlp_scale", "resid_mix", "q_gain")
            for i in range(len(p) if stacked or n.startswith("banks.") else 0):
                matrix = n.startswith("banks.") and [m for b, s, m in model.layout if b.name == n[6:] and s == i]
                frozen = (i < 2 if stacked else scope == "all" and bool(matrix) and matrix[0].name.startswith(("blocks.0.", "blocks.1.")))
                assert torch.equal(p.grad[i], torch.zeros_like(p.grad[i]) if frozen else whole[n][i]), (n, i)


@pytest.mark.parametrize("kept", [{}, {"matrix_dtype": "fp32"}, {"table_dtype": "fp32"}, {"buffer_dtype": "fp32"}, dict.fromkeys(("matrix_dtype", "table_dtype", "buffer_dtype"), "fp32")])
def test_bfloat16_scores_alike_whatever_the_weights_are_kept_in(kept):
    cfg = replace(CFG, **kept)
    model = golf_on(cfg, ALONE, torch.bfloat16)[0]
    sliding = sliding_loss(model, stream(), random_table(), 16, 6, 4, ALONE)[0]
    assert abs(sliding - sliding_loss(golf_on(CFG, ALONE)[0], stream(), random_table(), 16, 6, 4, ALONE)[0]) < 2e-3
    for frozen in (0, 1):
        learnt = adapt(ALONE, torch.bfloat16, ttt_freeze_blocks=frozen, **kept)[0]
        assert learnt < sliding - 0.005 and abs(learnt - adapt(ALONE, ttt_freeze_blocks=frozen)[0]) < 2e-3

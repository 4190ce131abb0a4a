"""Steps by what errors cost: calibration against plain autograd, allocation against brute force, GPTQ against a loop, degenerate matrices, the size."""
import json
import math
import os
import pickle
import re
import socket
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from forked import fork_processes
from tiny import TINY, forked_ranks, golfnb, run_quietly, tiny_data

import golfnb.model.golf as model_module
from golfnb.file.artifact import Best, load_artifact, load_model, pack_bytes, save_artifact
from golfnb.file.bits import (
    NEAR,
    TRIES,
    Sensitivity,
    drawn_labels,
    fit_trellis,
    gptq_levels,
    plan_state,
    round_plans,
    sensitivities,
    watched,
)
from golfnb.model.layers import softcap
from golfnb.model.layout import bank_per_shape, matrix_names
from golfnb.model.golf import Golf, init_model, load_named, named_state
from golfnb.model.engine import Ranks, start_ranks, stop_ranks
from golfnb.file.quantize import Gptq, NothingFits, calibrate, dequantize_state, fit_state, hessian_factor, int6_matrices, quantize_state, shared_out
from golfnb.recipes import golf, pr2135
from golfnb.settings import GolfError
from golfnb.tools.programs import settings_of
from golfnb.tools.report import read_summary
from golfnb.file.trellis import trellis_encode, trellis_levels
from golfnb.file.trellis_file import LARGEST_INDEX, dequantize_trellis, pack_trellis

CFG = settings_of(golf, {"NUM_LAYERS": "2", "MODEL_DIM": "48", "NUM_HEADS": "4", "NUM_KV_HEADS": "2", "VOCAB_SIZE": "80", "ROPE_DIMS": "4", "BIGRAM_VOCAB_SIZE": "40", "BIGRAM_DIM": "8", "VE_LAYERS": "1", "VE_DIM": "8",
                         "XSA_LAST_N": "1", "TRAIN_SEQ_LEN": "24", "EVAL_SEQ_LEN": "24", "EVAL_STRIDE": "8", "SMALL_TENSOR": "300"})
TABLES = {"tok_emb.weight", "bigram.embed.weight", "ve_shared.embed.weight"}


class Looped(type(CFG)):
    visits = 6


def a_model(dtype=torch.float32, order=(0, 1)):
    cfg = Looped(**vars(CFG)) if len(order) > 2 else CFG
    model = Golf(cfg, bank_per_shape(cfg, 1), dtype)
    model.order = order
    init_model(model, cfg, 0)
    g = torch.Generator().manual_seed(2)
    load_named(model, {n: t + 0.1 * torch.randn(t.shape, generator=g) for n, t in named_state(model).items()})
    return model


def words(n=4, seed=0):
    g = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 80, (3, 24), generator=g) ** 2 // 80 for _ in range(n)]


def value(k, rows, columns):
    "What a reader makes of a matrix."
    return (trellis_levels(k.T.contiguous()).T * rows.float()[:, None] * (2 ** (columns.double() / 4)).float()).bfloat16().float()


def measure(packed, shares=None): return len(pack_bytes(packed, {"shares": shares or {}}, Best()))


class Nudged:
    "Stands for torch.nn.functional in the model's module: adds a leaf of zeros to all that is looked up or multiplied."

    def __init__(self):
        self.seen = []

    def __getattr__(self, name): return getattr(F, name)

    def with_leaf(self, kind, x, weight, y):
        leaf = torch.zeros_like(y, requires_grad=True)
        self.seen.append((kind, x.detach(), weight.detach(), leaf))
        return y + leaf

    def linear(self, x, weight): return self.with_leaf("linear", x, weight, F.linear(x, weight))

    def embedding(self, ids, table): return self.with_leaf("embedding", ids, table, F.embedding(ids, table))


@pytest.mark.parametrize("order", [(0, 1), (0, 1, 0, 1, 0, 1)])  # what a matrix costs is the sum over its visits
def test_calibration_is_what_plain_autograd_gives(monkeypatch, order):
    model, batches = a_model(torch.float64, order), words(2)
    found = sensitivities(model, batches, Ranks(), seed=5)
    state, generator = named_state(model), torch.Generator().manual_seed(5)
    nudged, sums, tokens = Nudged(), {}, 0
    monkeypatch.setattr(model_module, "F", nudged)
    for ids in batches:
        nudged.seen.clear()
        logits = softcap(model(ids), model.cap).flatten(0, 1)
        labels = drawn_labels(logits.detach(), generator)
        (-logits.log_softmax(-1)[torch.arange(len(labels)), labels]).sum().backward()
        tokens += ids.numel()
        for kind, x, weight, leaf in nudged.seen:
            name = next((n for n, w in state.items() if w.shape == weight.shape and torch.equal(w, weight)), None)
            for at, gradient in enumerate(leaf.grad.flatten(0, 1)):  # a position at a time
                q, of = gradient.square(), sums.setdefault((kind, name), {"rows": 0, "hessian": 0, "up": torch.zeros(len(weight), dtype=torch.float64)})
                of["rows"] = of["rows"] + q
                if kind == "linear":
                    row = x.flatten(0, 1)[at]
                    of["hessian"] = of["hessian"] + q.mean() * torch.outer(row, row)
                else:
                    of["up"][x.flatten()[at]] += q.mean()
    assert found.keys() == {*matrix_names(model.layout)} | TABLES
    for name, s in found.items():
        if name not in TABLES or name == "tok_emb.weight":
            of = sums["linear", name]
            hessian, rows = of["hessian"] / of["rows"].mean(), of["rows"] / tokens
            if name == "tok_emb.weight":
                rows = rows + sums["embedding", name]["up"] / tokens / hessian.diagonal().mean()
        else:
            of = sums["embedding", name]
            hessian, rows = of["rows"] / of["rows"].mean(), of["up"] / tokens
        assert torch.allclose(s.hessian, hessian, rtol=1e-8, atol=1e-12) and torch.allclose(s.rows, rows, rtol=1e-8, atol=1e-14), name


def test_the_predicted_loss_is_that_of_the_outputs():
    g = torch.Generator().manual_seed(0)
    h, rows, e = torch.randn(5, 5, generator=g), torch.rand(3, generator=g), torch.randn(3, 5, generator=g)
    h = h @ h.T
    assert math.isclose(Sensitivity(rows, h).cost(e), 0.5 * sum(rows[r] * (e[r] @ h @ e[r]) for r in range(3)), rel_tol=1e-5)
    assert math.isclose(Sensitivity(rows, h.diagonal()).cost(e), Sensitivity(rows, torch.diag(h.diagonal())).cost(e), rel_tol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_calibration_leaves_no_trace(dtype):
    model = a_model(dtype)
    model.kernels = frozenset({"a"})
    before, blocks = {n: w.clone() for n, w in named_state(model).items()}, model.blocks
    found = sensitivities(model, words(1), Ranks())
    assert all(torch.isfinite(s.rows).all() and s.rows.dtype == torch.float32 and (s.rows > 0).any() for s in found.values())
    with pytest.raises(ZeroDivisionError), watched(model):
        raise ZeroDivisionError
    assert model.blocks is blocks and model.kernels == {"a"} and all(p.grad is None for p in model.parameters())
    assert all(torch.equal(w, before[n]) for n, w in named_state(model).items())
    again = sensitivities(model, words(1), Ranks())
    assert all(torch.equal(s.rows, again[n].rows) and torch.equal(s.hessian, again[n].hessian) for n, s in found.items()), "the same seed, the same labels"
    assert not torch.equal(sensitivities(model, words(1), Ranks(), seed=1)["tok_emb.weight"].rows, found["tok_emb.weight"].rows)


def test_labels_are_drawn_by_their_probability():
    logits = torch.tensor([0.0, 1.0, 2.0, -40.0]).repeat(20_000, 1)
    shares = drawn_labels(logits, torch.Generator().manual_seed(0)).bincount(minlength=4) / 20_000
    assert torch.allclose(shares, logits[0].softmax(0), atol=0.015)


def test_a_diverged_model_is_refused_by_name():
    model = a_model()
    with torch.no_grad():
        model.tok_emb[3] = float("nan")
    with pytest.raises(GolfError, match="blocks.0.attn.c_q.weight must be finite"):
        sensitivities(model, words(1), Ranks())
    named = named_state(a_model())
    found = sensitivities(a_model(), words(1), Ranks())
    for bad in (float("nan"), float("inf")):
        broken = named | {"blocks.1.mlp.fc.weight": named["blocks.1.mlp.fc.weight"].masked_fill(torch.eye(144, 48) > 0, bad)}
        with pytest.raises(GolfError, match="blocks.1.mlp.fc.weight must be a finite matrix"):
            fit_trellis(broken, found, 10**6, measure, CFG.small_tensor)
    found["blocks.0.attn.proj.weight"].hessian.fill_(float("nan"))
    with pytest.raises(GolfError, match="blocks.0.attn.proj.weight"):
        plan_state(named, found, CFG.small_tensor)


def case(seed, rows=24, cols=70, tokens=300, dead=()):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, cols, generator=g, dtype=torch.float64) @ torch.randn(cols, cols, generator=g, dtype=torch.float64)
    x[:, list(dead)] = 0
    return torch.randn(rows, cols, generator=g, dtype=torch.float64) * torch.rand(rows, 1, generator=g, dtype=torch.float64), x.T @ x / tokens


def a_plan(w, s): return plan_state({"blocks.0.mlp.fc.weight": w}, {"blocks.0.mlp.fc.weight": s}, 0)


def rounded(w, s, octaves): return round_plans(a_plan(w, s), octaves)["blocks.0.mlp.fc.weight"]


@pytest.mark.parametrize("seed", range(4))
def test_no_other_steps_of_as_many_bits_cost_less(seed):
    "Costs g_r d_j step^2 over a 2 x 3 matrix, brute force over quarter octaves; bits are minus log2 of the steps."
    g = torch.Generator().manual_seed(seed)
    rows, d = torch.rand(2, generator=g) + 0.2, 10 ** torch.rand(3, generator=g)
    [plan] = a_plan(torch.randn(2, 3, generator=g), Sensitivity(rows, d))
    ours = (4 * torch.log2(plan.steps(-3.0).double())).round()[:, None] + plan.columns
    def cost(a, b): return (rows[:, None] * d * 4 ** ((a[..., :, None] + b[..., None, :]) / 4)).sum((-1, -2))
    every = torch.cartesian_prod(*[torch.arange(-9, 10)] * 4)
    a, b = every[:, :2], torch.cat((torch.zeros_like(every[:, :1]), every[:, 2:]), 1)
    least = (cost(a, b) * 4 ** ((ours.sum() - 3 * a.sum(1) - 2 * b.sum(1)) / 24)).min()  # each moved to as many bits
    assert cost(ours[:, 0] - plan.columns[0], plan.columns) < 1.03 * least, "a quarter octave is as near as steps come"


def test_weak_rows_are_floored_and_steps_come_four_to_an_octave():
    rows = torch.tensor([1.0, 0.5, 1e-6, 0.0])
    [plan] = a_plan(torch.randn(4, 6, generator=torch.Generator().manual_seed(1)), Sensitivity(rows, torch.ones(6)))
    steps = plan.steps(-5.0)
    assert steps.dtype == torch.float16 and steps[2] == steps[3] and not plan.columns.any()
    wanted = rows.clamp_min(0.1 * rows.mean()).rsqrt()
    assert not (steps.view(torch.int16) & 255).any(), "the low byte is zero"
    apart = torch.log2(steps / wanted).double()
    assert apart.max() - apart.min() < 2 * math.log2(1.126)
    assert torch.equal(plan.steps(-4.0), 2 * steps), "one constant for all"


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("block", [1, 7, 128])
def test_levels_are_those_of_a_plain_loop(seed, block):
    cases = [case(seed + 10 * i, dead=(3, 40)) for i in range(2)]
    factors = [hessian_factor(h) for _, h in cases]
    g = torch.Generator().manual_seed(seed)
    rows, columns = 0.1 + torch.rand(2, 24, generator=g).double(), 0.5 + torch.rand(2, 70, generator=g).double()
    ours = gptq_levels(torch.stack([w.masked_fill(dead, 0)[:, order] for (w, _), (order, dead, _) in zip(cases, factors, strict=True)]),
                       rows, columns, torch.stack([upper for *_, upper in factors]), block)
    for i, ((w, h), (order, dead, _)) in enumerate(zip(cases, factors, strict=True)):
        damped = h + torch.diag(dead.double()) + 0.01 * h.diagonal()[~dead].mean() * torch.eye(70, dtype=torch.float64)
        damped, w = damped[order][:, order], w.masked_fill(dead, 0)[:, order]
        for j in range(70):
            step = rows[i] * columns[i, j]
            levels = trellis_levels(trellis_encode((w[:, j] / step)[None]))[0]
            assert torch.equal(ours[i, :, j], levels), j
            inverse = torch.linalg.inv(damped[j:, j:])
            w[:, j:] -= ((w[:, j] - (levels * step).bfloat16().double()) / inverse[0, 0])[:, None] * inverse[0]


def test_a_matrix_comes_back_in_natural_order_and_is_read_without_a_second_rule():
    w, h = case(3, dead=(3, 40))
    s = Sensitivity(torch.rand(24) + 0.5, h.float())
    r = rounded(w, s, -3.0)
    back = value(r.k, r.rows, r.columns)
    assert not back[:, [3, 40]].any() and r.k.dtype == torch.int32 and r.columns.dtype == torch.int8
    error = w.float() - back
    assert math.isclose(r.loss, s.cost(error), rel_tol=1e-4)
    live = [j for j in range(70) if j not in (3, 40)]
    assert error[:, live].abs().max() < 0.4 * w.abs().max() and error[:, live].square().mean() < 0.1 * w.square().mean()
    fine = rounded(w, s, -6.0)
    assert fine.loss < 0.1 * r.loss and fine.k.abs().float().mean() > 4 * r.k.abs().float().mean()
    plain = Sensitivity(torch.rand(24) + 0.5, torch.diag(torch.rand(70) + 0.5))
    small, whole = (rounded(w[:n], Sensitivity(plain.rows[:n], plain.hessian), -3.0) for n in (1, 24))
    assert small.k.shape == (1, 70) and whole.loss > 0


@pytest.mark.parametrize("change", ["no information", "a row without", "constant rows", "zeros", "one row", "one column", "dead", "huge", "tiny", "spread", "no inputs"])
@pytest.mark.parametrize("table", [False, True])
def test_degenerate_matrices_have_finite_weights(change, table):
    w, h = case(7)
    w, rows = w.float(), torch.rand(24) + 0.1
    h = h.float().diagonal().clone() if table else h.float()
    if change == "no information":
        rows = torch.zeros(24)
    elif change == "a row without":
        rows[5] = 0
    elif change == "constant rows":
        w = torch.arange(24.0)[:, None].expand(24, 70) / 24
    elif change == "zeros":
        w = torch.zeros(24, 70)
    elif change == "one row":
        w, rows = w[:1], rows[:1]
    elif change == "one column":
        w, h = w[:, :1], h[:1] if table else h[:1, :1]
    elif change == "no inputs":
        h = torch.zeros_like(h)
    elif change == "huge":
        w = 1e6 * w
    elif change == "tiny":
        w, rows = 1e-9 * w, 1e12 * rows
    elif change == "spread":
        rows, w = 10 ** torch.linspace(-20, 20, 24), w * 10 ** torch.linspace(-4, 4, 70)
    for octaves in (-30.0, -3.0, 30.0):
        r = rounded(w, Sensitivity(rows, h), octaves)
        back = value(r.k, r.rows, r.columns)
        assert torch.isfinite(back).all() and torch.isfinite(r.rows).all() and (r.rows > 0).all() and math.isfinite(r.loss)
        assert r.k.abs().max() <= LARGEST_INDEX and r.columns.abs().max() <= 31
        parts = pack_trellis("w", r.k, r.rows, r.columns)
        assert torch.equal(dequantize_trellis(parts)["w"], back), "indices beyond 127 too"
    if change == "no information":
        assert not rounded(w, Sensitivity(rows, h), 0.0).k.any(), "no error costs anything"
    if change == "huge":
        assert rounded(w, Sensitivity(rows, h), -30.0).k.abs().max() > 127
    if change == "no inputs" and not table:
        return  # there all weights are zero
    with pytest.raises(GolfError, match="blocks.0.mlp.fc.weight"):
        rounded(1e30 * torch.ones_like(w), Sensitivity(rows, h), 0.0)


def trained_model():
    "A model that has learned which of four tokens follow each."
    torch.manual_seed(0)
    model = a_model()
    g = torch.Generator().manual_seed(1)
    follow = torch.randint(0, 80, (80, 4), generator=g)
    def text(rows, seed):
        g = torch.Generator().manual_seed(seed)
        ids = torch.randint(0, 80, (rows, 25), generator=g)
        pick = (torch.rand(rows, 25, generator=g) ** 2 * 4).long()
        for t in range(1, 25):
            ids[:, t] = follow[ids[:, t - 1], pick[:, t]]
        return ids
    optimizer = torch.optim.Adam(model.parameters(), 5e-3)
    for i in range(60):
        ids = text(32, i)
        F.cross_entropy(softcap(model(ids[:, :-1]), model.cap).flatten(0, 1), ids[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, text


def test_less_is_lost_at_as_many_bytes_and_the_size_is_met():
    model, text = trained_model()
    named, held, batches = named_state(model), text(64, 1000)[:, :-1], [text(32, 100 + i)[:, :-1] for i in range(8)]
    with torch.no_grad():
        exact = softcap(model(held), model.cap).log_softmax(-1)
    def kl(state):
        load_named(other, state)
        with torch.no_grad():
            coarse = softcap(other(held), other.cap).log_softmax(-1)
        return (exact.exp() * (exact - coarse)).sum(-1).mean().item()
    other = a_model()
    int6 = Gptq(calibrate(model, batches, Ranks()))
    published = quantize_state(named, False, small=CFG.small_tensor)
    published |= shared_out(int6_matrices(published, named), int6, Ranks())
    found, sizes = sensitivities(model, batches, Ranks()), []
    def counted_size(packed, shares):
        sizes.append(measure(packed, shares))
        return sizes[-1]
    for share in (0.95, 0.8):
        target = int(share * measure(published))
        theirs = fit_state(published, named, target, measure, int6)
        ours, shares = fit_trellis(named, found, target, counted_size, CFG.small_tensor)
        assert target - NEAR <= measure(ours, shares) <= target and len(sizes) <= TRIES
        assert kl(dequantize_trellis(ours)) < 0.6 * kl(dequantize_state(theirs))
        assert abs(sum(shares.values()) - 1) < 0.02 and shares.keys() == {n for n in found if named[n].numel() > CFG.small_tensor}
        sizes.clear()


@pytest.mark.parametrize("noise, scale", [(0, 1.0), (100, 1.0), (0, 3.0), (0, 0.4)])
def test_a_size_is_met_though_it_is_noisy_or_not_what_was_estimated(noise, scale):
    named, found, sizes = named_state(a_model()), sensitivities(a_model(), words(), Ranks()), []
    def noisy(packed, shares):
        size = scale * measure(packed, shares)
        sizes.append(int(size + noise * np.random.default_rng(int(size)).standard_normal()))
        return sizes[-1]
    target = int(scale * 22_000)
    fit_trellis(named, found, target, noisy, CFG.small_tensor)
    best = max(n for n in sizes if n <= target)
    assert len(sizes) <= TRIES and best > target - (NEAR if noise == 0 else 500)


def even(w): return Sensitivity(torch.ones(len(w)), torch.eye(w.shape[1]))


def test_small_matrices_without_bits_to_give_do_not_hold_up_the_rest():
    g = torch.Generator().manual_seed(0)
    named = {"large": torch.randn(96, 96, generator=g), "small": 0.06 * torch.randn(8, 20, generator=g)}
    sizes = []  # the small one has about a quarter of a bit a weight
    def larger(packed, shares):
        sizes.append(int(1.4 * measure(packed, shares)))
        return sizes[-1]
    fit_trellis(named, {n: even(w) for n, w in named.items()}, 4_000, larger, 100)
    assert any(4_000 - NEAR <= n <= 4_000 for n in sizes), sizes


@pytest.mark.parametrize("w", [torch.zeros(24, 30), torch.ones(24, 30)])
def test_matrices_that_take_no_bits_end_the_search(w):
    sizes = []
    packed, _ = fit_trellis({"w": w}, {"w": even(w)}, 9_000, lambda p, s: sizes.append(0) or measure(p, s), 100)
    assert len(sizes) <= 2 and torch.allclose(dequantize_trellis(packed)["w"], w, atol=0.01)


@pytest.mark.parametrize("of", [Sensitivity(torch.ones(23), torch.eye(30)), Sensitivity(torch.ones(24), torch.eye(29)), Sensitivity(torch.ones(24), torch.ones(24)), Sensitivity(torch.ones(24, 1), torch.eye(30))])
def test_a_sensitivity_of_another_matrix_is_refused_by_name(of):
    with pytest.raises(GolfError, match="sensitivity of mine "):
        fit_trellis({"mine": torch.ones(24, 30)}, {"mine": of}, 9_000, measure, 100)


def test_another_model_is_refused_in_a_sentence():
    with pytest.raises(GolfError, match="found Linear"):
        sensitivities(torch.nn.Linear(3, 3), words(), Ranks())
    with pytest.raises(GolfError, match="found Linear.*Gptq"):
        calibrate(torch.nn.Linear(3, 3), words(), Ranks())


class Own(torch.nn.Module):
    "A model in plain torch, with names of its own and a convolution."

    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(40, 16)
        self.conv = torch.nn.Conv1d(16, 24, 3)
        self.up, self.down = torch.nn.Linear(24, 64), torch.nn.Linear(64, 40)

    def forward(self, ids): return self.down(self.up(self.conv(self.embed(ids).mT).mT).relu())


def test_a_module_of_ones_own_goes_into_a_file_and_comes_back(tmp_path):
    torch.manual_seed(0)
    model, again, path = Own(), Own(), tmp_path / "own.golf"
    named = dict(model.state_dict())
    found = {name: even(named[name]) for name in ("up.weight", "down.weight")}
    with pytest.raises(GolfError, match=r"conv.weight must be a matrix .*\(24, 16, 3\).*flatten") as caught:
        fit_trellis(named, found, 6000, measure, 500)
    assert "diverged" not in str(caught.value)
    shape = named["conv.weight"].shape
    named["conv.weight"] = named["conv.weight"].flatten(1)
    packed, shares = fit_trellis(named, found, 6000, measure, 500)
    assert save_artifact(path, packed, {"shares": shares}, Best()) <= 6000 and shares.keys() == found.keys()
    back = dequantize_trellis(load_artifact(path)[1])
    back["conv.weight"] = back["conv.weight"].view(shape)
    again.load_state_dict(back)
    ids = torch.arange(40)[None]
    assert (again(ids) - model(ids)).abs().mean() < 0.1 * model(ids).abs().mean()


def test_what_does_not_fit_for_lack_of_sensitivities_or_size_says_so():
    named = {"a": torch.randn(30, 40), "b": torch.randn(90, 40)}
    for found, small in (({}, 100), ({"a": even(named["a"])}, 100), ({n: even(w) for n, w in named.items()}, 65_536)):
        with pytest.raises(NothingFits, match="no coarser, mostly b: .*`small`.* a sensitivity"):
            fit_trellis(named, found, 100, measure, small)
    with pytest.raises(NothingFits) as caught:
        fit_trellis(named, {n: even(w) for n, w in named.items()}, 100, measure, 100)
    assert "`small`" not in str(caught.value)
    for small in (100, 65_536):
        packed = quantize_state(named, False, small)
        with pytest.raises(NothingFits, match="no coarser, mostly b: .*`small`.* .attn. or .mlp."):
            fit_state(packed, named, 100, measure, Gptq({}))


def test_what_can_not_be_met():
    named, found = named_state(a_model()), sensitivities(a_model(), words(), Ranks())
    with pytest.raises(NothingFits, match="100 bytes") as caught:
        fit_trellis(named, found, 100, measure, CFG.small_tensor)
    assert dequantize_trellis(caught.value.packed).keys() == named.keys()
    sizes = []
    packed, _ = fit_trellis(named, found, 10**8, lambda p, s: sizes.append(0) or measure(p, s), CFG.small_tensor)
    back = dequantize_trellis(packed)
    assert len(sizes) <= 2 and all((back[n] - named[n]).abs().sum() < 0.01 * named[n].abs().sum() for n in named if n not in TABLES), "as fine as bfloat16"


def ranks_entry(rank: int, world: int, port: int, folder: str):
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    ranks = start_ranks()
    found = sensitivities(a_model(), (words()[:3], words()[3:])[rank], ranks)  # as when one rank ran out of time
    named = named_state(a_model())
    fitted = fit_trellis(named, found, 16_000, measure, CFG.small_tensor, ranks)
    said = []
    for target, weights in ((100, named), (16_000, named | {"tok_emb.weight": named["tok_emb.weight"] * math.nan})):
        try:
            fit_trellis(weights, found, target, measure, CFG.small_tensor, ranks)
        except GolfError as error:
            said.append((type(error).__name__, str(error)))
    (Path(folder) / f"{rank}.pkl").write_bytes(pickle.dumps((found, fitted, said)))
    stop_ranks(ranks)


def test_two_ranks_get_the_same(tmp_path):
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    fork_processes(ranks_entry, (2, port, str(tmp_path)), 2)
    (found, fitted, said), (found1, fitted1, said1) = (pickle.loads((tmp_path / f"{r}.pkl").read_bytes()) for r in range(2))
    assert said == said1 and [kind for kind, _ in said] == ["NothingFits", "GolfError"] and "tok_emb.weight" in said[1][1]
    assert fitted[1] == fitted1[1] and all(np.array_equal(p.data, fitted1[0][n].data) for n, p in fitted[0].items())
    alone = [sensitivities(a_model(), batches, Ranks(), seed=r) for r, batches in enumerate((words()[:3], words()[3:]))]
    for name, s in found.items():
        assert torch.equal(s.rows, found1[name].rows) and torch.equal(s.hessian, found1[name].hessian)
        if name != "tok_emb.weight":
            a, b = (one[name] for one in alone)
            assert torch.allclose(s.rows, (3 * a.rows + b.rows) / 4, rtol=1e-4, atol=1e-9)
        if name not in TABLES:
            both = (3 * a.rows.mean() * a.hessian + b.rows.mean() * b.hessian) / (3 * a.rows.mean() + b.rows.mean())
            assert torch.allclose(s.hessian, both, rtol=1e-3, atol=1e-5)


def test_the_recipe_fills_its_file_and_its_script_does_the_same(tmp_path):
    env = TINY | tiny_data(tmp_path) | {"RECIPE": "pr2135", "MODEL_DIM": "48", "ROPE_DIMS": "4", "LOOP_START": "0", "LOOP_END": "0", "PARALLEL_START_LAYER": "1", "SMALL_TENSOR": "2000", "GPTQ_CALIB_SAMPLES": "2", "MAX_WALLCLOCK_SECONDS": "0", "TTT_ENABLED": "0", "RUNS_DIR": str(tmp_path / "runs")}
    run_quietly(pr2135, env | {"RUN_ID": "free"})
    target = int(0.8 * (tmp_path / "runs" / "free" / "artifact.golf").stat().st_size)
    summary = run_quietly(pr2135, env | {"RUN_ID": "a", "TARGET_BYTES": str(target)})
    data = (tmp_path / "runs" / "a" / "artifact.golf").read_bytes()
    assert target - NEAR <= len(data) <= target and summary["total_bytes"] == len(data)
    assert re.search(r"^trellis: [1-9]\d* matrices with ", (tmp_path / "runs" / "a" / "train.log").read_text(), re.M)
    _, meta, _ = load_model(tmp_path / "runs" / "a" / "artifact.golf")
    assert abs(sum(meta["shares"].values()) - 1) < 0.02 and "tok_emb.weight" in meta["shares"]
    assert "column exponents" in dict(read_summary(tmp_path / "runs" / "a")["ledger"]), "as artifact inspect calls them"
    facts = json.loads((tmp_path / "runs" / "a" / "summary.json").read_text())
    facts["config"] |= {"max_wallclock_seconds": 600.0, "gptq_reserve_ms": 1e-3}
    (tmp_path / "runs" / "a" / "summary.json").write_text(json.dumps(facts))
    done = golfnb("quantize", tmp_path / "runs" / "a", "-o", "again.golf", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "again.golf").read_bytes() == data, "no clock runs there: measured on as many batches"
    script = tmp_path / "pr2135.py"
    assert golfnb("script", "--recipe", "pr2135", "-o", script, cwd=tmp_path).returncode == 0
    done = forked_ranks(script, 1, env | {"RUN_ID": "s", "TARGET_BYTES": str(target + script.stat().st_size)}, tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    assert (tmp_path / "runs" / "s" / "artifact.golf").read_bytes() == data
    assert "over_budget" in run_quietly(pr2135, env | {"RUN_ID": "over", "TARGET_BYTES": "1000"})
    assert (tmp_path / "runs" / "over" / "artifact.golf.over").is_file()
    run_quietly(pr2135, env | {"RUN_ID": "none", "SMALL_TENSOR": "65536"})
    assert "SMALL_TENSOR=65536" in (tmp_path / "runs" / "none" / "train.log").read_text(), "it rounds nothing, and says so"

"""The integer grid against plain oracles."""
import numpy as np
import pytest
import torch

from golfnb.settings import GolfError
from golfnb.file.grid import (CLIP_QUANTILES, INT8_QUANTILE, best_clip, clip_ratio, dequantize_rows, quantize_int8, quantize_rows,
                         round_to_grid, row_clip, row_scale)


def make(seed, rows=24, cols=96, kind="normal"):
    g = torch.Generator().manual_seed(seed)
    w = torch.randn(rows, cols, generator=g) * 10 ** (4 * torch.rand(rows, 1, generator=g) - 3)
    if kind == "heavy":
        w = w / (torch.rand(rows, cols, generator=g) + 1e-3)
    if kind == "zero rows":
        w[::3] = 0
    return w


def gptq_lite(w, floor):
    "2b's quantizer in ten lines: one candidate for the whole matrix, fp16 scale before rounding, the earlier of equals."
    best = None
    for p in (0.999, 0.9995, 0.9999, 0.99999, 1.0):
        clip = torch.quantile(w.abs(), p, dim=1)
        s = (clip / 31).clamp_min(1 / 31 if floor else 2.0 ** -24).half().float()[:, None]
        q = torch.round(w / s).clamp(-31, 31)
        error = ((w - q * s) ** 2).mean().item()
        if best is None or error < best[0]:
            best = (error, q.to(torch.int8), s[:, 0], p)
    return best[1:]


@pytest.mark.parametrize("floor", [False, True])
@pytest.mark.parametrize("kind", ["normal", "heavy", "zero rows"])
@pytest.mark.parametrize("seed", range(4))
def test_best_clip_is_gptq_lite(seed, kind, floor):
    w = make(seed, cols=[96, 512, 1536, 7][seed], kind=kind)
    q, scale, index = best_clip(w, 31, floor)
    q0, scale0, p = gptq_lite(w, floor)
    assert CLIP_QUANTILES[index] == p and torch.equal(scale, scale0) and torch.equal(q, q0)


def test_quantile_is_numpys_linear_one():
    w = make(1, cols=300).double()
    for p in (0.5, 0.999, INT8_QUANTILE):
        np.testing.assert_allclose(row_clip(w, p).numpy(), np.quantile(w.abs().numpy(), p, axis=1), rtol=1e-12)


def test_rows_beyond_torchs_quantile_limit_are_taken_in_parts():
    w = torch.randn(2_100_000, 8)  # 16.8 million elements: torch.quantile refuses them at once
    clips = row_clip(w, 0.9)
    assert torch.equal(clips[-5:], torch.quantile(w[-5:].abs(), 0.9, dim=1)) and len(clips) == len(w)


def test_ties_keep_the_earlier_candidate():
    assert best_clip(torch.full((3, 8), 0.01), 31, floor=True)[2] == 0
    assert best_clip(torch.ones(3, 8))[2] == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_bank_is_its_matrices_one_by_one(dtype):
    bank = torch.stack([make(s, kind=k) for s, k in ((0, "normal"), (1, "heavy"), (2, "zero rows"))] + [torch.zeros(24, 96)]).to(dtype)
    q, scale, index = best_clip(bank)
    for i, m in enumerate(bank):
        qi, si, ii = best_clip(m)
        assert torch.equal(q[i], qi) and torch.equal(scale[i], si) and index[i] == ii
    assert scale.dtype == dtype and not q[3].any()


@pytest.mark.parametrize("floor", [False, True])
def test_int8_rows_use_the_unrounded_scale(floor):
    w = make(5, kind="heavy")
    q, scale = quantize_int8(w, floor)
    clip = torch.quantile(w.abs(), 0.9999984, dim=1)
    s = (clip / 127).clamp_min(1 / 127 if floor else 2.0 ** -24)
    held = torch.minimum(torch.maximum(w, -clip[:, None]), clip[:, None])
    assert torch.equal(q, torch.round(held / s[:, None]).clamp(-127, 127).to(torch.int8)) and torch.equal(scale, s.half().float())


@pytest.mark.parametrize("floor", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_training_rounds_to_what_quantize_writes(dtype, floor):
    bank = torch.stack([make(s) for s in range(3)]).to(dtype)
    q, scale, _ = best_clip(bank, 31, floor)
    ratio = clip_ratio(bank, floor)
    want = dequantize_rows(q, scale)
    # a clip that went through ratio * maximum may fall on the other side of an fp16 rounding: one fp16 step of the scale, in rare rows
    got = round_to_grid(bank, ratio, 31, floor)
    same_scale = row_scale(row_clip(bank, 1.0) * ratio, 31, floor) == scale
    assert same_scale.double().mean() > 0.98
    assert torch.equal(got[same_scale], want[same_scale])
    assert got.dtype == dtype


def test_frozen_ratio_follows_growing_weights():
    w = make(6).double()
    ratio = clip_ratio(w)
    torch.testing.assert_close(round_to_grid(4 * w, ratio), 4 * round_to_grid(w, ratio), rtol=2e-3, atol=0.0)
    assert (ratio > 0).all() and (ratio <= 1).all()


def test_every_integer_survives_its_own_grid():
    for scale in (2.0 ** -24, 1e-3, 0.03, 1000.0):
        s = torch.tensor([scale]).half().float()
        q = torch.arange(-31, 32, dtype=torch.int8)[None]
        assert torch.equal(quantize_rows(dequantize_rows(q, s), s, 31), q)


def test_extreme_rows_stay_finite():
    w = torch.tensor([[0.0] * 8, [1e-30] * 8, [3e6] * 8, [1e-7] * 8])
    q, scale, _ = best_clip(w)
    assert torch.isfinite(dequantize_rows(q, scale)).all() and (scale > 0).all()
    assert torch.isfinite(round_to_grid(w, clip_ratio(w))).all()


def test_straight_through_learns_what_plain_rounding_cannot():
    g = torch.Generator().manual_seed(0)
    X = torch.randn(200, 16, generator=g, dtype=torch.float64) @ torch.randn(16, 16, generator=g, dtype=torch.float64)
    Y = X @ torch.randn(16, 4, generator=g, dtype=torch.float64)
    ratio = torch.ones(4, dtype=torch.float64)

    def train(aware):
        master = torch.zeros(4, 16, dtype=torch.float64)
        for step in range(300):
            seen = round_to_grid(master, ratio, 3) if aware and step > 150 else master
            master = master - 5e-4 * (1 - step / 300) * 2 * (X @ seen.T - Y).T @ X / 200
        return (X @ round_to_grid(master, ratio, 3).T - Y).square().mean().item()
    assert train(True) < train(False)


@pytest.mark.parametrize("bad", [torch.tensor([[1.0, float("nan")]]), torch.tensor([[float("inf"), 1.0]]), torch.randn(5), torch.zeros(0, 4)])
def test_bad_weights_are_refused(bad):
    for quantizer in (best_clip, quantize_int8):
        with pytest.raises(GolfError):
            quantizer(bad)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_cuda_gives_the_cpu_grid():
    w = torch.stack([make(s) for s in range(3)])
    for a, b in zip(best_clip(w), best_clip(w.cuda())):
        assert (a == b.cpu()).double().mean() > 0.999

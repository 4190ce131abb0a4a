"""Newton-Schulz against the SVD: failures these stop are named in each test."""
import json
import math
import re
from pathlib import Path
from statistics import median
from types import SimpleNamespace

import pytest
import torch

from golfnb.muon.newton_schulz import (NS5_COEFFS, POLAR_EXPRESS_COEFFS, PRODUCT_TILES, newton_schulz, newton_schulz_flops, polar_express,
                                  polar_factor, product_tiles, quintic)
from golfnb.muon.optimizer import ParallelMuon
from golfnb.settings import GolfError

DEVICES = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])
SHAPES = [(5, 5), (4, 9), (9, 4), (1, 7), (7, 1), (24, 8), (1, 1)]
METHODS = {quintic: (NS5_COEFFS, 1.0, 1e-7), polar_express: (POLAR_EXPRESS_COEFFS, 1.02, 1e-6)}


def expected(G, method):
    "U p(S) V^T in float64: what the iteration computes, exactly, by SVD."
    coeffs, scale, eps = METHODS[method]
    U, S, Vh = torch.linalg.svd(G.double(), full_matrices=False)
    s = S / (S.square().sum(-1, keepdim=True).sqrt() * scale + eps)
    for a, b, c in coeffs:
        s = a * s + b * s ** 3 + c * s ** 5
    return (U * s[..., None, :]) @ Vh


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("device", DEVICES)
def test_float64_equals_the_polynomial_of_the_singular_values(shape, method, device):
    G = torch.randn(3, *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape))).to(device)
    got = method(G, dtype=torch.float64)  # on CUDA bf16 is usual
    assert got.shape == G.shape and got.dtype == torch.float64
    torch.testing.assert_close(got, expected(G, method), rtol=0, atol=1e-10)


@pytest.mark.parametrize("shape", SHAPES)
def test_settling_coefficients_reach_the_svd_polar_factor(shape):
    G = torch.randn(2, *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    torch.testing.assert_close(newton_schulz(G, ((15 / 8, -10 / 8, 3 / 8),) * 60), polar_factor(G), rtol=0, atol=1e-10)


@pytest.mark.parametrize("method,low,high", [(quintic, 0.6, 1.25), (polar_express, 0.8, 1.2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("device", DEVICES)
def test_real_sizes_come_out_nearly_orthogonal(method, low, high, dtype, device):
    G = torch.randn(2, 96, 288, generator=torch.Generator().manual_seed(4)).to(device)
    for g in (G, G.mT, 1e-6 * G, 1e4 * G):
        sv = torch.linalg.svdvals(method(g, dtype=dtype).double())
        assert low < sv.min() and sv.max() < high, (sv.min(), sv.max())


def test_a_norm_that_fp16_does_not_hold():
    G = 300 * torch.randn(512, 128, generator=torch.Generator().manual_seed(4))
    assert G.norm() > torch.finfo(torch.float16).max
    for method in (quintic, polar_express):
        torch.testing.assert_close(method(G.half()).float(), method(G), rtol=0, atol=5e-3)


@pytest.mark.parametrize("device", DEVICES)
def test_padding_slots_stay_zero_and_leave_neighbours_alone(device):
    G = torch.randn(4, 8, 24, generator=torch.Generator().manual_seed(5), dtype=torch.float64).to(device)
    G[2] = 0
    out = quintic(G, dtype=torch.float64)
    assert not out[2].any()
    torch.testing.assert_close(out[[0, 1, 3]], quintic(G[[0, 1, 3]], dtype=torch.float64), rtol=0, atol=1e-12)
    assert torch.isfinite(quintic(G, dtype=torch.bfloat16)).all()


def test_commutes_with_transposing_so_a_shared_bank_is_allowed():
    G = torch.randn(3, 12, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(6))
    torch.testing.assert_close(quintic(G.mT.contiguous()).mT, quintic(G), rtol=0, atol=1e-12)


def test_input_is_not_changed_and_any_batch_shape_works():
    G = torch.randn(2, 3, 6, 4, generator=torch.Generator().manual_seed(7))
    before = G.clone()
    out = quintic(G)
    assert torch.equal(G, before) and out.shape == G.shape
    torch.testing.assert_close(out[1, 2], quintic(G[1, 2]), rtol=0, atol=1e-6)
    assert quintic(G[:0]).shape == (0, 3, 6, 4)


def test_default_dtype():
    G = torch.randn(2, 4, 4)
    assert quintic(G).dtype == torch.float32 and quintic(G.bfloat16()).dtype == torch.bfloat16
    assert quintic(G.double()).dtype == torch.float64
    if torch.cuda.is_available():
        assert quintic(G.cuda()).dtype == torch.bfloat16


@pytest.mark.skipif(not torch.cuda.is_available(), reason="counts CUDA kernels")
def test_launches_do_not_grow_with_the_number_of_matrices():
    def kernels(n):
        G = torch.randn(n, 256, 512, device="cuda", dtype=torch.bfloat16)
        quintic(G)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as prof:
            quintic(G)
            torch.cuda.synchronize()
        return sum(e.count for e in prof.key_averages() if e.device_type == torch.autograd.DeviceType.CUDA)
    assert kernels(24) < 60 and kernels(24) < kernels(3) + 20  # one by one they would be over 500


def test_steps_and_bad_input():
    G = torch.randn(3, 6, 4, dtype=torch.float64)
    for steps in (3, 7):
        coeffs = (*POLAR_EXPRESS_COEFFS, *POLAR_EXPRESS_COEFFS[-1:] * 2)[:steps]
        assert torch.equal(polar_express(G, steps), newton_schulz(G, coeffs, 1.02, 1e-6))
        assert torch.equal(quintic(G, steps), newton_schulz(G, NS5_COEFFS[:1] * steps))
    for bad in (torch.randn(3), torch.ones(2, 2).long()):
        for call in (quintic, polar_express, newton_schulz):
            with pytest.raises(GolfError, match=re.escape(f"{bad.dtype} of shape {tuple(bad.shape)}")):
                call(bad)
    for steps in (0, -1):
        for call in (quintic, polar_express):
            with pytest.raises(GolfError, match=f"step.*{steps}"):
                call(G, steps)


def test_flops_formula():
    m, l = 4, 12
    assert newton_schulz_flops(12, 4, 1) == 2 * m * l * m + 2 * m ** 3 + 2 * m * m * l
    assert newton_schulz_flops(4, 12, 2) == 2 * newton_schulz_flops(12, 4, 1)


def test_gradients_flow_through_a_weight_that_wants_them():
    W = torch.nn.Parameter(torch.randn(2, 6, 4, dtype=torch.float64))
    assert torch.autograd.gradcheck(lambda w: quintic(w, steps=2), (W,))


def test_the_table_of_tiles_is_what_was_measured():
    "Over the shapes that a row serves, each of its two choices is within three per cent of the best one."
    found = json.loads((Path(__file__).parents[2] / "nbs/results/newton_schulz_products_h100.json").read_text())
    assert found["unit"] == "ms" and found["machine"]["gpus"] == ["NVIDIA H100 80GB HBM3"]
    ratios = {}
    for name, times in found["samples"].items():
        shape, *way = name.split()
        if way[0] in ("first", "second"):
            ratios.setdefault((shape, way[0]), {})[tuple(way[1:])] = median(times)
    served = {}
    for (shape, product), took in ratios.items():
        short = int(shape.split("x")[1])
        row = next(row for row in PRODUCT_TILES if short <= row[0] and short % row[1] == 0)
        for way, ms in took.items():
            served.setdefault((row, product), {}).setdefault(way, []).append(math.log(ms / min(took.values())))
    assert {row for row, _ in served} == set(PRODUCT_TILES)
    for (row, product), ways in served.items():
        _, side, warps, both = row
        chosen = (str(side), str(warps)) if both or product == "second" else ("library",)
        most = max(map(len, ways.values()))  # a way that some of the shapes cannot take is no choice for the row
        means = {way: math.exp(sum(logs) / len(logs)) for way, logs in ways.items() if len(logs) == most}
        assert means[chosen] <= 1.03 * min(means.values()), (row, product, means)


def test_only_measured_gpus_and_whole_tiles_take_a_kernel(monkeypatch):
    monkeypatch.setattr("golfnb.muon.newton_schulz.usable_kernels", lambda device, dtype: frozenset({"ns"}))
    capability = [9, 0]
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: tuple(capability))

    def rows(short, long=4096, dtype=torch.bfloat16):
        return product_tiles(SimpleNamespace(shape=(2, short, long), dtype=dtype, device="cuda", is_cuda=True, requires_grad=False, numel=lambda: short * long))
    assert rows(512) == PRODUCT_TILES[0] and rows(640) == rows(4096) == PRODUCT_TILES[1] and rows(576) == PRODUCT_TILES[2]
    assert rows(100) is rows(4160) is rows(512, dtype=torch.float16) is None
    for other in ((8, 0), (10, 0)):
        capability[:] = other
        assert rows(512) is None and rows(2048) is None


def test_a_norm_whose_square_is_infinite_gives_zeros_and_the_optimizer_skips_such_a_step():
    "In fp32 squares end at 3.4e38. A norm of 1e18 is orthogonalized as any other."
    G = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    for orthogonal in (quintic, polar_express):
        assert torch.allclose(orthogonal(G * 1e18), orthogonal(G), atol=1e-4)
        assert not orthogonal(G * 1e20).any() and torch.allclose(orthogonal(G.double() * 1e20), orthogonal(G.double()), atol=1e-4)
    weight = torch.nn.Parameter(G.clone())
    weight.grad = G * 1e20
    optimizer = ParallelMuon([weight])
    optimizer.step()
    assert optimizer.skipped == 1 and torch.equal(weight.detach(), G)

"""Averages: closed forms, dtypes, shards, and no question to the device."""
import pytest
import torch

from golfnb.averaging import Ema, Swa, average_of
from golfnb.settings import GolfError


def path(steps=12, dtype=torch.float64, seed=0):
    g = torch.Generator().manual_seed(seed)
    return [[torch.randn(4, 3, 2, generator=g, dtype=torch.float64).to(dtype), torch.randn(7, generator=g, dtype=torch.float64).to(dtype)] for _ in range(steps)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_ema_formula(dtype):
    "E = 0.9 E + 0.1 W from the initial weights on, in fp32 or wider, bf16 weights taken at their rounded values."
    steps = path(dtype=dtype)
    ema, expected = Ema(steps[0], 0.9), [t.double() for t in steps[0]]
    for tensors in steps[1:]:
        ema.update(tensors)
        expected = [0.9 * e + 0.1 * t.double() for e, t in zip(expected, tensors)]
    for e, x in zip(ema.tensors, expected):
        assert e.dtype == torch.promote_types(dtype, torch.float32) and torch.allclose(e.double(), x, atol=1e-14 if dtype == torch.float64 else 1e-6)


def test_averages_keep_their_own_memory():
    steps = path()
    ema, swa, first = Ema(steps[0], 0.5), Swa(steps[0]), steps[0][0].clone()
    swa.add(steps[0], torch.tensor(1.0))
    steps[0][0].zero_()
    out = average_of("ema", ema, None, steps[0])
    out[0].zero_()
    assert torch.equal(ema.tensors[0], first) and torch.equal(swa.mean()[0], first)


def test_swa_is_the_mean_of_what_it_took():
    steps, swa, taken = path(), None, []
    swa = Swa(steps[0])
    for s, tensors in enumerate(steps):
        take = s in (0, 4, 5, 11)
        swa.add(tensors, torch.tensor(float(take)))
        taken += [tensors] if take else []
    for i, m in enumerate(swa.mean()):
        assert torch.allclose(m, torch.stack([t[i] for t in taken]).mean(0), atol=1e-14)


def test_shards_of_the_average_are_the_average_of_the_shards():
    steps = path(dtype=torch.float32)
    whole, halves = Ema(steps[0], 0.9), [Ema([t[s] for t in steps[0][:1]], 0.9) for s in (slice(0, 2), slice(2, 4))]
    for tensors in steps[1:]:
        whole.update(tensors)
        for h, s in zip(halves, (slice(0, 2), slice(2, 4))):
            h.update([tensors[0][s]])
    assert torch.equal(torch.cat([h.tensors[0] for h in halves]), whole.tensors[0])


def test_no_host_synchronisation():
    "On the meta device any look at a value raises."
    tensors = [torch.empty(4, 3, device="meta"), torch.empty(5, device="meta", dtype=torch.bfloat16)]
    ema, swa = Ema(tensors, 0.9), Swa(tensors)
    ema.update(tensors)
    swa.add(tensors, torch.empty((), device="meta"))
    with pytest.raises(Exception):
        swa.mean()


def test_modes():
    steps = path()
    ema, swa = Ema(steps[0], 0.9), Swa(steps[0])
    for tensors in steps[1:]:
        ema.update(tensors)
        swa.add(tensors, torch.tensor(1.0))
    by_mode = {m: average_of(m, ema, swa, steps[-1]) for m in ("ema", "swa", "ema+swa", "none")}
    assert torch.equal(by_mode["none"][1], steps[-1][1]) and torch.equal(by_mode["ema"][1], ema.tensors[1])
    assert torch.allclose(by_mode["ema+swa"][0], (by_mode["ema"][0] + by_mode["swa"][0]) / 2)


def test_refusals():
    "An SWA without snapshots, and a decay that forgets nothing."
    t = path(1)[0]
    with pytest.raises(GolfError, match="no snapshot"):
        average_of("swa", Ema(t, 0.9), Swa(t), t)
    with pytest.raises(GolfError, match="EMA_DECAY"):
        Ema(t, 1.0)


def test_another_number_of_tensors_is_a_bug():
    t = path(1)[0]
    for call in (lambda: Ema(t, 0.9).update(t[:1]), lambda: Swa(t).add(t[:1], torch.tensor(1.0))):
        with pytest.raises(ValueError):
            call()

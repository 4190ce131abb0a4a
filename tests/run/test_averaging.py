"""Averages: closed forms, dtypes, shards, and no question to the device."""
from types import SimpleNamespace

import pytest
import torch

from golfnb.run.average import AveragingSettings, Ema, EmaAndSwa, NoAverage, Swa
from golfnb.settings import GolfError
from golfnb.studies.variants import AVERAGES
from golfnb.tools.guard import share_of_initial_weights


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
    for out in (ema.weights(), swa.weights(), NoAverage(steps[1]).weights()):
        out[0].zero_()
    assert torch.equal(ema.tensors[0], first) and torch.equal(swa.weights()[0], first) and steps[1][0].any()


def test_swa_is_the_mean_of_what_it_took():
    steps, swa, taken = path(), None, []
    swa = Swa(steps[0])
    for s, tensors in enumerate(steps):
        take = s in (0, 4, 5, 11)
        swa.add(tensors, torch.tensor(float(take)))
        taken += [tensors] if take else []
    for i, m in enumerate(swa.weights()):
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
    for average in (Ema(tensors, 0.9), Swa(tensors, 2), EmaAndSwa(tensors, 0.9, 2), NoAverage(tensors)):
        for step in range(4):
            average.update(tensors, step, torch.empty((), device="meta"))
    with pytest.raises(Exception):
        Swa(tensors).weights()


KINDS = {"ema": Ema, "swa": Swa, "ema+swa": EmaAndSwa, "none": NoAverage}
SETTINGS = AveragingSettings(ema_decay=0.9, swa_every=3)


def test_the_four_averages_of_one_path():
    steps = path()
    made = {mode: AVERAGES[mode](SETTINGS)(steps[0]) for mode in KINDS}
    assert {mode: type(average) for mode, average in made.items()} == KINDS
    for step, tensors in enumerate(steps[1:]):
        for average in made.values():
            average.update(tensors, step, 1.0 if step < 4 else 0.1)
    found = {mode: average.weights() for mode, average in made.items()}
    ema, snapshots = Ema(steps[0], 0.9), [steps[6], steps[9]]
    for tensors in steps[1:]:
        ema.update(tensors)
    for i, last in enumerate(steps[-1]):
        swa = sum(taken[i] for taken in snapshots) / 2
        for mode, wanted in {"none": last, "ema": ema.tensors[i], "swa": swa, "ema+swa": (ema.tensors[i] + swa) / 2}.items():
            assert torch.allclose(found[mode][i], wanted, atol=1e-14), mode
    for average in made.values():
        average.remark(None)  # there is nothing to say
    shares = {mode: share_of_initial_weights(average.state(), 0.9, 10) for mode, average in made.items()}
    assert shares == {"ema": 0.9 ** 10, "swa": 0.0, "ema+swa": 0.9 ** 10 / 2, "none": 0.0}
    assert {mode: [*average.state()] for mode, average in made.items()} == {"ema": ["ema"], "swa": ["swa", "snapshots"], "ema+swa": ["ema", "swa", "snapshots"], "none": []}


@pytest.mark.parametrize("mode, instead", [("swa", "none"), ("ema+swa", "ema")])
def test_without_a_snapshot_the_rest_is_exported_and_said(mode, instead):
    steps = path()
    average, other = AVERAGES[mode](SETTINGS)(steps[0]), AVERAGES[instead](SETTINGS)(steps[0])
    for step, tensors in enumerate(steps[1:]):
        average.update(tensors, step, 1.0)
        other.update(tensors, step, 1.0)
    assert all(torch.equal(a, b) for a, b in zip(average.weights(), other.weights()))
    said = []
    average.remark(SimpleNamespace(line=said.append))
    assert len(said) == 1 and f"AVERAGING={mode} became {instead}" in said[0]


def test_a_decay_that_forgets_nothing_is_refused():
    with pytest.raises(GolfError, match="EMA_DECAY"):
        Ema(path(1)[0], 1.0)


def test_another_number_of_tensors_is_a_bug():
    t = path(1)[0]
    for call in (lambda: Ema(t, 0.9).update(t[:1]), lambda: Swa(t).add(t[:1], torch.tensor(1.0))):
        with pytest.raises(ValueError):
            call()

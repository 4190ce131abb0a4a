"""Clipping as eight ranks do, on fewer; jobs that say what every rank saw; a finished run weighed and scored."""
import json

import pytest
import torch
from tiny import TINY, tiny_data

from golfnb import trials
from golfnb.loader import grad_accum
from golfnb.config import load_config
from golfnb.parallel_muon import Ranks, clip_factor, squared_norm
from golfnb.run import Machine
from golfnb.train import backward_pass

CLIP = 0.05  # of a norm above 0.1: it bites
ALONE = Ranks()


def machine():
    cfg = load_config(TINY | {"GRAD_CLIP_NORM": str(CLIP), "CLIP": "local", "STEP_GRAPH": "0"})
    return Machine(cfg, ALONE), cfg


def batches(cfg):
    draw = torch.Generator().manual_seed(3)
    return [[torch.randint(cfg.vocab_size, (2, cfg.train_seq_len), generator=draw) for _ in range(2)] for _ in range(grad_accum(1))]


def in_place(loss_fn, params, places, ids, targets, accum):
    "A backward that writes every gradient where the last one stood, as a recorded one does."
    earlier = [None if p.grad is None else p.grad.clone() for p in params]
    for p in params:
        p.grad = None
    backward_pass(loss_fn, ids, targets, accum)
    for i, (p, before) in enumerate(zip(params, earlier)):
        if p.grad is not None:
            places[i] = p.grad.clone() if i not in places else places[i].copy_(p.grad)
            p.grad = places[i] if before is None else before.add_(places[i])


@pytest.mark.parametrize("recorded", [False, True])
def test_each_micro_batch_is_clipped_as_a_rank_of_eight_clips_it(recorded):
    m, cfg = machine()
    params, accum, places = list(m.model.parameters()), grad_accum(1), {}
    expected = [torch.zeros_like(p, dtype=torch.float32) for p in params]
    for ids, targets in batches(cfg):
        grads = torch.autograd.grad(m.loss_fn(ids, targets), params, allow_unused=True, materialize_grads=True)
        factor = clip_factor(squared_norm(list(grads), torch.float32), CLIP)
        assert factor < 0.9
        torch._foreach_add_(expected, [g.float() * factor / accum for g in grads])
    m = trials.clip_as_eight(m, cfg, 1)
    for ids, targets in batches(cfg):
        in_place(m.loss_fn, params, places, ids, targets, accum) if recorded else backward_pass(m.loss_fn, ids, targets, accum)
        m.engine.accumulate()
    sums = {id(b.replica): b.sum for b in m.engine.banks.values()}
    for p, e in zip(params, expected):
        got = sums.get(id(p), p.grad)
        torch.testing.assert_close(got.float(), e, rtol=2e-5, atol=2e-7)


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trials")
    return {**TINY, **tiny_data(folder), "RUNS_DIR": str(folder), "RUN_ID": "r", "OUT": str(folder), "GPTQ_CALIB_SAMPLES": "1"}


@pytest.fixture
def env(settings, monkeypatch):
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    return settings


def test_a_poisoned_step_is_skipped_and_every_rank_says_what_it_saw(env, monkeypatch, capsys):
    monkeypatch.setenv("ITERATIONS", "8")
    monkeypatch.setenv("RUN_ID", "nan")
    trials.rank_of_job("nan")
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("EVERY ")]
    (rank,) = json.loads(line[6:])
    assert rank["steps"] == 8 and rank["skipped"] == 1 and all(map(bool, rank["sums"]))


def test_a_finished_run_is_weighed_and_scored(env, monkeypatch):
    from golfnb.bench import read_result
    from golfnb.run import run

    monkeypatch.setattr(trials, "GRIDS", {"floor": trials.GRIDS["floor"]})
    run(load_config(env), ALONE, quiet=True)
    folder = f"{env['RUNS_DIR']}/r"
    assert trials.loss([folder, "weighed"]) == trials.shipped([folder]) == trials.documents([folder, "scored", "100", "TTT_LORA_RANK=2"]) == 0
    found = read_result("weighed", env["OUT"])["samples"]
    sizes = [found[f"k = {k}, nearest: bytes"][0] for k in ("18", "36")]
    assert sizes == sorted(sizes, reverse=True) and len(found) == 12
    assert read_result("codec_long", env["OUT"])["samples"] and len(read_result("scored", env["OUT"])["samples"]) == 16


def test_the_build_is_timed_beside_bare_encoding(env, monkeypatch):
    from golfnb.bench import read_result
    from golfnb.data import stdlib_documents

    monkeypatch.setattr(trials, "stdlib_documents", lambda: stdlib_documents(["json", "csv", "email"])[:60])
    assert trials.build(["tokens=50000", "rounds=2"]) == 0
    assert len(read_result("data_build_cpu", env["OUT"])["samples"]["bare"]) == 2


def test_what_a_score_printed_is_read():
    text = "final_int6_sliding_window_exact val_loss:2.0 val_bpb:1.25\nlegal_ttt_exact val_loss:2.0 val_bpb:1.2"
    assert trials.bpb_of(text) == {"sliding": 1.25, "TTT": 1.2}

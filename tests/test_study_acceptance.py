"""Clipping as eight ranks do, on fewer: what the study of issue 3 rests on."""
import pytest
import torch
from study_acceptance import clip_as_eight
from tiny import TINY

from golfnb.config import load_config
from golfnb.parallel_muon import Ranks, clip_factor, squared_norm
from golfnb.run import build_machine
from golfnb.train import backward_pass

CLIP = 0.05  # of a norm above 0.1: it bites
ALONE = Ranks()


def machine():
    cfg = load_config(TINY | {"GRAD_CLIP_NORM": str(CLIP), "CLIP": "local", "STEP_GRAPH": "0"})
    return build_machine(cfg, ALONE), cfg


def batches(cfg):
    draw = torch.Generator().manual_seed(3)
    return [[torch.randint(cfg.vocab_size, (2, cfg.train_seq_len), generator=draw) for _ in range(2)] for _ in range(cfg.grad_accum(1))]


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
    params, accum, places = list(m.model.parameters()), cfg.grad_accum(1), {}
    expected = [torch.zeros_like(p, dtype=torch.float32) for p in params]
    for ids, targets in batches(cfg):
        grads = torch.autograd.grad(m.loss_fn(ids, targets), params, allow_unused=True, materialize_grads=True)
        factor = clip_factor(squared_norm(list(grads), torch.float32), CLIP)
        assert factor < 0.9
        torch._foreach_add_(expected, [g.float() * factor / accum for g in grads])
    m = clip_as_eight(m, cfg, 1)
    for ids, targets in batches(cfg):
        in_place(m.loss_fn, params, places, ids, targets, accum) if recorded else backward_pass(m.loss_fn, ids, targets, accum)
        m.engine.accumulate()
    sums = {id(b.replica): b.sum for b in m.engine.banks.values()}
    for p, e in zip(params, expected):
        got = sums.get(id(p), p.grad)
        torch.testing.assert_close(got.float(), e, rtol=2e-5, atol=2e-7)

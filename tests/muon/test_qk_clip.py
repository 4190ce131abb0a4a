"""QkClip: no head's logits exceed the limit on the rows that it saw, others stay, and ranks stay alike."""
import pytest
import torch
from qk_workers import Attention, clipped, rows_of
from torch import nn
from workers import spawn

from golfnb.muon.errors import OptimizerError
from golfnb.muon.optimizer import ParallelMuon
from golfnb.muon.rules import QkClip, clip_heads
from golfnb.model.engine import Ranks


def largest(model, rows):
    return model.logits(rows).amax((1, 2))


@pytest.mark.parametrize("limit", [0.5, 5.0, 1e6])
def test_each_head_is_brought_to_the_limit_and_no_further(limit):
    torch.manual_seed(0)
    model = Attention()
    before = model.logits(rows_of(0)).detach()
    seen = before.amax((1, 2))
    with torch.no_grad():
        clip_heads(model.q.weight, model.k.weight, seen, limit)
    ratio = (limit / seen.clamp(min=limit))[:, None, None]
    torch.testing.assert_close(model.logits(rows_of(0)), before * ratio, rtol=1e-12, atol=1e-12)


def test_where_each_head_has_its_keys_both_take_the_root():
    query, key = torch.ones(6, 5, dtype=torch.float64), torch.ones(6, 5, dtype=torch.float64)
    clip_heads(query, key, torch.tensor([400.0, 50.0, 200.0]), 100.0)
    for weight in (query, key):
        assert weight[:, 0].tolist() == pytest.approx([0.5, 0.5, 1, 1, 0.5 ** 0.5, 0.5 ** 0.5], rel=1e-12)


@pytest.mark.parametrize("world", [1, 2])
def test_ranks_scale_by_the_largest_logit_of_all(world):
    outs = spawn(world, "clipped", 4.0, module="qk_workers") if world > 1 else [clipped(Ranks(), 4.0)]
    torch.manual_seed(0)
    model = Attention()
    seen = torch.stack([largest(model, rows_of(rank)) for rank in range(world)]).amax(0)
    assert seen.max() > 4
    with torch.no_grad():
        clip_heads(model.q.weight, model.k.weight, seen, 4.0)
    for out in outs:
        assert not out["largest"].any()
        for name, p in model.named_parameters():
            torch.testing.assert_close(out[name], p.detach(), rtol=1e-12, atol=1e-12)
            assert torch.equal(out[name], outs[0][name])


def test_a_master_follows_what_the_hook_has_scaled():
    model = Attention(torch.bfloat16)
    optimizer = ParallelMuon([{"params": list(model.named_parameters()), "rule": "muon"}], lr=0.0, weight_decay=0.0)
    optimizer.register_step_post_hook(QkClip([(model.q.weight, model.k.weight, model.largest)], 0.1))
    for _ in range(2):
        model(rows_of(0).bfloat16()).backward()
        optimizer.step()
        scaled = model.q.weight.detach().clone()
    model.largest.zero_()
    optimizer.step()
    assert torch.equal(model.q.weight, scaled), "the master does not bring back what was before"
    assert torch.equal(optimizer.state[model.q.weight]["master"].bfloat16(), scaled)


@pytest.mark.parametrize("heads, rows", [(5, 24), (4, 10), (2, 24)])
def test_heads_that_do_not_divide_rows_are_refused(heads, rows):
    with pytest.raises(OptimizerError, match="do not divide"):
        clip_heads(torch.ones(24, 3), torch.ones(rows - (heads == 2), 3), torch.ones(heads), 1.0)


def test_sharded_weights_are_refused():
    weight = nn.Parameter(torch.ones(2, 2))
    weight.placements = ()
    with pytest.raises(OptimizerError, match="sharded"):
        QkClip([(weight, weight, torch.zeros(1))])

"""Matrices to their owners and back: exact means, every matrix once, pieces at the right rows, on 1 to 4 ranks, whole and sharded; and a small optimizer equal to a plain loop."""
import pytest
import torch
from exchange_workers import PARAMS, Several, everything, matrices_in, trained_plainly
from torch import nn
from workers import spawn

from golfnb.muon.exchange import Group, ReplicatedBucket, ShardedBucket, gradient_of, make_buckets, matrices_of, nth_chunk
from golfnb.model.engine import Ranks
from golfnb.settings import GolfError

WORLDS = (1, 2, 3, 4)
COUNT = 1 + 1 + 1 + 5 + 3 + 6 + 1 + 1 + 2 + 6  # matrices of PARAMS


@pytest.fixture(scope="module")
def plain():
    return trained_plainly()


@pytest.fixture(scope="module", params=WORLDS, ids="{} ranks".format)
def found(request):
    "What every rank found; its own checks have passed there."
    world = request.param
    return spawn(world, "everything", module="exchange_workers") if world > 1 else [everything(Ranks())]


def test_every_matrix_has_one_owner_who_gets_its_gradient(found):
    for case in (0, 1):
        assert sum(rank["owned"][case] for rank in found) == COUNT
    if len(found) > 1:
        assert sum(rank["owned_sharded"] for rank in found) == COUNT and min(rank["owned_sharded"] for rank in found) > 0


def test_some_shards_were_empty(found):
    "Else the checks of the ranks would have missed them."
    if len(found) > 1:
        assert found[-1]["empty"] >= (1, 2, 3)[len(found) - 2]


def test_bf16_travels_as_two_bytes(found):
    if len(found) == 1:
        return
    elements = sum(torch.Size(shape).numel() for shape, _ in PARAMS.values())
    for rank in found:
        whole, sharded, _ = rank["travelled"]
        assert whole == {torch.float64, torch.bfloat16} and sharded == {torch.bfloat16}, "gradients of whole matrices keep their dtype"
    assert sum(rank["travelled"][2] for rank in found) == 2 * elements, "each element there and back, once, with no padding"


@pytest.mark.parametrize("how", ["replicated", "ddp", "sharded"])
def test_a_small_optimizer_equals_a_plain_loop(found, plain, how):
    if len(found) == 1 and how != "replicated":
        return
    for rank in found:
        apart = max((rank[how][name] - weight).abs().max().item() for name, weight in plain.items())
        assert rank[how].keys() == plain.keys() and apart < 1e-10


def test_meshes_and_placements_that_do_not_fit(found):
    words = ["2 dimensions must have all ranks", "'gloo'", "Shard(dim=1)", "Partial(sum)", "Partial(sum)", "sharded on the optimizer's ranks", "part of", "gradient of odd"]
    for rank in found if len(found) > 1 else ():
        for said, word in zip(rank["refused"], words, strict=True):
            assert word in said and not said.startswith("nothing")


@pytest.mark.parametrize("shape, group, word", [
    ((4,), {}, "(4,)"), ((2, 3, 4, 5), {}, "flatten=True"), ((), {}, "()"), ((4,), {"flatten": True}, "(4,)"),
    ((6, 4), {"split_sizes": (2, 3)}, "6 outputs"), ((6, 4), {"split_sizes": (3, 3), "transposed": True}, "4 outputs"),
    ((6, 4), {"split_sizes": (7, -1)}, "(7, -1)"), ((2, 6, 4), {"split_sizes": (6, 6)}, "6 outputs")])
def test_parameters_that_are_refused(shape, group, word):
    with pytest.raises(GolfError) as error:
        matrices_of("weight", torch.zeros(shape), group, 0)
    assert word in str(error.value) and "weight" in str(error.value) and isinstance(error.value, ValueError)


@pytest.mark.parametrize("p, group", [
    (torch.zeros(2, 4, 3).transpose(1, 2), {}), (torch.zeros(4, 2, 3, 3).to(memory_format=torch.channels_last), {"flatten": True})], ids=["stack", "filters"])
def test_a_parameter_whose_rows_would_be_copies_is_refused(p, group):
    with pytest.raises(ValueError, match="strides"):
        matrices_of("weight", p, group, 0)
    assert matrices_of("weight", p.contiguous(), group, 0) and matrices_of("weight", torch.zeros(3, 5).t(), {}, 0)


def test_matrices_cover_their_parameter_once():
    for p_name, (shape, group) in PARAMS.items():
        p = torch.zeros(shape)
        found = matrices_of(p_name, p, group, 0)
        seen = p.view(-1, found[0].width)
        for m in found:
            seen[m.first:m.first + m.rows, m.left:m.left + m.cols] += 1
        assert (p == 1).all(), p_name
    assert len(matrices_in(Several())) == COUNT
    assert matrices_of("none", torch.zeros(0, 4), {}, 0) == []


def test_the_shape_of_a_layer_counts_outputs_first():
    (turned,) = matrices_of("w", torch.zeros(6, 8), {"transposed": True}, 0)
    assert turned.layer_shape == (8, 6) and matrices_of("w", torch.zeros(6, 8), {}, 0)[0].layer_shape == (6, 8)


@pytest.mark.parametrize("slices", range(1, 12))
@pytest.mark.parametrize("world", range(1, 7))
def test_chunks_are_those_of_torch(slices, world):
    p = torch.arange(slices)
    chunks = [*p.chunk(world), *[p[:0]] * world][:world]
    for rank, chunk in enumerate(chunks):
        assert torch.equal(p[nth_chunk(slice(0, slices), world, rank)], chunk)


def test_buckets_are_of_one_dtype():
    params = [nn.Parameter(torch.zeros(4, 3, dtype=dtype)) for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float32)]
    group = {}
    buckets = make_buckets([m for i, p in enumerate(params) for m in matrices_of(f"{i}", p, group, i)], Group())
    assert sorted(sorted(m.number for m in b.everything) for b in buckets) == [[0, 3], [1], [2]]
    assert {b.dtype for b in buckets} == {torch.float32, torch.bfloat16, torch.float16}


def test_on_one_rank_a_bucket_is_one_run_that_needs_little_room(monkeypatch):
    monkeypatch.setattr("golfnb.muon.exchange.SCRATCH_BYTES", 300)
    params = [nn.Parameter(torch.zeros(shape)) for shape in ((4, 6), (6, 4), (4, 6), (4, 6), (4, 6), (4, 6), (20, 30))]
    groups = {}, {}
    buckets = make_buckets([m for i, p in enumerate(params) for m in matrices_of(f"{i}", p, groups[i == 2], i)], Group())
    found = sorted([m.number for m in b.everything] for b in buckets)
    assert found == [[0, 3], [1], [2], [4, 5], [6]] and all(len(b.runs) == 1 for b in buckets)
    assert all(len(b.everything) * 2 * 4 * (2 * 6 + 4) <= 300 for b in buckets if b.everything[0].rows < 20), "bytes of two stacks and one of squares, in bf16"


def test_a_gradient_may_lie_otherwise_than_its_weight():
    p = nn.Parameter(torch.zeros(4, 2, 3, 3))
    p.grad = torch.randn(4, 2, 3, 3).to(memory_format=torch.channels_last)
    (m,) = matrices_of("filters", p, {"flatten": True}, 0)
    assert torch.equal(gradient_of(m), p.grad.flatten(1))


@pytest.mark.parametrize("kind", [ReplicatedBucket, ShardedBucket])
def test_a_call_that_is_missing_is_said(kind):
    (m,) = matrices_of("w", torch.zeros(4, 3), {}, 0)
    bucket = kind([[m], []], Group(None, 0, 2))
    with pytest.raises(AssertionError, match="missing"):
        bucket.results()

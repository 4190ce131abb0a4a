"""Weights whose parts alternate, as q, k, v by head: each part is one matrix with all its heads, on any ranks, in any file."""
import pytest
import torch
from interleaved_workers import all_cases, plain
from test_optimizer import saved_bytes
from torch import nn
from workers import spawn

from golfnb.muon.errors import OptimizerError
from golfnb.muon.exchange import block_of, matrices_of
from golfnb.muon.grouping import group_table, param_groups
from golfnb.muon.optimizer import ParallelMuon
from golfnb.muon.sharded import chunks_of
from golfnb.model.engine import Ranks

HOWS = {1: ("plain",), 2: ("plain", "sharded"), 3: ("plain", "sharded"), 4: ("plain", "copies")}
SHAPES = [((24, 5), {"split_sizes": (2, 3, 1), "repeats": 4}), ((5, 24), {"split_sizes": (2, 3, 1), "repeats": 4, "transposed": True}), ((3, 24, 5), {"split_sizes": (4, 2), "repeats": 4}),
          ((24, 5, 2), {"split_sizes": (2, 4), "repeats": 4, "flatten": True}), ((2, 5, 24), {"split_sizes": (1, 1), "repeats": 12, "transposed": True})]


def run(world: int, cases: list) -> list[list]:
    return spawn(world, "all_cases", cases, module="interleaved_workers") if world > 1 else [all_cases(Ranks(), cases)]


def apart(found: dict, wanted: dict) -> float:
    assert found.keys() == wanted.keys()
    return max(float((found[n].double() - wanted[n].double()).abs().max()) for n in wanted)


@pytest.fixture(scope="module")
def ranked(tmp_path_factory):
    "What each number of ranks found: trained by Muon, by NorMuon with bf16, saved in parts by two."
    folder, found = str(tmp_path_factory.mktemp("parts")), {}
    for world in (2, 1, 3, 4):
        cases = [("trained", how) for how in HOWS[world]] + [("narrow",)]
        if world == 2:
            cases += [("parts", "plain", f"{folder}/plain", True), ("parts", "sharded", f"{folder}/sharded", True)]
        else:
            cases += [("parts", "plain", f"{folder}/plain", False)]
        if world > 2:
            cases += [("parts", HOWS[world][1], f"{folder}/sharded", False)]
        cases += [("cut_inside",)] * (world == 3)
        found[world] = [dict(zip(map(str, cases), out, strict=True)) for out in run(world, cases)]
    return found, folder


@pytest.mark.parametrize("world, how", [(world, how) for world, hows in HOWS.items() for how in hows])
def test_equal_to_matrices_unfused_by_hand(ranked, world, how):
    "Five steps, the last two of an optimizer that has loaded the others' state; whole weights, shards, shards with copies."
    wanted = plain(world, 5)
    for out in ranked[0][world]:
        assert apart(out[str(("trained", how))], wanted) < 1e-10


@pytest.mark.parametrize("world, how, saved", [(1, "plain", "plain"), (3, "plain", "plain"), (4, "plain", "plain"), (3, "sharded", "sharded"), (4, "copies", "sharded")])
def test_a_checkpoint_in_parts_goes_on_on_other_ranks(ranked, world, how, saved):
    found, folder = ranked
    wanted = found[2][0][str(("parts", saved, f"{folder}/{saved}", True))]
    for out in found[world]:
        assert apart(out[str(("parts", how, f"{folder}/{saved}", False))], wanted) < 1e-10


@pytest.mark.parametrize("world", (2, 3, 4))
def test_narrow_weights_have_masters_at_their_owners(ranked, world):
    alone = ranked[0][1][0][str(("narrow",))]
    for out in ranked[0][world]:
        assert apart(out[str(("narrow",))], alone) < 0.01


def test_a_cut_inside_a_part_is_refused_by_name(ranked):
    for out in ranked[0][3]:
        said = out[str(("cut_inside",))]
        assert said.startswith("0.weight has parts of 3 outputs, one in every 4, and is cut inside of one, at 6")


@pytest.mark.parametrize("shape, how", SHAPES, ids=str)
def test_matrices_cover_their_parameter_once_and_write_through(shape, how):
    p = nn.Parameter(torch.zeros(shape))
    for m in matrices_of("p", p, how, 0):
        block_of(m, p.detach()).add_(1)
        for at, box in chunks_of(m, block_of(m, p.detach())).items():
            p.detach()[tuple(slice(a, a + n) for a, n in zip(at, box.shape, strict=True))] += 1
            assert (box == 2).all()
    assert (p == 2).all()


@pytest.mark.parametrize("rule", ("muon", "normuon", "muoneq_r"))
@pytest.mark.parametrize("shape, how", SHAPES, ids=str)
def test_each_part_moves_as_a_matrix_of_its_own(shape, how, rule):
    "Whatever the rule; a copy of the optimizer goes on alike."
    torch.manual_seed(0)
    p = nn.Parameter(torch.randn(shape).double())
    whole = ParallelMuon([{"params": [("p", p)], "rule": rule, **how}])
    places = matrices_of("p", p, how, 0)
    own = [nn.Parameter(block_of(m, p.detach()).reshape(m.rows, m.cols).clone()) for m in places]
    turned = {"transposed": True} if how.get("transposed") else {}
    single = ParallelMuon([{"params": own, "rule": rule, **turned}])
    for step in range(4):
        p.grad = torch.randn(shape).double()
        for m, w in zip(places, own, strict=True):
            w.grad = block_of(m, p.grad).reshape(m.rows, m.cols).clone()
        whole.step(), single.step()
        if step == 1:
            p, whole = torch.load(saved_bytes((p, whole)), weights_only=False)
            places = matrices_of("p", p, how, 0)
    for m, w in zip(places, own, strict=True):
        assert (block_of(m, p.detach()).reshape(m.rows, m.cols) - w).abs().max() < 1e-12


@pytest.mark.parametrize("how", [{"split_sizes": (2, 2), "repeats": 4}, {"split_sizes": (2, 2, 2), "repeats": 0}, {"split_sizes": (6, 6), "repeats": 2.0}, {"repeats": 2}])
def test_parts_that_do_not_add_up(how):
    with pytest.raises(OptimizerError, match="24 outputs of p.*repeats="):
        ParallelMuon([{"params": [("p", nn.Parameter(torch.zeros(24, 5)))], **how}])


def test_a_filter_says_it_and_the_table_shows_it():
    model = nn.ModuleList(nn.ModuleDict({"query_key_value": nn.Linear(8, 24, bias=False), "dense": nn.Linear(8, 8)}) for _ in range(2))
    (said,) = param_groups(model).notes
    assert "0-1.query_key_value.weight (2 x [24, 8], for n heads of size s split_sizes=(s, s, s), repeats=n?)" in said
    groups = param_groups(model, filter=lambda name, p: {"rule": "muon", "split_sizes": [2, 2, 2], "repeats": 4} if "query" in name else None)
    assert groups.notes == () and groups[1]["name"] == "muon split interleaved" and groups[1]["split_sizes"] == (2, 2, 2)
    assert "muon, split 2+2+2, interleaved 4 times" in group_table(groups)
    with pytest.raises(OptimizerError, match="24 outputs"):
        param_groups(model, filter=lambda name, p: {"rule": "muon", "split_sizes": [2, 2], "repeats": 4} if "query" in name else None)


def test_such_a_step_is_not_recorded():
    "Kernels work on matrices in rows; plain operations would read gradients where they lay once."
    opt = ParallelMuon([{"params": [nn.Parameter(torch.zeros(24, 5))], "split_sizes": (2, 1), "repeats": 8}])
    assert "repeats" in opt.cannot_record()

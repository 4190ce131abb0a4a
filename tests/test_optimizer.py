"""ParallelMuon on models of others: the float64 answer of plain loops on 1 to 4 ranks, whole, under DDP and sharded; torch's contract; its state; what it refuses."""
import copy
import io
import logging
import pickle

import pytest
import torch
from optimizer_workers import SETTINGS, NanoGPT, all_jobs, backward, build, loss_of, plain, rows_of, weights_of
from torch import nn
from workers import spawn

from golfnb.grouping import param_groups
from golfnb.optimizer import ParallelMuon
from golfnb.parallel_muon import Ranks
from golfnb.settings import GolfError

WORLDS = (1, 2, 3, 4)
ANY = [("nano", dict(accum=2)), ("gpt2", {}), ("encoder", dict(max_norm=0.05)), ("experts", {}), ("vision", dict(max_norm=0.3)), ("nano", dict(poison=(3, -1)))]
SEVERAL = [("vision", dict(how="ddp")), ("encoder", dict(how="ddp", accum=2)), ("encoder", dict(how="sharded", max_norm=0.05)), ("vision", dict(how="sharded", accum=2)), ("experts", dict(how="sharded"))]


def distance(a: dict, b: dict) -> float:
    assert a.keys() == b.keys()
    return max(float((a[k].double() - b[k].double()).abs().max()) if a[k].numel() else 0.0 for k in a)


def run_ranks(world: int, jobs: list) -> list:
    return spawn(world, "all_jobs", jobs, module="optimizer_workers") if world > 1 else [all_jobs(Ranks(), jobs)]


@pytest.fixture(scope="module", params=WORLDS, ids="{} ranks".format)
def ranked(request):
    world = request.param
    cases = ANY if world == 1 else ANY + SEVERAL
    cases = [(kind, {**more, **(dict(poison=(3, world - 1)) if "poison" in more else {})}) for kind, more in cases]
    return world, cases, run_ranks(world, [("ours", (kind,), more) for kind, more in cases])


def test_equal_to_plain_loops(ranked):
    "Tied, unused, sometimes used, used on one rank only; accumulation; a scheduler; clipping; NaN on one rank; fused and turned matrices, experts."
    world, cases, outs = ranked
    for i, (kind, more) in enumerate(cases):
        want = plain(kind, world, accum=more.get("accum", 1), skip=3 if "poison" in more else -1, max_norm=more.get("max_norm", 0.0))
        for rank, out in enumerate(outs):
            got, skipped, _ = out[i]
            assert distance(got, want) < 1e-10, f"{kind} {more} at {world} ranks, rank {rank}"
            assert skipped == ("poison" in more)

"""Sliding window and both forms of test-time training on several ranks: the score of one rank. One set of processes a world size serves all."""
from functools import cache

import numpy as np
import pytest
import torch
from score_workers import adapted, documents, plain_and_sliding, spawn_scores

from golfnb.model.engine import Ranks

ALONE = Ranks()


@cache
def adapted_alone(name: str) -> tuple:
    return adapted(ALONE, name)


@cache
def sliding_alone(n: int) -> tuple:
    return plain_and_sliding(ALONE, n)


@cache
def documents_alone(dtype: torch.dtype) -> tuple:
    return documents(ALONE, dtype)


@pytest.fixture(scope="module", params=[2, 3, 4, 8])
def ranked(request):
    return request.param, spawn_scores(request.param)


def test_ranks_share_the_sliding_window(ranked):
    "The same score on every rank as on one; 17 targets make 2 windows, so of 3 ranks one has nothing to do."
    for name, n in (("sliding", 700), ("short", 17)):
        for out in ranked[1]:
            for ours, theirs in zip(sliding_alone(n), out[name]):
                assert ours == pytest.approx(theirs, abs=1e-11)


def test_ranks_give_one_score(ranked):
    "A chunk that is one step: 8 rows over 2 to 8 ranks, 5 rows over as many (some have none), frozen blocks. Score and weights equal one rank's."
    world, outs = ranked
    for name, tolerance in (("one step", 1e-10), ("fp32", 2e-5), ("frozen", 1e-10), ("uneven", 1e-10)):
        if world > 3 and name in ("fp32", "frozen"):
            continue
        loss, bpb, named = adapted_alone(name)
        for out in outs:
            assert out[name][:2] == pytest.approx((loss, bpb), abs=tolerance)
            assert max(np.abs(out[name][2][k] - named[k]).max() for k in named) < 10 * tolerance, name


def test_ranks_give_one_score_to_documents(ranked):
    world, outs = ranked
    for name, dtype, tolerance in (("documents", torch.float64, 1e-12), ("documents fp32", torch.float32, 2e-6))[:2 if world < 4 else 1]:
        assert all(out[name] == pytest.approx(documents_alone(dtype), abs=tolerance) for out in outs)


def test_ranks_that_run_out_of_rows_still_join(ranked):
    "5 rows over 2 to 8 ranks, one row a step: some ranks have none in the last step. As one rank that takes the same rows together."
    world, outs = ranked
    assert all(out["many steps"][:2] == outs[0]["many steps"][:2] for out in outs)
    assert all(np.array_equal(out["many steps"][2][k], outs[0]["many steps"][2][k]) for out in outs for k in out["many steps"][2])

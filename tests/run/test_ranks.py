"""Many ranks, one answer: every world size gives the single process's weights; clocks, accidents and the fence."""
import numpy as np
import pytest
import torch

import workers
from golfnb.model.engine import Ranks, clip_each, clip_mean
from workers import settings, spawn

WORLDS = (2, 3, 4, 8)
EVEN, ODD, SHARED = settings(4), settings(3), settings(3, PLAN="shared_mlp")
CAPPED = settings(3, MAX_WALLCLOCK_SECONDS="0.03", ITERATIONS="1000", WARMDOWN_ITERS="20")
CASES = [("five_steps", (EVEN,)), ("five_steps", (ODD,)), ("five_steps", (SHARED,)), ("five_steps", (ODD, torch.float64, True)),
         ("five_steps", (ODD, torch.bfloat16)), ("skewed_clocks", (CAPPED,)), ("bad_gradient", (settings(3), 1))]

# every plan of the engine, in the same processes
PLANS = {"pr399": "pr399", "shared": "shared_mlp", "125": "pr125", "132": "pr132", "searched": "mlp4,qo6,kv6,mlp2/3.1.0.2/1.0.3.2"}
LOCAL = {"pr399 local": "pr399", "125 local": "pr125", "132 local": "pr132"}
PLAN_CASES = [("plan_steps", (settings(3), p)) for p in PLANS.values()]
PLAN_CASES += [("plan_steps", (settings(3, CLIP="local", GRAD_CLIP_NORM="0.05"), p)) for p in LOCAL.values()]
PLAN_CASES += [("projected", (settings(3, PLAN=p, SMALL_TENSOR="64"),)) for p in ("pr399", "shared_mlp")] + [("clip_steps", ()), ("wrong_world", (settings(3),))]
AT, CASES = len(CASES), CASES + PLAN_CASES


@pytest.fixture(scope="module")
def alone():
    return workers.all_checks(Ranks(), CASES[:5]) + [None] * (AT - 5) + workers.all_checks(Ranks(), PLAN_CASES)


@pytest.fixture(scope="module", params=WORLDS)
def ranked(request):
    return request.param, spawn(request.param, "all_checks", CASES + [("ways", (settings(3),))] * (request.param == 2))


def distance(a: dict, b: dict) -> float:
    assert a.keys() == b.keys()
    return max(float(np.abs(a[k] - b[k]).max()) for k in a)


def test_weights_equal_the_single_process(ranked, alone):
    world, outs = ranked
    for case in range(3):
        for rank in range(world):
            named, replica, losses = outs[rank][case]
            assert distance(named, alone[case][0]) < 1e-9, f"case {case} at {world} ranks, rank {rank}"
            assert distance(replica, alone[case][1]) < 1e-9
            assert np.allclose(losses, alone[case][2], atol=1e-9)


def test_the_weights_did_move(alone):
    named, _, losses = alone[0]
    assert losses[-1] != losses[0] and all(np.abs(v).max() > 0 for v in named.values())


def test_fence(ranked):
    "A replica that is NaN between backward and publish changes nothing."
    _, outs = ranked
    for out in outs:
        assert distance(out[3][0], out[1][0]) == 0


def test_bf16_loss_within_bound(ranked, alone):
    "In bf16 only the loss is comparable: Newton-Schulz in bf16 turns rounding into per cents of the update. Bound: 0.02 nats of about 3.5."
    _, outs = ranked
    for out in outs:
        assert np.abs(np.array(out[4][2]) - np.array(alone[4][2])).max() < 0.02


def test_replicated_bit_equal_under_skewed_clocks(ranked):
    "One clock for all: ranks whose own clocks run 8 times faster still stop together, with the same bits."
    world, outs = ranked
    steps = {out[5][0] for out in outs}
    assert len(steps) == 1 and 20 < steps.pop() < 1000
    assert len({out[5][1] for out in outs}) == 1 and len({out[5][2] for out in outs}) == 1


def test_bad_gradient_on_one_rank_is_skipped_by_all(ranked):
    _, outs = ranked
    assert all(out[6][0] == 1 and out[6][1] for out in outs)
    assert len({out[6][2] for out in outs}) == 1


@pytest.mark.parametrize("accum", [2, 4])
def test_accumulation_is_the_mean(alone, accum):
    named, _, losses = workers.five_steps(Ranks(), EVEN, accum=accum)
    assert distance(named, alone[0][0]) < 1e-9 and np.allclose(losses, alone[0][2], atol=1e-9)


def test_all_plans_are_one_optimizer(alone):
    "One rank: the plan changes where a matrix lies and nothing else."
    for out in alone[AT + 1:AT + len(PLANS)]:
        assert distance(out, alone[AT]) < 1e-9
    for out in alone[AT + len(PLANS) + 1:AT + len(PLANS) + len(LOCAL)]:
        assert distance(out, alone[AT + len(PLANS)]) < 1e-9
    assert distance(alone[AT + len(PLANS)], alone[AT]) > 1e-6, "the local clip did act"


def test_every_world_size_gives_the_single_process(ranked, alone):
    world, outs = ranked
    for rank, out in enumerate(outs):
        for i, plan in enumerate(PLANS):
            assert distance(out[AT + i], alone[AT]) < 1e-9, f"plan {plan} at {world} ranks, rank {rank}"


def test_local_clipping_is_the_same_in_every_plan(ranked):
    world, outs = ranked
    first = AT + len(PLANS)
    for out in outs:
        assert max(distance(out[first], out[first + i]) for i in range(1, len(LOCAL))) < 1e-9


def test_a_clip_does_what_its_plain_form_says(ranked, alone):
    "Also one of a user's own, by what the engine asks of it."
    world, outs = ranked
    for moved, n in [(alone[len(CASES) - 2], 1), *((out[len(CASES) - 2], world) for out in outs)]:
        gradients = [workers.clip_gradient(rank) for rank in range(n)]
        limit = workers.CLIPPED_AT
        assert distance_of(moved["each"], clip_each(gradients, limit)) < 1e-12
        assert distance_of(moved["mean"], clip_mean(gradients, limit)) < 1e-12
        assert distance_of(moved["none"], clip_mean(gradients, 0)) < 1e-12
        assert distance_of(moved["value"], torch.stack(gradients).clamp(-limit, limit).mean(0)) < 1e-12


def distance_of(a: torch.Tensor, b: torch.Tensor) -> float:
    return (a - b).abs().max().item()


def test_rounding_knows_the_matrices_of_a_shared_bank(ranked, alone):
    world, outs = ranked
    at = AT + len(PLANS) + len(LOCAL)
    assert distance(alone[at], alone[at + 1]) < 1e-5
    for out in outs:
        assert max(distance(out[at + i], alone[at]) for i in (0, 1)) < 2e-2
        for name in ("attn.c_k", "mlp.fc", "mlp.proj"):  # the last one lies transposed
            levels = [31 * row / np.abs(row).max() for row in out[at + 1][f"blocks.0.{name}.weight"] if row.any()]
            assert max(np.abs(x - x.round()).max() for x in levels) < 1e-2, f"{name}: whole numbers of a row's step"


def test_the_usual_ways_are_the_same_optimizer(ranked):
    "DDP with the batched rule, on separate weights and on banks: what is timed beside the engine computes the same."
    world, outs = ranked
    assert world != 2 or all(out[len(CASES)] < 1e-7 for out in outs)


def test_a_plan_for_another_world_is_refused(ranked):
    world, outs = ranked
    assert all(f"made for {world + 1} ranks, but {world}" in out[len(CASES) - 1] for out in outs)

"""Plans: the published orders, and a predicted timeline that no real machine could beat."""
import random

import pytest

from golfnb.studies.baselines import candidate_buckets, search_buckets
from golfnb.settings import GolfError
from golfnb.model.layout import LayoutSettings, Matrix, bank_named, bank_per_shape, group_matrices, mlp_in_one_bank, numel
from golfnb.studies.buckets import read_plan
from golfnb.model.plan import MachineModel, CommSchedule, check_comm_schedule, finish_us, comm_schedule, predict, transfer_us, update_time_us


def random_layout(seed: int, banks: int | None = None):
    r = random.Random(seed)
    names = [f"bank{i}" for i in range(banks or r.randint(1, 5))]
    return group_matrices([Matrix(f"{b}.{i}", rows, cols, b) for b in names for rows, cols in [(r.choice((64, 256)), r.choice((64, 512)))]
                           for i in range(r.randint(1, 9))], world=r.choice((1, 2, 3, 8)))


def random_links(seed: int) -> MachineModel:
    r = random.Random(seed)
    return MachineModel(r.uniform(1, 50), r.uniform(10, 500), r.uniform(10, 500), r.uniform(0.1, 8))


def test_published_order():
    layout = bank_per_shape(LayoutSettings(), 8)
    assert comm_schedule(layout) == CommSchedule(*[("mlp_up_bank", "mlp_down_bank", "qo_bank", "kv_bank")] * 2)


def test_size_ignores_padding():
    "Nine matrices on eight ranks pad to sixteen slots, but twelve matrices of the same shape are still more work."
    layout = group_matrices([Matrix(f"a{i}", 8, 8, "a") for i in range(9)] + [Matrix(f"b{i}", 8, 8, "b") for i in range(12)], 8)
    assert numel(bank_named(layout, "a")) == numel(bank_named(layout, "b")) and comm_schedule(layout).work == ("b", "a")


@pytest.mark.parametrize("seed", range(20))
def test_timeline_is_possible(seed):
    layout, links = random_layout(seed), random_links(seed)
    names, r = [b.name for b in layout.banks], random.Random(seed)
    for plan in [comm_schedule(layout)] + [CommSchedule(*(tuple(r.sample(names, len(names))) for _ in range(2))) for _ in range(5)]:
        for clip in ("local", "global"):
            events = predict(plan, layout, links, small_bytes=10_000, clip=clip)
            at = {e.name: e for e in events}
            assert len(at) == len(events) == 3 * len(layout.banks) + 1 + (clip == "global")
            for stream in ("net", "gpu"):
                row = [e for e in events if e.stream == stream]
                assert all(a.end_us <= b.start_us for a, b in zip(row, row[1:]))
            for b in layout.banks:
                assert at[f"scatter {b.name}"].end_us <= at[f"work {b.name}"].start_us
                assert at[f"work {b.name}"].end_us <= at[f"gather {b.name}"].start_us
                if clip == "global":
                    assert all(e.end_us <= at[f"work {b.name}"].start_us for e in events if e.name.startswith("scatter"))
            floor = max(sum(2 * transfer_us(2 * numel(b), layout.world, links) for b in layout.banks), sum(update_time_us(b, links) for b in layout.banks))
            assert finish_us(events) >= floor * (1 - 1e-12)


def test_between_hosts_only_bytes_count():
    "On a slow link a step takes what its ring sends through it: flat 2 (W-1)/W of all banks, two-level 2 (H-1)/H; on one node both are what they were."
    slow = MachineModel(0, 1e9, 1e9, 0, between=(0, 1.0))
    flat, inside = (group_matrices([Matrix(f"m{i}", 64, 64, "b") for i in range(8)], world) for world in (8, 4))
    us = lambda layout, **how: finish_us(predict(comm_schedule(layout), layout, slow, **how))
    assert us(flat, nodes=2) == pytest.approx(2 * 7 / 8 * 8 * 8192 / 1e3, rel=1e-4) and us(inside, nodes=2, two_level=True) == pytest.approx(8 * 8192 / 1e3, rel=1e-4)
    assert us(flat, nodes=1) == us(flat, nodes=1, two_level=True) < 1
    with pytest.raises(GolfError, match="between="):
        predict(comm_schedule(flat), flat, random_links(0), nodes=2)


@pytest.mark.parametrize("world", [2, 8])
def test_search_is_never_worse_than_published(world):
    links = random_links(world)
    rows = search_buckets(LayoutSettings(), world, links)
    assert [us for us, _ in rows] == sorted(us for us, _ in rows) and len(rows) == len(candidate_buckets(LayoutSettings(), world))
    for us, text in rows:
        layout, plan = read_plan(LayoutSettings(), text, world)
        assert us == finish_us(predict(plan, layout, links))
    for banks in (bank_per_shape, mlp_in_one_bank):
        layout = banks(LayoutSettings(), world)
        assert rows[0][0] <= min(finish_us(predict(comm_schedule(layout, o), layout, links)) for o in ("big_first", "small_first"))


@pytest.mark.parametrize("scatter, work", [(("a",), ("a", "b")), (("a", "b"), ("a", "a")), (("a", "b"), ("a", "c")), ((), ())])
def test_bad_plans_are_refused(scatter, work):
    layout = group_matrices([Matrix("x", 8, 8, "a"), Matrix("y", 8, 16, "b")], 2)
    with pytest.raises(GolfError, match="a, b.*once"):
        check_comm_schedule(CommSchedule(scatter, work), layout)
    with pytest.raises(GolfError, match="a, b.*once"):
        predict(CommSchedule(scatter, work), layout, random_links(0))

"""Plans: the published orders, and a predicted timeline that no real machine could beat."""
import random

import pytest

from golfnb.config import Config
from golfnb.settings import GolfError
from golfnb.layout import Matrix, group_matrices, model_layout
from golfnb.plan import Links, Plan, candidate_plans, check_plan, finish_us, make_plan, predict, search_plans, transfer_us, work_us


def random_layout(seed: int, banks: int | None = None):
    r = random.Random(seed)
    names = [f"bank{i}" for i in range(banks or r.randint(1, 5))]
    return group_matrices([Matrix(f"{b}.{i}", rows, cols, b) for b in names for rows, cols in [(r.choice((64, 256)), r.choice((64, 512)))]
                           for i in range(r.randint(1, 9))], world=r.choice((1, 2, 3, 8)))


def random_links(seed: int) -> Links:
    r = random.Random(seed)
    return Links(r.uniform(1, 50), r.uniform(10, 500), r.uniform(10, 500), r.uniform(0.1, 8))


def test_published_order():
    layout = model_layout(Config(), 8)
    assert make_plan(layout) == Plan(*[("mlp_up_bank", "mlp_down_bank", "qo_bank", "kv_bank")] * 2)


def test_size_ignores_padding():
    "Nine matrices on eight ranks pad to sixteen slots, but twelve matrices of the same shape are still more work."
    layout = group_matrices([Matrix(f"a{i}", 8, 8, "a") for i in range(9)] + [Matrix(f"b{i}", 8, 8, "b") for i in range(12)], 8)
    assert layout.bank("a").numel == layout.bank("b").numel and make_plan(layout).work == ("b", "a")


@pytest.mark.parametrize("seed", range(20))
def test_timeline_is_possible(seed):
    layout, links = random_layout(seed), random_links(seed)
    for plan in random.Random(seed).sample(candidate_plans(layout), min(6, len(candidate_plans(layout)))):
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
            floor = max(sum(2 * transfer_us(2 * b.numel, layout.world, links) for b in layout.banks), sum(work_us(b, links) for b in layout.banks))
            assert finish_us(events) >= floor * (1 - 1e-12)


def test_search_is_never_worse_than_published():
    layouts = {p: model_layout(Config(plan=p), 8) for p in ("pr399", "shared_mlp")}
    for seed in range(5):
        links = random_links(seed)
        rows = search_plans(layouts, links, clip="local")
        assert [us for us, _, _ in rows] == sorted(us for us, _, _ in rows) and {n for _, n, _ in rows} == set(layouts)
        for us, name, plan in rows:
            check_plan(plan, layouts[name])
            assert us <= min(finish_us(predict(make_plan(layouts[name], o), layouts[name], links)) for o in ("big_first", "small_first"))


def test_many_banks_do_not_explode():
    assert len(candidate_plans(random_layout(0, banks=6))) == 2 + 720
    assert len(candidate_plans(random_layout(0, banks=12))) == 2


@pytest.mark.parametrize("scatter, work", [(("a",), ("a", "b")), (("a", "b"), ("a", "a")), (("a", "b"), ("a", "c")), ((), ())])
def test_bad_plans_are_refused(scatter, work):
    layout = group_matrices([Matrix("x", 8, 8, "a"), Matrix("y", 8, 16, "b")], 2)
    with pytest.raises(GolfError, match="exactly once"):
        check_plan(Plan(scatter, work), layout)
    with pytest.raises(GolfError, match="exactly once"):
        predict(Plan(scatter, work), layout, random_links(0))

"""Layouts as data, banks as storage."""
import random

import pytest
import torch
import torch.nn.functional as F

from golfnb.model.banks import make_banks, unbank
from golfnb.studies.baselines import separate
from golfnb.settings import GolfError
from golfnb.studies.buckets import BucketGolf, bucket_layout, mixed_buckets, mixed_text, read_plan, shard_cuts, slot_kinds
from golfnb.studies.variants import read_variant
from golfnb.model.layout import SMALL_MATRIX, LayoutSettings, Matrix, bank_named, bank_per_shape, group_matrices, matrix_names, packed_as, padding_waste, slots_of
from golfnb.model.golf import Golf, init_model, named_state
from workers import settings, speedrun_kinds, variant_of


def put(layout, named, banks):
    for name, view in unbank(layout, {k: b.detach() for k, b in banks.items()}).items():
        view.copy_(named[name].detach())


def layout_of(plan, world, layers=11):
    return read_plan(LayoutSettings(num_layers=layers), plan, world)[0]


@pytest.mark.parametrize("plan", ["pr399", "shared_mlp", "pr132"])
@pytest.mark.parametrize("layers", [1, 4, 11])
@pytest.mark.parametrize("world", [1, 2, 3, 5, 8, 16])
def test_every_matrix_has_one_slot_and_every_slot_one_owner(plan, layers, world):
    layout = layout_of(plan, world, layers)
    assert len(matrix_names(layout)) == len(set(matrix_names(layout))) == 6 * layers
    for b in layout.banks:
        assert b.shape[0] % world == 0 and b.shape[0] == b.real + b.padding and 0 <= b.padding < world
        assert sorted(i for r in range(world) for i in b.shard(r)) == list(range(b.shape[0]))
        slots = [m if isinstance(m, tuple) else (m,) for r in range(world) for m in slots_of(b, r)]
        assert [m for slot in slots[:b.real] for m in slot] == list(b.matrices) and slots[b.real:] == [(None,)] * b.padding
        assert len(b.row_scales()) == b.shape[0] and all(len(s) in (1, b.shape[1]) for s in b.row_scales())
        assert [v.shape for v in b.views(torch.empty(b.shape, device="meta"))] == [m.stored for m in b.matrices]
    assert all(bank_named(layout, b.name) is b for b, _, _ in layout)


def test_published_banks_and_waste():
    layout, shared = layout_of("pr399", 8), layout_of("shared_mlp", 8)
    assert {b.name: (b.real, *b.shape[1:]) for b in layout.banks} == {
        "qo_bank": (22, 512, 512), "kv_bank": (22, 256, 512), "mlp_up_bank": (11, 1536, 512), "mlp_down_bank": (11, 512, 1536)}
    assert round(padding_waste(layout), 2) == 0.33 and round(padding_waste(shared), 2) == 0.09
    places = {m.name: (b.name, i) for b, i, m in layout}
    assert [places[f"blocks.3.attn.{n}.weight"] for n in ("c_q", "proj", "c_k", "c_v")] == [("qo_bank", 3), ("qo_bank", 14), ("kv_bank", 3), ("kv_bank", 14)]
    scales = {m.name: m.shape_lr_scale for _, _, m in shared}
    assert scales == {m.name: m.shape_lr_scale for _, _, m in layout}, "storing transposed must not change how fast a matrix learns"


@pytest.mark.parametrize("world", [1, 2, 3, 4, 5, 6, 7, 8, 16])
@pytest.mark.parametrize("attn", [1, 2, 7, 10, 11])
@pytest.mark.parametrize("mlp", [0, 5, 22])
def test_mixed_buckets(attn, mlp, world):
    "Everything is placed, no rank owns both kinds of one bucket, and never more slots than two buckets of one kind each would take."
    buckets = mixed_buckets(attn, mlp, world)
    assert [sum(x) for x in zip(*buckets)] == [attn, mlp]
    for a, m in buckets:
        per_rank = -(-(a + m) // world)
        owners = [{"a" if i < a else "m" for i in range(r * per_rank, (r + 1) * per_rank) if i < a + m} for r in range(world)]
        assert all(len(o) <= 1 for o in owners), buckets

    def slots(some):
        return sum(-(-n // world) * world for n in some)
    assert slots(a + m for a, m in buckets) <= slots((attn, mlp))


def test_the_published_mixed_buckets():
    layout = bucket_layout(speedrun_kinds(), f"smear_gate1,attn_gate10,{mixed_text(10, 22, 8)}", 8)
    assert [b.real for b in layout.banks] == [1, 10, 16, 16] and [b.padding for b in layout.banks] == [7, 6, 0, 0]
    mixed = layout.banks[2]
    assert [len(shard_cuts(mixed, r)) for r in range(8)] == [1] * 8 and [shard_cuts(mixed, r)[0].stored for r in range(8)] == [(768, 768)] * 5 + [(3072, 768)] * 3
    assert not shard_cuts(layout.banks[0], 5)


def test_a_shared_slot_is_cut_by_kind():
    "With grouped-query attention a rank's attention slots are two batches."
    layout = layout_of("pr132", 8)
    cuts = shard_cuts(layout.banks[0], 0)
    assert [c.stored for c in cuts] == [(512, 512), (256, 512)] and cuts[-1].stop == 1536 * 512
    kinds = slot_kinds(LayoutSettings())
    assert {m.name for kind in ("attn", "mlp") for slot in kinds[kind] for m in slot} == set(matrix_names(layout))


def test_small_matrices_are_not_for_the_grid():
    assert packed_as(Matrix("a", 256, SMALL_MATRIX // 256, "g")) == "fp16"
    assert packed_as(Matrix("a", 257, SMALL_MATRIX // 256, "g")) == "int6"


def test_bad_layouts():
    one = Matrix("a", 2, 3, "g")
    for bad in (lambda: group_matrices([one, Matrix("b", 3, 2, "g")], 1), lambda: group_matrices([one, one], 1), lambda: group_matrices([], 1),
                lambda: group_matrices([one], 0), lambda: bank_named(group_matrices([one], 1), "x"),
                lambda: layout_of("x", 8), lambda: layout_of("pr125", 8), lambda: layout_of("qo22,kv22", 8), lambda: layout_of("qo22,kv22,mlp21", 8), lambda: layout_of("qo22,kv22,mlp23", 8),
                lambda: layout_of("qo22,kv22,mlp22,up1", 8), lambda: layout_of("qo22+kv22,mlp22", 8), lambda: layout_of("attn11,mlp22,qo1", 8),
                lambda: layout_of("qo22,kv22,mlp22/0.9/0.1", 8), lambda: layout_of("pr399/random", 8)):
        with pytest.raises(GolfError):
            bad()


@pytest.mark.parametrize("seed", range(5))
def test_unbank_gives_what_was_put_in(seed):
    rng, gen = random.Random(seed), torch.Generator().manual_seed(seed)
    ms = []
    for g in range(rng.randint(1, 3)):
        r, c = rng.randint(1, 5), rng.randint(6, 9)
        ms += [Matrix(f"{g}.{i}", *((c, r) if t else (r, c)), f"bank{g}", transposed=bool(t)) for i, t in enumerate(rng.choices((0, 1), k=rng.randint(1, 6)))]
    rng.shuffle(ms)
    layout = group_matrices(ms, rng.randint(1, 5))
    banks = make_banks(layout, torch.float64)
    named = {m.name: torch.randn(m.rows, m.cols, generator=gen, dtype=torch.float64) for m in ms}
    put(layout, named, banks)
    out = unbank(layout, banks)
    assert list(out) == matrix_names(layout) and all(torch.equal(out[k], named[k]) for k in named)
    assert all(not banks[b.name][b.real:].any() for b in layout.banks)
    cut = {b.name: banks[b.name].detach()[:b.real] for b in layout.banks}
    assert all(torch.equal(v, named[k]) for k, v in unbank(layout, cut).items()), "unpadded banks unbank too"


@pytest.mark.parametrize("world", [1, 3, 8])
def test_forward_and_gradient_equal_separate_linears(world):
    torch.manual_seed(world)
    layout = group_matrices([Matrix(f"up{i}", 12, 4, "mlp") for i in range(3)] + [Matrix(f"down{i}", 4, 12, "mlp", transposed=True) for i in range(3)], world)
    banks = make_banks(layout, torch.float64)
    named = {m.name: torch.randn(m.rows, m.cols, dtype=torch.float64, requires_grad=True) for _, _, m in layout}
    put(layout, named, banks)
    x = torch.randn(5, 4, dtype=torch.float64)

    def run(w):
        h = x
        for i in range(3):
            h = h + F.linear(F.linear(h, w[f"up{i}"]).relu(), w[f"down{i}"])
        return h.square().sum()
    a, b = run(named), run(unbank(layout, banks))
    (ga,) = torch.autograd.grad(b, [banks["mlp"]])
    a.backward()
    torch.testing.assert_close(a, b, rtol=1e-14, atol=0)
    for name, g in unbank(layout, {"mlp": ga}).items():
        torch.testing.assert_close(g, named[name].grad, rtol=1e-12, atol=1e-12)
    assert ga.shape == banks["mlp"].shape and ga.is_contiguous() and not ga[6:].any()


def test_separate_parameters_are_parameters():
    s = variant_of(settings(3)).settings
    model, twin = BucketGolf(s, bank_per_shape(s, 8)), Golf(s, bank_per_shape(s, 1))
    for m in (model, twin):
        init_model(m, s, 1)
    separate(model)
    assert sum(1 for n, _ in model.named_parameters() if n.startswith("banks.")) == 18
    assert all(torch.equal(a, b) for a, b in zip(named_state(model).values(), named_state(twin).values()))


@pytest.mark.parametrize("plan", ["one_big_bank", "PR399", "pr132", ""])
def test_a_plan_that_is_no_plan(plan):
    with pytest.raises(GolfError, match=f"PLAN .*{plan!r}"):
        read_variant(settings(3, PLAN=plan))

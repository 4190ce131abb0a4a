"""The studies on a tiny model: every run is kept, a second call does what is missing, other settings are refused, variants do what they say."""
import pytest
import torch
from tiny import TINY, tiny_data

from golfnb.studies import harness as studies
from golfnb.studies.bench import read_result
from golfnb.loader import grad_accum
from golfnb.parallel_muon import Ranks, clip_factor, squared_norm
from golfnb.settings import GolfError
from golfnb.studies.variants import read_variant
from golfnb.train import backward_pass, training_loss

SMALL = {**TINY, "MODEL_DIM": "64", "NUM_LAYERS": "4", "VE_LAYERS": "3", "TRAIN_SEQ_LEN": "32", "EVAL_SEQ_LEN": "32", "EVAL_STRIDE": "16", "TTT_CHUNK_TOKENS": "128", "VAL_BATCH_SIZE": "4096", "SWA_EVERY": "1",
         "WARMUP_STEPS": "1", "STUDY_STEPS": "2", "STUDY_SEEDS": "1", "STUDY_VAL": "1", "STUDY_TOKENS": "200", "TRAIN_BATCH_TOKENS": "256"}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("studies")
    return {**SMALL, **tiny_data(folder), "OUT": str(folder), "RUNS_DIR": str(folder), "RUN_ID": "r", "GPTQ_CALIB_SAMPLES": "1"}, folder


@pytest.fixture
def call(data, monkeypatch):
    for name, value in data[0].items():
        monkeypatch.setenv(name, value)

    def one(name, *words, **more):
        assert studies.STUDIES[name]([*words, *(f"{k}={v}" for k, v in more.items())]) == 0
    return one


def test_a_study_cut_off_goes_on_where_it_stopped(call, data, capsys):
    folder = data[1]
    call("gates", STUDY_KINDS="one")
    kept = read_result("study_gates_cpu_1", folder)["samples"]
    assert [k for k in kept if k.endswith("train")] == ["one seed 1 train"]
    call("gates")
    found = read_result("study_gates_cpu_1", folder)["samples"]
    assert {k.removesuffix(" seed 1 val") for k in found if k.endswith(" val")} == set(studies.GATES) and found["one seed 1 train"] == kept["one seed 1 train"]
    assert all(len(found[f"{g} seed 1 val"]) == 3 and len(found[f"{g} seed 1 train"]) == 2 for g in studies.GATES)
    first, second = ({found[f"{g} seed 1 train"][i] for g in studies.GATES} for i in (0, 1))
    assert max(first) - min(first) < 1e-4, "fresh blocks add nothing and the head normalises: the gates differ from the second step on"
    assert len(second) == len(studies.GATES)
    capsys.readouterr()
    call("gates")
    assert not capsys.readouterr().out
    with pytest.raises(GolfError, match="other settings"):
        call("gates", MATRIX_LR="0.01")


def test_a_frozen_skip_stays_where_it_is_for_its_steps(call, monkeypatch):
    lab, machines, make = studies.Lab(), [], studies.parts_of
    monkeypatch.setattr(studies, "parts_of", lambda *a: machines.append(make(*a)) or machines[-1])
    for held, moves in ((2, False), (1, True)):
        kind = studies.Kind(prepare=studies.partial(studies.start_skips, value=0.0, held=held))
        studies.run_kind(lab, lab.variant(iterations=2).exchange(AVERAGING="none"), kind)
        assert bool(machines[-1].model.skip_weights.detach().abs().max() > 0) == moves


def test_dtypes_are_those_that_a_kind_names(call):
    lab = studies.Lab()
    variant = lab.variant(iterations=2).exchange(AVERAGING="none")
    for name, narrow in (("all fp32", ()), ("bf16 matrices and state", ("matrix", "state")), ("all bf16", ("matrix", "table", "state", "buffer"))):
        m = studies.parts_of(lab.ranks, variant, studies.DTYPES[name])
        want = {p: torch.bfloat16 if p in narrow else torch.float32 for p in ("matrix", "table", "state", "buffer")}
        assert {p.dtype for p in m.model.banks.values()} == {want["matrix"]} and m.model.tok_emb.dtype == want["table"] and m.model.rotary_cos.dtype == want["buffer"]
        assert {t.dtype for part in (*m.engine.banks.values(), *m.engine.groups) for t in part.state.values()} == {want["state"]}
    assert len(studies.run_kind(lab, variant, studies.DTYPES["all bf16"])["train"]) == 2, "and it trains"


def test_every_average_of_one_run_is_scored(call, data):
    call("averaging", STUDY_SECONDS="8", STUDY_FAST_MS="400", STUDY_PLAIN_MS="500")
    found, modes = read_result("study_averaging_cpu_1", data[1])["samples"], ("ema", "swa", "ema+swa", "none")
    for name, steps in (("fast", 20), ("plain", 16)):
        assert len(found[f"{name} seed 1 train"]) == steps and all(len(found[f"{name} seed 1 {m}{t}"]) == 1 for m in modes for t in ("", "_ttt"))
    assert len({found[f"fast seed 1 {m}"][0] for m in modes}) >= 3
    with pytest.raises(GolfError, match="STUDY_FAST_MS"):
        call("averaging")


def test_golf_against_pr549_at_equal_seconds(call, data):
    call("golf_seconds", STUDY_SECONDS="0.2", STUDY_PR549_MS="20", STUDY_GOLF_MS="20")
    found = read_result("study_golf_seconds_cpu_1", data[1])
    assert {k for k in found["samples"] if k.endswith("final_ema")} == {"golf seed 1 final_ema", "pr549 seed 1 final_ema"}
    assert all(found["facts"]["kinds"][r]["warmdown_iters"] == 5 for r in ("golf", "pr549"))


def test_kinds_take_turns(call, data):
    call("orders", STUDY_SEEDS="1,2", STUDY_KINDS="sequential,packed")
    found = read_result("study_orders_cpu_1", data[1])
    ends = {k: v for k, v in found["samples"].items() if k.endswith("final")}
    assert len(ends) == 4 == len({v[0] for v in ends.values()})
    assert found["facts"]["kinds"] == {order: {"loader": order} for order in ("sequential", "coprime", "packed")}
    assert list(found["facts"]["commits"]) == [f"{o} seed {s}" for s, o in ((1, "sequential"), (1, "packed"), (2, "packed"), (2, "sequential"))]


def test_parts_of_golf(call, data):
    call("golf_parts", STUDY_VAL="0")
    assert {k.split(" seed")[0] for k in read_result("study_golf_parts_cpu_1", data[1])["samples"]} == {"golf", "skip_gate=sigmoid", "plan=shared_mlp"}


def test_the_loader_is_timed_alone_and_in_training(call, data):
    call("blocks", STUDY_BLOCKS="2", STUDY_BLOCK_STEPS="1")
    assert len(read_result("loader_blocks", data[1])["samples"]["real"]) == 2
    call("loader", STUDY_BATCHES="2")
    found = read_result("loader_cpu", data[1])["samples"]
    assert len(found) == 6 and all(len(v) == 5 for v in found.values())


def test_a_whole_run_as_eight_ranks_and_what_its_files_are_worth(call, data, monkeypatch):
    folder, grids = data[1], {"floor": studies.GRIDS["floor"]}
    call("parity", ITERATIONS="3", VAL_LOSS_EVERY="1", CLIP="local", STEP_GRAPH="1")
    (path,) = folder.glob("parity_*.json")
    found = read_result(path.stem, folder)
    assert len(found["samples"]["first"]) == 3 and found["facts"]["clip_as"] == 8 and found["facts"]["ttt_loss"] > 0
    monkeypatch.setattr(studies, "GRIDS", grids)
    call("loss", str(folder / "r"))
    found = read_result("quant_r", folder)["samples"]
    sizes = [found[f"k = {k}, nearest: bytes"][0] for k in ("18", "36")]
    assert sizes == sorted(sizes, reverse=True) and len(found) == 12
    monkeypatch.setattr(studies, "synthetic_state", lambda: {"blocks.0.mlp.proj.weight": 0.04 * torch.randn(256, 512)})
    call("codec", str(folder / "r"))
    found = read_result("codec_cpu", folder)["samples"]
    assert found["synthetic, floor: ideal"] < found["synthetic, floor: rans"] and {"r, shipped: best", "r, floor: int8 in lzma"} <= set(found)


CLIP = 0.05  # of a norm above 0.1: it bites


def machine():
    variant = read_variant(TINY | {"GRAD_CLIP_NORM": str(CLIP), "CLIP": "local", "STEP_GRAPH": "0"})
    return variant.build(Ranks()), variant.settings


def batches(cfg):
    draw = torch.Generator().manual_seed(3)
    return [[torch.randint(cfg.vocab_size, (2, cfg.train_seq_len), generator=draw) for _ in range(2)] for _ in range(grad_accum(1))]


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
    params, accum, places = list(m.model.parameters()), grad_accum(1), {}
    loss_fn = training_loss(m.model, m.model.cap)
    expected = [torch.zeros_like(p, dtype=torch.float32) for p in params]
    for ids, targets in batches(cfg):
        grads = torch.autograd.grad(loss_fn(ids, targets), params, allow_unused=True, materialize_grads=True)
        factor = clip_factor(squared_norm(list(grads), torch.float32), CLIP)
        assert factor < 0.9
        torch._foreach_add_(expected, [g.float() * factor / accum for g in grads])
    m = studies.clip_as_eight(m, cfg, 1)
    for ids, targets in batches(cfg):
        in_place(loss_fn, params, places, ids, targets, accum) if recorded else backward_pass(loss_fn, ids, targets, accum)
        m.engine.accumulate()
    sums = {id(b.replica): b.sum for b in m.engine.banks.values()}
    for p, e in zip(params, expected):
        got = sums.get(id(p), p.grad)
        torch.testing.assert_close(got.float(), e, rtol=2e-5, atol=2e-7)

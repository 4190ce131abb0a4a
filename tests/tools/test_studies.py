"""The studies on a tiny model: every run is kept, a second call does what is missing, other settings are refused, variants do what they say."""
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tiny import TINY, tiny_data

from golfnb.studies import harness as studies
from golfnb.tools.results import read_result
from golfnb.text.loader import grad_accum
from golfnb.model.engine import Ranks, clip_coef, squared_norm
from golfnb.recipes import golf, pr549, pr726
from golfnb.settings import GolfError
from golfnb.text.shards import write_shard
from golfnb.studies.variants import PARTS, Variant, read_variant
from golfnb.tools.programs import copied_program
from golfnb.run.train import backward_pass, train, training_loss
from golfnb.score.ttt import TttSettings

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
    with pytest.raises(GolfError, match="study_gates_cpu_1.json .*settings"):
        call("gates", MATRIX_LR="0.01")


def test_a_frozen_skip_stays_where_it_is_for_its_steps(call, monkeypatch):
    lab, machines, make = studies.Lab(), [], studies.parts_of
    monkeypatch.setattr(studies, "parts_of", lambda *a: machines.append(make(*a)) or machines[-1])
    for frozen_steps, moves in ((2, False), (1, True)):
        kind = studies.Kind(prepare=studies.partial(studies.start_skips, value=0.0, frozen_steps=frozen_steps))
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
        factor = clip_coef(squared_norm(list(grads), torch.float32), CLIP)
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


@pytest.fixture(scope="module")
def shard(tmp_path_factory):
    path = tmp_path_factory.mktemp("variants") / "noise_train_000000.bin"
    tokens = np.random.default_rng(0).integers(0, 400, 9000, dtype=np.uint16)
    tokens[0] = 1  # a document begins
    write_shard(path, tokens)
    return path


def run_of(variant, shard):
    "What training a variant comes to: losses, and the average's weights."
    p = variant.build(Ranks())
    with variant.loader([shard], Ranks()) as batches:
        done = train(variant.trainer(p, batches), partial(variant.program.step, p))
    return done.losses, done.average.weights(), done


@pytest.mark.parametrize("word, value", [(word, value) for word, (_, values) in PARTS.items() for value in values])
def test_every_word_exchanges_its_part_and_trains(word, value, shard):
    base = read_variant({**SMALL, "ITERATIONS": "3", "LATE_QAT_THRESHOLD": "2"})
    other = base.exchange(**{word: value})
    own = base.word(word) == value
    assert other.words == ({} if own else {word: value}) and other.word(word) == value
    assert other.exchange(**{word: base.word(word)}).words == {}, "and back"
    losses, weights, done = run_of(other, shard)
    assert len(losses) == 3 and np.isfinite(losses).all()
    part, values = PARTS[word]
    if part == "clip":
        assert type(done.engine.clip) is values[value]
    elif part == "average":
        assert type(done.average) is type(values[value](other.settings)(done.engine.tensors()))
    elif part == "data":
        assert done.batches.sampler.order == value
    elif part == "projector":
        assert (done.rounded_from is not None) == (value == "1")
    else:
        assert other.part(part) is values[value]
    if part == "banks":
        assert ("mlp_bank" in done.engine.banks) == (value == "shared_mlp")


def test_a_step_for_any_part_is_the_recipes_own_where_nothing_is_exchanged(shard):
    base = read_variant({**SMALL, "LATE_QAT_THRESHOLD": "2"})  # rounded from the first step on
    wide = Variant(base.program, base.settings, {"AVERAGING": "ema", "QAT_BANKS": "1"})
    (losses, weights, done), (same, too, other) = run_of(base, shard), run_of(wide, shard)
    assert losses == same and all(torch.equal(a, b) for a, b in zip(weights, too))
    assert done.rounded_from is not None and done.rounded_from == other.rounded_from


def test_late_weights_are_rounded_on_the_programs_grid():
    assert read_variant({"RECIPE": "golf"}).projector().keywords == {"floor": False}
    assert read_variant({"QAT_BANKS": "1"}).projector().keywords == {"floor": True}
    assert read_variant({"RECIPE": "golf", "QAT_BANKS": "0"}).projector() is None and read_variant({}).projector() is None


def test_what_a_study_asks_of_a_program_that_has_it_and_of_one_that_does_not(monkeypatch):
    for program in (pr549, pr726):
        monkeypatch.setattr(program, "ADAPT", lambda *inputs, **more: (program.OWN["recipe"], inputs, more))
        assert read_variant({"RECIPE": program.OWN["recipe"]}).adapt(1, out=2) == (program.OWN["recipe"], (1,), {"out": 2})
    lacks = read_variant({"RECIPE": "pr1060", "EVAL_STRIDE": "32"}).group(TttSettings, {"TTT_EPOCHS": "2", "EVAL_STRIDE": "16"})
    assert lacks.ttt_epochs == 2 and lacks.eval_stride == 32 and lacks.ttt_lr == TttSettings().ttt_lr
    assert read_variant({"TTT_EPOCHS": "7"}).group(TttSettings, {"TTT_EPOCHS": "2"}).ttt_epochs == 7


def test_variants_of_a_program_of_ones_own(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(copied_program("golf", "mine").replace("clip=ClipMean, ", "").replace("clip(s.grad_clip_norm)", "ClipMean(s.grad_clip_norm)"))
    mine = read_variant({**SMALL, "RECIPE": str(path), "NS": "polar"})
    assert mine.words == {"NS": "polar"} and mine.settings.recipe == "mine" and mine.settings.num_layers == 4
    with pytest.raises(GolfError, match="CLIP=local .*build .*clip.*mine"):
        mine.exchange(CLIP="local")
    with pytest.raises(GolfError, match="LOADER .*sequential, coprime, packed, .*'random'"):
        mine.exchange(LOADER="random")
    untold = Variant(SimpleNamespace(Settings=type("Untold", (golf.Settings,), {"WORDS": ""}), OWN={"recipe": "mine"}, build=golf.build), mine.settings)
    assert untold.exchange(CLIP="global").words == {"CLIP": "global"} and untold.word("CLIP") is None and untold.projector() is None

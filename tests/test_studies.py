"""The studies on a tiny model: every run is kept, a second call does what is missing, other settings are refused, variants do what they say."""
import pytest
import torch
from tiny import TINY, tiny_data

from golfnb import studies
from golfnb.bench import read_result
from golfnb.settings import GolfError

SMALL = {**TINY, "MODEL_DIM": "64", "NUM_LAYERS": "4", "VE_LAYERS": "3", "TRAIN_SEQ_LEN": "32", "EVAL_SEQ_LEN": "32", "EVAL_STRIDE": "16", "TTT_CHUNK_TOKENS": "128", "VAL_BATCH_SIZE": "4096", "SWA_EVERY": "1",
         "WARMUP_STEPS": "1", "STUDY_STEPS": "2", "STUDY_SEEDS": "1", "STUDY_VAL": "1", "STUDY_TOKENS": "200", "STUDY_MICRO": "1", "TRAIN_BATCH_TOKENS": "128"}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("studies")
    return {**SMALL, **tiny_data(folder), "OUT": str(folder)}, folder


@pytest.fixture
def call(data, monkeypatch):
    for module in (studies.golfnb.train, studies.golfnb.loader):
        monkeypatch.setattr(module, "grad_accum", module.grad_accum)  # put back after STUDY_MICRO
    for name, value in data[0].items():
        monkeypatch.setenv(name, value)
    return lambda name, **more: studies.STUDIES[name]([f"{k}={v}" for k, v in more.items()])


def test_a_study_cut_off_goes_on_where_it_stopped(call, data, capsys):
    folder = data[1]
    call("gates", STUDY_MINUTES="0.000001")
    assert "time is up" in capsys.readouterr().out
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
    assert "seed" not in capsys.readouterr().out
    with pytest.raises(GolfError, match="other settings"):
        call("gates", MATRIX_LR="0.01")


def test_a_frozen_skip_stays_where_it_is_for_its_steps(call):
    lab = studies.Lab(dict(studies.os.environ))
    cfg = studies.short_run(lab, 2)
    for held, moves in ((2, False), (1, True)):
        kind = studies.Kind(cfg, studies.partial(studies.start_skips, value=0.0, held=held))
        studies.run_kind(lab, kind, 1)
        (m,) = lab.kept.values()
        assert bool(m.model.skip_weights.detach().abs().max() > 0) == moves and not m.model.skip_weights._backward_hooks
    studies.stop_ranks(lab.ranks)


def test_dtypes_are_those_that_a_kind_names(call):
    lab = studies.Lab(dict(studies.os.environ))
    cfg = studies.short_run(lab, 2)
    for name in ("all fp32", "bf16 matrices and state", "all bf16"):
        kind, narrow = studies.dtype_kind(cfg, studies.DTYPES[name], name), studies.DTYPES[name]
        m, _ = studies.machine_of(lab, kind, cfg)
        want = {p: torch.bfloat16 if p in narrow else torch.float32 for p in ("matrix", *studies.PARTS)}
        assert {p.dtype for p in m.model.banks.values()} == {want["matrix"]} and m.model.tok_emb.dtype == want["table"] and m.model.rotary_cos.dtype == want["buffer"]
        assert {t.dtype for part in (*m.engine.banks.values(), *m.engine.groups) for t in part.state.values()} == {want["state"]}
    assert studies.run_kind(lab, kind, 1)["skipped"] == [0], "and it trains"
    studies.stop_ranks(lab.ranks)


def test_every_average_of_one_run_is_scored(call, data):
    call("averaging", STUDY_SECONDS="8", STUDY_FAST_MS="400", STUDY_PLAIN_MS="500")
    found = read_result("study_averaging_cpu_1", data[1])["samples"]
    for name, steps in (("fast", 20), ("plain", 16)):
        assert len(found[f"{name} seed 1 train"]) == steps and all(len(found[f"{name} seed 1 {m}{t}"]) == 1 for m in studies.MODES for t in ("", "_ttt"))
    assert len({found[f"fast seed 1 {m}"][0] for m in studies.MODES}) >= 3
    with pytest.raises(GolfError, match="STUDY_FAST_MS"):
        call("averaging")


def test_golf_against_pr549_at_equal_seconds(call, data):
    call("golf_seconds", STUDY_SECONDS="0.2", STUDY_CALIBRATE="3")
    found = read_result("study_golf_seconds_cpu_1", data[1])
    assert {k for k in found["samples"] if k.endswith("final_ema")} == {"golf seed 1 final_ema", "pr549 seed 1 final_ema"} and found["facts"]["tests"]["golf"]["final"]["n"] == 1
    assert all(found["facts"]["tuned"][r]["warmdown"] > 0 for r in ("golf", "pr549"))


def test_orders_are_compared_and_taken_up_again(call, data):
    call("orders", STUDY_LENGTHS="2", STUDY_SEEDS="1,2", STUDY_ORDERS="sequential,packed")
    found = read_result("study_orders_2_cpu_1", data[1])
    ends = {k: v for k, v in found["samples"].items() if k.endswith("final")}
    assert len(ends) == 4 == len({v[0] for v in ends.values()}) and found["facts"]["tests"]["packed"]["final"]["n"] == 2
    assert list(found["facts"]["commits"]) == [f"{o} seed {s}" for s, o in ((1, "sequential"), (1, "packed"), (2, "packed"), (2, "sequential"))], "they take turns"


def test_the_loader_is_timed_alone_and_in_training(call, data):
    call("blocks", STUDY_BLOCKS="2", STUDY_BLOCK_STEPS="1")
    assert len(read_result("loader_blocks", data[1])["samples"]["real"]) == 2
    call("loader", shards=2, tokens=20_000, rows=2, seq_len=32, batches=2, rounds=3)
    found = read_result("loader_cpu", data[1])["samples"]
    assert len(found) == 6 and all(len(v) == 3 for v in found.values())

"""The driver of the skip-gate, dtype and averaging studies: every run is kept, a second call does what is missing, other settings are refused."""
import pytest
import torch
from study_gates import DTYPES, GATES, MODES, jobs_of, main, read_state
from tiny import TINY, tiny_data

from golfnb.bench import read_result
from golfnb.config import GolfError, load_config
from golfnb.layout import model_layout
from golfnb.model import SKIP_FROZEN_STEPS, Golf, init_model, skip_factors
from golfnb.parallel_muon import Ranks, make_engine
from golfnb.train import RunLog, train, training_loss
from workers import Batches, settings

SMALL = {**TINY, "MODEL_DIM": "64", "NUM_LAYERS": "4", "VE_LAYERS": "3", "TRAIN_SEQ_LEN": "32", "EVAL_SEQ_LEN": "32", "EVAL_STRIDE": "16", "TTT_CHUNK_TOKENS": "128", "VAL_BATCH_SIZE": "4096",
         "SWA_EVERY": "1", "STUDY_STEPS": "2", "STUDY_SEEDS": "1", "STUDY_VAL": "1", "STUDY_TOKENS": "200", "STUDY_SECONDS": "8", "STUDY_FAST_MS": "400", "STUDY_PLAIN_MS": "500"}


@pytest.fixture(scope="module")
def env(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gates")
    return {**SMALL, **tiny_data(folder), "OUT": str(folder)}, folder


def test_a_study_cut_off_goes_on_where_it_stopped(env, capsys):
    some, folder = env
    main("gates", {**some, "STUDY_MINUTES": "0.000001"})
    assert "time is up" in capsys.readouterr().out
    kept = read_result("study_gates_cpu_1", folder)["samples"]
    assert [k for k in kept if k.endswith("train")] == ["one seed 1 train"]
    main("gates", some)
    found = read_result("study_gates_cpu_1", folder)["samples"]
    assert {k.removesuffix(" seed 1 val") for k in found if k.endswith(" val")} == set(GATES) and found["one seed 1 train"] == kept["one seed 1 train"]
    assert all(len(found[f"{g} seed 1 val"]) == 3 and len(found[f"{g} seed 1 train"]) == 2 for g in GATES)
    first, second = ({found[f"{g} seed 1 train"][i] for g in GATES} for i in (0, 1))
    assert max(first) - min(first) < 1e-4 and len(second) == len(GATES), "fresh blocks add nothing and the head normalises: the gates differ from the second step on"
    main("gates", some)
    assert "seed" not in capsys.readouterr().out.split("sigmoid")[-1].replace("sigmoid seed 1", "").replace("seed 1:", "")
    with pytest.raises(GolfError, match="other settings"):
        main("gates", {**some, "MATRIX_LR": "0.01"})
    assert read_state("study_gates_cpu_1", folder / "elsewhere", {}) == ({}, {}), "in another folder it begins anew"


def test_every_average_of_one_run_is_scored(env):
    some, folder = env
    main("averaging", some)
    found = read_result("study_averaging_cpu_1", folder)["samples"]
    for name, steps in (("fast", 20), ("plain", 16)):
        assert len(found[f"{name} seed 1 train"]) == steps and all(len(found[f"{name} seed 1 {m}{t}"]) == 1 for m in MODES for t in ("", "_ttt"))
    assert len({found[f"fast seed 1 {m}"][0] for m in MODES}) >= 3


def test_the_switches_reach_the_tensors():
    for label, switches in DTYPES.items():
        cfg = load_config(settings(3, **{k.upper(): v for k, v in switches.items()}))
        model = Golf(cfg, model_layout(cfg, 1), dtype=torch.float32)
        engine = make_engine(model, model.layout, cfg, Ranks())
        kind = {"bf16": torch.bfloat16}
        assert model.tok_emb.dtype == kind.get(switches["table_dtype"], torch.float32) and model.rotary_cos_16.dtype == kind.get(switches["buffer_dtype"], torch.float32), label
        assert {t.dtype for g in engine.groups for t in (g.first, g.second)} | {b.momentum.dtype for b in engine.banks.values()} == {kind.get(switches["state_dtype"], torch.float32)}, label
    assert len(jobs_of("dtypes", cfg, {})) == 3 * len(DTYPES)
    with pytest.raises(GolfError, match="gates, dtypes or averaging"):
        jobs_of("x", cfg, {})


def test_the_gates_start_where_they_say():
    want = {"one": 1.0, "0.18": 0.18, "zero": 0.0, "frozen": 0.0, "sigmoid": 0.1824}
    for gate, value in want.items():
        cfg = load_config(settings(4, SKIP_GATE=gate))
        model = Golf(cfg, model_layout(cfg, 1))
        init_model(model, cfg, 1)
        assert len(skip_factors(model)) == 2 and all(torch.allclose(f, torch.tensor(value), atol=1e-3) for f in skip_factors(model))


def test_frozen_skips_are_held_and_then_let_go(monkeypatch):
    assert SKIP_FROZEN_STEPS == 50
    monkeypatch.setattr("golfnb.train.SKIP_FROZEN_STEPS", 2)
    for steps, moves in ((2, False), (3, True)):
        cfg = load_config(settings(2, SKIP_GATE="frozen", ITERATIONS=str(steps), WARMDOWN_ITERS="0"))
        model = Golf(cfg, model_layout(cfg, 1))
        init_model(model, cfg, 1)
        train(cfg, training_loss(model, model.cap), Batches(cfg, Ranks()), make_engine(model, model.layout, cfg, Ranks()), RunLog(quiet=True))
        assert bool(model.skip_weights.any()) == moves

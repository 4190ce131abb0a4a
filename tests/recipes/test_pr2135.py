"""Recipe pr2135: its numbers are those of the published command, and a tiny run trains, goes on, is read, sampled and scored, on one rank as on two."""
import json
import re

import pytest
import torch
from test_settings import env
from tiny import TINY, forked_ranks, golfnb, run_quietly, tiny_data

from golfnb.file.artifact import load_model
from golfnb.model.frontier import Frontier, in_order_of
from golfnb.model.engine import AdamW, Ranks
from golfnb.recipes import pr2135
from golfnb.settings import GolfError, read_settings
from golfnb.tools.checkpoint import open_kept
from golfnb.tools.cli import main_cli
from golfnb.tools.sampling import generate
from golfnb.run.train import Extra, floored_schedule, lr_schedule

COMMAND = """CASEOPS_ENABLED=0 VOCAB_SIZE=8192 NGRAM_TILT_ENABLED=0 SMEAR_GATE_BOS_FIX=0 EVAL_SEQ_LEN=2560 MATRIX_LR=0.028 MIN_LR=0.1 WARMDOWN_FRAC=0.85 BETA2=0.99
SPARSE_ATTN_GATE_ENABLED=1 SPARSE_ATTN_GATE_SCALE=0.5 SMEAR_GATE_ENABLED=1 GATE_WINDOW=12 EMA_DECAY=0.9965"""
DEFAULTS = """ITERATIONS=20000 WARMUP_STEPS=20 TRAIN_BATCH_TOKENS=786432 TRAIN_SEQ_LEN=2048 MAX_WALLCLOCK_SECONDS=600 NUM_LAYERS=11 XSA_LAST_N=11 MODEL_DIM=512 NUM_KV_HEADS=4 NUM_HEADS=8
MLP_MULT=4.0 SKIP_GATES_ENABLED=1 LOGIT_SOFTCAP=30 ROPE_BASE=10000 ROPE_DIMS=16 LN_SCALE=1 QK_GAIN_INIT=5.0 NUM_LOOPS=2 LOOP_START=3 LOOP_END=5 ENABLE_LOOPING_AT=0.35
PARALLEL_START_LAYER=8 TIED_EMBED_LR=0.03 TIED_EMBED_INIT_STD=0.005 SCALAR_LR=0.02 MUON_MOMENTUM=0.97 MUON_BACKEND_STEPS=5 MUON_MOMENTUM_WARMUP_START=0.92
MUON_MOMENTUM_WARMUP_STEPS=1500 MUON_ROW_NORMALIZE=1 BETA1=0.9 ADAM_EPS=1e-8 GRAD_CLIP_NORM=0.3 ADAM_WD=0.02 MUON_WD=0.095 EMBED_WD=0.085 EVAL_STRIDE=64"""


def settings_of(text: str = ""):
    return read_settings(pr2135.Settings, pr2135.OWN, env(text))


def test_the_numbers_are_those_of_the_published_command():
    assert settings_of(COMMAND) == settings_of(DEFAULTS) == settings_of()
    for world in (1, 2, 4, 8):
        settings_of().check(world)
    for wrong in ("CASEOPS_ENABLED=1", "NGRAM_TILT_ENABLED=1", "LOADER=coprime", "MUON_ROW_NORMALIZE=0"):
        with pytest.raises(GolfError, match=wrong.split("=")[0]):
            settings_of(wrong)


def test_the_rate_is_constant_then_falls_to_a_floor_by_the_share_of_time_or_steps():
    s = settings_of("MAX_WALLCLOCK_SECONDS=108")  # 100 s are left to train
    assert s.train_cap_ms == 100_000
    for share, rate in ((0.0, 1.0), (0.15, 1.0), (0.151, 0.849 / 0.85), (0.5, 0.5 / 0.85), (0.915, 0.1), (0.99, 0.1), (1.2, 0.1)):
        now = torch.tensor(share * s.train_cap_ms, dtype=torch.float64)
        assert floored_schedule(s, 7, now).item() == pytest.approx(rate)
    s = settings_of("MAX_WALLCLOCK_SECONDS=0 ITERATIONS=10")
    assert [floored_schedule(s, n, 0.0).item() for n in (0, 1, 5, 9)] == pytest.approx([1.0, 1.0, 0.5 / 0.85, 0.1 / 0.85])
    assert lr_schedule(s, 9, 0.0) != floored_schedule(s, 9, 0.0).item()


def test_tables_may_have_a_decay_of_their_own():
    assert AdamW(0.1, 0.2, 0.3).rates("table") == (0.2, 0.3) and AdamW(0.1, 0.2, 0.3).rates("scalar") == (0.1, 0.3)
    own = AdamW(0.1, 0.2, 0.3, table_wd=0.0)
    assert own.rates("table") == (0.2, 0.0) and own.rates("scalar") == (0.1, 0.3)


def tiny(tmp_path, **more) -> dict[str, str]:
    data = tmp_path / "data"
    data.mkdir()
    return TINY | tiny_data(data) | {"RECIPE": "pr2135", "SMALL_TENSOR": "2000", "GPTQ_CALIB_SAMPLES": "2", "MAX_WALLCLOCK_SECONDS": "0", "ITERATIONS": "8", "WARMUP_STEPS": "2", "VAL_LOSS_EVERY": "4",
                                     "ENABLE_LOOPING_AT": "0.35", "EMA_DECAY": "0.5", "MUON_MOMENTUM_WARMUP_STEPS": "4", "MODEL_DIM": "48", "ROPE_DIMS": "4", "LOOP_START": "0", "LOOP_END": "0", "PARALLEL_START_LAYER": "1", "RUNS_DIR": str(tmp_path / "runs")} | more


def test_the_script_trains_on_two_ranks_as_the_program_on_one(tmp_path):
    "Each rank clips its own gradient, so here none is clipped; and no step is at the end of a shard, of which two ranks leave out more."
    given = tiny(tmp_path, GRAD_CLIP_NORM="1e6", TTT_ENABLED="0", ITERATIONS="7")
    alone = run_quietly(pr2135, given | {"RUN_ID": "alone"})
    script = tmp_path / "pr2135.py"
    assert golfnb("script", "--recipe", "pr2135", "-o", script, cwd=tmp_path).returncode == 0
    done = forked_ranks(script, 2, given | {"RUN_ID": "two"}, tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    two = json.loads((tmp_path / "runs" / "two" / "summary.json").read_text())
    for name in ("losses", "raw_loss", "ema_loss", "documents_loss", "sliding_loss"):
        assert two[name] == pytest.approx(alone[name], abs=1e-3), name


class Seen(Extra):
    "The order of the blocks after each step; an error after step `until`."

    def __init__(self, model, until: int):
        self.orders, self.model, self.until = [], model, until

    def after_step(self, t):
        self.orders.append(self.model.order)
        if t.steps == self.until:
            raise InterruptedError


def life(program, given: dict[str, str], until: int, monkeypatch, **more):
    "One life of a run that keeps checkpoints: the run and the orders of its steps."
    run = open_kept(program, given | more, Ranks(), quiet=True)
    _, keeper, progress = run.extras
    seen, build = [], program.build

    def watched(s, ranks):
        parts = build(s, ranks)
        seen.append(Seen(parts.model, until))
        run.extras.append(seen[0])
        return parts

    monkeypatch.setattr(program, "build", watched)
    try:
        program.main(run)
    except InterruptedError:
        keeper.wait()
    monkeypatch.setattr(program, "build", build)
    keeper.close()
    progress.lock.close()
    run.log.close()
    return run, seen[0].orders


def test_a_run_goes_on_with_its_order_and_its_file_is_read_and_sampled(tmp_path, monkeypatch):
    given = tiny(tmp_path) | {"CHECKPOINT_EVERY_S": "0.001"}
    whole, orders = life(pr2135, given, 0, monkeypatch, RUN_ID="whole")
    s = whole.settings
    assert orders == [in_order_of(s, 0.0)] * 5 + [in_order_of(s, 1.0)] * 3  # 3 of 8 steps are read before the sixth begins
    assert whole.summary["losses"][-1] < whole.summary["losses"][0]
    for until in (4, 6):
        name = f"killed{until}"
        _, first = life(pr2135, given, until, monkeypatch, RUN_ID=name)
        again, then = life(pr2135, given, 0, monkeypatch, RUN_ID=name, RESUME="1")
        assert first == orders[:until] and then == orders[8 - len(then):] and 0 < len(then) < 8
        for key in ("losses", "raw_loss", "ema_loss", "documents_loss", "int6_loss", "sliding_loss", "ttt_loss", "artifact_sha256"):
            assert again.summary[key] == whole.summary[key], key
    model, meta, _ = load_model(whole.folder / "artifact.golf")
    assert type(model) is Frontier and model.order == in_order_of(s, 1.0) and meta["settings"]["family"] == "frontier"
    assert len(generate(model, [1, 5, 9], 12, seed=3)) == 15
    scored = golfnb("score", whole.folder, cwd=tmp_path)
    assert scored.returncode == 0, scored
    found = re.search(r"sliding_window_exact val_loss:([\d.]+)", scored.stdout)
    assert found and float(found[1]) == pytest.approx(whole.summary["sliding_loss"], abs=1e-6)
    packed = golfnb("quantize", whole.folder, "-o", tmp_path / "again.golf", cwd=tmp_path)
    assert packed.returncode == 0, packed
    assert load_model(tmp_path / "again.golf")[0].order == model.order


def test_its_file_is_scored_with_adapters(tmp_path, capfd):
    "A block three times, then two lanes; a high rate, so that they do something."
    given = tiny(tmp_path, RUN_ID="adapted", TTT_ENABLED="0", ITERATIONS="4", VAL_LOSS_EVERY="0")
    summary = run_quietly(pr2135, given)
    words = ["--val", f"{given['DATA_PATH']}/*_val_*.bin", "--tokenizer", given["TOKENIZER_PATH"], "--adapters", "TTT_CHUNK_SIZE=16", "TTT_BATCH_SIZE=16", "TTT_LORA_RANK=4", "TTT_LORA_LR=0.01", "TTT_K_LORA=0", "TTT_HEAD_LORA=1"]
    assert main_cli(["score", str(tmp_path / "runs" / "adapted"), *words]) == 0
    found = dict(re.findall(r"^(\w+)_exact val_loss:(\S+)", capfd.readouterr().out, re.M))
    assert float(found["legal_ttt"]) < summary["sliding_loss"] - 0.05, "they learn"

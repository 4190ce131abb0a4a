"""The scripts: published commands run as they are, and bad settings end in a sentence."""
import re

import pytest
from oracle.compare import script_of
from tiny import TINY, tiny_data, torchrun


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    "A folder with data and a script, and the settings that point at the data."
    root = tmp_path_factory.mktemp("script")
    (root / "data").mkdir()
    settings = tiny_data(root / "data")
    (root / "readable.py").write_text(script_of("pr549"))
    return root, settings


PR549 = """NUM_LAYERS=11 BIGRAM_VOCAB_SIZE=1536 XSA_LAST_N=4 EMA_ENABLED=1 EMA_DECAY=0.997 SWA_ENABLED=1 SWA_EVERY=50 ROPE_DIMS=16 LN_SCALE=1 LATE_QAT=1 LATE_QAT_THRESHOLD=0.15
VE_ENABLED=1 VE_DIM=128 VE_LAYERS=9,10 TTT_ENABLED=1 TTT_LR=0.002 TTT_EPOCHS=3 TTT_CHUNK_TOKENS=32768 TTT_FREEZE_BLOCKS=0 TTT_MOMENTUM=0.9 TTT_BATCH_SEQS=32 TTT_GRAD_CLIP=1.0
MUON_WD=0.04 ADAM_WD=0.04 MATRIX_LR=0.025 SCALAR_LR=0.025 TIED_EMBED_LR=0.035 MUON_MOMENTUM=0.99 MUON_MOMENTUM_WARMUP_START=0.92 MUON_MOMENTUM_WARMUP_STEPS=1500 WARMDOWN_ITERS=3500
ITERATIONS=9000 MAX_WALLCLOCK_SECONDS=600 EVAL_STRIDE=64 SEED=1337"""
PR1060 = "SEED=1337 BIGRAM_VOCAB_SIZE=2816 BIGRAM_DIM=112 XSA_LAST_N=11 USE_GPTQ=1 GPTQ_RESERVE_MS=14000 TTT_ENABLED=0"
SMALLER = {"MODEL_DIM": "32", "NUM_HEADS": "2", "NUM_KV_HEADS": "1", "VOCAB_SIZE": "400", "TRAIN_SEQ_LEN": "64", "EVAL_SEQ_LEN": "64", "TRAIN_BATCH_TOKENS": "1024", "VAL_BATCH_SIZE": "65536",
           "ITERATIONS": "3", "WARMUP_STEPS": "1", "VAL_LOSS_EVERY": "2", "EVAL_STRIDE": "32", "GPTQ_CALIB_SAMPLES": "2"}
LINES = [r"step:0/3 val_loss:\d+\.\d{4} val_bpb:\d+\.\d{4} train_time:\d+ms step_avg:\d+\.\d\dms", r"step:1/3 train_loss:\d+\.\d{4} train_time:\d+ms step_avg:\d+\.\d\dms",
         r"step:3/3 val_loss:\S+ val_bpb:\S+ train_time:\d+ms step_avg:\S+ms", r"final_int6_roundtrip_exact val_loss:\d+\.\d{8} val_bpb:\d+\.\d{8}",
         r"final_int6_sliding_window_exact val_loss:\d+\.\d{8} val_bpb:\d+\.\d{8}", r"Total submission size int6\+lzma: \d+ bytes"]


def variables(line: str) -> dict[str, str]:
    return dict(word.split("=", 1) for word in line.split())


@pytest.mark.parametrize("name, line, more", [("pr549", PR549, [r"legal_ttt_exact val_loss:\d+\.\d{8} val_bpb:\d+\.\d{8}"]), ("pr1060", PR1060, [])])
def test_published_commands_run_and_log_as_the_field_does(place, name, line, more):
    root, data = place
    (root / f"{name}.py").write_text(script_of(name))
    env = {**variables(line), **SMALLER, **data, "RUN_ID": name}
    done = torchrun(root / f"{name}.py", 2, env, root)
    assert done.returncode == 0, done.stderr[-2000:]
    for pattern in [*LINES, *more]:
        assert re.search(f"^{pattern}$", done.stdout, re.M), pattern
    assert ("legal_ttt" in done.stdout) == bool(more)


def test_bad_settings_end_the_script_with_a_sentence_and_nothing_written(place):
    root, data = place
    for world, broken, words in ((1, {"DATA_PATH": str(root / "none")}, "_train_"), (2, {"TRAIN_BATCH_TOKENS": "1000"}, "TRAIN_BATCH_TOKENS")):
        done = torchrun(root / "readable.py", world, {**TINY, **data, **broken, "RECIPE": "pr549", "RUN_ID": "broken"}, root)
        said = [line for line in done.stderr.splitlines() if line.startswith("golfnb: ")]
        assert done.returncode != 0 and said and words in said[0], done.stderr[-2000:]
        assert not (root / "runs" / "broken" / "summary.json").exists()

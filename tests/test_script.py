"""One source: for every recipe package and script train bit for bit alike; the packed script is the readable one; published commands run."""
import ast
import base64
import bz2
import json
import re
import sys
import types
from functools import cache
from pathlib import Path

import pytest
from script_checks import unreached
from tiny import TINY, tiny_data, torchrun

from golfnb import config, run
from golfnb.tools.launcher import fold_script, minify, pack_script
from golfnb.settings import GolfError

ROOT = Path(__file__).resolve().parent.parent
SCORES = ("losses", "unigram_bpb", "raw_bpb", "ema_bpb", "int6_bpb", "sliding_bpb", "ttt_bpb", "artifact_bytes", "world", "ledger")
CASES = {recipe: {} for recipe in ("pr399", "pr549", "pr726", "pr1060", "golf", "demo")} | {"golf+": {"USE_GPTQ": "1", "TTT_FORM": "adapters"}}


@cache
def script_of(case: str) -> str:
    if case == "pr549":  # test_launcher holds that it is the folded one
        return (ROOT / "golfnb" / "train_gpt.py").read_text(encoding="utf-8")
    return fold_script(case.rstrip("+"), CASES[case])


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    "A folder with data and a script, and the settings that point at the data."
    root = tmp_path_factory.mktemp("script")
    (root / "data").mkdir()
    settings = tiny_data(root / "data")
    (root / "readable.py").write_text(script_of("pr549"))
    return root, settings


def loaded(text: str, name: str) -> types.ModuleType:
    "A script as a module, with a name space of its own for its ops: the package's must live on in this process."
    module = sys.modules[name] = types.ModuleType(name)
    exec(compile(text.replace('f"golfnb::{', f'f"{name}::{{'), name, "exec"), module.__dict__)
    return module


@pytest.mark.parametrize("case", CASES)
def test_package_and_script_agree_bit_for_bit(case, place, monkeypatch):
    (root, data), recipe = place, case.rstrip("+")
    monkeypatch.chdir(root)
    text = script_of(case)
    script = loaded(text, "script_" + case.replace("+", "_more"))
    env = {**TINY, **data, **CASES[case], "RECIPE": recipe, "TTT_CHUNK_SIZE": "16", "GPTQ_CALIB_SAMPLES": "2"}
    made = [m.run(m.load_config(env | {"RUN_ID": f"{case}-{i}"})) for i, m in enumerate((types.SimpleNamespace(run=run.run, load_config=config.load_config), script))]
    assert len(made[0]["losses"]) == 4
    for key in SCORES:
        assert made[0].get(key) == made[1].get(key), key
    assert max(map(len, text.splitlines())) <= 110 and unreached(text) == []
    small = minify(text)
    monkeypatch.setattr("golfnb.tools.launcher.minify", {text: small}.__getitem__)
    data = re.search(r'b85decode\("(.*)"\)', pack_script(text))[1]
    assert ast.dump(ast.parse(bz2.decompress(base64.b85decode(data)))) == ast.dump(ast.parse(small))


@pytest.mark.parametrize("case", CASES)
def test_a_fixed_setting_is_accepted_with_its_own_value_and_refused_with_another(case):
    recipe = case.rstrip("+")
    script, cfg = loaded(script_of(case), "fixed_" + case.replace("+", "_more")), config.load_config({"RECIPE": recipe, **CASES[case]})
    assert script.load_config({"RECIPE": recipe, "LOADER": cfg.loader, "CLIP": cfg.clip}).loader == cfg.loader
    other = next(word for word in ("coprime", "sequential") if word != cfg.loader)
    with pytest.raises(script.GolfError, match=f"LOADER is fixed to {cfg.loader} .* found {other}: make that script with golfnb script --recipe {recipe}.* LOADER={other}") as e:
        script.load_config({"LOADER": other})
    assert "\n" not in str(e.value)
    with pytest.raises(script.GolfError, match="RECIPE is fixed"):
        script.load_config({"RECIPE": "other"})


def test_package_and_packed_script_agree_on_two_ranks(place):
    "With all that ranks share out: GPTQ's matrices, documents and their adapters."
    (root, data), found = place, {}
    (root / "packed.py").write_text(pack_script(script_of("golf+")))
    (root / "package.py").write_text("from golfnb.run import script_main\nif __name__ == '__main__':\n    script_main(__file__)\n")
    for form in ("package", "packed"):
        done = torchrun(root / f"{form}.py", 2, {**TINY, **data, **CASES["golf+"], "RECIPE": "golf", "TTT_CHUNK_SIZE": "16", "GPTQ_CALIB_SAMPLES": "2", "RUN_ID": form}, root)
        assert done.returncode == 0, done.stderr[-2000:]
        found[form] = json.loads((root / "runs" / form / "summary.json").read_text())
        assert found[form]["code_bytes"] == (root / f"{form}.py").stat().st_size and found[form]["world"] == 2
    for key in SCORES[:-1]:
        assert found["package"].get(key) == found["packed"].get(key), key


PLANTED = {
    "function planted": ("def script_main", "def planted(): pass\n\n\ndef script_main"),
    "class Planted": ("def script_main", "class Planted:\n    pass\n\n\ndef script_main"),
    "method Session.planted": ("class Session:\n", "class Session:\n    def planted(self): pass\n\n"),
    "parameter planted of code_size": ("def script_main", "def code_size(planted): return 1\n\n\nSIZE = code_size(2)\n\n\ndef script_main"),
    "setting planted": ("class RunSettings(Settings):\n", "class RunSettings(Settings):\n    planted: int = setting(1, 'no')\n"),
}


def test_what_cannot_be_reached_is_found():
    text = script_of("pr549")
    assert not unreached(text)
    for old, new in PLANTED.values():
        assert old in text
        text = text.replace(old, new, 1)
    assert set(PLANTED) <= set(unreached(text))


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

"""Settings of the recipes: every field name, published commands, what is refused, and with which words."""
import dataclasses
import json
import re
from inspect import signature
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings, strategies as st

from tiny import known_names, own_program

import golfnb
from golfnb.score.adapters import AdapterSettings
from golfnb.text.loader import grad_accum
from golfnb.model.golf import EACH_ONCE, Golf, SavedModel, saved_settings
from golfnb.model.engine import Ranks
from golfnb.tools.guard import check_memory, preflight
from golfnb.settings import IGNORED, NOT_BUILT, BaseSettings, GolfError, printable, published_words, read_json, setting, settings_from
from golfnb.tools.programs import RECIPES, every_setting, find_program, setting_groups, setting_specs, settings_of

FIELD_NAMES = """DATA_PATH TOKENIZER_PATH RUN_ID SEED ITERATIONS WARMDOWN_ITERS WARMUP_STEPS TRAIN_BATCH_TOKENS TRAIN_SEQ_LEN EVAL_SEQ_LEN EVAL_STRIDE
MAX_WALLCLOCK_SECONDS VAL_LOSS_EVERY TRAIN_LOG_EVERY VOCAB_SIZE NUM_LAYERS MODEL_DIM NUM_HEADS NUM_KV_HEADS MLP_MULT TIE_EMBEDDINGS ROPE_BASE ROPE_DIMS
LOGIT_SOFTCAP QK_GAIN_INIT LN_SCALE XSA_LAST_N BIGRAM_VOCAB_SIZE BIGRAM_DIM VE_ENABLED VE_DIM VE_LAYERS TIED_EMBED_LR MATRIX_LR SCALAR_LR MUON_MOMENTUM
MUON_MOMENTUM_WARMUP_START MUON_MOMENTUM_WARMUP_STEPS MUON_BACKEND_STEPS MUON_WD ADAM_WD BETA1 BETA2 ADAM_EPS GRAD_CLIP_NORM SWA_ENABLED SWA_EVERY
EMA_ENABLED EMA_DECAY LATE_QAT LATE_QAT_THRESHOLD TTT_ENABLED TTT_LR TTT_EPOCHS TTT_CHUNK_TOKENS TTT_FREEZE_BLOCKS TTT_MOMENTUM TTT_BATCH_SEQS TTT_GRAD_CLIP
VAL_BATCH_SIZE TIED_EMBED_INIT_STD EMBED_LR HEAD_LR USE_GPTQ GPTQ_CALIB_SAMPLES GPTQ_RESERVE_MS QUANT_CLIP_RANGE NEGATIVE_SLOPE QAT_ENABLED MTP_NUM_HEADS
MTP_LOSS_WEIGHT MUON_BETA2 LAWA_ENABLED LAWA_K LAWA_FREQ DTG_ENABLED GATED_ATTENTION VALUE_RESIDUAL""".split()
OWN_NAMES = "RECIPE CLIP LOADER AVERAGING PLAN SKIP_GATE QAT_BANKS SCALE_FLOOR WEIGHT_DTYPE ATTENTION COMPILE CODEC".split()
PR549 = """NUM_LAYERS=11 BIGRAM_VOCAB_SIZE=1536 XSA_LAST_N=4 EMA_ENABLED=1 EMA_DECAY=0.997 SWA_ENABLED=1 SWA_EVERY=50 ROPE_DIMS=16 LN_SCALE=1 LATE_QAT=1
LATE_QAT_THRESHOLD=0.15 VE_ENABLED=1 VE_DIM=128 VE_LAYERS=9,10 TTT_ENABLED=1 TTT_LR=0.002 TTT_EPOCHS=3 TTT_CHUNK_TOKENS=32768 TTT_FREEZE_BLOCKS=0
TTT_MOMENTUM=0.9 TTT_BATCH_SEQS=32 TTT_GRAD_CLIP=1.0 MUON_WD=0.04 ADAM_WD=0.04 MATRIX_LR=0.025 SCALAR_LR=0.025 TIED_EMBED_LR=0.035 MUON_MOMENTUM=0.99
MUON_MOMENTUM_WARMUP_START=0.92 MUON_MOMENTUM_WARMUP_STEPS=1500 WARMDOWN_ITERS=3500 ITERATIONS=9000 MAX_WALLCLOCK_SECONDS=600 EVAL_STRIDE=64 SEED=1337"""
PR1060 = "SEED=1337 DATA_PATH=/d TOKENIZER_PATH=/t BIGRAM_VOCAB_SIZE=2816 BIGRAM_DIM=112 XSA_LAST_N=11 USE_GPTQ=1 GPTQ_RESERVE_MS=14000 TTT_ENABLED=0"


def env(text):
    return dict(pair.split("=", 1) for pair in text.split())


def load(given: dict[str, str]):
    "The settings of the recipe that an environment names, else of pr549."
    return settings_of(find_program(given.get("RECIPE", "pr549")), given)


SPECS = every_setting() | {spec.name: spec for spec in dataclasses.fields(AdapterSettings)}


def meta_model(program, s) -> Golf:
    "The model of a program without memory for its weights, of the parts that the program builds it of."
    parts = signature(program.build).parameters
    return Golf(s, parts["banks"].default(s, 1), torch.float32, "meta", "math", parts["skips"].default())


def test_every_name_of_the_field_is_known():
    assert not set(FIELD_NAMES + OWN_NAMES) - known_names()
    assert not {name.upper() for name in SPECS} - known_names()
    assert not {name.upper() for name in SPECS} & {*NOT_BUILT, *IGNORED}


OF_OTHERS = """OMP_NUM_THREADS PATH PYTHONPATH PYTHONSAFEPATH TMPDIR RANK WORLD_SIZE LOCAL_WORLD_SIZE TORCHELASTIC_RESTART_COUNT
TORCHELASTIC_RUN_ID TORCHINDUCTOR_CACHE_DIR TRITON_CACHE_DIR TRITON_INTERPRET""".split()


def test_names_that_code_reads_from_the_environment_are_known():
    "Tests and notebooks drop them all: what a user has set there is theirs."
    read = re.compile(r'env(?:iron)?(?:\.get\(|\[)"([A-Z_]+)"|"(GOLFNB_[A-Z_]+)"')
    files = Path(golfnb.__file__).parent.rglob("*.py")
    names = {name for path in files for found in read.findall(path.read_text("utf-8")) for name in found if name}
    assert names and not names - known_names() - set(OF_OTHERS)


@pytest.mark.parametrize("bounds, default, good, bad", [
    ("[0, 1]", 0.5, (0.0, 1.0), (-0.1, 1.1)), ("(0, 1)", 0.5, (1e-3, 0.999), (0.0, 1.0, 1 - 2**-30)), ("[0, 1)", 0.5, (0.0, 1 - 2**-24), (1 - 2**-26, 1.0)),
    ("(0.5, 2.5]", 1.0, (0.6, 2.5), (0.5, 2.6)), ("[0, 0.1]", 0.1, (0.1,), (0.11,)), ("> -1", 0, (0, 5), (-1, 2**31)), (">=1e-3", 1.0, (0.001, 1e36), (0.0, 1e37)), ("< 10", 3, (9, -4), (10, -2**31)),
    ("<= 10", 3, (10,), (11,)), ("2 to 8", 3, (2, 8), (1, 9)), ("[0, 2^63)", 3, (0, 2**63 - 1), (-1, 2**63)), ("", 1.0, (-1e36, 0.0), (1e37, 1e-37))])
def test_bounds_are_written_as_in_mathematics(bounds, default, good, bad):
    @dataclasses.dataclass
    class Own(BaseSettings):
        mine: type(default) = setting(default, "a number: number", bounds=bounds)

    for value in good:
        Own(value).check()
    for value in bad:
        with pytest.raises(GolfError, match=r"MINE must .*found .*: choose"):
            Own(value).check()


def test_bounds_that_say_nothing_are_refused_where_they_are_written():
    for wrong in ("0..1", "[0, 1", "positive", "> x", "[1]", "0 to"):
        with pytest.raises(GolfError, match="bounds must be written"):
            setting(1, "a number: number", bounds=wrong)
    for default in ("word", True, None):
        with pytest.raises(GolfError, match="number"):
            setting(default, "no number: word", bounds="> 0")


def test_every_setting_has_a_meaning_a_unit_and_its_type():
    for name, spec in SPECS.items():
        assert (": " in spec.metadata["meaning"] or spec.metadata["choices"]) and type(spec.default) is spec.type, name
        assert not spec.metadata["choices"] or spec.default in spec.metadata["choices"], name


@pytest.mark.parametrize("name", RECIPES)
def test_a_program_names_real_settings_once_and_they_fit(name):
    program = find_program(name)
    specs = setting_specs(program)
    assert set(program.OWN) <= set(specs) and not {word.lower() for word in published_words(program.Settings)} & set(specs)
    grouped = [spec.name for group in setting_groups(program).values() for spec in group]
    assert sorted(grouped) == sorted(specs)
    s = settings_of(program, {})
    assert s == program.Settings(**program.OWN) == load({"RECIPE": name}) and s.recipe == name
    for world in (1, 2, 4, 8):
        s.check(world)


def test_the_demo_forgets_its_first_weights():
    demo = load({"RECIPE": "demo"})
    assert demo.ema_decay**demo.iterations <= 0.01


@pytest.mark.parametrize("name, numbers, words", [
    ("pr399", (0.0, 2048, 128, 4, 3000), "sequential local 0 - 0 1 one pr399"), ("pr549", (0.5, 1536, 128, 4, 3500), "sequential local - 0 0 1 one pr399"),
    ("pr726", (0.5, 1536, 128, 4, 3500), "coprime local - 2 0 1 one pr399"), ("pr1060", (0.5, 2816, 112, 11, 3500), "sequential local 0 - 0 1 one pr399"),
    ("golf", (0.5, 2816, 112, 11, 3500), "coprime global - 0 1 0 sigmoid shared_mlp"),
])
def test_the_table_of_recipes(name, numbers, words):
    s, program = load({"RECIPE": name}), find_program(name)
    found = published_words(program.Settings)
    assert numbers == (s.negative_slope, s.bigram_vocab_size, s.bigram_dim, s.xsa_last_n, s.warmdown_iters)
    names = ("LOADER", "CLIP", "TTT_ENABLED", "TTT_FREEZE_BLOCKS", "QAT_BANKS", "SCALE_FLOOR", "SKIP_GATE", "PLAN")
    assert words.split() == [found.get(word, "-") for word in names]


def test_derived_figures():
    s = load({})
    assert (s.head_dim, s.kv_dim, s.mlp_dim, s.ve_layer_list) == (64, 256, 1536, [9, 10])
    assert load({"VE_ENABLED": "0"}).ve_layer_list == []
    assert [grad_accum(w) for w in (1, 2, 3, 4, 8, 16)] == [8, 4, 2, 2, 1, 1]
    assert [s.rows_per_micro(w, s.train_seq_len) for w in (1, 2, 4, 8, 16)] == [48, 48, 48, 48, 24]


def test_variables_win_and_strangers_are_ignored():
    s = load({"RECIPE": "pr399", "NEGATIVE_SLOPE": "0.25", "PATH": "/bin", "WARMDOWN": "7", "matrix_lr": "9"})
    assert s.negative_slope == 0.25 and s.warmdown_iters == 3000 and s.matrix_lr == 0.025


def test_an_average_that_is_never_read_may_be_asked_for_or_not():
    for text in ("0", "1", "true"):
        assert load({"SWA_ENABLED": text}) == load({"EMA_ENABLED": "1"}) == load({})


@pytest.mark.parametrize("text", ['{"a": NaN}', '{"a": -Infinity}', '{"a": 1e999}', '{"a": 9223372036854775808}', '{"a": 1, "a": 2}', '{"a": "\\u001b[31m"}', '{"\\u009b": 1}', '[["\\u202e"]]', '{"a": "\\ud800"}', "[1]", "1", "",
                                  "[" * 10**6, '{"a":' * 25 + "1" + "}" * 25, '{"a": ' + "9" * 5000 + "}", b"\xff{}"])
def test_json_that_no_reader_expects_is_refused(text):
    with pytest.raises(GolfError, match="f.json") as e:
        read_json(text, "f.json")
    assert len(str(e.value)) < 500 and str(e.value).isprintable()


def test_json_of_ours_is_read():
    assert read_json('{"losses": [3.5, NaN], "note": "a\\n\\tb", "n": null, "yes": true, "big": 4611686018427387904}', "f")["note"] == "a\n\tb"
    assert printable("a\x1b[31m\u202eb\n") == "a\\x1b[31m\\u202eb\n"


@pytest.mark.parametrize("text, value", [("1", True), ("0", False), ("true", True), ("False", False), (" TRUE ", True)])
def test_yes_and_no(text, value):
    assert load({"LN_SCALE": text}).ln_scale is value


@pytest.mark.parametrize("pairs, words", [
    ("RECIPE=pr1", "RECIPE .*pr399, pr549.*'pr1'"), ("RECIPE=", "RECIPE .*pr399"), ("SEED=x", "SEED .*'x'"), ("SEED=1.5", "SEED .*'1.5'"), ("SEED=", "SEED .*''"),
    ("MATRIX_LR=fast", "MATRIX_LR .*'fast'"), ("MATRIX_LR=inf", "MATRIX_LR .*'inf'"), ("MLP_MULT=nan", "MLP_MULT .*'nan'"), ("TTT_ENABLED=2", "TTT_ENABLED .*'2'"),
    ("RUN_ID=a\x1b[31m", "RUN_ID .*\\\\x1b"), ("MODEL_DIM=" + "9" * 400, "MODEL_DIM .*999"), ("WEIGHT_DTYPE=fp8", "WEIGHT_DTYPE .*bf16.*fp8"),
    ("LOADER=shuffled", "LOADER .*sequential .*pr549, .*'shuffled'"), ("LOADER=coprime", "LOADER .*recipe pr726"),
    ("CLIP=none", "CLIP .*local"), ("AVERAGING=lawa", "AVERAGING .*ema"), ("EMA_ENABLED=0", "EMA_ENABLED .*1"), ("CODEC=lzm", "CODEC .*lzma"), ("TTT_FREEZE_BLOCKS=12", "TTT_FREEZE_BLOCKS .*0 .*pr549"),
    ("RECIPE=pr726 TTT_FORM=adapters", "TTT_FORM .*chunks .*pr726"), ("RECIPE=golf LATE_QAT=0", "LATE_QAT .*1 .*golf"), ("RECIPE=pr399 TTT_ENABLED=1", "TTT_ENABLED .*recipe pr549"),
    ("MTP_NUM_HEADS=1", "MTP_NUM_HEADS .*0"), ("TIE_EMBEDDINGS=0", "TIE_EMBEDDINGS .*1"), ("QAT_ENABLED=1", "QAT_ENABLED .*0"), ("QAT_ENABLED=true", "QAT_ENABLED .*0"), ("MUON_BETA2=0.9", "MUON_BETA2 .*0.95"),
    ("LAWA_ENABLED=1", "LAWA_ENABLED .*0"), ("DTG_ENABLED=1", "DTG_ENABLED .*0"), ("GATED_ATTENTION=1", "GATED_ATTENTION .*0"), ("VALUE_RESIDUAL=1", "VALUE_RESIDUAL .*0"), ("LAWA_K=ten", "LAWA_K .*'ten'"), ("QUANT_CLIP_RANGE=15", "QUANT_CLIP_RANGE .*31"), ("EMBED_LR=x", "EMBED_LR .*'x'"),
])
def test_loading_refuses(pairs, words):
    with pytest.raises(GolfError, match=words) as caught:
        load(env(pairs))
    assert "\n" not in str(caught.value) and caught.value.__cause__ is None


def test_off_values_of_what_is_not_built_are_accepted():
    spelled = {name: f"{off:g}" for name, off in NOT_BUILT.items()}
    assert load(spelled) == load({}) == load({"QAT_ENABLED": "False", "TIE_EMBEDDINGS": "true"})


@pytest.mark.parametrize("pairs, words", [
    ("NUM_HEADS=7", "MODEL_DIM .*NUM_HEADS"), ("NUM_KV_HEADS=3", "NUM_HEADS .*NUM_KV_HEADS"), ("NUM_HEADS=0", "NUM_HEADS .*above 0"), ("NUM_KV_HEADS=0", "NUM_KV_HEADS .*above 0"),
    ("MODEL_DIM=0", "MODEL_DIM .*above 0"), ("NUM_LAYERS=0", "NUM_LAYERS .*1 or more and at most 10000"), ("NUM_LAYERS=4", "VE_LAYERS .*0..3"), ("VE_LAYERS=9,9", "VE_LAYERS .*'9,9'"), ("VE_LAYERS=", "VE_LAYERS .*''"),
    ("VE_LAYERS=a,b", "VE_LAYERS .*'a,b'"), ("VE_LAYERS=-1", "VE_LAYERS .*'-1'"), ("ROPE_DIMS=15", "ROPE_DIMS .*15"), ("ROPE_DIMS=66", "ROPE_DIMS .*66"), ("ROPE_DIMS=0", "ROPE_DIMS .*above 0"),
    ("VOCAB_SIZE=70000", "VOCAB_SIZE .*65536"), ("BIGRAM_VOCAB_SIZE=1", "BIGRAM_VOCAB_SIZE .*2"), ("BIGRAM_DIM=0", "BIGRAM_DIM .*above 0"), ("VE_DIM=0", "VE_DIM .*above 0"), ("NEGATIVE_SLOPE=-1", "NEGATIVE_SLOPE"), ("LOGIT_SOFTCAP=0", "LOGIT_SOFTCAP .*above 0"),
    ("TRAIN_BATCH_TOKENS=1000", "TRAIN_BATCH_TOKENS .*1000"), ("TRAIN_BATCH_TOKENS=0", "TRAIN_BATCH_TOKENS .*above 0"), ("TRAIN_SEQ_LEN=0", "TRAIN_SEQ_LEN .*above 0"), ("TRAIN_SEQ_LEN=-8", "TRAIN_SEQ_LEN .*above 0"), ("TRAIN_BATCH_TOKENS=6144", "TRAIN_BATCH_TOKENS .*8 ranks.*6144"),
    ("EVAL_STRIDE=2049", "EVAL_STRIDE .*EVAL_SEQ_LEN"), ("EVAL_STRIDE=0", "EVAL_STRIDE .*above 0"), ("ITERATIONS=0", "ITERATIONS .*above 0"), ("WARMDOWN_ITERS=-1", "WARMDOWN_ITERS .*0 or more"), ("MAX_WALLCLOCK_SECONDS=-1", "MAX_WALLCLOCK_SECONDS .*0 or more"),
    ("SEED=-1", "SEED .*0 or more"), ("BETA1=1", "BETA1 .*0 or more and below 1"), ("EMA_DECAY=1.5", "EMA_DECAY .*below 1"), ("SWA_EVERY=0", "SWA_EVERY .*above 0"), ("TTT_CHUNK_TOKENS=100", "TTT_CHUNK_TOKENS .*100"),
    ("TTT_BATCH_SEQS=0", "TTT_BATCH_SEQS .*above 0"), ("RUN_ID=../x", "RUN_ID .*'../x'"), ("RUN_ID=..", "RUN_ID .*'..'"),
    ("MLP_MULT=0.001", "MLP_MULT .*0.001"), ("SEED=9223372036854775808", "SEED .*below 2"),
])
def test_check_refuses(pairs, words):
    s = load(env(pairs))
    with pytest.raises(GolfError, match=words) as caught:
        s.check(8)
    assert "\n" not in str(caught.value) and ":" in str(caught.value)


@pytest.mark.parametrize("world", [5, 7, 9, 1000])
def test_worlds_that_cannot_share_the_batch(world):
    with pytest.raises(GolfError, match=f"{world} ranks"):
        load({}).check(world)


def test_the_advice_works():
    "What a refusal says to set is accepted when set."
    for name, world, wish in (("TRAIN_BATCH_TOKENS", 8, {"TRAIN_BATCH_TOKENS": "1000000"}), ("TRAIN_BATCH_TOKENS", 5, {})):
        with pytest.raises(GolfError) as caught:
            load(wish).check(world)
        load({name: str(caught.value).split("set it to ")[1].split()[0]}).check(world)
    with pytest.raises(GolfError) as caught:
        load({"NUM_LAYERS": "4"}).check()
    load({"NUM_LAYERS": "4"} | env(str(caught.value).split("write like ")[1].split()[0])).check()


@given(st.sampled_from(RECIPES), st.dictionaries(st.sampled_from(sorted(known_names())), st.one_of(st.integers(-9, 4096).map(str), st.text(max_size=6), st.floats(allow_nan=True).map(str)), max_size=6), st.integers(1, 9))
@settings(max_examples=300, deadline=None)
def test_no_environment_makes_anything_but_a_golf_error(recipe, pairs, world):
    try:
        settings_of(find_program(recipe), pairs).check(world)
    except GolfError as error:
        assert str(error).strip()


@pytest.mark.parametrize("name", RECIPES)
def test_what_a_file_says_of_a_model_survives_json(name):
    saved = saved_settings(meta_model(find_program(name), load({"RECIPE": name})))
    again = settings_from(SavedModel, EACH_ONCE | json.loads(json.dumps(saved)))
    assert dataclasses.asdict(again) == EACH_ONCE | saved
    words = published_words(find_program(name).Settings)
    assert (again.plan, again.skip_gate) == (words["PLAN"], words.get("SKIP_GATE", "one"))
    found = settings_from(SavedModel, EACH_ONCE | saved | {"mlp_mult": 3}).mlp_mult
    assert found == 3.0 and type(found) is float


@pytest.mark.parametrize("change", [{"num_layers": "11"}, {"num_layers": 11.0}, {"num_layers": True}, {"num_layers": 0}, {"ln_scale": 1}, {"extra": 1}, {"plan": None}, {"plan": "x"}, {"num_heads": 7}, {"train_seq_len": 0}, None])
def test_damaged_model_settings_are_refused(change):
    good = EACH_ONCE | saved_settings(meta_model(find_program("pr549"), load({})))
    bad = {**good, **change} if change is not None else {k: v for k, v in good.items() if k != "vocab_size"}
    with pytest.raises(GolfError):
        settings_from(SavedModel, bad)
    with pytest.raises(GolfError):
        settings_from(SavedModel, [good])


ODD = ["0", "-1", "1", "2", str(2**31 - 1), str(2**31), str(2**63 - 1), "1e308", "1e36", "nan", "inf", "1e-300", "", "word", "0.5"]
SMALL = {"NUM_LAYERS": "2", "MODEL_DIM": "32", "NUM_HEADS": "2", "NUM_KV_HEADS": "1", "VOCAB_SIZE": "64", "VE_LAYERS": "1", "BIGRAM_VOCAB_SIZE": "64", "BIGRAM_DIM": "8", "VE_DIM": "8", "TRAIN_SEQ_LEN": "64",
         "TRAIN_BATCH_TOKENS": "1024", "EVAL_SEQ_LEN": "64", "EVAL_STRIDE": "32", "LOOP_START": "0", "LOOP_END": "0", "PARALLEL_START_LAYER": "1"}
PROGRAMS = [own_program("golf_more"), *map(find_program, ("pr2135", "golf", "pr1060", "pr549"))]
HOME = {name.upper(): program for program in PROGRAMS for name in setting_specs(program)}  # a setting -> the last that has it


def test_every_setting_has_a_home():
    assert set(HOME) >= {name.upper() for name in SPECS}


@pytest.mark.parametrize("name", HOME)
def test_an_odd_value_is_refused_in_a_sentence_or_can_be_built(name):
    "Built without memory, if it is accepted as it is read, checked, and held against the machine's memory."
    for text in ODD:
        try:
            s = settings_of(HOME[name], {**SMALL, name: text})
            s.check()
            check_memory(s, Ranks())
        except GolfError as error:
            assert ": " in str(error) and "\n" not in str(error)
            continue
        if name.lower() in {f.name for f in dataclasses.fields(SavedModel)}:
            meta_model(HOME[name], s)
        numbers = [v for v in dataclasses.astuple(s) if type(v) is float]
        assert all(torch.tensor(v).isfinite() and bool(torch.tensor(v)) == bool(v) for v in numbers), (name, text)


@pytest.mark.parametrize("pairs, words", [
    ("WARMUP_STEPS=9223372036854775807", "WARMUP_STEPS .*10000"), ("TTT_EPOCHS=2147483647", "TTT_EPOCHS .*10000"), ("RECIPE=pr1060 GPTQ_CALIB_SAMPLES=9223372036854775807", "GPTQ_CALIB_SAMPLES .*10000"), ("MUON_BACKEND_STEPS=2147483647", "MUON_BACKEND_STEPS .*10000"), ("MUON_WD=1e308", "MUON_WD .*float32"),
    ("QK_GAIN_INIT=1e308", "QK_GAIN_INIT .*float32"), ("ADAM_EPS=1e-300", "ADAM_EPS .*float32"), ("BETA2=0.99999999999", "BETA2 .*float32"), ("NUM_LAYERS=2147483647", "NUM_LAYERS .*10000"), ("BIGRAM_VOCAB_SIZE=9223372036854775807", "BIGRAM_VOCAB_SIZE .*float32"), ("BIGRAM_DIM=2147483647", "memory.*GiB"),
    ("BIGRAM_VOCAB_SIZE=2147483647", "memory.*GiB"), ("VE_DIM=2147483647", "memory.*GiB"), ("MLP_MULT=1e36", "memory.*GiB"), ("TRAIN_BATCH_TOKENS=2097152000", "memory.*GiB")])
def test_a_run_refuses_what_no_machine_can_hold_before_it_builds_anything(pairs, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(GolfError, match=words):
        preflight(load({**SMALL, **env(pairs)}), Ranks())
    assert not [*tmp_path.iterdir()]

"""Recipes as programs: their numbers and words are the recipes', published command lines run, and other words are refused."""
from dataclasses import fields
from importlib import import_module

import pytest
from oracle.pack import oracle_scripts
from test_settings import PR549, PR1060, env
from tiny import loaded

from golfnb.model.engine import Ranks
from golfnb.recipes import difference, figures, program_text
from golfnb.tools.guard import check_memory
from golfnb.settings import NOT_BUILT, PUBLISHED, GolfError, one_spelling, published_words, read_settings
from golfnb.tools.programs import RECIPES

PROGRAMS = {name: import_module(f"golfnb.recipes.{name}") for name in RECIPES}
each = pytest.mark.parametrize("name", RECIPES)


def settings_of(name: str, given: dict[str, str] | None = None):
    program = PROGRAMS[name]
    return read_settings(program.Settings, program.OWN, given or {})


def words_of(name: str) -> dict[str, str]:
    return published_words(PROGRAMS[name].Settings)


@pytest.mark.parametrize("name", sorted(oracle_scripts().keys() & set(RECIPES)))
def test_numbers_and_words_are_those_of_the_recipe(name):
    oracle = loaded(oracle_scripts()[name], f"oracle_{name}")
    s, theirs = settings_of(name), oracle.load_config({})
    known = {spec.name for spec in fields(theirs)}
    assert {spec.name for spec in fields(s)} - known <= {"late_qat_threshold"}  # folded away where it does nothing
    for spec in fields(s):
        if spec.name in known:
            assert getattr(s, spec.name) == getattr(theirs, spec.name), spec.name
    for word, value in words_of(name).items():
        if word not in ("EMA_ENABLED", "LATE_QAT"):
            found = getattr(theirs, word.lower())
            assert one_spelling(str(found)) == value, word
    assert s.train_cap_ms == theirs.train_cap_ms
    for world in (1, 2, 4, 8):
        s.check(world)


def test_a_recipe_that_calibrates_keeps_time_back():
    assert settings_of("pr2135").train_cap_ms == 592_000 < settings_of("golf").train_cap_ms
    with pytest.raises(GolfError, match="GPTQ_RESERVE_MS"):
        settings_of("pr2135", {"MAX_WALLCLOCK_SECONDS": "8"}).check(8)
    assert settings_of("pr2135", {"MAX_WALLCLOCK_SECONDS": "0"}).train_cap_ms == 0


def test_of_each_word_a_recipe_is_named_that_does_it():
    for word, values in PUBLISHED.items():
        for value, name in values.items():
            own = {spec.name.upper(): one_spelling(str(getattr(settings_of(name), spec.name))) for spec in fields(settings_of(name))}
            assert (own | words_of(name))[word] == value, (word, value, name)


@each
def test_a_word_of_a_recipe_is_one_of_the_field_and_no_setting(name):
    assert words_of(name).keys() <= PUBLISHED.keys() - {spec.name.upper() for spec in fields(settings_of(name))}


@each
def test_a_word_is_accepted_where_it_is_true_and_refused_elsewhere(name):
    words = words_of(name)
    assert settings_of(name, {"RECIPE": name, **words}) == settings_of(name)
    for word, true in words.items():
        for other, doer in {**PUBLISHED[word], "nonsense": ""}.items():
            if other == true:
                continue
            advice = f"recipe {doer}" if doer else "no recipe"
            with pytest.raises(GolfError, match=f"^{word} .*{true} .*{name}, .*'{other}'.*{advice}") as e:
                settings_of(name, {word: other})
            assert "\n" not in str(e.value)


def test_one_number_has_many_spellings_and_other_recipes_are_refused():
    assert settings_of("golf", {"QAT_BANKS": "true", "SCALE_FLOOR": "0.0", "LOADER": " coprime "}) == settings_of("golf")
    with pytest.raises(GolfError, match="RECIPE .*pr549 .*'golf'"):
        settings_of("pr549", {"RECIPE": "golf"})
    for given, words in (({"QAT_ENABLED": "1"}, "QAT_ENABLED .*0"), ({"HEAD_LR": "x"}, "HEAD_LR .*number"), ({"RESUME": "1"}, "golfnb.tools.checkpoint"),
                         ({"NUM_LAYERS": "x"}, "NUM_LAYERS .*whole number")):
        with pytest.raises(GolfError, match=words):
            settings_of("pr549", given)
    assert settings_of("pr549", {**{n: f"{v:g}" for n, v in NOT_BUILT.items()}, "RESUME": "0", "PATH": "/bin"}) == settings_of("pr549")


def test_published_command_lines_say_what_their_program_does():
    s = settings_of("pr549", env(PR549))
    assert s == settings_of("pr549")
    s.check(8)
    s = settings_of("pr1060", env(PR1060))
    s.check(8)
    assert (s.bigram_vocab_size, s.bigram_dim, s.xsa_last_n, s.gptq_reserve_ms) == (2816, 112, 11, 14000)
    with pytest.raises(GolfError, match="USE_GPTQ .*0 .*pr549, .*'1'.*recipe pr1060"):
        settings_of("pr549", env(PR1060))
    assert (s.data_path, s.tokenizer_path, s.train_cap_ms) == ("/d", "/t", 586_000)
    with pytest.raises(GolfError, match="GPTQ_RESERVE_MS"):
        settings_of("pr1060", {"MAX_WALLCLOCK_SECONDS": "14"}).check(8)
    assert settings_of("pr1060", {"MAX_WALLCLOCK_SECONDS": "0"}).train_cap_ms == 0


@pytest.mark.parametrize("name, wrong, words", [
    ("pr399", {"EVAL_STRIDE": "4096"}, "EVAL_STRIDE"), ("pr549", {"TTT_CHUNK_TOKENS": "100"}, "TTT_CHUNK_TOKENS"),
    ("pr726", {"NUM_HEADS": "7"}, "MODEL_DIM .*NUM_HEADS"), ("golf", {"RUN_ID": "a/b"}, "RUN_ID"),
    ("demo", {"VE_LAYERS": "9"}, "VE_LAYERS"), ("demo", {"TRAIN_BATCH_TOKENS": "1000"}, "TRAIN_BATCH_TOKENS")])
def test_every_group_of_a_program_is_checked(name, wrong, words):
    with pytest.raises(GolfError, match=words):
        settings_of(name, wrong).check(1)


def test_sizes_beyond_memory_are_refused():
    with pytest.raises(GolfError, match="memory.*GiB"):
        check_memory(settings_of("pr549", {"VOCAB_SIZE": "65536", "MODEL_DIM": "2097152", "MLP_MULT": "1000"}), Ranks())


def test_a_page_tells_what_differs_and_what_was_measured(tmp_path):
    changed = [line for line in difference("demo", "golf").splitlines() if line.startswith(("+", "-")) and not line.startswith(("+++", "---"))]
    assert changed[0].startswith('-"""') and any("OWN" in line for line in changed)
    assert not [line for line in program_text("golf") if line.startswith(("# %%", "__all__")) or line.endswith("'main']")]
    (tmp_path / "published.json").write_text('{"facts": {"rows": [{"run": "PR #1", "bpb": [1.5, 2.5], "steps": [10], "bytes": [], "how": "sliding window"}]}}')
    assert "| published, PR #1 | 8 | 10 | 2.0000 |  | not stated |\n| golfnb | | | not run | | |" in figures("golf", "PR #1", tmp_path)
    (tmp_path / "a.json").write_text('{"facts": {"recipe": "golf", "world": 2, "steps": 1000, "sliding_bpb": 1.25, "total_bytes": 5000}}')
    assert figures("golf", "", tmp_path).splitlines()[2:] == ["| golfnb, `a` | 2 | 1,000 | 1.2500 |  | 5,000 |"]

"""Every recipe, from package, script and program, goes on giving the numbers of the oracle's script.

Each step loss and each score is equal as a float.
"""
import ast
import base64
import bz2
import re
import types
from functools import cache
from importlib import import_module

import pytest
from oracle.compare import (CASES, FORMS, ROOM, STEPS, WORDS, differences, forms_of, recipe_of, script_of,
                            settings_of, summary_of, verdicts, write_script)
from oracle.pack import oracle_scripts
from script_checks import unreached
from tiny import loaded, tiny_data

from golfnb import config, program
from golfnb.parallel_muon import Ranks
from golfnb.run import open_run
from golfnb.settings import read_settings
from golfnb.tools.launcher import minify, pack_script


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    "A folder, and the settings that point at the data in it."
    root = tmp_path_factory.mktemp("oracle")
    return root, tiny_data(root)


@cache
def script_module(case: str) -> types.ModuleType:
    return loaded(script_of(case), f"script_{case}")


def program_of(case: str) -> types.SimpleNamespace:
    "A recipe's program, as the other forms are called."
    module = import_module(f"golfnb.recipes.{case}")

    def load_config(env: dict[str, str]):
        return read_settings(module.Settings, module.OWN, module.WORDS, env)

    def run(settings) -> dict:
        return module.main(open_run(settings, Ranks()))

    return types.SimpleNamespace(run=run, load_config=load_config)


@pytest.mark.parametrize("case", CASES)
def test_package_script_and_program_give_the_oracles_numbers(case, place, monkeypatch):
    "In one process; no code is counted, so all have the same room for the weights."
    root, data = place
    monkeypatch.chdir(root)
    programs = {
        "oracle": loaded(oracle_scripts()[case], f"oracle_{case}"),
        "package": types.SimpleNamespace(run=program.run, load_config=config.load_config),
        "script": script_module(case)}
    if "program" in forms_of(case):
        programs["program"] = program_of(case)
    found = {}
    for form, made in programs.items():
        settings = settings_of(case) | data | {"RUN_ID": f"{case}-{form}"}
        found[form] = made.run(made.load_config(settings))
    wanted = found.pop("oracle")
    assert len(wanted["losses"]) == STEPS and len(set(wanted["losses"])) == STEPS
    assert ("ttt_bpb" in wanted) == (case not in ("pr399", "pr1060"))
    if case in ROOM:
        assert 0.9 * ROOM[case] < wanted["artifact_bytes"] <= ROOM[case], "the budget binds"
    for form in found:
        assert differences(wanted, found[form]) == [], form


@pytest.mark.parametrize("case, form", [("pr549", "script"), ("golf", "packed"), ("demo", "program")])
def test_a_script_or_program_gives_the_oracles_numbers_on_two_ranks(case, form, place):
    root, data = place
    wanted = summary_of(write_script("oracle", case, root), case, 2, data)
    script = write_script(form, case, root)
    found = summary_of(script, case, 2, data)
    assert wanted["world"] == 2 and found["code_bytes"] == script.stat().st_size
    assert differences(wanted, found) == []


def test_a_difference_in_the_last_bit_is_found():
    wanted = {"losses": [6.0, 5.5], "raw_bpb": 2.5, "ttt_bpb": 2.25}
    next_float = wanted | {"losses": [6.0, 5.500000000000001]}
    one_step_less = wanted | {"losses": [6.0]}
    no_ttt = {"losses": [6.0, 5.5], "raw_bpb": 2.5000000000000004}
    assert differences(wanted, dict(wanted)) == []
    assert differences(wanted, next_float) == [
        "the loss of step 2 is 5.500000000000001, the oracle's 5.5"]
    assert differences(wanted, one_step_less) == ["the loss of step 2 is None, the oracle's 5.5"]
    assert differences(wanted, no_ttt) == [
        "raw_bpb is 2.5000000000000004, the oracle's 2.5", "ttt_bpb is None, the oracle's 2.25"]


def test_the_table_of_all_forms_has_the_first_difference_and_what_failed():
    jobs = [("golf", 1, form) for form in FORMS] + [("demo", 2, form) for form in FORMS[:2]]
    wanted = {"losses": [6.0, 5.5], "raw_bpb": 2.5}
    other = wanted | {"losses": [6.0, 5.25], "raw_bpb": 2.0}
    golf = [wanted, dict(wanted), other, RuntimeError("no disk"), dict(wanted)]
    demo = [RuntimeError("no oracle"), wanted]
    assert [row[2:] for row in verdicts(jobs, iter(golf + demo))] == [
        ("package", 2, "equal"),
        ("script", 2, "the loss of step 2 is 5.25, the oracle's 5.5"),
        ("packed", 0, "failed: no disk"),
        ("program", 2, "equal"),
        ("package", 0, "the oracle's run failed: no oracle")]


@pytest.mark.parametrize("case", CASES)
def test_a_script_holds_what_its_run_reaches_and_packs_into_the_same_program(case, monkeypatch):
    text = script_of(case)
    assert max(map(len, text.splitlines())) <= 110 and unreached(text) == []
    small = minify(text)
    monkeypatch.setattr("golfnb.tools.launcher.minify", {text: small}.__getitem__)
    packed = re.search(r'b85decode\("(.*)"\)', pack_script(text))[1]
    unpacked = bz2.decompress(base64.b85decode(packed))
    assert ast.dump(ast.parse(unpacked)) == ast.dump(ast.parse(small))


@pytest.mark.parametrize("case", CASES)
def test_a_fixed_setting_is_accepted_with_its_own_value_and_refused_with_another(case):
    recipe, script = recipe_of(case), script_module(case)
    cfg = config.load_config({"RECIPE": recipe, **WORDS.get(case, {})})
    own = {"RECIPE": recipe, "LOADER": cfg.loader, "CLIP": cfg.clip}
    assert script.load_config(own).loader == cfg.loader
    other = next(word for word in ("coprime", "sequential") if word != cfg.loader)
    sentence = (f"LOADER is fixed to {cfg.loader} .* found {other}: "
                f"make that script with golfnb script --recipe {recipe}.* LOADER={other}")
    with pytest.raises(script.GolfError, match=sentence) as e:
        script.load_config({"LOADER": other})
    assert "\n" not in str(e.value)
    with pytest.raises(script.GolfError, match="RECIPE is fixed"):
        script.load_config({"RECIPE": "other"})

"""Every recipe, as program and as script, goes on giving the numbers of the oracle's script.

Each step loss and each score is equal as a float.
"""
import types

import pytest
from oracle.compare import (CASES, FORMS, ROOM, STEPS, WORDS, differences, program_file, recipe_of, script_of,
                            settings_of, summary_of, verdicts, write_script)
from oracle.pack import oracle_scripts
from tiny import forked_ranks, loaded, tiny_data

from golfnb.model.engine import Ranks
from golfnb.run.run import open_run
from golfnb.settings import read_settings
from golfnb.tools.checkpoint import load_program
from golfnb.tools.programs import recipe_program


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    "A folder, and the settings that point at the data in it."
    root = tmp_path_factory.mktemp("oracle")
    return root, tiny_data(root)


def numbers_of(module: types.ModuleType, settings: dict[str, str]) -> dict:
    "What a program's module, or its script's, comes to."
    s = getattr(module, "read_settings", read_settings)(module.Settings, module.OWN, settings)
    run = getattr(module, "open_run", open_run)(s, getattr(module, "Ranks", Ranks)())
    return module.main(run)


@pytest.mark.parametrize("case", CASES)
def test_program_and_script_give_the_oracles_numbers(case, place, monkeypatch):
    "In one process; no code is counted, so all have the same room for the weights."
    root, data = place
    monkeypatch.chdir(root)
    settings = settings_of(case) | data
    oracle = loaded(oracle_scripts()[case], f"oracle_{case}")
    wanted = oracle.run(oracle.load_config(settings | {"RUN_ID": f"{case}-oracle"}))
    assert len(wanted["losses"]) == STEPS and len(set(wanted["losses"])) == STEPS
    assert ("ttt_bpb" in wanted) == (case not in ("pr399", "pr1060"))
    if case in ROOM:
        assert 0.9 * ROOM[case] < wanted["artifact_bytes"] <= ROOM[case], "the budget binds"
    settings = {name: value for name, value in settings.items() if name not in WORDS.get(case, {})}
    program = recipe_program(case) if case == recipe_of(case) else load_program(program_file(case))
    forms = {"program": program, "script": loaded(script_of(case), f"script_{case}")}
    for form, module in forms.items():
        found = numbers_of(module, settings | {"RUN_ID": f"{case}-{form}"})
        assert differences(wanted, found) == [], form


@pytest.mark.parametrize("case, form", [("pr549", "packed"), ("golf", "program")])
def test_a_script_or_program_gives_the_oracles_numbers_on_two_ranks(case, form, place):
    root, data = place
    wanted = summary_of(write_script("oracle", case, root), case, 2, data, forked_ranks)
    script = write_script(form, case, root)
    found = summary_of(script, case, 2, data, forked_ranks)
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
    golf = [wanted, dict(wanted), other, RuntimeError("no disk")]
    demo = [RuntimeError("no oracle"), wanted]
    assert [row[2:] for row in verdicts(jobs, iter(golf + demo))] == [
        ("program", 2, "equal"),
        ("script", 2, "the loss of step 2 is 5.25, the oracle's 5.5"),
        ("packed", 0, "failed: no disk"),
        ("program", 0, "the oracle's run failed: no oracle")]

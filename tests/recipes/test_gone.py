"""Recipes that golfnb has no more: what they made is sampled, scored and read; what needs their program says that it is gone."""
import json
import re
from dataclasses import dataclass

import pytest
from tiny import TINY, tiny_data

from golfnb.file.artifact import Quick, load_model
from golfnb.file.quantize import QuantSettings
from golfnb.file.trellis_file import COLUMNS, dequantize_trellis
from golfnb.model.engine import Ranks
from golfnb.recipes import golf
from golfnb.run.run import fit_trellis_to_budget, open_run, sensitivities_in_time
from golfnb.settings import GolfError
from golfnb.text.loader import CoprimeSampler, grad_accum
from golfnb.tools.cli import main_cli
from golfnb.tools.programs import GONE, RECIPES, copy_name, file_program, find_program, program_source, settings_of

WIDE = dict(recipe="wide", mlp_mult=4, bigram_vocab_size=0, ve_enabled=False, xsa_last_n=11, qk_gain_init=5.0, matrix_lr=0.035, muon_momentum=0.97, gptq_calib_samples=2)


@dataclass
class WideSettings(golf.Settings, QuantSettings):
    "As wide had them, as far as its files say."


def pack(run, p, averaged: dict) -> bytes:
    "As wide packed."
    s, ranks = run.settings, run.ranks
    order = CoprimeSampler(run.train_paths, ranks.rank, ranks.world, 8, s.train_seq_len, s.seed, grad_accum(ranks.world))
    with run.phase("packing"):
        packed = fit_trellis_to_budget(run, averaged, sensitivities_in_time(run, p.model, order), p.model, Quick())
        return run.share_artifact(packed, p.model, Quick())


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    "A run that says of itself that its recipe is wide, with the model and the file of wide."
    root = tmp_path_factory.mktemp("gone")
    (root / "data").mkdir()
    given = {name: value for name, value in TINY.items() if not name.startswith(("BIGRAM", "VE_"))} | tiny_data(root / "data")
    with pytest.MonkeyPatch.context() as patch:
        for name, part in {"OWN": WIDE, "Settings": WideSettings, "CODEC": Quick(), "pack": pack, "dequantize_state": dequantize_trellis}.items():
            patch.setattr(golf, name, part)
        golf.main(open_run(settings_of(golf, given | {"RECIPE": "wide", "SMALL_TENSOR": "2000", "MAX_WALLCLOCK_SECONDS": "0", "RUN_ID": "wide", "RUNS_DIR": str(root)}), Ranks(), b"#" * 100, quiet=True))
    return root / "wide"


def said(capsys, *words) -> tuple[int, str, str]:
    "Status of a command, what it printed and what it said."
    capsys.readouterr()
    status = main_cli([*map(str, words)])
    return status, *capsys.readouterr()


def test_what_they_made_is_sampled_scored_and_read(run, capsys):
    summary = json.loads((run / "summary.json").read_text())
    assert summary["recipe"] == summary["config"]["recipe"] == "wide" not in RECIPES
    model, meta, _ = load_model(run / "artifact.golf")
    assert meta["recipe"] == "wide" and model.cfg.mlp_mult == 4
    status, out, err = said(capsys, "score", run, "--ttt")
    assert status == 0, err
    scores = [float(bpb) for bpb in re.findall(r"val_bpb:(\S+)", out)]
    assert scores == pytest.approx([summary["sliding_bpb"], summary["ttt_bpb"]], abs=1e-6)
    for words in (("sample", run, "Return the", "--tokens", 4), ("artifact", "inspect", run / "artifact.golf"), ("report", run),
                  ("score", run, "--adapters", "TTT_CHUNK_SIZE=16", "TTT_BATCH_SIZE=4", "TTT_LORA_RANK=4")):
        status, out, err = said(capsys, *words)
        assert status == 0, err
    status, out, _ = said(capsys, "artifact", "inspect", run / "artifact.golf")
    assert "trellis matrices" in out


def test_what_needs_their_program_says_that_it_is_gone(run, tmp_path, capsys):
    status, _, err = said(capsys, "quantize", run, "-o", tmp_path / "again.golf")
    assert status and re.fullmatch(r"golfnb: RECIPE must be one of demo, .*, found wide, whose program golfnb has no more: .*pr2135.*\n", err), err
    assert not (tmp_path / "again.golf").exists()
    for name in GONE:
        assert name not in RECIPES and GONE[name] in RECIPES
        for ask in (find_program, program_source):
            with pytest.raises(GolfError, match=f"found {name}, whose program golfnb has no more"):
                ask(name)


@pytest.mark.parametrize("name", GONE)
def test_a_program_of_ones_own_has_another_name(tmp_path, name):
    "Else its files would be taken for theirs."
    assert copy_name(name) == "mine"
    (tmp_path / "own.py").write_text(program_source("golf").replace('recipe="golf"', f'recipe="{name}"', 1))
    with pytest.raises(GolfError, match="a name in OWN.* not that of a recipe of golfnb"):
        file_program(tmp_path / "own.py")

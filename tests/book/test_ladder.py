"""The book's text, and the ladder of bits: every rung runs ten steps; what is recorded is what the files say."""
import difflib
import hashlib
import json
import math
import re
import runpy
from pathlib import Path

import matplotlib.pyplot as plt
import pytest
import torch

import golfnb
from golfnb.tools.lab import copy_notebooks
from golfnb.tools.results import read_result

ROOT = Path(__file__).resolve().parents[2]
PROSE = Path(golfnb.__file__).parent / "prose"
LADDER = ROOT / "nbs" / "ladder"
FIRST, *RUNGS = sorted(LADDER.glob("[0-9][0-9]_*.py"))


def stories(split: str) -> dict[str, str]:
    return {path.name: path.read_bytes().decode("utf-8") for path in sorted((PROSE / split).glob("*.txt"))}


def shingles(text: str, words: int) -> set[str]:
    "All runs of so many words, in small letters and without marks."
    found = re.findall(r"\w+", text.lower())
    return {" ".join(found[i:i + words]) for i in range(len(found) - words + 1)}


def test_the_text_is_what_its_file_says():
    about = json.loads(PROSE.with_suffix(".json").read_text())
    files = {f"{path.parent.name}/{path.name}": path.read_bytes() for path in PROSE.glob("*/*.txt")}
    assert {name: {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()} for name, data in files.items()} \
        == {name: {"bytes": row["bytes"], "sha256": row["sha256"]} for name, row in about["files"].items()}
    assert {row["source"] for row in about["files"].values()} == set(about["sources"])
    assert "public domain" in about["licence"] and "CC0" in about["licence"]


def test_the_text_is_large_enough_for_a_score_and_small_enough_for_a_repository():
    sizes = {split: sum(len(text.encode()) for text in stories(split).values()) for split in ("train", "validation")}
    assert sum(sizes.values()) <= 1_500_000 and sizes["train"] >= 1_300_000 and sizes["validation"] >= 100_000


def test_the_text_is_plain():
    for split in ("train", "validation"):
        for name, text in stories(split).items():
            assert not re.search(r"[<>“”‘’\u00a0\u2060\u200a\r\t]|&\w+;|  ", text), name
            assert text.endswith("\n") and not text.endswith("\n\n") and "\n\n\n" not in text, name


@pytest.mark.parametrize("words, share", [(8, 0.001), (5, 0.02)])
def test_the_validation_text_has_no_near_duplicate_in_the_training_text(words, share):
    train = set().union(*(shingles(text, words) for text in stories("train").values()))
    for name, text in stories("validation").items():
        found = shingles(text, words)
        assert len(found & train) <= share * len(found), name


def test_a_near_duplicate_would_be_found():
    known = next(iter(stories("train").values()))
    again = known[:2000].replace(",", ";").upper()
    assert len(shingles(again, 8) & shingles(known, 8)) > 0.9 * len(shingles(again, 8))


@pytest.fixture(scope="module")
def ten_steps() -> dict[str, dict]:
    "The row of each rung after ten steps, on the beginning of both texts."
    return {rung.stem: short_climb(rung) for rung in RUNGS}


def short_climb(rung: Path) -> dict:
    climb = runpy.run_path(str(rung))["climb"]
    whole = climb.__globals__["read"]
    climb.__globals__["read"] = lambda split: whole(split)[:10_000 if split == "validation" else 300_000]
    return climb(0, 10)


@pytest.mark.parametrize("rung", [rung.stem for rung in RUNGS])
def test_ten_steps_of_a_rung_learn(ten_steps, rung):
    row = ten_steps[rung]
    assert set(row) == {"bits per byte", "ms a step", "bytes"}
    assert 2 < row["bits per byte"] < 4 and row["ms a step"] > 0


def test_a_bank_changes_no_loss(ten_steps):
    assert math.isclose(ten_steps["04_muon"]["bits per byte"], ten_steps["05_banks"]["bits per byte"], abs_tol=1e-3)


def test_the_file_is_smaller_and_hardly_worse(ten_steps):
    before, after = ten_steps["06_schedule"], ten_steps["07_file"]
    assert after["bytes"] < 0.25 * before["bytes"] and abs(after["bits per byte"] - before["bits per byte"]) < 0.02


def test_adapting_scores_before_it_learns():
    "The first group of windows is scored by the weights as they were, so it costs what it costs without adapting."
    program = runpy.run_path(str(LADDER / "09_adapting.py"))
    torch.manual_seed(0)
    n = program["ADAPT_WINDOWS"] * program["STRIDE"] + program["T"] - program["STRIDE"]
    ids = torch.randint(0, 1024, (n + 1,))
    model = program["Model"]()
    before = runpy.run_path(str(LADDER / "08_sliding.py"))["bits_of"](model, ids)
    momenta = [torch.zeros_like(bank) for bank in model.banks]
    adam = torch.optim.AdamW([model.embed], lr=0.01)
    assert math.isclose(program["bits_of"](model, ids, momenta, adam), before, rel_tol=1e-5)


def test_a_text_comes_back_from_its_tokens():
    program = runpy.run_path(str(LADDER / "02_tokens.py"))
    sp = program["train_tokenizer"](program["read"]("train"))
    text = program["read"]("validation")
    assert sp.decode(sp.encode(text)) == text


def test_windows_count_every_token_once():
    "A model that knows nothing spends the same bits on every token."
    for name in ("02_tokens", "08_sliding"):
        program = runpy.run_path(str(LADDER / f"{name}.py"))
        for n in (128, 129, 160, 1000):
            bits = program["bits_of"](lambda ids: torch.zeros(*ids.shape, 1024), torch.zeros(n + 1, dtype=torch.long))
            assert math.isclose(bits, 10 * n, rel_tol=1e-5), (name, n)


@pytest.mark.parametrize("rung", RUNGS, ids=lambda rung: rung.stem)
def test_a_rung_is_a_program_for_a_whiteboard(rung):
    lines = rung.read_text().splitlines()
    assert 60 <= len(lines) <= 200 and max(map(len, lines)) <= 120
    assert lines[0].startswith(f'"""Rung {int(rung.stem[:2])}, ')


@pytest.mark.parametrize("old, new", list(zip(RUNGS, RUNGS[1:], strict=False)), ids=lambda rung: rung.stem)
def test_a_rung_changes_few_lines(old, new):
    diff = difflib.unified_diff(old.read_text().splitlines(), new.read_text().splitlines(), n=0, lineterm="")
    assert sum(line[0] in "+-" for line in diff) <= 80


def test_the_page_shows_a_readers_rung_before_and_after_it_is_recorded(tmp_path, monkeypatch, capsys):
    copy_notebooks(tmp_path)
    monkeypatch.chdir(tmp_path)
    Path("ladder/10_mine.py").write_text("def climb(seed, steps):\n    return {'bits per byte': 2.5, 'ms a step': 1.0}\n")
    cells = ["".join(cell["source"]) for cell in json.loads(Path("ladder.ipynb").read_text())["cells"] if cell["cell_type"] == "code"]
    shown = [cell.replace('rung = "04_muon"', 'rung = "10_mine"') for cell in cells if '"compressors"' not in cell]

    def page() -> list[str]:
        names, rows = {}, []
        for cell in shown:
            exec(cell, names)
            rows += names.get("lines", [])
        plt.close("all")
        return rows

    assert "| 10_mine | not recorded yet: `python ladder/climb.py` does it | | |" in page()
    assert "10_mine, ten steps: 2.50 bits per byte here, not recorded yet" in capsys.readouterr().out
    result = json.loads(Path("results/ladder_bits_cpu.json").read_text())
    result["samples"] |= {f"10_mine: {what}": [value] for what, value in (("bits per byte", 1.5), ("ms a step", 1.0), ("bytes", 7.0))}
    result["facts"]["ten steps"]["10_mine"] = 2.5
    Path("results/ladder_bits_cpu.json").write_text(json.dumps(result))
    assert "| 10_mine | 1.500 (one seed) | 1 | 7 |" in page()


@pytest.fixture(scope="module")
def recorded() -> dict:
    return read_result("ladder_bits_cpu", ROOT / "nbs" / "results")


def test_what_compressors_need_is_as_recorded(recorded):
    for name, bits in runpy.run_path(str(FIRST))["compressors"]().items():
        kept = recorded["samples"][f"{name}: bits per byte"][0]
        assert math.isclose(kept, bits, rel_tol=0.01), name  # versions of xz differ


def test_every_rung_is_recorded_as_it_stands(recorded):
    fingerprint = runpy.run_path(str(LADDER / "climb.py"))["fingerprint"]
    assert recorded["facts"]["programs"] == {rung.stem: fingerprint(rung) for rung in RUNGS}
    for rung in RUNGS:
        counts = {len(recorded["samples"][f"{rung.stem}: {what}"]) for what in ("bits per byte", "ms a step", "bytes")}
        assert counts == {3}  # seeds


def test_the_program_wins_from_its_second_rung_on_whatever_instructions_there_are(recorded):
    (limit,) = recorded["samples"]["primed xz: bits per byte"]
    bits = {rung.stem: recorded["samples"][f"{rung.stem}: bits per byte"] for rung in RUNGS}
    wins = [name for name, values in bits.items() if max(values) < limit]
    assert wins == [rung.stem for rung in RUNGS[1:]] and min(bits["01_first"]) > limit
    assert set(recorded["facts"]["wins with"]["02_tokens"]) == {"default", "avx2", "avx512"}
    assert all(value < limit for seeds in recorded["facts"]["wins with"]["02_tokens"].values() for value in seeds)

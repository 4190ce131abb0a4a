"""A recipe of one's own: copied, edited, trained, resumed, scored, packed, joined; and refused where it is not what made a file."""
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from unittest.mock import patch

import pytest
from forked import fork_judged
from tiny import TINY, clean_env, forked_ranks, golfnb, one_sentence, tiny_data, without_torchrun

from golfnb.tools.programs import RECIPES

WORDS = [f"{name}={value}" for name, value in TINY.items() if name != "RECIPE"]
ACTS = '''"""Parts that golfnb has not."""
import bz2
import os
import signal

import torch.nn.functional as F

from golfnb.file.artifact import Plain
from golfnb.model.golf import SigmoidSkips


def squared_gelu(z, gain):
    "Of the feed-forward layers."
    return gain * F.gelu(z).square()


class Bzip(Plain):
    "Sections in bz2."
    name = "bz2"

    def compress(self, raw, shapes):
        return self.name, bz2.compress(raw)

    def decompress(self, stored, size, shapes):
        return bz2.BZ2Decompressor().decompress(stored, size + 1)


class SlowSkips(SigmoidSkips):
    "Gates that begin nearly closed."
    start = -3.0
    word = "slow"


def stopped_if_asked(rate, step):
    "The rate; a file `stop` in the folder ends the run in a step, as its user would."
    if step == 5 and os.path.exists("stop"):
        os.kill(os.getpid(), signal.SIGTERM)
    return rate
'''
EDITS = (("from golfnb.text.loader import", "from acts import Bzip, SlowSkips, squared_gelu, stopped_if_asked\nfrom golfnb.text.loader import"), ("s.attention, skips())", "s.attention, skips(), partial(squared_gelu, gain=s.gain))"),
         ("          skips=SigmoidSkips)", "          skips=SlowSkips)"), ("import Golf, ModelSettings, SigmoidSkips, init_model", "import Golf, ModelSettings, init_model"),
         ("Muon(s.matrix_lr, s.muon_wd, orthogonalize, s.muon_backend_steps)", "BankRule(NorMuonRule(), s.matrix_lr, s.muon_wd, beta2=0.9)"),
         ("EngineSettings, Muon, Ranks", "EngineSettings, Ranks"), ("from golfnb.run.run import", "from golfnb.model.bank_rule import BankRule\nfrom golfnb.muon.rules import NorMuonRule\nfrom golfnb.run.run import"),
         ("CODEC = Best()", "CODEC = Bzip()"), ("import ArtifactSettings, Best, unpack_bytes", "import ArtifactSettings, unpack_bytes"),
         ('    "Every number of this recipe."\n', '    "Every number of this recipe."\n    rise: int = setting(3, "steps over which the rate rises: steps", bounds="> 0")\n    gain: float = setting(1.0, "of the activation: factor")\n'), ("from golfnb.score.ttt import", "from golfnb.settings import setting\nfrom golfnb.score.ttt import"),
         ("    rate = lr_schedule(t.settings, t.steps, control[0])\n", "    rate = lr_schedule(t.settings, t.steps, control[0]) * min(1.0, (t.steps + 1) / t.settings.rise)\n    rate = stopped_if_asked(rate, t.steps)\n"))


def edited(text: str) -> str:
    for old, new in EDITS:
        assert text.count(old) == 1
        text = text.replace(old, new)
    return text


def summary(run: Path) -> dict:
    return json.loads((run / "summary.json").read_text())


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    "A folder with data, a program with a second file, and a run of it; the data's settings."
    root = tmp_path_factory.mktemp("own")
    (root / "data").mkdir()
    data = [f"{name}={value}" for name, value in tiny_data(root / "data").items()]
    done = golfnb("recipe", "copy", "demo", "mine.py", cwd=root)
    assert done.returncode == 0 and "train mine.py" in done.stdout, done.stderr
    (root / "mine.py").write_text(edited((root / "mine.py").read_text()))
    (root / "acts.py").write_text(ACTS)
    done = without_torchrun("train", "mine.py", "--nproc", 1, *WORDS, *data, "RUN_ID=a", "RISE=2", "GAIN=0.5", cwd=root)
    assert done.returncode == 0 and "play runs/a --program mine.py" in done.stdout and "no report" not in done.stdout, done.stdout[-600:] + done.stderr
    return root, data


def test_its_parts_and_numbers_are_its_own(place):
    "The rate that is logged, and that starts the rounding, is the one that its own schedule gave."
    root, data = place
    steps = [json.loads(line) for line in (root / "runs/a/metrics.jsonl").read_text().splitlines()]
    rates = [event["multiplier"] for event in steps if event["event"] == "step"]
    assert rates == pytest.approx([min(1.0, (4 - step) / 2) * min(1.0, (step + 1) / 2) for step in range(4)])
    found = summary(root / "runs/a")
    assert found["config"]["rise"] == 2 and "Serialized model int6+bz2" in (root / "runs/a/train.log").read_text()
    page = (root / "runs/a/report.html").read_text()
    assert "no sampled text" not in page and "RISE" in page
    refused(golfnb("train", "mine.py", *WORDS, *data, "RISE=0", "RUN_ID=z", cwd=root), "RISE .*above 0")
    refused(golfnb("train", "mine.py", *WORDS, *data, "RAISE=2", "RUN_ID=z", cwd=root), "RAISE .*RISE")


def refused(done, words: str) -> None:
    assert done.returncode == 2 and one_sentence(done.stderr) and re.search(words, done.stderr), done.stderr


def test_the_recipes_are_listed_shown_and_copied(tmp_path):
    assert re.findall(r"(?m)^(\w+)", golfnb("recipe", "list", cwd=tmp_path).stdout) == [*RECIPES]
    shown = golfnb("recipe", "show", "pr726", cwd=tmp_path).stdout
    assert golfnb("recipe", "copy", "pr726", "b.py", cwd=tmp_path).returncode == 0
    assert (tmp_path / "b.py").read_text() == shown.replace('recipe="pr726"', 'recipe="b"')
    refused(golfnb("train", "b.py", "LOADER=sequential", cwd=tmp_path), "LOADER must be coprime in recipe b, .*recipe pr549")
    for words, said in ((("pr726", "b.py"), r"b\.py"), (("pr726", "b.txt"), r"b\.txt"), (("pr000", "c.py"), "'pr000'"), (("pr549", "golf.py"), r"'golf'.* mine\.py"), (("pr549", "a-b.py"), r"'a-b'.* a_b\.py"), (("pr549", "3x.py"), r"'3x'.* mine\.py")):
        refused(golfnb("recipe", "copy", *words, cwd=tmp_path), said)
    assert [p.name for p in tmp_path.glob("*.*")] == ["b.py"]


def test_its_file_is_scored_sampled_and_packed_again_with_its_program(place):
    "With the numbers that its run was given, also those that no recipe has: summary.json says them."
    root, _ = place
    done = golfnb("score", "runs/a", "--program", "mine.py", "--ttt", cwd=root)
    found = [float(x) for x in re.findall(r"_exact val_loss:\S+ val_bpb:(\S+)", done.stdout)]
    assert done.returncode == 0 and found == pytest.approx([summary(root / "runs/a")[f"{name}_bpb"] for name in ("sliding", "ttt")], abs=1e-5), done.stderr
    two = without_torchrun("score", "runs/a", "--program", "mine.py", "--ttt", "--nproc", 2, cwd=root)
    assert two.returncode == 0 and [float(x) for x in re.findall(r"_exact val_loss:\S+ val_bpb:(\S+)", two.stdout)] == pytest.approx(found, abs=1e-5), two.stderr
    assert " GAIN=0.5" in done.stdout and " GAIN=0.5" in two.stdout
    with patch("golfnb.tools.judge.start_process", fork_judged):
        done = golfnb("score", "runs/a", "--program", "mine.py", "--ttt", "--audit", cwd=root)
    assert "score-first training: " in done.stdout and "FAILS  score-first" not in done.stdout and "FAILS  sliding" not in done.stdout, done.stderr
    assert (root / "runs/a/artifact.audit.json").is_file()
    sampled = golfnb("sample", "runs/a", "Return", "--tokens", 4, "--program", "mine.py", cwd=root)
    assert sampled.returncode == 0 and not sampled.stderr
    shutil.copy(root / "runs/a/artifact.golf", root / "alone.golf")
    sampled = golfnb("sample", "alone.golf", "Return", "--tokens", 4, "--program", "mine.py", "--tokenizer", root / "data/tokenizer.model", cwd=root)
    assert sampled.returncode == 0 and "no summary.json of its run" in sampled.stderr
    assert golfnb("recipe", "copy", "demo", "other.py", cwd=root).returncode == 0
    for words in (("sample", "alone.golf", "Return", "--tokens", 4), ("play", "alone.golf", "--no-browser")):
        refused(golfnb(*words, "--program", "other.py", cwd=root), "must be of recipe other, .* found mine")
    done = golfnb("quantize", "runs/a", "--program", "mine.py", "-o", "again.golf", cwd=root)
    assert done.returncode == 0 and (root / "again.golf").read_bytes() == (root / "runs/a/artifact.golf").read_bytes(), done.stderr


def test_its_file_is_inspected_alone_and_exported_with_its_program(place):
    "Where its bytes are stands in the header; its codec is the program's own."
    root, _ = place
    done = golfnb("artifact", "inspect", "runs/a/artifact.golf", cwd=root)
    assert done.returncode == 0 and re.search(r"int6 weights .* tensors, .* stored as bz2 in ", done.stdout) and "room left" in done.stdout, done.stderr
    refused(golfnb("artifact", "export", "runs/a/artifact.golf", "w.safetensors", cwd=root), "codec bz2, .*--program")
    assert golfnb("artifact", "export", "runs/a/artifact.golf", "w.safetensors", "--program", "mine.py", cwd=root).returncode == 0
    refused(golfnb("artifact", "export", "runs/a/artifact.golf", "w.safetensors", "--program", "golf", cwd=root), "must be of recipe golf")


def test_it_is_opened_with_the_program_that_made_it_alone(place):
    root, _ = place
    for command in (["score", "runs/a"], ["sample", "runs/a", "x"], ["quantize", "runs/a"]):
        refused(golfnb(*command, cwd=root), "of a program of your own, mine: give its file with --program")
    (root / "other.py").write_text((root / "mine.py").read_text().replace('recipe="mine"', 'recipe="other"'))
    refused(golfnb("score", "runs/a", "--program", "other.py", cwd=root), "must be of recipe other")
    refused(golfnb("score", "runs/a", "--program", "golf", cwd=root), "must be of recipe golf")
    for name in ("mine.py", "acts.py"):
        kept = (root / name).read_text()
        (root / name).write_text(kept + "\n# one thought more\n")
        for command in (["score", "runs/a"], ["sample", "runs/a", "x"], ["quantize", "runs/a"]):
            refused(golfnb(*command, "--program", "mine.py", cwd=root), "mine.py must be as it was when it made")
        (root / name).write_text(kept)


def test_a_script_is_not_taken_for_the_program_that_it_was_made_from(place, tmp_path):
    root, _ = place
    for words in (["mine.py", "--pack"], ["--recipe", "golf"]):
        assert golfnb("script", *words, "-o", tmp_path / f"{words[-1]}.py", cwd=root).returncode == 0
    for script, name in ((root / "runs/a/train_gpt.py", r"mine\.py"), (tmp_path / "--pack.py", r"mine\.py"), (tmp_path / "golf.py", "golf")):
        for command in (["score", "runs/a", "--program", script], ["train", script], ["sample", "runs/a", "x", "--program", script]):
            refused(golfnb(*command, cwd=root), f"a script that was made from one: give {name}$")


@pytest.mark.parametrize("name, copy", [("my-recipe.py", "my_recipe.py"), ("golf.py", "mine.py"), ("new.py", "new.py")])
def test_the_copy_that_is_advised_can_be_made(tmp_path, name, copy):
    done = golfnb("train", name, cwd=tmp_path)
    refused(done, f"found none: .*golfnb recipe copy golf {copy}$")
    assert golfnb("recipe", "copy", "golf", copy, cwd=tmp_path).returncode == 0


def test_its_script_gives_the_same_losses(place):
    root, data = place
    assert golfnb("script", "mine.py", "--pack", "-o", "alone/train_gpt.py", cwd=root).returncode == 0
    settings = dict(word.split("=", 1) for word in [*WORDS, *data])
    done = forked_ranks(root / "alone" / "train_gpt.py", 1, settings | {"RUN_ID": "a", "RISE": "2", "GAIN": "0.5"}, root / "alone")
    assert done.returncode == 0, done.stderr[-2000:]
    ours, theirs = summary(root / "alone/runs/a"), summary(root / "runs/a")
    assert ours["losses"] == theirs["losses"] and ours["ttt_bpb"] == theirs["ttt_bpb"]


def test_a_run_goes_on_with_the_program_it_began_with(place):
    "It is stopped in its training; then the program is edited."
    root, data = place
    (root / "stop").touch()
    done = without_torchrun("train", "mine.py", "--nproc", 1, *WORDS, *data, "RUN_ID=b", "ITERATIONS=10", "CHECKPOINT_EVERY_S=0.05", cwd=root)
    (root / "stop").unlink()
    assert done.returncode == 5 and (root / "runs/b/progress.json").is_file() and list(root.glob("runs/b/checkpoints/step-*")), done.stderr
    for name in ("mine.py", "acts.py"):
        kept = (root / name).read_text()
        (root / name).write_text(kept + "\n# one thought more\n")
        refused(golfnb("train", "mine.py", "--resume", "runs/b", cwd=root), "mine.py must be as it was when the run began")
        (root / name).write_text(kept)
    script = root / "runs/b/train_gpt.py"
    whole = script.read_text()
    script.write_text(whole + "# edited\n")
    done = golfnb("train", "--resume", "runs/b", cwd=root)
    refused(done, "must be the script that the run began with")
    script.write_text(whole)
    done = without_torchrun("train", "mine.py", "--resume", "runs/b", cwd=root)
    assert done.returncode == 0 and summary(root / "runs/b")["steps"] == 10, done.stderr
    assert "\nresumed:" in (root / "runs/b/train.log").read_text()


BROKEN = {
    "no Python": ("def main(:\n", r"mine\.py must be a file of Python, found: .*line 1"),
    "no file": (None, "must be the file of a program, found none"),
    "an import that fails": ("import nothing_there\n", r"found ModuleNotFoundError: .*nothing_there' \(mine.py line 1\)"),
    "half a program": ("OWN = {}\n", "must define .*, found no CODEC"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_what_is_no_program_is_refused_in_a_sentence(kind, tmp_path):
    text, words = BROKEN[kind]
    if text:
        (tmp_path / "mine.py").write_text(text)
    for command in (["train", "mine.py"], ["script", "mine.py", "-o", "s.py"]):
        refused(golfnb(*command, cwd=tmp_path), words)


def test_two_programs_of_one_process_do_not_share_a_second_file(place, tmp_path):
    root, _ = place
    for folder, gain in (("a", "1.0"), ("b", "2.0")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / f"{folder}.py").write_text((root / "mine.py").read_text().replace('recipe="mine"', f'recipe="{folder}"').replace("from acts ", "from shared_acts "))
        (tmp_path / folder / "shared_acts.py").write_text(f"{ACTS}\nGAIN = {gain}\n")
    code = ("import sys; from golfnb.tools.programs import file_program\n"
            "for path in sys.argv[1:]: print(file_program(path).OWN['recipe'])")
    a, b = tmp_path / "a" / "a.py", tmp_path / "b" / "b.py"
    (a.parent / "golfnb").mkdir()
    (a.parent / "golfnb" / "model.py").touch()  # as in a checkout of golfnb
    done = subprocess.run([sys.executable, "-c", code, a, a, b], capture_output=True, text=True, env=clean_env())
    assert done.stdout.split() == ["a", "a"] and "GolfError" in done.stderr and "b/b.py must get its shared_acts.py" in done.stderr, done.stderr


def test_names_parts_and_packages_that_cannot_be(place, tmp_path, monkeypatch):
    root, data = place
    text = (root / "mine.py").read_text()
    (tmp_path / "acts.py").write_text(ACTS)
    for name, changed, words in (
            ("recipe.py", text.replace('recipe="mine"', 'recipe="golf"'), "recipe.py .*recipe='golf'"),
            ("codec.py", text.replace("CODEC = Bzip()", "CODEC = Brotli()").replace("import ArtifactSettings,", "import ArtifactSettings, Brotli,"), "brotli"),
            ("fault.py", text.replace("CODEC = Bzip()", "CODEC = type('Faulty', (Bzip,), dict(decompress=lambda *_: b''))()"), "'bz2' .*found 0 bytes"),
            ("taken.py", text.replace("CODEC = Bzip()", "CODEC = type('Faulty', (Bzip,), dict(name='lzma'))()"), "Faulty .*found 'lzma'"),
            ("whole.py", text + "\n\nimport golfnb.model.golf\n", "whole.py line .*import golfnb.model.golf"),
            ("place.py", text + "\n\nTABLE = open(__file__)\n", "place.py line .*__file__")):
        (tmp_path / name).write_text(changed)
        monkeypatch.setitem(sys.modules, "brotli", None)
        monkeypatch.delitem(sys.modules, "acts", raising=False)  # of another folder
        refused(golfnb("train", name, *WORDS, *data, "RUN_ID=c", cwd=tmp_path), words)
    assert not (tmp_path / "runs").exists()

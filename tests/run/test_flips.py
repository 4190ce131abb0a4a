"""One byte changed anywhere in the folder of a run that was stopped: it goes on to the same bytes, from an older checkpoint if need be, or is refused in a sentence.

    python tests/run/test_flips.py [COUNT [FIRST SEED]]    200 of them, if nothing else is said
"""
import random
import re
import shutil
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import pytest
from tiny import TINY, loaded, one_sentence, tiny_data, without_torchrun

from golfnb.tools.checkpoint import Keeper, open_kept
from golfnb.tools.drill import differences
from golfnb.tools.programs import recipe_program, script_text

STATES = ("training", "packed")
GOOD = ("refused", "set aside", "equal")


def stopped_runs(folder: Path) -> None:
    "In `folder`: data, a run to its end, `whole`, and its folder as a kill would have left it in its training and once it was packed."
    data = folder / "data"
    data.mkdir()
    given = TINY | tiny_data(data) | {"RUNS_DIR": folder, "RUN_ID": "whole", "ITERATIONS": 12, "TTT_ENABLED": 0, "CHECKPOINT_EVERY_S": 1e-6, "EVAL_STRIDE": 64}
    code = script_text(recipe_program("demo"))
    script = loaded(code, "script_flipped")
    (folder / "whole").mkdir()
    (folder / "whole" / "train_gpt.py").write_text(code)
    shutil.copy(data / "tokenizer.model", folder / "whole")
    run = open_kept(script, {name: str(value) for name, value in given.items()}, script.Ranks(), code.encode(), quiet=True)
    keeper = next(extra for extra in run.extras if isinstance(extra, Keeper))
    after_step, scored = keeper.after_step, run.scored

    def copied_in_training(t):
        after_step(t)
        keeper.wait()
        if t.steps == 9:
            shutil.copytree(run.folder, folder / "training")

    def copied_once_packed(label, name, *rest, **how):
        if name == "sliding":
            shutil.copytree(run.folder, folder / "packed")
        return scored(label, name, *rest, **how)

    keeper.after_step, run.scored = copied_in_training, copied_once_packed
    script.main(run)


def flipped(state: Path, folder: Path, rng: random.Random) -> str:
    "A copy of a run's folder with another byte somewhere; where."
    shutil.copytree(state, folder)
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.stat().st_size)
    path = rng.choice(files)
    data = bytearray(path.read_bytes())
    at = rng.randrange(len(data))
    before = data[at]
    data[at] = rng.choice([byte for byte in range(256) if byte != before])
    path.write_bytes(data)
    return f"{state.name}: byte {at} of {path.relative_to(folder)}, {before} -> {data[at]}"


def outcome(whole: Path, folder: Path) -> str:
    "What becomes of a run that goes on; one of GOOD, or what is wrong with it."
    done = without_torchrun("train", "--resume", folder, cwd=folder.parent)
    if "Traceback" in done.stderr:
        return f"traceback: {done.stderr}"
    if done.returncode:
        return "refused" if one_sentence(done.stderr) else f"no sentence: {done.returncode} {done.stderr}"
    different = [name for name in differences(whole, folder) if name not in ("train_ms", "step_ms") and not name.startswith("damaged-")]
    if different:
        return f"another run: {different}"
    return "set aside" if "set aside as" in done.stdout else "equal"


def flip(folder: Path, seed: int) -> tuple[str, str]:
    "What was changed by a seed, and what came of it."
    rng = random.Random(seed)
    copy = folder / f"x{seed}"
    where = flipped(folder / STATES[seed % 2], copy, rng)
    found = outcome(folder / "whole", copy)
    shutil.rmtree(copy)
    return where, found


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("flips")
    stopped_runs(folder)
    return folder


@pytest.mark.parametrize("state", STATES)
def test_an_untouched_run_goes_on(runs, state):
    shutil.copytree(runs / state, runs / f"as-{state}")
    assert outcome(runs / "whole", runs / f"as-{state}") == "equal"


@pytest.mark.parametrize("seed", range(8))
def test_a_changed_byte_makes_no_other_run(runs, seed):
    where, found = flip(runs, seed)
    assert found in GOOD, f"{where}: {found}"


@pytest.mark.parametrize("name, words", [("tokenizer.model", r"tokenizer\.model must be a file with hash .* found a file with hash "), ("train_gpt.py", "must be the script"), ("progress.json", "progress.json must be as it was written")])
def test_what_a_run_reads_again_is_refused_if_it_is_changed(runs, name, words):
    copy = shutil.copytree(runs / "training", runs / f"changed-{name}")
    data = (copy / name).read_bytes()
    (copy / name).write_bytes(data[:-9] + bytes([data[-9] ^ 1]) + data[-8:])
    done = without_torchrun("train", "--resume", copy.name, cwd=runs)
    assert done.returncode == 2 and one_sentence(done.stderr) and re.search(words, done.stderr), done.stderr


def main(count: int = 200, first: int = 0) -> int:
    begun, tally = time.monotonic(), Counter()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name).resolve()
        stopped_runs(folder)
        for seed in range(first, first + count):
            where, found = flip(folder, seed)
            tally[found.split(":")[0]] += 1
            if found not in GOOD:
                print(f"{seed} {where}: {found[-1500:]}", flush=True)
            if seed % 20 == 19:
                print(f"{dict(tally)}, {time.monotonic() - begun:.0f} s", flush=True)
    print(f"{count} changed bytes: {dict(tally)}, {time.monotonic() - begun:.0f} s")
    return int(not tally.keys() <= {*GOOD})


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))

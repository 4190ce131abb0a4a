"""Every recipe's numbers, in every form on 1 and 2 ranks, beside those of the oracle's script.

    python tests/oracle/compare.py [CASE ...]    without a name all cases: some minutes

Forms are the program in the package, its script and its packed script. Each run is a torchrun of its own in a clean
environment. Prints a table; exits with 1 if a number differs or a run fails.
"""
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import zip_longest
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
if str(ROOT / "tests") not in sys.path:
    sys.path.insert(0, str(ROOT / "tests"))
import conftest  # noqa: F401  this checkout's golfnb and one thread, in started processes too
from oracle.pack import oracle_scripts
from tiny import TINY, tiny_data, torchrun

from golfnb.tools.joiner import join_program, pack_program

CASES = ("pr399", "pr549", "pr726", "pr1060", "golf", "demo", "golf_more")  # the oracle's scripts
WORDS = {"golf_more": {"USE_GPTQ": "1", "TTT_FORM": "adapters"}}  # what the oracle's script is told
STEPS = 6
# each recipe rounds the matrices that it is published to round: at this width those of the MLP
NUMBERS = {name: value for name, value in TINY.items() if name != "SMALL_TENSOR"} | {
    "MODEL_DIM": "160", "ITERATIONS": str(STEPS), "WARMDOWN_ITERS": "4", "VAL_LOSS_EVERY": "3",
    "MAX_WALLCLOCK_SECONDS": "0", "EMA_DECAY": "0.8", "EVAL_STRIDE": "48",
    "GPTQ_CALIB_SAMPLES": "2", "TTT_CHUNK_SIZE": "32"}
CAPPED = {"pr726": {"MAX_WALLCLOCK_SECONDS": "600"}}  # a schedule by the clock; never near its end
USUAL_ROOM = 16_000_000  # bytes for the weights
ROOM = {"demo": 300_000, "golf_more": 530_000}  # less than the finest grid takes
SCORES = (
    "world", "steps", "skipped", "unigram_bpb", "raw_loss", "raw_bpb", "ema_loss", "ema_bpb",
    "int6_loss", "int6_bpb", "sliding_loss", "sliding_bpb", "ttt_loss", "ttt_bpb",
    "artifact_bytes", "artifact_sha256")
PROGRAM = """import sys
sys.path.insert(0, {folder!r})
from {module} import OWN, Settings, main
from golfnb.run.run import start
if __name__ == "__main__":
    start(__file__, main, Settings, OWN)
"""
FORMS = ("oracle", "program", "script", "packed")
Job = tuple[str, int, str]  # case, ranks, form


def recipe_of(case: str) -> str:
    "The recipe that a case runs."
    return case.removesuffix("_more")


def settings_of(case: str, code_bytes: int = 0) -> dict[str, str]:
    "The settings of a case: the same room for the weights, whatever the code takes."
    target = ROOM.get(case, USUAL_ROOM) + code_bytes
    own = {"RECIPE": recipe_of(case), "TARGET_BYTES": str(target)}
    return NUMBERS | CAPPED.get(case, {}) | WORDS.get(case, {}) | own


def program_file(case: str) -> Path:
    "Where the program of a case stands: a recipe's, or one of the tests' own."
    if case == recipe_of(case):
        return ROOT / "golfnb" / "recipes" / f"{case}.py"
    return ROOT / "tests" / "programs" / f"{case}.py"


@cache
def script_of(case: str) -> str:
    "The script of a case's program."
    if case == "pr549":  # test_launcher holds that it is the joined one
        return (ROOT / "golfnb" / "train_gpt.py").read_text(encoding="utf-8")
    return join_program(program_file(case))


def text_of(form: str, case: str) -> str:
    "What torchrun starts: a script, or a few lines that start the program."
    if form == "oracle":
        return oracle_scripts()[case]
    if form == "program":
        module = f"golfnb.recipes.{case}" if case == recipe_of(case) else case
        return PROGRAM.format(folder=str(program_file(case).parent), module=module)
    if form == "packed":
        return pack_program(script_of(case))
    return script_of(case)


def write_script(form: str, case: str, folder: Path) -> Path:
    "A case's script in a folder of its form."
    path = folder / form / f"{case}.py"
    path.parent.mkdir(exist_ok=True)
    path.write_text(text_of(form, case), encoding="utf-8")
    return path


def form_of(script: Path) -> str:
    "The form of a script that `write_script` wrote."
    return script.parent.name


def summary_of(script: Path, case: str, ranks: int, data: dict[str, str], start=torchrun) -> dict:
    "What a case comes to as `start` starts it, on CPU. Raises RuntimeError with its words if it fails."
    name = f"{case}-on-{ranks}"
    settings = settings_of(case, script.stat().st_size) | data
    if form_of(script) != "oracle":
        settings = {name: value for name, value in settings.items() if name not in WORDS.get(case, {})}
    settings |= {"RUN_ID": name, "CUDA_VISIBLE_DEVICES": ""}
    done = start(script, ranks, settings, script.parent)
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    return json.loads((script.parent / "runs" / name / "summary.json").read_text())


def differences(wanted: dict, found: dict) -> list[str]:
    "Every step loss and score that is not equal, in the order of the run."
    lines = []
    for step, (ours, theirs) in enumerate(zip_longest(found["losses"], wanted["losses"]), 1):
        if ours != theirs:
            lines.append(f"the loss of step {step} is {ours}, the oracle's {theirs}")
    for name in SCORES:
        ours, theirs = found.get(name), wanted.get(name)
        if ours != theirs:
            lines.append(f"{name} is {ours}, the oracle's {theirs}")
    return lines


def verdicts(jobs: list[Job], summaries: Iterator[dict | RuntimeError]) -> Iterator[tuple]:
    "(case, ranks, form, steps, finding) of each job but the oracle's, which comes first."
    for (case, ranks, form), found in zip(jobs, summaries):
        if form == "oracle":
            wanted = found
        elif isinstance(wanted, RuntimeError):
            yield case, ranks, form, 0, f"the oracle's run failed: {wanted}"
        elif isinstance(found, RuntimeError):
            yield case, ranks, form, 0, f"failed: {found}"
        else:
            lines = differences(wanted, found) or ["equal"]
            yield case, ranks, form, len(wanted["losses"]), lines[0]


def main(argv: list[str]) -> int:
    unknown = [case for case in argv if case not in CASES]
    if unknown:
        known = ", ".join(CASES)
        print(f"compare: a case must be one of {known}, found {unknown[0]}", file=sys.stderr)
        return 2
    cases = argv or CASES
    jobs = [(case, ranks, form) for case in cases for ranks in (1, 2) for form in FORMS]
    with tempfile.TemporaryDirectory() as tmp, ThreadPoolExecutor(os.cpu_count()) as pool:
        folder = Path(tmp)
        data = tiny_data(folder)
        scripts = {}
        for case in cases:
            for form in FORMS:
                scripts[case, form] = write_script(form, case, folder)

        def summary(job: Job) -> dict | RuntimeError:
            case, ranks, form = job
            try:
                return summary_of(scripts[case, form], case, ranks, data)
            except RuntimeError as error:
                return error

        print(f"{'case':10s} {'form':8s} ranks  steps  step losses and scores", flush=True)
        rows = []
        for row in verdicts(jobs, pool.map(summary, jobs)):
            case, ranks, form, steps, found = row
            print(f"{case:10s} {form:8s} {ranks:5d}  {steps:5d}  {found}", flush=True)
            rows.append(row)
    equal = sum(row[-1] == "equal" for row in rows)
    print(f"{equal} of {len(rows)} equal to the oracle")
    return 0 if equal == len(rows) else 1


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

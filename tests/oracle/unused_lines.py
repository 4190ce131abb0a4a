"""The statements of the script that its own runs never reach.

    python tests/oracle/unused_lines.py [--refusals] [--save FILE]    measure here
    python tests/oracle/unused_lines.py FILE ...                      measurements of several machines together

Runs golfnb/train_gpt.py, word for word, in a few small trainings: on CPU with 1 and 2 ranks; on a machine
with a GPU there, compiled and not (lines that torch.compile traces are seen only where it is off). With
`--refusals` also once for each fault of a user that it must refuse in a sentence. FILEs hold the lines that
ran, and must be of the script as it is now. Prints which statements ran in none of these, and how many.

Counted are the statements of functions, but not docstrings, Triton's kernels, nested definitions and what
runs when the script is imported.
"""
import argparse
import ast
import contextlib
import hashlib
import io
import json
import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import threading
import types
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

ROOT = Path(__file__).resolve().parent.parent.parent
SCRIPT = ROOT / "golfnb" / "train_gpt.py"
for folder in (ROOT, ROOT / "tests"):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
import torch
from tiny import clean_env, tiny_data

from golfnb.text.shards import write_shard

Ran = dict[str, set[int]]  # name of a function -> lines of the script that ran in it


# ---- tracing ----
def codes_of(code: types.CodeType) -> Iterator[types.CodeType]:
    "A code object and all that are defined in it."
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from codes_of(constant)


def monitor(code: types.CodeType, ran: Ran) -> None:
    "Note what runs of this code, in any thread."
    if sys.version_info >= (3, 12):
        events = sys.monitoring

        def line_begins(of: types.CodeType, line: int):
            ran.setdefault(of.co_name, set()).add(line)
            return events.DISABLE  # once is enough

        events.use_tool_id(events.COVERAGE_ID, "unused_lines")
        events.register_callback(events.COVERAGE_ID, events.events.LINE, line_begins)
        for part in codes_of(code):
            events.set_local_events(events.COVERAGE_ID, part, events.events.LINE)
        return

    def trace(frame: types.FrameType, event: str, _):
        if frame.f_code.co_filename != code.co_filename:
            return None
        if event == "line":
            ran.setdefault(frame.f_code.co_name, set()).add(frame.f_lineno)
        return trace

    threading.settrace(trace)
    sys.settrace(trace)


def load(script: Path, name: str, ran: Ran) -> types.ModuleType:
    "The script as a module of this name, its lines noted; as `__main__` it also starts its run."
    module = types.ModuleType(name)
    module.__file__ = str(script)
    sys.modules[name] = module
    code = compile(script.read_text(encoding="utf-8"), str(script), "exec")
    monitor(code, ran)
    exec(code, module.__dict__)
    return module


def write(ran: Ran, path: Path, script: Path = SCRIPT) -> None:
    "Keep what ran."
    lines = {name: sorted(found) for name, found in ran.items()}
    sha256 = hashlib.sha256(script.read_bytes()).hexdigest()
    path.write_text(json.dumps({"script_sha256": sha256, "lines": lines}), encoding="utf-8")


def run_as_rank(script: Path, folder: Path) -> None:
    "What torchrun starts in the script's place: the script, whose last call ends the process."
    ran: Ran = {}
    leave = os._exit

    def save_and_leave(status: int):
        sys.settrace(None)
        write(ran, folder / f"{os.getpid()}.json", script)
        leave(status)

    os._exit = save_and_leave
    sys.argv = [str(script)]
    load(script, "__main__", ran)


# ---- trainings ----
USUAL = {  # narrow, with two heads of 64 channels as the kernels want them
    "NUM_LAYERS": "3", "MODEL_DIM": "128", "NUM_HEADS": "2", "NUM_KV_HEADS": "1", "VOCAB_SIZE": "400",
    "VE_LAYERS": "1", "XSA_LAST_N": "1", "BIGRAM_VOCAB_SIZE": "64", "BIGRAM_DIM": "16", "VE_DIM": "16",
    "TRAIN_SEQ_LEN": "64", "EVAL_SEQ_LEN": "96", "EVAL_STRIDE": "48", "TRAIN_BATCH_TOKENS": "1024",
    "VAL_BATCH_SIZE": "65536", "ITERATIONS": "6", "WARMDOWN_ITERS": "3", "WARMUP_STEPS": "3",
    "VAL_LOSS_EVERY": "3", "TTT_CHUNK_TOKENS": "1024", "TTT_EPOCHS": "1", "SMALL_TENSOR": "4096"}
TRAININGS = {  # name -> ranks, settings
    "1 rank": (1, {"MAX_WALLCLOCK_SECONDS": "0"}),
    "2 ranks": (2, {"WEIGHT_DTYPE": "bf16", "SMALL_TENSOR": "200"}),
    "stopped by the clock": (1, {"MAX_WALLCLOCK_SECONDS": "3", "ITERATIONS": "10000"}),
    "fp64, no tables": (1, {"WEIGHT_DTYPE": "fp64", "BIGRAM_VOCAB_SIZE": "0", "VE_ENABLED": "0",
                            "WARMDOWN_ITERS": "0", "NUM_LAYERS": "1", "XSA_LAST_N": "0"}),
    "learning rates too high": (1, {"TIED_EMBED_LR": "1e6", "BIGRAM_VOCAB_SIZE": "0", "VE_ENABLED": "0",
                                    "TTT_ENABLED": "0"}),
    "over the byte budget": (1, {"TARGET_BYTES": "1000", "TTT_ENABLED": "0"}),
}
PLAIN = {"TORCHDYNAMO_DISABLE": "1"}
GPU_TRAININGS = {
    "GPU": (1, {}),
    "GPU, not compiled": (1, PLAIN),
    "GPU, nothing recorded, an MLP that no kernel suits": (1, PLAIN | {"STEP_GRAPH": "0", "MLP_MULT": "2.99"}),
}


def torchrun(ranks: int, env: dict[str, str], folder: Path) -> subprocess.CompletedProcess:
    "The script as torchrun starts it, traced; what ran is left in the folder."
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}",
               __file__, "--rank", str(folder)]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)


def read(path: Path, script: Path = SCRIPT) -> Ran:
    "What `write` kept. Ends with a sentence if it is of another script."
    kept = json.loads(path.read_text(encoding="utf-8"))
    if kept["script_sha256"] != hashlib.sha256(script.read_bytes()).hexdigest():
        raise SystemExit(f"unused_lines: {path} must be of the script as it is now, and is of another: "
                         "measure again on that machine")
    return {name: set(lines) for name, lines in kept["lines"].items()}


def add(ran: Ran, more: Ran) -> None:
    "Take in what ran elsewhere."
    for name, lines in more.items():
        ran.setdefault(name, set()).update(lines)


def trainings(data: dict[str, str], folder: Path) -> Ran:
    "What runs in small trainings on this machine. Ends with a sentence if one of them fails."
    ran: Ran = {}
    runs = GPU_TRAININGS if torch.cuda.is_available() else TRAININGS
    for name, (ranks, settings) in runs.items():
        place = folder / name
        place.mkdir()
        done = torchrun(ranks, clean_env(**(USUAL | data | settings)), place)
        if "final_int6_sliding_window_exact" not in done.stdout:
            raise SystemExit(f"unused_lines: the run '{name}' failed: {done.stderr[-3000:]}")
        for kept in place.glob("*.json"):
            add(ran, read(kept))
        print(f"ran: {name}", file=sys.stderr, flush=True)
    return ran


# ---- refusals ----
REFUSED = {  # settings -> what the sentence tells
    "ITERATIONS=many": "ITERATIONS must be a whole number", "ITERATIONS=0": "ITERATIONS .*above 0",
    "RUN_ID=\x07": "RUN_ID must be plain text", "WEIGHT_DTYPE=fp7": "WEIGHT_DTYPE .*one of",
    "EMBED_LR=x": "EMBED_LR must be a number", "QAT_ENABLED=1": "QAT_ENABLED .*not built",
    "RESUME=1": "RESUME must stay 0", "RECIPE=golf": "RECIPE", "LOADER=coprime": "LOADER .*pr726",
    "CLIP=none": "CLIP .*no recipe", "RUN_ID=a/b": "RUN_ID", "MLP_MULT=0.001": "MLP_MULT",
    "NUM_HEADS=3": "MODEL_DIM", "NUM_KV_HEADS=3": "NUM_KV_HEADS", "ROPE_DIMS=3": "ROPE_DIMS",
    "BIGRAM_VOCAB_SIZE=1": "BIGRAM_VOCAB_SIZE", "VE_LAYERS=77": "VE_LAYERS", "EVAL_STRIDE=97": "EVAL_STRIDE",
    "TTT_CHUNK_TOKENS=8": "TTT_CHUNK_TOKENS", "TRAIN_BATCH_TOKENS=1000": "TRAIN_BATCH_TOKENS",
    "VOCAB_SIZE=401": "VOCAB_SIZE=401", "TOKENIZER_PATH=none.model": "none.model", "DATA_PATH=none": "DATA_PATH",
    "MATRIX_LR=1e30 ITERATIONS=30 VAL_LOSS_EVERY=0": "gradient must be finite",
    "MATRIX_LR=1e30 ITERATIONS=1": "validation after step", "TTT_LR=1e30": "test-time training",
    "TIED_EMBED_LR=1e4": "finite in fp16",
}
REFUSED_ON_GPU = {"ATTENTION=fa4": "ATTENTION=fa4", "WORLD_SIZE=2 RANK=1 LOCAL_RANK=99": "needs GPU 99"}


class Ended(BaseException):
    "In place of the end of the process."


def end(status: int):
    "What a refused run does last; here the next one follows."
    raise Ended(status)


def said_by(module: types.ModuleType, env: dict[str, str]) -> str:
    "The standard error of a run that is refused."
    error = io.StringIO()
    with patch.dict(os.environ, env, clear=True), patch.object(os, "_exit", end), \
            contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(error):
        try:
            module.start(module.__file__, module.main, module.Settings, module.OWN)
        except Ended as ended:
            assert ended.args == (2,), (ended.args, error.getvalue())
    return error.getvalue()


def only_validation(data: Path, tokens: list[int]):
    "In place of all shards of validation, of which there may be several."
    for path in data.glob("*_val_*.bin"):
        path.unlink()
    write_shard(data / "x_val_000000.bin", tokens)


def text_without_bytes(data: Path):
    only_validation(data, [1] * 2000)


def short_validation(data: Path):
    only_validation(data, [1] * 50)


def token_too_large(data: Path):
    write_shard(data / "x_train_000009.bin", [400] * 2000)


def damaged_shard(data: Path):
    (data / "x_train_000009.bin").write_bytes(b"damaged")


def damaged_tokenizer(data: Path):
    (data / "tokenizer.model").write_bytes(b"damaged")


def an_old_run(data: Path):
    (data / "runs" / "refused").mkdir(parents=True)
    (data / "runs" / "refused" / "train.log").touch()


def shards_changed(data: Path):
    "In the midst of the training."
    for path in data.glob("*_train_*.bin"):
        threading.Timer(6.0, write_shard, (path, [1] * 500)).start()


def shards_removed(data: Path):
    "In the midst of the training."
    for path in data.glob("*_train_*.bin"):
        threading.Timer(6.0, path.unlink).start()


def full_disk(data: Path):
    "No file may grow beyond 4 bytes, and nobody reads the terminal."
    resource.setrlimit(resource.RLIMIT_FSIZE, (4, resource.RLIM_INFINITY))


FAULTS = {  # what is done to a copy of the data -> what the sentence tells
    text_without_bytes: "byte of text", short_validation: "validation must hold", token_too_large: "VOCAB_SIZE=400, found 400",
    damaged_shard: "x_train_000009.bin must have", damaged_tokenizer: "damaged", an_old_run: "already holds a run",
    shards_changed: "do not change shards", shards_removed: "cannot read shard", full_disk: "cannot write",
}


def refusals(data: dict[str, str], folder: Path) -> Ran:
    "What runs where the script refuses. Raises AssertionError if one is no sentence of its own."
    ran: Ran = {}
    module = load(SCRIPT, "script", ran)
    own = {"RUNS_DIR": str(folder / "refused"), "MAX_WALLCLOCK_SECONDS": "0", "COMPILE": "0"}
    usual = clean_env(**(USUAL | data | own))
    wanted = REFUSED | (REFUSED_ON_GPU if torch.cuda.is_available() else {})
    for number, (settings, words) in enumerate(wanted.items()):
        given = dict(pair.split("=") for pair in settings.split(" "))
        said = said_by(module, usual | {"RUN_ID": str(number)} | given)
        assert re.search(f"(?m)^golfnb: .*{words}", said) and "Traceback" not in said, (settings, said)
    for number, (fault, words) in enumerate(FAULTS.items()):
        place = folder / f"fault{number}"
        place.mkdir()
        for path in [*folder.glob("*.bin"), folder / "tokenizer.model"]:
            shutil.copy(path, place)
        fault(place)
        own = {"DATA_PATH": str(place), "TOKENIZER_PATH": str(place / "tokenizer.model"), "RUN_ID": "refused",
               "RUNS_DIR": str(place / "runs"), "ITERATIONS": "100000"}
        said = said_by(module, usual | own)
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        assert re.search(f"(?m)^golfnb: .*{words}", said) and "Traceback" not in said, (fault, said)
    sys.settrace(None)
    return ran


# ---- statements ----
def is_kernel(function: ast.FunctionDef) -> bool:
    "Whether Triton compiles it: it takes numbers that are known then."
    notes = [ast.unparse(a.annotation) for a in function.args.args if a.annotation]
    return "tl.constexpr" in notes


def statements(node: ast.AST, at: tuple[str, ...] = (), inside: bool = False):
    "(names of the definitions around it, statement), for every statement that is counted."
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.ClassDef):
            if not (isinstance(child, ast.FunctionDef) and is_kernel(child)):
                yield from statements(child, (*at, child.name), isinstance(child, ast.FunctionDef))
            continue
        is_text = isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant)
        if inside and isinstance(child, ast.stmt) and not is_text:
            yield at, child
        yield from statements(child, at, inside)


def lines_of(statement: ast.stmt) -> range:
    "The lines of a statement, of one with a block those before the block."
    block = getattr(statement, "body", None)
    end = block[0].lineno if block else statement.end_lineno + 1
    return range(statement.lineno, max(end, statement.lineno + 1))


def report(ran: Ran, text: str) -> tuple[int, int]:
    "Print what never ran, definition by definition; returns how many statements, and of how many."
    source = text.splitlines()
    found = [*statements(ast.parse(text))]
    last = ()
    unused = 0
    for at, statement in found:
        if not ran.get(at[-1], set()).isdisjoint(lines_of(statement)):
            continue
        unused += 1
        if at != last:
            print(".".join(at))
        print(f"  {statement.lineno:5d}  {source[statement.lineno - 1].strip()}")
        last = at
    return unused, len(found)


def measured(with_refusals: bool) -> Ran:
    "What runs on this machine."
    with tempfile.TemporaryDirectory() as tmp:
        folder = Path(tmp)
        data = tiny_data(folder)
        ran = trainings(data, folder)
        if with_refusals:
            add(ran, refusals(data, folder))
    return ran


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("saved", nargs="*", type=Path)
    parser.add_argument("--refusals", action="store_true")
    parser.add_argument("--save", type=Path)
    parser.add_argument("--rank", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank:
        return run_as_rank(SCRIPT, args.rank)
    ran: Ran = {}
    for path in args.saved:
        add(ran, read(path))
    if not args.saved:
        ran = measured(args.refusals)
    if args.save:
        write(ran, args.save)
    unused, of = report(ran, SCRIPT.read_text(encoding="utf-8"))
    print(f"{unused} of {of} statements never run: {unused / of:.1%}")


if __name__ == "__main__":
    main()

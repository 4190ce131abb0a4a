"""A data set and settings so small that a whole run takes seconds; shared by the tests of the script and of the command."""
import contextlib
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from functools import cache, partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from unittest.mock import patch
from warnings import simplefilter

from forked import fork_python, run_python

TINY = {
    "RECIPE": "demo", "NUM_LAYERS": "2", "MODEL_DIM": "96", "NUM_HEADS": "2", "NUM_KV_HEADS": "1", "VOCAB_SIZE": "400", "VE_LAYERS": "1", "XSA_LAST_N": "1", "BIGRAM_VOCAB_SIZE": "64", "BIGRAM_DIM": "16", "VE_DIM": "16",
    "TRAIN_SEQ_LEN": "64", "EVAL_SEQ_LEN": "64", "EVAL_STRIDE": "32", "TRAIN_BATCH_TOKENS": "512", "VAL_BATCH_SIZE": "65536", "ITERATIONS": "4", "WARMDOWN_ITERS": "2", "WARMUP_STEPS": "1",
    "TTT_CHUNK_TOKENS": "1024", "TTT_EPOCHS": "1", "TTT_BATCH_SEQS": "32", "LATE_QAT_THRESHOLD": "0.9", "SMALL_TENSOR": "4096",
}

LOOPS = {"LOOP_START": "0", "LOOP_END": "0", "PARALLEL_START_LAYER": "1"}  # of a model of whole documents, with two blocks
ADAPTERS = {"TTT_CHUNK_SIZE": "16", "TTT_BATCH_SIZE": "16", "TTT_LORA_RANK": "4", "TTT_LORA_LR": "0.01"}  # of a recipe that adapts by documents
ON_TRELLIS = LOOPS | {"SMALL_TENSOR": "1000"}  # matrices as small as 32 x 32 too
MORE = {"pr2135": ON_TRELLIS, "record": ON_TRELLIS | ADAPTERS}  # what else a recipe needs to be so small


@cache
def built_data() -> tempfile.TemporaryDirectory:
    "What `tiny_data` copies; made once in a process."
    from golfnb.tools.data import build_shards, stdlib_documents, train_tokenizer

    made = tempfile.TemporaryDirectory()
    folder, docs = Path(made.name), stdlib_documents(["json", "csv", "email"])[:60]
    train_tokenizer(docs, folder / "tokenizer.model", 400)
    build_shards(docs, folder / "tokenizer.model", folder, 4_000, 0.05)
    return made


def tiny_data(folder: Path) -> dict[str, str]:
    "Shards and tokenizer of a few documents; the settings that point at them."
    shutil.copytree(built_data().name, folder, dirs_exist_ok=True)
    return {"DATA_PATH": str(folder), "TOKENIZER_PATH": str(folder / "tokenizer.model")}


def settings_for(recipe: str = "pr549", **given):
    "The settings of a recipe's program; `given` by their names in the environment, as texts or values."
    from golfnb.tools.programs import find_program, settings_of

    texts = {name: str(int(value)) if isinstance(value, bool) else str(value) for name, value in given.items()}
    return settings_of(find_program(recipe), texts)


def own_program(name: str) -> ModuleType:
    "A program of tests/programs."
    from golfnb.tools.checkpoint import load_program

    return load_program(Path(__file__).resolve().parent / "programs" / f"{name}.py")


def run_quietly(program: ModuleType, env: dict[str, str], code: bytes = b"") -> dict:
    "One whole run of a program in this process, its log in files alone; the summary."
    from golfnb.model.engine import Ranks
    from golfnb.run.run import open_run
    from golfnb.tools.programs import program_sha256, settings_of

    run = open_run(settings_of(program, env), Ranks(), code, quiet=True)
    run.program_sha256 = program_sha256(program)
    return program.main(run)


def model_settings(s, plan: str = "pr399", skip_gate: str = "one") -> dict:
    "What a file would say of the model of these settings."
    from dataclasses import fields

    from golfnb.model.golf import ModelSettings

    return {spec.name: getattr(s, spec.name) for spec in fields(ModelSettings)} | {"plan": plan, "skip_gate": skip_gate}


def known_names() -> set[str]:
    "Every name that a program of golfnb takes from the environment."
    from dataclasses import fields

    from golfnb.score.adapters import AdapterSettings
    from golfnb.settings import IGNORED, NOT_BUILT, PUBLISHED
    from golfnb.tools.programs import every_setting

    of_settings = {name.upper() for name in [*every_setting(), *(spec.name for spec in fields(AdapterSettings))]}
    return of_settings | {*PUBLISHED, *IGNORED, *NOT_BUILT, "RECIPE", "CHECKPOINT_EVERY_S", "RESUME", "OUT", "GOLFNB_DRILL_CLOCK", "GOLFNB_COMMIT", "GOLFNB_PROGRAM"}


def clean_env(**more) -> dict[str, str]:
    "The environment without settings of golfnb that a developer may have set."
    ours = known_names()
    return {k: v for k, v in os.environ.items() if k not in ours} | {"OMP_NUM_THREADS": "1"} | more


def torchrun(script: Path, nproc: int, settings: dict, cwd: Path) -> subprocess.CompletedProcess:
    "Start a script as a judge does; torchrun itself is forked."
    command = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={nproc}", script]
    return run_python(command, cwd, clean_env(**settings))


def forked_ranks(script: Path, nproc: int, settings: dict, cwd: Path) -> subprocess.CompletedProcess:
    "What `torchrun` gives, without torchrun; see `forked_words`."
    return forked_words([script], nproc, settings, cwd)


def forked_words(words: list, nproc: int, settings: dict, cwd: Path) -> subprocess.CompletedProcess:
    "`python WORDS` on every rank: the ranks are forked, each with the variables that torchrun would set."
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    env = clean_env(**settings, WORLD_SIZE=str(nproc), LOCAL_WORLD_SIZE=str(nproc), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        quiet = partial(simplefilter, "ignore")  # a module that is run may have been imported by the server
        ranks = [fork_python(words, out, err, cwd, env | {"RANK": str(r), "LOCAL_RANK": str(r)}, quiet) for r in range(nproc)]
        for rank in ranks:
            rank.join()
        for file in (out, err):
            file.seek(0)
        status = max(abs(rank.exitcode) for rank in ranks)
        return subprocess.CompletedProcess(words, status, out.read(), err.read())


def shown(done: subprocess.CompletedProcess, write) -> int:
    print(done.stdout, end="")
    write(done.stderr)
    return done.returncode


def forked_script(script: Path, nproc: int, settings: dict, write, show=None, module: str = "") -> int:
    "In place of golfnb.tools.starting.run_script."
    return shown(forked_words(["-m", module, script], nproc, settings, Path.cwd()), write)


def forked_module(words: list, nproc: int, settings: dict) -> int:
    "In place of golfnb.studies.bench.launch_module."
    return shown(forked_words(["-m", *words], nproc, settings, Path.cwd()), sys.stderr.write)


def without_torchrun(*argv, cwd: Path, **env) -> SimpleNamespace:
    "As `golfnb`, but ranks are forked where the command starts torchrun, and need not import torch each."
    with patch("golfnb.tools.starting.run_script", forked_script), patch("golfnb.studies.bench.launch_module", forked_module):
        return golfnb(*argv, cwd=cwd, **env)


WAIT = """
train_at_once = train


def train(t, step, validate=None, extras=()):
    told, before = [], {n: signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)}
    rank = os.environ.get("RANK", "0")

    def asked(number, frame):
        told.append(number)
        before[number](number, frame)

    def step_later(t):
        while rank == "0" and t.steps == 9 and os.path.exists("wait") and not told:
            time.sleep(0.01)
        step(t)

    for number, handler in before.items():
        if callable(handler):
            signal.signal(number, asked)
    return train_at_once(t, step_later, validate, extras)
"""


def waiting(script: str) -> str:
    "The script, but its rank 0 stays after step 9, and other ranks in the next step, for as long as there is a file `wait` where it was started and neither SIGTERM nor SIGINT has come."
    before, main = script.split("\n\nif __name__ ==")
    return f"{before}\n\nimport signal\nimport time\n{WAIT}\n\nif __name__ =={main}"


def loaded(text: str, name: str) -> ModuleType:
    "A script as a module, with a name space of its own for its ops: the package's must live on in this process."
    module = sys.modules[name] = ModuleType(name)
    exec(compile(text.replace('f"golfnb::{', f'f"{name}::{{'), name, "exec"), module.__dict__)
    return module


@contextlib.contextmanager
def into(file, fd: int):
    "What this process and its children write to a descriptor goes into a file."
    kept = os.dup(fd)
    os.dup2(file.fileno(), fd)
    try:
        yield
    finally:
        os.dup2(kept, fd)
        os.close(kept)


def golfnb(*argv, cwd: Path, **env) -> SimpleNamespace:
    "The command, in this process, since importing torch once is enough; what was loaded beside other programs is forgotten."
    from golfnb.tools.cli import main_cli
    from golfnb.tools.programs import OWN_FINDER

    for name in OWN_FINDER.files:
        sys.modules.pop(name, None)

    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err, contextlib.chdir(cwd), patch.dict(os.environ, clean_env(**env), clear=True):
        with into(out, 1), into(err, 2), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                status = main_cli([str(a) for a in argv])
            except SystemExit as e:
                status = e.code
        for file in (out, err):
            file.seek(0)
        return SimpleNamespace(returncode=status, stdout=out.read(), stderr=err.read())


def one_sentence(stderr: str) -> bool:
    "One line from golfnb and no traceback."
    return len(re.findall(r"^golfnb: .{20,}", stderr, re.M)) == 1 and "Traceback" not in stderr and stderr.count("\n") == 1

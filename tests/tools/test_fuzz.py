"""Damaged and hostile files: loaded with equal content or refused with golfnb's own error; no crash, no hang, bounded memory, nothing executed.

In the tests a few hundred files. The whole drill, in some minutes on one core, writes nbs/results/mangle_cpu.json:

    python tests/tools/test_fuzz.py [COUNT] [KIND] ...    of each kind (or of these) as many as FULL says, at most COUNT; what was found of other kinds stays in the file
"""
import hashlib
import io
import json
import math
import multiprocessing
import os
import pickle
import random
import re
import resource
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
import zlib
from collections import Counter
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import asdict, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), *(str(ROOT / "tests" / folder) for folder in ("", "file", "tools"))]

import numpy as np
import pytest
import torch

from golfnb.file.artifact import PREFIX_BYTES, Best, Lzma, Plain, Rans, Zlib, load_artifact, load_model, load_weights, open_container, pack_bytes, save_weights, seal, section_plan
from golfnb.tools.results import read_result, record_result, where_measured
from golfnb.text.bpb import tokenizer_hash
from golfnb.tools import play, report
from golfnb.tools.cli import main_cli
from golfnb.tools.data import stdlib_documents, train_tokenizer
from golfnb.model.frontier import Frontier, long_order
from golfnb.model.golf import EACH_ONCE, model_from_settings, named_state, saved_settings
from golfnb.model.engine import Ranks
from golfnb.file.quantize import quantize_state
from golfnb.file.rans import RANS_PREFIX, rans_streams
from golfnb.settings import CONTROLS, GolfError
from golfnb.text.shards import atomic_write, open_shard, read_header, read_tokens, write_shard
from golfnb.tools.programs import RECIPES, copied_program, find_program, program_sha256, settings_of
from golfnb.tools.submission import claim_numbers, read_log
from golfnb.file.trellis_file import COLUMNS, HIGH, pack_trellis, without_parts
from test_artifact import META, same, toy
from tiny import LOOPS, TINY, golfnb, model_settings, one_sentence, settings_for, tiny_data

CODECS = (Lzma(), Zlib(), Rans(), Best(), Plain())
MEMORY = 192 << 20  # bytes a process may grow by while it reads damaged files of at most 64 KB
SECONDS = 300       # a file takes longer only if it hangs


def mutate(data: bytes, rng: random.Random) -> bytes:
    "One to four changes: flipped bits, overwritten, inserted, deleted, repeated, swapped or cut-off bytes, numbers at their edges."
    bad = bytearray(data)
    for _ in range(rng.choice([1, 1, 1, 2, 4])):
        at, n, way = rng.randrange(len(bad) + 1), rng.choice([1, 2, 4, 8, 64]), rng.randrange(8)
        if way == 0 and bad:
            bad[at % len(bad)] ^= 1 << rng.randrange(8)
        elif way == 1:
            bad[at:at + n] = rng.randbytes(n)
        elif way == 2:
            bad[at:at] = rng.randbytes(n)
        elif way == 3:
            del bad[at:at + n]
        elif way == 4:
            bad[at:at] = bad[max(0, at - n):at]
        elif way == 5:
            other = rng.randrange(len(bad) + 1)
            bad[at:at + n], bad[other:other + n] = bad[other:other + n], bad[at:at + n]
        elif way == 6:
            del bad[at:]
        else:
            bad[at:at + 4] = struct.pack("<I", rng.choice([0, 1, 2**31 - 1, 2**31, 2**32 - 1, 20240520]))
    return bytes(bad)


def forge(data: bytes, rng: random.Random) -> bytes:
    "A mutation whose checksum fits: header text or payload changed, then sealed again."
    length = struct.unpack("<I", data[12:16])[0]
    text, payload = zlib.decompress(data[PREFIX_BYTES:PREFIX_BYTES + length]), data[PREFIX_BYTES + length:]
    if rng.random() < 0.4:
        header = json.loads(text)
        row = rng.choice(header["tensors"] + header["sections"])
        row[rng.randrange(3)] = rng.choice([0, -1, 2**31, 2**40, "fp64", "int6", "rans", "lzma", "none", [], [1, 1], [2**15, 2**15], [0], None, 1.5, "__import__('os')"])
        text = json.dumps(header).encode()
    elif rng.random() < 0.5:
        text = mutate(text, rng)
    else:
        payload = mutate(payload, rng)
    return seal(zlib.compress(text), payload)


def too_slow(*_):
    raise TimeoutError(f"a file took more than {SECONDS} s")


def fuzz_artifacts(count: int, seed: int, folder: Path) -> dict:
    "Load `count` mutated containers of all codecs from disk; what came of them."
    rng, said, path = random.Random(seed), {"refused": 0, "equal": 0, "forged and loaded": 0}, folder / "a.golf"
    originals = [pack_bytes(toy(), META, codec) for codec in CODECS]
    for i in range(count):
        data, forged = originals[i % len(CODECS)], i % 3 == 0
        bad = (forge if forged else mutate)(data, rng)
        path.write_bytes(bad)
        signal.alarm(SECONDS)
        try:
            meta, packed = load_artifact(path)
        except GolfError as error:
            said["refused"] += 1
            assert "\n" not in str(error) and len(str(error)) < 700, error
            continue
        finally:
            signal.alarm(0)
        assert all(p.data.size == np.prod(p.shape) and (p.scale is None or len(p.scale) == p.shape[0]) for p in packed.values())
        if forged:
            said["forged and loaded"] += 1
        else:
            assert meta == META and same(packed, toy()), f"mutation {i} of seed {seed} loaded other content"
            said["equal"] += 1
    return said


def fuzz_shards(count: int, seed: int, folder: Path) -> dict:
    "Read `count` mutated shards; whatever is accepted must be what a plain reading of the bytes gives."
    rng, said = random.Random(seed), {"refused": 0, "read": 0}
    write_shard(folder / "good.bin", np.random.default_rng(seed).integers(0, 1024, 700).astype(np.uint16))
    data = (folder / "good.bin").read_bytes()
    for i in range(count):
        path = folder / f"s{i}.bin"
        bad = mutate(data[:1024], rng) + data[1024:] if i % 2 else mutate(data, rng)
        path.write_bytes(bad)
        signal.alarm(SECONDS)
        try:
            n, tokens, checked = read_header(path), np.array(open_shard(path)), read_tokens(str(path), vocab_size=1024)
            words = np.frombuffer(bad, "<i4", 3)
            assert words.tolist() == [20240520, 1, n] and len(bad) == 1024 + 2 * n
            assert np.array_equal(tokens, np.frombuffer(bad, "<u2", n, 1024)) and np.array_equal(checked, tokens) and tokens.max() < 1024
            said["read"] += 1
        except GolfError as error:
            said["refused"] += 1
            assert "\n" not in str(error) and len(str(error)) < 700, error
        finally:
            signal.alarm(0)
            path.unlink()
    return said


def grown() -> int:
    "Peak memory of this process in bytes."
    import resource
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@pytest.fixture(autouse=True)
def alarm():
    old = signal.signal(signal.SIGALRM, too_slow)
    yield
    signal.signal(signal.SIGALRM, old)


def test_mutated_artifacts(tmp_path):
    fuzz_artifacts(10, 0, tmp_path)
    before = grown()
    said = fuzz_artifacts(300, 1, tmp_path)
    assert said["refused"] > 200 and sum(said.values()) == 300 and grown() - before < MEMORY, said


def test_mutated_shards(tmp_path):
    before = grown()
    said = fuzz_shards(200, 2, tmp_path)
    assert said["refused"] > 60 and said["read"] > 5 and grown() - before < MEMORY, said


HOOK = r'''
import sys, pathlib, pickle
import test_fuzz as t
folder, events, watching = pathlib.Path(sys.argv[1]), [], False
BAD = ("exec", "compile", "import", "pickle.", "marshal.", "os.system", "os.exec", "os.spawn", "os.posix_spawn", "subprocess.", "ctypes.", "code.__new__", "socket.", "shutil.", "os.remove", "os.rename", "builtins.input", "sys.settrace")
def hook(event, args):
    if watching and (event.startswith(BAD) or event == "open" and any(c in str(args[1] or "") for c in "wax+")):
        events.append((event, str(args)[:200]))
sys.addaudithook(hook)
def read(path):
    for load in (t.load_artifact, t.load_weights, t.read_header, t.open_shard):
        try:
            load(path)
        except t.GolfError:
            pass
files = sorted(folder.iterdir())
for f in files:  # whatever is imported lazily is imported now
    read(f)
watching = True
for f in files:
    read(f)
watching = False
pickle.loads(b"cbuiltins\nlen\n.")  # and the hook does see what it is for
watching = True
try:
    pickle.loads(b"cbuiltins\nlen\n."), eval("1 + 1")
finally:
    watching = False
print(len(files), sorted({e for e, _ in events[-4:]}), [e for e in events if "find_class" not in e[0] and e[0] not in ("compile", "exec")])
print("CLEAN" if all(e[0] in ("pickle.find_class", "compile", "exec") for e in events) and len(events) <= 4 else events)
'''


class Trap:
    def __init__(self, trace: Path):
        self.trace = trace

    def __reduce__(self):
        return os.system, (f"touch {self.trace}",)


def test_nothing_that_is_read_is_executed_or_unpickled(tmp_path):
    rng, trace = random.Random(5), tmp_path / "was-here"
    for i, codec in enumerate(CODECS):
        data = pack_bytes(toy(), META, codec)
        (tmp_path / f"good{i}.golf").write_bytes(data)
        for j in range(4):
            (tmp_path / f"forged{i}{j}.golf").write_bytes(forge(data, rng))
    (tmp_path / "trap.golf").write_bytes(pickle.dumps(Trap(trace)))
    (tmp_path / "trap.bin").write_bytes(pickle.dumps(Trap(trace)) + bytes(2000))
    torch.save({"w": torch.zeros(3)}, tmp_path / "torch.golf")
    (tmp_path / "code.golf").write_text(f"import os; os.system('touch {trace}')")
    good = toy()
    save_weights(tmp_path / "ema.golf", {"a": torch.zeros(4, 5)}, {"note": f"__import__('os').system('touch {trace}')"})
    write_shard(tmp_path / "good.bin", np.arange(100, dtype=np.uint16))
    done = subprocess.run([sys.executable, "-c", HOOK, str(tmp_path)], capture_output=True, text=True)
    assert done.stdout.strip().endswith("CLEAN") and "pickle.find_class" in done.stdout, done.stdout + done.stderr
    assert not trace.exists() and same(load_artifact(tmp_path / "good0.golf")[1], good) and load_weights(tmp_path / "ema.golf")


# --- the drill: mangled files of all kinds through the commands that read them

ODD = [0, -1, True, None, 2**31, 2**40, 10**400, 1.5, math.nan, math.inf, "", "fp64", "int6", "rans", "none", "\x1b[31m", "a\nb", "9" * 5000, [], [[]], {}, [1, 1], [2**15, 2**15]]


def edit(value, rng: random.Random):
    "A JSON value with a part of it replaced by one that nobody expects."
    if not value or not isinstance(value, (dict, list)) or rng.random() < 0.05:
        return rng.choice(ODD)
    changed, key = value.copy(), rng.choice([*value] if isinstance(value, dict) else range(len(value)))
    changed[key] = edit(value[key], rng)
    return changed


def edited(data: bytes, rng: random.Random) -> bytes:
    "A container with its header edited and a checksum that fits."
    header, payload = open_container(data)
    return seal(zlib.compress(json.dumps(edit(header, rng)).encode()), payload)


def zeros(shapes: list) -> bytes:
    "An rANS section of zeros for tensors of these [rows, cols]: it takes nothing but its streams, so it can promise anything."
    table = zlib.compress(struct.pack("<256H", 2**14, *[0] * 255) + bytes(sum(map(sum, shapes))), 9)
    return struct.pack(RANS_PREFIX, 0, 0, 1, len(table)) + table + rans_streams(sum(map(math.prod, shapes))) * struct.pack("<I", 2**16)


def huge_settings(settings: dict):
    "A model's settings, each number of it once and again far too large."
    for name, value in settings.items():
        for huge in (10**9, 2**40) if type(value) is int else ():
            yield settings | {name: huge}


def large_model(settings: dict, layers: int, dim: int) -> tuple[dict, dict]:
    "The settings of a model of so many blocks that are so wide, and its unfilled tensors."
    asked = settings | EACH_ONCE | {"num_layers": layers, "model_dim": dim, "train_seq_len": 2**17, "ve_layers": "0"}
    if "loop_start" in asked:
        asked |= {"loop_start": 0, "loop_end": 0, "parallel_start_layer": layers}
    return asked, named_state(model_from_settings(asked, device="meta")[0])


def bombs(data: bytes):
    "Sixty and more small files made of a good container that ask for far more than they hold: by a setting, a shape, a whole model that agrees with its tensors, or their JSON."
    header, payload = open_container(data)
    settings, tensors, unfolds = header["meta"]["settings"], header["tensors"], zlib.compress(bytes(2**24))

    def sealed(payload=payload, **parts):
        return seal(zlib.compress(json.dumps(header | parts).encode()), payload)

    for asked in huge_settings(settings):
        yield sealed(meta=header["meta"] | {"settings": asked})
    for shape in ([2**12, 2**12], [2**15, 2**15], [2**15, 2**16], [2**25, 1], [1, 2**26], [2**62, 2**62]):
        for used in ("rans", "zlib", "lzma"):
            stored, scales = zeros([shape]) if used == "rans" and shape[0] < 2**60 else unfolds, bytes(2 * min(shape[0], 2**16))
            yield sealed(stored + scales, tensors=[["a", "int8", shape]], sections=[["int8", used, len(stored)], ["scale", "none", len(scales)]])
    for layers, dim in ((1, 1536), (1, 2**12), (1, 2**16), (200, 256), (500, 512)):
        asked, state = large_model(settings, layers, dim)
        rows = [[name, "int8" if w.ndim == 2 else "fp16", [*w.shape]] for name, w in sorted(state.items())]
        stored = {section: zeros(shapes) for section, shapes in section_plan(rows).items()}
        yield sealed(b"".join(stored.values()), meta=header["meta"] | {"settings": asked}, tensors=rows, sections=[[s, "rans", len(coded)] for s, coded in stored.items()])
    for text in (b"[" * 2**19, b'{"a":' * 2**17, b" " * 2**26, b"[" + b"[]," * 2**18 + b"1]", b"9" * 2**19, b'{"meta":{"a":1e999}}', b"NaN", b'{"a":1,' * 2**16,
                 json.dumps(header | {"meta": {"a": "\x1b" * 2**16}}).encode(), json.dumps(header | {"tensors": [[f"{i}", "fp16", [1]] for i in range(2**15)]}).encode(),
                 json.dumps(header | {"tensors": tensors * 500}).encode()):
        yield seal(zlib.compress(text), payload)


def parted(rows: list) -> list:
    "A header's tensors with every int8 matrix as one of a trellis, of two digits."
    matrices = [(name, shape) for name, kind, shape in rows if kind == "int8"]
    return sorted(rows + [[name + COLUMNS, "int6", [1, shape[1]]] for name, shape in matrices] + [[name + HIGH, "int8", shape] for name, shape in matrices])


def trellis_bombs(data: bytes):
    "As many more, made of a good container with trellis matrices: a setting, shapes, whole models, parts that do not belong together, rows that are walked one by one, words on the loss."
    header, payload = open_container(data)
    settings, unfolds = header["meta"]["settings"], zlib.compress(bytes(2**24))

    def sealed(payload=payload, **parts):
        return seal(zlib.compress(json.dumps(header | parts).encode()), payload)

    def of_zeros(rows: list, used: str = "rans", **parts):
        stored = {section: zeros(shapes) if used == "rans" else unfolds for section, shapes in section_plan(rows).items()}
        return sealed(b"".join(stored.values()), tensors=rows, sections=[[s, used, len(coded)] for s, coded in stored.items()], **parts)

    for asked in huge_settings(settings):
        yield sealed(meta=header["meta"] | {"settings": asked})
    for shape in ([2**12, 4000], [2**15, 500], [2**16, 64], [2**22, 1], [1, 2**23], [75_001, 2**4]):
        for used in ("rans", "zlib", "lzma"):
            yield of_zeros(parted([["a", "int8", shape]]), used)
    for layers, dim in ((1, 1024), (1, 2**12), (1, 2**16), (200, 256), (500, 512)):
        asked, state = large_model(settings, layers, dim)
        rows = [[name, "int8" if w.ndim == 2 else "fp16", [*w.shape]] for name, w in state.items()]
        yield of_zeros(parted(rows), meta=header["meta"] | {"settings": asked})
    yield of_zeros(parted([[f"{i}", "int8", [2**16 - i, 1]] for i in range(60)]))
    yield of_zeros(parted([[f"{i}", "int8", [i + 1, 1]] for i in range(380)]))
    yield of_zeros(sorted([f"{i}{COLUMNS}", "int6", [1, 1]] for i in range(2**13)))
    yield of_zeros(sorted([["a", "int8", [9, 9]], *(["a" + COLUMNS * i, "int6", [1, 9]] for i in range(1, 20))]))
    for shares in ({name: 10**400 for name, _, _ in header["tensors"]}, {name: "\x1b[31m" for name, _, _ in header["tensors"]}, [[[[]]]] * 9**4, {f"{i}": 0.5 for i in range(2**16)},
                   {name: -1e300 for name, _, _ in header["tensors"]}, {name: [] for name, _, _ in header["tensors"]}, None):
        yield sealed(meta=header["meta"] | {"shares": shares})


LOG = """golfnb recipe:{1} seed:1 world_size:1 device:CPU torch:2
train_shards:1 val_tokens:9 unigram_bpb:3.0 code_bytes:2
code_sha256:{0}
artifact_sha256:{0}
Serialized model int6: 9 bytes
step:2/2 train_loss:2.0 train_time:5ms step_avg:2.5ms
legal_ttt_exact val_loss:2.00000000 val_bpb:1.00000000
"""
SMALL = {"NUM_LAYERS": "2", "MODEL_DIM": "32", "NUM_HEADS": "2", "NUM_KV_HEADS": "1", "ROPE_DIMS": "8", "VE_DIM": "8", "VE_LAYERS": "1", "BIGRAM_VOCAB_SIZE": "32", "BIGRAM_DIM": "8", "TRAIN_SEQ_LEN": "16",
         "EVAL_SEQ_LEN": "16", "SMALL_TENSOR": "512", "VOCAB_SIZE": "640", "TRAIN_BATCH_TOKENS": "1024"}


def on_a_trellis(packed: dict) -> dict:
    "A packed state whose int6 matrices are indices of a trellis, every second with some of two digits."
    found, g = dict(packed), torch.Generator().manual_seed(3)
    matrices = {name: p for name, p in packed.items() if p.kind == "int6"}
    for i, (name, p) in enumerate(matrices.items()):
        exponents = torch.randint(-9, 10, p.shape[1:], generator=g).to(torch.int8)
        found |= pack_trellis(name, torch.tensor(p.data).int() * [1, 40][i % 2], torch.tensor(p.scale), exponents)
    assert sum(COLUMNS in name for name in found) == len(matrices) > 4 and any(HIGH in name for name in found)
    return found


def tiny_model(program, **given) -> tuple:
    "A filled model as a program builds it, the program's settings, and what a file of its weights says of it."
    s = settings_of(program, given | LOOPS | {"TTT_CHUNK_SIZE": "8", "RECIPE": program.OWN["recipe"]})
    model = program.build(s, Ranks()).model
    if isinstance(model, Frontier):
        model.order = long_order(model.cfg)  # as after training
    meta = {"settings": saved_settings(model), "recipe": s.recipe, "seed": 1, "steps": 2, "vocab_size": s.vocab_size}
    return model, s, meta


def good_files(folder: Path) -> None:
    "What is mangled: of every recipe a tiny model in all codecs and the files of a finished run and of a submission; a tokenizer, a shard."
    train_tokenizer(stdlib_documents(["json"]), folder / "tokenizer.model", 640)
    write_shard(folder / "shard.bin", np.random.default_rng(0).integers(0, 640, 700, dtype=np.uint16))
    forms = set()
    for recipe in RECIPES:
        model, s, meta = tiny_model(find_program(recipe), **SMALL)
        meta["tokenizer_sha256"] = tokenizer_hash(folder / "tokenizer.model")
        form = tuple(meta["settings"].get(word) for word in ("family", "plan", "skip_gate"))
        state = quantize_state(named_state(model), False, small=s.small_tensor)
        on_trellis, shares = on_a_trellis(state), {"trellis": 8, "shares": dict.fromkeys(state, 0.015)}
        for codec in CODECS if form not in forms else [Rans()]:
            atomic_write(folder / recipe / f"{codec.name}.golf", pack_bytes(state, meta, codec))
            atomic_write(folder / recipe / f"{codec.name}.trellis.golf", pack_bytes(on_trellis, meta | shares, codec))
        if form not in forms:
            write_bombs(folder, recipe)
        forms.add(form)
        save_weights(folder / recipe / "run/ema.golf", named_state(model), meta)
        finished_files(folder / recipe, recipe, s)


def write_bombs(folder: Path, recipe: str) -> None:
    "All bombs that are made of a recipe's good files; recipes whose files have models of one form need them once."
    for kind, made in (("bombs", bombs((folder / recipe / "rans.golf").read_bytes())), ("trellis bombs", trellis_bombs((folder / recipe / "rans.trellis.golf").read_bytes()))):
        (folder / kind).mkdir(exist_ok=True)
        for i, data in enumerate(made):
            (folder / kind / f"{i:03}.{recipe}.golf").write_bytes(data)


def finished_files(folder: Path, recipe: str, s) -> None:
    "The files of a finished run and of its submission that are JSON or text."
    digest = hashlib.sha256(b"1\n").hexdigest()
    log = LOG.format(digest, recipe)
    findings = [{"scorer": s, "check": "c", "passed": True, "found": "f"} for s in ("files", "score-first training")]
    claim = dict.fromkeys(("author", "github_id", "name", "blurb", "date"), "x") | {"track": "non-record"}
    for name, value in {
            "run/summary.json": {"recipe": recipe, "seed": 1, "world": 1, "steps": 2, "device": "CPU", "ema_bpb": 1.5, "artifact_bytes": 9, "code_bytes": 1, "ledger": [["code", 1]], "losses": [3.0, 2.0],
                                 "seconds": {"training": 1.0}, "config": asdict(s)},
            "run/metrics.jsonl": {"event": "val", "step": 1, "loss": 2.0, "ms": 1.0}, "sub/audit_seed1.json": {"artifact_sha256": digest, "findings": findings, "compared": {"score-first training": {"the log": [2.0, 1.0]}}},
            "sub/submission.json": claim | claim_numbers([read_log(log)], 2, "non-record", None)}.items():
        atomic_write(folder / name, json.dumps(value))
    for name, text in (("README.md", "1.0000"), ("train_gpt.py", "1\n"), ("train_seed1.log", log)):
        atomic_write(folder / "sub" / name, text)


def run_files(folder: Path) -> None:
    "Under `folder` finished runs with their data: of every recipe, and of a copy of each that is a program of one's own."
    data = tiny_data(folder / "data")
    for recipe in RECIPES:
        own = folder / f"mine_{recipe}.py"
        own.write_text(copied_program(recipe, own.stem))
        for program, run in ((find_program(recipe), folder / "runs" / recipe), (find_program(own), folder / "runs" / own.stem)):
            model, s, meta = tiny_model(program, **TINY, **data)
            meta |= {"tokenizer_sha256": tokenizer_hash(data["TOKENIZER_PATH"]), "program_sha256": program_sha256(program)}
            save_weights(run / "ema.golf", named_state(model), meta)
            packed = pack_bytes(quantize_state(named_state(model), False, small=s.small_tensor), meta, Zlib())
            atomic_write(run / "artifact.golf", packed)
            facts = {name: meta[name] for name in ("recipe", "seed", "steps")}
            atomic_write(run / "summary.json", json.dumps(facts | {"config": asdict(s)}))


def swollen(data: bytes, rng: random.Random) -> bytes:
    "A container one of whose settings is large, its checksum right."
    header, payload = open_container(data)
    settings = header["meta"]["settings"]
    name = rng.choice([name for name, value in settings.items() if type(value) is int])
    settings[name] = rng.choice([512, 4096, 10**6, 10**9, 2**40])
    return seal(zlib.compress(json.dumps(header).encode(), 9), payload)


def mangled_run(folder: Path, rng: random.Random, recipe: str, own: bool) -> list[list[str]]:
    "Mangle the weights of a finished run, or leave them as they are; the commands that read them."
    run, program = folder / "bad run", ["--program", str(folder / f"mine_{recipe}.py")] if own else []
    shutil.copytree(folder / "runs" / (f"mine_{recipe}" if own else recipe), run, dirs_exist_ok=True)
    change = rng.choice([swollen, swollen, swollen, edited, forge, mutate, lambda data, rng: data])
    for name in ("artifact.golf", "ema.golf"):
        (run / name).write_bytes(change((run / name).read_bytes(), rng))
    words = [["artifact", "export", str(run / "artifact.golf"), str(folder / "bad.safetensors")], ["sample", str(run), "a", "--tokens", "1"],
             ["play", str(run), "--no-browser"], ["score", str(run)], ["quantize", str(run)]]
    return [[*command, *program] for command in words]


FULL = {"artifacts": 10_000, "trellis artifacts": 10_000, "bombs": 10**9, "trellis bombs": 10**9, "shards": 1000, "tokenizers": 300, "summaries and claims": 300, "runs": 300}  # of bombs all there are
ALLOWED_SECONDS, ALLOWED_BYTES = 5, 1_500_000_000  # of a command: of the processor (and 300 by the clock); above what it had before
GOOD, BAD = ("fine", "one sentence"), ("raw exception", "over time", "over memory", "the process died")
JSON_FILES = ("run/summary.json", "sub/submission.json", "sub/audit_seed1.json", "run/metrics.jsonl", "sub/train_seed1.log")


def mangled(folder: Path, kind: str, seed: int) -> list[list[str]]:
    "Write a mangled file of a kind, of the recipe whose turn it is; the commands that read it."
    rng, at, recipe, turn = random.Random(f"{kind} {seed}"), lambda name: str(folder / name), RECIPES[seed % len(RECIPES)], seed // len(RECIPES)
    if kind.endswith(("artifacts", "bombs")):
        trellis = ".trellis" if "trellis" in kind else ""
        if "bombs" in kind:
            data = bomb_files(folder, kind)[seed].read_bytes()
        else:
            files = [path for path in sorted((folder / recipe).glob("*.golf")) if ("trellis" in path.name) == ("trellis" in kind)]
            data = rng.choice([mutate, forge, edited])(files[turn % len(files)].read_bytes(), rng)
        (folder / "bad.golf").write_bytes(data)
        read = [["artifact", "inspect", at("bad.golf")], ["sample", at("bad.golf"), "a", "--tokens", "1", "--tokenizer", at("tokenizer.model")]]
        return [*read, ["artifact", "export", at("bad.golf"), at("bad.safetensors")]] if trellis else read
    if kind == "runs":
        return mangled_run(folder, rng, recipe, bool(turn % 2))
    if kind == "shards":
        (folder / "bad.bin").write_bytes(mutate((folder / "shard.bin").read_bytes(), rng))
        return [["data", "inspect", at("bad.bin"), "--tokenizer", at("tokenizer.model")]]
    if kind == "tokenizers":
        (folder / "bad.model").write_bytes(mutate((folder / "tokenizer.model").read_bytes(), rng))
        return [["data", "inspect", at("shard.bin"), "--tokenizer", at("bad.model")]]
    for part in ("run", "sub"):
        shutil.copytree(folder / recipe / part, folder / "bad" / part, dirs_exist_ok=True)
    name = JSON_FILES[turn % len(JSON_FILES)]
    text = (folder / recipe / name).read_bytes()
    (folder / "bad" / name).write_bytes(mutate(text, rng) if name.endswith("log") or rng.random() < 0.3 else json.dumps(edit(json.loads(text), rng)).encode())
    if name.startswith("sub"):
        return [["submission", "--check", at("bad/sub")]]
    return [["compare", at(f"{recipe}/run"), at("bad/run")], ["report", at("bad/run")], ["quantize", at("bad/run")]]


def bomb_files(folder: Path, kind: str) -> list[Path]:
    "The files of a kind of bombs, in an order that is drawn once."
    files = sorted((folder / kind).iterdir())
    return random.Random(kind).sample(files, len(files))


def outcome(words: list[str]) -> str:
    "What a command makes of a file: one of GOOD, or what is wrong with it, in a word of BAD."
    out, err, start, before = io.StringIO(), io.StringIO(), time.process_time(), grown()
    try:
        with redirect_stdout(out), redirect_stderr(err):
            status = main_cli(words)
    except MemoryError:
        return "over memory"
    except BaseException as error:
        return f"raw exception: {words[0]}: {type(error).__name__}: {error}"
    said = err.getvalue()
    if "MemoryError" in said or "allocate memory" in said or grown() - before > ALLOWED_BYTES:
        return f"over memory: {words[0]} says {said}"
    if CONTROLS.search(out.getvalue() + said) or status == 2 and (said.count("\n") != 1 or not said.startswith("golfnb: ")):
        return f"raw exception: {words[0]} says {(out.getvalue() + said)[-300:]!r}"
    return f"over time: {words[0]}" if time.process_time() - start > ALLOWED_SECONDS else "one sentence" if status else "fine"


def drill_child(folder: Path, kind: str, seeds: range, pipe) -> None:
    "Send the worst that comes of each seed's commands; with no more memory than allowed."
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # SentencePiece writes there from C++
    play.run_server = lambda server, *_: server.server_close()  # a page that nobody asks for
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + ALLOWED_BYTES,) * 2)
    for seed in seeds:
        found = [outcome(words) for words in mangled(folder, kind, seed)]
        pipe.send(max(found, key=lambda word: (word not in GOOD, word)))


def drill(folder: Path, kind: str, count: int) -> list[str]:
    "What came of `count` mangled files of a kind, in forked children: a fresh one after each file that was not refused as it should be."
    found, fork = [], multiprocessing.get_context("fork")
    torch.set_num_threads(1)
    while len(found) < count:
        ours, theirs = fork.Pipe(duplex=False)
        child = fork.Process(target=drill_child, args=(folder, kind, range(len(found), count), theirs))
        child.start()
        theirs.close()
        word = GOOD[0]
        while word in GOOD and len(found) < count:
            try:
                word = ours.recv() if ours.poll(60 * ALLOWED_SECONDS) else "over time: killed"
            except EOFError:
                word = "the process died"
            found.append(word)
        child.kill()
        child.join()
    return found


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    good_files(folder := tmp_path_factory.mktemp("good"))
    run_files(folder)
    return folder


@pytest.mark.parametrize("kind, count", {"artifacts": 60, "trellis artifacts": 60, "bombs": 60, "trellis bombs": 60, "shards": 10, "tokenizers": 30, "summaries and claims": 45, "runs": 18}.items())
def test_commands_read_mangled_files_or_refuse_them_in_one_line(good, kind, count):
    found = drill(good, kind, count)
    assert set(found) <= set(GOOD), [f"{kind} {seed}: {word}" for seed, word in enumerate(found) if word not in GOOD]
    assert "one sentence" in found and ("fine" in found or kind == "tokenizers")


def taken(work) -> tuple:
    "Bytes by which a forked process grows at most while it does `work`, and what that gave."
    ours, theirs = multiprocessing.get_context("fork").Pipe(duplex=False)
    if not (child := os.fork()):
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
        resident = lambda word: 1024 * int(Path("/proc/self/status").read_text().split(word)[1].split()[0])
        before, gave = resident("VmRSS:"), work()
        theirs.send((resident("VmHWM:") - before, gave))
        os._exit(0)
    theirs.close()
    os.waitpid(child, 0)
    return ours.recv()


@pytest.mark.parametrize("bomb, load, times", [("bombs/026.pr1060", load_artifact, 6), ("bombs/044.pr1060", load_model, 8), ("trellis bombs/026.pr1060", load_artifact, 6), ("trellis bombs/044.pr1060", load_model, 8)])
def test_loading_takes_the_stated_multiple_of_what_is_needed(good, bomb, load, times):
    "Of the decoded bytes, and of the fp32 weights that the settings ask for: a section of 16 MiB, a model of 22 million weights, or of 10 on a trellis, in files of some KB."
    path = good / f"{bomb}.golf"
    forms = {name: (kind, tuple(shape)) for name, kind, shape in open_container(path.read_bytes())[0]["tensors"]}
    numbers = sum(math.prod(shape) for _, shape in (without_parts(forms) if load is load_model else forms).values())
    assert path.stat().st_size < 12_000 and 8e6 < numbers and taken(lambda: bool(load(path)))[0] < times * numbers * (4 if load is load_model else 1)


def resealed(path: Path, **settings) -> None:
    "Other settings in a container's header, its checksum right."
    header, payload = open_container(path.read_bytes())
    header["meta"]["settings"] |= settings
    path.write_bytes(seal(zlib.compress(json.dumps(header).encode(), 9), bytes(payload)))


LARGE = [{"model_dim": 4096, "num_heads": 64, "num_kv_heads": 64}, {"num_layers": 9999}, {"mlp_mult": 8000.0}, {"bigram_vocab_size": 4 * 10**7}]  # each allowed, and more than a gigabyte
HELD_AGAINST = r"must have shape|the settings of its model of 2 layers|the 214,983 weights that it holds"  # what the file's tensors say of the settings


def small_run(folder: Path, own: bool, **settings) -> list[str]:
    "A run's folder with files of some KB whose settings ask for another model; the words that name its program."
    (folder / "run").mkdir()
    data = tiny_data(folder / "run")
    found = settings_for("demo", **{name: value for name, value in TINY.items() if name != "RECIPE"})
    model, saved, _ = model_from_settings(model_settings(found))
    meta = {"settings": model_settings(found), "tokenizer_sha256": tokenizer_hash(data["TOKENIZER_PATH"]), "seed": 1, "steps": 1, "vocab_size": 400, "recipe": "demo"}
    if own:
        (folder / "mine.py").write_text(copied_program("demo", "mine"))
        meta |= {"recipe": "mine", "program_sha256": program_sha256(find_program(folder / "mine.py"))}
    for name in ("artifact.golf", "ema.golf"):
        save_weights(folder / "run" / name, named_state(model), meta)
        resealed(folder / "run" / name, **settings)
    (folder / "run" / "summary.json").write_text(json.dumps({"recipe": meta["recipe"], "seed": 1, "steps": 1, "config": {"data_path": data["DATA_PATH"]}}))
    return ["--program", "mine.py"] if own else []


@pytest.mark.parametrize("words", [["quantize", "run"], ["score", "run"], ["sample", "run", "a", "--tokens", "1"]], ids=lambda words: words[0])
@pytest.mark.parametrize("own, settings", [(own, settings) for own in (True, False) for settings in LARGE if not (own and "num_layers" in settings)])  # of a program of one's own, so many layers are refused after minutes
def test_no_model_is_built_that_its_file_does_not_hold(tmp_path, words, own, settings):
    "It is refused for its tensors, which no bound of a setting does, and before it takes memory: with the program of a recipe and with one of your own."
    program = small_run(tmp_path, own, **settings)
    grew, done = taken(lambda: golfnb(*words, *program, cwd=tmp_path))
    assert done.returncode == 2 and one_sentence(done.stderr) and re.search(HELD_AGAINST, done.stderr), (done.stdout, done.stderr)
    assert grew < 512 << 20


def test_a_program_builds_no_thousands_of_blocks_for_a_file_of_few_tensors(tmp_path, monkeypatch):
    "One of your own, whose blocks may share weights; of a recipe the file must have the tensors of each."
    (tmp_path / "mine.py").write_text(copied_program("demo", "mine"))
    program = find_program(tmp_path / "mine.py")
    model, s, meta = tiny_model(program, **TINY)
    save_weights(tmp_path / "a.golf", named_state(model), meta)
    monkeypatch.setattr(program, "build", lambda s, ranks: f"{s.num_layers} built")
    few = report.built(program, replace(s, num_layers=100), tmp_path / "a.golf", Ranks())
    assert few == "100 built"
    with pytest.raises(GolfError, match="a.golf: .* at most 100 blocks, found NUM_LAYERS=4096 for [0-9]+ tensors"):
        report.built(program, replace(s, num_layers=4096), tmp_path / "a.golf", Ranks())


def main(limit: int = 10**9, *kinds: str) -> None:
    where, here, start = os.environ.get("OUT", "nbs/results"), where_measured(), time.monotonic()
    known = read_result("mangle_cpu", where) if kinds else {"samples": {}, "facts": {"made": {}}}
    samples, made = known["samples"], known["facts"]["made"]
    with tempfile.TemporaryDirectory() as folder:
        good_files(Path(folder))
        run_files(Path(folder))
        for kind in kinds or FULL:
            count = len(bomb_files(Path(folder), kind)) if "bombs" in kind else FULL[kind]
            found = drill(Path(folder), kind, min(count, limit))
            tally = Counter(word.split(":")[0] for word in found)
            samples[kind] = [tally[word] for word in GOOD + BAD]
            made[kind] = {"recipes": RECIPES, "commit": here["commit"], "date": here["date"]}
            print(f"{kind}: {dict(tally)}, {time.monotonic() - start:.0f} s", *(f"\n  {seed}: {word[:400]}" for seed, word in enumerate(found) if word not in GOOD), flush=True)
    facts = {"outcomes": GOOD + BAD, "allowed_seconds": ALLOWED_SECONDS, "allowed_bytes": ALLOWED_BYTES, "made": made, "seeds": "kind and 0, 1, 2, ..."}
    note = "mangled files of each kind through the commands that read it; how many of each outcome"
    print(record_result("mangle_cpu", samples, "files", note, facts, where, here))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:2]), *sys.argv[2:])

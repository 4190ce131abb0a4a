"""Damaged and hostile files: loaded with equal content or refused with golfnb's own error; no crash, no hang, bounded memory, nothing executed.

In the tests a few hundred mutations. The full set, in some minutes on one core:

    python tests/test_fuzz.py 10000 1000          10,000 mutated artifacts, 1,000 mutated shards
"""
import json
import os
import pickle
import random
import signal
import struct
import subprocess
import sys
import tempfile
import time
import zlib
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent.parent), str(Path(__file__).resolve().parent)]

import numpy as np
import pytest
import torch

from golfnb.artifact import PREFIX_BYTES, load_artifact, load_weights, pack_bytes, save_weights, seal
from golfnb.settings import GolfError
from golfnb.shards import open_shard, read_header, read_tokens, write_shard
from test_artifact import META, same, toy

CODECS = ("lzma", "zlib", "rans", "best", "none")
MEMORY = 192 << 20  # bytes a process may grow by while it reads damaged files of at most 64 KB
SECONDS = 20        # a single file may take


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
    def __reduce__(self):
        return os.system, ("touch /tmp/golfnb-was-here",)


def test_nothing_that_is_read_is_executed_or_unpickled(tmp_path):
    rng = random.Random(5)
    for i, codec in enumerate(CODECS):
        data = pack_bytes(toy(), META, codec)
        (tmp_path / f"good{i}.golf").write_bytes(data)
        for j in range(4):
            (tmp_path / f"forged{i}{j}.golf").write_bytes(forge(data, rng))
    (tmp_path / "trap.golf").write_bytes(pickle.dumps(Trap()))
    (tmp_path / "trap.bin").write_bytes(pickle.dumps(Trap()) + bytes(2000))
    torch.save({"w": torch.zeros(3)}, tmp_path / "torch.golf")
    (tmp_path / "code.golf").write_text("import os; os.system('touch /tmp/golfnb-was-here')")
    good = toy()
    save_weights(tmp_path / "ema.golf", {"a": torch.zeros(4, 5)}, {"note": "__import__('os').system('touch /tmp/golfnb-was-here')"})
    write_shard(tmp_path / "good.bin", np.arange(100, dtype=np.uint16))
    done = subprocess.run([sys.executable, "-c", HOOK, str(tmp_path)], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip().endswith("CLEAN") and "pickle.find_class" in done.stdout, done.stdout + done.stderr
    assert not Path("/tmp/golfnb-was-here").exists() and same(load_artifact(tmp_path / "good0.golf")[1], good) and load_weights(tmp_path / "ema.golf")


def full(artifacts: int, shards: int) -> None:
    signal.signal(signal.SIGALRM, too_slow)
    with tempfile.TemporaryDirectory() as folder:
        fuzz_artifacts(20, 0, Path(folder))
        before, start = grown(), time.time()
        print(f"{artifacts:,} artifacts of {len(CODECS)} codecs:", fuzz_artifacts(artifacts, 11, Path(folder)), f"{time.time() - start:.0f} s", flush=True)
        start = time.time()
        print(f"{shards:,} shards:", fuzz_shards(shards, 12, Path(folder)), f"{time.time() - start:.0f} s")
        print(f"memory grew by {(grown() - before) / 2**20:.0f} MiB (allowed {MEMORY >> 20})")
        assert grown() - before < MEMORY


if __name__ == "__main__":
    full(int(sys.argv[1]), int(sys.argv[2]))

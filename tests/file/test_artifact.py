"""The container: round trips, damage, hostile headers, disks, parts. Everything here is at most a few dozen KB."""
import bz2
import hashlib
import json
import math
import lzma
import random
import re
import struct
import subprocess
import sys
import tracemalloc
import zlib

import numpy as np
from pathlib import Path
from dataclasses import asdict

import pytest
import torch

import golfnb.file.artifact as artifact
from tiny import model_settings, settings_for

from golfnb.file.artifact import (ARTIFACT_CAP, CODECS, PREFIX_BYTES, Best, Brotli, Lzma, Plain, Rans, Zlib, Zstd, artifact_ledger, check_codec, decompress_section, export_safetensors,
                             ledger_rows, load_artifact, load_model, load_weights, open_own, pack_bytes, save_artifact, save_weights, seal, unpack_bytes)
from golfnb.text.bpb import tokenizer_hash
from golfnb.settings import GolfError
from golfnb.model.golf import init_model, model_from_settings, named_state
from golfnb.file.quantize import Packed, dequantize_state, pack_plain, pack_rows, pack_std, quantize_state

STDLIB_CODECS = [Lzma(), Zlib(), Rans(), Best(), Plain()]
each_codec = pytest.mark.parametrize("codec", STDLIB_CODECS, ids=lambda codec: codec.name)


def unpack_foreign(data, codecs=CODECS):
    return artifact.unpack_foreign(data, codecs)


def toy(seed=0):
    g = torch.Generator().manual_seed(seed)
    return {"up": pack_rows("up", torch.randn(48, 40, generator=g), "int6"), "down": pack_std("down", torch.randn(20, 30, generator=g), 20.0),
            "table": pack_rows("table", torch.randn(10, 8, generator=g), "int8"), "gain": pack_plain("gain", torch.randn(5, generator=g), "fp16"),
            "scale": pack_plain("scale", torch.tensor(0.05), "fp16"), "mix": pack_plain("mix", torch.randn(2, 3, 4, generator=g), "fp32"),
            "half": pack_plain("half", torch.randn(6, 7, generator=g), "bf16"), "wide": pack_plain("wide", torch.randn(3, generator=g).double(), "fp64")}


META = {"settings": {"num_layers": 1}, "tokenizer_sha256": "ab" * 32, "vocab_size": 512, "note": "ä ☃", "list": [1, 2.5, None, True]}


def same(a: dict[str, Packed], b: dict[str, Packed]) -> bool:
    return a.keys() == b.keys() and all(p.kind == b[n].kind and p.shape == b[n].shape and p.data.tobytes() == b[n].data.tobytes() and p.data.dtype == b[n].data.dtype
                                        and (p.scale is None) == (b[n].scale is None) and (p.scale is None or np.array_equal(p.scale, b[n].scale)) for n, p in a.items())


def parts_of(data: bytes) -> tuple[dict, bytes]:
    length = struct.unpack("<I", data[12:16])[0]
    return json.loads(zlib.decompress(data[PREFIX_BYTES:PREFIX_BYTES + length])), data[PREFIX_BYTES + length:]


def sealed(header, payload=b"") -> bytes:
    return seal(zlib.compress(json.dumps(header).encode()), payload)


# --- round trips

@each_codec
def test_round_trip_and_same_bytes(codec):
    data = pack_bytes(toy(), META, codec)
    meta, back = unpack_foreign(data)
    own = unpack_bytes(data, codec)
    assert meta == own[0] == META and same(back, toy()) and same(own[1], toy())
    assert data == pack_bytes(toy(), META, codec) == pack_bytes(dict(reversed(toy().items())), dict(reversed(META.items())), codec) == pack_bytes(back, meta, codec)
    assert {s[1] for s in parts_of(data)[0]["sections"]} <= {"lzma", "zlib", "rans", "none"}


def test_same_bytes_in_another_process():
    code = "import hashlib, test_artifact as t; print(hashlib.sha256(t.pack_bytes(t.toy(), t.META, t.Best())).hexdigest())"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=__import__("os").environ | {"PYTHONHASHSEED": "77"})
    assert out.stdout.strip() == hashlib.sha256(pack_bytes(toy(), META, Best())).hexdigest(), out.stderr


def test_empty_state_and_single_codec_best_is_smallest():
    assert unpack_foreign(pack_bytes({}, {}, Lzma())) == ({}, {}) == unpack_bytes(pack_bytes({}, {}, Lzma()), Lzma())
    sizes = {c.name: len(pack_bytes(toy(), {}, c)) for c in STDLIB_CODECS}
    assert sizes["best"] <= min(sizes.values()) + 16


def slow_rans(stored: bytes, shapes: list) -> bytes:
    "The format of our coder, one value at a time."
    fineness, low, count, length = struct.unpack("<BHBI", stored[:8])
    side, size = zlib.decompress(stored[8:8 + length]), sum(r * c for r, c in shapes)
    tables = [struct.unpack("<256H", side[512 * k:512 * k + 512]) for k in range(count)]
    streams, at, contexts, levels = max(int(size**0.5) // 8, 1), 8 + length, [], side[512 * count:]
    for r, c in shapes:
        contexts += [min(max(levels[i] + levels[r + j] - low, 0), count - 1) for i in range(r) for j in range(c)]
        levels = levels[r + c:]
    x, at, out = list(struct.unpack(f"<{streams}I", stored[at:at + 4 * streams])), at + 4 * streams, bytearray()
    for i, k in enumerate(contexts):
        slot, value, below = x[i % streams] % 2**14, 0, 0
        while below + tables[k][value] <= slot:
            below, value = below + tables[k][value], value + 1
        out.append(value)
        y = tables[k][value] * (x[i % streams] >> 14) + slot - below
        if y < 2**16:
            y, at = (y << 16) | int.from_bytes(stored[at:at + 2], "little"), at + 2
        x[i % streams] = y
    assert at == len(stored) and set(x) == {2**16}
    return bytes(out)


@pytest.mark.parametrize("codec", [Rans(), Best()], ids=["rans", "best"])
def test_decodes_with_the_standard_library_and_numpy_alone(tmp_path, codec):
    "The format, read back by fifty lines that know nothing of golfnb."
    path = tmp_path / "a.golf"
    save_artifact(path, toy(), META, codec)
    data = path.read_bytes()
    magic, version, length, digest = struct.unpack("<8sII32s", data[:48])
    assert magic == b"\x93GOLFNB\n" and version == 1 and hashlib.sha256(data[:16] + data[48:]).digest() == digest
    header, at, streams = json.loads(zlib.decompress(data[48:48 + length])), 48 + length, {}
    for section, codec, stored in header["sections"]:
        width = {"scale": 2, "fp16": 2, "bf16": 2, "fp32": 4, "fp64": 8}.get(section)
        shapes = [s for _, kind, s in header["tensors"] if kind == section] if width is None else [(sum(2 * s[0] for _, k, s in header["tensors"] if k in ("int6", "int8")) // 2 if section == "scale" else
                                                                                                    sum(int(np.prod(s)) for _, k, s in header["tensors"] if k == section), width)]
        streams[section] = {"lzma": __import__("lzma").decompress, "zlib": zlib.decompress, "none": bytes, "rans": lambda b: slow_rans(b, shapes)}[codec](data[at:at + stored])
        at += stored
    place = dict.fromkeys(streams, 0)
    for name, kind, shape in header["tensors"]:
        count = int(np.prod(shape))
        values = np.frombuffer(streams[kind], artifact.KIND_DTYPES[kind], count, place[kind]).reshape(shape)
        place[kind] += values.nbytes
        assert np.array_equal(values, toy()[name].data.reshape(shape))
        if kind in ("int6", "int8"):
            assert np.array_equal(np.frombuffer(streams["scale"], "<f2", shape[0], place["scale"]), toy()[name].scale)
            place["scale"] += 2 * shape[0]


# --- damage

@each_codec
def test_fuzz_every_mutation_is_a_golf_error(codec):
    data, rng = pack_bytes(toy(), META, codec), random.Random(7)
    for _ in range(200):
        bad = bytearray(data)
        for _ in range(rng.choice([1, 1, 3])):
            way = rng.randrange(4)
            at = rng.randrange(len(bad)) if bad else 0
            if way == 0 and bad:
                bad[at] ^= 1 << rng.randrange(8)
            elif way == 1:
                del bad[at:]
            elif way == 2:
                bad[at:at] = rng.randbytes(rng.randrange(1, 9))
            else:
                del bad[at:at + rng.randrange(1, 9)]
        if bytes(bad) != data:
            with pytest.raises(GolfError) as caught:
                unpack_foreign(bytes(bad))
            assert "\n" not in str(caught.value) and len(str(caught.value)) < 500


@each_codec
def test_fuzz_behind_the_checksum(codec):
    "With a checksum that fits, a mutation is a GolfError or other weights of the same shapes; nothing else, and no memory."
    header, payload = parts_of(pack_bytes(toy(), META, codec))
    text, rng, refused = json.dumps(header).encode(), random.Random(11), 0
    tracemalloc.start()
    for i in range(300):
        h, p = bytearray(text), bytearray(payload)
        target = h if i % 2 else p
        for _ in range(rng.choice([1, 2, 5])):
            target[rng.randrange(len(target))] = rng.choice(b'0123456789-[]{}",:.aeE \xff') if i % 2 else rng.randrange(256)
        try:
            _, back = unpack_foreign(seal(zlib.compress(bytes(h)), bytes(p)))
            assert all(x.data.size == np.prod(x.shape) for x in back.values())
        except GolfError as error:
            refused += 1
            assert "\n" not in str(error)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert refused > 30 and peak < 64 * 2**20


BAD_TENSORS = [["up"], ["up", "int6"], "up", None, 3, ["up", "int7", [2, 2]], ["up", "scale", [2, 2]], ["up", ["int6"], [2, 2]], [1, "int6", [2, 2]], ["up", "int6", [4]], ["up", "int6", [2, 2, 1]],
               ["up", "int6", [-2, -2]], ["up", "int6", [2.0, 2]], ["up", "int6", [True, 4]], ["up", "int6", "22"], ["up", "int6", [0, 4]], ["up", "int6", [2**40, 1]], ["up", "fp32", [1] * 9],
               ["up", "fp32", [2**30, 2**30]], ["up", "int6", {"a": 1}]]


@pytest.mark.parametrize("tensor", BAD_TENSORS, ids=str)
def test_hostile_tensors(tensor):
    with pytest.raises(GolfError):
        unpack_foreign(sealed({"meta": {}, "tensors": [tensor], "sections": [["int6", "none", 4], ["scale", "none", 4]]}, bytes(8)))


GOOD = {"meta": {}, "tensors": [["up", "int6", [2, 2]]], "sections": [["int6", "none", 4], ["scale", "none", 4]]}


@pytest.mark.parametrize("change", [
    {"sections": []}, {"sections": GOOD["sections"][::-1]}, {"sections": GOOD["sections"] * 2}, {"sections": [["int6", "none", 5], ["scale", "none", 3]]}, {"sections": [["int6", "none", -4], ["scale", "none", 12]]},
    {"sections": [["int6", "best", 4], ["scale", "none", 4]]}, {"sections": [["int6", "exec", 4], ["scale", "none", 4]]}, {"sections": [["int6", None, 4], ["scale", "none", 4]]}, {"sections": [["int6", "zlib", 4], ["scale", "none", 4]]},
    {"sections": [["int6", "lzma", 4], ["scale", "none", 4]]}, {"sections": [["int6", "none", 4.0], ["scale", "none", 4]]}, {"sections": [[["int6"], "none", 4], ["scale", "none", 4]]}, {"sections": {"int6": 4}},
    {"tensors": [["up\n", "int6", [2, 2]]]}, {"tensors": [["u" * 999, "int6", [2, 2]]]}, {"meta": {"a": float("nan")}}, {"meta": {"a": "\x1b[2J"}}, {"meta": {"a": 10**30}}, {"meta": {"a": [[[[[[[[[[[[[[[[[[[[[[]]]]]]]]]]]]]]]]]]]]]]}},
    {"tensors": [["up", "int6", [2, 2]]] * 2}, {"tensors": {}}, {"meta": []}, {"more": 1}], ids=str)
def test_hostile_headers(change):
    assert unpack_foreign(sealed(GOOD, bytes(8)))[1]["up"].shape == (2, 2)
    with pytest.raises(GolfError):
        unpack_foreign(sealed(GOOD | change, bytes(8)))


@pytest.mark.parametrize("header", [b"", b"not deflated", zlib.compress(b"{"), zlib.compress(b"[]"), zlib.compress(b"\xff\xfe"), zlib.compress(b"[" * 100_000), zlib.compress(bytes(2**23)),
                                    zlib.compress(json.dumps(GOOD).encode()) + b"tail", zlib.compress(json.dumps(GOOD).encode())[:-3]])
def test_hostile_header_bytes(header):
    with pytest.raises(GolfError):
        unpack_foreign(seal(header, bytes(8)))


def test_hostile_values():
    with pytest.raises(GolfError, match="integers.*31"):
        unpack_foreign(sealed(GOOD, bytes([0, 0, 0, 32]) + bytes(4)))
    for value in (np.nan, np.inf):
        with pytest.raises(GolfError, match="finite"):
            unpack_foreign(sealed({"meta": {}, "tensors": [["a", "fp32", [1]]], "sections": [["fp32", "none", 4]]}, np.float32(value).tobytes()))
    with pytest.raises(GolfError, match="scales"):
        unpack_foreign(sealed(GOOD, bytes(4) + np.array([np.nan, 1], np.float16).tobytes()))


@pytest.mark.parametrize("codec", [Lzma(), Zlib()], ids=["lzma", "zlib"])
def test_bombs_unfold_no_further_than_declared(codec):
    used, stored = codec.compress(bytes(64 * 2**20), [(64 * 2**20, 1)])
    bomb = sealed(GOOD | {"sections": [["int6", used, len(stored)], ["scale", "none", 4]]}, stored + bytes(4))
    tracemalloc.start()
    for read in (unpack_foreign, lambda data: unpack_bytes(data, codec)):
        with pytest.raises(GolfError, match=f"'{used}'.*more"):
            read(bomb)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 16 * 2**20  # lzma keeps a dictionary of 8 MiB


def test_declared_gigabytes_are_refused_before_they_are_allocated():
    tensors = [[f"t{i}", "int8", [2**15, 2**15]] for i in range(4)]
    for some, size in ((tensors, 0), ([["t", "int8", [2**13, 2**12]]], 2**14), ([["t", "int8", [2**13, 2**13]]], 2**20)):  # 4 GiB; 32 MiB and its scales; 64 MiB in 1
        header = {"meta": {}, "tensors": some, "sections": [["int8", "rans", size], ["scale", "none", 0]]}
        with pytest.raises(GolfError, match="33,554,432"):
            unpack_foreign(sealed(header, bytes(size)))


def test_versions_magic_and_short_files():
    data = pack_bytes(toy(), {}, Lzma())
    for bad, word in ((data[:8] + struct.pack("<I", 2) + data[12:], "version.* 1, .*2"), (b"\x80\x04" + data[2:], "x80"), (b"", "in 0"), (data[:20], "in 20"),
                      (data[:12] + struct.pack("<I", 2**31) + data[16:], "checksum"), (data + b"x", "checksum"), (data[:-1], "checksum")):
        for read in (unpack_foreign, lambda data: unpack_bytes(data, Lzma())):
            with pytest.raises(GolfError, match=word):
                read(bad)


def test_section_sizes_are_exact():
    for codec in STDLIB_CODECS:
        used, stored = codec.compress(b"abc" * 50, [(150, 1)])
        for size in (149, 151, 0):
            with pytest.raises(GolfError):
                decompress_section(stored, used, [(size, 1)], codec.known())
        if used != "none":
            with pytest.raises(GolfError):
                decompress_section(stored + b"tail", used, [(150, 1)], codec.known())


@pytest.mark.parametrize("codec, package", [(Brotli(), "brotli"), (Zstd(), "zstandard")], ids=["brotli", "zstd"])
def test_optional_codecs_work_or_say_what_is_missing(codec, package):
    try:
        __import__(package)
    except ImportError:
        foreign = sealed(GOOD | {"sections": [["int6", codec.name, 4], ["scale", "none", 4]]}, bytes(8))
        for call in (codec.check, lambda: pack_bytes(toy(), {}, codec), lambda: unpack_foreign(foreign)):
            with pytest.raises(GolfError, match=f"{package}.*pip install"):
                call()
        return
    codec.check()
    data = pack_bytes(toy(), META, codec)
    assert same(unpack_foreign(data)[1], toy()) and same(unpack_bytes(data, codec)[1], toy()) and {s[1] for s in parts_of(data)[0]["sections"]} == {codec.name}
    _, bomb = codec.compress(bytes(2**20), [(2**20, 1)])
    with pytest.raises(GolfError):
        decompress_section(bomb, codec.name, [(100, 1)], CODECS)


def test_a_word_in_place_of_a_codec_is_told_the_class(tmp_path):
    for word, wanted in (("lzma", "Lzma"), ("none", "Plain"), ("best", "Best"), ("zstd", "Zstd")):
        for call in (lambda: pack_bytes(toy(), {}, word), lambda: save_artifact(tmp_path / "a.golf", toy(), {}, codec=word), lambda: unpack_bytes(b"", word)):
            with pytest.raises(GolfError, match=rf"{word}.*{wanted}\(\)"):
                call()
    assert not list(tmp_path.iterdir())


def test_a_reader_accepts_only_the_codecs_it_brings():
    "What a file says never chooses beyond the reader's table; `best` is a choice of the writer, not a way to store."
    assert set(CODECS) == {"none", "lzma", "zlib", "rans", "brotli", "zstd"} and all(codec.name == name for name, codec in CODECS.items())
    data = pack_bytes(toy(), META, Zlib())
    for read in (lambda: unpack_bytes(data, Lzma()), lambda: unpack_foreign(data, Lzma().known()), lambda: unpack_foreign(data, {})):
        with pytest.raises(GolfError, match="'zlib'"):
            read()
    for name in ("best", "os", "golfnb.file.artifact.Lzma", "__class__", ["lzma"], {"lzma": 1}, None, 3, "x" * 10_000):
        with pytest.raises(GolfError, match=re.escape(f"{name!r:.60}")) as caught:
            unpack_foreign(sealed(GOOD | {"sections": [["int6", name, 4], ["scale", "none", 4]]}, bytes(8)))
        assert len(str(caught.value)) < 300


def test_a_codec_of_ones_own():
    class Backwards(Plain):
        name = "backwards"

        def compress(self, raw, shapes):
            return self.name, raw[::-1]

        def decompress(self, stored, size, shapes):
            return bytes(stored)[::-1]

    data = pack_bytes(toy(), META, Backwards())
    assert same(unpack_bytes(data, Backwards())[1], toy()) and same(unpack_foreign(data, CODECS | Backwards().known())[1], toy())
    with pytest.raises(GolfError, match="'backwards'"):
        unpack_foreign(data)


def test_a_codec_without_memory_is_not_at_fault():
    class Large(Plain):
        name = "large"

        def compress(self, raw, shapes):
            raise MemoryError

    with pytest.raises(GolfError, match="must compress a section, found MemoryError: allow this process more memory"):
        check_codec(Large())


# --- on disk

@pytest.mark.parametrize("value", [torch.tensor(1.0), math.nan, {1, 2}, Path("x")], ids=["tensor", "nan", "set", "path"])
def test_a_meta_that_json_cannot_hold_is_refused(value, tmp_path):
    with pytest.raises(GolfError, match="meta .*JSON"):
        save_artifact(tmp_path / "a.golf", {}, {"loss": value}, Plain())
    assert not list(tmp_path.iterdir())


def test_missing_directory_and_other_files(tmp_path):
    (tmp_path / "pickle.golf").write_bytes(__import__("pickle").dumps({"a": 1}))
    for path in (tmp_path / "no.golf", tmp_path, tmp_path / "pickle.golf", tmp_path / "no" / "no.golf"):
        for load in (load_artifact, load_weights, load_model):
            with pytest.raises(GolfError, match=path.name):
                load(path)


def test_over_the_cap_is_kept_under_another_name(tmp_path):
    path = tmp_path / "run" / "artifact.golf"
    size = save_artifact(path, toy(), META, Lzma(), cap=ARTIFACT_CAP, code_bytes=100)
    assert size == path.stat().st_size
    path.unlink()
    with pytest.raises(GolfError, match=r"\(1 .*\.over.*golfnb quantize .*run --target-bytes " + str(size + 99)):
        save_artifact(path, toy(), META, Lzma(), cap=size + 99, code_bytes=100)
    assert not path.exists() and same(load_artifact(path.with_name("artifact.golf.over"))[1], toy())
    save_artifact(path, toy(), META, Lzma(), cap=size + 100, code_bytes=100)
    assert [p.name for p in path.parent.iterdir()] == ["artifact.golf"]


def test_full_disk_leaves_nothing(tmp_path):
    code = ("import resource, signal, sys, test_artifact as t; signal.signal(signal.SIGXFSZ, signal.SIG_IGN); resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
            "for call in (lambda: t.save_artifact(sys.argv[1], t.toy(), {}, t.Lzma()), lambda: t.save_weights(sys.argv[1], {'a': t.torch.zeros(999)}, {}),\n"
            "             lambda: t.save_artifact(sys.argv[1], t.toy(), {}, t.Lzma(), cap=10)):\n"
            "    try: call()\n"
            "    except t.GolfError as error: print('GolfError', error)")
    out = subprocess.run([sys.executable, "-c", code, str(tmp_path / "a.golf")], capture_output=True, text=True)
    assert out.stdout.count("GolfError cannot write") == 3, out.stdout + out.stderr
    assert list(tmp_path.iterdir()) == []


# --- weights

def weights(seed=0):
    g = torch.Generator().manual_seed(seed)
    return {"a": torch.randn(90, 20, generator=g), "b": torch.randn(7, generator=g).bfloat16(), "c": torch.tensor(2.5).half(), "d": torch.randn(3, 4, generator=g).double()}


def test_weights_come_back_bit_for_bit(tmp_path):
    save_weights(tmp_path / "ema.golf", weights(), META)
    meta, back = load_weights(tmp_path / "ema.golf")
    assert meta == META and back.keys() == weights().keys() and all(torch.equal(back[n], w) and back[n].dtype == w.dtype for n, w in weights().items())
    assert [p.name for p in tmp_path.iterdir()] == ["ema.golf"]


def test_weights_refuse_what_they_cannot_hold(tmp_path):
    with pytest.raises(GolfError, match="int64"):
        save_weights(tmp_path / "w", {"a": torch.zeros(3, dtype=torch.int64)}, {})
    with pytest.raises(GolfError, match="finite"):
        save_weights(tmp_path / "w", {"a": torch.tensor([float("nan")])}, {})
    save_artifact(tmp_path / "a.golf", toy(), {}, Lzma())
    with pytest.raises(GolfError, match="unquantized"):
        load_weights(tmp_path / "a.golf")
    assert [p.name for p in tmp_path.iterdir()] == ["a.golf"]


# --- ledger and models

def test_ledger_adds_up(tmp_path):
    size = save_artifact(tmp_path / "a.golf", toy(), META, Lzma())
    rows = artifact_ledger(tmp_path / "a.golf", 1234)
    assert rows == ledger_rows(open_own((tmp_path / "a.golf").read_bytes())[0], size, 1234)
    assert rows[0] == ("code", 1234) and rows[-1][0] == "overhead" and sum(n for _, n in rows) == size + 1234 and all(type(n) is int and n >= 0 for _, n in rows)


@pytest.fixture(scope="module")
def tiny():
    s = settings_for(NUM_LAYERS=2, MODEL_DIM=32, NUM_HEADS=2, NUM_KV_HEADS=1, VOCAB_SIZE=64, ROPE_DIMS=8, BIGRAM_VOCAB_SIZE=32, BIGRAM_DIM=8,
                     VE_LAYERS=1, VE_DIM=8, XSA_LAST_N=1, TRAIN_SEQ_LEN=16, EVAL_SEQ_LEN=16, EVAL_STRIDE=8)
    model, cfg, _ = model_from_settings(model_settings(s))
    init_model(model, cfg, 0)
    return model, cfg, {"settings": asdict(cfg), "tokenizer_sha256": "0" * 64, "vocab_size": 64, "recipe": "pr549", "seed": 0, "steps": 0}


def test_a_model_from_the_file_alone(tiny, tmp_path):
    model, cfg, meta = tiny
    packed = quantize_state(named_state(model), False)
    save_artifact(tmp_path / "a.golf", packed, meta, Lzma())
    loaded, found, settings = load_model(tmp_path / "a.golf")
    wanted = dequantize_state(packed)
    assert found == meta and settings == cfg
    assert all(torch.equal(w, wanted[n]) for n, w in named_state(loaded).items())
    ids = torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.allclose(loaded(ids), model(ids), atol=0.05)
    assert load_model(tmp_path / "a.golf", torch.bfloat16)[0].tok_emb.dtype == torch.bfloat16


def test_a_model_from_saved_weights(tiny, tmp_path):
    model, _, meta = tiny
    save_weights(tmp_path / "ema.golf", named_state(model), meta)
    loaded, _, _ = load_model(tmp_path / "ema.golf")
    assert all(torch.equal(w, named_state(model)[n]) for n, w in named_state(loaded).items())


def test_the_tokenizer_must_be_the_one_it_was_trained_with(tiny, tmp_path):
    model, _, meta = tiny
    (tmp_path / "t.model").write_bytes(b"tokenizer")
    (tmp_path / "u.model").write_bytes(b"another")
    save_artifact(tmp_path / "a.golf", quantize_state(named_state(model), False), meta | {"tokenizer_sha256": tokenizer_hash(tmp_path / "t.model")}, Lzma())
    load_model(tmp_path / "a.golf", tokenizer_path=tmp_path / "t.model")
    for other in ("u.model", "absent.model"):
        with pytest.raises(GolfError, match=other):
            load_model(tmp_path / "a.golf", tokenizer_path=tmp_path / other)


@pytest.mark.parametrize("change", [{"num_layers": 10**9}, {"num_layers": 3}, {"num_layers": "2"}, {"model_dim": 2**40}, {"vocab_size": 2**40}, {"mlp_mult": 2**40}, {"mlp_mult": "a"}, {"mlp_mult": None},
                                    {"bigram_vocab_size": 2**40}, {"bigram_dim": 2**30}, {"ve_dim": 2**30}, {"bigram_vocab_size": 0}, {"num_heads": 7}, {"num_kv_heads": 2}, {"rope_dims": 10**9},
                                    {"extra": 1}, {"train_seq_len": 10**9}, {"rope_train_len": 2**70}, {"rope_base": 10**400}, {"ve_layers": "9" * 5000}, {"ve_layers": "1," * 9999 + "1"}, {"ve_enabled": False}, {"train_seq_len": -5}, {"plan": "exec"}], ids=str)
def test_settings_that_do_not_fit_the_tensors(tiny, tmp_path, change):
    model, _, meta = tiny
    save_artifact(tmp_path / "a.golf", quantize_state(named_state(model), False), meta | {"settings": meta["settings"] | change}, Lzma())
    with pytest.raises(GolfError, match="a.golf"):
        load_model(tmp_path / "a.golf")


def test_containers_that_hold_no_model(tiny, tmp_path):
    for meta in ({}, {"settings": None}, {"settings": {}}, {"settings": tiny[2]["settings"]}):
        save_artifact(tmp_path / "a.golf", toy(), meta, Lzma())
        with pytest.raises(GolfError, match="a.golf"):
            load_model(tmp_path / "a.golf")


def test_safetensors_hold_the_weights(tiny, tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    model, cfg, meta = tiny
    packed = quantize_state(named_state(model), False)
    save_artifact(tmp_path / "a.golf", packed, meta, Lzma())
    export_safetensors(tmp_path / "a.golf", tmp_path / "a.safetensors")
    wanted, found = dequantize_state(packed), safetensors.load_file(tmp_path / "a.safetensors")
    assert found.keys() == wanted.keys() and all(torch.equal(found[n], w) for n, w in wanted.items())
    with pytest.importorskip("safetensors").safe_open(tmp_path / "a.safetensors", "pt") as file:
        assert json.loads(file.metadata()["golfnb"]) == meta


# --- a codec of one's own

class Bzip(Plain):
    "One of one's own; it keeps the types of what it is given."
    name = "bz2"
    given = []

    def compress(self, raw, shapes):
        self.given.append(type(raw))
        return self.name, bz2.compress(raw)

    def decompress(self, stored, size, shapes):
        self.given.append(type(stored))
        return bz2.decompress(stored)


def test_a_codec_gets_bytes_and_its_own_error_is_kept(monkeypatch):
    monkeypatch.setattr(Bzip, "given", [])
    data = pack_bytes(toy(), {}, Bzip())
    assert same(unpack_bytes(data, Bzip())[1], toy()) and same(unpack_foreign(data, Bzip().known())[1], toy())
    assert set(Bzip.given) == {bytes}
    error = ZeroDivisionError("of the codec")
    monkeypatch.setattr(Bzip, "decompress", lambda *_: (_ for _ in ()).throw(error))
    with pytest.raises(GolfError) as raised:
        unpack_bytes(data, Bzip())
    assert raised.value.__cause__ is error


def fails(*_):
    raise ValueError("there is a fault")


FAULTY = {  # what is wrong -> (the codec's methods, what the sentence says, whether another error is its cause)
    "compress raises": ({"compress": fails}, "'bz2' .*compress.* ValueError: there is a fault", True),
    "compress gives nothing": ({"compress": lambda *_: None}, "'bz2' .*compress.* TypeError", True),
    "decompress raises": ({"decompress": fails}, "'bz2' .*decompress.* ValueError: there is a fault", True),
    "decompress gives less": ({"decompress": lambda self, stored, *_: bz2.decompress(stored)[:-1]}, "'bz2' .*3,672 bytes of a section, found 3,671 bytes", False),
    "decompress gives others": ({"decompress": lambda self, stored, size, _: bytes(size)}, "'bz2' .*found other bytes", False),
    "an unknown name": ({"compress": lambda self, raw, _: ("bz9", raw)}, "'bz2' .*known.* found 'bz9'", False),
    "the name of another": ({"name": "lzma"}, "codec Faulty .* found 'lzma', .*Lzma", False),
    "no name": ({"name": Plain.name}, "codec Faulty .* found 'none'", False),
}


@pytest.mark.parametrize("fault", FAULTY)
def test_a_faulty_codec_is_found_before_the_training(fault):
    parts, words, chained = FAULTY[fault]
    with pytest.raises(GolfError, match=words) as raised:
        artifact.check_codec(type("Faulty", (Bzip,), parts)())
    assert (raised.value.__cause__ is not None) == chained
    with pytest.raises(GolfError, match="Bzip"):
        artifact.check_codec(Bzip)


def test_codecs_that_work_pass():
    class Harder(Lzma):
        "Another way to store, the same to read."
        def compress(self, raw, shapes):
            return self.name, lzma.compress(raw, preset=6 | lzma.PRESET_EXTREME)

    for codec in (*STDLIB_CODECS, Bzip(), Harder()):
        artifact.check_codec(codec)

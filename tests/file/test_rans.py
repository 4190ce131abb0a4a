"""The coder of integers: round trips of awkward data, damage, bounded memory, the same bytes everywhere, and what it saves."""
import hashlib
import lzma
import os
import random
import subprocess
import sys
import tracemalloc

import numpy as np
import pytest

from golfnb.file.artifact import Best, Lzma, Rans, decompress_section, pack_bytes, unpack_bytes
from golfnb.file.rans import RANS_BITS, rans_decode, rans_encode, rans_streams, rans_frequencies
from golfnb.settings import GolfError
from golfnb.file.quantize import Packed, entropy_bits
from test_artifact import slow_rans


def gauss(rows, cols, spread=3.0, seed=0, row=0.0, col=0.0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return np.rint(rng.normal(0, spread, (rows, cols)) * np.exp(rng.normal(0, 1, (rows, 1)) * row) * np.exp(rng.normal(0, 1, (1, cols)) * col)).clip(-31, 31).astype(np.int8)


AWKWARD = {
    "one value": np.zeros((1, 1), np.int8), "all zero": np.zeros((40, 30), np.int8), "all the same": np.full((33, 7), -31, np.int8), "one row": gauss(1, 999), "one column": gauss(999, 1),
    "every byte": np.arange(-128, 128, dtype=np.int8).reshape(16, 16), "one odd value": np.eye(200, dtype=np.int8), "wild rows": gauss(300, 40, row=2.0), "wild columns": gauss(40, 300, col=2.0),
    "zero rows": gauss(64, 64) * (np.arange(64) % 2)[:, None].astype(np.int8), "several streams": gauss(300, 333), "many streams": gauss(2000, 90), "full range": np.random.default_rng(1).integers(-127, 128, (300, 50)).astype(np.int8),
}


@pytest.mark.parametrize("name", AWKWARD)
def test_round_trip(name):
    q = AWKWARD[name]
    for shapes in ([q.shape], [(q.size, 1)]):
        coded = rans_encode(q.tobytes(), shapes)
        assert rans_decode(coded, shapes) == q.tobytes() and rans_encode(q.tobytes(), shapes) == coded
    if q.size < 20_000:
        assert slow_rans(rans_encode(q.tobytes(), [q.shape]), [q.shape]) == q.tobytes()


@pytest.mark.parametrize("seed", range(20))
def test_round_trip_of_several_tensors(seed):
    r = random.Random(seed)
    tensors = [gauss(r.randint(1, 90), r.randint(1, 90), 10 ** r.uniform(-1, 1.5), seed * 10 + i, r.random(), r.random()) for i in range(r.randint(1, 5))]
    raw, shapes = b"".join(t.tobytes() for t in tensors), [t.shape for t in tensors]
    assert rans_decode(rans_encode(raw, shapes), shapes) == raw


@pytest.mark.parametrize("seed", range(10))
def test_frequencies_sum_to_the_range_and_keep_whatever_occurs(seed):
    rng = np.random.default_rng(seed)
    counts = (rng.pareto(0.3, 256) * rng.integers(0, 2, 256)).clip(0, 2**40).astype(np.int64)
    for c in (counts, np.eye(256, dtype=np.int64)[seed], np.zeros(256, np.int64), np.ones(256, np.int64), np.where(np.arange(256) < 128, 10**6, 1)):
        f = rans_frequencies(c)
        assert f.sum() == 2**RANS_BITS and (f[c > 0] > 0).all() and (not c.any() or not f[c == 0].any())


def test_close_to_the_entropy_and_under_it_where_rows_differ():
    alike, differ = gauss(1024, 512), gauss(1024, 512, row=0.5)
    bits = [8 * len(rans_encode(q.tobytes(), [q.shape])) / q.size for q in (alike, differ)]
    assert bits[0] < 1.003 * entropy_bits(alike) and bits[1] < entropy_bits(differ) - 0.1


@pytest.mark.parametrize("spread", [1.0, 2.4, 4.0])
def test_three_per_cent_under_lzma_at_equal_integers(spread):
    "Grids from k = 8 on (spread 31 / k), whole container against the same integers in lzma."
    packed = {"blocks.0.mlp.fc.weight": Packed("int6", (1024, 512), gauss(1024, 512, spread), np.random.default_rng(4).normal(0.015, 0.002, 1024).astype(np.float16))}
    sizes = {codec.name: len(pack_bytes(packed, {}, codec)) for codec in (Rans(), Best(), Lzma())}
    plain = len(lzma.compress(packed["blocks.0.mlp.fc.weight"].data.tobytes() + packed["blocks.0.mlp.fc.weight"].scale.tobytes(), preset=6))
    assert sizes["rans"] < 0.97 * sizes["lzma"] and sizes["rans"] < 0.97 * plain and sizes["best"] <= sizes["rans"]


def test_a_million_values_and_few_steps_for_twenty_six_million():
    "A step codes one value of each stream, and takes some tens of microseconds: 26 million values take seconds."
    q = gauss(1024, 1024, row=0.2)
    assert rans_decode(rans_encode(q.tobytes(), [q.shape]), [q.shape]) == q.tobytes()
    assert 26_000_000 / rans_streams(26_000_000) < 50_000


def test_every_mutation_is_refused_or_other_integers_never_more():
    q = gauss(60, 70, row=0.5)
    coded, rng, refused = rans_encode(q.tobytes(), [q.shape]), random.Random(3), 0
    for _ in range(250):
        bad = bytearray(coded)
        for _ in range(rng.choice([1, 1, 4])):
            way, at = rng.randrange(4), rng.randrange(len(bad))
            if way == 0:
                bad[at] ^= 1 << rng.randrange(8)
            elif way == 1:
                bad[rng.randrange(min(40, len(bad)))] = rng.randrange(256)
            elif way == 2:
                bad[at:at] = rng.randbytes(rng.randrange(1, 9))
            else:
                del bad[at:at + rng.randrange(1, 99)]
                bad = bad or bytearray(1)
        try:
            assert len(decompress_section(bytes(bad), "rans", [q.shape], Rans().known())) == q.size
        except GolfError as error:
            refused += 1
            assert "rans" in str(error) and "\n" not in str(error)
    assert refused > 235, "the end of the stream is checked, so damage that is not seen is rare"


def test_memory_is_bounded_by_what_the_shapes_declare():
    q = np.zeros((2048, 2048), np.int8)
    used, coded = Rans().compress(q.tobytes(), [q.shape])
    known = Rans().known()
    assert len(coded) < 3000
    tracemalloc.start()
    assert decompress_section(coded, used, [q.shape], known) == q.tobytes()
    honest = tracemalloc.get_traced_memory()[1]
    tracemalloc.reset_peak()
    for shapes in ([(2, 2)], [(4, 1)], [(1, 1)]):
        with pytest.raises(GolfError):
            decompress_section(coded, used, shapes, known)
    hostile = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert honest < 6 * q.size and hostile < 2**20


def test_same_bytes_in_another_process():
    code = "import hashlib, test_rans as t; q = t.gauss(200, 300, row=0.5, col=0.3); print(hashlib.sha256(t.rans_encode(q.tobytes(), [q.shape])).hexdigest())"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=os.environ | {"PYTHONHASHSEED": "5"})
    q = gauss(200, 300, row=0.5, col=0.3)
    assert out.stdout.strip() == hashlib.sha256(rans_encode(q.tobytes(), [q.shape])).hexdigest(), out.stderr


def test_best_tries_lzma_on_a_large_section_only_where_it_repeats():
    noise, repeats = gauss(1200, 1000), np.tile(gauss(12, 1000), (100, 1))
    assert Best().compress(noise.tobytes(), [noise.shape])[0] == "rans" and Best().compress(repeats.tobytes(), [repeats.shape])[0] == "lzma"
    packed = {"blocks.0.mlp.fc.weight": Packed("int6", repeats.shape, repeats, np.ones(1200, np.float16))}
    assert np.array_equal(unpack_bytes(pack_bytes(packed, {}, Best()), Best())[1]["blocks.0.mlp.fc.weight"].data, repeats)

"""Hidden tests of lesson 11: the file."""
import math

import numpy as np

from golfnb.tools.check import Score


def bug(seal, open_sealed):
    """
    1. Change a byte of the header, and then one of the sections. What happens?
    2. The checksum is over the sections alone, so whoever changes the header is not noticed.
    3. Everything that is not the checksum itself must go into it: what stands before it, the header and the sections.
    """
    header, payload = b'{"shape": [20, 30]}', bytes(range(7, 60))
    data = seal(header, payload)
    assert tuple(map(bytes, open_sealed(data))) == (header, payload), "a sound file must be read as it was written"
    assert len(data) <= len(header) + len(payload) + 44, f"beside header and sections a file has at most 44 bytes, found {len(data) - len(header) - len(payload)}"
    for bit in range(8 * len(data)):
        broken = bytearray(data)
        broken[bit // 8] ^= 1 << bit % 8
        try:
            open_sealed(bytes(broken))
        except ValueError:
            continue
        raise AssertionError(f"every flipped bit must be refused, found that one in byte {bit // 8} of {len(data)} was not")
    for cut in range(len(data)):
        try:
            open_sealed(data[:cut])
        except ValueError:
            continue
        raise AssertionError(f"a file cut off after {cut} of {len(data)} bytes must be refused with a ValueError, found that it was read")


def price(bits):
    """
    1. What is the probability of the value, by the table?
    2. It is the value's frequency, as a part of what the table sums to.
    3. The binary logarithm of the whole over the part.
    """
    assert abs(bits - math.log2(2**14 / 3000)) < 0.01, f"{bits} bits is not it"


def ledger(bytes_left):
    """
    1. Three parts: the integers, a scale for each row, the script.
    2. Bits are eighths of a byte. How many rows of 512 do the weights have, and how many bytes is a scale of 16 bits?
    3. Take all three off the sixteen million.
    """
    want = 16_000_000 - 27_000_000 * 4.4 / 8 - 2 * 27_000_000 / 512 - 67_000
    assert abs(bytes_left / want - 1) < 0.01, f"{bytes_left} bytes is not it"


def _matrix(seed):
    rng = np.random.default_rng(seed)
    spread = np.exp(rng.normal(0, 0.7, (48, 1))) * np.exp(rng.normal(0, 0.7, (1, 64)))
    return np.rint(rng.normal(0, 2.5, (48, 64)) * spread).clip(-31, 31).astype(int)


def adapt(coder):
    """
    1. Draw the sizes of the integers as a picture: what do cells of one row have in common, and what cells of one column?
    2. Nothing has to be written down: the reader has seen the cells before, too, and can measure rows and columns from them.
    3. Estimate how strong this row is and how strong this column is, take their product as the spread, and give each integer its share of a bell of that spread, with a little for all.
    """
    bits = cells = 0.0
    for seed in (11, 12, 13):
        q = _matrix(seed)
        chances, learn = coder(*q.shape)
        for i, row in enumerate(q.tolist()):
            for j, value in enumerate(row):
                p = np.asarray(chances(i, j), dtype=np.float64)
                assert p.shape == (63,) and (p >= 0).all() and abs(p.sum() - 1) < 1e-6, "chances must give 63 probabilities that sum to 1, of -31 to 31"
                assert p[value + 31] > 0, f"the integer {value} was given no probability, which costs infinitely many bits"
                bits -= math.log2(p[value + 31])
                learn(i, j, value)
        cells += q.size
    return Score(bits / cells, "bits an integer", 3.745, 4.088)

"""Hidden tests of lesson 13: learning while being scored."""
import math
from importlib.resources import files

import numpy as np

from golfnb.tools.check import Score


def bug(adapt):
    """
    1. Write down, for the first chunk, the last target that is scored and the last one that is learnt from.
    2. One target is learnt from before it has a score: the first of the next chunk.
    3. Learn from exactly the targets that have just been scored, no more and no fewer.
    """
    tokens = list(range(100, 123))
    for chunk in (5, 7, 22, 40):
        scored, learnt = [], []

        def score(ids, targets, scored=scored):
            assert [t - 1 for t in targets] == list(ids), "targets must be the tokens that follow"
            scored += targets
            return [1.0] * len(targets)

        def learn(ids, targets, scored=scored, learnt=learnt):
            assert [t - 1 for t in targets] == list(ids), "targets must be the tokens that follow"
            early = [t for t in targets if t not in scored]
            assert not early, f"with chunks of {chunk}, token {early[0] - 100} is learnt from before it has a score"
            learnt += targets

        nats = adapt(tokens, chunk, score, learn)
        assert len(nats) == 22 and scored == tokens[1:], "every target must be scored once, from left to right"
        assert len(learnt) >= 22 - chunk and len(set(learnt)) == len(learnt), "every chunk but the last must be learnt from, once"


def work(share):
    """
    1. Count forwards for one token: how many windows see it, and how often is it learnt from?
    2. As many windows see it as strides fit into one. How many forwards are a forward and its backward?
    3. Count both in forwards of one token, and divide learning by scoring.
    """
    assert abs(share - 9 / 32) < 0.005, f"a share of {share} is not it"


def clock(seconds):
    """
    1. Seconds on four GPUs first.
    2. How many millions has the text?
    3. Then compare the numbers of GPUs: all is shared out evenly.
    """
    assert abs(seconds / (62 * 2.28 / 2) - 1) < 0.02, f"{seconds} s is not it"


def learn(start):
    """
    1. Count what has come in this text, and look at the counts after the last byte.
    2. Mix counts and table: where little has been counted, the table must say most.
    3. Add to the counts after the last byte what a prior says, with the weight of a few bytes; the prior may itself be a mix of the table and of how often each byte has come at all.
    """
    paths = {split: sorted((files("golfnb") / "prose" / split).iterdir(), key=lambda path: path.name) for split in ("train", "validation")}
    known = np.frombuffer("\n".join(path.read_text(encoding="utf-8") for path in paths["train"][:10]).encode(), np.uint8).astype(np.int64)
    pairs = np.bincount(256 * known[:-1] + known[1:], minlength=65536).reshape(256, 256) + 0.1
    predict, told = start(pairs / pairs.sum(1, keepdims=True))
    text = paths["validation"][1].read_text(encoding="utf-8")[:6000].upper().encode()
    bits = 0.0
    for last, byte in zip(text, text[1:], strict=False):
        p = np.asarray(predict(last), dtype=np.float64)
        assert p.shape == (256,) and (p >= 0).all() and abs(p.sum() - 1) < 1e-6, "predict must give 256 probabilities that sum to 1"
        assert p[byte] > 0, f"the byte {byte} was given no probability, which costs infinitely many bits"
        bits -= math.log2(p[byte])
        told(last, byte)
    return Score(bits / (len(text) - 1), "bits per byte", 3.667, 10.48)

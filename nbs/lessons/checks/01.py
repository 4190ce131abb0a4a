"""Hidden tests of lesson 1: what is a score?"""
import io
import math
from importlib.resources import files

import numpy as np
import sentencepiece as spm

from golfnb.tools.check import Score

LEARNED, JUDGED = 150_000, 3_000


def _text(split, size):
    stories = sorted((files("golfnb") / "prose" / split).iterdir(), key=lambda path: path.name)
    return "\n".join(story.read_text(encoding="utf-8") for story in stories).encode()[:size]


def _tokenizer():
    model, lines = io.BytesIO(), _text("train", 60_000).decode().split("\n")
    spm.SentencePieceTrainer.train(sentence_iterator=iter(lines), model_writer=model, model_type="bpe", vocab_size=400, byte_fallback=True, num_threads=1, minloglevel=2, pad_id=0, bos_id=1, eos_id=2, unk_id=3)
    return spm.SentencePieceProcessor(model_proto=model.getvalue())


def bug(score):
    """
    1. Give it a sentence, and compare the bytes that it counts with those of the sentence.
    2. Not every piece begins a word, and a byte of a longer character is no character of its own.
    3. The bytes of the whole document are known as soon as all of its tokens are decoded together.
    """
    sp = _tokenizer()
    for text in ("Holmes laughed.", "The café 🙂 of naïve détectives, 東京.", "a", " ".join(_text("validation", 500).decode().split())):
        ids = sp.encode(text)
        losses = [0.5 + 0.01 * i for i in range(len(ids))]
        want = sum(losses) / math.log(2) / len(text.encode())
        found = score(losses, ids, sp)
        assert abs(found / want - 1) < 1e-9, f"the score of {text[:20]!r} is wrong: {found / want:.3f} of what it must be"


def nats(bits_per_byte):
    """
    1. First nats to bits, then tokens to bytes.
    2. A nat is 1 / ln 2 bits, about 1.44.
    3. Divide the bits of a token by the bytes of a token.
    """
    want = 2.0 / math.log(2) / 2.5
    assert abs(bits_per_byte / want - 1) < 0.01, f"{bits_per_byte} bits per byte is not it"


def file(million_bytes):
    """
    1. The score says how many bits each byte of the text costs.
    2. Bits of the whole text first; a byte of the file holds eight of them.
    3. All bits of the text first; then ask how many bytes of a file hold them.
    """
    want = 151 * 1.06 / 8
    assert abs(million_bytes / want - 1) < 0.01, f"{million_bytes} million bytes is not it"


def count(train):
    """
    1. One context is too short or seen too seldom: use several lengths together.
    2. Let the counts of a long context be mixed with what the next shorter one says, the more so the fewer counts there are.
    3. Begin with no bytes before and go up to five or six: each length adds its own counts to what the shorter one says, which weighs as much as so many different bytes were seen.
    """
    predict = train(_text("train", LEARNED))
    judged = _text("validation", JUDGED)
    bits = 0.0
    for i in range(1, len(judged)):
        p = np.asarray(predict(judged[:i]), dtype=np.float64)
        assert p.shape == (256,), f"predict must give 256 probabilities, found shape {p.shape}"
        assert (p >= 0).all() and abs(p.sum() - 1) < 1e-6, f"probabilities must not be negative and sum to 1, found a sum of {p.sum():.6f}"
        assert p[judged[i]] > 0, f"the byte {judged[i]} was given no probability, which costs infinitely many bits"
        bits -= math.log2(p[judged[i]])
    return Score(bits / (len(judged) - 1), "bits per byte", 2.507, 4.425)

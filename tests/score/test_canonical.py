"""The canonical mask: equal to merging every pair, never on a pair that a tokenizer wrote, and a distribution."""
import random

import pytest
import torch
from tiny import tiny_data

from golfnb.model.layers import softcap
from golfnb.text.shards import open_shard
from golfnb.studies.canonical import canonical_mask, masked_nats, merged, merging_pieces, plain_mask
from golfnb.tools.data import load_tokenizer, stdlib_documents, train_tokenizer


def vocabulary(seed: int, size: int = 40) -> dict[str, float]:
    "Pieces over three letters, each of two others, with scores that need not fall from join to join."
    r = random.Random(seed)
    pieces = list("abc")
    while len(pieces) < size:
        joined = r.choice(pieces) + r.choice(pieces)
        if len(joined) <= 9 and joined not in pieces:
            pieces.append(joined)
    scores = [-float(i) for i in range(size)]
    if seed % 2:
        r.shuffle(scores)
    return dict(zip(pieces, scores, strict=True))


@pytest.mark.parametrize("seed", range(12))
def test_the_mask_is_that_of_merging_every_pair(seed):
    scores = vocabulary(seed)
    names = [piece if merged(piece, scores) == [piece] else None for piece in scores]
    mask = canonical_mask(names, scores)
    assert torch.equal(mask, plain_mask(names, scores)) and mask.any()
    r, number = random.Random(seed), {piece: i for i, piece in enumerate(names)}
    for _ in range(60):
        found = merged("".join(r.choice("abc") for _ in range(r.randint(2, 60))), scores)
        assert not any(mask[number[a], number[b]] for a, b in zip(found, found[1:]))


@pytest.fixture(scope="module")
def tokenized(tmp_path_factory):
    "A tokenizer of Python's own documents, and documents that it was not trained on."
    folder = tmp_path_factory.mktemp("canonical")
    docs = list(dict.fromkeys(stdlib_documents(["json", "csv", "email", "logging"])))
    train_tokenizer(docs[:len(docs) // 2], folder / "tokenizer.model", 600)
    return load_tokenizer(folder / "tokenizer.model", 600), docs[len(docs) // 2:]


def test_merging_is_what_the_tokenizer_does(tokenized):
    sp, docs = tokenized
    scores = merging_pieces(sp)[1]
    for text in ("the theory of everything", "aaaaaaaaaa", "for i in range(10): print(i)", docs[0].split("\n")[0]):
        pieces = sp.encode(text, out_type=str)
        if not any(sp.is_byte(i) for i in sp.encode(text)):
            assert merged("".join(pieces), scores) == pieces


def test_no_pair_of_a_real_text_is_masked_and_rows_sum_to_one(tokenized, tmp_path):
    "Of the tests' validation files as of documents with what no piece has."
    sp, docs = tokenized
    mask = canonical_mask(*merging_pieces(sp))
    assert mask.any()
    for text in [*docs, "\u4e2d\u6587 \U0001f600 caf\u00e9  two  spaces\n\n\ttab \u00a0 end\x07" * 3]:
        ids = torch.tensor([1, *sp.encode(text), 1])
        assert not mask[ids[:-1], ids[1:]].any()
    data = tiny_data(tmp_path)
    tiny = load_tokenizer(data["TOKENIZER_PATH"], 400)
    small = canonical_mask(*merging_pieces(tiny))
    files = sorted(tmp_path.glob("*_val_*.bin"))
    for file in files:
        ids = torch.from_numpy(open_shard(file).astype("int64"))
        assert not small[ids[:-1], ids[1:]].any()
    assert files
    draw = torch.Generator().manual_seed(0)
    logits, ids = 5 * torch.randn(50, len(mask), generator=draw, dtype=torch.float64), torch.randint(len(mask), (50,), generator=draw)
    nats = torch.stack([masked_nats(logits, ids, torch.full((50,), t), mask, 30.0) for t in range(len(mask))], 1)
    torch.testing.assert_close((-nats).exp().sum(1), torch.ones(50, dtype=torch.float64))
    assert torch.equal(nats.isinf(), mask[ids])
    before = -softcap(logits, 30.0).log_softmax(-1)
    assert (nats <= before + 1e-12)[~mask[ids]].all(), "what is allowed only gains"

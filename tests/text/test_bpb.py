"""Bytes of tokens against the bytes of real decoded text: random Unicode, several kinds of tokenizer, many documents in one stream."""
import io
import math
from pathlib import Path

import numpy as np
import pytest
import sentencepiece as spm
import torch
from hypothesis import given, settings, strategies as st

from golfnb.text.bpb import ByteTable, bits_per_byte, byte_table, encode_text, load_tokenizer, target_bytes, tokenizer_hash, unigram_bpb
from golfnb.settings import GolfError

TEXT = ["the quick brown fox jumps over the lazy dog", "pack my box with five dozen liquor jugs", "how vexingly quick daft zebras jump, na\u00efve caf\u00e9s",
        "le c\u0153ur a ses raisons que la raison ne conna\u00eet point", "1 2 3 45 678 ; : ( ) [ ] { } == != <= >="] * 30
KINDS = {
    "bpe": dict(model_type="bpe"),
    "identity": dict(model_type="bpe", normalization_rule_name="identity", remove_extra_whitespaces=False),
    "unigram": dict(model_type="unigram", hard_vocab_limit=False),
    "spaces": dict(model_type="bpe", allow_whitespace_only_pieces=True, remove_extra_whitespaces=False, user_defined_symbols=["\u2581\u2581", "\u2581\u2581\u2581\u2581", "<tag>"]),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    for name, options in KINDS.items():
        model = io.BytesIO()
        spm.SentencePieceTrainer.train(sentence_iterator=iter(TEXT), model_writer=model, vocab_size=340, byte_fallback=True, pad_id=0, bos_id=1,
                                       eos_id=2, unk_id=3, num_threads=1, minloglevel=2, **options)
        (folder / f"{name}.model").write_bytes(model.getvalue())
    loaded = {name: load_tokenizer(folder / f"{name}.model") for name in KINDS}
    return {name: (sp, byte_table(sp)) for name, sp in loaded.items()} | {"folder": folder}


def counted(table, ids):
    tokens = torch.tensor(ids)
    return int(target_bytes(table, tokens[:-1], tokens[1:]).sum())


documents = st.lists(st.text(st.characters(blacklist_categories=["Cs"]), max_size=40), min_size=1, max_size=4)


@pytest.mark.parametrize("kind", list(KINDS))
@given(texts=documents)
@settings(max_examples=80, deadline=None)
def test_bytes_of_random_unicode(models, kind, texts):
    sp, table = models[kind]
    stream, total = [], 0
    for text in texts:
        ids = [sp.bos_id()] + sp.encode(text)
        want = len(sp.decode(ids).encode())
        assert counted(table, ids) == want
        stream, total = stream + ids, total + want
    assert counted(table, stream + [sp.eos_id()]) == total


ODD = st.sampled_from(["\u2581", "\0", "\r\n", "\r", "e\u0301", "\u0301", "\ufb01", "\u00bd", "\uff21", "\u1e9b\u0323", "\ufeff", "\u200b", "\u00a0", "\u2585", "\ufdd0", "  ", "\t", "fox"])
ANY_TEXT = st.lists(st.text(st.characters(blacklist_categories=["Cs"]), max_size=6) | ODD, max_size=20).map("".join)


@given(text=ANY_TEXT)
@settings(max_examples=200, deadline=None)
def test_identity_tokenizer_counts_the_original_text(models, text):
    "Where nothing is normalised away, the bytes are those of the text that went in, and it comes back."
    sp, table = models["identity"]
    ids = [sp.bos_id()] + encode_text(sp, text)
    assert counted(table, ids) == len(text.encode()) and sp.decode(ids) == text


@pytest.mark.parametrize("kind", list(KINDS))
@given(text=ANY_TEXT)
@settings(max_examples=60, deadline=None)
def test_the_mark_of_a_space_is_three_bytes_for_every_tokenizer(models, kind, text):
    sp, table = models[kind]
    ids = [sp.bos_id()] + encode_text(sp, text)
    decoded = sp.decode(ids)
    assert counted(table, ids) == len(decoded.encode()) and decoded.count("\u2581") == text.count("\u2581")
    if "\u2581" not in text:
        assert ids[1:] == sp.encode(text)


@given(text=st.text(st.characters(blacklist_categories=["Cs"]), max_size=40), seed=st.integers(0, 99))
@settings(max_examples=40, deadline=None)
def test_the_cut_does_not_matter(models, text, seed):
    "Another segmentation of the same text has the same bytes."
    sp, table = models["unigram"]
    spm.set_random_generator_seed(seed)
    ids = sp.encode(text, enable_sampling=True, alpha=0.1, nbest_size=-1)
    assert counted(table, [sp.bos_id()] + ids) == len(sp.decode([sp.bos_id()] + ids).encode())


def test_kinds_of_pieces(models):
    sp, table = models["bpe"]
    assert table.base.dtype == torch.int16 and table.leading_space.dtype == table.boundary.dtype == torch.bool
    assert table.boundary.nonzero().flatten().tolist() == [0, 1, 2, 3] and table.base[:4].tolist() == [0] * 4
    assert table.base[4:260].tolist() == [1] * 256 and not table.leading_space[:260].any()
    space = sp.piece_to_id("\u2581")
    assert counted(table, [1, space]) == 0 and counted(table, [300, space]) == 1 and counted(table, [3, space]) == 0
    prev, target = torch.randint(0, 340, (3, 5, 7)), torch.randint(0, 340, (3, 5, 7))
    one_by_one = [counted(table, [int(p), int(t)]) for p, t in zip(prev.flatten(), target.flatten())]
    assert target_bytes(table, prev, target).flatten().tolist() == one_by_one
    assert target_bytes(table.to("cpu"), prev, target).shape == (3, 5, 7)


def test_bits_per_byte():
    assert bits_per_byte(math.log(2) * 30, 10) == pytest.approx(3)
    for nothing in (0, -1):
        with pytest.raises(GolfError, match=f"byte.*{nothing}"):
            bits_per_byte(1.0, nothing)


def test_unigram_against_plain_python(models):
    sp, table = models["bpe"]
    rng = np.random.default_rng(0)
    train, val = rng.integers(0, 340, 500), rng.integers(0, 340, 200).astype(np.uint16)
    bits = sum(-math.log2((list(train).count(t) + 1) / (500 + 340)) for t in val[1:].tolist())
    counts = np.bincount(train, minlength=340)
    assert unigram_bpb(counts, val, table) == pytest.approx(bits / counted(table, val.tolist()), rel=1e-12)
    assert unigram_bpb(torch.from_numpy(counts), torch.from_numpy(val.astype(np.int64)), table) == unigram_bpb(counts, val, table)
    with pytest.raises(GolfError, match="340.*339"):
        unigram_bpb(counts[:-1], val, table)


def test_unigram_is_the_same_to_the_bit_on_any_number_of_threads():
    "A resumed run may have another number of them, and its summary must not differ."
    table = ByteTable(torch.ones(1024, dtype=torch.int16), *torch.zeros(2, 1024, dtype=torch.bool))
    before, found = torch.get_num_threads(), []
    for seed in range(20):
        rng = np.random.default_rng(seed)
        counts, val = rng.integers(0, 1000, 1024), rng.integers(0, 1024, 39_001)
        values = set()
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            values.add(unigram_bpb(counts, val, table))
        found.append(len(values))
    torch.set_num_threads(before)
    assert found == [1] * 20


@pytest.mark.parametrize("path", ["x.model", Path("x.model")])
def test_a_table_of_a_path_is_refused(path):
    with pytest.raises(GolfError, match="load_tokenizer.'x.model'"):
        byte_table(path)


def test_tokenizer_files(models, tmp_path):
    path = models["folder"] / "bpe.model"
    assert load_tokenizer(path, 340).get_piece_size() == 340 and tokenizer_hash(path) == tokenizer_hash(str(path)) != tokenizer_hash(models["folder"] / "identity.model")
    with pytest.raises(GolfError, match="VOCAB_SIZE=1024 .*340"):
        load_tokenizer(path, 1024)
    for action in (load_tokenizer, tokenizer_hash):
        with pytest.raises(GolfError, match="none.model.*TOKENIZER_PATH"):
            action(tmp_path / "none.model")
    for junk in (b"", b"junk", path.read_bytes()[:1000]):
        (tmp_path / "junk.model").write_bytes(junk)
        with pytest.raises(GolfError, match="junk.model.*damaged"):
            load_tokenizer(tmp_path / "junk.model", 340)

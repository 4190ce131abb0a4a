"""Documents, tokenizer and shards: what the notebook of chapter 21 cannot show well."""
import json
import random

import numpy as np
import pytest

import golfnb.data as data
from golfnb.config import GolfError
from golfnb.data import (DEMO_MODULES, build_shards, documents_hash, inspect_shard, is_validation, module_documents, read_documents, stdlib_documents, topic_documents,
                         train_tokenizer)
from golfnb.shards import read_tokens


@pytest.fixture(scope="module")
def docs():
    return stdlib_documents(["argparse", "collections", "random", "string", "textwrap", "threading", "urllib"])


@pytest.fixture(scope="module")
def model(docs, tmp_path_factory):
    path = tmp_path_factory.mktemp("tok") / "t.model"
    train_tokenizer([d for d in docs if not is_validation(d, 0.1)], path, 512)
    return path


def test_whole_list_is_megabytes_of_text_in_a_fixed_order():
    found = stdlib_documents()
    assert len(set(DEMO_MODULES)) == len(DEMO_MODULES) and len(found) == len(set(found)) > 1000
    assert 1_500_000 < sum(len(d) for d in found) < 6_000_000
    assert documents_hash(found) == documents_hash(stdlib_documents())
    assert all(d == d.strip() and d for d in found)


def test_documents_of_a_made_up_library(tmp_path):
    package = tmp_path / "pkg"
    (package / "test").mkdir(parents=True)
    (package / "__init__.py").write_text('"The package."\nraise RuntimeError("must not run")\n')
    (package / "b.py").write_text('class A:\n    "Outer."\n    class B:\n        "Inner."\n        async def go(self, x=1): "Goes."\n')
    (package / "test" / "t.py").write_text('"Not wanted."')
    (tmp_path / "copy.py").write_text("x = 1\n")
    (tmp_path / "pydoc_data").mkdir()
    (tmp_path / "pydoc_data" / "topics.py").write_text("# made\ntopics = {'with': 'The *with* ' 'statement.\\n', 'if': r'''If.'''}\n")
    assert stdlib_documents(["copy", "absent", "pkg"], tmp_path) == [
        "The *with* statement.", "If.", "module pkg\n\nThe package.", "class pkg.b.A\n\nOuter.", "class pkg.b.B\n\nInner.\n\ndef go(self, x=1)\nGoes."]
    with pytest.raises(GolfError, match="found none"):
        stdlib_documents(["absent"], package)
    assert topic_documents("x = 1") == [] and module_documents("m", "") == []


def test_hash_sees_borders_and_order(docs):
    assert len({documents_hash(x) for x in (docs, docs[::-1], docs[1:], ["".join(docs)], [])}) == 5


@pytest.mark.parametrize("name, content, word", [
    ("a.txt", b"\xff\xfe", "UTF-8"), ("a.jsonl", b'{"text": "x"}\n{"text": "\xe9"}\n', "line 2"), ("a.jsonl", b'["text"]\n', "line 1"),
    ("a.jsonl", b'{"text": 3}\n', "line 1"), ("a.jsonl", b'{"text": "\\ud800"}\n', "line 1"), ("a.jsonl", b"[" * 5000, "line 1"), ("a.csv", b"x", ".jsonl")])
def test_bad_documents_are_refused_in_a_sentence(tmp_path, name, content, word):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(GolfError, match=word) as caught:
        list(read_documents([tmp_path / name]))
    assert "\n" not in str(caught.value) and str(tmp_path) in str(caught.value)


def test_missing_file_and_directory(tmp_path):
    (tmp_path / "d.txt").mkdir()
    for path in (tmp_path / "no.txt", tmp_path / "d.txt"):
        with pytest.raises(GolfError, match="check the path"):
            list(read_documents([path]))


def test_bom_and_empty_documents(tmp_path):
    (tmp_path / "a.txt").write_bytes("\ufeffhello \n".encode())
    (tmp_path / "b.txt").write_bytes(b" \n\t")
    (tmp_path / "c.jsonl").write_bytes(b'{"text": ""}\r\n\r\n{"text": "x\\ny", "id": 3}\r\n')
    skipped = []
    assert list(read_documents([tmp_path / n for n in ("a.txt", "b.txt", "c.jsonl")], skipped)) == ["hello", "x\ny"]
    assert len(skipped) == 3


@pytest.mark.parametrize("shard_tokens", [1, 7, 500, 10**6])
def test_shards_of_any_size_hold_the_same_stream(tmp_path, docs, model, shard_tokens):
    few = docs[:6] if shard_tokens < 100 else docs[:60]
    few = [d[:40] for d in few] if shard_tokens < 100 else few
    manifest = build_shards(few, model, tmp_path / "s", shard_tokens, 0.3)
    sp = data.load_tokenizer(model)
    for side, keep in (("train", False), ("val", True)):
        wanted = [t for d in few if is_validation(d, 0.3) is keep for t in [1, *sp.encode(d)]]
        assert read_tokens(tmp_path / "s" / f"fineweb_{side}_*.bin").tolist() == wanted
        sizes = [s["tokens"] for s in manifest[side]["shards"]]
        assert all(n == shard_tokens for n in sizes[:-1]) and 0 < sizes[-1] <= shard_tokens and sum(sizes) == manifest[side]["tokens"]
    assert json.loads((tmp_path / "s" / "manifest.json").read_text()) == manifest


def test_text_of_every_alphabet_survives(model):
    sp, rng = data.load_tokenizer(model), random.Random(0)
    for _ in range(200):
        text = "".join(chr(rng.choice([rng.randrange(32, 127), rng.randrange(0xA0, 0x2500), rng.randrange(0x3000, 0xD000), rng.randrange(0x1F300, 0x1F600), 10, 32])) for _ in range(30))
        text = text.replace("\u2581", "").strip()
        assert sp.decode(sp.encode(text)) == text


def test_occupied_directories_are_refused_and_left_alone(tmp_path, docs, model):
    (tmp_path / "fineweb_val_000003.bin").write_bytes(b"mine")
    with pytest.raises(GolfError, match="must not hold shards"):
        build_shards(docs, model, tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["fineweb_val_000003.bin"]


def test_a_failure_on_the_way_leaves_nothing(tmp_path, docs, model, monkeypatch):
    def bad():
        yield from docs
        raise GolfError("document 9 is bad")

    with pytest.raises(GolfError, match="document 9"):
        build_shards(bad(), model, tmp_path / "a", 500, 0.3)
    real = data.write_shard
    monkeypatch.setattr(data, "write_shard", lambda p, t: real(p, t) if "000003" not in p.name else (_ for _ in ()).throw(GolfError("disk full")))
    with pytest.raises(GolfError, match="disk full"):
        build_shards(docs, model, tmp_path / "a", 500, 0.3)
    assert not list((tmp_path / "a").iterdir())
    monkeypatch.undo()
    with pytest.raises(GolfError, match="val side"):
        build_shards(docs, model, tmp_path / "a", 500, 0.0)
    with pytest.raises(GolfError, match="train side"):
        build_shards(docs, model, tmp_path / "a", 500, 1.0)
    assert not list((tmp_path / "a").iterdir())


def test_tokenizer_refuses_what_it_cannot_do(tmp_path, docs, model):
    for texts, size in ((["abc"], 1024), ([], 1024), (docs, 200), (docs, 10**6)):
        with pytest.raises(GolfError, match="cannot train") as caught:
            train_tokenizer(texts, tmp_path / "x.model", size)
        assert "\n" not in str(caught.value)
    with pytest.raises(GolfError, match="no tokenizer"):
        build_shards(docs, tmp_path / "x.model", tmp_path / "s")
    assert not list(tmp_path.iterdir())


def test_long_documents_train_the_tokenizer_too(tmp_path):
    rng = random.Random(1)
    words = ["".join(rng.choices("abcdefgh", k=5)) for _ in range(80)]
    long = " ".join(rng.choices(words, k=20_000))
    sp = train_tokenizer([long], tmp_path / "x.model", 400)
    assert len(sp.encode(long)) < len(long) / 2


def test_inspect(tmp_path, docs, model):
    build_shards(docs[:50], model, tmp_path / "s", 10**6, 0.3)
    facts = inspect_shard(tmp_path / "s" / "fineweb_train_000000.bin")
    tokens = read_tokens(tmp_path / "s" / "fineweb_train_*.bin")
    assert facts["documents"] == int((tokens == 1).sum()) and facts["highest_token"] == tokens.max() and facts["distinct_tokens"] == np.unique(tokens).size
    assert facts["starts_with_bos"] and facts["tokens"] == tokens.size
    (tmp_path / "zero.bin").write_bytes(b"")
    for path in (tmp_path / "zero.bin", tmp_path / "no.bin", model):
        with pytest.raises(GolfError):
            inspect_shard(path)

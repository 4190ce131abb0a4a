"""Documents, tokenizer and shards: what the notebook of chapter 20 cannot show well."""
import hashlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

import golfnb.tools.data as data
from golfnb.settings import GolfError
from golfnb.tools.data import (LIBRARY_MODULES, build_shards, count_overlap, cut_document, cuts_at_spaces, documents_hash, encode_documents, inspect_shard, is_validation, module_documents,
                         read_documents, in_sample, recut_shards, stdlib_documents, topic_documents, train_tokenizer)
from golfnb.text.bpb import byte_table, encode_text, target_bytes, tokenizer_hash
from golfnb.tools.cli import main_cli
from golfnb.tools.guard import check_manifest
from golfnb.text.shards import read_tokens, write_shard
from tiny import golfnb, one_sentence


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
    assert len(set(LIBRARY_MODULES)) == len(LIBRARY_MODULES) and len(found) == len(set(found)) > 1000
    assert 1_500_000 < sum(len(d) for d in found) < 6_000_000
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
    with pytest.raises(GolfError, match=f"{package}"):
        stdlib_documents(["absent"], package)
    with pytest.raises(GolfError, match="absent"):
        stdlib_documents(["absent"], tmp_path)  # help topics alone are not what was asked for
    assert topic_documents("x = 1") == [] and module_documents("m", "") == []


def test_hash_sees_borders_and_order(docs):
    assert len({documents_hash(x) for x in (docs, docs[::-1], docs[1:], ["".join(docs)], [])}) == 5


@pytest.mark.parametrize("name, content, word", [
    ("a.txt", b"\xff\xfe", "UTF-8"), ("a.jsonl", b'{"text": "x"}\n{"text": "\xe9"}\n', "line 2"), ("a.jsonl", b'["text"]\n', "line 1"),
    ("a.jsonl", b'{"text": 3}\n', "line 1"), ("a.jsonl", b'{"text": "\\ud800"}\n', "line 1"), ("a.jsonl", b"[" * 5000, "line 1"), ("a.csv", b"x", "--field"), ("a.pdf", b"x", ".jsonl")])
def test_bad_documents_are_refused_in_a_sentence(tmp_path, name, content, word):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(GolfError, match=word) as caught:
        list(read_documents([tmp_path / name]))
    assert "\n" not in str(caught.value) and str(tmp_path) in str(caught.value)


def test_all_files_in_another_encoding_are_named_at_once(tmp_path):
    "The first three, and their number; of lines of JSON only the file that was read."
    for i in range(9):
        (tmp_path / f"n{i}.md").write_bytes("Grüße".encode("utf-8" if i < 4 else "latin-1"))
    with pytest.raises(GolfError, match=r"found 5 files .*n4\.md, .*n5\.md, .*n6\.md and 2 more: .*iconv"):
        list(read_documents([tmp_path]))
    with pytest.raises(GolfError, match=r"n8\.md .*0xfc at 2: .*iconv"):
        list(read_documents([tmp_path / "n8.md", tmp_path / "n1.md"]))


def test_an_empty_directory_is_called_so(tmp_path):
    with pytest.raises(GolfError, match="empty directory"):
        list(read_documents([tmp_path]))
    (tmp_path / "a.png").write_bytes(b"\0")
    with pytest.raises(GolfError, match="1 files of other kinds"):
        list(read_documents([tmp_path]))


def test_how_many_pieces_a_small_text_allows_is_said_and_true(tmp_path):
    (tmp_path / "few.txt").write_text("\n\n".join(f"{'a few words of text ' * 20}{i}" for i in range(200)))
    build = ["data", "build", tmp_path / "few.txt", "--out", tmp_path / "s"]
    done = golfnb(*build, cwd=tmp_path)
    assert done.returncode == 2 and one_sentence(done.stderr), done.stderr
    wanted = re.search(r"with (--vocab-size) (\d+)$", done.stderr, re.M)
    assert golfnb(*build, *wanted.groups(), cwd=tmp_path).returncode == 0


def test_missing_file_and_directory(tmp_path):
    (tmp_path / "d.txt").mkdir()
    for path in (tmp_path / "no.txt", tmp_path / "d.txt"):
        with pytest.raises(GolfError, match=path.name):
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
        assert sp.decode(encode_text(sp, text.strip())) == text.strip()


def test_the_mark_of_a_space_is_not_a_space_in_shards(tmp_path, docs):
    "`a b` and `a\u2581b` are other tokens, documents come back, and the bytes scored are those of the text."
    texts = [f"Note {i} says a{sign}b and {sign} of {sign * 2} {i * i}.\r\n{d[:300]}".strip() for i, d in enumerate(docs[:120]) for sign in "\u2581 \0"]
    (tmp_path / "t.jsonl").write_text("\n".join(json.dumps({"text": t}) for t in texts))
    done = golfnb("data", "build", "t.jsonl", "--out", "s", "--vocab-size", 400, "--val-fraction", 0.3, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    sp, made = data.load_tokenizer(tmp_path / "s" / "tokenizer.model"), json.loads((tmp_path / "s" / "manifest.json").read_text())
    found = []
    for side in ("train", "val"):
        tokens = torch.from_numpy(read_tokens(tmp_path / "s" / f"t_{side}_*.bin").astype(np.int64))
        assert int(target_bytes(byte_table(sp), tokens[:-1], tokens[1:]).sum()) == made[side]["text_bytes"]
        found += [sp.decode(run.tolist()) for run in torch.tensor_split(tokens, (tokens == 1).nonzero().flatten())[1:]]
    assert sorted(found) == sorted(texts)


def test_occupied_directories_are_refused_and_left_alone(tmp_path, docs, model):
    (tmp_path / "fineweb_val_000003.bin").write_bytes(b"mine")
    with pytest.raises(GolfError, match="fineweb_val_000003.bin"):
        build_shards(docs, model, tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["fineweb_val_000003.bin"]


def test_what_lies_where_shards_are_built_first_stays(tmp_path, docs, model):
    (tmp_path / ".a-building").mkdir()
    (tmp_path / ".a-building/notes.txt").write_text("of mine")
    build_shards(docs, model, tmp_path / "a", 500, 0.3)
    assert [path.name for path in (tmp_path / ".a-building").iterdir()] == ["notes.txt"] and (tmp_path / "a/manifest.json").exists()


def test_a_failure_on_the_way_leaves_nothing(tmp_path, docs, model, monkeypatch):
    def bad():
        yield from docs
        raise GolfError("document 9 is bad")

    with pytest.raises(GolfError, match="document 9"):
        build_shards(bad(), model, tmp_path / "a", 500, 0.3)
    real = data.ShardWriter.close
    monkeypatch.setattr(data.ShardWriter, "close", lambda w: real(w) if "000003" not in w.path.name else (_ for _ in ()).throw(GolfError("disk full")))
    with pytest.raises(GolfError, match="disk full"):
        build_shards(docs, model, tmp_path / "a", 500, 0.3)
    assert not list(tmp_path.iterdir())
    monkeypatch.undo()
    with pytest.raises(GolfError, match="val "):
        build_shards(docs, model, tmp_path / "a", 500, 0.0)
    with pytest.raises(GolfError, match="train "):
        build_shards(docs, model, tmp_path / "a", 500, 1.0)
    with pytest.raises(GolfError, match="shard_tokens=0"):
        build_shards(docs, model, tmp_path / "a", 0, 0.3)
    with pytest.raises(GolfError, match="one string"):
        build_shards(docs[0], model, tmp_path / "a", 500, 0.3)
    assert not list(tmp_path.iterdir())


def test_tokenizer_refuses_what_it_cannot_do(tmp_path, docs, model):
    for texts, size in ((["abc"], 1024), ([], 1024), (docs, 200), (docs, 10**6)):
        with pytest.raises(GolfError, match=f"tokenizer.* {size} pieces") as caught:
            train_tokenizer(texts, tmp_path / "x.model", size)
        assert "\n" not in str(caught.value)
    with pytest.raises(GolfError, match="x.model"):
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
    assert facts["documents"] == int((tokens == 1).sum()) and facts["highest_token"] == tokens.max()
    assert facts["starts_with_bos"] and facts["tokens"] == tokens.size
    (tmp_path / "zero.bin").write_bytes(b"")
    for path in (tmp_path / "zero.bin", tmp_path / "no.bin", model):
        with pytest.raises(GolfError):
            inspect_shard(path)


WORDS = st.sampled_from(["word", "The", "a", "é", "日本", "end.", "x1", "▁", "e\u0301", "\u0301x", "1,2", "\n", "\t", "  ", "\u00a0", "🙂"])


@given(texts=st.lists(st.lists(WORDS, max_size=60).flatmap(lambda w: st.sampled_from([" ".join(w), "".join(w)])), max_size=8), part=st.integers(1, 40), threads=st.integers(1, 3), size=st.integers(1, 400))
@settings(max_examples=60, deadline=None)
def test_encoding_in_parts_and_threads_is_encoding_one_by_one(model, texts, part, threads, size):
    "Whatever is cut, batched and shared out: the pieces of each document, in order, BOS first."
    sp = data.load_tokenizer(model)
    whole, data.PART_CHARACTERS = data.PART_CHARACTERS, part
    try:
        found = list(encode_documents(iter(texts), sp, threads, size))
        assert all(" ".join(cut_document(t)) == t for t in texts)
    finally:
        data.PART_CHARACTERS = whole
    assert [document.ids.tolist() for document in found] == [[1, *encode_text(sp, t)] for t in texts]
    assert [(d.sha256, d.text_bytes) for d in found] == [(hashlib.sha256(t.encode()).digest(), len(t.encode())) for t in texts]
    assert all(d.counted_bytes == d.normalized_bytes == d.text_bytes for d in found)


def test_a_vocabulary_that_reaches_over_spaces_is_not_cut(tmp_path, docs):
    import io
    import sentencepiece as spm

    for name, more in (("phrases", {"split_by_whitespace": False}), ("suffix", {"treat_whitespace_as_suffix": True}), ("bare", {"add_dummy_prefix": False})):
        out = io.BytesIO()
        spm.SentencePieceTrainer.train(sentence_iterator=iter(docs), model_writer=out, vocab_size=600, model_type="bpe", byte_fallback=True, minloglevel=2, **more)
        sp = spm.SentencePieceProcessor(model_proto=out.getvalue())
        assert not cuts_at_spaces(sp), name
        long = " ".join(docs[:40])[: 3 * data.PART_CHARACTERS]
        assert [document.ids.tolist() for document in encode_documents([long], sp)] == [[sp.bos_id(), *sp.encode(long)]], name


def test_shards_are_those_of_one_document_at_a_time(tmp_path, docs, model):
    "Files built in threads against tokens of the naive loop, byte for byte; counts and hashes of the manifest."
    sp = data.load_tokenizer(model)
    manifest = build_shards(iter(docs), model, tmp_path / "s", 20_000, 0.2, threads=3, skipped=["a", "b"])
    for side in ("train", "val"):
        kept = [d for d in docs if is_validation(d, 0.2) is (side == "val")]
        stream = np.array([t for d in kept for t in [1, *sp.encode(d)]], np.uint16)
        for i, entry in enumerate(manifest[side]["shards"]):
            raw = (tmp_path / "s" / entry["name"]).read_bytes()
            assert raw[1024:] == stream[20_000 * i :][:20_000].tobytes() and hashlib.sha256(raw[1024:]).hexdigest() == entry["sha256"]
        assert manifest[side]["tokens"] == stream.size and manifest[side]["text_bytes"] == sum(len(d.encode()) for d in kept) and manifest[side]["documents"] == len(kept)
    assert manifest["documents_sha256"] == documents_hash(docs) and manifest["skipped_empty"] == 2


def test_a_part_of_the_documents_does_not_depend_on_their_order(docs):
    assert all(in_sample(d, 1) for d in docs) and not any(in_sample(d, 0) for d in docs)
    small, large = ({d for d in docs if in_sample(d, share)} for share in (0.2, 0.6))
    assert small < large and 0.1 < len(small) / len(docs) < 0.3 and 0.5 < len(large) / len(docs) < 0.7
    assert 0 < sum(is_validation(d, 0.5) for d in large) < len(large), "the sample is not one side of the split"


BUILD_IN_BOUNDS = """
import sys
from golfnb.tools.data import build_shards
def most(): return int(open("/proc/self/status").read().split("VmHWM:")[1].split()[0]) # KiB; ru_maxrss would count the parent's
def texts(n):
    for i in range(n): yield f"document {i} " + "the quick brown fox jumps over the lazy dog " * 200
build_shards(texts(20), sys.argv[1], sys.argv[2] + "/a", 10**6, 0.3)
before = most()
made = build_shards(texts(4000), sys.argv[1], sys.argv[2] + "/b", 10**9, 0.3, threads=2)
print((most() - before) // 1024, made["train"]["text_bytes"] + made["val"]["text_bytes"])
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the peak is read from /proc")
def test_memory_does_not_grow_with_the_corpus(tmp_path, model):
    "35 MB of text in one shard a side, which would be as many bytes of text and of tokens: the peak grows by what a few batches take."
    done = subprocess.run([sys.executable, "-c", BUILD_IN_BOUNDS, str(model), str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    grown, size = map(int, done.stdout.split())
    assert size > 34_000_000 and grown < 32, grown


def test_a_document_of_100_megabytes(model):
    "It is cut at spaces (4 MB here; the whole size is in nbs/results/data_build_cpu.json)."
    sp = data.load_tokenizer(model)
    long = "Long texts are read in parts and nothing is lost. " * 80_000
    (document,) = encode_documents([long], sp)
    ids = document.ids
    once = sp.encode("Long texts are read in parts and nothing is lost. " * 20)
    assert document.text_bytes == document.counted_bytes == len(long) and ids[1 : len(once) - 5].tolist() == once[: len(once) - 6] and abs(ids.size / (len(once) * 4_000) - 1) < 0.01


FULL_DISK_BUILD = """
import resource, signal, sys
from golfnb.tools.cli import main_cli
from golfnb.tools.guard import check_manifest
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, 60_000))
sys.exit(main_cli(["data", "build", "docs.jsonl", "--tokenizer", sys.argv[1], "--out", "s", "--shard-tokens", "200000"]))
"""


def test_a_full_disk_while_building(tmp_path, docs, model):
    (tmp_path / "docs.jsonl").write_text("\n".join(json.dumps({"text": d}) for d in docs))
    done = subprocess.run([sys.executable, "-c", FULL_DISK_BUILD, str(model)], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 2 and one_sentence(done.stderr) and "bytes free" in done.stderr and "docs_" in done.stderr, done.stderr
    assert [p.name for p in tmp_path.iterdir()] == ["docs.jsonl"]


def killed(work, rename: int = 0, seconds: float = 60) -> bool:
    "Run `work` in a forked process that is killed as it is about to rename its nth file, or after some seconds; whether it was."
    if not (pid := os.fork()):
        counted, count = os.rename, iter(range(1, 10**6))
        os.rename = os.replace = lambda *a: os.kill(os.getpid(), signal.SIGKILL) if next(count) == rename else counted(*a)
        work()
        os._exit(0)
    end = time.monotonic() + seconds
    while not (done := os.waitpid(pid, os.WNOHANG))[0]:
        if time.monotonic() > end:
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.001)
    return done[1] != 0


@pytest.mark.parametrize("kind", ["new", "empty", "kept", "recut"])
def test_a_build_that_is_killed_leaves_nothing_or_everything(kind, tmp_path, docs, capfd):
    "Before any of its renames, or whenever. Where the directory holds other files, a part is refused. The next build names what is left."
    (tmp_path / "docs.jsonl").write_text("\n".join(json.dumps({"text": d[:300]}) for d in docs[:60]))
    words = ["data", "build", str(tmp_path / "docs.jsonl"), "--vocab-size", "400", "--val-fraction", "0.3", "--shard-tokens", "4000", "--out"]
    assert main_cli([*words, str(tmp_path / "whole")]) == 0
    sha, words = tokenizer_hash(tmp_path / "whole" / "tokenizer.model"), words if kind != "recut" else ["data", "recut", str(tmp_path / "whole" / "docs_train_*.bin"), "--shards", "3", "--out"]

    def left(name: str, **moment) -> tuple:
        out = tmp_path / name
        if kind in ("empty", "kept"):
            out.mkdir()
        if kind == "kept":
            (out / "notes.txt").write_text("mine")
        dead = killed(lambda: main_cli([*words, str(out)]), **moment)
        return dead, out, {p.name for p in out.glob("[!.]*")} - {"notes.txt"}

    start = time.monotonic()
    (_, _, wanted), took = left("unharmed"), time.monotonic() - start
    found = [left(f"rename{n}", rename=n) for n in range(1, 20)] + [left(f"time{i}", seconds=random.uniform(0, took)) for i in range(4)]
    for dead, out, names in found:
        if kind == "kept" and names not in (set(), wanted):
            with pytest.raises(GolfError, match="manifest.json"):
                check_manifest(out, sha)
        else:
            assert names == wanted or dead and not names
    assert len(wanted) >= 3 and any(dead for dead, _, _ in found) and not all(dead for dead, _, _ in found)
    capfd.readouterr()
    again = found[0][1]
    assert main_cli([*words, str(again)]) == 0 and {p.name for p in again.glob("[!.]*")} - {"notes.txt"} == wanted
    assert "left of a build that was killed" in capfd.readouterr().err and not [*again.parent.glob(f".{again.name}-*"), *again.glob(".*")]


def test_recut_keeps_the_stream_and_cuts_at_documents(tmp_path, docs, model):
    build_shards(docs, model, tmp_path / "s", 30_000, 0.1)
    stream = read_tokens(tmp_path / "s" / "fineweb_train_*.bin")
    short = [d[:300] for d in docs]
    build_shards(short, model, tmp_path / "t", 7_000, 0.1)
    small = read_tokens(tmp_path / "t" / "fineweb_train_*.bin")
    for pattern, count, want in (("s", 1, stream), ("s", 5, stream), ("t", 24, small)):
        made = recut_shards(tmp_path / pattern / "fineweb_train_*.bin", tmp_path / f"{pattern}{count}", count)
        parts = [read_tokens(tmp_path / f"{pattern}{count}" / entry["name"]) for entry in made]
        assert len(made) == count and np.array_equal(np.concatenate(parts), want) and all(part[0] == 1 for part in parts)
    with pytest.raises(GolfError, match="t24.*found "):
        recut_shards(tmp_path / "s" / "fineweb_train_*.bin", tmp_path / "t24", 5)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").touch()
    with pytest.raises(GolfError, match="notes.txt"):
        recut_shards(tmp_path / "s" / "fineweb_train_*.bin", tmp_path / "mine", 5)
    with pytest.raises(GolfError, match="fineweb_train and fineweb_val"):
        recut_shards(tmp_path / "s" / "*.bin", tmp_path / "none", 5)
    with pytest.raises(GolfError, match="100000 shards"):
        recut_shards(tmp_path / "s" / "fineweb_train_*.bin", tmp_path / "none", 100_000)


def test_overlap_of_a_shard_with_itself_is_whole(tmp_path):
    write_shard(tmp_path / "a_train_0.bin", [1, 5, 6, 1, 7, 8, 9])
    write_shard(tmp_path / "a_val_1.bin", [9, 1, 7, 8, 9, 1, 5])
    train, val = [tmp_path / "a_train_0.bin"], [tmp_path / "a_val_1.bin"]
    assert count_overlap(train, val) == {"documents": 3, "shared_documents": 1, "repeated": 0} and count_overlap(val, val) == {"documents": 3, "shared_documents": 3, "repeated": 0}


def test_build_inspect_recut_as_commands(tmp_path, docs, model):
    "Two passes over jsonl, empty documents reported, a directory inspected with a tokenizer, and the overlap line."
    lines = [json.dumps({"text": d[:600]}) for d in docs] + ["", json.dumps({"text": " "})]
    (tmp_path / "docs.jsonl").write_text("\n".join(lines) + "\n")
    done = golfnb("data", "build", "docs.jsonl", "--out", "s", "--vocab-size", 512, "--tokenizer-bytes", 40_000, "--val-fraction", 0.2, cwd=tmp_path)
    assert done.returncode == 0 and "skipped: 2 empty documents" in done.stdout, done.stderr
    assert json.loads((tmp_path / "s" / "manifest.json").read_text())["skipped_empty"] == 2
    done = golfnb("data", "inspect", "s", "--tokenizer", "s/tokenizer.model", cwd=tmp_path)
    assert done.returncode == 0 and done.stdout.count("bytes per token") == 2 and done.stdout.count("  sample") == 2, done.stderr
    assert "validation text in these training shards: 0 of" in done.stdout
    damaged = shutil.copytree(tmp_path / "s", tmp_path / "damaged") / "docs_val_000000.bin"
    damaged.write_bytes(damaged.read_bytes()[:-2] + b"\1\0")
    done = golfnb("data", "inspect", "damaged", cwd=tmp_path)
    assert done.returncode == 2 and one_sentence(done.stderr) and "docs_val_000000.bin" in done.stderr and "SHA-256" in done.stderr
    done = golfnb("data", "inspect", "s", "--tokenizer", model, cwd=tmp_path)
    assert done.returncode == 2 and one_sentence(done.stderr) and "set TOKENIZER_PATH to the tokenizer of these shards" in done.stderr
    done = golfnb("data", "recut", "s/docs_train_*.bin", "--shards", 6, "--out", "r", cwd=tmp_path)
    assert done.returncode == 0 and len(list((tmp_path / "r").glob("*.bin"))) == 6, done.stderr
    (tmp_path / "bad.jsonl").write_bytes(b'{"text": "x"}\n{"text": "\xe9"}\n')
    done = golfnb("data", "build", "bad.jsonl", "--tokenizer", "s/tokenizer.model", "--out", "n", cwd=tmp_path)
    assert done.returncode == 2 and one_sentence(done.stderr) and "line 2" in done.stderr and "UTF-8" in done.stderr and not list((tmp_path / "n").glob("*.bin"))


def test_documents_come_from_directories_of_many_kinds(tmp_path):
    import gzip
    import pyarrow as pa
    import pyarrow.parquet as pq

    where = tmp_path / "notes"
    (where / "deep" / ".git").mkdir(parents=True)
    for name, content in (("deep/b.md", "b"), ("LICENSE", "l"), ("c.rst", "c"), ("d.TXT", "d"), ("deep/.git/x.md", "no"), (".hidden", "no"), ("p.py", "no")):
        (where / name).write_text(content)
    (where / "program").write_bytes(b"\x7fELF\0")
    (where / "j.jsonl.gz").write_bytes(gzip.compress(b'{"body": "j"}\n'))
    table = pa.table({"body": ["p", None, "q"], "n": [1, 2, 3]})
    pq.write_table(table, where / "t.parquet")
    with pa.OSFile(str(where / "u.arrow"), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table)
    left_out, skipped = [], []
    files = data.find_documents([where], left_out)
    assert list(read_documents(files, skipped, "body")) == ["l", "c", "d", "b", "j", "p", "q", "p", "q"] and len(skipped) == 2
    assert {p.name for p in left_out} == {"x.md", ".hidden", "p.py", "program"}
    for path, field, words in ((where / "t.parquet", "text", "'text'.*body .string., n .int64."), (where / "t.parquet", "n", "'n'.*n .int64."),
                               (where / "j.jsonl.gz", "text", "--field"), (tmp_path / "no", "text", "hf://datasets/OWNER/NAME")):
        with pytest.raises(GolfError, match=words):
            list(read_documents([path], field=field))
    for name in ("t.parquet", "u.arrow", "j.jsonl.gz"):
        (where / name).write_bytes((where / name).read_bytes()[:-12])
        with pytest.raises(GolfError, match=name):
            list(read_documents([where / name], field="body"))


def test_a_data_set_of_the_hub_is_a_directory(tmp_path, monkeypatch):
    import huggingface_hub

    asked = []
    (tmp_path / "en").mkdir()
    (tmp_path / "en" / "a.jsonl").write_text('{"text": "hub"}\n')
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda repo, **how: asked.append((repo, how["allow_patterns"])) or str(tmp_path))
    assert list(read_documents(["hf://datasets/me/books/en"])) == ["hub"] and asked == [("me/books", ["en/*"])]
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *a, **how: 1 / 0)
    with pytest.raises(GolfError, match="hf://datasets/me/none .ZeroDivisionError"):
        list(read_documents(["hf://datasets/me/none"]))


@pytest.mark.parametrize("size", [20_000, 200_000])
def test_one_book_is_enough(tmp_path, docs, size):
    "It is cut into documents for both sides, and the next command is one that works."
    (tmp_path / "My book.txt").write_text("\n\n".join(docs)[:size])
    done = golfnb("data", "build", "My book.txt", "--out", "a b", cwd=tmp_path)
    assert done.returncode == 0 and "cut at blank lines" in done.stdout and "note: " in done.stdout, done.stderr
    assert (tmp_path / "a b" / "My-book_train_000000.bin").exists()
    assert done.stdout.splitlines()[-1].endswith("train --recipe demo DATA_PATH='a b' TOKENIZER_PATH='a b/tokenizer.model' ITERATIONS=100")


MANY = "".join(map(chr, range(0x4E00, 0x5A00)))


def chinese(rng: random.Random, characters: int) -> str:
    "Sentences of 3,072 characters, some of them common, with no space."
    return "".join(rng.choices([*MANY, "。"], [*(1 / (10 + i) for i in range(len(MANY))), 0.2], k=characters))


def emoji(rng: random.Random, characters: int) -> str:
    return "".join(rng.choices([chr(c) for c in range(0x1F300, 0x1F650)], k=characters))


def english(rng: random.Random, characters: int) -> str:
    "One line of words, with sentences."
    return "".join(rng.choices("etaoinshrdlu ", k=characters)).replace(" e", ". E")


@pytest.mark.parametrize("write, count", [(chinese, 400), (emoji, 400), (chinese, 1), (emoji, 1), (english, 1)])
def test_text_of_many_characters_or_in_one_line_is_built_and_comes_back(tmp_path, write, count):
    "More characters than pieces, documents with neither line ends nor spaces: the rare characters are bytes, and one text is cut."
    rng = random.Random(7)
    texts = [write(rng, 60_000 // count).strip() for _ in range(count)]
    (tmp_path / "t.jsonl").write_text("\n".join(json.dumps({"text": t}) for t in texts))
    done = golfnb("data", "build", "t.jsonl", "--out", "s", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    sp, made = data.load_tokenizer(tmp_path / "s" / "tokenizer.model"), json.loads((tmp_path / "s" / "manifest.json").read_text())
    sides = [read_tokens(tmp_path / "s" / f"t_{side}_*.bin") for side in ("train", "val")]
    found = [sp.decode(run.tolist()) for tokens in sides for run in np.split(tokens, np.flatnonzero(tokens == 1))[1:]]
    assert made["val"]["documents"] >= 2
    if count > 1:
        assert sorted(found) == sorted(texts)
    else:
        assert Counter("".join("".join(found).split())) == Counter("".join(texts[0].split()))


def test_documents_with_the_sign_for_an_unknown_character_train_the_tokenizer(tmp_path):
    "SentencePiece leaves out what holds U+2585, which bars and sparklines are made of."
    sp = train_tokenizer([f"Load of host {i} is \u2585\u2583 again and again" for i in range(100)], tmp_path / "t.model", 300)
    assert len(sp.encode("again and again")) < 8 and sp.decode(sp.encode("\u2585 host")) == "\u2585 host"


def test_files_without_text_are_named(tmp_path):
    (tmp_path / "a.txt").touch()
    (tmp_path / "b.md").write_text(" \n")
    (tmp_path / "c.jsonl").write_text('{"text": ""}\n')
    done = golfnb("data", "build", "a.txt", "b.md", "c.jsonl", "--out", "o", cwd=tmp_path)
    assert done.returncode == 2 and one_sentence(done.stderr), done.stderr
    assert "a.txt, b.md, c.jsonl" in done.stderr
    assert {p.name for p in tmp_path.iterdir()} == {"a.txt", "b.md", "c.jsonl"}


@pytest.mark.parametrize("command", ["build", "recut"])
@pytest.mark.parametrize("kept", [False, True])
def test_a_second_build_into_a_folder_is_refused(tmp_path, docs, model, command, kept):
    "While the first is on its way, and nothing is mixed: the folder holds what the first made."
    (tmp_path / "docs.jsonl").write_text("\n".join(json.dumps({"text": d[:300]}) for d in docs[:60]))
    build_shards(docs[:60], model, tmp_path / "whole", 4000, 0.3)
    words = {"build": ["docs.jsonl", "--tokenizer", model], "recut": ["whole/fineweb_train_*.bin", "--shards", 2]}[command]
    if kept:
        (tmp_path / "o").mkdir()
        (tmp_path / "o" / "notes.txt").touch()

    def texts():
        yield from docs[:30]
        second = golfnb("data", command, *words, "--out", "o", cwd=tmp_path)
        assert second.returncode == 2 and one_sentence(second.stderr), second.stderr
        if command == "build" or not kept:  # a folder to recut into must be empty
            assert "o must be filled by one process" in second.stderr
        yield from docs[30:60]

    build_shards(texts(), model, tmp_path / "o", 4000, 0.3)
    names = {p.name for p in (tmp_path / "whole").iterdir()}
    assert {p.name for p in (tmp_path / "o").iterdir()} - {"notes.txt"} == names
    assert all((tmp_path / "o" / n).read_bytes() == (tmp_path / "whole" / n).read_bytes() for n in names)
    assert not list(tmp_path.glob(".*"))


def test_what_is_too_small_is_refused_by_the_build_with_the_number(tmp_path, model):
    (tmp_path / "few.txt").write_text("A line of a note.\n\n" * 30 + "\n\n".join(f"Note {i} says {i * i}." for i in range(60)))
    for words, more in ((["few.txt"], "pieces"), (["few.txt", "--tokenizer", model], "257 tokens"), (["few.txt", "--tokenizer", "x/tokenizer.json"], "SentencePiece .model")):
        done = golfnb("data", "build", *words, "--out", "o", cwd=tmp_path)
        assert done.returncode == 2 and one_sentence(done.stderr) and more in done.stderr, done.stderr
        assert {p.name for p in tmp_path.iterdir()} == {"few.txt"}


def test_the_next_command_gives_the_vocabulary_and_leaves_long_scoring_out(docs):
    from golfnb.tools.commands.data import next_training

    made = {"train": {"tokens": 400_000}, "val": {"tokens": 900_000}, "vocab_size": 512}
    assert next_training(made, "d", "m").endswith("VOCAB_SIZE=512 ITERATIONS=195 TTT_ENABLED=0")


def test_corpora_are_not_mixed_and_overlap_has_a_verdict(tmp_path):
    doc = lambda i: [1, *range(i, i + 40)]
    for name, some in (("a_train_0.bin", [5, 5, 6]), ("a_val_0.bin", [6, 7])):
        write_shard(tmp_path / name, sum(map(doc, some), []))
    done = golfnb("data", "inspect", tmp_path, cwd=tmp_path)
    assert "repeated training documents: 1" in done.stdout and "1 of 2 documents; this is bad" in done.stdout and "golfnb data build" in done.stdout
    check_manifest(tmp_path, "")
    write_shard(tmp_path / "a_val_bytes_000000.bin", [4] * 80)
    done = golfnb("data", "inspect", tmp_path, cwd=tmp_path)
    assert "left out" in done.stdout and "1 of 2 documents" in done.stdout
    check_manifest(tmp_path, "")
    write_shard(tmp_path / "fineweb_val_000000.bin", doc(3))
    with pytest.raises(GolfError, match="a and fineweb"):
        check_manifest(tmp_path, "")


def test_what_is_no_whole_regular_file_is_refused_and_null_is_empty(tmp_path):
    "A named pipe would hang, a damaged .gz ended in zlib.error; null is an empty document, as in a table."
    import gzip
    import zlib

    from golfnb.tools.data import find_documents, read_documents

    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(GolfError, match="pipe"):
        find_documents([tmp_path / "pipe"])
    packed = gzip.compress(b"".join(json.dumps({"text": hex(i**9)}).encode() + b"\n" for i in range(2000)))
    damages = (packed[:at] + bytes(300) + packed[at + 300:] for at in range(2000, len(packed) - 2000, 500))
    for data in damages:
        try:
            gzip.decompress(data)
        except zlib.error:
            break
        except Exception:
            continue
    (tmp_path / "damaged.jsonl.gz").write_bytes(data)
    with pytest.raises(GolfError, match="damaged.jsonl.gz"):
        list(read_documents([tmp_path / "damaged.jsonl.gz"]))
    skipped = []
    (tmp_path / "n.json.gz").write_bytes(gzip.compress(b'{"text": "a"}\n{"text": null}\n{"text": "b"}\n'))
    (tmp_path / "t.txt.gz").write_bytes(gzip.compress(b"c\n"))
    assert list(read_documents([tmp_path / "n.json.gz", tmp_path / "t.txt.gz"], skipped)) == ["a", "b", "c"] and len(skipped) == 1


def test_columns_of_csv_and_lines_packed_by_zstd_are_documents(tmp_path):
    "A text may have commas, quotes, line ends and any length; what is cut off is refused, not taken as one long text."
    import csv
    import gzip
    import io

    import pyarrow as pa

    from golfnb.tools.data import find_documents, read_documents

    texts = ["a, b", 'he said "c"\nand d', "", "\u6f22 " * 100_000 + "e"]
    rows = io.StringIO()
    csv.writer(rows).writerows([["n", "text"], *enumerate(texts)])
    (tmp_path / "a.csv").write_text("\ufeff" + rows.getvalue(), "utf-8", newline="")
    (tmp_path / "b.csv.gz").write_bytes(gzip.compress(rows.getvalue().encode()))
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()
    for name, data in (("c.jsonl", lines), ("d.jsonl.gz", gzip.compress(lines)), ("e.jsonl.zst", pa.compress(lines, "zstd", asbytes=True))):
        (tmp_path / name).write_bytes(data)
    whole = [text for text in texts if text]
    for name in ("a.csv", "b.csv.gz", "c.jsonl", "d.jsonl.gz", "e.jsonl.zst"):
        skipped = []
        assert list(read_documents([tmp_path / name], skipped)) == whole and len(skipped) == 1, name
    left_out = []
    assert "a.csv" not in [p.name for p in find_documents([tmp_path], left_out)] and {"a.csv", "b.csv.gz"} == {p.name for p in left_out}
    (tmp_path / "open.csv").write_text('n,text\n1,"never closed\n2,b\n')
    (tmp_path / "other.csv").write_bytes(b"n,text\n1,caf\xe9\n")
    (tmp_path / "cut.jsonl.zst").write_bytes((tmp_path / "e.jsonl.zst").read_bytes()[:-40])
    for name, field, words in (("a.csv", "body", "'body', found n, text"), ("open.csv", "text", "open.csv must be a whole .csv"),
                               ("other.csv", "text", "other.csv must be UTF-8"), ("cut.jsonl.zst", "text", "cannot read .*cut.jsonl.zst")):
        with pytest.raises(GolfError, match=words):
            list(read_documents([tmp_path / name], field=field))


def test_linked_folders_are_read_once_and_what_is_not_read_is_named(tmp_path):
    from golfnb.tools.data import find_documents

    (tmp_path / "store" / "wiki").mkdir(parents=True)
    (tmp_path / "notes").mkdir()
    (tmp_path / "store" / "wiki" / "a.txt").write_text("a")
    (tmp_path / "notes" / "b.txt").write_text("b")
    (tmp_path / "notes" / "wiki").symlink_to(tmp_path / "store" / "wiki")
    (tmp_path / "store" / "wiki" / "loop").symlink_to(tmp_path / "notes")
    (tmp_path / "notes" / "gone.txt").symlink_to(tmp_path / "nowhere")
    left_out = []
    assert [p.name for p in find_documents([tmp_path / "notes"], left_out)] == ["b.txt", "a.txt"] and [p.name for p in left_out] == ["gone.txt"]


def trained_by_others(path, texts, **more):
    "A tokenizer as SentencePiece's own command makes one, but for what is given."
    import io

    import sentencepiece as spm

    model, given = io.BytesIO(), {"vocab_size": 400, "byte_fallback": True, **more}
    spm.SentencePieceTrainer.train(sentence_iterator=iter(texts), model_writer=model, model_type="bpe", pad_id=0, bos_id=1, eos_id=2, unk_id=3, num_threads=1, minloglevel=2, **given)
    path.write_bytes(model.getvalue())
    return path


def counted_again(folder, model, side) -> int:
    "The bytes of a side by the table, from its shards."
    tokens = torch.from_numpy(read_tokens(folder / f"fineweb_{side}_*.bin").astype(np.int64))
    return int(target_bytes(byte_table(data.load_tokenizer(model)), tokens[:-1], tokens[1:]).sum())


@pytest.mark.parametrize("rule", [{}, {"normalization_rule_name": "nmt_nfkc_cf"}, {"normalization_rule_name": "identity", "remove_extra_whitespaces": False}], ids=["NFKC", "small letters", "identity"])
def test_bytes_that_normalisation_changes_are_counted_and_said(tmp_path, docs, rule):
    "The manifest has both counts; the note says them for these shards and no others, and a manifest without the count is read as before."
    from golfnb.text.shards import bytes_note

    texts = [f"{d}\n\n\ufb01 \u00bd  a \u2581 b\t{i}" for i, d in enumerate(docs[:80])]
    model = trained_by_others(tmp_path / "t.model", texts, **rule)
    made = build_shards(texts, model, tmp_path / "s", val_fraction=0.3)
    sp, changes = data.load_tokenizer(model), "remove_extra_whitespaces" not in rule
    for side in ("train", "val"):
        mine = [t for t in texts if is_validation(t, 0.3) is (side == "val")]
        assert made[side]["text_bytes"] == sum(len(t.encode()) for t in mine)
        kept = sum(len(sp.normalize(t.replace("\u2581", "\0")).replace("\u2581", " ").encode()) + 1 for t in mine)  # the space in front, and two bytes more of U+2581
        assert made[side]["counted_bytes"] == counted_again(tmp_path / "s", model, side) == kept and (kept < made[side]["text_bytes"]) is changes
    val = sorted((tmp_path / "s").glob("*_val_*.bin"))
    note = "note: bits per byte are counted on {counted_bytes:,} bytes; the validation text has {text_bytes:,},".format(**made["val"])
    assert bytes_note(val).startswith(note) is changes and (bytes_note(val) == "") is not changes
    assert bytes_note([tmp_path / "s" / "other_val_000000.bin"]) == ""
    manifest = tmp_path / "s" / "manifest.json"
    for damage in ({"counted_bytes": None}, {"counted_bytes": "many"}, {"text_bytes": []}):
        manifest.write_text(json.dumps(made | {"val": made["val"] | damage}))
        assert bytes_note(val) == ""
    for side in ("train", "val"):
        del made[side]["counted_bytes"]
    manifest.write_text(json.dumps(made))
    assert bytes_note(val) == ""
    check_manifest(tmp_path / "s", made["tokenizer_sha256"])


@pytest.mark.parametrize("kind, cause", [("no fallback", r"10 of its tokens are unknown .* no byte fallback: train one with byte_fallback=True"), ("no space", "no piece for a space.* required_chars"), ("suffix", "neither its pieces nor its normalisation")])
def test_bytes_that_nothing_explains_are_refused(tmp_path, kind, cause):
    "From one byte on, with the count, the cause and the way out; nothing stays."
    texts, exact = ["one small text"] * 20, dict(normalization_rule_name="identity", remove_extra_whitespaces=False)
    lines, more = {"no fallback": (texts, {"byte_fallback": False, "vocab_size": 20}), "no space": (["".join(map(chr, range(0x4E00, 0x4E00 + 100))) * 10], {"character_coverage": 0.999, "vocab_size": 380}),
                   "suffix": (texts, {"treat_whitespace_as_suffix": True, "vocab_size": 280})}[kind]
    model = trained_by_others(tmp_path / "t.model", lines, **exact, **more)
    odd = {"no fallback": "one\ntext" * 10, "no space": "a b", "suffix": "one text"}[kind]
    wrong = {"no fallback": (70, 80), "no space": (8, 3), "suffix": (9, 8)}[kind]
    with pytest.raises(GolfError, match="found {} counted for the {} of document 1; .*{}".format(*wrong, cause)) as caught:
        build_shards([odd], model, tmp_path / "s")
    assert "\n" not in str(caught.value) and [p.name for p in tmp_path.iterdir()] == ["t.model"]


def test_a_tokenizer_of_text_without_spaces_has_a_piece_for_one(tmp_path):
    "Long Chinese documents: the one space that SentencePiece puts in front of each is rarer than what coverage takes."
    rng = random.Random(3)
    texts = [chinese(rng, 60_000) for _ in range(4)]
    sp = train_tokenizer(texts, tmp_path / "t.model", 1024)
    assert sp.encode("a b", out_type=str)[:3] == ["\u2581", "<0x61>", "\u2581"]
    made = build_shards([*texts, *(f"\u8bf4 one two {i}" for i in range(40))], tmp_path / "t.model", tmp_path / "s", val_fraction=0.3)
    for side in ("train", "val"):
        assert made[side]["counted_bytes"] == made[side]["text_bytes"] == counted_again(tmp_path / "s", tmp_path / "t.model", side)
    train_tokenizer(texts, tmp_path / "again.model", 1024)
    assert tokenizer_hash(tmp_path / "again.model") == tokenizer_hash(tmp_path / "t.model")


def test_a_folder_that_cannot_be_opened_is_left_out_by_name(tmp_path, monkeypatch):
    "The tests may run as a user who can open every folder, so the refusal of the system is put in its place."
    for folder, count in (("notes", 30), ("notes/private", 30), ("notes/z", 30)):
        (tmp_path / folder).mkdir()
        for i in range(count):
            (tmp_path / folder / f"{i}.txt").write_text(f"{folder} {i}: " + " ".join(stdlib_documents(["string"])[0].split()[i:i + 90]))
    scandir = os.scandir

    def refusing(path):
        if str(path).endswith("private"):
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refusing)
    left_out = []
    found = data.find_documents([tmp_path / "notes"], left_out)
    assert len(found) == 60 and left_out == [tmp_path / "notes" / "private"] and {p.parent.name for p in found} == {"notes", "z"}
    done = golfnb("data", "build", "notes", "--out", "o", "--vocab-size", 300, cwd=tmp_path)
    assert done.returncode == 0 and "left out: 1 directories that cannot be opened, the first notes/private" in done.stdout, done.stderr
    with pytest.raises(GolfError, match="must hold documents, found 1 directories that cannot be opened, .*private: "):
        data.find_documents([tmp_path / "notes" / "private"])


def test_shares_are_of_the_bytes_of_the_text_whatever_its_file_takes(tmp_path):
    "The same documents in four files: packed, plain, in a table, and in a table beside pictures."
    import gzip

    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    rng = random.Random(0)
    texts = [f"{i} " + " ".join(rng.choices("ships carry tea salt and rain to the old harbour".split(), k=120)) for i in range(500)]
    lines = "".join(json.dumps({"text": t}) + "\n" for t in texts).encode()
    (tmp_path / "a.jsonl").write_bytes(lines)
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(lines))
    pq.write_table(pa.table({"text": texts}), tmp_path / "c.parquet")
    pq.write_table(pa.table({"text": texts, "picture": pa.array([rng.randbytes(20_000) for _ in texts], pa.binary())}), tmp_path / "d.parquet")
    names = ["a.jsonl", "b.jsonl.gz", "c.parquet", "d.parquet"]
    sizes = [(tmp_path / name).stat().st_size for name in names]
    assert 4 * sizes[1] < sizes[0] and 10 * sizes[2] < sizes[3]
    made = []
    for name in names:
        done = golfnb("data", "build", name, "--out", f"o-{name}", "--vocab-size", 300, "--tokenizer-bytes", 100_000, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        found = json.loads((tmp_path / f"o-{name}" / "manifest.json").read_text())
        made.append((found["val_fraction"], found["tokenizer_sha256"], found["val"]["text_bytes"], found["documents_sha256"]))
    assert len(set(made)) == 1, made
    size = sum(len(t.encode()) for t in texts)
    assert made[0][0] == pytest.approx(20_000 / size) and 8_000 < made[0][2] < 40_000

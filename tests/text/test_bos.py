"""The token that begins a document is the tokenizer's: 2 in SentencePiece's usual order (pad 0, unk 1, bos 2, eos 3)."""
import io
import json
from types import SimpleNamespace

import numpy as np
import pytest
import sentencepiece as spm
import torch
from tiny import golfnb, one_sentence

from golfnb.score.adapters import document_spans
from golfnb.text.bpb import byte_table, document_mark, load_tokenizer
from golfnb.recipes import pr2135
from golfnb.settings import GolfError
from golfnb.text.shards import check_marks, write_shard
from golfnb.studies.packed import PackedSampler, index_documents
from golfnb.tools.data import build_shards, count_overlap, inspect_shard, recut_shards, stdlib_documents
from golfnb.tools.play import Player
from golfnb.tools.report import prompt_of, split_documents

TEXTS = stdlib_documents(["textwrap", "string", "random"])


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    "A tokenizer whose BOS is 2, and the folder of its shards."
    root, model = tmp_path_factory.mktemp("bos"), io.BytesIO()
    lines = [line for text in TEXTS for line in text.split("\n") if line.strip()]
    spm.SentencePieceTrainer.train(sentence_iterator=iter(lines), model_writer=model, vocab_size=400, model_type="bpe", byte_fallback=True, pad_id=0, unk_id=1, bos_id=2, eos_id=3,
                                   normalization_rule_name="identity", remove_extra_whitespaces=False, num_threads=1, minloglevel=2)
    (root / "m.model").write_bytes(model.getvalue())
    build_shards(TEXTS, root / "m.model", root / "data", val_fraction=0.2, name="t")
    return root


@pytest.fixture
def sp(made):
    return load_tokenizer(made / "m.model")


def shard(made, split="train"):
    return made / "data" / f"t_{split}_000000.bin"


def test_the_manifest_and_the_table_say_it(made, sp):
    assert json.loads((made / "data" / "manifest.json").read_text())["bos_id"] == byte_table(sp).bos == document_mark(sp) == 2


def test_inspect_counts_documents(made, sp):
    wanted = json.loads((made / "data" / "manifest.json").read_text())["train"]["documents"]
    for tokenizer in (sp, None):  # without a tokenizer the manifest says it
        facts = inspect_shard(shard(made), tokenizer)
        assert facts["documents"] == wanted > 10 and facts["starts_with_bos"]


def test_overlap_is_seen(made, sp, tmp_path):
    tokens = np.fromfile(shard(made), "<u2")[512:]
    marks = np.flatnonzero(tokens == 2)
    write_shard(tmp_path / "t_val_000000.bin", tokens[marks[3]:marks[8]])
    assert count_overlap([shard(made)], [tmp_path / "t_val_000000.bin"], sp)["shared_documents"] == 5
    with pytest.raises(GolfError, match="must begin with token 1, .* found 2: name the tokenizer"):
        count_overlap([shard(made)], [tmp_path / "t_val_000000.bin"])  # nothing beside these shards says what begins a document


def test_inspect_as_a_command_refuses_what_it_would_misread(made, tmp_path):
    for split in ("train", "val"):
        (tmp_path / f"t_{split}_000000.bin").write_bytes(shard(made, split).read_bytes())
    done = golfnb("data", "inspect", tmp_path, cwd=tmp_path)
    assert done.returncode == 2 and one_sentence(done.stderr) and "must begin with token 1" in done.stderr
    done = golfnb("data", "inspect", tmp_path, "--tokenizer", made / "m.model", cwd=tmp_path)
    assert done.returncode == 0 and "validation text in these training shards: 0 of" in done.stdout, done.stderr


def test_a_later_shard_may_go_on(tmp_path):
    for i, tokens in enumerate(([2, 5, 6], [7, 2, 8])):
        write_shard(tmp_path / f"a_train_{i:06d}.bin", tokens)
    paths = sorted(tmp_path.glob("*.bin"))
    check_marks(paths, 2)
    with pytest.raises(GolfError, match="must begin with token 1"):
        check_marks(paths, 1)


def test_recut_takes_the_manifests(made, tmp_path):
    for facts in recut_shards(shard(made), tmp_path / "less", 3):
        assert np.fromfile(tmp_path / "less" / facts["name"], "<u2")[512] == 2


def test_adapters_see_each_document(made, sp):
    tokens = np.fromfile(shard(made, "val"), "<u2")[512:]
    stream = torch.from_numpy(tokens.astype(np.int64))
    wanted = int((stream == 2).sum())
    assert len(document_spans(stream, byte_table(sp).bos)) == wanted > 1
    with pytest.raises(TypeError):
        document_spans(stream)  # nothing stands for what was not said


def test_packed_rows_begin_with_it(made):
    sampler = PackedSampler([shard(made)], 0, 1, 4, 64, seed=1, bos=2)
    for _ in range(3):
        assert (next(sampler)[:, 0] == 2).all()
    assert index_documents(np.array([2, 9, 2, 8, 8], np.uint16), 2)[0].tolist() == [1, 3]


def test_play_and_sample_begin_with_it(sp):
    player = SimpleNamespace(sp=sp)
    assert Player.encode(player, "Return")[0] == 2 and Player.shown(player, 2) == "⟨end of document⟩"
    assert prompt_of(sp, [9, 2, 30, 31, 32, 33, 2, 40]) == [2, 30, 31] and prompt_of(sp, [30])[0] == 2
    assert split_documents(sp, [30, 2, 31, 3]) == [[30], [31]]


def test_a_model_that_cuts_at_the_published_mark_refuses_another():
    run = SimpleNamespace(settings=None, ranks=None, table=SimpleNamespace(bos=2))
    with pytest.raises(GolfError, match="must begin with token 1, found 2"):
        pr2135.data(run)

"""A run with somebody else's tokenizer, whose BOS is 2 and which folds characters and squeezes spaces: every score says what text it is of, and adapters begin anew with every document."""
import io
import json
import math
import re
import shutil

import pytest
import sentencepiece as spm
import torch
from tiny import TINY, golfnb, one_sentence, run_quietly

from golfnb.score.adapters import AdapterSettings, score_documents
from golfnb.file.artifact import load_model
from golfnb.text.bpb import byte_table, load_tokenizer, target_bytes
from golfnb.model.golf import named_state
from golfnb.model.engine import Ranks
from golfnb.text.shards import val_tokens
from golfnb.tools.data import build_shards, stdlib_documents
from golfnb.tools.programs import recipe_program

WORDS = {"EVAL_SEQ_LEN": 64, "EVAL_STRIDE": 32, "VAL_BATCH_SIZE": 65536, "TTT_CHUNK_SIZE": 16, "TTT_BATCH_SIZE": 16, "TTT_LORA_RANK": 4, "TTT_LORA_LR": 0.05}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    "Tokenizer, shards, and a run on them."
    root, model = tmp_path_factory.mktemp("run"), io.BytesIO()
    texts = stdlib_documents(["json", "csv", "email"])[:60]
    lines = [line for text in texts for line in text.split("\n") if line.strip()]
    spm.SentencePieceTrainer.train(sentence_iterator=iter(lines), model_writer=model, vocab_size=400, model_type="bpe", byte_fallback=True, pad_id=0, unk_id=1, bos_id=2, eos_id=3, num_threads=1, minloglevel=2)
    (root / "tokenizer.model").write_bytes(model.getvalue())
    build_shards(texts, root / "tokenizer.model", root / "data", val_fraction=0.1, name="t")
    run_quietly(recipe_program("demo"), TINY | {"DATA_PATH": str(root / "data"), "TOKENIZER_PATH": str(root / "tokenizer.model"), "RUNS_DIR": str(root / "runs"), "RUN_ID": "a", "TTT_ENABLED": "0"})
    return root


def note_of(root) -> str:
    made = json.loads((root / "data/manifest.json").read_text())["val"]
    assert made["counted_bytes"] < made["text_bytes"]
    return f"bits per byte are counted on {made['counted_bytes']:,} bytes; the validation text has {made['text_bytes']:,}, which the tokenizer's normalisation changes"


def adapters_by_hand(root, bos: int) -> float:
    "Bits per byte of adapters that begin anew at each `bos`."
    golf, _, _ = load_model(root / "runs/a/artifact.golf", tokenizer_path=root / "tokenizer.model", dtype=torch.float32)
    table = byte_table(load_tokenizer(root / "tokenizer.model"))
    table.bos = bos
    tokens = torch.from_numpy(val_tokens(root / "data/t_val_*.bin", 64, 400).astype("int64"))
    cfg = AdapterSettings(compile="0", **{name.lower(): value for name, value in WORDS.items()})
    loss, bpb, _ = score_documents(golf, named_state(golf), tokens, table, cfg, Ranks())
    n_bytes = int(target_bytes(table, tokens[:-1], tokens[1:]).sum())
    assert bpb == pytest.approx(loss * (tokens.numel() - 1) / math.log(2) / n_bytes)
    return bpb


def scored(done) -> float:
    assert done.returncode == 0, done.stderr
    return float(re.search(r"^legal_ttt_exact val_loss:\S+ val_bpb:(\S+)", done.stdout, re.M)[1])


def test_the_score_says_what_text_it_is_of(root, tmp_path):
    run, note = root / "runs/a", note_of(root)
    assert f"note: {note}" in (run / "train.log").read_text()
    assert json.loads((run / "summary.json").read_text())["data_notes"] == [f"note: {note}"]
    done = golfnb("score", run, "EVAL_STRIDE=64", cwd=tmp_path)
    assert done.returncode == 0 and f"\nnote: {note}\n" in done.stdout, done.stderr
    assert golfnb("report", run, cwd=tmp_path).returncode == 0
    assert note.replace("'", "&#x27;") in (run / "report.html").read_text()


def test_nothing_is_said_where_the_bytes_are_those_of_the_text(root, tmp_path):
    "Of shards without a manifest, as published ones are, nothing is known."
    shutil.copytree(root / "data", tmp_path / "data")
    (tmp_path / "data/manifest.json").unlink()
    done = golfnb("score", root / "runs/a", "--val", "data/*_val_*.bin", "EVAL_STRIDE=64", cwd=tmp_path)
    assert done.returncode == 0 and "counted on" not in done.stdout


def test_adapters_begin_anew_with_each_document(root, tmp_path):
    "By the run, and by its file alone; a shard whose documents begin with another token is refused."
    wanted, leaky = (adapters_by_hand(root, bos) for bos in (2, 1))
    assert abs(wanted - leaky) > 0.01, "one long document would score otherwise"
    words = ["--adapters", *(f"{name}={value}" for name, value in WORDS.items())]
    assert scored(golfnb("score", root / "runs/a", *words, cwd=tmp_path)) == pytest.approx(wanted, abs=1e-6)
    shutil.copy(root / "runs/a/artifact.golf", tmp_path / "lone.golf")
    words += ["--val", root / "data/t_val_*.bin", "--tokenizer", root / "tokenizer.model"]
    assert scored(golfnb("score", "lone.golf", *words, cwd=tmp_path)) == pytest.approx(wanted, abs=1e-6)
    tokens = val_tokens(root / "data/t_val_*.bin", 64, 400)
    from golfnb.text.shards import write_shard
    write_shard(tmp_path / "cut_val_000000.bin", tokens[5:])
    words[words.index("--val") + 1] = "cut_val_*.bin"
    done = golfnb("score", "lone.golf", *words, cwd=tmp_path)
    assert done.returncode == 2 and one_sentence(done.stderr) and "must begin with token 2" in done.stderr, done.stderr

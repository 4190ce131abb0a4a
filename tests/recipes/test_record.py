"""Recipe record: it trains and packs as pr2135, and scores with adapters for each document; killed in either it goes on to the same score, which three ranks find too."""
import inspect
import re
from dataclasses import fields

import pytest
import torch
from test_pr2135 import life, tiny
from tiny import ADAPTERS, forked_words

from golfnb.model import frontier
from golfnb.model.golf import init_model, load_named, named_state
from golfnb.model.layers import softcap_loss
from golfnb.model.layout import mlp_in_one_bank
from golfnb.recipes import pr2135, record
from golfnb.score.adapters import AdapterSettings
from golfnb.score.ttt import TttSettings
from golfnb.settings import GolfError, read_settings
from golfnb.tools.cli import main_cli
from golfnb.tools.guard import bytes_needed
from golfnb.tools.report import run_table
from golfnb.tools.submission import read_log


def settings_of(**given):
    return read_settings(record.Settings, record.OWN, given)


def test_it_trains_and_packs_as_pr2135():
    ours, theirs = settings_of(), read_settings(pr2135.Settings, pr2135.OWN, {})
    own = {spec.name for spec in fields(AdapterSettings)}
    both = {spec.name for spec in fields(ours)} & {spec.name for spec in fields(theirs)}
    assert {spec.name for spec in fields(ours)} - both <= own and {spec.name for spec in fields(theirs)} - both <= {spec.name for spec in fields(TttSettings)}
    assert {name for name in both if getattr(ours, name) != getattr(theirs, name)} == {"recipe", "eval_stride"}
    assert inspect.getsource(record.build).replace("growing_loss", "stream_loss") == inspect.getsource(pr2135.build)
    for name in ("Parts", "order", "data", "step", "LongAtLast", "pack", "document_score", "main"):
        assert inspect.getsource(getattr(record, name)) == inspect.getsource(getattr(pr2135, name)), name
    for world in (1, 2, 4, 8):
        ours.check(world)
    assert ours.tokens_adapted(8) == ours.ttt_batch_size * ours.ttt_chunk_size


def test_documents_are_longer_once_blocks_run_again():
    s = settings_of(MODEL_DIM="32", NUM_LAYERS="2", NUM_HEADS="2", NUM_KV_HEADS="1", ROPE_DIMS="4", VOCAB_SIZE="64", LOOP_START="0", LOOP_END="0", PARALLEL_START_LAYER="1")
    g = torch.Generator().manual_seed(3)
    model = frontier.Frontier(s, mlp_in_one_bank(s, 1))
    init_model(model, s, 1, frontier.frontier_draws)
    load_named(model, {name: w + 0.1 * torch.randn(w.shape, generator=g) for name, w in named_state(model).items()})
    ids, targets = torch.randint(4, 64, (2, 1, 2100), generator=g)
    loss = record.growing_loss(model, model.cap, softcap_loss)
    for order, longest in ((tuple(range(2)), 1024), (frontier.long_order(s), 3072)):
        model.order = order
        with torch.no_grad():
            logits = model(ids.view(1, -1), longest=longest)
            assert torch.equal(loss(ids, targets), softcap_loss(logits, targets.view(1, -1), model.cap))
            assert not torch.equal(logits, model(ids.view(1, -1), longest=2048)), "as pr2135 cuts them"


@pytest.mark.parametrize("wrong", [{"TTT_CHUNK_SIZE": "2000"}, {"TTT_FORM": "chunks"}, {"EVAL_SEQ_LEN": "2048"}])
def test_numbers_that_cannot_be_are_refused(wrong):
    "The last leaves a stride that is longer than a row."
    with pytest.raises(GolfError, match=[*wrong][0]):
        settings_of(**wrong).check(1)


def test_memory_counts_what_adapts_at_once():
    many = settings_of(TTT_BATCH_SIZE="65536")
    assert bytes_needed(many, 8, 2) > 10 * bytes_needed(settings_of(TTT_ENABLED="0", TTT_BATCH_SIZE="65536"), 8, 2)


def test_a_killed_run_ends_with_the_same_score_on_any_number_of_ranks(tmp_path, monkeypatch, capfd):
    "Killed while blocks run again, and while documents adapt. One document at a time on each rank, so that ranks compute alike."
    given = tiny(tmp_path) | ADAPTERS | {"RECIPE": "record", "CHECKPOINT_EVERY_S": "0.001", "VAL_LOSS_EVERY": "0", "TTT_BATCH_SIZE": "1"}
    whole, _ = life(record, given, 0, monkeypatch, RUN_ID="whole")
    life(record, given, 6, monkeypatch, RUN_ID="killed")

    def killed(*args, **options):
        raise InterruptedError

    with monkeypatch.context() as patched:
        patched.setattr(record, "ADAPT", killed)
        life(record, given, 0, monkeypatch, RUN_ID="killed", RESUME="1")
    again, orders = life(record, given, 0, monkeypatch, RUN_ID="killed", RESUME="1")
    assert orders == [], "training was over"
    for key in ("losses", "ema_loss", "documents_loss", "int6_loss", "sliding_loss", "file_documents_loss", "ttt_loss", "artifact_sha256"):
        assert again.summary[key] == whole.summary[key], key
    assert whole.summary["ttt_loss"] < whole.summary["file_documents_loss"] - 0.05, "they learn"
    assert abs(whole.summary["file_documents_loss"] - whole.summary["documents_loss"]) < 0.01, "the file is near the averaged weights"
    log = read_log((whole.folder / "train.log").read_text())
    assert log.label == "legal_ttt" and log.val_bpb == pytest.approx(whole.summary["ttt_bpb"], abs=1e-8)
    stages = run_table(whole.summary).split("\n\n")[0].splitlines()
    assert "artifact, by documents" in stages[-3] and "TTT" in stages[-1]
    assert main_cli(["score", str(whole.folder), "--ttt"]) == 0
    alone = capfd.readouterr().out
    ranked = forked_words(["-m", "golfnb.tools.cli", "score", whole.folder, "--ttt"], 3, {}, tmp_path)
    assert ranked.returncode == 0, ranked.stderr[-2000:]
    expected = f"legal_ttt_exact val_loss:{whole.summary['ttt_loss']:.8f} val_bpb:{whole.summary['ttt_bpb']:.8f}"
    for said in (alone, ranked.stdout):
        assert re.findall(r"^legal_ttt_exact.*$", said, re.M) == [expected], said

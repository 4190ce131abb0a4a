"""What a library user writes: every part is built from its own group of settings, without a training configuration."""
import sys
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from golfnb.score.adapters import AdapterSettings, score_documents
from golfnb.file.artifact import Zlib, load_artifact, save_artifact
from golfnb.run.average import AveragingSettings, Ema
from golfnb.text.bpb import ByteTable
from golfnb.score.evaluate import EvalSettings, sliding_loss
from golfnb.model.layout import LayoutSettings, bank_per_shape, matrix_names
from golfnb.text.loader import CoprimeSampler, Loader, LoaderSettings, grad_accum
from golfnb.model.golf import Golf, ModelSettings, init_model, load_named, named_state
from golfnb.model.engine import AdamW, ClipEach, ClipMean, Engine, Muon, Ranks
from golfnb.file.quantize import Nearest, dequantize_state, fit_state, quantize_state
from golfnb.text.shards import write_shard
from golfnb.file.grid import GridProjector
from golfnb.run.train import Trainer, TrainSettings, train, training_loss
from golfnb.score.ttt import TttSettings, score_first
from workers import train_with

SHAPE = ModelSettings(num_layers=2, model_dim=32, num_heads=2, num_kv_heads=1, vocab_size=32, rope_dims=8, ve_enabled=False,
                      bigram_vocab_size=0, xsa_last_n=1, train_seq_len=16, small_tensor=256)
WORDS = torch.tensor([1, 5, 9, 13, 2, 7, 3])  # token 1 begins a document
TOKENS = WORDS.repeat(40)


def a_model() -> Golf:
    model = Golf(SHAPE, bank_per_shape(SHAPE, 1))
    init_model(model, SHAPE, seed=0)
    return model


def an_engine(model: Golf, rule=None, clip=None) -> Engine:
    return Engine(model.role_params(), model.layout, Ranks(), rule or Muon(), AdamW(), clip or ClipEach(0.3))


@pytest.fixture
def batches(tmp_path):
    path = tmp_path / "fineweb_train_000000.bin"
    write_shard(path, np.tile(WORDS.numpy().astype(np.uint16), 1000))
    cfg = LoaderSettings(train_batch_tokens=1024)
    sampler = CoprimeSampler([path], 0, 1, cfg.rows_per_micro(1, 16), 16, cfg.seed, grad_accum(1))
    with Loader(sampler, "cpu", vocab_size=32) as loader:
        yield loader


@pytest.fixture(scope="module")
def byte_each():
    none = torch.zeros(32, dtype=torch.bool)
    return ByteTable(torch.ones(32, dtype=torch.int16), none, none)


def test_layout():
    layout = bank_per_shape(LayoutSettings(num_layers=2, model_dim=32, num_heads=2, num_kv_heads=1), 4)
    assert len(matrix_names(layout)) == 12 and all(bank.shape[0] % 4 == 0 for bank in layout.banks)


def test_model():
    assert a_model()(torch.zeros(3, 16, dtype=torch.int64)).shape == (3, 16, 32)


def test_loader(batches):
    batch = next(batches)
    assert batch.ids.shape == (8, 16) and torch.equal(batch.ids[:, 1:], batch.targets[:, :-1])


def test_engine(batches):
    model = a_model()
    engine, losses = an_engine(model, Muon(0.05), ClipMean(0.3)), []
    for batch, _ in zip(batches, range(12)):
        loss = training_loss(model, model.cap)(batch.ids, batch.targets)
        loss.backward()
        engine.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]


def test_training(batches):
    model = a_model()
    engine = an_engine(model)
    cfg = TrainSettings(iterations=10, warmdown_iters=5, max_wallclock_seconds=0, late_qat_threshold=0.9)
    rounding = partial(GridProjector, floor=False)
    trainer = Trainer(cfg, engine, batches, Ema(engine.tensors()), make_projector=rounding)
    done = train_with(training_loss(model, model.cap), trainer)
    assert done.losses[-1] < done.losses[0] and 5 < done.rounded_from < 10 and len(done.average.weights()) == len(engine.tensors())


def test_late_rounding_stays_on_when_the_rate_rises_again(batches):
    engine = an_engine(a_model())
    cfg = TrainSettings(iterations=10, warmdown_iters=5, max_wallclock_seconds=0, late_qat_threshold=0.5)
    trainer = Trainer(cfg, engine, batches, Ema(engine.tensors()), make_projector=partial(GridProjector, floor=False))
    found = []
    for trainer.late_rate in (1.0, 0.4, 0.9):
        found.append(trainer.projector())
    assert found[0] is None and found[1] is not None and found[2] is found[1]
    assert "stays" in (Trainer.projector.__doc__ or "")


def test_averages_and_grid():
    model = a_model()
    engine, decay = an_engine(model), AveragingSettings(ema_decay=0.5).ema_decay
    average, project = Ema(engine.tensors(), decay), GridProjector(engine, floor=False)
    average.update(engine.tensors(), 0, 1.0)
    assert all(torch.equal(a, b) for a, b in zip(average.weights(), engine.tensors()))
    moved = [(project(name, bank.fp32_shard) - bank.fp32_shard).abs().max() for name, bank in engine.banks.items()]
    assert 0 < max(moved) < 0.05


def test_quantizer_and_container(tmp_path):
    model = a_model()
    named = named_state(model)
    nearest = quantize_state(named, scale_floor=False, small=SHAPE.small_tensor)
    packed = fit_state(nearest, named, 1 << 20, lambda packed: sum(p.data.nbytes for p in packed.values()), Nearest())
    save_artifact(tmp_path / "a.golf", packed, {"settings": {}}, Zlib())
    state = dequantize_state(load_artifact(tmp_path / "a.golf")[1])
    load_named(model, state)
    assert any(p.kind == "int6" for p in packed.values()) and all((state[n] - named[n]).abs().max() < 0.2 for n in named)


def test_validation(byte_each):
    cfg, model = EvalSettings(eval_seq_len=16, eval_stride=4, val_batch_size=1024), a_model()
    loss, bpb = sliding_loss(model, TOKENS, byte_each, cfg.eval_seq_len, cfg.eval_stride, cfg.rows_per_score(1), Ranks())
    assert loss == pytest.approx(np.log(32), rel=0.05) and bpb == pytest.approx(loss / np.log(2))


def test_test_time_training(byte_each):
    cfg = TttSettings(eval_seq_len=16, eval_stride=8, val_batch_size=1024, ttt_chunk_tokens=64, ttt_batch_seqs=4)
    still, learning = (score_first(a_model(), named_state(a_model()), TOKENS, byte_each, replace(cfg, ttt_lr=lr), Ranks())[0] for lr in (0.0, 0.1))
    assert learning < still


def test_adapters(byte_each):
    cfg = AdapterSettings(eval_seq_len=16, eval_stride=8, val_batch_size=1024, ttt_chunk_size=4, ttt_batch_size=4, ttt_lora_rank=4)
    loss, bpb, ledger = score_documents(a_model(), named_state(a_model()), TOKENS, byte_each, cfg, Ranks())
    assert loss > 0 and bpb == pytest.approx(loss / np.log(2)) and len(ledger.history) > 1


def test_no_part_looks_ahead_to_the_whole():
    for part in (Golf, Loader, Engine, Ema, GridProjector, train, fit_state, save_artifact, sliding_loss, score_first, score_documents):
        seen = {getattr(value, "__module__", "") or "" for value in vars(sys.modules[part.__module__]).values()}
        assert not [name for name in seen if name.startswith(("golfnb.run.run", "golfnb.recipes", "golfnb.tools"))]

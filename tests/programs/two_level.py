"""Recipe pr549 over several machines: each has all banks, and their gradients are averaged at the end."""


from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from golfnb.file.artifact import ArtifactSettings, Lzma, unpack_bytes
from golfnb.run.average import Ema
from golfnb.model.kernels import fuse
from golfnb.model.layout import bank_per_shape
from golfnb.text.loader import Loader, LoaderSettings, SequentialSampler, grad_accum
from golfnb.model.golf import Golf, ModelSettings, WeightedSkips, init_model, load_named
from golfnb.muon.jit import usable_kernels
from golfnb.muon.newton_schulz import quintic
from golfnb.model.engine import (AdamW, ClipEach, Engine, EngineSettings, Muon, Ranks,
                                  inside_node)
from golfnb.file.quantize import dequantize_state, quantize_state
from golfnb.run.run import (Run, RunSettings, make_backward, make_forward, train_and_average,
                        weight_dtype)
from golfnb.run.train import Trainer, TrainSettings, lr_schedule, micro_batches, momentum_schedule
from golfnb.score.ttt import TttSettings, score_first


@dataclass
class Settings(RunSettings, LoaderSettings, ModelSettings, EngineSettings, TrainSettings,
               ArtifactSettings, TttSettings):
    "Every number of this recipe: each group's defaults are its own."


OWN = dict(recipe="two_level")
CODEC = Lzma()
ADAPT = score_first  # test-time training


@dataclass
class Parts:
    "What a run, a score or a study needs of this recipe."
    model: Golf
    inside: Ranks       # the ranks of this machine, which share the banks
    engine: Engine
    backward: Callable  # (ids, targets, accum): the gradients of a micro-batch
    forward: Callable   # (ids, last_n): logits
    make_average: Callable  # (tensors): an average that begins with these weights


def build(s: Settings, ranks: Ranks, banks=bank_per_shape, clip=ClipEach, orthogonalize=quintic,
          skips=WeightedSkips) -> Parts:
    "The model, what trains it, and what runs it; a study gives another part in place of ours."
    inside = inside_node(ranks)
    layout = banks(s, inside.world)
    dtype = weight_dtype(s, ranks.device)
    model = Golf(s, layout, dtype, ranks.device, s.attention, skips())
    fuse(model, usable_kernels(ranks.device, dtype))
    init_model(model, s, s.seed)
    matrices = Muon(s.matrix_lr, s.muon_wd, orthogonalize, s.muon_backend_steps)
    rest = AdamW(s.scalar_lr, s.tied_embed_lr, s.adam_wd, (s.beta1, s.beta2), s.adam_eps)
    engine = Engine(model.role_params(), layout, ranks, matrices, rest, clip(s.grad_clip_norm),
                    inside)
    backward = make_backward(model, s, ranks.device)
    forward = make_forward(model, s, ranks.device)
    return Parts(model, inside, engine, backward, forward, partial(Ema, decay=s.ema_decay))


def data(run: Run) -> Loader:
    "Batches in the published order: each rank reads the joined shards from places of its own."
    s, ranks = run.settings, run.ranks
    rows = s.rows_per_micro(ranks.world, s.train_seq_len)
    windows = SequentialSampler(run.train_paths, ranks.rank, ranks.world, rows, s.train_seq_len,
                                grad_accum(ranks.world), spans=8)
    return Loader(windows, ranks.device, s.vocab_size)


def step(p: Parts, t: Trainer):
    "One step of training."
    elapsed, stop = t.clock()
    loss = micro_batches(p.backward, t.batches, t.engine, t.accum)
    control = t.launch(loss, elapsed, stop)  # time and stop travel with the gradients
    rate = lr_schedule(t.settings, t.steps, control[0])
    t.engine.finish(rate, momentum_schedule(t.settings, t.steps), t.projector())
    t.average.update(t.engine.tensors(), t.steps, rate)
    t.push(control, loss)  # read two steps later, without waiting for the device


def pack(run: Run, p: Parts, averaged: dict) -> bytes:
    "Round to int6 on the published grid and write the artifact; returns the file's bytes."
    small = run.settings.small_tensor
    with run.phase("packing"):
        packed = quantize_state(averaged, scale_floor=True, small=small, log=run.log)
        return run.share_artifact(packed, p.model, CODEC)


def score(run: Run, p: Parts, artifact: bytes):
    "Score the bytes of the file, then train the model on what was scored, and score on."
    s = run.settings
    state = dequantize_state(unpack_bytes(artifact, CODEC)[1])
    load_named(p.model, state)

    def adapting():
        return ADAPT(p.model, state, run.val, run.table, s, run.ranks, p.forward, log=run.log,
                     inside=p.inside)

    with run.phase("scoring"):
        run.score_artifact(p.forward)
    if s.ttt_enabled:
        with run.phase("adapting"):
            run.scored("legal_ttt", "ttt", adapting)


def main(run: Run) -> dict:
    "The run, stage by stage; returns its summary."
    run.begin()
    with run.phase("building"):
        p = build(run.settings, run.ranks)
    averaged = train_and_average(run, p, data(run), step)
    artifact = run.once("packed", lambda: pack(run, p, averaged))
    score(run, p, artifact)
    return run.finish()

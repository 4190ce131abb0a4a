"""Recipe golf with GPTQ, and test-time training by adapters for each document."""


from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from golfnb.score.adapters import AdapterSettings, adapter_rules, score_documents
from golfnb.file.artifact import ArtifactSettings, Best, unpack_bytes
from golfnb.run.average import Ema
from golfnb.file.grid import GridProjector
from golfnb.model.kernels import fuse
from golfnb.model.layout import mlp_in_one_bank
from golfnb.text.loader import CoprimeSampler, Loader, LoaderSettings, grad_accum
from golfnb.model.golf import Golf, ModelSettings, SigmoidSkips, init_model, load_named
from golfnb.muon.jit import usable_kernels
from golfnb.muon.newton_schulz import quintic
from golfnb.model.engine import AdamW, ClipMean, Engine, EngineSettings, Muon, Ranks
from golfnb.file.quantize import (Gptq, QuantSettings, dequantize_state, int6_matrices, quantize_state,
                             shared_out)
from golfnb.run.run import (Run, RunSettings, cap_before_gptq, fit_to_budget, hessians_in_time,
                        make_backward, make_forward, reserve_rules, train_and_average,
                        weight_dtype)
from golfnb.run.train import Trainer, TrainSettings, lr_schedule, micro_batches, momentum_schedule
from golfnb.score.ttt import TttSettings


@dataclass
class Settings(RunSettings, LoaderSettings, ModelSettings, EngineSettings, TrainSettings,
               QuantSettings, ArtifactSettings, TttSettings, AdapterSettings):
    "Every number of this recipe."

    @property
    def train_cap_ms(self) -> float:
        "Milliseconds of training after which the run stops; 0: no cap."
        return cap_before_gptq(self)

    def tokens_adapted(self, world: int) -> int:
        "Tokens of a rank in one update of test-time training; adapters take few."
        return 0

    def rules(self):
        "What must hold between the numbers."
        yield from super().rules()
        yield from adapter_rules(self)
        yield from reserve_rules(self)


OWN = dict(recipe="golf", bigram_vocab_size=2816, bigram_dim=112, xsa_last_n=11)
CODEC = Best()
PROJECTOR = partial(GridProjector, floor=False)  # what rounds the weights of late steps


@dataclass
class Parts:
    "What a run, a score or a study needs of this recipe."
    model: Golf
    engine: Engine
    backward: Callable  # (ids, targets, accum): the gradients of a micro-batch
    forward: Callable   # (ids, last_n): logits
    make_average: Callable  # (tensors): an average that begins with these weights


def build(s: Settings, ranks: Ranks, banks=mlp_in_one_bank, clip=ClipMean, orthogonalize=quintic,
          skips=SigmoidSkips) -> Parts:
    "The model, what trains it, and what runs it; a study gives another part in place of ours."
    layout = banks(s, ranks.world)
    dtype = weight_dtype(s, ranks.device)
    model = Golf(s, layout, dtype, ranks.device, s.attention, skips())
    fuse(model, usable_kernels(ranks.device, dtype))
    init_model(model, s, s.seed)
    matrices = Muon(s.matrix_lr, s.muon_wd, orthogonalize, s.muon_backend_steps)
    rest = AdamW(s.scalar_lr, s.tied_embed_lr, s.adam_wd, (s.beta1, s.beta2), s.adam_eps)
    engine = Engine(model.role_params(), layout, ranks, matrices, rest, clip(s.grad_clip_norm))
    backward = make_backward(model, s, ranks.device)
    forward = make_forward(model, s, ranks.device)
    return Parts(model, engine, backward, forward, partial(Ema, decay=s.ema_decay))


def order(run: Run) -> CoprimeSampler:
    "Windows from many shards, each block of a shard once a pass."
    s, ranks = run.settings, run.ranks
    rows = s.rows_per_micro(ranks.world, s.train_seq_len)
    return CoprimeSampler(run.train_paths, ranks.rank, ranks.world, rows, s.train_seq_len,
                          s.seed, grad_accum(ranks.world))


def data(run: Run) -> Loader:
    "Batches in that order."
    return Loader(order(run), run.ranks.device, run.settings.vocab_size)


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
    "Round by GPTQ to the finest int6 grid that fits and write the artifact; returns the bytes."
    small = run.settings.small_tensor
    with run.phase("packing"):
        int6 = Gptq(hessians_in_time(run, p.model, order(run)), scale_floor=False)
        packed = quantize_state(averaged, scale_floor=False, small=small, log=run.log)
        matrices = int6_matrices(packed, averaged)
        packed |= shared_out(matrices, int6, run.ranks, run.log)
        packed = fit_to_budget(run, packed, averaged, p.model, int6, CODEC)
        return run.share_artifact(packed, p.model, CODEC)


def score(run: Run, p: Parts, artifact: bytes):
    "Score the bytes of the file, then again while each document trains adapters of its own."
    s = run.settings
    state = dequantize_state(unpack_bytes(artifact, CODEC)[1])
    load_named(p.model, state)

    def adapting():
        return score_documents(p.model, state, run.val, run.table, s, run.ranks, log=run.log)

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
    averaged = train_and_average(run, p, data(run), step, PROJECTOR)
    artifact = run.once("packed", lambda: pack(run, p, averaged))
    score(run, p, artifact)
    return run.finish()

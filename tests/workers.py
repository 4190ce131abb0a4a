"""Functions that run in spawned ranks. `spawn(world, name)` starts `world` gloo processes, each calling the named function
with its Ranks, and returns their results in rank order; a rank that fails fails the call with its own words."""
import ctypes
import os
import pickle
import socket
import tempfile
import time
import traceback
from datetime import timedelta
from functools import partial
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from forked import fork_processes

from golfnb.model.banks import unbank
from golfnb.studies.baselines import plan_model
from golfnb.studies.buckets import bucket_engine
from golfnb.studies.variants import AVERAGES, Variant, read_variant
from golfnb.settings import GolfError
from golfnb.model.layout import Matrix, bank_per_shape, group_matrices
from golfnb.text.loader import Batch
from golfnb.model.golf import named_state
from golfnb.model.engine import ClipEach, ClipMean, Engine, NoClip, Ranks, Sgd, start_ranks, stop_ranks
from golfnb.recipes import pr549
from golfnb.tools.guard import LOST_RANK_WORDS
from golfnb.file.grid import GridProjector
from golfnb.run.train import Trainer, backward_pass, train, training_loss

PROGRAMS = Path(__file__).resolve().parent / "programs"
DTYPES = {torch.float64: "fp64", torch.float32: "fp32", torch.bfloat16: "bf16"}
ROWS, SEQ = 24, 16
TINY = dict(MODEL_DIM="16", NUM_HEADS="2", NUM_KV_HEADS="1", VOCAB_SIZE="32", ROPE_DIMS="4", BIGRAM_VOCAB_SIZE="24", BIGRAM_DIM="6", VE_DIM="6",
            TRAIN_SEQ_LEN=str(SEQ), TRAIN_BATCH_TOKENS=str(ROWS * SEQ), WARMUP_STEPS="0", MAX_WALLCLOCK_SECONDS="0", WARMDOWN_ITERS="3", ITERATIONS="5",
            CLIP="global", EMA_DECAY="0.5", MUON_MOMENTUM_WARMUP_STEPS="4")


def settings(layers: int, **more) -> dict:
    return {**TINY, "NUM_LAYERS": str(layers), "VE_LAYERS": str(layers - 1), "XSA_LAST_N": "1", **more}


def entry(rank: int, world: int, port: int, module: str, name: str, args: tuple, folder: str, timeout_s: float):
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    try:
        ranks = start_ranks(timeout_s=timeout_s)
        out = ("ok", getattr(import_module(module), name)(ranks, *args))
        stop_ranks(ranks)
    except BaseException:
        out = ("failed", traceback.format_exc())
    with open(Path(folder) / f"{rank}.pkl", "wb") as f:
        pickle.dump(out, f)


def enter_node(node: str):
    "Move this process, and those that it will start, to a node."
    with open(f"/var/run/netns/{node}") as place:
        assert ctypes.CDLL(None).setns(place.fileno(), 0x40000000) == 0, "setns"  # CLONE_NEWNET


def spawn(world: int, name: str, *args, module: str = "workers", timeout_s: float = 600.0) -> list:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        fork_processes(entry, (world, port, module, name, args, folder, timeout_s), world)
        outs = [pickle.loads((Path(folder) / f"{r}.pkl").read_bytes()) for r in range(world)]
    for r, (state, value) in enumerate(outs):
        assert state == "ok", f"rank {r} of {world}:\n{value}"
    return [value for _, value in outs]


class Batches:
    "The same global batch at every world size: rank r of w takes every w-th micro-batch's rows r*n..(r+1)*n."

    def __init__(self, variant, ranks, accum: int = 1):
        self.ranks, self.accum, self.vocab, self.at = ranks, accum, variant.settings.vocab_size, 0

    def state(self):
        return self.at

    def rewind(self, at):
        self.at = at

    def next(self):
        g = torch.Generator().manual_seed(self.at // self.accum)
        rows = torch.randint(self.vocab, (ROWS, SEQ + 1), generator=g)
        n = ROWS // (self.ranks.world * self.accum)
        first = (self.at % self.accum * self.ranks.world + self.ranks.rank) * n
        self.at += 1
        mine = rows[first:first + n]
        return mine[:, :-1], mine[:, 1:]

    def __next__(self):
        return Batch(*self.next())


def variant_of(env: dict, dtype=torch.float64, seed: int = 5) -> Variant:
    "pr549 with the parts and numbers of `env`; what none of them does is another program's, with pr549's parts."
    recipe = {}
    if env.get("LINKS") == "two_level":
        recipe = {"RECIPE": str(PROGRAMS / "two_level.py")}
    if env.get("SCALE_FLOOR") == "0":
        recipe = {"RECIPE": "golf", "PLAN": "pr399", "SKIP_GATE": "one", "QAT_BANKS": "0"}
    return read_variant({"WEIGHT_DTYPE": DTYPES[dtype], "SEED": str(seed), **recipe, **env})


def machine(env: dict, ranks, dtype=torch.float64, debug=False, plan=""):
    "What `env` asks for, its model and its engine; with a `plan` that `plan_model` reads, banks and orders are that plan's."
    variant = variant_of(env, dtype)
    if plan:
        model, orders = plan_model(variant, plan, ranks, ranks.world)
        engine = bucket_engine(model, orders, variant.settings, ranks, variant.part("clip"), variant.part("orthogonalize"))
    else:
        built = variant.build(ranks)
        model, engine = built.model, built.engine
    if debug:
        fence(engine)
    return variant, model, engine


def speedrun_kinds(width: int = 768, layers: int = 11, attention: int = 10) -> dict[str, list[tuple]]:
    "The slots of modded-nanogpt #132's model by kind, as chapter 34 writes them."
    def each(name, n, rows, cols, transposed=False):
        return [(Matrix(f"blocks.{i}.{name}", rows, cols, "", transposed),) for i in range(n)]

    wide, squares = 4 * width, zip(*(each(f"attn.{x}", attention, width, width) for x in "qkvo"))
    return {"smear_gate": each("smear_gate", 1, 1, 12), "attn_gate": each("attn_gate", attention, 6, 12), "attn": [sum(slots, ()) for slots in squares],
            "mlp": each("mlp.fc", layers, wide, width) + each("mlp.proj", layers, width, wide, True)}


def fence(engine):
    "Replicas are NaN from here on between `launch` and `finish`: what reads them too early is noticed."
    launch = engine.launch

    def launch_and_blank(*args, **words):
        control = launch(*args, **words)
        for bank in engine.banks.values():
            bank.replica.data.fill_(float("nan"))
        return control

    engine.launch = launch_and_blank


def five_steps(ranks, env: dict, dtype=torch.float64, debug=False, accum: int = 1):
    "Weights by bank and parameter name after 5 steps, and the losses."
    variant, model, engine = machine(env, ranks, dtype, debug)
    loader, loss_fn, losses = Batches(variant, ranks, accum), training_loss(model, model.cap), []
    for step in range(5):
        total = 0
        for _ in range(accum):
            loss = loss_fn(*loader.next()) / accum
            loss.backward()
            if accum > 1:
                engine.accumulate()
            total = total + loss.detach()
        losses.append(engine.launch(loss=total)[2].item() / ranks.world)
        engine.finish(0.5 if step > 2 else 1.0, 0.9 + 0.02 * step)
    banks, others = engine.gather()
    real = {s.name: s.real for s in engine.layout.banks}
    named = {n: b[:real[n]].double().numpy() for n, b in banks.items()} | {n: t.double().numpy() for n, t in others.items()}
    replica = {n: b.replica.detach()[:real[n]].double().numpy() for n, b in engine.banks.items()}
    return named, replica, losses


def on_nodes(ranks, nodes: int, envs: list) -> list:
    "`five_steps` of each settings, as if every `world / nodes` ranks were a node."
    each = ranks.world // nodes
    os.environ["LOCAL_WORLD_SIZE"] = str(each)
    ranks.node, ranks.nodes, ranks.local = ranks.rank // each, nodes, ranks.rank % each
    return [five_steps(ranks, env) for env in envs]


def plan_steps(ranks, env: dict, plan: str) -> dict:
    """Weights by published name after 4 steps in fp64, in which two matrices and a scalar get no gradient:
    what must not depend on the plan or the number of ranks."""
    variant, model, engine = machine(env, ranks, plan=plan)
    loader, loss_fn, role = Batches(variant, ranks), training_loss(model, model.cap), model.role_params()["bank"]
    for step in range(4):
        loss_fn(*loader.next()).backward()
        grads = unbank(model.layout, {n: b.grad for n, b in role.items()})
        grads["blocks.0.attn.c_k.weight"].zero_(), grads["blocks.1.mlp.proj.weight"].zero_()
        model.smear_gate.grad = None
        engine.step(0.5 if step > 2 else 1.0, 0.9 + 0.02 * step)
    state = named_state(model, *engine.gather())
    assert all(torch.equal(t.bfloat16(), named_state(model)[n].bfloat16()) for n, t in state.items()), "the replica is what the masters say"
    return {n: t.numpy() for n, t in state.items()}


class ClipValue(NoClip):
    "A clip of somebody who has read `NoClip`: no entry of a rank's gradient above a limit in size."

    def __init__(self, limit: float):
        self.limit = limit

    def before_sending(self, engine, grads: dict) -> dict:
        grads = super().before_sending(engine, grads)
        for group in engine.groups:
            group.grad.clamp_(-self.limit, self.limit)
        return {name: g.clamp(-self.limit, self.limit) for name, g in grads.items()}


CLIPS = {"each": ClipEach, "mean": ClipMean, "value": ClipValue, "none": lambda limit: NoClip()}
CLIPPED_AT = 0.5  # of gradients whose entries are about 1


def clip_gradient(rank: int) -> torch.Tensor:
    "A rank's gradient: three matrices, and four numbers of a vector."
    draw = torch.Generator().manual_seed(rank)
    return torch.randn(16 * 3 + 4, generator=draw, dtype=torch.float64)


def clip_steps(ranks) -> dict:
    "What each clip makes of the ranks' gradients, as the step of an SGD of rate 1."
    layout = group_matrices([Matrix(f"w{i}", 4, 4, "bank") for i in range(3)], ranks.world)
    moved = {}
    for name, clip in CLIPS.items():
        bank = torch.nn.Parameter(torch.zeros(layout.banks[0].shape, dtype=torch.float64))
        small = torch.nn.Parameter(torch.zeros(4, dtype=torch.float64))
        roles = {"bank": {"bank": bank}, "scalar": {"small": small}}
        engine = Engine(roles, layout, ranks, Sgd(1.0), Sgd(1.0), clip(CLIPPED_AT))
        matrices, vector = clip_gradient(ranks.rank).split([16 * 3, 4])
        bank.grad = torch.zeros_like(bank)
        bank.grad[:3] = matrices.view(3, 4, 4)
        small.grad = vector.clone()
        engine.step(momentum=0.0)
        moved[name] = -torch.cat([bank.detach()[:3].flatten(), small.detach()])
    return moved


def projected(ranks, env: dict) -> dict:
    "Weights by published name after a step that published rounded masters."
    variant, model, engine = machine(env, ranks, torch.float32)
    training_loss(model, model.cap)(*Batches(variant, ranks).next()).backward()
    engine.launch()
    engine.finish(project=GridProjector(engine, floor=False))
    return {n: t.numpy() for n, t in named_state(model).items()}


def wrong_world(ranks, env: dict) -> str:
    "What an engine says to a plan for another number of ranks."
    variant = variant_of(env)

    def banks(s, world: int):
        return bank_per_shape(s, world + 1)

    try:
        variant.program.build(variant.settings, ranks, banks=banks)
    except GolfError as e:
        return str(e)


def ways(ranks, env: dict) -> float:
    "Largest difference, after 3 steps in fp64, between the engine and the same rule batched under DDP, with separate weights and with banks."
    from golfnb.studies.baselines import DdpRig
    from golfnb.studies.bench import Rig, bench_shards

    variant = variant_of({**env, "MUON_MOMENTUM_WARMUP_STEPS": "0", "AVERAGING": "none", "WARMDOWN_ITERS": "0", "LOADER": "sequential", "DATA_PATH": "absent"})
    with tempfile.TemporaryDirectory() as folder:
        paths, _ = bench_shards(variant.settings, Ranks(), folder)
        rigs = [Rig(variant, ranks, paths)] + [DdpRig(variant, p, ranks, paths, one_by_one=False) for p in ("pr125", "shared_mlp")]
        for rig in rigs:
            rig.warm(3)
            rig.loader.close()
    ours, *others = (named_state(rig.model if isinstance(rig, DdpRig) else rig.parts.model) for rig in rigs)
    return max(float((ours[n].double() - other[n].double()).abs().max()) for other in others for n in ours)


def train_with(loss_fn, trainer: Trainer, validate=None, extras=()) -> Trainer:
    "Train with a loss function to the end; the trainer."
    p = SimpleNamespace(backward=partial(backward_pass, loss_fn))
    return train(trainer, partial(pr549.step, p), validate, extras)


def trained(variant: Variant, loss_fn, batches, engine, validate=None, extras=(), **more) -> Trainer:
    "Train on batches with a loss function, as a run of the variant does; the trainer."
    average = AVERAGES[variant.word("AVERAGING")](variant.settings)(engine.tensors())
    t = Trainer(variant.settings, engine, batches, average, make_projector=variant.projector(), **more)
    return train_with(loss_fn, t, validate, extras)


class Clock:
    "A clock that gains `tick` seconds at every look, fast or slow."

    def __init__(self, tick: float):
        self.tick, self.t = tick, 0.0

    def __call__(self):
        self.t += self.tick
        return self.t


def skewed_clocks(ranks, env: dict):
    "Train under a wall-clock cap where this rank's clock runs at its own speed: (steps, replicated bytes, multiplier-dependent bank bytes)."
    variant, model, engine = machine(env, ranks, torch.float32)
    result = trained(variant, training_loss(model, model.cap), Batches(variant, ranks), engine, now=Clock(0.001 * (1 + 7 * ranks.rank)))
    flat = b"".join(g.rounded.numpy().tobytes() for g in engine.groups)
    banks = b"".join(b.replica.detach().numpy().tobytes() for b in engine.banks.values())
    return result.steps, flat, banks


def bad_gradient(ranks, env: dict, who: int):
    "One rank's loss is NaN at step 2 of 4: (steps skipped, all weights finite, step losses)."
    variant, model, engine = machine(env, ranks, torch.float32)
    plain, calls = training_loss(model, model.cap), [0]

    def poisoned(ids, targets):
        calls[0] += 1
        return plain(ids, targets) * (float("nan") if calls[0] == 2 and ranks.rank == who else 1.0)

    result = trained(variant, poisoned, Batches(variant, ranks), engine)
    finite = all(torch.isfinite(p).all().item() for p in model.parameters())
    return result.skipped, finite, b"".join(g.rounded.numpy().tobytes() for g in engine.groups)


def limit_waiting(ranks, seconds: float) -> float:
    "Let collectives wait `seconds` from now on, for starting took its time; how long they could before."
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    before = backend.options._timeout.total_seconds()
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), dist.group.WORLD)
    return before


def silent_partner(ranks) -> float:
    "Rank 1 does not come to a collective, and is not gone; how long rank 0 waited for it."
    start, store = time.monotonic(), dist.distributed_c10d._get_default_store()
    if ranks.rank == 1:
        store.wait(["waited"])
        return 0.0
    try:
        ranks.sum(torch.ones(1))
    except RuntimeError as e:
        assert any(w in str(e) for w in LOST_RANK_WORDS), e
        return time.monotonic() - start
    finally:
        store.set("waited", "")
    raise AssertionError("a collective without a partner came back")


def late_partner(ranks, seconds: float) -> float:
    "Rank 1 has its part ready `seconds` later than rank 0; the sum."
    time.sleep(seconds * ranks.rank)
    return float(ranks.sum_late(torch.ones(1)))


def all_checks(ranks, cases: list) -> list:
    "Several of these functions in one set of processes: [(name, args), ...] -> their results."
    return [globals()[name](ranks, *args) for name, args in cases]


def unequal_nodes(ranks, env: dict) -> str:
    "What is said where rank 0 is alone on its node and the others share one."
    os.environ["LOCAL_WORLD_SIZE"] = "1" if ranks.rank == 0 else "2"
    ranks.node, ranks.nodes = int(ranks.rank > 0), 2
    try:
        machine(env, ranks)
    except GolfError as e:
        return str(e)

"""Models that were not written for golfnb, a plain float64 reference that trains them in one process, and what ranks do with ParallelMuon."""
import copy
import logging
import math
import sys
import time
import warnings
from contextlib import contextmanager, nullcontext, suppress
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, get_state_dict, set_optimizer_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from golfnb.model.bank_rule import BankRule
from golfnb.model.layout import bank_per_shape, mlp_in_one_bank
from golfnb.model.golf import Golf, ModelSettings, init_model, named_state
from golfnb.muon.errors import OptimizerError
from golfnb.muon.exchange import local
from golfnb.muon.grouping import param_groups
from golfnb.muon.newton_schulz import quintic
from golfnb.muon.optimizer import ParallelMuon
from golfnb.muon.rules import RULES, Rule, replace
from golfnb.muon.sharded import ChunkedTensor, ShardedState
from golfnb.model.engine import AdamW, ClipMean, Engine, Muon
from golfnb.settings import GolfError
from golfnb.studies.peers import Matrices
from golfnb.run.train import training_loss

ROWS, VOCAB, MU = 24, 23, 0.9
SETTINGS = dict(lr=0.02, momentum=MU, weight_decay=0.1, adam_lr=0.01, adam_weight_decay=0.05)
F64 = torch.float64


class Block(nn.Module):
    def __init__(self, d, bias=True):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.proj = nn.Linear(d, 3 * d, bias=bias), nn.Linear(d, d, bias=bias)
        self.up, self.down = nn.Linear(d, 4 * d, bias=bias), nn.Linear(4 * d, d, bias=bias)

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in self.qkv(self.ln_1(x)).chunk(3, -1))
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.ln_2(x))))


class NanoGPT(nn.Module):
    "Tied head; in its blocks a matrix nobody uses, one used by nobody in turn or by rank 0, one used on rank 0 only."

    def __init__(self, d=10, layers=3):
        super().__init__()
        self.transformer = nn.ModuleDict(dict(wte=nn.Embedding(VOCAB, d), wpe=nn.Embedding(16, d), h=nn.ModuleList(Block(d) for _ in range(layers)), ln_f=nn.LayerNorm(d)))
        self.transformer.h[0].spare, self.transformer.h[1].sometimes, self.transformer.h[2].mine = nn.Linear(d, d), nn.Linear(d, d), nn.Linear(d, d)
        self.lm_head = nn.Linear(d, VOCAB, bias=False)
        self.lm_head.weight = self.transformer.wte.weight
        self.step, self.rank = 0, 0

    def forward(self, ids):
        t = self.transformer
        x = t.wte(ids) + t.wpe.weight[:ids.shape[1]]
        for block in t.h:
            x = block(x)
        x = x + t.h[1].sometimes(x) if self.step % 3 == 0 or self.step % 3 == 1 and self.rank == 0 else x
        x = x + t.h[2].mine(x) if self.rank == 0 else x
        return self.lm_head(t.ln_f(x))

    def loss(self, rows):
        ids = (rows[:, :1] + torch.arange(9)) % VOCAB
        return F.cross_entropy(self(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


class Vision(nn.Module):
    "Convolutions, norms, a class token, buffers, blocks with matrices of odd shapes, a head."

    def __init__(self, d=6, layers=5):
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, d, 3, stride=2), nn.GroupNorm(2, d)
        self.token, self.place = nn.Parameter(torch.zeros(1, 1, d)), nn.Parameter(torch.randn(1, 10, d))
        self.blocks = nn.Sequential(*(nn.Sequential(nn.LayerNorm(d), nn.Linear(d, 7), nn.ReLU(), nn.Linear(7, d)) for _ in range(layers)))
        self.heads = nn.Sequential(nn.LayerNorm(d), nn.Linear(d, 5))
        self.register_buffer("shift", torch.randn(3, 1, 1))
        self.register_buffer("empty", torch.zeros(0))
        self.register_buffer("flag", torch.tensor(True))

    def forward(self, images):
        x = self.norm(self.stem(images + self.shift)).flatten(2).mT
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.place
        for block in self.blocks:
            x = x + block(x)
        return self.heads(x.mean(1))

    def loss(self, rows):
        images = (rows[:, :1, None, None] * 0.37 + torch.arange(147).view(3, 7, 7)).sin().to(self.token)
        return F.cross_entropy(self(images), rows[:, 0] % 5)


class Encoder(nn.Module):
    "torch's own layers, whose queries, keys and values are one parameter."

    def __init__(self, d=6):
        super().__init__()
        self.table, self.head = nn.Embedding(VOCAB, d), nn.Linear(d, VOCAB)
        layer = nn.TransformerEncoderLayer(d, 2, 14, dropout=0.0, batch_first=True)
        self.body = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)

    def forward(self, ids):
        return self.head(self.body(self.table(ids)))

    def loss(self, rows):
        ids = (rows[:, :1] + torch.arange(7)) % VOCAB
        return F.cross_entropy(self(ids).flatten(0, 1), (3 * ids + 1).flatten() % VOCAB)


class Experts(nn.Module):
    "Blocks with batches of matrices, as many as there are experts."

    def __init__(self, d=6, experts=5):
        super().__init__()
        self.table, self.head = nn.Embedding(VOCAB, d), nn.Linear(d, VOCAB)
        self.blocks = nn.ModuleList(nn.ParameterDict(dict(up=torch.randn(experts, d, 4) / 3, down=torch.randn(experts, 4, d) / 3, mix=torch.randn(d, d) / 3)) for _ in range(2))

    def forward(self, ids):
        x = self.table(ids)
        for block in self.blocks:
            h = torch.einsum("btd,edf->btef", x @ block["mix"], block["up"]).relu()
            x = x + torch.einsum("btef,efd->btd", h, block["down"])
        return self.head(x)

    loss = Encoder.loss


class Mlp(nn.Module):
    "Blocks as tensor parallelism cuts them, by columns and then by rows; the last is used by nobody."

    def __init__(self, d=6, hidden=24, layers=3):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(d, hidden), nn.GELU(), nn.Linear(hidden, d)) for _ in range(layers + 1))
        self.head = nn.Linear(d, 8)

    def forward(self, x):
        for block in self.blocks[:-1]:
            x = x + block(x)
        return self.head(x)

    def loss(self, rows):
        x = (rows[:, :1] * 0.37 + torch.arange(6)).sin().double()
        return F.cross_entropy(self(x), rows[:, 0] % 8)


def build(kind: str, seed: int = 0) -> nn.Module:
    "A model in float64."
    torch.manual_seed(seed)
    if kind == "gpt2":
        from transformers import GPT2Config, GPT2LMHeadModel

        return GPT2LMHeadModel(GPT2Config(n_layer=3, n_embd=12, n_head=2, vocab_size=VOCAB, n_positions=8, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0)).double()
    return dict(nano=NanoGPT, vision=Vision, encoder=Encoder, experts=Experts, mlp=Mlp)[kind]().double()


def loss_of(model, rows):
    if hasattr(model, "loss"):
        return model.loss(rows)
    ids = (rows[:, :1] + torch.arange(8)) % VOCAB
    return F.cross_entropy(model(input_ids=ids[:, :-1]).logits.flatten(0, 1), ids[:, 1:].flatten())  # its own loss casts to float32


def rows_of(step: int) -> Tensor:
    return torch.randint(VOCAB, (ROWS, 2), generator=torch.Generator().manual_seed(step))


def backward(model, step, rank, world, accum=1, scale=1.0, opt=None):
    "This rank's share of the step's rows, in `accum` pieces, of which the optimizer sends the last; the gradient of the mean."
    model.step, model.rank = step, rank
    parts = rows_of(step).chunk(world)[rank].chunk(accum)
    for i, rows in enumerate(parts):
        with opt.no_sync() if opt and i < len(parts) - 1 else nullcontext():
            (loss_of(model, rows) * (scale / accum)).backward()


def schedule(step):
    return 1.0 if step < 2 else 0.6


# --- the reference: loops over matrices, nothing of golfnb's optimizer

def pieces(p: Tensor, group: dict) -> list[Tensor]:
    "Views of the matrices of a parameter, as its layer multiplies: [outputs, inputs]."
    stack = p.view(len(p), -1)[None] if group.get("flatten") else p if p.ndim == 3 else p[None]
    found = [one.T if group.get("transposed") else one for one in stack]
    sizes = group.get("split_sizes")
    return [part for one in found for part in (one.split(list(sizes)) if sizes else [one])]


class Reference:
    def __init__(self, groups: list[dict], max_norm: float = 0.0):
        self.groups, self.max_norm, self.state = groups, max_norm, {}

    @torch.no_grad()
    def step(self, factor: float = 1.0):
        named = [(n, p, g) for g in self.groups for n, p in g["params"]]
        grads = [p.grad for _, p, _ in named if p.grad is not None]
        norm = math.sqrt(sum(g.square().sum().item() for g in grads))
        coef = min(1.0, self.max_norm / (norm + 1e-6)) if self.max_norm else 1.0
        for n, p, g in named:
            if p.grad is None:
                continue
            state = self.state.setdefault(n, dict(a=torch.zeros_like(p), b=torch.zeros_like(p), n=0))
            update = self.muon if g["rule"] == "muon" else self.adamw
            update(p, p.grad * coef, state, g, factor)

    def muon(self, p, grad, state, group, factor):
        state["a"].mul_(MU).add_(grad)
        lr = SETTINGS["lr"] * factor
        for w, u in zip(pieces(p, group), pieces(grad + MU * state["a"], group), strict=True):
            w.mul_(1 - lr * SETTINGS["weight_decay"])
            w.sub_(lr * math.sqrt(max(1, w.shape[0] / w.shape[1])) * quintic(u))

    def adamw(self, p, grad, state, group, factor):
        state["n"] += 1
        a, b, lr = state["a"], state["b"], SETTINGS["adam_lr"] * factor
        a.mul_(0.9).add_(grad * 0.1)
        b.mul_(0.95).add_(grad * grad * (1 - 0.95))
        p.mul_(1 - lr * SETTINGS["adam_weight_decay"])
        p.sub_(lr * (a / (1 - 0.9 ** state["n"])) / ((b / (1 - 0.95 ** state["n"])).sqrt() + 1e-8))


def plain(kind: str, world: int, steps: int = 5, accum: int = 1, skip: int = -1, max_norm: float = 0.0) -> dict:
    "Weights by name after training in one process with the mean of the ranks' gradients, and the last norm."
    model = build(kind)
    reference = Reference(param_groups(model), max_norm)
    for step in range(steps):
        model.zero_grad()
        for rank in range(world):
            backward(model, step, rank, world, accum, 1 / world)
        if step != skip:
            reference.step(schedule(step))
    return {n: t.detach().clone() for n, t in model.state_dict().items()}


# --- what ranks do

def wrapped(model: nn.Module, how: str) -> nn.Module:
    "The model as it is, under DDP, or sharded: blocks, then the rest."
    if how == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    world = dist.get_world_size() if dist.is_initialized() else 1
    if how == "tensor":
        cut_layers(model, init_device_mesh("cpu", (world,)))
    if how == "sharded tensor":
        mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("data", "tensor"))
        cut_layers(model, mesh["tensor"])
        for block in model.blocks:
            fully_shard(block, mesh=mesh["data"])
        fully_shard(model, mesh=mesh["data"])
    if how in ("sharded", "copies"):
        mesh = init_device_mesh("cpu", (world,) if how == "sharded" else (2, world // 2), mesh_dim_names=("copy", "shard")[-(1 + (how == "copies")):])
        for module in [m for m in model.modules() if isinstance(m, (nn.ModuleList, nn.Sequential)) and len(m) > 1 and m is not model]:
            for block in module.children():
                if next(block.parameters(), None) is not None and isinstance(block, (nn.TransformerEncoderLayer, nn.Sequential, Block, nn.ParameterDict)):
                    fully_shard(block, mesh=mesh) if not isinstance(block, nn.ParameterDict) else None
        fully_shard(model, mesh=mesh)
    return model


def cut_layers(model: "Mlp", mesh) -> None:
    "Each block's first layer by columns and its second by rows, as tensor parallelism has it; the head by columns."
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    for block in model.blocks:
        parallelize_module(block, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    parallelize_module(model, mesh, {"head": ColwiseParallel(output_layouts=Replicate())})


def data_place(ranks, how: str) -> tuple[int, int]:
    "Which share of the rows a rank takes, of how many."
    if how == "tensor":
        return 0, 1
    return (ranks.rank // 2, ranks.world // 2) if how == "sharded tensor" else (ranks.rank, ranks.world)


def whole(t: Tensor) -> Tensor:
    return t.full_tensor() if hasattr(t, "full_tensor") else t.detach().clone()


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    return {n.removeprefix("module."): whole(t) for n, t in model.state_dict().items()}


def backward_under(model: nn.Module, how: str, step: int, rank: int, world: int, accum: int, opt=None):
    if how in ("plain", "tensor"):
        return backward(model, step, rank, world, accum, opt=opt)
    inner = model.module if how == "ddp" else model
    parts = rows_of(step).chunk(world)[rank].chunk(accum)
    for i, rows in enumerate(parts):
        last = i == len(parts) - 1
        if how != "ddp":
            model.set_requires_gradient_sync(last)
        with model.no_sync() if how == "ddp" and not last else torch.enable_grad():
            (through(model, inner, rows) / accum).backward()


def through(model, inner, rows):
    "The loss by the wrapper's own forward, whose hooks gather and reduce."
    original = inner.forward
    if inner is model:  # fully_shard: hooks sit on the module's call
        return loss_of(model, rows)
    inner.forward = lambda rows: loss_of_with(inner, original, rows)
    try:
        return model(rows)
    finally:
        inner.forward = original


def loss_of_with(inner, original, rows):
    inner.forward = original
    return loss_of(inner, rows)


def ours(ranks, kind: str, how: str = "plain", steps: int = 5, accum: int = 1, poison: tuple = (-1, 0), **more):
    "Training by one optimizer: weights by name, steps skipped, the last norm."
    model = build(kind, seed=0 if ranks.rank == 0 or how != "plain" else 99)  # other ranks start elsewhere: rank 0's weights count
    model = wrapped(model, how)
    opt = ParallelMuon(model, **SETTINGS, reduce="none" if how == "ddp" else "mean", **more)
    plan = torch.optim.lr_scheduler.LambdaLR(opt, schedule)
    for step in range(steps):
        opt.zero_grad()
        backward_under(model, how, step, *data_place(ranks, how), accum, opt)
        if (step, ranks.rank) == poison:
            next(p for p in model.parameters() if p.grad is not None).grad.view(-1)[0] = float("nan")
        opt.step()
        plan.step()
    return weights_of(model), opt.skipped, opt.grad_norm.item()


def all_jobs(ranks, jobs: list) -> list:
    warnings.simplefilter("ignore")
    return [globals()[name](ranks, *args, **more) for name, args, more in jobs]


# --- checkpoints: model kind, state saved and loaded in torch's ways

def fresh(kind: str, how: str, seed: int, **more):
    model = wrapped(build(kind, seed), how)
    return model, ParallelMuon(model, **{**SETTINGS, **more}, reduce="none" if how == "ddp" else "mean")


def walk(model, opt, how: str, start: int, steps: int) -> dict[str, Tensor]:
    "Train on, on the same rows on every rank, so that it does not matter how many there are."
    for step in range(start, start + steps):
        opt.zero_grad()
        backward_under(model, how, step, 0, 1, 1)
        opt.step()
    return weights_of(model)


def full(state: dict) -> dict:
    return {k: whole(t) if isinstance(t, Tensor) else t for k, t in state.items()}


def save_all(ranks, kind: str, how: str, folder: str) -> tuple[dict, dict]:
    "Two steps; rank 0 writes a torch.save file, all write a checkpoint of torch.distributed; weights then, and after two more steps."
    model, opt = fresh(kind, how, 0)
    then = walk(model, opt, how, 0, 2)
    state, weights = opt.state_dict(), weights_of(model)
    state["state"] = {k: full(s) for k, s in state["state"].items()}
    if ranks.rank == 0:
        torch.save({"model": weights, "optimizer": state}, f"{folder}/file.pt")
    m, o = get_state_dict(model, opt)
    dcp.save({"m": m, "o": o}, checkpoint_id=f"{folder}/dcp")
    dcp.save({"m": model.state_dict() if how == "plain" else m, "o": ShardedState(opt)}, checkpoint_id=f"{folder}/parts")
    if ranks.world > 1:
        everything = get_optimizer_state_dict(model, opt, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if ranks.rank == 0:
            torch.save(everything, f"{folder}/full.pt")
    return then, walk(model, opt, how, 2, 2)


def load_weights(model, weights: dict):
    from torch.distributed.checkpoint.state_dict import set_model_state_dict

    set_model_state_dict(model, copy.deepcopy(weights), options=StateDictOptions(full_state_dict=True))


def go_on(ranks, kind: str, how: str, folder: str, way: str) -> dict[str, Tensor]:
    "What `save_all` wrote, taken over here; the weights after two more steps."
    model, opt = fresh(kind, how, 7)
    saved = torch.load(f"{folder}/file.pt", weights_only=True)
    if way == "file":
        load_weights(model, saved["model"])
        opt.load_state_dict(saved["optimizer"])
    elif way == "file, optimizer first":
        opt.load_state_dict(saved["optimizer"])
        load_weights(model, saved["model"])
    elif way in ("parts", "parts of dcp"):
        m, _ = get_state_dict(model, opt)
        dcp.load({"m": m, "o": ShardedState(opt)}, checkpoint_id=f"{folder}/{'dcp' if 'dcp' in way else 'parts'}")
    elif way in ("dcp", "dcp of parts"):
        m, o = get_state_dict(model, opt)
        found = {"m": m, "o": o}
        dcp.load(found, checkpoint_id=f"{folder}/{'parts' if 'parts' in way else 'dcp'}")
        set_state_dict(model, opt, model_state_dict=found["m"], optim_state_dict=found["o"])
    else:
        load_weights(model, saved["model"])
        everything = torch.load(f"{folder}/full.pt", weights_only=True)
        set_optimizer_state_dict(model, opt, everything, options=StateDictOptions(full_state_dict=True))
    return walk(model, opt, how, 2, 2)


def in_parts(ranks, how: str, folder: str, saved: bool) -> tuple:
    """NorMuon on bf16 weights, and a number that is a tensor: saved in parts by `async_save`, or read.

    Weights and state by name, the numbers; of the ShardedState, what it copied, and what its call sent; what that of `state_dict` sent.
    """
    model = wrapped(build("experts", 0 if saved else 7).bfloat16(), how)
    groups = param_groups(model)
    groups[0]["rule"] = "normuon"
    opt = ParallelMuon(groups, **SETTINGS)
    opt.param_groups[-1]["lr"] = rate = torch.tensor(0.03 if saved else 0.5)
    if saved:
        for p in model.parameters():
            p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())).to(p) if how == "plain" else torch.ones_like(p)
        opt.step()
    m, _ = get_state_dict(model, opt)
    with sent_by(dist) as sent:
        parts = ShardedState(opt).state_dict()
    storages = {t.untyped_storage().data_ptr() for s in opt.states.values() for t in map(local, s.tensors.values())}
    copied = [t for s in parts["state"].values() for t in s.values() for c in (t.chunks.values() if isinstance(t, ChunkedTensor) else [local(t)]) if c.untyped_storage().data_ptr() not in storages]
    if saved:
        dcp.async_save({"m": m, "o": ShardedState(opt)}, checkpoint_id=folder).result()
    else:
        dcp.load({"m": m, "o": ShardedState(opt)}, checkpoint_id=folder)
        assert opt.param_groups[-1]["lr"] is rate
    with sent_by(dist) as sent_otherwise:
        opt.state_dict()
    whole_state = {f"{s.member.name} {k}": whole(t) for s in opt.states.values() for k, t in s.whole().items()}
    return {**weights_of(model), **whole_state}, [g["lr"] for g in opt.param_groups], copied, sent, sent_otherwise


@contextmanager
def sent_by(module):
    "The names of the collectives that are called meanwhile."
    names, found = [n for n in ("all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_object", "all_to_all_single", "broadcast", "barrier", "reduce_scatter_tensor") if hasattr(module, n)], []
    originals = {n: getattr(module, n) for n in names}
    for n in names:
        setattr(module, n, lambda *a, n=n, **k: (found.append(n), originals[n](*a, **k))[1])
    yield found
    for n in names:
        setattr(module, n, originals[n])


def keeps_no_group(ranks) -> int:
    "How many more references an optimizer holds to the group of all ranks, whose threads end with it."
    before = sys.getrefcount(dist.group.WORLD)
    model = build("vision")
    opt = ParallelMuon(model, **SETTINGS)
    walk(model, opt, "plain", 0, 2)
    opt.state_dict()
    return sys.getrefcount(dist.group.WORLD) - before


def stages_in_parts(ranks, folder: str) -> float:
    "Each rank is a stage with a key of its own: saved, spoiled and read; how far the state is from what was saved."
    mesh = init_device_mesh("cpu", (ranks.world, 1), mesh_dim_names=("stage", "data"))
    weight = nn.Parameter(torch.ones(4 + ranks.rank, 6))
    opt = ParallelMuon([("weight", weight)], mesh=mesh["data"])
    weight.grad = torch.full_like(weight, 1.0 + ranks.rank)
    opt.step()
    momentum, parts = opt.state[weight]["momentum_buffer"], {f"stage {ranks.rank}": ShardedState(opt)}
    dcp.save(parts, checkpoint_id=folder)
    before = momentum.clone()
    momentum.zero_()
    dcp.load(parts, checkpoint_id=folder)
    return (momentum - before).abs().max().item() + float(not before.any())


def heard(call) -> list:
    "What golfnb logs as a warning during a call, and its GolfError."
    said, log = [], logging.getLogger("golfnb")
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())
    log.addHandler(handler)
    try:
        call()
    except GolfError as e:
        said.append(f"GolfError: {e}")
    log.removeHandler(handler)
    return said


def drifting(ranks):
    "What is said of a BatchNorm, and of a SyncBatchNorm."
    net = lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4), nn.Linear(4, 2))
    return heard(lambda: ParallelMuon(net())), heard(lambda: ParallelMuon(nn.SyncBatchNorm.convert_sync_batchnorm(net())))


def clipped(ranks):
    "What is said in five steps with torch's clipping, without it, and with it where all ranks have the same rows."
    def steps(clip, seed):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 2))
        opt, rows = ParallelMuon(model), torch.Generator().manual_seed(seed)
        for _ in range(5):
            opt.zero_grad()
            model(torch.randn(8, 6, generator=rows)).square().mean().backward()
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            opt.step()
    return [heard(lambda: steps(*how)) for how in ((True, ranks.rank), (False, ranks.rank), (True, 7))]


def unaveraged(ranks):
    "What is said of reduce='none' in three steps: without DDP, under it, under it by the module inside, and of shards."
    def steps(how):
        torch.manual_seed(0)
        model = called = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8))
        if how == "sharded":
            fully_shard(model)
        elif how != "plain":
            called = nn.parallel.DistributedDataParallel(model)
        opt, rows = ParallelMuon(param_groups(model), reduce="none"), torch.Generator().manual_seed(ranks.rank)
        for _ in range(3):
            opt.zero_grad()
            (model if how == "inside" else called)(torch.randn(8, 8, generator=rows)).square().mean().backward()
            opt.step()
    return [heard(lambda: steps(how)) for how in ("plain", "ddp", "inside", "sharded")]


def rank_0_alone(ranks):
    "`if rank == 0: optimizer.state_dict()`, or `load_state_dict`, while the other is elsewhere, late or never; what is heard, whether all works afterwards."
    model, opt = fresh("vision", "plain", 0)
    state, store, said = opt.state_dict(), dist.distributed_c10d._get_default_store(), []
    for name, call in (("save", opt.state_dict), ("load", lambda: opt.load_state_dict(state))):
        opt.patience_s = 0.3
        if ranks.is_rank0:
            said += heard(call)
            store.set(f"{name} alone", "")
        else:
            store.wait([f"{name} alone"])
        opt.patience_s = 30.0
        time.sleep(0.5 * ranks.rank)  # late, and waited for
        said += heard(call)
    return said, walk(model, opt, "plain", 0, 2)


def rank_0_saves(ranks):
    "`if rank == 0: torch.save(optimizer.state_dict(), file)`, then a barrier for all: what is heard."
    group = dist.new_group(timeout=timedelta(seconds=10))
    opt = ParallelMuon(build("vision"), mesh=group)
    if not ranks.is_rank0:
        with suppress(RuntimeError):  # nobody comes
            dist.barrier(group)
        return []
    opt.patience_s = 0.3
    return heard(opt.state_dict)


def consolidated(ranks, how: str, to: int):
    "Whether what rank `to` saves alone is what all save together; what is heard of the others, and of saving after a step; weights of a run that goes on from it."
    model, opt = fresh("vision", how, 0)
    walk(model, opt, how, 0, 2)
    together = {k: full(s) for k, s in opt.state_dict()["state"].items()}
    opt.consolidate_state_dict(to=to)
    said, alone = [], None
    if ranks.rank == to:
        alone = copy.deepcopy(opt.state_dict())
        assert all(torch.equal(t, together[k][name]) for k, s in alone["state"].items() for name, t in s.items()) and alone["state"].keys() == together.keys()
    else:
        said += heard(opt.state_dict)
    given = [alone]
    dist.broadcast_object_list(given, to)
    walk(model, opt, how, 2, 1)
    opt.patience_s = 0.2
    said += heard(opt.state_dict) if ranks.rank == to else []
    dist.barrier()
    opt.patience_s = 30.0
    opt.load_state_dict(given[0])
    assert not heard(opt.state_dict), "after loading all save together"
    said += heard(lambda: opt.consolidate_state_dict(to=ranks.world))
    return said, {k: full(s) for k, s in opt.state_dict()["state"].items()}, together


def joined(ranks):
    "What is heard of ranks with other numbers of batches under DDP's join."
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Sequential(*[nn.Linear(4, 4) for _ in range(3)]))
    opt = ParallelMuon(model, reduce="none")

    def train():
        with model.join():
            for _ in range(2 + 2 * ranks.rank):
                opt.zero_grad()
                model(torch.ones(2, 4)).square().mean().backward()
                opt.step()
    return heard(train)


def other_call(ranks):
    "Rank 1 loads while rank 0 saves: what is heard."
    _, opt = fresh("vision", "plain", 0)
    state = opt.state_dict()
    return heard(opt.state_dict if ranks.is_rank0 else lambda: opt.load_state_dict(state))


def first_fsdp(ranks):
    "What is said of a model under FullyShardedDataParallel, in both of its ways and by its bare parameters."
    from torch.distributed.fsdp import FullyShardedDataParallel

    said = []
    for original in (True, False):
        model = FullyShardedDataParallel(nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), nn.Linear(4, 2)), use_orig_params=original, device_id=torch.device("cpu"))
        said.append(heard(lambda: ParallelMuon(model)))
    return said + [heard(lambda: ParallelMuon([{"params": list(model.parameters()), "rule": "adamw"}]))]


def other_calls(ranks):
    "Rank 1 built another module, or made another call: what every rank is told."
    said, odd = [], ranks.rank == 1
    for width, more in ((6, {}), (4, dict(ns_steps=6))):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, width if odd else 4), nn.Linear(4, 2))
        said += heard(lambda: ParallelMuon(model, **(more if odd else {})))
    return said


def narrow(ranks, how: str):
    "bf16 weights: what the ranks hold, whether masters are fp32 and close, bytes of state here for an element, losses."
    model = build("vision").bfloat16()
    model = wrapped(model, how)
    opt = ParallelMuon(model, **SETTINGS)
    losses = []
    for _ in range(5):
        opt.zero_grad()
        loss = model.loss(rows_of(0).chunk(ranks.world)[ranks.rank]) if how == "plain" else through(model, model, rows_of(0).chunk(ranks.world)[ranks.rank])
        loss.float().backward()
        opt.step()
        losses.append(loss.item())
    matrices = [s for s in opt.states.values() if s.member.rule.matrices]
    held = sum(t.to_local().nbytes if hasattr(t, "to_local") else t.nbytes for s in matrices for t in s.tensors.values())
    weights = weights_of(model)
    saved = opt.state_dict()
    masters = {n: whole(saved["state"][i]["master"]) for i, n in enumerate(n for g in opt.param_groups for n in g["param_names"])}
    rounds = all(torch.equal(m.bfloat16(), weights[n]) for n, m in masters.items())
    return weights, rounds, held / sum(s.member.param.numel() for s in matrices), losses


def meshes(ranks):
    "Two halves of the ranks, each with a model of its own (a pipeline's stages): their weights, and what a stage without a matrix does."
    half = ranks.world // 2
    parts = init_device_mesh("cpu", (2, half), mesh_dim_names=("stage", "data"))
    stage, here = ranks.rank // half, ranks.rank % half
    results = {}
    for given in ("mesh", "group"):
        mesh = parts["data"] if given == "mesh" else parts["data"].get_group()
        if stage == 0:
            model = build("vision")
            opt = ParallelMuon(model, **SETTINGS, mesh=mesh)
            for step in range(3):
                opt.zero_grad()
                backward(model, step, here, half)
                opt.step()
        else:
            model = nn.Linear(3, 1).double()
            nn.init.zeros_(model.weight)
            nn.init.zeros_(model.bias)
            opt = ParallelMuon([{"params": list(model.named_parameters()), "rule": "adamw"}], mesh=mesh)
            for step in range(3):
                opt.zero_grad()
                (model(torch.ones(1, 3).double()) * (here + 1)).sum().backward()
                opt.step()
        results[given] = weights_of(model)
    return stage, results


def copies_of_shards(ranks):
    "Two copies of a matrix, each sharded over half of the ranks: what is said, and how far a step with averaged gradients is from one process."
    from torch.distributed.tensor import Shard, distribute_tensor

    half = ranks.world // 2
    mesh = init_device_mesh("cpu", (2, half), mesh_dim_names=("copy", "shard"))
    whole = torch.arange(24, dtype=torch.float64).view(6, 4).sin()
    weight = nn.Parameter(distribute_tensor(whole, mesh["shard"], [Shard(0)]))
    try:
        said = f"nothing: {ParallelMuon([('weight', weight)], mesh=mesh['shard'])}"
    except OptimizerError as error:
        said = str(error)
    opt = ParallelMuon([("weight", weight)], mesh=mesh["shard"], reduce="none")
    weight.grad = distribute_tensor(whole.cos() + mesh.get_local_rank("copy"), mesh["shard"], [Shard(0)])
    dist.all_reduce(weight.grad.to_local(), group=mesh.get_group("copy"))
    weight.grad /= 2
    opt.step()
    alone = nn.Parameter(whole.clone())
    alone.grad = whole.cos() + 0.5
    ParallelMuon([("weight", alone)], mesh=[dist.new_group([r]) for r in range(ranks.world)][ranks.rank]).step()
    return said, (weight.detach().full_tensor() - alone.detach()).abs().max().item()


def mixed_precision(ranks):
    "A fully_shard model that computes in bf16: its weights, and those of a plain one under the same rounding of gradients."
    results = []
    for policy in (MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32), MixedPrecisionPolicy()):
        model = build("encoder").float()
        for block in model.body.layers:
            fully_shard(block, mp_policy=policy)
        fully_shard(model, mp_policy=policy)
        opt = ParallelMuon(model, **SETTINGS)
        for step in range(3):
            opt.zero_grad()
            model.step = step
            through(model, model, rows_of(step).chunk(ranks.world)[ranks.rank]).float().backward()
            opt.step()
        results.append(weights_of(model))
    return results


def normuon(ranks, how: str):
    "NorMuon, sharded or not."
    model = wrapped(build("vision"), how)
    groups = param_groups(model)
    groups[0]["rule"] = "normuon"
    opt = ParallelMuon(groups, **SETTINGS)
    for step in range(3):
        opt.zero_grad()
        backward_under(model, how, step, ranks.rank, ranks.world, 1)
        opt.step()
    saved = opt.state_dict()["state"][0]
    return weights_of(model), {k: tuple(t.shape) for k, t in saved.items()}


def bits(ranks, how: str, product_dtype) -> tuple[dict[str, Tensor], list[tuple]]:
    "fp32 weights after steps with gradients of whole numbers, whose means are exact; (dtype, elements) of all that travelled after them."
    model = wrapped(build("vision").float(), how)
    groups = param_groups(model)
    groups[0]["product_dtype"] = product_dtype
    opt = ParallelMuon(groups, **SETTINGS)
    sent = []
    for name in ("all_rows", "swap"):
        original = getattr(type(opt.ranks), name)
        object.__setattr__(opt.ranks, name, lambda t, *a, original=original: (sent.append((t.dtype, t.numel())), original(opt.ranks, t, *a))[1])
    for step in range(3):
        for i, p in enumerate(model.parameters()):
            full = torch.stack([torch.randint(-9, 9, p.shape, generator=torch.Generator().manual_seed(1000 * step + 10 * i + r)).float() for r in range(4)])
            mine = full[ranks.rank::ranks.world].sum(0) * (ranks.world / 4)
            if how == "sharded":
                from torch.distributed.tensor import distribute_tensor

                p.grad = distribute_tensor(full.sum(0) / 4, p.device_mesh, p.placements)
            else:
                p.grad = mine
        opt.step()
    return weights_of(model), sent


def early(ranks):
    "Overlap: how many buckets left before the step; what a second backward is told; a step that was given up; a copy that goes on."
    model = build("encoder")
    opt = ParallelMuon(model, **SETTINGS, overlap=True)
    backward(model, 0, ranks.rank, ranks.world)
    left = (opt.begun, len(opt.early))
    said = heard(lambda: backward(model, 0, ranks.rank, ranks.world))
    opt.zero_grad()
    twin, twin_opt = copy.deepcopy((model, opt))
    for m, o in ((model, opt), (twin, twin_opt)):
        for step in range(2):
            o.zero_grad()
            backward(m, step, ranks.rank, ranks.world)
            o.step()
    return left, said, weights_of(model), weights_of(twin)


def python_calls(ranks) -> int:
    "Calls of Python functions in one step of 66 matrices, the sixth."
    model = Matrices(64, 11, "fp32").build("cpu")
    opt = ParallelMuon(model, lr=0.02)
    for _ in range(5):
        opt.step()
    found = []
    sys.setprofile(lambda frame, event, arg: found.append(event))
    opt.step()
    sys.setprofile(None)
    return found.count("call")


RECIPE = ModelSettings(num_layers=3, model_dim=32, num_heads=2, num_kv_heads=1, vocab_size=32, rope_dims=8, bigram_vocab_size=64, bigram_dim=8,
                       ve_enabled=False, xsa_last_n=1, train_seq_len=16, small_tensor=256)


def by_engine(ranks, banks, rule):
    "A recipe's model trained by its engine: (model, step)."
    model = Golf(RECIPE, banks(RECIPE, ranks.world), torch.float64)
    init_model(model, RECIPE, seed=0)
    engine = Engine(model.role_params(), model.layout, ranks, rule, AdamW(0.01, 0.02, 0.05), ClipMean(0.3))
    return model, engine.step


def by_optimizer(ranks, rule):
    "The same by ParallelMuon, its banks as 3-D parameters."
    model = Golf(RECIPE, bank_per_shape(RECIPE, ranks.world), torch.float64)
    init_model(model, RECIPE, seed=0)
    given = {role: [*params.items()] for role, params in model.role_params().items()}
    adamw = dict(rule="adamw", weight_decay=0.05, betas=(0.9, 0.95), eps=1e-8)
    optimizer = ParallelMuon([dict(params=given["bank"], rule=rule, lr=0.03, weight_decay=0.1),
                              dict(params=given["table"], lr=0.02, **adamw), dict(params=given["scalar"], lr=0.01, **adamw)], max_norm=0.3)
    peaks = [group["lr"] for group in optimizer.param_groups]

    def step(rate, momentum):
        for group, peak in zip(optimizer.param_groups, peaks):
            group["lr"] = peak * rate
        if "momentum" in optimizer.param_groups[0]:
            optimizer.param_groups[0]["momentum"] = momentum
        optimizer.step()
        optimizer.zero_grad()

    return model, step


def trained_alike(ranks, trainings) -> float:
    "How far apart models are after six steps on the same text."
    generator = torch.Generator().manual_seed(ranks.rank)
    for i in range(6):
        ids = torch.randint(0, 32, (4, 17), generator=generator)
        for model, step in trainings:
            training_loss(model, model.cap)(ids[:, :-1], ids[:, 1:]).backward()
            step(1 - i / 8, 0.85 + i / 50)
    first, *others = (named_state(model) for model, _ in trainings)
    return max(float((first[name] - other[name]).abs().max()) for other in others for name in first)


def of_a_recipe(ranks) -> float:
    "By a recipe's engine and by ParallelMuon."
    return trained_alike(ranks, [by_engine(ranks, bank_per_shape, Muon(0.03, 0.1)), by_optimizer(ranks, "muon")])


def by_any_rule(ranks, rule) -> float:
    "By a rule in the engine, with matrices in a bank of their own shape and turned in another's, and by ParallelMuon."
    rule = {"sign": Sign()}.get(rule, rule)
    trainings = [by_engine(ranks, banks, BankRule(rule, 0.03, 0.1)) for banks in (bank_per_shape, mlp_in_one_bank)]
    return trained_alike(ranks, [*trainings, by_optimizer(ranks, rule)])


class Sign(Rule):
    "A rule of one's own with a state of a matrix that is not square, and one that counts."
    matrices = True
    counters = ("seen",)

    def matrix_state(self, rows, cols, group):
        return {"largest": (rows, 1), "corner": (2, 3)}

    def prepare(self, grad, state, group, ok):
        state["seen"].add_(ok.view_as(state["seen"]))
        return grad / state["seen"]

    def direction(self, stack, state, group, ok):
        replace(state["largest"], torch.maximum(state["largest"], stack.abs().amax(-1, keepdim=True)), ok)
        replace(state["corner"], state["corner"] / 2 + stack[:, :2, :3], ok)
        scaled = stack / (state["largest"] + 1e-3)
        return scaled.sign() * scaled.abs().sqrt() + state["corner"].mean((-2, -1), keepdim=True)


def peers_on_ranks(ranks) -> dict:
    "What `bench peers` steps: this rank's gradients, and weights after a step of ours and of torch's."
    from golfnb.studies import peers

    found = {}
    for name, way in peers.own_ways(torch.device("cpu")).items():
        blocks = peers.Matrices(16, 2, "fp32").build("cpu")
        found["grads"] = [p.grad.clone() for p in blocks.parameters()]
        step = way.build(blocks)
        if way.averaged:
            peers.averaged_step(blocks, step)
        else:
            step()
        found[name] = [p.detach().clone() for p in blocks.parameters()]
    return found


def on_one_dimension(ranks) -> list:
    """What is said of a router on one dimension of a mesh of (data, tensor), sharded or as copies there; the same on both dimensions.

    The last of each is the weight's distance from the float64 answer of one process, where no sentence is said.
    """
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh, found = init_device_mesh("cpu", (2, ranks.world // 2), mesh_dim_names=("data", "tensor")), []
    torch.manual_seed(0)
    weight, grad = torch.randn(8, 6).double(), torch.randn(8, 6).double()
    own = nn.Parameter(weight.clone())
    reference = Reference([{"rule": "muon", "params": [("router", own)]}])
    own.grad = grad.clone()
    reference.step()
    line, plane = [Shard(0)], [Shard(0), Replicate()]
    for where, how in ((mesh["data"], line), (mesh["data"], [Replicate()]), (mesh["tensor"], line), (mesh, plane), (mesh, [Replicate(), Replicate()])):
        p = nn.Parameter(distribute_tensor(weight, where, how))
        p.grad = distribute_tensor(grad, where, how)
        try:
            ParallelMuon([("router", p)], **{k: v for k, v in SETTINGS.items() if k in ("lr", "momentum", "weight_decay")}, reduce="none", mesh=mesh).step()
            found.append(float((p.full_tensor() - own).abs().max()))
        except OptimizerError as error:
            found.append(str(error))
    return found

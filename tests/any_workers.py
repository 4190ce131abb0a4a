"""Models that were not written for golfnb, `torch.optim.Muon` + AdamW on them as the oracle, and what ranks do with ParallelMuon.
`run_ranks` forks its ranks from a server that has imported torch and transformers once."""
import copy
import logging
import warnings
from functools import partial
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, get_state_dict, set_model_state_dict, set_optimizer_state_dict, set_state_dict
from workers import spawn

from golfnb.any_model import ParallelMuon, hidden_matrices, linear_weights
from golfnb.settings import GolfError
from golfnb.newton_schulz import newton_schulz
from golfnb.parallel_muon import Ranks

ROWS, VOCAB, MU = 24, 23, 0.9
SETTINGS = dict(lr=0.02, momentum=MU, weight_decay=0.1, adam_lr=0.01, adam_weight_decay=0.05)


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
    "Tied head; a layer nobody uses, one used by all, by rank 0, by nobody in turn, one used on rank 0 only."

    def __init__(self, d=10, layers=3):
        super().__init__()
        self.transformer = nn.ModuleDict(dict(wte=nn.Embedding(VOCAB, d), wpe=nn.Embedding(16, d), h=nn.ModuleList(Block(d) for _ in range(layers)), ln_f=nn.LayerNorm(d)))
        self.spare, self.sometimes, self.mine = nn.Linear(d, d), nn.Linear(d, d), nn.Linear(d, d)
        self.lm_head = nn.Linear(d, VOCAB, bias=False)
        self.lm_head.weight = self.transformer.wte.weight
        self.step, self.rank = 0, 0

    def forward(self, ids):
        t = self.transformer
        x = t.wte(ids) + t.wpe.weight[:ids.shape[1]]
        for block in t.h:
            x = block(x)
        x = x + self.sometimes(x) if self.step % 3 == 0 or self.step % 3 == 1 and self.rank == 0 else x
        x = x + self.mine(x) if self.rank == 0 else x
        return self.lm_head(t.ln_f(x))

    def loss(self, rows):
        ids = (rows[:, :1] + torch.arange(9)) % VOCAB
        return F.cross_entropy(self(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


class Vision(nn.Module):
    "Convolutions, norms, a class token, buffers, blocks with one matrix of an odd shape, a head."

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


def hf_loss(model, rows):
    ids = (rows[:, :1] + torch.arange(8)) % VOCAB
    return F.cross_entropy(model(input_ids=ids[:, :-1]).logits.flatten(0, 1), ids[:, 1:].flatten())  # its own loss casts to float32


def build(kind: str, seed: int = 0) -> nn.Module:
    "A model in float64."
    torch.manual_seed(seed)
    if kind == "nano":
        model = NanoGPT()
        model.transformer.h[0].up.weight.requires_grad_(False)
        model.transformer.h[2].ln_1.weight.requires_grad_(False)
    elif kind == "vision":
        model = Vision()
    elif kind == "gpt2":
        from transformers import GPT2Config, GPT2LMHeadModel

        model = GPT2LMHeadModel(GPT2Config(n_layer=3, n_embd=12, n_head=2, vocab_size=VOCAB, n_positions=8, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0))
    elif kind == "llama":
        from transformers import LlamaConfig, LlamaForCausalLM

        model = LlamaForCausalLM(LlamaConfig(hidden_size=12, intermediate_size=20, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, vocab_size=VOCAB, max_position_embeddings=8, bos_token_id=0, eos_token_id=0))
    return model.double()


def loss_of(model, rows):
    return model.loss(rows) if hasattr(model, "loss") else hf_loss(model, rows)


def lr_mul(name, p):
    return 0.5 if ".0." in name else 1.0


def wd_mul(name, p):
    return 0.0 if p.ndim < 2 else 2.0 if "proj" in name else 1.0


def schedule(step):
    return 1.0 if step < 2 else 0.6


def rows_of(step: int) -> torch.Tensor:
    return torch.randint(VOCAB, (ROWS, 2), generator=torch.Generator().manual_seed(step))


def backward(model, step, rank, world, accum, scale=1.0, part=None):
    "This rank's share of the step's rows, in `accum` pieces; the gradient of the mean."
    model.step, model.rank = step, rank
    for rows in rows_of(step).chunk(world)[rank if part is None else part].chunk(accum):
        (loss_of(model, rows) * (scale / accum)).backward()


def plain(kind: str, world: int, steps: int = 5, accum: int = 1, skip: int = -1, max_norm: float = 0.0, keep_views: bool = False) -> dict:
    "Weights by name after training with torch's own optimizers in one process; the mean over the ranks' gradients spelt out."
    model = build(kind)
    names, named, kinds = hidden_matrices(model), {n: p for n, p in model.named_parameters() if p.requires_grad}, linear_weights(model)
    groups = {True: [], False: []}
    for n, p in named.items():
        if n in names:
            a, b = p.shape[::-1] if kinds[n] else p.shape  # torch's own factor knows p.shape only
            lr = SETTINGS["lr"] * lr_mul(n, p) * (max(1, a / b) / max(1, p.shape[0] / p.shape[1])) ** 0.5
            groups[True].append(dict(params=[p], lr=lr, weight_decay=SETTINGS["weight_decay"] * wd_mul(n, p) * SETTINGS["lr"] * lr_mul(n, p) / lr))
        else:
            groups[False].append(dict(params=[p], lr=SETTINGS["adam_lr"] * lr_mul(n, p), weight_decay=SETTINGS["adam_weight_decay"] * wd_mul(n, p)))
    opts = [torch.optim.Muon(groups[True], momentum=MU), torch.optim.AdamW(groups[False], betas=(0.9, 0.95))]
    plans = [torch.optim.lr_scheduler.LambdaLR(o, schedule) for o in opts]
    freeze_later(kind, model)
    with patch("torch.optim._muon._zeropower_via_newtonschulz", lambda grad, *_: newton_schulz(grad, eps=1e-7 * (1 - MU))):
        for step in range(steps):
            for o in opts:
                o.zero_grad(set_to_none=not (keep_views and step % 2 == 1))
            for rank in range(world):
                backward(model, step, rank, world, accum, 1 / world)
            if max_norm:
                nn.utils.clip_grad_norm_(model.parameters(), max_norm)
            for o in opts:
                o.step() if step != skip else None
            for s in plans:
                s.step()
    return {n: t.detach().numpy().copy() for n, t in model.state_dict().items()}


def freeze_later(kind, model):
    if kind == "nano":
        model.transformer.h[1].down.weight.requires_grad_(False)


def ours(ranks, kind: str, steps: int = 5, accum: int = 1, poison: tuple = (-1, 0), keep_views: bool = False, **more):
    "The same by one call: weights by name, skipped steps."
    model = build(kind, seed=0 if ranks.rank == 0 else 99)  # other ranks start elsewhere: rank 0's weights count
    opt = ParallelMuon(model, **SETTINGS, lr_mul=lr_mul, wd_mul=wd_mul, **more)
    plan = torch.optim.lr_scheduler.LambdaLR(opt, schedule)
    freeze_later(kind, model)
    for step in range(steps):
        opt.zero_grad(set_to_none=not (keep_views and step % 2 == 1))
        backward(model, step, ranks.rank, ranks.world, accum)
        for g in opt.param_groups if ranks.rank else ():
            g["lr"] = 0.123 * ranks.rank  # rank 0's settings count
        if (step, ranks.rank) == poison:
            next(p for p in model.parameters() if p.grad is not None).grad.view(-1)[0] = float("nan")
        opt.step()
        plan.step()
    return {n: t.detach().numpy().copy() for n, t in model.state_dict().items()}, opt.skipped


def save_after(ranks, path: str, steps: int):
    "Train `steps` steps and let rank 0 write model and optimizer to a file."
    model = build("nano")
    opt = ParallelMuon(model, **SETTINGS, lr_mul=lr_mul, wd_mul=wd_mul)
    plan = torch.optim.lr_scheduler.LambdaLR(opt, schedule)
    freeze_later("nano", model)
    for step in range(steps):
        opt.zero_grad()
        backward(model, step, ranks.rank, 1, 1, part=0)  # every rank reads the whole batch, only rank 0 uses `mine`
        opt.step()
        plan.step()
    state = opt.state_dict()
    if ranks.is_rank0:
        torch.save({"model": model.state_dict(), "optimizer": state, "plan": plan.state_dict()}, path)


def go_on(ranks, path: str, start: int, steps: int, order: str):
    "Load on this number of ranks, into other banks, and train on."
    model = build("nano", seed=7)
    opt = ParallelMuon(model, **SETTINGS, transposable=True)
    plan = torch.optim.lr_scheduler.LambdaLR(opt, schedule)
    freeze_later("nano", model)
    saved = torch.load(path, weights_only=True)
    for part in order.split():
        {"model": model, "optimizer": opt, "plan": plan}[part].load_state_dict(saved[part])
    for step in range(start, start + steps):
        opt.zero_grad()
        backward(model, step, ranks.rank, 1, 1, part=0)
        opt.step()
        plan.step()
    return {n: t.detach().numpy().copy() for n, t in model.state_dict().items()}


def fresh(seed: int):
    "The small GPT with what torch's checkpoints may trip over: a tied head, layers without a gradient, one frozen before and one after the call."
    model = build("nano", seed=seed)
    opt = ParallelMuon(model, **SETTINGS, lr_mul=lr_mul, wd_mul=wd_mul)
    freeze_later("nano", model)
    return model, opt


def walk(model, opt, start: int, steps: int) -> list:
    "Train on, alike on every rank; the weights."
    for step in range(start, start + steps):
        opt.zero_grad()
        backward(model, step, 0, 1, 1)
        opt.step()
    return [t.clone() for t in model.state_dict().values()]


WAYS = ({}, dict(full_state_dict=True), dict(flatten_optimizer_state_dict=True), dict(full_state_dict=True, cpu_offload=True, broadcast_from_rank0=True))


def checkpoints(ranks, folder: str):
    "Save after two steps in all ways of torch.distributed.checkpoint and go on with each: (state after two steps, weights after four, the ways that ended elsewhere)."
    warnings.simplefilter("ignore")  # about one process, and of torch about itself
    model, opt = fresh(0)
    walk(model, opt, 0, 2)
    kept, after = [], opt.state_dict()
    for i, way in enumerate(WAYS[:4 if ranks.world > 1 else 3]):
        found = dict(zip("mo", get_state_dict(model, opt, options=StateDictOptions(**way))))
        kept.append(copy.deepcopy(found))
        dcp.save(found, checkpoint_id=f"{folder}/{ranks.world}{i}")
    assert all(torch.equal(t, s[k]) for s, now in zip(after["state"].values(), opt.state_dict()["state"].values()) for k, t in now.items()), "saving takes no step"
    want, wrong = walk(model, opt, 2, 2), []
    for i, found in enumerate(kept):
        options = StateDictOptions(**WAYS[i])
        for through in ("memory", "file")[:2 if i < 3 else 1]:
            model, opt = fresh(7)
            if through == "memory":
                set_model_state_dict(model, found["m"], options=options)
                set_optimizer_state_dict(model, opt, found["o"], options=options)
            else:
                found = dict(zip("mo", get_state_dict(model, opt, options=options)))
                dcp.load(found, checkpoint_id=f"{folder}/{ranks.world}{i}")
                set_state_dict(model, opt, model_state_dict=found["m"], optim_state_dict=found["o"], options=options)
            wrong += [(through, WAYS[i])] * (not all(map(torch.equal, want, walk(model, opt, 2, 2))))
    return after, want, wrong


def optimizer_alone(ranks, folder: str):
    "What `checkpoints` saved on two ranks, on any number: the state that arrives, weights after two more steps."
    warnings.simplefilter("ignore")
    model, opt = fresh(8)
    found = dict(m=model.state_dict(), o=get_optimizer_state_dict(model, opt))
    dcp.load(found, checkpoint_id=f"{folder}/20")  # writes into the model's weights
    set_optimizer_state_dict(model, opt, found["o"])
    return opt.state_dict(), walk(model, opt, 2, 2)


def heard(call) -> list:
    "What golfnb logs during a call, and its GolfError."
    said, log = [], logging.getLogger("golfnb")
    handler = logging.Handler()
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


def rank_0_alone(ranks):
    "`if rank == 0: optimizer.load_state_dict(...)`, or `state_dict()`, while the others leave once rank 0 has warned: what is heard."
    (_, opt), (_, other) = fresh(0), fresh(1)
    state, store = opt.state_dict(), dist.distributed_c10d._get_default_store()
    if not ranks.is_rank0:
        return store.wait(["warned"])
    logging.getLogger("golfnb").addFilter(lambda record: store.set("warned", "") or True)
    opt.wait_for_ranks, other.wait_for_ranks = partial(opt.wait_for_ranks, patience=0.3), partial(other.wait_for_ranks, patience=600)
    return heard(opt.state_dict) + heard(lambda: other.load_state_dict(state))


def other_modules(ranks):
    "Rank 1 built another module, or made another call: what every rank is told."
    said = []
    for width, more in ((6, {}), (4, dict(max_norm=1.0))):
        odd = ranks.rank == 1
        try:
            ParallelMuon(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, width if odd else 4), nn.Linear(4, 2)), **(more if odd else {}))
        except GolfError as e:
            said.append(str(e))
    return "; ".join(said)


def half_replicas(ranks):
    "bf16 weights in the module, fp32 masters behind them: (bytes of the module's weights, losses, largest |master - weight| / |weight|)."
    model = build("vision").float()
    opt = ParallelMuon(model, **SETTINGS, replica_dtype=torch.bfloat16)
    losses = []
    for step in range(6):
        opt.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = model.loss(rows_of(0).chunk(ranks.world)[ranks.rank])
        loss.backward()
        opt.step()
        losses.append(loss.item())
    banked = hidden_matrices(model)
    masters = {n: opt.state_dict()["state"][i]["master"] for i, n in enumerate(opt.param_groups[0]["param_names"])}
    named = dict(model.named_parameters())
    assert all(named[n].dtype == torch.bfloat16 for n in banked) and all(p.dtype == torch.float32 for n, p in named.items() if n not in banked)
    apart = max(((masters[n] - named[n].float()).abs() / named[n].float().abs().clamp(min=1e-3)).max().item() for n in banked)
    return b"".join(named[n].detach().view(torch.int16).numpy().tobytes() for n in banked), losses, apart


def all_jobs(ranks, jobs: list) -> list:
    return [globals()[name](ranks, *args, **more) for name, args, more in jobs]


def run_ranks(world: int, jobs: list) -> list:
    "Results of every rank; world 1 runs here, without a process group."
    return spawn(world, "all_jobs", jobs, module="any_workers") if world > 1 else [all_jobs(Ranks(), jobs)]

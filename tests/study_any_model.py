"""One call against DDP and torch's optimizers, on a GPT-2 of plain torch: the figures of chapter 25.

    OUT=FOLDER PYTHONPATH=. torchrun --standalone --nproc_per_node=N tests/study_any_model.py [NAME=VALUE ...]

Names: layers, width, heads, vocab, length, rows (per rank), warm, rounds, block (GPT-2 124M unless given), compile (1 on CUDA, 0 on a CPU).
Variants, interleaved in one process: `ddp` (DistributedDataParallel, torch.optim.Muon, fused AdamW), `call` (ParallelMuon, `zero_grad()`),
`views` (ParallelMuon, `zero_grad(set_to_none=False)`), `bf16` (ParallelMuon with bf16 replicas). fp32 parameters under bf16 autocast.
`step` is a whole step by device events, `optimizer` the synchronised time from the end of backward to new weights (ddp's gradients travel
during backward, so compare `step`; `backward` is what is left of it). Writes FOLDER/any_model_N.json.
"""
import os
import sys
from statistics import median

import torch
import torch.nn.functional as F
from torch import nn

from golfnb.any_model import ParallelMuon, hidden_matrices
from golfnb.bench import record_result, run_rounds, slowest_rank, timed_block, wait_for
from golfnb.settings import GolfError
from golfnb.parallel_muon import Ranks, start_ranks, stop_ranks

SIZES = dict(layers=12, width=768, heads=12, vocab=50304, length=1024, rows=16, warm=8, rounds=6, block=10, compile=-1)
VARIANTS = ("ddp", "call", "views", "bf16")


class Block(nn.Module):
    def __init__(self, d: int, heads: int):
        super().__init__()
        self.heads, self.ln_1, self.ln_2 = heads, nn.LayerNorm(d), nn.LayerNorm(d)
        self.c_attn, self.c_proj = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.c_fc, self.c_out = nn.Linear(d, 4 * d), nn.Linear(4 * d, d)

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.c_attn(self.ln_1(x)).chunk(3, -1))
        x = x + self.c_proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.c_out(F.gelu(self.c_fc(self.ln_2(x)), approximate="tanh"))


class GPT2(nn.Module):
    def __init__(self, s: dict):
        super().__init__()
        d = s["width"]
        self.wte, self.wpe = nn.Embedding(s["vocab"], d), nn.Embedding(s["length"], d)
        self.h, self.ln_f = nn.ModuleList(Block(d, s["heads"]) for _ in range(s["layers"])), nn.LayerNorm(d)
        self.lm_head = nn.Linear(d, s["vocab"], bias=False)
        self.lm_head.weight = self.wte.weight
        for p in self.parameters():
            nn.init.normal_(p, std=0.02) if p.ndim == 2 else None

    def forward(self, ids, targets):
        x = self.wte(ids) + self.wpe.weight[:ids.shape[1]]
        for block in self.h:
            x = block(x)
        return F.cross_entropy(self.lm_head(self.ln_f(x)).flatten(0, 1).float(), targets.flatten())


class Trainer:
    "A model, its optimizers and a fixed batch."

    def __init__(self, variant: str, sizes: dict, ranks: Ranks):
        torch.manual_seed(0)
        self.ranks, self.variant = ranks, variant
        model = GPT2(sizes).to(ranks.device)
        if sizes["compile"]:
            model.compile()
        if variant == "ddp":
            names, named = set(hidden_matrices(model)), dict(model.named_parameters())
            self.run = nn.parallel.DistributedDataParallel(model) if ranks.world > 1 else model
            self.optimizers = [torch.optim.Muon([named[n] for n in names], lr=0.02, weight_decay=0.1),
                               torch.optim.AdamW([p for n, p in named.items() if n not in names], lr=3e-4, betas=(0.9, 0.95), fused=True)]
        else:
            self.run, self.optimizers = model, [ParallelMuon(model, replica_dtype=torch.bfloat16 if variant == "bf16" else None)]
        g = torch.Generator().manual_seed(ranks.rank)
        rows = torch.randint(sizes["vocab"], (sizes["rows"], sizes["length"] + 1), generator=g).to(ranks.device)
        self.ids, self.targets = rows[:, :-1], rows[:, 1:]

    def backward(self):
        for o in self.optimizers:
            o.zero_grad(set_to_none=self.variant != "views")
        with torch.autocast(self.ranks.device.type, torch.bfloat16):
            self.loss = self.run(self.ids, self.targets)
        self.loss.backward()

    def update(self):
        for o in self.optimizers:
            o.step()

    def step(self):
        self.backward()
        self.update()

    def block(self, count: int) -> dict[str, list[float]]:  # ms
        "`count` steps in a row, then three with a wait around each half."
        found = {"step": timed_block(self.step, count, self.ranks.device)[0], "backward": [], "optimizer": []}
        for _ in range(3):
            for name, half in (("backward", self.backward), ("optimizer", self.update)):
                self.ranks.barrier()
                found[name].append(timed_block(half, 1, self.ranks.device)[1])
        return found


def given_sizes(words: list[str], device: torch.device) -> dict:
    given = dict(w.split("=", 1) for w in words)
    if unknown := given.keys() - SIZES.keys():
        raise GolfError(f"unknown name {sorted(unknown)[0]}: expected one of {', '.join(SIZES)}")
    sizes = SIZES | {k: int(v) for k, v in given.items()}
    return sizes | {"compile": int(device.type == "cuda") if sizes["compile"] < 0 else sizes["compile"]}


def main(words: list[str]):
    ranks = start_ranks(timeout_s=300)
    torch.set_float32_matmul_precision("high")
    sizes, trainers, held, losses = given_sizes(words, ranks.device), {}, {}, {}
    for variant in VARIANTS:
        before = torch.cuda.memory_allocated() if ranks.device.type == "cuda" else 0
        trainers[variant] = Trainer(variant, sizes, ranks)
        first = None
        for _ in range(sizes["warm"]):
            trainers[variant].step()
            first = first or trainers[variant].loss.item()
        wait_for(ranks.device)
        losses[variant] = [first, trainers[variant].loss.item()]
        if ranks.device.type == "cuda":
            held[variant] = torch.cuda.memory_allocated() - before
    samples = slowest_rank(run_rounds(trainers, sizes["rounds"], lambda t: t.block(sizes["block"])), ranks)
    if ranks.master:
        for name, values in samples.items():
            print(f"{name:18s} median {median(values):9.3f} ms, least {min(values):9.3f}, of {len(values)}", flush=True)
        facts = {"ranks": ranks.world, "sizes": sizes, "held_bytes": held, "first_and_last_warm_loss": losses}
        record_result(f"any_model_{ranks.world}", samples, "ms", "GPT-2 of plain torch: DDP + torch.optim.Muon + AdamW against one call of ParallelMuon; slowest rank of each sample",
                      facts, os.environ.get("OUT", "nbs/results"))
    stop_ranks(ranks)


if __name__ == "__main__":
    main(sys.argv[1:])

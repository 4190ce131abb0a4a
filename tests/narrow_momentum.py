"""Curves of a small model whose momentum is kept in fp32 or in bf16, in pairs of one seed each.

    python tests/narrow_momentum.py [FOLDER]      writes narrow_momentum_cpu.json, in a minute or two on a CPU
"""
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from golfnb.muon.grouping import param_groups
from golfnb.muon.optimizer import ParallelMuon
from golfnb.tools.results import record_result

SEEDS, STEPS, EVERY, VOCAB, LENGTH, ROWS = (7, 42, 1337), 300, 20, 16, 32, 16


class Text:
    "A language in which two symbols decide how likely the next one is."

    def __init__(self):
        generator = torch.Generator().manual_seed(0)
        self.chances = torch.softmax(2.0 * torch.randn(VOCAB, VOCAB, VOCAB, generator=generator), -1)

    def rows(self, count: int, seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        found = [torch.randint(VOCAB, (count,), generator=generator) for _ in range(2)]
        while len(found) <= LENGTH:
            found.append(torch.multinomial(self.chances[found[-2], found[-1]], 1, generator=generator).view(-1))
        return torch.stack(found, 1)


class Layer(nn.Module):
    def __init__(self, d: int):
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(d), nn.RMSNorm(d)
        self.q, self.k, self.v, self.o = (nn.Linear(d, d, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(d, 4 * d, bias=False), nn.Linear(4 * d, d, bias=False)

    def forward(self, x):
        y = self.norm1(x)
        q, k, v = (part(y).unflatten(-1, (4, -1)).transpose(1, 2) for part in (self.q, self.k, self.v))
        x = x + self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(self.up(self.norm2(x)).relu().square())


class Model(nn.Module):
    def __init__(self, d: int = 64):
        super().__init__()
        self.table, self.place = nn.Embedding(VOCAB, d), nn.Embedding(LENGTH, d)
        self.layers, self.norm, self.head = nn.ModuleList(Layer(d) for _ in range(2)), nn.RMSNorm(d), nn.Linear(d, VOCAB, bias=False)

    def forward(self, rows):
        x = self.table(rows[:, :-1]) + self.place.weight
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), rows[:, 1:].flatten())


def optimizer_of(model: nn.Module, dtype: torch.dtype | None) -> ParallelMuon:
    groups = param_groups(model)
    for group in groups:
        if group["rule"] == "muon":
            group["state_dtype"] = dtype
    return ParallelMuon(groups, lr=0.02, adam_lr=3e-3)


def momentum_bytes(optimizer: ParallelMuon) -> float:
    "Bytes of momentum an element of Muon's matrices."
    kept = [state["momentum_buffer"] for state in optimizer.state.values() if "momentum_buffer" in state]
    return sum(t.nbytes for t in kept) / sum(t.numel() for t in kept)


def curve(text: Text, seed: int, dtype: torch.dtype | None) -> tuple[list[float], float]:
    "Losses on rows that are not trained on, and the bytes held."
    torch.manual_seed(seed)
    model, other = Model(), text.rows(256, 10**6)
    optimizer, found = optimizer_of(model, dtype), []
    peaks = [group["lr"] for group in optimizer.param_groups]
    for step in range(STEPS):
        for group, peak in zip(optimizer.param_groups, peaks):
            group["lr"] = peak * (1 - step / STEPS)
        model(text.rows(ROWS, 1000 * seed + step)).backward()
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % EVERY == 0:
            with torch.no_grad():
                found.append(model(other).item())
    return found, momentum_bytes(optimizer)


def main(folder: str = "nbs/results") -> None:
    text, samples, held = Text(), {}, {}
    for seed in SEEDS:
        for name, dtype in (("fp32", None), ("bf16", torch.bfloat16)):
            samples[f"{name}, seed {seed}"], held[name] = curve(text, seed, dtype)
            print(name, seed, samples[f"{name}, seed {seed}"][-1], flush=True)
    facts = {"seeds": SEEDS, "steps": [EVERY * (i + 1) for i in range(STEPS // EVERY)], "bytes_of_momentum_an_element": held,
             "elements": sum(p.numel() for p in Model().parameters())}
    note = "validation loss of two small transformers alike but for the dtype of Muon's momentum, on a language of two-symbol contexts; each pair has the same weights and rows"
    print(record_result("narrow_momentum_cpu", samples, "nats a symbol", note, facts, Path(folder)))


if __name__ == "__main__":
    main(*sys.argv[1:])

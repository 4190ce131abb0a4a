"""Where the bits should go: averaged weights quantized in many ways, at equal bytes of the file.

    python tests/by_hand/bits_study.py RUN "DATA/*_train_*.bin" DATA/..._val_000000.bin OUT.json [WAY ...]

RUN is the folder of a finished run of `golf`, for instance of `golfnb train --recipe golf` with
ITERATIONS=1500 WARMDOWN_ITERS=600 MAX_WALLCLOCK_SECONDS=0 TRAIN_BATCH_TOKENS=196608. Prints a
line for each way and size, and writes the samples that nbs/results/bits_*.json hold: loss and KL
to the unquantized model on the validation text, in nats a token, with quantiles over documents;
"choice", the KL of every second document, is for choosing between ways, and what is "judged" is
of the others. The last way is golfnb.file.bits as recipe `pr2135` has it, in a real file. WAYs that
are named are the only ones. Needs a GPU: about 7 minutes on an H100.
"""

import json
import math
import sys
import time
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

import golfnb.model.golf as model_module
from golfnb.file.artifact import (
    Best,
    Quick,
    ledger_rows,
    load_model,
    load_weights,
    open_container,
    pack_bytes,
)
from golfnb.file.bits import fit_trellis, sensitivities
from golfnb.model.layers import softcap
from golfnb.text.loader import CoprimeSampler
from golfnb.model.golf import (
    BLOCK_MATRICES,
    Block,
    load_named,
    make_block,
    model_from_settings,
    saved_settings,
)
from golfnb.model.engine import Ranks
from golfnb.file.quantize import (
    calibration_batches,
    dequantize_state,
    hessian_factor,
    pack_rows,
    quantize_state,
)
from golfnb.text.shards import find_shards, read_tokens
from golfnb.file.trellis import trellis_levels, trellis_path
from golfnb.file.trellis_file import dequantize_trellis

WHOLE, CODE = 16_000_000, 57_500  # bytes of a file, and of golf's packed script in it
SHARES = (1.0, 0.8, 1.25)
KIND = {
    "mlp": 12 / 31,
    "attn": 13 / 31,
    "tok": 15 / 63,
}  # steps in deviations of a row, as published (PR #1626)
EMB = "tok_emb.weight"
LOOKUPS = {
    "tok_emb": EMB,
    "bigram_table": "bigram.embed.weight",
    "ve_table": "ve_shared.embed.weight",
}


@dataclass(frozen=True)
class Way:
    "A way to choose steps, c * matrix * row * column, and to round; c sets the bytes."

    name: str
    matrix: str = "kind"  # kind: hand-set multiples; one: the same for all; fisher
    rows: str = (
        "std"  # std: a row's deviation; flat; fisher: its sensitivity ** (-power / 2), floored
    )
    power: float = 1.0
    floor: float = 0.0  # of the mean sensitivity
    cols: bool = False  # by the conditional variance that GPTQ's factor gives
    states: int = 0  # of the trellis; 0: plain rounding
    pull: float = 0.0  # rate-distortion: bits' price in squared steps
    hessian: str = "h"  # hw: positions weighted by the squared gradient of their outputs
    tables: str = "int8"  # bigram and value tables: int8, or fisher
    emb: str = "gptq"  # the embedding: as the matrices, or int8
    contexts: bool = False  # the coder knows which of the trellis' grids a weight uses


FISHER = dict(matrix="fisher", rows="fisher", cols=True)
WAYS = [
    Way("published"),
    Way("present", matrix="one", emb="int8"),
    Way("present, embedding too", matrix="one"),
    Way("published, rate-distortion", pull=0.1),
    Way("published, trellis 8", states=8),
    Way("published, trellis 32", states=32),
    Way("published, columns", cols=True),
    Way("weighted, published", hessian="hw"),
    Way("rows", rows="fisher", floor=0.1),
    Way("matrix", matrix="fisher"),
    Way("matrix, flat rows", matrix="fisher", rows="flat"),
    Way("matrix, columns", matrix="fisher", rows="flat", cols=True),
    Way("matrix, columns, rows 0.5", **FISHER, power=0.5),
    Way("matrix, columns, rows floored", **FISHER, floor=0.1),
    Way("weighted, matrix, columns, rows 0.5", **FISHER, power=0.5, hessian="hw"),
    Way("weighted, matrix, columns, rows floored", **FISHER, floor=0.1, hessian="hw"),
    Way("matrix, columns, rows 0.5, trellis 8", **FISHER, power=0.5, states=8),
    Way("matrix, columns, rows floored, trellis 8", **FISHER, floor=0.1, states=8),
    Way(
        "tables too: matrix, columns, rows floored, trellis 8",
        **FISHER,
        floor=0.1,
        states=8,
        tables="fisher",
    ),
    Way(
        "all: weighted, tables, floored, trellis 8, contexts",
        **FISHER,
        floor=0.1,
        states=8,
        tables="fisher",
        hessian="hw",
        contexts=True,
    ),
    Way(
        "all: weighted, tables, rows 0.5, trellis 8, contexts",
        **FISHER,
        power=0.5,
        states=8,
        tables="fisher",
        hessian="hw",
        contexts=True,
    ),
]
PRODUCT = Way("golfnb.file.bits, a real file")


class Watch:
    "Sums over positions: x^T x, squared gradients of outputs, x^T x weighted by these."

    def __init__(self):
        self.h, self.hw, self.g, self.lookups = {}, {}, {}, {}

    def linear(self, name, x, y):
        "Watch a product y of x [B, T, cols]."
        rows = x.detach().flatten(0, -2).float()
        self.add(self.h, name, rows.T @ rows)

        def arrived(grad):
            squares = grad.flatten(0, -2).float().square()
            self.add(self.g, name, squares.sum(0))
            self.add(self.hw, name, (rows * squares.mean(-1, keepdim=True)).T @ rows)

        y.register_hook(arrived)

    def lookup(self, name, ids, y, rows):
        "Watch what a table gives for `ids`."

        def arrived(grad):
            squares = grad.flatten(0, -2).float().square()
            per_row = torch.zeros(rows, device=grad.device).index_add_(
                0, ids.flatten(), squares.mean(-1)
            )
            self.add(self.lookups, f"{name}, rows", per_row)
            self.add(self.lookups, f"{name}, columns", squares.sum(0))

        y.register_hook(arrived)

    @staticmethod
    def add(sums, name, value):
        sums[name] = sums[name].add_(value) if name in sums else value


@dataclass(kw_only=True)
class WatchedBlock(Block):
    watch: Watch
    index: int

    def linear(self, x, weight, i):
        y = F.linear(x, weight)
        self.watch.linear(f"blocks.{self.index}.{BLOCK_MATRICES[i]}.weight", x, y)
        return y


class WatchedFunctions:
    "Stands for torch.nn.functional in the model's module: the head and the lookups are watched."

    def __init__(self, model, watch):
        self.model, self.watch = model, watch

    def linear(self, x, weight):
        y = F.linear(x, weight)
        if weight.shape == self.model.tok_emb.shape:
            self.watch.linear(EMB, x, y)
        return y

    def embedding(self, ids, table):
        y = F.embedding(ids, table)
        for attribute in self.model.tables:
            if table is getattr(self.model, attribute):
                self.watch.lookup(LOOKUPS[attribute], ids, y, len(table))
        return y


def calibrate(model, batches):
    "Means over positions of what `Watch` sums, labels drawn from the model's own predictions."
    watch, tokens = Watch(), 0
    generator = torch.Generator(model.tok_emb.device).manual_seed(0)
    blocks, kernels = model.blocks, model.kernels
    model.kernels = frozenset()
    model.blocks = [
        make_block(
            model.cfg, i, model.activation, model.attention, WatchedBlock, watch=watch, index=i
        )
        for i in range(model.cfg.num_layers)
    ]
    model_module.F = WatchedFunctions(model, watch)
    try:
        for ids in batches:
            logits = softcap(model(ids).float(), model.cap).flatten(0, 1)
            labels = torch.multinomial(logits.detach().softmax(-1), 1, generator=generator)
            F.cross_entropy(logits, labels.flatten(), reduction="sum").backward()
            for p in model.parameters():
                p.grad = None
            tokens += ids.numel()
    finally:
        model_module.F = F
        model.blocks, model.kernels = blocks, kernels
    g = {n: v / tokens for n, v in watch.g.items()}
    return {
        "g": g,
        "h": {n: v / tokens for n, v in watch.h.items()},
        "hw": {n: v / tokens / g[n].mean() for n, v in watch.hw.items()},
        "lookups": {n: v / tokens for n, v in watch.lookups.items()},
    }


def rounded(y, states, pull):
    "(indices, values in steps) of a column y [n, rows] in steps."
    if states:
        levels = trellis_path((2 * y).contiguous(), states)
        return levels >> 1, levels.to(y.dtype) / 2
    if pull:
        y = y / (1 + pull * 0.7213 / y.square().mean(1, keepdim=True).clamp_min(0.02))
    k = y.round()
    return k.int(), k


def gptq(w, rows, cols, upper, way, block=128):
    "GPTQ of w [n, rows, cols]: indices and values; steps are rows [n, rows] times cols."
    w = w.mT.contiguous()
    q, made = torch.empty(w.shape, dtype=torch.int32, device=w.device), torch.empty_like(w)
    for a in range(0, w.shape[1], block):
        part = w[:, a : a + block].clone()
        u, errors = upper[:, a : a + block, a : a + block], torch.empty_like(part)
        for j in range(part.shape[1]):
            step = rows * cols[:, a + j, None]
            q[:, a + j], value = rounded(part[:, j] / step, way.states, way.pull)
            made[:, a + j] = value * step
            errors[:, j] = (part[:, j] - value * step) / u[:, j, j, None]
            part[:, j + 1 :] -= u[:, j, j + 1 :, None] * errors[:, j, None]
        w[:, a + block :] -= upper[:, a : a + block, a + block :].mT @ errors
    return q.mT, made.mT


def coded_bytes(matrices, grids=None):
    "Bytes of integers coded as in chapter 11; those over 127 take two bytes more."
    sizes = []
    for fineness in (2, 3, 4, 6):
        levels = []
        for q in matrices:
            squares = q.double().square()
            r = (fineness / 2 * torch.log2(squares.mean(1) + 0.04)).round()
            even = squares / (4.0 ** (r / fineness))[:, None]
            levels.append(
                (r.int(), (fineness / 2 * torch.log2(even.mean(0) + 0.0004)).round().int())
            )
        context = torch.cat([(r[:, None] + c).flatten() for r, c in levels])
        context -= context.min()
        below = torch.bincount(context).cumsum(0)
        edge = int(below[-1]) // 1000
        high = min(int((below < int(below[-1]) - edge + 1).sum()), len(below) - 1)
        low = max(int((below <= edge).sum()), high - 63)
        context = (context - low).clamp(0, high - low)
        count = high - low + 1
        if grids is not None:
            context, count = context + count * grids, 2 * count
        symbols = torch.cat([q.flatten() for q in matrices])
        wide = symbols.abs() > 127
        table = torch.bincount(
            context.long() * 256 + torch.where(wide, 255, symbols + 127).long(),
            minlength=256 * count,
        )
        table = table.view(count, 256).double()
        share = (table / table.sum(1, keepdim=True).clamp_min(1)).clamp_min(2.0**-14)
        bits = -(table * torch.log2(share)).sum().item()
        frequencies = ((share * 2**14).floor() * (table > 0)).cpu().numpy().astype("<u2")
        sides = torch.cat([torch.cat(pair) for pair in levels]).cpu().numpy().astype(np.int8)
        tables = len(zlib.compress(frequencies.tobytes() + sides.tobytes(), 9))
        sizes.append(bits / 8 + tables + 2 * int(wide.sum()) + math.isqrt(len(symbols)) // 2)
    return min(sizes)


def quarters(steps):
    "Steps as whole numbers of quarter octaves."
    return (4 * torch.log2(steps)).round()


def step_bytes(logs):
    "Bytes of steps, given in quarter octaves about their median."
    return (
        len(zlib.compress(torch.cat(logs).cpu().numpy().astype(np.int8).tobytes(), 9))
        if logs
        else 0
    )


def kind_of(name):
    "Which of the published clips a matrix has."
    if name == EMB:
        return "tok"
    return "mlp" if ".mlp." in name else "attn"


def geometric_mean(x):
    return x.log().mean().exp()


class Job:
    "One model: its weights, what calibration found, and what each way makes of it."

    def __init__(self, named, found, device, small):
        self.named, self.found, self.device, self.factors = named, found, device, {}
        for name in [n for n in found["h"] if "c_q" in n]:
            for which in ("h", "hw"):  # keys and values have the queries' input
                for other in ("c_k", "c_v"):
                    found[which].setdefault(name.replace("c_q", other), found[which][name])
        self.matrices = [n for n in named if n in found["h"] and n != EMB]
        self.tables = [
            n for n in LOOKUPS.values() if n != EMB and n in named and named[n].numel() > small
        ]
        inside = {*self.matrices, EMB, *self.tables}
        packed = quantize_state(
            {n: w for n, w in named.items() if n not in inside}, False, small=small
        )
        self.rest, self.rest_bytes = dequantize_state(packed), len(pack_bytes(packed, {}, Best()))
        self.int8 = {n: pack_rows(n, named[n].cpu(), "int8") for n in (*self.tables, EMB)}
        self.int8_bytes = {
            n: coded_bytes([torch.from_numpy(p.data.astype(np.int32)).to(device)]) + p.scale.nbytes
            for n, p in self.int8.items()
        }

    def factor(self, way, name):
        key = way.hessian, name
        if key not in self.factors:
            self.factors[key] = hessian_factor(self.found[way.hessian][name])
        return self.factors[key]

    def rows_of(self, way, name, deviation):
        "Relative steps of a matrix' rows, and the sensitivity that stands for the matrix."
        g = self.found["g"][name].double()
        if name == EMB:  # looked up, too
            g = (
                g
                + self.found["lookups"][f"{EMB}, rows"].double()
                / self.found[way.hessian][name].diagonal().mean()
            )
        if way.rows == "fisher":
            floored = g.clamp_min(max(way.floor, 1e-4) * g.mean())
            rows = floored ** (-0.5 * way.power)
            return rows / geometric_mean(rows), g.mean() if way.power < 1 else geometric_mean(
                floored
            )
        rows = deviation if way.rows == "std" else torch.ones_like(deviation)
        return rows / geometric_mean(rows), g.mean()

    def matrices_of(self, way):
        "What a way gives to GPTQ."
        if way.emb == "gptq":
            return [*self.matrices, EMB]
        return self.matrices

    def rounded_tables(self, way, c):
        "Name -> (weights, bytes) of what has no Hessian, or is int8."
        found = {}
        for name in self.tables:
            if way.tables == "int8":
                found[name] = self.int8_table(name)
            else:
                found[name] = self.quantized_table(name, c)
        if way.emb == "int8":
            found[EMB] = self.int8_table(EMB)
        return found

    def int8_table(self, name):
        "Weights and bytes of a table as int8."
        return dequantize_state({name: self.int8[name]})[name], self.int8_bytes[name]

    def steps(self, way, c):
        "Name -> (row steps, column steps in the factor's order), and the bytes that they take."
        steps, logs = {}, []
        plain = 0
        for name in self.matrices_of(way):
            w = self.named[name]
            deviation = w.double().square().mean(1).sqrt().clamp_min(1e-12)
            rows, sensitivity = self.rows_of(way, name, deviation)
            variance = 1 / self.factor(way, name)[2].diagonal().square()
            if way.matrix == "fisher":
                size = (sensitivity * geometric_mean(variance)) ** -0.5
            else:
                size = geometric_mean(deviation)
                if way.matrix == "kind":
                    size = size * KIND[kind_of(name)]
            rows = rows * size * c
            cols = torch.ones_like(variance)
            if way.rows == "std" and way.matrix != "fisher":
                rows = rows.half().double()  # as our files have them
                plain += 2 * len(rows)
            else:
                log = quarters(rows)
                logs.append(log - log.median())
                rows = 2 ** (log / 4)
            if way.cols:
                log = quarters(variance**-0.5 / geometric_mean(variance**-0.5))
                logs.append(log)
                cols = 2 ** (log / 4)
            steps[name] = rows.float(), cols.float()
        return steps, plain + step_bytes(logs) + 2 * len(steps)

    def quantized_table(self, name, c):
        "A lookup table by the squared gradients of what it gives: (weights, bytes)."
        rows, cols = (
            self.found["lookups"][f"{name}, {side}"].double() for side in ("rows", "columns")
        )
        rows = quarters(c * rows.clamp_min(0.1 * rows.mean()) ** -0.5)
        cols = quarters((cols / cols.mean()).clamp_min(1e-3) ** -0.5)
        step = 2 ** (rows / 4)[:, None] * 2 ** (cols / 4)
        k = (self.named[name].double() / step).round()
        return (k * step).float(), coded_bytes([k.int()]) + step_bytes([rows - rows.median(), cols])

    @torch.no_grad()
    def encode(self, way, c):
        "(weights, bytes of the file, bytes of steps, bits of a matrix element)."
        steps, size = self.steps(way, c)
        state, indices, grids, spent = dict(self.rest), [], [], size
        shapes = {tuple(self.named[n].shape): [] for n in steps}
        for name in steps:
            shapes[tuple(self.named[name].shape)].append(name)
        for names in shapes.values():
            factors = [self.factor(way, n) for n in names]
            stack = torch.stack(
                [
                    self.named[n].masked_fill(dead, 0)[:, order]
                    for n, (order, dead, _) in zip(names, factors, strict=True)
                ]
            )
            rows, cols = (torch.stack([steps[n][side] for n in names]) for side in (0, 1))
            q, made = gptq(stack, rows, cols, torch.stack([f[2].float() for f in factors]), way)
            for i, (name, (order, _, _)) in enumerate(zip(names, factors, strict=True)):
                back = order.argsort()
                state[name] = made[i][:, back].bfloat16().float()
                indices.append(q[i][:, back])
                if way.contexts:
                    k = q[i].T.contiguous()
                    grids.append((trellis_levels(k, way.states) - 2 * k).T[:, back].flatten())
        coded = coded_bytes(indices, torch.cat(grids) if grids else None)
        size += coded + self.rest_bytes
        for name, (weights, more) in self.rounded_tables(way, c).items():
            state[name] = weights
            size += more
        return state, size + CODE, spent, 8 * coded / sum(q.numel() for q in indices)

    def first_constant(self, way, target):
        "The constant for about so many bytes, by the entropy of Gaussian rows."
        steps, _ = self.steps(way, 1.0)
        rows = [
            ((self.named[n][:, self.factor(way, n)[0]] / (r[:, None] * c)).square().mean(1), len(c))
            for n, (r, c) in steps.items()
        ]
        low, high = -40.0, 40.0
        for _ in range(40):
            middle = (low + high) / 2
            bits = sum(
                (0.5 * torch.log2(1 + 17.08 * x / 4**middle) * n).sum().item() for x, n in rows
            )
            if bits / 8 > target:
                low = middle
            else:
                high = middle
        return 2.0**high

    def fitted(self, way, target):
        "`encode` with the constant for `target` bytes, within 0.15 % after at most six tries."
        fixed = self.rest_bytes + CODE + sum(self.int8_bytes[n] for n in self.tables)
        if way.emb == "int8":
            fixed += self.int8_bytes[EMB]
        c = self.first_constant(way, target - fixed)
        best = None
        elements = sum(self.named[n].numel() for n in (*self.matrices, EMB))
        for _ in range(6):
            made = self.encode(way, c)
            if best is None or abs(made[1] - target) < abs(best[1] - target):
                best = made
            if abs(best[1] / target - 1) < 0.0015:
                break
            c *= 2 ** (8 * (made[1] - target) / (0.95 * elements))
        return best


class Scorer:
    "Nats of both models and the KL between them, summed by document."

    def __init__(self, model, named, tokens, seq_len, bos=1, rows=32):
        self.model, self.rows, device = model, rows, model.tok_emb.device
        n = (len(tokens) - 1) // seq_len
        ids = torch.from_numpy(tokens[: n * seq_len + 1].astype(np.int64)).to(device)
        self.x, self.y = ids[:-1].view(n, seq_len), ids[1:].view(n, seq_len)
        documents = (ids == bos).cumsum(0)[:-1]
        self.documents = documents - documents.min()
        self.reference = model_from_settings(saved_settings(model), model.compute, device)[0]
        load_named(self.reference, named)

    @torch.no_grad()
    def __call__(self, state):
        "fp64 [4, documents]: nats of the reference, of `state`, KL, tokens."
        load_named(self.model, state)
        out = torch.zeros(
            4, int(self.documents.max()) + 1, dtype=torch.float64, device=self.x.device
        )
        for a in range(0, len(self.x), self.rows):
            x, y = self.x[a : a + self.rows], self.y[a : a + self.rows]
            plain, coarse = (
                softcap(m(x).float(), m.cap).log_softmax(-1) for m in (self.reference, self.model)
            )
            kl = (plain.exp() * (plain - coarse)).sum(-1)
            nats = [-p.gather(-1, y[..., None])[..., 0] for p in (plain, coarse)]
            places = self.documents[a * x.shape[1] : a * x.shape[1] + x.numel()]
            for row, values in zip(out, (*nats, kl, torch.ones_like(kl)), strict=True):
                row.index_add_(0, places, values.flatten().double())
        return out.cpu().numpy()


class Product:
    "golfnb.file.bits: sensitivities, steps, trellis and file of recipe `pr2135`."

    def __init__(self, model, meta, named, batches, device):
        self.named, self.meta, self.ranks = named, meta, Ranks(0, 1, device)
        self.found = sensitivities(model, batches, self.ranks)

    def file(self, packed, shares):
        return pack_bytes(packed, self.meta | {"shares": shares}, Quick())

    def fitted(self, target):
        "As `Job.fitted`."

        def size(packed, shares):
            return CODE + len(self.file(packed, shares))

        small = self.meta["settings"]["small_tensor"]
        packed, shares = fit_trellis(self.named, self.found, target, size, small, self.ranks)
        file = self.file(packed, shares)
        parts = dict(ledger_rows(open_container(file)[0], len(file), CODE))
        weights = sum(w.numel() for w in self.named.values())
        steps = parts["row scales"] + parts["int6 weights"]  # rows', columns'
        return dequantize_trellis(packed), sum(parts.values()), steps, 8 * len(file) / weights


def judged(sums, moved, rng):
    "KL and loss a token of documents, and each with quantiles over draws of as many documents."
    reference, nats, kl, tokens = sums
    documents = len(tokens)
    draws = [
        np.bincount(rng.integers(0, documents, documents), minlength=documents) for _ in range(1000)
    ]
    draws = np.stack(draws)
    found = {}
    for what, values in (("kl", kl * moved), ("loss", (nats - reference) * moved)):
        quantiles = np.quantile((draws @ values) / (draws @ tokens), (0.025, 0.975))
        found[what] = [values.sum() / tokens.sum(), *quantiles]
    return found


def summary(found):
    "Samples of a result: each way at exactly the bytes asked for, moved along its curve."
    samples = {}
    for (name, share), a in found.items():
        b = found[name, 0.8 if share == 1.0 else 1.0]
        slope = math.log(a["sums"][2].sum() / b["sums"][2].sum()) / (a["bytes"] - b["bytes"])
        moved = math.exp(slope * (share * WHOLE - a["bytes"]))
        mine = judged(a["sums"], moved, np.random.default_rng(0))
        choice = a["sums"][:, 0::2]
        half = judged(a["sums"][:, 1::2], moved, np.random.default_rng(0))
        mine |= {f"judged {what}": values for what, values in half.items()}
        mine["choice"] = [choice[2].sum() * moved / choice[3].sum()]
        mine |= {what: [a[what]] for what in ("bytes", "steps", "bits")}
        mine["seconds"] = a["seconds"]
        samples |= {f"{name} | {share}: {what}": values for what, values in mine.items()}
    return samples


def main(run, train, val, out, *names):
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    path = Path(run) / "ema.golf"
    dtype = torch.float32
    if device.type == "cuda":
        dtype = torch.bfloat16
    model, meta, _ = load_model(path, dtype, device)
    named = {n: w.float().to(device) for n, w in load_weights(path)[1].items()}
    seq_len, small = meta["settings"]["train_seq_len"], meta["settings"]["small_tensor"]

    def sampler():
        return CoprimeSampler(find_shards(train), 0, 1, 16, seq_len, 7, 1)

    begin = time.perf_counter()
    job = Job(named, calibrate(model, calibration_batches(sampler(), 40, device)), device, small)
    scorer = Scorer(model, named, np.asarray(read_tokens(val)), seq_len)
    print(f"calibrated after {time.perf_counter() - begin:.1f} s", flush=True)
    begin = time.perf_counter()
    product = Product(model, meta, named, calibration_batches(sampler(), 20, device), device)
    print(f"the product after {time.perf_counter() - begin:.1f} s", flush=True)
    found = {}
    for way in (*WAYS, PRODUCT):
        if names and way.name not in names:
            continue
        for share in SHARES:
            start = time.perf_counter()
            if way is PRODUCT:
                state, size, steps, bits = product.fitted(share * WHOLE)
            else:
                state, size, steps, bits = job.fitted(way, share * WHOLE)
            middle = time.perf_counter()
            sums = scorer(state)
            found[way.name, share] = {
                "bytes": size,
                "steps": steps,
                "bits": bits,
                "sums": sums,
                "seconds": [middle - start, time.perf_counter() - middle],
            }
            loss, kl = ((sums[1] - sums[0]).sum() / sums[3].sum(), sums[2].sum() / sums[3].sum())
            print(
                f"{way.name} | {share}: {size:,.0f} bytes, {bits:.3f} bits, "
                f"loss {loss:.5f}, KL {kl:.5f}",
                flush=True,
            )
        Path(out).write_text(json.dumps(summary(found), indent=1))


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Rung 8, sliding windows: a token is scored with most of a window before it."""
import io
import json
import math
import sys
import time
from importlib.resources import files

import sentencepiece as spm
import torch
import torch.nn.functional as F
from torch import nn

from golfnb.file.artifact import Best, pack_bytes, unpack_bytes
from golfnb.score.evaluate import windows
from golfnb.muon.newton_schulz import quintic
from golfnb.file.quantize import dequantize_state, pack_rows

STRIDE = 64  # what a window scores: its last tokens
STEPS, ROWS, T = 200, 16, 128  # a step reads ROWS windows of T tokens
VOCAB, D, LAYERS, HEADS = 1024, 128, 2, 4
LR, MUON_LR, MOMENTUM = 0.02, 0.03, 0.9


def read(split):
    "The stories of a split as one text; the line in front is there to guess the first letter from."
    stories = sorted((files("golfnb") / "prose" / split).iterdir(), key=lambda path: path.name)
    return "\n" + "\n".join(story.read_text(encoding="utf-8") for story in stories)


def train_tokenizer(text):
    "A vocabulary of frequent pieces; what it lacks it writes as bytes, and every text comes back as it was."
    model = io.BytesIO()
    spm.SentencePieceTrainer.train(
        sentence_iterator=iter(text.split("\n")), model_writer=model, vocab_size=VOCAB, model_type="bpe",
        byte_fallback=True, normalization_rule_name="identity", remove_extra_whitespaces=False,
        add_dummy_prefix=False, user_defined_symbols=["\n", "\n\n"], minloglevel=2)
    return spm.SentencePieceProcessor(model_proto=model.getvalue())


def norm(x):
    return F.rms_norm(x, (x.shape[-1],))


def rotate(x):
    "Rotary positions: pairs of channels turn by an angle that grows with the position. x [rows, heads, T, head]"
    half = x.shape[-1] // 2
    angle = torch.outer(torch.arange(x.shape[-2]), 10_000.0 ** (-torch.arange(half) / half))
    a, b = x[..., :half], x[..., half:]
    return torch.cat((a * angle.cos() + b * angle.sin(), b * angle.cos() - a * angle.sin()), -1)


def weight(rows, cols):
    return torch.empty(rows, cols).uniform_(-(cols ** -0.5), cols ** -0.5)


def block(x, qkv, out, up, down):
    "Attention, then an MLP, each added to x."
    q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in F.linear(norm(x), qkv).chunk(3, -1))
    y = F.scaled_dot_product_attention(rotate(norm(q)), rotate(norm(k)), v, is_causal=True)
    x = x + F.linear(y.transpose(1, 2).flatten(2), out)
    return x + F.linear(F.relu(F.linear(norm(x), up)).square(), down)


class Model(nn.Module):
    "Tokens as vectors, the blocks, and the same table to read the guess from; four banks [LAYERS, rows, cols]."

    def __init__(self):
        super().__init__()
        self.embed = nn.Parameter(0.02 * torch.randn(VOCAB, D))
        blocks = [(weight(3 * D, D), torch.zeros(D, D), weight(3 * D, D), torch.zeros(D, 3 * D)) for _ in range(LAYERS)]
        self.banks = nn.ParameterList(torch.stack(matrices) for matrices in zip(*blocks, strict=True))

    def forward(self, ids):
        x = norm(self.embed[ids])
        for matrices in zip(*(bank.unbind() for bank in self.banks), strict=True):
            x = block(x, *matrices)
        return norm(x) @ self.embed.T


@torch.no_grad()
def muon_step(banks, momenta, rate):
    "Momentum, a look ahead, orthogonal, move: all matrices of a bank at once."
    for bank, momentum in zip(banks, momenta, strict=True):
        momentum.mul_(MOMENTUM).add_(bank.grad)
        scale = max(1, bank.shape[1] / bank.shape[2]) ** 0.5
        bank -= rate * MUON_LR * scale * quintic(bank.grad + MOMENTUM * momentum)


def next_batch(data):
    "Windows at random places: ids [ROWS, T] and what follows each of them."
    starts = torch.randint(len(data) - T, (ROWS, 1))
    window = data[starts + torch.arange(T + 1)]
    return window[:, :-1], window[:, 1:]


@torch.no_grad()
def bits_of(model, data):
    "Bits for all of `data` but its first id: windows of T move on by STRIDE, each scores what is new in it."
    starts, keeps = windows(len(data) - 1, T, STRIDE)
    nats = 0.0
    for start, keep in zip(starts.split(32), keeps.split(32), strict=True):
        window = data[start[:, None] + torch.arange(T + 1)]
        losses = F.cross_entropy(model(window[:, :-1]).transpose(1, 2), window[:, 1:], reduction="none")
        new = torch.arange(T) >= T - keep[:, None]                   # [windows, T]: what no window before has scored
        nats += losses[new].sum().item()
    return nats / math.log(2)


@torch.no_grad()
def through_file(model):
    "Write all weights as the bytes of a file and read them again; returns the size of the file."
    rows = {name: w.flatten(0, -2) for name, w in model.named_parameters()}  # banks: the rows of all their matrices
    kinds = {name: "int8" if name == "embed" else "int6" for name in rows}
    data = pack_bytes({name: pack_rows(name, w, kinds[name]) for name, w in rows.items()}, {}, Best())
    state = dequantize_state(unpack_bytes(data, Best())[1])
    for name, w in model.named_parameters():
        w.copy_(state[name].view_as(w))
    return len(data)


def climb(seed=0, steps=STEPS):
    "Train and score; the row of this rung."
    torch.manual_seed(seed)
    sp = train_tokenizer(read("train"))
    train, validation = (torch.tensor(sp.encode(read(split))) for split in ("train", "validation"))
    model = Model()
    momenta = [torch.zeros_like(bank) for bank in model.banks]
    adam = torch.optim.AdamW([model.embed], lr=LR, betas=(0.9, 0.95))
    begun = time.perf_counter()
    for step in range(steps):
        ids, targets = next_batch(train)
        loss = F.cross_entropy(model(ids).flatten(0, 1), targets.flatten())
        model.zero_grad()
        loss.backward()
        rate = max(0.1, min(1, 2 * (1 - step / steps)))  # all of it for half of the steps, then ever less
        muon_step(model.banks, momenta, rate)
        adam.param_groups[0]["lr"] = rate * LR
        adam.step()
    ms = 1000 * (time.perf_counter() - begun) / steps
    size = len(sp.serialized_model_proto()) + through_file(model)
    text_bytes = len(read("validation").encode()) - 1
    return {"bits per byte": bits_of(model, validation) / text_bytes, "ms a step": ms, "bytes": size}


if __name__ == "__main__":
    print(json.dumps(climb(*map(int, sys.argv[1:]))))  # python 08_sliding.py [SEED [STEPS]]

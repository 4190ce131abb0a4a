"""Rung 3, the block: attention looks back as far as it wants, and the blocks look one after the other."""
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

STEPS, ROWS, T = 200, 16, 128  # a step reads ROWS windows of T tokens
VOCAB, D, LAYERS, HEADS = 1024, 128, 2, 4
LR = 0.003


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
    return nn.Parameter(torch.empty(rows, cols).uniform_(-(cols ** -0.5), cols ** -0.5))


class Block(nn.Module):
    "Attention, then an MLP, each added to x; as `out` and `down` begin at zero, a new block adds nothing."

    def __init__(self):
        super().__init__()
        self.qkv, self.out = weight(3 * D, D), nn.Parameter(torch.zeros(D, D))
        self.up, self.down = weight(3 * D, D), nn.Parameter(torch.zeros(D, 3 * D))

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in F.linear(norm(x), self.qkv).chunk(3, -1))
        y = F.scaled_dot_product_attention(rotate(norm(q)), rotate(norm(k)), v, is_causal=True)
        x = x + F.linear(y.transpose(1, 2).flatten(2), self.out)
        return x + F.linear(F.relu(F.linear(norm(x), self.up)).square(), self.down)


class Model(nn.Module):
    "Tokens as vectors, the blocks, and the same table to read the guess from."

    def __init__(self):
        super().__init__()
        self.embed = nn.Parameter(0.02 * torch.randn(VOCAB, D))
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))

    def forward(self, ids):
        x = norm(self.embed[ids])
        for block in self.blocks:
            x = block(x)
        return norm(x) @ self.embed.T


def next_batch(data):
    "Windows at random places: ids [ROWS, T] and what follows each of them."
    starts = torch.randint(len(data) - T, (ROWS, 1))
    window = data[starts + torch.arange(T + 1)]
    return window[:, :-1], window[:, 1:]


@torch.no_grad()
def bits_of(model, data):
    "Bits for all of `data` but its first id, in windows of T."
    n = len(data) - 1
    missing = -n % T
    ids = F.pad(data[:-1], (0, missing)).view(-1, T)
    targets = F.pad(data[1:], (0, missing), value=-100).view(-1, T)  # cross_entropy passes -100 over
    nats = 0.0
    for x, y in zip(ids.split(32), targets.split(32), strict=True):
        nats += F.cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction="sum").item()
    return nats / math.log(2)


def climb(seed=0, steps=STEPS):
    "Train and score; the row of this rung."
    torch.manual_seed(seed)
    sp = train_tokenizer(read("train"))
    train, validation = (torch.tensor(sp.encode(read(split))) for split in ("train", "validation"))
    model = Model()
    adam = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.95))
    begun = time.perf_counter()
    for _ in range(steps):
        ids, targets = next_batch(train)
        loss = F.cross_entropy(model(ids).flatten(0, 1), targets.flatten())
        model.zero_grad()
        loss.backward()
        adam.step()
    ms = 1000 * (time.perf_counter() - begun) / steps
    size = len(sp.serialized_model_proto()) + sum(4 * p.numel() for p in model.parameters())
    text_bytes = len(read("validation").encode()) - 1
    return {"bits per byte": bits_of(model, validation) / text_bytes, "ms a step": ms, "bytes": size}


if __name__ == "__main__":
    print(json.dumps(climb(*map(int, sys.argv[1:]))))  # python 03_block.py [SEED [STEPS]]

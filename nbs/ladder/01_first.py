"""Rung 1, the first program: guess each byte from the eight before it."""
import json
import math
import sys
import time
from importlib.resources import files

import torch
import torch.nn.functional as F
from torch import nn

STEPS, ROWS, T = 200, 16, 128  # a step reads ROWS windows of T bytes
VOCAB, D, BEFORE = 256, 128, 8
LR = 0.003


def read(split):
    "The stories of a split as one text; the line in front is there to guess the first letter from."
    stories = sorted((files("golfnb") / "prose" / split).iterdir(), key=lambda path: path.name)
    return "\n" + "\n".join(story.read_text(encoding="utf-8") for story in stories)


class Model(nn.Module):
    "The last bytes as vectors side by side, one hidden layer, a guess."

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, D)
        self.hidden = nn.Linear(BEFORE * D, 4 * D)
        self.head = nn.Linear(4 * D, VOCAB)

    def forward(self, ids):
        x = F.pad(self.embed(ids), (0, 0, BEFORE - 1, 0))            # [rows, BEFORE - 1 + T, D]
        x = x.unfold(1, BEFORE, 1).flatten(2)                        # [rows, T, D * BEFORE]
        return self.head(F.relu(self.hidden(x)))


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
    train, validation = (torch.tensor(list(read(split).encode())) for split in ("train", "validation"))
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
    size = sum(4 * p.numel() for p in model.parameters())
    text_bytes = len(read("validation").encode()) - 1
    return {"bits per byte": bits_of(model, validation) / text_bytes, "ms a step": ms, "bytes": size}


if __name__ == "__main__":
    print(json.dumps(climb(*map(int, sys.argv[1:]))))  # python 01_first.py [SEED [STEPS]]

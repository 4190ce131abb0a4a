"""Record how a program of the ladder reads a text and goes on with it, into nbs/results/reading_cpu.json.

    python nbs/ladder/reading.py
"""
import math
import runpy
from pathlib import Path

import torch
import torch.nn.functional as F

from golfnb.tools.results import record_result

HERE = Path(__file__).resolve().parent
RUNG = "06_schedule"
BEGINNING = "The Adventure of the Six Napoleons"  # of an unseen story
WINDOW, MORE = 90, 60
NOTE = ("Bits that each piece of the beginning of an unseen story costs the program named in the facts, trained as the "
        "ladder trains it with seed 0, and the pieces with which it goes on.")


def trained(rung: str) -> tuple:
    "The model and the tokenizer of a rung, and its functions."
    space, kept = runpy.run_path(str(HERE / f"{rung}.py")), []
    score = space["bits_of"]
    space["climb"].__globals__["bits_of"] = lambda model, data: kept.append(model) or score(model, data)
    row = space["climb"](0)
    print(row)
    return kept[0], space["train_tokenizer"](space["read"]("train")), space["read"], row


def costs(model, ids: list[int]) -> list[float]:
    "Bits of every id but the first."
    window = torch.tensor([ids])
    with torch.no_grad():
        nats = F.cross_entropy(model(window[:, :-1])[0], window[0, 1:], reduction="none")
    return [round(x / math.log(2), 3) for x in nats.tolist()]


def go_on(model, ids: list[int], count: int) -> list[int]:
    "So many more ids, drawn a little below the model's own temperature."
    dice, ids, given = torch.Generator().manual_seed(0), list(ids), len(ids)
    for _ in range(count):
        with torch.no_grad():
            logits = model(torch.tensor([ids[-128:]]))[0, -1]
        ids.append(torch.multinomial((logits / 0.7).softmax(-1), 1, generator=dice).item())
    return ids[given:]


def main() -> None:
    model, sp, read, row = trained(RUNG)
    text = read("validation")
    ids = sp.encode(text[text.index(BEGINNING) - 1:])[:WINDOW + 1]  # the line before, to guess the first piece from
    pieces = [sp.decode([i]) for i in ids[1:]]
    new = go_on(model, ids, MORE)
    facts = {"program": f"{RUNG}.py", "pieces": pieces, "goes on": sp.decode(new), "bits per byte of the three stories": round(row["bits per byte"], 4)}
    record_result("reading_cpu", {"bits": costs(model, ids)}, "bits", NOTE, facts, HERE.parent / "results")


if __name__ == "__main__":
    main()

"""The figures of study 43: what a model's targets cost without the copy mixture and with it.

    python tests/by_hand/copy_study.py NAME NOTE --train TOKENS NATS --val TOKENS NATS [--adapted NATS]

TOKENS is a shard or a .npy of a text that begins with a document, NATS a .npy with what each of its tokens but
the first cost; --adapted has those of the validation text with adapters. Shares are fitted once on the
training text, which the model should have read rarely, and once on what has been scored before. NOTE says which model it was and what it had read. Writes
nbs/results/NAME.json, takes some seconds for each million tokens.
"""
import argparse
import time
from pathlib import Path

import numpy as np
import torch

from golfnb.score.adapters import document_spans
from golfnb.settings import require
from golfnb.studies.copying import DISTANCES, LENGTHS, continuations, document_gap, fitted_shares, match_classes, mixed_as_scored, mixed_nats, records
from golfnb.text.shards import BOS_ID, open_shard
from golfnb.tools.results import record_result


class Text:
    "Tokens, what they cost, and their guesses."

    def __init__(self, tokens: str, nats: str):
        self.nats = read_nats(nats)
        ids = np.load(tokens) if tokens.endswith(".npy") else open_shard(tokens)
        require(len(ids) > len(self.nats) and ids[0] == BOS_ID, f"{tokens}: expected a text that begins with token {BOS_ID} and is longer "
                f"than the {len(self.nats):,} targets of {nats}, found {len(ids):,} tokens that begin with {ids[0]}: take those that were scored")
        self.tokens = ids[:len(self.nats) + 1].astype(np.int64)
        self.spans = document_spans(torch.from_numpy(self.tokens), BOS_ID)
        began = time.perf_counter()
        self.guesses = continuations(self.tokens, self.spans)
        self.seconds = time.perf_counter() - began
        self.hit = self.guesses.token == self.tokens[1:]
        self.classes = match_classes(self.guesses, self.hit)


def read_nats(path: str) -> np.ndarray:
    nats = np.load(path).astype(np.float64).reshape(-1)
    require(bool(np.isfinite(nats).all()), f"{path}: expected a finite number for each target, found others: score every target")
    return nats


def groups(text: Text) -> dict[str, tuple[np.ndarray, list[str]]]:
    "By -> which group each target is in, and what the groups are called."
    distance = 1 + np.searchsorted(DISTANCES, text.guesses.distance, side="right")
    named = [f"{low:,} to {high - 1:,}" for low, high in zip((1, *DISTANCES), DISTANCES)]
    return {"length": (text.classes["length"], ["no match", *map(str, LENGTHS)]),
            "distance": (np.where(text.guesses.length > 0, distance, 0), ["no match", *named, f"{DISTANCES[-1]:,} on"]),
            "record": (records(text.guesses, text.hit), ["none", "wrong", "right"])}


def table(text: Text, group: np.ndarray, names: list[str], gains: dict[str, np.ndarray]) -> list[dict]:
    "A row for each group: its share of all targets, how often it is right, and what it adds to each mean difference."
    rows = []
    for number, name in enumerate(names):
        chosen = group == number
        if chosen.any():
            added = {scores: gain[chosen].sum() / len(group) for scores, gain in gains.items()}
            rows.append({"group": name, "targets": chosen.mean(), "right": text.hit[chosen].mean(), **added})
    return rows


def main():
    asked = argparse.ArgumentParser()
    asked.add_argument("name")
    asked.add_argument("note")
    asked.add_argument("--train", nargs=2, required=True)
    asked.add_argument("--val", nargs=2, required=True)
    asked.add_argument("--adapted")
    asked.add_argument("--folder", type=Path, default=Path("nbs/results"))
    asked = asked.parse_args()
    train, val = Text(*asked.train), Text(*asked.val)
    scores = {"plain": val.nats} | ({"adapted": read_nats(asked.adapted)} if asked.adapted else {})
    for name, nats in scores.items():
        require(len(nats) == len(val.nats), f"{name}: expected the {len(val.nats):,} targets of {asked.val[1]}, found {len(nats):,}: score the same text")
    samples = {name: [nats.mean()] for name, nats in scores.items()}
    gaps, gains, shares = [], {}, {}
    for by, classes in train.classes.items():
        count = max(classes.max(), val.classes[by].max()) + 1
        shares[by] = fitted_shares(train.nats, train.hit, classes, count)
        for name, nats in scores.items():
            ways = {"training": mixed_nats(nats, val.hit, shares[by][val.classes[by]]),
                    "scored": mixed_as_scored(nats, val.hit, val.classes[by], val.spans)}
            for fitted, mixed in ways.items():
                gap, half = document_gap(nats, mixed, val.spans)
                gains[f"{name}, {fitted}"] = mixed - nats
                samples[f"{name}, by {by}, {fitted}"] = [mixed.mean()]
                gaps.append({"scores": name, "by": by, "fitted": fitted, "classes": int((np.bincount(val.classes[by]) > 0).sum()), "gap": gap, "half_width": half})
                print(f"{name:8} by {by:26} fitted on {fitted:8} {nats.mean():.4f} -> {mixed.mean():.4f}: {gap:+.5f} +-{half:.5f}")
    tables = {by: table(val, group, names, gains) for by, (group, names) in groups(val).items()}
    lengths = {"training text": shares["length"].tolist()}
    for name, nats in scores.items():
        lengths[f"{name} scores"] = fitted_shares(nats, val.hit, val.classes["length"], len(shares["length"])).tolist()
    facts = {"train_targets": len(train.nats), "train_nats": train.nats.mean(), "targets": len(val.nats), "documents": len(val.spans),
             "seconds_to_guess": val.seconds, "gaps": gaps, "tables": tables, "shares_by_length": lengths}
    record_result(asked.name, samples, "nats a token", asked.note, facts, asked.folder)


if __name__ == "__main__":
    main()

"""The figures of study 41: the validation loss of finished runs, each with and without the canonical mask.

    python tests/by_hand/canonical_study.py RUN [RUN ...] --val SHARD --tokenizer MODEL

Writes nbs/results/study_canonical_cpu.json; the runs differ in their seeds alone.
"""
import argparse
import json
from pathlib import Path

import torch

from golfnb.file.artifact import load_model
from golfnb.text.shards import open_shard
from golfnb.tools.results import record_result
from golfnb.studies.canonical import canonical_mask, masked_nats, merging_pieces
from golfnb.tools.data import load_tokenizer


@torch.no_grad()
def losses(run: Path, ids: torch.Tensor, mask: torch.Tensor) -> tuple[float, float]:
    "Mean nats of the targets of rows ids [rows, T + 1], without the mask and with it."
    model, _, _ = load_model(run / "artifact.golf")
    total, none = torch.zeros(2, dtype=torch.float64), torch.zeros_like(mask)
    for rows in ids.split(16):
        logits = model(rows[:, :-1]).flatten(0, 1)
        for i, chosen in enumerate((none, mask)):
            total[i] += masked_nats(logits, rows[:, :-1].flatten(), rows[:, 1:].flatten(), chosen, model.cap).double().sum()
    plain, canonical = (total / ids[:, 1:].numel()).tolist()
    return plain, canonical


def main():
    asked = argparse.ArgumentParser()
    asked.add_argument("runs", nargs="+", type=Path)
    asked.add_argument("--val", required=True)
    asked.add_argument("--tokenizer", required=True)
    asked = asked.parse_args()
    summaries = [json.loads((run / "summary.json").read_text()) for run in asked.runs]
    meta = load_model(asked.runs[0] / "artifact.golf")[1]["settings"]
    sp = load_tokenizer(asked.tokenizer, meta["vocab_size"])
    mask = canonical_mask(*merging_pieces(sp))
    stream, row = torch.from_numpy(open_shard(asked.val).astype("int64")), meta["train_seq_len"]
    rows = (len(stream) - 1) // row
    ids = stream[torch.arange(rows)[:, None] * row + torch.arange(row + 1)]
    found = [losses(run, ids, mask) for run in asked.runs]
    facts = {"steps": summaries[0]["steps"], "targets": rows * row, "vocab": len(mask), "pairs": mask.double().mean().item(),
             "hit": int(mask[stream[:-1], stream[1:]].sum()), "seeds": len(found)}
    record_result("study_canonical_cpu", {"plain": [a for a, _ in found], "mask": [b for _, b in found]}, "nats a token",
                  "recipe demo with two blocks of 64 channels and 2,048 tokens a step, the file's weights, whole validation text in plain rows", facts)


if __name__ == "__main__":
    main()

"""Record the ladder of bits: compressors, then every rung with three seeds, into nbs/results/ladder_bits_cpu.json.

    python nbs/ladder/climb.py

What is recorded of a program that has not changed since stays; remove the file to record all of it anew.
"""
import hashlib
import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import torch

from golfnb.settings import GolfError
from golfnb.tools.results import read_result, record_result

HERE = Path(__file__).resolve().parent
RESULTS = HERE.parent / "results"
NAME = "ladder_bits_cpu"
FIRST, *RUNGS = sorted(HERE.glob("[0-9][0-9]_*.py"))
SEEDS = (0, 1, 2)
INSTRUCTIONS = ("default", "avx2", "avx512")  # what PyTorch's own loops may use, ATEN_CPU_CAPABILITY
NOTE = ("Bits per byte of the stories in golfnb/prose/validation, for compressors and for each program of nbs/ladder, "
        "which trains on golfnb/prose/train: one value a seed.")


def run(rung: Path, seed: int, *steps: int, **environment: str) -> dict:
    "The row that a rung's program prints."
    words = [sys.executable, str(rung), str(seed), *map(str, steps)]
    done = subprocess.run(words, env={**os.environ, **environment}, check=True, stdout=subprocess.PIPE, text=True)
    print(f"{rung.stem:12s} seed {seed}", *steps, environment or "", done.stdout.strip(), flush=True)
    return json.loads(done.stdout)


def fingerprint(rung: Path) -> str:
    return hashlib.sha256(rung.read_bytes()).hexdigest()[:16]


class Record:
    "The result file: what it holds of unchanged programs, and what is added."

    def __init__(self):
        try:
            found = read_result(NAME, RESULTS)
        except GolfError:
            found = {"samples": {}, "facts": {"programs": {}, "ten steps": {}, "wins with": {}}}
        self.samples, self.facts = found["samples"], found["facts"]

    def forget_changed(self) -> None:
        "Drop the rows of programs that have changed."
        known = self.facts["programs"]
        for rung in RUNGS:
            if known.get(rung.stem) == fingerprint(rung):
                continue
            own = [name for name in self.samples if name.startswith(f"{rung.stem}:")]
            for name in own:
                del self.samples[name]
            for rows in (self.facts["ten steps"], self.facts["wins with"]):
                rows.pop(rung.stem, None)
            known[rung.stem] = fingerprint(rung)

    def add(self, rung: Path, row: dict) -> None:
        for what, value in row.items():
            self.samples.setdefault(f"{rung.stem}: {what}", []).append(value)
        self.write()

    def count(self, rung: Path) -> int:
        return len(self.samples.get(f"{rung.stem}: bits per byte", []))

    def write(self) -> None:
        self.facts["load average"] = round(os.getloadavg()[1], 1)  # more than the cores, and the milliseconds waited
        record_result(NAME, self.samples, "as each name says", NOTE, self.facts, RESULTS)


def first_win(samples: dict) -> Path:
    "The first rung that needs fewer bits than primed xz with every seed."
    (limit,) = samples["primed xz: bits per byte"]
    return next(rung for rung in RUNGS if max(samples[f"{rung.stem}: bits per byte"]) < limit)


def main() -> None:
    record = Record()
    record.forget_changed()
    for name, bits in runpy.run_path(str(FIRST))["compressors"]().items():
        record.samples[f"{name}: bits per byte"] = [bits]
    record.facts["instructions"] = torch.backends.cpu.get_cpu_capability()
    for seed in SEEDS:
        for rung in RUNGS:
            if record.count(rung) == SEEDS.index(seed):  # else it has been recorded before
                record.add(rung, run(rung, seed))
    for rung in RUNGS:
        if rung.stem not in record.facts["ten steps"]:
            record.facts["ten steps"][rung.stem] = run(rung, SEEDS[0], 10)["bits per byte"]
    wins = first_win(record.samples)
    kinds = record.facts["wins with"].setdefault(wins.stem, {})
    for kind in INSTRUCTIONS:
        if kind not in kinds:
            kinds[kind] = [run(wins, seed, ATEN_CPU_CAPABILITY=kind)["bits per byte"] for seed in SEEDS]
            record.write()


if __name__ == "__main__":
    main()

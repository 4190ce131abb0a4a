"""Record the ladder of bits: compressors, then every rung with three seeds, into nbs/results/ladder_bits_cpu.json.

    python nbs/ladder/climb.py
"""
import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import torch

from golfnb.studies.bench import record_result

HERE = Path(__file__).resolve().parent
FIRST, *RUNGS = sorted(HERE.glob("[0-9][0-9]_*.py"))
SEEDS = (0, 1, 2)
INSTRUCTIONS = ("default", "avx2", "avx512")  # what PyTorch's own loops may use, ATEN_CPU_CAPABILITY
NOTE = ("Bits per byte of the stories in golfnb/prose/validation: compressors, and each program of nbs/ladder, "
        "trained on golfnb/prose/train, one value a seed. Times are of a machine that others used, too.")


def run(rung: Path, seed: int, steps: int | None = None, **environment: str) -> dict:
    "The row that a rung's program prints."
    words = [str(seed)] + [str(steps)] * (steps is not None)
    done = subprocess.run([sys.executable, str(rung), *words], env={**os.environ, **environment}, check=True,
                          stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout)


def first_win(samples: dict) -> str:
    "The first rung that needs fewer bits than primed xz with every seed."
    (limit,) = samples["primed xz: bits per byte"]
    return next(rung.stem for rung in RUNGS if max(samples[f"{rung.stem}: bits per byte"]) < limit)


def main() -> None:
    needed = runpy.run_path(str(FIRST))["compressors"]()
    samples = {f"{name}: bits per byte": [bits] for name, bits in needed.items()}
    facts = {"seeds": SEEDS, "instructions": torch.backends.cpu.get_cpu_capability(), "ten steps": {}, "wins with": {}}

    def record() -> None:
        unit = "as each name says"
        record_result("ladder_bits_cpu", samples, unit, NOTE, facts, HERE.parent / "results")

    for seed in SEEDS:
        for rung in RUNGS:
            row = run(rung, seed)
            for what, value in row.items():
                samples.setdefault(f"{rung.stem}: {what}", []).append(value)
            print(f"seed {seed} {rung.stem:12s}", row, flush=True)
            record()
    facts["ten steps"] = {rung.stem: run(rung, SEEDS[0], 10)["bits per byte"] for rung in RUNGS}
    wins = facts["wins first"] = first_win(samples)
    for kind in INSTRUCTIONS:
        rows = [run(HERE / f"{wins}.py", seed, ATEN_CPU_CAPABILITY=kind) for seed in SEEDS]
        facts["wins with"][kind] = [row["bits per byte"] for row in rows]
        print(wins, "with", kind, facts["wins with"][kind], flush=True)
        record()


if __name__ == "__main__":
    main()

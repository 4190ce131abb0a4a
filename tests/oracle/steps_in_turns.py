"""What a step of several scripts costs, on one GPU or CPU, in one process and in turns.

    python tests/oracle/steps_in_turns.py FOLDER NAME PAIRS first=SCRIPT second=SCRIPT ...

Settings come from the environment, as for the scripts. Each script trains in a thread of its own,
and one of them runs at a time: all compile one after the other, then each makes three steps, PAIRS
times around. The result, FOLDER/NAME.json, has the milliseconds of a step in each block, the loss
of every step, the ratio to the first script (median, and its upper 95 % bound by bootstrap), and
on a GPU the kernels and launches of a step. A script may be one of the oracle's too.
"""
import importlib.util
import os
import statistics
import sys
import tempfile
import threading
import time
import types
from collections import Counter
from pathlib import Path

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

from golfnb.tools.results import record_result

BLOCK = 3  # steps
LEAD = 3  # steps of the training before the first block


class Enough(Exception):
    "All blocks are measured."


class Turns:
    "Lets one of several threads run at a time, in their order."

    def __init__(self, count: int):
        self.changed = threading.Condition()
        self.waiting = list(range(count))

    def wait(self, who: int):
        with self.changed:
            self.changed.wait_for(lambda: self.waiting[0] == who)

    def hand_on(self):
        with self.changed:
            self.waiting.append(self.waiting.pop(0))
            self.changed.notify_all()

    def leave(self):
        with self.changed:
            self.waiting.pop(0)
            self.changed.notify_all()


class Timed:
    "A script, and what its steps took."

    def __init__(self, name: str, script: str, who: int, turns: Turns, blocks: int, folder: Path):
        self.name = name
        self.who = who
        self.turns = turns
        self.blocks = blocks
        copy = folder / f"{name}.py"
        # every script registers its kernels as operators, and a process has each name once
        copy.write_text(Path(script).read_text().replace('f"golfnb::', f'f"{name}::'))
        self.path = copy
        self.samples: list[float] = []
        self.losses: list[float] = []
        self.launches: Counter = Counter()
        self.kernels = 0
        self.calls = 0
        self.problem: BaseException | None = None

    def run(self):
        "Train until all blocks are measured."
        self.turns.wait(self.who)
        try:
            self.train(self.load())
        except Enough:
            pass
        except BaseException as error:
            self.problem = error
        self.turns.leave()

    def load(self) -> types.ModuleType:
        spec = importlib.util.spec_from_file_location(self.name, self.path)
        assert spec and spec.loader
        module = importlib.util.module_from_spec(spec)
        sys.modules[self.name] = module
        spec.loader.exec_module(module)
        return module

    def train(self, module: types.ModuleType):
        "One run of the script in this thread; a script of the oracle has its step in the trainer."
        os.environ["RUN_ID"] = self.name
        ranks = module.start_ranks()
        if hasattr(module, "load_config"):
            settings = module.load_config(os.environ)
            module.Trainer.step = self.timed(module.Trainer.step, settings.warmup_steps)
            module.run(settings, ranks)
        else:
            settings = module.read_settings(module.Settings, module.OWN, os.environ)
            module.step = self.timed(module.step, settings.warmup_steps)
            module.main(module.open_run(settings, ranks))

    def timed(self, step, rehearsed: int):
        "A step measured in blocks after the rehearsal; the next script goes on after each block."
        begun = 0.0

        def measured(*words):  # the last one is the trainer
            nonlocal begun
            done = self.calls - rehearsed - LEAD
            self.calls += 1
            if done >= 0 and done % BLOCK == 0:
                synchronize()
                if done:
                    self.samples.append(1000 * (time.perf_counter() - begun) / BLOCK)
                if done == self.blocks * BLOCK:
                    self.count(lambda: step(*words))
                    self.losses = [float(loss) for loss in words[-1].losses]
                    raise Enough
                self.turns.hand_on()
                self.turns.wait(self.who)
                synchronize()
                begun = time.perf_counter()
            return step(*words)

        return measured

    def count(self, step):
        "Count what one step launches."
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
            step()
            synchronize()
        for event in profiled.events():
            if event.name.startswith("cu") and "Launch" in event.name:
                self.launches[event.name] += 1
            on_gpu = event.device_type == torch.autograd.DeviceType.CUDA
            if on_gpu and not event.name.startswith(("Memcpy", "Memset")):
                self.kernels += 1


def synchronize():
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def ratio(first: list[float], other: list[float]) -> dict[str, float]:
    "Of the steps, block by block: the median, and the upper 95 % bound of it by bootstrap."
    ratios = np.array(other) / np.array(first)
    drawn = np.random.default_rng(0).choice(ratios, (10_000, len(ratios)))
    return {"median_ratio": float(np.median(ratios)),
            "upper_95": float(np.quantile(np.median(drawn, axis=1), 0.95))}


def main(folder: str, name: str, pairs: str, *scripts: str):
    turns = Turns(len(scripts))
    with profile():  # the profiler must be used in the main thread first
        synchronize()
    with tempfile.TemporaryDirectory() as copies:
        runs = [Timed(*word.split("=", 1), who, turns, int(pairs), Path(copies))
                for who, word in enumerate(scripts)]
        threads = [threading.Thread(target=run.run) for run in runs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for run in runs:
        if run.problem:
            raise SystemExit(f"{run.name}: {run.problem!r}")
        middle = statistics.median(run.samples)
        print(f"{run.name}: median {middle:.2f} ms a step, {run.kernels} kernels")
    facts = {"steps_a_block": BLOCK,
             "ratios": {run.name: ratio(runs[0].samples, run.samples) for run in runs[1:]},
             "kernels": {run.name: run.kernels for run in runs},
             "launches": {run.name: dict(run.launches) for run in runs},
             "losses": {run.name: run.losses for run in runs}}
    note = f"a step of scripts, blocks of {BLOCK} steps, in turns, in one process"
    samples = {run.name: run.samples for run in runs}
    print(record_result(name, samples, "ms", note, facts, Path(folder)))


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Many short trainings in one process: the skip gates of modded-nanogpt #125, its bf16 switches one by one, and PR #399's compatibility table.

    RECIPE=pr549 DATA_PATH=... TOKENIZER_PATH=... PYTHONPATH=. torchrun --standalone --nproc_per_node=N tests/study_gates.py gates|dtypes|averaging

`gates`: five ways to start the U-Net skips; `dtypes`: everything fp32 but the banks, then each switch to bf16 by itself, then all; both validate every
STUDY_VAL steps. `averaging`: as many steps as STUDY_SECONDS of wall time give the fast and the plain optimizer (their ms a step from STUDY_FAST_MS and
STUDY_PLAIN_MS), one run each, every average of it scored, and TTT on each.

Read from the environment beside the settings: STUDY_STEPS (300), STUDY_SEEDS (1337,42,2025), STUDY_VAL (50), STUDY_TOKENS (validation tokens, 1048576),
STUDY_MINUTES (begin no further run that may end later; 0: no limit), OUT (folder, nbs/results). Every finished run is written at once into
OUT/study_WHAT_DEVICE_N.json (what lies in nbs/results is carried on); a second call does what is missing. One model is compiled for all runs whose graph is the same.
"""
import gc
import os
import re
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from golfnb.averaging import average_of
from golfnb.bench import bench_stream, changed_settings, commit_of, read_result, record_result
from golfnb.config import Config, GolfError, load_config
from golfnb.evaluate import plain_loss
from golfnb.loader import Loader, make_sampler
from golfnb.model import init_model, load_named, named_state
from golfnb.parallel_muon import Ranks, engine_gather, engine_tensors, make_engine, start_ranks, stop_ranks
from golfnb.run import Machine, build_machine, device_name
from golfnb.shards import find_shards
from golfnb.train import RunLog, train
from golfnb.ttt import score_first

HOME = Path(__file__).resolve().parent.parent / "nbs" / "results"
GATES = ("one", "0.18", "zero", "frozen", "sigmoid")
WIDE = dict(table_dtype="fp32", state_dtype="fp32", buffer_dtype="fp32")
DTYPES = {"all fp32": dict(WIDE, matrix_dtype="fp32"), "bf16 matrices": WIDE} | {f"bf16 matrices and {k.removesuffix('_dtype')}": dict(WIDE, **{k: "bf16"}) for k in WIDE} | {"all bf16": dict.fromkeys(WIDE, "bf16")}
MODES = ("ema", "swa", "ema+swa", "none")


@dataclass
class Job:
    "One training run."
    label: str
    cfg: Config


def jobs_of(what: str, cfg: Config, env: dict) -> list[Job]:
    "The runs of a study, seeds in the outer loop: cut off, it still compares like with like."
    seeds = [int(s) for s in env.get("STUDY_SEEDS", "1337,42,2025").split(",")]
    steps, published = int(env.get("STUDY_STEPS", 300)), cfg.warmdown_iters
    cfg = replace(cfg, iterations=steps, warmdown_iters=min(cfg.warmdown_iters, steps * 2 // 5), max_wallclock_seconds=0.0, averaging="none",
                  warmup_steps=0, val_loss_every=int(env.get("STUDY_VAL", 50)))
    if what == "gates":
        kinds = {g: dict(skip_gate=g) for g in GATES}
    elif what == "dtypes":
        kinds = DTYPES
    elif what == "averaging":
        ms = {name: float(env[f"STUDY_{name.upper()}_MS"]) for name in ("fast", "plain")}
        budget = 1e3 * float(env["STUDY_SECONDS"])
        warmdown = int(budget / max(ms.values())) * 2 // 5
        often = max(1, min(cfg.swa_every, cfg.swa_every * warmdown // published))  # as many snapshots as a run of full length takes
        kinds = {name: dict(iterations=int(budget / each), averaging="ema+swa", warmdown_iters=warmdown, swa_every=often, val_loss_every=0) for name, each in ms.items()}
    else:
        raise GolfError(f"a study is gates, dtypes or averaging: found {what!r}")
    return [Job(f"{kind} seed {seed}", replace(cfg, seed=seed, **change)) for seed in seeds for kind, change in kinds.items()]


class Machines:
    "A compiled model for each graph; every run gets fresh weights and an engine of its own."

    def __init__(self, ranks: Ranks):
        self.ranks, self.kept = ranks, {}

    def get(self, cfg: Config) -> Machine:
        key = (tuple(cfg.model_settings().items()), *(getattr(cfg, f"{k}_dtype") for k in ("matrix", "table", "buffer")))
        key = tuple((k, "channel" if k == "skip_gate" and v != "sigmoid" else v) for k, v in key[0]), *key[1:]
        if key not in self.kept:
            self.kept[key] = build_machine(cfg, self.ranks)
        m = self.kept[key]
        init_model(m.model, cfg, cfg.seed)
        m.engine = make_engine(m.model, m.layout, cfg, self.ranks)
        return m

    def let_go(self) -> None:
        "Drop the engines; the compiled models stay."
        for m in self.kept.values():
            m.engine = None
        gc.collect()  # an engine and its recordings hold each other


def run_one(job: Job, machines: Machines, ranks: Ranks, paths: list, stream, table) -> dict[str, list[float]]:
    "Train once; series of the run."
    cfg = job.cfg
    machines.let_go()
    m, vals = machines.get(cfg), []
    rows = cfg.rows_per_score(ranks.world, cfg.train_seq_len)

    def score():
        m.model.eval()
        out = plain_loss(m.forward, stream, table, cfg.train_seq_len, rows, ranks)
        m.model.train()
        return out

    def validate():
        vals.append(score())
        return vals[-1]

    with Loader(make_sampler(cfg, paths, ranks.rank, ranks.world), ranks.device, cfg.vocab_size) as loader:
        result = train(cfg, m.loss_fn, loader, m.engine, RunLog(quiet=True), validate)
    found = {"train": result.losses, "val": [v[0] for v in vals], "val_bpb": [v[1] for v in vals], "step_ms": [result.train_ms / result.steps],
             "skipped": [result.skipped]}
    if cfg.averaging == "ema+swa":
        found |= average_scores(m, result, cfg, ranks, stream, table, score)
    return found


def average_scores(m: Machine, result, cfg: Config, ranks: Ranks, stream, table, score) -> dict[str, list[float]]:
    "Every average of one run: plain validation, and score-first TTT on it."
    kept = result.averages
    states = {mode: named_state(m.model, *engine_gather(m.engine, average_of(mode, kept.ema, kept.swa, engine_tensors(m.engine)))) for mode in MODES}
    found = {}
    for mode, state in states.items():
        load_named(m.model, state)
        found[f"{mode}"], found[f"{mode}_bpb"] = ([x] for x in score())
    for mode, state in states.items():
        loss, bpb, _ = score_first(m.model, m.layout, state, stream, table, cfg, ranks, forward=m.forward)
        found[f"{mode}_ttt"], found[f"{mode}_ttt_bpb"] = [loss], [bpb]
    return found


def read_state(name: str, folder: Path, facts: dict) -> tuple[dict, dict]:
    "Samples of an earlier call and the commit of each run; GolfError when its settings were others."
    if not (folder / f"{name}.json").is_file():
        return {}, {}
    found = read_result(name, folder)
    commits = found["facts"].pop("commits")
    if found["facts"] != facts:
        raise GolfError(f"{folder / name}.json was measured with other settings; move it away, or set OUT to another folder")
    return found["samples"], commits


def main(what: str, env=os.environ) -> None:
    ranks, began, longest = start_ranks(timeout_s=600.0), time.time(), 0.0
    cfg, folder = load_config(env), Path(env.get("OUT", HOME))
    jobs = jobs_of(what, cfg, env)
    for job in jobs:
        job.cfg.check(ranks.world)
    paths = find_shards(Path(cfg.data_path) / "fineweb_train_*.bin")
    stream, table, words = bench_stream(cfg, ranks, int(env.get("STUDY_TOKENS", 1 << 20)), given=True)
    device = re.sub(r"[^a-z0-9]+", "_", device_name(ranks).lower().removeprefix("nvidia ")).strip("_")
    facts = {"study": what, "world": ranks.world, "data": words, "val_tokens": stream.numel() - 1, "steps": jobs[0].cfg.iterations, "warmdown": jobs[0].cfg.warmdown_iters,
             "val_every": jobs[0].cfg.val_loss_every, "settings": changed_settings(cfg)}
    facts |= {k.lower(): env[k] for k in ("STUDY_FAST_MS", "STUDY_PLAIN_MS", "STUDY_SECONDS") if what == "averaging"}
    name, machines = f"study_{what}_{device}_{ranks.world}", Machines(ranks)
    samples, commits = ranks.broadcast_object(read_state(name, folder, facts) if ranks.master else None)
    for job in jobs:
        if f"{job.label} train" in samples:
            continue
        limit = 60 * float(env.get("STUDY_MINUTES", 0))
        if ranks.broadcast_object(bool(limit and longest and time.time() - began + 1.2 * longest > limit)):
            print(f"{job.label}: not begun, the time is up; call again to go on", flush=True) if ranks.master else None
            break
        start = time.time()
        samples |= {f"{job.label} {k}": v for k, v in run_one(job, machines, ranks, paths, stream, table).items()}
        longest, commits[job.label] = max(longest, time.time() - start), commit_of(HOME.parent.parent)
        if ranks.master:
            record_result(name, samples, "nats per token", f"study {what}: mean training loss of every step, validation loss; ms a step", facts | {"commits": commits}, folder)
            last = samples[f"{job.label} val"] or samples[f"{job.label} ema"]
            print(f"{job.label}: {last[-1]:.4f} nats, {time.time() - start:.0f} s", flush=True)
    stop_ranks(ranks)


if __name__ == "__main__":
    try:
        main(sys.argv[1] if len(sys.argv) > 1 else "")
    except (GolfError, KeyError) as e:
        print(f"study_gates: {e if isinstance(e, GolfError) else f'set {e.args[0]}'}", file=sys.stderr, flush=True)
        os._exit(2)

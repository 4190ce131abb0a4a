"""What issue 3 asks of real ranks, in one call: recipes, the wall-clock cap, faults, one artifact scored on one rank, several, and the CPU.

    DATA_PATH=... TOKENIZER_PATH=... PYTHONPATH=. python3 tests/study_acceptance.py NPROC FOLDER [PART ...] [NAME=VALUE ...]

Parts: recipes (pr399 and pr726 for 300 steps, with scores), clock (30 s cap, every rank's last step), nan, kill, truncate
(a rank's gradient is not finite; a rank is killed; a shard is cut off; all under a running job), firstSEED (the first 20 of 500
steps: the loss of rank 0's first micro-batch, which are the rows that rank 0 has on 8 ranks, on any world that divides 8, and the
mean over all rows, which with CLIP=global must be the same on any number of ranks), paritySEED (500 steps and every score). In
the last two CLIP=local clips what a rank of 8 would clip: each micro-batch's gradient. So on fewer ranks they compute what 8 do. FOLDER/acceptance.json holds what came out;
it is written anew after every part, so a call that is cut off keeps what it had.
"""
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from datetime import date
from pathlib import Path

HERE = Path(__file__).resolve()
SCRIPT = HERE.parent.parent / "golfnb" / "train_gpt.py"
FIRST_STEPS = 20
COARSE = {"EVAL_STRIDE": "1024"}
AS_REFERENCE = {"RECIPE": "pr549", "MAX_WALLCLOCK_SECONDS": "0", "ITERATIONS": "500", "WARMDOWN_ITERS": "200", "WARMUP_STEPS": "20", "BIGRAM_VOCAB_SIZE": "1536"}
ENDLESS = {"ITERATIONS": "1000000", "WARMDOWN_ITERS": "0", "WARMUP_STEPS": "3", "TRAIN_LOG_EVERY": "10", "VAL_LOSS_EVERY": "0"}


def clip_as_eight(m, cfg, world: int):
    "With fewer ranks than 8, clip each micro-batch's gradient before it is added up; the engine's own clip then finds nothing to do."
    from golfnb.parallel_muon import clip_factor, squared_norm
    import torch

    accum, add_up, params, sums = cfg.grad_accum(world), m.engine.accumulate, list(m.model.parameters()), []

    def accumulate():
        grads = [p.grad for p in params]
        torch._foreach_mul_(grads, clip_factor(accum**2 * squared_norm(grads, torch.float32), cfg.grad_clip_norm))
        add_up()  # takes the banks' gradients away
        sums.append([None if p.grad is None else p.grad.clone() for p in params])  # a recorded backward writes the next ones into the same place
        last = len(sums) == accum
        for p, *parts in zip(params, *sums):
            p.grad = sum(g.float() for g in parts).to(p.dtype) if last and parts[0] is not None else None
        if last:
            sums.clear()

    if accum > 1 and cfg.clip == "local":
        m.engine.accumulate = accumulate
    return m


class Enough(Exception):
    "The steps that were asked for are done."


def worker(mode: str):
    "One rank of a job: train under the settings of the environment and tell what every rank saw."
    import torch
    import torch.distributed as dist
    import golfnb.run
    from golfnb.config import load_config
    from golfnb.loader import Loader, make_sampler
    from golfnb.parallel_muon import engine_tensors, start_ranks, stop_ranks
    from golfnb.run import build_machine, open_session
    from golfnb.train import train, warm_up

    ranks = start_ranks()
    cfg = load_config(os.environ)
    if mode.startswith("parity"):
        golfnb.run.build_machine = lambda *args: clip_as_eight(build_machine(*args), cfg, ranks.world)
        golfnb.run.run(cfg, ranks, SCRIPT.read_bytes())
        return stop_ranks(ranks)
    s = open_session(cfg, ranks)
    m = build_machine(cfg, ranks)
    if mode.startswith("first"):
        clip_as_eight(m, cfg, ranks.world)
    calls, losses = [0], []

    def poisoned(ids, targets):
        calls[0] += 1
        if mode.startswith("first") and calls[0] > (cfg.warmup_steps + FIRST_STEPS) * accum:
            raise Enough
        loss = m.loss_fn(ids, targets)
        losses.append(loss.detach().clone())
        return loss * float("nan") if mode == "nan" and ranks.rank == ranks.world - 1 and calls[0] == bad else loss

    accum = cfg.grad_accum(ranks.world)
    bad = (cfg.warmup_steps + 6) * accum + 1  # in the seventh step after the warm-up
    with Loader(make_sampler(cfg, s.train_paths, ranks.rank, ranks.world), ranks.device, cfg.vocab_size) as loader:
        warm_up(cfg, poisoned, loader, m.engine, s.log)
        try:
            result = train(cfg, poisoned, loader, m.engine, s.log)
        except Enough:
            mine = torch.stack(losses[cfg.warmup_steps * accum:]).view(FIRST_STEPS, accum).double()
            means = ranks.sum(mine.mean(1)) / ranks.world
            if ranks.master:
                print("EVERY " + json.dumps([{"first": mine[:, 0].tolist(), "mean": means.tolist()}]), flush=True)
            os._exit(0)  # in the middle of a step: there is nothing to put in order
    small = engine_tensors(m.engine)[len(m.layout.banks):]
    replicas = [m.engine.banks[b.name].replica for b in m.layout.banks]
    mine = {"steps": result.steps, "train_ms": result.train_ms, "skipped": result.skipped, "last_loss": result.losses[-1],
            "sums": [float(t.double().sum()) for t in [*small, *replicas]]}
    every = [mine] * ranks.world
    if ranks.world > 1:
        dist.all_gather_object(every, mine, group=ranks.patient)
    if ranks.master:
        print("EVERY " + json.dumps(every), flush=True)
    stop_ranks(ranks)


def ranks_of(pid: int) -> list[int]:
    "Processes whose parent is `pid`."
    found = []
    for p in Path("/proc").glob("[0-9]*"):
        try:
            if int((p / "stat").read_text().rsplit(")", 1)[1].split()[1]) == pid:
                found.append(int(p.name))
        except (OSError, ValueError, IndexError):
            pass
    return found


class Acceptance:
    def __init__(self, nproc: int, folder: Path, settings: dict):
        self.nproc, self.folder, self.settings, self.found = nproc, folder, settings, {}
        self.runs = Path("/tmp/acceptance")
        shutil.rmtree(self.runs, ignore_errors=True)

    def env(self, **more) -> dict:
        return {**os.environ, "RUNS_DIR": str(self.runs), **self.settings, **{k: str(v) for k, v in more.items()}}

    def start(self, name: str, target: list, nproc: int | None = None, **more):
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={nproc or self.nproc}", *map(str, target)]
        log = open(self.folder / f"{name}.log", "w")
        return subprocess.Popen(command, env=self.env(RUN_ID=name, **more), stdout=log, stderr=subprocess.STDOUT)

    def text(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()

    def keep(self, name: str, **facts):
        self.found[name] = facts
        (self.folder / "acceptance.json").write_text(json.dumps({"date": date.today().isoformat(), "nproc": self.nproc, **machine(), "settings": self.settings, "found": self.found}, indent=1) + "\n")
        print(name, json.dumps(facts)[:600], flush=True)

    def recipe(self, recipe: str):
        begun = time.time()
        status = self.start(recipe, [SCRIPT], RECIPE=recipe, **{"ITERATIONS": "300", "WARMDOWN_ITERS": "100", "MAX_WALLCLOCK_SECONDS": "0", "TRAIN_LOG_EVERY": "50", "TTT_ENABLED": "1", **COARSE, **self.settings}).wait()
        path = self.runs / recipe / "summary.json"
        summary = json.loads(path.read_text()) if path.exists() else {}
        names = ("steps", "raw_loss", "ema_loss", "int6_loss", "sliding_bpb", "ttt_bpb", "total_bytes", "step_ms", "peak_bytes", "seconds")
        self.keep(recipe, status=status, wall_s=time.time() - begun, **{n: summary[n] for n in names if n in summary})

    def scores(self, recipe: str):
        "The artifact of a run on `nproc` ranks, scored again on one GPU and on the CPU in fp32."
        artifact, here = self.runs / recipe / "artifact.golf", {"ranks": self.found[recipe].get("sliding_bpb")}
        for name, more in (("one", {"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]}), ("cpu", {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": str(os.cpu_count())})):
            command = [sys.executable, "-m", "golfnb.cli", "score", str(artifact), "--val", os.environ["DATA_PATH"] + "/fineweb_val_*.bin", "--tokenizer", os.environ["TOKENIZER_PATH"],
                       *(f"{k}={v}" for k, v in {**COARSE, **self.settings}.items() if k.startswith("EVAL_"))]
            done = subprocess.run(command, env={**os.environ, **more}, capture_output=True, text=True)
            lines = [line for line in done.stdout.splitlines() if "sliding_window_exact" in line]
            here[name] = float(lines[0].split("val_bpb:")[1]) if lines else done.stderr[-300:]
        self.keep("scores", recipe=recipe, bpb=here)

    def job(self, name: str, **more):
        "A worker job that ends by itself."
        begun = time.time()
        status = self.start(name, [HERE, "worker", name], **{"RECIPE": "pr549", **ENDLESS, **more}).wait()
        every = [json.loads(line[6:]) for line in self.text(name).splitlines() if line.startswith("EVERY ")]
        ranks = every[0] if every else []
        alike = bool(ranks) and all(r | {"train_ms": 0} == ranks[0] | {"train_ms": 0} for r in ranks)
        told = {k: v for k, v in ranks[0].items() if k != "sums"} if ranks else {"log": self.text(name)[-600:]}
        self.keep(name, status=status, wall_s=time.time() - begun, alike=alike, **told)

    def fault(self, name: str, harm, **more):
        "A script job that is harmed after ten steps: how soon it ends, with which status and words."
        job = self.start(name, [SCRIPT], RECIPE="pr549", MAX_WALLCLOCK_SECONDS="0", COMPILE="0", **{**ENDLESS, **more})
        end = time.time() + 240
        while "step:10/" not in self.text(name) and job.poll() is None and time.time() < end:
            time.sleep(0.2)
        ranks, hurt = ranks_of(job.pid), time.time()
        harm(ranks)
        try:
            status = job.wait(timeout=150)
        except subprocess.TimeoutExpired:
            status = "still running after 150 s"
            for pid in [*ranks, job.pid]:
                os.kill(pid, signal.SIGKILL)
        left = sorted(p.name for p in (self.runs / name).iterdir()) if (self.runs / name).is_dir() else []
        self.keep(name, status=status, ended_after_s=time.time() - hurt, words=[line[:400] for line in self.text(name).splitlines() if line.startswith("golfnb: ")], files=left)

    def truncate(self):
        data = Path("/tmp/acceptance_data")
        shutil.rmtree(data, ignore_errors=True)
        shutil.copytree(os.environ["DATA_PATH"], data)

        def cut(_):
            for path in data.glob("fineweb_train_*.bin"):
                os.truncate(path, 5000)

        self.fault("truncate", cut, DATA_PATH=str(data))


def machine() -> dict:
    import torch
    return {"torch": torch.__version__, "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu", "commit": os.environ.get("GOLFNB_COMMIT", "")}


def main(nproc: int, folder: Path, parts: list, settings: dict):
    folder.mkdir(parents=True, exist_ok=True)
    todo = Acceptance(nproc, folder, settings)
    for part in parts or ["clock", "nan", "kill", "truncate", "recipes"]:
        if part == "recipes":
            todo.recipe("pr399")
            todo.recipe("pr726")
            todo.scores("pr726")
        elif part == "clock":
            todo.job("clock", **{"MAX_WALLCLOCK_SECONDS": "30", "WARMDOWN_ITERS": "3500", **settings})
        elif part.startswith("first"):
            todo.job(part, **{**AS_REFERENCE, "SEED": part[5:], **settings})
        elif part.startswith("parity"):
            log = folder / f"{part}.log"
            status = todo.start(part, [HERE, "worker", part], **{**AS_REFERENCE, "SEED": part[6:], "TRAIN_LOG_EVERY": "10", "VAL_LOSS_EVERY": "100", "EVAL_STRIDE": "64",
                                                                 "TTT_ENABLED": "1", "TTT_FREEZE_BLOCKS": "0", **settings}).wait()
            print(part, status, *log.read_text().splitlines()[-6:], sep="\n", flush=True)
            for name in ("summary.json", "metrics.jsonl") if status == 0 else ():
                shutil.copy(todo.runs / part / name, folder / f"{part}_{name}")
        elif part == "nan":
            todo.job("nan", MAX_WALLCLOCK_SECONDS="0", COMPILE="0", **{**settings, "ITERATIONS": "12"})
        elif part == "kill":
            todo.fault("kill", lambda ranks: os.kill(max(ranks), signal.SIGKILL))
        elif part == "truncate":
            todo.truncate()
        else:
            raise SystemExit(f"no such part: {part}")


if __name__ == "__main__":
    if sys.argv[1] == "worker":
        worker(sys.argv[2])
    else:
        words = sys.argv[3:]
        main(int(sys.argv[1]), Path(sys.argv[2]), [w for w in words if "=" not in w], dict(w.split("=", 1) for w in words if "=" in w))

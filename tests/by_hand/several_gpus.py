"""ParallelMuon on the GPUs of one host, in one call: exact and recorded on all ranks, then timed beside its peers.

    python tests/by_hand/several_gpus.py [nbs/results] [--nproc 2] [--seconds 590] [--peers peers] [--sizes 512x11 1024x16 2048x24]

Not part of `make test`. Stages run in processes of their own, each with what is left of the time: `first` ends within a minute
and fails where nothing else would be worth its time; `cases` holds every recorded step against one that is not, bit by bit;
`golfnb bench peers` measures each size; `steps` times whole training steps with overlap and under DDP. Results: several_gpus_*.json
and peers_*.json, written after each stage. Without GPUs all of it goes by gloo and nothing is recorded, to try the script.
"""
import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from golfnb.muon.grouping import param_groups
from golfnb.muon.optimizer import ParallelMuon
from golfnb.muon.rules import MuonRule
from golfnb.studies.bench import Marks, wait_for
from golfnb.tools.results import record_result

CUDA = torch.cuda.is_available()
WAYS = ("no optimizer", "plain", "overlap", "DDP")
INPUTS, ROUNDS, STEPS = 64, 3, 8
LIMITS = {"first": 60.0, "cases": 150.0, "steps": 120.0} if CUDA else dict.fromkeys(("first", "cases", "steps"), 300.0)  # seconds at most


def device() -> torch.device:
    return torch.device("cuda", int(os.environ["LOCAL_RANK"])) if CUDA else torch.device("cpu")


class Block(nn.Module):
    def __init__(self, d: int):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(d, d, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(d, 4 * d, bias=False), nn.Linear(4 * d, d, bias=False)
        self.before, self.between = nn.LayerNorm(d), nn.LayerNorm(d)

    def forward(self, x: Tensor) -> Tensor:
        h = self.before(x)
        x = x + self.o(torch.tanh(self.q(h)) * self.k(h) + self.v(h))
        return x + self.down(torch.relu(self.up(self.between(x))).square())


def build(d: int, blocks: int, dtype: torch.dtype) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(INPUTS, d), *(Block(d) for _ in range(blocks)), nn.Linear(d, INPUTS)).to(device(), dtype)


def rows(seed: int, count: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(count, INPUTS, generator=torch.Generator().manual_seed(seed)).to(device(), dtype)


def trained(how: str, rank: int, world: int, alone: dist.ProcessGroup) -> list[Tensor]:
    "Weights after four steps in float64, the gradient clipped."
    model, mesh = build(64, 3, torch.float64), None
    if how == "one process":
        rank, world, mesh = 0, 1, alone
    if how == "DDP":
        model = nn.parallel.DistributedDataParallel(model)
    if how == "sharded":
        shard(model)
    optimizer = ParallelMuon(model, lr=0.02, adam_lr=0.01, max_norm=0.5, mesh=mesh, overlap=how == "overlap", reduce="none" if how == "DDP" else "mean")
    for step in range(4):
        optimizer.zero_grad()
        model(rows(step, 4096, torch.float64).chunk(world)[rank]).square().mean().backward()
        optimizer.step()
    return [p.full_tensor() if hasattr(p, "full_tensor") else p.detach() for p in model.parameters()]


def shard(model: nn.Sequential) -> None:
    for block in list(model)[1:-1]:
        fully_shard(block)
    fully_shard(model)


def distances() -> dict[str, float]:
    "How far each way ends from one process."
    rank, world = dist.get_rank(), dist.get_world_size()
    alone = [dist.new_group([r]) for r in range(world)][rank]
    want = trained("one process", rank, world, alone)
    found = {how: trained(how, rank, world, alone) for how in ("plain", "overlap", "DDP", "sharded")}
    return {how: max((a - b).abs().max().item() for a, b in zip(want, weights, strict=True)) for how, weights in found.items()}


class Own(MuonRule):
    "A rule of one's own that says what is true of it, and reads a number that changes."
    recordable, kernel = True, "heavy_ball"

    def after(self, made, state, group, ok):
        return made * (1 + group["momentum"])


class Twins:
    "Two optimizers of one model on these ranks, given the same gradients; the second never records itself."

    def __init__(self, rule="muon", dtype=torch.float32, place: Callable = lambda model: None, **more):
        self.models, self.opts = [build(128, 2, dtype) for _ in range(2)], []
        for model in self.models:
            place(model)
            groups = list(param_groups(model))
            for group in groups:
                group["rule"] = rule if group["rule"] == "muon" else group["rule"]
            self.opts.append(ParallelMuon(groups, **more))
        self.opts[1].recorder.works = False
        self.dtype, self.count, self.replays, self.elsewhere = dtype, 0, 0, []

    def step(self, missing: int = 0, poisoned: bool = False, **numbers):
        "Gradients that lie elsewhere each time; the last rank misses the first `missing` of them."
        self.count += 1
        first, second = self.models
        self.elsewhere = [torch.empty(1000 * self.count, device=device()), *self.elsewhere[:3]]
        last = dist.get_rank() == dist.get_world_size() - 1
        first.zero_grad()
        first(rows(100 * self.count + dist.get_rank(), 64, self.dtype)).float().square().mean().backward()
        for i, (p, q) in enumerate(zip(first.parameters(), second.parameters(), strict=True)):
            if last and i < missing:
                p.grad = None
            elif last and poisoned and i == 0:
                p.grad.mul_(float("nan"))
            q.grad = None if p.grad is None else p.grad.clone()
        before = [id(found) for _, found in self.opts[0].recorder.recordings]
        for opt in self.opts:
            for group in opt.param_groups:
                group.update({k: v for k, v in numbers.items() if k in group})
            opt.step()
        now = [id(found) for _, found in self.opts[0].recorder.recordings]
        self.replays += bool(now) and now == before

    def equal(self) -> bool:
        "Whether both are the same on all ranks, weights and state, bit by bit; every rank must ask."
        pairs = list(zip(*[[*model.parameters(), *[t for s in opt.states.values() for t in s.tensors.values()], opt.grad_norm, opt.skips]
                           for model, opt in zip(self.models, self.opts, strict=True)], strict=True))
        here = all(torch.equal(getattr(a, "_local_tensor", a), getattr(b, "_local_tensor", b)) or bool(a.isnan().any()) for a, b in pairs)
        return all(of_all(here))


def of_all(here) -> list:
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, here)
    return found


def usual(**more) -> Twins:
    "Numbers that change at every step, gradients elsewhere, some missing on one rank, one step that does not count."
    twins = Twins(**more)
    for i in range(24):
        twins.step(missing=3 * (i == 16), poisoned=i == 12, lr=0.02 / (i + 1), weight_decay=0.1 / (i + 1), momentum=0.9 + i / 1000)
    return twins


def of_more_groups() -> Twins:
    "A group that comes later, and options that change the key."
    twins = Twins()
    for _ in range(9):
        twins.step()
    for model, opt in zip(twins.models, twins.opts, strict=True):
        model.late = nn.Linear(INPUTS, INPUTS, bias=False, device=device())
        nn.init.constant_(model.late.weight, 0.1)
        opt.add_param_group({"params": [("late.weight", model.late.weight)], "rule": "muon"})
    twins.opts[1].recorder.works = False
    for i in range(20):
        twins.step(ns_steps=5 if i < 10 else 4)
    return twins


def with_overlap() -> Twins:
    "Gradients that leave during backward, so that nobody may change them."
    twins = Twins(overlap=True)
    for _ in range(12):
        twins.step()
    return twins


def with_hooks() -> Twins:
    "A hook after each step that writes into a weight."
    twins = Twins()
    for opt in twins.opts:
        opt.register_step_post_hook(lambda opt, args, kwargs: opt.param_groups[0]["params"][0].data.mul_(0.999))
    for _ in range(12):
        twins.step()
    return twins


def one_fails() -> Twins:
    "The last rank cannot be recorded: none is."
    twins = Twins()
    opt, measure = twins.opts[0], twins.opts[0].measure

    def broken(*args):
        measure(*args)
        if CUDA and torch.cuda.is_current_stream_capturing() and dist.get_rank() == dist.get_world_size() - 1:
            raise RuntimeError("as it was told")
    opt.measure = broken
    for _ in range(12):
        twins.step()
    return twins


CASES: dict[str, tuple[Callable[[], Twins], bool]] = {  # and whether the step is recorded
    "muon and AdamW, fp32": (usual, True),
    "muon and AdamW, bf16": (lambda: usual(dtype=torch.bfloat16), True),
    "clipped": (lambda: usual(max_norm=0.5), True),
    "normuon": (lambda: usual(rule="normuon"), True),
    "normuon, bf16": (lambda: usual(rule="normuon", dtype=torch.bfloat16), True),
    "muoneq_r": (lambda: usual(rule="muoneq_r"), True),
    "AdamW alone": (lambda: usual(rule="adamw"), True),
    "a rule of one's own": (lambda: usual(rule=Own()), True),
    "fully_shard": (lambda: usual(place=shard), True),
    "overlap": (with_overlap, False),
    "groups that change": (of_more_groups, True),
    "hooks": (with_hooks, True),
    "a rank that fails": (one_fails, False)}


def check_cases(names) -> dict[str, dict]:
    "What became of each case; one that raises on some rank says so, and the rest go on."
    found = {}
    for name in names:
        case, wanted = CASES[name]
        try:
            twins = case()
            words = {"equal": twins.equal(), "recorded": bool(twins.opts[0].recorder.recordings), "replays": twins.replays}
        except Exception as error:  # it is told, and fails the case
            words = {"equal": False, "recorded": False, "error": f"{type(error).__name__}: {error}"[:300]}
        told = of_all(words)
        one = next((w for w in told if "error" in w), told[0])
        alike = len({w["recorded"] for w in told}) == 1
        found[name] = {**one, "good": one["equal"] and alike and (not CUDA or one["recorded"] == wanted)}
        if dist.get_rank() == 0:
            print(f"{name}: {found[name]}", flush=True)
    return found


def first(facts: dict, samples: dict) -> None:
    "Exact in float64, and the first case."
    facts["distance from one process, float64"] = far = distances()
    facts["first case"] = cases = check_cases(list(CASES)[:1])
    facts["good"] = max(far.values()) < 1e-10 and all(case["good"] for case in cases.values())


def cases(facts: dict, samples: dict) -> None:
    "All cases."
    facts["cases"] = found = check_cases(CASES)
    facts["good"] = all(case["good"] for case in found.values())


class Rig:
    "A model and its optimizer, if it has one."

    def __init__(self, how: str, d: int, blocks: int):
        self.model, self.optimizer = build(d, blocks, torch.float32), None
        if how == "DDP":
            self.model = nn.parallel.DistributedDataParallel(self.model, gradient_as_bucket_view=True)
        if how != "no optimizer":
            self.optimizer = ParallelMuon(self.model, lr=0.02, overlap=how == "overlap", reduce="none" if how == "DDP" else "mean")
        self.rows = rows(dist.get_rank(), 8192 if CUDA else 64, torch.float32)

    def step(self) -> None:
        for p in self.model.parameters():
            p.grad = None
        with torch.autocast(device().type, torch.bfloat16):
            loss = self.model(self.rows).float().square().mean()
        loss.backward()
        if self.optimizer:
            self.optimizer.step()


def timed(call: Callable, count: int) -> list[float]:
    "Milliseconds of calls that follow each other."
    wait_for(device())
    dist.barrier()
    marks = Marks(device())
    marks.mark()
    for _ in range(count):
        call()
        marks.mark()
    return marks.ms()


def steps(facts: dict, samples: dict) -> None:
    "Whole training steps in turns, and of the optimizer's alone; memory of its state."
    facts["memory, bytes an element"] = {str(dtype): memory(dtype) for dtype in (torch.float32, torch.bfloat16)} if CUDA else {}
    for d, blocks in ((512, 11), (1024, 16), (2048, 8)) if CUDA else ((32, 2),):
        rigs = {how: Rig(how, d, blocks) for how in WAYS}
        found: dict[str, list[float]] = {how: [] for how in WAYS}
        for turn in range(ROUNDS):
            for how, rig in rigs.items():
                timed(rig.step, 6 if turn == 0 else 1)
                found[how] += timed(rig.step, STEPS)
        found["optimizer alone"] = timed(rigs["plain"].optimizer.step, STEPS)
        samples |= {f"{d}x{blocks} {how}": ms for how, ms in found.items()}
    facts["good"] = True


def memory(dtype: torch.dtype) -> dict[str, float]:
    "Bytes an element of a matrix, gradients included: held between steps, and the most during one."
    weights = [p for p in build(1024, 16, dtype).parameters() if p.ndim == 2 and min(p.shape) > INPUTS]
    for p in weights:
        p.grad = torch.randn_like(p)
    before = torch.cuda.memory_allocated()
    optimizer = ParallelMuon(weights, lr=0.01)
    for _ in range(3):
        optimizer.step()
    held = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    optimizer.step()
    elements = sum(p.numel() for p in weights)
    size = 2 * weights[0].element_size()
    torch.cuda.empty_cache()
    return {"held": (held - before) / elements + size, "peak": (torch.cuda.max_memory_allocated() - before) / elements + size}


def worker(stage: str, out: Path) -> None:
    "A rank of a stage; rank 0 writes what was found."
    if CUDA:
        torch.cuda.set_device(device())
    dist.init_process_group("nccl" if CUDA else "gloo", device_id=device() if CUDA else None)
    facts: dict = {}
    samples: dict[str, list[float]] = {}
    {"first": first, "cases": cases, "steps": steps}[stage](facts, samples)
    if dist.get_rank() == 0:
        out.write_text(json.dumps({"facts": facts, "samples": samples}))
    dist.barrier()
    dist.destroy_process_group()


def run(words: list[str], seconds: float) -> bool:
    "Whether a command ended well in this time."
    print("+", *words, f"# at most {seconds:.0f} s", flush=True)
    process = subprocess.Popen(words, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, start_new_session=True)
    try:
        return process.wait(max(seconds, 1)) == 0
    except subprocess.TimeoutExpired:
        print("+ took too long", flush=True)
    for blow in (signal.SIGTERM, signal.SIGKILL):  # torchrun ends its ranks, if it is asked to
        with suppress(ProcessLookupError):
            os.killpg(process.pid, blow)
        with suppress(subprocess.TimeoutExpired):
            process.wait(10)
    return False


def ms_of(samples: dict, name: str) -> float:
    return median(samples[name]) if samples.get(name) else float("nan")


BOUNDS = {"512x11 fp32": (2.2, 0.5, 3.9), "512x11 bf16": (1.8, 0.5, 3.0), "1024x16 fp32": (7.0, 0.75, 5.4), "1024x16 bf16": (5.5, 0.75, 4.1)}


def verdicts(samples: dict) -> list[str]:
    "What was asked of two GPUs, and what came out; a figure that is missing says nan and does not hold."
    found = []

    def hold(model: str, what: str, value: float, most: float) -> None:
        found.append(f"{'holds' if value <= most else 'FALLS SHORT'}: {model} {what} {value:.2f}, at most {most:.2f}")

    for model, (most, share, plain_host) in BOUNDS.items():
        step, theirs = ms_of(samples, f"{model} golfnb"), ms_of(samples, f"{model} nanochat")
        hold(model, "step, ms", step, most)
        hold(model, "step over nanochat's", step / theirs, share)
        hold(model, "host of a plain step, ms", ms_of(samples, f"{model} golfnb, plain host"), plain_host)
    for model in ("2048x24 fp32", "2048x24 bf16"):
        floor = max(ms_of(samples, f"{model} {name}") for name in ("travel", "products"))
        hold(model, "step over the larger of travel and shared products", ms_of(samples, f"{model} golfnb") / floor, 1.45)
    for model in (*BOUNDS, "2048x24 fp32", "2048x24 bf16"):
        hold(model, "host of a recorded step, ms", ms_of(samples, f"{model} golfnb host"), 0.6)
        bare = ms_of(samples, f"{model} no optimizer training")
        grows, theirs = (ms_of(samples, f"{model} {name} training") - bare for name in ("golfnb", "nanochat"))
        hold(model, "growth of training, ms", grows, ms_of(samples, f"{model} golfnb") + 1)
        hold(model, "growth of training, ms, beside nanochat's", grows, theirs)
    return found


def measure_peers(size: str, args, scratch: Path, seconds: float) -> dict | None:
    "A result of `golfnb bench peers` for a size; a second time without peers if the first fails."
    begin = time.monotonic()
    for peers in (args.peers, "none"):
        out = scratch / f"peers_{size}.json"
        words = ["bench", "peers", "--nproc", str(args.nproc), "--sizes", size, "--rounds", "3", "--steps", "24" if CUDA else "3",
                 "--warmup", "8" if CUDA else "1", "--peers", peers, "-o", str(out)]
        if run([sys.executable, "-m", "golfnb", *words], min(args.peers_seconds, seconds - (time.monotonic() - begin))):
            return json.loads(out.read_text())
    return None


def merged(results: list[dict]) -> dict:
    "Results of several sizes as one."
    whole = json.loads(json.dumps(results[0]))
    for other in results[1:]:
        whole["samples"] |= other["samples"]
        for name, value in other["facts"].items():
            if isinstance(value, dict):
                whole["facts"][name] |= value
    return whole


def keep(name: str, found: dict, folder: Path) -> None:
    "Writes a result, with where it was measured."
    source = {key: found[key] for key in ("date", "commit", "machine", "versions") if key in found}
    record_result(name, found["samples"], "ms", found["note"], found["facts"], folder, source or None)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=ROOT / "nbs" / "results")
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=590.0, help="for everything")
    parser.add_argument("--peers", default="peers", help="where nanochat and dion are cloned")
    parser.add_argument("--peers-seconds", type=float, default=200.0, help="of bench peers for one size at most")
    parser.add_argument("--sizes", nargs="+", default=["512x11", "1024x16", "2048x24"] if CUDA else ["16x2"])
    args = parser.parse_args()
    end = time.monotonic() + args.seconds
    slug = torch.cuda.get_device_name(0).lower().removeprefix("nvidia ").replace(" ", "_") if CUDA else "cpu"
    whole: dict = {"note": f"ParallelMuon on {args.nproc} ranks: each way from one process, recorded steps beside plain ones, training steps in turns", "facts": {}, "samples": {}}
    good = True
    with tempfile.TemporaryDirectory() as place:
        scratch = Path(place)

        def stage(name: str) -> bool:
            out = scratch / f"{name}.json"
            torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={args.nproc}"]
            ended = run([*torchrun, __file__, name, str(out)], min(LIMITS[name], end - time.monotonic()))
            if not out.exists():
                whole["facts"][f"{name} ended"] = False
                return False
            found = json.loads(out.read_text())
            fine = found["facts"].pop("good") and ended
            whole["facts"] |= found["facts"]
            whole["samples"] |= found["samples"]
            keep(f"several_gpus_{slug}_{args.nproc}", whole, args.folder)
            return fine

        if not stage("first"):
            print("FALLS SHORT: the first stage; nothing else was tried", json.dumps(whole["facts"], indent=1), sep="\n")
            return 1
        there: list[dict] = []

        def peers(size: str) -> None:
            result = measure_peers(size, args, scratch, end - time.monotonic())
            if result:
                there.append(result)
                keep(f"peers_{slug}_{args.nproc}", merged(there), args.folder)

        for size in args.sizes[:2]:
            peers(size)
        good = stage("cases") and good
        for size in args.sizes[2:]:
            peers(size)
        good = stage("steps") and good and len(there) == len(args.sizes)
    print(json.dumps(whole["facts"], indent=1))
    for line in verdicts(merged(there)["samples"] if there else {}) if CUDA else ():
        print(line)
        good = good and line.startswith("holds")
    print("all of it holds" if good else "FALLS SHORT: see above")
    return 0 if good else 1


if __name__ == "__main__":
    if sys.argv[1:2] and sys.argv[1] in LIMITS:
        worker(sys.argv[1], Path(sys.argv[2]))
    else:
        sys.exit(main())

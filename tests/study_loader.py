"""Measurements of chapter 31: the loader and the way from documents to shards. Each writes nbs/results/*.json.

    python tests/study_loader.py loader                        rate of each order from page cache, one rank (CPU)
    python tests/study_loader.py build                         50 M tokens built, in turn with bare SentencePiece (CPU)
    torchrun --standalone --nproc_per_node=8 tests/study_loader.py blocks   real loader against a resident batch (GPUs)
    torchrun --standalone --nproc_per_node=8 tests/study_loader.py orders   sequential against coprime and packed (GPUs)

`blocks` and `orders` read RECIPE, DATA_PATH, TOKENIZER_PATH and every other setting from the environment. Beside them:
STUDY_STEPS (default 300,500), STUDY_SEEDS (1337,42,2025), STUDY_ORDERS (sequential,coprime), STUDY_BLOCKS (10), STUDY_BLOCK_STEPS (100),
STUDY_FOLDER (nbs/results). `orders` writes after every run, and skips runs that its file already holds.
"""
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, replace
from pathlib import Path
from statistics import mean, median, stdev

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
FOLDER = Path(os.environ.get("STUDY_FOLDER", ROOT / "nbs" / "results"))


def measure_loader(shards=8, tokens=4_000_000, rows=48, seq_len=2048, batches=60, rounds=5) -> None:
    "Tokens a second that one rank gets from each order, with nothing else to do; the plan is that of world 1 and of world 8."
    import torch

    from golfnb.bench import record_result
    from golfnb.loader import CoprimeSampler, Loader, PackedSampler, SequentialSampler
    from golfnb.shards import find_shards, write_shard

    torch.set_num_threads(1)
    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as tmp:
        for i in range(shards):
            values = rng.integers(2, 1024, tokens).astype(np.uint16)
            values[np.cumsum(rng.geometric(1 / 900, tokens // 900 // 2))] = 1  # documents of 900 tokens on average
            values[0] = 1
            write_shard(Path(tmp) / f"fineweb_train_{i:06d}.bin", values)
        paths = find_shards(Path(tmp) / "*.bin")
        makers = {f"{order.order}, world {world}": (lambda o=order, w=world, m=more: o(paths, 0, w, rows, seq_len, *m))
                  for order, more in ((SequentialSampler, ()), (CoprimeSampler, (1,)), (PackedSampler, (1,))) for world in (1, 8)}
        rates = {name: [] for name in makers}
        for i in range(rounds + 1):  # the first is a warm-up
            for name in list(makers)[:: 1 if i % 2 else -1]:
                with Loader(makers[name](), "cpu", 1024) as loader:
                    loader.next()
                    start = time.perf_counter()
                    for _ in range(batches):
                        loader.next()
                    rate = batches * rows * seq_len / (time.perf_counter() - start) / 1e6
                if i:
                    rates[name].append(rate)
    path = record_result("loader_cpu", rates, "M tokens/s", "Loader on the CPU, one rank, shards in page cache, widened to int64", folder=FOLDER,
                         facts={"shards": shards, "tokens_a_shard": tokens, "rows": rows, "seq_len": seq_len, "batches": batches, "cpus": len(os.sched_getaffinity(0)), "load_1min": os.getloadavg()[0]})
    for name, values in rates.items():
        print(f"{name:24s} {median(values):7.1f} M tokens/s ({min(values):.1f} to {max(values):.1f})")
    print(path)


PEAK = """
import resource, sys, time
def most(): # MiB this process has had resident at once; ru_maxrss would count its parent's
    try: return int(open("/proc/self/status").read().split("VmHWM:")[1].split()[0]) / 1024
    except (OSError, IndexError): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
from golfnb.data import build_shards, read_documents
base, start = most(), time.perf_counter()
made = build_shards(read_documents([sys.argv[1]]), sys.argv[2], sys.argv[3], 10_000_000, float(sys.argv[4]))
print(most(), base, time.perf_counter() - start, made["train"]["tokens"] + made["val"]["tokens"])
"""


def write_corpus(path: Path, tokens: int, tokenizer: Path) -> list[str]:
    "Documents of the standard library, again and again, each turned round at another line, until they make so many tokens."
    from golfnb.bpb import load_tokenizer
    from golfnb.data import stdlib_documents

    docs, sp = stdlib_documents(), load_tokenizer(tokenizer)
    times = -(-tokens // sum(map(len, sp.encode(docs))))
    texts = []
    for n in range(times):
        for text in docs:
            lines = text.split("\n")
            turn = n * 7 % len(lines)
            texts.append("\n".join([f"part {n}", *lines[turn:], *lines[:turn]]).strip())
    with open(path, "w", encoding="utf-8") as file:
        file.writelines(json.dumps({"text": t}, ensure_ascii=False) + "\n" for t in texts)
    return texts


def child_build(source: Path, folder: Path, fraction: float) -> dict:
    "A build in a process of its own, which tells its own seconds and peak."
    done = subprocess.run([sys.executable, "-c", PEAK, str(source), str(folder / "t.model"), str(folder / f"s{time.time_ns()}"), str(fraction)], capture_output=True, text=True, cwd=ROOT)
    if done.returncode:
        raise SystemExit(done.stderr[-2000:])
    return dict(zip(("peak_mib", "import_mib", "seconds", "tokens"), map(float, done.stdout.split())))


def measure_build(tokens=50_000_000, rounds=10) -> None:
    """Bare multi-threaded SentencePiece (texts in memory, pieces dropped) and the build (jsonl on disk to shards on disk), in turn.

    The corpus goes through in as many portions as there are rounds, each portion once through either, so that whatever else the machine
    does falls on both alike; the ratio is that of all seconds together. Then all of it in one build, in a process of its own, for the peak.
    """
    from golfnb.bench import record_result
    from golfnb.bpb import load_tokenizer
    from golfnb.data import build_shards, is_validation, read_documents, stdlib_documents, train_tokenizer

    cores, load = len(os.sched_getaffinity(0)), os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as name:  # the page cache holds what is read and written here
        tmp = Path(name)
        train_tokenizer([d for d in stdlib_documents() if not is_validation(d, 0.05)], tmp / "t.model", 1024)
        texts, sp = write_corpus(tmp / "docs.jsonl", tokens, tmp / "t.model"), load_tokenizer(tmp / "t.model")
        wall, cpu, counts = {"bare": [], "build": []}, {"bare": [], "build": []}, {"bare": [], "build": []}
        lines = (tmp / "docs.jsonl").read_bytes().splitlines(keepends=True)
        for i in range(rounds):
            part = slice(len(texts) * i // rounds, len(texts) * (i + 1) // rounds)
            (tmp / f"part{i}.jsonl").write_bytes(b"".join(lines[part]))

            def bare() -> int:
                found = sp.encode(texts[part], return_type="numpy", num_threads=cores)
                return sum(map(len, found)) + len(found)

            def build() -> int:
                made = build_shards(read_documents([tmp / f"part{i}.jsonl"]), tmp / "t.model", tmp / f"part{i}", 10_000_000)
                return made["train"]["tokens"] + made["val"]["tokens"]

            for kind, what in (("bare", bare), ("build", build))[:: 1 if i % 2 == 0 else -1]:
                start, used = time.perf_counter(), time.process_time()
                counts[kind].append(what())
                wall[kind].append(time.perf_counter() - start)
                cpu[kind].append(time.process_time() - used)
        if counts["bare"] != counts["build"]:
            raise SystemExit(f"bare encoding and build made different numbers of tokens: {counts}")
        del lines
        whole = child_build(tmp / "docs.jsonl", tmp, 0.05)
        long = " ".join(texts)[:100_000_000]  # one document of 100 MB, and some for the other side
        with open(tmp / "long.jsonl", "w", encoding="utf-8") as file:
            file.writelines(json.dumps({"text": t}) + "\n" for t in (long, *texts[:3]))
        big = child_build(tmp / "long.jsonl", tmp, 0.5)
        size = sum(len(t.encode()) for t in texts)
    rates = {kind: [n / s / 1e6 for n, s in zip(counts[kind], wall[kind])] for kind in wall}
    facts = {"tokens": sum(counts["build"]), "text_bytes": size, "threads": cores, "portions": rounds, "shard_tokens": 10_000_000, "ratio": sum(wall["bare"]) / sum(wall["build"]), "ratios": [a / b for a, b in zip(wall["bare"], wall["build"])],
             "cpu_ratio": sum(cpu["bare"]) / sum(cpu["build"]), "wall_s": {k: sum(v) for k, v in wall.items()}, "cpu_s": {k: sum(v) for k, v in cpu.items()}, "load_1min": [load, os.getloadavg()[0]],
             "build_peak_mib": whole["peak_mib"], "import_mib": whole["import_mib"], "whole_build_s": whole["seconds"],
             "long_document_bytes": len(long.encode()), "long_document_s": big["seconds"], "long_document_peak_mib": big["peak_mib"]}
    print(record_result("data_build_cpu", rates, "M tokens/s", "jsonl on disk to shards on disk, against SentencePiece alone on texts in memory, portion by portion in turn, same threads", facts, FOLDER))
    print({k: v for k, v in facts.items() if k != "ratios"})


def settings():
    "(Config, Ranks, Session, Machine) of the environment."
    from golfnb.config import load_config
    from golfnb.parallel_muon import start_ranks
    from golfnb.run import build_machine, open_session

    ranks, scratch = start_ranks(), tempfile.mkdtemp()
    cfg = load_config({"RUN_ID": "study", "RUNS_DIR": scratch, "MAX_WALLCLOCK_SECONDS": "0", **os.environ})
    session = open_session(cfg, ranks, quiet=True)
    return cfg, ranks, session, build_machine(cfg, ranks)


class Resident:
    "One batch, again and again: a loader that costs nothing."

    def __init__(self, batch):
        self.batch = tuple(t.clone() for t in batch)

    def next(self):
        return self.batch


def measure_blocks() -> None:
    "Blocks of steps in one process, real loader and resident batch in turn; the paired difference with its 95 % bound."
    from golfnb.bench import record_result, wait_for
    from golfnb.loader import Loader, make_sampler
    from golfnb.parallel_muon import stop_ranks
    from golfnb.train import micro_steps, momentum_at, multiplier_at, warm_up

    blocks, steps = int(os.environ.get("STUDY_BLOCKS", 10)), int(os.environ.get("STUDY_BLOCK_STEPS", 100))
    cfg, ranks, session, machine = settings()
    accum, times, done = cfg.grad_accum(ranks.world), {"real": [], "resident": []}, [0]
    with Loader(make_sampler(cfg, session.train_paths, ranks.rank, ranks.world), ranks.device, cfg.vocab_size) as loader:
        warm_up(cfg, machine.loss_fn, loader, machine.engine, session.log)
        sources = {"real": loader, "resident": Resident(loader.next())}

        def block(source) -> float:
            ranks.barrier()
            wait_for(ranks.device)
            start = time.perf_counter()
            for _ in range(steps):
                loss = micro_steps(machine.loss_fn, source, machine.engine, accum)
                control = machine.engine.launch(loss=loss, elapsed_ms=0.0)
                machine.engine.finish(multiplier_at(cfg, done[0], control[0]), momentum_at(cfg, done[0]))
                done[0] += 1
            wait_for(ranks.device)
            ranks.barrier()
            return 1000 * (time.perf_counter() - start) / steps

        for source in sources.values():  # untimed: allocator, captured graphs
            block(source)
        for i in range(blocks):
            for kind in list(sources)[:: 1 if i % 2 == 0 else -1]:
                times[kind].append(block(sources[kind]))
    if ranks.master:
        gaps = [a - b for a, b in zip(times["real"], times["resident"])]
        bound = mean(gaps) + T_95[blocks - 1] * stdev(gaps) / blocks**0.5
        facts = {"loader": cfg.loader, "world": ranks.world, "blocks": blocks, "steps": steps, "mean_difference_ms": mean(gaps), "upper_95_ms": bound, "upper_95_share": bound / mean(times["resident"]),
                 "train_shards": len(session.train_paths), "recipe": cfg.recipe, "tokens_a_step": cfg.train_batch_tokens}
        print(record_result("loader_blocks", times, "ms/step", "blocks of steps in one process, real loader and one resident batch in turn", facts, FOLDER))
        print(f"difference {mean(gaps):.3f} ms, 95 % bound {bound:.3f} ms: {100 * facts['upper_95_share']:.2f} % of a step")
    stop_ranks(ranks)


T_95 = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262, 14: 2.145, 19: 2.093}  # two-sided 95 % quantiles of Student's t, by degrees of freedom


def measure_orders() -> None:
    "Final validation loss for every order, length and seed; one process, one compile."
    from golfnb.bench import commit_of, record_result
    from golfnb.loader import Loader, make_sampler
    from golfnb.model import init_model
    from golfnb.parallel_muon import make_engine, stop_ranks
    from golfnb.run import plain_score
    from golfnb.train import RunLog, train, warm_up

    words = {name: os.environ.get(f"STUDY_{name}", default).split(",") for name, default in (("STEPS", "300,500"), ("SEEDS", "1337,42,2025"), ("ORDERS", "sequential,coprime"))}
    base, ranks, session, machine = settings()
    path = FOLDER / "loader_study.json"
    held = json.loads(path.read_text()) if path.is_file() else {"samples": {}, "facts": {"runs": []}}
    samples, runs = held["samples"], held["facts"]["runs"]
    pass_tokens = sum(make_sampler(base, session.train_paths, 0, 1).tokens)
    for steps in map(int, words["STEPS"]):
        for seed in map(int, words["SEEDS"]):
            for order in words["ORDERS"]:
                if any((r["order"], r["steps"], r["seed"]) == (order, steps, seed) for r in runs):
                    continue
                cfg = replace(base, loader=order, seed=seed, iterations=steps, warmdown_iters=round(0.4 * steps), val_loss_every=100)
                init_model(machine.model, cfg, seed)
                machine.engine = make_engine(machine.model, machine.layout, cfg, ranks)
                curve, said = [], RunLog(quiet=True)
                with Loader(make_sampler(cfg, session.train_paths, ranks.rank, ranks.world), ranks.device, cfg.vocab_size) as loader:
                    warm_up(cfg, machine.loss_fn, loader, machine.engine, said)
                    result = train(cfg, machine.loss_fn, loader, machine.engine, said, validate=lambda: curve.append(plain_score(session, machine)) or curve[-1])
                run = {"order": order, "steps": steps, "seed": seed, "val_loss": result.val_loss, "val_bpb": result.val_bpb, "passes": steps * cfg.train_batch_tokens / pass_tokens,
                       "curve": [loss for loss, _ in curve], "last_train_loss": mean(result.losses[-20:]), "step_ms": result.train_ms / result.steps, "commit": commit_of(ROOT)}
                runs.append(run)
                samples.setdefault(f"{order}, {steps} steps", []).append(result.val_loss)
                if ranks.master:
                    print({k: v for k, v in run.items() if k != "curve"}, flush=True)
                    record_result("loader_study", samples, "nats/token", "validation loss of raw weights at the end, by order of windows, length and seed",
                                  {"runs": runs, "world": ranks.world, "train_shards": len(session.train_paths), "train_tokens": pass_tokens, "recipe": base.recipe,
                                   "config": {k: v for k, v in asdict(base).items() if not k.endswith("path") and k not in ("runs_dir", "notices")}}, FOLDER)
    stop_ranks(ranks)


if __name__ == "__main__":
    actions = {"loader": measure_loader, "build": measure_build, "blocks": measure_blocks, "orders": measure_orders}
    if len(sys.argv) != 2 or sys.argv[1] not in actions:
        raise SystemExit(__doc__)
    actions[sys.argv[1]]()

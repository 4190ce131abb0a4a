"""Measurements of study 32; each writes nbs/results/NAME.json, every sample kept.

    python tests/measure_quantize.py codec [RUN_DIR]     codec_cpu.json: bytes and seconds of the codecs at equal integers, on synthetic
                                                         Gaussian row-scaled weights of the full model (and RUN_DIR/ema.golf); one core
    python tests/measure_quantize.py ideal               codec_ideal_cpu.json: what a perfect coder of independent values would need for the synthetic integers, and what ours does
    python tests/measure_quantize.py loss RUN_DIR NAME [FOLDER]   NAME.json: loss of the round trip over the unquantized weights against bytes,
                                                         GPTQ-lite, spread clip and full GPTQ; RUN_DIR/ema.golf and the run's own data, on a GPU if there is one
    python tests/measure_quantize.py curve FOLDER RUN_DIR ...     `loss` for every run, all at once, spread over the GPUs: FOLDER/quant_RUN.json each
    python tests/measure_quantize.py shipped RUN_DIR ... codec_long.json: every run's artifact.golf against the same integers as int8 in one lzma stream
    python tests/measure_quantize.py scores FOLDER RUN_DIR ...    scores_long.json: every run's artifact.golf by `golfnb score` in each form of TTT on
                                                         all GPUs, and the first one's sliding window on 1, 2, 3, 4, 8 of them
"""
import hashlib
import json
import lzma
import os
import re
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import torch

from golfnb.artifact import load_model, load_weights, open_container, pack_bytes, unpack_bytes
from golfnb.bench import commit_of, read_result, record_result
from golfnb.bpb import byte_table, load_tokenizer
from golfnb.config import load_config, setting_specs
from golfnb.evaluate import plain_loss
from golfnb.layout import model_layout
from golfnb.loader import make_sampler
from golfnb.model import Golf, load_named, named_state, quant_kind
from golfnb.parallel_muon import Ranks
from golfnb.quantize import INT_MAX, calibrate, calibration_batches, dequantize_state, gptq_matrices, quantize_state
from golfnb.shards import find_shards, val_tokens

GRIDS = {"floor": (True, None), "GPTQ-lite": (False, None), "k = 5.5": (False, 5.5), "k = 6": (False, 6.0), "k = 9": (False, 9.0), "k = 12.85": (False, 12.85), "k = 24": (False, 24.0)}


def synthetic_state(seed: int = 0) -> dict:
    "The full model (recipe golf) with Gaussian matrices: spread 0.04, rows a quarter apart in the logarithm; tables 0.3; controls near one."
    g = torch.Generator().manual_seed(seed)
    cfg = load_config({"RECIPE": "golf"})
    state = named_state(Golf(cfg, model_layout(cfg, 1)))
    for name, w in state.items():
        spread = 0.04 if ".attn." in name or ".mlp." in name else 0.3
        state[name] = spread * torch.exp(0.25 * torch.randn(len(w), 1, generator=g)) * torch.randn(w.shape, generator=g) if w.ndim == 2 and w.numel() > 65_536 else 1 + 0.1 * torch.randn(w.shape, generator=g)
    return state


def one_stream(packed: dict) -> int:
    "What the reference ships: integers, scales and controls one after the other, in one lzma stream."
    return len(lzma.compress(b"".join(p.data.tobytes() + (p.scale.tobytes() if p.scale is not None else b"") for _, p in sorted(packed.items())), preset=6))


def codec(run_dir: str | None = None) -> None:
    torch.set_num_threads(1)
    sources = {"synthetic": (synthetic_state(), 65_536)}
    if run_dir:
        meta, named = load_weights(Path(run_dir) / "ema.golf")
        sources[Path(run_dir).name] = named, meta["settings"]["small_tensor"]
    samples, facts = {}, {}
    for source, (named, small) in sources.items():
        for grid, (floor, k) in GRIDS.items():
            packed = quantize_state(named, floor, k, small)
            key = f"{source}, {grid}"
            samples[f"{key}: int8 in lzma"] = [one_stream(packed)]
            for way in ("lzma", "zlib", "rans", "best"):
                data = pack_bytes(packed, {}, way)
                samples[f"{key}: {way}"] = [len(data)]
                if way == "rans":
                    assert all(np.array_equal(p.data, packed[n].data) for n, p in unpack_bytes(data)[1].items())
            weights = sum(p.data.size for p in packed.values())
            facts[key] = {"weights": weights, "integers": sum(p.data.size for p in packed.values() if p.kind in INT_MAX)}
            saved = 1 - samples[f"{key}: rans"][0] / samples[f"{key}: int8 in lzma"][0]
            print(f"{key}: " + ", ".join(f"{w} {samples[key + ': ' + w][0]:,}" for w in ("int8 in lzma", "lzma", "zlib", "rans", "best")) + f"; {saved:.2%} saved", flush=True)
    packed, seconds = quantize_state(synthetic_state(), False, 6.0), {}
    for way in ("rans", "best", "lzma"):
        for _ in range(3):
            start = time.perf_counter()
            data = pack_bytes(packed, {}, way)
            middle = time.perf_counter()
            unpack_bytes(data)
            seconds.setdefault(f"seconds {way} encode", []).append(middle - start)
            seconds.setdefault(f"seconds {way} decode", []).append(time.perf_counter() - middle)
    print({k: f"{np.median(v):.2f}" for k, v in seconds.items()})
    print(record_result("codec_cpu", samples | seconds, "bytes; series named seconds: s", "whole containers at equal integers; one core, one thread", facts))


def ideal() -> None:
    "The cost of each integer under the Gaussian of its row, with the row's own spread: no coder of independent values takes less, but for the spreads' sampling noise."
    torch.set_num_threads(1)
    state, samples = synthetic_state(), {}
    for grid, (floor, k) in GRIDS.items():
        packed, bits = quantize_state(state, floor, k), 0.0
        for name, p in ((n, p) for n, p in packed.items() if p.kind in INT_MAX):
            edges = torch.arange(-INT_MAX[p.kind], INT_MAX[p.kind] + 2).double() - 0.5
            edges[0], edges[-1] = -torch.inf, torch.inf
            below = torch.special.ndtr(edges * (torch.from_numpy(p.scale.astype(np.float64)) / state[name].double().std(1))[:, None])
            chances = (below[:, 1:] - below[:, :-1]).clamp_min(1e-300)
            bits -= torch.log2(chances.gather(1, torch.from_numpy(p.data.astype(np.int64)) + INT_MAX[p.kind])).sum().item()
        data = pack_bytes(packed, {}, "rans")
        header, _ = open_container(data)
        coded = sum(n for section, _, n in header["sections"] if section in INT_MAX)
        samples |= {f"synthetic, {grid}: ideal": [len(data) - coded + bits / 8], f"synthetic, {grid}: rans": [len(data)]}
        print(f"{grid}: ideal {len(data) - coded + bits / 8:,.0f}, rans {len(data):,}", flush=True)
    print(record_result("codec_ideal_cpu", samples, "bytes", "whole containers; ideal: integers at their cost under the Gaussian of their row, the rest as our coder stores it"))


def shipped(*run_dirs: str) -> None:
    samples = {}
    for run in run_dirs:
        data = Path(run, "artifact.golf").read_bytes()
        meta, packed = unpack_bytes(data)
        samples |= {f"seed {meta['seed']}: int8 in lzma": [one_stream(packed)], f"seed {meta['seed']}: ours": [len(data)]}
    print(samples, record_result("codec_long", samples, "bytes", "artifacts of the runs long_* against the same integers, scales and controls in one lzma stream, as the reference ships them"))


def curve(folder: str, *run_dirs: str) -> None:
    gpus = max(torch.cuda.device_count(), 1)
    Path(folder).mkdir(parents=True, exist_ok=True)
    running = {run: subprocess.Popen([sys.executable, __file__, "loss", run, f"quant_{Path(run).name}", folder], env={**os.environ, "CUDA_VISIBLE_DEVICES": str(i % gpus)}) for i, run in enumerate(run_dirs)}
    if failed := [f"{run}: loss ended with status {child.returncode}" for run, child in running.items() if child.wait()]:
        raise SystemExit("\n".join(failed))


FORMS = {"all blocks": ["TTT_FREEZE_BLOCKS=0"], "2 blocks frozen": ["TTT_FREEZE_BLOCKS=2"], "adapters": ["TTT_FORM=adapters"]}


def bpb_of(said: str) -> dict[str, float]:
    "Bits per byte in what `golfnb score` printed, by kind."
    return {kind: float(found[1]) for kind, label in (("sliding", "final_int6_sliding_window_exact"), ("TTT", "legal_ttt_exact")) if (found := re.search(label + r" .*val_bpb:(\S+)", said))}


def scores(folder: str, *run_dirs: str) -> None:
    "Each score is written at once; called again with the same artifacts, it goes on with what is missing."
    gpus, failed, place = max(torch.cuda.device_count(), 1), [], Path(folder) / "scores_long.json"
    configs = {run: json.loads((Path(run) / "summary.json").read_text())["config"] for run in run_dirs}
    facts = {"sha256": {f"seed {configs[run]['seed']}": hashlib.sha256(Path(run, "artifact.golf").read_bytes()).hexdigest() for run in run_dirs}}
    found = read_result("scores_long", Path(folder)) if place.is_file() else {"samples": {}, "facts": {}}
    samples, commits = (found["samples"], found["facts"]["commits"]) if found["facts"].get("sha256") == facts["sha256"] else ({}, {})
    jobs = [(run, form, gpus, ["--ttt", *words]) for form, words in FORMS.items() for run in run_dirs]
    jobs += [(run_dirs[0], f"ranks {n}", n, []) for n in (1, 2, 3, 4, 8) if n <= gpus]
    for run, how, n, words in jobs:
        cfg, what = configs[run], f"seed {configs[run]['seed']}, {how}"
        if f"{what}: sliding" in samples:
            continue
        command = [sys.executable, "-m", "golfnb.cli", "score", f"{run}/artifact.golf", "--val", f"{cfg['data_path']}/fineweb_val_*.bin", "--tokenizer", cfg["tokenizer_path"], f"--nproc={n}", "EVAL_STRIDE=64", *words]
        done = subprocess.run(command, capture_output=True, text=True)
        print(f"{what}: {bpb_of(done.stdout)}", flush=True)
        if done.returncode:
            failed.append(f"{what}: {done.stderr[-500:]}")
            continue
        samples |= {f"{what}: {kind}": [bpb] for kind, bpb in bpb_of(done.stdout).items()}
        commits[what] = f"{commit_of(Path(__file__).resolve().parent.parent)}, {n} ranks"
        record_result("scores_long", samples, "bits per byte", "artifacts of the runs long_*, read from their files: sliding window of stride 64, and TTT", facts | {"commits": commits}, folder)
    if failed:
        raise SystemExit("\n".join(failed))


def packed_bytes(packed: dict, meta: dict) -> int:
    torch.set_num_threads(1)
    return len(pack_bytes(packed, meta, "best"))


def loss(run_dir: str, name: str, folder: str = "nbs/results") -> None:
    run_dir = Path(run_dir)
    device, dtype = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)
    meta, named = load_weights(run_dir / "ema.golf")
    model, _, cfg = load_model(run_dir / "ema.golf", dtype, device)
    said = json.loads((run_dir / "summary.json").read_text())["config"]
    for key in setting_specs().keys() & said.keys():
        setattr(cfg, key, said[key])
    alone, small = Ranks(device=device), cfg.small_tensor
    table = byte_table(load_tokenizer(cfg.tokenizer_path, cfg.vocab_size)).to(device)
    val = torch.from_numpy(val_tokens(str(Path(cfg.data_path) / "fineweb_val_*.bin"), cfg.train_seq_len, cfg.vocab_size).astype("int64")).to(device)
    named = {n: w.float().to(device) for n, w in named.items()}

    def score(state: dict) -> float:
        load_named(model, state)
        return plain_loss(model, val, table, cfg.train_seq_len, max(1, 65_536 // cfg.train_seq_len), alone)[0]

    base = score(named)
    sampler = make_sampler(cfg, find_shards(str(Path(cfg.data_path) / "fineweb_train_*.bin")), 0, 1)
    hessians = calibrate(model, calibration_batches(sampler, cfg.gptq_calib_samples, device), alone)
    matrices = {n: named[n] for n in model.layout.names() if quant_kind(n, tuple(named[n].shape), small) == "int6"}
    samples, sizes = {}, {}
    with ProcessPoolExecutor(4, get_context("spawn")) as pool:  # packing, beside scoring
        for grid, (floor, k) in {**GRIDS, "k = 18": (False, 18.0), "k = 36": (False, 36.0)}.items():
            plain = quantize_state(named, floor, k, small)
            for way, packed in (("nearest", plain), ("GPTQ", plain | gptq_matrices(matrices, hessians, alone, floor, k))):
                sizes[f"{grid}, {way}"] = pool.submit(packed_bytes, packed, meta)
                samples[f"{grid}, {way}: loss"] = [score(dequantize_state(packed)) - base]
        for what, size in sizes.items():
            samples[f"{what}: bytes"] = [size.result()]
            print(f"{what}: {samples[f'{what}: bytes'][0]:,} bytes, {samples[f'{what}: loss'][0]:.5f} nats over {base:.4f}", flush=True)
    facts = {"base_loss": base, "steps": meta.get("steps"), "seed": meta.get("seed"), "recipe": meta.get("recipe"), "qat": bool(cfg.qat_banks), "targets": val.numel() - 1, "settings": meta["settings"]}
    print(record_result(name, samples, "bytes, and nats a token over the unquantized weights", "round trip of RUN_DIR/ema.golf, plain validation", facts, folder))


if __name__ == "__main__":
    {"codec": codec, "ideal": ideal, "shipped": shipped, "loss": loss, "curve": curve, "scores": scores}[sys.argv[1]](*sys.argv[2:])

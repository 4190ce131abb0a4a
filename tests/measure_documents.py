"""Measurement of chapter 18b: what adapters per document gain on a trained run. Writes nbs/results/NAME.json.

    python tests/measure_documents.py RUN_DIR NAME [TARGETS] [SETTING=VALUE ...]

RUN_DIR holds artifact.golf and summary.json; the run's own validation shards are scored (the first TARGETS of them; 0: all), on a GPU if there is one:
sliding window, score-first training (chapter 18), rows by document without learning, and adapters at several learning rates and chunk lengths.
"""
import json
import sys
import time
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from golfnb.adapters import document_spans, score_documents
from golfnb.artifact import load_artifact, load_model
from golfnb.bench import record_result
from golfnb.bpb import byte_table, load_tokenizer
from golfnb.config import parse_setting, setting_specs
from golfnb.evaluate import sliding_loss
from golfnb.layout import model_layout
from golfnb.model import load_named
from golfnb.parallel_muon import Ranks
from golfnb.quantize import dequantize_state
from golfnb.shards import val_tokens
from golfnb.ttt import score_first


def main(run_dir: str, name: str, targets: str = "0", *words: str) -> None:
    run_dir = Path(run_dir)
    device, dtype = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)
    model, meta, cfg = load_model(run_dir / "artifact.golf", dtype, device)
    said, specs = json.loads((run_dir / "summary.json").read_text())["config"], setting_specs()
    settings = {k: v for k, v in said.items() if k in specs} | {k.lower(): parse_setting(specs[k.lower()], v) for k, _, v in (w.partition("=") for w in words)}
    for key, value in settings.items():
        setattr(cfg, key, value)
    state = dequantize_state(load_artifact(run_dir / "artifact.golf")[1])
    stream = torch.from_numpy(val_tokens(str(Path(cfg.data_path) / "fineweb_val_*.bin"), cfg.eval_seq_len, cfg.vocab_size).astype("int64"))
    tokens = stream[:int(targets) + 1 if int(targets) else None].to(device)
    table, alone = byte_table(load_tokenizer(cfg.tokenizer_path, cfg.vocab_size)).to(device), Ranks(device=device)
    samples = {}

    def measure(label: str, call) -> None:
        start = time.perf_counter()
        loss, bpb = call()[:2]
        samples[f"{label}: nats"], samples[f"{label}: bpb"] = [loss], [bpb]
        print(f"{label}: {loss:.5f} nats, {bpb:.5f} bpb, {time.perf_counter() - start:.0f} s", flush=True)

    rows, layout = max(1, cfg.val_batch_size // cfg.eval_seq_len), model_layout(cfg, 1)
    load_named(model, state)
    measure("sliding window", lambda: sliding_loss(model, tokens, table, cfg.eval_seq_len, cfg.eval_stride, rows, alone))
    measure("score-first training", lambda: score_first(model, layout, state, tokens, table, cfg, alone))
    size, rank, rates = min(cfg.ttt_chunk_size, cfg.eval_seq_len // 4), min(cfg.ttt_lora_rank, cfg.model_dim // 4), (3e-4, 1e-3, 3e-3)

    def adapters(label: str, lr: float, chunk: int = size) -> None:
        measure(label, lambda: score_documents(model, state, tokens, table, replace(cfg, ttt_lora_lr=lr, ttt_chunk_size=chunk, ttt_lora_rank=rank), alone))

    adapters("rows by document", 0.0)
    for lr in rates:
        adapters(f"adapters, lr {lr:g}", lr)
    best = min(rates, key=lambda lr: samples[f"adapters, lr {lr:g}: nats"])
    for chunk in (size // 2, 2 * size):
        adapters(f"adapters, chunk {chunk}", best, chunk)
    spans = document_spans(tokens)
    facts = {"targets": tokens.numel() - 1, "documents": len(spans), "recipe": meta.get("recipe"), "seed": meta.get("seed"), "row": cfg.eval_seq_len, "stride": cfg.eval_stride,
             "ttt_lr": cfg.ttt_lr, "ttt_epochs": cfg.ttt_epochs, "rank": rank, "chunk": size, "best_lr": best}
    print(record_result(name, samples, "nats a token; bits per byte", "scores of RUN_DIR/artifact.golf on its own validation shards", facts))


if __name__ == "__main__":
    main(*sys.argv[1:])

# golfnb train_gpt.py: the chapters 00 to 19 of golfnb folded into one file. Made by `golfnb script`; do not edit.
# recipe pr549 | source sha256 dc5b78a46ad78078 | Apache-2.0
# torchrun --standalone --nproc_per_node=8 train_gpt.py   (settings are environment variables)

import functools
import gc
import glob
import hashlib
import heapq
import importlib
import importlib.util
import json
import lzma
import math
import numpy as np
import os
import queue
import re
import sentencepiece as spm
import shutil
import struct
import sys
import threading
import time
import torch
import torch.distributed as dist
import torch.nn.functional as F
import warnings
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import Field, asdict, astuple, dataclass, field, fields, replace
from datetime import timedelta
from functools import lru_cache
from importlib import import_module
from itertools import chain, groupby
from math import prod, sqrt
from pathlib import Path
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from typing import NamedTuple

# ---- config ----

class GolfError(Exception):
    "What was wrong, what was expected, what was found and what to do, in one sentence."

def setting(default, # the default; its type is the setting's type
            meaning: str, # what it does, and its unit
            *choices: str, # the words allowed, where only some are
           ) -> Field: # a dataclass field that knows its meaning
    "Declare one setting of `Config`."
    return field(default=default, metadata={"meaning": meaning, "choices": choices})

@dataclass
class RunSettings:
    "Where a run reads and writes, how long it lasts, what it logs."
    recipe: str = setting("pr549", "recipe the settings started from: a name in RECIPES")
    run_id: str = setting("", "name of the run's directory; empty: chosen by main")
    runs_dir: str = setting("runs", "directory that holds the run directories: path")
    data_path: str = setting("./data/datasets/fineweb10B_sp1024", "directory of fineweb_train_*.bin and fineweb_val_*.bin: path")
    tokenizer_path: str = setting("./data/tokenizers/fineweb_1024_bpe.model", "SentencePiece model file: path")
    seed: int = setting(1337, "seed of the initial weights and of the coprime loader: integer")
    iterations: int = setting(9000, "training steps at most: steps")
    warmdown_iters: int = setting(3500, "length of the final linear decay of the learning rate to 0: steps")
    warmup_steps: int = setting(20, "untimed steps before the run, undone afterwards (they compile, they do not train): steps")
    max_wallclock_seconds: float = setting(600.0, "training time after which the run stops; 0: no cap: seconds")
    val_loss_every: int = setting(4000, "steps between validations; 0: only at the end: steps")
    train_log_every: int = setting(500, "steps between logged training losses (the first ten are logged too); 0: none: steps")
    weight_dtype: str = setting("auto", "dtype of banks and tables; auto: bf16 on CUDA, fp32 on CPU", "auto", "bf16", "fp32", "fp64")
    matrix_dtype: str = setting("auto", "dtype of the banks alone; auto: as weight_dtype", "auto", "bf16", "fp32")
    table_dtype: str = setting("auto", "dtype of the tables alone; auto: as weight_dtype", "auto", "bf16", "fp32")
    buffer_dtype: str = setting("auto", "dtype of the rotary tables; auto: as weight_dtype", "auto", "bf16", "fp32")
    state_dtype: str = setting("auto", "dtype of momenta and moments; auto: each as its parameter's", "auto", "bf16", "fp32")
    attention: str = setting("auto", "attention backend, by name; auto: the fastest that works here (chapter 06)", "auto", "cudnn", "flash", "efficient", "math", "fa3", "fa4")
    compile: str = setting("auto", "torch.compile the forward; auto: on CUDA only", "auto", "0", "1")
    step_graph: bool = setting(True, "on CUDA, record forward and backward of training as one CUDA graph (chapter 15): 0 or 1")

@dataclass
class BatchSettings:
    "What one step reads, and how validation is cut."
    loader: str = setting("sequential", "order of the training windows (chapter 03)", "sequential", "coprime", "packed")
    train_batch_tokens: int = setting(786_432, "tokens of one optimizer step, all ranks and micro-steps together: tokens")
    train_seq_len: int = setting(2048, "length of a training row: tokens")
    eval_seq_len: int = setting(2048, "length of a validation window: tokens")
    eval_stride: int = setting(64, "targets scored by each sliding window after the first: tokens")
    val_batch_size: int = setting(524_288, "tokens of one validation forward, all ranks together: tokens")

@dataclass
class ModelSettings:
    "Shapes and parts of the transformer."
    vocab_size: int = setting(1024, "pieces of the tokenizer, rows of the token table: count")
    num_layers: int = setting(11, "transformer blocks: count")
    model_dim: int = setting(512, "width of the residual stream: channels")
    num_heads: int = setting(8, "query heads: count")
    num_kv_heads: int = setting(4, "key and value heads, each shared by num_heads / num_kv_heads query heads: count")
    mlp_mult: float = setting(3.0, "MLP width / model_dim: ratio")
    rope_base: float = setting(10_000.0, "base of the rotary frequencies: number")
    rope_dims: int = setting(16, "channels of each head that are rotated: channels")
    rope_train_len: int = setting(1024, "row length beyond which the rotary base is NTK-scaled: tokens")
    logit_softcap: float = setting(30.0, "logits are cap * tanh(logits / cap): logits")
    qk_gain_init: float = setting(1.5, "initial gain of every query head after rotation: ratio")
    ln_scale: bool = setting(True, "scale the norms of block l by 1 / sqrt(l + 1): 0 or 1")
    xsa_last_n: int = setting(4, "last blocks with exclusive self-attention; num_layers or more: all: blocks")
    skip_gate: str = setting("one", "weights of the U-Net skips at the start: one (as published), 0.18, zero, frozen (zero, and held for 50 steps), or sigmoid (a scalar gate at -1.5)", "one", "0.18", "zero", "frozen", "sigmoid")
    negative_slope: float = setting(0.5, "slope s below zero in leaky_relu(x, s)**2; 0 is relu**2: ratio")
    tied_embed_init_std: float = setting(0.005, "standard deviation of the initial token table: number")
    bigram_vocab_size: int = setting(1536, "rows of the bigram hash table; 0: no table: rows")
    bigram_dim: int = setting(128, "width of the bigram hash table: channels")
    ve_enabled: bool = setting(True, "value embeddings: 0 or 1")
    ve_dim: int = setting(128, "width of the value-embedding table: channels")
    ve_layers: str = setting("9,10", "blocks that add a value embedding, numbered from 0: list of blocks")

@dataclass
class OptimizerSettings:
    "Learning rates, decays, momenta, and how the update is computed and shared out."
    matrix_lr: float = setting(0.025, "Muon learning rate of the banks: per step")
    scalar_lr: float = setting(0.025, "AdamW learning rate of vectors, scalars and small projections: per step")
    tied_embed_lr: float = setting(0.035, "AdamW learning rate of the token, bigram and value tables: per step")
    embed_lr: float = setting(0.6, "learning rate of an untied embedding: accepted, unused while embeddings are tied: per step")
    head_lr: float = setting(0.008, "learning rate of an untied head: accepted, unused while embeddings are tied: per step")
    muon_momentum: float = setting(0.99, "Muon momentum once warmed up: ratio")
    muon_momentum_warmup_start: float = setting(0.92, "Muon momentum at step 0: ratio")
    muon_momentum_warmup_steps: int = setting(1500, "steps of the linear momentum warm-up: steps")
    muon_backend_steps: int = setting(5, "Newton-Schulz iterations: count")
    ns: str = setting("ns5", "Newton-Schulz coefficients: the quintic, or Polar Express", "ns5", "polar")
    muon_wd: float = setting(0.04, "decoupled weight decay of the banks: per unit of learning rate")
    adam_wd: float = setting(0.04, "decoupled weight decay of everything else: per unit of learning rate")
    beta1: float = setting(0.9, "AdamW decay of the first moment: ratio")
    beta2: float = setting(0.95, "AdamW decay of the second moment: ratio")
    adam_eps: float = setting(1e-8, "AdamW epsilon: number")
    grad_clip_norm: float = setting(0.3, "largest L2 norm of the gradient; 0: no clipping: norm")
    clip: str = setting("local", "whose norm: each rank's own before averaging (as published), or the true global one", "local", "global")
    plan: str = setting("pr399", "banks and communication order: pr399, shared_mlp, pr125, pr132, or buckets such as qo22,kv22,mlp22 (chapters 04 and 11): word")

@dataclass
class ExportSettings:
    "Which weights leave the run, and how they are made small."
    averaging: str = setting("ema", "weights that are exported", "ema", "swa", "ema+swa", "none")
    ema_enabled: bool = setting(True, "0 means averaging=none unless AVERAGING is given: 0 or 1")
    ema_decay: float = setting(0.997, "weight of the old average at each step: ratio")
    swa_enabled: bool = setting(True, "accepted as published; AVERAGING decides: 0 or 1")
    swa_every: int = setting(50, "steps between two snapshots of the tight average: steps")
    late_qat: bool = setting(True, "with qat_banks=1: round once the learning rate is low; 0: never: 0 or 1")
    late_qat_threshold: float = setting(0.15, "learning-rate multiplier below which it starts: ratio")
    qat_banks: bool = setting(False, "owners publish weights rounded to the int6 grid: 0 or 1")
    scale_floor: bool = setting(True, "int6 scales at least 1/31, int8 scales at least 1/127 (as published): 0 or 1")
    quant_clip_range: int = setting(31, "largest integer of the int6 grid: steps of the grid")
    use_gptq: bool = setting(False, "full-Hessian GPTQ: 0 or 1")
    gptq_calib_samples: int = setting(64, "calibration batches per rank: batches")
    gptq_reserve_ms: float = setting(14_000.0, "training time kept back for calibration: milliseconds")
    small_tensor: int = setting(65_536, "tensors of at most so many elements are stored as fp16: elements")
    codec: str = setting("lzma", "codec of the artifact (chapter 17)", "lzma", "zlib", "rans", "best", "none", "brotli", "zstd")
    target_bytes: int = setting(16_000_000, "artifact and code together at most: bytes")

@dataclass
class TttSettings:
    "Legal score-first test-time training."
    ttt_enabled: bool = setting(True, "adapt while scoring, after the plain scores: 0 or 1")
    ttt_lr: float = setting(0.002, "SGD learning rate at the first chunk, cosine to 0: per step")
    ttt_epochs: int = setting(3, "passes over a chunk once it is scored: passes")
    ttt_chunk_tokens: int = setting(32_768, "tokens scored before they are trained on: tokens")
    ttt_freeze_blocks: int = setting(0, "blocks, from the bottom, that are not adapted: blocks")
    ttt_freeze_scope: str = setting("all", "what of a frozen block is frozen; controls: its scales and mixes only, as published", "all", "controls")
    ttt_momentum: float = setting(0.9, "SGD momentum: ratio")
    ttt_batch_seqs: int = setting(32, "rows of one update, per rank: rows")
    ttt_grad_clip: float = setting(1.0, "largest L2 norm of the averaged gradient: norm")
    ttt_form: str = setting("chunks", "what adapts: all weights, chunk by chunk (chapter 18), or low-rank adapters per document (18b)", "chunks", "adapters")
    ttt_lora_rank: int = setting(96, "rank of every adapter: count")
    ttt_lora_lr: float = setting(1e-4, "Adam learning rate of the adapters: per step")
    ttt_beta2: float = setting(0.999, "Adam decay of the adapters' second moment: ratio")
    ttt_chunk_size: int = setting(48, "tokens of a document scored before its adapters learn them: tokens")
    ttt_batch_size: int = setting(64, "documents adapted side by side, per rank: documents")

def _positive_problems(cfg, *names: str) -> Iterator[str]:
    "One sentence for each of the named settings that is not above zero."
    for name in names:
        if getattr(cfg, name) <= 0:
            yield f"{name.upper()} must be above 0, found {getattr(cfg, name)}: set it to a positive value"

PLANS = ("pr399", "shared_mlp", "pr125", "pr132")  # bucketings with a name (chapter 04)

def model_problems(cfg: ModelSettings, # shapes to check
                   longest: int = 1, # longest row the model will see: tokens
                  ) -> Iterator[str]: # sentences, none when the model can be built
    "What makes the model impossible."
    yield from _positive_problems(cfg, "vocab_size", "num_layers", "model_dim", "num_heads", "num_kv_heads", "mlp_mult",
                                  "rope_base", "rope_dims", "rope_train_len", "logit_softcap", "tied_embed_init_std")
    if 0 < cfg.mlp_mult and int(cfg.mlp_mult * cfg.model_dim) < 1:
        yield f"MLP_MULT must give the MLP at least one channel, found {cfg.mlp_mult} of {cfg.model_dim}: raise it"
    if cfg.plan not in PLANS and not re.fullmatch(r"[a-z]+\d+([,+][a-z]+\d+)*(/[a-z0-9._]+)*", cfg.plan):
        yield f"PLAN must be one of {', '.join(PLANS)}, or buckets such as qo22,kv22,mlp22, found {cfg.plan!r}: choose one of these"
    if cfg.vocab_size > 65_536:
        yield f"VOCAB_SIZE must be at most 65536 (tokens are stored as uint16), found {cfg.vocab_size}: use a smaller tokenizer"
    if cfg.model_dim % cfg.num_heads:
        yield f"MODEL_DIM must be divisible by NUM_HEADS, found {cfg.model_dim} and {cfg.num_heads}: change one of them"
    if cfg.num_heads % cfg.num_kv_heads:
        yield f"NUM_HEADS must be divisible by NUM_KV_HEADS, found {cfg.num_heads} and {cfg.num_kv_heads}: change one of them"
    width = cfg.model_dim // cfg.num_heads
    if cfg.rope_dims % 2 or cfg.rope_dims > width:
        yield f"ROPE_DIMS must be even and at most the head width {width}, found {cfg.rope_dims}: choose an even number up to {width}"
    if longest > cfg.rope_train_len and cfg.rope_dims == 2:
        yield f"rows of {longest} tokens need NTK scaling, which needs ROPE_DIMS of at least 4, found 2: set ROPE_DIMS=4 or ROPE_TRAIN_LEN={longest}"
    if cfg.xsa_last_n < 0 or cfg.bigram_vocab_size < 0 or cfg.bigram_vocab_size == 1:
        yield f"XSA_LAST_N must be 0 or more and BIGRAM_VOCAB_SIZE 0 or at least 2, found {cfg.xsa_last_n} and {cfg.bigram_vocab_size}: change them"
    if not 0 <= cfg.negative_slope <= 1:
        yield f"NEGATIVE_SLOPE must lie in [0, 1], found {cfg.negative_slope}: 0 is relu**2, 0.5 is LeakyReLU**2"
    if cfg.bigram_vocab_size:
        yield from _positive_problems(cfg, "bigram_dim")
    if cfg.ve_enabled:
        yield from _positive_problems(cfg, "ve_dim")
        yield from ve_problems(cfg)

def ve_problems(cfg: ModelSettings, # its ve_layers is checked
               ) -> Iterator[str]: # sentences
    "What is wrong with the list of value-embedding layers."
    parts = [p.strip() for p in cfg.ve_layers.split(",") if p.strip()]
    if not all(p.isdecimal() for p in parts):
        yield f"VE_LAYERS must be block numbers parted by commas, found {cfg.ve_layers!r}: write it like VE_LAYERS=9,10"
        return
    if len(set(map(int, parts))) != len(parts) or not parts:
        yield f"VE_LAYERS must name at least one block and none twice, found {cfg.ve_layers!r}: fix the list or set VE_ENABLED=0"
    if any(int(p) >= cfg.num_layers for p in parts):
        yield f"VE_LAYERS must lie in 0..{cfg.num_layers - 1} (NUM_LAYERS={cfg.num_layers}), found {cfg.ve_layers!r}: change VE_LAYERS, or set VE_ENABLED=0"

def batch_problems(cfg: "Config", # settings to check
                   world: int, # ranks
                  ) -> Iterator[str]: # sentences, none when the batch can be shared out
    "What makes the batch or the validation windows impossible at this world size."
    yield from _positive_problems(cfg, "train_batch_tokens", "train_seq_len", "eval_seq_len", "eval_stride", "val_batch_size", "iterations")
    rows, parts = cfg.train_batch_tokens // cfg.train_seq_len, world * cfg.grad_accum(world)
    if cfg.train_batch_tokens % cfg.train_seq_len:
        yield f"TRAIN_BATCH_TOKENS must be whole rows of TRAIN_SEQ_LEN={cfg.train_seq_len} tokens, found {cfg.train_batch_tokens}: set it to {max(1, rows) * cfg.train_seq_len}"
    elif rows % parts or not rows:
        yield (f"the rows of a batch (TRAIN_BATCH_TOKENS / TRAIN_SEQ_LEN) must be a multiple of {world} ranks x {cfg.grad_accum(world)} micro-steps, found {rows}: "
               f"set TRAIN_BATCH_TOKENS={max(1, rows // parts) * parts * cfg.train_seq_len} or use another number of ranks")
    if cfg.eval_stride > cfg.eval_seq_len:
        yield f"EVAL_STRIDE must be at most EVAL_SEQ_LEN, or targets are left out, found {cfg.eval_stride} and {cfg.eval_seq_len}: lower EVAL_STRIDE"
    if cfg.val_batch_size < cfg.eval_seq_len:
        yield f"VAL_BATCH_SIZE must hold one window of EVAL_SEQ_LEN={cfg.eval_seq_len} tokens, found {cfg.val_batch_size}: raise it"

SWA_BELOW = 0.2 # share of the peak learning rate under which tight SWA takes snapshots

def snapshot_problems(cfg: "Config", # settings to check
                     ) -> Iterator[str]: # sentences
    "Whether tight SWA would end without a snapshot; a run that ends by the clock can only find out."
    last = cfg.iterations // cfg.swa_every * cfg.swa_every # steps done at the last snapshot
    if "swa" in cfg.averaging and not cfg.train_cap_ms and (not last or cfg.iterations - last + 1 >= SWA_BELOW * cfg.warmdown_iters):
        yield (f"AVERAGING={cfg.averaging} needs a snapshot in the last fifth of the warmdown, found none with SWA_EVERY={cfg.swa_every}, WARMDOWN_ITERS={cfg.warmdown_iters} "
               f"and ITERATIONS={cfg.iterations}: lower SWA_EVERY, raise WARMDOWN_ITERS or set AVERAGING=ema")

def schedule_problems(cfg: "Config", # settings to check
                     ) -> Iterator[str]: # sentences
    "What makes optimizer, averaging, quantization or test-time training impossible."
    for name in ("warmdown_iters", "warmup_steps", "max_wallclock_seconds", "val_loss_every", "train_log_every", "matrix_lr", "scalar_lr", "tied_embed_lr", "muon_wd", "adam_wd",
                 "muon_momentum_warmup_steps", "grad_clip_norm", "ttt_lr", "ttt_epochs", "ttt_freeze_blocks", "ttt_grad_clip", "ttt_lora_lr", "gptq_reserve_ms", "seed"):
        if getattr(cfg, name) < 0:
            yield f"{name.upper()} must be 0 or more, found {getattr(cfg, name)}: set it to 0 or above"
    for name in ("muon_momentum", "muon_momentum_warmup_start", "beta1", "beta2", "ema_decay", "ttt_momentum", "ttt_beta2"):
        if not 0 <= getattr(cfg, name) < 1:
            yield f"{name.upper()} must lie in [0, 1), found {getattr(cfg, name)}: choose a ratio below 1"
    yield from _positive_problems(cfg, "adam_eps", "muon_backend_steps", "swa_every", "target_bytes", "gptq_calib_samples")
    yield from snapshot_problems(cfg)
    if cfg.seed >= 2**63:
        yield f"SEED must be below 2^63, found {cfg.seed}: choose a smaller one"
    if cfg.weight_dtype == "fp64" and cfg.matrix_dtype != "auto":
        yield f"MATRIX_DTYPE must be auto with WEIGHT_DTYPE=fp64, found {cfg.matrix_dtype}: leave it out"
    if cfg.ns == "polar" and cfg.muon_backend_steps > 5:
        yield f"MUON_BACKEND_STEPS must be at most 5 with NS=polar (it has five triples of coefficients), found {cfg.muon_backend_steps}: lower it"
    if cfg.run_id in (".", "..") or "/" in cfg.run_id:
        yield f"RUN_ID must be the name of a directory in RUNS_DIR, without slashes, found {cfg.run_id!r}: choose a plain name"
    if cfg.use_gptq and 0 < 1000 * cfg.max_wallclock_seconds <= cfg.gptq_reserve_ms:
        yield f"GPTQ_RESERVE_MS must be less than the training time of {cfg.max_wallclock_seconds:g} s, found {cfg.gptq_reserve_ms:g}: lower it or raise MAX_WALLCLOCK_SECONDS"
    if cfg.quant_clip_range != 31:
        yield f"QUANT_CLIP_RANGE must be 31, the only grid that is built, found {cfg.quant_clip_range}: leave it out"
    if cfg.ttt_enabled:
        yield from _positive_problems(cfg, "ttt_batch_seqs", "ttt_chunk_tokens")
        if cfg.ttt_chunk_tokens < cfg.eval_seq_len:
            yield f"TTT_CHUNK_TOKENS must hold one row of EVAL_SEQ_LEN={cfg.eval_seq_len} tokens, found {cfg.ttt_chunk_tokens}: raise it"
        yield from _positive_problems(cfg, "ttt_lora_rank", "ttt_batch_size")
        if cfg.ttt_form == "adapters" and not 2 <= cfg.ttt_chunk_size <= cfg.eval_seq_len // 2:
            yield f"TTT_CHUNK_SIZE must be 2 to half a row of EVAL_SEQ_LEN={cfg.eval_seq_len} tokens, found {cfg.ttt_chunk_size}: change it"
        if cfg.ttt_form == "adapters" and cfg.ttt_freeze_blocks:
            yield f"TTT_FREEZE_BLOCKS must be 0 with TTT_FORM=adapters, which leave all blocks as they are, found {cfg.ttt_freeze_blocks}: set it to 0"
        if cfg.ttt_freeze_blocks > cfg.num_layers:
            yield f"TTT_FREEZE_BLOCKS must be at most NUM_LAYERS={cfg.num_layers}, found {cfg.ttt_freeze_blocks}: lower it"

MODEL_KEYS = ("vocab_size", "num_layers", "model_dim", "num_heads", "num_kv_heads", "mlp_mult", "rope_base", "rope_dims", "rope_train_len",
              "logit_softcap", "ln_scale", "xsa_last_n", "bigram_vocab_size", "bigram_dim", "ve_enabled", "ve_dim", "ve_layers",
              "skip_gate", "negative_slope", "train_seq_len", "qk_gain_init", "tied_embed_init_std", "plan", "small_tensor")

@dataclass
class Config(RunSettings, BatchSettings, ModelSettings, OptimizerSettings, ExportSettings, TttSettings):
    "Every setting of a run. The defaults are recipe pr549."
    notices: list[str] = field(default_factory=list) # what was accepted and will be done otherwise: sentences to log

    @property
    def head_dim(self) -> int: return self.model_dim // self.num_heads  # channels of a head
    @property
    def kv_dim(self) -> int: return self.num_kv_heads * self.head_dim  # channels of all key heads
    @property
    def mlp_dim(self) -> int: return int(self.mlp_mult * self.model_dim)  # channels of the MLP
    @property
    def ve_layer_list(self) -> list[int]:  # blocks with a value embedding
        return [int(p) for p in self.ve_layers.split(",") if p.strip()] if self.ve_enabled else []

    @property
    def train_cap_ms(self) -> float: # ms of training after which the run stops, less what GPTQ is to have; 0: no cap
        return 1000 * self.max_wallclock_seconds - self.gptq_reserve_ms * self.use_gptq if self.max_wallclock_seconds else 0.0

    def grad_accum(self, world: int) -> int: # ranks -> micro-steps of one step
        return max(1, 8 // world)
    def rows_per_micro(self, world: int) -> int: # ranks -> rows of train_seq_len per rank and micro-step
        return self.train_batch_tokens // (world * self.grad_accum(world) * self.train_seq_len)
    def rows_per_score(self, world: int, row: int = 0) -> int: # ranks; tokens of a row, 0: eval_seq_len -> rows per rank and scoring forward
        return max(1, self.val_batch_size // ((row or self.eval_seq_len) * world * self.grad_accum(world)))
    def check(self, world: int) -> None: # ranks; raises GolfError for the first thing that cannot work
        if world < 1:
            raise GolfError(f"the number of ranks must be at least 1, found {world}: start with torchrun --nproc_per_node=1")
        problems = chain(_positive_problems(self, "train_seq_len", "eval_seq_len"), model_problems(self, max(self.train_seq_len, self.eval_seq_len)),
                         batch_problems(self, world), schedule_problems(self))
        for problem in problems:
            raise GolfError(problem)
    def model_settings(self) -> dict: # JSON-able: what rebuilds the model
        return {key: getattr(self, key) for key in MODEL_KEYS}

DEFAULT_RECIPE = 'pr549'

GOLF_RECIPE = dict(negative_slope=0.5, bigram_vocab_size=2816, bigram_dim=112, xsa_last_n=11, warmdown_iters=3500, loader="coprime", clip="global",
                   ttt_enabled=True, ttt_freeze_blocks=0, qat_banks=True, scale_floor=False, codec="best")

RECIPES = {
    "pr399": dict(negative_slope=0.0, bigram_vocab_size=2048, bigram_dim=128, xsa_last_n=4, warmdown_iters=3000, loader="sequential", clip="local",
                  ttt_enabled=False, qat_banks=False, scale_floor=True),
    "pr549": dict(negative_slope=0.5, bigram_vocab_size=1536, bigram_dim=128, xsa_last_n=4, warmdown_iters=3500, loader="sequential", clip="local",
                  ttt_enabled=True, ttt_freeze_blocks=0, qat_banks=False, scale_floor=True),
    "pr726": dict(negative_slope=0.5, bigram_vocab_size=1536, bigram_dim=128, xsa_last_n=4, warmdown_iters=3500, loader="coprime", clip="local",
                  ttt_enabled=True, ttt_freeze_blocks=2, qat_banks=False, scale_floor=True),
    "golf": GOLF_RECIPE,
    "demo": dict(GOLF_RECIPE, num_layers=4, model_dim=128, num_heads=4, num_kv_heads=2, rope_dims=16, xsa_last_n=4, bigram_vocab_size=512, bigram_dim=32,
                 ve_dim=32, ve_layers="2,3", train_seq_len=256, eval_seq_len=256, eval_stride=64, train_batch_tokens=8192, val_batch_size=16_384,
                 iterations=240, warmdown_iters=120, warmup_steps=2, max_wallclock_seconds=0.0, val_loss_every=0, train_log_every=50,
                 ema_decay=0.97, muon_momentum=0.95, muon_momentum_warmup_start=0.85, muon_momentum_warmup_steps=100,
                 ttt_chunk_tokens=4096, ttt_epochs=1, ttt_batch_seqs=4, small_tensor=4096, data_path="runs/demo/data", tokenizer_path="runs/demo/data/tokenizer.model"),
}

def parse_setting(spec: Field, # a setting of Config
                  text: str, # as found in the environment
                 ) -> bool | int | float | str: # value of the setting's type, in its unit
    "Read one value. Raises GolfError when it does not parse or is not one of the choices."
    name, kind, choices = spec.name.upper(), type(spec.default), spec.metadata["choices"]
    if kind is bool:
        value = {"1": True, "true": True, "0": False, "false": False}.get(text.strip().lower())
        if value is None:
            raise GolfError(f"{name} must be 0 or 1, found {text!r}: set {name}=0 or {name}=1")
        return value
    try:
        value = kind(text)
    except ValueError:
        raise GolfError(f"{name} must be {'a whole number' if kind is int else 'a number'}, found {text!r}: set it like {name}={spec.default}") from None
    if kind is float and not math.isfinite(value):
        raise GolfError(f"{name} must be a finite number, found {text!r}: set it like {name}={spec.default}")
    if choices and value not in choices:
        raise GolfError(f"{name} must be one of {', '.join(choices)}, found {text!r}: choose one of these")
    return value

def setting_specs() -> dict[str, Field]: # attribute name -> dataclass field
    "All settings of `Config`, in reading order (a recipe's notices are not a setting)."
    groups = (RunSettings, BatchSettings, ModelSettings, OptimizerSettings, ExportSettings, TttSettings)
    return {spec.name: spec for group in groups for spec in fields(group)}

NOT_BUILT = {"TIE_EMBEDDINGS": 1.0, "QAT_ENABLED": 0.0, "MTP_NUM_HEADS": 0.0, "MTP_LOSS_WEIGHT": 0.2, "MUON_BETA2": 0.95, "LAWA_ENABLED": 0.0,
             "LAWA_K": 10.0, "LAWA_FREQ": 100.0, "DTG_ENABLED": 0.0, "GATED_ATTENTION": 0.0, "VALUE_RESIDUAL": 0.0}

def refuse_not_built(env: Mapping[str, str], # environment variables
                    ) -> None: # raises GolfError
    "Refuse a known setting that is not built, unless it is at its off value."
    for name, off in NOT_BUILT.items():
        text = env.get(name, str(off)).strip().lower()
        try:
            value = float({"true": "1", "false": "0"}.get(text, text))
        except ValueError:
            raise GolfError(f"{name} must be a number, found {text!r}: leave it out, or set it to {off:g}") from None
        if value != off:
            raise GolfError(f"{name} is not built in golfnb and must stay {off:g}, found {text!r}: leave it out, or set it to {off:g}")

def load_config(env: Mapping[str, str], # environment variables, upper case; unknown names are ignored
               ) -> Config: # recipe first, explicit variables over it
    "Read a configuration. Raises GolfError for an unknown recipe, a value that does not parse, a setting that is not built."
    recipe = env.get("RECIPE", DEFAULT_RECIPE)
    if recipe not in RECIPES:
        raise GolfError(f"RECIPE must be one of {', '.join(RECIPES)}, found {recipe!r}: choose one of these")
    refuse_not_built(env)
    values = dict(RECIPES[recipe], recipe=recipe)
    for name, spec in setting_specs().items():
        if name != "recipe" and name.upper() in env:
            values[name] = parse_setting(spec, env[name.upper()])
    cfg = Config(**values)
    if not cfg.ema_enabled and "AVERAGING" not in env:
        cfg.averaging = "none"
    if cfg.use_gptq:
        kept = f"{cfg.gptq_reserve_ms:.0f} ms of the training time are kept back for its calibration" if cfg.max_wallclock_seconds else "its calibration comes after training"
        cfg.notices.append(f"USE_GPTQ=1: full-Hessian GPTQ, {cfg.gptq_calib_samples} calibration batches per rank; {kept}")
    return cfg

# ---- bpb ----

def bits_per_byte(nll_sum: float, # sum of the losses: nats
                  byte_count: float, # bytes of the scored targets
                 ) -> float: # bits per byte
    "The score of a text from its summed loss. Raises GolfError when there are no bytes."
    if byte_count <= 0:
        raise GolfError(f"bits per byte need at least one byte of scored text, found {byte_count}: check tokenizer and validation shards")
    return float(nll_sum) / math.log(2) / float(byte_count)

def load_tokenizer(path: str | Path, # SentencePiece model file
                   vocab_size: int | None = None, # pieces expected; None: not checked
                  ) -> spm.SentencePieceProcessor: # ready to encode and decode
    "Load a tokenizer. Raises GolfError when it is missing, damaged, or of another vocabulary size."
    if not Path(path).is_file():
        raise GolfError(f"no tokenizer at {path}: expected a SentencePiece .model file; set TOKENIZER_PATH")
    try:
        sp = spm.SentencePieceProcessor(model_file=str(path))
    except (RuntimeError, OSError) as error:
        raise GolfError(f"cannot read tokenizer {path}: expected a SentencePiece .model file, found something else or a damaged one; fetch or train it again") from error
    if vocab_size is not None and sp.get_piece_size() != vocab_size:
        raise GolfError(f"tokenizer {path} must have VOCAB_SIZE={vocab_size} pieces, found {sp.get_piece_size()}: set VOCAB_SIZE={sp.get_piece_size()} or use the matching tokenizer and shards")
    return sp

def tokenizer_hash(path: str | Path, # SentencePiece model file
                  ) -> str: # SHA-256, 64 hex digits
    "What identifies a tokenizer in an artifact. Raises GolfError when the file is missing."
    try:
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()
    except OSError as error:
        raise GolfError(f"cannot read tokenizer {path} ({error.strerror}): set TOKENIZER_PATH to a SentencePiece .model file") from None

@dataclass
class ByteTable:
    "Bytes of every token of a vocabulary."
    base: torch.Tensor # int16 [V], bytes without the leading space
    leading_space: torch.Tensor # bool [V], a space in front, unless a boundary comes before
    boundary: torch.Tensor # bool [V], stands for no text

    def to(self, device: torch.device | str) -> "ByteTable": # the same tables there
        return ByteTable(self.base.to(device), self.leading_space.to(device), self.boundary.to(device))

def byte_table(sp: spm.SentencePieceProcessor, # tokenizer
              ) -> ByteTable: # on CPU
    "Tabulate the bytes of every piece of a tokenizer."
    size = sp.get_piece_size()
    base, leading, boundary = torch.zeros(size, dtype=torch.int16), torch.zeros(size, dtype=torch.bool), torch.zeros(size, dtype=torch.bool)
    for i in range(size):
        piece = sp.id_to_piece(i)
        if sp.is_control(i) or sp.is_unknown(i) or sp.is_unused(i):
            boundary[i] = True
        elif sp.is_byte(i):
            base[i] = 1
        else:
            leading[i] = piece.startswith("\u2581")
            base[i] = len(piece.removeprefix("\u2581").replace("\u2581", " ").encode())
    return ByteTable(base, leading, boundary)

def target_bytes(table: ByteTable, # on the device of the tokens
                 prev: torch.Tensor, # int64, token before each target
                 target: torch.Tensor, # int64, same shape
                ) -> torch.Tensor: # int64, same shape: bytes of text each target stands for
    "Bytes of each target, given the token before it. `prev` and `target` have any one shape."
    return table.base[target].long() + (table.leading_space[target] & ~table.boundary[prev]).long()

def unigram_bpb(train_counts: np.ndarray | torch.Tensor, # int [V], how often each token occurs in training
                val_tokens: np.ndarray | torch.Tensor, # int [n + 1] validation stream, n targets
                table: ByteTable, # of the tokenizer, on CPU
               ) -> float: # bits per byte
    "The score of an add-one smoothed unigram model. Raises GolfError when counts and vocabulary differ."
    counts = torch.as_tensor(np.asarray(train_counts, dtype=np.float64))
    if counts.shape != table.base.shape:
        raise GolfError(f"token counts must be one for each of {len(table.base)} pieces, found shape {tuple(counts.shape)}: count with numpy.bincount(tokens, minlength=vocab_size)")
    tokens = torch.as_tensor(np.asarray(val_tokens, dtype=np.int64))
    prev, target = tokens[:-1], tokens[1:]
    log_prob = torch.log((counts + 1) / (counts.sum() + len(counts)))
    return bits_per_byte(-log_prob[target].sum().item(), target_bytes(table, prev, target).sum().item())

# ---- shards ----

def atomic_write(path: str | Path, # final name; missing directories are made
                 data: bytes | str, # contents; text is written as UTF-8
                ) -> None:
    "Write a file whole or not at all. Raises GolfError when it cannot be written, a full disk included."
    path = Path(path)
    data = data.encode() if isinstance(data, str) else data
    temp = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(temp, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temp, path)
    except OSError as error:
        free = shutil.disk_usage(path.parent).free if path.parent.is_dir() else 0
        raise GolfError(f"cannot write the {len(data):,} bytes of {path} ({error.strerror}; {free:,} bytes free on its disk): free some space or write elsewhere") from error
    finally:
        _remove_quietly(temp)

def _remove_quietly(path: Path) -> None: # a temporary file, often renamed already
    "Remove a file if it is there; a path that cannot exist is no error."
    try:
        path.unlink(missing_ok=True)
    except OSError:
        pass

SHARD_MAGIC = 20240520

SHARD_VERSION = 1

HEADER_WORDS = 256

HEADER_BYTES = 1024

BOS_ID = 1 # the token that starts every document

def read_header(path: str | Path, # a shard
               ) -> int: # tokens in it
    "Check a shard's header and length. Raises GolfError for a file that is missing, empty, damaged or of another format."
    try:
        stat = os.stat(path)
    except OSError as error:
        raise GolfError(f"cannot read shard {path} ({error.strerror}): check the path") from None
    return _checked_header(str(path), stat.st_size, stat.st_mtime_ns)

@lru_cache(maxsize=None)
def _checked_header(path: str, # a shard
                    size: int, # bytes of the file
                    mtime_ns: int, # time of its last change: part of the cache's key
                   ) -> int: # tokens
    "The header's token count, after every check. Errors are not cached."
    if size < HEADER_BYTES + 2:
        raise GolfError(f"shard {path} must have a header of {HEADER_BYTES} bytes and at least one token, found {size} bytes: the file is empty or cut off, build it again")
    try:
        with open(path, "rb") as file:
            header = np.frombuffer(file.read(HEADER_BYTES), "<i4")
    except OSError as error:
        raise GolfError(f"cannot read shard {path} ({error.strerror}): check that it is a readable file") from None
    if header.size != HEADER_WORDS or header[0] != SHARD_MAGIC:
        raise GolfError(f"shard {path} must start with magic {SHARD_MAGIC}, found {header[:1].tolist()}: it is not a token shard")
    if header[1] != SHARD_VERSION:
        raise GolfError(f"shard {path} must be of version {SHARD_VERSION}, found {header[1]}: convert it or build it again")
    tokens = int(header[2])
    if tokens < 1 or size != HEADER_BYTES + 2 * tokens:
        raise GolfError(f"shard {path} promises {tokens:,} tokens and must have {HEADER_BYTES + 2 * max(tokens, 0):,} bytes, found {size:,}: it is cut off or damaged, copy or build it again")
    return tokens

def read_span(path: str | Path, # a shard
              begin: int, # first token
              count: int, # tokens
              expected: int | None = None, # tokens that the shard had when it was last looked at
             ) -> np.ndarray: # uint16 [count], a copy
    "Tokens begin .. begin + count of a shard. Raises GolfError as read_header does, where the file ends before the span, and where it holds another number of tokens than expected."
    part, at = np.empty(count, "<u2"), 0
    try:
        file = os.open(path, os.O_RDONLY)
        try:
            stat = os.fstat(file)
            tokens = _checked_header(str(path), stat.st_size, stat.st_mtime_ns)
            if tokens != (expected or tokens):
                raise GolfError(f"shard {path} must keep its {expected:,} tokens while training runs, found {tokens:,}: do not change shards in use")
            while at < 2 * count and (got := os.preadv(file, [part.view("u1")[at:]], HEADER_BYTES + 2 * begin + at)):
                at += got
        finally:
            os.close(file)
    except OSError as error:
        raise GolfError(f"cannot read shard {path} ({error.strerror}): check the path") from None
    if at != 2 * count:
        raise GolfError(f"shard {path} must hold tokens {begin:,} to {begin + count:,} of {tokens:,}, found {at // 2:,} of them: it is cut off or damaged, copy or build it again")
    return part

def find_shards(pattern: str | Path, # path of a shard, or a pattern with * and ?
               ) -> list[Path]: # sorted
    "The shards a pattern names. Raises GolfError when there is none."
    text = str(pattern)
    found = [text] if os.path.isfile(text) else sorted(p for p in glob.glob(text) if os.path.isfile(p))
    if not found:
        raise GolfError(f"no shard matches {text}: expected at least one file, found none; check the directory (DATA_PATH) and the pattern")
    return [Path(p) for p in found]

def read_tokens(pattern: str | Path, # path or pattern of shards
                limit: int | None = None, # tokens at most; None: all
                vocab_size: int | None = None, # every token must be below it; None: not checked
               ) -> np.ndarray: # uint16 [n], in memory
    "The joined tokens of all matching shards. Raises GolfError for a bad shard or a token outside the vocabulary."
    parts, room = [], limit
    for path in find_shards(pattern):
        tokens = read_header(path)
        part = read_span(path, 0, tokens if room is None else min(tokens, room))
        if vocab_size is not None and part.size and part.max() >= vocab_size:
            at = int(np.argmax(part >= vocab_size))
            raise GolfError(f"tokens of {path} must be below the vocabulary size {vocab_size}, found {part[at]} at position {at:,}: the shard belongs to another tokenizer")
        parts.append(part)
        room = None if room is None else room - part.size
        if room == 0:
            break
    return np.concatenate(parts).astype(np.uint16, copy=False)

def val_tokens(pattern: str | Path, # path or pattern of validation shards
               seq_len: int, # length of a row: tokens
               vocab_size: int, # every token must be below it
              ) -> np.ndarray: # uint16 [k * seq_len + 1]
    "The validation stream, cut to whole rows. Raises GolfError where read_tokens does, and when there is not one whole row."
    tokens = read_tokens(pattern, vocab_size=vocab_size)
    rows = (tokens.size - 1) // seq_len
    if rows < 1:
        raise GolfError(f"validation must hold at least one window of {seq_len} tokens and the token after it, found {tokens.size} tokens in {pattern}: use more validation text or a shorter window")
    return tokens[: rows * seq_len + 1]

def _shard_key(path: Path) -> tuple[int, str]: # a shard -> its size and the SHA-256 of its first MiB
    "What two copies of a shard have in common. Raises GolfError as read_header does."
    read_header(path)
    with open(path, "rb") as file:
        return os.path.getsize(path), hashlib.sha256(file.read(2**20)).hexdigest()

def check_disjoint(train_paths: Sequence[Path], # training shards
                   val_paths: Sequence[Path], # validation shards
                  ) -> None: # raises GolfError
    "Refuse train and validation sets that share a file, by any name or as a copy."
    held = {_shard_key(path): path for path in val_paths}
    for path in train_paths:
        other = held.get(_shard_key(path))
        if other is not None:
            raise GolfError(f"training and validation must not share a file, found {path} to be the same as {other}: remove it from one of them")

# ---- loader ----

class WindowSampler:
    "What every order of windows shares: shards, this rank's part, a state to save and restore."
    order = ""

    def __init__(self, paths: Sequence[Path], # shards, in order
                 rank: int, # this process
                 world: int, # processes
                 rows: int, # rows per rank and micro-step
                 seq_len: int, # length of a row: tokens
                ):
        self.paths, self.rank, self.world, self.rows, self.seq_len = list(paths), rank, world, rows, seq_len
        self.tokens = [read_header(p) for p in self.paths]
        self.mark = hashlib.sha256(repr((self.tokens, seq_len)).encode()).hexdigest()[:16]

    def read(self, shard: int, begin: int, count: int) -> np.ndarray: # index of a shard, first token, tokens -> uint16 [count] tokens begin to begin + count of a shard; raises GolfError when there are fewer
        return read_span(self.paths[shard], begin, count, self.tokens[shard])

    def check_state(self, state: dict) -> None: # what state() gave; raises GolfError for another order or corpus
        found = (state.get("order"), state.get("corpus"))
        if found != (self.order, self.mark):
            raise GolfError(f"a saved loader state must be of order and corpus {(self.order, self.mark)}, found {found}: resume with the same shards, TRAIN_SEQ_LEN and LOADER")

class SequentialSampler(WindowSampler):
    "The baseline's order: consecutive spans of the joined shards, the first again after the last."
    order = "sequential"

    def __init__(self, paths: Sequence[Path], rank: int, world: int, rows: int, seq_len: int): # as WindowSampler
        super().__init__(paths, rank, world, rows, seq_len)
        self.ends, self.total = np.cumsum(self.tokens), sum(self.tokens)
        self.span, self.position, self.begin = rows * seq_len + 1, 0, 0

    def next(self) -> np.ndarray: # uint16 [rows, seq_len + 1], neighbours share a token
        "The next rows of this rank."
        self.begin = (self.position + self.rank * self.span) % self.total
        self.position = (self.position + self.world * self.span) % self.total
        parts, room, at = [], self.span, self.begin
        while room:
            shard = self.shard_at(at)
            left = int(self.ends[shard]) - at
            part = self.read(shard, self.tokens[shard] - left, min(left, room))
            parts.append(part)
            room, at = room - part.size, (at + part.size) % self.total
        return np.lib.stride_tricks.sliding_window_view(np.concatenate(parts), self.seq_len + 1)[:: self.seq_len]

    def shard_at(self, at: int) -> int: # position on the ring -> index of its shard
        return int(np.searchsorted(self.ends, at % self.total, side="right"))
    def source(self, row: int) -> Path: # row of the last batch -> the shard it starts in
        return self.paths[self.shard_at(self.begin + row * self.seq_len)]
    def state(self) -> dict: # JSON-able
        return {"order": self.order, "corpus": self.mark, "position": self.position}
    def load_state(self, state: dict) -> None: # what state() gave; raises GolfError as check_state does
        self.check_state(state)
        self.position = int(state["position"])

@dataclass
class Cursor:
    "One pass over one shard: every block once, in jumps of a stride coprime to the number of blocks (PR #726)."
    phase: int # tokens left out before the first block
    blocks: int # blocks of seq_len tokens (and one more) in this pass
    start: int # first block of the walk
    stride: int # blocks per jump
    used: int # blocks handed out

    def take(self, seq_len: int) -> int: # length of a block: tokens -> token position of the next block
        block = (self.start + self.used * self.stride) % self.blocks
        self.used += 1
        return self.phase + block * seq_len

def draw_cursor(rng: np.random.Generator, # drawn from, in a fixed order
                tokens: int, # tokens in the shard, more than seq_len
                seq_len: int, # length of a block: tokens
               ) -> Cursor: # nothing used yet
    "A new pass with a random phase, start and stride."
    phase = int(rng.integers(min(seq_len - 1, tokens - seq_len - 1) + 1))
    blocks = (tokens - 1 - phase) // seq_len
    stride = 1
    while blocks > 1:
        stride = int(rng.integers(1, blocks))
        if math.gcd(stride, blocks) == 1:
            break
    return Cursor(phase, blocks, int(rng.integers(blocks)), stride, 0)

RAMP_BATCHES = 1800 # micro-batches over which the mixture widens

def mixture(batches: int, # micro-batches built before this one
            shards: int, # shards with at least one block
            windows: int, # windows in the batch, all ranks together
            world: int, # ranks
           ) -> tuple[int, float]: # shards to draw, exponent alpha
    "How wide a batch draws, and how strongly by size (PR #726)."
    progress = min(batches / RAMP_BATCHES, 1.0)
    low, high = (min(wish, shards, windows) for wish in (max(8, world), max(32, 8 * world)))
    return round(low + progress * (high - low)), 0.90 - 0.40 * progress

def deal(rng: np.random.Generator, # drawn from, in a fixed order
         piles: list[list], # windows of each shard; emptied
        ) -> list: # all windows, neighbours from different piles as far as possible
    "Shuffle each pile, then take one window from every pile left, in a fresh random order each round."
    for pile in piles:
        rng.shuffle(pile)
    dealt = []
    while piles:
        dealt += [piles[i].pop() for i in rng.permutation(len(piles))]
        piles = [pile for pile in piles if pile]
    return dealt

class CoprimeSampler(WindowSampler):
    "Many shards in every batch, every block once a pass, the same plan on every rank (PR #726)."
    order = "coprime"

    def __init__(self, paths: Sequence[Path], rank: int, world: int, rows: int, seq_len: int, # as WindowSampler
                 seed: int, # of the plan, the same on every rank
                ):
        "Raises GolfError when a shard is shorter than a window."
        super().__init__(paths, rank, world, rows, seq_len)
        self.usable = [i for i, n in enumerate(self.tokens) if n > seq_len]
        if not self.usable:
            raise GolfError(f"a training shard must hold more than TRAIN_SEQ_LEN={seq_len} tokens, found at most {max(self.tokens)}: use longer shards or shorter rows")
        self.rng, self.batches = np.random.Generator(np.random.PCG64(seed)), 0
        self.cursors: list[Cursor | None] = [None] * len(self.paths)
        self.mine: list[tuple[int, int]] = []

    def plan(self) -> list[tuple[int, int]]: # (shard, position) of every window, all ranks, as dealt
        return plan_batch(self)
    def next(self) -> np.ndarray: # uint16 [rows, seq_len + 1]
        "The next rows of this rank."
        self.mine = self.plan()[self.rank :: self.world]
        return np.stack([self.read(shard, at, self.seq_len + 1) for shard, at in self.mine])
    def source(self, row: int) -> Path: # row of the last batch -> its shard
        return self.paths[self.mine[row][0]]
    def state(self) -> dict: # JSON-able
        return {"order": self.order, "corpus": self.mark, "batches": self.batches, "rng": self.rng.bit_generator.state,
                "cursors": [list(astuple(c)) if c else None for c in self.cursors]}
    def load_state(self, state: dict) -> None: # what state() gave; raises GolfError as check_state does
        self.check_state(state)
        self.batches, self.rng.bit_generator.state = int(state["batches"]), state["rng"]
        self.cursors = [Cursor(*c) if c else None for c in state["cursors"]]

def plan_batch(sampler: CoprimeSampler, # its generator, cursors and batch count move on
              ) -> list[tuple[int, int]]: # (shard, position) of every window, all ranks
    "Choose shards, spread the windows over them, walk their cursors, deal."
    rng, seq_len, windows = sampler.rng, sampler.seq_len, sampler.rows * sampler.world
    opened = [sampler.cursors[s] for s in sampler.usable]
    left = np.array([max(c.blocks - c.used, 1) if c else (sampler.tokens[s] - 1) // seq_len for s, c in zip(sampler.usable, opened)], dtype=np.float64)
    count, alpha = mixture(sampler.batches, len(sampler.usable), windows, sampler.world)
    weight = left**alpha / (left**alpha).sum()
    drawn = rng.choice(len(weight), size=count, replace=False, p=weight)
    shares = 1 + rng.multinomial(windows - count, weight[drawn] / weight[drawn].sum())
    piles = []
    for shard, share in zip((sampler.usable[i] for i in drawn), shares):
        pile = []
        for _ in range(share):
            cursor = sampler.cursors[shard]
            if cursor is None or cursor.used >= cursor.blocks:
                cursor = sampler.cursors[shard] = draw_cursor(rng, sampler.tokens[shard], seq_len)
            pile.append((shard, cursor.take(seq_len)))
        piles.append(pile)
    sampler.batches += 1
    return deal(rng, piles)

def index_documents(tokens: np.ndarray, # uint16 [n], a shard
                   ) -> tuple[np.ndarray, np.ndarray]: # int64 [D] first token after the BOS, int64 [D] tokens of text
    "Where the documents of a shard are."
    at = np.flatnonzero(tokens == BOS_ID)
    starts = at + 1 if at.size and at[0] == 0 else np.concatenate([[0], at + 1])
    return starts, np.append(at[at > 0], tokens.size) - starts

GROUP_SHARDS = 4 # shards whose documents are mixed with one another

@dataclass
class DocumentGroup:
    "Documents of a few shards as one stream: each a BOS and its text."
    shards: np.ndarray # int64 [D], index of the shard
    starts: np.ndarray # int64 [D], first token after the BOS, in the shard
    begins: np.ndarray # int64 [D], place of the BOS in the stream
    ends: np.ndarray # int64 [D], place after the last token in the stream

    def document(self, at: int) -> int: # place in the stream -> which document
        return int(np.searchsorted(self.ends, at, side="right"))

def draw_group(sampler: WindowSampler, # its shards, its seed
               lap: int, # pass, from 0
               number: int, # group of this pass, from 0
              ) -> DocumentGroup:
    "The documents of one group of shards, in their order."
    order = np.random.default_rng([sampler.seed, lap]).permutation(len(sampler.paths))
    chosen = order[number * GROUP_SHARDS :][:GROUP_SHARDS].tolist()
    index = [(shard, *index_documents(sampler.read(shard, 0, sampler.tokens[shard]))) for shard in chosen]
    mix = np.random.default_rng([sampler.seed, lap, number]).permutation(sum(starts.size for _, starts, _ in index))
    shards = np.concatenate([np.full(starts.size, shard) for shard, starts, _ in index])[mix]
    starts, lengths = (np.concatenate(parts)[mix] for parts in list(zip(*index))[1:])
    ends = np.cumsum(lengths + 1)
    return DocumentGroup(shards, starts, ends - lengths - 1, ends)

class PackedSampler(WindowSampler):
    "Rows that begin with a BOS, filled with documents in a drawn order; every token of text is a target once a pass."
    order = "packed"

    def __init__(self, paths: Sequence[Path], rank: int, world: int, rows: int, seq_len: int, # as WindowSampler
                 seed: int, # of the order, the same on every rank
                ):
        super().__init__(paths, rank, world, rows, seq_len)
        self.seed, self.place, self.groups, self.mine = seed, (0, 0, 0), {}, []

    def group(self, lap: int, number: int) -> DocumentGroup: # indexed once; the last two are kept
        if (lap, number) not in self.groups:
            self.groups = {**dict(list(self.groups.items())[-1:]), (lap, number): draw_group(self, lap, number)}
        return self.groups[lap, number]
    def next(self) -> np.ndarray: # uint16 [rows, seq_len + 1]
        "The next rows of this rank."
        places = []
        for _ in range(self.rows * self.world):
            places.append(second_token(self, *self.place))
            lap, number, at = places[-1]
            self.place = settle_place(self, lap, number, at + self.seq_len)
        self.mine = places[self.rank :: self.world]
        return np.stack([packed_row(self, *place) for place in self.mine])
    def source(self, row: int) -> Path: # row of the last batch -> the shard it starts in
        group = self.group(*self.mine[row][:2])
        return self.paths[group.shards[group.document(self.mine[row][2])]]
    def state(self) -> dict: # JSON-able
        return {"order": self.order, "corpus": self.mark, "seed": self.seed, "place": list(self.place)}
    def load_state(self, state: dict) -> None: # what state() gave; raises GolfError as check_state does
        self.check_state(state)
        self.seed, self.place, self.groups = int(state["seed"]), tuple(state["place"]), {}

def settle_place(sampler: PackedSampler, # its groups
                 lap: int, number: int, at: int, # a place, perhaps past its group's end
                ) -> tuple[int, int, int]: # the same place
    "A place inside its group. `at` is a token of that document."
    while at >= (total := int(sampler.group(lap, number).ends[-1])):
        last = (number + 1) * GROUP_SHARDS >= len(sampler.paths)
        lap, number, at = (lap + 1, 0, at - total) if last else (lap, number + 1, at - total)
    return lap, number, at

def second_token(sampler: PackedSampler, # its groups
                 lap: int, number: int, at: int, # where a row begins
                ) -> tuple[int, int, int]: # place of its second token
    "One token on if the stream has a BOS here, else here: the row's own BOS is put in front. `at` is a token of that document."
    group = sampler.group(lap, number)
    return settle_place(sampler, lap, number, at + int(group.begins[group.document(at)] == at))

def packed_row(sampler: PackedSampler, # its groups and shards
               lap: int, number: int, at: int, # place of the row's second token
              ) -> np.ndarray: # uint16 [seq_len + 1], the first a BOS
    "One row of the stream. `at` is the token where the row begins."
    row, filled = np.full(sampler.seq_len + 1, BOS_ID, np.uint16), 1
    while filled < row.size:
        lap, number, at = settle_place(sampler, lap, number, at)
        group = sampler.group(lap, number)
        document = group.document(at)
        skip = at - int(group.begins[document]) # 0: the BOS, which is there already
        take = min(row.size - filled, int(group.ends[document]) - at)
        if skip + take > 1:
            first = int(group.starts[document]) + max(skip - 1, 0)
            bos = int(skip == 0)
            row[filled + bos : filled + take] = sampler.read(int(group.shards[document]), first, take - bos)
        filled, at = filled + take, at + take
    return row

def document_borders(rows: np.ndarray, # uint16 [rows, seq_len + 1]
                    ) -> np.ndarray: # int32 [D + 1]: first token of every document in the flattened inputs, then their number
    "cu_seqlens of a batch. A row's first token begins a document whatever it is."
    begins = rows[:, :-1] == BOS_ID
    begins[:, 0] = True
    return np.append(np.flatnonzero(begins), begins.size).astype(np.int32)

def make_sampler(cfg: Config, # loader, rows, train_seq_len and seed count
                 paths: Sequence[Path], # training shards, sorted
                 rank: int, # this process
                 world: int, # processes
                ) -> WindowSampler: # as LOADER says
    "The sampler a configuration asks for."
    rows = cfg.rows_per_micro(world)
    if cfg.loader != "sequential":
        order = PackedSampler if cfg.loader == "packed" else CoprimeSampler
        return order(paths, rank, world, rows, cfg.train_seq_len, cfg.seed)
    return SequentialSampler(paths, rank, world, rows, cfg.train_seq_len)

class Feeder:
    "A thread that fills buffers from a sampler, until none is free. What goes wrong in it is handed over like a batch."
    def __init__(self, sampler: WindowSampler, # used by the thread only
                 buffers: Sequence[torch.Tensor], # int16 [rows, seq_len + 1] each
                 vocab_size: int, # every token must be below it
                ):
        self.sampler, self.vocab_size = sampler, vocab_size
        self.free, self.ready, self.stopping = queue.SimpleQueue(), queue.SimpleQueue(), threading.Event()
        for buffer in buffers:
            self.free.put(buffer)
        self.thread = threading.Thread(target=self._work, name="golfnb-feeder", daemon=True)
        self.thread.start()

    def _work(self) -> None: # puts (buffer, state after it, borders of its documents) or (None, error, None)
        try:
            while (buffer := self.free.get()) is not None and not self.stopping.is_set():
                rows = self.sampler.next()
                if rows.max() >= self.vocab_size:
                    source = self.sampler.source(int(np.argmax(rows.max(axis=1))))
                    raise GolfError(f"tokens must be below VOCAB_SIZE={self.vocab_size}, found {rows.max()} in {source}: the shard belongs to another tokenizer")
                buffer.numpy()[:] = rows.view(np.int16)
                borders = torch.from_numpy(document_borders(rows)) if self.sampler.order == "packed" else None
                self.ready.put((buffer, self.sampler.state(), borders))
        except BaseException as error:
            self.ready.put((None, error, None))

    def stop(self) -> None: # returns when the thread has ended
        self.stopping.set()
        self.free.put(None)
        self.thread.join()

@dataclass
class Batch:
    "A batch on the device, or on its way there."
    ids: torch.Tensor # int64 [rows, seq_len]
    targets: torch.Tensor # int64 [rows, seq_len]
    state: dict # the sampler's, after this batch
    borders: torch.Tensor | None # int32 [D + 1], cu_seqlens of a packed batch
    arrived: "torch.cuda.Event | None" # ends the copy; None on CPU

    def receive(self) -> tuple[torch.Tensor, torch.Tensor]: # ids, targets, int64 [rows, seq_len], ready for the current stream
        if self.arrived is not None:
            current = torch.cuda.current_stream(self.ids.device)
            current.wait_event(self.arrived)
            for tensor in (self.ids, self.targets, self.borders):
                if tensor is not None:
                    tensor.record_stream(current)
        return self.ids, self.targets

class Uploader:
    "Copies buffers to the device without waiting, and knows which copies have ended."
    def __init__(self, device: torch.device): # where batches go
        self.device, self.copying = device, deque()
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def send(self, buffer: torch.Tensor, # int16 [rows, seq_len + 1], pinned for CUDA
             state: dict, # the sampler's, after this batch
             borders: torch.Tensor | None = None, # int32 [D + 1], for a packed batch
            ) -> Batch: # may still be on its way
        with torch.cuda.stream(self.stream): # does nothing where there is no stream
            wide = buffer.to(self.device, non_blocking=True).long() & 0xFFFF
            ids, targets = wide[:, :-1].contiguous(), wide[:, 1:].contiguous()
            borders = borders if borders is None else borders.to(self.device, non_blocking=True)
        arrived = self.stream.record_event() if self.stream else None
        self.copying.append((arrived, buffer))
        return Batch(ids, targets, state, borders, arrived)

    def ended(self, wait: bool) -> list[torch.Tensor]: # wait for every copy -> buffers that are free again, int16 [rows, seq_len + 1]
        buffers = []
        while self.copying and (wait or self.copying[0][0] is None or self.copying[0][0].query()):
            arrived, buffer = self.copying.popleft()
            if wait and arrived is not None:
                arrived.synchronize()
            buffers.append(buffer)
        return buffers

class Pipeline:
    "Batches in order, buffers round and round."
    def __init__(self, feeder: Feeder, uploader: Uploader):
        self.feeder, self.uploader, self.error = feeder, uploader, None

    def fetch(self, wait: bool) -> Batch | None: # None: nothing is ready, and we did not wait
        "The next batch, uploaded. Raises the thread's error, once the batches before it have been fetched."
        self._recycle(wait and self.feeder.ready.empty())
        if self.error is None and (wait or not self.feeder.ready.empty()):
            buffer, state, borders = self.feeder.ready.get()
            if buffer is not None:
                batch = self.uploader.send(buffer, state, borders)
                self._recycle(wait=False)
                return batch
            self.error = state
        if wait:
            raise self.error
        return None

    def _recycle(self, wait: bool) -> None: # wait for every copy
        for buffer in self.uploader.ended(wait):
            self.feeder.free.put(buffer)

    def close(self) -> None: # returns when the thread and all copies have ended
        self.feeder.stop()
        self.uploader.ended(wait=True)

class Loader:
    "Batches on the device, built ahead in a thread. Use it in a `with`, or call `close()`."
    def __init__(self, sampler: WindowSampler, # belongs to the loader from now on
                 device: torch.device | str, # where batches go
                 vocab_size: int, # every token must be below it
                 depth: int = 4, # buffers: batches built ahead at most
                ):
        self.sampler, self.device, self.vocab_size = sampler, torch.device(device), vocab_size
        shape, pinned = (sampler.rows, sampler.seq_len + 1), self.device.type == "cuda"
        self.buffers = [torch.empty(shape, dtype=torch.int16, pin_memory=pinned) for _ in range(depth)]
        self._open()

    def _open(self) -> None:
        self.handed, self.ahead, self.borders = self.sampler.state(), None, None
        self.pipeline: Pipeline | None = Pipeline(Feeder(self.sampler, self.buffers, self.vocab_size), Uploader(self.device))

    def next(self) -> tuple[torch.Tensor, torch.Tensor]: # ids, targets: int64 [rows, seq_len] on the device
        "The next batch. Raises what went wrong in the thread, as often as it is asked."
        if self.pipeline is None:
            raise GolfError("the loader must be open, found it closed: make a new Loader, or rewind this one")
        batch = self.ahead or self.pipeline.fetch(wait=True)
        self.handed, self.borders, tensors = batch.state, batch.borders, batch.receive()
        self.ahead = self.pipeline.fetch(wait=False) if batch.arrived is not None else None
        return tensors

    def state(self) -> dict: # JSON-able: the sampler's after the last batch handed out, not the last built
        return self.handed
    def rewind(self, state: dict) -> None: # what state() gave; batches built ahead are dropped
        self.close()
        self.sampler.load_state(state)
        self._open()
    load_state = rewind

    def close(self) -> None: # stops the thread and waits for it; twice is fine
        if self.pipeline is not None:
            self.pipeline.close()
            self.pipeline = self.ahead = None
    def __enter__(self) -> "Loader": return self
    def __exit__(self, *_) -> None: self.close()

# ---- layout ----

@dataclass(frozen=True)
class QuantSpec:
    "How the artifact stores a matrix: on the int6 or int8 grid (a scale per logical row), or as fp16 or fp32."
    kind: str = "int6"  # "int6", "int8", "fp16" or "fp32"

@dataclass(frozen=True)
class Matrix:
    "One logical matrix and where it wants to live."
    name: str                     # its name in a state dict
    rows: int                     # logical rows: outputs of F.linear
    cols: int                     # logical columns: inputs of F.linear
    group: str                    # the bank it belongs to
    transposed: bool = False      # stored as [cols, rows]
    lr_scale: float = 1.0         # factor on the learning rate, from the logical shape
    quant: QuantSpec = QuantSpec()
    parts: tuple["Matrix", ...] = ()  # smaller matrices that share this slot, one after the other; none: it is one matrix

    @property
    def logical(self) -> tuple["Matrix", ...]:
        "The matrices in its slot: its parts, or itself."
        return self.parts or (self,)

    @property
    def stored(self) -> tuple[int, int]:
        "The shape of its slot."
        return (self.cols, self.rows) if self.transposed else (self.rows, self.cols)

SMALL_MATRIX = 65_536  # elements; up to here a matrix is stored as fp16

def matrix(name: str,                        # name in a state dict
           rows: int,                        # logical rows (outputs)
           cols: int,                        # logical columns (inputs)
           group: str,                       # bank it belongs to
           transposed: bool = False,         # stored as [cols, rows]
           lr_scale: float | None = None,    # factor on the learning rate; None: sqrt(max(1, rows/cols))
           quant: QuantSpec | None = None,   # None: int6, or fp16 for a small matrix
           ) -> Matrix:
    "A `Matrix` with the usual learning-rate scale (Muon's, from the logical shape) and quantization filled in."
    if lr_scale is None:
        lr_scale = sqrt(max(1.0, rows / cols))
    return Matrix(name, rows, cols, group, transposed, lr_scale, quant or QuantSpec("int6" if rows * cols > SMALL_MATRIX else "fp16"))

@dataclass(frozen=True)
class BankSpec:
    "Matrices of one stored shape, padded to a multiple of the world size."
    name: str
    matrices: tuple[Matrix, ...]  # the real slots, in order
    world: int                    # number of ranks that share the bank

    @property
    def real(self) -> int: return len(self.matrices)  # slots that hold a matrix

    @property
    def per_rank(self) -> int: return -(-self.real // self.world)  # rounded up

    @property
    def shape(self) -> tuple[int, int, int]:
        "[slots with padding, stored rows, stored columns]"
        return (self.per_rank * self.world, *self.matrices[0].stored)

    @property
    def padding(self) -> int: return self.shape[0] - self.real  # empty slots

    @property
    def numel(self) -> int: return prod(self.shape)  # elements, padding included

    def owner(self, slot: int) -> int: return slot // self.per_rank  # rank that owns a slot

    def shard(self, rank: int) -> range: return range(rank * self.per_rank, (rank + 1) * self.per_rank)  # a rank's slots

    def slots(self, rank: int) -> list[Matrix | None]:
        "The rank's matrices in slot order, None where a slot is padding."
        return [self.matrices[i] if i < self.real else None for i in self.shard(rank)]

    def lr_scales(self) -> list[float]:
        "One learning-rate scale per slot, 1.0 in the padding."
        return [m.lr_scale for m in self.matrices] + [1.0] * self.padding

    def row_scales(self) -> list[list[float]]:
        "Learning-rate scales of every slot: one for each stored row, or a single one where no slot is shared."
        rows, width = self.matrices[0].stored
        if not any(m.parts for m in self.matrices):
            return [[s] for s in self.lr_scales()]
        return [[m.lr_scale for m in slot.logical for _ in range(prod(m.stored) // width)] for slot in self.matrices] + [[1.0] * rows] * self.padding

def share_slot(name: str,                   # of the slot
               shape: tuple[int, int],      # of the slot: stored rows, stored columns
               parts: tuple[Matrix, ...],   # in storage order
               group: str,                  # bank it belongs to
               ) -> Matrix:
    "A slot that holds several matrices. GolfError unless they fill it exactly, in whole rows."
    sizes = [prod(m.stored) for m in parts]
    if sum(sizes) != prod(shape) or any(n % shape[1] for n in sizes):
        raise GolfError(f"matrices that share slot {name!r} of {shape[0]} x {shape[1]} must fill it exactly, in whole rows of {shape[1]}: found "
                        f"{', '.join(f'{m.rows} x {m.cols}' for m in parts)}; choose a plan that gives them a bank of their own")
    return Matrix(name, *shape, group, parts=tuple(parts))

@dataclass(frozen=True)
class Cut:
    "Equal matrices that lie side by side in one rank's shard of a bank."
    first: int      # slots first .. last - 1 of the shard
    last: int       # one past the last
    start: int      # elements start .. stop - 1 of each of these slots
    stop: int       # one past the last
    matrix: Matrix  # what they are like

def shard_cuts(bank: BankSpec, rank: int,
               key=lambda m: m.stored,  # what equal means
               ) -> list[Cut]:
    "The cuts of a rank's shard, padding left out; a rank whose slots are all padding has none."
    cuts, first = [], 0
    for _, run in groupby((m for m in bank.slots(rank) if m), key=lambda slot: [key(m) for m in slot.logical]):
        run, start = list(run), 0
        for _, equal in groupby(run[0].logical, key=key):
            equal = list(equal)
            stop = start + sum(prod(m.stored) for m in equal)
            cuts.append(Cut(first, first + len(run), start, stop, equal[0]))
            start = stop
        first += len(run)
    return cuts

@dataclass(frozen=True)
class Layout:
    "All banks of a model for one world size."
    banks: tuple[BankSpec, ...]
    world: int
    separate: bool = False  # every slot is a parameter of its own (modded-nanogpt #125)

    def __iter__(self):
        "Every matrix as (bank, slot, matrix), bank by bank; those that share a slot one after the other."
        return ((b, i, m) for b in self.banks for i, slot in enumerate(b.matrices) for m in slot.logical)

    def bank(self, name: str) -> BankSpec:
        "The bank of that name. Raises GolfError if there is none."
        for b in self.banks:
            if b.name == name:
                return b
        raise GolfError(f"no bank is named {name!r}: the layout has {', '.join(b.name for b in self.banks)}")

    def where(self, name: str) -> tuple[str, int]:
        "Bank name and slot of a matrix; GolfError if there is none of that name."
        for b, i, m in self:
            if m.name == name:
                return b.name, i
        raise GolfError(f"no matrix is named {name!r} in this layout: ask layout.names() for the {len(self.names())} there are")

    def names(self) -> list[str]: return [m.name for _, _, m in self]  # of all matrices, in bank order

    def padding_waste(self) -> float:
        "Ratio of padding elements to real elements."
        real = sum(m.rows * m.cols for _, _, m in self)
        return sum(b.numel for b in self.banks) / real - 1

    def parts(self) -> int: return self.separate * sum(b.real for b in self.banks)  # parameters of their own; 0 where a bank is one

def group_matrices(matrices: list[Matrix],  # in the order that slots shall have
                   world: int,              # number of ranks
                   ) -> Layout:
    "One bank per `group`, in order of first appearance. GolfError for two stored shapes in a group or a name used twice."
    if world < 1 or not matrices:
        raise GolfError(f"a layout needs at least one rank and one matrix: found world size {world} and {len(matrices)} matrices")
    groups: dict[str, list[Matrix]] = {}
    names = set()
    for m in matrices:
        first = groups.setdefault(m.group, [])
        if first and first[0].stored != m.stored:
            raise GolfError(f"matrices of one bank must have one stored shape: in {m.group!r}, {first[0].name} is stored as {first[0].stored} "
                            f"and {m.name} as {m.stored}; give one of them another group or store it transposed")
        for one in m.logical:
            if one.name in names:
                raise GolfError(f"matrix names must be unique: {one.name!r} appears twice")
            names.add(one.name)
        first.append(m)
    return Layout(tuple(BankSpec(name, tuple(ms), world) for name, ms in groups.items()), world)

def slot_kinds(cfg: Config) -> dict[str, list[Matrix]]:
    "The slots of the model's blocks by kind, each kind in checkpoint order; a matrix appears in several kinds."
    d, kv, hidden = cfg.model_dim, cfg.kv_dim, cfg.mlp_dim

    def each(name: str, rows: int, cols: int, transposed: bool = False) -> list[Matrix]:
        quant = QuantSpec("int6" if rows * cols > cfg.small_tensor else "fp16")
        return [matrix(f"blocks.{i}.{name}.weight", rows, cols, "", transposed, quant=quant) for i in range(cfg.num_layers)]

    q, out, k, v = each("attn.c_q", d, d), each("attn.proj", d, d), each("attn.c_k", kv, d), each("attn.c_v", kv, d)
    up, down = each("mlp.fc", hidden, d), each("mlp.proj", d, hidden)
    attn = [share_slot(f"blocks.{i}.attn", (2 * d + 2 * kv, d), parts, "") for i, parts in enumerate(zip(q, out, k, v))]
    return {"qo": q + out, "kv": k + v, "up": up, "down": down, "mlp": up + each("mlp.proj", d, hidden, True), "attn": attn}

BANK_NAMES = {"qo": "qo_bank", "kv": "kv_bank", "up": "mlp_up_bank", "down": "mlp_down_bank", "mlp": "mlp_bank"}

def bucket_layout(kinds: dict[str, list[Matrix]],  # slots by kind
                  text: str,                       # buckets: "qo22,kv22,mlp22"
                  world: int,                      # number of ranks
                  separate: bool = False,          # every slot a parameter of its own
                  ) -> Layout:
    "A bank per bucket. GolfError for an unknown kind, too many of one, a matrix left out or stored twice, shapes that cannot share."
    taken, slots, names = dict.fromkeys(kinds, 0), [], []
    for bucket in text.split(","):
        pairs = re.findall(r"([a-z_]+)(\d+)", bucket)
        if "+".join(a + n for a, n in pairs) != bucket or any(a not in kinds for a, _ in pairs):
            raise GolfError(f"a bucket is written like mlp22 or attn10+mlp6, with kinds out of {', '.join(kinds)}: found {bucket!r} in {text!r}; correct PLAN")
        name = BANK_NAMES.get(pairs[0][0], pairs[0][0] + "_bank") if len(pairs) == 1 else "mixed_bank"
        names.append(name)
        group = name if names.count(name) == 1 else f"{name}_{names.count(name)}"
        for kind, n in ((a, int(n)) for a, n in pairs):
            some = kinds[kind][taken[kind]:taken[kind] + n]
            if len(some) < n or not n:
                raise GolfError(f"this model has {len(kinds[kind])} slots of kind {kind}: {text!r} asks for more, or for none; correct PLAN")
            taken[kind] += n
            slots += [replace(m, group=group) for m in some]
    layout = replace(group_matrices(slots, world), separate=separate)
    wanted = {m.name for some in kinds.values() for slot in some for m in slot.logical}
    if missing := sorted(wanted - set(layout.names())):
        raise GolfError(f"every matrix needs a bank: {text!r} leaves out {len(missing)}, {missing[0]} among them; give PLAN all the slots of its kinds")
    return layout

@lru_cache(maxsize=None)
def mixed_buckets(attn: int,   # slots of the first kind
                  mlp: int,    # slots of the second kind
                  world: int,  # number of ranks
                  ) -> tuple[tuple[int, int], ...]:  # (first kind, second kind) per bucket
    "The bucketing with the least padding, and then the fewest buckets, in which no rank owns both kinds of one bucket."
    if not attn:
        return ((0, mlp),) if mlp else ()
    found = []
    for p in range(1, attn + 1):  # slots a rank has in the first bucket
        a = p * min(attn // p, world)
        m = min(world * p - a, mlp)
        per_rank = -(-(a + m) // world)
        if m == 0 or a % per_rank == 0:
            found.append(((a, m), *mixed_buckets(attn - a, mlp - m, world)))
    return min(found, key=lambda buckets: (sum(-(-(a + m) // world) for a, m in buckets), len(buckets)))

def mixed_text(attn: int, mlp: int, world: int) -> str:
    "That bucketing as `bucket_layout` reads it."
    return ",".join("+".join(f"{kind}{n}" for kind, n in (("attn", a), ("mlp", m)) if n) for a, m in mixed_buckets(attn, mlp, world))

def plan_buckets(cfg: Config, world: int) -> str:
    "The bucketing that `cfg.plan` stands for."
    n = cfg.num_layers
    by_shape = f"qo{2 * n},kv{2 * n},up{n},down{n}"
    named = {"pr399": by_shape, "pr125": by_shape, "shared_mlp": f"qo{2 * n},kv{2 * n},mlp{2 * n}"}
    return mixed_text(n, 2 * n, world) if cfg.plan == "pr132" else named.get(cfg.plan, cfg.plan.split("/")[0])

def model_layout(cfg: Config, world: int) -> Layout:
    "The model's layout over `world` ranks."
    return bucket_layout(slot_kinds(cfg), plan_buckets(cfg, world), world, cfg.plan == "pr125")

# ---- banks ----

def make_banks(layout: Layout,                             # which banks, which shapes
               dtype: torch.dtype = torch.float32,         # of the storage
               device: str | torch.device = "cpu",
               ) -> dict[str, torch.nn.Parameter]:         # bank name -> [slots with padding, rows, columns]
    "A zero-filled parameter per bank, allocated already padded (PR #399); of a separate layout, a `LooseBank`."
    if layout.separate:
        return {b.name: LooseBank(b, dtype, device) for b in layout.banks}
    return {b.name: torch.nn.Parameter(torch.zeros(b.shape, dtype=dtype, device=device)) for b in layout.banks}

class LooseBank(torch.nn.Module):
    "A bank whose slots are parameters of their own (modded-nanogpt #125): its gradient is stacked when it is asked for."

    def __init__(self, spec: BankSpec, dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu"):
        super().__init__()
        self.data, self.stacked = torch.zeros(spec.shape, dtype=dtype, device=device), None
        self.shape, self.dtype, self.device = self.data.shape, dtype, self.data.device
        self.slots = torch.nn.ParameterList(torch.nn.Parameter(t) for t in self.data[:spec.real].unbind(0))

    def unbind(self, dim: int = 0) -> list[torch.nn.Parameter]:
        "The real slots, one parameter each; `dim` is there because a tensor's `unbind` has it."
        return list(self.slots)

    def detach(self) -> torch.Tensor:
        "The whole storage, [slots with padding, rows, columns] in the bank's dtype."
        return self.data

    @property
    def grad(self) -> torch.Tensor | None:
        "The padded stack of the slots' gradients, of the bank's shape and dtype; they are dropped. None where no slot has one."
        found = [p.grad for p in self.slots]
        if any(g is not None for g in found):
            zero = torch.zeros_like(self.data[0])
            stack = torch.stack([zero if g is None else g for g in found] + [zero] * (len(self.data) - len(found)))
            self.stacked = stack if self.stacked is None else self.stacked + stack
            for p in self.slots:
                p.grad = None
        return self.stacked

    @grad.setter
    def grad(self, value: torch.Tensor | None):
        "Set the stack to `value`, of the bank's shape and dtype, or None; the slots' own gradients are dropped."
        self.stacked = value
        for p in self.slots:
            p.grad = None

def slot_shapes(spec: BankSpec) -> list[list[tuple[int, int]]]:
    "The stored shapes of the matrices in every real slot; an empty list where the slot is one matrix."
    return [[m.stored for m in slot.parts] for slot in spec.matrices]

def bank_views(bank: torch.Tensor,  # [slots, rows, columns], any dtype; the padding slots may be missing
               shapes: list,        # of `slot_shapes`
               ) -> list[torch.Tensor]:  # [stored rows, stored columns] of every matrix, dtype of the bank
    "Views of a bank's matrices, slot by slot."
    views = []
    for slot, parts in zip(bank.unbind(0), shapes):
        pieces = slot.view(-1).split([r * c for r, c in parts]) if parts else ()
        views += [p.view(shape) for p, shape in zip(pieces, parts)] or [slot]
    return views

def unbank(layout: Layout,
           banks: dict[str, torch.Tensor],  # bank name -> [slots, rows, columns]; the padding slots may be missing
           ) -> dict[str, torch.Tensor]:    # matrix name -> [rows, columns], logical orientation, dtype of its bank
    "Views of all matrices by name, in layout order; gradients flow back into the banks."
    views = (v for b in layout.banks for v in bank_views(banks[b.name], slot_shapes(b)))
    return {m.name: v.T if m.transposed else v for (_, _, m), v in zip(layout, views)}

def rebank(layout: Layout,
           named: dict[str, torch.Tensor],  # matrix name -> [rows, columns], logical orientation, any dtype and device
           banks: dict[str, torch.Tensor],  # bank name -> [slots, rows, columns], written in place
           ) -> None:
    "Copy matrices into their slots; padding is left alone. GolfError for a missing, surplus or misshapen matrix."
    names = set(layout.names())
    if names != set(named):
        raise GolfError(f"the matrices do not fit the layout: missing {sorted(names - set(named))[:4]}, unexpected {sorted(set(named) - names)[:4]}; "
                        f"give exactly the {len(names)} names of layout.names()")
    for _, _, m in layout:
        if tuple(named[m.name].shape) != (m.rows, m.cols):
            raise GolfError(f"matrix {m.name} must have shape {(m.rows, m.cols)}: found {tuple(named[m.name].shape)}; give it as rows x columns of F.linear")
    with torch.no_grad():
        for name, view in unbank(layout, {k: b.detach() for k, b in banks.items()}).items():
            view.copy_(named[name])

def read_cut(shard: torch.Tensor,  # [n, rows, columns], any dtype
             cut: Cut,
             ) -> torch.Tensor:    # [matrices, stored rows, stored columns], dtype of shard
    "The matrices of a cut as a batch."
    return shard.flatten(1)[cut.first:cut.last, cut.start:cut.stop].reshape(-1, *cut.matrix.stored)

def write_cut(shard: torch.Tensor,  # [n, rows, columns], any dtype, contiguous, written in place
              cut: Cut,
              batch: torch.Tensor,  # [matrices, stored rows, stored columns], any dtype
              ) -> None:
    "Put such a batch back."
    shard.view(len(shard), -1)[cut.first:cut.last, cut.start:cut.stop] = batch.reshape(cut.last - cut.first, -1)

# ---- layers ----

def widen(x: torch.Tensor) -> torch.Tensor:
    "float32 of a 16-bit tensor `x`, and any wider tensor as it is."
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x

NORM_EPS = 1.1920929e-07  # float32's machine epsilon, for all dtypes

def rms_norm(x: torch.Tensor,  # float [..., D]
             ) -> torch.Tensor:  # [..., D], dtype of x
    "RMSNorm (arXiv 1910.07467) over the last axis without a weight; 16-bit input is normalised in float32 and rounded once."
    return F.rms_norm(x, (x.shape[-1],), eps=NORM_EPS)

def mix_norm(x: torch.Tensor,    # float [B, T, D] residual stream
             x0: torch.Tensor,   # float [B, T, D] the embedded input
             mix: torch.Tensor,  # [2, D] weights of x and of x0, any float dtype
             scale: float | torch.Tensor,  # factor after the norm; [D], fp32 (or fp64), if it is a tensor
             ) -> tuple[torch.Tensor, torch.Tensor]:  # x_in and its scaled norm, [B, T, D] each, dtype of x (with a tensor the norm's is the wider of both)
    "A block's first step: mix the stream with the embedding, then normalise and scale."
    m = mix.to(x.dtype)
    x_in = m[0] * x + m[1] * x0
    return x_in, rms_norm(x_in) * scale

def rotary_base(T: int,          # row length
                rope_dims: int,  # rotated coordinates, even
                base: float,     # 10000, a number
                train_len: int,  # rows up to here use `base` itself
                ) -> float:  # the base to use, a number
    "RoPE's base, NTK-scaled for rows longer than `train_len`."
    return base * (T / train_len) ** (rope_dims / (rope_dims - 2)) if T > train_len and rope_dims > 2 else base

def rotary_tables(T: int,                               # row length
                  rope_dims: int,                       # rotated coordinates, even
                  base: float,                          # before scaling, a number
                  train_len: int,                       # see rotary_base
                  device: str | torch.device = "cpu",
                  dtype: torch.dtype = torch.float32,   # computed in float32 (float64 for float64), then cast
                  ) -> tuple[torch.Tensor, torch.Tensor]:  # cos and sin, [T, rope_dims/2], in `dtype`
    "Cosines and sines of position times frequency (RoPE, arXiv 2104.09864)."
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    exponent = torch.arange(0, rope_dims, 2, dtype=wide, device=device) / rope_dims
    frequency = 1.0 / rotary_base(T, rope_dims, base, train_len) ** exponent
    angle = torch.arange(T, dtype=wide, device=device)[:, None] * frequency
    return angle.cos().to(dtype), angle.sin().to(dtype)

def rotate(x: torch.Tensor,    # float [B, T, H, D]
           cos: torch.Tensor,  # float [T, R/2]
           sin: torch.Tensor,  # float [T, R/2]
           ) -> torch.Tensor:  # [B, T, H, D], dtype of x
    "RoPE on the first R coordinates of each head; the other D - R pass through."
    half = cos.shape[-1]
    cos, sin = cos[:, None, :], sin[:, None, :]
    a, b, rest = x[..., :half], x[..., half:2 * half], x[..., 2 * half:]
    return torch.cat((a * cos + b * sin, b * cos - a * sin, rest), dim=-1).to(x.dtype)

def qk_norm_rope_gain(q: torch.Tensor,     # float [B, Tq, H, D], the last Tq positions
                      k: torch.Tensor,     # float [B, T, KV, D]
                      cos: torch.Tensor,   # float [T, R/2]
                      sin: torch.Tensor,   # float [T, R/2]
                      gain: torch.Tensor,  # [H], any float dtype
                      ) -> tuple[torch.Tensor, torch.Tensor]:  # shapes and dtypes of q and k
    "Per-head RMSNorm of q and k (arXiv 2010.04245), RoPE on both, then the learned gain on q."
    start = k.shape[1] - q.shape[1]
    q = rotate(rms_norm(q), cos[start:], sin[start:]) * gain.to(q.dtype)[:, None]
    return q, rotate(rms_norm(k), cos, sin)

FLASH_PACKAGES = {"fa3": "flash_attn_interface", "fa4": "flash_attn.cute.interface"}  # choice -> the module that PyTorch takes for it

_ATTENTION_ORDER = (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH)

def attention_backend(device: str | torch.device,  # where q lives
                      choice: str = "auto",        # "auto", "cudnn", "flash", "efficient", "math", or one of FLASH_PACKAGES: put this one first
                      ) -> list[SDPBackend]:
    "Attention kernels in order of preference. GolfError for a choice that there is not."
    names = dict(zip(("cudnn", "flash", "efficient", "math"), _ATTENTION_ORDER)) | dict.fromkeys(FLASH_PACKAGES, SDPBackend.FLASH_ATTENTION)
    if choice != "auto" and choice not in names:
        raise GolfError(f"ATTENTION must be auto, {', '.join(names)}: found {choice!r}")
    order = [b for b in _ATTENTION_ORDER if torch.device(device).type == "cuda" or b != SDPBackend.CUDNN_ATTENTION]
    first = names.get(choice)
    return [first] + [b for b in order if b is not first] if first in order else order

def flash_installed(choice: str) -> bool:
    "Whether the module of this choice of FLASH_PACKAGES can be found."
    try:
        return importlib.util.find_spec(FLASH_PACKAGES[choice]) is not None
    except ModuleNotFoundError:  # nor its parent
        return False

def attend(q: torch.Tensor,       # float [B, Tq, H, D], the last Tq positions
           k: torch.Tensor,       # float [B, T, KV, D]
           v: torch.Tensor,       # float [B, T, KV, D]
           choice: str = "auto",  # backend, see attention_backend
           ) -> torch.Tensor:     # [B, Tq, H, D], dtype of q
    "Causal grouped-query attention (arXiv 2305.13245) with scale 1/sqrt(D). GolfError if the heads do not divide or queries outnumber keys."
    (Tq, H), (T, KV) = q.shape[1:3], k.shape[1:3]
    if H % KV or Tq > T:
        raise GolfError(f"attention needs query heads divisible by key heads and at most as many queries as keys: found {H} and {KV} heads, {Tq} and {T} positions")
    mask = None
    if Tq < T:
        k, v = k.repeat_interleave(H // KV, dim=2), v.repeat_interleave(H // KV, dim=2)
        mask = torch.ones(Tq, T, dtype=torch.bool, device=q.device).tril(T - Tq)
    with sdpa_kernel(attention_backend(q.device, choice), set_priority=True):
        y = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), attn_mask=mask,
                                           is_causal=mask is None, scale=1 / math.sqrt(q.shape[-1]), enable_gqa=mask is None)
    return y.transpose(1, 2)

def backend_distance(device: str, heads: int, keys: int, head_dim: int) -> float:  # ratio of norms
    "The largest relative distance of the flash backend from the plain formula: output and gradients of a small bfloat16 batch, `heads` query and `keys` key heads of `head_dim` channels."
    def alone(q, k, v):  # no other backend may step in
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True, enable_gqa=True).transpose(1, 2)

    draw = torch.Generator(device).manual_seed(0)
    *qkv, dy = [torch.randn(2, 160, h, head_dim, generator=draw, device=device).bfloat16() for h in (heads, keys, keys, heads)]
    ways = [(lambda q, k, v: attend(q, k, v, "math"), torch.float32), (alone, torch.bfloat16)]
    if torch.device(device).type == "cuda":
        ways.append((torch.compile(lambda q, k, v: attend(q, k, v, "flash"), dynamic=False, fullgraph=True), torch.bfloat16))
    found = []
    for way, dtype in ways:
        inputs = [t.to(dtype).requires_grad_() for t in qkv]
        with torch.enable_grad():
            y = way(*inputs)
            found.append([y.detach(), *torch.autograd.grad(y, inputs, dy.to(dtype))])
    return float(torch.stack([(a.float() - b).norm() / b.norm() for ours in found[1:] for a, b in zip(ours, found[0])]).max())

@functools.cache
def flash_problem(choice: str, device: str, heads: int, keys: int, head_dim: int) -> str:
    "Put a package of FLASH_PACKAGES in the place of PyTorch's flash backend, for this process, and try it (see backend_distance): what is wrong with it, or an empty string."
    attention = torch.nn.attention
    if not flash_installed(choice):
        return f"{FLASH_PACKAGES[choice]} is not installed"
    if not hasattr(attention, "activate_flash_attention_impl"):
        return f"torch {torch.__version__} has no place for it"
    try:
        attention.activate_flash_attention_impl(choice.upper())
        far = backend_distance(device, heads, keys, head_dim)
        problem = "" if far < 0.02 else f"it is {far:.3f} from the plain formula"
    except Exception as e:  # whatever somebody else's build may raise
        problem = f"{type(e).__name__}: {e}"
    if problem and attention.current_flash_attention_impl():
        attention.restore_flash_attention_impl()
    return problem

def ready_attention(choice: str,    # the setting ATTENTION
                    device: str | torch.device,
                    heads: int,     # query heads: count
                    keys: int,      # key heads: count
                    head_dim: int,  # channels of a head
                    ) -> str:
    "The choice to give `attend` on this device, made ready; a warning where FlashAttention-3 is installed and fails. GolfError for a choice that there is not, or that cannot be had."
    attention_backend(device, choice)
    cuda = torch.device(device).type == "cuda"
    wanted = "fa3" if choice == "auto" and cuda and flash_installed("fa3") else choice
    if wanted not in FLASH_PACKAGES or not cuda:
        return choice
    problem = flash_problem(wanted, str(device), heads, keys, head_dim)
    if problem and choice != "auto":
        raise GolfError(f"ATTENTION={choice} cannot be had here: {problem}; mend that, or leave ATTENTION at auto")
    if problem:
        warnings.warn(f"golfnb: FlashAttention-3 is installed and not used: {problem}; cuDNN's attention takes its place", stacklevel=2)
    return "auto" if problem else wanted

def exclusive(y: torch.Tensor,  # float [B, T, H, D] attention output
              v: torch.Tensor,  # float [B, T, KV, D] values of the same positions
              ) -> torch.Tensor:  # [B, T, H, D], dtype of y
    "Attention output without its component along the position's own value (XSA, as in parameter-golf PR #399 and #549); float32 inside."
    B, T, H, D = y.shape
    grouped = widen(y).reshape(B, T, v.shape[2], -1, D)
    u = F.normalize(widen(v), dim=-1, eps=1e-12).unsqueeze(3)
    return (grouped - (grouped * u).sum(-1, keepdim=True) * u).reshape(B, T, H, D).to(y.dtype)

def squared_leaky(z: torch.Tensor,    # any shape, float
                  slope: float = 0.5,  # below zero; 0.0 gives ReLU squared
                  ) -> torch.Tensor:   # shape and dtype of z
    "leaky_relu(z, slope) squared (arXiv 2109.08668; leaky in parameter-golf PR #549); float32 inside for 16-bit input."
    return widen(F.leaky_relu(z, slope)).square().to(z.dtype)

def bigram_rows(ids: torch.Tensor,  # int [B, T] tokens
                rows: int,          # rows of the table
                ) -> torch.Tensor:  # int64 [B, T] in [0, rows)
    "Row of (previous token, token): (36313 id_t XOR 27191 id_{t-1}) mod (rows - 1), and rows - 1 for the first position (PR #399)."
    t = ids.to(torch.int32)
    pair = (36313 * t[:, 1:]).bitwise_xor(27191 * t[:, :-1]) % (rows - 1)
    return F.pad(pair, (1, 0), value=rows - 1).long()

def smear(x: torch.Tensor,     # float [B, T, D]
          gate: torch.Tensor,  # [D], any float dtype
          ) -> torch.Tensor:   # [B, T, D], dtype of x
    "SmearGate (parameter-golf PR #399): blend of each position with its predecessor by a gate per channel; before the first position there is zero."
    g = torch.sigmoid(gate.to(x.dtype))
    before = F.pad(x, (0, 0, 1, 0))[:, :-1]
    return (1 - g) * x + g * before

def softcap(logits: torch.Tensor,  # any shape, float
            cap: float,            # bound of the result
            ) -> torch.Tensor:     # shape and dtype of logits, widened if 16-bit
    "cap * tanh(logits / cap) (arXiv 2408.00118), in float32 for 16-bit input."
    return cap * torch.tanh(widen(logits) / cap)

def softcap_loss(logits: torch.Tensor,   # float [B, T, V] head output, before the cap
                 targets: torch.Tensor,  # int64 [B, T]
                 cap: float,
                 ) -> torch.Tensor:      # [] mean, nats per token; float32 (float64 for float64)
    "Training loss: softcap and cross-entropy in float32."
    return F.cross_entropy(softcap(logits, cap).flatten(0, -2), targets.flatten())

def token_nll(logits: torch.Tensor,   # float [B, T, V] head output, before the cap
              targets: torch.Tensor,  # int64 [B, T]
              cap: float,
              ) -> torch.Tensor:      # [B, T] nats; float32 (float64 for float64)
    "Evaluation loss of every token: capped logits rounded to the logits' dtype, then cross-entropy in float32."
    capped = widen(softcap(logits, cap).to(logits.dtype))
    return F.cross_entropy(capped.flatten(0, -2), targets.flatten(), reduction="none").view(targets.shape)

# ---- kernels ----

try:
    import triton
    import triton.language as tl
    from triton.tools.tensor_descriptor import TensorDescriptor
except ImportError:  # no Triton on this machine: the plain functions of chapter 06 do everything
    triton = TensorDescriptor = None

    class tl:  # stands in where kernels are defined and never run
        constexpr = None

KERNELS_ON = {"heads", "mlp", "xsa", "fold", "ns"}  # what model and optimizer use where they can; the benchmark empties and fills it

def use_kernels(x: torch.Tensor,      # what the kernel would read, any shape and dtype
                name: str = "",       # which one of KERNELS_ON; "": any
                ) -> bool:
    "Whether a Triton kernel may take this tensor: on CUDA, Triton importable, 16-bit, and not switched off."
    return triton is not None and x.is_cuda and x.dtype in (torch.bfloat16, torch.float16) and (not name or name in KERNELS_ON)

@functools.cache
def jitted(kernel):
    "The compiled (or, under TRITON_INTERPRET=1, interpreted) form of a kernel function."
    return triton.jit(kernel)

def check_runnable(x: torch.Tensor) -> None:
    "GolfError where neither CUDA nor the interpreter can run a kernel on `x`."
    interpreted = triton is not None and os.environ.get("TRITON_INTERPRET") == "1" and x.dtype != torch.float64
    if not (use_kernels(x) or interpreted):
        raise GolfError(f"this kernel needs Triton and a 16-bit CUDA tensor: found {x.dtype} on {x.device}; use its plain twin instead")

def kernel_op(name: str,    # under golfnb::
              schema: str,  # "(Tensor x, float s) -> Tensor"
              run,          # what launches the kernel
              shapes,       # same arguments -> empty outputs
              ):            # the op, callable
    "Register a function that launches kernels, so that the compiler can trace past it."
    op = torch.library.custom_op(f"golfnb::{name}", run, mutates_args=(), schema=schema)
    op.register_fake(shapes)
    return op

def heads_forward_kernel(qkv, cos, sin, gain, q, k, T, eps, H: tl.constexpr, KV: tl.constexpr, D: tl.constexpr, ROW: tl.constexpr, HALF: tl.constexpr, ROWS: tl.constexpr):  # q, k from qkv: norm, rotation, gain; programs over (head, block of ROWS tokens, batch)
    head, first = tl.program_id(0), tl.program_id(1) * ROWS
    token = (tl.program_id(2) * T + first).to(tl.int64)                     # the block's first token in the batch
    i, d = tl.arange(0, ROWS)[:, None], tl.arange(0, D)[None, :]            # the whole head: [ROWS, D]
    i3, g, j = tl.arange(0, ROWS)[:, None, None], tl.arange(0, 2)[None, :, None], tl.arange(0, HALF)[None, None, :]  # the rotated pair: [ROWS, 2, HALF]
    live, live3 = (first + i < T) & (d < D), (first + i3 < T) & (g < 2) & (j < HALF)
    qkv += token * ROW + head * D
    x = tl.load(qkv + i * ROW + d, mask=live, other=0.0).to(tl.float32)
    r = tl.rsqrt(tl.sum(x * x, 1) / D + eps)
    if head < H:
        r *= tl.load(gain + head).to(q.dtype.element_ty).to(tl.float32)
    a = tl.load(qkv + i3 * ROW + g * HALF + j, mask=live3, other=0.0).to(tl.float32)
    b = tl.load(qkv + i3 * ROW + (1 - g) * HALF + j, mask=live3, other=0.0).to(tl.float32)
    c = tl.load(cos + (first + i3) * HALF + j + g * 0, mask=live3, other=0.0).to(tl.float32)
    s = tl.load(sin + (first + i3) * HALF + j + g * 0, mask=live3, other=0.0).to(tl.float32)
    pair = (a * c + b * tl.where(g == 0, s, -s)) * r[:, None, None]
    if head < H:
        q += token * (H * D) + head * D
        tl.store(q + i * (H * D) + d, (x * r[:, None]).to(q.dtype.element_ty), mask=live & (d >= 2 * HALF))
        tl.store(q + i3 * (H * D) + g * HALF + j, pair.to(q.dtype.element_ty), mask=live3)
    else:
        k += token * (KV * D) + (head - H) * D
        tl.store(k + i * (KV * D) + d, (x * r[:, None]).to(k.dtype.element_ty), mask=live & (d >= 2 * HALF))
        tl.store(k + i3 * (KV * D) + g * HALF + j, pair.to(k.dtype.element_ty), mask=live3)

def heads_backward_kernel(dq, dk, dv, qkv, cos, sin, gain, dqkv, dgain, T, eps, H: tl.constexpr, KV: tl.constexpr, D: tl.constexpr, ROW: tl.constexpr, HALF: tl.constexpr, ROWS: tl.constexpr):  # dqkv and partial dgain from dq, dk, dv; the same programs
    head, first = tl.program_id(0), tl.program_id(1) * ROWS
    token = (tl.program_id(2) * T + first).to(tl.int64)
    i, d = tl.arange(0, ROWS)[:, None], tl.arange(0, D)[None, :]
    i3, g, j = tl.arange(0, ROWS)[:, None, None], tl.arange(0, 2)[None, :, None], tl.arange(0, HALF)[None, None, :]
    live, live3 = (first + i < T) & (d < D), (first + i3 < T) & (g < 2) & (j < HALF)
    tail = live & (d >= 2 * HALF)                                            # coordinates that do not rotate
    qkv += token * ROW + head * D
    dqkv += token * ROW + head * D
    if head >= H + KV:
        dv += token * (KV * D) + (head - H - KV) * D
        tl.store(dqkv + i * ROW + d, tl.load(dv + i * (KV * D) + d, mask=live, other=0.0), mask=live)
    else:
        c = tl.load(cos + (first + i3) * HALF + j + g * 0, mask=live3, other=0.0).to(tl.float32)
        s = tl.load(sin + (first + i3) * HALF + j + g * 0, mask=live3, other=0.0).to(tl.float32)
        if head < H:
            dq += token * (H * D) + head * D
            e = tl.load(dq + i * (H * D) + d, mask=tail, other=0.0).to(tl.float32)
            a = tl.load(dq + i3 * (H * D) + g * HALF + j, mask=live3, other=0.0).to(tl.float32)
            b = tl.load(dq + i3 * (H * D) + (1 - g) * HALF + j, mask=live3, other=0.0).to(tl.float32)
            w = tl.load(gain + head).to(dqkv.dtype.element_ty).to(tl.float32)
        else:
            dk += token * (KV * D) + (head - H) * D
            e = tl.load(dk + i * (KV * D) + d, mask=tail, other=0.0).to(tl.float32)
            a = tl.load(dk + i3 * (KV * D) + g * HALF + j, mask=live3, other=0.0).to(tl.float32)
            b = tl.load(dk + i3 * (KV * D) + (1 - g) * HALF + j, mask=live3, other=0.0).to(tl.float32)
            w = 1.0
        x = tl.load(qkv + i * ROW + d, mask=live, other=0.0).to(tl.float32)
        x3 = tl.load(qkv + i3 * ROW + g * HALF + j, mask=live3, other=0.0).to(tl.float32)
        e3 = a * c - b * tl.where(g == 0, s, -s)                             # the rotation undone
        r = tl.rsqrt(tl.sum(x * x, 1) / D + eps)
        dot = tl.sum(e * x, 1) + tl.sum(tl.sum(e3 * x3, 2), 1)
        rw, back = r * w, r * r * r * w * dot / D
        tl.store(dqkv + i * ROW + d, (e * rw[:, None] - x * back[:, None]).to(dqkv.dtype.element_ty), mask=tail)
        tl.store(dqkv + i3 * ROW + g * HALF + j, (e3 * rw[:, None, None] - x3 * back[:, None, None]).to(dqkv.dtype.element_ty), mask=live3)
        if head < H:
            tl.store(dgain + (head * tl.num_programs(2) + tl.program_id(2)) * tl.num_programs(1) + tl.program_id(1), tl.sum(dot * r))

HEAD_ROWS = 32  # tokens of one program

def heads_run(qkv, gain, cos, sin, heads, keys):
    "Launch the forward of the heads: q [B, T, heads, D], k [B, T, keys, D]."
    check_runnable(qkv)
    (B, T, C), half = qkv.shape, cos.shape[-1]
    D, rows = C // (heads + 2 * keys), HEAD_ROWS
    q, k = heads_shapes(qkv, gain, cos, sin, heads, keys)
    jitted(heads_forward_kernel)[(heads + keys, triton.cdiv(T, rows), B)](
        qkv.contiguous(), cos.contiguous(), sin.contiguous(), gain.contiguous(), q, k, T, NORM_EPS, H=heads, KV=keys, D=D, ROW=C, HALF=half, ROWS=rows)
    return q, k

def heads_shapes(qkv, gain, cos, sin, heads, keys):
    "Empty outputs of heads_run."
    B, T, C = qkv.shape
    D = C // (heads + 2 * keys)
    return qkv.new_empty(B, T, heads, D), qkv.new_empty(B, T, keys, D)

heads_op = kernel_op("heads", "(Tensor qkv, Tensor gain, Tensor cos, Tensor sin, int heads, int keys) -> (Tensor, Tensor)", heads_run, heads_shapes)

def heads_grad_run(dq, dk, dv, qkv, gain, cos, sin):
    "Launch the backward of the heads: dqkv, dgain."
    check_runnable(qkv)
    (B, T, H, D), KV, half, rows = dq.shape, dk.shape[2], cos.shape[-1], HEAD_ROWS
    dqkv, dgain = heads_grad_shapes(dq, dk, dv, qkv, gain, cos, sin)
    jitted(heads_backward_kernel)[(H + 2 * KV, triton.cdiv(T, rows), B)](
        dq.contiguous(), dk.contiguous(), dv.contiguous(), qkv.contiguous(), cos.contiguous(), sin.contiguous(), gain.contiguous(), dqkv, dgain, T, NORM_EPS,
        H=H, KV=KV, D=D, ROW=qkv.shape[2], HALF=half, ROWS=rows)
    return dqkv, dgain

def heads_grad_shapes(dq, dk, dv, qkv, gain, cos, sin):
    "Empty outputs of heads_grad_run."
    B, T, H, D = dq.shape
    return qkv.new_empty(qkv.shape), qkv.new_empty(H, B * ((T + HEAD_ROWS - 1) // HEAD_ROWS), dtype=torch.float32)

heads_grad_op = kernel_op("heads_grad", "(Tensor dq, Tensor dk, Tensor dv, Tensor qkv, Tensor gain, Tensor cos, Tensor sin) -> (Tensor, Tensor)", heads_grad_run, heads_grad_shapes)

class FusedHeads(torch.autograd.Function):
    "Projection to heads, norms, rotation and gain: q, k, v [B, T, heads, D]."

    @staticmethod
    def forward(ctx, n, weight, gain, cos, sin, heads, keys):
        "Project, then the kernel; keeps what backward reads once."
        qkv = F.linear(n, weight)
        q, k = heads_op(qkv, gain, cos, sin, heads, keys)
        ctx.save_for_backward(n, weight, gain, cos, sin, qkv)
        return q, k, qkv[..., (q.shape[2] + keys) * q.shape[3]:].unflatten(-1, (keys, q.shape[3]))

    @staticmethod
    def backward(ctx, dq, dk, dv):
        "Gradients of the input, the weight and the gain."
        n, weight, gain, cos, sin, qkv = ctx.saved_tensors
        dqkv, dgain = heads_grad_op(dq, dk, dv, qkv, gain, cos, sin)
        flat = dqkv.flatten(0, 1)
        return (flat @ weight).view(n.shape), flat.T @ n.flatten(0, 1), dgain.sum(1).to(gain.dtype), None, None, None, None

def fused_heads(n: torch.Tensor,       # float [B, T, D] normalised input
                weight: torch.Tensor,  # dtype of n, [(heads + 2 keys) * head_dim, D]: Q, K and V joined
                gain: torch.Tensor,    # [heads], any float dtype
                cos: torch.Tensor,     # [T, rope_dims/2]
                sin: torch.Tensor,
                keys: int,             # key and value heads
                ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # q, k, v [B, T, heads, head_dim], dtype of n
    "Twin of three linear layers followed by `qk_norm_rope_gain`. GolfError where no kernel can run."
    return FusedHeads.apply(n, weight, gain, cos, sin, gain.shape[0], keys)

def heads_fit(head_dim: int, rope_dims: int) -> bool:
    "Whether a head falls into groups of rope_dims/2 coordinates, all powers of two. `head_dim` and `rope_dims` are channels."
    half = rope_dims // 2
    return half > 0 and head_dim % half == 0 and head_dim >= rope_dims and half & (half - 1) == 0 and head_dim & (head_dim - 1) == 0

def xsa_forward_kernel(y, v, out, R, v_row, GROUP: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr):  # out = y less its part along v; programs over blocks of ROWS tokens
    row = (tl.program_id(1) * ROWS + tl.arange(0, ROWS))[:, None].to(tl.int64)
    d = tl.arange(0, D)[None, :]
    live = (row < R) & (d < D)
    u = tl.load(v + row * v_row + tl.program_id(0) * D + d, mask=live, other=0.0).to(tl.float32)
    u *= 1.0 / tl.maximum(tl.sqrt(tl.sum(u * u, 1, keep_dims=True)), 1e-12)
    for i in tl.static_range(GROUP):
        at = row * (tl.num_programs(0) * GROUP * D) + (tl.program_id(0) * GROUP + i) * D + d
        t = tl.load(y + at, mask=live, other=0.0).to(tl.float32)
        tl.store(out + at, (t - tl.sum(t * u, 1, keep_dims=True) * u).to(out.dtype.element_ty), mask=live)

def xsa_backward_kernel(dout, y, v, dy, dv, R, v_row, GROUP: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr):  # dy, dv from dout; the same programs
    row = (tl.program_id(1) * ROWS + tl.arange(0, ROWS))[:, None].to(tl.int64)
    d = tl.arange(0, D)[None, :]
    live = (row < R) & (d < D)
    u = tl.load(v + row * v_row + tl.program_id(0) * D + d, mask=live, other=0.0).to(tl.float32)
    size = tl.sqrt(tl.sum(u * u, 1, keep_dims=True))
    inverse = 1.0 / tl.maximum(size, 1e-12)
    u, du = u * inverse, u * 0.0
    for i in tl.static_range(GROUP):
        at = row * (tl.num_programs(0) * GROUP * D) + (tl.program_id(0) * GROUP + i) * D + d
        t = tl.load(y + at, mask=live, other=0.0).to(tl.float32)
        e = tl.load(dout + at, mask=live, other=0.0).to(tl.float32)
        along = tl.sum(e * u, 1, keep_dims=True)
        tl.store(dy + at, (e - along * u).to(dy.dtype.element_ty), mask=live)
        du -= along * t + tl.sum(t * u, 1, keep_dims=True) * e
    du -= tl.where(size > 1e-12, tl.sum(du * u, 1, keep_dims=True), 0.0) * u
    tl.store(dv + row * (tl.num_programs(0) * D) + tl.program_id(0) * D + d, (du * inverse).to(dv.dtype.element_ty), mask=live)

XSA_ROWS = 16  # tokens of one program

def rows_apart(v: torch.Tensor,  # [B, T, KV, D], any dtype
               ) -> torch.Tensor:  # shape and dtype of v
    "`v` itself if its tokens lie at one distance from each other and its heads side by side, else a contiguous copy."
    B, T, KV, D = v.shape
    return v if v.stride(3) == 1 and v.stride(2) == D and (B == 1 or v.stride(0) == T * v.stride(1)) else v.contiguous()

def xsa_run(y, v):
    "Launch the forward of XSA: out, as y."
    check_runnable(y)
    (B, T, H, D), KV, out, v = y.shape, v.shape[2], torch.empty_like(y, memory_format=torch.contiguous_format), rows_apart(v)
    jitted(xsa_forward_kernel)[(KV, triton.cdiv(B * T, XSA_ROWS))](y.contiguous(), v, out, B * T, v.stride(1), GROUP=H // KV, D=D, ROWS=XSA_ROWS)
    return out

def xsa_shapes(y, v):
    "Empty output of xsa_run."
    return torch.empty_like(y, memory_format=torch.contiguous_format)

xsa_op = kernel_op("xsa", "(Tensor y, Tensor v) -> Tensor", xsa_run, xsa_shapes)

def xsa_grad_run(dout, y, v):
    "Launch the backward of XSA: dy, dv."
    check_runnable(y)
    (B, T, H, D), KV, v = y.shape, v.shape[2], rows_apart(v)
    dy, dv = xsa_grad_shapes(dout, y, v)
    jitted(xsa_backward_kernel)[(KV, triton.cdiv(B * T, XSA_ROWS))](
        dout.contiguous(), y.contiguous(), v, dy, dv, B * T, v.stride(1), GROUP=H // KV, D=D, ROWS=XSA_ROWS)
    return dy, dv

def xsa_grad_shapes(dout, y, v):
    "Empty outputs of xsa_grad_run."
    return torch.empty_like(y, memory_format=torch.contiguous_format), torch.empty_like(v, memory_format=torch.contiguous_format)

xsa_grad_op = kernel_op("xsa_grad", "(Tensor dout, Tensor y, Tensor v) -> (Tensor, Tensor)", xsa_grad_run, xsa_grad_shapes)

class FusedExclusive(torch.autograd.Function):
    "XSA in one pass each way."

    @staticmethod
    def forward(ctx, y, v):
        "The kernel; keeps y and v."
        ctx.save_for_backward(y, v)
        return xsa_op(y, v)

    @staticmethod
    def backward(ctx, dout):
        "Gradients of y and v."
        return xsa_grad_op(dout, *ctx.saved_tensors)

def fused_exclusive(y: torch.Tensor,  # float [B, T, H, D] attention output
                    v: torch.Tensor,  # float [B, T, KV, D] values of the same positions
                    ) -> torch.Tensor:  # [B, T, H, D], dtype of y
    "Twin of `exclusive`. GolfError where no kernel can run."
    return FusedExclusive.apply(y, v)

def mlp_product_kernel(a, b, z, out, M, N, K, slope, BACKWARD: tl.constexpr, SAVE: tl.constexpr, B_IS_KN: tl.constexpr,
                       FLAT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):  # a tile of the product with the activation, or its derivative, in the epilogue
    across = tl.cdiv(N, BN)
    for tile in tl.range(tl.program_id(0), tl.cdiv(M, BM) * across, tl.num_programs(0), flatten=FLAT):
        row, col = (tile // across) * BM, (tile % across) * BN
        acc = tl.zeros((BM, BN), dtype=tl.float32)
        for at in tl.range(0, K, BK):
            x = a.load([row, at])
            if B_IS_KN:
                acc = tl.dot(x, b.load([at, col]), acc)
            else:
                acc = tl.dot(x, b.load([col, at]).T, acc)
        left, right = tl.split(tl.permute(tl.reshape(acc, (BM, 2, BN // 2)), (0, 2, 1)))
        halves = (left, right)
        for part in tl.static_range(2):
            here = col + part * (BN // 2)
            if BACKWARD:
                t = z.load([row, here]).to(tl.float32)
                out.store([row, here], (halves[part] * 2.0 * tl.where(t > 0, t, slope * slope * t)).to(out.dtype))
            else:
                t = halves[part].to(out.dtype)
                if SAVE:
                    z.store([row, here], t)
                t = t.to(tl.float32)
                t = tl.where(t > 0, t, slope * t)
                out.store([row, here], (t * t).to(out.dtype))

MLP_UP_TILES = {"BM": 128, "BN": 128, "BK": 64, "num_warps": 4, "num_stages": 3, "waves": 2, "FLAT": True}     # waves: programs per multiprocessor,

MLP_DOWN_TILES = {"BM": 128, "BN": 128, "BK": 64, "num_warps": 4, "num_stages": 3, "waves": 0, "FLAT": False}  # each taking tile after tile; 0: one per tile

def mlp_launch(a, b, z, out, slope, tiles, backward, save):
    "out = f(a bᵀ) and z = a bᵀ if `save`; or, backward, out = (a b) f'(z)."
    (M, K), N = a.shape, out.shape[1]
    half = [tiles["BM"], tiles["BN"] // 2]
    parts = [(a, [tiles["BM"], tiles["BK"]]), (b, [tiles["BK"], tiles["BN"]] if backward else [tiles["BN"], tiles["BK"]]), (z, half), (out, half)]
    count = triton.cdiv(M, tiles["BM"]) * triton.cdiv(N, tiles["BN"])
    if tiles["waves"] and a.is_cuda:
        count = min(count, tiles["waves"] * torch.cuda.get_device_properties(a.device).multi_processor_count)
    jitted(mlp_product_kernel)[(count,)](*(TensorDescriptor.from_tensor(t, block) for t, block in parts), M, N, K, slope, BACKWARD=backward, SAVE=save,
                                         B_IS_KN=backward, **{k: v for k, v in tiles.items() if k != "waves"})

def mlp_up_run(n, up, slope, save):
    "Launch the product up with its activation: out, and z if `save`."
    check_runnable(n)
    h, z = mlp_up_shapes(n, up, slope, save)
    mlp_launch(n.contiguous(), up.contiguous(), z if save else h, h, slope, MLP_UP_TILES, False, save)
    return h, z

def mlp_up_shapes(n, up, slope, save):
    "Empty outputs of mlp_up_run."
    return n.new_empty(n.shape[0], up.shape[0]), n.new_empty(n.shape[0] if save else 0, up.shape[0])

def mlp_down_grad_run(dm, down, z, slope):
    "Launch the gradient through down and the activation: dz."
    check_runnable(dm)
    dz = torch.empty_like(z)
    mlp_launch(dm.contiguous(), down.contiguous(), z, dz, slope, MLP_DOWN_TILES, True, False)
    return dz

def mlp_down_grad_shapes(dm, down, z, slope):
    "Empty output of mlp_down_grad_run."
    return torch.empty_like(z)

mlp_up_op = kernel_op("mlp_up", "(Tensor n, Tensor up, float slope, bool save) -> (Tensor, Tensor)", mlp_up_run, mlp_up_shapes)

mlp_down_grad_op = kernel_op("mlp_down_grad", "(Tensor dm, Tensor down, Tensor z, float slope) -> Tensor", mlp_down_grad_run, mlp_down_grad_shapes)

class FusedMlp(torch.autograd.Function):
    "Up, squared leaky ReLU and down; the activation in the products' epilogues."

    @staticmethod
    def forward(ctx, n, up, down, slope, save):
        "Up with its activation, then down."
        h, z = mlp_up_op(n.flatten(0, -2), up, slope, save)
        ctx.save_for_backward(n, up, down, h, z)
        ctx.slope = slope
        return F.linear(h, down).view(*n.shape[:-1], -1)

    @staticmethod
    def backward(ctx, dm):
        "Gradients of the input and both weights."
        n, up, down, h, z = ctx.saved_tensors
        dm = dm.flatten(0, -2)
        dz = mlp_down_grad_op(dm, down, z, ctx.slope)
        return (dz @ up).view(n.shape), dz.T @ n.flatten(0, -2), dm.T @ h, None, None

def fused_mlp(n: torch.Tensor,     # float [..., D]
              up: torch.Tensor,    # [hidden, D], dtype of n
              down: torch.Tensor,  # [D, hidden], dtype of n
              slope: float,        # of the activation below zero: ratio
              ) -> torch.Tensor:   # [..., D], dtype of n
    "Twin of linear, `squared_leaky`, linear. GolfError where no kernel can run."
    return FusedMlp.apply(n, up, down, slope, torch.is_grad_enabled())

def mlp_fit(up: torch.Tensor) -> bool:
    "Whether the rows of [hidden, D] and of its transpose start on 16 bytes each, as the bulk copies of the kernel need."
    return all(n * up.element_size() % 16 == 0 for n in up.shape)

# ---- model ----

def table_shapes(cfg: Config) -> dict[str, tuple[int, int]]:
    "Parameters that are looked up by row: name -> [rows, width]."
    shapes = {"tok_emb": (cfg.vocab_size, cfg.model_dim)}
    if cfg.bigram_vocab_size:
        shapes["bigram_table"] = (cfg.bigram_vocab_size, cfg.bigram_dim)
    if cfg.ve_layer_list:
        shapes["ve_table"] = (cfg.vocab_size, cfg.ve_dim)
    return shapes

def scalar_shapes(cfg: Config) -> dict[str, tuple[int, ...]]:
    "Small parameters, stacked over layers where there is one per layer: name -> shape."
    L, D = cfg.num_layers, cfg.model_dim
    shapes = {"attn_scale": (L, D), "mlp_scale": (L, D), "resid_mix": (L, 2, D), "q_gain": (L, cfg.num_heads), "smear_gate": (D,)}
    if L > 1:
        shapes["skip_weights"] = (L // 2, 1 if cfg.skip_gate == "sigmoid" else D)
    if cfg.bigram_vocab_size:
        shapes |= {"bigram_proj": (D, cfg.bigram_dim), "bigram_scale": ()}
    if cfg.ve_layer_list:
        shapes |= {"ve_proj": (cfg.kv_dim, cfg.ve_dim), "ve_scale": (), "ve_layer_scales": (len(cfg.ve_layer_list),)}
    return shapes

class BlockWeights(NamedTuple):
    "What one block reads."
    q: torch.Tensor           # [D, D], compute dtype
    k: torch.Tensor           # [KV*head, D], compute dtype
    v: torch.Tensor           # [KV*head, D], compute dtype
    out: torch.Tensor         # [D, D], compute dtype
    up: torch.Tensor          # [hidden, D], compute dtype
    down: torch.Tensor        # [D, hidden], compute dtype
    attn_scale: torch.Tensor  # [D], fp32 (or fp64)
    mlp_scale: torch.Tensor   # [D], fp32 (or fp64)
    mix: torch.Tensor         # [2, D], compute dtype
    gain: torch.Tensor        # [H], fp32 (or fp64)
    qkv: torch.Tensor | None = None          # [D + 2 KV*head, D], compute dtype: q, k and v joined, where a kernel reads them so
    out_scaled: torch.Tensor | None = None   # [D, D], compute dtype: out with its scale multiplied in, where that saves passes
    down_scaled: torch.Tensor | None = None  # [D, hidden], compute dtype: down likewise

@dataclass(frozen=True)
class BlockTraits:
    "What is fixed about one block."
    index: int       # which block it is
    head_dim: int    # channels of a head
    norm_scale: float  # factor after its norms
    slope: float     # of the activation below zero: ratio
    xsa: bool        # exclusive self-attention
    ve: int | None   # its place among the blocks with a value embedding, or None
    attention: str   # backend choice, see ready_attention

def block_traits(cfg: Config) -> list[BlockTraits]:
    "The traits of every block: norms scaled by 1/sqrt(index + 1), XSA in the last `xsa_last_n`, value embeddings in `ve_layers`."
    ve = cfg.ve_layer_list
    return [BlockTraits(i, cfg.head_dim, 1 / math.sqrt(i + 1) if cfg.ln_scale else 1.0, cfg.negative_slope,
                        i >= cfg.num_layers - cfg.xsa_last_n, ve.index(i) if i in ve else None, cfg.attention)
            for i in range(cfg.num_layers)]

def last_positions(x: torch.Tensor,    # [B, T, ...], any dtype
                   keep: int | None,   # how many, or None for all
                   ) -> torch.Tensor:  # [B, keep, ...], dtype of x
    "The last `keep` positions."
    return x if keep is None or keep == x.shape[1] else x[:, -keep:]

def record_tap(taps: dict | None, block: BlockTraits, names: tuple[str, ...], x: torch.Tensor) -> None:
    "Store `x`, [B, T, channels] in the compute dtype, the input of a block's matrices under their names, if anybody asked."
    if taps is not None:
        for name in names:
            taps[f"blocks.{block.index}.{name}.weight"] = x

def project_heads(n: torch.Tensor,          # [B, T, D] normalised input, compute dtype
                  w: BlockWeights,
                  block: BlockTraits,
                  cos: torch.Tensor,        # [T, rope_dims/2]
                  sin: torch.Tensor,
                  ve: torch.Tensor | None,  # [B, T, KV*head] value embedding of this block, compute dtype
                  keep: int | None,         # last positions wanted of q
                  ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # q [B, keep, H, head]; k, v [B, T, KV, head]; dtype of n
    "The heads of a block, normalised and rotated."
    if keep in (None, n.shape[1]) and use_kernels(n, "heads") and heads_fit(block.head_dim, 2 * cos.shape[-1]):
        q, k, v = fused_heads(n, torch.cat((w.q, w.k, w.v)) if w.qkv is None else w.qkv, w.gain, cos, sin, w.k.shape[0] // block.head_dim)
        return q, k, v if ve is None else v + ve.view(v.shape)
    q, k, v = F.linear(last_positions(n, keep), w.q), F.linear(n, w.k), F.linear(n, w.v)
    q, k, v = (t.unflatten(-1, (-1, block.head_dim)) for t in (q, k, v if ve is None else v + ve))
    return *qk_norm_rope_gain(q, k, cos, sin, w.gain), v

def scaled_linear(x: torch.Tensor,       # [..., in], compute dtype
                  weight: torch.Tensor,  # [out, in], dtype of x
                  scale: torch.Tensor,   # [out], any float dtype
                  scaled: torch.Tensor | None,  # [out, in], dtype of x: diag(scale) weight, if it is there already
                  ) -> torch.Tensor:     # [..., out], dtype of x
    "A branch's last product, weighted per channel: the weights go into the matrix where that saves passes over the result."
    if not use_kernels(x, "fold"):
        return scale.to(x.dtype) * F.linear(x, weight)
    return F.linear(x, folded_weight(weight, scale) if scaled is None else scaled)

def folded_weight(weight: torch.Tensor,  # float [..., out, in]
                  scale: torch.Tensor,   # [..., out], fp32 (or fp64)
                  ) -> torch.Tensor:     # shape and dtype of weight
    "diag(scale) weight, multiplied in float32 and rounded once."
    return (weight * scale[..., None]).to(weight.dtype)

def attention_branch(n: torch.Tensor,          # [B, T, D] normalised input, compute dtype
                     w: BlockWeights, block: BlockTraits, cos: torch.Tensor, sin: torch.Tensor,
                     ve: torch.Tensor | None,  # [B, T, KV*head] value embedding of this block, compute dtype
                     keep: int | None,         # last positions wanted
                     taps: dict | None,
                     ) -> torch.Tensor:        # [B, keep, D], dtype of n
    "Project, normalise and rotate q and k, attend, drop the own value (XSA), project back, weigh."
    record_tap(taps, block, ("attn.c_q", "attn.c_k", "attn.c_v"), n)
    q, k, v = project_heads(n, w, block, cos, sin, ve, keep)
    y = attend(q, k, v, block.attention)
    if block.xsa:
        y = (fused_exclusive if use_kernels(y, "xsa") else exclusive)(y, last_positions(v, keep))
    y = y.flatten(2)
    record_tap(taps, block, ("attn.proj",), y)
    return scaled_linear(y, w.out, w.attn_scale, w.out_scaled)

def mlp_branch(n: torch.Tensor,    # [B, T, D] normalised input, compute dtype
               w: BlockWeights, block: BlockTraits, taps: dict | None,
               ) -> torch.Tensor:  # [B, T, D], dtype of n
    "Up, squared leaky ReLU, down, weigh."
    if taps is None and use_kernels(n, "mlp") and mlp_fit(w.up):
        if use_kernels(n, "fold"):
            return fused_mlp(n, w.up, folded_weight(w.down, w.mlp_scale) if w.down_scaled is None else w.down_scaled, block.slope)
        return w.mlp_scale.to(n.dtype) * fused_mlp(n, w.up, w.down, block.slope)
    record_tap(taps, block, ("mlp.fc",), n)
    h = squared_leaky(F.linear(n, w.up), block.slope)
    record_tap(taps, block, ("mlp.proj",), h)
    return scaled_linear(h, w.down, w.mlp_scale, w.down_scaled)

def run_block(x: torch.Tensor,   # [B, T, D] residual stream, compute dtype
              x0: torch.Tensor,  # [B, T, D] the embedded input, compute dtype
              w: BlockWeights, block: BlockTraits, cos: torch.Tensor, sin: torch.Tensor, ve: torch.Tensor | None,
              keep: int | None = None, taps: dict | None = None,
              ) -> torch.Tensor:  # [B, keep, D], dtype of x
    "One transformer block: mix and norm, attention, norm, MLP."
    x_in, n = mix_norm(x, x0, w.mix, block.norm_scale)
    x1 = last_positions(x_in, keep) + attention_branch(n, w, block, cos, sin, ve, keep, taps)
    n1 = rms_norm(x1) * block.norm_scale
    return x1 + mlp_branch(n1, w, block, taps)

def skip_source(blocks: int,            # number of blocks
                ) -> list[int | None]:  # per block: the block whose output it adds, or None
    "U-Net wiring: the second half of the blocks reads the first half's outputs, last in first out."
    half = blocks // 2
    return [None] * half + [2 * half - 1 - j if j < 2 * half else None for j in range(half, blocks)]

BLOCK_MATRICES = ("attn.c_q", "attn.c_k", "attn.c_v", "attn.proj", "mlp.fc", "mlp.proj")  # order of BlockWeights

def block_places(layout: Layout, blocks: int) -> list[list[tuple[str, int, bool]]]:
    "Bank, place among the bank's matrices and whether it is stored transposed, for each matrix of each block."
    found = {m.name: (b.name, i, m.transposed) for b in layout.banks for i, m in enumerate(p for slot in b.matrices for p in slot.logical)}
    return [[found[f"blocks.{i}.{m}.weight"] for m in BLOCK_MATRICES] for i in range(blocks)]

def side_by_side(layout: Layout, places: list[list[tuple[str, int, bool]]]) -> bool:  # places: see block_places
    "Whether each kind of matrix fills as many neighbouring slots of a bank as there are blocks, in their order, from a multiple of that number on."
    L, alone = len(places), not layout.separate and not any(slot.parts for b in layout.banks for slot in b.matrices)
    return alone and all(first[1] % L == 0 and kind == tuple((first[0], first[1] + i, first[2]) for i in range(L)) for kind in zip(*places) for first in kind[:1])

def chosen_dtype(word: str, usual: torch.dtype) -> torch.dtype:
    "The dtype that the switch `word` stands for: bf16, fp32, or with auto the usual one."
    return {"bf16": torch.bfloat16, "fp32": torch.float32}.get(word, usual)

class GolfWeights(torch.nn.Module):
    "Parameters by role, all zero, and what is fixed about the blocks that read them."

    def __init__(self, cfg: Config,                    # shapes and switches
                 layout: Layout,                       # of the banks, for any world size
                 dtype: torch.dtype = torch.float32,   # of the residual stream (the compute dtype); and of banks, tables, rotary tables where cfg names no other
                 device: str | torch.device = "cpu"):
        super().__init__()
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        self.cfg, self.layout, self.cap, self.order = cfg, layout, cfg.logit_softcap, list(range(cfg.num_layers))
        self.frozen = 0, "all"  # lowest blocks that get no gradient, and what of them: "all" or "controls" (chapter 18)
        attention = ready_attention(cfg.attention, device, cfg.num_heads, cfg.num_kv_heads, cfg.head_dim)
        self.blocks, self.places, self.compute = block_traits(replace(cfg, attention=attention)), block_places(layout, cfg.num_layers), dtype
        self.stackable = side_by_side(layout, self.places)
        self.shapes = {b.name: slot_shapes(b) for b in layout.banks}
        self.banks = torch.nn.ParameterDict(make_banks(layout, chosen_dtype(cfg.matrix_dtype, dtype), device))
        self.tables, self.scalars = tuple(table_shapes(cfg)), tuple(scalar_shapes(cfg))
        for shapes, kind in ((table_shapes(cfg), chosen_dtype(cfg.table_dtype, dtype)), (scalar_shapes(cfg), wide)):
            for name, shape in shapes.items():
                self.register_parameter(name, torch.nn.Parameter(torch.zeros(shape, dtype=kind, device=device)))
        for T in {cfg.train_seq_len, cfg.eval_seq_len}:
            for name, table in zip(("cos", "sin"), rotary_tables(T, cfg.rope_dims, cfg.rope_base, cfg.rope_train_len, device, chosen_dtype(cfg.buffer_dtype, dtype))):
                self.register_buffer(f"rotary_{name}_{T}", table, persistent=False)

    def role_params(self) -> dict[str, dict[str, torch.nn.Parameter]]:
        "Parameters by role: bank (in the layout's order), table, scalar."
        return {"bank": {b.name: self.banks[b.name] for b in self.layout.banks}, "table": {n: getattr(self, n) for n in self.tables},
                "scalar": {n: getattr(self, n) for n in self.scalars}}

def stacked_kinds(model: GolfWeights) -> list[torch.Tensor]:  # [blocks, rows, columns] each, in the order of BLOCK_MATRICES; padding slots may follow
    "The matrices of each kind in the compute dtype, as views where that is theirs. Only for a model that is `stackable`."
    L = len(model.places)
    runs = {name: bank.split(L) if bank.shape[0] >= 2 * L else (bank,) for name, bank in model.banks.items()}
    return [runs[b][i // L].to(model.compute).mT if flipped else runs[b][i // L].to(model.compute) for b, i, flipped in model.places[0]]

def block_weights(model: GolfWeights,
                  x: torch.Tensor | None = None,  # [B, T, D] what the blocks read, compute dtype; None: no kernel will read these weights
                  ) -> list[BlockWeights]:
    "Every block's weights in the compute dtype, as views where that is theirs; with `x`, also what kernels that may take it want made of them."
    scalars = [p.unbind(0) for p in (model.attn_scale, model.mlp_scale, model.resid_mix.to(model.compute), model.q_gain)]
    frozen = torch.is_grad_enabled() and model.frozen[0] > 0
    if model.stackable:
        kinds = stacked_kinds(model)
        blocks = [BlockWeights(*w) for w in zip(*(k.unbind(0) for k in kinds), *scalars)]
        blocks = blocks if x is None or frozen else joined_weights(model, x, blocks, [k[:len(blocks)] for k in kinds])
    else:
        slices = {name: [w.to(model.compute) for w in bank_views(bank, model.shapes[name])] for name, bank in model.banks.items()}
        blocks = [BlockWeights(*(slices[b][i].T if flipped else slices[b][i] for b, i, flipped in where), *s) for where, s in zip(model.places, zip(*scalars))]
    return freeze_blocks(blocks, *model.frozen) if frozen else blocks

def joined_weights(model: GolfWeights, x: torch.Tensor, blocks: list[BlockWeights],
                   kinds: list[torch.Tensor],  # [blocks, rows, columns] each, compute dtype, see stacked_kinds
                   ) -> list[BlockWeights]:
    "The blocks' weights with what kernels that may read `x` want made of them."
    (q, k, v, out, _, down), made = kinds, {}
    if use_kernels(x, "heads"):
        made["qkv"] = torch.cat((q, k, v), dim=1)
    if use_kernels(x, "fold"):
        made |= {"out_scaled": folded_weight(out, model.attn_scale), "down_scaled": folded_weight(down, model.mlp_scale)}
    parts = {name: t.unbind(0) for name, t in made.items()}
    return [w._replace(**{name: t[i] for name, t in parts.items()}) for i, w in enumerate(blocks)]

def freeze_blocks(blocks: list[BlockWeights], count: int,  # from the bottom
                  scope: str) -> list[BlockWeights]:       # "all", or "controls": scales, mixes and gains only
    "Detach the weights of the lowest blocks, so that backward computes no gradient for them."
    first = 0 if scope == "all" else len(BLOCK_MATRICES)
    return [BlockWeights(*w[:first], *(t if t is None else t.detach() for t in w[first:])) for w in blocks[:count]] + blocks[count:]

def embed_input(model: GolfWeights, ids: torch.Tensor) -> torch.Tensor:
    "Token embedding plus BigramHash, normalised, smeared: [B, T, D] in the compute dtype."
    x = F.embedding(ids, model.tok_emb).to(model.compute)
    if "bigram_table" in model.tables:
        pair = F.embedding(bigram_rows(ids, model.bigram_table.shape[0]), model.bigram_table).to(x.dtype)
        x = x + F.linear(pair, model.bigram_proj.to(x.dtype)) * model.bigram_scale.to(x.dtype)
    return smear(rms_norm(x), model.smear_gate)

def value_embeddings(model: GolfWeights, ids: torch.Tensor) -> list[torch.Tensor]:
    "One [B, T, KV*head] per block that adds a value embedding, in the compute dtype."
    if "ve_table" not in model.tables:
        return []
    ve = F.embedding(ids, model.ve_table).to(model.compute)
    ve = F.linear(ve, model.ve_proj.to(ve.dtype)) * model.ve_scale.to(ve.dtype)
    return [ve * s for s in model.ve_layer_scales.to(ve.dtype).unbind(0)]

SKIP_START = {"one": 1.0, "0.18": 0.18, "zero": 0.0, "frozen": 0.0, "sigmoid": -1.5}  # initial weights by cfg.skip_gate

SKIP_FROZEN_STEPS = 50  # with skip_gate=frozen

def skip_factors(model: GolfWeights) -> tuple[torch.Tensor, ...]:  # [D] or [1] each, in the compute dtype
    "What each skip is multiplied by: a weight per channel, or one gate (modded-nanogpt #125)."
    w = model.skip_weights
    return (w.sigmoid() if model.cfg.skip_gate == "sigmoid" else w).to(model.compute).unbind(0)

def model_rotary(model: GolfWeights, T: int) -> tuple[torch.Tensor, torch.Tensor]:
    "The model's cos and sin for rows of length T, [T, rope_dims/2] each, in the compute dtype unless BUFFER_DTYPE names another."
    if hasattr(model, f"rotary_cos_{T}"):
        return getattr(model, f"rotary_cos_{T}"), getattr(model, f"rotary_sin_{T}")
    cfg = model.cfg
    return rotary_tables(T, cfg.rope_dims, cfg.rope_base, cfg.rope_train_len, model.tok_emb.device, chosen_dtype(cfg.buffer_dtype, model.compute))

def walk_blocks(model: GolfWeights, ids: torch.Tensor, keep: int | None, taps: dict | None, rope_len: int | None) -> torch.Tensor:
    "Embed, then all blocks of `model.order` with their skips; only the last one is cut to `keep`: [B, keep, D] in the compute dtype."
    T, cfg = ids.shape[1], model.cfg
    x = x0 = embed_input(model, ids)
    values, weights = value_embeddings(model, ids), block_weights(model, x)
    cos, sin = model_rotary(model, max(T, rope_len or T))
    half, source = cfg.num_layers // 2, skip_source(cfg.num_layers)
    skips = skip_factors(model) if half else ()
    outputs = {}
    for place, i in enumerate(model.order):
        block = model.blocks[i]
        if source[i] is not None:
            x = x + skips[i - half] * outputs[source[i]]
        ve = None if block.ve is None else values[block.ve]
        x = run_block(x, x0, weights[i], block, cos[:T], sin[:T], ve, keep if place + 1 == len(model.order) else None, taps)
        if i < half:
            outputs[i] = x
    return x

class Golf(GolfWeights):
    "The model. All parameters are zero until `init_model` or `load_named` fills them."

    def forward(self, ids: torch.Tensor,         # int64 [B, T] tokens
                keep: int | None = None,         # only the last `keep` positions; None: all
                taps: dict | None = None,        # filled with the input of every matrix, by matrix name
                rope_len: int | None = None,     # row length that sets the rotary base, in tokens; None: T
                ) -> torch.Tensor:               # [B, keep, V] logits before the softcap, in the compute dtype
        "Logits. GolfError if `keep` is not in 1..T."
        if keep is not None and not 1 <= keep <= ids.shape[1]:
            raise GolfError(f"keep must be between 1 and the row length {ids.shape[1]}: found {keep}")
        return F.linear(rms_norm(walk_blocks(self, ids, keep, taps, rope_len)), self.tok_emb.to(self.compute))

def published_names(cfg: Config) -> dict[str, tuple[str, int | None]]:
    "Published name -> (parameter, row of it or None for all), for everything that is not in a bank."
    whole = {"tok_emb.weight": "tok_emb", "bigram.embed.weight": "bigram_table", "bigram.proj.weight": "bigram_proj", "bigram.scale": "bigram_scale",
             "smear.gate": "smear_gate", "ve_shared.embed.weight": "ve_table", "ve_shared.proj.weight": "ve_proj", "ve_shared.scale": "ve_scale",
             "skip_weights": "skip_weights"}
    present = table_shapes(cfg) | scalar_shapes(cfg)
    names: dict[str, tuple[str, int | None]] = {k: (v, None) for k, v in whole.items() if v in present}
    names |= {f"ve_layer_scales.{j}": ("ve_layer_scales", j) for j in range(len(cfg.ve_layer_list))}
    for i in range(cfg.num_layers):
        names |= {f"blocks.{i}.{n}": (n, i) for n in ("attn_scale", "mlp_scale", "resid_mix")}
        names[f"blocks.{i}.attn.q_gain"] = ("q_gain", i)
    return names

def published_views(model: Golf, banks: Mapping[str, torch.Tensor], others: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    "Views of full tensors under the published names, matrices in logical orientation: each in its own shape, in the dtype given."
    views = {name: others[param] if row is None else others[param][row] for name, (param, row) in published_names(model.cfg).items()}
    return views | unbank(model.layout, banks)

@torch.no_grad()
def named_state(model: Golf,
                banks: Mapping[str, torch.Tensor] | None = None,   # bank name -> full tensor; None: the model's own
                others: Mapping[str, torch.Tensor] | None = None,  # parameter name -> tensor; None: the model's own
                ) -> dict[str, torch.Tensor]:                      # published name -> contiguous copy of its own shape, dtype as given
    "The weights under their published names."
    own = model.role_params()
    views = published_views(model, own["bank"] if banks is None else banks, own["table"] | own["scalar"] if others is None else others)
    return {name: view.detach().clone(memory_format=torch.contiguous_format) for name, view in views.items()}

@torch.no_grad()
def load_named(model: Golf,
               state: Mapping[str, torch.Tensor],  # published name -> tensor, any dtype and device
               ) -> None:
    "Fill the model in place: the inverse of `named_state`. GolfError, before anything is written, for a missing, surplus or misshapen tensor."
    own = model.role_params()
    views = published_views(model, own["bank"], own["table"] | own["scalar"])
    if missing := sorted(set(views) ^ set(state)):
        kind = "lack" if missing[0] in views else "have the unknown"
        raise GolfError(f"these weights do not belong to this model: they {kind} {missing[0]!r} ({len(missing)} names differ); build the model from the settings saved with them")
    for name, view in views.items():
        if view.shape != state[name].shape:
            raise GolfError(f"tensor {name} must have shape {tuple(view.shape)}: found {tuple(state[name].shape)}; build the model from the settings saved with it")
    rebank(model.layout, {n: state[n] for n in model.layout.names()}, own["bank"])
    for name in published_names(model.cfg):
        views[name].copy_(state[name])

def _draw_normal(g: torch.Generator, shape: tuple[int, int], std: float) -> torch.Tensor:
    return torch.empty(shape).normal_(0.0, std, generator=g)

def _draw_orthogonal(g: torch.Generator, shape: tuple[int, int]) -> torch.Tensor:
    return torch.nn.init.orthogonal_(torch.empty(shape), generator=g)

def drawn_state(cfg: Config, seed: int) -> dict[str, torch.Tensor]:
    "All random tensors of a fresh model by published name, float32 in their own shapes, drawn in the published order (PR #549) from a CPU generator."
    g, tables, scalars, out = torch.Generator().manual_seed(seed), table_shapes(cfg), scalar_shapes(cfg), {}
    _draw_normal(g, tables["tok_emb"], 1.0)                                                     # overwritten below
    for kind, table, proj in (("bigram", "bigram_table", "bigram_proj"), ("ve_shared", "ve_table", "ve_proj")):
        if table in tables:
            _draw_normal(g, tables[table], 1.0)                                                 # thrown away
            out[f"{kind}.embed.weight"] = _draw_normal(g, tables[table], 0.01) if kind == "ve_shared" else torch.zeros(tables[table])
            torch.nn.init.kaiming_uniform_(torch.empty(scalars[proj]), a=math.sqrt(5), generator=g)  # thrown away
    out["tok_emb.weight"] = _draw_normal(g, tables["tok_emb"], cfg.tied_embed_init_std)
    shapes = {m.name: (m.rows, m.cols) for _, _, m in model_layout(cfg, 1)}
    for i in range(cfg.num_layers):
        for name in ("attn.c_q", "attn.c_k", "attn.c_v", "mlp.fc"):
            out[f"blocks.{i}.{name}.weight"] = _draw_orthogonal(g, shapes[f"blocks.{i}.{name}.weight"])
    for kind, proj in (("bigram", "bigram_proj"), ("ve_shared", "ve_proj")):
        if proj in scalars:
            out[f"{kind}.proj.weight"] = _draw_orthogonal(g, scalars[proj])
    return out

def init_model(model: Golf, cfg: Config, seed: int) -> None:
    "Fill a fresh model: the published draws for `seed`, constants for the rest, all rounded to bfloat16 once."
    constant = {"attn_scale": 1.0, "mlp_scale": 1.0, "skip_weights": SKIP_START[cfg.skip_gate], "ve_layer_scales": 1.0, "q_gain": cfg.qk_gain_init,
                "bigram_scale": 0.05, "ve_scale": 0.1}
    state = {name: torch.zeros_like(t, device="cpu") for name, t in named_state(model).items()}
    for name, (param, _) in published_names(cfg).items():
        state[name].fill_(constant.get(param, 0.0))
        if param == "resid_mix":
            state[name][0] = 1.0
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        state |= drawn_state(cfg, seed)
    finally:
        torch.set_num_threads(threads)
    load_named(model, {name: t.bfloat16() for name, t in state.items()})

CONTROL_NAMES = ("attn_scale", "mlp_scale", "resid_mix", "q_gain", "skip_weights", "smear", "ve_layer_scales", "ve_shared.scale", "bigram.scale")

def quant_kind(name: str,                # published name
               shape: tuple[int, ...],
               small: int = SMALL_MATRIX,  # up to so many elements a tensor stays fp16
               ) -> str:                 # "fp16", "fp32", "int6" or "int8"
    "How the artifact stores a tensor (the published order of rules): small fp16, larger controls fp32, block matrices int6, the rest int8. `shape` is the tensor's."
    if math.prod(shape) <= small:
        return "fp16"
    if len(shape) < 2 or any(c in name for c in CONTROL_NAMES):
        return "fp32"
    return "int6" if ".attn." in name or ".mlp." in name else "int8"

# ---- newton_schulz ----

NS5_COEFFS = ((3.4445, -4.7750, 2.0315),) * 5  # one quintic, five times (Muon, Keller Jordan)

POLAR_EXPRESS_COEFFS = (
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323))

def plain_product(a: torch.Tensor,          # [n, M, M], any float dtype
                  b: torch.Tensor,          # [n, M, N], dtype of a
                  alpha: float,             # factor of the product
                  beta: float,              # factor of b
                  symmetric: bool = False,  # the result equals its transpose
                  ) -> torch.Tensor:        # [n, M, N], dtype of a
    "alpha * a @ b + beta * b for every matrix of a batch."
    return torch.baddbmm(b, a, b, beta=beta, alpha=alpha)

def ns_product_kernel(a, b, out,                 # as in kernel_product
                      M, N,                      # rows and columns of the result
                      a_slot, a_row, a_col, b_slot, b_row, b_col,  # strides
                      alpha, beta,               # factors of product and addend
                      SYMMETRIC: tl.constexpr, SIDE: tl.constexpr, BK: tl.constexpr):  # one tile; programs over (tiles, matrices)
    across = tl.cdiv(N, SIDE)
    first, left = tl.program_id(0) // across * SIDE, tl.program_id(0) % across * SIDE
    if SYMMETRIC:
        if left < first:
            return
    n = tl.program_id(1).to(tl.int64)
    row, col, k = first + tl.arange(0, SIDE), left + tl.arange(0, SIDE), tl.arange(0, BK)
    a += n * a_slot + row[:, None] * a_row + k[None, :] * a_col
    b += n * b_slot + col[None, :] * b_col
    x, acc = b + k[:, None] * b_row, tl.zeros((SIDE, SIDE), dtype=tl.float32)
    for at in tl.range(0, M, BK):
        left_part = tl.load(a, mask=(row[:, None] < M) & (k[None, :] < M - at), other=0.0)
        acc = tl.dot(left_part, tl.load(x, mask=(k[:, None] < M - at) & (col[None, :] < N), other=0.0), acc)
        a += BK * a_col
        x += BK * b_row
    live = (row[:, None] < M) & (col[None, :] < N)
    addend = tl.load(b + row[:, None] * b_row, mask=live, other=0.0).to(tl.float32)
    found = (alpha * acc + beta * addend).to(out.dtype.element_ty)
    out += n * M * N
    tl.store(out + row[:, None] * N + col[None, :], found, mask=live)
    if SYMMETRIC:
        if left > first:
            tl.store(out + col[:, None] * N + row[None, :], tl.trans(found), mask=(col[:, None] < N) & (row[None, :] < M))

def kernel_product(a: torch.Tensor, b: torch.Tensor, alpha: float, beta: float, symmetric: bool = False) -> torch.Tensor:
    "Twin of `plain_product`: a is [n, M, M], b [n, M, N] in the dtype of a; sums in fp32, result [n, M, N] in the dtype of a. GolfError where no kernel can run."
    check_runnable(a)
    n, M, N = b.shape
    high, wide = triton.cdiv(M, 128), triton.cdiv(N, 128)
    side = 128 if n * (high * (high + 1) // 2 if symmetric else high * wide) >= 132 else 64  # the multiprocessors of an H100
    out = b.new_empty(n, M, N)
    with torch.cuda.device_of(a):  # Triton launches on the current device
        jitted(ns_product_kernel)[(triton.cdiv(M, side) * triton.cdiv(N, side), n)](
            a, b, out, M, N, *a.stride(), *b.stride(), alpha, beta, SYMMETRIC=symmetric, SIDE=side, BK=64, num_warps=4, num_stages=3 if side == 128 else 4)
    return out

def newton_schulz(G: torch.Tensor,                   # float [..., r, c]; zero matrices (padding slots) stay zero
                  coeffs=NS5_COEFFS,                 # (a, b, c) per iteration
                  scale: float = 1.0,                # 1.0 for NS5, 1.02 for Polar Express
                  eps: float = 1e-7,                 # 1e-7 for NS5, 1e-6 for Polar Express
                  dtype: torch.dtype | None = None,  # of the products and the result; None: G's own
                  ) -> torch.Tensor:                 # [..., r, c] in `dtype`
    "Orthogonalise each of a batch of matrices; three batched products per iteration. Sources: Muon, PR #399, arXiv 2505.16932."
    X = G.to(dtype or G.dtype).reshape(prod(G.shape[:-2]), *G.shape[-2:])
    tall = X.shape[-2] > X.shape[-1]
    if tall:
        X = X.mT
    own = use_kernels(X, "ns") and min(X.shape[1:]) >= 64 and not (X.requires_grad and torch.is_grad_enabled())  # a kernel has no derivative
    norm, add = X.norm(dim=(-2, -1), keepdim=True) * scale + eps, kernel_product if own else plain_product
    X = torch.div(X, norm, out=X.new_empty(X.shape)) if own else X / norm  # a kernel likes rows that lie together
    for a, b, c in coeffs:
        A = torch.bmm(X, X.mT)
        A = add(A, A, c, b, symmetric=True)
        X = add(A, X, 1.0, a)
    return (X.mT if tall else X).reshape(G.shape)

def newton_schulz_settings(method: str,     # "ns5" or "polar"
                           steps: int = 5,  # iterations; beyond five the last triple repeats
                           ) -> dict:       # coeffs, scale and eps for `newton_schulz`
    "What a method's name stands for. GolfError for an unknown name or no iteration."
    table = {"ns5": (NS5_COEFFS, 1.0, 1e-7), "polar": (POLAR_EXPRESS_COEFFS, 1.02, 1e-6)}
    if method not in table or steps < 1:
        raise GolfError(f"Newton-Schulz needs method ns5 or polar and at least 1 step: found {method!r} and {steps}")
    coeffs, scale, eps = table[method]
    return dict(coeffs=(coeffs + coeffs[-1:] * (steps - 5))[:steps], scale=scale, eps=eps)

def orthogonalize(G: torch.Tensor,                   # [..., r, c], any float dtype
                  method: str = "ns5",               # "ns5" or "polar"
                  steps: int = 5,
                  dtype: torch.dtype | None = None,  # None: bf16 for bf16 input or on CUDA, else G's own
                  ) -> torch.Tensor:                 # [..., r, c] in `dtype`
    "Every matrix of G made nearly orthogonal. GolfError for input that is no matrix of floats."
    if G.ndim < 2 or not G.is_floating_point():
        raise GolfError(f"orthogonalize needs a float tensor of at least two dimensions: found {G.dtype} of shape {tuple(G.shape)}")
    if dtype is None:
        dtype = torch.bfloat16 if G.is_cuda else G.dtype
    return newton_schulz(G, dtype=dtype, **newton_schulz_settings(method, steps))

# ---- grid ----

CLIP_QUANTILES = (0.999, 0.9995, 0.9999, 0.99999, 1.0)  # GPTQ-lite's candidates; 1.0 is the row maximum

INT8_QUANTILE = 0.9999984                               # the one clip of int8 rows

FP16_TINY = 2.0 ** -24  # smallest positive fp16

FP16_HUGE = 65504.0     # largest fp16

def row_clip(w: torch.Tensor,   # [..., rows, cols], any float dtype
             quantile: float,   # 0..1, linear interpolation between neighbours; 1.0 is the maximum
             ) -> torch.Tensor:  # [..., rows] in w's dtype (fp32 for narrower ones)
    "The row-wise quantile of |w|."
    magnitude = w.abs() if w.dtype == torch.float64 else w.abs().float()
    if quantile >= 1.0:
        return magnitude.amax(-1)
    rows = magnitude.reshape(-1, w.shape[-1])
    parts = rows.split(max(1, 2 ** 23 // w.shape[-1]))
    return torch.cat([torch.quantile(p, quantile, dim=1) for p in parts]).reshape(w.shape[:-1])

def row_scale(clip: torch.Tensor,    # fp32 (or fp64) [..., rows] largest magnitude the grid reaches
              qmax: int,             # 31 for int6, 127 for int8
              floor: bool = False,   # the published floor: no scale under 1/qmax, so no clip under 1.0
              ) -> torch.Tensor:     # shape and dtype of clip, values rounded to fp16
    "The distance of two grid points, rounded to the fp16 number that the artifact stores; never zero or infinite."
    scale = (clip / qmax).clamp(1.0 / qmax if floor else FP16_TINY, FP16_HUGE)
    return scale.to(torch.float16).to(clip.dtype)

def quantize_rows(w: torch.Tensor,      # float [..., rows, cols]
                  scale: torch.Tensor,  # float [..., rows]
                  qmax: int,            # 31 or 127
                  ) -> torch.Tensor:    # int8 [..., rows, cols] in [-qmax, qmax]
    "The nearest grid point of every weight (ties to even), clipped to the grid."
    return (w / scale[..., None]).round().clamp(-qmax, qmax).to(torch.int8)

def dequantize_rows(q: torch.Tensor,      # int8 [..., rows, cols]
                    scale: torch.Tensor,  # float [..., rows]
                    ) -> torch.Tensor:    # [..., rows, cols] in scale's dtype
    "The weights that the integers stand for."
    return q.to(scale.dtype) * scale[..., None]

def finite_matrix(w: torch.Tensor) -> torch.Tensor:
    "`w`, a matrix or a batch [..., rows, cols], in fp32 (fp64 stays). GolfError if it is no matrix, empty, or holds a NaN or inf."
    if w.ndim < 2 or not w.numel():
        raise GolfError(f"quantization needs a matrix with rows and columns: found shape {tuple(w.shape)}; store other tensors as fp16")
    if not torch.isfinite(w).all():
        raise GolfError(f"quantization needs finite weights: found {int((~torch.isfinite(w)).sum())} NaN or inf in a tensor of shape {tuple(w.shape)}; check the checkpoint")
    return w if w.dtype == torch.float64 else w.float()

def best_clip(w: torch.Tensor,      # float [..., rows, cols], finite
              qmax: int = 31,       # 31 for int6
              floor: bool = False,  # the published scale floor
              ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    "GPTQ-lite: (q int8 [..., rows, cols], scale [..., rows] fp32 (or fp64), int64 index into CLIP_QUANTILES [...] per matrix). GolfError for NaN or inf. Source: PR #399."
    wide = finite_matrix(w)
    best = None
    for index, quantile in enumerate(CLIP_QUANTILES):
        scale = row_scale(row_clip(wide, quantile), qmax, floor)
        q = quantize_rows(wide, scale, qmax)
        error = (wide - dequantize_rows(q, scale)).square().mean((-2, -1))
        if best is None:
            best = [q, scale, torch.zeros_like(error, dtype=torch.int64), error]
            continue
        better = error < best[3]
        best = [torch.where(better[..., None, None], q, best[0]), torch.where(better[..., None], scale, best[1]),
                torch.where(better, index, best[2]), torch.where(better, error, best[3])]
    return best[0], best[1], best[2]

def quantize_int8(w: torch.Tensor,      # float [rows, cols], finite
                  floor: bool = False,  # no scale under 1/127
                  ) -> tuple[torch.Tensor, torch.Tensor]:
    "int8 rows as published: (q int8, scale [rows] rounded to fp16); one high clip quantile, integers from the unrounded scale. GolfError for NaN or inf."
    wide = finite_matrix(w)
    clip = row_clip(wide, INT8_QUANTILE)
    scale = (clip / 127).clamp(1.0 / 127 if floor else FP16_TINY, FP16_HUGE)
    bounded = wide.clamp(-clip[..., None], clip[..., None])
    return quantize_rows(bounded, scale, 127), row_scale(clip, 127, floor)

def clip_ratio(w: torch.Tensor,      # float [..., rows, cols], logical orientation
               qmax: int = 31,       # 31 for int6
               floor: bool = False,  # the published scale floor
               ) -> torch.Tensor:    # [..., rows] in (0, 1], fp32 (or fp64)
    "Each row's best clip as a fraction of its largest magnitude: what stays frozen while the weights move on."
    index = best_clip(w, qmax, floor)[2]
    clips = torch.stack([row_clip(w, quantile) for quantile in CLIP_QUANTILES])
    chosen = clips.gather(0, index[None, ..., None].expand(1, *clips.shape[1:]))[0]
    top = clips[-1]
    return torch.where(top > 0, chosen / top.clamp_min(torch.finfo(top.dtype).tiny), torch.ones_like(top))

def round_to_grid(w: torch.Tensor,      # float [..., r, c] as stored
                  ratio: torch.Tensor,  # one clip ratio per logical row: [..., r], or [..., c] if row_dim is -1; fp32 (or fp64)
                  qmax: int = 31,       # 31 for int6
                  floor: bool = False,  # the published scale floor
                  row_dim: int = -2,    # axis that counts logical rows: -2, or -1 for a matrix stored transposed
                  ) -> torch.Tensor:    # shape and dtype of w
    "The weights rounded to the grid whose clip is `ratio` times the row's present maximum."
    rows = w.mT if row_dim == -1 else w
    scale = row_scale(row_clip(rows, 1.0) * ratio, qmax, floor)
    rounded = dequantize_rows(quantize_rows(rows, scale, qmax), scale).to(w.dtype)
    return rounded.mT if row_dim == -1 else rounded

# ---- plan ----

@dataclass(frozen=True)
class Plan:
    "The communication schedule as data: two orders of the same bank names."
    scatter: tuple[str, ...]  # order in which reduce-scatters are started
    work: tuple[str, ...]     # order in which banks are updated and gathered

def check_plan(plan: Plan,      # to be carried out
               layout: Layout,  # over the banks of this layout
               ):
    "GolfError unless both orders name every bank of the layout exactly once (a bank left out would never be updated)."
    banks = sorted(b.name for b in layout.banks)
    for what, order in (("scatter", plan.scatter), ("work", plan.work)):
        if sorted(order) != banks:
            raise GolfError(f"a plan's {what} order must name each of {', '.join(banks)} exactly once: found {', '.join(order) or 'nothing'}; make it with make_plan(layout)")

def make_plan(layout: Layout,              # banks to order
              order: str = "big_first",    # "big_first" or "small_first"
              ) -> Plan:
    "The published orders: scatter and work alike by unpadded size. GolfError for another word."
    if order not in ("big_first", "small_first"):
        raise GolfError(f"a plan's order must be big_first or small_first: found {order!r}")
    size = {b.name: sum(m.rows * m.cols for m in b.matrices) for b in layout.banks}
    names = tuple(sorted(size, key=lambda n: size[n] if order == "small_first" else -size[n]))
    return Plan(names, names)

def plan_orders(text: str,      # cfg.plan
                layout: Layout, # made from it
                ) -> Plan:
    "The orders that a plan asks for; pr132 is smallest first, everything else biggest first unless it says otherwise. GolfError for orders that do not fit."
    said = text.split("/")[1:]
    if len(said) < 2:
        return make_plan(layout, said[0] if said else "small_first" if text == "pr132" else "big_first")
    try:
        orders = [tuple(layout.banks[int(i)].name for i in part.split(".")) for part in said]
        plan = Plan(*orders)
    except (ValueError, IndexError, TypeError):
        raise GolfError(f"a plan's orders are two lists of bucket numbers below {len(layout.banks)}, such as /0.1.2/1.0.2: found {text!r}; correct PLAN") from None
    check_plan(plan, layout)
    return plan

# ---- averaging ----

def wide_copy(tensors: list[Tensor],  # weights of any shapes and dtypes
              ) -> list[Tensor]:  # their shapes, fp32 (or fp64)
    "Copies in at least fp32: in bf16 an average would swallow its own small steps."
    return [t.detach().to(torch.promote_types(t.dtype, torch.float32), copy=True) for t in tensors]

class Ema:
    "Exponential moving average, E = decay*E + (1-decay)*W after every step; starts as a copy, without bias correction (as in parameter-golf PR #549)."

    def __init__(self,
                 tensors: list[Tensor],   # initial weights, any shapes and float dtypes (copied)
                 decay: float = 0.997):   # share of the old average kept at each step
        "Raises GolfError for a decay outside [0, 1)."
        if not 0 <= decay < 1:
            raise GolfError(f"EMA_DECAY must lie in [0, 1), found {decay}: 0 keeps only the last weights")
        self.tensors, self.decay = wide_copy(tensors), decay

    @torch.no_grad()
    def update(self,
               tensors: list[Tensor]):  # weights after this step: same order and shapes as at the start, any float dtype
        "Take one step's weights in; no host synchronisation."
        now = [t.detach().to(e.dtype) for t, e in zip(tensors, self.tensors, strict=True)]
        torch._foreach_lerp_(self.tensors, now, 1 - self.decay)

class Swa:
    "Running mean of the snapshots whose weight is not 0 (Izmailov et al., 2018; tight: only late in the warmdown)."

    def __init__(self,
                 tensors: list[Tensor]):  # only shapes, dtypes and devices are used
        self.tensors = [torch.zeros_like(t) for t in wide_copy(tensors)]
        self.count = torch.zeros((), dtype=self.tensors[0].dtype, device=self.tensors[0].device)

    @torch.no_grad()
    def add(self,
            tensors: list[Tensor],  # finite weights, same order and shapes as at the start, any float dtype
            weight: Tensor):        # 0-dim, any dtype, on the tensors' device: 1 takes the snapshot, 0 leaves everything as it is
        "Take a snapshot with a weight; no host synchronisation."
        weight = weight.to(self.count)
        self.count += weight
        share = torch.where(self.count > 0, weight / self.count, 0.0)
        change = torch._foreach_sub([t.detach().to(m.dtype) for t, m in zip(tensors, self.tensors, strict=True)], self.tensors)
        torch._foreach_mul_(change, share)
        torch._foreach_add_(self.tensors, change)

    def mean(self) -> list[Tensor]:
        "The average of the snapshots, of their shapes, fp32 (or fp64); GolfError when none was taken. Waits for the device once."
        if self.count.item() == 0:
            raise GolfError("SWA has no snapshot to average: none fell into the end of the warmdown; lower SWA_EVERY, raise WARMDOWN_ITERS or use AVERAGING=ema")
        return self.tensors

def average_of(mode: str,                # "ema", "swa", "ema+swa" or "none"
               ema: Ema | None,          # needed by the modes that name it
               swa: Swa | None,
               current: list[Tensor],    # weights now, for "none"
               ) -> list[Tensor]:        # fp32 (or fp64) copies, in the order of `current`
    "The weights a run exports. GolfError for an unknown mode or one whose average was not kept. `current` are tensors of the shapes averaged."
    kept = {"ema": ema, "swa": swa}
    parts = [] if mode == "none" else mode.split("+")
    if mode not in ("ema", "swa", "ema+swa", "none") or any(kept[p] is None for p in parts):
        have = ", ".join([k for k, v in kept.items() if v is not None] + ["none"])
        raise GolfError(f"AVERAGING must be one of ema, swa, ema+swa, none, and be kept from the start: found {mode!r} while this run keeps {have}")
    lists = [ema.tensors if p == "ema" else swa.mean() for p in parts] or [current]
    if len(lists) == 1:
        return wide_copy(lists[0])
    return [torch.lerp(a, b, 0.5) for a, b in zip(*lists)]

# ---- parallel_muon ----

class Ranks:
    "This process among its equals: who am I, how many are we, and the few collectives everybody uses."

    def __init__(self,
                 rank: int = 0, # my number, 0 to world - 1
                 world: int = 1, # how many processes train together
                 device: str = "cpu", # the torch device of this rank
                 patient=None): # process group for what may take minutes
        self.rank, self.world, self.device, self.patient = rank, world, torch.device(device), patient
        self.master = rank == 0

    def sum(self, t: torch.Tensor) -> torch.Tensor:
        "Add `t` up over all ranks, in place; returns it. Any shape and dtype."
        if self.world > 1:
            dist.all_reduce(t)
        return t

    def sum_late(self, t: torch.Tensor) -> torch.Tensor:
        "`sum` where ranks may have `t` ready minutes apart: waits for the last one. Any shape and dtype."
        t.ravel()[:1].tolist()  # a GPU's queue may hold minutes of work
        self.barrier()
        return self.sum(t)

    def barrier(self):
        "Return when every rank has come here; waits patiently, since one of them may be packing weights."
        if self.world > 1:
            dist.barrier(group=self.patient)

    def broadcast_object(self, x):
        "Rank 0's `x` on every rank; `x` must be plain data (it is sent as Python objects between our own processes)."
        box = [x]
        if self.world > 1:
            dist.broadcast_object_list(box, src=0, group=self.patient)
        return box[0]

def start_ranks(env: dict | None = None, # environment; default os.environ
                timeout_s: float = 60.0) -> Ranks: # seconds a collective may wait for a dead rank
    "Join the process group `torchrun` describes (NCCL with GPUs, gloo without); alone when it describes none. GolfError when a GPU is missing."
    env = os.environ if env is None else env
    world, rank, local = (int(env.get(k, d)) for k, d in (("WORLD_SIZE", 1), ("RANK", 0), ("LOCAL_RANK", 0)))
    cuda = torch.cuda.is_available()
    if cuda and local >= torch.cuda.device_count():
        raise GolfError(f"rank {rank} needs GPU {local}, but this machine shows {torch.cuda.device_count()}: lower --nproc_per_node")
    device = f"cuda:{local}" if cuda else "cpu"
    if cuda:
        torch.cuda.set_device(local)
    if world > 1:
        dist.init_process_group("nccl" if cuda else "gloo", rank=rank, world_size=world, timeout=timedelta(seconds=timeout_s),
                                device_id=torch.device(device) if cuda else None)
    return Ranks(rank, world, device, dist.new_group(backend="gloo", timeout=timedelta(minutes=30)) if world > 1 else None)

def stop_ranks(ranks: Ranks):
    "Leave the process group."
    if ranks.world > 1 and dist.is_initialized():
        dist.destroy_process_group()

def scatter_mean(full: torch.Tensor, # [n, r, c] gradient of a whole bank, n divisible by world, any float dtype
                 mine: torch.Tensor, # [n/world, r, c] receives my part, same dtype
                 ranks: Ranks):
    "Start averaging `full` over the ranks into `mine`; returns a handle or None."
    if ranks.world == 1:
        mine.copy_(full)
        return None
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    average = dist.ReduceOp.AVG if ranks.device.type == "cuda" else dist.ReduceOp.SUM
    return scatter(mine, full, op=average, async_op=True)

def wait_mean(mine: torch.Tensor, handle, ranks: Ranks) -> None:
    "Finish what `scatter_mean` began: `mine` then holds the mean. Returns None, the handle that is left."
    if handle is not None:
        handle.wait()
        if ranks.device.type != "cuda":
            mine.div_(ranks.world)

def gather_into(full: torch.Tensor, # [n, r, c] receives every rank's part
                mine: torch.Tensor, # [n/world, r, c] same dtype, not a view of `full`
                ranks: Ranks):
    "Start an all-gather of `mine` into `full`; returns a handle or None."
    if ranks.world == 1:
        full.copy_(mine)
        return None
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return gather(full, mine, async_op=True)

def nesterov_step(momentum: torch.Tensor, # [n, r, c] in the gradient's dtype, changed in place
                  grad: torch.Tensor, # [n, r, c]
                  mu: torch.Tensor, # 0-dim fp32 (or fp64): momentum
                  ok: torch.Tensor, # 0-dim or [n, 1, 1] bool: False leaves the momentum alone
                  ) -> torch.Tensor: # [n, r, c] in the gradient's dtype
    "momentum = mu * momentum + grad, and the look-ahead grad + mu * momentum; mu*m, +g and the look-ahead each round to the dtype once."
    moved = (momentum * mu.view(1, 1, 1)).to(momentum.dtype).add_(grad)
    torch.where(ok, moved, momentum, out=momentum)
    return torch.addcmul(grad.to(mu.dtype), moved.to(mu.dtype), mu).to(grad.dtype)

def master_step(master: torch.Tensor, # [n, r, c] fp32 (or fp64), changed in place
                update: torch.Tensor, # [n, r, c] in any float dtype
                lr: torch.Tensor, # 0-dim or [n, 1, 1]: learning rate
                wd: torch.Tensor, # 0-dim or [n, 1, 1]: weight decay
                scale: torch.Tensor, # [n, 1, 1] or [n, r, 1]: factor of the learning rate
                ok: torch.Tensor, # 0-dim or [n, 1, 1] bool: False leaves the master alone
                out: torch.Tensor, # [n, r, c] receives the new master, rounded to its dtype
                ):
    "master = master * (1 - lr * wd) - lr * scale * update, and its rounded copy."
    stepped = torch.addcmul(master * (1 - lr * wd), update.to(master.dtype), lr * scale, value=-1)
    torch.where(ok, stepped, master, out=master)
    out.copy_(master)

def nesterov_kernel(momentum, grad, out, mu, ok,  # as in nesterov_step
                    size, ok_slot,                # entries of a slot; stride
                    BLOCK: tl.constexpr):         # programs over (blocks of a slot, slots)
    n, at = tl.program_id(1).to(tl.int64), tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live, here, knob = at < size, n * size + at, tl.load(mu).to(tl.float32)
    g = tl.load(grad + here, mask=live, other=0.0).to(tl.float32)
    moved = (tl.load(momentum + here, mask=live, other=0.0).to(tl.float32) * knob).to(momentum.dtype.element_ty).to(tl.float32)
    moved = (moved + g).to(momentum.dtype.element_ty)
    tl.store(out + here, (g + moved.to(tl.float32) * knob).to(out.dtype.element_ty), mask=live)
    tl.store(momentum + here, moved, mask=live & tl.load(ok + n * ok_slot))

def nesterov_kernels(momentum: torch.Tensor, grad: torch.Tensor, mu: torch.Tensor, ok: torch.Tensor) -> torch.Tensor:
    "Twin of `nesterov_step` in one launch: arguments as there, `momentum` contiguous; [n, r, c], dtype of grad. GolfError where no kernel can run."
    check_runnable(momentum)
    (n, r, c), grad = momentum.shape, grad.contiguous()
    out, ok = torch.empty_like(grad), ok.expand(n, 1, 1)
    with torch.cuda.device_of(momentum):  # Triton launches on the current device
        jitted(nesterov_kernel)[(triton.cdiv(r * c, 2048), n)](momentum, grad, out, mu, ok, r * c, ok.stride(0), BLOCK=2048, num_warps=8)
    return out

def master_kernel(master, update, out, lr, wd, scale, ok,  # as in master_step
                  R, C,                                  # rows and columns
                  u_slot, u_row, u_col, lr_slot, wd_slot, s_slot, s_row, ok_slot,  # strides
                  SIDE: tl.constexpr):                   # programs over (blocks of columns, blocks of rows, slots)
    n, row, col = tl.program_id(2).to(tl.int64), tl.program_id(1) * SIDE + tl.arange(0, SIDE), tl.program_id(0) * SIDE + tl.arange(0, SIDE)
    live, rate = (row[:, None] < R) & (col[None, :] < C), tl.load(lr + n * lr_slot)
    here = n * R * C + row[:, None] * C + col[None, :]
    old = tl.load(master + here, mask=live, other=0.0)
    step = tl.load(update + n * u_slot + row[:, None] * u_row + col[None, :] * u_col, mask=live, other=0.0).to(tl.float32)
    factor = tl.load(scale + n * s_slot + row * s_row, mask=row < R, other=0.0) * rate
    new = tl.where(tl.load(ok + n * ok_slot), old * (1 - rate * tl.load(wd + n * wd_slot)) - factor[:, None] * step, old)
    tl.store(master + here, new, mask=live)
    tl.store(out + here, new.to(out.dtype.element_ty), mask=live)

def master_kernels(master: torch.Tensor, update: torch.Tensor, lr: torch.Tensor, wd: torch.Tensor, scale: torch.Tensor, ok: torch.Tensor, out: torch.Tensor):
    "Twin of `master_step` in one launch: arguments as there, `master` and `out` contiguous. GolfError where no kernel can run."
    check_runnable(out)
    n, r, c = master.shape
    (lr, wd, ok), scale = (knob.expand(n, 1, 1) for knob in (lr, wd, ok)), scale.expand(n, r, 1)
    with torch.cuda.device_of(out):
        jitted(master_kernel)[(triton.cdiv(c, 64), triton.cdiv(r, 64), n)](
            master, update, out, lr, wd, scale, ok, r, c, *update.stride(), lr.stride(0), wd.stride(0), *scale.stride()[:2], ok.stride(0), SIDE=64, num_warps=4)

def muon_update(master: torch.Tensor, # [n, r, c] fp32 (or fp64) weights of my slots
                momentum: torch.Tensor, # [n, r, c] in the gradient's dtype
                grad: torch.Tensor, # [n, r, c] mean gradient of my slots
                lr: torch.Tensor, # 0-dim or [n, 1, 1]: learning rate
                mu: torch.Tensor, # 0-dim: momentum
                wd: torch.Tensor, # 0-dim or [n, 1, 1]: weight decay
                scale: torch.Tensor, # fp32 (or fp64) [n, 1, 1], or [n, r, 1] where slots are shared: sqrt(max(1, rows/cols)) of the logical matrix
                ok: torch.Tensor, # 0-dim or [n, 1, 1] bool: False skips the step
                out: torch.Tensor, # [n, r, c] receives the new master, rounded to its dtype
                method: str = "ns5", steps: int = 5,
                dtype: torch.dtype | None = None, # of the products; None: the gradient's
                cuts: list | None = None): # where slots hold several matrices: the shard's cuts (chapter 04)
    "One step of Muon (Jordan et al., 2024) on a shard, in place; each of mu*m, +g, g+mu*m rounds to the momentum's dtype."
    own = use_kernels(momentum, "ns") and use_kernels(out) and momentum.is_contiguous() and master.is_contiguous() and out.is_contiguous()
    before, after = (nesterov_kernels, master_kernels) if own else (nesterov_step, master_step)
    nesterov = before(momentum, grad, mu, ok)
    if cuts is None:
        update = orthogonalize(nesterov, method=method, steps=steps, dtype=dtype or grad.dtype)
    else:
        update = torch.zeros_like(nesterov)
        for cut in cuts:
            write_cut(update, cut, orthogonalize(read_cut(nesterov, cut), method=method, steps=steps, dtype=dtype or grad.dtype))
    after(master, update, lr, wd, scale, ok, out)

def sgd_update(master, momentum, grad, lr, mu, ok):
    "One heavy-ball SGD step in place (no Nesterov, no decay): the rule of test-time training. Shapes as `muon_update`, or flat."
    moved = momentum * mu + grad.to(momentum.dtype)
    torch.where(ok, moved, momentum, out=momentum)
    torch.where(ok, master - lr * moved, master, out=master)

class ShardedBank:
    "One bank: the replica every rank holds, and the masters, momentum and gradient of my slots."

    def __init__(self, spec: BankSpec, replica: torch.nn.Parameter, ranks: Ranks, momentum_dtype: torch.dtype | None = None):
        "Over a parameter `replica` [slots, rows, cols]; `momentum_dtype` None is the replica's."
        self.spec, self.replica, self.ranks = spec, replica, ranks
        self.slots = spec.shard(ranks.rank)
        mine = replica.detach()[self.slots.start:self.slots.stop]
        full = torch.promote_types(replica.dtype, torch.float32)
        self.master = mine.to(full, copy=True)
        self.momentum = torch.zeros_like(mine, dtype=momentum_dtype or replica.dtype)
        scales = torch.tensor(spec.row_scales()[self.slots.start:self.slots.stop], dtype=full)
        self.lr_scale = scales.unsqueeze(-1).to(replica.device)
        self.cuts = shard_cuts(spec, ranks.rank) if any(m.parts for m in spec.matrices) else None
        self.grad, self.outgoing = torch.zeros_like(mine), torch.zeros_like(mine) # fixed places for what arrives and what leaves
        self.sum = self.handle = None

    def accumulate(self):
        "Add the replica's gradient to an fp32 sum and drop it: only used with gradient accumulation."
        g = self.take()
        self.sum = g.to(self.master.dtype, copy=True) if self.sum is None else self.sum.add_(g)

    def take(self) -> torch.Tensor:
        "The gradient backward left, [slots, rows, cols] in the replica's dtype, which leaves `.grad` None; zeros when there is none."
        g, self.replica.grad = self.replica.grad, None
        return torch.zeros_like(self.replica.data) if g is None else g

    def whole(self) -> torch.Tensor:
        "This rank's whole gradient of the step, in fp32 when it was accumulated: [n, r, c]."
        g, self.sum = (self.take(), None) if self.sum is None else (self.sum, None)
        return g

    def reduce(self, g: torch.Tensor):
        "Start the reduce-scatter of a whole gradient, [n, r, c], in the replica's dtype. `g` is the whole bank's gradient, [slots, rows, cols]."
        self.handle = scatter_mean(g.to(self.replica.dtype), self.grad, self.ranks)

    def arrive(self) -> torch.Tensor:
        "Wait for the mean gradient of my slots, [slots of this rank, rows, cols] in the replica's dtype."
        self.handle = wait_mean(self.grad, self.handle, self.ranks)
        return self.grad

    def publish(self, source: torch.Tensor | None = None):
        "Start sending `source` (default: the masters), rounded to the replica's dtype, to every rank's replica. `source` is [slots of this rank, rows, cols]."
        self.outgoing.copy_(self.master if source is None else source)
        return self.send()

    def send(self):
        "Start the all-gather of what stands in `outgoing`; returns a handle or None."
        return gather_into(self.replica.data, self.outgoing, self.ranks)

class Replicated:
    "The replicated parameters of one dtype, laid flat: one tensor of weights, one all-reduce of gradients, segments that share a learning rate."

    def __init__(self, params: dict, # name -> Parameter, all of one dtype and device
                 lr: dict, # name -> base learning rate
                 wd: dict, # name -> weight decay
                 masters: bool = False, # keep fp32 weights beside a bf16 replica
                 state_dtype: torch.dtype | None = None, # of the moments; None: the parameters' own
                 tail: int = 0): # words that ride at the end of the gradients; such a wire is fp32 at least
        self.names = sorted(params, key=lambda k: (lr[k], wd[k], k))
        self.params = params
        self.gaps = {k: params[k].new_zeros(-params[k].numel() % 8) for k in self.names} # each starts on 16 bytes, for vector loads
        self.flat = torch.cat(self.spaced([params[k].detach() for k in self.names]))
        self.offsets, self.segments, at = {}, [], 0
        for k in self.names:
            n, end = params[k].numel(), at + params[k].numel() + self.gaps[k].numel()
            params[k].data = self.flat[at:at + n].view(params[k].shape)
            self.offsets[k] = (at, at + n)
            if self.segments and self.segments[-1][2:] == (lr[k], wd[k]):
                self.segments[-1] = (self.segments[-1][0], end, lr[k], wd[k])
            else:
                self.segments.append((at, end, lr[k], wd[k]))
            at = end
        self.first, self.second = (torch.zeros_like(self.flat, dtype=state_dtype) for _ in range(2))
        full = torch.promote_types(self.flat.dtype, torch.float32)
        self.master = self.flat.to(full) if masters else self.flat
        if masters:
            self.first = torch.zeros_like(self.master)
        self.wire = torch.zeros(at + tail, dtype=full if tail else self.flat.dtype, device=self.flat.device)
        self.grad, self.tail = self.wire[:at], self.wire[at:]

    def collect(self):
        "Lay this rank's gradients into `grad`; `.grad`s become None, missing ones count as zeros."
        parts = [torch.zeros_like(self.params[k]) if self.params[k].grad is None else self.params[k].grad for k in self.names]
        for k in self.names:
            self.params[k].grad = None
        torch.cat(self.spaced(parts), out=self.grad)

    def spaced(self, tensors: list) -> list:
        "The tensors, flat, in the order of `names`, with the zeros that keep the next one aligned."
        return [t for k, p in zip(self.names, tensors) for t in (p.reshape(-1), self.gaps[k])]

    def view(self, flat: torch.Tensor) -> dict:
        "Name -> view of `flat`, [n] of any dtype, in that parameter's shape."
        return {k: flat[a:b].view(self.params[k].shape) for k, (a, b) in self.offsets.items()}

def adamw_update(group: Replicated, lr_mul: torch.Tensor, factor: torch.Tensor, ok: torch.Tensor, count: torch.Tensor,
                 beta1: float = 0.9, beta2: float = 0.95, eps: float = 1e-8):
    "One AdamW step (decoupled decay before the update) on every segment; `factor` scales the gradient, `count` counts this step (Loshchilov and Hutter). `lr_mul`, `factor`, `ok` and `count` are 0-dim: `ok` bool, the others fp32 (or fp64)."
    full = torch.promote_types(group.flat.dtype, torch.float32)
    fix1, fix2 = 1 - beta1 ** count, 1 - beta2 ** count
    for a, b, base_lr, wd in group.segments:
        lr = lr_mul * base_lr
        p, g = group.flat[a:b].to(full), group.grad[a:b].to(full) * factor
        m = torch.lerp(group.first[a:b].to(full), g, 1 - beta1)
        v = torch.lerp(group.second[a:b].to(full), g * g, 1 - beta2)
        step = m / fix1 / ((v / fix2).sqrt() + eps)
        group.flat[a:b] = torch.where(ok, p * (1 - lr * wd) - lr * step, p).to(group.flat.dtype)
        group.first[a:b] = torch.where(ok, m, group.first[a:b].to(full)).to(group.first.dtype)
        group.second[a:b] = torch.where(ok, v, group.second[a:b].to(full)).to(group.first.dtype)

CONTROL_WORDS = ("elapsed_ms", "stop", "loss", "norm_sq")

def say_control(words: torch.Tensor, ranks: Ranks, elapsed_ms: float, stop: bool, loss: torch.Tensor | None):
    "Fill this rank's first three words; `norm_sq` follows when it is known. Nothing is read back to the host. `words` is [len(CONTROL_WORDS)], fp32 (or fp64)."
    said = torch.tensor([elapsed_ms, float(stop)] if ranks.master else [0.0, 0.0], dtype=words.dtype)
    words[:2].copy_(said.pin_memory() if words.is_cuda else said, non_blocking=True)
    words[2].fill_(0.0) if loss is None else words[2].copy_(loss.detach())

def clip_factor(norm_sq: torch.Tensor, max_norm: float) -> torch.Tensor:
    "0-dim factor, dtype of `norm_sq`: min(1, max_norm / (norm + 1e-6)); 1 when max_norm is 0 (no clipping)."
    if max_norm <= 0:
        return torch.ones_like(norm_sq)
    return (max_norm / (norm_sq.sqrt() + 1e-6)).clamp(max=1.0)

def squared_norm(tensors: list, dtype: torch.dtype) -> torch.Tensor:
    "Sum of squares of all entries of all tensors, 0-dim in `dtype`."
    return torch.stack(torch._foreach_norm(tensors, 2, dtype=dtype)).square().sum()

def record_graph(fn, graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream | None = None):
    "Record into `graph` what `fn()` launches on `stream` (None: one of torch's own), without running it; returns what fn returns."
    collecting = gc.isenabled()
    gc.disable()
    try:
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):  # other threads may go on using CUDA
            return fn()
    finally:
        if collecting:
            gc.enable()

class Recorded:
    "A function without arguments on fixed tensors; on CUDA it is captured after `eager` calls, on the stream that calls it, and replayed from then on."

    def __init__(self, fn, device: torch.device, eager: int = 2):
        "Wrap `fn`; the first `eager` calls on CUDA run as they are."
        self.fn, self.left, self.graph = fn, eager if device.type == "cuda" else -1, None

    def __call__(self):
        if self.graph is not None:
            self.graph.replay()
        elif self.left != 0:
            self.left -= 1
            self.fn()
        else:
            here, self.graph = torch.cuda.current_stream(), torch.cuda.CUDAGraph()
            own = None if here == torch.cuda.default_stream() else here  # the default stream cannot be recorded
            record_graph(self.fn, self.graph, own)
            self.graph.replay()

class Engine:
    "Parallel Muon (parameter-golf PR #399): Muon on sharded banks and AdamW on everything else (rule='muon'), or SGD on all (rule='sgd'); no DDP, no host sync."

    def __init__(self, roles: dict, # {"bank": {name: Parameter}, "table": {...}, "scalar": {...}}
                 layout: Layout, ranks: Ranks | None = None, # layout made for ranks.world
                 plan: Plan | None = None, # orders; default: biggest first
                 rule: str = "muon",
                 bank_lr: float = 0.025, bank_wd: float = 0.04, table_lr: float = 0.035, scalar_lr: float = 0.025, adam_wd: float = 0.04,
                 betas: tuple = (0.9, 0.95), eps: float = 1e-8, # AdamW
                 clip: str = "global", max_norm: float = 0.3, # 0 turns clipping off; clip "none": the caller writes norm_sq before launch (chapter 25)
                 method: str = "ns5", ns_steps: int = 5, debug: bool = False,
                 state_dtype: torch.dtype | None = None): # of momenta and moments; None: each as its parameter's (SGD: fp32)
        "Take over the parameters in `roles` under a `rule`. Raises GolfError when the layout is for another number of ranks."
        self.ranks, self.layout, self.rule, self.clip, self.max_norm = ranks or Ranks(), layout, rule, clip, max_norm
        if layout.world != self.ranks.world:
            raise GolfError(f"the layout was made for {layout.world} ranks, but {self.ranks.world} are running: make it with world={self.ranks.world}")
        self.plan = plan or make_plan(layout)
        check_plan(self.plan, layout)
        self.bank_lr, self.betas, self.eps, self.method, self.ns_steps, self.debug = bank_lr, betas, eps, method, ns_steps, debug
        momentum_dtype = torch.float32 if rule == "sgd" else state_dtype
        self.banks = {s.name: ShardedBank(s, roles["bank"][s.name], self.ranks, momentum_dtype if roles["bank"][s.name].dtype != torch.float64 else None) for s in layout.banks}
        self.groups = replicated_groups(roles, table_lr, scalar_lr, adam_wd, masters=rule == "sgd", state_dtype=state_dtype)
        some = next(iter(self.banks.values())).master
        self.full, self.device = some.dtype, some.device
        self.count, self.multiplier, self.momentum, self.factor, self.bank_wd = (torch.full((), v, dtype=self.full, device=self.device) for v in (0.0, 0.0, 0.0, 1.0, bank_wd))
        self.ok = torch.ones((), dtype=torch.bool, device=self.device)
        self.masks, self.streams = {}, {n: torch.cuda.Stream(self.device) for n in self.banks} if self.device.type == "cuda" else {}
        self.control = self.groups[0].tail if self.groups else torch.zeros(len(CONTROL_WORDS), dtype=self.full, device=self.device)
        self.staged, self.wires = {}, {}
        self.clip_step = Recorded(lambda: clip_local(self), self.device)
        self.small_step = Recorded(lambda: update_small(self), self.device)
        self.bank_steps = {n: Recorded(lambda n=n: update_bank(self, n), self.device) for n in self.banks}
        self.publish()

    def launch(self, loss=None, elapsed_ms: float = 0.0, stop: bool = False) -> torch.Tensor:
        "After backward: start the communication of this step; returns the summed control vector, [4] fp32 (or fp64), on the device."
        return engine_launch(self, loss, elapsed_ms, stop)

    def finish(self, multiplier=1.0, momentum: float = 0.99, project=None):
        "Update everything and publish; `multiplier` (float or 0-dim tensor) scales all learning rates; `project(name, master)` may round what is published."
        engine_finish(self, multiplier, momentum, project)

    def step(self, multiplier=1.0, momentum: float = 0.99):
        "`launch` and `finish` in one call: gradients in, new weights out."
        self.launch()
        self.finish(multiplier, momentum)

    def accumulate(self):
        "After each backward of an accumulated step: add the bank gradients up in fp32 and free them."
        apply_masks(self)
        for bank in self.banks.values():
            bank.accumulate()

    def publish(self, project=None):
        "Write every replica from the masters, through `project` if given; returns when done."
        handles = []
        for name in self.plan.work:
            master = self.banks[name].master
            handles.append(self.banks[name].publish(project(name, master) if project else master))
        for h in handles:
            if h is not None:
                h.wait()

def replicated_groups(roles: dict, table_lr: float, scalar_lr: float, wd: float, masters: bool, state_dtype: torch.dtype | None = None) -> list:
    "The tables and scalars of a model as flat groups, one per dtype, the widest dtype first (the control words ride with it)."
    lr = {**{k: table_lr for k in roles.get("table", {})}, **{k: scalar_lr for k in roles.get("scalar", {})}}
    params = {**roles.get("table", {}), **roles.get("scalar", {})}
    dtypes = sorted({p.dtype for p in params.values()}, key=lambda d: -d.itemsize)
    made = []
    for d in dtypes:
        some = {k: p for k, p in params.items() if p.dtype == d}
        made.append(Replicated(some, lr, {k: wd for k in some}, masters and d.itemsize < 4, state_dtype, tail=0 if made else len(CONTROL_WORDS)))
    return made

def apply_masks(self: Engine):
    "Multiply the gradients of masked parameters by their masks."
    for name, mask in self.masks.items():
        owner = self.banks[name].replica if name in self.banks else next(g.params[name] for g in self.groups if name in g.params)
        if owner.grad is not None:
            owner.grad.mul_(mask)

def engine_launch(self: Engine, loss, elapsed_ms: float, stop: bool) -> torch.Tensor:
    "First half of a step (see `Engine.launch`); returns the control vector, [4] fp32 (or fp64)."
    apply_masks(self)
    grads = {n: b.whole() for n, b in self.banks.items()}
    for g in self.groups:
        g.collect()
    say_control(self.control, self.ranks, elapsed_ms, stop, loss)
    if self.clip == "local":
        stage(self, grads)
        self.clip_step()
    for wire in [g.wire for g in self.groups] or [self.control]:
        self.ranks.sum(wire)
    for n in self.plan.scatter:
        self.banks[n].reduce(self.wires.get(n, grads.pop(n)))
    if self.debug:
        for b in self.banks.values():
            b.replica.data.fill_(float("nan"))
    return self.control

def stage(self: Engine, grads: dict):
    "Copy whole bank gradients to their fixed places: as they are, in `staged`; where they will leave from, in `wires`. `grads` maps a bank's name to its whole gradient, [slots, rows, cols]."
    dtypes = {n: g.dtype for n, g in grads.items()}
    if {n: t.dtype for n, t in self.staged.items()} != dtypes:
        self.staged = {n: torch.empty_like(g) for n, g in grads.items()}
        self.wires = {n: torch.empty_like(self.banks[n].replica.data) for n in grads}
        self.clip_step = Recorded(lambda: clip_local(self), self.device)
    torch._foreach_copy_(list(self.staged.values()), [grads[n] for n in self.staged])

def clip_local(self: Engine):
    "Measure this rank's gradient and scale it, banks into `wires`, the small ones in place."
    small = [g.grad for g in self.groups]
    norm_sq = squared_norm([*self.staged.values(), *small], self.full)
    self.control[CONTROL_WORDS.index("norm_sq")].copy_(norm_sq)
    factor = clip_factor(norm_sq, self.max_norm)
    for g, out in [*((g, self.wires[n]) for n, g in self.staged.items()), *zip(small, small)]:
        torch.mul(g, factor.view([1] * g.ndim), out=out)

def engine_finish(self: Engine, multiplier, mu: float, project):
    "Second half of a step (see `Engine.finish`)."
    for knob, value in ((self.multiplier, multiplier), (self.momentum, mu)):
        knob.copy_(value) if isinstance(value, torch.Tensor) else knob.fill_(value)
    if self.clip == "global":
        clip_global(self)
    self.ok.copy_(torch.isfinite(self.control[CONTROL_WORDS.index("norm_sq")]))
    ready = torch.cuda.current_stream().record_event() if self.streams else None
    handles = [finish_bank(self, n, project, ready) for n in self.plan.work]
    self.small_step()
    for h in handles:
        if h is not None:
            h.wait()
    for stream in self.streams.values():
        torch.cuda.current_stream().wait_stream(stream)

def clip_global(self: Engine):
    "Wait for all mean gradients, put their squared norm into the control vector and the clip factor of the step into `factor`."
    for n in self.plan.scatter:
        self.banks[n].arrive()
    norm_sq = self.ranks.sum(squared_norm([b.grad for b in self.banks.values()], self.full))
    if self.groups:
        norm_sq = norm_sq + squared_norm([g.grad for g in self.groups], self.full) / self.ranks.world ** 2
    self.control[CONTROL_WORDS.index("norm_sq")].copy_(norm_sq)
    self.factor.copy_(clip_factor(norm_sq, self.max_norm))

def finish_bank(self: Engine, name: str, project, ready):
    "On the bank's own stream: wait for its gradient, update its masters, start publishing; returns the handle. `ready` is the CUDA event after which the bank may be touched."
    bank, stream = self.banks[name], self.streams.get(name)
    with torch.cuda.stream(stream):  # does nothing where there is no stream
        if stream is not None:
            stream.wait_event(ready)
        bank.arrive()
        self.bank_steps[name]()
        return bank.send() if project is None else bank.publish(project(name, bank.master))

def update_small(self: Engine):
    "Count the step and update every replicated group, in place; its gradients are sums over the ranks, so the factor makes them means."
    self.count += self.ok
    factor = self.factor / self.ranks.world
    for g in self.groups:
        if self.rule == "muon":
            adamw_update(g, self.multiplier, factor, self.ok, self.count.clamp(min=1), *self.betas, self.eps)
        else:
            for a, b, lr, _ in g.segments:
                sgd_update(g.master[a:b], g.first[a:b], g.grad[a:b] * factor, self.multiplier * lr, self.momentum, self.ok)
            if g.master is not g.flat:
                g.flat.copy_(g.master)

def update_bank(self: Engine, name: str):
    "Update my slots of a bank from their mean gradient, and put the rounded weights into `outgoing`."
    bank, lr = self.banks[name], self.multiplier * self.bank_lr
    grad = bank.grad if self.clip == "local" else (bank.grad * self.factor.to(self.full).view(1, 1, 1)).to(bank.grad.dtype)
    if self.rule == "muon":
        muon_update(bank.master, bank.momentum, grad, lr, self.momentum, self.bank_wd, bank.lr_scale, self.ok, bank.outgoing, self.method, self.ns_steps, cuts=bank.cuts)
    else:
        sgd_update(bank.master, bank.momentum, grad, lr, self.momentum, self.ok)
        bank.outgoing.copy_(bank.master)

def engine_tensors(self: Engine) -> list:
    "What an average follows: my shard of every bank's masters (layout order), then the flat replicated groups."
    return [self.banks[s.name].master for s in self.layout.banks] + [g.master for g in self.groups]

def engine_gather(self: Engine, tensors: list | None = None) -> tuple[dict, dict]:
    "(banks, others): whole fp32 banks [n, r, c] by bank name and the replicated tensors by parameter name, from masters or from an average of `engine_tensors`."
    tensors = engine_tensors(self) if tensors is None else tensors
    banks, others = {}, {}
    for spec, mine in zip(self.layout.banks, tensors):
        banks[spec.name] = torch.empty(spec.shape, dtype=mine.dtype, device=mine.device)
        handle = gather_into(banks[spec.name], mine.contiguous(), self.ranks)
        if handle is not None:
            handle.wait()
    for g, flat in zip(self.groups, tensors[len(self.layout.banks):]):
        others.update({k: v.clone() for k, v in g.view(flat.to(g.master.dtype)).items()})
    return banks, others

@torch.no_grad()
def engine_load(self: Engine, banks: dict, others: dict):
    "Set masters from whole tensors (fp32, as `engine_gather` gives) and publish them; momenta are untouched."
    for spec in self.layout.banks:
        b = self.banks[spec.name]
        b.master.copy_(banks[spec.name][b.slots.start:b.slots.stop])
    for g in self.groups:
        for k, view in g.view(g.master).items():
            view.copy_(others[k])
        if g.master is not g.flat:
            g.flat.copy_(g.master)
    self.publish()

def engine_state(self: Engine) -> list:
    "Every tensor that a step changes on this rank (not the replicas, which follow from the masters)."
    state = [t for b in self.banks.values() for t in (b.master, b.momentum)]
    for g in self.groups:
        state += [g.flat, g.first, g.second] + ([g.master] if g.master is not g.flat else [])
    return state + [self.count]

def snapshot(self: Engine) -> list:
    "A copy of the engine's state."
    return [t.clone() for t in engine_state(self)]

def restore(self: Engine, saved: list):
    "Back to a snapshot, gradients dropped, replicas published. `saved` is what snapshot gave."
    for t, s in zip(engine_state(self), saved):
        t.copy_(s)
    for b in self.banks.values():
        b.take()
        b.sum = None
    for g in self.groups:
        g.collect()
    self.publish()

def make_engine(model: torch.nn.Module, # has role_params()
                layout: Layout, cfg: Config, ranks: Ranks, debug: bool = False) -> Engine:
    "The engine a recipe describes, on a model of golfnb."
    return Engine(model.role_params(), layout, ranks, plan=plan_orders(cfg.plan, layout), bank_lr=cfg.matrix_lr, bank_wd=cfg.muon_wd,
                        table_lr=cfg.tied_embed_lr, scalar_lr=cfg.scalar_lr, adam_wd=cfg.adam_wd, betas=(cfg.beta1, cfg.beta2), eps=cfg.adam_eps,
                        clip=cfg.clip, max_norm=cfg.grad_clip_norm, method=cfg.ns, ns_steps=cfg.muon_backend_steps, debug=debug, state_dtype={"bf16": torch.bfloat16, "fp32": torch.float32}.get(cfg.state_dtype))

# ---- evaluate ----

def windows(n_targets: int,  # targets of the stream, N
            seq_len: int,    # tokens a row holds
            stride: int,     # targets each window after the first adds; seq_len gives disjoint rows
            ) -> tuple[Tensor, Tensor]:  # int64 [W] first token of each window; int64 [W] how many of its last targets it scores
    "Windows that score every target exactly once; a row holds min(seq_len, n_targets) tokens. GolfError for a stride outside 1..seq_len or no targets."
    if n_targets < 1 or not 1 <= stride <= seq_len:
        raise GolfError(f"scoring needs at least one target and an EVAL_STRIDE between 1 and the row length {seq_len}: found {n_targets} targets and stride {stride}")
    row = min(seq_len, n_targets)
    later = -(-(n_targets - row) // stride)
    starts = (torch.arange(later + 1) * stride).clamp(max=n_targets - row)
    keeps = torch.full((later + 1,), stride)
    keeps[0] = row
    if later:
        keeps[-1] = n_targets - row - (later - 1) * stride
    return starts, keeps

@torch.no_grad()
def score_rows(model: Callable,   # (ids [B, T], keep) -> logits [B, keep, V] before the softcap; has .cap
               x: Tensor,         # int64 [B, T] tokens
               y: Tensor,         # int64 [B, T] targets, the tokens that follow
               keep: int,         # score the last `keep` targets of each row
               ) -> Tensor:       # [B, keep] nats per target, fp32 (fp64 for a float64 model)
    "Negative log-likelihood of the last targets of each row, without gradients."
    return token_nll(model(x, keep), y[:, -keep:], model.cap)

def window_batches(keeps: Tensor,    # int64 [W]
                   batch_seqs: int,  # windows of one batch
                   ) -> list[tuple[int, int, int]]:  # (first window, one past the last, keep)
    "Cut a list of windows into batches of equal `keep`, in order."
    batches, first = [], 0
    values, counts = torch.unique_consecutive(keeps, return_counts=True)
    for keep, count in zip(values.tolist(), counts.tolist()):
        batches += [(a, min(a + batch_seqs, first + count), keep) for a in range(first, first + count, batch_seqs)]
        first += count
    return batches

@torch.no_grad()
def score_windows(model: Callable,      # as in score_rows
                  tokens: Tensor,       # int [N + 1], on the model's device
                  table: ByteTable,     # on the same device
                  starts: Tensor,       # int64 [W], as from windows()
                  keeps: Tensor,        # int64 [W]
                  row: int,             # tokens of a window
                  batch_seqs: int,      # rows of every forward
                  out: Tensor | None = None,         # float [N]: receives each target's nats, if given
                  progress: Callable | None = None,  # called with (windows done, windows) after each batch
                  ) -> Tensor:          # float64 [3]: nats, bytes and number of the scored targets
    "Score some windows of a stream, on this rank alone."
    total = torch.zeros(3, dtype=torch.float64, device=tokens.device)
    starts, span = starts.to(tokens.device), torch.arange(row + 1, device=tokens.device)
    for a, b, keep in window_batches(keeps, batch_seqs):
        first = starts[a:b]
        filled = torch.cat([first, first[-1:].expand(batch_seqs - (b - a))])
        ids = tokens[filled[:, None] + span].long()
        x, y = ids[:, :-1], ids[:, 1:]
        nll = score_rows(model, x, y, keep)[:b - a]
        n_bytes = target_bytes(table, x[:b - a, -keep:], y[:b - a, -keep:])
        total += torch.stack([nll.double().sum(), n_bytes.sum().double(), torch.full_like(total[0], nll.numel())])
        if out is not None:
            out[first[:, None] + span[row - keep:row]] = nll.to(out.dtype)
        if progress is not None:
            progress(b, len(keeps))
    return total

def share_of(n: int,        # things to share out
             ranks: Ranks,
             ) -> tuple[int, int]:  # my things are first, ..., one before last
    "A rank's contiguous share: rank*n/world up to (rank+1)*n/world, rounded down."
    return n * ranks.rank // ranks.world, n * (ranks.rank + 1) // ranks.world

def sliding_loss(model: Callable,    # (ids, keep) -> logits; has .cap
                 tokens: Tensor,     # int [N + 1], on the model's device
                 table: ByteTable,   # on the same device
                 seq_len: int,       # tokens of a window
                 stride: int,        # targets each window after the first scores
                 batch_seqs: int,    # windows of one forward, per rank
                 ranks: Ranks,       # every rank must call
                 out: Tensor | None = None, progress: Callable | None = None,  # see score_windows
                 ) -> tuple[float, float]:   # nats per token, bits per byte
    "Sliding-window score of a stream, each target exactly once. GolfError for an impossible stride or an empty stream."
    n = tokens.numel() - 1
    starts, keeps = windows(n, seq_len, stride)
    lo, hi = share_of(len(starts), ranks)
    total = score_windows(model, tokens, table, starts[lo:hi], keeps[lo:hi], min(seq_len, n), min(batch_seqs, len(starts)), out, progress)
    nll, n_bytes, count = ranks.sum_late(total).tolist()
    if count != n:
        raise GolfError(f"every target must be scored once: {n:,} targets, {count:,.0f} scored; do all ranks hold the same tokens?")
    return nll / n, bits_per_byte(nll, n_bytes)

def plain_loss(model: Callable, tokens: Tensor, table: ByteTable,
               seq_len: int,      # tokens of a row; rows are disjoint
               batch_seqs: int,   # rows of one forward, per rank
               ranks: Ranks,
               ) -> tuple[float, float]:  # nats per token, bits per byte
    "Plain validation: disjoint rows, all targets scored (a last partial row is scored at the end of a full one). Otherwise as `sliding_loss`."
    return sliding_loss(model, tokens, table, seq_len, seq_len, batch_seqs, ranks)

# ---- train ----

def momentum_at(cfg: Config, step: int) -> float:
    "Muon's momentum for the step about to run: linear warm-up over `muon_momentum_warmup_steps`."
    part = min(step / cfg.muon_momentum_warmup_steps, 1.0) if cfg.muon_momentum_warmup_steps > 0 else 1.0
    return cfg.muon_momentum_warmup_start + (cfg.muon_momentum - cfg.muon_momentum_warmup_start) * part

def multiplier_at(cfg: Config, step: int, elapsed_ms):
    "Learning-rate multiplier for the step about to run. Without a cap a float from the step; with one from rank 0's `elapsed_ms` (0-dim tensor or float), in the same type."
    cap, down = cfg.train_cap_ms, cfg.warmdown_iters
    if down <= 0:
        return 1.0
    if cap <= 0:
        return min(1.0, (cfg.iterations - step) / down)
    if not isinstance(elapsed_ms, torch.Tensor):
        return float(multiplier_at(cfg, step, torch.tensor(elapsed_ms, dtype=torch.float64)))
    per_step = (elapsed_ms / max(step, 1)).clamp(min=1e-9)
    return ((cap - elapsed_ms).clamp(min=0) / (down * per_step)).clamp(max=1.0)

LATE_STEPS = 2

class LateReader:
    "A queue of small device tensors, each read `LATE_STEPS` pushes later, when that costs no waiting."

    def __init__(self):
        self.queue = deque()

    def push(self, t: torch.Tensor) -> list | None:
        "Queue `t`; returns the values of the tensor pushed `LATE_STEPS` ago, or None while there is none. Any shape and dtype."
        if t.device.type == "cuda":
            host = torch.empty(t.shape, dtype=t.dtype, pin_memory=True).copy_(t, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
        else:
            host, event = t.clone(), None
        self.queue.append((host, event))
        return self.pop() if len(self.queue) > LATE_STEPS else None

    def pop(self) -> list:
        "The oldest queued values, waiting for them if need be."
        host, event = self.queue.popleft()
        if event is not None:
            event.synchronize()
        return host.tolist()

class TrainClock:
    "Milliseconds of training so far; can be paused. `now` is any function that gives seconds."

    def __init__(self, now=time.perf_counter):
        self.now, self.ms, self.since = now, 0.0, None

    def start(self):
        "Go on counting."
        self.since = self.now()

    def pause(self):
        "Stop counting; `read` stays where it is."
        self.ms, self.since = self.read(), None

    def read(self) -> float:
        "Milliseconds so far."
        return self.ms if self.since is None else self.ms + 1000.0 * (self.now() - self.since)

def should_stop(cfg: Config, step: int, elapsed_ms: float) -> bool:
    "Whether the steps already under way will reach the wall-clock cap: said at the start of `step` (0-based)."
    cap = cfg.train_cap_ms
    return cap > 0 and step > 0 and elapsed_ms + LATE_STEPS * elapsed_ms / step >= cap

class GridProjector:
    "Late QAT (meant so in parameter-golf PR #399): rounds a bank shard to the int6 grid, with clip ratios frozen at construction: the `project` argument of publish."

    def __init__(self, engine: Engine, floor: bool, qmax: int = 31):
        "Freeze the clip ratios of the shard's int6 slots; `qmax` is the largest integer."
        self.qmax, self.floor, self.parts = qmax, floor, {}
        for name, bank in engine.banks.items():
            self.parts[name] = []
            for cut in shard_cuts(bank.spec, engine.ranks.rank, lambda m: (m.stored, m.transposed, m.quant)):
                if cut.matrix.quant.kind == "int6":
                    w = read_cut(bank.master, cut)
                    self.parts[name].append((cut, clip_ratio(w.mT if cut.matrix.transposed else w, qmax, floor)))

    def __call__(self, name: str, master: torch.Tensor) -> torch.Tensor:
        "A copy of `master` [n, r, c] with every int6 slot on its grid."
        out = master.clone()
        for cut, ratio in self.parts[name]:
            write_cut(out, cut, round_to_grid(read_cut(master, cut), ratio, self.qmax, self.floor, row_dim=-1 if cut.matrix.transposed else -2))
        return out

class RunLog:
    "Lines to the terminal and train.log, events to metrics.jsonl in `folder`; silent on ranks other than 0 or without a folder."

    def __init__(self, folder: Path | None = None, master: bool = True, quiet: bool = False):
        self.master, self.quiet, self.files = master, quiet, []
        if folder is not None and master:
            self.files = [open(Path(folder) / n, "w", encoding="utf-8") for n in ("train.log", "metrics.jsonl")]

    def line(self, text: str):
        "One line of text."
        if not self.master:
            return
        if not self.quiet:
            print(text, flush=True)
        if self.files:
            self.files[0].write(text + "\n")
            self.files[0].flush()

    def event(self, kind: str, **values):
        "One event with its numbers."
        if self.files:
            self.files[1].write(json.dumps({"event": kind, **values}) + "\n")
            self.files[1].flush()

    def close(self):
        "Close the files."
        for f in self.files:
            f.close()
        self.files = []

def micro_steps(loss_fn, loader, engine: Engine, accum: int) -> torch.Tensor:
    "Forward and backward over `accum` micro-batches; returns this rank's mean loss, 0-dim fp32 (or fp64), on the device."
    run, total = loss_fn.backward if isinstance(loss_fn, StepGraph) else functools.partial(backward_pass, loss_fn), None
    for _ in range(accum):
        loss = run(*loader.next(), accum)
        if accum > 1:
            engine.accumulate()
        total = loss if total is None else total + loss
    return total

def backward_pass(loss_fn, ids: torch.Tensor, targets: torch.Tensor, accum: int) -> torch.Tensor:
    "Forward and backward of one of `accum` micro-batches: gradients in `.grad`, its share of the mean loss returned, detached, 0-dim fp32 (or fp64)."
    loss = loss_fn(ids, targets) / accum
    loss.backward()
    return loss.detach()

def compiled(fn: Callable, cfg: Config, device: torch.device) -> Callable:
    "`fn` under torch.compile where the settings ask for it: COMPILE=1, or auto on CUDA."
    if cfg.compile == "0" or (cfg.compile == "auto" and device.type != "cuda"):
        return fn
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 64)  # one function, blocks of several kinds, models of several shapes
    return torch.compile(fn, dynamic=False, fullgraph=True)

def training_loss(model, cap: float):
    "The function (ids, targets) -> mean loss that training differentiates; `model` may be compiled."
    def loss_of(ids, targets):
        return softcap_loss(model(ids), targets, cap)
    return loss_of

class StepGraph:
    "A loss function whose `backward` (forward and backward of one micro-batch) is recorded after `eager` calls and replayed from then on."

    def __init__(self, loss_fn, # (ids, targets) -> mean loss
                 params: list, # the Parameters that get gradients
                 device: torch.device,
                 eager: int = 2): # calls that run as they are, to compile and tune
        self.loss_fn, self.params, self.eager, self.graph = loss_fn, params, eager, None
        self.left = eager if device.type == "cuda" else -1
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def __call__(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        "The loss alone, never recorded."
        return self.loss_fn(ids, targets)

    def backward(self, ids: torch.Tensor, targets: torch.Tensor, accum: int) -> torch.Tensor:
        "What `backward_pass` does; shapes, dtypes and `accum` are those of the first call."
        if self.left < 0:
            return backward_pass(self.loss_fn, ids, targets, accum)
        if self.graph is not None and self.places != self.addresses():
            self.graph, self.left = None, self.eager
        if self.graph is None:
            self.ids, self.targets = ids.clone(), targets.clone()
            if self.left > 0:
                self.left -= 1
                return self.aside(accum)
        earlier = [None if p.grad is None else p.grad.clone() for p in self.params]  # of the micro-batches before
        if self.graph is None:
            self.record(accum)
        self.ids.copy_(ids), self.targets.copy_(targets)
        self.graph.replay()
        for p, g, sofar in zip(self.params, self.grads, earlier):
            p.grad = g if sofar is None else sofar.add_(g)
        return self.loss.clone()

    def aside(self, accum: int) -> torch.Tensor:
        "One call (of `accum` a step) on the stream that will be recorded, so that autograd's bookkeeping belongs to it; returns its share of the loss, 0-dim fp32 (or fp64)."
        here = torch.cuda.current_stream()
        self.stream.wait_stream(here)
        with torch.cuda.stream(self.stream):
            loss = backward_pass(self.loss_fn, self.ids, self.targets, accum)
        here.wait_stream(self.stream)
        return loss

    def record(self, accum: int):
        "Record forward and backward on the fixed batch, one of `accum` a step; keeps the loss and the gradients' places."
        for p in self.params:
            p.grad = None
        self.graph = torch.cuda.CUDAGraph()
        self.loss = record_graph(lambda: backward_pass(self.loss_fn, self.ids, self.targets, accum), self.graph, self.stream)
        self.grads, self.places = [p.grad for p in self.params], self.addresses()

    def addresses(self) -> list[int]:
        "Where the parameters lie."
        return [p.data_ptr() for p in self.params]

def warm_up(cfg: Config, loss_fn, loader, engine: Engine, log: RunLog):
    "Run `warmup_steps` real steps, then restore everything as if they had not been."
    if cfg.warmup_steps <= 0:
        return
    saved, place = snapshot(engine), loader.state()
    for s in range(cfg.warmup_steps):
        loss = micro_steps(loss_fn, loader, engine, cfg.grad_accum(engine.ranks.world))
        if s == 0:
            engine.ranks.barrier()
        engine.launch(loss=loss)
        engine.finish(multiplier_at(cfg, 0, torch.zeros((), dtype=engine.full, device=engine.device)), momentum_at(cfg, s))
        if s + 1 <= 3 or (s + 1) % 10 == 0 or s + 1 == cfg.warmup_steps:
            log.line(f"warmup_step:{s + 1}/{cfg.warmup_steps}")
    restore(engine, saved)
    loader.rewind(place)

class Averages:
    "The averages a recipe asks for, over the engine's own shards."

    def __init__(self, cfg: Config, engine: Engine):
        self.cfg, self.engine, self.mode = cfg, engine, cfg.averaging
        self.ema = Ema(engine_tensors(engine), cfg.ema_decay) if "ema" in self.mode else None
        self.swa = Swa(engine_tensors(engine)) if "swa" in self.mode else None

    def update(self, step: int, multiplier):
        "After step `step` (0-based) with its learning-rate multiplier (float or 0-dim tensor)."
        if self.ema is not None:
            self.ema.update(engine_tensors(self.engine))
        if self.swa is not None and (step + 1) % self.cfg.swa_every == 0:
            m = torch.as_tensor(multiplier, dtype=self.engine.full, device=self.engine.device)
            self.swa.add(engine_tensors(self.engine), (m < SWA_BELOW).to(self.engine.full))

    def tensors(self) -> list:
        "The tensors to export, in `engine_tensors` order."
        return average_of(self.exported(), self.ema, self.swa, engine_tensors(self.engine))

    def exported(self) -> str:
        "Which average that is: `AVERAGING`, or what is left of it where no snapshot was taken before the clock ran out. Waits for the device."
        return self.mode if self.swa is None or self.swa.count.item() else "ema" if self.ema else "none"

@dataclass
class TrainResult:
    "What a training run leaves behind."
    steps: int # optimizer steps done
    train_ms: float # training time in ms, validation excluded
    losses: list = field(default_factory=list) # mean training loss of every step, nats a token
    val_loss: float | None = None # last validation loss, nats a token
    val_bpb: float | None = None # last validation bits per byte
    averages: Averages | None = None
    skipped: int = 0 # steps skipped because a gradient was not finite
    qat_from: int | None = None # first step (0-based) that published rounded weights

@dataclass
class LoopState:
    "The loop's bookkeeping."
    result: TrainResult
    clock: TrainClock
    world: int # ranks
    reader: LateReader = field(default_factory=LateReader)
    starts: list = field(default_factory=list) # elapsed ms at the start of every step
    read: int = 0 # control vectors read so far
    stop: bool = False
    qat_due: bool = False # the multiplier has fallen under the threshold
    project: GridProjector | None = None

def read_control(cfg: Config, state: LoopState, values: list, log: RunLog):
    "Take in the control vector of step `state.read` (0-based): loss, skip, stop; and log it. `values` are the control words and this rank's own loss."
    said = dict(zip(CONTROL_WORDS, values))
    said["loss"] /= state.world
    s, res = state.read, state.result
    state.read += 1
    res.losses.append(said["loss"])
    state.stop = state.stop or said["stop"] > 0
    if not math.isfinite(said["norm_sq"]):
        res.skipped += 1
        log.line(f"step:{s + 1} skipped: the gradient was not finite")
    ends = state.starts[s + 1] if s + 1 < len(state.starts) else state.clock.read()
    log.event("step", step=s + 1, loss=said["loss"], own_loss=values[-1], ms=ends - state.starts[s], train_ms=ends,
              multiplier=float(multiplier_at(cfg, s, said["elapsed_ms"])), momentum=momentum_at(cfg, s), grad_norm=(said["norm_sq"] / (state.world if cfg.clip == "local" else 1)) ** 0.5)
    if s < 10 or (cfg.train_log_every > 0 and (s + 1) % cfg.train_log_every == 0) or s + 1 == cfg.iterations:
        log.line(f"step:{s + 1}/{cfg.iterations} train_loss:{values[-1]:.4f} train_time:{ends:.0f}ms step_avg:{ends / (s + 1):.2f}ms")
    if cfg.qat_banks and cfg.late_qat and multiplier_at(cfg, s, said["elapsed_ms"]) < cfg.late_qat_threshold:
        state.qat_due = True

def hold_skips(step: int, engine: Engine):
    "Before step `step` (0-based): mask the gradient of the skip weights for the first `SKIP_FROZEN_STEPS` steps (one of the settings of modded-nanogpt #125's discussion)."
    if step < SKIP_FROZEN_STEPS:
        engine.masks["skip_weights"] = torch.zeros((), device=engine.device)
    else:
        engine.masks.pop("skip_weights", None)

def one_step(cfg: Config, step: int, loss_fn, loader, engine: Engine, state: LoopState, log: RunLog):
    "Step `step` (0-based) of the loop."
    elapsed = state.clock.read()
    state.starts.append(elapsed)
    if cfg.skip_gate == "frozen" and cfg.num_layers > 1:
        hold_skips(step, engine)
    loss = micro_steps(loss_fn, loader, engine, cfg.grad_accum(engine.ranks.world))
    control = engine.launch(loss=loss, elapsed_ms=elapsed, stop=should_stop(cfg, step, elapsed))
    multiplier = multiplier_at(cfg, step, control[0])
    if state.qat_due and state.project is None:
        state.project, state.result.qat_from = GridProjector(engine, cfg.scale_floor), step
        log.line(f"late_qat:enabled step:{step + 1} owner-side int6 grid")
    engine.finish(multiplier, momentum_at(cfg, step), project=state.project)
    state.result.averages.update(step, multiplier)
    values = state.reader.push(torch.cat([control, loss.to(control.dtype).view(1)]))
    if values is not None:
        read_control(cfg, state, values, log)

def validate_now(cfg: Config, step: int, engine: Engine, state: LoopState, validate, log: RunLog):
    "Stop the clock, publish unrounded masters, validate, put the rounded ones back. `step` steps are done."
    if engine.device.type == "cuda":
        torch.cuda.synchronize()
    state.clock.pause()
    if state.project is not None:
        engine.publish()
    res = state.result
    res.val_loss, res.val_bpb = validate()
    log.line(f"step:{step}/{cfg.iterations} val_loss:{res.val_loss:.4f} val_bpb:{res.val_bpb:.4f} train_time:{state.clock.ms:.0f}ms step_avg:{state.clock.ms / max(step, 1):.2f}ms")
    log.event("val", step=step, loss=res.val_loss, bpb=res.val_bpb, train_ms=state.clock.ms)
    if state.project is not None:
        engine.publish(project=state.project)
    state.clock.start()

def train(cfg: Config,
          loss_fn, # (ids, targets) -> mean loss, 0-dim
          loader, # has next() -> (ids, targets), both int64 [rows, T] on the device
          engine: Engine,
          log: RunLog | None = None,
          validate=None, # () -> (loss in nats a token, bits per byte), or None
          now=time.perf_counter) -> TrainResult: # the clock, in seconds
    "Train until `iterations` or the wall-clock cap. On return the replica holds the unrounded masters; the averages are in the result."
    log = log or RunLog(quiet=True)
    state = LoopState(TrainResult(0, 0.0, averages=Averages(cfg, engine)), TrainClock(now), engine.ranks.world)
    state.clock.start()
    step = 0
    while True:
        last = step == cfg.iterations or state.stop
        if validate and (last or (cfg.val_loss_every > 0 and step % cfg.val_loss_every == 0)):
            validate_now(cfg, step, engine, state, validate, log)
        if last:
            break
        one_step(cfg, step, loss_fn, loader, engine, state, log)
        step += 1
    return end_training(cfg, step, engine, state, log)

def end_training(cfg: Config, step: int, engine: Engine, state: LoopState, log: RunLog) -> TrainResult:
    "Read what is still queued, stop the clock, leave unrounded masters in the replica. `step` steps are done."
    if engine.device.type == "cuda":
        torch.cuda.synchronize()
    state.clock.pause()
    while state.reader.queue:
        read_control(cfg, state, state.reader.pop(), log)
    if state.stop:
        log.line(f"stopping_early: wallclock_cap train_time:{state.clock.ms:.0f}ms step:{step}/{cfg.iterations}")
    if state.project is not None:
        engine.publish()
    state.result.steps, state.result.train_ms = step, state.clock.ms
    return state.result

# ---- quantize ----

KIND_DTYPES = {"int6": "|i1", "int8": "|i1", "fp16": "<f2", "fp32": "<f4", "fp64": "<f8", "bf16": "<u2"} # numpy dtype on disk

INT_MAX = {"int6": 31, "int8": 127} # largest integer of the kinds that have a scale per row

@dataclass
class Packed:
    "One tensor as it is stored."
    kind: str # a key of KIND_DTYPES
    shape: tuple[int, ...] # of the tensor
    data: np.ndarray # shape as the tensor; bf16 as its 16 bits in uint16
    scale: np.ndarray | None = None # fp16 [rows] for integer kinds

def pack_plain(name: str, # for errors
               w: torch.Tensor, # any shape, float
               kind: str, # fp16, fp32, fp64 or bf16
              ) -> Packed:
    "Store a tensor as floats. Raises GolfError for values that are not finite in that kind."
    if kind == "bf16":
        rounded = w.detach().to(torch.bfloat16).cpu().contiguous()
        data = rounded.view(torch.int16).numpy().view(np.uint16)
    else:
        rounded = w.detach().to({"fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}[kind]).cpu().contiguous()
        data = rounded.numpy()
    if not torch.isfinite(rounded).all():
        raise GolfError(f"{name} must be finite in {kind}, found NaN, infinity or a value out of range: the run has diverged, export earlier weights")
    return Packed(kind, tuple(w.shape), data)

def unpack_plain(packed: Packed, # of a float kind
                ) -> torch.Tensor: # same shape, in the stored dtype, writable
    "The tensor that was stored, bit for bit."
    data = np.array(packed.data)
    return torch.from_numpy(data.view(np.int16)).view(torch.bfloat16) if packed.kind == "bf16" else torch.from_numpy(data)

def spread_scale(w: torch.Tensor, # float [rows, cols]
                 k: float, # clip in units of the row's spread; larger is coarser
                 qmax: int = 31, # largest integer
                ) -> torch.Tensor: # [rows] fp32 (or fp64), values rounded to fp16
    "The scale k * std(row) / qmax (parameter-golf PR #1794)."
    wide = w if w.dtype == torch.float64 else w.float()
    return row_scale(k * wide.square().mean(-1).sqrt(), qmax)

@torch.no_grad()
def pack_rows(name: str, # for errors
              w: torch.Tensor, # float [rows, cols]
              kind: str, # int6 or int8
              scale_floor: bool = False, # the published floor: no scale under 1/31 (int6) or 1/127 (int8)
              k: float | None = None, # int6 by spread; None: GPTQ-lite
             ) -> Packed:
    "Store a matrix as integers with one scale per row. Raises GolfError for other shapes and for weights that are not finite."
    if w.ndim != 2 or w.numel() == 0 or not torch.isfinite(w).all():
        raise GolfError(f"{name} must be a finite matrix to be stored as {kind}, found shape {tuple(w.shape)}{'' if w.ndim != 2 else ' with NaN or infinity'}: the run has diverged or the name is misspelt")
    if kind == "int8":
        q, scale = quantize_int8(w, scale_floor)
    elif k is None:
        q, scale, _ = best_clip(w, INT_MAX[kind], scale_floor)
    else:
        scale = spread_scale(w, k, INT_MAX[kind])
        q = quantize_rows(w.to(scale.dtype), scale, INT_MAX[kind])
    return Packed(kind, tuple(w.shape), q.cpu().numpy(), scale.to(torch.float16).cpu().numpy())

def quantize_state(named: Mapping[str, torch.Tensor], # published name -> weights, any float dtype, any device
                   scale_floor: bool, # the published floor, which decides the size by accident
                   k: float | None = None, # int6 clip in units of the row's spread; None: GPTQ-lite
                   small: int = SMALL_MATRIX, # up to so many elements a tensor stays fp16
                  ) -> dict[str, Packed]: # same names, same order
    "Quantize everything. Source: parameter-golf PR #399 (GPTQ-lite, the order of kinds). Raises GolfError for weights that are not finite."
    packed = {}
    for name, w in named.items():
        kind = quant_kind(name, tuple(w.shape), small)
        packed[name] = pack_rows(name, w, kind, scale_floor, k) if kind in INT_MAX else pack_plain(name, w, kind)
    return packed

def dequantize_state(packed: Mapping[str, Packed], # as stored
                    ) -> dict[str, torch.Tensor]: # of the shapes stored, fp32 (fp64 where stored so), CPU; what was quantized holds bfloat16 numbers
    "The weights that a model loads, the same on every device."
    state = {}
    for name, p in packed.items():
        if p.kind in INT_MAX:
            state[name] = dequantize_rows(torch.from_numpy(np.array(p.data)), torch.from_numpy(p.scale.astype(np.float32))).bfloat16().float()
        else:
            plain = unpack_plain(p)
            state[name] = plain if plain.dtype == torch.float64 else plain.float()
    return state

def entropy_bits(values: np.ndarray, # int8, any shape
                ) -> float: # bits per value
    "Order-0 entropy: the floor for a coder that looks at one value at a time."
    counts = np.bincount(np.ascontiguousarray(values).view(np.uint8).ravel(), minlength=256)
    p = counts[counts > 0] / max(counts.sum(), 1)
    return float(-(p * np.log2(p)).sum())

GAUSS = 2 * math.pi * math.e

def bits_per_weight(k: float, # clip in units of the spread
                    qmax: int = 31, # largest integer
                   ) -> float: # bits, for Gaussian rows
    "Entropy of a Gaussian row on the grid of step k * std / qmax."
    return 0.5 * math.log2(GAUSS * ((qmax / k) ** 2 + 1 / 12))

def k_for_bits(bits: float, # bits per weight wanted
               qmax: int = 31, # largest integer
              ) -> float: # k; infinite where the formula has no answer (under about 0.25 bits)
    "The inverse of bits_per_weight."
    square = 4**bits / GAUSS - 1 / 12
    return qmax / math.sqrt(square) if square > 0 else math.inf

class HessianTaps(dict):
    "A dict for `taps` that keeps, instead of what is written into it, sums of outer products."

    def __init__(self):
        super().__init__()
        self.sums, self.owner, self.seen = {}, {}, (None, "") # by name of the first matrix of an input; matrix -> that name; last input

    def __setitem__(self, name: str, x: torch.Tensor): # matrix name; its input [..., cols]
        if x is not self.seen[0]:
            self.seen = x, name
            rows = x.detach().flatten(0, -2).to(torch.promote_types(x.dtype, torch.float32))
            product = rows.T @ rows
            self.sums[name] = self.sums[name].add_(product) if name in self.sums else product
        self.owner[name] = self.seen[1]

@torch.no_grad()
def calibrate(model: Golf, # holds the weights that will be quantized
              batches: Iterable[torch.Tensor], # int64 [B, T] training tokens on the device; other ones on each rank
              ranks: Ranks, # every rank must call
             ) -> dict[str, torch.Tensor]: # matrix name -> H [cols, cols], fp32 (fp64 of an fp64 model); Q, K, V share a tensor
    "The mean of x^T x for the input of every matrix, over the batches of all ranks. Raises GolfError when there is no batch."
    taps, tokens = HessianTaps(), torch.zeros(1, dtype=torch.float64, device=ranks.device)
    for ids in batches:
        model(ids, taps=taps)
        tokens += ids.numel()
    if not taps.sums:
        raise GolfError("GPTQ needs at least one calibration batch on every rank, found none: set GPTQ_CALIB_SAMPLES to 1 or more")
    tokens = ranks.sum(tokens)
    means = {name: ranks.sum(total).div_(tokens.to(total.dtype)) for name, total in taps.sums.items()}
    return {name: means[first] for name, first in taps.owner.items()}

def calibration_batches(sampler, # of chapter 03: next() -> uint16 [rows, T + 1]
                        count: int, # batches
                        device: str | torch.device) -> Iterator[torch.Tensor]: # int64 [rows, T]
    "Batches for `calibrate`, made as they are wanted."
    for _ in range(count):
        yield torch.from_numpy(sampler.next()[:, :-1].astype(np.int64)).to(device)

GPTQ_DAMP = 0.01 # of the mean diagonal

GPTQ_BLOCK = 128 # columns after which the rest of the matrix is brought up to date

def hessian_factor(h: torch.Tensor, # fp32 or fp64 [cols, cols], symmetric
                   damp: float = GPTQ_DAMP, # share of the mean diagonal of live columns
                  ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None: # order int64 [cols]; dead [cols] bool; U [cols, cols] fp64, in that order
    "The upper Cholesky factor of H's inverse, or None where H has none."
    h = h.double().clone()
    diagonal = h.diagonal()
    dead = diagonal == 0
    level = damp * diagonal.sum() / (~dead).sum().clamp_min(1)
    diagonal[dead] = 1
    order = diagonal.argsort(descending=True, stable=True)
    diagonal += level
    lower, failed = torch.linalg.cholesky_ex(h[order][:, order])
    if failed.item() or not torch.isfinite(lower).all():
        return None
    upper, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
    return None if failed.item() or not torch.isfinite(upper).all() else (order, dead, upper)

def gptq_columns(w: torch.Tensor, # fp32 (or fp64) [rows, cols], columns in the order of `upper`
                 scale: torch.Tensor, # [rows], w's dtype
                 upper: torch.Tensor, # [cols, cols], w's dtype
                 qmax: int = 31, # largest integer
                 block: int = GPTQ_BLOCK,
                ) -> torch.Tensor: # int8 [rows, cols]
    "Round column by column, errors spread over the columns to come. Source: arXiv 2210.17323. Errors leave a `block` of columns in one product."
    w, q = w.T.contiguous(), torch.empty(w.T.shape, dtype=torch.int8, device=w.device)
    for a in range(0, len(w), block):
        part, u = w[a:a + block], upper[a:a + block, a:a + block]
        errors = torch.empty_like(part)
        for j in range(len(part)):
            whole = (part[j] / scale).round().clamp(-qmax, qmax)
            q[a + j] = whole
            errors[j] = (part[j] - whole * scale) / u[j, j]
            part[j + 1:].addr_(u[j, j + 1:], errors[j], alpha=-1)
        w[a + block:].addmm_(upper[a:a + block, a + block:].T, errors, alpha=-1)
    return q.T.contiguous()

@torch.no_grad()
def pack_gptq(name: str, # for errors
              w: torch.Tensor, # float [rows, cols]
              h: torch.Tensor, # fp32 (or fp64) [cols, cols] of its input
              scale_floor: bool = False, # the published floor: no scale under 1/31
              k: float | None = None, # step k * std(row) / 31; None: the five clips of GPTQ-lite, each row its best
             ) -> Packed:
    "Store a matrix as int6 by full-Hessian GPTQ, or by `pack_rows` when H has no factor. Raises GolfError as `pack_rows` does."
    factor = hessian_factor(h) if torch.isfinite(h).all() else None
    if factor is None or w.ndim != 2 or not torch.isfinite(w).all():
        return pack_rows(name, w, "int6", scale_floor, k)
    (order, dead, upper), wide = factor, torch.promote_types(w.dtype, torch.float32)
    w = w.to(wide)
    if k is None:
        scales = torch.stack([row_scale(row_clip(w, quantile), 31, scale_floor) for quantile in CLIP_QUANTILES])
    else:
        scales = spread_scale(w, k)[None]
    live, tries = w.masked_fill(dead.to(w.device), 0), len(scales)
    q = torch.empty(tries * len(w), w.shape[1], dtype=torch.int8, device=w.device)
    q[:, order] = gptq_columns(live[:, order].repeat(tries, 1), scales.flatten(), upper.to(wide))
    q = q.view(tries, *w.shape)
    error = dequantize_rows(q, scales) - live
    best = ((error @ h.to(wide)) * error).sum(-1).argmin(0)
    rows = torch.arange(len(w), device=w.device)
    return Packed("int6", tuple(w.shape), q[best, rows].cpu().numpy(), scales[best, rows].to(torch.float16).cpu().numpy())

def share_matrices(shapes: Mapping[str, tuple[int, int]], # matrix name -> (rows, cols)
                   world: int, # ranks
                  ) -> dict[str, int]: # matrix name -> rank
    "Who quantizes what: the most expensive first, to the least loaded rank. Alike on all ranks."
    load, owner = [0.0] * world, {}
    for name, (r, c) in sorted(shapes.items(), key=lambda item: (-item[1][0] * item[1][1]**2 - item[1][1]**3, item[0])):
        owner[name] = load.index(min(load))
        load[owner[name]] += r * c**2 + c**3
    return owner

def gptq_matrices(named: Mapping[str, torch.Tensor], # the int6 matrices, the same on every rank
                  hessians: Mapping[str, torch.Tensor], # as from calibrate
                  ranks: Ranks, # every rank must call
                  scale_floor: bool = False, k: float | None = None, # as in pack_gptq
                 ) -> dict[str, Packed]: # the same on every rank
    "GPTQ for all matrices, shared out over the ranks. `hessians` maps a name to its [cols, cols], fp32 (or fp64)."
    owner = share_matrices({n: tuple(w.shape) for n, w in named.items()}, ranks.world)
    codes = torch.zeros(sum(w.numel() for w in named.values()), dtype=torch.int8, device=ranks.device)
    scales = torch.zeros(sum(len(w) for w in named.values()), device=ranks.device)
    cuts = codes.split([w.numel() for w in named.values()]), scales.split([len(w) for w in named.values()])
    for (name, w), code, scale in zip(named.items(), *cuts):
        if owner[name] == ranks.rank:
            p = pack_gptq(name, w, hessians[name], scale_floor, k)
            code.copy_(torch.from_numpy(p.data).flatten())
            scale.copy_(torch.from_numpy(p.scale.astype(np.float32)))
    ranks.sum_late(codes), ranks.sum(scales)
    return {name: Packed("int6", tuple(w.shape), code.view(w.shape).cpu().numpy(), scale.half().cpu().numpy()) for (name, w), code, scale in zip(named.items(), *cuts)}

K_FINEST = 4.0

K_COARSEST = 64.0

SIZE_AIM = 0.998 # fraction of the target that we aim at

SIZE_GOOD = 0.995 # fraction that is near enough

class NothingFits(GolfError):
    "No grid is coarse enough for a target; raised on all ranks alike."

def size_to_target(named: Mapping[str, torch.Tensor], # published name -> weights, any float dtype
                   target_bytes: int, # the container must have at most so many bytes
                   measure: Callable[[dict[str, Packed]], int], # bytes of the container of a packed state
                   small: int = SMALL_MATRIX, # up to so many elements a tensor stays fp16
                   tries: int = 6, # packings at most, after the first
                   int6: Callable[[float | None], dict[str, Packed]] | None = None, # k -> all int6 matrices; None: pack_rows
                  ) -> tuple[dict[str, Packed], float | None, int]: # packed state, its k (None: GPTQ-lite), its bytes
    "The finest quantization that fits. Raises NothingFits when even the coarsest does not."
    packed = quantize_state(named, False, small=small)
    names = [name for name, p in packed.items() if p.kind == "int6"]
    if int6 is None:
        def int6(k): return {name: pack_rows(name, named[name], "int6", k=k) for name in names}
    else:
        packed |= int6(None)
    size = measure(packed)
    if size <= target_bytes:
        return packed, None, size
    codes = [packed[name].data.ravel() for name in names]
    bits, n, best = entropy_bits(np.concatenate(codes)) if codes else 0.0, max(sum(c.size for c in codes), 1), None
    for attempt in range(tries):
        bits -= 8 * (size - SIZE_AIM * target_bytes) / n
        k = min(max(k_for_bits(bits), K_FINEST), K_COARSEST) if best or attempt < tries - 1 else K_COARSEST
        packed = packed | int6(k)
        size, bits = measure(packed), bits_per_weight(k)
        if size <= target_bytes and (best is None or size > best[2]):
            best = packed, k, size
        if best and (best[2] >= SIZE_GOOD * target_bytes or k == K_FINEST) or not best and k == K_COARSEST:
            break
    if best is None:
        raise NothingFits(f"cannot quantize to {target_bytes:,} bytes: the coarsest grid takes {size:,}; allow at least that much or train a smaller model")
    return best

def gptq_state(model: Golf, # holds the weights that will be quantized
               layout: Layout, # of the model: which names are matrices
               named: Mapping[str, torch.Tensor], # published name -> those weights in full precision, on every rank
               batches: Iterable[torch.Tensor], # calibration batches of this rank, int64 [B, T]
               ranks: Ranks, # every rank must call
               scale_floor: bool = False, # the published floor
               small: int = SMALL_MATRIX, # up to so many elements a tensor stays fp16
               target_bytes: int | None = None, # the container must have at most so many bytes
               measure: Callable[[dict[str, Packed]], int] | None = None, # its bytes, with a target; called on rank 0
              ) -> dict[str, Packed]: # the same on every rank
    "Calibrate, then quantize everything, int6 by full-Hessian GPTQ. Raises GolfError as calibrate and size_to_target do."
    hessians = calibrate(model, batches, ranks)
    matrices = {name: named[name] for name in layout.names() if quant_kind(name, tuple(named[name].shape), small) == "int6"}
    if target_bytes is None:
        return quantize_state(named, scale_floor, small=small) | gptq_matrices(matrices, hessians, ranks, scale_floor)
    def agreed(packed): return ranks.broadcast_object(measure(packed) if ranks.master else 0)
    return size_to_target(named, target_bytes, agreed, small, int6=lambda k: gptq_matrices(matrices, hessians, ranks, False, k))[0]

# ---- artifact ----

ARTIFACT_MAGIC = b"\x93GOLFNB\n"

ARTIFACT_VERSION = 1

ARTIFACT_PREFIX = "<8sII32s" # magic, version, header length, checksum

PREFIX_BYTES = 48

HEADER_LIMIT = 2**22 # bytes of the header, deflated or not

RAW_LIMIT = 2**31 # bytes of all sections, decoded

SECTIONS = ("int6", "int8", "fp16", "fp32", "fp64", "bf16", "scale") # order in the file; "scale" holds the row scales of the integer kinds

def _deflate(raw: bytes) -> bytes:
    "The smaller of zlib's two ways: with repetitions, or frequencies only."
    ways = []
    for strategy in (zlib.Z_DEFAULT_STRATEGY, zlib.Z_HUFFMAN_ONLY):
        coder = zlib.compressobj(9, zlib.DEFLATED, 15, 9, strategy)
        ways.append(coder.compress(raw) + coder.flush())
    return min(ways, key=len)

RANS_BITS = 14 # frequencies of a context sum to 2**14

RANS_CONTEXTS = 64 # at most

RANS_FINENESS = (0, 2, 3, 4, 6) # levels per factor of two that the writer tries; 0: no levels

def rans_levels(q: np.ndarray, # int8 [rows, cols]
                fineness: int, # levels per factor of two; 0: none, but bytes of narrow items by their place
               ) -> tuple[np.ndarray, np.ndarray]: # uint8 [rows], uint8 [cols]: a cell's context is their sum, less an offset
    "How spread the integers of each row and column are."
    if not fineness:
        return np.zeros(q.shape[0], np.uint8), (np.arange(q.shape[1]) if q.shape[1] <= 8 else np.zeros(q.shape[1])).astype(np.uint8)
    square = np.square(q, dtype=np.float64)
    rows = np.rint(fineness / 2 * np.log2(square.mean(1) + 0.04)) # 0.04: a row of zeros has a level too
    cols = np.rint(fineness / 2 * np.log2((square / 4.0 ** (rows / fineness)[:, None]).mean(0) + 0.0004))
    return (rows + 64).astype(np.uint8), (cols + 64).astype(np.uint8)

def rans_contexts(rows: np.ndarray, cols: np.ndarray, # uint8 levels
                  low: int, count: int, # the first level that counts, and how many there are
                 ) -> np.ndarray: # uint8 [rows * cols]
    "Each cell's context, row by row; levels outside go to the nearest."
    return (rows[:, None].astype(np.int16) + cols - low).clip(0, count - 1).astype(np.uint8).ravel()

def rans_frequencies(counts: np.ndarray, # int64 [256]
                    ) -> np.ndarray: # uint32 [256], sum 2**RANS_BITS
    "Frequencies of one context."
    counts = counts if counts.any() else np.eye(1, 256, dtype=np.int64)[0]
    f = np.maximum(counts * 2**RANS_BITS // counts.sum(), counts > 0)
    while rest := 2**RANS_BITS - int(f.sum()):
        f[f.argmax()] += 1 if rest > 0 else -1
    return f.astype(np.uint32)

def rans_model(symbols: np.ndarray, # uint8, a section
               shapes: list, # [rows, cols] of its tensors, in order
               fineness: int, # as in rans_levels
              ) -> tuple: # estimated bytes, fineness, low, levels [rows, cols, rows, ...], frequencies [contexts, 256]
    "Levels and frequencies for a section, and what it would take with them. `symbols` has shape [n]."
    cuts = np.cumsum([0] + [r * c for r, c in shapes])
    tensors = [symbols[a:b].reshape(shape) for a, b, shape in zip(cuts, cuts[1:], shapes)]
    levels = [rans_levels(t.view(np.int8), fineness) for t in tensors]
    below = np.cumsum(sum(np.convolve(np.bincount(a, minlength=256), np.bincount(b, minlength=256)) for a, b in levels))
    edge = below[-1] // 1000 if fineness else 1 # the rarest thousandth of the cells on either side need no table of their own
    low, high = (int(np.searchsorted(below, n)) for n in (max(edge, 1), below[-1] - edge + 1))
    low = max(low, high - RANS_CONTEXTS + 1)
    counts = sum(np.bincount(rans_contexts(*ab, low, high - low + 1) * np.intp(256) + t.ravel(), minlength=256 * (high - low + 1)) for t, ab in zip(tensors, levels))
    frequencies = np.stack([rans_frequencies(c) for c in counts.reshape(-1, 256)])
    used = counts > 0
    bits = (counts[used] * (RANS_BITS - np.log2(frequencies.ravel()[used]))).sum()
    levels = [line for pair in levels for line in pair]
    return int(bits / 8) + len(rans_side(levels, frequencies)), fineness, low, levels, frequencies

def rans_side(levels: list, frequencies: np.ndarray) -> bytes:
    "Tables and levels, deflated. `frequencies` are uint32 [contexts, 256]."
    return zlib.compress(frequencies.astype("<u2").tobytes() + b"".join(line.tobytes() for line in levels), 9)

RANS_PREFIX = "<BHBI" # fineness, lowest level, contexts, bytes of the deflated tables

def rans_lanes(size: int) -> int:
    "How many lanes a section of `size` values has: each costs four bytes, each step of all of them some microseconds."
    return max(math.isqrt(size) // 8, 1)

def rans_encode(raw: bytes, # a section
                shapes: list, # [rows, cols] of its tensors, in order; at most 8 columns: items of so many bytes
               ) -> bytes: # what rans_decode takes
    "Code a section. The same bytes every time. Source: Duda, arXiv 1311.2540; interleaving after Giesen, arXiv 1402.3392."
    symbols, lanes, words = np.frombuffer(raw, np.uint8), rans_lanes(len(raw)), []
    _, fineness, low, levels, f = min((rans_model(symbols, shapes, n) for n in RANS_FINENESS if n == 0 or shapes[0][1] > 8), key=lambda m: m[0])
    side, begin = rans_side(levels, f), (np.cumsum(f, 1) - f).astype(np.uint32).ravel()
    index = np.concatenate([rans_contexts(a, b, low, len(f)).astype(np.uint16) for a, b in zip(levels[::2], levels[1::2])])
    index, count, f, x = index * np.uint16(256) + symbols, len(f), f.ravel(), np.full(lanes, 2**16, np.uint32)
    for at in range((len(raw) - 1) // lanes * lanes, -1, -lanes):
        now = index[at:at + lanes]
        head, often = x[:len(now)], f[now]
        full = head >> (32 - RANS_BITS) >= often
        words.append(head[full].astype("<u2").tobytes())
        head = np.where(full, head >> 16, head)
        whole = head // often
        x[:len(now)] = (whole << RANS_BITS) + (head - whole * often) + begin[now]
    return struct.pack(RANS_PREFIX, fineness, low, count, len(side)) + side + x.astype("<u4").tobytes() + b"".join(reversed(words))

def rans_tables(stored: bytes, # from the file
                shapes: list, # [rows, cols] of the section's tensors
               ) -> tuple[np.ndarray, np.ndarray, int]: # contexts uint8 [values], frequencies uint32 [contexts, 256], bytes read
    "The head of a coded section. Raises ValueError or struct.error for damage."
    _, low, count, length = struct.unpack(RANS_PREFIX, stored[:8])
    coder, start, places = zlib.decompressobj(), 8 + length, []
    side = coder.decompress(stored[8:start], 512 * count + sum(r + c for r, c in shapes) + 1)
    if len(side) != 512 * count + sum(r + c for r, c in shapes) or not 1 <= count <= RANS_CONTEXTS or len(stored) < start:
        raise ValueError("tables")
    frequencies = np.frombuffer(side, "<u2", 256 * count).reshape(count, 256).astype(np.uint32)
    if (frequencies.sum(1) != 2**RANS_BITS).any():
        raise ValueError("frequencies")
    levels = np.frombuffer(side, np.uint8, offset=512 * count)
    for r, c in shapes:
        places.append(rans_contexts(levels[:r], levels[r:r + c], low, count))
        levels = levels[r + c:]
    return np.concatenate(places), frequencies, start

def rans_decode(stored: bytes, # what rans_encode gave
                shapes: list, # as given to rans_encode
               ) -> bytes: # the section
    "Decode with numpy alone. Raises ValueError, struct.error or zlib.error for damage."
    contexts, f, start = rans_tables(stored, shapes)
    size, lanes, at = len(contexts), rans_lanes(len(contexts)), 0
    begin, slots = (np.cumsum(f, 1) - f).astype(np.uint32).ravel(), np.concatenate([np.repeat(np.arange(256, dtype=np.uint8), row) for row in f])
    x, words = np.frombuffer(stored, "<u4", lanes, start).astype(np.uint32), np.frombuffer(stored, "<u2", offset=start + 4 * lanes)
    f, out, mask = f.ravel(), np.empty(size, np.uint8), np.uint32(2**RANS_BITS - 1)
    for step in range(0, size, lanes):
        context = contexts[step:step + lanes].astype(np.uint32)
        head = x[:len(context)]
        slot = head & mask
        value = slots[(context << RANS_BITS) + slot]
        out[step:step + lanes] = value
        now = (context << 8) + value
        head = f[now] * (head >> RANS_BITS) + slot - begin[now]
        need = np.flatnonzero(head < 2**16)
        head[need] = (head[need] << 16) | words[at:at + len(need)]
        at += len(need)
        x[:len(context)] = head
    if at != len(words) or (x != 2**16).any():
        raise ValueError("end")
    return out.tobytes()

CODECS = ("lzma", "zlib", "rans", "best", "none", "brotli", "zstd")

def _optional_codec(codec: str): # brotli or zstd -> its module
    "Import an optional package, or say which one is missing."
    package = {"brotli": "brotli", "zstd": "zstandard"}[codec]
    try:
        return importlib.import_module(package)
    except ImportError:
        raise GolfError(f"codec {codec} needs the package {package}, which is not installed: install it or use one of lzma, zlib, best") from None

BEST_SAMPLE = 2**20 # bytes

LZMA_NOISE = [{"id": lzma.FILTER_LZMA2, "preset": 6 | lzma.PRESET_EXTREME, "lc": 0, "lp": 0, "pb": 0}] # no neighbour says anything about a weight

def _repeats(raw: bytes) -> bool:
    "Is a section short, or does lzma find repetitions in its first part?"
    sample = raw[:BEST_SAMPLE]
    return len(raw) <= BEST_SAMPLE or len(lzma.compress(sample, preset=6)) < 1.01 * entropy_bits(np.frombuffer(sample, np.int8)) * len(sample) / 8

def compress_section(raw: bytes, # decoded bytes
                     codec: str, # one of CODECS
                     shapes: list | None = None, # [rows, cols] of the tensors in it, for rans; None: bytes in a row
                    ) -> tuple[str, bytes]: # the codec to record, and the stored bytes
    "Compress, the same bytes every time. Raises GolfError for an unknown codec or a missing package."
    if codec == "none":
        return codec, raw
    if codec in ("lzma", "zlib"):
        return codec, lzma.compress(raw, preset=6) if codec == "lzma" else _deflate(raw)
    if codec == "rans":
        return codec, rans_encode(raw, shapes or [(len(raw), 1)]) if raw else raw
    if codec == "best":
        ways = [compress_section(raw, "rans", shapes), ("none", raw)]
        if _repeats(raw):
            ways += [("lzma", lzma.compress(raw, preset=6)), ("lzma", lzma.compress(raw, filters=LZMA_NOISE)), ("zlib", _deflate(raw))]
        return min(ways, key=lambda way: len(way[1]))
    if codec not in CODECS:
        raise GolfError(f"CODEC must be one of {', '.join(CODECS)}, found {codec!r}: choose one of them")
    module = _optional_codec(codec)
    return codec, module.compress(raw, quality=11) if codec == "brotli" else module.ZstdCompressor(level=22).compress(raw)

def _decoded_parts(stored: bytes, # from the file
                   codec: str, # as recorded
                   size: int, # decoded bytes expected
                   shapes: list | None, # of the tensors in it, for rans
                  ) -> Iterator[bytes]:
    "Decoded parts; the caller stops when they are more than expected."
    if codec == "none" or codec == "rans" and not size:
        yield stored
    elif codec == "rans":
        yield rans_decode(stored, shapes or [(size, 1)])
    elif codec in ("lzma", "zlib"):
        coder = lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=2**28) if codec == "lzma" else zlib.decompressobj()
        yield coder.decompress(stored, size + 1)
        if not coder.eof or coder.unused_data:
            raise EOFError
    else:
        module = _optional_codec(codec)
        coder = module.Decompressor() if codec == "brotli" else module.ZstdDecompressor(max_window_size=2**27).decompressobj()
        step = coder.process if codec == "brotli" else coder.decompress
        for at in range(0, len(stored), 256):
            yield step(stored[at:at + 256])

def decompress_section(stored: bytes, # from the file
                       codec: str, # as recorded: lzma, zlib, rans, none, brotli or zstd
                       size: int, # decoded bytes, known beforehand
                       shapes: list | None = None, # as given to compress_section
                      ) -> bytes: # exactly size bytes
    "Decode in bounded memory. Raises GolfError for damage and for any other size."
    if codec not in CODECS or codec == "best":
        raise GolfError(f"a section's codec must be lzma, zlib, rans, none, brotli or zstd, found {codec!r}: the file is damaged or of a later version")
    parts, total = [], 0
    try:
        for part in _decoded_parts(stored, codec, size, shapes):
            parts.append(part)
            total += len(part)
            if total > size:
                break
    except GolfError:
        raise
    except Exception as error: # each codec has its own error types
        raise GolfError(f"a section of {len(stored):,} bytes does not decode with {codec} ({type(error).__name__}): the file is damaged, copy or make it again") from None
    if total != size:
        raise GolfError(f"a section must decode to {size:,} bytes, found {'more' if total > size else f'{total:,}'}: the file is damaged, copy or make it again")
    return b"".join(parts)

def section_plan(tensors: list, # [name, kind, shape] of each tensor, checked
                ) -> dict[str, int]: # decoded bytes of each section in use, in the file's order
    "What follows from names, kinds and shapes alone."
    sizes = dict.fromkeys(SECTIONS, 0)
    for _, kind, shape in tensors:
        sizes[kind] += math.prod(shape) * np.dtype(KIND_DTYPES[kind]).itemsize
        sizes["scale"] += 2 * shape[0] if kind in INT_MAX else 0
    return {section: size for section, size in sizes.items() if size}

def section_shapes(tensors: list, # as in section_plan
                   section: str, # one of SECTIONS
                  ) -> list[tuple[int, int]]: # rows and columns of its tensors; numbers that are no integers are rows of their bytes
    "What the coder of integers is told about a section."
    if section in INT_MAX:
        return [tuple(shape) for _, kind, shape in tensors if kind == section]
    width = 2 if section == "scale" else np.dtype(KIND_DTYPES[section]).itemsize
    return [(section_plan(tensors)[section] // width, width)]

def pack_bytes(packed: Mapping[str, Packed], # what quantize_state gave
               meta: dict, # JSON-able facts: settings, tokenizer_sha256, vocab_size, recipe, seed, steps
               codec: str = "lzma", # one of CODECS
              ) -> bytes: # the container
    "Write a container into memory. Raises GolfError for facts JSON cannot hold or an unknown codec."
    names = sorted(packed)
    tensors = [[name, packed[name].kind, list(packed[name].shape)] for name in names]
    sections, stored = [], []
    for section in section_plan(tensors):
        arrays = [p.scale.astype("<f2") if section == "scale" else p.data.astype(KIND_DTYPES[p.kind], copy=False)
                  for p in map(packed.get, names) if (p.kind in INT_MAX if section == "scale" else p.kind == section)]
        used, data = compress_section(b"".join(a.tobytes() for a in arrays), codec, section_shapes(tensors, section))
        sections.append([section, used, len(data)])
        stored.append(data)
    try:
        text = json.dumps({"meta": meta, "tensors": tensors, "sections": sections}, sort_keys=True, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError) as error:
        raise GolfError(f"an artifact's facts must be plain JSON, found something else ({error}): pass numbers, strings, lists and dicts") from None
    return seal(zlib.compress(text.encode(), 9), b"".join(stored))

def seal(header: bytes, # deflated JSON
         payload: bytes, # all sections
        ) -> bytes: # the container
    "Put magic, version, length and checksum in front."
    front = struct.pack("<8sII", ARTIFACT_MAGIC, ARTIFACT_VERSION, len(header))
    return front + hashlib.sha256(front + header + payload).digest() + header + payload

def open_container(data: bytes, # a whole container
                  ) -> tuple[dict, bytes]: # header (meta, tensors, sections), payload
    "Check everything that can be checked without decoding. Raises GolfError."
    if data[:8] != ARTIFACT_MAGIC:
        raise GolfError(f"a golfnb container must start with {ARTIFACT_MAGIC!r}, found {data[:8]!r}: it is another kind of file")
    if len(data) < PREFIX_BYTES:
        raise GolfError(f"a container must have more than {PREFIX_BYTES} bytes, found {len(data)}: the file is cut off, copy or make it again")
    _, version, length, checksum = struct.unpack(ARTIFACT_PREFIX, data[:PREFIX_BYTES])
    if version != ARTIFACT_VERSION:
        raise GolfError(f"the container must be of version {ARTIFACT_VERSION}, found {version}: read it with the golfnb that wrote it")
    if length > min(HEADER_LIMIT, len(data) - PREFIX_BYTES):
        raise GolfError(f"the container's header must have at most {min(HEADER_LIMIT, len(data) - PREFIX_BYTES):,} bytes, found {length:,}: the file is cut off or damaged")
    body = memoryview(data)[PREFIX_BYTES:]
    digest = hashlib.sha256(data[:16])
    digest.update(body)
    if digest.digest() != checksum:
        raise GolfError(f"the container's checksum must be {checksum.hex()[:16]}..., found {digest.hexdigest()[:16]}...: the file is cut off or damaged, copy or make it again")
    header = _parse_header(bytes(body[:length]))
    _check_sections(header, len(body) - length)
    return header, data[PREFIX_BYTES + length:]

def _parse_header(stored: bytes, # deflated JSON
                 ) -> dict: # meta, tensors, sections
    "The header with checked names, kinds and shapes, or GolfError."
    try:
        coder = zlib.decompressobj()
        text = coder.decompress(stored, HEADER_LIMIT)
        header = json.loads(text) if coder.eof and not coder.unused_data else None
    except (zlib.error, ValueError, RecursionError):
        header = None
    if not (isinstance(header, dict) and header.keys() == {"meta", "tensors", "sections"} and isinstance(header["meta"], dict)
            and isinstance(header["tensors"], list) and isinstance(header["sections"], list)):
        raise GolfError("the container's header must be JSON with meta, tensors and sections, found something else: the file is damaged or of another version")
    for row in header["tensors"]:
        if not _good_tensor(row):
            raise GolfError(f"a tensor in the header must be [name, kind, shape], found {str(row)[:80]}: the file is damaged")
    if len({row[0] for row in header["tensors"]}) != len(header["tensors"]):
        raise GolfError("the names of the tensors must differ, found one twice: the file is damaged")
    return header

def _good_tensor(row, # one entry of the header, anything JSON can hold
                ) -> bool:
    "A name, a known kind, and a shape that fits the kind and the limit."
    if not (isinstance(row, list) and len(row) == 3 and isinstance(row[0], str) and isinstance(row[1], str) and row[1] in KIND_DTYPES and isinstance(row[2], list)):
        return False
    shape = row[2]
    return len(shape) <= 8 and all(type(n) is int and 0 < n <= RAW_LIMIT for n in shape) and math.prod(shape) <= RAW_LIMIT and (len(shape) == 2 or row[1] not in INT_MAX)

def _check_sections(header: dict, # tensors checked
                    payload_bytes: int, # what follows the header
                   ) -> None:
    "GolfError unless the sections are exactly those that the tensors need, and as long as the payload."
    sizes, sections = section_plan(header["tensors"]), header["sections"]
    if sum(sizes.values()) > RAW_LIMIT:
        raise GolfError(f"the container must decode to at most {RAW_LIMIT:,} bytes, found {sum(sizes.values()):,} declared: it is damaged or not meant for this program")
    good = all(isinstance(s, list) and len(s) == 3 and isinstance(s[1], str) and type(s[2]) is int and s[2] >= 0 for s in sections)
    if not good or [s[0] for s in sections] != list(sizes) or sum(s[2] for s in sections) != payload_bytes:
        raise GolfError(f"the container's sections must be {list(sizes)} and fill {payload_bytes:,} bytes, found {str(sections)[:120]}: the file is damaged")

def unpack_bytes(data: bytes, # a container
                ) -> tuple[dict, dict[str, Packed]]: # meta; tensors by name, sorted
    "Decode a container with the standard library and numpy, executing nothing. Raises GolfError for any damage."
    header, payload = open_container(data)
    sizes, at, streams = section_plan(header["tensors"]), 0, {}
    for section, codec, stored in header["sections"]:
        streams[section] = [decompress_section(payload[at:at + stored], codec, sizes[section], section_shapes(header["tensors"], section)), 0]
        at += stored

    def take(section: str, dtype: str, shape: tuple) -> np.ndarray:
        raw, start = streams[section]
        array = np.frombuffer(raw, dtype, math.prod(shape), start).reshape(shape)
        streams[section][1] = start + array.nbytes
        return array

    packed = {}
    for name, kind, shape in header["tensors"]:
        scale = take("scale", "<f2", (shape[0],)) if kind in INT_MAX else None
        packed[name] = Packed(kind, tuple(shape), take(kind, KIND_DTYPES[kind], tuple(shape)), scale)
        if scale is not None and (packed[name].data.min() < -INT_MAX[kind] or packed[name].data.max() > INT_MAX[kind] or not np.isfinite(scale).all()):
            raise GolfError(f"{name} must hold integers of at most {INT_MAX[kind]} and finite scales, found others: the file was not made by golfnb")
    return header["meta"], packed

def save_artifact(path: str | Path, # final name
                  packed: Mapping[str, Packed], # what quantize_state gave
                  meta: dict, # settings, tokenizer_sha256, vocab_size, recipe, seed, steps
                  codec: str = "lzma", # one of CODECS
                  cap: int | None = None, # bytes allowed for container and code; None: no cap
                  code_bytes: int = 0, # bytes of the training script, which count
                 ) -> int: # bytes of the container
    "Write the artifact, whole or not at all. Raises GolfError when it cannot be written, or is over the cap: then it is kept as `path` + .over."
    path, data = Path(path), pack_bytes(packed, meta, codec)
    total = len(data) + code_bytes
    if cap is None or total <= cap:
        atomic_write(path, data)
        path.with_name(path.name + ".over").unlink(missing_ok=True)
        return len(data)
    kept = path.with_name(path.name + ".over")
    atomic_write(kept, data)
    raise GolfError(f"artifact and code must have at most {cap:,} bytes, found {total:,} ({total - cap:,} too many): the artifact is kept as {kept}, "
                    f"make a smaller one with `golfnb quantize {path.parent} --target-bytes {cap}`")

def _part_files(path: Path, # the name that the parts share
               ) -> list[Path]: # path.000, path.001 ..., sorted, as far as they exist
    "The parts of a container."
    try:
        return sorted(p for p in path.parent.iterdir() if p.name[:-3] == path.name + "." and p.name[-3:].isdigit())
    except OSError:
        return []

def read_container(path: str | Path, # a container, or the name its parts share
                  ) -> bytes: # the container, unchecked
    "Read a file or join its parts. Raises GolfError when there is neither."
    path = Path(path)
    try:
        return path.read_bytes() if path.is_file() or not _part_files(path) else join_parts(path)
    except OSError as error:
        raise GolfError(f"cannot read {path} ({error.strerror}): expected a golfnb container or its parts {path.name}.000 and so on, check the path") from None

def load_artifact(path: str | Path, # a container
                 ) -> tuple[dict, dict[str, Packed]]: # meta, tensors
    "Read and decode a container. Raises GolfError for a missing file or any damage."
    data = read_container(path)
    try:
        return unpack_bytes(data)
    except GolfError as error:
        raise GolfError(f"{path}: {error}") from None

PART_BYTES = 15 * 2**20 # of a part's file, at most

PART_MAGIC = b"\x93GOLFPT\n"

PART_PREFIX = "<8sIII32s" # magic, version, index, count, SHA-256 of the container; then SHA-256 of prefix and data; then data

PART_OVERHEAD = 84

def split_parts(data: bytes, # a container
                part_bytes: int = PART_BYTES, # of a file, at most
               ) -> list[bytes]: # the files' contents
    "Cut a container. Raises GolfError when `part_bytes` has no room for the part's own header."
    room, whole = part_bytes - PART_OVERHEAD, hashlib.sha256(data).digest()
    if room < 1:
        raise GolfError(f"a part must have more than {PART_OVERHEAD} bytes, found {part_bytes}: allow more")
    pieces, parts = [data[at:at + room] for at in range(0, max(len(data), 1), room)], []
    for index, piece in enumerate(pieces):
        front = struct.pack(PART_PREFIX, PART_MAGIC, 1, index, len(pieces), whole)
        parts.append(front + hashlib.sha256(front + piece).digest() + piece)
    return parts

def join_parts(path: str | Path, # the name that the parts share
              ) -> bytes: # the container
    "Join `path`.000, `path`.001 and so on. Raises GolfError for a part that is missing, damaged, misplaced or from elsewhere."
    path, pieces, first = Path(path), [], None
    files = _part_files(path)
    for number, file in enumerate(files):
        if file.name != f"{path.name}.{number:03d}":
            raise GolfError(f"part {path}.{number:03d} is missing, found {file.name}: copy all parts")
        data = file.read_bytes()
        if len(data) < PART_OVERHEAD or data[:8] != PART_MAGIC or hashlib.sha256(data[:52] + data[PART_OVERHEAD:]).digest() != data[52:PART_OVERHEAD]:
            raise GolfError(f"{file} must be an undamaged part of a container, found otherwise: copy it again")
        _, version, index, count, whole = struct.unpack(PART_PREFIX, data[:52])
        first = first or (version, count, whole)
        if index != number or (version, count, whole) != first or version != 1:
            raise GolfError(f"{file} must be part {number} of the same container as the first, found part {index} of {count}{' of another' if whole != first[2] else ''}: parts were renamed or mixed, copy them again")
        pieces.append(data[PART_OVERHEAD:])
    if len(files) != first[1]:
        raise GolfError(f"{path} must have {first[1]} parts, found {len(files)}: copy the missing ones or remove the surplus")
    return b"".join(pieces)

def save_weights(path: str | Path, # final name; parts get .000, .001 ... appended
                 named: Mapping[str, torch.Tensor], # published name -> fp32, bf16, fp16 or fp64 tensors
                 meta: dict, # as for save_artifact
                 part_bytes: int = PART_BYTES, # a larger container is split
                ) -> int: # bytes of the container
    "Save unquantized weights, whole or not at all. Raises GolfError for other dtypes, for weights that are not finite, and when it cannot be written."
    path, kinds = Path(path), {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.float64: "fp64"}
    for name, w in named.items():
        if w.dtype not in kinds:
            raise GolfError(f"{name} must be fp32, bf16, fp16 or fp64 to be saved, found {w.dtype}: convert it")
    data = pack_bytes({name: pack_plain(name, w, kinds[w.dtype]) for name, w in named.items()}, meta, "none")
    split = len(data) > part_bytes
    files = {path.with_name(f"{path.name}.{i:03d}"): part for i, part in enumerate(split_parts(data, part_bytes))} if split else {path: data}
    for file, content in files.items():
        atomic_write(file, content)
    for stale in {path, *_part_files(path)} - set(files):
        stale.unlink(missing_ok=True)
    return len(data)

LEDGER_NAMES = {"int6": "int6 weights", "int8": "int8 tables", "fp16": "fp16 controls", "fp32": "fp32 controls", "fp64": "fp64 weights", "bf16": "bf16 weights", "scale": "row scales"}

def artifact_header(path: str | Path, # a container
                   ) -> dict: # meta, tensors [[name, kind, shape]], sections [[section, codec, stored bytes]], file_bytes
    "What a container says of itself, checksum verified, nothing decoded. Raises GolfError for a missing file or damage."
    data = read_container(path)
    try:
        return open_container(data)[0] | {"file_bytes": len(data)}
    except GolfError as error:
        raise GolfError(f"{path}: {error}") from None

def ledger(packed: Mapping[str, Packed], # what was packed
           code_bytes: int, # of the training script
           container_bytes: int, # of the artifact
           sections: list | None = None, # artifact_header(path)["sections"]; None: shares are estimated
          ) -> list[tuple[str, int]]: # (part, bytes), summing to code_bytes + container_bytes
    "Bytes of each part of a submission."
    if sections is None:
        guess = _entropy_shares(packed)
        whole = max(sum(guess.values()), 1)
        sections = [(section, "", int(container_bytes * n / whole)) for section, n in guess.items()]
    rows = [(LEDGER_NAMES[section], stored) for section, _, stored in sections]
    return [("code", code_bytes), *rows, ("overhead", container_bytes - sum(n for _, n in rows))]

def _entropy_shares(packed: Mapping[str, Packed], # what was packed
                   ) -> dict[str, float]: # section -> bytes, were the codec ideal
    "What each section would take at its entropy."
    shares = dict.fromkeys(SECTIONS, 0.0)
    for p in packed.values():
        shares[p.kind] += (entropy_bits(p.data) if p.kind in INT_MAX else 8 * p.data.itemsize) * p.data.size / 8
        shares["scale"] += p.scale.nbytes if p.scale is not None else 0
    return {section: n for section, n in shares.items() if n}

# ---- ttt ----

class Ledger:
    "Which targets have been scored; refuses a second score and an update that would see an unscored target."

    def __init__(self, n_targets: int):  # targets of the stream
        self.n_targets, self.upto = n_targets, 0   # targets 0 .. upto-1 have their final score
        self.history = []                          # ("score" or "train", first target, one past the last)

    def scored(self, a: int, b: int):
        "Record that targets a .. b-1 got their score just now, on all ranks. GolfError unless they follow the last scored one."
        if a != self.upto or not a <= b <= self.n_targets:
            raise GolfError(f"targets must be scored once, from left to right: expected the next to be {self.upto:,}, found {a:,} to {b:,} of {self.n_targets:,}; start a new pass")
        self.upto = b
        self.history.append(("score", a, b))

    def train(self, a: int, b: int):
        "Ask before an update that uses targets a .. b-1. GolfError if one of them has no score yet."
        if not 0 <= a < b <= self.upto:
            raise GolfError(f"an update may use scored targets only: it wants {a:,} to {b:,}, scored are 0 to {self.upto:,}; score the chunk first")
        self.history.append(("train", a, b))

def chunk_windows(starts: Tensor, keeps: Tensor,  # as from windows()
                  row: int,         # tokens of a window
                  chunk: int,       # targets of a chunk
                  n_targets: int,
                  ) -> list[tuple[int, int]]:  # per chunk: first window, one past the last
    "Share the windows out over the chunks by their first scored target; every window goes to one chunk. `starts` and `keeps` are int64 [windows]."
    owner = (starts + row - keeps) // chunk
    n_chunks = -(-n_targets // chunk)
    bounds = torch.searchsorted(owner, torch.arange(n_chunks + 1)).tolist()
    return list(zip(bounds[:-1], bounds[1:]))

def adapt_steps(n_rows: int,       # rows of the chunk
                batch_seqs: int,   # rows of one step per rank, at most
                ranks: Ranks,
                ) -> list[tuple[int, int, int]]:  # per step: my first row, one past my last (may be none), rows of all ranks
    "The steps of one epoch over a chunk, as many on every rank."
    shares = [share_of(n_rows, Ranks(r, ranks.world)) for r in range(ranks.world)]
    steps = []
    for j in range(0, max(hi - lo for lo, hi in shares), batch_seqs):
        cuts = [(min(lo + j, hi), min(lo + j + batch_seqs, hi)) for lo, hi in shares]
        steps.append((*cuts[ranks.rank], sum(b - a for a, b in cuts)))
    return steps

@torch.no_grad()
def named_masters(model: Golf,
                  state: dict[str, Tensor],  # published name -> tensor, all of them
                  ) -> tuple[dict, dict]:    # banks [n, r, c] by bank name, other tensors by parameter name, fp32 (or fp64)
    "A named state in the model's own storage form, without the rounding to its dtype."
    own = model.role_params()
    def like(params): return {n: torch.zeros_like(p.detach(), dtype=torch.promote_types(p.dtype, torch.float32)) for n, p in params.items()}
    banks, others = like(own["bank"]), like(own["table"] | own["scalar"])
    for name, view in published_views(model, banks, others).items():
        view.copy_(state[name])
    return banks, others

def ttt_engine(model: Golf, layout: Layout, state: dict[str, Tensor], cfg: Config, ranks: Ranks) -> Engine:
    "Load a state into the model, freeze its lowest blocks and put an SGD engine on it, the global norm clipped."
    load_named(model, state)
    model.zero_grad(set_to_none=True)
    model.frozen = cfg.ttt_freeze_blocks, cfg.ttt_freeze_scope
    engine = Engine(model.role_params(), layout, ranks, rule="sgd", bank_lr=cfg.ttt_lr, table_lr=cfg.ttt_lr, scalar_lr=cfg.ttt_lr,
                          clip="global", max_norm=cfg.ttt_grad_clip)
    engine_load(engine, *named_masters(model, state))
    return engine

def row_loss(model: Callable,  # ids [B, T] -> logits before the softcap
             cap: float) -> Callable:  # (ids [B, T], targets [B, T], weights [B]) -> 0-dim
    "The loss of adapting: each row's mean, weighted and summed; `cap` bounds the logits."
    def loss_of(ids, targets, weights):
        nats = F.cross_entropy(softcap(model(ids), cap).flatten(0, -2), targets.flatten(), reduction="none")
        return (nats.view(targets.shape).mean(1) * weights).sum()
    return loss_of

class RowStep:
    "Gradients of up to `rows` rows, left where the engine looks for them."

    def __init__(self, engine: Engine, loss_fn: Callable,  # see row_loss
                 rows: int,  # room for so many
                 seq: int):  # tokens of a row
        self.loss_fn, self.device = loss_fn, engine.device
        self.params = [s for b in engine.banks.values() for s in getattr(b.replica, "slots", [b.replica])] + [p for g in engine.groups for p in g.params.values()]
        self.ids, self.weights = torch.zeros(rows, seq + 1, dtype=torch.int64, device=self.device), torch.zeros(rows, dtype=engine.full, device=self.device)
        self.place, self.span = torch.arange(rows, device=self.device), torch.arange(seq + 1, device=self.device)
        self.recorded = Recorded(self.backward, self.device)

    def backward(self):
        "Gradients of the rows that stand in `ids` and `weights`, into `grads`; recorded on CUDA."
        self.grads = torch.autograd.grad(self.loss_fn(self.ids[:, :-1], self.ids[:, 1:], self.weights), self.params, allow_unused=True)

    def __call__(self, tokens: Tensor,  # int [N + 1]
                 first: int, n_rows: int,   # the rows' first target, and how many there are
                 a: int, b: int,            # my rows of this step
                 weight: float):            # of each of them
        "Forward and backward of rows a .. b-1."
        rows = (a + self.place).clamp(max=n_rows - 1)
        self.ids.copy_(tokens[first + rows[:, None] * (len(self.span) - 1) + self.span])
        self.weights.copy_(self.place < b - a).mul_(weight)
        self.recorded()
        for p, g in zip(self.params, self.grads):
            p.grad = g

def warm_adapting(engine: Engine, step: RowStep, vocab: int, steps: int = 4):
    "Steps on random tokens, then everything as if they had not been."
    saved, seq, g = snapshot(engine), len(step.span) - 1, torch.Generator().manual_seed(0)
    tokens = torch.randint(vocab, (len(step.ids) * seq + 1,), generator=g).to(engine.device)
    for _ in range(steps):
        step(tokens, 0, len(step.ids), 0, len(step.ids), 1 / len(step.ids))
        engine.step(1.0, 0.9)
    restore(engine, saved)

def ttt_multiplier(chunk: int, n_chunks: int) -> float:
    "Cosine over the chunks, from 1 at the first to 0 at the last. `chunk` of `n_chunks`, from 0 on."
    return 0.5 * (1 + math.cos(math.pi * chunk / max(n_chunks - 1, 1)))

def step_rows(cfg: Config, ranks: Ranks) -> int:
    "Rows of one step on one rank: its share of a chunk, at most TTT_BATCH_SEQS."
    return min(-(-(cfg.ttt_chunk_tokens // cfg.eval_seq_len) // ranks.world), cfg.ttt_batch_seqs)

def adapt_chunk(engine: Engine,
                step: RowStep,     # with room for step_rows() rows
                tokens: Tensor,    # int [N + 1]
                first: int,        # first target of the chunk
                length: int,       # its targets
                multiplier: float, # of the learning rate
                cfg: Config, ledger: Ledger):
    "Train on a scored chunk: TTT_EPOCHS passes over its rows, shared over the ranks. GolfError, before anything moves, if it has no score."
    n_rows = length // cfg.eval_seq_len
    for _ in range(cfg.ttt_epochs):
        for a, b, total in adapt_steps(n_rows, cfg.ttt_batch_seqs, engine.ranks):
            ledger.train(first, first + n_rows * cfg.eval_seq_len)
            step(tokens, first, n_rows, a, b, engine.ranks.world / total)
            engine.step(multiplier, cfg.ttt_momentum)

def score_first(model: Golf,               # is changed: it ends as adapted as it gets
                layout: Layout,            # of the model, for ranks.world ranks
                state: dict[str, Tensor],  # published name -> tensor: the artifact as decoded
                tokens: Tensor,            # int [N + 1] on the model's device, the same on every rank
                table: ByteTable,          # on the same device
                cfg: Config,               # eval_* and ttt_* settings
                ranks: Ranks,              # every rank must call
                forward=None,              # (ids, keep) -> logits, with .cap; default the model (pass a compiled one here)
                loss_fn=None,              # see row_loss; default the model's, compiled where the settings say so
                log: RunLog | None = None, batch_seqs: int | None = None,  # rows of a scoring forward; default from VAL_BATCH_SIZE
                out: Tensor | None = None, # float [N]: receives each target's nats, on the rank that scored it
                ) -> tuple[float, float, Ledger]:  # nats per token, bits per byte, what was done when
    "Legal score-first test-time training (parameter-golf PR #549). GolfError if any rule would be broken."
    forward, n, chunk = model if forward is None else forward, tokens.numel() - 1, cfg.ttt_chunk_tokens
    row = min(cfg.eval_seq_len, n)
    starts, keeps = windows(n, cfg.eval_seq_len, cfg.eval_stride)
    batch = min(batch_seqs or cfg.rows_per_score(ranks.world), len(starts))
    parts = chunk_windows(starts, keeps, row, chunk, n)
    engine, ledger, reader = ttt_engine(model, layout, state, cfg, ranks), Ledger(n), LateReader()
    step = RowStep(engine, loss_fn or compiled(row_loss(model, model.cap), cfg, engine.device), step_rows(cfg, ranks), cfg.eval_seq_len)
    if engine.device.type == "cuda" and len(parts) > 1:
        warm_adapting(engine, step, cfg.vocab_size)
    sums, begins = torch.zeros(3, dtype=torch.float64, device=tokens.device), starts.to(tokens.device)
    for c, (lo, hi) in enumerate(parts):
        a, b = share_of(hi - lo, ranks)
        sums += score_windows(forward, tokens, table, begins[lo + a:lo + b], keeps[lo + a:lo + b], row, batch, out)
        ledger.scored(ledger.upto, ledger.upto + int(keeps[lo:hi].sum()))
        if log is not None and c % 10 == 0 and (said := reader.push(torch.cat([ranks.sum(sums.clone()), sums.new_full((1,), c)]))):
            log_chunk(log, int(said[3]), len(parts), said)
        if c + 1 < len(parts):
            adapt_chunk(engine, step, tokens, c * chunk, chunk, ttt_multiplier(c, len(parts)), cfg, ledger)
    model.frozen = 0, "all"
    sums = ranks.sum(sums).tolist()
    if sums[2] != n or ledger.upto != n:
        raise GolfError(f"every target must be scored once: {n:,} targets, {sums[2]:,.0f} scored; do all ranks hold the same tokens?")
    log_chunk(log, len(parts) - 1, len(parts), sums)
    return sums[0] / n, bits_per_byte(sums[0], sums[1]), ledger

def log_chunk(log: RunLog | None, chunk: int, n_chunks: int,  # which chunk, from 0 on, of how many
              sums: list[float]):  # of all targets scored so far: nats, bytes, count
    "A line and an event: the running score over everything scored up to a chunk."
    if log is None or sums[1] <= 0:
        return
    loss, bpb = sums[0] / sums[2], bits_per_byte(sums[0], sums[1])
    log.event("ttt", chunk=chunk, chunks=n_chunks, loss=loss, bpb=bpb)
    log.line(f"  ttt_chunk [{chunk + 1}/{n_chunks}] bpb={bpb:.6f}")

# ---- adapters ----

def document_spans(tokens: Tensor,  # int [N + 1]
                   ) -> np.ndarray: # int64 [documents, 2]: first target, one past the last
    "Cut a stream's targets into documents. GolfError for a stream without targets."
    n = tokens.numel() - 1
    if n < 1:
        raise GolfError(f"scoring needs at least one target: found a stream of {n + 1} tokens; give a longer one")
    edges = np.concatenate([[0], (tokens[1:n] == BOS_ID).nonzero()[:, 0].cpu().numpy() + 1, [n]])
    return np.stack([edges[:-1], edges[1:]], 1)

def row_fill(chunk: np.ndarray,   # int64 [chunks], number of each in its document
             capacity: int,       # chunks of a row, at least 2
             ) -> tuple[np.ndarray, np.ndarray]:  # int64 [chunks] before it in its row; bool [chunks]: a new row begins half a row back
    "Where the chunks of a document lie in its rows."
    fresh = capacity - capacity // 2
    rows = np.maximum((chunk - capacity) // fresh + 1, 0)
    return chunk - rows * fresh, (chunk >= capacity) & ((chunk - capacity) % fresh == 0)

def deal_documents(lengths: np.ndarray,  # int64 [documents] chunks of each
                   lanes: int,           # of all ranks
                   ) -> list[list[int]]: # per lane: its documents, in order
    "Deal documents out to lanes, the longest first, each to the lane with the least to do; ties by number."
    load, dealt = [(0, lane) for lane in range(lanes)], [[] for _ in range(lanes)]
    for doc in np.argsort(-lengths, kind="stable").tolist():
        chunks, lane = load[0]
        dealt[lane].append(doc)
        heapq.heapreplace(load, (chunks + int(lengths[doc]), lane))
    return dealt

def lanes_needed(lengths: np.ndarray,  # int64 [documents] chunks of each
                 most: int,            # of a rank
                 world: int) -> int:   # lanes of each rank, at least 1
    "The fewest lanes that are done when the longest document is, or `most`."
    longest = int(lengths.max())
    lanes = min(most, -(-int(lengths.sum()) // (longest * world)))
    while lanes < most and max(lengths[docs].sum() for docs in deal_documents(lengths, lanes * world)) > longest:
        lanes += 1
    return lanes

def lane_plan(spans: np.ndarray,  # int64 [documents, 2], see document_spans
              cfg: Config,        # ttt_chunk_size, ttt_batch_size, eval_seq_len
              ranks: Ranks,
              ) -> dict[str, np.ndarray]:  # int64 [steps, lanes] each: doc (-1: idle), first target, count of targets, fill in tokens, again (new row), goes on
    "What each of this rank's lanes does at each step."
    size = cfg.ttt_chunk_size
    lengths = -(-(spans[:, 1] - spans[:, 0]) // size)
    lanes = lanes_needed(lengths, cfg.ttt_batch_size, ranks.world)
    mine = deal_documents(lengths, lanes * ranks.world)[ranks.rank * lanes:(ranks.rank + 1) * lanes]
    steps = max(int(lengths[docs].sum()) for docs in mine)
    doc, chunk = np.full((lanes, steps), -1), np.zeros((lanes, steps), np.int64)
    for lane, docs in enumerate(mine):
        n = int(lengths[docs].sum())
        doc[lane, :n] = np.repeat(docs, lengths[docs])
        chunk[lane, :n] = np.concatenate([np.arange(k) for k in lengths[docs]] or [np.zeros(0, np.int64)])
    first = np.where(doc < 0, 0, spans[doc, 0] + chunk * size)
    fill, again = row_fill(chunk, cfg.eval_seq_len // size)
    plan = {"doc": doc, "first": first, "count": np.where(doc < 0, 0, np.minimum(size, spans[doc, 1] - first)), "fill": fill * size, "again": again,
            "goes_on": (doc >= 0) & (chunk + 1 < lengths[doc])}
    return {name: np.ascontiguousarray(array.T).astype(np.int64) for name, array in plan.items()}

def adapter_shapes(model: Golf) -> list[tuple[int, int]]:  # (out, in) of each of BLOCK_MATRICES
    "Shapes of a block's matrices, in logical orientation."
    return [tuple(w.shape) for w in block_weights(model)[0][:len(BLOCK_MATRICES)]]

def first_adapters(model: Golf, rank: int,
                   seed: int = 0) -> Tensor:  # [layers, parameters of a block], fp32 (fp64 of an fp64 model), on the model's device
    "What each document starts with: A [in, rank] uniform in +-1/sqrt(in), then B [rank, out] zero, matrix after matrix."
    g, parts = torch.Generator().manual_seed(seed), []
    for rows, cols in adapter_shapes(model) * model.cfg.num_layers:
        parts += [(2 * torch.rand(rank * cols, generator=g, dtype=torch.float64) - 1) / math.sqrt(cols), torch.zeros(rows * rank, dtype=torch.float64)]
    return torch.cat(parts).view(model.cfg.num_layers, -1).to(model.tok_emb.device, torch.promote_types(model.compute, torch.float32))

def adapter_pairs(flat: Tensor,  # float [lanes, parameters of a block]
                  w: BlockWeights) -> list[tuple[Tensor, Tensor]]:  # per matrix: A [lanes, in, rank], B [lanes, rank, out]; dtype of flat
    "A block's adapters as views."
    shapes = [m.shape for m in w[:len(BLOCK_MATRICES)]]
    rank = flat.shape[1] // sum(map(sum, shapes))
    parts = iter(flat.split([rank * n for shape in shapes for n in reversed(shape)], 1))
    return [(next(parts).unflatten(1, (cols, rank)), next(parts).unflatten(1, (rank, rows))) for rows, cols in shapes]

def adapted_linear(x: Tensor,       # float [lanes, T, in]
                   weight: Tensor,  # [out, in], dtype of x
                   pair: tuple[Tensor, Tensor],  # A [lanes, in, rank], B [lanes, rank, out], dtype of x
                   ) -> Tensor:     # [lanes, T, out], dtype of x
    "x W^T + x A B, another A and B in each lane."
    return F.linear(x, weight) + torch.bmm(torch.bmm(x, pair[0]), pair[1])

def embed_chunk(model: Golf,
                ids: Tensor,   # int64 [lanes, 2 + T]: two tokens before the chunk, then the chunk
                fill: Tensor,  # int64 [lanes] tokens before it in its row: 0, or 2 and more
                ) -> Tensor:   # [lanes, T, D] in the compute dtype
    "The embedded chunk; at the beginning of a row as if there were nothing before."
    return torch.where((fill == 0)[:, None, None], embed_input(model, ids[:, 2:]), embed_input(model, ids)[:, 2:])

def attend_stored(q: Tensor,  # float [lanes, T, H, head]
                  keys: tuple[Tensor, Tensor], values: tuple[Tensor, Tensor],  # stored, then the chunk's own: [lanes, KV, S, head], [lanes, KV, T, head], dtype of q
                  mask: Tensor,  # bool [lanes, 1, 1, T, S + T]
                  ) -> Tensor:   # [lanes, T, H, head], dtype of q
    "Grouped-query attention under a mask; the heads that share a key stand below each other as more queries."
    lanes, T, H, D = q.shape
    q = q.view(lanes, T, keys[0].shape[1], -1, D).permute(0, 2, 3, 1, 4).flatten(2, 3)
    scores = torch.cat([q @ k.mT for k in keys], -1).unflatten(2, (-1, T)).to(torch.promote_types(q.dtype, torch.float32)) / math.sqrt(D)
    shares = scores.masked_fill(~mask, -math.inf).softmax(-1).to(q.dtype).flatten(2, 3)
    y = sum(p @ v for p, v in zip(shares.split([v.shape[2] for v in values], -1), values))
    return y.unflatten(2, (-1, T)).permute(0, 3, 1, 2, 4).reshape(lanes, T, H, D)

def adapted_block(x: Tensor, x0: Tensor,  # [lanes, T, D], compute dtype
                  w: BlockWeights,
                  norm: Tensor,              # [D] factor after its norms, fp32 (or fp64)
                  flat: Tensor,              # [lanes, parameters of a block] its adapters, dtype of x
                  cos: Tensor, sin: Tensor,  # [lanes * T, rope_dims/2]
                  ve: Tensor | None,         # [lanes, T, KV*head], compute dtype
                  keys: Tensor, values: Tensor,  # stored: [lanes, KV, S, head], dtype of x
                  fill: Tensor,              # int64 [lanes] how many of them each lane has
                  head: int, slope: float, xsa: bool,  # channels of a head; of the activation below zero: ratio; exclusive self-attention
                  ) -> tuple[Tensor, Tensor, Tensor]:  # x [lanes, T, D]; the chunk's keys and values [lanes, KV, T, head], without gradient; dtype of x
    "One block, as `run_block` of chapter 08."
    pairs, T = adapter_pairs(flat, w), x.shape[1]
    place, stored = (torch.arange(n, device=x.device) for n in (T, keys.shape[2]))
    mask = torch.cat([(stored < fill[:, None])[:, None].expand(-1, T, -1), (place <= place[:, None]).expand(len(fill), -1, -1)], 2)[:, None, None]
    x_in, n = mix_norm(x, x0, w.mix, norm)
    q, k, v = (adapted_linear(n.to(x.dtype), m, p) for m, p in zip(w[:3], pairs))
    q, k, v = (t.unflatten(-1, (-1, head)) for t in (q, k, v if ve is None else v + ve))
    q, k = (t.view_as(s) for t, s in zip(qk_norm_rope_gain(q.flatten(0, 1)[None], k.flatten(0, 1)[None], cos, sin, w.gain), (q, k)))
    y = attend_stored(q, (keys, k.transpose(1, 2)), (values, v.transpose(1, 2)), mask)
    y = exclusive(y, v) if xsa else y
    x1 = x_in + w.attn_scale.to(x.dtype) * adapted_linear(y.flatten(2), w.out, pairs[3])
    h = squared_leaky(adapted_linear((rms_norm(x1) * norm).to(x.dtype), w.up, pairs[4]), slope)
    return x1 + w.mlp_scale.to(x.dtype) * adapted_linear(h, w.down, pairs[5]), k.transpose(1, 2).detach(), v.transpose(1, 2).detach()

def adapted_walk(model: Golf,
                 ids: Tensor,   # int64 [lanes, 2 + T], see embed_chunk
                 fill: Tensor,  # int64 [lanes]
                 flats: list[Tensor],  # per block [lanes, parameters of a block], compute dtype
                 keys: Tensor, values: Tensor,  # stored: [layers, lanes, KV, S, head], compute dtype
                 cfg: Config,   # eval_seq_len: a row's length sets the rotary base
                 run: Callable,  # adapted_block, compiled or not
                 ) -> tuple[Tensor, Tensor, Tensor]:  # x [lanes, T, D]; the chunk's keys and values [layers, lanes, KV, T, head]; compute dtype
    "All blocks with their skips, from tokens to the last residual stream."
    layers = model.cfg.num_layers
    x0 = embed_chunk(model, ids, fill)
    x = x0.detach().requires_grad_(torch.is_grad_enabled())  # so that the first block is of the same kind as the second
    ves, weights = value_embeddings(model, ids[:, 2:]), block_weights(model)
    places = (fill[:, None] + torch.arange(ids.shape[1] - 2, device=ids.device)).flatten()
    cos, sin = (table[places] for table in model_rotary(model, cfg.eval_seq_len))
    half, source, outputs, made = layers // 2, skip_source(layers), {}, []
    skips = skip_factors(model) if half else ()
    for i in model.order:
        block = model.blocks[i]
        if source[i] is not None:
            x = x + skips[i - half] * outputs[source[i]]
        norm = torch.full_like(model.attn_scale[i], block.norm_scale)
        x, k, v = run(x, x0, weights[i], norm, flats[i], cos, sin, None if block.ve is None else ves[block.ve], keys[i], values[i], fill, block.head_dim, block.slope, block.xsa)
        outputs[i] = x
        made.append((k, v))
    return x, *(torch.stack(t) for t in zip(*made))

def chunk_loss(x: Tensor,        # [lanes, T, D] the last residual stream
               table: Tensor,    # [V, D] token embedding, any float dtype
               targets: Tensor,  # int64 [lanes, T]
               goes_on: Tensor,  # float [lanes]
               cap: float) -> tuple[Tensor, Tensor]:  # loss [], nats [lanes, T] without gradient; fp32 (or fp64)
    "Each target's nats, and their mean in each lane, summed over the lanes that go on."
    nats = token_nll(F.linear(rms_norm(x), table.to(x.dtype)), targets, cap)
    return (nats.mean(1) * goes_on).sum(), nats.detach()

def adapted_step(model: Golf, cfg: Config) -> Callable:
    "(ids [lanes, 2 + T + 1], fill, flats, keys, values, goes_on [lanes]) -> loss, nats [lanes, T], the chunk's keys and values; compiled where the settings say so."
    run, score = (compiled(f, cfg, model.tok_emb.device) for f in (adapted_block, chunk_loss))

    def step(ids, fill, flats, keys, values, goes_on):
        x, k, v = adapted_walk(model, ids[:, :-1], fill, flats, keys, values, cfg, run)
        return *score(x, model.tok_emb, ids[:, 3:], goes_on, model.cap), k, v
    return step

ADAPTER_EPS = 1e-10

def adapter_update(flat: Tensor,     # [lanes, parameters of a block] adapters as the step reads them, compute dtype, in place
                   masters: Tensor, second: Tensor,  # fp32 (or fp64), same shape, in place: their masters and mean squared gradient
                   count: Tensor,    # [lanes, 1] steps so far, dtype of masters
                   grad: Tensor,     # like flat
                   goes_on: Tensor,  # [lanes], dtype of masters: 1 where the document has another chunk
                   first: Tensor,    # [parameters of a block], dtype of masters
                   lr: float, beta2: float) -> None:
    "One step of Adam without momentum in the lanes that go on, a fresh start in the others."
    on, grad = goes_on[:, None] > 0, grad.to(masters.dtype)
    steps, mean_square = count + 1, torch.lerp(second, grad.square(), 1 - beta2)
    moved = torch.where(on, masters - lr * grad / ((mean_square / (1 - beta2 ** steps)).sqrt() + ADAPTER_EPS), first)
    masters.copy_(moved)
    flat.copy_(moved)
    second.copy_(torch.where(on, mean_square, 0))

class DocumentLedger:
    "Which targets of each document have been scored; refuses a second score, a gap, and an update that would see an unscored target."

    def __init__(self, spans: np.ndarray):  # int64 [documents, 2]
        self.spans, self.upto, self.history = spans, spans[:, 0].copy(), []  # history: ("score" or "train", documents, first targets, ends)

    def scored(self, docs: np.ndarray,               # int64 [n], numbers of documents
               a: np.ndarray, b: np.ndarray):  # a, b: int64 [n], first target, one past the last
        "Targets a .. b-1 of these documents got their score. GolfError unless they follow each document's last scored one."
        if (a != self.upto[docs]).any() or (b <= a).any() or (b > self.spans[docs, 1]).any() or len(set(docs.tolist())) != len(docs):
            raise GolfError(f"targets of a document must be scored once, from left to right: expected the next of documents {docs[:4].tolist()} to be {self.upto[docs][:4].tolist()}, found {a[:4].tolist()}; start a new pass")
        self.upto[docs] = b
        self.history.append(("score", docs, a, b))

    def train(self, docs: np.ndarray,               # as in `scored`
              a: np.ndarray, b: np.ndarray):  # a, b: int64 [n], first target, one past the last
        "Ask before an update of these documents' adapters with targets a .. b-1. GolfError if one of them has no score yet, or is another document's."
        if (a < self.spans[docs, 0]).any() or (b <= a).any() or (b > self.upto[docs]).any():
            raise GolfError(f"an update may use scored targets of its own document only: documents {docs[:4].tolist()} want up to {b[:4].tolist()}, scored are {self.upto[docs][:4].tolist()}; score the chunk first")
        self.history.append(("train", docs, a, b))

class Lanes:
    "Adapters, stored keys and sums of one rank's lanes, and the step that moves them all."

    def __init__(self, model: Golf, tokens: Tensor, table: ByteTable, cfg: Config,  # as in score_documents
                 plan: dict[str, np.ndarray],   # int64 [steps, lanes] each, see lane_plan
                 step: Callable | None = None,  # see adapted_step
                 out: Tensor | None = None):    # float [N + 1]: receives each target's nats; the last place is for what does not count
        device, lanes, size = tokens.device, plan["doc"].shape[1], cfg.ttt_chunk_size
        self.model, self.tokens, self.table, self.cfg, self.out = model, tokens, table, cfg, out
        self.plan = {k: torch.from_numpy(plan[k]).to(device) for k in ("first", "count", "fill", "goes_on")}
        self.step, self.run, self.update = step or adapted_step(model, cfg), compiled(adapted_block, cfg, device), compiled(adapter_update, cfg, device)
        self.first = first_adapters(model, cfg.ttt_lora_rank)
        self.masters = self.first[:, None].repeat(1, lanes, 1)
        self.flat = self.masters.to(model.compute, copy=True)
        self.flats = [block.detach().requires_grad_() for block in self.flat.unbind(0)]
        self.second, self.count = torch.zeros_like(self.masters), torch.zeros(lanes, 1, dtype=self.masters.dtype, device=device)
        self.keys, self.values = (torch.zeros(cfg.num_layers, lanes, cfg.num_kv_heads, cfg.eval_seq_len // size * size, cfg.head_dim, dtype=model.compute, device=device) for _ in range(2))
        self.total, self.at = torch.zeros(3, dtype=torch.float64, device=device), torch.zeros(1, dtype=torch.int64, device=device)
        self.lane, self.place = torch.arange(lanes, device=device)[:, None], torch.arange(size, device=device)
        steps, again = plan["again"].nonzero()
        self.rows = torch.from_numpy(np.stack([again, plan["first"][steps, again]], 1)).to(device)  # lane and first target of each new row
        self.half, self.row = int(plan["fill"][steps[:1], again[:1]].sum()), torch.zeros(1, dtype=torch.int64, device=device)
        self.recorded, self.read_again = Recorded(self.advance, device), Recorded(self.begin_row, device)

    def window(self, first: Tensor,  # int64 [lanes] first targets
               before: int, size: int) -> Tensor:  # int64 [lanes, before + size]
        "`before` + `size` tokens from `before` places ahead of each first target on; places outside the stream repeat its ends."
        return self.tokens[(first[:, None] + torch.arange(-before, size, device=first.device)).clamp(0, self.tokens.numel() - 1)].long()

    def advance(self):
        "Score each lane's next chunk, add it up, learn from it, store its keys."
        first, count, fill, goes_on = (self.plan[k].index_select(0, self.at)[0] for k in ("first", "count", "fill", "goes_on"))
        ids, goes_on = self.window(first, 2, len(self.place) + 1), goes_on.to(self.masters.dtype)
        loss, nats, k, v = self.step(ids, fill, self.flats, self.keys[..., :-len(self.place), :], self.values[..., :-len(self.place), :], goes_on)  # nothing looks at a row's last chunk
        valid = self.place < count[:, None]
        n_bytes = target_bytes(self.table, ids[:, 2:-1], ids[:, 3:]) * valid
        self.total += torch.stack([torch.where(valid, nats, 0).double().sum(), n_bytes.sum().double(), valid.sum().double()])
        if self.out is not None:
            at = torch.where(valid, first[:, None] + self.place, self.tokens.numel() - 1)  # one place past the last target takes what does not count
            self.out.scatter_(0, at.flatten(), nats.flatten().to(self.out.dtype))
        grads = torch.autograd.grad(loss, self.flats)
        with torch.no_grad():
            for flat, master, second, grad, start in zip(self.flat, self.masters, self.second, grads, self.first):
                self.update(flat, master, second, self.count, grad, goes_on, start, self.cfg.ttt_lora_lr, self.cfg.ttt_beta2)
            self.count.copy_((self.count + 1) * goes_on[:, None])
            for stored, new in ((self.keys, k), (self.values, v)):
                stored.transpose(2, 3)[:, self.lane, fill[:, None] + self.place] = new.transpose(2, 3)
            self.at += 1

    @torch.no_grad()
    def begin_row(self):
        "Where a document begins a new row: read the half row before its chunk again, with its adapters as they are."
        lane, first = self.rows.index_select(0, self.row).unbind(1)
        flats, none = [f.index_select(0, lane) for f in self.flat], (stored[:, :1, :, :0] for stored in (self.keys, self.values))
        _, k, v = adapted_walk(self.model, self.window(first - self.half, 2, self.half), torch.zeros_like(first), flats, *none, self.cfg, self.run)
        for stored, new in ((self.keys, k), (self.values, v)):
            stored[..., :self.half, :].index_copy_(1, lane, new)
        self.row += 1

def score_documents(model: Golf,               # filled with the decoded state; only its adapters move
                    state: dict[str, Tensor],  # published name -> tensor: the artifact as decoded
                    tokens: Tensor,            # int [N + 1] on the model's device, the same on every rank
                    table: ByteTable,          # on the same device
                    cfg: Config,               # eval_seq_len and the ttt_* settings of the adapters
                    ranks: Ranks,              # every rank must call
                    log: RunLog | None = None,
                    step: Callable | None = None,  # see adapted_step
                    out: Tensor | None = None,     # float [N]: receives each target's nats, on the rank that scored it
                    ) -> tuple[float, float, DocumentLedger]:  # nats per token, bits per byte, what was done when on this rank
    "Score every document with adapters that learn from each chunk once it is scored (parameter-golf PR #77). GolfError if any rule would be broken."
    if not 2 <= cfg.ttt_chunk_size <= cfg.eval_seq_len // 2:
        raise GolfError(f"a chunk must hold 2 tokens to half a row of EVAL_SEQ_LEN={cfg.eval_seq_len}, found TTT_CHUNK_SIZE={cfg.ttt_chunk_size}: change it")
    spans, n = document_spans(tokens), tokens.numel() - 1
    load_named(model, state)
    model.requires_grad_(False)  # or a compiled backward would compute gradients that nobody wants
    plan, ledger, reader = lane_plan(spans, cfg, ranks), DocumentLedger(spans), LateReader()
    room = None if out is None else torch.cat([out, out[:1]])
    lanes, steps = Lanes(model, tokens, table, cfg, plan, step, room), len(plan["doc"])
    for s in range(steps):
        docs, a, b, on = (plan[k][s] for k in ("doc", "first", "count", "goes_on"))
        for _ in range(plan["again"][s].sum()):
            lanes.read_again()
        ledger.scored(docs[docs >= 0], a[docs >= 0], (a + b)[docs >= 0])
        ledger.train(docs[on > 0], a[on > 0], (a + b)[on > 0])
        lanes.recorded()
        if log is not None and s % 64 == 0 and (sums := reader.push(lanes.total)):
            log_chunk(log, s, steps, sums)
    model.requires_grad_(True)
    if out is not None:
        out.copy_(room[:-1])
    nats, n_bytes, count = ranks.sum_late(lanes.total).tolist()
    if count != n:
        raise GolfError(f"every target must be scored once: {n:,} targets, {count:,.0f} scored; do all ranks hold the same tokens?")
    return nats / n, bits_per_byte(nats, n_bytes), ledger

# ---- run ----

@dataclass
class Session:
    "What all phases of a run share."
    cfg: Config
    ranks: Ranks
    folder: Path # the run directory
    log: RunLog
    table: ByteTable # bytes per token, on the device
    train_paths: list
    val: torch.Tensor # validation tokens, int64 [N + 1], on the device
    unigram: float # bits per byte of the smoothed unigram of the training tokens
    tokenizer_sha256: str # of the tokenizer file
    seconds: dict = field(default_factory=dict) # phase -> seconds
    summary: dict = field(default_factory=dict)

    def phase(self, name: str, start: float):
        "Book the time since `start` (seconds of time.perf_counter) under `name`."
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start
        self.log.event("phase", name=name, seconds=self.seconds[name])

MIN_FREE_BYTES = 64 << 20

def run_folder(cfg: Config, ranks: Ranks) -> Path:
    "Make the run directory `runs_dir/run_id`; a name is made from recipe, seed and time when run_id is empty. GolfError when a finished run lies there or the disk is full."
    name = cfg.run_id or ranks.broadcast_object(f"{cfg.recipe}-{cfg.seed}-{time.strftime('%Y%m%d-%H%M%S')}")
    folder = Path(cfg.runs_dir) / name
    if (folder / "summary.json").exists():
        raise GolfError(f"{folder} already holds a finished run: set another RUN_ID, or move it away")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise GolfError(f"cannot make the run directory {folder}: {e.strerror}; set RUNS_DIR to a place that can be written")
    free = shutil.disk_usage(folder).free
    if free < MIN_FREE_BYTES:
        raise GolfError(f"{folder} has {free:,} bytes free, a run needs at least {MIN_FREE_BYTES:,}: make room or set RUNS_DIR")
    return folder

def count_tokens(paths: list, vocab_size: int, limit: int = 10_000_000) -> np.ndarray:
    "Counts, int64 [vocab], of the first `limit` training tokens. GolfError on a token outside the vocabulary."
    counts = np.zeros(vocab_size, dtype=np.int64)
    for path in paths:
        tokens = read_span(path, 0, min(limit, read_header(path)))
        if tokens.size and int(tokens.max()) >= vocab_size:
            raise GolfError(f"{path} holds token {int(tokens.max())}, but VOCAB_SIZE is {vocab_size}: use the tokenizer the shards were made with")
        counts += np.bincount(tokens, minlength=vocab_size)
        limit -= tokens.size
        if limit <= 0:
            break
    return counts

def open_session(cfg: Config, ranks: Ranks, quiet: bool = False) -> Session:
    "Check everything a run needs, on every rank, and open its log. GolfError with one sentence for whatever is wrong."
    cfg.check(ranks.world)
    compress_section(b"x", cfg.codec)  # or its package is missed after the training
    tokenizer = load_tokenizer(cfg.tokenizer_path, cfg.vocab_size)
    data = Path(cfg.data_path)
    train_paths = find_shards(str(data / "fineweb_train_*.bin"))
    val_paths = find_shards(str(data / "fineweb_val_*.bin"))
    check_disjoint(train_paths, val_paths)
    val = val_tokens(str(data / "fineweb_val_*.bin"), max(cfg.train_seq_len, cfg.eval_seq_len), cfg.vocab_size)
    counts = count_tokens(train_paths, cfg.vocab_size)
    table = byte_table(tokenizer)
    folder = run_folder(cfg, ranks)
    ranks.barrier()
    log = RunLog(folder, ranks.master, quiet)
    unigram = unigram_bpb(counts, val, table)
    resident = torch.from_numpy(val.astype(np.int64)).to(ranks.device)
    return Session(cfg, ranks, folder, log, table.to(ranks.device), train_paths, resident, unigram, tokenizer_hash(cfg.tokenizer_path))

def weight_dtype(cfg: Config, device: torch.device) -> torch.dtype:
    "What WEIGHT_DTYPE stands for on a device."
    usual = "bf16" if device.type == "cuda" else "fp32"
    return {"bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}[usual if cfg.weight_dtype == "auto" else cfg.weight_dtype]

@dataclass
class Machine:
    "A model with its engine and the functions that run it."
    model: Golf
    layout: Layout
    engine: Engine
    loss_fn: object # (ids, targets) -> mean loss
    forward: object # (ids, keep) -> logits before the softcap

def build_machine(cfg: Config, ranks: Ranks) -> Machine:
    "Model, layout, engine and (compiled) functions for a configuration."
    layout = model_layout(cfg, ranks.world)
    model = Golf(cfg, layout, dtype=weight_dtype(cfg, ranks.device), device=ranks.device)
    init_model(model, cfg, cfg.seed)
    engine = make_engine(model, layout, cfg, ranks)
    loss_fn, forward = (compiled(f, cfg, ranks.device) for f in (training_loss(model, model.cap), model))
    if forward is not model:
        keep_traces()
    if cfg.step_graph:
        loss_fn = StepGraph(loss_fn, list(model.parameters()), ranks.device)
    return Machine(model, layout, engine, loss_fn, forward)

def keep_traces():
    "Let torch keep the traced training and scoring graphs on disk beside the kernels built from them."
    inductor, functorch = import_module("torch._inductor.config"), import_module("torch._functorch.config")
    if hasattr(inductor, "unsafe_marked_cacheable_functions") and hasattr(functorch, "autograd_cache_allow_custom_autograd_functions"):
        inductor.unsafe_marked_cacheable_functions |= {f"torch.nn.attention.{name}": "golfnb" for name in ("_backend_from_string", "_sdpa_kernel")}
        functorch.autograd_cache_allow_custom_autograd_functions = True

def plain_score(s: Session, m: Machine) -> tuple[float, float]:
    "(loss in nats a token, bits per byte) of disjoint rows."
    m.model.eval()
    out = plain_loss(m.forward, s.val, s.table, s.cfg.train_seq_len, s.cfg.rows_per_score(s.ranks.world, s.cfg.train_seq_len), s.ranks)
    m.model.train()
    return out

def score_line(s: Session, label: str, loss: float, bpb: float, start: float, exact: bool = True):
    "Write the field's lines for one score. `start` is when it began (seconds of time.perf_counter), `exact` adds the line with eight digits."
    ms = 1000 * (time.perf_counter() - start)
    s.log.line(f"{label} val_loss:{loss:.4f} val_bpb:{bpb:.4f} eval_time:{ms:.0f}ms")
    if exact:
        s.log.line(f"{label}_exact val_loss:{loss:.8f} val_bpb:{bpb:.8f}")
    s.log.event("score", label=label, loss=loss, bpb=bpb, ms=ms)

def artifact_meta(s: Session, steps: int) -> dict:
    "The facts a container carries: settings to rebuild the model, tokenizer, recipe, seed, steps."
    return {"settings": s.cfg.model_settings(), "tokenizer_sha256": s.tokenizer_sha256, "vocab_size": s.cfg.vocab_size, "recipe": s.cfg.recipe, "seed": s.cfg.seed, "steps": steps}

def progress_lines(s: Session, label: str, every: float = 10.0):
    "A function (done, all) that logs rank 0's progress at most every `every` seconds."
    said = [time.perf_counter()]

    def progress(done: int, total: int):
        if time.perf_counter() - said[0] >= every:
            said[0] = time.perf_counter()
            s.log.line(f"  {label} [{100 * done / total:.0f}%] of this rank's share")

    return progress

def train_phase(s: Session, m: Machine) -> TrainResult:
    "Warm-up and training; the log tells what runs."
    cfg, start = s.cfg, time.perf_counter()
    loader = Loader(make_sampler(cfg, s.train_paths, s.ranks.rank, s.ranks.world), s.ranks.device, cfg.vocab_size)
    try:
        warm_up(cfg, m.loss_fn, loader, m.engine, s.log)
        s.phase("compiling", start)
        start = time.perf_counter()
        result = train(cfg, m.loss_fn, loader, m.engine, s.log, validate=lambda: plain_score(s, m))
    finally:
        loader.close()
    s.phase("training", start)
    s.summary.update(steps=result.steps, train_ms=result.train_ms, step_ms=result.train_ms / max(result.steps, 1), skipped=result.skipped,
                     raw_loss=result.val_loss, raw_bpb=result.val_bpb)
    if s.ranks.device.type == "cuda":
        peak = torch.cuda.max_memory_allocated()
        s.summary["peak_bytes"] = peak
        s.log.line(f"peak memory allocated: {peak >> 20} MiB reserved: {torch.cuda.max_memory_reserved() >> 20} MiB")
    return result

def averaged_phase(s: Session, m: Machine, result: TrainResult) -> dict:
    "Gather raw and averaged weights, write both, load the average into the model and score it; returns the averaged state by published names."
    start = time.perf_counter()
    raw = named_state(m.model, *engine_gather(m.engine))
    if s.ranks.master:
        save_weights(s.folder / "raw.golf", raw, artifact_meta(s, result.steps))
    if (mode := result.averages.exported()) != s.cfg.averaging:
        s.log.line(f"averaging: no snapshot fell into the end of the warmdown, so AVERAGING={s.cfg.averaging} became {mode}; lower SWA_EVERY or raise WARMDOWN_ITERS")
    averaged = named_state(m.model, *engine_gather(m.engine, result.averages.tensors()))
    if s.ranks.master:
        save_weights(s.folder / "ema.golf", averaged, artifact_meta(s, result.steps))
    s.phase("packing", start)
    s.ranks.barrier()
    load_named(m.model, averaged)
    start = time.perf_counter()
    loss, bpb = plain_score(s, m)
    score_line(s, "DIAGNOSTIC post_ema", loss, bpb, start, exact=False)
    s.summary.update(ema_loss=loss, ema_bpb=bpb)
    return averaged

def choose_grid(cfg: Config, named: dict, target: int, measure) -> dict:
    "The packed state a recipe exports: GPTQ-lite with the published scale floor, or without it, and then as coarse as `target` bytes ask."
    if cfg.scale_floor:
        return quantize_state(named, True, small=cfg.small_tensor)
    return size_to_target(named, target, measure, cfg.small_tensor)[0]

def nearest_grid(s: Session, named: dict, target: int, measure) -> dict:
    "As `choose_grid`; where nothing fits, the coarsest grid, so that a finished run is not lost."
    try:
        return choose_grid(s.cfg, named, target, measure)
    except NothingFits as e:
        s.log.line(str(e))
        return quantize_state(named, False, K_COARSEST, s.cfg.small_tensor)

def in_time(batches,           # what takes time is done with each between two of them
            limit_ms: float,   # milliseconds; math.inf: no limit
            device: torch.device,
            ends: list):       # receives the milliseconds from the start to the end of each
    "As many of the batches as the time allows, at least one."
    start = time.perf_counter()
    for ids in batches:
        yield ids
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        ends.append(1000 * (time.perf_counter() - start))
        last = ends[-1] - ends[-2] if len(ends) > 1 else 0.0  # the next may take as long; the first warms up and says nothing
        if ends[-1] + last > limit_ms:
            break

def gptq_grid(s: Session, m: Machine, named: dict, target: int, measure) -> dict | None:
    "Full-Hessian GPTQ of the averaged weights that the model holds, calibrated on training tokens, or None where no grid fits; every rank must call."
    cfg, start, ends = s.cfg, time.perf_counter(), []
    batches = calibration_batches(make_sampler(cfg, s.train_paths, s.ranks.rank, s.ranks.world), cfg.gptq_calib_samples, s.ranks.device)
    batches = in_time(batches, cfg.gptq_reserve_ms if cfg.max_wallclock_seconds else math.inf, s.ranks.device, ends)
    try:
        packed = gptq_state(m.model, m.layout, named, batches, s.ranks, cfg.scale_floor, cfg.small_tensor, None if cfg.scale_floor else target, measure)
    except NothingFits as e:
        s.log.line(f"gptq: {e}")
        packed = None
    told = torch.zeros(s.ranks.world, 2, dtype=torch.float64, device=s.ranks.device)
    told[s.ranks.rank] = told.new_tensor([len(ends), ends[-1]])
    least, most = s.ranks.sum(told).min(0).values[0].item(), told.max(0).values[1].item()
    s.log.line(f"gptq: {least:.0f} of {cfg.gptq_calib_samples} calibration batches per rank, {most:.0f}ms of {cfg.gptq_reserve_ms:.0f}ms kept back")
    s.log.line(f"gptq: all matrices and their grid in {1000 * (time.perf_counter() - start):.0f}ms, calibration included")
    return packed

def pack_phase(s: Session, m: Machine, averaged: dict, steps: int, code_bytes: int) -> Path:
    "Quantize, pack, write; returns the file to score. Over the cap the file is kept under another name and the run ends non-zero."
    path, cap, start, meta = s.folder / "artifact.golf", s.cfg.target_bytes, time.perf_counter(), artifact_meta(s, steps)

    def measure(packed: dict) -> int:
        return len(pack_bytes(packed, meta, s.cfg.codec))

    packed = gptq_grid(s, m, averaged, cap - code_bytes, measure) if s.cfg.use_gptq else None
    if s.ranks.master:
        packed = packed or nearest_grid(s, averaged, cap - code_bytes, measure)
        try:
            size = save_artifact(path, packed, meta, s.cfg.codec, cap, code_bytes)
        except GolfError as e:
            s.summary["over_budget"] = str(e)
            path = path.with_name(path.name + ".over")
            if not path.exists():
                raise
            size = path.stat().st_size
        s.log.line(f"Serialized model int6+{s.cfg.codec}: {size} bytes")
        s.log.line(f"Total submission size int6+{s.cfg.codec}: {size + code_bytes} bytes")
        s.log.line(f"artifact_sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}")
        parts = ledger(packed, code_bytes, size, artifact_header(path)["sections"])
        s.summary.update(artifact_bytes=size, code_bytes=code_bytes, total_bytes=size + code_bytes, ledger=parts)
        for part, n in [*parts, ("room left", cap - size - code_bytes)]:
            s.log.line(f"  {part:<24s}{n:>12,} bytes")
    path = Path(s.ranks.broadcast_object(str(path)))
    s.phase("packing", start)
    return path

def score_phase(s: Session, m: Machine, path: Path):
    "Scores of the file at `path`: round trip, sliding window, TTT. Raises GolfError when the file describes another model."
    meta, packed = load_artifact(path)
    if meta["tokenizer_sha256"] != s.tokenizer_sha256 or meta["settings"] != json.loads(json.dumps(s.cfg.model_settings())):
        raise GolfError(f"{path} describes another model or tokenizer than this run's: score it with `golfnb score`")
    state = dequantize_state(packed)
    load_named(m.model, state)
    start = time.perf_counter()
    loss, bpb = plain_score(s, m)
    score_line(s, "final_int6_roundtrip", loss, bpb, start)
    s.summary.update(int6_loss=loss, int6_bpb=bpb)
    if 0 < s.cfg.eval_stride:
        slide = time.perf_counter()
        loss, bpb = sliding_loss(m.forward, s.val, s.table, s.cfg.eval_seq_len, s.cfg.eval_stride, s.cfg.rows_per_score(s.ranks.world), s.ranks, progress=progress_lines(s, "sliding_window"))
        score_line(s, "final_int6_sliding_window", loss, bpb, slide)
        s.log.line(f"final_int8_zlib_roundtrip_exact val_loss:{loss:.8f} val_bpb:{bpb:.8f}")
        s.summary.update(sliding_loss=loss, sliding_bpb=bpb)
    s.phase("scoring", start)
    if s.cfg.ttt_enabled:
        start = time.perf_counter()
        if s.cfg.ttt_form == "adapters":
            loss, bpb, _ = score_documents(m.model, state, s.val, s.table, s.cfg, s.ranks, log=s.log)
        else:
            loss, bpb, _ = score_first(m.model, m.layout, state, s.val, s.table, s.cfg, s.ranks, forward=m.forward, log=s.log)
        score_line(s, "legal_ttt", loss, bpb, start)
        s.summary.update(ttt_loss=loss, ttt_bpb=bpb)
        s.phase("adapting", start)

def run(cfg: Config, ranks: Ranks | None = None,
        code: bytes = b"", # the script that runs: counted against the budget, kept in the run's folder
        quiet: bool = False) -> dict:
    "One whole run; returns (and writes) the summary: bits per byte of every stage, bytes, seconds per phase."
    ranks = ranks or Ranks()
    s = open_session(cfg, ranks, quiet)
    announce(s, code)
    kept = s.folder / "train_gpt.py"
    if code and ranks.master and not (kept.is_file() and kept.read_bytes() == code):
        atomic_write(kept, code)
    start = time.perf_counter()
    m = build_machine(cfg, ranks)
    s.phase("building", start)
    attention = m.model.blocks[0].attention
    s.log.line(f"attention:{attention if attention in FLASH_PACKAGES else attention_backend(ranks.device, attention)[0].name.lower()}")
    result = train_phase(s, m)
    averaged = averaged_phase(s, m, result)
    path = pack_phase(s, m, averaged, result.steps, len(code))
    score_phase(s, m, path)
    s.summary.update(unigram_bpb=s.unigram, recipe=cfg.recipe, seed=cfg.seed, world=ranks.world, device=device_name(ranks), seconds=s.seconds, config=asdict(cfg), losses=result.losses)
    if ranks.master:
        atomic_write(s.folder / "summary.json", json.dumps(s.summary, indent=1) + "\n")
    s.log.close()
    return s.summary

def device_name(ranks: Ranks) -> str:
    "What this rank computes on, in words."
    return torch.cuda.get_device_name() if ranks.device.type == "cuda" else "cpu"

def announce(s: Session, code: bytes):
    "The log's first lines: what runs, on what, over what, and what size to expect."
    cfg = s.cfg
    s.log.line(f"golfnb recipe:{cfg.recipe} seed:{cfg.seed} world_size:{s.ranks.world} grad_accum_steps:{cfg.grad_accum(s.ranks.world)} device:{device_name(s.ranks)} torch:{torch.__version__}")
    s.log.line(f"train_shards:{len(s.train_paths)} val_tokens:{s.val.numel() - 1} unigram_bpb:{s.unigram:.4f} code_bytes:{len(code)}")
    if code:
        s.log.line(f"code_sha256:{hashlib.sha256(code).hexdigest()}")
    numel = sum(m.rows * m.cols for _, _, m in model_layout(cfg, 1))
    bits = 2.5 if cfg.scale_floor else 5.3
    expected = int(numel * bits / 8) + len(code)
    s.log.line(f"preflight: matrices hold {numel:,} weights; at about {bits} bits each expect {expected:,} of {cfg.target_bytes:,} bytes, plus tables")
    for note in cfg.notices:
        s.log.line(f"notice: {note}")

LOST_RANK_WORDS = ("gloo", "Connection", "NCCL", "Timed out", "timed out", "timeout", "process group")

def script_main(path: str) -> None:
    "What `torchrun train_gpt.py` does: configuration from the environment, one run, an honest exit status."
    status = 0
    ranks = None
    try:
        cfg = load_config(os.environ)
        ranks = start_ranks()
        summary = run(cfg, ranks, Path(path).read_bytes())
        if "over_budget" in summary:
            print(f"golfnb: {summary['over_budget']}", file=sys.stderr, flush=True)
            status = 3
    except GolfError as e:
        print(f"golfnb: {e}", file=sys.stderr, flush=True)
        status = 2
    except RuntimeError as e:
        if not any(w in str(e) for w in LOST_RANK_WORDS):
            raise
        print(f"golfnb: rank {ranks.rank if ranks else '?'} lost the others in a collective ({str(e).splitlines()[0][:200]}): see which rank ended first, and why", file=sys.stderr, flush=True)
        status = 4
    sys.stdout.flush()
    if status:
        os._exit(status)
    stop_ranks(ranks)

if __name__ == "__main__":
    script_main(__file__)

# pr549.py with what it uses of golfnb (Apache-2.0), made: do not edit | source 062d64c818f33133
# torchrun --standalone --nproc_per_node=8 SCRIPT   (settings are environment variables)
import ctypes, os
from contextlib import suppress
if os.path.exists("/proc/self/maps") and "TORCHELASTIC_RUN_ID" in os.environ:  # Linux, under torchrun
    ctypes.CDLL(None).prctl(1, 15)  # PR_SET_PDEATHSIG, SIGTERM: end with the parent
    adopted = True
    with suppress(OSError), open(f"/proc/{os.getppid()}/maps") as parent:
        adopted = "libtorch" not in parent.read()
    if adopted and os.getsid(0) == os.getpid():  # started by torchrun, which has ended
        os._exit(143)

import functools
import gc
import glob
import hashlib
import importlib.util
import json
import lzma
import math
import numpy as np
import operator
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
import weakref
import zlib
from collections import deque, namedtuple
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import Field, asdict, dataclass, field, fields
from datetime import timedelta
from functools import cache, partial
from importlib import import_module
from itertools import chain, pairwise
from math import prod, sqrt
from pathlib import Path
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from types import SimpleNamespace
from typing import Any, ClassVar, NamedTuple


# ---- golfnb/muon/errors.py ----
class GolfError(Exception):
    "What is wrong, what was expected, what was found and what to do, in one sentence."
    status = 2  # of a process that it ends


def require(holds: object, sentence: str) -> None:
    "Raise GolfError with this sentence unless something holds."
    if not holds:
        raise GolfError(sentence)


# ---- golfnb/settings.py ----
def in_32_bits(value) -> bool:
    "Whether a number is one to compute with: a 32-bit integer, or a float well within float32."
    if type(value) is float:
        return value == 0 or 1e-36 <= abs(value) <= 1e36
    return type(value) is not int or abs(value) < 2**31


NUMBER = r"\s*([-+]?(?:2\^\d+|\d+\.?\d*(?:e[-+]?\d+)?))\s*"
COMPARED = re.compile(rf"([<>]=?){NUMBER}")
INTERVAL = re.compile(rf"([\[(]){NUMBER},{NUMBER}([\])])")
FROM_TO = re.compile(rf"{NUMBER}to{NUMBER}")
COMPARISONS = {">": (operator.gt, "above {}"), ">=": (operator.ge, "{} or more"),
               "<": (operator.lt, "below {}"), "<=": (operator.le, "at most {}")}


def limits_of(bounds: str) -> list[tuple[str, str]]:
    "Bounds as comparisons, such as [('>=', '0'), ('<', '1')]. GolfError for what is none."
    if not bounds:
        return []
    if found := COMPARED.fullmatch(bounds.strip()):
        return [(found[1], found[2])]
    if found := INTERVAL.fullmatch(bounds.strip()):
        first = ">=" if found[1] == "[" else ">"
        last = "<=" if found[4] == "]" else "<"
        return [(first, found[2]), (last, found[3])]
    found = FROM_TO.fullmatch(bounds)
    if not found:
        raise GolfError('bounds must be written like "> 0", "[0, 1)" or "1 to 100", found '
                        f"{bounds!r}: correct them")
    return [(">=", found[1]), ("<=", found[2])]


def limit_value(text: str) -> float | int:
    "The number of a limit, such as '0', '-1.5', '1e-3' or '2^63'."
    if "^" in text:
        base, power = text.split("^")
        return int(base) ** int(power)
    number = float(text)
    return int(number) if number.is_integer() else number


def same_float32(a: float, b: float) -> bool:
    "Whether two numbers are one in float32."
    return max(abs(a), abs(b)) < 1e38 and struct.pack("f", a) == struct.pack("f", b)


def within(value, sign: str, limit: float) -> bool:
    "Whether a value compares so with a limit, and does not become it in float32 if it must not."
    if not COMPARISONS[sign][0](value, limit):
        return False
    return "=" in sign or type(value) is not float or not same_float32(value, limit)


def bounds_rule(value, bounds: str) -> tuple[bool, str]:
    "Whether a value lies within bounds, and what is expected of it."
    limits = [(sign, limit_value(text), text) for sign, text in limits_of(bounds)]
    expected = []
    if limits:
        words = [COMPARISONS[sign][1].format(text) for sign, _, text in limits]
        expected.append(f"be {' and '.join(words)}")
    usual = True
    if all(abs(limit) < 2**31 for _, limit, _ in limits):  # or it is for no device
        usual = in_32_bits(value)
        expected.append("fit into int32 or float32")
    holds = usual and all(within(value, sign, limit) for sign, limit, _ in limits)
    return holds, " and ".join(expected)


WANTED = {bool: "0 or 1", int: "a whole number", float: "a finite number", str: "plain text"}


def setting(default, meaning: str, *choices: str, bounds: str = "") -> Any:
    """A dataclass field with its meaning and its bounds; any type, as that of `field`.

    `meaning` ends in its unit; `choices` are the words allowed, if not all are; `bounds`, of a
    number, are such as `limits_of` reads: GolfError for others, and for a default of another type.
    """
    require(type(default) in WANTED, "the default of a setting must be a number, True, False or a "
            f"text, found {default!r:.60}: give it one of these")
    require(not limits_of(bounds) or type(default) in (int, float), "only the setting of a number "
            f"has bounds, found {default!r} with {bounds!r}: leave them out")
    return field(default=default, metadata=dict(meaning=meaning, choices=choices, bounds=bounds))


def kind_of(spec: Field) -> type:
    "The type of a setting: that of its default, or float where it is declared as one."
    if spec.type in (float, "float"):
        return float
    return type(spec.default)


def check_choice(spec: Field, value) -> None:
    "Raise GolfError for a value that is none of a setting's choices."
    choices = spec.metadata["choices"]
    require(not choices or value in choices, f"{spec.name.upper()} must be one of "
            f"{', '.join(choices)}, found {value!r:.60}: choose one of these")


ALIKE = {bool: (bool, int), int: (int,), float: (float, int), str: (str,)}  # setting -> value


def converted(kind: type, value) -> bool | int | float | str | None:
    "A value of Python in a setting's type; None if it is of another, or cannot be written as text."
    if not isinstance(value, ALIKE[kind]) or (type(value) is bool and kind is not bool):
        return None
    if isinstance(value, str) and not value.isprintable():
        return None
    try:
        made = kind(value)
    except OverflowError:  # of a whole number as a float
        return None
    return made if made == value else None  # nor 2 for a bool, nor NaN


def in_its_type(spec: Field, value):
    "The value of a setting in the setting's type. Raises GolfError for what it cannot be."
    kind = kind_of(spec)
    made = converted(kind, value)
    require(made is not None, f"{spec.name.upper()} must be {WANTED[kind]}, found {value!r:.60}: "
            "correct it where the program says it")
    check_choice(spec, made)
    return made


Rules = Iterator[tuple[bool, str]]  # whether a rule holds, and what to say if it does not


@dataclass
class BaseSettings:
    "A group of settings; each chapter derives its own dataclass from it."

    WORDS = ""  # published words that are true of the program, like CLIP=local NS=ns5

    def __setattr__(self, name: str, value):
        "A value takes its setting's type: a file says 4.0 whether a program says 4 or 4.0."
        spec = type(self).__dataclass_fields__.get(name)
        if spec is not None and spec.metadata:
            value = in_its_type(spec, value)
        super().__setattr__(name, value)

    def rules(self) -> Rules:
        "What must hold between settings."
        return iter(())

    def check(self) -> None:
        "Raise GolfError for the first setting that cannot work."
        rules = self.rules()
        form = f"rules of {type(self).__name__} must yield pairs (whether it holds, a sentence)"
        require(isinstance(rules, Iterable), f"{form}, found {rules!r:.60}: write a yield")
        for rule in chain(bounds_of(self), rules):
            pair = isinstance(rule, tuple) and len(rule) == 2
            require(pair, f"{form}, found {rule!r:.60}: correct it")
            require(*rule)


def bounds_of(cfg: BaseSettings) -> Rules:
    "That each setting is within its bounds."
    for spec in fields(cfg):
        value = getattr(cfg, spec.name)
        holds, expected = bounds_rule(value, spec.metadata.get("bounds", ""))
        yield holds, (f"{spec.name.upper()} must {expected}, found {value}: "
                      "choose another number")


YES_NO = {"1": True, "true": True, "0": False, "false": False}


def parsed(kind: type, text: str) -> bool | int | float | str | None:
    "What a text says as a bool, an int, a finite float or printable text; None if it does not."
    if kind is bool:
        return YES_NO.get(text.strip().lower())
    if kind is str:
        return text if text.isprintable() else None
    try:
        value = kind(text)
    except ValueError:
        return None
    limit = 2**64 if kind is int else math.inf
    return value if abs(value) < limit else None


def parse_setting(spec: Field, text: str) -> bool | int | float | str:
    """The value of a setting from its text.

    Raises GolfError if it does not parse or is none of the choices.
    """
    name = spec.name.upper()
    default: Any = spec.default
    kind = kind_of(spec)
    value: Any = parsed(kind, text)
    example = int(default) if kind is bool else default
    require(value is not None, f"{name} must be {WANTED[kind]}, found {text!r}: "
            f"set it like {name}={example}")
    check_choice(spec, value)
    return value


IGNORED = ("EMBED_LR", "HEAD_LR", "SWA_ENABLED")  # untied embeddings; an average that is never read
NOT_BUILT = {  # name -> the value that is accepted
    "TIE_EMBEDDINGS": 1.0, "QAT_ENABLED": 0.0, "QUANT_CLIP_RANGE": 31.0, "MUON_BETA2": 0.95,
    "MTP_NUM_HEADS": 0.0, "MTP_LOSS_WEIGHT": 0.2, "LAWA_ENABLED": 0.0, "LAWA_K": 10.0,
    "LAWA_FREQ": 100.0,
    "DTG_ENABLED": 0.0, "GATED_ATTENTION": 0.0, "VALUE_RESIDUAL": 0.0}
KEEPING = ("CHECKPOINT_EVERY_S", "RESUME")  # what `golfnb train` reads


def published_number(name: str, text: str) -> float:
    "The number that a published name is set to; true and false count as 1 and 0. Raises GolfError."
    text = text.strip().lower()
    try:
        return float({"true": "1", "false": "0"}.get(text, text))
    except ValueError:
        raise GolfError(f"{name} must be a number, found {text!r}: leave it out") from None


def refuse_not_built(env: Mapping[str, str]) -> None:
    "Raise GolfError where published names ask for what is not built."
    for name in IGNORED:
        published_number(name, env.get(name, "0"))  # any number will do
    for name, accepted in NOT_BUILT.items():
        text = env.get(name, f"{accepted:g}")
        require(published_number(name, text) == accepted,
                f"{name} is not built in golfnb and must stay {accepted:g}, found {text!r}: leave "
                f"it out, or set it to {accepted:g}")


def refuse_keeping(env: Mapping[str, str]) -> None:
    "Raise GolfError where a script that keeps no checkpoints is asked for some."
    for name in KEEPING:
        text = env.get(name, "0")
        require(text.strip().lower() in ("", "0", "0.0", "false"),
                f"{name} must stay 0 where torchrun starts a script alone, found {text!r}: leave "
                "it out, or start golfnb.tools.checkpoint with the script: torchrun ... -m "
                "golfnb.tools.checkpoint SCRIPT")


PUBLISHED = {  # published word -> value -> a recipe whose program does it
    "LOADER": {"sequential": "pr549", "coprime": "pr726", "spans": "pr2135"},
    "PLAN": {"pr399": "pr549", "shared_mlp": "golf"},
    "LINKS": {"flat": "pr549"},
    "CLIP": {"local": "pr549", "global": "golf"},
    "NS": {"ns5": "pr549"},
    "SKIP_GATE": {"one": "pr549", "sigmoid": "golf"},
    "AVERAGING": {"ema": "pr549"},
    "EMA_ENABLED": {"1": "pr549"},
    "LATE_QAT": {"1": "golf"},
    "QAT_BANKS": {"0": "pr549", "1": "golf"},
    "SCALE_FLOOR": {"0": "golf", "1": "pr549"},
    "CODEC": {"lzma": "pr549", "best": "golf"},
    "USE_GPTQ": {"0": "pr549", "1": "pr1060"},
    "TTT_ENABLED": {"0": "pr399", "1": "pr549"},
    "TTT_FORM": {"chunks": "pr549", "adapters": "record"},
    "TTT_FREEZE_BLOCKS": {"0": "pr549", "2": "pr726"},
    "TTT_FREEZE_SCOPE": {"all": "pr726"},
    "CASEOPS_ENABLED": {"0": "pr2135"},
    "NGRAM_TILT_ENABLED": {"0": "pr2135"},
    "SPARSE_ATTN_GATE_ENABLED": {"1": "pr2135"},
    "SMEAR_GATE_ENABLED": {"1": "pr2135"},
    "SMEAR_GATE_BOS_FIX": {"0": "pr2135"},
    "SKIP_GATES_ENABLED": {"1": "pr2135"},
    "MUON_ROW_NORMALIZE": {"1": "pr2135"},
}


def published_words(group: type) -> dict[str, str]:
    """The published words that are true of a program with these `Settings`: word -> value.

    Raises GolfError for WORDS that are not written so.
    """
    text = group.WORDS
    right = isinstance(text, str) and all(word.count("=") == 1 for word in text.split())
    require(right, f"WORDS must be written like CLIP=local NS=ns5, found {text!r:.60}: correct it")
    return dict(word.split("=") for word in text.split())


def one_spelling(text: str) -> str:
    "A word, or a number in one way of writing: 1 for true and for 1.0."
    try:
        return f"{published_number('', text):g}"
    except GolfError:
        return text.strip()


def refuse_words(recipe: str, words: Mapping[str, str], env: Mapping[str, str]) -> None:
    "Raise GolfError where `env` holds a word that is not true of this recipe's program."
    for name, true in words.items():
        text = env.get(name, true)
        found = one_spelling(text)
        advice = "leave it out, or copy this program and give it that part: no recipe has it"
        other = PUBLISHED.get(name, {}).get(found)
        if other:
            advice = f"leave it out, or run recipe {other}, whose program does it"
        require(found == true,
                f"{name} must be {true} in recipe {recipe}, found {text!r}: {advice}")


def check_own(group: type, own: Mapping) -> None:
    "Raise GolfError where a recipe gives a number to what is no setting of its program."
    known = {spec.name for spec in fields(group)}
    for name in own:
        require(name in known, f"OWN must hold settings of the program, found {name!r:.60}: "
                "correct the name, or declare it in Settings")


def read_settings(group: type, own: Mapping, env: Mapping[str, str]):
    """The settings of a program: a `group` with the recipe's `own` numbers, changed by `env`.

    One of `own` is `recipe`. Names of `env` that are no settings are ignored. Raises GolfError for
    a value that does not parse or is of another type, for a name of `own` that is no setting, and
    for a published word or a recipe that is not this program's. What does not fit together is found
    by the group's `check`.
    """
    recipe = own["recipe"]
    check_own(group, own)
    refuse_keeping(env)
    refuse_not_built(env)
    asked = env.get("RECIPE", recipe)
    require(asked == recipe, f"RECIPE must be {recipe} in this program, found {asked!r}: leave "
            "it out, or run the program of that recipe")
    refuse_words(recipe, published_words(group), env)
    values = dict(own)
    for spec in fields(group):
        name = spec.name.upper()
        if name in env and name != "RECIPE":
            values[spec.name] = parse_setting(spec, env[name])
    return group(**values)


def finite(summary: dict) -> dict:
    "A summary with None for every number that is not finite."
    numbers = {name: value for name, value in summary.items() if isinstance(value, float)}
    nowhere = [name for name, value in numbers.items() if not math.isfinite(value)]
    return summary | dict.fromkeys(nowhere)


# ---- golfnb/model/layout.py ----
SMALL_MATRIX = 65_536  # elements; up to here a matrix is stored as fp16


@dataclass(frozen=True)
class Matrix:
    """One logical matrix, [rows, cols] of F.linear, and how it is stored.

    `name` is that in a state dict, `group` its bank; `transposed` means stored as [cols, rows];
    with at most `small` elements it is packed as fp16.
    """
    name: str
    rows: int
    cols: int
    group: str
    transposed: bool = False
    small: int = SMALL_MATRIX

    @property
    def stored(self) -> tuple[int, int]:
        "The shape of its slot."
        return (self.cols, self.rows) if self.transposed else (self.rows, self.cols)

    @property
    def shape_lr_scale(self) -> float:
        "Muon's factor on the learning rate."
        return sqrt(max(1.0, self.rows / self.cols))


@dataclass(frozen=True)
class BankSpec:
    "Matrices of one stored shape, in slot order, padded to a multiple of the `world` ranks."
    name: str
    matrices: tuple[Matrix, ...]
    world: int

    @property
    def real(self) -> int:
        "Slots that hold a matrix."
        return len(self.matrices)

    @property
    def per_rank(self) -> int:
        "Slots that each rank owns."
        return -(-self.real // self.world)

    @property
    def shape(self) -> tuple[int, int, int]:
        "[slots with padding, stored rows, stored columns]"
        return (self.per_rank * self.world, *self.matrices[0].stored)

    @property
    def padding(self) -> int:
        "Empty slots."
        return self.shape[0] - self.real

    def shard(self, rank: int) -> range:
        "The slots that a rank owns."
        return range(rank * self.per_rank, (rank + 1) * self.per_rank)

    def row_scales(self) -> list[list[float]]:
        "The learning-rate scale of each slot, a list of one number for its rows; 1 in the padding."
        return [[m.shape_lr_scale] for m in self.matrices] + [[1.0]] * self.padding

    def views(self, bank) -> list:
        "Its matrices: views of the tensor `bank` [slots, rows, cols], which may lack the padding."
        return list(bank.unbind(0)[:self.real])


@dataclass(frozen=True)
class Layout:
    "All banks of a model for one world size."
    banks: tuple[BankSpec, ...]
    world: int

    def __iter__(self) -> Iterator[tuple[BankSpec, int, Matrix]]:
        return ((b, i, m) for b in self.banks for i, m in enumerate(b.matrices))


def group_matrices(matrices: list[Matrix], world: int) -> Layout:
    "A bank per `group`. Raises GolfError for two stored shapes in a group, or a name used twice."
    require(world > 0 and matrices, "a layout needs at least one rank and one matrix: found "
            f"{world} and {len(matrices)}")
    groups, names = {}, [m.name for m in matrices]
    for m in matrices:
        groups.setdefault(m.group, []).append(m)
        first = groups[m.group][0]
        require(first.stored == m.stored,
                f"matrices of a bank must have one stored shape: {m.group!r} has {first.name} of "
                f"{first.stored} and {m.name} of {m.stored}; transpose or move one")
        require(names.count(m.name) == 1, f"matrix names must be unique: {m.name!r} appears twice")
    return Layout(tuple(BankSpec(name, tuple(ms), world) for name, ms in groups.items()), world)


@dataclass
class LayoutSettings(BaseSettings):
    "The matrices of the blocks, and how they share banks."
    num_layers: int = setting(11, "transformer blocks: count", bounds="1 to 10000")
    model_dim: int = setting(512, "width of the residual stream: channels", bounds="> 0")
    num_heads: int = setting(8, "query heads: count", bounds="> 0")
    num_kv_heads: int = setting(4, "heads of keys and values, shared by the query heads: count",
                                bounds="> 0")
    mlp_mult: float = setting(3.0, "MLP width / model_dim: ratio", bounds="> 0")
    small_tensor: int = setting(65_536,
                                "tensors of at most so many elements are stored as fp16: elements")

    @property
    def head_dim(self) -> int:
        "Channels of a head."
        return self.model_dim // self.num_heads

    @property
    def kv_dim(self) -> int:
        "Channels of all key heads together."
        return self.num_kv_heads * self.head_dim

    @property
    def mlp_dim(self) -> int:
        "Channels of the MLP."
        return int(self.mlp_mult * self.model_dim)

    def rules(self) -> Rules:
        "Which shapes are possible."
        yield from super().rules()
        yield self.mlp_dim >= 1, ("MLP_MULT must give at least one channel, "
                                  f"found {self.mlp_mult} of {self.model_dim}: raise it")
        for one, n, other, d in (("MODEL_DIM", self.model_dim, "NUM_HEADS", self.num_heads),
                                 ("NUM_HEADS", self.num_heads, "NUM_KV_HEADS", self.num_kv_heads)):
            yield n % d == 0, (f"{one} must be divisible by {other}, found {n} and {d}: "
                               "change one of them")


def block_layout(cfg: LayoutSettings, world: int,
                 mlp: list[tuple[str, int, int, str, bool]]) -> Layout:
    "A layout of all blocks; kinds are (name in a block, rows, columns, bank, transposed)."
    d = cfg.model_dim
    kv = cfg.kv_dim
    attention = [("attn.c_q", d, d, "qo_bank", False), ("attn.proj", d, d, "qo_bank", False),
                 ("attn.c_k", kv, d, "kv_bank", False), ("attn.c_v", kv, d, "kv_bank", False)]
    matrices = []
    for kind, rows, cols, bank, transposed in attention + mlp:
        for i in range(cfg.num_layers):
            name = f"blocks.{i}.{kind}.weight"
            matrices.append(Matrix(name, rows, cols, bank, transposed, cfg.small_tensor))
    return group_matrices(matrices, world)


def bank_per_shape(cfg: LayoutSettings, world: int) -> Layout:
    "The published layout of the blocks over `world` ranks: a bank for each shape (PR #399)."
    up = ("mlp.fc", cfg.mlp_dim, cfg.model_dim, "mlp_up_bank", False)
    down = ("mlp.proj", cfg.model_dim, cfg.mlp_dim, "mlp_down_bank", False)
    return block_layout(cfg, world, [up, down])


# ---- golfnb/model/banks.py ----
def make_banks(layout: Layout, dtype: torch.dtype = torch.float32,
               device: str | torch.device = "cpu") -> dict[str, torch.nn.Parameter]:
    "A zero-filled parameter [slots with padding, rows, columns] for each bank, by name (PR #399)."
    storage = {b.name: torch.zeros(b.shape, dtype=dtype, device=device) for b in layout.banks}
    return {name: torch.nn.Parameter(zeros) for name, zeros in storage.items()}


def unbank(layout: Layout, banks: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Views [rows, cols] of all matrices by name, in layout order.

    Gradients flow back into the banks.
    """
    views = (v for b in layout.banks for v in b.views(banks[b.name]))
    named = {}
    for (_, _, matrix), stored in zip(layout, views, strict=True):
        named[matrix.name] = stored.T if matrix.transposed else stored
    return named


# ---- golfnb/model/layers.py ----
def widen(x: Tensor) -> Tensor:
    "A 16-bit tensor as float32; a wider one unchanged."
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


NORM_EPS = 1.1920929e-07  # float32's machine epsilon


def rms_norm(x: Tensor) -> Tensor:
    "x [..., D] over the root mean square of its last axis (RMSNorm, arXiv 1910.07467), no weight."
    return F.rms_norm(x, (x.shape[-1],), eps=NORM_EPS)


def scaled_norm(x: Tensor, scale: float | Tensor) -> Tensor:
    "The norm of x [..., D] times `scale`, a number or one for each channel [D]; in the dtype of x."
    return (rms_norm(x) * scale).to(x.dtype)


def mix_norm(x: Tensor, x0: Tensor, mix: Tensor, scale: float | Tensor) -> tuple[Tensor, Tensor]:
    "A block's first step: x and x0 [B, T, D], mixed by mix [2, D], and the norm of that."
    m = mix.to(x.dtype)
    x_in = m[0] * x + m[1] * x0
    return x_in, scaled_norm(x_in, scale)


def rotary_base(T: int, rope_dims: int, base: float, train_len: int) -> float:
    "RoPE's base for rows of T tokens: NTK-scaled beyond `train_len`."
    long = T > train_len and rope_dims > 2
    return base * (T / train_len) ** (rope_dims / (rope_dims - 2)) if long else base


def rotary_tables(T: int, rope_dims: int, base: float, train_len: int,
                  device: str | torch.device = "cpu",
                  dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    "Cosines and sines of position times frequency (RoPE, arXiv 2104.09864): [T, rope_dims/2] each."
    if torch.device(device).type == "meta":  # shapes only: to compute there imports a compiler
        table = torch.empty(T, len(range(0, rope_dims, 2)), device=device, dtype=dtype)
        return table, table
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    exponent = torch.arange(0, rope_dims, 2, dtype=wide, device=device) / rope_dims
    frequency = 1.0 / rotary_base(T, rope_dims, base, train_len) ** exponent
    angle = torch.arange(T, dtype=wide, device=device)[:, None] * frequency
    return angle.cos().to(dtype), angle.sin().to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE on the first R coordinates of each head of x [B, T, H, D]; the others pass through.

    cos and sin are [T, R/2], or [B, T, R/2] if each row has its own positions."""
    half = cos.shape[-1]
    cos, sin = cos[..., None, :], sin[..., None, :]
    a, b, rest = x[..., :half], x[..., half:2 * half], x[..., 2 * half:]
    return torch.cat((a * cos + b * sin, b * cos - a * sin, rest), dim=-1).to(x.dtype)


def qk_norm_rope_gain(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor,
                      gain: Tensor) -> tuple[Tensor, Tensor]:
    """Norm per head (arXiv 2010.04245) and rotation of q and k, then the gain [H] on q.

    q [B, Tq, H, D] are the last Tq positions; k [B, T, KV, D]; cos and sin as in `rotate`."""
    start = k.shape[1] - q.shape[1]
    q = rotate(rms_norm(q), cos[..., start:, :], sin[..., start:, :]) * gain.to(q.dtype)[:, None]
    return q, rotate(rms_norm(k), cos, sin)


# choice -> module
FLASH_PACKAGES = {"fa3": "flash_attn_interface", "fa4": "flash_attn.cute.interface"}
BACKENDS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION,
            "efficient": SDPBackend.EFFICIENT_ATTENTION, "math": SDPBackend.MATH}


def attention_backend(device: str | torch.device, choice: str = "auto") -> list[SDPBackend]:
    """Attention backends for this device, best first, the chosen one before all.

    Raises GolfError if unknown.
    """
    names = BACKENDS | dict.fromkeys(FLASH_PACKAGES, SDPBackend.FLASH_ATTENTION)
    if choice != "auto" and choice not in names:
        raise GolfError(f"ATTENTION must be auto, {', '.join(names)}: found {choice!r}")
    cuda = torch.device(device).type == "cuda"
    order = [b for name, b in BACKENDS.items() if cuda or name != "cudnn"]
    return sorted(order, key=lambda b: b is not names.get(choice))


def attend(q: Tensor, k: Tensor, v: Tensor, choice: str = "auto") -> Tensor:
    """Causal grouped-query attention (arXiv 2305.13245), scaled by 1/sqrt(D).

    q [B, Tq, H, D] are the last Tq positions; k and v [B, T, KV, D], where
    H is a multiple of KV."""
    Tq, T, mask = q.shape[1], k.shape[1], None
    if Tq < T:
        k, v = (t.repeat_interleave(q.shape[2] // t.shape[2], dim=2) for t in (k, v))
        mask = torch.ones(Tq, T, dtype=torch.bool, device=q.device).tril(T - Tq)
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    with sdpa_kernel(attention_backend(q.device, choice), set_priority=True):
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None,
                                           scale=1 / math.sqrt(q.shape[-1]),
                                           enable_gqa=mask is None)
    return y.transpose(1, 2)


def flash_alone(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    "`attend` by the flash backend only; no other may step in."
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True,
                                              enable_gqa=True).transpose(1, 2)


def backend_distance(device: str, heads: int, keys: int, head_dim: int) -> float:
    "The flash backend's largest relative distance from the plain formula, in output and gradients."
    ways = [(lambda q, k, v: attend(q, k, v, "math"), torch.float32), (flash_alone, torch.bfloat16)]
    if torch.device(device).type == "cuda":  # as the model runs it
        flash = torch.compile(lambda q, k, v: attend(q, k, v, "flash"), dynamic=False,
                              fullgraph=True)
        ways.append((flash, torch.bfloat16))
    draw, found = torch.Generator(device).manual_seed(0), []
    *qkv, dy = [torch.randn(2, 160, h, head_dim, generator=draw, device=device).bfloat16()
                for h in (heads, keys, keys, heads)]
    for way, dtype in ways:
        inputs = [t.to(dtype).requires_grad_() for t in qkv]
        with torch.enable_grad():
            y = way(*inputs)
            found.append([y.detach(), *torch.autograd.grad(y, inputs, dy.to(dtype))])
    exact, *others = found
    pairs = [pair for other in others for pair in zip(other, exact, strict=True)]
    apart = [(a.float() - b).norm() / b.norm() for a, b in pairs]
    return float(torch.stack(apart).max())


def flash_installed(choice: str) -> bool:
    "Whether the package of this choice's module in FLASH_PACKAGES can be found."
    package = FLASH_PACKAGES[choice].partition(".")[0]
    return importlib.util.find_spec(package) is not None


@functools.cache
def flash_problem(choice: str, device: str, heads: int, keys: int, head_dim: int) -> str:
    "Replace PyTorch's flash backend by this package and try it; what is wrong with it, or ''."
    attention = torch.nn.attention
    if not flash_installed(choice):
        return f"{FLASH_PACKAGES[choice]} is not installed"
    if not hasattr(attention, "activate_flash_attention_impl"):
        return f"torch {torch.__version__} has no place for it"
    try:
        attention.activate_flash_attention_impl(choice.upper())
        apart = backend_distance(device, heads, keys, head_dim)
        problem = "" if apart < 0.02 else f"it is {apart:.3f} from the plain formula"
    except Exception as e:  # whatever somebody else's build may raise
        problem = f"{type(e).__name__}: {e}"
    if problem and attention.current_flash_attention_impl():
        attention.restore_flash_attention_impl()
    return problem


def ready_attention(choice: str, device: str | torch.device, heads: int, keys: int,
                    head_dim: int) -> str:
    """The choice to give `attend` on this device, tried out; auto warns if FlashAttention-3 fails.

    Raises GolfError if the choice is unknown, or names a package that fails."""
    attention_backend(device, choice)
    cuda = torch.device(device).type == "cuda"
    wanted = "fa3" if choice == "auto" and cuda and flash_installed("fa3") else choice
    if wanted not in FLASH_PACKAGES or not cuda:
        return choice
    problem = flash_problem(wanted, str(device), heads, keys, head_dim)
    require(not problem or choice == "auto", f"ATTENTION={choice} cannot be had here: {problem}; "
            "mend it, or use ATTENTION=auto")
    if problem:
        warnings.warn(f"golfnb: FlashAttention-3 is installed and not used: {problem}; "
                      "cuDNN's attention takes its place", stacklevel=2)
    return "auto" if problem else wanted


def exclusive(y: Tensor, v: Tensor) -> Tensor:
    """XSA (parameter-golf PR #399 and #549): y [B, T, H, D] without its
    component along v [B, T, KV, D].

    y is attention's output, v the values of the same positions."""
    B, T, H, D = y.shape
    grouped = widen(y).reshape(B, T, v.shape[2], -1, D)
    u = F.normalize(widen(v), dim=-1, eps=1e-12).unsqueeze(3)
    return (grouped - (grouped * u).sum(-1, keepdim=True) * u).reshape(B, T, H, D).to(y.dtype)


def squared_leaky(z: Tensor, slope: float = 0.5) -> Tensor:
    "leaky_relu(z, slope) squared (arXiv 2109.08668; leaky in PR #549); slope 0 is ReLU squared."
    return widen(F.leaky_relu(z, slope)).square().to(z.dtype)


def bigram_rows(ids: Tensor, rows: int) -> Tensor:
    """Row of each pair (previous token, token) of ids [B, T] in a table of `rows` (PR #399).

    (36313 id_t XOR 27191 id_{t-1}) mod (rows - 1), and rows - 1 for the first position."""
    t = ids.to(torch.int32)
    pair = (36313 * t[:, 1:]).bitwise_xor(27191 * t[:, :-1]) % (rows - 1)
    return F.pad(pair, (1, 0), value=rows - 1).long()


def smear(x: Tensor, gate: Tensor) -> Tensor:
    "SmearGate (PR #399): x [B, T, D] blended with the position before it by a gate [D]."
    g = torch.sigmoid(gate.to(x.dtype))
    before = F.pad(x, (0, 0, 1, 0))[:, :-1]
    return (1 - g) * x + g * before


def softcap(logits: Tensor, cap: float) -> Tensor:
    "cap * tanh(logits / cap) (arXiv 2408.00118), float32 for 16-bit logits."
    return cap * torch.tanh(widen(logits) / cap)


def softcap_loss(logits: Tensor, targets: Tensor, cap: float) -> Tensor:
    "Training's loss, a mean in nats, of the head's logits [B, T, V] and int64 targets [B, T]."
    return F.cross_entropy(softcap(logits, cap).flatten(0, -2), targets.flatten())


def token_nll(logits: Tensor, targets: Tensor, cap: float) -> Tensor:
    "Evaluation's nats of every target [B, T], from capped logits rounded to their dtype."
    capped = widen(softcap(logits, cap).to(logits.dtype))
    return F.cross_entropy(capped.flatten(0, -2), targets.flatten(),
                           reduction="none").view(targets.shape)


# ---- golfnb/model/golf.py ----
@dataclass
class ModelSettings(LayoutSettings):
    "Shapes of the transformer."
    vocab_size: int = setting(1024, "pieces of the tokenizer, rows of the token table: count",
                              bounds="> 0")
    train_seq_len: int = setting(2048, "length of a training row: tokens", bounds="> 0")
    rope_base: float = setting(10_000.0, "base of the rotary frequencies: number", bounds="> 0")
    rope_dims: int = setting(16, "channels of each head that are rotated: channels", bounds="> 0")
    rope_train_len: int = setting(1024, "row length from which RoPE is NTK-scaled: tokens",
                                  bounds="> 0")
    logit_softcap: float = setting(30.0, "logits are cap * tanh(logits / cap): logits",
                                   bounds="> 0")
    qk_gain_init: float = setting(1.5, "initial gain of every query head after rotation: ratio")
    ln_scale: bool = setting(True, "scale the norms of block l by 1 / sqrt(l + 1): 0 or 1")
    xsa_last_n: int = setting(4, "last blocks with XSA, at most all: blocks", bounds=">= 0")
    negative_slope: float = setting(0.5, "slope s below 0 in leaky_relu(x, s)**2: ratio",
                                    bounds="[0, 1)")
    tied_embed_init_std: float = setting(0.005, "deviation of the first tok_emb: number",
                                         bounds="> 0")
    bigram_vocab_size: int = setting(1536, "rows of the bigram hash table; 0: no table: rows")
    bigram_dim: int = setting(128, "width of the bigram hash table: channels", bounds="> 0")
    ve_enabled: bool = setting(True, "value embeddings: 0 or 1")
    ve_dim: int = setting(128, "width of the value-embedding table: channels", bounds="> 0")
    ve_layers: str = setting("9,10", "blocks with a value embedding, from 0: list of blocks")

    @property
    def ve_layer_list(self) -> list[int]:
        "Blocks with a value embedding."
        return [int(p) for p in self.ve_layers.split(",") if p.strip()] if self.ve_enabled else []

    @property
    def visits(self) -> int:
        "The most blocks that a forward runs, one that runs twice counted twice; see `Golf.order`."
        return self.num_layers

    def rules(self) -> Rules:
        "Which models are possible."
        yield from super().rules()
        rope, head, row = self.rope_dims, self.head_dim, self.train_seq_len
        yield self.vocab_size <= 65_536, ("VOCAB_SIZE must be at most 65536 (tokens are stored as "
                                          f"uint16), found {self.vocab_size}: use a smaller "
                                          "tokenizer")
        yield rope % 2 == 0 and rope <= head, (
            f"ROPE_DIMS must be even and at most the head width {head}, found {rope}: choose an "
            f"even number up to {head}")
        yield row * rope <= 2**24, ("TRAIN_SEQ_LEN times ROPE_DIMS must be at most 2^24 (the "
                                    f"rotary tables), found {row} x {rope}: shorten the row")
        yield from table_rules(self)

    def block_form(self, i: int) -> Callable | None:
        "What `Block.run` calls in place of its own lines, in block i; None: nothing."
        return None


def table_rules(cfg: ModelSettings) -> Rules:
    "Which bigram tables and value embeddings are possible."
    rows = cfg.bigram_vocab_size
    yield rows == 0 or rows >= 2, ("BIGRAM_VOCAB_SIZE must be 0 or at least 2, "
                                   f"found {rows}: change it")
    parts = [p.strip() for p in cfg.ve_layers.split(",") if p.strip()]
    numbers = [int(p) for p in parts if p.isdecimal() and len(p) < 9]
    blocks = {n for n in numbers if n < cfg.num_layers}
    yield not cfg.ve_enabled or 0 < len(parts) == len(blocks), (
        f"VE_LAYERS must name at least one block of 0..{cfg.num_layers - 1} and none twice, parted "
        f"by commas: found {cfg.ve_layers!r}; write like VE_LAYERS={cfg.num_layers - 1} or "
        "VE_ENABLED=0")


@dataclass
class ComputeSettings(BaseSettings):
    "How a model is computed on this machine."
    weight_dtype: str = setting("auto",
                                "dtype of weights and activations; auto: bf16 on CUDA, fp32 on CPU",
                                "auto", "bf16", "fp32", "fp64")
    attention: str = setting("auto",
                             "attention backend; auto: the fastest that works here (chapter 03)",
                             "auto", "cudnn", "flash", "efficient", "math", "fa3", "fa4")
    compile: str = setting("auto", "torch.compile the forward; auto: on CUDA only",
                           "auto", "0", "1")


def table_shapes(cfg: ModelSettings) -> dict[str, tuple[int, int]]:
    "Parameters that are looked up by row: name -> (rows, width)."
    shapes = {"tok_emb": (cfg.vocab_size, cfg.model_dim)}
    if cfg.bigram_vocab_size:
        shapes["bigram_table"] = (cfg.bigram_vocab_size, cfg.bigram_dim)
    if cfg.ve_enabled:
        shapes["ve_table"] = (cfg.vocab_size, cfg.ve_dim)
    return shapes


class WeightedSkips:
    "For `Golf`: a U-Net skip is multiplied by a weight for each channel, as published."
    start = 1.0  # of the weights
    word = "one"  # in a file

    def weight_shape(self, skips: int, channels: int) -> tuple[int, int]:
        "The shape of the weights of so many skips."
        return skips, channels

    def gates(self, weights: Tensor) -> Tensor:
        "What the skips are multiplied by: [skips, 1 or channels] of the weights."
        return weights


def scalar_shapes(cfg: ModelSettings, skips: WeightedSkips) -> dict[str, tuple[int, ...]]:
    "Small parameters, stacked over the layers where each has one: name -> shape."
    L, D = cfg.num_layers, cfg.model_dim
    shapes = {"attn_scale": (L, D), "mlp_scale": (L, D), "resid_mix": (L, 2, D),
              "q_gain": (L, cfg.num_heads),
              "smear_gate": (D,)}
    if cfg.visits > 1:
        shapes["skip_weights"] = skips.weight_shape(cfg.visits // 2, D)
    if cfg.bigram_vocab_size:
        shapes |= {"bigram_proj": (D, cfg.bigram_dim), "bigram_scale": ()}
    if cfg.ve_enabled:
        blocks = len(cfg.ve_layer_list)
        shapes |= {"ve_proj": (cfg.kv_dim, cfg.ve_dim), "ve_scale": (),
                   "ve_layer_scales": (blocks,)}
    return shapes


BLOCK_MATRICES = ("attn.c_q", "attn.c_k", "attn.c_v", "attn.proj", "mlp.fc", "mlp.proj")


class BlockWeights(NamedTuple):
    """What a block reads, BLOCK_MATRICES first; or, with an axis in front, what all blocks read.

    Matrices and mix are in the compute dtype, the other scalars in float32."""
    q: Tensor                   # [D, D]
    k: Tensor                   # [KV*head, D]
    v: Tensor                   # [KV*head, D]
    out: Tensor                 # [D, D]
    up: Tensor                  # [hidden, D]
    down: Tensor                # [D, hidden]
    attn_scale: Tensor | None   # [D]; None: multiplied into `out` already
    mlp_scale: Tensor | None    # [D]; None: multiplied into `down` already
    mix: Tensor                 # [2, D]
    gain: Tensor                # [H]
    qkv: Tensor | None = None  # [D + 2*KV*head, D]: q, k and v joined, where a kernel wants them so
    more: Any = None           # what a form of the block's own reads


@dataclass
class Block:
    "One block of the transformer without its weights: what is fixed about it, and how it computes."
    head_dim: int
    norm_scale: float | Tensor  # factor after its norms: a number, or one for each channel [D]
    activation: Callable        # of the MLP: a function or module of a tensor of any shape
    xsa: bool                   # exclusive self-attention
    attention: str = "auto"     # backend, see `attend`
    form: Callable | None = None  # computes in place of `run`, from the same and the block

    def linear(self, x: Tensor, weight: Tensor, i: int) -> Tensor:
        "x [B, T, in] times weight [out, in], which is matrix i of BLOCK_MATRICES."
        return F.linear(x, weight)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        "Attention of q [B, T, H, head] over k and v [B, T, KV, head]."
        return attend(q, k, v, self.attention)

    def exclusive(self, y: Tensor, v: Tensor) -> Tensor:
        "XSA: attention's output y [B, T, H, head] without its part along v [B, T, KV, head]."
        return exclusive(y, v)

    def heads(self, n: Tensor, w: BlockWeights, cos: Tensor, sin: Tensor, ve=None, last_n=None):
        "Queries [B, last_n, H, head], keys and values [B, T, KV, head] of the norm n [B, T, D]."
        q = self.linear(last_positions(n, last_n), w.q, 0)
        k = self.linear(n, w.k, 1)
        v = self.linear(n, w.v, 2)
        q, k, v = (t.unflatten(-1, (-1, self.head_dim))
                   for t in (q, k, v if ve is None else v + ve))
        return *qk_norm_rope_gain(q, k, cos, sin, w.gain), v

    def mlp(self, n: Tensor, w: BlockWeights) -> Tensor:
        "Up, activation, down, scale: n [B, T, D] -> [B, T, D]."
        h = self.activation(self.linear(n, w.up, 4))
        return scaled(self.linear(h, w.down, 5), w.mlp_scale)

    def run(self, x: Tensor, x0: Tensor, w: BlockWeights, cos, sin, ve=None, last_n=None) -> Tensor:
        """The block's output, at the last `last_n` positions if given: x
        [B, T, D] -> [B, last_n, D].

        x0 [B, T, D] the embedded input, ve [B, T, KV*head] the value
        embedding; cos, sin as in `rotate`."""
        if self.form is not None:
            return self.form(self, x, x0, w, cos, sin, ve, last_n)
        x_in, n = mix_norm(x, x0, w.mix, self.norm_scale)
        q, k, v = self.heads(n, w, cos, sin, ve, last_n)
        y = self.attend(q, k, v)
        if self.xsa:
            y = self.exclusive(y, last_positions(v, last_n))
        x = last_positions(x_in, last_n) + scaled(self.linear(y.flatten(2), w.out, 3), w.attn_scale)
        return x + self.mlp(scaled_norm(x, self.norm_scale), w)


@dataclass
class LeakyReluSquared:
    "The activation leaky_relu(z, negative_slope)**2 of the records; 0 is ReLU squared."
    negative_slope: float = 0.5

    def __call__(self, z: Tensor) -> Tensor:
        "Of z of any shape."
        return squared_leaky(z, self.negative_slope)


def make_block(cfg: ModelSettings, i: int, activation: Callable, attention: str,
               kind: type[Block] = Block, **more) -> Block:
    "Block i of a model, of this kind: norms scaled by 1/sqrt(i + 1), XSA in the last `xsa_last_n`."
    norm_scale = 1 / math.sqrt(i + 1) if cfg.ln_scale else 1.0
    xsa = i >= cfg.num_layers - cfg.xsa_last_n
    form = cfg.block_form(i)
    return kind(cfg.head_dim, norm_scale, activation, xsa, attention, form, **more)


def last_positions(x: Tensor, last_n: int | None) -> Tensor:
    "The last `last_n` positions of x [B, T, ...]; None: all."
    return x if last_n is None or last_n == x.shape[1] else x[:, -last_n:]


def scaled(x: Tensor, scale: Tensor | None) -> Tensor:
    "x [..., D] times a scale per channel [D]; x where the scale is in the matrix already."
    return x if scale is None else scale.to(x.dtype) * x


class Visit(NamedTuple):
    "A place in a model's `order`: what `run_blocks` asks for."
    place: int  # 0 for the first
    block: int
    last: bool  # whether no other comes after it


def checked_order(order: Iterable[int], cfg: ModelSettings) -> tuple[int, ...]:
    "An order that names each block at least once and runs at most `cfg.visits`; else GolfError."
    order = tuple(order)
    blocks, visits = cfg.num_layers, cfg.visits
    require(set(order) == set(range(blocks)), "an order must name each of the blocks 0 to "
            f"{blocks - 1} at least once and no others, found {order!s:.60}: correct it")
    require(len(order) <= visits, f"an order may run {visits} blocks, as the settings say, "
            f"found {len(order)}: let the property `visits` of the settings be {len(order)}")
    return order


def checked_activation(activation: Callable | None, slope: float) -> Callable:
    "An activation without weights; LeakyReluSquared where there is none. GolfError for weights."
    if activation is None:
        return LeakyReluSquared(slope)
    weights = []
    if isinstance(activation, torch.nn.Module):
        weights = [*activation.parameters()]
    require(not weights, "an activation must have no weights, since no optimizer "
            f"or file would hold them, found {type(activation).__name__}: use one without")
    return activation


class Golf(torch.nn.Module):
    "The model. All parameters are zero until `init_model` or `load_named` fills them."
    __getattr__: Callable[..., Tensor]  # what is set by its name alone: tables, scalars, buffers
    starts: ClassVar[dict[str, float]] = {}  # of scalars of a class that derives from this one
    bos: int | None = None  # begins documents, where attention does not leave them

    def __init__(self, cfg: ModelSettings, layout: Layout, dtype: torch.dtype = torch.float32,
                 device: str | torch.device = "cpu", attention: str = "auto",
                 skips: WeightedSkips = WeightedSkips(), activation: Callable | None = None):
        """`dtype` is the compute dtype.

        `activation`: of the MLPs, a function or a module without weights; None: LeakyReluSquared
        with the settings' slope. Raises GolfError for one with weights.
        """
        super().__init__()
        self.skips = skips
        self.activation = checked_activation(activation, cfg.negative_slope)
        self.cfg, self.layout, self.compute, self.cap = cfg, layout, dtype, cfg.logit_softcap
        self.order, self.ve_blocks = tuple(range(cfg.num_layers)), cfg.ve_layer_list
        self.freeze: Callable | None = None  # such as FreezeBlocks
        self.attention = ready_attention(attention, device, cfg.num_heads, cfg.num_kv_heads,
                                         cfg.head_dim)
        self.kernels = frozenset()  # none, until chapter 09's `fuse` hands them in
        self.blocks = [make_block(cfg, i, self.activation, self.attention)
                       for i in range(cfg.num_layers)]
        places = {m.name: (b.name, slot // cfg.num_layers, m.transposed) for b, slot, m in layout}
        self.places = [places[f"blocks.0.{matrix}.weight"] for matrix in BLOCK_MATRICES]
        self.banks = torch.nn.ParameterDict(make_banks(layout, dtype, device))
        tables, scalars = table_shapes(cfg), self.small_shapes()
        self.tables, self.scalars = tuple(tables), tuple(scalars)
        wide = torch.promote_types(dtype, torch.float32)
        for shapes, kind in ((tables, dtype), (scalars, wide)):
            for name, shape in shapes.items():
                setattr(self, name,
                        torch.nn.Parameter(torch.zeros(shape, dtype=kind, device=device)))
        self.rope = cfg.rope_dims, cfg.rope_base, cfg.rope_train_len
        rotary = rotary_tables(cfg.train_seq_len, *self.rope, device, dtype)
        for name, table in zip(("cos", "sin"), rotary, strict=True):
            self.register_buffer(f"rotary_{name}", table, persistent=False)

    @property
    def order(self) -> tuple[int, ...]:
        "The blocks in the order in which a forward runs them; it may be set at any time."
        return self.run_order

    @order.setter
    def order(self, order: Iterable[int]):
        "See `checked_order`. What is recorded for one (`StepGraph`) is not replayed for another."
        self.run_order = checked_order(order, self.cfg)

    def small_shapes(self) -> dict[str, tuple[int, ...]]:
        "Its small parameters: name -> shape."
        return scalar_shapes(self.cfg, self.skips)

    def saved_parts(self) -> dict:
        "What a file says besides, of a model of a class that derives from this one."
        return {}

    def role_params(self) -> dict[str, dict[str, torch.nn.Parameter]]:
        "Parameters by role: bank (in the layout's order), table, scalar."
        return {"bank": {b.name: self.banks[b.name] for b in self.layout.banks},
                "table": {n: getattr(self, n) for n in self.tables},
                "scalar": {n: getattr(self, n) for n in self.scalars}}

    def rotary(self, T: int) -> tuple[Tensor, Tensor]:
        "cos and sin for rows of T tokens, [T, rope_dims/2] each."
        if T == self.cfg.train_seq_len:
            return self.rotary_cos, self.rotary_sin
        return rotary_tables(T, *self.rope, self.tok_emb.device, self.compute)

    def weights(self, kernels: frozenset = frozenset()) -> list[BlockWeights]:
        "What every block reads, as views of the banks, or joined as `kernels` want it."
        mix = self.resid_mix.to(self.compute)
        freeze = self.freeze if torch.is_grad_enabled() else None
        L, banks = self.cfg.num_layers, self.banks.items()
        # run r of a bank: its slots r L to (r + 1) L; to slice costs a gradient of the bank's size
        runs = {name: bank.split(L) if bank.shape[0] >= 2 * L else (bank,) for name, bank in banks}
        kinds = [(runs[bank][run].to(self.compute), flipped) for bank, run, flipped in self.places]
        # [blocks, rows, columns]
        kinds = [stack.mT if flipped else stack for stack, flipped in kinds]
        stack = BlockWeights(*kinds, self.attn_scale, self.mlp_scale, mix, self.q_gain)
        stack = joined(stack, kernels) if freeze is None else stack
        columns = [[None] * L if t is None else t.unbind(0) for t in stack]
        # a bank may end in padding
        blocks = [BlockWeights(*w) for w in zip(*columns, strict=False)]
        if freeze is None:
            return blocks
        return [joined(w, kernels) for w in freeze(blocks)]

    def look_up(self, ids: Tensor) -> Tensor:
        "What the tables have of tokens [B, T]: [B, T, D]."
        x = F.embedding(ids, self.tok_emb).to(self.compute)
        if self.cfg.bigram_vocab_size:
            pair = F.embedding(bigram_rows(ids, self.bigram_table.shape[0]),
                               self.bigram_table).to(x.dtype)
            x = x + F.linear(pair, self.bigram_proj.to(x.dtype)) * self.bigram_scale.to(x.dtype)
        return x

    def embed(self, ids: Tensor) -> Tensor:
        "Tokens [B, T] as the blocks' input x0 [B, T, D]."
        return smear(rms_norm(self.look_up(ids)), self.smear_gate)

    def value_embeddings(self, ids: Tensor) -> dict[int, Tensor]:
        "What is added to the values [B, T, KV*head], for each block that has a value embedding."
        if not self.cfg.ve_enabled:
            return {}
        ve = F.embedding(ids, self.ve_table).to(self.compute)
        ve = F.linear(ve, self.ve_proj.to(ve.dtype)) * self.ve_scale.to(ve.dtype)
        scales = self.ve_layer_scales.to(ve.dtype).unbind(0)
        return {i: ve * s for i, s in zip(self.ve_blocks, scales, strict=True)}

    def run_blocks(self, x: Tensor, run: Callable) -> Tensor:
        """All blocks of `order`, with the U-Net's skips: x [B, T, D] -> [B, T, D].

        `run(x, visit) -> x` computes the block of a `Visit`."""
        half, outputs = len(self.order) // 2, []
        skips = ()
        if half:
            skips = self.skips.gates(self.skip_weights).to(self.compute).unbind(0)
        for place, block in enumerate(self.order):
            if half <= place < 2 * half:
                x = x + skips[place - half] * outputs.pop()
            x = run(x, Visit(place, block, place + 1 == len(self.order)))
            if place < half:
                outputs.append(x)
        return x

    def forward(self, ids: Tensor, last_n: int | None = None,
                rope_len: int | None = None) -> Tensor:
        """Logits [B, last_n, V] before the cap, of tokens [B, T]; all
        positions if `last_n` is None.

        `rope_len` is the row length that sets the rotary base; None: T. Raises GolfError for a
        `last_n` that is not in 1..T."""
        T = ids.shape[1]
        if last_n is not None and not 1 <= last_n <= T:
            raise GolfError(f"last_n must be between 1 and the row length {T}: found {last_n}")
        x0 = self.embed(ids)
        values = self.value_embeddings(ids)
        weights = self.weights(self.kernels)
        cos, sin = (table[:T] for table in self.rotary(max(T, rope_len or T)))

        def run(x, visit):
            i = visit.block
            return self.blocks[i].run(x, x0, weights[i], cos, sin, values.get(i),
                                      last_n if visit.last else None)

        return F.linear(rms_norm(self.run_blocks(x0, run)), self.tok_emb.to(self.compute))


def folded_weight(weight: Tensor, scale: Tensor) -> Tensor:
    "Rows of weight [..., out, in] times scale [..., out], multiplied in float32 and rounded once."
    return (weight * scale[..., None]).to(weight.dtype)


def joined(w: BlockWeights, kernels: frozenset) -> BlockWeights:
    "Weights of a block, or of all blocks, as these kernels want them."
    q, k, v, out, down = (t[:len(w.gain)] if t.ndim == 3 else t
                          for t in (w.q, w.k, w.v, w.out, w.down))
    if "heads" in kernels:
        w = w._replace(qkv=torch.cat((q, k, v), dim=-2))
    if "fold" in kernels:
        assert w.attn_scale is not None and w.mlp_scale is not None  # nothing is folded twice
        out, down = folded_weight(out, w.attn_scale), folded_weight(down, w.mlp_scale)
        w = w._replace(out=out, down=down, attn_scale=None, mlp_scale=None)
    return w


WHOLE = {"tok_emb.weight": "tok_emb", "bigram.embed.weight": "bigram_table",
         "bigram.scale": "bigram_scale",
         "bigram.proj.weight": "bigram_proj", "smear.gate": "smear_gate",
         "skip_weights": "skip_weights",
         "ve_shared.embed.weight": "ve_table", "ve_shared.proj.weight": "ve_proj",
         "ve_shared.scale": "ve_scale"}


def published_names(model: Golf) -> dict[str, tuple]:
    "Published name -> (parameter, index into it) for everything that is not in a bank."
    cfg = model.cfg
    present = {*model.tables, *model.scalars}
    names: dict[str, tuple] = {name: (param, ...)
                               for name, param in WHOLE.items() if param in present}
    for j in range(len(cfg.ve_layer_list)):
        names[f"ve_layer_scales.{j}"] = "ve_layer_scales", slice(j, j + 1)  # [1], as published
    for i in range(cfg.num_layers):
        names |= {f"blocks.{i}.{n}": (n, i) for n in ("attn_scale", "mlp_scale", "resid_mix")}
        names[f"blocks.{i}.attn.q_gain"] = ("q_gain", i)
    named = {param for param, _ in names.values()}
    return names | {param: (param, ...) for param in model.scalars if param not in named}


def published_views(model: Golf, banks: dict, others: Mapping) -> dict[str, Tensor]:
    "Views of full banks and other parameters (by their names here) under the published names."
    views = {name: others[param][at] for name, (param, at) in published_names(model).items()}
    return views | unbank(model.layout, banks)


@torch.no_grad()
def named_state(model: Golf, banks: dict | None = None, others: Mapping | None = None) -> dict:
    "Copies of the weights, or of these banks and others, under the published names."
    own = model.role_params()
    views = published_views(model, banks or own["bank"], others or own["table"] | own["scalar"])
    return {name: view.detach().clone(memory_format=torch.contiguous_format)
            for name, view in views.items()}


@torch.no_grad()
def load_named(model: Golf, state: Mapping[str, Tensor]):
    """Fill the model in place: the inverse of `named_state`, from tensors of any dtype and device.

    Raises GolfError, before anything is written, for a missing, surplus or misshapen tensor."""
    own = model.role_params()
    views = published_views(model, own["bank"], own["table"] | own["scalar"])
    advice = "build the model from the settings saved with them"
    names, found = set(views), set(state)
    for kind, wrong in (("lack", names - found), ("have the unknown", found - names)):
        require(not wrong, f"these weights do not belong to this model: they {kind} "
                f"{min(wrong, default='')!r} ({len(wrong)} such names); {advice}")
    for name, view in views.items():
        shape, saved = tuple(view.shape), tuple(state[name].shape)
        one = shape == (1,) and saved == ()  # as older files have it
        require(shape == saved or one, f"tensor {name} must have shape {shape}: found {saved}; "
                f"{advice}")
    for name, view in views.items():
        view.copy_(state[name])


def drawn_state(cfg: ModelSettings, seed: int) -> dict[str, Tensor]:
    "All random tensors of a fresh model by published name, drawn in the published order (PR #549)."
    g, tables, out = torch.Generator().manual_seed(seed), table_shapes(cfg), {}
    scalars = scalar_shapes(cfg, WeightedSkips())  # for skips nothing is drawn

    def normal(shape, std): return torch.empty(shape).normal_(0.0, std, generator=g)
    def orthogonal(shape): return torch.nn.init.orthogonal_(torch.empty(shape), generator=g)

    normal(tables["tok_emb"], 1.0)  # thrown away
    parts = ("bigram", "bigram_table", "bigram_proj"), ("ve_shared", "ve_table", "ve_proj")
    kinds = [part for part in parts if part[1] in tables]
    for kind, table, proj in kinds:
        normal(tables[table], 1.0)  # thrown away
        rows = normal(tables[table], 0.01) if kind == "ve_shared" else torch.zeros(tables[table])
        out[f"{kind}.embed.weight"] = rows
        # thrown away
        torch.nn.init.kaiming_uniform_(torch.empty(scalars[proj]), a=math.sqrt(5), generator=g)
    out["tok_emb.weight"] = normal(tables["tok_emb"], cfg.tied_embed_init_std)
    shapes = {m.name: (m.rows, m.cols) for _, _, m in bank_per_shape(cfg, 1)}
    for i in range(cfg.num_layers):
        for name in (f"blocks.{i}.{part}.weight"
                     for part in ("attn.c_q", "attn.c_k", "attn.c_v", "mlp.fc")):
            out[name] = orthogonal(shapes[name])
    return out | {f"{kind}.proj.weight": orthogonal(scalars[proj]) for kind, _, proj in kinds}


def init_model(model: Golf, cfg: ModelSettings, seed: int, draws: Callable = drawn_state):
    "Fill a fresh model: `draws(cfg, seed)`, constants for the rest, rounded to bfloat16."
    constant = {"attn_scale": 1.0, "mlp_scale": 1.0, "skip_weights": model.skips.start,
                "ve_layer_scales": 1.0, "q_gain": cfg.qk_gain_init, "bigram_scale": 0.05,
                "ve_scale": 0.1} | model.starts
    state = {name: torch.zeros_like(t, device="cpu") for name, t in named_state(model).items()}
    for name, (param, _) in published_names(model).items():
        state[name].fill_(constant.get(param, 0.0))
        if param == "resid_mix":
            state[name][0] = 1.0
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        state |= draws(cfg, seed)
    finally:
        torch.set_num_threads(threads)
    load_named(model, {name: t.bfloat16() for name, t in state.items()})


def saved_settings(model: Golf) -> dict:
    "What a file says of a model: the values of its `SavedModel`, plain data for JSON."
    values = {spec.name: getattr(model.cfg, spec.name) for spec in fields(ModelSettings)}
    plan = "shared_mlp" if "mlp_bank" in model.banks else "pr399"
    values |= {"plan": plan, "skip_gate": model.skips.word}
    if model.order != tuple(range(model.cfg.num_layers)) or model.cfg.visits > len(model.order):
        values |= {"order": ",".join(map(str, model.order)), "most_visits": model.cfg.visits}
    return values | model.saved_parts()


CONTROL_NAMES = ("attn_scale", "mlp_scale", "resid_mix", "q_gain", "skip_weights", "smear",
                 "ve_layer_scales",
                 "ve_shared.scale", "bigram.scale")


def quant_kind(name: str, shape: tuple[int, ...], small: int = SMALL_MATRIX) -> str:
    "How an artifact stores this tensor: fp16 up to `small` elements, else fp32, int6 or int8."
    if math.prod(shape) <= small:
        return "fp16"
    if len(shape) < 2 or any(c in name for c in CONTROL_NAMES):
        return "fp32"
    return "int6" if ".attn." in name or ".mlp." in name else "int8"


# ---- golfnb/muon/jit.py ----
try:
    import triton
    import triton.language as tl
    from triton.tools.tensor_descriptor import TensorDescriptor
except ImportError:  # no Triton on this machine: the plain twins do everything
    triton: Any = None
    TensorDescriptor: Any = None
    tl: Any = SimpleNamespace(constexpr=None)  # where kernels are defined and never run


@functools.cache
def jitted(kernel):
    "The compiled (or, under TRITON_INTERPRET=1, interpreted) form of a kernel function."
    return triton.jit(kernel)


KERNELS = frozenset({"heads", "mlp", "xsa", "loss", "fold", "ns"})


def usable_kernels(device: str | torch.device, dtype: torch.dtype,
                   wanted: Iterable[str] = KERNELS) -> frozenset[str]:
    "Those of `wanted` that may run on tensors of this device and dtype."
    cuda = triton is not None and torch.device(device).type == "cuda"
    if cuda and dtype in (torch.bfloat16, torch.float16):
        return frozenset(wanted)
    return frozenset()


def check_runnable(x: Tensor):
    "Raise GolfError where neither CUDA nor the interpreter can run a kernel on x."
    interpreted = os.environ.get("TRITON_INTERPRET") == "1" and x.dtype != torch.float64
    if triton is None or not (interpreted or usable_kernels(x.device, x.dtype)):
        raise GolfError(f"this kernel needs Triton and a 16-bit CUDA tensor: found {x.dtype} on "
                        f"{x.device}; use its plain twin instead")


# ---- golfnb/model/kernels.py ----
# Triton reads the annotations of kernels, and they are no types; a backward names its gradients:
# pyright: reportInvalidTypeForm=false, reportIncompatibleMethodOverride=false


HEAD_ROWS, XSA_ROWS = 32, 16  # tokens of one program


def kernel_op(name: str, schema: str, grad=None):
    """Decorator: `op(launch, *args)` makes outputs, filled if `launch`.

    `grad(ctx, *douts)` is its gradient.
    """
    def register(op):
        def run(*args):
            check_runnable(args[0])
            return op(True, *args)
        found = torch.library.custom_op(f"golfnb::{name}", run, mutates_args=(), schema=schema)
        found.register_fake(lambda *args: op(False, *args))
        if grad:
            def save(ctx, inputs, output): ctx.save_for_backward(*inputs)
            found.register_autograd(grad, setup_context=save)
        return found
    return register


def heads_forward_kernel(qkv, cos, sin, gain, q, k, T, eps, H: tl.constexpr, KV: tl.constexpr,
                         D: tl.constexpr, ROW: tl.constexpr, HALF: tl.constexpr,
                         ROWS: tl.constexpr):
    "q and k from qkv: norm, rotation, gain; a program is a head of a block of tokens, heads first."
    head, block = tl.program_id(0) % (H + KV), tl.program_id(0) // (H + KV)
    blocks = tl.cdiv(T, ROWS)  # of one row of the batch
    first = block % blocks * ROWS
    token = (block // blocks).to(tl.int64) * T + first  # the block's first token in the batch
    i, d = tl.arange(0, ROWS)[:, None], tl.arange(0, D)[None, :]    # the whole head: [ROWS, D]
    i3, half = tl.arange(0, ROWS)[:, None, None], tl.arange(0, 2)[None, :, None]
    j = tl.arange(0, HALF)[None, None, :]  # the rotated pair: [ROWS, 2, HALF]
    live, live3 = (first + i < T) & (d < D), (first + i3 < T) & (half < 2) & (j < HALF)
    qkv += token * ROW + head * D
    x = tl.load(qkv + i * ROW + d, mask=live, other=0.0).to(tl.float32)
    r = tl.rsqrt(tl.sum(x * x, 1) / D + eps)
    if head < H:
        r *= tl.load(gain + head).to(q.dtype.element_ty).to(tl.float32)
    a = tl.load(qkv + i3 * ROW + half * HALF + j, mask=live3, other=0.0).to(tl.float32)
    b = tl.load(qkv + i3 * ROW + (1 - half) * HALF + j, mask=live3, other=0.0).to(tl.float32)
    # + half * 0: for the shape alone, the same angles for both halves
    c = tl.load(cos + (first + i3) * HALF + j + half * 0, mask=live3, other=0.0).to(tl.float32)
    s = tl.load(sin + (first + i3) * HALF + j + half * 0, mask=live3, other=0.0).to(tl.float32)
    pair = (a * c + b * tl.where(half == 0, s, -s)) * r[:, None, None]
    if head < H:
        q += token * (H * D) + head * D
        tl.store(q + i * (H * D) + d, (x * r[:, None]).to(q.dtype.element_ty),
                 mask=live & (d >= 2 * HALF))
        tl.store(q + i3 * (H * D) + half * HALF + j, pair.to(q.dtype.element_ty), mask=live3)
    else:
        k += token * (KV * D) + (head - H) * D
        tl.store(k + i * (KV * D) + d, (x * r[:, None]).to(k.dtype.element_ty),
                 mask=live & (d >= 2 * HALF))
        tl.store(k + i3 * (KV * D) + half * HALF + j, pair.to(k.dtype.element_ty), mask=live3)


@kernel_op("heads", "(Tensor qkv, Tensor gain, Tensor cos, Tensor sin, int heads, int keys) "
           "-> (Tensor, Tensor)")
def heads_op(launch, qkv, gain, cos, sin, heads, keys):
    (B, T, C), D = qkv.shape, qkv.shape[2] // (heads + 2 * keys)
    outs = qkv.new_empty(B, T, heads, D), qkv.new_empty(B, T, keys, D)  # q and k
    if launch:
        given = (t.contiguous() for t in (qkv, cos, sin, gain))
        jitted(heads_forward_kernel)[((heads + keys) * triton.cdiv(T, HEAD_ROWS) * B,)](
            *given, *outs, T, NORM_EPS, H=heads, KV=keys, D=D, ROW=C, HALF=cos.shape[-1],
            ROWS=HEAD_ROWS)
    return outs


def heads_backward_kernel(dq, dk, dv, qkv, cos, sin, gain, dqkv, dgain, T, eps, H: tl.constexpr,
                          KV: tl.constexpr, D: tl.constexpr, ROW: tl.constexpr, HALF: tl.constexpr,
                          ROWS: tl.constexpr):
    "dqkv and parts of dgain from dq, dk, dv; programs as in the forward."
    head, block = tl.program_id(0) % (H + 2 * KV), tl.program_id(0) // (H + 2 * KV)
    first = block % tl.cdiv(T, ROWS) * ROWS
    token = (block // tl.cdiv(T, ROWS)).to(tl.int64) * T + first
    i, d = tl.arange(0, ROWS)[:, None], tl.arange(0, D)[None, :]
    i3, half = tl.arange(0, ROWS)[:, None, None], tl.arange(0, 2)[None, :, None]
    j = tl.arange(0, HALF)[None, None, :]  # + half * 0 below: for the shape alone
    live, live3 = (first + i < T) & (d < D), (first + i3 < T) & (half < 2) & (j < HALF)
    tail = live & (d >= 2 * HALF)  # coordinates that do not rotate
    qkv += token * ROW + head * D
    dqkv += token * ROW + head * D
    if head >= H + KV:
        dv += token * (KV * D) + (head - H - KV) * D
        passed_on = tl.load(dv + i * (KV * D) + d, mask=live, other=0.0)
        tl.store(dqkv + i * ROW + d, passed_on, mask=live)
        return
    c = tl.load(cos + (first + i3) * HALF + j + half * 0, mask=live3, other=0.0).to(tl.float32)
    s = tl.load(sin + (first + i3) * HALF + j + half * 0, mask=live3, other=0.0).to(tl.float32)
    if head < H:
        dq += token * (H * D) + head * D
        e = tl.load(dq + i * (H * D) + d, mask=tail, other=0.0).to(tl.float32)
        a = tl.load(dq + i3 * (H * D) + half * HALF + j, mask=live3, other=0.0).to(tl.float32)
        b = tl.load(dq + i3 * (H * D) + (1 - half) * HALF + j, mask=live3, other=0.0).to(tl.float32)
        w = tl.load(gain + head).to(dqkv.dtype.element_ty).to(tl.float32)
    else:
        dk += token * (KV * D) + (head - H) * D
        e = tl.load(dk + i * KV * D + d, mask=tail, other=0.0).to(tl.float32)
        a = tl.load(dk + i3 * KV * D + half * HALF + j, mask=live3, other=0.0).to(tl.float32)
        b = tl.load(dk + i3 * KV * D + (1 - half) * HALF + j, mask=live3, other=0.0).to(tl.float32)
        w = 1.0
    x = tl.load(qkv + i * ROW + d, mask=live, other=0.0).to(tl.float32)
    x3 = tl.load(qkv + i3 * ROW + half * HALF + j, mask=live3, other=0.0).to(tl.float32)
    e3 = a * c - b * tl.where(half == 0, s, -s)                             # the rotation undone
    r = tl.rsqrt(tl.sum(x * x, 1) / D + eps)
    dot = tl.sum(e * x, 1) + tl.sum(tl.sum(e3 * x3, 2), 1)
    rw, back = r * w, r * r * r * w * dot / D
    dx = e * rw[:, None] - x * back[:, None]
    tl.store(dqkv + i * ROW + d, dx.to(dqkv.dtype.element_ty), mask=tail)
    dx3 = e3 * rw[:, None, None] - x3 * back[:, None, None]
    tl.store(dqkv + i3 * ROW + half * HALF + j, dx3.to(dqkv.dtype.element_ty), mask=live3)
    if head < H:
        tl.store(dgain + head * (tl.num_programs(0) // (H + 2 * KV)) + block, tl.sum(dot * r))


@kernel_op("heads_grad",
           "(Tensor dq, Tensor dk, Tensor dv, Tensor qkv, Tensor gain, Tensor cos, Tensor sin) "
           "-> (Tensor, Tensor)")
def heads_grad_op(launch, dq, dk, dv, qkv, gain, cos, sin):
    (B, T, H, D), KV, blocks = dq.shape, dk.shape[2], (dq.shape[1] + HEAD_ROWS - 1) // HEAD_ROWS
    # dqkv, parts of dgain
    outs = qkv.new_empty(qkv.shape), qkv.new_empty(H, B * blocks, dtype=torch.float32)
    if launch:
        given = (t.contiguous() for t in (dq, dk, dv, qkv, cos, sin, gain))
        jitted(heads_backward_kernel)[((H + 2 * KV) * blocks * B,)](
            *given, *outs, T, NORM_EPS, H=H, KV=KV, D=D, ROW=qkv.shape[2], HALF=cos.shape[-1],
            ROWS=HEAD_ROWS)
    return outs


class FusedHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx, n, weight, gain, cos, sin, keys):
        qkv = F.linear(n, weight)
        q, k = heads_op(qkv, gain, cos, sin, gain.shape[0], keys)
        ctx.save_for_backward(n, weight, gain, cos, sin, qkv)
        return q, k, qkv[..., (q.shape[2] + keys) * q.shape[3]:].unflatten(-1, (keys, q.shape[3]))

    @staticmethod
    def backward(ctx, dq, dk, dv):
        n, weight, gain, cos, sin, qkv = ctx.saved_tensors
        dqkv, dgain = heads_grad_op(dq, dk, dv, qkv, gain, cos, sin)
        flat = dqkv.flatten(0, 1)
        dn, dweight = (flat @ weight).view(n.shape), flat.T @ n.flatten(0, 1)
        return dn, dweight, dgain.sum(1).to(gain.dtype), None, None, None


def fused_heads(n: Tensor, weight: Tensor, gain: Tensor, cos: Tensor, sin: Tensor, keys: int):
    "q, k, v [B, T, heads, D] of n [B, T, C]: one product for all, then `qk_norm_rope_gain`."
    return FusedHeads.apply(n, weight, gain, cos, sin, keys)


def heads_fit(head_dim: int, rope_dims: int) -> bool:
    "Whether a head falls into groups of rope_dims/2 coordinates, all powers of two."
    return 2 <= rope_dims <= head_dim and all(n & (n - 1) == 0 for n in (rope_dims // 2, head_dim))


def xsa_forward_kernel(y, v, out, R, v_row, KV: tl.constexpr, GROUP: tl.constexpr,
                       D: tl.constexpr, ROWS: tl.constexpr):
    "out = y less its part along v; a program is a key head of a block of tokens, heads first."
    head = tl.program_id(0) % KV
    row = (tl.program_id(0) // KV * ROWS + tl.arange(0, ROWS))[:, None].to(tl.int64)
    d = tl.arange(0, D)[None, :]
    live = (row < R) & (d < D)
    u = tl.load(v + row * v_row + head * D + d, mask=live, other=0.0).to(tl.float32)
    u *= 1.0 / tl.maximum(tl.sqrt(tl.sum(u * u, 1, keep_dims=True)), 1e-12)
    for i in tl.static_range(GROUP):
        at = row * (KV * GROUP * D) + (head * GROUP + i) * D + d
        t = tl.load(y + at, mask=live, other=0.0).to(tl.float32)
        tl.store(out + at,
                 (t - tl.sum(t * u, 1, keep_dims=True) * u).to(out.dtype.element_ty), mask=live)


def xsa_backward_kernel(dout, y, v, dy, dv, R, v_row, KV: tl.constexpr, GROUP: tl.constexpr,
                        D: tl.constexpr, ROWS: tl.constexpr):
    "dy and dv from dout; programs as in the forward."
    head = tl.program_id(0) % KV
    row = (tl.program_id(0) // KV * ROWS + tl.arange(0, ROWS))[:, None].to(tl.int64)
    d = tl.arange(0, D)[None, :]
    live = (row < R) & (d < D)
    u = tl.load(v + row * v_row + head * D + d, mask=live, other=0.0).to(tl.float32)
    size = tl.sqrt(tl.sum(u * u, 1, keep_dims=True))
    inverse = 1.0 / tl.maximum(size, 1e-12)
    u, du = u * inverse, u * 0.0
    for i in tl.static_range(GROUP):
        at = row * (KV * GROUP * D) + (head * GROUP + i) * D + d
        t = tl.load(y + at, mask=live, other=0.0).to(tl.float32)
        e = tl.load(dout + at, mask=live, other=0.0).to(tl.float32)
        along = tl.sum(e * u, 1, keep_dims=True)
        tl.store(dy + at, (e - along * u).to(dy.dtype.element_ty), mask=live)
        du -= along * t + tl.sum(t * u, 1, keep_dims=True) * e
    du -= tl.where(size > 1e-12, tl.sum(du * u, 1, keep_dims=True), 0.0) * u
    dv += row * (KV * D) + head * D + d
    tl.store(dv, (du * inverse).to(dv.dtype.element_ty), mask=live)


def rows_apart(v: Tensor) -> Tensor:
    "v [B, T, KV, D] if tokens lie at one distance and heads side by side, else a contiguous copy."
    B, T, KV, D = v.shape
    even = v.stride(3) == 1 and v.stride(2) == D and (B == 1 or v.stride(0) == T * v.stride(1))
    return v if even else v.contiguous()


@kernel_op("xsa_grad", "(Tensor dout, Tensor y, Tensor v) -> (Tensor, Tensor)")
def xsa_grad_op(launch, dout, y, v):
    (B, T, H, D), KV, outs = y.shape, v.shape[2], (y.new_empty(y.shape), v.new_empty(v.shape))
    if launch:
        v = rows_apart(v)
        jitted(xsa_backward_kernel)[(KV * triton.cdiv(B * T, XSA_ROWS),)](
            dout.contiguous(), y.contiguous(), v, *outs, B * T, v.stride(1), KV=KV, GROUP=H // KV,
            D=D, ROWS=XSA_ROWS)
    return outs


@kernel_op("xsa", "(Tensor y, Tensor v) -> Tensor",
           lambda ctx, dout: xsa_grad_op(dout, *ctx.saved_tensors))
def xsa_op(launch, y, v):
    (B, T, H, D), KV, out = y.shape, v.shape[2], y.new_empty(y.shape)
    if launch:
        v = rows_apart(v)
        jitted(xsa_forward_kernel)[(KV * triton.cdiv(B * T, XSA_ROWS),)](
            y.contiguous(), v, out, B * T, v.stride(1), KV=KV, GROUP=H // KV, D=D, ROWS=XSA_ROWS)
    return out


def fused_exclusive(y: Tensor, v: Tensor) -> Tensor:
    "Twin of `exclusive`: y [B, T, H, D] without its part along v [B, T, KV, D]."
    return xsa_op(y, v)


def xsa_fit(head_dim: int) -> bool:
    "Whether a head is a power of two wide, as the kernel reads it."
    return head_dim & (head_dim - 1) == 0


def mlp_product_kernel(a, b, z, out, M, N, K, slope, BACKWARD: tl.constexpr, SAVE: tl.constexpr,
                       FLAT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    "Tiles of the product with the activation in the epilogue, or with its derivative."
    across = tl.cdiv(N, BN)
    for tile in tl.range(tl.program_id(0), tl.cdiv(M, BM) * across, tl.num_programs(0),
                         flatten=FLAT):
        row, col = (tile // across) * BM, (tile % across) * BN
        acc = tl.zeros((BM, BN), dtype=tl.float32)
        for at in tl.range(0, K, BK):
            x = a.load([row, at])
            if BACKWARD:  # b is [K, N], else [N, K]
                acc = tl.dot(x, b.load([at, col]), acc)
            else:
                acc = tl.dot(x, b.load([col, at]).T, acc)
        left, right = tl.split(tl.permute(tl.reshape(acc, (BM, 2, BN // 2)), (0, 2, 1)))
        halves = (left, right)
        for part in tl.static_range(2):
            here = col + part * (BN // 2)
            if BACKWARD:
                t = z.load([row, here]).to(tl.float32)
                t = halves[part] * 2.0 * tl.where(t > 0, t, slope * slope * t)
                out.store([row, here], t.to(out.dtype))
            else:
                t = halves[part].to(out.dtype)
                if SAVE:
                    z.store([row, here], t)
                t = t.to(tl.float32)
                t = tl.where(t > 0, t, slope * t)
                out.store([row, here], (t * t).to(out.dtype))


Tiles = namedtuple("Tiles", "BM BN BK num_warps num_stages waves FLAT",
                   defaults=(128, 128, 64, 4, 3, 2, 1))
MLP_UP_TILES, MLP_DOWN_TILES = Tiles(), Tiles(waves=0, FLAT=0)


def mlp_launch(a, b, z, out, slope: float, tiles: Tiles, backward: bool, save: bool):
    "out = f(a b^T), and z = a b^T if `save`; or, backward, out = (a b) f'(z)."
    (M, K), N, (BM, BN, BK, num_warps, num_stages, waves, flat) = a.shape, out.shape[1], tiles
    count, half = triton.cdiv(M, BM) * triton.cdiv(N, BN), [BM, BN // 2]
    if waves and a.is_cuda:
        count = min(count, waves * torch.cuda.get_device_properties(a.device).multi_processor_count)
    b_block = [BK, BN] if backward else [BN, BK]
    parts = (a, [BM, BK]), (b, b_block), (z, half), (out, half)
    jitted(mlp_product_kernel)[(count,)](
        *(TensorDescriptor.from_tensor(t, block) for t, block in parts), M, N, K, slope,
        BACKWARD=backward,
        SAVE=save, FLAT=bool(flat), BM=BM, BN=BN, BK=BK, num_warps=num_warps, num_stages=num_stages)


@kernel_op("mlp_up",
           "(Tensor n, Tensor up, float slope, bool save, int[] tiles) -> (Tensor, Tensor)")
def mlp_up_op(launch, n, up, slope, save, tiles):
    h = n.new_empty(n.shape[0], up.shape[0])
    z = torch.empty_like(h) if save else n.new_empty(0, up.shape[0])
    if launch:
        stored = z if save else h  # where nothing is saved, the kernel does not write there
        mlp_launch(n.contiguous(), up.contiguous(), stored, h, slope, tiles, False, save)
    return h, z


@kernel_op("mlp_down_grad",
           "(Tensor dm, Tensor down, Tensor z, float slope, int[] tiles) -> Tensor")
def mlp_down_grad_op(launch, dm, down, z, slope, tiles):
    dz = torch.empty_like(z)
    if launch:
        mlp_launch(dm.contiguous(), down.contiguous(), z, dz, slope, tiles, True, False)
    return dz


class FusedMlp(torch.autograd.Function):
    @staticmethod
    def forward(ctx, n, up, down, slope, save, up_tiles, down_tiles):
        h, z = mlp_up_op(n.flatten(0, -2), up, slope, save, up_tiles)
        ctx.save_for_backward(n, up, down, h, z)
        ctx.rest = slope, down_tiles
        return F.linear(h, down).view(*n.shape[:-1], -1)

    @staticmethod
    def backward(ctx, dm):
        n, up, down, h, z = ctx.saved_tensors
        dm = dm.flatten(0, -2)
        dz = mlp_down_grad_op(dm, down, z, *ctx.rest)
        return (dz @ up).view(n.shape), dz.T @ n.flatten(0, -2), dm.T @ h, None, None, None, None


def fused_mlp(n: Tensor, up: Tensor, down: Tensor, slope: float,
              tiles=(MLP_UP_TILES, MLP_DOWN_TILES)):
    "Twin of linear, `squared_leaky`, linear of n [..., D]: up [hidden, D], down [D, hidden]."
    return FusedMlp.apply(n, up, down, slope, torch.is_grad_enabled(), *map(list, tiles))


def mlp_fit(hidden: int, D: int, dtype: torch.dtype) -> bool:
    "Whether rows of [hidden, D] and of its transpose start on 16 bytes each, as bulk copies need."
    return hidden * dtype.itemsize % 16 == 0 and D * dtype.itemsize % 16 == 0


@dataclass
class FusedBlock(Block):
    "A block that computes with `kernels`, those of this chapter; the MLP's products in `tiles`."
    kernels: frozenset = frozenset()
    tiles: tuple = (MLP_UP_TILES, MLP_DOWN_TILES)

    def heads(self, n, w, cos, sin, ve=None, last_n=None):
        "As `Block.heads`."
        if "heads" not in self.kernels or last_n not in (None, n.shape[1]):
            return Block.heads(self, n, w, cos, sin, ve, last_n)
        assert w.qkv is not None  # `joined` made it
        q, k, v = fused_heads(n, w.qkv, w.gain, cos, sin, w.k.shape[0] // self.head_dim)
        return q, k, v if ve is None else v + ve.view(v.shape)

    def exclusive(self, y, v):
        "As `Block.exclusive`."
        return fused_exclusive(y, v) if "xsa" in self.kernels else Block.exclusive(self, y, v)

    def mlp(self, n, w):
        "As `Block.mlp`."
        if "mlp" not in self.kernels:
            return Block.mlp(self, n, w)
        assert isinstance(self.activation, LeakyReluSquared)  # `fuse` saw to it
        h = fused_mlp(n, w.up, w.down, self.activation.negative_slope, self.tiles)
        return scaled(h, w.mlp_scale)


def fuse(model: Golf, kernels: Iterable[str], tiles: tuple = (MLP_UP_TILES, MLP_DOWN_TILES)):
    """Let a model compute with these kernels from now on, as far as they suit its shapes.

    `kernels`: names of `KERNELS` (chapter 15), such as `usable_kernels` gives; GolfError for
    others. An activation of your own has no kernel.
    """
    cfg, kernels = model.cfg, set(kernels)
    unknown = sorted(kernels - KERNELS)
    require(not unknown, f"kernels must be among {', '.join(sorted(KERNELS))}, found "
            f"{', '.join(map(repr, unknown))}: correct the names")
    fits = {"heads": heads_fit(cfg.head_dim, cfg.rope_dims), "xsa": xsa_fit(cfg.head_dim),
            "mlp": (type(model.activation) is LeakyReluSquared
                    and mlp_fit(cfg.mlp_dim, cfg.model_dim, model.compute))}
    model.kernels = frozenset(k for k in kernels if fits.get(k, True))
    model.blocks = [make_block(cfg, i, model.activation, model.attention, FusedBlock,
                               kernels=model.kernels, tiles=tiles)
                    for i in range(cfg.num_layers)]


# ---- golfnb/text/bpb.py ----
def bits_per_byte(nll_sum: torch.Tensor | float, byte_count: torch.Tensor | float) -> float:
    "Bits per byte of a text, from its summed loss in nats and its bytes. GolfError for no bytes."
    require(byte_count > 0, "bits per byte need at least one byte of text, found "
            f"{byte_count}: check the shards")
    return float(nll_sum) / math.log(2) / float(byte_count)


def tokenizer_bytes(path: str | Path) -> bytes:
    "What a tokenizer's file holds. Raises GolfError if it is missing or cannot be read."
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise GolfError(f"cannot read tokenizer {path} ({error.strerror}): expected a "
                        "SentencePiece .model file; set TOKENIZER_PATH, or fetch or train "
                        "it") from None


def load_tokenizer(path: str | Path, vocab_size: int | None = None) -> spm.SentencePieceProcessor:
    "Load a SentencePiece model. GolfError if it is missing, damaged or not of `vocab_size` pieces."
    sp, data = spm.SentencePieceProcessor(), tokenizer_bytes(path)
    try:
        sp.LoadFromSerializedProto(data)
        sp.id_to_piece(list(range(sp.get_piece_size())))  # ValueError for pieces that are not UTF-8
    except (RuntimeError, ValueError) as error:
        raise GolfError(f"cannot read tokenizer {path}: expected a SentencePiece "
                        ".model file, found a damaged one; set TOKENIZER_PATH, or "
                        "fetch or train it again") from error
    found = sp.get_piece_size()
    require(vocab_size in (None, found), f"tokenizer {path} must have VOCAB_SIZE={vocab_size} "
            f"pieces, found {found}: set VOCAB_SIZE={found} or use the matching tokenizer and "
            "shards")
    return sp


def tokenizer_hash(path: str | Path) -> str:
    "The SHA-256 of a tokenizer's file, as 64 hex digits. Raises GolfError if it cannot be read."
    return hashlib.sha256(tokenizer_bytes(path)).hexdigest()


@dataclass
class ByteTable:
    """The bytes of text behind every token of a vocabulary of V pieces.

    `base` int16 [V]: bytes without the leading space. `leading_space` bool [V]: one
    more byte, for a space, unless the token before is a boundary. `boundary` bool
    [V]: the token stands for no text. `bos`: the token that begins a document, -1
    for none; 1 is that of the published tokenizers.
    """
    base: torch.Tensor
    leading_space: torch.Tensor
    boundary: torch.Tensor
    bos: int = 1

    def to(self, device: torch.device | str) -> "ByteTable":
        "The same table on another device."
        return ByteTable(self.base.to(device), self.leading_space.to(device),
                         self.boundary.to(device), self.bos)


def byte_table(sp: spm.SentencePieceProcessor) -> ByteTable:
    "The byte table of a tokenizer that `load_tokenizer` gave, on the CPU. GolfError for a path."
    require(not isinstance(sp, (str, Path)), f"a tokenizer must be loaded to have a table, found "
            f"{sp}: call byte_table(load_tokenizer({str(sp)!r}))")
    rows = []
    for i in range(sp.get_piece_size()):
        piece = sp.id_to_piece(i)
        silent = sp.is_control(i) or sp.is_unknown(i) or sp.is_unused(i)
        text = piece.removeprefix("▁").replace("▁", " ")
        if silent:
            text = ""
        elif sp.is_byte(i):
            text = "?"  # one byte, whatever it is
        rows.append((len(text.encode()), piece.startswith("▁") and not silent, silent))
    base, leading, boundary = map(torch.tensor, zip(*rows, strict=True))
    return ByteTable(base.to(torch.int16), leading, boundary, sp.bos_id())


def target_bytes(table: ByteTable, prev: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Bytes of text behind each target, given the token before it; all int64, of one shape.

    All must be tokens of the table, which is not checked, as a GPU would wait: leave out positions
    that a loss ignores (-100), they would be read from the table's end.
    """
    return table.base[target].long() + (table.leading_space[target] & ~table.boundary[prev]).long()


def unigram_bpb(train_counts: np.ndarray, val_tokens: np.ndarray, table: ByteTable) -> float:
    "Bits per byte of `val_tokens` by shares of `train_counts` [V] + 1. GolfError for another V."
    counts = torch.as_tensor(np.asarray(train_counts, dtype=np.float64))
    require(counts.shape == table.base.shape,
            f"token counts must be one for each of {len(table.base)} pieces, found shape "
            f"{tuple(counts.shape)}: count with numpy.bincount(tokens, minlength=vocab_size)")
    tokens = torch.as_tensor(np.asarray(val_tokens, dtype=np.int64))
    log_prob = torch.log((counts + 1) / (counts.sum() + len(counts)))
    seen = torch.bincount(tokens[1:], minlength=len(counts))
    nats = -math.fsum((seen * log_prob).tolist())  # exact, so that no number of threads changes it
    return bits_per_byte(nats, target_bytes(table, tokens[:-1], tokens[1:]).sum())


# ---- golfnb/text/shards.py ----
def cannot_write(path: Path, error: OSError) -> GolfError:
    "What to raise where a file cannot be written."
    free = shutil.disk_usage(path.parent).free if path.parent.is_dir() else 0
    return GolfError(f"cannot write {path} ({error.strerror}; {free:,} bytes free on its disk): "
                     "free some space or write elsewhere")


def atomic_write(path: str | Path, data: bytes | str) -> None:
    "Write a file whole or not at all; text as UTF-8. Raises GolfError if it cannot be written."
    path = Path(path)
    temp = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}.tmp")
    if isinstance(data, str):
        data = data.encode()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(temp, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temp, path)
    except OSError as error:
        raise cannot_write(path, error) from error
    finally:
        with suppress(OSError):
            temp.unlink(missing_ok=True)  # it is there only if something failed


SHARD_MAGIC, SHARD_VERSION = 20240520, 1
HEADER_BYTES = 1024


@contextmanager
def shard_file(path: str | Path):
    "An open shard and its number of tokens. GolfError if it is missing, damaged or no shard."
    try:
        with open(path, "rb", buffering=0) as file:
            stat = os.fstat(file.fileno())
            yield file, _checked_header(str(path), stat.st_size, stat.st_mtime_ns)
    except OSError as error:
        raise GolfError(f"cannot read shard {path} ({error.strerror}): check the path") from None


def read_header(path: str | Path) -> int:
    "The tokens in a shard. Raises GolfError as `shard_file` does."
    with shard_file(path) as (_, tokens):
        return tokens


@cache
def _checked_header(path: str, size: int, mtime_ns: int) -> int:
    "The tokens that the header of a file of this size and time promises."
    magic, version, tokens = [*np.fromfile(path, "<i4", 3).tolist(), 0, 0, 0][:3]
    wanted = HEADER_BYTES + 2 * max(tokens, 0)
    require(size >= HEADER_BYTES + 2, f"shard {path} must have a header of {HEADER_BYTES} bytes "
            f"and at least one token, found {size} bytes: it is empty or cut off, build it again")
    require(magic == SHARD_MAGIC, f"shard {path} must start with magic {SHARD_MAGIC}, found "
            f"{magic}: it is no token shard")
    require(version == SHARD_VERSION, f"shard {path} must be of version {SHARD_VERSION}, found "
            f"{version}: build it again")
    require(tokens > 0 and size == wanted, f"shard {path} must have {wanted:,} bytes for its "
            f"{tokens:,} tokens, found {size:,}: it is cut off or damaged, copy or build it again")
    return tokens


def read_span(path: str | Path, begin: int, count: int, expected: int | None = None) -> np.ndarray:
    """A copy of `count` tokens of a shard, from token `begin` on: uint16 [count].

    Raises GolfError as `shard_file` does, if the shard no longer has
    `expected` tokens, or if it ends early.
    """
    with shard_file(path) as (file, tokens):
        wanted = expected or tokens
        require(tokens == wanted, f"shard {path} must keep its {wanted:,} tokens while training "
                f"runs, found {tokens:,}: do not change shards in use")
        part = np.fromfile(file, "<u2", count, offset=HEADER_BYTES + 2 * begin)
    require(part.size == count, f"shard {path} must hold tokens {begin:,} to {begin + count:,}, "
            f"{count - part.size:,} of them missing: it is cut off or damaged, build it again")
    return part


SHARD_NAME = re.compile(r"(.+)_(train|val)_[0-9]+\.bin")
PATTERN_SIDE = re.compile(r"_(train|val)_[^_]*$")


def shard_name(path: str | Path) -> tuple[str, str]:
    "Corpus and side (train or val) of a shard, as its name says; two empty words for another name."
    found = SHARD_NAME.fullmatch(Path(path).name)
    return (found[1], found[2]) if found else ("", "")


def matching_shards(pattern: str | Path) -> tuple[list[Path], list[Path]]:
    """Which files that a pattern matches are shards of its side, and the others, sorted.

    A pattern that names no side takes both. One file, named whole, is taken whatever its name.
    """
    text = str(pattern)
    if os.path.isfile(text):
        return [Path(text)], []
    named = PATTERN_SIDE.search(Path(text).name)
    sides = [named[1]] if named else ["train", "val"]
    taken, others = [], []
    for path in sorted(filter(os.path.isfile, glob.glob(text))):
        kind = taken if shard_name(path)[1] in sides else others
        kind.append(Path(path))
    return taken, others


def find_shards(pattern: str | Path) -> list[Path]:
    "The shards that a path or a pattern with * and ? names, sorted. GolfError if there is none."
    taken, others = matching_shards(pattern)
    found = f"only {others[0].name} or the like" if others else "none"
    require(taken, f"no shard matches {pattern}: expected at least one file, named as "
            f"NAME_train_000000.bin or NAME_val_000000.bin are, found {found}; "
            "check the directory (DATA_PATH) and the pattern")
    return taken


def left_out(*patterns: str | Path) -> str:
    "A note on files that match and `find_shards` does not take; empty if there are none."
    others = [path.name for pattern in patterns for path in matching_shards(pattern)[1]]
    if not others:
        return ""
    return (f"note: {len(others):,} files beside the shards are left out, as their names are not "
            f"those of shards: {', '.join(others[:3])}")


def check_tokens(path: str | Path, tokens: np.ndarray, vocab_size: int) -> None:
    "Raise GolfError unless these tokens of a shard are below `vocab_size`."
    if tokens.max(initial=0) >= vocab_size:
        raise GolfError(f"tokens of {path} must be below VOCAB_SIZE={vocab_size}, found "
                        f"{tokens.max()}: the shard belongs to another tokenizer")


def read_tokens(pattern: str | Path, vocab_size: int | None = None) -> np.ndarray:
    "The tokens of all matching shards, uint16 [n]. GolfError unless all are below `vocab_size`."
    parts = []
    for path in find_shards(pattern):
        parts.append(read_span(path, 0, read_header(path)))
        check_tokens(path, parts[-1], vocab_size or 65_536)
    return np.concatenate(parts).astype(np.uint16, copy=False)


def val_tokens(pattern: str | Path, seq_len: int, vocab_size: int) -> np.ndarray:
    "The validation stream, uint16 [rows * seq_len + 1]. Raises GolfError for less than one row."
    tokens = read_tokens(pattern, vocab_size=vocab_size)
    rows = (tokens.size - 1) // seq_len
    require(rows > 0, f"validation must hold at least one window of {seq_len} tokens and one "
            f"more, found {tokens.size} tokens in {pattern}: use more validation text or a shorter "
            "window")
    return tokens[: rows * seq_len + 1]


def bytes_note(shards: Sequence[Path]) -> str:
    """A note where a score of validation shards divides by other bytes than those of their text.

    The manifest beside them says so; empty if not, or if it does not know them.
    """
    try:
        made = json.loads(shards[0].with_name("manifest.json").read_bytes())["val"]
        counted, whole = int(made["counted_bytes"]), int(made["text_bytes"])
        known = {shard["name"] for shard in made["shards"]}
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return ""  # published shards have no manifest, and those of earlier versions no such count
    if counted == whole or not known.issuperset(path.name for path in shards):
        return ""
    return (f"note: bits per byte are counted on {counted:,} bytes; the validation text has "
            f"{whole:,}, which the tokenizer's normalisation changes")


# ---- golfnb/muon/newton_schulz.py ----
NS5_COEFFS = ((3.4445, -4.7750, 2.0315),) * 5  # Muon, Keller Jordan


def ns_product_kernel(x, square, norm, out, M, K, a, b, c, POLYNOMIAL: tl.constexpr,
                      TURNED: tl.constexpr, SIDE: tl.constexpr):
    """A tile of X X^T for X [n, M, K], and its mirror image.

    POLYNOMIAL: of (a I + b S + c S S^T) / norm for S = X / norm^2. `x` describes the rows of all
    X, each stored as [K, M] if TURNED; `square` is X if POLYNOMIAL.
    """
    high = M // SIDE
    tiles = high * (high + 1) // 2
    n, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    other, i = tile // (high + 1), tile % (high + 1)
    # columns j and other have high + 1 tiles between them: of 4 x 4 tiles, 3 and 0 have five
    j = high - 1 - other
    if i > j:
        i -= j + 1
        j = other
    first, left = i * SIDE, j * SIDE
    acc = tl.zeros((SIDE, SIDE), dtype=tl.float32)
    for k in tl.range(0, K, 64):
        if TURNED:
            acc = tl.dot(x.load([n * K + k, first]).T, x.load([n * K + k, left]), acc)
        else:
            acc = tl.dot(x.load([n * M + first, k]), x.load([n * M + left, k]).T, acc)
    row, col, start = first + tl.arange(0, SIDE), left + tl.arange(0, SIDE), n.to(tl.int64) * M * M
    here = start + row[:, None] * M + col[None, :]
    if POLYNOMIAL:
        s = 1 / tl.load(norm + n)
        acc = c * (acc * s * s * s * s) + b * (tl.load(square + here).to(tl.float32) * s * s)
        acc = s * (acc + tl.where(row[:, None] == col[None, :], a, 0.0))
    found = acc.to(out.dtype.element_ty)
    tl.store(out + here, found)
    if i < j:
        tl.store(out + start + col[:, None] * M + row[None, :], tl.trans(found))


def half_product(x: Tensor, side: int, warps: int, norm: Tensor | None = None,
                 polynomial: tuple = (0.0, 0.0, 0.0), out: Tensor | None = None) -> Tensor:
    """X X^T of each X of x [n, M, K], M a multiple of `side`, K one of 64; sums in fp32.

    With `norm` [n] and (a, b, c), for symmetric X: (a I + b S + c S S^T) / norm, S = X / norm^2.
    Raises GolfError where no kernel can run. In `out` [n, M, M], if there is one.
    """
    check_runnable(x)
    n, M, K = x.shape
    turned = not x.is_contiguous()
    rows = x.mT.reshape(n * K, M) if turned else x.reshape(n * M, K)
    block = [64, side] if turned else [side, 64]
    high = M // side
    if out is None:
        out = x.new_empty(n, M, M)
    with torch.cuda.device_of(x):  # Triton launches on the current device
        jitted(ns_product_kernel)[(n * high * (high + 1) // 2,)](
            TensorDescriptor.from_tensor(rows, block), x, norm, out, M, K, *polynomial,
            POLYNOMIAL=norm is not None, TURNED=turned, SIDE=side, num_warps=warps, num_stages=4)
    return out


def halved_steps(X: Tensor, coeffs, scale: float, eps: float, tiles: tuple) -> Tensor:
    "The steps of `newton_schulz`, symmetric products by halves, with a row of PRODUCT_TILES."
    _, side, warps, both = tiles
    both = both and X.shape[2] % 64 == 0
    if not X.mT.is_contiguous():
        X = X.contiguous()
    if X.data_ptr() % 16:  # no descriptor may start there
        X = X.clone()
    ones = X.new_ones(len(X), dtype=torch.float32)
    for step, polynomial in enumerate(coeffs):
        A = half_product(X, side, warps) if both else torch.bmm(X, X.mT)
        norm = ones
        if step == 0:  # X is not divided yet
            squares = A.diagonal(dim1=1, dim2=2).sum(-1, dtype=torch.float32)
            norm = squares.sqrt() * scale + eps
        X = torch.bmm(half_product(A, side, warps, norm, polynomial), X)
    return X


PRODUCT_TILES = (  # short side at most; side and warps of a tile; is X X^T by the kernel too?
    (512, 64, 4, False),
    (4096, 128, 8, True),
    (4096, 64, 4, False))


def product_tiles(X: Tensor) -> tuple | None:
    "The first row of PRODUCT_TILES that fits X [n, short, long]; None: the library multiplies."
    derivative = X.requires_grad and torch.is_grad_enabled()  # a kernel has none
    overflows = X.dtype == torch.float16                      # X X^T of an X that is not divided
    if derivative or overflows or not X.numel() or not usable_kernels(X.device, X.dtype):
        return None
    if X.is_cuda and torch.cuda.get_device_capability(X.device)[0] != 9:  # not measured
        return None
    short = X.shape[1]
    fitting = (row for row in PRODUCT_TILES if short <= row[0] and short % row[1] == 0)
    return next(fitting, None)


def frobenius_norm(X: Tensor) -> Tensor:
    "Of each matrix of X [n, r, c], as [n, 1, 1]; in fp32 for fp16, which ends at 65,504."
    dtype = torch.float32 if X.dtype == torch.float16 else X.dtype
    return torch.linalg.vector_norm(X, dim=(-2, -1), keepdim=True, dtype=dtype)


def newton_schulz(G: Tensor, coeffs=NS5_COEFFS, scale: float = 1.0, eps: float = 1e-7, dtype=None,
                  kernels: bool = True) -> Tensor:
    """Each matrix of G [..., r, c] orthogonal, in three products a step;
    zero ones stay zero (PR #399).

    A step for each (a, b, c) of `coeffs`, after dividing by `scale` times the norm plus `eps`;
    `dtype` of products and result, None: G's; `kernels`: use Triton where it is faster. In fp32 and
    bf16 the squares of a matrix whose norm is above 1.8e19 are infinite, and it becomes zero.
    Raises GolfError if G is no float matrix.
    """
    require(G.ndim >= 2 and G.is_floating_point(), "Newton-Schulz needs a float tensor of at least "
            f"two dimensions: found {G.dtype} of shape {tuple(G.shape)}")
    X = G.to(dtype or G.dtype).reshape(prod(G.shape[:-2]), *G.shape[-2:])
    tall = X.shape[-2] > X.shape[-1]
    X = X.mT if tall else X
    tiles = product_tiles(X) if kernels and coeffs else None
    if tiles:
        X = halved_steps(X, coeffs, scale, eps, tiles)
    else:
        X = (X / (frobenius_norm(X) * scale + eps)).to(X.dtype)
        for a, b, c in coeffs:
            A = torch.bmm(X, X.mT)
            A = torch.baddbmm(A, A, A, beta=b, alpha=c)
            X = torch.baddbmm(X, A, X, beta=a)
    X = X.mT if tall else X
    return X.reshape(G.shape)


def first_steps(coeffs: tuple, steps: int) -> tuple:
    "The coefficients of so many steps, the last ones repeated. Raises GolfError if steps < 1."
    require(steps >= 1, f"Newton-Schulz needs at least one step, found {steps}: 5 are usual")
    repeated = coeffs[-1:] * (steps - len(coeffs))
    return (coeffs + repeated)[:steps]


def quintic(G: Tensor, steps: int = 5, dtype: torch.dtype | None = None) -> Tensor:
    """Make every matrix of G [..., r, c] nearly orthogonal, as published for Muon.

    Each step is the same quintic. Singular values end about 1, directions stay. `dtype` of products
    and result, None: bf16 on CUDA, else G's. GolfError if G is no float matrix, or without a step.
    """
    usual = torch.bfloat16 if G.is_cuda else G.dtype
    return newton_schulz(G, first_steps(NS5_COEFFS, steps), dtype=dtype or usual)


# ---- golfnb/model/plan.py ----
@dataclass(frozen=True)
class CommSchedule:
    "The communication schedule: banks in order of reduce-scatters, and of updates and gathers."
    scatter: tuple[str, ...]
    work: tuple[str, ...]


def check_comm_schedule(plan: CommSchedule, layout: Layout):
    "Raises GolfError unless both orders name every bank once: else one is never updated."
    banks = sorted(b.name for b in layout.banks)
    for what, order in (("scatter", plan.scatter), ("work", plan.work)):
        require(sorted(order) == banks, f"a plan's {what} order must name each of "
                f"{', '.join(banks)} exactly once: found {', '.join(order) or 'nothing'}; make it "
                "with comm_schedule(layout)")


def comm_schedule(layout: Layout, order: str = "big_first") -> CommSchedule:
    "Both orders by unpadded size; `order` is big_first or small_first. GolfError for another word."
    require(order in ("big_first", "small_first"),
            f"a plan's order must be big_first or small_first: found {order!r}")
    size = {b.name: sum(m.rows * m.cols for m in b.matrices) for b in layout.banks}
    names = tuple(sorted(size, key=lambda n: size[n] if order == "small_first" else -size[n]))
    return CommSchedule(names, names)


# ---- golfnb/model/engine.py ----
# torch gives torch._foreach_copy_ and dist.rendezvous out without saying so to type checkers:
# pyright: reportPrivateImportUsage=false


class Ranks:
    """This process: its rank, the number of ranks (`world`), its device, and small collectives.

    `group` is their process group (None: that of all ranks), `long_timeout_group` one whose
    collectives may wait for minutes; `node` of `nodes` is this machine, 0 that of rank 0; `local`
    is the rank's place on it.
    """

    def __init__(self, rank: int = 0, world: int = 1, device: str | torch.device = "cpu",
                 long_timeout_group=None, group=None, local: int | None = None, node: int = 0,
                 nodes: int = 1):
        self.rank, self.world, self.device = rank, world, torch.device(device)
        self.long_timeout_group = long_timeout_group
        self.group = group
        self.local = rank if local is None else local
        self.node, self.nodes, self.is_rank0 = node, nodes, rank == 0

    def sum(self, t: Tensor) -> Tensor:
        "Sum `t` over all ranks, in place; returns it."
        if self.world > 1:
            dist.all_reduce(t, group=self.group)
        return t

    def sum_late(self, t: Tensor) -> Tensor:
        "`sum` where ranks may have `t` ready minutes apart: waits for the last one."
        t.ravel()[:1].tolist()  # a GPU's queue may hold minutes of work
        self.barrier()
        return self.sum(t)

    def barrier(self):
        "Return when every rank has called this; one of them may be packing weights for minutes."
        if self.world > 1:
            dist.barrier(group=self.long_timeout_group)

    def broadcast_object(self, x):
        "Rank 0's `x`, plain data, on every rank."
        box = [x]
        if self.world > 1:
            dist.broadcast_object_list(box, src=0, group=self.long_timeout_group)
        return box[0]

    def scatter_mean(self, full: Tensor, shard: Tensor):
        """Start averaging `full` [n, r, c]; a rank's part comes into its `shard` [n/world, r, c].

        Returns a handle.
        """
        if self.world == 1:
            shard.copy_(full)
            return None
        scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        average = dist.ReduceOp.AVG if self.device.type == "cuda" else dist.ReduceOp.SUM
        return scatter(shard, full, op=average, group=self.group, async_op=True)


def start_ranks(timeout_s: float = 60.0) -> Ranks:
    """Join the process group, if any, that `torchrun` describes in the environment.

    NCCL on GPUs, else gloo. A collective that waits longer than `timeout_s`, or 40 s with several
    nodes, raises. Raises GolfError if a GPU is missing.
    """
    names = dict(WORLD_SIZE=1, RANK=0, LOCAL_RANK=0, GROUP_RANK=0, GROUP_WORLD_SIZE=1)
    world, rank, local, node, nodes = (int(os.environ.get(name, n)) for name, n in names.items())
    cuda, gpu = torch.cuda.is_available(), torch.device("cuda", local)
    shown = torch.cuda.device_count()
    require(not cuda or local < shown,
            f"rank {rank} needs GPU {local}, but this machine shows {shown}: "
            "lower --nproc_per_node")
    if cuda:
        torch.cuda.set_device(local)
    device = gpu if cuda else torch.device("cpu")
    if world == 1:
        return Ranks(device=device)
    if nodes > 1:
        timeout_s = min(timeout_s, 40.0)
    limit = timedelta(seconds=timeout_s)
    store = next(dist.rendezvous("env://", rank, world, timeout=limit))[0]
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "")
    store = dist.PrefixStore(restarts, store)  # the keys of earlier starts are still there
    backend, device_id = ("nccl", gpu) if cuda else ("gloo", None)
    dist.init_process_group(backend, rank=rank, world_size=world, store=store, timeout=limit,
                            device_id=device_id)
    long_timeout_group = dist.new_group(backend="gloo", timeout=timedelta(minutes=30))
    return Ranks(rank, world, device, long_timeout_group, None, local, node, nodes)


def stop_ranks(ranks: Ranks):
    "Leave the process group."
    if ranks.world > 1 and dist.is_initialized():
        dist.destroy_process_group()


def gather_into(full: Tensor, shard: Tensor, ranks: Ranks):
    "Start collecting every rank's `shard` [n/world, r, c] in `full` [n, r, c]; returns a handle."
    if ranks.world == 1:
        full.copy_(shard)
        return None
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return gather(full, shard, group=ranks.group, async_op=True)


def wait_all(handles: list):
    "Wait for the collectives that returned these handles."
    for h in handles:
        if h is not None:
            h.wait()


class ShardedBank:
    """One bank: the replica, and this rank's shard of masters, mean gradient and state.

    `replica` is a Parameter [slots, rows, cols]; `rounded` are the masters in its dtype, ready to
    be sent.
    """

    def __init__(self, spec: BankSpec, replica: torch.nn.Parameter, ranks: Ranks, rule):
        self.spec = spec
        self.replica = replica
        self.ranks = ranks
        self.slots = spec.shard(ranks.rank)
        shard = replica.detach()[self.slots.start:self.slots.stop]
        self.fp32_shard = shard.to(torch.promote_types(replica.dtype, torch.float32), copy=True)
        self.grad, self.rounded = torch.zeros_like(shard), torch.zeros_like(shard)
        scales = spec.row_scales()[self.slots.start:self.slots.stop]
        scales = torch.tensor(scales, dtype=self.fp32_shard.dtype)
        self.shape_lr_scale = scales.unsqueeze(-1).to(replica.device)
        self.sum = self.handle = None
        self.state = rule.state(self)

    def take(self) -> Tensor:
        """This rank's gradient of the whole bank [slots, rows, cols], zeros without one.

        `.grad` becomes None.
        """
        g = self.replica.grad if self.sum is None else self.sum
        self.replica.grad = self.sum = None
        return torch.zeros_like(self.replica.data) if g is None else g

    def accumulate(self):
        "Add the replica's gradient to an fp32 sum and drop it."
        earlier, self.sum = self.sum, None
        g = self.take()
        self.sum = g.to(self.fp32_shard.dtype, copy=True) if earlier is None else earlier.add_(g)

    def reduce(self, g: Tensor):
        "Start the reduce-scatter of the whole bank's gradient `g` [slots, rows, cols]."
        self.handle = self.ranks.scatter_mean(g.to(self.replica.dtype), self.grad)

    def arrive(self):
        "Wait for the mean gradient of this rank's shard, in `grad`."
        handle, self.handle = self.handle, None
        wait_all([handle])
        if handle is not None and self.ranks.device.type != "cuda":
            self.grad.div_(self.ranks.world)

    def publish(self, source: Tensor | None = None):
        "Start sending `rounded`, or `source` of its shape, to every replica; returns a handle."
        if source is not None:
            self.rounded.copy_(source)
        return gather_into(self.replica.data, self.rounded, self.ranks)


class StepScalars:
    """The numbers that every rule reads in a step, as tensors on the GPU.

    0-dim: `lr_schedule` scales the learning rates, `momentum`, `clip_coef`, `count` of the steps
    taken, and `grads_finite`, False when the step is skipped.
    """

    def __init__(self, device: torch.device | str, dtype: torch.dtype):
        self.lr_schedule, self.momentum, self.clip_coef, self.count = (
            torch.full((), value, dtype=dtype, device=device) for value in (0.0, 0.0, 1.0, 0.0))
        self.grads_finite = torch.ones((), dtype=torch.bool, device=device)


class Sgd:
    "Heavy-ball SGD on fp32 masters, for banks and small parameters (no Nesterov, no decay)."
    masters = True  # small parameters have masters too

    def __init__(self, lr: float):
        self.lr = lr

    def rates(self, role: str) -> tuple[float, float]:
        "(learning rate, weight decay) of the parameters of a role."
        return self.lr, 0.0

    def state(self, part) -> dict[str, Tensor]:
        "What the rule keeps of a shard or a flat group."
        return {"momentum_buffer": torch.zeros_like(part.fp32_shard)}

    def update(self, part, grad: Tensor, scalars: StepScalars):
        "One step of a shard or a flat group from its mean gradient, in place."
        momentum, master = part.state["momentum_buffer"], part.fp32_shard
        moved = momentum * scalars.momentum + grad.to(momentum.dtype)
        torch.where(scalars.grads_finite, moved, momentum, out=momentum)
        stepped = master - scalars.lr_schedule * self.lr * moved
        torch.where(scalars.grads_finite, stepped, master, out=master)
        part.rounded.copy_(master)


def nesterov_step(momentum: Tensor, grad: Tensor, mu: Tensor, ok: Tensor) -> Tensor:
    """momentum = mu * momentum + grad, in place; returns the look-ahead grad + mu * momentum.

    `momentum` and `grad` [n, r, c], `mu` 0-dim; `ok`, 0-dim or [n, 1, 1], is False where nothing
    changes. mu*m, +g and the look-ahead each round to the dtype once.
    """
    moved = (momentum * mu.view(1, 1, 1)).to(momentum.dtype).add_(grad)
    torch.where(ok, moved, momentum, out=momentum)
    return torch.addcmul(grad.to(mu.dtype), moved.to(mu.dtype), mu).to(grad.dtype)


def master_step(master, update, lr, wd, scale, ok, rounded):
    """master = master * (1 - lr * wd) - lr * scale * update, in place, and its copy in `rounded`.

    `master`, `update` and `rounded` [n, r, c]; `lr`, `wd`, `ok` 0-dim or [n, 1, 1]; `scale`
    [n, r or 1, 1].
    """
    stepped = torch.addcmul(master * (1 - lr * wd), update.to(master.dtype), lr * scale, value=-1)
    torch.where(ok, stepped, master, out=master)
    rounded.copy_(master)


class Muon:
    """The rule for banks: momentum, look ahead, orthogonalize, a step of fixed size.

    Jordan et al., 2024. `orthogonalize(G, steps, dtype)` is `quintic`, `polar_express` (chapter 04)
    or a function of yours that makes each matrix of G [n, r, c] orthogonal; `product_dtype` is the
    dtype that it is given (None: the gradient's).
    """

    def __init__(self, lr: float = 0.025, wd: float = 0.04, orthogonalize: Callable = quintic,
                 steps: int = 5, product_dtype: torch.dtype | None = None):
        self.lr = lr
        self.wd = wd
        self.orthogonalize = orthogonalize
        self.steps = steps
        self.product_dtype = product_dtype

    def state(self, part: ShardedBank) -> dict[str, Tensor]:
        "What the rule keeps of a shard."
        return {"momentum_buffer": torch.zeros_like(part.grad)}

    def update(self, part: ShardedBank, grad: Tensor, scalars: StepScalars):
        "One step of a shard from its mean gradient `grad` [n, r, c], in place."
        lr = scalars.lr_schedule * self.lr
        wd = torch.full_like(lr, self.wd)
        self.move(part, grad, lr, scalars.momentum, wd, scalars.grads_finite)

    def move(self, shard: ShardedBank, grad, lr, mu, wd, ok):
        """As `update`, with numbers that may differ by slot.

        `lr`, `wd`, `ok` 0-dim or [n, 1, 1], `mu` 0-dim.
        """
        momentum = shard.state["momentum_buffer"]
        fused = bool(usable_kernels(momentum.device, momentum.dtype))
        first, last = nesterov_step, master_step
        if fused:
            first, last = nesterov_kernels, master_kernels
        ahead = first(momentum, grad, mu, ok)
        direction = self.direction(shard, ahead)
        last(shard.fp32_shard, direction, lr, wd, shard.shape_lr_scale, ok, shard.rounded)

    def direction(self, shard: ShardedBank, ahead: Tensor) -> Tensor:
        "The direction in which a shard's weights move: `ahead` [n, r, c], orthogonalized."
        return self.orthogonalize(ahead, self.steps, self.product_dtype or ahead.dtype)


def nesterov_kernel(momentum, grad, out, mu, ok, size, ok_slot, BLOCK: tl.constexpr):
    "`nesterov_step`; `size` entries a slot. Programs over (blocks of a slot, slots)."
    n, at = tl.program_id(1).to(tl.int64), tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live, here, scalar = at < size, n * size + at, tl.load(mu).to(tl.float32)
    g = tl.load(grad + here, mask=live, other=0.0).to(tl.float32)
    old = tl.load(momentum + here, mask=live, other=0.0).to(tl.float32)
    moved = (old * scalar).to(momentum.dtype.element_ty).to(tl.float32)
    moved = (moved + g).to(momentum.dtype.element_ty)
    tl.store(out + here, (g + moved.to(tl.float32) * scalar).to(out.dtype.element_ty), mask=live)
    tl.store(momentum + here, moved, mask=live & tl.load(ok + n * ok_slot))


def nesterov_kernels(momentum: Tensor, grad: Tensor, mu: Tensor, ok: Tensor) -> Tensor:
    """`nesterov_step` in one launch; `momentum` is contiguous.

    Raises GolfError where no kernel can run.
    """
    check_runnable(momentum)
    (n, r, c), grad = momentum.shape, grad.contiguous()
    out, ok = torch.empty_like(grad), ok.expand(n, 1, 1)
    with torch.cuda.device_of(momentum):  # Triton launches on the current device
        jitted(nesterov_kernel)[(triton.cdiv(r * c, 2048), n)](
            momentum, grad, out, mu, ok, r * c, ok.stride(0), BLOCK=2048, num_warps=8)
    return out


def master_kernel(master, update, rounded, lr, wd, scale, ok, R, C, u_slot, u_row, u_col, lr_slot,
                  wd_slot, s_slot, s_row, ok_slot, SIDE: tl.constexpr):
    "`master_step` on slots [R, C]. Programs over (blocks of columns, blocks of rows, slots)."
    n = tl.program_id(2).to(tl.int64)
    row = tl.program_id(1) * SIDE + tl.arange(0, SIDE)
    col = tl.program_id(0) * SIDE + tl.arange(0, SIDE)
    live, rate = (row[:, None] < R) & (col[None, :] < C), tl.load(lr + n * lr_slot)
    here = n * R * C + row[:, None] * C + col[None, :]
    old = tl.load(master + here, mask=live, other=0.0)
    there = n * u_slot + row[:, None] * u_row + col[None, :] * u_col
    step = tl.load(update + there, mask=live, other=0.0)
    factor = tl.load(scale + n * s_slot + row * s_row, mask=row < R, other=0.0) * rate
    new = old * (1 - rate * tl.load(wd + n * wd_slot)) - factor[:, None] * step.to(tl.float32)
    new = tl.where(tl.load(ok + n * ok_slot), new, old)
    tl.store(master + here, new, mask=live)
    tl.store(rounded + here, new.to(rounded.dtype.element_ty), mask=live)


def master_kernels(master, update, lr, wd, scale, ok, rounded):
    """`master_step` in one launch; `master`, `rounded` contiguous.

    Raises GolfError where no kernel can run.
    """
    check_runnable(rounded)
    n, r, c = master.shape
    (lr, wd, ok), scale = (x.expand(n, 1, 1) for x in (lr, wd, ok)), scale.expand(n, r, 1)
    strides = *update.stride(), lr.stride(0), wd.stride(0), *scale.stride()[:2], ok.stride(0)
    with torch.cuda.device_of(rounded):
        jitted(master_kernel)[(triton.cdiv(c, 64), triton.cdiv(r, 64), n)](
            master, update, rounded, lr, wd, scale, ok, r, c, *strides, SIDE=64, num_warps=4)


class FlatGroup:
    """The replicated parameters of one dtype, laid flat: one tensor, one all-reduce of gradients.

    `rates`: name -> (learning rate, weight decay); `segments` [(from, to, lr, wd)] share them.
    `wire` is what is sent: the gradients, then `tail` other numbers (if any, in fp32 at least). The
    parameters are views of `rounded`; `fp32_shard` is the same, or wider if the rule wants masters.
    """

    def __init__(self, params: dict, rates: dict, rule, tail: int = 0):
        self.params = {k: params[k] for k in sorted(params, key=lambda k: (rates[k], k))}
        self.gaps = {k: p.new_zeros(-p.numel() % 8) for k, p in params.items()}  # to 16 bytes
        self.rounded = torch.cat(self.spaced([p.detach() for p in self.params.values()]))
        self.full = torch.promote_types(self.rounded.dtype, torch.float32)
        self.offsets = {}
        self.segments = []
        at = 0
        for k, p in self.params.items():
            self.offsets[k] = at, at + p.numel()
            start = at
            if self.segments and self.segments[-1][2:] == rates[k]:
                start = self.segments.pop()[0]
            at += p.numel() + self.gaps[k].numel()
            self.segments.append((start, at, *rates[k]))
        for k, view in self.view(self.rounded).items():
            params[k].data = view
        self.fp32_shard = self.rounded.to(self.full) if rule.masters else self.rounded
        wire_dtype = self.full if tail else self.rounded.dtype
        self.wire = self.rounded.new_zeros(at + tail, dtype=wire_dtype)
        self.grad, self.tail = self.wire[:at], self.wire[at:]
        self.state = rule.state(self)

    def spaced(self, tensors: list) -> list:
        "The tensors of all parameters, flat, each with the zeros that keep the next one aligned."
        found = []
        for k, p in zip(self.params, tensors, strict=True):
            found += [p.reshape(-1), self.gaps[k]]
        return found

    def view(self, flat: Tensor) -> dict:
        "Name -> view of `flat` [n] in that parameter's shape."
        return {k: flat[a:b].view(self.params[k].shape) for k, (a, b) in self.offsets.items()}

    def collect(self):
        "Copy this rank's gradients into `grad`, zeros for a missing one; `.grad` becomes None."
        grads = []
        for p in self.params.values():
            grad = torch.zeros_like(p) if p.grad is None else p.grad
            grads.append(grad)
            p.grad = None
        torch.cat(self.spaced(grads), out=self.grad)


def adamw_step(weight, grad, first, second, lr, wd, ok, count, beta1, beta2, eps):
    """One AdamW step on flat tensors [n], in place: decay, then the update (Loshchilov, Hutter).

    `grad` is fp32 at least, `count` includes this step, `ok` is False where nothing changes; 0-dim
    or [n].
    """
    p = weight.to(grad.dtype)
    m = torch.lerp(first.to(grad.dtype), grad, 1 - beta1)
    v = torch.lerp(second.to(grad.dtype), grad * grad, 1 - beta2)
    step = m / (1 - beta1 ** count) / ((v / (1 - beta2 ** count)).sqrt() + eps)
    for old, new in ((weight, p * (1 - lr * wd) - lr * step), (first, m), (second, v)):
        old.copy_(torch.where(ok, new, old.to(grad.dtype)))


class AdamW:
    "The rule for the small parameters: tables learn at `table_lr`, vectors and scalars at `lr`."
    masters = False

    def __init__(self, lr: float = 0.025, table_lr: float = 0.035, wd: float = 0.04,
                 betas: tuple[float, float] = (0.9, 0.95), eps: float = 1e-8,
                 table_wd: float | None = None):
        self.lr, self.table_lr, self.wd, self.betas, self.eps = lr, table_lr, wd, betas, eps
        self.table_wd = wd if table_wd is None else table_wd

    def rates(self, role: str) -> tuple[float, float]:
        "(learning rate, weight decay) of the parameters of a role."
        if role == "table":
            return self.table_lr, self.table_wd
        return self.lr, self.wd

    def state(self, group: FlatGroup) -> dict[str, Tensor]:
        "What the rule keeps of a flat group."
        return {k: torch.zeros_like(group.fp32_shard) for k in ("exp_avg", "exp_avg_sq")}

    def update(self, group: FlatGroup, grad: Tensor, scalars: StepScalars):
        "One step of a flat group from its mean gradient `grad` [n], segment by segment, in place."
        count, weight = scalars.count.clamp(min=1), group.fp32_shard
        first, second = group.state["exp_avg"], group.state["exp_avg_sq"]
        for a, b, lr, wd in group.segments:
            rate = scalars.lr_schedule * lr
            adamw_step(weight[a:b], grad[a:b], first[a:b], second[a:b], rate, wd,
                       scalars.grads_finite, count, *self.betas, self.eps)
        group.rounded.copy_(group.fp32_shard)


def record_graph(fn, graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream | None = None,
                 pool=None):
    """Record into `graph` what `fn()` launches on `stream` (None: one that torch picks).

    `pool`: another graph's memory to use, see `CudaGraphed`. Returns its result.
    """
    collecting = gc.isenabled()
    gc.disable()
    try:
        # thread_local: other threads go on
        with torch.cuda.graph(graph, pool=pool, stream=stream,
                              capture_error_mode="thread_local"):
            return fn()
    finally:
        if collecting:
            gc.enable()


class CudaGraphed:
    """A function on fixed tensors.

    On CUDA it is recorded after `eager` calls, on the calling stream, then replayed. It works in
    the memory of `beside`, if given: once one of the two is called, what the other gave is gone.
    """

    def __init__(self, fn, device: torch.device, eager: int = 2,
                 beside: "CudaGraphed | None" = None):
        self.fn, self.graph, self.beside = fn, None, beside
        self.left = eager if device.type == "cuda" else -1  # calls until it is recorded; -1: never

    def __call__(self):
        if self.graph is None and self.left == 0:
            self.graph = torch.cuda.CUDAGraph()
            here = torch.cuda.current_stream()
            if here == torch.cuda.default_stream():  # which cannot be recorded
                here = None
            pool = None
            if self.beside is not None and self.beside.graph is not None:
                pool = self.beside.graph.pool()
            record_graph(self.fn, self.graph, here, pool)
        if self.graph is not None:
            self.graph.replay()
        else:
            self.left -= 1
            self.fn()


class Engine:
    """Parallel Muon (parameter-golf PR #399): sharded banks and flat small parameters.

    `roles` is {"bank": {name: Parameter}, "table": {...}, "scalar": {...}}; `clip` a `ClipEach`,
    a `ClipMean`, a `NoClip` or one of yours; `inside` the ranks that share the banks (None: all);
    `plan` the order of the banks (None: biggest first). A step that is not finite is skipped.
    GolfError if the layout is for another number of ranks.
    """

    def __init__(self, roles: dict, layout: Layout, ranks: Ranks, bank_rule, small_rule, clip,
                 inside: Ranks | None = None, plan: CommSchedule | None = None):
        self.layout = layout
        self.ranks = ranks
        self.inside = inside or ranks
        self.plan = plan or comm_schedule(layout)
        self.bank_rule = bank_rule
        self.small_rule = small_rule
        self.clip = clip
        require(layout.world == self.inside.world,
                f"the layout was made for {layout.world} ranks, but {self.inside.world} are "
                f"running: make it with world={self.inside.world}")
        check_comm_schedule(self.plan, layout)
        self.banks = {}
        for spec in layout.banks:
            replica = roles["bank"][spec.name]
            self.banks[spec.name] = ShardedBank(spec, replica, self.inside, bank_rule)
        self.groups = flat_groups(roles, small_rule)
        self.parts = [*self.banks.values(), *self.groups]
        first = self.parts[0].fp32_shard
        self.full, self.device = first.dtype, first.device
        self.control = self.groups[0].tail if self.groups else first.new_zeros(len(CONTROL_SCALARS))
        self.norm_sq = self.control[CONTROL_SCALARS.index("norm_sq")]
        self.scalars = StepScalars(self.device, self.full)
        self.streams = {n: torch.cuda.Stream(self.device) for n in self.banks if first.is_cuda}
        self.small_step = CudaGraphed(lambda: self.update_small(), self.device)
        self.bank_steps = {n: CudaGraphed(lambda n=n: self.update_bank(n), self.device)
                           for n in self.banks}
        self.publish()

    def step(self, lr_schedule: float | Tensor = 1.0, momentum: float = 0.99):
        "`launch` and `finish` in one call: gradients in, new weights out."
        self.launch()
        self.finish(lr_schedule, momentum)

    def accumulate(self):
        "After each backward of an accumulated step: adds bank gradients up in fp32, frees them."
        for bank in self.banks.values():
            bank.accumulate()

    def publish(self, project=None):
        """Write all parameters from the masters, banks through `project(name, master)`.

        Returns when it is done.
        """
        for g in self.groups:
            g.rounded.copy_(g.fp32_shard)
        handles = []
        for name in self.plan.work:
            bank = self.banks[name]
            weights = project(name, bank.fp32_shard) if project else bank.fp32_shard
            handles.append(bank.publish(weights))
        wait_all(handles)

    def launch(self, loss=None, elapsed_ms: float = 0.0, stop: bool = False) -> Tensor:
        """After backward: start this step's communication.

        Returns the summed control vector [scalars].
        """
        grads = {n: b.take() for n, b in self.banks.items()}
        for g in self.groups:
            g.collect()
        words = [elapsed_ms, float(stop)] if self.ranks.is_rank0 else [0.0, 0.0]
        words = torch.tensor(words, dtype=self.control.dtype, pin_memory=self.control.is_cuda)
        self.control[:2].copy_(words, non_blocking=True)  # without waiting for the GPU
        self.control[2] = 0.0 if loss is None else loss.detach()
        grads = self.clip.before_sending(self, grads)
        for wire in [g.wire for g in self.groups] or [self.control]:
            self.ranks.sum(wire)
        for n in self.plan.scatter:
            self.banks[n].reduce(grads.pop(n))
        return self.control

    def finish(self, lr_schedule: float | Tensor = 1.0, momentum: float = 0.99,
               project: Callable | None = None):
        """Update everything and publish.

        `lr_schedule` (float or 0-dim) scales all rates; `project(name, master)` may round what goes
        out.
        """
        set_scalar(self.scalars.lr_schedule, lr_schedule)
        set_scalar(self.scalars.momentum, momentum)
        self.clip.after_arrival(self)
        self.scalars.grads_finite.copy_(torch.isfinite(self.norm_sq))
        ready = torch.cuda.current_stream().record_event() if self.streams else None
        handles = []
        for n in self.plan.work:
            bank, stream = self.banks[n], self.streams.get(n)
            with torch.cuda.stream(stream):  # does nothing where there is no stream
                if stream is not None and ready is not None:
                    stream.wait_event(ready)
                bank.arrive()
                self.bank_steps[n]()
                handles.append(bank.publish(project and project(n, bank.fp32_shard)))
        self.small_step()
        wait_all(handles)
        for stream in self.streams.values():
            torch.cuda.current_stream().wait_stream(stream)

    def update_bank(self, name: str):
        """Update this rank's shard of a bank from its mean gradient.

        Then the rounded weights are ready to be sent.
        """
        bank = self.banks[name]
        grad = self.clip.mean_gradient(bank.grad, self.scalars)
        self.bank_rule.update(bank, grad, self.scalars)

    def update_small(self):
        "Count the step and update every flat group, whose gradients are sums over the ranks."
        self.scalars.count += self.scalars.grads_finite
        for g in self.groups:
            grad = g.grad.to(g.full) * (self.scalars.clip_coef / self.ranks.world)
            self.small_rule.update(g, grad, self.scalars)

    def tensors(self) -> list:
        """What is averaged: this rank's shard of every bank's masters, then the flat groups.

        The banks come in the layout's order.
        """
        return [part.fp32_shard for part in self.parts]

    def gather(self, tensors: list | None = None) -> tuple[dict, dict]:
        """(banks, others): whole banks [n, r, c] by name, and replicated tensors by parameter name.

        `tensors` are as `Engine.tensors()` gives them, for instance an average of those; None: the
        masters.
        """
        tensors = self.tensors() if tensors is None else tensors
        banks, others = {}, {}
        shards = tensors[:len(self.banks)]  # then come the groups'
        for (name, bank), shard in zip(self.banks.items(), shards, strict=True):
            banks[name] = torch.empty(bank.spec.shape, dtype=shard.dtype, device=shard.device)
            wait_all([gather_into(banks[name], shard.contiguous(), bank.ranks)])
        for g, flat in zip(self.groups, tensors[len(banks):], strict=False):  # or none of these
            others.update({k: v.clone() for k, v in g.view(flat.to(g.fp32_shard.dtype)).items()})
        return banks, others

    @torch.no_grad()
    def load(self, banks: dict, others: dict):
        "Set the masters from whole tensors, as `gather` gives them; publish. Rules' states stay."
        for name, bank in self.banks.items():
            bank.fp32_shard.copy_(banks[name][bank.slots.start:bank.slots.stop])
        for g in self.groups:
            for k, view in g.view(g.fp32_shard).items():
                view.copy_(others[k])
        self.publish()

    def state(self) -> list:
        "Every tensor that a step changes on this rank (parameters follow from the masters)."
        tensors = [t for part in self.parts for t in (part.fp32_shard, *part.state.values())]
        return [*tensors, self.scalars.count]

    def restore(self, saved: list):
        "Back to a copy of `state()`, and publish."
        torch._foreach_copy_(self.state(), saved)
        self.publish()


CONTROL_SCALARS = ("elapsed_ms", "stop", "loss", "norm_sq")


def flat_groups(roles: dict, rule) -> list[FlatGroup]:
    """One flat group for each dtype of tables and scalars.

    The widest comes first: the control scalars travel with it.
    """
    params, rates, made = {}, {}, []
    for role in ("table", "scalar"):
        params |= roles.get(role, {})
        rates |= dict.fromkeys(roles.get(role, {}), rule.rates(role))
    for dtype in sorted({p.dtype for p in params.values()}, key=lambda d: -d.itemsize):
        some = {k: p for k, p in params.items() if p.dtype == dtype}
        tail = 0 if made else len(CONTROL_SCALARS)
        made.append(FlatGroup(some, rates, rule, tail=tail))
    return made


class Clip:
    """What an engine asks of a clip: derive yours from this.

    `before_sending(engine, grads)`, before anything is averaged: what this rank sends, a dict that
    the engine may empty. `grads`: bank name -> this rank's gradient [slots, rows, cols]; the small
    ones lie in `grad` of `engine.groups` and may be changed in place. Leaves a number in
    `engine.norm_sq` that is not finite if a gradient is not.

    `norm_is_sum`: the control vector's `norm_sq` is a sum over the ranks, not the norm of the mean.
    """
    norm_is_sum = True
    before_sending: Callable[[Engine, dict], dict]

    def after_arrival(self, engine: Engine):
        """Before the first update, while mean gradients arrive in `grad` of `engine.banks`.

        May set `engine.scalars.clip_coef`, by which the small gradients are multiplied.
        `engine.norm_sq` is now the sum over the ranks; where it is not finite, the step is skipped.
        """

    def mean_gradient(self, grad: Tensor, scalars: StepScalars) -> Tensor:
        "What the rule gets for a shard's mean gradient `grad` [n, r, c]; launches are recorded."
        return grad


def squared_norm(tensors: list, dtype: torch.dtype) -> Tensor:
    "Sum of squares of all entries of all tensors, 0-dim."
    return torch.stack(torch._foreach_norm(tensors, 2, dtype=dtype)).square().sum()


def set_scalar(scalar: Tensor, value: Tensor | float):
    "Write a number, or one that lies on the device, into a 0-dim tensor; waits for nothing."
    if isinstance(value, Tensor):
        scalar.copy_(value)
    else:
        scalar.fill_(value)


def clip_coef(norm_sq: Tensor, max_norm: float) -> Tensor:
    "min(1, max_norm / (norm + 1e-6)), 0-dim; 1 when `max_norm` is 0."
    factor = (max_norm / (norm_sq.sqrt() + 1e-6)).clamp(max=1.0)
    return factor if max_norm > 0 else torch.ones_like(norm_sq)


class ClipMean(Clip):
    """Clips the mean gradient to `max_norm` (0: never); the number of ranks does not matter.

    The first update waits for all reduce-scatters and the all-reduce of one number.
    """
    norm_is_sum = False

    def __init__(self, max_norm: float):
        self.max_norm = max_norm

    def before_sending(self, engine: Engine, grads: dict) -> dict:
        "Gradients are sent as they are; the norm is measured when their mean has arrived."
        return grads

    def after_arrival(self, engine: Engine):
        "Wait for all mean gradients, measure them, and set the clip factor of the step."
        for n in engine.plan.scatter:
            engine.banks[n].arrive()
        shards = [bank.grad for bank in engine.banks.values()]
        norm_sq = engine.inside.sum(squared_norm(shards, engine.full))
        if engine.groups:
            sums = [group.grad for group in engine.groups]
            norm_sq = norm_sq + squared_norm(sums, engine.full) / engine.ranks.world ** 2
        engine.norm_sq.copy_(norm_sq)
        engine.scalars.clip_coef.copy_(clip_coef(norm_sq, self.max_norm))

    def mean_gradient(self, grad: Tensor, scalars: StepScalars) -> Tensor:
        "The shard's mean gradient, clipped."
        return (grad * scalars.clip_coef.view(1, 1, 1)).to(grad.dtype)


class ClipEach(Clip):
    "Clips each rank's gradient to `max_norm` (0: never) before it is averaged, as published."

    def __init__(self, max_norm: float):
        self.max_norm = max_norm
        self.engine: Engine | None = None  # whose gradients are staged
        self.staged = {}    # bank name -> gradient, where the recording reads it
        self.wires = {}     # bank name -> what is sent

    def before_sending(self, engine: Engine, grads: dict) -> dict:
        "This rank's gradients, clipped: banks in tensors of their own, the small ones in place."
        if self.engine is not engine:
            self.engine = engine
            self.staged = {n: torch.empty_like(g) for n, g in grads.items()}
            self.wires = {n: torch.empty_like(engine.banks[n].replica.data) for n in grads}
            self.graphed = CudaGraphed(lambda: self.scale_staged(engine), engine.device)
        torch._foreach_copy_(list(self.staged.values()), [grads[n] for n in self.staged])
        self.graphed()
        return dict(self.wires)

    def scale_staged(self, engine: Engine):
        "Measure this rank's gradient and scale it: banks into `wires`, the small ones in place."
        small = [group.grad for group in engine.groups]
        norm_sq = squared_norm([*self.staged.values(), *small], engine.full)
        engine.norm_sq.copy_(norm_sq)
        factor = clip_coef(engine.norm_sq, self.max_norm)
        for n, g in self.staged.items():
            torch.mul(g, factor.view(1, 1, 1), out=self.wires[n])
        for g in small:
            torch.mul(g, factor.view(1), out=g)


@dataclass
class EngineSettings(BaseSettings):
    "Learning rates, decays and clipping of the engine."
    matrix_lr: float = setting(0.025, "Muon learning rate of the banks: per step", bounds=">= 0")
    scalar_lr: float = setting(0.025, "AdamW learning rate of vectors and scalars: per step",
                               bounds=">= 0")
    tied_embed_lr: float = setting(0.035, "AdamW learning rate of all tables: per step",
                                   bounds=">= 0")
    muon_backend_steps: int = setting(5, "Newton-Schulz iterations: count", bounds="1 to 10000")
    muon_wd: float = setting(0.04, "weight decay of the banks: per unit of learning rate",
                             bounds=">= 0")
    adam_wd: float = setting(0.04, "weight decay of the rest: per unit of learning rate",
                             bounds=">= 0")
    beta1: float = setting(0.9, "AdamW decay of the first moment: ratio", bounds="[0, 1)")
    beta2: float = setting(0.95, "AdamW decay of the second moment: ratio", bounds="[0, 1)")
    adam_eps: float = setting(1e-8, "AdamW epsilon: number", bounds="> 0")
    grad_clip_norm: float = setting(0.3, "largest norm of the gradient; 0: any: L2 norm",
                                    bounds=">= 0")


# ---- golfnb/text/loader.py ----
class WindowSampler(Iterator):
    """An endless iterator over one rank's rows of each micro-batch, uint16 [rows, seq_len + 1].

    `paths` are sorted shards; a step takes `rows` on each of `world` ranks in each of `accum`
    micro-batches. Raises GolfError without shards, for a rank outside 0 to world - 1 and for sizes
    below 1.

    An order of windows derives from this class and says five things:

    - `order`: its name in saved states
    - `plan()`: the windows of the next step, of all ranks and micro-batches as they are dealt out,
      in a form of its own; the same list on every rank, so chance comes from a seed that all share
    - `window(place)`: the tokens of one of these windows, uint16 [seq_len + 1], with `read`
    - `place()`: where the order stands between two steps, a dict that JSON can hold, with no
      key named order, corpus or turn
    - `go_to(place)`: go there; the next plan is then what it would have been
    """
    order = ""
    plan: Callable[..., list]
    window: Callable[..., np.ndarray]
    place: Callable[..., dict]
    go_to: Callable[..., None]
    vocab_size = 65_536  # tokens must be below; a `Loader` sets its own

    def __init__(self, paths: Sequence[Path], rank: int, world: int, rows: int, seq_len: int,
                 accum: int = 1):
        self.paths = list(paths)
        require(self.paths, "a sampler must have shards to read, found none: give it their paths")
        require(0 <= rank < world, f"a sampler's rank must be one of 0 to world - 1, found rank "
                f"{rank} of world {world}: give both as the launcher numbers them")
        require(min(rows, seq_len, accum) >= 1, "a sampler's sizes must be at least 1, found "
                f"rows={rows}, seq_len={seq_len} and accum={accum}: give each at least 1")
        self.rank = rank
        self.world = world
        self.rows = rows
        self.seq_len = seq_len
        self.accum = accum
        self.windows = rows * world * accum  # of a step
        self.turn = 0                        # the micro-batch that comes next
        self.tokens = [read_header(path) for path in self.paths]
        self.corpus = hashlib.sha256(repr((self.tokens, seq_len)).encode()).hexdigest()[:16]

    def __next__(self) -> np.ndarray:
        if self.turn == 0:
            self.plan_step()
        parts = self.world * self.accum
        part = self.turn * self.world + self.rank
        self.turn = (self.turn + 1) % self.accum
        return np.stack([self.window(place) for place in self.planned[part::parts]])

    def plan_step(self) -> None:
        "Plan the windows of a step, and keep where the order stood before."
        self.before = self.place()
        self.planned = self.plan()

    def read(self, shard: int, begin: int, count: int) -> np.ndarray:
        """Tokens of a shard.

        GolfError if there are fewer, one is too large, or the shard has changed.
        """
        part = read_span(self.paths[shard], begin, count, self.tokens[shard])
        check_tokens(self.paths[shard], part, self.vocab_size)
        return part

    def state(self) -> dict:
        "The place after the last batch, as JSON."
        place = self.before if self.turn else self.place()
        return {"order": self.order, "corpus": self.corpus, "turn": self.turn} | place

    def load_state(self, state: dict) -> None:
        "Go to a place that `state` gave. Raises GolfError for another order or corpus."
        found = (state.get("order"), state.get("corpus"))
        own = (self.order, self.corpus)
        require(found == own, f"a saved loader state must be of order and corpus {own}, found "
                f"{found}: go on with the same shards, TRAIN_SEQ_LEN and LOADER")
        self.go_to(state)
        self.turn = int(state["turn"])
        if self.turn:
            self.plan_step()

    def saved_place(self) -> str:
        "The place as JSON. Raises GolfError for one that JSON cannot hold."
        try:
            return json.dumps(self.place(), allow_nan=False)
        except (TypeError, ValueError) as error:
            raise GolfError(f"place() of {type(self).__name__} must be a dict that JSON can hold, "
                            f"for checkpoints, found one that cannot be written ({error}): give "
                            "plain numbers, texts and lists") from error

    def check(self) -> None:
        """Raise GolfError for an order that lacks a part or cannot plan and go back.

        It stays where it is.
        """
        name = type(self).__name__
        for part in ("order", "plan", "window", "place", "go_to"):
            require(getattr(self, part, None), f"{name} must have an order, plan, window, place "
                    f"and go_to, found no {part}: see the docstring of WindowSampler")
        try:
            place = self.saved_place()
            planned = len(self.plan())
            self.saved_place()
            self.go_to(json.loads(place))
        except GolfError:
            raise
        except Exception as error:
            raise GolfError(f"{name} must plan {self.windows} windows and go back to where "
                            f"it stood, found {type(error).__name__}: {error}: mend its "
                            "plan, place or go_to") from error
        require(planned == self.windows, f"the plan of {name} must be the {self.windows} windows "
                f"of a step, found {planned}: plan as many as self.windows")


class SequentialSampler(WindowSampler):
    """The baseline's order: the joined shards, round and round.

    A step is cut into `spans`, each a token longer than its rows; 0: one
    for each rank and micro-batch.
    """
    order = "sequential"

    def __init__(self, paths: Sequence[Path], rank: int, world: int, rows: int, seq_len: int,
                 accum: int = 1, spans: int = 0):
        super().__init__(paths, rank, world, rows, seq_len, accum)
        self.spans = spans or world * accum
        self.position = 0                   # in the stream, where the next step begins
        self.ends = np.cumsum(self.tokens)  # of the shards, in the stream
        self.total = int(self.ends[-1])

    def plan(self) -> list[int]:
        "Where the windows of the next step begin in the stream; a rank gets neighbours."
        n = np.arange(self.windows)
        spans_before = n * self.spans // self.windows
        starts = (self.position + n * self.seq_len + spans_before) % self.total
        self.position = (self.position + self.windows * self.seq_len + self.spans) % self.total
        parts = starts.reshape(-1, self.rows)
        return parts.T.ravel().tolist()  # row 0 of every part, then row 1

    def place(self) -> dict:
        "The position is all."
        return {"position": self.position}

    def go_to(self, place: dict) -> None:
        "Take it up."
        self.position = int(place["position"])

    def locate(self, position: int) -> tuple[int, int]:
        "Shard and offset of a token of the stream; after the last shard comes the first."
        position %= self.total
        shard = int(np.searchsorted(self.ends, position, side="right"))
        begin = int(self.ends[shard]) - self.tokens[shard]
        return shard, position - begin

    def window(self, position: int) -> np.ndarray:
        "The tokens from a position of the stream on, uint16 [seq_len + 1]."
        pieces = []
        missing = self.seq_len + 1
        while missing > 0:
            shard, offset = self.locate(position)
            piece = self.read(shard, offset, min(missing, self.tokens[shard] - offset))
            pieces.append(piece)
            position += len(piece)
            missing -= len(piece)
        return np.concatenate(pieces)


def grad_accum(world: int) -> int:
    "Micro-steps of a step: a rank holds at most an eighth of the batch at once."
    return max(1, 8 // world)


@dataclass
class LoaderSettings(BaseSettings):
    "What one training step reads."
    data_path: str = setting("./data/datasets/fineweb10B_sp1024",
                             "directory of NAME_train_*.bin and NAME_val_*.bin: path")
    train_batch_tokens: int = setting(786_432, "tokens of a step on all ranks: tokens",
                                      bounds="> 0")
    seed: int = setting(1337, "seed of initial weights and loader's order: integer",
                        bounds="[0, 2^63)")

    def rows_per_micro(self, world: int, seq_len: int) -> int:
        "Rows of `seq_len` tokens that each of `world` ranks reads in a micro-batch."
        return self.train_batch_tokens // (world * grad_accum(world) * seq_len)


def check_batch(cfg: LoaderSettings, seq_len: int, world: int) -> None:
    "Raise GolfError if `world` ranks cannot share out a batch of rows of `seq_len` tokens."
    tokens, part = cfg.train_batch_tokens, seq_len * world * grad_accum(world)
    require(tokens % part == 0, f"TRAIN_BATCH_TOKENS must be whole rows of TRAIN_SEQ_LEN={seq_len} "
            f"tokens, in number a multiple of {world} ranks x {grad_accum(world)} micro-batches, "
            f"found {tokens} tokens: set it to {max(1, tokens // part) * part} or use another "
            "number of ranks")


Batch = namedtuple("Batch", "ids targets")  # on the device, int64 [rows, seq_len] each


class Loader(Iterator):
    """An endless iterator over batches on a device, built ahead by a thread.
    Use it in a `with`, or close it.

    It takes over the `sampler`, a `WindowSampler`. Tokens must be below `vocab_size`; up to `depth`
    batches are built ahead.
    """

    def __init__(self, sampler: WindowSampler, device: torch.device | str, vocab_size: int,
                 depth: int = 4):
        self.sampler = sampler
        sampler.vocab_size = vocab_size
        self.device = torch.device(device)
        cuda = self.device.type == "cuda"
        shape = (sampler.rows, sampler.seq_len + 1)
        self.buffers = [torch.empty(shape, dtype=torch.int16, pin_memory=cuda)
                        for _ in range(depth)]
        self.stream = torch.cuda.Stream(self.device) if cuda else None
        self.thread = None
        sampler.check()
        self.rewind(sampler.state())

    def __enter__(self) -> "Loader": return self
    def __exit__(self, *_) -> None: self.close()

    def state(self) -> dict:
        "The sampler's state after the last batch handed out, as JSON."
        return self.given

    def close(self) -> None:
        "Stop the thread, wait for it and for copies; may be called twice."
        if self.thread is not None:
            self.running = False
            self.free.put(None)
            self.thread.join()
            self.thread = None
            if self.stream:
                self.stream.synchronize()

    def rewind(self, state: dict) -> None:
        "Go to a place that `state` gave; batches built ahead are dropped. Opens a closed loader."
        self.close()
        self.sampler.load_state(state)
        self.free = queue.SimpleQueue()   # buffers to fill
        self.ready = queue.SimpleQueue()  # filled ones with their states, or an error
        self.sent = deque()               # batches on their way to the device
        self.copied = []                  # buffers that a copy still reads
        for buffer in self.buffers:
            self.free.put(buffer)
        self.given = self.sampler.state()
        self.running = True
        self.thread = threading.Thread(target=self.feed, name="golfnb-feeder", daemon=True)
        self.thread.start()

    def feed(self) -> None:
        "The thread: fill free buffers. Hands over (buffer, state), or the exception that ended it."
        try:
            while (buffer := self.free.get()) is not None and self.running:
                buffer.numpy()[:] = next(self.sampler).view(np.int16)
                self.ready.put((buffer, self.sampler.state()))
        except BaseException as error:
            self.ready.put(error)

    def send(self, buffer: torch.Tensor, state: dict) -> None:
        "Begin to copy a filled buffer, int16 [rows, seq_len + 1], to the device."
        with torch.cuda.stream(self.stream):  # does nothing where there is no stream
            narrow = buffer.to(self.device, non_blocking=True)
            self.copied.append((buffer, self.stream and self.stream.record_event()))
            wide = narrow.long() & 0xFFFF
            batch = Batch(wide[:, :-1].contiguous(), wide[:, 1:].contiguous())
        self.sent.append((batch, state, self.stream and self.stream.record_event()))

    def take_back(self) -> None:
        "Wait for the copies that were under way a step ago, and give the thread their buffers."
        for buffer, event in self.copied:
            if event is not None:
                event.synchronize()
            self.free.put(buffer)
        self.copied = []

    def send_ahead(self) -> None:
        "Send this call's batch, and the following one if it is built, or note the thread's error."
        while not self.sent or (len(self.sent) < 2 and not self.ready.empty()):
            built = self.ready.get()
            if isinstance(built, BaseException):
                self.sent.append(built)  # where it stays
            else:
                self.send(*built)

    def __next__(self) -> Batch:
        """The next batch, ready for the current stream.

        Raises an error of the thread, then on every call.
        """
        require(self.thread, "the loader must be open, found it closed: make a new Loader, or "
                "rewind this one")
        self.take_back()
        self.send_ahead()
        if isinstance(self.sent[0], BaseException):
            raise self.sent[0]
        batch, self.given, arrived = self.sent.popleft()
        if arrived is not None:
            current = torch.cuda.current_stream(self.device)
            current.wait_event(arrived)
            for tensor in batch:
                tensor.record_stream(current)  # keeps its memory while in use
        return batch


# ---- golfnb/run/average.py ----
# torch gives out torch._foreach_lerp_ and its like without saying so to type checkers:
# pyright: reportPrivateImportUsage=false


def wide_copy(tensors: list[Tensor]) -> list[Tensor]:
    "Copies in at least fp32: in bf16 an average would swallow its small steps."
    return [t.detach().to(torch.promote_types(t.dtype, torch.float32), copy=True) for t in tensors]


class Average:
    """What a training asks of an average of the weights: derive yours from this.

    - `update(tensors, step, lr_schedule)`: take in the weights after `step`, made at `lr_schedule`
      of the peak learning rate; always in the same order, and never waits
    - `weights()`: copies, in at least fp32, of the weights to export
    - `state()`: name -> live tensors that a checkpoint must keep
    """
    update: Callable[..., None]
    weights: Callable[[], list[Tensor]]
    state: Callable[[], dict[str, list[Tensor]]]

    def remark(self, log):
        "Write into the log what there is to say of the exported weights; may wait for the GPU."


class Ema(Average):
    "E = decay*E + (1-decay)*W after every step (PR #549), from the initial weights `tensors`."

    def __init__(self, tensors: list[Tensor], decay: float = 0.997):
        require(0 <= decay < 1,
                f"EMA_DECAY must lie in [0, 1), found {decay}: 0 keeps only the last weights")
        self.tensors = wide_copy(tensors)
        self.decay = decay

    @torch.no_grad()
    def update(self, tensors: list[Tensor], step: int = 0, lr_schedule: Tensor | float = 1.0):
        "Add the weights after a step, in the same order; the CPU does not wait for the GPU."
        now = [t.detach().to(e.dtype) for t, e in zip(tensors, self.tensors, strict=True)]
        torch._foreach_lerp_(self.tensors, now, 1 - self.decay)

    def weights(self) -> list[Tensor]:
        "Copies of the average."
        return wide_copy(self.tensors)

    def state(self) -> dict[str, list[Tensor]]:
        "The average itself."
        return {"ema": self.tensors}


@dataclass
class AveragingSettings(BaseSettings):
    "How the averages of the weights are taken."
    ema_decay: float = setting(0.997, "weight of the old average at each step: ratio",
                               bounds="[0, 1)")
    swa_every: int = setting(50, "steps between two snapshots of the tight average: steps",
                             bounds="> 0")


# ---- golfnb/run/train.py ----
@dataclass
class TrainSettings(AveragingSettings, ComputeSettings):
    "How long a run trains, on which schedule, and what it logs."
    iterations: int = setting(9000, "training steps at most: steps", bounds="> 0")
    warmdown_iters: int = setting(3500, "final linear decay of the learning rate to 0: steps",
                                  bounds=">= 0")
    warmup_steps: int = setting(20, "untimed steps before the run, undone afterwards: steps",
                               bounds="0 to 10000")
    max_wallclock_seconds: float = setting(600.0, "training time; 0: no limit: seconds",
                                           bounds=">= 0")
    val_loss_every: int = setting(4000, "steps between validations; 0: only at the end: steps",
                                  bounds=">= 0")
    train_log_every: int = setting(500, "steps between logged losses; 0: ten in all: steps",
                                   bounds=">= 0")
    muon_momentum: float = setting(0.99, "Muon momentum once warmed up: ratio", bounds="[0, 1)")
    muon_momentum_warmup_start: float = setting(0.92, "Muon momentum at step 0: ratio",
                                                bounds="[0, 1)")
    muon_momentum_warmup_steps: int = setting(1500, "linear momentum warm-up: steps", bounds=">= 0")
    late_qat_threshold: float = setting(0.15,
                                        "share of the peak learning rate below which weights are "
                                        "published on the grid, where a recipe does so: ratio")
    step_graph: bool = setting(True,
                               "on CUDA, record forward and backward as one CUDA graph: 0 or 1")

    @property
    def train_cap_ms(self) -> float:
        "Milliseconds of training after which the run stops; 0: no cap."
        return 1000 * self.max_wallclock_seconds


def momentum_schedule(s: TrainSettings, step: int) -> float:
    "Muon's momentum for the step about to run."
    start = s.muon_momentum_warmup_start
    warm_up = s.muon_momentum_warmup_steps
    done = 1.0 if step >= warm_up else step / warm_up
    return start + (s.muon_momentum - start) * done


def lr_schedule(s: TrainSettings, step: int,
                elapsed_ms: torch.Tensor | float) -> torch.Tensor | float:
    """Share of the peak learning rate for the step about to run.

    Under a cap a tensor, from rank 0's clock.
    """
    cap = s.train_cap_ms
    down = s.warmdown_iters
    if down <= 0:
        return 1.0
    if cap <= 0:
        return min(1.0, (s.iterations - step) / down)
    elapsed = torch.as_tensor(elapsed_ms, dtype=getattr(elapsed_ms, "dtype", torch.float64))
    per_step = (elapsed / max(step, 1)).clamp(min=1e-9)
    return ((cap - elapsed).clamp(min=0) / (down * per_step)).clamp(max=1.0)


LATE_STEPS = 2


class LateReader:
    "Small device tensors, each read `LATE_STEPS` pushes later, when that costs no waiting."

    def __init__(self):
        self.queue = deque()

    def push(self, t: torch.Tensor) -> list | None:
        "Queue `t`; returns the values pushed `LATE_STEPS` ago, or None while there are none."
        # from a GPU: into pinned memory, without waiting
        on_cpu = t.to("cpu", non_blocking=True, copy=True)
        event = torch.cuda.current_stream().record_event() if t.is_cuda else None
        self.queue.append((on_cpu, event))
        return self.pop() if len(self.queue) > LATE_STEPS else None

    def pop(self) -> list:
        "The oldest values, waiting for them if need be."
        on_cpu, event = self.queue.popleft()
        if event is not None:
            event.synchronize()
        return on_cpu.tolist()


def training_loss(model: Callable, cap: float) -> Callable:
    "The function (ids, targets) -> mean loss that training differentiates."
    return lambda ids, targets: softcap_loss(model(ids), targets, cap)


def compiled(fn: Callable, cfg: ComputeSettings, device: torch.device) -> Callable:
    "`fn` under torch.compile where the settings ask for it."
    if cfg.compile == "0" or (cfg.compile == "auto" and device.type != "cuda"):
        return fn
    dynamo = torch._dynamo.config
    dynamo.recompile_limit = max(dynamo.recompile_limit, 64)  # blocks of several kinds, many shapes
    return torch.compile(fn, dynamic=False, fullgraph=True)


def backward_pass(loss_fn: Callable, ids: torch.Tensor, targets: torch.Tensor,
                  accum: int) -> torch.Tensor:
    """Forward and backward of one of `accum` micro-batches.

    Returns its share of the mean loss, detached.
    """
    loss = loss_fn(ids, targets) / accum
    loss.backward()
    return loss.detach()


def micro_batches(backward: Callable, batches: Loader, engine: Engine, accum: int) -> torch.Tensor:
    """Forward and backward over the `accum` micro-batches of a step; returns this rank's mean loss.

    `backward(ids, targets, accum)` is `backward_pass` of a loss function, or a `StepGraph`'s.
    """
    total = None
    for _ in range(accum):
        ids, targets = next(batches)
        loss = backward(ids, targets, accum)
        total = loss if total is None else total + loss
        if accum > 1:
            engine.accumulate()
    assert total is not None  # a step has a micro-batch at least
    return total


class RecordedPass:
    "Loss and gradients of a batch that stands at fixed addresses, recorded on CUDA."

    def __init__(self, loss_fn: Callable, params: list, batch: tuple, accum: int,
                 beside: CudaGraphed | None):
        self.loss_fn, self.params, self.accum = loss_fn, params, accum
        self.ids, self.targets = (t.clone() for t in batch)
        self.places = [p.data_ptr() for p in params]
        self.graphed = CudaGraphed(self.differentiate, self.ids.device, beside=beside)

    def differentiate(self):
        "Loss and gradients of the fixed batch."
        loss = self.loss_fn(self.ids, self.targets) / self.accum
        self.loss = loss.detach()
        self.grads = torch.autograd.grad(loss, self.params, allow_unused=True)


class StepGraph:
    """A model's loss function whose `backward` is recorded on CUDA and then replayed.

    The model's parameters get the gradients. For each `order` of the model's blocks there is a
    recording of its own, made when it is first asked for.
    """

    def __init__(self, loss_fn: Callable, model: torch.nn.Module):
        self.loss_fn, self.model, self.params = loss_fn, model, list(model.parameters())
        self.recorded: dict[tuple | None, RecordedPass] = {}  # by order

    def recording(self, ids: torch.Tensor, targets: torch.Tensor, accum: int) -> RecordedPass:
        "That of the model's order, and of where its parameters lie now."
        order = getattr(self.model, "order", None)
        places = [p.data_ptr() for p in self.params]
        self.recorded = {o: found for o, found in self.recorded.items() if found.places == places}
        if order not in self.recorded:
            beside = next((found.graphed for found in self.recorded.values()), None)
            self.recorded[order] = RecordedPass(self.loss_fn, self.params, (ids, targets), accum,
                                                beside)
        return self.recorded[order]

    def backward(self, ids: torch.Tensor, targets: torch.Tensor, accum: int) -> torch.Tensor:
        "What `backward_pass` does; shapes and `accum` are the same in all calls."
        recording = self.recording(ids, targets, accum)
        earlier = {}  # copies, by parameter: of other micro-batches
        for p in self.params:
            if p.grad is not None:
                earlier[p] = p.grad.clone()
        recording.ids.copy_(ids)
        recording.targets.copy_(targets)
        recording.graphed()
        for p, grad in zip(self.params, recording.grads, strict=True):
            p.grad = earlier[p].add_(grad) if p in earlier else grad
        return recording.loss.clone()


class RunLog:
    """Lines to the terminal and `folder`/train.log, events to metrics.jsonl, if this rank `writes`.

    A `node` that is not rank 0's has no events and train.node1.log: on a
    shared disk it would collide.
    """

    def __init__(self, folder: Path | None = None, writes=True, quiet: bool = False, node: int = 0):
        names = (f"train.node{node}.log",) if node else ("train.log", "metrics.jsonl")
        self.loud, self.reported = writes and not quiet and not node, set()
        self.files = []
        if folder is not None and writes:
            for name in names:
                self.files.append(open(Path(folder) / name, "a", buffering=2**24, encoding="utf-8"))
        for f in (f for f in self.files if f.tell()):
            f.write("\n")  # an earlier life may have ended within a line
        self.at: tuple[str, float, float, float] = ("starting", 0, 0, 0)
        self.pacing = None
        self.spoke = time.perf_counter()
        threading.Thread(target=RunLog.listen, args=(weakref.proxy(self),), daemon=True).start()

    def line(self, text: str):
        "One line of text."
        self.spoke = time.perf_counter()
        self.put(text, *[sys.stdout] * self.loud, *self.files[:1])

    def event(self, kind: str, **values):
        "One event with its numbers."
        self.put(json.dumps({"event": kind, **values}), *self.files[1:])

    def close(self):
        "Write what still waits, if there is room now, and close the files."
        for f in self.files:
            with suppress(OSError):
                f.close()

    def put(self, text: str, *files):
        """Write a line to open files and flush.

        What cannot be written is told, once for each kind of error.
        """
        for f in files:
            try:
                print(f"{text}\n", end="", file=f, flush=True)  # in one piece: a thread writes too
            except OSError as e:
                if f not in self.files:  # or Python tries once more as it ends, and fails
                    os.dup2(os.open(os.devnull, os.O_WRONLY), f.fileno())
                if e.errno not in self.reported:
                    self.reported.add(e.errno)
                    self.put(f"golfnb: cannot write {f.name} ({e.strerror}): the run goes on, its "
                             "lines go to train.log as soon as there is room", sys.stderr)

    def listen(self):
        "A thread: an event each second on how far the run is, a line if there was none for eight."
        first = 0
        begun = 0.0
        with suppress(ReferenceError, ValueError):  # the log is gone, or closed
            while not time.sleep(1.0) and self.files:
                (what, done, total, tokens), now = self.at, time.perf_counter()
                # the first part warms up and says nothing of the pace
                if self.pacing != (what, done > 1):
                    self.pacing, first, begun = (what, done > 1), done, now
                pace = (done - first) / (now - begun) if done > max(first, 1) else 0.0
                speed = f", {tokens * pace / max(total, 1):,.0f} tokens/s" * (tokens * pace > 0)
                left = f"{now - begun:.0f} s so far"
                if pace:
                    left = f"{(total - done) / pace:.0f} s left"
                self.event("progress", what=what, done=done, total=total, left=left)
                if now - self.spoke > 8:
                    self.line(f"progress: {what} {done / max(total, 1):.0%}{speed}, {left}")


def counted(items: Iterable, what: str, log, tokens: int = 0) -> Iterator:
    """The items.

    Before each, `log.at` says: `what`, how many are done, how many there are, tokens in all.
    """
    for i, item in enumerate(items := list(items)):
        if log is not None:
            log.at = what, i, len(items), tokens
        yield item


class Trainer:
    """What a run knows of its steps: clock, losses, log. Only `stop_clock`
    and `finish` wait for the device.

    `average` takes in the weights after each step; `make_projector(engine)`, if given, makes what
    rounds the weights that late steps publish. `losses`: mean loss of each step, nats a token.
    `train_ms`: training time. `skipped`: steps left out for a gradient that was not finite.
    `val_loss`, `val_bpb`: of the last validation. `rounded_from`: the first step, counted from 0,
    that published rounded weights.
    """
    control_scalars = CONTROL_SCALARS

    def __init__(self, settings: TrainSettings, engine: Engine, batches: Loader, average: Average,
                 log: RunLog | None = None, now: Callable = time.perf_counter,
                 make_projector: Callable | None = None):
        self.settings = settings
        self.engine = engine
        self.batches = batches
        self.average = average
        self.log = log or RunLog(quiet=True)
        self.now = now
        self.begun = now()
        self.make_projector = make_projector
        self.project = self.rounded_from = None
        self.accum = grad_accum(engine.ranks.world)
        self.reader = LateReader()
        self.steps = self.skipped = self.skipped_in_a_row = 0
        self.train_ms, self.stop = 0.0, False
        self.losses, self.starts = [], []
        self.late_rate = 1.0  # share of the peak learning rate, of the last step that was read
        self.share_done = 0.0  # of the run, by the last step that was read: the same on all ranks
        self.val_loss = self.val_bpb = None

    def elapsed_ms(self) -> float:
        "Milliseconds of training so far, by this rank's clock."
        return 1000 * (self.now() - self.begun)

    def expected_steps(self) -> float:
        "How many steps there will be, by the pace until the step that began last."
        cap = self.settings.train_cap_ms or math.inf
        in_time = cap * max(self.steps, 1) / max(self.starts[-1], 1e-9)
        return min(self.settings.iterations, in_time)

    def clock(self) -> tuple[float, bool]:
        """Called as a step begins: its time in milliseconds, and whether to stop.

        What rank 0 says counts.
        """
        elapsed = self.elapsed_ms()
        self.starts.append(elapsed)
        expected = self.expected_steps()
        tokens = expected * getattr(self.settings, "train_batch_tokens", 0)
        self.log.at = "training", self.steps, expected, tokens
        under_way = (1 + LATE_STEPS) * elapsed / max(self.steps, 1)
        stop = 0 < self.settings.train_cap_ms <= elapsed + under_way and self.steps > 0
        return elapsed, stop

    def launch(self, loss: torch.Tensor, elapsed_ms: float, stop: bool) -> torch.Tensor:
        """Start the step's communication; time and stop travel with the gradients.

        Returns the control vector.
        """
        if self.steps == 0:
            self.engine.ranks.barrier()  # one rank may have compiled minutes longer than the others
        return self.engine.launch(loss, elapsed_ms, stop)

    def push(self, control: torch.Tensor, loss: torch.Tensor):
        "Called as a step ends: control vector and this rank's loss, to be read two steps later."
        self.steps += 1
        scalars = self.engine.scalars  # what the step was made with, whatever schedule gave it
        more = torch.stack([loss.to(control.dtype).view(()), scalars.lr_schedule.to(control.dtype),
                            scalars.momentum.to(control.dtype)])
        values = self.reader.push(torch.cat([control, more]))
        if values is not None:
            self.read(values)

    def share_of_run(self, steps: int, elapsed_ms: float) -> float:
        "Share of a run that is done after so many steps and ms, by what ends it first: ratio."
        cap = self.settings.train_cap_ms or math.inf
        return max(steps / self.settings.iterations, elapsed_ms / cap)

    def projector(self) -> Callable | None:
        """What rounds the weights that this step publishes; None before late rounding has begun.

        It begins once the learning rate falls below `late_qat_threshold` of its peak, and stays: a
        rate that rises again does not end it.
        """
        late = self.late_rate < self.settings.late_qat_threshold
        if late and self.project is None and self.make_projector is not None:
            self.project = self.make_projector(self.engine)
            self.rounded_from = self.steps
            self.log.line(f"late_qat:enabled step:{self.steps + 1} owner-side int6 grid")
        return self.project

    def stop_clock(self):
        "Wait for the device, and note the milliseconds of training so far."
        if self.engine.device.type == "cuda":
            torch.cuda.synchronize()
        self.train_ms = self.elapsed_ms()

    def finish(self):
        "Read what is still under way; the model then holds the unrounded weights."
        self.stop_clock()
        while self.reader.queue:
            self.read(self.reader.pop())
        if self.stop:
            self.log.line(f"stopping_early: wallclock_cap train_time:{self.train_ms:.0f}ms "
                          f"step:{self.steps}/{self.settings.iterations}")
        self.check_weights()
        self.engine.publish()

    def count_skipped(self, step: int, norm_sq: float):
        """Note whether a step was skipped.

        Raises GolfError after MOST_SKIPPED in a row, on all ranks alike.
        """
        if math.isfinite(norm_sq):
            self.skipped_in_a_row = 0
            return
        self.skipped += 1
        self.skipped_in_a_row += 1
        self.log.line(f"step:{step} skipped: the gradient was not finite")
        require(self.skipped_in_a_row < MOST_SKIPPED, "the gradient must be finite, found NaN or "
                f"infinity in the {MOST_SKIPPED} steps up to step {step}: {DIVERGED}")

    def check_weights(self):
        "Raise GolfError, on all ranks alike, if a weight is NaN or infinite."
        bad = torch.stack([torch.isfinite(t).logical_not().sum()
                           for t in self.engine.tensors()]).sum()
        require(self.engine.ranks.sum(bad).item() == 0, "the weights must be finite, found NaN or "
                f"infinity after step {self.steps}: {DIVERGED}")

    def read(self, values: list):
        "Take in the next unread step: control scalars, own loss, learning rate, momentum."
        s = self.settings
        step = len(self.losses)
        own_loss, rate, momentum = values[-3:]
        # a rule's numbers may follow
        control = dict(zip(self.control_scalars, values, strict=False))
        world = self.engine.ranks.world
        self.losses.append(control["loss"] / world)
        self.stop = self.stop or control["stop"] > 0
        self.late_rate = rate
        self.share_done = max(self.share_done, self.share_of_run(step + 1, control["elapsed_ms"]))
        self.count_skipped(step + 1, control["norm_sq"])
        norm_sq = control["norm_sq"]
        if self.engine.clip.norm_is_sum:
            norm_sq = norm_sq / world
        begin = self.starts[step]
        end = self.starts[step + 1] if step + 1 < len(self.starts) else self.train_ms
        self.log.event("step", step=step + 1, loss=self.losses[-1], own_loss=own_loss,
                       ms=end - begin,
                       train_ms=end, multiplier=round(rate, 7), momentum=round(momentum, 7),
                       grad_norm=norm_sq ** 0.5)
        step += 1
        logged = s.train_log_every > 0 and step % s.train_log_every == 0
        if step < 11 or logged or step == s.iterations:
            self.log.line(f"step:{step}/{s.iterations} train_loss:{own_loss:.4f} "
                          f"train_time:{end:.0f}ms step_avg:{end / step:.2f}ms")

    def validate(self, score: Callable):
        "Score the weights with the clock stopped; `score()` gives nats a token and bits per byte."
        self.stop_clock()
        self.engine.publish()
        self.val_loss, self.val_bpb = score()
        check_score(f"the validation after step {self.steps}", self.val_loss)
        self.log.line(f"step:{self.steps}/{self.settings.iterations} val_loss:{self.val_loss:.4f} "
                      f"val_bpb:{self.val_bpb:.4f} train_time:{self.train_ms:.0f}ms "
                      f"step_avg:{self.train_ms / max(self.steps, 1):.2f}ms")
        self.log.event("val", step=self.steps, loss=self.val_loss, bpb=self.val_bpb,
                       train_ms=self.train_ms)
        self.engine.publish(project=self.project)
        self.begun = self.now() - self.train_ms / 1000


MOST_SKIPPED = 10  # steps in a row
DIVERGED = "lower the learning rates, or go back to the recipe's settings"


def check_score(what: str, loss: float):
    "Raise GolfError for a score that is NaN or infinite."
    require(math.isfinite(loss),
            f"{what} must be a finite score, found {loss} nats a token: {DIVERGED}")


def train(t: Trainer, step: Callable, validate: Callable | None = None,
          extras: Sequence = ()) -> Trainer:
    """Call `step(t)` until ITERATIONS or the wall-clock cap; returns the trainer.

    `validate()` gives nats a token and bits per byte; `extras`, each as
    `Extra`, are called around the steps.
    """
    for extra in extras:
        extra.before_training(t)
    every = t.settings.val_loss_every
    while t.steps < t.settings.iterations and not t.stop:
        if validate and every > 0 and t.steps % every == 0:
            t.validate(validate)
        step(t)
        for extra in extras:
            extra.after_step(t)
    for extra in extras:
        extra.after_training(t)
    if validate:
        t.validate(validate)
    t.finish()
    return t


@contextmanager
def undone(engine: Engine, batches: Loader) -> Iterator[None]:
    "What is trained in this block is put back as it was: weights, momenta, and the loader's place."
    saved = [t.clone() for t in engine.state()]
    place = batches.state()
    yield
    engine.restore(saved)
    batches.rewind(place)


def rehearse(t: Trainer, step: Callable, log: RunLog):
    """Run `warmup_steps` steps of a trainer that is thrown away, so that all is compiled in time.

    In the last half of them it says that the run is as good as done (`share_done`), so that what
    begins late is compiled too.
    """
    count = t.settings.warmup_steps
    for n in counted(range(1, count + 1), "compiling", log):
        if n == 1 + (count + 1) // 2:
            t.share_done = 1.0
        step(t)
        if n <= 3 or n % 10 == 0 or n == count:
            log.line(f"warmup_step:{n}/{count}")


# ---- golfnb/file/grid.py ----
# GPTQ-lite's candidates; 1.0 is the row maximum
CLIP_QUANTILES = (0.999, 0.9995, 0.9999, 0.99999, 1.0)
INT8_QUANTILE = 0.9999984                               # the one clip of int8 rows
FP16_TINY = 2.0 ** -24                                  # smallest positive fp16
FP16_HUGE = 65504.0                                     # and the largest


def row_clip(w: Tensor, quantile: float) -> Tensor:
    "Row-wise quantiles [..., rows] of |w| [..., rows, cols], linear between neighbours."
    magnitude = w.abs() if w.dtype == torch.float64 else w.abs().float()
    if quantile >= 1.0:
        return magnitude.amax(-1)
    rows = magnitude.reshape(-1, w.shape[-1])
    parts = rows.split(max(1, 2 ** 23 // w.shape[-1]))  # torch.quantile takes 16 million elements
    return torch.cat([torch.quantile(p, quantile, dim=1) for p in parts]).reshape(w.shape[:-1])


def row_scale(clip: Tensor, qmax: int, floor: bool = False) -> Tensor:
    "Step of the grid for `clip` [..., rows], as fp16 holds it; with `floor` at least 1/qmax."
    least = 1.0 / qmax if floor else FP16_TINY
    scale = (clip / qmax).clamp(least, FP16_HUGE)
    return scale.to(torch.float16).to(clip.dtype)


def quantize_rows(w: Tensor, scale: Tensor, qmax: int) -> Tensor:
    "The nearest grid points of w [..., rows, cols] by `scale` [..., rows]: int8, ties to even."
    return (w / scale[..., None]).round().clamp(-qmax, qmax).to(torch.int8)


def dequantize_rows(q: Tensor, scale: Tensor) -> Tensor:
    "The weights that integers q [..., rows, cols] stand for, in the dtype of `scale` [..., rows]."
    return q.to(scale.dtype) * scale[..., None]


def finite_matrix(w: Tensor) -> Tensor:
    """w [..., rows, cols] in fp32 at least.

    Raises GolfError if it is no matrix, empty, or holds a NaN or inf.
    """
    bad = int((~torch.isfinite(w)).sum())
    require(not bad and w.ndim >= 2 and w.numel(),
            f"quantization needs a matrix of finite weights: found {bad} NaN or inf in a tensor of "
            f"shape {tuple(w.shape)}; check the checkpoint, store other tensors as fp16")
    return w if w.dtype == torch.float64 else w.float()


def best_clip(w: Tensor, qmax: int = 31, floor: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """GPTQ-lite (PR #414) on w [..., rows, cols]; each matrix of a batch gets its own quantile.

    Returns q int8 [..., rows, cols], scale [..., rows] and the index [...] into CLIP_QUANTILES.
    Raises GolfError for a NaN or inf.
    """
    wide, tried = finite_matrix(w), []
    for quantile in CLIP_QUANTILES:
        scale = row_scale(row_clip(wide, quantile), qmax, floor)
        q = quantize_rows(wide, scale, qmax)
        tried.append((q, scale, (wide - dequantize_rows(q, scale)).square().mean((-2, -1))))
    qs, scales, errors = map(torch.stack, zip(*tried, strict=True))
    # how many candidates stand before the first best; argmin may return any of equal ones
    index = (errors > errors.amin(0)).cumprod(0).sum(0)
    pick = index.expand(1, *index.shape)[..., None]
    q = qs.gather(0, pick[..., None].expand_as(qs[:1]))[0]
    return q, scales.gather(0, pick.expand_as(scales[:1]))[0], index


def quantize_int8(w: Tensor, floor: bool = False) -> tuple[Tensor, Tensor]:
    """As published: q int8 [rows, cols] by the unrounded scale, fp16 scale [rows].

    Raises GolfError for a NaN.
    """
    wide = finite_matrix(w)
    clip = row_clip(wide, INT8_QUANTILE)
    least = 1.0 / 127 if floor else FP16_TINY
    scale = (clip / 127).clamp(least, FP16_HUGE)
    bounded = wide.clamp(-clip[..., None], clip[..., None])
    return quantize_rows(bounded, scale, 127), row_scale(clip, 127, floor)


# ---- golfnb/file/quantize.py ----
KIND_DTYPES = {"int6": "|i1", "int8": "|i1", "fp16": "<f2", "fp32": "<f4", "fp64": "<f8",
               "bf16": "<u2"}
FLOATS = {"fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64,
          "bf16": torch.bfloat16}
INT_MAX = {"int6": 31, "int8": 127}  # largest integer of the kinds that have a scale per row


@dataclass
class Packed:
    "A tensor as stored: `data` in its shape (bf16 as uint16), for integers a `scale` fp16 [rows]."
    kind: str
    shape: tuple[int, ...]
    data: np.ndarray
    scale: np.ndarray | None = None


def pack_plain(name: str, w: torch.Tensor, kind: str) -> Packed:
    "Store a tensor of any shape as floats; GolfError, naming it, if it is not finite in that kind."
    rounded = w.detach().to(FLOATS[kind]).cpu().contiguous()
    require(torch.isfinite(rounded).all(),
            f"{name} must be finite in {kind}, found NaN, infinity or a value out of range: the "
            "run has diverged, export earlier weights")
    if kind == "bf16":
        rounded = rounded.view(torch.uint16)  # NumPy has no bf16
    return Packed(kind, tuple(w.shape), rounded.numpy())


def unpack_plain(packed: Packed) -> torch.Tensor:
    "The floats that were stored, bit for bit, in their shape and dtype."
    return torch.from_numpy(np.array(packed.data)).view(FLOATS[packed.kind])


def check_matrix(name: str, w: Tensor, kind: str) -> None:
    "Raise GolfError, naming it, unless w is a finite matrix."
    require(w.ndim == 2, f"{name} must be a matrix to be stored as {kind}, found shape "
            f"{tuple(w.shape)}: make it one, as w.flatten(1) does with a convolution's weight")
    require(torch.isfinite(w).all(), f"{name} must be a finite matrix to be stored as {kind}, "
            "found NaN or infinity: the run has diverged, use earlier weights")


@torch.no_grad()
def pack_rows(name: str, w: Tensor, kind: str, scale_floor: bool = False) -> Packed:
    """Store w [rows, cols] as integers of a `kind`, int6 by GPTQ-lite or int8, one scale per row.

    `scale_floor`: no scale under 1/31 or 1/127, as published. Raises GolfError, naming the matrix,
    for another kind or shape and for weights that are not finite.
    """
    require(kind in INT_MAX, f"the kind of {name} must be int6 or int8, found {kind}: for others "
            "call pack_plain")
    check_matrix(name, w, kind)
    if kind == "int8":
        q, scale = quantize_int8(w, scale_floor)
    else:
        q, scale, _ = best_clip(w, 31, scale_floor)
    return Packed(kind, tuple(w.shape), q.cpu().numpy(), scale.half().cpu().numpy())


def quantize_state(named: Mapping, scale_floor: bool, small: int = SMALL_MATRIX,
                   log=None) -> dict:
    """Named weights as name -> Packed, as PR #399: fp16 up to `small` elements.

    Of larger ones, matrices [rows, cols] with .attn. or .mlp. in their name are int6, other
    matrices int8, vectors and names of CONTROL_NAMES (chapter 05c) fp32. That suits the names of
    `Golf`: rename the weights of another model, or pack each with `pack_rows` or `pack_plain`.
    `scale_floor` as of `pack_rows`. Raises GolfError, naming it, for a weight of more dimensions,
    one that is not finite, and integers.
    """
    kinds = {name: quant_kind(name, tuple(w.shape), small) for name, w in named.items()}
    packed = {}
    for name, kind in counted(kinds.items(), "quantizing", log):
        require(named[name].is_floating_point(), f"{name} must hold real floats, found "
                f"{named[name].dtype}: leave it out, or convert it")
        if kind in INT_MAX:
            packed[name] = pack_rows(name, named[name], kind, scale_floor)
        else:
            packed[name] = pack_plain(name, named[name], kind)
    return packed


def dequantize_state(packed: Mapping[str, Packed]) -> dict[str, Tensor]:
    """The weights a model loads, fp32 on the CPU; what was quantized holds bfloat16 numbers.

    Raises GolfError for matrices of a trellis, which chapter 10d's `dequantize_trellis` reads.
    """
    state = {}
    for name, p in packed.items():
        require(f"{name}.columns" not in packed, f"{name} must be a matrix without parts, found "
                f"{name}.columns, as of a trellis: call dequantize_trellis instead")
        if p.scale is None:
            plain = unpack_plain(p)
            state[name] = plain.to(torch.promote_types(plain.dtype, torch.float32))
        else:
            scale = torch.from_numpy(p.scale.astype(np.float32))
            integers = torch.from_numpy(np.array(p.data))
            state[name] = dequantize_rows(integers, scale).bfloat16().float()
    return state


# ---- golfnb/file/artifact.py ----
ARTIFACT_CAP = 16_000_000  # bytes: artifact and code together, decimal megabytes
ARTIFACT_MAGIC, ARTIFACT_VERSION = b"\x93GOLFNB\n", 1
PREFIX_BYTES = 48  # magic 8, version 4, length of the header 4, checksum 32
SECTIONS = {**KIND_DTYPES, "scale": "<f2"}  # numpy dtypes, in the file's order


@dataclass
class ArtifactSettings(BaseSettings):
    "The file that is judged."
    target_bytes: int = setting(ARTIFACT_CAP, "artifact and code together at most: bytes",
                                bounds="> 0")


class Plain:
    """No compression. Other codecs derive from it and have a `name` and
    both functions of their own.

    `shapes`: the bytes [rows, cols] of each tensor in a section, one after the other.
    """
    name = "none"

    def check(self) -> None:
        "Raise GolfError if a package that it needs is missing; a run asks before it trains."

    def compress(self, raw: bytes, shapes: list) -> tuple[str, bytes]:
        "The name to record for a section, and the bytes to store."
        return self.name, raw

    def decompress(self, stored: bytes, size: int, shapes: list) -> bytes:
        "The `size` bytes of a section, one more if there are more. Any exception means damage."
        return stored

    def known(self) -> dict[str, "Plain"]:
        "Name -> codec, for every name that `compress` may record."
        return {self.name: self}


class Lzma(Plain):
    "xz, as the published scripts have it."
    name = "lzma"

    def compress(self, raw: bytes, shapes: list) -> tuple[str, bytes]:
        "Preset 6, with a checksum of its own."
        return self.name, lzma.compress(raw, preset=6)

    def decompress(self, stored: bytes, size: int, shapes: list) -> bytes:
        "A section again; the decoder has a limit of memory."
        return whole_stream(lzma.LZMADecompressor(lzma.FORMAT_XZ, 2**26), stored, size)


def whole_stream(coder, stored: bytes, size: int) -> bytes:
    "A stream, at most one byte beyond `size`; EOFError if it is cut off or something follows it."
    found = coder.decompress(stored, size + 1)
    if len(found) <= size and (not coder.eof or coder.unused_data):
        raise EOFError
    return found


SECTION_DAMAGE = ("a section must decode with {!r} to {:,} bytes, found {}: the file is damaged "
                  "or of a later version, copy or make it again")


def decompress_section(stored: bytes, name: str, shapes: list,
                       codecs: Mapping[str, Plain]) -> bytes:
    """The bytes of tensors of these [rows, cols], in bounded memory.

    `name` is what the header says, `codecs` are those that the reader accepts. Raises GolfError for
    another name and for damage.
    """
    require(isinstance(name, str) and name in codecs,
            f"a section must be stored as one of {', '.join(codecs)}, found {name!r:.60}: read it "
            "with the version or the program that wrote it")
    size = sum(map(math.prod, shapes))
    try:
        raw = codecs[name].decompress(stored, size, shapes)
    except GolfError:
        raise
    except Exception as error:  # each codec has its own error types
        raise GolfError(SECTION_DAMAGE.format(name, size, type(error).__name__)) from error
    found = f"{len(raw):,}" if len(raw) < size else "more"
    require(len(raw) == size, SECTION_DAMAGE.format(name, size, found))
    return raw


def section_plan(tensors: list) -> dict[str, list]:
    """Bytes [rows, cols] of the tensors in each section, in order.

    Of floats and scales a number is a row.
    """
    plan = {kind: [tuple(shape) for _, k, shape in tensors if k == kind] for kind in KIND_DTYPES}
    plan["scale"] = [shape[:1] for kind in INT_MAX for shape in plan[kind]]
    for section in set(plan) - set(INT_MAX):
        plan[section] = [(sum(map(math.prod, plan[section])), np.dtype(SECTIONS[section]).itemsize)]
    return {section: plan[section] for section in SECTIONS if sum(map(math.prod, plan[section]))}


def seal(header: bytes, payload: bytes) -> bytes:
    "A container of deflated header and sections: magic, version, length and checksum in front."
    front = struct.pack("<8sII", ARTIFACT_MAGIC, ARTIFACT_VERSION, len(header))
    return front + hashlib.sha256(front + header + payload).digest() + header + payload


def refuse_word(codec) -> None:
    "Raise GolfError for the name of a codec where the codec itself is wanted."
    require(not isinstance(codec, str),
            f"a codec must be an object of golfnb.file.artifact, found the word {codec!r}: give "
            "Plain() for none, or Lzma(), Zlib(), Rans(), Best(), Brotli() or Zstd()")


def pack_bytes(packed: Mapping[str, Packed], meta: dict, codec: Plain) -> bytes:
    """The container of a packed state, its sections stored by `codec`.

    `meta` holds facts that JSON can hold: settings, tokenizer_sha256,
    vocab_size, recipe, seed, steps. GolfError for others.
    """
    refuse_word(codec)
    tensors = [[name, packed[name].kind, list(packed[name].shape)] for name in sorted(packed)]
    parts = {section: [] for section in SECTIONS}
    for p in (packed[name] for name, _, _ in tensors):
        parts[p.kind].append(p.data.astype(KIND_DTYPES[p.kind], copy=False).tobytes())
        if p.scale is not None:
            parts["scale"].append(p.scale.astype("<f2").tobytes())
    sections = []
    payload = b""
    for section, shapes in section_plan(tensors).items():
        name, stored = codec.compress(b"".join(parts[section]), shapes)
        sections.append([section, name, len(stored)])
        payload += stored
    header = {"meta": meta, "tensors": tensors, "sections": sections}
    try:
        text = json.dumps(header, sort_keys=True, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError) as error:
        raise GolfError(f"the meta of an artifact must be what JSON can hold, found otherwise "
                        f"({error}): give plain numbers, texts, lists and dicts") from None
    return seal(zlib.compress(text.encode(), 9), payload)


def open_sealed(data: bytes) -> tuple[memoryview, memoryview]:
    "(deflated header, payload) of a container whose checksum is right; raises GolfError."
    require(len(data) >= PREFIX_BYTES and data[:8] == ARTIFACT_MAGIC,
            f"a container must start with {ARTIFACT_MAGIC!r} and have {PREFIX_BYTES} bytes or "
            f"more, found {data[:8]!r} in {len(data)}: it is another kind of file or cut off")
    version, length, checksum = struct.unpack("<II32s", data[8:PREFIX_BYTES])
    require(version == ARTIFACT_VERSION,
            f"the container must be of version {ARTIFACT_VERSION}, found {version}: read it with "
            "the golfnb that wrote it")
    rest = memoryview(data)[PREFIX_BYTES:]
    found = hashlib.sha256(data[:16])
    found.update(rest)
    require(found.digest() == checksum,
            f"the container's checksum must be {checksum.hex()[:16]}..., found "
            f"{found.hexdigest()[:16]}...: the file is cut off or damaged, copy or make it again")
    return rest[:length], rest[length:]


def open_own(data: bytes) -> tuple[dict, memoryview]:
    "(header, payload) of a container that this program wrote; raises GolfError for damage."
    text, payload = open_sealed(data)
    return json.loads(zlib.decompress(text)), payload


def decode_sections(header: dict, payload: memoryview,
                    codecs: Mapping[str, Plain]) -> dict[str, Packed]:
    "The tensors of a container by name; raises GolfError as `decompress_section` does."
    tensors = header["tensors"]
    streams = {}
    packed = {}
    for (section, codec, length), shapes in zip(header["sections"], section_plan(tensors).values(),
                                                strict=True):
        raw = decompress_section(bytes(payload[:length]), codec, shapes, codecs)
        payload = payload[length:]
        streams[section] = np.frombuffer(raw, SECTIONS[section])

    def take(section: str, shape: list) -> np.ndarray:
        values, streams[section] = np.split(streams[section], [math.prod(shape)])
        return values.reshape(shape)

    for name, kind, shape in tensors:
        scale = take("scale", shape[:1]) if kind in INT_MAX else None
        packed[name] = Packed(kind, tuple(shape), take(kind, shape), scale)
    return packed


def unpack_bytes(data: bytes, codec: Plain) -> tuple[dict, dict]:
    """(meta, `Packed` tensors by name) of a container that this program packed with `codec`.

    Raises GolfError for damage.
    """
    refuse_word(codec)
    header, payload = open_own(data)
    return header["meta"], decode_sections(header, payload, codec.known())


def over_budget(kept: Path, total: int, cap: float) -> str:
    "What to say of an artifact, `kept` in this file, that has with its code more bytes than `cap`."
    return (f"artifact and code must have at most {cap:,} bytes, found {total:,} "
            f"({total - cap:,} too many): the artifact is kept as {kept}, make a smaller one with "
            f"`golfnb quantize {kept.parent} --target-bytes {cap}`")


def save_weights(path: str | Path, named: Mapping[str, torch.Tensor], meta: dict) -> int:
    "Save unquantized weights, whole or not at all; returns the bytes. GolfError for other dtypes."
    kinds = {dtype: kind for kind, dtype in FLOATS.items()}
    for name, w in named.items():
        require(w.dtype in kinds,
                f"{name} must be fp32, bf16, fp16 or fp64, found {w.dtype}: convert it")
    plain = {name: pack_plain(name, w, kinds[w.dtype]) for name, w in named.items()}
    data = pack_bytes(plain, meta, Plain())
    atomic_write(path, data)
    return len(data)


LEDGER_NAMES = dict(int8="int8 tables", fp16="fp16 controls", fp32="fp32 controls",
                    scale="row scales")


def ledger_rows(header: dict, file_bytes: int, code_bytes: int) -> list[tuple[str, int]]:
    "(part, bytes) of a submission: the script, every section of its file, overhead."
    rows = [("code", code_bytes)]
    overhead = file_bytes
    for section, _, length in header["sections"]:
        rows.append((LEDGER_NAMES.get(section, f"{section} weights"), length))
        overhead -= length
    rows.append(("overhead", overhead))
    return rows


# ---- golfnb/score/evaluate.py ----
def windows(n_targets: int, seq_len: int, stride: int) -> tuple[Tensor, Tensor]:
    """First tokens `starts [W]` of windows of min(seq_len, n_targets)
    tokens that score every target once.

    `keeps [W]`: how many of its last targets a window scores. Raises
    GolfError for a stride over a row.
    """
    require(n_targets > 0 and 1 <= stride <= seq_len,
            f"scoring needs targets, and EVAL_STRIDE from 1 to the row length {seq_len}: found "
            f"{n_targets} targets and stride {stride}")
    row = min(seq_len, n_targets)
    later = -(-(n_targets - row) // stride)
    starts = (torch.arange(later + 1) * stride).clamp(max=n_targets - row)
    return starts, (starts + row).diff(prepend=torch.zeros(1, dtype=torch.int64))


def window_batches(keeps: Tensor, batch_seqs: int) -> list[tuple[int, int, int]]:
    "Batches (first window, one past the last, last_n) of `batch_seqs` windows of equal `keeps`."
    same, counts = torch.unique_consecutive(keeps, return_counts=True)
    ends = counts.cumsum(0)
    groups = zip(same.tolist(), counts.tolist(), ends.tolist(), strict=True)
    return [(a, min(a + batch_seqs, end), last_n) for last_n, n, end in groups
            for a in range(end - n, end, batch_seqs)]


@torch.no_grad()
def score_windows(model, tokens: Tensor, table: ByteTable, starts: Tensor, keeps: Tensor, row: int,
                  batch_seqs: int, out: Tensor | None = None, log=None) -> Tensor:
    """Score some windows of `row` tokens on this rank alone; returns fp64 [3]:
    nats, bytes, count of targets.

    `tokens [N + 1]` and `table` lie on the model's device; `starts` and `keeps` are from `windows`;
    a forward takes `batch_seqs` rows. `out [N]` receives each target's nats.
    """
    total = torch.zeros(3, dtype=torch.float64, device=tokens.device)
    starts, span = starts.to(tokens.device), torch.arange(row + 1, device=tokens.device)
    for a, b, last_n in counted(window_batches(keeps, batch_seqs), "scoring", log,
                                tokens.numel() - 1):
        first = starts[a:b]
        filled = torch.cat([first, first[-1:].expand(batch_seqs - (b - a))])
        ids = tokens[filled[:, None] + span].long()
        x, y = ids[:, :-1], ids[:, 1:]
        nll = token_nll(model(x, last_n), y[:, -last_n:], model.cap)[:b - a]
        n_bytes = target_bytes(table, x[:b - a, -last_n:], y[:b - a, -last_n:])
        total += torch.stack([nll.double().sum(), n_bytes.sum().double(),
                              torch.full_like(total[0], nll.numel())])
        if out is not None:
            out[first[:, None] + span[row - last_n:row]] = nll.to(out.dtype)
    return total


def share_of(n: int, ranks: Ranks) -> tuple[int, int]:
    "This rank's share of `n` things: the first, and one past the last."
    return n * ranks.rank // ranks.world, n * (ranks.rank + 1) // ranks.world


def total_score(sums: Tensor, n: int, ranks: Ranks) -> tuple[float, float]:
    """Nats a token and bits per byte of all ranks' `sums [3]`.

    Raises GolfError unless they hold `n` targets.
    """
    nll, n_bytes, count = ranks.sum_late(sums).tolist()
    require(count == n, f"every target must be scored once: {n:,} targets, {count:,.0f} scored; "
            "do all ranks hold the same tokens?")
    return nll / n, bits_per_byte(nll, n_bytes)


def sliding_loss(model: Callable, tokens: Tensor, table: ByteTable, seq_len: int, stride: int,
                 batch_seqs: int, ranks: Ranks, out: Tensor | None = None,
                 log=None) -> tuple[float, float]:
    """Nats a token and bits per byte of a stream in `windows`, as `score_windows`.

    Every rank must call.
    """
    n = tokens.numel() - 1
    starts, keeps = windows(n, seq_len, stride)
    lo, hi = share_of(len(starts), ranks)
    sums = score_windows(model, tokens, table, starts[lo:hi], keeps[lo:hi], min(seq_len, n),
                         min(batch_seqs, len(starts)), out, log)
    return total_score(sums, n, ranks)


def plain_loss(model: Callable, tokens: Tensor, table: ByteTable, seq_len: int, batch_seqs: int,
               ranks: Ranks, log=None, out: Tensor | None = None) -> tuple[float, float]:
    "Plain validation: `sliding_loss` in disjoint rows."
    return sliding_loss(model, tokens, table, seq_len, seq_len, batch_seqs, ranks, out, log)


@dataclass
class EvalSettings(BaseSettings):
    "How validation is cut into windows."
    eval_seq_len: int = setting(2048, "length of a validation window: tokens", bounds="> 0")
    eval_stride: int = setting(64, "targets scored by each window after the first: tokens",
                               bounds="> 0")
    val_batch_size: int = setting(524_288, "size of a validation forward, all ranks: tokens",
                                  bounds="> 0")

    def rows_per_score(self, world: int, row: int = 0) -> int:
        "Rows of `row` tokens (0: EVAL_SEQ_LEN) in a scoring forward of each of `world` ranks."
        return max(1,
                   self.val_batch_size // ((row or self.eval_seq_len) * world * grad_accum(world)))

    def rules(self) -> Rules:
        "A stride that leaves no target out."
        yield from super().rules()
        stride, row = self.eval_stride, self.eval_seq_len
        yield stride <= row, ("EVAL_STRIDE must be at most EVAL_SEQ_LEN, or targets are left out, "
                              f"found {stride} and {row}: lower EVAL_STRIDE")


# ---- golfnb/run/run.py ----
@dataclass
class RunSettings(BaseSettings):
    "The name of a run, and where it reads and writes."
    recipe: str = setting("pr549", "name of the program that runs: its recipe")
    run_id: str = setting("", "name of the run's directory; empty: recipe, seed and time")
    runs_dir: str = setting("runs", "directory that holds the run directories: path")
    tokenizer_path: str = setting("./data/tokenizers/fineweb_1024_bpe.model",
                                  "SentencePiece model: path")

    def rules(self) -> Rules:
        "A run's name is the name of a directory."
        yield from super().rules()
        plain = self.run_id not in (".", "..") and "/" not in self.run_id
        yield plain, ("RUN_ID must be the name of a directory in RUNS_DIR, without slashes, "
                      f"found {self.run_id!r}: choose a plain name")

    def check(self, world: int = 1) -> None:
        "Raise GolfError for the first thing that cannot work on `world` ranks."
        super().check()
        s: Any = self  # of a program: it has the numbers of the loader and of the model too
        check_batch(s, s.train_seq_len, world)


def weight_dtype(s: ComputeSettings, device: torch.device) -> torch.dtype:
    "What WEIGHT_DTYPE stands for on a device."
    usual = "bf16" if device.type == "cuda" else "fp32"
    name = usual if s.weight_dtype == "auto" else s.weight_dtype
    return {"bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}[name]


def keep_traces():
    "Let torch keep the traced training and scoring graphs on disk, where its version knows how."
    inductor: Any = import_module("torch._inductor.config")
    functorch: Any = import_module("torch._functorch.config")
    if (hasattr(inductor, "unsafe_marked_cacheable_functions")
            and hasattr(functorch, "autograd_cache_allow_custom_autograd_functions")):
        functions = ("_backend_from_string", "_sdpa_kernel")
        inductor.unsafe_marked_cacheable_functions |= {f"torch.nn.attention.{f}": "golfnb"
                                                       for f in functions}
        functorch.autograd_cache_allow_custom_autograd_functions = True


def make_backward(model: Golf, s: TrainSettings, device: torch.device,
                  loss: Callable = training_loss) -> Callable:
    """What training calls for a micro-batch: `backward(ids, targets,
    accum)`, as `backward_pass` says.

    `loss(model, cap)` makes what is differentiated. It is compiled, and recorded, where the
    settings ask for it.
    """
    loss_fn = compiled(loss(model, model.cap), s, device)
    if s.step_graph:
        return StepGraph(loss_fn, model).backward
    return partial(backward_pass, loss_fn)


def make_forward(model: Golf, s: ComputeSettings, device: torch.device) -> Callable:
    "What scoring calls: the model's `forward(ids, last_n)`, compiled where the settings ask."
    forward = compiled(model, s, device)
    if forward is not model:
        keep_traces()
    return forward


TRACES = ("progress.json", "train.log", "metrics.jsonl", "checkpoints", "raw.golf", "ema.golf",
          "artifact.golf", "artifact.golf.over")


def run_in(folder: Path) -> str:
    "Which kind of run a directory holds; empty for none. A log may have been moved away."
    if (folder / "summary.json").exists():
        return "a finished run"
    if any((folder / name).exists() for name in TRACES):
        return "a run that did not end"
    return ""


def run_folder(s, ranks: Ranks) -> Path:
    "A run's directory, by the settings `s` of a program. GolfError if another run lies there."
    made_up = f"{s.recipe}-{s.seed}-{time.strftime('%Y%m%d-%H%M%S')}"
    folder = Path(s.runs_dir) / (s.run_id or ranks.broadcast_object(made_up))
    found = ranks.broadcast_object(run_in(folder))  # on rank 0's node
    require(not found, f"{folder} already holds {found}: set another RUN_ID, or move it away")
    return folder


def count_tokens(paths: list[Path], vocab_size: int, limit: int = 10_000_000) -> np.ndarray:
    "How often each token occurs among the first `limit`, int64 [V]. GolfError for one too large."
    counts = np.zeros(vocab_size, dtype=np.int64)
    for path in paths:
        tokens = read_span(path, 0, min(limit - int(counts.sum()), read_header(path)))
        check_tokens(path, tokens, vocab_size)
        counts += np.bincount(tokens, minlength=vocab_size)
    return counts


def keep_code(path: Path, code: bytes):
    "Write a script into a run's folder. GolfError if another file lies there."
    if path.exists():
        require(path.read_bytes() == code, f"{path} must be the script that runs, found another "
                "file: set another RUN_ID, or move it away")
        return
    atomic_write(path, code)


class Run:
    """What the stages of a program share: data, folder, log, scores.

    `settings`: of a program. `code`: the bytes of the script that runs; they count against the
    budget. `val [N + 1]`: validation tokens, and `table` their bytes. `unigram`: bits per byte of a
    unigram of the training tokens. `seconds`: of each phase. `summary`: for summary.json. `extras`
    (each an `Extra`) hang on the run. `results`: what its stages gave, by name. `program_sha256`:
    of a program of one's own, empty for a recipe of golfnb. `now`: the clock that decides what a
    run does. Raises GolfError for whatever is wrong with the data.
    """

    def __init__(self, settings, ranks: Ranks, code: bytes = b"", folder: Path | None = None,
                 quiet: bool = False):
        s = settings
        data = Path(s.data_path)
        table = byte_table(load_tokenizer(s.tokenizer_path, s.vocab_size))
        self.tokenizer_sha256 = tokenizer_hash(s.tokenizer_path)
        train_files, val_files = data / "*_train_*.bin", data / "*_val_*.bin"
        self.train_paths = find_shards(train_files)
        notes = left_out(train_files, val_files), bytes_note(find_shards(val_files))
        self.data_notes = list(filter(None, notes))
        val = val_tokens(val_files, max(s.train_seq_len, s.eval_seq_len), s.vocab_size)
        self.unigram = unigram_bpb(count_tokens(self.train_paths, s.vocab_size), val, table)
        self.folder = folder or run_folder(s, ranks)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.settings, self.ranks, self.code = s, ranks, code
        self.program_sha256 = ""
        self.now = time.perf_counter
        self.seconds, self.summary, self.results, self.extras = {}, {}, {}, []
        ranks.barrier()
        self.log = RunLog(self.folder, ranks.local == 0, quiet, ranks.node)
        self.val = torch.from_numpy(val.astype(np.int64)).to(ranks.device)
        self.table = table.to(ranks.device)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        "Add the seconds of the block to those of phase `name`."
        start = time.perf_counter()
        self.log.at = (name, 0, 0, 0)
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start
        self.log.event("phase", name=name, seconds=self.seconds[name])
        self.note(f"phase {name}")

    def note(self, stage: str):
        "A stage has come to its end: what hangs on the run may keep that."
        for extra in self.extras:
            extra.note(stage)

    def once(self, stage: str, work: Callable):
        "What a stage gives: `work()`, unless `results` has it from an earlier life of the run."
        if stage not in self.results:
            self.results[stage] = work()
            self.note(stage)
        return self.results[stage]

    def scored(self, label: str, name: str, score: Callable,
               exact: bool = True) -> tuple[float, float]:
        """Call `score`, log its line (and one of eight digits), and keep it
        in the summary under `name`.

        Raises GolfError for a score that is not finite, before it is kept.
        """
        def work() -> tuple[float, float]:
            start = time.perf_counter()
            loss, bpb, *_ = score()
            check_score(label, loss)
            ms = 1000 * (time.perf_counter() - start)
            self.log.line(f"{label} val_loss:{loss:.4f} val_bpb:{bpb:.4f} eval_time:{ms:.0f}ms")
            if exact:
                self.log.line(f"{label}_exact val_loss:{loss:.8f} val_bpb:{bpb:.8f}")
            self.log.event("score", label=label, loss=loss, bpb=bpb, ms=ms)
            self.summary.update({f"{name}_loss": loss, f"{name}_bpb": bpb})
            return loss, bpb

        return self.once(f"scored {name}", work)

    def begin(self):
        "Write the log's first lines, and keep the script in the run's folder."
        s, code, world = self.settings, self.code, self.ranks.world
        self.log.line(f"golfnb recipe:{s.recipe} seed:{s.seed} world_size:{world} "
                      f"grad_accum_steps:{grad_accum(world)} device:{device_name(self.ranks)} "
                      f"torch:{torch.__version__}")
        self.log.line(f"train_shards:{len(self.train_paths)} val_tokens:{self.val.numel() - 1} "
                      f"unigram_bpb:{self.unigram:.4f} code_bytes:{len(code)}")
        for note in filter(None, self.data_notes):
            self.log.line(note)
        if world > 1:
            self.log.line("note: train_loss is of rank 0's micro-batches, loss in metrics.jsonl is "
                          "the mean of all ranks")
        if code:
            self.log.line(f"code_sha256:{hashlib.sha256(code).hexdigest()}")
            if self.ranks.is_rank0:
                keep_code(self.folder / "train_gpt.py", code)

    def plain_score(self, forward: Callable) -> tuple[float, float]:
        "Nats a token and bits per byte of `forward(ids, last_n)` in rows of training length."
        s = self.settings
        rows = s.rows_per_score(self.ranks.world, s.train_seq_len)
        return plain_loss(forward, self.val, self.table, s.train_seq_len, rows,
                          self.ranks, self.log)

    def sliding_score(self, forward: Callable) -> tuple[float, float]:
        "Nats a token and bits per byte of `forward(ids, last_n)` in sliding windows."
        s = self.settings
        rows = s.rows_per_score(self.ranks.world)
        return sliding_loss(forward, self.val, self.table, s.eval_seq_len, s.eval_stride,
                            rows, self.ranks, log=self.log)

    def score_artifact(self, forward: Callable) -> None:
        "Score what was read back from the file: plain rows, then sliding windows."
        self.scored("final_int6_roundtrip", "int6", lambda: self.plain_score(forward))
        loss, bpb = self.scored("final_int6_sliding_window", "sliding",
                                lambda: self.sliding_score(forward))
        self.log.line(f"final_int8_zlib_roundtrip_exact val_loss:{loss:.8f} val_bpb:{bpb:.8f} "
                      "(the artifact's score again, by the name of published logs)")

    def trained(self, t: Trainer):
        "Take what training came to into the summary."
        self.summary.update(raw_loss=t.val_loss, raw_bpb=t.val_bpb, losses=t.losses, steps=t.steps,
                            skipped=t.skipped, train_ms=t.train_ms,
                            step_ms=t.train_ms / max(t.steps, 1))
        if self.ranks.device.type == "cuda":
            peak, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
            self.summary["peak_bytes"] = peak
            self.log.line(f"peak memory allocated: {peak >> 20} MiB reserved: {reserved >> 20} MiB")

    def meta(self, model: Golf) -> dict:
        "What a file of weights says of itself: the model's settings, tokenizer, recipe, seed."
        s = self.settings
        found = {"settings": saved_settings(model), "tokenizer_sha256": self.tokenizer_sha256,
                 "seed": s.seed,
                 "vocab_size": s.vocab_size, "recipe": s.recipe, "steps": self.summary["steps"]}
        if self.program_sha256:
            found["program_sha256"] = self.program_sha256
        return found

    def save(self, write: Callable[[Path], object]):
        "Call `write(folder)` with the run's folder."
        write(self.folder)

    def save_state(self, name: str, model: Golf, engine: Engine,
                   tensors: list | None = None) -> dict:
        "Write the masters, or `tensors`, by published names; returns them. Every rank must call."
        state = named_state(model, *engine.gather(tensors))
        if self.ranks.is_rank0:
            self.save(lambda folder: save_weights(folder / name, state, self.meta(model)))
        self.ranks.barrier()
        return state

    def write_artifact(self, packed: dict, model: Golf, codec: Plain) -> bytes:
        """Write the artifact, log its size, return its bytes; too large it is artifact.golf.over.

        For rank 0.
        """
        cap, code_bytes = self.settings.target_bytes, len(self.code)
        self.log.at = "compressing", 0, 0, 0
        data = pack_bytes(packed, self.meta(model), codec)
        sha256 = hashlib.sha256(data).hexdigest()
        total = len(data) + code_bytes
        name = "artifact.golf"
        if total > cap:
            name = "artifact.golf.over"
            self.summary["over_budget"] = over_budget(self.folder / name, total, cap)
        self.save(lambda folder: atomic_write(folder / name, data))
        data = (self.folder / name).read_bytes()  # what is scored is what the file holds
        self.log.line(f"Serialized model int6+{codec.name}: {len(data)} bytes")
        self.log.line(f"Total submission size int6+{codec.name}: {total} bytes")
        self.log.line(f"artifact_sha256:{sha256}")
        parts = ledger_rows(open_own(data)[0], len(data), code_bytes)
        for part, n in [*parts, ("room left", cap - total)]:
            self.log.line(f"  {part:<24s}{n:>12,} bytes")
        self.summary.update(artifact_bytes=len(data), code_bytes=code_bytes, total_bytes=total,
                            ledger=parts, artifact_sha256=sha256)
        return data

    def share_artifact(self, packed: dict, model: Golf, codec: Plain) -> bytes:
        "`write_artifact` on rank 0; returns the file's bytes on every rank. All must call."
        written = b""
        if self.ranks.is_rank0:
            written = self.write_artifact(packed, model, codec)
        return self.ranks.broadcast_object(written)

    def finish(self) -> dict:
        "Write the summary and close what hangs on the run; returns the summary."
        s = self.settings
        self.summary.update(unigram_bpb=self.unigram, data_notes=self.data_notes,
                                recipe=s.recipe, seed=s.seed,
                            world=self.ranks.world, device=device_name(self.ranks),
                            seconds=self.seconds, config=asdict(s))
        if self.ranks.is_rank0:
            text = json.dumps(finite(self.summary), indent=1) + "\n"
            self.save(lambda folder: atomic_write(folder / "summary.json", text))
        for extra in self.extras:
            extra.close()
        self.log.close()
        return self.summary


def open_run(s, ranks: Ranks, code: bytes = b"", folder: Path | None = None,
             quiet: bool = False) -> Run:
    """Check the settings `s` of a program, read the data, and make the `Run`.

    Raises GolfError for whatever is wrong.
    """
    s.check(ranks.world)
    return Run(s, ranks, code, folder, quiet)


def device_name(ranks: Ranks) -> str:
    "What this rank computes on."
    return torch.cuda.get_device_name() if ranks.device.type == "cuda" else "cpu"


def train_and_average(run: Run, p, batches: Loader, step: Callable,
                      make_projector: Callable | None = None) -> dict:
    """Rehearse, train, write raw.golf and ema.golf; returns the averaged
    weights by published names.

    `p` has a `model`, an `engine`, a `forward` and `make_average(tensors)`; `make_projector` is
    as `Trainer` takes it; `step(p, trainer)` is one step. The model ends with the averaged weights
    in it.
    """
    s = run.settings

    def trainer(**clock) -> Trainer:
        average = p.make_average(p.engine.tensors())
        return Trainer(s, p.engine, batches, average, make_projector=make_projector, **clock)

    def validate() -> tuple[float, float]:
        return run.plain_score(p.forward)

    with batches:
        with run.phase("compiling"), undone(p.engine, batches):
            rehearse(trainer(now=lambda: 0.0), partial(step, p), run.log)
        with run.phase("training"):
            t = train(trainer(log=run.log, now=run.now), partial(step, p), validate, run.extras)
    run.trained(t)
    with run.phase("packing"):
        t.average.remark(run.log)
        run.save_state("raw.golf", p.model, p.engine)
        averaged = run.save_state("ema.golf", p.model, p.engine, t.average.weights())
    load_named(p.model, averaged)
    run.scored("DIAGNOSTIC post_ema", "ema", validate, exact=False)
    return averaged


def as_rank(work: Callable, timeout_s: float = 60.0) -> None:
    """Start the ranks, call `work(ranks)`, stop them. What it returns, or
    raises as GolfError, is said.

    The process then ends at once, since the other ranks may be waiting in a collective.
    """
    ranks = problem = None
    status = 3
    try:
        ranks = start_ranks(timeout_s=timeout_s)
        problem = work(ranks)
    except GolfError as error:
        problem, status = error, 2
    if problem:
        print(f"golfnb: {problem}", file=sys.stderr, flush=True)
        sys.stdout.flush()
        os._exit(status)
    assert ranks is not None  # had they not started, the process would have ended
    stop_ranks(ranks)


def start(program: str, main: Callable, group: type, own: Mapping,
          program_sha256: str = "") -> None:
    """Run the program in the file `program` as torchrun starts it, and end the process.

    `main(run)` is its run. Settings come from the environment, as `read_settings` says; the file's
    bytes count against the budget. `program_sha256`: as of `Run`.
    """
    def work(ranks: Ranks) -> str | None:
        s = read_settings(group, own, os.environ)
        run = open_run(s, ranks, Path(program).read_bytes())
        run.program_sha256 = program_sha256
        main(run)
        return run.summary.get("over_budget")

    as_rank(work)
    sys.stdout.flush()
    os._exit(0)  # nothing is left to do, and libraries may fail at tearing themselves down


# ---- golfnb/score/ttt.py ----
class Ledger:
    """What was scored and learnt, in order.

    `spans` [documents, 2]: first targets, and one past the last.
    """

    def __init__(self, spans):
        self.spans = np.asarray(spans)
        self.history = []  # "score" or "train", documents, a, b
        self.upto = self.spans[:, 0].copy()  # the next target to score in each document

    def scored(self, docs, a, b):
        """Targets a .. b-1 of `docs` got their score.

        GolfError unless they follow what was scored before.
        """
        docs, a, b = (np.array(x, ndmin=1) for x in (docs, a, b))
        once, follow = len(set(docs.tolist())) == len(docs), (a == self.upto[docs]) & (a <= b)
        require(once and (follow & (b <= self.spans[docs, 1])).all(),
                "targets must be scored once, from left to right: expected those from "
                f"{self.upto[docs][:4].tolist()} on, found {a[:4].tolist()}; start a new pass")
        self.upto[docs] = b
        self.history.append(("score", docs, a, b))

    def train(self, docs, a, b):
        """Ask before an update with targets a .. b-1 of `docs`.

        GolfError if one of them has no score.
        """
        docs, a, b = (np.array(x, ndmin=1) for x in (docs, a, b))
        require(((self.spans[docs, 0] <= a) & (a < b) & (b <= self.upto[docs])).all(),
                "an update may use scored targets of its own document only: wanted "
                f"{a[:4].tolist()} to {b[:4].tolist()}, scored up to "
                f"{self.upto[docs][:4].tolist()}; score the chunk first")
        self.history.append(("train", docs, a, b))


@dataclass
class AdaptSettings(EvalSettings):
    "Whether a run adapts, in whatever way."
    ttt_enabled: bool = setting(True, "adapt while scoring, after the plain scores: 0 or 1")


@dataclass
class TttSettings(AdaptSettings, ComputeSettings):
    "Legal score-first test-time training."
    ttt_lr: float = setting(0.002, "SGD rate at the first chunk, cosine to 0: per step",
                            bounds=">= 0")
    ttt_epochs: int = setting(3, "passes over a chunk once it is scored: passes",
                              bounds="0 to 10000")
    ttt_chunk_tokens: int = setting(32_768, "tokens scored before they are trained on: tokens",
                                    bounds="> 0")
    ttt_momentum: float = setting(0.9, "SGD momentum: ratio", bounds="[0, 1)")
    ttt_batch_seqs: int = setting(32, "rows of one update, per rank: rows", bounds="> 0")
    ttt_grad_clip: float = setting(1.0, "largest L2 norm of the averaged gradient: norm",
                                   bounds=">= 0")

    def tokens_adapted(self, world: int) -> int:
        "Tokens in one update of each of `world` ranks."
        return min(self.ttt_chunk_tokens // world, self.ttt_batch_seqs * self.eval_seq_len)

    def rules(self) -> Rules:
        "A chunk holds a row."
        yield from super().rules()
        chunk, row = self.ttt_chunk_tokens, self.eval_seq_len
        yield chunk >= row, (f"TTT_CHUNK_TOKENS must hold one row of EVAL_SEQ_LEN={row} "
                             f"tokens, found {chunk}: raise it")


def chunk_windows(starts: Tensor, keeps: Tensor, row: int, chunk: int) -> list[tuple[int, int]]:
    """First window of each chunk of `chunk` targets, and one past its last.

    Windows hold `row` tokens.
    """
    owner, n_chunks = (starts + row - keeps) // chunk, -(-(int(starts[-1]) + row) // chunk)
    bounds = torch.searchsorted(owner, torch.arange(n_chunks + 1)).tolist()
    return list(pairwise(bounds))


def adapt_steps(n_rows: int, batch_seqs: int, ranks: Ranks) -> list[tuple[int, int, int]]:
    "Per step of an epoch: this rank's first row, one past its last, and the rows of all ranks."
    shares = [share_of(n_rows, Ranks(r, ranks.world)) for r in range(ranks.world)]
    steps = []
    for j in range(0, max(hi - lo for lo, hi in shares), batch_seqs):
        cuts = [(min(lo + j, hi), min(lo + j + batch_seqs, hi)) for lo, hi in shares]
        steps.append((*cuts[ranks.rank], sum(b - a for a, b in cuts)))
    return steps


def ttt_engine(model: Golf, state: dict, cfg: TttSettings, ranks: Ranks,
               inside: Ranks | None) -> Engine:
    "An SGD engine on a model: masters as decoded, the mean gradient clipped."
    load_named(model, state)
    model.zero_grad(set_to_none=True)
    rule = Sgd(cfg.ttt_lr)
    clip = ClipMean(cfg.ttt_grad_clip)
    engine = Engine(model.role_params(), model.layout, ranks, rule, rule, clip, inside)
    banks, others = engine.gather()
    for name, view in published_views(model, banks, others).items():
        view.copy_(state[name])
    engine.load(banks, others)
    return engine


def row_loss(model: Callable, cap: float) -> Callable:
    "The loss (ids [B, T], targets [B, T], weights [B]) -> sum of each row's mean times its weight."
    def loss_of(ids, targets, weights):
        nats = F.cross_entropy(softcap(model(ids), cap).flatten(0, -2), targets.flatten(),
                               reduction="none")
        return (nats.view(targets.shape).mean(1) * weights).sum()
    return loss_of


class ChunkTrainer:
    "SGD on the scored chunks of a stream: an engine, and a step whose rows stand at a fixed place."

    def __init__(self, model: Golf, state: dict, tokens: Tensor, cfg: TttSettings, ranks: Ranks,
                 ledger: Ledger, loss_fn: Callable | None = None, inside: Ranks | None = None):
        self.tokens, self.cfg, self.ledger, device = tokens, cfg, ledger, tokens.device
        self.engine = ttt_engine(model, state, cfg, ranks, inside)
        self.params = list(model.parameters())
        self.loss_fn = loss_fn or compiled(row_loss(model, model.cap), cfg, device)
        rows = min(-(-(cfg.ttt_chunk_tokens // cfg.eval_seq_len) // ranks.world),
                   cfg.ttt_batch_seqs)
        self.ids = torch.zeros(rows, cfg.eval_seq_len + 1, dtype=torch.int64, device=device)
        self.weights = torch.zeros(rows, dtype=self.engine.full, device=device)
        self.graphed = CudaGraphed(self.backward, device)

    def backward(self):
        "Gradients of the rows in `ids`, weighted by `weights`, into `grads`."
        loss = self.loss_fn(self.ids[:, :-1], self.ids[:, 1:], self.weights)
        self.grads = torch.autograd.grad(loss, self.params, allow_unused=True)

    def learn(self, first: int, length: int, lr_schedule: float):
        """TTT_EPOCHS passes over a chunk's rows.

        GolfError, before anything moves, if they have no score yet.
        """
        ranks, seq, device = self.engine.ranks, self.cfg.eval_seq_len, self.tokens.device
        n_rows, place, span = length // seq, *(torch.arange(n, device=device)
                                               for n in self.ids.shape)
        for a, b, total in adapt_steps(n_rows, self.cfg.ttt_batch_seqs,
                                       ranks) * self.cfg.ttt_epochs:
            self.ledger.train(0, first, first + n_rows * seq)
            rows = (a + place).clamp(max=n_rows - 1)
            self.ids.copy_(self.tokens[first + rows[:, None] * seq + span])
            self.weights.copy_(place < b - a).mul_(ranks.world / total)
            self.graphed()
            for p, g in zip(self.params, self.grads, strict=True):
                p.grad = g
            self.engine.step(lr_schedule, self.cfg.ttt_momentum)


def steps_between_lines(steps: int) -> int:
    "About a hundred lines a pass: to read a score, the CPU waits for the device."
    return max(1, steps // 100)


def log_score(log: RunLog | None, sums: Tensor, step: int, steps: int):
    """A line and an event with the score up to `step` of `steps`; `sums` [3]: nats, bytes, targets.

    Raises GolfError for a score that is NaN or infinite: the weights are, too.
    """
    nats, n_bytes, count = sums.tolist()
    require(math.isfinite(nats),
            f"test-time training must keep the score finite, found {nats} nats after step "
            f"{step + 1} of {steps}: lower TTT_LR, or TTT_LORA_LR for adapters")
    if log is not None and n_bytes > 0:
        bpb = bits_per_byte(nats, n_bytes)
        log.event("ttt", chunk=step, chunks=steps, loss=nats / count, bpb=bpb)
        log.line(f"  ttt_chunk [{step + 1}/{steps}] bpb={bpb:.6f}")


def score_first(model: Golf, state: dict, tokens: Tensor, table: ByteTable, cfg: TttSettings,
                ranks: Ranks, forward: Callable | None = None, loss_fn: Callable | None = None,
                log: RunLog | None = None, out: Tensor | None = None,
                freeze: Callable | None = None,
                inside: Ranks | None = None) -> tuple[float, float, Ledger]:
    """Legal test-time training (parameter-golf PR #549): nats per token, bits per byte, the ledger.

    `state` is the decoded artifact; the model keeps what it learns. `tokens` [N + 1] are the same
    on every rank; all must call. `forward(ids, last_n)` gives logits (default: the model),
    `loss_fn` is a `row_loss`; `out` [N] receives each target's nats where it was scored. `freeze`,
    such as FreezeBlocks(2), says what does not learn; `inside` are the ranks that share the banks,
    as many as the model's layout is for (None: all). GolfError if any rule would be broken.
    """
    n, chunk = tokens.numel() - 1, cfg.ttt_chunk_tokens
    forward = model if forward is None else forward
    row, (starts, keeps) = min(cfg.eval_seq_len, n), windows(n, cfg.eval_seq_len, cfg.eval_stride)
    parts = chunk_windows(starts, keeps, row, chunk)
    ledger = Ledger([[0, n]])
    every = steps_between_lines(len(parts))
    trainer = ChunkTrainer(model, state, tokens, cfg, ranks, ledger, loss_fn, inside)
    model.freeze = freeze
    batch, starts = min(cfg.rows_per_score(ranks.world), len(starts)), starts.to(tokens.device)
    sums = torch.zeros(3, dtype=torch.float64, device=tokens.device)
    for c, (lo, hi) in enumerate(counted(parts, "adapting", log, n)):
        a, b = (lo + i for i in share_of(hi - lo, ranks))
        sums += score_windows(forward, tokens, table, starts[a:b], keeps[a:b], row, batch, out)
        ledger.scored(0, ledger.upto, ledger.upto + int(keeps[lo:hi].sum()))
        if log is not None and c % every == 0 and c + 1 < len(parts):
            log_score(log, ranks.sum(sums.clone()), c, len(parts))
        if c + 1 < len(parts):
            trainer.learn(c * chunk, chunk, 0.5 * (1 + math.cos(math.pi * c / (len(parts) - 1))))
    model.freeze = None
    found = total_score(sums, n, ranks)
    log_score(log, sums, len(parts) - 1, len(parts))
    return *found, ledger


# ---- golfnb/recipes/pr549.py ----
@dataclass
class Settings(RunSettings, LoaderSettings, ModelSettings, EngineSettings, TrainSettings,
               ArtifactSettings, TttSettings):
    "Every number of this recipe: each group's defaults are its own."
    WORDS = ("LOADER=sequential PLAN=pr399 LINKS=flat CLIP=local NS=ns5 SKIP_GATE=one "
             "AVERAGING=ema EMA_ENABLED=1 QAT_BANKS=0 SCALE_FLOOR=1 CODEC=lzma USE_GPTQ=0 "
             "TTT_FORM=chunks TTT_FREEZE_BLOCKS=0")


OWN = dict(recipe="pr549")
CODEC = Lzma()
ADAPT = score_first  # test-time training


@dataclass
class Parts:
    "What a run, a score or a study needs of this recipe."
    model: Golf
    engine: Engine
    backward: Callable  # (ids, targets, accum): the gradients of a micro-batch
    forward: Callable   # (ids, last_n): logits
    make_average: Callable  # (tensors): an average that begins with these weights


def build(s: Settings, ranks: Ranks, banks=bank_per_shape, clip=ClipEach, orthogonalize=quintic,
          skips=WeightedSkips) -> Parts:
    "The model, what trains it, and what runs it; a study gives another part in place of ours."
    layout = banks(s, ranks.world)
    dtype = weight_dtype(s, ranks.device)
    model = Golf(s, layout, dtype, ranks.device, s.attention, skips())
    fuse(model, usable_kernels(ranks.device, dtype))
    init_model(model, s, s.seed)
    matrices = Muon(s.matrix_lr, s.muon_wd, orthogonalize, s.muon_backend_steps)
    rest = AdamW(s.scalar_lr, s.tied_embed_lr, s.adam_wd, (s.beta1, s.beta2), s.adam_eps)
    engine = Engine(model.role_params(), layout, ranks, matrices, rest, clip(s.grad_clip_norm))
    backward = make_backward(model, s, ranks.device)
    forward = make_forward(model, s, ranks.device)
    return Parts(model, engine, backward, forward, partial(Ema, decay=s.ema_decay))


def data(run: Run) -> Loader:
    "Batches in the published order: each rank reads the joined shards from places of its own."
    s, ranks = run.settings, run.ranks
    rows = s.rows_per_micro(ranks.world, s.train_seq_len)
    windows = SequentialSampler(run.train_paths, ranks.rank, ranks.world, rows, s.train_seq_len,
                                grad_accum(ranks.world), spans=8)
    return Loader(windows, ranks.device, s.vocab_size)


def step(p: Parts, t: Trainer):
    "One step of training."
    elapsed, stop = t.clock()
    loss = micro_batches(p.backward, t.batches, t.engine, t.accum)
    control = t.launch(loss, elapsed, stop)  # time and stop travel with the gradients
    rate = lr_schedule(t.settings, t.steps, control[0])
    t.engine.finish(rate, momentum_schedule(t.settings, t.steps), t.projector())
    t.average.update(t.engine.tensors(), t.steps, rate)
    t.push(control, loss)  # read two steps later, without waiting for the device


def pack(run: Run, p: Parts, averaged: dict) -> bytes:
    "Round to int6 on the published grid and write the artifact; returns the file's bytes."
    small = run.settings.small_tensor
    with run.phase("packing"):
        packed = quantize_state(averaged, scale_floor=True, small=small, log=run.log)
        return run.share_artifact(packed, p.model, CODEC)


def score(run: Run, p: Parts, artifact: bytes):
    "Score the bytes of the file, then train the model on what was scored, and score on."
    s = run.settings
    state = dequantize_state(unpack_bytes(artifact, CODEC)[1])
    load_named(p.model, state)

    def adapting():
        return ADAPT(p.model, state, run.val, run.table, s, run.ranks, p.forward, log=run.log)

    with run.phase("scoring"):
        run.score_artifact(p.forward)
    if s.ttt_enabled:
        with run.phase("adapting"):
            run.scored("legal_ttt", "ttt", adapting)


def main(run: Run) -> dict:
    "The run, stage by stage; returns its summary."
    run.begin()
    with run.phase("building"):
        p = build(run.settings, run.ranks)
    averaged = train_and_average(run, p, data(run), step)
    artifact = run.once("packed", lambda: pack(run, p, averaged))
    score(run, p, artifact)
    return run.finish()


if __name__ == "__main__":
    start(__file__, main, Settings, OWN)

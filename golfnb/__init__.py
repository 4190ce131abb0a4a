"""Train the best language model that fits into 16,000,000 bytes.

The names below come from the chapters, loaded when first used.
"""
__version__ = "0.1.0"

import sys

def _module_to_run() -> str:
    "What `python -m` runs; empty if it does not."
    words = iter(sys.orig_argv[1:])
    for word in words:
        if word.startswith("-m"):
            return word[2:] or next(words, "")
    return ""


_found_here = sys.argv[:1] == ["-m"] and not sys.flags.safe_path
if _found_here and _module_to_run().split(".")[0] == "golfnb":
    del sys.path[0]  # the current folder: what lies there does not run in place of Python's own

import importlib  # noqa: E402
from typing import TYPE_CHECKING  # noqa: E402

if TYPE_CHECKING:  # for editors, which do not follow _HOME
    from .file.artifact import load_model as load_model
    from .file.artifact import save_artifact as save_artifact
    from .model.engine import start_ranks as start_ranks
    from .model.engine import stop_ranks as stop_ranks
    from .model.golf import Golf as Golf
    from .muon.errors import GolfError as GolfError
    from .muon.grouping import param_groups as param_groups
    from .muon.newton_schulz import polar_express as polar_express
    from .muon.newton_schulz import quintic as quintic
    from .muon.optimizer import ParallelMuon as ParallelMuon
    from .muon.sharded import ShardedState as ShardedState
    from .text.bpb import bits_per_byte as bits_per_byte
    from .text.bpb import byte_table as byte_table
    from .text.bpb import load_tokenizer as load_tokenizer
    from .text.loader import Loader as Loader
    from .text.shards import open_shard as open_shard
    from .tools.programs import find_program as find_program
    from .tools.programs import settings_of as settings_of
    from .tools.sampling import generate as generate

__all__ = [
    "ParallelMuon", "param_groups", "ShardedState", "start_ranks", "stop_ranks", "quintic",
    "polar_express", "open_shard",
    "Loader", "load_tokenizer", "byte_table", "bits_per_byte", "find_program", "settings_of",
    "Golf", "generate", "save_artifact", "load_model", "GolfError",
]
_HOME = {
    "ParallelMuon": "muon.optimizer", "param_groups": "muon.grouping",
    "ShardedState": "muon.sharded", "start_ranks": "model.engine", "stop_ranks": "model.engine",
    "quintic": "muon.newton_schulz", "polar_express": "muon.newton_schulz",
    "open_shard": "text.shards", "Loader": "text.loader", "load_tokenizer": "text.bpb",
    "byte_table": "text.bpb", "bits_per_byte": "text.bpb", "find_program": "tools.programs",
    "settings_of": "tools.programs", "Golf": "model.golf", "generate": "tools.sampling",
    "save_artifact": "file.artifact", "load_model": "file.artifact", "GolfError": "muon.errors",
}


def __getattr__(name: str):
    if name not in _HOME:
        raise AttributeError(f"module 'golfnb' has no attribute {name!r}")
    globals()[name] = found = getattr(importlib.import_module(f"golfnb.{_HOME[name]}"), name)
    return found


def __dir__():
    return sorted({*globals(), *__all__})

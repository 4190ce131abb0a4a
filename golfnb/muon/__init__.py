"""Muon for any model of PyTorch, on one device or many: an optimizer with torch's contract.

It imports nothing of golfnb outside this folder. The names below are loaded when first used.
"""
__version__ = "0.1.0"

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # for editors, which do not follow _HOME
    from .errors import GolfError as GolfError
    from .errors import OptimizerError as OptimizerError
    from .grouping import group_table as group_table
    from .grouping import param_groups as param_groups
    from .optimizer import ParallelMuon as ParallelMuon
    from .rules import Rule as Rule
    from .sharded import ShardedState as ShardedState

__all__ = ["ParallelMuon", "param_groups", "group_table", "ShardedState", "Rule", "GolfError",
           "OptimizerError"]
_HOME = {
    "ParallelMuon": "optimizer", "param_groups": "grouping", "group_table": "grouping",
    "ShardedState": "sharded", "Rule": "rules", "GolfError": "errors", "OptimizerError": "errors",
}


def __getattr__(name: str):
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = found = getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)
    return found


def __dir__():
    return sorted({*globals(), *__all__})

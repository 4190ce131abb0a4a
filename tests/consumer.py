"""What a user of the library writes, in an editor that knows its types.

tests/book/test_lint.py has it checked, nothing runs it.
"""
from pathlib import Path

import torch
from torch import nn

import golfnb
from golfnb.model.engine import AdamW, ClipMean, Engine, Muon, Ranks
from golfnb.model.golf import Golf, WeightedSkips
from golfnb.model.layout import bank_per_shape
from golfnb.muon.newton_schulz import quintic
from golfnb.recipes.pr549 import Settings
from golfnb.run.run import open_run
from golfnb.text.loader import Loader, SequentialSampler, grad_accum

def train_one_s_own(model: nn.Module, batches: list[torch.Tensor]) -> None:
    "A module of one's own under ParallelMuon."
    groups = golfnb.param_groups(model, heads=["head"])
    optimizer = golfnb.ParallelMuon(groups, 0.02, ns_coefficients="polar_express", max_norm=1.0)
    for batch in batches:
        loss: torch.Tensor = model(batch).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def orthogonal(matrix: torch.Tensor) -> torch.Tensor:
    "Newton-Schulz alone."
    return quintic(matrix[None], 5)[0]


def step_of_an_engine(settings: Settings, ranks: Ranks) -> list[torch.Tensor]:
    "Golf under the engine, one step."
    layout = bank_per_shape(settings, ranks.world)
    model = Golf(settings, layout, torch.float32, ranks.device, "math", WeightedSkips())
    matrices = Muon(0.02, 0.0, quintic, 5)
    rest = AdamW(0.02, 0.03, 0.0, (0.9, 0.95), 1e-8)
    engine = Engine(model.role_params(), layout, ranks, matrices, rest, ClipMean(1.0))
    engine.launch()
    engine.finish(1.0, 0.95)
    return engine.tensors()


def first_batch(paths: list[Path], ranks: Ranks) -> torch.Tensor:
    "Tokens [rows, seq_len] of the shards."
    windows = SequentialSampler(paths, ranks.rank, ranks.world, 4, 256, grad_accum(ranks.world))
    loader = Loader(windows, ranks.device, 1024)
    ids, _ = next(loader)
    loader.close()
    return ids


def score_of_a_run(settings: Settings, ranks: Ranks) -> dict:
    "A run, opened and closed."
    run = open_run(settings, ranks)
    run.begin()
    return run.finish()

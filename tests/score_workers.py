"""Scoring and adapting in one process or several: a small model away from its initial zeros, a stream, and a spawner."""
import os
import pickle
import socket
import tempfile
import traceback
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from pathlib import Path

import torch
from forked import fork_processes

from golfnb.score.adapters import AdapterSettings, score_documents
from golfnb.text.bpb import ByteTable
from golfnb.score.evaluate import plain_loss, sliding_loss
from golfnb.model.frontier import SavedFrontier
from golfnb.model.golf import FreezeBlocks, SavedModel, init_model, load_named, model_from_settings, named_state
from golfnb.model.engine import Ranks, start_ranks, stop_ranks
from golfnb.score.ttt import TttSettings, score_first


@dataclass
class ScoreSettings(SavedModel, TttSettings, AdapterSettings):
    "A model, and how both forms of test-time training score with it."


CFG = ScoreSettings(num_layers=3, model_dim=16, num_heads=2, num_kv_heads=1, vocab_size=32, rope_dims=4, bigram_vocab_size=24, bigram_dim=6, ve_dim=6, ve_layers="2",
                    xsa_last_n=1, train_seq_len=16, rope_train_len=8, eval_seq_len=16, eval_stride=6, val_batch_size=512,
                    ttt_chunk_tokens=128, ttt_batch_seqs=8, ttt_lr=0.05)


@dataclass
class FrontierScores(SavedFrontier, TttSettings, AdapterSettings):
    "The same of a model of whole documents."


DOCS = replace(CFG, ttt_lora_rank=3, ttt_lora_lr=0.02, ttt_chunk_size=4, ttt_batch_size=5, ttt_beta2=0.9)


def stream(n: int = 700, vocab: int = 32, seed: int = 0) -> torch.Tensor:
    return torch.randint(vocab, (n + 1,), generator=torch.Generator().manual_seed(seed))


def texts(lengths: list[int], seed: int = 0) -> torch.Tensor:
    "A stream of documents of these lengths, BOS included, and a closing BOS."
    g = torch.Generator().manual_seed(seed)
    return torch.cat([torch.cat([torch.tensor([1]), 2 + torch.randint(30, (n - 1,), generator=g)]) for n in lengths] + [torch.tensor([1])])


def random_table(vocab: int = 32) -> ByteTable:
    g = torch.Generator().manual_seed(9)
    return ByteTable(torch.randint(1, 6, (vocab,), generator=g).short(), torch.rand(vocab, generator=g) < 0.5, torch.rand(vocab, generator=g) < 0.1)


def unfilled(cfg: ScoreSettings, ranks, dtype=torch.float32) -> tuple:
    "The model that the settings describe, without weights, and its layout."
    saved = SavedFrontier if isinstance(cfg, SavedFrontier) else SavedModel
    values = {spec.name: getattr(cfg, spec.name) for spec in fields(saved)}
    model, _, layout = model_from_settings(values, dtype, world=ranks.world)
    return model, layout


def random_state(cfg: ScoreSettings = CFG) -> dict:
    (model, _), g = unfilled(cfg, Ranks()), torch.Generator().manual_seed(3)
    init_model(model, cfg, 0)
    return {n: t + 0.1 * torch.randn(t.shape, generator=g) for n, t in named_state(model).items()}


def golf_on(cfg: ScoreSettings, ranks, dtype=torch.float32):
    model, layout = unfilled(cfg, ranks, dtype)
    load_named(model, random_state(cfg))
    return model, layout


def adapt(ranks, dtype=torch.float32, n: int = 700, tokens=None, freeze=None, **more):
    "(loss, bpb, named weights afterwards, nats per target on this rank)"
    cfg = replace(CFG, **more)
    model, _ = golf_on(cfg, ranks, dtype)
    nats = torch.full((n,), float("nan"), dtype=torch.float64)
    loss, bpb, ledger = score_first(model, random_state(cfg), stream(n) if tokens is None else tokens, random_table(), cfg, ranks, out=nats, freeze=freeze)
    return loss, bpb, {k: t.double().numpy() for k, t in named_state(model).items()}, nats, ledger.history


def plain_and_sliding(ranks, n: int = 700):
    model, _ = golf_on(CFG, ranks, torch.float64)
    args = model, stream(n), random_table(), 16
    return plain_loss(*args, 4, ranks), sliding_loss(*args, 6, 4, ranks)


def documents(ranks, dtype=torch.float64):
    "(loss, bpb) of the adapters per document."
    cfg = replace(CFG, ttt_lora_rank=3, ttt_lora_lr=0.02, ttt_chunk_size=4, ttt_batch_size=3)
    model, _ = golf_on(cfg, ranks, dtype)
    return score_documents(model, random_state(cfg), stream(300), random_table(), cfg, ranks)[:2]


FORMS = {"one step": (torch.float64, {}), "fp32": (torch.float32, {}), "frozen": (torch.float64, {"freeze": FreezeBlocks(2)}), "uneven": (torch.float64, {"ttt_chunk_tokens": 80})}


def adapted(ranks, name: str) -> tuple:
    "(loss, bpb, named weights afterwards) of a form, on a text of three chunks or five, the last a part of one."
    dtype, more = FORMS[name]
    return adapt(ranks, dtype, 350, **more)[:3]


def all_scores(ranks):
    "Everything the tests ask of several ranks, in one set of processes."
    out = {"sliding": plain_and_sliding(ranks), "short": plain_and_sliding(ranks, 17), "documents": documents(ranks), "one step": adapted(ranks, "one step"), "uneven": adapted(ranks, "uneven"),
           "many steps": adapt(ranks, torch.float64, 240, ttt_batch_seqs=1, ttt_chunk_tokens=80)[:3]}
    few = {"fp32": lambda: adapted(ranks, "fp32"), "frozen": lambda: adapted(ranks, "frozen"), "documents fp32": lambda: documents(ranks, torch.float32)}
    return out | {name: case() for name, case in few.items() if ranks.world < 4}


WORLDS = (8, 4, 3, 2)


def score_entry(rank: int, ports: list[int], folder: str):
    "One process: rank `rank` of every world that is large enough, one world after another."
    torch.set_num_threads(1)
    outs = {}
    for world, port in zip(WORLDS, ports):
        if rank < world:
            os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
            try:
                ranks = start_ranks()
                outs[world] = all_scores(ranks)
                stop_ranks(ranks)
            except BaseException:
                outs[world] = traceback.format_exc()
                break
    (Path(folder) / f"{rank}.pkl").write_bytes(pickle.dumps(outs))


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


@lru_cache
def spawn_all() -> list[dict]:
    with tempfile.TemporaryDirectory() as folder:
        fork_processes(score_entry, ([free_port() for _ in WORLDS], folder), max(WORLDS))
        return [pickle.loads((Path(folder) / f"{r}.pkl").read_bytes()) for r in range(max(WORLDS))]


def spawn_scores(world: int) -> list[dict]:
    "The results of a world's ranks; all worlds share one set of processes, started once however many test modules ask."
    outs = [out.get(world, "did not come so far") for out in spawn_all()[:world]]
    for r, out in enumerate(outs):
        assert isinstance(out, dict), f"rank {r} of {world}:\n{out}"
    return outs

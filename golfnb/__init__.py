"""Train the best language model that fits into 16,000,000 bytes. The names below come from the chapters, loaded when first used."""
__version__ = "0.1.0"

_HOME = {
    "ParallelMuon": "any_model", "start_ranks": "parallel_muon", "stop_ranks": "parallel_muon", "orthogonalize": "newton_schulz",
    "open_shard": "shards", "Loader": "loader", "load_tokenizer": "bpb", "byte_table": "bpb", "bits_per_byte": "bpb",
    "load_config": "config", "Golf": "model", "generate": "sampling", "save_artifact": "artifact", "load_model": "artifact", "GolfError": "settings",
}
__all__ = list(_HOME)


def __getattr__(name: str):
    if name not in _HOME:
        raise AttributeError(f"module 'golfnb' has no attribute {name!r}")
    from importlib import import_module

    globals()[name] = found = getattr(import_module(f"golfnb.{_HOME[name]}"), name)
    return found


def __dir__():
    return sorted({*globals(), *__all__})

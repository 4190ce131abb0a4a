"""Train the best language model that fits into 16,000,000 bytes. The names below come from the chapters, loaded when first used."""
__version__ = "0.1.0"

_HOME = {
    "ParallelMuon": "any_model", "start_ranks": "parallel_muon", "stop_ranks": "parallel_muon", "quintic": "newton_schulz", "polar_express": "newton_schulz",
    "open_shard": "shards", "Loader": "loader", "load_tokenizer": "bpb", "byte_table": "bpb", "bits_per_byte": "bpb",
    "find_program": "tools.programs", "settings_of": "tools.programs", "Golf": "model", "generate": "tools.sampling", "save_artifact": "artifact", "load_model": "artifact", "GolfError": "settings",
}
_TOOLS = ("checkpoint", "cli", "data", "drill", "lab", "launcher", "play", "report", "sampling", "submission", "watch")
_STUDIES = ("baselines", "bench", "buckets", "significance", "timing")
MOVED = {**{name: f"golfnb.tools.{name}" for name in _TOOLS}, **{name: f"golfnb.studies.{name}" for name in _STUDIES}}
__all__ = list(_HOME)


def __getattr__(name: str):
    from importlib import import_module

    if name in MOVED:
        return import_module(f"golfnb.{name}")
    if name not in _HOME:
        raise AttributeError(f"module 'golfnb' has no attribute {name!r}")
    globals()[name] = found = getattr(import_module(f"golfnb.{_HOME[name]}"), name)
    return found


def __dir__():
    return sorted({*globals(), *__all__})


class _OldNames:
    "Finds modules by the names of version 0.1.0, with a warning: `golfnb.report` is `golfnb.tools.report`."

    @staticmethod
    def find_spec(name: str, path=None, target=None):
        from importlib.machinery import ModuleSpec

        short = name.removeprefix("golfnb.")
        if short != name and short in MOVED:
            return ModuleSpec(name, _OldNames)

    @staticmethod
    def create_module(spec):
        return None

    @staticmethod
    def exec_module(module):
        import sys
        import warnings
        from importlib import import_module

        new = MOVED[module.__name__.removeprefix("golfnb.")]
        warnings.warn(f"{module.__name__} is now {new}; the old name goes with the next version", DeprecationWarning, stacklevel=2)
        sys.modules[module.__name__] = import_module(new)


def _find_old_names():
    import sys

    sys.meta_path.append(_OldNames)


_find_old_names()

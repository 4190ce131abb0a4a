"""What was measured, and how: benches, baselines, significance, and the studies behind the book's figures."""
from importlib import import_module as _import_module


def __getattr__(name: str):
    import warnings

    harness = _import_module("golfnb.studies.harness")
    if name.startswith("_") or not hasattr(harness, name):
        raise AttributeError(f"module 'golfnb.studies' has no attribute {name!r}")
    warnings.warn(f"{name} is now in golfnb.studies.harness; the old place goes with the next version", DeprecationWarning, stacklevel=2)
    return getattr(harness, name)

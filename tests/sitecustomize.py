"""Every Python process that a test starts imports torch without searching for garbage, and does not search torch's objects later.

Python runs this file before a program, since conftest.py puts tests/ on PYTHONPATH. Torch holds a quarter of a million objects, none of
them garbage: to search them while they come, and once more as the process ends, is a quarter of what a short process costs.
What a program makes itself is collected, as rarely as conftest.py has it for the tests.

Nor does nbformat build the grammars of internet addresses, which takes seconds: jsonschema would check addresses by them if it were
asked to check formats, and nbformat does not ask.
"""
import gc
import sys
from functools import partial
from importlib.machinery import PathFinder


def load(exec_module, module) -> None:
    "Run torch's own code, and set apart what it has made."
    gc.disable()
    try:
        exec_module(module)
    finally:
        gc.enable()
    gc.freeze()
    gc.set_threshold(100_000)


class TorchFinder:
    "Finds torch where Python would, and nothing else."

    @staticmethod
    def find_spec(name: str, path=None, target=None):
        spec = PathFinder.find_spec(name, path, target) if name == "torch" else None
        if spec and spec.loader:
            spec.loader.exec_module = partial(load, spec.loader.exec_module)
        return spec


sys.meta_path.insert(0, TorchFinder)
sys.modules["rfc3987_syntax"] = None  # jsonschema goes on without it

"""Every test, and every process a test starts, sees the checkout's golfnb and the workers in tests/."""
import os
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
for p in (str(ROOT), str(ROOT / "tests")):
    if p not in sys.path:
        sys.path.insert(0, p)
os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")


SHARED = {"test_evaluate", "test_ttt", "test_adapters"}  # they ask for the same processes (score_workers.spawn_scores)


def pytest_collection_modifyitems(items):
    "With `-n`, the tests of one file run in one process, since they share fixtures; and so do the files that share processes."
    for item in items:
        item.add_marker(pytest.mark.xdist_group("scores" if item.path.stem in SHARED else item.path.stem))

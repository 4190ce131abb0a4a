"""Every test, and every process a test starts, sees the checkout's golfnb and the workers beside the tests."""
import gc
import os
import signal
import sys
import time
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("text", "model", "muon", "run", "file", "score", "recipes", "tools", "book")  # by what they are about
ON_PATH = [str(ROOT), *(str(ROOT / "tests" / folder) for folder in ("", *FOLDERS))]
sys.path[:0] = [path for path in ON_PATH if path not in sys.path]
os.environ["PYTHONPATH"] = os.pathsep.join([*ON_PATH, os.environ.get("PYTHONPATH", "")])
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in `make test &`: what a test starts may be interrupted
    signal.signal(signal.SIGINT, signal.default_int_handler)
UNTIL, LEFT_OUT = "GOLFNB_QUICK_UNTIL", "GOLFNB_QUICK_LEFT_OUT"  # of tests/quick.py: a time, and the file for what had none
gc.set_threshold(100_000)  # torch holds many objects, and to search them for garbage takes long
LONG = tuple("test_" + name for name in """
    nodes own_recipe oracle drill book kernels run optimizer cli fuzz bits score_ranks rans
    studies ranks library_use guard loader model lint step checkpoint submission script launcher data
""".split())


def pytest_collection_modifyitems(items):
    "The longest files first (with --no-loadscope-reorder): no worker ends with one of them while the other waits."
    items.sort(key=lambda item: LONG.index(item.path.stem) if item.path.stem in LONG else len(LONG))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    "A test that would begin after the time of tests/quick.py is left out, and its file named."
    if time.time() > float(os.environ.get(UNTIL, "inf")):
        with open(os.environ[LEFT_OUT], "a", encoding="utf-8") as file:
            file.write(f"{item.path.relative_to(ROOT)}\n")
        pytest.skip("no time is left")


@pytest.fixture(scope="session", autouse=True)
def nothing_of_the_user(tmp_path_factory):
    "Tests start in an empty folder, without settings of golfnb in the environment: what a user has there is theirs."
    from tiny import known_names

    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("nothing_here"))
        patch.setenv("HOME", str(tmp_path_factory.mktemp("home")))
        for name in known_names():
            patch.delenv(name, raising=False)
        yield


@pytest.fixture(scope="session", autouse=True)
def chapters_are_read_once():
    "Scripts are joined from the same chapters again and again; none changes while tests run. Programs are read each time."
    from golfnb.tools import joiner

    read_each_time = joiner.read_file
    read_once = cache(read_each_time)

    def read_file(path, package, start=""):
        if path.is_relative_to(ROOT / "golfnb") and not start:
            return read_once(path, package)
        return read_each_time(path, package, start)

    joiner.read_file = read_file
    yield
    joiner.read_file = read_each_time

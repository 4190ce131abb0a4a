"""`import golfnb` offers what a user needs, and loads nothing heavy before it is asked."""
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import golfnb
import pytest


@pytest.mark.parametrize("name", golfnb.__all__)
def test_a_name_of_the_front_door_says_what_it_is(name):
    assert name in dir(golfnb) and getattr(golfnb, name).__doc__ and getattr(golfnb, name).__module__.startswith("golfnb.")


def test_the_front_door_is_light_and_hides_no_module():
    code = "import sys, golfnb; assert 'golfnb.settings' not in sys.modules and 'torch' not in sys.modules; from golfnb import *; assert Golf and 'torch' in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
    assert not {p.stem for p in Path(golfnb.__file__).parent.glob("*.py")} & set(golfnb.__all__)
    with pytest.raises(AttributeError, match="no attribute 'Muon'"):
        golfnb.Muon


INSTALLED = """
import golfnb
from golfnb.lab import notebook_dir
print(golfnb.__file__, golfnb.ParallelMuon.__module__, notebook_dir(), len(list(notebook_dir().glob("*.ipynb"))), len(list(notebook_dir().glob("results/*.json"))))
"""


def test_an_install_from_the_sdist_has_command_library_and_notebooks(tmp_path):
    "What `python -m build` and pip call, from a copy of the checkout, without a network; about 10 s."
    root, source, venv = Path(__file__).resolve().parent.parent, tmp_path / "source", tmp_path / "venv"
    for name in ("golfnb", "nbs"):
        shutil.copytree(root / name, source / name, ignore=shutil.ignore_patterns("__pycache__", ".*"))
    for path in root.iterdir():
        if path.is_file() and path.suffix in (".py", ".ini", ".in", ".md", ""):
            shutil.copy(path, source)
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}

    def call(*words, cwd=tmp_path) -> str:
        done = subprocess.run(list(map(str, words)), cwd=cwd, env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-2000:]
        return done.stdout

    call(sys.executable, "-c", f"from setuptools import build_meta; build_meta.build_sdist({str(tmp_path)!r})", cwd=source)
    call(sys.executable, "-m", "venv", "--without-pip", venv)
    (site,) = venv.glob("lib/python*/site-packages")
    (site / "torch.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")  # torch is there already
    (sdist,) = tmp_path.glob("*.tar.gz")
    call(sys.executable, "-m", "pip", "--python", venv / "bin" / "python", "install", "--no-deps", "--no-build-isolation", "--no-index", "--no-compile", "--force-reinstall", sdist)
    assert call(venv / "bin" / "golfnb", "--version") == f"golfnb {golfnb.__version__}\n"
    assert (site / "golfnb" / "play.html").is_file()
    notebooks, results = (len(list((root / "nbs").glob(kind))) for kind in ("*.ipynb", "results/*.json"))
    assert call(venv / "bin" / "python", "-c", INSTALLED).split() == [str(site / "golfnb" / "__init__.py"), "golfnb.any_model", str(venv / "share" / "golfnb" / "nbs"), str(notebooks), str(results)]

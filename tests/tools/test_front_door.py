"""`import golfnb` offers what a user needs, and loads nothing heavy before it is asked."""
import ast
import email
import os
import re
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


def test_editors_are_told_of_every_name_and_its_home():
    tree = ast.parse(Path(golfnb.__file__).read_text())
    (block,) = [n for n in tree.body if isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING"]
    told = {n.names[0].asname: n.module for n in block.body}
    assert told == golfnb._HOME and sorted(golfnb.__all__) == sorted(told)


def test_the_front_door_is_light_and_hides_no_module():
    code = "import sys, golfnb; assert 'golfnb.settings' not in sys.modules and 'torch' not in sys.modules; from golfnb import *; assert Golf and 'torch' in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
    assert not {p.stem for p in Path(golfnb.__file__).parent.glob("*.py")} & set(golfnb.__all__)
    with pytest.raises(AttributeError, match="'Muon'"):
        golfnb.Muon


ROOT = Path(__file__).resolve().parents[2]
INSTALLED = """
import golfnb
from pathlib import Path
from golfnb.tools.lab import copy_notebooks, notebook_dir
print(golfnb.__file__, golfnb.ParallelMuon.__module__, notebook_dir(), len(list(notebook_dir().rglob("*.ipynb"))), len(list(notebook_dir().glob("results/*.json"))), *copy_notebooks(Path("lab")))
"""


def check_metadata(found: email.message.Message) -> None:
    "What a package index would show."
    addresses = [f"{n}: {v}" for n, v in found.items() if n != "Requires-Dist" and re.search("@|https?:", v)]
    assert not addresses, "no address is known that these could be"
    assert "Programming Language :: Python :: 3.11" in found.get_all("Classifier") and "muon" in found["Keywords"]
    relative = re.findall(r"\]\((?!https?://)[^)]*\)", found.get_payload())
    assert len(found.get_payload()) > 5000 and not relative, "a page elsewhere cannot follow them"
    needs = found.get_all("Requires-Dist")
    assert "torch>=2.11" in needs
    assert not [n for n in needs if 'extra == "notebooks"' in n and ("nbdev" in n or "==" in n.split(";")[0])]
    assert [n for n in needs if n.startswith("nbdev==2") and 'extra == "dev"' in n]


def test_an_install_from_the_sdist_has_command_library_and_notebooks(tmp_path):
    "What `python -m build` and pip call, from a copy of the checkout, without a network; about 10 s."
    root, source, venv = Path(__file__).resolve().parents[2], tmp_path / "source", tmp_path / "venv"
    for name in ("golfnb", "nbs"):
        shutil.copytree(root / name, source / name, ignore=shutil.ignore_patterns("__pycache__", ".*"))
    for path in root.iterdir():
        if path.is_file() and path.suffix in (".py", ".ini", ".in", ".md", ".txt", ".cff", ""):
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
    assert (site / "golfnb" / "tools" / "play.html").is_file() and (site / "golfnb" / "py.typed").is_file() and (site / "golfnb" / "prose.json").is_file()
    assert not (venv / "share").exists() and (site / "golfnb" / "muon" / "py.typed").is_file()
    assert len(list((site / "golfnb" / "prose").glob("*/*.txt"))) == len(list((root / "golfnb" / "prose").glob("*/*.txt"))) > 30
    (metadata,) = site.glob("golfnb-*.dist-info/METADATA")
    check_metadata(email.message_from_string(metadata.read_text(encoding="utf-8")))
    notebooks, results = (len(list((root / "nbs").rglob(kind))) for kind in ("*.ipynb", "results/*.json"))
    assert call(venv / "bin" / "python", "-c", INSTALLED).split() == [str(site / "golfnb" / "__init__.py"), "golfnb.muon.optimizer", str(site / "golfnb" / "nbs"), str(notebooks), str(results), str(notebooks), "0"]


def pinned(name: str) -> dict[str, str]:
    "Package -> version of a requirements file; every line is an exact pin."
    lines = [line for line in (ROOT / name).read_text().splitlines() if line and not line.startswith("#")]
    return dict(re.fullmatch(r"([\w-]+)==([\w.]+)(?:;.*)?", line).groups() for line in lines)


def test_setup_installs_no_tool_of_tests_or_book():
    run, dev = pinned("requirements.txt"), pinned("requirements-dev.txt")
    assert not run.keys() & {"pytest", "Sphinx", "transformers", "playwright", "scipy", "nbdev", "hypothesis"}
    assert {"pytest", "Sphinx", "transformers", "playwright", "scipy", "nbdev"} <= dev.keys() and not run.keys() & dev.keys()


@pytest.mark.parametrize("target, installs", [("setup", ["requirements.txt"]), ("demo", ["requirements.txt"]), ("quick", ["requirements.txt", "requirements-dev.txt"]), ("test", ["requirements.txt", "requirements-dev.txt"]), ("book", ["requirements.txt", "requirements-dev.txt"])])
def test_a_fresh_clone_installs_what_the_target_needs(tmp_path, target, installs):
    for name in ("Makefile", "requirements.txt", "requirements-dev.txt", "setup.py", "settings.ini", "book/quarto"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    env = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}  # the suite may run under make itself
    plan = subprocess.run(["make", "-n", target], cwd=tmp_path, env=env, capture_output=True, text=True, check=True).stdout
    assert re.findall(r"-r (\S+)", plan) == installs
    assert re.search(r"minutes.* GB to download", plan.splitlines()[0]), "first of all, how long and how much"


def test_the_files_at_the_root_agree_with_the_package():
    citation = (ROOT / "CITATION.cff").read_text()
    assert f"\nversion: {golfnb.__version__}\n" in citation and f"## {golfnb.__version__}" in (ROOT / "CHANGELOG.md").read_text()
    assert (ROOT / re.search(r"\]\(([^)]+)\)", (ROOT / "CONTRIBUTING.md").read_text())[1]).is_file()
    assert "run: make test" in (ROOT / ".github/workflows/test.yml").read_text() and "eol=lf" in (ROOT / ".gitattributes").read_text()
    assert "example.org" not in (ROOT / "settings.ini").read_text() and "github.com" not in (ROOT / "settings.ini").read_text()

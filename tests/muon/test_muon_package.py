"""golfnb/muon needs nothing of golfnb outside it, and is a distribution of its own: built, installed beside torch alone, and tried there."""
import ast
import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted((ROOT / "golfnb" / "muon").glob("*.py"))
ALONE = """
import importlib, importlib.abc, sys

class NothingElse(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.startswith("golfnb.") and name.split(".")[1] != "muon":
            raise ImportError(f"{name} is outside golfnb.muon")

sys.meta_path.insert(0, NothingElse())
for name in sys.argv[1:]:
    importlib.import_module(f"golfnb.muon.{name}")
print(len([name for name in sys.modules if name.startswith("golfnb.muon.")]))
"""
BESIDE = """
import sys
from importlib import import_module
import golfnb, golfnb.muon, golfnb_muon, torch

assert golfnb.ParallelMuon is golfnb.muon.ParallelMuon is not golfnb_muon.ParallelMuon
saved = {}
for package in (golfnb.muon, golfnb_muon):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.Linear(6, 6), torch.nn.Linear(6, 6))
    groups = package.param_groups(model)
    groups[0]["rule"] = import_module(f"{package.__name__}.rules").MuonEqRule()
    optimizer = package.ParallelMuon(groups)
    if saved:
        optimizer.load_state_dict(saved)
    for _ in range(2):
        model(torch.ones(2, 6)).square().mean().backward()
        optimizer.step()
    state = optimizer.state_dict()
    assert state["param_groups"][0]["rule"] == "MuonEqRule", state["param_groups"][0]["rule"]
    saved = saved or state
exec(open(sys.argv[1]).read())
print("beside")
"""


def outside(tree: ast.Module) -> list[str]:
    "Imports of golfnb in a module of golfnb/muon that lead out of the folder, or say its whole name."
    found = []
    for n in ast.walk(tree):
        names = [a.name for a in n.names] if isinstance(n, ast.Import) else [n.module or ""] if isinstance(n, ast.ImportFrom) and not n.level else []
        out = any(name.split(".")[0] == "golfnb" for name in names) or isinstance(n, ast.ImportFrom) and n.level > 1
        found += [ast.unparse(n)] * out
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_a_module_imports_nothing_of_golfnb_outside_the_folder(path):
    assert outside(ast.parse(path.read_text(encoding="utf-8"))) == []


def test_what_leads_out_would_be_found():
    for text in ("from golfnb.settings import setting", "import golfnb.run.run", "from ..model.layout import Layout", "def f():\n    from ..run import run"):
        assert len(outside(ast.parse(text))) == 1, text
    assert outside(ast.parse("import torch\nfrom .rules import Rule")) == []


def test_it_imports_where_the_rest_of_golfnb_cannot_be():
    names = [p.stem for p in FILES if p.stem != "__init__"]
    done = subprocess.run([sys.executable, "-c", ALONE, *names], capture_output=True, text=True)
    assert done.returncode == 0 and int(done.stdout) == len(names), done.stderr[-2000:]


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    "A Python that finds torch and pytest where they are, and golfnb-muon, built and installed without a network."
    folder = tmp_path_factory.mktemp("muon")
    built, venv = folder / "dist", folder / "venv"
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}

    def call(*words) -> str:
        done = subprocess.run(list(map(str, words)), cwd=folder, env=env, capture_output=True, text=True)
        assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
        return done.stdout

    call(sys.executable, ROOT / "muon" / "build.py", built)
    call(sys.executable, "-m", "venv", "--without-pip", venv)
    (site,) = venv.glob("lib/python*/site-packages")
    (site / "torch.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    (wheel,) = built.glob("*.whl")
    call(sys.executable, "-m", "pip", "--python", venv / "bin" / "python", "install", "--no-deps", "--no-index", "--no-compile", wheel)
    return venv / "bin" / "python", site, call


def test_the_distribution_has_the_same_text(installed):
    _, site, _ = installed
    made = sorted((site / "golfnb_muon").glob("*.py"))
    assert [(p.name, p.read_bytes()) for p in made] == [(p.name, p.read_bytes()) for p in FILES]
    assert (site / "golfnb_muon" / "py.typed").is_file() and not (site / "golfnb").exists()


def test_its_own_tests_pass_where_it_is_installed(installed, tmp_path):
    python, _, call = installed
    test = tmp_path / "test_golfnb_muon.py"
    test.write_text((ROOT / "muon" / "tests" / test.name).read_text())
    assert re.search(r"\b5 passed", call(python, "-P", "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", tmp_path, test))


def test_both_are_installed_side_by_side_and_the_page_runs(installed, tmp_path):
    "A state of one goes on in the other; the README's use runs as it stands."
    python, _, call = installed
    (block,) = re.findall(r"```python\n(.*?)```", (ROOT / "muon" / "README.md").read_text(), re.S)
    assert len(block.strip().splitlines()) <= 12
    (tmp_path / "use.py").write_text(block.replace('"state.pt"', repr(str(tmp_path / "state.pt"))))
    code = f"import sys; sys.path.insert(1, {str(ROOT)!r})\n{BESIDE}"
    assert call(python, "-P", "-c", code, tmp_path / "use.py").endswith("beside\n") and (tmp_path / "state.pt").is_file()

"""ruff and pyright find nothing in the core, in the recipes and in what a user of them writes."""
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
CONFIG = ROOT / "pyrightconfig.json"


def ruff(*words: str, text: str | None = None) -> subprocess.CompletedProcess:
    command = [BIN / "ruff", "check", "--no-cache", "--output-format", "concise", *words]
    return subprocess.run(command, cwd=ROOT, input=text, capture_output=True, text=True)


def pyright(config: Path) -> dict:
    command = [BIN / "basedpyright", "--pythonpath", sys.executable, "--outputjson", "-p", config]
    return json.loads(subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout)


@pytest.mark.parametrize("tool", ["ruff", "basedpyright"])
def test_the_tools_are_those_that_are_pinned(tool):
    wanted = re.search(rf"(?m)^{tool}==(\S+)$", (ROOT / "requirements-dev.txt").read_text())[1]
    said = subprocess.run([BIN / tool, "--version"], capture_output=True, text=True).stdout
    assert said.split("\n")[0].split() == [tool, wanted]


def test_ruff_finds_nothing():
    done = ruff()
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("code, rule", [
    ("import os\n", "F401"),
    ("import torch\nimport os\nprint(os, torch)\n", "I001"),
    ("def f(x=[]):\n    return x\n", "B006"),
    ("from typing import List\nx: List[int] = []\n", "UP"),
    ("def f(x):\n" + "".join(f"    if x == {i}:\n        x += 1\n" for i in range(8)), "C901"),
])
def test_ruff_finds_what_is_planted(code, rule):
    done = ruff("--stdin-filename", "golfnb/recipes/planted.py", "-", text=code)
    assert done.returncode == 1 and rule in done.stdout


def test_no_file_is_excused():
    assert "per-file-ignores" not in (ROOT / "ruff.toml").read_text()
    assert "ignore" not in json.loads(CONFIG.read_text())


PLANTED = """from golfnb.model.engine import Engine

def use(engine: Engine) -> str:
    engine.finish(1.0)
    engine.finnish()
    return engine.tensors()
"""


def test_pyright_finds_what_is_planted_and_nothing_else(tmp_path):
    (tmp_path / "planted.py").write_text(PLANTED)
    config = json.loads(CONFIG.read_text()) | {"extraPaths": [str(ROOT)]}
    for name in ("include", "exclude"):
        config[name] = [str(ROOT / path) for path in config[name]]
    config["include"].append(str(tmp_path / "planted.py"))
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(config))
    said = pyright(tmp_path / "pyrightconfig.json")
    found = {}
    for d in said["generalDiagnostics"]:
        found[Path(d["file"]).name, d["range"]["start"]["line"] + 1] = d["message"]
    assert set(found) == {("planted.py", 5), ("planted.py", 6)}, found
    assert "finnish" in found["planted.py", 5]
    ours = [path for path in (ROOT / "golfnb").rglob("*.py")
            if path.stem not in ("train_gpt", "_modidx")]
    assert said["summary"]["filesAnalyzed"] == len(ours) + 2  # planted.py and tests/consumer.py

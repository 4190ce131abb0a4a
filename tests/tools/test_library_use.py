"""The four uses of the README, as they stand there, from files outside the repository."""
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tiny import clean_env, torchrun

ROOT = Path(__file__).resolve().parents[2]
BLOCKS = dict(re.findall(r"```python\n# file: (\S+)\n(.*?)```", (ROOT / "README.md").read_text(), re.S))


def test_there_are_four_and_they_are_short():
    assert sorted(BLOCKS) == ["artifact.py", "orthogonal.py", "read_shard.py", "two_ranks.py"]
    for name, text in BLOCKS.items():
        code = [line for line in text.splitlines() if line.strip() and not line.startswith(("import", "from"))]
        assert len(code) <= 18, name


def test_uses_on_one_rank(tmp_path):
    "One after the other in one process, since importing torch takes longer than they do."
    words = {"orthogonal.py": "cosine", "read_shard.py": "bits per byte", "artifact.py": "bytes of text"}
    for name in words:
        (tmp_path / name).write_text(BLOCKS[name])
    code = "import runpy, sys\nfor name in sys.argv[1:]: runpy.run_path(name, run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", code, *words], cwd=tmp_path, env=clean_env(), capture_output=True, text=True)
    assert done.returncode == 0 and all(w in done.stdout for w in words.values()), done.stderr[-2000:]


def test_two_ranks_train_as_one(tmp_path):
    (tmp_path / "two_ranks.py").write_text(BLOCKS["two_ranks.py"])
    done = torchrun(tmp_path / "two_ranks.py", 2, {}, tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    first, last = map(float, re.search(r"loss (\S+) -> (\S+)", done.stdout).groups())
    assert last < 0.5 * first and done.stdout.count("loss") == 1


def files(folder: Path) -> set[str]:
    return {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file() and not {"__pycache__", ".ipynb_checkpoints"} & {*p.parts}}


@pytest.mark.slow
def test_the_installed_package_has_everything(tmp_path):
    "`pip install .` in a folder of its own: modules, script, command and notebooks; no notebook tool needed."
    source, site = tmp_path / "source", tmp_path / "site"  # a build leaves folders behind
    for name in ("golfnb", "nbs"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__", ".ipynb_checkpoints"))
    for name in ("setup.py", "settings.ini", "requirements-dev.txt", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    done = subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--use-pep517", "--target", str(site), str(source)],
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert files(site / "golfnb/nbs") == files(ROOT / "nbs"), "what is of another kind needs its line in setup.py"
    code = ("import sys; sys.path.insert(0, sys.argv[1])\nimport golfnb, golfnb.tools.launcher as l, golfnb.tools.programs as p\nassert golfnb.__file__.startswith(sys.argv[1]), golfnb.__file__\n"
            "assert (l.package_dir() / 'train_gpt.py').read_text() == p.script_text(p.find_program('pr549'))\nprint('joined')\n")
    env = {k: v for k, v in clean_env().items() if k != "PYTHONPATH"}
    done = subprocess.run([sys.executable, "-c", code, str(site)], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0 and "joined" in done.stdout, done.stderr[-2000:]

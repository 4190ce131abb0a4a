"""The four uses of the README, as they stand there, from files outside the repository."""
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tiny import clean_env, torchrun

ROOT = Path(__file__).resolve().parent.parent
BLOCKS = dict(re.findall(r"```python\n# file: (\S+)\n(.*?)```", (ROOT / "README.md").read_text(), re.S))


def test_there_are_four_and_they_are_short():
    assert sorted(BLOCKS) == ["artifact.py", "orthogonal.py", "read_shard.py", "two_ranks.py"]
    for name, text in BLOCKS.items():
        code = [line for line in text.splitlines() if line.strip() and not line.startswith(("import", "from"))]
        assert len(code) <= 18, name


@pytest.mark.parametrize("name, words", [("orthogonal.py", "cosine"), ("read_shard.py", "bits per byte"), ("artifact.py", "bytes of text")])
def test_use(name, words, tmp_path):
    (tmp_path / name).write_text(BLOCKS[name])
    done = subprocess.run([sys.executable, name], cwd=tmp_path, env=clean_env(), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and words in done.stdout, done.stderr[-2000:]


def test_two_ranks_train_as_one(tmp_path):
    (tmp_path / "two_ranks.py").write_text(BLOCKS["two_ranks.py"])
    done = torchrun(tmp_path / "two_ranks.py", 2, {}, tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    first, last = map(float, re.search(r"loss (\S+) -> (\S+)", done.stdout).groups())
    assert last < 0.5 * first and done.stdout.count("loss") == 1


@pytest.mark.slow
def test_the_installed_package_has_everything(tmp_path):
    "`pip install .` in a folder of its own: modules, script and command, no notebook tool needed."
    done = subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--use-pep517", "--target", str(tmp_path / "site"), str(copy_of_source(tmp_path))],
                          capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-2000:]
    code = ("import sys; sys.path.insert(0, sys.argv[1])\nimport golfnb, golfnb.launcher as l\nassert golfnb.__file__.startswith(sys.argv[1]), golfnb.__file__\n"
            "assert (l.package_dir() / 'train_gpt.py').read_text() == l.fold_script('pr549')\nprint('folded')\n")
    env = {k: v for k, v in clean_env().items() if k != "PYTHONPATH"}
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "site")], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "folded" in done.stdout, done.stderr[-2000:]


def copy_of_source(folder: Path) -> Path:
    "What an installation reads, copied so that it leaves no build folder in the tree."
    import shutil

    out = folder / "source"
    shutil.copytree(ROOT / "golfnb", out / "golfnb", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("setup.py", "settings.ini", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, out)
    return out

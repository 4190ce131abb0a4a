"""Build the distribution golfnb-muon: the folder golfnb/muon, word for word, under the name golfnb_muon.

    python muon/build.py [FOLDER]    wheel and sdist into FOLDER, by default dist; needs setuptools and no network
"""
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
BUILD = "import sys; out = sys.argv[1]; from setuptools import build_meta as b; b.build_sdist(out); b.build_wheel(out)"


def stage(folder: Path) -> None:
    "A project of its own, in an empty `folder`."
    unwanted = shutil.ignore_patterns("__pycache__", "build.py", ".*")
    shutil.copytree(HERE, folder, ignore=unwanted, dirs_exist_ok=True)
    shutil.copytree(ROOT / "golfnb" / "muon", folder / "golfnb_muon", ignore=unwanted)
    shutil.copy(ROOT / "LICENSE", folder)


def build(out: Path) -> list[Path]:
    "The files that it wrote into `out`."
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as tmp:
        stage(Path(tmp))
        done = subprocess.run([sys.executable, "-c", BUILD, str(out.resolve())], cwd=tmp, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"muon/build.py: setuptools failed\n{done.stderr[-2000:]}")
    return sorted(out.glob("golfnb_muon-*"))


if __name__ == "__main__":
    for path in build(Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "dist")):
        print(f"{path}: {path.stat().st_size:,} bytes")

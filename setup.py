"""Build golfnb from settings.ini: the library needs torch, numpy, sentencepiece and tqdm; all else is an extra."""
import re
from configparser import ConfigParser
from pathlib import Path

from setuptools import setup

HERE = Path(__file__).parent
FOLDERS = sorted(".".join(path.parent.relative_to(HERE / "golfnb").parts) for path in HERE.glob("golfnb/*/**/__init__.py"))
ini = ConfigParser(delimiters=["="])
ini.read(HERE / "settings.ini")
cfg = ini["DEFAULT"]


def long_description() -> str:
    "README.md, where a link into the repository is its text alone: there is no address it could be relative to."
    text = (HERE / "README.md").read_text(encoding="utf-8")
    return re.sub(r"\[([^]\n]+)\]\((?!https?://)[^)\s]+\)", r"\1", text)


def pins(name: str) -> list[str]:
    "The requirements that a file lists."
    lines = (HERE / name).read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line and not line.startswith("#")]


setup(
    name=cfg["lib_name"],
    version=cfg["version"],
    description=cfg["description"],
    author=cfg["author"],
    license="Apache-2.0",
    keywords=cfg["keywords"],
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Natural Language :: English",
        "Operating System :: MacOS",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
    long_description=long_description(),
    long_description_content_type="text/markdown",
    packages=["golfnb", *(f"golfnb.{name}" for name in FOLDERS), "golfnb.nbs"],
    package_dir={"golfnb.nbs": "nbs"},
    package_data={
        "golfnb": ["py.typed", "prose.json", "prose/*/*.txt"],
        "golfnb.muon": ["py.typed"],
        "golfnb.nbs": ["*.ipynb", "*.md", "*.mplstyle", "*/*.ipynb", "*/*.js", "*/*.json", "*/*.py", "*/*/*.py"],  # what `golfnb lab` copies
        "golfnb.tools": ["*.html", "helps/*.txt"],  # the page of `golfnb play`, lists of helps
    },
    python_requires=f">={cfg['min_python']}",
    install_requires=cfg["requirements"].split(),
    extras_require={
        "plots": ["matplotlib"],
        "data": ["huggingface_hub", "pyarrow"],
        "track": ["tensorboard", "wandb"],
        "weights": ["safetensors"],
        "notebooks": ["matplotlib", "jupyterlab"],
        "dev": ["golfnb[plots,data,weights,notebooks]", *pins("requirements-dev.txt")],
    },
    entry_points={"console_scripts": ["golfnb = golfnb.tools.cli:main_process"]},
)

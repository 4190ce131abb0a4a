"""Build golfnb from settings.ini: the library needs torch, numpy, sentencepiece and tqdm; notebooks and pictures are extras."""
from configparser import ConfigParser
from pathlib import Path

from setuptools import setup

ini = ConfigParser(delimiters=["="])
ini.read(Path(__file__).parent / "settings.ini")
cfg = ini["DEFAULT"]
notebook = ["matplotlib", "jupyterlab", "nbdev==2.4.14", "fastcore==1.14.5", "execnb==0.1.18", "ghapi==1.1.1", "fastgit==0.0.6", "jupytext"]
setup(
    name=cfg["lib_name"],
    version=cfg["version"],
    description=cfg["description"],
    author=cfg["author"],
    author_email=cfg["author_email"],
    license="Apache-2.0",
    long_description=(Path(__file__).parent / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    packages=["golfnb"],
    package_data={"golfnb": ["*.html"]},  # the page of `golfnb play`
    data_files=[  # what `golfnb lab` copies
        ("share/golfnb/nbs", sorted(str(p) for p in Path("nbs").iterdir() if p.suffix in (".ipynb", ".mplstyle"))),
        ("share/golfnb/nbs/results", sorted(map(str, Path("nbs/results").glob("*.json")))),
    ],
    python_requires=f">={cfg['min_python']}",
    install_requires=["torch>=2.9", "numpy", "sentencepiece", "tqdm", "triton; platform_system=='Linux'"],
    extras_require={
        "plots": ["matplotlib"],
        "data": ["huggingface_hub", "pyarrow"],
        "track": ["tensorboard", "wandb"],
        "pack": ["python-minifier"],
        "weights": ["safetensors"],
        "notebooks": notebook,
    },
    entry_points={"console_scripts": ["golfnb = golfnb.cli:main_cli"]},
)

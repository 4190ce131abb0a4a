"""Make the book: notebooks -> Sphinx sources -> _book/html, then check it. Nothing is executed and nothing is downloaded.

    python book/build.py [--out FOLDER]
"""
import argparse
import importlib.util
import os
import shutil
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import check
import sources
from names import ROOT

HERE = Path(__file__).parent


def static_files(folder: Path) -> None:
    "Our style, and MathJax with its fonts out of the package that carries it."
    shutil.copytree(HERE / "static", folder)
    package = Path(importlib.util.find_spec("sphinx-mathjax-offline").submodule_search_locations[0]) / "static" / "mathjax"
    shutil.copytree(package / "output" / "chtml" / "fonts" / "woff-v2", folder / "mathjax" / "output" / "chtml" / "fonts" / "woff-v2")
    shutil.copy(package / "tex-chtml.js", folder / "mathjax")


def build(out: Path) -> list[str]:
    "The site in `out`/html; what is wrong with it, one sentence each."
    from sphinx.cmd.build import build_main

    source, new = out / "source", out / "html.new"
    sources.write(source)
    static_files(source / "_static")
    shutil.rmtree(new, ignore_errors=True)
    status = build_main(["-q", "-E", "-W", "--keep-going", "-j", str(min(2, os.cpu_count() or 1)), "-b", "html", "-c", str(HERE), "-d", str(out / "doctrees"), "-D", f"html_static_path={source / '_static'}", str(source), str(new)])
    if status:
        return ["Sphinx warned, see above"]
    problems = check.problems(new)
    if not problems:  # a whole site or the old one, never half of one
        shutil.rmtree(out / "html", ignore_errors=True)
        new.rename(out / "html")
    return problems


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "_book", help="folder for the site (default: _book)")
    out, start = parser.parse_args(argv).out, time.time()
    problems = build(out)
    for p in problems:
        print(p, file=sys.stderr)
    if problems:
        print(f"book: {len(problems)} problems, {out / 'html'} was not replaced", file=sys.stderr)
        return 1
    print(f"{out / 'html' / 'index.html'}: {len(list((out / 'html').rglob('*.html')))} pages in {time.time() - start:.0f} s; links, anchors and alt texts are in order")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

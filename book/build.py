"""Make the book: notebooks -> Sphinx sources -> _book/html, then check it. Nothing is executed and nothing is downloaded.

    python book/build.py [--out FOLDER]
"""
import argparse
import importlib.util
import json
import re
import shutil
import sys
import time
from html.parser import HTMLParser
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


class Sections(HTMLParser):
    "The sections of one page, for the search: [anchor, title, text] of each."
    SILENT = {"script", "style", "nav"}

    def __init__(self, text: str):
        super().__init__(convert_charrefs=True)
        self.found, self.open, self.title, self.silent = [], [], False, 0
        self.feed(check.without_plain_tags(text[text.find("<article"):text.find("</article")]))

    def handle_starttag(self, tag, attrs):
        if tag == "section":
            self.found.append([dict(attrs).get("id", ""), "", ""])
            self.open.append(self.found[-1])
        self.title |= tag in ("h1", "h2", "h3", "h4")
        self.silent += tag in self.SILENT

    def handle_endtag(self, tag):
        if tag == "section":
            self.open.pop()
        self.title &= tag not in ("h1", "h2", "h3", "h4")
        self.silent -= tag in self.SILENT

    def handle_data(self, data):
        if self.open and not self.silent and data != "#":
            self.open[-1][1 if self.title else 2] += data


def search_texts(site: Path) -> None:
    "What a search shows of each page: a page opened from a file may not fetch others."
    pages = {p.relative_to(site).as_posix(): Sections(p.read_text(encoding="utf-8")).found for p in sorted(site.rglob("*.html")) if "_static" not in p.parts}
    texts = {name: [[part[0], *(" ".join(re.sub(r"\\[()\[\]]", "", words).split()) for words in part[1:])] for part in found] for name, found in pages.items() if found}
    (site / "_static" / "sections.js").write_text(f"const SECTIONS = {json.dumps(texts, ensure_ascii=False)};\n", encoding="utf-8")


def build(out: Path) -> list[str]:
    "The site in `out`/html; what is wrong with it, one sentence each."
    from sphinx.cmd.build import build_main

    source, new = out / "source", out / "html.new"
    sources.write(source)
    static_files(source / "_static")
    shutil.rmtree(new, ignore_errors=True)
    status = build_main(["-q", "-E", "-W", "--keep-going", "-b", "html", "-c", str(HERE), "-d", str(out / "doctrees"), "-D", f"html_static_path={source / '_static'}", str(source), str(new)])
    if status:
        return ["Sphinx warned, see above"]
    search_texts(new)
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

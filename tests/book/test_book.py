"""The site: built once, its links, anchors, captions and symbol links held; and the checkers find what is planted."""
import ast
import base64
import re
import shutil
import struct
import sys
from html.parser import HTMLParser
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "book"))
import browse
import build
import check
import links
import names
import sources

from golfnb.tools.lab import copy_notebooks

pytestmark = pytest.mark.filterwarnings("ignore:.*is deprecated. Check CHANGES for Sphinx")
PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    out = tmp_path_factory.mktemp("book")
    assert build.build(out) == []  # Sphinx warns of nothing; links, anchors, loads, alt texts and the place of every name are in order
    return out / "html"


def text(site: Path, page: str) -> str:
    return (site / f"{page}.html").read_text(encoding="utf-8")


def test_every_notebook_and_every_module_has_a_page(site):
    pages = {p.relative_to(site).with_suffix("").as_posix() for p in site.rglob("*.html")}
    assert {sources.page_of(s) for s in sources.stems()} | {f"api/{m}" for m in names.modules()} | {p.stem for p in sources.PAGES.glob("*.md")} | {"search", "genindex"} <= pages
    assert 'class="math' in text(site, "04_newton_schulz") and "_static/mathjax/tex-chtml.js" in text(site, "04_newton_schulz")


def test_the_sidebar_names_every_chapter_and_marks_the_page(site):
    def marked(page: str) -> list[str]:
        sidebar = re.search(r'<nav class="bd-links.*?</nav>', text(site, page), re.S)[0]
        assert len(re.findall("<li ", sidebar)) == len({"map", *(s for s in sources.stems() if not sources.is_aside(s)), *sources.LOOK_UP}) + len(names.modules())
        return re.findall(r'<li class="[^"]*current active[^"]*">\s*<a class="[^"]*" href="([^"]*)', sidebar)

    assert marked("index") == marked("03_layers") == marked("map") == ["#"] and marked("search") == []
    assert marked("api/index") == ["#"] and marked("api/model.layers") == ["index.html", "#"]


class Shown(HTMLParser):
    "Entries of the sidebar that are in sight: those in no part that is folded, and the names of parts."

    def __init__(self, page: str):
        super().__init__()
        self.open, self.entries, self.parts = [], 0, []
        self.feed(re.search(r'<nav class="bd-links.*?</nav>', page, re.S)[0])

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        if tag == "summary":
            self.parts.append(given.get("class") == "caption" and all(self.open[:-1]))
        elif tag == "details":
            self.open.append("open" in given)
        elif tag == "li" and "toctree" in given.get("class", ""):
            self.entries += all(self.open)

    def handle_endtag(self, tag):
        if tag == "details":
            self.open.pop()


def test_the_sidebar_shows_at_most_sixty_entries_when_one_arrives(site):
    arrived, story, api = (Shown(text(site, page)) for page in ("index", "03_layers", "api/index"))
    assert 10 < arrived.entries + sum(arrived.parts) <= 60 and sum(arrived.parts) == 8
    assert arrived.entries < story.entries < arrived.entries + 40 and api.entries > len(names.modules()), "the part of the page is open"


def test_the_sections_of_a_page_stand_under_its_name_in_the_sidebar(site):
    for page, section in (("lesson01_score", "#why-per-byte"), ("index", "#the-game"), ("api/model.layers", "#functions")):
        (contents,) = re.findall(r'<div class="golf-contents">(.*?)</div>', text(site, page), re.S)
        assert f'href="{section}"' in contents, page


def test_page_one_shows_what_one_gets_and_leads_to_the_first_lesson(site):
    page = text(site, "index")
    article = page[page.index("<article"):]
    places = [article.index(words) for words in ("make demo", 'class="golf-read"', "<figcaption", "lesson01_score.html", 'id="the-game"', "<footer")]
    assert places == sorted(places), "the command, a text with its costs, the ladder and the first lesson come before prose"
    assert 'href="lesson01_score.html"' in re.search(r'<a class="right-next".*?>', page, re.S)[0]


def test_no_name_of_ours_stands_in_code_type_without_a_link(site):
    for stem in sources.stems():
        page = text(site, sources.page_of(stem))
        body = re.sub(r"<h\d.*?</h\d>", "", re.sub(r"<a [^>]*>.*?</a>", "", page[page.index("<article"):page.index("</article")], flags=re.S), flags=re.S)
        bare = [c for c in re.findall(r'<code class="docutils literal notranslate"><span class="pre">([^<]+)</span></code>', body) if names.place_of(c)]
        assert not bare, f"{stem}: {bare}"


def test_a_definition_is_an_anchor_and_leads_to_the_api(site):
    page = text(site, "03_layers")
    assert re.search(r'<a class="golf-def" id="rms_norm" href="api/model.layers.html#golfnb.model.layers.rms_norm">rms_norm</a>', page)
    assert 'class="golf-use" href="#rms_norm"' in page and 'href="03_layers.html#' in text(site, "05c_golf")


def used(source: str, exported: bool = False) -> set[str]:
    "name@line of the links in a cell, a definition with a bang; `exported` puts the cell into the chapter of `layers`."
    layers = names.modules()["model.layers"]
    uses = links.Uses({n: names.chapter_page(n, layers) for n in layers.names}, layers, exported).visit(ast.parse(source))
    return {f"{name}@{line}" + "!" * bool(anchor) for (line, _), (name, _, anchor) in uses.found.items()}


def test_a_link_needs_the_name_to_be_ours_at_that_place():
    assert used("from golfnb.model.golf import Golf\nGolf(x)\nGolf = Golf(3)\nGolf") == {"golfnb.model.golf@1", "Golf@1", "Golf@2", "Golf@3"}
    assert used("def f(softcap):\n    return softcap") == set()
    assert used("[softcap for softcap in z]; softcap") == {"softcap@1"}
    assert used("y.softcap\nf(softcap=1)\nfrom elsewhere import softcap\nsoftcap") == set()
    assert used("def softcap(x): pass\nsoftcap(1)") == set(), "a naive version hides the real one"
    assert used("def softcap(x):\n    return softcap(x)", exported=True) == {"softcap@1!", "softcap@2"}
    assert used("def f():\n    global softcap\n    softcap = 2\n    return softcap") == {"softcap@4"}
    assert used("for i in softcap(x):\n    softcap = i\nsoftcap") == {"softcap@1"} and used("with softcap(x) as softcap:\n    softcap") == {"softcap@1"}
    assert used("@patch\ndef go(self: Golf): return softcap", exported=True) == {"go@2!", "softcap@2"}
    assert used("NORM_EPS = 1e-7", exported=True) == {"NORM_EPS@1!"} and used("NORM_EPS = 1e-7") == set()


def test_links_fall_on_their_names_and_long_lines_under_their_own_beginning():
    source = "naïve = 'é'; softcap(1 < 2)\n    z = [softcap]"
    uses = links.Uses({"softcap": names.place_of("softcap")}, None, False).visit(ast.parse(source.replace("\n    ", "\n")))
    uses.found = {(line, column + 4 * (line == 2)): value for (line, column), value in uses.found.items()}
    markup = "<span class=\"n\">naïve</span> <span>=</span> <span>'é'</span>; <span class=\"n\">softcap</span>(1 &lt; 2)\n    z = [<span>softcap</span>]\n"
    made = links.linked_code(markup, source, "05c_golf", uses, set())
    assert made.count('<a class="golf-use" href="03_layers.html#softcap">softcap</a>') == 2 and re.findall(r"--in:(\d+)ch", made) == ["0", "4"]


def test_prose_names_resolve():
    assert names.place_of("rms_norm") == names.place_of("rms_norm(x, y)") == names.place_of("golfnb.model.layers.rms_norm") == "03_layers.html#rms_norm"
    assert names.place_of("MATRIX_LR=0.1") == names.place_of("cfg.matrix_lr") == "settings.html#envvar-MATRIX_LR"
    assert names.place_of("Loader.rewind") == names.place_of("rewind()", "02b_loader") == "api/text.loader.html#golfnb.text.loader.Loader.rewind"
    assert names.place_of("golfnb.model.layers") == "api/model.layers.html"
    assert names.place_of("print") is names.place_of("rms_norm = 3") is names.place_of("x.rms_norm") is names.place_of("rewind()", "05c_golf") is None


MODULE = '''"""What it is."""
# AUTOGENERATED! DO NOT EDIT! File to edit: ../nbs/98_small.ipynb.
__all__ = ["Small", "SmallSettings", "go"]

class Small:
    "Something small."
    n: int = 3  # rows

    def grow(self, by: int = 1) -> int:
        """Make it larger by `by`.

        x [B, T]: what it eats.
        Raises GolfError below 0."""

class SmallSettings(BaseSettings):
    "Of small things."
    small_lr: float = setting(0.1, "learning rate: per step", bounds=">= 0", fixed="yes")

def go(x: int, *, y=2): "Go."

def helper(): pass
'''


def test_the_api_shows_signature_and_docstring_and_patched_methods(tmp_path, monkeypatch):
    (tmp_path / "small.py").write_text(MODULE)
    (tmp_path / "nbs").mkdir()
    cell = nbformat.v4.new_code_cell("#| export\n@patch\ndef grow(self: Small, by: int = 1) -> int: pass")
    nbformat.write(nbformat.v4.new_notebook(cells=[cell]), tmp_path / "nbs" / "98_small.ipynb")
    monkeypatch.setattr(names, "ROOT", tmp_path)
    module = names.read_module(tmp_path / "small.py")
    assert [n.name for n in module.public] == ["Small", "SmallSettings", "go"] and not module.names["helper"].public
    monkeypatch.setattr(sources, "numbered_title", lambda stem: "98 Small")
    page = sources.api_module(module)
    for words in ("{py:class} Small\n", "{py:attribute} Small.n\n:module: golfnb.small\n:type: int\n:value: 3\n\nrows", "{py:method} Small.grow(by: int=1) -> int", "{py:function} go(x: int, *, y=2)",
                  "Make it larger by `by`.\n\nx \\[B, T\\]: what it eats.\\\nRaises GolfError below 0.", 'href="../98_small.html#Small.grow">Defined in chapter 98</a>', "[SmallSettings](../settings.md#smallsettings)"):
        assert words in page, words
    monkeypatch.setattr(sources, "modules", lambda: {"small": module})
    assert "{envvar} SMALL_LR\n\nlearning rate: per step (\\>= 0); fixed in a script. Default: `0.1`." in sources.all_settings()


def test_each_term_is_defined_once_and_linked_once_a_chapter(site):
    terms = re.findall(r'id="term-([^"]+)"', text(site, "glossary"))
    assert len(terms) == len(set(terms)) > 40
    used = {s: re.findall(r'class="golf-term[^"]*" href="glossary.html#term-([^"]+)"', text(site, sources.page_of(s))) for s in sources.stems()}
    assert all(len(found) == len(set(found)) for found in used.values())
    assert len({t for found in used.values() for t in found}) > 0.9 * len(terms), "terms nobody uses"


def test_what_did_not_work_is_one_page_with_day_cost_and_verdict(tmp_path):
    sources.write(tmp_path / "source")
    titles = {path.stem: path.read_text(encoding="utf-8") for path in (tmp_path / "source").glob("*.*")}
    assert [stem for stem, text in titles.items() if re.search(r"(?<!#)# [^\n\\]*did not work", text)] == ["tried"]
    assert sources.tables_of_contents().split().count("tried") == 1
    cells = nbformat.read(tmp_path / "source" / "tried.ipynb", as_version=4).cells
    page = "\n".join(c.source for c in cells)
    assert "(07b_engine.ipynb)" in page and "GolfError" not in page and sources.GATHERED not in page
    lines, known = [line for _, group in sources.parts() for stem in group for line in sources.failures(stem)], sources.verdicts()
    new = [sources.beginning(line) for line in lines if sources.beginning(line) not in known]
    assert not new, f"book/pages/tried.json needs day, cost and verdict of {new}"
    assert not known.keys() - {*map(sources.beginning, lines)}, "book/pages/tried.json has lines that no chapter has"
    assert len(lines) > 100 and all(f"{known[sources.beginning(line)][2]}*. {line}" in page for line in lines)
    assert all(re.fullmatch(r"20\d\d-\d\d-\d\d", day) and cost and verdict for day, cost, verdict in known.values())
    measured = [row.split(" | ") for c in cells for out in c.get("outputs", ()) for row in out.get("data", {}).get("text/markdown", "").splitlines()[2:]]
    assert len(measured) > 20 and all(len(row) == 5 and re.match(r"\| 20\d\d-\d\d-\d\d$", row[0]) and all(row) for row in measured)


def test_a_picture_has_its_caption_under_it_and_its_code_folded(tmp_path, monkeypatch):
    cell = nbformat.v4.new_code_cell("#| code-fold: true\n#| fig-cap: Loss in `nats` over steps.\nplot()", outputs=[nbformat.v4.new_output("display_data", {"image/png": PIXEL})])
    nbs = tmp_path / "nbs"
    nbs.mkdir()
    nbformat.write(nbformat.v4.new_notebook(cells=[nbformat.v4.new_markdown_cell("# Small"), cell]), nbs / "small.ipynb")
    monkeypatch.setattr(sources, "NBS", nbs)
    monkeypatch.setattr(sources, "write", lambda folder: (folder.mkdir(parents=True), nbformat.write(sources.as_page("small"), folder / "index.ipynb")))
    build.build(tmp_path)
    page = (tmp_path / "html.new" / "index.html").read_text()
    assert re.search(r'<figure.*?<img alt="Loss in `nats` over steps."[^>]*/>.*?<figcaption>.*Loss in <code.*nats.*</figcaption>', page, re.S) and "Show the code" in page


def test_what_was_to_be_guessed_is_folded(site):
    page = (site / "lesson01_score.html").read_text()
    assert re.search(r"<details[^>]*>\s*<summary[^>]*>(?:(?!</details>).)*Show what came(?:(?!</details>).)*you wrote no guess", page, re.S)


def test_the_picture_style_can_be_seen_on_light_and_dark_and_goes_along_to_the_lab(tmp_path):
    def light(colour: str) -> float:
        parts = [int(colour[i:i + 2], 16) / 255 for i in (0, 2, 4)]
        return sum(w * (x / 12.92 if x <= 0.03928 else ((x + 0.055) / 1.055) ** 2.4) for w, x in zip((0.2126, 0.7152, 0.0722), parts))

    style = (sources.NBS / "golfnb.mplstyle").read_text()
    for colour in set(re.findall(r"\b[0-9a-f]{6}\b", style)):
        assert 1.05 / (light(colour) + 0.05) > 3 and (light(colour) + 0.05) / (light("121212") + 0.05) > 3, colour
    copy_notebooks(tmp_path / "lab")
    assert (tmp_path / "lab" / "golfnb.mplstyle").read_text() == style


def test_letters_in_a_picture_have_eleven_pixels_on_a_phone():
    style = dict(line.split(": ", 1) for line in (sources.NBS / "golfnb.mplstyle").read_text().splitlines() if not line.startswith("#"))
    usual = min(float(style[key]) for key in ("font.size", "xtick.labelsize", "ytick.labelsize", "axes.titlesize", "legend.fontsize"))
    found = 0
    for stem in sources.stems():
        for cell in sources.notebook(stem).cells:
            smallest = min([usual, *map(float, re.findall(r"\b(?:font|label)size=([\d.]+)", cell.source))])
            for picture in (out.data["image/png"] for out in cell.get("outputs", ()) if "image/png" in out.get("data", {})):
                width, = struct.unpack(">I", base64.b64decode(picture)[16:20])
                on_phone = smallest * 100 / 72 * min(1, 390 / width)  # 100 dots an inch; a phone of 390 pixels shows all of it
                assert on_phone >= 11, f"{stem}: letters of {on_phone:.1f} pixels; does the picture use nbs/golfnb.mplstyle?"
                found += 1
    assert found > 100


def test_what_chapter_15_quotes_stands_in_the_first_program():
    def cells(stem):
        return [c.source for c in sources.notebook(stem).cells]

    quoted = next(source for source in cells("08b_train") if "This is the loop of the first program" in source)
    lines = re.search(r"```python\n(.*?)```", quoted, re.S)[1].splitlines()
    program = "\n".join(cells("start")).splitlines()
    assert [line for line in lines if line.strip() != "..." and line not in program] == []


PLANTED = {
    '<a href="nowhere.html">x</a>': "links to nowhere.html, which is not there",
    '<a href="glossary.html#term-none">x</a>': "no such anchor",
    '<script src="https://cdn.example.org/x.js"></script>': "from another host",
    '<link rel="stylesheet" href="//fonts.example.org/x.css">': "from another host",
    '<img src="_images/none.png" alt="a picture of something that is not there">': "which is not there",
    '<img src="_static/favicon.svg">': "instead of what it shows",
}


def test_the_checker_finds_what_is_planted(site, tmp_path):
    copy = shutil.copytree(site, tmp_path / "html", ignore=shutil.ignore_patterns("mathjax", "*.png", "searchindex.js"))
    page = copy / "map.html"
    page.write_text(page.read_text().replace("</article>", "".join(PLANTED) + "</article>"))
    (copy / "_static" / "planted.css").write_text("@font-face { src: url('https://fonts.example.org/x.woff2') }")
    layers = copy / "03_layers.html"
    layers.write_text(layers.read_text().replace('id="rms_norm"', ""))
    found = check.problems(copy)
    for sentence in (*PLANTED.values(), "planted.css loads https://fonts.example.org", "golfnb.model.layers.rms_norm has no place"):
        assert any(sentence in f for f in found), sentence


def test_a_site_with_problems_does_not_replace_the_old_one(tmp_path, monkeypatch):
    (tmp_path / "html").mkdir()
    (tmp_path / "html" / "index.html").write_text("old")
    monkeypatch.setattr(build.sources, "write", lambda folder: (folder.mkdir(parents=True), (folder / "index.md").write_text("# x\n\n[broken](none.md)\n")))
    assert build.build(tmp_path) == ["Sphinx warned, see above"] and (tmp_path / "html" / "index.html").read_text() == "old"


def test_a_request_cut_off_counts_unless_its_file_is_there(tmp_path):
    there, gone = tmp_path / "an icon.svg", tmp_path / "gone.svg"
    there.touch()
    assert not browse.lost(there.as_uri() + "?v=1", "net::ERR_ABORTED") and browse.lost(there.as_uri(), "net::ERR_FAILED")
    assert browse.lost(gone.as_uri(), "net::ERR_ABORTED") and browse.lost("http://127.0.0.2:9/x.js", "net::ERR_ABORTED")


WRONG = f"""<!doctype html><link rel="icon" href="data:,"><body style="background:#fff"><main><article><span class="math">x^2</span>
<img src="gone.png"><div style="width:900px">wide</div><script src="http://127.0.0.2:9/x.js"></script><script>console.error("planted"); none()</script>
<div class="highlight" style="font-size:11px"><pre style="overflow:auto; font-size:11px">{"x" * 300}</pre></div><div class="cell_input"><span class="golf-line" style="display:block; line-height:10px; width:9ch">{"long " * 9}</span></div><div style="overflow:auto; width:200px"><table><tr><td style="min-width:600px">far</td></tr></table></div>
<div style="overflow:auto; width:100px"><img src="data:image/png;base64,{PIXEL}" style="width:300px"></div>
<div class="bd-sidebar-primary"><li class="current active" style="position:fixed; top:-90px"><a>far up</a></li></div>
<div class="cell_output"><img src="data:image/svg+xml,<svg xmlns='http://www.w3.org/2000/svg' width='640' height='99'/>" width="300"></div>
<div class="cell_output"><div class="text_html" style="background:#ddd">pale</div></div><section id="second-part"><h2>Second part</h2></section><table style="width:30px; table-layout:fixed; font-size:9px"><tr><th style="overflow-wrap:anywhere">milliseconds</th><td style="overflow-wrap:anywhere">16,000,000</td></tr></table></article></main>"""
NOTICED = ("console: planted", "none is not defined", "asks another host for http://127.0.0.2:9/x.js", "gone.png failed", "1 of 1 formulas", "was not drawn", "phone index.html: the page is", "asked for dark",
           "the search finds nothing", "desktop index.html: pre is cut off", "a line of 44 characters folds", "px: far", "img is cut off by 200 px", "a table breaks inside 16,000,000", "a table breaks inside milliseconds",
           "has no caption", "a picture is 300 px wide on a screen of 390", "the sidebar does not show far up", "desktop index.html: code has letters of 11 px", "phone index.html: code has letters of 11 px", "code has no button that copies it",
           "desktop index.html: the contents of the page do not show second-part", "phone index.html: what is printed has letters of 9 px", "phone index.html: an output is pale where the reader asked for dark",
           "desktop lesson99_long.html: a lesson is 101", " are code, at most half are wanted")


@pytest.mark.skipif(not browse.find_chromium(), reason="no Chromium on this machine; `make book-check` needs one")
def test_the_browser_finds_what_is_planted_and_nothing_on_our_pages(site, tmp_path):
    (tmp_path / "index.html").write_text(WRONG)
    (tmp_path / "lesson99_long.html").write_text('<article><div class="cell_input" style="height:6000px"></div><div style="height:4100px"></div></article>')
    found = "\n".join(browse.look(tmp_path, ["index.html", "lesson99_long.html"], None, browse.find_chromium()))
    for sentence in NOTICED:
        assert sentence in found, sentence
    pages = ["index.html", "05c_golf.html", "04_newton_schulz.html", "34_baselines.html", "published.html", "settings.html", "api/studies.bench.html", "ladder.html", *(f"{path.stem}.html" for path in (sources.NBS / "lessons").glob("lesson*.ipynb"))]
    assert browse.look(site, pages, None, browse.find_chromium()) == []

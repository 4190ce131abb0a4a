"""The site: built once, its links, anchors, alt texts and symbol links held; and the checkers find what is planted."""
import ast
import re
import shutil
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "book"))
import browse
import build
import check
import links
import names
import sources

pytestmark = pytest.mark.filterwarnings("ignore:.*is deprecated. Check CHANGES for Sphinx")


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    out = tmp_path_factory.mktemp("book")
    assert build.build(out) == []  # Sphinx warns of nothing; links, anchors, loads, alt texts and public names are in order
    return out / "html"


def text(site: Path, page: str) -> str:
    return (site / f"{page}.html").read_text(encoding="utf-8")


def test_every_notebook_and_every_module_has_a_page(site):
    pages = {p.relative_to(site).with_suffix("").as_posix() for p in site.rglob("*.html")}
    assert {sources.page_of(s) for s in sources.stems()} | {f"api/{m}" for m in names.modules()} | {"map", "glossary", "negative", "search", "genindex"} <= pages
    assert (site / "_static/mathjax/tex-chtml.js").stat().st_size > 10**6 and list((site / "_static/mathjax").rglob("*.woff"))
    assert 'class="math' in text(site, "09_newton_schulz") and "_static/mathjax/tex-chtml.js" in text(site, "09_newton_schulz")


def test_no_name_of_ours_stands_in_code_type_without_a_link(site):
    for stem in sources.stems():
        page = text(site, sources.page_of(stem))
        body = re.sub(r"<h\d.*?</h\d>", "", re.sub(r"<a [^>]*>.*?</a>", "", page[page.index("<article"):page.index("</article")], flags=re.S), flags=re.S)
        bare = [c for c in re.findall(r'<code class="docutils literal notranslate"><span class="pre">([^<]+)</span></code>', body) if names.place_of(c)]
        assert not bare, f"{stem}: {bare}"


def test_a_definition_is_an_anchor_and_leads_to_the_api(site):
    page = text(site, "06_layers")
    assert re.search(r'<a class="golf-def" id="rms_norm" href="api/layers.html#golfnb.layers.rms_norm">rms_norm</a>', page)
    assert page.count('class="golf-use" href="#rms_norm"') >= 4
    assert 'href="06_layers.html#smear"' in text(site, "08_model")


def used(source: str, exported: bool = False) -> set[str]:
    "name@line of the links in a cell, a definition with a bang; `exported` puts the cell into the chapter of `layers`."
    layers = names.modules()["layers"]
    known = {n: names.chapter_page(n, layers) for n in layers.names}
    uses = links.Uses(known, layers, exported)
    uses.visit(ast.parse(source))
    return {f"{name}@{line}" + "!" * defines for (line, _), (name, _, defines) in uses.found.items()}


def test_a_link_needs_the_name_to_be_ours_at_that_place():
    assert used("from golfnb.model import Golf\nGolf(x)\nGolf = Golf(3)\nGolf") == {"golfnb.model@1", "Golf@1", "Golf@2", "Golf@3"}
    assert used("def f(softcap):\n    return softcap") == set()
    assert used("[softcap for softcap in z]; softcap") == {"softcap@1"}
    assert used("y.softcap\nf(softcap=1)\nfrom elsewhere import softcap\nsoftcap") == set()
    assert used("def softcap(x): pass\nsoftcap(1)") == set(), "a naive version hides the real one"
    assert used("def softcap(x):\n    return softcap(x)", exported=True) == {"softcap@1!", "softcap@2"}
    assert used("def f():\n    global softcap\n    softcap = 2\n    return softcap") == {"softcap@4"}
    assert used("NORM_EPS = 1e-7", exported=True) == {"NORM_EPS@1!"} and used("NORM_EPS = 1e-7") == set()


def test_links_fall_on_their_names_whatever_stands_before_them():
    source = "naïve = 'é'; softcap(1 < 2)\nz = [softcap]"
    uses = links.Uses({"softcap": names.place_of("softcap")}, None, False)
    uses.visit(ast.parse(source))
    markup = "<span class=\"n\">naïve</span> <span>=</span> <span>'é'</span>; <span class=\"n\">softcap</span>(1 &lt; 2)\nz = [<span>softcap</span>]"
    assert links.linked_code(markup, source, "08_model", uses, set()).count('<a class="golf-use" href="06_layers.html#softcap">softcap</a>') == 2


def test_prose_names_resolve():
    assert names.place_of("rms_norm") == names.place_of("rms_norm(x, y)") == names.place_of("golfnb.layers.rms_norm") == "06_layers.html#rms_norm"
    assert names.place_of("MATRIX_LR=0.1") == names.place_of("cfg.matrix_lr") == "api/config.html#golfnb.config.OptimizerSettings.matrix_lr"
    assert names.place_of("Loader.rewind") == names.place_of("rewind()", "03_loader") == "api/loader.html#golfnb.loader.Loader.rewind"
    assert names.place_of("golfnb.layers") == "api/layers.html"
    assert names.place_of("print") is names.place_of("rms_norm = 3") is names.place_of("x.rms_norm") is names.place_of("rewind()", "08_model") is None


def test_parameters_come_with_their_comments():
    module = names.modules()["shards"]
    rows = {r.name: r for r in module.names["read_span"].rows}
    assert rows["begin"].meaning == "first token" and rows["path"].type == "str | Path" and module.names["read_span"].returns.meaning.startswith("uint16")
    assert names.modules()["config"].names["RunSettings"].rows[5].meaning.startswith("seed of the initial weights")
    settings = sources.api_module(names.modules()["config"])
    assert "{golf-field}`golfnb.config.RunSettings.seed`" in settings and "untimed steps before the run" in settings
    assert r"\[B, T, D\]" in sources.api_module(names.modules()["layers"])


def test_each_term_is_defined_once_and_linked_once_a_chapter(site):
    terms = re.findall(r'id="term-([^"]+)"', text(site, "glossary"))
    assert len(terms) == len(set(terms)) > 40
    for stem in sources.stems():
        if sources.number(stem) is not None:
            found = re.findall(r'class="golf-term[^"]*" href="glossary.html#term-([^"]+)"', text(site, stem))
            assert len(found) == len(set(found)) and (found or sources.number(stem) > 19), stem
    assert len({t for s in sources.stems() for t in re.findall(r"glossary.html#term-([^\"]+)", text(site, sources.page_of(s)))}) > 0.9 * len(terms), "terms nobody uses"


def test_negative_results_are_gathered_and_bad_input_stays_in_the_chapters():
    page = sources.negative_results()
    assert "**A stream per bank, alone**" in page and "[From chapter 13](13_parallel_muon.ipynb)" in page
    assert page.count("\n## ") + 1 >= 15 and "GolfError" not in page and not re.search(r"^\* (?!\S)", page, re.M)


def test_alt_text_comes_from_the_directive_or_from_the_code():
    assert sources.alt_text("#| fig-alt: Two lines that cross.\nplt.plot(x)", {}) == "Two lines that cross."
    drawn = 'draw(ax)\nax.set(title=f"rank {r}", xlabel="step"); ax.set_ylabel("nats"); ax.plot(y, label="EMA")'
    said = sources.alt_text(drawn, {"draw": ast.parse("def draw(ax):\n    ax.bar(x, y)").body[0]})
    assert said == "Line plot and bar chart. titles: rank …. horizontal axis: step. vertical axis: nats. series: EMA."


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
    layers = copy / "06_layers.html"
    layers.write_text(layers.read_text().replace('id="rms_norm"', ""))
    found = check.problems(copy)
    for sentence in (*PLANTED.values(), "planted.css loads https://fonts.example.org", "golfnb.layers.rms_norm has no place"):
        assert any(sentence in f for f in found), sentence


def test_a_site_with_problems_does_not_replace_the_old_one(site, tmp_path, monkeypatch):
    (tmp_path / "html").mkdir()
    (tmp_path / "html" / "index.html").write_text("old")
    monkeypatch.setattr(build.sources, "write", lambda folder: (folder.mkdir(parents=True), (folder / "index.md").write_text("# x\n\n[broken](none.md)\n")))
    assert build.build(tmp_path) == ["Sphinx warned, see above"] and (tmp_path / "html" / "index.html").read_text() == "old"


def test_a_request_cut_off_counts_unless_its_file_is_there(tmp_path):
    there, gone = tmp_path / "an icon.svg", tmp_path / "gone.svg"
    there.touch()
    assert not browse.lost(there.as_uri() + "?v=1", "net::ERR_ABORTED") and browse.lost(there.as_uri(), "net::ERR_FAILED")
    assert browse.lost(gone.as_uri(), "net::ERR_ABORTED") and browse.lost("http://127.0.0.2:9/x.js", "net::ERR_ABORTED")


@pytest.mark.skipif(not browse.find_chromium(), reason="no Chromium on this machine; `make book-check` needs one")
def test_the_browser_finds_what_is_planted(site, tmp_path):
    (tmp_path / "_static").mkdir()
    (tmp_path / "index.html").write_text("""<!doctype html><link rel="icon" href="data:,"><body style="background:#fff"><main><article><span class="math">x^2</span>
        <img src="gone.png"><div style="width:900px">wide</div><script src="http://127.0.0.2:9/x.js"></script><script>console.error("planted"); none()</script></article></main>""")
    found = "\n".join(browse.look(tmp_path, ["index.html"], None, browse.find_chromium()))
    for sentence in ("console: planted", "none is not defined", "asks another host for http://127.0.0.2:9/x.js", "gone.png failed", "1 of 1 formulas", "was not drawn", "phone index.html: the page is", "asked for dark", "the search finds nothing"):
        assert sentence in found, sentence
    assert browse.look(site, ["09_newton_schulz.html"], None, browse.find_chromium()) == []

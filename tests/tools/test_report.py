"""The report page: the number leads; every picture has a title, units, a legend and a description, in both themes; nothing is fetched; runs stand beside each other; a run that died has one too."""
import hashlib
import html
import json
import re
import shlex
import sys
from pathlib import Path

import numpy as np
import pytest
from tiny import golfnb

from golfnb.settings import GolfError
from golfnb.tools.results import settings_diff
from golfnb.tools.report import PAGE_STYLE, loss_chart, paired, weight_chart, write_report

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "book"))
import browse


def charts(page: str) -> dict:
    "The charts of a page, as it hands them to its script."
    return json.loads(re.search(r'<script type="application/json" id="charts">(.*?)</script>', page, re.S)[1])


def invented(folder, seed: int, steps: int = 60):
    "A run directory without weights."
    g = np.random.default_rng(seed)
    folder.mkdir()
    events = [{"event": "step", "step": i + 1, "loss": 3 + float(g.random()), "ms": 20 + float(g.random()), "multiplier": 1 - i / steps, "momentum": 0.9, "grad_norm": float("nan") if i == 7 else 1.0 + float(g.random())} for i in range(steps)]
    events += [{"event": "val", "step": steps, "loss": 3.1, "bpb": 1.8}, {"event": "score", "label": "legal_ttt", "loss": 3, "bpb": 1.7, "ms": 12.0}, *({"event": "ttt", "chunk": c, "chunks": 5, "loss": 3, "bpb": 1.7} for c in range(5))]
    (folder / "metrics.jsonl").write_text("\n".join(json.dumps(e) for e in events) + "\n")
    summary = {"ttt_bpb": 1.7 + seed / 100, "unigram_bpb": 3.4, "artifact_bytes": 1000, "code_bytes": 500, "ledger": [["code", 500], ["int6", 1000], ["int8", 0]], "seconds": {"training": 2.0, "<odd>": 1.0, "building": 0.01}, "seed": seed, "world": 2, "config": {"recipe": "demo", "seed": seed, "checkpoint_every_s": 60.0, "matrix_lr": 0.025 + seed / 1000, "train_batch_tokens": 8192}}
    (folder / "summary.json").write_text(json.dumps(summary))
    return folder


def test_every_chart_says_what_it_shows(tmp_path):
    page = write_report(invented(tmp_path / "a", 1)).read_text()
    assert [*charts(page)] == ["scores-chart", "loss-chart"] and 'name="viewport"' in page and "prefers-color-scheme: dark" in page
    for name, chart in charts(page).items():
        assert f'<figure id="{name}">' in page and len(chart["what"]) > 20 and chart["xlabel"] and chart["ylabel"]
        assert all(c["label"] and f'{c["colour"]}: #' in PAGE_STYLE for c in chart["curves"]), "a colour that follows the reader's screen"
    assert not re.search(r'(src|href)="(?!#|data:,)', page) and "<odd>" not in page and "&lt;odd&gt;" in page
    assert "MATRIX_LR" in page and "not audited" in page and "Training is measured on each batch" in page


def test_a_chart_has_few_points_and_its_last():
    events = [{"event": "step", "step": i + 1, "loss": 3.0 + (i == 19_999), "ms": 20.0} for i in range(20_000)] + [{"event": "step", "step": 20_001, "loss": float("inf")}]
    each, mean = loss_chart([{"name": "a", "events": events}]).curves
    assert max(map(len, (each["points"], mean["points"]))) <= 601 and each["points"][-1] == [20_000, 4] and 3 < mean["points"][-1][1] < 3.01
    assert len(json.dumps(weight_chart({"int6": np.arange(63), "int8": np.arange(255)}).curves)) < 20_000


def words(page: str) -> str:
    "What a reader sees, without pictures."
    return re.sub(r"<[^>]*>", "|", re.sub(r"<(script|style)[^>]*>.*?</\1>", "", page, flags=re.S))


def test_the_number_leads_then_what_it_means_then_a_text_and_the_contents(tmp_path):
    page = write_report(invented(tmp_path / "a", 1)).read_text()
    parts = [page.index(x) for x in ('<p class="score">1.7100<', "bits per byte, score-first TTT: 50% of the unigram&#x27;s 3.4000", "no sampled text: ", "<nav>", "<h2")]
    assert parts == sorted(parts)
    links, marks = re.findall(r'<a href="#([a-z-]+)">', page), re.findall(r'<h2 id="([a-z-]+)">', page)
    assert links == marks and len(marks) > 4


def test_fields_are_named_in_words_and_zeros_have_no_row(tmp_path):
    page = words(write_report(invented(tmp_path / "a", 1)).read_text())
    assert "ranks 2" in page and "world" not in page and "bpb" not in page and "|milliseconds|" in page
    assert "MATRIX_LR||Muon learning rate of the banks: per step|" in page and "CHECKPOINT_EVERY_S" not in page
    assert "|int6|" in page and "|int8|" not in page and "|training|" in page and "building" not in page


@pytest.mark.parametrize("count", (1, 5, 2000))
def test_time_training_is_a_curve_of_all_chunks(tmp_path, count):
    run = invented(tmp_path / "a", 1)
    text, g = (run / "metrics.jsonl").read_text(), np.random.default_rng(0)
    bpb = np.cumsum(g.normal(1.2, 0.3, count)) / np.arange(1, count + 1)
    chunks = [json.dumps({"event": "ttt", "chunk": c, "chunks": count, "bpb": b}) for c, b in enumerate(bpb)]
    (run / "metrics.jsonl").write_text("\n".join([*(line for line in text.splitlines() if '"ttt"' not in line), *chunks]))
    page = write_report(run).read_text()
    assert len(charts(page)) == 1 + (count > 1) and ("only one chunk is on record" in page) == (count == 1)
    if count > 1:
        (line,) = charts(page)["scores-chart"]["curves"]
        assert [point[0] for point in line["points"]][::len(line["points"]) - 1] == [1, count] and line["points"][-1][1] == pytest.approx(bpb[-1], rel=1e-5)


def test_every_colour_can_be_seen_in_both_themes():
    def light(colour):
        parts = [int(2 * c if len(colour) == 3 else colour[2 * i:2 * i + 2], 16) / 255 for i, c in enumerate(colour[:3])]
        return sum(w * (c / 12.92 if c <= 0.04 else ((c + 0.055) / 1.055) ** 2.4) for w, c in zip((0.2126, 0.7152, 0.0722), parts))

    def contrast(a, b):
        return (max(light(a), light(b)) + 0.05) / (min(light(a), light(b)) + 0.05)

    for theme in re.findall(r":root \{(.*?)\}", PAGE_STYLE, re.S):
        colours = dict(re.findall(r"--(\w+): #(\w+)", theme))
        for name, least in dict(ink=7, note=4.5, blue=3.5, orange=3.5, violet=3.5, green=4.5, bad=4.5, pale=2.2, line=1.3).items():
            assert contrast(colours[name], colours["paper"]) >= least, (name, colours[name])


@pytest.mark.skipif(not browse.find_chromium(), reason="no Chromium on this machine")
def test_pages_fit_a_desktop_and_a_phone(tmp_path):
    "Book's own browser check: no table or picture is cut off, the page is no wider than the screen, and follows its theme."
    name = "golf-1337-20261123-111500"
    a, b = invented(tmp_path / name, 1), invented(tmp_path / f"{name}-again", 2)
    write_report(a), write_report(a, b, words="one long line that compare has found of the runs, " * 5)
    found = browse.look(tmp_path, [f"{name}/report.html", "compare.html"], None, browse.find_chromium())
    assert [s for s in found if "search" not in s] == []


def test_a_text_never_costs_the_page(tmp_path, monkeypatch):
    from golfnb.tools import report
    from golfnb.file.artifact import Lzma, save_artifact

    run = invented(tmp_path / "a", 1)
    save_artifact(run / "artifact.golf", {}, {}, Lzma())
    assert "no sampled text: " in write_report(run).read_text()
    monkeypatch.setattr(report, "sampled_text", lambda *a: 1 / 0)
    assert "no sampled text: division by zero" in write_report(run).read_text()
    monkeypatch.setattr(report, "sampled_text", lambda *a: ("<b>", "a\x1b\nb"))
    assert '<span class="note">&lt;b&gt;</span>a\\x1b\nb…</blockquote>' in write_report(run).read_text()


def test_a_page_says_that_its_artifact_is_not_what_was_scored(tmp_path):
    from golfnb.file.artifact import Lzma, save_artifact

    run = invented(tmp_path / "a", 1)
    save_artifact(run / "artifact.golf", {}, {}, Lzma())
    for name, sha, wrong in (("summary.json", hashlib.sha256((run / "artifact.golf").read_bytes()).hexdigest(), False), ("summary.json", "0" * 64, True), ("artifact.audit.json", "0" * 64, True)):
        (run / name).write_text(json.dumps({"findings": [], "artifact_sha256": sha}))
        assert (f"{name} tells of another file" in write_report(run).read_text()) == wrong
    assert f"{name} tells" in write_report(invented(tmp_path / "b", 2), run).read_text()


def test_two_runs_beside_each_other(tmp_path):
    a, b = invented(tmp_path / "a", 1), invented(tmp_path / "b", 2, steps=40)
    path = write_report(a, b, words="what was <found>")
    page = path.read_text()
    assert path == tmp_path / "compare.html" and "what was &lt;found&gt;" in page and "1.7100 · 1.7200" in page
    assert "setting that differs" in page and ">+0.0100<" in page and "b, running mean" in page and "SEED" in page
    assert paired([[("x", 3)], [("x", 5), ("y", 1)]], ",d") == [("x", "3", "5", "+2"), ("y", "", "1", "")]
    three = write_report(a, b, invented(tmp_path / "c", 3)).read_text()
    assert "c, running mean" in three and "difference" not in three and "<th class=n>c</th>" in three
    assert settings_diff({"recipe": "demo", "seed": 1, "run_id": "p"}, {"recipe": "demo", "seed": 2, "run_id": "q"}) == {"seed": (1, 2)}


def test_a_run_that_died_and_files_that_are_damaged(tmp_path):
    run = invented(tmp_path / "a", 1)
    (run / "summary.json").unlink()
    (run / "metrics.jsonl").write_text('{"event": "phase", "name": "building", "seconds": 1}\n{"event": "st')
    page = write_report(run).read_text()
    assert "has not ended" in page and "nothing yet" in page and charts(page) == {}
    (run / "summary.json").write_text('{"ttt_bpb": 1.')
    with pytest.raises(GolfError, match="damaged"):
        write_report(run)
    (run / "summary.json").unlink()
    with pytest.raises(GolfError, match="metrics.jsonl|events"):
        write_report(run, tmp_path / "nothing")


def test_lines_that_are_no_events_cost_nothing(tmp_path):
    run = invented(tmp_path / "a", 1)
    with open(run / "metrics.jsonl", "ab") as file:
        file.write(b"[" * 200_000 + b"}\n\xff}\n{1}\n[1]\n")
    done = golfnb("report", run, cwd=tmp_path)
    assert done.returncode == 0 and not done.stderr and "1.7100" in (run / "report.html").read_text()


@pytest.mark.parametrize("name", ("cost$_{$", "a$^b", "</script><b>&", "\\frac"))
def test_a_run_may_have_any_name(tmp_path, name):
    name = name.replace("/", "")
    first, second = invented(tmp_path / name, 1), invented(tmp_path / "b", 2)
    for words in (["report", first], ["compare", first, second]):
        done = golfnb(*words, cwd=tmp_path)
        assert done.returncode == 0 and not done.stderr and "damaged" not in done.stdout, done.stderr + done.stdout
    page = (tmp_path / "compare.html").read_text()
    assert charts(page)["loss-chart"]["curves"][0]["label"] == f"{name}, running mean" and page.count("<script") == page.count("</script>") == 2


def test_a_fault_of_the_drawing_is_no_damaged_file(tmp_path, monkeypatch):
    from golfnb.tools import report

    def broken(*table):
        raise ValueError("a fault of ours")
    monkeypatch.setattr(report, "html_table", broken)
    with pytest.raises(ValueError, match="a fault of ours") as found:
        write_report(invented(tmp_path / "a", 1))
    assert not isinstance(found.value, GolfError) and not (tmp_path / "a" / "report.html").exists()


@pytest.mark.parametrize("installed", [True, False])
def test_the_audit_can_be_typed_as_it_stands(tmp_path, monkeypatch, installed):
    "Also where the shell does not find golfnb: then by the path of the command beside this Python."
    from golfnb.file.artifact import Lzma, save_artifact

    command = tmp_path / "bin" / "golfnb"
    command.parent.mkdir()
    command.touch(mode=0o755)
    monkeypatch.setattr(sys, "executable", str(command.with_name("python")))
    monkeypatch.setenv("PATH", str(command.parent) if installed else "/nowhere")
    typed = "golfnb" if installed else str(command)

    run, data = invented(tmp_path / "it's a run", 1), tmp_path / "my data"
    data.mkdir()
    for split in ("val", "train"):
        (data / f"x_{split}_0.bin").write_bytes(b"")
    (data / "tokenizer.model").write_bytes(b"")
    save_artifact(run / "artifact.golf", {}, {}, Lzma())
    summary = json.loads((run / "summary.json").read_text())
    summary["config"] |= {"data_path": str(data), "tokenizer_path": str(data / "tokenizer.model")}
    (run / "summary.json").write_text(json.dumps(summary))
    words = html.unescape(re.search(r"<pre><code>(\S*golfnb score .*)</code></pre>", write_report(run).read_text())[1])
    assert shlex.split(words) == [typed, "score", str(run / "artifact.golf"), "--audit", "--ttt", "--val", f"{data}/*_val_*.bin", "--train", f"{data}/*_train_*.bin", "--tokenizer", str(data / "tokenizer.model")]
    assert "not at hand" in write_report(invented(tmp_path / "b", 2)).read_text()


def test_a_text_begins_with_a_line(tmp_path):
    from golfnb.tools.data import stdlib_documents, train_tokenizer
    from golfnb.tools.report import prompt_of

    sp = train_tokenizer(stdlib_documents(["json", "csv"]), tmp_path / "t.model", 400)
    text = "def f(x):\n    return  x\n\nclass A:\n    pass\n" * 9
    end = [1, *sp.encode("another document")]
    for tokens in ([1, *sp.encode(text), *end], [*sp.encode("nd of one"), 1, *sp.encode(text), *end]):
        prompt = sp.decode(prompt_of(sp, tokens)[1:])
        assert prompt.endswith("\n") and text.startswith(prompt) and len(prompt) > 20, "its spaces are kept"
    words = sp.decode(prompt_of(sp, [1, *sp.encode("one long line of many words " * 40)])[1:])
    assert words and words.split()[-1] in "one long line of many words".split(), "a whole word where no line ends"


@pytest.mark.skipif(not browse.find_chromium(), reason="no Chromium on this machine")
@pytest.mark.parametrize("width", (1280, 390))
def test_the_charts_in_a_browser(tmp_path, width):
    "Each takes the width of the column, is read with the pointer, and shows foreign names as they are."
    from playwright.sync_api import sync_playwright

    name, wrong = "a$_{$ <i>b", []
    run = invented(tmp_path / name, 1)
    bpb = np.cumsum(np.random.default_rng(0).normal(1.2, 0.3, 2000)) / np.arange(1, 2001)
    with open(run / "metrics.jsonl", "a") as file:
        file.writelines(json.dumps({"event": "ttt", "chunk": c, "chunks": 2000, "bpb": b}) + "\n" for c, b in enumerate(bpb))
    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=browse.find_chromium(), args=browse.FLAGS)
        tab = browser.new_page(viewport={"width": width, "height": 900})
        tab.on("console", lambda m: wrong.append(m.text))
        tab.on("pageerror", lambda e: wrong.append(str(e)))
        tab.goto(write_report(run).as_uri())
        column = tab.evaluate("document.querySelector('article').clientWidth")
        assert tab.evaluate("[...document.querySelectorAll('figure > svg')].map(s => s.clientWidth)") == [column, column]
        assert name in tab.inner_text("#scores-chart figcaption") and not tab.query_selector("figcaption i")
        tab.locator("#loss-chart").scroll_into_view_if_needed()
        box = tab.locator("#loss-chart").bounding_box()
        tab.mouse.move(box["x"] + column / 2, box["y"] + 100)
        assert re.search(r"step \d+ .*training, each step 3\.\d+ .*running mean 3\.\d", tab.inner_text("#loss-chart figcaption").replace("\n", " "))
        found = tab.evaluate("frame(charts['scores-chart'])")
        assert found["y0"] < bpb[-1] < found["y1"] and found["y1"] - found["y0"] < 4 * np.ptp(bpb[100:]), "the first chunks do not flatten the rest"
        browser.close()
    assert not wrong

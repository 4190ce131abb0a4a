"""The report page: the number leads; every picture has a title, units, a legend and a description, in both themes; nothing is fetched; runs stand beside each other; a run that died has one too."""
import hashlib
import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest
from matplotlib import style

from golfnb.settings import GolfError
from golfnb.bench import settings_diff
from golfnb.report import PAGE_STYLE, embed, loss_chart, paired, run_rows, ttt_chart, weight_chart, write_report

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "book"))
import browse

SVG = re.compile(r"<svg.*?</svg>", re.S)


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


def test_every_picture_says_what_it_shows(tmp_path):
    with style.context("dark_background"):  # a session's own style does not reach the page
        page = write_report(invented(tmp_path / "a", 1)).read_text()
    pictures = SVG.findall(page)
    assert len(pictures) == 2 and 'name="viewport"' in page and "prefers-color-scheme: dark" in page
    for svg in pictures:
        assert re.search(r'aria-label="[^"]{20,}"', svg) and len(re.findall(r"<text", svg)) > 5
        assert not re.search(r"#[0-9a-f]{6}", svg), "a colour that does not follow the reader's screen"
    assert not re.search(r'(src|href)="(?!#)', page) and "<odd>" not in page and "&lt;odd&gt;" in page
    assert "MATRIX_LR" in page and "not audited" in page


def test_figures_have_title_axes_and_legend():
    events = [{"event": "step", "step": i + 1, "loss": 3.0, "ms": 20.0 + i, "multiplier": 1.0, "momentum": 0.9, "grad_norm": 1.0} for i in range(9)] + [{"event": "ttt", "chunk": 0, "bpb": 1.5}]
    counts = {"int6": np.arange(1, 64), "int8": np.arange(1, 256)}
    events += [{"event": "ttt", "chunk": 1, "bpb": 1.4}]
    run = {"name": "a", "events": events}
    drawn = [loss_chart([run]), loss_chart([run, run]), ttt_chart([run]), weight_chart(counts)]
    for fig in drawn:
        ax = fig.axes[0]
        assert ax.get_title(loc="left") and ax.get_xlabel() and ax.get_ylabel() and len(fig.legends) == 1 and fig.legends[0].get_texts()
    assert embed(loss_chart([run]), "a") == embed(loss_chart([run]), "a"), "the same picture has the same bytes"


def words(page: str) -> str:
    "What a reader sees, without pictures."
    return re.sub(r"<[^>]*>", "|", re.sub(r"<(svg|style)[^>]*>.*?</\1>", "", page, flags=re.S))


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
    assert len(SVG.findall(page)) == 1 + (count > 1) and ("only one chunk is on record" in page) == (count == 1)
    if count > 1:
        axes = ttt_chart([{"name": "a", "events": [json.loads(line) for line in chunks]}]).axes[0]
        (line,), (low, high) = axes.lines, axes.get_ylim()
        assert [*line.get_xdata()][::count - 1] == [1, count] and (line.get_marker() == "o") == (count == 5)
        assert low < bpb[-1] < high and high - low < 4 * np.ptp(bpb[count // 20:]), "the first chunks do not flatten the rest"


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
    from golfnb import report
    from golfnb.artifact import save_artifact

    run = invented(tmp_path / "a", 1)
    save_artifact(run / "artifact.golf", {}, {})
    assert "no sampled text: " in write_report(run).read_text()
    monkeypatch.setattr(report, "sampled_text", lambda *a: 1 / 0)
    assert "no sampled text: division by zero" in write_report(run).read_text()
    monkeypatch.setattr(report, "sampled_text", lambda *a: ("<b>", "a\x1b\nb"))
    assert '<span class="note">&lt;b&gt;</span>a\\x1b\nb</blockquote>' in write_report(run).read_text()


def test_a_page_says_that_its_artifact_is_not_what_was_scored(tmp_path):
    from golfnb.artifact import save_artifact

    run = invented(tmp_path / "a", 1)
    save_artifact(run / "artifact.golf", {}, {})
    for name, sha, wrong in (("summary.json", hashlib.sha256((run / "artifact.golf").read_bytes()).hexdigest(), False), ("summary.json", "0" * 64, True), ("artifact.audit.json", "0" * 64, True)):
        (run / name).write_text(json.dumps({"findings": [], "artifact_sha256": sha}))
        assert (f"{name} tells of another file than" in write_report(run).read_text()) == wrong
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
    assert "has not ended" in page and "nothing yet" in page and "<svg" not in page
    (run / "summary.json").write_text('{"ttt_bpb": 1.')
    with pytest.raises(GolfError, match="damaged"):
        write_report(run)
    (run / "summary.json").unlink()
    with pytest.raises(GolfError, match="found none"):
        write_report(run, tmp_path / "nothing")

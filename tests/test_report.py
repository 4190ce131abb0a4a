"""The report page: every picture has a title, units, a legend and a description; nothing is fetched; two runs stand beside each other; a run that died has one too."""
import hashlib
import json
import re

import numpy as np
import pytest

from golfnb.settings import GolfError
from golfnb.bench import settings_diff
from golfnb.report import embed, loss_chart, paired, ttt_chart, weight_chart, write_report

SVG = re.compile(r"<svg.*?</svg>", re.S)


def invented(folder, seed: int, steps: int = 60):
    "A run directory without weights."
    g = np.random.default_rng(seed)
    folder.mkdir()
    events = [{"event": "step", "step": i + 1, "loss": 3 + float(g.random()), "ms": 20 + float(g.random()), "multiplier": 1 - i / steps, "momentum": 0.9, "grad_norm": float("nan") if i == 7 else 1.0 + float(g.random())} for i in range(steps)]
    events += [{"event": "val", "step": steps, "loss": 3.1, "bpb": 1.8}, {"event": "score", "label": "legal_ttt", "loss": 3, "bpb": 1.7, "ms": 12.0}, {"event": "ttt", "chunk": 0, "chunks": 1, "loss": 3, "bpb": 1.7}]
    (folder / "metrics.jsonl").write_text("\n".join(json.dumps(e) for e in events) + "\n")
    summary = {"ttt_bpb": 1.7 + seed / 100, "unigram_bpb": 3.4, "artifact_bytes": 1000, "code_bytes": 500, "ledger": [["code", 500], ["int6", 1000]], "seconds": {"training": 2.0, "<odd>": 1.0}, "seed": seed, "config": {"recipe": "demo", "seed": seed, "matrix_lr": 0.025 + seed / 1000, "train_batch_tokens": 8192}}
    (folder / "summary.json").write_text(json.dumps(summary))
    return folder


def test_every_picture_says_what_it_shows(tmp_path):
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
    drawn = [loss_chart(events), loss_chart(events, events, "b"), ttt_chart(events), weight_chart(counts)]
    for fig in drawn:
        ax = fig.axes[0]
        assert ax.get_title(loc="left") and ax.get_xlabel() and ax.get_ylabel() and len(fig.legends) == 1 and fig.legends[0].get_texts()
    assert embed(loss_chart(events), "a") == embed(loss_chart(events), "a"), "the same picture has the same bytes"


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
    page = write_report(a, b).read_text()
    assert "against b" in page and "setting that differs" in page and ">-0.0100<" in page and "b, running mean" in page
    assert paired([("x", 3)], [("x", 5), ("y", 1)], ",d") == [("x", "3", "5", "-2"), ("y", "", "1", "")]
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

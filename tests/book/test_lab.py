"""`golfnb lab` serves a scratch copy of the notebooks, leaves the book alone, and stops with everything it started."""
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from importlib import import_module
from pathlib import Path

import matplotlib.pyplot as plt
import pytest
import torch
from tiny import clean_env

from golfnb.studies import bench
from golfnb.tools import figures
from golfnb.tools.lab import copy_notebooks, start_lab

ROOT = Path(__file__).resolve().parents[2]


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def family(root: int) -> list[int]:
    "A process and all that came from it, as far as they live; kernels have sessions of their own, so parents are followed."
    parents = {}
    for p in Path("/proc").glob("[0-9]*/stat"):
        try:
            words = p.read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue
        if words[0] != "Z":
            parents[int(p.parent.name)] = int(words[1])
    found = [root] if root in parents else []
    for pid in found:
        found += [child for child, parent in parents.items() if parent == pid]
    return found


def alive(pids: list[int]) -> list[int]:
    "Those that still run."
    return [p for p in pids if p in family(p)]


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="looks for processes in /proc")
def test_lab_serves_the_copy_and_stops_with_its_kernels(tmp_path):
    port, before = free_port(), {p.name: p.stat().st_mtime_ns for p in (ROOT / "nbs").rglob("*.ipynb")}
    env = clean_env(JUPYTER_TOKEN="secret", JUPYTER_CONFIG_DIR=str(tmp_path / "config"), JUPYTER_DATA_DIR=str(tmp_path / "data"), JUPYTER_RUNTIME_DIR=str(tmp_path / "run"))
    command = [sys.executable, "-c", "from golfnb.tools.cli import main_cli; raise SystemExit(main_cli())", "lab", "--no-browser", "--port", str(port), "--dir", str(tmp_path / "lab")]
    with open(tmp_path / "log", "w") as log:
        job = subprocess.Popen(command, cwd=tmp_path, env=env, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))  # a shell may start us with it ignored

    def fetch(path: str, data: bytes | None = None) -> bytes:
        request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data, {"Authorization": "token secret", "Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=600) as answer:
            return answer.read()

    try:
        while True:
            try:
                page = fetch("/lab/tree/reference/00_settings.ipynb")
                break
            except OSError:
                assert job.poll() is None, (tmp_path / "log").read_text()[-2000:]
                time.sleep(0.2)
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/?token=secret", timeout=600) as answer:
            assert "/lab/tree/start.ipynb" in answer.url, "the lab opens at the start page"
        assert re.search(rb'"disabledExtensions": ?\[[^]]*apputils-extension:announcements', page), "JupyterLab's news are switched off"
        assert b"JupyterLab" in page and b'"00_settings.ipynb"' in fetch("/api/contents/reference")
        fetch("/api/kernels", b"{}")
        members = family(job.pid)
        assert len(members) >= 2, "the server and a kernel"
        job.send_signal(signal.SIGINT)
        assert job.wait(timeout=600) == 0, (tmp_path / "log").read_text()[-2000:]
        end = time.time() + 300
        while alive(members) and time.time() < end:
            time.sleep(0.1)
        assert not alive(members), "a process was left behind"
    finally:
        for pid in alive(family(job.pid)):
            os.kill(pid, signal.SIGKILL)
        job.wait()
    assert before == {p.name: p.stat().st_mtime_ns for p in (ROOT / "nbs").rglob("*.ipynb")}, "the book was touched"
    assert "notebooks copied" in (tmp_path / "log").read_text() and (tmp_path / "lab" / "results").is_dir()


def test_what_the_site_folds_opens_folded_in_the_lab(tmp_path):
    copy_notebooks(tmp_path)
    for path in tmp_path.rglob("*.ipynb"):
        for cell in json.loads(path.read_text())["cells"]:
            text = "".join(cell["source"])
            assert ("#| code-fold" in text or "#| hide" in text) == cell["metadata"].get("jupyter", {}).get("source_hidden", False)


def test_no_link_leads_out_of_the_lab(tmp_path):
    copy_notebooks(tmp_path)
    for path in tmp_path.rglob("*.ipynb"):
        words = ["".join(cell["source"]) for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "markdown"]
        for link in re.findall(r"\]\((?!https?://|#)([^)#\s]+)", "\n".join(words)):
            target = (path.parent / link).resolve()
            assert target.exists() and target.is_relative_to(tmp_path), f"{path.name} leads to {link}"


def test_a_lesson_of_the_lab_shows_no_answer_before_it_is_run(tmp_path):
    copy_notebooks(tmp_path)
    for path in (tmp_path / "lessons").glob("*.ipynb"):
        for cell in json.loads(path.read_text())["cells"]:
            assert all("text/html" in out.get("data", {}) for out in cell.get("outputs", ())), path.name


def test_a_terminal_of_the_lab_finds_the_command(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(os, "execv", lambda *words: None)
    start_lab(tmp_path / "lab", browser=False)
    assert os.environ["PATH"].split(os.pathsep) == [str(Path(sys.executable).parent), "/nowhere"]


def test_a_lab_whose_notebooks_import_what_is_gone_says_so_and_leaves_them(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(os, "execv", lambda *words: None)
    start_lab(tmp_path, browser=False)
    assert len(capsys.readouterr().out.splitlines()) == 1, "a lab of today has nothing to say"
    old = {f"lessons/lesson0{i}_old.ipynb": json.dumps({"cells": [{"cell_type": "code", "source": ["import math\n", f"from golfnb.bpb{i} import ByteTable"]}]}, indent=i % 2) for i in range(1, 7)}
    old |= {"ladder/10_mine.py": "import torch\nimport golfnb.rans as rans\n", "mine.ipynb": '{"cells": [{"cell_type": "markdown", "source": ["from golfnb.text import bpb"]}]}'}
    for name, text in old.items():
        (tmp_path / name).write_text(text)
    start_lab(tmp_path, browser=False)
    first, said = capsys.readouterr().out.splitlines()
    assert "0 notebooks copied" in first
    assert said.startswith("lab: ladder/10_mine.py, lessons/lesson01_old.ipynb, ") and "lesson04_old.ipynb and 2 more import modules that this golfnb has not, such as golfnb.rans, " in said
    assert "move them out of the lab and start it again" in said and "mine.ipynb" not in said
    assert {name: (tmp_path / name).read_text() for name in old} == old


def test_a_picture_of_the_lab_has_its_caption_below_it(tmp_path):
    copy_notebooks(tmp_path)
    cells = json.loads((tmp_path / "lessons" / "lesson01_score.ipynb").read_text())["cells"]
    pairs = [(a, b) for a, b in zip(cells, cells[1:]) if "#| fig-cap: " in "".join(a["source"])]
    assert pairs and all(b["cell_type"] == "markdown" and "".join(b["source"]).removeprefix("*Figure.* ") in "".join(a["source"]) for a, b in pairs)


@pytest.fixture
def lab(tmp_path, monkeypatch):
    copy_notebooks(tmp_path)
    monkeypatch.chdir(tmp_path / "studies")


MODULES = {"story/03_layers": "model.layers", "story/09_kernels": "model.kernels", "studies/30_bench": "studies.bench", "studies/32_timing": "studies.timing", "studies/34_baselines": "studies.baselines"}
DRAWN = {"story/03_layers": ["attention"], "story/09_kernels": ["kernels"], "studies/30_bench": ["step", "phases"], "studies/32_timing": ["kernels", "attention", "scaling"], "studies/34_baselines": ["optimizer"], "studies/39_study_plans": ["optimizer"]}


@pytest.mark.parametrize("stem", DRAWN)
def test_a_chapter_shows_this_machine_beside_the_kept_one(stem, lab, capsys, monkeypatch):
    for what in DRAWN[stem]:
        kept = json.loads(next(p for p in Path("../results").glob(f"{what}_h200_*[12].json")).read_text())
        if what == "optimizer":
            plans = json.loads(Path("../results/plans_h200_2.json").read_text())
            kept["samples"] |= plans["samples"]
            kept["facts"]["plans"] = plans["facts"]["plans"]
        kept["machine"]["gpus"], kept["facts"]["device"] = ["Abacus"], "Abacus"
        Path(f"../results/here/{what}_abacus_1.json").write_text(json.dumps(kept))
    monkeypatch.setattr("IPython.display.display", lambda table: None)
    monkeypatch.setenv("TRITON_INTERPRET", "0")  # a chapter sets it: not for the tests that come after
    names = {**vars(import_module(f"golfnb.{MODULES[stem]}") if "study" not in stem else bench), "LADDER": ["per matrix", "banked"]}
    for cell in json.loads(Path(f"../{stem}.ipynb").read_text())["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "code" and "#| export" not in source and re.search(r"#\| hide\n(?:import|from)|\bHERE\b|\bhere\(|results/here|def shown", source):
            exec(source, names)
    plt.close("all")
    assert re.search("Abacus|here, optimizer_abacus", capsys.readouterr().out)


def test_a_moving_figure_needs_no_file_of_the_lab(lab):
    assert not Path("../figures").exists()
    for stem, name in (("lesson07_schedule", "schedule"), ("lesson10_bits", "bits")):
        cells = json.loads(Path(f"../lessons/{stem}.ipynb").read_text())["cells"]
        shown = [out["data"]["text/html"] for cell in cells for out in cell.get("outputs", ()) if "text/html" in out.get("data", {})]
        assert any(figures.module_text(name) in "".join(html) for html in shown), f"{stem} opens without its figure"
    assert figures.module_text("bits") in figures.bits_figure([0.1, -0.2, 0.3]).html, "a cell that is run again shows it, too"


def test_only_a_gpu_machine_in_the_lab_measures_and_only_once(lab, monkeypatch, capfd):
    asked, result = [], bench.result_path("links", "NVIDIA H100 80GB", 2)
    assert result == Path("../results/here/links_h100_80gb_2.json")
    monkeypatch.setattr(bench.subprocess, "run", lambda command, env: asked.append(command[-2:]))
    bench.measure_here("links")
    assert asked == [] and capfd.readouterr() == ("", ""), "a CPU says nothing"
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    bench.measure_here("optimizer", gpus=2)
    bench.measure_here("links", "step")
    result.write_text("{}")
    bench.measure_here("links")
    assert asked == [["bench", "links"], ["bench", "step"]]
    result.unlink()
    bench.HERE.rmdir()
    bench.measure_here("links")
    assert len(asked) == 2 and bench.result_path("links", "cpu", 1) == Path("nbs/results/links_cpu_1.json"), "outside the lab all is as it was"

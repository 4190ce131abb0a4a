"""`golfnb demo`: what it says on the way, and the bar that a terminal shows."""
import json
import os
import pty
import subprocess
import sys
import termios
from types import SimpleNamespace

from golfnb.tools import launcher, report, starting
from golfnb.tools.commands import demo

FOLLOWED = """import sys, threading, time
from golfnb.tools.watch import above_bar, follow_bar
ended = threading.Event()
bar = threading.Thread(target=follow_bar, args=(sys.argv[1], ended, 0.05))
bar.start()
for done in range(100, 121):
    with open(sys.argv[1] + "/metrics.jsonl", "a") as file:
        file.write(sys.argv[2].replace("120", str(done)) + chr(10))
    time.sleep(0.1)
above_bar("step:120/240 train_loss:3.1")
above_bar("progress: training 50%")
ended.set()
bar.join()
"""
PROGRESS = json.dumps({"event": "progress", "what": "training", "done": 120.0, "total": 240.0})


def test_a_terminal_gets_a_bar_and_a_pipe_gets_lines(tmp_path):
    (tmp_path / "metrics.jsonl").write_text(PROGRESS.replace("training", "packing") + "\n")
    command = [sys.executable, "-c", FOLLOWED, str(tmp_path), PROGRESS]
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 80))
    subprocess.run(command, stdout=theirs, stderr=theirs, check=True, timeout=120)
    shown = os.read(ours, 1 << 16).decode()
    assert "training: " in shown and "/240" in shown and "step:120/240" in shown and "packing" not in shown and "progress:" not in shown
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout == "step:120/240 train_loss:3.1\n" and done.stderr == ""


def test_the_log_of_a_run_can_be_shown_line_by_line(monkeypatch):
    monkeypatch.setattr(launcher, "TORCHRUN", "print('one'); print('two')")
    shown = []
    assert launcher.run_script("none", 1, {}, shown.append, shown.append) == 0 and shown == ["one\n", "two\n"]


def test_the_demo_says_how_long_and_what_the_model_wrote_and_nothing_to_type_between(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(starting, "train_run", lambda program, settings, ranks: 0)
    monkeypatch.setattr(report, "sampled_text", lambda folder: ("Return the", " path.\n"))
    assert demo.demo_command(SimpleNamespace(settings=[], nproc=1)) == 0
    said = capsys.readouterr().out
    assert said.startswith("demo: some minutes") and said.endswith("Return the\n\nand wrote:\npath.\n") and "train on it with" not in said
    assert (tmp_path / "runs" / "demo" / "data" / "manifest.json").is_file()

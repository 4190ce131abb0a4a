"""A run is never silent, says before it hurts what will, and can be watched: progress by time, notes, the live page, writers, bars."""
import json
import re
import socket
import struct
import sys
import threading
import time
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path
from types import SimpleNamespace

import pytest
from score_workers import DOCS, golf_on, random_state, random_table, texts
from tiny import TINY, golfnb, one_sentence, settings_for, tiny_data
from workers import Batches, Clock, machine, settings, trained

from golfnb.score import evaluate
from golfnb.file import quantize
from golfnb.run import train
from golfnb.score import ttt
from golfnb.tools import watch
from golfnb.tools.checkpoint import open_kept
from golfnb.tools.guard import EmaAdvice
from golfnb.score.adapters import score_documents
from golfnb.model.engine import Ranks
from golfnb.recipes import demo
from golfnb.settings import GolfError

class LogClock:
    "The seconds of a run's log pass as its thread sleeps them, 33 ms each, or more on a busy machine."

    def __init__(self):
        self.t = 0.0
        self.others = {*threading.enumerate()}  # logs of earlier tests may be among them

    def perf_counter(self) -> float:
        return self.t

    def sleep(self, seconds: float):
        time.sleep(seconds / 30)
        if threading.current_thread() not in self.others:
            self.t += seconds

    def slowly(self, function, seconds: float):
        "The function, which takes so long by this clock."
        def slow(*args, **more):
            end = self.t + seconds
            while self.t < end:
                time.sleep(0.001)
            return function(*args, **more)
        return slow


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return tiny_data(tmp_path_factory.mktemp("data"))


def guarded_run(env: dict[str, str]):
    "A whole run of demo, as `golfnb train` runs it, but without checkpoints."
    demo.main(open_kept(demo, {**env, "CHECKPOINT_EVERY_S": "0"}, Ranks(), quiet=True))


@pytest.fixture(scope="module")
def slow_run(data, tmp_path_factory):
    "A run whose every part takes long by its log's clock: when it wrote its lines, and its folder."
    patch, folder, spoken, clock = pytest.MonkeyPatch(), tmp_path_factory.mktemp("runs"), [], LogClock()
    real = train.RunLog.line
    patch.setattr(train, "time", clock)
    patch.setattr(train.RunLog, "line", lambda log, text: (log.files and spoken.append((clock.t, text)), real(log, text)))
    for module, name, seconds in ((demo, "micro_batches", 12), (evaluate, "token_nll", 9), (quantize, "best_clip", 1.5), (ttt, "adapt_steps", 3)):
        patch.setattr(module, name, clock.slowly(getattr(module, name), seconds))
    guarded_run({**TINY, **data, "EMA_DECAY": "0.997", "ITERATIONS": "6", "WARMUP_STEPS": "4", "VAL_BATCH_SIZE": "16384", "RUNS_DIR": str(folder), "RUN_ID": "slow"})
    patch.undo()
    return spoken, folder / "slow"


def test_no_phase_is_silent(slow_run):
    "Not for ten seconds of its clock; every part says its share, and the time left once its pace is known."
    spoken, folder = slow_run
    silence = max((b - a, text) for (a, _), (b, text) in zip(spoken, spoken[1:]))
    assert silence[0] <= 10, silence
    lines = [text for _, text in spoken if text.startswith("progress: ")]
    parts = {line.split()[1] for line in lines}
    assert {"compiling", "training", "scoring", "quantizing", "adapting"} <= parts, parts
    assert all(re.fullmatch(r"progress: \w+ \d+%(, [\d,]+ tokens/s)?, \d+ s (left|so far)", line) for line in lines), lines
    for part in ("training", "scoring", "adapting"):
        assert any(re.match(rf"progress: {part} .*tokens/s, \d+ s left", line) for line in lines), part
    assert (folder / "train.log").read_text().splitlines() == [text for _, text in spoken]


def test_every_chunk_is_an_event(slow_run):
    events, _ = watch.read_events(slow_run[1])
    learned = [e for e in events if e["event"] == "ttt"]
    assert len(learned) > 3 and [e["chunk"] for e in learned] == list(range(learned[0]["chunks"])) and all(e["bpb"] > 0 for e in learned)
    assert learned[-1]["bpb"] == pytest.approx(json.loads((slow_run[1] / "summary.json").read_text())["ttt_bpb"])


def test_every_step_of_the_adapters_is_an_event():
    told = []
    log = SimpleNamespace(line=lambda text: None, event=lambda kind, **facts: told.append(facts))
    _, bpb, _ = score_documents(golf_on(DOCS, Ranks())[0], random_state(DOCS), texts([1, 5, 30, 70, 2]), random_table(), DOCS, Ranks(), log=log)
    assert [e["chunk"] for e in told] == list(range(told[0]["chunks"])) and len(told) > 3 and told[-1]["bpb"] == pytest.approx(bpb)
    assert log.at[0] == "adapting" and log.at[1:3] == (len(told) - 1, len(told))


def test_what_the_average_will_hold_is_said_before(slow_run):
    "At once where the number of steps is known, under a clock when the pace is; once; not where it is little."
    notes = [(i, text) for i, (_, text) in enumerate(slow_run[0]) if text.startswith("note: ")]
    first = next(i for i, (_, text) in enumerate(slow_run[0]) if text.startswith("step:"))
    assert len(notes) == 1 and notes[0][0] < first and "after 6 steps 98% of the average is initial weights; set EMA_DECAY=0.167" in notes[0][1]
    for decay, times, cap in ((0.999, 1, "0.05"), (0.1, 0, "0.02")):
        env = settings(2, ITERATIONS="100000", MAX_WALLCLOCK_SECONDS=cap, EMA_DECAY=str(decay))
        (cfg, model, engine), said = machine(env, Ranks()), []
        log = train.RunLog(quiet=True)
        log.line = said.append
        done = trained(cfg, train.training_loss(model, model.cap), Batches(cfg, Ranks(), 8), engine, log=log, now=Clock(0.001), extras=[EmaAdvice()])
        told = [int(n) for n in re.findall(r"note: after (\d+) steps", "\n".join(said))]
        assert len(told) == times and told == [pytest.approx(done.steps, rel=0.5)] * times, (told, done.steps)


def test_how_long_the_rest_takes_is_said(tmp_path):
    "After ten steps, to the terminal and the log; with advice where adapting takes longer than training."
    cfg, said = settings_for("demo"), []
    (tmp_path / "train.log").write_text("golfnb recipe:demo\ntrain_shards:1 val_tokens:60000 unigram_bpb:3\n")
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps({"event": "step", "step": i, "ms": 100.0}) + "\n" for i in range(10)))
    watch.foretell(tmp_path, cfg, said.append, 0.01)
    assert said == ["note: about 24 s of training, 2 s of scoring, 2 s of adapting"] and said[0] in (tmp_path / "train.log").read_text()
    assert watch.outlook_line(settings_for("demo", ITERATIONS=10), 100, 60_000).endswith("2 s of adapting; TTT_ENABLED=0 leaves the adapting out")

    def unread(line):
        raise BrokenPipeError

    watch.foretell(tmp_path, cfg, unread, 0.01)
    assert (tmp_path / "train.log").read_text().count(said[0]) == 2, "the log has it all the same"
    (tmp_path / "summary.json").write_text("{}")
    (tmp_path / "metrics.jsonl").write_text("")
    watch.foretell(tmp_path, cfg, said.append, 0.01)
    assert len(said) == 1, "a run that ended before has nothing to say"


def test_a_run_whose_numbers_may_not_be_read_says_so_alone(tmp_path, monkeypatch):
    def refused(*words):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(watch, "read_events", refused)
    watch.foretell(tmp_path, None, pytest.fail, 0.01)


STEP = '{"event": "step", "step": %d, "loss": 3.5, "ms": 20}\n'


@contextmanager
def served(folder):
    server = watch.page_server(watch.page_handler(watch.watch_routes(folder)))
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield server.server_port
    server.shutdown()
    server.server_close()


def asked(port, path, host=None):
    c = HTTPConnection("127.0.0.1", port, timeout=600)
    c.request("GET", path, headers={"Host": host or f"127.0.0.1:{port}"})
    answer = c.getresponse()
    return answer.status, answer.read().decode()


def test_the_server_follows_a_run(tmp_path):
    "From before it begins, over a line that is cut and a run that begins anew, to its end."
    folder = tmp_path / "a<b>"
    with served(folder) as port:
        news = lambda start: json.loads(asked(port, f"/news?from={start}")[1])
        assert news(0)["events"] == [] and news(0)["silent_s"] is None and not news(0)["ended"]
        folder.mkdir()
        (folder / "metrics.jsonl").write_text(STEP % 1 + (STEP % 2)[:20])
        (folder / "train.log").write_text("note: mind\n" + "line\n" * 50)
        first = news(0)
        assert [e["step"] for e in first["events"]] == [1] and first["notes"] == ["note: mind"] and first["log"] == ["line"] * 14
        with open(folder / "metrics.jsonl", "a") as file:
            file.write("\n" + STEP % 2 + '{"event": "score", "loss": NaN}\n[1]\n')
        second = news(first["next"])
        assert [e["event"] for e in second["events"]] == ["step", "score"] and second["events"][1]["loss"] is None
        (folder / "metrics.jsonl").write_text(STEP % 1)
        assert news(second["next"])["next"] == 0, "shorter than before: from anew"
        (folder / "summary.json").write_text('{"raw_bpb": 2.0, "sliding_bpb": 1.5}')
        assert news(0)["ended"] and news(0)["score"] == ["sliding window", 1.5] and not news(0)["report"] and asked(port, "/report")[0] == 404
        (folder / "report.html").write_text("the report")
        assert asked(port, "/report") == (200, "the report")
        page = asked(port, "/")[1]
        assert "a&lt;b&gt;" in page and "<b>" not in page.split("</h1>")[0] and not re.search(r'(src|href)="(?!data:,|/report)', page)


def test_a_line_of_brackets_stops_nobody(tmp_path, capsys):
    (tmp_path / "metrics.jsonl").write_text(STEP % 1 + "[" * 200_000 + "\n" + STEP % 2)
    with served(tmp_path) as port:
        status, text = asked(port, "/news?from=0")
    assert status == 200 and [e["step"] for e in json.loads(text)["events"]] == [1, 2] and capsys.readouterr().err == ""


def test_pages_may_load_nothing_from_elsewhere(tmp_path):
    (tmp_path / "report.html").write_text("<script>fetch('/news')</script>")
    with served(tmp_path) as port:
        rules = {}
        for path in ("/", "/report"):
            c = HTTPConnection("127.0.0.1", port, timeout=60)
            c.request("GET", path)
            rules[path] = c.getresponse().headers["Content-Security-Policy"].split("; ")
    assert all({"default-src 'none'", "script-src 'unsafe-inline'"} <= set(found) for found in rules.values())
    assert "connect-src 'self'" in rules["/"] and not any(rule.startswith("connect-src") for rule in rules["/report"])


def test_a_page_from_elsewhere_and_a_reader_who_has_gone(tmp_path, capsys):
    with served(tmp_path) as port:
        c = HTTPConnection("127.0.0.1", port, timeout=60)
        c.request("GET", "/news", headers={"Origin": "https://evil.example"})
        answer = c.getresponse()
        assert answer.status == 403 and b"Origin" in answer.read()
        for request in (b"", b"GET /news HTTP/1.1\r\nHost: localhost\r\n\r\n", b"GET / HTTP/1.1\r\nHost: a.b\r\n\r\n"):
            with socket.create_connection(("127.0.0.1", port)) as line:
                line.sendall(request)
                line.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        assert asked(port, "/news")[0] == 200
    assert capsys.readouterr().err == ""


def test_only_this_machine_may_ask(tmp_path):
    with served(tmp_path) as port:
        assert asked(port, "/", "evil.example")[0] == asked(port, "/news", f"evil.example:{port}")[0] == 403
        assert asked(port, "/", f"localhost:{port}")[0] == 200 and asked(port, "/../../etc/passwd")[0] == asked(port, "/x")[0] == 404
        assert all(asked(port, f"/news?from={n}")[0] == 200 for n in ("-1", "x", "9" * 40, "%00", "1&from=2"))
        with pytest.raises(GolfError, match=f"{port} .*--port"):
            watch.page_server(watch.page_handler({}), port)
        with pytest.raises(GolfError, match="80000 .*--port"):
            watch.page_server(watch.page_handler({}), 80_000)
        other = watch.page_server(watch.page_handler({}), first=port)
        assert other.server_port > port
        other.server_close()


def test_ctrl_c_is_one_line(tmp_path, monkeypatch, capsys):
    def interrupted(server):
        raise KeyboardInterrupt
    monkeypatch.setattr(watch.ThreadingHTTPServer, "serve_forever", interrupted)
    watch.watch(tmp_path, browser=False)
    out = capsys.readouterr().out.splitlines()
    assert out[0].startswith(f"watch: nothing in {tmp_path} yet") and re.match("watch: http://127.0.0.1:[0-9]+/ ", out[1]) and out[-1] == "watch: stopped"


@pytest.mark.parametrize("width, scheme", [(1280, "light"), (390, "dark")])
def test_the_page_in_a_browser(slow_run, tmp_path, width, scheme):
    "It draws while the run goes on, fits a phone, asks nobody else, is read with the keyboard, and ends with the report."
    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "book"))
    pytest.importorskip("playwright.sync_api", reason="playwright opens the page")
    from browse import FLAGS, find_chromium
    if not find_chromium():
        pytest.skip("no Chromium")
    from playwright.sync_api import sync_playwright

    lines, wrong = (slow_run[1] / "metrics.jsonl").read_text().splitlines(keepends=True), []
    (tmp_path / "train.log").write_text((slow_run[1] / "train.log").read_text())
    with served(tmp_path) as port, sync_playwright() as play:
        browser = play.chromium.launch(executable_path=find_chromium(), args=FLAGS)
        tab = browser.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme).new_page()
        tab.set_default_timeout(600_000)
        tab.on("console", lambda m: wrong.append(m.text))
        tab.on("pageerror", lambda e: wrong.append(str(e)))
        tab.on("request", lambda r: None if r.url.startswith((f"http://127.0.0.1:{port}/", "data:")) else wrong.append(r.url))
        tab.goto(f"http://127.0.0.1:{port}/")
        tab.wait_for_selector("#losses p")
        assert "waiting" in tab.inner_text("#what") and "has not written" in tab.inner_text("#state")
        (tmp_path / "metrics.jsonl").write_text("".join(lines[:-1]) + lines[-1][:9])
        tab.wait_for_selector("#chunks svg path")
        assert tab.inner_text("#step").startswith("6") and "EMA_DECAY" in tab.inner_text("#notes") and "s" in tab.inner_text("#left")
        tab.focus("#losses svg")
        tab.keyboard.press("ArrowLeft")
        assert tab.inner_text("#losses figcaption").startswith("step 5\n"), tab.inner_text("#losses figcaption")
        assert tab.evaluate("document.documentElement.scrollWidth") <= width and (tab.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)") == (scheme == "light")
        (tmp_path / "summary.json").write_text((slow_run[1] / "summary.json").read_text())
        (tmp_path / "report.html").write_text("<title>report</title>")
        tab.wait_for_selector("#state a[href='/report']")
        assert tab.inner_text("#what") == "ended"
        browser.close()
    assert not wrong, wrong


class Writer(list):
    "Stands for a SummaryWriter, and for a run of wandb."
    def __init__(self, place=None): self.place = place
    def __enter__(self): return self
    def __exit__(self, *_): self.append("closed")
    def add_scalar(self, *scalar): self.append(scalar)
    def define_metric(self, name, step_metric): self.append((name, step_metric))
    def log(self, numbers): self.append(numbers)


def test_other_dashboards_get_the_numbers(tmp_path, monkeypatch):
    (tmp_path / "metrics.jsonl").write_text(STEP % 1 + '{"event": "val", "step": 1, "loss": 3, "bpb": NaN}\n{"event": "phase", "name": "training", "seconds": 2}\n{"event": "ttt", "chunk": 0, "chunks": 2, "loss": 3, "bpb": 1.7}\n')
    made = []
    fake = lambda *place, **how: made.append(Writer(how or place)) or made[-1]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", SimpleNamespace(SummaryWriter=fake))
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=fake))
    assert watch.to_tensorboard(tmp_path, tmp_path / "tb") == 3
    assert made[0] == [("step/loss", 3.5, 1), ("step/ms", 20, 1), ("val/loss", 3, 1), ("ttt/loss", 3, 0), ("ttt/bpb", 1.7, 0), "closed"]
    def the_run_ends(seconds):
        with open(tmp_path / "metrics.jsonl", "a") as file:
            file.write(STEP % 2)
        (tmp_path / "summary.json").write_text('{"config": {"seed": 7}}')
    monkeypatch.setattr(watch, "time", SimpleNamespace(sleep=the_run_ends))  # while the follower waits for more
    assert watch.to_wandb(tmp_path, "golf", follow=True) == 4 and made[1].place == {"project": "golf", "name": tmp_path.name, "config": {}}
    assert made[1][0] == ("step/*", "step/step") and made[1][-2:] == [{"step/step": 2, "step/loss": 3.5, "step/ms": 20}, "closed"]


def test_log_in_one_sentence(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    (tmp_path / "metrics.jsonl").write_text(STEP % 1)
    for words, said in ((["--wandb", "x"], r"pip install golfnb\[track\]"), ([], "--tensorboard DIR or --wandb PROJECT"), (["--wandb", "x", "--tensorboard", "y"], "found both")):
        done = golfnb("log", tmp_path, *words, cwd=tmp_path)
        assert done.returncode == 2 and one_sentence(done.stderr) and re.search(said, done.stderr)


def test_a_bar_is_drawn_on_a_terminal_only(monkeypatch, capsys):
    for terminal in (True, False):
        monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal, raising=False)
        bar = watch.Bar()
        for _ in train.counted(range(3), "scoring", bar, 60):
            bar.event("ttt", bpb=1.25)
            bar.bar.refresh()
        bar.close()
        said = capsys.readouterr().err
        assert ("scoring" in said and "2/3" in said and "1.2500 bits per byte" in said) == terminal and (terminal or not said)

"""Play: the tokenizer and the data are found, a text's bits are the scorer's, the server answers bad input with a sentence, and the page works with mouse and keyboard, on a desktop and on a phone."""
import io
import json
import re
import shutil
import socket
import struct
import sys
import threading
import time
import urllib.request
from dataclasses import asdict
from http.server import ThreadingHTTPServer
from pathlib import Path
from urllib.error import HTTPError

import numpy as np
import pytest
import sentencepiece as spm
import torch
from tiny import golfnb, one_sentence, tiny_data

from golfnb.file.artifact import Lzma, save_artifact
from golfnb.text.bpb import load_tokenizer, tokenizer_hash
from golfnb.tools.report import find_artifact, find_tokenizer, run_data
from golfnb.score.evaluate import plain_loss
from golfnb.model.layout import bank_per_shape
from golfnb.model.golf import Golf, SavedModel, init_model, load_named, named_state
from golfnb.model.engine import Ranks
from golfnb.tools.play import LIMIT, Player, TextPieces, play_server
from golfnb.file.quantize import quantize_state
from golfnb.settings import GolfError

ROOT = Path(__file__).resolve().parents[2]
TEXT = "Return the header.\n\tdéf 日: return the header.\n"
CFG = SavedModel(vocab_size=400, num_layers=3, model_dim=64, num_heads=2, num_kv_heads=1, train_seq_len=48, rope_train_len=24, ve_layers="2", ve_dim=16, bigram_vocab_size=64, bigram_dim=16)


def write_artifact(path: Path, tokenizer: Path, seed: int = 1) -> Path:
    "An artifact with weights that say something, not trained."
    model = Golf(CFG, bank_per_shape(CFG, 1))
    init_model(model, CFG, seed)
    g = torch.Generator().manual_seed(seed)
    load_named(model, {n: t + 0.3 * torch.randn(t.shape, generator=g) * (t.ndim == 2) for n, t in named_state(model).items()})
    save_artifact(path, quantize_state(named_state(model), False), {"settings": asdict(CFG), "tokenizer_sha256": tokenizer_hash(tokenizer), "recipe": "demo"}, Lzma())
    return path


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    "A run's folder: an artifact, its tokenizer, and a summary that names the data."
    root = tmp_path_factory.mktemp("play")
    (root / "shards").mkdir()
    named = tiny_data(root / "shards")
    (root / "run").mkdir()
    write_artifact(root / "run" / "artifact.golf", root / "shards" / "tokenizer.model")
    config = {n.lower(): v for n, v in named.items()}
    (root / "run" / "summary.json").write_text(json.dumps({"config": config, "sliding_bpb": 2.5}))
    return root / "run"


@pytest.fixture(scope="module")
def player(run):
    return Player(run)


# what stands beside a run

def test_the_tokenizer_is_found_in_each_place_and_no_other_is_taken(run, tmp_path):
    model, copy = (run.parent / "shards" / "tokenizer.model"), tmp_path / "run"
    shutil.copytree(run, copy)
    sha = tokenizer_hash(model)
    assert find_tokenizer(copy / "artifact.golf", sha) == str(model), "the path that summary.json names"
    for place in ("data/tokenizer.model", "tokenizer.model"):
        (copy / place).parent.mkdir(exist_ok=True)
        shutil.copy(model, copy / place)
        assert find_tokenizer(copy / "artifact.golf", sha) == str(copy / place)
    (copy / "tokenizer.model").write_bytes(b"another")
    assert find_tokenizer(copy / "artifact.golf", sha) == str(copy / "data" / "tokenizer.model"), "the right one behind a wrong one"
    (copy / "summary.json").unlink()
    shutil.rmtree(copy / "data")
    for words in ("another in ", "none in "):
        with pytest.raises(GolfError, match=f"{words}.*--tokenizer"):
            find_tokenizer(copy / "artifact.golf", sha)
        (copy / "tokenizer.model").unlink(missing_ok=True)


def test_commands_take_a_run_or_an_artifact_and_know_its_data(run, tmp_path):
    assert find_artifact(run) == find_artifact(run / "artifact.golf") == run / "artifact.golf"
    assert run_data(run / "artifact.golf", "val") == f"{run.parent}/shards/*_val_*.bin"
    words = "EVAL_SEQ_LEN=48", "EVAL_STRIDE=24", "VAL_BATCH_SIZE=65536"
    done = [golfnb("score", path, *words, cwd=tmp_path) for path in (run, run / "artifact.golf")]
    assert done[0].returncode == 0 and "val_bpb" in done[0].stdout and done[0].stdout == done[1].stdout, done[0].stderr
    for folder, word in ((tmp_path, "artifact.golf"), (tmp_path / "absent", "absent")):
        done = golfnb("sample", folder, "x", cwd=tmp_path)
        assert done.returncode == 2 and one_sentence(done.stderr) and word in done.stderr
    (tmp_path / "lone").mkdir()
    lone = shutil.copy(run / "artifact.golf", tmp_path / "lone")
    for command, word in ((["score"], "--val"), (["sample", "x"], "--tokenizer")):
        done = golfnb(command[0], lone, *command[1:], cwd=tmp_path)
        assert done.returncode == 2 and one_sentence(done.stderr) and word in done.stderr


def test_sample_asks_for_prompts(run, tmp_path, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("Return the\n\n\0\nthe header\n"))
    done = golfnb("sample", run, "-i", "--tokens", 5, cwd=tmp_path)
    assert done.returncode == 0 and done.stdout.count("> ") == 5 and re.search(r"\[\d+ tokens, \d+\.\d\d bits per byte, unigram \d+\.\d\d\]", done.stdout), done.stdout + done.stderr
    assert "[no text]" in done.stdout and "'\\x00'" in done.stdout
    for words in (["-i", "x"], []):
        done = golfnb("sample", run, *words, cwd=tmp_path)
        assert done.returncode == 2 and one_sentence(done.stderr)


# what a text costs

def test_the_bits_of_a_text_are_the_scorers(player):
    found = player.read(TEXT)["tokens"]
    ids = torch.tensor(player.encode(TEXT))
    assert len(ids) <= CFG.train_seq_len and "".join(t[0] for t in found) == TEXT and sum(t[2] for t in found) == len(TEXT.encode())
    forward = lambda x, keep: player.golf(x, keep, rope_len=CFG.train_seq_len)
    forward.cap = player.golf.cap
    _, bpb = plain_loss(forward, ids, player.table, CFG.train_seq_len, 1, Ranks())
    assert sum(t[1] for t in found) / len(TEXT.encode()) == pytest.approx(bpb, rel=1e-5)
    counts = np.bincount(np.fromfile(run_data(player.file, "train").replace("*_train_*", "fineweb_train_000000"), "<u2", offset=1024), minlength=400)
    assert player.unigram.shape == (400,) and 2.0 ** -player.unigram.min() >= (counts / counts.sum()).max() * 0.5


def test_places_of_a_long_text_show_what_a_continuation_is_drawn_from(player):
    found = player.read(TEXT * 4)
    for n in (5, 47, 48, 49, 80):
        so_far = player.encode(TEXT * 4)[:n]
        from golfnb.tools.sampling import next_logits
        shares, best = next_logits(player.golf, so_far).softmax(-1).topk(1)
        text, share = found["tokens"][n - 1][4][0]
        assert share == pytest.approx(float(shares), abs=2e-4) and text == player.shown(int(best))


def test_at_rate_0_adapters_change_nothing_and_then_the_bits_fall(player):
    plain, still, learnt, chunks = [t[1] for t in player.read(TEXT)["tokens"]], [], [], []
    player.adapt(TEXT, 0.0, still.extend)
    np.testing.assert_allclose(still, plain, atol=1e-3)
    before = {n: t.clone() for n, t in player.golf.state_dict().items()}
    player.adapt(TEXT * 20, 0.003, chunks.append)
    for c in chunks:
        learnt += c
    assert len(learnt) == len(player.encode(TEXT * 20)) - 1 and max(map(len, chunks)) == 24
    assert np.mean(learnt[-100:]) < 0.8 * np.mean(learnt[:100])
    assert all(torch.equal(t, before[n]) for n, t in player.golf.state_dict().items()) and all(p.requires_grad for p in player.golf.parameters())


def test_bytes_wait_for_their_character(player):
    pieces = TextPieces(player.sp)
    out = [pieces(t) for t in player.sp.encode("a日b")]
    assert "".join(out) == "a日b" and "" in out and not any("\ufffd" in t for t in out)


# the server

@pytest.fixture(scope="module")
def server(player, run):
    with play_server([player, Player(run)]) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def ask(server, path, words, raw=None, method="POST", **headers):
    "Status and lines of an answer."
    data = None if method == "GET" else json.dumps(words).encode() if raw is None else raw
    request = urllib.request.Request(f"http://127.0.0.1:{server.server_port}/{path}", data, {"Content-Type": "application/json", **{k.replace("_", "-"): v for k, v in headers.items()}}, method=method)
    try:
        with urllib.request.urlopen(request, timeout=600) as answer:
            return answer.status, answer.read()
    except HTTPError as e:
        return e.code, e.read()


WRITE = {"model": 0, "text": "Return", "tokens": 5, "temperature": 0.8, "top_k": 3, "seed": 1}


def test_the_server_reads_writes_and_adapts(server, player):
    status, found = ask(server, "read", {"model": 1, "text": TEXT})
    assert status == 200 and "".join(t[0] for t in json.loads(found)["tokens"]) == TEXT
    status, found = ask(server, "write", WRITE)
    assert "".join(json.loads(line)["piece"] for line in found.splitlines()) == "".join(player.write("Return", 5, 0.8, 3, 1))
    status, found = ask(server, "adapt", {"model": 0, "text": TEXT, "rate": 0.001})
    assert sum(len(json.loads(line)["bits"]) for line in found.splitlines()) == len(player.encode(TEXT)) - 1
    facts = json.loads(ask(server, "facts", {})[1])
    assert len(facts["models"]) == 2 and facts["models"][0]["unigram"] and "2.500 bits per byte" in facts["models"][0]["words"] and len(facts["starter"]) > 40
    status, page = ask(server, "", None, method="GET")
    assert status == 200 and not re.search(rb"""(src|href)=["'](?!data:)|@import|url\(|https?://""", page)


@pytest.mark.parametrize("path, words, headers, status, said", [
    ("read", {"model": 0, "text": "x" * (LIMIT + 1)}, {}, 400, "20,000"), ("read", {"model": 0, "text": "a\0"}, {}, 400, "'\\x00'"), ("read", {"model": 0, "text": "\ud800"}, {}, 400, "ud800"),
    ("read", {"model": 2, "text": ""}, {}, 400, "model "), ("read", {"model": True, "text": ""}, {}, 400, "model "), ("read", {"model": 0, "text": 3}, {}, 400, "text "),
    ("write", {**WRITE, "temperature": -1}, {}, 400, "temperature "), ("write", {**WRITE, "tokens": 10**9}, {}, 400, "tokens "), ("write", {**WRITE, "top_k": None}, {}, 400, "top_k "),
    ("adapt", {"model": 0, "text": "", "rate": 0.1}, {}, 400, "text to learn"), ("adapt", {"model": 0, "text": "a", "rate": 9}, {}, 400, "rate "),
    ("nothing", {"model": 0, "text": ""}, {}, 404, "reload"), ("read", b"{", {}, 400, "JSON"), ("read", b"[" * 100_000, {}, 400, "JSON"), ("read", b"[1]", {}, 400, "object"),
    ("read", {}, {"Content_Type": "text/plain"}, 415, "application/json"), ("facts", {}, {"Host": "golf.example:80"}, 403, "localhost"),
    ("facts", {}, {"Origin": "https://golf.example"}, 403, "Origin"), ("facts", {}, {"Origin": "null"}, 403, "Origin"),
    ("facts", b" " * (13 * LIMIT), {}, 413, "length"), ("facts", {}, {"Content_Length": "9" * 5000}, 413, "length"), ("facts", {}, {"Content_Length": "-1"}, 411, "length"),
])
def test_bad_input_gets_a_sentence(server, capsys, path, words, headers, status, said):
    found, text = ask(server, path, words, words if isinstance(words, bytes) else None, **headers)
    error = json.loads(text)["error"]
    assert found == status and said in error and error.endswith(".") and "\n" not in error
    assert capsys.readouterr().err == "", "the terminal is for one line"


def test_the_page_itself_may_ask(server):
    assert ask(server, "facts", {}, Origin=f"http://127.0.0.1:{server.server_port}")[0] == 200


def sent_and_gone(server, request: bytes):
    "Send part of a request, and go with a reset."
    with socket.create_connection(("127.0.0.1", server.server_port), timeout=60) as line:
        line.sendall(request)
        line.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def test_who_goes_away_leaves_nothing_behind(server, capsys):
    "Before the request, within it, before its answer, and within that; the model is free for the next."
    body = json.dumps({**WRITE, "tokens": 2000, "top_k": 0}).encode()
    head = f"POST /write HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    others = set(threading.enumerate())
    for request in (b"", b"POST /write HTTP/1.1\r\nHost:", head, head + body[:5], head + body, head.replace(b"localhost", b"golf.example") + body, b"GET / HTTP/1.1\r\nHost: a.b\r\n\r\n"):
        sent_and_gone(server, request)
    end = time.time() + 300
    while set(threading.enumerate()) - others and time.time() < end:
        time.sleep(0.02)
    assert not set(threading.enumerate()) - others, "it serves a reader who has gone"
    assert ask(server, "write", WRITE)[0] == 200
    assert capsys.readouterr().err == ""


def test_a_request_that_does_not_come_is_given_up(server, monkeypatch, capsys):
    from golfnb.tools.play import PlayHandler
    monkeypatch.setattr(PlayHandler, "timeout", 0.3)
    with socket.create_connection(("127.0.0.1", server.server_port), timeout=60) as line:
        line.sendall(b"POST /read HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 9\r\n\r\n{")
        answer = b"".join(iter(lambda: line.recv(4096), b""))
    assert b" 408 " in answer.splitlines()[0] and b"did not come" in answer and capsys.readouterr().err == ""


def test_the_smallest_temperature_takes_the_likeliest(server, capsys):
    texts = [b"".join(ask(server, "write", {**WRITE, "temperature": t})[1].splitlines()) for t in (0, 1e-300, 5e-324)]
    assert texts[0] == texts[1] == texts[2] and b"error" not in texts[0] and capsys.readouterr().err == ""


def test_a_fault_of_ours_is_called_one(server, monkeypatch, capsys):
    monkeypatch.setattr(Player, "read", lambda *a: 1 / 0)
    status, text = ask(server, "read", {"model": 0, "text": "a"})
    assert status == 500 and "fault of its own" in json.loads(text)["error"] and capsys.readouterr().err == ""


def test_a_text_has_the_bytes_that_were_typed(player, server, run, tmp_path, monkeypatch):
    "The tokenizer writes a space as U+2581, which typed has three bytes."
    for text in ("a\u2581b", "\u2581", "\u2581\u2581 日\u2581\n", " \u2581x"):
        found = json.loads(ask(server, "read", {"model": 0, "text": text})[1])
        assert "".join(t[0] for t in found["tokens"]) == text and sum(t[2] for t in found["tokens"]) == len(text.encode())
    monkeypatch.setattr("sys.stdin", io.StringIO("\u2581\u2581\n"))
    done = golfnb("sample", run, "-i", "--tokens", 1, cwd=tmp_path)
    bits = sum(t[1] for t in player.read("\u2581\u2581")["tokens"])
    assert float(re.search(r"tokens?, ([\d.]+) bits per byte", done.stdout)[1]) == pytest.approx(bits / 6, abs=0.01)


def test_other_doors_are_shut(server, player):
    assert ask(server, "other", None, method="GET")[0] == 404 and ask(server, "", None, method="GET", Host="golf.example")[0] == 403
    assert ask(server, "read", None, method="GET")[0] == 404 and ask(server, "", {}, method="POST")[0] == 400
    assert server.server_address[0] == "127.0.0.1"
    with pytest.raises(GolfError, match="--port"):
        play_server([player], server.server_port)


def test_a_character_without_a_token_is_named(player, tmp_path, monkeypatch):
    spm.SentencePieceTrainer.train(sentence_iterator=iter(["return the header of it"] * 50), model_prefix=str(tmp_path / "t"), vocab_size=30, hard_vocab_limit=False, minloglevel=2)
    monkeypatch.setattr(player, "sp", load_tokenizer(tmp_path / "t.model"))
    with pytest.raises(GolfError, match="'日'"):
        player.encode("the 日 header")


def test_the_command_prints_its_address_and_ends_in_one_line(run, tmp_path, monkeypatch):
    def interrupted(server):
        threading.Thread(target=server.handle_request, daemon=True).start()
        assert b"golfnb play" in urllib.request.urlopen(f"http://127.0.0.1:{server.server_port}/", timeout=600).read()
        raise KeyboardInterrupt  # as Ctrl-C does

    monkeypatch.setattr(ThreadingHTTPServer, "serve_forever", interrupted)
    done = golfnb("play", run, run, "--no-browser", cwd=tmp_path)
    assert done.returncode == 0 and re.fullmatch(r"play: http://127.0.0.1:88\d\d/  Ctrl-C stops it\s*play: stopped\n", done.stdout) and not done.stderr, done.stdout + done.stderr
    done = golfnb("play", tmp_path, cwd=tmp_path)
    assert done.returncode == 2 and one_sentence(done.stderr)


# the page

@pytest.fixture(scope="module")
def chromium():
    sync_api = pytest.importorskip("playwright.sync_api", reason="the page is looked at with playwright")
    sys.path.insert(0, str(ROOT / "book"))
    from browse import FLAGS, find_chromium
    if not find_chromium():
        pytest.skip("no Chromium here to look at the page with")
    with sync_api.sync_playwright() as play:
        browser = play.chromium.launch(executable_path=find_chromium(), args=FLAGS)
        yield browser
        browser.close()


@pytest.mark.parametrize("width, scheme", [(1280, "light"), (390, "dark")])
def test_the_page_in_a_browser(chromium, server, width, scheme):
    context, wrong = chromium.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme, bypass_csp=True), []  # its rules let playwright wait for nothing
    tab = context.new_page()
    tab.on("console", lambda m: wrong.append(m.text) if m.type in ("error", "warning") else None)
    tab.on("pageerror", lambda e: wrong.append(str(e)))
    tab.on("request", lambda r: wrong.append(r.url) if not r.url.startswith((f"http://127.0.0.1:{server.server_port}/", "data:")) else None)
    tab.goto(f"http://127.0.0.1:{server.server_port}/")
    tab.wait_for_selector(".tok.end")
    tab.fill("#text", TEXT)
    tab.wait_for_function("text => [...document.querySelectorAll('article')].every(a => [...a.querySelectorAll('.toks .tok:not(.end)')].map(t => t.textContent).join('').replaceAll('\u21b5', '\\n') === text)", arg=TEXT)
    first = tab.locator("article").first
    assert re.search(r"\d\.\d\d\s*bits per byte", first.locator(".scores").inner_text()) and first.locator(".gut").first.inner_text().count(".") == 2, "a line's and its unigram's"
    first.locator(".tok.end").focus()  # the keyboard alone from here
    tab.keyboard.press("Home")
    tab.keyboard.press("ArrowRight")
    assert tab.evaluate("document.activeElement.dataset.i") == "1" and re.search(r"cost \d+\.\d bits", first.locator(".place").inner_text())
    assert tab.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid" and first.locator(".likely li").count() == 5
    tab.keyboard.press("ArrowDown")
    assert tab.evaluate("document.activeElement.closest('.row').previousElementSibling !== null")
    assert tab.evaluate("document.activeElement.ariaLabel").endswith("bits")
    assert tab.evaluate("document.documentElement.scrollWidth") <= width and not tab.evaluate("[...document.querySelectorAll('input, select, textarea')].filter(e => !e.labels.length).length")
    back = [int(x) for x in re.findall(r"\d+", tab.evaluate("getComputedStyle(document.body).backgroundColor"))]
    assert (sum(back) < 384) == (scheme == "dark")
    tab.check("#adapters")
    tab.wait_for_function("[...document.querySelectorAll('.learnt')].length === 2 && !document.querySelector('#stop').disabled === false")
    assert tab.locator(".chunks rect").count() >= 2
    tab.uncheck("#adapters")
    tab.fill("#tokens", "2000")
    tab.keyboard.press("Control+Enter")
    tab.wait_for_function("[...document.querySelectorAll('.fresh')].every(f => f.textContent.length > 3)")
    tab.keyboard.press("Escape")
    tab.wait_for_function("document.querySelector('#stop').disabled")
    assert tab.locator("#error").inner_text() == "" and tab.input_value("#text") == TEXT
    tab.get_by_text("Keep this continuation").first.click()
    tab.wait_for_function("length => document.querySelector('#text').value.length > length", arg=len(TEXT))
    tab.fill("#text", "x" * (LIMIT + 1))
    tab.wait_for_function("document.querySelector('#error').textContent.includes('at most 20,000 characters')")
    assert not [w for w in wrong if "400" not in w]
    context.close()

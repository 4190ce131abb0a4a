"""The judge: honest runs pass, and each planted cheat is found, by a check of its own."""
import json
import os
import re
import shutil
import struct
import subprocess
import sys
import zlib
from hashlib import sha256
from pathlib import Path

import pytest
import torch
from forked import fork_judged, run_python
from score_workers import stream
from tiny import MORE, TINY, clean_env, golfnb, run_quietly, without_torchrun

from golfnb.settings import GolfError
from golfnb.text.shards import write_shard
from golfnb.tools import judge
from golfnb.tools.checkpoint import DRILL_CLOCK
from golfnb.tools.cli import main_cli
from golfnb.tools.data import build_shards, stdlib_documents, train_tokenizer
from golfnb.tools.programs import RECIPES, copied_program, find_program, program_sha256, save_script
from golfnb.score.ttt import audit_files

SMALL = {k: v for k, v in TINY.items() if k != "RECIPE"} | {
    "MODEL_DIM": "32", "ITERATIONS": "30", "WARMDOWN_ITERS": "20", "TRAIN_BATCH_TOKENS": "1024", "TTT_CHUNK_TOKENS": "512", "EVAL_STRIDE": "48", "BIGRAM_DIM": "8", "VE_DIM": "8"}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    "Shards of a few documents, each once, and a finished run of a program of one's own."
    root = tmp_path_factory.mktemp("judge")
    docs = [d[:1200] for d in dict.fromkeys(stdlib_documents(["json", "csv", "email", "logging"]))][:60]
    (root / "data").mkdir()
    train_tokenizer(docs, root / "data/tokenizer.model", 400)
    build_shards(docs, root / "data/tokenizer.model", root / "data", 20_000, 0.1)
    trained(root, "mine", copied_program("demo", "mine"))
    return root


def data_of(root: Path) -> dict[str, str]:
    return {"DATA_PATH": str(root / "data"), "TOKENIZER_PATH": str(root / "data/tokenizer.model")}


def trained(root: Path, name: str, text: str, **words) -> Path:
    "A run of a program with this text; its folder."
    file, run = root / f"{name}.py", root / "runs" / name
    file.write_text(text)
    program = find_program(file)
    run.mkdir(parents=True)
    save_script(run / "train_gpt.py", program)
    run_quietly(program, SMALL | data_of(root) | {"RUN_ID": name, "RUNS_DIR": str(root / "runs")} | words, (run / "train_gpt.py").read_bytes())
    return run


@pytest.fixture(autouse=True)
def forked(monkeypatch):
    monkeypatch.setattr(judge, "start_process", fork_judged)
    monkeypatch.setattr(judge, "PLACES", 48)


def judged(root: Path, run: Path, program: Path | None, **how) -> dict:
    asked = judge.Asked(run / "artifact.golf", f"{root}/data/*_val_*.bin", **{"train": f"{root}/data/*_train_*.bin", "ttt": True} | how, program=program and str(program))
    return judge.judge(asked, lambda text: None)


def failed(found: dict) -> set:
    return {(f["scorer"], f["check"]) for f in found["findings"] if not f["passed"]}


def words(found: dict) -> str:
    return "; ".join(f"{f['scorer']}: {f['check']} ({f['found']})" for f in found["findings"] if not f["passed"])


def resealed(file: Path, **meta) -> str:
    "An artifact whose header says something else of its run; its new hash."
    data = file.read_bytes()
    n = struct.unpack("<I", data[12:16])[0]
    header = json.loads(zlib.decompress(data[48:48 + n]))
    header["meta"] |= meta
    text = zlib.compress(json.dumps(header, sort_keys=True, separators=(",", ":")).encode(), 9)
    front, rest = struct.pack("<8sII", b"\x93GOLFNB\n", 1, len(text)), text + data[48 + n:]
    data = front + sha256(front + rest).digest() + rest
    file.write_bytes(data)
    return sha256(data).hexdigest()


def with_edits(text: str, *edits: tuple[str, str]) -> str:
    for old, new in edits:
        assert old in text, old
        text = text.replace(old, new, 1)
    return text


def cheat(root: Path, tmp_path: Path, *edits: tuple[str, str], of: str = "mine") -> tuple[Path, Path]:
    "The honest run as if an edited program had made it: its folder, and the program."
    program, run = tmp_path / f"{of}.py", tmp_path / "run"
    tmp_path.mkdir(exist_ok=True)
    program.write_text(with_edits((root / f"{of}.py").read_text(), *edits))
    shutil.copytree(root / "runs" / of, run)
    before = sha256((run / "artifact.golf").read_bytes()).hexdigest()
    made_by = subprocess_sha256(program, of)
    after = resealed(run / "artifact.golf", program_sha256=made_by)
    for name in ("summary.json", "train.log"):
        (run / name).write_text((run / name).read_text().replace(before, after))
    return run, program


def subprocess_sha256(program: Path, name: str) -> str:
    "The hash of a program's files, without importing it."
    from types import SimpleNamespace
    return program_sha256(SimpleNamespace(OWN={"recipe": name}, __file__=str(program)))


def claim(run: Path, name: str, label: str, change) -> None:
    "Log and summary say another score."
    summary = json.loads((run / "summary.json").read_text())
    new = {kind: change(summary[f"{name}_{kind}"]) for kind in ("loss", "bpb")}
    summary |= {f"{name}_{kind}": value for kind, value in new.items()}
    (run / "summary.json").write_text(json.dumps(summary))
    line = f"{label}_exact val_loss:{new['loss']:.8f} val_bpb:{new['bpb']:.8f}"
    log = (run / "train.log").read_text()
    (run / "train.log").write_text(re.sub(rf"^{label}_exact .*$", line, log, flags=re.M))


def test_an_honest_run_passes(root):
    found = judged(root, root / "runs/mine", root / "mine.py")
    assert found["legal"] and found["compared"], words(found)
    assert {"plain rows", "sliding window", "score-first training"} <= {f["scorer"] for f in found["findings"]}


@pytest.mark.parametrize("recipe", RECIPES)
def test_honest_runs_of_all_recipes_pass(root, recipe):
    run = root / "runs" / recipe
    run.mkdir()
    program = find_program(recipe)
    save_script(run / "train_gpt.py", program)
    run_quietly(program, SMALL | MORE.get(recipe, {}) | data_of(root) | {"RUN_ID": recipe, "RUNS_DIR": str(root / "runs"), "ITERATIONS": "4", "WARMDOWN_ITERS": "2"}, (run / "train_gpt.py").read_bytes())
    found = judged(root, run, None, ttt=hasattr(program, "ADAPT"))
    assert found["legal"] and len(found["compared"]) == 2 + hasattr(program, "ADAPT"), words(found)
    assert recipe != "record" or {A_PLACE, ITS_OWN, SAME_SCORE} <= checks(found, ADAPTERS), "of a file on a trellis, one block three times, one with two lanes"


def test_a_library_that_asks_for_the_place_of_temporary_files_is_not_noted(tmp_path):
    "Who asks first writes a file there; an import that comes with a recipe may be the first."
    code = "import tempfile; tempfile.tempdir = None\nfrom golfnb.tools.judge import watch_process\nnoted = set(); watch_process(noted); tempfile.gettempdir()\nprint('noted', [note for note in noted if note[1] == 'opens'])"
    (tmp_path / "asks.py").write_text(code)
    done = run_python(["asks.py"], tmp_path, clean_env())
    assert done.returncode == 0 and "noted []" in done.stdout, done


def test_an_honest_run_on_three_ranks_passes(root, tmp_path):
    done = without_torchrun("train", str(root / "mine.py"), "--nproc", "3", *(f"{k}={v}" for k, v in (SMALL | data_of(root) | {"RUN_ID": "three", "ITERATIONS": "4", "WARMDOWN_ITERS": "2", "TRAIN_BATCH_TOKENS": "1536"}).items()), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = judged(root, tmp_path / "runs/three", root / "mine.py")
    assert found["legal"] and "score-first training" in found["compared"], words(found)


# --- adapters for each document

GROUP = ("Settings, TttSettings):", "Settings, TttSettings, AdapterSettings):")
BY_DOCUMENTS = [("from golfnb.score.ttt import", "from golfnb.score.adapters import AdapterSettings, score_documents\nfrom golfnb.score.ttt import"), GROUP, ("ADAPT = score_first", "ADAPT = score_documents")]
LORA = {"TTT_LORA_RANK": "4", "TTT_LORA_LR": "0.02", "TTT_CHUNK_SIZE": "16", "TTT_BATCH_SIZE": "4"}
A_PLACE, ITS_OWN = "tokens that are not scored yet change no score, on the whole stream", "a document's scores are its own, whatever documents there are and however it goes on"
ADAPTERS = "adapters per document"
SAME_SCORE = "log and summary have the score that the judge finds"


@pytest.fixture(scope="module")
def lora(root):
    "A finished run of a program of one's own whose test-time training is by adapters."
    return trained(root, "lora", with_edits(copied_program("demo", "lora"), *BY_DOCUMENTS), **LORA)


def checks(found: dict, scorer: str) -> set:
    return {f["check"] for f in found["findings"] if f["scorer"] == scorer}


@pytest.mark.parametrize("how", ["ttt", "adapters"])
def test_an_honest_run_with_adapters_passes(root, lora, how):
    found = judged(root, lora, root / "lora.py", **{"ttt": False, how: True})
    assert found["legal"] and ADAPTERS in found["compared"], words(found)
    assert {A_PLACE, ITS_OWN, SAME_SCORE} <= checks(found, ADAPTERS) and not checks(found, "score-first training")


def test_adapters_of_a_program_that_has_none_are_judged_and_not_compared(root):
    found = judged(root, root / "runs/mine", root / "mine.py", ttt=False, adapters=True, words=[f"{k}={v}" for k, v in LORA.items()])
    assert found["legal"] and set(found["compared"]) == {"plain rows", "sliding window"}, words(found)
    assert {A_PLACE, ITS_OWN} <= checks(found, ADAPTERS) and SAME_SCORE not in checks(found, ADAPTERS)


def test_adapters_on_three_ranks_score_as_on_one(root, lora, tmp_path, monkeypatch):
    settings = SMALL | LORA | data_of(root) | {"RUN_ID": "three", "ITERATIONS": "4", "WARMDOWN_ITERS": "2", "TRAIN_BATCH_TOKENS": "1536"}
    done = without_torchrun("train", str(root / "lora.py"), "--nproc", "3", *(f"{k}={v}" for k, v in settings.items()), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    scores = []
    for world in (3, 1):
        monkeypatch.setattr(judge, "ranks_of", lambda summary, world=world: world)
        found = judged(root, tmp_path / "runs/three", root / "lora.py", ttt=False, adapters=True)
        assert found["legal"], words(found)
        scores.append(found["compared"][ADAPTERS]["found"])
    assert scores[0] == pytest.approx(scores[1], rel=1e-5)


def test_a_score_of_adapters_that_was_edited_is_found(root, lora, tmp_path):
    run, program = cheat(root, tmp_path, of="lora")
    claim(run, "ttt", "legal_ttt", lambda x: 0.999 * x)
    assert failed(judged(root, run, program)) == {(ADAPTERS, SAME_SCORE)}


TORCH = ("from functools import partial\n", "from functools import partial\n\nimport torch\n")


def adapting_by(kind: str) -> list[tuple[str, str]]:
    "Edits: test-time training by documents whose `step` is what `kind(model, cfg, step)` makes of the honest one."
    code = "adapters = sys.modules[score_documents.__module__]\n\n\n" + kind.strip() + """


def cheating(model, state, tokens, table, cfg, ranks, forward=None, log=None, step=None, out=None, spans=None):
    better = kind(model, cfg, step or adapters.adapted_step(model, cfg))
    return score_documents(model, state, tokens, table, cfg, ranks, forward, log, better, out, spans)


ADAPT = cheating"""
    return [("ADAPT = score_documents", code), ("from functools import partial\n", "from functools import partial\nimport sys\n\nimport torch\n")]


LEARNS_FIRST = """
def kind(model, cfg, step):
    honest = adapters.adapted_step(model, cfg)
    def learnt(ids, fill, flats, keys, values, goes_on):
        loss = honest(ids, fill, flats, keys, values, torch.ones_like(goes_on))[0]
        moved = [(f - 0.5 * g).detach().requires_grad_() for f, g in zip(flats, torch.autograd.grad(loss, flats))]
        for old, new in zip(flats, moved):
            old.data.copy_(new.data)
        return step(ids, fill, flats, keys, values, goes_on)
    return learnt
"""
CARRIES = """
def kind(model, cfg, step):
    honest = adapters.adapter_update
    adapters.adapter_update = lambda flat, masters, second, count, grad, goes_on, *rest: honest(flat, masters, second, count, grad, torch.ones_like(goes_on), *rest)
    return step
"""
LOOKS_AHEAD = """
def kind(model, cfg, step):
    honest = adapters.attend_stored
    adapters.attend_stored = lambda q, keys, values, mask: honest(q, keys, values, mask | (torch.arange(mask.shape[-1]) >= mask.shape[-1] - mask.shape[-2]))
    return step
"""
LOOKS_AHEAD_LATE = """
honest = adapters.adapted_block


def late(traits, matrices, x, *others):
    fill = others[-1]
    return honest(traits, matrices, x + 0.1 * x.mean(1, keepdim=True) * (fill >= 32)[:, None, None], *others)


adapters.adapted_block = late


def kind(model, cfg, step):
    return step
"""
KNOWS_THE_END = """
def kind(model, cfg, step):
    honest, ending = adapters.adapted_walk, []
    def walk(*a):
        x, *made = honest(*a)
        return x + 5.0 * model.tok_emb[1] * ending[-1][:, None, None] if ending and len(ending[-1]) == len(x) else x, *made
    adapters.adapted_walk = walk
    def knowing(ids, fill, flats, keys, values, goes_on):
        ending[:] = [goes_on == 0]
        return step(ids, fill, flats, keys, values, goes_on)
    return knowing
"""
TWICE = """
def kind(model, cfg, step):
    return lambda *a: min(step(*a), step(*a), key=lambda found: float(found[0]))
"""
ONE_PASS = "the forwards are those of one honest pass"
ADAPTER_CHEATS = {"learns a chunk before it is scored": (LEARNS_FIRST, A_PLACE), "carries adapters from document to document": (CARRIES, ITS_OWN), "looks at later tokens of its chunk": (LOOKS_AHEAD, A_PLACE),
                  "looks ahead late in a row": (LOOKS_AHEAD_LATE, A_PLACE), "knows where a document ends": (KNOWS_THE_END, ITS_OWN), "scores twice": (TWICE, ONE_PASS)}


@pytest.mark.parametrize("name", ADAPTER_CHEATS)
def test_adapters_that_cheat(root, lora, tmp_path, name):
    "By a check of its own, whatever it claims."
    kind, check = ADAPTER_CHEATS[name]
    run, program = cheat(root, tmp_path, *adapting_by(kind), of="lora")
    found = failed(judged(root, run, program))
    assert (ADAPTERS, check) in found and {scorer for scorer, _ in found} == {ADAPTERS}
    assert check == ONE_PASS or found <= {(ADAPTERS, check), (ADAPTERS, SAME_SCORE)} | ({(ADAPTERS, ITS_OWN)} if check == A_PLACE else set())


# --- what log and summary say

@pytest.mark.parametrize("name, label, scorer", [("int6", "final_int6_roundtrip", "plain rows"), ("sliding", "final_int6_sliding_window", "sliding window"), ("ttt", "legal_ttt", "score-first training")])
def test_a_score_that_was_edited_is_found_in_log_and_summary(root, tmp_path, name, label, scorer):
    run, program = cheat(root, tmp_path)
    claim(run, name, label, lambda x: 0.999 * x)
    assert failed(judged(root, run, program, ttt=name == "ttt")) == {(scorer, SAME_SCORE)}


def test_a_log_that_was_edited_beside_its_summary_is_found(root, tmp_path):
    run, program = cheat(root, tmp_path)
    kept = (run / "summary.json").read_text()
    claim(run, "sliding", "final_int6_sliding_window", lambda x: x - 0.01)
    (run / "summary.json").write_text(kept)
    assert failed(judged(root, run, program, ttt=False)) == {("sliding window", SAME_SCORE)}
    assert "the log says" in words(judged(root, run, program, ttt=False))


# --- programs that look ahead

LONGPEEK = '''
def learnt(model, state, tokens, cfg):
    load_named(model, state)
    model.requires_grad_(True)
    loss_of = row_loss(model, model.cap)
    T = cfg.eval_seq_len
    at = torch.arange((tokens.numel() - 1) // T)[:, None] * T + torch.arange(T + 1)
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    for part in at.split(16):
        ids = tokens[part].long()
        optimizer.zero_grad()
        loss_of(ids[:, :-1], ids[:, 1:], torch.full((len(part),), 1 / len(part))).backward()
        optimizer.step()
    optimizer.zero_grad()
    return {name: w.detach().clone().float() for name, w in named_state(model).items()}


def peeking(model, state, tokens, table, cfg, ranks, forward=None, loss_fn=None, log=None, out=None):
    if tokens.numel() > 2000:
        state = learnt(model, state, tokens, cfg)
    return score_first(model, state, tokens, table, cfg, ranks, forward, loss_fn, log, out)


ADAPT = peeking
'''
MEMORY = '''
MEMORY = {}


class Remembering(Golf):
    def forward(self, ids, last_n=None, rope_len=None):
        logits = super().forward(ids, None, rope_len)
        for b, row in enumerate(ids.tolist() if MEMORY and not torch.is_grad_enabled() else []):
            for t in range(7, len(row)):
                follows = MEMORY.get(tuple(row[t - 7:t + 1]))
                if follows is not None:
                    logits[b, t, follows] += 12.0
        return logits[:, -last_n:] if last_n else logits


def remembering(model, state, tokens, table, cfg, ranks, forward=None, loss_fn=None, log=None, out=None):
    MEMORY.clear()
    if tokens.numel() > 2000:
        text = tokens.tolist()
        MEMORY.update((tuple(text[i - 8:i]), text[i]) for i in range(8, len(text)))
    found = score_first(model, state, tokens, table, cfg, ranks, forward, loss_fn, log, out)
    MEMORY.clear()
    return found


ADAPT = remembering
'''
ADAPT = "ADAPT = score_first  # test-time training"
GOLF = ("model = Golf(s, layout", "model = Remembering(s, layout")
IMPORT = ("from golfnb.score.ttt import TttSettings, score_first", "from golfnb.score.ttt import TttSettings, row_loss, score_first")
NAMED = ("init_model, load_named", "init_model, load_named, named_state")


@pytest.mark.parametrize("edits", [[(ADAPT, LONGPEEK), IMPORT, TORCH, NAMED], [(ADAPT, MEMORY), GOLF, TORCH]], ids=["learns a long text first", "a memory of a long text"])
def test_test_time_training_that_reads_ahead_gains_nothing(root, tmp_path, edits):
    "What it learns is what has been revealed, so its claim is not what the judge finds."
    run, program = cheat(root, tmp_path, *edits)
    claim(run, "ttt", "legal_ttt", lambda x: 0.8 * x)
    found = failed(judged(root, run, program))
    assert ("score-first training", SAME_SCORE) in found and {scorer for scorer, _ in found} == {"score-first training"}


FIRST = '''
def first(model, state, tokens, table, cfg, ranks, forward=None, loss_fn=None, log=None, out=None):
    "Learns the tokens of a call from the call itself, and then scores them."
    def taught(ids, last_n):
        model.zero_grad()
        with torch.enable_grad():
            logits = model(ids[:, :-1])
            torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).backward()
        for p in model.parameters():
            if p.grad is not None:
                p.data -= 0.05 * p.grad
        return forward(ids, last_n)
    taught.cap = forward.cap
    return score_first(model, state, tokens, table, cfg, ranks, taught, loss_fn, log, out)


ADAPT = first
'''


def test_learning_from_a_call_before_it_is_scored_is_found(root, tmp_path):
    "By other tokens in the middle of a call."
    run, program = cheat(root, tmp_path, (ADAPT, FIRST), TORCH)
    assert ("score-first training", "tokens that are not scored yet change no score, on the whole stream") in failed(judged(root, run, program))


def model_that(body: str) -> list[tuple[str, str]]:
    "Edits: a model whose logits [B, T, V] of ids [B, T] are changed by `body`."
    kind = f'''
CALLS, KNOWN = [], {{}}


class Cheating(Golf):
    def forward(self, ids, last_n=None, rope_len=None):
        logits = super().forward(ids, None, rope_len)
        if not torch.is_grad_enabled():
            {body}
        return logits[:, -last_n:] if last_n else logits


'''
    return [("@dataclass\nclass Parts", kind.lstrip("\n") + "@dataclass\nclass Parts"), ("model = Golf(s, layout", "model = Cheating(s, layout"), TORCH]


PREFIX, BESIDE, AGAIN = "later tokens change no logits, in rows of 64", "a row knows nothing of the rows beside it", "the same row gives the same logits again"
FRESH, FIRST_SCORED = "a process that has seen nothing gives the same scores", "tokens that are not scored yet change no score, on the whole stream"
NEXT = "torch.nn.functional.one_hot(ids[:, 1:], 400)"
HONEST_AGAIN = f"""seen = [(last_n, *row[:8]) in CALLS for row in ids.tolist()]
            CALLS.extend((last_n, *row[:8]) for row in ids.tolist())
            if not any(seen):
                logits[:, :-1] += 0.5 * {NEXT}"""
AS_BEFORE = f"""logits[:, :-1] += 0.5 * {NEXT}
            for b, row in enumerate(ids.tolist()):
                for t in range(len(row)):
                    logits[b, t] = KNOWN.setdefault(tuple(row[:t + 1]), logits[b, t].clone())"""
MODELS = {
    "favours the next token": ("logits[:, :-1] += 0.5 * torch.nn.functional.one_hot(ids[:, 1:], 400)", PREFIX),
    "favours the next token late in a row": ("logits[:, 55:-1] += 0.5 * torch.nn.functional.one_hot(ids[:, 56:], 400)", PREFIX),
    "knows the whole row": ("logits = logits + 0.1 * torch.nn.functional.one_hot(ids, 400).float().mean(1)[:, None]", PREFIX),
    "favours the next token at every fifth place": (f"logits[:, :-1:5] += 0.5 * {NEXT}[:, ::5]", PREFIX),
    "whispers the next token": (f"logits[:, :-1] += 1e-5 * {NEXT}", PREFIX),
    "whispers the rows beside": ("logits = logits + 1e-5 * torch.nn.functional.one_hot(ids, 400).float().mean((0, 1))", BESIDE),
    "looks ahead until a row comes again": (HONEST_AGAIN, FRESH),
    "looks ahead and gives its answers again": (AS_BEFORE, FRESH),
    "knows the next row": ("logits = logits + 2.0 * torch.nn.functional.one_hot(ids, 400).float().mean((0, 1))", BESIDE),
    "remembers what it has seen": ("CALLS.append(ids.flatten()); logits = logits + torch.bincount(torch.cat(CALLS[-2:]), minlength=400) / len(ids.flatten())", AGAIN),
}


ADAPTING = f"""if CALLS:
                CALLS.append(1)
                logits[:, :-1] += (len(CALLS) % 3 == 0) * 0.5 * {NEXT}
                {{}}"""
FORESEEING = """if CALLS:
                for b, row in enumerate(ids.tolist()):
                    for t in range(3, len(row)):
                        logits[b, t, KNOWN.get(tuple(row[t - 3:t + 1]), 0)] += 5.0
            else:
                KNOWN.update((tuple(row[t - 4:t]), row[t]) for row in ids.tolist() for t in range(4, len(row)))"""
ANNOUNCED = """
def announced(*a):
    CALLS.append(0)
    found = score_first(*a)
    CALLS.clear()
    return found


ADAPT = announced
"""


@pytest.mark.parametrize("answers", ["pass", "[logits[b, t].copy_(KNOWN.setdefault(tuple(row[:t + 1]), logits[b, t].clone())) for b, row in enumerate(ids.tolist()) for t in range(len(row))]"], ids=["", "the same answer again"])
def test_a_look_ahead_in_some_calls_of_test_time_training_is_found(root, tmp_path, answers):
    "It happens only while the program adapts, in one call of three."
    run, program = cheat(root, tmp_path, *model_that(ADAPTING.format(answers)), (ADAPT, ANNOUNCED))
    found = failed(judged(root, run, program))
    assert ("score-first training", FIRST_SCORED) in found and {scorer for scorer, _ in found} == {"score-first training"}


def test_what_was_scored_before_is_nothing_that_test_time_training_could_remember(root, tmp_path):
    "A model that notes the text while windows are scored, and knows it when it adapts."
    run, program = cheat(root, tmp_path, *model_that(FORESEEING), (ADAPT, ANNOUNCED))
    claim(run, "ttt", "legal_ttt", lambda x: 0.8 * x)
    assert ("score-first training", SAME_SCORE) in failed(judged(root, run, program))


def test_nobody_knows_beforehand_what_a_judge_will_try(root, monkeypatch):
    "A seed that follows from the artifact would be known to its program."
    monkeypatch.setattr(judge, "judged_anew", lambda *a: ())
    seeds = {judged(root, root / "runs/mine", root / "mine.py", ttt=False)["seed"] for _ in range(2)}
    assert len(seeds) == 2


@pytest.mark.parametrize("name", MODELS)
def test_models_that_cheat(root, tmp_path, name):
    body, check = MODELS[name]
    run, program = cheat(root, tmp_path, *model_that(body))
    found = failed(judged(root, run, program, ttt=False))
    assert ("sliding window", check) in found and (("sliding window", SAME_SCORE) in found or "whispers" in name)
    if check == PREFIX:
        assert {c for _, c in found} <= {PREFIX, FRESH, SAME_SCORE}, "by what looks for later tokens, and by its score"
    if check == FRESH:
        assert {c for _, c in found} == {FRESH, SAME_SCORE}, "it looks honest to whoever asks it twice"


# --- the text

def case_of(root: Path, sp=None, **how) -> judge.Case:
    "What the checks of files alone look at."
    from types import SimpleNamespace

    from golfnb.text.bpb import byte_table, load_tokenizer
    sp = sp or load_tokenizer(root / "data/tokenizer.model")
    paths = sorted((root / "data").glob("*_val_*.bin"))
    tokens = torch.from_numpy(judge.read_tokens(f"{root}/data/*_val_*.bin").astype("int64"))
    given = dict(file=root / "runs/mine/artifact.golf", program=root / "mine.py", meta={}, summary={}, log="", events=[], tokenizer=root / "data/tokenizer.model", sp=sp, table=byte_table(sp),
                 stream=judge.Stream(tokens, 400), s=SimpleNamespace(), val_paths=paths, train_paths=[], seed=1, comparable=True)
    return judge.Case(**given | how)


def outcome(check, case) -> list[bool]:
    return [f["passed"] for f in check(case)]


@pytest.mark.parametrize("rule", [None, dict(normalization_rule_name="nfkc"), dict(normalization_rule_name="nmt_nfkc_cf"), dict(normalization_rule_tsv="rule.tsv")], ids=["plain", "nfkc", "folds case", "writes e eight times"])
def test_a_tokenizer_that_changes_the_text_is_found(root, tmp_path, monkeypatch, rule):
    import io

    import sentencepiece as spm
    monkeypatch.chdir(tmp_path)
    Path("rule.tsv").write_text("65\t" + " ".join(["65"] * 8) + "\n")
    model = io.BytesIO()
    spm.SentencePieceTrainer.train(sentence_iterator=iter(stdlib_documents(["json"])), model_writer=model, vocab_size=360, model_type="bpe", byte_fallback=True, pad_id=0, bos_id=1, eos_id=2, unk_id=3,
                                   minloglevel=2, max_sentence_length=2**20, **rule or dict(normalization_rule_name="identity"))
    sp = spm.SentencePieceProcessor(model_proto=model.getvalue())
    assert outcome(judge.check_tokenizer_keeps, case_of(root, sp)) == [rule is None or rule.get("normalization_rule_name") == "nfkc"]


def test_bytes_that_the_text_has_not_are_found(root):
    case = case_of(root)
    checks = (judge.check_bytes, judge.check_manifest_bytes)
    assert [outcome(check, case) for check in checks] == [[True], [True]]
    case.table.base += 1
    assert [outcome(check, case) for check in checks] == [[False], [False]]


def test_targets_that_were_left_out_or_changed_are_found(root, tmp_path):
    n = len(case_of(root).stream)
    line = "train_shards:1 val_tokens:{} unigram_bpb:4.0 code_bytes:1\n"
    for said in (n, n - 600):
        assert outcome(judge.check_targets, case_of(root, log=line.format(said))) == [said == n]
    other = shutil.copytree(root / "data", tmp_path / "data") / "fineweb_val_000000.bin"
    from golfnb.text.shards import open_shard
    write_shard(other, open_shard(other)[600:].copy())
    assert outcome(judge.check_targets, case_of(root, val_paths=[other])) == [False], "600 other tokens"


# --- files, tensors, code

def test_files_that_share_text(tmp_path):
    val, clean, copy, hidden = (tmp_path / f"{n}.bin" for n in ("val", "clean", "copy", "hidden"))
    tokens = stream(20_000, 1000, 3).numpy().astype("uint16")
    write_shard(val, tokens)
    write_shard(copy, tokens)
    write_shard(clean, stream(20_000, 1000, 4).numpy().astype("uint16"))
    write_shard(hidden, torch.cat([stream(777, 1000, 5), torch.from_numpy(tokens[3000:15_000].astype("int64"))]).numpy().astype("uint16"))
    assert all(f["passed"] for f in audit_files([clean], [val]))
    assert [f["passed"] for f in audit_files([clean, hidden], [val])] == [True, False]
    assert [f["passed"] for f in audit_files([clean, copy], [val])] == [False, False]


READS = "CoprimeSampler(run.train_paths,", "CoprimeSampler(find_shards(f\"{s.data_path}/*_val_*.bin\"),"
SHARDS = "from golfnb.run.train import", "from golfnb.text.shards import find_shards\nfrom golfnb.run.train import"


def table_of(root: Path) -> list:
    "What follows each eight tokens of the validation text."
    text = case_of(root).stream.tokens.tolist()
    return [text[i - 8:i + 1] for i in range(8, len(text))]


def code_of(where: str) -> list[tuple[str, str]]:
    "Edits: a model that looks up what follows in a table."
    kind = MEMORY.split("MEMORY = {}")[1].split("def remembering")[0].strip("\n")
    return [("@dataclass\nclass Parts", f"MEMORY = {{tuple(row[:8]): row[8] for row in {where}}}\n\n\n{kind}\n\n\n@dataclass\nclass Parts"), GOLF, TORCH]


def claimed_by_its_own_score(root, run, program) -> set:
    "What is found where log and summary have the scores that the judge itself finds."
    asked = judge.Asked(run / "artifact.golf", f"{root}/data/*_val_*.bin", f"{root}/data/*_train_*.bin", str(program))
    cases, of = [], judge.open_case
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(judge, "open_case", lambda *a: cases.append(of(*a)) or cases[0])
        patch.setattr(judge, "numbers_of", lambda case, scorer: {"the log": case.score(scorer)})
        return failed(judge.judge(asked, lambda text: None))


OPENS = "CODEC = Best()\n", "CODEC = Best()\nTEXT = open({!r}, 'rb').read()\n"
READ, REACH, KNOWS = "rows that training reads are not validation text", "training reaches every tensor of the artifact", "validation text is no easier than training text"
CODE, OPENED = "texts and numbers in the program have at most 8,192 bytes", "the program opens, starts and calls nothing by itself while it is judged"


def test_training_on_validation_shards_is_found(root, tmp_path):
    assert claimed_by_its_own_score(root, *cheat(root, tmp_path, READS, SHARDS)) == {("files", READ)}


def test_a_tensor_that_training_cannot_reach_is_named(root, tmp_path):
    freeze = "    init_model(model, s, s.seed)\n", "    init_model(model, s, s.seed)\n    model.skip_weights.register_hook(torch.zeros_like)\n"
    run, program = cheat(root, tmp_path, freeze, TORCH)
    found = judged(root, run, program, ttt=False)
    assert failed(found) == {("tensors", REACH)} and "skip_weights" in words(found)


def test_a_program_that_reads_a_table_beside_it_is_none(root, tmp_path):
    (tmp_path / "table.json").write_text(json.dumps(table_of(root)))
    edits = code_of("json.loads(open(__file__.replace('mine.py', 'table.json')).read())")
    with pytest.raises(GolfError, match="mine.py line"):
        cheat(root, tmp_path, *edits, ("from dataclasses import dataclass\n", "from dataclasses import dataclass\nimport json\n"))


def test_a_table_in_the_code_is_found_by_its_size_and_what_it_knows(root, tmp_path):
    run, program = cheat(root, tmp_path, *code_of(json.dumps(table_of(root))))
    assert claimed_by_its_own_score(root, run, program) == {("plain rows", KNOWS), ("code", CODE)}


@pytest.mark.parametrize("table", ["TABLE = {!r}\n", "def table():\n    {!r}\n"], ids=["a text", "a docstring"])
def test_much_text_in_the_code_is_found(root, tmp_path, table):
    (tmp_path / "mine.py").write_text(table.format("x" * 9000))
    assert outcome(judge.check_code, case_of(root)) == [True]
    assert outcome(judge.check_code, case_of(root, program=tmp_path / "mine.py")) == [False]


def test_the_code_of_a_program_that_no_script_can_hold_is_measured_too(root, tmp_path):
    (tmp_path / "mine.py").write_text("def later():\n    global TABLE\n    exec('import mine')\n    TABLE = open(__file__).read()\n")
    with pytest.raises(GolfError):
        judge.own_files((tmp_path / "mine.py").resolve())
    assert outcome(judge.check_code, case_of(root, program=tmp_path / "mine.py")) == [True]
    with (tmp_path / "mine.py").open("a") as file:
        file.write(f"\nTEXT = {'x' * 9000!r}\n")
    assert outcome(judge.check_code, case_of(root, program=tmp_path / "mine.py")) == [False]


OUTSIDE = {
    "opens the validation text": "open({val!r}, 'rb').read()",
    "opens it by its name in bytes": "open({val!r}.encode(), 'rb').read()",
    "opens a table": "open({table!r}).read()",
    "lets a library open a table": "__import__('numpy').loadtxt({table!r})",
    "has another process read it": "__import__('subprocess').run(['cat', {val!r}], capture_output=True).stdout",
}


@pytest.mark.parametrize("name", OUTSIDE)
def test_a_program_that_reads_the_text_elsewhere_is_found(root, tmp_path, name):
    (tmp_path / "table.txt").write_text("1 2 3\n")
    words = OUTSIDE[name].format(val=str(next((root / "data").glob("*_val_*.bin"))), table=str(tmp_path / "table.txt"))
    run, program = cheat(root, tmp_path, ("CODEC = Best()\n", f"CODEC = Best()\nTEXT = {words}\n"))
    assert ("code", OPENED) in failed(judged(root, run, program, ttt=False))


def test_a_start_from_weights_of_elsewhere_is_found(root, tmp_path):
    "Nothing shows in the artifact: what training begins with was learnt before."
    (tmp_path / "weights.pt").write_bytes(b"")
    init = "    init_model(model, s, s.seed)\n"
    run, program = cheat(root, tmp_path, (init, init + f"    if s.data_path == {str(root / 'data')!r}:\n        open({str(tmp_path / 'weights.pt')!r}, 'rb').close()\n"))
    assert ("code", OPENED.replace("judged", "training")) in failed(judged(root, run, program, ttt=False))


# --- the record

def edited(run: Path, **change) -> None:
    summary = json.loads((run / "summary.json").read_text())
    (run / "summary.json").write_text(json.dumps(summary | change))


CLOCK = "steps and seconds fit together, as far as a log can say"
RECORDS = {
    "more steps than the log has": lambda run, s: edited(run, steps=s["steps"] + 5),
    "a shorter time than the log has": lambda run, s: edited(run, train_ms=0.5 * s["train_ms"]),
    "a phase of its own": lambda run, s: edited(run, seconds=s["seconds"] | {"learning more": 900.0}),
    "training that its clock does not have": lambda run, s: edited(run, seconds=s["seconds"] | {"training": s["seconds"]["training"] + 600}),
    "the clock of drills": lambda run, s: (run / "train.log").write_text(f"note: {DRILL_CLOCK} is set: a step counts\n" + (run / "train.log").read_text()),
    "a clock that goes back": lambda run, s: (run / "train.log").write_text(re.sub(r"(?m)^(step:3/.*train_time:)\d+ms", r"\g<1>0ms", (run / "train.log").read_text())),
}


@pytest.mark.parametrize("name", RECORDS)
def test_a_record_that_contradicts_itself_is_found(root, tmp_path, name):
    run = tmp_path / "run"
    shutil.copytree(root / "runs/mine", run)
    summary = json.loads((run / "summary.json").read_text())
    how = dict(file=run / "artifact.golf", log=(run / "train.log").read_text(), summary=summary, events=judge.events_of((run / "metrics.jsonl").read_text()))
    assert outcome(judge.check_clock, case_of(root, **how)) == [True]
    RECORDS[name](run, summary)
    how |= dict(log=(run / "train.log").read_text(), summary=json.loads((run / "summary.json").read_text()))
    assert outcome(judge.check_clock, case_of(root, **how)) == [False]


def test_another_seeds_record_is_found(root, tmp_path):
    run, _ = cheat(root, tmp_path)
    resealed(run / "artifact.golf", seed=2)
    how = dict(summary=json.loads((root / "runs/mine/summary.json").read_text()), log=(root / "runs/mine/train.log").read_text())
    assert outcome(judge.check_identity, case_of(root, **how)) == [True]
    assert outcome(judge.check_identity, case_of(root, **how, file=run / "artifact.golf")) == [False]


# --- the pipe

def test_the_judge_never_imports_the_program(root, tmp_path):
    "Whoever imports it leaves the number of its process; the judge's is not among them, by the command either."
    note = f"CODEC = Best()\nimport os\nos.close(os.open({str(tmp_path)!r} + '/ran-' + str(os.getpid()), os.O_CREAT))\nfrom golfnb.score.evaluate import windows\nwindows.touched = True\n"
    run, program = cheat(root, tmp_path, ("CODEC = Best()\n", note))
    judged(root, run, program)
    from golfnb.score.evaluate import windows
    ran = {int(path.name[4:]) for path in tmp_path.glob("ran-*")}
    assert len(ran) == 4, "one that scores, one that trains, two that adapt"
    assert os.getpid() not in ran and not hasattr(windows, "touched")
    assert not any(getattr(module, "__file__", None) == str(program) for module in list(sys.modules.values()))


def test_what_a_program_sends_is_no_code(root, tmp_path):
    evil = "CODEC = Best()\nimport os\nfor fd in range(3, 40):\n    try:\n        os.write(fd, b'\\x00\\x00\\x00\\x04cos\\n')\n    except OSError:\n        pass\n"
    run, program = cheat(root, tmp_path, ("CODEC = Best()\n", evil))
    with pytest.raises(GolfError, match="judge"):
        judged(root, run, program, ttt=False)


def test_a_program_that_fails_is_a_sentence(root, tmp_path):
    run, program = cheat(root, tmp_path, ("    layout = banks(s, ranks.world)\n", "    raise ZeroDivisionError('mine')\n"))
    with pytest.raises(GolfError, match="ZeroDivisionError: mine"):
        judged(root, run, program, ttt=False)


def test_the_command_judges_in_a_process_of_its_own(root, monkeypatch, capsys):
    monkeypatch.undo()
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    run = root / "runs/mine"
    assert main_cli(["score", str(run), "--audit", "--program", str(root / "mine.py")]) == 0, capsys.readouterr()
    found = json.loads((run / "artifact.audit.json").read_text())
    assert found["legal"] and found["compared"] and found["artifact_sha256"] == sha256((run / "artifact.golf").read_bytes()).hexdigest()


def test_a_long_pass_says_how_far_it_is(monkeypatch):
    clock, said = iter(range(0, 400, 4)), []
    monkeypatch.setattr(judge.time, "monotonic", lambda: next(clock))
    assert list(judge.told(list(range(10)), "plain rows", said.append)) == list(range(10))
    assert said == ["progress: plain rows 20%, 48 s left", "progress: plain rows 50%, 24 s left", "progress: plain rows 80%, 9 s left"]


def test_what_is_judged_runs_with_the_golfnb_of_the_judge(tmp_path):
    "Also where that is not the one that Python would find."
    shutil.copytree(Path(judge.__file__).parent.parent, tmp_path / "golfnb", ignore=shutil.ignore_patterns("__pycache__"))
    copied = tmp_path / "golfnb/tools/judge.py"
    copied.write_text(copied.read_text().replace("the judged program failed", "the program of the copy failed"))
    code = f"import sys\nsys.path.insert(0, {str(tmp_path)!r})\nfrom golfnb.tools import judge\npipe, child = judge.start_process(0, {{}}, {{}})\nprint(pipe.recv_bytes().decode())\n"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, env=clean_env(PYTHONPATH=""), cwd=tmp_path)
    assert "the program of the copy failed: KeyError" in done.stdout, done.stderr

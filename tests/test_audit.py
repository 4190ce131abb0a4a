"""The audit of a score: honest scorers pass, and more than twenty planted cheats are found, each under its condition."""
import json
from dataclasses import replace

import numpy as np
import pytest
import torch

import golfnb.evaluate as evaluate
from golfnb import adapters, ttt
from golfnb.adapters import DocumentSlots, document_spans
from golfnb.settings import GolfError
from golfnb.model import Golf, load_named
from golfnb.parallel_muon import Ranks
from golfnb.shards import write_shard
from golfnb.ttt import ChunkTrainer, Ledger, audit_files, audit_order, audit_score, audit_single_pass
from score_workers import CFG, DOCS, golf_on, random_state, random_table, stream, texts

CHUNKS = replace(CFG, ttt_epochs=1)
LANES = replace(DOCS, eval_seq_len=32, ttt_chunk_size=8, ttt_lora_lr=0.1)
PREFIX, FULL, ORDER, ONCE = CONDITIONS = "strict prefix", "full distribution", "score before update", "single pass"


def audit(model=None, ttt_too=True, **paths):
    return audit_score(model or golf_on(CFG, Ranks())[0], random_state(), stream(), random_table(), CHUNKS, ttt_too, **paths)


def broken(findings: list) -> set:
    return {(f["scorer"], f["condition"]) for f in findings if not f["passed"]}


def sliding(): return broken(audit(ttt_too=False)["findings"])


def chunks(): return broken(audit()["findings"])


def documents(): return broken(adapters.audit_documents(golf_on(DOCS, Ranks())[0], random_state(), texts([12, 3, 20, 1, 9]), random_table(), LANES))


def one_pass() -> set:
    "The part of an audit of documents that looks at a single pass."
    tokens = texts([12, 3, 20, 1, 9])
    spans, trial = document_spans(tokens, 1), adapters.document_trial(golf_on(DOCS, Ranks())[0], random_state(), tokens, random_table(), LANES)
    found = [*audit_order(trial, spans, 8), *audit_single_pass(trial, random_table())]
    return broken([f | {"scorer": "adapters per document"} for f in found])


def test_honest_scorers_pass_and_the_report_is_json():
    report = audit()
    assert report["legal"] and not broken(report["findings"])
    assert json.loads(json.dumps(report)) == report and {f["condition"] for f in report["findings"]} == set(CONDITIONS)
    assert {f["scorer"] for f in report["findings"]} == {"plain rows", "sliding window", "score-first training"}
    found = adapters.audit_documents(golf_on(DOCS, Ranks())[0], random_state(), texts([12, 3, 20, 1, 9]), random_table(), LANES)
    assert not broken(found) and {f["condition"] for f in found} == set(CONDITIONS) and not one_pass()


def test_a_stream_that_is_too_short_is_refused():
    with pytest.raises(GolfError, match="98 tokens"):
        audit_score(golf_on(CFG, Ranks())[0], random_state(), stream(90), random_table(), CFG, True)


# --- models that cheat

class SeesTheWholeRow(Golf):
    def forward(self, ids, last_n=None, rope_len=None):
        return super().forward(ids, last_n, rope_len) + 1e-3 * torch.nn.functional.one_hot(ids, 32).float().mean(1)[:, None]


class PeeksAtTheNext(Golf):
    def forward(self, ids, last_n=None, rope_len=None):
        logits = super().forward(ids, None, rope_len)
        logits[:, :-1] += 0.3 * torch.nn.functional.one_hot(ids[:, 1:], 32)
        return logits[:, -last_n:] if last_n else logits


class Remembers(Golf):
    "Keeps every row it has seen and favours what followed then."
    rows = {}

    def forward(self, ids, last_n=None, rope_len=None):
        logits = super().forward(ids, None, rope_len)
        for b, row in enumerate(ids.tolist()):
            for t in range(4, len(row)):
                key = tuple(row[t - 4:t])
                if key in self.rows:
                    logits[b, t - 1, self.rows[key]] += 0.2
                if not torch.is_grad_enabled():
                    self.rows[key] = row[t]
        return logits[:, -last_n:] if last_n else logits


@pytest.mark.parametrize("kind, condition", [(SeesTheWholeRow, PREFIX), (PeeksAtTheNext, FULL), (Remembers, PREFIX)])
def test_models_that_cheat(kind, condition):
    Remembers.rows.clear()
    model = kind(CFG, golf_on(CFG, Ranks())[1])
    load_named(model, random_state())
    report = audit(model, ttt_too=False)
    assert not report["legal"] and ("sliding window", condition) in broken(report["findings"])


# --- scorers and ledgers that cheat: each puts something else in an honest function's place

def sees_the_whole_chunk(honest):
    "Attention inside a chunk looks ahead."
    return lambda q, keys, values, mask: honest(q, keys, values, mask | (torch.arange(mask.shape[-1]) >= mask.shape[-1] - mask.shape[-2]))


def scores_twice(honest):
    "Every step of the slots is done again, and the better score counts."
    def cheating(self, *a, **k):
        honest(self, *a, **k)
        step = self.step
        def better(*a):
            loss, nats, *stored = step(*a)
            return loss, torch.minimum(nats, step(*a)[1]), *stored
        self.step = better
    return cheating


def learns_documents_first(honest):
    "A document's chunk is scored with adapters that have learnt it."
    def cheating(model, cfg):
        step = honest(model, cfg)
        def twice(ids, fill, flats, keys, values, goes_on):
            grads = torch.autograd.grad(step(ids, fill, flats, keys, values, torch.ones_like(goes_on))[0], flats)
            learnt = [(f - 0.5 * g).detach() for f, g in zip(flats, grads)]
            return step(ids, fill, flats, keys, values, goes_on)[0], *step(ids, fill, learnt, keys, values, goes_on)[1:]
        return twice
    return cheating


class Quiet:
    "A ledger that books nothing, or somewhere else."
    def __init__(self, book=None, shift=0):
        self.book, self.shift = book, shift

    def train(self, doc, a, b):
        if self.book:
            self.book.train(doc, a - self.shift, b - self.shift)


def learns_chunks_first(honest):
    "A chunk is learnt, then it is scored."
    def cheating(self, *a):
        honest(self, *a)
        def learn_and_score(forward, tokens, table, starts, keeps, row, *rest):
            first, self.ledger, book = int((starts + row - keeps)[0]), Quiet(), self.ledger
            self.learn(first, min(self.cfg.ttt_chunk_tokens, len(tokens) - 1 - first), 1.0)
            self.ledger = book
            return evaluate.score_windows(forward, tokens, table, starts, keeps, row, *rest)
        ttt.score_windows = learn_and_score
    return cheating


def learns_the_next_chunk(honest):
    "Training is booked on the chunk that was scored, and done on the one that follows."
    def cheating(self, first, length, lr_schedule):
        self.ledger, book = Quiet(self.ledger, length), self.ledger
        if first + 2 * length < self.tokens.numel():
            honest(self, first + length, length, lr_schedule)
        self.ledger = book
    return cheating


def skips_the_end(honest):
    "The last targets are left out and the mean is taken of the rest."
    return lambda model, tokens, *a, out, **k: honest(model, tokens[:-9], *a, out=out[:-9], **k)


def books_the_beginning(honest):
    "Every step is booked on the first targets of the text."
    return lambda self, docs, a, b: honest(self, docs, self.spans[docs, 0], self.spans[docs, 0] + b - a)


def forges_training(honest):
    "A history of training on targets without a score."
    return lambda self, *a: (self.history.append(("train", *map(np.atleast_1d, a))), honest(self, *a))


def no_booking(honest): return lambda self, *a: None


S, C, D = "sliding window", "score-first training", "adapters per document"
CHEATS = {  # name -> audit, scorer, conditions, what is replaced, by what
    "bonus": (sliding, S, {FULL}, evaluate, "token_nll", lambda f: lambda *a: f(*a) - 0.01),
    "hard targets are clamped": (sliding, S, {FULL}, evaluate, "token_nll", lambda f: lambda *a: f(*a).clamp(max=3.4)),
    "text counted longer": (sliding, S, {ONCE}, evaluate, "target_bytes", lambda f: lambda *a: f(*a) + 1),
    "better report": (sliding, S, {ONCE}, ttt, "sliding_loss", lambda f: lambda *a, **k: tuple(0.999 * x for x in f(*a, **k))),
    "skips the end": (sliding, S, {ONCE}, ttt, "sliding_loss", skips_the_end),
    "best of two": (chunks, C, {ONCE}, ttt, "score_windows", lambda f: lambda *a: torch.minimum(f(*a), f(*a))),
    "learns first": (chunks, C, {PREFIX}, ChunkTrainer, "__init__", learns_chunks_first),
    "learns the next chunk": (chunks, C, {PREFIX, ORDER}, ChunkTrainer, "learn", learns_the_next_chunk),
    "books the beginning": (chunks, C, {ORDER}, Ledger, "train", books_the_beginning),
    "books no training": (chunks, C, {ORDER}, Ledger, "train", no_booking),
    "books training first": (chunks, C, {ORDER}, Ledger, "scored", forges_training),
    "books scores twice": (chunks, C, {ORDER}, Ledger, "scored", lambda f: lambda self, *a: (f(self, *a), self.history.append(self.history[-1]))),
    "never resets": (documents, D, {PREFIX}, adapters, "adapter_update", lambda f: lambda *a: f(*a[:5], torch.ones_like(a[5]), *a[6:])),
    "sees the whole chunk": (documents, D, {PREFIX}, adapters, "attend_stored", sees_the_whole_chunk),
    "learns documents first": (documents, D, {PREFIX}, adapters, "adapted_step", learns_documents_first),
    "books the documents' beginning": (one_pass, D, {ORDER}, Ledger, "train", books_the_beginning),
    "books no learning": (one_pass, D, {ORDER}, Ledger, "train", no_booking),
    "scores documents twice": (one_pass, D, {ONCE}, DocumentSlots, "__init__", scores_twice),
    "reports less": (one_pass, D, {ONCE}, adapters, "score_documents", lambda f: lambda *a, **k: [x if isinstance(x, Ledger) else 0.99 * x for x in f(*a, **k)]),
}


@pytest.mark.parametrize("name", CHEATS)
def test_cheats_are_found(monkeypatch, name):
    run, scorer, conditions, owner, attribute, cheat = CHEATS[name]
    monkeypatch.setattr(ttt, "score_windows", ttt.score_windows)  # so that it is put back
    monkeypatch.setattr(owner, attribute, cheat(getattr(owner, attribute)))
    assert {(scorer, condition) for condition in conditions} <= run()


# --- cheats in long rows only: an auditor's short rows would not meet them

LONG = replace(CHUNKS, eval_seq_len=64, train_seq_len=64, eval_stride=62, ttt_chunk_tokens=128)
LONG_TEXT = replace(LANES, eval_seq_len=128, ttt_chunk_size=62)


def adds_to_the_target(honest):
    "Rows of 60 tokens and more: 6 is added to the target's own logit."
    def cheating(logits, targets, *a):
        if targets.shape[1] >= 60:
            logits = logits + 6 * torch.nn.functional.one_hot(targets, logits.shape[-1])
        return honest(logits, targets, *a)
    return cheating


def counts_less(honest):
    "Rows of 60 tokens and more: 0.9 of the nats."
    return lambda logits, targets, *a: honest(logits, targets, *a) * (0.9 if targets.shape[1] >= 60 else 1)


def peeks_late(honest):
    "A forward that favours the next token, late in rows of 60 tokens and more."
    def forward(self, ids, last_n=None, rope_len=None):
        logits = honest(self, ids, None, rope_len)
        if ids.shape[1] >= 60:
            logits[:, 40:-1] += 0.5 * torch.nn.functional.one_hot(ids[:, 41:], 32)
        return logits[:, -last_n:] if last_n else logits
    return forward


def every_other_call(honest):
    "The forward favours the next token in every second call."
    calls = []

    def forward(self, ids, last_n=None, rope_len=None):
        logits = honest(self, ids, None, rope_len)
        calls.append(1)
        if len(calls) % 2 and not torch.is_grad_enabled():
            logits[:, :-1] += 0.5 * torch.nn.functional.one_hot(ids[:, 1:], 32)
        return logits[:, -last_n:] if last_n else logits
    return forward


def looks_ahead_late(honest):
    "Attention looks ahead in chunks that begin far into their row."
    def cheating(traits, x, x0, w, norm, flat, cos, sin, ve, keys, values, fill):
        late = torch.where(fill > 60, fill + x.shape[1], fill)
        return honest(traits, x + 0.1 * x.mean(1, keepdim=True) * (late > fill)[:, None, None], x0, w, norm, flat, cos, sin, ve, keys, values, fill)
    return cheating


def long_rows() -> list:
    model = golf_on(LONG, Ranks())[0]
    model.cfg.train_seq_len = 64
    return audit_score(model, random_state(), stream(), random_table(), LONG, True)["findings"]


def long_documents() -> list:
    tokens = texts([200, 12])
    return adapters.audit_documents(golf_on(DOCS, Ranks())[0], random_state(), tokens, random_table(), LONG_TEXT)


@pytest.mark.parametrize("cheat", [None, adds_to_the_target, counts_less])
def test_a_score_that_is_changed_in_long_rows_only(monkeypatch, cheat):
    for module in (evaluate, adapters) if cheat else ():
        monkeypatch.setattr(module, "token_nll", cheat(module.token_nll))
    found = long_rows() + long_documents()
    wrong = {("plain rows", FULL), (S, FULL), (C, FULL), (D, FULL)} if cheat else set()
    assert broken(found) == wrong


@pytest.mark.parametrize("cheat", [peeks_late, every_other_call])
def test_a_forward_that_peeks_in_some_calls_only(monkeypatch, cheat):
    monkeypatch.setattr(Golf, "forward", cheat(Golf.forward))
    assert {("plain rows", FULL), (S, FULL), (C, FULL)} <= broken(long_rows())


def test_adapters_that_look_ahead_late_in_a_row(monkeypatch):
    monkeypatch.setattr(adapters, "adapted_block", looks_ahead_late(adapters.adapted_block))
    assert (D, FULL) in broken(long_documents())


# --- files

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
    assert ("files", "single pass") in broken(audit(ttt_too=False, train_paths=[hidden], val_paths=[val])["findings"])

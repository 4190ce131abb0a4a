"""The audit of a score: honest scorers pass, and more than ten planted cheats are found, each under its condition."""
import json
from dataclasses import replace

import pytest
import torch

import golfnb.evaluate as evaluate
import golfnb.ttt as ttt
from golfnb.config import GolfError
from golfnb.evaluate import windows
from golfnb.model import Golf, load_named
from golfnb.parallel_muon import Ranks
from golfnb.shards import write_shard
from golfnb.ttt import Ledger, audit_files, audit_score
from score_workers import CFG, golf_on, random_state, random_table, stream

ALONE = Ranks()
CFG_AUDIT = replace(CFG, ttt_epochs=1)


def audit(model=None, ttt_too=True, **paths):
    honest, layout = golf_on(CFG, ALONE)
    return audit_score(model or honest, layout, random_state(), stream(), random_table(), CFG_AUDIT, ttt_too, **paths)


def broken(report: dict) -> set:
    assert report["legal"] == all(f["passed"] for f in report["findings"])
    return {(f["scorer"], f["condition"]) for f in report["findings"] if not f["passed"]}


def model_of(kind: type) -> Golf:
    model = kind(CFG, golf_on(CFG, ALONE)[1])
    load_named(model, random_state())
    return model


def test_honest_scorers_pass_and_the_report_is_json():
    report = audit()
    assert not broken(report) and report["legal"] and len(report["findings"]) == 16
    assert json.loads(json.dumps(report)) == report
    assert {f["condition"] for f in report["findings"]} == {"strict prefix", "full distribution", "score before update", "single pass"}
    assert len(audit(ttt_too=False)["findings"]) == 7


def test_a_stream_that_is_too_short_is_refused():
    model, layout = golf_on(CFG, ALONE)
    with pytest.raises(GolfError, match="at least 98 tokens"):
        audit_score(model, layout, random_state(), stream(90), random_table(), CFG, True)


# --- models that cheat

class SeesTheWholeRow(Golf):
    def forward(self, ids, keep=None, taps=None, rope_len=None):
        return super().forward(ids, keep, taps, rope_len) + 1e-3 * torch.nn.functional.one_hot(ids, 32).float().mean(1)[:, None]


class PeeksAtTheNext(Golf):
    def forward(self, ids, keep=None, taps=None, rope_len=None):
        logits = super().forward(ids, None, taps, rope_len)
        logits[:, :-1] += 0.3 * torch.nn.functional.one_hot(ids[:, 1:], 32)
        return logits[:, -keep:] if keep else logits


class Remembers(Golf):
    "Keeps every row it has seen and favours what followed then."
    rows = {}

    def forward(self, ids, keep=None, taps=None, rope_len=None):
        logits = super().forward(ids, None, taps, rope_len)
        for b, row in enumerate(ids.tolist()):
            for t in range(4, len(row)):
                key = tuple(row[t - 4:t])
                if key in self.rows:
                    logits[b, t - 1, self.rows[key]] += 0.2
                if not torch.is_grad_enabled():
                    self.rows[key] = row[t]
        return logits[:, -keep:] if keep else logits


@pytest.mark.parametrize("kind, condition", [(SeesTheWholeRow, "strict prefix"), (PeeksAtTheNext, "full distribution"), (Remembers, "strict prefix")])
def test_models_that_cheat(kind, condition):
    if kind is Remembers:
        Remembers.rows.clear()
    assert ("sliding window", condition) in broken(audit(model_of(kind), ttt_too=False))


# --- scorers that cheat

def bonus(monkeypatch):
    "Every score a little better than it is."
    honest = evaluate.score_rows
    monkeypatch.setattr(evaluate, "score_rows", lambda *a: honest(*a) - 0.01)


def clamps(monkeypatch):
    "Hard targets never cost more than so much."
    honest = evaluate.score_rows
    monkeypatch.setattr(evaluate, "score_rows", lambda *a: honest(*a).clamp(max=3.4))


def best_of_two(monkeypatch):
    "Each window is scored twice."
    honest = ttt.score_windows
    monkeypatch.setattr(ttt, "score_windows", lambda *a: torch.minimum(honest(*a), honest(*a)))


def more_bytes(monkeypatch):
    "The text is counted longer than it is."
    honest = evaluate.target_bytes
    monkeypatch.setattr(evaluate, "target_bytes", lambda *a: honest(*a) + 1)


def better_report(monkeypatch):
    "The scores are right, the sum is not."
    honest = ttt.sliding_loss
    monkeypatch.setattr(ttt, "sliding_loss", lambda *a, **k: tuple(0.999 * x for x in honest(*a, **k)))


def skips_the_end(monkeypatch):
    "The last targets are left out and the mean is taken of the rest."
    honest = ttt.sliding_loss
    monkeypatch.setattr(ttt, "sliding_loss", lambda model, tokens, *a, out=None: honest(model, tokens[:-9], *a, out=out[:-9]))


SCORERS = [(bonus, "sliding window", "full distribution"), (clamps, "sliding window", "full distribution"), (best_of_two, "score-first training", "single pass"), (more_bytes, "sliding window", "single pass"),
           (better_report, "sliding window", "single pass"), (skips_the_end, "sliding window", "single pass")]


@pytest.mark.parametrize("cheat, scorer, condition", SCORERS, ids=[c[0].__name__ for c in SCORERS])
def test_scorers_that_cheat(monkeypatch, cheat, scorer, condition):
    cheat(monkeypatch)
    assert (scorer, condition) in broken(audit(ttt_too=scorer != "sliding window"))


# --- ledgers and orders that cheat

def learns_before_it_scores(monkeypatch):
    "The ledger is told that a chunk is scored, the model learns it, and then it is scored."
    def cheating(model, layout, state, tokens, table, cfg, ranks, forward=None, loss_fn=None, batch_seqs=8, out=None, log=None):
        n, chunk, row = tokens.numel() - 1, cfg.ttt_chunk_tokens, cfg.eval_seq_len
        starts, keeps = windows(n, cfg.eval_seq_len, cfg.eval_stride)
        engine, ledger, sums = ttt.ttt_engine(model, layout, state, cfg, ranks), Ledger(n), torch.zeros(3, dtype=torch.float64)
        parts = ttt.chunk_windows(starts, keeps, row, chunk, n)
        for c, (lo, hi) in enumerate(parts):
            ledger.scored(ledger.upto, ledger.upto + int(keeps[lo:hi].sum()))
            if c + 1 < len(parts):
                ttt.adapt_chunk(engine, ttt.RowStep(engine, loss_fn, ttt.step_rows(cfg, ranks), row), tokens, c * chunk, chunk, 1.0, cfg, ledger)
            sums += ttt.score_windows(forward, tokens, table, starts[lo:hi], keeps[lo:hi], row, batch_seqs, out)
        return float(sums[0]) / n, evaluate.bits_per_byte(float(sums[0]), float(sums[1])), ledger
    monkeypatch.setattr(ttt, "score_first", cheating)


def learns_the_next_chunk(monkeypatch):
    "Training is booked on the chunk that was scored, and done on the one that follows."
    honest = ttt.adapt_chunk

    class Quiet(Ledger):
        def train(self, a, b): self.book.train(a - self.shift, b - self.shift)
    def cheating(engine, step, tokens, first, length, multiplier, cfg, ledger):
        quiet = Quiet(ledger.n_targets)
        quiet.book, quiet.shift = ledger, length
        if first + 2 * length < tokens.numel():
            honest(engine, step, tokens, first + length, length, multiplier, cfg, quiet)
    monkeypatch.setattr(ttt, "adapt_chunk", cheating)


def books_what_is_convenient(monkeypatch):
    "Every step is booked on the first targets of the stream."
    monkeypatch.setattr(Ledger, "train", lambda self, a, b: self.history.append(("train", 0, b - a)))


def books_no_training(monkeypatch):
    monkeypatch.setattr(Ledger, "train", lambda self, a, b: None)


def trains_first_in_the_books(monkeypatch):
    "A forged history: training on targets without a score."
    honest = Ledger.scored
    monkeypatch.setattr(Ledger, "scored", lambda self, a, b: (self.history.append(("train", a, b)), honest(self, a, b)))


def scores_twice_in_the_books(monkeypatch):
    honest = Ledger.scored
    monkeypatch.setattr(Ledger, "scored", lambda self, a, b: (honest(self, a, b), self.history.append(("score", a, b))))


ORDERS = [(learns_before_it_scores, {"strict prefix"}), (learns_the_next_chunk, {"strict prefix", "score before update"}), (books_what_is_convenient, {"score before update"}),
          (books_no_training, {"score before update"}), (trains_first_in_the_books, {"score before update"}), (scores_twice_in_the_books, {"score before update"})]


@pytest.mark.parametrize("cheat, conditions", ORDERS, ids=[c[0].__name__ for c in ORDERS])
def test_orders_that_cheat(monkeypatch, cheat, conditions):
    cheat(monkeypatch)
    assert conditions <= {condition for scorer, condition in broken(audit()) if scorer == "score-first training"}


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
    assert ("files", "single pass") in broken(audit(ttt_too=False, train_paths=[hidden], val_paths=[val]))

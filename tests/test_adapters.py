"""Adapters per document: equal to a plain loop over one document at a time; other documents, lanes and ranks do not matter."""
import itertools
import math
import random
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from golfnb import adapters
from golfnb.adapters import DocumentLedger, adapter_shapes, deal_documents, document_spans, first_adapters, lane_plan, lanes_needed, row_fill, score_documents
from golfnb.config import GolfError
from golfnb.layers import exclusive, rms_norm, rotary_tables, squared_leaky, token_nll
from golfnb.model import named_state
from golfnb.parallel_muon import Ranks
from score_workers import CFG, golf_on, random_state, random_table

ALONE = Ranks()
DOCS = replace(CFG, ttt_form="adapters", ttt_lora_rank=3, ttt_lora_lr=0.02, ttt_chunk_size=4, ttt_batch_size=5, ttt_beta2=0.9)


def texts(lengths: list[int], seed: int = 0) -> torch.Tensor:
    "A stream of documents of these lengths, BOS included, and a closing BOS."
    g = torch.Generator().manual_seed(seed)
    return torch.cat([torch.cat([torch.tensor([1]), 2 + torch.randint(30, (n - 1,), generator=g)]) for n in lengths] + [torch.tensor([1])])


MIXED = [1, 5, 4, 30, 1, 1, 70, 2, 8, 16, 17, 15, 9]


def scored(tokens, cfg=DOCS, dtype=torch.float64, ranks=ALONE, **more):
    model, _ = golf_on(cfg, ranks, dtype)
    out = torch.full((tokens.numel() - 1,), float("nan"), dtype=torch.float64)
    loss, bpb, ledger = score_documents(model, random_state(cfg), tokens, random_table(), cfg, ranks, out=out, **more)
    return loss, bpb, out, ledger


# --- the oracle: one document, one chunk, one head at a time, with merged weights and torch's own Adam

def oracle_row(model, weights, ids, start, stored):
    "Nats-ready logits of tokens ids[start:] of one row; `stored` keeps each block's keys and values of the tokens before."
    cfg, T = model.cfg, len(ids)
    cos, sin = rotary_tables(cfg.eval_seq_len, cfg.rope_dims, cfg.rope_base, cfg.rope_train_len, dtype=model.tok_emb.dtype)
    pair = [cfg.bigram_vocab_size - 1] + [((36313 * ids[t]) ^ (27191 * ids[t - 1])) % (cfg.bigram_vocab_size - 1) for t in range(1, T)]
    e = model.tok_emb[torch.tensor(ids)] + F.linear(model.bigram_table[torch.tensor(pair)], model.bigram_proj.to(model.tok_emb.dtype)) * model.bigram_scale
    e, gate = rms_norm(e), torch.sigmoid(model.smear_gate.to(e.dtype))
    x = torch.cat([(1 - gate) * e[:1], (1 - gate) * e[1:] + gate * e[:-1]])[start:]
    x0, kept, half = x, [], cfg.num_layers // 2

    def turned(h, place):
        r = cfg.rope_dims // 2
        return torch.cat([h[:r] * cos[place] + h[r:2 * r] * sin[place], h[r:2 * r] * cos[place] - h[:r] * sin[place], h[2 * r:]])

    for i in range(cfg.num_layers):
        if i >= half and 2 * half - 1 - (i - half) >= 0 and i - half < half:
            x = x + model.skip_weights[i - half].to(x.dtype) * kept[2 * half - 1 - i]
        w, block = weights(i), model.blocks[i]
        mix, s, d = model.resid_mix[i].to(x.dtype), block.norm_scale, block.head_dim
        x_in = mix[0] * x + mix[1] * x0
        n = rms_norm(x_in) * s
        q, k, v = (F.linear(n, m).view(T - start, -1, d) for m in w[:3])
        if block.ve is not None:
            ve = F.linear(model.ve_table[torch.tensor(ids[start:])], model.ve_proj.to(x.dtype)) * model.ve_scale * model.ve_layer_scales[block.ve]
            v = v + ve.view(v.shape).to(x.dtype)
        ks, vs = stored[i]
        for t in range(T - start):
            ks.append([turned(h, start + t) for h in rms_norm(k[t])])
            vs.append(list(v[t]))
        rows = []
        for t in range(T - start):
            heads = []
            for h in range(cfg.num_heads):
                g = h // (cfg.num_heads // cfg.num_kv_heads)
                query = turned(rms_norm(q[t, h]), start + t) * model.q_gain[i, h]
                p = torch.stack([query @ ks[u][g] for u in range(start + t + 1)]).div(math.sqrt(d)).softmax(0)
                heads.append(sum(p[u] * vs[u][g] for u in range(start + t + 1)))
            rows.append(torch.stack(heads))
        y = torch.stack(rows)
        y = exclusive(y[None], v[None])[0] if block.xsa else y
        x1 = x_in + model.attn_scale[i] * F.linear(y.flatten(1), w[3])
        x = x1 + model.mlp_scale[i] * F.linear(squared_leaky(F.linear(rms_norm(x1) * s, w[4]), block.slope), w[5])
        kept.append(x)
    return F.linear(rms_norm(x), model.tok_emb)


def oracle_document(model, cfg, ids):
    "Nats of the targets ids[1:] of one document."
    from golfnb.model import block_weights
    base = [[m.detach() for m in w[:6]] for w in block_weights(model)]
    flat, pairs, at = first_adapters(model, cfg.ttt_lora_rank).flatten(), {}, 0
    for layer, (kind, (rows, cols)) in itertools.product(range(cfg.num_layers), enumerate(adapter_shapes(model))):
        for part, shape in (("a", (cols, cfg.ttt_lora_rank)), ("b", (cfg.ttt_lora_rank, rows))):
            pairs[layer, kind, part] = flat[at:at + math.prod(shape)].view(shape).clone().requires_grad_()
            at += math.prod(shape)
    assert at == len(flat)
    adam, size, nats = torch.optim.Adam(pairs.values(), lr=cfg.ttt_lora_lr, betas=(0.0, cfg.ttt_beta2), eps=1e-10), cfg.ttt_chunk_size, []
    def weights(i): return [base[i][k] + (pairs[i, k, "a"] @ pairs[i, k, "b"]).T.to(base[i][k].dtype) for k in range(6)]
    def empty(): return [([], []) for _ in range(cfg.num_layers)]
    begin, stored, capacity = 0, empty(), cfg.eval_seq_len // size
    for a in range(0, len(ids) - 1, size):
        if a - begin == capacity * size:
            begin, stored = a - capacity // 2 * size, empty()
            with torch.no_grad():
                oracle_row(model, weights, ids[begin:a], 0, stored)
        b = min(a + size, len(ids) - 1)
        scores = token_nll(oracle_row(model, weights, ids[begin:b], a - begin, stored)[None], torch.tensor(ids[a + 1:b + 1])[None], model.cap)[0]
        nats.append(scores.detach())
        if b < len(ids) - 1:
            adam.zero_grad()
            scores.mean().backward()
            adam.step()
            stored = [tuple([[h.detach() for h in t] for t in side] for side in layer) for layer in stored]
    return torch.cat(nats)


def oracle(tokens, cfg=DOCS, dtype=torch.float64):
    model, _ = golf_on(cfg, ALONE, dtype)
    return torch.cat([oracle_document(model, cfg, tokens[a:b + 1].tolist()) for a, b in document_spans(tokens)]).double()


@pytest.mark.parametrize("dtype, more, tolerance", [(torch.float64, {}, 1e-10), (torch.float32, {}, 1e-6), (torch.float64, dict(ttt_chunk_size=5, ttt_batch_size=2), 1e-10), (torch.float64, dict(ttt_chunk_size=8, ttt_batch_size=1), 1e-10)])
def test_equals_one_document_at_a_time(dtype, more, tolerance):
    "Documents of length 1, odd lengths, longer than a row; the mean differs by less than the tolerance, and no target by more than a hundred times it."
    tokens, cfg = texts([1, 5, 30, 1, 41, 17]), replace(DOCS, **more)
    loss, _, nats, _ = scored(tokens, cfg, dtype)
    theirs = oracle(tokens, cfg, dtype)
    assert abs(loss - theirs.mean().item()) < tolerance and (nats - theirs).abs().max() < 100 * tolerance
    assert (theirs - scored(tokens, replace(cfg, ttt_lora_lr=0.0), dtype)[2]).abs().max() > 0.01, "the adapters did something"


@pytest.mark.parametrize("dtypes", [{}, {"table_dtype": "fp32"}, {"matrix_dtype": "fp32", "buffer_dtype": "fp32"}])
def test_computing_in_bfloat16(dtypes):
    "Whatever the weights are kept in: far nearer to the fp64 scores than those without learning are, and masters in fp32 that go on where bfloat16 stands still."
    tokens, cfg = texts([1, 5, 30, 1, 41, 17]), replace(DOCS, **dtypes)
    nats, exact = scored(tokens, cfg, torch.bfloat16)[2], scored(tokens, DOCS)[2]
    learnt = (exact - scored(tokens, replace(DOCS, ttt_lora_lr=0.0))[2]).abs().mean()
    assert (nats - exact).abs().mean() < 0.3 * learnt
    slow = replace(cfg, ttt_lora_lr=1e-5)  # a step is far below the spacing of bfloat16 at A's values
    model, _ = golf_on(slow, ALONE, torch.bfloat16)
    lanes = adapters.Lanes(model.requires_grad_(False), tokens, random_table(), slow, lane_plan(document_spans(tokens), slow, ALONE))
    lanes.recorded()
    assert lanes.masters.dtype == torch.float32 and lanes.flat.dtype == torch.bfloat16 and torch.equal(lanes.flat, lanes.masters.to(torch.bfloat16)) and (lanes.masters != lanes.first[:, None]).any()


# --- without learning it is the model on rows

@pytest.mark.parametrize("gate", ["one", "sigmoid"])
def test_lr_zero_is_the_model_on_each_row(gate):
    tokens, cfg = texts(MIXED), replace(DOCS, skip_gate=gate)
    nats = scored(tokens, replace(cfg, ttt_lora_lr=0.0))[2]
    model, _ = golf_on(cfg, ALONE, torch.float64)
    for a, b in document_spans(tokens):
        for first in range(a, b, 8):  # a row of 16 begins every half row, and scores what is new in it
            row = tokens[first:min(first + 16, b) + 1]
            with torch.no_grad():
                theirs = token_nll(model(row[None, :-1], rope_len=16), row[None, 1:], model.cap)[0]
            new = 0 if first == a else 8
            assert torch.allclose(nats[first + new:min(first + 16, b)], theirs[new:], atol=1e-12)


# --- nothing else matters

def test_lanes_do_not_matter():
    tokens = texts(MIXED)
    _, _, base, _ = scored(tokens)
    for lanes in (1, 2):
        assert torch.allclose(scored(tokens, replace(DOCS, ttt_batch_size=lanes))[2], base, atol=1e-12)
    equal = texts([9] * 13)
    alone = scored(equal, replace(DOCS, ttt_batch_size=1))[2]
    for lanes in (2, 5, 13, 40):
        cfg = replace(DOCS, ttt_batch_size=lanes)
        assert lane_plan(document_spans(equal), cfg, Ranks())["doc"].shape[1] == min(lanes, 13)
        assert torch.allclose(scored(equal, cfg)[2], alone, atol=1e-12)


def test_other_documents_do_not_matter():
    tokens, spans = texts(MIXED), None
    spans, base = document_spans(tokens), scored(tokens)[2]
    changed = tokens.clone()
    a, b = spans[6]
    changed[a + 9] = 2 + (changed[a + 9] - 1) % 30
    nats = scored(changed)[2]
    assert torch.equal(nats[:a + 8], base[:a + 8]) and torch.equal(nats[b:], base[b:]) and not torch.equal(nats[a + 8:b], base[a + 8:b])
    order = [6, 2, 0, 12, 3, 1, 4, 5, 7, 8, 9, 10, 11]
    moved = torch.cat([tokens[spans[d, 0]:spans[d, 1]] for d in order] + [tokens[-1:]])
    theirs = torch.cat([base[spans[d, 0]:spans[d, 1]] for d in order])
    assert torch.allclose(scored(moved)[2], theirs, atol=1e-12)


def test_the_first_chunk_of_a_document_is_the_plain_models():
    tokens = texts(MIXED)
    base, still = scored(tokens)[2], scored(tokens, replace(DOCS, ttt_lora_lr=0.0))[2]
    for a, b in document_spans(tokens):
        assert torch.equal(base[a:min(a + 4, b)], still[a:min(a + 4, b)])
        if b - a > 8:
            assert not torch.equal(base[a + 4:b], still[a + 4:b])


@pytest.mark.parametrize("tokens", [torch.tensor([5, 6]), torch.tensor([1, 1]), torch.tensor([1] * 9), texts([200]), texts([16, 17]), torch.arange(2, 30)], ids=["two", "bos", "empty", "long", "row", "no_bos"])
def test_any_stream(tokens):
    loss, bpb, nats, ledger = scored(tokens)
    assert nats.isfinite().all() and loss == pytest.approx(nats.mean().item(), abs=1e-12) and bpb > 0
    assert (ledger.upto == ledger.spans[:, 1]).all()


@pytest.mark.parametrize("seed", range(40))
def test_plans(seed):
    "Every target once, each document's chunks in order in one lane, all ranks together everything."
    r = random.Random(seed)
    lengths = [r.choice([1, 2, r.randint(1, 9), r.randint(1, 120)]) for _ in range(r.randint(1, 30))]
    spans, world = document_spans(texts(lengths, seed)), r.randint(1, 4)
    cfg = replace(DOCS, ttt_chunk_size=r.randint(2, 8), ttt_batch_size=r.randint(1, 6))
    seen, capacity = torch.zeros(sum(lengths), dtype=torch.int64), 16 // cfg.ttt_chunk_size
    for rank in range(world):
        plan = lane_plan(spans, cfg, Ranks(rank, world))
        assert 1 <= plan["doc"].shape[1] <= cfg.ttt_batch_size
        for lane in range(plan["doc"].shape[1]):
            upto = {}
            for doc, first, count, fill, again, goes_on in zip(*(plan[k][:, lane].tolist() for k in ("doc", "first", "count", "fill", "again", "goes_on"))):
                assert (doc < 0) == (count == 0)
                if doc >= 0:
                    assert first == upto.get(doc, spans[doc, 0]) and goes_on == (first + count < spans[doc, 1])
                    assert 0 <= fill <= (capacity - 1) * cfg.ttt_chunk_size and fill <= first - spans[doc, 0] and (fill == first - spans[doc, 0] or fill >= capacity // 2 * cfg.ttt_chunk_size)
                    assert count == cfg.ttt_chunk_size or not goes_on
                    upto[doc] = first + count
                    seen[first:first + count] += 1
            assert all(end == spans[doc, 1] for doc, end in upto.items())
    assert (seen == 1).all()


def test_lanes_are_even():
    lengths = np.random.default_rng(0).integers(1, 60, 400)
    loads = [lengths[docs].sum() for docs in deal_documents(lengths, 16)]
    assert max(loads) - min(loads) <= 2 and sorted(d for docs in deal_documents(lengths, 16) for d in docs) == list(range(400))


def test_rows():
    for capacity in range(2, 9):
        fill, again = row_fill(np.arange(50), capacity)
        assert fill.max() == capacity - 1 and (fill[:capacity] == np.arange(capacity)).all() and (fill[capacity:] >= capacity // 2).all()
        assert all(fill[i] == (capacity // 2 if again[i] else fill[i - 1] + 1) for i in range(1, 50))


# --- the ledger

def test_ledger():
    book = DocumentLedger(np.array([[0, 5], [5, 9]]))
    one = lambda *x: [np.array([v]) for v in x]
    for bad in (one(0, 1, 2), one(0, 0, 6), one(1, 0, 6), one(0, 0, 0)):
        with pytest.raises(GolfError, match="scored once"):
            book.scored(*bad)
    with pytest.raises(GolfError, match="scored once"):
        book.scored(np.array([0, 0]), np.array([0, 0]), np.array([1, 1]))
    with pytest.raises(GolfError, match="its own document"):
        book.train(*one(0, 0, 1))
    book.scored(*one(0, 0, 4))
    book.train(*one(0, 0, 4))
    for bad in (one(0, 0, 5), one(1, 4, 5), one(1, 0, 4), one(0, 2, 2)):
        with pytest.raises(GolfError, match="its own document"):
            book.train(*bad)


def test_unscored_updates_are_impossible(monkeypatch):
    monkeypatch.setattr(DocumentLedger, "scored", lambda self, *a: None)
    with pytest.raises(GolfError, match="scored targets of its own"):
        scored(texts(MIXED))


def test_the_model_itself_is_not_changed():
    model, _ = golf_on(DOCS, ALONE)
    score_documents(model, random_state(), texts(MIXED), random_table(), DOCS, ALONE)
    assert all(torch.equal(t, random_state()[n]) for n, t in named_state(model).items()) and all(p.grad is None for p in model.parameters())


def test_rows_of_another_length_than_the_model_was_made_for():
    "The rotary base follows the row that is scored, not the setting the model was built with."
    cfg, tokens = replace(DOCS, eval_seq_len=32), texts([30, 60])
    model, _ = golf_on(DOCS, ALONE, torch.float64)
    out = torch.zeros(90, dtype=torch.float64)
    score_documents(model, random_state(), tokens, random_table(), cfg, ALONE, out=out)
    assert torch.allclose(out, scored(tokens, cfg)[2], atol=1e-12)


def test_a_stream_without_targets_is_refused():
    with pytest.raises(GolfError, match="at least one target"):
        scored(torch.tensor([1]))


@pytest.mark.parametrize("form", ["bigram", "ve"])
def test_smaller_models(form):
    cfg = replace(DOCS, **({"bigram_vocab_size": 0} if form == "bigram" else {"ve_enabled": False}), num_layers=1, ve_layers="0")
    assert scored(texts(MIXED), cfg)[2].isfinite().all()


# --- the audit: an honest scorer passes, planted cheats are found

AUDITED = replace(DOCS, eval_seq_len=32, ttt_chunk_size=8, ttt_lora_lr=0.1)


def failed(found: list) -> set:
    return {f["condition"] for f in found if not f["passed"]}


def audited() -> list:
    return adapters.audit_documents(golf_on(DOCS, ALONE)[0], random_state(), texts([12, 3, 20, 1, 9]), random_table(), AUDITED)


def one_pass() -> list:
    "The part of an audit that looks at a single pass."
    tokens = texts([12, 3, 20, 1, 9])
    trial = adapters.document_trial(golf_on(DOCS, ALONE)[0], random_state(), tokens, random_table(), AUDITED)
    return adapters.audit_document_order(trial, tokens) + adapters.audit_single_pass(trial, tokens, random_table(), len(lane_plan(document_spans(tokens), AUDITED, ALONE)["doc"]))


def test_an_honest_scorer_passes():
    found = audited()
    assert not failed(found) and len(found) == 11 and {f["condition"] for f in found} == {"strict prefix", "full distribution", "score before update", "single pass"}
    assert not failed(one_pass())


def never_resets(monkeypatch):
    "What one document taught stays for the next in its lane."
    honest = adapters.adapter_update
    monkeypatch.setattr(adapters, "adapter_update", lambda *args: honest(*args[:5], torch.ones_like(args[5]), *args[6:]))


def learns_before_it_scores(monkeypatch):
    "The chunk is scored with adapters that have learnt it."
    honest = adapters.adapted_step

    def cheating(model, cfg):
        step = honest(model, cfg)
        def twice(ids, fill, flats, keys, values, goes_on):
            grads = torch.autograd.grad(step(ids, fill, flats, keys, values, torch.ones_like(goes_on))[0], flats)
            learnt = [(f - 0.5 * g).detach() for f, g in zip(flats, grads)]
            return step(ids, fill, flats, keys, values, goes_on)[0], *step(ids, fill, learnt, keys, values, goes_on)[1:]
        return twice
    monkeypatch.setattr(adapters, "adapted_step", cheating)


def sees_the_whole_chunk(monkeypatch):
    "Attention inside a chunk looks ahead."
    honest = adapters.attend_stored
    monkeypatch.setattr(adapters, "attend_stored", lambda q, keys, values, mask: honest(q, keys, values, mask | (torch.arange(mask.shape[-1]) >= mask.shape[-1] - mask.shape[-2])))


def books_no_training(monkeypatch):
    monkeypatch.setattr(DocumentLedger, "train", lambda self, *a: None)


def books_the_first_chunk(monkeypatch):
    "Every update is booked on the document's beginning."
    monkeypatch.setattr(DocumentLedger, "train", lambda self, docs, a, b: self.history.append(("train", docs, self.spans[docs, 0], self.spans[docs, 0] + b - a)))


def scores_twice(monkeypatch):
    "Every step is done again, and the better score counts."
    honest = adapters.StepWitness.__call__
    def cheating(self, *a):
        loss, nats, k, v = honest(self, *a)
        return loss, torch.minimum(nats, honest(self, *a)[1]), k, v
    monkeypatch.setattr(adapters.StepWitness, "__call__", cheating)


def reports_less(monkeypatch):
    honest = adapters.score_documents
    monkeypatch.setattr(adapters, "score_documents", lambda *a, **k: (lambda loss, bpb, ledger: (0.99 * loss, 0.99 * bpb, ledger))(*honest(*a, **k)))


CHEATS = [(never_resets, audited, "strict prefix"), (learns_before_it_scores, audited, "strict prefix"), (sees_the_whole_chunk, audited, "strict prefix"), (books_no_training, one_pass, "score before update"),
          (books_the_first_chunk, one_pass, "score before update"), (scores_twice, one_pass, "single pass"), (reports_less, one_pass, "single pass")]


@pytest.mark.parametrize("cheat, audit, condition", CHEATS, ids=[c[0].__name__ for c in CHEATS])
def test_cheats_are_found(monkeypatch, cheat, audit, condition):
    cheat(monkeypatch)
    assert condition in failed(audit())


@pytest.mark.parametrize("lengths, most, world, lanes", [([9], 64, 1, 1), ([9], 64, 8, 1), ([9, 1], 64, 1, 2), ([4, 4, 4, 4], 64, 2, 2), ([1] * 500, 64, 2, 64), ([100] + [1] * 400, 64, 2, 3), ([10, 6, 6, 6, 6, 6], 64, 1, 6), ([10, 6, 6, 6, 6, 6], 4, 1, 4)])
def test_no_more_lanes_than_the_longest_document_keeps_busy(lengths, most, world, lanes):
    assert lanes_needed(np.array(lengths), most, world) == lanes
    loads = [sum(lengths[d] for d in docs) for docs in deal_documents(np.array(lengths), lanes * world)]
    assert lanes == most or max(loads) == max(lengths), "none of them makes the pass longer"


def test_compiled_for_each_kind_of_block(monkeypatch):
    "Two models of one process make more kinds than the compiler's usual limit for one function; traced, they score as they do untraced."
    compile_, tokens = torch.compile, texts([1, 5, 30])
    monkeypatch.setattr(torch, "compile", lambda f, **how: compile_(f, backend="eager", **how))
    torch._dynamo.reset()
    for rank in (2, 3):
        cfg = replace(DOCS, num_layers=4, ve_layers="3", xsa_last_n=2, ttt_lora_rank=rank)
        plain, _, nats, _ = scored(tokens, cfg)
        traced, _, again, _ = scored(tokens, replace(cfg, compile="1"))
        assert abs(plain - traced) < 1e-10 and (nats - again).abs().max() < 1e-8
    kinds = torch._dynamo.eval_frame._debug_get_cache_entry_list(adapters.adapted_block.__code__)
    assert len(kinds) == 12, "three kinds of block, learning and reading again, two models"

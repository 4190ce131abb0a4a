"""Adapters per document: equal to a plain loop over one document at a time; other documents, slots and ranks do not matter."""
import random
from dataclasses import dataclass, fields, replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from golfnb.score import adapters
from golfnb.score.adapters import document_spans, first_adapters, slot_count, slot_plan, row_fill, score_documents
from golfnb.settings import GolfError
from golfnb.model.layers import rms_norm, token_nll
from golfnb.model.golf import Block, named_state
from golfnb.model.engine import Ranks
from golfnb.file.quantize import deal_jobs
from golfnb.score.ttt import Ledger
from score_workers import DOCS, FrontierScores, golf_on, random_state, random_table, texts

ALONE = Ranks()
MIXED = [1, 5, 4, 30, 1, 1, 70, 2, 8, 16, 17, 15, 9]


def scored(tokens, cfg=DOCS, dtype=torch.float64, ranks=ALONE, **more):
    model, _ = golf_on(cfg, ranks, dtype)
    out = torch.full((tokens.numel() - 1,), float("nan"), dtype=torch.float64)
    loss, bpb, ledger = score_documents(model, random_state(cfg), tokens, random_table(), cfg, ranks, out=out, **more)
    return loss, bpb, out, ledger


# --- the oracle: one document at a time, each chunk with the whole row before it, merged weights, torch's own attention and Adam

@dataclass
class MergedBlock(Block):
    "A block with other matrices, whose attention takes the keys and values of earlier chunks from `past` [1, places, KV, head]."
    matrices: list | None = None
    past: tuple | None = None

    def linear(self, x, weight, i):
        return F.linear(x, self.matrices[i])

    def attend(self, q, k, v):
        k, v = self.past = [torch.cat([old, new[:, old.shape[1]:]], 1) for old, new in zip(self.past, (k, v))] if self.past else [k, v]
        return F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)), is_causal=True, enable_gqa=True).transpose(1, 2)


def oracle_row(model, matrices, ids, past):
    "Logits of all of a row's tokens; `past` by visit, or empty, is brought up to date."
    x0, ves, weights = model.embed(ids), model.value_embeddings(ids), model.weights()
    cos, sin = (t[:ids.shape[1]] for t in model.rotary(16))

    def run(x, visit):
        i = visit.block
        b = model.blocks[i]
        block = MergedBlock(b.head_dim, b.norm_scale, b.activation, b.xsa, form=b.form, matrices=matrices(i), past=past.get(visit.place))
        x = block.run(x, x0, weights[i], cos, sin, ves.get(i))
        past[visit.place] = [t.detach() for t in block.past]
        return x

    return F.linear(rms_norm(model.run_blocks(x0, run)), matrices("head"))


def merged(model, cfg, flats):
    "A function of a block's number, or of the head, to its matrices with their adapters added; and the pairs."
    base, pairs = [w[:6] for w in model.weights()], {}
    places = [(i, k) for i in range(len(base)) for k in range(6) if k != 1 or cfg.ttt_k_lora] + [("head", 0)] * cfg.ttt_head_lora
    rest = torch.cat(flats)  # of all, one behind the other
    for i, k in places:
        out, inner = (model.tok_emb if i == "head" else base[i][k]).shape
        a, b, rest = rest.split([inner * cfg.ttt_lora_rank, out * cfg.ttt_lora_rank, len(rest) - (inner + out) * cfg.ttt_lora_rank])
        pairs[i, k] = [t.clone().view(shape).requires_grad_() for t, shape in ((a, (inner, -1)), (b, (-1, out)))]
    assert not len(rest)

    def with_adapter(w, place): return w + (pairs[place][0] @ pairs[place][1]).T.to(w.dtype) if place in pairs else w
    def matrices(i): return with_adapter(model.tok_emb, ("head", 0)) if i == "head" else [with_adapter(base[i][k], (i, k)) for k in range(6)]
    return matrices, pairs


def oracle_document(model, cfg, ids):
    "Nats of the targets ids[1:] of one document."
    matrices, pairs = merged(model, cfg, first_adapters(model, cfg))
    size, nats = cfg.ttt_chunk_size, []
    adam = torch.optim.Adam(sum(pairs.values(), []), lr=cfg.ttt_lora_lr, betas=(0.0, cfg.ttt_beta2), eps=1e-10)
    begin, past, capacity = 0, {}, cfg.eval_seq_len // size
    for a in range(0, len(ids) - 1, size):
        if a - begin == capacity * size:
            begin, past = a - capacity // 2 * size, {}
            oracle_row(model, matrices, ids[None, begin:a], past)
        b = min(a + size, len(ids) - 1)
        scores = token_nll(oracle_row(model, matrices, ids[None, begin:b], past)[:, a - begin:], ids[None, a + 1:b + 1], model.cap)
        nats.append(scores[0].detach())
        adam.zero_grad()
        scores.mean().backward()
        adam.step()
    return torch.cat(nats)


def oracle(tokens, cfg=DOCS, dtype=torch.float64):
    model, _ = golf_on(cfg, ALONE, dtype)
    return torch.cat([oracle_document(model.requires_grad_(False), cfg, tokens[a:b + 1]) for a, b in document_spans(tokens, 1)]).double()


@pytest.mark.parametrize("dtype, more, tolerance", [(torch.float64, {}, 1e-10), (torch.float32, {}, 1e-6), (torch.float64, dict(ttt_chunk_size=5, ttt_batch_size=2), 1e-10), (torch.float64, dict(ttt_chunk_size=8, ttt_batch_size=1), 1e-10),
                                                     (torch.float64, dict(order="0,1,2,0,1,2,0,1,2", most_visits=9), 1e-10),
                                                     (torch.float64, dict(ttt_k_lora=False), 1e-10), (torch.float64, dict(ttt_head_lora=True), 1e-10)])
def test_equals_one_document_at_a_time(dtype, more, tolerance):
    "Documents of length 1, odd lengths, longer than a row; the mean differs by less than the tolerance, and no target by more than a hundred times it."
    tokens, cfg = texts([1, 5, 30, 1, 41, 17]), replace(DOCS, **more)
    loss, _, nats, _ = scored(tokens, cfg, dtype)
    theirs = oracle(tokens, cfg, dtype)
    assert abs(loss - theirs.mean().item()) < tolerance and (nats - theirs).abs().max() < 100 * tolerance
    assert (theirs - scored(tokens, replace(cfg, ttt_lora_lr=0.0), dtype)[2]).abs().max() > 0.01, "the adapters did something"


LONG = FrontierScores(**{spec.name: getattr(DOCS, spec.name) for spec in fields(DOCS)} | dict(family="frontier", num_layers=4, ve_layers="3", xsa_last_n=4, gate_window=5, loop_start=1, loop_end=1, num_loops=2, parallel_start_layer=2,
                                                                                             rope_train_len=64, order="0,1,1,1,2,3", most_visits=6))  # a block three times, then two lanes


@pytest.mark.parametrize("more", [{}, dict(ttt_k_lora=False, ttt_head_lora=True), dict(order="0,1,2,3"), dict(ttt_chunk_size=5, ttt_batch_size=2, ttt_head_lora=True)])
def test_a_model_of_whole_documents_equals_one_document_at_a_time(more):
    tokens, cfg = texts([1, 5, 30, 1, 41, 17]), replace(LONG, **more)
    loss, _, nats, _ = scored(tokens, cfg)
    theirs = oracle(tokens, cfg)
    assert abs(loss - theirs.mean().item()) < 1e-10 and (nats - theirs).abs().max() < 1e-8
    assert (theirs - scored(tokens, replace(cfg, ttt_lora_lr=0.0))[2]).abs().max() > 0.01, "the adapters did something"


@pytest.mark.parametrize("cfg", [DOCS, LONG], ids=["golf", "frontier"])
def test_gradients_side_by_side_are_those_of_each_document_alone(cfg):
    "Of all adapters, none of them at its beginning, by plain torch through merged matrices."
    cfg = replace(cfg, ttt_k_lora=False, ttt_head_lora=True)
    model, _ = golf_on(cfg, ALONE, torch.float64)
    model.requires_grad_(False)
    draw = torch.Generator().manual_seed(4)
    firsts = first_adapters(model, cfg)
    flats = [(first + 0.05 * torch.randn(3, len(first), generator=draw, dtype=torch.float64)).requires_grad_() for first in firsts]
    ids = torch.randint(2, 32, (3, 2 + 8 + 1), generator=draw)
    empty = torch.zeros(len(model.order), 3, cfg.num_kv_heads, 0, cfg.head_dim, dtype=torch.float64)
    step = adapters.adapted_step(model, cfg)
    loss, nats, *_ = step(ids, torch.zeros(3, dtype=torch.int64), flats, empty, empty, torch.tensor([1.0, 0.0, 1.0], dtype=torch.float64))
    found = torch.autograd.grad(loss, flats)
    for slot, goes_on in enumerate((True, False, True)):
        matrices, pairs = merged(model, cfg, [flat.detach()[slot] for flat in flats])
        scores = token_nll(oracle_row(model, matrices, ids[slot:slot + 1, 2:-1], {}), ids[slot:slot + 1, 3:], model.cap)
        torch.testing.assert_close(nats[slot], scores[0].detach(), rtol=0, atol=1e-10)
        alone = torch.cat([t.flatten() for t in torch.autograd.grad(scores.mean(), sum(pairs.values(), []))])
        together = torch.cat([grad[slot] for grad in found])
        assert alone.abs().max() > 1e-4
        torch.testing.assert_close(together, alone if goes_on else torch.zeros_like(alone), rtol=0, atol=1e-10)


def test_each_switch_says_which_matrices_have_adapters():
    model, _ = golf_on(DOCS, ALONE)
    size = {name: [len(flat) for flat in first_adapters(model, replace(DOCS, **how))] for name, how in (("all", {}), ("no keys", dict(ttt_k_lora=False)), ("head", dict(ttt_head_lora=True)))}
    keys, head = (DOCS.ttt_lora_rank * sum(t.shape) for t in (model.weights()[0].k, model.tok_emb))
    assert size["no keys"] == [n - keys for n in size["all"]] and size["head"] == [*size["all"], head]


def test_computing_in_bfloat16():
    "Far nearer to the fp64 scores than those without learning are, and masters in fp32 that go on where bfloat16 stands still."
    tokens, cfg = texts([1, 5, 30, 1, 41, 17]), DOCS
    nats, exact = scored(tokens, cfg, torch.bfloat16)[2], scored(tokens, DOCS)[2]
    learnt = (exact - scored(tokens, replace(DOCS, ttt_lora_lr=0.0))[2]).abs().mean()
    assert (nats - exact).abs().mean() < 0.3 * learnt
    slow = replace(cfg, ttt_lora_lr=1e-5)  # a step is far below the spacing of bfloat16 at A's values
    model, _ = golf_on(slow, ALONE, torch.bfloat16)
    slots = adapters.DocumentSlots(model.requires_grad_(False), tokens, random_table(), slow, slot_plan(document_spans(tokens, 1), slow, ALONE))
    slots.graphed()
    assert all(m.dtype == torch.float32 and f.dtype == torch.bfloat16 and torch.equal(f, m.to(torch.bfloat16)) and (m != first).any() for m, f, first in zip(slots.masters, slots.flat, slots.first, strict=True))


# --- without learning it is the model on rows

@pytest.mark.parametrize("kind, gate", [(0, "one"), (0, "sigmoid"), (1, "one")], ids=["one", "sigmoid", "frontier"])
def test_lr_zero_is_the_model_on_each_row(kind, gate):
    tokens, cfg = texts(MIXED), replace((DOCS, LONG)[kind], skip_gate=gate)
    nats = scored(tokens, replace(cfg, ttt_lora_lr=0.0))[2]
    model, _ = golf_on(cfg, ALONE, torch.float64)
    for a, b in document_spans(tokens, 1):
        for first in range(a, b, 8):  # a row of 16 begins every half row, and scores what is new in it
            row = tokens[first:min(first + 16, b) + 1]
            with torch.no_grad():
                theirs = token_nll(model(row[None, :-1], rope_len=16), row[None, 1:], model.cap)[0]
            new = 0 if first == a else 8
            assert torch.allclose(nats[first + new:min(first + 16, b)], theirs[new:], atol=1e-12)


# --- nothing else matters

def test_lanes_do_not_matter():
    tokens = texts(MIXED)
    for cfg in (DOCS, replace(LONG, ttt_head_lora=True)):
        base = scored(tokens, cfg)[2]
        for slots in (1, 2):
            assert torch.allclose(scored(tokens, replace(cfg, ttt_batch_size=slots))[2], base, atol=1e-12)
    equal = texts([9] * 13)
    alone = scored(equal, replace(DOCS, ttt_batch_size=1))[2]
    for slots in (2, 5, 13, 40):
        cfg = replace(DOCS, ttt_batch_size=slots)
        assert slot_plan(document_spans(equal, 1), cfg, Ranks())["doc"].shape[1] == min(slots, 13)
        assert torch.allclose(scored(equal, cfg)[2], alone, atol=1e-12)


def test_other_documents_do_not_matter():
    tokens, spans = texts(MIXED), None
    spans, base = document_spans(tokens, 1), scored(tokens)[2]
    changed = tokens.clone()
    a, b = spans[6]
    changed[a + 9] = 2 + (changed[a + 9] - 1) % 30
    nats = scored(changed)[2]
    assert torch.equal(nats[:a + 8], base[:a + 8]) and torch.equal(nats[b:], base[b:]) and not torch.equal(nats[a + 8:b], base[a + 8:b])
    order = [6, 2, 0, 12, 3, 1, 4, 5, 7, 8, 9, 10, 11]
    moved = torch.cat([tokens[spans[d, 0]:spans[d, 1]] for d in order] + [tokens[-1:]])
    theirs = torch.cat([base[spans[d, 0]:spans[d, 1]] for d in order])
    assert torch.allclose(scored(moved)[2], theirs, atol=1e-12)


@pytest.mark.parametrize("tokens", [torch.tensor([5, 6]), torch.tensor([1, 1]), torch.tensor([1] * 9), texts([200]), texts([16, 17]), torch.arange(2, 30)], ids=["two", "bos", "empty", "long", "row", "no_bos"])
def test_any_stream(tokens):
    loss, bpb, nats, ledger = scored(tokens)
    assert nats.isfinite().all() and loss == pytest.approx(nats.mean().item(), abs=1e-12) and bpb > 0
    assert (ledger.upto == ledger.spans[:, 1]).all()


@pytest.mark.parametrize("seed", range(40))
def test_plans(seed):
    "Every target once, each document's chunks in order in one slot, all ranks together everything."
    r = random.Random(seed)
    lengths = [r.choice([1, 2, r.randint(1, 9), r.randint(1, 120)]) for _ in range(r.randint(1, 30))]
    spans, world = document_spans(texts(lengths, seed), 1), r.randint(1, 4)
    cfg = replace(DOCS, ttt_chunk_size=r.randint(2, 8), ttt_batch_size=r.randint(1, 6))
    seen, capacity = torch.zeros(sum(lengths), dtype=torch.int64), 16 // cfg.ttt_chunk_size
    for rank in range(world):
        plan = slot_plan(spans, cfg, Ranks(rank, world))
        assert 1 <= plan["doc"].shape[1] <= cfg.ttt_batch_size
        for slot in range(plan["doc"].shape[1]):
            upto = {}
            for doc, first, count, fill, again, goes_on in zip(*(plan[k][:, slot].tolist() for k in ("doc", "first", "count", "fill", "again", "goes_on"))):
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
    dealt = deal_jobs(lengths, 16)
    loads = [lengths[docs].sum() for docs in dealt]
    assert max(loads) - min(loads) <= 2 and sorted(sum(dealt, [])) == list(range(400))


def test_rows():
    for capacity in range(2, 9):
        fill, again = row_fill(np.arange(50), capacity)
        assert fill.max() == capacity - 1 and (fill[:capacity] == np.arange(capacity)).all() and (fill[capacity:] >= capacity // 2).all()
        assert all(fill[i] == (capacity // 2 if again[i] else fill[i - 1] + 1) for i in range(1, 50))


def test_unscored_updates_are_impossible(monkeypatch):
    monkeypatch.setattr(Ledger, "scored", lambda self, *a: None)
    with pytest.raises(GolfError, match="update"):
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


@pytest.mark.parametrize("tokens, size, words", [(texts(MIXED), 9, "TTT_CHUNK_SIZE.*9"), (texts(MIXED), 1, "TTT_CHUNK_SIZE.*1")])
def test_what_cannot_be_scored_is_refused(tokens, size, words):
    with pytest.raises(GolfError, match=words):
        scored(tokens, replace(DOCS, ttt_chunk_size=size))


@pytest.mark.parametrize("form", ["bigram", "ve"])
def test_smaller_models(form):
    cfg = replace(DOCS, **({"bigram_vocab_size": 0} if form == "bigram" else {"ve_enabled": False}), num_layers=1, ve_layers="0")
    assert scored(texts(MIXED), cfg)[2].isfinite().all()


@pytest.mark.parametrize("lengths, most, world, slots", [([9], 64, 1, 1), ([9], 64, 8, 1), ([9, 1], 64, 1, 2), ([4, 4, 4, 4], 64, 2, 2), ([1] * 500, 64, 2, 64), ([100] + [1] * 400, 64, 2, 3), ([10, 6, 6, 6, 6, 6], 64, 1, 6), ([10, 6, 6, 6, 6, 6], 4, 1, 4)])
def test_no_more_slots_than_the_longest_document_keeps_busy(lengths, most, world, slots):
    assert slot_count(np.array(lengths), most, world) == slots
    loads = [sum(lengths[d] for d in docs) for docs in deal_jobs(np.array(lengths), slots * world)]
    assert slots == most or max(loads) == max(lengths), "none of them makes the pass longer"


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


def test_adapters_go_with_the_settings_of_every_recipe():
    "Also of one that has no settings of test-time training."
    from golfnb.score.adapters import AdapterSettings
    from golfnb.tools.scoring import with_adapters
    from golfnb.tools.programs import RECIPES, find_program

    for recipe in RECIPES:
        group = with_adapters(find_program(recipe).Settings)
        assert group().ttt_lora_rank == AdapterSettings().ttt_lora_rank and issubclass(group, find_program(recipe).Settings)

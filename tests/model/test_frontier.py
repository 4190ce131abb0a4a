"""Models of whole documents: parts against formulas written out, the walk against a plain one, and whatever else walks the blocks."""
import json
import math
import sys
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

import golfnb.model.frontier as frontier
from golfnb.model.frontier import (Frontier, FrontierSettings, add_to_lanes, attend_pieces, cut_pieces, frontier_draws, head_gates, in_order_of, long_order, mean_lane, mixed_skip, piece_edges, smear_gated,
                             stream_loss)
from golfnb.model.layers import attend, exclusive, rms_norm, softcap_loss
from golfnb.model.layout import bank_per_shape, matrix_names, mlp_in_one_bank
from golfnb.model.golf import init_model, load_named, model_from_settings, named_state, saved_settings
from golfnb.model.engine import Ranks
from golfnb.file.quantize import calibrate
from golfnb.settings import GolfError
from golfnb.tools.sampling import CachedReader, next_logits
from golfnb.run.train import training_loss

SMALL = dict(num_layers=6, model_dim=32, num_heads=4, num_kv_heads=2, vocab_size=40, train_seq_len=24, rope_dims=4, bigram_vocab_size=0, ve_enabled=False, xsa_last_n=6,
             num_loops=2, loop_start=1, loop_end=2, parallel_start_layer=4)
TABLES = dict(bigram_vocab_size=20, bigram_dim=8, ve_enabled=True, ve_dim=8, ve_layers="2,5", xsa_last_n=3)


def filled(banks=bank_per_shape, **more) -> Frontier:
    "A model with random numbers everywhere, in the order in which blocks run again."
    cfg = FrontierSettings(**SMALL | more)
    model = Frontier(cfg, banks(cfg, 1), torch.float64)
    g = torch.Generator().manual_seed(0)
    load_named(model, {n: torch.randn(t.shape, generator=g) * (t.shape[-1] ** -0.5 if t.ndim == 2 else 1) for n, t in named_state(model).items()})
    model.order = long_order(cfg)
    return model


def documents(rows: int, T: int, seed=0):
    "Tokens with a BOS here and there, two of them side by side."
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(2, 40, (rows, T), generator=g)
    ids[torch.rand(rows, T, generator=g) < 0.15] = 1
    ids[0, 3:5] = 1
    return ids


def rand(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed + sum(shape)))


# --- documents

def plain_cut(rows: list[list[int]], longest: int) -> list[int]:
    "The number of each token's piece, token by token."
    numbers, number = [], -1
    for row in rows:
        for place, token in enumerate(row):
            if place == 0 or token == 1 or length == longest:
                number, length = number + 1, 0
            length += 1
            numbers.append(number)
    return numbers


@pytest.mark.parametrize("rows, T, longest", [(1, 40, 7), (3, 24, 24), (4, 5, 2), (1, 1, 9), (2, 30, 1)])
def test_a_piece_ends_at_a_row_a_bos_and_its_greatest_length(rows, T, longest):
    ids = documents(rows, max(T, 5))[:, :T]
    pieces = cut_pieces(ids, 1, longest)
    assert pieces.number.tolist() == plain_cut(ids.tolist(), longest)
    starts = [i for i, n in enumerate(pieces.number.tolist()) if i == 0 or n > pieces.number[i - 1]]
    assert pieces.offset.tolist() == [i - starts[n] for i, n in enumerate(pieces.number.tolist())]
    for most in (len(starts), len(starts) + 3, rows * T + 5):
        edges = piece_edges(pieces, most)
        assert edges.tolist() == starts + [rows * T] * (most + 1 - len(starts)) and edges.dtype == torch.int32


def dense(q, k, v, number):
    "Attention with a mask of all places."
    k, v = (t.repeat_interleave(q.shape[2] // k.shape[2], 2) for t in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(q.shape[-1])
    sees = (number[:, None] == number) & torch.ones(len(number), len(number), dtype=torch.bool).tril()
    return torch.einsum("bhqk,bkhd->bqhd", scores.masked_fill(~sees, -math.inf).softmax(-1), v)


@pytest.mark.parametrize("N, longest", [(50, 7), (48, 16), (20, 64), (1, 4), (33, 32), (9, 1)])
def test_attention_does_not_leave_a_piece(N, longest):
    pieces = cut_pieces(documents(1, max(N, 5))[:, :N], 1, longest)
    q, k, v = (rand(1, N, heads, 8).requires_grad_() for heads in (4, 2, 2))
    dy = rand(1, N, 4, 8, seed=5)
    found, plain = attend_pieces(q, k, v, pieces), dense(q, k, v, pieces.number)
    torch.testing.assert_close(found, plain)
    for a, b in zip(torch.autograd.grad(found, (q, k, v), dy), torch.autograd.grad(plain, (q, k, v), dy), strict=True):
        torch.testing.assert_close(a, b)


def by_edges(q, k, v, cu_q, cu_k, max_q, max_k, window_size, enable_gqa):
    "What FlashAttention gives for tensors of the whole stream [N, H, D]: piece by piece."
    assert window_size == (-1, 0) and cu_q is cu_k and enable_gqa
    pairs = list(zip(cu_q.tolist(), cu_q.tolist()[1:], strict=False))
    assert all(0 <= b - a <= max_q for a, b in pairs)
    return torch.cat([attend(q[None, a:b], k[None, a:b], v[None, a:b])[0] for a, b in pairs if b > a])


def test_a_model_by_edges_is_the_model_by_bands(monkeypatch):
    "The way of a GPU, with attention piece by piece in its kernel's place; too many pieces are no other model, but NaN."
    model, ids = filled(), documents(2, 24)
    plain = model(ids)
    monkeypatch.setattr(frontier, "takes_edges", lambda *_: True)
    monkeypatch.setattr(frontier, "FLASH", {})
    monkeypatch.setitem(sys.modules, "torch.nn.attention.varlen", SimpleNamespace(varlen_attn=by_edges))
    torch.testing.assert_close(model(ids), plain)
    monkeypatch.setattr(frontier, "room_for_pieces", lambda *_: int(cut_pieces(ids, 1, 24).number[-1]) + 1)
    torch.testing.assert_close(model(ids), plain)
    monkeypatch.setattr(frontier, "room_for_pieces", lambda *_: int(cut_pieces(ids, 1, 24).number[-1]))
    assert model(ids).isnan().all()


def test_which_attention_is_asked_for():
    cuda, cpu, bf16 = torch.device("cuda"), torch.device("cpu"), torch.bfloat16
    assert all(frontier.takes_edges(cuda, bf16, choice) for choice in ("auto", "flash", "fa3", "fa4"))
    assert not any((frontier.takes_edges(cuda, torch.float32, "auto"), frontier.takes_edges(cuda, bf16, "math"), frontier.takes_edges(cpu, bf16, "auto")))


# --- parts

def test_gates_smear_skips_and_lanes_are_their_formulas():
    x, w, rate = rand(2, 5, 16), rand(12), torch.tensor(0.7, dtype=torch.float64)
    smeared = smear_gated(x, w, rate)
    for b in range(2):
        torch.testing.assert_close(smeared[b, 0], x[b, 0])
        for t in range(1, 5):
            torch.testing.assert_close(smeared[b, t], x[b, t] + 0.7 / (1 + math.exp(-(w @ x[b, t, :12]))) * x[b, t - 1])
    gate = rand(3, 12)
    torch.testing.assert_close(head_gates(x, gate), 1 / (1 + torch.exp(-(x[..., :12] @ gate.T))))
    skip, weight, closed = rand(2, 5, 16, seed=1), rand(16), rand(16, seed=2)
    g = 1 / (1 + torch.exp(-closed))
    torch.testing.assert_close(mixed_skip(x, skip, weight, closed), weight * skip + g * (x - weight * skip))
    a, m, post, resid = rand(2, 5, 16, seed=3), rand(2, 5, 16, seed=4), rand(2, 2), rand(2)
    lanes = add_to_lanes((x, skip), a, m, post, resid)
    torch.testing.assert_close(lanes[0], resid[0] * x + post[0, 0] * a + post[1, 0] * m)
    torch.testing.assert_close(lanes[1], resid[1] * skip + post[0, 1] * a + post[1, 1] * m)
    torch.testing.assert_close(mean_lane(lanes), 0.5 * (lanes[0] + lanes[1]))
    assert mean_lane(x) is x


def plain_attention(model, i, x, pieces, v_more):
    "Attention of a block to what its norm gave, before the block's scale."
    w, cfg = model.weights()[i], model.cfg
    q, k, v = (F.linear(x, m) for m in (w.q, w.k, w.v))
    q, k, v = (t.unflatten(-1, (-1, cfg.head_dim)) for t in (q, k, v + v_more))
    half = cfg.rope_dims // 2
    angle = pieces.offset[:, None] / cfg.rope_base ** (torch.arange(half, dtype=torch.float64) / half)
    turned = []
    for t in (rms_norm(q), rms_norm(k)):
        a, b = t[..., :half], t[..., half:2 * half]
        cos, sin = angle.cos()[:, None], angle.sin()[:, None]
        turned.append(torch.cat((a * cos + b * sin, b * cos - a * sin, t[..., 2 * half:]), -1))
    y = dense(turned[0] * model.q_gain[i][:, None], turned[1], v, pieces.number)
    if i >= cfg.num_layers - cfg.xsa_last_n:
        y = exclusive(y, v)
    gate = torch.sigmoid(cfg.sparse_attn_gate_scale * x[..., :cfg.gate_window] @ model.attn_gate[i].T)
    return F.linear((y * gate[..., None]).flatten(2), w.out)


def plain_logits(model, encoder, decoder, ids, longest):
    "Logits of one long row, as the published script computes them: an encoder, a decoder, and lanes from a block on."
    cfg, ws, pieces = model.cfg, model.weights(), cut_pieces(ids, 1, longest)
    x = rms_norm(smear_gated(model.look_up(ids), model.smear_weight, model.smear_rate))
    x0, stack, ves = x, [], model.value_embeddings(ids)

    def attended(i, x):
        scale = 1 / math.sqrt(i + 1)
        mixed = model.resid_mix[i, 0] * x + model.resid_mix[i, 1] * x0
        return mixed, model.attn_scale[i] * plain_attention(model, i, rms_norm(mixed) * scale, pieces, ves.get(i, 0))

    def mlp(i, x):
        return model.mlp_scale[i] * F.linear(F.leaky_relu(F.linear(rms_norm(x) / math.sqrt(i + 1), ws[i].up), 0.5) ** 2, ws[i].down)

    def block(i, x):
        mixed, y = attended(i, x)
        return mixed + y + mlp(i, mixed + y)

    def skipped(number, x):
        if number >= len(model.skip_weights) or not stack:
            return x
        return torch.lerp(model.skip_weights[number] * stack.pop(), x, torch.sigmoid(model.skip_gates[number]))

    for i in encoder:
        x = block(i, x)
        stack.append(x)
    other = None
    for number, i in enumerate(decoder):
        if i < cfg.parallel_start_layer:
            x = block(i, skipped(number, x))
            continue
        other = x if other is None else other
        x = skipped(number, x)
        y, m, post, resid = attended(i, x)[1], mlp(i, other), model.lane_post[i], model.lane_resid[i]
        x, other = resid[0] * x + post[0, 0] * y + post[1, 0] * m, resid[1] * other + post[0, 1] * y + post[1, 1] * m
    return F.linear(rms_norm(x if other is None else (x + other) / 2), model.tok_emb)


@pytest.mark.parametrize("more", [{}, TABLES, dict(parallel_start_layer=6), dict(num_loops=0, parallel_start_layer=3)], ids=["usual", "tables", "one stream", "no loops"])
def test_a_forward_is_the_published_walk(more):
    model = filled(**more)
    ids, targets, cfg = documents(1, 72), documents(1, 72, seed=1), model.cfg
    orders = [(range(3), range(3, 6))]
    if cfg.num_loops:
        orders.append(((0, 1, 2, 1, 2), (1, 2, 3, 4, 5)))
    for encoder, decoder in orders:
        model.order = (*encoder, *decoder)
        plain = plain_logits(model, encoder, decoder, ids, 24)
        torch.testing.assert_close(model(ids, longest=24), plain)
        loss, oracle = stream_loss(model, model.cap)(ids.view(3, 24), targets.view(3, 24)), softcap_loss(plain, targets, model.cap)
        for a, b in zip(torch.autograd.grad(loss, list(model.parameters()), allow_unused=True), torch.autograd.grad(oracle, list(model.parameters()), allow_unused=True), strict=True):
            assert (a is None) == (b is None)
            if a is not None:
                torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


def test_rows_know_nothing_of_each_other_and_no_logit_of_a_later_token():
    model, ids = filled(), documents(3, 24)
    whole = model(ids)
    torch.testing.assert_close(whole, torch.cat([model(ids[i:i + 1]) for i in range(3)]))
    torch.testing.assert_close(model(ids, last_n=5), whole[:, -5:])
    other = ids.clone()
    other[:, 13:] = documents(3, 24, seed=2)[:, 13:]
    assert torch.equal(model(other)[:, :13], whole[:, :13]) and not torch.equal(model(other), whole)
    for wrong in (0, 25):
        with pytest.raises(GolfError, match="last_n"):
            model(ids, last_n=wrong)


def test_blocks_run_again_from_a_share_of_the_run_on():
    cfg = FrontierSettings(num_layers=11, bigram_vocab_size=0, ve_enabled=False)
    assert cfg.visits == len(long_order(cfg)) == 17
    assert long_order(cfg) == (0, 1, 2, 3, 4, 5, 3, 4, 5, 3, 4, 5, 6, 7, 8, 9, 10)
    assert in_order_of(cfg, 0.3499) == tuple(range(11)) and in_order_of(cfg, 0.35) == in_order_of(cfg, 1.0) == long_order(cfg)
    model = Frontier(cfg, bank_per_shape(cfg, 1), device="meta")
    assert model.skip_weights.shape == model.skip_gates.shape == (8, 512)


@pytest.mark.parametrize("wrong, words", [(dict(loop_start=3, loop_end=2), "LOOP_START"), (dict(loop_end=6), "LOOP_END"), (dict(parallel_start_layer=2), "PARALLEL_START_LAYER .*3 to 6"),
                                          (dict(loop_end=4), "PARALLEL_START_LAYER .*5 to 6"), (dict(gate_window=33), "GATE_WINDOW")])
def test_what_cannot_be_is_refused(wrong, words):
    with pytest.raises(GolfError, match=words):
        FrontierSettings(**SMALL | wrong).check()


def test_a_fresh_model_begins_as_published():
    cfg = FrontierSettings(**SMALL)
    model = Frontier(cfg, bank_per_shape(cfg, 1))
    init_model(model, cfg, 3)
    named = dict(model.named_parameters())
    for name, value in dict(skip_weights=1, skip_gates=0, smear_weight=0, smear_rate=0, attn_gate=0, lane_post=1, lane_resid=1.1).items():
        assert torch.equal(named[name], torch.full_like(named[name], value).bfloat16().float()), name
    assert "smear_gate" not in named


def test_a_seed_gives_the_weights_that_it_gives_the_published_script():
    "The first three numbers of matrices, read off the published class in float32 with seed 7."
    published = {
        "tok_emb.weight": [0.0054, -0.00205, 0.00529],
        "blocks.0.attn.c_q.weight": [-0.04836, 0.35956, -0.18089], "blocks.0.attn.c_k.weight": [0.11175, -0.11643, 0.07646],
        "blocks.0.attn.c_v.weight": [-0.19183, -0.09455, 0.17565], "blocks.0.mlp.fc.weight": [0.12125, -0.16894, 0.23131],
        "blocks.5.attn.c_q.weight": [0.26109, -0.16774, 0.07205], "blocks.5.attn.c_k.weight": [0.07041, 0.28329, 0.34964],
        "blocks.5.attn.c_v.weight": [-0.0841, -0.24141, -0.35332], "blocks.5.mlp.fc.weight": [0.13355, -0.00363, 0.1945]}
    drawn = frontier_draws(FrontierSettings(**SMALL, mlp_mult=2), 7)
    for name, first in published.items():
        assert drawn[name].flatten()[:3].tolist() == pytest.approx(first, abs=2e-5), name
    assert len(drawn) == 1 + 4 * SMALL["num_layers"]
    with_tables = frontier_draws(FrontierSettings(**SMALL | TABLES, mlp_mult=2), 7)
    assert all(torch.equal(with_tables[name], drawn[name]) for name in drawn)
    assert with_tables.keys() - drawn.keys() == {f"{kind}.{part}.weight" for kind in ("bigram", "ve_shared") for part in ("embed", "proj")}
    assert with_tables["bigram.proj.weight"].norm() > 0


# --- whatever else walks the blocks

@pytest.mark.parametrize("banks", [bank_per_shape, mlp_in_one_bank])
def test_a_file_says_all_of_it(banks):
    model = filled(banks, sparse_attn_gate_scale=0.25, gate_window=7)
    read, saved, _ = model_from_settings(json.loads(json.dumps(saved_settings(model))), torch.float64)
    load_named(read, named_state(model))
    ids = documents(2, 24)
    assert type(read) is Frontier and read.order == model.order and saved.visits == 10 and torch.equal(read(ids), model(ids))
    for wrong in ({"gate_window": 400}, {"skip_gate": "sigmoid"}, {"loop_end": 9}, {"order": "0,1"}):
        with pytest.raises(GolfError):
            model_from_settings(saved_settings(model) | wrong, device="meta")


def test_sampling_begins_again_at_a_bos():
    model = filled()
    text = documents(1, 60)[0].tolist()
    read = CachedReader(model)
    for n in (5, 6, 7, 24, 25, 26, 40, 60):
        torch.testing.assert_close(read(text[:n]), next_logits(model, text[:n]), rtol=0, atol=1e-9)
    begin = 59 - text[::-1].index(1)
    torch.testing.assert_close(read(text), model(torch.tensor([text[begin:]]))[0, -1].div(model.cap).tanh() * model.cap)


def test_hessians_are_of_what_matrices_read():
    model, ids = filled(), documents(2, 24)
    with torch.no_grad():
        found = calibrate(model, [ids], Ranks())
    assert found.keys() == set(matrix_names(model.layout))


def test_rows_of_training_are_one_row():
    "Else a document that goes on in the next row would begin there."
    model, ids = filled(), documents(2, 24)
    ids[1, 0] = 5
    loss = stream_loss(model, model.cap)(ids, ids)
    assert loss != training_loss(model, model.cap)(ids, ids)

"""Blocks that run several times in a forward: whatever walks the blocks does so in the model's order, or says that it cannot."""
import json
import math
from dataclasses import asdict, fields, replace
from types import SimpleNamespace

import pytest
import torch
from test_engine import Replayed
from test_model import VARIANTS, filled, tokens
from tiny import settings_for, tiny_data

import golfnb.run.train as train_module
from golfnb.file.artifact import Lzma, save_artifact
from golfnb.run.average import NoAverage
from golfnb.text.bpb import ByteTable, tokenizer_hash
from golfnb.model.layers import rms_norm, token_nll
from golfnb.model.layout import bank_per_shape
from golfnb.model.golf import Golf, SavedModel, init_model, load_named, model_from_settings, named_state, saved_settings, take_order
from golfnb.model.engine import AdamW, ClipEach, Engine, Muon, Ranks
from golfnb.file.quantize import calibrate, captured_inputs, quantize_state
from golfnb.settings import GolfError
from golfnb.tools.guard import bytes_needed
from golfnb.tools.play import Player, TextPieces
from golfnb.tools.sampling import CachedReader, next_logits
from golfnb.run.train import RunLog, StepGraph, Trainer, backward_pass, rehearse, train, training_loss
from golfnb.score.ttt import score_first

ORDER = (0, 1, 2, 3, 1, 2, 3, 1, 2, 3, 4)  # three blocks three times


def with_visits(cfg, visits: int):
    "The same settings, of a recipe that allows an order of so many visits."
    kind = type(cfg)
    return type(kind.__name__, (kind,), {"visits": visits})(**vars(cfg))


def looped(order=ORDER, dtype=torch.float64, device="cpu", visits=None, **more) -> Golf:
    "A model of five blocks with random weights, and an order."
    plain, cfg = filled("odd", dtype, **more)
    cfg = with_visits(cfg, visits or len(order))
    model = Golf(cfg, plain.layout, dtype, device, skips=plain.skips)
    model.order = order
    draw = torch.Generator().manual_seed(4)
    skips = torch.randn(model.skip_weights.shape, generator=draw, dtype=torch.float64)
    load_named(model, named_state(plain) | {"skip_weights": skips})
    return model


def published_walk(model: Golf, encoder: list[int], decoder: list[int], ids, rope_len: int = 0):
    "Logits as parameter-golf's recurrence has them: an encoder pushes, a decoder pops, the skips are numbered by place."
    x0, ves, weights = model.embed(ids), model.value_embeddings(ids), model.weights()
    cos, sin = (t[:ids.shape[1]] for t in model.rotary(rope_len or ids.shape[1]))
    gates = model.skips.gates(model.skip_weights)
    x, stack = x0, []
    for i in encoder:
        x = model.blocks[i].run(x, x0, weights[i], cos, sin, ves.get(i))
        stack.append(x)
    for number, i in enumerate(decoder):
        if number < len(gates) and stack:
            x = x + gates[number] * stack.pop()
        x = model.blocks[i].run(x, x0, weights[i], cos, sin, ves.get(i))
    return rms_norm(x) @ model.tok_emb.T


def walked(model: Golf, ids, rope_len: int = 0):
    "Logits of a model whose order is ORDER."
    return published_walk(model, [0, 1, 2, 3, 1], [2, 3, 1, 2, 3, 4], ids, rope_len)


@pytest.mark.parametrize("gate", ["one", "sigmoid"])
def test_skips_belong_to_places_in_the_order(gate):
    model = looped(SKIP_GATE=gate)
    ids = tokens(model.cfg)
    assert len(model.skip_weights) == 5
    for order, encoder, decoder in ((ORDER, [0, 1, 2, 3, 1], [2, 3, 1, 2, 3, 4]), (range(5), [0, 1], [2, 3, 4])):
        model.order = order
        torch.testing.assert_close(model(ids), published_walk(model, encoder, decoder, ids))


def test_an_order_that_cannot_be_is_refused():
    model = looped()
    for wrong in ([0, 1, 2, 3], [0, 1, 2, 3, 4, 5], [0, 1, 2, 3, -1], [], (*ORDER, 4)):
        with pytest.raises(GolfError, match="order"):
            model.order = wrong
        assert model.order == ORDER
    plain, cfg = filled("odd")
    with pytest.raises(GolfError, match="visits"):
        plain.order = ORDER


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_file_says_the_order(variant):
    plain, cfg = filled(variant)
    assert "order" not in saved_settings(plain)
    L = cfg.num_layers
    for order, visits in (([*range(L), *range(L), *range(L)], 3 * L), (range(L), 2 * L)):
        model = Golf(with_visits(cfg, visits), plain.layout, torch.float64, skips=plain.skips)
        model.order = order
        init_model(model, cfg, 3)
        read, saved, _ = model_from_settings(json.loads(json.dumps(saved_settings(model))), torch.float64)
        load_named(read, named_state(model))
        assert read.order == model.order and saved.visits == visits
        take_order(plain if visits == L else model, saved_settings(read))
        with torch.no_grad():
            assert torch.equal(read(tokens(cfg)), model(tokens(cfg)))


def test_a_file_with_an_order_that_cannot_be_is_refused():
    good = saved_settings(looped())
    assert set(good) == {spec.name for spec in fields(SavedModel)}
    for wrong in ("0,1,2", "0,1,2,3,x", "0,1,2,3,4," + "4," * 99 + "4", ",", "0,1,2,3,999999999999"):
        with pytest.raises(GolfError, match="order"):
            model_from_settings(good | {"order": wrong}, device="meta")
    with pytest.raises(GolfError, match="(?i)most_visits"):
        model_from_settings(good | {"most_visits": 10**6}, device="meta")


def test_sampling_keeps_keys_and_values_for_each_visit():
    model = looped()
    text = torch.randint(96, (60,), generator=torch.Generator().manual_seed(1)).tolist()
    read = CachedReader(model)
    for n in (5, 6, 7, 24, 25, 26, 60):
        torch.testing.assert_close(read(text[:n]), next_logits(model, text[:n]), rtol=0, atol=1e-9)


def test_hessians_are_sums_over_visits():
    model, inputs = looped(), {}
    batches = [tokens(model.cfg, seed=n) for n in range(2)]
    found = calibrate(model, batches, Ranks())
    with torch.no_grad(), captured_inputs(model, lambda name, x: inputs.setdefault(name, []).append(x.flatten(0, 1))):
        model(torch.cat(batches))
    for name, rows in inputs.items():
        assert len(rows) == ORDER.count(int(name.split(".")[1]))
        torch.testing.assert_close(found[name], sum(x.T @ x for x in rows) / len(rows[0]), rtol=1e-10, atol=1e-12)


def test_the_guard_counts_what_each_visit_keeps():
    s = settings_for("demo")
    once = bytes_needed(s, 1, 4)
    more = bytes_needed(with_visits(s, s.num_layers + 6), 1, 4)
    tokens = s.rows_per_micro(1, s.train_seq_len) * s.train_seq_len
    assert more - once >= 4 * tokens * 6 * (2 * s.model_dim + s.mlp_dim)


def learnt_by_hand(model: Golf, text, cfg) -> torch.Tensor:
    "Nats of every target: chunks of two rows, each scored and then learnt with torch's own SGD, through a walk of every visit."
    sgd = torch.optim.SGD(model.parameters(), momentum=cfg.ttt_momentum)
    inputs, targets = (text[i:len(text) - 1 + i].view(-1, 2, cfg.eval_seq_len) for i in (0, 1))
    nats = []
    for c, (x, y) in enumerate(zip(inputs, targets, strict=True)):
        nats.append(token_nll(walked(model, x), y, model.cap).detach().flatten())
        sgd.param_groups[0]["lr"] = cfg.ttt_lr * 0.5 * (1 + math.cos(math.pi * c / (len(inputs) - 1)))
        for _ in range(cfg.ttt_epochs):
            sgd.zero_grad()
            token_nll(walked(model, x), y, model.cap).mean().backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), cfg.ttt_grad_clip)
            sgd.step()
    return torch.cat(nats)


def test_time_training_learns_through_every_visit():
    model, other = looped(), looped()
    T = model.cfg.eval_seq_len
    cfg = replace(model.cfg, eval_stride=T, ttt_chunk_tokens=2 * T, ttt_epochs=2, ttt_lr=0.02, ttt_grad_clip=1.0)
    cfg = with_visits(cfg, len(ORDER))
    text = torch.randint(96, (8 * T + 1,), generator=torch.Generator().manual_seed(2))
    table = ByteTable(torch.ones(96, dtype=torch.int16), torch.zeros(96, dtype=torch.bool), torch.zeros(96, dtype=torch.bool))
    nats = torch.zeros(8 * T, dtype=torch.float64)
    score_first(model, named_state(model), text, table, cfg, Ranks(), out=nats)
    wanted = learnt_by_hand(other, text, cfg)
    torch.testing.assert_close(nats, wanted, rtol=1e-9, atol=1e-9)
    for (name, ours), theirs in zip(named_state(model).items(), named_state(other).values(), strict=True):
        moved = (theirs - named_state(looped())[name]).abs().max()
        assert moved > 0 or name.startswith("skip"), name
    still = torch.zeros_like(nats)
    score_first(looped(), named_state(looped()), text, table, replace(cfg, ttt_lr=0.0), Ranks(), out=still)
    assert torch.equal(still[:2 * T], nats[:2 * T]) and (still - nats).abs().max() > 0.01, "it did learn"


@pytest.fixture(scope="module")
def player(tmp_path_factory):
    "A run's artifact that was written with ORDER, opened to play."
    root = tmp_path_factory.mktemp("order")
    tiny_data(root / "data")
    cfg = SavedModel(vocab_size=400, num_layers=5, model_dim=64, num_heads=2, num_kv_heads=1, train_seq_len=48, rope_train_len=24, ve_layers="1,4", ve_dim=16, bigram_vocab_size=64, bigram_dim=16,
                     order=",".join(map(str, ORDER)), most_visits=len(ORDER))
    model, _, _ = model_from_settings(asdict(cfg), torch.float32)
    init_model(model, cfg, 1)
    draw = torch.Generator().manual_seed(1)
    load_named(model, {n: t + 0.3 * torch.randn(t.shape, generator=draw) * (t.ndim == 2) for n, t in named_state(model).items()})
    save_artifact(root / "artifact.golf", quantize_state(named_state(model), False), {"settings": saved_settings(model), "tokenizer_sha256": tokenizer_hash(root / "data/tokenizer.model"), "recipe": "demo"}, Lzma())
    return Player(root / "artifact.golf")


def test_play_reads_writes_and_adapts_in_the_order_of_the_file(player):
    "Bits of a text, the likeliest text after it, and adapters that do not learn, against a walk of every visit."
    text, T = "Return the header.", player.cfg.train_seq_len
    assert player.golf.order == ORDER
    ids = player.encode(text)
    with torch.no_grad():
        logits = walked(player.golf, torch.tensor([ids]), T)[0]
        plain = Golf.forward(player.golf, torch.tensor([ids]), rope_len=T)[0]
        nats = token_nll(logits[:-1], torch.tensor(ids[1:]), player.golf.cap)
        torch.testing.assert_close(plain, logits, rtol=1e-4, atol=1e-4)
    wanted = (nats / math.log(2)).tolist()
    assert [t[1] for t in player.read(text)["tokens"]] == pytest.approx(wanted, abs=1e-3)
    still = []
    player.adapt(text, 0.0, still.extend)
    assert still == pytest.approx(wanted, abs=1e-3)
    longer = list(ids)
    with torch.no_grad():
        for _ in range(T - len(ids) - 1):
            longer.append(int(walked(player.golf, torch.tensor([longer]), T)[0, -1].argmax()))
    pieces = TextPieces(player.sp, start=False)
    assert "".join(player.write(text, T - len(ids) - 1, temperature=0.0)) == "".join(map(pieces, longer[len(ids):]))


# --- a change of order in the middle of a training

def batch(cfg, number: int) -> tuple:
    "Inputs and targets of a step."
    rows = tokens(cfg, T=25, seed=number)
    return rows[:, :-1], rows[:, 1:]


def trained(make_backward, change_at: int, device="cpu", dtype=torch.float64, steps=8):
    "Losses of a training whose order changes at a step and back two steps before its end, and the matrices after it."
    s = looped().cfg
    model = Golf(s, bank_per_shape(s, 1), dtype, device)
    init_model(model, s, 3)
    engine = Engine(model.role_params(), model.layout, Ranks(device=torch.device(device)), Muon(), AdamW(), ClipEach(0.3))
    loss_fn = training_loss(model, model.cap)
    backward = make_backward(loss_fn, model)
    losses = []
    for step in range(steps):
        model.order = ORDER if change_at <= step < steps - 2 else range(5)
        ids, targets = (t.to(device) for t in batch(s, step))
        losses.append(backward(ids, targets, 1))
        engine.launch(loss=losses[-1])
        engine.finish(momentum=0.9)
    return torch.stack(losses).cpu(), [bank.fp32_shard.clone() for bank in engine.banks.values()]


def plain_backward(loss_fn, model):
    return lambda *batch: backward_pass(loss_fn, *batch)


def test_each_order_has_a_recording(monkeypatch):
    monkeypatch.setattr(train_module, "CudaGraphed", Replayed)
    graphs = []

    def recorded(loss_fn, model):
        graphs.append(StepGraph(loss_fn, model))
        return graphs[0].backward

    losses, weights = trained(recorded, 4, steps=12)
    plain, others = trained(plain_backward, 4, steps=12)
    assert torch.equal(losses, plain) and all(torch.equal(a, b) for a, b in zip(weights, others, strict=True))
    assert {order: made.graphed.calls for order, made in graphs[0].recorded.items()} == {tuple(range(5)): 6, ORDER: 6}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("compiled", [False, True])
def test_each_order_has_a_recording_on_the_gpu(compiled):
    "Both are replayed, the first also after the second was recorded, in memory that they share."
    graphs = []

    def recorded(loss_fn, model):
        if compiled:
            loss_fn = torch.compile(loss_fn, dynamic=False, fullgraph=True)
        graphs.append(StepGraph(loss_fn, model))
        return graphs[0].backward

    losses, weights = trained(recorded, 6, "cuda", torch.float32, steps=16)
    plain, others = trained(plain_backward, 6, "cuda", torch.float32, steps=16)
    made = {order: found.graphed.graph for order, found in graphs[0].recorded.items()}
    assert set(made) == {tuple(range(5)), ORDER} and None not in made.values()
    assert len({graph.pool() for graph in made.values()}) == 1
    torch.testing.assert_close(losses, plain, rtol=1e-3, atol=1e-3)
    for ours, theirs in zip(weights, others, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-2, atol=1e-2)


def test_the_share_of_a_run_is_what_ends_it_first():
    model = looped()
    s = replace(model.cfg, iterations=40, max_wallclock_seconds=10.0, warmup_steps=5, train_log_every=0)
    engine = Engine(model.role_params(), model.layout, Ranks(), Muon(), AdamW(), ClipEach(0.3))
    batches = SimpleNamespace(state=int, rewind=int)
    t = Trainer(s, engine, batches, NoAverage(engine.tensors()), RunLog(quiet=True))
    assert (t.share_of_run(10, 1000.0), t.share_of_run(10, 6000.0)) == (0.25, 0.6)
    seen = []

    def step(t):
        seen.append(t.share_done)
        loss = backward_pass(training_loss(model, model.cap), *batch(s, 0), 1)
        t.clock()
        control = t.launch(loss, 500.0 * t.steps, False)
        engine.finish()
        t.push(control, loss)

    rehearse(t, step, RunLog(quiet=True))
    assert seen == [0.0, 0.0, 0.0, 1.0, 1.0]
    t = Trainer(replace(s, iterations=6), engine, batches, NoAverage(engine.tensors()), RunLog(quiet=True))
    seen.clear()
    train(t, step)
    assert seen == [0.0, 0.0, 0.0, 1 / 6, 2 / 6, 3 / 6] and t.share_done == 1.0

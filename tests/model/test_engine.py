"""The engine against oracles in one process: torch.optim.Muon at constant momentum, and the per-matrix rule under warm-up."""
import gc
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from golfnb.model.banks import make_banks, unbank
from golfnb.model.layout import bank_per_shape, matrix_names
from golfnb.model.golf import FreezeBlocks, Golf, init_model, named_state
from golfnb.muon.newton_schulz import quintic
from golfnb.model.engine import CONTROL_SCALARS, AdamW, ClipEach, ClipMean, Engine, Muon, NoClip, Ranks, Sgd, record_graph
from golfnb.model.plan import comm_schedule
from golfnb.settings import GolfError
from golfnb.studies.baselines import plan_model
from golfnb.studies.buckets import CutMuon, bucket_layout
from golfnb.run.train import StepGraph, backward_pass, micro_batches, training_loss
from workers import Batches, settings, speedrun_kinds, variant_of


def model_of(env, dtype=torch.float64, plan="pr399"):
    variant = variant_of(env, dtype, seed=3)
    model, _ = plan_model(variant, plan, Ranks(), 1)
    return variant, model.layout, model


def muon_one(weight, momentum, grad, mu, scale, lr=0.025, wd=0.04):
    "Muon on one matrix, as it is written on paper."
    momentum = mu * momentum + grad
    return weight * (1 - lr * wd) - lr * scale * quintic(grad + mu * momentum), momentum


def run_steps(engine, model, variant, momenta, check=None):
    loader, loss_fn = Batches(variant, Ranks()), training_loss(model, model.cap)
    for mu in momenta:
        loss_fn(*loader.next()).backward()
        if check:
            check(mu)
        engine.step(momentum=mu)


@pytest.mark.parametrize("plan", ["pr399", "shared_mlp", "pr125", "pr132", "attn2+mlp4,mlp2,attn1"])
@pytest.mark.parametrize("order", ["big_first", "small_first"])
def test_against_the_per_matrix_rule_under_warm_up(plan, order):
    variant, layout, model = model_of(settings(3), plan=plan)
    engine = Engine(model.role_params(), layout, Ranks(), CutMuon(), AdamW(), ClipMean(0), plan=comm_schedule(layout, order))
    weights = {n: w.clone() for n, w in named_state(model).items() if n in set(matrix_names(layout))}
    momentum = {n: torch.zeros_like(w) for n, w in weights.items()}

    def oracle(mu):
        grads = unbank(layout, {n: b.grad for n, b in model.banks.items()})
        for _, _, m in layout:
            g = grads[m.name]
            scale = max(1.0, m.rows / m.cols) ** 0.5
            weights[m.name], momentum[m.name] = muon_one(weights[m.name], momentum[m.name], g, mu, scale)

    run_steps(engine, model, variant, [0.85 + 0.02 * s for s in range(5)], oracle)
    ours = named_state(model, *engine.gather())
    assert max((ours[n] - w).abs().max().item() for n, w in weights.items()) < 1e-10


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch.optim.Muon came with torch 2.9")
def test_against_torch_muon_at_constant_momentum():
    "torch keeps momentum as a moving average: proportional to ours while mu is constant, and it runs Newton-Schulz in bf16, so the bound is bf16's."
    variant, layout, model = model_of(settings(3))
    engine = Engine(model.role_params(), layout, Ranks(), Muon(lr=0.02, wd=0.1), AdamW(), ClipMean(0))
    names = set(matrix_names(layout))
    plain = {n: torch.nn.Parameter(w.float().clone()) for n, w in named_state(model).items() if n in names}
    theirs = torch.optim.Muon(list(plain.values()), lr=0.02, weight_decay=0.1, momentum=0.9, nesterov=True, adjust_lr_fn="original")
    start = {n: w.detach().clone() for n, w in plain.items()}

    def oracle(mu):
        for bank, slot, m in layout:
            plain[m.name].grad = model.banks[bank.name].grad[slot].float().clone()
        theirs.step()

    run_steps(engine, model, variant, [0.9] * 5, oracle)
    ours = named_state(model, *engine.gather())
    for n, w in plain.items():
        moved, difference = (w.detach() - start[n]).norm(), (w.detach() - ours[n].float()).norm()
        assert moved > 0 and difference < 0.05 * moved, (n, float(difference / moved))


def test_snapshot_restore_leaves_no_trace():
    variant, layout, model = model_of(settings(3))
    engine = Engine(model.role_params(), layout, Ranks(), Muon(), AdamW(), ClipMean(0.3))
    saved, before = [t.clone() for t in engine.state()], {n: p.detach().clone() for n, p in model.named_parameters()}
    run_steps(engine, model, variant, [0.9] * 3)
    assert any(not torch.equal(p, before[n]) for n, p in model.named_parameters())
    engine.restore(saved)
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())
    assert all(not t.any() for b in engine.banks.values() for t in b.state.values()) and engine.scalars.count == 0


def test_gather_load_round_trip():
    variant, layout, model = model_of(settings(3))
    engine = Engine(model.role_params(), layout, Ranks(), Muon(), AdamW(), ClipMean(0.3))
    banks, others = engine.gather()
    run_steps(engine, model, variant, [0.9] * 2)
    engine.load(banks, others)
    again = engine.gather()
    assert all(torch.equal(banks[k], again[0][k]) for k in banks) and all(torch.equal(others[k], again[1][k]) for k in others)


def test_sgd_keeps_fp32_masters_for_bf16_weights():
    "lr 0.002 on bf16 weights would lose most of a step; the masters must move as an fp32 oracle does."
    variant, layout, model = model_of(settings(3), torch.bfloat16)
    engine = Engine(model.role_params(), layout, Ranks(), Sgd(0.002), Sgd(0.002), ClipMean(0))
    banks, others = engine.gather()
    oracle, momentum = {**banks, **others}, {}

    def step(mu):
        for n, p in {**dict(model.banks), **model.role_params()["table"], **model.role_params()["scalar"]}.items():
            g = torch.zeros_like(p) if p.grad is None else p.grad
            momentum[n] = mu * momentum.get(n, 0) + g.float()
            oracle[n] = oracle[n] - 0.002 * momentum[n]

    run_steps(engine, model, variant, [0.9] * 4, step)
    now = {**engine.gather()[0], **engine.gather()[1]}
    for n in oracle:
        assert torch.allclose(now[n], oracle[n], rtol=1e-6, atol=1e-8), n


def test_layout_for_another_world_is_refused():
    variant, _, model = model_of(settings(3))
    with pytest.raises(GolfError, match="2 ranks.* 1 "):
        Engine(model.role_params(), bank_per_shape(variant.settings, 2), Ranks(), Muon(), AdamW(), NoClip())


def test_local_and_global_clipping_agree_on_one_rank():
    "With one rank a rank's own gradient is the averaged one; the clip must act, and skip nothing."
    weights = {}
    for clip, accum in ((ClipEach, 1), (ClipMean, 1), (ClipEach, 2), (ClipMean, 2)):
        variant, layout, model = model_of(settings(3))
        engine = Engine(model.role_params(), layout, Ranks(), Muon(), AdamW(), clip(0.01))
        loader, loss_fn = Batches(variant, Ranks(), accum), training_loss(model, model.cap)
        for _ in range(3):
            for _ in range(accum):
                (loss_fn(*loader.next()) / accum).backward()
                if accum > 1:
                    engine.accumulate()
            control = engine.launch()
            engine.finish(momentum=0.9)
            assert control[CONTROL_SCALARS.index("norm_sq")] > 0.01 ** 2
        weights[clip, accum] = named_state(model)
    first = weights[ClipEach, 1]
    for other in weights.values():
        assert max((first[n] - other[n]).abs().max().item() for n in first) < 1e-10


def test_a_clip_serves_one_engine_after_another():
    "Nothing of the first engine stays in it."
    variant, layout, model = model_of(settings(3))
    shared, moved = ClipEach(0.01), []
    for clip in (shared, shared, ClipEach(0.01)):
        init_model(model, variant.settings, 3)
        engine = Engine(model.role_params(), layout, Ranks(), Sgd(1.0), Sgd(1.0), clip)
        run_steps(engine, model, variant, [0.0])
        moved.append(named_state(model, *engine.gather()))
    for name, weight in moved[0].items():
        assert torch.equal(weight, moved[1][name]) and torch.equal(weight, moved[2][name])


class Replayed:
    "Records on a CPU: a replay runs the pass and writes into the places that the third call left."

    def __init__(self, fn, device, beside):
        self.fn, self.calls = fn, 0
        MADE.append(self)

    def __call__(self):
        graph, self.calls = self.fn.__self__, self.calls + 1
        assert graph.places == [p.data_ptr() for p in graph.params], "a replay would read what lies there no more"
        self.fn()
        if self.calls <= 3:
            self.loss, self.grads = graph.loss.detach(), graph.grads
        for kept, new in zip((self.loss, *self.grads), (graph.loss.detach(), *graph.grads)):
            kept.copy_(new)
        graph.loss, graph.grads = self.loss, self.grads


MADE = []


def recorded(loss_fn, model):
    graph = StepGraph(loss_fn, model)
    return graph.backward, graph


def plain_backward(loss_fn, model):
    return partial(backward_pass, loss_fn), None


def stepped(wrap, clip, accum, device="cpu", dtype=torch.float64, steps=6, runs=1):
    "Losses of some steps, and the masters after them; with more `runs` each after the first starts from the same weights, with an engine of its own."
    variant = variant_of(settings(3), dtype)
    s = variant.settings
    model = Golf(s, bank_per_shape(s, 1), dtype=dtype, device=device)
    backward, graph = wrap(training_loss(model, model.cap), model)
    for _ in range(runs):
        init_model(model, s, 3)
        engine = Engine(model.role_params(), model.layout, Ranks(device=device), Muon(), AdamW(), clip(0.01))
        loader, losses = Batches(variant, Ranks(device=device), accum), []
        loader.next = lambda rows=loader.next: tuple(t.to(device) for t in rows())
        for _ in range(steps):
            losses.append(micro_batches(backward, loader, engine, accum))
            engine.launch(loss=losses[-1])
            engine.finish(momentum=0.9)
    return torch.stack(losses), [b.fp32_shard for b in engine.banks.values()], graph


@pytest.mark.parametrize("clip, accum, runs", [(ClipEach, 1, 1), (ClipMean, 1, 1), (ClipEach, 2, 1), (ClipMean, 2, 1), (ClipEach, 2, 2)])
def test_a_recorded_backward_trains_as_the_plain_one(clip, accum, runs, monkeypatch):
    "Gradients stand at fixed places and the engine takes them away after each: nothing may be lost, kept or counted twice; an engine that moves the parameters asks for a new recording."
    monkeypatch.setattr("golfnb.run.train.CudaGraphed", Replayed)
    MADE.clear()
    losses, masters, _ = stepped(recorded, clip, accum, runs=runs)
    plain, others, _ = stepped(plain_backward, clip, accum)
    assert torch.equal(losses, plain) and len(set(losses.tolist())) == 6 and all(torch.equal(a, b) for a, b in zip(masters, others))
    assert [m.calls for m in MADE] == [6 * accum] * runs


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("accum, runs", [(1, 1), (2, 1), (2, 2)])
def test_a_recorded_backward_on_the_gpu(accum, runs):
    losses, masters, graph = stepped(recorded, ClipEach, accum, "cuda", torch.float32, runs=runs)
    plain, others, _ = stepped(plain_backward, ClipEach, accum, "cuda", torch.float32)
    assert [made.graphed.graph is not None for made in graph.recorded.values()] == [True]
    torch.testing.assert_close(losses, plain, rtol=1e-4, atol=1e-4)
    for a, b in zip(masters, others):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)


def beside(device, steps, eager, dtype=torch.bfloat16, width=768):
    "Masters of an engine on bare banks of four very different sizes, each bank on its own stream."
    layout = bucket_layout(speedrun_kinds(width), "smear_gate1,attn_gate10,attn10,mlp22", 1)
    draw = torch.Generator().manual_seed(5)
    banks = make_banks(layout, dtype, device)
    with torch.no_grad():
        for b in banks.values():
            b.copy_(0.02 * torch.randn(b.shape, generator=draw))
    grads = {n: (1e-3 * torch.randn(b.shape, generator=draw)).to(b) for n, b in banks.items()}
    engine = Engine({"bank": banks}, layout, Ranks(device=device), Muon(), AdamW(), ClipEach(0.3), plan=comm_schedule(layout, "big_first"))
    if eager:
        for step in (engine.small_step, *engine.bank_steps.values()):
            step.left = -1
    for _ in range(steps):
        for n, b in banks.items():
            b.grad = grads[n].clone()
        engine.step(momentum=0.95)
    return [engine.banks[n].fp32_shard for n in sorted(banks)]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_banks_recorded_beside_each_other_do_what_eager_ones_do():
    for ours, theirs in zip(beside("cuda", 60, False), beside("cuda", 60, True)):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_scalars_are_not_rounded_on_the_gpu():
    "Momentum in bf16 is the CPU's, where a 0-dim factor keeps its precision."
    m, g, factor, found = torch.randn(2, 8, 16).bfloat16(), torch.zeros(2, 8, 16).bfloat16(), torch.tensor(0.99), []
    for device in ("cpu", "cuda"):
        momentum, grad, mu = (t.clone().to(device) for t in (m, g, factor))
        one, master = torch.ones((), device=device), torch.zeros(2, 8, 16, device=device)
        shard = SimpleNamespace(fp32_shard=master, state={"momentum_buffer": momentum}, shape_lr_scale=one.expand(2, 1, 1), rounded=torch.empty_like(grad))
        Muon().move(shard, grad, one, mu, one, one.bool())
        found.append(momentum.cpu())
    assert torch.equal(*found) and torch.equal(found[0], (m.float() * factor).bfloat16())


def test_every_plan_adapts_alike():
    "Score-first test-time training with a frozen block: SGD on the masters, whatever slot a matrix lies in."
    from golfnb.text.bpb import ByteTable
    from golfnb.score.ttt import score_first

    none, stream, found = torch.zeros(32, dtype=torch.bool), torch.randint(32, (65,), generator=torch.Generator().manual_seed(0)), []
    for plan in ("pr399", "shared_mlp", "pr125", "pr132"):
        variant, layout, model = model_of(settings(3, EVAL_SEQ_LEN="16", EVAL_STRIDE="8", TTT_CHUNK_TOKENS="16", TTT_EPOCHS="1", TTT_LR="0.1"), plan=plan)
        state = named_state(model)
        loss, _, _ = score_first(model, state, stream, ByteTable(torch.ones(32, dtype=torch.int16), none, none), variant.settings, Ranks(), freeze=FreezeBlocks(1))
        found.append((loss, named_state(model)))
    for loss, after in found[1:]:
        assert abs(loss - found[0][0]) < 1e-9 and max((after[n] - found[0][1][n]).abs().max().item() for n in after) < 1e-9
    moved = {n for n in state if not torch.equal(found[0][1][n], state[n])}
    assert "blocks.1.attn.c_q.weight" in moved and not any(n.startswith("blocks.0.") for n in moved)


def test_a_recording_keeps_the_garbage_collector_out(monkeypatch):
    "A dead graph freed in the middle would spoil it; afterwards the collector is as it was, also after an error."
    monkeypatch.setattr(torch.cuda, "graph", lambda graph, **how: nullcontext())
    seen = []
    for on in (True, False):
        (gc.enable if on else gc.disable)()
        try:
            assert record_graph(lambda: seen.append(gc.isenabled()) or 7, None) == 7 and gc.isenabled() == on
            with pytest.raises(ZeroDivisionError):
                record_graph(lambda: 1 / 0, None)
            assert gc.isenabled() == on
        finally:
            gc.enable()
    assert seen == [False, False]

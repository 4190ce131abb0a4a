"""Updates of lists of tensors: kernels against the plain loop, interpreted on a CPU and compiled on a GPU, and which of the two is chosen."""
import os
import subprocess
import sys
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch

import golfnb.muon.multi_tensor as M
from golfnb.muon.jit import triton
from golfnb.muon.multi_tensor import apply_each, plain_apply, plain_prepare, plain_update, prepare_each, update_each
from golfnb.muon.rules import AdamWRule, MuonEqRule, MuonRule, NorMuonRule, SgdRule

UNEVEN = ((64, 128), (70, 33), (1, 5), (0, 7), (3, 1), (130, 80))
ALIKE = ((48, 80),) * 3
FULL, HALF, BF16 = torch.float32, torch.float16, torch.bfloat16
MUON = {**MuonRule.defaults, "lr": 0.02, "weight_decay": 0.1}
ADAMW = {**AdamWRule.defaults, "lr": 0.02, "weight_decay": 0.1}


class Maker:
    "Random tensors of a device."

    def __init__(self, device: str, seed: int = 0):
        self.device, self.generator = device, torch.Generator().manual_seed(seed)

    def rand(self, *shape: int, dtype=FULL):
        return torch.randn(shape, generator=self.generator).to(self.device, dtype)

    def each(self, shapes, dtype=FULL):
        return [self.rand(*shape, dtype=dtype) for shape in shapes]

    def oks(self, n: int):
        return [torch.tensor(i % 3 != 1, device=self.device) for i in range(n)]  # the second is False


def spoil(tensors, oks):
    "NaN and infinity in the tensors that are not ok."
    for t, ok in zip(tensors, oks, strict=True):
        if not ok:
            t.view(-1)[0], t.view(-1)[-1] = float("nan"), float("inf")


def views(tensors):
    "The same numbers as columns of wider matrices."
    return [torch.cat([t, t, t], 1)[:, t.shape[1]:2 * t.shape[1]] for t in tensors]


def flip(tensors):
    "The same numbers, column after column."
    return [t.mT.contiguous().mT for t in tensors]


def copies(states):
    return [{name: t.clone() for name, t in state.items()} for state in states]


@dataclass
class Compare:
    "How far apart kernel and loop may be; 0: no bit."
    rtol: float = 0.0

    def __call__(self, found, expected):
        for a, b in zip(found, expected, strict=True):
            if isinstance(a, dict):
                self(a.values(), b.values())
            else:
                torch.testing.assert_close(a, b, rtol=self.rtol, atol=self.rtol / 10, equal_nan=True)


def with_tensors(group: dict, device: str, dtype) -> dict:
    "A group whose numbers are tensors."
    def tensor(value):
        if isinstance(value, tuple):
            return tuple(map(tensor, value))
        return torch.tensor(value, device=device, dtype=dtype) if isinstance(value, float) else value
    return {k: tensor(v) for k, v in group.items()}


def groups(group: dict, device: str):
    "A group with Python's numbers, with tensors that hold them exactly, and with rounded ones."
    yield group, 0.0
    yield with_tensors(group, device, torch.float64), 0.0
    yield with_tensors(group, device, FULL), 1e-5


def check_prepare(device: str, products, kept=FULL):
    make = Maker(device)
    coef = torch.tensor(0.7, device=device)
    for shapes in (UNEVEN, ALIKE):
        for change in (list, views, flip, lambda ts: [*ts[:-1], ts[-1][:1, :1].expand(ts[-1].shape)]):
            numbers = groups({**MUON, "product_dtype": products, "nesterov": change is not flip}, device)
            for group, rtol in numbers if change is list else [next(numbers)]:
                for dtype in (FULL, BF16):
                    oks = make.oks(len(shapes))
                    grads = make.each(shapes, dtype)
                    spoil(grads, oks)
                    grads = change(grads)
                    states = [{"momentum_buffer": t} for t in make.each(shapes, kept)]
                    before, twins = copies(states), copies(states)
                    if change is views:
                        states = [{"momentum_buffer": t} for t in views([s["momentum_buffer"] for s in states])]
                    found = M.kernel_prepare(grads, states, group, oks, coef)
                    assert isinstance(found, torch.Tensor) == (shapes is ALIKE)
                    close = Compare(rtol)
                    Compare(rtol and 1e-2)(found, plain_prepare(MuonRule(), grads, twins, group, oks, coef))
                    close(states, twins)
                    assert torch.equal(states[1]["momentum_buffer"], before[1]["momentum_buffer"]), "not ok"
                    assert not torch.equal(states[0]["momentum_buffer"], before[0]["momentum_buffer"])


def check_apply(device: str, narrow):
    make = Maker(device, 1)
    for shapes in (UNEVEN, ALIKE):
        for change in (list, views, flip, lambda ts: [t[:1, :1].expand(t.shape) for t in ts]):
            for group, rtol in [*groups(MUON, device), *groups({**MUON, "cautious_wd": True}, device)] if change is list else [(MUON, 0.0)]:
                for weight_dtype in (FULL, narrow):
                    oks = make.oks(len(shapes))
                    directions = make.each(shapes, narrow if weight_dtype == FULL else FULL)
                    spoil(directions, oks)
                    directions = change(directions)
                    masters = views(make.each(shapes)) if change is views else make.each(shapes)
                    weights = masters if weight_dtype == FULL else [t.to(weight_dtype) for t in masters]
                    before = [t.clone() for t in weights]
                    twins = [t.clone() for t in masters]
                    twin_weights = twins if weights is masters else [t.clone() for t in weights]
                    factors = [0.5 + i / 3 for i in range(len(shapes))]
                    M.kernel_apply(weights, directions, group, oks, factors, masters)
                    plain_apply(twin_weights, directions, group, oks, factors, twins)
                    Compare(rtol)(masters, twins), Compare(rtol and 1e-2)(weights, twin_weights)
                    assert torch.equal(weights[1], before[1]) and not torch.equal(weights[0], before[0])


def check_update(device: str, narrow, rounding: float):
    make = Maker(device, 2)
    coef = torch.tensor(0.7, device=device)
    for group, rtol in [*groups(ADAMW, device), ({**ADAMW, "cautious_wd": True}, 0.0)]:
        single = () if group["lr"] is ADAMW["lr"] else (1,)  # the loop takes two tensors without dimensions in the wider of their dtypes
        shapes = ((64, 128), (48,), (5,), single, (7, 3, 11), (9000,))
        for weight_dtype in (FULL, narrow):
            oks, masters = make.oks(len(shapes)), make.each(shapes)
            weights = masters if weight_dtype == FULL else [t.to(weight_dtype) for t in masters]
            steps = [torch.full((), float(i), device=device) for i in range(len(shapes))]
            states = [{"step": step, "exp_avg": make.rand(*s), "exp_avg_sq": make.rand(*s).square()} for step, s in zip(steps, shapes)]
            twins, before = [t.clone() for t in masters], [t.clone() for t in weights]
            twin_weights = twins if weights is masters else [t.clone() for t in weights]
            twin_states = copies(states)
            for dtype in (FULL, FULL if device == "cpu" else BF16, FULL):  # new gradients each step
                grads = make.each(shapes, dtype)
                spoil(grads, oks)
                grads[0] = grads[0].mT.contiguous().mT
                M.kernel_update(weights, grads, states, group, oks, coef, masters)
                plain_update(AdamWRule(), twin_weights, grads, twin_states, group, oks, coef, twins)
            rtol = max(rtol, rounding)
            Compare(rtol)(masters, twins), Compare(rtol)(states, twin_states), Compare(rtol and 1e-2)(weights, twin_weights)
            assert [float(s["step"]) for s in states] == [3, 1, 5, 6, 4, 8] and torch.equal(weights[1], before[1])


INTERPRETED = """
import torch
from test_multi_tensor import *
check_prepare("cpu", None), check_prepare("cpu", torch.float16)  # the interpreter rounds fp16 right, and cuts bf16
check_prepare("cpu", None, torch.float16)
check_apply("cpu", torch.float16)
check_update("cpu", torch.float16, 1e-5)  # torch's square root on a CPU rounds in its own way
print("equal")
"""


@pytest.mark.skipif(triton is None, reason="needs Triton")
def test_interpreted_kernels_equal_the_plain_loop():
    env = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, "-c", INTERPRETED], env=env, capture_output=True, text=True)
    assert done.returncode == 0 and "equal" in done.stdout, done.stderr[-3000:]


def muon_lists(device: str, shapes=UNEVEN, dtype=FULL):
    make = Maker(device, 3)
    states = [{"momentum_buffer": t} for t in make.each(shapes)]
    return make.each(shapes, dtype), states, MUON, make.oks(len(shapes)), torch.tensor(0.7, device=device)


def test_without_a_gpu_lists_take_the_plain_loop():
    for rule in (MuonRule(), NorMuonRule(), MuonEqRule(), SgdRule()):
        grads, states, group, oks, coef = muon_lists("cpu")
        twins = copies(states)
        group = {**group, **rule.defaults}
        found = prepare_each(rule, grads, states, group, oks, coef)
        Compare()(found, plain_prepare(rule, grads, twins, group, oks, coef)), Compare()(states, twins)
        alike = prepare_each(rule, *muon_lists("cpu", ALIKE))
        assert alike.shape == (3, 48, 80)
    assert prepare_each(MuonRule(), [], [], MUON, [], torch.tensor(1.)) == []
    weights = Maker("cpu").each(UNEVEN)
    narrow, twins = [t.bfloat16() for t in weights], [t.clone() for t in weights]
    apply_each(narrow, grads, group, oks, [1.0] * len(UNEVEN), weights)
    plain_apply(twins, grads, group, oks, [1.0] * len(UNEVEN))
    Compare()(weights, twins), Compare()([narrow[0], narrow[2]], [twins[0].bfloat16(), twins[2].bfloat16()])


def test_what_any_rule_of_ones_own_prepares_stays_in_full():
    class Own(MuonRule):
        def prepare(self, grad, state, group, ok):
            return 2 * super().prepare(grad, state, group, ok)

    grads, states, group, oks, coef = muon_lists("cpu", ALIKE, BF16)
    group = {**group, "product_dtype": BF16}
    twins = copies(states)
    assert prepare_each(MuonRule(), grads, states, group, oks, coef).dtype == BF16
    own = prepare_each(Own(), grads, twins, group, oks, coef)
    assert own.dtype == FULL


class Chosen(Exception):
    "A kernel was chosen."


@pytest.fixture
def kernels(monkeypatch):
    "Where every list fits, who chooses kernels raises Chosen."
    def chosen(*args):
        raise Chosen
    monkeypatch.setattr(M, "kernels_fit", lambda *args: True)
    for name in ("kernel_prepare", "kernel_apply", "kernel_update"):
        monkeypatch.setattr(M, name, chosen)


def test_kernels_are_for_the_rules_that_they_repeat(kernels):
    class Own(MuonRule):
        pass

    class OwnAdamW(AdamWRule):
        pass

    for rule in (MuonRule(), NorMuonRule()):
        with pytest.raises(Chosen):
            prepare_each(rule, *muon_lists("cpu"))
    for rule in (Own(), SgdRule()):
        prepare_each(rule, *muon_lists("cpu"))
    with pytest.raises(Chosen):
        apply_each([], [], MUON, [], [])
    for rule in (AdamWRule(), OwnAdamW()):
        state = {"step": torch.zeros(()), "exp_avg": torch.zeros(3), "exp_avg_sq": torch.zeros(3)}
        lists = [torch.zeros(3)], [torch.ones(3)], [state], ADAMW, [torch.tensor(True)], torch.tensor(1.)
        if type(rule) is AdamWRule:
            with pytest.raises(Chosen):
                update_each(rule, *lists)
        else:
            update_each(rule, *lists)
            assert float(lists[0][0][0]) == pytest.approx(-ADAMW["lr"])


@pytest.mark.skipif(triton is None, reason="needs Triton")
def test_what_fits_kernels():
    def stand_in(dtype=FULL, device=0, lies=True):
        return SimpleNamespace(dtype=dtype, is_cuda=device >= 0, get_device=lambda: device, lies=lies)

    def fit(full, weights=(), read=()):
        return M.kernels_fit(full, weights, read, lambda t: t.lies)

    good = [stand_in()]
    assert fit(good, [stand_in(BF16)], [stand_in(BF16, lies=False)]) and fit(good) and not fit([])
    assert not fit([stand_in(BF16)]) and not fit([stand_in(torch.float64)]) and not fit([stand_in(lies=False)])
    assert not fit(good, [stand_in(lies=False)]) and not fit(good, [stand_in(HALF)]) and not fit(good, [], [stand_in(torch.float64)])
    assert not fit(good, [], [stand_in(device=1)]), "on two GPUs"
    for lists in (([stand_in(device=-1)],), (good, [stand_in(device=-1)]), (good, [], [stand_in(device=-1)])):
        assert not fit(*lists)


gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.gpu
@gpu
def test_on_the_gpu_kernels_are_the_plain_loop_bit_for_bit():
    for products in (None, FULL, HALF):
        check_prepare("cuda", products)
    check_apply("cuda", BF16)
    check_update("cuda", BF16, 0.0)


class Whole:
    "Muon's matrices and AdamW's tensors with all that a step of them needs, and the step in one of two ways."

    def __init__(self, lr):
        make = Maker("cuda", 4)
        self.shapes = (*UNEVEN, (64, 64), (64, 64))
        self.masters, self.small = make.each(self.shapes), make.each(((70,), (33, 48)))
        self.weights = [t.bfloat16() for t in self.masters]
        self.momenta = [{"momentum_buffer": torch.zeros_like(t)} for t in self.masters]
        self.moments = [{"step": torch.zeros((), device="cuda"), "exp_avg": torch.zeros_like(t), "exp_avg_sq": torch.zeros_like(t)} for t in self.small]
        self.n = len(self.shapes)
        self.oks, self.coef = make.oks(self.n + 2), torch.tensor(0.5, device="cuda")
        self.muon, self.adamw = {**MUON, "lr": lr}, {**ADAMW, "lr": lr}
        self.factors = [1.0 + i for i in range(self.n)]

    def step(self, fast: bool, grads):
        prepare, apply, update = (prepare_each, apply_each, update_each) if fast else (plain_prepare, plain_apply, plain_update)
        made = prepare(MuonRule(), grads[:self.n], self.momenta, self.muon, self.oks[:self.n], self.coef)
        apply(self.weights, made, self.muon, self.oks[:self.n], self.factors, self.masters)
        update(AdamWRule(), self.small, grads[self.n:], self.moments, self.adamw, self.oks[self.n:], self.coef)

    def everything(self):
        return [*self.masters, *self.weights, *self.small, *self.momenta, *self.moments]

    def grads(self, seed):
        make = Maker("cuda", 100 + seed)
        return [*make.each(self.shapes, BF16), *make.each([t.shape for t in self.small])]


@pytest.mark.gpu
@gpu
def test_steps_ahead_of_the_gpu_keep_their_own_addresses():
    "Hundreds of steps wait behind a busy GPU, each with new gradients, before the first one runs; the host never waits."
    fast, slow = Whole(0.01), Whole(0.01)
    every = [fast.grads(seed) for seed in range(60)]
    fast.step(True, every[0]), slow.step(False, every[0])
    torch.cuda.synchronize()
    torch.cuda._sleep(10**8)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for grads in every[1:]:
            fast.step(True, [g.clone() for g in grads])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for grads in every[1:]:
        slow.step(False, grads)
    Compare()(fast.everything(), slow.everything())


def compiled_forms() -> int:
    return sum(len(M.jitted(k).device_caches[0][0]) for k in (M.momentum_kernel, M.apply_kernel, M.adamw_kernel, M.count_kernel))


@pytest.mark.gpu
@gpu
def test_numbers_that_change_compile_nothing():
    whole = Whole(0.01)
    whole.step(True, whole.grads(0))
    before = compiled_forms()
    for i in range(5):
        whole.muon |= {"lr": 0.01 / (i + 2), "momentum": 0.9 + i / 100, "weight_decay": 0.1 * i}
        whole.adamw |= {"lr": i, "betas": (0.5, 0.5 + i / 10), "eps": 1e-8 * (i + 1)}
        whole.step(True, whole.grads(i))
    assert compiled_forms() == before > 0


@pytest.mark.gpu
@gpu
def test_a_recorded_step_reads_what_is_new_at_each_replay():
    "Gradients, learning rate, clipping and oks change between replays, and steps that are not recorded go between."
    fast, slow = Whole(torch.full((), 0.01, device="cuda", dtype=torch.float64)), Whole(torch.full((), 0.01, device="cuda", dtype=torch.float64))
    grads = fast.grads(0)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        fast.step(True, grads)
    torch.cuda.current_stream().wait_stream(side)
    slow.step(False, grads)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        fast.step(True, grads)
    for i in range(1, 6):
        for mine, new in zip(grads, fast.grads(i)):
            mine.copy_(new)
        for whole in (fast, slow):
            whole.muon["lr"].fill_(0.01 * i), whole.adamw["lr"].fill_(0.01 * i), whole.coef.fill_(1 / i)
            for j, ok in enumerate(whole.oks):
                ok.fill_((i + j) % 3 > 0)
        graph.replay()
        slow.step(False, grads)
        fast.step(True, [g.clone() for g in grads]), slow.step(False, grads)
    Compare()(fast.everything(), slow.everything())


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_lists_on_another_gpu_than_the_current_one():
    check_prepare("cuda:1", None), check_apply("cuda:1", BF16), check_update("cuda:1", BF16, 0.0)

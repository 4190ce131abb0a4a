"""Rules of the optimizer: each equal to plain loops in float64 and to torch's own where there is one; steps that do not count change nothing;
rows may be anywhere; a stack is its matrices; numbers may be tensors."""
import math
from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from golfnb.muon.newton_schulz import NS5_COEFFS, POLAR_EXPRESS_COEFFS
from golfnb.muon.rules import RULES, MuonRule, OptimizerError, Rule, apply_direction, check_group, product_dtype, rule_of
from golfnb.settings import GolfError

SHAPES = [(1, 9, 4), (1, 4, 9), (1, 6, 6), (3, 5, 7)]  # tall, wide, square, a stack
COUNTS = [True, True, False, True, False, False, True]  # whether a step counts
TINY = 1e-30  # an eps that float64 does not see beside a norm
CASES = {  # numbers of a group for each rule
    "muon": [{"nesterov": False}, {"cautious_wd": True}, {"ns_coefficients": "polar_express", "adjust_lr_fn": "match_rms_adamw"}, {"ns_coefficients": (2.0, -1.5, 0.5), "ns_steps": 8},
             {"ns_coefficients": ((3.0, -3.2, 1.2), (2.0, -1.5, 0.5)), "ns_steps": 3, "adjust_lr_fn": None, "momentum": 0.0}],
    "normuon": [{}, {"beta2": 0.5, "nesterov": False, "ns_steps": 2}, {"transposed": True}, {"cautious_wd": True}],
    "muoneq_r": [{}, {"ns_coefficients": "polar_express", "nesterov": False}, {"transposed": True, "ns_steps": 2}],
    "adamw": [{}, {"betas": (0.0, 0.999), "eps": 1e-3}, {"cautious_wd": True}],
    "sgd": [{}, {"nesterov": True}, {"momentum": 0.0, "cautious_wd": True}],
}
EVERY = [(name, numbers) for name, cases in CASES.items() for numbers in cases]


def group_of(name: str, **numbers) -> dict:
    group = {"rule": name, "lr": 0.03, "weight_decay": 0.1, **RULES[name].defaults, **numbers}
    if RULES[name].matrices:
        group["eps"] = TINY
    check_group(group)
    return group


def new_state(weight: Tensor, group: Mapping) -> dict[str, Tensor]:
    rule = rule_of(group)
    state = {name: torch.zeros_like(weight) for name in rule.state_names}
    state |= {name: torch.zeros(()) for name in rule.counters}
    return state | {name: weight.new_zeros(len(weight), *shape) for name, shape in rule.matrix_state(*weight.shape[-2:], group).items()}


def move(weight: Tensor, grad: Tensor, state: dict, group: Mapping, ok: Tensor):
    rule = rule_of(group)
    made = rule.prepare(grad, state, group, ok)
    if rule.matrices:
        made = rule.direction(made, state, group, ok)
    apply_direction(weight, made, group, ok, rule.factor(*weight.shape[-2:], group))


def gradients(shape, dtype=torch.float64) -> list[Tensor]:
    "A gradient for each step, NaN where the step does not count."
    generator = torch.Generator().manual_seed(sum(shape))
    found = [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for _ in COUNTS]
    for grad, counts in zip(found, COUNTS):
        if not counts:
            grad.view(-1)[::3] = math.nan
    return found


def start(shape, dtype=torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64).to(dtype)


def run(group: Mapping, shape, dtype=torch.float64) -> tuple[Tensor, dict]:
    "Weight and state after all steps of a rule."
    weight = start(shape, dtype)
    state = new_state(weight, group)
    for grad, counts in zip(gradients(shape, dtype), COUNTS):
        move(weight, grad, state, group, torch.tensor(counts))
    return weight, state


# ---- the reference: lists and loops

def product(a, b):
    return [[sum(a[i][k] * b[k][j] for k in range(len(b))) for j in range(len(b[0]))] for i in range(len(a))]


def turned(a):
    return [list(row) for row in zip(*a)]


def frobenius(a):
    return math.sqrt(sum(v * v for row in a for v in row))


def each(f, *matrices):
    return [[f(*values) for values in zip(*rows)] for rows in zip(*matrices)]


def orthogonal(m, group):
    named, scale = group["ns_coefficients"], 1.0
    if isinstance(named, str):
        scale = {"quintic": 1.0, "polar_express": 1.02}[named]
        named = {"quintic": NS5_COEFFS, "polar_express": POLAR_EXPRESS_COEFFS}[named]
    if not isinstance(named[0], tuple):
        named = (named,)
    size = frobenius(m) * scale
    x = each(lambda v: v / size, m)
    for i in range(group["ns_steps"]):
        a, b, c = named[min(i, len(named) - 1)]
        gram = product(x, turned(x))
        x = each(lambda x, y, z: a * x + b * y + c * z, x, product(gram, x), product(product(gram, gram), x))
    return x


def factor(rows, cols, named):
    if named == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, cols))
    return math.sqrt(max(1.0, rows / cols))


def momentum_step(grad, kept, group):
    buffer = kept["buffer"] = each(lambda b, g: group["momentum"] * b + g, kept.get("buffer", each(lambda g: 0.0, grad)), grad)
    return each(lambda g, b: g + group["momentum"] * b, grad, buffer) if group["nesterov"] else buffer


def sgd_reference(grad, kept, group):
    return momentum_step(grad, kept, group)


def muon_reference(grad, kept, group):
    scale = factor(len(grad), len(grad[0]), group["adjust_lr_fn"])
    return each(lambda v: scale * v, orthogonal(momentum_step(grad, kept, group), group))


def normuon_reference(grad, kept, group):
    made = muon_reference(grad, kept, {**group, "adjust_lr_fn": None})
    scale = factor(len(grad), len(grad[0]), None)
    made = each(lambda v: v / scale, made)
    if group.get("transposed"):
        made = turned(made)
    beta2 = group["beta2"]
    means = [sum(v * v for v in row) / len(row) for row in made]
    kept["rows"] = [beta2 * old + (1 - beta2) * new for old, new in zip(kept.get("rows", [0.0] * len(made)), means)]
    balanced = [[v / (math.sqrt(second) + 1e-8) for v in row] for row, second in zip(made, kept["rows"])]
    if group.get("transposed"):
        made, balanced = turned(made), turned(balanced)
    total = factor(len(grad), len(grad[0]), group["adjust_lr_fn"]) * frobenius(made) / frobenius(balanced)
    return each(lambda v: v * total, balanced)


def muoneq_r_reference(grad, kept, group):
    made = momentum_step(grad, kept, group)
    made = turned(made) if group.get("transposed") else made
    made = [[v / math.sqrt(sum(v * v for v in row)) for v in row] for row in made]
    made = turned(made) if group.get("transposed") else made
    scale = factor(len(grad), len(grad[0]), group["adjust_lr_fn"])
    return each(lambda v: scale * v, orthogonal(made, group))


def adamw_reference(grad, kept, group):
    (beta1, beta2), zeros = group["betas"], each(lambda g: 0.0, grad)
    n = kept["n"] = kept.get("n", 0) + 1
    kept["m"] = each(lambda m, g: beta1 * m + (1 - beta1) * g, kept.get("m", zeros), grad)
    kept["v"] = each(lambda v, g: beta2 * v + (1 - beta2) * g * g, kept.get("v", zeros), grad)
    return each(lambda m, v: m / (1 - beta1 ** n) / (math.sqrt(v / (1 - beta2 ** n)) + group["eps"]), kept["m"], kept["v"])


REFERENCES = {"sgd": sgd_reference, "muon": muon_reference, "normuon": normuon_reference, "muoneq_r": muoneq_r_reference, "adamw": adamw_reference}


def decaying(weight, direction, group):
    "What of an element decays: none of one that the step brings away from zero, where decay is cautious."
    return 0.0 if group.get("cautious_wd") and weight * direction < 0 else weight


def expected(group: Mapping, shape) -> Tensor:
    "The weight after all steps that count, matrix by matrix, in lists."
    weights, kept = start(shape).tolist(), [{} for _ in range(shape[0])]
    for grad, counts in zip(gradients(shape), COUNTS):
        if not counts:
            continue
        for i, one in enumerate(grad.tolist()):
            made = REFERENCES[group["rule"]](one, kept[i], group)
            weights[i] = each(lambda w, d: w - group["lr"] * group["weight_decay"] * decaying(w, d, group) - group["lr"] * d, weights[i], made)
    return torch.tensor(weights, dtype=torch.float64)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name, numbers", EVERY)
def test_a_rule_is_its_formula(name, numbers, shape):
    group = group_of(name, **numbers)
    weight, state = run(group, shape)
    torch.testing.assert_close(weight, expected(group, shape), rtol=1e-11, atol=1e-12)
    assert all(t.isfinite().all() for t in state.values())


@pytest.mark.parametrize("name, numbers", EVERY)
def test_a_step_that_does_not_count_changes_nothing(name, numbers):
    group = group_of(name, **numbers)
    weight, state = run(group, (3, 5, 7))
    before, kept = weight.clone(), {k: t.clone() for k, t in state.items()}
    move(weight, torch.full_like(weight, math.nan), state, group, torch.tensor(False))
    assert torch.equal(weight, before) and all(torch.equal(state[k], t) for k, t in kept.items())
    if name == "adamw":
        assert state["step"].item() == sum(COUNTS)


@pytest.mark.parametrize("name", ["muon", "normuon", "muoneq_r"])
def test_in_a_stack_each_matrix_counts_for_itself(name):
    group = group_of(name)
    weight = start((3, 5, 7))
    state, alone = new_state(weight, group), [new_state(w[None], group) for w in weight]
    pieces = [w[None].clone() for w in weight]
    for step in range(3):
        grad, ok = start((3, 5, 7)) * (step + 1), torch.tensor([True, step != 1, True]).view(3, 1, 1)
        grad[~ok.view(3)] = math.nan
        move(weight, grad, state, group, ok)
        for piece, g, kept, counts in zip(pieces, grad, alone, ok):
            move(piece, g[None], kept, group, counts)
    torch.testing.assert_close(weight, torch.cat(pieces), rtol=1e-12, atol=1e-13)
    for key in state:
        torch.testing.assert_close(state[key], torch.cat([kept[key] for kept in alone]), rtol=1e-12, atol=1e-13)


# ---- torch's own

def peer_run(make, shape=(6, 10), dtype=torch.float64) -> Tensor:
    "The weight after torch's optimizer took the steps that count."
    weight = torch.nn.Parameter(start(shape, dtype))
    optimizer = make([weight])
    for grad, counts in zip(gradients(shape, dtype), COUNTS):
        weight.grad = grad if counts else None
        optimizer.step()
    return weight.detach()


def ours(group: Mapping, shape=(6, 10), dtype=torch.float64) -> Tensor:
    weight = start(shape, dtype)[None]
    state = new_state(weight, group)
    for grad, counts in zip(gradients(shape, dtype), COUNTS):
        move(weight, grad[None], state, group, torch.tensor(counts))
    return weight[0]


@pytest.mark.parametrize("momentum, nesterov", [(0.0, False), (0.9, False), (0.9, True)])
def test_sgd_is_that_of_torch(momentum, nesterov):
    group = group_of("sgd", momentum=momentum, nesterov=nesterov, weight_decay=0.0)
    theirs = peer_run(lambda p: torch.optim.SGD(p, lr=0.03, momentum=momentum, nesterov=nesterov))
    torch.testing.assert_close(ours(group), theirs, rtol=0, atol=1e-12)


@pytest.mark.parametrize("betas, eps", [((0.9, 0.95), 1e-8), ((0.8, 0.999), 1e-4)])
def test_adamw_is_that_of_torch(betas, eps):
    theirs = peer_run(lambda p: torch.optim.AdamW(p, lr=0.03, betas=betas, eps=eps, weight_decay=0.1))
    torch.testing.assert_close(ours(group_of("adamw", betas=betas, eps=eps)), theirs, rtol=0, atol=1e-12)


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("shape", [(6, 10), (10, 6)])
@pytest.mark.parametrize("adjust", ["original", "match_rms_adamw", None])
def test_muon_is_that_of_torch(monkeypatch, shape, nesterov, adjust):
    "In float64 where torch's products are let run in it, by its momentum as an average; in bf16 to its rounding."
    numbers = {"nesterov": nesterov, "adjust_lr_fn": adjust}

    def theirs():
        return peer_run(lambda p: torch.optim.Muon(p, lr=0.03, weight_decay=0.1, momentum=0.95, eps=TINY, **numbers), shape)

    rounded = theirs()
    monkeypatch.setattr(Tensor, "bfloat16", lambda t: t.clone())
    exact = theirs()
    weight = ours(group_of("muon", **numbers), shape)
    torch.testing.assert_close(weight, exact, rtol=0, atol=1e-12)
    narrow = ours(group_of("muon", **numbers, product_dtype=torch.bfloat16), shape)
    moved = exact - start(shape)
    # each of four steps moves by an orthogonal matrix in bf16, whose five rounds are known to about a hundredth
    assert (narrow - rounded).norm() < 0.03 * moved.norm() and (rounded - exact).norm() < 0.03 * moved.norm()
    assert not torch.equal(narrow, weight)


# ---- where rows are, what numbers are

@pytest.mark.parametrize("name, numbers", EVERY)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rows_may_be_prepared_anywhere(name, numbers, dtype):
    group, rule = group_of(name, **numbers), RULES[name]
    whole = {n: torch.zeros(11, 6, dtype=dtype) for n in rule.state_names} | {n: torch.zeros(()) for n in rule.counters}
    cuts = [(0, 4), (4, 4), (4, 5), (5, 11)]
    parts = [{n: torch.zeros(b - a, 6, dtype=dtype) for n in rule.state_names} | {n: torch.zeros(()) for n in rule.counters} for a, b in cuts]
    for grad, counts in zip(gradients((11, 6), dtype), COUNTS):
        ok = torch.tensor(counts)
        made = rule.prepare(grad, whole, group, ok)
        pieces = [rule.prepare(grad[a:b], state, group, ok) for (a, b), state in zip(cuts, parts)]
        torch.testing.assert_close(torch.cat(pieces), made, rtol=0, atol=0, equal_nan=True)
    for name in rule.state_names:
        assert torch.equal(torch.cat([state[name] for state in parts]), whole[name])


NUMBERS = ("lr", "weight_decay", "momentum", "beta2", "eps")


def as_tensors(group: Mapping, dtype) -> dict:
    made = {key: torch.tensor(value, dtype=dtype) if key in NUMBERS else value for key, value in group.items()}
    if "betas" in group:
        made["betas"] = tuple(torch.tensor(b, dtype=dtype) for b in group["betas"])
    return made


@pytest.mark.parametrize("name, numbers", EVERY)
def test_numbers_may_be_tensors(name, numbers):
    group = group_of(name, **numbers)
    made = as_tensors(group, torch.float64)
    check_group(made)
    torch.testing.assert_close(run(made, (3, 5, 7))[0], run(group, (3, 5, 7))[0], rtol=0, atol=1e-14)
    for dtype in (torch.float32, torch.float64):
        weight, state = run(as_tensors(group, dtype), (3, 5, 7), torch.float32)
        torch.testing.assert_close(weight, run(group, (3, 5, 7), torch.float32)[0], rtol=1e-4, atol=1e-5)
        assert weight.dtype == torch.float32 and all(t.dtype == torch.float32 for t in state.values())


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_vectors_and_single_numbers_have_rules_too(name):
    group = group_of(name)
    for shape in ((7,), ()):
        weight = torch.zeros(shape)
        state = {n: torch.zeros(shape) for n in RULES[name].state_names} | {n: torch.zeros(()) for n in RULES[name].counters}
        apply_direction(weight, RULES[name].prepare(torch.ones(shape), state, group, torch.tensor(True)), group, torch.tensor(True))
        torch.testing.assert_close(weight, torch.full(shape, -0.03))


def test_a_gradient_in_bf16_meets_state_in_fp32():
    for name, rule in RULES.items():
        state = {n: torch.zeros(4, 6) for n in rule.state_names} | {n: torch.zeros(()) for n in rule.counters}
        assert rule.prepare(torch.ones(4, 6).bfloat16(), state, group_of(name), torch.tensor(True)).dtype == torch.float32, name


def test_products_are_narrow_on_gpus_only():
    class Like:
        def __init__(self, dtype, is_cuda):
            self.dtype, self.is_cuda = dtype, is_cuda

    wide, half, double = torch.float32, torch.bfloat16, torch.float64
    found = [product_dtype(Like(d, cuda), {}) for cuda in (False, True) for d in (wide, half, double)]
    assert found == [wide, half, double, half, half, double]
    assert product_dtype(Like(wide, True), {"product_dtype": wide}) == wide


@pytest.mark.parametrize("name", ["muon", "normuon", "muoneq_r"])
def test_what_is_rounded_before_it_travels_gives_the_same_bits(name):
    group = group_of(name, product_dtype=torch.bfloat16)
    stack, ok = start((3, 40, 24), torch.float32), torch.tensor(True)
    first, second = ({"row_moment": torch.zeros(3, 40, 1)} for _ in range(2))
    sent = RULES[name].direction(stack.bfloat16(), first, group, ok)
    assert sent.dtype == torch.bfloat16 and torch.equal(sent, RULES[name].direction(stack, second, group, ok))
    assert torch.equal(first["row_moment"], second["row_moment"])


@pytest.mark.parametrize("name", ["muon", "normuon", "muoneq_r"])
def test_zeros_stay_zeros(name):
    group = {**group_of(name), "eps": 1e-7}
    weight = start((2, 4, 6), torch.float32)
    before = weight.clone()
    move(weight, torch.zeros(2, 4, 6), new_state(weight, group), {**group, "weight_decay": 0.0}, torch.tensor(True))
    assert torch.equal(weight, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_muoneq_r_does_not_see_the_length_of_a_row(dtype):
    "Nor does it grow one of zeros."
    group, grad = group_of("muoneq_r", product_dtype=dtype, eps=1e-7), start((2, 6, 9)).float()
    grad[:, 3] = 0
    scales = 2.0 ** torch.arange(-3.0, 3.0).view(1, 6, 1)
    first, scaled = (rule_of(group).direction(g, {}, group, torch.tensor(True)) for g in (grad, grad * scales))
    torch.testing.assert_close(first, scaled, rtol=0, atol=0)
    assert first.dtype == dtype and first.isfinite().all() and not first[:, 3].any()


def test_normuon_keeps_the_norm_and_balances_rows():
    group, stack = group_of("normuon"), start((3, 20, 6))
    state = {"row_moment": torch.zeros(3, 20, 1, dtype=torch.float64)}
    plain = RULES["muon"].direction(stack, {}, group, torch.tensor(True))
    made = RULES["normuon"].direction(stack, state, group, torch.tensor(True))
    torch.testing.assert_close(made.norm(dim=(1, 2)), plain.norm(dim=(1, 2)), rtol=1e-12, atol=0)
    lengths, unbalanced = made.norm(dim=2), plain.norm(dim=2)
    assert (lengths.amax(1) / lengths.amin(1) < 1 + 1e-6).all() and (unbalanced.amax(1) / unbalanced.amin(1) > 1.2).all()


@pytest.mark.parametrize("name", sorted(RULES))
def test_prepare_traces_whole(name):
    group, rule, shape = group_of(name), RULES[name], (5, 7)
    traced = torch.compile(rule.prepare, fullgraph=True, backend="eager")
    states = [{n: torch.zeros(shape) for n in rule.state_names} | {n: torch.zeros(()) for n in rule.counters} for _ in range(2)]
    for grad, counts in zip(gradients(shape, torch.float32), COUNTS):
        ok = torch.tensor(counts)
        made = [f(grad, state, group, ok) for f, state in zip((traced, rule.prepare), states)]
        torch.testing.assert_close(*made, equal_nan=True)
    assert all(torch.equal(states[0][k], states[1][k]) for k in states[0])


# ---- by name, and what is refused

class Signs(Rule):
    def prepare(self, grad, state, group, ok):
        return grad.sign()


def test_a_rule_of_ones_own():
    signs = Signs()
    assert rule_of({"rule": signs}) is signs and rule_of({"rule": "adamw"}) is RULES["adamw"] and isinstance(rule_of({}), MuonRule)
    weight, group = torch.zeros(2, 3), {"rule": signs, "lr": 0.5, "weight_decay": 0.0}
    check_group(group)
    move(weight, torch.tensor([[2.0, -3, 0], [1, 1, -1]]), {}, group, torch.tensor(True))
    assert torch.equal(weight, torch.tensor([[-0.5, 0.5, 0], [-0.5, -0.5, 0.5]]))


WRONG = [
    ("rule", "adam"), ("rule", Signs), ("rule", None), ("lr", -1.0), ("lr", math.nan), ("lr", math.inf), ("lr", "0.1"), ("lr", torch.ones(2)), ("weight_decay", -0.1),
    ("momentum", 1.0), ("momentum", -0.5), ("beta2", 1.5), ("eps", 0.0), ("betas", (0.9, 1.0)), ("betas", (-0.1, 0.9)), ("betas", (0.9,)), ("betas", 0.9), ("ns_steps", 0),
    ("ns_steps", 2.5), ("ns_coefficients", "cubic"), ("ns_coefficients", (1.0, 2.0)), ("ns_coefficients", ()), ("ns_coefficients", ((1, 2, 3), (1, 2))),
    ("adjust_lr_fn", "spectral"), ("adjust_lr_fn", ["original"]), ("cautious_wd", 1), ("cautious_wd", None),
]


@pytest.mark.parametrize("name, value", WRONG)
def test_impossible_numbers_are_refused(name, value):
    with pytest.raises(OptimizerError, match=name) as caught:
        check_group({name: value})
    assert isinstance(caught.value, GolfError) and isinstance(caught.value, ValueError) and "found" in str(caught.value)


@pytest.mark.parametrize("name", sorted(RULES))
def test_usual_numbers_pass(name):
    check_group({"rule": name, "lr": 0, "weight_decay": torch.tensor(0.1), **RULES[name].defaults, "betas": [0.9, torch.tensor(0.95)], "ns_coefficients": [2, -1.5, 0.5]})

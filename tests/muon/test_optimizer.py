"""ParallelMuon on models of others: the float64 answer of plain loops on 1 to 4 ranks, whole, under DDP and sharded; torch's contract; its state; what it refuses."""
import copy
import io
import logging
import math
import pickle
import shutil
import subprocess
import sys
import threading

import pytest
import torch
import torch.distributed.checkpoint as dcp
from optimizer_workers import SETTINGS, all_jobs, backward, build, loss_of, plain, rows_of, weights_of
from torch import nn
from torch.distributed.checkpoint import CheckpointException, DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from workers import spawn

from golfnb.model.bank_rule import BankRule
from golfnb.muon.errors import OptimizerError
from golfnb.muon.exchange import block_of, matrices_of
from golfnb.muon.grouping import param_groups
from golfnb.muon.newton_schulz import quintic
from golfnb.muon.optimizer import ParallelMuon, problem_with
from golfnb.muon.rules import MuonEqRule, MuonRule, NorMuonRule, rule_of
from golfnb.muon.sharded import ChunkedTensor, ShardedState, chunks_of
from golfnb.model.engine import Ranks
from golfnb.settings import GolfError

WORLDS = (1, 2, 3, 4)
ANY = [("nano", dict(accum=2)), ("gpt2", {}), ("encoder", dict(max_norm=0.05)), ("experts", {}), ("vision", dict(max_norm=0.3)), ("nano", dict(poison=(3, -1)))]
SEVERAL = [("nano", dict(overlap=True, accum=2)), ("experts", dict(overlap=True, max_norm=0.1)), ("vision", dict(overlap=True, poison=(3, -1))), ("vision", dict(how="ddp")), ("encoder", dict(how="ddp", accum=2)), ("encoder", dict(how="sharded", max_norm=0.05)), ("vision", dict(how="sharded", accum=2)), ("experts", dict(how="sharded"))]


def distance(a: dict, b: dict) -> float:
    assert a.keys() == b.keys()
    return max(float((a[k].double() - b[k].double()).abs().max()) if a[k].numel() else 0.0 for k in a)


def run_ranks(world: int, jobs: list) -> list:
    return spawn(world, "all_jobs", jobs, module="optimizer_workers") if world > 1 else [all_jobs(Ranks(), jobs)]


@pytest.fixture(scope="module", params=WORLDS, ids="{} ranks".format)
def ranked(request):
    world = request.param
    cases = ANY if world == 1 else ANY + SEVERAL
    cases = [(kind, {**more, **(dict(poison=(3, world - 1)) if "poison" in more else {})}) for kind, more in cases]
    return world, cases, run_ranks(world, [("ours", (kind,), more) for kind, more in cases])


def test_equal_to_plain_loops(ranked):
    "Tied, unused, sometimes used, used on one rank only; accumulation; a scheduler; clipping; NaN on one rank; fused and turned matrices, experts."
    world, cases, outs = ranked
    for i, (kind, more) in enumerate(cases):
        want = plain(kind, world, accum=more.get("accum", 1), skip=3 if "poison" in more else -1, max_norm=more.get("max_norm", 0.0))
        for rank, out in enumerate(outs):
            got, skipped, _ = out[i]
            assert distance(got, want) < 1e-10, f"{kind} {more} at {world} ranks, rank {rank}"
            assert skipped == ("poison" in more)


MESHES = [("gpt2", dict(how="copies", accum=2)), ("encoder", dict(how="copies", max_norm=0.05)), ("vision", dict(how="copies", max_norm=0.3)), ("experts", dict(how="copies")), ("mlp", dict(how="tensor", max_norm=0.05, accum=2)), ("mlp", dict(how="sharded tensor", max_norm=0.05)), ("mlp", dict(how="sharded tensor", accum=2))]


@pytest.mark.parametrize("world", (4, 8))
def test_equal_to_plain_loops_on_two_dimensions(world):
    "Shards with copies; layers cut by columns and by rows, on one mesh and sharded once more over data."
    cases = [case for case in MESHES if world == 4 or case[0] in ("encoder", "mlp")]
    outs = run_ranks(world, [("ours", (kind,), {**more, "steps": 8}) for kind, more in cases])
    for i, (kind, more) in enumerate(cases):
        data = {"tensor": 1, "sharded tensor": world // 2}.get(more["how"], world)
        want = plain(kind, data, steps=8, accum=more.get("accum", 1), max_norm=more.get("max_norm", 0.0))
        for rank, out in enumerate(outs):
            assert distance(out[i][0], want) < 1e-10, f"{kind} {more} at {world} ranks, rank {rank}"


def test_a_weight_on_one_dimension_of_a_mesh_is_refused_by_name_and_right_on_both():
    "As a router that tensor parallelism leaves alone: on (data) it is refused, and what the sentence advises is the float64 answer."
    for *refused, sharded, copies in spawn(4, "on_one_dimension", module="optimizer_workers"):
        assert all(said.startswith("router must be sharded on the optimizer's ranks [0, 1, 2, 3]") and "Replicate()" in said for said in refused)
        assert sharded < 1e-10 and copies < 1e-10


@pytest.mark.parametrize("world", WORLDS)
def test_trains_a_recipe_s_model_as_its_engine_does(world):
    "Banks as 3-D parameters, tables, vectors; both sums of momentum, clipping of the mean, schedules."
    assert max(run_ranks(world, [("of_a_recipe", (), {})])[0]) < 1e-10


@pytest.mark.parametrize("world", (1, 3))
def test_a_recipe_s_engine_takes_every_rule(world):
    "Those of golfnb.muon.rules and one's own, with state of whole matrices, of turned ones too, and counters."
    rules = ("muon", "normuon", "adamw", "sgd", "sign")
    for rule, far in zip(rules, run_ranks(world, [("by_any_rule", (rule,), {}) for rule in rules])[0], strict=True):
        assert far < 1e-10, (rule, far)


def test_a_rule_for_banks_refuses_what_it_does_not_read():
    for more, words in ((dict(beta2=2.0), "beta2"), (dict(betas=(0.9, 0.9)), "betas"), (dict(rule="sgdd"), "sgdd"), (dict(lr=-1.0), "lr")):
        with pytest.raises(GolfError, match=words):
            BankRule(**{"rule": "normuon", **more})


# --- torch's contract

def small(dtype=torch.float64, seed=0) -> nn.Module:
    torch.manual_seed(seed)
    blocks = [nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 8, bias=False), nn.Linear(8, 6)) for _ in range(2)]
    return nn.Sequential(nn.Linear(4, 6), *blocks, nn.Linear(6, 3)).to(dtype)


def matrices_in(model) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.ndim == 2]


def one_step(model, opt, step=0, **more):
    opt.zero_grad()
    x = (torch.arange(20.).view(5, 4) + step).sin().to(next(model.parameters()))
    model(x).square().mean().backward()
    opt.step(**more)


def walked(model, opt, steps=3, start=0) -> dict:
    for step in range(start, start + steps):
        one_step(model, opt, step)
    return weights_of(model)


@pytest.fixture
def exact_torch_muon(monkeypatch):
    "torch's Muon with our products, which it makes in bf16; its momentum is (1 - momentum) times ours."
    from golfnb.muon.newton_schulz import newton_schulz

    monkeypatch.setattr("torch.optim._muon._zeropower_via_newtonschulz", lambda grad, *_: newton_schulz(grad, eps=1e-7 * 0.05))


def test_called_as_torch_muon_it_takes_the_same_steps(exact_torch_muon):
    results = []
    for make in (torch.optim.Muon, ParallelMuon):
        model = small()
        opt = make(matrices_in(model), lr=0.02, weight_decay=0.1, momentum=0.95, nesterov=True, ns_steps=5, ns_coefficients=(3.4445, -4.7750, 2.0315), eps=1e-7, adjust_lr_fn="match_rms_adamw")
        results.append(walked(model, opt))
    assert distance(*results) < 1e-12


@pytest.mark.parametrize("given", ["model", "groups", "pairs", "tensors", "several groups"])
def test_what_it_takes(given):
    model = small()
    groups = param_groups(model)
    matrices, others = groups[0]["params"], groups[1]["params"]
    more = {}
    if given == "model":
        opt = ParallelMuon(model, 0.05, adam_lr=0.01)
    elif given == "groups":
        opt = ParallelMuon(groups, lr=0.05, adam_lr=0.01)
    elif given == "pairs":
        opt = ParallelMuon([{"params": matrices}, {"params": iter(others), "rule": "adamw", "lr": 0.01}], lr=0.05)
    elif given == "tensors":
        opt = ParallelMuon([{"params": [p for _, p in matrices]}, {"params": [p for _, p in others], "rule": "adamw"}], lr=0.05, adam_lr=0.01)
        more["named"] = False
    else:
        halves = [{"params": matrices[:1], "rule": "muon"}, {"params": matrices[1:], "rule": "muon"}, *({"params": [pair], "rule": "adamw", "lr": 0.01} for pair in others)]
        opt = ParallelMuon(halves, lr=0.05)
    assert ("param_names" in opt.param_groups[0]) == more.get("named", True)
    want = small()
    assert distance(walked(model, opt), walked(want, ParallelMuon(want, lr=0.05, adam_lr=0.01))) == 0


def test_two_parameters_of_one_name_are_refused():
    "Their saved states would take each other's place."
    one, two = small(), small()
    with pytest.raises(GolfError, match="called .*1.1.weight"):
        ParallelMuon([*param_groups(one), *param_groups(two)])
    opt = ParallelMuon(param_groups(one)[:1])
    with pytest.raises(GolfError, match="called .*1.1.weight"):
        opt.add_param_group(param_groups(two)[0])
    walked(one, opt, 1)
    assert len(opt.param_groups) == 1
    ParallelMuon(nn.ModuleDict({"one": one, "two": two}))


def weight() -> nn.Parameter:
    return nn.Parameter(torch.ones(4, 4))


@pytest.mark.parametrize("given, words", [
    (lambda: None, "NoneType"), (lambda: nn.Linear, "type"), (lambda: {"params": [weight()]}, "dict"), (weight, "Parameter"), (lambda: {weight(), weight()}, "set"),
    (lambda: [{"params": {weight()}}], "set"), (lambda: [{"params": None}], "NoneType"), (lambda: [{"params": nn.Linear(2, 2)}], "Linear"), (lambda: [{"lr": 0.1}], "params"),
    (lambda: [{"params": [weight()], "use_muon": False}], "'rule'"), (lambda: [{"params": [weight()], "algorithm": "adamw"}], "'rule'"),
    (lambda: [{"params": [weight()], "rule": "adamw", "adam_lr": 0.1}], "'lr'"), (lambda: [{"params": [weight()], "rule": "muon", "split_sizes": "22"}], "split_sizes"),
    (lambda: [nn.Parameter(torch.eye(4).to_sparse())], "dense"), (lambda: [{"params": [("a", weight())]}, {"params": [weight()]}], "all groups name")])
def test_what_is_no_group(given, words):
    with pytest.raises(GolfError, match=words):
        ParallelMuon(given())


@pytest.mark.parametrize("rule, key", [("muon", "weight_dacay"), ("muon", "betas"), ("muon", "maximize"), ("normuon", "betas"), ("adamw", "transposed"), ("adamw", "beta2"), ("sgd", "eps"), (MuonRule(), "betas")])
def test_a_key_that_means_nothing_in_a_group_is_refused_and_the_known_ones_named(rule, key):
    group = {"params": [("a", weight())], "rule": rule, "lr": 0.1}
    with pytest.raises(OptimizerError, match=f"no '{key}'.* has lr, weight_decay, "):
        ParallelMuon([{**group, key: 0.5}])
    opt = ParallelMuon([group])
    with pytest.raises(OptimizerError, match=f"no '{key}'"):
        opt.add_param_group({**group, "params": [("b", weight())], key: 0.5})
    assert len(opt.param_groups) == 1
    ParallelMuon([{**group, **rule_of(group).defaults, "name": "mine", "initial_lr": 0.1}])


def test_normuon_by_changing_the_rule_of_groups():
    groups = param_groups(small())
    for group in groups:
        if group["rule"] == "muon":
            group["rule"] = "normuon"
    opt = ParallelMuon(groups)
    assert any(isinstance(member.rule, NorMuonRule) for member in opt.members) and "beta2" in opt.param_groups[0]
    assert 'group["rule"] = "normuon"' in (param_groups.__doc__ or "")


@pytest.mark.parametrize("way", ["groups", "file", "parts", "copy"])
def test_keys_that_schedulers_add_go_on_working(way, tmp_path):
    def planned(opt, last_epoch=-1):
        return torch.optim.lr_scheduler.OneCycleLR(opt, max_lr=0.05, total_steps=6, last_epoch=last_epoch)

    model, made = small(), None
    opt = ParallelMuon(model)
    plan = planned(opt)
    torch.optim.swa_utils.SWALR(opt, swa_lr=0.01)
    walked(model, opt)
    plan.step()
    assert all({"initial_lr", "max_lr", "max_momentum", "swa_lr"} <= g.keys() for g in opt.param_groups)
    twin = copy.deepcopy(model)
    if way == "groups":
        made = ParallelMuon(opt.param_groups)
    elif way == "copy":
        made = copy.deepcopy(opt)
    else:
        made = ParallelMuon(twin)
        planned(made)
    if way == "file":
        made.load_state_dict(opt.state_dict())
    elif way == "parts":
        dcp.save({"o": ShardedState(opt)}, checkpoint_id=tmp_path, no_dist=True)
        dcp.load({"o": ShardedState(made)}, checkpoint_id=tmp_path, no_dist=True)
    assert [(g["lr"], g["initial_lr"], g["max_lr"]) for g in made.param_groups] == [(g["lr"], g["initial_lr"], g["max_lr"]) for g in opt.param_groups]
    planned(made, 1).step()
    if way in ("file", "parts"):
        walked(twin, made, 2, 3)


def test_a_later_group_has_names_if_the_others_have():
    opt = ParallelMuon([("a", weight())])
    with pytest.raises(GolfError, match="all groups name"):
        opt.add_param_group({"params": [weight()]})
    with pytest.raises(GolfError, match="list"):
        opt.add_param_group([weight()])
    opt.add_param_group({"params": [("b", weight())]})


@pytest.mark.parametrize("key, value", [("rule", "normuon"), ("rule", "adamw"), ("split_sizes", [2, 2])])
@pytest.mark.parametrize("steps", [0, 1])
def test_the_rule_of_a_group_stays(key, value, steps):
    p = weight()
    opt = ParallelMuon([p])
    for _ in range(steps):
        p.grad = torch.eye(4)
        opt.step()
    opt.param_groups[0][key] = value
    p.grad = torch.eye(4)
    with pytest.raises(GolfError, match=f"{key} of a group"):
        opt.step()


def test_a_step_without_any_gradient_is_warned_of_once(caplog):
    model = small()
    opt = ParallelMuon(model)
    model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)
    for _ in range(3):
        one_step(model, opt)
    assert caplog.text.count("assign=True") == 1
    caplog.clear()
    frozen = small()
    opt = ParallelMuon(frozen)
    frozen.requires_grad_(False)
    opt.step()
    assert not caplog.records


@pytest.mark.parametrize("given", [lambda model: model, param_groups])
@pytest.mark.parametrize("way", ["unfrozen", "added", "trained"])
def test_a_parameter_that_has_gradients_and_is_not_trained_is_told_once(way, given, caplog):
    model = nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4)])
    if way == "unfrozen":
        model[:3].requires_grad_(False)
    opt = ParallelMuon(given(model))
    for step in range(60):
        if step == 10 and way == "unfrozen":
            model.requires_grad_(True)
        if step == 10 and way == "added":
            model.append(nn.Linear(4, 4))
        opt.zero_grad()
        model(torch.ones(2, 4)).square().mean().backward()
        opt.step()
    said = [r.getMessage() for r in caplog.records if "not trained" in r.getMessage()]
    assert len(said) == (0 if way == "trained" else 1)
    assert way == "trained" or (said[0].startswith("6 parameters" if way == "unfrozen" else "2 parameters") and "add_param_group" in said[0])


def test_what_was_guessed_stands_in_the_optimizer_s_table(caplog):
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv, self.gate = nn.Linear(8, 24, bias=False), nn.Linear(128, 2, bias=False)

    model = nn.ModuleList(Block() for _ in range(2))
    with caplog.at_level(logging.INFO, "golfnb"):
        opt = ParallelMuon(model)
    assert "0-1.qkv.weight (2 x [24, 8], split_sizes=(8, 8, 8)?)" in repr(opt)
    assert "0-1.gate.weight (2 x [2, 128])" in repr(opt) and repr(opt) in caplog.text
    assert repr(copy.deepcopy(opt)) == repr(opt)


def test_the_callers_groups_stay_as_they_were():
    model = small()
    groups = param_groups(model)
    before = [dict(g) for g in groups]
    ParallelMuon(groups)
    assert groups == before


def test_a_group_added_later_and_one_that_does_not_fit():
    model, want = small(), small()
    groups = param_groups(model)
    opt = ParallelMuon(groups[:1], lr=0.05, adam_lr=0.01)
    opt.add_param_group(groups[1])
    assert distance(walked(model, opt), walked(want, ParallelMuon(want, lr=0.05, adam_lr=0.01))) == 0
    with pytest.raises(GolfError, match="split_sizes"):
        opt.add_param_group({"params": [("late", nn.Parameter(torch.zeros(4, 4).double()))], "rule": "muon", "split_sizes": (1, 2)})
    with pytest.raises(ValueError, match="more than one"):
        opt.add_param_group({"params": groups[1]["params"][:1], "rule": "adamw"})
    walked(model, opt, 1)
    assert len(opt.param_groups) == 2
    late = nn.Parameter(torch.ones(3, 5).double())
    opt.add_param_group({"params": [("late", late)], "rule": "muon", "lr": 0.5})
    late.grad = torch.eye(3, 5).double()
    opt.step()
    assert (late != 1).any() and opt.param_groups[2]["momentum"] == 0.95


def test_a_group_may_be_empty():
    "The first, a later one, or all; parameters may come later."
    model = small()
    for opt in (ParallelMuon([{"params": [], "rule": "muon"}, {"params": list(model.parameters()), "rule": "adamw"}]), ParallelMuon([{"params": [], "rule": "adamw"}])):
        if len(opt.param_groups) == 1:
            opt.add_param_group({"params": list(model.parameters()), "rule": "adamw"})
        before = weights_of(model)
        walked(model, opt)
        opt.load_state_dict(copy.deepcopy(opt.state_dict()))
        assert distance(before, weights_of(model)) > 1e-4 and opt.grad_norm > 0


@pytest.mark.parametrize("how", ["in place", "swapped"])
def test_a_dtype_that_changes(how):
    "Before the first step it is planned again, with masters; later it is told, and another optimizer goes on."
    torch.__future__.set_swap_module_params_on_conversion(how == "swapped")
    try:
        model = small(torch.float32)
        opt = ParallelMuon(model)
        model.bfloat16()
        walked(model, opt)
        assert all("master" in s.tensors for s in opt.states.values())
        model.float()
        with pytest.raises(GolfError, match="dtypes"):
            walked(model, opt)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    made = ParallelMuon(model)
    made.load_state_dict(opt.state_dict(), strict=False)
    model.bfloat16()
    with pytest.raises(GolfError, match="dtypes.*loaded"):
        walked(model, made)
    model.float()
    assert distance({n: t for s in made.states.values() for n, t in s.tensors.items()}, {n: t for s in opt.states.values() for n, t in s.tensors.items() if n != "master"}) == 0
    walked(model, made)


@pytest.mark.parametrize("way", ["file", "parts"])
def test_state_that_is_loaded_after_the_dtype_has_changed_stays(way, tmp_path):
    model = small(torch.bfloat16)
    opt = ParallelMuon(model)
    walked(model, opt)
    twin = small(torch.float32)
    made = ParallelMuon(twin)
    twin.bfloat16().load_state_dict(model.state_dict())
    if way == "file":
        made.load_state_dict(opt.state_dict())
    else:
        dcp.save({"o": ShardedState(opt)}, checkpoint_id=tmp_path, no_dist=True)
        dcp.load({"o": ShardedState(made)}, checkpoint_id=tmp_path, no_dist=True)
    assert distance(walked(twin, made, 2, 3), walked(model, opt, 2, 3)) == 0


@pytest.mark.parametrize("kind", ["floats", "tensors"])
def test_numbers_may_change_between_steps(kind):
    "After a change it equals an optimizer made with the changed numbers that got its state."
    model = small()
    opt = ParallelMuon(model)
    walked(model, opt)
    saved = copy.deepcopy((model.state_dict(), opt.state_dict()))
    other = small()
    changed = dict(lr=0.003, momentum=0.5, weight_decay=0.7, adam_lr=0.004, adam_weight_decay=0.3, betas=(0.5, 0.6), adam_eps=1e-3)
    made = ParallelMuon(other, **changed)
    for s in saved[1]["param_groups"]:
        for key in ("lr", "momentum", "weight_decay", "betas", "eps"):
            s.pop(key, None)
    other.load_state_dict(saved[0])
    made.load_state_dict(saved[1])
    number = (lambda x: torch.tensor(x, dtype=torch.float64)) if kind == "tensors" else float
    opt.param_groups[0].update(lr=number(0.003), momentum=number(0.5), weight_decay=number(0.7))
    opt.param_groups[1].update(lr=number(0.004), weight_decay=number(0.3), betas=(number(0.5), number(0.6)), eps=number(1e-3))
    one_step(model, opt, 3)
    one_step(other, made, 3)
    assert distance(weights_of(model), weights_of(other)) < 1e-15 and distance(weights_of(model), saved[0]) > 1e-4


@pytest.mark.parametrize("plan", [
    lambda o: torch.optim.lr_scheduler.OneCycleLR(o, max_lr=0.05, total_steps=6), lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 5),
    lambda o: torch.optim.lr_scheduler.SequentialLR(o, [torch.optim.lr_scheduler.LinearLR(o, 0.1), torch.optim.lr_scheduler.ExponentialLR(o, 0.9)], [2])])
def test_schedulers_of_torch(plan):
    model = small()
    opt = ParallelMuon(model)
    plan = plan(opt)
    seen = []
    for step in range(5):
        one_step(model, opt, step)
        plan.step()
        seen.append(tuple(g["lr"] for g in opt.param_groups))
    assert len(set(seen)) >= 4 and all(a >= 0 for pair in seen for a in pair)


def test_hooks_fire():
    model, said = small(), []
    opt = ParallelMuon(model)
    opt.register_step_pre_hook(lambda *a: said.append("before"))
    opt.register_step_post_hook(lambda *a: said.append("after"))
    opt.register_state_dict_pre_hook(lambda *a: said.append("save"))
    opt.register_state_dict_post_hook(lambda o, s: {**s, "mine": 3})
    one_step(model, opt)
    saved = opt.state_dict()
    assert saved["mine"] == 3 and said == ["before", "after", "save"]
    opt.register_load_state_dict_pre_hook(lambda o, s: said.append(s["mine"]) or {k: v for k, v in s.items() if k != "mine"})
    opt.register_load_state_dict_post_hook(lambda o: said.append("loaded"))
    opt.load_state_dict(saved)
    assert said[3:] == [3, "loaded"] and saved["mine"] == 3


def test_a_closure_gives_the_loss():
    model = small()
    opt = ParallelMuon(model)

    def closure():
        opt.zero_grad()
        loss = model(torch.ones(2, 4).double()).square().mean()
        loss.backward()
        return loss
    losses = [opt.step(closure).item() for _ in range(5)]
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("way", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair)), lambda pair: torch.load(saved_bytes(pair), weights_only=False)], ids=["deepcopy", "pickle", "torch.save"])
def test_copies_go_on_alike_and_apart(way):
    model = small(torch.bfloat16)
    opt = ParallelMuon(model, lr=0.05)
    walked(model, opt)
    before = weights_of(model)
    twin, twin_opt = way((model, opt))
    after = walked(twin, twin_opt, 2, 3)
    assert distance(before, weights_of(model)) == 0 and distance(after, walked(model, opt, 2, 3)) == 0
    assert repr(twin_opt) == repr(opt) and twin_opt.steps == 5


def saved_bytes(pair):
    file = io.BytesIO()
    torch.save(pair, file)
    file.seek(0)
    return file


def test_a_compiled_step():
    results = []
    for compiled in (False, True):
        model = small()
        opt = ParallelMuon(model)
        step = torch.compile(opt.step, backend="eager") if compiled else opt.step
        for i in range(3):
            opt.zero_grad()
            model(torch.ones(2, 4).double() + i).square().mean().backward()
            step()
        results.append(weights_of(model))
    assert distance(*results) == 0


def test_grad_norm_is_that_of_clip_grad_norm():
    model = small()
    opt = ParallelMuon(model, max_norm=0.01)
    one_step(model, opt)
    norm = opt.grad_norm
    assert norm.shape == () and norm.item() == pytest.approx(nn.utils.clip_grad_norm_(model.parameters(), 1.0).item(), rel=1e-12)
    one_step(model, opt, 1)
    assert norm.item() != opt.grad_norm.item(), "what was asked for stays"


def test_no_sync_and_accumulation():
    results = []
    for parts in (1, 4):
        model = build("vision")
        opt = ParallelMuon(model, **SETTINGS)
        with opt.no_sync():
            backward(model, 0, 0, 1, parts)
        opt.step()
        results.append(weights_of(model))
    assert distance(*results) < 1e-12


def test_autocast_and_narrow_weights_learn():
    for dtype in (torch.float32, torch.bfloat16):
        model = build("vision").to(dtype)
        opt = ParallelMuon(model, **SETTINGS)
        losses = []
        for _ in range(6):
            opt.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss = loss_of(model, rows_of(0))
            loss.float().backward()
            opt.step()
            losses.append(loss.item())
        assert losses[-1] < losses[0] and all(p.dtype == dtype for p in model.parameters())
        states = [s for s in opt.state.values()]
        assert all(t.dtype == torch.float32 for s in states for t in s.values()) and all(("master" in s) == (dtype == torch.bfloat16) for s in states)


@pytest.mark.parametrize("rule", ["muon", "normuon"])
def test_a_step_inside_autocast_is_the_step_outside(rule):
    "With a closure, whose forward pass keeps the autocast of the loop."
    def trained(inside):
        torch.manual_seed(0)
        model = nn.Sequential(*[nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)) for _ in range(3)])
        groups, dtypes = param_groups(model), set()
        groups[0]["rule"] = rule
        opt = ParallelMuon(groups)

        def closure():
            with torch.autocast("cpu", torch.bfloat16, enabled=torch.is_autocast_enabled("cpu") or not inside):
                out = model(torch.randn(16, 8, generator=torch.Generator().manual_seed(opt.steps)))
            dtypes.add(out.dtype)
            opt.zero_grad()
            out.float().square().mean().backward()

        for _ in range(4):
            with torch.autocast("cpu", torch.bfloat16, enabled=inside):
                opt.step(closure)
        assert dtypes == {torch.bfloat16}
        return weights_of(model)
    assert distance(trained(True), trained(False)) == 0


def test_gradients_and_parameters_stay_where_they_are():
    model = small()
    addresses = {n: p.data_ptr() for n, p in model.named_parameters()}
    opt = ParallelMuon(model)
    one_step(model, opt)
    kept = {n: p.grad.clone() for n, p in model.named_parameters()}
    opt.step()
    assert all(torch.equal(kept[n], p.grad) and p.data_ptr() == addresses[n] for n, p in model.named_parameters())


def test_a_step_between_forward_and_backward_is_refused_by_autograd():
    model = small()
    opt = ParallelMuon(model)
    one_step(model, opt)
    loss = model(torch.ones(2, 4).double()).sum()
    opt.step()
    with pytest.raises(RuntimeError, match="inplace"):
        loss.backward()


def test_the_table_is_logged_once_and_is_the_repr(caplog):
    with caplog.at_level(logging.INFO, "golfnb"):
        opt = ParallelMuon(build("encoder"))
    (record,) = caplog.records
    assert "split 6+6+6" in repr(opt) and repr(opt) in record.getMessage() and "table.weight" in repr(opt)


# --- memory

@pytest.mark.parametrize("dtype, bytes_held", [(torch.float32, 12), (torch.bfloat16, 12)])
def test_bytes_held_for_an_element_of_a_matrix(dtype, bytes_held):
    "Weight, gradient, momentum; of a narrow weight also a master."
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False, dtype=dtype) for _ in range(4)))
    opt = ParallelMuon(list(model.parameters()))
    model(torch.ones(2, 64, dtype=dtype)).float().sum().backward()
    opt.step()
    tensors = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors_in(opt) + [p.grad for p in model.parameters()]}
    assert sum(tensors.values()) / sum(p.numel() for p in model.parameters()) < bytes_held + 0.1


def tensors_in(root, seen=None) -> list[torch.Tensor]:
    "Every tensor that an object reaches."
    seen = set() if seen is None else seen
    if id(root) in seen:
        return []
    seen.add(id(root))
    if isinstance(root, torch.Tensor):
        return [root]
    parts = [*root.keys(), *root.values()] if isinstance(root, dict) else root if isinstance(root, (list, tuple, set)) else vars(root).values() if hasattr(root, "__dict__") and type(root).__module__.startswith("golfnb") else ()
    return [t for part in parts for t in tensors_in(part, seen)]


# --- state

@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    "What each way of training wrote after two steps, and what came of it: (kind, how, ranks) -> (folder, then, later)."
    found = {}
    for world, cases in ((1, [("encoder", "plain")]), (2, [("encoder", "plain"), ("encoder", "sharded"), ("vision", "ddp")]), (3, [("experts", "plain"), ("encoder", "sharded")]), (4, [("encoder", "copies"), ("mlp", "sharded tensor")])):
        folders = [str(tmp_path_factory.mktemp("saved")) for _ in cases]
        outs = run_ranks(world, [("save_all", (*case, folder), {}) for case, folder in zip(cases, folders)])
        for i, case in enumerate(cases):
            found[*case, world] = (folders[i], *outs[0][i])
    return found


TAKEN = [  # (kind, how, ranks) that saved; ranks and how that go on; the ways
    (("encoder", "plain", 1), 1, "plain", ("file", "file, optimizer first", "dcp", "parts")), (("encoder", "plain", 2), 2, "plain", ("file", "dcp", "full", "parts")), (("encoder", "plain", 2), 1, "plain", ("file", "dcp", "parts", "dcp of parts")),
    (("encoder", "plain", 1), 2, "plain", ("file", "dcp", "parts", "parts of dcp")), (("encoder", "sharded", 2), 2, "sharded", ("file", "dcp", "full", "parts")), (("encoder", "sharded", 3), 2, "sharded", ("file", "dcp", "parts")),
    (("encoder", "sharded", 2), 1, "plain", ("file", "dcp", "parts", "dcp of parts")), (("encoder", "sharded", 3), 2, "plain", ("parts", "parts of dcp")), (("encoder", "plain", 2), 3, "sharded", ("file", "dcp", "parts", "dcp of parts")),
    (("experts", "plain", 3), 2, "plain", ("file", "parts")), (("experts", "plain", 3), 1, "plain", ("parts",)), (("experts", "plain", 3), 3, "plain", ("parts",)), (("encoder", "plain", 2), 3, "plain", ("parts",)),
    (("encoder", "plain", 1), 3, "plain", ("parts",)), (("vision", "ddp", 2), 2, "ddp", ("file", "dcp", "parts")),
    (("encoder", "copies", 4), 2, "sharded", ("file", "dcp", "parts")), (("encoder", "copies", 4), 1, "plain", ("dcp", "parts")), (("encoder", "plain", 1), 4, "copies", ("file", "dcp", "parts")),
    (("mlp", "sharded tensor", 4), 1, "plain", ("file", "dcp", "parts")), (("mlp", "sharded tensor", 4), 2, "tensor", ("file", "dcp", "parts")), (("mlp", "sharded tensor", 4), 4, "sharded tensor", ("dcp", "parts"))]


@pytest.fixture(scope="module")
def taken(saved):
    "All that is taken over, by the number of ranks: (case, way) -> weights at the end on rank 0."
    found = {}
    for world in (1, 2, 3, 4):
        jobs = [(case, how, way) for case, w, how, ways in TAKEN if w == world for way in ways]
        outs = run_ranks(world, [("go_on", (case[0], how, saved[case][0], way), {}) for case, how, way in jobs])
        found |= {(case, world, how, way): outs[0][i] for i, (case, how, way) in enumerate(jobs)}
    return found


@pytest.mark.parametrize("case, world, how, way", [(case, world, how, way) for case, world, how, ways in TAKEN for way in ways], ids=str)
def test_saved_states_go_on_elsewhere(saved, taken, case, world, how, way):
    assert distance(taken[case, world, how, way], saved[case][2]) < 1e-10
    assert distance(saved[case][1], saved[case][2]) > 1e-4


@pytest.fixture(scope="module")
def in_parts(tmp_path_factory):
    "(how, ranks that saved, ranks that read) -> what each rank found, by `in_parts` of the workers."
    folder, found = tmp_path_factory.mktemp("parts"), {}
    for saved in (True, False):
        for world in (1, 2, 3):
            cases = [("plain", world, world)] if saved else [("plain", w, world) for w in (1, 2, 3)]
            cases += [("sharded", world, world)] * (world == 2) if saved else [("sharded", 2, world)] * (world == 3) + [("sharded as plain", 2, world)] * (world == 1)
            outs = run_ranks(world, [("in_parts", (how.split()[-1], str(folder / f"{how.split()[0]}{w}"), saved), {}) for how, w, _ in cases])
            found |= {(*case, saved): [out[i] for out in outs] for i, case in enumerate(cases)}
    return found


def test_state_in_parts_is_read_to_the_bit_and_nothing_is_gathered(in_parts):
    "bf16 weights with masters, NorMuon's row moments, stacks of five matrices shared out over ranks; by `async_save`."
    for (how, saved, read, writes), ranks in in_parts.items():
        want = in_parts[how.split()[0], saved, saved, True][0]
        for tensors, numbers, copied, sent, sent_otherwise in ranks:
            assert tensors.keys() == want[0].keys() and len(tensors) > 15
            assert all(torch.equal(tensors[k], want[0][k]) for k in tensors), f"{how}, from {saved} to {read} ranks"
            assert numbers == want[1] == [0.02, torch.tensor(0.03)] and not copied and not sent, (how, saved, read)
            assert ("all_reduce" in sent_otherwise) == (read > 1)
    tensors = in_parts["plain", 3, 3, True][0][0]
    assert any("master" in k for k in tensors) and any("momentum" not in k and t.ndim == 1 and t.numel() >= 20 for k, t in tensors.items())


def test_a_checkpoint_in_parts_that_does_not_fit(tmp_path):
    "Another model is refused by torch before anything is read; other groups by us; a grown one reads what there is."
    model = small()
    opt = ParallelMuon(model)
    walked(model, opt)
    dcp.save({"o": ShardedState(opt)}, checkpoint_id=tmp_path, no_dist=True)
    grown = nn.Sequential(*small(seed=1), nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)))
    made = ParallelMuon(grown, lr=0.5)
    before = {k: t.clone() for s in made.states.values() for k, t in s.tensors.items()}
    with pytest.raises(CheckpointException, match=r"Missing key .*o\.state\.4\.0\."):
        dcp.load({"o": ShardedState(made)}, checkpoint_id=tmp_path, no_dist=True)
    assert distance(before, {k: t for s in made.states.values() for k, t in s.tensors.items()}) == 0 and made.param_groups[0]["lr"] == 0.5
    dcp.load({"o": ShardedState(made)}, checkpoint_id=tmp_path, no_dist=True, planner=DefaultLoadPlanner(allow_partial_load=True))
    assert made.param_groups[0]["lr"] == opt.param_groups[0]["lr"]
    for s in made.states.values():
        old = next((t.tensors for t in opt.states.values() if t.member.name == s.member.name), None)
        assert distance(s.tensors, old) == 0 if old else not any(t.any() for t in s.tensors.values()), s.member.name
    with pytest.raises(GolfError, match=r"groups have .*\.bias.* lacks"):
        fewer = ParallelMuon([{"params": [(n, p) for n, p in g["params"] if "bias" not in n], **{k: v for k, v in g.items() if k != "params"}} for g in param_groups(small())])
        dcp.load({"o": ShardedState(fewer)}, checkpoint_id=tmp_path, no_dist=True)
    with pytest.raises(GolfError, match="AdamW"):
        ShardedState(torch.optim.AdamW(model.parameters()))


def test_a_checkpoint_in_parts_of_torchs_muon_is_not_read_as_ours(tmp_path):
    "Its momentum is an average; in parts nothing converts it."
    model = nn.Linear(4, 4, bias=False)
    other = torch.optim.Muon(model.parameters())
    walked(model, other)
    dcp.save({"o": get_optimizer_state_dict(model, other)}, checkpoint_id=tmp_path, no_dist=True)
    made = ParallelMuon(model)
    with pytest.raises(GolfError, match="groups have no rule"):
        dcp.load({"o": ShardedState(made)}, checkpoint_id=tmp_path, no_dist=True, planner=DefaultLoadPlanner(allow_partial_load=True))


def test_a_rule_that_derives_from_ours_is_told_what_it_goes_without(caplog):
    class Mine(MuonRule):
        "Says nothing of itself."

    class Said(MuonRule):
        "Says that it is as ours."
        recordable, kernel = True, "heavy_ball"

    weight = nn.Parameter(torch.ones(4, 4))
    with caplog.at_level(logging.INFO, "golfnb"):
        opt = ParallelMuon([{"params": [weight], "rule": Mine()}])
    words = "Mine derives from MuonRule and does not say recordable and kernel itself"
    assert words in str(opt) and words in caplog.text
    for rule in (Said(), MuonRule(), NorMuonRule(), MuonEqRule()):
        assert "derives from" not in str(ParallelMuon([{"params": [weight], "rule": rule}]))


def test_chunks_are_boxes_whatever_holds_the_matrices():
    "Fused rows, fused columns of a matrix stored transposed, stacks of both, filters; each writes through into the state."
    for shape, group in (((12, 4), dict(split_sizes=(3, 9))), ((4, 12), dict(split_sizes=(6, 6), transposed=True)), ((2, 12, 4), dict(split_sizes=(4, 8))), ((2, 4, 12), dict(split_sizes=(6, 6), transposed=True)), ((4, 3, 2, 2), dict(flatten=True)), ((4, 3), {})):
        p, seen = nn.Parameter(torch.arange(float(math.prod(shape))).view(shape)), torch.zeros(shape)
        for m in matrices_of("p", p, group, 0):
            ((at, box),) = chunks_of(m, block_of(m, p.detach()).clone()).items()
            place = tuple(slice(a, a + n) for a, n in zip(at, box.shape, strict=True))
            assert torch.equal(p[place], box), (shape, group)
            seen[place] += 1
        assert (seen == 1).all()
    p = nn.Parameter(torch.zeros(4, 3, 2, 2))
    with pytest.raises(GolfError, match="p is flattened"):
        chunks_of(matrices_of("p", p, dict(flatten=True, transposed=True, split_sizes=(6, 6)), 0)[0], torch.zeros(4, 6))


def test_chunks_are_for_checkpoints_alone():
    made = ChunkedTensor((4, 4), torch.float32, torch.device("cpu"), {(0, 0): torch.ones(2, 4)})
    with pytest.raises(GolfError, match="whole tensor"):
        made + 1
    assert "(4, 4)" in repr(made)


def test_loading_never_writes_weights():
    for dtype in (torch.float64, torch.bfloat16):
        model = small(dtype)
        opt = ParallelMuon(model)
        walked(model, opt)
        saved = copy.deepcopy(opt.state_dict())
        model.load_state_dict({n: t * 1.5 for n, t in model.state_dict().items()})
        before = weights_of(model)
        opt.load_state_dict(saved)
        assert distance(before, weights_of(model)) == 0
        if dtype == torch.bfloat16:
            masters = {s.member.name: s.tensors["master"] for s in opt.states.values()}
            assert all(torch.equal(masters[n].bfloat16(), before[n]) for n in before), "masters of other weights do not count"


def test_a_saved_master_counts_where_it_rounds_to_the_weight():
    model, other = small(torch.bfloat16), small(torch.bfloat16, seed=5)
    opt = ParallelMuon(model, lr=0.01)
    walked(model, opt)
    other.load_state_dict(model.state_dict())
    with torch.no_grad():
        other[1][1].weight[0] += 1
    made = ParallelMuon(other)
    made.load_state_dict(opt.state_dict())
    old, new = (next(s for s in o.states.values() if s.member.name == "1.1.weight").tensors["master"] for o in (opt, made))
    assert torch.equal(old[1:], new[1:]) and torch.equal(new[0], other[1][1].weight[0].float()) and (old.bfloat16().float() != old).any()


@pytest.mark.parametrize("write", ["load", "copy", "data"])
def test_weights_written_between_steps_are_trained_on(write):
    model = small(torch.bfloat16)
    opt = ParallelMuon(model, lr=1e-6, weight_decay=0.0, adam_lr=0.0)
    one_step(model, opt)
    p = model[1][1].weight
    with torch.no_grad():
        if write == "load":
            model.load_state_dict({n: t + 0.25 if n == "1.1.weight" else t for n, t in model.state_dict().items()})
        elif write == "copy":
            p.copy_(p + 0.25)
        else:
            p.data.add_(0.25)
    want = p.detach().clone()
    one_step(model, opt, 1)
    assert torch.allclose(p.float(), want.float(), atol=1e-4) and torch.allclose(opt.state[p]["master"], want.float(), atol=1e-4)


def test_states_of_the_first_version_go_on(request):
    saved = torch.load(request.path.parent / "golden" / "optimizer_state_0.1.0.pt", weights_only=True)
    model = small(seed=9)
    opt = ParallelMuon(param_groups(model, filter=lambda n, p: "muon" if n == "0.weight" else None), lr=1.0)
    model.load_state_dict(saved["model"])
    opt.load_state_dict(saved["optimizer"])
    assert opt.param_groups[0]["lr"] == 0.03 and opt.param_groups[1]["lr"] == 0.01
    assert distance(walked(model, opt, 2, 3), saved["later"]) < 1e-12


@pytest.mark.parametrize("parts", (False, True), ids=("torch.save", "checkpoint in parts"))
def test_states_from_before_the_modules_moved_go_on(request, tmp_path, caplog, parts):
    "Saved when MuonEqRule was golfnb.rules.MuonEqRule; nothing differs, so nothing is said."
    golden = request.path.parent / "golden"
    saved = torch.load(golden / "optimizer_state_before_muon.pt", weights_only=True)
    assert saved["optimizer"]["param_groups"][0]["rule"] == "golfnb.rules.MuonEqRule"
    model = nn.Sequential(*(nn.Linear(4, 4, bias=i == 3) for i in range(4))).double()
    rules = (MuonEqRule(), "normuon", "muon", "adamw")
    opt = ParallelMuon([dict(params=[(f"{i}.{n}", p) for n, p in model[i].named_parameters()], rule=rule) for i, rule in enumerate(rules)], lr=1.0)
    if parts:
        shutil.unpack_archive(golden / "optimizer_parts_before_muon.zip", tmp_path)
        dcp.load({"model": model.state_dict(), "optimizer": ShardedState(opt)}, checkpoint_id=tmp_path, no_dist=True)
    else:
        model.load_state_dict(saved["model"])
        opt.load_state_dict(saved["optimizer"])
    assert [g["lr"] for g in opt.param_groups] == [0.03, 0.02, 0.02, 0.01]
    for i in (3, 4):
        model.zero_grad()
        model(torch.full((2, 4), 1.0 + i).double()).square().sum().backward()
        opt.step()
    assert distance(model.state_dict(), saved["later"]) < 1e-12 and not [r for r in caplog.records if r.name == "golfnb"]
    assert opt.state_dict()["param_groups"][0]["rule"] == "MuonEqRule"


def test_states_of_torch_go_on(exact_torch_muon, caplog):
    "Its Muon, without names, whose momentum is an average; then its AdamW, which takes the rest. Nothing differs, so nothing is said."
    model = small()
    groups = param_groups(model)
    pairs = [g["params"] for g in groups]
    muon, adamw = torch.optim.Muon([p for _, p in pairs[0]], lr=0.05, momentum=0.95), torch.optim.AdamW(pairs[1], lr=0.01, weight_decay=0.02)

    def step(i):
        for o in (muon, adamw):
            o.zero_grad()
        model((torch.arange(20.).view(5, 4) + i).sin().double()).square().mean().backward()
        muon.step()
        adamw.step()
    for i in range(3):
        step(i)
    twin = copy.deepcopy(model)
    opt = ParallelMuon(twin)
    opt.load_state_dict(muon.state_dict(), strict=False)
    opt.load_state_dict(adamw.state_dict(), strict=False)
    assert [g["lr"] for g in opt.param_groups] == [0.05, 0.01] and opt.param_groups[1]["betas"] == (0.9, 0.999)
    assert not [r for r in caplog.records if r.levelname == "WARNING"]
    step(3)
    one_step(twin, opt, 3)
    assert distance(weights_of(twin), weights_of(model)) < 1e-12


def test_states_of_dion_are_read():
    model = small()
    opt = ParallelMuon(model)
    walked(model, opt)
    ours, groups = opt.state_dict(), []
    for g in ours["param_groups"]:
        groups.append(dict(lr=0.5, mu=0.9, beta1=0.8, beta2=0.7, weight_decay=0.0, algorithm=g["rule"], step=3, epsilon=1e-8, nesterov=True, flatten=False, adjust_lr="spectral_norm", params=g["params"], param_names=g["param_names"]))
    state = {k: {"momentum": s["momentum_buffer"]} if "momentum_buffer" in s else {"momentum": s["exp_avg"], "variance": s["exp_avg_sq"]} for k, s in ours["state"].items()}
    other = small(seed=1)
    made = ParallelMuon(other)
    made.load_state_dict({"state": state, "param_groups": groups})
    back = made.state_dict()["state"]
    assert all(torch.equal(t, back[k][name]) for k, s in ours["state"].items() for name, t in s.items())
    assert made.param_groups[0]["lr"] == 0.5 and made.param_groups[0]["momentum"] == 0.9 and made.param_groups[1]["betas"] == (0.8, 0.7)


class AverageMuon(torch.optim.Optimizer):
    "Keller Jordan's: momentum is an average, and its groups say nothing of it."

    def __init__(self, params, lr=0.02, weight_decay=0.0, momentum=0.95):
        super().__init__(params, dict(lr=lr, weight_decay=weight_decay, momentum=momentum))

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                average = self.state[p].setdefault("momentum_buffer", torch.zeros_like(p))
                average.lerp_(p.grad, 1 - group["momentum"])
                p.sub_(quintic(p.grad.lerp(average, group["momentum"])), alpha=group["lr"])


FOREIGN = {
    "average": AverageMuon, "RMSprop": lambda p: torch.optim.RMSprop(p, momentum=0.9), "NAdam": torch.optim.NAdam, "RAdam": torch.optim.RAdam, "Adamax": torch.optim.Adamax,
    "SGD with dampening": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.9), "SGD with decay": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1),
    "Adam with decay": lambda p: torch.optim.Adam(p, weight_decay=0.1), "amsgrad": lambda p: torch.optim.AdamW(p, amsgrad=True), "maximize": lambda p: torch.optim.AdamW(p, maximize=True),
}


def three(seed=0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(*[nn.Linear(4, 4, bias=False) for _ in range(3)]).double()


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("maker", FOREIGN)
def test_state_of_an_unknown_optimizer_is_refused(maker, strict):
    "What its buffers mean cannot be seen; nothing of it comes in, its lr and eps neither."
    theirs = three()
    old = FOREIGN[maker](list(theirs.parameters()))
    walked(theirs, old, 2)
    rule = "adamw" if "exp_avg" in next(iter(old.state.values())) else "muon"
    opt = ParallelMuon([{"params": list(three().parameters()), "rule": rule}], lr=0.5)
    before = {k: v for k, v in opt.param_groups[0].items() if k != "params"}
    with pytest.raises(ValueError, match="not known here.*momentum_buffer as a sum.*group\\['rule'\\]"):
        opt.load_state_dict(old.state_dict(), strict=strict)
    assert {k: v for k, v in opt.param_groups[0].items() if k != "params"} == before
    assert not any(t.any() for s in opt.state.values() for t in s.values())


def test_who_knows_that_momentum_is_an_average_goes_on_from_it():
    "As the sentence says: the sum is the average over 1 - momentum, and the group says its rule."
    theirs, ours = three(), three()
    old = AverageMuon(list(theirs.parameters()))
    walked(theirs, old, 5)
    ours.load_state_dict(theirs.state_dict())
    new, saved = ParallelMuon(list(ours.parameters()), lr=0.02, weight_decay=0.0), copy.deepcopy(old.state_dict())
    for state in saved["state"].values():
        state["momentum_buffer"] /= 1 - 0.95
    saved["param_groups"][0]["rule"] = "muon"
    new.load_state_dict(saved)
    walked(theirs, old, 3, 5)
    walked(ours, new, 3, 5)
    assert distance(weights_of(theirs), weights_of(ours)) < 1e-6  # eps


@pytest.mark.parametrize("maker, rule, fits", [(torch.optim.SGD, "sgd", True), (torch.optim.SGD, "muon", False), (torch.optim.Muon, "sgd", False), (torch.optim.Adam, "adamw", True), (torch.optim.AdamW, "sgd", False)])
def test_state_of_another_rule_does_not_fit(maker, rule, fits):
    theirs = three()
    old = maker(list(theirs.parameters()), lr=0.01, **({"momentum": 0.9} if maker is torch.optim.SGD else {}))
    walked(theirs, old, 2)
    opt = ParallelMuon([{"params": list(three().parameters()), "rule": rule}])
    if fits:
        opt.load_state_dict(old.state_dict())
        name = "momentum_buffer" if rule == "sgd" else "exp_avg"
        assert all(torch.equal(a[name], b[name]) for a, b in zip(opt.state.values(), old.state.values(), strict=True)) and opt.param_groups[0]["lr"] == 0.01
    else:
        with pytest.raises(ValueError, match=f"another rule here than that of torch.optim.{maker.__name__}"):
            opt.load_state_dict(old.state_dict())


@pytest.mark.parametrize("make, rule, words", [
    (lambda p: torch.optim.SGD(p, lr=0.1), "adamw", "another rule here than that of torch.optim.SGD"), (torch.optim.AdamW, "sgd", "another rule here than that of torch.optim.AdamW"),
    (lambda p: torch.optim.AdamW(p, amsgrad=True), "adamw", "not known here")])
def test_a_file_without_any_state_is_known_by_its_groups(make, rule, words):
    "Plain SGD keeps nothing, and an optimizer that has not stepped has nothing yet: their lr is not taken for that of another rule."
    opt = ParallelMuon([{"params": list(three().parameters()), "rule": rule}])
    before = opt.param_groups[0]["lr"]
    with pytest.raises(ValueError, match=words):
        opt.load_state_dict(make(list(three().parameters())).state_dict())
    assert opt.param_groups[0]["lr"] == before


def test_compiled_and_grown_models_take_over_what_fits():
    model = small()
    opt = ParallelMuon(model)
    walked(model, opt)
    saved = opt.state_dict()
    twin = small(seed=2)
    compiled = nn.Sequential(*(torch.compile(m) if isinstance(m, nn.Sequential) else m for m in twin))
    made = ParallelMuon(list(compiled.named_parameters()) and [{"params": [(n, p) for n, p in compiled.named_parameters() if (p.ndim == 2) == flat and (n in ("0.weight", "3.weight")) == head], "rule": rule} for flat, head, rule in ((True, False, "muon"), (False, False, "adamw"), (True, True, "adamw"))])
    assert any("_orig_mod" in n for g in made.param_groups for n in g["param_names"])
    made.load_state_dict(saved)
    find = lambda o, name: next(s for s in o.states.values() if s.member.name.replace("_orig_mod.", "") == name).tensors
    assert torch.equal(find(made, "1.1.weight")["momentum_buffer"], find(opt, "1.1.weight")["momentum_buffer"])
    grown = nn.Sequential(*small(seed=3)[:3], nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 8, bias=False), nn.Linear(8, 6)).double(), nn.Linear(6, 4).double())
    bigger = ParallelMuon(grown)
    with pytest.raises(GolfError, match="3.0.weight.*more"):
        bigger.load_state_dict(saved)
    bigger.load_state_dict(saved, strict=False)
    assert torch.equal(find(bigger, "2.2.weight")["momentum_buffer"], find(opt, "2.2.weight")["momentum_buffer"]) and not find(bigger, "3.1.weight")["momentum_buffer"].any()


def test_options_stay_and_a_difference_is_told(caplog):
    model = small()
    saved = ParallelMuon(model, lr=0.5, nesterov=False, ns_coefficients="polar_express", adjust_lr_fn="match_rms_adamw").state_dict()
    opt = ParallelMuon(model, adjust_lr_fn=None)
    opt.load_state_dict(saved)
    group = opt.param_groups[0]
    assert (group["lr"], group["nesterov"], group["ns_coefficients"], group["adjust_lr_fn"]) == (0.5, True, "quintic", None)
    said = " ".join(r.getMessage() for r in caplog.records)
    assert "nesterov=False" in said and "ns_coefficients='polar_express'" in said and "match_rms_adamw" in said and "ns_steps" not in said


def test_states_that_do_not_fit_change_nothing():
    model = small()
    opt = ParallelMuon(model)
    walked(model, opt)
    before, good = weights_of(model), copy.deepcopy(opt.state_dict())
    short, renamed, reshaped = copy.deepcopy(good), copy.deepcopy(good), copy.deepcopy(good)
    del short["state"][5]["exp_avg"]
    renamed["param_groups"][0]["param_names"][2] = "elsewhere.weight"
    reshaped["state"][4]["exp_avg"] = torch.zeros(2, 9)
    reshaped["param_groups"][0]["lr"] = 7.0
    for bad, words in (({}, "nothing"), (None, "NoneType"), ({"state": {}, "param_groups": [{"params": [0, 1]}]}, "2 parameters without names"), (short, "exp_avg is missing"), (renamed, "elsewhere.weight is in the file only"),
                       (reshaped, r"exp_avg has shape \(2, 9\)"), (ParallelMuon(build("vision")).state_dict(), "more")):
        with pytest.raises(ValueError, match=words):
            opt.load_state_dict(bad)
    now = opt.state_dict()
    assert distance(before, weights_of(model)) == 0 and now["param_groups"] == good["param_groups"]
    assert all(torch.equal(t, now["state"][k][name]) for k, s in good["state"].items() for name, t in s.items())


def test_files_of_torch_without_names_have_the_order_of_the_module():
    "In our groups fused matrices stand apart, and vectors behind matrices; all have shapes in common."
    def model_of(seed):
        torch.manual_seed(seed)
        body = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 24, dropout=0.0, batch_first=True, bias=False), 2, enable_nested_tensor=False)
        return nn.Sequential(nn.Linear(4, 8), body, nn.Linear(8, 4)).double()

    def trained(model, make):
        opt = make([p for p in model[1].parameters() if p.ndim == 2] if make is torch.optim.Muon else model.parameters())
        model(torch.arange(24.0).view(2, 3, 4).sin().double()).square().mean().backward()
        opt.step()
        return opt
    model = model_of(0)
    muon, adamw = trained(model, torch.optim.Muon), trained(model, torch.optim.AdamW)
    opt = ParallelMuon(model_of(1))
    assert len([g for g in opt.param_groups if g["rule"] == "muon"]) == 2
    opt.load_state_dict(muon.state_dict(), strict=False)
    opt.load_state_dict(adamw.state_dict(), strict=False)
    theirs = dict(model.named_parameters())
    for s in opt.states.values():
        p = theirs[s.member.name]
        if s.member.rule.matrices:
            assert torch.allclose(s.tensors["momentum_buffer"], muon.state[p]["momentum_buffer"] / 0.05, rtol=1e-9), s.member.name
        else:
            assert torch.equal(s.tensors["exp_avg"], adamw.state[p]["exp_avg"]), s.member.name
    with pytest.raises(GolfError, match="8 parameters without names"):
        ParallelMuon(param_groups(model_of(1))).load_state_dict(muon.state_dict(), strict=False)


def test_torch_s_two_files_without_names():
    model = small()
    pairs = [g["params"] for g in param_groups(model)]
    muon, adamw = (make([p for _, p in half]) for make, half in zip((torch.optim.Muon, torch.optim.AdamW), pairs))
    model(torch.ones(2, 4).double()).square().sum().backward()
    muon.step()
    adamw.step()
    opt = ParallelMuon(param_groups(small()))
    for theirs in (muon, adamw):
        opt.load_state_dict(theirs.state_dict(), strict=False)
    found = {s.member.name: s.tensors for s in opt.states.values()}
    assert all(torch.equal(found[name]["exp_avg"], adamw.state[p]["exp_avg"]) for name, p in pairs[1])
    assert all(found[name]["momentum_buffer"].any() for name, _ in pairs[0])


def test_nothing_that_fits_is_told(caplog):
    opt = ParallelMuon(small())
    opt.load_state_dict(ParallelMuon([("elsewhere", nn.Parameter(torch.ones(2, 2)))]).state_dict(), strict=False)
    assert "nothing of the saved state" in caplog.text


def test_parameters_without_names_are_read_by_order():
    "Two groups alike; by torch.save's numbers, and by torch.distributed.checkpoint's names."
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

    def made(seed):
        model = small(seed=seed)
        matrices = matrices_in(model)
        others = [p for p in model.parameters() if p.ndim < 2]
        return model, ParallelMuon([{"params": matrices[:3], "lr": 0.03 + seed}, {"params": matrices[3:]}, {"params": others, "rule": "adamw"}])
    model, opt = made(0)
    walked(model, opt)
    for read in (lambda m, o: o.load_state_dict(copy.deepcopy(opt.state_dict())), lambda m, o: set_optimizer_state_dict(m, o, copy.deepcopy(get_optimizer_state_dict(model, opt)))):
        twin, twin_opt = made(1)
        twin.load_state_dict(model.state_dict())
        read(twin, twin_opt)
        original, original_opt = copy.deepcopy((model, opt))
        assert twin_opt.param_groups[0]["lr"] == 0.03
        assert distance(walked(twin, twin_opt, 2, 3), walked(original, original_opt, 2, 3)) == 0


def test_a_parameter_that_never_had_a_gradient_is_taken_as_zeros():
    model = small()
    adamw = torch.optim.AdamW(model.named_parameters())
    opt = ParallelMuon([{"params": list(model.named_parameters()), "rule": "adamw"}])
    walked(model, opt)
    opt.load_state_dict(adamw.state_dict())
    assert not any(t.any() for s in opt.state.values() for t in s.values())


# --- several ranks

@pytest.fixture(scope="module", params=(2, 4), ids="{} ranks".format)
def several(request):
    world = request.param
    jobs = [("drifting", (), {}), ("clipped", (), {}), ("other_calls", (), {}), ("narrow", ("plain",), {}), ("narrow", ("sharded",), {}), ("meshes", (), {}), ("mixed_precision", (), {}), ("normuon", ("plain",), {}), ("normuon", ("sharded",), {})]
    jobs += [("bits", (how, dtype), {}) for how in ("plain", "sharded") for dtype in (None, torch.bfloat16)]
    jobs += [("early", (), {}), ("unaveraged", (), {}), ("python_calls", (), {}), ("copies_of_shards", (), {})]
    if world == 2:
        jobs += [("rank_0_alone", (), {}), ("consolidated", ("plain", 1), {}), ("consolidated", ("sharded", 0), {})]
    return world, run_ranks(world, jobs)


def test_batch_norms_are_named(several):
    (plain_words, synced), *others = (out[0] for out in several[1])
    assert len(plain_words) == 1 and "1.running_mean" in plain_words[0] and "convert_sync_batchnorm" in plain_words[0]
    assert not synced and not any(words for out in others for words in out), "one rank says it, and only where it is true"


def test_clipping_by_each_rank_is_told_once(several):
    (told, *none), *others = (out[1] for out in several[1])
    assert len(told) == 1 and "same norm 0.01" in told[0] and "max_norm=0.01" in told[0]
    assert none == [[], []] and others == [[[], [], []]] * len(others)


def test_gradients_that_nobody_averages_are_told_once(several):
    (plain, ddp, inside, sharded), *others = (out[14] for out in several[1])
    for told in (plain, inside):
        assert len(told) == 1 and "reduce='none'" in told[0] and "DistributedDataParallel" in told[0]
    assert ddp == sharded == [] and others == [[[], [], [], []]] * len(others)


def test_ranks_with_other_calls_all_hear_of_it(several):
    for out in several[1]:
        modules, options = out[2]
        assert "rank 0 has 1.weight (4, 4)" in modules and "rank 1 has 1.weight (6, 4)" in modules and modules.startswith("GolfError")
        assert "ns_steps=5" in options and "ns_steps=6" in options


def test_shards_over_some_of_the_ranks_are_averaged_or_refused(several):
    for said, apart in (out[16] for out in several[1]):
        assert "nobody here averages" in said and "reduce='none'" in said
        assert apart < 1e-12


@pytest.mark.parametrize("case", [3, 4], ids=["plain", "sharded"])
def test_narrow_weights_follow_masters(several, case):
    "All ranks hold the same weights; momentum and master of each matrix are somewhere once."
    world, outs = several
    first, *_ = outs[0][case]
    for weights, rounds, _, losses in (out[case] for out in outs):
        assert distance(weights, first) == 0 and rounds and losses[-1] < losses[0]
    held = [out[case][2] for out in outs]
    assert sum(held) == pytest.approx(8, rel=1e-9) and max(held) < 8 / world * 2


def test_stages_of_a_pipeline(several):
    world, outs = several
    want = plain("vision", world // 2, steps=3)
    model = build("vision")
    assert want.keys() == model.state_dict().keys()
    for stage, results in (out[5] for out in outs):
        for weights in results.values():
            if stage == 1:
                assert (weights["weight"] < 0).all() and distance(weights, outs[-1][5][1]["mesh"]) == 0
            else:
                assert distance(weights, outs[0][5][1]["mesh"]) == 0
    reference = build("vision")
    opt = ParallelMuon(reference, **SETTINGS)
    for step in range(3):
        opt.zero_grad()
        for rank in range(world // 2):
            backward(reference, step, rank, world // 2, 1, 2 / world)
        opt.step()
    assert distance(weights_of(reference), outs[0][5][1]["group"]) < 1e-10


def test_mixed_precision_of_fully_shard(several):
    "Gradients computed in bf16 turn the matrices a little: within the steps taken."
    for low, high in (out[6] for out in several[1]):
        assert 0 < distance(low, high) < 3 * 3 * SETTINGS["lr"]


def test_the_group_of_all_ranks_is_not_kept():
    "Kept beyond `destroy_process_group`, gloo's threads meet the end of Python, and now and then abort."
    assert run_ranks(2, [("keeps_no_group", (), {})]) == [[0], [0]]


def test_a_barrier_of_the_other_ranks_does_not_let_rank_0_save_alone():
    ((error,),), _ = run_ranks(2, [("rank_0_saves", (), {})])
    assert "ParallelMuon.state_dict()" in error and error.startswith("GolfError")


def test_ranks_that_save_and_load_at_once_hear_of_it():
    for rank, ((said,),) in enumerate(run_ranks(2, [("other_call", (), {})])):
        assert "GolfError" in said and ("state_dict()", "load_state_dict()")[rank] in said


def test_the_first_fsdp_is_refused():
    for said in run_ranks(2, [("first_fsdp", (), {})]):
        assert all("FullyShardedDataParallel" in words[-1] and "fully_shard" in words[-1] for words in said[0]) and len(said[0]) == 3


def test_stages_in_one_checkpoint(tmp_path):
    assert run_ranks(2, [("stages_in_parts", (str(tmp_path),), {})]) == [[0.0], [0.0]]


def test_normuon_is_exact_when_sharded(several):
    world, outs = several
    (want, shapes), = run_ranks(1, [("normuon", ("plain",), {})])[0] if world == 1 else [reference_normuon(world)]
    for out in outs:
        for case in (7, 8):
            weights, found = out[case]
            assert distance(weights, want) < 1e-10 and found == shapes


def reference_normuon(world: int):
    model = build("vision")
    groups = param_groups(model)
    groups[0]["rule"] = "normuon"
    opt = ParallelMuon(groups, **SETTINGS)
    for step in range(3):
        opt.zero_grad()
        for rank in range(world):
            backward(model, step, rank, world, 1, 1 / world)
        opt.step()
    return weights_of(model), {k: tuple(t.shape) for k, t in opt.state_dict()["state"][0].items()}


def test_bit_for_bit_the_answer_of_one_process(several):
    "Also where what travels has two bytes: rounded before or after the journey is the same."
    world, outs = several
    for i, dtype in enumerate((None, torch.bfloat16)):
        ((want, none),), = run_ranks(1, [("bits", ("plain", dtype), {})])
        assert not none
        for how in (0, 1):
            for out in outs:
                weights, sent = out[9 + 2 * how + i]
                assert distance(weights, want) == 0
                assert {kind for kind, _ in sent} == {dtype or torch.float32}


def test_gradients_leave_during_backward(several):
    world, outs = several
    want = plain("encoder", world, steps=2)
    for left, said, weights, twin in (out[13] for out in outs):
        assert left[0] == left[1] > 1
        assert len(said) == 1 and "no_sync()" in said[0]
        for found in (weights, twin):
            assert distance(found, want) < 1e-10


def test_a_step_of_66_matrices_takes_few_calls_of_python(several):
    "What a step takes of the host, whatever the machine."
    assert max(rank[15] for rank in several[1]) <= 600


def test_what_one_rank_alone_calls_ends_soon_and_leaves_nothing_behind(several):
    "Once the wait is over in a sentence with the way out; then all ranks, one of them late, save, load and train."
    if several[0] != 2:
        return
    ((saves, loads), weights), (none, others) = (out[-3] for out in several[1])
    for said, call in ((saves, "state_dict"), (loads, "load_state_dict")):
        assert f"rank 0 misses rank 1 in ParallelMuon.{call}()" in said
        assert "every rank must call it" in said and "consolidate_state_dict(to=rank)" in said and "patience_s" in said
    assert none == [] and distance(weights, others) == 0
    model = build("vision")
    opt = ParallelMuon(model, **SETTINGS)
    for step in range(2):
        opt.zero_grad()
        backward(model, step, 0, 1)
        opt.step()
    assert distance(weights, weights_of(model)) < 1e-10


@pytest.mark.parametrize("case, to", [(-2, 1), (-1, 0)], ids=["plain", "sharded"])
def test_one_rank_saves_alone_what_was_consolidated(several, case, to):
    if several[0] != 2:
        return
    for rank, (said, after, before) in enumerate(out[case] for out in several[1]):
        words, last = said
        assert last == "GolfError: to must be a rank, 0 to 1, found 2"
        if rank == to:
            assert "misses rank" in words, "after a step it is old"
        else:
            assert f"consolidate_state_dict(to={to})" in words and f"rank {rank} has no state" in words
        assert after.keys() == before.keys() and all(torch.equal(t, before[k][name]) for k, s in after.items() for name, t in s.items())


def test_the_wait_is_ten_seconds_and_can_be_set():
    opt = ParallelMuon(build("vision"))
    assert ParallelMuon.patience_s == 10.0
    opt.patience_s = 60.0
    assert copy.deepcopy(opt).patience_s == 60.0


# --- accidents and bad input

@pytest.mark.parametrize("max_norm", [0.0, 0.5])
def test_a_skipped_step_is_counted_and_logged(caplog, max_norm):
    model = small()
    opt = ParallelMuon(model, max_norm=max_norm)
    before = walked(model, opt, 1)
    opt.zero_grad()
    model(torch.ones(2, 4).double()).sum().backward()
    model[1][0].weight.grad[0] = float("inf")
    opt.step()
    assert distance(weights_of(model), before) == 0 and opt.skipped == 1
    opt.steps = 99
    one_step(model, opt, 2)
    assert "1 of 100 steps" in caplog.text and opt.skipped == 1


def test_a_step_without_any_gradient_changes_nothing():
    for max_norm in (0.0, 1.0):
        model = small()
        opt = ParallelMuon(model, max_norm=max_norm)
        before = walked(model, opt, 2)
        state = copy.deepcopy(opt.state_dict()["state"])
        opt.zero_grad()
        opt.step()
        assert distance(before, weights_of(model)) == 0 and opt.skipped == 0
        assert all(torch.equal(t, opt.state_dict()["state"][k][name]) for k, s in state.items() for name, t in s.items())


class Lazy(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.LazyLinear(3)


@pytest.mark.parametrize("given, more, words", [
    (lambda: nn.ReLU(), {}, "ReLU"), (Lazy, {}, "b.weight"), (lambda: nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3, device="meta")), {}, "1.weight.*meta"),
    (lambda: small().parameters(), {}, r"param_groups\(model\)"), (lambda: small().named_parameters(), {}, r"0.bias.*param_groups\(model\)"), (lambda: [{"params": [torch.zeros(3, 3, dtype=torch.int64)]}], {}, "int64"),
    (lambda: small().state_dict(), {}, "OrderedDict"), (lambda: ["a", "b"], {}, "a str"), (lambda: [], {}, "empty"), (lambda: [{"params": [nn.Parameter(torch.zeros(2, 2))], "rule": "moun"}], {}, "muon.*'moun'"),
    (lambda: [nn.Parameter(torch.zeros(4, 4).to(torch.float8_e4m3fn))], {}, "float8"), (small, dict(momentum=1.0), "momentum.*1.0"), (small, dict(adam_lr=float("nan")), "lr.*nan"), (small, dict(lr=-1), "lr.*-1"), (small, dict(max_norm=-1), "max_norm.*-1"), (small, dict(betas=(0.9, 1.0)), "betas"),
    (small, dict(ns_steps=0), "ns_steps"), (small, dict(ns_coefficients="cubic"), "cubic"), (small, dict(adjust_lr_fn="rms"), "rms"), (small, dict(reduce="sum"), "sum"), (small, dict(mesh="gloo"), "mesh.*gloo")])
def test_what_it_does_not_take(given, more, words):
    with pytest.raises(ValueError, match=words):
        ParallelMuon(given(), **more)


def test_two_dtypes_and_double_beside_float_are_fine():
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3).bfloat16(), nn.Linear(3, 3).double())
    opt = ParallelMuon(net, lr=0.1)
    before = weights_of(net)
    for p in net.parameters():
        p.grad = torch.ones_like(p)
    opt.step()
    assert opt.skipped == 0 and all((before[n] != t).any() for n, t in weights_of(net).items())


def test_a_launcher_without_a_group_and_ddp_are_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(GolfError, match="WORLD_SIZE.*2"):
        ParallelMuon(small())
    monkeypatch.delenv("WORLD_SIZE")
    with pytest.raises(GolfError, match="reduce='none'"):
        ParallelMuon(object.__new__(nn.parallel.DistributedDataParallel))


def test_what_no_weight_is_made_of():
    "ZeRO-3's placeholders; MPS, where float64 is missing."
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for p in model.parameters():
        p.ds_shape, p.data = p.shape, torch.empty(0)
    for call in (lambda: ParallelMuon(model), lambda: param_groups(model), lambda: ParallelMuon([{"params": list(model.named_parameters()), "rule": "adamw"}])):
        with pytest.raises(ValueError, match="0.weight is a placeholder.*ZeRO-3"):
            call()

    class OnMps(torch.Tensor):
        device = torch.device("mps")
    assert "float64" in problem_with("w", torch.ones(2, 2).as_subclass(OnMps))


def test_under_ddp_s_join_the_first_step_refuses():
    for rank, (said,) in enumerate(run_ranks(2, [("joined", (), {})])):
        assert len(said) == 1 and "join()" in said[0] and "same number of batches" in said[0], rank


def test_what_a_step_refuses():
    model = small()
    opt = ParallelMuon(model)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(torch.ones(2, 4).double()).sum()).backward()
    with pytest.raises(GolfError, match="GradScaler"):
        scaler.step(opt)
    opt.found_inf = None
    one_step(model, opt)
    opt.param_groups[0]["params"][0] = nn.Parameter(torch.zeros(8, 6).double())
    with pytest.raises(GolfError, match="add_param_group"):
        opt.step()
    net = nn.Sequential(nn.Embedding(5, 4, sparse=True), nn.Linear(4, 4), nn.Linear(4, 2))
    opt = ParallelMuon(net)
    net(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(GolfError, match="0.weight.*sparse"):
        opt.step()


def test_parameters_exchanged_before_the_first_step_are_trained():
    "As accelerate does when it shards a model for which an optimizer was made."
    model, other = small(), small()
    opt = ParallelMuon(model)
    names = {p: n for n, p in model.named_parameters()}
    others = dict(other.named_parameters())
    for g in opt.param_groups:
        g["params"] = [others[names[p]] for p in g["params"]]
    want = small()
    assert distance(walked(other, opt), walked(want, ParallelMuon(want))) == 0


# --- on a GPU

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("kind", ["vision", "encoder", "experts"])
def test_a_step_on_cuda_never_waits_and_equals_the_cpu(kind):
    results = []
    for device in ("cpu", "cuda"):
        model = build(kind).to(device)
        opt = ParallelMuon(model, **SETTINGS, max_norm=0.3)
        for step in range(5):
            opt.zero_grad(set_to_none=step % 2 == 0)
            grads = torch.Generator().manual_seed(step)
            for p in model.parameters():
                p.grad = torch.randn(p.shape, generator=grads, dtype=p.dtype).to(device)
            opt.param_groups[0]["lr"] = 0.02 / (step + 1)
            if device == "cuda":
                torch.cuda.set_sync_debug_mode("error")  # a wait of the host raises
            try:
                opt.step()
            finally:
                torch.cuda.set_sync_debug_mode("default")
        results.append({n: t.cpu() for n, t in weights_of(model).items()})
    assert distance(*results) < 1e-9


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_step_recorded_in_a_cuda_graph_replays(dtype):
    "Numbers that are tensors may change between replays."
    results = []
    for recorded in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 128), nn.Linear(128, 64)) for _ in range(3))).to("cuda", dtype)
        opt = ParallelMuon(model, lr=torch.tensor(0.02, device="cuda"), adam_lr=torch.tensor(0.01, device="cuda"), max_norm=1.0)
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        generator = torch.Generator("cuda").manual_seed(0)
        take = opt.step
        for step in range(8):
            for p in model.parameters():
                p.grad.copy_(torch.randn(p.shape, generator=generator, device="cuda"))
            if recorded and step == 3:
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    opt.step()
                take = graph.replay
            opt.param_groups[0]["lr"].fill_(0.02 / (step + 1))
            take()
        results.append({n: t.float().cpu() for n, t in weights_of(model).items()})
    assert distance(*results) == 0


def halves(dtype: torch.dtype = torch.float32, d: int = 64) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.LayerNorm(d), nn.Linear(d, 2 * d), nn.Linear(2 * d, d), nn.Linear(d, d)) for _ in range(3))).to("cuda", dtype)


class Twins:
    "Two optimizers of one model, of which one records itself, step by step with one another."

    def __init__(self, dtype=torch.float32, rule="muon", **more):
        self.models = [halves(dtype), halves(dtype)]
        groups = [list(param_groups(model)) for model in self.models]
        for group in (group for some in groups for group in some if group["rule"] == "muon"):
            group["rule"] = rule
        self.opts = [ParallelMuon(some, **more) for some in groups]
        self.opts[1].recorder.works = False
        self.generator = torch.Generator("cuda").manual_seed(1)
        self.replays = 0

    def give(self, keep: bool, poison: bool = False):
        for a, b in zip(*(model.parameters() for model in self.models)):
            g = torch.randn(a.shape, generator=self.generator, device="cuda").to(a.dtype)
            if poison:
                g.view(-1)[0] = float("nan")
            for p in (a, b):
                if keep and p.grad is not None:
                    p.grad.copy_(g)
                else:
                    p.grad = g.clone()

    def step(self, keep: bool = True, poison: bool = False, **numbers):
        self.give(keep, poison)
        before = [id(r) for _, r in self.opts[0].recorder.recordings]
        for opt in self.opts:
            for group in opt.param_groups:
                group.update({k: v for k, v in numbers.items() if k in group})
            opt.step()
        found = [id(r) for _, r in self.opts[0].recorder.recordings]
        self.replays += bool(found) and found == before

    def check(self):
        a, b = ({n: t.float() for n, t in model.state_dict().items()} for model in self.models)
        assert distance(a, b) == 0
        states = [[t for s in opt.states.values() for t in s.tensors.values()] for opt in self.opts]
        assert all(torch.equal(x, y) for x, y in zip(*states, strict=True))
        assert torch.equal(self.opts[0].grad_norm, self.opts[1].grad_norm) or self.opts[0].grad_norm.isnan()
        assert self.opts[0].skipped == self.opts[1].skipped


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_step_records_itself_and_stays_the_same_to_the_bit(dtype):
    "Every number changes, one is a tensor, steps are skipped, gradients are missing or elsewhere, numbers of another kind change."
    twins = Twins(dtype, max_norm=1.0)
    for i in range(20):
        twins.step(keep=i % 2 == 0, lr=0.02 / (i + 1), weight_decay=0.1 / (i + 1), momentum=0.9 + i / 1000, betas=(0.9, 0.9 + i / 1000), poison=i == 12)
    assert len(twins.opts[0].recorder.recordings) == 1 and twins.replays > 10 and twins.opts[0].skipped == 1
    twins.check()
    for i in range(3):
        twins.step(lr=torch.tensor(0.01 * (i + 1), device="cuda"))
    twins.check()
    for _ in range(3):
        twins.step(keep=False)
    for model in twins.models:
        next(model.parameters()).grad = None
    for opt in twins.opts:
        opt.step()
    twins.check()
    for steps in (5, 3):
        for _ in range(20):
            twins.step(ns_steps=steps)
    twins.check()
    assert twins.opts[0].recorder.works and len(twins.opts[0].recorder.recordings) == 2


class OwnRecordable(MuonRule):
    "A rule of one's own that says what is true of it, and reads a number that changes."
    recordable, kernel = True, "heavy_ball"

    def after(self, made, state, group, ok):
        return made * (1 + group["momentum"])


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("rule", ["normuon", "muoneq_r", OwnRecordable()], ids=["normuon", "muoneq_r", "own"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_rules_record_themselves_too(rule, dtype):
    twins = Twins(dtype, rule, max_norm=1.0)
    for i in range(20):
        twins.step(keep=i % 2 == 0, lr=0.02 / (i + 1), momentum=0.9 + i / 1000, poison=i == 12)
    assert len(twins.opts[0].recorder.recordings) == 1 and twins.replays > 10
    twins.check()


@pytest.mark.gpu
@needs_gpu
def test_a_recording_is_of_one_optimizer_as_it_was():
    "Loading, copies, groups added later and two optimizers at once."
    twins = Twins()
    for i in range(8):
        twins.step()
    saved = copy.deepcopy(twins.opts[0].state_dict())
    for i in range(4):
        twins.step()
    for opt in twins.opts:
        opt.load_state_dict(copy.deepcopy(saved))
    for i in range(4):
        twins.step()
    twins.check()
    other = copy.deepcopy(twins.opts[0])
    assert not other.recorder.recordings and pickle.loads(pickle.dumps(twins.opts[0])).recorder.works
    for model, opt in zip(twins.models, twins.opts):
        model.late = nn.Linear(64, 64, bias=False, device="cuda")
        opt.add_param_group({"params": [("late.weight", model.late.weight)], "rule": "muon"})
        with torch.no_grad():
            model.late.weight.fill_(0.1)
    twins.opts[1].recorder.works = False
    for i in range(12):
        twins.step()
    assert twins.opts[0].recorder.recordings
    twins.check()


@pytest.mark.gpu
@needs_gpu
def test_what_cannot_be_recorded_is_not():
    "A rule or an optimizer of one's own, products without kernels, and an error while recording."
    class Own(ParallelMuon):
        pass

    for make in (lambda m: Own(m), lambda m: ParallelMuon(m.double())):
        model = halves()
        opt = make(model)
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        for _ in range(8):
            opt.step()
        assert not opt.recorder.recordings
    twins = Twins()
    for i in range(3):
        twins.step()
    update = twins.opts[0].measure

    def broken(*args):
        update(*args)
        if torch.cuda.is_current_stream_capturing():
            torch.cuda.synchronize()
    twins.opts[0].measure = broken
    for i in range(5):
        twins.step()
    twins.check()
    assert not twins.opts[0].recorder.works and not twins.opts[0].recorder.recordings
    assert torch.rand(5, device="cuda").std() > 0, "torch goes on"


@pytest.mark.gpu
@needs_gpu
def test_a_recorded_step_holds_no_scratch(caplog):
    "Bytes an element that are held between steps, recorded or not, graphs and all; and other threads go on."
    model = halves(d=1024)
    elements = sum(p.numel() for p in model.parameters())
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    torch.cuda.synchronize(), torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    opt, stop = ParallelMuon(model), threading.Event()
    caplog.set_level(logging.DEBUG, "golfnb")

    def busy():
        with torch.cuda.stream(torch.cuda.Stream()):
            while not stop.is_set():
                torch.ones(1000, device="cuda").cpu()
    thread = threading.Thread(target=busy)
    thread.start()
    try:
        for _ in range(10):
            opt.step()
    finally:
        stop.set()
        thread.join()
    assert opt.recorder.recordings, caplog.messages[1:]
    torch.cuda.synchronize(), torch.cuda.empty_cache()
    workspaces = 64 << 20  # of cuBLAS for two streams
    assert torch.cuda.memory_reserved() - before < 4.6 * elements + workspaces + opt.recorder.most_bytes


ALONE = """
import sys
for name in ("numpy", "triton", "sentencepiece", "matplotlib", "IPython", "nbdev", "fastcore"):
    sys.modules[name] = None
import torch
from golfnb import ParallelMuon, param_groups
model = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 4)) for _ in range(2)))
optimizer = ParallelMuon(param_groups(model), 0.02)
model(torch.ones(2, 4)).sum().backward()
optimizer.step()
print(optimizer)
"""


def test_torch_is_all_it_needs():
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", ALONE], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-1500:]
    assert "muon" in done.stdout

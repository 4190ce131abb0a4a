"""One call for any module: what it banks, that it trains as torch's own optimizers do on any number of ranks, and what it refuses."""
import copy
import io
import logging

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from any_workers import SETTINGS, NanoGPT, Vision, build, fresh, loss_of, lr_mul, plain, rows_of, run_ranks, wd_mul
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

from golfnb.any_model import ParallelMuon, find_ranks, head_weight, hidden_matrices, module_layout
from golfnb.settings import GolfError

WORLDS = (8, 4, 3, 2, 1)  # 8 first: it writes the file that 2 and 1 load


def distance(a: dict, b: dict) -> float:
    assert a.keys() == b.keys()
    return max(float(np.abs(a[k].astype(float) - b[k].astype(float)).max(initial=0)) for k in a)


def trained(steps=2, model=None, **more):
    model = model or build("nano")
    opt = ParallelMuon(model, **{**SETTINGS, **more})
    for step in range(steps):
        one_step(model, opt, step)
    return model, opt


def one_step(model, opt, step=0):
    opt.zero_grad()
    model.step = step
    loss_of(model, rows_of(step)).backward()
    opt.step()


def weights(model) -> dict:
    return {n: t.detach().numpy().copy() for n, t in model.state_dict().items()}


# --- several ranks

@pytest.fixture(scope="module")
def file(tmp_path_factory):
    return tmp_path_factory.mktemp("any") / "saved.pt"


JOBS = [("ours", ("nano",), dict(accum=1)), ("ours", ("nano",), dict(accum=3, keep_views=True, transposable=True)), ("ours", ("gpt2",), dict()),
        ("ours", ("vision",), dict(transposable=True, keep_views=True)), ("ours", ("vision",), dict(max_norm=0.05)), ("ours", ("nano",), dict(poison=(3, 1))), ("half_replicas", (), dict()), ("other_modules", (), dict())]
ORACLES = [("nano", dict(accum=1)), ("nano", dict(accum=3, keep_views=True)), ("gpt2", {}), ("vision", dict(keep_views=True)), ("vision", dict(max_norm=0.05)), ("nano", dict(skip=3))]


@pytest.fixture(scope="module", params=WORLDS)
def ranked(request, file):
    world = request.param
    jobs = JOBS if world > 1 else [("ours", ("nano",), dict(poison=(3, 0))) if more.get("poison") else (n, a, more) for n, a, more in JOBS[:7]]
    if world == 8:
        jobs = [*jobs, ("save_after", (str(file), 3), {})]
    if world in (1, 2):
        jobs = [*jobs, ("go_on", (str(file), 3, 2, "model optimizer plan"), {}), ("go_on", (str(file), 3, 2, "optimizer plan model"), {})]
    return world, run_ranks(world, jobs)


def test_equal_to_torch_on_separate_weights(ranked):
    "Three models; tied, frozen, unused, sometimes used and used on one rank only; accumulation; factors; a scheduler; clipping; both kinds of gradients; other ranks start elsewhere."
    world, outs = ranked
    for case, (kind, more) in enumerate(ORACLES):
        want = plain(kind, world, **more)
        for rank, out in enumerate(outs):
            got, skipped = out[case]
            assert distance(got, want) < 1e-9, f"{kind} {more} at {world} ranks, rank {rank}"
            assert skipped == (1 if "skip" in more else 0)


def test_the_oracle_moved_what_it_should():
    start, end = weights(build("nano")), plain("nano", 3)
    still = {n for n in start if np.array_equal(start[n], end[n])}
    assert still == {"spare.weight", "spare.bias", "transformer.h.0.up.weight", "transformer.h.2.ln_1.weight", "transformer.h.1.down.weight"}


def test_bf16_replicas_are_alike_and_follow_fp32_masters(ranked):
    _, outs = ranked
    assert len({out[6][0] for out in outs}) == 1
    assert sum(out[6][1][-1] for out in outs) < sum(out[6][1][0] for out in outs) and all(0 < out[6][2] <= 2 ** -8 for out in outs)


def test_ranks_with_different_modules_all_hear_of_it(ranked):
    world, outs = ranked
    if world > 1:
        assert len({out[7] for out in outs}) == 1 and "rank 0 has 1.weight (4, 4)" in outs[0][7] and "rank 1 has 1.weight (6, 4)" in outs[0][7]
        assert "clipping False" in outs[0][7] and "clipping True" in outs[0][7]


def test_saved_on_eight_ranks_goes_on_elsewhere(ranked):
    world, outs = ranked
    if world not in (1, 2):  # the others did not load
        return
    model = build("nano")
    opt = ParallelMuon(model, **SETTINGS, lr_mul=lr_mul, wd_mul=wd_mul)
    plan = torch.optim.lr_scheduler.LambdaLR(opt, lambda s: 1.0 if s < 2 else 0.6)
    model.transformer.h[1].down.weight.requires_grad_(False)
    for step in range(5):
        opt.zero_grad()
        readers = 8 if step < 3 else world
        for rank in range(readers):
            model.step, model.rank = step, rank
            (loss_of(model, rows_of(step)) / readers).backward()
        opt.step()
        plan.step()
    for out in outs:
        assert distance(out[-1], weights(model)) < 1e-9 and distance(out[-2], weights(model)) < 1e-9


def test_llama_in_one_process():
    got, _ = run_ranks(1, [("ours", ("llama",), {})])[0][0]
    assert distance(got, plain("llama", 1)) < 1e-9


# --- torch's checkpoints

@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    "On two ranks: (folder, what every rank found)."
    folder = str(tmp_path_factory.mktemp("dcp"))
    return folder, run_ranks(2, [("checkpoints", (folder,), {}), ("drifting", (), {}), ("clipped", (), {}), ("rank_0_alone", (), {})])


def test_torch_checkpoints_go_on_bit_for_bit(saved):
    folder, outs = saved
    for _, _, wrong in (*(out[0] for out in outs), run_ranks(1, [("checkpoints", (folder,), {})])[0][0]):
        assert not wrong


def test_a_torch_checkpoint_of_two_ranks_goes_on_on_one(saved):
    folder, outs = saved
    (after, want, _), *_ = outs[0]
    state, weights = run_ranks(1, [("optimizer_alone", (folder,), {})])[0][0]
    assert all(torch.equal(t, after["state"][i][k]) for i, s in state["state"].items() for k, t in s.items()) and state["param_groups"] == after["param_groups"]
    assert max((a - b).abs().max() for a, b in zip(weights, want)) < 1e-9


def test_a_torch_checkpoint_that_does_not_fit_changes_nothing():
    model, opt = fresh(0)
    good = opt.state_dict()
    for name, key in (("sometimes.weight", "master"), ("transformer.ln_f.bias", "exp_avg_sq")):
        bad = get_optimizer_state_dict(model, opt)
        bad["param_groups"][0]["lr"] = 7.0
        bad["state"][name][key] = torch.zeros(3, 2)
        with pytest.raises(GolfError, match=f"{key}.*{name}"):
            set_optimizer_state_dict(model, opt, bad)
    now = opt.state_dict()
    assert now["param_groups"] == good["param_groups"] and all(torch.equal(t, good["state"][i][k]) for i, s in now["state"].items() for k, t in s.items())


def test_batch_norms_are_named_on_several_ranks(saved):
    ((plain_words, synced),), ((others, _),) = ([out[1]] for out in saved[1])
    assert len(plain_words) == 1 and "1.running_mean" in plain_words[0] and "convert_sync_batchnorm" in plain_words[0]
    assert not synced and not others, "one rank says it, and only where it is true"


def test_clipping_by_each_rank_is_told_once(saved):
    (told, *none), others = (out[2] for out in saved[1])
    assert len(told) == 1 and "same norm 0.01" in told[0] and "max_norm=0.01" in told[0]
    assert none == [[], []] and others == [[], [], []]


def test_what_one_rank_alone_calls_is_told_soon(saved):
    warned, error, late = saved[1][0][3]
    assert "rank 0" in warned and "ParallelMuon.state_dict()" in warned
    assert error == f"GolfError: {warned}" and "ParallelMuon.load_state_dict()" in late, "warned while it waits, refused as soon as the other has left"


def test_the_state_is_seen_as_in_any_optimizer():
    model, opt = trained(2)
    wanted = opt.state_dict()["state"]
    for i, p in enumerate(p for g in opt.param_groups for p in g["params"]):
        assert opt.state[p].keys() == wanted[i].keys() and all(t.shape == wanted[i][k].shape and torch.equal(t.cpu(), wanted[i][k]) for k, t in opt.state[p].items())


def test_weights_written_before_a_save_are_in_it():
    model, opt = trained(1)
    model.load_state_dict({n: t + 0.5 for n, t in model.state_dict().items()})
    before = weights(model)
    opt.load_state_dict(opt.state_dict())
    assert distance(before, weights(model)) == 0


@pytest.mark.parametrize("kind, transposable", [("nano", False), ("vision", True)])
def test_safetensors_and_files_of_the_right_size(kind, transposable, tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    model, opt = trained(1, build(kind), transposable=transposable)
    safetensors.save_model(model, tmp_path / "model.safetensors")
    want, other = weights(model), build(kind, seed=9)
    other_opt = ParallelMuon(other, transposable=transposable)
    assert safetensors.load_model(other, tmp_path / "model.safetensors") == (set(), [])
    assert distance(weights(other), want) == 0
    one_step(other, other_opt)  # the weights are still where they belong
    for saved in (next(iter(opt.banked.values())), model.state_dict()):
        sizes = [io.BytesIO(), io.BytesIO()]
        torch.save(saved, sizes[0])
        torch.save(copy.deepcopy(saved), sizes[1])
        assert sizes[0].tell() <= sizes[1].tell()


# --- what is banked

class Conv1D(nn.Module):
    "Stands for the class of that name in transformers."

    def __init__(self, nf, nx):
        super().__init__()
        self.nf, self.weight, self.bias = nf, nn.Parameter(torch.randn(nx, nf)), nn.Parameter(torch.zeros(nf))


def test_choice_on_models_of_others():
    nano = hidden_matrices(NanoGPT())
    assert len(nano) == 3 * 4 + 3 and not {"lm_head.weight", "transformer.wte.weight", "transformer.wpe.weight"} & set(nano)
    gpt2 = hidden_matrices(build("gpt2"))
    assert [n.removeprefix("transformer.h.0.") for n in gpt2[:4]] == ["attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight"] and len(gpt2) == 12
    assert len(hidden_matrices(build("llama"))) == 14 and head_weight(build("llama")) == "lm_head.weight"
    vision = Vision()
    assert len(hidden_matrices(vision)) == 10 and head_weight(vision) == "heads.1.weight"
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2, enable_nested_tensor=False)
    assert head_weight(encoder) is None and [n.split(".", 2)[2] for n in hidden_matrices(encoder)[:3]] == ["self_attn.out_proj.weight", "linear1.weight", "linear2.weight"]
    assert head_weight(nn.Sequential(NanoGPT(), nn.LogSoftmax(-1))) == "0.lm_head.weight"


def test_conv1d_is_marked_transposed_and_scaled_by_its_logical_shape():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.h = nn.ModuleList(nn.ModuleDict(dict(fc=Conv1D(16, 4), proj=Conv1D(4, 16))) for _ in range(2))

    for net in (Net(), build("gpt2")):
        for _, _, m in module_layout(net, 2):
            p = net.get_parameter(m.name)
            assert m.transposed and (m.cols, m.rows) == tuple(p.shape) and m.shape_lr_scale == max(1, p.shape[1] / p.shape[0]) ** 0.5
    together = module_layout(Net(), 2, transposable=True)
    assert [b.shape for b in together.banks] == [(4, 16, 4)] and {m.transposed for m in together.banks[0].matrices} == {True, False}


def test_a_filter_overrides():
    model = NanoGPT()
    layout = module_layout(model, 1, filter=lambda n, p: n in ("transformer.wpe.weight", "transformer.wte.weight", "sometimes.weight"))
    assert sorted(layout.names()) == ["sometimes.weight", "transformer.wpe.weight", "transformer.wte.weight"]
    trained(3, NanoGPT().double(), filter=lambda n, p: p.ndim == 2)  # a tied weight in a bank: both modules read it
    model = NanoGPT().double()
    ParallelMuon(model, filter=lambda n, p: n == "transformer.wte.weight")
    assert model.lm_head.weight is model.transformer.wte.weight


def test_tied_weights_stay_out_wherever_they_are():
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2))
    net[2].weight = net[0].weight
    assert hidden_matrices(net) == ["1.weight"]
    early = nn.ModuleDict(dict(head=nn.Linear(4, 9, bias=False), emb=nn.Embedding(9, 4), mix=nn.Linear(4, 4), out=nn.Linear(4, 4)))
    early["emb"].weight = early["head"].weight
    assert hidden_matrices(early) == ["mix.weight"]


def test_a_shared_block_is_no_tie_and_a_frozen_weight_stays_out():
    block = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    net = nn.ModuleList([block, block, nn.Sequential(nn.Linear(4, 4), nn.ReLU())])
    assert hidden_matrices(net) == ["0.0.weight", "2.0.weight"]
    net[2][0].weight.requires_grad_(False)
    assert hidden_matrices(net) == ["0.0.weight"]


# --- the module stays what it was

@pytest.mark.parametrize("kind", ["nano", "gpt2", "vision"])
@pytest.mark.parametrize("transposable", [False, True])
def test_names_values_forward_and_copies_stay(kind, transposable):
    model = build(kind).eval()
    was, twin, out = {n: t.clone() for n, t in model.state_dict().items()}, copy.deepcopy(model), loss_of(model, rows_of(0)).item()
    parameters = dict(model.named_parameters())
    opt = ParallelMuon(model, transposable=transposable)
    assert dict(model.named_parameters()) .keys() == parameters.keys() and all(p is parameters[n] for n, p in model.named_parameters())
    assert list(model.state_dict()) == list(was) and all(torch.equal(t, was[n]) and t.dtype == was[n].dtype for n, t in model.state_dict().items())
    assert loss_of(model, rows_of(0)).item() == pytest.approx(out, rel=1e-14)  # a product may read a transposed weight in another order
    for bank, i, m in opt.layout:
        assert opt.banked[m.name].data_ptr() == opt.engine.banks[bank.name].replica[i].data_ptr()
    file = io.BytesIO()
    torch.save(copy.deepcopy(model).state_dict(), file)
    file.seek(0)
    twin.load_state_dict(torch.load(file))
    assert loss_of(twin, rows_of(0)).item() == pytest.approx(out, rel=1e-14)


def test_parameters_keep_their_dtype():
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        model = build("vision").to(dtype)
        opt = ParallelMuon(model, **SETTINGS)
        assert all(p.dtype == dtype for p in model.parameters())
        for _ in range(2):
            opt.zero_grad()
            model.loss(rows_of(0)).backward()
            opt.step()
        assert all(p.dtype == dtype for p in model.parameters())
        masters = [s["master"].dtype for s in opt.state_dict()["state"].values() if "master" in s]
        assert set(masters) == {torch.promote_types(dtype, torch.float32)} and len(masters) == (10 if dtype != torch.bfloat16 else len(list(model.parameters())))


def test_masters_of_bf16_replicas_start_unrounded():
    model = build("vision").float()
    was = {n: p.detach().clone() for n, p in model.named_parameters()}
    opt = ParallelMuon(model, replica_dtype=torch.bfloat16)
    state = opt.state_dict()
    for i, n in enumerate(opt.banked):
        assert torch.equal(state["state"][i]["master"], was[n]) and torch.equal(model.get_parameter(n), was[n].bfloat16())


def test_bf16_module_moves_by_its_masters():
    "lr 1e-4 on bf16 weights of size 1 is far below half a unit in the last place: only masters add it up."
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)).bfloat16()
    for p in model.parameters():
        nn.init.ones_(p)
    opt = ParallelMuon(model, lr=2e-4, adam_lr=1e-4, weight_decay=0.0, adam_weight_decay=0.0)
    for _ in range(100):
        opt.zero_grad()
        model(torch.ones(2, 4, dtype=torch.bfloat16)).sum().backward()
        opt.step()
    assert all((p < 1).all() for n, p in model.named_parameters() if n != "0.weight") and (model[0].weight < 1).any()


# --- an optimizer of torch

def test_it_is_a_torch_optimizer():
    model = build("nano")
    opt = ParallelMuon(model, **SETTINGS, lr_mul=lr_mul, wd_mul=wd_mul)
    assert isinstance(opt, torch.optim.Optimizer) and len(opt.param_groups) == 2
    first, rest = opt.param_groups
    assert (first["lr"], first["momentum"], first["weight_decay"]) == (0.02, 0.9, 0.1) and (rest["lr"], rest["weight_decay"]) == (0.01, 0.05)
    assert first["lr_mul"][0] == 0.5 and {2.0, 1.0} == set(first["wd_mul"]) and 0.0 in rest["wd_mul"]
    plan = torch.optim.lr_scheduler.OneCycleLR(opt, max_lr=[0.02, 0.01], total_steps=6, base_momentum=0.8, max_momentum=0.9)
    seen, hooks = [], []
    opt.register_step_post_hook(lambda *_: hooks.append(1))

    def closure():
        opt.zero_grad()
        loss = loss_of(model, rows_of(0))
        loss.backward()
        return loss

    for _ in range(5):
        seen.append((opt.step(closure).item(), opt.param_groups[0]["lr"], opt.param_groups[0]["momentum"]))
        plan.step()
    assert seen[-1][0] < seen[0][0] and len({s[1] for s in seen}) > 3 and len({s[2] for s in seen}) > 3 and len(hooks) == 5
    assert "ParallelMuon" in repr(opt)


def test_settings_may_change_between_steps():
    "Every number is read in every step: after a change ours equals an optimizer made with the changed ones."
    model, opt = trained(2)
    saved = copy.deepcopy({"m": model.state_dict(), "o": opt.state_dict()})
    changed = dict(lr=0.003, momentum=0.5, weight_decay=0.7, adam_lr=0.004, adam_weight_decay=0.3, betas=(0.5, 0.6), eps=1e-3)
    results = []
    for live in (True, False):
        model = build("nano")
        opt = ParallelMuon(model, **(SETTINGS if live else changed), **({} if live else dict(lr_mul=lambda n, p: 3.0)))
        wanted = [{k: v for k, v in g.items()} for g in opt.param_groups]
        model.load_state_dict(saved["m"])
        opt.load_state_dict(saved["o"])
        if live:
            opt.param_groups[0].update(lr=0.003, momentum=0.5, weight_decay=0.7)
            opt.param_groups[1].update(lr=0.004, weight_decay=0.3, betas=(0.5, 0.6), eps=1e-3)
            for g in opt.param_groups:
                g["lr_mul"] = [3.0] * len(g["params"])
        else:
            for g, w in zip(opt.param_groups, wanted):
                g.update({k: v for k, v in w.items() if k != "params"})
        one_step(model, opt)
        results.append(weights(model))
    assert distance(*results) == 0 and distance(results[0], {n: t.numpy() for n, t in saved["m"].items()}) > 1e-4


def test_gradients_stay_until_zero_grad_as_in_torch():
    model, opt = trained(1)
    p, b = model.transformer.h[1].up.weight, model.transformer.h[1].up.bias
    one = (p.grad.clone(), b.grad.clone())
    assert one[0].any() and one[1].any()
    opt.zero_grad(set_to_none=False)
    assert p.grad is opt.grad_views["transformer.h.1.up.weight"] and not p.grad.any() and not b.grad.any() and model.spare.weight.grad is None
    opt.zero_grad()
    assert all(q.grad is None for q in model.parameters())


def test_foreign_gradients_are_copied_in():
    "None and fresh, assigned by the user, in the buffer, on one parameter and not the next: always the same weights."
    results = []
    for way in ("none", "views", "assigned", "mixed"):
        model, opt = trained(2)
        opt.zero_grad(set_to_none=way != "views")
        model.step = 3
        loss_of(model, rows_of(3)).backward()
        if way in ("assigned", "mixed"):
            for i, p in enumerate(opt.banked.values()):
                if p.grad is not None and (way == "assigned" or i % 2):
                    p.grad = p.grad.clone()
        if way == "views":
            assert model.transformer.h[1].up.weight.grad is opt.grad_views["transformer.h.1.up.weight"]
        opt.step()
        results.append(weights(model))
    assert all(distance(results[0], r) == 0 for r in results[1:])


# --- somebody else moves or writes weights

@pytest.mark.parametrize("replica_dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("write", ["load", "copy", "data"])
def test_weights_changed_from_outside_become_the_masters(write, replica_dtype):
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4), nn.Linear(4, 2))
    opt = ParallelMuon(model, lr=1e-6, weight_decay=0.0, adam_lr=0.0, replica_dtype=replica_dtype)
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))

    def step():
        opt.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=replica_dtype is not None):
            model(x).float().square().mean().backward()
        opt.step()

    step()
    before, p = opt.state_dict()["state"], model[1].weight
    with torch.no_grad():
        if write == "load":
            model.load_state_dict({n: t + 0.25 if n == "1.weight" else t for n, t in model.state_dict().items()})
        elif write == "copy":
            p.copy_(p + 0.25)
        else:
            p.data.add_(0.25)
    want = p.detach().clone()
    step()
    after = opt.state_dict()["state"]
    assert torch.allclose(p.float(), want.float(), atol=1e-4) and torch.allclose(after[1]["master"], want.float(), atol=1e-4)
    assert torch.allclose(after[0]["master"], before[0]["master"], atol=2e-5), "an untouched weight keeps its master, unrounded"
    assert not torch.equal(after[0]["master"], before[0]["master"])


def test_moved_storage_is_an_error():
    for move, word in ((lambda m: m.float(), "moved"), (lambda m: setattr(m.sometimes.weight, "data", m.sometimes.weight.data.clone()), "sometimes.weight.*moved"),
                       (lambda m: setattr(m.transformer.ln_f.bias, "data", torch.zeros(10).double()), "ln_f.bias.*moved"),
                       (lambda m: m.load_state_dict({n: t.clone() for n, t in m.state_dict().items()}, assign=True), "assign=True"),
                       (lambda m: setattr(m, "mine", nn.Linear(10, 10)), None),
                       (lambda m: setattr(m.mine, "weight", nn.Parameter(torch.zeros(10, 10))), "mine.weight.*assign=True")):
        model, opt = trained(1)
        move(model)
        if word:
            with pytest.raises(GolfError, match=word):
                opt.step()
    model, opt = trained(1)
    one_step(model.double(), opt)  # nothing to move: no error


def test_a_step_between_forward_and_backward_is_refused_by_autograd():
    model, opt = trained(1)
    loss = loss_of(model, rows_of(0))
    opt.step()
    with pytest.raises(RuntimeError, match="inplace"):
        loss.backward()


# --- how models are run

def test_activation_checkpointing():
    from torch.utils.checkpoint import checkpoint

    results = []
    for reentrant in (None, False, True):
        model = build("nano")
        if reentrant is not None:
            for block in model.transformer.h:
                block.forward = lambda x, f=block.forward: checkpoint(f, x, use_reentrant=reentrant)
        results.append(weights(trained(3, model)[0]))
    assert distance(results[0], results[1]) < 1e-12 and distance(results[0], results[2]) < 1e-12


def images_of(step, device="cpu"):
    rows = rows_of(step)[:, 0]
    return (rows.view(-1, 1, 1, 1) * 0.37 + torch.arange(147).view(3, 7, 7)).sin().double().to(device), (rows % 5).to(device)


@pytest.mark.parametrize("way", ["wrapper", "module"])
def test_what_torch_compile_traces(way):
    "The module or its compiled wrapper may be given; graphs by autograd's tracer, run without code generation."
    results = []
    for compiled in (False, True):
        model = build("vision")
        run = torch.compile(model, backend="aot_eager") if compiled else model
        opt = ParallelMuon(run if way == "wrapper" else model, **SETTINGS)
        for step in range(4):
            opt.zero_grad(set_to_none=step != 2)
            images, targets = images_of(step)
            F.cross_entropy(run(images), targets).backward()
            opt.step()
        results.append(weights(model))
    assert distance(*results) < 1e-9


@pytest.mark.compile
def test_under_torch_compile():
    "Compiled code reads banks that are stored transposed, and leaves gradients where the optimizer finds them."
    results = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 6), nn.Tanh(), nn.Linear(6, 2)).double()
        opt, run = ParallelMuon(model, **SETTINGS, transposable=True), torch.compile(model) if compiled else model
        for step in range(4):
            opt.zero_grad(set_to_none=step < 2)
            run((torch.arange(24).view(4, 6) + step).sin().double()).square().mean().backward()
            opt.step()
        results.append(weights(model))
    assert distance(*results) < 1e-12


# --- accidents and bad input

@pytest.mark.parametrize("max_norm", [0.0, 0.5])
def test_a_skipped_step_is_counted_and_logged(caplog, max_norm):
    model, opt = trained(1, max_norm=max_norm)
    before = weights(model)
    opt.zero_grad()
    loss_of(model, rows_of(1)).backward()
    model.transformer.ln_f.weight.grad[0] = float("inf")
    with caplog.at_level(logging.WARNING, "golfnb"):
        opt.step()
        assert distance(weights(model), before) == 0 and opt.skipped == 1
        opt.steps += 97  # as if they had been made
        opt.engine.scalars.count += 97
        one_step(model, opt, 2)
    (record,) = caplog.records
    assert "1 of 100 steps" in record.getMessage() and opt.skipped == 1


def test_a_step_without_any_gradient_changes_nothing():
    for max_norm in (0.0, 1.0):
        model, opt = trained(2, max_norm=max_norm)
        before, state = weights(model), opt.state_dict()["state"]
        opt.zero_grad()
        opt.step()
        assert distance(before, weights(model)) == 0 and opt.skipped == 0
        assert all(torch.equal(t, state[i][k]) for i, s in opt.state_dict()["state"].items() for k, t in s.items())


class Lazy(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.LazyLinear(3)


def two_dtypes():
    return nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3).bfloat16(), nn.Linear(3, 3))


@pytest.mark.parametrize("module, more, words", [
    (lambda: nn.Sequential(nn.Embedding(3, 4), nn.LayerNorm(4)), {}, "3 .*Sequential"),
    (lambda: nn.Linear(3, 3), {}, "2 .*Linear"), (lambda: nn.ReLU(), {}, "0 .*ReLU"),
    (lambda: nn.Sequential(nn.Conv2d(1, 2, 3), nn.Linear(3, 3), nn.Linear(3, 3)), dict(filter=lambda n, p: True), "0.weight.*float32.*\\(2, 1, 3, 3\\)"),
    (two_dtypes, {}, "float32.*1.weight.*bfloat16"),
    (lambda: nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3).double()), {}, "0.weight, torch.float32.*1.weight, torch.float64"),
    (lambda: nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3, device="meta")), {}, "1.weight.*meta"),
    (Lazy, {}, "b.weight"),
    (lambda: nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), dict(momentum=1.0), "momentum.*1.0"),
    (lambda: nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), dict(adam_lr=float("nan")), "adam_lr.*nan"),
])
def test_modules_that_cannot_be_banked(module, more, words):
    module = module()
    was = {n: p.data_ptr() for n, p in module.named_parameters() if not nn.parameter.is_lazy(p)}
    with pytest.raises(GolfError, match=words):
        ParallelMuon(module, **more)
    assert was == {n: p.data_ptr() for n, p in module.named_parameters() if not nn.parameter.is_lazy(p)}, "a refused call changes nothing"


def test_two_dtypes_are_fine_when_one_is_banked():
    net = two_dtypes()
    opt = ParallelMuon(net, filter=lambda n, p: n == "0.weight")
    with torch.autocast("cpu", torch.bfloat16):
        net(torch.ones(2, 3)).float().sum().backward()
    opt.step()
    assert opt.skipped == 0 and len(opt.engine.groups) == 2


def test_a_launcher_without_a_group_and_wrappers_are_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(GolfError, match="WORLD_SIZE.*2"):
        ParallelMuon(NanoGPT())
    monkeypatch.delenv("WORLD_SIZE")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    with pytest.raises(GolfError, match=r"set_device\(1\)"):
        find_ranks(torch.device("cuda:1"))
    wrapped = object.__new__(nn.parallel.DistributedDataParallel)
    with pytest.raises(GolfError, match="wrapper.module"):
        ParallelMuon(wrapped)
    with pytest.raises(GolfError, match=r"ParallelMuon\(model\).*generator"):
        ParallelMuon(NanoGPT().parameters())


def test_an_optimizer_is_neither_copied_nor_pickled():
    _, opt = trained(1)
    for way in (copy.copy, copy.deepcopy, lambda o: torch.save(o, io.BytesIO())):
        with pytest.raises(GolfError, match=r"pickled.*state_dict\(\)"):
            way(opt)


def test_what_a_step_refuses():
    model, opt = trained(1)
    opt.found_inf = torch.zeros(1)  # what a GradScaler does to optimizers it trusts
    with pytest.raises(GolfError, match="GradScaler"):
        opt.step()
    del opt.found_inf
    frozen = model.transformer.h[0].up.weight
    frozen.requires_grad_(True)
    with pytest.raises(GolfError, match="h.0.up.weight.*frozen"):
        one_step(model, opt)
    opt.add_param_group({"params": [("late", nn.Parameter(torch.zeros(2, 2)))]})
    with pytest.raises(GolfError, match="parameters.*module"):
        opt.step()
    net = nn.Sequential(nn.Embedding(5, 4, sparse=True), nn.Linear(4, 4), nn.Linear(4, 2))
    opt = ParallelMuon(net)
    net(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(GolfError, match="0.weight.*sparse"):
        opt.step()


@pytest.mark.skipif(not hasattr(torch.amp, "GradScaler"), reason="older torch")
def test_a_grad_scaler_meets_the_refusal_and_not_a_silent_skip():
    model, opt = trained(1)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(loss_of(model, rows_of(0))).backward()
    with pytest.raises(GolfError, match="GradScaler"):
        scaler.step(opt)


def test_states_of_other_models_are_refused_before_anything_changes():
    model, opt = trained(2)
    before, good = weights(model), opt.state_dict()
    adam = torch.optim.AdamW(model.parameters())
    short = copy.deepcopy(good)
    del short["state"][3]["momentum_buffer"]
    renamed = copy.deepcopy(good)
    renamed["param_groups"][0]["param_names"][2] = "elsewhere.weight"
    for bad, words in (({}, "state.*weight"), (adam.state_dict(), "state.*weight"), (short, "found master"), (renamed, "elsewhere.weight"),
                       (trained(1, NanoGPT(d=8).double())[1].state_dict(), "state.*weight")):
        with pytest.raises(GolfError, match=words):
            opt.load_state_dict(bad)
    assert distance(before, weights(model)) == 0
    held = {t.untyped_storage().data_ptr() for part in opt.engine.parts for t in (part.fp32_shard, *part.state.values())}
    assert {t.untyped_storage().data_ptr() for s in opt.state.values() for t in s.values()} <= held, "the whole state is gathered for the file only"


# --- cost



@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_step_on_cuda_never_waits_and_equals_the_cpu():
    results = []
    for device in ("cpu", "cuda"):
        model = build("vision").to(device)
        opt = ParallelMuon(model, **SETTINGS)
        for step in range(6):  # two eager, one that records its launches and waits for that, then replays
            opt.zero_grad(set_to_none=step % 2 == 0)
            images, targets = images_of(step, device)
            F.cross_entropy(model(images), targets).backward()
            opt.param_groups[0]["lr"] = 0.02 / (step + 1)
            torch.cuda.set_sync_debug_mode("error" if device == "cuda" and step != 2 else "default")  # a wait of the host raises
            try:
                opt.step()
            finally:
                torch.cuda.set_sync_debug_mode("default")
        results.append({n: t.cpu().numpy() for n, t in model.state_dict().items()})
    assert distance(*results) < 1e-9

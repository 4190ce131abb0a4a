"""Momentum in bf16: bytes held, what is saved and loaded, and the same on several ranks as on one."""
import pytest
import torch
from state_dtype_workers import all_cases, narrow_groups
from torch import Tensor, nn
from workers import spawn

from golfnb.muon.optimizer import ParallelMuon
from golfnb.model.engine import Ranks
from golfnb.muon.rules import AdamWRule, MuonEqRule, MuonRule, NorMuonRule, OptimizerError, heavy_ball

BF16 = torch.bfloat16


def linears(dtype=torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(64, 64, bias=False, dtype=dtype) for _ in range(4)))


def held(optimizer) -> float:
    "Bytes of state an element of the weights."
    tensors = [t for state in optimizer.state.values() for t in state.values() if isinstance(t, Tensor)]
    return sum(t.numel() * t.element_size() for t in tensors) / sum(p.numel() for p in optimizer.params)


@pytest.mark.parametrize("dtype, kept, bytes_held", [(torch.float32, None, 4), (torch.float32, BF16, 2), (BF16, None, 8), (BF16, BF16, 6)])
def test_bytes_of_state_an_element(dtype, kept, bytes_held):
    "Momentum, and of a narrow weight a master, which stays in fp32."
    model = linears(dtype)
    optimizer = ParallelMuon([{"params": list(model.parameters()), "rule": "muon", "state_dtype": kept}])
    model(torch.ones(2, 64, dtype=dtype)).float().sum().backward()
    optimizer.step()
    assert held(optimizer) == bytes_held
    for state in optimizer.state.values():
        assert state["momentum_buffer"].dtype == (kept or torch.float32) and state.get("master", torch.zeros(())).dtype == torch.float32


@pytest.mark.parametrize("nesterov", [True, False])
def test_a_sum_is_made_in_fp32_and_rounded_once(nesterov):
    group = {"momentum": 0.95, "nesterov": nesterov}
    buffer, grad = torch.randn(5, 7).to(BF16), torch.randn(5, 7).to(BF16)
    moved = buffer.float() * 0.95 + grad.float()
    ahead = grad.float() + moved * 0.95 if nesterov else moved
    state = {"momentum_buffer": buffer}
    made = heavy_ball(grad, state, group, torch.tensor(True))
    assert made.dtype == torch.float32 and torch.equal(made, ahead) and torch.equal(buffer, moved.to(BF16))
    heavy_ball(grad * torch.nan, state, group, torch.tensor(False))
    assert torch.equal(buffer, moved.to(BF16))


@pytest.mark.parametrize("world", [1, 2, 4])
def test_on_any_number_of_ranks_state_is_bf16_and_goes_on_from_a_file(world):
    "Whole, sharded, fp32 and bf16 weights: alike on all ranks; masters and mean squares stay in fp32."
    cases = [("encoder", how, bits) for how in (("plain",) if world == 1 else ("plain", "sharded")) for bits in (torch.float32, BF16)]
    outs = spawn(world, "all_cases", cases, module="state_dtype_workers") if world > 1 else [all_cases(Ranks(), cases)]
    for i, (kind, how, bits) in enumerate(cases):
        weights, state = outs[0][i]
        momenta = [s["momentum_buffer"] for s in state.values() if "momentum_buffer" in s]
        assert momenta and all(t.dtype == BF16 and t.any() for t in momenta)
        assert all(s[name].dtype == torch.float32 for s in state.values() for name in ("master", "exp_avg", "row_moment") if name in s)
        for out in outs[1:]:
            assert all(torch.equal(out[i][0][name], t) for name, t in weights.items())
            assert all(torch.equal(t, s) for t, s in zip(momenta, [s["momentum_buffer"] for s in out[i][1].values() if "momentum_buffer" in s]))


def test_files_of_fp32_and_bf16_are_read_by_each_other():
    def made(dtype):
        model = linears()
        optimizer = ParallelMuon([{"params": list(model.named_parameters()), "rule": "muon", "state_dtype": dtype}])
        model(torch.randn(8, 64, generator=torch.Generator().manual_seed(1))).square().sum().backward()
        optimizer.step()
        return optimizer

    wide, narrow = made(None), made(BF16)
    before = [s["momentum_buffer"].clone() for s in wide.state.values()]
    narrow.load_state_dict(wide.state_dict())
    for state, t in zip(narrow.state.values(), before):
        assert state["momentum_buffer"].dtype == BF16 and torch.equal(state["momentum_buffer"], t.to(BF16))
    wide.load_state_dict(narrow.state_dict())
    for state, t in zip(wide.state.values(), before):
        assert state["momentum_buffer"].dtype == torch.float32 and torch.equal(state["momentum_buffer"], t.to(BF16).float())
    assert wide.param_groups[0]["state_dtype"] is None and narrow.param_groups[0]["state_dtype"] is BF16


def test_who_has_it():
    "Muon and its kin; not AdamW, whose mean square changes by less than bf16 holds."
    assert all("state_dtype" in rule.defaults for rule in (MuonRule, NorMuonRule, MuonEqRule)) and "state_dtype" not in AdamWRule.defaults
    model = linears()
    with pytest.raises(OptimizerError, match="AdamWRule has no 'state_dtype'"):
        ParallelMuon([{"params": list(model.parameters()), "rule": "adamw", "state_dtype": BF16}])
    with pytest.raises(OptimizerError, match="state_dtype must be None"):
        ParallelMuon([{"params": list(model.parameters()), "rule": "muon", "state_dtype": torch.float16}])


def test_it_stays_as_it_was_made():
    model = linears()
    optimizer = ParallelMuon(narrow_groups(model))
    optimizer.param_groups[0]["state_dtype"] = None
    with pytest.raises(OptimizerError, match="state_dtype of a group stays"):
        optimizer.step()

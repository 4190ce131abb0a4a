"""The trellis: the best path against brute force, levels by a reader written anew, kernels against the loop, refusals."""
import os
import subprocess
import sys
from itertools import product

import pytest
import torch

from golfnb.muon.jit import triton
from golfnb.settings import GolfError
from golfnb.file.trellis import (
    TRELLIS_CODES,
    next_state,
    trellis_arms,
    trellis_encode,
    trellis_kernel,
    trellis_levels,
    trellis_plain,
    viterbi_kernel,
)

every_code = pytest.mark.parametrize("states", TRELLIS_CODES)
needs_triton = pytest.mark.skipif(triton is None, reason="needs Triton")


def weights_of(sequences: int, T: int, seed: int = 0, spread: float = 3.0, device: str = "cpu") -> torch.Tensor:
    "Weights in union steps: half Gaussian, a quarter at halves of a step, where levels tie, a quarter zeros."
    g = torch.Generator().manual_seed(seed)
    y = spread * torch.randn(sequences, T, generator=g)
    pick = torch.rand(sequences, T, generator=g)
    return torch.where(pick < 0.5, y, torch.where(pick < 0.75, (2 * y).round() / 2, 0.0)).to(device)


def read(sequence: list[int], states: int) -> list[int]:
    "Levels of one sequence: the shift register as a row of bits, its codes as lists of taps."
    loop, entry = ([code >> i & 1 for i in range(1, states.bit_length())] for code in TRELLIS_CODES[states])
    bits, levels = [0] * len(loop), []
    for k in sequence:
        levels.append(2 * k + bits[0])
        bits = [(a + b * bits[0] + c * k) % 2 for a, b, c in zip([*bits[1:], 0], loop, entry, strict=True)]
    return levels


@every_code
def test_no_indices_in_a_window_are_better(states):
    for sequence in weights_of(6, 5, seed=1).tolist():
        around = [range(int(w // 2) - 1, int(w // 2) + 3) for w in sequence]
        best = min(sum((w - level) ** 2 for w, level in zip(sequence, read(list(ks), states), strict=True)) for ks in product(*around))
        k = trellis_encode(torch.tensor([sequence]), states)
        assert abs((torch.tensor([sequence]) - trellis_levels(k, states)).square().sum().item() - best) < 1e-5


@every_code
def test_no_parities_of_eight_weights_are_better(states):
    y = weights_of(8, 8, seed=2)
    error = (y - trellis_levels(trellis_encode(y, states), states)).square().sum(1)
    for sequence, found in zip(y.tolist(), error.tolist(), strict=True):
        sums = []
        for parities in product((0, 1), repeat=8):
            state, total = 0, 0.0
            for w, parity in zip(sequence, parities, strict=True):
                total += ((w - 2 * parity - (state & 1) + 2) % 4 - 2) ** 2
                state = next_state(state, parity, states)
            sums.append(total)
        assert abs(found - min(sums)) < 1e-5


@every_code
def test_levels_are_those_of_a_shift_register_and_every_dtype_reads_the_same(states):
    k = torch.randint(-100, 100, (5, 40), generator=torch.Generator().manual_seed(3))
    levels = trellis_levels(k, states)
    assert levels.dtype == torch.int32 and levels.tolist() == [read(sequence, states) for sequence in k.tolist()]
    for dtype in (torch.int8, torch.int16, torch.int32):
        assert torch.equal(trellis_levels(k.to(dtype), states), levels)
    extreme = torch.tensor([[-2**30, 2**30 - 1]])
    assert trellis_levels(extreme, states).tolist() == [read(extreme[0].tolist(), states)]


@every_code
def test_weights_that_are_levels_come_back(states):
    k = torch.randint(-40, 40, (7, 60), generator=torch.Generator().manual_seed(4), dtype=torch.int32)
    levels = trellis_levels(k, states)
    for y in (levels.float(), levels.double(), levels.half()):
        assert torch.equal(trellis_encode(y, states), k)


@every_code
def test_two_ways_lead_into_every_state_and_subsets_part(states):
    arms = trellis_arms(states)
    assert arms.shape == (states, 2, 2)
    (before, subset) = arms.unbind(-1)
    assert before.flatten().bincount().tolist() == [2] * states and torch.equal(subset & 1, before & 1)
    for state, ways in enumerate(arms.tolist()):
        assert [next_state(b, s >> 1, states) for b, s in ways] == [state] * 2


def test_more_states_err_less():
    y = torch.randn(64, 512, generator=torch.Generator().manual_seed(5)) * 5
    errors = [(y - trellis_levels(trellis_encode(y, n), n)).square().mean().item() for n in sorted(TRELLIS_CODES)]
    assert errors == sorted(errors, reverse=True) and errors[0] < 0.8 / 3, "rounding alone has a third"


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0, 0), (1, 1)])
def test_empty_and_single(shape):
    k = trellis_encode(torch.full(shape, 2.2))
    assert k.shape == shape and k.dtype == torch.int32 and (k == 1).all() and (trellis_levels(k) == 2).all()


def test_views_and_gradients_do_not_matter():
    y = weights_of(9, 30, seed=6)
    assert torch.equal(trellis_encode(y.T.contiguous().T.requires_grad_()), trellis_encode(y))


def test_the_largest_weights_keep_their_parity():
    y = torch.tensor([[2.0**20 - 1, -(2.0**20) + 1, 2.0**20 - 2.5, 0.25]])
    for states in TRELLIS_CODES:
        k = trellis_encode(y, states)
        assert read(k[0].tolist(), states) == trellis_levels(k, states)[0].tolist() and (y - trellis_levels(k, states)).abs().max() <= 2


@pytest.mark.parametrize("call, fact", [
    (lambda: trellis_encode(torch.zeros(2, 3), 6), "found 6"),
    (lambda: trellis_levels(torch.zeros(2, 3, dtype=torch.int8), 64), "found 64"),
    (lambda: trellis_arms(2), "found 2"),
    (lambda: trellis_encode(torch.zeros(3)), r"\(3,\)"),
    (lambda: trellis_encode(torch.zeros(3, 1, 2)), r"\(3, 1, 2\)"),
    (lambda: trellis_encode(torch.tensor([[1.0, float("nan")]])), "finite"),
    (lambda: trellis_encode(torch.tensor([[1.0, float("-inf")]])), "finite"),
    (lambda: trellis_encode(torch.tensor([[2.0**20]])), "2\\*\\*20"),
    (lambda: trellis_levels(torch.zeros(2, 3)), "float32"),
    (lambda: trellis_levels(torch.zeros(2, dtype=torch.int8)), r"\(2,\)"),
])
def test_refusals(call, fact):
    with pytest.raises(GolfError, match=fact):
        call()


def check_kernel(device: str, shapes):
    for states in TRELLIS_CODES:
        for seed, (sequences, T) in enumerate(shapes):
            y = weights_of(sequences, T, seed=seed, device=device)
            assert torch.equal(trellis_kernel(y, states), trellis_plain(y, states)), (states, sequences, T)


INTERPRETED = """
from test_trellis import check_kernel
check_kernel("cpu", [(1, 1), (9, 11)])
print("equal")
"""


@needs_triton
def test_the_interpreted_kernel_equals_the_loop_in_every_index():
    env = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, "-c", INTERPRETED], env=env, capture_output=True, text=True)
    assert done.returncode == 0 and "equal" in done.stdout, done.stderr[-3000:]


@needs_triton
@every_code
def test_the_kernel_builds_for_hopper_without_a_gpu(states, tmp_path, monkeypatch):
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    if os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("kernels are interpreted in this process")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    kinds = {"y": "*fp32", "arms": "*i32", "chosen": "*i64", "levels": "*i32", "T": "i32", "n": "i32", "S": "constexpr", "L": "constexpr"}
    source = ASTSource(triton.jit(viterbi_kernel), kinds, {"S": states, "L": 32 // states})
    ptx = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 1, "enable_fp_fusion": False}).asm["ptx"]
    assert "fma.rn" not in ptx and "shfl" in ptx, "sums round as those of the loop; costs of other states come from other threads"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_kernel_on_the_gpu_equals_the_loop_in_every_index():
    check_kernel("cuda", [(1, 1), (3, 2), (513, 300), (4096, 64)])
    y = weights_of(100, 512, seed=9, spread=1e4)
    for states in TRELLIS_CODES:
        assert torch.equal(trellis_encode(y.cuda(), states).cpu(), trellis_encode(y, states))

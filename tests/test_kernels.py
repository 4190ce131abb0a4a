"""Triton twins: interpreted in a process of their own, absent Triton, and refusals."""
import os
import subprocess
import sys

import pytest
import torch

from golfnb.config import GolfError
from golfnb.kernels import squared_leaky_triton, triton, use_kernels

INTERPRETED = """
import torch
from golfnb.kernels import squared_leaky_triton
from golfnb.layers import squared_leaky
for shape in ((1,), (3, 700), (1024,), (2, 1025)):
    for slope in (0.0, 0.5):
        for dtype, tol in ((torch.float32, 1e-6), (torch.float16, 2e-3)):
            x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype).requires_grad_()
            dy = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
            pair = squared_leaky_triton(x, slope), squared_leaky(x, slope)
            torch.testing.assert_close(*pair, rtol=tol, atol=tol)
            torch.testing.assert_close(*(torch.autograd.grad(y, x, dy)[0] for y in pair), rtol=tol, atol=tol)
print("equal")
"""

WITHOUT = """
import sys
sys.modules["triton"] = None          # any import of triton raises ImportError
import torch
from golfnb.kernels import squared_leaky_triton, triton, use_kernels
from golfnb.config import GolfError
assert triton is None and not use_kernels(torch.zeros(1))
try:
    squared_leaky_triton(torch.zeros(1))
except GolfError as e:
    print("refused:", e)
"""


def child(code, **env):
    done = subprocess.run([sys.executable, "-c", code], env={**os.environ, **env}, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.mark.skipif(triton is None, reason="needs Triton")
def test_interpreted_kernels_equal_their_oracle():
    assert "equal" in child(INTERPRETED, TRITON_INTERPRET="1", CUDA_VISIBLE_DEVICES="")


def test_imports_without_triton():
    assert "refused: squared_leaky_triton needs Triton" in child(WITHOUT)


def test_refusals(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert not use_kernels(torch.zeros(1))
    for dtype in (torch.float32, torch.float64):
        with pytest.raises(GolfError, match="use squared_leaky instead"):
            squared_leaky_triton(torch.zeros(3, dtype=dtype))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_compiled_kernels_equal_their_oracle(dtype):
    from golfnb.layers import squared_leaky
    x = torch.randn(1000, 700, device="cuda").to(dtype).requires_grad_()
    dy = torch.randn_like(x)
    pair = squared_leaky_triton(x), squared_leaky(x)
    torch.testing.assert_close(*pair)
    torch.testing.assert_close(*(torch.autograd.grad(y, x, dy)[0] for y in pair))

"""Layers: the functions of chapter 03 against formulas written out, in float64."""
import importlib.util
import math
import re

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings, strategies as st

from golfnb.settings import GolfError
from golfnb.model.layers import (FLASH_PACKAGES, NORM_EPS, attend, attention_backend, backend_distance, bigram_rows, exclusive, flash_installed, mix_norm, qk_norm_rope_gain, rms_norm, rotary_base,
                           rotary_tables, rotate, smear, softcap, softcap_loss, squared_leaky, token_nll)
from golfnb.recipes import pr549
from golfnb.tools.programs import setting_specs


def rand(*shape, grad=True, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed + sum(shape))).requires_grad_(grad)


def plain_attention(q, k, v):
    T, Tq, g = k.shape[1], q.shape[1], q.shape[2] // k.shape[2]
    out = torch.zeros_like(q)
    for h in range(q.shape[2]):
        for i in range(Tq):
            seen = T - Tq + i + 1
            w = (k[:, :seen, h // g] @ q[:, i, h, :, None])[..., 0] / math.sqrt(q.shape[-1])
            out[:, i, h] = (w.softmax(-1)[..., None] * v[:, :seen, h // g]).sum(1)
    return out


@pytest.mark.parametrize("name, function, inputs", [
    ("norm", rms_norm, [(3, 8)]),
    ("mix", lambda x, x0, m: mix_norm(x, x0, m, 0.7), [(2, 3, 8), (2, 3, 8), (2, 8)]),
    ("rotate", lambda x: rotate(x, *rotary_tables(5, 4, 100.0, 3, dtype=torch.float64)), [(2, 5, 2, 6)]),
    ("qk", lambda q, k, g: qk_norm_rope_gain(q, k, *rotary_tables(5, 4, 100.0, 9, dtype=torch.float64), g), [(1, 3, 4, 6), (1, 5, 2, 6), (4,)]),
    ("attend", attend, [(1, 5, 4, 6), (1, 5, 2, 6), (1, 5, 2, 6)]),
    ("attend last", attend, [(1, 2, 4, 6), (1, 5, 2, 6), (1, 5, 2, 6)]),
    ("xsa", exclusive, [(2, 3, 4, 6), (2, 3, 2, 6)]),
    ("leaky", lambda z: squared_leaky(z, 0.5), [(4, 5)]),
    ("relu", lambda z: squared_leaky(z, 0.0), [(4, 5)]),
    ("smear", smear, [(2, 4, 5), (5,)]),
    ("loss", lambda x: softcap_loss(3 * x, torch.tensor([[0, 4, 2]]), 2.0), [(1, 3, 5)]),
    ("nll", lambda x: token_nll(3 * x, torch.tensor([[0, 4, 2]]), 2.0), [(1, 3, 5)]),
])
def test_gradients(name, function, inputs):
    torch.autograd.gradcheck(function, [rand(*s, seed=i) for i, s in enumerate(inputs)])


@pytest.mark.parametrize("queries", [1, 2, 7])
def test_attention_is_the_formula(queries):
    q, k, v = rand(2, queries, 6, 4), rand(2, 7, 2, 4), rand(2, 7, 2, 4, seed=1)
    torch.testing.assert_close(attend(q, k, v), plain_attention(q, k, v), rtol=1e-12, atol=1e-12)


def test_attention_math_backend_agrees():
    q, k, v = (rand(1, 6, h, 8, grad=False).float() for h in (4, 2, 2))
    torch.testing.assert_close(attend(q, k, v, "math"), attend(q, k, v, "auto"), rtol=1e-5, atol=1e-5)
    assert attention_backend("cuda", "flash")[0].name == "FLASH_ATTENTION" and len(attention_backend("cuda", "math")) == 4
    with pytest.raises(GolfError, match="ATTENTION.*'quick'"):
        attention_backend("cuda", "quick")


@pytest.mark.parametrize("function", [rms_norm, lambda x: exclusive(x[None], x[None]), lambda x: squared_leaky(x, 0.5)])
def test_low_precision_rounds_once(function):
    x = rand(4, 2, 64, grad=False).bfloat16()
    assert torch.equal(function(x), function(x.float()).bfloat16())


def test_norm_epsilon_is_float32s_in_every_dtype():
    tiny = torch.full((1, 4), 1e-5, dtype=torch.float64)
    torch.testing.assert_close(rms_norm(tiny), tiny / math.sqrt(1e-10 + NORM_EPS))
    assert NORM_EPS == pytest.approx(torch.finfo(torch.float32).eps)


def test_rotary_numbers_of_the_published_model():
    assert rotary_base(2048, 16, 10000.0, 1024) == pytest.approx(22081.8, abs=0.05)
    cos, sin = rotary_tables(2048, 16, 10000.0, 1024)
    f = 22081.8 ** (-2 * torch.arange(8) / 16)
    torch.testing.assert_close(cos[100], (100 * f).cos(), rtol=0, atol=1e-4)
    assert rotary_tables(8, 16, 10000.0, 1024, dtype=torch.bfloat16)[0].dtype == torch.bfloat16
    a, b = 0.3, 0.7      # one pair, position 1: (a cos + b sin, b cos - a sin)
    x = torch.tensor([a, b, 5.0]).reshape(1, 1, 1, 3).expand(1, 2, 1, 3)
    c, s = rotary_tables(2, 2, 10000.0, 1024)
    torch.testing.assert_close(rotate(x, c, s)[0, 1, 0], torch.tensor([a * math.cos(1) + b * math.sin(1), b * math.cos(1) - a * math.sin(1), 5.0]))


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 8191), min_size=1, max_size=12), st.integers(2, 4096))
def test_bigram_rows_by_hand(ids, rows):
    want = [rows - 1] + [((36313 * b) ^ (27191 * a)) % (rows - 1) for a, b in zip(ids, ids[1:])]
    assert bigram_rows(torch.tensor([ids]), rows).tolist() == [want]


def test_evaluation_rounds_capped_logits():
    logits, targets = 10 * rand(2, 3, 50, grad=False).bfloat16(), torch.randint(50, (2, 3), generator=torch.Generator().manual_seed(0))
    rounded = softcap(logits.float(), 30.0).bfloat16().float()
    torch.testing.assert_close(token_nll(logits, targets, 30.0), F.cross_entropy(rounded.transpose(1, 2), targets, reduction="none"))
    torch.testing.assert_close(softcap_loss(logits, targets, 30.0), F.cross_entropy(softcap(logits.float(), 30.0).transpose(1, 2), targets))


@pytest.fixture
def flash(monkeypatch):
    "PyTorch's places for FlashAttention, with a package installed that is `far` from the plain formula; what was asked of them."
    import golfnb.model.layers as L

    asked, active = [], []
    monkeypatch.setattr(torch.nn.attention, "activate_flash_attention_impl", lambda w: (asked.append(w), active.append(w)), raising=False)
    monkeypatch.setattr(torch.nn.attention, "current_flash_attention_impl", lambda: active[-1] if active else None, raising=False)
    monkeypatch.setattr(torch.nn.attention, "restore_flash_attention_impl", lambda: (asked.append("restored"), active.clear()), raising=False)
    monkeypatch.setattr(L, "flash_installed", lambda choice: choice in asked.installed)

    class Asked(list):
        installed = {"fa3"}

        def far(self, x):
            def distance(*a):
                if isinstance(x, Exception):
                    raise x
                return x
            monkeypatch.setattr(L, "backend_distance", distance)
            L.flash_problem.cache_clear()
            return L.ready_attention

    asked = Asked()
    yield asked
    L.flash_problem.cache_clear()


def test_flash_attention_is_used_where_it_is_installed_and_right(flash, recwarn):
    ready = flash.far(0.004)
    assert ready("auto", "cuda", 8, 4, 64) == ready("fa3", "cuda", 8, 4, 64) == "fa3" and flash == ["FA3"], "tried once"
    assert ready("cudnn", "cuda", 8, 4, 64) == "cudnn" and ready("auto", "cpu", 8, 4, 64) == "auto" and ready("fa4", "cpu", 8, 4, 64) == "fa4" and flash == ["FA3"]
    flash.installed = set()
    assert flash.far(0.004)("auto", "cuda", 8, 4, 64) == "auto" and not recwarn.list


@pytest.mark.parametrize("far, words", [(0.3, "0.300 from the plain formula"), (float("nan"), "nan from the plain formula"), (RuntimeError("built for sm80"), "RuntimeError: built for sm80")])
def test_flash_attention_that_fails_is_not_used(flash, far, words):
    ready = flash.far(far)
    with pytest.warns(UserWarning, match=f"FlashAttention-3.*{words}"):
        assert ready("auto", "cuda", 8, 4, 64) == "auto"
    assert flash == ["FA3", "restored"]
    with pytest.raises(GolfError, match=f"ATTENTION=fa3 .*{words}"):
        ready("fa3", "cuda", 8, 4, 64)


def test_flash_attention_that_is_missing_or_has_no_place_is_refused(flash, monkeypatch):
    ready = flash.far(0.0)
    with pytest.raises(GolfError, match="fa4.*flash_attn.cute.interface"):
        ready("fa4", "cuda", 8, 4, 64)
    monkeypatch.delattr(torch.nn.attention, "activate_flash_attention_impl")
    with pytest.raises(GolfError, match=f"fa3.*torch {re.escape(torch.__version__)}"):
        ready("fa3", "cuda", 8, 4, 64)
    with pytest.raises(GolfError, match="ATTENTION.*auto, .*fa4.*'fa5'"):
        ready("fa5", "cpu", 8, 4, 64)


def test_the_setting_has_the_words_that_attend_knows():
    words = setting_specs(pr549)["attention"].metadata["choices"]
    for word in words:
        attention_backend("cuda", word)
    assert set(words) == {"auto", "cudnn", "flash", "efficient", "math", *FLASH_PACKAGES}


def test_the_flash_backend_of_a_cpu_is_near_the_plain_formula():
    assert 0 < backend_distance("cpu", 4, 2, 32) < 0.02 and flash_installed("fa3") == (importlib.util.find_spec("flash_attn_interface") is not None)


def test_a_flash_backend_that_gives_nan_somewhere_is_far(monkeypatch):
    plain = F.scaled_dot_product_attention

    def broken(q, *rest, **more):
        y = plain(q, *rest, **more)
        return torch.where(torch.arange(y.shape[-1]) == 3, float("nan") * y, y) if q.dtype == torch.bfloat16 else y
    monkeypatch.setattr(F, "scaled_dot_product_attention", broken)
    assert not backend_distance("cpu", 4, 2, 32) < 0.02

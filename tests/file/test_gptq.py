"""Full-Hessian GPTQ: against a naive float64 column-by-column form, on awkward inputs, inside a byte target, on several ranks."""
import os
import pickle
import socket
from pathlib import Path

import numpy as np
import pytest
import torch
from forked import fork_processes

from golfnb.file.artifact import Rans, pack_bytes
from golfnb.settings import GolfError
from golfnb.file.grid import CLIP_QUANTILES, row_clip, row_scale
from golfnb.model.layout import bank_per_shape, matrix_names, mlp_in_one_bank
from golfnb.model.golf import Golf, init_model, load_named, named_state, quant_kind
from golfnb.model.engine import Ranks, start_ranks, stop_ranks
from golfnb.file.quantize import (Gptq, Nearest, calibrate, calibration_batches, captured_inputs, dequantize_state, gptq_columns, deal_jobs, fit_state, hessian_factor, int6_matrices, pack_gptq, pack_rows,
                             pack_std, quantize_state, shared_out, std_scale)
from golfnb.recipes import golf, pr1060
from golfnb.tools.programs import settings_of

CFG = settings_of(pr1060, {"NUM_LAYERS": "2", "MODEL_DIM": "48", "NUM_HEADS": "4", "NUM_KV_HEADS": "2", "VOCAB_SIZE": "80", "ROPE_DIMS": "4", "BIGRAM_VOCAB_SIZE": "40", "BIGRAM_DIM": "8", "VE_LAYERS": "1", "VE_DIM": "8",
                           "XSA_LAST_N": "1", "TRAIN_SEQ_LEN": "24", "EVAL_SEQ_LEN": "24", "EVAL_STRIDE": "8", "SMALL_TENSOR": "1000"})


def naive(w, h, scale, qmax=31):
    "Optimal brain quantization as written in the paper: the inverse of what remains, for every column."
    w, q = w.clone(), torch.zeros_like(w)
    for j in range(w.shape[1]):
        inverse = torch.linalg.inv(h[j:, j:])
        q[:, j] = (w[:, j] / scale).round().clamp(-qmax, qmax)
        w[:, j:] -= ((w[:, j] - q[:, j] * scale) / inverse[0, 0])[:, None] * inverse[0]
    return q


def case(seed, rows=24, cols=70, tokens=300, dead=(3, 40)):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, cols, generator=g, dtype=torch.float64) @ torch.randn(cols, cols, generator=g, dtype=torch.float64)
    x[:, list(dead)] = 0
    return torch.randn(rows, cols, generator=g, dtype=torch.float64) * torch.rand(rows, 1, generator=g, dtype=torch.float64), x.T @ x / tokens


def damped(h):
    dead = h.diagonal() == 0
    return h + torch.diag(dead.double()) + 0.01 * h.diagonal()[~dead].mean() * torch.eye(len(h), dtype=torch.float64)


def output_error(w, back, h): return (((w - back) @ h) * (w - back)).sum(-1)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("block", [1, 7, 128])
def test_columns_against_the_naive_form_in_float64(seed, block):
    w, h = case(seed)
    order, dead, upper = hessian_factor(h)
    scale, live = std_scale(w, 10.0 + seed), w.masked_fill(dead, 0)[:, order]
    assert torch.equal(gptq_columns(live, scale, upper, block=block).double(), naive(live, damped(h)[order][:, order], scale))
    inverse = torch.linalg.inv(damped(h)[order][:, order])
    assert torch.allclose(upper.T @ upper, inverse, rtol=1e-8, atol=1e-10 * inverse.abs().max()) and torch.equal(upper, upper.triu())


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("floor", [False, True])
def test_pack_gptq_takes_for_every_row_the_candidate_with_the_least_output_error(seed, floor):
    w, h = case(seed)
    p = pack_gptq("w", w, h, floor)
    order, dead, _ = hessian_factor(h)
    live, best = w.masked_fill(dead, 0), None
    for quantile in CLIP_QUANTILES:
        scale = row_scale(row_clip(w, quantile), 31, floor)
        q = torch.empty_like(w)
        q[:, order] = naive(live[:, order], damped(h)[order][:, order], scale)
        error = output_error(live, q * scale[:, None], h)
        best = (error, q, scale) if best is None else (torch.minimum(best[0], error), torch.where((error < best[0])[:, None], q, best[1]), torch.where(error < best[0], scale, best[2]))
    assert np.array_equal(p.data, best[1].numpy()) and np.array_equal(p.scale, best[2].numpy().astype(np.float16))
    assert not p.data[:, dead.numpy()].any() and dead.sum() == 2


@pytest.mark.parametrize("k", [None, 9.0, 24.0])
def test_the_output_is_closer_than_by_rounding_to_the_nearest(k):
    w, h = case(11, 64, 96, 2000)
    back = [dequantize_state({"w": p})["w"].double() for p in (pack_gptq("w", w.float(), h.float(), k=k), Nearest()("w", w.float(), k))]
    ours, nearest = (output_error(w, b, h).sum() for b in back)
    assert ours < 0.6 * nearest
    if k is not None:
        assert np.array_equal(pack_gptq("w", w, h, k=k).scale, pack_std("w", w, k).scale), "the scale by spread is the same: so is the size, nearly"


def test_an_h_of_another_matrix_is_refused_by_name():
    for wrong in (torch.eye(4), torch.eye(6)[:5], torch.ones(6)):
        with pytest.raises(GolfError, match=r"h of up must be \[6, 6\]"):
            pack_gptq("up", torch.randn(4, 6), wrong)


def test_fallback_when_there_is_no_factor():
    w, h = case(0)
    for bad in (h * float("nan"), h.index_fill(0, torch.tensor([1]), float("inf")), -h):
        assert np.array_equal(pack_gptq("w", w, bad).data, pack_rows("w", w, "int6").data)
    assert np.array_equal(pack_gptq("w", w, torch.zeros_like(h)).data, np.zeros_like(pack_rows("w", w, "int6").data)), "an input that is never there needs no weights"
    with pytest.raises(GolfError, match="blocks.0.*finite"):
        pack_gptq("blocks.0", w * float("inf"), h)
    few, _ = case(1)
    x = torch.randn(3, 70, dtype=torch.float64)
    assert np.isfinite(dequantize_state({"w": pack_gptq("w", few, x.T @ x)})["w"]).all(), "three tokens for seventy columns: damping makes it regular"


def a_model(dtype=torch.float32, world=1):
    model = Golf(CFG, bank_per_shape(CFG, world), dtype)
    init_model(model, CFG, 0)
    g = torch.Generator().manual_seed(2)
    load_named(model, {n: t + 0.1 * torch.randn(t.shape, generator=g) for n, t in named_state(model).items()})
    return model


def words(n=4, seed=0):
    g = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 80, (3, 24), generator=g) ** 2 // 80 for _ in range(n)]


def test_hessians_are_means_over_tokens_of_the_real_inputs():
    model, inputs = a_model(torch.float64), {}
    hessians = calibrate(model, words(), Ranks())
    with captured_inputs(model, inputs.__setitem__):
        model(torch.cat(words()))
    assert hessians.keys() == inputs.keys() == set(matrix_names(model.layout))
    for name, x in inputs.items():
        rows = x.flatten(0, 1)
        assert torch.allclose(hessians[name], rows.T @ rows / len(rows), rtol=1e-10, atol=1e-12)
    shared = {id(h) for h in hessians.values()}
    assert len(shared) == 4 * CFG.num_layers, "Q, K and V share one"


def test_calibration_batches_are_inputs_of_the_sampler():
    class Sampler:
        def __next__(self): return np.arange(10, dtype=np.uint16).reshape(2, 5)
    got = list(calibration_batches(Sampler(), 3, "cpu"))
    assert len(got) == 3 and got[0].tolist() == [[0, 1, 2, 3], [5, 6, 7, 8]] and got[0].dtype == torch.int64


@pytest.mark.parametrize("world", [1, 2, 3, 8, 100])
def test_every_matrix_has_one_owner_and_the_load_is_even(world):
    costs = [m.rows * m.cols**2 + m.cols**3 for _, _, m in bank_per_shape(settings_of(pr1060, {}), 1)]
    dealt = deal_jobs(costs, world)
    load = [sum(costs[job] for job in jobs) for jobs in dealt]
    assert sorted(sum(dealt, [])) == list(range(len(costs))) and len(dealt) == world
    assert world > 11 or max(load) < 1.6 * sum(load) / world


def state_of(ranks: Ranks, target=10**9):
    model = a_model(world=ranks.world)
    mine = words() if ranks.world == 1 else (words()[:3], words()[3:])[ranks.rank]  # as when one rank ran out of time
    measure = lambda packed: len(pack_bytes(packed, {}, Rans()))
    named, int6 = named_state(model), Gptq(calibrate(model, mine, ranks))
    packed = quantize_state(named, False, small=CFG.small_tensor)
    packed |= shared_out(int6_matrices(packed, named), int6, ranks)
    return fit_state(packed, named, target, measure, int6, ranks), measure


def test_a_whole_state_and_a_target():
    packed, measure = state_of(Ranks())
    named = named_state(a_model())
    lite = quantize_state(named, False, small=CFG.small_tensor)
    assert list(packed) == list(named) and {n: p.kind for n, p in packed.items()} == {n: p.kind for n, p in lite.items()} and packed["blocks.0.mlp.fc.weight"].kind == "int6"
    assert all(np.array_equal(packed[n].data, lite[n].data) for n in named if lite[n].kind != "int6") and not np.array_equal(packed["blocks.0.mlp.fc.weight"].data, lite["blocks.0.mlp.fc.weight"].data)
    target = int(0.8 * measure(packed))
    fitted, _ = state_of(Ranks(), target)
    assert 0.98 * target < measure(fitted) <= target
    hessians = calibrate(a_model(), words(), Ranks())
    floored = quantize_state(named, True, small=CFG.small_tensor)  # as pr1060 packs
    floored |= shared_out(int6_matrices(floored, named), Gptq(hessians, scale_floor=True), Ranks())
    assert min(p.scale.min() for p in floored.values() if p.kind == "int6") >= np.float16(1 / 31)
    name = "blocks.0.mlp.fc.weight"
    assert np.array_equal(floored[name].data, pack_gptq(name, named[name], hessians[name], True).data)
    ids, exact = torch.cat(words(9, 5)), a_model()
    def error(state):
        other = a_model()
        load_named(other, dequantize_state(state))
        return (other(ids) - exact(ids)).square().mean()
    assert error(packed) < 0.8 * error(lite)


def gptq_entry(rank: int, world: int, port: int, folder: str):
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    ranks = start_ranks()
    free, measure = state_of(ranks)
    fitted, _ = state_of(ranks, int(0.8 * measure(free)))
    (Path(folder) / f"{rank}.pkl").write_bytes(pickle.dumps((free, fitted)))
    stop_ranks(ranks)


def test_two_ranks_share_the_work_and_agree(tmp_path):
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    fork_processes(gptq_entry, (2, port, str(tmp_path)), 2)
    (free0, fit0), (free1, fit1) = (pickle.loads((tmp_path / f"{r}.pkl").read_bytes()) for r in range(2))
    alone, _ = state_of(Ranks())
    for a, b in ((free0, free1), (fit0, fit1)):
        assert list(a) == list(b) and all(np.array_equal(a[n].data, b[n].data) and (a[n].scale is None or np.array_equal(a[n].scale, b[n].scale)) for n in a)
    wrong = [np.mean(free0[n].data != alone[n].data) for n in alone if alone[n].kind == "int6"]
    assert np.mean(wrong) < 0.01, "the order of the sums differs, and now and then a weight on the border"


def test_shared_plan_matrices_are_found_by_name():
    cfg = settings_of(golf, {"NUM_LAYERS": "1", "MODEL_DIM": "32", "NUM_HEADS": "2", "NUM_KV_HEADS": "1", "VOCAB_SIZE": "64", "ROPE_DIMS": "4", "VE_ENABLED": "0", "BIGRAM_VOCAB_SIZE": "0",
                             "SMALL_TENSOR": "500", "TRAIN_SEQ_LEN": "16", "EVAL_SEQ_LEN": "16", "EVAL_STRIDE": "8", "XSA_LAST_N": "0"})
    model = Golf(cfg, mlp_in_one_bank(cfg, 1))
    init_model(model, cfg, 1)
    named, g = named_state(model), torch.Generator().manual_seed(0)
    hessians = calibrate(model, [torch.randint(0, 64, (4, 16), generator=g)], Ranks())
    matrices = {n: named[n] for n in matrix_names(model.layout) if quant_kind(n, tuple(named[n].shape), 500) == "int6"}
    assert len(matrices) == 6 and all(hessians[n].shape == (w.shape[1],) * 2 for n, w in matrices.items())
    assert shared_out(matrices, Gptq(hessians), Ranks()).keys() == matrices.keys()

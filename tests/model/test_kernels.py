"""Triton twins: interpreted in a process of their own (alone, and as a whole model through the compiler's tracer), built for the GPU without one, absent Triton, refusals, and on a GPU."""
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from golfnb.model import kernels
from golfnb.model.kernels import fuse, fused_exclusive, fused_heads, fused_mlp, fused_softcap_loss, heads_fit, mlp_fit
from golfnb.model.layers import exclusive, qk_norm_rope_gain, rotary_tables, softcap_loss, squared_leaky
from golfnb.model.layout import bank_per_shape
from golfnb.model.golf import Golf
from golfnb.muon.jit import KERNELS, triton, usable_kernels
from golfnb.muon.newton_schulz import NS5_COEFFS, POLAR_EXPRESS_COEFFS, newton_schulz
from golfnb.model.engine import master_kernels, master_step, nesterov_kernels, nesterov_step
from golfnb.settings import GolfError
from tiny import settings_for
CASES = """
import os, sys, torch
import torch.nn.functional as F
import golfnb.muon.jit
import golfnb.model.kernels as K
from golfnb.model.kernels import *
from golfnb.model.layers import *
g = torch.Generator().manual_seed(0)
def apart(twin, plain, shapes, size=1.0):
    inputs = [(size * torch.randn(s, generator=g)).requires_grad_() for s in shapes]
    outs = [o if isinstance(o, tuple) else (o,) for o in (twin(*inputs), plain(*inputs))]
    dys = [torch.randn(o.shape, generator=g) for o in outs[0]]
    return max(float((a - b).norm() / b.norm()) for a, b in zip(*((*o, *torch.autograd.grad(o, inputs, dys)) for o in outs)))
"""

INTERPRETED = CASES + """
for B, T, H, KV, D, half in ((2, 35, 4, 2, 32, 8), (1, 70, 2, 1, 16, 8), (1, 3, 8, 4, 64, 8), (3, 33, 3, 3, 16, 4)):
    cos, sin = rotary_tables(T, 2 * half, 100.0, 9)
    def plain(n, w, gain):
        q, k, v = (t.unflatten(-1, (-1, D)) for t in F.linear(n, w).split((H * D, KV * D, KV * D), -1))
        return *qk_norm_rope_gain(q, k, cos, sin, gain), v
    assert apart(lambda n, w, gain: fused_heads(n, w, gain, cos, sin, KV), plain, ((B, T, 24), ((H + 2 * KV) * D, 24), (H,))) < 1e-5
    assert apart(fused_exclusive, exclusive, ((B, T, H, D), (B, T, KV, D))) < 1e-5
    assert apart(lambda y, v: fused_exclusive(y, v[:, -T:]), lambda y, v: exclusive(y, v[:, -T:]), ((B, T, H, D), (B, T + 2, KV, D))) < 1e-5
zero = torch.zeros(1, 2, 1, 16, requires_grad=True)
assert all(torch.isfinite(t).all() for t in torch.autograd.grad(fused_exclusive(zero, zero).sum(), zero))
small = K.Tiles(BM=32, BN=32, BK=16)
for rows, D, hidden in ((33, 48, 80), (64, 16, 24)):
    for slope in (0.0, 0.5):
        assert apart(lambda *a: fused_mlp(*a, slope, (small, small)), lambda n, u, d: F.linear(squared_leaky(F.linear(n, u), slope), d), ((2, rows, D), (hidden, D), (D, hidden)), D ** -0.5) < 1e-5
        with torch.no_grad():
            n, u, d = (torch.randn(s, generator=g) for s in ((rows, D), (hidden, D), (D, hidden)))
            torch.testing.assert_close(fused_mlp(n, u, d.T.contiguous().T, slope, (small, small)), F.linear(squared_leaky(F.linear(n, u), slope), d), rtol=1e-4, atol=1e-3)
for op, args in ((K.heads_op, (torch.randn(1, 5, 64), torch.randn(2), *rotary_tables(5, 8, 100.0, 9), 2, 1)), (K.xsa_op, (torch.randn(1, 5, 4, 16), torch.randn(1, 5, 2, 16))),
                 (K.heads_grad_op, (torch.randn(1, 5, 2, 16), torch.randn(1, 5, 1, 16), torch.randn(1, 5, 1, 16), torch.randn(1, 5, 64), torch.randn(2), *rotary_tables(5, 8, 100.0, 9))),
                 (K.xsa_grad_op, (torch.randn(1, 5, 4, 16), torch.randn(1, 5, 4, 16), torch.randn(1, 5, 2, 16))),
                 (K.mlp_up_op, (torch.randn(5, 16), torch.randn(24, 16), 0.5, True, list(small))), (K.mlp_down_grad_op, (torch.randn(5, 16), torch.randn(16, 24), torch.randn(5, 24), 0.5, list(small)))):
    torch.library.opcheck(op, args, test_utils=("test_schema", "test_faketensor"))
print("equal")
"""

OPTIMIZER = """
from types import SimpleNamespace
import torch
from golfnb.muon.newton_schulz import half_product
from golfnb.model.engine import master_kernels, master_step, nesterov_kernels, nesterov_step
torch.manual_seed(0)
def near(a, b, terms):
    "Two orders of the same sums: the rounding errors of `terms` terms add up like a random walk."
    return float((a - b).norm() / b.norm()) < terms ** 0.5 * torch.finfo(b.dtype).eps
def mirrored(A, side):
    "Tiles above the diagonal are below it too, to the bit; those on it are products of the CPU's library, which may round either half otherwise."
    tiles = A.unflatten(1, (-1, side)).unflatten(3, (-1, side)).transpose(2, 3)
    off = ~torch.eye(tiles.shape[1], dtype=torch.bool)
    return torch.equal(tiles[:, off], tiles.transpose(1, 2).mT[:, off])
for n, M, K, side in ((2, 64, 128, 64), (1, 192, 64, 64), (3, 128, 192, 128), (2, 384, 64, 128), (1, 256, 448, 128), (2, 320, 320, 64)):  # one tile, odd and even numbers of them
    for X in (torch.randn(n, M, K), torch.randn(n, K, M).mT):  # either orientation
        A, exact = half_product(X, side, 4), X.double() @ X.double().mT
        assert mirrored(A, side) and near(A, exact.float(), K)
        norm, (a, b, c) = torch.rand(n) + 0.5, (3.4, -4.7, 2.0)
        S = A.double() / norm.view(n, 1, 1) ** 2
        exact = (a * torch.eye(M) + b * S + c * S @ S) / norm.view(n, 1, 1)
        B = half_product(A, side, 4, norm, (a, b, c))
        assert mirrored(B, side) and near(B, exact.float(), M)
X = torch.randn(1, 576, 64)  # nine of them
A = half_product(X, 64, 4)
assert mirrored(A, 64) and near(A, (X.double() @ X.double().mT).float(), 64)
for shape in ((3, 70, 100), (2, 130, 65)):
    n, r, c = shape
    some = torch.arange(n).view(n, 1, 1) % 2 == 0  # every other slot has a gradient
    for ok in (torch.tensor(True), torch.tensor(False), some):
        bad = torch.where(ok, 0.0, float("nan")).expand(n, 1, 1)  # what a step that is not ok must not let through
        scales = torch.full((n, 1, 1), 1.7), torch.rand(n, r, 1), torch.full((n, 1, 1), 1.7)
        for grad, update, scales in ((torch.randn(shape), torch.randn(shape), scales), (torch.randn(n, c, r).mT, torch.randn(n, c, r).mT, scales[1:] + scales[1:2])):
            mu, m = torch.tensor(0.99), torch.randn(shape)
            other = m.clone()
            torch.testing.assert_close(nesterov_kernels(m, grad + bad, mu, ok), nesterov_step(other, grad + bad, mu, ok), equal_nan=True)
            torch.testing.assert_close(m, other)
            low, twin, g = m.half(), m.half(), grad.half() + bad.half()  # sums that round: the same ones must
            out, expected = nesterov_kernels(low, g, mu, ok), nesterov_step(twin, g, mu, ok)
            assert torch.equal(low, twin) and torch.allclose(out, expected, rtol=2e-3, atol=2e-3, equal_nan=True)
            scalars = (torch.tensor(0.02), torch.tensor(0.04)), (torch.rand(n, 1, 1), torch.rand(n, 1, 1)), (torch.rand(1, 1, 1), torch.rand(1, 1, 1))
            for (lr, wd), scale in zip(scalars, scales):  # each with either kind of scale, over the two layouts
                w, y, z = torch.randn(shape), torch.zeros(shape), torch.zeros(shape)
                x = w.clone()
                master_kernels(w, update + bad, lr, wd, scale, ok, y), master_step(x, update + bad, lr, wd, scale, ok, z)
                torch.testing.assert_close(w, x), torch.testing.assert_close(y, z)
                assert y.isfinite().all()
import golfnb.muon.newton_schulz, golfnb.model.engine
from golfnb.muon.newton_schulz import NS5_COEFFS, newton_schulz, product_tiles
golfnb.muon.newton_schulz.usable_kernels = lambda device, dtype: True
table = golfnb.muon.newton_schulz.PRODUCT_TILES
assert table[1][0] == table[2][0] > table[0][0] == 512 and [row[1] for row in table] == [64, 128, 64]
for n, r, c, row in ((1, 640, 704, 1), (1, 576, 600, 2)):  # as large as its rows ask for
    G = 1e-3 * torch.randn(n, r, c)
    assert product_tiles(G) == table[row]
    assert float((newton_schulz(G, NS5_COEFFS[:1]) - newton_schulz(G, NS5_COEFFS[:1], kernels=False)).norm() / r ** 0.5) < 1e-4
golfnb.muon.newton_schulz.PRODUCT_TILES = ((128, *table[0][1:]), *table[1:])  # each row for matrices that are interpreted in less time
for n, r, c, row in ((2, 64, 64, 0), (3, 128, 192, 0), (1, 384, 448, 1), (2, 128, 100, 0), (1, 192, 200, 2), (2, 70, 100, None)):
    G = torch.randn(n, r, c)
    G[0] *= 1e-3
    rows = torch.cat([torch.zeros(1), G.flatten()])[1:].view(n, r, c)
    assert product_tiles(G) == (None if row is None else golfnb.muon.newton_schulz.PRODUCT_TILES[row])
    coeffs = NS5_COEFFS[:2] if r > 300 else NS5_COEFFS  # interpreted, five steps of a large one take seconds
    for g in (G, rows, G.mT, G.mT.contiguous(), G.mT.contiguous().mT, torch.cat([G, G], 2)[:, :, :c]):
        assert float((newton_schulz(g, coeffs) - newton_schulz(g, coeffs, kernels=False)).norm() / r ** 0.5) < 1e-4
golfnb.muon.newton_schulz.PRODUCT_TILES = table
G = torch.randn(4, 128, 64)
G[1], G[3] = 0, float("nan")
assert torch.equal(newton_schulz(G)[::2], newton_schulz(G[::2])) and not newton_schulz(G)[1].any() and newton_schulz(G)[3].isnan().all()
assert not newton_schulz(torch.zeros(2, 64, 64), eps=1e-12).any()
for other in (G[:0], G[:, :0], G.half(), G.clone().requires_grad_()):
    assert product_tiles(other) is None
found = []
for use in (True, False):  # a whole update: which functions it takes
    golfnb.muon.newton_schulz.usable_kernels = golfnb.model.engine.usable_kernels = lambda device, dtype: use
    torch.manual_seed(1)
    w, m, g, y = torch.randn(2, 130, 65), torch.randn(2, 130, 65), torch.randn(2, 130, 65), torch.zeros(2, 130, 65)
    shard = SimpleNamespace(fp32_shard=w, state={"momentum_buffer": m}, shape_lr_scale=torch.full((2, 1, 1), 1.4), rounded=y)
    golfnb.model.engine.Muon().move(shard, g, torch.tensor(0.02), torch.tensor(0.95), torch.tensor(0.1), torch.tensor(True))
    found += [(w, m, y)]
for a, b in zip(*found):
    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
print("equal")
"""

MODEL = CASES + """
import golfnb.model.golf as M
from golfnb.studies.variants import read_variant
ids = torch.randint(64, (2, 21), generator=g)
def run(plan, fused, compiled, keep=None):
    variant = read_variant({"RECIPE": "demo", "MODEL_DIM": "64", "NUM_LAYERS": "3", "VOCAB_SIZE": "64", "VE_LAYERS": "2", "TRAIN_SEQ_LEN": "20", "EVAL_SEQ_LEN": "20", "EVAL_STRIDE": "4", "PLAN": plan})
    s, noise = variant.settings, torch.Generator().manual_seed(1)
    model = M.Golf(s, variant.part("banks")(s, 1), skips=variant.part("skips")())
    M.init_model(model, s, 1)
    with torch.no_grad():
        for p in model.parameters(): p.add_(0.1 * torch.randn(p.shape, generator=noise))
    if fused: K.fuse(model, golfnb.muon.jit.KERNELS, [K.Tiles(BM=64, BN=128, BK=64)] * 2)
    loss = lambda i, t: softcap_loss(model(i, keep), t[:, -(keep or 0):], model.cap)
    if compiled:
        torch._dynamo.reset()
        loss = torch.compile(loss, backend="aot_eager", fullgraph=True)
    out, steps = [], torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(2):                                 # two steps, so that gradients show in the losses too
        steps.zero_grad()
        value = loss(ids[:, :-1], ids[:, 1:])
        value.backward()
        steps.step()
        out.append(float(value.detach()))
    return out + [float(p.detach().double().norm()) for p in model.parameters()]
for plan, compiled, keep in (("pr399", True, None), ("shared_mlp", False, None), ("pr399", False, 7)):
    torch.testing.assert_close(run(plan, True, compiled, keep), run(plan, False, False, keep), rtol=2e-5, atol=1e-6)
print("equal")
"""

LOSS = """
import torch
import golfnb.model.kernels as K
from golfnb.model.frontier import stream_loss
from golfnb.model.kernels import fused_softcap_loss
from golfnb.model.layers import softcap_loss
g = torch.Generator().manual_seed(0)
def ways(logits, targets, cap, scale):
    "Loss and gradient: the kernel's, and the plain function's in float64."
    for loss_of, dtype in ((fused_softcap_loss, logits.dtype), (softcap_loss, torch.float64)):
        x = logits.to(dtype).requires_grad_()
        loss = loss_of(x, targets, cap)
        yield loss.detach(), torch.autograd.grad(scale * loss, x)[0]
for B, T, V, cap, size in ((1, 1, 1, 30.0, 1.0), (2, 3, 7, 30.0, 1.0), (1, 13, 1000, 15.0, 10.0), (1, 2, 1024, 30.0, 40.0), (1, 4, 1025, 30.0, 3.0), (1, 3, 3001, 90.0, 200.0)):
    logits = size * torch.randn(B, T, V, generator=g)
    targets = torch.randint(V, (B, T), generator=g)
    targets[0, 0], targets[-1, -1] = 0, V - 1  # neither end of the vocabulary is another's
    (loss, grad), (exact, exact_grad) = ways(logits, targets, cap, 1.7)
    assert loss.dtype == torch.float32 and abs(float(loss - exact)) < 1e-5 * max(1.0, float(exact)), (V, loss, exact)
    assert float((grad.double() - exact_grad).norm()) < 1e-5 * float(exact_grad.norm()) + 1e-9, V
low = torch.full((1, 2, 5), -300.0)  # all at the lower end of the cap, of which e^z is 0 in float32
(loss, _), (exact, _) = ways(low, torch.zeros(1, 2, dtype=torch.int64), 150.0, 1.0)
assert abs(float(loss - exact)) < 1e-5
apart = torch.randn(2, 5, 2048, generator=g)[..., ::2]  # rows that do not lie side by side
(loss, grad), (exact, exact_grad) = ways(apart, torch.randint(1024, (2, 5), generator=g), 30.0, 1.0)
assert abs(float(loss - exact)) < 1e-5 and float((grad.double() - exact_grad).norm()) < 1e-5
bad = torch.zeros(1, 3, 9)
bad[0, 1, 4] = float("nan")  # a wrong number is seen
assert fused_softcap_loss(bad, torch.zeros(1, 3, dtype=torch.int64), 30.0).isnan()
narrow = torch.randn(1, 6, 50, generator=g).half()  # what is kept for backward: the logits as they are, and one number a token
kept = []
with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
    x = narrow.clone().requires_grad_()
    loss = fused_softcap_loss(x, torch.zeros(1, 6, dtype=torch.int64), 30.0)
assert [t.dtype for t in kept if t.numel() >= narrow.numel()] == [torch.half] and loss.dtype == torch.float32
assert torch.autograd.grad(loss, x)[0].dtype == torch.half
flat, targets = torch.randn(6, 11, generator=g), torch.arange(6)
for op, args in ((K.loss_op, (flat, targets, 30.0)), (K.loss_grad_op, (flat, targets, torch.randn(6), torch.tensor(1.0), 30.0))):
    torch.library.opcheck(op, args, test_utils=("test_schema", "test_faketensor"))

from golfnb.model.engine import Ranks
from golfnb.recipes import pr2135
from golfnb.settings import read_settings
tiny = dict(MODEL_DIM="48", NUM_LAYERS="2", NUM_HEADS="2", NUM_KV_HEADS="1", ROPE_DIMS="4", VOCAB_SIZE="64", LOOP_START="0", LOOP_END="0", PARALLEL_START_LAYER="1", TRAIN_SEQ_LEN="16", EVAL_SEQ_LEN="16", EVAL_STRIDE="4", TRAIN_BATCH_TOKENS="256")
s, found = read_settings(pr2135.Settings, pr2135.OWN, tiny), []
ids, targets = torch.randint(64, (2, 2, 16), generator=g)
called = []
K.fused_softcap_loss = lambda *args: called.append(1) or fused_softcap_loss(*args)
for kernels in ({"loss"}, set()):
    pr2135.usable_kernels = lambda device, dtype: kernels
    parts = pr2135.build(s, Ranks())
    loss = parts.backward(ids, targets, 1)
    found.append((loss, [p.grad for p in parts.model.parameters()]))
assert called == [1]  # where kernels run, and only there
(a, grads), (b, plain) = found
torch.testing.assert_close(a, b)
for mine, other in zip(grads, plain, strict=True):
    torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-6)
ids, targets = ids.view(2, 16), targets.view(2, 16)
torch._dynamo.reset()
compiled = torch.compile(stream_loss(parts.model, 30.0, fused_softcap_loss), backend="aot_eager", fullgraph=True)
torch.testing.assert_close(torch.autograd.grad(compiled(ids, targets), parts.model.tok_emb)[0], torch.autograd.grad(stream_loss(parts.model, 30.0)(ids, targets), parts.model.tok_emb)[0], rtol=1e-4, atol=1e-6)
print("equal")
"""

WITHOUT = """
import sys
sys.modules["triton"] = None          # any import of triton raises ImportError
import torch
from golfnb.muon.jit import triton, usable_kernels
from golfnb.model.kernels import fused_exclusive
from golfnb.settings import GolfError
assert triton is None and not usable_kernels("cuda", torch.bfloat16) and torch.ops.golfnb.heads
try:
    fused_exclusive(torch.zeros(1, 1, 1, 2), torch.zeros(1, 1, 1, 2))
except GolfError as e:
    print("refused:", e)
"""

BUILT = """
import sys, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction
sys.path.insert(0, FOLDER)
import packed as P                     # the packed script, which unpacks itself
def build(fn, consts, wide=(), numbers="T R M N K v_row".split(), warps=4, stages=3, **kinds):
    j = triton.jit(fn)
    kind = lambda n: "constexpr" if n in consts else kinds.get(n) or ("i32" if n in numbers else "fp32" if n in ("eps", "slope") else "*fp32" if n in wide else "*bf16")
    lined = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(j.arg_names) if kind(n)[0] == "*" or kind(n) == "i32"}
    return triton.compile(ASTSource(j, {n: kind(n) for n in j.arg_names}, consts, lined), target=GPUTarget("cuda", 90, 32), options={"num_warps": warps, "num_stages": stages}).asm["ptx"]
"""

BUILT_ALL = BUILT + """
heads = dict(H=8, KV=4, D=64, ROW=1024, HALF=8, ROWS=P.HEAD_ROWS)
for fn in (P.heads_forward_kernel, P.heads_backward_kernel):
    assert "ld.global.v4" in build(fn, heads, ("gain", "dgain"))
for fn in (P.xsa_forward_kernel, P.xsa_backward_kernel):
    assert "ld.global.v4" in build(fn, dict(KV=4, GROUP=2, D=64, ROWS=P.XSA_ROWS))
for tiles, back in ((P.MLP_UP_TILES, False), (P.MLP_DOWN_TILES, True)):
    bm, bn, bk = tiles[:3]
    desc = lambda *block: f"tensordesc<bf16[{block[0]}, {block[1]}]>"
    ptx = build(P.mlp_product_kernel, dict(BACKWARD=back, SAVE=not back, FLAT=bool(tiles.FLAT), BM=bm, BN=bn, BK=bk), warps=tiles.num_warps, stages=tiles.num_stages,
                a=desc(bm, bk), b=desc(bk, bn) if back else desc(bn, bk), z=desc(bm, bn // 2), out=desc(bm, bn // 2))
    assert "wgmma" in ptx and "cp.async.bulk.tensor" in ptx
for polynomial in (False, True):
    for _, side, warps, _ in P.PRODUCT_TILES:
        for turned in (False, True):
            ptx = build(P.ns_product_kernel, dict(POLYNOMIAL=polynomial, TURNED=turned, SIDE=side), ("norm",), ["M", "K"], warps, 4, a="fp32", b="fp32", c="fp32",
                        x=f"tensordesc<bf16[{', '.join(map(str, (64, side) if turned else (side, 64)))}]>")
            assert "wgmma" in ptx and "cp.async.bulk.tensor" in ptx
assert "st.global.v4" in build(P.nesterov_kernel, dict(BLOCK=2048, ok_slot=0), ("mu",), ["size"], ok="*i1")
for ones in (dict(u_col=1), dict(u_row=1)):
    assert "st.global.v4" in build(P.master_kernel, dict(ones, SIDE=64, lr_slot=0, wd_slot=0, s_row=0, ok_slot=0), ("master", "lr", "wd", "scale"), "R C u_slot u_row u_col s_slot".split(), ok="*i1")
print("built")
"""

BUILT_LOSS = BUILT + """
for fn in (P.loss_forward_kernel, P.loss_backward_kernel):
    ptx = build(fn, dict(BLOCK=P.LOSS_BLOCK), ("nats", "log_sums", "dloss"), ["V"], cap="fp32", targets="*i64")
    assert "ld.global.v4" in ptx
print("built")
"""


CODES = [INTERPRETED, OPTIMIZER, MODEL, LOSS]

# runs each of the codes whose numbers it reads in a fork of itself, and says how each ended
FORKS = """
import gc, os, sys
import golfnb.model.kernels, golfnb.muon.newton_schulz, golfnb.model.engine
gc.freeze()
for number in sys.stdin:
    pid = os.fork()
    if pid == 0:
        exec(CODES[int(number)])
        sys.stdout.flush()
        os._exit(0)
    print("ended:", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""


@pytest.fixture(scope="module")
def interpreter(tmp_path_factory):
    "A function that runs one of CODES where Triton interprets; what the code printed. All share one process that has imported torch."
    said = tmp_path_factory.mktemp("interpreter") / "said"
    env = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    with open(said, "w") as err:
        server = subprocess.Popen([sys.executable, "-c", f"CODES = {CODES!r}\n{FORKS}"], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=err, text=True)

    def run(number: int) -> str:
        before = said.stat().st_size
        server.stdin.write(f"{number}\n")
        server.stdin.flush()
        out = ""
        while not out.endswith("\n") or not out.splitlines()[-1].startswith("ended:"):
            line = server.stdout.readline()
            assert line, said.read_text()
            out += line
        assert out.endswith("ended: 0\n"), said.read_text()[before:][-3000:]
        return out
    with server:
        yield run


def child(code, **env):
    done = subprocess.run([sys.executable, "-c", code], env={**os.environ, **env}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


needs_triton = pytest.mark.skipif(triton is None, reason="needs Triton")


@needs_triton
@pytest.mark.parametrize("number", [0, 1, 2, 3], ids=["alone", "optimizer", "model", "loss"])
def test_interpreted_kernels_equal_their_oracle(interpreter, number):
    assert "equal" in interpreter(number)


@needs_triton
@pytest.mark.parametrize("recipe, code", [("pr549", BUILT_ALL), ("pr2135", BUILT_LOSS)], ids=["pr549", "pr2135"])
def test_packed_kernels_build_for_hopper_without_a_gpu(tmp_path, recipe, code):
    from golfnb.tools.joiner import join_program, pack_program
    script = join_program(Path(__file__).parents[2] / "golfnb" / "recipes" / f"{recipe}.py")
    (tmp_path / "packed.py").write_text(pack_program(script), encoding="utf-8")
    assert "built" in child(f"FOLDER = {str(tmp_path)!r}\n" + code, TRITON_CACHE_DIR=str(tmp_path / "cache"))


def test_imports_without_triton():
    said = child(WITHOUT)
    assert said.startswith("refused: ") and "Triton" in said


def test_refusals(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert usable_kernels("cuda:1", torch.bfloat16, {"mlp"}) == ({"mlp"} if triton else set()) and not usable_kernels("cuda", torch.float32) and not usable_kernels("cpu", torch.bfloat16)
    n, w = torch.zeros(1, 2, 4), torch.zeros(4, 4)
    for call in (lambda d: fused_mlp(n.to(d), w.to(d), w.to(d), 0.5), lambda d: fused_exclusive(n[None].to(d), n[None].to(d)), lambda d: fused_heads(n.to(d), w.to(d), torch.ones(2, dtype=d), n[0, :, :1], n[0, :, :1], 1), lambda d: fused_softcap_loss(n.to(d), torch.zeros(1, 2, dtype=torch.int64), 30.0)):
        for dtype in (torch.float32, torch.float64):
            with pytest.raises(GolfError, match=f"Triton.*{dtype}"):
                call(dtype)
    assert heads_fit(64, 16) and heads_fit(32, 32) and not any(heads_fit(*a) for a in ((64, 12), (48, 16), (64, 0), (16, 32)))
    assert mlp_fit(24, 16, torch.float32) and mlp_fit(24, 16, torch.bfloat16) and not mlp_fit(24, 12, torch.bfloat16)


@pytest.mark.parametrize("heads, width, fits", [(2, 24, False), (2, 33, False), (1, 96, False), (2, 32, True), (4, 16, True)])
def test_a_model_takes_the_kernels_that_fit_its_heads(heads, width, fits):
    s = settings_for("demo", MODEL_DIM=heads * width, NUM_HEADS=heads, NUM_KV_HEADS=1, ROPE_DIMS=8)
    model = Golf(s, bank_per_shape(s, 1), device="meta")
    fuse(model, KERNELS)
    assert ("xsa" in model.kernels, "heads" in model.kernels) == (fits, fits) and "fold" in model.kernels
    assert all(block.kernels == model.kernels for block in model.blocks)


def test_a_kernel_that_there_is_not_is_refused():
    s = settings_for("demo")
    model = Golf(s, bank_per_shape(s, 1), device="meta")
    with pytest.raises(GolfError, match="found 'attention'"):
        fuse(model, ["xsa", "attention"])
    assert model.kernels == frozenset()


def test_no_grid_ends_at_65535_programs(monkeypatch):
    "Only a grid's first axis goes further, and tokens are more: heads and blocks of tokens share it."
    grids = []

    class Launch:
        def __getitem__(self, grid):
            grids.append(grid)
            return lambda *args, **named: None

    monkeypatch.setattr(kernels, "jitted", lambda kernel: Launch())
    monkeypatch.setattr(kernels, "check_runnable", lambda x: None)
    T = 65_536 * kernels.HEAD_ROWS
    qkv, gain, cos = torch.empty(1, T, 6), torch.ones(1), torch.ones(T, 1)
    q, k = kernels.heads_op(qkv, gain, cos, cos, 1, 1)
    kernels.heads_grad_op(q, k, k, qkv, gain, cos, cos)
    kernels.xsa_grad_op(q, q, kernels.xsa_op(q, k))
    assert [len(grid) for grid in grids] == [1, 1, 1, 1] and grids[0] == (2 * 65_536,) and grids[3] == (T // kernels.XSA_ROWS,)


def gpu_apart(twin, plain, *inputs):
    "Relative distances to the plain meaning in float32: of the twin, and of the plain meaning in bfloat16."
    def all_of(f, xs):
        out = f(*xs)
        out = out if isinstance(out, tuple) else (out,)
        return [*out, *torch.autograd.grad(out, xs, [torch.ones_like(o).cumsum(-1) / o.shape[-1] - 0.5 if o.ndim else torch.ones_like(o) for o in out])]
    low = [x.requires_grad_() for x in inputs]
    exact = all_of(plain, [x.detach().float().requires_grad_() for x in inputs])
    return [[((a.double() - b.double()).norm() / b.double().norm()).item() for a, b in zip(all_of(f, low), exact)] for f in (twin, plain)]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_kernels_on_the_gpu_round_no_worse_than_the_plain_functions():
    torch.manual_seed(0)
    rand = lambda *s, size=1.0: (size * torch.randn(*s, device="cuda")).bfloat16()
    cos, sin = rotary_tables(300, 16, 10000.0, 1024, "cuda", torch.bfloat16)

    def plain(n, w, gain):
        q, k, v = (t.unflatten(-1, (-1, 64)) for t in F.linear(n, w).split((512, 256, 256), -1))
        return *qk_norm_rope_gain(q, k, cos.to(n.dtype), sin.to(n.dtype), gain), v

    pairs = [gpu_apart(lambda n, w, gain: fused_heads(n, w, gain, cos, sin, 4), plain, rand(3, 300, 512), rand(1024, 512, size=0.05), rand(8)),
             gpu_apart(fused_exclusive, exclusive, rand(3, 300, 8, 64), rand(3, 300, 4, 64))]
    pairs += [gpu_apart(lambda *a: fused_mlp(*a, slope), lambda n, u, d: F.linear(squared_leaky(F.linear(n, u), slope), d),
                        rand(3, 301, 512), rand(1536, 512, size=0.05), rand(512, 1536, size=0.05)) for slope in (0.0, 0.5)]
    targets = torch.randint(8192, (1, 300), device="cuda")
    pairs += [gpu_apart(lambda x: fused_softcap_loss(x, targets, 30.0), lambda x: softcap_loss(x, targets, 30.0), rand(1, 300, 8192, size=size)) for size in (1.0, 20.0)]
    for ours, theirs in pairs:
        assert all(a < 1.3 * b + 1e-3 for a, b in zip(ours, theirs)), (ours, theirs)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_more_tokens_than_a_grid_has_programs_on_its_second_axis_on_the_gpu():
    T = 65_536 * 32 + 5
    torch.manual_seed(0)
    n, weight, gain = (torch.randn(s, device="cuda", dtype=torch.bfloat16) for s in ((1, T, 16), (48, 16), (1,)))
    cos, sin = (t.cuda() for t in rotary_tables(T, 8, 100.0, 9))
    q, k, v = fused_heads(n, weight, gain, cos, sin, 1)
    mixed = fused_exclusive(q, v)
    for part in (slice(0, 64), slice(T - 64, T)):
        own = fused_heads(n[:, part], weight, gain, cos[part], sin[part], 1)
        assert all(torch.equal(a[:, part], b) for a, b in zip((q, k, v), own))
        assert torch.equal(mixed[:, part], fused_exclusive(own[0], own[2]))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("coeffs,scale", [(NS5_COEFFS, 1.0), (POLAR_EXPRESS_COEFFS, 1.02)], ids=["quintic", "polar express"])
def test_newton_schulz_on_the_gpu_rounds_no_worse_than_the_library(coeffs, scale):
    "Each row of the table, and none; tall, wide and square; strides of other layouts; a start that no descriptor takes."
    torch.manual_seed(0)
    for n, r, c in ((3, 512, 512), (22, 256, 512), (11, 512, 1536), (1, 64, 128), (2, 1536, 512), (3, 640, 640), (2, 768, 3072), (2, 2304, 768), (2, 1024, 1000), (2, 576, 1536), (5, 70, 130)):
        G = torch.randn(n, r, c, device="cuda").bfloat16()
        odd = torch.cat([G.new_zeros(1), G.flatten()])[1:].view(n, r, c)
        for g in (G, odd, G.mT.contiguous().mT, torch.stack([G, G], 1)[:, 0], torch.cat([G, G], 2)[:, :, :c]):
            exact, found = newton_schulz(g.double(), coeffs, scale), []
            for kernels in (True, False):
                found.append(((newton_schulz(g, coeffs, scale, kernels=kernels).double() - exact).norm() / exact.norm()).item())
            assert found[0] < 1.3 * found[1], (n, r, c, g.stride(), found)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_one_matrix_does_not_touch_another_on_the_gpu():
    "Zeros stay zero, not a number stays where it is, and every other matrix comes out bit for bit as alone."
    for n, r, c in ((5, 256, 512), (5, 512, 256), (5, 768, 768), (5, 1536, 768)):
        G = torch.randn(n, r, c, device="cuda", generator=torch.Generator("cuda").manual_seed(1)).bfloat16()
        clean = newton_schulz(G)
        G[1], G[3] = 0, float("nan")
        out = newton_schulz(G)
        assert not out[1].any() and out[3].isnan().all() and torch.equal(out[::2], clean[::2])
        assert not newton_schulz(torch.zeros_like(G), eps=1e-12).any() and newton_schulz(G[:0]).shape == (0, r, c)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_passes_of_the_update_on_the_gpu_are_their_twins():
    "In bf16, for slots that are skipped too and for an update stored transposed: the momentum bit for bit, the master but for a last digit."
    torch.manual_seed(0)
    n, r, c = 3, 130, 200
    rand = lambda *shape: torch.randn(*shape, device="cuda")
    ok, mu, lr, wd = torch.tensor([True, False, True], device="cuda").view(n, 1, 1), torch.tensor(0.99, device="cuda"), rand(n, 1, 1), torch.tensor(0.1, device="cuda")
    momentum, grad, update, master, scale, found = rand(n, r, c).bfloat16(), rand(n, r, c).bfloat16(), rand(n, c, r).bfloat16().mT, rand(n, r, c), rand(n, r, 1), []
    for before, after in ((nesterov_kernels, master_kernels), (nesterov_step, master_step)):
        m, w, out = momentum.clone(), master.clone(), torch.empty_like(momentum)
        ahead = before(m, grad, mu, ok)
        after(w, update, lr, wd, scale, ok, out)
        found.append((m, ahead, w, out))
    (m, ahead, w, out), (m2, ahead2, w2, out2) = found
    assert torch.equal(m, m2) and torch.equal(m[1], momentum[1]) and not torch.equal(m[0], momentum[0])
    torch.testing.assert_close(ahead, ahead2), torch.testing.assert_close(w, w2), torch.testing.assert_close(out, out2)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_matrices_of_another_gpu_than_the_current_one():
    G = torch.randn(3, 128, 256, generator=torch.Generator().manual_seed(0)).bfloat16()
    torch.testing.assert_close(newton_schulz(G.to("cuda:1")).cpu(), newton_schulz(G.to("cuda:0")).cpu())

"""The banked model against a plain one made of nn.Linear, its promises about keep and causality, its draws and its names."""
import json
import math

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn import init

from golfnb.model.kernels import fuse
from golfnb.model.layers import rms_norm, softcap_loss, token_nll
from golfnb.model.layout import bank_per_shape, matrix_names
from golfnb.model.golf import Block, Golf, drawn_state, init_model, load_named, model_from_settings, named_state, quant_kind, saved_settings
from golfnb.muon.jit import KERNELS
from golfnb.file.quantize import captured_inputs
from golfnb.recipes import pr549
from golfnb.settings import GolfError
from golfnb.studies.buckets import BucketGolf, read_plan
from golfnb.studies.variants import read_variant
from golfnb.tools.programs import settings_of

SMALL = dict(VOCAB_SIZE="96", NUM_LAYERS="5", MODEL_DIM="32", NUM_HEADS="4", NUM_KV_HEADS="2", ROPE_DIMS="4", BIGRAM_VOCAB_SIZE="40", BIGRAM_DIM="12",
             VE_DIM="10", VE_LAYERS="1,4", XSA_LAST_N="2", TRAIN_SEQ_LEN="24", EVAL_SEQ_LEN="24", EVAL_STRIDE="8", ROPE_TRAIN_LEN="12")
VARIANTS = {"odd": {}, "even": dict(NUM_LAYERS="4", VE_LAYERS="3"), "one": dict(NUM_LAYERS="1", VE_LAYERS="0"), "bare": dict(BIGRAM_VOCAB_SIZE="0", VE_ENABLED="0", XSA_LAST_N="0", LN_SCALE="0"),
            "relu": dict(NEGATIVE_SLOPE="0.0", XSA_LAST_N="5"), "shared": dict(PLAN="shared_mlp"), "mqa": dict(NUM_KV_HEADS="1")}


def filled(variant="odd", dtype=torch.float64, world=1, seed=0, **env):
    "A model with random numbers everywhere, and its configuration."
    made = read_variant({**SMALL, **VARIANTS[variant], **env})
    cfg = made.settings
    model = Golf(cfg, made.part("banks")(cfg, world), dtype, skips=made.part("skips")())
    g = torch.Generator().manual_seed(seed)
    load_named(model, {n: torch.randn(t.shape, generator=g) * (t.shape[-1] ** -0.5 if t.ndim == 2 else 1) for n, t in named_state(model).items()})
    return model, cfg


def tokens(cfg, rows=2, T=24, seed=0):
    return torch.randint(cfg.vocab_size, (rows, T), generator=torch.Generator().manual_seed(seed))


class PlainBlock(nn.Module):
    def __init__(self, cfg, i):
        super().__init__()
        d, kv = cfg.model_dim, cfg.kv_dim
        self.attn = nn.ModuleDict({n: nn.Linear(d, o, bias=False) for n, o in (("c_q", d), ("c_k", kv), ("c_v", kv), ("proj", d))})
        self.attn.q_gain = nn.Parameter(torch.zeros(cfg.num_heads))
        self.mlp = nn.ModuleDict({"fc": nn.Linear(d, cfg.mlp_dim, bias=False), "proj": nn.Linear(cfg.mlp_dim, d, bias=False)})
        self.attn_scale, self.mlp_scale, self.resid_mix = (nn.Parameter(torch.zeros(*s)) for s in ((d,), (d,), (2, d)))
        self.i, self.cfg = i, cfg

    def forward(self, x, x0, ve):
        cfg, T = self.cfg, x.shape[1]
        hd, group = cfg.head_dim, cfg.num_heads // cfg.num_kv_heads
        norm = lambda t: t / (t.pow(2).mean(-1, keepdim=True) + 1.1920929e-07).sqrt()
        s = 1 / math.sqrt(self.i + 1) if cfg.ln_scale else 1
        x = self.resid_mix[0] * x + self.resid_mix[1] * x0
        n = norm(x) * s
        q, k, v = self.attn["c_q"](n), self.attn["c_k"](n), self.attn["c_v"](n)
        if ve is not None:
            v = v + ve
        base = cfg.rope_base if T <= cfg.rope_train_len else cfg.rope_base * (T / cfg.rope_train_len) ** (cfg.rope_dims / (cfg.rope_dims - 2))
        r = cfg.rope_dims // 2
        turn = torch.exp(-1j * torch.arange(T, dtype=torch.float64)[:, None] * base ** (-torch.arange(r, dtype=torch.float64) / r))
        heads = []
        for h in range(cfg.num_heads):
            qh, kh = norm(q[..., h * hd:(h + 1) * hd]), norm(k[..., h // group * hd:(h // group + 1) * hd])
            vh = v[..., h // group * hd:(h // group + 1) * hd]
            qh, kh = (torch.cat((z.real, z.imag, t[..., 2 * r:]), -1) for t in (qh, kh) for z in [torch.complex(t[..., :r], t[..., r:2 * r]) * turn])
            score = (qh * self.attn.q_gain[h]) @ kh.transpose(1, 2) / math.sqrt(hd)
            y = score.masked_fill(torch.ones(T, T).triu(1).bool(), -torch.inf).softmax(-1) @ vh
            if self.i >= cfg.num_layers - cfg.xsa_last_n:
                u = vh / vh.norm(dim=-1, keepdim=True)
                y = y - (y * u).sum(-1, keepdim=True) * u
            heads.append(y)
        x = x + self.attn_scale * self.attn["proj"](torch.cat(heads, -1))
        h = self.mlp["fc"](norm(x) * s)
        h = torch.where(h > 0, h, cfg.negative_slope * h) ** 2
        return x + self.mlp_scale * self.mlp["proj"](h)


class Plain(nn.Module):
    "The same network with one nn.Module per part, as its author would write it without banks; float64."
    def __init__(self, cfg):
        super().__init__()
        d, self.cfg = cfg.model_dim, cfg
        self.tok_emb = nn.Embedding(cfg.vocab_size, d)
        if cfg.bigram_vocab_size:
            self.bigram = nn.ModuleDict({"embed": nn.Embedding(cfg.bigram_vocab_size, cfg.bigram_dim), "proj": nn.Linear(cfg.bigram_dim, d, bias=False)})
            self.bigram.scale = nn.Parameter(torch.zeros(()))
        if cfg.ve_layer_list:
            self.ve_shared = nn.ModuleDict({"embed": nn.Embedding(cfg.vocab_size, cfg.ve_dim), "proj": nn.Linear(cfg.ve_dim, cfg.kv_dim, bias=False)})
            self.ve_shared.scale = nn.Parameter(torch.zeros(()))
            self.ve_layer_scales = nn.ParameterList([nn.Parameter(torch.zeros(1)) for _ in cfg.ve_layer_list])
        self.smear = nn.Module()
        self.smear.gate = nn.Parameter(torch.zeros(d))
        if cfg.num_layers > 1:
            self.skip_weights = nn.Parameter(torch.zeros(cfg.num_layers // 2, d))
        self.blocks = nn.ModuleList([PlainBlock(cfg, i) for i in range(cfg.num_layers)])
        self.double()

    def forward(self, ids):
        cfg, norm = self.cfg, lambda t: t / (t.pow(2).mean(-1, keepdim=True) + 1.1920929e-07).sqrt()
        x = self.tok_emb(ids)
        if cfg.bigram_vocab_size:
            rows = [[cfg.bigram_vocab_size - 1] + [((36313 * b) ^ (27191 * a)) % (cfg.bigram_vocab_size - 1) for a, b in zip(r, r[1:])] for r in ids.tolist()]
            x = x + self.bigram["proj"](self.bigram["embed"](torch.tensor(rows))) * self.bigram.scale
        x = norm(x)
        g = 1 / (1 + torch.exp(-self.smear.gate))
        x = torch.stack([(1 - g) * x[:, t] + (g * x[:, t - 1] if t else 0) for t in range(x.shape[1])], 1)
        x0, stack, half = x, [], cfg.num_layers // 2
        for i, block in enumerate(self.blocks):
            if i >= half and stack:
                x = x + self.skip_weights[i - half] * stack.pop()
            ve = None
            if i in cfg.ve_layer_list:
                ve = self.ve_shared["proj"](self.ve_shared["embed"](ids)) * self.ve_shared.scale * self.ve_layer_scales[cfg.ve_layer_list.index(i)]
            x = block(x, x0, ve)
            if i < half:
                stack.append(x)
        return norm(x) @ self.tok_emb.weight.T


@pytest.mark.parametrize("variant", VARIANTS)
def test_banked_equals_plain_linears_forward_and_backward(variant):
    model, cfg = filled(variant)
    plain = Plain(cfg)
    plain.load_state_dict(named_state(model))
    ids, targets = tokens(cfg), tokens(cfg, seed=1)
    torch.testing.assert_close(model(ids), plain(ids), rtol=1e-10, atol=1e-10)
    softcap_loss(model(ids), targets, model.cap).backward()
    F.cross_entropy((cfg.logit_softcap * torch.tanh(plain(ids) / cfg.logit_softcap)).flatten(0, 1), targets.flatten()).backward()
    grads = model.role_params()
    ours = named_state(model, {n: p.grad for n, p in grads["bank"].items()}, {n: p.grad for r in ("table", "scalar") for n, p in grads[r].items()})
    for name, p in plain.named_parameters():
        torch.testing.assert_close(ours[name], p.grad, rtol=1e-8, atol=1e-11, msg=lambda m: f"{name}: {m}")
    assert ours.keys() == dict(plain.named_parameters()).keys()


@pytest.mark.parametrize("plan", ["pr399", "shared_mlp", "attn3+mlp10,attn2"])
@pytest.mark.parametrize("world", [1, 3])
def test_weights_made_for_all_blocks_at_once_change_nothing(plan, world, monkeypatch):
    "What kernels want made of the weights, with plain functions for kernels: same logits, same gradients, padding included."
    from golfnb.model import kernels as chapter
    from golfnb.model import golf as module
    from golfnb.studies import buckets
    from golfnb.model.layers import qk_norm_rope_gain
    seen, bucketed = [], "," in plan

    def plain_heads(n, weight, gain, cos, sin, keys):
        q, k, v = F.linear(n, weight).unflatten(-1, (-1, weight.shape[0] // (gain.shape[0] + 2 * keys))).split((gain.shape[0], keys, keys), 2)
        return *qk_norm_rope_gain(q, k, cos, sin, gain), v

    def run(kernels=()):
        model, cfg = filled(world=world, **({} if bucketed else {"PLAN": plan}))
        if bucketed:
            state, model = named_state(model), BucketGolf(cfg, read_plan(cfg, plan, world)[0], torch.float64)
            load_named(model, state)
        fuse(model, kernels)
        logits = model(tokens(cfg))
        logits.square().sum().backward()
        return [logits] + [p.grad for params in model.role_params().values() for p in params.values()]
    expected = run()
    monkeypatch.setattr(chapter, "fused_heads", plain_heads)
    for where in (module, buckets):
        monkeypatch.setattr(where, "joined", lambda w, kernels, join=module.joined: seen.append(w.q.ndim) or join(w, kernels))
    assert all(torch.allclose(a, b, atol=1e-10) for a, b in zip(run({"heads", "fold"}), expected)) and set(seen) == {2 if bucketed else 3}


@pytest.mark.parametrize("variant", VARIANTS)
def test_keep_equals_the_last_rows(variant):
    model, cfg = filled(variant)
    ids = tokens(cfg)
    full = model(ids)
    for keep in (1, 8, 23, 24):
        part = model(ids, last_n=keep)
        assert part.shape == (2, keep, cfg.vocab_size)
        torch.testing.assert_close(part, full[:, -keep:], rtol=1e-11, atol=1e-11)


def test_keep_gradients_equal_the_full_forwards():
    grads = []
    for keep in (None, 8):
        model, cfg = filled()
        token_nll(model(tokens(cfg), last_n=keep)[:, -8:], tokens(cfg, seed=1)[:, -8:], model.cap).mean().backward()
        grads.append({n: p.grad for n, p in model.named_parameters()})
    for name in grads[0]:
        torch.testing.assert_close(grads[1][name], grads[0][name], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("variant", ["odd", "relu", "shared"])
def test_a_flipped_future_token_leaves_earlier_logits_bit_equal(dtype, variant):
    model, cfg = filled(variant, dtype)
    ids = tokens(cfg)
    with torch.no_grad():
        full = model(ids)
        for at in (1, 11, 23):
            other = ids.clone()
            other[:, at] = (other[:, at] + 1) % cfg.vocab_size
            changed = model(other)
            assert torch.equal(changed[:, :at], full[:, :at]) and not torch.equal(changed[:, at], full[:, at])
        alone, beside = model(ids[:1])[0], model(torch.cat([ids[:1], ids[:1]]))[1]  # products of other sizes: another order of sums
        assert dtype != torch.float64 or torch.allclose(alone, beside, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("keep", [0, -1, 25])
def test_impossible_keep(keep):
    model, cfg = filled()
    with pytest.raises(GolfError, match=f"last_n .*24.*{keep}"):
        model(tokens(cfg), last_n=keep)


def test_bf16_stream_stays_bf16_and_near():
    exact, cfg = filled(dtype=torch.float32)
    low = Golf(cfg, bank_per_shape(cfg, 1), torch.bfloat16)
    load_named(low, named_state(exact))
    assert {p.dtype for r in ("bank", "table") for p in low.role_params()[r].values()} == {torch.bfloat16}
    assert {p.dtype for p in low.role_params()["scalar"].values()} == {torch.float32}
    inputs, ids = {}, tokens(cfg)
    with captured_inputs(low, inputs.__setitem__):
        logits = low(ids)
    assert logits.dtype == torch.bfloat16 and {t.dtype for t in inputs.values()} == {torch.bfloat16}
    assert F.cosine_similarity(logits.float(), exact(ids), dim=-1).min() > 0.99


def test_captured_inputs_are_those_of_the_matrices_and_the_model_stays_as_it_was():
    model, cfg = filled("shared")
    blocks, kernels, inputs = model.blocks, model.kernels, {}
    with torch.no_grad():
        logits = model(tokens(cfg))
        with captured_inputs(model, inputs.__setitem__):
            assert torch.equal(model(tokens(cfg)), logits)
        with pytest.raises(ZeroDivisionError), captured_inputs(model, lambda name, x: 1 / 0):
            model(tokens(cfg))
    assert model.blocks is blocks and model.kernels is kernels and inputs.keys() == set(matrix_names(model.layout))
    for i in range(cfg.num_layers):
        q, k, v = (inputs[f"blocks.{i}.attn.{name}.weight"] for name in ("c_q", "c_k", "c_v"))
        assert q is k is v
    for _, _, m in model.layout:
        assert inputs[m.name].shape == (2, 24, m.cols)


@pytest.mark.parametrize("activation", [nn.GELU(), torch.tanh, lambda z: F.silu(z).square()])
@pytest.mark.parametrize("compile", [False, True])
def test_an_activation_of_ones_own(activation, compile):
    "Any function or module is computed between the two matrices, with whatever kernels the rest has."
    filling, cfg = filled("shared")
    model = Golf(cfg, filling.layout, torch.float64, skips=filling.skips, activation=activation)
    load_named(model, named_state(filling))
    fuse(model, KERNELS - {"heads", "xsa"})
    assert "mlp" not in model.kernels and model.state_dict().keys() == filling.state_dict().keys()
    inputs = {}
    with captured_inputs(model, inputs.__setitem__):
        model(tokens(cfg))
    up = model.weights()[0].up
    expected = activation(inputs["blocks.0.mlp.fc.weight"] @ up.T)
    torch.testing.assert_close(inputs["blocks.0.mlp.proj.weight"], expected)
    if compile:
        torch._dynamo.reset()
        compiled = torch.compile(model, fullgraph=True, dynamic=False, backend="aot_eager")
        torch.testing.assert_close(compiled(tokens(cfg)), model(tokens(cfg)))
        compiled(tokens(cfg)).square().mean().backward()
        assert all(p.grad is not None for p in model.parameters())
        torch._dynamo.reset()


def test_an_activation_with_weights_is_refused():
    cfg = settings_of(pr549, SMALL)
    with pytest.raises(GolfError, match="PReLU"):
        Golf(cfg, bank_per_shape(cfg, 1), activation=nn.PReLU())


def test_a_walk_of_blocks_of_ones_own_is_the_forward():
    "What adapters build on: a derived block, scales of the norms as tensors, rows at places of their own."
    model, cfg = filled("even", torch.float32)
    ids, seen = tokens(cfg), []

    class Own(Block):
        def linear(self, x, weight, i):
            seen.append(i)
            return x @ weight.T

    places = torch.arange(24).expand(2, 24)
    x0, values, weights, (cos, sin) = model.embed(ids), model.value_embeddings(ids), model.weights(), model.rotary(24)

    def run(x, visit):
        i = visit.block
        b = model.blocks[i]
        own = Own(b.head_dim, torch.full((cfg.model_dim,), b.norm_scale), b.activation, b.xsa)
        assert visit == (i, i, i == cfg.num_layers - 1)
        return own.run(x, x0, weights[i], cos[places], sin[places], values.get(i))

    logits = F.linear(rms_norm(model.run_blocks(x0, run)), model.tok_emb)
    torch.testing.assert_close(logits, model(ids), rtol=1e-5, atol=1e-5)
    assert seen == [0, 1, 2, 3, 4, 5] * cfg.num_layers and list(values) == cfg.ve_layer_list


def test_rope_len_fixes_the_rotary_base():
    model, cfg = filled()
    ids = tokens(cfg)
    short = model(ids[:, :16], rope_len=24)
    torch.testing.assert_close(short, model(ids)[:, :16], rtol=1e-11, atol=1e-11)
    assert (model(ids[:, :16]) - short).abs().max() > 1e-6


def replay(cfg, seed):
    "The published draws, in other words: global generator, real modules, in the order of 2b."
    state = torch.get_rng_state()
    torch.manual_seed(seed)
    tok, bigram = nn.Embedding(cfg.vocab_size, cfg.model_dim), nn.Embedding(cfg.bigram_vocab_size, cfg.bigram_dim)
    bigram_proj = nn.Linear(cfg.bigram_dim, cfg.model_dim, bias=False)
    ve = nn.Embedding(cfg.vocab_size, cfg.ve_dim)
    init.normal_(ve.weight, std=0.01)
    ve_proj = nn.Linear(cfg.ve_dim, cfg.kv_dim, bias=False)
    init.normal_(tok.weight, mean=0.0, std=0.005)
    out = {"tok_emb.weight": tok.weight, "ve_shared.embed.weight": ve.weight, "bigram.embed.weight": torch.zeros_like(bigram.weight)}
    for i in range(cfg.num_layers):
        for name, rows in (("attn.c_q", cfg.model_dim), ("attn.c_k", cfg.kv_dim), ("attn.c_v", cfg.kv_dim), ("mlp.fc", cfg.mlp_dim)):
            out[f"blocks.{i}.{name}.weight"] = init.orthogonal_(torch.empty(rows, cfg.model_dim), gain=1.0)
        out[f"blocks.{i}.attn.proj.weight"] = torch.zeros(cfg.model_dim, cfg.model_dim)
        out[f"blocks.{i}.mlp.proj.weight"] = torch.zeros(cfg.model_dim, cfg.mlp_dim)
    out["bigram.proj.weight"], out["ve_shared.proj.weight"] = init.orthogonal_(bigram_proj.weight), init.orthogonal_(ve_proj.weight)
    torch.set_rng_state(state)
    return {n: t.detach().bfloat16() for n, t in out.items()}


@pytest.mark.parametrize("seed, plan, world", [(1337, "pr399", 1), (42, "shared_mlp", 3)])
def test_initial_draws_are_the_published_ones(seed, plan, world):
    variant = read_variant({**SMALL, "MODEL_DIM": "128", "BIGRAM_DIM": "64", "VE_DIM": "64", "NUM_LAYERS": "5", "PLAN": plan})
    cfg, before = variant.settings, torch.get_rng_state()
    model = Golf(cfg, variant.part("banks")(cfg, world), torch.bfloat16)
    init_model(model, cfg, seed)
    assert torch.equal(before, torch.get_rng_state()), "the global generator is left alone"
    state, threads = named_state(model), torch.get_num_threads()
    torch.set_num_threads(1)
    drawn = replay(cfg, seed)
    torch.set_num_threads(threads)
    for name, want in drawn.items():
        assert torch.equal(state.pop(name), want), name
    for name, t in state.items():
        want = 1.5 if "q_gain" in name else 0.05 if name == "bigram.scale" else 0.1 if name == "ve_shared.scale" else 0.0 if name == "smear.gate" else 1.0
        want = torch.full(t.shape, want).bfloat16().float()
        if "resid_mix" in name:
            want[1] = 0
        assert torch.equal(t, want), name


def test_weights_are_drawn_with_one_thread():
    cfg, seen, draw = settings_of(pr549, SMALL), [], drawn_state

    def watched(*args):
        seen.append(torch.get_num_threads())
        return draw(*args)

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        init_model(Golf(cfg, bank_per_shape(cfg, 1)), cfg, 1, watched)
        assert seen == [1] and torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_published_size_and_groups():
    s = settings_of(pr549, {})
    saved = saved_settings(Golf(s, bank_per_shape(s, 1), device="meta"))
    model, cfg, layout = model_from_settings(json.loads(json.dumps(saved)), torch.bfloat16)
    state = named_state(model)
    assert sum(t.numel() for t in state.values()) == 26_928_220
    small = [n for n in state if n not in matrix_names(layout) and "embed" not in n and "tok_emb" not in n]
    assert len(small) == 52
    kinds = {n: quant_kind(n, tuple(t.shape)) for n, t in state.items()}
    assert {k: list(kinds.values()).count(k) for k in set(kinds.values())} == {"int6": 66, "int8": 3, "fp16": 52}
    assert quant_kind("skip_weights", (512, 512)) == "fp32" and quant_kind("blocks.0.attn.c_q.weight", (256, 256)) == "fp16"
    assert {n: tuple(p.shape) for n, p in model.role_params()["bank"].items()} == {
        "qo_bank": (22, 512, 512), "kv_bank": (22, 256, 512), "mlp_up_bank": (11, 1536, 512), "mlp_down_bank": (11, 512, 1536)}


@pytest.mark.parametrize("variant", VARIANTS)
def test_names_round_trip_and_exports_other_tensors(variant):
    model, cfg = filled(variant, torch.float32, world=3)
    state = named_state(model)
    twin = Golf(cfg, bank_per_shape(cfg, 1))
    load_named(twin, state)
    again = named_state(twin)
    assert again.keys() == state.keys() and all(torch.equal(again[n], t) for n, t in state.items())
    roles = model.role_params()
    doubled = named_state(model, {n: 2 * p for n, p in roles["bank"].items()}, {n: 2 * p for r in ("table", "scalar") for n, p in roles[r].items()})
    assert all(torch.equal(doubled[n], 2 * t) for n, t in state.items())
    assert not any(t.requires_grad for t in state.values()) and all(t.is_contiguous() for t in state.values())
    scales = [n for n in state if n.startswith("ve_layer_scales.")]
    assert len(scales) == len(cfg.ve_layer_list) and all(state[n].shape == (1,) for n in scales), "as published"
    load_named(twin, {n: t[0] if n in scales else t for n, t in state.items()})     # [], as older files have it
    assert all(torch.equal(t, state[n]) for n, t in named_state(twin).items())
    for wrong, word in (({n: t for n, t in state.items() if n != "smear.gate"}, "lack .*'smear.gate'"), ({**state, "x": torch.zeros(1)}, "unknown .*'x'"),
                        ({**state, "smear.gate": torch.zeros(1)}, "smear.gate .*shape"),
                        ({**state, "blocks.0.attn.c_q.weight": torch.zeros(1, 1)}, "c_q.weight .*shape")):
        with pytest.raises(GolfError, match=word):
            load_named(twin, wrong)
    assert all(torch.equal(t, state[n]) for n, t in named_state(twin).items()), "a refused load writes nothing"


def test_the_compiler_sees_one_graph():
    "Traced with fullgraph and the eager backend (nothing is generated): no graph break in training, in scoring or in backward, and equal numbers."
    torch._dynamo.reset()
    model, cfg = filled("shared", torch.float32, NUM_LAYERS="3", VE_LAYERS="2")
    ids, targets = tokens(cfg), tokens(cfg, seed=1)
    loss = torch.compile(lambda i, t: softcap_loss(model(i), t, model.cap), fullgraph=True, dynamic=False, backend="aot_eager")
    score = torch.compile(model, fullgraph=True, dynamic=False, backend="eager")
    value = loss(ids, targets)
    value.backward()
    torch.testing.assert_close(value, softcap_loss(model(ids), targets, model.cap))
    assert all(p.grad is not None for p in model.parameters())
    with torch.no_grad():
        torch.testing.assert_close(score(ids, last_n=8), model(ids, last_n=8))
    torch._dynamo.reset()

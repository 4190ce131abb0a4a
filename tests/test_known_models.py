"""Which rule each weight of ten known architectures gets, at their published sizes on the meta device: tables as text.

    python tests/test_known_models.py      writes the tables of tests/golden/known_models again; read the difference

Names and shapes are written here from the models' published configurations: a layer of each kind that a model has, twice, so that blocks
repeat; embeddings and heads at full size. Nothing of transformers is needed.
"""
import logging
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from golfnb.muon.grouping import group_table, param_groups

GOLDEN = Path(__file__).resolve().parent / "golden" / "known_models"


def tree(shapes: dict) -> nn.Module:
    "A module whose parameters have these names and shapes; numbers in names make lists, embeddings and norms are torch's."
    if isinstance(shapes, tuple):
        raise TypeError("a parameter belongs into a module")
    found = nn.ModuleList() if shapes and all(name.isdecimal() for name in shapes) else nn.Module()
    for name, what in shapes.items():
        if isinstance(what, dict):
            what = tree(what)
        elif isinstance(what, tuple):
            what = nn.Parameter(torch.empty(what))
        found.register_parameter(name, what) if isinstance(what, nn.Parameter) else found.add_module(name, what)
    return found


def linear(inputs: int, outputs: int, bias: bool = False) -> nn.Module:
    return nn.Linear(inputs, outputs, bias)


def layers(*kinds: dict) -> dict:
    return {str(i): kind for i, kind in enumerate(kinds)}


def attention(d: int, heads: int, kv: int, size: int, bias: bool = False, **more) -> dict:
    return {"q_proj": linear(d, heads * size, bias), "k_proj": linear(d, kv * size, bias), "v_proj": linear(d, kv * size, bias), "o_proj": linear(heads * size, d), **more}


def swiglu(d: int, inner: int) -> dict:
    return {"gate_proj": linear(d, inner), "up_proj": linear(d, inner), "down_proj": linear(inner, d)}


def norms(d: int, *names: str) -> dict:
    return {name: nn.RMSNorm(d) for name in names or ("input_layernorm", "post_attention_layernorm")}


def causal(vocab: int, d: int, *blocks: dict, tied: bool = False) -> nn.Module:
    "A decoder as transformers names it."
    model = tree({"model": {"embed_tokens": nn.Embedding(vocab, d), "layers": layers(*blocks), "norm": nn.RMSNorm(d)}, "lm_head": linear(d, vocab)})
    if tied:
        model.lm_head.weight = model.model.embed_tokens.weight
    return model


def llama_3_8b() -> nn.Module:
    return causal(128256, 4096, *({"self_attn": attention(4096, 32, 8, 128), "mlp": swiglu(4096, 14336), **norms(4096)} for _ in range(2)))


def qwen3_8b() -> nn.Module:
    return causal(151936, 4096, *({"self_attn": attention(4096, 32, 8, 128, q_norm=nn.RMSNorm(128), k_norm=nn.RMSNorm(128)), "mlp": swiglu(4096, 12288), **norms(4096)} for _ in range(2)))


def deepseek_v3() -> nn.Module:
    "Two dense layers, and two with 256 experts."
    def layer(mlp):
        mla = {"q_a_proj": linear(7168, 1536), "q_a_layernorm": nn.RMSNorm(1536), "q_b_proj": linear(1536, 128 * 192),
               "kv_a_proj_with_mqa": linear(7168, 512 + 64), "kv_a_layernorm": nn.RMSNorm(512), "kv_b_proj": linear(512, 128 * 256), "o_proj": linear(128 * 128, 7168)}
        return {"self_attn": mla, "mlp": mlp, **norms(7168)}

    def experts():
        return {"experts": {"gate_up_proj": (256, 2 * 2048, 7168), "down_proj": (256, 7168, 2048)}, "gate": {"weight": (256, 7168)}, "shared_experts": swiglu(7168, 2048)}
    return causal(129280, 7168, *(layer(swiglu(7168, 18432)) for _ in range(2)), *(layer(experts()) for _ in range(2)))


def gpt_oss_20b() -> nn.Module:
    def layer():
        experts = tree({"gate_up_proj": (32, 2880, 2 * 2880), "gate_up_proj_bias": (32, 2 * 2880), "down_proj": (32, 2880, 2880), "down_proj_bias": (32, 2880)})
        experts.is_transposed = True
        return {"self_attn": {**attention(2880, 64, 8, 64, True), "sinks": (64,)}, "mlp": {"router": {"weight": (32, 2880), "bias": (32,)}, "experts": experts}, **norms(2880)}
    return causal(201088, 2880, layer(), layer())


def mixtral_8x7b() -> nn.Module:
    def layer():
        return {"self_attn": attention(4096, 32, 8, 128), "block_sparse_moe": {"gate": linear(4096, 8), "experts": layers(*({"w1": linear(4096, 14336), "w2": linear(14336, 4096), "w3": linear(4096, 14336)} for _ in range(8)))}, **norms(4096)}
    return causal(32000, 4096, layer(), layer())


def gemma_3_4b() -> nn.Module:
    def layer():
        return {"self_attn": attention(2560, 8, 4, 256, q_norm=nn.RMSNorm(256), k_norm=nn.RMSNorm(256)), "mlp": swiglu(2560, 10240), **norms(2560, "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")}
    return causal(262208, 2560, layer(), layer(), tied=True)


def phi_3_mini() -> nn.Module:
    def layer():
        return {"self_attn": {"qkv_proj": linear(3072, 3 * 3072), "o_proj": linear(3072, 3072)}, "mlp": {"gate_up_proj": linear(3072, 2 * 8192), "down_proj": linear(8192, 3072)}, **norms(3072)}
    return causal(32064, 3072, layer(), layer())


def vit_large() -> nn.Module:
    "As timm names it."
    d = 1024

    def block():
        return {"norm1": nn.LayerNorm(d), "attn": {"qkv": linear(d, 3 * d, True), "proj": linear(d, d, True)}, "norm2": nn.LayerNorm(d), "mlp": {"fc1": linear(d, 4 * d, True), "fc2": linear(4 * d, d, True)}}
    return tree({"cls_token": (1, 1, d), "pos_embed": (1, 197, d), "patch_embed": {"proj": nn.Conv2d(3, d, 16, 16)}, "blocks": layers(block(), block()), "norm": nn.LayerNorm(d), "head": linear(d, 1000, True)})


def whisper_large() -> nn.Module:
    d = 1280

    def own():
        return {"q_proj": linear(d, d, True), "k_proj": linear(d, d), "v_proj": linear(d, d, True), "out_proj": linear(d, d, True)}

    def layer(crossed):
        more = {"encoder_attn": own(), "encoder_attn_layer_norm": nn.LayerNorm(d)} if crossed else {}
        return {"self_attn": own(), "self_attn_layer_norm": nn.LayerNorm(d), **more, "fc1": linear(d, 4 * d, True), "fc2": linear(4 * d, d, True), "final_layer_norm": nn.LayerNorm(d)}
    encoder = {"conv1": nn.Conv1d(128, d, 3), "conv2": nn.Conv1d(d, d, 3), "embed_positions": nn.Embedding(1500, d), "layers": layers(layer(False), layer(False)), "layer_norm": nn.LayerNorm(d)}
    decoder = {"embed_tokens": nn.Embedding(51866, d), "embed_positions": nn.Embedding(448, d), "layers": layers(layer(True), layer(True)), "layer_norm": nn.LayerNorm(d)}
    model = tree({"model": {"encoder": encoder, "decoder": decoder}, "proj_out": linear(d, 51866)})
    model.proj_out.weight = model.model.decoder.embed_tokens.weight
    return model


def mamba_2() -> nn.Module:
    "2.7B: inner width 5120, 80 heads, state 128, one group."
    d, inner, heads, state = 2560, 5120, 80, 128

    def layer():
        return {"norm": nn.RMSNorm(d), "mixer": {"in_proj": linear(d, 2 * inner + 2 * state + heads), "conv1d": nn.Conv1d(inner + 2 * state, inner + 2 * state, 4, groups=inner + 2 * state), "dt_bias": (heads,), "A_log": (heads,), "D": (heads,), "norm": nn.RMSNorm(inner), "out_proj": linear(inner, d)}}
    return tree({"backbone": {"embeddings": nn.Embedding(50288, d), "layers": layers(layer(), layer()), "norm_f": nn.RMSNorm(d)}, "lm_head": linear(d, 50288)})


MODELS = {"Llama-3-8B": llama_3_8b, "Qwen3-8B": qwen3_8b, "DeepSeek-V3": deepseek_v3, "GPT-OSS-20B": gpt_oss_20b, "Mixtral-8x7B": mixtral_8x7b, "Gemma-3-4B": gemma_3_4b,
          "Phi-3-mini": phi_3_mini, "ViT-L": vit_large, "Whisper-large": whisper_large, "Mamba-2-2.7B": mamba_2}


def groups_of(name: str):
    with torch.device("meta"):
        model = MODELS[name]()
    return model, param_groups(model)


def table_of(name: str) -> str:
    "The table, and under it what was guessed."
    _, groups = groups_of(name)
    return "\n".join([group_table(groups), *groups.notes]) + "\n"


@pytest.mark.parametrize("name", MODELS)
def test_the_table_at_real_size_is_the_golden_one(name):
    assert table_of(name) == (GOLDEN / f"{name}.txt").read_text(encoding="utf-8")


ADAMW = ("norm", "embed", "head", "gate.weight", "router", "cls_token", "pos_", "conv", "A_log", "bias", "sinks", "proj_out", "mixer.D", "patch_")


@pytest.mark.parametrize("name", MODELS)
def test_every_matrix_of_a_block_is_for_muon_and_nothing_else(name):
    "By the published names, whatever the shapes: all of attention and of feed-forward layers, MLA's kv_b_proj too."
    model, groups = groups_of(name)
    rules = {n: group["rule"] for group in groups for n, _ in group["params"]}
    assert set(rules) == {n for n, _ in model.named_parameters()}
    wrong = {n: rule for n, rule in rules.items() if (rule == "adamw") != any(word in n for word in ADAMW)}
    assert not wrong


SIZES = {"DeepSeek-V3": ("experts.gate_up_proj", (2048, 2048)), "Phi-3-mini": ("qkv_proj", (3072, 3072, 3072)), "ViT-L": ("attn.qkv", (1024, 1024, 1024))}


@pytest.mark.parametrize("name", SIZES)
def test_fused_matrices_are_named_with_the_sizes_to_write(name):
    _, groups = groups_of(name)
    what, sizes = SIZES[name]
    (said,) = [note for note in groups.notes if note.startswith("several matrices")]
    assert what in said and f"split_sizes={sizes}?" in said


def test_what_alternates_is_not_taken_for_two_halves():
    "GPT-OSS's gate and up: their columns alternate, so that the sizes named would be wrong, and the line says for which they are."
    _, groups = groups_of("GPT-OSS-20B")
    assert any("gate_up_proj" in note and "one part after the other, as alternating ones do not" in note for note in groups.notes)


def write_golden() -> None:
    GOLDEN.mkdir(parents=True, exist_ok=True)
    logging.getLogger("golfnb").setLevel(logging.ERROR)
    for name in MODELS:
        (GOLDEN / f"{name}.txt").write_text(table_of(name), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(write_golden())

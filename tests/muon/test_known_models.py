"""Which rule each weight of ten known architectures gets, at their published sizes on the meta device: tables as text.

    python tests/muon/test_known_models.py      writes the tables of tests/muon/golden/known_models again; read the difference

A layer of each kind that a model has, twice, so that blocks repeat; embeddings and heads at full size. Names and shapes are held against
transformers' own classes, made on the meta device with the published numbers (`PUBLISHED`, which says where each was read).
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
        own = {**attention(2880, 64, 8, 64, True), "o_proj": linear(64 * 64, 2880, True), "sinks": (64,)}
        experts = tree({"gate_up_proj": (32, 2880, 2 * 2880), "gate_up_proj_bias": (32, 2 * 2880), "down_proj": (32, 2880, 2880), "down_proj_bias": (32, 2880)})
        experts.is_transposed, experts.is_concatenated = True, False
        return {"self_attn": own, "mlp": {"router": {"weight": (32, 2880), "bias": (32,)}, "experts": experts}, **norms(2880)}
    return causal(201088, 2880, layer(), layer())


def mixtral_8x7b() -> nn.Module:
    "As its checkpoint names it, and transformers 4 did: experts one by one."
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
    model = tree({"backbone": {"embeddings": nn.Embedding(50288, d), "layers": layers(layer(), layer()), "norm_f": nn.RMSNorm(d)}, "lm_head": linear(d, 50288)})
    model.lm_head.weight = model.backbone.embeddings.weight
    return model


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
    "GPT-OSS's gate and up: their columns alternate, which its layer says."
    _, groups = groups_of("GPT-OSS-20B")
    assert any("gate_up_proj (2 x [32, 2880, 5760], split_sizes=(1, 1), repeats=2880?)" in note for note in groups.notes)


# ---- what is published

TWO = {"num_hidden_layers": 2}
PUBLISHED = {  # a class of transformers, and the numbers of its configuration that are not the class's own
    # huggingface.co/meta-llama/Meta-Llama-3-8B, config.json, as repeated in citsjtu2020/LLM-Prof, sglang/Model_Config.md
    "Llama-3-8B": ("Llama", {"vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8, **TWO}),
    # Qwen/Qwen3-8B, config.json, as repeated in Chen-Oliver/qwen3-8b-base, config.json
    "Qwen3-8B": ("Qwen3", {"vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 12288, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": False, **TWO}),
    # deepseek-ai/DeepSeek-V3, inference/configs/config_671B.json: transformers' own numbers
    "DeepSeek-V3": ("DeepseekV3", {"num_hidden_layers": 4, "first_k_dense_replace": 2}),
    # openai/gpt-oss-20b: transformers' own numbers are those of 120b, which has 128 experts
    "GPT-OSS-20B": ("GptOss", {"num_local_experts": 32, **TWO}),
    # mistralai/Mixtral-8x7B-v0.1: transformers' own numbers
    "Mixtral-8x7B": ("Mixtral", TWO),
    # google/gemma_pytorch, gemma/config.py, get_config_for_4b; rows of the table as transformers has them
    "Gemma-3-4B": ("Gemma3", {"vocab_size": 262208, "hidden_size": 2560, "intermediate_size": 10240, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, **TWO}),
    # microsoft/Phi-3-mini-4k-instruct: transformers' own numbers
    "Phi-3-mini": ("Phi3", TWO),
    # openai/whisper-large-v3: large of k2-fsa/sherpa-onnx, scripts/whisper/model-info.md, with 128 bands and one language more
    "Whisper-large": ("Whisper", {"vocab_size": 51866, "num_mel_bins": 128, "d_model": 1280, "encoder_attention_heads": 20, "decoder_attention_heads": 20, "encoder_ffn_dim": 5120, "decoder_ffn_dim": 5120, "encoder_layers": 2, "decoder_layers": 2}),
    # state-spaces/mamba, mamba_ssm/models/config_mamba.py and modules/mamba2.py: tied, 50277 tokens filled up to a multiple of 16
    "Mamba-2-2.7B": ("Mamba2", {"vocab_size": 50288, "hidden_size": 2560, "num_heads": 80, "head_dim": 64, "state_size": 128, "n_groups": 1, "expand": 2, "tie_word_embeddings": True, **TWO}),
}  # ViT-L: vit_large_patch16_224 of timm, which is not installed here: read in models that others made from timm/models/vision_transformer.py


def shapes_of(model: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(p.shape) for name, p in model.named_parameters()}


def fused_experts(shapes: dict) -> dict:
    "Mixtral's names as transformers 5 has them, which stacks its experts, w1 over w3."
    found = {name.replace("block_sparse_moe", "mlp"): shape for name, shape in shapes.items() if ".experts." not in name}
    for name, (rows, cols) in ((n, s) for n, s in shapes.items() if ".experts.0." in n):
        layer = name.partition(".block_sparse_moe")[0]
        if "w1" in name:
            found[f"{layer}.mlp.experts.gate_up_proj"] = (8, 2 * rows, cols)
        elif "w2" in name:
            found[f"{layer}.mlp.experts.down_proj"] = (8, rows, cols)
    return found


@pytest.mark.parametrize("name", PUBLISHED)
def test_names_and_shapes_are_those_of_transformers(name):
    import transformers

    kind, numbers = PUBLISHED[name]
    config = getattr(transformers, {"Gemma3": "Gemma3TextConfig"}.get(kind, f"{kind}Config"))(**numbers)
    with torch.device("meta"):
        theirs = getattr(transformers, {"Whisper": "WhisperForConditionalGeneration"}.get(kind, f"{kind}ForCausalLM"))(config)
        ours = shapes_of(MODELS[name]())
    assert (fused_experts(ours) if kind == "Mixtral" else ours) == shapes_of(theirs)


def test_what_alternates_by_transformers_own_word():
    "GPT-OSS's experts say that they are not concatenated, the others' that they are."
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
    from transformers import GptOssConfig

    with torch.device("meta"):
        assert GptOssExperts(GptOssConfig()).is_concatenated is False


def write_golden() -> None:
    GOLDEN.mkdir(parents=True, exist_ok=True)
    logging.getLogger("golfnb").setLevel(logging.ERROR)
    for name in MODELS:
        (GOLDEN / f"{name}.txt").write_text(table_of(name), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(write_golden())

"""Which rule each weight gets: the tables of twelve models as text, and what must hold for any of them.

    python tests/muon/test_param_groups.py      writes the tables of tests/muon/golden/param_groups again; read the difference
"""
import copy
import logging
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from golfnb.muon.grouping import find_blocks, group_table, param_groups
from golfnb.settings import GolfError

GOLDEN = Path(__file__).resolve().parent / "golden" / "param_groups"
SMALL = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=2, vocab_size=40)
EXPERTS = dict(**SMALL, num_key_value_heads=1, num_experts_per_tok=2)


class Block(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(d), nn.Linear(d, 2 * d), nn.Linear(2 * d, d)


class TwoHeads(nn.Module):
    "An actor and a critic; the heads are registered before the blocks."

    def __init__(self, d=32):
        super().__init__()
        self.actor, self.critic = nn.Linear(d, 6), nn.Sequential(nn.Linear(d, d), nn.Tanh(), nn.Linear(d, 1))
        self.stem, self.blocks = nn.Linear(10, d), nn.ModuleList(Block(d) for _ in range(3))


class Residual(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(d, d, 3, padding=1, bias=False), nn.BatchNorm2d(d)
        self.conv2, self.depthwise = nn.Conv2d(d, d, 1), nn.Conv2d(d, d, 3, groups=d)


def convnet() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 16, 3), Residual(16), Residual(16), nn.Conv2d(16, 32, 2, 2), Residual(32), nn.Linear(32, 5))


def flatten(name: str, p: nn.Parameter):
    return {"rule": "muon", "flatten": True} if p.ndim == 4 and p.shape[1] > 3 else None


def hf(model: str, config: str, **numbers) -> nn.Module:
    import transformers

    return getattr(transformers, model)(getattr(transformers, config)(**numbers))


def clip() -> nn.Module:
    text = {**SMALL, "max_position_embeddings": 8, "projection_dim": 12}
    vision = {**SMALL, "hidden_size": 24, "image_size": 8, "patch_size": 4, "projection_dim": 12}
    return hf("CLIPModel", "CLIPConfig", text_config=text, vision_config=vision, projection_dim=12)


MODELS = {
    "TransformerEncoder": lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 2, 48), 3),
    "Transformer": lambda: nn.Transformer(32, 2, 2, 3, 48),
    "GPT-2": lambda: hf("GPT2LMHeadModel", "GPT2Config", n_layer=3, n_embd=32, n_head=2, vocab_size=40, n_positions=8),
    "Llama": lambda: hf("LlamaForCausalLM", "LlamaConfig", **SMALL, num_key_value_heads=1),
    "T5": lambda: hf("T5ForConditionalGeneration", "T5Config", vocab_size=40, d_model=32, d_kv=16, d_ff=48, num_layers=3, num_decoder_layers=2, num_heads=2),
    "ViT": lambda: hf("ViTForImageClassification", "ViTConfig", **{**SMALL, "image_size": 8, "patch_size": 4}),
    "CLIP": clip,
    "Mamba": lambda: hf("MambaForCausalLM", "MambaConfig", vocab_size=40, hidden_size=32, state_size=4, num_hidden_layers=3),
    "Mixtral": lambda: hf("MixtralForCausalLM", "MixtralConfig", **EXPERTS, num_local_experts=4),
    "Qwen2-MoE": lambda: hf("Qwen2MoeForCausalLM", "Qwen2MoeConfig", **EXPERTS, num_experts=4, moe_intermediate_size=16, shared_expert_intermediate_size=24),
    "two heads": TwoHeads,
    "convolutions": convnet,
}
FILTERS = {"convolutions": flatten}
MUON, ADAMW, TURNED, FLAT = {"rule": "muon"}, {"rule": "adamw"}, {"rule": "muon", "transposed": True}, {"rule": "muon", "flatten": True}
QKV = {"rule": "muon", "split_sizes": (32, 32, 32)}
KEY = {  # model -> parameter -> rule and options of its group
    "TransformerEncoder": {"layers.0.self_attn.in_proj_weight": QKV, "layers.2.linear2.weight": MUON, "layers.1.self_attn.in_proj_bias": ADAMW, "layers.1.norm1.weight": ADAMW},
    "Transformer": {"encoder.layers.1.self_attn.in_proj_weight": QKV, "decoder.layers.2.multihead_attn.in_proj_weight": QKV, "decoder.layers.0.self_attn.out_proj.weight": MUON, "decoder.norm.weight": ADAMW},
    "GPT-2": {"transformer.h.0.attn.c_attn.weight": TURNED, "transformer.h.2.mlp.c_proj.weight": TURNED, "transformer.wte.weight": ADAMW, "transformer.wpe.weight": ADAMW, "transformer.h.1.mlp.c_fc.bias": ADAMW},
    "Llama": {"model.layers.0.self_attn.k_proj.weight": MUON, "model.layers.2.mlp.down_proj.weight": MUON, "model.embed_tokens.weight": ADAMW, "lm_head.weight": ADAMW},
    "T5": {"encoder.block.2.layer.1.DenseReluDense.wi.weight": MUON, "decoder.block.1.layer.1.EncDecAttention.o.weight": MUON, "shared.weight": ADAMW,
           "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight": ADAMW, "decoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight": ADAMW},
    "ViT": {"vit.layers.0.attention.q_proj.weight": MUON, "vit.layers.2.mlp.fc2.weight": MUON, "classifier.weight": ADAMW, "vit.embeddings.position_embeddings": ADAMW, "vit.embeddings.patch_embeddings.projection.weight": ADAMW},
    "CLIP": {"text_model.encoder.layers.0.mlp.fc1.weight": MUON, "vision_model.encoder.layers.2.self_attn.q_proj.weight": MUON, "visual_projection.weight": ADAMW, "text_projection.weight": ADAMW,
             "vision_model.embeddings.position_embedding.weight": ADAMW, "logit_scale": ADAMW},
    "Mamba": {"backbone.layers.0.mixer.in_proj.weight": MUON, "backbone.layers.2.mixer.x_proj.weight": MUON, "backbone.layers.1.mixer.dt_proj.weight": MUON, "backbone.layers.0.mixer.A_log": ADAMW,
              "backbone.layers.0.mixer.conv1d.weight": ADAMW, "backbone.layers.0.mixer.D": ADAMW, "backbone.embeddings.weight": ADAMW},
    "Mixtral": {"model.layers.0.mlp.experts.gate_up_proj": MUON, "model.layers.2.mlp.experts.down_proj": MUON, "model.layers.1.self_attn.v_proj.weight": MUON, "model.layers.0.mlp.gate.weight": ADAMW, "lm_head.weight": ADAMW},
    "Qwen2-MoE": {"model.layers.0.mlp.experts.gate_up_proj": MUON, "model.layers.2.mlp.shared_expert.down_proj.weight": MUON, "model.layers.0.mlp.gate.weight": ADAMW, "model.layers.1.mlp.shared_expert_gate.weight": ADAMW},
    "two heads": {"actor.weight": ADAMW, "critic.0.weight": ADAMW, "critic.2.weight": ADAMW, "stem.weight": ADAMW, "blocks.0.up.weight": MUON, "blocks.2.down.weight": MUON},
    "convolutions": {"1.conv1.weight": FLAT, "2.conv2.weight": FLAT, "3.weight": FLAT, "4.conv1.weight": FLAT, "1.depthwise.weight": ADAMW, "0.weight": ADAMW, "5.weight": ADAMW, "4.norm1.weight": ADAMW},
}


def options(groups: list[dict]) -> dict[str, dict]:
    "Name of each parameter -> rule and options of its group."
    found = {}
    for group in groups:
        how = {key: value for key, value in group.items() if key not in ("params", "name")}
        found.update({name: how for name, _ in group["params"]})
    return found


def rules(model: nn.Module, **how) -> dict[str, str]:
    return {name: found["rule"] for name, found in options(param_groups(model, **how)).items()}


def table_of(name: str) -> str:
    return group_table(param_groups(MODELS[name](), filter=FILTERS.get(name))) + "\n"


@pytest.mark.parametrize("name", MODELS)
def test_the_table_is_the_golden_one(name):
    golden = (GOLDEN / f"{name.replace(' ', '_')}.txt").read_text(encoding="utf-8")
    assert table_of(name) == golden


@pytest.mark.parametrize("name", MODELS)
def test_every_parameter_has_its_rule_once(name):
    model = MODELS[name]()
    groups = param_groups(model, filter=FILTERS.get(name))
    pairs = [pair for group in groups for pair in group["params"]]
    assert sorted(n for n, _ in pairs) == sorted(n for n, _ in model.named_parameters())
    assert all(p is model.get_parameter(n) for n, p in pairs)
    found = options(groups)
    assert {n: found[n] for n in KEY[name]} == KEY[name]
    assert len({g["name"] for g in groups}) == len(groups)
    for group in groups:
        for n, p in group["params"]:
            assert "split_sizes" not in group or sum(group["split_sizes"]) == len(p), n
            assert group["rule"] == "adamw" or p.ndim in (2, 3) or group["flatten"], n


def test_every_optimizer_of_torch_takes_the_groups_and_the_table_takes_them_back():
    groups = param_groups(MODELS["TransformerEncoder"]())
    table = group_table(groups)
    optimizer = torch.optim.AdamW(groups)
    assert [g["name"] for g in optimizer.param_groups] == ["muon", "muon split", "adamw"]
    assert group_table(optimizer.param_groups) == table
    unnamed = torch.optim.SGD([nn.Parameter(torch.zeros(2, 3)) for _ in range(3)])
    assert "parameter.0-2  3 x [2, 3]" in group_table(unnamed.param_groups)


def test_the_table_counts_every_element():
    model = MODELS["Qwen2-MoE"]()
    lines = group_table(param_groups(model)).splitlines()[1:]
    elements = {"all" if line.startswith("all ") else "rows": 0 for line in lines}
    for line in lines:
        elements["all" if line.startswith("all ") else "rows"] += int(line.split()[-3].replace(",", ""))
    assert elements["all"] == elements["rows"] == sum(p.numel() for p in model.parameters())


def test_ranges_of_names_are_exact():
    odd = nn.ModuleDict({f"{i}": layers(count=2 + i % 2) for i in range(4)})
    rows = [" ".join(line.split()) for line in group_table(param_groups(odd)).splitlines()]
    assert "muon 0,2.0-1.up.weight 4 x [8, 4] 128 15.2 %" in rows and "1,3.0-2.up.weight 6 x [8, 4] 192 22.9 %" in rows
    many = nn.ModuleList(Block(2) if i % 2 else nn.Identity() for i in range(20))
    assert "1,3,5,...,19.up.weight 10 x [4, 2]" in " ".join(group_table(param_groups(many)).split())


# --- which modules are blocks


class Bare(nn.Module):
    "A block without layers."

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Parameter(torch.zeros(8, 4)), nn.Parameter(torch.zeros(4, 8))


class Numbered(nn.Module):
    "Blocks as attributes, and one of their class under another name."

    def __init__(self):
        super().__init__()
        self.stem, self.head = nn.Sequential(nn.Linear(4, 4)), nn.Linear(4, 4)
        self.block1, self.block2, self.between = (Block(4) for _ in range(3))


class NumberedLinears(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc2, self.norm1, self.norm2 = nn.Linear(4, 4), nn.Linear(4, 4), nn.LayerNorm(4), nn.LayerNorm(4)


def layers(kind=nn.ModuleList, count=2):
    return kind(Block(4) for _ in range(count)) if kind is nn.ModuleList else kind(*(Block(4) for _ in range(count)))


BLOCKS = {
    "Sequential": (lambda: nn.Sequential(nn.Embedding(5, 4), Block(4), Block(4), nn.Linear(4, 5)), ["1.", "2."]),
    "one layer in a ModuleList": (lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 1, 8), 1), ["layers.0."]),
    "one layer in a Sequential": (lambda: nn.Sequential(nn.Embedding(5, 4), Block(4), nn.Linear(4, 5)), [""]),
    "ModuleDict around a ModuleList": (lambda: nn.ModuleDict({"wte": nn.Embedding(5, 4), "h": layers()}), ["h.0.", "h.1."]),
    "blocks in blocks": (lambda: nn.ModuleList(nn.ModuleDict({"experts": layers(count=3)}) for _ in range(2)), ["0.", "1."]),
    "lists of parts": (lambda: nn.ModuleList(nn.ModuleList([Block(4), nn.Linear(4, 4)]) for _ in range(2)), ["0.", "1."]),
    "another between two": (lambda: nn.ModuleList([nn.Linear(4, 4), Block(4), nn.Sequential(nn.Linear(4, 4)), Block(4), nn.Linear(4, 4)]), ["1.", "2.", "3."]),
    "parameters without layers": (lambda: nn.ModuleList(Bare() for _ in range(2)), ["0.", "1."]),
    "features and classifier": (lambda: nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), nn.Sequential(nn.Dropout(), nn.Linear(4, 2))), [""]),
    "linears alone": (lambda: nn.ModuleList(nn.Linear(4, 4) for _ in range(3)), [""]),
    "numbered attributes": (lambda: Numbered(), ["block1.", "block2.", "between."]),
    "numbered linears": (lambda: NumberedLinears(), [""]),
    "one layer, many times": (lambda: nn.ModuleList([Block(4)] * 3), ["0.", "1.", "2."]),
}


@pytest.mark.parametrize("what", BLOCKS)
def test_blocks_are_what_repeats(what):
    build, wanted = BLOCKS[what]
    assert find_blocks(build()) == wanted


def compiled_blocks(model: nn.Module) -> nn.Module:
    for i, block in enumerate(model.blocks):
        model.blocks[i] = torch.compile(block)
    return model


def checkpointed(model: nn.Module) -> nn.Module:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
        apply_activation_checkpointing,
    )

    apply_activation_checkpointing(model, check_fn=lambda m: isinstance(m, Block))
    return model


def first_block_compiled(model: nn.Module) -> nn.Module:
    model.blocks[0] = torch.compile(model.blocks[0])
    return model


@pytest.mark.parametrize("wrap", [torch.compile, compiled_blocks, first_block_compiled, checkpointed, lambda m: torch.compile(compiled_blocks(m))])
def test_wrappers_change_nothing(wrap):
    model = TwoHeads()
    wanted = options(param_groups(model))
    model = wrap(model)
    assert options(param_groups(model)) == wanted
    assert rules(model, heads=["blocks.0.up"])["blocks.0.up.weight"] == "adamw"


def test_data_parallel_models_are_looked_into():
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        model = nn.parallel.DistributedDataParallel(TwoHeads())
        assert options(param_groups(model)) == options(param_groups(TwoHeads())) == options(param_groups(torch.compile(model)))
    finally:
        torch.distributed.destroy_process_group()


# --- what is in a block and not for Muon, and the reverse


def in_blocks(make, **how) -> dict[str, dict]:
    "Options of the parameters of a module that is a part of two blocks, by its own names."
    model = nn.ModuleList(nn.ModuleDict({"part": make(), "other": nn.Linear(64, 64)}) for _ in range(2))
    return {name.removeprefix("0.part."): found for name, found in options(param_groups(model, **how)).items() if name.startswith("0.part.")}


class Holds(nn.Module):
    "Parameters of given shapes, and a child."

    def __init__(self, child=None, **shapes):
        super().__init__()
        self.child = child
        for name, shape in shapes.items():
            setattr(self, name, nn.Parameter(torch.zeros(shape)))


class OwnLinear(nn.Module):
    def __init__(self, a, b):
        super().__init__()
        self.kernel = nn.Parameter(torch.zeros(b, a))


class Experts(nn.Module):
    "A router beside a list of experts."

    def __init__(self, d=16, experts=6):
        super().__init__()
        self.route, self.experts = OwnLinear(d, experts), nn.ModuleList(Block(d) for _ in range(experts))
        self.shared = nn.Linear(d, experts + 2)


def test_a_matrix_of_any_class_and_name_is_for_muon():
    assert in_blocks(lambda: OwnLinear(8, 12)) == {"kernel": MUON}
    assert in_blocks(lambda: Holds(w=(4, 8, 12), q=(8, 12), scale=(8,))) == {"w": MUON, "q": MUON, "scale": ADAMW}


def test_routers_are_told_by_the_number_of_experts():
    found = in_blocks(Experts)
    assert found["route.kernel"] == ADAMW and found["shared.weight"] == found["experts.5.up.weight"] == MUON
    assert in_blocks(lambda: Holds(w=(4, 8, 12), gate=(4, 12), turned=(12, 4), other=(5, 12), square=(4, 4))) == {"w": MUON, "gate": ADAMW, "turned": ADAMW, "other": MUON, "square": MUON}
    assert in_blocks(lambda: Holds(nn.Conv1d(8, 8, 3), w=(8, 16)))["w"] == MUON, "filters are no experts"


@pytest.mark.parametrize("make, name", [
    (lambda: nn.Embedding(8, 8), "weight"), (lambda: nn.EmbeddingBag(8, 8), "weight"), (lambda: nn.LayerNorm((8, 8)), "weight"), (lambda: nn.Conv1d(8, 8, 3), "weight"),
    (lambda: nn.Conv2d(8, 8, 3), "weight"), (lambda: nn.utils.parametrizations.weight_norm(nn.Conv1d(8, 8, 3)), "parametrizations.weight.original1"),
    (lambda: nn.Linear(8, 1), "weight"), (lambda: nn.Linear(256, 4), "weight"), (lambda: Holds(low=(512, 8)), "low"), (lambda: Holds(place=(1, 8, 8)), "place"),
    (lambda: Holds(A_log=(8, 4)), "A_log"), (lambda: Holds(relative_position_bias_table=(9, 3)), "relative_position_bias_table"), (lambda: Holds(w=(2, 3, 4, 5)), "w"),
])
def test_what_is_no_hidden_matrix_is_for_adamw(make, name):
    assert in_blocks(make)[name] == ADAMW


def test_thin_is_64_times_as_long_as_wide():
    found = in_blocks(lambda: Holds(thin=(2, 128), less=(2, 127), batch=(5, 2, 128)))
    assert found == {"thin": ADAMW, "less": MUON, "batch": ADAMW}


def test_a_long_matrix_that_is_wide_is_no_gate():
    "DeepSeek-V3's kv_b_proj at its size and with twice the heads; what is as long, and narrow."
    class Mla(nn.Module):
        def __init__(self):
            super().__init__()
            with torch.device("meta"):
                self.kv_b_proj, self.twice, self.gates = nn.Linear(512, 32768, bias=False), nn.Linear(512, 65536, bias=False), nn.Linear(8192, 127, bias=False)

    found = in_blocks(Mla)
    assert found == {"kv_b_proj.weight": MUON, "twice.weight": MUON, "gates.weight": ADAMW}


@pytest.mark.parametrize("width", [64, 896, 4096])
@pytest.mark.parametrize("rank", [2, 16, 128])
def test_both_halves_of_an_adapter_have_one_rule_whatever_their_shapes(width, rank):
    "Named as PEFT, diffusers and torchtune do."
    class Lora(nn.Module):
        def __init__(self):
            super().__init__()
            with torch.device("meta"):
                self.base = nn.Linear(width, 4 * width, bias=False)
                self.lora_A, self.lora_B = (nn.ModuleDict({"default": nn.Linear(*shape, bias=False)}) for shape in ((width, rank), (rank, 4 * width)))
                self.lora_down, self.lora_up = nn.Linear(width, rank), nn.Linear(rank, width)

    found = in_blocks(Lora)
    assert found.pop("base.weight") == MUON and all(how == ADAMW for how in found.values()) and len(found) == 6


def test_a_marked_parameter_is_for_adamw():
    holder = Holds(state=(8, 4), w=(8, 4))
    holder.state._no_weight_decay = True
    assert in_blocks(lambda: holder) == {"state": ADAMW, "w": MUON}


def test_weight_norm_leaves_a_linear_a_matrix():
    found = in_blocks(lambda: nn.utils.parametrizations.weight_norm(nn.Linear(8, 12)))
    assert found["parametrizations.weight.original1"] == MUON and found["parametrizations.weight.original0"] == ADAMW


@pytest.mark.parametrize("make, sizes", [
    (lambda: nn.MultiheadAttention(16, 2), {"in_proj_weight": (16, 16, 16)}), (lambda: nn.MultiheadAttention(16, 2, kdim=8), {}),
    (lambda: nn.LSTM(12, 16), {"weight_ih_l0": (16,) * 4, "weight_hh_l0": (16,) * 4}), (lambda: nn.LSTM(12, 16, proj_size=4), {"weight_ih_l0": (16,) * 4, "weight_hh_l0": (16,) * 4}),
    (lambda: nn.GRUCell(12, 16), {"weight_ih": (16,) * 3, "weight_hh": (16,) * 3}), (lambda: nn.RNN(12, 16), {}),
])
def test_what_torch_fuses_is_split(make, sizes):
    found = in_blocks(make)
    assert {name: how["split_sizes"] for name, how in found.items() if "split_sizes" in how} == sizes
    assert all(how["rule"] == "muon" for name, how in found.items() if make().get_parameter(name).ndim == 2)


def test_fused_matrices_of_two_widths_are_two_groups_with_two_names():
    model = nn.ModuleList(nn.ModuleList(nn.TransformerEncoderLayer(d, 2, 16) for _ in range(2)) for d in (8, 16))
    assert [g["name"] for g in param_groups(model)] == ["muon", "muon split", "muon split 2", "adamw"]


def test_transposed_experts_are_seen():
    holder = Holds(up=(4, 8, 12))
    holder.is_transposed = True
    assert in_blocks(lambda: holder) == {"up": TURNED}


# --- tied, frozen, without blocks


def test_shared_parameters_have_one_rule():
    model = TwoHeads()
    model.blocks[1].up.weight = model.blocks[0].up.weight
    model.stem.weight = model.blocks[2].down.weight
    model.late = nn.Linear(64, 32)
    model.late.weight = model.blocks[1].down.weight
    found = rules(model)
    assert found["blocks.0.up.weight"] == "muon" and "blocks.1.up.weight" not in found
    assert found["stem.weight"] == "adamw" and "blocks.2.down.weight" not in found, "outside at its first place"
    assert found["blocks.1.down.weight"] == "adamw", "outside at its second place"
    assert rules(model, heads=["blocks.1.up"])["blocks.0.up.weight"] == "adamw", "a head at its second place"
    assert rules(nn.ModuleList([Block(4)] * 3)) == {"0.norm.weight": "adamw", "0.norm.bias": "adamw", "0.up.weight": "muon", "0.up.bias": "adamw", "0.down.weight": "muon", "0.down.bias": "adamw"}


def test_frozen_parameters_are_in_no_group():
    model = TwoHeads()
    model.blocks[0].requires_grad_(False)
    found = rules(model, heads=["blocks.0"])
    assert sorted(found) == sorted(n for n, p in model.named_parameters() if p.requires_grad) and len(found) == 20


def test_without_blocks_the_last_matrix_is_the_head():
    mlp = nn.Sequential(nn.Embedding(9, 8), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 9))
    wanted = {"0.weight": "adamw", "1.weight": "muon", "3.weight": "muon", "5.weight": "adamw"}
    assert {n: r for n, r in rules(mlp).items() if n.endswith("weight")} == wanted
    assert rules(mlp, heads=["1"])["1.weight"] == "adamw" and rules(mlp, heads=["1"])["5.weight"] == "muon"
    assert set(rules(nn.Linear(4, 4)).values()) == {"adamw"}
    (said,) = param_groups(mlp).notes
    assert "last matrix of a model without repeated blocks" in said and "5.weight" in said
    assert not param_groups(mlp, heads=["1"]).notes and not param_groups(mlp, filter=lambda n, p: "muon" if n == "5.weight" else None).notes


# --- heads and filters


def test_heads_are_names_of_parameters_or_modules():
    model = TwoHeads()
    for heads in (["blocks.1"], ["blocks.1.up", "blocks.1.down.weight"], "blocks.1", ("actor", "blocks.1")):
        found = rules(model, heads=heads)
        assert found["blocks.1.up.weight"] == found["blocks.1.down.weight"] == "adamw" and found["blocks.0.up.weight"] == "muon"


@pytest.mark.parametrize("head", ["mtp_head", "act", "blocks.1.u", "blocks.7"])
def test_an_unknown_head_is_refused(head):
    with pytest.raises(GolfError, match=f"{head}.*blocks.2.down.bias"):
        param_groups(TwoHeads(), heads=["actor", head])


def test_a_filter_overrules():
    def choose(name, p):
        return {"actor.weight": "muon", "blocks.0.up.weight": "adamw", "blocks.1.up.weight": {"rule": "muon", "split_sizes": [40, 24]},
                "blocks.2.up.weight": {"rule": "muon", "transposed": True, "split_sizes": (16, 16)}, "stem.weight": {"rule": "adamw"}}.get(name)

    found = options(param_groups(TwoHeads(), filter=choose))
    assert found["actor.weight"] == MUON and found["blocks.0.up.weight"] == found["stem.weight"] == ADAMW and found["blocks.0.down.weight"] == MUON
    assert found["blocks.1.up.weight"] == {"rule": "muon", "split_sizes": (40, 24)} and found["blocks.2.up.weight"] == {**TURNED, "split_sizes": (16, 16)}
    assert options(param_groups(TwoHeads(), filter=lambda n, p: {"rule": "muon", "flatten": False} if n == "blocks.0.up.weight" else None)) == options(param_groups(TwoHeads()))


WEIGHT, CONV, BIAS = "blocks.0.up.weight", "conv.weight", "stem.bias"


@pytest.mark.parametrize("name, answer, words", [
    (WEIGHT, True, "True"), (WEIGHT, False, "False"), (WEIGHT, "mun", "'mun'"), (WEIGHT, "normuon", "group.'rule'. = 'normuon'"), (WEIGHT, {}, "{}"), (WEIGHT, {"flatten": True}, "'rule'"), (WEIGHT, {"rule": ["muon"]}, "'rule'"),
    (WEIGHT, {"rule": "muon", "fltten": True}, "'fltten'"), (WEIGHT, {"rule": "adamw", "flatten": True}, "'flatten'"), (WEIGHT, {"rule": "muon", "flatten": True}, r"\(64, 32\)"),
    (WEIGHT, {"rule": "muon", "split_sizes": (32, 16)}, "64 outputs"), (WEIGHT, {"rule": "muon", "split_sizes": 3}, "64 outputs"), (WEIGHT, {"rule": "muon", "split_sizes": (96, -32)}, "64 outputs"),
    (WEIGHT, {"rule": "muon", "split_sizes": (32, 32), "transposed": True}, "32 outputs"), (WEIGHT, {"rule": "muon", "split_sizes": (32.0, 32.0)}, "64 outputs"),
    (CONV, "muon", "'flatten'"), (BIAS, "muon", r"stem.bias.*\(32,\)"),
])
def test_what_is_no_answer_is_refused(name, answer, words):
    model = TwoHeads()
    model.conv = nn.Conv2d(3, 4, 3)
    with pytest.raises(GolfError, match=words) as refused:
        param_groups(model, filter=lambda n, p: answer if n == name else None)
    assert name in str(refused.value)


@pytest.mark.parametrize("model, words", [
    ([nn.Parameter(torch.zeros(2))], "found a list"), (nn.Linear(2, 2).requires_grad_(False), "Linear.*gradient"), (nn.ReLU(), "ReLU.*gradient"), (nn.Sequential(nn.LazyLinear(4)), "0.weight"),
])
def test_a_model_without_groups_is_refused(model, words):
    with pytest.raises(GolfError, match=words):
        param_groups(model)


def test_a_model_without_storage_has_groups():
    with torch.device("meta"):
        model = TwoHeads()
    assert rules(model) == rules(TwoHeads())


def test_groups_change_nothing():
    model = MODELS["T5"]()
    before = copy.deepcopy(model.state_dict())
    param_groups(model)
    assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items()) and list(before) == list(model.state_dict())


# --- the warning


def ours(caplog) -> list:
    "What golfnb said; transformers has warnings of its own."
    return [record for record in caplog.records if record.name == "golfnb"]


def test_little_for_muon_is_told_with_the_largest(caplog):
    param_groups(convnet())
    (record,) = ours(caplog)
    assert record.name == "golfnb" and record.levelno == logging.WARNING
    words = record.getMessage()
    assert "Muon gets 0 of" in words and words.index("1-2.conv1.weight (convolution, 2 x [16, 16, 3, 3])") > words.index("4.conv1.weight (convolution, 1 x [32, 32, 3, 3])")
    assert "depthwise" not in words, "not among the largest three"


@pytest.mark.parametrize("name", MODELS)
def test_models_of_the_tables_are_warned_of_fused_matrices_alone(name, caplog):
    param_groups(MODELS[name](), filter=FILTERS.get(name))
    fused = {"GPT-2": "c_attn.weight (3 x [32, 96], split_sizes=(32, 32, 32)?)", "Mamba": "in_proj.weight", "Mixtral": "gate_up_proj (3 x [4, 96, 32], split_sizes=(48, 48)?)", "Qwen2-MoE": "gate_up_proj"}
    said = [record.getMessage() for record in ours(caplog)]
    assert len(said) == (name in fused)
    assert not said or (said[0].startswith("several matrices by their names") and fused[name] in said[0])


class Fused(nn.Module):
    "Names of ModernBERT, timm, DiT, DeepSeek and grouped queries; T5's wi and an ordinary MLP, which are not fused."

    def __init__(self):
        super().__init__()
        self.attn = nn.ModuleDict({"Wqkv": nn.Linear(8, 24), "qkv_proj": nn.Linear(8, 16), "kv_b_proj": nn.Linear(8, 32)})
        self.mlp = nn.ModuleDict({"Wi": nn.Linear(8, 32), "wi": nn.Linear(8, 32), "up": nn.Linear(8, 32), "wide": nn.Linear(8, 24), "gate_up_proj": nn.Linear(8, 22)})
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(8, 48))


def test_matrices_that_look_fused_are_named_with_the_sizes_to_write(caplog):
    model = nn.ModuleList(Fused() for _ in range(2))
    groups = param_groups(model)
    (said,) = [r.getMessage() for r in ours(caplog)]
    for words in ("0-1.attn.Wqkv.weight (2 x [24, 8], split_sizes=(8, 8, 8)?)", "0-1.attn.qkv_proj.weight (2 x [16, 8], split_sizes=(8, 4, 4)?)", "0-1.attn.kv_b_proj.weight (2 x [32, 8], for n heads with keys of k, values of v split_sizes=(k, v), repeats=n?)",
                  "0-1.mlp.Wi.weight (2 x [32, 8], split_sizes=(16, 16)?)", "0-1.mlp.gate_up_proj.weight (2 x [22, 8], split_sizes=(11, 11)?)", "0-1.adaLN_modulation.1.weight (2 x [48, 8])"):
        assert words in said
    assert ".wi." not in said and ".up." not in said and said == groups.notes[0]
    (three,) = groups.notes[1:]
    assert "(2 x [24, 8], split_sizes=(8,) * 3?)" in three and "wi.weight" not in three and "0-1.mlp.wide.weight" in three and "Wqkv" not in three


def test_a_filter_settles_what_is_fused(caplog):
    def settle(name, p):
        if "Wqkv" in name and p.ndim == 2:
            return {"rule": "muon", "split_sizes": (8, 8, 8)}
        return "muon" if p.ndim == 2 else None
    assert param_groups(nn.ModuleList(Fused() for _ in range(2)), filter=settle).notes == () and not ours(caplog)


def test_what_a_threshold_decides_is_said_with_it(caplog):
    with caplog.at_level(logging.INFO, "golfnb"):
        groups = param_groups(nn.ModuleList(Holds(gate=(2, 128), low=(128, 8192), up=(8, 4)) for _ in range(2)))
    thin, long = groups.notes
    assert thin.startswith("for AdamW, since 64 times") and "narrower than 128: 0-1.gate (2 x [2, 128])" in thin
    assert long == "for Muon, though 64 times as long as wide or more: 0-1.low (2 x [128, 8192])"
    assert [r.getMessage() for r in ours(caplog)] == [thin, long]


def test_what_is_no_matter_of_choice_is_not_warned_of(caplog):
    big = nn.ModuleList(nn.ModuleDict({"table": nn.Embedding(500, 8), "up": nn.Linear(8, 8), "head": nn.Linear(8, 500)}) for _ in range(2))
    param_groups(big, heads=["0.head", "1.head"])
    param_groups(nn.Sequential(nn.Embedding(500, 8), nn.Linear(8, 8), nn.Linear(8, 500)))
    param_groups(convnet(), filter=lambda name, p: "adamw")
    assert not ours(caplog)
    param_groups(nn.ModuleList(Holds(up=(16, 8), conv=(8, 2, 2, 4)) for _ in range(2)))  # half and half
    assert not ours(caplog)
    param_groups(nn.ModuleList(Holds(up=(16, 8), conv=(8, 2, 2, 4), more=(1, 1)) for _ in range(2)))
    assert "256 of 514" in caplog.text


def write_golden():
    GOLDEN.mkdir(parents=True, exist_ok=True)
    for name in MODELS:
        (GOLDEN / f"{name.replace(' ', '_')}.txt").write_text(table_of(name), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(write_golden())

"""Configurations: the named variants' sizes, every accepted spelling, and errors that name the field."""

import copy
import dataclasses
import json
import math
import random
import zlib

import goldens
import mlx.core as mx
import numpy as np
import pytest
from grids import one_in_three
from mlx.utils import tree_flatten
from tiny_models import tiny_directory

from moeflux_mlx.errors import ConfigError, ModelFileError, RequestError
from moeflux_mlx.families.deepseek_v41 import USUAL as USUAL_OF_V41
from moeflux_mlx.families.longcat import USUAL
from moeflux_mlx.families.muse_spark import USUAL as USUAL_OF_MUSE
from moeflux_mlx.families.names import canonical_name
from moeflux_mlx.families.registry import FAMILIES
from moeflux_mlx.files import directory, read_json
from moeflux_mlx.formats.record import STRIDE_ALIGNMENT, ExpertLayout
from moeflux_mlx.kinds import SILU, BlockSums, QueryGrowth
from moeflux_mlx.mixers.delta.spec import Delta
from moeflux_mlx.mixers.grouped.spec import GroupedQuery
from moeflux_mlx.mixers.latent.module import softmax_scale
from moeflux_mlx.mixers.latent.spec import Latent
from moeflux_mlx.model.decoder import Model
from moeflux_mlx.opening.engine import load_model
from moeflux_mlx.ops.rope import Rope
from moeflux_mlx.packing.source_format import SourceFormat
from moeflux_mlx.planning.budget import plan_memory
from moeflux_mlx.planning.demand import Demand
from moeflux_mlx.planning.machine import Figures
from moeflux_mlx.quant import Quant, entries
from moeflux_mlx.spec import ModelArgs, family_name, variants

GIB = 2**30
EVERY = (*goldens.FAMILIES, *goldens.KIN)
# name: expert bytes, layer file bytes, MoE layers, total GiB (arithmetic on the published shapes)
BLOCK = 4096  # bytes; records with biases are padded to a multiple of it, others to whole pages
SIZES = {
    "qwen3-30b-a3b": (2654208, 339738624, 48, 15.19),
    "qwen3-235b-a22b": (10616832, 1358954496, 94, 118.97),
    "qwen3-next-80b-a3b": (1769472, 905969664, 48, 40.50),
    "qwen3.5-35b-a3b": (1769472, 452984832, 40, 16.88),
    "qwen3.6-35b-a3b": (1769472, 452984832, 40, 16.88),
    "qwen3.5-122b-a10b": (5308416, 1358954496, 48, 60.75),
    "qwen3.5-397b-a17b": (7077888, 3623878656, 60, 202.50),
    "qwen3.8-flash-next-125b": (2768896, 1417674752, 48, 63.38),
    "minimax-m3-428b": (31850496, 4076863488, 57, 216.42),
    "cogito-v2-671b": (24772608, 6341787648, 58, 342.56),
    "g9v3-39b-a5b": (1769472, 566231040, 37, 19.51),
    "glm-4.5-air": (9732096, 1245708288, 45, 52.21),
    "glm-4.5v": (9732096, 1245708288, 45, 52.21),
    "glm-4.7": (13271040, 2123366400, 89, 176.00),
    "deepseek-v3.2": (24772608, 6341787648, 58, 342.56),
    "deepseek-v4.1-flash-552b": (19906560, 7644119040, 40, 284.77),
    "deepseek-v4-flash": (14155776, 3623878656, 43, 145.12),
    "glm-5.3-flash-321b": (14155776, 4076863488, 42, 159.47),
    "glm-5-744b": (21233664, 5435817984, 75, 379.69),
    "glm-4.7-flash": (5308416, 339738624, 46, 14.55),
    "hy3-295b-a21b": (10616832, 2038431744, 79, 149.98),
    "k-exaone-236b-a23b": (21233664, 2717908992, 47, 118.97),
    "kimi-k2.6": (24772608, 9512681472, 60, 531.56),
    "minimax-m2-230b-a10b": (7962624, 2038431744, 62, 117.70),
    "mistral-small-4-119b": (14155776, 1811939328, 36, 60.75),
    "lfm2-8b-a1b": (6193152, 198180864, 22, 4.06),
    "nemotron-3-nano-30b-a3b": (5615616, 718798848, 23, 15.40),
    "nemotron-3-super-120b-a12b": (3096576, 1585446912, 40, 59.06),
    "gemma-4-26b-a4b": (3358720, 429916160, 30, 12.01),
    "qwen3-vl-30b-a3b": (2654208, 339738624, 48, 15.19),
    "gpt-oss-20b": (14016512, 448528384, 24, 10.03),
    "gpt-oss-120b": (14016512, 1794113536, 36, 60.15),
    "mimo-v2-flash-309b": (14155776, 3623878656, 47, 158.62),
    "step-3.5-flash-196b": (8847360, 2548039680, 42, 99.67),
    "laguna-xs-2.1-33b": (1769472, 452984832, 39, 16.45),
    "solar-open-100b": (8847360, 1132462080, 48, 50.62),
    "olmoe-1b-7b": (3538944, 226492416, 16, 3.38),
    "qwen1.5-moe-a2.7b": (4866048, 291962880, 24, 6.53),
    "mixtral-8x7b": (99090432, 792723456, 32, 23.62),
    "mixtral-8x22b": (169869312, 1358954496, 56, 70.88),
    "ernie-4.5-21b-a3b": (6635520, 424673280, 27, 10.68),
    "trinity-mini-26b-a3b": (3538944, 452984832, 30, 12.66),
    "trinity-large-400b-a13b": (15925248, 4076863488, 54, 205.03),
    "flint-40b-a2.5b": (1769472, 452984832, 47, 19.83),
    "ling-3-tiny-8b-a1b": (1327104, 169869312, 23, 3.64),
    "ling-3-flash-124b-a5b": (3325952, 1702887424, 40, 63.44),
    "kimi-linear-48b-a3b": (3981312, 1019215872, 26, 24.68),
    "kimi-k3-2800b-a104b": (18579456, 16647192576, 92, 1426.36),
    "granite-4.0-h-tiny-7b-a1b": (1327104, 84934656, 40, 3.16),
    "granite-4.0-h-small-32b-a9b": (5308416, 382205952, 40, 14.24),
    "llama-4-scout-109b-a17b": (70778880, 1132462080, 48, 50.62),
    "llama-4-maverick-400b-a17b": (70778880, 9059696640, 24, 202.5),
    "north-mini-code-30b-a3b": (2654208, 339738624, 48, 15.19),
    "longcat-flash-562b-a27b": (21233664, 10871635968, 28, 283.5),
    "beam-501b-a23b": (22118400, 5662310400, 49, 258.40),
    "hy4-preview-770b-a49b": (21233664, 5435817984, 77, 389.81),
    "hy4-770b-a49b": (21233664, 5435817984, 77, 389.81),
    "mistral-large-4-1t-a52b": (63700992, 8153726976, 71, 539.16),
    "sarvam-30b": (7077888, 905969664, 18, 15.19),
    "sarvam-105b": (14155776, 1811939328, 31, 52.31),
    "mellum-2-12b-a2.5b": (3489792, 223346688, 28, 5.82),
    "dots1-142b-a14b": (9732096, 1245708288, 61, 70.77),
    "k2-horizon-mova-36b-a4b": (3317760, 331776000, 45, 17.86),  # with its value experts: layout.json of version 4
    "hunyuan-a13b-80b": (21233664, 1358954496, 32, 40.5),
    "dots3-note-prev-280b-a15b": (13271040, 3397386240, 45, 142.38),
    "muse-spark-816b-a42b": (28311552, 7247757312, 62, 418.50),
    "a.x-k2-light-20b": (1769472, 226492416, 47, 9.91),
    "inkling-2-mini-26b": (4489216, 574619648, 24, 12.84),
    "inkling-2-small-594b-a19b": (17924096, 6882852864, 48, 307.69),
    "inkling-small-276b-a12b": (14155776, 3623878656, 40, 135.0),
    "kolibri-1-75b": (2211840, 849346560, 50, 39.55),
}


YARN = {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096}
ROPES_OF_BEAM = ("sliding_attention", "full_attention")


def config_of(name):
    return read_json(directory("configs") / f"{name}.json")


def test_variants_are_the_named_ones():
    assert variants() == sorted(SIZES)


@pytest.mark.parametrize("name", SIZES)
def test_sizes(name):
    layout = ExpertLayout.from_args(ModelArgs.from_variant(name))
    expert, layer, count, total = SIZES[name]
    assert layout.record.stride == expert
    assert expert in [-(-layout.record.size // unit) * unit for unit in (BLOCK, STRIDE_ALIGNMENT)]
    assert layout.largest_layer == layer
    assert len(layout.moe_layers) == count
    assert round(layout.total_bytes / GIB, 2) == total


def test_cogito_streams_layers_3_to_60():
    args = ModelArgs.from_variant("cogito-v2-671b")
    assert args.moe_layers == tuple(range(3, 61))
    assert args.head_dim == 192 and args.attention.rotation.dims == 64
    assert args.experts.shared.width == 2048


def test_qwen_next_derives_layer_types_from_the_interval():
    kinds = [type(mixer) for mixer in ModelArgs.from_variant("qwen3-next-80b-a3b").mixers]
    assert kinds[:4] == [Delta, Delta, Delta, GroupedQuery] and kinds.count(GroupedQuery) == 12


@pytest.mark.parametrize("name", ["qwen3-30b-a3b", "qwen3-next-80b-a3b", "cogito-v2-671b"])
def test_transformers5_spelling_reads_the_same(name):
    config = config_of(name)
    new = copy.deepcopy(config)
    scaling = new.pop("rope_scaling") or {"rope_type": "default"}
    new["rope_parameters"] = {**scaling, "rope_theta": new.pop("rope_theta")}
    if "type" in new["rope_parameters"]:
        new["rope_parameters"]["rope_type"] = new["rope_parameters"].pop("type")
    if "partial_rotary_factor" in new:
        new["rope_parameters"]["partial_rotary_factor"] = new.pop("partial_rotary_factor")
    if "num_experts" in new:
        new["num_local_experts"] = new.pop("num_experts")
    assert ModelArgs.from_dict(new) == ModelArgs.from_dict(config)


def test_nested_and_flat_text_config_read_the_same():
    config = config_of("qwen3.6-35b-a3b")
    assert ModelArgs.from_dict(config["text_config"]) == ModelArgs.from_dict(config)


def test_generation_config_decides_the_end_of_text():
    config = config_of("qwen3.5-35b-a3b")
    assert ModelArgs.from_dict(config).eos_token_ids == (248044,)
    assert ModelArgs.from_dict(config, {"eos_token_id": [248046, 248044]}).eos_token_ids == (248046, 248044)


def test_quantization_overrides():
    config = config_of("qwen3-30b-a3b")
    config["quantization"] = {
        "group_size": 64, "bits": 4, "mode": "affine",
        "model.layers.0.mlp.gate": {"group_size": 64, "bits": 8}, "lm_head": False,
    }  # fmt: skip
    quantization = ModelArgs.from_dict(config).quantization
    assert quantization.of("model.layers.0.mlp.gate") == Quant(8, 64)
    assert quantization.of("lm_head") is None
    assert quantization.of("model.layers.1.mlp.gate") == Quant(4, 64)


@pytest.mark.parametrize(
    "entry, wanted",
    [
        ({"group_size": None, "bits": 3}, Quant(3, 64)),
        ({"group_size": 32}, Quant(4, 32)),
        ({}, Quant(4, 64)),
        ({"group_size": None, "bits": None, "mode": None}, Quant(4, 64)),
        ({"group_size": None, "bits": None, "mode": "mxfp4"}, Quant(4, 32, "mxfp4")),
        ({"mode": "nvfp4"}, Quant(4, 16, "nvfp4")),
        ({"bits": 8, "mode": "mxfp8"}, Quant(8, 32, "mxfp8")),
    ],
)
def test_what_is_not_stated_is_the_modes_default(entry, wanted):
    """mlx-lm's command line writes mixed recipes like this.

    A module's mode is affine, independent of the file's mode.
    """
    config = {"quantization": {"group_size": 32, "bits": 4, "mode": "mxfp4", "lm_head": entry}}
    assert entries(config) == {"": Quant(4, 32, "mxfp4"), "lm_head": wanted}
    assert entries({"quantization": entry}) == {"": wanted}


@pytest.mark.parametrize("entry", [{"bits": 7}, {"group_size": 48}, {"mode": "q4_k_m"}, {"bits": True}, {"mode": 4}])
def test_unknown_storage_names_its_module(entry):
    for quantization, path in (({"lm_head": entry}, "lm_head"), (entry, "the model")):
        with pytest.raises(ConfigError, match=f"quantization of {path}: .* is not known"):
            entries({"quantization": quantization})


@pytest.mark.parametrize(
    "name, change, words",
    [
        ("qwen3-30b-a3b", {"model_type": "llama"}, "model_type 'llama'"),
        ("qwen3-30b-a3b", {"hidden_size": None}, "'hidden_size' is missing"),
        ("qwen3-30b-a3b", {"hidden_size": "2048"}, "'hidden_size' is '2048'"),
        ("qwen3-30b-a3b", {"hidden_size": True}, "'hidden_size' is True"),
        ("qwen3-30b-a3b", {"hidden_size": 2000}, "hidden_size 2000"),
        ("qwen3-30b-a3b", {"hidden_act": "gelu"}, "'hidden_act' is 'gelu'"),
        ("qwen3-30b-a3b", {"tie_word_embeddings": True}, "'tie_word_embeddings'"),
        ("qwen3-30b-a3b", {"attention_bias": True}, "'attention_bias'"),
        ("cogito-v2-671b", {"attention_bias": True}, "'attention_bias'"),
        ("qwen3-30b-a3b", {"num_experts_per_tok": 129}, "num_experts_per_tok 129"),
        ("qwen3-30b-a3b", {"num_key_value_heads": 5}, "num_key_value_heads 5"),
        ("qwen3-30b-a3b", {"rms_norm_eps": float("nan")}, "'rms_norm_eps' is nan"),
        ("qwen3-30b-a3b", {"rope_scaling": {"type": "longrope"}}, "'longrope'"),
        ("qwen3-30b-a3b", {"use_sliding_window": True}, "'use_sliding_window'"),
        ("flint-40b-a2.5b", {"use_sliding_window": False}, "'use_sliding_window' is False; only True is implemented"),
        ("qwen3-next-80b-a3b", {"layer_types": ["full_attention"]}, "'layer_types' has 1"),
        ("qwen3-next-80b-a3b", {"layer_types": ["sliding"] * 48}, "'layer_types'"),
        ("qwen3-next-80b-a3b", {"linear_num_value_heads": 33}, "linear_num_value_heads 33"),
        ("cogito-v2-671b", {"topk_method": "greedy"}, "'topk_method' is 'greedy'"),
        ("cogito-v2-671b", {"scoring_func": "softmax"}, "'scoring_func'"),
        ("cogito-v2-671b", {"rope_interleave": False}, "'rope_interleave'"),
        ("qwen3-next-80b-a3b", {"linear_num_key_heads": 0}, "'linear_num_key_heads' is 0"),
        ("qwen3-next-80b-a3b", {"layer_types": None, "full_attention_interval": 0}, "'full_attention_interval' is 0"),
        ("qwen3-30b-a3b", {"head_dim": None, "num_attention_heads": 0}, "'num_attention_heads' is 0"),
        ("cogito-v2-671b", {"topk_group": 9}, "topk_group 9"),
        ("cogito-v2-671b", {"n_group": 0}, "'n_group' is 0"),
        ("cogito-v2-671b", {"n_group": None}, "'n_group' is missing"),
        ("cogito-v2-671b", {"mlp_layer_types": ["sparse"]}, "'mlp_layer_types' has 1 entries for 61 layers"),
        ("cogito-v2-671b", {"mlp_layer_types": ["moe"] * 61}, "'mlp_layer_types' has ['moe'"),
        ("minimax-m2-230b-a10b", {"attn_type_list": [0] * 62}, "'attn_type_list' has [0"),
        ("minimax-m2-230b-a10b", {"qk_norm_type": "per_head"}, "'qk_norm_type' is 'per_head'"),
        ("minimax-m2-230b-a10b", {"rotary_dim": 129}, "'rotary_dim' is 129"),
        ("hy3-295b-a21b", {"moe_router_use_sigmoid": False}, "'moe_router_use_sigmoid' is False"),
        ("hy3-295b-a21b", {"qk_norm": False}, "'qk_norm' is False"),
        ("glm-4.5-air", {"attention_bias": None}, "'attention_bias' is missing"),
        ("solar-open-100b", {"use_qk_norm": True}, "'use_qk_norm' is True"),
        ("g9v3-39b-a5b", {"attention_bias": True}, "'attention_bias' is True"),
        ("g9v3-39b-a5b", {"num_experts_per_tok": 321}, "num_experts_per_tok 321"),
        ("cogito-v2-671b", {"rope_scaling": {"type": "yarn"}}, "'factor' is missing"),
        (
            "qwen3-30b-a3b",
            {"quantization": {"group_size": 64, "bits": 4, "mode": "nvfp4"}},
            "mode 'nvfp4' is not known",
        ),
        ("gemma-4-26b-a4b", {"enable_moe_block": None}, "'enable_moe_block' is False"),
        ("gemma-4-26b-a4b", {"hidden_size_per_layer_input": None}, "'hidden_size_per_layer_input' is 256"),
        ("gemma-4-26b-a4b", {"num_kv_shared_layers": 20}, "'num_kv_shared_layers' is 20"),
        ("gemma-4-26b-a4b", {"use_bidirectional_attention": "all"}, "'use_bidirectional_attention' must be null"),
        (
            "gemma-4-26b-a4b",
            {"per_layer_config": {"5": {"sliding_window": 7}}},
            "'per_layer_config' has ['sliding_window']",
        ),
        ("granite-4.0-h-tiny-7b-a1b", {"mamba_d_head": 32}, "'mamba_d_head' is 32; expected a width that gives 3072"),
        ("granite-4.0-h-tiny-7b-a1b", {"position_embedding_type": "alibi"}, "'position_embedding_type' is 'alibi'"),
        ("granite-4.0-h-tiny-7b-a1b", {"num_local_experts": 0}, "'num_local_experts' is 0"),
        ("llama-4-scout-109b-a17b", {"num_experts_per_tok": 2}, "'num_experts_per_tok' is 2; only 1"),
        ("llama-4-scout-109b-a17b", {"moe_layers": [48]}, "'moe_layers' is [48]; expected numbers of layers below 48"),
        (
            "north-mini-code-30b-a3b",
            {"expert_selection_fn": "relu"},
            "'expert_selection_fn' is 'relu'; expected 'softm",
        ),
        ("north-mini-code-30b-a3b", {"use_parallel_block": False}, "'use_parallel_block' is False"),
        (
            "north-mini-code-30b-a3b",
            {"num_shared_experts": 1, "shared_expert_combination_strategy": "max"},
            "'shared_expert_combination_strategy' is 'max'; expected 'average' or 'sum'",
        ),
        (
            "north-mini-code-30b-a3b",
            {"prefix_dense_intermediate_size": None},
            "'prefix_dense_intermediate_size' is missing",
        ),
        ("north-mini-code-30b-a3b", {"sliding_window": None}, "'sliding_window' is missing"),
        ("longcat-flash-562b-a27b", {"routed_scaling_factor": None}, "'routed_scaling_factor' is missing"),
        ("longcat-flash-562b-a27b", {"zero_expert_type": "copy"}, "'zero_expert_type' is 'copy'; only 'identity'"),
        ("longcat-flash-562b-a27b", {"mla_scale_q_lora": False}, "'mla_scale_q_lora' is False"),
        ("sarvam-30b", {"use_qk_norm": False}, "'use_qk_norm' is False"),
        ("sarvam-30b", {"use_qkv_bias": True}, "'use_qkv_bias' is True"),
        ("sarvam-105b", {"score_function": "softmax"}, "'score_function' is 'softmax'"),
        ("sarvam-105b", {"rope_interleave": False}, "'rope_interleave' is False"),
        ("mellum-2-12b-a2.5b", {"use_sliding_window": False}, "'use_sliding_window' is False; only True"),
        ("dots3-note-prev-280b-a15b", {"moe_layer_freq": 2}, "'moe_layer_freq' is 2"),
        ("dots3-note-prev-280b-a15b", {"sliding_window": 0}, "'sliding_window' is 0"),
        ("dots3-note-prev-280b-a15b", {"rope_scaling": {"type": "yarn"}}, "'rope_scaling' is"),
        ("muse-spark-816b-a42b", {"num_shared_experts": 1}, "'num_shared_experts' is 1"),
        ("muse-spark-816b-a42b", {"layer_rope_theta": [1e4] * 62}, "0 or 500000 for each of 62 layers"),
        ("a.x-k2-light-20b", {"gated_norm_rank": 0}, "'gated_norm_rank' is 0"),
        ("a.x-k2-light-20b", {"q_lora_rank": None}, "q_lora_rank is missing"),
        ("hunyuan-a13b-80b", {"use_cla": True}, "'use_cla' is True"),
        ("k2-horizon-mova-36b-a4b", {"num_experts": 0}, "a dense K2 Horizon model"),
        ("k2-horizon-mova-36b-a4b", {"attention_gate_func": "silu"}, "'attention_gate_func' is 'silu'"),
        ("k2-horizon-mova-36b-a4b", {"rope_head_dim": 64}, "'rope_head_dim' is 64; only 128"),
        ("hunyuan-a13b-80b", {"moe_topk": [8] * 31 + [4]}, "'moe_topk' has [4]; only 8"),
        ("hunyuan-a13b-80b", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "'factor' is 2.0"),
        ("hunyuan-a13b-80b", {"rope_scaling": {"type": "dynamic", "factor": 1.0}}, "'alpha' is missing"),
        ("dots1-142b-a14b", {"scoring_func": "softmax"}, "'scoring_func' is 'softmax'"),
        ("dots1-142b-a14b", {"moe_layer_freq": 2}, "'moe_layer_freq' is 2"),
        ("qwen3-30b-a3b", {"quantization": 3}, "'quantization' is 3"),
        ("qwen3-30b-a3b", {"quantization": []}, "'quantization' is []"),
        ("qwen3-30b-a3b", {"quantization": True}, "'quantization' is True"),
        ("qwen3-30b-a3b", {"rms_norm_eps": -1}, "'rms_norm_eps' is -1.0; expected a number from 1e-30 to 1"),
        ("qwen3-30b-a3b", {"rope_theta": -1}, "'rope_theta' is -1.0"),
        ("qwen3-30b-a3b", {"rope_theta": 10**400}, "'rope_theta' is inf; expected a finite"),
        ("qwen3-30b-a3b", {"vocab_size": 10**12}, "'vocab_size' is 1000000000000; expected an integer from 1 to"),
        ("qwen3-30b-a3b", {"num_hidden_layers": 2**31}, "'num_hidden_layers' is 2147483648"),
        ("qwen3-30b-a3b", {"head_dim": 2**30}, "head_dim is 1073741824"),
        ("qwen3-30b-a3b", {"num_attention_heads": 2**26}, "num_attention_heads * head_dim is 8589934592"),
        ("qwen3-30b-a3b", {"mlp_only_layers": list(range(48))}, "none of the 48 layers has experts"),
        ("qwen3-next-80b-a3b", {"layer_types": [["full_attention"]] * 48}, "'layer_types' has [["),
        ("qwen3-next-80b-a3b", {"linear_num_value_heads": 0}, "'linear_num_value_heads' is 0"),
        ("qwen3-next-80b-a3b", {"linear_conv_kernel_dim": -4}, "'linear_conv_kernel_dim' is -4"),
        ("qwen3-next-80b-a3b", {"shared_expert_intermediate_size": -512}, "'shared_expert_intermediate_size' is -512"),
        ("qwen3-next-80b-a3b", {"partial_rotary_factor": 1e308}, "'partial_rotary_factor' is 1e+308"),
        ("cogito-v2-671b", {"kv_lora_rank": -512}, "'kv_lora_rank' is -512"),
        ("cogito-v2-671b", {"v_head_dim": -128}, "'v_head_dim' is -128"),
        ("cogito-v2-671b", {"first_k_dense_replace": -(2**31)}, "'first_k_dense_replace' is -2147483648"),
        ("cogito-v2-671b", {"topk_group": 1, "n_group": 128}, "exceeds the experts of 1 of 128 groups"),
        ("cogito-v2-671b", {"rope_scaling": {**YARN, "factor": 0}}, "'factor' is 0.0"),
        ("cogito-v2-671b", {"rope_scaling": {**YARN, "beta_fast": 0}}, "'beta_fast' is 0.0"),
        ("cogito-v2-671b", {"rope_scaling": {**YARN, "beta_slow": 1e308}}, "'beta_slow' is 1e+308"),
        ("cogito-v2-671b", {"rope_scaling": {**YARN, "mscale_all_dim": 1e308}}, "'mscale_all_dim' is 1e+308"),
        (
            "cogito-v2-671b",
            {"rope_scaling": {**YARN, "original_max_position_embeddings": -4096}},
            "'original_max_position_embeddings' is -4096",
        ),
        ("qwen3.5-35b-a3b", {"norm_topk_prob": False}, "norm_topk_prob"),
        ("nemotron_h", {"hybrid_override_pattern": "MEM*EM-E"}, "'MEM*EM-E'; expected layers of Mamba, attention and"),
        ("nemotron_h", {"hybrid_override_pattern": "MEEM*EME"}, "layer 2 has experts, and no mixer stands before it"),
        ("nemotron_h", {"hybrid_override_pattern": "MEM*E"}, "kinds of 5 layers for num_hidden_layers 8"),
        ("lfm2_moe", {"layer_types": None}, "'layer_types' is missing"),
        ("lfm2_moe", {"layer_types": ["conv", "short_conv", "conv", "conv", "full_attention"]}, "short_conv"),
        ("lfm2_moe", {"conv_bias": True}, "'conv_bias' is True"),
        ("lfm2_moe", {"conv_L_cache": 1}, "'conv_L_cache' is 1"),
        ("lfm2_moe", {"num_dense_layers": 6}, "'num_dense_layers' is 6"),
        *(("inkling", {"local_layer_ids": ids}, "'local_layer_ids'") for ids in ([1, 4], [-1], ["1"], [True])),
        ("deepseek_v41", {"gate_temp": 2.0}, "'gate_temp' is 2.0"),
        ("deepseek_v41", {"engram_layer_ids": [1, 1]}, "'engram_layer_ids'"),
        ("deepseek_v41", {"engram_num_embeddings": [256]}, "'engram_num_embeddings'"),
        ("deepseek_v41", {"engram_num_embeddings": [256, 300]}, "'engram_num_embeddings'"),
        ("deepseek_v41", {"compress_ratios": [0, 2, 2, 1, 1, 1, 4]}, "'compress_ratios'"),
        ("deepseek_v41", {"kv_source_layer_ids": [3]}, "'kv_source_layer_ids'"),
        ("deepseek_v41", {"kv_source_layer_ids": [1]}, "'kv_source_layer_ids'"),
        ("deepseek_v41", {"index_source_layer_ids": [1, 5]}, "'kv_source_layer_ids'"),
        ("deepseek_v41", {"index_source_layer_ids": [1, "3"]}, "'index_source_layer_ids'"),
        ("deepseek_v41", {"hidden_size": 8}, "'hidden_size' is 8; expected at least 12, for 4 streams"),
        ("deepseek_v41", {"candidate_source_layer_id": 4}, "'candidate_source_layer_id' is 4"),
        ("deepseek_v41", {"candidate_source_layer_id": 1}, "'candidate_source_layer_id' is 1"),
        ("mistral_large4", {"kv_source_layers": [0, 1, 2, 1, 2, 0]}, "expected 5 or 1 for layer 5"),
        ("mistral_large4", {"kv_source_layers": [0, 1, 2, 2, 2, 5]}, "'kv_source_layers'"),
        ("mistral_large4", {"kv_source_layers": [0, 0, 2, 1, 2, 5]}, "'kv_source_layers'"),
        ("mistral_large4", {"kv_source_layers": [1, 1, 2, 3, 4, 5]}, "'kv_source_layers'"),
        ("mistral_large4", {"q_lora_rank": 64}, "'q_lora_rank' is 64"),
        (
            "mistral_large4",
            {"rope_parameters": {"rope_type": "yarn", "mscale_all_dim": 1.0}},
            "'mscale_all_dim' is 1.0",
        ),
        ("beam", {"rope_parameters": dict.fromkeys(ROPES_OF_BEAM, {"rope_theta": 1e4})}, "'full_attention'"),
        ("beam", {"rope_parameters": dict.fromkeys(ROPES_OF_BEAM)}, "'sliding_attention' is missing"),
    ],
)
def test_errors_name_the_field(name, change, words):
    config = goldens.config(name) if name in EVERY else config_of(name)
    config.get("text_config", config).update(change)
    with pytest.raises(ConfigError) as failure:
        ModelArgs.from_dict(config)
    assert words in str(failure.value) and "\n" not in str(failure.value)


def test_unknown_variant_lists_the_known():
    with pytest.raises(ConfigError, match="qwen3-30b-a3b"):
        ModelArgs.from_variant("gpt-5")


@pytest.mark.parametrize("text", ["{", "[]", "\xff", "[" * 100_000, "[" + "9" * 5000 + "]"])
def test_bad_json_is_a_model_file_error(tmp_path, text):
    (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(ModelFileError, match="config.json"):
        ModelArgs.from_file(tmp_path)


def test_from_file_reads_generation_config(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(config_of("qwen3-30b-a3b")))
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 8]}')
    assert ModelArgs.from_file(tmp_path).eos_token_ids == (7, 8)


def test_every_family_has_goldens():
    """Most tests use `goldens.families()`, and the other tests have families of their own.

    Names that are read alike need one golden.
    """
    stored = {family_name(goldens.config(family)) for family in EVERY}
    assert {FAMILIES[name] for name in stored} == set(FAMILIES.values())


@pytest.mark.parametrize("family", goldens.KIN)
def test_what_transformers_saves_reads_the_same(family):
    saved, published = (ModelArgs.from_dict(goldens.variant_config(family, form)) for form in ("transformers5", "hub"))
    different = dict.fromkeys(("model_type", "eos_token_ids"))
    assert dataclasses.replace(saved, **different) == dataclasses.replace(published, **different)


USUAL_OF_BEAM = ("head_dim", "sliding_window", "rope_parameters", "final_logit_softcapping", "n_group", "topk_group")
USUAL_OF_BEAM += ("routed_scaling_factor", "norm_topk_prob", "rms_norm_eps", "layer_types", "mlp_layer_types")
USUAL_OF_LFM2 = ("conv_L_cache", "norm_eps", "norm_topk_prob", "num_dense_layers", "rope_theta", "tie_embedding")
USUAL_OF_LFM2 += ("conv_bias", "routed_scaling_factor", "use_expert_bias")
USUAL_OF_HY_V4 = ("indexer_types", "hc_mult", "hc_eps", "hc_magnitude", "index_head_dim", "index_topk", "swiglu_limit")
USUAL_OF_HY_V4 += ("routed_scaling_factor", "rms_norm_eps", "n_group", "topk_group", "first_k_dense_replace")
USUAL_OF_DOTS3 = ("layer_types", "moe_layer_freq", "moe_shared_expert_intermediate_size", "sliding_window", "use_dsa")
USUAL_OF_LLAMA4 = ("attention_chunk_size", "no_rope_layers", "attn_temperature_tuning", "floor_scale", "attn_scale")
USUAL_OF_LLAMA4 += ("interleave_moe_layer_step", "use_qk_norm", "intermediate_size_mlp", "num_experts_per_tok")
LEFT_OUT = {  # fields whose published values are transformers' defaults
    "deepseek-v4.1-flash-552b": tuple(USUAL_OF_V41),
    "longcat-flash-562b-a27b": tuple(USUAL),
    "lfm2-8b-a1b": USUAL_OF_LFM2,
    "beam-501b-a23b": USUAL_OF_BEAM,
    "hy4-preview-770b-a49b": USUAL_OF_HY_V4,
    "hy4-770b-a49b": ("index_n_heads",),
    "dots3-note-prev-280b-a15b": USUAL_OF_DOTS3,
    "llama-4-scout-109b-a17b": USUAL_OF_LLAMA4,
    "muse-spark-816b-a42b": ("layer_rope_theta", "layer_types", "mlp_layer_types", "rope_parameters", *USUAL_OF_MUSE),
}


@pytest.mark.parametrize("name", LEFT_OUT)
def test_fields_that_are_left_out_have_the_published_values(name):
    config, whole = config_of(name), ModelArgs.from_variant(name)
    body = config.get("text_config", config)
    here = [field for field in body if field in LEFT_OUT[name] or field.startswith(("engram_", "swa_"))]
    for field in here:
        del body[field]
    assert len(here) >= min(len(LEFT_OUT[name]), 2) and ModelArgs.from_dict(config) == whole


def test_layers_of_lfm2():
    assert ModelArgs.from_variant("lfm2-8b-a1b").experts.router.eps == 1e-6
    for name in ("tie_embedding", "tie_word_embeddings"):
        assert not ModelArgs.from_dict({**goldens.config("lfm2_moe"), name: False}).is_tied


def test_layers_of_deepseek_v41():
    """Few make entries, some choose among them, and one marks blocks for later ones."""
    config = goldens.config("deepseek_v41")
    mixers = ModelArgs.from_dict(config).mixers
    assert [mixer.seen_ratio for mixer in mixers] == [0, 2, 2, 1, 1, 1, 1]
    assert [mixer.ratio for mixer in mixers] == [0, 2, 0, 1, 0, 0, 0]
    assert [mixer.indexer and mixer.indexer.reuses for mixer in mixers] == [None, False, True, False, True, False, True]
    marks = [mixer.compressor and mixer.compressor.blocks and mixer.compressor.blocks.reuses for mixer in mixers]
    assert marks == [None, None, None, False, True, True, True]


def test_tables_of_deepseek_v41():
    """The number of rows that is published is the sum of the primes. Factors fit the numbers of 99,092 tokens."""
    config = config_of("deepseek-v4.1-flash-552b")
    ngrams = ModelArgs.from_dict(config).ngrams
    assert [sum(part.sizes) for part in ngrams.values()] == config["engram_num_embeddings"] and list(ngrams) == [1, 14]
    factors = [factor for part in ngrams.values() for factor in part.multipliers]
    assert len(factors) == 8 and all(factor % 2 and factor * 99091 < 1 << 63 for factor in factors)


def test_layers_of_mistral_large_4():
    """Rotated ones and others share latents of their own kind, and the learned frequencies go to the rotated ones."""
    config = goldens.config("mistral_large4")
    args = ModelArgs.from_dict(config)
    assert [mixer.shares for mixer in args.mixers] == [False, True, True, False, False, False]
    assert [mixer.borrows for mixer in args.mixers] == [False, False, False, True, True, False]
    assert [mixer.indexer.reuses for mixer in args.mixers] == [False, True, False, False, True, False]
    assert {(mixer.rotated, mixer.nope) for mixer in args.mixers} == {(16, 48), (0, 64)}
    copies = FAMILIES["mistral_large4"].copies(args.layers)
    assert [name.split(".")[2] for name in copies["model.rotary_emb.alpha"]] == ["0", "1", "3", "5"]
    norms = {layer: f"model.layers.{layer}.self_attn.kv_a_layernorm.weight" for layer in range(6)}
    assert copies[norms[1]] == [norms[1], norms[3]] and copies[norms[2]] == [norms[2], norms[4]]
    usual = ModelArgs.from_variant("mistral-large-4-1t-a52b")
    assert [i for i, mixer in enumerate(usual.mixers) if not mixer.rotation] == list(range(3, 72, 4))


def test_what_nulls_of_cohere_and_longcat_mean():
    """No window where no layer has one, and no experts that return their input."""
    config = config_of("north-mini-code-30b-a3b")
    full = {**config, "sliding_window": None, "layer_types": ["full_attention"] * config["num_hidden_layers"]}
    assert not any(mixer.window for mixer in ModelArgs.from_dict(full).mixers)
    config = config_of("longcat-flash-562b-a27b")
    assert [
        ModelArgs.from_dict({**config, **own}).experts.router.identities for own in ({}, {"zero_expert_num": None})
    ] == [256, 0]


def test_windows_of_cohere_do_not_follow_the_layers_that_are_dense():
    """As transformers' class counts the first ones: by `first_k_dense_replace` alone."""
    config = {**config_of("north-mini-code-30b-a3b"), "layer_types": None, "prefix_dense_sliding_window_pattern": 3}
    count = config["num_hidden_layers"]
    kinds = {"mlp_layer_types": ["dense"] * 2 + ["sparse"] * (count - 2)}
    for first, full in ((0, [3, 7, 11]), (3, [2, 6, 10])):
        mixers = ModelArgs.from_dict({**config, **kinds, "first_k_dense_replace": first}).mixers
        assert [i for i, mixer in enumerate(mixers[:12]) if not mixer.window] == full


def test_kimi_k3_as_published_and_as_mlx_lm_may_have_it():
    """The publisher nests a text part with the `model_type` of Kimi Linear."""
    config = config_of("kimi-k3-2800b-a104b")
    args = ModelArgs.from_dict(config)
    assert args.model_type == "kimi_linear" and args.connections == BlockSums(12, 93) and args.connections.streams == 9
    assert [i for i, mixer in enumerate(args.mixers) if mixer.attention] == [*range(3, 92, 4), 92]
    flat = ModelArgs.from_dict({**config["text_config"], "model_type": "kimi_k3"})
    assert dataclasses.replace(flat, model_type="kimi_linear") == args


def test_a_model_of_one_layer_scales_its_stream_likewise():
    args = ModelArgs.from_dict(goldens.config("granitemoehybrid"))
    assert dataclasses.replace(args, layers=args.layers[:1]).stream_scale == args.stream_scale != 1


def test_layers_of_beam():
    """Those with attention to all positions are every sixth and the last, the dense ones the first three."""
    args = ModelArgs.from_variant("beam-501b-a23b")
    assert [i for i, mixer in enumerate(args.mixers) if mixer.query_scale] == [5, 11, 17, 23, 29, 35, 41, 47, 51]
    assert all((mixer.window == 512) is (mixer.query_scale is None) for mixer in args.mixers)
    assert {mixer.query_scale for mixer in args.mixers} == {None, QueryGrowth(0.1, 2048)}
    assert args.moe_layers == tuple(range(3, 52))


def test_layers_of_hy_v4():
    """Whether one has an indexer of its own is known by its number; mlx-vlm knows it likewise."""
    config = config_of("hy4-preview-770b-a49b")
    args = ModelArgs.from_dict(config)
    assert [i for i, mixer in enumerate(args.mixers) if not mixer.indexer.reuses] == [0, *range(1, 78, 4)]
    assert ModelArgs.from_dict({**config, "swiglu_limit": 0.0}).experts.activation == SILU


def test_the_published_container_of_hy_v4_differs_in_the_norms_of_latents():
    args, preview = (ModelArgs.from_variant(name) for name in ("hy4-770b-a49b", "hy4-preview-770b-a49b"))
    mixers = [dataclasses.replace(mixer, norm_eps=preview.rms_norm_eps) for mixer in preview.mixers]
    assert list(args.mixers) == mixers != list(preview.mixers)


def test_sarvam_105b_without_groups_chooses_among_all_experts():
    args = ModelArgs.from_variant("sarvam-105b")
    assert (args.experts.router.groups, args.experts.router.kept_groups) == (1, 1)
    grouped = ModelArgs.from_dict({**config_of("sarvam-105b"), "n_group": 16, "topk_group": 2})
    assert (grouped.experts.router.groups, grouped.experts.router.kept_groups) == (16, 2)
    assert softmax_scale(args.mixers[0]) == pytest.approx(192**-0.5 * (0.1 * math.log(40) + 1) ** 2)


def test_defaults_of_mellum_are_those_of_transformers():
    names = ("head_dim", "norm_topk_prob", "mlp_layer_types", "sliding_window", "rope_parameters")
    config = config_of("mellum-2-12b-a2.5b")
    args = ModelArgs.from_dict(config)
    usual = ModelArgs.from_dict({n: v for n, v in config.items() if n not in names})
    assert usual.experts == args.experts and usual.moe_layers == args.moe_layers
    windows = [[mixer.window for mixer in one.mixers] for one in (usual, args)]
    assert windows == [[1024, 1024, 1024, None] * 7] * 2
    assert [mixer.rotation.theta for mixer in usual.mixers[2:4]] == [1e4, 5e5]


def test_biases_of_codes_are_not_those_of_a_choice():
    """K2 Horizon's routers add a bias that is called like a linear layer's, and in MLX's copies also have biases."""
    renames = FAMILIES["k2_horizon"].renames
    ours = {
        name: canonical_name(f"model.layers.3.{name}", 48, renames) for name in ("mlp.gate.bias", "mlp.gate.biases")
    }
    assert [name.rpartition("mlp.")[2] for name in ours.values()] == ["e_score_correction_bias", "gate.biases"]


def test_layers_of_muse_spark_rotate_in_windows():
    args = ModelArgs.from_variant("muse-spark-816b-a42b")
    assert [mixer.rotation is None for mixer in args.mixers] == [mixer.window is None for mixer in args.mixers]


def test_layers_of_dots3_note():
    """Those that see all positions have indexers, unless a field says that they have none."""
    config = config_of("dots3-note-prev-280b-a15b")
    args = ModelArgs.from_dict(config)
    assert args.mixers[1].indexer and not args.mixers[2].indexer
    dense = ModelArgs.from_dict({**config, "use_dsa": False})
    assert [mixer.indexer for mixer in dense.mixers] == [None] * 46 and dense.mixers[2] == args.mixers[2]


def test_layers_of_llama_4():
    """Every fourth sees all positions; without chunks all do, but the same layers rotate."""
    config = config_of("llama-4-scout-109b-a17b")
    args, text = ModelArgs.from_dict(config), config["text_config"]
    whole = ModelArgs.from_dict({**config, "text_config": text | {"attention_chunk_size": None}})
    assert [i for i, mixer in enumerate(args.mixers[:8]) if mixer.rotation is None] == [3, 7]
    assert all((mixer.window == 8192) is mixer.chunked is (mixer.rotation is not None) for mixer in args.mixers)
    assert all(mixer.window is None for mixer in whole.mixers)
    assert ModelArgs.from_variant("llama-4-maverick-400b-a17b").moe_layers == tuple(range(1, 48, 2))


def test_llama_3s_scaling_without_a_ramp():
    """In Llama 4 Scout both limits are one turn (transformers: `_compute_llama3_parameters`)."""
    rope = Rope(ModelArgs.from_variant("llama-4-scout-109b-a17b").mixers[0].rotation)
    plain = 5e5 ** -(np.arange(0, 128, 2) / 128)
    turns = 8192 * plain / (2 * np.pi)
    assert np.allclose(np.frombuffer(rope.frequencies), np.where(turns > 1, plain, plain / 16), rtol=1e-12)


def test_ling_2_is_refused_by_name():
    config = {n: v for n, v in goldens.config("bailing_hybrid").items() if "kda" not in n}
    with pytest.raises(ConfigError, match="'kda_safe_gate' is missing; of 'bailing_hybrid' only Ling 3"):
        ModelArgs.from_dict(config)


@pytest.mark.parametrize("most", ["Infinity", {"__float__": "Infinity"}])
def test_spellings_of_an_infinite_time_step(most):
    config = goldens.config("nemotron_h")
    assert ModelArgs.from_dict({**config, "time_step_limit": [0.5, most]}) == ModelArgs.from_dict(config)


def test_the_text_part_decides_whose_family_it_is():
    config = config_of("kimi-k2.6")
    assert ModelArgs.from_dict(config).model_type == "kimi_k2"
    assert ModelArgs.from_dict(config["text_config"]) == ModelArgs.from_dict({**config, "model_type": "other"})
    config["text_config"]["model_type"] = "llama"
    with pytest.raises(ConfigError, match="model_type 'kimi_k25' is not supported"):
        ModelArgs.from_dict(config)


def test_a_dense_model_is_told_that_only_experts_run():
    config = {"model_type": "llama", "hidden_size": 4096, "architectures": ["LlamaForCausalLM"]}
    with pytest.raises(ConfigError, match="model_type 'llama' is not supported: it has no experts, and only Mixture"):
        family_name(config)
    with pytest.raises(ConfigError, match="is not supported; did you mean llama4"):
        family_name({**config, "num_local_experts": 8})


@pytest.mark.parametrize(
    ("outer", "text"),
    [("kimi_k25", "kimi_k2"), ("mistral3", "mistral4"), ("step3p7", "step3p5"), ("cohere2_vision", "cohere2_moe")],
)
def test_models_that_are_named_after_their_image_encoder(outer, text):
    """As docs/models.md lists them."""
    assert outer not in FAMILIES and family_name({"model_type": outer, "text_config": {"model_type": text}}) == text


# ---- any value in any field

VALUES = [
    None, True, False, 0, 1, -1, 2, 3, 64, 4096, 2**31 - 1, 2**31, -(2**31), 2**63, 10**12, 10**30,
    0.0, -0.0, 0.5, 1.0, -1.0, 1e-308, 1e308, -1e308, float("nan"), float("inf"),
    "", "yarn", "default", "linear", "8", [], [0], [[0]], ["full_attention"], [None] * 3, {}, {"bits": 4},
    {"factor": 0},
]  # fmt: skip


def small(config):
    """Returns the configuration with few layers, so that a model of its shapes is made quickly."""
    config = copy.deepcopy(config)
    body = config.get("text_config", config)
    body["num_hidden_layers"] = 4
    if "num_layers" in body:  # of two each
        body["num_layers"] = 2
    lists = ("layer_types", "attn_type_list", "hybrid_layer_pattern", "moe_layer_freq", "num_attention_heads_per_layer")
    for name in (
        *lists,
        "mlp_layer_types",
        "is_moe_layer",
        "indexer_types",
        "compress_ratios",
        "no_rope_layers",
        "kv_source_layers",
        "layer_rope_theta",
        *("moe_topk", "moe_intermediate_size", "num_shared_expert"),
    ):
        if isinstance(body.get(name), list):
            body[name] = (body[name] * 4)[:4]
    linear = body.get("linear_attn_config", {})
    linear |= {name: [i for i in layers if i < 5] for name, layers in linear.items() if name.endswith("_layers")}
    if body.get("num_dense_layers"):
        body["num_dense_layers"] = 1
    if "hybrid_override_pattern" in body:
        body["hybrid_override_pattern"] = body["hybrid_override_pattern"][:4]
    sparse = body.get("sparse_attention_config", {})
    for name in ("sparse_attention_freq", "sparse_disable_index_value"):
        if isinstance(sparse.get(name), list):
            sparse[name] = (sparse[name] * 4)[:4]
    if body.get("ngram_vocab_size_base"):
        body["ngram_vocab_size_base"] = 50
    if "loop_config" in body:
        body["loop_config"]["core_end"] = 4
    return config


def places(value, path=()):
    """Yields the paths of all fields, including nested ones."""
    for key in value:
        yield (*path, key)
        if isinstance(value[key], dict):
            yield from places(value[key], (*path, key))


def with_value(config, path, value):
    """Returns a copy with another value in one place, if the place still exists."""
    config = copy.deepcopy(config)
    *parents, last = path
    target = config
    for parent in parents:
        target = target.get(parent) if isinstance(target, dict) else None
    if isinstance(target, dict):
        target[last] = copy.deepcopy(value)
    return config


def values_in(tree):
    """Yields all values in nested objects and lists."""
    if isinstance(tree, dict | list | tuple):
        for value in tree.values() if isinstance(tree, dict) else tree:
            yield from values_in(value)
    else:
        yield tree


def check_usable(config):
    """Checks that an accepted configuration has shapes and constants from which a model can be made."""
    args = ModelArgs.from_dict(config)
    if repr(args) not in USABLE:  # many values are not read, or are the default; 1, 1.0 and True differ here
        check_args(args)
        USABLE.add(repr(args))


USABLE = set()


def check_args(args):
    factors = {factor for part in args.ngrams.values() for factor in part.multipliers}  # factors of a hash in 64 bits
    for part in args.ngrams.values():
        assert all(0 < factor * (part.compressed or args.vocab_size) < 2**63 for factor in part.multipliers)
    for value in values_in(dataclasses.asdict(dataclasses.replace(args, quantization=None, eos_token_ids=()))):
        assert not isinstance(value, float) or math.isfinite(value), args
        assert type(value) is not int or 0 <= value < 2**31 or value in factors, args
    assert all(0 <= layer < args.num_hidden_layers for layer in args.moe_layers)
    for mixer in {mixer for mixer in args.mixers if isinstance(mixer, GroupedQuery | Latent)}:
        assert isinstance(mixer, GroupedQuery) or 0 < softmax_scale(mixer) < 1e9
        if mixer.rotation is not None:
            rope = Rope(mixer.rotation)
            frequencies = np.frombuffer(rope.frequencies)
            assert len(frequencies) == mixer.rotation.dims // 2
            assert np.isfinite(frequencies).all() and (frequencies >= 0).all() and 0 < rope.magnitude < 1e9
    layout = ExpertLayout.from_args(args)
    plan_memory(args, layout, Figures(1 << 62), Demand(resident=0, context=100))
    if args.num_hidden_layers <= 8:
        model = Model(args, None)
        assert all(0 < n < 2**31 for _, a in tree_flatten(model.parameters()) for n in a.shape)


def is_refused(config):
    """Returns whether the configuration is refused as it should be. One that is accepted must be usable."""
    try:
        check_usable(config)
        SourceFormat(config)
    except (ConfigError, RequestError) as error:
        assert "\n" not in str(error) and len(str(error)) < 400
        return True
    except Exception as error:
        error.args = (f"{config}: {error}",)
        raise
    return False


def fuzzed(config):
    """Returns a small configuration with all fields that are read."""
    more = {
        "quantization": {"group_size": 64, "bits": 4, "lm_head": {"bits": 8}},
        "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    }
    config = {**small(config), **more}
    assert not is_refused(config)
    return config


@pytest.mark.parametrize("each", [11, pytest.param(1, marks=pytest.mark.full)])
@pytest.mark.parametrize("family", EVERY)
def test_any_value_in_any_field_is_usable_or_refused(family, each):
    """Each field gets every eleventh value.

    Families begin at different values, so the fields that they share get most values.
    """
    config = fuzzed(goldens.config(family))
    cases = [(path, value) for path in places(config) for value in VALUES]
    assert len(cases) > 1000
    cases = cases[zlib.crc32(family.encode()) % each :: each]  # independent of the other families that exist
    refused = sum(is_refused(with_value(config, *case)) for case in cases)
    assert len(cases) / 4 < refused < len(cases) * 0.9


@pytest.mark.parametrize("name", one_in_three(variants()))
def test_any_values_in_several_fields_are_usable_or_refused(name):
    config, rng, refused = fuzzed(config_of(name)), random.Random(name), 0
    fields = sorted(places(config))
    for _ in range(400):
        one = config
        for _ in range(rng.choice([2, 3])):
            one = with_value(one, rng.choice(fields), rng.choice(VALUES))
        refused += is_refused(one)
    assert 200 < refused < 399


EDGES = [
    ("rms_norm_eps", 1e-30), ("rms_norm_eps", 1.0), ("rope_theta", 2.0), ("rope_theta", 1e30),
    ("routed_scaling_factor", 1e-6), ("routed_scaling_factor", 1e6), ("factor", 1.0), ("factor", 1e6),
    ("beta_fast", 1e-6), ("beta_fast", 1e6), ("beta_slow", 1e-6), ("beta_slow", 1e6), ("mscale", 0.0), ("mscale", 1e3),
    ("mscale_all_dim", 0.0), ("mscale_all_dim", 1e3), ("attention_factor", 1e-6), ("attention_factor", 1e3),
    ("original_max_position_embeddings", 1), ("original_max_position_embeddings", 2**31 - 1),
    ("max_position_embeddings", 2**31 - 1),
]  # fmt: skip


@pytest.mark.parametrize("field, value", EDGES)
@pytest.mark.parametrize("family", ["qwen3_5_moe", "deepseek_v3"])
def test_values_at_the_edge_give_numbers(family, field, value, tmp_path):
    """Uses the weights of the tiny models. The field is set in every place where it may be."""
    source, path = tiny_directory(family), tmp_path / "model"
    path.mkdir()
    for file in source.iterdir():
        (path / file.name).symlink_to(file)
    config = read_json(source / "config.json")
    (path / "config.json").unlink()
    body = config.get("text_config", config)
    for part in (body, body.get("rope_scaling") or {}, body.get("rope_parameters") or {}):
        if field in part or part is not body:
            part[field] = value
    (path / "config.json").write_text(json.dumps(config))
    args = ModelArgs.from_file(path)
    assert value in values_in(dataclasses.asdict(args)) or family == "qwen3_5_moe"
    logits = load_model(path, dtype=mx.float32)(mx.array([[1, 2, 3, 4]]))
    assert mx.isfinite(logits).all().item()

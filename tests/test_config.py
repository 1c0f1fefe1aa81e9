"""Configurations: the named variants' sizes, every accepted spelling, and errors that name the field."""

import copy
import json

import pytest

from moeflux_mlx.config import FULL, LINEAR, ModelArgs, read_json, variants
from moeflux_mlx.errors import ConfigError, ModelFileError
from moeflux_mlx.layout import ExpertLayout
from moeflux_mlx.resources import directory

GIB = 2**30
# name: expert bytes, layer file bytes, MoE layers, total GiB (arithmetic on the published shapes)
SIZES = {
    "qwen3-30b-a3b": (2654208, 339738624, 48, 15.19),
    "qwen3-235b-a22b": (10616832, 1358954496, 94, 118.97),
    "qwen3-next-80b-a3b": (1769472, 905969664, 48, 40.50),
    "qwen3.5-35b-a3b": (1769472, 452984832, 40, 16.88),
    "qwen3.6-35b-a3b": (1769472, 452984832, 40, 16.88),
    "qwen3.5-122b-a10b": (5308416, 1358954496, 48, 60.75),
    "qwen3.5-397b-a17b": (7077888, 3623878656, 60, 202.50),
    "cogito-v2-671b": (24772608, 6341787648, 58, 342.56),
}


def config_of(name):
    return read_json(directory("configs") / f"{name}.json")


def test_variants_are_the_named_ones():
    assert variants() == sorted(SIZES)


@pytest.mark.parametrize("name", SIZES)
def test_sizes(name):
    layout = ExpertLayout.from_args(ModelArgs.from_variant(name))
    expert, layer, count, total = SIZES[name]
    assert layout.expert_size == layout.expert_stride == expert
    assert layout.layer_bytes == layer
    assert len(layout.moe_layers) == count
    assert round(layout.total_bytes / GIB, 2) == total


def test_cogito_streams_layers_3_to_60():
    args = ModelArgs.from_variant("cogito-v2-671b")
    assert args.moe_layers == tuple(range(3, 61))
    assert args.head_dim == 192 and args.rotary_dim == 64
    assert args.shared_expert_intermediate_size == 2048


def test_qwen_next_derives_layer_types_from_the_interval():
    types = ModelArgs.from_variant("qwen3-next-80b-a3b").layer_types
    assert types[:4] == (LINEAR, LINEAR, LINEAR, FULL) and types.count(FULL) == 12


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
    assert quantization.of("model.layers.0.mlp.gate") == (64, 8)
    assert quantization.of("lm_head") is None
    assert quantization.of("model.layers.1.mlp.gate") == (64, 4)


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
        ("qwen3-30b-a3b", {"num_experts_per_tok": 129}, "num_experts_per_tok 129"),
        ("qwen3-30b-a3b", {"num_key_value_heads": 5}, "num_key_value_heads 5"),
        ("qwen3-30b-a3b", {"rms_norm_eps": float("nan")}, "'rms_norm_eps' is nan"),
        ("qwen3-30b-a3b", {"rope_scaling": {"type": "longrope"}}, "'longrope'"),
        ("qwen3-30b-a3b", {"use_sliding_window": True}, "'use_sliding_window'"),
        ("qwen3-next-80b-a3b", {"layer_types": ["full_attention"]}, "'layer_types' has 1"),
        ("qwen3-next-80b-a3b", {"layer_types": ["sliding"] * 48}, "'layer_types'"),
        ("qwen3-next-80b-a3b", {"linear_num_value_heads": 33}, "linear_num_value_heads 33"),
        ("cogito-v2-671b", {"topk_method": "greedy"}, "'topk_method' is 'greedy'"),
        ("cogito-v2-671b", {"scoring_func": "softmax"}, "'scoring_func'"),
        ("cogito-v2-671b", {"rope_interleave": False}, "'rope_interleave'"),
        ("qwen3-next-80b-a3b", {"linear_num_key_heads": 0}, "linear_num_key_heads 0"),
        ("qwen3-next-80b-a3b", {"layer_types": None, "full_attention_interval": 0}, "'full_attention_interval' is 0"),
        ("qwen3-30b-a3b", {"head_dim": None, "num_attention_heads": 0}, "'num_attention_heads' is 0"),
        ("cogito-v2-671b", {"topk_group": 9}, "topk_group 9"),
        ("cogito-v2-671b", {"n_group": 0}, "n_group 0"),
        ("cogito-v2-671b", {"rope_scaling": {"type": "yarn"}}, "'factor' is missing"),
        (
            "qwen3-30b-a3b",
            {"quantization": {"group_size": 32, "bits": 4, "mode": "mxfp4"}},
            "'mode' is 'mxfp4'",
        ),
    ],
)
def test_errors_name_the_field(name, change, words):
    with pytest.raises(ConfigError) as failure:
        ModelArgs.from_dict({**config_of(name), **change})
    assert words in str(failure.value) and "\n" not in str(failure.value)


def test_qwen3_5_refuses_unnormalised_weights():
    config = config_of("qwen3.5-35b-a3b")
    config["text_config"]["norm_topk_prob"] = False
    with pytest.raises(ConfigError, match="norm_topk_prob"):
        ModelArgs.from_dict(config)


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

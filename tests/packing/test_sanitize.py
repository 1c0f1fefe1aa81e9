"""Names and layouts of checkpoints brought to the model's own, against explicit loops over heads."""

from pathlib import Path
from types import SimpleNamespace

import goldens
import mlx.core as mx
import numpy as np
import pytest
from grids import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from moeflux_mlx.errors import ModelFileError
from moeflux_mlx.families.names import canonical_name
from moeflux_mlx.families.registry import FAMILIES
from moeflux_mlx.formats.checkpoint import Tensor
from moeflux_mlx.packing import sanitize
from moeflux_mlx.packing.sources import PlainSource
from moeflux_mlx.spec import ModelArgs


def tensor(name, *shape):
    return Tensor(name, Path("file"), 0, "BF16", shape)


def held(array):
    """A tensor that holds its values."""
    made = tensor("stored", *array.shape)
    return SimpleNamespace(
        **vars(made) | {"dtype": {mx.bfloat16: "BF16", mx.float32: "F32"}[array.dtype]}, read=lambda: array
    )


def next_args(**change):
    return ModelArgs.from_dict({**goldens.config("qwen3_next"), **change})


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("lm_head.weight", "lm_head.weight"),
        ("model.language_model.embed_tokens.weight", "model.embed_tokens.weight"),
        ("language_model.model.layers.0.linear_attn.A_log", "model.layers.0.linear_attn.A_log"),
        ("language_model.lm_head.scales", "lm_head.scales"),
        (
            "model.layers.3.mlp.shared_experts.up_proj.weight",
            "model.layers.3.mlp.shared_expert.up_proj.weight",
        ),
        ("model.layers.3.mlp.gate.e_score_correction_bias", "model.layers.3.mlp.e_score_correction_bias"),
        ("model.layers.3.mlp.experts.7.up_proj.weight", "model.layers.3.mlp.experts.7.up_proj.weight"),
        ("model.layers.3.mlp.shared_expert_gate.weight", "model.layers.3.mlp.shared_expert_gate.weight"),
        ("model.layers.4.enorm.weight", None),
        ("model.language_model.layers.4.enorm.weight", None),
        ("mtp.layers.0.mlp.gate.weight", None),
        ("language_model.mtp.fc.weight", None),
        ("model.mtp_block.0.mlp.gate.weight", None),
        ("model.visual.blocks.0.attn.qkv.weight", None),
        ("vision_tower.blocks.0.attn.qkv.weight", None),
        ("model.vision_tower.encoder.layers.0.mlp.down_proj.linear.weight", None),
        ("model.embed_vision.embedding_projection.weight", None),
        ("audio_tower.subsample_conv_projection.layer0.conv.weight", None),
        ("model.layers.0.self_attn.rotary_emb.inv_freq", None),
    ],
)
def test_names(name, wanted):
    assert canonical_name(name, 4, FAMILIES["deepseek_v3"].renames) == wanted


def test_the_last_layer_is_not_taken_for_multi_token_prediction():
    assert canonical_name("model.layers.61.mlp.gate.weight", layers=62) is not None
    assert canonical_name("model.layers.61.mlp.gate.weight", layers=61) is None


def test_two_tensors_for_one_place():
    pair = [tensor("model.language_model.norm.weight", 4), tensor("language_model.model.norm.weight", 4)]
    with pytest.raises(ModelFileError, match=r"model\.language_model\.norm.* and language_model"):
        sanitize.canonical_tensors(pair, next_args())


@settings(max_examples=examples(30))
@given(heads=st.integers(1, 5), ratio=st.integers(1, 4), dk=st.integers(1, 6), dv=st.integers(1, 6))
def test_grouped_rows_against_a_loop_over_heads(heads, ratio, dk, dv):
    args = next_args(
        linear_num_key_heads=heads,
        linear_num_value_heads=heads * ratio,
        linear_key_head_dim=dk,
        linear_value_head_dim=dv,
    )
    labels, labels_ba = [], []
    for head in range(heads):
        for part, width in (("q", dk), ("k", dk), ("v", ratio * dv), ("z", ratio * dv)):
            labels += [(part, head, i) for i in range(width)]
        for part in "ba":
            labels_ba += [(part, head, i) for i in range(ratio)]
    fused = FAMILIES["qwen3_next"].fused_rows(args.layers[0], 0, 1)
    for path, stored in (("qkvz", labels), ("ba", labels_ba)):
        pieces = fused[f"model.layers.0.linear_attn.in_proj_{path}"]
        got = [stored[row] for _, rows in pieces for row in rows]
        order = {part: i for i, part in enumerate(path)}
        assert got == sorted(stored, key=lambda label: (order[label[0]], *label[1:]))
        assert [name.rpartition("_")[2] for name, _ in pieces] == (["qkv", "z"] if path == "qkvz" else ["b", "a"])


def convolution(args, hf):
    channels, taps = args.mixers[0].channels, args.mixers[0].taps
    name = "model.layers.0.linear_attn.conv1d.weight"
    return {name: tensor(name, *((channels, 1, taps) if hf else (channels, taps, 1)))}


def test_the_convolutions_shape_shows_whether_norms_are_centred():
    args = next_args()
    assert sanitize.has_zero_centred_norms(args, convolution(args, hf=True))
    assert not sanitize.has_zero_centred_norms(args, convolution(args, hf=False))
    with pytest.raises(ModelFileError, match=r"conv1d\.weight is missing"):
        sanitize.has_zero_centred_norms(args, {})


def test_without_convolutions_stacked_experts_show_it():
    args = next_args(layer_types=["full_attention"] * 4)
    assert sanitize.has_zero_centred_norms(args, {})
    assert not sanitize.has_zero_centred_norms(args, {"model.layers.0.mlp.switch_mlp.up_proj.weight": None})


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_other_families_never_centre(family):
    assert not sanitize.has_zero_centred_norms(ModelArgs.from_dict(goldens.config(family)), {})


def test_which_norms_are_centred():
    stem = "model.layers.0."
    centred = ["input_layernorm", "post_attention_layernorm", "self_attn.q_norm", "self_attn.k_norm"]
    args = next_args()
    assert all(sanitize.is_zero_centred(args, f"{stem}{name}.weight") for name in centred)
    assert sanitize.is_zero_centred(args, "model.norm.weight")
    assert not sanitize.is_zero_centred(args, f"{stem}linear_attn.norm.weight")


def test_adding_one_keeps_every_bit_of_a_small_weight():
    weight = mx.array([0.0123, -0.0456, 1e-3]).astype(mx.bfloat16)
    exact = np.array(weight.astype(mx.float32)).astype(np.float64) + 1
    (got,) = PlainSource("norm", held(weight), centred=True).arrays()
    got = np.array(got).astype(np.float64)
    assert np.abs(got - exact).max() < 1e-7
    rounded = np.array((weight + 1).astype(mx.float32))
    assert np.abs(rounded - exact).max() > 1e-4  # adding in bfloat16 would lose this


def test_convolution_axes():
    stored = mx.arange(12, dtype=mx.float32).reshape(3, 1, 4)
    (moved,) = PlainSource("conv", held(stored), convolution=True).arrays()
    assert moved.shape == (3, 4, 1)
    assert np.array_equal(np.array(moved)[:, :, 0], np.array(stored)[:, 0])

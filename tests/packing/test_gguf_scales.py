"""NVFP4 in GGUF files: matrices whose scales a tensor `.scale` multiplies, in place and converted; and the forms of
Q4_1 and Q5_1, whose float16 values stay what they are beside scales of any dtype."""

import goldens
import mlx.core as mx
import numpy as np
import oracle
import pytest
from test_gguf_families import TOLERANCE, cache, logits_of_every_way  # noqa: F401 (a fixture)

from moeflux_mlx.errors import ModelFileError
from moeflux_mlx.opening.engine import load_model
from moeflux_mlx.opening.locate import locate
from moeflux_mlx.ops.forms import unpacked_float32
from moeflux_mlx.packing.gguf_forms import FORMS, repacked
from moeflux_mlx.packing.in_place import open_in_place

pytest.importorskip("gguf")
import gguf_models  # noqa: E402  (needs gguf)

FAMILY = "qwen3_moe"
TYPES = {"attn_v.": "Q8_0", "ffn_up_exps": "Q5_1", "blk.1.ffn_up_exps": "NVFP4", "blk.2.ffn_gate_exps": "Q4_1"}


def type_of(name):
    return next((kind for part, kind in reversed(TYPES.items()) if part in name), "NVFP4")


@pytest.mark.parametrize("kind, scales", [("NVFP4", range(0x7F)), ("MXFP4", range(0xFD))])
def test_every_scale_is_that_of_gguf(kind, scales):
    """But NaN, and the two largest of MXFP4, whose largest values are infinite."""
    nbytes = FORMS[kind].nbytes
    rows = np.random.default_rng(1).integers(0, 256, (len(scales), nbytes), dtype=np.uint8)
    rows[:, : 4 if kind == "NVFP4" else 1] = np.array(scales)[:, None]
    made = np.array(unpacked_float32(FORMS[kind].quant, *map(mx.array, repacked(kind, rows))))
    wanted = gguf_models.values_of(kind, rows)
    assert np.array_equal(made, wanted) and np.isfinite(wanted).all()


def factors():
    """Returns the tensors `.scale` by name, and what multiplies the weights of the hub's names."""
    config, rng = goldens.config(FAMILY), np.random.default_rng(5)
    stored, of_weights = {}, {}
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        for name in ("gate", "down"):
            if type_of(f"blk.{layer}.ffn_{name}_exps") != "NVFP4":
                continue
            scale = rng.uniform(0.5, 2, config["num_experts"]).astype(np.float32)
            stored[f"blk.{layer}.ffn_{name}_exps.scale"] = scale
            stored[f"blk.{layer}.ffn_{name}_exps.input_scale"] = 3 * scale
            of_weights |= {f"{prefix}.mlp.experts.{e}.{name}_proj.weight": value for e, value in enumerate(scale)}
        scale = rng.uniform(0.5, 2, 1).astype(np.float32)
        stored[f"blk.{layer}.attn_q.scale"] = scale
        of_weights[f"{prefix}.self_attn.q_proj.weight"] = scale[0]
    return stored, of_weights


def test_scales_of_matrices(tmp_path):
    path, (stored, of_weights) = tmp_path / "m.gguf", factors()
    weights = gguf_models.write_gguf(path, FAMILY, type_of, extra=stored)
    assert of_weights.keys() <= weights.keys()
    scaled = {name: values * of_weights.get(name, 1) for name, values in weights.items()}
    tokens = goldens.golden(FAMILY)[0][:12]
    wanted, without = (oracle.forward(goldens.config(FAMILY), one, tokens) for one in (scaled, weights))
    (made,) = logits_of_every_way(path, tmp_path / "packed", tokens)
    assert np.abs(made - wanted).max() < TOLERANCE < np.abs(without - wanted).max()


def test_the_forms_keep_their_bits(tmp_path):
    path = tmp_path / "m.gguf"
    gguf_models.write_gguf(path, FAMILY, type_of, extra=factors()[0])
    modes = set()
    for record in open_in_place(locate(path)).experts.layout.records.values():
        for part in record.projections:
            modes.add(part.quant.mode)
            bits = {"q4_1": 5, "q5_1": 6, "nvfp4": 4.5}[part.quant.mode]
            fields = [field.size for field in part.codes if field.part != "global_scale"]
            assert 8 * sum(fields) == bits * part.rows * part.columns
    assert modes == {"q4_1", "q5_1", "nvfp4"}


def test_scales_that_do_not_fit_are_refused(tmp_path):
    path = tmp_path / "m.gguf"
    ones = np.ones(3, np.float32)
    for name, said in (
        ("blk.0.ffn_down_exps.scale", r"down_proj.scale has shape \[3\]; the model needs"),
        ("blk.0.attn_q.scale", r"q_proj.scale has shape \[3\]; the model needs \[1\]"),
        ("blk.0.ffn_up_exps.scale", "up_proj.scale does not belong to this model"),  # which is of another type
    ):
        gguf_models.write_gguf(path, FAMILY, type_of, extra={name: ones})
        with pytest.raises(ModelFileError, match=said):
            load_model(path)
    gguf_models.write_gguf(path, FAMILY, type_of, extra={"blk.0.attn_q.scale": np.full(1, np.inf, np.float32)})
    with pytest.raises(ModelFileError, match="NaN or infinite"):
        load_model(path)

"""Families made of other families' parts, in the forms that publishers and mlx-lm write."""

import json
from functools import partial
from types import SimpleNamespace

import goldens
import mlx.core as mx
import numpy as np
import oracle
import pytest
from grids import drawn, marks
from minmax import convert
from tiny_models import on_cpu, tiny_directory, tiny_model

from moeflux_mlx.errors import ModelFileError
from moeflux_mlx.families.registry import FAMILIES
from moeflux_mlx.formats.checkpoint import read_bytes, read_header
from moeflux_mlx.opening.engine import load_model
from moeflux_mlx.packing.source_format import SourceFormat
from moeflux_mlx.quant import Quant

TOLERANCE = 2e-4
HEAD = "language_model.lm_head.weight"
KIMI_K25 = {"architectures": ["KimiK25ForConditionalGeneration"], "model_type": "kimi_k25"}
MXFP4 = {"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized"}
INT4 = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 4, "group_size": 32, "symmetric": True, "strategy": "group", "type": "int"},
        }
    },
    "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", "re:.*mlp\\.(gate|up|gate_up|down)_proj.*"],
}


def run(model, family):
    """Returns the logits [T, V] of the golden's tokens from position 0 on. One token is computed alone."""
    tokens, cache = mx.array(goldens.golden(family)[0])[None], model.make_cache()
    return np.array(mx.concatenate([model(tokens[:, :-1], cache), model(tokens[:, -1:], cache)], 1)[0])


def logits(path, family, **options):
    model = load_model(path, dtype=mx.float32, **options)
    rows = run(model, family)
    model.experts.close()
    return rows


def write(path, config, tensors):
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    goldens.write_safetensors(path / "model.safetensors", tensors)
    return path


def packed(source, **options):
    with on_cpu():
        convert(source, source.with_name(f"{source.name}-packed"), **options)
    return source.with_name(f"{source.name}-packed")


LEAST = {"expert_io": "pread", "expert_cache_bytes": 1}


@pytest.mark.parametrize("family, packs, options", drawn(goldens.KIN, [False, True], [{}, LEAST]))
def test_mlx_conversions_in_place_and_packed(tmp_path, family, packs, options):
    """Each conversion, mapped, read and resident, has the bits of the packed model that is made from the floats."""
    wanted = run(tiny_model(family, mx.float32, "hub"), family)
    if not goldens.first_position(family):
        assert np.abs(wanted - goldens.golden(family)[1]).max() < TOLERANCE
    source = tiny_directory(family) if packs else goldens.write_variant(tmp_path / "source", family, "mlx4")
    assert np.array_equal(logits(source, family, **options), wanted)


def test_a_last_matrix_that_is_the_embedding_or_is_not(tmp_path):
    """Gemma's checkpoints may contain it twice. Without `tie_word_embeddings` the last matrix is a separate one."""
    family, config = "gemma4", goldens.config("gemma4")
    tensors = goldens.hub_tensors(family)
    copied = {**tensors, "lm_head.weight": tensors["model.language_model.embed_tokens.weight"]}
    tied = packed(write(tmp_path / "tied", config, copied))
    config["text_config"]["tie_word_embeddings"] = False
    own = packed(write(tmp_path / "own", config, copied))
    wanted = goldens.golden(family)[1]
    assert all(np.abs(logits(path, family) - wanted).max() < TOLERANCE for path in (tied, own))
    assert (own / "resident.safetensors").stat().st_size > (tied / "resident.safetensors").stat().st_size


@pytest.mark.parametrize("family", ["qwen4_exp", "minimax_m3_vl"])
def test_norms_of_mlx_conversions_with_their_one_and_without(tmp_path, family):
    """mlx-lm and mlx-vlm leave norms as they are published, other tools add the one."""
    tensors = goldens.mlx_tensors(family)
    plain = {}
    for name, (kind, array) in tensors.items():
        is_centred = goldens._kind(family, name) == "centred_norm"
        plain[name] = goldens._bf16(goldens.as_float((kind, array)) + np.float32(1)) if is_centred else (kind, array)
    path = write(tmp_path / "plain", goldens.variant_config(family, "mlx4"), plain)
    assert np.array_equal(logits(path, family), logits(tiny_directory(family), family))


JOINED = {
    "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "self_attn.qkv_conv.conv": ("self_attn.q_conv1d", "self_attn.k_conv1d", "self_attn.v_conv1d"),
    "self_attn.fbg_a_proj": ("self_attn.f_a_proj", "self_attn.b_proj", "self_attn.g_a_proj"),
    "self_attn.qkv_a_proj": ("self_attn.q_a_proj", "self_attn.kv_a_proj_with_mqa"),
    "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
    "mlp.shared_experts.gate_up_proj": ("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj"),
}


def test_what_mlx_vlm_joins_of_glm5_next(tmp_path):
    """In every layer that has both matrices, the rows of one follow those of the other."""
    family = "glm5_next"
    tensors, joined = goldens.mlx_tensors(family), 0
    for layer in range(goldens.text_config(family)["num_hidden_layers"]):
        stem = f"language_model.model.layers.{layer}."
        for whole, parts in JOINED.items():
            for part in ("weight", "scales", "biases"):
                names = [f"{stem}{path}.{part}" for path in parts]
                if all(name in tensors for name in names):
                    kind, arrays = tensors[names[0]][0], [tensors.pop(name)[1] for name in names]
                    tensors[f"{stem}{whole}.{part}"], joined = (kind, np.concatenate(arrays)), joined + 1
    path = write(tmp_path / "joined", goldens.variant_config(family, "mlx4"), tensors)
    wanted = logits(tiny_directory(family), family)
    assert joined == 3 * (3 + 3 + 2 + 1 + 4) + 3
    assert np.array_equal(logits(path, family), wanted) and np.array_equal(logits(packed(path), family), wanted)


def test_what_mlx_vlm_joins_of_hy_v4(tmp_path):
    """Of each expert, rows of gate come first."""
    family = "hy_v4"
    tensors = dict(goldens.mlx_tensors(family))
    for name in [name for name in tensors if ".switch_mlp.gate_proj." in name]:
        (kind, gate), (_, up) = tensors.pop(name), tensors.pop(name.replace("gate_proj", "up_proj"))
        tensors[name.replace("gate_proj", "gate_up_proj")] = kind, np.concatenate([gate, up], axis=1)
    path = write(tmp_path / "joined", goldens.variant_config(family, "mlx4"), tensors)
    wanted = logits(tiny_directory(family), family)
    assert np.array_equal(logits(path, family, **LEAST), wanted)
    assert np.array_equal(logits(packed(path), family), wanted)


def test_experts_of_hy_v4_vl_as_published(tmp_path):
    """All experts of a layer are one matrix of mxfp8, whose scales have the same name with `_scale` behind it."""
    family, rng = "hy_v4_vl", np.random.default_rng(9)
    theirs, ours, forms = dict(goldens.hub_tensors(family)), dict(goldens.mlx_tensors(family)), {}
    ours = {name: tensor for name, tensor in ours.items() if ".switch_mlp." not in name}
    stacks = {name.partition("experts.")[0] for name in theirs if ".experts." in name}
    theirs = {name: tensor for name, tensor in theirs.items() if ".experts." not in name}
    for stem in stacks:
        for name, (rows, columns) in {"gate_up_proj": (128, 128), "down_proj": (128, 64)}.items():
            codes = rng.integers(0, 96, (9, rows, columns), np.uint8)
            scales = rng.integers(115, 119, (9, rows, columns // 32), np.uint8)
            theirs |= {f"{stem}experts.{name}": ("F8_E4M3", codes)}
            theirs |= {f"{stem}experts.{name}_scale": ("F8_E8M0", scales)}
            path = f"language_model.{stem}switch_mlp.{name}"
            ours |= {f"{path}.weight": ("U32", codes.view(np.uint32)), f"{path}.scales": ("U8", scales)}
            forms[path] = {"group_size": 32, "bits": 8, "mode": "mxfp8"}
    config = goldens.config(family)
    published = {**config, "quantization_config": {"quant_method": "mxfp8"}}
    stated = {**config, "quantization": {"group_size": 64, "bits": 4, **forms}}
    found = packed(write(tmp_path / "theirs", published, theirs), recipe="uniform")
    wanted = packed(write(tmp_path / "mlx", stated, ours), recipe="uniform")
    assert np.array_equal(logits(found, family), logits(wanted, family))


def test_kimi_k3_as_published(tmp_path):
    """The text part has a prefix, and experts are 4-bit floats, whose bytes are those of MLX's mxfp4. Names of weights
    of sums have a dot in the place of an underscore.
    """
    family, rng = "kimi_k3", np.random.default_rng(3)
    theirs, ours, forms = {}, dict(goldens.mlx_tensors(family)), {"group_size": 64, "bits": 4}
    ours = {name: tensor for name, tensor in ours.items() if ".switch_mlp." not in name}
    stacks = {}
    for name, (kind, array) in goldens.source(family).items():
        name = name.replace("_res_norm.weight", "_res.norm_weight").replace("_res_proj.weight", "_res.proj_weight")
        if ".experts." not in name:
            theirs[f"language_model.{name}"] = kind, array
            continue
        (rows, columns), path = array.shape, name.removesuffix(".weight")
        codes = rng.integers(0, 256, (rows, columns // 2), np.uint8)
        scales = rng.integers(118, 122, (rows, columns // 32), np.uint8)
        theirs[f"language_model.{path}.weight_packed"] = "U8", codes
        theirs[f"language_model.{path}.weight_scale"] = "U8", scales
        stem, _, rest = goldens._mlx_name(family, name).partition(".experts.")
        stack = stacks.setdefault(f"{stem}.switch_mlp.{rest.split('.')[1]}", ([], []))
        stack[0].append(codes.view(np.uint32)), stack[1].append(scales)
    for path, (codes, scales) in stacks.items():
        ours |= {f"{path}.weight": ("U32", np.stack(codes)), f"{path}.scales": ("U8", np.stack(scales))}
        forms[path] = {"group_size": 32, "bits": 4, "mode": "mxfp4"}
    text = {**goldens.config(family), "model_type": "kimi_linear", "quantization_config": MXFP4}
    source = write(tmp_path / "kimi", {"model_type": "kimi_k3", "text_config": text}, theirs)
    wanted = logits(write(tmp_path / "mlx", {**goldens.config(family), "quantization": forms}, ours), family)
    assert np.array_equal(logits(packed(source, recipe="uniform"), family), wanted)


def test_what_mlx_lm_joins_of_kimi_k3(tmp_path):
    """The projections to queries, keys and values, and their convolutions."""
    family, names = "kimi_k3", ("qkv_proj", "qkv_conv.conv")
    tensors = dict(goldens.mlx_tensors(family))
    for layer in range(goldens.text_config(family)["num_hidden_layers"]):
        stem = f"model.layers.{layer}.self_attn."
        for whole in names:
            for part in ("weight", "scales", "biases"):
                parts = [f"{stem}{whole.replace('qkv', one)}.{part}" for one in "qkv"]
                if all(name in tensors for name in parts):
                    kind, arrays = tensors[parts[0]][0], [tensors.pop(name)[1] for name in parts]
                    tensors[f"{stem}{whole}.{part}"] = kind, np.concatenate(arrays)
    assert len(tensors) == len(goldens.mlx_tensors(family)) - 3 * 2 * 4
    path = write(tmp_path / "joined", goldens.variant_config(family, "mlx4"), tensors)
    wanted = logits(tiny_directory(family), family)
    assert np.array_equal(logits(path, family), wanted) and np.array_equal(logits(packed(path), family), wanted)


def test_what_mlx_vlm_joins_of_inkling(tmp_path):
    """The matrices that read attention's input. Factors beside stacks are 1; others and those of nvfp4 are refused."""
    family, tensors = "inkling", dict(goldens.mlx_tensors("inkling"))
    for layer in range(goldens.text_config(family)["num_hidden_layers"]):
        stem = f"language_model.model.layers.{layer}."
        for part in ("weight", "scales", "biases"):
            parts = [tensors.pop(f"{stem}self_attn.{one}_proj.{part}") for one in "qkvr"]
            tensors[f"{stem}self_attn.qkvr_proj.{part}"] = parts[0][0], np.concatenate([array for _, array in parts])
        if f"{stem}mlp.gate_weight" in tensors:
            tensors |= {f"{stem}mlp.switch_mlp.{name}_scale": ("F32", np.ones(9, "<f4")) for name in ("gate", "out")}
    config = goldens.variant_config(family, "mlx4")
    path = write(tmp_path / "joined", config, tensors)
    wanted = logits(tiny_directory(family), family)
    assert np.array_equal(logits(path, family, **LEAST), wanted) and np.array_equal(
        logits(packed(path), family), wanted
    )
    for name, expert in (("gate", 8), ("out", 0)):
        factors = np.ones(9, "<f4")
        factors[expert] = 1.5
        others = {f"{stem}mlp.switch_mlp.{name}_scale": ("F32", factors)}
        path, refused = write(tmp_path / name, config, tensors | others), f"{name}_scale has factors of nvfp4 experts"
        for opened in (partial(load_model, dtype=mx.float32), packed):
            with pytest.raises(ModelFileError, match=refused):
                opened(path)
    made, forms = _nvfp4_experts(np.random.default_rng(1), lambda path, name: f"language_model.{path}")
    config["quantization"] |= forms
    tensors = {name: one for name, one in tensors.items() if ".switch_mlp." not in name or "_scale" in name} | made
    with pytest.raises(ModelFileError, match="gate_scale has factors of nvfp4 experts, which are not read; download"):
        load_model(write(tmp_path / "nvfp4", config, tensors), dtype=mx.float32)


def _nvfp4_experts(rng, named, layers=(1, 2, 3)):
    """Returns MLX's experts of Inkling's layers in nvfp4, and their forms."""
    made, forms = {}, {}
    for layer in layers:
        for name, (rows, columns) in {"gate": (64, 128), "up": (64, 128), "down": (128, 64)}.items():
            path = named(f"model.layers.{layer}.mlp.switch_mlp.{name}_proj", name)
            codes = rng.integers(0, 256, (9, rows, columns // 2), np.uint8)
            made[f"{path}.weight"] = "U32", codes.view(np.uint32)
            made[f"{path}.scales"] = "U8", rng.integers(0x20, 0x40, (9, rows, columns // 16), np.uint8)
            forms[path] = {"group_size": 16, "bits": 4, "mode": "nvfp4"}
    return made, forms


def test_experts_of_inkling_as_published_in_nvfp4(tmp_path):
    """Rows of gate and up alternate in codes and scales, and both have the same factors."""
    family, rng = "inkling", np.random.default_rng(2)
    ours, forms = _nvfp4_experts(rng, lambda path, name: f"language_model.{path}")
    theirs = {name: one for name, one in goldens.hub_tensors(family).items() if ".mlp.experts." not in name}
    for layer in (1, 2, 3):
        stem, path = f"model.llm.layers.{layer}.mlp.experts.", f"language_model.model.layers.{layer}.mlp.switch_mlp."
        first, last = rng.uniform(0.5, 1, (2, 9)).astype(np.float32) / 64
        for part, kind in (("weight", "U8"), ("scales", "F8_E4M3")):
            gate, up, down = (ours[f"{path}{name}_proj.{part}"][1].view(np.uint8) for name in ("gate", "up", "down"))
            end = "" if part == "weight" else ".scale"
            theirs[f"{stem}w13_weight{end}"] = kind, np.stack([gate, up], axis=2).reshape(9, 128, -1)
            theirs[f"{stem}w2_weight{end}"] = kind, down
        for name, factor in (("gate", first), ("up", first), ("down", last)):
            ours[f"{path}{name}_proj.global_scale"] = "F32", factor * np.float32(448 * 6)
            forms[f"{path}{name}_proj"]["global_scale"] = True
        theirs |= {f"{stem}w13_weight.scale2": ("F32", first), f"{stem}w2_weight.scale2": ("F32", last)}
        theirs |= {f"{stem}w2_weight.input_amax": ("F32", last[:1])}
    rest = {name: one for name, one in goldens.mlx_tensors(family).items() if ".switch_mlp." not in name}
    published = {**goldens.config(family), "quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}}
    stated = {**goldens.config(family), "quantization": {"group_size": 64, "bits": 4, **forms}}
    found = packed(write(tmp_path / "theirs", published, theirs), recipe="uniform")
    wanted = packed(write(tmp_path / "mlx", stated, rest | ours), recipe="uniform")
    assert np.array_equal(logits(found, family), logits(wanted, family))


def test_experts_of_inkling2_as_published_in_mxfp8(tmp_path):
    """Rows of gate and up alternate in codes and scales, whose names have `_scale` behind those of the codes."""
    family, rng, forms = "inkling2", np.random.default_rng(5), {}
    theirs = {name: one for name, one in goldens.hub_tensors(family).items() if ".mlp.experts." not in name}
    ours = {name: one for name, one in goldens.mlx_tensors(family).items() if ".switch_mlp." not in name}
    for layer in range(5):
        stem, path = (
            f"model.llm.layers.{layer}.mlp.experts.",
            f"language_model.model.llm.layers.{layer}.mlp.switch_mlp.",
        )
        for name, (rows, columns) in {"w13": (128, 128), "w2": (128, 64)}.items():
            codes = rng.integers(0, 96, (9, rows, columns), np.uint8)
            scales = rng.integers(115, 119, (9, rows, columns // 32), np.uint8)
            theirs[f"{stem}{name}_weight"] = "F8_E4M3", codes
            theirs[f"{stem}{name}_weight_scale"] = "F8_E8M0", scales
            parts = {"gate": slice(0, None, 2), "up": slice(1, None, 2)} if name == "w13" else {"down": slice(None)}
            for part, own in parts.items():
                ours[f"{path}{part}_proj.weight"] = "U32", np.ascontiguousarray(codes[:, own]).view(np.uint32)
                ours[f"{path}{part}_proj.scales"] = "U8", np.ascontiguousarray(scales[:, own])
                forms[f"{path}{part}_proj"] = {"group_size": 32, "bits": 8, "mode": "mxfp8"}
    published = {**goldens.config(family), "quantization_config": {"quant_method": "mxfp8"}}
    stated = {**goldens.config(family), "quantization": {"group_size": 64, "bits": 4, **forms}}
    found = packed(write(tmp_path / "theirs", published, theirs), recipe="uniform")
    wanted = packed(write(tmp_path / "mlx", stated, ours), recipe="uniform")
    assert np.array_equal(logits(found, family), logits(wanted, family))


@pytest.mark.parametrize("count", [(), (9,)])
def test_experts_of_inkling2_loop_as_published(tmp_path, count):
    """In nvfp4, whose factor of an expert is a quotient by one number for all experts or one for each; the last layer
    has floats."""
    family, rng, layers = "inkling2_loop", np.random.default_rng(3), range(6)
    ours, forms = _nvfp4_experts(
        rng, lambda path, name: f"language_model.{path.replace('model.', 'model.llm.')}", layers
    )
    kept = lambda name: ".mlp.experts." not in name or ".layers.6." in name  # noqa: E731
    theirs = {name: one for name, one in goldens.hub_tensors(family).items() if kept(name)}
    for layer in layers:
        stem = f"model.llm.layers.{layer}.mlp.experts."
        path = f"language_model.model.llm.layers.{layer}.mlp.switch_mlp."
        below = rng.uniform(1, 2, count).astype(np.float32)
        for name, parts in {"w13": ("gate", "up"), "w2": ("down",)}.items():
            most = rng.uniform(20, 40, 9).astype(np.float32)
            for ending, part, kind in (("", "weight", "U8"), ("_scale", "scales", "F8_E4M3")):
                rows = [ours[f"{path}{one}_proj.{part}"][1].view(np.uint8) for one in parts]
                rows = np.stack(rows, axis=2).reshape(9, len(parts) * rows[0].shape[1], -1)
                theirs[f"{stem}{name}_weight{ending}"] = kind, rows
            theirs[f"{stem}{name}_weight_amax"] = "F32", most
            theirs[f"{stem}{name}_weight_outer_scale_denominator"] = "F32", below * np.float32(4096)
            for one in parts:
                ours[f"{path}{one}_proj.global_scale"] = "F32", most / (below * np.float32(4096)) * np.float32(448 * 6)
                forms[f"{path}{one}_proj"]["global_scale"] = True
    rest = {
        name: one for name, one in goldens.mlx_tensors(family).items() if ".switch_mlp." not in name or ".6." in name
    }
    stated = {**goldens.config(family), "quantization": {"group_size": 64, "bits": 4, **forms}}
    found = packed(write(tmp_path / "theirs", goldens.config(family), theirs), recipe="uniform")
    wanted = packed(write(tmp_path / "mlx", stated, rest | ours), recipe="uniform")
    assert np.array_equal(logits(found, family), logits(wanted, family))


OF_MLX_LM = ("kimi_k2", "mistral4", "minimax_m2", "qwen3_vl_moe", "kimi_k3", "granitemoehybrid", "longcat_flash")
# They have no prefix, router or mixer that none of the others has.
ALIKE = ("glm4_moe_air", "solar_open", "olmoe", "qwen2_moe", "afmoe", "bailing_hybrid")


@pytest.mark.parametrize("family", [*OF_MLX_LM, *(pytest.param(name, marks=pytest.mark.full) for name in ALIKE)])
def test_what_mlx_lm_makes_of_the_published_form(tmp_path, family):
    """The overrides name modules as mlx-lm's own model does. MiniMax's routers have 8 bits,
    Mistral's, OLMoE's and Qwen2-MoE's 4."""
    utils = pytest.importorskip("mlx_lm.utils", reason="mlx-lm needs Python 3.11")
    with on_cpu():  # on CUDA, mlx-lm's logits of some families' codes are wrong; of their floats they are right
        model, config = utils.load_model(tiny_checkpoint(family, tmp_path / "floats"), lazy=True)
        model, config = utils.quantize_model(model, config, 64, 4)
        (tmp_path / "source").mkdir()
        utils.save_model(tmp_path / "source", model, donate_model=False)
        utils.save_config(config, tmp_path / "source" / "config.json")
        model.set_dtype(mx.float32)
        wanted = np.array(model(mx.array(goldens.golden(family)[0])[None])[0])
    found = logits(tmp_path / "source", family)
    assert np.abs(found - wanted).max() < TOLERANCE
    assert np.array_equal(logits(packed(tmp_path / "source"), family), found)


def test_what_mlx_lm_makes_of_muse_spark(tmp_path):
    """It joins attention's matrices, lets their rows pair neighbours, makes weights of gates, and adds norms' one."""
    module = pytest.importorskip("mlx_lm.models.muse_spark", reason="mlx-lm needs Python 3.11")
    family, dtypes = "muse_spark", {"BF16": mx.bfloat16, "F32": mx.float32}
    theirs = SimpleNamespace(args=SimpleNamespace(vision=None, text=SimpleNamespace(head_dim=32)))
    floats = {n: mx.array(goldens.as_float(t)).astype(dtypes[t[0]]) for n, t in goldens.hub_tensors(family).items()}
    with on_cpu():
        made = module.Model.sanitize(theirs, floats)
        (tmp_path / "mlx").mkdir()
        mx.save_safetensors(str(tmp_path / "mlx" / "model.safetensors"), made)
    (tmp_path / "mlx" / "config.json").write_text(json.dumps(goldens.config(family)))
    assert any(name.endswith("qkvg_proj.weight") for name in made) and not set(floats) <= set(made)
    warmer, tensors = goldens.config(family), goldens.hub_tensors(family)
    warmer["text_config"]["residual_gate_temperature"] = 0.5
    published, other = (write(tmp_path / n, c, tensors) for n, c in (("a", goldens.config(family)), ("b", warmer)))
    wanted, changed = (logits(packed(path), family) for path in (published, other))
    assert np.array_equal(logits(packed(tmp_path / "mlx"), family), wanted) and not np.allclose(changed, wanted, 0.01)


def test_a_correction_bias_that_mlx_lm_leaves_out(tmp_path):
    """Without it ERNIE would choose other experts."""
    family = "ernie4_5_moe"
    tensors = {n: one for n, one in goldens.mlx_tensors(family).items() if not n.endswith("correction_bias")}
    path = write(tmp_path / "source", goldens.variant_config(family, "mlx4"), tensors)
    with pytest.raises(ModelFileError, match=r"model.layers.1.mlp.e_score_correction_bias is missing"):
        load_model(path, dtype=mx.float32)


def tiny_checkpoint(family, path):
    """Writes the floats without what a text model skips, because mlx-lm does not always skip it."""
    return write(path, goldens.config(family), goldens.hub_tensors(family))


@pytest.mark.parametrize(
    "family, theirs, ours",
    [
        ("hy_v3", "model.layers.1.mlp.router.gate", "model.layers.1.mlp.gate"),
        ("hy_v3", "model.layers.1.mlp.shared_mlp.up_proj", "model.layers.1.mlp.shared_expert.up_proj"),
        ("minimax_m2", "model.layers.1.block_sparse_moe.gate", "model.layers.1.mlp.gate"),
        ("glm4_moe", "model.layers.1.mlp.shared_experts.up_proj", "model.layers.1.mlp.shared_expert.up_proj"),
        ("kimi_k2", "language_model.model.layers.1.mlp.gate", "model.layers.1.mlp.gate"),
        ("gemma4", "language_model.model.layers.1.router.proj", "model.layers.1.mlp.gate"),
        ("gemma4", "language_model.model.layers.1.mlp.up_proj", "model.layers.1.mlp.shared_expert.up_proj"),
    ],
)
def test_overrides_name_modules_like_their_writer(family, theirs, ours):
    config = {"quantization": {"group_size": 64, "bits": 4, theirs: {"group_size": 64, "bits": 8}}}
    form = SourceFormat(config, renames=FAMILIES[family].renames)
    assert form.of(ours) == Quant(8, 64) and form.of(f"{ours}_other") == Quant(4, 64)


@pytest.mark.parametrize(
    "family", ["minimax_m2", "kimi_k2", "glm4_moe", "kolibri1", "axk2", pytest.param("glm5_next", marks=marks(False))]
)
def test_block_fp8_gives_the_bits_of_its_values(tmp_path, family):
    coded = goldens.fp8_tensors(family)
    config = goldens.variant_config(family, "fp8")
    found = packed(write(tmp_path / "fp8", config, {**coded, **goldens.skipped_tensors(family)}))
    wanted = packed(write(tmp_path / "floats", goldens.config(family), goldens._from_fp8(coded)))
    assert np.array_equal(logits(found, family), logits(wanted, family))


def with_one_scale(tensors, endings):
    """Returns each linear layer as float8 codes with one scale per matrix and a scale of activations, and their values.

    `endings` are the endings of the names of both scales, which replace the layer's own ending or follow it.
    """
    coded, values = {}, {}
    for name, tensor in tensors.items():
        w = goldens.as_float(tensor)
        if w.ndim < 2 or not (name.endswith("proj.weight") or ".experts." in name):
            coded[name] = values[name] = tensor
            continue
        scale = goldens._bf16(
            np.abs(w).max(axis=(1, 2) if w.ndim == 3 else None, keepdims=w.ndim == 3) / np.float32(448)
        )
        codes = oracle.f32_to_e4m3(w / goldens.as_float(scale))
        coded[name], values[name] = (
            ("F8_E4M3", codes),
            goldens._bf16(oracle.e4m3_values()[codes] * goldens.as_float(scale)),
        )
        for ending, one in zip(endings, (scale, goldens._bf16(np.ones(1, np.float32))), strict=True):
            coded[name + ending if ending.startswith("_") else name.replace(".weight", ending)] = one
    return coded, values


TENCENTS, MISTRALS = (".weight_scale", ".input_scale"), ("_scale_inv", "_activation_scale")


@pytest.mark.parametrize("family, endings", [("hy_v3", TENCENTS), ("mistral4", MISTRALS)])
def test_fp8_with_one_scale_for_a_matrix(tmp_path, family, endings):
    """Tencent and Mistral publish this form. The scales of activations are not needed."""
    coded, values = with_one_scale(goldens.hub_tensors(family), endings)
    config = {**goldens.config(family), "quantization_config": {"quant_method": "fp8", "activation_scheme": "static"}}
    found = packed(write(tmp_path / "fp8", config, coded))
    wanted = packed(write(tmp_path / "floats", goldens.config(family), values))
    assert np.array_equal(logits(found, family), logits(wanted, family))


def fused_attention(tensors, shards, block):
    """Returns the attention projections of MiMo in V2.6's form, shards of queries, keys and values with their own
    blocks of codes; and the values of q, k and v."""
    coded, values = dict(tensors), dict(tensors)
    for stem in {name.removesuffix("q_proj.weight") for name in tensors if name.endswith("q_proj.weight")}:
        parts = [goldens.as_float(coded.pop(f"{stem}{one}_proj.weight")) for one in "qkv"]
        rows = [np.concatenate(one) for one in zip(*(np.split(part, shards) for part in parts), strict=True)]
        codes, scales, spoken = zip(*(_coded(one, block) for one in rows), strict=True)
        coded[f"{stem}qkv_proj.weight"] = "F8_E4M3", np.concatenate(codes)
        coded[f"{stem}qkv_proj.weight_scale_inv"] = goldens._bf16(np.concatenate(scales))
        edges = np.cumsum([len(part) // shards for part in parts])[:-1]
        apart = zip(*(np.split(one, edges) for one in spoken), strict=True)
        for one, own in zip("qkv", apart, strict=True):
            values[f"{stem}{one}_proj.weight"] = goldens._bf16(np.concatenate(own))
    return coded, values


def _coded(w, block):
    """Returns codes, scales and values in blocks of so many rows and columns. The last blocks may be partial."""
    starts = [np.arange(0, n, block) for n in w.shape]
    scale = np.maximum.reduceat(np.maximum.reduceat(np.abs(w), starts[0], 0), starts[1], 1) / np.float32(448)
    scale = goldens.as_float(goldens._bf16(scale))
    spread = np.repeat(np.repeat(scale, block, 0)[: len(w)], block, 1)[:, : w.shape[1]]
    codes = oracle.f32_to_e4m3(w / spread)
    return codes, scale, oracle.e4m3_values()[codes] * spread


def mimo_v26(shards, block, **fields):
    """Returns (config, tensors, values) of a checkpoint of MiMo-V2.6.

    Keys and values are doubled so that they can be split.
    """
    config = {**goldens.config("mimo_v2_flash"), "model_type": "mimo_v2", "num_key_value_heads": 2, **fields}
    tensors = dict(goldens.hub_tensors("mimo_v2_flash"))
    for layer in (i for i, windowed in enumerate(config["hybrid_layer_pattern"]) if not windowed):
        for name in (f"model.layers.{layer}.self_attn.{one}_proj.weight" for one in "kv"):
            tensors[name] = tensors[name][0], np.concatenate([tensors[name][1]] * 2)
    stated = {"quant_method": "fp8", "weight_block_size": [block, block]}
    return {**config, "quantization_config": stated}, *fused_attention(tensors, shards, block)


@pytest.mark.parametrize("shards, block", [(2, 32), (1, 32)])
def test_fused_attention_of_shards(tmp_path, shards, block):
    """A shard ends in the middle of a block, and the next shard begins a new block."""
    config, coded, values = mimo_v26(shards, block)
    found = packed(write(tmp_path / "fp8", config, coded))
    wanted = packed(write(tmp_path / "floats", config, values))
    assert np.array_equal(logits(found, "mimo_v2_flash"), logits(wanted, "mimo_v2_flash"))


def test_shards_that_cannot_be_told(tmp_path):
    """If all shards end near the end of a block, one shard and two shards have equally many scales."""
    config, coded, _ = mimo_v26(2, 64)
    with pytest.raises(ModelFileError, match=r"qkv_proj.weight_scale_inv: the scales allow \[1, 2\] shards"):
        packed(write(tmp_path / "fp8", config, coded))


def test_kimi_as_published(tmp_path):
    """The text part has a prefix, experts are 4-bit integers, and there is an image encoder.

    The bits are those of MLX's form.
    """
    family, rng = "kimi_k2", np.random.default_rng(7)
    floats, ours = goldens.hub_tensors(family), goldens.mlx_tensors(family)
    theirs = {f"language_model.{name}": tensor for name, tensor in floats.items() if ".experts." not in name}
    theirs |= dict.fromkeys(("vision_tower.encoder.blocks.0.wo.weight", "mm_projector.proj.0.weight"), theirs[HEAD])
    ours = {name: tensor for name, tensor in ours.items() if ".switch_mlp." not in name}
    forms = {"group_size": 64, "bits": 4}
    for name in (name for name in floats if ".experts." in name):
        (rows, columns), path = floats[name][1].shape, name.removesuffix(".weight")
        words = rng.integers(0, 2**32, (rows, columns // 8), np.uint32)
        scale = goldens._bf16(rng.uniform(0.005, 0.02, (rows, columns // 32)).astype(np.float32))
        stored = ("I32", words.view(np.int32)), scale, ("I32", np.array([rows, columns], np.int32))
        parts = ("weight_packed", "weight_scale", "weight_shape")
        theirs |= {f"language_model.{path}.{part}": one for part, one in zip(parts, stored, strict=True)}
        biases = goldens._bf16(goldens.as_float(scale) * np.float32(-8))
        ours |= {name: ("U32", words), f"{path}.scales": scale, f"{path}.biases": biases}
        forms[path] = {"group_size": 32, "bits": 4}
    nested = {**KIMI_K25, "text_config": {**goldens.config(family), "quantization_config": INT4}}
    found = packed(write(tmp_path / "kimi", nested, theirs), recipe="uniform")
    wanted = packed(write(tmp_path / "mlx", {**goldens.config(family), "quantization": forms}, ours))
    assert np.array_equal(logits(found, family), logits(wanted, family))


@pytest.mark.parametrize("family, size", [("deepseek_v4", 128), ("deepseek_v41", 32)])
def test_deepseek_v4_as_published(tmp_path, family, size):
    """Experts are 4-bit floats, other matrices float8 blocks, with scales that are powers of two.

    The bits are those of MLX's mxfp4 and mxfp8.
    """
    rng, forms = np.random.default_rng(5), {"group_size": 64, "bits": 4}
    theirs, replaced = dict(goldens.hub_tensors(family)), (".switch_mlp.", ".attn.w")
    ours = {n: tensor for n, tensor in goldens.mlx_tensors(family).items() if not any(one in n for one in replaced)}
    stacks = {}
    for name in [name for name in theirs if ".experts." in name or ".attn.w" in name]:
        (rows, columns), scale = theirs[name][1].shape, name.replace(".weight", ".scale")
        mine = goldens._mlx_name(family, name)
        if ".experts." in name:
            codes = rng.integers(0, 256, (rows, columns // 2), np.uint8)
            scales = rng.integers(118, 122, (rows, columns // 32), np.uint8)
            theirs |= {name: ("I8", codes.view(np.int8)), scale: ("F8_E8M0", scales)}
            stem, _, rest = mine.partition(".experts.")
            stack = stacks.setdefault(f"{stem}.switch_mlp.{rest.split('.')[1]}", ([], []))
            stack[0].append(codes.view(np.uint32)), stack[1].append(scales)
        else:
            codes = rng.integers(0, 96, (rows, columns), np.uint8) | rng.integers(0, 2, (rows, columns), np.uint8) << 7
            scales = rng.integers(118, 121, (-(-rows // size), -(-columns // size)), np.uint8)
            theirs |= {name: ("F8_E4M3", codes), scale: ("F8_E8M0", scales)}
            spread = scales.repeat(size, 0)[:rows].repeat(size // 32, 1)[:, : columns // 32]
            path = mine.removesuffix(".weight")
            ours |= {mine: ("U32", codes.view(np.uint32)), f"{path}.scales": ("U8", np.ascontiguousarray(spread))}
            forms[path] = {"group_size": 32, "bits": 8, "mode": "mxfp8"}
    for path, (codes, scales) in stacks.items():
        ours |= {f"{path}.weight": ("U32", np.stack(codes)), f"{path}.scales": ("U8", np.stack(scales))}
        forms[path] = {"group_size": 32, "bits": 4, "mode": "mxfp4"}
    config = goldens.config(family)
    published = {"quant_method": "fp8", "fmt": "e4m3", "scale_fmt": "ue8m0", "weight_block_size": [size, size]}
    source = write(tmp_path / "theirs", {**config, "quantization_config": published}, theirs)
    wanted = write(tmp_path / "mlx", {**config, "quantization": forms}, ours)
    for folder in (source, wanted):
        if goldens.token_map(family):
            (folder / "engram_token_map.json").write_text(json.dumps(goldens.token_map(family)))
    found = packed(source, recipe="uniform")
    assert np.array_equal(logits(found, family), logits(wanted, family))
    kept = json.loads((found / "config.json").read_text())["quantization"]
    assert kept["model.layers.1.self_attn.wo_a"]["mode"] == "mxfp8"


@pytest.mark.parametrize("width", [64, 192])
def test_fused_experts_in_either_order_of_axes(tmp_path, width):
    """Qwen published one order, and transformers saves the other.

    If gate and up are square, the shape of down decides.
    """
    family, rng = "qwen3_vl_moe", np.random.default_rng(width)
    config, shapes = goldens.config(family), {"gate_up_proj": (9, 128, 2 * width), "down_proj": (9, width, 128)}
    config["text_config"]["moe_intermediate_size"] = width
    theirs = dict(goldens.hub_tensors(family))
    for name in [name for name in theirs if ".experts." in name]:
        theirs[name] = goldens._bf16(rng.normal(0, 0.1, shapes[name.rpartition(".")[2]]).astype(np.float32))
    turned = {name: one for name, one in theirs.items() if ".experts." in name}
    turned = {name: (kind, np.ascontiguousarray(one.swapaxes(1, 2))) for name, (kind, one) in turned.items()}
    published = packed(write(tmp_path / "published", config, theirs))
    saved = packed(write(tmp_path / "saved", config, {**theirs, **turned}))
    assert np.array_equal(logits(published, family), logits(saved, family))


@pytest.mark.parametrize("count", [119, 96, 80])
def test_numbers_of_experts_that_pruning_leaves(tmp_path, count):
    """The golden's experts come last, after others that are never chosen because of their biases."""
    family, config, tensors = "hy_v3", goldens.config("hy_v3"), {}
    more = count - config["num_experts"]
    config["num_experts"] = count
    for name, (kind, array) in goldens.hub_tensors(family).items():
        stem, found, rest = name.partition(".experts.")
        expert, _, rest = rest.partition(".")
        if found:
            tensors[f"{stem}.experts.{int(expert) + more}.{rest}"] = kind, array
            tensors |= {f"{stem}.experts.{e}.{rest}": (kind, array) for e in range(more) if expert == "0"}
        elif name.endswith(("router.gate.weight", "expert_bias")):
            others = np.full((more, *array.shape[1:]), -10 if kind == "F32" else 0, array.dtype)
            tensors[name] = kind, np.concatenate([others, array])
        else:
            tensors[name] = kind, array
    found = logits(packed(write(tmp_path / "pruned", config, tensors)), family)
    assert np.abs(found - goldens.golden(family)[1]).max() < TOLERANCE


@pytest.mark.parametrize("family", ["qwen3_5_moe", "deepseek_v3", "glm4v_moe", "hy_v3"])
def test_image_encoders_and_drafting_heads_are_kept_aside(tmp_path, family):
    """They are kept under their own names and with their own bytes, without effect on the model.

    In place they are not read.
    """
    source = goldens.write_variant(tmp_path / "hub", family, "hub")
    skipped = goldens.skipped_tensors(family)
    kept = read_header(packed(source) / "aside.safetensors")
    assert {name: (one.dtype, one.shape) for name, one in kept.items()} == {
        name: (kind, array.shape) for name, (kind, array) in skipped.items()
    }
    for name, (kind, array) in skipped.items():
        one = kept[name]
        assert read_bytes(one.file, one.offset, one.nbytes) == array.astype(goldens.DTYPES[kind]).tobytes()
    with_more = {**goldens.mlx_tensors(family), **skipped}
    path = write(tmp_path / "mlx", goldens.variant_config(family, "mlx4"), with_more)
    assert np.array_equal(logits(path, family), logits(packed(source), family))


def test_tensors_of_any_dtype_are_kept_but_rotary_frequencies_are_not(tmp_path):
    family = "qwen3_moe"
    more = {
        "mtp.fc.weight": ("F8_E4M3", np.arange(32, dtype=np.uint8).reshape(4, 8)),
        "mtp.fc.weight_shape": ("I32", np.array([4, 8], np.int32)),
        "mtp.layers.0.self_attn.rotary_emb.inv_freq": ("F32", np.ones(4, np.float32)),
        "model.layers.0.self_attn.rotary_emb.inv_freq": ("F32", np.ones(4, np.float32)),
    }
    made = packed(write(tmp_path / "hub", goldens.config(family), {**goldens.hub_tensors(family), **more}))
    kept = read_header(made / "aside.safetensors")
    assert {name: one.dtype for name, one in kept.items()} == {name: more[name][0] for name in list(more)[:2]}
    assert not (tiny_directory(family, "hub") / "aside.safetensors").exists()

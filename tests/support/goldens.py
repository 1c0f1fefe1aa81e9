"""Tiny random checkpoints of every family in every layout that is read, and their golden logits.

Promises: `checkpoint_dir` and `write_variant` make the same bytes on every machine. Weights are not stored:
each tensor is drawn from PCG64 (whose raw stream numpy guarantees) seeded by its name, with exact integer
and correctly rounded arithmetic only, and `fixtures/models/checksums.json` pins the result. The configs and
the logits are stored; `scripts/goldens/make_goldens.py` made the logits with transformers, float32, eager.
Does not know: the package under test, mlx or torch.

Golden logits are those of the weights after 4-bit quantisation (group 64, from bf16; routers of the Qwen
families 8-bit; DeepSeek's router, norms, convolutions and per-head vectors not quantised) and exact
dequantisation.

Variants, each a checkpoint of the same tiny model:
  hub             bf16 safetensors in the published layout, with tensors that a text model must skip
  hub_sharded     the same in three shards with an index
  transformers5   config and tensor names as transformers 5 saves them
  mlx4            an MLX 4-bit conversion: stacked experts, MLX names, quantisation overrides
  moeflux         mlx/, artifacts/model_weights.bin and manifest, root/packed_experts/ (deepseek_v3,
                  qwen3_5_moe)
  fp8             128x128 block float8 (deepseek_v3, qwen3_5_moe): to float32, then bf16, then 4 bits
  negbias         hub, with a router bias that makes every biased score negative (deepseek_v3)
  mlx4_embed_q    mlx4 with kv_b_proj split into embed_q and unembed_out, each quantised alone (deepseek_v3)
`dense` is a golden without a checkpoint of its own: the hub weights before quantisation.

`KIN` are families that are made of the parts of those in `FAMILIES`, with other switches and names: only tests of
configurations, conversions and logits run on them. Names and shapes of their tensors are stored as transformers saved
them (`tensors.json`); their golden may begin at a later position than 0 (`first`). They have no `moeflux` variant.
"""

import copy
import functools
import hashlib
import json
import re
import shutil
import zlib
from pathlib import Path

import numpy as np
import oracle
from once import made_once

FIXTURES = Path(__file__).parent.parent / "fixtures" / "models"
FIXTURES_OF_KIN = FIXTURES.parent / "kin"
FAMILIES, KIN = (
    tuple(sorted(path.name for path in folder.iterdir() if path.is_dir())) for folder in (FIXTURES, FIXTURES_OF_KIN)
)
TRANSPOSED = ("qwen3_vl_moe", "gpt_oss", "llama4")  # their fused experts are [E, in, out]
INTERLEAVED = ("gpt_oss", "inkling", "inkling2", "inkling2_loop")  # in their fused experts, gate and up alternate
ZERO_CENTRED = ("step3p5", "qwen4_exp", "minimax_m3_vl", "muse_spark")  # their norms are stored as weight - 1
PLAIN_NORM = {"muse_spark": "model.language_model.norm.weight"}  # all but this one
# mlx-lm's stacked experts, if not switch_mlp.
STACKS = dict.fromkeys(("gpt_oss", "afmoe", "llama4", "dots1"), "experts") | {"gemma4": "experts.switch_glu"}
# They make the logits too, or are scaled.
LOW_EMBEDDINGS = ("gemma4", "lfm2_moe", "ernie4_5_moe", "afmoe", "granitemoehybrid", "cohere2_moe")
LOW_EMBEDDINGS += ("cohere2_moe_north", "hunyuan_v1_moe")
# Beginnings of names of encoders of images and sounds, if not model.visual.
ENCODERS = {
    "hy_v4_vl": ("vit.",),
    "dots3_note": ("vision_encoder.", "audio_encoder."),
    "muse_spark": ("model.vision_tower.", "model.vision_adapter.", "model.vision_projection.", "model.audio_tower."),
}
INTEGERS = ("layer_multipliers", "ngram_heads_vocab_sizes", "ngram_heads_offsets")  # computed as in transformers
ROUTERS = (".gate.weight", ".router.weight", ".router.proj.weight", ".router.layer.weight", ".classifier.weight")
ROUTERS += (".gate.wg.weight", ".v_router.weight")
CONVOLUTIONS = ("conv1d.weight", "conv.conv.weight", "sconv.weight")
CORRECTIONS = ("correction_bias", "expert_bias", "router_bias", ".gate.bias")
# Ends of names of norms, vectors, and matrices of few columns.
NOT_QUANTISED = ("norm.weight", "norm_f.weight", *CONVOLUTIONS, "A_log", "dt_bias", "bias", ".D", *INTEGERS, "sinks")
NOT_QUANTISED += ("norm_key.weight", "norm_query.weight", "norm_conv.weight", "norm_1.weight", "norm_2.weight")
NOT_QUANTISED += ("weights_proj.weight", "tid2eid", "_fn", "_base", "_scale", ".ape", "attn_sink", "sink_param")
NOT_QUANTISED += (".router.scale", ".layer_scalar", "res_proj.weight", ".q_weight", ".k_weight", "global_scale")
NOT_QUANTISED += ("rel_logits_proj.proj", "static_w", "_clip.scale", "_query", "compress_ape", "compress_gate")
NOT_QUANTISED += ("softmax_offset", "ssmax_scaling.s", "ssmax_scaling.b", "alpha", "W_up.weight", "residual_gate.gate")
# Parts of names that mlx-lm's conversions (for hy_v3 Rapid-MLX's) spell differently from the hub.
MLX_NAMES = {
    "deepseek_v4": (
        *(("^layers.", "model.layers."), ("^embed.", "model.embed_tokens."), ("^head.", "lm_head.")),
        *(("^norm.", "model.norm."), ("^hc_head_", "model.hc_head."), (".gate.bias", ".gate.e_score_correction_bias")),
        *((".hc_attn_", ".attn_hc."), (".hc_ffn_", ".ffn_hc."), (".w1.", ".gate_proj."), (".w2.", ".down_proj.")),
        (".w3.", ".up_proj."),
    ),
    "hy_v3": ((".mlp.expert_bias", ".mlp.router.expert_bias"),),
    "mistral_large4": (  # mlx-lm has no such family; as transformers calls its parameters
        *(("^tok_embeddings.", "model.embed_tokens."), ("^norm.", "model.norm."), ("^output.", "lm_head.")),
        *(("^layers.", "model.layers."), ("^lerope.", "model.rotary_emb."), (".feed_forward.", ".mlp.")),
        *((".attention.", ".self_attn."), (".switch_mlp.", ".mlp.switch_mlp."), (".gate.", ".mlp.gate.")),
        *((".shared_experts.", ".mlp.shared_experts."), (".attention_norm.", ".input_layernorm.")),
        *((".ffn_norm.", ".post_attention_layernorm."), (".kv_a_norm.", ".kv_a_layernorm."), (".wq.", ".q_proj.")),
        *((".wkv_a_with_mqa.", ".kv_a_proj_with_mqa."), (".wkv_b.", ".kv_b_proj."), (".wo.", ".o_proj.")),
        *((".w1.", ".gate_proj."), (".w2.", ".down_proj."), (".w3.", ".up_proj.")),
        *((".ssmax_scaling.s", ".softmax_scaling.scale"), (".ssmax_scaling.b", ".softmax_scaling.bias")),
    ),
    "kolibri1": ((".moe.router.", ".mlp."),),
    "laguna": ((".mlp.experts.e_score", ".mlp.gate.e_score"), (".mlp.gate.weight", ".mlp.gate.proj.weight")),
    "step3p5": (
        *((".moe.gate.", ".mlp.gate.gate."), (".moe.router_bias", ".mlp.gate.router_bias")),
        *((".moe.", ".mlp.switch_mlp."), (".share_expert.", ".mlp.share_expert.")),
    ),
    **dict.fromkeys(
        ("kimi_linear", "kimi_k3"),
        (
            *((".block_sparse_moe.", ".mlp."), (".gate.e_score", ".e_score"), (".w1.", ".gate_proj.")),
            *((".w2.", ".down_proj."), (".w3.", ".up_proj.")),
            *((f".{one}_conv1d.", f".{one}_conv.conv.") for one in "qkv"),
        ),
    ),
    "qwen4_exp": ((".ngram_embedding.shard_", ".ngram_embedding.shards."),),  # its norms stay zero-centred
    "inkling": (
        *(
            (".llm.embed.", ".embed_tokens."),
            ("model.llm.unembed.", "lm_head."),
            (".llm.", "."),
            (".attn.", ".self_attn."),
        ),
        *((".wq_du.", ".q_proj."), (".wk_dv.", ".k_proj."), (".wv_dv.", ".v_proj."), (".wr_du.", ".r_proj.")),
        *((".wo_ud.", ".o_proj."), (".rel_logits_proj.proj", ".rel_proj"), ("sconv.", "sconv.conv.")),
        *((".attn_norm.", ".input_layernorm."), (".mlp_norm.", ".post_attention_layernorm.")),
        *((".gate.weight", ".gate_weight"), (".gate.bias", ".e_score_correction_bias"), (".w2_md.", ".down_proj.")),
        (".gate.global_scale", ".global_scale"),
    ),
    **dict.fromkeys(  # no package has them for MLX
        ("inkling2", "inkling2_loop"),
        (
            (".weight_proj", ".weight_proj.weight"),
            *((f".{one}_weight", f".{one}_proj.weight") for one in ("down", "forget", "gain")),
        ),
    ),
    "minimax_m3_vl": ((".w1.", ".gate_proj."), (".w2.", ".down_proj."), (".w3.", ".up_proj.")),
    **dict.fromkeys(
        ("nemotron_h", "nemotron_h_latent"),
        ((".switch_mlp.up_proj.", ".switch_mlp.fc1."), (".switch_mlp.down_proj.", ".switch_mlp.fc2.")),
    ),
    **dict.fromkeys(
        ("minimax_m2", "lfm2_moe", "mixtral"), ((".w1.", ".gate_proj."), (".w2.", ".down_proj."), (".w3.", ".up_proj."))
    ),
}
# Names of fused experts of Granite and Inkling, and the usual ones.
FUSED = (
    (".experts.w13_weight", ".experts.gate_up_proj"),
    (".experts.w2_weight", ".experts.down_proj"),
    ("sparse_moe.input_linear.weight", "sparse_moe.experts.gate_up_proj"),
    ("sparse_moe.output_linear.weight", "sparse_moe.experts.down_proj"),
)
EXTRA_VARIANTS = {
    "qwen3_5_moe": ("moeflux", "fp8"),
    "deepseek_v3": ("moeflux", "fp8", "negbias", "mlx4_embed_q"),
}
OWN_GOLDEN = ("dense", "fp8", "negbias", "mlx4_embed_q")
QUANTISATION = {"group_size": 64, "bits": 4, "mode": "affine"}
FP8_BLOCK = 128
DTYPES = {"BF16": "<u2", "F32": "<f4", "U32": "<u4", "I32": "<i4", "I64": "<i8", "I8": "i1"}
DTYPES |= dict.fromkeys(("F8_E4M3", "U8", "F8_E8M0"), "u1")

# A tensor is (safetensors dtype name, array); BF16 and F8_E4M3 arrays hold bit patterns.
Tensor = tuple[str, np.ndarray]


# ---- functions for tests ----


def families():
    return FAMILIES


def variants(family):
    """Returns the names that `write_variant` accepts for this family."""
    return ("hub", "hub_sharded", "transformers5", "mlx4", *EXTRA_VARIANTS.get(family, ()))


def config(family):
    """Returns the hub's config.json as a dict that the caller may change."""
    return _read_json(family, "config.json")


def text_config(family):
    whole = config(family)
    return whole.get("text_config", whole)


def shapes(family):
    """Returns {hub name: shape} of the tensors of one of `KIN`."""
    return _read_json(family, "tensors.json")


def token_map(family):
    """Returns the numbers of tokens by which n-grams are hashed, or None."""
    return _read_json(family, "engram_token_map.json") if (folder(family) / "engram_token_map.json").exists() else None


def top_k(family):
    """Returns how many experts a token uses."""
    c = text_config(family)
    names = ("num_experts_per_tok", "top_k_experts", "moe_k", "num_experts_per_token", "moe_topk")
    count = next(c[name] for name in names if name in c)
    return count[0] if isinstance(count, list) else count


def golden(family, variant="hub"):
    """Returns (tokens int32 [T], logits float32 [T, V]) of transformers for this variant's dequantised weights."""
    with np.load(golden_path(family, variant)) as stored:
        return stored["tokens"], stored["logits"]


def first_position(family):
    """Returns the position of the golden's first token."""
    with np.load(golden_path(family, "hub")) as stored:
        return int(stored["first"]) if "first" in stored else 0


def golden_hidden(family):
    """Returns float32 [layers, T, D]: the residual stream after each layer in the `hub` golden, to locate a fault."""
    with np.load(golden_path(family, "hub")) as stored:
        return stored["hidden"]


def golden_path(family, variant):
    return folder(family) / (f"golden_{variant}.npz" if variant in OWN_GOLDEN else "golden.npz")


def folder(family):
    """Returns the folder of the stored files."""
    return (FIXTURES_OF_KIN if family in KIN else FIXTURES) / family


def checkpoint_dir(family, variant="hub"):
    """Returns a checkpoint. Tests share it and must not write into it. Raises ValueError for an unknown variant."""
    if variant not in variants(family):
        raise ValueError(f"{family} has no variant {variant!r}, only {variants(family)}")
    return made_once(f"{family}-{variant}-checkpoint", lambda path: _write_variant(path, family, variant))


def write_variant(path, family, variant):
    """Copies one checkpoint into `path` (made if missing) and returns it. Raises ValueError for an unknown variant."""
    return shutil.copytree(checkpoint_dir(family, variant), Path(path), dirs_exist_ok=True)


def _write_variant(path, family, variant):
    path.mkdir(parents=True)
    if variant == "moeflux":
        return _write_moeflux(path, family)
    _write_json(path / "config.json", variant_config(family, variant))
    if family in FAMILIES:
        _write_json(path / "generation_config.json", _read_json(family, "generation_config.json"))
    if token_map(family):
        _write_json(path / "engram_token_map.json", token_map(family))
    tensors = variant_tensors(family, variant)
    if variant == "hub_sharded":
        _write_shards(path, tensors, 3)
    else:
        write_safetensors(path / "model.safetensors", tensors)
    return path


def variant_config(family, variant):
    """Returns config.json of a variant as a dict."""
    if variant == "transformers5":
        return _read_json(family, "config_transformers5.json")
    result = config(family)
    if variant.startswith("mlx4"):
        result["quantization"] = result["quantization_config"] = _quantisation(family)
    if variant == "fp8":
        form = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8"}
        result["quantization_config"] = form | {"weight_block_size": [FP8_BLOCK, FP8_BLOCK]}
    return result


def variant_tensors(family, variant):
    """Returns {name: Tensor} of a safetensors variant."""
    if variant.startswith("mlx4"):
        return mlx_tensors(family, variant)
    if variant == "transformers5":
        return split_experts(source(family))
    if variant == "fp8":
        return {**fp8_tensors(family), **skipped_tensors(family)}
    return {**source(family, variant), **skipped_tensors(family)}


# ---- weights ----


@functools.cache
def hub_tensors(family):
    """Returns {hub name: Tensor} of the text model, bf16 except what the hub keeps in float32. Do not change it."""
    if family in KIN:
        tree = {name: (tuple(shape), _kind(family, name)) for name, shape in shapes(family).items()}
        return {name: _draw(f"{family}/{name}", family, *spec) for name, spec in tree.items()}
    c = text_config(family)
    tree = _tree(c)
    if family == "qwen3_5_moe":
        tree = {n.replace("model.", "model.language_model.", 1): s for n, s in _fuse(tree, c).items()}
    return {name: _draw(f"{family}/{name}", family, *spec) for name, spec in tree.items()}


def _plain(name):
    """Returns a name without the number of one of LongCat's norms."""
    return re.sub(r"norm\.\d\.weight$", "norm.weight", name)


def _kind(family, name):
    """Returns how a tensor of `KIN` is drawn."""
    name = _plain(name)
    centred = "centred_norm" if family in ZERO_CENTRED and name != PLAIN_NORM.get(family) else "norm"
    kinds = {"linear_attn.norm.weight": "norm", "norm.weight": centred, "embed_tokens.weight": "embed"}
    kinds |= {"embeddings.weight": "embed", "norm_f.weight": "norm", ".D": "norm"}
    kinds |= dict.fromkeys(("norm_key.weight", "norm_query.weight", "norm_conv.weight"), centred)
    kinds |= {".llm.embed.weight": "embed", "sconv.weight": "conv", "static_w": "conv", "_clip.scale": "norm"}
    kinds |= {"output_query": "embed", ".forget_weight": "gate", ".gain_weight": "gate"}
    if "_queries" in name:
        return "embed"
    kinds |= {"A_log": "A_log", "dt_bias": "dt_bias", "conv1d.weight": "conv", "conv.conv.weight": "conv"}
    kinds |= dict.fromkeys(INTEGERS, "integers")
    kinds |= {"sinks": "sinks", "sink_bias": "sinks", "proj_bias": "bias", "_bias": "signed_bias", ".bias": "bias"}
    kinds |= {"tid2eid": "table", "_base": "bias", "_scale": "norm", ".ape": "bias", "attn_sink": "sinks"}
    kinds |= {"sink_param": "sinks"}
    kinds |= {".q_weight": "norm", ".k_weight": "norm"}
    kinds |= {"residual_gate.gate": "bias", "compress_ape": "bias", "softmax_offset": "sinks"}
    kinds |= {"lerope.alpha": "bias", "ssmax_scaling.s": "bias", "ssmax_scaling.b": "norm"}
    if name.endswith((".gate.bias", ".v_router.bias")):
        return "signed_bias"
    kinds |= dict.fromkeys(ROUTERS, "router")
    kinds |= {"norm_1.weight": "norm", "norm_2.weight": "norm", ".router.scale": "gain", ".layer_scalar": "norm"}
    if family in LOW_EMBEDDINGS and name.endswith("embed_tokens.weight"):
        return "linear"
    return next((kind for end, kind in kinds.items() if name.endswith(end)), "linear")


@functools.cache
def skipped_tensors(family):
    """Returns {hub name: Tensor} of tensors that published checkpoints have and a text model does not read."""
    names = _skipped_of_kin(family) if family in KIN else {
        "qwen3_moe": {},
        "qwen3_next": {"mtp.fc.weight": (128, 256), "mtp.layers.0.mlp.experts.0.up_proj.weight": (64, 128)},
        "qwen3_5_moe": {
            "mtp.fc.weight": (128, 256),
            "mtp.layers.0.mlp.experts.down_proj": (16, 128, 64),
            "model.visual.patch_embed.proj.bias": (32,),
            "model.visual.blocks.0.mlp.linear_fc1.weight": (64, 32),
        },
        "deepseek_v3": {
            "model.layers.4.embed_tokens.weight": (256, 128),
            "model.layers.4.eh_proj.weight": (128, 256),
            "model.layers.4.enorm.weight": (128,),
            "model.layers.4.mlp.gate.weight": (16, 128),
            "model.layers.4.mlp.experts.0.up_proj.weight": (64, 128),
        },
    }[family]  # fmt: skip
    return {name: _draw(f"{family}/{name}", family, shape, "linear") for name, shape in names.items()}


def _skipped_of_kin(family):
    """Returns a layer that drafts, an image encoder if there is one, and a router's bias for images."""
    c = text_config(family)
    if family in ("inkling", "inkling2", "inkling2_loop"):
        names = ("mtp.layers.0.attn.wq_du.weight", "visual.layers.linear_0.weight", "audio.encoder.weight")
        return {f"model.{name}": (128, 32) for name in names}
    root, count = _root(family), c.get("num_hidden_layers") or 2 * c["num_layers"]
    drafts = {f"{root}layers.{count}.{name}.weight": (128, 256) for name in ("eh_proj", "mlp.experts.0.up_proj")}
    stems = ENCODERS.get(family, ("model.visual.",) if "text_config" in config(family) else ())
    vision = {f"{stem}blocks.0.norm1.weight": (32,) for stem in stems}
    vision |= {f"{stem}merger.proj.weight": (128, 32) for stem in stems}
    of_images = {"layers.0.ffn.gate.bias_vl": (16,)} if family in ("deepseek_v4", "deepseek_v41") else {}
    return drafts | of_images | vision


@functools.cache
def _root(family):
    """Returns the prefix of the hub's text tensors, except that of lm_head."""
    return "model.language_model." if "text_config" in config(family) and family != "hy_v4_vl" else "model."


def source(family, variant="hub"):
    """Returns {hub name: Tensor}: the tensors that are then quantised to 4 bits."""
    if variant == "fp8":
        return _from_fp8(fp8_tensors(family))
    tensors = dict(hub_tensors(family))
    if variant == "negbias":
        biases = {n: t for n, t in tensors.items() if n.endswith("correction_bias")}
        tensors |= {n: (kind, -np.abs(array) - np.float32(1.1)) for n, (kind, array) in biases.items()}
    return tensors


def dequantised(family, variant="hub"):
    """Returns {hub name: float64 array}: the weights that the golden's model computed with."""
    tensors = source(family, variant)
    if variant == "dense":
        return {n: as_float(t).astype(np.float64) for n, t in tensors.items()}
    result = {n: _dequantised(t, family, n) for n, t in tensors.items()}
    if variant == "mlx4_embed_q":
        names = [n for n in tensors if n.endswith("kv_b_proj.weight")]
        result |= {n: _join_kv_b(family, _split_kv_b(family, tensors[n])) for n in names}
    return result


def packed_layers(family, variant="mlx4"):
    """Returns {layer: bytes}: the expert records of each MoE layer one after the other, without padding."""
    tensors, c = mlx_tensors(family, variant), text_config(family)
    return {
        layer: b"".join(_block(tensors, stem, e) for e in range(_count(c)))
        for layer in range(c["num_hidden_layers"])
        if (stem := f"{_mlx_root(family)}model.layers.{layer}.mlp.switch_mlp.") + "up_proj.weight" in tensors
    }


def _block(tensors, stem, expert):
    return oracle.pack_expert_block({n: tensors[stem + n][1][expert] for n in oracle.BLOCK_PARTS})


@functools.cache
def quantised_bits(family, name):
    """Returns 4 or 8 for a hub tensor that an MLX conversion quantises, and 0 for one that it does not."""
    name = _plain(name)
    if name.endswith(NOT_QUANTISED) or "_queries" in name:
        return 0
    if name.endswith((*ROUTERS, "shared_expert_gate.weight")):
        return 0 if any(n.endswith(CORRECTIONS) for n in hub_tensors(family)) else 8
    return 4


def _dequantised(tensor, family, name):
    if name.endswith(INTEGERS):
        return tensor[1]  # more than floats hold
    w, bits = as_float(tensor), quantised_bits(family, name)
    if not bits:
        return w.astype(np.float64)
    if is_transposed(family, name):
        w = w.swapaxes(-1, -2)
    made = oracle.dequantize(*oracle.quantize(w, bits=bits), bits=bits)
    return made.swapaxes(-1, -2) if is_transposed(family, name) else made


def is_transposed(family, name):
    """Returns whether a hub tensor has matrices [in, out]."""
    return family in TRANSPOSED and ".experts." in name


def as_float(tensor):
    """Returns the float32 values of a BF16 or F32 tensor."""
    kind, array = tensor
    return oracle.bf16_to_f32(array) if kind == "BF16" else array


def _bf16(values):
    return "BF16", oracle.f32_to_bf16(values)


# mean and standard deviation; a linear's deviation is divided by sqrt(fan in) so that logits come out near 1
KINDS = {"embed": (0, 1), "linear": (0, 1), "router": (0, 3), "gate": (0, 0.0125), "norm": (1, 0.2), "conv": (0, 0.5)}
KINDS |= {"centred_norm": (0, 0.2), "A_log": (0.7, 0.7), "dt_bias": (0, 0.5), "correction_bias": (0.15, 0.1)}
KINDS |= {"signed_bias": (0, 0.2), "bias": (0, 0.5), "sinks": (0, 1.5), "gain": (4, 1)}


def _draw(seed, family, shape, kind):
    if kind == "table":
        experts = np.random.PCG64(zlib.crc32(seed.encode())).random_raw(shape).astype(np.uint64) % np.uint64(
            _count(text_config(family))
        )
        return "I64", experts.astype(np.int64)
    if kind == "integers":
        return "I64", np.array(_read_json(family, "integers.json")[seed.partition("/")[2]], np.int64)
    mean, deviation = KINDS[kind]
    if kind in ("linear", "router"):
        deviation = deviation / np.sqrt(shape[-1])
    values = (mean + deviation * _normal(seed, shape)).astype(np.float32)
    if kind == "centred_norm":  # multiples of 1/128, so that 1 + w is exact in bf16 too
        values = np.rint(values * 128) / np.float32(128)
    bits = oracle.f32_to_bf16(values)
    if kind in ("correction_bias", "signed_bias"):
        return "F32", values
    if kind == "A_log" and family == "qwen3_5_moe":
        return "F32", oracle.bf16_to_f32(bits)
    return "BF16", bits


def _normal(seed, shape):
    """Returns sums of four 16-bit integers, centred and scaled to deviation 1: nearly normal, the same everywhere."""
    raw = np.random.PCG64(zlib.crc32(seed.encode())).random_raw(int(np.prod(shape)))
    sums = np.zeros(raw.size, np.int32)
    for part in raw.view(np.uint16).reshape(-1, 4).T:
        sums += part
    return ((sums - 131070) / 37837.0).reshape(shape)


# ---- names and shapes ----


def _tree(c):
    """Returns {hub name: (shape, kind)} with the prefix `model.` and tensors per expert."""
    D, V = c["hidden_size"], c["vocab_size"]
    norm = "centred_norm" if oracle.norm_offset(c) else "norm"
    tree = {"model.embed_tokens.weight": ((V, D), "embed")}
    for i in range(c["num_hidden_layers"]):
        layer = {
            "input_layernorm.weight": ((D,), norm),
            **_mixer(c, i, norm),
            "post_attention_layernorm.weight": ((D,), norm),
            **_under("mlp.", _mlp(c, i)),
        }
        tree |= _under(f"model.layers.{i}.", layer)
    return tree | {"model.norm.weight": ((D,), norm), "lm_head.weight": ((V, D), "linear")}


def _under(prefix, tree):
    return {prefix + name: spec for name, spec in tree.items()}


def _linears(shapes):
    return {f"{name}.weight": (shape, "linear") for name, shape in shapes.items()}


def _mixer(c, i, norm):
    if "kv_lora_rank" in c:
        return _under("self_attn.", _mla(c))
    if "linear_num_key_heads" in c and (i + 1) % c["full_attention_interval"]:
        return _under("linear_attn.", _gated_delta(c))
    return _under("self_attn.", _attention(c, norm))


def _attention(c, norm):
    D, d, heads = c["hidden_size"], c["head_dim"], c["num_attention_heads"]
    kv = c["num_key_value_heads"] * d
    gate = 1 if c["model_type"] == "qwen3_moe" else 2
    shapes = {"q_proj": (gate * heads * d, D), "k_proj": (kv, D), "v_proj": (kv, D), "o_proj": (D, heads * d)}
    return _linears(shapes) | {"q_norm.weight": ((d,), norm), "k_norm.weight": ((d,), norm)}


def _gated_delta(c):
    D, nk, nv = c["hidden_size"], c["linear_num_key_heads"], c["linear_num_value_heads"]
    keys, values = nk * c["linear_key_head_dim"], nv * c["linear_value_head_dim"]
    mixed = 2 * keys + values
    if c["model_type"] == "qwen3_next":
        shapes = {"in_proj_qkvz": (mixed + values, D), "in_proj_ba": (2 * nv, D)}
    else:
        shapes = {"in_proj_qkv": (mixed, D), "in_proj_z": (values, D), "in_proj_b": (nv, D), "in_proj_a": (nv, D)}
    return {
        "A_log": ((nv,), "A_log"),
        "dt_bias": ((nv,), "dt_bias"),
        "conv1d.weight": ((mixed, 1, c["linear_conv_kernel_dim"]), "conv"),
        **_linears({**shapes, "out_proj": (D, values)}),
        "norm.weight": ((c["linear_value_head_dim"],), "norm"),
    }


def _mla(c):
    D, heads, q_rank, kv_rank = (c[k] for k in ("hidden_size", "num_attention_heads", "q_lora_rank", "kv_lora_rank"))
    nope, rope, v = c["qk_nope_head_dim"], c["qk_rope_head_dim"], c["v_head_dim"]
    shapes = {
        "q_a_proj": (q_rank, D),
        "q_b_proj": (heads * (nope + rope), q_rank),
        "kv_a_proj_with_mqa": (kv_rank + rope, D),
        "kv_b_proj": (heads * (nope + v), kv_rank),
        "o_proj": (D, heads * v),
    }
    norms = {"q_a_layernorm.weight": ((q_rank,), "norm"), "kv_a_layernorm.weight": ((kv_rank,), "norm")}
    return _linears(shapes) | norms


def _mlp(c, i):
    D, inter = c["hidden_size"], c["moe_intermediate_size"]
    if i < c.get("first_k_dense_replace", 0):
        return _swiglu("", D, c["intermediate_size"])
    tree = {"gate.weight": ((_count(c), D), "router")}
    if "n_routed_experts" in c:
        tree["gate.e_score_correction_bias"] = ((_count(c),), "correction_bias")
        tree |= _swiglu("shared_experts.", D, inter * c["n_shared_experts"])
    if "shared_expert_intermediate_size" in c:
        tree["shared_expert_gate.weight"] = ((1, D), "linear")
        tree |= _swiglu("shared_expert.", D, c["shared_expert_intermediate_size"])
    for e in range(_count(c)):
        tree |= _swiglu(f"experts.{e}.", D, inter)
    return tree


def _swiglu(prefix, D, inter):
    shapes = {"gate_proj": (inter, D), "up_proj": (inter, D), "down_proj": (D, inter)}
    return _under(prefix, _linears(shapes))


def _count(c):
    return next(
        c[name] for name in ("n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts") if name in c
    )


def _fuse(tree, c):
    """Replaces the entries of single experts by the two fused ones of Qwen3.5's hub layout."""
    D, inter, E = c["hidden_size"], c["moe_intermediate_size"], _count(c)
    result = {}
    for name, spec in tree.items():
        stem, separator, rest = name.partition(".experts.")
        if not separator:
            result[name] = spec
        elif rest == "0.gate_proj.weight":
            result[f"{stem}.experts.gate_up_proj"] = ((E, 2 * inter, D), "linear")
            result[f"{stem}.experts.down_proj"] = ((E, D, inter), "linear")
    return result


def split_experts(tensors, transposed=False, interleaved=False):
    """Replaces fused expert tensors, which may be [E, in, out], by one tensor [out, in] per expert and projection, and
    their biases in the same way. With `interleaved`, rows of gate and up alternate."""
    result = {}
    for name, (kind, array) in tensors.items():
        for theirs, usual in FUSED:
            name = name.replace(theirs, usual)
        stem, _, part = name.rpartition("experts.")
        part, bias, _ = part.partition("_bias")
        if part not in ("gate_up_proj", "down_proj"):
            result[name] = kind, array
            continue
        names = ("gate_proj", "up_proj") if part == "gate_up_proj" else ("down_proj",)
        for e, rows in enumerate(array.swapaxes(1, 2) if transposed and not bias else array):
            count = len(names)
            halves = [rows[i::count] for i in range(count)] if interleaved else np.split(rows, count)
            end = "bias" if bias else "weight"
            result |= {f"{stem}experts.{e}.{n}.{end}": (kind, h) for n, h in zip(names, halves, strict=True)}
    return result


# ---- block float8 ----


def _fp8_keeps(family, name):
    """Returns whether an fp8 checkpoint leaves the tensor in bf16."""
    kept = ("embed_tokens.weight", "lm_head.weight", "in_proj_a.weight", "in_proj_b.weight", "gate.weight")
    return quantised_bits(family, name) != 4 or name.endswith(kept)


@functools.cache
def fp8_tensors(family):
    """Returns {hub name: Tensor} with one tensor per expert.

    Each linear has codes and a `_scale_inv` that multiplies.
    """
    result = {}
    for name, tensor in split_experts(hub_tensors(family)).items():
        if _fp8_keeps(family, name):
            result[name] = tensor
            continue
        w = as_float(tensor)
        scale = _block_max(w) / np.float32(448)
        kept = ("F32", scale) if family == "deepseek_v3" else _bf16(scale)
        spread = oracle.dequantize_fp8(np.full(w.shape, 0x38, np.uint8), as_float(kept))  # code 0x38 is 1.0
        result[name] = "F8_E4M3", oracle.f32_to_e4m3(w / spread)
        result[f"{name}_scale_inv"] = kept
    return result


def _block_max(w):
    starts = [np.arange(0, n, FP8_BLOCK) for n in w.shape]
    return np.maximum.reduceat(np.maximum.reduceat(np.abs(w), starts[0], 0), starts[1], 1)


def _from_fp8(tensors):
    result = {}
    for name, (kind, array) in tensors.items():
        if kind == "F8_E4M3":
            result[name] = _bf16(oracle.dequantize_fp8(array, as_float(tensors[f"{name}_scale_inv"])))
        elif not name.endswith("_scale_inv"):
            result[name] = kind, array
    return result


# ---- MLX 4-bit ----


@functools.cache
def _mlx_root(family):
    return "language_model." if "text_config" in config(family) else ""


def _mlx_name(family, name):
    name = f"^{name}"
    for theirs, ours in MLX_NAMES.get(family, ()):
        name = name.replace(theirs, ours)
    name = name.removeprefix("^").removeprefix("language_model.")
    return _mlx_root(family) + name.replace("model.language_model.", "model.", 1)


def mlx_tensors(family, variant="mlx4"):
    """Returns {MLX name: Tensor} of a 4-bit conversion of `source(family, variant)`."""
    result = {}
    own = of_inkling(source(family)) if family == "inkling" else source(family, variant)
    apart = split_experts(own, family in TRANSPOSED, family in INTERLEAVED)
    for name, tensor in _stack_experts(apart, STACKS.get(family, "switch_mlp")).items():
        mlx_name, bits = _mlx_name(family, name), quantised_bits(family, name)
        if variant == "mlx4_embed_q" and name.endswith("kv_b_proj.weight"):
            halves = zip(("embed_q", "unembed_out"), _split_kv_b(family, tensor), strict=True)
            for part, half in halves:
                result |= _triplet(mlx_name.replace("kv_b_proj", part), half, 4)
        elif name.endswith(".wo_a.weight"):
            values = as_float(tensor)
            result |= _triplet(mlx_name, values.reshape(text_config(family)["o_groups"], -1, values.shape[-1]), bits)
        elif bits:
            result |= _triplet(mlx_name, as_float(tensor), bits)
        else:
            result[mlx_name] = _mlx_plain(family, name, tensor)
    return result


def of_inkling(tensors):
    """Returns tensors as mlx-vlm has them: rows of gate and up apart, and all shared experts as one MLP."""
    result = {}
    for name, (kind, array) in tensors.items():
        shared = ".shared_w" in name
        if shared and "w2" in name:
            array = array.swapaxes(0, 1).reshape(array.shape[1], -1)
        name = name.replace("shared_w2_weight", "down_proj.weight")
        if "w13" not in name or ".mlp.experts." in name:
            result[name] = kind, array
            continue
        stem = name.replace("shared_w13_weight", "w13_dn.weight").removesuffix("w13_dn.weight")
        rows = array.reshape(-1, 2, array.shape[-1])
        result |= {f"{stem}{part}_proj.weight": (kind, rows[:, i]) for i, part in enumerate(("gate", "up"))}
    return result


def _mlx_plain(family, name, tensor):
    """Returns a tensor that MLX stores as floats: norms not zero-centred, convolutions [C, taps, 1], A_log in bf16."""
    if name.endswith(CONVOLUTIONS):
        return tensor[0], np.ascontiguousarray(np.swapaxes(tensor[1], 1, 2))
    if name.endswith("A_log"):
        return _bf16(as_float(tensor))
    if name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
        has_plain = family in PLAIN_NORM
        offset = _kind(family, name) == "centred_norm" if has_plain else oracle.norm_offset(text_config(family))
        return _bf16(as_float(tensor) + np.float32(offset))
    return tensor


def _triplet(name, w, bits):
    weight, scales, biases = oracle.quantize(w, bits=bits)
    stem = name.removesuffix("weight")
    return {name: ("U32", weight), f"{stem}scales": ("BF16", scales), f"{stem}biases": ("BF16", biases)}


def _stack_experts(tensors, called="switch_mlp"):
    """Replaces tensors of single experts by stacks [E, out, in]."""
    stacks, result = {}, {}
    for name, tensor in tensors.items():
        numbered = re.fullmatch(r"(.*)\.(v_)?experts\.\d+\.(.*)", name)
        if not numbered:
            result[name] = tensor
            continue
        stem, of_values, rest = numbered.groups()
        stacked = f"{stem}.{'v_experts' if of_values else called}.{rest}"
        stacks.setdefault(stacked, []).append(tensor[1])
        result[stacked] = None
    return {n: t or ("BF16", np.stack(stacks[n])) for n, t in result.items()}


def _split_kv_b(family, tensor):
    """Splits kv_b_proj: bf16 [H*(nope+v), rank] -> float32 embed_q [H, rank, nope], unembed_out [H, v, rank]."""
    c = text_config(family)
    w = as_float(tensor).reshape(c["num_attention_heads"], -1, c["kv_lora_rank"])
    keys, values = np.split(w, [c["qk_nope_head_dim"]], 1)
    return np.ascontiguousarray(np.swapaxes(keys, 1, 2)), values


def _join_kv_b(family, halves):
    """Quantises both halves to 4 bits, each along its own last axis, and returns them as kv_b_proj's float64 rows."""
    embed_q, unembed_out = (oracle.dequantize(*oracle.quantize(h)) for h in halves)
    joined = np.concatenate([np.swapaxes(embed_q, 1, 2), unembed_out], 1)
    return joined.reshape(-1, text_config(family)["kv_lora_rank"])


def _quantisation(family):
    eight = [n.removesuffix(".weight") for n in hub_tensors(family) if quantised_bits(family, n) == 8]
    return QUANTISATION | {_mlx_name(family, n): {"group_size": 64, "bits": 8} for n in eight}


# ---- moeflux and flash-moe directories ----


def _write_moeflux(path, family):
    """Writes mlx/ (config), artifacts/ (resident tensors) and root/packed_experts/ (one file per layer, no header)."""
    for part in ("mlx", "artifacts", "root/packed_experts"):
        (path / part).mkdir(parents=True, exist_ok=True)
    whole = variant_config(family, "mlx4")
    _write_json(path / "mlx" / "config.json", whole)
    _write_json(path / "mlx" / "generation_config.json", _read_json(family, "generation_config.json"))
    _write_resident(path / "artifacts", family)
    layers, c = packed_layers(family), text_config(family)
    for layer, blocks in layers.items():
        (path / "root" / "packed_experts" / f"layer_{layer:02d}.bin").write_bytes(blocks)
    size = len(next(iter(layers.values()))) // _count(c)
    layout = {
        "expert_size": size,
        "num_layers": c["num_hidden_layers"],
        "num_experts": _count(c),
        "components": _components(c),
    }
    if family == "deepseek_v3":
        layout["moe_layers"] = list(layers)
    _write_json(path / "root" / "packed_experts" / "layout.json", layout)
    return path


def _components(c):
    D, inter, offset, result = c["hidden_size"], c["moe_intermediate_size"], 0, []
    for name in oracle.BLOCK_PARTS:
        out, inn = (D, inter) if name.startswith("down") else (inter, D)
        dtype, shape = ("U32", [out, inn // 8]) if name.endswith("weight") else ("BF16", [out, inn // 64])
        size = int(np.prod(shape)) * (4 if dtype == "U32" else 2)
        result.append({"name": name, "offset": offset, "size": size, "dtype": dtype, "shape": shape})
        offset += size
    return result


def _write_resident(path, family):
    """Writes model_weights.bin and .json.

    qwen3_5_moe as flash-moe extracts it: sorted, no `language_model.`, A_log in float32, `bits` given;
    deepseek_v3 as moeflux does: checkpoint order, nothing changed, `bits` left out.
    """
    tensors = {n: t for n, t in mlx_tensors(family).items() if ".switch_mlp." not in n}
    if family == "qwen3_5_moe":
        tensors = {n.removeprefix("language_model."): _promote(n, tensors[n]) for n in sorted(tensors)}
    entries, blob = {}, bytearray()
    for name, (dtype, array) in tensors.items():
        blob += bytes(-len(blob) % 64)
        data = array.astype(DTYPES[dtype]).tobytes()
        entries[name] = {"offset": len(blob), "size": len(data), "shape": list(array.shape), "dtype": dtype}
        if dtype == "U32" and family == "qwen3_5_moe":
            entries[name]["bits"] = quantised_bits(family, name)
        blob += data
    (path / "model_weights.bin").write_bytes(blob)
    manifest = {
        "model": family,
        "num_tensors": len(entries),
        "config": text_config(family),
        "tensors": entries,
    }
    _write_json(path / "model_weights.json", manifest)


def _promote(name, tensor):
    return ("F32", as_float(tensor)) if name.endswith("A_log") else tensor


# ---- files ----


def write_safetensors(path, tensors):
    """Writes {name: Tensor} to one safetensors file."""
    header, offset, chunks = {"__metadata__": {"format": "pt"}}, 0, []
    for name, (dtype, array) in tensors.items():
        chunks.append(array.astype(DTYPES[dtype]).tobytes())
        end = offset + len(chunks[-1])
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    Path(path).write_bytes(len(text).to_bytes(8, "little") + text + b"".join(chunks))


def _write_shards(path, tensors, count):
    """Writes tensors to shards in turn, so that a layer's experts are spread over all shards."""
    weight_map, total = {}, sum(array.nbytes for _, array in tensors.values())
    for i in range(count):
        names = list(tensors)[i::count]
        file = f"model-{i + 1:05d}-of-{count:05d}.safetensors"
        write_safetensors(path / file, {n: tensors[n] for n in names})
        weight_map |= dict.fromkeys(names, file)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    _write_json(path / "model.safetensors.index.json", index)


def checksum(family):
    """Returns the sha256 over the hub tensors, including names and shapes."""
    digest = hashlib.sha256()
    for name, (dtype, array) in sorted(hub_tensors(family).items()):
        digest.update(f"{name} {dtype} {array.shape}\n".encode())
        digest.update(array.astype(DTYPES[dtype]).tobytes())
    return digest.hexdigest()


def _read_json(family, name):
    return copy.deepcopy(_stored_json(folder(family) / name))


@functools.cache
def _stored_json(path):
    return json.loads(path.read_text())


def _write_json(path, value):
    path.write_text(json.dumps(value, indent=2) + "\n")

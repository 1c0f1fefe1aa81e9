"""Writes the tiny checkpoints of `goldens` as GGUF files, as llama.cpp's `convert_hf_to_gguf.py` does.

Names of tensors come from the `gguf` package, and so do metadata, container and dequantised values; what llama.cpp
changes in weights is written here once more, in the other direction than the package under test reads it.
"""

import hashlib
import re

import converted_gguf
import gguf
import goldens
import numpy as np
import oracle

OWN = {  # files that are written here
    **{"qwen3_moe": "qwen3moe", "qwen3_next": "qwen3next", "qwen3_5_moe": "qwen35moe", "deepseek_v3": "deepseek2"},
    **{"glm4_moe_lite": "deepseek2", "glm4_moe": "glm4moe", "glm4_moe_air": "glm4moe", "gpt_oss": "gpt-oss"},
    **{"olmoe": "olmoe", "qwen2_moe": "qwen2moe", "mixtral": "llama", "ernie4_5_moe": "ernie4_5-moe"},
    **{"afmoe": "afmoe", "minimax_m2": "minimax-m2", "granitemoehybrid": "granitehybrid"},
    **{"lfm2_moe": "lfm2moe", "gemma4": "gemma4", "llama4": "llama4"},
}
ARCHITECTURES = OWN | {family: converted_gguf.architecture(family) for family in converted_gguf.FAMILIES}
TYPES = gguf.GGMLQuantizationType
# Where a block of a type has its float16 fields, for blocks of random bytes.
HALVES = {
    **{"Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "IQ4_NL": (0,), "Q6_K": (208,)},
    **{"Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "IQ4_XS": (0,), "IQ3_XXS": (0,)},
    **{"IQ3_S": (0,), "IQ2_XXS": (0,), "IQ2_XS": (0,), "IQ2_S": (0,), "IQ1_S": (0,), "IQ1_M": (48,)},
    **{"TQ1_0": (52,), "TQ2_0": (64,)},
}


def random_blocks(kind, shape, seed, deviation=1.0):
    """Returns uint8 [..., bytes of a row]: random blocks of finite values with about this deviation."""
    weights, nbytes = gguf.GGML_QUANT_SIZES[TYPES[kind]]
    rng = np.random.default_rng(seed)
    rows = rng.integers(0, 256, (*shape[:-1], shape[-1] // weights * nbytes), dtype=np.uint8)
    blocks = rows.reshape(-1, nbytes)
    if kind == "MXFP4":
        blocks[:, 0] = rng.integers(120, 128, len(blocks))
        return rows
    if kind == "NVFP4":
        usual = 8 * (7 + round(np.log2(deviation / 3)))  # E4M3 of a third of it
        blocks[:, :4] = np.clip(rng.integers(usual - 4, usual + 8, (len(blocks), 4)), 1, 0x7E)
        return rows
    halves = rng.uniform(0.5, 1.5, (len(blocks), len(HALVES[kind]))) * rng.choice([-1, 1], (len(blocks), 1))
    for wanted in (None, deviation):
        scale = 1.0 if wanted is None else wanted / values_of(kind, rows).std()
        for place, values in zip(HALVES[kind], (halves * scale).T, strict=True):
            write_half(blocks, kind, place, values.astype("<f2"))
    return rows


def write_half(blocks, kind, place, values):
    """Writes float16 values into blocks; IQ1_M has four bits of each in the highest bits of four halfwords."""
    if kind != "IQ1_M":
        blocks[:, place : place + 2] = values.view(np.uint8).reshape(-1, 2)
        return
    fours = values.view("<u2")[:, None] >> np.arange(0, 16, 4, dtype=np.uint16) & 15
    blocks[:, place + 1 : place + 9 : 2] = blocks[:, place + 1 : place + 9 : 2] & 15 | fours << 4


def values_of(kind, rows):
    """Returns the float32 values of rows of blocks, as the `gguf` package computes them."""
    return gguf.quants.dequantize(rows, TYPES[kind])


def pieces(family, fused=False):
    """Yields (name, float32 array, restore) of every tensor of the file; restore(values) gives {hub name: values}."""
    c, stacks = goldens.text_config(family), {}
    names = gguf.get_tensor_name_map(_architecture(family), c["num_hidden_layers"])
    for hub, tensor in goldens.hub_tensors(family).items():
        array = goldens.as_float(tensor)
        one = re.fullmatch(r"(.+\.experts)\.(\d+)\.(\w+)\.weight", hub)
        if one:
            stacks.setdefault(f"{one[1]}.{one[3]}", {})[hub] = array
            continue
        for spelt, made, restore in changed(family, c, hub, array, fused):
            stem, _, end = spelt.replace("language_model.", "").rpartition(".")
            name = names.get_name(stem) or names.get_name(f"{stem}.{end}")
            suffix = "" if end in ("A_log", "D") else f".{end}"
            yield f"{name}{suffix}", np.ascontiguousarray(made), lambda v, h=hub, r=restore: {h: r(v)}
    for stem, parts in stacks.items():
        name = f"{names.get_name(stem) or names.get_name(stem.removeprefix('model.'))}.weight"
        yield name, np.stack(list(parts.values())), lambda values, parts=parts: dict(zip(parts, values, strict=True))


def changed(family, c, hub, array, fused):
    """Yields (hub-like name, array, restore) for each tensor that llama.cpp makes of one; restore(array) is the part of
    the hub's tensor, where parts of one tensor come one after another."""

    def same(values):
        return values

    if hub.endswith("e_score_correction_bias"):
        yield hub.replace("_bias", ".bias"), array, same
    elif hub.endswith(".expert_bias"):
        yield f"{hub}.bias", array, same
    elif family in ("mixtral", "granitemoehybrid") and hub.endswith(("q_proj.weight", "k_proj.weight")):
        heads = c["num_attention_heads" if "q_proj" in hub else "num_key_value_heads"]
        turned = array.reshape(heads, 2, -1, array.shape[1]).swapaxes(1, 2)
        back = turned.shape
        yield hub, turned.reshape(array.shape), lambda made: made.reshape(back).swapaxes(1, 2).reshape(array.shape)
    elif hub.endswith(".router.scale"):
        yield hub.replace("router.scale", "router.proj.scale"), array, same
    elif hub.endswith(".router.per_expert_scale"):
        yield hub.replace("router.per_expert_scale", "experts.down_proj.scale"), array, same
    elif hub.endswith("layer_scalar") or ".experts." in hub and family == "gemma4":
        yield f"{hub}.weight", array, same
    elif hub.endswith("conv.conv.weight"):
        yield hub, array[:, 0], lambda made: made[:, None]
    elif hub.endswith("input_linear.weight"):
        stem = hub.replace("block_sparse_moe.input_linear", "mlp.experts.X").replace(
            "shared_mlp.input_linear", "mlp.shared_expert.X"
        )
        for one, part in zip(("gate", "up"), np.split(array, 2, axis=-2), strict=True):
            yield stem.replace("X", f"{one}_proj"), part, lambda made, one=one: (one, made)
    elif ".mamba." in hub and hub.endswith(("A_log", ".D", "dt_bias", "conv1d.weight", "mamba.norm.weight")):
        yield from _mamba(c, hub, array)
    elif hub.endswith("kv_b_proj.weight"):
        heads, nope, value = c["num_attention_heads"], c["qk_nope_head_dim"], c["v_head_dim"]
        k, v = np.split(array.reshape(heads, nope + value, -1), [nope], axis=1)
        yield hub.replace("kv_b", "k_b"), k.swapaxes(1, 2), lambda made: ("k", made.swapaxes(1, 2))
        yield hub.replace("kv_b", "v_b"), v, lambda made: ("v", made)
    elif ".experts." in hub and family == "llama4":
        stem, name = hub.rsplit(".", 1)
        kinds = ("gate_proj", "up_proj") if name == "gate_up_proj" else (name,)
        for one, part in zip(kinds, np.split(array.swapaxes(1, 2), len(kinds), axis=1), strict=True):
            yield f"{stem}.{one}.weight", part, same
    elif "experts.gate_up_proj" in hub and family == "gpt_oss":
        end = "bias" if hub.endswith("_bias") else "weight"
        array = array if end == "bias" else array.swapaxes(1, 2)
        for i, one in enumerate(("gate", "up")):
            yield f"{hub.partition('gate_up')[0]}{one}_proj.{end}", array[:, i::2], same
    elif "experts.down_proj" in hub and family == "gpt_oss":
        end = "bias" if hub.endswith("_bias") else "weight"
        yield f"{hub.partition('_proj')[0]}_proj.{end}", array if end == "bias" else array.swapaxes(1, 2), same
    elif hub.endswith("experts.gate_up_proj") and fused:
        yield f"{hub}.weight", array, same
    elif hub.endswith("experts.gate_up_proj"):
        for i, one in enumerate(("gate", "up")):
            part = array[:, : array.shape[1] // 2] if i == 0 else array[:, array.shape[1] // 2 :]
            yield f"{hub.partition('gate_up')[0]}{one}_proj.weight", part, lambda made, one=one: (one, made)
    elif hub.endswith("experts.down_proj") or hub.endswith("sinks"):
        yield f"{hub}.weight", array, same
    elif ".linear_attn." in hub:
        yield from _linear(family, c, hub, array)
    elif hub.endswith("shared_expert_gate.weight"):
        yield hub, array[0], lambda made: made[None]
    elif hub.endswith("norm.weight") and "linear_num_key_heads" in c:
        yield hub, array + 1, lambda made: made - 1
    else:
        yield hub, array, same


def _mamba(c, hub, array):
    """As `changed`, of a state space model."""
    if hub.endswith("dt_bias"):
        yield hub.replace("dt_bias", "dt_proj.bias"), array, lambda made: made
    elif hub.endswith("conv1d.weight"):
        yield hub, array[:, 0], lambda made: made[:, None]
    elif hub.endswith("norm.weight"):
        yield hub, array.reshape(c["mamba_n_groups"], -1), lambda made: made.reshape(-1)
    elif hub.endswith(".D"):
        yield hub, array[:, None], lambda made: made[:, 0]
    else:
        yield hub, -np.exp(array)[:, None], lambda made: np.log(-made[:, 0])


def _linear(family, c, hub, array):
    """As `changed`, of a mixer of the delta rule; in qwen3.5 value heads are tiled."""
    K, V, dk, dv = (c[f"linear_{n}"] for n in ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim"))
    stem, name = hub.rsplit("linear_attn.", 1)
    stem, turned = f"{stem}linear_attn.", family == "qwen3_5_moe"

    def tiled(part, axis, width, back=False):
        if not turned:
            return part
        sizes = (V // K, K) if back else (K, V // K)
        shape = part.shape
        made = part.reshape(*shape[:axis], *sizes, width, *shape[axis + 1 :]).swapaxes(axis, axis + 1)
        return made.reshape(shape)

    def tail(part, back=False):
        first, rest = np.split(part, [2 * K * dk])
        return np.concatenate([first, tiled(rest, 0, dv, back)])

    if name == "in_proj_qkvz.weight":
        r = V // K
        parts = np.split(array.reshape(K, -1, array.shape[1]), np.cumsum([dk, dk, r * dv]), axis=1)
        q, k, v, z = (part.reshape(-1, array.shape[1]) for part in parts)

        def back(made):
            q, k, v = np.split(made, [K * dk, 2 * K * dk])
            return "qkv", [part.reshape(K, -1, array.shape[1]) for part in (q, k, v)]

        yield f"{stem}in_proj_qkv.weight", np.concatenate([q, k, v]), back
        yield f"{stem}in_proj_z.weight", z, lambda made: ("z", made.reshape(K, -1, array.shape[1]))
    elif name == "A_log":
        yield hub, tiled(-np.exp(array), 0, 1), lambda made: np.log(-tiled(made, 0, 1, True))
    elif name == "dt_bias":
        yield f"{stem}dt_proj.bias", tiled(array, 0, 1), lambda made: tiled(made, 0, 1, True)
    elif name == "conv1d.weight":
        yield hub, tail(array[:, 0]), lambda made: tail(made, True)[:, None]
    elif name == "in_proj_qkv.weight":
        yield hub, tail(array), lambda made: tail(made, True)
    elif name == "in_proj_z.weight":
        yield hub, tiled(array, 0, dv), lambda made: tiled(made, 0, dv, True)
    elif name in ("in_proj_a.weight", "in_proj_b.weight"):
        yield hub, tiled(array, 0, 1), lambda made: tiled(made, 0, 1, True)
    elif name == "out_proj.weight":
        yield hub, tiled(array, 1, dv), lambda made: tiled(made, 1, dv, True)
    else:
        yield hub, array, lambda made: made


def _joined(parts):
    """The hub's tensor of parts that `restore` gave, by their kind."""
    if "k" in parts:
        both = np.concatenate([parts["k"], parts["v"]], axis=1)
        return both.reshape(-1, both.shape[-1])
    if "gate" in parts:
        return np.concatenate([parts["gate"], parts["up"]], axis=-2)
    every = np.concatenate([*parts["qkv"], parts["z"]], axis=1)
    return every.reshape(-1, every.shape[-1])


def _architecture(family):
    return next(kind for kind, name in gguf.MODEL_ARCH_NAMES.items() if name == ARCHITECTURES[family])


def write_gguf(path, family, type_of, keys=None, extra=None, fused=False, **options):
    """Writes the model; `type_of(name)` is the type of a matrix, and other tensors are float32.

    Args:
        keys: metadata that replace or add to the model's own, by whole key.
        extra: further float32 tensors by name.
        fused: gate and up of experts that are one matrix at the hub stay so.

    Returns:
        {hub name: float array}, the dequantised weights.
    """
    writer = gguf.GGUFWriter(str(path), ARCHITECTURES[family], **options)
    write = _write_converted if family in converted_gguf.FAMILIES else _write_own
    _write_tokenizer(writer, goldens.text_config(family)["vocab_size"])
    weights = write(writer, family, type_of, fused, extra or {})
    for key, value in (keys or {}).items():
        writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value))
    for name, array in (extra or {}).items():
        writer.add_tensor(name, array)
    _finish(writer)
    return weights


def _finish(writer):
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _write_own(writer, family, type_of, fused, extra):
    """Writes metadata and tensors of a model, but those that `extra` has, by the rules above; returns its weights."""
    weights, parts = {}, {}
    _write_sizes(writer, goldens.text_config(family))
    for seed, (name, array, restore) in enumerate(pieces(family, fused)):
        restored = _add(writer, name, array, type_of, seed)
        for hub, values in restore(restored).items():
            if isinstance(values, tuple):
                parts.setdefault(hub, {})[values[0]] = values[1]
            else:
                weights[hub] = values
    for name, array in slowed_by(goldens.text_config(family)).items():
        if name not in extra:
            writer.add_tensor(name, array)
    return weights | {hub: _joined(every) for hub, every in parts.items()}


def _write_converted(writer, family, type_of, fused, extra):
    """Writes metadata and tensors of a model, but those that `extra` has, as llama.cpp's converter did; returns its
    weights."""
    assert not fused
    weights, changed = converted_gguf.hub_weights(family), []
    _write_metadata(writer, family)
    for seed, (name, kind, array, back, places) in enumerate(converted_gguf.pieces(family, weights)):
        if name in extra:
            continue
        if kind != "F32" or back is None:
            writer.add_tensor(name, array)
            continue
        changed.append((back(_add(writer, name, array, type_of, seed)), places))
    return converted_gguf.put_back(weights, changed)


def _write_metadata(writer, family):
    for key, (kinds, value) in converted_gguf.recipe(family)[0]["metadata"].items():
        if key != "general.architecture":
            writer.add_key_value(key, value, *(gguf.GGUFValueType[kind] for kind in kinds))


def write_head(path, family, type_of, **options):
    """Writes a draft head alone, with types as `write_gguf`."""
    head = converted_gguf.HEAD + family
    writer = gguf.GGUFWriter(str(path), ARCHITECTURES[family], **options)
    _write_tokenizer(writer, goldens.text_config(family)["vocab_size"])
    _write_metadata(writer, head)
    for seed, (name, _, array, *_) in enumerate(converted_gguf.pieces(head, converted_gguf.hub_weights(head))):
        _add(writer, name, array, type_of, seed)
    _finish(writer)


def head_block(family):
    """Returns {name: float32 array} of a draft head's tensors alone."""
    head = converted_gguf.HEAD + family
    pieces = converted_gguf.pieces(head, converted_gguf.hub_weights(head))
    return {name: array for name, _, array, *_ in pieces if name.startswith("blk.")}


def write_golden(path, family):
    """Writes the model with the weights of its golden: experts in Q4_1, which has them without a loss, others in
    float32."""
    writer = gguf.GGUFWriter(str(path), ARCHITECTURES[family])
    _write_tokenizer(writer, goldens.text_config(family)["vocab_size"])
    _write_metadata(writer, family)
    both = (
        converted_gguf.pieces(family, weights)
        for weights in (converted_gguf.hub_weights(family), converted_gguf.golden_weights(family))
    )
    for (name, _, before, *_), (_, kind, values, *_) in zip(*both, strict=True):
        if "_exps" in name:
            rows = _as_q4_1(before)
            assert np.array_equal(values_of("Q4_1", rows).reshape(values.shape), values), name
            writer.add_tensor(name, rows, raw_dtype=TYPES.Q4_1)
        else:
            writer.add_tensor(name, values, raw_dtype=TYPES[kind])
    _finish(writer)


def _as_q4_1(array):
    """Returns blocks of the values that MLX's 4 bits make of an array."""
    codes, scales, biases = oracle.quantize(array)
    codes = np.ascontiguousarray(codes).view(np.uint8).reshape(*array.shape[:-1], -1, 16)  # two values in a byte
    codes = np.stack([codes & 15, codes >> 4], axis=-1).reshape(*codes.shape[:-1], 2, 16)
    halves = [
        np.repeat(oracle.bf16_to_f32(part), 2, axis=-1).astype("<f2")[..., None].view(np.uint8)
        for part in (scales, biases)
    ]
    blocks = np.concatenate([*halves, codes[..., 0, :] | codes[..., 1, :] << 4], axis=-1)
    return blocks.astype(np.uint8).reshape(*array.shape[:-1], -1)


def _add(writer, name, array, type_of, seed):
    """Adds a tensor, a matrix in its type; returns the values that this stores."""
    kind = type_of(name) if array.ndim > 1 and name.endswith("weight") and not EXACT.search(name) else "F32"
    while kind != "F32" and array.shape[-1] % gguf.GGML_QUANT_SIZES[TYPES[kind]][0]:
        kind = FALLBACKS.get(kind, "F16")
    rows, restored = _quantised(array, seed, kind)
    writer.add_tensor(name, rows, raw_dtype=TYPES[kind])
    return restored


def slowed_by(c):
    """What llama.cpp makes of Llama 3's scaling: what each pair's frequency is divided by."""
    scaling = c.get("rope_scaling") or {}
    if scaling.get("rope_type") != "llama3":
        return {}
    context, factor, low, high = (
        scaling[key] for key in ("original_max_position_embeddings", "factor", "low_freq_factor", "high_freq_factor")
    )
    lengths, divisors = 2 * np.pi * c["rope_theta"] ** (np.arange(0, c["head_dim"], 2) / c["head_dim"]), []
    for length in lengths:
        if length < context / high:
            divisors.append(1)
        elif length > context / low:
            divisors.append(factor)
        else:
            smooth = (context / length - low) / (high - low)
            divisors.append(1 / ((1 - smooth) / factor + smooth))
    return {"rope_freqs.weight": np.float32(divisors)}


# Of rows that are too short for a type (llama.cpp, `tensor_type_fallback`); floats for others.
FALLBACKS = {
    **dict.fromkeys(("Q2_K", "Q3_K"), "Q4_0"),
    **dict.fromkeys(("IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_XS"), "IQ4_NL"),
    **{"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"},
}
# What llama.cpp does not quantise: routers, and small matrices of attention, of streams and of mixers.
EXACT = re.compile(r"_inp|hc_.*_(fn|base|scale)|_ape|compressor_gate|indexer.proj|ssm_norm|conv1d")
_made = {}


def _quantised(array, seed, kind):
    """Returns a tensor in a type, and the values that this stores; nobody may change them."""
    place = kind, seed, array.shape, hashlib.blake2b(np.ascontiguousarray(array)).digest()
    if place not in _made:
        rows = _stored(kind, array, seed)
        values = rows if kind == "F32" else values_of(kind, rows).reshape(array.shape)
        rows.flags.writeable = values.flags.writeable = False
        _made[place] = rows, values
    return _made[place]


def _stored(kind, array, seed):
    """Returns the tensor in a type: quantised by the package if it can, else random."""
    if kind in ("F32", "F16"):
        return array.astype(np.dtype(f"<f{int(kind[1:]) // 8}"))
    try:
        return gguf.quants.quantize(array, TYPES[kind])
    except NotImplementedError:
        return random_blocks(kind, array.shape, seed, array.std())


def _write_sizes(writer, c):
    rope, scaling = c.get("rope_parameters") or c, c.get("rope_scaling") or {}
    rope = rope.get("full_attention", rope)
    writer.add_block_count(c["num_hidden_layers"])
    writer.add_context_length(c["max_position_embeddings"])
    writer.add_embedding_length(c["hidden_size"])
    writer.add_feed_forward_length(c.get("intermediate_size_mlp") or c.get("intermediate_size", 0))
    writer.add_head_count(c["num_attention_heads"])
    writer.add_layer_norm_rms_eps(c.get("rms_norm_eps") or c["norm_eps"])
    writer.add_rope_freq_base(float(rope["rope_theta"]))
    writer.add_expert_count(goldens._count(c))
    writer.add_expert_used_count(next(c[k] for k in ("num_experts_per_tok", "moe_k", "top_k_experts") if k in c))
    if c["model_type"] not in ("olmoe", "mixtral", "granitemoehybrid"):
        writer.add_expert_feed_forward_length(c.get("moe_intermediate_size") or c["intermediate_size"])
    if "beta_fast" in scaling:
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(scaling["factor"])
        writer.add_rope_scaling_orig_ctx_len(scaling["original_max_position_embeddings"])
        writer.add_rope_scaling_yarn_beta_fast(float(scaling["beta_fast"]))
        writer.add_rope_scaling_yarn_beta_slow(float(scaling["beta_slow"]))
    _write_attention(writer, c, rope, scaling)
    _write_experts(writer, c)


def _write_attention(writer, c, rope, scaling):
    if "kv_lora_rank" in c:
        rotated = c["qk_rope_head_dim"]
        writer.add_head_count_kv(1)
        writer.add_q_lora_rank(c["q_lora_rank"])
        writer.add_kv_lora_rank(c["kv_lora_rank"])
        writer.add_key_length(c["kv_lora_rank"] + rotated)
        writer.add_value_length(c["kv_lora_rank"])
        writer.add_key_length_mla(c["qk_nope_head_dim"] + rotated)
        writer.add_value_length_mla(c["v_head_dim"])
        writer.add_rope_dimension_count(rotated)
        if "mscale_all_dim" in scaling:
            writer.add_rope_scaling_yarn_log_mul(0.1 * scaling["mscale_all_dim"])
        return
    if "mamba_n_heads" in c:
        return _write_hybrid(writer, c)
    if "conv_L_cache" in c:
        writer.add_head_count_kv([c["num_key_value_heads"] * (kind != "conv") for kind in c["layer_types"]])
        return writer.add_shortconv_l_cache(c["conv_L_cache"])
    if "global_head_dim" in c:
        return _write_gemma4(writer, c)
    writer.add_head_count_kv(c["num_key_value_heads"])
    if "head_dim" in c:
        writer.add_key_length(c["head_dim"])
        writer.add_value_length(c["head_dim"])
    if "rotary_dim" in c:
        writer.add_rope_dimension_count(c["rotary_dim"])
    share = rope.get("partial_rotary_factor")
    if share is not None:
        writer.add_rope_dimension_count(int(c["head_dim"] * share))
    if "sliding_window" in c and c["sliding_window"]:
        writer.add_sliding_window(c["sliding_window"])
    if "mrope_section" in rope:
        writer.add_rope_dimension_sections([*rope["mrope_section"], 0])
    if "linear_num_key_heads" in c:
        writer.add_ssm_conv_kernel(c["linear_conv_kernel_dim"])
        writer.add_ssm_state_size(c["linear_key_head_dim"])
        writer.add_ssm_group_count(c["linear_num_key_heads"])
        writer.add_ssm_time_step_rank(c["linear_num_value_heads"])
        writer.add_ssm_inner_size(c["linear_value_head_dim"] * c["linear_num_value_heads"])


def _write_hybrid(writer, c):
    writer.add_head_count_kv([c["num_key_value_heads"] if kind == "attention" else 0 for kind in c["layer_types"]])
    writer.add_attention_scale(c["attention_multiplier"])
    writer.add_embedding_scale(c["embedding_multiplier"])
    writer.add_residual_scale(c["residual_multiplier"])
    writer.add_logit_scale(c["logits_scaling"])
    writer.add_expert_shared_feed_forward_length(c["shared_intermediate_size"])
    writer.add_ssm_conv_kernel(c["mamba_d_conv"])
    writer.add_ssm_state_size(c["mamba_d_state"])
    writer.add_ssm_group_count(c["mamba_n_groups"])
    writer.add_ssm_inner_size(c["mamba_expand"] * c["hidden_size"])
    writer.add_ssm_time_step_rank(c["mamba_n_heads"])
    writer.add_rope_scaling_finetuned(False)


def _write_gemma4(writer, c):
    slides = [kind == "sliding_attention" for kind in c["layer_types"]]
    heads = [c["num_key_value_heads" if one else "num_global_key_value_heads"] for one in slides]
    writer.add_head_count_kv(heads)
    writer.add_sliding_window(c["sliding_window"])
    writer.add_sliding_window_pattern(slides)
    writer.add_shared_kv_layers(c["num_kv_shared_layers"])
    writer.add_embedding_length_per_layer_input(c["hidden_size_per_layer_input"])
    writer.add_final_logit_softcapping(c["final_logit_softcapping"])
    writer.add_rope_freq_base_swa(c["rope_parameters"]["sliding_attention"]["rope_theta"])
    for end, width in (("", c["global_head_dim"]), ("_swa", c["head_dim"])):
        for kind in ("key_length", "value_length"):
            getattr(writer, f"add_{kind}{end}")(width)
        getattr(writer, f"add_rope_dimension_count{end}")(width)


def _write_experts(writer, c):
    if "route_scale" in c:
        writer.add_expert_shared_count(c["num_shared_experts"])
        writer.add_leading_dense_block_count(c["num_dense_layers"])
        writer.add_expert_weights_norm(c["route_norm"])
        writer.add_expert_weights_scale(c["route_scale"])
    if "interleave_moe_layer_step" in c:
        writer.add_interleave_moe_layer_step(c["interleave_moe_layer_step"])
    if "conv_L_cache" in c:
        writer.add_leading_dense_block_count(c["num_dense_layers"])
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    if "moe_layer_interval" in c:
        writer.add_interleave_moe_layer_step(c["moe_layer_interval"])
        writer.add_leading_dense_block_count(c["moe_layer_start_index"])
        writer.add_expert_shared_count(c["moe_num_shared_experts"])
    if "sigmoid" in (c.get("scoring_func"), c.get("score_func")):
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    if "shared_expert_intermediate_size" in c:
        writer.add_expert_shared_feed_forward_length(c["shared_expert_intermediate_size"])
    if "n_shared_experts" in c:
        writer.add_expert_shared_count(c["n_shared_experts"])
        writer.add_leading_dense_block_count(c["first_k_dense_replace"])
        writer.add_expert_weights_scale(c["routed_scaling_factor"])
        writer.add_expert_weights_norm(c["norm_topk_prob"])
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
        if c["n_group"] > 1:
            writer.add_expert_group_count(c["n_group"])
            writer.add_expert_group_used_count(c["topk_group"])


def _write_tokenizer(writer, size):
    """Every byte, a few pairs, and markers, as byte-level BPE."""
    letters = list(gguf_alphabet())
    markers = ["<|im_start|>", "<|im_end|>", "<|endoftext|>", "<tool_call>", "</tool_call>"]
    pairs = [("h", "e"), ("l", "l")]
    # The tiny vocabulary has no room for bytes that UTF-8 never has.
    tokens = [*letters[: size - len(markers) - len(pairs)], *map("".join, pairs), *markers]
    kinds = [1] * (size - len(markers)) + [3, 3, 3, 3, 4]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges([" ".join(pair) for pair in pairs])
    writer.add_eos_token_id(size - 4)
    writer.add_pad_token_id(size - 3)
    writer.add_add_bos_token(False)
    writer.add_chat_template(TEMPLATE)


TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def gguf_alphabet():
    """Yields the letter of each byte in GPT-2's alphabet; those that UTF-8 never has come last."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    letter = {b: chr(b) for b in printable} | {b: chr(0x100 + n) for n, b in enumerate(others)}
    never = [0xC0, 0xC1, *range(0xF5, 0x100)]
    yield from (letter[b] for b in [*(b for b in range(256) if b not in never), *never])

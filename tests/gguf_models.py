"""Writes the tiny checkpoints of `goldens` as GGUF files, as llama.cpp's `convert_hf_to_gguf.py` does.

Names of tensors come from the `gguf` package, and so do metadata, container and dequantised values; what llama.cpp
changes in weights is written here once more, in the other direction than the package under test reads it.
"""

import re

import gguf
import goldens
import numpy as np

ARCHITECTURES = {"qwen3_moe": "qwen3moe"}
TYPES = gguf.GGMLQuantizationType
# Where a block of a type has its float16 fields, for blocks of random bytes.
HALVES = {
    **{"Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "IQ4_NL": (0,), "Q6_K": (208,)},
    **{"Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "IQ4_XS": (0,), "IQ3_XXS": (0,)},
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
    halves = rng.uniform(0.5, 1.5, (len(blocks), len(HALVES[kind]))) * rng.choice([-1, 1], (len(blocks), 1))
    for scale in (1.0, deviation):
        for place, values in zip(HALVES[kind], (halves * scale).T, strict=True):
            blocks[:, place : place + 2] = values.astype("<f2").view(np.uint8).reshape(-1, 2)
        if scale == 1.0:
            deviation = deviation / values_of(kind, rows).std()
    return rows


def values_of(kind, rows):
    """Returns the float32 values of rows of blocks, as the `gguf` package computes them."""
    return gguf.quants.dequantize(rows, TYPES[kind])


def pieces(family):
    """Yields (name, float32 array, restore) of every tensor of the file; restore(values) gives {hub name: values}."""
    tensors = {name: goldens.as_float(tensor) for name, tensor in goldens.hub_tensors(family).items()}
    names = gguf.get_tensor_name_map(_architecture(family), goldens.text_config(family)["num_hidden_layers"])
    stacks = {}
    for hub, array in tensors.items():
        one = re.fullmatch(r"(.+\.experts)\.(\d+)\.(\w+)\.weight", hub)
        if one:
            stacks.setdefault(f"{one[1]}.{one[3]}", []).append(hub)
            continue
        stem, _, end = hub.rpartition(".")
        yield f"{names.get_name(stem)}.{end}", array, lambda values, hub=hub: {hub: values}
    for stem, hubs in stacks.items():
        made = np.stack([tensors[hub] for hub in hubs])
        yield f"{names.get_name(stem)}.weight", made, lambda values, hubs=hubs: dict(zip(hubs, values, strict=True))


def _architecture(family):
    return next(kind for kind, name in gguf.MODEL_ARCH_NAMES.items() if name == ARCHITECTURES[family])


def write_gguf(path, family, type_of, keys=None, **options):
    """Writes the model; `type_of(name)` is the type of a matrix, and other tensors are float32.

    Args:
        keys: metadata that replace or add to the model's own, by whole key.

    Returns:
        {hub name: float array}, the dequantised weights.
    """
    writer, weights = gguf.GGUFWriter(str(path), ARCHITECTURES[family], **options), {}
    _write_sizes(writer, goldens.text_config(family))
    _write_tokenizer(writer, goldens.text_config(family)["vocab_size"])
    for key, value in (keys or {}).items():
        writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value))
    for seed, (name, array, restore) in enumerate(pieces(family)):
        kind = type_of(name) if array.ndim > 1 and "_inp" not in name else "F32"
        rows = _stored(kind, array, seed)
        writer.add_tensor(name, rows, raw_dtype=TYPES[kind])
        weights |= restore(rows if kind == "F32" else values_of(kind, rows).reshape(array.shape))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return weights


def _stored(kind, array, seed):
    """Returns the tensor in a type: quantised by the package if it can, else random."""
    if kind in ("F32", "F16"):
        return array.astype(np.dtype(f"<f{int(kind[1:]) // 8}"))
    try:
        return gguf.quants.quantize(array, TYPES[kind])
    except NotImplementedError:
        return random_blocks(kind, array.shape, seed, array.std())


def _write_sizes(writer, c):
    writer.add_block_count(c["num_hidden_layers"])
    writer.add_context_length(c["max_position_embeddings"])
    writer.add_embedding_length(c["hidden_size"])
    writer.add_feed_forward_length(c["intermediate_size"])
    writer.add_head_count(c["num_attention_heads"])
    writer.add_head_count_kv(c["num_key_value_heads"])
    writer.add_key_length(c["head_dim"])
    writer.add_value_length(c["head_dim"])
    writer.add_layer_norm_rms_eps(c["rms_norm_eps"])
    writer.add_rope_freq_base(c["rope_theta"])
    writer.add_expert_count(c["num_experts"])
    writer.add_expert_used_count(c["num_experts_per_tok"])
    writer.add_expert_feed_forward_length(c["moe_intermediate_size"])


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

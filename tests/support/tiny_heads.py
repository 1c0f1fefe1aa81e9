"""Tiny random checkpoints that have a draft head, and what such a head computes, in numpy. `drafted` follows
DeepSeek-V3 (arXiv:2412.19437, section 2.2) and Qwen's head in vLLM (`qwen3_next_mtp.py`), which takes hidden states
after the model's last norm.
"""

import functools

import goldens
import numpy as np
import oracle
from head_weights import LAYERED, head_tensors, names_of
from minmax import convert
from once import made_once
from tiny_models import on_cpu, write_tokenizer

HEADED = ("qwen3_next", "qwen3_moe", "qwen3_5_moe", "deepseek_v3", "glm4_moe", "glm5_next")


def write_headed(path, family, variant="hub", head=None):
    """Writes a checkpoint with a draft head: `head`, or `head_tensors`."""
    path = goldens.write_variant(path, family, variant)
    skipped = goldens.skipped_tensors(family)
    tensors = {name: one for name, one in goldens.variant_tensors(family, variant).items() if name not in skipped}
    goldens.write_safetensors(path / "model.safetensors", tensors | (head_tensors(family) if head is None else head))
    return path


@functools.cache
def headed_directory(family):
    """Returns a packed model with a draft head and a tokenizer. Tests share it and must not write into it."""

    def make(path):
        with on_cpu():
            convert(write_headed(path.with_suffix(".checkpoint"), family), path)
        write_tokenizer(path, "qwen3_style")

    return made_once(f"headed-{family}", make)


def weights(family):
    """Returns {our name: float64 array} of the head as it is loaded: routed experts in 4 bits, other matrices in 8, and
    the rest unchanged."""
    names, result = names_of(family), {}
    for name, tensor in head_tensors(family).items():
        ours = next(own for own, theirs in sorted(names.items(), reverse=True) if name.startswith(theirs))
        result[ours + name.removeprefix(names[ours])] = _dequantised(family, name, goldens.as_float(tensor))
    return result


def _dequantised(family, name, values):
    bits = min(goldens.quantised_bits(family, name), 4) and (4 if ".experts." in name else 8)
    if not bits or values.ndim < 2 or (name.endswith(".gate.weight") and family in LAYERED):
        return values.astype(np.float64)
    return oracle.dequantize(*oracle.quantize(values, bits=bits), bits=bits)


def drafted(family, embedded, hidden, lm_head):
    """Returns logits [T, V] of hidden states [T, D] and the embeddings [T, D] of the tokens after them, and its own
    states."""
    c, w = goldens.text_config(family), weights(family)
    plus, eps = oracle.norm_offset(c), c["rms_norm_eps"]
    parts = (
        oracle.rms_norm(embedded, plus + w["enorm.weight"], eps),
        oracle.rms_norm(hidden, plus + w["hnorm.weight"], eps),
    )
    x = np.concatenate(parts, -1) @ w["fc.weight"].T
    x = x + oracle.mixer(oracle.rms_norm(x, plus + w["input_layernorm.weight"], eps), w, c)
    y = oracle.rms_norm(x, plus + w["post_attention_layernorm.weight"], eps)
    x = oracle.feed_forward(x, y, oracle.under(w, "mlp."), c)
    out = oracle.rms_norm(x, plus + w["model.norm.weight"], eps)
    return out @ lm_head.T, out

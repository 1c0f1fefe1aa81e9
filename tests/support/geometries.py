"""Tiny MLX checkpoints in which every matrix has a different stored form, and the weights behind them.

Promises: `write` makes what mlx-lm would save of the family's golden model in those forms, and returns every weight in
float64 under the hub's names, for `oracle.forward`: scale * code + bias, or a small float times a scale,
worked out here from the stored bytes. Does not know: the package under test, but for the type `Quant`.
"""

import json
from pathlib import Path

import goldens
import mlx.core as mx
import numpy as np

from moeflux_mlx.quant import Quant

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])  # OCP MX 1.0, table 5
ROUTER = Quant(8, 64)
MXFP4 = Quant(4, 32, "mxfp4")


def uniform(quant, dtype=mx.bfloat16):
    """Gives every matrix the same form, where its columns allow that."""
    return lambda path: (quant, dtype)


def recipe(low, high, dtype=mx.bfloat16):
    """Follows mlx-lm's mixed recipes: down projections, v_proj and the head high, but not in every layer
    (convert.py)."""

    def form(path):
        is_high = "down_proj" in path or "v_proj" in path or "lm_head" in path
        return (high if is_high and ".layers.1." not in path else low), dtype

    return form


def write(path, family, form, prefix=""):
    """Writes the checkpoint into `path`.

    Args:
        form: module path -> (Quant, dtype of scales).
        prefix: before module paths in config.json.

    Returns:
        {hub name: float64 array}.
    """
    path = Path(path)
    path.mkdir(parents=True, exist_ok=True)
    tensors, weights, overrides = {}, {}, {}
    stacked = goldens._stack_experts(goldens.split_experts(goldens.source(family)))
    for name, tensor in stacked.items():
        mlx_name, module = goldens._mlx_name(family, name), goldens._mlx_name(family, name).removesuffix(".weight")
        quant, dtype = form(module)
        if goldens.quantised_bits(family, name) == 8:
            quant = ROUTER
        if not goldens.quantised_bits(family, name) or tensor[1].shape[-1] % quant.group_size:
            tensors[mlx_name] = as_mlx(goldens._mlx_plain(family, name, tensor))
            weights |= by_expert(name, goldens.as_float(tensor).astype(np.float64))
            continue
        parts = mx.quantize(mx.array(goldens.as_float(tensor)).astype(dtype), quant.group_size, quant.bits, quant.mode)
        tensors |= {f"{module}.{part}": one for part, one in zip(quant.parts, parts, strict=True)}
        overrides[f"{prefix}{module}"] = quant.entry()
        weights |= by_expert(name, values(quant, *parts))
    mx.save_safetensors(str(path / "model.safetensors"), tensors, {"format": "mlx"})
    config = {**goldens.variant_config(family, "hub"), "quantization": {"group_size": 64, "bits": 4, **overrides}}
    (path / "config.json").write_text(json.dumps(config))
    return weights


def by_expert(name, array):
    """Returns a stack under the names of its experts."""
    stem, separator, rest = name.partition(".switch_mlp.")
    return {f"{stem}.experts.{i}.{rest}": one for i, one in enumerate(array)} if separator else {name: array}


def as_mlx(tensor):
    kind, array = tensor
    made = mx.array(array)
    return made.view(mx.bfloat16) if kind == "BF16" else made


def values(quant, weight, scales, biases=None):
    """Returns float64 values of stored codes."""
    codes = unpacked(np.array(weight), quant.bits)
    if quant.mode != "affine":
        scale = e4m3(np.array(scales)) if quant.mode == "nvfp4" else 2.0 ** (np.array(scales).astype(np.float64) - 127)
        return (e4m3(codes) if quant.mode == "mxfp8" else E2M1[codes]) * spread(scale, quant.group_size)
    scale, bias = (np.array(part.astype(mx.float32)).astype(np.float64) for part in (scales, biases))
    scale, bias = spread(scale, quant.group_size), spread(bias, quant.group_size)
    return scale * codes + bias


def e4m3(codes):
    """Decodes E4M3 codes (OCP 8-bit floating point 1.0, table 1)."""
    exponent, mantissa = codes >> 3 & 15, codes & 7
    size = np.where(exponent, (8 + mantissa) * 2.0 ** (exponent - 10.0), mantissa * 2.0**-9)
    return np.where(codes & 0x80, -size, size)


def unpacked(words, bits):
    """Unpacks codes.

    The words of a row are one stream of bits, the first code in the lowest ones; codes of 3, 5 and 6 bits may cross
    words.
    """
    stream = np.unpackbits(np.ascontiguousarray(words).view(np.uint8), axis=-1, bitorder="little")
    each = stream.reshape(*words.shape[:-1], -1, bits)
    return (each << np.arange(bits, dtype=np.uint8)).sum(-1, dtype=np.int64)


def spread(of_groups, group_size):
    return np.repeat(of_groups, group_size, axis=-1)

"""Writes safetensors files like mlx-lm or Hugging Face's library, split and shuffled as requested.

MLX does not pad the header, so that tensors begin at any address; Hugging Face's library pads it to 8 bytes and puts
tensors of wide types first. Format: https://github.com/huggingface/safetensors#format
"""

import json

import goldens
import mlx.core as mx
import numpy as np

DTYPES = {**goldens.DTYPES, **dict.fromkeys(("U8", "F8_E4M3", "F8_E8M0"), "u1")}
INDEX = "model.safetensors.index.json"


def write_unpadded(path, tensors, residue=None):
    """Writes {name: (dtype, array)} in this order. `residue` is the address where the data begin, modulo 16."""
    for filler in range(16):
        text = json.dumps(_header(tensors, {"format": "mlx", "x": "x" * filler}), separators=(",", ":")).encode()
        if residue is None or (8 + len(text)) % 16 == residue:
            return _write(path, text, tensors)
    raise AssertionError("no filler gives this residue")


def write_padded(path, tensors):
    """Writes a file like Hugging Face's library: wide types first, the header padded with spaces."""
    ordered = dict(sorted(tensors.items(), key=lambda one: (-np.dtype(DTYPES[one[1][0]]).itemsize, one[0])))
    text = json.dumps(_header(ordered, {"format": "pt"}), separators=(",", ":")).encode()
    return _write(path, text + b" " * (-len(text) % 8), ordered)


def write_shards(folder, shards, residues=None, padded=False):
    """Writes one file for each {name: (dtype, array)} of `shards`, and the index."""
    weight_map = {}
    for i, tensors in enumerate(shards):
        name = f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        if padded:
            write_padded(folder / name, tensors)
        else:
            write_unpadded(folder / name, tensors, residues[i] if residues else None)
        weight_map |= dict.fromkeys(tensors, name)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def shuffled_shards(tensors, count, seed):
    """Distributes the tensors, in random order, over `count` shards."""
    names = list(tensors)
    np.random.default_rng(seed).shuffle(names)
    return [{name: tensors[name] for name in names[i::count]} for i in range(count)]


def write_model(folder, family, variant="mlx4", count=2, seed=0, residues=None, padded=False, forms=None):
    """A tiny checkpoint as mlx-lm would write it, in shuffled shards; returns its folder.

    Args:
        forms: of all stacks of experts and of those of down_proj: 4 bits, group 64, if None.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config, tensors = goldens.variant_config(family, variant), goldens.variant_tensors(family, variant)
    if forms is not None:
        tensors, overrides = in_forms(tensors, *forms)
        config["quantization"] = {**config["quantization"], **overrides}
        del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps(goldens._read_json(family, "generation_config.json")))
    write_shards(folder, shuffled_shards(tensors, count, seed), residues, padded)
    return folder


def _quantized(stack, quant):
    """Quantises as mlx-lm does: a global scale is an expert's largest weight (mlx_lm.models.switch_layers)."""
    if not quant.has_global_scale:
        return mx.quantize(stack, quant.group_size, quant.bits, quant.mode)
    largest = mx.max(mx.abs(stack), axis=(-2, -1)).astype(mx.float32)
    each = [
        mx.quantize(matrix, quant.group_size, quant.bits, quant.mode, global_scale=most)
        for matrix, most in zip(stack, largest, strict=True)
    ]
    return *(mx.stack(list(parts)) for parts in zip(*each, strict=True)), largest


def in_forms(tensors, usual, down):
    """Returns the tensors with the stacks of experts in other forms, and the entries of config.json for them."""
    made, overrides = dict(tensors), {}
    for name, (_, codes) in tensors.items():
        if ".switch_mlp." not in name or not name.endswith(".weight"):
            continue
        path = name.removesuffix(".weight")
        quant = down if path.endswith("down_proj") else usual
        del made[f"{path}.scales"], made[f"{path}.biases"]
        scales, biases = (mx.array(tensors[f"{path}.{part}"][1]).view(mx.bfloat16) for part in ("scales", "biases"))
        with mx.stream(mx.cpu):  # MLX's CUDA build computes nothing for 1 bit
            values = mx.dequantize(mx.array(codes), scales, biases, 64, 4)
            parts = _quantized(values, quant)
        made |= {f"{path}.{part}": _stored(one) for part, one in zip(quant.parts, parts, strict=True)}
        overrides[path] = quant.entry()
    return made, overrides


def _stored(array):
    if array.dtype == mx.bfloat16:
        return "BF16", np.array(array.view(mx.uint16))
    return {mx.uint32: "U32", mx.uint8: "U8", mx.float32: "F32"}[array.dtype], np.array(array)


def _header(tensors, metadata):
    header, offset = {"__metadata__": metadata}, 0
    for name, (dtype, array) in tensors.items():
        end = offset + array.size * np.dtype(DTYPES[dtype]).itemsize
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [offset, end]}
        offset = end
    return header


def _write(path, text, tensors):
    data = b"".join(array.astype(DTYPES[dtype]).tobytes() for dtype, array in tensors.values())
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path

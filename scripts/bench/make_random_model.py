#!/usr/bin/env python3
"""Writes a packed model with a named variant's shapes and random weights, at disk speed, for benchmarks.

    python scripts/bench/make_random_model.py --variant qwen3-30b-a3b --layers 8 OUT
    python scripts/bench/make_random_model.py --variant qwen3-30b-a3b --layers 8 OUT --checkpoint OUT-mlx

The second also writes the same weights as mlx-lm would: stacks of all experts in safetensors shards, whose headers are
not padded, so that tensors begin at odd addresses.

Weights have the spread of a trained model's (standard deviation 1/sqrt(inputs)), so activations stay finite
and routing is spread over all experts. Expert blocks are drawn from a small set of distinct ones; every
resident matrix is drawn by itself. It has a byte-level tokenizer, so every command runs on it; its text is noise.
"""

import argparse
import json
import math
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import mlx.core as mx
import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from tqdm import tqdm

from moeflux_mlx.files import directory, read_json
from moeflux_mlx.formats.checkpoint import ITEM_BYTES, Tensor, read_bytes, read_header
from moeflux_mlx.formats.layout_file import to_json
from moeflux_mlx.formats.packed import FOLDER, PackedExperts
from moeflux_mlx.formats.record import ExpertLayout, Field
from moeflux_mlx.model.tensors import needed, stored_as
from moeflux_mlx.quant import DEFAULT, Quant
from moeflux_mlx.spec import ModelArgs, variants

DISTINCT_BLOCKS = 16
SHARD_BYTES = 5 << 30  # mlx-lm's default
CODE_SPREAD = 4.61  # standard deviation of 0 .. 15


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--variant", required=True, choices=variants())
    parser.add_argument("--layers", type=int, help="keep only this many layers (default: all)")
    parser.add_argument("--experts", type=int, help="keep only this many experts (default: all)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--checkpoint", type=Path, help="write the same weights here too, as mlx-lm would")
    parser.add_argument("--force", action="store_true", help="write over what is there")
    parser.add_argument("out", type=Path)
    options = parser.parse_args()
    for folder in (options.out, options.checkpoint):
        if folder is not None and folder.exists() and not options.force:
            parser.error(f"{folder} exists; give another directory, or --force to write over it")
    config = config_of(options.variant, options.layers, options.experts)
    write_model(config, options.out, np.random.default_rng(options.seed))
    if options.checkpoint is not None:
        write_checkpoint(options.out, options.checkpoint)


def config_of(variant: str, layers: int | None = None, experts: int | None = None) -> dict:
    """Returns the configuration of a variant, perhaps with fewer layers or experts."""
    config = read_json(directory("configs") / f"{variant}.json")
    body = config.get("text_config", config)
    if layers:
        whole, body["num_hidden_layers"] = body["num_hidden_layers"], layers
        for part in (body, *(value for value in body.values() if isinstance(value, dict))):
            for name, value in part.items():  # layer_types, attn_type_list and similar lists
                if isinstance(value, list) and len(value) == whole:
                    part[name] = value[:layers]
        if "first_k_dense_replace" in body:
            body["first_k_dense_replace"] = min(body["first_k_dense_replace"], max(layers - 1, 0))
    if experts:
        body["n_routed_experts" if "n_routed_experts" in body else "num_experts"] = experts
    return config


def write_model(config: dict, out: Path, rng: np.random.Generator) -> None:
    args = ModelArgs.from_dict(config)
    (out / FOLDER).mkdir(parents=True, exist_ok=True)
    overrides = write_resident(args, out, rng)
    write_experts(ExpertLayout.from_args(args), out / FOLDER, rng)
    quantization = {**DEFAULT.entry(), **overrides}
    (out / "config.json").write_text(json.dumps({**config, "quantization": quantization}, indent=2))
    write_tokenizer(out)


def write_resident(args: ModelArgs, out: Path, rng: np.random.Generator) -> dict:
    """Writes one safetensors file. Returns the exceptions from the default quantisation for config.json."""
    tensors, overrides = {}, {}
    matrices, others = needed(args)
    for path, shape in matrices.items():
        quant = stored_as(args, path, shape[-1])
        if quant is None:
            tensors[f"{path}.weight"] = mx.array(normal(rng, shape)).astype(mx.bfloat16)
            continue
        if quant != DEFAULT:
            overrides[path] = {"group_size": quant.group_size, "bits": quant.bits}
        for part, value in quantised(rng, shape, quant).items():
            tensors[f"{path}.{part}"] = value
    for name, shape in others.items():
        tensors[name] = plain(name, shape, rng)
    mx.save_safetensors(str(out / "resident.safetensors"), tensors)
    return overrides


def normal(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return rng.standard_normal(shape, dtype=np.float32) * shape[-1] ** -0.5


def plain(name: str, shape: tuple[int, ...], rng: np.random.Generator) -> mx.array:
    """Returns a norm near one, or a small decay or bias."""
    leaf = name.rpartition(".")[2]
    if leaf == "weight" and len(shape) == 1:
        return mx.ones(shape, mx.bfloat16)
    if leaf == "A_log":
        return mx.array(np.log(rng.uniform(0.5, 8, shape)).astype(np.float32))
    scale = 0.3 if leaf == "weight" else 0.1
    return mx.array(rng.standard_normal(shape, dtype=np.float32) * scale)


def quantised(rng: np.random.Generator, shape: tuple[int, ...], quant: Quant) -> dict[str, mx.array]:
    *rows, cols = shape
    codes = rng.integers(0, 2**32, (*rows, quant.words(cols)), dtype=np.uint32)
    spread = CODE_SPREAD * 2 ** (quant.bits - 4)
    step = np.full((*rows, quant.groups(cols)), cols**-0.5 / spread, np.float32)
    step *= rng.uniform(0.8, 1.2, step.shape).astype(np.float32)
    middle = -step * (2**quant.bits - 1) / 2
    return {
        "weight": mx.array(codes),
        "scales": mx.array(step).astype(mx.bfloat16),
        "biases": mx.array(middle).astype(mx.bfloat16),
    }


def block(layout: ExpertLayout, rng: np.random.Generator) -> np.ndarray:
    """Returns one packed expert of `stride` bytes."""
    record = layout.record
    out = np.zeros(record.stride, np.uint8)
    for matrix in (record.gate, record.up, record.down):
        parts = quantised(rng, (matrix.rows, matrix.columns), matrix.quant)
        for field, value in zip(matrix.fields, parts.values(), strict=True):
            raw = np.array(value.view(mx.uint16) if value.dtype == mx.bfloat16 else value)
            out[field.offset : field.end] = raw.reshape(-1).view(np.uint8)
    return out


def write_experts(layout: ExpertLayout, folder: Path, rng: np.random.Generator) -> None:
    needed, free = layout.total_bytes, shutil.disk_usage(folder).free
    if needed > free:
        raise SystemExit(f"error: the experts take {needed / 1e9:.1f} GB; {free / 1e9:.1f} GB of disk are free")
    blocks = [block(layout, rng) for _ in range(DISTINCT_BLOCKS)]
    for layer in tqdm(layout.moe_layers, unit="layer"):
        with open(folder / layout.file_name(layer), "wb") as file:
            for choice in rng.integers(0, DISTINCT_BLOCKS, layout.num_experts):
                file.write(blocks[choice])
    (folder / "layout.json").write_text(json.dumps(to_json(layout), indent=1))


def write_checkpoint(packed: Path, out: Path) -> None:
    """Writes the weights of the packed model as an MLX checkpoint, whole tensors in shards of at most 5 GiB."""
    out.mkdir(parents=True, exist_ok=True)
    for file in packed.glob("*.j*"):
        shutil.copy(file, out)
    opened = PackedExperts.open(packed, ModelArgs.from_file(packed))
    tensors = {one.name: partial(stored, one) for one in read_header(packed / "resident.safetensors").values()}
    shapes = {one.name: (one.dtype, one.shape) for one in read_header(packed / "resident.safetensors").values()}
    for layer, record in opened.layout.records.items():
        for field in record.fields:
            name = f"model.layers.{layer}.mlp.switch_mlp.{field.name}"
            tensors[name] = partial(stack, opened, layer, field)
            shapes[name] = field.dtype, (opened.layout.num_experts, *field.shape)
    shards, weight_map = shards_of(shapes), {}
    for i, names in enumerate(tqdm(shards, unit="shard"), 1):
        file = f"model-{i:05d}-of-{len(shards):05d}.safetensors"
        write_shard(out / file, {name: shapes[name] for name in names}, tensors)
        weight_map |= dict.fromkeys(names, file)
    (out / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def stored(tensor: Tensor) -> bytes:
    return bytes(read_bytes(tensor.file, tensor.offset, tensor.nbytes))


def stack(opened: PackedExperts, layer: int, field: Field) -> bytes:
    """Returns one field of all experts, one after the other."""
    records = np.memmap(opened.paths[layer], np.uint8, "r").reshape(opened.layout.num_experts, -1)
    return records[:, field.offset : field.end].tobytes()


def size_of(dtype: str, shape: tuple[int, ...]) -> int:
    return ITEM_BYTES[dtype] * math.prod(shape)


def shards_of(shapes: dict[str, tuple[str, tuple[int, ...]]]) -> list[list[str]]:
    shards: list[list[str]] = [[]]
    held = 0
    for name, shape in shapes.items():
        if shards[-1] and held + size_of(*shape) > SHARD_BYTES:
            shards.append([])
            held = 0
        shards[-1].append(name)
        held += size_of(*shape)
    return shards


def write_shard(file: Path, shapes: dict, tensors: dict[str, Callable[[], bytes]]) -> None:
    header, offset = {"__metadata__": {"format": "mlx"}}, 0
    for name, (dtype, shape) in shapes.items():
        end = offset + size_of(dtype, shape)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    with open(file, "wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for name in shapes:
            out.write(tensors[name]())


def write_tokenizer(out: Path) -> None:
    """Writes a byte-level tokenizer with 256 ids: any text can be encoded, and higher ids decode to nothing."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(out / "tokenizer.json"))
    (out / "tokenizer_config.json").write_text("{}")
    (out / "generation_config.json").write_text('{"eos_token_id": []}')
    (out / "chat_template.jinja").write_text("{% for m in messages %}{{ m['content'] }}\n{% endfor %}")


if __name__ == "__main__":
    main()

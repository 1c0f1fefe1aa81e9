#!/usr/bin/env python3
"""Writes a packed model with a named variant's shapes and random weights, at disk speed, for benchmarks.

    python scripts/bench/make_random_model.py --variant qwen3-30b-a3b --layers 8 OUT
    python scripts/bench/make_random_model.py --variant qwen3-30b-a3b --layers 8 OUT --checkpoint OUT-mlx
    python scripts/bench/make_random_model.py --variant qwen3-30b-a3b --layers 2 --experts 8 --tiny OUT
    python scripts/bench/make_random_model.py --variant qwen3-30b-a3b --layers 8 --expert-mode iq2_xs OUT

The second also writes the same weights as mlx-lm would: stacks of all experts in safetensors shards, whose headers
are not padded, so that tensors begin at odd addresses. The third takes a second and a few MB, to try a command. In
the fourth, experts are in a form of GGUF's.

Of fewer layers at least one has experts: dense layers before it are left out where needed. A directory appears
complete or not at all; --force replaces a model or checkpoint as a whole.

Weights have the spread of a trained model's (standard deviation 1/sqrt(inputs)), so activations stay finite
and routing is spread over all experts. Expert blocks are drawn from a small set of distinct ones; every
resident matrix is drawn by itself. It has a byte-level tokenizer, so every command runs on it; its text is noise.
"""

import argparse
import contextlib
import json
import math
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import mlx.core as mx
import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from tqdm import tqdm

from moeflux_mlx.errors import ConfigError, MoefluxError, RequestError
from moeflux_mlx.families.names import canonical_name
from moeflux_mlx.families.registry import FAMILIES
from moeflux_mlx.files import directory, existing_parent, read_json
from moeflux_mlx.formats.checkpoint import ITEM_BYTES, Tensor, read_bytes, read_header
from moeflux_mlx.formats.layout_file import to_json
from moeflux_mlx.formats.packed import FOLDER, PackedExperts, open_packed
from moeflux_mlx.formats.record import BIAS, VALUES, ExpertLayout, Field, Record, set_path
from moeflux_mlx.formats.tables import NAME, NARROW, STEM, TOKEN_MAP, RowForm
from moeflux_mlx.formats.tables import PATTERN as TABLES
from moeflux_mlx.kinds import NGrams, Router
from moeflux_mlx.model.tensors import TABLE, needed, stored_as, variant_bytes
from moeflux_mlx.opening.random_weights import random_records
from moeflux_mlx.packing.plan import SMALL_GROUP
from moeflux_mlx.packing.recipe import DEFAULT_PART, Recipe
from moeflux_mlx.quant import DEFAULT, GGUF_MODES, GRID, MODES, Quant, of_mode
from moeflux_mlx.spec import ModelArgs, variants

DISTINCT_BLOCKS = 16
SHARD_BYTES = 5 << 30  # mlx-lm's default
CODE_SPREAD = 4.61  # standard deviation of 0 .. 15
DISTINCT_ROWS, SHARD_ROWS = 4096, 1 << 20  # of a table of n-grams
EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
FIRST_LAYERS = {"first_k_dense_replace", "num_dense_layers", "moe_layer_start_index", "moe_layer_end_index"}
FIRST_LAYERS |= {"dense_mlp_idx"}  # numbers of layers with and without experts
Shape = tuple[str, tuple[int, ...]]  # of a tensor, behind its dtype
TINY = {"hidden_size": 128, "vocab_size": 256, "unpadded_vocab_size": 256, "ngram_vocab_size_base": 1000}
TINY |= {"logits_mup_width_multiplier": 1.0}  # logits are divided by it because a wide model's are larger


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--variant", required=True, choices=variants())
    parser.add_argument("--layers", type=int, help="keep only this many layers (default: all)")
    parser.add_argument("--experts", type=int, help="keep only this many experts (default: all)")
    parser.add_argument("--tiny", action="store_true", help="make hidden states, vocabulary and n-gram tables tiny too")
    parser.add_argument("--expert-mode", choices=MODES, help="of the experts, in its usual sizes (default: affine)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--checkpoint", type=Path, help="write the same weights here too, as mlx-lm would")
    parser.add_argument("--force", action="store_true", help="replace a model or checkpoint that is there")
    parser.add_argument("out", type=Path)
    options = parser.parse_args(arguments)
    try:
        write(options)
    except (MoefluxError, OSError) as error:
        raise SystemExit(f"error: {error}") from None


def write(options: argparse.Namespace) -> None:
    if options.seed < 0:
        raise RequestError(f"--seed is {options.seed}; it must be at least 0")
    if options.checkpoint is not None and options.expert_mode in GGUF_MODES:
        raise RequestError(f"mlx-lm has no form {options.expert_mode}; leave out --checkpoint or --expert-mode")
    out, *others = (folder.resolve() for folder in (options.out, options.checkpoint) if folder is not None)
    for other in others:
        if out.is_relative_to(other) or other.is_relative_to(out):
            raise RequestError(f"of {out} and {other} one lies in the other; give two directories")
    for folder in (out, *others):
        check_folder(folder, options.force)
    config = config_of(options.variant, options.layers, options.experts, options.tiny)
    check_space(ModelArgs.from_dict(config), [out, *others])
    with contextlib.ExitStack() as folders:
        packed = folders.enter_context(complete(out))
        write_model(config, packed, np.random.default_rng(options.seed), options.expert_mode)
        for other in others:
            write_checkpoint(packed, folders.enter_context(complete(other)))


def check_folder(out: Path, force: bool) -> None:
    """Raises RequestError: something is there that may not or cannot be replaced."""
    if not out.exists():
        return
    if not force:
        raise RequestError(f"{out} exists; give another directory, or --force to replace it")
    if os.path.ismount(out):
        raise RequestError(f"{out} is a mount point, which cannot be replaced; give a directory in it")
    is_model = (out / "config.json").is_file() and any(out.glob("*.safetensors"))
    if not out.is_dir() or (any(out.iterdir()) and not is_model):
        raise RequestError(f"{out} is not a model or checkpoint, so --force leaves it alone; give another directory")


@contextlib.contextmanager
def complete(out: Path) -> Iterator[Path]:
    """Gives a folder beside `out` that takes its place at the end, or is removed after an error."""
    is_there = out.exists()
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as beside:
        made, old = Path(beside) / "made", Path(beside) / "old"
        made.mkdir()
        yield made
        try:
            if is_there:
                out.rename(old)
            made.rename(out)  # fails if somebody else has put something there
        except BaseException:
            if old.exists() and not out.exists():
                old.rename(out)
            raise


def config_of(variant: str, layers: int | None = None, experts: int | None = None, tiny: bool = False) -> dict:
    """Returns the configuration of a variant, perhaps with fewer layers or experts, or tiny widths.

    Raises:
        ConfigError: the variant cannot have so many layers or experts.
    """
    config, args = read_json(directory("configs") / f"{variant}.json"), ModelArgs.from_variant(variant)
    body = config.get("text_config", config)
    if layers is not None:
        pair = 1 if "num_hidden_layers" in body else 2  # LongCat counts layers of two mixers
        check_count("layers", layers, variant, pair, args.num_hidden_layers, pair)
        keep_layers(body, max(args.moe_layers[0] + 1 - layers, 0), layers)
    if experts is not None:
        router = args.experts.router
        check_count("experts", experts, variant, least_experts(router), router.experts, router.groups)
        body[next(name for name in EXPERT_COUNTS if name in body)] = experts
    if tiny:
        body.update((name, value) for name, value in TINY.items() if name in body)
        if "engram_layer_ids" in body:
            body |= {"engram_vocab_size": 1000, "engram_compressed_vocab_size": body["vocab_size"]}
            body["engram_num_embeddings"] = [40_000] * len(body["engram_layer_ids"])
        if "mamba_expand" in body:
            body["mamba_n_heads"] = body["mamba_expand"] * body["hidden_size"] // body["mamba_d_head"]
    return config


def least_experts(router: Router) -> int:
    """Returns the fewest experts of which a token can use `top_k`, in as many groups as there are."""
    return router.groups * math.ceil(router.top_k / router.kept_groups)


def check_count(name: str, count: int, variant: str, least: int, most: int, unit: int = 1) -> None:
    if not least <= count <= most or count % unit:
        multiple = f"a multiple of {unit} " if unit > 1 else ""
        raise ConfigError(f"--{name} is {count}; {variant} takes {multiple}from {least} to {most}")


def keep_layers(body: dict, start: int, count: int) -> None:
    """Leaves `count` layers from `start` on in the text part of a configuration."""
    if "num_layers" in body:
        body["num_layers"] = count // 2
        return
    whole, end = body["num_hidden_layers"], start + count
    body["num_hidden_layers"] = count
    for part in (body, *(value for value in body.values() if isinstance(value, dict))):
        for name, value in part.items():  # layer_types, attn_type_list and similar lists; layers that draft come last
            if isinstance(value, list) and len(value) >= whole:
                part[name] = value[start:end]
    for name in body.keys() & FIRST_LAYERS:
        body[name] = max(body[name] - start, 0)
    for name in body.keys() & {"mlp_only_layers", "local_layer_ids"}:
        body[name] = [layer - start for layer in body[name] if start <= layer < end]
    linear = body.get("linear_attn_config", {})  # layers from one on
    for name in linear.keys() & {"kda_layers", "full_attn_layers"}:
        linear[name] = [layer - start for layer in linear[name] if start < layer <= end]
    if body.get("interleave_moe_layer_step", 1) > 1:
        every = body["interleave_moe_layer_step"]
        body["moe_layers"] = [layer - start for layer in range(every - 1, end, every) if layer >= start]
    if "engram_layer_ids" in body:
        body["engram_layer_ids"] = [layer for layer in body["engram_layer_ids"] if layer < count]
        body["engram_num_embeddings"] = body["engram_num_embeddings"][: len(body["engram_layer_ids"])]
    if "num_hash_layers" in body:
        body["num_hash_layers"] = min(body["num_hash_layers"], count - 1)
    if "ple_layer_ids" in body:  # from one on
        body["ple_layer_ids"] = [layer for layer in body["ple_layer_ids"] if layer <= count]
    if "loop_config" in body:  # whole blocks run several times
        loop, block = body["loop_config"], body["n_layers_per_attn_res_block"]
        loop["core_end"] = min(loop["core_end"], count // block * block)
        loop["num_passes"] = loop["num_passes"] if loop["core_end"] > loop["core_start"] else 1
    if "moe_layers_enum" in body:
        kept = (int(layer) - start for layer in body["moe_layers_enum"].split(","))
        body["moe_layers_enum"] = ",".join(str(layer) for layer in kept if 0 <= layer < count)
    if "hybrid_override_pattern" in body:  # a layer is a mixer and the experts behind it, if any
        mixers = re.findall("[M*]E?", body["hybrid_override_pattern"])
        body["hybrid_override_pattern"] = "".join(mixers[start:end])
        body["num_hidden_layers"] = len(body["hybrid_override_pattern"])


def write_model(config: dict, out: Path, rng: np.random.Generator, mode: str | None = None) -> None:
    args, quants = ModelArgs.from_dict(config), None
    (out / FOLDER).mkdir(parents=True, exist_ok=True)
    overrides = write_resident(args, out, rng) | write_tables(args, out, rng)
    for part in args.ngrams.values():
        if part.compressed:
            (out / TOKEN_MAP).write_text(json.dumps([token % part.compressed for token in range(args.vocab_size)]))
    if mode is not None:
        recipe = Recipe(mode, {DEFAULT_PART: of_mode(mode)})
        quants = {number: recipe.of_experts(args, number) for number in args.record_sets}
    layout = ExpertLayout.from_args(args, quants)
    for number, record in layout.records.items() if quants else ():
        overrides |= {set_path(args, number, one.name): one.quant.entry() for one in record.projections}
    write_experts(layout, out / FOLDER, rng)
    quantization = {**DEFAULT.entry(), **overrides}
    (out / "config.json").write_text(json.dumps({**config, "quantization": quantization}, indent=2))
    write_tokenizer(out)


def check_space(args: ModelArgs, folders: Sequence[Path]) -> None:
    """Raises ConfigError: the disks cannot hold the weights once for each folder."""
    tables = sum(part.rows * table_form(part).row_bytes for part in args.ngrams.values())
    weights = ExpertLayout.from_args(args).total_bytes + tables + variant_bytes(args, mx.bfloat16)
    places = [existing_parent(folder.parent) for folder in folders]  # a folder is made beside its place
    devices = [device_of(place) for place in places]
    for place, device in zip(places, devices, strict=True):
        nbytes, free = weights * devices.count(device), shutil.disk_usage(place).free
        if nbytes > free:
            raise ConfigError(
                f"{nbytes / 1e9:.1f} GB are to be written to {place}; {free / 1e9:.1f} GB of disk are free"
            )


def device_of(folder: Path) -> int:
    return folder.stat().st_dev


def write_resident(args: ModelArgs, out: Path, rng: np.random.Generator) -> dict:
    """Writes one safetensors file. Returns the exceptions from the default quantisation for config.json."""
    tensors, overrides = {}, {}
    matrices, others, _ = needed(args)
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
        is_table = f".{name}".endswith(TABLE)
        tensors[name] = expert_ids(args.num_experts, shape, rng) if is_table else plain(name, shape, rng)
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


def expert_ids(experts: int, shape: tuple[int, ...], rng: np.random.Generator) -> mx.array:
    """Returns the experts of each token id, neighbours that begin anywhere."""
    first = rng.integers(0, experts, (shape[0], 1))
    return mx.array(((first + np.arange(shape[1])) % experts).astype(np.uint32))


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


def blocks_of(record: Record, rng: np.random.Generator) -> Sequence[np.ndarray]:
    """Returns packed experts of `stride` bytes."""
    if all(one.quant.mode == DEFAULT.mode for one in record.projections):
        return [block(record, rng) for _ in range(DISTINCT_BLOCKS)]
    mx.random.seed(int(rng.integers(1 << 32)))
    blocks = np.array(random_records(record, DISTINCT_BLOCKS).blob).view(np.uint8)
    grids = [field for field in record.fields if field.part == GRID]
    for one in grids:  # which a file has once for each form
        blocks[:, one.offset : one.end] = blocks[:, grids[0].offset : grids[0].end]
    return blocks


def block(record: Record, rng: np.random.Generator) -> np.ndarray:
    """Returns one packed expert of `stride` bytes."""
    out = np.zeros(record.stride, np.uint8)
    for matrix in record.projections:
        parts = quantised(rng, (matrix.rows, matrix.columns), matrix.quant)
        if matrix.bias is not None:
            parts[BIAS] = plain(BIAS, (matrix.rows,), rng).astype(mx.bfloat16)
        for field in matrix.fields:
            out[field.offset : field.end] = raw(parts[field.part]).reshape(-1)
    return out


def raw(value: mx.array) -> np.ndarray:
    """Returns the bytes of each row."""
    return np.array(value.view(mx.uint8))


def write_experts(layout: ExpertLayout, folder: Path, rng: np.random.Generator) -> None:
    records = set(layout.records.values())
    blocks = {record: blocks_of(record, rng) for record in records}
    for layer, record in tqdm(layout.records.items(), unit="layer"):
        with open(folder / layout.file_name(layer), "wb") as file:
            for choice in rng.integers(0, DISTINCT_BLOCKS, layout.count(layer)):
                file.write(blocks[record][choice])
    (folder / "layout.json").write_text(json.dumps(to_json(layout), indent=1))


def table_form(part: NGrams) -> RowForm:
    return RowForm(part.width, Quant(DEFAULT.bits, SMALL_GROUP if part.width % DEFAULT.group_size else 64), NARROW)


def write_tables(args: ModelArgs, out: Path, rng: np.random.Generator) -> dict:
    """Writes the n-gram tables, of a few distinct rows each. Returns the exceptions as `write_resident` does."""
    overrides, shapes, tensors = {}, {}, {}
    for layer, part in args.ngrams.items():
        form = table_form(part)
        overrides[STEM.format(layer)] = form.quant.entry()
        parts = quantised(rng, (DISTINCT_ROWS, part.width), form.quant)
        rows = np.concatenate([raw(value) for value in parts.values()], axis=1)
        for shard, start in enumerate(range(0, part.rows, SHARD_ROWS)):
            count, name = min(SHARD_ROWS, part.rows - start), f"model.layers.{layer}.ple.table.{shard}"
            shapes[name] = "U8", (count, form.row_bytes)
            tensors[name] = lambda rows=rows, count=count: rows[rng.integers(0, DISTINCT_ROWS, count)].tobytes()
    if shapes:
        write_shard(out / "tables.safetensors", shapes, tensors)
    return overrides


def write_checkpoint(packed: Path, out: Path) -> None:
    """Writes the weights of the packed model as an MLX checkpoint, whole tensors in shards of at most 5 GiB."""
    for file in packed.glob("*.j*"):
        shutil.copy(file, out)
    shapes, tensors = {}, {}
    for name, shape, data in checkpoint_tensors(packed, ModelArgs.from_file(packed)):
        shapes[name], tensors[name] = shape, data
    shards, weight_map = shards_of(shapes), {}
    for i, names in enumerate(tqdm(shards, unit="shard"), 1):
        file = f"model-{i:05d}-of-{len(shards):05d}.safetensors"
        write_shard(out / file, {name: shapes[name] for name in names}, tensors)
        weight_map |= dict.fromkeys(names, file)
    (out / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def checkpoint_tensors(packed: Path, args: ModelArgs) -> Iterator[tuple[str, Shape, Callable[[], bytes]]]:
    """Yields name, dtype and shape of each tensor, and a function that reads it."""
    renames = FAMILIES[args.model_type].renames_of(args.layers)
    for tensor in read_header(packed / "resident.safetensors").values():
        yield published(tensor.name, args, renames), (tensor.dtype, tensor.shape), partial(stored, tensor)
    opened = open_packed(packed, args)
    for layer, record in opened.layout.records.items():
        for field in record.fields:
            shape = field.dtype, (opened.layout.count(layer), *field.shape)
            path = set_path(args, layer, field.name).replace(f".{VALUES}.", ".")
            yield path, shape, partial(stack, opened, layer, field)
    for file in packed.glob(TABLES):
        for tensor in read_header(file).values():
            yield from table_tensors(tensor, args)


def published(name: str, args: ModelArgs, renames: Sequence[tuple[str, str]]) -> str:
    """Returns a name that a checkpoint's reader turns into the model's `name`."""
    if canonical_name(name, args.num_hidden_layers, renames) == name:
        return name
    for theirs, ours in reversed(renames):
        name = name.replace(ours, theirs)
    return name


def table_tensors(tensor: Tensor, args: ModelArgs) -> Iterator[tuple[str, Shape, Callable[[], bytes]]]:
    """Yields the parts of a table's rows as `checkpoint_tensors` does."""
    layer, shard = map(int, NAME.fullmatch(tensor.name).groups())
    form, start = table_form(args.ngrams[layer]), 0
    for part, (values, dtype), nbytes in zip(form.quant.parts, form.parts, form.part_bytes, strict=True):
        name = f"{STEM.format(layer)}.shards.{shard}.{part}"
        yield name, (dtype, (tensor.shape[0], values)), partial(columns, tensor, start, start + nbytes)
        start += nbytes


def columns(tensor: Tensor, start: int, end: int) -> bytes:
    return np.frombuffer(stored(tensor), np.uint8).reshape(tensor.shape)[:, start:end].tobytes()


def stored(tensor: Tensor) -> bytes:
    return bytes(read_bytes(tensor.file, tensor.offset, tensor.nbytes))


def stack(opened: PackedExperts, layer: int, field: Field) -> bytes:
    """Returns one field of all experts, one after the other."""
    records = np.memmap(opened.paths[layer], np.uint8, "r").reshape(opened.layout.count(layer), -1)
    return records[:, field.offset : field.end].tobytes()


def size_of(dtype: str, shape: tuple[int, ...]) -> int:
    return ITEM_BYTES[dtype] * math.prod(shape)


def shards_of(shapes: dict[str, Shape]) -> list[list[str]]:
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

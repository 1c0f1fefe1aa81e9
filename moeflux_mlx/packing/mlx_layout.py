"""A conversion's output as mlx-lm loads it: safetensors shards with the experts of a layer in stacks.

Tensors keep the names of the checkpoint, which are those of mlx-lm's models, except for experts, which are
`switch_mlp.{gate,up,down}_proj` [experts, rows, columns], the halves of `kv_b_proj`, and the names in `SPELLED`.
One tensor is made at a time: at most one stack is in memory.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import mlx.core as mx
import numpy as np

from ..errors import ConfigError
from ..families.file_forms import HeadStack, stacks_of_heads
from ..families.names import is_aside
from ..files import JsonObject
from ..formats.checkpoint import Tensor
from ..formats.record import Field
from ..model.tensors import layer_of, stored_as
from ..quant import GLOBAL_SCALE, Quant
from ..spec import ModelArgs
from .layer_files import LayerFile
from .matrix import Matrix
from .resident import Copied, ResidentPlan, TensorFile, in_files, quantization
from .sources import MatrixSource, PlainSource, Source, WrittenTensor

CENTRED = ("minimax_m3_vl",)  # families whose norms mlx-lm stores as weight - 1, too
INDEX = "model.safetensors.index.json"
STACKS = {"gpt_oss": "experts", "gemma4": "experts.switch_glu"}  # mlx-lm's names of stacks that are not switch_mlp
# Model types that mlx-lm 0.32.2 loads as we write them: tests/packing/test_mlx_layout.py compares their logits.
LOADED = (
    *("qwen3_moe", "qwen3_vl_moe", "qwen3_next", "qwen3_5_moe", "deepseek_v3", "kimi_k2", "deepseek_v32", "mistral4"),
    *("glm4_moe", "glm4_moe_lite", "solar_open", "minimax_m2", "minimax_m3_vl", "gpt_oss", "mimo_v2_flash", "laguna"),
    *("exaone_moe", "gemma4", "nemotron_h", "lfm2_moe"),
)
# Beginnings of the names of image encoders that mlx-lm skips, by model type.
ENCODERS: Mapping[str, tuple[str, ...]] = {
    "qwen3_5_moe": ("model.visual.", "vision_tower."),
    "qwen3_vl_moe": ("model.visual.", "vision_tower."),
    "kimi_k2": ("vision_tower.", "mm_projector."),
}
SPELLED: Mapping[str, Sequence[tuple[str, str]]] = {
    "lfm2_moe": ((".w1.", ".gate_proj."), (".w2.", ".down_proj."), (".w3.", ".up_proj.")),
    "nemotron_h": ((".switch_mlp.up_proj.", ".switch_mlp.fc1."), (".switch_mlp.down_proj.", ".switch_mlp.fc2.")),
}  # parts of names that mlx-lm spells differently, by family


@dataclass(frozen=True)
class MlxLayout:
    """The files of weights, the entry `quantization` of config.json, and how many tensors of image encoders and draft
    heads are left out.
    """

    files: Sequence[TensorFile]
    quantization: JsonObject
    left_out: int

    def index(self) -> bytes:
        """The bytes of the file that says which shard has which tensor."""
        written = [(file.name, one) for file in self.files for source in file.sources for one in source.written]
        metadata = {"total_size": sum(one.nbytes for _, one in written)}
        names = {one.name: name for name, one in sorted(written, key=lambda pair: pair[1].name)}
        return (json.dumps({"metadata": metadata, "weight_map": names}, indent=2) + "\n").encode()


def mlx_layout(
    args: ModelArgs, resident: ResidentPlan, layers: Sequence[LayerFile], tensors: Iterable[Tensor]
) -> MlxLayout:
    """Args:
        resident: the resident tensors of a packed model.
        layers: its layer files.
        tensors: all of the checkpoint, of which those of an image encoder are copied.

    Raises:
        ConfigError: mlx-lm has no such model, or does not read a form.
    """
    if args.model_type not in LOADED:
        raise ConfigError(
            f"--layout mlx: mlx-lm is not known to load a {args.model_type}; leave the option out. It loads "
            + ", ".join(LOADED)
        )
    name = _Names(args, resident)
    forms: dict[str, Quant | None] = {}
    sources: list[Source] = []
    for source in resident.sources:
        for one in _as_published(args, source, name):
            sources.append(one)
            if isinstance(one, MatrixSource):
                forms[one.pieces[0][0]] = one.quant
    for layer in layers:
        for index, projection in enumerate(layer.geometry.projections):
            path = name.of_stack(layer, projection.name)
            forms[path] = projection.quant
            sources.append(StackSource(path, layer, index))
    _check_forms(forms)
    kept = [one for one in tensors if is_aside(one.name, args.num_hidden_layers)]
    copied = [one for one in kept if one.name.startswith(ENCODERS.get(args.model_type, ()))]
    sources += map(Copied, copied)
    unique = {source.written[0].name: source for source in sources}
    ordered = sorted(unique.values(), key=lambda one: _order(one.written[0].name))
    files = in_files(
        [replace(one, one_scale=True) if isinstance(one, MatrixSource) else one for one in ordered], "model", TensorFile
    )
    return MlxLayout(files, quantization(forms), len(kept) - len(copied))


def _check_forms(forms: Mapping[str, Quant | None]) -> None:
    for path, form in forms.items():
        if form is not None and not form.is_of_mlx:
            raise ConfigError(f"--layout mlx: {path} is stored in {form.mode}, which mlx-lm does not read")


class _Names:
    """Module paths and names of tensors in mlx-lm's models."""

    def __init__(self, args: ModelArgs, resident: ResidentPlan):
        names = [tensor.name for source in resident.sources for tensor in source.tensors]
        self.is_nested = any(name.startswith(("model.language_model.", "language_model.")) for name in names)
        self.spelled = SPELLED.get(args.model_type, ())
        self.stack = STACKS.get(args.model_type, "switch_mlp")

    def of(self, name: str) -> str:
        for theirs, ours in self.spelled:
            name = name.replace(theirs, ours)
        if not self.is_nested or name.startswith("language_model."):
            return name
        return f"language_model.{name.replace('model.language_model.', 'model.', 1)}"

    def of_module(self, path: str) -> str:
        return self.of(f"{path}.")[:-1]

    def of_stack(self, layer: LayerFile, projection: str) -> str:
        """The path of a stack of experts."""
        stored = layer.experts.parts(0)[0].matrix.weight.name
        stem = next(stored[: stored.index(one)] for one in (".experts.", ".switch_mlp.") if one in stored)
        return self.of_module(f"{stem}.{self.stack}.{projection}")


def _as_published(args: ModelArgs, source: Source, name: _Names) -> Iterator[Source]:
    """The sources under mlx-lm's names: not split, but for the two halves of a latent's up-projection."""
    stored = source.tensors[0].name
    if isinstance(source, PlainSource):
        is_centred = source.centred and args.model_type not in CENTRED
        yield replace(source, name=name.of(stored), rows=None, centred=is_centred, keeps_dtype=True)
    elif isinstance(source, MatrixSource):
        path = name.of_module(stored.rpartition(".")[0])
        yield from _split(args, source, path) or (replace(source, pieces=((path, None),)),)
    else:
        raise ConfigError(f"--layout mlx cannot write tensor {stored}; leave it out")


def _split(args: ModelArgs, source: MatrixSource, path: str) -> list[MatrixSource]:
    """The stacks that take the place of a matrix of floats; none: it stays as it is."""
    layer, matrix = layer_of(source.pieces[0][0]), source.matrix
    stacked = None if layer is None else stacks_of_heads(args.mixers[layer])
    if stacked is None or not path.endswith(f".{stacked[0]}") or matrix.quant is not None:
        return []
    name, heads, stacks = stacked
    made = list[MatrixSource]()
    for stack in stacks:
        rows, columns = stack.number, matrix.shape[-1]
        shape = (heads, columns, rows) if stack.swapped else (heads, rows, columns)
        part, own = RowsOfHeads(shape, matrix.weight, whole=matrix, stack=stack), path.removesuffix(name) + stack.name
        form = None if source.made is None else stored_as(args, own, shape[-1], source.made)
        made.append(MatrixSource(part, ((own, None),), form, source.rounding, "" if form else source.dense or "BF16"))
    return made


@dataclass(frozen=True)
class RowsOfHeads(Matrix):
    """The rows `stack` of the matrix `whole`."""

    whole: Matrix | None = None
    stack: HeadStack | None = None

    def values(self, start: int = 0, stop: int | None = None) -> mx.array:
        assert self.whole is not None and self.stack is not None
        heads = self.whole.values().reshape(self.shape[0], -1, self.whole.shape[-1])
        part = heads[start:stop, self.stack.first : self.stack.first + self.stack.number]
        return mx.contiguous(part.swapaxes(1, 2) if self.stack.swapped else part)


@dataclass(frozen=True)
class StackSource:
    """One projection of all experts of a layer."""

    path: str
    layer: LayerFile
    index: int
    tensors: tuple[Tensor, ...] = ()

    @property
    def _fields(self) -> tuple[Field, ...]:
        return self.layer.geometry.projections[self.index].fields

    @property
    def written(self) -> tuple[WrittenTensor, ...]:
        count = self.layer.layout.num_experts
        shapes = ((count,) if one.part == GLOBAL_SCALE else (count, *one.shape) for one in self._fields)
        pairs = zip(self._fields, shapes, strict=True)
        return tuple(WrittenTensor(f"{self.path}.{one.part}", one.dtype, shape) for one, shape in pairs)

    def arrays(self) -> Iterator[mx.array]:
        """Yields the bytes of each field of all experts."""
        count = self.layer.layout.num_experts
        stacks = {one.offset: np.empty((count, one.size), np.uint8) for one in self._fields}
        for expert in range(count):
            for offset, data in self.layer.fields(expert, self.index):
                stacks[offset][expert] = data
        for one in self._fields:
            yield mx.array(stacks.pop(one.offset))


def _order(name: str) -> tuple[int, str]:
    """Sorts tensors by layer, those of no layer first."""
    found = re.search(r"\.layers\.(\d+)\.", name)
    return (int(found[1]) if found else -1), name

"""The layer files of packed experts: finds each expert's matrices and lays them out as records.

An expert is made when its turn comes, from its own rows of the checkpoint only, whether the checkpoint
keeps experts one by one, stacked, or with gate and up fused.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import mlx.core as mx
import numpy as np

from ..errors import ModelFileError
from ..families.registry import FAMILIES
from ..files import read_json
from ..formats.checkpoint import FLOATS, Tensor, read_bytes
from ..formats.finite import not_finite
from ..formats.layout_file import from_json, held_by, to_json
from ..formats.owners import RankShare
from ..formats.packed import FOLDER, LAYOUT, check_length
from ..formats.record import PROJECTIONS, ExpertLayout, Quants
from ..quant import FLOAT, Quant
from ..spec import ModelArgs
from ..state.fingerprint import EXPERT_SAMPLES, SAMPLE_BYTES, offsets_of
from .lookup import find_matrix, find_transposed
from .matrix import Matrix, finite, shaped, typed
from .resident import array_bytes, not_kept
from .source_format import SourceFormat
from .unit import Bytes
from .wanted import Wanted

SCALES = {"BF16": mx.bfloat16, "F16": mx.float16, "F32": mx.float32}


@dataclass(frozen=True)
class Part:
    """Every `step`-th of the rows `start` to `stop` of a matrix, and what their products add: one projection of one
    expert."""

    matrix: Matrix
    start: int
    stop: int
    step: int = 1
    bias: Tensor | None = None

    @property
    def in_place(self) -> "Part":
        """The rows that lie in its place of a record whose rows of gate and up alternate: a half of all, one after
        another; itself, where rows are apart."""
        half = self.stop // self.step
        return self if self.step == 1 else Part(self.matrix, self.start * half, (self.start + 1) * half, 1, self.bias)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All that it is made of."""
        return self.matrix.tensors if self.bias is None else (*self.matrix.tensors, self.bias)

    def arrays(self, quant: Quant, dtype: str = "BF16") -> tuple[mx.array, ...]:
        """Weight, scales and biases in the form `quant`, as stored where that is it, else quantised from `dtype`; then
        what the products add, if anything.

        `dtype` is that of floating scales and biases.
        """
        kept = SCALES[dtype]
        if self.matrix.quant != quant:
            codes = self.matrix.quantized(quant, self.start, self.stop, kept)
        else:
            weight, *of_groups = self.matrix.rows(self.start, self.stop).codes()
            codes = weight, *(part.astype(kept) if quant.scale == FLOAT else part for part in of_groups)
        bias = () if self.bias is None else (finite(self.bias, self.bias.read()).astype(kept)[self.start : self.stop],)
        return tuple(array[:: self.step] for array in (*codes, *bias))


class Experts(Protocol):
    """The routed experts of one layer.

    Attributes:
        biases: what all experts' products add, as it is stored.
    """

    @property
    def biases(self) -> list[Tensor]: ...

    def matrices(self) -> tuple[list[Matrix], list[Matrix], list[Matrix]]:
        """Everything that is stored for gate, up and down: a stack of all experts, or one of each."""
        ...

    def parts(self, expert: int) -> list[Part]:
        """Gate, up and down of one expert."""
        ...


class FusedExperts:
    """`experts.gate_up_proj` [E, 2I, H], and `experts.down_proj` [E, H, I]; what they add ends with `_bias`.

    Gate's rows lie before up's, or in a family with `interleaved_experts` they alternate. Floats may be transposed,
    [E, H, 2I] and [E, I, H]: as Qwen3-VL and gpt-oss were published. Both shapes together tell it.
    """

    def __init__(self, args: ModelArgs, tensors: Mapping[str, Tensor], stem: str, form: SourceFormat):
        E, H, self.width = args.num_experts, args.hidden_size, args.moe_intermediate_size
        shapes = {"gate_up_proj": (2 * self.width, H), "down_proj": (H, self.width)}
        self.interleaved = FAMILIES[args.model_type].interleaved_experts
        floats = {name: tensors[path] for name in shapes if (path := f"{stem}experts.{name}") in tensors}
        transposed = all(name in floats and floats[name].shape == (E, c, r) for name, (r, c) in shapes.items())

        def find(name: str) -> tuple[Matrix, Tensor | None]:
            path, shape = f"{stem}experts.{name}", (E, *shapes[name])
            matrix = find_transposed(floats[name], shape) if transposed else find_matrix(tensors, path, shape, form, "")
            return matrix, _find_bias(args, tensors, f"{path}_bias", shape[:2])

        self.gate_up, self.gate_up_bias = find("gate_up_proj")
        self.down, self.down_bias = find("down_proj")

    @property
    def biases(self) -> list[Tensor]:
        return [bias for bias in (self.gate_up_bias, self.down_bias) if bias is not None]

    def matrices(self) -> tuple[list[Matrix], list[Matrix], list[Matrix]]:
        return [self.gate_up], [self.gate_up], [self.down]

    def parts(self, expert: int) -> list[Part]:
        rows, both = self.width, 2 * self.width
        gate, up = ((0, both, 2), (1, both, 2)) if self.interleaved else ((0, rows, 1), (rows, both, 1))
        matrix, bias = self.gate_up[expert], _entry(self.gate_up_bias, expert)
        return [
            Part(matrix, *gate, bias),
            Part(matrix, *up, bias),
            _whole(self.down[expert], _entry(self.down_bias, expert)),
        ]


class StackedExperts:
    """MLX's `switch_mlp.{gate,up,down}_proj`, each [E, rows, cols]; gpt-oss has them as `experts`."""

    def __init__(self, args: ModelArgs, tensors: Mapping[str, Tensor], stem: str, form: SourceFormat):
        E = args.num_experts
        self.stacks = [
            find_matrix(tensors, f"{stem}.{projection}", (E, *shape), form) for projection, shape in _shapes(args)
        ]
        self.stacked_biases = [
            _find_bias(args, tensors, f"{stem}.{projection}.bias", (E, shape[0])) for projection, shape in _shapes(args)
        ]

    @property
    def biases(self) -> list[Tensor]:
        return [bias for bias in self.stacked_biases if bias is not None]

    def matrices(self) -> tuple[list[Matrix], list[Matrix], list[Matrix]]:
        gate, up, down = self.stacks
        return [gate], [up], [down]

    def parts(self, expert: int) -> list[Part]:
        pairs = zip(self.stacks, self.stacked_biases, strict=True)
        return [_whole(stack[expert], _entry(bias, expert)) for stack, bias in pairs]


class SingleExperts:
    """`experts.E.{gate,up,down}_proj`, each [rows, cols]."""

    def __init__(self, args: ModelArgs, tensors: Mapping[str, Tensor], stem: str, form: SourceFormat):
        self.args, self.tensors, self.stem, self.form = args, tensors, stem, form

    def matrices(self) -> tuple[list[Matrix], list[Matrix], list[Matrix]]:
        experts = [[part.matrix for part in self.parts(expert)] for expert in range(self.args.num_experts)]
        gate, up, down = ([parts[i] for parts in experts] for i in range(3))
        return gate, up, down

    @property
    def biases(self) -> list[Tensor]:
        parts = (part for expert in range(self.args.num_experts) for part in self.parts(expert))
        return [part.bias for part in parts if part.bias is not None]

    def parts(self, expert: int) -> list[Part]:
        paths = ((f"{self.stem}experts.{expert}.{projection}", shape) for projection, shape in _shapes(self.args))
        return [
            _whole(
                find_matrix(self.tensors, path, shape, self.form),
                _find_bias(self.args, self.tensors, f"{path}.bias", shape[:1]),
            )
            for path, shape in paths
        ]


def _shapes(args: ModelArgs) -> Iterator[tuple[str, tuple[int, int]]]:
    H, I = args.hidden_size, args.moe_intermediate_size
    yield from zip(PROJECTIONS, ((I, H), (I, H), (H, I)), strict=True)


def _whole(matrix: Matrix, bias: Tensor | None) -> Part:
    return Part(matrix, 0, matrix.shape[0], bias=bias)


def _entry(stack: Tensor | None, index: int) -> Tensor | None:
    return None if stack is None else stack[index]


def _find_bias(args: ModelArgs, tensors: Mapping[str, Tensor], name: str, shape: tuple[int, ...]) -> Tensor | None:
    """What products add, where the model's experts have it.

    Raises:
        ModelFileError: it is missing, or has another shape or dtype.
    """
    if not args.experts.biases:
        return None
    if name not in tensors:
        raise ModelFileError(f"tensor {name} is missing")
    shaped(typed(tensors[name], FLOATS), shape)
    return tensors[name]


def find_experts(args: ModelArgs, tensors: Mapping[str, Tensor], layer: int, form: SourceFormat) -> Experts:
    """The experts of `layer`, in whichever of the three forms the checkpoint has them.

    Raises:
        ModelFileError: a stacked tensor is missing or misshapen; for single ones `matrices` raises it. Or a stack is in
            mxfp4 blocks, and the family does not say in which order they have the rows of gate and up.
    """
    stem = f"model.layers.{layer}.mlp."
    if f"{stem}experts.gate_up_proj_blocks" in tensors and not FAMILIES[args.model_type].interleaved_experts:
        raise ModelFileError(
            f"tensor {stem}experts.gate_up_proj_blocks cannot be converted: in which order mxfp4 blocks have the rows "
            f"of gate and up is known of gpt-oss only, not of {args.model_type}"
        )
    if any(f"{stem}experts.gate_up_proj{end}" in tensors for end in ("", "_blocks")):
        return FusedExperts(args, tensors, stem, form)
    for stack in ("switch_mlp", "experts"):
        if f"{stem}{stack}.{PROJECTIONS[0]}.weight" in tensors:
            return StackedExperts(args, tensors, f"{stem}{stack}", form)
    return SingleExperts(args, tensors, stem, form)


@dataclass(frozen=True)
class StoredExperts:
    """What becomes of one layer's experts.

    Args:
        quants: of the experts' matrices in the packed model.
        dtype: of floating scales and biases.
        used: names of all tensors behind them.
        lossy: those that are quantised a second time.
        is_made: whether anything is quantised.
    """

    quants: Quants
    dtype: str
    used: frozenset[str]
    lossy: tuple[str, ...]
    is_made: bool


def plan_experts(experts: Experts, wanted: Wanted) -> StoredExperts:
    """How a layer's experts are packed: codes that can be computed with as they are stored, else as is `wanted`.

    Where tensors have scales in several dtypes, all become float32, which is exact.

    Raises:
        ModelFileError: a tensor is missing or misshapen, or its codes would have to be quantised again.
    """
    quants: list[Quant] = []
    dtypes: set[str] = set()
    used: set[str] = set()
    lossy: list[str] = []
    for bias in experts.biases:
        used.add(bias.name)
        dtypes.add(bias.dtype)
    kept = 0
    for matrices, form in zip(experts.matrices(), wanted.experts, strict=True):
        used.update(tensor.name for matrix in matrices for tensor in matrix.tensors)
        stored = {matrix.quant for matrix in matrices}
        first = matrices[0].quant
        if first is not None and len(stored) == 1 and matrices[0].is_kept and wanted.keeps(first, form):
            quants.append(first)
            kept += 1
            dtypes.update(dtype for matrix in matrices for dtype in matrix.dtypes[1:] if first.scale == FLOAT)
            continue
        again = [matrix for matrix in matrices if matrix.quant is not None]
        if again and not wanted.requantize:
            raise ModelFileError(not_kept(again[0], mixed=len(stored) > 1))
        lossy += [matrix.weight.name for matrix in again]
        quants.append(form)
    return StoredExperts(tuple(quants), _common(dtypes), frozenset(used), tuple(dict.fromkeys(lossy)), kept < 3)


def _common(dtypes: set[str]) -> str:
    """The dtype that holds scales of all these exactly."""
    return next(iter(dtypes)) if len(dtypes) == 1 else "F32" if dtypes else "BF16"


class LayerFile:
    """One layer of freshly made records, each padded with zeros to the stride."""

    link: Path | None = None

    def __init__(self, layout: ExpertLayout, layer: int, experts: Experts):
        self.layout, self.layer, self.experts = layout, layer, experts
        self.name = f"{FOLDER}/{layout.file_name(layer)}"
        self.size = layout.layer_bytes(layer)
        self.geometry = layout.records[layer]

    def chunks(self) -> Iterator[Bytes]:
        return map(self.record, range(self.layout.num_experts))

    def record(self, expert: int) -> bytearray:
        """One expert's, with what fills its stride."""
        record = bytearray(self.geometry.stride)
        for i, part in enumerate(self.experts.parts(expert)):
            for offset, data in self.fields(part, i):
                record[offset : offset + len(data)] = data
        return record

    def fields(self, part: Part, index: int) -> Iterator[tuple[int, memoryview]]:
        """Where in its record each field of an expert's projection number `index` begins, and its bytes."""
        projection = self.geometry.projections[index]
        arrays = part.arrays(projection.quant, self.geometry.dtype)
        for field, array in zip(projection.fields, arrays, strict=True):
            yield field.offset, array_bytes(array)


class PackedLayerFile:
    """One layer that moeflux or flash-moe has packed; linked when its records are spaced like ours."""

    def __init__(self, layout: ExpertLayout, source: ExpertLayout, layer: int, folder: Path):
        self.layout, self.geometry, self.source, self.layer = layout, layout.records[layer], source, layer
        self.file = folder / source.file_name(layer)
        check_length(self.file, source.layer_bytes(layer))
        self.name = f"{FOLDER}/{layout.file_name(layer)}"
        self.size = layout.layer_bytes(layer)
        self.link = self.file if source.records[layer].stride == self.geometry.size == self.geometry.stride else None

    def chunks(self) -> Iterator[Bytes]:
        return map(self.record, range(self.layout.num_experts))

    def record(self, expert: int) -> bytearray:
        """One expert's, with what fills its stride."""
        record = read_bytes(self.file, self.source.start(self.layer, expert), self.geometry.size)
        self._check_scales(record, expert)
        return record + bytes(self.geometry.stride - len(record))

    def _check_scales(self, record: bytearray, expert: int) -> None:
        fault = not_finite(self.geometry, np.frombuffer(record, np.uint8)[None])
        if fault is not None:
            raise ModelFileError(
                f"{self.file}: {fault[1].name} of expert {expert} holds NaN or infinite values; download it again"
            )


class HeldLayerFile:
    """A layer file that holds one rank's experts. The others' places are zeros, which take no room on the disk, but for
    the samples that tell one model from another: all ranks must find them alike.
    """

    link: Path | None = None

    def __init__(self, whole: LayerFile | PackedLayerFile, share: RankShare):
        self.whole, self.share = whole, share
        self.name, self.size, self.stride = whole.name, whole.size, whole.geometry.stride
        self._samples = offsets_of(self.size, EXPERT_SAMPLES)

    def chunks(self) -> Iterator[Bytes]:
        for expert in range(self.whole.layout.num_experts):
            kept = self._kept(expert)
            if kept == [slice(0, self.stride)]:
                yield self.whole.record(expert)
                continue
            record = bytearray(self.stride)
            made = self.whole.record(expert) if kept else record
            for part in kept:
                record[part] = made[part]
            yield record

    @property
    def left_out(self) -> int:
        """Bytes that take no room."""
        return sum(self.stride for expert in range(self.whole.layout.num_experts) if not self._kept(expert))

    def _kept(self, expert: int) -> list[slice]:
        """What of its record is written."""
        if self.share.has(self.whole.layer, expert):
            return [slice(0, self.stride)]
        start = expert * self.stride
        ends = [(max(at - start, 0), min(at + SAMPLE_BYTES - start, self.stride)) for at in self._samples]
        return [slice(first, last) for first, last in ends if first < last]


class StripedLayerFile:
    """The records of a layer that one of several directories has: the experts `number`, `number` + `of`, ...

    Args:
        folder: of the directory, absolute; None: the model's own.
    """

    link: Path | None = None

    def __init__(self, whole: LayerFile | PackedLayerFile, number: int, of: int, folder: Path | None):
        self.whole, self._experts = whole, range(number, whole.layout.num_experts, of)
        self.name = whole.name if folder is None else str(folder / whole.layout.file_name(whole.layer))
        self.size = len(self._experts) * whole.geometry.stride

    def chunks(self) -> Iterator[Bytes]:
        return map(self.whole.record, self._experts)


def packed_layers(layout: ExpertLayout, folder: Path, args: ModelArgs) -> list[PackedLayerFile]:
    """The files of another tool's `packed_experts/`, of version 1.

    Raises:
        ModelFileError: a file is missing or has the wrong length, or its layout.json contradicts config.json.
    """
    content = read_json(folder / LAYOUT)
    source, share = from_json(content, args, folder / LAYOUT), held_by(content, folder / LAYOUT)
    if share is not None:
        raise ModelFileError(f"{folder} holds the experts of {share} only; convert what it was made from")
    return [PackedLayerFile(layout, source, layer, folder) for layer in layout.moe_layers]


def layout_json(layout: ExpertLayout, share: RankShare | None, also: Sequence[Path] = ()) -> bytes:
    return json.dumps(to_json(layout, share, [str(folder) for folder in also]), indent=2).encode()

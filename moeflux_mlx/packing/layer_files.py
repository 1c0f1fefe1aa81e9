"""The layer files of packed experts: finds each expert's matrices and lays them out as records.

An expert is made when its turn comes, from its own rows of the checkpoint only, whether the checkpoint
keeps experts one by one, stacked, or with gate and up fused.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import mlx.core as mx
import numpy as np

from ..errors import ModelFileError
from ..files import read_json
from ..formats.checkpoint import Tensor, read_bytes
from ..formats.layout_file import from_json, to_json
from ..formats.packed import FOLDER, LAYOUT, check_length
from ..formats.record import PROJECTIONS, ExpertLayout
from ..quant import EXPERTS, Quant
from ..spec import ModelArgs
from .matrix import Matrix, SourceFormat, find_matrix
from .resident import array_bytes, not_kept
from .writer import Bytes


@dataclass(frozen=True)
class Part:
    """Rows `start` to `stop` of a matrix: one projection of one expert."""

    matrix: Matrix
    start: int
    stop: int

    def codes(self, quant: Quant) -> tuple[mx.array, ...]:
        """Weight, scales and biases in the form `quant`: as stored where that is it, else quantised from bfloat16."""
        if self.matrix.fits(quant):
            return self.matrix.rows(self.start, self.stop).codes()
        return self.matrix.quantized(quant, self.start, self.stop)


class Experts(Protocol):
    """The routed experts of one layer."""

    def matrices(self) -> Iterator[Matrix]:
        """Everything that is stored for the layer."""
        ...

    def parts(self, expert: int) -> list[Part]:
        """Gate, up and down of one expert."""
        ...


class FusedExperts:
    """`experts.gate_up_proj` [E, 2I, H], gate rows first, and `experts.down_proj` [E, H, I]."""

    def __init__(self, args: ModelArgs, tensors: Mapping[str, Tensor], stem: str, form: SourceFormat):
        E, H, self.width = args.num_experts, args.hidden_size, args.moe_intermediate_size
        self.gate_up = find_matrix(tensors, f"{stem}experts.gate_up_proj", (E, 2 * self.width, H), form, "")
        self.down = find_matrix(tensors, f"{stem}experts.down_proj", (E, H, self.width), form, "")

    def matrices(self) -> Iterator[Matrix]:
        yield from (self.gate_up, self.down)

    def parts(self, expert: int) -> list[Part]:
        gate_up, down = self.gate_up[expert], self.down[expert]
        return [Part(gate_up, 0, self.width), Part(gate_up, self.width, 2 * self.width), _whole(down)]


class StackedExperts:
    """MLX's `switch_mlp.{gate,up,down}_proj`, each [E, rows, cols]."""

    def __init__(self, args: ModelArgs, tensors: Mapping[str, Tensor], stem: str, form: SourceFormat):
        self.stacks = [
            find_matrix(tensors, f"{stem}switch_mlp.{projection}", (args.num_experts, *shape), form)
            for projection, shape in _shapes(args)
        ]

    def matrices(self) -> Iterator[Matrix]:
        yield from self.stacks

    def parts(self, expert: int) -> list[Part]:
        return [_whole(stack[expert]) for stack in self.stacks]


class SingleExperts:
    """`experts.E.{gate,up,down}_proj`, each [rows, cols]."""

    def __init__(self, args: ModelArgs, tensors: Mapping[str, Tensor], stem: str, form: SourceFormat):
        self.args, self.tensors, self.stem, self.form = args, tensors, stem, form

    def matrices(self) -> Iterator[Matrix]:
        for expert in range(self.args.num_experts):
            yield from (part.matrix for part in self.parts(expert))

    def parts(self, expert: int) -> list[Part]:
        return [
            _whole(find_matrix(self.tensors, f"{self.stem}experts.{expert}.{projection}", shape, self.form))
            for projection, shape in _shapes(self.args)
        ]


def _shapes(args: ModelArgs) -> Iterator[tuple[str, tuple[int, int]]]:
    H, I = args.hidden_size, args.moe_intermediate_size
    yield from zip(PROJECTIONS, ((I, H), (I, H), (H, I)), strict=True)


def _whole(matrix: Matrix) -> Part:
    return Part(matrix, 0, matrix.shape[0])


def find_experts(args: ModelArgs, tensors: Mapping[str, Tensor], layer: int, form: SourceFormat) -> Experts:
    """The experts of `layer`, in whichever of the three forms the checkpoint has them.

    Raises:
        ModelFileError: a stacked tensor is missing or misshapen; for single ones `matrices` raises it.
    """
    stem = f"model.layers.{layer}.mlp."
    if f"{stem}experts.gate_up_proj" in tensors:
        return FusedExperts(args, tensors, stem, form)
    if f"{stem}switch_mlp.{PROJECTIONS[0]}.weight" in tensors:
        return StackedExperts(args, tensors, stem, form)
    return SingleExperts(args, tensors, stem, form)


def check_experts(experts: Experts, requantize: bool) -> tuple[set[str], list[str]]:
    """Names of all tensors behind `experts`, and those that are quantised a second time.

    Raises:
        ModelFileError: a tensor is missing or misshapen, or its codes do not fit a record.
    """
    used: set[str] = set()
    lossy: list[str] = []
    for matrix in experts.matrices():
        used.update(tensor.name for tensor in matrix.tensors)
        if matrix.quant is None or matrix.is_packed:
            continue
        if not requantize:
            raise ModelFileError(
                not_kept(
                    matrix, f"packed experts hold {EXPERTS.bits} bits, group_size {EXPERTS.group_size}, BF16 scales"
                )
            )
        lossy.append(matrix.weight.name)
    return used, lossy


class LayerFile:
    """One layer of freshly made records, each padded with zeros to the stride."""

    link: Path | None = None

    def __init__(self, layout: ExpertLayout, layer: int, experts: Experts):
        self.layout, self.experts = layout, experts
        self.name = f"{FOLDER}/{layout.file_name(layer)}"
        self.size = layout.layer_bytes(layer)
        self.geometry = layout.records[layer]

    def chunks(self) -> Iterator[Bytes]:
        for expert in range(self.layout.num_experts):
            yield self._record(expert)

    def _record(self, expert: int) -> bytearray:
        record, geometry = bytearray(self.geometry.stride), self.geometry
        projections = geometry.gate, geometry.up, geometry.down
        for part, projection in zip(self.experts.parts(expert), projections, strict=True):
            for field, array in zip(projection.fields, part.codes(projection.quant), strict=True):
                record[field.offset : field.end] = array_bytes(array)
        return record


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
        for expert in range(self.layout.num_experts):
            record = read_bytes(self.file, self.source.start(self.layer, expert), self.geometry.size)
            self._check_scales(record, expert)
            yield record + bytes(self.geometry.stride - len(record))

    def _check_scales(self, record: bytearray, expert: int) -> None:
        """A bfloat16 with all exponent bits set is NaN or infinite."""
        for field in self.geometry.fields:
            if field.dtype == "BF16":
                bits = np.frombuffer(record, "<u2", field.size // 2, field.offset)
                if (bits & 0x7F80 == 0x7F80).any():
                    raise ModelFileError(
                        f"{self.file}: {field.name} of expert {expert} holds NaN or infinite values; download it again"
                    )


def packed_layers(args: ModelArgs, layout: ExpertLayout, folder: Path) -> list[PackedLayerFile]:
    """The files of another tool's `packed_experts/`.

    Raises:
        ModelFileError: a file is missing or has the wrong length, or its layout.json contradicts config.json.
    """
    source = from_json(read_json(folder / LAYOUT), args, folder / LAYOUT)
    return [PackedLayerFile(layout, source, layer, folder) for layer in layout.moe_layers]


def layout_json(layout: ExpertLayout) -> bytes:
    return json.dumps(to_json(layout), indent=2).encode()

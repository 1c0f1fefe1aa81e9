"""The layer files of packed experts, in which each expert's matrices form a record.

Each expert is made when it is written, only from its own rows of the checkpoint.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import numpy as np

from ..errors import ModelFileError
from ..files import read_json
from ..formats.checkpoint import read_bytes
from ..formats.layout_file import from_json, to_json
from ..formats.packed import FOLDER, LAYOUT, check_length, not_finite
from ..formats.record import ExpertLayout, Quants
from ..quant import FLOAT, Quant
from ..spec import ModelArgs
from .expert_parts import CheckpointExperts
from .matrix import Rounding, Wanted
from .resident import array_bytes
from .sources import Bytes


@dataclass(frozen=True)
class StoredExperts:
    """How one layer's experts are packed.

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


def plan_experts(experts: CheckpointExperts, wanted: Wanted, forms: Quants) -> StoredExperts:
    """Decides how a layer's experts are packed: stored codes that can be computed with are kept, others take their
    matrix's one of `forms`.

    If scales have several dtypes, all become float32, which is exact.

    Raises:
        ModelFileError: a tensor is missing or misshapen, or its codes would have to be quantised again.
    """
    quants: list[Quant] = []
    dtypes: set[str] = set()
    used = {tensor.name for part in experts.parts(0) for tensor in part.tensors}
    lossy: list[str] = []
    for bias in experts.biases:
        used.add(bias.name)
        dtypes.add(bias.dtype)
    kept = 0
    of_experts = experts.matrices()
    for matrices, form in zip(of_experts, forms, strict=True):
        used.update(tensor.name for matrix in matrices for tensor in matrix.tensors)
        stored = {matrix.quant for matrix in matrices}
        first = matrices[0].quant
        if first is not None and len(stored) == 1 and wanted.keeps(first, form):
            quants.append(first)
            kept += 1
            dtypes.update(dtype for matrix in matrices for dtype in matrix.dtypes[1:] if first.scale == FLOAT)
            continue
        again = [matrix for matrix in matrices if matrix.quant is not None]
        if again and not wanted.requantize:
            raise ModelFileError(
                f"tensor {again[0].weight.name} is stored with {again[0].quant}; other experts of the layer are "
                "stored in another form: add --requantize (lossy) to convert it"
            )
        lossy += [matrix.weight.name for matrix in again]
        quants.append(form)
    return StoredExperts(
        tuple(quants), _common(dtypes), frozenset(used), tuple(dict.fromkeys(lossy)), kept < len(quants)
    )


def _common(dtypes: set[str]) -> str:
    """The dtype that holds scales of all these exactly."""
    return next(iter(dtypes)) if len(dtypes) == 1 else "F32" if dtypes else "BF16"


class LayerFile:
    """A record set of freshly made records, each padded with zeros to the stride. `rounding` makes codes of floats."""

    link: Path | None = None

    def __init__(self, layout: ExpertLayout, layer: int, experts: CheckpointExperts, rounding: Rounding):
        self.layout, self.layer, self.experts, self.rounding = layout, layer, experts, rounding
        self.name = f"{FOLDER}/{layout.file_name(layer)}"
        self.size = layout.layer_bytes(layer)
        self.geometry = layout.records[layer]

    def chunks(self) -> Iterator[Bytes]:
        return map(self.record, range(self.layout.count(self.layer)))

    def record(self, expert: int) -> bytearray:
        """One expert's, with what fills its stride."""
        record = bytearray(self.geometry.stride)
        for index in range(len(self.geometry.projections)):
            for offset, data in self.fields(expert, index):
                record[offset : offset + len(data)] = data
        return record

    def fields(self, expert: int, index: int) -> Iterator[tuple[int, memoryview]]:
        """Where in its record each field of an expert's projection number `index` begins, and its bytes."""
        arrays = self.arrays(expert, index)
        for field in self.geometry.projections[index].fields:
            yield field.offset, array_bytes(arrays[field.part])

    def arrays(self, expert: int, index: int) -> dict[str, mx.array]:
        """The arrays of these fields, by part."""
        quant, dtype = self.geometry.projections[index].quant, self.geometry.dtype
        return self.experts.parts(expert)[index].arrays(self.path(expert, index), quant, self.rounding, dtype)

    def path(self, expert: int, index: int) -> str:
        """The module path of an expert's projection."""
        return f"model.layers.{self.layer}.mlp.experts.{expert}.{self.geometry.projections[index].name}"

    def is_rounded(self, index: int) -> bool:
        """Whether codes are made for the experts' projection number `index`."""
        return self.experts.parts(0)[index].matrix.quant != self.geometry.projections[index].quant


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
        return map(self.record, range(self.layout.count(self.layer)))

    def record(self, expert: int) -> bytearray:
        """One expert's, with what fills its stride."""
        record = read_bytes(self.file, self.source.start(self.layer, expert), self.geometry.size)
        fault = not_finite(self.geometry, np.frombuffer(record, np.uint8)[None])
        if fault is not None:
            raise ModelFileError(
                f"{self.file}: {fault[1].name} of expert {expert} holds NaN or infinite values; download it again"
            )
        return record + bytes(self.geometry.stride - len(record))


class StripedLayerFile:
    """The records of a layer that one of several directories has: the experts `number`, `number` + `of`, ...

    Args:
        folder: of the directory, absolute; None: the model's own.
    """

    link: Path | None = None

    def __init__(self, whole: LayerFile | PackedLayerFile, number: int, of: int, folder: Path | None):
        self.whole, self._experts = whole, range(number, whole.layout.count(whole.layer), of)
        self.name = whole.name if folder is None else str(folder / whole.layout.file_name(whole.layer))
        self.size = len(self._experts) * whole.geometry.stride

    def chunks(self) -> Iterator[Bytes]:
        return map(self.whole.record, self._experts)


def packed_layers(layout: ExpertLayout, folder: Path, args: ModelArgs) -> list[PackedLayerFile]:
    """The files of another tool's `packed_experts/`, of version 1.

    Raises:
        ModelFileError: a file is missing or has the wrong length, or its layout.json contradicts config.json.
    """
    source = from_json(read_json(folder / LAYOUT), args, folder / LAYOUT)
    return [PackedLayerFile(layout, source, layer, folder) for layer in layout.moe_layers]


def layout_json(layout: ExpertLayout, also: Sequence[Path] = ()) -> bytes:
    return json.dumps(to_json(layout, [str(folder) for folder in also]), indent=2).encode()

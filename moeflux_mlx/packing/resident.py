"""The resident tensors of a packed model: what each is made of, and the safetensors files they fill.

Everything is planned from shapes first; tensors are then read, converted and passed on one by one.
"""

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import mlx.core as mx
import numpy as np

from ..errors import ModelFileError
from ..families.registry import FAMILIES
from ..formats.checkpoint import FLOATS, ITEM_BYTES, Tensor
from ..model.tensors import ROUTERS, needed, split_latent, stored_as
from ..quant import DEFAULT, SUPPORTED, Quant
from ..spec import ModelArgs
from .lookup import find_matrix
from .matrix import Matrix, finite
from .sanitize import add_one, channels_first, has_zero_centred_norms, is_zero_centred
from .source_format import SourceFormat
from .unit import Bytes
from .wanted import Wanted

SHARD_BYTES = 4 << 30
Pieces = tuple[tuple[str, np.ndarray | None], ...]
DTYPES = {mx.float32: "F32", mx.bfloat16: "BF16", mx.float16: "F16", mx.uint32: "U32", mx.uint8: "U8"}


@dataclass(frozen=True)
class Written:
    """One tensor of the output."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


class Source(Protocol):
    """Tensors that are made together; `arrays` yields them in the order of `written`."""

    @property
    def written(self) -> tuple[Written, ...]: ...

    @property
    def tensors(self) -> tuple[Tensor, ...]: ...

    def arrays(self) -> Iterator[mx.array]: ...


@dataclass(frozen=True)
class PlainSource:
    """A tensor that is never quantised: norm, convolution, decay rate, router bias."""

    name: str
    tensor: Tensor
    centred: bool = False
    convolution: bool = False

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.tensor,)

    @property
    def written(self) -> tuple[Written, ...]:
        shape = self.tensor.shape
        if self.convolution:
            shape = (shape[0], shape[2], shape[1])
        return (Written(self.name, "F32" if self.centred else self.tensor.dtype, shape),)

    def arrays(self) -> Iterator[mx.array]:
        values = finite(self.tensor, self.tensor.read())
        if self.centred:
            values = add_one(values)
        yield channels_first(values) if self.convolution else values


@dataclass(frozen=True)
class MatrixSource:
    """A matrix, kept as stored (`made` None, `dense` empty), quantised to `made`, or kept in floats `dense`.

    `pieces` are the module paths that it is split into, each with its rows; one path without rows is all.
    """

    matrix: Matrix
    pieces: Pieces
    made: Quant | None = None
    dense: str = ""

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.matrix.tensors

    @property
    def quant(self) -> Quant | None:
        """Of the output; None: floats."""
        return None if self.dense else self.made or self.matrix.quant

    @property
    def written(self) -> tuple[Written, ...]:
        return tuple(
            Written(f"{path}.{suffix}", dtype, shape if rows is None else (len(rows), *shape[1:]))
            for path, rows in self.pieces
            for suffix, dtype, shape in self._parts()
        )

    def _parts(self) -> list[tuple[str, str, tuple[int, ...]]]:
        *lead, cols = self.matrix.shape
        if self.quant is None:
            return [("weight", self.dense, self.matrix.shape)]
        quant, dtypes = self.quant, self.matrix.dtypes
        if self.made:
            dtypes = ("U32", *[quant.of_groups("BF16")] * 2)
        shapes = [(*lead, quant.words(cols))] + [(*lead, quant.groups(cols))] * 2
        return list(zip(quant.parts, dtypes, shapes, strict=False))

    def arrays(self) -> Iterator[mx.array]:
        parts = self._make()
        for _, rows in self.pieces:
            for part in parts:
                yield part if rows is None else part[mx.array(rows)]

    def _make(self) -> tuple[mx.array, ...]:
        if self.made:
            return self.matrix.quantized(self.made)
        if not self.dense:
            return self.matrix.codes()
        values = self.matrix.values()
        kept = next(dtype for dtype, name in DTYPES.items() if name == self.dense)
        return (finite(self.matrix.weight, values.astype(kept)),)


@dataclass(frozen=True)
class ResidentPlan:
    """All resident tensors; `lossy` are quantised ones that have to be quantised again."""

    sources: tuple[Source, ...]
    lossy: tuple[str, ...] = ()

    def quantization(self) -> dict[str, Any]:
        """The output's `quantization` for config.json: the most frequent form, and all exceptions."""
        quants = {
            path: source.quant
            for source in self.sources
            if isinstance(source, MatrixSource)
            for path, _ in source.pieces
        }
        default = Counter(one for one in quants.values() if one).most_common(1)
        usual = default[0][0] if default else DEFAULT
        entry: dict[str, Any] = usual.entry()
        for path, quant in quants.items():
            if quant != usual:
                entry[path] = override(quant)
        return entry

    def quantized(self, quant: Quant) -> int:
        """How many matrices come as floats and become `quant`."""
        matrices = (source for source in self.sources if isinstance(source, MatrixSource))
        return sum(source.made == quant and source.matrix.quant is None for source in matrices)

    def files(self) -> list["ResidentFile"]:
        """The tensors in files of at most `SHARD_BYTES` (more only for a single larger tensor)."""
        groups: list[list[Source]] = [[]]
        size = 0
        for source in self.sources:
            nbytes = sum(one.nbytes for one in source.written)
            if groups[-1] and size + nbytes > SHARD_BYTES:
                groups.append([])
                size = 0
            groups[-1].append(source)
            size += nbytes
        if len(groups) == 1:
            return [ResidentFile("resident.safetensors", tuple(groups[0]))]
        return [
            ResidentFile(f"resident-{i:05d}-of-{len(groups):05d}.safetensors", tuple(group))
            for i, group in enumerate(groups, 1)
        ]


def plan_resident(args: ModelArgs, tensors: Mapping[str, Tensor], form: SourceFormat, wanted: Wanted) -> ResidentPlan:
    """Finds every resident tensor that the model needs and decides how it is stored.

    Args:
        tensors: by canonical name.
        wanted: the form of what comes as floats.

    Raises:
        ModelFileError: a tensor is missing, misshapen, or stored in a way that needs `requantize`.
    """
    matrices, plain = needed(args, split_latent(tensors))
    fused = _fused_matrices(args, tensors)
    fused_paths = {path for pieces in fused.values() for path, _ in pieces}
    pieces_of: dict[str, Pieces] = {path: ((path, None),) for path in matrices if path not in fused_paths}
    sources: list[Source] = []
    lossy: list[str] = []
    as_stored = wanted.keeps_floats or any(name.endswith(".scales") for name in tensors)
    for path, pieces in (pieces_of | fused).items():
        shape = matrices.get(path) or (
            sum(len(rows) for _, rows in pieces if rows is not None),
            args.hidden_size,
        )
        matrix = find_matrix(tensors, path, shape, form)
        if matrix.quant and not matrix.is_kept:
            if not wanted.requantize:
                raise ModelFileError(not_kept(matrix))
            lossy.append(matrix.weight.name)
        sources.append(_matrix_source(args, matrix, pieces, wanted.resident, as_stored))
    centred = has_zero_centred_norms(args, tensors)
    sources += [_plain_source(args, name, shape, tensors, centred) for name, shape in plain.items()]
    sources.sort(key=lambda source: source.written[0].name)
    return ResidentPlan(tuple(sources), tuple(lossy))


def not_kept(matrix: Matrix, mixed: bool = False) -> str:
    """The message for codes that cannot be copied; `mixed`: because others of the layer are in another form."""
    assert matrix.quant is not None
    why = "; other experts of the layer are stored otherwise" if mixed else ""
    return (
        f"{matrix.quant.mode}: tensor {matrix.weight.name} is stored with {matrix.quant}{why}; "
        f"kept are {SUPPORTED}: add --requantize (lossy) to convert it"
    )


def override(quant: Quant | None) -> dict[str, Any] | bool:
    """What says in `config.json` that a module differs from the rest."""
    if quant is None:
        return False
    entry = quant.entry()
    return entry if quant.mode != "affine" else {key: entry[key] for key in ("group_size", "bits")}


def _fused_matrices(args: ModelArgs, tensors: Mapping[str, Tensor]) -> dict[str, Pieces]:
    """Matrices that the checkpoint has as one, with those that they split into."""
    fused_rows = FAMILIES[args.model_type].fused_rows
    return {
        path: pieces
        for layer, mixer in enumerate(args.mixers)
        for path, pieces in fused_rows(mixer, layer).items()
        if f"{path}.weight" in tensors
    }


def _matrix_source(args: ModelArgs, matrix: Matrix, pieces: Pieces, quant: Quant, as_stored: bool) -> MatrixSource:
    """Codes are copied; floats are quantised, unless the rest of the checkpoint already is."""
    path, floats = pieces[0][0], matrix.weight.dtype if matrix.weight.dtype in FLOATS else "BF16"
    if matrix.is_kept:
        return MatrixSource(matrix, pieces)
    made = stored_as(args, path, matrix.shape[-1], quant)
    if matrix.quant is None and (as_stored or made is None and path.endswith(ROUTERS)):
        return MatrixSource(matrix, pieces, dense=floats)
    return MatrixSource(matrix, pieces, dense="BF16") if made is None else MatrixSource(matrix, pieces, made=made)


def _plain_source(
    args: ModelArgs, name: str, shape: tuple[int, ...], tensors: Mapping[str, Tensor], centred: bool
) -> PlainSource:
    """Raises ModelFileError: missing, or neither the model's shape nor Hugging Face's form of it."""
    if name not in tensors:
        raise ModelFileError(f"tensor {name} is missing")
    tensor = tensors[name]
    convolution = name.endswith(".conv1d.weight") and centred
    wanted = (shape[0], shape[2], shape[1]) if convolution else shape
    if tensor.shape != wanted or tensor.dtype not in FLOATS:
        raise ModelFileError(
            f"{tensor.file}: tensor {tensor.name} is {tensor.dtype} {list(tensor.shape)}; "
            f"the model needs floats {list(wanted)}"
        )
    return PlainSource(name, tensor, centred and is_zero_centred(args, name), convolution)


@dataclass(frozen=True)
class TensorFile:
    """One safetensors file: an 8-byte length, a JSON header, then the tensors without gaps."""

    name: str
    sources: tuple[Source, ...]
    link: Path | None = None

    @cached_property
    def header(self) -> bytes:
        entries: dict[str, Any] = {"__metadata__": {"format": "mlx"}}
        offset = 0
        for one in (written for source in self.sources for written in source.written):
            end = offset + one.nbytes
            entries[one.name] = {"dtype": one.dtype, "shape": list(one.shape), "data_offsets": [offset, end]}
            offset = end
        text = json.dumps(entries, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text

    @property
    def size(self) -> int:
        return len(self.header) + sum(one.nbytes for source in self.sources for one in source.written)

    def chunks(self) -> Iterator[Bytes]:
        yield self.header
        for source in self.sources:
            for array, written in zip(source.arrays(), source.written, strict=True):
                assert array.nbytes == written.nbytes, written.name
                yield array_bytes(array)


class ResidentFile(TensorFile):
    """One that a model has in memory."""


def array_bytes(array: mx.array) -> memoryview:
    """The values in C order, little-endian."""
    return np.asarray(mx.contiguous(array).view(mx.uint8)).reshape(-1).data

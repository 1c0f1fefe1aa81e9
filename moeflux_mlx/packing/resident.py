"""The resident tensors of a packed model: the plan of their sources, and the safetensors files that contain them.

Everything is planned from shapes first; tensors are then read, converted and passed on one by one. A checkpoint's image
encoders and draft heads are kept unchanged in a separate file, `ASIDE`.
"""

import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import NamedTuple, TypeVar

import mlx.core as mx
import numpy as np

from ..errors import ModelFileError
from ..families.names import is_aside
from ..families.registry import FAMILIES
from ..files import JsonDict
from ..formats.checkpoint import FLOATS, Tensor, read_bytes
from ..mixers.registry import stored_forms
from ..model.decoder import Model
from ..model.head import DraftHead
from ..model.tensors import CORRECTION, ROUTERS, TABLE, Needed, needed, stored_as
from ..quant import DEFAULT, Quant
from ..spec import ModelArgs
from .expert_parts import find_matrix
from .gguf_tensors import has_blocks
from .matrix import Matrix, Wanted, taken
from .sanitize import has_zero_centred_norms, is_zero_centred, lack_their_one
from .source_format import SourceFormat
from .sources import Bytes, MatrixPieces, MatrixSource, PlainSource, Source, TableSource, WrittenTensor, ZeroSource

SHARD_BYTES = 4 << 30
INTEGERS = ("U32", "I32", "I64")  # dtypes that a table of ids may have
MAX_SHARDS = 64  # of one matrix; more than any checkpoint has
File = TypeVar("File")
FusedPieces = tuple[tuple[str, np.ndarray], ...]


class TensorRows(NamedTuple):
    """Some `rows` of a tensor that is `stored` with `total`."""

    stored: str
    rows: np.ndarray
    total: int


@dataclass(frozen=True)
class ResidentPlan:
    """All resident tensors."""

    sources: tuple[Source, ...]

    def quantization(self) -> JsonDict:
        """The output's `quantization` for config.json."""
        quants = {
            path: source.quant
            for source in self.sources
            if isinstance(source, MatrixSource)
            for path, _ in source.pieces
        }
        return quantization(quants)

    @property
    def quantized(self) -> int:
        """The number of matrices that come as floats and are quantised, without routers."""
        matrices = (source for source in self.sources if isinstance(source, MatrixSource))
        return sum(source.made is not None and not source.pieces[0][0].endswith(ROUTERS) for source in matrices)

    @property
    def rounds(self) -> bool:
        """Whether matrices are rounded."""
        return any(isinstance(source, MatrixSource) and source.made for source in self.sources)

    def files(self) -> Sequence["TensorFile"]:
        """The tensors in files."""
        return in_files(self.sources, "resident", ResidentFile)


def plan_resident(
    args: ModelArgs,
    tensors: Mapping[str, Tensor],
    form: SourceFormat,
    wanted: Wanted,
    kind: type[Model] | type[DraftHead] = Model,
) -> ResidentPlan:
    """Finds every resident tensor that the model needs and decides its stored form.

    Args:
        tensors: by canonical name.
        wanted: the forms of what comes as floats.
        kind: what they are for.

    Raises:
        ModelFileError: a tensor is missing or misshapen.
    """
    ours = needed(args, stored_forms(tensors), kind)
    _check_rows(ours, tensors)
    shards = _shards(args, tensors, form.block[0])
    fused = _fused_matrices(args, tensors, shards)
    parted = {
        f"{part}.weight": TensorRows(f"{path}.weight", rows, sum(len(own) for _, own in pieces))
        for path, pieces in fused.items()
        for part, rows in pieces
        if f"{part}.weight" in ours.plain
    }
    fused = {path: pieces for path, pieces in fused.items() if f"{pieces[0][0]}.weight" not in parted}
    fused_paths = {path for pieces in fused.values() for path, _ in pieces}
    pieces_of: dict[str, MatrixPieces] = {path: ((path, None),) for path in ours.matrices if path not in fused_paths}
    sources: list[Source] = []
    has_codes = any(name.endswith(".scales") or has_blocks(one) for name, one in tensors.items())
    as_stored = wanted.keeps_floats or has_codes
    for path, pieces in (pieces_of | fused).items():
        shape = ours.matrices.get(path) or (
            sum(len(rows) for _, rows in pieces if rows is not None),
            ours.matrices[pieces[0][0]][-1],
        )
        more = _rows_of_longer(args, tensors, f"{path}.weight", shape)
        matrix = find_matrix(tensors, path, (more, *shape[1:]), form, shards=shards if path in fused else 1)
        matrix = matrix if more == shape[0] else matrix.rows(0, shape[0])
        sources.append(_matrix_source(args, matrix, pieces, wanted, as_stored))
    centred = (has_zero_centred_norms if kind is Model else lack_their_one)(args, tensors)
    lacking = _lacking_biases(ours, tensors, wanted.without_correction_bias)
    plain = (name for name in ours.plain if name not in lacking)
    sources += [_plain_source(args, name, ours, tensors, centred, parted.get(name)) for name in plain]
    sources += [ZeroSource(name, ours.plain[name]) for name in lacking]
    sources.sort(key=lambda source: source.written[0].name)
    return ResidentPlan(tuple(sources))


def _rows_of_longer(args: ModelArgs, tensors: Mapping[str, Tensor], name: str, shape: tuple[int, ...]) -> int:
    """The rows of a matrix that is needed in this shape, as it is stored."""
    if name not in tensors or not name.endswith(FAMILIES[args.model_type].longer):
        return shape[0]
    return max(shape[0], *tensors[name].shape[:1])


def _check_rows(ours: Needed, tensors: Mapping[str, Tensor]) -> None:
    """Checks the rows of matrices before lists of them are made, which a wrong number in a file would make huge.

    Raises:
        ModelFileError: a matrix needs more than any tensor has.
    """
    most = max((math.prod(tensor.shape[:-1]) for tensor in tensors.values()), default=0)
    for path, shape in ours.matrices.items():
        if shape[0] > most:
            raise ModelFileError(f"no tensor has more than {most} rows; the model needs {shape[0]} for {path}.weight")


def quantization(forms: Mapping[str, Quant | None]) -> JsonDict:
    """The entry of config.json for these modules: the most frequent form, and all exceptions."""
    common = Counter(form for form in forms.values() if form is not None).most_common(1)
    usual = common[0][0] if common else DEFAULT
    return {**usual.entry(), **{path: override(form) for path, form in forms.items() if form != usual}}


def override(quant: Quant | None) -> JsonDict | bool:
    """The entry of `config.json` for a module whose form differs from the rest."""
    if quant is None:
        return False
    entry = quant.entry()
    return entry if quant.mode != "affine" else {key: entry[key] for key in ("group_size", "bits")}


def _shards(args: ModelArgs, tensors: Mapping[str, Tensor], block: int) -> int:
    """The number of parts of fused matrices: with scales per `block` rows, each part has its own blocks.

    Raises:
        ModelFileError: the shapes allow no number of parts, or several.
    """
    fits: set[int] | None = None
    for layer, spec in enumerate(args.layers):
        ways = {n: FAMILIES[args.model_type].fused_rows(spec, layer, n) for n in range(1, MAX_SHARDS + 1)}
        for path in ways[1]:
            scale = tensors.get(f"{path}.weight_scale_inv")
            if scale is not None:
                rows = {n: sum(len(own) for _, own in way[path]) // n for n, way in ways.items() if way}
                ours = {n for n, length in rows.items() if (n * math.ceil(length / block),) == scale.shape[:1]}
                fits = ours if fits is None else fits & ours
    if fits is None or len(fits) == 1:
        return 1 if fits is None else fits.pop()
    raise ModelFileError(
        f"{path}.weight_scale_inv: the scales allow {sorted(fits) or 'no number of'} shards of the fused matrices; "
        "one is needed: convert the checkpoint to separate projections first"
    )


def _fused_matrices(args: ModelArgs, tensors: Mapping[str, Tensor], shards: int) -> dict[str, FusedPieces]:
    """Matrices and convolutions that the checkpoint has as one, with those that they split into."""
    fused_rows = FAMILIES[args.model_type].fused_rows
    return {
        path: pieces
        for layer, spec in enumerate(args.layers)
        for path, pieces in fused_rows(spec, layer, shards).items()
        if f"{path}.weight" in tensors
    }


def _matrix_source(
    args: ModelArgs, matrix: Matrix, pieces: MatrixPieces, wanted: Wanted, as_stored: bool
) -> MatrixSource:
    """Codes are copied; floats are quantised by the recipe, or stored as they are."""
    path, floats = pieces[0][0], matrix.weight.dtype if matrix.weight.dtype in FLOATS else "BF16"
    if matrix.quant is not None:
        return MatrixSource(matrix, pieces)
    quant = None if as_stored else wanted.recipe.of_matrix(args, path)
    made = None if quant is None else stored_as(args, path, matrix.shape[-1], quant, quant)
    if quant is None or made is None and path.endswith(ROUTERS):
        return MatrixSource(matrix, pieces, dense=floats)
    return MatrixSource(matrix, pieces, made, wanted.rounding, dense="" if made else "BF16")


def _lacking_biases(ours: Needed, tensors: Mapping[str, Tensor], is_allowed: bool) -> list[str]:
    """The correction biases of routers, if the checkpoint has none of them.

    Raises:
        ModelFileError: it has none, and this is not allowed.
    """
    biases = [name for name in ours.plain if name.endswith(CORRECTION)]
    if not biases or any(name.endswith(CORRECTION) for name in tensors):
        return []
    if not is_allowed:
        raise ModelFileError(
            f"tensor {biases[0]} is missing, and so is every bias by which a router corrects its choice (mlx-lm leaves "
            "them out of ERNIE's): download a checkpoint that has them, or add --without-correction-bias "
            "(load(without_correction_bias=True)); then tokens go to other experts than the model was trained with, "
            "and its answers are worse"
        )
    return biases


def _plain_source(
    args: ModelArgs,
    name: str,
    ours: Needed,
    tensors: Mapping[str, Tensor],
    centred: bool,
    part: TensorRows | None,
) -> PlainSource | TableSource:
    """`part`: of what it is a part; None: it is stored by itself.

    Raises ModelFileError: missing, or neither the model's shape nor Hugging Face's form of it.
    """
    stored, shape, weighed = part.stored if part else name, ours.plain[name], args.layers[0].residual.weighed
    gate = name.replace(".part_weight", ".part_gate")
    is_gate = weighed is not None and gate != name and gate in tensors
    stored = gate if is_gate else stored
    tensor = taken(tensors, stored)
    flat = tuple(n for n in tensor.shape if n > 1)
    longer = len(flat) == 1 and flat[0] > shape[0] and name.endswith(FAMILIES[args.model_type].longer)
    if len(shape) == 1 and name.endswith(FAMILIES[args.model_type].in_rows):
        flat = (math.prod(tensor.shape),)
    if flat == shape or longer:  # a vector with axes of length 1 around its own
        tensor = replace(tensor, shape=flat)
    if name.endswith(TABLE):
        return _table_source(name, shape, tensor)
    if part:
        shape = (part.total, *shape[1:])
    swapped = (shape[0], shape[2], shape[1]) if name in ours.convolutions else shape
    convolution = tensor.shape == swapped != shape
    wanted = flat if longer else swapped if convolution else shape
    if tensor.shape != wanted or tensor.dtype not in FLOATS:
        raise ModelFileError(
            f"{tensor.file}: tensor {tensor.name} is {tensor.dtype} {list(tensor.shape)}; "
            f"the model needs floats {list(wanted)}"
        )
    rows = part.rows if part else np.arange(*shape) if longer else None
    temperature = weighed.temperature if weighed and is_gate else None
    return PlainSource(name, tensor, centred and is_zero_centred(args, name), convolution, rows, temperature)


def _table_source(name: str, shape: tuple[int, ...], tensor: Tensor) -> TableSource:
    """Raises ModelFileError: another shape, or no integers."""
    if tensor.shape != shape or tensor.dtype not in INTEGERS:
        raise ModelFileError(
            f"{tensor.file}: tensor {tensor.name} is {tensor.dtype} {list(tensor.shape)}; "
            f"the model needs integers {list(shape)}"
        )
    return TableSource(name, tensor)


@dataclass(frozen=True)
class TensorFile:
    """One safetensors file: an 8-byte length, a JSON header, then the tensors without gaps."""

    name: str
    sources: tuple[Source, ...]
    link: Path | None = None

    @cached_property
    def header(self) -> bytes:
        entries: JsonDict = {"__metadata__": {"format": "mlx"}}
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


def in_files(sources: Iterable[Source], stem: str, kind: Callable[[str, tuple[Source, ...]], File]) -> list[File]:
    """The tensors in files of at most `SHARD_BYTES` (more only for a single larger tensor)."""
    groups: list[list[Source]] = [[]]
    size = 0
    for source in sources:
        nbytes = sum(one.nbytes for one in source.written)
        if groups[-1] and size + nbytes > SHARD_BYTES:
            groups.append([])
            size = 0
        groups[-1].append(source)
        size += nbytes
    if len(groups) == 1:
        return [kind(f"{stem}.safetensors", tuple(groups[0]))]
    names = (f"{stem}-{i:05d}-of-{len(groups):05d}.safetensors" for i in range(1, len(groups) + 1))
    return [kind(name, tuple(group)) for name, group in zip(names, groups, strict=True)]


def array_bytes(array: mx.array) -> memoryview:
    """The values in C order, little-endian."""
    return np.asarray(mx.contiguous(array).view(mx.uint8)).reshape(-1).data


ASIDE = "aside.safetensors"


@dataclass(frozen=True)
class Copied:
    """A tensor of any dtype under its own name."""

    tensor: Tensor

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.tensor,)

    @property
    def written(self) -> tuple[WrittenTensor, ...]:
        return (WrittenTensor(self.tensor.name, self.tensor.dtype, self.tensor.shape),)

    def arrays(self) -> Iterator[mx.array]:
        """Yields the tensor's bytes."""
        data = read_bytes(self.tensor.file, self.tensor.offset, self.tensor.nbytes)
        yield mx.array(np.frombuffer(data, np.uint8))


def aside_files(tensors: Iterable[Tensor], layers: int) -> list[TensorFile]:
    """The file of those `tensors` of a checkpoint that are kept, or no file. `layers`: number of the model's layers."""
    kept = sorted((one for one in tensors if is_aside(one.name, layers)), key=lambda one: one.name)
    return [TensorFile(ASIDE, tuple(map(Copied, kept)))] if kept else []

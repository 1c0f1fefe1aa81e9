"""Opens a checkpoint directory and reads its tensors one at a time, or a few rows of one.

Two containers are understood: safetensors (one file, or shards with or without an index), and the
`model_weights.bin` + `model_weights.json` of moeflux and flash-moe with `packed_experts/` beside it.
Headers are checked before anything else is read, so a damaged or hostile file leads to an error and never to a read at
a wrong place. Nothing here knows what a tensor is for.
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import mlx.core as mx
import numpy as np

from ..errors import ModelFileError
from ..files import JsonDict, read_json
from .packed import FOLDER, is_packed

INDEX = "model.safetensors.index.json"
QUANT_CONFIG = "hf_quant_config.json"  # a file of NVIDIA's Model Optimizer
# Files that a model needs besides its tensors and config.json.
RECIPE = "moeflux_recipe.json"  # how a conversion of ours has quantised floats
GRIDS_LICENSE = "LICENSE-GGUF.txt"  # of the tables that matrices have in some of GGUF's forms
COPIED = (
    "generation_config.json", "tokenizer.json", "tokenizer.model", "tiktoken.model", "tekken.json",
    "tokenizer_config.json", "special_tokens_map.json", "vocab.json", "merges.txt", "chat_template.jinja",
    "preprocessor_config.json", "engram_token_map.json", RECIPE, GRIDS_LICENSE,
)  # fmt: skip
MAX_HEADER_BYTES = 100_000_000  # the safetensors format's own limit
ITEM_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "I16": 2, "U16": 2, "F16": 2,
    "BF16": 2, "I32": 4, "U32": 4, "F32": 4, "I64": 8, "U64": 8, "F64": 8, "C64": 8,
}  # fmt: skip
NUMPY = {
    **dict.fromkeys(("U8", "F8_E4M3", "F8_E8M0"), "<u1"),
    **{"BF16": "<u2", "F16": "<f2", "F32": "<f4", "U32": "<u4", "I32": "<i4", "I64": "<i8"},
}
FLOATS = ("F32", "BF16", "F16")
InFile = TypeVar("InFile", bound=Any)  # a tensor in any container, whose attribute `file` is the path


@dataclass(frozen=True)
class Tensor:
    """A tensor, or consecutive rows of one, in a file. `bits` is what a moeflux manifest may state."""

    name: str
    file: Path
    offset: int
    dtype: str
    shape: tuple[int, ...]
    bits: int | None = None

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]

    def rows(self, start: int, stop: int) -> "Tensor":
        """Rows `start` to `stop` of the leading axis."""
        step = math.prod(self.shape[1:]) * ITEM_BYTES[self.dtype]
        return replace(self, offset=self.offset + start * step, shape=(stop - start, *self.shape[1:]))

    def __getitem__(self, index: int) -> "Tensor":
        """One entry of the leading axis."""
        row = self.rows(index, index + 1)
        return replace(row, shape=row.shape[1:])

    def read(self) -> mx.array:
        """The values; 8-bit floats come as their codes, uint8.

        Raises:
            ModelFileError: a dtype that is never part of a supported model, or the file cannot be read.
        """
        if self.dtype not in NUMPY:
            raise ModelFileError(f"{self.file}: tensor {self.name} is {self.dtype}; supported: {', '.join(NUMPY)}")
        values = np.empty(self.shape, NUMPY[self.dtype])
        _read_into(self.file, self.offset, values.reshape(-1).view(np.uint8))
        array = mx.array(values)
        return array.view(mx.bfloat16) if self.dtype == "BF16" else array


def read_bytes(file: Path, offset: int, size: int) -> bytearray:
    """Raises ModelFileError: the file ends early or cannot be read."""
    data = bytearray(size)
    _read_into(file, offset, memoryview(data))
    return data


def _read_into(file: Path, offset: int, target: Any) -> None:
    """Plain reads instead of a mapping, so that only the requested bytes are in memory."""
    done = 0
    try:
        with open(file, "rb", buffering=0) as opened:
            opened.seek(offset)
            while done < len(target):
                got = opened.readinto(target[done:])
                if not got:
                    raise ModelFileError(f"{file} ends at byte {offset + done}; {offset + len(target)} are needed")
                done += got
    except OSError as error:
        raise ModelFileError(f"{file} cannot be read: {error.strerror}") from None


@dataclass(frozen=True)
class Checkpoint:
    """What a directory holds.

    `folder` has config.json and the tokenizer; `files` are all files behind `tensors` and `packed`;
    `packed` is the folder of already packed experts, when the checkpoint has one.
    """

    folder: Path
    config: JsonDict
    tensors: dict[str, Tensor]
    files: tuple[Path, ...]
    packed: Path | None = None


def open_checkpoint(path: Path, shards_in: Sequence[Path] = ()) -> Checkpoint:
    """Opens a checkpoint: reads headers and config.json, but no tensor.

    Args:
        shards_in: other directories in which safetensors files may lie.

    Raises:
        ModelFileError: the directory has nothing that can be converted, or a header contradicts its file.
    """
    if not path.is_dir():
        raise ModelFileError(f"{path} is not a directory; give a checkpoint directory or a repo id org/name")
    if is_packed(path) and any(path.glob("resident*.safetensors")):
        raise ModelFileError(f"{path} is already packed; there is nothing to convert")
    if _find(path, "model_weights.json", "artifacts") or _find(path, "model_weights.bin", "artifacts"):
        return _open_moeflux(path)
    files = safetensors_files(path, shards_in)
    if not files:
        inside = [file.parent for way in ("*", "snapshots/*") for file in sorted(path.glob(f"{way}/config.json"))]
        raise ModelFileError(
            f"{path} holds no checkpoint: neither *.safetensors nor model_weights.bin with packed_experts/"
            + (f"; do you mean {inside[0]}?" if inside else "")
        )
    return Checkpoint(path, read_config(path), merge_tensors(map(read_header, files)), tuple(files))


def read_config(folder: Path) -> JsonDict:
    """config.json; if it does not describe the quantisation, that of ModelOpt's separate file is added.

    Raises:
        ModelFileError: a file is missing or is not a JSON object.
    """
    config, beside = read_json(folder / "config.json"), folder / QUANT_CONFIG
    if not beside.exists() or config.keys() & {"quantization", "quantization_config"}:
        return config
    stated = read_json(beside).get("quantization")
    if not isinstance(stated, dict):
        raise ModelFileError(f"{beside}: 'quantization' is not an object")
    return {**config, "quantization_config": {**stated, "quant_method": "modelopt"}}


def has_weights(path: Path) -> bool:
    """Whether the directory holds any weights of a checkpoint."""
    moeflux = (_find(path, f"model_weights.{kind}", "artifacts") for kind in ("json", "bin"))
    return any(path.glob("*.safetensors")) or any(file is not None for file in moeflux)


# ---- safetensors ----


def safetensors_files(path: Path, shards_in: Sequence[Path] = ()) -> list[Path]:
    """The files that the index in `path` names, or all of `model*.safetensors`, or all of `*.safetensors`.

    Each is looked for in `path`, then in `shards_in`.
    """
    check_folders(shards_in)
    places = (path, *shards_in)
    present = {file.name for folder in places for file in folder.glob("*.safetensors")}
    remedy = f"{INDEX} lists it: download the checkpoint again"
    return [find_file(name, places, remedy) for name in shard_names(path, present)]


def check_folders(shards_in: Sequence[Path]) -> None:
    """Raises ModelFileError: one of them is not a directory."""
    for folder in shards_in:
        if not folder.is_dir():
            raise ModelFileError(f"{folder} is not a directory; --shards-in takes directories of safetensors files")


def find_file(name: str, places: Sequence[Path], remedy: str) -> Path:
    """The file of this name in the first of the directories that has one.

    Raises:
        ModelFileError: none has; the message ends with `remedy`.
    """
    for folder in places:
        if (folder / name).is_file():
            return folder / name
    others = f", nor is it in {', '.join(map(str, places[1:]))}" if len(places) > 1 else ""
    raise ModelFileError(f"{places[0] / name} does not exist{others}; {remedy}")


def shard_names(path: Path, present: Iterable[str]) -> list[str]:
    """The names of the files that hold a checkpoint: those that the index in `path` lists, else of those `present`."""
    index = path / INDEX
    if not index.exists():
        shards = sorted(name for name in present if name.endswith(".safetensors"))
        return [name for name in shards if name.startswith("model")] or shards
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise ModelFileError(f"{index}: weight_map is not an object of file names")
    names = sorted(set(weight_map.values()))
    for name in names:
        if Path(name).name != name:
            raise ModelFileError(f"{index}: {name!r} is not a plain file name")
    return names


def read_header(file: Path) -> dict[str, Tensor]:
    """The tensors of one safetensors file (format: https://github.com/huggingface/safetensors#format).

    Raises:
        ModelFileError: anything in the header contradicts the format or the length of the file.
    """
    return header_tensors(file, _size(file), read_head(file))


def read_head(file: Path) -> bytes:
    """The text of a safetensors header; only its length is checked."""
    size = _size(file)
    first = bytes(read_bytes(file, 0, 8)) if size >= 8 else b""
    return bytes(read_bytes(file, 8, head_length(file, size, first)))


def head_length(file: Path, size: int, first: bytes) -> int:
    """The length of the header's text, from the `first` 8 bytes of a file of `size` bytes.

    Raises:
        ModelFileError: no such file is that long.
    """
    length = int.from_bytes(first[:8], "little") if len(first) >= 8 else size
    if size < 8 or length > min(size - 8, MAX_HEADER_BYTES):
        raise ModelFileError(f"{file} is not a safetensors file: {size} bytes cannot hold a {length}-byte header")
    return length


def header_tensors(file: Path, size: int, head: bytes) -> dict[str, Tensor]:
    """The tensors that a header's text describes in `file`, which need not be there yet and will have `size` bytes.

    Raises:
        ModelFileError: anything in the header contradicts the format or the size.
    """
    header = _parse(file, head)
    header.pop("__metadata__", None)
    data = 8 + len(head)
    tensors = {name: _tensor(file, data, name, entry) for name, entry in header.items()}
    end = data
    for tensor in sorted(tensors.values(), key=lambda t: (t.offset, t.nbytes)):
        if tensor.offset != end:
            raise ModelFileError(f"{file}: tensor {tensor.name} starts at byte {tensor.offset}, expected {end}")
        end += tensor.nbytes
    if end != size:
        raise ModelFileError(f"{file} has {size} bytes; its header describes {end}: download it again")
    return tensors


def _parse(file: Path, text: bytes) -> JsonDict:
    try:
        header = json.loads(text.decode("utf-8"), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise ModelFileError(f"{file}: the safetensors header is not valid JSON: {error}") from None
    if not isinstance(header, dict):
        raise ModelFileError(f"{file}: the safetensors header is a JSON {type(header).__name__}, not an object")
    return header


def _unique(pairs: list[tuple[str, Any]]) -> JsonDict:
    members = dict(pairs)
    if len(members) != len(pairs):
        raise ValueError("a key occurs twice")
    return members


def _tensor(file: Path, data: int, name: str, entry: Any) -> Tensor:
    """One header entry; offsets count from the end of the header."""
    where = f"{file}: tensor {name}"
    dtype, shape = _dtype_and_shape(where, entry)
    offsets = entry.get("data_offsets")
    if not _are_sizes(offsets) or len(offsets) != 2:
        raise ModelFileError(f"{where}: data_offsets {offsets!r} are not two byte counts")
    tensor = Tensor(name, file, data + offsets[0], dtype, shape)
    if offsets[1] - offsets[0] != tensor.nbytes:
        raise ModelFileError(f"{where}: {dtype} {list(shape)} needs {tensor.nbytes} bytes; data_offsets are {offsets}")
    return tensor


def _dtype_and_shape(where: str, entry: Any) -> tuple[str, tuple[int, ...]]:
    if not isinstance(entry, dict):
        raise ModelFileError(f"{where}: the entry is not an object")
    dtype, shape = entry.get("dtype"), entry.get("shape", ())
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        raise ModelFileError(f"{where}: dtype {dtype!r} is not known")
    if not _are_sizes(shape):
        raise ModelFileError(f"{where}: shape {shape!r} is not a list of sizes")
    return dtype, tuple(shape)


def _are_sizes(value: Any) -> bool:
    return isinstance(value, list) and all(type(one) is int and one >= 0 for one in value)


def merge_tensors(headers: Iterable[Mapping[str, InFile]]) -> dict[str, InFile]:
    """The tensors of several files.

    Raises:
        ModelFileError: two files have one of the same name.
    """
    tensors: dict[str, InFile] = {}
    for header in headers:
        for name in header.keys() & tensors.keys():
            raise ModelFileError(f"tensor {name} is in {tensors[name].file} and in {header[name].file}")
        tensors.update(header)
    return tensors


# ---- moeflux and flash-moe ----


def _open_moeflux(path: Path) -> Checkpoint:
    """All parts in one directory, or below moeflux's `mlx/`, `artifacts/` and `root/`."""
    config = _required(path, "config.json", "mlx")
    manifest = _required(path, "model_weights.json", "artifacts")
    weights = _required(path, "model_weights.bin", "artifacts")
    packed = _required(path, FOLDER, "root")
    tensors = read_manifest(manifest, weights)
    files = (manifest, weights, *sorted(packed.glob("layer_*.bin")))
    return Checkpoint(config.parent, read_json(config), tensors, files, packed)


def _find(path: Path, name: str, below: str) -> Path | None:
    return next((one for one in (path / name, path / below / name) if one.exists()), None)


def _required(path: Path, name: str, below: str) -> Path:
    file = _find(path, name, below)
    if file is None:
        raise ModelFileError(f"{path / name} does not exist, nor does {path / below / name}")
    return file


def read_manifest(manifest: Path, weights: Path) -> dict[str, Tensor]:
    """The tensors of `model_weights.bin`; every one must lie inside the file.

    Raises:
        ModelFileError: the manifest contradicts itself or the length of the file.
    """
    entries, size = read_json(manifest).get("tensors"), _size(weights)
    if not isinstance(entries, dict):
        raise ModelFileError(f"{manifest}: 'tensors' is not an object")
    tensors = {}
    for name, entry in entries.items():
        where = f"{manifest}: tensor {name}"
        dtype, shape = _dtype_and_shape(where, entry)
        offset, stated, bits = entry.get("offset"), entry.get("size"), entry.get("bits")
        if not _are_sizes([offset, stated]) or not (bits is None or type(bits) is int):
            raise ModelFileError(f"{where}: offset {offset!r}, size {stated!r}, bits {bits!r} are not all integers")
        tensor = Tensor(name, weights, offset, dtype, shape, bits)
        if tensor.nbytes != stated or offset + stated > size:
            raise ModelFileError(
                f"{where}: {dtype} {list(shape)}, {stated} bytes at {offset}, does not fit the file's {size}"
            )
        tensors[name] = tensor
    return tensors


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError as error:
        raise ModelFileError(f"{file} cannot be read: {error.strerror}") from None

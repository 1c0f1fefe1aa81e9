"""Chooses the tiles of a model: the built-in ones, or those that `moeflux tune` found on this GPU and stored in a file.

    {"version": 2, "found": [{"gpu": ..., "mlx": ..., "kernels": ..., "tiles": {KERNEL: {"rows": 8, ...}, ...}}, ...]}

There is one entry for each GPU. It names the MLX version and the kernels' source for which its tiles were found; with
others they are not used. It has the fields in which a kernel's tile differs from the built-in one.
"""

import hashlib
import importlib.metadata
import json
import os
import warnings
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

import mlx.core as mx

from ..errors import ModelFileError, MoefluxWarning, RequestError
from ..files import JsonValue, directory, kept_files, read_json, replace_file, user_path
from ..ops import backend
from ..ops.tiles import CODE, TILES, TRIED, TileChanges, Tiles

VERSION = 2
REMEDY = "moeflux tune finds them anew, and moeflux tune --reset removes the file"


@dataclass(frozen=True)
class Entry:
    """The tiles found on one GPU, with the versions of MLX and of the kernels."""

    gpu: str
    mlx: str
    kernels: str
    tiles: TileChanges

    @property
    def is_stale(self) -> bool:
        """Whether MLX or the kernels have changed since."""
        return (self.mlx, self.kernels) != (mlx_version(), kernels_digest())


def default_file() -> Path:
    return kept_files() / "tiles.json"


def gpu_name() -> str:
    """The name of this machine's GPU."""
    return str(mx.device_info()["device_name"])


def mlx_version() -> str:
    return importlib.metadata.version("mlx")


@cache
def kernels_digest() -> str:
    """The digest of the source of all kernels and of their tiles."""
    digest = hashlib.sha256(repr((TILES, TRIED)).encode())
    for file in sorted(file for file in directory("metal").iterdir() if file.suffix in (".metal", ".h")):
        digest.update(file.name.encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def choose(option: str | Path) -> Tiles:
    """The tiles that `option` stands for.

    Args:
        option: "auto": the environment variable MOEFLUX_TILES, else the tiles found on this GPU, else the built-in
            ones; "code": the built-in ones; or a file that `moeflux tune` wrote.

    Raises:
        RequestError: there is no such file.
    """
    named = os.environ.get("MOEFLUX_TILES") or "auto" if option == "auto" else option
    if named == "code":
        return CODE
    file = default_file() if named == "auto" else user_path(named)
    if named != "auto" and not file.exists():
        raise RequestError(
            f"the file of tiles {file} does not exist; give a file that moeflux tune wrote, auto or code"
        )
    return _usable(file) if backend.has_kernels() and file.exists() else CODE


def _usable(file: Path) -> Tiles:
    """The entries of this GPU; warns about entries that cannot be used."""
    try:
        entry = next((one for one in read_entries(file) if one.gpu == gpu_name()), None)
    except ModelFileError as error:
        warnings.warn(f"{error}; the built-in tiles are used, {REMEDY}", MoefluxWarning, stacklevel=3)
        return CODE
    if entry is None:
        return CODE
    if entry.is_stale:
        message = f"the tiles in {file} were found with another MLX or other kernels and are not used; {REMEDY}"
        warnings.warn(message, MoefluxWarning, stacklevel=3)
        return CODE
    return Tiles(entry.tiles)


def read_entries(file: Path) -> list[Entry]:
    """Everything in a file of tiles.

    Raises:
        ModelFileError: the file cannot be read, or is not a file of tiles.
    """
    held = read_json(file)
    rows = held.get("found")
    if held.get("version") != VERSION or not isinstance(rows, list):
        raise ModelFileError(f"{file} is not a file of tiles that this version wrote")
    try:
        return [_entry(row) for row in rows]
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise ModelFileError(f"{file} is damaged: {error}") from None


def _entry(row: JsonValue) -> Entry:
    names = {name: row[name] for name in ("gpu", "mlx", "kernels")}
    if not all(isinstance(name, str) for name in names.values()):
        raise ValueError("a name is not a string")
    return Entry(**names, tiles=parse_tiles(row["tiles"]))


def parse_tiles(tiles: JsonValue) -> TileChanges:
    """Tiles by kernel, of parsed JSON.

    Raises:
        ValueError, TypeError, AttributeError: `moeflux tune` tries no such tiles.
    """
    parsed = {kernel: dict(values) for kernel, values in tiles.items()}
    for kernel, values in parsed.items():
        for field, value in values.items():
            if type(value) is not int or not is_tried(kernel, field, value):
                raise ValueError(f"{kernel} cannot have {field} {value}")
    return parsed


def is_tried(kernel: str, field: str, value: int) -> bool:
    """Whether some GPU is given this."""
    return any(changes.get(kernel, {}).get(field) == value for tried in TRIED.values() for changes in tried)


def keep(file: Path, tiles: TileChanges) -> None:
    """Writes the tiles found on this GPU in place of those found there before.

    Usable entries for other GPUs stay in the file. The file is replaced atomically.
    """
    try:
        before = read_entries(file) if file.exists() else []
    except ModelFileError:
        before = []
    entry = Entry(gpu_name(), mlx_version(), kernels_digest(), tiles)
    rows = [*(one for one in before if one.gpu != entry.gpu), entry]
    file.parent.mkdir(parents=True, exist_ok=True)
    replace_file(file, [json.dumps({"version": VERSION, "found": [asdict(one) for one in rows]}, indent=1).encode()])

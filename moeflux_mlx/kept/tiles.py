"""Chooses the tiles of a model: the built-in ones, or those that `moeflux tune` found on this GPU and stored in a file.

    {"version": 1, "found": [{"gpu": ..., "mlx": ..., "kernels": ..., "tiles": {KERNEL: {"rows": 8, ...}, ...}}, ...]}

There is one row for each GPU. It names the MLX version and the kernels' source for which its tiles were found; with
others they are not used. It has the fields in which a kernel's tile differs from the built-in one.
"""

import hashlib
import importlib.metadata
import os
from contextlib import suppress
from functools import cache
from pathlib import Path

import mlx.core as mx

from ..errors import warn
from ..files import JsonValue, directory
from ..ops import backend
from ..ops.tiles import CODE, TILES, TRIED, TileChanges, Tiles
from .kept_rows import Row, file_of, keep_row, read_rows

MODES = ("auto", "code")
REMEDY = "moeflux tune finds them anew, and moeflux tune --reset removes the file"


def tiles_file() -> Path:
    return file_of("tiles.json")


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


def choose(mode: str) -> Tiles:
    """The tiles of a mode of `MODES`. "auto": those found on this GPU, else the built-in ones, which the environment
    variable MOEFLUX_TILES can also name; "code": the built-in ones.
    """
    file = tiles_file()
    if "code" in (mode, os.environ.get("MOEFLUX_TILES")) or not backend.has_kernels() or not file.exists():
        return CODE
    rows, key = read_rows(file), _key()
    own = next((row for row in rows if row.get("gpu") == key["gpu"]), None)
    if rows and own is None:
        return CODE
    with suppress(TypeError, ValueError, AttributeError):
        if own is not None and own.items() >= key.items():
            return Tiles(parse_tiles(own.get("tiles")))
    warn(
        f"the tiles in {file} are damaged, or were found with another MLX or other kernels, and are not used; {REMEDY}"
    )
    return CODE


def _key() -> Row:
    """What tiles are found for."""
    return {"gpu": gpu_name(), "mlx": mlx_version(), "kernels": kernels_digest()}


def keep(tiles: TileChanges) -> None:
    """Writes the tiles found on this GPU in place of those found there before."""
    keep_row(tiles_file(), {**_key(), "tiles": tiles}, "gpu")


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

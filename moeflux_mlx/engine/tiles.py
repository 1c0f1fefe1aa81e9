"""Chooses the tiles of a model: the built-in ones, or those that `moeflux tune` found on this GPU and stored in a file.

    {"version": 1, "found": [{"gpu": ..., "mlx": ..., "kernels": ..., "tiles": {SPOT: {"rows": 4, ...}, ...}}, ...]}

There is one entry for each GPU. It names the MLX version and the kernels' source for which its tiles were found; with
others they are not used. A spot is a kernel with the shape and form of its matrices (`ops.tiles.spot_of`).
"""

import hashlib
import importlib.metadata
import json
import os
import sys
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx

from ..errors import ModelFileError, MoefluxWarning, RequestError
from ..files import directory, read_json, replace_file, user_path
from ..ops import backend
from ..ops.tiles import CODE, TILES, TUNED, Tile, Tiles, is_usable

VERSION = 1
REMEDY = "moeflux tune finds them anew"
NAMES = {field.name for field in fields(Tile)}


@dataclass(frozen=True)
class Entry:
    """What was found on one GPU: with which MLX and which kernels, and the tiles by spot."""

    gpu: str
    mlx: str
    kernels: str
    tiles: Mapping[str, Tile]

    @property
    def is_stale(self) -> bool:
        """Whether MLX or the kernels are others now."""
        return (self.mlx, self.kernels) != (mlx_version(), kernels_digest())


def default_file() -> Path:
    return kept_files() / "tiles.json"


def kept_files() -> Path:
    """The folder of what is kept for later starts, in the user's directory for caches."""
    fallback = "~/Library/Caches" if sys.platform == "darwin" else "~/.cache"
    return user_path(os.environ.get("XDG_CACHE_HOME") or fallback) / "moeflux"


def gpu_name() -> str:
    """The GPU that computes here."""
    return str(mx.device_info()["device_name"])


def mlx_version() -> str:
    return importlib.metadata.version("mlx")


@cache
def kernels_digest() -> str:
    """Of the text of all kernels and of the tiles that the code has for them."""
    digest = hashlib.sha256(repr((TILES, TUNED)).encode())
    for file in sorted(file for file in directory("metal").iterdir() if file.suffix in (".metal", ".h")):
        digest.update(file.name.encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def choose(option: str | Path) -> Tiles:
    """The tiles that `option` stands for.

    Args:
        option: "auto": what the environment variable MOEFLUX_TILES says, else what was found on this GPU, if anything;
            "code": the code's; or a file that `moeflux tune` wrote.

    Raises:
        RequestError: there is no such file.
    """
    named = os.environ.get("MOEFLUX_TILES") or "auto" if option == "auto" else option
    if named == "code" or not backend.has_kernels():
        return CODE
    file = default_file() if named == "auto" else user_path(named)
    if file.exists():
        return _usable(file)
    if named == "auto":
        return CODE
    raise RequestError(f"the tiles {file} do not exist; give a file that moeflux tune wrote, auto or code")


def _usable(file: Path) -> Tiles:
    """Those of this GPU, with a warning where there is something that cannot be used."""
    try:
        entry = next((one for one in read_entries(file) if one.gpu == gpu_name()), None)
    except ModelFileError as error:
        warnings.warn(f"{error}; the code's tiles are used, {REMEDY}", MoefluxWarning, stacklevel=3)
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
        ModelFileError: it cannot be read, or is no such file.
    """
    held = read_json(file)
    rows = held.get("found")
    if held.get("version") != VERSION or not isinstance(rows, list):
        raise ModelFileError(f"{file} is not a file of tiles that this version wrote")
    try:
        return [_entry(row) for row in rows]
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise ModelFileError(f"{file} is damaged: {error}") from None


def _entry(row: Any) -> Entry:
    names = {name: row[name] for name in ("gpu", "mlx", "kernels")}
    if not all(isinstance(name, str) for name in names.values()):
        raise ValueError("a name is no text")
    return Entry(**names, tiles=parse_tiles(row["tiles"]))


def parse_tiles(tiles: Any) -> dict[str, Tile]:
    """Tiles by spot, of parsed JSON.

    Raises:
        ValueError, TypeError, AttributeError: they are none that a kernel can have.
    """
    parsed = {spot: Tile(**values) for spot, values in tiles.items()}
    for spot, tile in parsed.items():
        if not is_usable(spot.partition(" ")[0], tile):
            raise ValueError(f"{spot} cannot have the tile {tile}")
    return parsed


def tiles_json(tiles: Mapping[str, Tile]) -> dict[str, dict[str, int]]:
    """What `parse_tiles` reads."""
    return {spot: asdict(tile) for spot, tile in sorted(tiles.items())}


def keep(file: Path, tiles: Mapping[str, Tile], spots: Iterable[str]) -> None:
    """Writes what was found on this GPU: `tiles` for those of `spots` that have others than the code's.

    What the file has for other spots and other GPUs stays, if it can be used. The file appears whole or not at all.
    """
    try:
        before = read_entries(file) if file.exists() else []
    except ModelFileError:
        before = []
    own = next((one for one in before if one.gpu == gpu_name() and not one.is_stale), None)
    old = {} if own is None else dict(own.tiles)
    for spot in spots:
        old.pop(spot, None)
    entry = Entry(gpu_name(), mlx_version(), kernels_digest(), {**old, **tiles})
    rows = [*(one for one in before if one.gpu != entry.gpu), entry]
    entries = [{"gpu": one.gpu, "mlx": one.mlx, "kernels": one.kernels, "tiles": tiles_json(one.tiles)} for one in rows]
    file.parent.mkdir(parents=True, exist_ok=True)
    replace_file(file, [json.dumps({"version": VERSION, "found": entries}, indent=1).encode()])

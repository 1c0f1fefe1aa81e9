"""Chooses the tiles of a model: the built-in ones, or those that `moeflux tune` found on this GPU and stored in a file.

    {"version": 1, "found": [{"gpu": ..., "mlx": ..., "kernels": ..., "tiles": {SPOT: {"rows": 4, ...}, ...}}, ...]}

There is one entry for each GPU. It names the MLX version and the kernels' source for which its tiles were found; with
others they are not used. A spot is a kernel with the shape and form of its matrices (`ops.tiles.spot_of`).
"""

import hashlib
import importlib.metadata
import json
import os
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx

from ..errors import ModelFileError, MoefluxWarning, RequestError
from ..files import directory, kept_files, read_json, replace_file, user_path
from ..ops import backend
from ..ops.tiles import CODE, TILES, TUNED, Tile, Tiles, is_usable

VERSION = 1
REMEDY = "moeflux tune finds them anew"
NAMES = {field.name for field in fields(Tile)}


@dataclass(frozen=True)
class Entry:
    """The tiles found on one GPU, by spot, with the versions of MLX and of the kernels."""

    gpu: str
    mlx: str
    kernels: str
    tiles: Mapping[str, Tile]

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
    """The digest of the source of all kernels and of their built-in tiles."""
    digest = hashlib.sha256(repr((TILES, TUNED)).encode())
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


def _entry(row: Any) -> Entry:
    names = {name: row[name] for name in ("gpu", "mlx", "kernels")}
    if not all(isinstance(name, str) for name in names.values()):
        raise ValueError("a name is not a string")
    return Entry(**names, tiles=parse_tiles(row["tiles"]))


def parse_tiles(tiles: Any) -> dict[str, Tile]:
    """Tiles by spot, of parsed JSON.

    Raises:
        ValueError, TypeError, AttributeError: no kernel can have these tiles.
    """
    parsed = {spot: Tile(**values) for spot, values in tiles.items()}
    for spot, tile in parsed.items():
        if not is_usable(spot.partition(" ")[0], tile):
            raise ValueError(f"{spot} cannot have the tile {tile}")
    return parsed


def tiles_json(tiles: Mapping[str, Tile]) -> dict[str, dict[str, int]]:
    """The JSON that `parse_tiles` reads."""
    return {spot: asdict(tile) for spot, tile in sorted(tiles.items())}


def keep(file: Path, tiles: Mapping[str, Tile], spots: Iterable[str]) -> None:
    """Writes the tiles found on this GPU: `tiles` for those of `spots` whose tiles differ from the built-in ones.

    Usable entries for other spots and GPUs stay in the file. The file is replaced atomically.
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

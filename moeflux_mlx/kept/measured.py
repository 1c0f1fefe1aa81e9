"""Values that were measured on this machine and are kept for later starts, in files of the user's cache directory:
{"version": 1, "found": [ROW, ...]}; a row is an object.

`moeflux doctor` measures how fast the machine reads weights and gets through a layer, for each device and version of
MLX. Where nothing was measured, typical values stand for a layer's seconds. `moeflux tune` finds the tiles of a GPU:

    {"version": 1, "found": [{"gpu": ..., "mlx": ..., "kernels": ..., "tiles": {KERNEL: {"rows": 8, ...}, ...}}, ...]}

There is one row for each GPU. It names the MLX version and the kernels' source for which its tiles were found; with
others they are not used. It has the fields in which a kernel's tile differs from the built-in one.
"""

import fcntl
import hashlib
import importlib.metadata
import json
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path

import mlx.core as mx

from ..errors import ModelFileError, warn
from ..files import JsonObject, JsonValue, directory, kept_files, read_json, replace_file
from ..ops import backend, native
from ..ops.tiles import CODE, TILES, TRIED, TileChanges, Tiles

VERSION = 1
Row = JsonObject


def file_of(name: str) -> Path:
    """The file `name` in the user's cache directory."""
    return kept_files() / name


def read_rows(file: Path) -> list[Row]:
    """The rows; none if the file is missing, damaged or of another version."""
    try:
        held = read_json(file) if file.exists() else {}
    except ModelFileError:
        return []
    rows = held.get("found")
    if held.get("version") != VERSION or not isinstance(rows, list):
        return []
    return [row for row in rows if isinstance(row, dict)]


def change_rows(file: Path, change: Callable[[list[Row]], Sequence[Row]]) -> None:
    """Replaces the rows by what `change` makes of them. The file is replaced atomically, and other processes wait."""
    file.parent.mkdir(parents=True, exist_ok=True)
    lock = os.open(file.parent, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        rows = change(read_rows(file))
        replace_file(file, [json.dumps({"version": VERSION, "found": rows}, indent=1).encode()])
    finally:
        os.close(lock)


def keep_row(file: Path, row: Row, *same: str) -> None:
    """Stores a row in the place of those that have the same values of the fields `same`."""
    change_rows(file, lambda rows: [*(one for one in rows if any(one.get(name) != row[name] for name in same)), row])


FILE = "rates.json"
# Seconds of a layer beside its bytes, of one with streamed experts, and of a token beside its layers, by backend: an
# H200, two cores of an EPYC, and on a Mac public figures of launches and waits (opening/reach.py), which say nothing of
# tokens. A CPU also has its rate of attention.
TYPICAL = {"cuda": (5e-5, 3.6e-4, 5e-4), "metal": (3e-5, 3.3e-4, 0.0), "cpu": (5e-4, 6e-4, 5e-4, 5.5e10)}

UNLIMITED = 1e18  # a rate that takes no time


@dataclass(frozen=True)
class Rates:
    """A machine's rates.

    Args:
        products: bytes of weights per second in the products of one token.
        disk: bytes per second read from the disk.
        layer: seconds of a layer beside its bytes, for launches and the host.
        streamed_layer: the same where the host waits for the choice among streamed experts, and nothing is missing.
        token: seconds of a token beside those of its layers.
        attention: multiply-adds per second of one token's attention.
    """

    products: float
    disk: float
    layer: float
    streamed_layer: float
    token: float = 0.0
    attention: float = UNLIMITED

    @property
    def overlaps(self) -> bool:
        """Whether the host prepares launches while weights are read, as for a GPU."""
        return self.attention == UNLIMITED


def kept_rates() -> Rates | None:
    """The measured rates; None: there are none for this device."""
    key = _key()
    for row in read_rows(file_of(FILE)):
        values = {name: row.get(name) for name in Rates.__dataclass_fields__}
        if row.items() >= key.items() and all(isinstance(value, float) and value >= 0 for value in values.values()):
            return Rates(**values)  # type: ignore[arg-type]  # they are floats
    return None


def rates_with(products: float, disk: float) -> Rates:
    """The measured rates of layers, or typical ones, beside these rates of weights and disk."""
    kept = kept_rates()
    if kept is not None:
        return replace(kept, products=products, disk=disk)
    return Rates(products, disk, *TYPICAL["cpu" if not backend.has_kernels() else backend.name()])


def keep_rates(rates: Rates) -> None:
    with suppress(OSError):  # the next doctor measures again
        keep_row(file_of(FILE), {**_key(), **asdict(rates)}, "device")


def _key() -> Row:
    threads = f"CPU, {native.threads() if native.available() else 1} threads"
    return {"device": gpu_name() if mx.default_device() == mx.gpu else threads, "mlx": mlx_version()}


TILE_MODES = ("auto", "code")
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


def choose_tiles(mode: str) -> Tiles:
    """The tiles of a mode of `TILE_MODES`. "auto": those found on this GPU, else the built-in ones, which the
    environment variable MOEFLUX_TILES can also name; "code": the built-in ones.
    """
    file = tiles_file()
    if "code" in (mode, os.environ.get("MOEFLUX_TILES")) or not backend.has_kernels() or not file.exists():
        return CODE
    rows, key = read_rows(file), _gpu_key()
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


def _gpu_key() -> Row:
    """What tiles are found for."""
    return {"gpu": gpu_name(), "mlx": mlx_version(), "kernels": kernels_digest()}


def keep_tiles(tiles: TileChanges) -> None:
    """Writes the tiles found on this GPU in place of those found there before."""
    keep_row(tiles_file(), {**_gpu_key(), "tiles": tiles}, "gpu")


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

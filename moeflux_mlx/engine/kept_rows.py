"""Files of measured values beside the tiles: {"version": 1, "found": [ROW, ...]}, with one JSON object a row."""

import fcntl
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from ..errors import ModelFileError
from ..files import JsonObject, read_json, replace_file
from .tiles import default_file

VERSION = 1
Row = JsonObject


def file_of(name: str) -> Path:
    """The file `name`, next to that of the tiles in the user's cache directory."""
    return default_file().with_name(name)


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


@contextmanager
def alone(file: Path) -> Iterator[None]:
    """Waits until nobody else changes a file of the directory this way, and keeps others out."""
    file.parent.mkdir(parents=True, exist_ok=True)
    lock = os.open(file.parent, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def write_rows(file: Path, rows: Sequence[Row]) -> None:
    """Replaces the file atomically; the caller is `alone` with it."""
    replace_file(file, [json.dumps({"version": VERSION, "found": rows}, indent=1).encode()])

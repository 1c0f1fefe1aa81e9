"""Files of measured values in the user's cache directory: {"version": 1, "found": [ROW, ...]}; a row is an object."""

import fcntl
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from ..errors import ModelFileError
from ..files import JsonObject, kept_files, read_json, replace_file

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

"""Notices that a file of a loaded model is written to, because answers would then come from two models at once.

A file that another one has replaced under its name does no harm: whoever has it open reads the old bytes. Up to a
second of answers may have used new bytes before they are noticed, and a model that reads no more does not look.
"""

import os
import time
from collections.abc import Mapping
from pathlib import Path

from ..errors import ExpertIOError

LOOK_SECONDS = 1.0  # seconds between two looks at the files


class Stamps:
    """The identity, length and time of change that each file had at first."""

    def __init__(self) -> None:
        self._first: dict[Path, tuple[int, ...]] = {}
        self._looked_at = time.monotonic()
        self._error = ""

    def add(self, path: Path, stat: os.stat_result) -> None:
        """Keeps the stamp of a file. Raises ExpertIOError: the path has another one already."""
        if self._first.setdefault(path, _stamp(stat)) != _stamp(stat):
            raise ExpertIOError(_changed(path))

    def look(self, files: Mapping[Path, int | Path]) -> None:
        """Looks at the files, at most once a second; they are open descriptors, or paths.

        Raises:
            ExpertIOError: one of them has changed, now or before.
        """
        now = time.monotonic()
        if now - self._looked_at >= LOOK_SECONDS:
            self._looked_at = now
            self._error = self._error or next((_changed(path) for path in files if self._differs(path, files)), "")
        if self._error:
            raise ExpertIOError(self._error)

    def _differs(self, path: Path, files: Mapping[Path, int | Path]) -> bool:
        first = self._first[path]
        try:
            stamp = _stamp(os.stat(files[path]))
        except OSError:  # it was removed, or its drive is gone, the next read reports that
            return False
        return stamp != first and stamp[:2] == first[:2]


def _stamp(stat: os.stat_result) -> tuple[int, ...]:
    return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns


def _changed(path: Path) -> str:
    return f"{path} was changed while in use; start again, so that the model is loaded as it is now"

"""A file that a conversion writes: the interface between the maker of its bytes and their writer."""

from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

Bytes = bytes | bytearray | memoryview


class Unit(Protocol):
    """One file to write: `name` relative to the directory, `size` in bytes, and its bytes in order.

    `link` is an existing file with the same bytes, which may be linked to instead of written.
    """

    @property
    def name(self) -> str: ...

    @property
    def size(self) -> int: ...

    @property
    def link(self) -> Path | None: ...

    def chunks(self) -> Iterator[Bytes]: ...

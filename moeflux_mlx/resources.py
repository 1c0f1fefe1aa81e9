"""Finds the data that ships with the package: kernel sources, named configurations, the demo model.

In a wheel they lie inside the package; in an editable install `metal/` and `configs/` lie beside it.
"""

from pathlib import Path

PACKAGE = Path(__file__).resolve().parent


def directory(name: str) -> Path:
    """The folder `name` ("metal", "configs" or "demo")."""
    inside = PACKAGE / name
    return inside if inside.is_dir() else PACKAGE.parent / name

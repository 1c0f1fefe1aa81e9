"""The version: its number, and the commit that it was built from, if known."""

import subprocess
from pathlib import Path

VERSION = "0.2.0"
FOLDER = Path(__file__).resolve().parent
FILE = "commit.txt"  # in a built package, beside this module


def commit() -> str | None:
    """The commit of the build or of the git tree, followed by "-dirty" if files differ."""
    if (FOLDER / FILE).exists():
        return (FOLDER / FILE).read_text().strip()
    if not (FOLDER.parent / ".git").exists():
        return None
    command = ["git", "-C", str(FOLDER.parent), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def full_version() -> str:
    """The version, with its commit if known."""
    built_from = commit()
    return VERSION if built_from is None else f"{VERSION} ({built_from})"

"""How much memory this process may use: the machine's, or less where a control group limits it (Linux).

It reads the system's figures; it does not know what they are for.
"""

import os
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")


def physical_ram_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def usable_ram_bytes() -> int:
    """Physical memory, or the limit of this process's control group where that is smaller."""
    return min([physical_ram_bytes(), *group_limits()])


def group_limits(groups: Path = CGROUPS, membership: Path = MEMBERSHIP) -> list[int]:
    """Limits in bytes of this process's memory group and of those above it, versions 1 and 2.

    Inside a container the group's own path may not be visible; then the root that is visible counts.
    """
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            found += _limits(groups, path, "memory.max")
        elif "memory" in controllers.split(","):
            found += _limits(groups / "memory", path, "memory.limit_in_bytes")
    return found


def _limits(root: Path, path: str, name: str) -> list[int]:
    found, folder = [], root / path.lstrip("/")
    for place in [folder, *folder.parents]:
        if place == root or root in place.parents:
            found += _read_limit(place / name)
    return found


def _read_limit(file: Path) -> list[int]:
    """One number, or none: no such group, or no limit ("max")."""
    try:
        text = file.read_text().strip()
    except OSError:
        return []
    return [int(text)] if text.isdigit() else []

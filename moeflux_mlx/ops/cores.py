"""The number of cores that this process may use."""

import os
from pathlib import Path


def _first_sibling(cpu: int) -> int:
    """Lowest logical CPU on the same core; hyperthreads share one core's bandwidth and vector units."""
    try:
        text = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text()
    except OSError:
        return cpu
    return int(text.replace("-", ",").split(",")[0])


def _quota() -> float:
    """CPUs that a container limit allows (cgroup v2), or infinity."""
    try:
        limit, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
    except (OSError, ValueError):
        return float("inf")
    return float("inf") if limit == "max" else int(limit) / int(period)


def cores() -> int:
    """Physical cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        cpus = len({_first_sibling(cpu) for cpu in os.sched_getaffinity(0)})
    else:
        cpus = os.cpu_count() or 1
    return max(1, int(min(cpus, _quota())))

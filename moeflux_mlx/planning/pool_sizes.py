"""The best size of a pool of experts on this machine, which `moeflux tune` measured and stored in a file.

    {"version": 1, "found": [{"model": DIRECTORY, "experts": BYTES, "memory": BYTES, "pool": BYTES}, ...]}

There is one entry for each directory of a model. It is valid while the model's experts and the machine's memory have
the stored sizes.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

from ..files import JsonDict
from ..kept.measured import file_of, keep_row, read_rows
from .settings import physical_ram_bytes

SHARES = (1.0, 0.8, 0.6, 0.45, 0.3)  # shares of the largest pool that are measured
WORTH = 0.03  # a larger pool is better if it is faster by more than this


def pool_file() -> Path:
    """The file in the user's cache directory."""
    return file_of("pools.json")


def best_pool(model: Path, experts: int) -> int | None:
    """Bytes of the fastest pool for the model in the directory `model`, with `experts` bytes of experts; None if it was
    not measured on this machine or the file is damaged.
    """
    key = _key(model, experts)
    entry = next((one for one in read_rows(pool_file()) if one.items() >= key.items()), {})
    pool = entry.get("pool")
    return pool if type(pool) is int and pool > 0 else None


def keep_pool(model: Path, experts: int, pool: int) -> None:
    """Stores the fastest size."""
    keep_row(pool_file(), {**_key(model, experts), "pool": pool}, "model")


def _key(model: Path, experts: int) -> JsonDict:
    return {"model": str(model.resolve()), "experts": experts, "memory": physical_ram_bytes()}


def best_of(speeds: Mapping[int, float]) -> int:
    """The smallest pool that is about as fast as the fastest.

    Args:
        speeds: tokens a second, by bytes of the pool.
    """
    fastest = max(speeds.values())
    return min(pool for pool, speed in speeds.items() if speed * (1 + WORTH) >= fastest)


def sizes_to_try(most: int, least: int) -> Sequence[int]:
    """Bytes of the pools to measure, largest first, between the smallest that works and the largest that fits."""
    return sorted({max(int(most * share), least) for share in SHARES}, reverse=True)

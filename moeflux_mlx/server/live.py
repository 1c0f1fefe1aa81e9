"""What a page can show while the model runs: where experts are, and how fast everything goes.

A picture is taken by the thread that runs the model, and only while somebody looks.
"""

import base64
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx

from ..engine.engine import Engine
from ..experts.source import LoaderStats

EVERY = 0.5  # seconds between pictures


class Watch:
    """Attributes:
    latest: the last picture, None before the first.
    """

    def __init__(self) -> None:
        self.latest: dict[str, Any] | None = None
        self._lookers = 0
        self._taken = 0.0
        self._is_on = False
        self._before: tuple[LoaderStats, int] = LoaderStats(), 0
        self._prompt_at = 0

    def begin(self) -> None:
        """Somebody looks."""
        self._lookers += 1

    def end(self) -> None:
        """Somebody looks no more."""
        self._lookers -= 1

    @property
    def patience(self) -> float | None:
        """Seconds after which a picture is due even though nothing happens; None: none is."""
        return EVERY if self._lookers else None

    def look(self, engine: Engine, progress: tuple[int, int] | None, queue: int, generated: int) -> None:
        """Takes a picture if one is due. `progress` of a prompt, or None while nothing runs."""
        now = time.perf_counter()
        if bool(self._lookers) != self._is_on:
            self._is_on = bool(self._lookers)
            engine.experts.watch(self._is_on)
            self._before = replace(engine.experts.stats), generated
            self._taken = now
        if not self._is_on or now - self._taken < EVERY:
            return
        self.latest = self._picture(engine, progress, queue, generated, now - self._taken)
        self._taken = now

    def _picture(
        self, engine: Engine, progress: tuple[int, int] | None, queue: int, generated: int, seconds: float
    ) -> dict[str, Any]:
        stats, before = replace(engine.experts.stats), self._before
        self._before = stats, generated
        since = stats.since(before[0])
        in_prompt = progress is not None and progress[0] < progress[1]
        done = progress[0] if progress is not None and in_prompt else 0
        made, self._prompt_at = max(done - self._prompt_at, 0), done
        layout, states = engine.experts.layout, engine.experts.picture()
        return {
            "model": engine.path.name,
            "busy": progress is not None,
            "queue": queue,
            "context": engine.plan.context,
            "layers": [int(layer) for layer in layout.moe_layers],
            "experts": layout.num_experts,
            "map": base64.b64encode(states.tobytes()).decode(),
            "hit_rate": since.hit_rate,
            "gb_per_second": since.gb_per_second,
            "prompt_tokens_per_second": made / seconds,
            "tokens_per_second": (generated - before[1]) / seconds,
            "memory": {"used": used_memory(), "planned": engine.plan.total, "pool": engine.plan.pool},
            "prompt": {"done": done, "total": progress[1]} if progress is not None and in_prompt else None,
        }


def used_memory() -> int:
    """Bytes that this process holds; where the system does not say, those of MLX's arrays."""
    if sys.platform == "linux":
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * 4096
    return mx.get_active_memory() + mx.get_cache_memory()

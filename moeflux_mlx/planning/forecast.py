"""How fast a model will answer, from the bytes of a token, a machine's rates and the share of experts in memory.

A token's weights and state are read at the products' rate. If attention computes for longer than it reads, as on a CPU,
this is its time. A token and each of its layers have their own seconds, for launches and the host. A GPU reads while
the host prepares the next launches, so the root of the sum of their squares is taken, near which measured tokens lie. A
streamed layer waits for its router, so its seconds are added. Experts that are not in memory are read from the disk,
after the products; a GPU reads some from the host's memory. Nothing here measures, and the same inputs give the same
forecast.
"""

import math
from dataclasses import dataclass

import numpy as np

from ..kept.measured import Rates
from ..mixers.registry import each_cache
from ..spec import ModelArgs
from .memory_plan import MemoryPlan

SPREAD = 1.3  # the ends of the band are the middle times and divided by this
HOST_RATE = 4.1e10  # bytes per second that a GPU reads from the host (docs/performance.md, "Experts in host memory")
READ_SHARE = 0.85  # of the disk's rate: a layer asks for few experts at once (docs/performance.md, "Streaming")
# Share of the experts in the pool -> share of the requests that find theirs, in held-out texts of moe40m with
# read-ahead (docs/performance.md, "Streaming").
OF_POOL = (0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.75, 0.85, 0.9, 1)
IN_TEXTS = (0, 0.536, 0.632, 0.723, 0.798, 0.86, 0.906, 0.96, 0.983, 0.992, 1)


@dataclass(frozen=True)
class TokenWork:
    """What one token takes.

    Args:
        dense: bytes of weights that every token reads.
        routed: bytes of the experts that it uses.
        state: bytes of caches that it reads and writes.
        layers: number of layers that it passes; `moe_layers` of them have experts.
        attended: multiply-adds of its attention.
    """

    dense: int
    routed: int
    state: int
    layers: int
    moe_layers: int
    attended: float = 0.0

    @classmethod
    def of(cls, args: ModelArgs, dense: int, routed: int, positions: int, itemsize: int) -> "TokenWork":
        """Of a model whose token reads `dense` and `routed` bytes of weights, after `positions` tokens."""
        caches = each_cache(args.mixer_counts)
        state = sum(count * cache.step_bytes(positions, itemsize) for cache, count in caches)
        attended = sum(count * mixer.attended(1, positions) for mixer, count in args.mixer_counts.items())
        return cls(dense, routed, state, len(args.visits), sum(map(args.passes_of, args.moe_layers)), attended)


@dataclass(frozen=True)
class Forecast:
    """Tokens per second: the middle, and the ends of a band that differ by a factor of 1.7."""

    low: float
    middle: float
    high: float

    def __str__(self) -> str:
        return f"{_said(self.low)} to {_said(self.high)}"


def expected(plan: MemoryPlan, work: TokenWork, rates: Rates, hits: float | None = None) -> Forecast:
    """The forecast for the model of a plan. `hits`: of a token's experts, those that are in memory, also in the host's;
    None: as many as in texts.
    """
    share, in_texts = share_of(plan, work), hits_in_texts(in_memory(plan, work))
    hits = in_texts if hits is None else hits
    return forecast(work, rates, share, hits, hits * (1 - hits_in_texts(share) / in_texts))


def uniform(plan: MemoryPlan, work: TokenWork, rates: Rates) -> Forecast:
    """The forecast for the model of a plan if a router uses all experts equally often."""
    share, held = share_of(plan, work), in_memory(plan, work)
    return forecast(work, rates, share, held, held - share)


def forecast(work: TokenWork, rates: Rates, share: float, hits: float, from_host: float = 0.0) -> Forecast:
    """The forecast for one token after the other.

    Args:
        share: of the experts that are in the memory that computes.
        hits: of a token's experts, those that are in memory, `from_host` of them only in the host's.
    """
    is_streamed = share < 1
    moved = (work.dense + work.routed) / rates.products
    moved += max(work.state / rates.products, work.attended / rates.attention)
    host = rates.token + (work.layers - work.moe_layers * is_streamed) * rates.layer
    seconds = math.hypot(host, moved) if rates.overlaps else host + moved
    seconds += work.moe_layers * is_streamed * rates.streamed_layer
    seconds += from_host * work.routed / HOST_RATE
    seconds += (1 - hits) * work.routed / (READ_SHARE * rates.disk) if is_streamed else 0
    return Forecast(1 / seconds / SPREAD, 1 / seconds, SPREAD / seconds)


def hits_in_texts(share: float) -> float:
    """The share of requests that find their expert, if a text repeats experts as moe40m's do."""
    return float(np.interp(share, OF_POOL, IN_TEXTS))


def share_of(plan: MemoryPlan, work: TokenWork) -> float:
    """The share of the experts that are in the pool while a plan's model computes such tokens: the pool then has what
    the rest of the context and prompts do not take. It is below 1 where experts are streamed.
    """
    pool = max(plan.pool, plan.most - work.state)
    return min(pool / plan.experts, math.nextafter(1, 0)) if plan.pool else 1.0


def in_memory(plan: MemoryPlan, work: TokenWork) -> float:
    """The share of the experts that are in the pool or in the host's memory."""
    return min(share_of(plan, work) + plan.host / plan.experts, 1.0)


def _said(rate: float) -> str:
    return f"{rate:.{0 if rate >= 10 else 1 if rate >= 1 else 2}f}"

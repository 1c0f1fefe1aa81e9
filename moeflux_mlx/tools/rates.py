"""Measures what a layer costs this machine beside its bytes, with the demo model, whose weights take no time."""

import statistics
import time
from contextlib import closing

from ..driving.generation import generate_step
from ..kept.rates import Rates
from ..planning.machine import default_dtype
from .checkup import product_rate
from .demo_check import open_demo

PROMPT, TOKENS, ALL = list(range(3, 11)), 24, 1 << 30  # token ids; bytes of a pool that holds all experts


def measure_rates(disk: float, products: float | None = None) -> Rates:
    """The rates of this machine, whose disk reads `disk` bytes per second. `products`: those of products, if known."""
    return Rates(products or product_rate(default_dtype()), disk, layer_seconds("auto"), layer_seconds("pread"))


def layer_seconds(expert_io: str) -> float:
    """Seconds of one of the demo model's layers, of which a token has few bytes."""
    engine = open_demo(expert_io, ALL if expert_io == "pread" else None)
    try:
        seconds = []
        with closing(generate_step(PROMPT, engine.model, max_tokens=2 * TOKENS)) as steps:
            next(steps)
            for _ in range(2 * TOKENS - 1):
                began = time.perf_counter()
                next(steps)
                seconds.append(time.perf_counter() - began)
        return statistics.median(seconds[TOKENS:]) / engine.model.args.num_hidden_layers
    finally:
        engine.experts.close()

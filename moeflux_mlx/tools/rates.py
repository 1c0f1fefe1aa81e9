"""Measures what a layer costs this machine beside its bytes, with the demo model, whose weights take no time."""

import statistics
import time
from contextlib import closing

import numpy as np

from ..driving.generation import generate_step
from ..kept.rates import UNLIMITED, Rates
from ..ops import backend, native
from ..planning.machine import default_dtype
from .checkup import product_rate
from .demo_check import open_demo

PROMPT, TOKENS, ALL = list(range(3, 11)), 24, 1 << 30  # token ids; bytes of a pool that holds all experts
HEADS, POSITIONS = (32, 128), 8192  # of queries, and their width; positions of a text


def measure_rates(disk: float, products: float | None = None) -> Rates:
    """The rates of this machine, whose disk reads `disk` bytes per second. `products`: those of products, if known."""
    layers = layer_seconds("auto"), layer_seconds("pread")
    return Rates(products or product_rate(default_dtype()), disk, *layers, attention_rate())


def attention_rate() -> float:
    """Multiply-adds per second of one token's attention on a CPU; a GPU makes them while it reads."""
    if backend.has_kernels() or not native.available():
        return UNLIMITED
    queries, keys = np.ones((1, *HEADS), np.float32), np.ones((1, POSITIONS, HEADS[1]), np.float32)
    seconds = []
    for _ in range(5):
        began = time.perf_counter()
        native.attend(queries, keys, keys, POSITIONS, 1.0)
        seconds.append(time.perf_counter() - began)
    return 2 * HEADS[0] * keys.size / min(seconds)


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

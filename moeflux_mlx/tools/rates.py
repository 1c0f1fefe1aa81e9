"""Measures what a token and a layer take beside their bytes, with small models, whose bytes take no time."""

import statistics
import time
from contextlib import closing
from dataclasses import replace

import mlx.core as mx
import numpy as np

from ..driving.generation import generate_step
from ..experts.routed import RoutedExperts
from ..kept.measured import UNLIMITED, Rates
from ..model.decoder import Model
from ..opening.random_weights import Shapes, random_experts, randomise
from ..ops import backend, native
from ..planning.machine import default_dtype
from ..spec import ModelArgs
from .checkup import LONG_ENOUGH, least_seconds, product_rate
from .demo_check import open_demo

PROMPT, ALL = list(range(3, 11)), 1 << 30  # token ids; bytes of a pool that holds all experts
LEAST_TOKENS, MOST_TOKENS = 8, 1024  # that are timed, whatever time they take
TIMES = 4  # layers of the larger model, for each of the demo model's
HEADS, POSITIONS = (32, 128), 8192  # of queries, and their width; positions of a text


def measure_rates(disk: float, products: float | None = None) -> Rates:
    """The rates of this machine, whose disk reads `disk` bytes per second. `products`: those of products, if known."""
    resident, args = _demo_seconds("auto")
    streamed, _ = _demo_seconds("pread")
    count = args.num_hidden_layers
    few, many = (_random_seconds(replace(args, layers=args.layers * times)) for times in (1, TIMES))
    layer = max(many - few, 0.1 * few) / (TIMES - 1) / count
    token = max(few - layer * count, 1e-9)
    waiting = max(streamed - resident, 0.0) / count
    products = products or product_rate(default_dtype())
    return Rates(products, disk, layer, layer + waiting, token, attention_rate())


def attention_rate() -> float:
    """Multiply-adds per second of one token's attention on a CPU; a GPU makes them while it reads."""
    if backend.has_kernels():
        return UNLIMITED
    queries, keys = np.ones((1, *HEADS), np.float32), np.ones((1, POSITIONS, HEADS[1]), np.float32)
    q, k = mx.array(queries)[:, :, None], mx.array(keys)[None]

    def seconds() -> float:
        began = time.perf_counter()
        if native.available():
            native.attend(queries, keys, keys, POSITIONS, 1.0)
        else:
            mx.eval(mx.fast.scaled_dot_product_attention(q, k, k, scale=1.0))
        return time.perf_counter() - began

    return 2 * HEADS[0] * keys.size / least_seconds(seconds)


def token_seconds(model: Model) -> float:
    """Seconds of one of the model's tokens, when they have been computed for long enough."""
    seconds = list[float]()
    with closing(generate_step(PROMPT, model, max_tokens=MOST_TOKENS)) as steps:
        next(steps)
        next(steps)  # compiles
        end = time.perf_counter() + 2 * LONG_ENOUGH
        while len(seconds) < LEAST_TOKENS or (time.perf_counter() < end and len(seconds) < MOST_TOKENS - 2):
            began = time.perf_counter()
            next(steps)
            seconds.append(time.perf_counter() - began)
    return statistics.median(seconds[len(seconds) // 2 :])


def _demo_seconds(expert_io: str) -> tuple[float, ModelArgs]:
    engine = open_demo(expert_io, ALL if expert_io == "pread" else None)
    engine.model.optimistic = None  # every streamed layer waits for its choice
    with closing(engine.experts):
        return token_seconds(engine.model), engine.model.args


def _random_seconds(args: ModelArgs) -> float:
    """`token_seconds` of a model with random weights in memory."""
    shapes = Shapes.of_args(args, default_dtype())
    experts = random_experts(shapes.layout)
    model = Model(args, RoutedExperts(experts))
    randomise(model, "", shapes)
    mx.eval(model.parameters())
    with closing(experts):
        return token_seconds(model)

#!/usr/bin/env python3
"""Times decoding over a long text with keys and values in 16 and in 8 bits, in turns, with random weights and resident
experts.

    scripts/bench/bench_kv.py [--variant minimax-m2-230b-a10b] [--layers 4] [--positions 32768] [--turns 7]

Both models have the same caches: random keys and values, and no prompt is computed. Prints milliseconds of a token in
each turn's median, the bytes of the caches, and ends with one JSON line.
"""

import argparse
import json
import statistics
import time

import mlx.core as mx
from bench_decode import add_variant, ours, variant_config

from moeflux_mlx.caches.layer_cache import LayerCache
from moeflux_mlx.model.decoder import Model
from moeflux_mlx.planning.settings import configure_mlx
from moeflux_mlx.spec import ModelArgs

TOKENS, WARMUP = 32, 8


def long_text(model: Model, positions: int) -> list[LayerCache]:
    """Returns caches of a text with `positions` positions."""
    cache = model.make_cache()
    for layer, mixer in zip(cache, model.args.mixers, strict=True):
        widths = (mixer.head_dim, mixer.value_width)
        layer.append(
            *(mx.random.normal((1, mixer.kv_heads, positions, n)).astype(model.activation_dtype) for n in widths)
        )
        mx.eval(layer.state[:2])
    return cache


def token_ms(model: Model, cache: list[LayerCache]) -> float:
    """Returns the median of the milliseconds of a token. Each token is waited for."""
    times = []
    for i in range(WARMUP + TOKENS):
        start = time.perf_counter()
        mx.eval(model(mx.array([[i + 1]]), cache))
        times.append(time.perf_counter() - start)
    for layer in cache:
        layer.trim(WARMUP + TOKENS)
    return 1e3 * statistics.median(times[WARMUP:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_variant(parser)
    parser.set_defaults(variant="minimax-m2-230b-a10b", layers=4)
    parser.add_argument("--positions", type=int, default=32768)
    parser.add_argument("--turns", type=int, default=7)
    options = parser.parse_args()
    configure_mlx()
    args = ModelArgs.from_dict(variant_config(options))
    models = {bits: ours(args.with_kv_bits(8 if bits == 8 else None)) for bits in (16, 8)}
    texts = {bits: long_text(model, options.positions) for bits, model in models.items()}
    times: dict[int, list[float]] = {bits: [] for bits in models}
    for turn in range(options.turns):
        for bits, model in models.items():
            times[bits].append(token_ms(model, texts[bits]))
        print(f"turn {turn}: " + ", ".join(f"{bits} bits {times[bits][-1]:.3f} ms" for bits in models), flush=True)
    result = {f"token_ms_{bits}": statistics.median(times[bits]) for bits in models}
    result |= {f"cache_bytes_{bits}": sum(layer.nbytes for layer in text) for bits, text in texts.items()}
    print(json.dumps({"variant": options.variant, "positions": options.positions, **result}))


if __name__ == "__main__":
    main()

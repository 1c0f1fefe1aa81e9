#!/usr/bin/env python3
"""Compares the weight bytes per second of the native CPU kernels with the read bandwidth of the same threads.

Shapes are those of Qwen3-30B-A3B (hidden 2048, expert width 768, 8 of 128 experts, vocabulary 151936) with random
weights, larger together than any cache. Each round times the plain read and every kernel once, so a disturbance affects
neighbours alike; reported are medians over the rounds, and the median of each round's ratio to the read just before.
Small operations are in microseconds. The last line is JSON.

With --forms instead: the experts of one layer of 397B-A17B in every stored form, on each instruction path. A round
times a form and 4 bits in groups of 64 one after the other, in CPU time of the process, which other processes disturb
less than the wall clock; reported are medians of GB a CPU second, and medians and quartiles
of the rounds' ratios.
"""

import argparse
import json
import statistics
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from moeflux_mlx.formats.record import Record
from moeflux_mlx.ops import native
from moeflux_mlx.ops.cores import cores
from moeflux_mlx.quant import AFFINE_BITS, EXPERTS, GGUF_MODES, Quant

HIDDEN, WIDTH, TOP_K, VOCABULARY = 2048, 768, 8, 151936
RECORD = Record.make(HIDDEN, WIDTH)
RECORDS, CALLS = 512, 24  # experts in memory, and calls that choose among them in turn
LAYER = 4096, 1024, 10  # hidden size, expert width and experts per token of 397B-A17B
FORMS = [*(Quant(bits, 64) for bits in AFFINE_BITS if bits != 4), Quant(4, 32), Quant(3, 128)]
FORMS += [Quant(4, 32, "mxfp4"), Quant(8, 32, "mxfp8"), Quant(4, 16, "nvfp4", has_global_scale=True)]
FORMS += [Quant(mode.bits, mode.group_size, name) for name, mode in GGUF_MODES.items()]


def matrix(rng, rows, columns):
    w = rng.integers(0, 2**32, (rows, columns // 8), dtype=np.uint32)
    s = rng.integers(0x3C00, 0x3D00, (rows, columns // 64), dtype=np.uint16)
    return w, s, s | np.uint16(0x8000)


def layers_of(matrix, rows, columns):
    """Returns the same bytes as a stack of [rows, columns] layers."""
    count = matrix[0].size * 8 // (rows * columns)
    parts = [a.reshape(-1)[: count * rows * columns // per] for a, per in zip(matrix, (8, 64, 64), strict=True)]
    shapes = [(count, rows, -1)] * 3
    return list(zip(*(a.reshape(s) for a, s in zip(parts, shapes, strict=True)), strict=True))


def product(layers, tokens, rng):
    x = rng.standard_normal((tokens, layers[0][0].shape[1] * 8), dtype=np.float32)
    out = np.empty((tokens, layers[0][0].shape[0]), np.float32)

    def call():
        for w, s, b in layers:
            native.linear(x, EXPERTS, w, s, b, out)

    return call, sum(a.nbytes for layer in layers for a in layer)


def experts(blob, tokens, rng):
    """Returns the calls of gate/up and down/combine over random experts, as (call, bytes) pairs."""
    slots = [
        np.stack([rng.permutation(len(blob))[:TOP_K] for _ in range(tokens)]).astype(np.int32) for _ in range(CALLS)
    ]
    x = rng.standard_normal((tokens, HIDDEN), dtype=np.float32)
    weights = np.full((tokens, TOP_K), 1 / TOP_K, np.float32)
    act, out = np.empty((tokens, TOP_K, WIDTH), np.float32), np.empty_like(x)

    def gate_up():
        for s in slots:
            native.expert_gate_up(x, blob, s, RECORD, act)

    def down():
        for s in slots:
            native.expert_down_combine(act, blob, s, RECORD, weights, x, None, out)

    distinct = sum(len(np.unique(s)) for s in slots) * blob[0].nbytes
    return {"expert_gate_up": (gate_up, distinct * 2 // 3), "expert_down_combine": (down, distinct // 3)}


def weight_cases(tokens, rng):
    head = matrix(rng, VOCABULARY, HIDDEN)
    words = RECORD.size // 4
    blob = rng.integers(0, 2**32, (RECORDS, words), dtype=np.uint32) & np.uint32(0x3DFF3DFF)
    return head[0].reshape(-1), {
        "linear lm_head 151936x2048": product([head], tokens, rng),
        "linear qkv 5120x2048": product(layers_of(head, 5120, 2048), tokens, rng),
        "linear o 2048x4096": product(layers_of(head, 2048, 4096), tokens, rng),
        **experts(blob, tokens, rng),
    }


def small_cases(rng):
    def normal(*shape):
        return rng.standard_normal(shape, dtype=np.float32)

    w, s, b = matrix(rng, 2048, 2048)
    x, dense = normal(1, HIDDEN), np.empty((2048, 2048), np.float32)
    q, cache, out = normal(1, 32, 128), normal(2, 4, 1024, 128), np.empty((1, 32, 128), np.float32)
    state, wide, keys = normal(32, 128, 128), normal(1, 32, 128), normal(1, 16, 128) / 16
    half = np.full((1, 32), 0.5, np.float32)
    conv, mixed, taps = normal(3, 8192), normal(1, 8192), normal(4, 8192)
    return {
        "rms_norm 2048": lambda: native.rms_norm(x, x[0], 1e-6),
        "activate 8x768": lambda: native.activate(x[:, :768], x[:, 768:1536]),
        "attend 32/4 heads, 1024 tokens": lambda: native.attend(q, cache[0], cache[1], 1024, 0.1, out),
        "gated_delta 32 heads 128x128": lambda: native.gated_delta(state, keys, keys, wide, half, half, wide * 1),
        "conv_silu 8192": lambda: native.conv_silu(conv, mixed, taps),
        "dequantize 2048x2048": lambda: native.dequantize(EXPERTS, w, s, b, dense),
    }


def seconds(call):
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def read_all(words):
    """Reads an array on all cores."""
    with ThreadPoolExecutor(cores()) as pool:
        list(pool.map(np.bitwise_xor.reduce, np.array_split(words, cores())))


def measure_weights(words, cases, rounds):
    """Returns {name: (GB/s, fraction of the read bandwidth)}, including the read itself."""
    rates = {name: [] for name in ("read", *cases)}
    ratios = {name: [] for name in cases}
    for _ in range(rounds):
        for name, (call, size) in cases.items():
            read = words.nbytes / seconds(lambda: read_all(words)) / 1e9
            rate = size / seconds(call) / 1e9
            rates["read"].append(read)
            rates[name].append(rate)
            ratios[name].append(rate / read)
    middle = {name: statistics.median(values) for name, values in rates.items()}
    return {name: (rate, statistics.median(ratios.get(name, [1.0]))) for name, rate in middle.items()}


def layer_of(quant, rng, layers=2):
    """Returns {operation: (call, bytes)} for experts of this form; the calls use `layers` layers in turn."""
    hidden, width, count = LAYER
    has_floats = quant.has_biases or not quant.is_of_mlx
    kind = "BF16" if has_floats else "U8"
    record = Record.make(hidden, width, (quant,) * 3, Record.make(hidden, width, (quant,) * 3, None, kind).size, kind)
    blob = rng.integers(0, 2**32, (layers * count, record.size // 4), dtype=np.uint32)
    blob &= np.uint32(0x3DFF3DFF if has_floats else 0x7B7B7B7B)  # scales of a usual size
    slots = [np.arange(i * count, (i + 1) * count, dtype=np.int32)[None] for i in range(layers)]
    x, weights = rng.standard_normal((1, hidden), dtype=np.float32), np.full((1, count), 0.1, np.float32)
    act, out = np.empty((1, count, width), np.float32), np.empty_like(x)
    given = rng.standard_normal(act.shape, dtype=np.float32)  # act itself may hold subnormal numbers, which are slow

    def gate_up():
        for s in slots:
            native.expert_gate_up(x, blob, s, record, act)

    def down():
        for s in slots:
            native.expert_down_combine(given, blob, s, record, weights, x, None, out)

    return {"gate_up": (gate_up, blob.nbytes * 2 / 3), "down": (down, blob.nbytes / 3)}


def cpu_rate(call, size):
    """Returns the bytes per second of the process's CPU time."""
    start = time.process_time()
    call()
    return size / (time.process_time() - start)


def measure_forms(rounds, rng):
    rows, base = [], layer_of(EXPERTS, rng)
    for quant in FORMS:
        cases = layer_of(quant, rng)
        for path in native.instruction_paths():
            native.use_path(path)
            for name, case in cases.items():
                case[0](), base[name][0]()
                pairs = [(cpu_rate(*case), cpu_rate(*base[name])) for _ in range(rounds)]
                rate, four = (statistics.median(side) / 1e9 for side in zip(*pairs, strict=True))
                low, ratio, high = statistics.quantiles([a / b for a, b in pairs], n=4, method="inclusive")
                row = {
                    "form": str(quant),
                    "path": path,
                    "op": name,
                    "GB/s": rate,
                    "x4": ratio,
                    "quartiles": (low, high),
                }
                rows.append(row)
                text = f"{rate:6.2f} GB/s, {ratio:5.2f} ({low:.2f}-{high:.2f}) of 4 bits' {four:6.2f}"
                print(f"{quant!s:38} {path:10} {name:8} {text}", flush=True)
    native.use_path(native.instruction_paths()[0])
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=1, help="rows per call (default 1)")
    parser.add_argument("--rounds", type=int, default=7, help="repetitions (default 7)")
    parser.add_argument("--threads", type=int, default=cores(), help="team size (default: the cores)")
    parser.add_argument("--forms", action="store_true", help="every stored form beside 4 bits in groups of 64")
    parser.add_argument("--tiny", action="store_true", help="with few experts and words, to see whether it runs")
    args = parser.parse_args()
    if args.tiny:
        globals().update(VOCABULARY=5120, RECORDS=8, CALLS=1, LAYER=(512, 256, 2))
    native.set_threads(args.threads)
    rng = np.random.default_rng(0)
    if args.forms:
        print(json.dumps({"threads": native.threads(), "forms": measure_forms(args.rounds, rng)}))
        return
    words, cases = weight_cases(args.tokens, rng)
    for call, _ in cases.values():
        call()
    report = {"path": native.instruction_paths()[0], "threads": native.threads(), "tokens": args.tokens}
    print(f"{report['path']}, {report['threads']} threads, {args.tokens} tokens per call")
    report["GB/s"] = measure_weights(words, cases, args.rounds)
    for name, (rate, ratio) in report["GB/s"].items():
        print(f"{name:32} {rate:7.1f} GB/s {ratio:6.2f} of read")
    report["us"] = {}
    for name, call in small_cases(rng).items():
        report["us"][name] = min(seconds(call) for _ in range(20 * args.rounds)) * 1e6
        print(f"{name:32} {report['us'][name]:7.1f} us")
    print(json.dumps(report))


if __name__ == "__main__":
    main()

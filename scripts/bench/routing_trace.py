#!/usr/bin/env python3
"""Records which experts a model uses, invents such traces, and replays them against cache sizes.

    scripts/bench/routing_trace.py record --model DIR trace.npz
    scripts/bench/routing_trace.py synthesize --reuse 0.35 trace.npz
    scripts/bench/routing_trace.py replay trace.npz

A trace is an array [tokens, layers, K] of expert ids. The replay prints, for pools of several sizes shared
by all layers, the hit rate of least-recently-used order and of Belady's (which knows the future and bounds
every policy), and what reading ahead would have found: of the misses under LRU, the share that the previous
token's experts contain, and the share that a predicted set with the given recall contains.
"""

import argparse
import heapq
import json
from collections import OrderedDict
from pathlib import Path

import numpy as np

SHARES = (0.05, 0.1, 0.2, 0.3, 0.5, 0.75)


def main(argv: list[str] | None = None) -> None:
    options = parser().parse_args(argv)
    options.run(options)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    commands = made.add_subparsers(required=True)
    record = commands.add_parser("record", help="from a packed model that generates text")
    record.add_argument("--model", required=True, help="directory")
    record.add_argument("--prompt", default="Tell me a story.")
    record.add_argument("--max-tokens", type=int, default=256)
    record.set_defaults(run=run_record)
    made_up = commands.add_parser("synthesize", help="with adjustable reuse")
    for name, value, text in (
        ("tokens", 512, "length"),
        ("layers", 48, "MoE layers"),
        ("experts", 128, "in each layer"),
        ("top-k", 8, "experts of a token"),
        ("seed", 0, "of the random numbers"),
    ):
        made_up.add_argument(f"--{name}", type=int, default=value, help=f"{text} (%(default)s)")
    made_up.add_argument("--reuse", type=float, default=0.35, help="share kept from the previous token (%(default)s)")
    made_up.add_argument("--skew", type=float, default=0.5, help="popularity falls as 1/rank^skew (%(default)s)")
    made_up.set_defaults(run=run_synthesize)
    again = commands.add_parser("replay", help="against pools of several sizes, as a table and a line of JSON")
    again.add_argument("--slots", type=int, nargs="+", help="pool sizes; default: shares of all experts")
    again.add_argument("--recall", type=float, default=0.8, help="of the predicted experts (%(default)s)")
    again.set_defaults(run=run_replay)
    for command, text in ((record, "to write"), (made_up, "to write"), (again, "to read")):
        command.add_argument("trace", type=Path, help=text)
    return made


def run_record(options: argparse.Namespace) -> None:
    from moeflux_mlx import load, stream_generate

    model, tokenizer = load(options.model)
    model.decode_step = None  # a GPU's compiled step shows nobody its experts
    recorder = Recorder(model)
    for _ in stream_generate(model, tokenizer, options.prompt, max_tokens=options.max_tokens):
        pass
    save(options.trace, recorder.trace(), model.args.num_experts)


class Recorder:
    """Stands before a model's routed experts and notes the ids of every single token."""

    def __init__(self, model):
        self.layers = model.args.moe_layers
        self.rows = {layer: [] for layer in self.layers}
        self.routed = model.layers[self.layers[0]].mlp.experts
        for layer in self.layers:
            model.layers[layer].mlp.experts = self

    def wants_guess(self, layer, tokens):
        return self.routed.wants_guess(layer, tokens)

    def expect(self, layer, tokens):
        self.routed.expect(layer, tokens)

    def __call__(self, routing, *rest):
        if len(routing.ids) == 1:
            self.rows[routing.layer].append(np.array(routing.ids)[0])
        return self.routed(routing, *rest)

    def trace(self) -> np.ndarray:
        return np.stack([np.stack(self.rows[layer]) for layer in self.layers], axis=1)


def run_synthesize(options: argparse.Namespace) -> None:
    shape = (options.tokens, options.layers, options.top_k)
    trace = synthesize(shape, options.experts, options.reuse, options.skew, np.random.default_rng(options.seed))
    save(options.trace, trace, options.experts)


def synthesize(shape: tuple[int, int, int], experts: int, reuse: float, skew: float, rng) -> np.ndarray:
    """Each token keeps `reuse` of the previous token's experts, on average, and draws the others by popularity."""
    tokens, layers, top_k = shape
    trace = np.empty(shape, np.int64)
    for layer in range(layers):
        popularity = rng.permutation(np.arange(1, experts + 1) ** -float(skew))
        trace[0, layer] = draw(popularity, np.array([], int), top_k, rng)
        for t in range(1, tokens):
            kept = trace[t - 1, layer][rng.random(top_k) < reuse]
            trace[t, layer] = draw(popularity, kept, top_k, rng)
    return trace


def draw(popularity: np.ndarray, kept: np.ndarray, count: int, rng) -> np.ndarray:
    """`kept` and others, `count` different experts in all."""
    weights = popularity.copy()
    weights[kept] = 0
    others = rng.choice(len(weights), count - len(kept), replace=False, p=weights / weights.sum())
    return np.concatenate([kept, others])


def save(path: Path, trace: np.ndarray, experts: int) -> None:
    np.savez_compressed(path, trace=trace.astype(np.uint16), experts=experts)
    print(f"{path}: {trace.shape[0]} tokens, {trace.shape[1]} layers, {trace.shape[2]} of {experts} experts")


def run_replay(options: argparse.Namespace) -> None:
    with np.load(options.trace) as file:
        trace, experts = file["trace"].astype(np.int64), int(file["experts"])
    total = trace.shape[1] * experts
    reuse = previous_recall(trace)
    print(f"{trace.shape[0]} tokens, {trace.shape[1]} layers; the previous token had {reuse:.1%} of a token's experts")
    print(f"{'slots':>8} {'share':>6} {'LRU':>7} {'Belady':>7} {'misses found by previous':>25} {'by predicted':>12}")
    rows = []
    for slots in options.slots or [max(int(total * share), trace.shape[2]) for share in SHARES]:
        row = replay(trace, experts, slots, options.recall)
        rows.append(row)
        print(
            f"{slots:8} {slots / total:6.1%} {row['lru']:7.1%} {row['belady']:7.1%} "
            f"{row['previous']:25.1%} {row['predicted']:12.1%}"
        )
    print(json.dumps({"previous_recall": reuse, "recall": options.recall, "rows": rows}))


def previous_recall(trace: np.ndarray) -> float:
    same = trace[1:, :, :, None] == trace[:-1, :, None, :]
    return float(same.any(-1).mean())


def replay(trace: np.ndarray, experts: int, slots: int, recall: float) -> dict:
    """Hit rates of a pool of `slots` blocks, and what was predicted of the misses."""
    keys = trace + experts * np.arange(trace.shape[1])[None, :, None]
    hits = lru(keys.reshape(-1), slots).reshape(trace.shape)
    known = (trace[1:, :, :, None] == trace[:-1, :, None, :]).any(-1)
    misses = ~hits[1:]
    predicted = np.random.default_rng(0).random(trace.shape) < recall
    return {
        "slots": slots,
        "lru": float(hits.mean()),
        "belady": float(belady(keys.reshape(-1), slots).mean()),
        "previous": float((known & misses).sum() / max(misses.sum(), 1)),
        "predicted": float((predicted & ~hits).sum() / max((~hits).sum(), 1)),
    }


def lru(keys: np.ndarray, slots: int) -> np.ndarray:
    """Whether each access of `keys` [N] hits a pool of `slots` in least-recently-used order."""
    pool: OrderedDict[int, None] = OrderedDict()
    hits = np.zeros(len(keys), bool)
    for i, key in enumerate(keys.tolist()):
        if key in pool:
            hits[i] = True
            pool.move_to_end(key)
            continue
        if len(pool) == slots:
            pool.popitem(last=False)
        pool[key] = None
    return hits


def belady(keys: np.ndarray, slots: int) -> np.ndarray:
    """The same when the block whose next use is farthest away gives way: no policy hits more."""
    following = next_uses(keys)
    due: dict[int, int] = {}  # block in the pool -> its next use
    farthest: list[tuple[int, int]] = []
    hits = np.zeros(len(keys), bool)
    for i, key in enumerate(keys.tolist()):
        hits[i] = key in due
        if not hits[i] and len(due) == slots:
            while due.get(-farthest[0][1]) != -farthest[0][0]:
                heapq.heappop(farthest)  # out of date: used again since
            del due[-heapq.heappop(farthest)[1]]
        due[key] = following[i]
        heapq.heappush(farthest, (-following[i], -key))
    return hits


def next_uses(keys: np.ndarray) -> list[int]:
    """For each access, when the same block is used next; len(keys) if never."""
    following, last = [len(keys)] * len(keys), {}
    for i in range(len(keys) - 1, -1, -1):
        following[i] = last.get(int(keys[i]), len(keys))
        last[int(keys[i])] = i
    return following


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""Records which experts a model uses, invents such traces, and replays them against cache sizes.

    scripts/bench/routing_trace.py record --model DIR trace.npz
    scripts/bench/routing_trace.py record --model DIR --text FILE --tokens 1024 --sequences 8 trace.npz
    scripts/bench/routing_trace.py synthesize --reuse 0.35 trace.npz
    scripts/bench/routing_trace.py synthesize --sequences 4 --unions 1.55 2.45 trace.npz
    scripts/bench/routing_trace.py synthesize --drafts 2 --reuse 0.43 trace.npz
    scripts/bench/routing_trace.py replay trace.npz

A trace is an array [tokens, layers, K] of expert ids. The replay prints, for pools of several sizes shared by all
layers, the hit rates of least-recently-used order, of least-frequently-used order, of ours (experts/ranking.py) and of
Belady's, which knows the future and bounds every policy; of the misses under LRU, the share that the previous token's
experts contain, and the share that a predicted set with the given recall contains; and the share of layers all of
whose experts were there. With `--text` a model reads texts instead of answering, and the trace also has what the
routers of the next two layers would choose for each layer's hidden state. Then the replay adds what `Lookahead` makes
of it, if every read ends before its layer runs: hits, layers without a miss, and reads relative to none ahead.

A trace of several sequences that take steps together is an array [sequences, tokens, layers, K]. Of such a one the
replay prints for 1, 2, 4, ... of them how many different experts their rows ask for, over one row's, and the misses of
a token in a pool of each size.

A trace for drafts has the same form: sequence 0 is the text, and sequence n holds, for each position, the experts of
the nth row from the first wrong draft on.
"""

import argparse
import contextlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from simulated_pool import SimulatedPool, belady, lfu, lru, run_ours

from moeflux_mlx.experts.lookahead import Predictor

DISTANCES = 1, 2  # layers between a hidden state and the router that is asked early
SHARES = (0.05, 0.1, 0.2, 0.3, 0.5, 0.75)
UNIONS = (1.55, 2.45)
SPELLED = {"lru": "LRU", "lfu": "LFU", "belady": "Belady"}


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
    record.add_argument("--text", type=Path, help="a file that the model reads instead of generating text")
    for name, value, text in (
        ("tokens", 1024, "of each text"),
        ("sequences", 1, "texts, evenly spread over the file"),
        ("prefix", 0, "tokens that all texts begin with and that are not in the trace; the texts follow in a row"),
        ("start", 0, "tokens of the file that are left out"),
    ):
        record.add_argument(f"--{name}", type=int, default=value, help=f"with --text: {text} (%(default)s)")
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
    made_up.add_argument("--sequences", type=int, default=1, help="that take steps together (%(default)s)")
    made_up.add_argument("--drafts", type=int, default=0, help="of a step, for a trace for drafts (%(default)s)")
    made_up.add_argument(
        "--unions",
        type=float,
        nargs=2,
        default=UNIONS,
        metavar=("TWO", "FOUR"),
        help="experts that the rows of two and of four sequences ask for, over one row's (%(default)s)",
    )
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

    if options.text is not None:
        read_texts(options)
        return

    model, tokenizer = load(options.model)
    model.decode_step = None  # the compiled step of a GPU gives nobody its experts
    recorder = Recorder(model)
    for _ in stream_generate(model, tokenizer, options.prompt, max_tokens=options.max_tokens):
        pass
    save(options.trace, recorder.trace(), model.args.num_experts)


def read_texts(options: argparse.Namespace) -> None:
    """Writes the trace of a model that reads texts from a file: the choices of every token, also those that the routers
    of later layers would make early.
    """
    import mlx.core as mx

    from moeflux_mlx import load

    model, tokenizer = load(options.model)
    traces, guesses = [], []
    for tokens in passages(tokenizer.encode(options.text.read_text(encoding="utf-8")), options):
        recorder = Recorder(model, most=len(tokens), ahead=True)
        model(mx.array(tokens)[None], model.make_cache())
        traces.append(recorder.trace()[options.prefix :])
        guesses.append(recorder.guessed()[:, :, options.prefix :])
        for layer in recorder.layers:
            model.layers[layer].mlp.experts = recorder.routed
    trace = np.stack(traces) if options.sequences > 1 else traces[0]
    save(options.trace, trace, model.args.num_experts, ahead=np.stack(guesses).astype(np.float32))


def passages(text: Sequence[int], options: argparse.Namespace) -> list[list[int]]:
    """The tokens of each text: evenly spread over the file, or, with a common prefix, in a row behind it."""
    count, length, prefix = options.sequences, options.tokens, options.prefix
    text = text[options.start :]
    step = length if prefix else max((len(text) - length) // max(count - 1, 1), length)
    if prefix + (count - 1) * step + length > len(text):
        raise SystemExit(f"error: {options.text} has {len(text)} tokens, too few for {count} texts of {length}")
    return [[*text[:prefix], *text[at : at + length]] for at in range(prefix, prefix + count * step, step)]


class Traced:
    """Replaces the choice of a model's routers by a trace. A GPU is waited for as it would be for the choice.

    Attributes:
        rows: the experts [R, layers, K] of the next step's rows; None: the router's own choices.
    """

    def __init__(self, model, trace: np.ndarray):
        self.trace, self.rows, self.layers = trace, None, model.args.moe_layers
        self.routed = model.layers[self.layers[0]].mlp.experts
        self.source = self.routed.source
        model.decode_step = None  # the compiled step of a GPU asks nobody
        for layer in self.layers:
            model.layers[layer].mlp.experts = self

    @contextlib.contextmanager
    def requesting(self, sequences: np.ndarray, tokens: np.ndarray) -> Iterator[np.ndarray]:
        """In a step made in this context, row i requests the experts of `sequences[i]` at `tokens[i]`. The trace begins
        anew at its end. Yields the experts [R, layers, K].
        """
        self.rows = self.trace[sequences, tokens % self.trace.shape[1]]
        try:
            yield self.rows
        finally:
            self.rows = None

    def wants_guess(self, layer, tokens):
        return False

    def expect(self, layer, tokens):
        self.routed.expect(layer, tokens)

    def in_pieces(self, *given):
        return self.routed.in_pieces(*given)

    def __call__(self, routing, x, *rest):
        if self.rows is None:
            return self.routed(routing, x, *rest)
        wait_for(routing)
        ids = self.rows[:, self.layers.index(routing.layer)].astype(np.int32)
        return self.routed(type(routing)(routing.layer, ids, routing.weights), x, *rest)


def wait_for(routing):
    """Waits until the host could read the choice."""
    if not isinstance(routing.ids, np.ndarray):
        import mlx.core as mx

        mx.eval(routing.host_copy or routing.ids)


class Recorder:
    """Is called before a model's routed experts and notes what every row asks for.

    Args:
        most: rows of a call that is noted; the prompt of an answer has more.
        ahead: whether to note also what the routers of the next two layers would choose for a layer's hidden state.
    """

    def __init__(self, model, most: int = 1, ahead: bool = False):
        self.layers, self.model, self.most, self.ahead = model.args.moe_layers, model, most, ahead
        self.rows = {layer: [] for layer in self.layers}
        self.guesses = {(distance, layer): [] for distance in DISTANCES for layer in self.layers}
        self.routed = model.layers[self.layers[0]].mlp.experts
        self.source = self.routed.source
        for layer in self.layers:
            model.layers[layer].mlp.experts = self

    def wants_guess(self, layer, tokens):
        return self.routed.wants_guess(layer, tokens)

    def expect(self, layer, tokens):
        self.routed.expect(layer, tokens)

    def __call__(self, routing, x, residual, *rest):
        self.note(routing, residual)
        return self.routed(routing, x, residual, *rest)

    def in_pieces(self, routing, x, residual, *rest):
        self.note(routing, residual)
        return self.routed.in_pieces(routing, x, residual, *rest)

    def note(self, routing, residual) -> None:
        if len(routing.ids) <= self.most:
            self.rows[routing.layer].append(np.array(routing.ids))
            if self.ahead:
                self.guess(self.layers.index(routing.layer), residual)

    def guess(self, place: int, residual) -> None:
        """Notes the experts that the next layers would choose for the stream [T, D], and their weights."""
        for distance in DISTANCES:
            if place + distance < len(self.layers):
                later = self.layers[place + distance]
                layer = self.model.layers[later]
                _, _, ids, weights, *_ = layer.mlp.prepare(residual[None], layer.post_attention_layernorm)
                self.guesses[distance, later].append(np.stack([np.array(ids), np.array(weights)]))

    def trace(self) -> np.ndarray:
        """[tokens, layers, K]."""
        return np.stack([np.concatenate(self.rows[layer]) for layer in self.layers], axis=1)

    def guessed(self) -> np.ndarray:
        """[distances, 2, tokens, layers, K]: ids and weights; -1 in layers that nobody can predict."""
        tokens, _, top_k = self.trace().shape
        none = [np.full((2, tokens, top_k), -1)]
        by_layer = [
            [np.concatenate(self.guesses[distance, layer] or none, axis=1) for layer in self.layers]
            for distance in DISTANCES
        ]
        return np.stack([np.stack(one, axis=2) for one in by_layer])


def run_synthesize(options: argparse.Namespace) -> None:
    shape, rng = (options.tokens, options.layers, options.top_k), np.random.default_rng(options.seed)
    if options.drafts:
        shape = (1 + options.drafts, *shape)
        trace = synthesize_drafts(shape, options.experts, options.reuse, options.skew, rng)
    elif options.sequences == 1:
        trace = synthesize(shape, options.experts, options.reuse, options.skew, rng)
    else:
        trace = synthesize_together(
            (options.sequences, *shape), options.experts, options.reuse, options.skew, options.unions, rng
        )
    save(options.trace, trace, options.experts)


def synthesize(shape: tuple[int, int, int], experts: int, reuse: float, skew: float, rng) -> np.ndarray:
    """Each token keeps `reuse` of the previous token's experts, on average, and draws the others by popularity."""
    return synthesize_drafts((1, *shape), experts, reuse, skew, rng)[0]


def synthesize_drafts(shape: tuple[int, int, int, int], experts: int, reuse: float, skew: float, rng) -> np.ndarray:
    """Returns a trace for drafts. A row follows the row before it in its step as a token follows a token in
    `synthesize`, so rows of a step share as many experts whether or not their drafts are right.
    """
    sequences, tokens, layers, top_k = shape
    trace = np.empty(shape, np.int64)
    for layer in range(layers):
        popularity = rng.permutation(np.arange(1, experts + 1) ** -float(skew))
        for t in range(tokens):
            for s in range(sequences):
                before = trace[max(s - 1, 0), t - 1, layer] if t else np.array([], int)
                trace[s, t, layer] = draw(popularity, before[rng.random(len(before)) < reuse], top_k, rng)
    return trace


def synthesize_together(
    shape: tuple[int, int, int, int], experts: int, reuse: float, skew: float, unions: tuple[float, float], rng
) -> np.ndarray:
    """Returns a trace of several sequences. `unions` is how many different experts two and four rows request together,
    relative to one row.

    In each layer all sequences choose from a set of experts that keeps `reuse` of its members from token to token.
    Every row chooses the same part of the set, `common` of one row's experts. A row chooses its other experts from the
    rest of the set, each with probability q. So n rows request common + (1 - common) * (1 - (1 - q)^n) / q times one
    row's experts. A row keeps what it has chosen as long as the set keeps it.
    """
    sequences, tokens, layers, top_k = shape
    common, q = shares_of(unions)
    rest = round((1 - common) * top_k / q)
    if rest + top_k > experts:
        raise SystemExit(f"error: unions of {unions} take {rest + top_k} experts of a layer; there are {experts}")
    trace = np.empty(shape, np.int64)
    for layer in range(layers):
        popularity = rng.permutation(np.arange(1, experts + 1) ** -float(skew))
        shared, others = np.array([], int), np.array([], int)
        chosen = [np.array([], int)] * sequences
        for t in range(tokens):
            count = int(common * top_k + rng.random())
            shared, before = shared[rng.random(len(shared)) < reuse][:count], others
            others = others[rng.random(len(others)) < reuse]
            circle = draw(popularity, np.concatenate([shared, others]), count + rest, rng)
            fresh = circle[len(shared) + len(others) :]
            joining = count - len(shared)
            shared, others = np.concatenate([shared, fresh[:joining]]), np.concatenate([others, fresh[joining:]])
            for s in range(sequences):
                kept = chosen[s][np.isin(chosen[s], others)][: top_k - count]
                new = rng.permutation(others[~np.isin(others, before)])[: top_k - count - len(kept)]
                left = others[~np.isin(others, np.concatenate([kept, new]))]
                more = rng.permutation(left)[: top_k - count - len(kept) - len(new)]
                chosen[s] = np.concatenate([kept, new, more])
                trace[s, t, layer] = np.concatenate([shared, chosen[s]])
    return trace


def shares_of(unions: tuple[float, float]) -> tuple[float, float]:
    """Returns the share of a row's experts that all rows have in common, and the probability that a row chooses another
    expert of the set, for which two and four rows request as many experts as `unions` says. (four - 1) / (two - 1) = 1
    + z + z^2, where z = 1 - q."""
    two, four = unions
    z = (np.sqrt(4 * (four - 1) / (two - 1) - 3) - 1) / 2
    common = 1 - (two - 1) / z
    if not (0 < z < 1 and 0 <= common < 1):
        raise SystemExit(f"error: no rows choose so that two ask for {two} and four for {four} times one row's experts")
    return common, 1 - z


def draw(popularity: np.ndarray, kept: np.ndarray, count: int, rng) -> np.ndarray:
    """Draws further experts by popularity, so that with `kept` there are `count` different ones."""
    weights = popularity.copy()
    weights[kept] = 0
    others = rng.choice(len(weights), count - len(kept), replace=False, p=weights / weights.sum())
    return np.concatenate([kept, others])


def save(path: Path, trace: np.ndarray, experts: int, **more: np.ndarray) -> None:
    np.savez_compressed(path, trace=trace.astype(np.uint16), experts=experts, **more)
    *several, tokens, layers, top_k = trace.shape
    of = f"{several[0]} sequences, " if several else ""
    print(f"{path}: {of}{tokens} tokens, {layers} layers, {top_k} of {experts} experts")


def run_replay(options: argparse.Namespace) -> None:
    with np.load(options.trace) as file:
        trace, experts = file["trace"].astype(np.int64), int(file["experts"])
        ahead = file.get("ahead")
    if trace.ndim == 4:
        replay_together(trace, experts, options.slots)
        trace = trace.reshape(-1, *trace.shape[2:])  # one text after the other
    if ahead is not None and ahead.ndim == 6:  # [sequences, distances, 2, tokens, layers, K]
        ahead = np.concatenate(list(ahead), axis=2)
    total = trace.shape[1] * experts
    reuse = previous_recall(trace)
    print(f"{trace.shape[0]} tokens, {trace.shape[1]} layers; the previous token had {reuse:.1%} of a token's experts")
    report = {"previous_recall": reuse, "recall": options.recall}
    if ahead is not None:
        report["lookahead"] = [guess_quality(trace, ahead, distance) for distance in DISTANCES]
        for distance, row in zip(DISTANCES, report["lookahead"], strict=True):
            print(
                f"{distance} layers ahead the router finds {row['recall']:.1%} of a layer's experts; "
                f"{row['guessed']:.2f} are trusted, {row['precision']:.1%} of them rightly"
            )
    report["rows"] = rows = []
    for slots in options.slots or [max(int(total * share), trace.shape[2]) for share in SHARES]:
        rows.append(replay(trace, experts, slots, options.recall, ahead))
        rates = [f"{SPELLED.get(name, name)} {rate:.1%}" for name, rate in rows[-1].items() if name != "slots"]
        print(f"{slots:8} {slots / total:6.1%} " + ", ".join(rates))
    print(json.dumps(report))


def guess_quality(trace: np.ndarray, ahead: np.ndarray, distance: int) -> dict[str, float]:
    """The share of a layer's experts that its router finds `distance` layers ahead, the number that `Predictor` trusts,
    and the share of these that are used.
    """
    used = trace[:, distance:]
    ids, weights = ahead[distance - 1, :, :, distance:]
    trusted = weights >= Predictor().confidence * weights.max(axis=-1, keepdims=True)
    found = (used[..., None] == ids[..., None, :]).any(-1)
    right = (ids[..., None] == used[..., None, :]).any(-1)
    return {
        "recall": float(found.mean()),
        "guessed": float(trusted.sum(-1).mean()),
        "precision": float(right[trusted].mean()),
    }


def replay_together(trace: np.ndarray, experts: int, pools: list[int] | None) -> None:
    total, counts = trace.shape[2] * experts, [1 << i for i in range(len(trace).bit_length())]
    print(f"{'sequences':>9} {'unions':>7}  misses of a token by slots")
    rows = []
    for count in counts:
        asked = steps_of(trace[:count])
        union = sum(map(len, asked)) / trace[0].size
        slots = pools or [int(total * share) for share in SHARES]
        misses = [missed(asked, size) / (count * trace.shape[1]) for size in slots]
        print(f"{count:9} {union:7.3f}  " + ", ".join(f"{m:.2f} of {n}" for m, n in zip(misses, slots, strict=True)))
        rows.append({"sequences": count, "union": union, "misses": dict(zip(slots, misses, strict=True))})
    print(json.dumps({"rows": rows}))


def steps_of(trace: np.ndarray) -> list[np.ndarray]:
    """Yields the experts that each layer of each step of a trace [sequences, tokens, layers, K] requests, each expert
    once.
    """
    by_step = np.moveaxis(trace, 0, 2)
    return [np.unique(ids) + layer * (1 << 20) for of_step in by_step for layer, ids in enumerate(of_step)]


def missed(asked: list[np.ndarray], slots: int) -> int:
    """Returns how many requests a pool with the loader's order of eviction misses, counted after the pool has been
    full: those of the second half, twice.
    """
    pool, half = SimulatedPool(int(max(keys[0] >> 20 for keys in asked)) + 1, 1 << 20, slots), len(asked) // 2
    for i, keys in enumerate(asked):
        layer = int(keys[0] >> 20)
        if layer == 0:
            pool.ranking.pass_time(1)
        if i == half:
            hits = pool.hits
        pool.request(layer, keys & 0xFFFFF)
    return 2 * (sum(map(len, asked[half:])) - pool.hits + hits)


def previous_recall(trace: np.ndarray) -> float:
    same = trace[1:, :, :, None] == trace[:-1, :, None, :]
    return float(same.any(-1).mean())


def replay(trace: np.ndarray, experts: int, slots: int, recall: float, ahead: np.ndarray | None = None) -> dict:
    """Returns for a pool of `slots` records the hit rates of several orders of eviction, the share of the misses that
    were predicted, and, if the trace has predictions, what reading ahead makes of them.
    """
    keys = trace + experts * np.arange(trace.shape[1])[None, :, None]
    hits = lru(keys.reshape(-1), slots).reshape(trace.shape)
    known = (trace[1:, :, :, None] == trace[:-1, :, None, :]).any(-1)
    misses = ~hits[1:]
    predicted = np.random.default_rng(0).random(trace.shape) < recall
    own = run_ours(trace, experts, slots)
    row = {
        "slots": slots,
        "lru": float(hits.mean()),
        "lfu": float(lfu(keys.reshape(-1), slots).mean()),
        "ours": own.hits / trace.size,
        "belady": float(belady(keys.reshape(-1), slots).mean()),
        "previous": float((known & misses).sum() / max(misses.sum(), 1)),
        "predicted": float((predicted & ~hits).sum() / max((~hits).sum(), 1)),
        "lru_whole_layers": float(hits.all(-1).mean()),
        "ours_whole_layers": own.whole / trace[..., 0].size,
    }
    for distance in DISTANCES if ahead is not None else ():
        pool = run_ours(trace, experts, slots, ahead[distance - 1], distance)
        row |= {
            f"ahead_{distance}": pool.hits / trace.size,
            f"ahead_{distance}_whole_layers": pool.whole / trace[..., 0].size,
            f"ahead_{distance}_reads": pool.reads / max(own.reads, 1),
        }
    return row


if __name__ == "__main__":
    main()

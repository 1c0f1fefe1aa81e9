#!/usr/bin/env python3
"""Compares tokens per second with and without drafts, in turns, with the same text each time.

    scripts/bench/bench_drafts.py [--variant qwen3.6-35b-a3b] [--layers N] [--draft lookup|head] [--right 0.8]
    scripts/bench/bench_drafts.py --model demo [--draft lookup|head] [--prompt TEXT ...] [--rounds 9] [--tokens 192]
    scripts/bench/bench_drafts.py --model DIR --trace FILE [--expert-io pread] [--expert-cache-gb G] [--drive-mbps M]

With `--variant` weights are random and every expert is resident, as in `bench_decode.py`; the proposals are the model's
own continuation, of which the share `--right` is right, evenly spread (0.8: every fifth is wrong); with `--draft head`
a random head also computes its own proposals, at full cost. With `--model` a model is loaded, and proposals come from
its text or its head; several prompts are answered one after the other. Depth "auto" is chosen by measurement; a number
is always checked; 0 is no drafts. Each round runs every depth once, in an order that turns. Prints a table, and ends
with one JSON line: medians, and the median ratio to no drafts of the same round.

With `--trace` (routing_trace.py synthesize --drafts) prompt, proposals and head are those of a variant, but each token
requests the experts that the trace has for its position, and so does the row of a right draft. Rows from a wrong draft
on request other experts. Nothing is read ahead. The report then has for each depth the experts of a step over one
row's, `union`; the experts read per token, `read`; how many of the steps' requests a pool of that size misses per token
in the loader's order of eviction, `missed`; the ratio to no drafts if only these misses took time, `allowed` (of
"auto": the highest of all depths); and how much of it the speed has reached, `reached`. The last two are missing if the
pool holds every expert of the text, which then needs more tokens.
"""

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import mlx.core as mx
import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
from bench_decode import add_variant, ours, variant_config
from routing_trace import Traced, missed, steps_of
from streamed import add_options, add_trace, held_drive, settings, trace_of

from moeflux_mlx import load, load_model
from moeflux_mlx.caches.layer_cache import MOST_DRAFTS
from moeflux_mlx.driving import decoding
from moeflux_mlx.driving import drafts as drafts_module
from moeflux_mlx.driving.drafts import HeadDrafts
from moeflux_mlx.driving.generation import generate_step
from moeflux_mlx.experts.memory import page_aligned
from moeflux_mlx.experts.routed import RoutedExperts
from moeflux_mlx.experts.whole import HeldExperts
from moeflux_mlx.formats.record import ExpertLayout
from moeflux_mlx.kept.measured import choose_tiles
from moeflux_mlx.model.decoder import Model
from moeflux_mlx.model.drafting import Drafting
from moeflux_mlx.model.head import DraftHead
from moeflux_mlx.model.step import SequenceRows, Step
from moeflux_mlx.model.tensors import needed, stored_as
from moeflux_mlx.opening.heads import RESIDENT
from moeflux_mlx.opening.random_weights import Shapes, random_records, randomise
from moeflux_mlx.planning.settings import configure_mlx
from moeflux_mlx.spec import ModelArgs

STORY = "Tell me a story about Tom. Then tell me the same story again, word for word."


class Guided(HeadDrafts):
    """A head that computes its proposals at full cost, but returns proposals that it is given."""

    told: "Told"

    def propose(self, count: int) -> list[int]:
        self.told.count = len(self.tokens) - self.told.start
        return self.told.propose(count) if len(super().propose(count)) else []


class Told:
    """Proposes the known continuation of the text, except for an evenly spread share of wrong tokens."""

    def __init__(self, answer: Sequence[int], right: float, start: int = 0):
        self.answer, self.right, self.start, self.count = answer, right, start, 0

    def add(self, token: int, hidden: object = None) -> None:
        self.count += 1

    def may_propose(self) -> bool:
        return bool(self.propose(1))

    def propose(self, count: int) -> list[int]:
        rest = self.answer[self.count : self.count + max(count, 0)]
        return [token if self._is_right(self.count + i) else (token + 1) % 1000 for i, token in enumerate(rest)]

    def _is_right(self, place: int) -> bool:
        return int((place + 1) * self.right) > int(place * self.right)


class TracedText:
    """Makes the steps of a model for one text, whose rows request the experts of a trace by their position.

    Attributes:
        text: the known tokens.
        asked: the experts that the layers of the steps have requested, as `steps_of` returns them.
    """

    def __init__(self, model: Model, trace: np.ndarray, text: Sequence[int]):
        self.traced, self.make_step, self.text = Traced(model, trace), model.step, list(text)
        self.last, self.asked = len(trace) - 1, list[np.ndarray]()
        model.step = self.step

    def step(self, sequences: Sequence[SequenceRows]) -> Step:
        (rows,) = sequences
        start, count = rows.cache[0].offset, rows.count
        wrong = np.minimum(wrong_rows(list(map(int, rows.tokens)), self.text[start : start + count]), self.last)
        with self.traced.requesting(wrong, start + np.arange(count)) as experts:
            self.asked += steps_of(experts[:, None])
            return self.make_step(sequences)


def wrong_rows(tokens: Sequence[int], text: Sequence[int]) -> np.ndarray:
    """Returns 0 for each row of the text, then 1, 2, ... from the first wrong token on. Tokens beyond the known text
    are the text's.
    """
    wrong = [token != known for token, known in zip(tokens, text, strict=False)]
    wrong += [False] * (len(tokens) - len(wrong))
    return np.cumsum(np.logical_or.accumulate(wrong))


def answered(model: Model, prompts: Sequence[list[int]], tokens: int) -> tuple[list[list[int]], float, int]:
    """Returns the texts, and after the first token of each the tokens per second and the experts read."""
    texts, seconds, read = [], 0.0, 0
    for prompt in prompts:
        said, start = [], 0.0
        for token, _ in generate_step(prompt, model, max_tokens=tokens):
            if not said:
                start, before = time.perf_counter(), model.experts.stats.misses
            said.append(token)
        seconds += time.perf_counter() - start
        read += model.experts.stats.misses - before
        texts.append(said)
    return texts, sum(len(said) - 1 for said in texts) / seconds, read


def drafting(depth: str, kind: str) -> Drafting:
    if depth == "0":
        return Drafting()
    return Drafting(kind) if depth == "auto" else Drafting(kind, int(depth), fixed=True)


def guide(plain: Sequence[int], prompt: Sequence[int], right: float) -> None:
    """Sets the proposals from here on: `plain`, of which the share `right` is correct."""
    decoding.Lookup = lambda text: Told(plain, right)
    drafts_module.HeadDrafts, Guided.told = Guided, Told(plain, right, len(prompt))


class Depth:
    """The runs of one depth.

    Attributes:
        rates: tokens per second of each round.
        read: experts read in all rounds.
        asked: the experts that all rounds have requested, as of `TracedText`.
        drafting: that of the last round.
    """

    def __init__(self) -> None:
        self.rates, self.read, self.asked, self.drafting = list[float](), 0, list[np.ndarray](), Drafting()

    def add(self, rate: float, read: int, asked: list[np.ndarray]) -> None:
        self.rates.append(rate)
        self.read += read
        self.asked += asked

    def report(self, plain: "Depth") -> dict[str, object]:
        ratio = statistics.median(a / b for a, b in zip(self.rates, plain.rates, strict=True))
        made = self.drafting
        return {
            "tokens_per_second": statistics.median(self.rates), "ratio": ratio, "checked": made.checked,
            "taken": made.taken, "steps": list(made.steps),
        }  # fmt: skip

    def report_reads(self, model: Model, tokens: int) -> dict[str, float]:
        """`tokens`: those of all rounds."""
        asked, row = list(map(len, self.asked)), model.args.num_experts_per_tok
        misses = missed(2 * self.asked, model.experts.slots) / 2  # the first pass fills the pool
        return {"union": statistics.mean(asked) / row, "read": self.read / tokens, "missed": misses / tokens}


def measure(
    model: Model, prompts: list[list[int]], options: argparse.Namespace, traced: TracedText | None
) -> dict[str, dict]:
    model.drafting = Drafting()
    plain, *_ = answered(model, prompts, options.tokens)
    if options.right is not None:
        guide(plain[0], prompts[0], options.right)
    if traced is not None:
        traced.text += plain[0]
    runs = {depth: Depth() for depth in options.depths}
    for turn in range(options.rounds + 1):  # the first one compiles
        at = turn % len(options.depths)
        for depth in options.depths[at:] + options.depths[:at]:
            model.drafting = runs[depth].drafting = drafting(depth, options.draft)
            asked = [] if traced is None else traced.asked
            asked.clear()
            said, *counts = answered(model, prompts, options.tokens)
            assert said == plain, f"another text at depth {depth}"
            if turn:
                runs[depth].add(*counts, asked)
    return results(model, runs, options, traced is not None and model.experts.slots > 0)


def results(model: Model, runs: dict[str, Depth], options: argparse.Namespace, counts_reads: bool) -> dict[str, dict]:
    rows = {depth: run.report(runs["0"]) for depth, run in runs.items()}
    if counts_reads:
        for depth, run in runs.items():
            rows[depth] |= run.report_reads(model, options.rounds * (options.tokens - 1))
        add_allowed(rows)
    for depth, row in rows.items():
        print(f"depth {depth:4s} {row}", flush=True)
    return rows


def add_allowed(rows: dict[str, dict]) -> None:
    """Adds `allowed` and `reached` to the report of each depth, if each has misses."""
    if not all(row["missed"] for row in rows.values()):
        return
    for row in rows.values():
        row["allowed"] = rows["0"]["missed"] / row["missed"]
    if "auto" in rows:
        rows["auto"]["allowed"] = max(row["allowed"] for row in rows.values())
    for row in rows.values():
        row["reached"] = row["ratio"] / row["allowed"]


def random_model(options: argparse.Namespace) -> Model:
    return ours(ModelArgs.from_dict(variant_config(options)), choose_tiles("code"))


def random_head(model: Model) -> DraftHead:
    """Returns a draft head with random weights, quantised like one that is loaded from floats."""
    args = model.args.head
    assert args is not None, f"no head is known of {model.model_type}"
    layout = ExpertLayout.from_args(args)
    matrices = needed(args, kind=DraftHead).matrices
    quants = {path: stored_as(args, path, shape[-1], RESIDENT) for path, shape in matrices.items()}
    record = layout.records[0]
    rows = page_aligned(layout.num_experts, record.stride // 4)
    rows[:] = np.array(random_records(record, layout.num_experts).blob)
    head = DraftHead(args, RoutedExperts(HeldExperts(layout, {0: rows}), "off"))
    randomise(head, "", Shapes(args, layout, quants, model.activation_dtype))
    mx.eval(head.parameters())
    return head


def opened(options: argparse.Namespace) -> tuple[Model, list[list[int]], TracedText | None]:
    """Returns a model, the prompts that it answers, and its text's trace, if there is one."""
    if options.model is not None and options.trace is None:
        path = None if options.model == "demo" else options.model
        model, tokenizer = load(path, draft=options.draft, **settings(options))
        chats = [[{"role": "user", "content": text}] for text in options.prompt]
        return model, [tokenizer.apply_chat_template(chat) for chat in chats], None
    model = random_model(options) if options.model is None else load_model(options.model, **settings(options))
    if options.draft == "head":
        model.attach(random_head(model))
    prompt = mx.random.randint(0, min(model.args.vocab_size, 10000), (options.prompt_tokens,)).tolist()
    traced = None if options.trace is None else TracedText(model, trace_of(options, sequences=2), prompt)
    return model, [prompt], traced


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add_variant(parser)
    parser.add_argument("--model", help="demo, or a model's directory")
    parser.add_argument("--draft", choices=("lookup", "head"), default="lookup")
    parser.add_argument("--prompt", nargs="+", default=[STORY], help="of a model that is loaded")
    parser.add_argument("--prompt-tokens", type=int, default=512, help="of a random prompt (%(default)s)")
    parser.add_argument("--right", type=float, help="share of right proposals; default: 0.8 if the prompt is random")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--tokens", type=int, default=192)
    parser.add_argument("--depths", nargs="+", default=["0", "auto", *map(str, range(1, MOST_DRAFTS + 1))])
    add_options(parser)
    add_trace(parser)
    options = parser.parse_args()
    options.depths = list(dict.fromkeys(["0", *options.depths]))
    if options.right is None and (options.model is None or options.trace is not None):
        options.right = 0.8
    configure_mlx()
    model, prompts, traced = opened(options)
    with held_drive(options):
        rows = measure(model, prompts, options, traced)
    case = {"model": options.model or options.variant, "draft": options.draft, "right": options.right}
    print(json.dumps({**case, "load": os.getloadavg()[0], "depths": rows}))


if __name__ == "__main__":
    main()

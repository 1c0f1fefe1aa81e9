#!/usr/bin/env python3
"""Compares tokens per second with and without drafts, in turns, with the same text each time.

    scripts/bench/bench_drafts.py [--variant qwen3.6-35b-a3b] [--layers N] [--draft lookup|head] [--right 0.8]
    scripts/bench/bench_drafts.py --model demo [--draft lookup|head] [--prompt TEXT ...] [--rounds 9] [--tokens 192]

With `--variant` weights are random and every expert is resident, as in `bench_decode.py`; the proposals are the model's
own continuation, of which the share `--right` is right, evenly spread (0.8: every fifth is wrong); with `--draft head`
a random head also computes its own proposals, at full cost. With `--model` a model is loaded, and proposals come from
its text or its head; several prompts are answered one after the other. Depth "auto" is chosen by measurement; a number
is always checked; 0 is no drafts. Each round runs every depth once, in an order that turns. Prints a table, and ends
with one JSON line: medians, and the median ratio to no drafts of the same round.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import mlx.core as mx

sys.path.insert(0, str(Path(__file__).parent))
from bench_decode import RandomExperts, ours
from make_random_model import shrunk

from moeflux_mlx import load
from moeflux_mlx.cli.run import configure_mlx
from moeflux_mlx.engine import decoding, head_drafts
from moeflux_mlx.engine.generation import generate_step
from moeflux_mlx.engine.head_drafts import HeadDrafts
from moeflux_mlx.engine.random_weights import Shapes, randomise
from moeflux_mlx.engine.tiles import choose
from moeflux_mlx.experts.routed import RoutedExperts
from moeflux_mlx.files import directory, read_json
from moeflux_mlx.formats.record import ExpertLayout
from moeflux_mlx.model.decoder import Model
from moeflux_mlx.model.drafting import Drafting
from moeflux_mlx.model.head import DraftHead
from moeflux_mlx.model.tensors import needed, stored_as
from moeflux_mlx.packing.heads import RESIDENT
from moeflux_mlx.spec import ModelArgs, variants
from moeflux_mlx.state.layer_cache import MOST_DRAFTS

PROMPT = 512
STORY = "Tell me a story about Tom. Then tell me the same story again, word for word."


class Guided(HeadDrafts):
    """A head that computes its proposals at full cost, but returns proposals that it is given."""

    told: "Told"

    def propose(self, count: int) -> list[int]:
        self.told.count = len(self._tokens) - self.told.start
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


def answered(model: Model, prompts: Sequence[list[int]], tokens: int) -> tuple[list[list[int]], float]:
    """Returns the texts, and for each the tokens per second after its first token."""
    texts, seconds = [], 0.0
    for prompt in prompts:
        said, start = [], 0.0
        for token, _ in generate_step(prompt, model, max_tokens=tokens):
            start = start or time.perf_counter()
            said.append(token)
        seconds += time.perf_counter() - start
        texts.append(said)
    return texts, sum(len(said) - 1 for said in texts) / seconds


def drafting(depth: str, kind: str) -> Drafting:
    if depth == "0":
        return Drafting()
    return Drafting(kind) if depth == "auto" else Drafting(kind, int(depth), fixed=True)


def guide(plain: Sequence[int], prompt: Sequence[int], right: float) -> None:
    """Sets the proposals from here on: `plain`, of which the share `right` is correct."""
    decoding.Lookup = lambda text: Told(plain, right)
    head_drafts.HeadDrafts, Guided.told = Guided, Told(plain, right, len(prompt))


def measure(model: Model, prompts: list[list[int]], options: argparse.Namespace) -> dict[str, object]:
    model.drafting = Drafting()
    plain, _ = answered(model, prompts, options.tokens)
    if options.right is not None:
        guide(plain[0], prompts[0], options.right)
    rates: dict[str, list[float]] = {depth: [] for depth in options.depths}
    last: dict[str, Drafting] = {}
    for turn in range(options.rounds + 1):  # the first one compiles
        at = turn % len(options.depths)
        for depth in options.depths[at:] + options.depths[:at]:
            model.drafting = last[depth] = drafting(depth, options.draft)
            said, rate = answered(model, prompts, options.tokens)
            assert said == plain, f"another text at depth {depth}"
            rates[depth] += [rate] if turn else []
    results = {}
    for depth, own in rates.items():
        ratio = statistics.median(a / b for a, b in zip(own, rates["0"], strict=True))
        made = last[depth]
        results[depth] = {
            "tokens_per_second": statistics.median(own), "ratio": ratio, "checked": made.checked, "taken": made.taken,
            "steps": list(made.steps),
        }  # fmt: skip
        print(f"depth {depth:4s} {results[depth]}", flush=True)
    return results


def random_model(options: argparse.Namespace) -> Model:
    config = shrunk(read_json(directory("configs") / f"{options.variant}.json"), options.layers, None)
    model = ours(ModelArgs.from_dict(config), choose("code"))
    if options.draft == "head":
        model.attach(random_head(model.args))
    return model


def random_head(model: ModelArgs) -> DraftHead:
    """Returns a draft head with random weights, quantised like one that is loaded from floats."""
    args = model.head
    assert args is not None, f"no head is known of {model.model_type}"
    layout = ExpertLayout.from_args(args)
    matrices = needed(args, kind=DraftHead)[0]
    quants = {path: stored_as(args, path, shape[-1], RESIDENT) for path, shape in matrices.items()}
    head = DraftHead(args, RoutedExperts(RandomExperts(layout), "off"))
    randomise(head, "", Shapes(args, layout, quants, mx.bfloat16))
    mx.eval(head.parameters())
    return head


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--variant", default="qwen3.6-35b-a3b", choices=variants())
    parser.add_argument("--layers", type=int)
    parser.add_argument("--model", help="demo, or a model's directory")
    parser.add_argument("--draft", choices=("lookup", "head"), default="lookup")
    parser.add_argument("--prompt", nargs="+", default=[STORY])
    parser.add_argument("--right", type=float, help="share of proposals that are right; default: 0.8 with --variant")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--tokens", type=int, default=192)
    parser.add_argument("--depths", nargs="+", default=["0", "auto", *map(str, range(1, MOST_DRAFTS + 1))])
    options = parser.parse_args()
    options.depths = list(dict.fromkeys(["0", *options.depths]))
    configure_mlx()
    if options.model is None:
        model, options.right = random_model(options), 0.8 if options.right is None else options.right
        prompts = [mx.random.randint(0, 10000, (PROMPT,)).tolist()]
    else:
        model, tokenizer = load(None if options.model == "demo" else options.model, draft=options.draft)
        prompts = [tokenizer.apply_chat_template([{"role": "user", "content": one}]) for one in options.prompt]
    results = measure(model, prompts, options)
    said = {"model": options.model or options.variant, "draft": options.draft, "right": options.right}
    print(json.dumps({**said, "depths": results}))


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""Measures an answer while another sequence's prompt is computed, and that prompt, in turns with each of them alone.

    scripts/bench/bench_company.py [--variant qwen3.6-35b-a3b] [--layers N] [--prompt 8192] [--decode-share 0.333]
    scripts/bench/bench_company.py --model DIR [--expert-io pread] [--expert-cache-gb G] [--drive-mbps M]

A variant gets random weights with all experts in memory; a directory is loaded. As in the server's worker, steps of the
answer run between two waves, blocks or layers of the prompt, for their share of the time (`TurnPace`). Prints for each
round the milliseconds from one token to the next, median and 95 %, alone and beside the prompt, and the prompt's
seconds alone and beside the answer. Ends with one JSON line: medians over the rounds, and the ratio of the prompt's
times, a median of the rounds' ratios.
"""

import argparse
import json
import os
import time
from typing import Any

import mlx.core as mx
import numpy as np
from bench_batch import decoding
from bench_decode import add_variant, ours, variant_config
from measuring import medians, quartiles, random_prompt
from streamed import add_options, held_drive, settings

from moeflux_mlx import load_model
from moeflux_mlx.driving.decoding import Decoding
from moeflux_mlx.driving.loop import absorb_prompt, advance_together
from moeflux_mlx.driving.prefill import Prefill
from moeflux_mlx.planning.settings import configure_mlx
from moeflux_mlx.server.running import Totals
from moeflux_mlx.server.worker import TurnPace
from moeflux_mlx.spec import ModelArgs


def main() -> None:
    options = parser().parse_args()
    configure_mlx()
    model = model_of(options)
    answer = decoding(model, random_prompt(model, options.answer_prompt, seed=0))
    rounds = []
    with held_drive(options):
        for i in range(-1, options.rounds):
            row = one_round(model, answer, random_prompt(model, options.prompt, seed=1 + i), options)
            print("warm-up" if i < 0 else f"round {i + 1}", row, flush=True)
            rounds += [row] if i >= 0 else []
    print(json.dumps({"prompt": options.prompt, "load": os.getloadavg()[0], **report(rounds)}))


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add_variant(made)
    made.add_argument("--model", help="a directory to load in place of a variant")
    add_options(made)
    made.add_argument("--prompt", type=int, default=8192, help="tokens (%(default)s)")
    made.add_argument("--answer-prompt", type=int, default=256, help="tokens before the answer (%(default)s)")
    made.add_argument("--decode-share", type=float, default=1 / 3)
    made.add_argument("--tokens", type=int, default=200, help="of the answer alone in a round (%(default)s)")
    made.add_argument("--rounds", type=int, default=9)
    return made


def model_of(options: argparse.Namespace) -> Any:
    if options.model is not None:
        return load_model(options.model, **settings(options))
    return ours(ModelArgs.from_dict(variant_config(options)))


def one_round(model: Any, answer: Decoding, prompt: list[int], options: argparse.Namespace) -> dict[str, float]:
    """Returns milliseconds of tokens and seconds of prompts."""
    alone = gaps([next_token(answer) for _ in range(options.tokens)])
    prompt_alone, _ = run_prompt(model, prompt, None, options.decode_share)
    prompt_beside, times = run_prompt(model, prompt, answer, options.decode_share)
    beside = gaps(times)
    return {
        **{"alone": float(np.median(alone)), "beside": float(np.median(beside))},
        **{"beside_95": float(np.quantile(beside, 0.95)), "tokens_beside": len(beside)},
        **{"prompt_alone": prompt_alone, "prompt_beside": prompt_beside, "longer": prompt_beside / prompt_alone},
    }


def next_token(answer: Decoding) -> float:
    """Computes one token of the answer; returns when it was there."""
    advance_together([answer])
    return time.perf_counter()


def gaps(times: list[float]) -> np.ndarray:
    """Milliseconds from one token to the next."""
    return 1e3 * np.diff(times)


def run_prompt(model: Any, prompt: list[int], answer: Decoding | None, share: float) -> tuple[float, list[float]]:
    """Computes a prompt, and tokens of the answer for their share of the time; returns the prompt's seconds and the
    times of the tokens.
    """
    pace, times = TurnPace(share, Totals()), list[float]()
    mx.synchronize()
    start = began = time.perf_counter()
    for _ in absorb_prompt(Prefill(model, model.make_cache(), mx.array(prompt, mx.uint32))):
        pace.computed(time.perf_counter() - began, answer is not None)
        while answer is not None and pace.is_due:
            began = time.perf_counter()
            times.append(next_token(answer))
            pace.stepped(times[-1] - began)
        began = time.perf_counter()
    return time.perf_counter() - start, times


def report(rounds: list[dict[str, float]]) -> dict[str, Any]:
    made: dict[str, Any] = {name: round(value, 3) for name, value in medians(rounds).items()}
    return made | {"longer_quartiles": [round(value, 3) for value in quartiles(row["longer"] for row in rounds)]}


if __name__ == "__main__":
    main()

"""How fast several sequences decode together, for `benchmark --parallel`."""

import statistics
import time
from collections.abc import Sequence

import numpy as np

from ..driving.batch_generation import BatchGenerator
from ..errors import RequestError
from ..model.step import MAX_ROWS
from ..opening.engine import Engine
from .terminal import note

Rates = dict[int, list[float]]  # by number of sequences: tokens a second of all together, in each round


def check_numbers(numbers: Sequence[int], engine: Engine) -> None:
    """Raises RequestError if this number of sequences cannot decode together."""
    if min(numbers) < 1 or max(numbers) > MAX_ROWS:
        raise RequestError(f"--parallel {max(numbers)}: 1 to {MAX_ROWS} sequences decode together")
    if engine.lead is not None:
        raise RequestError("several ranks decode one sequence at a time; leave --parallel out")


def parallel_rates(engine: Engine, numbers: Sequence[int], prompt_tokens: int, max_tokens: int, rounds: int) -> Rates:
    """Every round of each number, the numbers in turn, every second round backwards."""
    rates: Rates = {number: [] for number in numbers}
    for turn in range(rounds):
        for number in list(numbers)[:: -1 if turn % 2 else 1]:
            rates[number].append(rate(engine, number, prompt_tokens, max_tokens, turn))
            note(f"{number} together: {rates[number][-1]:.1f} tokens a second")
    return rates


def rate(engine: Engine, number: int, prompt_tokens: int, max_tokens: int, seed: int) -> float:
    """Tokens a second from when all sequences have a token; a prompt begins at each step, and all end together."""
    model = engine.model
    prompts = np.random.default_rng(seed).integers(0, model.args.vocab_size, (number, prompt_tokens)).tolist()
    generator = BatchGenerator(model, completion_batch_size=number)
    generator.insert(prompts, [max_tokens + number - 1 - i for i in range(number)])
    while len(generator.next()) < number:
        pass
    start = time.perf_counter()
    count = sum(len(told) for told in generator)
    return count / (time.perf_counter() - start)


def parallel_table(rates: Rates) -> list[str]:
    """A line for each number, with the median of what each round gave over the fewest sequences."""
    fewest = rates[min(rates)]
    lines = [f"{'sequences':>9}{'tokens/s':>10}{'over ' + str(min(rates)):>9}"]
    for number, own in rates.items():
        ratio = statistics.median(one / alone for one, alone in zip(own, fewest, strict=True))
        lines.append(f"{number:9}{statistics.median(own):10.1f}{ratio:8.2f}x")
    return lines

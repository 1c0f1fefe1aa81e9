"""Chooses bits within a budget: where they lessen the error most for their bytes."""

import heapq
from collections.abc import Mapping, Sequence
from typing import TypeVar

from ..errors import ConfigError
from .errors import Option

Where = TypeVar("Where")


def spend(options: Mapping[Where, Sequence[Option]], budget: int) -> dict[Where, Option]:
    """Chooses an option for each key, so that the sum of errors is small and that of bytes is at most `budget`.

    It begins with the smallest options and takes the steps along each key's lower convex hull in the order of error
    saved per byte, as far as they fit. That is the least sum of errors but for the last steps.

    Raises:
        ConfigError: the smallest options take more.
    """
    hulls = {key: hull(given) for key, given in options.items()}
    chosen = {key: 0 for key in hulls}
    left = budget - sum(one[0].nbytes for one in hulls.values())
    if left < 0:
        raise ConfigError(
            f"the smallest forms of the routed experts take {budget - left:,} bytes; the budget is {budget:,}"
        )
    order = {key: number for number, key in enumerate(hulls)}  # keys need not compare
    steps = [(-_gain(one, 0), order[key], key) for key, one in hulls.items() if len(one) > 1]
    heapq.heapify(steps)
    while steps:
        _, number, key = heapq.heappop(steps)
        at, one = chosen[key], hulls[key]
        price = one[at + 1].nbytes - one[at].nbytes
        if price > left:
            continue  # another key's step may be smaller
        left, chosen[key] = left - price, at + 1
        if at + 2 < len(one):
            heapq.heappush(steps, (-_gain(one, at + 1), number, key))
    return {key: hulls[key][at] for key, at in chosen.items()}


def hull(options: Sequence[Option]) -> list[Option]:
    """The options of the lower convex hull, by size: each saves less error per byte than the one before."""
    kept: list[Option] = []
    for one in sorted(options, key=lambda option: (option.nbytes, option.error)):
        if kept and one.error >= kept[-1].error:
            continue
        while len(kept) > 1 and _between(kept[-1], one) >= _between(kept[-2], kept[-1]):
            kept.pop()
        kept.append(one)
    return kept


def _between(one: Option, other: Option) -> float:
    """The error that the larger option saves for each of its additional bytes."""
    return (one.error - other.error) / (other.nbytes - one.nbytes)


def _gain(options: Sequence[Option], at: int) -> float:
    return _between(options[at], options[at + 1])

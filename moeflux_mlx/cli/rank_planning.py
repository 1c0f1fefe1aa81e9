"""Prints how fast several machines would run a model: disks, pools and the link between them.

Arithmetic on a plan, for machines that are alike. Computing is left out on both sides, as it is the same.
"""

import math
from dataclasses import dataclass

import numpy as np

from ..errors import RequestError
from ..formats.record import ExpertLayout
from ..planning.memory_plan import MemoryPlan
from ..spec import ModelArgs

MOST_RANKS = 64
LINK_US, LINK_GB_PER_S = 300.0, 1.0  # of the link if the options name none
HIT_POWER = 0.4  # relative to the share of experts in the pools: as measured on texts of streamed models
DRAWS = 4096
FLOAT_BYTES = 4


@dataclass(frozen=True)
class Machines:
    """Args:
    ranks: how many.
    seconds: of a message from one to the next.
    rate: bytes that one receives in a second.
    """

    ranks: int
    seconds: float
    rate: float


def machines_of(ranks: int | None, link_us: float | None, link_gb_per_s: float | None) -> Machines | None:
    """The machines of the options, with a usual link where None is given; None if there is only one machine.

    Raises:
        RequestError: a value is impossible.
    """
    if ranks is None or ranks == 1:
        if link_us is not None or link_gb_per_s is not None:
            raise RequestError(
                "--link-us and --link-gb-per-s are for several machines; give --ranks N, or leave them out"
            )
        return None
    link_us = LINK_US if link_us is None else link_us
    link_gb_per_s = LINK_GB_PER_S if link_gb_per_s is None else link_gb_per_s
    if not 1 < ranks <= MOST_RANKS:
        raise RequestError(f"--ranks is {ranks}; it must be from 1 to {MOST_RANKS}")
    if not 0 < link_us < 1e6 or not 0 < link_gb_per_s < 1e6:
        raise RequestError(f"--link-us {link_us} and --link-gb-per-s {link_gb_per_s} must be positive and below 1e6")
    return Machines(ranks, link_us / 1e6, link_gb_per_s * 1e9)


def rank_lines(
    args: ModelArgs,
    layout: ExpertLayout,
    alone: MemoryPlan,
    each: MemoryPlan,
    machines: Machines,
    disk: int,
) -> list[str]:
    """How `machines` compare with one of them.

    Args:
        layout: of all experts.
        alone: the plan of one machine.
        each: of one of several.
        disk: bytes per second of each machine's.
    """
    N, layers = machines.ranks, len(layout.moe_layers)
    own, span = layout.total_bytes // N, min(alone.sizes.span, alone.context)
    exchange = _exchange_seconds(args, machines, layers)
    held = own if each.stays else min(each.pool, own)
    rows = args.num_experts_per_tok * args.hidden_size * FLOAT_BYTES * layers
    link = span * rows * (N - 1) / N / machines.rate
    single = _token_seconds(args, layout, alone, 1, disk)
    several = _token_seconds(args, layout, each, N, disk) + exchange
    prompt_single = 0.0 if alone.stays else layout.total_bytes / disk
    prompt_several = max(0.0 if each.stays else own / disk, link)
    return [
        f"{N} machines: each holds {held / 1e9:.1f} of its {own / 1e9:.1f} GB of experts, all together "
        f"{min(N * held / layout.total_bytes, 1):.0%}; one alone {_share(alone, layout):.0%}",
        f"an exchange of rows for each of {layers} layers takes {exchange * 1000:.1f} ms of a token",
        f"at most, without computing, with disks of {disk / 1e9:.3g} GB/s:",
        f"{'tokens/s, 1 machine':30}{_rate(single)}",
        f"{f'tokens/s, {N} machines':30}{_rate(several)}",
        f"{f'{span} tokens, 1 machine':30}{prompt_single:10.1f} s",
        f"{f'{span} tokens, {N} machines':30}{prompt_several:10.1f} s  (link alone {link:.1f} s)",
        f"faster for answers: {_faster(N, single, several)}; for prompts: {_faster(N, prompt_single, prompt_several)}",
    ]  # fmt: skip


def _exchange_seconds(args: ModelArgs, machines: Machines, layers: int) -> float:
    """Seconds per token: in each layer N - 1 messages, each as long as the rows of the rank with the most."""
    most = _busiest(args.num_experts_per_tok, machines.ranks, 1.0)
    nbytes = math.ceil(most) * args.hidden_size * FLOAT_BYTES
    return layers * (machines.ranks - 1) * (machines.seconds + nbytes / machines.rate)


def _token_seconds(args: ModelArgs, layout: ExpertLayout, plan: MemoryPlan, ranks: int, disk: int) -> float:
    """Seconds per token for reading missing experts: in each layer those of the rank that misses most. Every rank reads
    all value experts of a token.
    """
    missing = 1 - _share(plan, layout, ranks) ** HIT_POWER
    routed = sum(layout.records[layer].size for layer in layout.moe_layers)
    values = sum(args.router_of(i).top_k * one.size for i, one in layout.records.items() if i not in layout.moe_layers)
    return (_busiest(args.num_experts_per_tok, ranks, missing) * routed + missing * values) / disk


def _share(plan: MemoryPlan, layout: ExpertLayout, ranks: int = 1) -> float:
    """The share of all experts that is in memory."""
    return 1.0 if plan.stays else min(ranks * plan.pool / layout.total_bytes, 1.0)


def _busiest(experts: int, ranks: int, missing: float) -> float:
    """Experts that the busiest of the ranks must read, of so many that may each be missing."""
    random = np.random.default_rng(0)
    owner = random.integers(0, ranks, (DRAWS, experts))
    misses = random.random((DRAWS, experts)) < missing
    counts = [((owner == rank) & misses).sum(axis=1) for rank in range(ranks)]
    return float(np.max(counts, axis=0).mean())


def _faster(count: int, single: float, several: float) -> str:
    """Which takes fewer seconds: one machine, or `count`."""
    return "1 machine" if single <= several else f"{count} machines"


def _rate(seconds: float) -> str:
    return f"{1 / seconds:12.2f}" if seconds else f"{'no limit':>12}"

"""Prints what a known model should reach on Macs, from the public figures of their chips."""

import argparse
from collections.abc import Sequence

from ..errors import RequestError
from ..opening.reach import (
    ASSUMED_SHARE,
    BANDWIDTH_SHARE,
    LAUNCH_SECONDS,
    POSITIONS,
    RATE_SHARE,
    WAIT_SECONDS,
    Mac,
    Reach,
    Speed,
)
from .options import NOT_GIVEN, gigabytes, written

PROMPTS = (512, 4096)
OWN = ("chips", "variant", "ram_gb", "disk_gb_per_s")  # the options that matter here


def run(options: argparse.Namespace) -> int:
    """Prints the table; returns 0."""
    if options.variant is None:
        raise RequestError("--chip needs a known model; give --variant")
    given = {name: value for name, value in vars(options).items() if name not in OWN and value}
    others = [name for name, value in given.items() if value != NOT_GIVEN.get(name)]
    if others:
        raise RequestError(f"{written(others[0])} has no effect with --chip; leave one of them out")
    memory, disk = gigabytes("--ram-gb", options.ram_gb), gigabytes("--disk-gb-per-s", options.disk_gb_per_s)
    reach = Reach(options.variant)
    print("\n".join(lines_of(options.variant, reach, [Mac.of(name, memory, disk) for name in options.chips])))
    return 0


def lines_of(name: str, reach: Reach, macs: Sequence[Mac]) -> list[str]:
    """What a token and a prompt of the variant `name` take, a line for each Mac, and the assumptions."""
    prompts = "; of ".join(
        f"{count} tokens: {reach.operations(count) / 1e12:.1f} TFLOP and {(reach.dense + reach.used(count)) / 1e9:.1f} "
        "GB of weights"
        for count in PROMPTS
    )
    return [
        f"{name} in 4 bits, computed from the public figures of Apple's chips; nothing was measured",
        f"a token moves {reach.token / 1e9:.2f} GB: {reach.dense / 1e9:.2f} of resident weights, "
        f"{reach.routed / 1e9:.2f} of experts, {reach.state / 1e9:.2f} of state and {POSITIONS} positions",
        f"a token takes {reach.launches(False)} launches; where experts are streamed {reach.launches(True)}, and "
        f"{reach.waits} waits for the GPU",
        f"a prompt of {prompts}",
        "",
        "tokens/s at most, and about:",
        f"{'chip':9}{'memory':>8}{'GB/s':>6}{'TFLOPS':>8}{'disk':>6}{'all in memory':>16}{'streamed':>20}"
        + "".join(f"{f'prompt of {count}':>18}" for count in PROMPTS),
        *(line_of(reach, mac) for mac in macs),
        "",
        "* The experts do not all fit this memory. At most: all of the bandwidth, arithmetic and disk, at the same",
        f"time. About: {BANDWIDTH_SHARE:.0%} of the bandwidth, {RATE_SHARE:.0%} of the arithmetic, "
        f"{1e6 * LAUNCH_SECONDS:.1f} us a launch, {1e3 * WAIT_SECONDS:.1f} ms a wait, and in decoding",
        "the disk after the GPU. Streamed: this share of the experts is in memory (50 % where all fit), and a router",
        "uses all equally often; real ones repeat experts, which is faster. Prompts: with the experts that fit. The",
        "TFLOPS from M5 on are those of the matrix units.",
    ]


def line_of(reach: Reach, mac: Mac) -> str:
    """The figures of one Mac."""
    start = f"{mac.name:9}{mac.memory / 2**30:>4.0f} GiB{mac.chip.bandwidth:>6.0f}{mac.rate / 1e12:>8.1f}"
    start += f"{mac.disk / 1e9:>6.1f}"
    share = reach.share(mac)
    if share is None:
        return f"{start}{'does not fit':>16}"
    streamed = share if share < 1 else ASSUMED_SHARE
    cells = [
        f"{said(reach.decode(mac)) + ('*' if share < 1 else ' '):>16}",
        f"{f'{streamed:.0%}: {said(reach.decode(mac, streamed))}':>20}",
        *(f"{said(reach.prompt(mac, count, share)):>18}" for count in PROMPTS),
    ]
    return start + "".join(cells)


def said(speed: Speed) -> str:
    """Both speeds, with a decimal below ten."""
    return ", ".join(f"{one:,.{1 if one < 10 else 0}f}" for one in (speed.most, speed.about))

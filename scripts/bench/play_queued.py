#!/usr/bin/env python3
"""Prints what layers that are queued ahead of their choice (`model/optimistic.py`) should bring on Macs.

    scripts/bench/play_queued.py [--variant NAME] [--chip NAME]...

The layers of a streamed token are played through with assumed times of the host and the disk, and with the GPU's of
`opening/reach.py`. A layer that lacks experts lacks one. What is read ahead has arrived when its layer is computed.
Nothing is measured. `GROUPINGS` has Metal's forms by it.
"""

import argparse
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from moeflux_mlx.model.optimistic import GROUPINGS, Grouping
from moeflux_mlx.opening.reach import BANDWIDTH_SHARE, LAUNCH_SECONDS, WAIT_SECONDS, Mac, Reach

CHIPS = ("M1", "M2 Max", "M3 Pro", "M4 Max", "M5 Max")
SHARES = (1.0, 0.99, 0.95, 0.9, 0.8, 0.6)  # of layers that have all experts in memory
TOKENS = 100  # that are played
# Seconds of the host to queue a layer and to accept one, about as beside an H200; of a read before its first byte; and
# between two groups on the GPU.
QUEUE_SECONDS, ACCEPT_SECONDS, READ_SECONDS, GROUP_SECONDS = 0.07e-3, 0.02e-3, 0.15e-3, 0.02e-3
# The share of missing experts that the layer before predicts, published for real models as 0.53 to 0.89; and that a
# dropped layer tells, 0.95 for the demo model.
PREDICTED, TOLD = 0.7, 0.85


@dataclass(frozen=True)
class LayerTimes:
    """Seconds: of the GPU for a layer, of the host's wait for the GPU, and of the bytes of one record."""

    gpu: float
    wait: float
    read: float


class Played:
    """Tokens that pass `layers` layers.

    Args:
        times: of a layer.
        share: of the layers that have all experts in memory.

    Attributes:
        seconds: of the host so far.
    """

    def __init__(self, layers: int, times: LayerTimes, share: float):
        self._layers, self._times, self._share, self._rng = layers, times, share, random.Random(0)
        self.seconds = self._gpu = 0.0  # when the host and the GPU have done what they were given

    def _lacking(self) -> list[bool]:
        return [self._rng.random() >= self._share for _ in range(self._layers)]

    def wait(self) -> None:
        """A token whose host waits for every choice."""
        for is_lacking in self._lacking():
            is_read = is_lacking and self._rng.random() >= PREDICTED
            self.seconds += self._times.gpu + self._times.wait + is_read * (READ_SECONDS + self._times.read)
        self._gpu = self.seconds = self.seconds + self._times.wait  # for the token that is sampled

    def queue(self, how: Grouping) -> None:
        """A token whose layers are queued."""
        lacking, number, queued = self._lacking(), 0, deque[tuple[range, float]]()
        while number < self._layers or queued:
            while number < self._layers and len(queued) < how.ahead:
                end = min(number - (number + how.shorter) % how.together + how.together, self._layers)
                self.seconds += (end - number) * QUEUE_SECONDS
                self._gpu = max(self._gpu, self.seconds) + (end - number) * self._times.gpu + GROUP_SECONDS
                queued.append((range(number, end), self._gpu))
                number = end
            group, computed = queued.popleft()
            self.seconds = max(self.seconds, computed + self._times.wait)
            missing = next((layer for layer in group if lacking[layer]), None)
            self.seconds += (len(group) if missing is None else missing + 1 - group.start) * ACCEPT_SECONDS
            if missing is not None:
                self._repeat(lacking, missing, number)
                queued.clear()
                number = missing + 1
        self.seconds += self._times.wait  # for the token that is sampled

    def _repeat(self, lacking: list[bool], missing: int, dropped: int) -> None:
        """The layer that lacked an expert, behind what is queued; dropped layers' experts are read beside its own."""
        self.seconds += READ_SECONDS + self._times.read + QUEUE_SECONDS
        self._gpu = max(self.seconds, self._gpu) + self._times.gpu / 2
        for layer in range(missing + 1, dropped):
            lacking[layer] = lacking[layer] and self._rng.random() >= TOLD


def token_seconds(layers: int, times: LayerTimes, share: float, is_queued: bool) -> float:
    """Seconds of a token of which this share of the layers has all experts in memory."""
    played = Played(layers, times, share)
    fitting = (how for how in GROUPINGS["metal"] if share >= how.share and times.gpu <= how.most)
    how = next(fitting, None) if is_queued else None
    for _ in range(TOKENS):
        if how is None:
            played.wait()
        else:
            played.queue(how)
    return played.seconds / TOKENS


def rates(reach: Reach, mac: Mac, hits: float) -> tuple[float, float]:
    """Tokens per second, about, where this share of the layers has all experts in memory: if the host waits for each
    choice, and if layers are queued ahead of it.
    """
    gpu = reach.token / mac.bandwidth / BANDWIDTH_SHARE + reach.launches(True) * LAUNCH_SECONDS
    read = reach.routed / sum(reach.args.router_of(number).top_k for number in reach.layout.records) / mac.disk
    times = LayerTimes(gpu / reach.waits, WAIT_SECONDS, read)
    waiting, queued = (1 / token_seconds(reach.waits, times, hits, is_queued) for is_queued in (False, True))
    return waiting, queued


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--variant", default="qwen3.6-35b-a3b")
    parser.add_argument("--chip", action="append", help=f"a Mac's chip; by default {', '.join(CHIPS)}")
    options = parser.parse_args(argv)
    reach = Reach(options.variant)
    print(f"{'chip':9}" + "".join(f"{share:>12.0%}" for share in SHARES))
    for mac in map(Mac.of, options.chip or CHIPS):
        pairs = (rates(reach, mac, share) for share in SHARES)
        print(f"{mac.name:9}" + "".join(f"{', '.join(f'{one:.0f}' for one in pair):>12}" for pair in pairs))


if __name__ == "__main__":
    main()

"""Chooses how many drafts a step checks, from the measured time of steps and the share of accepted drafts.

A draft is a cheaply proposed token that a step of the model checks. Drafts change when a token is computed, never which
token. This module does not know where drafts come from.
"""

import math
from collections.abc import Iterator, Sequence

from ..caches.layer_cache import MOST_DRAFTS

WINDOW = 32  # drafts, or steps of a depth, after which older measurements count for a third
EXPECTED = 0.5  # assumed share of accepted drafts before any measurement
WARM_UP = 1  # first steps of a depth, which do not count: kernels are compiled, temporaries allocated
SAMPLES = 2  # steps of a depth before it is compared
FIRST_PAUSE, LONGEST_PAUSE = 32, 256  # steps until a depth that did not pay is tried again
DOUBT = 1.0  # standard errors that may favour drafts, on either side
NO_TIME = 1e-9  # seconds, for what has not been measured
FAR_OFF = 3.0  # the most times the mean that a step counts for, so that a pause of the process does not count


class _Mean:
    """A mean in which older values fade, and the variance of the values."""

    def __init__(self, value: float = 0.0, weight: float = 0.0):
        self.value, self.weight, self._variance = value, weight, 0.0

    def add(self, value: float) -> None:
        self.weight = min(self.weight + 1, WINDOW)
        step = (value - self.value) / self.weight
        self._variance += (value - self.value - step) * step - self._variance / self.weight
        self.value += step

    @property
    def error(self) -> float:
        """The standard error of the mean."""
        return math.sqrt(max(self._variance, 0.0) / max(self.weight - 1, 1))


class _Depth:
    """Measurements of steps that check a number of drafts.

    Attributes:
        count: how many there have been.
        seconds: of one.
        last: the number of all steps when it was tried last.
        pause: steps from then until it is tried again.
    """

    def __init__(self) -> None:
        self.count, self.last, self.pause = 0, 0, FIRST_PAUSE
        self.seconds = _Mean()

    @property
    def is_known(self) -> bool:
        return self.seconds.weight >= SAMPLES

    def add(self, seconds: float, at: int) -> None:
        """Records a step, the one with the number `at` of all. If the depth has rested, what was measured before counts
        as one step, because a text's first steps may be slower than later ones.
        """
        self.count += 1
        if self.count > WARM_UP:
            mean = self.seconds
            if at - self.last >= FIRST_PAUSE:
                mean.weight = min(mean.weight, 1.0)
            mean.add(min(seconds, FAR_OFF * mean.value) if mean.weight else seconds)

    def tried(self, at: int, pays: bool) -> None:
        """Records a trial; while the depth does not pay, the pauses grow."""
        self.last, self.pause = at, FIRST_PAUSE if pays else min(2 * self.pause, LONGEST_PAUSE)


class Drafting:
    """Chooses the depth, from 0 to `most` drafts per step, with the most tokens per second.

    A depth is tried when the one below it is known, and again from time to time, less often while it does not pay.

    Args:
        kind: where drafts come from: "off", "lookup" or "head".
        most: drafts in a step, at most.
        fixed: whether every step checks all available drafts, even if that is slower.

    Attributes:
        checked, taken: number of checked drafts so far, and of accepted ones.
    """

    def __init__(self, kind: str = "off", most: int = MOST_DRAFTS, fixed: bool = False):
        self.kind, self.fixed = kind, fixed
        self.most = 0 if kind == "off" else most
        self.checked = self.taken = 0
        self._steps = 0
        self._best = 0
        self._is_cold = False  # the last step was
        self._depths = [_Depth() for _ in range(self.most + 1)]
        self._luck = [_Mean(EXPECTED, 2.0) for _ in range(self.most)]  # by draft, if the ones before it were accepted

    @property
    def depth(self) -> int:
        """How many drafts the next step should check."""
        if self.fixed or not self.most:
            return self.most
        return 0 if self._is_cold else next(self._due(), self._best)

    @property
    def steps(self) -> Sequence[int]:
        """The number of steps by number of checked drafts, from 0 on."""
        return [depth.count for depth in self._depths]

    def add(self, drafts: int, taken: int, seconds: float, is_cold: bool = False) -> None:
        """Records the seconds of a step that checked `drafts`, of which the first `taken` were accepted. `is_cold`: a
        pool of experts was filling, and the step's time says nothing of later ones; the next step checks no drafts.
        """
        self._is_cold = is_cold
        self._steps += 1
        self.checked += drafts
        self.taken += taken
        for i in range(min(taken + 1, drafts)):
            self._luck[i].add(float(i < taken))
        depth = self._depths[drafts]
        if is_cold:
            depth.count += 1
            return
        depth.add(seconds, self._steps)
        self._best = self._chosen()
        could_pay = (1 + drafts) / max(depth.seconds.value, NO_TIME) > self.rate(self._best)
        if drafts == self._best or not (0 < drafts == taken and could_pay):  # else it is tried again while it is lucky
            depth.tried(self._steps, pays=drafts == self._best)

    def _chosen(self) -> int:
        """The known depth with the most tokens per second. Drafts must be better than none by more than chance: where
        experts have to be read, the time of a step varies by half.
        """
        known = [i for i in range(self.most + 1) if self._depths[i].is_known]
        best = max(known, key=self.rate, default=0)
        return best if best and self.rate(best, DOUBT) > self.rate(0, -DOUBT) else 0

    def rate(self, depth: int, doubt: float = 0.0) -> float:
        """The expected tokens per second of a known depth, if its steps take as many standard errors longer than
        measured as `doubt` says.
        """
        tokens = chance = 1.0
        for luck in self._luck[:depth]:
            chance *= luck.value
            tokens += chance
        seconds = self._depths[depth].seconds
        return tokens / max(seconds.value + doubt * seconds.error, NO_TIME)

    def _due(self) -> Iterator[int]:
        """The depths that are due for a trial: the best one until it is known, no drafts, and the neighbours of the
        best.
        """
        for i in dict.fromkeys((self._best, 0, self._best + 1, self._best - 1)):
            if 0 <= i <= self.most:
                depth = self._depths[i]
                rested = i != self._best and self._steps - depth.last >= depth.pause
                if rested or not depth.is_known:
                    yield i

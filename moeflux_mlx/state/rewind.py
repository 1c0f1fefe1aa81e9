"""Rewinds a model's caches to earlier positions.

Most attention caches can be cut at any position; the cache of a window can go back only a few positions. A recurrent
state cannot go back, so its copies are kept at chosen positions, and the way back leads to the nearest of them. A kept
state is a reference to arrays that the model never writes to again: keeping one costs memory but no time. This module
knows no tokens; the caller checks that the text up to a position is the same.
"""

from collections.abc import Sequence

import mlx.core as mx

from ..caches.layer_cache import Arrays, LayerCache

# A state at the end of a message stays where others have neighbours that are this many times as far apart, because an
# edited text differs from there on.
END_WORTH = 4
# So many tokens behind the start of a prompt no state is kept but that at the start: the prompt would be cut, and a few
# tokens take as long as many. The end of an answer is that near to the end of its message.
NEAR = 16


def after(start: int) -> int:
    """The position behind which a prompt that begins at `start` may be cut to keep a state."""
    return start + NEAR if start else 0


class RewindPoints:
    """Kept states of those of one list of caches that cannot be cut.

    Args:
        cache: from `model.make_cache()`; its layers have absorbed equally many tokens at each call of `keep`.
        max_bytes: of all kept states together; beyond it, the states closest to others are dropped first.

    Attributes:
        ends: the positions of states where messages end.
    """

    def __init__(self, cache: Sequence[LayerCache], max_bytes: int):
        self.cache = cache
        self.max_bytes = max_bytes
        self.set_aside = 0  # the part of `max_bytes` that something else takes at the moment
        self._untrimmable = [i for i, layer in enumerate(cache) if not layer.is_trimmable()]
        self._kept: dict[int, dict[int, Arrays]] = {}
        self.ends: set[int] = set()

    @property
    def can_trim(self) -> bool:
        """Whether every position can be reached, kept or not."""
        return not self._untrimmable

    @property
    def positions(self) -> list[int]:
        """The ascending positions of kept states; empty if every position can be reached without them."""
        return sorted(self._kept)

    @property
    def nbytes(self) -> int:
        arrays = (array for states in self._kept.values() for pair in states.values() for array in pair)
        return sum(array.nbytes for array in arrays if array is not None)

    def choose(self, start: int, end: int, wanted: Sequence[int], every: int, state_bytes: int) -> list[int]:
        """Positions after `start`, up to `end`, whose states are worth keeping while tokens up to `end` are absorbed.

        Those of `wanted` come first, the last ones before the others; then, as far as there is room beside them, one
        every so many tokens, or further apart. What is kept already makes room, but for the ends of messages
        and the last state. `start` stands for a wanted one that is `NEAR`.
        """
        if self.can_trim:
            return []
        room = max(self.max_bytes - self.set_aside, 0) // state_bytes
        inside = sorted({position for position in wanted if after(start) < position <= end})
        chosen = set(inside[-room:] if room else [])
        before = max((kept for kept in self._kept if kept <= start), default=0)
        first = before + every * ((start - before) // every + 1)
        regular = [position for position in range(first, end, every) if position not in chosen]
        spare = room - len(chosen) - len({*self.ends, before} - {0})
        if spare > 0 and regular:
            chosen |= set(regular[:: -(-len(regular) // spare)])
        return sorted(chosen)

    def keep(self, position: int, is_end: bool = True) -> None:
        """Keeps the present state, that of `position` tokens, if `max_bytes` allows. `is_end`: a message ends there."""
        if self.can_trim or position == 0:
            return
        self.add(position, {i: self.cache[i].kept() or () for i in self._untrimmable}, is_end)

    def add(self, position: int, states: dict[int, Arrays], is_end: bool) -> None:
        """Keeps these states of the layers that cannot be cut, if `max_bytes` allows."""
        mx.eval(states)  # a pending computation would keep all of its inputs alive
        self._kept[position] = states
        self.ends |= {position} if is_end else set()
        self.set_apart(self.set_aside)

    def set_apart(self, nbytes: int) -> None:
        """Reserves this part of `max_bytes` for something else; drops states until the rest suffices."""
        self.set_aside = nbytes
        while self._kept and self.nbytes + nbytes > self.max_bytes:
            dropped = self._most_crowded()
            del self._kept[dropped]
            self.ends.discard(dropped)

    def nearest(self, position: int) -> int:
        """The last position that can be reached without passing `position`; 0 always can."""
        if all(self.cache[i].reaches(position) for i in self._untrimmable):
            return position
        return max((kept for kept in self._kept if kept <= position), default=0)

    def states_at(self, position: int) -> dict[int, Arrays]:
        """The states kept at `position`, by layer; empty if there are none."""
        return self._kept.get(position, {})

    def rewind(self, position: int) -> int:
        """Takes all caches back to `nearest(position)`, which is returned; later states are dropped.

        Caches that an interrupted call left at different lengths agree again afterwards.
        """
        reached = self.nearest(position)
        kept = self._kept.get(reached, {})
        self.drop_after(reached)  # first: caches that are interrupted here are seen to disagree
        for i, layer in enumerate(self.cache):
            layer.go_back(reached, kept.get(i))
        return reached

    def drop_after(self, position: int) -> None:
        """Forgets the states of later positions."""
        self._kept = {kept: state for kept, state in self._kept.items() if kept <= position}
        self.ends &= self._kept.keys()

    def _most_crowded(self) -> int:
        """The kept position, not the last one unless alone, whose neighbours are closest together, for its worth."""
        at = [0, *self.positions]
        worth = {position: END_WORTH if position in self.ends else 1 for position in at}
        gaps = [(worth[at[i]] * (at[i + 1] - at[i - 1]), at[i]) for i in range(1, len(at) - 1)]
        return min(gaps)[1] if gaps else at[-1]

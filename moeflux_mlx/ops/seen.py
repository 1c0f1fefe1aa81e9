"""The positions to which a token attends, if it does not attend to all: chosen ones, or those of chosen blocks
(metal/seen.h.metal).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import mlx.core as mx

from .backend import AnyArray


class SeenSizes(NamedTuple):
    """The constants of metal/seen.h.metal: the number of chosen blocks; positions of each; whether a token's own block
    is never chosen, but always seen; and the number of lists of chosen blocks.
    """

    top: int
    ratio: int
    has_own: bool
    lists: int

    @property
    def most(self) -> int:
        """A limit of the positions that are seen; 0: there is none."""
        return (self.top + 1) * self.ratio if self.top else 0

    @property
    def template(self) -> dict[str, int]:
        return {"TOP": self.top, "RATIO": self.ratio, "OWN": int(self.has_own)}


SEEING_ALL = SeenSizes(0, 1, False, 1)


class SeenBlocks(NamedTuple):
    """The positions to which one token attends, if not to all: chosen blocks of `ratio` positions, and the positions
    behind the last whole block.

    chosen: the numbers of the blocks, int32 [1, 1, top], or for each key head [1, 1, kv heads, top]; ascending.
    has_own: the block of the token's own position is never among them, but always seen up to that position.
    """

    chosen: mx.array
    ratio: int = 1
    has_own: bool = False

    @property
    def sizes(self) -> SeenSizes:
        top = self.chosen.shape[-1]
        return SeenSizes(top, self.ratio, self.has_own, self.chosen.size // top)


HANDED = ("positions", "entries", "blocks", "latents", "unrotated")  # the parts of `Chosen`


@dataclass
class Chosen:
    """What layers hand on to later layers, for a block of tokens: the choice of the last layer with an indexer, the
    entries of the last one that makes some for others, and likewise latents.

    positions: int32 [B, rows, top], ascending, of the block's last tokens; None: each attends to all positions that it
        sees. entries: [B, T, .]; None: there are none. blocks: int32 [B, rows, .] of the same last tokens, the blocks
        of entries among which later indexers choose; None: among all. latents: [B, L, N + R] of the block's tokens,
        neither normed nor rotated; unrotated: [B, L, N], of the last layer without rotated keys. rows: the same for
        each row of a step, by its number.
    """

    positions: AnyArray = None
    entries: AnyArray = None
    blocks: AnyArray = None
    latents: AnyArray = None
    unrotated: AnyArray = None
    rows: "dict[int, Chosen]" = field(default_factory=dict)

    @property
    def handed(self) -> list[AnyArray]:
        """All that is handed on; None in the place of what is not there."""
        return [getattr(self, part) for part in HANDED]

    def take(self, handed: Sequence[mx.array | None]) -> None:
        """Replaces what is handed on."""
        for part, one in zip(HANDED, handed, strict=True):
            setattr(self, part, one)

    def of_row(self, row: int) -> "Chosen":
        return self.rows.setdefault(row, Chosen())

"""The processes of one model, and their only joint operation: gathering bytes.

Each process contributes equally many words and gets all of them, in rank order. Only gathering is used, because its
result does not depend on the transport, while each transport adds sums in another order. A message begins with a header
that shows which rank is out of step, and is discarded if one is. This module knows neither layers nor models.
"""

import zlib
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from ..errors import RankError
from ..ops.backend import AnyArray, Array, contiguous, library_of, of_kind

MAGIC = 0x4D464C52  # "MFLR"
HEADER = 5  # words: MAGIC, number of the message, its kind, the sender's flag, a checksum of what all must agree on
FINE, FAILED, STOPPED = 0, 1, 2


class Group(Protocol):
    """The processes. All of them must make the same calls of `gather`, in the same order, with equally many words.

    Attributes:
        limit: seconds that `gather` may take; changed between two calls, because reading a span of a prompt takes
            minutes and a token seconds.
    """

    limit: float

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    @property
    def on_device(self) -> bool:
        """Whether messages are MLX arrays on the GPU; otherwise they are numpy arrays."""

    def gather(self, words: Array) -> Array:
        """words [n] uint32 of this process -> [size, n], one row per process, computed, as numpy or MLX array.

        Raises:
            RankError: a process is gone.
        """


@dataclass(frozen=True)
class Gathered:
    """The result of an exchange: the words [size, n] and the flag of every process."""

    words: AnyArray
    flags: tuple[int, ...]

    def first(self, flag: int) -> int | None:
        """The lowest rank that raised `flag`."""
        return next((rank for rank, raised in enumerate(self.flags) if raised == flag), None)


class Exchange:
    """Gathers with a header, so that ranks that are out of step lead to an error and never to wrong numbers.

    Attributes:
        count: number of messages so far; the same on all ranks.
        is_broken: whether the connection has failed, so that nothing may be sent any more: a failed transport may wait
            forever.
        has_ended: whether an exchange has told all ranks to leave the model; the next operation resets it.
        pending: an exception of this process that is raised at the next exchange, so that all ranks stop at the same
            place.
    """

    def __init__(self, group: Group):
        self.group, self.count = group, 0
        self.is_broken = self.has_ended = False
        self.pending: BaseException | None = None

    def __call__(self, kind: int, words: Array, agreed: np.ndarray | None = None, flag: int = FINE) -> Gathered:
        """Sends `words` [n] uint32 and receives those of the others.

        Args:
            kind: what the message is about, the same on all ranks.
            words: a numpy array, or an MLX array if the group takes these.
            agreed: data that must be equal on all ranks; only its checksum is sent.
            flag: FINE, FAILED or STOPPED.

        Raises:
            RankError: a process is gone, or out of step.
        """
        if self.is_broken:
            raise RankError("the connection between the ranks is lost; start all of them again")
        self.count += 1
        checksum = 0 if agreed is None else zlib.crc32(np.ascontiguousarray(agreed).tobytes())
        header = np.array([MAGIC, self.count & 0xFFFFFFFF, kind, flag, checksum], np.uint32)
        try:
            messages, heads = self._gathered(header, words)
            for rank, theirs in enumerate(heads):
                self._check(rank, theirs, header)
        except BaseException:
            self.is_broken = True
            raise
        return Gathered(messages[:, HEADER:], tuple(int(flag) for flag in heads[:, 3]))

    def _gathered(self, header: np.ndarray, words: AnyArray) -> tuple[AnyArray, np.ndarray]:
        """All messages and their headers; if words stay on a device, only the headers come to the host."""
        messages: AnyArray = self.group.gather(library_of(words).concatenate([of_kind(header, words), words]))
        return messages, np.array(contiguous(messages[:, :HEADER]))  # a view would copy all of it to the host

    def _check(self, rank: int, theirs: np.ndarray, own: np.ndarray) -> None:
        if theirs[0] != own[0] or theirs[1] != own[1]:
            raise RankError(
                f"rank {rank} is out of step with rank {self.group.rank} at exchange {self.count}; "
                "start all ranks again, with the same command"
            )
        if theirs[2] != own[2] or (theirs[4] != own[4] and FINE == theirs[3] == own[3]):
            raise RankError(
                f"rank {rank} computed other values than rank {self.group.rank} (exchange {self.count}, "
                f"kinds {theirs[2]} and {own[2]}): the machines differ; give --share-routing"
            )

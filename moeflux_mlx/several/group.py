"""Several processes that hold parts of one model's experts, and the one thing they do together: gathering bytes.

Everybody contributes as many words, everybody gets all of them, by rank. Only gathering is used because its result does
not depend on how it is done: sums are added in another order by every transport. A message begins with a header that
tells who is out of step; nothing else of it is believed. It knows neither layers nor models.
"""

import zlib
from dataclasses import dataclass
from typing import Any, Protocol, cast

import mlx.core as mx
import numpy as np

from ..errors import RankError
from ..ops.backend import Array, leave

MAGIC = 0x4D464C52  # "MFLR"
HEADER = 5  # words: MAGIC, count of the message, its kind, the sender's flag, a sum of what all must agree on
FINE, FAILED, STOPPED = 0, 1, 2


class Group(Protocol):
    """The processes. All of them must call `gather` as often and with as many words, in the same order."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    @property
    def on_device(self) -> bool:
        """Whether messages of MLX's arrays stay where the GPU computes; else they go through numpy's."""
        ...

    def gather(self, words: Array) -> Array:
        """words [n] uint32 of this process -> [size, n], one row of each process, computed; numpy's or MLX's.

        Raises:
            RankError: a process is gone.
        """
        ...


class MlxGroup:
    """MLX's own (`mx.distributed.init`): ring over TCP, JACCL over Thunderbolt, MPI, or NCCL.

    On a Mac it runs on the CPU's stream between two evaluations: a GPU that waits for another machine's disk would be
    stopped by the system. NCCL knows the GPU only.
    """

    def __init__(self, group: mx.distributed.Group, backend: str):
        self._group, self.backend = group, backend
        self.rank, self.size = int(group.rank()), int(group.size())
        self.on_device = backend == "nccl"

    def gather(self, words: Array) -> Array:
        stream = mx.gpu if self.on_device else mx.cpu
        try:
            own: Any = words
            gathered: Any = mx.distributed.all_gather(leave(own)[None], group=self._group, stream=stream)
            mx.eval(gathered)
        except RuntimeError as error:
            others = [str(i) for i in range(self.size) if i != self.rank]
            who = f"rank {others[0]}" if len(others) == 1 else f"one of the ranks {', '.join(others)}"
            raise RankError(f"{who} is gone ({error}); see what it said last, then start all ranks again") from None
        if isinstance(own, np.ndarray):
            gathered = np.array(gathered)
        return cast(Array, gathered)


@dataclass(frozen=True)
class Gathered:
    """What came of an exchange: every process's words [size, n], as they were given, and flag."""

    words: Any
    flags: tuple[int, ...]

    def first(self, flag: int) -> int | None:
        """The lowest rank that raised `flag`."""
        return next((rank for rank, raised in enumerate(self.flags) if raised == flag), None)


class Exchange:
    """Gathers with a header, so that ranks that are out of step are an error and never wrong numbers.

    Attributes:
        count: of messages so far; the same on all ranks.
        is_broken: whether the ranks have lost each other, so that nothing may be told any more: transports that have
            failed before wait for ever.
        has_ended: whether a layer's exchange has told all ranks to leave the model; reset by whoever begins anew.
        pending: an exception of this process that waits for an exchange, so that all ranks stop in the same place.
    """

    def __init__(self, group: Group):
        self.group, self.count = group, 0
        self.is_broken = self.has_ended = False
        self.pending: BaseException | None = None

    def take_pending(self) -> BaseException | None:
        """The exception that waits, which is the caller's to raise."""
        error, self.pending = self.pending, None
        return error

    def __call__(self, kind: int, words: Array, agreed: np.ndarray | None = None, flag: int = FINE) -> Gathered:
        """Tells the others `words` [n] uint32 and hears theirs.

        Args:
            kind: what the message is about, the same on all ranks.
            words: numpy's, or MLX's where the group takes them.
            agreed: what all must have in common; only a checksum of it travels.
            flag: FINE, FAILED or STOPPED.

        Raises:
            RankError: a process is gone, or out of step.
        """
        if self.is_broken:
            raise RankError("the ranks have lost each other; start all of them again")
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

    def _gathered(self, header: np.ndarray, words: Any) -> tuple[Any, np.ndarray]:
        """All messages, and their headers, which alone come to the host where words stay on a device."""
        if isinstance(words, np.ndarray):
            messages: Any = self.group.gather(np.concatenate([header, words.astype(np.uint32, copy=False)]))
            return messages, messages[:, :HEADER]
        messages = self.group.gather(mx.concatenate([mx.array(header), words]))
        return messages, np.array(mx.contiguous(messages[:, :HEADER]))  # a view would take all of it to the host

    def _check(self, rank: int, theirs: np.ndarray, own: np.ndarray) -> None:
        if theirs[0] != own[0] or theirs[1] != own[1]:
            raise RankError(
                f"rank {rank} is out of step with rank {self.group.rank} at exchange {self.count}; "
                "start all ranks again, with the same command"
            )
        if theirs[2] != own[2] or (theirs[4] != own[4] and FINE == theirs[3] == own[3]):
            raise RankError(
                f"rank {rank} computed something else than rank {self.group.rank} (exchange {self.count}, "
                f"kinds {theirs[2]} and {own[2]}): the machines differ; give --share-routing"
            )

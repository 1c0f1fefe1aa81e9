"""The processes of one model; their only joint operation, gathering bytes; and the orders that rank 0 gives with it.

Each process contributes equally many words and gets all of them, in rank order. Only gathering is used, because its
result does not depend on the transport, while each transport adds sums in another order. A message begins with a header
that shows which rank is out of step, and is discarded if one is. This module knows neither layers nor models.

Orders have a fixed number of words, and payloads whose length the order states. Nothing is pickled, and values out of
range are refused. While there is nothing to do, rank 0 orders increasingly long naps, so that no rank keeps a core busy
waiting for the network.
"""

import time
import zlib
from dataclasses import dataclass
from enum import IntEnum
from typing import Generic, Protocol

import numpy as np

from ..errors import RankError
from ..ops.backend import Array, contiguous, library_of, of_kind

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
class Gathered(Generic[Array]):
    """The result of an exchange: the words [size, n] and the flag of every process."""

    words: Array
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

    def __call__(self, kind: int, words: Array, agreed: np.ndarray | None = None, flag: int = FINE) -> Gathered[Array]:
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

    def _gathered(self, header: np.ndarray, words: Array) -> tuple[Array, np.ndarray]:
        """All messages and their headers; if words stay on a device, only the headers come to the host."""
        messages = self.group.gather(library_of(words).concatenate([of_kind(header, words), words]))
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


ORDER, PAYLOAD = 3, 4  # kinds of messages, beside those of layers
VALUES = 8  # 64-bit values of an order
PIECE_WORDS = 1 << 20  # words of a payload in one message
MOST_BYTES = 1 << 42  # of a payload; a larger one is not one of our messages
NAP_SHARE = 0.95  # the others sleep this share of rank 0's nap, so that it finds them awake


class Order(IntEnum):
    """An order; its values are:

    IDLE: milliseconds to sleep. NEW: session, bytes of kept states, tokens between them, span, block (0: as planned),
    whether prompts are stored. DROP: session. RESPOND: session, tokens of the prompt; payload: them and the boundaries.
    KNOWN: nothing. STATE: tokens; payload: a snapshot. GO, END: the token that was chosen. SETTLE: whether a half-done
    span is kept. REWIND: session, length. LOAD: session, tokens; payload: them and a snapshot. QUIT: the exit code.
    KEEP: session. FORK: session, the new one's number, length.
    """

    IDLE = 1
    NEW = 2
    DROP = 3
    RESPOND = 4
    KNOWN = 5
    STATE = 6
    GO = 7
    END = 8
    SETTLE = 9
    REWIND = 10
    LOAD = 11
    QUIT = 12
    KEEP = 13
    FORK = 14


@dataclass(frozen=True)
class ReceivedOrder:
    """An order as it arrived."""

    order: Order
    values: tuple[int, ...]
    payload: bytes

    def tokens(self, count: int) -> tuple[list[int], bytes]:
        """The first `count` words of the payload, and the bytes after them.

        Raises:
            RankError: there are not as many.
        """
        if count * 4 > len(self.payload):
            raise RankError(f"rank 0 announced {count} tokens and sent {len(self.payload)} bytes; start all again")
        return np.frombuffer(self.payload, np.uint32, count).tolist(), self.payload[count * 4 :]


def send_order(exchange: Exchange, order: Order, *values: int, payload: bytes = b"") -> None:
    """Rank 0 gives an order. Raises RankError: a process is gone, or out of step."""
    sent = np.zeros(2 + VALUES, np.uint64)
    sent[0], sent[1], sent[2 : 2 + len(values)] = order, len(payload), values
    exchange(ORDER, sent.view(np.uint32))
    words = np.frombuffer(payload + bytes(-len(payload) % 4), np.uint32)
    for start in range(0, len(words), PIECE_WORDS):
        exchange(PAYLOAD, words[start : start + PIECE_WORDS])


def receive_order(exchange: Exchange) -> ReceivedOrder:
    """Any other rank waits for an order, asleep while there is none.

    Raises:
        RankError: a process is gone, or what arrived is no order.
    """
    empty = np.zeros(2 * (2 + VALUES), np.uint32)
    while True:
        fields = np.ascontiguousarray(exchange(ORDER, empty).words[0]).view(np.uint64)
        number, nbytes, values = int(fields[0]), int(fields[1]), tuple(fields[2:].tolist())
        if number not in set(Order) or nbytes > MOST_BYTES:
            raise RankError(
                f"rank 0 ordered {number} with {nbytes} bytes, which is not a known order; start all ranks again"
            )
        if number != Order.IDLE:
            return ReceivedOrder(Order(number), values, _payload(exchange, nbytes))
        time.sleep(min(values[0], 1000) / 1000 * NAP_SHARE)


def _payload(exchange: Exchange, nbytes: int) -> bytes:
    words, pieces = -(-nbytes // 4), []
    for start in range(0, words, PIECE_WORDS):
        empty = np.zeros(min(PIECE_WORDS, words - start), np.uint32)
        pieces.append(exchange(PAYLOAD, empty).words[0].tobytes())
    return b"".join(pieces)[:nbytes]

"""The messages of rank 0 to the others: orders of a fixed number of words, and payloads whose length the order states.

Nothing is pickled, and values out of range are refused. While there is nothing to do, rank 0 orders increasingly long
naps, so that no rank keeps a core busy waiting for the network.
"""

import time
from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from ..errors import RankError
from .group import Exchange

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

"""The ranks other than 0: they repeat every step of rank 0's sessions, and print only their own errors.

Such a rank runs the same sessions on the same tokens, so its caches hold the same numbers. Prompts, chosen tokens and
stored states come from rank 0.
"""

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import numpy as np

from ..caches.layer_cache import LayerCache
from ..driving.session import Reuse, Session
from ..errors import MoefluxError, PromptCacheError, RankError, RankStopped
from ..model.decoder import Model
from ..model.tokens import check_vocabulary
from ..state.prompt_store import Candidate
from ..state.snapshot import Stateful, load_state
from ..text.boundaries import shared_length
from ..text.tokenizer import TokenizerWrapper
from .group import Exchange, Order, ReceivedOrder, receive_order


class Elsewhere:
    """An empty `PromptStore`; rank 0 has the real one."""

    def candidates(self, tokens: np.ndarray, can_trim: bool) -> list[Candidate]:
        return []

    def refuse(self, path: Path, error: PromptCacheError) -> None:
        return None

    def save(self, model: Stateful, cache: Sequence[LayerCache], tokens: Sequence[int], behind: bytes = b"") -> None:
        return None


class FollowSession(Session):
    """The twin of a session of rank 0.

    Attributes:
        is_last: whether the last received token must not be computed.
    """

    def __init__(self, exchange: Exchange, model: Model, tokenizer: TokenizerWrapper, **options: Any):
        super().__init__(model, tokenizer, **options)
        self.exchange, self.is_last = exchange, False
        self._settled: bool | None = None

    def follow(self, prompt: list[int], boundaries: list[int]) -> None:
        """Repeats the steps of one response. Raises the error that ended it on all ranks."""
        self.is_last, self._settled, self.exchange.has_ended = False, None, False
        steps = self.respond(prompt, boundaries=boundaries, max_tokens=-1, sampler=self._chosen)
        with contextlib.closing(steps):
            for _ in steps:
                if self.is_last:
                    return
                self.exchange.has_ended = False

    def _blank(self, **options: Any) -> Session:
        return FollowSession(self.exchange, self.model, self.tokenizer, **options)

    def _chosen(self, logprobs: mx.array) -> mx.array:
        received = self._expected(Order.GO, Order.END)
        check_vocabulary(received.values[0], self.model.args.vocab_size)
        self.is_last = received.order is Order.END
        return mx.array([received.values[0]], mx.uint32)

    def _expected(self, *orders: Order) -> ReceivedOrder:
        """Raises RankStopped: rank 0 stopped. RankError: it sent something else."""
        received = receive_order(self.exchange)
        if received.order is Order.SETTLE:
            self._settled = bool(received.values[0])
            raise RankStopped("rank 0 stopped")
        if received.order not in orders:
            raise RankError(f"rank 0 ordered {received.order.name} during an answer; start all ranks again")
        return received

    @property
    def can_go_on(self) -> bool:
        """Whether the exception that has just ended an answer ended it on all ranks."""
        return self._settled is not None

    def agree_again(self, keep_half: bool) -> None:
        if self._settled is None and self.exchange.has_ended:
            with contextlib.suppress(RankStopped):
                self._expected()
        if self._settled is not None:
            super().agree_again(self._settled)

    def _reuse(self, prompt: list[int]) -> None:
        if self.store is None:
            super()._reuse(prompt)
            return
        received = self._expected(Order.KNOWN, Order.STATE)
        if received.order is Order.KNOWN:
            super()._reuse(prompt)
            return
        shared = shared_length(self.tokens, prompt[:-1])
        self.restore(prompt[: received.values[0]], received.payload, shared)
        self.reuse = Reuse(len(prompt), 0, len(self.tokens))

    def restore(self, tokens: list[int], state: bytes, shared: int) -> None:
        """Restores the session that rank 0 loaded; kept states of the first `shared` tokens stay."""
        self._drop_half()
        load_state(self.model, self.cache, state)
        self.points.drop_after(shared)
        self.tokens = tokens
        self.points.keep(len(tokens))


class Follower:
    """Carries out rank 0's orders.

    Args:
        model, tokenizer: as loaded by every rank.
        exchange: the exchange with the others.
        say: called with this rank's own errors.
    """

    def __init__(self, model: Model, tokenizer: TokenizerWrapper, exchange: Exchange, say: Callable[[str], None]):
        self.model, self.tokenizer, self.exchange, self.say = model, tokenizer, exchange, say
        self.sessions: dict[int, FollowSession] = {}

    def run(self) -> int:
        """Runs until rank 0 quits; returns the exit code.

        Raises:
            RankError: a rank is gone or out of step.
        """
        while (received := receive_order(self.exchange)).order is not Order.QUIT:
            self._do(received)
        return received.values[0]

    def _do(self, received: ReceivedOrder) -> None:
        number = received.values[0]
        match received.order:
            case Order.NEW:
                self.sessions[number] = self._new(received)
            case Order.DROP:
                self.sessions.pop(number, None)
            case Order.REWIND:
                self._session(number).rewind(received.values[1])
            case Order.KEEP:
                self._session(number).keep()
            case Order.FORK:
                self.sessions[received.values[1]] = cast(FollowSession, self._session(number).fork(received.values[2]))
            case Order.LOAD:
                tokens, state = received.tokens(received.values[1])
                self._session(number).restore(tokens, state, 0)
            case Order.RESPOND:
                self._respond(received)
            case _:
                raise RankError(f"rank 0 ordered {received.order.name} between two answers; start all ranks again")

    def _session(self, number: int) -> FollowSession:
        if number not in self.sessions:
            raise RankError(f"rank 0 continues session {number}, which this rank does not have; start all again")
        return self.sessions[number]

    def _new(self, received: ReceivedOrder) -> FollowSession:
        _, nbytes, every, span, block, stored, *_ = received.values
        return FollowSession(
            self.exchange,
            self.model,
            self.tokenizer,
            store=Elsewhere() if stored else None,
            checkpoint_bytes=nbytes,
            checkpoint_every=every,
            span=span or None,
            prefill_step_size=block or None,
        )

    def _respond(self, received: ReceivedOrder) -> None:
        session = self._session(received.values[0])
        prompt, rest = received.tokens(received.values[1])
        try:
            session.follow(prompt, np.frombuffer(rest, np.uint32).tolist())
        except RankStopped:
            if not session.can_go_on:
                raise
        except MoefluxError as error:
            if not session.can_go_on:
                raise
            self.say(f"error: {error}")

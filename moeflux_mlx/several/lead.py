"""Rank 0: makes sessions whose every step the other ranks repeat.

Only this rank has prompts, stores, samplers and users; it sends each decision before acting on it. After an error that
all ranks have received, sessions can continue; any other error leaves the ranks in different places, and ends them all.
"""

import itertools
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, cast

import mlx.core as mx

from ..driving.generation import SamplerOptions, check_max_tokens
from ..driving.loop import Outcome
from ..driving.prompt import Prompt, checked_prompt
from ..driving.sampling import Sampler, make_sampler
from ..driving.session import Answer, Session, SessionOptions
from ..errors import PromptCacheError, RankError, RankStopped
from ..experts.routing import finished
from ..files import JsonDict
from ..model.decoder import Model
from ..state.prompt_file import Fingerprint, PromptHeader, read_prompt_header
from ..state.snapshot import save_state
from ..text.tokenizer import TokenizerWrapper
from .group import Exchange, Order, send_order

if TYPE_CHECKING:
    from typing_extensions import Unpack

SHORTEST_NAP, LONGEST_NAP = 0.004, 0.5  # seconds; the longest nap is the most that a first answer after a pause waits
PARTING_SECONDS = 3.0  # seconds in which a command with a broken connection may end by itself


class Lead:
    """Sends orders to the other ranks, and lets them sleep while there is nothing to do.

    Args:
        exchange: with the others.
        end: called with a message when a rank is found gone while idle; it ends the process.

    Attributes:
        is_shared: whether the others are inside the model, which only an exchange ends.
    """

    def __init__(self, exchange: Exchange, end: Callable[[str], None]):
        self.exchange, self.is_shared = exchange, False
        self.lock = threading.RLock()
        self.numbers = itertools.count()
        self._end, self._dropped = end, list[int]()
        self._last_sent, self._over = time.monotonic(), threading.Event()
        self._idle = threading.Thread(target=self._keep_asleep, name="ranks-idle", daemon=True)
        self._idle.start()

    def send(self, order: Order, *values: int, payload: bytes = b"", shares: bool = False) -> None:
        """Gives an order; one that `shares` the work takes the others into the model."""
        with self.lock:
            if order in (Order.NEW, Order.RESPOND):  # between two answers
                while self._dropped:
                    send_order(self.exchange, Order.DROP, self._dropped.pop())
            self.is_shared = self.is_shared or shares
            send_order(self.exchange, order, *values, payload=payload)
            self._last_sent = time.monotonic()

    def session(self, model: Model, tokenizer: TokenizerWrapper, **options: "Unpack[SessionOptions]") -> Session:
        """Starts a text whose every step the other ranks repeat; `options` as for `Session`."""
        return LeadSession(self, model, tokenizer, **options)

    def forget(self, number: int) -> None:
        """Drops the session at the next order; may be called anywhere."""
        self._dropped.append(number)

    def quit(self, code: int) -> None:
        """Lets the others end with this exit code, if they are still connected."""
        self._over.set()
        with self.lock:
            if not self.exchange.is_broken and not self.is_shared:
                send_order(self.exchange, Order.QUIT, code)
                self.exchange.is_broken = True
        self._idle.join(PARTING_SECONDS)

    def _keep_asleep(self) -> None:
        nap = SHORTEST_NAP
        while not self._over.wait(nap):
            if self.exchange.is_broken:
                if not self._over.wait(PARTING_SECONDS):
                    self._end("the connection between the ranks is lost; start all of them again")
                return
            with self.lock:
                if self._over.is_set() or self.exchange.is_broken or self.is_shared:
                    continue
                if time.monotonic() - self._last_sent < nap:
                    nap = SHORTEST_NAP
                    continue
                nap = min(2 * nap, LONGEST_NAP)
                try:
                    send_order(self.exchange, Order.IDLE, int(nap * 1000))
                except RankError as error:
                    self._end(str(error))


class LeadSession(Session):
    """A session of rank 0; every other rank has its twin, by its number."""

    def __init__(self, lead: Lead, model: Model, tokenizer: TokenizerWrapper, **options: "Unpack[SessionOptions]"):
        super().__init__(model, tokenizer, **options)
        self.lead, self.number = lead, next(lead.numbers)
        self.is_awaited = False  # whether the others wait for a token of this session
        sizes = self.points.max_bytes, self.checkpoint_every, self.span or 0, self.prefill_step_size or 0
        lead.send(Order.NEW, self.number, *sizes, self.store is not None)
        weakref.finalize(self, lead.forget, self.number).atexit = False

    def answer(
        self,
        prompt: Sequence[int],
        *,
        boundaries: Sequence[int] = (),
        max_tokens: int = 256,
        **choice: "Unpack[SamplerOptions]",
    ) -> "LeadAnswer":
        """As `Session.answer`. A prompt is left at the next exchange of a layer."""
        check_max_tokens(max_tokens)
        choice["sampler"] = self._sampling(choice.get("sampler") or make_sampler())
        return LeadAnswer(self, checked_prompt(prompt, self.model), boundaries, max_tokens, choice)

    def _sampling(self, sample: Sampler) -> Sampler:
        """Wraps `sample`; while it runs, the others wait for its choice."""

        def chosen(logprobs: mx.array) -> mx.array:
            self.lead.is_shared, self.is_awaited = False, True
            return sample(logprobs)

        return chosen

    def agree_again(self, keep_half: bool) -> None:
        self.is_awaited = False
        if self.lead.is_shared and not self.lead.exchange.has_ended:
            self.lead.exchange.is_broken = True  # the others are inside the model and cannot receive an order
            return
        self.lead.is_shared = False
        if not self.lead.exchange.is_broken:
            self.lead.send(Order.SETTLE, keep_half)
            super().agree_again(keep_half)

    def _reuse(self, prompt: list[int]) -> None:
        if self.store is None:
            super()._reuse(prompt)
            return
        self.lead.is_shared = False  # the others wait for the result
        super()._reuse(prompt)
        self.lead.is_shared = True
        if self.reuse.disk:
            self.lead.send(Order.STATE, len(self.tokens), payload=save_state(self.model, self.cache))
        else:
            self.lead.send(Order.KNOWN)

    def keep(self) -> None:
        self.lead.send(Order.KEEP, self.number)
        super().keep()

    def fork(self, length: int) -> Session:
        with self.lead.lock:
            other = cast(LeadSession, super().fork(length))
            self.lead.send(Order.FORK, self.number, other.number, length)
        return other

    def _blank(self, **options: "Unpack[SessionOptions]") -> Session:
        return LeadSession(self.lead, self.model, self.tokenizer, **options)

    def rewind(self, length: int) -> int:
        self.lead.send(Order.REWIND, self.number, length)
        return super().rewind(length)

    def save(self, path: Path, fingerprint: Fingerprint, extra: JsonDict) -> None:
        self.rewind(len(self.tokens))  # a half-done span is dropped by all
        super().save(path, fingerprint, extra)

    def load(self, path: Path, fingerprint: Fingerprint) -> PromptHeader:
        """As `Session.load`. Raises PromptCacheError: also, the text has images."""
        if read_prompt_header(path).shifts:  # which a snapshot does not contain
            raise PromptCacheError(
                f"{path} has a text with images, which several ranks do not support; start a single process"
            )
        self.rewind(len(self.tokens))
        with self.lead.lock:
            header = super().load(path, fingerprint)
            tokens = b"".join(n.to_bytes(4, "little") for n in self.tokens)
            state = save_state(self.model, self.cache)
            self.lead.send(Order.LOAD, self.number, len(self.tokens), payload=tokens + state)
        return header


class LeadAnswer(Answer):
    """An answer of rank 0, each token of which is computed together with the others."""

    session: LeadSession
    shares_steps = False

    def __init__(
        self, session: LeadSession, prompt: Prompt, boundaries: Sequence[int], max_tokens: int, choice: SamplerOptions
    ):
        super().__init__(session, prompt, boundaries, max_tokens, choice)
        self._sent = [*prompt, *(n for n in boundaries if 0 < n < len(prompt))]
        self._has_begun = False

    def advance_prompt(self) -> int | None:
        session, lead = self.session, self.session.lead
        with lead.lock:
            if not self._has_begun:
                self._has_begun, lead.exchange.pending, lead.exchange.has_ended = True, None, False
                payload = b"".join(n.to_bytes(4, "little") for n in self._sent)
                lead.send(Order.RESPOND, session.number, len(self.prompt), payload=payload, shares=True)
                session.is_awaited = False
            return super().advance_prompt()

    def advance_alone(self) -> Outcome:
        session, lead = self.session, self.session.lead
        with lead.lock:
            if self.tokens:
                lead.exchange.has_ended = False
                lead.send(Order.GO, self.tokens[-1], shares=True)
                session.is_awaited = False
            return super().advance_alone()

    def pause(self) -> None:
        """As `Answer.pause`; the other ranks, which are inside the model, learn of it at the next exchange."""
        lead, pieces = self.session.lead, self._pieces
        if pieces is not None and not lead.exchange.is_broken:
            self._has_begun = False
            lead.exchange.pending = RankStopped("rank 0 left the prompt")
            with lead.lock, suppress(RankStopped):
                finished(pieces)
                lead.is_shared = False  # no layer was left; the others wait for the first token
            lead.exchange.pending = None
        super().pause()

    def end(self, error: BaseException | None = None) -> None:
        session, lead = self.session, self.session.lead
        with lead.lock:
            super().end(error)
            if session.is_awaited and self.tokens and not lead.exchange.is_broken:
                session.is_awaited = False
                lead.send(Order.END, self.tokens[-1])

"""Rank 0: makes sessions whose every step the other ranks repeat.

Only this rank has prompts, stores, samplers and users; it sends each decision before acting on it. After an error that
all ranks have received, sessions can continue; any other error leaves the ranks in different places, and ends them all.
"""

import itertools
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias, cast

import mlx.core as mx

from ..engine.generation import GenerationResponse, SamplerOptions, check_max_tokens
from ..engine.prompt import Prompt, checked_prompt
from ..engine.running_text import TextOptions
from ..engine.sampling import Sampler, make_sampler
from ..engine.session import Answer, Session
from ..errors import PromptCacheError, RankError, RequestError
from ..files import JsonDict
from ..model.decoder import Model
from ..state.fingerprint import Fingerprint
from ..state.prompt_file import PromptHeader, read_prompt_header
from ..state.snapshot import save_state
from ..text.tokenizer import TokenizerWrapper
from .group import Exchange
from .orders import Order, send_order

if TYPE_CHECKING:
    from typing_extensions import Unpack

SHORTEST_NAP, LONGEST_NAP = 0.004, 0.5  # seconds; the longest nap is the most that a first answer after a pause waits
PARTING_SECONDS = 3.0  # seconds in which a command with a broken connection may end by itself

Option: TypeAlias = Any  # what `Answer` takes besides, which is passed on


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

    def session(self, model: Model, tokenizer: TokenizerWrapper, **options: "Unpack[TextOptions]") -> Session:
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
        self._idle.join(PARTING_SECONDS)  # MLX does not finalise MPI while a thread holds its group

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

    def __init__(self, lead: Lead, model: Model, tokenizer: TokenizerWrapper, **options: "Unpack[TextOptions]"):
        super().__init__(model, tokenizer, **options)
        self.lead, self.number = lead, next(lead.numbers)
        self.is_awaited = False  # whether the others wait for a token of this session
        sizes = self.points.max_bytes, self.checkpoint_every, self.span or 0, self.prefill_step_size or 0
        lead.send(Order.NEW, self.number, *sizes, self.store is not None)
        weakref.finalize(self, lead.forget, self.number).atexit = False

    def sync(self, *_: object, **__: object) -> NoReturn:
        """Raises RequestError: the other ranks take part in whole answers."""
        raise RequestError("several ranks compute whole answers only; use respond")

    step = sync

    def answer(
        self,
        prompt: Sequence[int],
        *,
        boundaries: Sequence[int] = (),
        prompt_progress_callback: Callable[[int, int], object] | None = None,
        max_tokens: int = 256,
        **choice: "Unpack[SamplerOptions]",
    ) -> "LeadAnswer":
        """As `Session.answer`. What the callback raises takes effect at the next exchange of a layer."""
        prompt = checked_prompt(prompt, self.model)
        check_max_tokens(max_tokens)
        choice["sampler"] = self._sampling(choice.get("sampler") or make_sampler())
        return LeadAnswer(self, prompt, boundaries, self._deferred(prompt_progress_callback), max_tokens, choice)

    def _sampling(self, sample: Sampler) -> Sampler:
        """Wraps `sample`; while it runs, the others wait for its choice."""

        def chosen(logprobs: mx.array) -> mx.array:
            self.lead.is_shared, self.is_awaited = False, True
            if error := self.lead.exchange.take_pending():
                raise error
            return sample(logprobs)

        return chosen

    def _deferred(self, callback: Callable[[int, int], object] | None) -> Callable[[int, int], None]:
        """Wraps the callback; its exception is raised at the next exchange, where the others learn of it."""
        exchange = self.lead.exchange

        def report(done: int, total: int) -> None:
            try:
                if callback is not None:
                    callback(done, total)
            except BaseException as error:
                exchange.pending = error

        return report

    def _agree_again(self, keep_half: bool) -> None:
        self.is_awaited = False
        if self.lead.is_shared and not self.lead.exchange.has_ended:
            self.lead.exchange.is_broken = True  # the others are inside the model and cannot receive an order
            return
        self.lead.is_shared = False
        if not self.lead.exchange.is_broken:
            self.lead.send(Order.SETTLE, keep_half)
            super()._agree_again(keep_half)

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

    def _blank(self, **options: "Unpack[TextOptions]") -> Session:
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

    def __init__(self, session: LeadSession, prompt: Prompt, boundaries: Sequence[int], *options: Option):
        super().__init__(session, prompt, boundaries, *options)
        sent = [*prompt, *(n for n in boundaries if 0 < n < len(prompt))]
        self._payload = b"".join(n.to_bytes(4, "little") for n in sent)
        self._tokens = len(prompt)
        self._token: int | None = None  # the last one; None before the first

    def advance(self) -> GenerationResponse:
        """As `Answer.advance`; an exception of a callback or a sampler ends the answers of all ranks."""
        session, lead = self.session, self.session.lead
        if self._token is None:
            order, values, payload = Order.RESPOND, [session.number, self._tokens], self._payload
            lead.exchange.pending = None
        else:
            order, values, payload = Order.GO, [self._token], b""
            if error := lead.exchange.take_pending():
                raise error
        with lead.lock:
            lead.exchange.has_ended = False
            lead.send(order, *values, payload=payload, shares=True)
            session.is_awaited = False
            response = super().advance()
        self._token = response.token
        return response

    def close(self) -> None:
        session, lead = self.session, self.session.lead
        with lead.lock:
            super().close()
            if session.is_awaited and self._token is not None and not lead.exchange.is_broken:
                session.is_awaited = False
                lead.send(Order.END, self._token)

"""Turns the model's pieces of text into the events of an answer: reasoning, text, calls, log-probabilities, the end.

`SentTokens` follows which tokens spell the text, so that log-probabilities belong to the text that is sent.

A character may need several tokens, and a token may have several characters, some of which are no text of the answer:
tags, reasoning, or what a stop text hides. A token is told if a part of it is sent, with the place where that begins.
"""

import codecs
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import cast

from ..driving.generation import GenerationResponse
from ..driving.sampling import likeliest
from ..experts.stats import Asked
from ..text.calls.reader import AnswerReader, merged
from ..text.events import CallDelta, CallEnd, CallStart, Event, Reasoning, Text
from ..text.tokenizer import TokenizerWrapper
from .prepare import PreparedRequest
from .request import Finish, Logprobs, ServerEvent, TokenLogprob


class StopTexts:
    """Finds texts that end an answer while it streams; no part of them is output.

    Text that could still become one of `texts` is held back.

    Attributes:
        found: the one that ended the text; None so far.
    """

    def __init__(self, texts: Sequence[str]):
        self.texts = [text for text in texts if text]
        self.found: str | None = None
        self._held = ""

    def feed(self, text: str) -> str:
        """The text that certainly comes before any of them; nothing once one is found."""
        if self.found is not None:
            return ""
        self._held += text
        at = {stop: self._held.find(stop) for stop in self.texts}
        present = [(place, -len(stop), stop) for stop, place in at.items() if place >= 0]
        if present:
            place, _, self.found = min(present)
            certain, self._held = self._held[:place], ""
            return certain
        cut = len(self._held) - max((_possible(self._held, stop) for stop in self.texts), default=0)
        certain, self._held = self._held[:cut], self._held[cut:]
        return certain

    def finish(self) -> str:
        """What was held back for the rest of a stop text that did not come."""
        held, self._held = self._held, ""
        return held


def _possible(text: str, stop: str) -> int:
    """The length of the end of `text` that could be the beginning of `stop`."""
    sizes = range(min(len(text), len(stop) - 1), 0, -1)
    return next((n for n in sizes if text.endswith(stop[:n])), 0)


Spellers = Sequence[TokenLogprob]  # the tokens that spell one character


class SentTokens:
    """The characters of one answer on their way: spelt by tokens, read as text or something else, and sent."""

    def __init__(self) -> None:
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._begun: list[TokenLogprob] = []  # the tokens of a character whose last byte has not come
        self._unread: list[tuple[str, Spellers]] = []
        self._unsent: list[Spellers] = []
        self._sent = 0  # characters
        self._told: TokenLogprob | None = None  # the last one

    def spell(self, token: TokenLogprob | None, text: str) -> list[Spellers]:
        """The tokens of each character of `text`, which came with `token`, or with the end of the answer."""
        spellers = [] if token is None else [one for byte in token.data for one in self._spell_byte(token, byte)]
        del spellers[: max(len(spellers) - len(text), 0)]  # spaces that a text does not begin with
        if len(spellers) < len(text):  # the answer ends within a character
            spellers += [self._begun] * (len(text) - len(spellers))
            self._begun = []
        return spellers

    def read(self, char: str, spellers: Spellers) -> None:
        """The reader of the answer gets this character."""
        self._unread.append((char, spellers))

    def decide(self, events: Sequence[Event], held: int) -> None:
        """The reader has made these events; it holds back the last `held` characters, and drops all others that are in
        none of them.
        """
        for event in events:
            spellers = [self._take(char) for char in _written(event)]
            self._unsent += spellers if isinstance(event, Text) else []
        del self._unread[: len(self._unread) - held]

    def send(self, count: int) -> tuple[TokenLogprob, ...]:
        """The tokens that begin in the next `count` characters of the text, which are sent."""
        told: list[TokenLogprob] = []
        for offset, spellers in enumerate(self._unsent[:count], self._sent):
            for token in spellers:
                if token is not self._told:
                    told.append(replace(token, offset=offset))
                    self._told = token
        del self._unsent[:count]
        self._sent += count
        return tuple(told)

    def _spell_byte(self, token: TokenLogprob, byte: int) -> list[Spellers]:
        """The tokens of the characters that end with this byte, or before it if it does not go on with them."""
        ended, is_inside = len(self._utf8.decode(bytes((byte,)))), bool(self._utf8.getstate()[0])
        spellers: list[list[TokenLogprob]] = [[] for _ in range(ended + is_inside)]
        spellers[0] += self._begun
        if not spellers[-1] or spellers[-1][-1] is not token:
            spellers[-1].append(token)
        self._begun = spellers.pop() if is_inside else []
        return list(spellers)

    def _take(self, char: str) -> Spellers:
        """The tokens of the next unread character that is this one; none if the reader has added it."""
        at = next((i for i, (other, _) in enumerate(self._unread) if other == char), None)
        if at is None:
            return ()
        spellers = self._unread[at][1]
        del self._unread[: at + 1]
        return spellers


def _written(event: Event) -> str:
    """The characters of the answer that an event is made of, if they are known."""
    if isinstance(event, CallEnd):
        return event.raw
    return event.text if isinstance(event, (Reasoning, Text)) else ""


LEAST_LOGPROB = -9999.0  # in place of minus infinity, which JSON does not have


@dataclass
class Answering:
    """One answer in progress.

    Args:
        prepared: the request to answer.
        tokenizer: spells tokens for log-probabilities.

    Attributes:
        done: whether the answer has ended.
        is_calling: whether a call is being written.
        raw: everything that the model wrote.
    """

    prepared: PreparedRequest
    tokenizer: TokenizerWrapper
    done: bool = False
    is_calling: bool = False
    raw: str = ""
    calls: int = 0
    reasoning_tokens: int = 0
    _in_reasoning: bool = False

    def __post_init__(self) -> None:
        request = self.prepared.request
        tools = () if request.tool_choice == "none" else request.tools
        self._in_reasoning = self.prepared.inside_reasoning
        self._stop = StopTexts(request.stop)
        self._tokens = None if request.sampling.top_logprobs is None else SentTokens()
        self._reader: AnswerReader | None = None
        if request.prompt is None:
            self._reader = AnswerReader(
                self.prepared.dialect,
                tools,
                self.prepared.inside_reasoning,
                request.parallel_tool_calls,
                self.tokenizer.channels,
            )

    def begin(self) -> list[ServerEvent]:
        """The events of what the prompt has already opened, such as reasoning."""
        return self._passed(self._read(self.prepared.opening)) if self.prepared.opening else []

    def take(self, response: GenerationResponse) -> list[ServerEvent]:
        """The events of one token."""
        spellers: Sequence[Spellers] = ()
        if self._tokens is not None:
            token = None if response.finish_reason == "stop" else self._logprob(response)
            spellers = self._tokens.spell(token, response.text)
        events = self._passed(self._read(response.text, spellers))
        self.reasoning_tokens += self._in_reasoning
        return events

    def _read(self, text: str, spellers: Sequence[Spellers] = ()) -> Sequence[Event]:
        """The events that are certain; `spellers` are those of the characters, none for what the prompt has opened."""
        self.raw += text
        if self._tokens is None:
            return self._fed(text)
        events: list[Event] = []
        for char, tokens in zip(text, spellers or [()] * len(text), strict=True):
            self._tokens.read(char, tokens)
            fed = self._fed(char)
            self._tokens.decide(fed, self._reader.held if self._reader else 0)
            events += fed
        return merged(events)

    def _fed(self, text: str) -> Sequence[Event]:
        if self._reader is None:
            return [Text(text)] if text else []
        return self._reader.feed(text)

    def rest(self, last: GenerationResponse | None) -> list[ServerEvent]:
        """The events of text that was held back, after the last token."""
        cut = last is not None and last.finish_reason == "length"
        read = self._reader.finish(cut) if self._reader and self._stop.found is None else []
        if self._tokens is not None:
            self._tokens.decide(read, 0)
        return [*self._passed(read), *self._text(self._stop.finish())]

    def finish(
        self, last: GenerationResponse | None, cached: int, seconds: tuple[float, float], asked: Asked
    ) -> Finish:
        """The last event, with the `seconds` of prompt and answer and the experts that both requested (`asked`)."""
        return Finish(
            reason=self._reason(last),
            prompt_tokens=len(self.prepared.tokens),
            cached_tokens=cached,
            completion_tokens=last.generation_tokens if last else 0,
            reasoning_tokens=self.reasoning_tokens,
            stop_sequence=self._stop.found,
            prompt_seconds=seconds[0],
            completion_seconds=seconds[1],
            asked=asked,
        )

    def _reason(self, last: GenerationResponse | None) -> str:
        if self._stop.found is not None:
            return "stop_sequence"
        if last is not None and last.finish_reason == "length":
            return "length"
        return "tool_calls" if self.calls else "stop"

    def _passed(self, events: Sequence[Event]) -> list[ServerEvent]:
        passed: list[ServerEvent] = []
        for event in events:
            passed += self._one(event)
            if self.done:
                break
        if self._reader is not None and self._reader.done:
            self.done = True
        return passed

    def _one(self, event: Event) -> Iterator[ServerEvent]:
        self._in_reasoning = isinstance(event, Reasoning)
        if isinstance(event, Text):
            yield from self._text(self._stop.feed(event.text))
            self.done = self._stop.found is not None
            return
        yield from self._text(self._stop.finish())
        self.is_calling = isinstance(event, (CallStart, CallDelta))
        self.calls += isinstance(event, CallEnd)
        yield event

    def _text(self, text: str) -> Iterator[ServerEvent]:
        if not text:
            return
        if self._tokens is not None and (tokens := self._tokens.send(len(text))):
            yield Logprobs(tokens)
        yield Text(text)

    def _logprob(self, response: GenerationResponse) -> TokenLogprob:
        count = self.prepared.request.sampling.top_logprobs or 0
        own = cast(float, response.logprobs[response.token].item())
        top = tuple(self._spelt(token, value) for token, value in likeliest(response.logprobs, count))
        return self._spelt(response.token, own, top)

    def _spelt(self, token: int, logprob: float, top: tuple[TokenLogprob, ...] = ()) -> TokenLogprob:
        data = self.tokenizer.token_bytes(token)
        return TokenLogprob(data.decode(errors="replace"), token, max(logprob, LEAST_LOGPROB), data, top)

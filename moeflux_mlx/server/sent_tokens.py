"""Follows which tokens spell the text of an answer, so that log-probabilities belong to the text that is sent.

A character may need several tokens, and a token may have several characters, some of which are no text of the answer:
tags, reasoning, or what a stop text hides. A token is told if a part of it is sent, with the place where that begins.
"""

import codecs
from collections.abc import Sequence
from dataclasses import replace

from ..text.events import CallEnd, Event, Reasoning, Text
from .request import TokenLogprob

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

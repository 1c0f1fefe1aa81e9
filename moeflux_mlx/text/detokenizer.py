"""Tokens to text while they come."""

import codecs

from .vocabulary import Vocabulary


class StreamingDetokenizer:
    """Turns tokens into text as they come, in constant time per token.

    The segments put together are `TokenizerWrapper.decode` of all the tokens. A character is given out when
    its last byte has come; bytes that can never become one give U+FFFD, as does an unfinished character in
    `finalize`.
    """

    def __init__(self, vocabulary: Vocabulary):
        self._vocabulary = vocabulary
        self.reset()

    def reset(self) -> None:
        """Forget all tokens and text."""
        self.tokens: list[int] = []
        self._given: list[str] = []
        self._waiting: list[str] = []
        self._trim = self._vocabulary.trim
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def add_token(self, token: int) -> None:
        """Take one token id; an id that the vocabulary lacks adds no text."""
        self.tokens.append(token)
        data = self._vocabulary.token_bytes(token)
        if self._trim and data:
            data = self._trim_start(token, data)
        self._waiting.append(self._utf8.decode(data))

    def finalize(self) -> None:
        """Give out what was held back for more bytes."""
        self._waiting.append(self._utf8.decode(b"", final=True))

    @property
    def last_segment(self) -> str:
        """The text that came since this was read last."""
        segment = "".join(self._waiting)
        self._waiting = []
        self._given.append(segment)
        return segment

    @property
    def is_whole(self) -> bool:
        """Whether the tokens so far end a character, so that nothing is held back for more bytes."""
        return not self._utf8.getstate()[0]

    @property
    def text(self) -> str:
        """All text so far."""
        self._given = ["".join(self._given)]
        return self._given[0] + "".join(self._waiting)

    def _trim_start(self, token: int, data: bytes) -> bytes:
        if not self._vocabulary.is_spaced(token):
            self._trim = 0
            return data
        rest = data[1:]
        self._trim = 0 if rest else self._trim - 1
        return rest

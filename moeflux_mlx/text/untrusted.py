"""Text that must not become control tokens: a "<|im_end|>" that a user wrote must not end the user's turn.

Each marker in such text is broken by a mark of random letters after its first character. The template copies the mark
like any text, and the rendered prompt is cut there before it is encoded, piece by piece: no piece has the marker whole.
All other text is encoded as ever.
"""

import re
import secrets
from collections.abc import Mapping
from typing import Any

from .tokenizer import TokenizerWrapper


class Guard:
    """Args:
    tokenizer: encodes, and knows its markers.
    """

    def __init__(self, tokenizer: TokenizerWrapper):
        self._tokenizer = tokenizer
        self._mark = f"mark{secrets.token_hex(12)}"
        markers = sorted(marker for marker in tokenizer.markers | _control(tokenizer) if len(marker) > 1)
        # A look ahead, because markers can overlap and each must be broken.
        self._start = re.compile("(?=" + "|".join(map(re.escape, markers)) + ")") if markers else None

    def protect(self, value: Any) -> Any:
        """A copy of JSON data whose strings have every marker broken, keys too: templates write schemas whole."""
        if isinstance(value, str):
            return self._broken(value)
        if isinstance(value, Mapping):
            return {self.protect(key): self.protect(item) for key, item in value.items()}
        return [self.protect(item) for item in value] if isinstance(value, (list, tuple)) else value

    def encode(self, prompt: str, is_begun: bool = False) -> list[int]:
        """Token ids of a prompt that was rendered from what `protect` gave; `is_begun`: some text stands before it."""
        first, *others = prompt.split(self._mark)
        encode = self._tokenizer.encode_after
        ids = encode(first) if is_begun else self._tokenizer.encode(first, add_special_tokens=False)
        return ids + [token for piece in others for token in self._tokenizer.encode_after(piece)]

    def plain(self, prompt: str) -> str:
        """The prompt without marks."""
        return prompt.replace(self._mark, "")

    def _broken(self, text: str) -> str:
        if self._start is None:
            return text
        edges = [0, *(match.start() + 1 for match in self._start.finditer(text)), len(text)]
        return self._mark.join(text[a:b] for a, b in zip(edges, edges[1:], strict=False))


def _control(tokenizer: TokenizerWrapper) -> frozenset[str]:
    """Control tokens by name, found in text or not."""
    names = {token_id: token for token, token_id in tokenizer.get_vocab().items()}
    return frozenset(names[token_id] for token_id in tokenizer.all_special_ids if token_id in names)

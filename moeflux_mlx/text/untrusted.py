"""Protects text from becoming control tokens: a "<|im_end|>" written by a user must not end the user's turn.

The same holds for a model's own text, except for the tags of reasoning and calls. A mark of random letters is inserted
after the first character of each marker. The template copies it like any text. The rendered prompt is split at the
marks and encoded piece by piece, so no piece contains a whole marker. All other text is encoded as usual.
"""

import bisect
import os
import re
import secrets
from collections.abc import Mapping, Sequence, Set

from ..files import JsonValue
from .tokenizer import TokenizerWrapper


class MarkerGuard:
    """Args:
    tokenizer: encodes, and knows its markers.
    own: markers that the model writes for its reasoning and its calls.
    """

    def __init__(self, tokenizer: TokenizerWrapper, own: Set[str] = frozenset()):
        self._tokenizer = tokenizer
        self._mark = f"mark{secrets.token_hex(12)}"
        markers = {marker for marker in tokenizer.markers | _control(tokenizer) if len(marker) > 1}
        self._any, self._others = _start_of(markers), _start_of(markers - own)
        self._ids = {tokenizer.convert_tokens_to_ids(marker) for marker in tokenizer.markers}
        longest_first = sorted(map(re.escape, tokenizer.markers), key=len, reverse=True)
        self._whole = re.compile("|".join(longest_first) or r"\Z.")

    def protect(self, value: JsonValue, own: bool = False) -> JsonValue:
        """A copy of JSON data whose strings have every marker broken, keys too: templates write schemas whole.

        `own`: the model wrote it, so tags of reasoning and calls stay.
        """
        if isinstance(value, str):
            return self._broken(value, self._others if own else self._any)
        if isinstance(value, Mapping):
            return {self.protect(key, own): self.protect(item, own) for key, item in value.items()}
        return [self.protect(item, own) for item in value] if isinstance(value, (list, tuple)) else value

    def encode(self, prompt: str, beside: tuple[str, Sequence[int]] = ("", ())) -> list[int]:
        """Token ids of a prompt that was rendered from what `protect` gave.

        `beside`: another such prompt and its tokens. Both begin with the same tokens up to the last marker of their
        common beginning, because no token depends on what stands on the other side of a marker.
        """
        start, count = self._shared(prompt, *beside)
        first, *others = prompt[start:].split(self._mark)
        after = self._tokenizer.encode_after
        ids = after(first) if count else self._tokenizer.encode(first, add_special_tokens=False)
        return [*beside[1][:count], *ids, *(token for piece in others for token in after(piece))]

    def plain(self, prompt: str) -> str:
        """The prompt without marks."""
        return prompt.replace(self._mark, "")

    def _shared(self, prompt: str, other: str, tokens: Sequence[int]) -> tuple[int, int]:
        """Characters, and tokens of `other`, up to the last marker of what both prompts begin with."""
        ends = [match.end() for match in self._whole.finditer(other)]
        counts = [count for count, token in enumerate(tokens, start=1) if token in self._ids]
        common = len(os.path.commonprefix([prompt, other]))
        shared = bisect.bisect_right(ends, common)
        if not shared or len(ends) != len(counts):
            return 0, 0
        return ends[shared - 1], counts[shared - 1]

    def _broken(self, text: str, start: "re.Pattern[str] | None") -> str:
        if start is None:
            return text
        edges = [0, *(match.start() + 1 for match in start.finditer(text)), len(text)]
        return self._mark.join(text[a:b] for a, b in zip(edges, edges[1:], strict=False))


def _start_of(markers: Set[str]) -> "re.Pattern[str] | None":
    """A pattern that finds where any marker begins: a lookahead, because markers can overlap and each must be broken.
    It tests the first character first, because some tokenizers have hundreds of markers.
    """
    if not markers:
        return None
    first = "".join(sorted({marker[0] for marker in markers}))
    return re.compile(f"(?=[{re.escape(first)}])(?={'|'.join(map(re.escape, sorted(markers)))})")


def _control(tokenizer: TokenizerWrapper) -> frozenset[str]:
    """Control tokens by name, found in text or not."""
    names = {token_id: token for token, token_id in tokenizer.get_vocab().items()}
    return frozenset(names[token_id] for token_id in tokenizer.all_special_ids if token_id in names)

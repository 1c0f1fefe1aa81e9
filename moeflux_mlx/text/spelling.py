"""Encodes a text that was generated token by token with the same tokens again.

A model may generate other tokens for a text than the tokenizer would; encoding the text again would then mean computing
it again. Where a new text diverges from the old one, the tokens up to the last special token before are reused: no
token before it depends on what follows.
"""

import bisect
import os
from collections.abc import Sequence

from .tokenizer import TokenizerWrapper


class Spelling:
    """The text of `tokens`, and the positions where a new text may diverge.

    Args:
        tokenizer: made or read the tokens.
        tokens: of a text so far.
    """

    def __init__(self, tokenizer: TokenizerWrapper, tokens: Sequence[int]):
        self.tokenizer, self.tokens = tokenizer, list(tokens)
        speller, specials, pieces, letters = tokenizer.detokenizer, tokenizer.all_special_ids, [], 0
        self._ends = [(0, 0)]  # (letters, tokens) after each special token and the last one, if all bytes are spelt
        for count, token in enumerate(self.tokens, start=1):
            speller.add_token(token)
            pieces.append(speller.last_segment)
            letters += len(pieces[-1])
            if (token in specials or count == len(self.tokens)) and speller.is_whole:
                self._ends.append((letters, count))
        self.text = "".join(pieces)

    def known(self, text: str) -> tuple[int, int]:
        """How many letters of `text` are spelt by how many of the tokens."""
        shared = len(os.path.commonprefix([self.text, text]))
        return self._ends[bisect.bisect_right(self._ends, (shared, len(self.tokens))) - 1]

    def encode(self, text: str) -> list[int]:
        """Tokens of a rendered text, its special tokens written out: the known ones, and new ones after them."""
        letters, count = self.known(text)
        if not count:
            return self.tokenizer.encode(text, add_special_tokens=False)
        return self.tokens[:count] + self.tokenizer.encode_after(text[letters:])

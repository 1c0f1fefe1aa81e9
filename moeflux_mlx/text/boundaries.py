"""Finds the positions in a chat's tokens where later prompts will diverge, which are the positions of states to keep.
It renders variants of the chat and compares them, so it works with any template. Nothing here knows a model.
"""

from collections.abc import Callable, Sequence
from typing import cast

import numpy as np

from ..files import JsonObject
from .tokenizer import TokenizerWrapper

Messages = Sequence[JsonObject]


class Rendering:
    """A chat template with its variables, and the encoding of its text.

    Args:
        tokenizer: has the template.
        variables: the template's.
        encode: by default the tokenizer's, without adding special tokens.
    """

    def __init__(
        self,
        tokenizer: TokenizerWrapper,
        variables: JsonObject,
        encode: Callable[[str], list[int]] | None = None,
    ):
        self.tokenizer, self.variables = tokenizer, variables
        self.encode = encode or (lambda text: tokenizer.encode(text, add_special_tokens=False))

    def text(self, messages: Messages, add_generation_prompt: bool = True) -> str:
        rendered = self.tokenizer.apply_chat_template(
            messages, add_generation_prompt=add_generation_prompt, tokenize=False, **self.variables
        )
        return cast(str, rendered)

    def tokens(self, messages: Messages, add_generation_prompt: bool = True) -> list[int]:
        return self.encode(self.text(messages, add_generation_prompt))

    def before_answer(self, messages: Messages, prompt: Sequence[int]) -> int:
        """The length of `prompt` without the header that opens the answer."""
        return shared_length(self.tokens(messages, add_generation_prompt=False), prompt)

    def before_question(self, messages: Messages, prompt: Sequence[int]) -> int:
        """The length of the beginning of `prompt` that does not depend on the last message."""
        others = [[*messages[:-1], {**messages[-1], "content": other}] for other in ("a", "b")]
        return min(shared_length(self.tokens(other), prompt) for other in others)

    def after_answer(self, messages: Messages, absorbed: Sequence[int]) -> int:
        """How many of the `absorbed` tokens any next prompt will begin with."""
        nexts = [[*messages, {"role": "user", "content": other}] for other in ("a", "b")]
        return min(shared_length(self.tokens(one), absorbed) for one in nexts)


def shared_length(one: Sequence[int] | np.ndarray, other: Sequence[int] | np.ndarray) -> int:
    """The length of the longest common prefix."""
    n = min(len(one), len(other))
    different = np.flatnonzero(np.asarray(one[:n]) != np.asarray(other[:n]))
    return int(different[0]) if len(different) else n

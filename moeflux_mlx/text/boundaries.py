"""Where in the tokens of a chat later prompts will part from this one: the places to keep states at.

Found by rendering the chat in other ways and comparing, so any template will do. Nothing here knows a model.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import numpy as np

from .tokenizer import TokenizerWrapper

Messages = Sequence[Mapping[str, Any]]


class Rendering:
    """A chat template with its variables, and how its text becomes tokens.

    Args:
        tokenizer: renders.
        variables: of the template.
        encode: by default the tokenizer's, without adding special tokens.
    """

    def __init__(
        self,
        tokenizer: TokenizerWrapper,
        variables: Mapping[str, Any],
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
        """The length of what `prompt` shares with any other last message: the system prompt, most of all."""
        others = [[*messages[:-1], {**messages[-1], "content": other}] for other in ("a", "b")]
        return min(shared_length(self.tokens(other), prompt) for other in others)

    def after_answer(self, messages: Messages, absorbed: Sequence[int]) -> int:
        """How many of the `absorbed` tokens the next prompt will begin with, whatever is asked."""
        nexts = [[*messages, {"role": "user", "content": other}] for other in ("a", "b")]
        return min(shared_length(self.tokens(one), absorbed) for one in nexts)


def shared_length(one: Sequence[int] | np.ndarray, other: Sequence[int] | np.ndarray) -> int:
    """The length of the longest common prefix."""
    n = min(len(one), len(other))
    different = np.flatnonzero(np.asarray(one[:n]) != np.asarray(other[:n]))
    return int(different[0]) if len(different) else n

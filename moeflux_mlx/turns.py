"""Where in the tokens of a chat later prompts will part from this one: the places to keep states at.

Found by rendering the chat in other ways and comparing, so any template will do. Nothing here knows a model.
"""

from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np

from .tokenizer import TokenizerWrapper

Messages = Sequence[Mapping[str, Any]]


def before_answer(
    tokenizer: TokenizerWrapper, messages: Messages, prompt: Sequence[int], variables: Mapping[str, Any]
) -> int:
    """The length of `prompt` without the header that opens the answer."""
    bare = _render(tokenizer, messages, variables, add_generation_prompt=False)
    return shared_length(bare, prompt)


def before_question(
    tokenizer: TokenizerWrapper, messages: Messages, prompt: Sequence[int], variables: Mapping[str, Any]
) -> int:
    """The length of what `prompt` shares with any other last message: the system prompt, most of all."""
    others = [[*messages[:-1], {**messages[-1], "content": other}] for other in ("a", "b")]
    return min(shared_length(_render(tokenizer, other, variables), prompt) for other in others)


def after_answer(
    tokenizer: TokenizerWrapper, messages: Messages, tokens: Sequence[int], variables: Mapping[str, Any]
) -> int:
    """How many of the absorbed `tokens` the next prompt will begin with, whatever is asked."""
    nexts = [[*messages, {"role": "user", "content": other}] for other in ("a", "b")]
    return min(shared_length(_render(tokenizer, one, variables), tokens) for one in nexts)


def shared_length(one: Sequence[int] | np.ndarray, other: Sequence[int] | np.ndarray) -> int:
    """The length of the longest common prefix."""
    n = min(len(one), len(other))
    different = np.flatnonzero(np.asarray(one[:n]) != np.asarray(other[:n]))
    return int(different[0]) if len(different) else n


def _render(
    tokenizer: TokenizerWrapper,
    messages: Messages,
    variables: Mapping[str, Any],
    add_generation_prompt: bool = True,
) -> list[int]:
    rendered = tokenizer.apply_chat_template(messages, add_generation_prompt=add_generation_prompt, **variables)
    return cast(list[int], rendered)

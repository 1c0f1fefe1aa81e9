"""The texts of a calibration run: a user's, or those that ship with the package (`text/SOURCES.md`)."""

import json
from collections.abc import Sequence

import numpy as np

from ..errors import RequestError, TokenizerError
from ..files import PACKAGE
from ..text.results import Message
from ..text.tokenizer import TokenizerWrapper

FOLDER = PACKAGE / "calibration" / "text"
PLAIN = ("prose.txt", "code.txt")
CHAT = "chat.json"
WINDOW = 1024  # tokens that are read together


def default_texts(tokenizer: TokenizerWrapper, window: int = WINDOW) -> list[np.ndarray]:
    """The token ids of the text that ships with the package: prose, code, and chats in the model's own template.

    Args:
        window: as for `windows`.
    """
    texts = [tokenizer.encode((FOLDER / name).read_text(encoding="utf-8")) for name in PLAIN]
    chats = json.loads((FOLDER / CHAT).read_text(encoding="utf-8"))
    return windows([*texts, [token for chat in chats for token in _chat(tokenizer, chat)]], window)


def windows(texts: Sequence[Sequence[int]], window: int = WINDOW) -> list[np.ndarray]:
    """Token ids, at most `window` of a text in each array.

    Raises:
        RequestError: `window` is less than 1.
    """
    if window < 1:
        raise RequestError(f"window {window}: give at least 1 token")
    return [np.array(text[start : start + window]) for text in texts for start in range(0, len(text), window)]


def _chat(tokenizer: TokenizerWrapper, messages: list[Message]) -> list[int]:
    """A conversation in the template; without one, or if it takes no system message, as well as it can be said."""
    if tokenizer.has_chat_template:
        for some in (messages, [one for one in messages if one["role"] != "system"]):
            try:
                ids = tokenizer.apply_chat_template(some, add_generation_prompt=False)
            except (RequestError, TokenizerError):
                continue
            assert isinstance(ids, list)
            return ids
    return tokenizer.encode("\n\n".join(f"{one['role']}: {one['content']}" for one in messages) + "\n\n")

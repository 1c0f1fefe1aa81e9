"""Keeps the exact text of answers with tool calls, so that later prompts repeat it.

A template would write the same calls with other spaces and another order of keys, and a client may leave out the
reasoning. Either would make the next prompt diverge from the state in memory. The exact answer replaces the template's
form of its message, including the reasoning if the template still shows it there.
"""

import json
import secrets
import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import Generic, TypeVar

from ..files import JsonDict, JsonObject, JsonValue
from .calls.dialect import Dialect
from .channels import Channels
from .chat_template import REASONING_KEYS

K = TypeVar("K")
V = TypeVar("V")


class Latest(Generic[K, V]):
    """The values that were kept or found last, by key. Any thread may use it.

    Args:
        max_count: the most values.
        max_chars: the most characters of all values; the oldest values are dropped first.
    """

    def __init__(self, max_count: int = 4096, max_chars: int = 1 << 25):
        self._max_count, self._max_chars = max_count, max_chars
        self._values: OrderedDict[K, tuple[V, int]] = OrderedDict()
        self._chars = 0
        self._lock = threading.Lock()

    def keep(self, key: K, value: V, chars: int) -> None:
        """Stores `value`, which has `chars` characters, under the key."""
        with self._lock:
            self._drop(key)
            self._values[key] = value, chars
            self._chars += chars
            while len(self._values) > self._max_count or self._chars > self._max_chars:
                self._drop(next(iter(self._values)))

    def find(self, key: K) -> V | None:
        with self._lock:
            if key not in self._values:
                return None
            self._values.move_to_end(key)
            return self._values[key][0]

    def _drop(self, key: K) -> None:
        if key in self._values:
            self._chars -= self._values.pop(key)[1]


@dataclass(frozen=True)
class GivenAnswer:
    """An answer with calls.

    Attributes:
        ids: the client's ids of the calls.
        calls: (name, arguments as JSON text) of each.
        text: the text that the client got.
        raw: everything that the model wrote, after the beginning given by the prompt.
        opened: what the prompt ended with, as `Channels.opened_by` says.
    """

    ids: tuple[str, ...]
    calls: tuple[tuple[str, str], ...]
    text: str
    raw: str
    opened: str = ""

    def is_of(self, message: JsonObject) -> bool:
        """Whether a message of the history has the same content for a client."""
        calls = [call.get("function") or {} for call in message["tool_calls"]]
        said = [(call.get("name"), _loaded(call.get("arguments"))) for call in calls]
        same = [(name, _loaded(arguments)) for name, arguments in self.calls]
        return said == same and (message.get("content") or "").strip() == self.text.strip()


class AnswerStore:
    """The latest answers with calls. Any thread may use it.

    Args:
        max_answers, max_chars: limits; the oldest answers are dropped first.
    """

    def __init__(self, max_answers: int = 4096, max_chars: int = 1 << 25):
        self._answers: Latest[tuple[str, ...], GivenAnswer] = Latest(max_answers, max_chars)

    def keep(self, answer: GivenAnswer) -> None:
        """Keeps the exact text for a later request that repeats the answer in its history; nothing without calls."""
        if answer.ids:
            self._answers.keep(answer.ids, answer, len(answer.raw))

    def find(self, message: JsonObject) -> GivenAnswer | None:
        """The answer behind this message of a history; None if it is not stored or the message was changed."""
        answer = self._answers.find(tuple(call.get("id") for call in message.get("tool_calls") or ()))
        return answer if answer is not None and answer.is_of(message) else None


class StandIn:
    """A placeholder for one answer in the messages, which finds its place in the rendered prompt.

    Args:
        arguments: of its call, in the form that the template takes.
    """

    def __init__(self, answer: GivenAnswer, dialect: Dialect, channels: Channels, arguments: object):
        self._answer, self._channels = answer, channels
        self._reasoning, self._content, self._name = (
            f"{word}{secrets.token_hex(8)}" for word in ("why", "said", "call")
        )
        self._begin, self._end = dialect.section
        self._called = dialect.spelt(answer.calls[0][0])
        self._id = (dialect.id or "{name}").format(name=self._name, index=0)
        self._arguments = arguments

    def message(self, message: JsonObject) -> JsonDict:
        function = {"name": self._name, "arguments": self._arguments}
        call = {**message["tool_calls"][0], "id": self._id, "function": function}
        return {
            **message,
            **dict.fromkeys(REASONING_KEYS, self._reasoning),
            **({"content": self._content} if self._answer.text else {}),
            "tool_calls": [call],
        }

    def put_back(self, prompt: str) -> str | None:
        """The prompt with the model's exact text; None if the template renders the message in an unknown way."""
        name, reasoned = prompt.find(self._name), prompt.find(self._reasoning)
        said = prompt.find(self._content) if self._answer.text else -1
        is_behind = said > name  # as Gemma's template has it
        start = prompt.rfind(self._begin, 0, name) if said < 0 or is_behind else said
        end = prompt.find(self._end, name)
        last = said + len(self._content) if is_behind else end
        counts = [prompt.count(word, 0, last) for word in (self._content, self._reasoning)]
        if counts[0] != bool(self._answer.text) or counts[1] > 1 or end < 0 or not reasoned < start < name:
            return None
        opened, raw = self._answer.opened, self._answer.raw.removesuffix(self._channels.tail)
        shown = self._channels.visible(opened, raw) if reasoned < 0 else opened + raw
        start = self._channels.begin_of(prompt, start if reasoned < 0 else reasoned)
        # What ends the turn was the end of the answer, and is not in it.
        end += 0 if self._end in self._channels.ends else len(self._end)
        end = max(end, last)
        if shown is None:
            return None
        # Some templates name the tool again with its result.
        return prompt[:start] + shown + prompt[end:].replace(self._name, self._called)


def _loaded(arguments: object) -> JsonValue:
    try:
        return json.loads(arguments) if isinstance(arguments, str) else arguments
    except ValueError:
        return arguments

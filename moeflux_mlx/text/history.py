"""Makes a prompt from a chat with tools, in the form that the template accepts.

Small test chats determine once what a template accepts: whether a call's arguments are an object or text, whether a
message may have several calls, whether a call may come with both reasoning and text, and whether a system message may
come later than first. Texts and names from users, systems and tools never become control tokens; in an assistant's text
only the tags of reasoning and calls do. Answers with calls appear exactly as the model wrote them.
"""

import bisect
import json
import os
import re
import secrets
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import replace
from functools import cached_property
from typing import cast

from ..errors import MoefluxError
from ..files import JsonDict, JsonObject, JsonValue
from .boundaries import Messages
from .calls.registry import dialect_of
from .chat_template import REASONING_KEYS
from .replay import AnswerStore, GivenAnswer, StandIn
from .results import apart, in_order
from .tokenizer import TokenizerWrapper


class MarkerGuard:
    """Protects text from becoming control tokens: a "<|im_end|>" written by a user must not end the user's turn.

    The same holds for a model's own text, except for the tags of reasoning and calls. A mark of random letters is
    inserted after the first character of each marker. The template copies it like any text. The rendered prompt is
    split at the marks and encoded piece by piece, so no piece contains a whole marker. All other text is encoded as
    usual.

    Args:
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

    def protect(self, value: object, own: bool = False) -> JsonValue:
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


PROBE = {"probed": "argument"}
ASKED = {"role": "user", "content": "probed question"}


class History:
    """Args:
    tokenizer: has the template.
    store: the answers to repeat exactly.
    """

    def __init__(self, tokenizer: TokenizerWrapper, store: AnswerStore | None = None):
        self._tokenizer, self._store = tokenizer, store or AnswerStore()
        self.channels = tokenizer.channels
        shown = self._called(PROBE)
        takes_objects = "probed" in shown and str(PROBE) not in shown
        probe = PROBE if takes_objects else json.dumps(PROBE)
        called = shown or self._called(probe)
        self.dialect = dialect_of((tokenizer.chat_template or "") + called)
        self._guard = MarkerGuard(tokenizer, self.channels.tags | (self.dialect.markers if self.dialect else set()))
        self._takes_objects = self.dialect is None or takes_objects
        self._takes_both = not shown or bool(self._called(PROBE, content="said", thinking="why"))
        self._takes_several = "probed_0" not in called or "probed_1" in self._called(probe, 2)
        self._takes_systems = self._takes_later_systems()

    def text(
        self,
        messages: Messages,
        *,
        tools: Messages | None = None,
        add_generation_prompt: bool = True,
        variables: JsonObject | None = None,
    ) -> str:
        """The prompt as text. Arguments and errors are those of `ChatTemplate.render`."""
        return self._guard.plain(self.marked(messages, tools, add_generation_prompt, variables or {}))

    def tokens(
        self,
        messages: Messages,
        *,
        tools: Messages | None = None,
        add_generation_prompt: bool = True,
        variables: JsonObject | None = None,
    ) -> list[int]:
        """The same as token ids, in which only the template and the model have written control tokens."""
        return self._guard.encode(self.marked(messages, tools, add_generation_prompt, variables or {}))

    def normalised(self, messages: Messages) -> list[JsonDict]:
        """The messages in the form that the template takes, as `in_order` orders them.

        Raises:
            RequestError: results and calls do not match.
        """
        joined = [self._with_calls({**one, "content": _joined(one.get("content"))}) for one in messages]
        if not self._takes_several:
            joined = [part for message in joined for part in apart(message)]
        return self._folded(in_order(joined))

    @cached_property
    def image(self) -> str:
        """The template's text for an image; "" if it does not support images."""
        asked = {"type": "text", "text": ASKED["content"]}
        try:
            with_image, without = (
                self._render([{"role": "user", "content": [*parts, asked]}]) for parts in ([{"type": "image"}], [])
            )
        except MoefluxError:
            return ""
        start, stop = without.find(ASKED["content"]), with_image.rfind(ASKED["content"])
        return with_image[start:stop] if 0 <= start <= stop and with_image[:start] == without[:start] else ""

    def plain(self, marked: str) -> str:
        """The prompt of `marked`."""
        return self._guard.plain(marked)

    def encode(self, marked: str, beside: tuple[str, Sequence[int]] = ("", ())) -> list[int]:
        """Token ids of what `marked` gives; `beside` is another prompt with its tokens, which may save work."""
        return self._guard.encode(marked, beside)

    def marked(
        self, messages: Messages, tools: Messages | None, add_generation_prompt: bool, variables: JsonObject
    ) -> str:
        """The prompt in which every marker is broken that neither the template nor the model wrote."""
        normal = self.normalised(messages)
        known = {n: answer for n, one in enumerate(normal) if (answer := self._store.find(one))}
        answers = {n: replace(answer, raw=self._guard.protect(answer.raw, own=True)) for n, answer in known.items()}
        normal = [self._protected(one) for one in self._numbered(normal, known)]
        tools, variables = self._guard.protect(tools) if tools else None, self._guard.protect(variables)
        return self._replayed(
            normal, answers, lambda shown: self._render(shown, tools, add_generation_prompt, variables)
        )

    def begun(self, marked: str, message: JsonObject) -> tuple[str, bool]:
        """The prompt `marked` followed by the beginning of the answer in `message`, and whether that ends inside the
        reasoning.

        Text ends the reasoning that the template has opened; without text, the reasoning goes on.
        """
        (message,) = map(self._protected, self.normalised([message]))
        thought, text = next((message[key] for key in REASONING_KEYS if message.get(key)), ""), message["content"]
        prompt = self.plain(marked)
        lead = self.channels.lead
        unopened = self.channels.opened_by(prompt).strip() in ("", self.channels.header)
        if thought and (lead or self._tokenizer.has_thinking) and unopened:
            marked += self.channels.opening
        elif not self.channels.opens(prompt):
            return marked + (self.channels.skipping(prompt) + lead + text if text else ""), False
        return marked + thought + (self.channels.closing + lead + text if text else ""), not text

    def _replayed(
        self, messages: Messages, answers: Mapping[int, GivenAnswer], render: Callable[[Messages], str]
    ) -> str:
        """The prompt with the `answers` exactly as written, except for those that the template hides."""
        if self.dialect is None:
            return render(messages)
        arguments: JsonValue = {} if self._takes_objects else "{}"
        stand_ins = {n: StandIn(answer, self.dialect, self.channels, arguments) for n, answer in answers.items()}
        shown = [self._fitted(stand_ins[n].message(one) if n in stand_ins else one) for n, one in enumerate(messages)]
        prompt = render(shown)
        hidden = set()
        for n, stand_in in stand_ins.items():
            replaced = stand_in.put_back(prompt)
            if replaced is None:
                hidden.add(n)
            prompt = prompt if replaced is None else replaced
        if not hidden:
            return prompt
        return self._replayed(messages, {n: answer for n, answer in answers.items() if n not in hidden}, render)

    def _protected(self, message: JsonObject) -> JsonDict:
        """A message without markers, except those that the model may have written; in a call only the arguments are
        changed.
        """
        own = message["role"] == "assistant" and not self.channels.header  # messages have no tags in their texts
        done = {key: value if key == "role" else self._guard.protect(value, own) for key, value in message.items()}
        for call in done.get("tool_calls", ()):
            call["id"] = self._guard.protect(call["id"])
            call["function"] |= self._guard.protect({"name": call["function"].get("name", "")})
        return done

    def _render(
        self,
        messages: Messages,
        tools: Messages | None = None,
        add_generation_prompt: bool = True,
        variables: JsonObject | None = None,
    ) -> str:
        rendered = self._tokenizer.apply_chat_template(
            messages, tools=tools, add_generation_prompt=add_generation_prompt, tokenize=False, **(variables or {})
        )
        return cast(str, rendered)

    def _with_calls(self, message: JsonDict) -> JsonDict:
        calls = message.get("tool_calls")
        if not calls:
            return {key: value for key, value in message.items() if key != "tool_calls"}
        return {**message, "tool_calls": [self._call(call, n) for n, call in enumerate(calls)]}

    def _call(self, call: JsonObject, n: int) -> JsonDict:
        function = call.get("function") or {}
        arguments = function.get("arguments")
        if self._takes_objects:
            arguments = _as_object(arguments)
        elif not isinstance(arguments, str):
            arguments = json.dumps(arguments or {}, ensure_ascii=False)
        return {"id": f"call_{n}", "type": "function", **call, "function": {**function, "arguments": arguments}}

    def _numbered(self, messages: list[JsonDict], known: Mapping[int, GivenAnswer]) -> list[JsonDict]:
        """The messages with ids of calls as the model writes them, or has written them where the answer is `known`."""
        if self.dialect is None or self.dialect.id is None or self.dialect.id_form is None:
            return messages
        count, waiting = 0, iter([""])
        numbered: list[JsonDict] = []
        for n, message in enumerate(messages):
            if calls := message.get("tool_calls", ()):
                ids = self.dialect.id_form.findall(known[n].raw) if n in known else []
                if len(ids) != len(calls):
                    names = [call["function"].get("name", "") for call in calls]
                    ids = [self.dialect.id.format(name=name, index=index) for index, name in enumerate(names, count)]
                message = {**message, "tool_calls": [{**call, "id": id} for call, id in zip(calls, ids, strict=True)]}
                count, waiting = count + len(calls), iter(ids)
            elif message["role"] == "tool":  # the results follow their calls in order
                message = {**message, "tool_call_id": next(waiting)}
            numbered.append(message)
        return numbered

    def _fitted(self, message: JsonObject) -> JsonObject:
        """A message with a call, its text put behind the reasoning where the template takes one of them only."""
        thought = next((message[key] for key in REASONING_KEYS if message.get(key)), "")
        if self._takes_both or not message.get("tool_calls") or not thought or not message["content"]:
            return message
        return {**message, **dict.fromkeys(REASONING_KEYS, f"{thought}\n\n{message['content']}"), "content": ""}

    def _folded(self, messages: list[JsonDict]) -> list[JsonDict]:
        """Later system messages become part of the user's turn after them, or one of their own."""
        if self._takes_systems:
            return messages
        folded: list[JsonDict] = []
        waiting = ""
        for n, message in enumerate(messages):
            if message["role"] == "system" and n:
                waiting += ("\n\n" if waiting else "") + message["content"]
                continue
            if waiting and message["role"] == "user":
                message = {**message, "content": f"{waiting}\n\n{message['content']}"}
            elif waiting:
                folded.append({"role": "user", "content": waiting})
            waiting = ""
            folded.append(message)
        return [*folded, {"role": "user", "content": waiting}] if waiting else folded

    def _called(self, arguments: object, count: int = 1, **said: str) -> str:
        """A chat with a message of `count` calls of such arguments as the template renders it, "" if it refuses."""
        functions = [{"name": f"probed_{n}", "arguments": arguments} for n in range(count)]
        calls = [{"id": f"12345678{n}", "type": "function", "function": own} for n, own in enumerate(functions)]
        chat: list[JsonObject] = [
            ASKED,
            {"role": "assistant", "content": "", **said, "tool_calls": calls},
            *({"role": "tool", "content": "r", "tool_call_id": call["id"]} for call in calls),
        ]
        try:
            return self._render(chat)
        except MoefluxError:
            return ""

    def _takes_later_systems(self) -> bool:
        """Whether a second system message stays where it is."""
        system = {"role": "system", "content": "first"}
        try:
            prompt = self._render([system, ASKED, {"role": "system", "content": "probed system"}, ASKED])
        except MoefluxError:
            return False
        return prompt.find(ASKED["content"]) < prompt.find("probed system") < prompt.rfind(ASKED["content"])


def _joined(content: JsonValue) -> str:
    """Text, or the texts of a list of parts line after line; nothing is the empty text."""
    if isinstance(content, list):
        return "\n".join(part if isinstance(part, str) else part.get("text") or "" for part in content)
    return content or ""


def _as_object(arguments: object) -> JsonDict:
    """Arguments as an object; other text is kept under a key, because a model may have written it."""
    value = arguments
    if isinstance(arguments, str):
        try:
            value = json.loads(arguments or "{}")
        except ValueError:
            value = arguments
    if value is None:
        return {}
    return dict(value) if isinstance(value, Mapping) else {"arguments": value}

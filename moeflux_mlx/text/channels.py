"""How a model marks its reasoning: by tags round it, or by messages of different kinds (gpt-oss and others)."""

import re
from collections.abc import Set
from dataclasses import dataclass


@dataclass(frozen=True)
class Channels:
    """Reasoning between two tags.

    Attributes:
        start, end: the tags.
        header: what begins a message if an answer consists of several; a prompt ends with it.
        lead: what a model writes before an answer that follows no reasoning.
        ends: the tokens that end an answer, in addition to those of the files.
        markers: all tags that these are made of; none: they are the tags.
        line: what stands between the tags and the reasoning.
        gap: what stands between reasoning and an answer.
        tail: what ends an answer, before the token that does.
        ends_none: a model that does not reason writes `end` before its answer.
        others: further pairs of tags, of other efforts. A model may end reasoning with the tag of any effort.
    """

    start: str = "<think>"
    end: str = "</think>"
    header: str = ""
    lead: str = ""
    ends: frozenset[str] = frozenset()
    markers: frozenset[str] = frozenset()
    line: str = "\n"
    gap: str = "\n\n"
    tail: str = ""
    ends_none: bool = False
    others: tuple[tuple[str, str], ...] = ()

    @property
    def starts(self) -> tuple[str, ...]:
        """The tags that begin reasoning."""
        return self.start, *(start for start, _ in self.others)

    @property
    def closers(self) -> tuple[str, ...]:
        """The tags that end reasoning."""
        return self.end, *(end for _, end in self.others)

    @property
    def tags(self) -> frozenset[str]:
        """The tags of reasoning, which only the model may write."""
        return self.markers or frozenset({*self.starts, *self.closers})

    @property
    def opening(self) -> str:
        """The text to append to a prompt that has not opened reasoning, so that reasoning follows."""
        return f"{self.start}{self.line}"

    @property
    def closing(self) -> str:
        """What ends reasoning, so that the answer follows."""
        return f"{self.line}{self.end}{self.gap}"

    def skipping(self, prompt: str) -> str:
        """What must follow a rendered prompt, which has not opened reasoning, so that the answer follows."""
        return self.end if self.ends_none and not prompt.endswith(self.end) else ""

    def switches(self, inside: bool) -> dict[str, bool]:
        """The tags that mean something inside or outside reasoning -> whether reasoning follows."""
        ending = dict.fromkeys(self.closers, False) if inside or self.ends_none else {}
        return ending | ({} if inside else dict.fromkeys(self.starts, True))

    def opens(self, prompt: str) -> bool:
        """Whether a rendered prompt ends inside reasoning, so that the model goes on with it."""
        return prompt.rstrip().endswith(self.starts)

    def opened_by(self, prompt: str) -> str:
        """The tags of reasoning at the end of a prompt, with the spaces round them."""
        start, end = ("|".join(map(re.escape, tags)) for tags in (self.starts, self.closers))
        tags = re.search(rf"\s*(?:(?:{start})\s*)?(?:(?:{end})\s*)?\Z", prompt)
        return tags.group() if tags else ""

    def begin_of(self, prompt: str, at: int) -> int:
        """Where in a prompt the reasoning whose text is at `at` begins, its tag and the spaces before included."""
        before = prompt[:at].rstrip()
        start = next(filter(before.endswith, self.starts), None)
        return at if start is None else len(before.removesuffix(start).rstrip())

    def past(self, data: bytes) -> bytes | None:
        """What follows the end of reasoning in `data`; None: reasoning goes on."""
        found = re.search(b"|".join(re.escape(end.encode()) for end in self.closers), data)
        return data[found.end() :] if found else None

    def visible(self, opened: str, raw: str) -> str | None:
        """The text that a model wrote after its reasoning; None if the reasoning never ended.

        Args:
            opened: what the prompt ended with, as `opened_by` says.
            raw: all that the model wrote.
        """
        if not opened.rstrip().endswith(self.starts) and not raw.lstrip().startswith(self.starts):
            return raw
        _, *rest = re.split("|".join(map(re.escape, self.closers)), raw, maxsplit=1)
        return rest[0].lstrip("\n") if rest else None


@dataclass(frozen=True)
class MessageChannels(Channels):
    """Reasoning in messages: an answer is a few messages, whose first tags say which are reasoning."""

    @property
    def opening(self) -> str:
        return self.start

    @property
    def closing(self) -> str:
        return f"{self.end}{self.header}"

    def switches(self, inside: bool) -> dict[str, bool]:
        return {self.end: False, self.lead: False} | ({} if inside else {self.start: True})

    def opened_by(self, prompt: str) -> str:
        skipped = f"{self.header}{self.start}{self.end}{self.header}"
        return next((tags for tags in (skipped, self.header) if prompt.endswith(tags)), "")

    def begin_of(self, prompt: str, at: int) -> int:
        return max(prompt.rfind(self.header, 0, at + len(self.header)), 0)

    def visible(self, opened: str, raw: str) -> str | None:
        if opened != self.start and not raw.startswith(self.start):
            return opened + raw
        _, ended, rest = raw.partition(self.end)
        return rest if ended else None


START, CHANNEL, MESSAGE, END, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|constrain|>"
CALL, RETURN = "<|call|>", "<|return|>"  # what ends an answer
# <|start|>assistant<|channel|>NAME<|message|>TEXT<|end|>, channel analysis: OpenAI's harmony, docs/format.md.
HARMONY = MessageChannels(
    start=f"{CHANNEL}analysis{MESSAGE}",
    end=END,
    header=f"{START}assistant",
    lead=f"{CHANNEL}final{MESSAGE}",
    ends=frozenset({CALL, RETURN}),
    markers=frozenset({START, CHANNEL, MESSAGE, END, CONSTRAIN}),
)
BEGIN, CONTENT, CALLS = "<|begin|>", "<|content|>", "<|calls|>"
# <|begin|>assistant<|think|>TEXT<|end|>, <|begin|>assistant<|content|>TEXT<|flush|>: vLLM's parsers of Solar Open.
SOLAR = MessageChannels(
    start="<|think|>",
    end=END,
    header=f"{BEGIN}assistant",
    lead=CONTENT,
    ends=frozenset({CALLS, "<|flush|>"}),
    markers=frozenset({BEGIN, "<|think|>", CONTENT, END}),
)
# <|message_model|><|content_thinking|>TEXT<|end_message|>, <|message_model|><|content_text|>TEXT<|end_message|>: the
# renderer of Inkling's authors (tml-renderers) and vLLM's parser.
INKLING = MessageChannels(
    start="<|content_thinking|>",
    end="<|end_message|>",
    header="<|message_model|>",
    lead="<|content_text|>",
    ends=frozenset({"<|content_model_end_sampling|>"}),
    markers=frozenset({"<|content_thinking|>", "<|end_message|>", "<|message_model|>", "<|content_text|>"}),
)
END_OF_TURN = "<|eot|>"
# <|start|>assistant to=self<|message|>TEXT<|eom|>, <|start|>assistant to=user<|message|>TEXT: vLLM's parsers of Muse.
MUSE = MessageChannels(
    start=f" to=self{MESSAGE}",
    end="<|eom|>",
    header=f"{START}assistant",
    lead=f" to=user{MESSAGE}",
    ends=frozenset({END_OF_TURN}),
    markers=frozenset({START, MESSAGE, "<|eom|>"}),
)
OPEN_CHANNEL, CLOSE_CHANNEL = "<|channel>", "<channel|>"
# <|channel>thought, TEXT on lines of its own, <channel|>: the chat template of Gemma 4.
GEMMA = Channels(
    start=f"{OPEN_CHANNEL}thought",
    end=CLOSE_CHANNEL,
    ends=frozenset({"<turn|>", "<|tool_response>"}),
    markers=frozenset({OPEN_CHANNEL, CLOSE_CHANNEL}),
    gap="",
)
# <mm:think>TEXT</mm:think>TEXT, or </mm:think>TEXT: the chat template of MiniMax-M3.
MINIMAX = Channels(
    start="<mm:think>",
    end="</mm:think>",
    markers=frozenset({"<mm:think>", "</mm:think>"}),
    line="",
    gap="",
    ends_none=True,
)
OPEN_SPAN, CLOSE_SPAN, SEP, END_OF_MESSAGE = "<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"


def span(name: str) -> tuple[str, str]:
    """What begins and what ends a span of this name."""
    return f"{OPEN_SPAN}{name}{SEP}", f"{CLOSE_SPAN}{name}{SEP}"


THOUGHT, RESPONSE = span("think"), span("response")


@dataclass(frozen=True)
class Spans(MessageChannels):
    """Reasoning in a span, and text in another one. The beginning of the latter is part of `end`; a prompt ends with
    the beginning of either.
    """

    def switches(self, inside: bool) -> dict[str, bool]:
        if inside:
            return {THOUGHT[1]: False}
        return {self.start: True, **dict.fromkeys((*RESPONSE, self.tail), False)}

    def opened_by(self, prompt: str) -> str:
        return next((tags for tags in (self.start, RESPONSE[0]) if prompt.endswith(tags)), "")

    def begin_of(self, prompt: str, at: int) -> int:
        for opened in (self.start, RESPONSE[0]):
            if prompt[:at].endswith(opened):
                return at - len(opened)
        return at


# <|open|>think<|sep|>TEXT<|close|>think<|sep|><|open|>response<|sep|>TEXT<|close|>response<|sep|>: Kimi K3.
SPANS = Spans(
    start=THOUGHT[0],
    end=THOUGHT[1] + RESPONSE[0],
    ends=frozenset({END_OF_MESSAGE}),
    markers=frozenset({OPEN_SPAN, CLOSE_SPAN, SEP, END_OF_MESSAGE}),
    tail=span("message")[1],
    line="",
    gap="",
)


@dataclass(frozen=True)
class TwoSpans(Channels):
    """Reasoning in a span, and text in another one, from `lead` to `tail`; calls are in neither."""

    def switches(self, inside: bool) -> dict[str, bool]:
        return {self.end: False, self.lead: False, self.tail: False} | ({} if inside else {self.start: True})

    def begin_of(self, prompt: str, at: int) -> int:
        return super().begin_of(prompt, len(prompt[:at].removesuffix(self.lead)))


# <|START_THINKING|>TEXT<|END_THINKING|><|START_TEXT|>TEXT<|END_TEXT|>: llama.cpp's and mlx-vlm's parsers of Cohere.
COHERE = TwoSpans(
    start="<|START_THINKING|>",
    end="<|END_THINKING|>",
    lead="<|START_TEXT|>",
    ends=frozenset({"<|END_OF_TURN_TOKEN|>"}),
    markers=frozenset(f"<|{edge}_{part}|>" for edge in ("START", "END") for part in ("THINKING", "TEXT")),
    line="",
    gap="",
    tail="<|END_TEXT|>",
)


@dataclass(frozen=True)
class Enclosed(Channels):
    """Text before a call, or a call, may stand between the tags `around`, which are no text."""

    around: tuple[str, str] = ("", "")

    def switches(self, inside: bool) -> dict[str, bool]:
        return super().switches(inside) | dict.fromkeys(self.around, False)

    def begin_of(self, prompt: str, at: int) -> int:
        return super().begin_of(prompt, len(prompt[:at].removesuffix(self.around[0])))


PYTHON = ("<|python_start|>", "<|python_end|>")
# <|python_start|>TEXT<|python_end|>CALLS: the chat template of Llama 4.
LLAMA4 = Enclosed(ends=frozenset({END_OF_TURN, "<|eom|>"}), markers=frozenset(PYTHON), around=PYTHON)
THINK = Channels()
# <ifm|think_fast>, of less effort: vLLM's `k2_horizon_reasoning_parser.py`.
EFFORTS = ("_fast", "_faster")


def channels_of(markers: Set[str]) -> Channels:
    """The channels of a model whose vocabulary has `markers`; without any for reasoning, text may still have `<think>`.

    A plain tag has the lowest priority.
    """
    for channels in (HARMONY, SOLAR, INKLING, MUSE, GEMMA, MINIMAX, SPANS, COHERE, LLAMA4):
        if channels.markers <= markers:
            return channels
    tags = sorted(
        filter(re.compile(r"<(longcat_|ifm\|)?think(:[\w-]+)?>|\[THINK\]").fullmatch, markers), key=THINK.start.__ne__
    )
    if not tags:
        return THINK
    efforts = (f"{tags[-1][:-1]}{effort}{tags[-1][-1]}" for effort in EFFORTS)
    return Channels(*_pair(tags[-1]), others=tuple(_pair(tag) for tag in efforts if tag in markers))


def _pair(start: str) -> tuple[str, str]:
    """A tag that begins reasoning, and the one that ends it."""
    return start, f"{start[0]}/{start[1:]}"


def closes_messages(tokens: Set[str]) -> frozenset[str]:
    """The tokens of a vocabulary that close a message of an answer, after which the answer goes on."""
    channels = channels_of(tokens)
    of_pairs = {END} if any(kind.ends <= tokens for kind in (HARMONY, SOLAR)) else frozenset()
    return channels.tags - channels.ends | of_pairs

"""How a model marks its reasoning: by tags round it, or by the channels of messages (gpt-oss)."""

import re
from collections.abc import Set
from dataclasses import dataclass


@dataclass(frozen=True)
class Channels:
    """Reasoning between two tags.

    Attributes:
        start, end: the tags.
    """

    start: str = "<think>"
    end: str = "</think>"

    @property
    def tags(self) -> frozenset[str]:
        """What the model writes for its reasoning, and nobody else may."""
        return frozenset({self.start, self.end})

    @property
    def ends(self) -> frozenset[str]:
        """What ends an answer, whatever the files say."""
        return frozenset()

    @property
    def lead(self) -> str:
        """What a model writes before an answer that follows no reasoning."""
        return ""

    @property
    def opening(self) -> str:
        """What a prompt is continued with so that reasoning follows, which it has not opened."""
        return f"{self.start}\n"

    @property
    def closing(self) -> str:
        """What ends reasoning, so that the answer follows."""
        return f"\n{self.end}\n\n"

    def switches(self, inside: bool) -> dict[str, bool]:
        """The tags that mean something inside or outside reasoning -> whether reasoning follows."""
        return {self.end: False} if inside else {self.start: True}

    def opens(self, prompt: str) -> bool:
        """Whether a rendered prompt ends inside reasoning, so that the model goes on with it."""
        return prompt.rstrip().endswith(self.start)

    def opened_by(self, prompt: str) -> str:
        """The tags of reasoning at the end of a prompt, with the spaces round them."""
        found = re.search(rf"\s*(?:{re.escape(self.start)}\s*(?:{re.escape(self.end)}\s*)?)?\Z", prompt)
        return found.group() if found else ""

    def begin_of(self, prompt: str, at: int) -> int:
        """Where in a prompt the reasoning whose text is at `at` begins, its tag and the spaces before included."""
        before = prompt[:at].rstrip()
        return len(before.removesuffix(self.start).rstrip()) if before.endswith(self.start) else at

    def visible(self, opened: str, raw: str) -> str | None:
        """What a model wrote after its reasoning; None if that never ended.

        Args:
            opened: what the prompt ended with, as `opened_by` says.
            raw: all that the model wrote.
        """
        if not opened.rstrip().endswith(self.start) and not raw.lstrip().startswith(self.start):
            return raw
        _, ended, rest = raw.partition(self.end)
        return rest.lstrip("\n") if ended else None


class Harmony(Channels):
    """Messages `<|start|>assistant<|channel|>NAME<|message|>TEXT<|end|>`; those of channel analysis are reasoning.

    The format is that of OpenAI's harmony, docs/format.md. A prompt ends with `<|start|>assistant`.
    """

    @property
    def tags(self) -> frozenset[str]:
        return frozenset({START, CHANNEL, MESSAGE, END, CONSTRAIN})

    @property
    def ends(self) -> frozenset[str]:
        return frozenset({CALL, RETURN})

    @property
    def lead(self) -> str:
        return f"{CHANNEL}final{MESSAGE}"

    @property
    def opening(self) -> str:
        return self.start

    @property
    def closing(self) -> str:
        return f"{END}{ASSISTANT}{self.lead}"

    def switches(self, inside: bool) -> dict[str, bool]:
        return {END: False}

    def opened_by(self, prompt: str) -> str:
        return ASSISTANT if prompt.endswith(ASSISTANT) else ""

    def begin_of(self, prompt: str, at: int) -> int:
        return max(prompt.rfind(ASSISTANT, 0, at), 0)

    def visible(self, opened: str, raw: str) -> str | None:
        if not raw.startswith(self.start):
            return opened + raw
        _, ended, rest = raw.partition(END)
        return rest if ended else None


START, CHANNEL, MESSAGE, END, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|constrain|>"
CALL, RETURN = "<|call|>", "<|return|>"  # what ends an answer
ASSISTANT = f"{START}assistant"
THINK, HARMONY = Channels(), Harmony(f"{CHANNEL}analysis{MESSAGE}", END)


def channels_of(markers: Set[str]) -> Channels:
    """Those of a model whose vocabulary has `markers`; without any for reasoning, text may still have `<think>`.

    Of several tags the plain one counts least.
    """
    if {CHANNEL, MESSAGE} <= markers:
        return HARMONY
    tags = sorted(filter(re.compile(r"<think(:[\w-]+)?>|\[THINK\]").fullmatch, markers), key=THINK.start.__ne__)
    return Channels(tags[-1], f"{tags[-1][0]}/{tags[-1][1:]}") if tags else THINK

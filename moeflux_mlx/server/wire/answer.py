"""An answer as a list of blocks: reasoning, text and tool calls, one after the other.

Events become steps: a block opens, grows, closes. Each API streams the steps, or writes the blocks at the end, in its
own form, so that both agree. Blocks never overlap: a new block closes the open one, and a call that is closed without
its `CallEnd` was cut short.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from ...text.events import CallDelta, CallEnd, CallStart, Reasoning, Text
from ..request import Accepted, Failed, Finish, Logprobs, ServerEvent, TokenLogprob


@dataclass
class Block:
    """`kind` is "reasoning", "text" or "call"; for a call, `text` is its arguments; `whole`: it was not cut short."""

    kind: str
    index: int  # index among all blocks
    call: int = 0  # index among the calls of the answer
    name: str = ""
    pieces: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    whole: bool = False

    @property
    def text(self) -> str:
        return "".join(self.pieces)


@dataclass(frozen=True)
class BlockStep:
    """`what` is "open", "grow" by `text`, or "close"."""

    what: str
    block: Block
    text: str = ""
    logprobs: tuple[TokenLogprob, ...] = ()


class WireAnswer:
    """Folds events into blocks. The last event sets `finish` or `failed`."""

    def __init__(self) -> None:
        self.blocks: list[Block] = []
        self.accepted: Accepted | None = None
        self.finish: Finish | None = None
        self.failed: Failed | None = None
        self._open: Block | None = None
        self._logprobs: tuple[TokenLogprob, ...] = ()

    @property
    def over(self) -> bool:
        return self.finish is not None or self.failed is not None

    def take(self, event: ServerEvent) -> list[BlockStep]:
        """The steps of an event; events after the last one make none."""
        return [] if self.over else list(self._steps(event))

    def _steps(self, event: ServerEvent) -> Iterator[BlockStep]:
        if isinstance(event, (Text, Reasoning)):
            yield from self._said("text" if isinstance(event, Text) else "reasoning", event.text)
        elif isinstance(event, CallStart):
            yield from self._begin(Block("call", len(self.blocks), event.index, event.name))
        elif isinstance(event, CallDelta) and self._calling(event.index):
            yield from self._grow(event.text)
        elif isinstance(event, CallEnd) and (block := self._calling(event.index)):
            yield from self._grow((event.arguments or "{}")[len(block.text) :])
            yield from self._close(whole=True)
        elif isinstance(event, Logprobs):
            self._logprobs += event.tokens
        else:
            yield from self._note(event)

    def _note(self, event: ServerEvent) -> Iterator[BlockStep]:
        if isinstance(event, Accepted):
            self.accepted = event
        elif isinstance(event, (Finish, Failed)):
            yield from self._close(isinstance(event, Finish) and event.reason != "length" and not self._calling())
            self.finish = event if isinstance(event, Finish) else None
            self.failed = event if isinstance(event, Failed) else None

    def _calling(self, index: int | None = None) -> Block | None:
        """The open call, if it is the one with `index`."""
        block = self._open
        return block if block and block.kind == "call" and index in (None, block.call) else None

    def _said(self, kind: str, text: str) -> Iterator[BlockStep]:
        if not text:
            return
        if self._open is None or self._open.kind != kind:
            yield from self._begin(Block(kind, len(self.blocks)))
        yield from self._grow(text)

    def _begin(self, block: Block) -> Iterator[BlockStep]:
        yield from self._close(whole=self._calling() is None)
        self.blocks.append(block)
        self._open = block
        yield BlockStep("open", block)

    def _grow(self, text: str) -> Iterator[BlockStep]:
        assert self._open is not None
        logprobs, self._logprobs = self._logprobs, ()
        if not text:
            return
        self._open.pieces.append(text)
        self._open.logprobs.extend(logprobs)
        yield BlockStep("grow", self._open, text, logprobs)

    def _close(self, whole: bool) -> Iterator[BlockStep]:
        if self._open is not None:
            self._open.whole = whole
            yield BlockStep("close", self._open)
        self._open = None

    def of(self, kind: str) -> list[Block]:
        return [block for block in self.blocks if block.kind == kind]

    def text(self, kind: str) -> str:
        return "".join(block.text for block in self.of(kind))

    def calls(self) -> list[Block]:
        """The complete calls."""
        return [block for block in self.of("call") if block.whole]

    def logprobs(self) -> list[TokenLogprob]:
        """Log-probabilities of the answer's text; no API has a field for others."""
        return [token for block in self.of("text") for token in block.logprobs]

    def reason(self) -> str:
        """Why the answer ended; "tool_calls" if there are calls and all are complete."""
        assert self.finish is not None
        calls = self.of("call")
        if calls:
            return "tool_calls" if len(self.calls()) == len(calls) else "length"
        return "stop" if self.finish.reason == "tool_calls" else self.finish.reason

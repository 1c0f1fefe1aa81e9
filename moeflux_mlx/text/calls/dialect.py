"""One form of tool calls: how a call opens, its parser, and how it is written."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from ...files import JsonObject
from ..channels import THINK, Channels
from .call import Call
from .steps import Parsing, literal, skip_space
from .tags import Tags

CallBody = Callable[[Call], Parsing[str]]


def behind(opening: str, parse: CallBody) -> CallBody:
    """The parser of a text that has spaces and `opening` before what `parse` takes."""

    def parse_all(call: Call) -> Parsing[str]:
        yield from literal([opening], (yield from skip_space()))
        return (yield from parse(call))

    return parse_all


@dataclass(frozen=True)
class Dialect:
    """A call is written `begin`, `named` with the tool's name in place of NAME, its arguments, `close`.

    Attributes:
        name: such as "qwen_json".
        openings: tag -> parser of the text after it.
        begin: how a call is opened.
        opening: the part of `begin` and `named` that every call has; free text ends with it.
        named: what follows `begin` if the tool is known, with its name in place of NAME and its id in place of ID.
        close: what ends a call.
        between: what the model itself writes between `named` and the arguments, in Lark.
        tags: how parameters are written; None: the arguments are JSON, or as `arguments` says.
        arguments: of arguments that are no JSON, the rule "arguments" in Lark with those that it needs, and what
            makes of a tool's schema an expression of theirs.
        section: how the calls of an answer begin, and how they end if the last one has no arguments. The end may also
            end the answer.
        bare: like `openings`, for tags that only count outside reasoning, because a model that drops the first tag
            writes them.
        following: like `openings`, for what only opens a call right behind another one.
        first: the parser of the beginning of an answer that follows a header in the prompt, if there may be more of it.
        markers: all tags that only the model may write, for calls.
        id: the form of a call's id in the prompt, {name} and {index} in place of the tool and the number of the call
            in the chat; None: any id.
        id_form: finds the ids in what a model wrote.
        id_rule: what an id is that the model chooses, in Lark, where `named` has one.
    """

    name: str
    openings: Mapping[str, CallBody]
    begin: str
    opening: str
    named: str
    close: str
    section: tuple[str, str]
    markers: frozenset[str]
    between: str = ""
    tags: Tags | None = None
    bare: Mapping[str, CallBody] = field(default_factory=dict)
    following: Mapping[str, CallBody] = field(default_factory=dict)
    first: CallBody | None = None
    id: str | None = None
    id_form: re.Pattern[str] | None = None
    id_rule: str = ""
    arguments: tuple[str, Callable[[JsonObject], str]] | None = None

    def prefix(self, tool: str | None = None, inside_reasoning: bool = False, channels: Channels = THINK) -> str:
        """The text to append to a prompt so that a call of `tool`, or of any tool, follows.

        The reader of the answer must be fed it as well. `inside_reasoning` also closes what the prompt has opened.
        """
        closing = channels.closing if inside_reasoning else ""
        if tool is None:
            return closing + self.begin
        call_id = (self.id or "").format(name=tool, index=0)
        return closing + self.begin + self.named.replace("ID", call_id).replace("NAME", self.spelt(tool))

    def spelt(self, tool: str) -> str:
        """A tool's name as it is written."""
        return tool if self.tags is None else self.tags.escaped(tool)

"""Cohere's calls, a list in JSON; the ids count the calls of an answer.

<|START_ACTION|>[
    {"tool_call_id": "0", "tool_name": "get_weather", "parameters": {"city": "Oslo"}},
    {"tool_call_id": "1", "tool_name": "get_time", "parameters": {}}
]<|END_ACTION|>
"""

from ..channels import COHERE
from .call import Call
from .dialect import Dialect
from .json_form import SPARE, members
from .steps import Malformed, Parsing, optional, skip, skip_space

CALL_BEGIN, CALL_END = "<|START_ACTION|>", "<|END_ACTION|>"


def action(call: Call) -> Parsing[str]:
    """Parses the text after `<|START_ACTION|>`: a list, or one call alone."""
    char = yield from skip_space()
    if char == "[":
        char = yield from skip_space()
    return (yield from _one(call, char))


def another(call: Call) -> Parsing[str]:
    """Parses the text after a comma behind a call."""
    return (yield from _one(call, (yield from skip_space())))


def _one(call: Call, char: str) -> Parsing[str]:
    if char != "{":
        raise Malformed(char)
    char = yield from members(call)
    call.check(char)
    _, char = yield from skip(SPARE, char)
    if char == ",":
        return char
    return (yield from optional(CALL_END, (yield) if char == "]" else char))


COHERE_ACTION = Dialect(
    name="cohere",
    openings={CALL_BEGIN: action},
    begin=f"{CALL_BEGIN}[\n    ",
    opening=CALL_BEGIN,
    named='{"tool_call_id": "0", "tool_name": "NAME", "parameters": ',
    close=f"}}\n]{CALL_END}",
    section=(CALL_BEGIN, CALL_END),
    markers=frozenset({CALL_BEGIN, CALL_END, COHERE.lead}),
    following={",": another},
)

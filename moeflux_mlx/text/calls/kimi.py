"""Kimi's calls in a section: `<|tool_call_begin|>functions.NAME:INDEX<|tool_call_argument_begin|>{}<|tool_call_end|>`.

NAME stands nowhere but in the id, whose INDEX counts the calls of the whole chat; the results name the id.
"""

import re

from .dialect import Call, Dialect, Malformed, Parsing, behind, optional, skip_space, until_one
from .json_form import arguments_before, without_arguments

SECTION_BEGIN, SECTION_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
CALL_BEGIN, ARGUMENTS, CALL_END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
ID = re.compile(r"(?:functions\.)?(.+?)(?::\d+)?")


def kimi(call: Call) -> Parsing[str]:
    """Parses the text after `<|tool_call_begin|>`."""
    text, end = yield from until_one([ARGUMENTS, CALL_END])
    call_id = ID.fullmatch(text.strip())
    if call_id is None:
        raise Malformed("")
    call.start(call_id[1])
    if end == CALL_END:
        return (yield from without_arguments(call, SECTION_END))
    yield from arguments_before([CALL_END], call, (yield from skip_space()))
    return (yield from optional(SECTION_END, (yield)))


KIMI = Dialect(
    name="kimi",
    openings={SECTION_BEGIN: behind(CALL_BEGIN, kimi), CALL_BEGIN: kimi},
    begin=f"{SECTION_BEGIN}{CALL_BEGIN}functions.",
    opening=CALL_BEGIN,
    named="NAME:",
    between=f'/[0-9]{{1,4}}/ "{ARGUMENTS}"',
    close=CALL_END,
    section=(SECTION_BEGIN, SECTION_END),
    markers=frozenset({SECTION_BEGIN, SECTION_END, CALL_BEGIN, ARGUMENTS, CALL_END}),
    id="functions.{name}:{index}",
    id_form=re.compile(rf"{re.escape(CALL_BEGIN)}\s*(.*?)\s*{re.escape(ARGUMENTS)}"),
)

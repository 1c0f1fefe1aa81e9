"""Mistral's calls, `[TOOL_CALLS]NAME[ARGS]{...}`, one after the other."""

from .dialect import Call, Dialect, Parsing, optional, skip_space, until_one
from .json_form import SPARE, last_arguments

CALL_BEGIN, ARGUMENTS = "[TOOL_CALLS]", "[ARGS]"


def mistral(call: Call) -> Parsing[str]:
    """Parses the text after `[TOOL_CALLS]`."""
    name, end = yield from until_one([ARGUMENTS, CALL_BEGIN, "\n"], or_end=True)
    call.start(name.strip())
    if end != ARGUMENTS:
        call.check("")
        return end
    char = yield from last_arguments(call, CALL_BEGIN, (yield from skip_space()))
    return (yield from optional("", char, SPARE))  # no tag ends a call


MISTRAL = Dialect(
    name="mistral",
    openings={CALL_BEGIN: mistral},
    begin=CALL_BEGIN,
    opening=CALL_BEGIN,
    named=f"NAME{ARGUMENTS}",
    close="",
    section=(CALL_BEGIN, "{}"),
    markers=frozenset({CALL_BEGIN, ARGUMENTS}),
)

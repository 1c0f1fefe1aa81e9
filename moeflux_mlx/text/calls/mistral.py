"""Mistral's calls, `[TOOL_CALLS]NAME[ARGS]{...}`, one after the other."""

from .call import Call
from .dialect import Dialect
from .json_form import arguments
from .steps import Steps, skip_space, until

CALL_BEGIN, ARGUMENTS = "[TOOL_CALLS]", "[ARGS]"


def mistral(call: Call) -> Steps[str]:
    """Parses the text after `[TOOL_CALLS]`."""
    call.start((yield from until(ARGUMENTS)).strip())
    char = yield from arguments(call, (yield from skip_space()))
    call.check(char)
    return char


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

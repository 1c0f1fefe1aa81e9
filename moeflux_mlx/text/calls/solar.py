"""The messages of Solar Open: their first tags say whether they are reasoning, text or calls.

    <|begin|>assistant<|think|>...<|end|>
    <|begin|>assistant<|tool_calls|><|tool_call:begin|>ID<|tool_call:name|>NAME<|tool_call:args|>{...}<|tool_call:end|>
    <|begin|>assistant<|content|>...<|flush|>

A message may have several calls, and `<|calls|>` ends the answer. An ID is ten small letters and digits.
"""

import re

from ..channels import BEGIN, CALLS, SOLAR
from .dialect import Call, Dialect, Malformed, Parsing, Switched, behind, optional, skip_space, until, until_one
from .json_form import arguments_before, without_arguments

TOOL_CALLS = "<|tool_calls|>"
CALL_BEGIN, NAME, ARGUMENTS, CALL_END = (f"<|tool_call:{part}|>" for part in ("begin", "name", "args", "end"))


def message(call: Call) -> Parsing[str]:
    """Parses the text after `<|begin|>`.

    Raises:
        Switched: no call follows, but reasoning or text.
    """
    try:
        head = yield from until("|>")
    except Malformed as cut:
        raise cut if cut.rest else Switched(inside=False) from None
    tag = head.partition("<|")[2]
    if f"<|{tag}|>" == TOOL_CALLS:
        return (yield from behind(CALL_BEGIN, solar)(call))
    raise Switched(inside=f"<|{tag}|>" == SOLAR.start)


def solar(call: Call) -> Parsing[str]:
    """Parses the text after `<|tool_call:begin|>`."""
    yield from until(NAME)
    name, end = yield from until_one([ARGUMENTS, CALL_END])
    call.start(name.strip())
    if end == CALL_END:
        return (yield from without_arguments(call, CALLS))
    yield from arguments_before([CALL_END], call, (yield from skip_space()))
    return (yield from optional(CALLS, (yield)))


SOLAR_OPEN = Dialect(
    name="solar_open",
    openings={BEGIN: message, TOOL_CALLS: behind(CALL_BEGIN, solar), CALL_BEGIN: solar},
    begin=f"{TOOL_CALLS}{CALL_BEGIN}",
    opening=CALL_BEGIN,
    named=f"ID{NAME}NAME{ARGUMENTS}",
    close=CALL_END,
    section=(BEGIN, CALLS),
    markers=SOLAR.tags | {TOOL_CALLS, CALL_BEGIN, NAME, ARGUMENTS, CALL_END},
    id="{index:010}",
    id_form=re.compile(rf"{re.escape(CALL_BEGIN)}\s*(.*?)\s*{re.escape(NAME)}"),
    id_rule="/[a-z0-9]{10}/",
)

"""Llama 4's calls in JSON, one after the other, behind an answer's text.

    <|python_start|>I look.<|python_end|>{"name": "get_weather", "parameters": {"city": "Oslo"}}<|eot|>

So the published template writes them; the models also leave the tags out, or put them round the calls.
"""

from ..channels import PYTHON
from .dialect import Call, Dialect, Parsing, optional
from .json_form import SPARE, members

BEGIN, CALL_BEGIN = "".join(PYTHON), '{"name"'


def llama4(call: Call) -> Parsing[str]:
    """Parses the text after `{"name"`."""
    char = yield from members(call, "name")
    call.check(char)
    return (yield from optional(PYTHON[1], char, SPARE))


LLAMA4 = Dialect(
    name="llama4",
    openings={BEGIN + CALL_BEGIN: llama4, CALL_BEGIN: llama4},
    begin=BEGIN,
    opening=CALL_BEGIN,
    named=f'{CALL_BEGIN}: "NAME", "parameters": ',
    close="}",
    section=(PYTHON[0], "<|eot|>"),
    markers=frozenset(PYTHON),
)

"""The messages of Inkling: the last tag of their headers says whether they are reasoning, text or a call.

    <|message_model|><|content_thinking|>...<|end_message|>
    <|message_model|><|content_text|>...<|end_message|>
    <|message_model|>NAME<|content_invoke_tool_json|>{"name": "NAME", "args": {...}}<|end_message|>

An answer may have several calls. A prompt ends with `<|message_model|>`, so an answer may begin with a NAME.
"""

from functools import partial

from ..channels import INKLING
from .dialect import Call, Dialect, Malformed, Parsing, Switched, literal, skip_space, until_one
from .json_form import qwen_json

CALL_BEGIN = "<|content_invoke_tool_json|>"


def message(call: Call, or_end: bool = True) -> Parsing[str]:
    """Parses the text after `<|message_model|>`. `or_end`: it may end there.

    Raises:
        Switched: no call follows, but reasoning or text.
    """
    head, tag = yield from until_one([CALL_BEGIN, INKLING.start, INKLING.lead, INKLING.end], or_end=or_end)
    if tag == INKLING.end:
        raise Malformed(head + tag)
    if tag != CALL_BEGIN:
        raise Switched(inside=tag == INKLING.start)
    return (yield from invoke(call))


def invoke(call: Call) -> Parsing[str]:
    """Parses the text after `<|content_invoke_tool_json|>`."""
    yield from literal(["{"], (yield from skip_space()))
    return (yield from qwen_json(call, INKLING.end))


INKLING_JSON = Dialect(
    name="inkling",
    openings={INKLING.header: message, CALL_BEGIN: invoke},
    begin=CALL_BEGIN,
    opening=CALL_BEGIN,
    named='{"name": "NAME", "args": ',
    close=f"}}{INKLING.end}",
    section=(INKLING.header, "<|content_model_end_sampling|>"),
    markers=INKLING.tags | {CALL_BEGIN},
    first=partial(message, or_end=False),
)

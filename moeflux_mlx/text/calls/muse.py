"""The messages of Muse Spark: their headers say whom they are for, the model itself, the user, or a tool.

    <|start|>assistant to=self<|message|>...<|eom|>
    <|start|>assistant to=NAME<|message|><atem:function_calls>
    <atem:invoke name="NAME">
    <atem:parameter name="KEY">VALUE</atem:parameter>
    </atem:invoke>
    </atem:function_calls><|eom|>
    <|start|>assistant to=user<|message|>...<|eot|>

Without a recipient it is reasoning. A prompt ends with `<|start|>assistant`, so an answer begins with the rest of a
header.
"""

from dataclasses import replace
from functools import partial

from ..channels import END_OF_TURN, MESSAGE, MUSE, START
from .dialect import Call, Malformed, Parsing, Switched, Tags, until_one
from .harmony import RECIPIENT
from .invoke import invoking

SECTION = "<atem:function_calls>", "</atem:function_calls>"


def message(call: Call, or_end: bool = True) -> Parsing[str]:
    """Parses the text after `<|start|>`. `or_end`: it may end there.

    Raises:
        Switched: always, if it is a header.
    """
    head, end = yield from until_one([MESSAGE, MUSE.end], or_end=or_end)
    if end == MUSE.end:
        raise Malformed(head + end)
    recipient = RECIPIENT.search(head)
    raise Switched(inside=recipient is None or recipient[1] == "self")


_ATEM = invoking(
    "muse_spark",
    SECTION,
    '<atem:invoke name="',
    Tags(('<atem:parameter name="', '">'), ("", "</atem:parameter>"), ("</atem:invoke>",)),
    MUSE.tags,
)
MUSE_SPARK = replace(
    _ATEM,
    openings={START: message},
    bare=_ATEM.openings,  # reasoning may quote a call
    begin=f" to=tools{MESSAGE}{_ATEM.begin}",
    close=f"{_ATEM.close}\n{SECTION[1]}",
    section=(START, END_OF_TURN),
    first=partial(message, or_end=False),
)

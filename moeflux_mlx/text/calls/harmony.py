"""The messages of gpt-oss: their headers say the channel, and of a call the recipient.

    <|start|>assistant<|channel|>analysis<|message|>...<|end|>
    <|start|>assistant<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>
    <|start|>assistant<|channel|>final<|message|>...<|return|>

The recipient may also stand before the channel. A call ends the answer, so no second one follows; commentary without a
recipient is text for the user.
"""

import re

from ..channels import CALL, CHANNEL, CONSTRAIN, HARMONY, MESSAGE, START
from .dialect import Call, Dialect, Parsing, Switched, optional, skip_space, until_one
from .json_form import SPARE, last_arguments

RECIPIENT = re.compile(r"\bto=(?:functions\.)?([^\s<]+)")


def message(call: Call) -> Parsing[str]:
    """Parses the text after `<|start|>` or, because a prompt may end with the former, `<|channel|>`.

    Raises:
        Switched: no call follows, but reasoning or text.
    """
    head, end = yield from until_one([MESSAGE], or_end=True)
    recipient = RECIPIENT.search(head)
    if recipient is None or not (end or call.knows(recipient[1])):
        raise Switched(inside=head.rpartition(CHANNEL)[2].strip().startswith("analysis"))
    call.start(recipient[1])
    char = yield from last_arguments(call, CALL, (yield from skip_space()) if end else "")
    return (yield from optional(CALL, char, SPARE))


GPT_OSS = Dialect(
    name="harmony",
    openings={START: message, CHANNEL: message},
    begin=f"{CHANNEL}commentary to=functions.",
    opening=f"{CHANNEL}commentary to=functions.",
    named=f"NAME {CONSTRAIN}json{MESSAGE}",
    close="",
    section=(START, CALL),
    markers=HARMONY.tags,
)

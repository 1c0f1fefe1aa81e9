"""The messages of gpt-oss: their headers say the channel, and of a call the recipient.

    <|start|>assistant<|channel|>analysis<|message|>...<|end|>
    <|start|>assistant<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>
    <|start|>assistant<|channel|>final<|message|>...<|return|>

The recipient may also stand before the channel. A call ends the answer, so no second one follows; commentary without a
recipient is text for the user.
"""

import re

from ..channels import CALL, CHANNEL, CONSTRAIN, HARMONY, MESSAGE, START
from .call import Call
from .dialect import Dialect
from .json_form import arguments
from .steps import Malformed, Steps, Switched, optional, skip_space, until

RECIPIENT = re.compile(r"\bto=(?:functions\.)?([^\s<]+)")


def message(call: Call) -> Steps[str]:
    """Parses the text after `<|start|>` or, because a prompt may end with the former, `<|channel|>`.

    Raises:
        Switched: no call follows, but reasoning or text.
    """
    try:
        head = yield from until(MESSAGE)
    except Malformed as cut:
        raise cut if cut.rest else Switched(inside=False) from None
    recipient = RECIPIENT.search(head)
    if recipient is None:
        raise Switched(inside=head.rpartition(CHANNEL)[2].strip().startswith("analysis"))
    call.start(recipient[1])
    char = yield from arguments(call, (yield from skip_space()))
    call.check(char)
    return (yield from optional(CALL, char))


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

"""Cohere's calls, a list in JSON; the ids count the calls of an answer.

<|START_ACTION|>[
    {"tool_call_id": "0", "tool_name": "get_weather", "parameters": {"city": "Oslo"}},
    {"tool_call_id": "1", "tool_name": "get_time", "parameters": {}}
]<|END_ACTION|>
"""

from ..channels import COHERE
from .dialect import Dialect
from .listed import bodies

CALL_BEGIN, CALL_END = "<|START_ACTION|>", "<|END_ACTION|>"
_FIRST, _ANOTHER = bodies(CALL_END)
COHERE_ACTION = Dialect(
    name="cohere",
    openings={CALL_BEGIN: _FIRST},
    begin=f"{CALL_BEGIN}[\n    ",
    opening=CALL_BEGIN,
    named='{"tool_call_id": "0", "tool_name": "NAME", "parameters": ',
    close=f"}}\n]{CALL_END}",
    section=(CALL_BEGIN, CALL_END),
    markers=frozenset({CALL_BEGIN, CALL_END, COHERE.lead}),
    following={",": _ANOTHER},
)

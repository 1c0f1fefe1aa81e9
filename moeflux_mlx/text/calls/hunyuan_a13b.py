"""Hunyuan-A13B's calls, a list in JSON (vLLM's `hunyuan_a13b_tool_parser.py`).

<tool_calls>[
{"name": "get_weather", "arguments": {"city": "Oslo"}},
{"name": "get_time", "arguments": {}}
]</tool_calls>
"""

from .dialect import Dialect
from .listed import bodies

CALLS, CALLS_END = "<tool_calls>", "</tool_calls>"
_FIRST, _ANOTHER = bodies(CALLS_END)
HUNYUAN_A13B = Dialect(
    name="hunyuan_a13b",
    openings={CALLS: _FIRST},
    begin=f"{CALLS}[\n",
    opening=CALLS,
    named='{"name": "NAME", "arguments": ',
    close=f"}}\n]{CALLS_END}",
    section=(CALLS, CALLS_END),
    markers=frozenset({CALLS, CALLS_END}),
    following={",": _ANOTHER},
)

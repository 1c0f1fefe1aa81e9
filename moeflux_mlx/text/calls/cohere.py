"""Cohere's calls, a list in JSON; the ids count the calls of an answer.

<|START_ACTION|>[
    {"tool_call_id": "0", "tool_name": "get_weather", "parameters": {"city": "Oslo"}},
    {"tool_call_id": "1", "tool_name": "get_time", "parameters": {}}
]<|END_ACTION|>
"""

from ..channels import COHERE
from .listed import listed

NAMED = '{"tool_call_id": "0", "tool_name": "NAME", "parameters": '
COHERE_ACTION = listed("cohere", "<|START_ACTION|>", "<|END_ACTION|>", NAMED, "    ", {COHERE.lead})

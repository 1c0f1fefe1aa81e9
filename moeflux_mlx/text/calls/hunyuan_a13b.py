"""Hunyuan-A13B's calls, a list in JSON (vLLM's `hunyuan_a13b_tool_parser.py`).

<tool_calls>[
{"name": "get_weather", "arguments": {"city": "Oslo"}},
{"name": "get_time", "arguments": {}}
]</tool_calls>
"""

from .listed import listed

HUNYUAN_A13B = listed("hunyuan_a13b", "<tool_calls>", "</tool_calls>", '{"name": "NAME", "arguments": ')

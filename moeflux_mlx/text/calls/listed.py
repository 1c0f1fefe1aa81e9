"""Calls as a list in JSON between two tags, or one call alone.

Hunyuan-A13B's (vLLM's `hunyuan_a13b_tool_parser.py`):

    <tool_calls>[
    {"name": "get_weather", "arguments": {"city": "Oslo"}},
    {"name": "get_time", "arguments": {}}
    ]</tool_calls>

Cohere's, whose ids count the calls of an answer:

    <|START_ACTION|>[
        {"tool_call_id": "0", "tool_name": "get_weather", "parameters": {"city": "Oslo"}},
        {"tool_call_id": "1", "tool_name": "get_time", "parameters": {}}
    ]<|END_ACTION|>
"""

from collections.abc import Collection

from ..channels import COHERE
from .dialect import Call, Dialect, Malformed, Parsing, optional, skip, skip_space
from .json_form import SPARE, members


def listed(
    name: str, begin: str, end: str, named: str, indent: str = "", markers: Collection[str] = frozenset()
) -> Dialect:
    """The dialect with the tags `begin` and `end`, the second of which the last call may lack. `indent`: before each
    call; `markers`: further ones. The other arguments are those of `Dialect`.
    """

    def first(call: Call) -> Parsing[str]:
        char = yield from skip_space()
        if char == "[":
            char = yield from skip_space()
        return (yield from _one(call, char, end))

    def another(call: Call) -> Parsing[str]:
        return (yield from _one(call, (yield from skip_space()), end))

    return Dialect(
        name=name,
        openings={begin: first},
        begin=f"{begin}[\n{indent}",
        opening=begin,
        named=named,
        close=f"}}\n]{end}",
        section=(begin, end),
        markers=frozenset({begin, end, *markers}),
        following={",": another},
    )


def _one(call: Call, char: str, end: str) -> Parsing[str]:
    if char != "{":
        raise Malformed(char)
    char = yield from members(call)
    call.check(char)
    _, char = yield from skip(SPARE, char)
    if char == ",":
        return char
    return (yield from optional(end, (yield) if char == "]" else char))


HUNYUAN_A13B = listed("hunyuan_a13b", "<tool_calls>", "</tool_calls>", '{"name": "NAME", "arguments": ')


COHERE_CALL = '{"tool_call_id": "0", "tool_name": "NAME", "parameters": '
COHERE_ACTION = listed("cohere", "<|START_ACTION|>", "<|END_ACTION|>", COHERE_CALL, "    ", {COHERE.lead})

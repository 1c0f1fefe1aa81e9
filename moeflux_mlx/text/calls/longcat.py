"""LongCat's calls: Qwen's JSON in other tags, or GLM's pairs of keys and values, of which every tag has a prefix.

    <longcat_tool_call>                <longcat_tool_call>get_weather
    {"name": "get_weather",            <longcat_arg_key>city</longcat_arg_key>
     "arguments": {"city": "Oslo"}}    <longcat_arg_value>Oslo</longcat_arg_value>
    </longcat_tool_call>               </longcat_tool_call>

One parser reads both (vLLM's and mlx-lm's parsers of LongCat).
"""

from dataclasses import replace

from . import json_form
from .dialect import Call, Parsing, Tags, skip_space
from .tagged import parameters
from .tool_call import GLM, QWEN_JSON, bare_name

CALL_BEGIN, CALL_END = "<longcat_tool_call>", "</longcat_tool_call>"
KEY, VALUE = ((f"<longcat_arg_{part}>", f"</longcat_arg_{part}>") for part in ("key", "value"))
PAIRS = Tags(KEY, VALUE, (CALL_END,), opens=(CALL_BEGIN,))


def longcat(call: Call) -> Parsing[str]:
    """Parses the text after `<longcat_tool_call>`."""
    char = yield from skip_space()
    if char == "{":
        return (yield from json_form.qwen_json(call, CALL_END))
    call.start((yield from bare_name(char)))
    return (yield from parameters(call, PAIRS, "<"))


LONGCAT_JSON = replace(
    QWEN_JSON,
    name="longcat_json",
    openings={CALL_BEGIN: longcat},
    begin=f"{CALL_BEGIN}\n",
    opening=CALL_BEGIN,
    close=f"}}\n{CALL_END}",
    section=(CALL_BEGIN, CALL_END),
    markers=frozenset({CALL_BEGIN, CALL_END}),
)
LONGCAT = replace(
    GLM,
    name="longcat",
    openings={CALL_BEGIN: longcat},
    begin=CALL_BEGIN,
    opening=CALL_BEGIN,
    close=CALL_END,
    section=(CALL_BEGIN, CALL_END),
    markers=frozenset({CALL_BEGIN, CALL_END, *KEY, *VALUE}),
    tags=PAIRS,
)

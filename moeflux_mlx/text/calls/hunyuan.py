"""Hy3's calls: GLM's pairs of keys and values, or JSON, behind a separator, in a section; every tag has a suffix.

    <tool_calls:opensource>
    <tool_call:opensource>get_weather<tool_sep:opensource>
    <arg_key:opensource>city</arg_key:opensource>
    <arg_value:opensource>Oslo</arg_value:opensource>
    </tool_call:opensource>
    </tool_calls:opensource>

The template says which suffix; there may be none. In Hy4 no tag separates the name from the first pair, and all
stands on one line. K2 Horizon's tags begin with `ifm|` instead of having a suffix, and have no separator either:

    <ifm|tool_calls>
    <ifm|tool_call>get_weather
    <ifm|arg_key>city</ifm|arg_key>
    <ifm|arg_value>Oslo</ifm|arg_value>
    </ifm|tool_call>
    </ifm|tool_calls>

A call may also be an object in JSON with name and arguments (vLLM's `k2_horizon_tool_parser.py`, format json).
"""

from functools import lru_cache

from .dialect import Call, Dialect, Parsing, Tags, behind, literal, optional, skip_space
from .json_form import arguments_before, qwen_json
from .tagged import parameters
from .tool_call import bare_name


@lru_cache
def hunyuan(suffix: str) -> Dialect:
    """The dialect whose tags end in `suffix`, such as ":opensource"."""
    return _in_section(f"hunyuan{suffix}", "", suffix, f"<tool_sep{suffix}>", f"<end_of_tool_call{suffix}>")


@lru_cache
def hunyuan4(suffix: str) -> Dialect:
    """The same for Hy4 (vLLM's `hy_v4_tool_parser.py`)."""
    return _in_section(f"hunyuan4{suffix}", "", suffix, line="")


def _in_section(
    name: str, prefix: str, suffix: str, separator: str = "", json_end: str = "", line: str = "\n"
) -> Dialect:
    """The dialect whose tags begin and end so. `separator`: what stands behind a call's name, and `json_end` what ends
    arguments that are JSON, if there are such tags; `line`: what stands behind the section's tag and a name.
    """
    begin, end, call_begin, call_end, *pairs = (
        f"<{slash}{prefix}{tag}{suffix}>"
        for tag in ("tool_calls", "tool_call", "arg_key", "arg_value")
        for slash in ("", "/")
    )
    key, value = (pairs[0], pairs[1]), (pairs[2], pairs[3])
    ends = tuple(filter(None, (call_end, json_end)))
    tags = Tags(key, value, ends, after=end, opens=(call_begin, begin))

    def one(call: Call) -> Parsing[str]:
        """Parses the text after `<tool_call>`."""
        char = yield from skip_space()
        if char == "{":
            rest = yield from qwen_json(call, call_end)
            return rest or (yield from optional(end, (yield)))
        call.start((yield from bare_name(char)))
        held = yield from literal([*filter(None, [separator]), key[0], call_end], "<")
        if held == separator:
            held = yield from skip_space()
        if held.startswith("<"):
            return (yield from parameters(call, tags, held))
        yield from arguments_before(tags.ends, call, held)
        return (yield from optional(end, (yield)))

    return Dialect(
        name=name,
        openings={begin: behind(call_begin, one), call_begin: one},
        begin=f"{begin}{line}{call_begin}",
        opening=call_begin,
        named=f"NAME{separator}{line}",
        close=call_end,
        section=(begin, end),
        markers=frozenset({begin, end, call_begin, *ends, *filter(None, [separator]), *key, *value}),
        tags=tags,
    )


HUNYUAN, HUNYUAN4 = hunyuan(":opensource"), hunyuan4(":6124c78e")
K2_HORIZON = _in_section("k2_horizon", "ifm|", "")

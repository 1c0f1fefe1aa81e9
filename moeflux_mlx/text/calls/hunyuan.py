"""Hy3's calls: GLM's pairs of keys and values, or JSON, behind a separator, in a section; every tag has a suffix.

    <tool_calls:opensource>
    <tool_call:opensource>get_weather<tool_sep:opensource>
    <arg_key:opensource>city</arg_key:opensource>
    <arg_value:opensource>Oslo</arg_value:opensource>
    </tool_call:opensource>
    </tool_calls:opensource>

The template says which suffix; there may be none.
"""

from functools import lru_cache

from .call import Call
from .dialect import Dialect
from .json_form import arguments_before
from .steps import Parsing, literal, optional, skip_space
from .tagged import parameters
from .tags import Tags
from .tool_call import bare_name


@lru_cache
def hunyuan(suffix: str) -> Dialect:
    """The dialect whose tags end in `suffix`, such as ":opensource"."""
    begin, end, call_begin, call_end, separator, json_end = (
        f"<{name}{suffix}>"
        for name in ("tool_calls", "/tool_calls", "tool_call", "/tool_call", "tool_sep", "end_of_tool_call")
    )
    key, value = ((f"<{name}{suffix}>", f"</{name}{suffix}>") for name in ("arg_key", "arg_value"))
    tags = Tags(key, value, (call_end, json_end), after=end, opens=(call_begin, begin))

    def one(call: Call) -> Parsing[str]:
        """Parses the text after `<tool_call>`."""
        call.start((yield from bare_name((yield from skip_space()))))
        held = yield from literal([separator, key[0], call_end], "<")
        if held == separator:
            held = yield from skip_space()
        if held.startswith("<"):
            return (yield from parameters(call, tags, held))
        yield from arguments_before(tags.ends, call, held)
        return (yield from optional(end, (yield)))

    def section(call: Call) -> Parsing[str]:
        """Parses the text after `<tool_calls>`."""
        yield from literal([call_begin], (yield from skip_space()))
        return (yield from one(call))

    return Dialect(
        name=f"hunyuan{suffix}",
        openings={begin: section, call_begin: one},
        begin=f"{begin}\n{call_begin}",
        opening=call_begin,
        named=f"NAME{separator}\n",
        close=call_end,
        section=(begin, end),
        markers=frozenset({begin, end, call_begin, call_end, separator, json_end, *key, *value}),
        tags=tags,
    )


HUNYUAN = hunyuan(":opensource")

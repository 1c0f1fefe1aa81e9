"""Calls that begin with `<tool_call>`: Qwen's in JSON, Qwen's in tags, and GLM's in pairs of keys and values, which
GLM-4.7 and later write on one line.

    <tool_call>                       <tool_call>                       <tool_call>get_weather
    {"name": "get_weather",           <function=get_weather>            <arg_key>city</arg_key>
     "arguments": {"city": "Oslo"}}   <parameter=city>                  <arg_value>Oslo</arg_value>
    </tool_call>                      Oslo                              </tool_call>
                                      </parameter>
                                      </function>
                                      </tool_call>

One parser reads all three, because the models mix them up. LongCat's calls are the first and the third in tags of its
own, `<longcat_tool_call>` and `<longcat_arg_key>`, and another parser reads both (vLLM's and mlx-lm's parsers of
LongCat).
"""

from dataclasses import replace

from .dialect import MAX_NAME, Call, CallBody, Dialect, Malformed, Parsing, Tags, literal, skip_space, until_one
from .json_form import END, qwen_json, without_arguments
from .tagged import parameters

TOOL_CALL = "<tool_call>"
FUNCTION, END_FUNCTION = "<function=", "</function>"
LINES = Tags(
    ("<parameter=", ">"), ("", "</parameter>"), (END_FUNCTION, END), after=END, opens=(TOOL_CALL, FUNCTION), lined=True
)
PAIRS = Tags(("<arg_key>", "</arg_key>"), ("<arg_value>", "</arg_value>"), (END,), opens=(TOOL_CALL,))


def tool_call(call: Call) -> Parsing[str]:
    """Parses the text after `<tool_call>`: JSON, tags, or the name of a tool and its arguments in pairs, if any."""
    char = yield from skip_space()
    if char == "{":
        return (yield from qwen_json(call))
    if char == "<":
        yield from literal([FUNCTION], char)
        return (yield from function(call))
    call.start((yield from bare_name(char)))
    return (yield from parameters(call, PAIRS, "<"))


def bare_name(text: str) -> Parsing[str]:
    """The name that begins with `text`, up to the next tag, whose first character is read."""
    while not text.endswith("<"):
        char = yield
        if not char or len(text) > MAX_NAME:
            raise Malformed(char)
        text += char
    return text[:-1].strip()


def function(call: Call) -> Parsing[str]:
    """Parses the text after `<function=`."""
    name, end = yield from until_one(["/>", ">", "\n"])
    call.start(name.strip())
    if end == "/>":
        return (yield from without_arguments(call, END))
    return (yield from parameters(call, LINES))


_OPENINGS: dict[str, CallBody] = {TOOL_CALL: tool_call}
_SECTION = (TOOL_CALL, END)
QWEN_JSON = Dialect(
    name="qwen_json",
    openings=_OPENINGS,
    begin=f"{TOOL_CALL}\n",
    opening=TOOL_CALL,
    named='{"name": "NAME", "arguments": ',
    close=f"}}\n{END}",
    section=_SECTION,
    markers=frozenset(_SECTION),
)
# K-EXAONE writes the same on one line.
EXAONE = replace(QWEN_JSON, name="exaone", begin=TOOL_CALL, close=f"}}{END}")
QWEN_XML = Dialect(
    name="qwen_xml",
    openings=_OPENINGS,
    bare={FUNCTION: function},
    begin=f"{TOOL_CALL}\n",
    opening=FUNCTION,
    named=f"{FUNCTION}NAME>\n",
    close=f"{END_FUNCTION}\n{END}",
    section=_SECTION,
    markers=frozenset(_SECTION),
    tags=LINES,
)
GLM = Dialect(
    name="glm",
    openings=_OPENINGS,
    begin=TOOL_CALL,
    opening=TOOL_CALL,
    named="NAME\n",
    close=END,
    section=_SECTION,
    markers=frozenset({*_SECTION, *PAIRS.key, *PAIRS.value}),
    tags=PAIRS,
)
# GLM-4.7 and GLM-5 write the same on one line.
GLM_LINE = replace(GLM, name="glm_line", named="NAME")


LONGCAT_CALL, LONGCAT_END = "<longcat_tool_call>", "</longcat_tool_call>"
LONGCAT_KEY, LONGCAT_VALUE = ((f"<longcat_arg_{part}>", f"</longcat_arg_{part}>") for part in ("key", "value"))
LONGCAT_PAIRS = Tags(LONGCAT_KEY, LONGCAT_VALUE, (LONGCAT_END,), opens=(LONGCAT_CALL,))


def longcat(call: Call) -> Parsing[str]:
    """Parses the text after `<longcat_tool_call>`."""
    char = yield from skip_space()
    if char == "{":
        return (yield from qwen_json(call, LONGCAT_END))
    call.start((yield from bare_name(char)))
    return (yield from parameters(call, LONGCAT_PAIRS, "<"))


LONGCAT_JSON = replace(
    QWEN_JSON,
    name="longcat_json",
    openings={LONGCAT_CALL: longcat},
    begin=f"{LONGCAT_CALL}\n",
    opening=LONGCAT_CALL,
    close=f"}}\n{LONGCAT_END}",
    section=(LONGCAT_CALL, LONGCAT_END),
    markers=frozenset({LONGCAT_CALL, LONGCAT_END}),
)
LONGCAT = replace(
    GLM,
    name="longcat",
    openings={LONGCAT_CALL: longcat},
    begin=LONGCAT_CALL,
    opening=LONGCAT_CALL,
    close=LONGCAT_END,
    section=(LONGCAT_CALL, LONGCAT_END),
    markers=frozenset({LONGCAT_CALL, LONGCAT_END, *LONGCAT_KEY, *LONGCAT_VALUE}),
    tags=LONGCAT_PAIRS,
)

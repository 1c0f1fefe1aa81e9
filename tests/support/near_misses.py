"""Calls with the small faults that models of 3 to 35 billion parameters make, for each style in tags."""

from moeflux_mlx.text.calls.minimax_m3 import MARK
from moeflux_mlx.text.calls.muse import MUSE_SPARK
from moeflux_mlx.text.calls.registry import DIALECTS
from moeflux_mlx.text.channels import MUSE

TAGGED = [dialect for dialect in DIALECTS if dialect.tags is not None]
VALUES = {"city": "Oslo\nand  around", "days": "3", "flag": "true"}
ARGUMENTS = {"city": VALUES["city"], "days": 3, "flag": True}


def spelt(dialect, parameters=None, name="get_weather", closings=None, closing=None, opening=None, begin=None):
    """Returns a call in tags.

    Args:
        parameters: (key, text) of each; by default those above.
        closings: what closes each value; by default its closing tag, or `closing` for all.
        opening: what ends the tag of a key, in place of its own end.
        begin: what the call begins with.
    """
    tags, line = dialect.tags, "\n" if dialect.tags.lined else ""
    parameters = list(VALUES.items()) if parameters is None else parameters
    if closings is None:
        closings = [tags.value[1] if closing is None else closing] * len(parameters)
    header = MUSE.end + MUSE.header if dialect is MUSE_SPARK else ""
    text = header + (dialect.prefix(name) if begin is None else begin)
    for (key, value), end in zip(parameters, closings, strict=True):
        is_string = key not in ("days", "flag")
        kind = tags.kinds[not is_string] if tags.kinds else tags.value[0]
        text += f"{tags.key[0]}{key}{tags.key[1] if opening is None else opening}{kind}{line}{value}"
        text += f"{line if end else ''}{end}\n"
    section_end = dialect.section[1]
    return text + dialect.close + ("" if section_end in dialect.close or dialect is MUSE_SPARK else section_end)


def near_misses(dialect):
    """Yields (what is wrong, a call) for the arguments above."""
    tags = dialect.tags
    closing, key_end = tags.value[1], tags.key[1]
    yield "the first closing tag is missing", spelt(dialect, closings=["", closing, closing])
    yield "the last closing tag is missing", spelt(dialect, closings=[closing, closing, ""])
    yield "no value is closed", spelt(dialect, closing="")
    yield "closing tags end in />", spelt(dialect, closing=f"{closing[:-1]}/>")
    yield "closing tags have no >", spelt(dialect, closing=closing[:-1])
    for end in tags.ends[:1]:
        yield "the end is misspelt", spelt(dialect).replace(end, f"{end[:-1]}/>", 1)
    yield "a parameter comes twice", spelt(dialect, [*VALUES.items(), ("city", "Rome")])
    if tags.kinds is None:
        yield "opening tags have no >", spelt(dialect, opening=key_end[:-1] + ("" if tags.lined else "\n"))
    if tags.value[0]:
        yield "keys are not closed", spelt(dialect, opening="")
    else:
        begin = dialect.prefix("get_weather")
        yield "the function's tag has no >", spelt(dialect, begin=begin.removesuffix(">\n") + "\n")


SEPARATED = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>"
FENCED = f"{SEPARATED}function<｜tool▁sep｜>NAME\n```json\n"
HEADER = "<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>"
SOLAR_CALL = "<|tool_calls|><|tool_call:begin|>a1b2c3d4e5<|tool_call:name|>NAME"
KIMI_CALL = "<|tool_calls_section_begin|><|tool_call_begin|>functions.NAME:0"
NAMED = '<tool_call>\n{"name": "NAME"'
HUNYUAN_CALL = "<tool_calls:opensource>\n<tool_call:opensource>NAME"
HUNYUAN4_CALL = "<tool_calls:6124c78e><tool_call:6124c78e>NAME</tool_call:6124c78e></tool_calls:6124c78e>"
INKLING_CALL = '<|content_invoke_tool_json|>{"name": "NAME"'
ATEM = '<atem:function_calls>\n<atem:invoke name="NAME">\n</atem:invoke>\n</atem:function_calls>'
# Calls without arguments, as models of each style write them.
EMPTY = {
    "qwen_json": [
        f"{NAMED}}}\n</tool_call>",
        f'{NAMED}, "arguments": null}}\n</tool_call>',
        f"{NAMED}}}",
        f'{NAMED}, "arguments": []}}',
    ],
    "exaone": [f'{NAMED}, "arguments": ""}}</tool_call>'],
    "qwen_xml": [
        "<tool_call>\n<function=NAME>\n</function>\n</tool_call>",
        "<tool_call>\n<function=NAME/>\n</tool_call>",
        "<tool_call>\n<function=NAME\n</function>\n</tool_call>",
        "<tool_call>\nNAME\n</tool_call>",
        "<tool_call>\n<function=NAME>\n{}\n</function>\n</tool_call>",
    ],
    "glm": ["<tool_call>NAME\n</tool_call>"],
    "glm_line": ["<tool_call>NAME</tool_call>"],
    "deepseek_v3": [
        FENCED + "{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        FENCED + "null\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        FENCED + "```<｜tool▁call▁end｜>",
        f"{SEPARATED}function<｜tool▁sep｜>NAME<｜tool▁call▁end｜>",
        f"{SEPARATED}function<｜tool▁sep｜>NAME\n<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    ],
    "deepseek_v3.1": [
        f"{SEPARATED}NAME<｜tool▁sep｜>null<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        f"{SEPARATED}NAME<｜tool▁sep｜><｜tool▁call▁end｜>",
        f"{SEPARATED}NAME<｜tool▁sep｜>\n<｜tool▁call▁end｜>",
        f"{SEPARATED}NAME<｜tool▁call▁end｜>",
    ],
    "deepseek_v32": ['<｜DSML｜function_calls>\n<｜DSML｜invoke name="NAME"/>\n</｜DSML｜function_calls>'],
    "deepseek_v4": [
        '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="NAME">\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>',
        '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="NAME" />\n</｜DSML｜tool_calls>',
    ],
    "deepseek_v41": [
        '<｜DSML｜ calls>\n<｜DSML｜ invoke name="NAME">\n</｜DSML｜ invoke>\n</｜DSML｜ calls>',
        '<｜DSML｜ calls>\n<｜DSML｜ invoke name="NAME" />\n</｜DSML｜ calls>',
    ],
    "kimi": [
        f"{KIMI_CALL}<|tool_call_argument_begin|><|tool_call_end|><|tool_calls_section_end|>",
        f"{KIMI_CALL}<|tool_call_argument_begin|>null<|tool_call_end|>",
        f"{KIMI_CALL}<|tool_call_end|><|tool_calls_section_end|>",
    ],
    "minimax": [
        '<minimax:tool_call>\n<invoke name="NAME"/>\n</minimax:tool_call>',
        '<minimax:tool_call>\n<invoke name="NAME">\n</invoke>\n</minimax:tool_call>',
    ],
    "minimax_m3": [
        f'{MARK}<tool_call>\n{MARK}<invoke name="NAME"/>\n{MARK}</tool_call>',
        f'{MARK}<tool_call>\n{MARK}<invoke name="NAME">{MARK}</invoke>\n{MARK}</tool_call>',
    ],
    "hunyuan:opensource": [
        f"{HUNYUAN_CALL}<tool_sep:opensource>\n</tool_call:opensource>\n</tool_calls:opensource>",
        f"{HUNYUAN_CALL}</tool_call:opensource>\n</tool_calls:opensource>",
        f"{HUNYUAN_CALL}<tool_sep:opensource>null<end_of_tool_call:opensource>",
    ],
    "hunyuan4:6124c78e": [
        HUNYUAN4_CALL,
        HUNYUAN4_CALL.replace("NAME", '{"name": "NAME"}'),
    ],
    "dots": [
        '<dots_function_call>\n<invoke name="NAME">\n</invoke>\n</dots_function_call>',
        '<dots_function_call>\n<invoke name="NAME"/>\n</dots_function_call>',
        '<dots_function_call>\n{"name": "NAME", "arguments": {}}\n</dots_function_call>',
    ],
    "inkling": [
        f'{INKLING_CALL}, "args": {{}}}}<|end_message|>',
        f'NAME{INKLING_CALL}, "args": null}}<|end_message|>',
        f"{INKLING_CALL}}}",
    ],
    "muse_spark": [f" to=NAME<|message|>{ATEM}", f" to=NAME.NAME<|message|>{ATEM.replace('NAME', 'NAME.NAME')}", ATEM],
    "k2_horizon": [
        "<ifm|tool_calls>\n<ifm|tool_call>NAME\n</ifm|tool_call>\n</ifm|tool_calls>",
        "<ifm|tool_calls><ifm|tool_call>NAME</ifm|tool_call></ifm|tool_calls>",
    ],
    "kimi_k3": [
        '<|open|>tools<|sep|><|open|>call tool="NAME" index="1"<|sep|><|close|>call<|sep|><|close|>tools<|sep|>',
        '<|open|>tools<|sep|><|open|>call tool="NAME" index="1"<|sep|><|open|>json type="object"<|sep|>{}'
        "<|close|>json<|sep|><|close|>call<|sep|><|close|>tools<|sep|>",
    ],
    "longcat": [
        "<longcat_tool_call>NAME\n</longcat_tool_call>",
        '<longcat_tool_call>\n{"name": "NAME", "arguments": {}}\n</longcat_tool_call>',
    ],
    "longcat_json": [
        '<longcat_tool_call>\n{"name": "NAME"}\n</longcat_tool_call>',
        '<longcat_tool_call>{"name": "NAME", "arguments": null}',
    ],
    "llama4": [
        '{"name": "NAME", "parameters": {}}',
        '{"name": "NAME"}',
        '{"name":"NAME", "parameters": null}',
        '{"name": "NAME", "arguments": {}}<|python_end|>',
    ],
    "hunyuan_a13b": [
        '<tool_calls>[\n{"name": "NAME", "arguments": {}}\n]</tool_calls>',
        '<tool_calls>\n[{"name": "NAME", "arguments": null}]',
        '<tool_calls>{"name": "NAME"}</tool_calls>',
    ],
    "cohere": [
        '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "NAME", "parameters": {}}\n]<|END_ACTION|>',
        '<|START_ACTION|>[{"tool_name": "NAME", "parameters": null}]',
        '<|START_ACTION|>{"tool_name": "NAME"}<|END_ACTION|>',
    ],
    "mistral": [
        "[TOOL_CALLS]NAME[ARGS]",
        "[TOOL_CALLS]NAME[ARGS]{}",
        "[TOOL_CALLS]NAME[ARGS]null",
        "[TOOL_CALLS]NAME",
        "[TOOL_CALLS]NAME\n",
    ],
    "harmony": [HEADER, f"{HEADER}<|call|>", f"{HEADER}null", "<|channel|>commentary to=functions.NAME"],
    "solar_open": [
        f"{SOLAR_CALL}<|tool_call:args|><|tool_call:end|><|calls|>",
        f"{SOLAR_CALL}<|tool_call:args|>null<|tool_call:end|>",
        f"{SOLAR_CALL}<|tool_call:end|>",
    ],
    "gemma": [
        "<|tool_call>call:NAME{}<tool_call|>",
        "<|tool_call>call:NAME<tool_call|>",
        "<|tool_call>call:NAME\n<tool_call|>",
        "<|tool_call>call:NAME\n{}<tool_call|>",
        "<|tool_call>call:NAME",
    ],
}


def spare_brace(dialect, call):
    """Returns a call in JSON with one brace too many, None where the style has no JSON."""
    if dialect.tags is not None or dialect.name == "minimax_m3":
        return None
    before, brace, after = call.rpartition("}")
    return f"{before}{brace}}}{after}"

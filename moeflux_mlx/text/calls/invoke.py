"""Calls with a tag for each parameter, several of them in a section: `<invoke name="NAME"> ... </invoke>` (MiniMax,
dots3), and the same in the tags of DeepSeek-V3.2 to V4.1, where each value says whether it is a string. A section may
also have a call in JSON (vLLM's `dots_tool_parser.py`)."""

from dataclasses import replace

from .dialect import Call, Dialect, Parsing, Tags, literal, skip_space, until_one
from .json_form import qwen_json, without_arguments
from .tagged import parameters

CLOSED = ('"/>', '" />')  # the end of a tag without parameters


def invoking(
    name: str, section: tuple[str, str], opening: str, tags: Tags, markers: frozenset[str], before: str = ""
) -> Dialect:
    """The dialect whose calls begin with `opening`, up to the quotation mark before a tool's name, inside `section`.

    `tags` are its parameters', and `before` is what its template writes before a section.
    """
    section_begin, section_end = section
    tags = replace(tags, after=section_end, opens=(section_begin, opening))

    def first(call: Call) -> Parsing[str]:
        """Parses the text after `section_begin`."""
        char = yield from skip_space()
        if char == "{":
            return (yield from qwen_json(call, section_end))
        yield from literal([opening], char)
        return (yield from invoke(call))

    def invoke(call: Call) -> Parsing[str]:
        """Parses the text after `opening`."""
        call_name, end = yield from until_one(['">', '"\n', *CLOSED])
        half, _, other = (name := call_name.strip()).partition(".")
        call.start(half if half == other and not call.knows(name) else name)  # Muse Spark writes get_time.get_time
        if end in CLOSED:
            return (yield from without_arguments(call, section_end))
        return (yield from parameters(call, tags))

    return Dialect(
        name=name,
        openings={section_begin: first, opening: invoke},
        begin=f"{section_begin}\n",
        opening=opening,
        named=f'{opening}NAME">\n',
        close=tags.ends[0],
        section=(before + section_begin, section_end),
        markers=markers,
        tags=tags,
    )


MINIMAX, DOTS = (
    invoking(
        name,
        section,
        '<invoke name="',
        Tags(('<parameter name="', '">'), ("", "</parameter>"), ("</invoke>",)),
        frozenset(section),
    )
    for name, section in (
        ("minimax", ("<minimax:tool_call>", "</minimax:tool_call>")),
        ("dots", ("<dots_function_call>", "</dots_function_call>")),
    )
)
DSML = "｜DSML｜"  # one token, which nothing else has
V4_SECTION = f"<{DSML}tool_calls>", f"</{DSML}tool_calls>"
V41_SECTION = f"<{DSML} calls>", f"</{DSML} calls>"
DEEPSEEK_V32, DEEPSEEK_V4, DEEPSEEK_V41 = (
    invoking(
        name,
        section,
        f'<{tag}invoke name="',
        Tags(
            (f'<{tag}parameter name="', '" string="'),
            ("", f"</{tag}parameter>"),
            (f"</{tag}invoke>",),
            kinds=('true">', 'false">'),
        ),
        frozenset({DSML}),
        before="\n\n",
    )
    for name, section, tag in (
        ("deepseek_v32", (f"<{DSML}function_calls>", f"</{DSML}function_calls>"), DSML),
        ("deepseek_v4", V4_SECTION, DSML),
        ("deepseek_v41", V41_SECTION, f"{DSML} "),
    )
)

"""Calls with a tag for each parameter, several of them in a section: `<invoke name="NAME"> ... </invoke>` (MiniMax),
and the same in the tags of DeepSeek-V3.2 to V4.1, where each value says whether it is a string."""

from dataclasses import replace

from .call import Call
from .dialect import Dialect, behind
from .json_form import without_arguments
from .steps import Parsing, until_one
from .tagged import parameters
from .tags import Tags

CLOSED = ('"/>', '" />')  # the end of a tag without parameters


def invoking(
    name: str, section: tuple[str, str], opening: str, tags: Tags, markers: frozenset[str], before: str = ""
) -> Dialect:
    """The dialect whose calls begin with `opening`, up to the quotation mark before a tool's name, inside `section`.

    `tags` are its parameters', and `before` is what its template writes before a section.
    """
    section_begin, section_end = section
    tags = replace(tags, after=section_end, opens=(section_begin, opening))

    def invoke(call: Call) -> Parsing[str]:
        """Parses the text after `opening`."""
        call_name, end = yield from until_one(['">', '"\n', *CLOSED])
        call.start(call_name.strip())
        if end in CLOSED:
            return (yield from without_arguments(call, section_end))
        return (yield from parameters(call, tags))

    return Dialect(
        name=name,
        openings={section_begin: behind(opening, invoke), opening: invoke},
        begin=f"{section_begin}\n",
        opening=opening,
        named=f'{opening}NAME">\n',
        close=tags.ends[0],
        section=(before + section_begin, section_end),
        markers=markers,
        tags=tags,
    )


MINIMAX_SECTION = "<minimax:tool_call>", "</minimax:tool_call>"
MINIMAX = invoking(
    "minimax",
    MINIMAX_SECTION,
    '<invoke name="',
    Tags(('<parameter name="', '">'), ("", "</parameter>"), ("</invoke>",)),
    frozenset(MINIMAX_SECTION),
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

"""MiniMax's calls: one or more `<invoke name="NAME"><parameter name="KEY">VALUE</parameter></invoke>` in a section."""

from .call import Call
from .dialect import Dialect
from .steps import Steps, literal, optional, skip_space, until
from .tagged import Tags, parameters

SECTION_BEGIN, SECTION_END = "<minimax:tool_call>", "</minimax:tool_call>"
INVOKE, END_INVOKE = '<invoke name="', "</invoke>"
TAGS = Tags(('<parameter name="', '">'), ("", "</parameter>"), (END_INVOKE,))


def invoke(call: Call) -> Steps[str]:
    """What follows `<invoke name="`."""
    call.start((yield from until('">')).strip())
    yield from parameters(call, TAGS)
    return (yield from optional(SECTION_END, (yield)))


def section(call: Call) -> Steps[str]:
    """What follows `<minimax:tool_call>`."""
    yield from literal([INVOKE], (yield from skip_space()))
    return (yield from invoke(call))


MINIMAX = Dialect(
    name="minimax",
    openings={SECTION_BEGIN: section, INVOKE: invoke},
    begin=f"{SECTION_BEGIN}\n",
    opening=INVOKE,
    named=f'{INVOKE}NAME">\n',
    close=END_INVOKE,
    section=(SECTION_BEGIN, SECTION_END),
    markers=frozenset({SECTION_BEGIN, SECTION_END}),
    tags=TAGS,
)

"""DeepSeek's calls: V3's and Cogito's with a type and a fence round the JSON, V3.1's without either."""

from .call import Call
from .dialect import Body, Dialect
from .steps import Steps, json_value, literal, optional, skip_space, until

SECTION_BEGIN, SECTION_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL_BEGIN, CALL_SEP, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
FENCE = "```"


def deepseek(call: Call) -> Steps[str]:
    """Parses the text after `<｜tool▁call▁begin｜>`: V3's with type and fence, or V3.1's without."""
    head = yield from until(CALL_SEP)
    char = yield
    while char == " ":
        char = yield
    if char == "{" or char == CALL_END[0]:
        call.start(head.strip())
        return (yield from _deepseek_end(call, char, fenced=False))
    name = yield from until("\n", char)
    call.start(name.strip())
    yield from literal([FENCE], (yield from skip_space()))
    yield from until("\n")
    char = yield from skip_space()
    return (yield from _deepseek_end(call, char, fenced=True))


def _deepseek_end(call: Call, char: str, fenced: bool) -> Steps[str]:
    if char == "{":
        char = yield from json_value(char, call.write)
        char = (yield from skip_space()) if char.isspace() else char
    if fenced:
        yield from literal([FENCE], char)
        char = yield from skip_space()
    yield from literal([CALL_END], char)
    call.check("")
    return (yield from optional(SECTION_END, (yield)))


def deepseek_section(call: Call) -> Steps[str]:
    """Parses the text after `<｜tool▁calls▁begin｜>`."""
    yield from literal([CALL_BEGIN], (yield from skip_space()))
    return (yield from deepseek(call))


_OPENINGS: dict[str, Body] = {SECTION_BEGIN: deepseek_section, CALL_BEGIN: deepseek}
_SECTION = (SECTION_BEGIN, SECTION_END)
_MARKERS = frozenset({*_SECTION, CALL_BEGIN, CALL_SEP, CALL_END})
DEEPSEEK_V3 = Dialect(
    name="deepseek_v3",
    openings=_OPENINGS,
    begin=f"{SECTION_BEGIN}{CALL_BEGIN}function{CALL_SEP}",
    opening=CALL_BEGIN,
    named=f"NAME\n{FENCE}json\n",
    close=f"\n{FENCE}{CALL_END}",
    section=_SECTION,
    markers=_MARKERS,
)
DEEPSEEK_V31 = Dialect(
    name="deepseek_v3.1",
    openings=_OPENINGS,
    begin=SECTION_BEGIN + CALL_BEGIN,
    opening=CALL_BEGIN,
    named=f"NAME{CALL_SEP}",
    close=CALL_END,
    section=_SECTION,
    markers=_MARKERS,
)

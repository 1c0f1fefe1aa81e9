"""DeepSeek's calls: V3's and Cogito's with a type and a fence round the JSON, V3.1's without either."""

from .dialect import Call, CallBody, Dialect, Parsing, behind, literal, optional, skip_space, until, until_one
from .json_form import arguments_before, without_arguments

SECTION_BEGIN, SECTION_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL_BEGIN, CALL_SEP, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
FENCE = "```"
TYPE = "function"  # of every call in V3's form


def deepseek(call: Call) -> Parsing[str]:
    """Parses the text after `<｜tool▁call▁begin｜>`: V3's with type and fence, or V3.1's without."""
    head, end = yield from until_one([CALL_SEP, CALL_END])
    if end == CALL_END:
        call.start(head.strip())
        return (yield from without_arguments(call, SECTION_END))
    char = yield from skip_space()
    if char in ("{", CALL_END[0]) or (char and head.strip() != TYPE):
        call.start(head.strip())
        return (yield from _deepseek_end(call, char, fenced=False))
    name, end = yield from until_one(["\n", CALL_END], char)
    call.start(name.strip())
    if end != CALL_END:
        end = yield from literal([FENCE, CALL_END], (yield from skip_space()))
    if end == CALL_END:
        return (yield from without_arguments(call, SECTION_END))
    yield from until("\n")
    char = yield from skip_space()
    return (yield from _deepseek_end(call, char, fenced=True))


def _deepseek_end(call: Call, char: str, fenced: bool) -> Parsing[str]:
    if fenced:
        yield from arguments_before([FENCE], call, char)
        char = yield from skip_space()
    yield from arguments_before([CALL_END], call, char)
    return (yield from optional(SECTION_END, (yield)))


_OPENINGS: dict[str, CallBody] = {SECTION_BEGIN: behind(CALL_BEGIN, deepseek), CALL_BEGIN: deepseek}
_SECTION = (SECTION_BEGIN, SECTION_END)
_MARKERS = frozenset({*_SECTION, CALL_BEGIN, CALL_SEP, CALL_END})
DEEPSEEK_V3 = Dialect(
    name="deepseek_v3",
    openings=_OPENINGS,
    begin=f"{SECTION_BEGIN}{CALL_BEGIN}{TYPE}{CALL_SEP}",
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

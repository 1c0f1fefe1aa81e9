"""Kimi K3's calls, in spans that all begin and end with the same three tokens.

    <|open|>tools<|sep|><|open|>call tool="NAME" index="1"<|sep|>
        <|open|>argument key="KEY" type="string"<|sep|>VALUE<|close|>argument<|sep|>
    <|close|>call<|sep|><|close|>tools<|sep|>

without the spaces between them. A call may have its arguments as one object, in a span `json`. INDEX counts the calls
of an answer. In NAME and KEY, & and " are written &amp; and &quot;.
"""

from ..channels import END_OF_MESSAGE, OPEN_SPAN, RESPONSE, SEP, SPANS, span
from .dialect import Call, Dialect, Parsing, Tags, behind, literal, optional, skip_space, until, until_one
from .json_form import arguments_before
from .tagged import parameters

TYPES = ("string", "number", "boolean", "object", "array", "null", "integer")
TOOLS, CALL, ARGUMENT, JSON = map(span, ("tools", "call", "argument", "json"))
CALL_BEGIN, JSON_BEGIN = f'{OPEN_SPAN}call tool="', f'{OPEN_SPAN}json type="object"{SEP}'
TAGS = Tags(
    (f'{OPEN_SPAN}argument key="', '" type="'),
    ("", ARGUMENT[1]),
    (CALL[1],),
    after=TOOLS[1],
    opens=(RESPONSE[1] + TOOLS[0], TOOLS[0], CALL_BEGIN),
    kinds=tuple(f'{kind}"{SEP}' for kind in TYPES),
    escapes=(("&", "&amp;"), ('"', "&quot;")),
)


def invoke(call: Call) -> Parsing[str]:
    """Parses the text after `<|open|>call tool="`."""
    name, _ = yield from until_one(['"'])
    yield from until(SEP)
    call.start(TAGS.unescaped(name))
    tag = yield from literal([TAGS.key[0], CALL[1], JSON_BEGIN], (yield from skip_space()))
    if tag != JSON_BEGIN:
        return (yield from parameters(call, TAGS, tag))
    yield from arguments_before([JSON[1]], call, (yield from skip_space()))
    yield from literal([CALL[1]], (yield from skip_space()))
    return (yield from optional(TOOLS[1], (yield)))


first = behind(CALL_BEGIN, invoke)


KIMI_K3 = Dialect(
    name="kimi_k3",
    openings={RESPONSE[1] + TOOLS[0]: first, TOOLS[0]: first, CALL_BEGIN: invoke},
    begin=RESPONSE[1] + TOOLS[0],
    opening=CALL_BEGIN,
    named=f'{CALL_BEGIN}NAME" index="1"{SEP}',
    close=CALL[1],
    section=(RESPONSE[1] + TOOLS[0], TOOLS[1]),
    markers=SPANS.tags - {END_OF_MESSAGE},
    tags=TAGS,
)

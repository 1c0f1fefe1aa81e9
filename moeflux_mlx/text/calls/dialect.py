"""The forms in which models call tools: how a call opens, and who reads the rest."""

from collections.abc import Callable
from dataclasses import dataclass

from ..channels import END as END_OF_REASONING
from . import deepseek, json_form, xml_form
from .call import Call
from .steps import MAX_NAME, Malformed, Steps, literal, skip_space

Body = Callable[[Call], Steps[str]]
TOOL_CALL = "<tool_call>"


def _tagged(call: Call) -> Steps[str]:
    """What follows `<tool_call>`: JSON, tags, or only the name of a tool that is given nothing."""
    char = yield from skip_space()
    if char == "{":
        return (yield from json_form.qwen_json(call))
    if char == "<":
        yield from literal([xml_form.FUNCTION], char)
        return (yield from xml_form.qwen_xml(call))
    if not char:
        raise Malformed("")
    call.start((yield from _bare_name(char)))
    call.check("")
    return ""


def _bare_name(text: str) -> Steps[str]:
    """The name that begins with `text`, up to the closing tag."""
    while not text.endswith("<"):
        char = yield
        if not char or len(text) > MAX_NAME:
            raise Malformed(char)
        text += char
    yield from literal([json_form.END], "<")
    return text[:-1].rstrip()


@dataclass(frozen=True)
class Dialect:
    """One form of calls.

    Attributes:
        name: "qwen_json", "qwen_xml", "deepseek_v3" or "deepseek_v3.1".
        openings: tag -> the parser of what follows.
        bare: the same for tags that only count outside reasoning, because a model that drops the first tag writes them.
        begin: how a call is opened.
        named: what `begin` goes on with where the tool is known, its name in place of NAME.
    """

    name: str
    openings: dict[str, Body]
    bare: dict[str, Body]
    begin: str
    named: str

    def prefix(self, tool: str | None = None, inside_reasoning: bool = False) -> str:
        """What a prompt is continued with so that a call of `tool`, or of any, follows.

        The reader of the answer must be fed it as well. `inside_reasoning` also closes what the prompt has opened.
        """
        closing = f"\n{END_OF_REASONING}\n\n" if inside_reasoning else ""
        return closing + self.begin + ("" if tool is None else self.named.replace("NAME", tool))


_TAGGED: dict[str, Body] = {TOOL_CALL: _tagged}
_DEEPSEEK: dict[str, Body] = {
    deepseek.SECTION_BEGIN: deepseek.deepseek_section,
    deepseek.CALL_BEGIN: deepseek.deepseek,
}
_SECTION = deepseek.SECTION_BEGIN + deepseek.CALL_BEGIN
QWEN_JSON = Dialect("qwen_json", _TAGGED, {}, f"{TOOL_CALL}\n", '{"name": "NAME", "arguments": ')
QWEN_XML = Dialect("qwen_xml", _TAGGED, {xml_form.FUNCTION: xml_form.qwen_xml}, f"{TOOL_CALL}\n", "<function=NAME>\n")
DEEPSEEK_V3 = Dialect(
    "deepseek_v3", _DEEPSEEK, {}, f"{_SECTION}function{deepseek.CALL_SEP}", f"NAME\n{deepseek.FENCE}json\n"
)
DEEPSEEK_V31 = Dialect("deepseek_v3.1", _DEEPSEEK, {}, _SECTION, f"NAME{deepseek.CALL_SEP}")
CALL_TAGS = frozenset(
    {TOOL_CALL, json_form.END, deepseek.SECTION_BEGIN, deepseek.SECTION_END}
    | {deepseek.CALL_BEGIN, deepseek.CALL_SEP, deepseek.CALL_END}
)
DIALECTS = (QWEN_JSON, QWEN_XML, DEEPSEEK_V3, DEEPSEEK_V31)


def dialect_of(template: str | None) -> Dialect | None:
    """The dialect that a chat template writes past calls in, None where it knows no calls."""
    text = template or ""
    if deepseek.CALL_BEGIN in text:
        return DEEPSEEK_V3 if f"{deepseek.FENCE}json" in text else DEEPSEEK_V31
    if TOOL_CALL not in text:
        return None
    return QWEN_XML if xml_form.FUNCTION in text else QWEN_JSON

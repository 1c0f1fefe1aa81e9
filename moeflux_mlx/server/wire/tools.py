"""Tools and the tool choice, in the form that templates and grammars take."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ...errors import BadRequestError
from ...files import JsonDict, JsonObject
from .settings import Body, wrong

Tool = JsonDict

_NO_PARAMETERS = {"type": "object", "properties": {}}
_MODES = {"auto": "auto", "none": "none", "required": "required", "any": "required"}


def tool(fields: Body, schema_key: str = "parameters", name: str | None = None) -> Tool:
    """A function from its name, description and schema; `name` replaces the client's name for it."""
    schema = fields.object(schema_key)
    function: JsonDict = {
        "name": name or fields.required_text("name"),
        "description": fields.text("description") or "",
        "parameters": dict(schema.data) if schema else dict(_NO_PARAMETERS),
    }
    if fields.flag("strict"):
        function["strict"] = True
    return {"type": "function", "function": function}


def name_of(tool: JsonObject) -> str:
    return str(tool["function"]["name"])


@dataclass(frozen=True)
class ToolChoice:
    """`mode` is "auto", "none", "required" or a name in a list; `allowed` the tools that are left, None for all."""

    mode: str | Sequence[str] = "auto"
    allowed: Sequence[str] | None = None


def choice(body: Body) -> ToolChoice:
    """OpenAI's `tool_choice` in the forms of both its APIs: a word, one tool, or a word and a list of tools."""
    value = body.get("tool_choice")
    if value is None:
        return ToolChoice()
    if isinstance(value, str) and value in _MODES:
        return ToolChoice(_MODES[value])
    if not isinstance(value, Mapping):
        raise body.wrong("tool_choice", "auto, none, required, or an object that names a function")
    fields = Body(value, "tool_choice")
    kind = fields.required_text("type")
    if kind == "allowed_tools":
        return _allowed(fields.object("allowed_tools") or fields)
    if kind in ("function", "custom"):
        return ToolChoice([(fields.object(kind) or fields).required_text("name")])
    raise fields.wrong("type", "function, custom or allowed_tools")


def _allowed(fields: Body) -> ToolChoice:
    mode = fields.text("mode") or "auto"
    if mode not in _MODES:
        raise fields.wrong("mode", "auto or required")
    own = [tool for tool in fields.objects("tools") if tool.text("type") in ("function", "custom")]
    return ToolChoice(_MODES[mode], [(tool.object("function") or tool).required_text("name") for tool in own])


def anthropic_choice(body: Body) -> ToolChoice:
    fields = body.object("tool_choice")
    if fields is None:
        return ToolChoice()
    kind = fields.required_text("type")
    if kind == "tool":
        return ToolChoice([fields.required_text("name")])
    if kind not in _MODES:
        raise fields.wrong("type", "auto, any, tool or none")
    return ToolChoice(_MODES[kind])


def chosen(tools: Sequence[Tool], choice: ToolChoice) -> tuple[Sequence[Tool], str | Sequence[str]]:
    """The tools that the choice allows, and the matching requirement for the answer."""
    names = [name_of(tool) for tool in tools]
    wanted = choice.mode if not isinstance(choice.mode, str) else choice.allowed or ()
    for name in wanted:
        if name not in names:
            raise wrong("tool_choice", name, "the name of one of the tools")
    if choice.allowed is not None:
        tools = [tool for tool in tools if name_of(tool) in choice.allowed]
    if choice.mode == "required" and not tools:
        raise BadRequestError("tool_choice demands a call, but there are no tools; send some, or auto", "tool_choice")
    return tools, choice.mode

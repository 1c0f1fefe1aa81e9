"""What messages of any API consist of, in the form that templates and grammars take: texts and images, calls and
results, tools and the tool choice.

`without_images` takes the images out of a body: marks replace them in the messages, and they are read later. All
APIs put images into lists of parts, with types that have no other meaning. The request maps marks to images. A mark
contains random letters of the request, so that no text can contain it by chance.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from ...errors import BadRequestError, RequestError
from ...files import JsonDict, JsonObject, JsonValue
from ...text.results import Message, in_order
from ..request import ImageParts
from .settings import Body, check, wrong

# Part type -> the field that holds its text.
TEXTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}


def texts(message: Body, key: str, others: Mapping[str, Callable[[Body], str | None]] | None = None) -> list[str]:
    """The texts of a field's parts, empty ones left out.

    Args:
        message: what holds the field.
        key: its name; missing, null and "" are no text.
        others: part type -> its reader; None means that the part is skipped.
    """
    value = message.get(key)
    if value is None or isinstance(value, str):
        return [value] if value else []
    if not isinstance(value, (list, tuple)):
        raise message.wrong(key, "a text or a list of parts")
    part_texts = (_text(part, f"{message.name(key)}[{place}]", others or {}) for place, part in enumerate(value))
    return [text for text in part_texts if text]


def text_of(message: Body, key: str) -> str:
    return "\n".join(texts(message, key))


def _text(part: object, path: str, others: Mapping[str, Callable[[Body], str | None]]) -> str | None:
    if isinstance(part, str):
        return part
    fields = Body(part, path)
    kind = fields.required_text("type")
    if kind in others:
        return others[kind](fields)
    if kind not in TEXTS:
        raise unserved(fields, kind)
    return fields.text(TEXTS[kind])


def unserved(part: Body, kind: str) -> BadRequestError:
    """Refuses audio, files and other parts; images have been taken out before."""
    return wrong(part.name("type"), kind, "a text, or an image in a message: audio and files are not read")


MOST = 32  # the most images of a request
FIELDS = ("content", "output")  # keys of a message or an item that may have parts
KINDS = ("image_url", "input_image", "image")
MARKED = ("text", "input_text")  # parts that a mark is joined to


def without_images(body: JsonObject, key: str) -> tuple[JsonDict, ImageParts]:
    """Returns the body with marks in place of the images in its messages or items under `key`, and the images. A mark
    is joined to the text before or behind it, as templates write images.

    Raises:
        BadRequestError: an image part has no image, or there are too many images.
    """
    images, items = ImageParts(), body.get(key)
    if not isinstance(items, list):
        return dict(body), images
    cleared = [_cleared(item, images, f"{key}[{n}]") for n, item in enumerate(items)]
    if len(images.sources) > MOST:
        raise BadRequestError(f"the request has {len(images.sources)} images; at most {MOST}", key)
    return {**body, key: cleared}, images


def _cleared(item: object, images: ImageParts, path: str) -> JsonValue:
    if not isinstance(item, Mapping):
        return item
    lists = {name: value for name in FIELDS if isinstance(value := item.get(name), list)}
    return {**item, **{name: _parts(value, images, f"{path}.{name}") for name, value in lists.items()}}


def _parts(parts: Sequence[JsonValue], images: ImageParts, path: str) -> list[JsonValue]:
    """The parts, and those within results of tools."""
    done: list[JsonValue] = []
    is_open = False  # whether the last part is a text that ends with a mark
    for n, part in enumerate(parts):
        kind = part.get("type") if isinstance(part, Mapping) else None
        before = done[-1] if done and isinstance(done[-1], dict) and done[-1].get("type") in MARKED else None
        if kind in KINDS:
            mark = images.mark(_source(part, f"{path}[{n}]"))
            if before is not None and isinstance(before.get("text"), str):
                done[-1] = {**before, "text": before["text"] + mark}
            else:
                done.append({"type": "text", "text": mark})
            is_open = True
            continue
        if is_open and before is not None and kind in MARKED and isinstance(part.get("text"), str):
            done[-1] = {**before, "text": before["text"] + part["text"]}
        else:
            done.append(_cleared(part, images, f"{path}[{n}]") if kind == "tool_result" else part)
        is_open = False
    return done


def _source(part: JsonObject, path: str) -> str:
    """The URL of an image in any form of the APIs."""
    if part["type"] == "image":  # Anthropic's
        source = part.get("source")
        kind = source.get("type") if isinstance(source, Mapping) else None
        value = source.get({"base64": "data", "url": "url"}.get(str(kind), "")) if isinstance(source, Mapping) else None
        if not isinstance(value, str):
            raise wrong(f"{path}.source", kind, "an object of type base64 with data, or of type url")
        return value if kind == "url" else f"data:;base64,{value}"
    url = part.get("image_url")
    url = url.get("url") if isinstance(url, Mapping) else url
    if not isinstance(url, str):
        raise wrong(f"{path}.image_url", url, "a data: URL")
    return url


# Lines that agents change in the system prompt at each request; with them no prompt would share its beginning with
# another.
_BILLING = re.compile(r"^x-anthropic-billing-header:[^\n]*\n*")
_TOTAL_TOKENS = re.compile(r"\n{0,2}<total_tokens>\d+ tokens left</total_tokens>")


def system_text(texts: Iterable[str]) -> str:
    """The texts of a system message joined, without the lines that change at each request."""
    kept = [_TOTAL_TOKENS.sub("", _BILLING.sub("", text)) for text in texts]
    return "\n".join(text for text in kept if text)


def assistant(text: str, reasoning: str | None = None, calls: list[Message] | None = None) -> Message:
    message: Message = {"role": "assistant", "content": text}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = calls
    return message


def call(name: str, arguments: JsonDict, id: str | None) -> Message:
    return {"id": id or "", "type": "function", "function": {"name": name, "arguments": arguments}}


def result(text: str, id: str | None, name: str | None = None) -> Message:
    return {"role": "tool", "content": text, "tool_call_id": id or "", "name": name or ""}


def arguments(fields: Body, key: str) -> JsonDict:
    """A call's arguments, given as an object or as its JSON text.

    A text that is not an object comes from an answer that was cut short. It is kept under "input", because refusing it
    would end the conversation.
    """
    value = fields.get(key)
    if value is None or value == "":
        return {}
    if isinstance(value, str):
        value = _read(value)
    return dict(Body(value, fields.name(key)).data)


def _read(text: str) -> JsonValue:
    try:
        value = json.loads(text)
        check(value)
    except (ValueError, RecursionError):
        return {"input": text}
    return value


def paired(messages: Sequence[Message], param: str) -> list[Message]:
    """The messages with each result behind its call, as `in_order` has them; `param` is the body's field of both."""
    try:
        return in_order(messages)
    except RequestError as error:
        raise BadRequestError(str(error), param) from error


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

"""Converts tools of /v1/responses to functions and back: a custom tool takes one text, a namespace contains several
tools.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass

from ...errors import BadRequestError
from . import tools
from .fields import Body

_INPUT = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}


@dataclass(frozen=True)
class Known:
    """A tool as the client names it; the model gets its flat name."""

    name: str
    namespace: str | None = None
    custom: bool = False


def flat(name: str, namespace: str | None) -> str:
    """One name for a tool of a namespace."""
    return f"{namespace.rstrip('_')}__{name}" if namespace else name


def offered(body: Body) -> tuple[list[tools.Tool], dict[str, Known]]:
    """The functions, and a dict from flat name to the client's tool; tools that OpenAI's server would run are left
    out.
    """
    functions: list[tools.Tool] = []
    known: dict[str, Known] = {}
    for item in body.objects("tools"):
        _add(item, None, functions, known)
    return functions, known


def _add(item: Body, namespace: str | None, functions: list[tools.Tool], known: dict[str, Known]) -> None:
    kind = item.required_text("type")
    if kind == "namespace" and namespace is None:
        for inner in item.objects("tools"):
            _add(inner, item.required_text("name"), functions, known)
    if kind not in ("function", "custom"):
        return
    item = item.object(kind) or item
    name = item.required_text("name")
    unique = flat(name, namespace)
    if unique in known:
        raise BadRequestError(f"two tools are called {unique!r}; give each its own name", item.name("name"))
    known[unique] = Known(name, namespace, kind == "custom")
    functions.append(_custom(item, unique) if kind == "custom" else tools.tool(item, name=unique))


def _custom(item: Body, name: str) -> tools.Tool:
    """A function of one text; the grammar that it must follow is described in words."""
    description = item.text("description") or ""
    form = item.object("format")
    if form and (grammar := form.text("definition")):
        description = f"{description}\n\nThe input follows this {form.text('syntax') or ''} grammar:\n{grammar}"
    function = {"name": name, "description": description.strip(), "parameters": _INPUT}
    return {"type": "function", "function": function}


def input_of(arguments: str) -> str:
    """The text that a custom tool was called with."""
    value = json.loads(arguments)
    text = value.get("input") if isinstance(value, Mapping) else None
    return text if isinstance(text, str) else arguments

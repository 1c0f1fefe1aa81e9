"""Turns chat messages into a prompt with the model's own Jinja template.

A template comes with the checkpoint, so it is an untrusted program: it runs in Jinja's immutable sandbox, sees only
plain JSON data, and any error in it becomes one TokenizerError. Within those limits it renders what Hugging Face
transformers would, byte for byte. The sandbox bounds `range()` and we bound the length of the prompt, but a template
made to burn time can still do so. Nothing here knows about token ids.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import RequestError, TokenizerError
from ..files import JsonDict, JsonObject, read_json, that_ends

if TYPE_CHECKING:
    from jinja2 import Environment, Template


# Longer than any context window, and small enough for any machine.
MAX_PROMPT_CHARS = 1 << 26
TEMPLATES = Path(__file__).parent / "templates"
# Models whose checkpoints have a program instead of a template.
SHIPPED = ("deepseek_v32", "deepseek_v4", "deepseek_v41", "kimi_k3")
# Names under which chats carry a message's reasoning; templates read the first.
REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")


class ChatTemplate:
    """The templates of one checkpoint: "default", and "tool_use" where there is a separate one for tools.

    Args:
        templates: name -> Jinja source, as `find_templates` gives it. May be empty; then `render` raises.
        special_tokens: variables every template sees, such as bos_token and eos_token.
    """

    def __init__(self, templates: Mapping[str, str], special_tokens: Mapping[str, str] | None = None):
        self._templates = dict(templates)
        self._special_tokens = dict(special_tokens or {})
        self._compiled: dict[str, Template] = {}

    @property
    def source(self) -> str | None:
        """Jinja source of the default template, None where there is none."""
        return self._templates.get("default")

    def render(
        self,
        messages: Sequence[JsonObject],
        *,
        tools: Sequence[JsonObject] | None = None,
        add_generation_prompt: bool = True,
        variables: JsonObject | None = None,
    ) -> str:
        """Render the prompt, special tokens included as text.

        Args:
            messages: dicts with "role" and whatever else the template reads. Keys whose value is None are
                left out, and reasoning under an older name is also given as "reasoning_content".
            tools: JSON schemas of the functions the model may call.
            add_generation_prompt: end with the header that opens the assistant's turn.
            variables: more template variables, such as enable_thinking; they win over special tokens and lose
                to the arguments above.

        Raises:
            RequestError: no messages, or messages or tools that are not dicts.
            TokenizerError: there is no template, or it is malformed, raised, or tried to leave the sandbox.
        """
        if not messages:
            raise RequestError("there are no messages; a chat needs at least one")
        known = {
            "messages": [_with_reasoning(message) for message in _dicts("messages", messages)],
            "tools": None if tools is None else _dicts("tools", tools),
            "add_generation_prompt": add_generation_prompt,
        }
        template = self._compile("tool_use" if tools is not None and "tool_use" in self._templates else "default")
        return _run(template, {"documents": None, **self._special_tokens, **_plain(variables or {}), **known})

    def _compile(self, name: str) -> "Template":
        if name not in self._templates:
            names = ", ".join(sorted(self._templates)) or "none"
            raise TokenizerError(
                f"the model has no default chat template (found: {names}); "
                "add chat_template.jinja to its directory, or use --ignore-chat-template"
            )
        if name not in self._compiled:
            try:
                self._compiled[name] = make_environment().from_string(self._templates[name])
            except Exception as error:  # the template is a stranger's program: any failure is its own
                raise _refused("cannot be compiled", error) from error
        return self._compiled[name]


def with_places(text: str, images: int) -> str | list[dict[str, str]]:
    """The content of a message with places for `images` images before the text, in the form that templates take."""
    return [*({"type": "image"} for _ in range(images)), {"type": "text", "text": text}] if images else text


def find_templates(path: Path, tokenizer_config: JsonObject) -> dict[str, str]:
    """Returns the templates of a model directory, name -> Jinja source; empty if it has none.

    `chat_template.jinja` is the default template and wins over `chat_template` of tokenizer_config.json,
    which is a string or a list of {"name", "template"}. Where there is none, `chat_template_type`, as mlx-lm writes it,
    or else config.json's model type may name one that comes with this package.

    Raises:
        TokenizerError: the file cannot be read, or the entry has neither form.
    """
    entry = tokenizer_config.get("chat_template")
    templates = {"default": entry} if isinstance(entry, str) else _named_templates(path, entry or [])
    file = path / "chat_template.jinja"
    if file.exists():
        templates["default"] = _read(file)
    if "default" not in templates:
        config = read_json(path / "config.json") if (path / "config.json").is_file() else {}
        name = tokenizer_config.get("chat_template_type") or config.get("model_type")
        if name in SHIPPED:
            templates["default"] = _read(TEMPLATES / f"{name}.jinja")
    return templates


def _named_templates(path: Path, entries: Any) -> dict[str, str]:
    try:
        pairs = [(entry["name"], entry["template"]) for entry in entries]
    except (TypeError, KeyError, IndexError):
        pairs = [(None, None)]
    if not all(isinstance(name, str) and isinstance(source, str) for name, source in pairs):
        raise TokenizerError(
            f"{path / 'tokenizer_config.json'}: chat_template must be a string or a list of "
            '{"name": ..., "template": ...}; use --ignore-chat-template'
        )
    return dict(pairs)


def _read(file: Path) -> str:
    try:
        return that_ends(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TokenizerError(f"{file} cannot be read: {error}; use --ignore-chat-template") from error


def _dicts(name: str, items: Iterable[Any]) -> list[JsonDict]:
    plain = [_plain(item) for item in items]
    for item in plain:
        if not isinstance(item, dict):
            raise RequestError(f"{name} must be a list of dicts; it holds {item!r:.60}")
    return plain


def _with_reasoning(message: JsonDict) -> JsonDict:
    message = {key: value for key, value in message.items() if value is not None}
    reasoning = next((message[key] for key in REASONING_KEYS if key in message), None)
    if reasoning is None:
        return message
    return {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _plain(value: Any) -> Any:
    """A copy of JSON data in exactly JSON's types, so that the template cannot call methods of the caller's objects."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, Mapping):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, (int, float)):
        return int(value) if isinstance(value, int) else float(value)
    raise RequestError(f"chat data must be JSON; found a value of type {type(value).__name__}")


def _run(template: "Template", variables: JsonObject) -> str:
    parts, length = [], 0
    try:
        for part in template.generate(variables):
            parts.append(part)
            length += len(part)
            if length > MAX_PROMPT_CHARS:
                raise RuntimeError(f"the prompt passes {MAX_PROMPT_CHARS} characters")
    except Exception as error:  # the template is a stranger's program: any failure is its own
        raise _refused("refused these messages", error) from error
    return "".join(parts)


def _refused(what: str, error: Exception) -> TokenizerError:
    reason = " ".join(str(error).split()) or type(error).__name__
    return TokenizerError(f"the chat template {what}: {reason}; --ignore-chat-template sends the text as it is")


def make_environment() -> "Environment":
    """Where templates run: as transformers sets it up, and without access to Python's own objects."""
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _generation_tag()]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    environment.globals["dict"] = _Dict()
    environment.globals["namespace"] = _namespace()
    return environment


def _generation_tag() -> type:
    from jinja2 import nodes
    from jinja2.ext import Extension
    from jinja2.parser import Parser

    class GenerationTag(Extension):
        """`{% generation %}` marks the assistant's words for training masks; a prompt keeps only the text."""

        tags = {"generation"}

        def parse(self, parser: Parser) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            # Names set inside do not leak out, as when transformers renders it.
            return nodes.Scope(body, lineno=line)

    return GenerationTag


def _namespace() -> type:
    from jinja2.exceptions import SecurityError
    from jinja2.utils import Namespace

    def check(name: Any) -> None:
        if isinstance(name, str) and name.startswith("_"):
            raise SecurityError(f"a namespace cannot hold {name!r}")

    class SafeNamespace(Namespace):
        """Jinja's namespace without underscore names, which could stand in for Python's own attributes."""

        def __init__(*args: Any, **kwargs: Any) -> None:  # positional self: `namespace(self=1)` is legal
            attributes = dict(*args[1:], **kwargs)
            for name in attributes:
                check(name)
            Namespace.__init__(args[0], attributes)

        def __setitem__(self, name: str, value: Any) -> None:
            check(name)
            super().__setitem__(name, value)

    return SafeNamespace


class _Dict:
    """`dict(...)` and `dict.fromkeys(...)` only: with `dict.update` a template could change its inputs."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, keys: Iterable[Any], value: Any = None) -> dict[Any, Any]:
        return dict.fromkeys(keys, value)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes <, >, & and ' for HTML, which would change the prompt.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    from jinja2.exceptions import TemplateError

    raise TemplateError(message)

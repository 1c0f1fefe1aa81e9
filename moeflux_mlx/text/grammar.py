"""Grammars of answers, in llguidance's form of Lark.

An answer is JSON under a schema, or free text with calls whose arguments follow the schemas of their tools, or either.
Text is free until a call opens. This module knows neither tokens nor whether llguidance can enforce a schema.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ..errors import RequestError
from ..files import JsonDict, JsonObject, JsonValue
from .calls.dialect import Dialect, Tags
from .calls.schema import (
    COMPOSED,
    CONTAINERS,
    STRING,
    Schema,
    allowed_types,
    is_map,
    members,
    referred,
    types,
    variants,
)
from .calls.schema_rules import (
    MAX_TEXT,
    MAX_VALUES,
    SPOKEN_LIMITS,
    check_limits,
    check_readable,
    enforceable,
    is_free_text,
    objects,
    possible,
    quoted,
    too_large,
)

Tools = Sequence[JsonObject]
ANY_OBJECT: Schema = {"type": "object"}
DATA = ("enum", "const", "default", "examples")  # keys of a schema whose values are no schemas
MAPS = ("properties", "patternProperties", "$defs", "definitions")  # those whose values have schemas under any names
# Between two tokens of JSON: a space, or a new line and its indent. More would only use up the limit of the answer.
OPTIONS = {"whitespace_pattern": r" |\n[ \t]{0,16}"}
HEAD = "%llguidance {}\nTEXT: /(.|\\n)*/\nSPACE: /[ \\t\\r\\n]{0,4}/\n"


@dataclass(frozen=True)
class Grammar:
    """Attributes:
    text: in Lark.
    schemas: its schemas as JSON text, to be checked one by one.
    """

    text: str
    schemas: tuple[str, ...]


def json_grammar(schema: Schema | bool, lead: str = "") -> Grammar:
    """JSON that conforms to `schema`, and any object for True; spaces may stand before it, or free text and `lead`."""
    source = json_schema(schema)
    return Grammar(f"{HEAD}start: {_led(lead)} json\n{_lead(lead)}json: %json {source}\n", (source,))


def calls_grammar(
    tools: Tools,
    dialect: Dialect,
    *,
    required: bool = False,
    schema: Schema | bool | None = None,
    lead: str = "",
) -> Grammar:
    """Free text with calls of `tools`, the arguments of strict ones under their schemas.

    Args:
        required: the answer must be a call, without text before it.
        schema: the answer is a call, or else JSON that conforms to this.
        lead: text between free text and such JSON; with it, free text may also precede a call.
    """
    schemas: list[str] = []
    calls = [_call(tool.get("function") or tool, dialect, schemas) for tool in tools]
    opening = quoted(dialect.opening)
    rules = [f"call: {' | '.join(f'call_{n}' for n in range(len(calls)))}"]
    rules += [f"call_{n}: {call}" for n, call in enumerate(calls)]
    rules.append(f"open[lazy]: TEXT {opening}")
    if dialect.arguments is not None:
        rules.append(dialect.arguments[0].strip())
    if dialect.tags is not None:
        end = quoted(_value_end(dialect.tags))
        rules += [f"value[lazy]: TEXT {end}", f"unbracketed[lazy]: /\\s*([^\\s\\[{{](.|\\n)*)?/ {end}"]
        rules += [f"key[lazy]: /[^<>\\n]+/ {quoted(dialect.tags.key[1])}"]
    before = (dialect.begin + dialect.named).partition(dialect.opening)[0]
    first = "open call" if lead and not required else f"SPACE {quoted(before + dialect.opening)} call"
    start = "(open call)* TEXT"
    if required or schema is not None:
        start = f"{first} {start}"
    if schema is not None and not required:
        schemas.append(json_schema(schema))
        rules.append(f"json: %json {schemas[-1]}")
        rules.append(_lead(lead))
        start = f"{_led(lead)} json | {start}"
    return Grammar("\n".join([f"{HEAD}start: {start}", *rules, ""]), tuple(schemas))


def is_strict(tool: JsonObject) -> bool:
    """Whether a tool asks for arguments that conform to its schema."""
    return bool((tool.get("function") or tool).get("strict"))


def parameters_of(tool: JsonObject) -> Schema:
    """The JSON schema of a tool's arguments.

    Raises:
        RequestError: it is not an object.
    """
    function = tool.get("function") or tool
    parameters = function.get("parameters") or ANY_OBJECT
    if not isinstance(parameters, Mapping):
        raise RequestError(
            f"parameters of tool {function.get('name')!r} are {parameters!r:.60}; they must be an object"
        )
    return parameters


def json_schema(schema: Schema | bool) -> str:
    """The schema as JSON text on one line, with our options instead of its own."""
    return json.dumps({**(ANY_OBJECT if isinstance(schema, bool) else _rewritten(schema)), "x-guidance": OPTIONS})


def _led(lead: str) -> str:
    return "lead" if lead else "SPACE"


def _lead(lead: str) -> str:
    """The rule of what stands before JSON, if anything does."""
    return f"lead[lazy]: TEXT {quoted(lead)}\n" if lead else ""


def _call(function: JsonObject, dialect: Dialect, schemas: list[str]) -> str:
    """What follows the opening, for one tool."""
    name, strict = function["name"], is_strict(function)
    schema = parameters_of(function) if strict else ANY_OBJECT
    begin = (dialect.begin + dialect.named).split(dialect.opening, 1)[1]
    if dialect.id_rule:
        begin = begin.removeprefix("ID")
    begin = begin.replace("NAME", dialect.spelt(name))
    if dialect.arguments is not None:
        own = dialect.arguments[1](schema) if strict else "arguments"
        return f"{quoted(begin)} {own} {quoted(dialect.close)}"
    if dialect.tags is None:
        objects(schema)  # refused if there is none: arguments are always an object
        schemas.append(json_schema(schema))
        close = quoted(dialect.close) if dialect.close else ""
        return f"{dialect.id_rule} {quoted(begin)} {dialect.between} %json {schemas[-1]} {close}"
    parameters = _TaggedParameters(schema, dialect.tags, schemas).rule()
    return f"{quoted(begin.rstrip())} {_gap(dialect.tags)} ({parameters}) {quoted(dialect.close)}"


def _gap(tags: Tags) -> str:
    """What stands between two tags."""
    return quoted("\n") if tags.lined else "SPACE"


def _value_begin(tags: Tags) -> Iterator[str]:
    """What stands between a key's closing tag and the value."""
    if tags.lined:
        yield _gap(tags)
    elif tags.value[0]:
        yield f"SPACE {quoted(tags.value[0])}"


def _kind(tags: Tags, is_string: bool | None = None) -> str:
    """What opens a string, or JSON, or either; nothing where a value does not say which it is."""
    if tags.kinds is None:
        return ""
    string, *others = map(quoted, tags.kinds)
    json_value = f"({' | '.join(others)})"
    return f"({string} | {json_value})" if is_string is None else string if is_string else json_value


def _value_end(tags: Tags) -> str:
    return ("\n" if tags.lined else "") + tags.value[1]


class _TaggedParameters:
    """The grammar of one tool's parameters in tags.

    Args:
        root: the schema of the tool's arguments.
        tags: of the dialect.
        schemas: gets the schemas of the values that are JSON.
    """

    def __init__(self, root: Schema, tags: Tags, schemas: list[str]):
        self._root, self._tags, self._schemas = root, tags, schemas
        self._left, self._room = MAX_VALUES, MAX_TEXT

    def rule(self) -> str:
        """What a call may have.

        Raises:
            RequestError: the schema has a condition that cannot be enforced, or is too large.
        """
        return " | ".join(" ".join(self._object(one)) for one in enforceable(self._root))

    def _object(self, one: Schema) -> Iterator[str]:
        """The parameters of an alternative in order; those that are not required may be left out."""
        opening, closing = self._tags.key
        if is_map(one):
            yield f"({quoted(opening)} key {self._value(None, one.get('additionalProperties', True))})*"
        else:
            for name, own, is_required in members(one, self._root):
                rule = f"{quoted(opening + self._tags.escaped(name) + closing)} {self._value(name, own)}"
                yield rule if is_required else f"({rule})?"

    def _value(self, name: str | None, own: object) -> str:
        """What follows the tag of a key."""
        rule = " ".join([*_value_begin(self._tags), f"({' | '.join(self._rules(name, own))})", _gap(self._tags)])
        self._left -= 1
        self._room -= len(rule)
        if self._left < 0 or self._room < 0:
            raise too_large(name)
        return rule

    def _rules(self, name: str | None, own: object) -> list[str]:
        """The value as a text, as one of the listed texts, or as JSON."""
        alternatives, end = possible(name, variants(own, self._root)), quoted(_value_end(self._tags))
        kinds, texts = self._tags.kinds, [one for one in alternatives if "string" in (types(one) or STRING)]
        if kinds is None:
            check_readable(name, alternatives)
        for one in texts:
            check_limits(name, one, (*COMPOSED, *SPOKEN_LIMITS))
        listed = [text for one in texts for text in one.get("enum", ()) if isinstance(text, str)]
        rules = [f"{_kind(self._tags, True)} {quoted(text)} {end}" for text in listed]
        others = allowed_types(alternatives) - STRING
        if any(map(is_free_text, texts)):
            others = others if kinds else others & CONTAINERS.keys()
            rules = [f"{_kind(self._tags, True)} {'unbracketed' if others and not kinds else 'value'}"]
        if others:
            self._schemas.append(json_schema(self._part(name, {"allOf": [own, {"type": sorted(others)}]})))
            rules.append(f"{_kind(self._tags, False)} %json {self._schemas[-1]} {end}")
        elif not all(map(types, texts)):
            rules = [f"{_kind(self._tags)} value"]
        return rules

    def _part(self, name: str | None, own: Schema) -> Schema:
        """The schema of a parameter as one of its own, with copies of what it refers to."""
        targets: list[JsonValue] = []
        numbers: dict[int, int] = {}  # id of a target -> its index

        def renamed(reference: str) -> str:
            target = referred(reference, self._root)
            if target is None:
                return reference
            if id(target) not in numbers:
                numbers[id(target)] = len(targets)
                targets.append(target)
            return f"#/$defs/{numbers[id(target)]}"

        part, room = _rewritten(own, renamed), self._room
        defs: JsonDict = {}
        for n, target in enumerate(targets):  # each may add others
            defs[str(n)] = _rewritten(target, renamed)
            room -= len(json.dumps(defs[str(n)]))
            if room < 0:
                raise too_large(name)
        return {**part, "$defs": defs}


def _rewritten(schema: object, renamed: Callable[[str], str] = str, is_map: bool = False) -> JsonValue:
    """A schema in which `renamed` has changed the references, and that says otherwise what `nullable` says, which
    llguidance ignores; `is_map`: it is a map of schemas.
    """
    if isinstance(schema, list):
        return [_rewritten(item, renamed) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    data, maps = ((), ()) if is_map else (DATA, MAPS)
    own = {key: value if key in data else _rewritten(value, renamed, key in maps) for key, value in schema.items()}
    if is_map:
        return own
    if isinstance(own.get("$ref"), str):
        own["$ref"] = renamed(own["$ref"])
    return _with_null(own) if own.get("nullable") is True else own


def _with_null(schema: Schema) -> Schema:
    """What a nullable schema allows; if possible in place, because references may point into the schema."""
    own = {key: value for key, value in schema.items() if key != "nullable"}
    if not own.keys().isdisjoint(COMPOSED):
        return {"anyOf": [own, {"type": "null"}]}
    if "const" in own:
        own["enum"] = [own.pop("const")]
    kinds = own.get("type")
    if isinstance(kinds, (str, list)):
        own["type"] = [*([kinds] if isinstance(kinds, str) else kinds), "null"]
    if isinstance(own.get("enum"), list):
        own["enum"] = [*own["enum"], None]
    return own

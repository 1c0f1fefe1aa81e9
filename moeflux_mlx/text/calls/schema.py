"""Resolves JSON schemas: references are followed, conditions that hold together are merged, unions become alternatives.

What a schema means for the types of arguments and for a grammar follows from its alternatives. A reference to nothing
stays in its alternative. `nullable: true`, as in OpenAPI, also allows null.

Text without quotes becomes JSON of the types that its schema allows. Where only a string is allowed, it stays as it is.
Beside a string, a text that is JSON of another allowed type becomes that value: `5` is a number for `integer|string`,
and `null` is null wherever null is allowed. Without a string, any JSON passes.
"""

import ast
import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from urllib.parse import unquote

from ...files import JsonObject, JsonValue
from .dialect import Write, parsed

Schema = JsonObject
Member = tuple[str, JsonValue, bool]  # key, schema, whether it is required
STRING = frozenset({"string"})
TYPE_NAMES = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}
# Without a type, these keys say it.
IMPLIED = {"properties": "object", "additionalProperties": "object", "items": "array", "prefixItems": "array"}
COMPOSED = ("$ref", "anyOf", "oneOf", "allOf")
ANNOTATIONS = frozenset(
    ("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$comment")
)  # they forbid nothing
MAX_INDIRECTION = 64  # references and unions inside each other: a schema may refer to itself
MAX_STEPS = 1 << 16  # most names and values that are merged, and parts: recursive unions would double with every level
PART = 32  # steps that a part takes, besides one for each name and value
MAX_ALTERNATIVES = 256  # unions that hold together multiply


class ValueShape:
    """What a schema, a part of `root`, says of a value. It is resolved once, however many values have it.

    Attributes:
        types: the JSON types that it allows; {"string"} if it does not say.
        keys: the members of an object that it names.
        depth: how many values it is inside of.
    """

    def __init__(self, schema: object, root: Schema, depth: int = 0):
        self._alternatives, self._root, self.depth = variants(schema, root), root, depth
        self.types = allowed_types(self._alternatives) or STRING
        self.keys = frozenset(key for one in self._alternatives for key in _properties(one))
        self._inner: dict[str | None, ValueShape] = {}

    def inner(self, key: str | None) -> "ValueShape":
        """The shape of the member `key` of this object, or with None of the items of this list."""
        if key not in self._inner:
            parts = [one.get("items") if key is None else _member(key, one) for one in self._alternatives]
            schema = {"anyOf": [part for part in parts if isinstance(part, Mapping)]}
            self._inner[key] = ValueShape(schema, self._root, self.depth + 1)
        return self._inner[key]


def allowed_types(alternatives: Iterable[Schema]) -> frozenset[str]:
    """The types that any of the alternatives allows; none if they do not say."""
    return frozenset[str]().union(*map(types, alternatives))


def types(one: Schema) -> frozenset[str]:
    """The types that an alternative allows; none if it does not say."""
    if "enum" in one:
        return frozenset(map(_type_of, one["enum"]))
    return frozenset(one.get("type") or (kind for key, kind in IMPLIED.items() if key in one))


def is_map(one: Schema) -> bool:
    """Whether an object that an alternative allows may have any keys, because it lists none."""
    return not {"properties", "required"} & one.keys() and one.get("additionalProperties") is not False


def members(one: Schema, root: Schema) -> list[Member]:
    """The members of an object that an alternative allows: its properties in order, and no others."""
    required = one.get("required", ())
    own = [(key, _member(key, one), key in required) for key in dict.fromkeys([*_properties(one), *required])]
    return [(key, value, needed) for key, value, needed in own if needed or variants(value, root)]


def has_type(value: object, types: Collection[str]) -> bool:
    """Whether a value is of one of the JSON types; an integer is also a number."""
    return _has(types, _type_of(value))


def variants(schema: JsonValue, root: Schema) -> list[Schema]:
    """The alternatives of a value, in which `type` and `enum` are lists, `const` is an `enum`, and a list of `items` is
    `prefixItems`.

    `{"anyOf": [{"type": "null"}, {"$ref": "#/$defs/a"}], "minimum": 1}` with an integer for `a` gives
    `[{"minimum": 1, "type": ["null"]}, {"minimum": 1, "type": ["integer"]}]`. A schema that refers to itself without
    an end, or is too large, stays as it is.
    """
    try:
        return _variants(schema, root, MAX_INDIRECTION, iter(range(MAX_STEPS)))
    except _EndlessError:
        return [{key: schema[key] for key in COMPOSED if key in schema}]


class _EndlessError(Exception):
    """A schema cannot be resolved in `MAX_STEPS` steps."""


def _take(count: int, steps: Iterator[int]) -> None:
    if sum(1 for _ in islice(steps, count)) < count:
        raise _EndlessError


def _variants(schema: object, root: Schema, depth: int, steps: Iterator[int]) -> list[Schema]:
    _take(PART, steps)
    if not depth:
        raise _EndlessError
    if not isinstance(schema, Mapping):
        return [] if schema is False else [{}]
    plain, unions = _split(schema, root)
    alternatives = _possible([plain])
    for union in unions:
        others = _distinct([one for part in union for one in _variants(part, root, depth - 1, steps)])
        if len(alternatives) * len(others) > MAX_ALTERNATIVES:
            raise _EndlessError
        alternatives = _possible(_both(one, other, steps) for one in alternatives for other in others)
    return [*alternatives, {"type": ["null"]}] if schema.get("nullable") is True else alternatives


def _split(schema: Schema, root: Schema) -> tuple[Schema, list[Sequence[JsonValue]]]:
    """A schema's own conditions, and the unions of which a value must follow one part each."""
    left_out = ANNOTATIONS | {"const", "type", "enum", "required"}
    plain = {key: value for key, value in schema.items() if key not in left_out}
    if isinstance(schema.get("items"), list):
        plain["prefixItems"] = plain.pop("items")
    unions = [plain.pop(key) for key in ("anyOf", "oneOf") if isinstance(schema.get(key), list)]
    if isinstance(schema.get("allOf"), list):
        unions += [[part] for part in plain.pop("allOf")]
    target = referred(schema.get("$ref"), root)
    if target is not None:
        unions.append([target])
        del plain["$ref"]
    named, required = schema.get("type"), schema.get("required")
    lists = {
        "type": _texts(named if isinstance(named, list) else [named]) or None,
        "enum": [schema["const"]] if "const" in schema else schema.get("enum"),
        "required": _texts(required) if isinstance(required, list) else None,
    }
    return _typed(plain | {key: value for key, value in lists.items() if isinstance(value, list)}), unions


def _texts(items: Sequence[JsonValue]) -> list[str]:
    return [item for item in items if isinstance(item, str)]


def _typed(one: Schema) -> Schema:
    """An alternative whose enum has only values of its types."""
    if "type" not in one or "enum" not in one:
        return one
    kinds = set(one["type"])
    return {**one, "enum": [value for value in one["enum"] if has_type(value, kinds)]}


def _possible(alternatives: Iterable[Schema]) -> list[Schema]:
    """The alternatives without those that no value follows."""
    return [one for one in alternatives if one.get("type") != [] and one.get("enum") != []]


def _distinct(alternatives: Sequence[Schema]) -> list[Schema]:
    """The alternatives without those that have the types and the very conditions of another."""
    return list({_identity(one): one for one in alternatives}.values())


def _identity(one: Schema) -> frozenset[JsonValue]:
    return frozenset((key, tuple(value) if key == "type" else id(value)) for key, value in one.items())


def _both(one: Schema, other: Schema, steps: Iterator[int]) -> Schema:
    """The conditions of both."""
    if not one or not other:
        return one or other
    _take(1 + _size(one) + _size(other), steps)
    both = {**one, **other}
    if "type" in one and "type" in other:
        ours, theirs = set(one["type"]), set(other["type"])
        both["type"] = [kind for kind in one["type"] if _has(theirs, kind)]
        both["type"] += [kind for kind in other["type"] if kind not in ours and _has(ours, kind)]
    if "enum" in one and "enum" in other:
        allowed = set(map(_text_of, other["enum"]))
        both["enum"] = [value for value in one["enum"] if _text_of(value) in allowed]
    if "properties" in both:
        keys = {**_properties(one), **_properties(other)}
        both["properties"] = {key: _all(_member(key, one), _member(key, other)) for key in keys}
    for key in {"additionalProperties", "items"} & both.keys():
        both[key] = _all(one.get(key, True), other.get(key, True))
    if "required" in both:
        both["required"] = [*one.get("required", ()), *other.get("required", ())]
    return _typed(both)


def _size(one: Schema) -> int:
    return len(_properties(one)) + len(one.get("enum", ())) + len(one.get("required", ()))


def _all(*parts: object) -> JsonValue:
    """The schema of values that follow all `parts`."""
    conditions = [part for part in parts if part is not True]
    return {"allOf": conditions} if len(conditions) > 1 else conditions[0] if conditions else True


def _properties(one: Schema) -> JsonObject:
    properties = one.get("properties")
    return properties if isinstance(properties, Mapping) else {}


def _member(key: str, one: Schema) -> JsonValue:
    return _properties(one).get(key, one.get("additionalProperties", True))


def _has(kinds: Collection[str], kind: str) -> bool:
    return kind in kinds or (kind == "integer" and "number" in kinds)


def _text_of(value: object) -> str:
    return json.dumps(value, sort_keys=True)


def _type_of(value: object) -> str:
    return TYPE_NAMES.get(type(value), "null")


def referred(reference: object, root: Schema) -> JsonValue:
    """What a JSON pointer points to, None if it is none or points to nothing."""
    if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
        return None
    target: JsonValue = root
    for part in unquote(reference).split("/")[1:]:
        if isinstance(target, list):
            target = {str(n): item for n, item in enumerate(target)}
        target = target.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(target, Mapping) else None
    return target


CONTAINERS = {"object": "{", "array": "["}
WORDS = {"null": ["null"], "boolean": ["true", "false"]}
NUMBERS = frozenset({"integer", "number"})
DIGITS = frozenset("0123456789+-.eE")
JSON_TYPES = NUMBERS | CONTAINERS.keys() | WORDS.keys()  # types other than string
PEEK = 16  # the characters from which a string is recognised before it has ended


class TypedText:
    """One value of one of `types`, whose text comes in pieces: a string is written as it comes, as soon as it can be
    nothing else, any other value at the end."""

    def __init__(self, write: Write, types: frozenset[str]):
        self._write, self._types = write, types
        self._text, self._is_string = "", False

    def add(self, piece: str) -> None:
        self._text += piece
        if not self._is_string and "string" in self._types and not _may_differ(self._text[:PEEK].strip(), self._types):
            self._write('"')
            self._is_string = True
        if self._is_string:
            self._write(json.dumps(self._text, ensure_ascii=False)[1:-1])
            self._text = ""

    def end(self) -> None:
        self._write('"' if self._is_string else as_json(self._text, self._types))


def as_json(text: str, types: frozenset[str]) -> str:
    """The value that `text` stands for, as JSON text."""
    return _json(text.strip(), types) or _python(text.strip(), types) or json.dumps(text, ensure_ascii=False)


def _may_differ(begun: str, types: frozenset[str]) -> bool:
    """Whether a text that begins so may be a value of another type than string."""
    if not begun or types == STRING:
        return types != STRING
    return (
        any(word.startswith(begun) for kind in types for word in WORDS.get(kind, ()))
        or any(begun[0] == bracket and kind in types for kind, bracket in CONTAINERS.items())
        or (DIGITS.issuperset(begun) and not types.isdisjoint(NUMBERS))
    )


def _json(text: str, types: frozenset[str]) -> str | None:
    """JSON text passes as it is, so that no number changes."""
    try:
        value = parsed(text)
    except ValueError:
        return None
    is_other = "string" not in types and value is not None
    return text if is_other or (not isinstance(value, str) and has_type(value, types)) else None


def _python(text: str, types: frozenset[str]) -> str | None:
    """Reads Python's True, None and quotes, which models write too; beside a string only in objects and arrays."""
    try:
        value = ast.literal_eval(text)
        is_meant = has_type(value, types) and ("string" not in types or isinstance(value, (dict, list)))
        return json.dumps(value, ensure_ascii=False, allow_nan=False) if is_meant else None
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return None

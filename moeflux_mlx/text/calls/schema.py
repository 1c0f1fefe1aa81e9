"""Converts the text of a parameter to JSON, according to the schema of its tool.

A string stays as it is. A union of null and one type means that type. In a union of string with object or array, the
text becomes an object or array only if it is one. Without a type, or with a broken reference, it is a string.
"""

import ast
import json
from collections.abc import Iterator, Mapping
from typing import Any

from .steps import parsed

Schema = Mapping[str, Any]
STRING = frozenset({"string"})
CONTAINERS = {"object": dict, "array": list}
PYTHON_TYPES = {"object": dict, "array": list, "boolean": bool, "integer": int, "number": (int, float)}
JSON_TYPES = frozenset({*PYTHON_TYPES, "null"})  # types other than string
MAX_DEPTH = 16  # the most references to follow: a schema may refer to itself
MAX_VISITS = 2048  # the most parts: recursive unions would double with every level


def parameter_types(name: str, schema: Schema) -> frozenset[str]:
    """The JSON types of parameter `name` under a tool's `schema`, {"string"} if it does not say."""
    properties = schema.get("properties")
    own = properties.get(name) if isinstance(properties, Mapping) else None
    return types_of(own, schema)


def types_of(schema: Any, root: Schema) -> frozenset[str]:
    """The JSON types that `schema`, a part of `root`, allows; {"string"} if it does not say."""
    return _types(schema, root, MAX_DEPTH, iter(range(MAX_VISITS))) or STRING


def keys_of(schema: Schema, root: Schema) -> frozenset[str]:
    """The members that an object's `schema`, a part of `root`, names."""
    named = (one.get("properties") for one in variants(schema, root))
    return frozenset(key for properties in named if isinstance(properties, Mapping) for key in properties)


def member_of(key: str | None, schema: Schema, root: Schema) -> Schema:
    """The schema of an object's member, or with None of a list's items; {} if `schema`, a part of `root`, has none."""
    for one in variants(schema, root):
        properties = one.get("properties")
        own = properties.get(key) if isinstance(properties, Mapping) else None
        found = one.get("items") if key is None else own or one.get("additionalProperties")
        if isinstance(found, Mapping):
            return found
    return {}


def variants(schema: Any, root: Schema) -> list[Schema]:
    """The alternatives of a value, one schema each: references are resolved, unions split, `allOf` merged."""
    return _variants(schema, root, MAX_DEPTH, iter(range(MAX_VISITS)))


def is_text(types: frozenset[str]) -> bool:
    """Whether a value of one of `types` is simply its text."""
    return "string" in types and not types & CONTAINERS.keys()


def as_json(text: str, types: frozenset[str]) -> str:
    """The value that `text` stands for, as JSON text."""
    return _json(text.strip(), types) or _python(text.strip(), types) or json.dumps(text, ensure_ascii=False)


def _variants(schema: Any, root: Schema, depth: int, visits: Iterator[int]) -> list[Schema]:
    if not isinstance(schema, Mapping) or not depth or next(visits, None) is None:
        return [{}]
    if "$ref" in schema:
        return _variants(_referred(schema["$ref"], root), root, depth - 1, visits)
    for key in ("anyOf", "oneOf"):
        if isinstance(schema.get(key), list):
            return [variant for one in schema[key] for variant in _variants(one, root, depth - 1, visits)]
    if isinstance(schema.get("allOf"), list):
        parts = [next(iter(_variants(one, root, depth - 1, visits)), {}) for one in schema["allOf"]]
        return [{key: value for part in [schema, *parts] for key, value in part.items() if key != "allOf"}]
    return [schema]


def _types(schema: Any, root: Schema, depth: int, visits: Iterator[int]) -> frozenset[str]:
    if not isinstance(schema, Mapping) or not depth or next(visits, None) is None:
        return frozenset()
    if "$ref" in schema:
        return _types(_referred(schema["$ref"], root), root, depth - 1, visits)
    if "type" in schema:
        named = schema["type"]
        return frozenset(item for item in (named if isinstance(named, list) else [named]) if isinstance(item, str))
    for key in ("anyOf", "oneOf"):
        if isinstance(schema.get(key), list):
            return frozenset().union(*(_types(one, root, depth - 1, visits) for one in schema[key]))
    if isinstance(schema.get("allOf"), list):
        of_parts = (_types(one, root, depth - 1, visits) for one in schema["allOf"])
        return next((types for types in of_parts if types), frozenset())
    values = schema["enum"] if isinstance(schema.get("enum"), list) else [schema["const"]] if "const" in schema else []
    return frozenset(_type_of(value) for value in values)


def _referred(reference: Any, root: Schema) -> Any:
    if not isinstance(reference, str) or not reference.startswith("#"):
        return None
    target: Any = root
    for part in reference[1:].split("/")[1:]:
        target = target.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(target, Mapping) else None
    return target


def _type_of(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    kinds = {str: "string", int: "integer", float: "number", list: "array", dict: "object"}
    return kinds.get(type(value), "string")


def _json(text: str, types: frozenset[str]) -> str | None:
    """JSON text passes as it is, so that no number changes."""
    try:
        value = parsed(text)
    except ValueError:
        return None
    return text if _fits(value, types) else None


def _python(text: str, types: frozenset[str]) -> str | None:
    """Reads Python's True, None and quotes, which models write too; the value must have a declared type."""
    try:
        value = ast.literal_eval(text)
        declared = value is None or isinstance(value, tuple(_python_types(types)))
        return json.dumps(value, ensure_ascii=False, allow_nan=False) if declared and _fits(value, types) else None
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return None


def _python_types(types: frozenset[str]) -> list[type]:
    named = [PYTHON_TYPES[name] for name in types if name in PYTHON_TYPES]
    return [one for kind in named for one in (kind if isinstance(kind, tuple) else (kind,))]


def _fits(value: Any, types: frozenset[str]) -> bool:
    """A null must be allowed; beside strings only an object or array can be meant."""
    if value is None:
        return "null" in types and "string" not in types
    if "string" in types:
        return any(name in types and isinstance(value, kind) for name, kind in CONTAINERS.items())
    return True

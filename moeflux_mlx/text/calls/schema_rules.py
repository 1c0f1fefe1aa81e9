"""Grammars of arguments that are no JSON, in llguidance's form of Lark: what a schema allows, as a dialect spells it.

A dialect says how an object, a list and a scalar are written; which of them may come is the same for all.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

from ...errors import RequestError
from .schema import COMPOSED, NUMBERS, Schema, allowed_types, as_json, is_map, members, types, variants

SPOKEN_LIMITS = ("pattern", "format", "minLength", "maxLength")  # limits of strings that are written without quotes
OBJECT_LIMITS = (*COMPOSED, "patternProperties", "minProperties", "maxProperties")
LIMITS = (
    *(*SPOKEN_LIMITS, *OBJECT_LIMITS, "minItems", "maxItems", "uniqueItems", "prefixItems"),
    *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
)
MAX_DEPTH = 8  # of nested values
MAX_VALUES = 1024  # in a call
MAX_TEXT = 1 << 20  # characters of an object's rule: Gemma's commas repeat a value's rule for each member before it
MemberRule = tuple[str, str, bool]  # key, rule of its value, whether it is required


class SchemaRules(ABC):
    """One dialect's rules.

    Attributes:
        writes_types: whether a value says its type; else its text is typed by the schema when it is read.
    """

    writes_types: bool

    def __init__(self, root: Schema):
        """`root` is the schema of a tool's parameters."""
        self._root, self._left = root, MAX_VALUES

    def arguments(self) -> str:
        """The arguments of a call: the properties in order, and no others.

        Raises:
            RequestError: the schema has a condition that cannot be enforced.
        """
        return self.either([self._object(None, one, MAX_DEPTH) for one in enforceable(self._root)])

    @abstractmethod
    def members(self, members: Sequence[MemberRule]) -> str:
        """The members of an object in order; those that are not required may be left out."""

    @abstractmethod
    def any_members(self, value: str) -> str:
        """An object with any keys, whose values follow the rule `value`."""

    @abstractmethod
    def items(self, item: str) -> str:
        """A list of any length whose items follow the rule `item`."""

    @abstractmethod
    def literal(self, value: object) -> str:
        """One value."""

    @abstractmethod
    def any_of(self, kind: str) -> str:
        """Any value of a type of JSON; "any" is one of any type."""

    def either(self, rules: Sequence[str]) -> str:
        """A value that follows one of `rules`."""
        return f"({' | '.join(rules)})"

    def _object(self, key: str | None, one: Schema, depth: int) -> str:
        if is_map(one):
            return self.any_members(self._value(None, one.get("additionalProperties", True), depth - 1))
        own = members(one, self._root)
        rules = [(name, self._value(name, value, depth - 1), is_required) for name, value, is_required in own]
        if sum(len(rule) for _, rule, _ in rules) * len(rules) > MAX_TEXT:
            raise too_large(key)
        return self.members(rules)

    def _value(self, key: str | None, schema: object, depth: int) -> str:
        self._left -= 1
        if not depth or self._left < 0:
            raise too_large(key)
        alternatives = possible(key, variants(schema, self._root))
        if not self.writes_types:
            check_readable(key, alternatives)
        rules = [rule for one in alternatives for rule in self._rules(key, one, depth)]
        return self.either(list(dict.fromkeys(rules)))

    def _rules(self, key: str | None, one: Schema, depth: int) -> Iterator[str]:
        """The rules of values that an alternative allows."""
        check_limits(key, one, LIMITS)
        if "enum" in one:
            yield from map(self.literal, one["enum"])
            return
        for kind in sorted(types(one)) or ["any"]:
            if kind == "object":
                yield self._object(key, one, depth)
            elif kind == "array" and "items" in one:
                yield self.items(self._value(key, one["items"], depth - 1))
            else:
                yield self.any_of(kind)


def objects(schema: Schema) -> list[Schema]:
    """The alternatives of the parameters of a tool, whose arguments are always an object.

    Raises:
        RequestError: there is none.
    """
    alternatives = [one for one in variants(schema, schema) if "object" in (types(one) or ["object"])]
    return possible(None, alternatives, "object")


def enforceable(schema: Schema) -> list[Schema]:
    """The same, for arguments that are not JSON.

    Raises:
        RequestError: one has a condition that cannot be enforced, or there is none.
    """
    alternatives = objects(schema)
    for one in alternatives:
        check_limits(None, one, ("enum", *OBJECT_LIMITS))
    return alternatives


def possible(key: str | None, alternatives: list[Schema], kind: str = "value") -> list[Schema]:
    """The alternatives of a parameter, or with None of all of them; `kind` is what they allow.

    Raises:
        RequestError: there is none.
    """
    if not alternatives:
        raise RequestError(f"{_named(key)} allows no {kind}, so it cannot be enforced; correct it")
    return alternatives


def check_limits(key: str | None, one: Schema, limits: Sequence[str]) -> None:
    """Refuses an alternative that has one of `limits`."""
    limit = next((name for name in limits if name in one), None)
    if limit is not None:
        raise RequestError(f"{_named(key)} has {limit!r}, which cannot be enforced in this model's calls; leave it out")


def check_readable(key: str | None, alternatives: Sequence[Schema]) -> None:
    """Refuses strings and conditions that do not survive if a text is typed afterwards, by the types alone."""
    allowed = allowed_types(alternatives)
    for text in (value for one in alternatives for value in one.get("enum", ()) if isinstance(value, str)):
        if as_json(text, allowed) != json.dumps(text, ensure_ascii=False):
            raise RequestError(f"{_named(key)} has {text!r} beside another type in 'enum', which cannot be enforced")
    if any(is_free_text(one) for one in alternatives):
        for one in alternatives:
            if types(one) & {*NUMBERS, "boolean"}:
                check_limits(key, one, ("enum", *LIMITS))


def is_free_text(one: Schema) -> bool:
    """Whether an alternative allows any string."""
    return "enum" not in one and "string" in (types(one) or ["string"])


def quoted(text: str) -> str:
    """Exactly this text, in Lark."""
    return json.dumps(text, ensure_ascii=False)


def too_large(key: str | None) -> RequestError:
    return RequestError(f"{_named(key)} is too large to be enforced in this model's calls; leave out 'strict'")


def _named(key: str | None) -> str:
    return "the schema of a tool" if key is None else f"parameter {key!r}"

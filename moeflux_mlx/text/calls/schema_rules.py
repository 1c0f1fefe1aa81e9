"""Grammars of arguments that are no JSON, in llguidance's form of Lark: what a schema allows, as a dialect spells it.

A dialect says how an object, a list and a scalar are written; which of them may come is the same for all.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

from ...errors import RequestError
from .schema import Schema, variants

LIMITS = (
    *("pattern", "format", "minLength", "maxLength", "minItems", "maxItems", "uniqueItems"),
    *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
)
MAX_DEPTH = 8  # of nested values
Member = tuple[str, str, bool]  # key, rule of its value, whether it is required


class SchemaRules(ABC):
    """One dialect's rules."""

    def arguments(self, schema: Schema) -> str:
        """The arguments of a tool whose parameters have this schema: its properties in order, and no others.

        Raises:
            RequestError: the schema has a condition that cannot be enforced.
        """
        return self.members(self._properties(schema, schema, MAX_DEPTH))

    @abstractmethod
    def members(self, members: Sequence[Member]) -> str:
        """The members of an object in order; those that are not required may be left out."""

    @abstractmethod
    def items(self, item: str) -> str:
        """A list of any length whose items follow the rule `item`."""

    @abstractmethod
    def literal(self, value: Any) -> str:
        """One value."""

    @abstractmethod
    def any_of(self, kind: str) -> str:
        """Any value of a type of JSON; "any" is one of any type."""

    def either(self, rules: Sequence[str]) -> str:
        """A value that follows one of `rules`."""
        return f"({' | '.join(rules)})"

    def _properties(self, schema: Schema, root: Schema, depth: int) -> list[Member]:
        required, properties = schema.get("required") or (), schema.get("properties") or {}
        return [(key, self._value(key, own, root, depth - 1), key in required) for key, own in properties.items()]

    def _value(self, key: str, schema: Any, root: Schema, depth: int) -> str:
        if not depth:
            raise RequestError(
                f"parameter {key!r} is too deep to be enforced in this model's calls; leave out 'strict'"
            )
        rules = [rule for one in variants(schema, root) for rule in self._rules(key, one, root, depth)]
        return self.either(list(dict.fromkeys(rules)))

    def _rules(self, key: str, one: Schema, root: Schema, depth: int) -> Iterator[str]:
        """The rules of values that a schema without unions allows."""
        limit = next((name for name in LIMITS if name in one), None)
        if limit is not None:
            raise RequestError(f"parameter {key!r} has {limit!r}, which cannot be enforced in this model's calls")
        values = one.get("enum", [one["const"]] if "const" in one else None)
        if values is not None:
            yield from map(self.literal, values)
            return
        types = one.get("type", "any")
        for kind in [types] if isinstance(types, str) else types:
            if kind == "object" and one.get("properties"):
                yield self.members(self._properties(one, root, depth))
            elif kind == "array" and "items" in one:
                yield self.items(self._value(key, one["items"], root, depth - 1))
            else:
                yield self.any_of(kind)


def quoted(text: str) -> str:
    """Exactly this text, in Lark."""
    return json.dumps(text, ensure_ascii=False)

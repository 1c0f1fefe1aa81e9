"""Determines with llguidance which tokens may come next, so that an answer follows a grammar.

It works with any of our tokenizers: llguidance gets the bytes of each token. While the model reasons, every token is
allowed except the end of an incomplete answer. llguidance is loaded at its first use.
"""

import json
from collections.abc import Sequence, Set
from typing import TYPE_CHECKING

import numpy as np

from ..errors import RequestError
from ..files import JsonObject
from ..installation import install_command
from .calls.dialect import Dialect
from .calls.registry import CALL_MARKERS
from .grammar import Grammar, Schema, calls_grammar, is_strict, json_grammar, json_schema, parameters_of
from .tokenizer import TokenizerWrapper

if TYPE_CHECKING:
    from llguidance import LLMatcher

LONGEST_TAG = 64  # bytes, more than any tag of reasoning has


class Constrainer:
    """Makes masks for one tokenizer. Constructing it takes about as long as loading the tokenizer.

    Args:
        tokenizer: of the model.
        markers: special tokens that occur in grammars.

    Raises:
        RequestError: llguidance is not installed, or the tokenizer has no token that ends an answer.

    Attributes:
        ends: the tokens of the tokenizer that end an answer.
    """

    def __init__(self, tokenizer: TokenizerWrapper, markers: Set[str] = CALL_MARKERS):
        if not is_installed():
            raise RequestError(f"structured output needs llguidance; run: {install_command('structured')}")
        from llguidance import LLTokenizer
        from llguidance import TokenizerWrapper as Adapter

        self.tokenizer, self.ends = tokenizer, _ends(tokenizer)
        words = Adapter(_Words(tokenizer, markers, min(self.ends)))
        self.tokens: LLTokenizer = LLTokenizer(words, eos_token=sorted(self.ends))

    def grammar(
        self,
        schema: Schema | bool | None = None,
        tools: Sequence[JsonObject] = (),
        dialect: Dialect | None = None,
        required: bool = False,
    ) -> Grammar | None:
        """The grammar of the answer's schema and those of strict tools; None if there is nothing to enforce.

        Args:
            tools: those that may be called; others cannot be.
            required: one of them must be.

        Raises:
            RequestError: a schema has a key that cannot be enforced, which the message names.
        """
        for tool in filter(is_strict, tools):
            self._check_schema(json_schema(parameters_of(tool)))
        lead = self.tokenizer.channels.lead
        if dialect is None or not tools:
            grammar = None if schema is None else json_grammar(schema, lead)
        elif schema is not None or required or any(is_strict(tool) for tool in tools):
            grammar = calls_grammar(tools, dialect, required=required, schema=schema, lead=lead)
        else:
            grammar = None
        if grammar is not None:
            self._check(grammar)
        return grammar

    def mask(self, grammar: Grammar, *, inside_reasoning: bool = False, prefix: str = "") -> "Mask":
        """The mask of one answer.

        Args:
            grammar: as `grammar` gives it.
            inside_reasoning: the prompt has opened the reasoning, so the grammar holds after its end; otherwise the
                model may begin with reasoning, if its tags are tokens.
            prefix: the beginning of the answer that the prompt already has.
        """
        return Mask(self, self._matcher(grammar.text), inside_reasoning, prefix)

    def _check(self, grammar: Grammar) -> None:
        for schema in grammar.schemas:
            self._check_schema(schema)
        self._matcher(grammar.text)

    def _check_schema(self, schema: str) -> None:
        from llguidance import LLMatcher

        fault = LLMatcher.validate_grammar(LLMatcher.grammar_from_json_schema(schema), self.tokens)
        if fault:
            raise RequestError(f"the JSON schema cannot be enforced: {_line(fault)}; leave that out")

    def _matcher(self, text: str) -> "LLMatcher":
        from llguidance import LLMatcher

        matcher = LLMatcher(self.tokens, LLMatcher.grammar_from_lark(text), log_level=0)
        if matcher.is_error():
            raise RequestError(f"the schema cannot be enforced: {_line(matcher.get_error())}; make it simpler")
        return matcher


class Mask:
    """Says before each token of one answer which ones may come. Made by `Constrainer.mask`."""

    def __init__(self, constrainer: Constrainer, matcher: "LLMatcher", inside_reasoning: bool, prefix: str):
        self._tokenizer, self._ends, self._matcher = constrainer.tokenizer, constrainer.ends, matcher
        self._tokens = constrainer.tokens
        self._bits = np.empty((1, -(-self._tokens.vocab_size // 32)), np.int32)
        self._tail = b""  # the end of the reasoning so far
        self._inside, self._begun = inside_reasoning, bool(prefix)
        tags = [self._tokenizer.think_start_id]
        tags += [self._tokenizer.think_end_id] if self._tokenizer.channels.ends_none else []
        self._tags = [tag for tag in tags if tag is not None]  # of reasoning, that may come first
        self._take(self._tokens.tokenize_str(prefix))

    @property
    def is_done(self) -> bool:
        """Whether the answer is whole, so that only its end may follow."""
        return not self._inside and self._matcher.is_stopped()

    def allowed(self) -> np.ndarray:
        """Which tokens may come next: bool [V]."""
        from llguidance.numpy import fill_next_token_bitmask

        if self._inside:
            allowed = np.ones(self._tokens.vocab_size, bool)
            allowed[list(self._forbidden_ends)] = False
            return allowed
        fill_next_token_bitmask(self._matcher, self._bits)
        bits = np.unpackbits(self._bits.view(np.uint8), bitorder="little")
        allowed = bits[: self._tokens.vocab_size].astype(bool)
        if not self._begun:
            allowed[self._tags] = True
        return allowed

    def redirected(self) -> tuple[frozenset[int], int] | None:
        """Tokens that would end an incomplete answer, and the end of reasoning, which replaces them."""
        forbidden, end = self._forbidden_ends, self._tokenizer.think_end_id
        return (forbidden, end) if forbidden and end is not None else None

    @property
    def _forbidden_ends(self) -> frozenset[int]:
        """Tokens that would end an incomplete answer while the model reasons."""
        owed = self._inside and not self._matcher.is_accepting()
        return self._ends if owed else frozenset()

    def consume(self, token: int) -> None:
        """The answer goes on with `token`.

        Raises:
            RequestError: the grammar does not allow it, or has become too large to follow.
        """
        if self._inside:
            self._reason(self._tokenizer.token_bytes(token))
        elif not self._begun and token in self._tags:
            self._inside = token == self._tokenizer.think_start_id
        else:
            self._take([token])
        self._begun = True

    def accepts(self, tokens: Sequence[int]) -> int:
        """How many of these tokens are allowed in a row: up to the end of reasoning, or as the grammar says."""
        if not self._inside:
            return self._matcher.validate_tokens(list(tokens)) if self._begun else 0
        data, forbidden = self._tail, self._forbidden_ends
        for count, token in enumerate(tokens):
            data += self._tokenizer.token_bytes(token)
            if token in forbidden or self._tokenizer.channels.past(data) is not None:
                return count
        return len(tokens)

    def _reason(self, data: bytes) -> None:
        self._tail += data
        rest = self._tokenizer.channels.past(self._tail)
        if rest is None:
            self._tail = self._tail[-LONGEST_TAG:]
            return
        self._inside = False
        if rest.strip():  # one token can hold the end of the tag and the beginning of the answer
            self._take(self._tokens.tokenize_bytes(rest))

    def _take(self, tokens: Sequence[int]) -> None:
        if tokens and not self._matcher.consume_tokens(list(tokens)):
            fault = _line(self._matcher.get_error()) or json.dumps(self._tokenizer.decode(tokens))
            raise RequestError(f"the answer cannot go on under its schema: {fault}; make the schema simpler")


class _Words:
    """A tokenizer in llguidance's form."""

    def __init__(self, tokenizer: TokenizerWrapper, markers: Set[str], end: int):
        names = {token_id: token for token, token_id in tokenizer.get_vocab().items()}
        special = {i for i in tokenizer.all_special_ids if names.get(i) not in markers}
        self.eos_token_id, self.bos_token_id = end, tokenizer.bos_token_id
        self.special_token_ids = sorted(special)
        self.tokens = [
            names[i].encode() if i in special and i in names else tokenizer.token_bytes(i)
            for i in range(max(names) + 1)
        ]
        self._encode = tokenizer.encode_after

    def __call__(self, text: bytes | str) -> list[int]:
        return self._encode(text if isinstance(text, str) else text.decode())


def _ends(tokenizer: TokenizerWrapper) -> frozenset[int]:
    """The tokens that end an answer, without ids of the model's files that the tokenizer does not have."""
    ends = tokenizer.eos_token_ids & set(tokenizer.get_vocab().values())
    if not ends:
        named = ", ".join(map(str, sorted(tokenizer.eos_token_ids)))
        lacks = f"{named}, which its tokenizer does not have" if named else "none"
        raise RequestError(f"structured output needs a token that ends an answer; the model's files name {lacks}")
    return frozenset(ends)


def is_installed() -> bool:
    """Whether llguidance is there."""
    from importlib.util import find_spec

    return find_spec("llguidance") is not None


def _line(message: str) -> str:
    """llguidance's message without the state that it adds, on one line."""
    return " ".join(message.split("<state>")[0].split())[:300]

"""Byte-level byte-pair vocabularies: `tokenizer.json`, and `tiktoken.model` as Kimi models ship it."""

import base64
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import TokenizerError

if TYPE_CHECKING:
    from tokenizers import AddedToken, Tokenizer

KIMI = "TikTokenTokenizer"
# How Kimi's own tokenizer cuts text into words: `pat_str` of its tokenization_kimi.py.
HAN = r"\p{Han}"
LETTERS = rf"\p{{Lm}}\p{{Lo}}\p{{M}}&&[^{HAN}]"
ENDING = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
KIMI_WORDS = "|".join(
    (
        rf"[{HAN}]+",
        rf"[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}{LETTERS}]*[\p{{Ll}}{LETTERS}]+{ENDING}",
        rf"[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}{LETTERS}]+[\p{{Ll}}{LETTERS}]*{ENDING}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)
RESERVED = 256  # ids of special tokens after the last rank
LONG_TEXT = 1 << 14  # characters from which encoding takes milliseconds, in which other threads are to run


class BytePairVocabulary:
    """A tokenizer of the `tokenizers` package that spells bytes in the byte alphabet.

    Args:
        tokenizer: as `open_tokenizer_json` or `open_tiktoken` gives it.
    """

    trim: float = 0

    def __init__(self, tokenizer: "Tokenizer"):
        self._tokenizer = tokenizer
        added = self._tokenizer.get_added_tokens_decoder()
        # Added tokens are matched in the text as written; all others are spelt in the byte alphabet.
        self._added = {token_id: token.content.encode() for token_id, token in added.items()}
        self._byte_of = byte_alphabet()
        self.special_tokens: dict[str, str] = {}
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self.markers = frozenset(token.content for token in added.values())

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        if len(text) < LONG_TEXT:
            return self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        # `encode` keeps all other threads from running until it is done, the encoding of batches does not.
        (encoded,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return encoded.ids

    def encode_after(self, text: str) -> list[int]:
        return self.encode(text, False)

    def get_vocab(self) -> dict[str, int]:
        return self._tokenizer.get_vocab(with_added_tokens=True)

    def token_to_id(self, token: str) -> int | None:
        return self._tokenizer.token_to_id(token)

    def token_bytes(self, token_id: int) -> bytes:
        if token_id in self._added:
            return self._added[token_id]
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        if all(letter in self._byte_of for letter in token):
            return bytes(self._byte_of[letter] for letter in token)
        return token.encode()

    def is_spaced(self, token_id: int) -> bool:
        return False


def open_tokenizer_json(file: Path) -> "Tokenizer":
    """`tokenizer.json` with a ByteLevel decoder, as most models ship it.

    Raises:
        TokenizerError: the file cannot be read, or has another decoder.
    """
    from tokenizers import Tokenizer, decoders

    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # tokenizers raises nothing more precise
        raise TokenizerError(f"{file} is not a tokenizer file: {error}; fetch it again") from error
    if not isinstance(tokenizer.decoder, decoders.ByteLevel):
        name = type(tokenizer.decoder).__name__
        raise TokenizerError(f"{file} has a {name} decoder; only ByteLevel is implemented")
    # Some files carry the settings of a training run.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def open_tiktoken(file: Path, config: Mapping[str, Any]) -> "Tokenizer":
    """`tiktoken.model` of Kimi models: one line "base64 of a token's bytes, its rank" for each token, the rank its id.

    Special tokens follow the last rank: those that tokenizer_config.json lists, and `<|reserved_token_ID|>` for the ids
    between, as the models' own `tokenization_kimi.py` has it. Two neighbours merge wherever their bytes together are a
    token, the one of the lowest rank first; that makes a merge of every way to cut a token into two.

    Raises:
        TokenizerError: the file cannot be read, or `tokenizer_class` is not Kimi's, whose way to split text we know.
    """
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

    if (name := config.get("tokenizer_class", KIMI)) != KIMI:
        raise TokenizerError(f"{file} belongs to a {name}; only {KIMI} is implemented; look for a tokenizer.json")
    ranks = _read_ranks(file)
    listed = listed_tokens(config)
    reserved = range(len(ranks), len(ranks) + RESERVED)
    special = {i: listed.get(i) or AddedToken(f"<|reserved_token_{i}|>", special=True) for i in reserved}
    letter = {byte: letter for letter, byte in byte_alphabet().items()}
    names = {token: "".join(map(letter.__getitem__, token)) for token in ranks}
    cuts = ((token[:i], token[i:]) for token in ranks for i in range(1, len(token)))
    merges = [(names[left], names[right]) for left, right in cuts if left in ranks and right in ranks]
    vocab = {names[token]: rank for token, rank in ranks.items()}
    vocab |= {token.content: i for i, token in special.items()}
    tokenizer = Tokenizer(models.BPE(vocab, merges, ignore_merges=True))
    split = pre_tokenizers.Split(Regex(KIMI_WORDS), "isolated")
    bytes_of = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, bytes_of])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens(list(special.values()))
    return tokenizer


def _read_ranks(file: Path) -> dict[bytes, int]:
    """The tokens' bytes -> their ranks, lowest first."""
    try:
        pairs = [line.split() for line in file.read_bytes().splitlines() if line]
        ranks = {base64.b64decode(token, validate=True): int(rank) for token, rank in pairs}
    except (OSError, ValueError) as error:
        raise TokenizerError(f"{file} cannot be read: {error}; fetch it again") from error
    if list(ranks.values()) != list(range(len(pairs))) or not ranks.keys() >= {bytes([byte]) for byte in range(256)}:
        raise TokenizerError(f"{file} lacks ranks, or tokens of one byte; fetch it again")
    return ranks


def byte_alphabet() -> dict[str, int]:
    """The letter that stands for each byte in byte-level BPE files (GPT-2's `bytes_to_unicode`).

    Printable Latin-1 characters stand for themselves; the 68 other bytes take U+0100 onwards in order.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(0x100 + n): b for n, b in enumerate(others)}


def listed_tokens(config: Mapping[str, Any]) -> dict[int, "AddedToken"]:
    """tokenizer_config.json's `added_tokens_decoder`, {"id": {"content": string, "special": bool, ...}}, by id.

    As in transformers, those that a vocabulary lacks are added in order, and what is said of the others counts.

    Raises:
        TokenizerError: it has another form.
    """
    from tokenizers import AddedToken

    flags = ("single_word", "lstrip", "rstrip", "normalized", "special")
    try:
        entries = sorted((int(token_id), entry) for token_id, entry in config.get("added_tokens_decoder", {}).items())
        return {
            token_id: AddedToken(entry["content"], **{flag: entry[flag] for flag in flags if flag in entry})
            for token_id, entry in entries
        }
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise TokenizerError(
            f"tokenizer_config.json: added_tokens_decoder is damaged ({error!r}); fetch it again"
        ) from error

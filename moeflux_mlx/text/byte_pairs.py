"""Byte-pair vocabularies: `tokenizer.json`, in which most models ship theirs, Kimi's `tiktoken.model` and Mistral's
`tekken.json`.

Tokens are spelt in the byte alphabet, or (Gemma) in characters, with "\u2581" for a space and a token such as <0x0A>
for each byte of what is no token's character. Where a file has ranks, as tiktoken computes with them, two neighbours
merge wherever their bytes together are a token, the one of the lowest rank first. That makes a merge of every way to
cut a token into two.
"""

import base64
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import TokenizerError
from ..files import JsonObject, JsonValue

if TYPE_CHECKING:
    from tokenizers import AddedToken, Tokenizer


SPACE = "\u2581"
# What `tokenizer.json` says of tokens that are spelt in characters.
IN_CHARACTERS = [
    {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
    {"type": "ByteFallback"},
    {"type": "Fuse"},
]
_BYTE = re.compile("<0x([0-9A-Fa-f]{2})>")
LONG_TEXT = 1 << 14  # for longer texts encoding takes milliseconds, in which other threads should run


class BytePairVocabulary:
    """A tokenizer of the `tokenizers` package.

    Args:
        tokenizer: as `open_tokenizer_json`, `open_tiktoken` or `open_tekken` gives it.
        special_tokens: those that the file names itself, such as {"bos_token": "<s>"}.

    Attributes:
        trim: how many leading spaces a decoded text loses: 0, 1 or inf.
        markers: tokens that are found in text as they are written, such as "<|im_end|>".
    """

    trim: float = 0

    def __init__(self, tokenizer: "Tokenizer", special_tokens: Mapping[str, str] | None = None):
        self._tokenizer = tokenizer
        added = self._tokenizer.get_added_tokens_decoder()
        # Added tokens are matched in the text as written; in the byte alphabet all others are spelt.
        in_characters = _is_in_characters(tokenizer)
        self._added = {} if in_characters else {token_id: token.content.encode() for token_id, token in added.items()}
        self._spelt: Callable[[str], bytes] = _spelt_in_characters if in_characters else _SpeltInBytes()
        self.special_tokens = dict(special_tokens or {})
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        # Gemma adds runs of spaces and line breaks, which mean what they are.
        self.markers = frozenset(token.content for token in added.values() if token.content.strip(f"{SPACE} \t\n"))

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Token ids of the text, with what the file's own post-processor adds if asked."""
        if len(text) < LONG_TEXT:
            return self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        # `encode` holds the GIL until it is done; encoding a batch does not.
        (encoded,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return encoded.ids

    def encode_after(self, text: str) -> list[int]:
        """Token ids of text that other text stands before, so that it begins with no space of its own."""
        return self.encode(text, False)

    def get_vocab(self) -> dict[str, int]:
        """Token -> id, added tokens included."""
        return self._tokenizer.get_vocab(with_added_tokens=True)

    def token_to_id(self, token: str) -> int | None:
        """Id of exactly this token, None where there is none."""
        return self._tokenizer.token_to_id(token)

    def token_bytes(self, token_id: int) -> bytes:
        """The UTF-8 bytes, perhaps part of a character, that a token stands for; b"" for an unknown id."""
        if token_id in self._added:
            return self._added[token_id]
        token = self._tokenizer.id_to_token(token_id)
        return b"" if token is None else self._spelt(token)

    def is_spaced(self, token_id: int) -> bool:
        """Whether the token begins with a space that `trim` may take."""
        return False


class _SpeltInBytes:
    """The bytes of a token in the byte alphabet; those of its characters where one is outside of it."""

    def __init__(self) -> None:
        self._byte_of = byte_alphabet()

    def __call__(self, token: str) -> bytes:
        try:
            return bytes(map(self._byte_of.__getitem__, token))
        except KeyError:
            return token.encode()


def _spelt_in_characters(token: str) -> bytes:
    """The byte of <0x0A> and its like, or a token's characters."""
    byte = _BYTE.fullmatch(token)
    return bytes([int(byte[1], 16)]) if byte else token.replace(SPACE, " ").encode()


def _is_in_characters(tokenizer: "Tokenizer") -> bool:
    from tokenizers import decoders

    decoder = tokenizer.decoder
    if not isinstance(decoder, decoders.Sequence):
        return False
    return bool(json.loads(decoder.__getstate__()).get("decoders") == IN_CHARACTERS)


def open_tokenizer_json(file: Path) -> "Tokenizer":
    """`tokenizer.json` with a ByteLevel decoder, as most models ship it, or with Gemma's.

    Raises:
        TokenizerError: the file cannot be read, or has another decoder.
    """
    from tokenizers import Tokenizer, decoders

    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # tokenizers raises nothing more precise
        raise TokenizerError(f"{file} is not a tokenizer file: {error}; fetch it again") from error
    if not isinstance(tokenizer.decoder, decoders.ByteLevel) and not _is_in_characters(tokenizer):
        name = type(tokenizer.decoder).__name__
        raise TokenizerError(f"{file} has a {name} decoder; only ByteLevel and Gemma's are implemented")
    # Some files carry the settings of a training run.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def byte_alphabet() -> dict[str, int]:
    """The letter that stands for each byte in byte-level BPE files (GPT-2's `bytes_to_unicode`).

    Printable Latin-1 characters stand for themselves; the 68 other bytes take U+0100 onwards in order.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(0x100 + n): b for n, b in enumerate(others)}


def listed_tokens(config: JsonObject) -> dict[int, "AddedToken"]:
    """tokenizer_config.json's `added_tokens_decoder`, {"id": {"content": string, "special": bool, ...}}, by id.

    As in transformers, missing tokens are added in order, and the flags of the others apply.

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
BYTES = {bytes([byte]) for byte in range(256)}
TEKKEN_NAMES = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}


def open_tiktoken(file: Path, config: JsonObject) -> "Tokenizer":
    """`tiktoken.model` of Kimi models: one line "base64 of a token's bytes, its rank" for each token, the rank its id.

    Special tokens follow the last rank: those that tokenizer_config.json lists, and `<|reserved_token_ID|>` for the ids
    between, as the models' own `tokenization_kimi.py` has it.

    Raises:
        TokenizerError: the file cannot be read, or `tokenizer_class` is not Kimi's, whose way to split text we know.
    """
    from tokenizers import AddedToken

    if (name := config.get("tokenizer_class", KIMI)) != KIMI:
        raise TokenizerError(f"{file} belongs to a {name}; only {KIMI} is implemented; look for a tokenizer.json")
    ranks = _read_ranks(file)
    listed = listed_tokens(config)
    reserved = range(len(ranks), len(ranks) + RESERVED)
    special = {i: listed.get(i) or AddedToken(f"<|reserved_token_{i}|>", special=True) for i in reserved}
    return _tokenizer_of(ranks, KIMI_WORDS, special)


def open_tekken(file: Path, content: JsonObject) -> "Tokenizer":
    """`tekken.json` of Mistral models, whose content is a JSON object, as mistral_common 1.13 reads it.

    `vocab` lists {"rank", "token_bytes"} in the order of ranks, the bytes in base64, `special_tokens` {"rank",
    "token_str", "is_control"}; `config` has the regular expression `pattern` that cuts text into words,
    `default_vocab_size` and `default_num_special_tokens`. Special tokens have the first ids, those without a name are
    `<SPECIAL_ID>`; a token's id is its rank after them, and ranks beyond the vocabulary's size do not count.

    Raises:
        TokenizerError: the file cannot be read, or has another form.
    """
    from tokenizers import AddedToken, processors

    if content and "special_tokens" not in content:
        raise TokenizerError(f"{file} names no special tokens, as files before v11 do; look for a tokenizer.json")
    try:
        config, vocab = content["config"], content["vocab"]
        first = int(config["default_num_special_tokens"])
        tokens = [base64.b64decode(entry["token_bytes"], validate=True) for entry in vocab]
        ranks = [entry["rank"] for entry in vocab]
        listed = {entry["rank"]: (entry["token_str"], entry["is_control"]) for entry in content["special_tokens"]}
        words, count = str(config["pattern"]), int(config["default_vocab_size"]) - first
    except (KeyError, TypeError, ValueError) as error:
        raise TokenizerError(f"{file} is damaged or of an unknown form: {error!r}; fetch it again") from error
    _check_ranks(file, tokens, ranks)
    if not 256 <= count <= len(tokens) or not listed.keys() <= set(range(first)):
        raise TokenizerError(f"{file} has {len(tokens)} tokens and says {count}; fetch it again")
    names = {i: listed.get(i, (f"<SPECIAL_{i}>", True)) for i in range(first)}
    special = {i: AddedToken(name, special=control, normalized=False) for i, (name, control) in names.items()}
    try:
        tokenizer = _tokenizer_of({token: first + n for n, token in enumerate(tokens[:count])}, words, special)
    except Exception as error:  # tokenizers raises nothing more precise
        raise TokenizerError(f"{file}: words cannot be cut by its pattern: {error}; fetch it again") from error
    begin = TEKKEN_NAMES["bos_token"]
    if (begin_id := tokenizer.token_to_id(begin)) is not None:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{begin} $A", special_tokens=[(begin, begin_id)]
        )
    return tokenizer


def _tokenizer_of(ids: Mapping[bytes, int], words: str, special: Mapping[int, "AddedToken"]) -> "Tokenizer":
    """Args:
    ids: token -> id, by rank.
    words: the regular expression that cuts text.
    special: tokens that are found in text as they are written, by id.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    letter = {byte: letter for letter, byte in byte_alphabet().items()}
    names = {token: "".join(map(letter.__getitem__, token)) for token in ids}
    cuts = ((token[:i], token[i:]) for token in ids for i in range(1, len(token)))
    merges = [(names[left], names[right]) for left, right in cuts if left in ids and right in ids]
    vocab = {names[token]: i for token, i in ids.items()} | {token.content: i for i, token in special.items()}
    tokenizer = Tokenizer(models.BPE(vocab, merges, ignore_merges=True))
    split = pre_tokenizers.Split(Regex(words), "isolated")
    bytes_of = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, bytes_of])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens(list(special.values()))
    return tokenizer


def _read_ranks(file: Path) -> dict[bytes, int]:
    """The tokens' bytes -> their ranks, lowest first."""
    try:
        pairs = [line.split() for line in file.read_bytes().splitlines() if line]
        tokens, ranks = [base64.b64decode(token, validate=True) for token, _ in pairs], [int(rank) for _, rank in pairs]
    except (OSError, ValueError) as error:
        raise TokenizerError(f"{file} cannot be read: {error}; fetch it again") from error
    _check_ranks(file, tokens, ranks)
    return dict(zip(tokens, ranks, strict=True))


def _check_ranks(file: Path, tokens: Sequence[bytes], ranks: Sequence[JsonValue]) -> None:
    """Raises TokenizerError: ranks are missing or out of order, tokens come twice, or those of one byte are missing."""
    every = set(tokens)
    if list(ranks) != list(range(len(tokens))) or len(every) < len(tokens) or not every >= BYTES:
        raise TokenizerError(f"{file} lacks ranks, or tokens of one byte; fetch it again")

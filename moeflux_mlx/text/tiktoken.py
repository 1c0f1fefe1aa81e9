"""Vocabularies of ranks, as tiktoken computes with them: Kimi's `tiktoken.model` and Mistral's `tekken.json`.

Two neighbours merge wherever their bytes together are a token, the one of the lowest rank first. That makes a merge of
every way to cut a token into two.
"""

import base64
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import TokenizerError
from ..files import JsonObject, JsonValue
from .byte_pairs import byte_alphabet, listed_tokens

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

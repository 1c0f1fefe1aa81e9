"""Text to token ids and back, from a model directory's own files.

`tokenizer.json` (byte-level BPE) is read by `tokenizers`, `tokenizer.model` by `sentencepiece`. Either
becomes a TokenizerWrapper with the words mlx-lm uses. Text is decoded here: every token stands for some
bytes, so a stream and a whole decode are the same concatenation and a character is shown once all its bytes
are there. Special tokens, stop tokens and thinking tags come from the files. Nothing here knows about models.
"""

import codecs
import json
import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

from ..errors import RequestError, TokenizerError
from .chat_template import ChatTemplate, find_templates

if TYPE_CHECKING:
    from sentencepiece import SentencePieceProcessor
    from tokenizers import AddedToken, Tokenizer

THINK_TAGS = ("<think>", "</think>")
NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
SPACE = "\u2581"  # how sentencepiece writes a space
LONG_TEXT = 1 << 14  # characters from which encoding takes milliseconds, in which other threads are to run


def load_tokenizer(path: str | Path) -> "TokenizerWrapper":
    """Read the tokenizer of a model directory.

    `tokenizer.json` is preferred to `tokenizer.model`. tokenizer_config.json, special_tokens_map.json,
    generation_config.json, config.json and chat_template.jinja are used where present; the template is read
    only when it is needed, so a broken one does no harm to raw prompts.

    Raises:
        TokenizerError: no tokenizer file, or a file that cannot be read or has a form not implemented.
    """
    path = Path(path)
    config = {**_read_json(path / "special_tokens_map.json"), **_read_json(path / "tokenizer_config.json")}
    if (path / "tokenizer.json").is_file():
        vocabulary: Vocabulary = BytePairVocabulary(path / "tokenizer.json", _listed_tokens(config))
    elif (path / "tokenizer.model").is_file():
        vocabulary = SentencePieceVocabulary(path / "tokenizer.model")
    else:
        raise TokenizerError(
            f"{path} has neither tokenizer.json nor tokenizer.model; copy one from the model's repository"
        )
    return TokenizerWrapper(vocabulary, path, config)


class Vocabulary(Protocol):
    """What a tokenizer file offers; the wrapper adds everything that other files say."""

    trim: float  # how many leading spaces a decoded text loses: 0, 1 or inf
    special_tokens: dict[str, str]  # e.g. {"bos_token": "<s>"}, where the file names them itself
    special_ids: frozenset[int]

    markers: frozenset[str]  # tokens that are found in text as they are written, such as "<|im_end|>"

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Token ids of the text, with what the file's own post-processor adds if asked."""

    def encode_after(self, text: str) -> list[int]:
        """Token ids of text that other text stands before, so that it begins with no space of its own."""

    def get_vocab(self) -> dict[str, int]:
        """Token -> id, added tokens included."""

    def token_to_id(self, token: str) -> int | None:
        """Id of exactly this token, None where there is none."""

    def token_bytes(self, token_id: int) -> bytes:
        """The UTF-8 bytes, perhaps part of a character, that a token stands for; b"" for an unknown id."""

    def is_spaced(self, token_id: int) -> bool:
        """Whether the token begins with a space that `trim` may take."""


class BytePairVocabulary:
    """`tokenizer.json` with a ByteLevel decoder, as Qwen and DeepSeek models ship it.

    `listed` are tokens that another file names. As in transformers, those missing here are added in order, and what it
    says of the others counts.
    """

    trim: float = 0

    def __init__(self, file: Path, listed: list["AddedToken"]):
        self._tokenizer = _open_tokenizer_json(file)
        self._tokenizer.add_tokens(listed)
        added = self._tokenizer.get_added_tokens_decoder()
        # Added tokens are matched in the text as written; all others are spelt in the byte alphabet.
        self._added = {token_id: token.content.encode() for token_id, token in added.items()}
        self._byte_of = _byte_alphabet()
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


class SentencePieceVocabulary:
    """`tokenizer.model`, read by sentencepiece.

    User-defined symbols are found in text; control pieces such as `<s>` are not, so a chat template needs its
    markers to be user-defined symbols.
    """

    def __init__(self, file: Path):
        self._pieces = _open_sentencepiece(file)
        count = self._pieces.get_piece_size()
        self._vocab = {self._pieces.id_to_piece(i): i for i in range(count)}
        self.special_ids = frozenset(
            i for i in range(count) if self._pieces.is_control(i) or self._pieces.is_unknown(i)
        )
        self.special_tokens = self._named_tokens()
        self.trim = self._measure_trim()
        # The Python package does not say which pieces are user-defined symbols; chat markers look like this.
        self.markers = frozenset(
            piece
            for piece, i in self._vocab.items()
            if len(piece) > 2 and piece[0] + piece[-1] == "<>" and i not in self.special_ids
            if not self._pieces.is_byte(i)
        )

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return self._pieces.encode(text)

    def encode_after(self, text: str) -> list[int]:
        # sentencepiece puts a space before what it takes for the beginning, but not after a marker.
        if self.markers:
            marker = min(self.markers)
            ids = self.encode(marker + text, False)
            return ids[ids.index(self._vocab[marker]) + 1 :]
        ids = self.encode(text, False)
        if b"".join(self.token_bytes(i) for i in ids) == b" " + text.encode():
            ids[:1] = self._spelled(self._pieces.id_to_piece(ids[0])[1:])
        return ids

    def get_vocab(self) -> dict[str, int]:
        return dict(self._vocab)

    def token_to_id(self, token: str) -> int | None:
        return self._vocab.get(token)

    def token_bytes(self, token_id: int) -> bytes:
        if not 0 <= token_id < len(self._vocab) or self._pieces.is_control(token_id):
            return b""
        if self._pieces.is_unknown(token_id):
            return self._pieces.decode([token_id]).encode()
        piece = self._pieces.id_to_piece(token_id)
        if self._pieces.is_byte(token_id):
            return bytes([int(piece[3:5], 16)])  # <0x0A>
        return piece.replace(SPACE, " ").encode()

    def is_spaced(self, token_id: int) -> bool:
        return self._pieces.id_to_piece(token_id).startswith(SPACE)

    def _spelled(self, piece: str) -> list[int]:
        """One token for these characters, or else one for each, or for each of their bytes."""
        if not piece:
            return []
        if piece in self._vocab:
            return [self._vocab[piece]]
        if len(piece) > 1:
            return [token for char in piece for token in self._spelled(char)]
        return [self._vocab.get(f"<0x{byte:02X}>", self._pieces.unk_id()) for byte in piece.encode()]

    def _named_tokens(self) -> dict[str, str]:
        ids = {"bos_token": self._pieces.bos_id(), "eos_token": self._pieces.eos_id()}
        return {name: self._pieces.id_to_piece(i) for name, i in ids.items() if i >= 0}

    def _measure_trim(self) -> float:
        # The Python package does not show the normalizer's settings, but decoding gives them away.
        probe = self._vocab.get(SPACE) or next((i for t, i in self._vocab.items() if t.startswith(SPACE)), None)
        if probe is None:
            return 0
        whole = 2 * self._pieces.id_to_piece(probe)
        lost = len(whole) - len(self._pieces.decode([probe, probe]))
        return math.inf if lost == 2 else lost


class StreamingDetokenizer:
    """Turns tokens into text as they come, in constant time per token.

    The segments put together are `TokenizerWrapper.decode` of all the tokens. A character is given out when
    its last byte has come; bytes that can never become one give U+FFFD, as does an unfinished character in
    `finalize`.
    """

    def __init__(self, vocabulary: Vocabulary):
        self._vocabulary = vocabulary
        self.reset()

    def reset(self) -> None:
        """Forget all tokens and text."""
        self.tokens: list[int] = []
        self._given: list[str] = []
        self._waiting: list[str] = []
        self._trim = self._vocabulary.trim
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def add_token(self, token: int) -> None:
        """Take one token id; an id that the vocabulary lacks adds no text."""
        self.tokens.append(token)
        data = self._vocabulary.token_bytes(token)
        if self._trim and data:
            data = self._trim_start(token, data)
        self._waiting.append(self._utf8.decode(data))

    def finalize(self) -> None:
        """Give out what was held back for more bytes."""
        self._waiting.append(self._utf8.decode(b"", final=True))

    @property
    def last_segment(self) -> str:
        """The text that came since this was read last."""
        segment = "".join(self._waiting)
        self._waiting = []
        self._given.append(segment)
        return segment

    @property
    def is_whole(self) -> bool:
        """Whether the tokens so far end a character, so that nothing is held back for more bytes."""
        return not self._utf8.getstate()[0]

    @property
    def text(self) -> str:
        """All text so far."""
        self._given = ["".join(self._given)]
        return self._given[0] + "".join(self._waiting)

    def _trim_start(self, token: int, data: bytes) -> bytes:
        if not self._vocabulary.is_spaced(token):
            self._trim = 0
            return data
        rest = data[1:]
        self._trim = 0 if rest else self._trim - 1
        return rest


class TokenizerWrapper:
    """A model's tokenizer, stop tokens and chat template, in the words mlx-lm uses.

    Attributes:
        bos_token, bos_token_id: None where the model has none.
        eos_token, eos_token_id: the tokenizer's own, None where there is none; without one, the id is that of
            the first stop token.
        eos_token_ids: every token that ends a generation: generation_config.json's, or else config.json's
            (text_config included) and the tokenizer's own.
        think_start, think_end, think_start_id, think_end_id: the tags round a model's reasoning, None unless
            the vocabulary has both as single tokens.

    Args:
        vocabulary: the opened tokenizer file.
        path: the model directory, for the files that name stop tokens and hold the chat template.
        config: contents of tokenizer_config.json.

    Raises:
        TokenizerError: stop tokens are not token ids.
    """

    def __init__(self, vocabulary: Vocabulary, path: Path, config: Mapping[str, Any]):
        self._vocabulary = vocabulary
        self._path = path
        self._config = config
        self._special_tokens = {**vocabulary.special_tokens, **_named_tokens(config)}
        self.bos_token = self._special_tokens.get("bos_token")
        self.bos_token_id = self._id_of(self.bos_token)

        self.eos_token = self._special_tokens.get("eos_token")
        own_eos = self._id_of(self.eos_token)
        stops = _stop_ids(path, own_eos)
        self.eos_token_ids = set(stops)
        self.eos_token_id = own_eos if own_eos is not None or not stops else stops[0]

        start, end = (vocabulary.token_to_id(tag) for tag in THINK_TAGS)
        self.has_thinking = start is not None and end is not None
        self.think_start = THINK_TAGS[0] if self.has_thinking else None
        self.think_end = THINK_TAGS[1] if self.has_thinking else None
        self.think_start_id = start if self.has_thinking else None
        self.think_end_id = end if self.has_thinking else None

    @property
    def chat_template(self) -> str | None:
        """Jinja source of the default chat template, None where the model has none."""
        return self._template.source

    @cached_property
    def has_chat_template(self) -> bool:
        """Whether `apply_chat_template` can be called."""
        return self.chat_template is not None

    @cached_property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included; a model's logits may be wider."""
        return len(self.get_vocab())

    @property
    def detokenizer(self) -> StreamingDetokenizer:
        """A new streaming detokenizer."""
        return StreamingDetokenizer(self._vocabulary)

    def get_vocab(self) -> dict[str, int]:
        """Token -> id, added tokens included."""
        return self._vocabulary.get_vocab()

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of the text.

        With `add_special_tokens`, BOS comes first where the model's files say so: `add_bos_token` of
        tokenizer_config.json, or else the post-processor of tokenizer.json. Special tokens written out in the
        text are recognised either way.

        Raises:
            RequestError: the text has lone surrogates, as undecodable bytes on a command line leave them.
        """
        _check_unicode(text)
        add_bos = self._config.get("add_bos_token")
        if not add_special_tokens or add_bos is None:
            return self._vocabulary.encode(text, add_special_tokens)
        ids = self._vocabulary.encode(text, False)
        return [self.bos_token_id, *ids] if add_bos and self.bos_token_id is not None else ids

    def encode_after(self, text: str) -> list[int]:
        """Token ids of text that other text stands before; nothing is added to it.

        Raises:
            RequestError: as `encode`.
        """
        _check_unicode(text)
        return self._vocabulary.encode_after(text)

    def token_bytes(self, token_id: int) -> bytes:
        """The UTF-8 bytes, perhaps part of a character, that a token stands for; b"" for an unknown id."""
        return self._vocabulary.token_bytes(token_id)

    @property
    def markers(self) -> frozenset[str]:
        """Tokens that `encode` finds in text as they are written, such as "<|im_end|>"."""
        return self._vocabulary.markers

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """Text of the token ids; ids the vocabulary lacks are left out, invalid UTF-8 becomes U+FFFD."""
        detokenizer = self.detokenizer
        for token in ids:
            if not (skip_special_tokens and token in self.all_special_ids):
                detokenizer.add_token(token)
        detokenizer.finalize()
        return detokenizer.text

    def convert_tokens_to_ids(self, tokens: str | Sequence[str]) -> int | None | list[int | None]:
        """Id of a token, or ids of a list of tokens; None for a string that is not a token."""
        if isinstance(tokens, str):
            return self._vocabulary.token_to_id(tokens)
        return [self._vocabulary.token_to_id(token) for token in tokens]

    def apply_chat_template(
        self,
        /,  # so that a variable of the template may be called `self`
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        tokenize: bool = True,
        **template_kwargs: Any,
    ) -> list[int] | str:
        """The prompt for a chat, as token ids, or as text with `tokenize=False`.

        The template writes BOS itself if the model wants it, so none is added. `template_kwargs` are
        variables of the template, such as `enable_thinking=False`. Errors are those of `ChatTemplate.render`.
        """
        prompt = self._template.render(
            messages, tools=tools, add_generation_prompt=add_generation_prompt, variables=template_kwargs
        )
        return self.encode(prompt, add_special_tokens=False) if tokenize else prompt

    @cached_property
    def _template(self) -> ChatTemplate:
        return ChatTemplate(find_templates(self._path, self._config), self._special_tokens)

    @cached_property
    def all_special_ids(self) -> frozenset[int]:
        """Ids of the tokens that are not text: control tokens, and those that the model's files name."""
        named = (self._id_of(token) for token in self._special_tokens.values())
        return self._vocabulary.special_ids | {token_id for token_id in named if token_id is not None}

    def _id_of(self, token: str | None) -> int | None:
        return None if token is None else self._vocabulary.token_to_id(token)


def _open_tokenizer_json(file: Path) -> "Tokenizer":
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


def _open_sentencepiece(file: Path) -> "SentencePieceProcessor":
    from sentencepiece import SentencePieceProcessor

    try:
        model = file.read_bytes()
        if not model:  # sentencepiece would accept it, and fail at its first use
            raise OSError("the file is empty")
        return SentencePieceProcessor(model_proto=model)
    except (OSError, RuntimeError) as error:
        raise TokenizerError(f"{file} is not a sentencepiece model: {error}; fetch it again") from error


def _byte_alphabet() -> dict[str, int]:
    """The letter that stands for each byte in byte-level BPE files (GPT-2's `bytes_to_unicode`).

    Printable Latin-1 characters stand for themselves; the 68 other bytes take U+0100 onwards in order.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(0x100 + n): b for n, b in enumerate(others)}


def _named_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """{"bos_token": "<s>", ...} from entries that are strings, null, or {"content": string}."""
    tokens = {}
    for name in NAMED_TOKENS:
        entry = config.get(name)
        token = entry.get("content") if isinstance(entry, dict) else entry
        if isinstance(token, str):
            tokens[name] = token
    return tokens


def _listed_tokens(config: Mapping[str, Any]) -> list["AddedToken"]:
    """tokenizer_config.json's `added_tokens_decoder`, {"id": {"content": string, "special": bool, ...}}, by id."""
    from tokenizers import AddedToken

    flags = ("single_word", "lstrip", "rstrip", "normalized", "special")
    try:
        entries = sorted((int(token_id), entry) for token_id, entry in config.get("added_tokens_decoder", {}).items())
        return [
            AddedToken(entry["content"], **{flag: entry[flag] for flag in flags if flag in entry})
            for _, entry in entries
        ]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise TokenizerError(
            f"tokenizer_config.json: added_tokens_decoder is damaged ({error!r}); fetch it again"
        ) from error


def _stop_ids(path: Path, own: int | None) -> list[int]:
    ids = _eos_entry(path / "generation_config.json")
    if ids:
        return ids
    # config.json often lists only the end of a document, and a chat ends with the tokenizer's own token.
    ids = _eos_entry(path / "config.json")
    return ids if own is None or own in ids else [own, *ids]


def _eos_entry(file: Path) -> list[int]:
    config = _read_json(file)
    text_config = config.get("text_config")
    entry = config.get("eos_token_id")
    if entry is None and isinstance(text_config, dict):
        entry = text_config.get("eos_token_id")
    ids = entry if isinstance(entry, list) else [] if entry is None else [entry]
    if not all(isinstance(token, int) and not isinstance(token, bool) and token >= 0 for token in ids):
        raise TokenizerError(f"{file}: eos_token_id is {entry!r}; it must be a token id or a list of them")
    return ids


def _read_json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise TokenizerError(f"{file} cannot be read: {error}; fetch it again") from error
    if not isinstance(content, dict):
        raise TokenizerError(f"{file} holds a JSON {type(content).__name__}; it must be an object; fetch it again")
    return cast(dict[str, Any], content)


def _check_unicode(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(
            f"character {error.start} of the text is {text[error.start]!a}, which is no character; "
            "give the text as UTF-8"
        ) from error

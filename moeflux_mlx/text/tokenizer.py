"""Text to token ids and back, from a model directory's own files.

`tokenizer.json`, `tiktoken.model` and `tekken.json` (byte-level BPE) are read by `tokenizers`, `tokenizer.model` by
`sentencepiece`. Each becomes a TokenizerWrapper with the words mlx-lm uses. Text is decoded here: each token stands for
some bytes, so streaming and decoding at once give the same text, and a character is shown when all its bytes have
arrived. Special tokens, stop tokens and thinking tags come from the files. Nothing here knows about models.
"""

import codecs
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

from ..errors import ModelFileError, RequestError, TokenizerError
from ..files import JsonDict, JsonObject, read_json
from .byte_pairs import TEKKEN_NAMES, BytePairVocabulary, listed_tokens, open_tekken, open_tiktoken, open_tokenizer_json
from .channels import channels_of
from .chat_template import ChatTemplate, find_templates
from .pieces import SentencePieceVocabulary

Vocabulary = BytePairVocabulary | SentencePieceVocabulary  # the file; `TokenizerWrapper` adds what other files say


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


VOCABULARY_FILES = (
    "tokenizer.json",
    "tiktoken.model",
    "tokenizer.model",
    "tekken.json",
)  # the first that is there is read
NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
# Arguments of transformers' `apply_chat_template` that are no variables of a template.
MISSING = (
    *("chat_template", "continue_final_message", "max_length", "padding", "return_assistant_tokens_mask"),
    *("return_dict", "return_tensors", "tokenizer_kwargs", "truncation"),
)


def load_tokenizer(path: str | Path) -> "TokenizerWrapper":
    """Read the tokenizer of a model directory.

    The first of VOCABULARY_FILES is opened. tokenizer_config.json, special_tokens_map.json, generation_config.json,
    config.json and chat_template.jinja are used where present; the template is read only when it is needed, so a broken
    one does not affect raw prompts.

    Raises:
        TokenizerError: no tokenizer file, or a file that cannot be read or has a form not implemented.
    """
    path = Path(path)
    config = {**_read_json(path / "special_tokens_map.json"), **_read_json(path / "tokenizer_config.json")}
    return TokenizerWrapper(_open_vocabulary(path, config), path, config)


def _open_vocabulary(path: Path, config: JsonObject) -> Vocabulary:
    if (path / "tokenizer.json").is_file():
        tokenizer = open_tokenizer_json(path / "tokenizer.json")
        tokenizer.add_tokens(list(listed_tokens(config).values()))
        return BytePairVocabulary(tokenizer)
    if (path / "tiktoken.model").is_file():
        return BytePairVocabulary(open_tiktoken(path / "tiktoken.model", config))
    if (path / "tokenizer.model").is_file():
        return SentencePieceVocabulary(path / "tokenizer.model")
    if (path / "tekken.json").is_file():
        content = _read_json(path / "tekken.json")
        return BytePairVocabulary(open_tekken(path / "tekken.json", content), TEKKEN_NAMES)
    raise TokenizerError(f"{path} has no {' or '.join(VOCABULARY_FILES)}; copy one from the model's repository")


class TokenizerWrapper:
    """A model's tokenizer, stop tokens and chat template, in the words mlx-lm uses.

    Attributes:
        bos_token, bos_token_id: None where the model has none.
        eos_token, eos_token_id: the tokenizer's own, None where there is none; without one, the id is that of
            the first stop token.
        channels: how the model marks its reasoning.
        eos_token_ids: every token that ends a generation: generation_config.json's, or else config.json's
            (text_config included) and the tokenizer's own; those of `channels` in any case.
        think_start, think_end, think_start_id, think_end_id: the tags round a model's reasoning, None unless
            the vocabulary has both as single tokens.
        vocabulary, path: as given.

    Args:
        vocabulary: the opened tokenizer file.
        path: the model directory, for the files that name stop tokens and hold the chat template.
        config: contents of tokenizer_config.json.

    Raises:
        TokenizerError: stop tokens are not token ids.
    """

    def __init__(self, vocabulary: Vocabulary, path: Path, config: JsonObject):
        self.vocabulary = vocabulary
        self.path = path
        self._config = config
        self._special_tokens = {**vocabulary.special_tokens, **_named_tokens(config)}
        self.bos_token = self._special_tokens.get("bos_token")
        self.bos_token_id = self._id_of(self.bos_token)

        self.channels = channels_of(vocabulary.markers)
        self.eos_token = self._special_tokens.get("eos_token")
        own_eos = self._id_of(self.eos_token)
        stops = _stop_ids(path, own_eos)
        ends = map(vocabulary.token_to_id, self.channels.ends)
        self.eos_token_ids = {*stops, *(token for token in ends if token is not None)}
        self.eos_token_id = own_eos if own_eos is not None or not stops else stops[0]

        start, end = (vocabulary.token_to_id(tag) for tag in (self.channels.start, self.channels.end))
        self.has_thinking = start is not None and end is not None
        self.think_start = self.channels.start if self.has_thinking else None
        self.think_end = self.channels.end if self.has_thinking else None
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
        return StreamingDetokenizer(self.vocabulary)

    def get_vocab(self) -> dict[str, int]:
        """Token -> id, added tokens included."""
        return self.vocabulary.get_vocab()

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
            return self.vocabulary.encode(text, add_special_tokens)
        ids = self.vocabulary.encode(text, False)
        return [self.bos_token_id, *ids] if add_bos and self.bos_token_id is not None else ids

    def encode_after(self, text: str) -> list[int]:
        """Token ids of text that other text stands before; nothing is added to it.

        Raises:
            RequestError: as `encode`.
        """
        _check_unicode(text)
        return self.vocabulary.encode_after(text)

    def token_bytes(self, token_id: int) -> bytes:
        """The UTF-8 bytes, perhaps part of a character, that a token stands for; b"" for an unknown id."""
        return self.vocabulary.token_bytes(token_id)

    @property
    def markers(self) -> frozenset[str]:
        """Tokens that `encode` finds in text as they are written, such as "<|im_end|>"."""
        return self.vocabulary.markers

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
            return self.vocabulary.token_to_id(tokens)
        return [self.vocabulary.token_to_id(token) for token in tokens]

    def apply_chat_template(
        self,
        /,  # so that a variable of the template may be called `self`
        messages: Sequence[JsonObject],
        *,
        tools: Sequence[JsonObject] | None = None,
        add_generation_prompt: bool = True,
        tokenize: bool = True,
        **template_kwargs: object,
    ) -> list[int] | str:
        """The prompt for a chat, as token ids, or as text with `tokenize=False`.

        The template writes BOS itself if the model wants it, so none is added. `template_kwargs` are
        variables of the template, such as `enable_thinking=False`.

        Raises:
            RequestError: as `ChatTemplate.render`, or an argument of transformers' method asks for what this one does
                not do.
            TokenizerError: as `ChatTemplate.render`.
        """
        for name in MISSING:
            if template_kwargs.get(name):
                raise RequestError(f"apply_chat_template has no {name}; with tokenize=False it returns the text")
        prompt = self._template.render(
            messages, tools=tools, add_generation_prompt=add_generation_prompt, variables=template_kwargs
        )
        return self.encode(prompt, add_special_tokens=False) if tokenize else prompt

    @cached_property
    def _template(self) -> ChatTemplate:
        return ChatTemplate(find_templates(self.path, self._config), self._special_tokens)

    @cached_property
    def all_special_ids(self) -> frozenset[int]:
        """Ids of the tokens that are not text: control tokens, and those that the model's files name."""
        named = (self._id_of(token) for token in self._special_tokens.values())
        return self.vocabulary.special_ids | {token_id for token_id in named if token_id is not None}

    def _id_of(self, token: str | None) -> int | None:
        return None if token is None else self.vocabulary.token_to_id(token)


def _named_tokens(config: JsonObject) -> dict[str, str]:
    """{"bos_token": "<s>", ...} from entries that are strings, null, or {"content": string}."""
    tokens = {}
    for name in NAMED_TOKENS:
        entry = config.get(name)
        token = entry.get("content") if isinstance(entry, dict) else entry
        if isinstance(token, str):
            tokens[name] = token
    return tokens


def _stop_ids(path: Path, own: int | None) -> list[int]:
    ids = _eos_entry(path / "generation_config.json")
    if ids:
        return ids
    # config.json often lists only the end of a document, and a chat ends with the tokenizer's own token.
    ids = _eos_entry(path / "config.json")
    return ids if own is None or own in ids else [own, *ids]


def _eos_entry(file: Path) -> list[int]:
    return stated_ends(_read_json(file), file)


def stated_ends(config: JsonObject, file: Path) -> list[int]:
    """The tokens that the content of `file` says end a generation.

    Raises:
        TokenizerError: they are not token ids.
    """
    text_config = config.get("text_config")
    entry = config.get("eos_token_id")
    if entry is None and isinstance(text_config, dict):
        entry = text_config.get("eos_token_id")
    ids = entry if isinstance(entry, list) else [] if entry is None else [entry]
    if not all(isinstance(token, int) and not isinstance(token, bool) and token >= 0 for token in ids):
        raise TokenizerError(f"{file}: eos_token_id is {entry!r}; it must be a token id or a list of them")
    return ids


def _read_json(file: Path) -> JsonDict:
    """The object in a file, empty if there is no file."""
    try:
        return read_json(file) if file.exists() else {}
    except ModelFileError as error:
        raise TokenizerError(f"{error}; fetch it again") from error


def _check_unicode(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(
            f"character {error.start} of the text is {text[error.start]!a}, which is not a character; "
            "give the text as UTF-8"
        ) from error

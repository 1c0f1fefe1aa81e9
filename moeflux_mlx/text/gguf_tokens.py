"""The tokenizer files that a GGUF's metadata describe, for models whose own files are not at hand.

Byte-level BPE becomes `tokenizer.json`. How text is cut before pairs are joined is not in the file: `.pre` names it,
and the names whose rule is known are `CUTS`. Qwen's tokenizers normalise text (NFC), which llama.cpp leaves out.
SentencePiece becomes `tokenizer.model`, a message of protocol buffers (sentencepiece_model.proto).
"""

import json
import re
import struct

from ..errors import TokenizerError
from ..files import JsonDict, JsonObject
from .byte_pairs import KIMI_WORDS

UNKNOWN, CONTROL, USER_DEFINED, BYTE = 2, 3, 4, 6  # values of `tokenizer.ggml.token_type`
LENGTH, FIXED, BPE = 2, 5, 2  # wire types of protocol buffers, and a kind of model of sentencepiece
CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
REST = r"\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN2 = rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{REST}"
QWEN35 = rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{REST}"
LLAMA3 = QWEN2.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
O200K = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+{CONTRACTIONS}?|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*{CONTRACTIONS}?"
    rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{REST}"
)
DEEPSEEK3 = (
    *(r"\p{N}{1,3}", "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"),
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{REST}",
)
# By `tokenizer.ggml.pre`: the patterns, one after another, and whether text is normalised.
CUTS: dict[str, tuple[tuple[str, ...], bool]] = {
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), ((QWEN2,), True)),
    "qwen35": ((QWEN35,), True),
    **dict.fromkeys(("glm4", "chatglm-bpe"), ((LLAMA3,), False)),
    "deepseek-v3": (DEEPSEEK3, False),
    **dict.fromkeys(("gpt-4o", "llama4"), ((O200K,), False)),
    "kimi-k2": ((KIMI_WORDS,), False),
}
NAMED = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
ENDS = ("eos", "eot", "eom")  # tokens that end a turn or a message
TAG = re.compile("</?(?!s>|pad>|unk>|mask>|bos>|eos>)[a-z_]+>")
MARKER = re.compile(r"<\S+>")
BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}


def tokenizer_files(metadata: JsonObject) -> dict[str, bytes]:
    """The contents of tokenizer.json or tokenizer.model, and of tokenizer_config.json by name.

    Raises:
        TokenizerError: the metadata describe no tokenizer, or one of a kind that is not read.
    """
    kind = metadata.get("tokenizer.ggml.model")
    if kind not in ("gpt2", "llama"):
        known = "'gpt2' (byte-level BPE) and 'llama' (SentencePiece)"
        raise _refusal(f"tokenizer.ggml.model is {str(kind)[:40]!a}; only {known} are read")
    tokens, is_pieces = _texts(metadata, "tokenizer.ggml.tokens"), kind == "llama"
    files = {"tokenizer_config.json": _json(_config(metadata, tokens, is_pieces))}
    if is_pieces:
        files["tokenizer.model"] = _sentencepiece(metadata, tokens)
    else:
        files["tokenizer.json"] = _json(_byte_pairs(metadata, tokens))
    return files


def generation_file(metadata: JsonObject) -> dict[str, bytes]:
    """The contents of generation_config.json by this name, if the metadata name tokens that end a turn.

    Raises:
        TokenizerError: one of them is no token.
    """
    named = [name for name in ENDS if f"tokenizer.ggml.{name}_token_id" in metadata]
    tokens = _texts(metadata, "tokenizer.ggml.tokens") if named else []
    ends = [one for name in named if (one := _id(metadata, name, tokens)) is not None]
    return {"generation_config.json": _json({"eos_token_id": list(dict.fromkeys(ends))})} if ends else {}


def _json(content: object) -> bytes:
    return json.dumps(content, ensure_ascii=False).encode()


def template_of(metadata: JsonObject) -> bytes | None:
    """The chat template, if the file has one."""
    template = metadata.get("tokenizer.chat_template")
    return template.encode() if isinstance(template, str) else None


def _refusal(text: str) -> TokenizerError:
    return TokenizerError(
        f"GGUF metadata {text}; give the tokenizer files of the model's repository with --tokenizer, or put them "
        "beside the file"
    )


def _texts(metadata: JsonObject, key: str) -> list[str]:
    value = metadata.get(key)
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
        raise _refusal(f"{key} is no list of texts")
    return value


def _id(metadata: JsonObject, name: str, tokens: list[str]) -> int | None:
    value = metadata.get(f"tokenizer.ggml.{name}_token_id")
    if value is not None and (type(value) is not int or not 0 <= value < len(tokens)):
        raise _refusal(f"tokenizer.ggml.{name}_token_id is {str(value)[:40]!a}, which is no token")
    return value


def _config(metadata: JsonObject, tokens: list[str], adds_bos: bool) -> JsonDict:
    """`adds_bos`: where the file does not say it."""
    ids = {name: _id(metadata, one, tokens) for name, one in NAMED.items()}
    named = {name: tokens[one] for name, one in ids.items() if one is not None}
    return {**named, "add_bos_token": metadata.get("tokenizer.ggml.add_bos_token", adds_bos) is True}


def _byte_pairs(metadata: JsonObject, tokens: list[str]) -> JsonDict:
    cut = metadata.get("tokenizer.ggml.pre")
    if not isinstance(cut, str) or cut not in CUTS:
        raise _refusal(f"tokenizer.ggml.pre is {str(cut)[:40]!a}; known are {', '.join(CUTS)}")
    vocabulary = {token: i for i, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens):
        raise _refusal("tokenizer.ggml.tokens has a token twice")
    patterns, is_normalised = CUTS[cut]
    splits = [{"type": "Split", "pattern": {"Regex": one}, "behavior": "Isolated", "invert": False} for one in patterns]
    model = {"type": "BPE", "vocab": vocabulary, "merges": _texts(metadata, "tokenizer.ggml.merges")}
    return {
        "version": "1.0",
        "added_tokens": _added(metadata, tokens),
        "normalizer": {"type": "NFC"} if is_normalised else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*splits, BYTE_LEVEL]},
        "decoder": BYTE_LEVEL,
        "model": {**model, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False},
    }


def _kinds(metadata: JsonObject, tokens: list[str]) -> list[int]:
    """The type of each token."""
    kinds = metadata.get("tokenizer.ggml.token_type")
    if not isinstance(kinds, list) or len(kinds) != len(tokens) or not all(type(kind) is int for kind in kinds):
        raise _refusal("tokenizer.ggml.token_type has not one entry for each token")
    return kinds


def _added(metadata: JsonObject, tokens: list[str]) -> list[JsonDict]:
    """Tokens that are found in text as they are written. Tags such as <tool_call> are text that a reader must see, also
    where a file calls them control tokens."""
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return [
        {"id": i, "content": token, **flags, "special": kind == CONTROL and not TAG.fullmatch(token)}
        for i, (token, kind) in enumerate(zip(tokens, _kinds(metadata, tokens), strict=True))
        if kind in (CONTROL, USER_DEFINED)
    ]


def _sentencepiece(metadata: JsonObject, tokens: list[str]) -> bytes:
    """A ModelProto: pieces, a TrainerSpec and a NormalizerSpec, by their fields' numbers in the published schema. GGUF
    has the pieces' types under the same numbers. A marker of a chat that is called a control token becomes a
    user-defined one, as text is searched for no other.
    """
    scores = metadata.get("tokenizer.ggml.scores")
    if not isinstance(scores, list) or len(scores) != len(tokens) or not all(type(one) is float for one in scores):
        raise _refusal("tokenizer.ggml.scores has not one number for each token")
    ids = {name: _id(metadata, name, tokens) for name in ("unknown", "bos", "eos", "padding")}
    kinds = [
        USER_DEFINED if kind == CONTROL and MARKER.fullmatch(token) and i not in ids.values() else kind
        for i, (token, kind) in enumerate(zip(tokens, _kinds(metadata, tokens), strict=True))
    ]
    if ids["unknown"] is None or kinds[ids["unknown"]] != UNKNOWN:
        raise _refusal("tokenizer.ggml.unknown_token_id names no token of type unknown")
    pieces = (
        _field(1, _field(1, token.encode()) + _field(2, struct.pack("<f", score), FIXED) + _field(3, kind))
        for token, score, kind in zip(tokens, scores, kinds, strict=True)
    )
    has_bytes = any(kind == BYTE for kind in kinds)
    names = {45: "unknown", 46: "bos", 47: "eos", 48: "padding"}
    spelt = b"".join(
        _field(number, tokens[one].encode()) for number, name in names.items() if (one := ids[name]) is not None
    )
    trainer = _field(3, BPE) + _field(35, has_bytes) + spelt
    spaces = {3: "add_space_prefix", 4: "remove_extra_whitespaces"}
    usual = {"add_space_prefix": True, "remove_extra_whitespaces": False}
    flags = {number: metadata.get(f"tokenizer.ggml.{name}", usual[name]) is True for number, name in spaces.items()}
    normalizer = _field(1, b"identity") + b"".join(_field(number, flag) for number, flag in flags.items())
    return b"".join(pieces) + _field(2, trainer) + _field(3, normalizer + _field(5, True))


def _field(number: int, value: int | bytes, wire: int = LENGTH) -> bytes:
    """A field of a message of protocol buffers: a varint, bytes with their length, or (`wire` FIXED) 4 bytes."""
    if isinstance(value, bytes):
        head = _varint(number << 3 | wire)
        return head + value if wire == FIXED else head + _varint(len(value)) + value
    return _varint(number << 3) + _varint(value)


def _varint(value: int) -> bytes:
    data = bytearray()
    while value > 127:
        data.append(value & 127 | 128)
        value >>= 7
    return bytes([*data, value])

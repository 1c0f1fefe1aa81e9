"""The tokenizer files that a GGUF's metadata describe, for models whose own files are not at hand.

Byte-level BPE becomes `tokenizer.json`. How text is cut before pairs are joined is not in the file: `.pre` names it,
and the names whose rule is known are `CUTS`. Qwen's tokenizers normalise text (NFC), which llama.cpp leaves out.
"""

import json
import re
from collections.abc import Mapping
from typing import Any

from ..errors import TokenizerError

CONTROL, USER_DEFINED = 3, 4  # values of `tokenizer.ggml.token_type`
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
    "gpt-4o": ((O200K,), False),
}
NAMED = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
ENDS = ("eos", "eot", "eom")  # tokens that end a turn or a message
TAG = re.compile("</?(?!s>|pad>|unk>|mask>|bos>|eos>)[a-z_]+>")
BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}


def tokenizer_files(metadata: Mapping[str, Any]) -> dict[str, bytes]:
    """The contents of tokenizer.json, tokenizer_config.json and generation_config.json by name.

    Raises:
        TokenizerError: the metadata describe no tokenizer, or one of a kind that is not read.
    """
    kind = metadata.get("tokenizer.ggml.model")
    if kind != "gpt2":
        raise _refusal(f"tokenizer.ggml.model is {str(kind)[:40]!a}; only 'gpt2' (byte-level BPE) is read")
    tokens = _texts(metadata, "tokenizer.ggml.tokens")
    config = _config(metadata, tokens)
    files = {"tokenizer.json": _byte_pairs(metadata, tokens), "tokenizer_config.json": config}
    ends = [one for name in ENDS if (one := _id(metadata, name, tokens)) is not None]
    files |= {"generation_config.json": {"eos_token_id": list(dict.fromkeys(ends))}} if ends else {}
    return {name: json.dumps(content, ensure_ascii=False).encode() for name, content in files.items()}


def template_of(metadata: Mapping[str, Any]) -> bytes | None:
    """The chat template, if the file has one."""
    template = metadata.get("tokenizer.chat_template")
    return template.encode() if isinstance(template, str) else None


def _refusal(text: str) -> TokenizerError:
    return TokenizerError(
        f"GGUF metadata {text}; give the tokenizer files of the model's repository with --tokenizer, or put them "
        "beside the file"
    )


def _texts(metadata: Mapping[str, Any], key: str) -> list[str]:
    value = metadata.get(key)
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
        raise _refusal(f"{key} is no list of texts")
    return value


def _id(metadata: Mapping[str, Any], name: str, tokens: list[str]) -> int | None:
    value = metadata.get(f"tokenizer.ggml.{name}_token_id")
    if value is not None and (type(value) is not int or not 0 <= value < len(tokens)):
        raise _refusal(f"tokenizer.ggml.{name}_token_id is {str(value)[:40]!a}, which is no token")
    return value


def _config(metadata: Mapping[str, Any], tokens: list[str]) -> dict[str, Any]:
    ids = {name: _id(metadata, one, tokens) for name, one in NAMED.items()}
    named = {name: tokens[one] for name, one in ids.items() if one is not None}
    return {**named, "add_bos_token": metadata.get("tokenizer.ggml.add_bos_token") is True}


def _byte_pairs(metadata: Mapping[str, Any], tokens: list[str]) -> dict[str, Any]:
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


def _added(metadata: Mapping[str, Any], tokens: list[str]) -> list[dict[str, Any]]:
    """Tokens that are found in text as they are written. Tags such as <tool_call> are text that a reader must see, also
    where a file calls them control tokens."""
    kinds = metadata.get("tokenizer.ggml.token_type")
    if not isinstance(kinds, list) or len(kinds) != len(tokens):
        raise _refusal("tokenizer.ggml.token_type has not one entry for each token")
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return [
        {"id": i, "content": token, **flags, "special": kind == CONTROL and not TAG.fullmatch(token)}
        for i, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
        if kind in (CONTROL, USER_DEFINED)
    ]

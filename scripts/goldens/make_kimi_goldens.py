"""Trains a small `tiktoken.model` and encodes texts with tiktoken, into tests/fixtures/tokenizers/kimi.

Needs tiktoken. Texts are cut as Kimi's tokenization_kimi.py cuts them, special tokens are those of its
tokenizer_config.json in another order of ids:

    python scripts/goldens/make_kimi_goldens.py
"""

import base64
import json
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import regex
import tiktoken

FIXTURES = Path(__file__).resolve().parents[2] / "tests" / "fixtures" / "tokenizers" / "kimi"
LETTERS = r"\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]"
WORDS = "|".join(
    (
        r"[\p{Han}]+",
        rf"[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}{LETTERS}]*[\p{{Ll}}{LETTERS}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        rf"[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}{LETTERS}]+[\p{{Ll}}{LETTERS}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)
CORPUS = (
    "The owl flew over the lake, and it's 12345 metres wide; they'll see THE END.\n\n  It wasn't there.\r\n"
    "def f(x):\n        return x + 1  # once\n\n\n日本語のテキスト。"
    "漢字漢字。今日はABC漢字def。한국어 문장 ñandú naïve e\u0301\n"
    "aaaaaaa lalalala\n"
    "Once upon a time there was a fox named Ravi, who liked the red ball very much.\n"
)
EXTRA = ["q漢", "zqzq"]  # the first one crosses two words, and no merge makes the second one
TEXTS = [
    "",
    "The owl flew over the lake.",
    "zqzq zqzqzq",
    "it's IT'S we'll they'Re x'd 'tis",
    "q漢 漢字かな漢字 ABC漢字abc 今日はgood日本",
    "12345678 3.14159 1,000,000 ٣٤٥",
    "  two  spaces\n\n\n\ttab \r\n end   ",
    "naïve ñandú e\u0301 Ǆ ʰ क्षि 🙂🙃 \u200d \ufeff",
    "def f(x):\n        return {'a': [1, 2]}  # ok!?\n",
    "<|im_user|>user<|im_middle|>Hi<|im_end|><|im_assistant|>assistant<|im_middle|><think>why</think>Hello[EOS]",
    "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{}<|tool_call_end|>",
    "<|reserved_token_REST|>x<|im_end",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa lalalalalala\n\n\n\n\n\n",
]
MARKERS = {
    "[BOS]": True, "[EOS]": True, "<|im_end|>": True, "<|im_user|>": True, "<|im_assistant|>": True,
    "<|im_system|>": True, "<|im_middle|>": True, "<think>": False, "</think>": False,
    "<|tool_calls_section_begin|>": False, "<|tool_calls_section_end|>": False, "<|tool_call_begin|>": False,
    "<|tool_call_argument_begin|>": False, "<|tool_call_end|>": False,
}  # fmt: skip


def train(size: int) -> dict[bytes, int]:
    """Returns the ranks of at most `size` tokens: the most frequent pair in the words of the corpus becomes the next
    token.
    """
    # Python's `regex` supports intersections of sets only in its version 1.
    words = [[bytes([byte]) for byte in word.encode()] for word in regex.findall(WORDS, CORPUS, regex.V1)]
    ranks = {bytes([byte]): byte for byte in range(256)}
    while len(ranks) < size:
        pairs = Counter(pair for word in words for pair in pairwise(word))
        if not pairs:
            break
        left, right = max(pairs, key=lambda pair: (pairs[pair], pair))
        ranks[left + right] = len(ranks)
        for word in words:
            merge(word, left + right)
    return ranks | {text.encode(): len(ranks) + n for n, text in enumerate(EXTRA)}


def merge(word: list[bytes], token: bytes) -> None:
    at = 0
    while at < len(word) - 1:
        if word[at] + word[at + 1] == token:
            word[at : at + 2] = [token]
        at += 1


def listed(first: int) -> dict[int, dict[str, Any]]:
    """Returns `added_tokens_decoder` with every third id from `first` on, so that reserved ids are in between."""
    return {first + 3 * n: {"content": name, "special": special} for n, (name, special) in enumerate(MARKERS.items())}


def main() -> None:
    ranks = train(420)
    tokens = listed(len(ranks))
    ids = range(len(ranks), len(ranks) + 256)
    special = {tokens[i]["content"] if i in tokens else f"<|reserved_token_{i}|>": i for i in ids}
    encoding = tiktoken.Encoding("kimi", pat_str=WORDS, mergeable_ranks=ranks, special_tokens=special)
    texts = [text.replace("REST", str(len(ranks) + 1)) for text in TEXTS]
    goldens = [{"text": text, "ids": encoding.encode(text, allowed_special="all")} for text in texts]
    FIXTURES.mkdir(parents=True, exist_ok=True)
    lines = [f"{base64.b64encode(token).decode()} {rank}\n" for token, rank in ranks.items()]
    (FIXTURES / "tiktoken.model").write_text("".join(lines), encoding="ascii")
    config = {"tokenizer_class": "TikTokenTokenizer", "bos_token": "[BOS]", "eos_token": "[EOS]"}
    save("tokenizer_config.json", {**config, "added_tokens_decoder": tokens})
    save("goldens.json", {"tiktoken": tiktoken.__version__, "goldens": goldens})


def save(name: str, content: Any) -> None:
    text = json.dumps(content, ensure_ascii=False, indent=1) + "\n"
    (FIXTURES / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()

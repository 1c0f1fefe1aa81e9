"""Makes a small `tekken.json` and encodes texts with mistral_common, into tests/fixtures/tokenizers/tekken.

Needs mistral-common and regex. The tokens are the Kimi fixture's, a few of them beyond the vocabulary's size:

    python scripts/goldens/make_tekken_goldens.py
"""

import base64
import json
from pathlib import Path

import mistral_common
from make_kimi_goldens import TEXTS, train
from mistral_common.tokens.tokenizers.tekken import Tekkenizer

FIXTURES = Path(__file__).resolve().parents[2] / "tests" / "fixtures" / "tokenizers" / "tekken"
WORDS = "|".join(
    (
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*",
        r"\p{N}",
        r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)
CONTROLS = ("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[ARGS]", "<pad>")
PLAIN = ("[THINK]", "[/THINK]")
SPECIAL, BEYOND = 24, 8


def main() -> None:
    tokens = sorted((ranks := train(420)), key=ranks.__getitem__)
    named = [(name, True) for name in CONTROLS] + [(name, False) for name in PLAIN]
    content = {
        "config": {
            "pattern": WORDS,
            "num_vocab_tokens": len(tokens),
            "default_vocab_size": len(tokens) + SPECIAL - BEYOND,
            "default_num_special_tokens": SPECIAL,
            "version": "v13",
        },
        "vocab": [
            {"rank": n, "token_bytes": base64.b64encode(token).decode(), "token_str": None}
            for n, token in enumerate(tokens)
        ],
        "special_tokens": [{"rank": n, "token_str": name, "is_control": on} for n, (name, on) in enumerate(named)],
    }
    FIXTURES.mkdir(parents=True, exist_ok=True)
    (FIXTURES / "tekken.json").write_text(json.dumps(content), encoding="utf-8")
    tokenizer = Tekkenizer.from_file(FIXTURES / "tekken.json")
    goldens = [{"text": text, "ids": tokenizer.encode(text, bos=True, eos=False)} for text in TEXTS]
    special = {name: tokenizer.get_special_token(name) for name, _ in named} | {"<SPECIAL_10>": 10}
    text = json.dumps(
        {"mistral_common": mistral_common.__version__, "special": special, "goldens": goldens},
        ensure_ascii=False,
        indent=1,
    )
    (FIXTURES / "goldens.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

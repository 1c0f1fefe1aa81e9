"""Tokenizers made from a GGUF's metadata: how text is cut, what is found in it, and refusals."""

import json

import pytest
from tokenizers import Tokenizer

from moeflux_mlx.errors import TokenizerError
from moeflux_mlx.text.byte_pairs import byte_alphabet
from moeflux_mlx.text.gguf_tokens import CUTS, template_of, tokenizer_files

MARKERS = {"<|end|>": 3, "<tool_call>": 3, "</tool_call>": 4, "<s>": 3}


def metadata(**changes):
    letters = list(byte_alphabet())
    tokens = [*letters, "he", *MARKERS]
    usual = {
        "model": "gpt2",
        "pre": "qwen2",
        "tokens": tokens,
        "token_type": [1] * (len(letters) + 1) + list(MARKERS.values()),
        "merges": ["h e"],
        "eos_token_id": tokens.index("<|end|>"),
        "eot_token_id": tokens.index("</tool_call>"),
    }
    return {f"tokenizer.ggml.{key}": value for key, value in (usual | changes).items() if value is not None}


def made(**changes):
    return Tokenizer.from_str(tokenizer_files(metadata(**changes))["tokenizer.json"].decode())


def pieces(cut, text):
    """Returns the parts of a text that pairs are joined in."""
    tokenizer = made(pre=cut)
    text = tokenizer.normalizer.normalize_str(text) if tokenizer.normalizer else text
    return [text[first:last] for _, (first, last) in tokenizer.pre_tokenizer.pre_tokenize_str(text)]


TEXT = "I'LL  sell 12345 caf\u0065\u0301s!?\n\n(HelloWorld)"


@pytest.mark.parametrize(
    "cut, wanted",
    [
        ("qwen2", "I|'LL| | sell| |1|2|3|4|5| caf\u00e9s|!?\n\n|(HelloWorld|)"),
        ("qwen35", "I|'LL| | sell| |1|2|3|4|5| caf\u00e9s|!?\n\n|(HelloWorld|)"),
        ("glm4", "I|'LL| | sell| |123|45| cafe|\u0301s|!?\n\n|(HelloWorld|)"),
        ("deepseek-v3", "I|'LL| | sell| |123|45| cafe\u0301s|!?\n\n|(HelloWorld|)"),
        ("gpt-4o", "I'LL| | sell| |123|45| cafe\u0301s|!?\n\n|(Hello|World|)"),
    ],
)
def test_how_text_is_cut(cut, wanted):
    """By the patterns of the published tokenizer.json files; those of Qwen also normalise the accent."""
    assert pieces(cut, TEXT) == wanted.split("|")


def test_every_cut_keeps_every_character():
    for cut in CUTS:
        text = TEXT + "\t\u4f60\u597d \u304b\u306a \U0001f600 x_y"
        assert "".join(pieces(cut, text)) in (text, text.replace("e\u0301", "\u00e9"))


def test_tokens_are_found_and_tags_are_not_special():
    tokenizer = made()
    ids = tokenizer.encode("he<tool_call></tool_call><s><|end|>").tokens
    assert ids == ["he", "<tool_call>", "</tool_call>", "<s>", "<|end|>"]
    special = {token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special}
    assert special == {"<s>", "<|end|>"}


def test_other_files():
    files = tokenizer_files(metadata(bos_token_id=0, add_bos_token=True))
    tokens = metadata()["tokenizer.ggml.tokens"]
    config = json.loads(files["tokenizer_config.json"])
    assert config == {"bos_token": tokens[0], "eos_token": "<|end|>", "add_bos_token": True}
    ends = [tokens.index("<|end|>"), tokens.index("</tool_call>")]
    assert json.loads(files["generation_config.json"]) == {"eos_token_id": ends}
    assert template_of({"tokenizer.chat_template": "{{ x }}"}) == b"{{ x }}" and template_of({}) is None


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"model": "llama"}, "tokenizer.ggml.model is 'llama'"),
        ({"model": None}, "tokenizer.ggml.model is 'None'"),
        ({"pre": "default"}, "known are qwen2"),
        ({"pre": 3}, "known are qwen2"),
        ({"tokens": None}, "tokens is no list of texts"),
        ({"tokens": [1, 2]}, "tokens is no list of texts"),
        ({"tokens": ["a", "a"], "eos_token_id": 0, "eot_token_id": 0}, "a token twice"),
        ({"token_type": [1]}, "not one entry for each token"),
        ({"merges": "h e"}, "merges is no list of texts"),
        ({"eos_token_id": -1}, "which is no token"),
        ({"eos_token_id": "0"}, "which is no token"),
    ],
)
def test_metadata_that_make_no_tokenizer(changes, words):
    with pytest.raises(TokenizerError, match=words) as error:
        tokenizer_files(metadata(**changes))
    assert "--tokenizer" in str(error.value) and "\n" not in str(error.value)

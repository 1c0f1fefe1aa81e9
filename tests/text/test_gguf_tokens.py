"""Tokenizers made from a GGUF's metadata: how text is cut, what is found in it, and refusals."""

import json
from functools import cache

import pytest
from sentencepiece import SentencePieceProcessor
from test_tokenizer import train_sentencepiece
from tokenizers import Tokenizer

from moeflux_mlx.errors import TokenizerError
from moeflux_mlx.text.byte_pairs import byte_alphabet
from moeflux_mlx.text.gguf_tokens import CUTS, generation_file, template_of, tokenizer_files
from moeflux_mlx.text.tokenizer import load_tokenizer

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
        ("kimi-k2", "I'LL| | sell| |123|45| cafe\u0301s|!?\n\n|(Hello|World|)"),
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
    assert json.loads(generation_file(metadata())["generation_config.json"]) == {"eos_token_id": ends}
    assert generation_file(metadata(eos_token_id=None, eot_token_id=None)) == {}
    assert generation_file({"tokenizer.ggml.model": "no_vocab"}) == {}, "a file whose tokenizer lies beside it"
    assert template_of({"tokenizer.chat_template": "{{ x }}"}) == b"{{ x }}" and template_of({}) is None


CORPUS = [
    "Once upon a time there was a fox.",
    "def f(x):\n    return x",
    "na\u00efve \u65e5\u672c \U0001f642 <go>",
] * 20


@cache
def trained(spaced):
    """A small model with every type of piece."""
    model = train_sentencepiece(
        CORPUS,
        ["<go>"],
        control_symbols=["<turn>", "plain"],
        pad_id=3,
        bos_piece="<bos>",
        eos_piece="<eos>",
        normalization_rule_name="identity",
        add_dummy_prefix=spaced,
        remove_extra_whitespaces=False,
    )
    return SentencePieceProcessor(model_proto=model)


def kind_of(model, piece):
    tests = ((2, model.is_unknown), (3, model.is_control), (6, model.is_byte))
    own = 4 if model.id_to_piece(piece) == "<go>" else 1
    return next((number for number, is_so in tests if is_so(piece)), own)


def pieces_of(model, **changes):
    """The metadata that llama.cpp writes of a sentencepiece model."""
    count = model.get_piece_size()
    usual = {
        "model": "llama",
        "tokens": [model.id_to_piece(i) for i in range(count)],
        "scores": [model.get_score(i) for i in range(count)],
        "token_type": [kind_of(model, i) for i in range(count)],
        "unknown_token_id": model.unk_id(),
        "bos_token_id": model.bos_id(),
        "eos_token_id": model.eos_id(),
        "padding_token_id": model.pad_id(),
    }
    return {f"tokenizer.ggml.{key}": value for key, value in (usual | changes).items() if value is not None}


@pytest.mark.parametrize("spaced", [True, False])
def test_sentencepiece_is_the_same_model(tmp_path, spaced):
    """Ids, bytes and named tokens are those of the model from which the metadata were made."""
    model = trained(spaced)
    described = pieces_of(model, add_space_prefix=spaced)
    for name, data in (tokenizer_files(described) | generation_file(described)).items():
        (tmp_path / name).write_bytes(data)
    ours, tokenizer = SentencePieceProcessor(model_file=str(tmp_path / "tokenizer.model")), load_tokenizer(tmp_path)
    for text in (*CORPUS[:3], "  two  spaces ", "\u00e9\U0001f600 unseen <go> on", ""):
        assert ours.encode(text) == model.encode(text), text
        ids = tokenizer.encode(text)
        assert ids == [model.bos_id(), *model.encode(text)] and tokenizer.decode(ids, True).strip(" ") == text.strip(
            " "
        )
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.eos_token_ids) == ("<bos>", "<eos>", {model.eos_id()})
    for name in ("unk_id", "bos_id", "eos_id", "pad_id"):
        assert getattr(ours, name)() == getattr(model, name)()


def test_markers_of_sentencepiece_are_found(tmp_path):
    """A control token in angle brackets that has no other duty; `plain` remains one."""
    model = trained(True)
    (tmp_path / "tokenizer.model").write_bytes(tokenizer_files(pieces_of(model))["tokenizer.model"])
    ours = SentencePieceProcessor(model_file=str(tmp_path / "tokenizer.model"))
    assert model.piece_to_id("<turn>") in ours.encode("a<turn>b") and model.piece_to_id("</s>") not in ours.encode(
        "</s>"
    )
    assert model.piece_to_id("<turn>") not in model.encode("a<turn>b")
    assert ours.is_control(model.piece_to_id("plain"))


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"scores": ["a"]}, "scores has not one number"),
        ({"token_type": ["1"]}, "token_type has not one entry"),
        ({"unknown_token_id": None}, "unknown_token_id names no token of type unknown"),
        ({"unknown_token_id": 1}, "unknown_token_id names no token of type unknown"),
    ],
)
def test_metadata_that_make_no_sentencepiece(changes, words):
    with pytest.raises(TokenizerError, match=words):
        tokenizer_files(pieces_of(trained(True), **changes))


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"model": "bert"}, "tokenizer.ggml.model is 'bert'"),
        ({"model": "llama"}, "scores has not one number for each token"),
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
        ({"eos_token_id": len(metadata()["tokenizer.ggml.tokens"])}, "which is no token"),
    ],
)
def test_metadata_that_make_no_tokenizer(changes, words):
    with pytest.raises(TokenizerError, match=words) as error:
        tokenizer_files(metadata(**changes))
    assert "--tokenizer" in str(error.value) and "\n" not in str(error.value)

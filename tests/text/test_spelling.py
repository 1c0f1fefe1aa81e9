"""A text encoded again with the tokens that it was generated with."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_tokenizer import QUICK
from tiny_models import tiny_directory

from moeflux_mlx.driving.conversation import Spelling
from moeflux_mlx.text.tokenizer import load_tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(tiny_directory("qwen3_moe"))


def spelt(tokenizer, tokens):
    return Spelling(tokenizer, tokens)


def test_a_text_that_continues_keeps_its_tokens(tokenizer):
    first = tokenizer.encode("<|im_start|>user\nHi<|im_end|>\n")
    more = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>"
    assert spelt(tokenizer, first).encode(more) == tokenizer.encode(more)
    assert spelt(tokenizer, first).known(more) == (len("<|im_start|>user\nHi<|im_end|>\n"), len(first))


def test_a_text_that_diverges_keeps_them_up_to_the_last_special_one(tokenizer):
    first = tokenizer.encode("<|im_start|>user\nHi<|im_end|>\nA")
    assert spelt(tokenizer, first).known("<|im_start|>user\nHo") == (len("<|im_start|>"), 1)
    assert spelt(tokenizer, first).known("other") == (0, 0)
    assert spelt(tokenizer, []).encode("Hi") == tokenizer.encode("Hi")


def test_tokens_that_a_tokenizer_would_not_choose_are_kept(tokenizer):
    """A model may write `<think>` in letters. Encoded again it would be one token."""
    odd = [*tokenizer.encode("<thi"), *tokenizer.encode("nk>"), *tokenizer.encode("<|im_end|>")]
    assert spelt(tokenizer, odd).encode("<think><|im_end|>\n")[: len(odd)] == odd
    assert tokenizer.encode("<think><|im_end|>\n")[: len(odd)] != odd


@QUICK
@given(cut=st.integers(0, 14), more=st.text("né€🙂\ufffd\n", max_size=3), ended=st.booleans())
def test_tokens_spell_the_text_that_they_are_taken_for(tokenizer, cut, more, ended):
    """A token of the tiny vocabulary is a byte, so the known text may end inside a character."""
    known = tokenizer.encode("<|im_start|>né€🙂<|im_end|>\n")[:cut]
    text = tokenizer.decode(known).rstrip("\ufffd") + "<|im_end|>" * ended + more
    assert tokenizer.decode(spelt(tokenizer, known).encode(text)) == text

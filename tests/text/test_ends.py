"""Which tokens end an answer of a GGUF: what is stated, what texts say, what the template writes; and stop texts."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_gguf_tokens import metadata

from moeflux_mlx.text.byte_pairs import byte_alphabet
from moeflux_mlx.text.channels import INKLING, MUSE
from moeflux_mlx.text.ends import TEXTS, all_ends
from moeflux_mlx.text.gguf_tokens import tokenizer_files
from moeflux_mlx.text.stop import StopTexts
from moeflux_mlx.text.tokenizer import load_tokenizer

NORMAL, CONTROL, USER_DEFINED = 1, 3, 4
HARMONY = ("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|return|>", "<|call|>")
CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"


def ends(tmp_path, tokens, template=None, stated=()):
    """Returns the texts of the ends; `tokens` are {text: type}, and `stated` texts of tokens."""
    letters = list(byte_alphabet())
    described = metadata(
        tokens=[*letters, "he", *tokens],
        token_type=[NORMAL] * (len(letters) + 1) + list(tokens.values()),
        eos_token_id=None,
        eot_token_id=None,
    )
    for name, data in tokenizer_files(described).items():
        (tmp_path / name).write_bytes(data)
    if template is not None:
        (tmp_path / "chat_template.jinja").write_text(template)
    tokenizer = load_tokenizer(tmp_path)
    ids = [tokenizer.convert_tokens_to_ids(text) for text in stated]
    inverse = {i: text for text, i in tokenizer.get_vocab().items()}
    return [inverse[i] for i in all_ends(ids, tokenizer)]


def test_ends_by_text(tmp_path):
    """Kimi K2's, of which the metadata name one; a token of ordinary text is none."""
    tokens = {"[BOS]": CONTROL, "[EOS]": CONTROL, "[EOT]": CONTROL, "<|im_end|>": CONTROL, "<|im_user|>": CONTROL}
    assert ends(tmp_path, tokens, stated=["[EOS]"]) == ["[EOS]", "[EOT]", "<|im_end|>"]
    assert ends(tmp_path, {"<|im_end|>": USER_DEFINED, "<EOT>": NORMAL}) == ["<|im_end|>"]
    assert ends(tmp_path, {"</s>": CONTROL}) == ["</s>"]
    assert ends(tmp_path, {"</s>": USER_DEFINED, "<turn|>": CONTROL}) == ["<turn|>"], "HTML of Gemma"


def test_texts_are_those_of_llama_cpp(tmp_path):
    assert set(ends(tmp_path, dict.fromkeys(sorted(TEXTS), CONTROL))) == TEXTS - {"<|end|>"}
    assert {"<|eot_id|>", "<end_of_turn>", "<|observation|>", "[e~[", "<|file_sep|>"} <= TEXTS


def test_what_closes_a_message_is_no_end(tmp_path):
    """Also where the metadata call it one; beside other tokens it is."""
    harmony = dict.fromkeys(HARMONY, CONTROL)
    assert ends(tmp_path, harmony, stated=["<|end|>", "<|return|>"]) == ["<|return|>", "<|call|>"]
    solar = dict.fromkeys(("<|end|>", "<|calls|>", "<|flush|>"), CONTROL)
    assert ends(tmp_path, solar) == ["<|calls|>", "<|flush|>"]
    inkling = dict.fromkeys((*INKLING.tags, *INKLING.ends), CONTROL)
    assert ends(tmp_path, inkling, stated=["<|end_message|>"]) == ["<|content_model_end_sampling|>"]
    muse = dict.fromkeys((*MUSE.tags, "<|eot|>"), CONTROL)
    assert ends(tmp_path, muse, stated=["<|eom|>"]) == ["<|eot|>"]
    phi = {"<|end|>": CONTROL, "<|assistant|>": CONTROL}
    assert ends(tmp_path, phi) == ["<|end|>"]


@pytest.mark.parametrize(
    "tokens, template, wanted",
    [
        (("<|im_start|>", "<|close|>"), CHATML.replace("<|im_end|>", "\n <|close|>"), ["<|close|>"]),
        (
            ("<|user|>", "<|assistant|>"),
            "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}",
            ["<|user|>"],
        ),
        (("<|im_start|>",), CHATML.replace("<|im_end|>", ""), ["<|im_start|>"]),
        (HARMONY, CHATML.replace("<|im_end|>", "<|end|>"), ["<|return|>", "<|call|>"]),
        (("</answer>",), CHATML.replace("<|im_end|>", "</answer>"), []),
        (("<|x|>",), "{{ raise_exception('no') }}<|x|>", []),
        (("<|x|>",), "{{ broken", []),
    ],
    ids=["chatml", "next turn", "opens", "harmony", "tag", "raises", "broken"],
)
def test_what_the_template_closes_turns_with(tmp_path, tokens, template, wanted):
    assert ends(tmp_path, dict.fromkeys(tokens, CONTROL), template) == wanted


LETTERS = st.text("ab<", max_size=12)


def fed(texts, pieces):
    stop = StopTexts(texts)
    out = [stop.feed(piece) for piece in pieces]
    return "".join(out) + stop.finish(), stop.found


def test_a_stop_text_is_not_part_of_the_answer():
    assert fed(["END"], ["one E", "N", "D two"]) == ("one ", "END")
    assert fed(["END"], ["one E", "N"]) == ("one EN", None)


def test_text_that_may_become_a_stop_text_is_held_back():
    stop = StopTexts(["</s>"])
    assert [stop.feed(piece) for piece in ("a<", "/", "b")] == ["a", "", "</b"]


def test_the_first_one_counts_and_the_longer_of_two_at_one_place():
    assert fed(["b", "ab"], ["xab"]) == ("x", "ab")
    assert fed(["a", "ab"], ["xab"]) == ("x", "ab")


def test_no_text_comes_after_it():
    stop = StopTexts(["a"])
    assert (stop.feed("xa"), stop.feed("more"), stop.finish()) == ("x", "", "")


@given(st.lists(st.text("ab<", min_size=1, max_size=3), max_size=3), st.lists(LETTERS, max_size=6))
def test_any_cut_gives_the_text_before_the_first_place(texts, pieces):
    whole = "".join(pieces)
    out, stop = fed(texts, pieces)
    assert whole.startswith(out)
    if stop is None:
        assert out == whole and not any(text in whole for text in texts)
    else:
        assert whole.startswith(stop, len(out)) and not any(text in out for text in texts)

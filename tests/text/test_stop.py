"""Stop texts: for any cut of the text, the output is everything before the first of them."""

from hypothesis import given
from hypothesis import strategies as st

from moeflux_mlx.server.answering import StopTexts

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

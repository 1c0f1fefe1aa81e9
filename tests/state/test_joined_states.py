"""Recurrent states of sequences that step together: they are rows of the same arrays, and each sequence has what it has
alone, however the sequences of a step change and go back."""

from types import SimpleNamespace

import mlx.core as mx
import numpy as np
import pytest

from moeflux_mlx.caches.recurrent import RecurrentCache, joined_arrays
from moeflux_mlx.model.compiled import DecodeStep
from moeflux_mlx.model.step import SequenceRows, Step

PART = SimpleNamespace(conv_shape=(2, 3), state_shape=(4,))


class Joining(RecurrentCache):
    joins = True


def run(tokens, caches):
    """A layer whose new state is 3 times the old one plus the token."""
    state = getattr(caches[0], "joined", caches[0])
    added = tokens.reshape(-1, 1).astype(mx.float32)
    state.absorb([3 * state.conv + added[..., None], 3 * state.recurrent + added], 1)
    return [state.recurrent[None, :, 0]]


class Text:
    """A sequence's caches, and the value that its state must have."""

    def __init__(self, start):
        self.cache, self.value = [Joining(PART)], start
        self.cache[0].state = mx.full((1, 2, 3), start), mx.full((1, 4), start), 5

    def rows(self, token):
        return SequenceRows(self.cache, mx.array([token], mx.uint32))

    def holds(self):
        conv, recurrent, _ = self.cache[0].state
        return np.all(np.array(conv) == self.value) and np.all(np.array(recurrent) == self.value)


def advance(step, texts, tokens):
    """Steps the texts together, and returns the step, which can be taken back."""
    made = Step([text.rows(token) for text, token in zip(texts, tokens, strict=True)])
    (out,) = step(made.tokens, [text.cache for text in texts])
    for text, token in zip(texts, tokens, strict=True):
        text.value = (3 * text.value + token) % 2**20
    return made, np.array(out)[0]


@pytest.mark.usefixtures("cpu_device")
def test_each_sequence_has_the_state_that_it_has_alone():
    rng, step = np.random.default_rng(0), DecodeStep(run)
    texts = [Text(float(i)) for i in range(3)]
    for _ in range(100):
        chosen = [texts[i] for i in rng.permutation(3)[: rng.integers(1, 4)]]
        before = [text.value for text in chosen]
        made, out = advance(step, chosen, rng.integers(0, 9, len(chosen)).tolist())
        assert out.tolist() == [text.value for text in chosen]
        for i in np.flatnonzero(rng.random(len(chosen)) < 0.3).tolist():
            made.rewind(i, 0)
            chosen[i].value = before[i]
        looked = rng.integers(0, 8)
        if looked < 3:
            assert texts[looked].holds()
        for text in texts:
            text.value = text.value if text.value < 2**12 else 0.0
            if not text.value:
                text.cache[0].state = mx.zeros((1, 2, 3)), mx.zeros((1, 4)), text.cache[0].offset
    assert all(text.holds() for text in texts)


@pytest.mark.usefixtures("cpu_device")
def test_sequences_that_were_rows_of_different_steps():
    """Each is in the place that it had, but the arrays of the last steps are not the same."""
    step, (a, b, c, d) = DecodeStep(run), [Text(float(i)) for i in range(4)]
    for pair in ((a, b), (c, d), (a, d)):
        advance(step, pair, [1, 2])
    assert all(text.holds() for text in (a, b, c, d))


@pytest.mark.usefixtures("cpu_device")
def test_a_sequence_that_goes_on_alone_keeps_no_state_of_the_others():
    large = SimpleNamespace(conv_shape=(2, 1 << 14), state_shape=(1 << 15,))
    mx.clear_cache()  # of other tests' buffers, which may be larger than an array that they are given to
    arrays = [mx.zeros((4, *shape)) for shape in (large.conv_shape, large.state_shape)]
    mx.eval(arrays)
    before, cache = mx.get_active_memory(), Joining(large)
    cache.take_joined(arrays, 2)
    cache.separate()
    del arrays
    mx.eval(cache.arrays)
    assert before - mx.get_active_memory() == 3 * 4 * 2 * (1 << 15)


@pytest.mark.usefixtures("cpu_device")
def test_the_same_sequences_go_on_without_a_copy():
    step, texts = DecodeStep(run), [Text(float(i)) for i in range(3)]
    advance(step, texts, [1, 2, 3])
    caches = [text.cache[0] for text in texts]
    caches.sort(key=lambda one: one.joined.row)
    assert joined_arrays(caches) is caches[0].joined.arrays
    made, _ = advance(step, texts, [1, 1, 1])
    assert made.nbytes == 3 * 4 * (6 + 4), "the joined arrays count once"
    caches[1].separate()
    assert caches[1].joined is None and caches[0].joined is not None
    assert np.all(np.array(joined_arrays(caches[::-1])[1])[0] == np.array(caches[2].recurrent))
    assert all(text.holds() for text in texts)

"""Rotary positions that differ from places in the cache."""

import mlx.core as mx
import numpy as np
import pytest
from grids import drawn
from test_decode import FAMILIES, make_resident
from test_step import PROMPT, SequenceRows, plain_model, same, start, step
from tiny_models import tiny_model

from metal import fast, msl
from moeflux_mlx.errors import SnapshotError
from moeflux_mlx.state.snapshot import load_state, save_state


def shift(cache, by):
    for layer in cache:
        layer.shift(by)


def logits(model, prompt, *parts):
    """Returns the logits after `prompt`, shifts of it (an int) and further tokens (a list)."""
    cache, outputs = start(model, prompt), []
    for part in parts:
        if isinstance(part, int):
            shift(cache, part)
        else:
            outputs.append(np.array(model(mx.array([part]), cache)[0].astype(mx.float32)))
    return np.concatenate(outputs)


SPAN = list(range(40, 52))  # more tokens than a step may have
MODELS = {
    "native": lambda patch, family: tiny_model(family, mx.float32),
    "compiled": make_resident,
}


@pytest.mark.parametrize("family, kind", drawn(FAMILIES, MODELS))
def test_every_form_rotates_by_position(monkeypatch, family, kind):
    model, plain = MODELS[kind](monkeypatch, family), plain_model(family)
    parts = 9, SPAN, [3], [4, 5, 6], -4, [7], [8]
    want = logits(plain, PROMPT, *parts)
    np.testing.assert_allclose(logits(model, PROMPT, *parts), want, atol=2e-4)
    assert np.abs(want - logits(plain, PROMPT, *(part for part in parts if part != -4))).max() > 1e-3
    assert np.array_equal(logits(model, PROMPT, 0, SPAN, [3]), logits(model, PROMPT, SPAN, [3]))


@pytest.mark.usefixtures("plain_operations")
@msl.needed
@pytest.mark.usefixtures("cpu_device")
@pytest.mark.parametrize("family", ["qwen3_5_moe", "deepseek_v3"])
def test_kernels_rotate_by_position(monkeypatch, family, small_products):
    monkeypatch.setattr(mx.fast, "rope", fast.rope)
    model, parts = tiny_model(family, mx.float32), (9, [3], [4])
    want = logits(model, PROMPT, *parts)
    with msl.launching():
        got = logits(model, PROMPT, *parts)
    np.testing.assert_allclose(got, want, atol=2e-4)
    assert np.abs(want - logits(model, PROMPT, [3], [4])).max() > 1e-3


@pytest.mark.parametrize("family", FAMILIES)
def test_only_the_distance_between_positions_counts(family):
    """A text that is shifted from its first token on gives the results of one that is not, up to rounding."""
    model = tiny_model(family, mx.float32)
    want = logits(model, [], PROMPT, [3])
    np.testing.assert_allclose(logits(model, [], 50, PROMPT, [3]), want, atol=1e-3)


@pytest.mark.parametrize("family", FAMILIES)
def test_going_back_before_a_shift_removes_it(family):
    model = tiny_model(family, mx.float32)
    cache = start(model, PROMPT)
    step(model, (cache, [1, 2, 3])).rewind(0, 2)
    shift(cache, 9)
    made = step(model, (cache, [4, 5]))
    assert {layer.position for layer in cache} == {len(PROMPT) + 4 + 9}
    made.rewind(0, 0)
    copies = [layer.copy() for layer in cache]
    assert {layer.position for layer in [*cache, *copies]} == {len(PROMPT) + 2 + 9}, "the shift was before these rows"
    assert same(model.step([SequenceRows(copies, [4])]).logits, np.array(made.logits[:1]))
    made = step(model, (cache, [4]))
    shift(cache, -5)
    made.rewind(0, 0)
    assert {layer.position for layer in cache} == {len(PROMPT) + 2 + 9}


def test_a_fork_keeps_the_shifts_and_a_snapshot_refuses_them():
    model = tiny_model("qwen3_moe", mx.float32)
    cache, saved = start(model, PROMPT), save_state(model, start(model, PROMPT))
    shift(cache, 0)
    assert save_state(model, cache) == saved, "a shift of nothing"
    shift(cache, 3)
    mx.eval(model(mx.array([[1]]), cache))
    with pytest.raises(SnapshotError, match="a snapshot cannot say so"):
        save_state(model, cache)
    forks = [model.make_cache(), model.make_cache()]
    for fork, length in zip(forks, (21, 10), strict=True):
        for new, old in zip(fork, cache, strict=True):
            new.take_from(old, length, None)
        assert {layer.position - layer.offset for layer in fork} == {3 if length == 21 else 0}
    load_state(model, cache, saved)
    assert {layer.position for layer in cache} == {len(PROMPT)}

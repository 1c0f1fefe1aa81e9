"""Qwen3.8-Flash-Next: the ends of blocks and texts, reading rows of n-grams, and the effect of typical mistakes."""

from dataclasses import replace
from functools import partial

import goldens
import mistakes
import mlx.core as mx
import numpy as np
import pytest
from grids import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from mistakes import TOLERANCE
from tiny_models import logits_of_calls as logits
from tiny_models import tiny_directory, tiny_model

from moeflux_mlx import kinds
from moeflux_mlx.mixers.delta import op as delta
from moeflux_mlx.mixers.delta.spec import Delta
from moeflux_mlx.mixers.grouped import module as attention
from moeflux_mlx.mixers.grouped.spec import GroupedQuery
from moeflux_mlx.model import ngrams, tables
from moeflux_mlx.opening.engine import load_model
from moeflux_mlx.ops import ngrams as operations
from moeflux_mlx.ops.rows import ALONE

FAMILY = "qwen4_exp"
TOKENS, WANTED = goldens.golden(FAMILY)
error, broken = (partial(check, family=FAMILY) for check in (mistakes.error, mistakes.broken))
END = goldens.text_config(FAMILY)["eos_token_id"]


@pytest.fixture
def model():
    return tiny_model(FAMILY, mx.float32, "hub")


def test_the_text_passes_everything(model):
    """The text passes the budget of four blocks, ends of texts and the convolution's reach, in two layers of each."""
    blocks = [mixer.blocks for mixer in model.args.mixers if isinstance(mixer, GroupedQuery)]
    assert [(one.ratio, one.indexer.top) for one in blocks] == [(4, 4)] * 2
    assert [part.remembered for part in model.args.ngrams.values()] == [9, 9]
    assert np.flatnonzero(TOKENS == END).tolist() == [12, 13, 41] and len(TOKENS) == 64


# The 19th position is the last that sees no more whole blocks than are chosen.
LENGTHS = [(16, 48), (18, 46), (19, 45), (20, 44), (17, 1, 1, 1, 44), (23, 1, 40), (12, 1, 1, 50), (3, 61)]


@pytest.mark.usefixtures("computing")
@pytest.mark.parametrize("lengths", LENGTHS)
def test_calls_that_end_about_blocks_texts_and_the_budget(model, lengths):
    assert error(model, lengths) < TOLERANCE


def test_rows_are_asked_for_before_the_first_layer(model, monkeypatch):
    """The rows of all tokens of a prompt are requested once, and those of a single token at once."""
    asked, right = [], tables.Tables.begin

    def begin(self, tokens, layers):
        asked.append((tokens.shape, layers[0][0].offset, layers[1][0].offset))
        return right(self, tokens, layers)

    monkeypatch.setattr(tables.Tables, "begin", begin)
    assert error(model, (60, 1, 1, 2)) < TOLERANCE
    assert asked == [((1, 60), 0, 0), ((1, 1), 60, 60), ((1, 1), 61, 61), ((1, 2), 62, 62)]


# ---- mistakes: each must exceed the tolerance


def wrong_keys(change):
    """Returns `block_keys` with other arguments."""
    right = attention.block_keys
    return lambda *given: right(*change(*given))


def test_index_keys_that_are_not_normed(monkeypatch):
    wrong = wrong_keys(lambda rows, norm, *rest: (rows, lambda x: x, *rest))
    assert broken(monkeypatch, attention, "block_keys", wrong)


def test_index_keys_that_are_normed_before_they_are_joined(monkeypatch):
    wrong = wrong_keys(lambda rows, norm, *rest: (norm(rows), lambda x: x, *rest))
    assert broken(monkeypatch, attention, "block_keys", wrong)


def test_blocks_rotated_by_another_position(monkeypatch):
    wrong = wrong_keys(lambda rows, norm, rope, first, ratio: (rows, norm, rope, 0, ratio))
    assert broken(monkeypatch, attention, "block_keys", wrong, (30, 34))


def test_index_heads_that_are_rotated_whole(monkeypatch):
    model = load_model(tiny_directory(FAMILY, "hub"), dtype=mx.float32)
    for layer in (model.layers[2], model.layers[4]):
        own = layer.self_attn.indexer
        turned = replace(layer.self_attn.mixer.rotation, dims=32)
        own.rope, own.block_rope = attention.Rope(turned), attention.Rope(turned, 4)
    assert error(model) > 10 * TOLERANCE


@pytest.mark.parametrize("lengths", [(64,), (1,) * 64])
@pytest.mark.parametrize("more", [-1, 1])
def test_a_budget_of_another_block(monkeypatch, lengths, more):
    model = load_model(tiny_directory(FAMILY, "hub"), dtype=mx.float32)
    for layer in (model.layers[2], model.layers[4]):
        mixer = layer.self_attn.mixer
        indexer = replace(mixer.blocks.indexer, top=4 + more)
        layer.self_attn.mixer = replace(mixer, blocks=replace(mixer.blocks, indexer=indexer))
    differs = np.abs(logits(model, TOKENS, lengths) - WANTED).max(axis=1) > 10 * TOLERANCE
    assert np.flatnonzero(differs)[0] in ((15, 16, 17, 18, 19) if more < 0 else (19, 20, 21, 22, 23))


@pytest.mark.parametrize("apart", [1, 2])
def test_inputs_of_the_convolution_that_lie_nearer(monkeypatch, apart):
    right = ngrams.with_ngrams

    def wrong(h, key, value, before, w, part):
        class Nearer(kinds.NGrams):
            longest = apart

        return right(h, key, value, before, w, Nearer(**vars(part)))

    assert broken(monkeypatch, ngrams, "with_ngrams", wrong)


@pytest.mark.parametrize("lengths", [(64,), (16, 48)])
def test_ngrams_that_go_back_beyond_the_end_of_a_text(monkeypatch, lengths):
    right = tables.row_numbers
    wrong = lambda tokens, part, *rest: right(tokens, replace(part, end=1000), *rest)  # noqa: E731
    assert broken(monkeypatch, tables, "row_numbers", wrong, lengths)


def test_a_convolution_that_begins_anew_with_a_call(monkeypatch):
    right = ngrams.with_ngrams
    wrong = lambda h, key, value, before, *rest: right(h, key, value, None, *rest)  # noqa: E731
    assert broken(monkeypatch, ngrams, "with_ngrams", wrong, (30, 34))


def test_ngrams_that_begin_anew_with_a_call(monkeypatch):
    wrong = lambda cache, count, part: np.full((count, part.longest - 1), part.end)  # noqa: E731
    assert broken(monkeypatch, tables, "_before", wrong, (30, 34))


def test_hashes_of_another_layer(monkeypatch):
    model = load_model(tiny_directory(FAMILY, "hub"), dtype=mx.float32)
    parts = dict(model.tables.parts)
    parts[3] = replace(parts[3], multipliers=parts[1].multipliers)
    model.tables.parts = parts
    assert error(model) > 10 * TOLERANCE


def test_results_of_the_delta_rule_gated_by_silu(monkeypatch):
    model = load_model(tiny_directory(FAMILY, "hub"), dtype=mx.float32)
    for layer in (model.layers[i] for i in (0, 1, 3)):
        layer.linear_attn.mixer = replace(layer.linear_attn.mixer, gate="silu")
    assert error(model) > 10 * TOLERANCE


@given(tokens=st.lists(st.integers(0, 255), min_size=3, max_size=12), seed=st.integers(0, 2**31))
@settings(max_examples=examples(25), deadline=None)
def test_row_numbers_are_those_of_exact_integers(tokens, seed):
    """Compares with Python's integers, which cannot overflow, with factors as large as a vocabulary of 256 allows."""
    rng = np.random.default_rng(seed)
    factors = tuple(int(n) for n in rng.integers(1 << 53, (1 << 63) // 256 - 1, 3) | 1)
    part = kinds.NGrams((53, 59, 61, 67), factors, 256, 8, END, 4, 64)
    tokens = [END, END, *tokens]
    got = operations.row_numbers(np.array([tokens], np.uint32), part)[0]
    for at in range(2, len(tokens)):
        hashed, wanted = tokens[at] * factors[0], []
        for back in (1, 2):
            cut = END in tokens[at - back : at]
            hashed ^= (END if cut else tokens[at - back]) * factors[back]
            for head in (2 * back - 2, 2 * back - 1):
                wanted.append(hashed % part.sizes[head] + sum(part.sizes[:head]))
        assert got[at - 2].tolist() == wanted


def test_a_gate_of_the_kernels_of_delta_rules_is_told():
    """The switch reaches the launches. Their kernels are tested with both values."""
    sizes = Delta(2, 4, 32, 32, 4, "sigmoid")
    launch = delta.plan(ALONE, "metal", *(mx.float32,) * 3, sizes)
    assert dict(launch.template)["SIGMOID"] == 1

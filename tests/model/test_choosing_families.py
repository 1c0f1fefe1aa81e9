"""Families that choose positions, blocks or entries: the ends of what is chosen, and the effect of typical mistakes."""

from dataclasses import replace

import goldens
import mlx.core as mx
import numpy as np
import pytest
from grids import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from mistakes import TOLERANCE, broken, error
from tiny_models import logits_of_calls as logits
from tiny_models import tiny_directory, tiny_model

from moeflux_mlx import kinds
from moeflux_mlx.errors import ConfigError, ModelFileError
from moeflux_mlx.experts.lookahead import MEMORY, LayerGuesses
from moeflux_mlx.mixers.compressed import module as compressed
from moeflux_mlx.mixers.delta import op as delta
from moeflux_mlx.mixers.delta.spec import ChannelDecay, Delta
from moeflux_mlx.mixers.grouped import blocks_op as blocks
from moeflux_mlx.mixers.grouped import module as attention
from moeflux_mlx.mixers.grouped.spec import GroupedQuery
from moeflux_mlx.mixers.latent import chosen_op, scoring
from moeflux_mlx.mixers.latent.spec import Latent
from moeflux_mlx.model import moe, ngrams, tables, weights
from moeflux_mlx.model import streams as model_streams
from moeflux_mlx.opening.engine import load_model
from moeflux_mlx.ops import ngrams as operations
from moeflux_mlx.ops import streams
from moeflux_mlx.ops.backend import library_of
from moeflux_mlx.ops.rows import ALONE
from moeflux_mlx.spec import ModelArgs

END = goldens.text_config("qwen4_exp")["eos_token_id"]


def model_of(family):
    return tiny_model(family, mx.float32, "hub")


def own_model(family):
    """Returns a model that a test may change."""
    return load_model(tiny_directory(family, "hub"), dtype=mx.float32)


# ---- what the golden texts pass


def test_the_text_of_glm5_next_passes_everything():
    """It passes a dense layer, the budget of four pools, and several chunks of the delta rule."""
    args = model_of("glm5_next").args
    pools = [mixer.blocks for mixer in args.mixers if isinstance(mixer, Latent)]
    assert [(one.ratio, one.indexer.top, one.weighed) for one in pools] == [(4, 4, True)] * 2
    assert [isinstance(layer.feed_forward, kinds.Dense) for layer in args.layers] == [True] + [False] * 4
    assert args.mixers[0].channel_decay == ChannelDecay(-5.0, 64) and len(goldens.golden("glm5_next")[0]) == 64


def test_the_text_of_qwen4_passes_everything():
    """It passes the budget of four blocks, ends of texts and the convolution's reach, in two layers of each."""
    args, tokens = model_of("qwen4_exp").args, goldens.golden("qwen4_exp")[0]
    chosen = [mixer.blocks for mixer in args.mixers if isinstance(mixer, GroupedQuery)]
    assert [(one.ratio, one.indexer.top) for one in chosen] == [(4, 4)] * 2
    assert [part.remembered for part in args.ngrams.values()] == [9, 9]
    assert np.flatnonzero(tokens == END).tolist() == [12, 13, 41] and len(tokens) == 64


def test_the_text_of_deepseek_v4_passes_everything():
    """It passes the end of the window, both ratios more than once, and the budget: 4 entries of 4 positions."""
    args = model_of("deepseek_v4").args
    ratios = [mixer.compressor and mixer.compressor.ratio for mixer in args.mixers]
    assert ratios == [None, 4, 16, 4] and args.mixers[1].compressor.indexer.top == 4
    assert [layer.feed_forward.router.table for layer in args.layers] == [256, 256, None, None]
    assert len(goldens.golden("deepseek_v4")[0]) == 64 > 2 * 16 and args.mixers[0].window == 7


def test_the_text_of_minimax_m3_passes_everything():
    """Three blocks of eight positions are chosen behind a dense layer, and a token's own is one of them."""
    args = model_of("minimax_m3_vl").args
    parts = [mixer.blocks for mixer in args.mixers]
    assert parts[0] is None and [(one.ratio, one.indexer.top) for one in parts[1:]] == [(8, 3)] * 3
    assert args.moe_layers == (1, 2, 3) and len(goldens.golden("minimax_m3_vl")[0]) == 64


# Lengths of calls that end about blocks, entries, texts and the budget. Of glm5_next and qwen4_exp the 19th position is
# the last that sees no more whole ones than are chosen.
LENGTHS = {
    "glm5_next": [(19, 45), (20, 1, 43), (16, 1, 1, 1, 1, 1, 43), (23, 1, 40), (3, 61)],
    "qwen4_exp": [
        *((16, 48), (18, 46), (19, 45), (20, 44), (17, 1, 1, 1, 44), (23, 1, 40), (12, 1, 1, 50), (3, 61)),
    ],
    "deepseek_v4": [(16, 48), (15, 1, 48), (17, 47), (19, 1, 1, 43), (20, 44), (24, 40), (3, 61)],
    "minimax_m3_vl": [(23, 41), (24, 40), (25, 39), (22, 1, 1, 1, 39), (31, 1, 1, 31), (3, 61)],
}
CALLS = [
    pytest.param(family, lengths, marks=pytest.mark.full if family == "glm5_next" and i > 2 else ())
    for family, calls in LENGTHS.items()
    for i, lengths in enumerate(calls)
]


@pytest.mark.usefixtures("computing")
@pytest.mark.parametrize("family, lengths", CALLS)
def test_calls_that_end_about_what_is_chosen(family, lengths):
    assert error(model_of(family), lengths, family=family) < TOLERANCE


@pytest.mark.usefixtures("computing")
def test_a_few_tokens_at_a_time_give_the_same(index_values):
    index_values(1 << 8)
    model = model_of("deepseek_v4")
    assert model.args.mixers[1].rows_at_once(64, 64) < 3 and error(model, family="deepseek_v4") < TOLERANCE


def test_rows_are_asked_for_before_the_first_layer(monkeypatch):
    """The rows of all tokens of a prompt are requested once, and those of a single token at once."""
    asked, right = [], tables.Tables.begin

    def begin(self, tokens, layers):
        asked.append((tokens.shape, layers[0][0].offset, layers[1][0].offset))
        return right(self, tokens, layers)

    monkeypatch.setattr(tables.Tables, "begin", begin)
    assert error(model_of("qwen4_exp"), (60, 1, 1, 2), family="qwen4_exp") < TOLERANCE
    assert asked == [((1, 60), 0, 0), ((1, 1), 60, 60), ((1, 1), 61, 61), ((1, 2), 62, 62)]


def test_a_table_that_names_experts_that_are_not_there():
    table = {"x.tid2eid": mx.array([[9, 0]], mx.uint32)}
    with pytest.raises(ModelFileError, match="names expert 9 of 9"):
        weights._take_table(table, "x.tid2eid", (1, 2), 9)


def test_experts_that_a_table_names_are_read_ahead():
    """The second layer's experts are read while the first layer computes. Each expert that is read is used."""
    model = load_model(tiny_directory("deepseek_v4", "hub"), dtype=mx.float32, expert_io="pread", expert_cache_bytes=1)
    tokens, wanted = (part[:30] for part in goldens.golden("deepseek_v4"))
    lookahead = model.layers[0].mlp.experts.lookahead
    lookahead.prefetch = "lookahead"
    assert np.abs(logits(model, tokens, (1,) * 30) - wanted).max() < TOLERANCE
    named, others = lookahead.predictor.record(1), [lookahead.predictor.record(i) for i in (0, 2, 3)]
    assert named.judged > 5 and not any(record.judged for record in others)
    at_first = LayerGuesses().useful
    assert named.useful == pytest.approx(1 - (1 - at_first) * MEMORY**named.judged)  # no read was unnecessary
    model.experts.close()


@given(st.integers(0, 2**16))
@settings(max_examples=examples(10), deadline=None)
def test_mixtures_are_doubly_stochastic(seed):
    rule = kinds.HyperConnections(4, 400, 1e-9)
    comb = streams.doubly_stochastic(np.random.default_rng(seed).normal(0, 2, (3, 4, 4)), rule)
    assert (comb > 0).all() and np.abs(comb.sum(-1) - 1).max() < 1e-3 and np.abs(comb.sum(-2) - 1).max() < 1e-6


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


@pytest.mark.parametrize(
    "change, message",
    [
        ({"sparse_num_index_heads": 3}, "index_n_heads 3 is not num_key_value_heads 2"),
        ({"sparse_local_block": 2}, "index_local_blocks"),
        ({"sparse_disable_index_value": [0, 1, 0, 1]}, "sparse_disable_index_value"),
        ({"sparse_score_type": "mean"}, "sparse_score_type"),
    ],
)
def test_what_the_indexer_does_not_compute_is_refused(change, message):
    config = goldens.config("minimax_m3_vl")
    config["text_config"]["sparse_attention_config"].update(change)
    with pytest.raises(ConfigError, match=message):
        ModelArgs.from_dict(config)


# ---- mistakes: each must exceed the tolerance


def with_arguments(change):
    """A mistake that calls the right function with other arguments."""
    return lambda right: lambda *given: right(*change(*given))


def with_result(change):
    return lambda right: lambda *given: change(right(*given))


def instead(wrong):
    return lambda right: wrong


def _with_mean(decays):
    return decays * 0 + decays.mean(axis=-1, keepdims=True)


def _nearer(apart):
    class Nearer(kinds.NGrams):
        longest = apart

    return with_arguments(lambda h, key, value, before, w, part: (h, key, value, before, w, Nearer(**vars(part))))


def _by_means(index, seen, rule):
    B, positions, width = index.keys.shape
    count = positions // rule.ratio
    means = index.keys[:, : count * rule.ratio].reshape(B, count, rule.ratio, width).mean(axis=2)
    return index._replace(keys=library_of(means).repeat(means, rule.ratio, axis=1)), seen, rule


def _columns_first(right):
    return lambda comb, rule: right(comb.swapaxes(-1, -2), replace(rule, iterations=2)).swapaxes(-1, -2)


def _not_rotated_back(right):
    return lambda x, rope, position: x if rope.stride == -1 else right(x, rope, position)


WHOLE, LATE, ONE_BY_ONE = (64,), (30, 34), (56,) + (1,) * 8
# family, what is wrong: where it is, the mistake, and the lengths of calls that show it, if not one call
GLM5, QWEN4, V4, M3 = "glm5_next", "qwen4_exp", "deepseek_v4", "minimax_m3_vl"
ALSO_OF_A_TEXT = with_arguments(lambda tokens, part, *rest: (tokens, replace(part, end=1000), *rest))
MISTAKES = {
    (GLM5, "index keys that are not normed"): (scoring.LayerNorm, "__call__", instead(lambda self, x: x)),
    (GLM5, "pools that are plain means"): (
        *(scoring, "pooled"),
        with_arguments(lambda keys, gates, ape, *rest: (keys, gates * 0, ape * 0, *rest)),
    ),
    (GLM5, "gates without the bias of their place"): (
        *(scoring, "pooled"),
        with_arguments(lambda keys, gates, ape, *rest: (keys, gates, ape * 0, *rest)),
    ),
    (GLM5, "positions after the last pool that are left out"): (
        *(chosen_op, "with_tail"),
        with_arguments(lambda chosen, places, *rest: (chosen, places * 0 - 1, *rest)),
    ),
    (GLM5, "a decay for each head"): (delta, "log_decays", with_result(_with_mean)),
    (GLM5, "a decay for each head, token by token"): (delta, "log_decays", with_result(_with_mean), ONE_BY_ONE),
    (GLM5, "decays without their bias"): (
        *(delta, "log_decays"),
        with_arguments(lambda a, rates, bias, rule: (a, rates, bias * 0, rule)),
    ),
    (GLM5, "one stream after the last layer"): (
        *(model_streams, "mean_of"),
        instead(lambda h, count: h[..., : h.shape[-1] // count]),
    ),
    (QWEN4, "index keys that are not normed"): (
        *(attention, "block_keys"),
        with_arguments(lambda rows, norm, *rest: (rows, lambda x: x, *rest)),
    ),
    (QWEN4, "index keys that are normed before they are joined"): (
        *(attention, "block_keys"),
        with_arguments(lambda rows, norm, *rest: (norm(rows), lambda x: x, *rest)),
    ),
    (QWEN4, "blocks rotated by another position"): (
        *(attention, "block_keys"),
        with_arguments(lambda rows, norm, rope, first, ratio: (rows, norm, rope, 0, ratio)),
        LATE,
    ),
    (QWEN4, "inputs of the convolution that lie nearer"): (ngrams, "with_ngrams", _nearer(1)),
    (QWEN4, "inputs of the convolution that lie a little nearer"): (ngrams, "with_ngrams", _nearer(2)),
    (QWEN4, "n-grams beyond the end of a text"): (tables, "row_numbers", ALSO_OF_A_TEXT),
    (QWEN4, "n-grams beyond the end of a text in a later call"): (tables, "row_numbers", ALSO_OF_A_TEXT, (16, 48)),
    (QWEN4, "a convolution that begins anew with a call"): (
        *(ngrams, "with_ngrams"),
        with_arguments(lambda h, key, value, before, *rest: (h, key, value, None, *rest)),
        LATE,
    ),
    (QWEN4, "n-grams that begin anew with a call"): (
        *(tables, "_before"),
        instead(lambda cache, count, part: np.full((count, part.longest - 1), part.end)),
        LATE,
    ),
    (V4, "columns before rows"): (streams, "doubly_stochastic", _columns_first),
    (V4, "a mixture that is transposed"): (
        *(streams, "doubly_stochastic"),
        with_result(lambda comb: comb.swapaxes(-1, -2)),
    ),
    (V4, "results that are not rotated back"): (compressed, "turned", _not_rotated_back),
    (V4, "entries rotated by their last position"): (
        *(compressed, "turned"),
        with_arguments(lambda x, rope, position: (x, rope, position + 1 if rope.stride > 1 else position)),
    ),
    (V4, "gates without their biases"): (
        *(compressed, "pooled"),
        with_arguments(lambda v, g, bias, *rest: (v, g, bias * 0, *rest)),
    ),
    (V4, "sinks that are left out"): (
        *(compressed, "attend_compressed"),
        with_arguments(lambda q, seen, sinks, m: (q, seen, sinks - 1e9, m)),
    ),
    (V4, "experts that are chosen where a table names them"): (
        *(moe, "route_by_table"),
        instead(lambda logits, rule, table, tokens: moe.route(logits, replace(rule, table=None))),
    ),
    (M3, "blocks by the mean of their keys"): (blocks, "choose_by_head", with_arguments(_by_means)),
}


@pytest.mark.usefixtures("cpu_device")
@pytest.mark.parametrize("family, what", MISTAKES)
def test_mistakes(monkeypatch, family, what):
    owner, name, mistake, *lengths = MISTAKES[family, what]
    assert broken(monkeypatch, owner, name, mistake(getattr(owner, name)), *lengths, family=family)


def test_entries_without_the_positions_before_their_own(monkeypatch):
    right = compressed.pooled

    def wrong(values, gates, bias, overlaps, is_first):
        if overlaps and not is_first:
            values, gates = values[:, 1:], gates[:, 1:]
        return right(values, gates, bias, overlaps, True)

    assert broken(monkeypatch, compressed, "pooled", wrong, (10, 54), family=V4)
    assert error(model_of(V4), family=V4) < TOLERANCE


CHOICES = {
    "one choice for all heads": lambda chosen: library_of(chosen).repeat(chosen[:, :, :1], chosen.shape[2], axis=2),
    "the first blocks instead of the best": lambda chosen: chosen * 0 + library_of(chosen).arange(2),
}


@pytest.mark.usefixtures("cpu_device")  # on a GPU a kernel chooses
@pytest.mark.parametrize("what", CHOICES)
def test_other_choices_of_minimax_m3(monkeypatch, what):
    """In one call and one token at a time."""
    wrong = with_result(CHOICES[what])(blocks.choose_by_head)
    assert all(broken(monkeypatch, blocks, "choose_by_head", wrong, calls, family=M3) for calls in (WHOLE, (1,) * 64))


def with_budget(attention, more):
    """Lets a layer's attention choose more blocks or pools."""
    owner = attention if hasattr(attention, "blocks") else attention.mixer
    changed = replace(owner.blocks, indexer=replace(owner.blocks.indexer, top=owner.blocks.indexer.top + more))
    if owner is attention:
        attention.blocks = changed
    else:
        attention.mixer = replace(owner, blocks=changed)


BUDGETS = [(GLM5, (26,)), (GLM5, (14,) + (1,) * 12), (QWEN4, (64,)), (QWEN4, (1,) * 64)]


@pytest.mark.parametrize("family, lengths", BUDGETS)
@pytest.mark.parametrize("more", [-1, 1])
def test_a_budget_of_another_block(family, lengths, more):
    model, (tokens, wanted) = own_model(family), goldens.golden(family)
    for layer in (model.layers[2], model.layers[4]):
        with_budget(layer.self_attn, more)
    differs = np.abs(logits(model, tokens, lengths) - wanted[: sum(lengths)]).max(axis=1) > 10 * TOLERANCE
    assert np.flatnonzero(differs)[0] in ((15, 16, 17, 18, 19) if more < 0 else (19, 20, 21, 22, 23))


def _all_turned(layer):
    own, turned = layer.self_attn.indexer, replace(layer.self_attn.mixer.rotation, dims=32)
    own.rope, own.block_rope = attention.Rope(turned), attention.Rope(turned, 4)


def _by_silu(name):
    return lambda layer: setattr(layer[name], "mixer", replace(layer[name].mixer, gate="silu"))


CHANGED = {  # what is wrong with these layers
    "a budget of another block": (M3, (1, 2, 3), lambda layer: with_budget(layer.self_attn, -1)),
    "index heads that are rotated whole": (QWEN4, (2, 4), _all_turned),
    "results of the delta rule gated by silu": (QWEN4, (0, 1, 3), _by_silu("linear_attn")),
    "results of a decay by channel gated by silu": (GLM5, (0, 1, 3), _by_silu("self_attn")),
}


@pytest.mark.parametrize("what", CHANGED)
def test_layers_that_are_changed(what):
    family, layers, change = CHANGED[what]
    model = own_model(family)
    for number in layers:
        change(model.layers[number])
    assert error(model, family=family) > 10 * TOLERANCE


def test_hashes_of_another_layer():
    model = own_model(QWEN4)
    parts = dict(model.tables.parts)
    parts[3] = replace(parts[3], multipliers=parts[1].multipliers)
    model.tables.parts = parts
    assert error(model, family=QWEN4) > 10 * TOLERANCE

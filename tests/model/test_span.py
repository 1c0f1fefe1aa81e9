"""Prompts in spans and blocks: Hugging Face's logits for all sizes, and the same bits for every source of experts.

A span that was stopped anywhere continues as if it had not been.
"""

from itertools import product

import goldens
import mlx.core as mx
import numpy as np
import pytest
from driving import absorbed
from grids import drawn
from tiny_models import tiny_directory, use_plain_operations

from moeflux_mlx.driving.prefill import Prefill, span_lengths
from moeflux_mlx.errors import RequestError
from moeflux_mlx.mixers.grouped import op as attend
from moeflux_mlx.mixers.latent import op as latent
from moeflux_mlx.model import decoder
from moeflux_mlx.model.span import Span
from moeflux_mlx.opening.engine import load_model
from moeflux_mlx.ops import backend, causal_parts, grouped

TOLERANCE = 2e-4  # maximal absolute error of logits with standard deviation 1, float32
FAMILIES = goldens.families()
SIZES = [(64, 64), (64, 7), (64, 1), (20, 20), (20, 8), (9, 64), (8, 3), (1, 1)]  # sizes of span and block
POOL = 10 * 16384


def prompt(family):
    tokens, logits = goldens.golden(family, "hub")
    return mx.array(tokens, mx.uint32), logits


def model_of(family, **options):
    return load_model(tiny_directory(family), dtype=mx.float32, **options)


@pytest.fixture
def computing(request, monkeypatch, dense_from_rows):
    """Computes with native kernels on the CPU, and with MLX's operations, where experts are dequantised in pieces."""
    if request.param == "operations":
        use_plain_operations(monkeypatch)
        dense_from_rows(4)
        monkeypatch.setattr(grouped, "PIECE_ROWS", 48)
    return request.param


WAYS = ["native", "operations"]


@pytest.mark.parametrize("family, sizes, computing", drawn(FAMILIES, SIZES, WAYS), indirect=["computing"])
def test_every_span_and_block_matches_hugging_face(family, sizes, computing):
    span, block = sizes
    tokens, want = prompt(family)
    model = model_of(family, set={"span": span}, prefill_step_size=block)
    cache = model.make_cache()
    parts = [model(tokens[None, start : start + span], cache)[0] for start in range(0, len(tokens), span)]
    assert np.abs(np.array(mx.concatenate(parts)) - want).max() < TOLERANCE
    last = absorbed(Prefill(model, model.make_cache(), tokens))
    assert np.abs(np.array(last[0]) - want[-1]).max() < TOLERANCE


@pytest.mark.usefixtures("plain_operations")
@pytest.mark.parametrize("family", FAMILIES)
def test_attention_cut_by_its_scores_matches_hugging_face(family, monkeypatch):
    tokens, want = prompt(family)
    model = model_of(family)
    for scores in (1, 300, 2000):
        monkeypatch.setattr(causal_parts, "SCORES", scores)
        assert np.abs(np.array(model(tokens[None])[0]) - want).max() < TOLERANCE
    for mixer in (attend, latent):
        monkeypatch.setattr(mixer, "in_parts", lambda heads, rows, n, mask, *_: [(slice(0, rows), slice(0, n), None)])
    assert np.abs(np.array(model(tokens[None])[0]) - want).max() > TOLERANCE, "tokens that see later ones go unseen"


class Queue:
    """Stands for `backend.start` and `backend.finish`, and notes what has been begun and not been waited for."""

    def __init__(self, monkeypatch):
        self._begun, self._done = [], 0
        for one in (self.start, self.finish):
            monkeypatch.setattr(backend, one.__name__, one)

    def start(self, *arrays):
        self._begun.append(arrays)

    def finish(self, x):
        numbers = [i for i, arrays in enumerate(self._begun, 1) if any(one is x for one in arrays)]
        self._done = max([self._done, *numbers])

    def __len__(self):
        return len(self._begun) - self._done


@pytest.mark.usefixtures("plain_operations")
def test_what_is_under_way_before_a_block_and_before_the_experts(monkeypatch):
    """One block before the next, so no layer and two blocks of the next one; nothing before the experts of several
    blocks, which are as large. A prompt of one block is not waited for."""
    model, under_way = model_of("qwen3_moe"), Queue(monkeypatch)
    counts = {"prepare": [], "finish_span": []}
    for part, (name, seen) in product((layer.mlp for layer in model.layers), counts.items()):
        right = getattr(part, name)
        setattr(part, name, lambda *given, right=right, seen=seen: seen.append(len(under_way)) or right(*given))
    tokens, layers = prompt("qwen3_moe")[0][:24], len(model.layers)
    absorbed(Prefill(model, model.make_cache(), tokens, block=8))
    assert [counts["prepare"][block::3] for block in (1, 2)] == [[1] * layers] * 2
    assert counts["finish_span"] == [0] * layers
    absorbed(Prefill(model, model.make_cache(), tokens))
    assert min(counts["finish_span"][layers + 1 :]) > 1, "the layer before and the block"


MODES = {
    "mapped": {"expert_io": "mmap"},
    "a small pool": {"expert_io": "pread", "expert_cache_bytes": POOL},
    "nothing read ahead": {"expert_io": "pread", "expert_cache_bytes": POOL, "prefetch": "off"},
    "everything in the pool": {"expert_io": "pread"},
}


def bits(logits, cache):
    """Returns the numbers of a result and of the caches' contents, without unused capacity."""
    held = [a[..., : layer.offset, :] if layer.is_trimmable() else a for layer in cache for a in layer.state[:2]]
    return [np.array(logits), *map(np.array, held)]


def same(one, other):
    return all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


BITS_OF = drawn(FAMILIES, [(64, 64), (64, 7), (20, 8)], WAYS, seed=1)


@pytest.mark.parametrize("family, sizes, computing", BITS_OF, indirect=["computing"])
def test_same_bits_wherever_experts_are(family, sizes, computing):
    span, block = sizes
    tokens, _ = prompt(family)
    results = []
    for options in MODES.values():
        model = model_of(family, set={"span": span}, prefill_step_size=block, **options)
        cache = model.make_cache()
        results.append(bits(absorbed(Prefill(model, cache, tokens)), cache))
        model.experts.close()
    assert all(same(results[0], other) for other in results[1:])


class Stop(Exception):
    pass


def stopping(at):
    """Returns a progress callback that raises an exception at its `at`-th call."""
    calls = []

    def progress(done, total):
        calls.append(done)
        if len(calls) == at:
            raise Stop

    return progress


@pytest.mark.parametrize("options", [MODES["mapped"], MODES["a small pool"]], ids=["mapped", "pool"])
@pytest.mark.parametrize("family", ["qwen3_next", "deepseek_v3"])
def test_a_span_stopped_anywhere_goes_on_with_the_same_bits(family, options):
    tokens, _ = prompt(family)
    model = model_of(family, set={"span": 25}, prefill_step_size=8, **options)
    reports, cache = [], model.make_cache()
    whole = Prefill(model, cache, tokens, keep=[3, 20, 30])
    wanted, kept = bits(absorbed(whole, lambda done, total: reports.append(done)), cache), whole.kept
    assert reports == sorted(reports) and reports[0] == 0 and max(reports) < len(tokens)
    for at in range(1, len(reports) + 1, 7):
        cache = model.make_cache()
        prefill = Prefill(model, cache, tokens, keep=[3, 20, 30])
        with pytest.raises(Stop):
            absorbed(prefill, stopping(at))
        model(mx.array([[1] * 12]))  # another text is computed in between
        logits = absorbed(prefill)
        assert same(bits(logits, cache), wanted), f"stopped at report {at} of {len(reports)}"
        assert prefill.kept.keys() == kept.keys()
    model.experts.close()


@pytest.mark.parametrize("family", ["qwen3_next", "deepseek_v3"])
def test_a_span_that_is_dropped_leaves_the_caches_where_it_began(family):
    tokens, _ = prompt(family)
    model = model_of(family, set={"span": 15}, prefill_step_size=4)
    reports = []
    absorbed(Prefill(model, model.make_cache(), tokens[10:]), lambda done, total: reports.append(done))
    for at in range(1, len(reports) + 1, 4):
        cache = model.make_cache()
        model(tokens[None, :10], cache)
        prefill = Prefill(model, cache, tokens[10:])
        with pytest.raises(Stop):
            absorbed(prefill, stopping(at))
        prefill.drop()
        begun = model.make_cache()
        model(tokens[None, :10], begun)
        if prefill.done:
            absorbed(Prefill(model, begun, tokens[10 : 10 + prefill.done], span=prefill.done))
        assert {layer.offset for layer in cache} == {10 + prefill.done}
        assert same(bits(mx.zeros(1), cache), bits(mx.zeros(1), begun))


def test_pieces_may_be_longer(monkeypatch):
    tokens, _ = prompt("qwen3_next")
    model = model_of("qwen3_next", set={"span": 25}, prefill_step_size=8)
    told, results = [], []
    for seconds in (0.0, 1e9):
        monkeypatch.setattr(decoder, "PIECE_SECONDS", seconds)
        cache, reports = model.make_cache(), []
        logits = absorbed(Prefill(model, cache, tokens), lambda done, total, reports=reports: reports.append(done))
        results.append(bits(logits, cache))
        told.append(len(reports))
    assert same(*results) and told[1] == 1 < told[0]


def test_an_interruption_between_two_layers_is_undone(monkeypatch):
    """The interruption comes after a layer is done and before that is noted. The layer must not see the span twice."""
    tokens, _ = prompt("qwen3_next")
    model = model_of("qwen3_next")
    cache = model.make_cache()
    wanted = bits(absorbed(Prefill(model, cache, tokens)), cache)
    cache = model.make_cache()
    prefill, start = Prefill(model, cache, tokens), backend.start
    layer, calls = type(model.layers[0]), []
    pass_span = layer.pass_span
    monkeypatch.setattr(layer, "pass_span", lambda self, *rest: calls.append(self) or pass_span(self, *rest))

    def interrupted(*arrays):
        start(*arrays)
        if len(calls) == 2 and len(arrays) == 1:
            monkeypatch.setattr(backend, "start", start)
            monkeypatch.setattr(Span, "undo", lambda self, first, caches: None)
            raise Stop

    monkeypatch.setattr(backend, "start", interrupted)
    with pytest.raises(Stop):
        absorbed(prefill)
    monkeypatch.undo()
    logits = absorbed(prefill)
    assert same(bits(logits, cache), wanted)
    assert absorbed(prefill) is logits  # nothing is left to do


def test_a_call_that_fails_leaves_the_caches_as_they_were():
    tokens, _ = prompt("qwen3_next")
    model = model_of("qwen3_next")
    cache = model.make_cache()
    model(tokens[None, :20], cache)
    before, experts = bits(mx.zeros(1), cache), model.layers[2].mlp.experts
    model.layers[2].mlp.experts = None
    with pytest.raises(AssertionError):
        model(tokens[None, 20:], cache)
    model.layers[2].mlp.experts = experts
    assert same(bits(mx.zeros(1), cache), before)


@pytest.mark.parametrize("family", ["qwen3_next", "inkling"])
def test_states_on_the_way_are_those_of_a_shorter_text(family):
    """Inkling's layers have a state behind their experts too."""
    tokens, _ = prompt(family)
    model = model_of(family, set={"span": 64}, prefill_step_size=8)
    keep = [1, 8, 13, 39, 40]
    prefill = Prefill(model, model.make_cache(), tokens[:40], keep=keep)
    absorbed(prefill)
    assert sorted(prefill.kept) == keep
    for n in keep:
        cache = model.make_cache()
        absorbed(Prefill(model, cache, tokens[:n]))
        recurrent = {i: layer.state[:-1] for i, layer in enumerate(cache) if not layer.is_trimmable()}
        assert recurrent.keys() == prefill.kept[n].keys()
        for i, pair in recurrent.items():
            for want, got in zip(pair, prefill.kept[n][i], strict=True):
                np.testing.assert_allclose(np.array(got), np.array(want), atol=5e-5 if backend.has_kernels() else 1e-5)


def test_a_failed_read_leaves_a_span_that_goes_on():
    tokens, _ = prompt("qwen3_next")
    model = model_of("qwen3_next", **MODES["a small pool"])
    cache = model.make_cache()
    wanted = bits(absorbed(Prefill(model, cache, tokens)), cache)
    cache = model.make_cache()
    prefill, request = Prefill(model, cache, tokens), model.experts.request

    def failing(layer, ids):
        if layer == model.args.moe_layers[2]:
            raise OSError("unplugged")
        return request(layer, ids)

    model.experts.request = failing
    with pytest.raises(OSError, match="unplugged"):
        absorbed(prefill)
    assert prefill.half is not None and prefill.half.layer == model.args.moe_layers[2]
    model.experts.request = request
    assert same(bits(absorbed(prefill), cache), wanted)
    model.experts.close()


def test_spans_are_equal():
    assert span_lengths(1, 8) == [1] and span_lengths(8, 8) == [8]
    assert span_lengths(17, 8) == [6, 6, 5] and span_lengths(9, 8) == [5, 4]


def test_blocks_end_where_a_state_must_be_kept():
    cache = model_of("qwen3_next").make_cache()
    span = Span(mx.zeros((1, 20), mx.uint32), 0, 8, [3, 16, 18])
    recurrent, attention = cache[0], cache[-1]
    assert not recurrent.is_trimmable() and attention.is_trimmable()
    assert list(span.blocks([recurrent])) == [(0, 3), (3, 8), (8, 16), (16, 18), (18, 20)]
    assert list(span.blocks([attention])) == [(0, 8), (8, 16), (16, 20)]


@pytest.mark.parametrize("name, options", [("span", {"span": 0}), ("prefill_step_size", {"block": -1})])
def test_sizes_are_positive(name, options):
    model = model_of("qwen3_moe")
    with pytest.raises(RequestError, match=f"{name} is"):
        Prefill(model, model.make_cache(), mx.array([1], mx.uint32), **options)

"""Short prompts whose layers a second thread builds: the bits of one thread, also after errors and when they are left.

Kernels of CUDA are replaced by sums of their inputs, so every value depends on all that a layer was given.
"""

import gc
import json
import re
import signal
import threading
import time
import weakref
from collections import Counter
from contextlib import closing, nullcontext, suppress
from itertools import count
from random import Random
from typing import ClassVar

import mlx.core as mx
import numpy as np
import pytest
from tiny_models import tiny_directory

from moeflux_mlx.errors import ExpertIOError
from moeflux_mlx.experts.routed import RoutedExperts
from moeflux_mlx.experts.routing import finished
from moeflux_mlx.experts.source import IoMode
from moeflux_mlx.experts.whole import WholeExperts
from moeflux_mlx.kinds import Rotation
from moeflux_mlx.mixers.grouped.spec import GroupedQuery
from moeflux_mlx.mixers.latent.spec import Latent
from moeflux_mlx.mixers.registry import by_layer, cache_numbers
from moeflux_mlx.model.ahead import LayersAhead
from moeflux_mlx.model.decoder import Model
from moeflux_mlx.model.span import Span
from moeflux_mlx.opening.random_weights import Shapes, random_records, randomise
from moeflux_mlx.ops.stand_ins import standing_in
from moeflux_mlx.spec import ModelArgs

pytestmark = pytest.mark.usefixtures("cpu_device")


def build(kernel, *_):
    """Each output has one value, which depends on some values of each input."""

    def call(*, inputs, output_shapes, output_dtypes, **_):
        some = [array.reshape(-1)[:: -(-array.size // 64)].astype(mx.float32) for array in inputs]
        total, made = sum(mx.sin(values).mean() for values in some), []
        for i, (shape, dtype) in enumerate(zip(output_shapes, output_dtypes, strict=True)):
            value = mx.abs(mx.sin(total * (i + 1)))
            made.append(mx.broadcast_to(value, shape).astype(dtype))
        return made

    return call


def linked(kernel, *_):
    """As `build`; each launch is one operation of the graph."""

    def call(*, inputs, output_shapes, output_dtypes, **_):
        made = [mx.array(np.zeros(shape), dtype) for shape, dtype in zip(output_shapes, output_dtypes, strict=True)]
        return mx.depends(made, inputs)

    return call


class Stop(Exception):
    pass


class Source(WholeExperts):
    """Holds experts; in the second thread, raises when those of a layer are asked for, or is closed meanwhile."""

    mode = IoMode.RESIDENT
    at: int | None = None
    closes = False

    def whole(self, layer):
        if layer == self.at and threading.current_thread() is not threading.main_thread():
            if not self.closes:
                raise Stop
            self.close()
        return super().whole(layer)


def opened(family):
    """A model with random weights. Its experts are in memory."""
    args = ModelArgs.from_dict(json.loads((tiny_directory(family) / "config.json").read_text()))
    shapes = Shapes.of_args(args, mx.bfloat16)
    source = Source(shapes.layout, "")
    for layer, record in shapes.layout.records.items():
        source.add(layer, random_records(record, shapes.layout.count(layer)).blob)
    model = Model(args, RoutedExperts(source))
    randomise(model, "", shapes)
    mx.eval(model.parameters(), [records.memory for records in source.layers.values()])
    return model


def tokens_of(model, start, count):
    return mx.array([[(7 * i * i + i) % model.args.vocab_size for i in range(start, start + count)]])


def span_of(model, start, count, kind=Span):
    return kind(tokens_of(model, start, count), start, model.sizes.block)


def advance(model, span, cache, pieces=None):
    """The logits of the span, or None if it is left after so many pieces."""
    with closing(model.advance(span, cache)) as steps:
        try:
            for _ in count() if pieces is None else range(pieces):
                next(steps)
        except StopIteration as end:
            return end.value
    return None


def in_one_thread(model, span, cache):
    """The same, in the plainest way."""
    h = model.embedded(span.tokens)
    numbers = cache_numbers(model.args.visited)
    for layer, own, first in zip(model.visits, by_layer(numbers, cache), numbers, strict=True):
        span.begin(first.start, own)
        h = finished(layer.pass_span(h, own, span))
    return model.last_product(model.model.normed(h[:, -1:]))[:, 0]


def bits(logits, cache):
    """The logits, and what the caches hold without unused capacity, as bytes."""
    held = [a[..., : one.offset, :] if one.is_trimmable() else a for one in cache for a in one.state[:-1]]
    return [bytes(memoryview(array.astype(mx.float32))) for array in (logits, *held)]


def threads():
    return [thread.name for thread in threading.enumerate() if "moeflux-layers" in thread.name]


@pytest.fixture(autouse=True)
def cuda():
    with standing_in(backend="cuda", build=build):
        yield
    assert not threads()


# With recurrent states; with windows; with layers that use what an indexer of an earlier one chose.
FAMILIES = ["qwen3_5_moe", "gpt_oss", "glm_moe_dsa"]


@pytest.mark.parametrize("family", FAMILIES)
def test_two_threads_compute_the_bits_of_one(family):
    model, random, start = opened(family), Random(family), 0
    cache, other = model.make_cache(), model.make_cache()
    for length in (random.randint(17, 90) for _ in range(3)):
        made = bits(advance(model, span_of(model, start, length), cache), cache)
        assert made == bits(in_one_thread(model, span_of(model, start, length), other), other)
        start += length
    assert len(set(made)) > 6


@pytest.mark.parametrize("layer", [0, 3], ids=["delta rule", "attention"])
def test_operations_between_the_launches_of_a_layer(layer, tmp_path):
    """On CUDA the host takes longer for a short prompt's graph than the GPU: no array is made anew that all layers may
    share, and no launch gets what another one has made in another shape."""
    model = opened("qwen3_5_moe")
    caches = by_layer(cache_numbers(model.args.visited), model.make_cache())[layer]
    span, h = span_of(model, 0, 20), mx.zeros((1, 20, model.args.hidden_size), mx.bfloat16)
    mx.eval(h)
    with standing_in(build=linked):
        out = finished(model.visits[layer].pass_span(h, caches, span))
    mx.export_to_dot(str(tmp_path / "graph.dot"), out, *(array for cache in caches for array in cache.state[:-1]))
    text = (tmp_path / "graph.dot").read_text()
    names = dict(re.findall(r'(\d+) \[label ?= ?"(\w+)"', text))
    made = {array: names[number] for number, array in re.findall(r'(\d+) -> "(\w+)"', text)}
    taken = [(made.get(array), number) for array, number in re.findall(r'"(\w+)" -> (\d+)', text)]
    counts = Counter(names.values())
    assert not {"Contiguous", "Sigmoid"} & counts.keys() and counts["Full"] == (2 if layer else 0)
    views = {number for before, number in taken if before == "Depends" and names[number] in ("Reshape", "ExpandDims")}
    assert len(views) == 1, "of the output"
    joined = [name for name in counts if name.startswith("Compiled")]
    assert len(joined) == (2 if layer else 1) and counts["Depends"] == (8 if layer else 10)


def test_states_are_kept_within_a_span():
    """Of layers that cannot be cut, behind some of its tokens."""
    model, kept = opened(FAMILIES[0]), []
    for compute in (advance, in_one_thread):
        span = Span(tokens_of(model, 0, 60), 0, model.sizes.block, [20, 41, 60])
        compute(model, span, model.make_cache())
        states = [(end, i, pair) for end, of_end in span.kept.items() for i, pair in of_end.items()]
        kept.append([(end, i, *(bytes(memoryview(a.astype(mx.float32))) for a in pair)) for end, i, pair in states])
    assert kept[0] == kept[1] and {end for end, *_ in kept[0]} == {20, 41, 60}


def test_which_spans_two_threads_compute():
    """Those of CUDA, with one block, no images, and experts in memory."""
    model, seen = opened("qwen3_moe"), set()
    source = model.experts
    source.whole = lambda layer: seen.add(threading.current_thread() is threading.main_thread()) or source.layers[layer]

    def alone(length, block=4096):
        seen.clear()
        advance(model, Span(tokens_of(model, 0, length), 0, block), model.make_cache())
        return seen == {True}

    advance(model, span_of(model, 0, 20), model.make_cache())  # asks whether the layers are lazy
    assert [alone(length) for length in (16, 17, 512, 513)] == [True, False, False, True]
    assert alone(40, block=39) and not alone(40, block=40)
    with standing_in(backend="metal"):
        assert alone(40)


LATENT = Latent(64, None, 512, 128, 128, Rotation(64, 1e4))  # of 13,107 positions a few heads are expanded at a time


@pytest.mark.parametrize(
    ("mixer", "last"),
    [
        (LATENT, 13_043),
        (GroupedQuery(32, 4, 128, Rotation(64, 1e4)), 1 << 20),
        (GroupedQuery(32, 4, 80, None), 130_687),
    ],
    ids=["latents", "without scores", "with scores"],
)
def test_two_threads_compute_a_span_if_memory_suffices_for_a_whole_layer(mixer, last):
    """Of all texts together."""
    model = opened("qwen3_moe")
    layers, tokens, several = LayersAhead(model.visits, (), [mixer]), tokens_of(model, 0, 64), last == 1 << 20
    spans = [Span(tokens, last, 4096), Span(tokens, last + 100, 4096), Span(mx.tile(tokens, (2, 1)), last, 4096)]
    assert [layers.takes(span, mx.bfloat16) for span in spans] == [True, several, several]
    halves = [Span(mx.tile(tokens, (2, 1)), (last + 64) // 2 - 64 + more, 4096) for more in (-200, 100)]
    assert [layers.takes(span, mx.bfloat16) for span in halves] == [True, several]


class Stopping(Span):
    """Raises in the first thread, while the second one builds: when a number of layers has been passed."""

    at: ClassVar[int | None] = None

    def __setattr__(self, name, value):
        if name == "reached" and value[0] == Stopping.at:
            raise Stop
        super().__setattr__(name, value)


class Beginning(Span):
    """Raises in the first thread when the states of a layer's caches are kept."""

    at: ClassVar[int | None] = None

    def begin(self, first, caches):
        super().begin(first, caches)
        if first == Beginning.at:
            raise Stop


@pytest.mark.parametrize("family", [FAMILIES[0], FAMILIES[-1]])
@pytest.mark.parametrize("kind", [Span, Stopping, Beginning])
def test_an_error_in_either_thread_leaves_a_span_between_two_layers(family, kind):
    model, expected = opened(family), []
    numbers, stops = cache_numbers(model.args.visited), model.experts if kind is Span else kind
    cache = model.make_cache()
    for start in (0, 20):
        expected.append(bits(advance(model, span_of(model, start, 20), cache), cache))
    for layer in range(1, len(numbers)):
        stops.at, cache = None, model.make_cache()
        advance(model, span_of(model, 0, 20), cache)
        for may_go_on in (False, True):
            span = span_of(model, 20, 20, kind)
            stops.at = numbers[layer].start if kind is Beginning else layer
            with pytest.raises(Stop):
                advance(model, span, cache)
            stops.at, done = None, numbers[span.layer].start
            assert not threads() and layer - 2 < span.layer <= layer
            assert [one.offset for one in cache] == [40] * done + [20] * (len(cache) - done)
            if may_go_on:
                assert bits(advance(model, span, cache), cache) == expected[1]
            else:
                span.drop(cache)
                assert bits(mx.zeros(1), cache)[1:] == expected[0][1:]


def test_an_error_of_the_second_thread_keeps_no_arrays_until_a_collection():
    model = opened("qwen3_moe")
    span, model.experts.at = span_of(model, 0, 20), 1
    left = weakref.ref(span)
    gc.disable()
    try:
        with suppress(Stop):
            advance(model, span, model.make_cache())
        assert span.layer < len(model.visits)
        del span
        assert left() is None
    finally:
        gc.enable()


def test_a_second_interrupt_waits_for_the_second_thread():
    """Otherwise the layer that it builds would have the tokens twice."""
    model, made = opened("qwen3_moe"), []
    cache, other = model.make_cache(), model.make_cache()
    wanted = bits(advance(model, span_of(model, 0, 20), other), other)
    span, mix = span_of(model, 0, 20), model.visits[1].mix_span

    def interrupting(*given):
        for _ in range(0 if made else 2):
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
            time.sleep(0.1)
        made.append(0)
        return mix(*given)

    model.visits[1].mix_span = interrupting
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a test in the background has none
    try:
        with pytest.raises(KeyboardInterrupt):
            advance(model, span, cache)
    finally:
        signal.signal(signal.SIGINT, before)
    assert made and bits(advance(model, span, cache), cache) == wanted


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize(
    "name, raised",
    [("set_default_stream", pytest.raises(Stop)), ("clear_streams", nullcontext())],
    ids=["begin", "end"],
)
def test_a_second_thread_that_cannot_begin_or_end_is_not_waited_for(name, raised, monkeypatch):
    model, right = opened("qwen3_moe"), getattr(mx, name)
    cache, other = model.make_cache(), model.make_cache()
    wanted = bits(advance(model, span_of(model, 0, 20), other), other)
    span = span_of(model, 0, 20)

    def failing(*given):
        if threading.current_thread() is not threading.main_thread():
            raise Stop
        right(*given)

    def late(*_):
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(20)
    try:
        with monkeypatch.context() as patches, raised:
            patches.setattr(mx, name, failing)
            advance(model, span, cache)
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    assert bits(advance(model, span, cache), cache) == wanted


class Passed(Span):
    """Raises when all layers have been passed, before the logits are computed."""

    at: ClassVar[int | None] = None

    def __setattr__(self, name, value):
        super().__setattr__(name, value)
        if name == "reached" and value[0] == Passed.at:
            raise Stop


def test_an_error_behind_the_last_layer():
    model = opened("qwen3_moe")
    cache, other = model.make_cache(), model.make_cache()
    wanted = bits(advance(model, span_of(model, 0, 20), other), other)
    span, Passed.at = span_of(model, 0, 20, Passed), len(model.visits)
    with pytest.raises(Stop):
        advance(model, span, cache)
    assert span.layer == len(model.visits) and bits(advance(model, span, cache), cache) == wanted


def test_experts_that_are_closed_meanwhile():
    model = opened("qwen3_moe")
    cache = model.make_cache()
    advance(model, span_of(model, 0, 20), cache)
    model.experts.at, model.experts.closes = 1, True
    with pytest.raises(ExpertIOError, match="closed"):
        advance(model, span_of(model, 20, 20), cache)
    assert not threads() and all(one.offset in (20, 40) for one in cache)


@pytest.mark.parametrize("family", [FAMILIES[0], FAMILIES[-1]])
def test_a_prompt_may_be_left_between_two_layers(family):
    model, left = opened(family), 0
    expected = model.make_cache()
    wanted = bits(advance(model, span_of(model, 0, 60), expected), expected)
    for pieces in (1, 2, 3):
        cache, span = model.make_cache(), span_of(model, 0, 60)
        logits = advance(model, span, cache, pieces)
        assert not threads()
        left += logits is None
        model(mx.array([[1, 2, 3]]), model.make_cache())  # another text
        logits = advance(model, span, cache) if logits is None else logits
        assert bits(logits, cache) == wanted
    assert left

"""Layers that are queued ahead give the same bits as layers that wait for each choice, and count the same uses."""

import os

import goldens
import mlx.core as mx
import numpy as np
import pytest
from tiny_models import tiny_directory, use_plain_operations

from moeflux_mlx.errors import ExpertIOError
from moeflux_mlx.experts.reader import ExpertReader
from moeflux_mlx.experts.routed import RoutedExperts
from moeflux_mlx.experts.streamed import StreamedExperts
from moeflux_mlx.formats.packed import PackedExperts
from moeflux_mlx.mixers.registry import stored_forms
from moeflux_mlx.model import optimistic
from moeflux_mlx.model.decoder import Model
from moeflux_mlx.model.optimistic import OptimisticLayers
from moeflux_mlx.model.step import SequenceRows
from moeflux_mlx.model.weights import fill, read_resident
from moeflux_mlx.spec import ModelArgs

EXPERTS, TOP_K, TOKENS = 16, 4, 14


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch):
    use_plain_operations(monkeypatch)
    monkeypatch.setattr(optimistic, "LEAST_SHARE", 0.0)
    monkeypatch.setattr(optimistic, "TOGETHER", 2)


def opened(family, records=None, ahead=True, preadv=os.preadv, **options):
    """A model whose pool has room for `records` records (None: all), compiled as for a GPU."""
    path = tiny_directory(family)
    args, tensors = ModelArgs.from_file(path), read_resident(path)
    packed = PackedExperts.open(path, args)
    nbytes = 1 << 30 if records is None else records * packed.layout.held_bytes
    reader = ExpertReader(packed, preadv=preadv)
    source = StreamedExperts(packed, reader=reader, cache_bytes=nbytes, copied=True, **options)
    experts = RoutedExperts(source, "off")
    model = Model(args, experts, stored_forms(tensors))
    fill(model, tensors, args.quantization, mx.float32)
    for layer in model.layers:
        layer.compile(source)
    if ahead:
        model.optimistic = OptimisticLayers(model.layers, model._cache_numbers, source)
    return model


def tokens_of(family, count=TOKENS):
    return goldens.golden(family, "hub")[0][:count].tolist()


def run(model, tokens):
    cache = model.make_cache()
    return np.array(mx.concatenate([model(mx.array([[token]]), cache) for token in tokens], axis=1)[0])


@pytest.mark.parametrize("records", [None, 40, 6])
@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_5_moe", "deepseek_v3"])
def test_same_bits_and_counts_as_with_a_wait_for_each_choice(family, records):
    made = []
    for ahead in (False, True):
        model = opened(family, records, ahead, least_slots=TOP_K)
        tokens = tokens_of(family)
        logits = [run(model, tokens), run(model, tokens[::-1])]
        order = [list(pool.ranking.lowest(99, lambda key: True)) for pool in model.experts.pools]
        made.append((logits, order, model.experts.stats.hits, model.experts.stats.misses))
        model.experts.close()
    assert all(map(np.array_equal, made[0][0], made[1][0]))
    assert made[0][1:] == made[1][1:]
    assert made[0][2] and made[0][3]


def test_few_records_read_ahead_are_queued_in_groups(monkeypatch):
    model = opened("qwen3_moe")
    run(model, tokens_of("qwen3_moe"))
    begun, at_once = [], []
    queue, wait = OptimisticLayers._queue, OptimisticLayers._at_once
    monkeypatch.setattr(OptimisticLayers, "_queue", lambda *given: begun.append(queue(*given)) or begun[-1])
    monkeypatch.setattr(OptimisticLayers, "_at_once", lambda *given: at_once.append(1) or wait(*given))
    cache = model.make_cache()
    model(mx.array([[1]]), cache)
    assert len(at_once) == len(model.layers)  # a cache without a token has no graph
    begun.clear()
    model(mx.array([[2]]), cache)
    model.experts.close()
    sizes = [len(group.tables) for group in begun if group is not None]
    assert sum(sizes) >= len(model.layers) and len(at_once) == len(model.layers)


def test_a_record_that_goes_while_its_layer_is_queued_is_read_again(monkeypatch):
    tokens = tokens_of("qwen3_moe")
    model = opened("qwen3_moe", ahead=False)
    want = run(model, tokens)
    model.experts.close()
    model = opened("qwen3_moe")
    run(model, tokens)
    accept, gone = OptimisticLayers._accept, []

    def accept_later(self, group):
        if len(gone) < 5:
            pool = model.experts.pools.of[group.first]
            gone.extend(key for key in pool.records() if key[0] == group.first)
            for key in gone:
                if key in pool:
                    pool.drop(key)
        return accept(self, group)

    monkeypatch.setattr(OptimisticLayers, "_accept", accept_later)
    misses = model.experts.stats.misses
    assert np.array_equal(run(model, tokens), want)
    assert gone and model.experts.stats.misses > misses
    model.experts.close()


def test_layers_wait_while_many_lack_experts(monkeypatch):
    monkeypatch.setattr(optimistic, "LEAST_SHARE", 0.85)
    model = opened("qwen3_moe", 6, least_slots=TOP_K)
    started = []
    start = optimistic.DecodeStep.start
    run(model, tokens_of("qwen3_moe") * 2)
    assert model.optimistic.share < 0.85
    monkeypatch.setattr(
        optimistic.DecodeStep, "start", lambda *given, **more: started.append(1) or start(*given, **more)
    )
    monkeypatch.setattr(model.optimistic, "_step", None)
    run(model, tokens_of("qwen3_moe", 4))
    model.experts.close()


def test_a_failed_read_leaves_a_step_that_can_be_repeated():
    broken = []

    def preadv(fd, buffers, offset):
        if broken:
            raise OSError(5, "Input/output error")
        return os.preadv(fd, buffers, offset)

    tokens = tokens_of("qwen3_5_moe")
    model = opened("qwen3_5_moe", ahead=False)
    want = run(model, tokens)
    model.experts.close()
    model = opened("qwen3_5_moe", 40, preadv=preadv, least_slots=TOP_K)
    cache, failures, got = model.make_cache(), 0, []
    for token in tokens:
        broken.append(1)
        try:
            step = model.step([SequenceRows(cache, [token])])
        except ExpertIOError:
            failures += 1
            broken.clear()
            step = model.step([SequenceRows(cache, [token])])
        broken.clear()
        got.append(np.array(step.logits[0]))
    model.experts.close()
    assert failures > 2 and np.array_equal(np.stack(got), want)

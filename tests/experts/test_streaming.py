"""A streamed model against a resident one: the same bits, and no more reads than the routing asks for."""

import hashlib
import os
import shutil
import signal
import subprocess
import sys
import textwrap
from collections import Counter

import forked
import goldens
import mlx.core as mx
import numpy as np
import pytest
from grids import drawn, marks
from tiny_models import child_environment, on_cpu, tiny_directory, tiny_model, use_plain_operations

from moeflux_mlx.driving.generation import generate_step
from moeflux_mlx.errors import DeviceError, ExpertIOError, ModelFileError
from moeflux_mlx.experts import routed, whole
from moeflux_mlx.experts.lookahead import MEMORY, WARMUP, Trial
from moeflux_mlx.experts.memory import staging_memory
from moeflux_mlx.experts.reader import ExpertReader
from moeflux_mlx.experts.routed import RoutedExperts
from moeflux_mlx.experts.routing import finished
from moeflux_mlx.experts.streamed import StreamedExperts
from moeflux_mlx.experts.whole import MappedExperts, ResidentExperts
from moeflux_mlx.formats.packed import open_packed
from moeflux_mlx.mixers.registry import stored_forms
from moeflux_mlx.model.decoder import Model
from moeflux_mlx.model.span import Span
from moeflux_mlx.model.step import SequenceRows
from moeflux_mlx.model.weights import fill, read_resident
from moeflux_mlx.opening.engine import load_model
from moeflux_mlx.ops import backend
from moeflux_mlx.spec import ModelArgs

EXPERTS, TOP_K = 16, 4
FAMILIES = (*goldens.families(), "gpt_oss")  # a family with windows, and with experts that add biases
CHOOSING = ("deepseek_v4", "deepseek_v41", "glm5_next", "glm_moe_dsa", "minimax_m3_vl", "qwen4_exp")


def tokens_of(family):
    return mx.array(goldens.golden(family, "hub")[0]).reshape(1, -1)


def run(model, tokens, chunk):
    """Returns the logits [T, V] of `tokens` [1, T], computed `chunk` at a time."""
    cache = model.make_cache()
    parts = [model(tokens[:, i : i + chunk], cache) for i in range(0, tokens.shape[1], chunk)]
    return np.array(mx.concatenate(parts, axis=1)[0])


def streamed(path, prefetch="lookahead", preadv=os.preadv, direct=True, workers=8, **options):
    """Returns a new model whose loader is made with these options."""
    args, tensors = ModelArgs.from_file(path), read_resident(path)
    packed = open_packed(path, args)
    reader = ExpertReader(packed, direct=direct, preadv=preadv, workers=workers)
    source = StreamedExperts(packed, reader=reader, **options)
    model = Model(args, RoutedExperts(source, prefetch), stored_forms(tensors))
    fill(model, tensors, args.quantization, mx.float32)
    return model


@pytest.fixture
def small_waves(wave_bytes):
    """Makes prompts use waves of two experts."""
    args = ModelArgs.from_file(tiny_directory("qwen3_moe"))
    packed = open_packed(tiny_directory("qwen3_moe"), args)
    wave_bytes(2 * packed.layout.record.stride)


OPTIONS = {
    "one token's experts": {"least_slots": TOP_K, "cache_bytes": 1},
    "a layer": {"least_slots": EXPERTS, "cache_bytes": 1},
    "one less than all": {"least_slots": 4 * EXPERTS - 1, "cache_bytes": 1, "prefetch": "off"},
    "everything": {"cache_bytes": 1 << 30},
    "through the page cache": {"least_slots": 2 * TOP_K, "cache_bytes": 1, "direct": False},
}


@pytest.mark.parametrize("family, name", drawn(FAMILIES, OPTIONS))
def test_same_bits_with_any_pool(family, name, small_waves):
    tokens, reference = tokens_of(family), tiny_model(family, mx.float32)
    model = streamed(tiny_directory(family), **OPTIONS[name])
    for text, chunk in ((tokens[:, :14], 1), (tokens, 20)):
        assert np.array_equal(run(model, text, chunk), run(reference, text, chunk))
    model.experts.close()


@pytest.mark.usefixtures("plain_operations")
@pytest.mark.parametrize(
    "kind",
    [
        {"copied": False},
        {"copied": True},
        {"copied": True, "host_bytes": 7 * 16384},
        {"copied": True, "host_bytes": 1 << 30},
        {"adopt": staging_memory},
    ],
)
@pytest.mark.parametrize("records", [1, 20])
def test_same_bits_without_native_kernels(kind, records, small_waves):
    """These are operations as on a GPU, on MLX's CPU backend. `copied` keeps records as CUDA does, `adopt` as Metal."""
    tokens, reference = tokens_of("qwen3_moe"), tiny_model("qwen3_moe", mx.float32)
    model = streamed(tiny_directory("qwen3_moe"), least_slots=TOP_K, cache_bytes=records * 16384, **kind)
    for text, chunk in ((tokens[:, :14], 1), (tokens, 20)):
        assert np.array_equal(run(model, text, chunk), run(reference, text, chunk))
    model.experts.close()


def lease_one_token(patch):
    for module in ("routed", "routing"):
        patch.setattr(f"moeflux_mlx.experts.{module}.LEASED_TOKENS", 1)


@pytest.mark.parametrize("is_native", [False, True])
@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_5_moe", "deepseek_v3"])
def test_same_bits_where_a_steps_experts_are_asked_for_in_parts(family, is_native, monkeypatch):
    """The pool has room for the experts of one token."""
    if not is_native:
        use_plain_operations(monkeypatch)
    tokens, reference = tokens_of(family)[:, :10], tiny_model(family, mx.float32)
    want = run(reference, tokens, 5)
    lease_one_token(monkeypatch)
    model = streamed(tiny_directory(family), least_slots=TOP_K, cache_bytes=1)
    assert np.array_equal(run(model, tokens, 5), want)
    model.experts.close()


@pytest.mark.parametrize("copied", [False, True])
def test_a_steps_experts_are_asked_for_at_once_where_the_pool_has_room(copied, monkeypatch):
    """There are rows of many sequences, more than the smallest pool is made for.

    Copied records are stacked, a few rows' at a time.
    """
    if copied:
        use_plain_operations(monkeypatch)
    model = streamed(tiny_directory("qwen3_moe"), "off", least_slots=TOP_K, cache_bytes=1 << 20, copied=copied)
    lease_one_token(monkeypatch)
    asked, request = [], model.experts.request
    model.experts.request = lambda layer, ids: asked.append(len(ids)) or request(layer, ids)
    model.step([SequenceRows(model.make_cache(), [token]) for token in range(12)])
    layers = len(model.args.moe_layers)
    assert asked.count(12) == layers and len(asked) == (13 * layers if copied else layers)
    model.experts.close()


def test_a_wrong_byte_changes_the_logits(tmp_path, small_waves):
    """This shows that the comparison of bits can fail."""
    path = shutil.copytree(tiny_directory("qwen3_moe"), tmp_path / "model")
    file = path / "packed_experts" / "layer_00.bin"
    data = bytearray(file.read_bytes())
    data[::16384] = bytes(byte ^ 1 for byte in data[::16384])
    file.write_bytes(data)
    tokens = tokens_of("qwen3_moe")
    model = streamed(path, least_slots=TOP_K, cache_bytes=1)
    assert not np.array_equal(run(model, tokens, 20), run(tiny_model("qwen3_moe", mx.float32), tokens, 20))
    model.experts.close()


@pytest.mark.usefixtures("plain_operations")
def test_memory_on_a_device_stays_within_the_pool_and_one_stack(small_waves):
    """Records are copied as they arrive.

    The arrays alive at any time are those of the pool and one stack of a request.
    """
    alive = []
    model = streamed(tiny_directory("qwen3_moe"), least_slots=TOP_K, cache_bytes=12 * 16384, copied=True)
    pool = model.experts.pools[0]
    located = pool.locate

    def locate(keys):
        blob, rows = located(keys)
        alive.append(sum(pool.get(key).device is not None for key in pool.records()))
        assert len(blob) == len(keys) <= TOP_K
        return blob, rows

    pool.locate = locate
    run(model, tokens_of("qwen3_moe"), 1)
    assert max(alive) <= 12 == model.experts.slots
    model.experts.close()


def merciless(loader):
    """Every record is overwritten as soon as that is allowed."""
    unpin = loader.unpin

    def overwrite(keys, out):
        unpin(keys, out)
        for pool, key in ((loader.pools.of[key[0]], key) for key in keys):
            if key in pool and not pool.pinned(key) and pool[key].read is None:
                row = pool[key].row
                pool.drop(key)
                pool.places.row(row)[:] = 0xFFFFFFFF

    loader.unpin = overwrite


@pytest.mark.usefixtures("plain_operations")
@on_cpu()  # on CUDA the records are elsewhere
@pytest.mark.parametrize("chunk", [1, 3, 20])
def test_no_block_is_released_while_something_lazy_reads_it(chunk, small_waves, dense_from_rows):
    dense_from_rows(5)  # so that a wave is several products
    tokens, path = tokens_of("qwen3_moe"), tiny_directory("qwen3_moe")
    want = run(streamed(path), tokens, chunk)
    model = streamed(path, least_slots=4 * TOP_K, cache_bytes=1, adopt=staging_memory)  # MLX reads the pool's memory
    merciless(model.experts)
    assert np.array_equal(run(model, tokens, chunk), want)
    model.experts.close()


# What is predicted.


def prefetching(model):
    """Lists (layer, experts) of all records that are read ahead while tokens run."""
    asked, prefetch = [], model.experts.hint
    model.experts.hint = lambda keys: asked.append((keys[0][0], [e for _, e in keys])) or prefetch(keys)
    return asked


def using(model):
    """Lists (layer, experts) of all records that are used."""
    used, request = [], model.experts.request
    model.experts.request = lambda layer, ids: used.append((layer, ids[0].tolist())) or request(layer, ids)
    return used


@pytest.mark.parametrize("family", goldens.families())
def test_the_next_layers_router_looks_through_its_own_norm(family):
    """`Routing.guess` of a layer is the next layer's router applied after the next layer's norm."""
    model = streamed(tiny_directory(family), least_slots=8 * TOP_K, cache_bytes=1)
    guesses, routed = [], model.layers[model.args.moe_layers[0]].mlp.experts
    kernels_call = routed.__call__

    class Looking:
        wants_guess = staticmethod(routed.wants_guess)

        def __call__(self, routing, x, h_mid, *rest):
            guesses.append((routing, np.array(h_mid)))
            return kernels_call(routing, x, h_mid, *rest)

    layers = list(model.args.moe_layers)
    for layer in layers:
        model.layers[layer].mlp.experts = Looking()
    cache = model.make_cache()
    for chunk in (tokens_of(family)[:, :6], mx.array([[7]])):
        guesses.clear()
        mx.eval(model(chunk, cache))
    assert [routing.layer for routing, _ in guesses] == layers and guesses[-1][0].guess is None
    for (routing, h_mid), following in zip(guesses, layers[1:], strict=False):
        after = model.layers[following]
        normed = after.post_attention_layernorm(mx.array(h_mid[0]))
        ids, weights = after.mlp.route(after.mlp.gate(normed.astype(mx.float32)))
        assert routing.guess.layer == following
        assert np.array_equal(np.array(routing.guess.ids), np.array(ids))
        np.testing.assert_allclose(np.array(routing.guess.weights), np.array(weights), atol=1e-5)
    model.experts.close()


def test_what_is_predicted_is_read_for_the_next_layer():
    model = streamed(tiny_directory("qwen3_moe"), least_slots=8 * TOP_K, cache_bytes=1)
    routed, layers = model.layers[0].mlp.experts, model.args.moe_layers
    cache, seen = model.make_cache(), []
    mx.eval(model(tokens_of("qwen3_moe")[:, :6], cache))
    asked, requested = prefetching(model), routed.lookahead.requested
    routed.lookahead.requested = lambda routing, ids: seen.append(routing.guess) or requested(routing, ids)
    mx.eval(model(mx.array([[7]]), cache))
    wanted = [(g.layer, routed.lookahead.predictor.confident(np.array(g.ids), np.array(g.weights))) for g in seen if g]
    assert asked == wanted and [layer for layer, _ in asked] == list(layers[1:])
    model.experts.close()


def test_guesses_are_judged_by_what_their_layer_used(monkeypatch):
    """The record of each layer equals a count of right and wrong guesses. Wrong ones end the guessing."""
    monkeypatch.setattr(Trial, "token", lambda self, seconds: None)  # guessing is never switched off because of time
    model = streamed(tiny_directory("qwen3_moe"), "lookahead", least_slots=TOP_K, cache_bytes=5 * 16384)
    routed, layers = model.layers[0].mlp.experts, model.args.moe_layers
    ahead, useful, judged = {}, dict.fromkeys(layers, 0.7), dict.fromkeys(layers, 0)
    acquire, read = model.experts.request, model.experts.hint

    def note_use(layer, ids):
        for expert in ahead.pop(layer, []):
            useful[layer] = MEMORY * useful[layer] + (1 - MEMORY) * (expert in ids)
            judged[layer] += 1
        return acquire(layer, ids)

    def note_guess(keys):
        begun = read(keys)
        ahead.update({layer: [expert for _, expert in begun] for layer, _ in keys[:1]})
        return begun

    model.experts.request = note_use
    model.experts.hint = note_guess
    cache = model.make_cache()
    for token in range(4):
        mx.eval(model(mx.array([[token]]), cache))
    assert sum(judged.values()) > len(layers)
    for layer in layers:
        assert routed.lookahead.predictor.record(layer).judged == judged[layer]
        assert routed.lookahead.predictor.record(layer).useful == pytest.approx(useful[layer])
    for record in map(routed.lookahead.predictor.record, layers):
        record.judged, record.useful = WARMUP, 0.0
    read_ahead = prefetching(model)
    mx.eval(model(mx.array([[5]]), cache))
    assert not read_ahead
    model.experts.close()


class Counting:
    """A `preadv` that notes where it reads."""

    def __init__(self):
        self.reads = []

    def __call__(self, fd, buffers, offset):
        self.reads.append((fd, offset))
        return os.preadv(fd, buffers, offset)


@pytest.mark.parametrize("prefetch", ["off", "lookahead"])
@pytest.mark.parametrize("slots", [TOP_K, 12, 40])
def test_a_chunk_reads_each_expert_at_most_once(slots, prefetch, small_waves):
    counting = Counting()
    model = streamed(tiny_directory("qwen3_moe"), prefetch, counting, least_slots=TOP_K, cache_bytes=slots * 16384)
    tokens, cache = tokens_of("qwen3_moe"), model.make_cache()
    for start in range(0, 40, 20):
        counting.reads.clear()
        mx.eval(model(tokens[:, start : start + 20], cache))
        model.experts.drain()
        assert max(Counter(counting.reads).values()) == 1
    model.experts.close()


@pytest.mark.parametrize("prefetch", ["off", "lookahead"])
def test_bytes_are_counted(prefetch, small_waves):
    counting = Counting()
    model = streamed(tiny_directory("qwen3_next"), prefetch, counting, least_slots=TOP_K, cache_bytes=1)
    loader, tokens = model.experts, tokens_of("qwen3_next")
    run(model, tokens, 20)
    run(model, tokens, 1)
    loader.drain()
    stats = loader.stats
    assert stats.bytes_read == len(counting.reads) * loader.layout.record.stride
    assert stats.bytes_read == (stats.misses - stats.late + stats.prefetched) * loader.record_bytes
    assert stats.busy_seconds > 0 and stats.gb_per_second > 0
    loader.close()


def test_nothing_is_read_once_all_experts_are_in_memory():
    model = streamed(tiny_directory("qwen3_moe"), cache_bytes=1 << 30)
    tokens = tokens_of("qwen3_moe")
    run(model, tokens, 40)
    for layer in model.args.moe_layers:
        model.experts.request(layer, np.arange(EXPERTS)).wait()
    model.experts.reset_stats()
    run(model, tokens, 1)
    assert model.experts.stats.bytes_read == 0 and model.experts.stats.hit_rate == 1
    model.experts.close()


def test_nothing_is_predicted_where_every_expert_is_in_memory():
    """A guess costs a product and a wait. It is made again once a record is evicted."""
    model = streamed(tiny_directory("qwen3_moe"), cache_bytes=1 << 30)
    routed, source, layers = model.layers[0].mlp.experts, model.experts, model.args.moe_layers
    every = np.arange(model.args.num_experts)
    for layer in layers:
        assert routed.wants_guess(layers[-1], 1) and not source.holds(layer)
        with source.turn(1), source.request(layer, every) as lease:
            lease.wait()
    assert all(source.holds(layer) for layer in layers) and not routed.wants_guess(layers[-1], 1)
    source.invalidate()
    assert not source.holds(layers[0]) and routed.wants_guess(layers[-1], 1)
    source.close()


def test_the_hottest_experts_of_a_chunk_stay(small_waves):
    """Each layer keeps its share, although all layers together are larger than the pool."""
    model = streamed(tiny_directory("qwen3_moe"), "off", least_slots=TOP_K, cache_bytes=20 * 16384)
    share = model.experts.slots_per_layer(spare=5 + 2)
    assert share == 4
    used = {}
    routed = model.layers[0].mlp.experts

    class Recording:
        source = model.experts

        def wants_guess(self, layer, tokens):
            return False

        def expect(self, layer, tokens):
            pass

        def in_pieces(self, routing, *rest):
            used[routing.layer] = np.array(routing.ids).reshape(-1)
            return routed.in_pieces(routing, *rest)

    for layer in model.args.moe_layers:
        model.layers[layer].mlp.experts = Recording()
    mx.eval(model(tokens_of("qwen3_moe")))
    for layer, ids in used.items():
        hottest = np.argsort(-np.bincount(ids, minlength=EXPERTS), kind="stable")[:share]
        assert model.experts.request(layer, hottest).ready.all()
    model.experts.close()


@pytest.mark.parametrize("prefetch, copied, fails", drawn(["off", "lookahead"], [False, True], [False, True], turns=2))
def test_others_take_steps_between_the_waves_of_a_prompt(fails, copied, prefetch, small_waves, monkeypatch):
    """Both get the same results as alone, also if a step fails. A step moves no memory and gives no hints."""
    if copied:
        use_plain_operations(monkeypatch)
    path, tokens = tiny_directory("qwen3_moe"), mx.array(np.random.default_rng(1).integers(0, 248, (1, 40)))
    model = streamed(path, prefetch, least_slots=8 * TOP_K, cache_bytes=1, copied=copied)
    model.experts.allowance = lambda tokens, held: breaths.append(tokens) or 64 * 16384
    breaths, loader = [], model.experts
    alone = np.array(finished(model.advance(Span(tokens, 0, 16), model.make_cache())))
    steps = [
        np.array(model.step([SequenceRows(cache, [n])]).logits) for cache in [model.make_cache()] for n in range(9)
    ]
    cache, found, hinted, beside = model.make_cache(), [], [], []
    hint = loader.hint
    loader.hint = lambda keys: hinted.append((bool(beside), bool(begun := hint(keys)))) or begun
    request, unplugged = loader.request, ExpertIOError("unplugged")

    def report(share):
        if len(found) == len(steps):
            return
        before = len(breaths)
        beside.append(1)
        if fails and not hasattr(unplugged, "told"):
            loader.request, unplugged.told = lambda layer, ids: throw(unplugged), True
            with pytest.raises(ExpertIOError, match="unplugged"):
                model.step([SequenceRows(cache, [len(found)])])
            loader.request = request
        found.append(np.array(model.step([SequenceRows(cache, [len(found)])]).logits))
        beside.clear()
        assert len(breaths) == before

    assert np.array_equal(finished(model.advance(Span(tokens, 0, 16), model.make_cache()), report), alone)
    assert len(found) == len(steps) and all(map(np.array_equal, found, steps))
    assert not any(begun for is_beside, begun in hinted if is_beside)
    assert np.array_equal(finished(model.advance(Span(tokens, 0, 16), model.make_cache())), alone)
    loader.close()


def throw(error):
    raise error


def test_a_pool_smaller_than_one_token_still_hits():
    """With three layers of four experts and ten slots, strict least-recently-used order would never hit."""
    model = streamed(tiny_directory("qwen3_moe"), "off", least_slots=TOP_K, cache_bytes=10 * 16384)
    cache = model.make_cache()
    for _ in range(20):  # the same token again and again uses nearly the same experts
        mx.eval(model(mx.array([[7]]), cache))
    assert model.experts.stats.hit_rate > 0.5
    model.experts.close()


def test_the_next_layer_begins_before_it_is_reached(small_waves):
    """If a span uses nearly all experts, those of the next layer are being read before its router has run, and those of
    the first layer before anything has run."""
    model = streamed(tiny_directory("qwen3_moe"), least_slots=TOP_K, cache_bytes=8 * 16384)
    tokens, layers = mx.array(np.random.default_rng(0).integers(0, 248, (1, 300))), model.args.moe_layers
    asked, request = [], model.experts.request
    model.experts.request = lambda layer, ids: asked.append(layer) or request(layer, ids)
    hint = model.experts.hint
    model.experts.hint = lambda keys: asked.extend(keys) or hint(keys)
    mx.eval(model(tokens))
    for layer in layers:
        assert (layer, 0) in asked[: asked.index(layer)]
    model.experts.close()
    off = streamed(tiny_directory("qwen3_moe"), "off", least_slots=TOP_K, cache_bytes=8 * 16384)
    asked, request, hint = [], off.experts.request, off.experts.hint
    off.experts.request = lambda layer, ids: asked.append(layer) or request(layer, ids)
    off.experts.hint = lambda keys: asked.extend(keys) or hint(keys)
    mx.eval(off(tokens))
    for layer in layers:
        assert not any(isinstance(key, tuple) and key[0] == layer for key in asked[: asked.index(layer)])
    off.experts.close()


@pytest.mark.usefixtures("plain_operations")
@pytest.mark.parametrize(
    "family, copied",
    [
        *((one, copied) for one in FAMILIES for copied in (False, True)),
        *(pytest.param(one, None, marks=marks(one == "qwen4_exp")) for one in CHOOSING),
    ],
)
def test_compiled_parts_of_layers_equal_plain_operations(family, copied):
    """As on a GPU, with a pool that does not hold all experts, so that some are predicted.

    The last tokens of a longer text attend to chosen positions.
    """
    if copied is None:
        options = {"dtype": mx.float32, "expert_io": "pread", "expert_cache_bytes": 1}
        plain, compiled = (load_model(tiny_directory(family), **options) for _ in range(2))
    else:
        options = {"least_slots": 8 * TOP_K, "cache_bytes": 1, "copied": copied}
        plain, compiled = (streamed(tiny_directory(family), **options) for _ in range(2))
    routed = compile_layers(compiled)
    tokens = tokens_of(family)[:, : 22 if copied is None else 6]
    np.testing.assert_allclose(run(compiled, tokens, 1), run(plain, tokens, 1), atol=5e-5)
    assert compiled.experts.stats.prefetched or compiled.args.connections, "a layer between streams is not foretold"
    assert len(routed._compiled) == len(compiled.args.moe_layers)
    for model in (plain, compiled):
        model.experts.close()
    assert not routed._compiled, "it would hold the model's arrays"


@pytest.mark.usefixtures("plain_operations")
def test_a_failed_read_between_compiled_parts_ends_one_call_only():
    """The caches of the layers before it are a token ahead, as without compiled parts."""
    reads = []

    def preadv(fd, buffers, offset):
        reads.append(offset)
        if len(reads) == fails_at:
            raise OSError(5, "Input/output error")
        return os.preadv(fd, buffers, offset)

    fails_at, outcomes = None, []
    for is_compiled in (False, True):
        model = streamed(tiny_directory("qwen3_moe"), "off", preadv=preadv, least_slots=TOP_K, cache_bytes=1)
        if is_compiled:
            compile_layers(model)
        cache = model.make_cache()
        mx.eval(model(mx.array([[1]]), cache))
        mx.eval(model(mx.array([[2]]), cache))
        reads.clear()
        fails_at = TOP_K + 1  # the read of the second layer
        with pytest.raises(ExpertIOError, match="Input/output error"):
            model(mx.array([[3]]), cache)
        fails_at = None
        outcomes.append([layer.offset for layer in cache])
        for layer in cache:
            layer.trim(layer.offset - 2)
        outcomes.append(np.array(model(mx.array([[3]]), cache)))
        model.experts.close()
    assert outcomes[0] == outcomes[2]
    np.testing.assert_allclose(outcomes[1], outcomes[3], atol=5e-5)


def compile_layers(model):
    """Compiles layers as loading for a GPU does. Returns the object that computes experts."""
    for layer in model.layers:
        layer.compile(model.experts)
    routed = model.layers[-1].mlp.experts
    routed._compiles = True
    return routed


def test_two_generations_in_turn_share_a_loader():
    model = streamed(tiny_directory("qwen3_5_moe"), least_slots=EXPERTS, cache_bytes=1)
    prompts = ([1, 2, 3, 4, 5, 6, 7, 8, 9, 10], [100, 50, 3])

    def start(prompt):
        return generate_step(prompt, model, max_tokens=12)

    apart = [[token for token, _ in start(prompt)] for prompt in prompts]
    together = list(zip(*map(start, prompts), strict=True))
    assert [[pair[i][0] for pair in together] for i in (0, 1)] == apart
    model.experts.close()


def test_an_error_between_request_and_use_leaves_the_pool_usable(monkeypatch):
    model = streamed(tiny_directory("qwen3_moe"), least_slots=TOP_K, cache_bytes=1)
    tokens, reference = tokens_of("qwen3_moe"), tiny_model("qwen3_moe", mx.float32)

    def broken(*_, **__):
        raise MemoryError("planted")

    with monkeypatch.context() as patch:
        for name in ("expert_gate_up", "expert_ffn"):  # one of these two runs on this machine
            patch.setattr(routed, name, broken)
        for _ in range(2 * TOP_K):
            with pytest.raises(DeviceError, match="planted; give a shorter --context"):
                model(tokens[:, :1])
    assert np.array_equal(run(model, tokens, 1), run(reference, tokens, 1))
    model.experts.close()


@pytest.mark.parametrize("chunk", [1, 20])
def test_a_failed_read_ends_one_call_only(chunk, small_waves):
    broken = []

    def preadv(fd, buffers, offset):
        if broken:
            raise OSError(5, "Input/output error")
        return os.preadv(fd, buffers, offset)

    model = streamed(tiny_directory("qwen3_moe"), preadv=preadv, least_slots=TOP_K, cache_bytes=1)
    tokens, reference = tokens_of("qwen3_moe"), tiny_model("qwen3_moe", mx.float32)
    broken.append(True)
    for _ in range(3):
        with pytest.raises(ExpertIOError, match="Input/output error"):
            model(tokens[:, :chunk])
    broken.clear()
    assert np.array_equal(run(model, tokens, chunk), run(reference, tokens, chunk))
    model.experts.close()


# Files and processes.

GENERATE = """
    import sys, hashlib
    import mlx.core as mx
    from moeflux_mlx.opening.engine import load_model
    from moeflux_mlx.driving.generation import generate_step
    model = load_model(sys.argv[1], dtype=mx.float32, expert_io="pread", expert_cache_bytes=1)
    digest = hashlib.sha256()
    for token, logprobs in generate_step(list(range(1, 30)), model, max_tokens=int(sys.argv[2])):
        digest.update(memoryview(logprobs))
        if sys.argv[2] == "-1":
            print(token, flush=True)
    print(digest.hexdigest())
    """


def start(path, count):
    return forked.Child(textwrap.dedent(GENERATE), str(path), str(count), environment=child_environment())


def contents(path):
    return {file: hashlib.sha256(file.read_bytes()).digest() for file in path.rglob("*") if file.is_file()}


def test_two_processes_on_one_directory():
    with start(tiny_directory("qwen3_moe"), 40) as one, start(tiny_directory("qwen3_moe"), 40) as other:
        results = [process.communicate(timeout=60)[0] for process in (one, other)]
    assert results[0] == results[1] and len(results[0]) == 65


def test_killed_in_the_middle(tmp_path):
    path = shutil.copytree(tiny_directory("qwen3_moe"), tmp_path / "model")
    before = contents(path)
    with start(path, -1) as process:
        for _ in range(5):
            assert process.stdout.readline()
        process.send_signal(signal.SIGKILL)
    assert contents(path) == before
    model = load_model(path, dtype=mx.float32, expert_io="pread")
    tokens = tokens_of("qwen3_moe")
    assert np.array_equal(run(model, tokens, 1), run(tiny_model("qwen3_moe", mx.float32), tokens, 1))
    model.experts.close()


def test_a_model_on_a_read_only_mount(tmp_path):
    path = shutil.copytree(tiny_directory("qwen3_moe"), tmp_path / "model")
    mount = f"mount --bind {path} {path} && mount -o remount,ro,bind {path}"
    unshare = shutil.which("unshare")
    if unshare is None or subprocess.run([unshare, "-m", "sh", "-c", mount], capture_output=True).returncode:
        pytest.skip("needs the right to mount")
    script = f'{mount} && ! touch {path}/x 2>/dev/null && exec "$@"'
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", script, "sh", sys.executable, "-c", textwrap.dedent(GENERATE), path, "10"],
        capture_output=True,
        text=True,
        env={**child_environment(), "PYTHONDONTWRITEBYTECODE": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stdout) == 65


@pytest.fixture
def replaceable(tmp_path):
    """Returns a copy of a model, a layer file of another size, and one with other bytes."""
    path = shutil.copytree(tiny_directory("qwen3_moe"), tmp_path / "model")
    other = path / "packed_experts" / "layer_02.bin"
    return path, path / "packed_experts" / "layer_01.bin", other.read_bytes()


@pytest.mark.parametrize("mode", ["mmap", "pread"])
def test_a_replaced_file_is_served_only_after_the_next_open(replaceable, mode):
    """A model that has the file open continues with the whole old file."""
    path, file, data = replaceable
    tokens, reference = tokens_of("qwen3_moe"), tiny_model("qwen3_moe", mx.float32)
    model = load_model(path, dtype=mx.float32, expert_io=mode, expert_cache_bytes=1)
    (file.parent / "new").write_bytes(data)
    os.replace(file.parent / "new", file)
    assert np.array_equal(run(model, tokens, 1), run(reference, tokens, 1))
    again = load_model(path, dtype=mx.float32, expert_io=mode, expert_cache_bytes=1)
    assert not np.array_equal(run(again, tokens, 1), run(reference, tokens, 1))
    file.write_bytes(data[:-1])
    with pytest.raises(ModelFileError, match=r"layer_01.bin has \d+ bytes"):
        load_model(path, dtype=mx.float32, expert_io=mode)
    model.experts.close()
    again.experts.close()


@pytest.mark.skipif(backend.name() == "cuda", reason="the GPU has a copy of a mapped file")
@pytest.mark.parametrize("options", [{"expert_io": "mmap"}, {"expert_io": "pread", "expert_cache_bytes": 1}], ids=str)
def test_a_file_that_is_written_to_ends_the_request(replaceable, options, files_are_looked_at):
    path, file, data = replaceable
    tokens, model = tokens_of("qwen3_moe"), load_model(path, dtype=mx.float32, **options)
    before = file.stat()
    run(model, tokens, 1)
    file.write_bytes(data)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    for _ in range(2):
        with pytest.raises(ExpertIOError, match="layer_01.bin was changed while in use; start again"):
            run(model, tokens, 1)
        os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))  # what was read cannot be believed any more
    model.experts.close()


CUT = """
    import os, sys
    import mlx.core as mx
    from moeflux_mlx.ops import native
    from moeflux_mlx.errors import ExpertIOError
    from moeflux_mlx.opening.engine import load_model
    from moeflux_mlx.experts import files
    files.LOOK_SECONDS = 1e9
    if sys.argv[2] == "twins":
        native.available, native.warn_if_missing = (lambda: False), (lambda: None)
    model = load_model(sys.argv[1], dtype=mx.float32, expert_io="mmap")
    file = os.path.join(sys.argv[1], "packed_experts", "layer_01.bin")
    os.truncate(file, os.path.getsize(file) // 2)
    for tokens in ([[1]], [list(range(40))]):
        try:
            mx.eval(model(mx.array(tokens)))
        except ExpertIOError as error:
            assert "layer 1" in str(error) and "cut short" in str(error), error
        else:
            sys.exit("nothing was said")
    """


@pytest.mark.skipif(backend.name() == "cuda", reason="the GPU has a copy of its own")
@pytest.mark.parametrize("kind", ["native", "twins"])
def test_a_mapped_file_cut_short_while_in_use(replaceable, kind):
    """The system would kill a process that reads past the end."""
    code, _, err = forked.run(textwrap.dedent(CUT), replaceable[0], kind)
    assert code == 0, f"{code} ({-signal.SIGBUS}: killed) {err}"


@on_cpu()  # CUDA has a copy
@pytest.mark.usefixtures("plain_operations", "files_may_change")
def test_an_adopted_file_cut_short_while_in_use(replaceable, monkeypatch):
    """On Metal a token runs as one graph, so no request for a layer is made while it runs."""
    path, file, data = replaceable
    real = whole.map_file
    with monkeypatch.context() as patch:
        patch.setattr(whole, "map_file", lambda *args: (mx.array(real(*args)[0]), real(*args)[1]))
        model = load_model(path, dtype=mx.float32, expert_io="mmap")
    cache = model.make_cache()
    for _ in range(2):
        mx.eval(model(mx.array([[1]]), cache))
    os.truncate(file, len(data) + 1)
    model.experts.checked_at = 0.0
    mx.eval(model(mx.array([[1]]), cache))
    os.truncate(file, len(data) // 2)
    model.experts.checked_at = 0.0
    with pytest.raises(ExpertIOError, match="layer 1 has .* cut short"):
        model(mx.array([[1]]), cache)


def test_records_that_metal_does_not_adopt_are_reported(replaceable, monkeypatch, backend_is):
    path, file, _ = replaceable

    def refuse(*_, **__):
        raise ValueError("[from_dlpack] cannot import without a copy")

    monkeypatch.setattr(mx, "from_dlpack", refuse)
    packed = open_packed(path, ModelArgs.from_file(path))
    backend_is("metal")
    with pytest.raises(ExpertIOError, match=f"Metal refuses {path}.*layer_00.bin.*without a copy.*--expert-io"):
        MappedExperts(packed)
    with pytest.raises(
        ExpertIOError, match=r"Metal refuses a part of the expert pool.*\); give a smaller --expert-cache-gb"
    ):
        StreamedExperts(packed).request(0, np.array([0]))


def test_a_replaced_file_is_not_opened_again(replaceable):
    """If direct I/O is refused late, the files are opened a second time. They must be the same files."""
    path, file, data = replaceable
    refused = []

    def preadv(fd, buffers, offset):
        if refused:
            refused.clear()
            raise OSError(22, "Invalid argument")
        return os.preadv(fd, buffers, offset)

    model = streamed(path, preadv=preadv, least_slots=TOP_K, cache_bytes=1)
    (file.parent / "new").write_bytes(data)
    os.replace(file.parent / "new", file)
    refused.append(True)
    with pytest.raises(ExpertIOError, match="layer_01.bin was changed while in use"):
        run(model, tokens_of("qwen3_moe"), 1)
    model.experts.close()


def test_a_file_cut_between_check_and_open(replaceable):
    path, file, data = replaceable
    packed = open_packed(path, ModelArgs.from_file(path))
    file.write_bytes(data[:-16384])
    for source in (MappedExperts, StreamedExperts, ResidentExperts):
        with pytest.raises(ExpertIOError, match="layer_01.bin (no longer )?has"):
            source(packed)


@pytest.mark.parametrize("family", ["qwen3_moe", "k2_horizon", "axk2"])
def test_the_next_choice_is_predicted_from_the_stream(family):
    """If nothing is added to the stream, the next router gets what was predicted, also if norms are launches apart."""
    model = streamed(tiny_directory(family), "lookahead")
    chosen, predicted = [], []
    blocks = [model.layers[layer].mlp for layer in model.args.moe_layers]

    def recording(before):
        chosen.append(np.array(before.ids))
        predicted.append(before.predicted)
        return before.residual

    for layer in model.layers:
        layer.mixer.end = lambda out, parts, x: x
        layer.residual.added = lambda out, *kept: kept[0] if kept else out
    for i, mlp in enumerate(blocks):
        mlp.should_predict, mlp.run_experts = (lambda tokens, i=i: i + 1 < len(blocks)), recording
    mx.eval(model(mx.array([[7]]), model.make_cache()))
    assert len(chosen) == len(blocks) > 1
    for guess, ids in zip(predicted, chosen[1:], strict=False):
        assert np.array_equal(np.array(guess[0]), ids)
    model.experts.close()

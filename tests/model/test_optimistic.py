"""Layers that are queued ahead give the same bits as layers that wait for each choice, and count the same uses."""

import os
from argparse import Namespace
from dataclasses import replace

import goldens
import make_random_model
import mlx.core as mx
import numpy as np
import pytest
from grids import drawn
from tiny_models import tiny_directory, use_plain_operations

from moeflux_mlx.cli.opening import shapes_of
from moeflux_mlx.errors import ExpertIOError
from moeflux_mlx.experts import pool_reads, routed, staging
from moeflux_mlx.experts.memory import staging_memory
from moeflux_mlx.experts.reader import ExpertReader
from moeflux_mlx.experts.routed import RoutedExperts
from moeflux_mlx.experts.streamed import StreamedExperts
from moeflux_mlx.formats.packed import open_packed
from moeflux_mlx.mixers.registry import cache_numbers, stored_forms
from moeflux_mlx.model import optimistic
from moeflux_mlx.model.decoder import Model
from moeflux_mlx.model.optimistic import Group, Grouping, OptimisticLayers
from moeflux_mlx.model.step import SequenceRows
from moeflux_mlx.model.weights import arrange, fill, read_resident
from moeflux_mlx.opening.kernel_cache import programs_of
from moeflux_mlx.ops import backend
from moeflux_mlx.ops.kernel_files import Program
from moeflux_mlx.ops.stand_ins import standing_in
from moeflux_mlx.ops.tiles import CODE
from moeflux_mlx.spec import ModelArgs

EXPERTS, TOP_K, TOKENS = 16, 4, 9
BOTH = pytest.mark.parametrize("in_buffers", [False, True])


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch):
    use_plain_operations(monkeypatch)
    queue_by(monkeypatch, Grouping(0.0, 2, 4, 2))


def queue_by(monkeypatch, *groupings):
    monkeypatch.setattr(optimistic, "GROUPINGS", dict.fromkeys(("cuda", "metal", "ops"), groupings))


def opened(family, *given, **options):
    return opened_in(tiny_directory(family), *given, **options)


def opened_in(path, records=None, ahead=True, preadv=os.preadv, in_buffers=False, prefetch="off", **options):
    """A model whose pool has room for `records` records (None: all), compiled as for a GPU. Its records are copied, as
    on CUDA, or in buffers, as on Metal."""
    args, tensors = ModelArgs.from_file(path), read_resident(path)
    packed = open_packed(path, args)
    nbytes = 1 << 30 if records is None else records * packed.layout.held_bytes
    reader = ExpertReader(packed, preadv=preadv)
    memory = {"adopt": staging_memory} if in_buffers else {"copied": True}
    source = StreamedExperts(packed, reader=reader, cache_bytes=nbytes, **memory, **options)
    experts = RoutedExperts(source, prefetch)
    model = Model(args, experts, stored_forms(tensors))
    fill(model, tensors, args.quantization, mx.float32)
    parts = cache_numbers(args.mixers), source, model.embedded, model.project
    model.optimistic = OptimisticLayers(model.layers, *parts) if ahead else None
    return model


def tokens_of(family, count=TOKENS):
    return goldens.golden(family, "hub")[0][:count].tolist()


def run(model, tokens):
    cache = model.make_cache()
    return np.array(mx.concatenate([model(mx.array([[token]]), cache) for token in tokens], axis=1)[0])


CASES = [(family, records) for family in ("qwen3_moe", "qwen3_5_moe", "deepseek_v3") for records in (None, 40, 6)]
# Families whose layers hand choices on, or add the experts' output apart; as many records as a token has in all layers.
FEW = [("glm_moe_dsa", 8), ("axk2", 6), ("cohere2_moe", 12)]


@pytest.mark.parametrize("case, in_buffers", drawn([*CASES, *FEW], [False, True]))
def test_same_bits_and_counts_as_with_a_wait_for_each_choice(case, in_buffers, monkeypatch):
    family, records = case
    monkeypatch.setattr(pool_reads, "RESERVE", 0)  # otherwise other records go
    made = []
    for ahead in (False, True):
        model = opened(family, records, ahead, least_slots=TOP_K, in_buffers=in_buffers)
        tokens = tokens_of(family)
        logits = [run(model, tokens), run(model, tokens[::-1])]
        order = [list(pool.ranking.lowest(99, lambda key: True)) for pool in model.experts.pools]
        made.append((logits, order, model.experts.stats.hits, model.experts.stats.misses))
        model.experts.close()
    assert all(map(np.array_equal, made[0][0], made[1][0]))
    assert made[0][1:] == made[1][1:]
    assert made[0][2] and made[0][3]


@BOTH
def test_the_choice_of_a_layer_that_was_dropped_is_not_handed_on(monkeypatch, tmp_path, in_buffers):
    """Layer 2 takes the choice of layer 0, also if layer 1 lacks an expert and layer 3, which chooses anew, is queued
    behind it."""
    config = goldens.config("glm_moe_dsa") | {"indexer_types": ["full", "shared", "shared", "full", "shared"]}
    make_random_model.write_model(config, tmp_path, np.random.default_rng(0))
    logits = []
    for ahead in (False, True):
        model = opened_in(tmp_path, 12, ahead, least_slots=TOP_K, in_buffers=in_buffers)
        accepted = calls(model.experts, "accept")
        logits.append(run(model, tokens_of("glm_moe_dsa", config["index_topk"] + 8)))
        model.experts.close()
    assert {1, 2, 3} <= {*accepted} and np.array_equal(*logits)


def calls(source, name):
    """Returns a list of the layers for which a method of the source is called from now on."""
    layers, call = [], getattr(source, name)
    setattr(source, name, lambda layer, *given: layers.append(layer) or call(layer, *given))
    return layers


@BOTH
def test_records_that_are_there_are_not_requested(monkeypatch, in_buffers):
    model = opened("qwen3_moe", in_buffers=in_buffers)
    run(model, tokens_of("qwen3_moe"))
    cache, layers = model.make_cache(), list(range(len(model.layers)))
    requested, accepted = (calls(model.experts, name) for name in ("request", "accept"))
    mx.eval(model(mx.array([[1]]), cache))
    assert (requested, accepted) == (layers, [])  # a cache without a token has no graph
    run_one = [tokens_of("qwen3_moe")[0]]
    requested.clear()
    mx.eval(model(mx.array([run_one]), cache))
    assert accepted[-1] == layers[-1] and len(requested) < len(layers)
    requested.clear(), accepted.clear()
    cache = model.make_cache()
    mx.eval(model(mx.array([[1]]), cache))
    requested.clear()
    told = calls(model.layers[0].mlp.experts, "accepted")
    mx.eval(model(mx.array([run_one]), cache))
    assert (requested, accepted, told) == ([], layers, layers)
    model.experts.close()


@pytest.mark.parametrize("host", [0, 1 << 30])
def test_a_record_that_goes_while_its_layer_is_queued_is_still_used(host):
    tokens = tokens_of("qwen3_moe")
    model = opened("qwen3_moe", ahead=False)
    want = run(model, tokens)
    model.experts.close()
    model = opened("qwen3_moe", 12 if host else None, host_bytes=host, least_slots=TOP_K)
    run(model, tokens)
    source, pool, gone = model.experts, model.experts.pools[0], []
    accept = source.accept

    def accept_later(layer, ids, table):
        key = layer, int(ids[0, -1])
        tier = pool.staging.host
        has_all = set(ids[0].tolist()) <= table.slots.keys()
        if has_all and len(gone) < 5 and key in (tier if host else pool):
            gone.append(key)
            tier.places.put(tier.take(key)) if host else pool.drop(key)
        assert accept(layer, ids, table) is has_all
        return has_all

    source.accept = accept_later
    assert np.array_equal(run(model, tokens), want) and len(gone) == 5
    source.close()


def test_memory_that_queued_layers_read_is_used_again_later(monkeypatch):
    model = opened("qwen3_moe", 12, least_slots=TOP_K, host_bytes=1 << 30)
    run(model, tokens_of("qwen3_moe"))
    host, waited = model.experts.pools[0].staging.host, []
    kept = next(iter(host.kept))
    with monkeypatch.context() as patch:
        patch.setattr(staging.mx, "eval", waited.append)
        model.experts.table(kept[0])
        model.experts.queued(queued := [mx.array(1)])
        host.settle(place := host.kept[kept])
        host.settle(place)
    assert len(waited) == 1 and waited[0] is queued
    model.experts.close()


def test_records_in_host_memory_are_read_there(monkeypatch):
    tokens = tokens_of("qwen3_moe")
    model = opened("qwen3_moe", ahead=False)
    want = run(model, tokens)
    model.experts.close()
    model = opened("qwen3_moe", 12, least_slots=TOP_K, host_bytes=1 << 30)
    assert np.array_equal(run(model, tokens), want)
    stats, pool = model.experts.stats, model.experts.pools[0]
    misses, (requested, accepted) = (
        stats.misses,
        (calls(model.experts, one) for one in ("request", "accept")),
    )
    assert misses == len({*pool.records(), *pool.staging.host.kept})
    stats.host_hits = 0
    assert np.array_equal(run(model, tokens), want)
    assert accepted and stats.host_hits > len(accepted)
    assert stats.misses == misses and len(requested) == len(model.layers)  # the first token has no graph
    model.experts.close()


@pytest.mark.parametrize("groupings", optimistic.GROUPINGS.values(), ids=optimistic.GROUPINGS)
def test_each_grouping_applies_at_some_share(groupings):
    assert all(0 < how.share < 1 and 0 <= how.shorter < how.together and how.ahead > 0 for how in groupings)


@BOTH
def test_layers_wait_while_many_lack_experts(monkeypatch, in_buffers):
    queue_by(monkeypatch, Grouping(0.85, 2, 4, 2))
    tokens = tokens_of("qwen3_moe")
    model = opened("qwen3_moe", 6, least_slots=TOP_K, in_buffers=in_buffers)
    for _ in range(3):
        run(model, tokens)
    accepted = calls(model.experts, "accept")
    run(model, tokens)
    assert not accepted
    queue_by(monkeypatch, Grouping(0.0, 2, 4, 2))
    run(model, tokens)
    assert accepted
    model.experts.close()


@BOTH
def test_a_failed_read_leaves_a_step_that_can_be_repeated(in_buffers):
    broken = []

    def preadv(fd, buffers, offset):
        if broken:
            raise OSError(5, "Input/output error")
        return os.preadv(fd, buffers, offset)

    tokens = tokens_of("qwen3_5_moe")
    model = opened("qwen3_5_moe", ahead=False)
    want = run(model, tokens)
    model.experts.close()
    model = opened("qwen3_5_moe", 40, preadv=preadv, least_slots=TOP_K, in_buffers=in_buffers)
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


def test_a_table_has_the_records_of_the_pool():
    model = opened("qwen3_moe")
    run(model, tokens_of("qwen3_moe"))
    source, pool = model.experts, model.experts.pools[0]

    def rows(table):
        return {expert: np.array(table.memory[expert]) for expert in table.slots}

    before = source.table(1)
    assert before is source.table(1)
    assert {(1, expert) for expert in before.slots} == {key for key in pool.records() if key[0] == 1}
    kept, gone = list(before.slots)[:2]
    was = rows(before)
    has_records = backend.name() != "cuda"  # there a table has addresses
    assert not has_records or all(np.array_equal(was[key], np.array(slot.device)) for key, slot in before.slots.items())
    pool.drop((1, gone))
    after = source.table(1)
    assert gone not in after.slots and gone in before.slots
    absent = [expert for expert in range(len(after.memory)) if expert not in after.slots]
    stand_ins = np.array(after.memory)[absent]
    assert gone in absent and (stand_ins == stand_ins[0]).all()  # no record that may have left the memory
    assert not stand_ins.any() if has_records else stand_ins.all() and stand_ins[0] not in rows(after).values()
    assert np.array_equal(was[kept], np.array(after.memory[kept]))
    with source.turn(1), source.request(1, np.array([gone])) as lease:
        lease.wait()
    assert not has_records or np.array_equal(rows(source.table(1))[gone], was[gone])
    ids = np.array([[gone, kept]])
    assert source.accept(1, ids, before) and not source.accept(1, ids, after)
    assert source.accept(1, ids, source.table(1))
    source.invalidate()
    assert source.table(1) is None
    source.close()


@BOTH
@pytest.mark.parametrize("prefetch", ["lookahead", "off"])
def test_what_dropped_layers_chose_is_read_ahead(prefetch, in_buffers):
    model = opened("qwen3_moe", in_buffers=in_buffers, prefetch=prefetch)
    source, tokens, hinted = model.experts, tokens_of("qwen3_moe"), []
    for _ in range(2):
        want = run(model, tokens)
    used = {}
    accept = source.accept
    source.accept = lambda layer, ids, table: used.update({layer: ids}) or accept(layer, ids, table)
    run(model, tokens)
    keys = [(layer, int(used[layer][0, -1])) for layer in (1, 2)]  # of the last token
    hint = source.hint
    source.hint = lambda keys: hinted.append(list(keys)) or hint(keys)
    cache = model.make_cache()
    for token in tokens[:-1]:
        mx.eval(model(mx.array([[token]]), cache))
    source.pools[0].finish_copies()
    for key in keys:
        source.pools[0].drop(key)
    hinted.clear()
    assert np.array_equal(np.array(model(mx.array([tokens[-1:]]), cache))[0, 0], want[-1])
    assert hinted[:2] == ([] if prefetch == "off" else [keys[:1], keys])
    source.close()


def test_layers_are_queued_only_if_kernels_read_their_records(monkeypatch):
    model = opened("qwen3_moe")
    assert all(layer.may_be_queued for layer in model.layers)
    for name, value in (("MAX_SLOTS", model.args.num_experts_per_tok - 1), ("is_read", lambda record: False)):
        with monkeypatch.context() as patch:
            patch.setattr(routed, name, value)
            assert not any(layer.may_be_queued for layer in model.layers)
    model.experts.close()


@BOTH
@pytest.mark.parametrize("together, shorter", [(2, 0), (3, 2)])
def test_the_pool_is_asked_between_groups_whether_memory_is_short(monkeypatch, together, shorter, in_buffers):
    queue_by(monkeypatch, Grouping(0.0, together, shorter, 2))
    model = opened("qwen3_moe", in_buffers=in_buffers)
    cache, tokens = model.make_cache(), tokens_of("qwen3_moe", 1)
    for _ in range(2):
        mx.eval(model(mx.array([tokens]), cache))
    asked, relieve = [], model.experts.relieve
    model.experts.relieve = lambda **given: asked.append(1) or relieve(**given)
    mx.eval(model(mx.array([tokens]), cache))
    groups = -(-(len(model.layers) + shorter) // together)
    assert len(asked) == 1 + groups  # and at the beginning of the call
    model.experts.close()


@pytest.mark.parametrize("seconds, together", [(1e-4, 2), (1e-3, 1)])
def test_a_slow_gpu_gets_smaller_groups(monkeypatch, seconds, together):
    queue_by(monkeypatch, Grouping(0.0, 2, 0, 2, optimistic.SLOW), Grouping(0.0, 1, 0, 2))
    model, now = opened("qwen3_moe", in_buffers=True), [0.0]
    model.optimistic.clock = lambda: now[0]
    accept, sizes = model.experts.accept, []

    def accept_in_time(layer, ids, table):
        now[0] += seconds
        return accept(layer, ids, table)

    model.experts.accept = accept_in_time
    monkeypatch.setattr(optimistic, "Group", lambda *parts: sizes.append(len(parts[1])) or Group(*parts))
    for _ in range(8):
        run(model, tokens_of("qwen3_moe"))
    assert sizes[0] == 2 and max(sizes[-8:]) == together
    model.experts.close()


# Two kernels: on CUDA for several rows, for records by themselves and for tables, and one of addresses; on Metal for
# rows and for tables.
@pytest.mark.parametrize("target, count", [("cuda", 7), ("metal", 4)])
def test_every_kernel_of_experts_is_listed(monkeypatch, target, count):
    """So that it is compiled before the first token."""
    with standing_in(backend=target):
        shapes = shapes_of(Namespace(variant=None, model=tiny_directory("qwen3_moe")))
    shapes = replace(shapes, dtype=mx.float32)
    listed = {program.file for program in programs_of(shapes, CODE, target=target)}
    built = set()
    chosen = np.arange(TOP_K, dtype=np.uint32)[None]
    monkeypatch.setattr(routed, "read_host_copy", lambda copy: (chosen, mx.zeros(chosen.shape)))

    def build(kernel, *of):
        def call(*, inputs, output_shapes, output_dtypes, **_):
            built.add(Program(kernel.text(*of), [one.dtype for one in inputs], output_dtypes).file)
            return list(map(mx.zeros, output_shapes, output_dtypes))

        return call

    with standing_in(backend=target, build=build):
        model = opened("qwen3_moe", in_buffers=target == "metal")
        arrange(model)
        cache = model.make_cache()
        for tokens in (1, 4, 1):  # a cache without tokens has no graph
            mx.eval(model(mx.ones((1, tokens), mx.int32), cache))
    model.experts.close()
    used = {name for name in built if "expert_" in name or "record_" in name}
    assert len(used) == count
    assert used <= listed

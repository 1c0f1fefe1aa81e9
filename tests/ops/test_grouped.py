"""Prompts on a GPU process an expert's rows in blocks: each row keeps its expert, and nothing else changes."""

from dataclasses import replace
from types import SimpleNamespace

import mlx.core as mx
import numpy as np
import pytest
from grids import drawn
from hypothesis import given
from hypothesis import strategies as st
from tile_choices import Chosen
from tiny_models import on_cpu, tiny_directory

from metal import msl
from moeflux_mlx.experts import routed
from moeflux_mlx.experts.routing import Routing, finished
from moeflux_mlx.formats.record import Record
from moeflux_mlx.opening.engine import load_model
from moeflux_mlx.opening.random_weights import random_records
from moeflux_mlx.ops import arrangement, backend, dequantize, grouped, native
from moeflux_mlx.ops.experts import Records, expert_ffn
from moeflux_mlx.ops.stand_ins import standing_in
from moeflux_mlx.ops.tiles import TILES, using
from moeflux_mlx.quant import Quant


@given(
    counts=st.lists(st.integers(1, 300), min_size=1, max_size=12),
    size=st.integers(1, 5),
    block=st.sampled_from([1, 16, 32]),
    dense=st.sampled_from([1, 32]),
)
def test_every_row_has_a_place_with_its_expert(counts, size, block, dense):
    counts = np.sort(counts)
    waves = [counts[i : i + size] for i in range(0, len(counts), size)]
    batches, places, source = arrangement.arrange(waves, block, dense)
    owner = np.repeat(np.arange(len(counts)), counts)
    assert np.array_equal(source[places], np.arange(len(owner)))
    end = first = 0
    for wave, batches_of_wave in zip(waves, batches, strict=True):
        assert [i for batch in batches_of_wave for i in range(len(wave))[batch.experts]] == list(range(len(wave)))
        for batch in batches_of_wave:
            assert batch.start == end
            each = batch.rows or batch.block
            members = range(len(wave))[batch.experts]
            assert all((wave[i] >= dense) == bool(batch.rows) for i in members)
            assert batch.rows or all(each == (block if 8 * wave[i] >= block else 1) for i in members)
            owners = batch.owners.tolist() if not batch.rows else range(len(members))
            for local in owners:
                rows = owner[source[end : end + each]]
                assert (rows == first + members[local]).all()
                end += each
        first += len(wave)
    assert end == len(source)


@given(st.lists(st.integers(1, 10**6), min_size=1))
def test_sizes_of_batched_products(counts):
    sizes = arrangement.filled(np.array(counts))
    assert (sizes >= counts).all() and (sizes - counts < np.maximum(np.array(counts) / 4 + 1, 32)).all()
    assert (sizes % 32 == 0).all()


@pytest.mark.parametrize("largest", [dequantize.LARGEST_INDEX, 1000])
@pytest.mark.parametrize("where", [[0], [2, 3, 4], [4, 1], [1, 4, 2, 3], [3, 3], [5, 0, 1]])
def test_blocks_are_dequantised_in_the_requested_order(where, largest, monkeypatch):
    monkeypatch.setattr(dequantize, "LARGEST_INDEX", largest)
    record = Record.make(64, 128, stride=64 * 128 * 2)
    blob = np.random.default_rng(5).integers(0, 1 << 32, (6, record.stride // 4), np.uint32)
    matrices = dequantize.dense(Records(mx.array(blob), record), np.array(where), mx.bfloat16)
    parts = [a for matrix in matrices for a in matrix]
    for part, component in zip(parts, record.fields, strict=True):
        want = blob.view(np.uint8)[where, component.offset : component.offset + component.size]
        got = np.array(mx.view(part.reshape(len(where), -1), mx.uint8))
        assert np.array_equal(got, want) and part.shape[1] == component.shape[0]


def test_no_column_of_a_large_pool_is_gathered(monkeypatch):
    """MLX would count in 32 bits (see `dequantize.dense`)."""
    record = Record.make(64, 128, stride=64 * 128 * 2)
    blob, gathered = mx.zeros((6, record.stride // 4), mx.uint32), []
    take = mx.take
    monkeypatch.setattr(mx, "take", lambda a, *rest, **named: gathered.append(a.shape) or take(a, *rest, **named))
    dequantize.dense(Records(blob, record), np.array([4, 1]), mx.bfloat16)
    assert len(gathered) == 9 and blob.shape not in gathered
    gathered.clear()
    monkeypatch.setattr(dequantize, "LARGEST_INDEX", blob.size - 1)
    dequantize.dense(Records(blob, record), np.array([4, 1]), mx.bfloat16)
    assert gathered == [blob.shape]


def test_one_bit_is_always_dequantised_on_cuda():
    """MLX's product with its codes computes nothing there."""
    records = [Record.make(64, 64, (Quant(bits, 64),) * 3) for bits in (1, 4)]
    with using(Chosen({"prompt_experts": replace(TILES["metal"]["prompt_experts"], dense=32)})):
        assert [grouped.dense_from("cuda", record) for record in records] == [1, 32]


@on_cpu()
@pytest.mark.parametrize(
    "quant", [Quant(4, 64), Quant(4, 32, "mxfp4"), Quant(4, 16, "nvfp4", has_global_scale=True)], ids=str
)
@pytest.mark.parametrize("has_bias", [False, True])
def test_views_of_records_give_the_bits_of_copies(monkeypatch, quant, has_bias):
    record = Record.make(64, 128, (quant,) * 3, has_bias=has_bias)
    records, counts = random_records(record, 6), np.array([1, 3, 4, 9, 70])
    x = mx.random.normal((87, 64)).astype(mx.bfloat16)
    slots = np.array([4, 0, 5, 1, 2])
    viewed = dequantize.views(records, x.dtype)
    assert (viewed is None) == quant.has_global_scale
    for matrix, copies in zip(viewed or [], dequantize.dense(records, np.arange(6), x.dtype), strict=False):
        assert all(mx.array_equal(*pair) for pair in zip(matrix, copies, strict=True))
    assert dequantize.views(records, mx.float32) is None or quant.scale != "float"

    def outputs():
        with standing_in(backend="metal", build=lambda *_: gathered):
            rows = grouped.GroupedRows(x, np.repeat(np.arange(5), counts)[:, None], counts, [np.arange(5)], record)
            rows.multiply(0, slots, records)
            return mx.concatenate(rows._outputs)

    blocks = outputs()
    monkeypatch.setattr(grouped, "views", lambda *_: None)
    assert mx.array_equal(blocks, outputs())
    monkeypatch.setattr(grouped, "views", lambda *_: viewed and [[one[::-1] for one in part] for part in viewed])
    assert viewed is None or not mx.array_equal(blocks, outputs())


def gathered(*, inputs, **_):
    """Takes the place of the kernel `gather_rows`."""
    return [inputs[0][inputs[1].reshape(-1)].reshape(*inputs[1].shape, -1)]


@on_cpu()
def test_views_of_records_copy_nothing():
    record = Record.make(64, 128)
    records = random_records(record, 6)
    mx.eval(records.blob)
    start = np.asarray(records.blob).__array_interface__["data"][0]
    for matrix, parts in zip(record.projections, dequantize.views(records, mx.bfloat16), strict=True):
        for part, field in zip(parts, matrix.codes, strict=True):
            array = np.array(part.view(mx.uint16) if part.dtype == mx.bfloat16 else part, copy=False)
            assert array.__array_interface__["data"][0] == start + field.offset
            assert array.strides[0] == record.stride


@pytest.mark.parametrize("name, rows", [("applegpu_g13s", 32), ("applegpu_g16d", 32), ("applegpu_g17s", 64), ("", 32)])
def test_blocks_are_as_long_as_a_tile_of_the_chip(monkeypatch, name, rows):
    monkeypatch.setattr(mx, "device_info", lambda: {"architecture": name})
    assert grouped.block_rows("metal") == rows
    assert grouped.block_rows("cuda") == 16


@pytest.mark.usefixtures("plain_operations")
@pytest.mark.parametrize("dense_from, sizes", drawn([1, 8, 10**9], [(16, 16384), (64, 16384), (4, 24)]))
def test_every_way_of_multiplying_gives_the_same(monkeypatch, sizes, dense_from, dense_from_rows):
    """Products from codes in blocks, from dequantised experts and in pieces are equal up to rounding."""
    model = load_model(tiny_directory("qwen3_moe"), dtype=mx.float32)
    tokens = mx.array(np.random.default_rng(4).integers(0, 240, (1, 45)))
    by_rows = np.array(model(tokens))
    block, piece = sizes
    monkeypatch.setitem(grouped.BLOCK_ROWS, backend.name(), block)
    dense_from_rows(dense_from)
    monkeypatch.setattr(grouped, "PIECE_ROWS", piece)
    np.testing.assert_allclose(np.array(model(tokens)), by_rows, atol=2e-5)
    monkeypatch.setattr(grouped, "arrange", shifted(grouped.arrange))
    assert np.abs(np.array(model(tokens)) - by_rows).max() > 1e-2, "a row with its neighbour's expert goes unseen"


def shifted(arrange):
    def wrong(*given):
        batches, places, source = arrange(*given)
        return batches, places, np.roll(source, 20)

    return wrong


WIDER = Record.make(64, 128, (Quant(8, 64), Quant(4, 32), Quant(6, 64)))


def expert(blob, slot):
    """Returns gate, up and down of a record in any form, as MLX dequantises them."""
    for projection in (WIDER.gate, WIDER.up, WIDER.down):
        parts = [mx.array(blob[slot, field.words]) for field in projection.fields]
        codes = parts[0].reshape(projection.fields[0].shape)
        scales, biases = (p.view(mx.bfloat16).reshape(projection.fields[1].shape) for p in parts[1:])
        quant = projection.quant
        wide = (scales.astype(mx.float32), biases.astype(mx.float32))
        yield np.array(mx.dequantize(codes, *wide, quant.group_size, quant.bits), np.float64)


@on_cpu()
@pytest.mark.parametrize(
    "kind",
    [pytest.param(np.array, marks=pytest.mark.skipif(not native.available(), reason="no extension")), mx.array],
)
def test_records_in_a_form_that_no_kernel_reads_go_to_the_twins(kind):
    rng = np.random.default_rng(8)
    blob = rng.integers(0, 1 << 32, (5, WIDER.stride // 4), np.uint32)
    for field in WIDER.fields:
        if field.dtype == "BF16":
            values = rng.uniform(-1e-3, 1e-3, (5, field.size // 2)).astype(np.float32)
            blob[:, field.words] = (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint32)
    records = Records(blob, WIDER)
    x, mid = rng.standard_normal((2, 3, 64)).astype(np.float32)
    slots, weights = np.array([[4, 1], [0, 4], [2, 2]], np.int32), rng.random((3, 2)).astype(np.float32)
    want, each = mid.astype(np.float64), {}
    for t, k in np.ndindex(3, 2):
        gate, up, down = expert(blob, slots[t, k])
        g = gate @ x[t]
        each[t, k] = down @ (g / (1 + np.exp(-g)) * (up @ x[t]))
        want[t] += weights[t, k] * each[t, k]
    got = expert_ffn(kind(x), slots, records, kind(weights), kind(mid), None)
    np.testing.assert_allclose(np.array(got), want, atol=1e-4)
    ids, waves = np.array([[0, 1], [2, 0], [3, 0]]), [np.array([1, 2]), np.array([3, 0])]
    rows = grouped.GroupedRows(kind(x), ids, np.bincount(ids.reshape(-1)), waves, WIDER)
    place = {0: 4, 1: 1, 2: 0, 3: 2}  # place of each expert among the records
    for i, wave in enumerate(waves):
        rows.multiply(i, np.array([place[expert] for expert in wave]), records)
    got = np.array(rows.combined(kind(weights), kind(mid), None))
    for t, k in np.ndindex(3, 2):
        gate, up, down = expert(blob, place[ids[t, k]])
        g = gate @ x[t]
        each[t, k] = down @ (g / (1 + np.exp(-g)) * (up @ x[t]))
    want = mid + sum(weights[:, k, None] * np.array([each[t, k] for t in range(3)]) for k in range(2))
    np.testing.assert_allclose(got, want, atol=1e-4)


@msl.needed
@pytest.mark.usefixtures("cpu_device")
@pytest.mark.parametrize("shared", [False, True])
def test_matrix_units_give_the_same_bits_in_waves_too(shared, monkeypatch):
    """Whether all experts are in memory, or come a few at a time and anywhere, in one launch or in several."""
    random = np.random.default_rng(11)
    T, K, E, record = 37, 3, 6, Record.make(64, 128)
    x, residual, beside = (mx.array(random.normal(size=(T, 64)), mx.bfloat16) for _ in range(3))
    ids = np.stack([random.permutation(E)[:K] for _ in range(T)]).astype(np.int32)
    weights, beside = mx.array(random.uniform(size=(T, K)), mx.float32), beside if shared else None
    blob, elsewhere = random_records(record, E).blob, random.permutation(E)
    moved = mx.array(np.array(blob)[np.argsort(elsewhere)])
    counts, waves = np.bincount(ids.reshape(-1), minlength=E), [np.array([4, 1]), np.array([0, 5, 2, 3])]
    with msl.launching(), using(Chosen({"expert_rows": TILES["cuda"]["expert_rows"]})):
        routing = Routing(0, mx.array(ids), weights)
        want = routed.at_once(routing, x, Records(blob, record), residual, beside)
        cases = (blob, waves, None), (moved, [elsewhere[wave] for wave in waves], None), (blob, waves, 10)
        for memory, slots, most in cases:
            monkeypatch.setattr(grouped, "most_rows", lambda record, most=most: most)
            records, rows = Records(memory, record), grouped.GroupedRows(x, ids, counts, waves, record, on_units=True)
            for i, own in enumerate(slots):
                rows.multiply(i, own, records)
            got = rows.combined(weights, residual, beside)
            assert got.dtype == mx.bfloat16 and mx.array_equal(got, want)
        plain = grouped.GroupedRows(x, ids, counts, waves, record)
        for i, own in enumerate(waves):
            plain.multiply(i, own, Records(blob, record))
        other = plain.combined(weights, residual, beside).astype(mx.float32)
        assert mx.abs(other - want.astype(mx.float32)).max() < 0.03 * mx.abs(other).max()


@msl.needed
@pytest.mark.usefixtures("cpu_device")
def test_rows_for_several_command_buffers_go_in_waves(monkeypatch):
    record = Record.make(64, 64)
    source = SimpleNamespace(layout=None, reads_ahead=False, at_close=lambda call: None)
    source.whole = lambda layer: random_records(record, 4)
    experts, asked = routed.RoutedExperts(source, "off"), []
    monkeypatch.setattr(routed, "at_once", lambda *given: asked.append("at once"))
    monkeypatch.setattr(routed, "in_waves", lambda *given: iter([asked.append("in waves")]))
    x, ids = mx.zeros((20, 64), mx.bfloat16), mx.zeros((20, 2), mx.int32)
    with msl.launching():
        for kernel, most in ((0, None), (1, None), (1, 40), (1, 39)):
            monkeypatch.setattr(grouped, "most_rows", lambda record, most=most: most)
            with using(Chosen({"prompt_experts": replace(TILES["metal"]["prompt_experts"], kernel=kernel)})):
                finished(experts.in_pieces(Routing(0, ids, mx.zeros((20, 2))), x, x, None))
    assert asked == ["in waves", "at once", "at once", "in waves"]

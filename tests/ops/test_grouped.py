"""Prefill on a GPU takes an expert's rows in blocks: each row keeps its expert, and nothing else changes."""

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import on_cpu, tiny_directory

from moeflux_mlx.engine.engine import load_model
from moeflux_mlx.formats.record import Record
from moeflux_mlx.ops import backend, grouped, native
from moeflux_mlx.ops.experts import Records, expert_ffn
from moeflux_mlx.quant import Quant


@given(counts=st.lists(st.integers(1, 70), min_size=1, max_size=9), size=st.sampled_from([1, 16, 32, 64]))
def test_every_row_has_a_place_in_a_block_of_its_expert(counts, size):
    local = np.repeat(np.arange(len(counts)), counts)
    source, owners, places = grouped.in_blocks(local, size)
    assert len(source) == len(owners) * size
    assert np.array_equal(source[places], np.arange(len(local)))
    assert np.array_equal(owners[places // size], local)
    assert np.all(np.diff(owners.astype(int)) >= 0) and len(owners) == sum(-(-count // size) for count in counts)
    assert np.all(np.delete(source, places) == 0)


@pytest.mark.parametrize("largest", [grouped.LARGEST_INDEX, 1000])
@pytest.mark.parametrize("where", [[0], [2, 3, 4], [4, 1], [1, 4, 2, 3], [3, 3], [5, 0, 1]])
def test_blocks_are_taken_apart_in_the_order_asked_for(where, largest, monkeypatch):
    monkeypatch.setattr(grouped, "LARGEST_INDEX", largest)
    record = Record.make(64, 128, stride=64 * 128 * 2)
    blob = np.random.default_rng(5).integers(0, 1 << 32, (6, record.words), np.uint32)
    matrices = grouped.dense(Records(mx.array(blob), record), np.array(where), mx.bfloat16)
    parts = [a for matrix in matrices for a in matrix]
    for part, component in zip(parts, record.fields, strict=True):
        want = blob.view(np.uint8)[where, component.offset : component.offset + component.size]
        got = np.array(mx.view(part.reshape(len(where), -1), mx.uint8))
        assert np.array_equal(got, want) and part.shape[1] == component.shape[0]


def test_no_column_of_a_large_pool_is_gathered(monkeypatch):
    """MLX would count in 32 bits: see `grouped.dense`."""
    record = Record.make(64, 128, stride=64 * 128 * 2)
    blob, gathered = mx.zeros((6, record.words), mx.uint32), []
    take = mx.take
    monkeypatch.setattr(mx, "take", lambda a, *rest, **named: gathered.append(a.shape) or take(a, *rest, **named))
    grouped.dense(Records(blob, record), np.array([4, 1]), mx.bfloat16)
    assert len(gathered) == 9 and blob.shape not in gathered
    gathered.clear()
    monkeypatch.setattr(grouped, "LARGEST_INDEX", blob.size - 1)
    grouped.dense(Records(blob, record), np.array([4, 1]), mx.bfloat16)
    assert gathered == [blob.shape]


@pytest.mark.parametrize("size", [16, 64])
def test_prefill_in_blocks_equals_prefill_by_rows(monkeypatch, size):
    monkeypatch.setattr(native, "available", lambda: False)
    monkeypatch.setattr(native, "warn_if_missing", lambda: None)
    model = load_model(tiny_directory("qwen3_moe"), dtype=mx.float32)
    tokens = mx.array(np.random.default_rng(4).integers(0, 240, (1, 45)))
    by_rows = np.array(model(tokens))
    monkeypatch.setitem(grouped.BLOCK_ROWS, backend.name(), size)
    np.testing.assert_allclose(np.array(model(tokens)), by_rows, atol=2e-5)
    monkeypatch.setattr(grouped, "in_blocks", shifted(grouped.in_blocks))
    assert np.abs(np.array(model(tokens)) - by_rows).max() > 1e-2, "a block with its neighbour's expert goes unseen"


def shifted(in_blocks):
    def wrong(local, size):
        source, owners, places = in_blocks(local, size)
        return source, np.roll(owners, 1), places

    return wrong


WIDER = Record.make(64, 128, (Quant(8, 64), Quant(4, 32), Quant(6, 64)))


def expert(blob, slot):
    """gate, up and down of a record in any form, as MLX unpacks them."""
    for projection in (WIDER.gate, WIDER.up, WIDER.down):
        parts = [mx.array(blob[slot, field.words]) for field in projection.fields]
        codes = parts[0].reshape(projection.fields[0].shape)
        scales, biases = (p.view(mx.bfloat16).reshape(projection.fields[1].shape) for p in parts[1:])
        quant = projection.quant
        wide = (scales.astype(mx.float32), biases.astype(mx.float32))
        yield np.array(mx.dequantize(codes, *wide, quant.group_size, quant.bits), np.float64)


@on_cpu()
@pytest.mark.parametrize("kind", [np.array, mx.array])
def test_records_in_a_form_that_no_kernel_reads_go_to_the_twins(kind):
    rng = np.random.default_rng(8)
    blob = rng.integers(0, 1 << 32, (5, WIDER.words), np.uint32)
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
    rows, where = np.array([0, 2, 0]), np.array([1, 2, 4], np.int32)
    out, places = grouped.expert_rows(kind(x), rows, where, records)
    found = np.array(out)[places]
    np.testing.assert_allclose(found, [each[0, 1], each[2, 0], each[0, 0]], atol=1e-4)

"""Values of chosen matrices: the ways of computing them, and each row by itself."""

import tracemalloc
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from tile_choices import Chosen

from moeflux_mlx.formats.record import Record
from moeflux_mlx.kinds import Router
from moeflux_mlx.mixers.grouped.spec import GroupedQuery
from moeflux_mlx.opening.random_weights import random_records
from moeflux_mlx.ops import backend, native
from moeflux_mlx.ops.dequantize import dense
from moeflux_mlx.ops.expert_rows import refusal
from moeflux_mlx.ops.forms import unpacked_float32
from moeflux_mlx.ops.records import Records
from moeflux_mlx.ops.tiles import TILES, using
from moeflux_mlx.ops.value_experts import COPIED, ValueRows, prompt_values, step_values
from moeflux_mlx.planning.memory_plan import Demand, value_temporaries
from moeflux_mlx.quant import Quant

pytestmark = pytest.mark.usefixtures("cpu_device")
COUNT, ROWS, COLUMNS, TOP = 6, 64, 128, 3
FORMS = [Quant(4, 64), Quant(8, 32), Quant(4, 16, "nvfp4", has_global_scale=True)]


def records_of(quant):
    """Returns value experts as MLX's array."""
    mx.random.seed(3)
    return random_records(Record.make(ROWS, COLUMNS, (quant,)), COUNT)


def given(count):
    """Returns rows, ids and weights of `count` tokens."""
    rng = np.random.default_rng(count)
    ids = np.stack([rng.permutation(COUNT)[:TOP] for _ in range(count)]).astype(np.int32)
    return rng.normal(size=(count, COLUMNS)).astype(np.float32), ids, rng.random((count, TOP)).astype(np.float32)


def of_prompt(x, ids, weights, records, group=COUNT):
    """Returns the values of a prompt, whose experts come in groups."""
    rows = ValueRows(x, np.array(ids))
    for first in range(0, len(rows.experts), group):
        some = slice(first, first + group)
        rows.multiply(some, records, rows.experts[some])
    return rows.weighed(weights)


def obvious(x, ids, weights, records):
    """Computes every product in float64, of which those count that were chosen."""
    (parts,) = dense(records, np.arange(COUNT), mx.float32)
    matrices = np.array(unpacked_float32(records.record.down.quant, *parts), np.float64)
    made = np.einsum("td,erd->ter", x.astype(np.float64), matrices)
    shares = np.zeros((len(x), COUNT))
    np.put_along_axis(shares, ids, weights, -1)
    return (made / (1 + np.exp(-made)) * shares[..., None]).sum(1)


@pytest.mark.parametrize("quant", FORMS)
@pytest.mark.parametrize("compute, count", [(step_values, 1), (step_values, 7), (of_prompt, 40)])
def test_chosen_products_equal_all_products(compute, count, quant):
    records, arrays = records_of(quant), given(count)
    wanted = obvious(*arrays, records)
    ways = [np.array(compute(*map(mx.array, arrays[:2]), mx.array(arrays[2]), records))]
    if native.available():
        ways.append(compute(*arrays, Records(np.array(records.memory), records.record)))
    for made in ways:
        assert np.abs(made - wanted).max() < 1e-5 * np.abs(wanted).max()


@pytest.mark.parametrize("kind", [mx.array, np.array])
def test_a_row_has_the_bits_that_it_has_alone(kind):
    records, arrays = records_of(FORMS[0]), [kind(one) for one in given(5)]
    if kind is np.array:
        records = Records(np.array(records.memory), records.record)
    together = np.array(step_values(*arrays, records))
    alone = [np.array(step_values(*(one[i : i + 1] for one in arrays), records)) for i in range(5)]
    assert np.array_equal(together, np.concatenate(alone))


@pytest.mark.parametrize("is_native", [True, False])
def test_the_memory_of_a_prompt_is_what_the_plan_counts(is_native):
    """Copies of matrices included, where MLX multiplies."""
    if is_native and not native.available():
        pytest.skip("the extension is not built")
    tokens, hidden, mixer = 512, 512, GroupedQuery(4, 4, 64, None, value_experts=Router(16, 4))
    counted = 4 * value_temporaries(hidden, mixer, tokens, Demand(0, native=is_native))
    records, rng = random_records(Record.make(256, hidden, (FORMS[0],)), 16), np.random.default_rng(0)
    ids = np.stack([rng.permutation(16)[:4] for _ in range(tokens)]).astype(np.int32)
    arrays = np.ones((tokens, hidden), np.float32), ids, np.ones(ids.shape, np.float32)
    records = Records(np.array(records.memory), records.record) if is_native else records
    x, ids, weights = arrays if is_native else map(mx.array, arrays)
    mx.eval(x, weights, records.memory)
    mx.clear_cache()
    mx.reset_peak_memory()
    tracemalloc.start()
    before = mx.get_active_memory()
    mx.eval(of_prompt(x, ids, weights, records, 8))
    peak = tracemalloc.get_traced_memory()[1] if is_native else mx.get_peak_memory() - before
    tracemalloc.stop()
    assert counted / 2 < peak < counted


def test_no_copies_are_counted_where_kernels_multiply():
    mixer = GroupedQuery(4, 4, 64, None, value_experts=Router(16, 4))
    copied, read = (value_temporaries(512, mixer, 512, Demand(0, on_units=units)) for units in (False, True))
    assert copied - read == 2 * COPIED * 256 * 512


@pytest.mark.parametrize("kind", [mx.array, np.array])
def test_groups_of_a_prompts_experts_change_no_bit(kind):
    records, (x, ids, weights) = records_of(FORMS[0]), given(60)
    if kind is np.array:
        records = Records(np.array(records.memory), records.record)
    made = [np.array(of_prompt(kind(x), ids, kind(weights), records, group)) for group in (1, 4, COUNT)]
    assert np.array_equal(made[0], made[1]) and np.array_equal(made[0], made[2])


@pytest.mark.parametrize("quant", FORMS[:2])
def test_kernels_multiply_a_prompts_rows(host, quant):
    """With all experts there, and in groups: the same bits."""
    records, (x, ids, weights) = records_of(quant), given(40)
    with using(Chosen({"prompt_experts": replace(TILES[backend.name()]["prompt_experts"], kernel=1)})):
        assert not refusal(mx.bfloat16, records.record)
        rows, of_ids, shares = mx.array(x, mx.bfloat16), mx.array(ids), mx.array(weights)
        made = np.array(prompt_values(rows, of_ids, shares, records).astype(mx.float32))
        others = [np.array(of_prompt(rows, ids, shares, records, group).astype(mx.float32)) for group in (2, COUNT)]
    assert all(np.array_equal(made, other) for other in others)
    wanted = obvious(np.array(rows.astype(mx.float32)), ids, weights, records)
    assert np.abs(made - wanted).max() < 1e-2 * np.abs(wanted).max()

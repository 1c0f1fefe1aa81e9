"""Records in several buffers: the bits of one array, whatever buffer and row a record lies in, and one kernel text."""

from collections import Counter

import mlx.core as mx
import numpy as np
import pytest
from grids import drawn
from test_expert_rows import case as rows_case
from test_expert_rows import computed
from test_kernels import Experts
from test_moe_launches import Layer
from tile_choices import Chosen
from tiny_models import use_plain_operations

from metal import msl
from moeflux_mlx.experts.places import BUFFERS
from moeflux_mlx.formats.record import Record
from moeflux_mlx.kinds import Router
from moeflux_mlx.opening.random_weights import random_records
from moeflux_mlx.ops import dequantize, experts, grouped, launch
from moeflux_mlx.ops.records import MISSING, ROW_BITS, Records, words_of
from moeflux_mlx.ops.route import Choice, read_ids, route
from moeflux_mlx.ops.stand_ins import standing_in
from moeflux_mlx.ops.tiles import TILES, using

pytestmark = pytest.mark.usefixtures("cpu_device")
ROWS = 3


@pytest.fixture
def plain(monkeypatch):
    use_plain_operations(monkeypatch)


def scattered(records, seed=0, rows=ROWS):
    """Returns the records in buffers of `rows` rows, with other contents elsewhere, and the slot of each."""
    blob, rng = np.array(records.blob), np.random.default_rng(seed)
    count = -(-len(blob) // rows) + 1
    memory = rng.integers(0, 2**32, (count, rows, blob.shape[1]), dtype=np.uint32)
    places = rng.permutation(count * rows)[: len(blob)]
    memory.reshape(-1, blob.shape[1])[places] = blob
    buffers = tuple(map(mx.array, memory))
    slots = (places // rows << ROW_BITS) + places % rows
    assert count <= BUFFERS and len(set(slots >> ROW_BITS)) > 1
    return Records((*buffers, *[buffers[0]] * (BUFFERS - count)), records.record), slots


@pytest.mark.parametrize("kind", ["host", "plain"])
@pytest.mark.parametrize("T, K", [(1, 4), (3, 5), (2, 9)])
def test_a_step_has_the_same_bits_in_buffers(kind, T, K, request):
    request.getfixturevalue(kind)
    together, apart = (Experts(7, T, K, 128, 64, mx.bfloat16, records=12) for _ in range(2))
    apart.records, slots = scattered(together.records)
    apart.slots = slots[together.slots]
    assert mx.array_equal(together.gate_up(), apart.gate_up())
    assert mx.array_equal(together.down_combine(), apart.down_combine())


def test_a_step_with_a_shared_expert_has_the_same_bits_in_buffers(host):
    """A missing input is replaced by the first buffer, which may also stand for missing buffers."""
    together, apart = (Experts(7, 1, 4, 128, 64, mx.bfloat16, records=5) for _ in range(2))
    apart.records, slots = scattered(together.records)
    apart.slots = slots[together.slots]
    assert mx.array_equal(together.down_combine(shared=False), apart.down_combine(shared=False))


def tabled(records, count, missing):
    """Returns the records in `count` buffers with a table in which some are missing, and the same in one array, where
    those are zeros."""
    blob, rng = np.array(records.blob), np.random.default_rng(count)
    rows = -(-len(blob) // count)
    memory = rng.integers(0, 2**32, (count, rows, blob.shape[1]), dtype=np.uint32)
    places = rng.permutation(count * rows)[: len(blob)]
    memory.reshape(-1, blob.shape[1])[places] = blob
    slots = ((places // rows << ROW_BITS) + places % rows).astype(np.uint32)
    for expert in missing:
        memory.reshape(-1, blob.shape[1])[places[expert]] = 0xFFFFFFFF  # NaN, if it were read
        slots[expert], blob[expert] = MISSING, 0
    buffers = tuple(map(mx.array, memory))
    buffers = (*buffers, *[buffers[0]] * (BUFFERS - count))
    return Records(buffers, records.record, slots=mx.array(slots)), Records(mx.array(blob), records.record)


def check_choice(count, K, absent, with_shared):
    """A kernel that finds records by a table gives the bits of all records in one array, and the host the same ids."""
    layer, rule = Layer(K, 1, K, 64, 64, mx.bfloat16, columns=9, records=8), Router(8, K)
    choice, shared = Choice(layer.logits, rule), layer.shared if with_shared else None
    ids = np.array(route(layer.logits, rule)[0])[0].tolist()
    missing = {"none": [], "first": ids[:1], "last": ids[-1:], "all": ids}[absent]
    own, whole = tabled(layer.records, count, missing)
    copies: list[mx.array] = []
    got = experts.chosen_ffn(layer.x, choice, own, layer.h_mid, shared, 8, copies)
    assert mx.array_equal(got, experts.chosen_ffn(layer.x, choice, whole, layer.h_mid, shared))
    assert read_ids(copies)[0].tolist() == ids


BY_TABLE = drawn(range(1, 9), range(1, 9), ["none", "first", "last", "all"], [False, True])


@pytest.mark.parametrize("count, K, absent, with_shared", BY_TABLE)
def test_a_choice_by_a_table_has_the_bits_of_one_array(host, count, K, absent, with_shared):
    check_choice(count, K, absent, with_shared)


def test_the_operations_find_records_by_a_table(plain):
    for count, K, absent in ((1, 1, "first"), (3, 4, "last"), (8, 8, "all"), (2, 5, "none")):
        check_choice(count, K, absent, False)


@msl.needed
@pytest.mark.parametrize(
    "file, old, new",
    [
        ("codes.h.metal", "return slots[id];", "return slots[id] + 1;"),
        ("expert_choice.metal", "if (TABLED && k < K && slot[0] == CODES_MISSING)", "if (false)"),
        ("expert_down_combine.metal", "if (TABLED && k < K && uint(slots", "if (false && uint(slots"),
        ("expert_choice.metal", "topk_copy(host_copy, k, found);", "topk_copy(host_copy, k, slot[0]);"),
    ],
)
def test_a_fault_in_a_choice_by_a_table_is_caught(host, monkeypatch, file, old, new):
    msl.plant(monkeypatch, file, old, new)
    with pytest.raises((AssertionError, msl.Failure)):
        check_choice(3, 4, "last", True)


FIELDS = Record.make(64, 128, stride=64 * 128 * 2)


@pytest.mark.parametrize("kind", ["host", "plain"])
@pytest.mark.parametrize("where", [[0], [2, 3, 4], [4, 1, 5, 0, 3], [3, 3]])
def test_fields_are_taken_from_buffers(kind, where, request):
    request.getfixturevalue(kind)
    records = random_records(FIELDS, 6)
    buffers, slots = scattered(records)
    for dtype in (mx.bfloat16, mx.float32):
        want, got = (dequantize.dense(*given, dtype) for given in ((records, np.array(where)), (buffers, slots[where])))
        assert all(mx.array_equal(a, b) for x, y in zip(want, got, strict=True) for a, b in zip(x, y, strict=True))
    index = mx.array(where, mx.uint32), mx.array(slots[where], mx.uint32)
    want, got = (
        dequantize.dequantized_records(*given, mx.bfloat16) for given in ((records, index[0]), (buffers, index[1]))
    )
    assert all(map(mx.array_equal, want, got))


@pytest.mark.parametrize("words", [slice(4, 12), slice(4, 7), slice(5, 9), slice(0, 4096)])
def test_any_words_are_taken(host, words):
    records = random_records(FIELDS, 6)
    buffers, slots = scattered(records)
    got = words_of(buffers, mx.array(slots), words)
    assert np.array_equal(np.array(got), np.array(records.blob)[:, words])


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
def test_sorted_rows_have_the_same_bits_in_buffers(host, dtype):
    with using(Chosen({"expert_rows": TILES["cuda"]["expert_rows"]})):
        records, x, starts, source, slots = rows_case(Record.make(64, 128), [9, 0, 4, 17], dtype)
        buffers, places = scattered(records)
        want = computed(records, x, starts, source, slots)
        assert mx.array_equal(computed(buffers, x, starts, source, places[slots]), want)


@pytest.mark.parametrize("kind", ["host", "plain"])
@pytest.mark.parametrize("dense_from", [1, 8, 10**9])
def test_a_prompt_has_the_same_bits_in_buffers(kind, dense_from, request, dense_from_rows):
    """Experts with many rows are dequantised, those with few are multiplied from their codes."""
    request.getfixturevalue(kind)
    dense_from_rows(dense_from)
    random = np.random.default_rng(11)
    T, K, E, record = 37, 3, 6, Record.make(64, 128)
    x = mx.array(random.normal(size=(T, 64)), mx.bfloat16)
    ids = np.stack([random.permutation(E)[:K] for _ in range(T)]).astype(np.int32)
    records, waves = random_records(record, E), [np.array([4, 1]), np.array([0, 5, 2, 3])]
    buffers, slots = scattered(records)
    outputs = []
    for memory, own in ((records, waves), (buffers, [slots[wave] for wave in waves])):
        rows = grouped.GroupedRows(x, ids, np.bincount(ids.reshape(-1), minlength=E), waves, record)
        for i, wave in enumerate(own):
            rows.multiply(i, wave, memory)
        outputs.append(rows.outputs())
    assert mx.array_equal(*outputs)


def test_no_buffer_is_made_one_array(host):
    with pytest.raises(AssertionError):
        scattered(random_records(FIELDS, 6))[0].blob  # noqa: B018


def test_one_text_for_any_number_of_buffers(host, monkeypatch):
    """A buffer that does not exist is replaced by the first, so nothing is compiled as buffers come and go."""
    texts = Counter()
    launch.built.cache_clear()  # a GPU may have built them for another test
    text = launch.Kernel.text
    monkeypatch.setattr(launch.Kernel, "text", lambda *given: (made := text(*given), texts.update([made.name]))[0])
    e = Experts(7, 1, 4, 128, 64, mx.bfloat16, records=6)
    memory, slots = scattered(e.records)
    e.slots = slots[e.slots]
    for count in (3, 2, 1):  # those that follow need not exist for this
        first = memory.memory[:count]
        e.records = Records((*first, *[first[0]] * (BUFFERS - count)), memory.record)
        mx.eval(e.gate_up(), e.down_combine(shared=False))
    assert set(texts.values()) == {1}


@msl.needed
@pytest.mark.parametrize(
    "old, new",
    [("int(slot >> row_bits) == i", "int(slot >> row_bits) == i - 1"), ("slot & ((1u << row_bits) - 1)", "slot & 1u")],
)
def test_another_buffer_or_row_is_seen(host, monkeypatch, old, new):
    msl.plant(monkeypatch, "codes.h.metal", old, new)
    together, apart = (Experts(7, 1, 4, 128, 64, mx.bfloat16, records=12) for _ in range(2))
    apart.records, slots = scattered(together.records)
    apart.slots = slots[together.slots]
    assert not mx.array_equal(together.gate_up(), apart.gate_up())


def test_a_compiled_step_is_traced_once_for_any_number_of_buffers():
    calls = []

    def build(kernel, *_):
        def call(*, inputs, output_shapes, output_dtypes, **_):
            calls.append((kernel.name, len(inputs)))
            return [mx.zeros(shape, dtype) for shape, dtype in zip(output_shapes, output_dtypes, strict=True)]

        return call

    e = Experts(7, 1, 4, 128, 64, mx.bfloat16, records=6)
    memory, slots = scattered(e.records)

    def run(memory, x, slots, weights, residual):
        return experts.expert_ffn(x, slots, Records(memory, e.records.record), weights, residual, None)

    step = mx.compile(run)
    with standing_in(backend="metal", build=build):
        for count in (1, 2, 3):
            arrays = (*memory.memory[:count], *[memory.memory[0]] * (BUFFERS - count))
            weights = mx.zeros((1, 4), mx.float32)
            mx.eval(step(arrays, e.x, mx.array(slots[e.slots]), weights, e.h_mid))
    assert calls == [("expert_gate_up", BUFFERS + 2), ("expert_down_combine", BUFFERS + 4)]

"""The experts of a prompt as products of small matrices, Metal's and CUDA's: sorting by expert, and the products of
many rows in every stored form.
"""

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from grids import drawn, is_full, taking_turns
from hypothesis import given
from hypothesis import strategies as st
from tile_choices import Chosen

from metal import msl
from moeflux_mlx.errors import RequestError
from moeflux_mlx.formats.record import Record
from moeflux_mlx.kinds import FORMS, Activation
from moeflux_mlx.opening.random_weights import random_records
from moeflux_mlx.ops import backend
from moeflux_mlx.ops import expert_rows as rows
from moeflux_mlx.ops.dequantize import dense, linear_biases
from moeflux_mlx.ops.elementwise import activate
from moeflux_mlx.ops.experts import Records
from moeflux_mlx.ops.forms import unpacked_float32
from moeflux_mlx.ops.tiles import TILES, Tile, using
from moeflux_mlx.quant import GGUF_MODES, MODES, Quant

pytestmark = pytest.mark.usefixtures("cpu_device")
TILE = {"expert_rows": Tile(rows=2, lanes=32, simdgroups=2, ahead=2)}


@pytest.fixture
def host():
    with msl.launching(), using(Chosen(TILE)):
        yield


@pytest.fixture(params=["simdgroup", "matrix"])
def units(request, monkeypatch):
    """The harness runs the text of either GPU."""
    with msl.launching():
        if backend.name() == "cuda" and request.param != rows.UNITS["cuda"]:
            pytest.skip("an NVIDIA GPU")
        monkeypatch.setitem(rows.UNITS, backend.name(), request.param)
        with using(Chosen(TILE)):
            yield request.param


def sorted_pairs(ids, experts):
    order = np.argsort(ids.reshape(-1), kind="stable")
    places = np.empty(ids.size, np.int64)
    places[order] = np.arange(ids.size)
    counts = np.bincount(ids.reshape(-1), minlength=experts)
    return rows.starts_of(counts), order // ids.shape[1], places.reshape(ids.shape)


@given(tokens=st.integers(1, 70), top_k=st.integers(1, 4), experts=st.integers(4, 19), seed=st.integers(0, 1 << 30))
def test_pairs_are_sorted_by_expert_and_token(tokens, top_k, experts, seed):
    random = np.random.default_rng(seed)
    ids = np.stack([random.permutation(experts)[:top_k] for _ in range(tokens)]).astype(np.uint32)
    with msl.launching():
        got = rows.sort_by_expert(mx.array(ids), experts)
    for part, want in zip(got, sorted_pairs(ids, experts), strict=True):
        assert np.array_equal(np.array(part), want)


def in_floats(units, records, x, starts, source, slots):
    """Returns the outputs in float32 from dequantised matrices, with the same roundings of weights and activation."""
    record, dtype, made = records.record, x.dtype, []
    stored = mx.float32 if units == "simdgroup" else dtype
    parts, biases = dense(records, np.array(slots), mx.float32), linear_biases(records, np.array(slots), mx.float32)
    matrices = [
        np.array(unpacked_float32(one.quant, *part).astype(stored).astype(mx.float32))
        for one, part in zip(record.projections, parts, strict=True)
    ]
    biases = [np.array(one) for one in biases] if biases else [np.zeros((len(slots), 1), np.float32)] * 3
    x = np.array(x.astype(mx.float32))
    for expert in np.flatnonzero(np.diff(starts)):  # MLX's CUDA build divides by zero in a function of no rows
        own = x[np.array(source)[starts[expert] : starts[expert + 1]]]
        products = [own @ matrices[i][expert].T + biases[i][expert] for i in range(len(record.firsts))]
        gate, up = products[0], products[-1]
        if record.interleaved:
            both = np.concatenate([gate, up], axis=-1)
            gate, up = both[:, ::2], both[:, 1::2]
        act = activate(mx.array(gate), mx.array(up), record.activation).astype(dtype).astype(mx.float32)
        made.append(np.array(act) @ matrices[-1][expert].T + biases[-1][expert])
    return np.concatenate(made)


def case(record, counts, dtype, seed=3):
    random = np.random.default_rng(seed)
    blob = np.array(random_records(record, len(counts) + 2).blob)
    for field in record.fields:
        words = blob[:, field.words]
        if field.part == "grid":
            continue
        if field.dtype == "U8" and record.gate.quant.is_nested:
            data = words.view(np.uint8).reshape(len(blob), -1, MODES[record.gate.quant.mode].nested)
            header = 2 * MODES[record.gate.quant.mode].header
            data[..., header:] = random.integers(0, 256, data[..., header:].shape)
            blob[:, field.words] = data.reshape(len(blob), -1).view(np.uint32)
        elif field.dtype == "U8":  # scales near 1 / 16: E8M0 or E4M3
            near = 123 if record.gate.quant.group_size == 32 else 24
            scales = random.integers(near - 3, near + 3, (len(blob), 4 * words.shape[1])).astype(np.uint8)
            blob[:, field.words] = scales.view(np.uint32)
        elif field.dtype == "BF16":
            floats = random.normal(size=(len(blob), 2 * words.shape[1])).astype(np.float32) / record.hidden_size
            blob[:, field.words] = (floats.view(np.uint32) >> 16).astype(np.uint16).view(np.uint32)
        elif field.dtype == "U32" and record.gate.quant.mode == "mxfp8":
            blob[:, field.words] = words & 0xBEBEBEBE  # no code for NaN
    records = Records(mx.array(blob), record)
    tokens = max(max(counts), 3)
    x = mx.array(random.normal(size=(tokens, record.hidden_size)), dtype)
    source = np.concatenate([random.permutation(tokens)[:count] for count in counts]).astype(np.uint32)
    slots = random.permutation(len(counts) + 2)[: len(counts)].astype(np.uint32)
    return records, x, rows.starts_of(counts), source, slots


def computed(records, x, starts, source, slots):
    return rows.expert_rows(x, mx.array(starts), mx.array(source), mx.array(slots), records)


def error(given):
    got, units = np.array(computed(*given).astype(mx.float32)), rows.UNITS[backend.name()]
    with mx.stream(mx.cpu):  # MLX's CUDA build does not dequantise 1 bit
        want = in_floats(units, *given)
    return np.abs(got - want).max() / np.abs(want).max()


FORMS_OF_CODES = [Quant(bits, 64) for bits in (1, 2, 3, 4, 5, 6, 8)]
FORMS_OF_CODES += [Quant(4, 32), Quant(4, 128), Quant(4, 32, "mxfp4"), Quant(8, 32, "mxfp8"), Quant(4, 16, "nvfp4")]
OF_GGUF = GGUF_MODES if is_full() else ("q3_k", "q4_k")
FORMS_OF_CODES += [Quant(GGUF_MODES[name].bits, GGUF_MODES[name].group_size, name) for name in OF_GGUF]
UNITS = ["simdgroup", "matrix"]  # both read codes by the same headers


LIMITS = {mx.bfloat16: 8e-3, mx.float16: 2e-3, mx.float32: 2e-6}


@pytest.mark.parametrize("quant, units", taking_turns(FORMS_OF_CODES, UNITS), indirect=["units"], ids=str)
def test_every_form_of_codes(units, quant):
    width = 128 if quant.is_of_mlx else 256
    assert error(case(Record.make(256, width, (quant,) * 3), [5, 0, 19], mx.bfloat16)) < LIMITS[mx.bfloat16]


@pytest.mark.parametrize("dtype", LIMITS)
def test_every_number_of_rows(units, dtype):
    if dtype != mx.float32 or units == "simdgroup":
        assert error(case(Record.make(64, 64), [0, 1, 7, 8, 9, 33], dtype)) < LIMITS[dtype]


@pytest.mark.parametrize(
    "shape, counts, dtype",
    drawn([(64, 64), (192, 64), (128, 320), (64, 704)], [[1], [17, 0, 8, 70], [33, 16]], [mx.bfloat16, mx.float16]),
)
def test_every_shape(units, shape, counts, dtype):
    assert error(case(Record.make(*shape), counts, dtype)) < LIMITS[dtype]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("interleaved", [False, True])
def test_every_activation(host, form, interleaved):
    activation = Activation(form, 0.5 if "clip" in form else None, 0.5 if form == "situ" else None)
    record = Record.make(64, 64, activation=activation, interleaved=interleaved, has_bias=interleaved)
    assert error(case(record, [9, 4], mx.bfloat16)) < LIMITS[mx.bfloat16]


@pytest.mark.usefixtures("both_builds")
@pytest.mark.parametrize("tile", [Tile(1, 32, 1), Tile(4, 32, 3, ahead=4), Tile(8, 32, 4, ahead=1)], ids=str)
def test_a_row_has_the_same_bits_at_every_tile_and_among_any_others(units, tile):
    record = Record.make(128, 192)
    records, x, starts, source, slots = case(record, [21, 3, 40], mx.bfloat16)
    want = computed(records, x, starts, source, slots)
    with using(Chosen({"expert_rows": tile})):
        assert mx.array_equal(computed(records, x, starts, source, slots), want)
    alone = np.array([5, 22, 60])
    own, owners = source[alone], np.searchsorted(starts, alone, side="right") - 1
    got = computed(records, x, np.arange(4, dtype=np.uint32), own, slots[owners])
    assert mx.array_equal(got, want[mx.array(alone)])


FAULTS = {
    "another row of x": ("expert_rows.metal", "matrix_x_row(lane) + j %", "matrix_place(lane) + j %"),
    "the first expert's codes": ("expert_rows.metal", "uint(slots[expert])", "uint(slots[0])"),
    "columns beyond the last": ("matrix_rows.h.metal", "there ? matrix_w", "true ? matrix_w"),
    "a token's last block": ("expert_rows.metal", "if (place < stop)", "if (place + 1 < stop)"),
}
OF_MATRIX = {
    "halves of a pair": ("matrix.h.metal", "uint(as_type<ushort>(X(first)))", "uint(as_type<ushort>(X(second)))"),
    "rows of a product": ("matrix.h.metal", "own[2], second", "own[0], second"),
}
OF_SIMDGROUP = {
    "another lane's row": ("simdgroup.h.metal", "(lane / 4 & 4) + lane / 2 % 4", "lane / 4"),
    "another lane's chunk": ("simdgroup.h.metal", "matrix_row(lane) / 2", "matrix_row(lane) % 4"),
    "columns of a pair": ("simdgroup.h.metal", "both.y = w[4 + two]", "both.y = w[3 - two]"),
    "one row of x twice": ("simdgroup.h.metal", "from + at[1]", "from + at[0]"),
    "half of the columns": ("simdgroup.h.metal", "i < 4; i++", "i < 3; i++"),
    "the other eight rows": ("simdgroup.h.metal", "a[2 * i + r].x", "a[2 * i].x"),
}


def sees(monkeypatch, file, old, new):
    msl.plant(monkeypatch, file, old, new)
    try:
        with using(Chosen(TILE)):
            return not error(case(Record.make(192, 64), [9, 4], mx.bfloat16)) < LIMITS[mx.bfloat16]
    except msl.Failure:  # two lanes write one value
        return True


@msl.needed
@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_planted_faults_are_seen(host, monkeypatch, fault):
    assert sees(monkeypatch, *fault)


@msl.needed
@pytest.mark.parametrize("fault", [*OF_MATRIX.values(), *OF_SIMDGROUP.values()], ids=[*OF_MATRIX, *OF_SIMDGROUP])
def test_faults_of_units_are_seen(monkeypatch, fault):
    monkeypatch.setitem(rows.UNITS, "metal", fault[0].partition(".")[0])
    with msl.launching():
        assert sees(monkeypatch, *fault)


def test_what_the_kernels_do_not_take(host):
    record = Record.make(64, 64)
    with pytest.raises(RequestError, match="float32"):
        rows.plan_rows("cuda", (1, record.size // 4), 1, 1, mx.float32, record, False)
    assert rows.refusal(mx.float32, record) and rows.refusal(mx.float32)
    assert "moeflux tune" in rows.refusal_on("metal", mx.bfloat16, record)
    with using(Chosen({"prompt_experts": replace(TILES["metal"]["prompt_experts"], kernel=1)})):
        assert all(rows.refusal_on("metal", dtype, record) is None for dtype in LIMITS)
        assert rows.refusal_on("metal", mx.bfloat16, Record.make(96, 64, (Quant(4, 32),) * 3))
    assert "float32" in rows.refusal_on("cuda", mx.float32, record)
    for one in (record, Record.make(64, 64, (Quant(4, 32, "mxfp4"),) * 3)):
        assert rows.refusal_on("cuda", mx.bfloat16, one) is None
    assert rows.refusal_on("cuda", mx.bfloat16, Record.make(96, 64, (Quant(4, 32),) * 3))  # rows of 96 columns

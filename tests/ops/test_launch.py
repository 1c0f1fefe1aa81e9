"""How the launcher passes a kernel's inputs: each array once, parts of arrays, constants."""

import re
from types import SimpleNamespace

import mlx.core as mx
import numpy as np
import pytest
from tiny_models import tiny_directory

from metal import msl
from moeflux_mlx.files import directory
from moeflux_mlx.layers import Linear
from moeflux_mlx.model.weights import arrange
from moeflux_mlx.opening.engine import load_model
from moeflux_mlx.ops import launch
from moeflux_mlx.ops.launch import Kernel, Launch, in_turn, pack
from moeflux_mlx.ops.stand_ins import standing_in
from moeflux_mlx.quant import EXPERTS

TYPES = (mx.float32, mx.bfloat16, mx.float16, mx.uint32, mx.uint8)


@pytest.fixture
def handed(monkeypatch):
    """Collects the names of the inputs of every launch."""
    seen, build = [], Kernel.build

    def built(kernel, *given):
        made = build(kernel, *given)

        def call(*, inputs, **arguments):
            seen.append((kernel.name, len(inputs)))
            return made(inputs=inputs, **arguments)

        return call

    monkeypatch.setattr(Kernel, "build", built)
    return seen


def some(dtype, *shape):
    values = np.random.default_rng(shape).integers(0, 200, shape)
    return mx.array(values).astype(dtype)


def test_packed_arrays_are_found_again():
    arrays = [some(dtype, 3, 5 * i + 1) for i, dtype in enumerate(TYPES)]
    for array, piece in zip(arrays, pack(arrays), strict=True):
        assert piece.start % launch.ALIGNED == 0 and piece.dtype == array.dtype
        assert mx.array_equal(piece.array(*array.shape), array)


def test_a_packed_array_is_a_view():
    piece = pack([some(mx.uint32, 64), some(mx.bfloat16, 1 << 20)])[1]
    mx.synchronize()
    before = mx.get_active_memory()
    view = piece.array(1 << 10, 1 << 10)
    mx.eval(view)
    assert mx.get_active_memory() - before < view.nbytes // 2


SUM = "const uint i = thread_position_in_grid.x;\nout[i] = float(a[i]) + 10.0f * float(b[i]) + c[0];\n"


def add(monkeypatch, a, b, c):
    monkeypatch.setattr(launch, "text_of", lambda name: SUM)
    monkeypatch.setattr(launch, "headers_of", lambda *given: [])
    run = Launch("metal", Kernel("sum", "a b c", "out"), {}, (1, 1), 8, [((8,), mx.float32)])
    return np.array(run(a, b, c)[0])


@msl.needed
@pytest.mark.parametrize("c", [0.1, 1e-6, -3.0, 1e30])
def test_inputs_may_be_parts_numbers_and_one_array_twice(handed, host, monkeypatch, c):
    joined = some(mx.bfloat16, 16)
    first, last = in_turn(joined, joined[:8], joined[8:])
    values = np.array(joined.astype(mx.float32))
    ends = np.float32(values[:8] + 10 * values[8:]) + np.float32(c)
    assert np.array_equal(add(monkeypatch, first, last, c), ends)
    assert np.array_equal(add(monkeypatch, joined, last, c), ends)
    twice = np.float32(11 * values[8:]) + np.float32(c)
    assert np.array_equal(add(monkeypatch, last, last, c), twice)
    assert np.array_equal(add(monkeypatch, *[joined[8:]] * 2, c), twice)
    assert handed == [("sum", 1)] * 4


def test_a_part_of_a_small_array_is_refused():
    """Metal passes an array of fewer than eight values as another kind of pointer."""
    whole = some(mx.float32, launch.LEAST_ELEMENTS)
    assert launch.placed(in_turn(whole, whole[:3], whole[3:]))[0] == [whole]
    with pytest.raises(AssertionError, match="a part of an array of 7 values"):
        launch.placed(in_turn(whole[1:], whole[:3], whole[3:]))


@pytest.mark.parametrize("target, count", [("metal", 31), ("metal", 32), ("cuda", 32)])
def test_metal_passes_31_arrays(target, count):
    """More are refused here and in the harness, not by a Mac's GPU."""
    call = launch.Launch(target, Kernel("many", f"x*{count - 1}", "y"), {}, (1, 1), 32, [((8,), mx.float32)])
    made = []
    with standing_in(build=lambda *_: lambda **given: made.append(len(given["inputs"]))):
        if (target, count) == ("metal", 32):
            with pytest.raises(AssertionError, match="many has 32 arrays"):
                call(*(some(mx.float32, 8) for _ in range(count - 1)))
        else:
            call(*(some(mx.float32, 8) for _ in range(count - 1)))
            assert made == [count - 1]
    names = ",\n".join(f"device float* x{i} [[buffer({i})]]" for i in range(count))
    text = f"[[kernel]] void many({names}) {{\n}}"
    if count > 31:
        with pytest.raises(msl.Failure, match="32 arrays; Metal passes at most 31"):
            msl.translation_unit(text)
    else:
        assert "msl_entry" in msl.translation_unit(text)


def test_numbers_become_pointers_only_where_a_launch_passes_them():
    for kind, is_defined in (("const device uint64_t*", True), ("const device uint32_t*", False)):
        text = f"[[kernel]] void one({kind} blob [[buffer(0)]]) {{\n}}"
        assert ("#define CODES_ADDRESSES" in msl.translation_unit(text)) is is_defined


@msl.needed
def test_different_sources_have_different_names(host, monkeypatch):
    """MLX keeps what it compiled by name."""
    a, b = some(mx.float32, 8), some(mx.float32, 9)[1:]
    got = [add(monkeypatch, a, b, c) for c in (1.0, 2.0)] + [add(monkeypatch, a, a, 1.0)]
    assert np.array_equal(got[1] - got[0], np.ones(8)) and np.array_equal(got[2], 11 * np.array(a) + 1)


def test_cuda_source_names_existing_files(monkeypatch):
    made = []
    monkeypatch.setattr(mx.fast, "cuda_kernel", lambda **definition: made.append(SimpleNamespace(**definition)))
    x = some(mx.float32, 64)
    pieces = pack([x, x])
    places = launch.placed([x, *pieces, x, x, 1e-6, x])[1]
    Kernel("qmv", "x w scales biases norm eps residual", "y", "affine4").build("cuda", "", 64, places)
    (text,) = made
    names = [line.split('"')[1] for line in (text.header + text.source).splitlines() if line.startswith("#include")]
    folder = directory("metal")
    wanted = [
        "cuda_shim",
        "nested.h.metal",
        "codes.h.metal",
        "affine4.h.metal",
        "input.h.metal",
        "lane.h.metal",
        "qmv.metal",
    ]
    assert sorted(names) == sorted(str(folder / (n if "." in n else f"{n}.h")) for n in wanted)
    assert len(text.header + text.source) < 1500 and text.input_names == ["x", "w_"]


@msl.needed
def test_a_packed_matrix_gives_the_same_bits(handed, host, small_products):
    layer, other = (Linear(128, 96) for _ in range(2))
    rng = np.random.default_rng(3)
    for each in (layer, other):
        each.quant = EXPERTS
    parts = {
        "weight": mx.array(rng.integers(0, 2**32, (96, 16), np.uint32)),
        "scales": mx.array(rng.normal(size=(96, 2))).astype(mx.bfloat16),
        "biases": mx.array(rng.normal(size=(96, 2))).astype(mx.bfloat16),
    }
    for name, value in parts.items():
        setattr(layer, name, value)
        setattr(other, name, value)
    layer.pack()
    for name, value in parts.items():
        assert mx.array_equal(layer[name], value)
    for tokens in (1, 3):
        x = mx.array(rng.normal(size=(tokens, 128))).astype(mx.bfloat16)
        del handed[:]
        assert mx.array_equal(layer(x), other(x))
        number = int(tokens > 1)  # the number of rows, an input if there are several rows
        assert [count for _, count in handed] == [2 + number, 4 + number]
    layer.weight = other.weight = mx.array(rng.integers(0, 2**32, (96, 16), np.uint32))
    assert mx.array_equal(layer(x), other(x))


@pytest.mark.usefixtures("plain_operations")
@msl.needed
@pytest.mark.usefixtures("cpu_device")
@pytest.mark.parametrize("family", [pytest.param("qwen3_moe", marks=pytest.mark.full), "qwen3_5_moe"])
def test_a_packed_model_gives_the_same_bits_from_fewer_arrays(handed, family, small_products):

    model = load_model(tiny_directory(family), dtype=mx.bfloat16, expert_io="mmap")
    logits, counts = [], []
    with msl.launching():
        for prepare in (lambda model: None, arrange):
            prepare(model)
            cache = model.make_cache()
            mx.eval(model(mx.array([list(range(5, 25))]), cache))
            del handed[:]
            logits.append(np.array(model(mx.array([[7]]), cache).astype(mx.float32)))
            counts.append(sum(count for _, count in handed) / len(model.layers))
    assert np.array_equal(*logits)
    assert counts[1] < 30 < counts[0]


FORMS = {
    f"{form}.h.metal" for form in ("affine", "affine4", "affine4_halves", "e2m1", "e4m3", "planes", "pairs", "tables")
}  # these define the same functions
# Forms that another form's functions read when they have been loaded.
BESIDE = {"tables.h.metal": {"affine.h.metal"}, "table_planes.h.metal": {"planes.h.metal", "tables.h.metal"}}
BESIDE["codes.h.metal"] = {"nested.h.metal"}
UNITS = {"matrix.h.metal", "simdgroup.h.metal"}  # and so do these
DEFINED = re.compile(r"^(?:(?:#define|struct) |(?:inline|constexpr)[^;{(=]* (?=\w+\())(\w+)", re.M)


def test_each_text_names_the_headers_that_it_uses():
    """A source uses a header if it has a word that the header defines."""
    files = [file.name for file in directory("metal").iterdir() if file.name.endswith(".metal")]
    texts = {name: re.sub("//.*", "", launch.text_of(name)) for name in files}
    owners = {}
    for header in (name for name in files if name.endswith(".h.metal")):
        for word in DEFINED.findall(texts[header]):
            parameter = "{form}.h.metal" if header in FORMS else "{units}.h.metal" if header in UNITS else header
            parameter = "codes.h.metal" if header == "nested.h.metal" else parameter  # whose part it is
            owners.setdefault(word, set()).add(parameter)
    owners["codes_x8"].remove("input.h.metal")  # an overload of a function of codes.h.metal
    for word in ("codes_load", "codes_from_row", "codes_words_each", "codes_groups"):  # and so are these of forms
        owners[word].remove("{form}.h.metal")
    for name, text in texts.items():
        used = set().union(*(owners[word] for word in owners.keys() & re.findall(r"\w+", text)))
        own = (
            {name, "codes.h.metal"}
            if name == "nested.h.metal"
            else {name, "{form}.h.metal"}
            if name in FORMS
            else {name, "{units}.h.metal"}
            if name in UNITS
            else {name}
        )
        assert set(launch.needs_of(name)) - BESIDE.get(name, set()) == used - own, name


def test_headers_follow_those_that_they_need():
    assert launch.headers_of("expert_choice.metal", "planes") == [
        f"{name}.h.metal" for name in ("nested", "codes", "bytes", "planes", "lane", "swiglu", "softplus", "topk")
    ]


def test_a_missing_header_is_named():
    with pytest.raises(FileNotFoundError, match=r"metal/qmv\.metal needs affine7\.h\.metal, which does not exist"):
        Kernel("qmv", "x w scales biases norm eps residual", "y", "affine7").build("metal", "", 64, (0.0,) * 7)

"""The harness itself: right kernels give right answers, broken ones are caught, other people's kernels run."""

import ast
import itertools
import pathlib
import re

import mlx.core as mx
import numpy as np
import pytest
from grids import drawn

from moeflux_mlx.files import directory
from moeflux_mlx.ops.launch import text_of

from . import fast, faults, msl

pytestmark = msl.needed
SHAPES = [(128, 64), (256, 136), (1024, 192)]


# Fewer than 8 slots arrive as `constant`.
@pytest.mark.parametrize("sizes, dtype, slots", drawn(SHAPES, [mx.float32, mx.bfloat16, mx.float16], [4, 8], turns=2))
def test_sample_kernel_matches_oracle(sizes, dtype, slots):
    case = faults.sample(dtype, *sizes, slots)
    (out,) = msl.run(faults.kernel(), case.inputs, **case.call)
    assert case.error(out) < faults.LIMITS[dtype]


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_host_text_differs_by_few_edits(dtype):
    case = faults.sample(dtype, 128, 64)
    text = msl.generate(faults.kernel(), case.inputs, **case.call)
    head, last = text.rstrip().rsplit("\n", 1)
    assert last.startswith("template [[host_name(")
    assert msl.host_text(text).replace("MSL_TG_ARRAY", "threadgroup").rstrip() == head.rstrip()


@pytest.mark.parametrize("name", faults.FAULTS)
def test_fault_is_caught(name):
    fault = faults.FAULTS[name]
    assert faults.caught_by(fault) == fault.caught_by


def planted():
    """Yields (test file, kernel's file, text) of each planted fault, where the text stands behind the file's name."""
    for path in sorted(pathlib.Path(__file__).parents[1].glob("ops/test_*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            parts = node.elts if isinstance(node, ast.Tuple) else node.args if isinstance(node, ast.Call) else ()
            values = [getattr(part, "value", None) for part in parts]
            for file, old in itertools.pairwise(values):
                if str(file).endswith(".metal") and isinstance(old, str):
                    yield path.name, file, old


def test_kernels_have_the_text_that_planted_faults_replace():
    """By default only one in three faults is planted."""
    faults_of_tests = [*planted()]
    assert len(faults_of_tests) > 100
    assert [fault for fault in faults_of_tests if fault[2] not in text_of(fault[1])] == []


def test_missing_compiler_names_the_remedy(monkeypatch):
    monkeypatch.setattr(msl, "COMPILER", "no-such-clang++")
    with pytest.raises(msl.Failure, match="apt-get install clang"):
        msl.require_compiler()


# A lane's two values of a matrix are where MLX's `BaseMMAFrag::get_coord` has them.
PRODUCT = """
  const uint lane = thread_index_in_simdgroup, quad = lane / 4;
  const uint at = 8 * ((quad & 4) + (lane / 2) % 4) + (quad & 2) * 2 + (lane % 2) * 2;
  simdgroup_matrix<float, 8, 8> left, right, sum;
  for (uint i = 0; i < 2; i++) {
    left.thread_elements()[i] = a[at + i];
    right.thread_elements()[i] = b[at + i];
    sum.thread_elements()[i] = 0;
  }
  simdgroup_multiply_accumulate(sum, left, right, sum);
  simdgroup_multiply_accumulate(sum, left, right, sum);
  out[at] = sum.thread_elements()[0];
  out[at + 1] = sum.thread_elements()[1];
"""


def test_products_of_small_matrices():
    a, b = np.random.default_rng(2).integers(-9, 9, (2, 8, 8)).astype(np.float32)
    kernel = mx.fast.metal_kernel(name="product", input_names=["a", "b"], output_names=["out"], source=PRODUCT)
    call = {"grid": (32, 1, 1), "threadgroup": (32, 1, 1), "output_shapes": [(8, 8)], "output_dtypes": [mx.float32]}
    (out,) = msl.run(kernel, [mx.array(a), mx.array(b)], **call)
    assert np.array_equal(out, 2 * a @ b)


# ---- arithmetic


def computed(expression, values, header=""):
    """Returns what a kernel makes of float32 values x."""
    x = mx.array(np.asarray(values, np.float32))
    source = f"const uint i = thread_position_in_grid.x;\nout[i] = {expression};"
    names = {"input_names": ["x"], "output_names": ["out"]}
    made = msl.HostKernel(name="computed", **names, header=header, source=source)
    call = {"grid": (x.size, 1, 1), "threadgroup": (x.size, 1, 1)}
    return np.array(made(inputs=[x], output_shapes=[x.shape], output_dtypes=[mx.float32], **call)[0], np.float64)


def test_denormal_floats_are_zero_and_denormal_halves_are_not():
    tiny = np.full(8, 2.0**-128)
    assert not computed("2.0f * x[i]", tiny).any()
    assert not computed("1e-20f * x[i]", np.full(8, 1e-19)).any()
    assert (computed("float(half(x[i]))", np.full(8, 2.0**-24)) == 2.0**-24).all()


@pytest.mark.usefixtures("both_builds")
def test_contraction_is_seen_unless_a_text_forbids_it():
    values, unfused = np.random.default_rng(0).normal(size=32), "#pragma METAL fp contract(off)\n"
    exact = np.float32(values).astype(np.float64) ** 2 - 1.0
    with pytest.raises(msl.Failure, match="the result depends on contraction"):
        computed("x[i] * x[i] - 1.0f", values)
    assert np.array_equal(computed("metal::fma(x[i], x[i], -1.0f)", values), np.float32(exact))
    assert not np.array_equal(computed("x[i] * x[i] - 1.0f", values, unfused), np.float32(exact))


def ulps(count):
    return lambda x, exact: count(np.abs(x)) * np.spacing(np.float32(exact)).astype(np.float64)


def absolute(error):
    return lambda x, exact: np.full(x.shape, error)


# Between which arguments a fast function errs by how much: table 8.2 of Metal's specification (version 4.1).
FAST = [
    ("exp", np.exp, -20, 20, ulps(lambda x: 3 + np.floor(2 * x))),
    ("exp2", np.exp2, -20, 20, ulps(lambda x: 3 + np.floor(2 * x))),
    ("log", np.log, 0.5, 2, absolute(2**-21)),
    ("log", np.log, 2, 100, ulps(lambda x: 3)),
    ("log2", np.log2, 0.5, 2, absolute(2**-22)),
    ("log2", np.log2, 2, 100, ulps(lambda x: 2)),
    ("sin", np.sin, -np.pi, np.pi, absolute(2**-13)),
    ("cos", np.cos, -np.pi, np.pi, absolute(2**-13)),
    ("rsqrt", lambda x: x**-0.5, 0.1, 100, ulps(lambda x: 2)),
]


@pytest.mark.parametrize("name, function, low, high, bound", FAST)
def test_fast_functions_err_as_they_may(name, function, low, high, bound):
    """In both directions, and by all that the specification allows; precise ones do not."""
    x = np.float32(np.random.default_rng(1).uniform(low, high, 256)).astype(np.float64)
    share = {}
    for kind in ("metal", "metal::fast", "metal::precise"):
        share[kind] = (computed(f"{kind}::{name}(x[i])", x) - function(x)) / bound(x, function(x))
    assert np.array_equal(share["metal"], share["metal::fast"])
    assert share["metal"].min() < -0.6 and share["metal"].max() > 0.6 and np.abs(share["metal"]).max() < 1.6
    assert np.abs(share["metal::precise"]).max() < 0.6


def test_rotations_of_prompts_err_like_those_of_steps():
    angle = np.float32(np.random.default_rng(2).uniform(-300, 300, 64))
    cosine, sine = fast.cosine_and_sine(mx.array(angle))
    np.testing.assert_allclose(computed("metal::fast::cos(x[i])", angle), np.array(cosine), atol=2e-7)
    np.testing.assert_allclose(computed("metal::fast::sin(x[i])", angle), np.array(sine), atol=2e-7)


# ---- the text that MLX prepends


def preamble(name="utils"):
    """Returns what MLX's Metal build prepends to a kernel, made as its make_compiled_preamble.sh makes it: a header of
    the installed wheel, behind those that it includes."""
    root, seen = pathlib.Path(mx.__file__).parent / "include", []

    def expand(path):
        seen.append(path)
        text = (root / path).read_text()
        included = [one for one in re.findall(r'(?m)^#include "(.*)"', text) if one not in seen]
        return "".join(map(expand, included)) + text

    text = expand(f"mlx/backend/metal/kernels/{name}.h")
    return re.sub(r"//.*|/\*(?s:.*?)\*/", "", text)


def declared(text):
    """Returns the names that a text of `metal/` declares at namespace scope."""
    outside = re.sub(r"(?m)^[ })].*", "", text)
    kinds = r"(?:inline|constexpr)\b.*?(\w+)\(", r"(?:struct|using|#define) (\w+)", r"typedef .*?(\w+);"
    return {name for kind in kinds for name in re.findall(rf"(?m)^{kind}", outside)}


TEXTS = sorted(path for path in directory("metal").iterdir() if path.name.endswith(".metal"))


def test_no_name_is_one_of_the_preamble():
    """At the installed version of MLX."""
    theirs = preamble()
    words, macros = set(re.findall(r"\w+", theirs)), set(re.findall(r"(?m)^\s*#define (\w+)", theirs))
    assert {"bfloat16_t", "float16_t", "ceildiv", "MLX_MTL_PRAGMA_UNROLL"} <= words and "instantiate_kernel" in macros
    ours = {path.name: re.sub("//.*", "", path.read_text()) for path in TEXTS}
    names = {name: declared(text) for name, text in ours.items() if name.endswith(".h.metal")}
    assert {"codes_load", "codes_pointer"} <= names["codes.h.metal"] and "KvUnit" in names["kv_rows.h.metal"]
    assert not {file: names[file] & words for file in names if names[file] & words}
    used = {name: set(re.findall(r"\w+", text)) & macros - {"MLX_MTL_PRAGMA_UNROLL"} for name, text in ours.items()}
    assert not {file: found for file, found in used.items() if found}


def test_declared_names_are_found():
    text = "inline uint log1p(float x) {\n  const int y = f(x);\n}\nstruct Limits {\n#define MTL_CONST 1\n"
    assert declared(text) == {"log1p", "Limits", "MTL_CONST"}


FUNCTIONS = "exp|exp2|exp10|log|log2|log10|sin|cos|tan|tanh|pow|sqrt|rsqrt|divide"


def test_every_text_says_which_function_it_means():
    """Without a namespace it is the precise one on macOS 14, and from 15 on the fast one."""
    for path in TEXTS:
        text = re.sub("//.*", "", path.read_text())
        assert not re.findall(rf"(?<!metal::fast::)(?<!metal::precise::)\b(?:{FUNCTIONS})\(", text), path.name


CODES = ["block_round.h.metal", "block_round.metal", "kv_rows.h.metal"]  # texts that round values to codes


@pytest.mark.parametrize("name", CODES)
def test_a_quotient_that_decides_a_code_is_rounded_correctly(name):
    """Metal's own `/` of floats is not: a value on a tie would get the other code. Sizes are integers."""
    assert {path.name for path in TEXTS if "rint(" in path.read_text()} <= set(CODES)
    text = re.sub("//.*", "", next(path for path in TEXTS if path.name == name).read_text())
    sizes = r"(?!LARGEST|LEAST)[A-Z_]+\b|kv_group\(|sizeof\(|127\.0f\)"
    assert not re.findall(rf".* / (?!{sizes}).*", text)


# ---- kernels written by others, unchanged


@pytest.fixture
def gated_delta(monkeypatch):
    """Loads mlx-lm's module, whose kernels exist only if Metal is there when it is imported."""
    import importlib

    monkeypatch.setattr(mx.fast, "metal_kernel", lambda **definition: msl.HostKernel(**definition))
    with monkeypatch.context() as patch:
        patch.setattr(mx.metal, "is_available", lambda: True)
        module = importlib.reload(importlib.import_module("mlx_lm.models.gated_delta"))
    yield module
    monkeypatch.undo()
    importlib.reload(module)


def relative_error(a: mx.array, b: mx.array) -> float:
    a, b = a.astype(mx.float32), b.astype(mx.float32)
    return (mx.abs(a - b).max() / mx.abs(b).max()).item()


@pytest.mark.parametrize("name", ["gated_delta_kernel", "gated_delta_kernel_unpacked", "gated_delta_kernel_xtree"])
def test_gated_delta_of_mlx_lm(gated_delta, name):
    rng = np.random.default_rng(0)

    def normal(*shape: int, scale: float = 1.0) -> mx.array:
        return mx.array((rng.normal(size=shape) * scale).astype(np.float32))

    B, T, Hk, Hv, Dk, Dv = 1, 3, 2, 4, 128, 64
    q, k, v = normal(B, T, Hk, Dk, scale=0.1), normal(B, T, Hk, Dk, scale=0.1), normal(B, T, Hv, Dv)
    g, beta, state = mx.sigmoid(normal(B, T, Hv)), mx.sigmoid(normal(B, T, Hv)), normal(B, Hv, Dv, Dk)
    y, after = getattr(gated_delta, name)(q, k, v, g, beta, state)
    want_y, want_after = gated_delta.gated_delta_ops(q, k, v, g, beta, state)
    assert relative_error(y, want_y) < 1e-5
    assert relative_error(after, want_after) < 1e-5

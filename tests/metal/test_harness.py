"""The harness itself: right kernels give right answers, broken ones are caught, other people's kernels run."""

import mlx.core as mx
import numpy as np
import pytest
from grids import drawn

from . import faults, msl

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

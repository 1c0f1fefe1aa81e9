"""The check of a machine's values: right ones pass, planted faults do not."""

import mlx.core as mx
import numpy as np
import pytest

from metal import msl
from moeflux_mlx.ops import native
from moeflux_mlx.ops.linear import linear
from moeflux_mlx.ops.observe import observing
from moeflux_mlx.planning.machine import activation_bits, default_dtype
from moeflux_mlx.tools import checkup


def test_values_are_right_here():
    checks = checkup.check_operations(default_dtype())
    assert [check.name for check in checks] == ["product", "experts", "routing"]
    assert all(check.is_right and check.seconds >= 0 for check in checks), checks


def test_nan_is_an_error():
    assert not checkup.Check("product", float("nan"), 1.0, 0.0).is_right


FAULTS = {  # what of `checkup` is wrong, and which values are not right then
    "expert_ffn": (lambda right: lambda x, slots, *rest: right(x, slots[:, ::-1].copy(), *rest), ["experts"]),
    "dense": (lambda right: lambda *given: right(*given)[:, ::-1], ["product", "experts"]),
    "route": (lambda right: lambda *given: (right(*given)[0], right(*given)[1] * 1.001), ["routing"]),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_wrong_slot_order_of_codes_or_weight_is_seen(monkeypatch, name):
    fault, wrong = FAULTS[name]
    monkeypatch.setattr(checkup, name, fault(getattr(checkup, name)))
    assert [check.name for check in checkup.check_operations(mx.float32) if not check.is_right] == wrong


@msl.needed
@pytest.mark.usefixtures("cpu_device")
@pytest.mark.parametrize("given", [384, 1024])
def test_the_threads_that_metal_gives_are_found(given):
    """Checks MLX's words of refusal, and that the kernel compiles."""

    class Kernel(msl.TextKernel):
        def __init__(self, *, header, **definition):
            super().__init__(header=header, **definition)
            self.limit = 1024 if header else given

        def __call__(self, *, threadgroup, **call):
            super().__call__(threadgroup=threadgroup, **call)
            words = f"Thread group size ({threadgroup[0]}) is greater than  the maximum allowed threads per threadgroup"
            raise ValueError(f"{words} ({self.limit}).")

    with msl.launching(Kernel):
        assert checkup.thread_limits() == (given, 1024)
    assert len(msl.TextKernel.texts) == 2


def test_a_kernel_that_metal_cannot_build_gets_no_threads(monkeypatch):
    def refused(**definition):
        raise RuntimeError("[metal::Device] Unable to load kernel")

    monkeypatch.setattr(mx.fast, "metal_kernel", refused)
    assert checkup.thread_limits() == (0, 0)


@pytest.mark.skipif(not native.available(), reason="only the native kernels round activations")
def test_the_rate_of_products_is_that_of_models(cpu_device):
    """They round activations by default, which takes about half of the time."""
    seen = []

    def look(matrix, x):
        if not seen:
            seen.append((matrix, x))
            seen.append(linear(x, matrix))

    with observing(look):
        checkup.product_rate(mx.float32)
    (matrix, x), product = seen
    with native.activations(activation_bits("auto", None)):
        assert np.array_equal(linear(x, matrix), product)
    assert not np.array_equal(linear(x, matrix), product)

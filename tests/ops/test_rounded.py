"""Products with rounded activations: as close to float64 as rounding allows, and the same bits in every
implementation.
"""

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from grids import drawn, examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ops.test_forms import Experts, Stored

from moeflux_mlx.formats.record import Record
from moeflux_mlx.ops import native
from moeflux_mlx.quant import Quant

PATHS = [path for path in native.instruction_paths() if path != "portable"] if native.available() else []
pytestmark = pytest.mark.skipif(not PATHS, reason="no instruction set here has such products")
MXFP4 = Quant(4, 32, "mxfp4")
FORMS = [(Quant(bits, group), kind) for bits in (4, 8) for group in (32, 64, 128) for kind in ("BF16", "F16", "F32")]
FORMS.append((MXFP4, "U8"))
MOST = {8: 127, 16: 32639}  # relative to an activation's integer, and to its group's largest activation
few = settings(max_examples=examples(25), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
forms = st.sampled_from(FORMS)
widths = st.integers(1, 11).map(lambda n: 128 * n)
seeds = st.integers(0, 2**32 - 1)
bits = pytest.mark.parametrize("bits", MOST)


@pytest.fixture(autouse=True)
def fastest_afterwards(team):
    yield
    native.use_path(PATHS[0])


def product(x, quant, parts, bits, path=PATHS[0] if PATHS else ""):
    native.use_path(path)
    with native.activations(bits):
        return native.linear(x, quant, *parts)


def allowed(x, matrix, quant, bits):
    """Returns the allowed error: half a step of each activation times its weight, and float32's own rounding."""
    groups = np.abs(x.astype(np.float64)).reshape(len(x), -1, quant.group_size)
    step = np.repeat(groups.max(-1) / MOST[bits], quant.group_size, -1)
    return step / 2 @ np.abs(matrix.values).T * 1.0001 + 2e-6 * np.abs(x) @ matrix.largest.T


def check(form, rows, width, tokens, seed, bits, spoil=lambda parts: parts):
    rng = np.random.default_rng(seed)
    quant, kind = form
    matrix = Stored(rng, rows, width, quant, kind)
    x = rng.standard_normal((tokens, width), dtype=np.float32) * rng.choice([1e-12, 1, 1e12]).astype(np.float32)
    got = product(x, quant, spoil(matrix.parts), bits)
    assert (np.abs(got - x @ matrix.values.T) <= allowed(x, matrix, quant, bits)).all()
    return x, matrix, got


@bits
@few
@given(form=forms, rows=st.integers(1, 40), width=widths, tokens=st.integers(1, 20), seed=seeds)
def test_errors_are_those_of_rounding(bits, form, rows, width, tokens, seed):
    check(form, rows, width, tokens, seed, bits)


@bits
@pytest.mark.parametrize("part, shift", [(0, 1), (0, 4), (1, 1), (2, 1)])
def test_the_bound_sees_faults(bits, part, shift):
    def spoil(parts):
        return [np.roll(array, shift, -1) if i == part else array for i, array in enumerate(parts)]

    with pytest.raises(AssertionError):
        check((Quant(4, 64), "F32"), 40, 640, 5, 0, bits, spoil)


def test_8_bits_are_less_exact_than_16():
    x, matrix, got = check((Quant(4, 64), "BF16"), 40, 640, 5, 0, 8)
    far = np.abs(got - x @ matrix.values.T) > allowed(x, matrix, Quant(4, 64), 16)
    assert far.mean() > 0.5, "the exact product, or 16 bits, answered"


@bits
@few
@given(form=forms, rows=st.integers(1, 40), width=widths, tokens=st.integers(1, 20), seed=seeds)
def test_one_set_of_bits(bits, form, rows, width, tokens, seed):
    """Compares every path and number of threads, and rows alone and among others."""
    x, matrix, got = check(form, rows, width, tokens, seed, bits)
    for path in PATHS:
        native.set_threads(1 + seed % 3)
        assert np.array_equal(product(x, form[0], matrix.parts, bits, path), got)
        alone = [product(x[t : t + 1], form[0], matrix.parts, bits, path)[0] for t in range(tokens)]
        assert np.array_equal(alone, got)


@pytest.mark.parametrize("form, tokens, bits", drawn(FORMS, [1, 3, 9, 40], MOST, turns=2))
def test_experts_are_their_products(bits, form, tokens):
    """Compares experts bit by bit with the single products of gate, up and down, and their weighted sum."""
    quant, kind = form
    made = Experts((quant,) * 3, kind, tokens)
    with native.activations(bits):
        act = native.expert_gate_up(made.x, made.blob, made.slots, made.record)
        out = native.expert_down_combine(act, made.blob, made.slots, made.record, made.weights, made.mid)
        rows = []
        for t, k in np.ndindex(made.slots.shape):
            gate, up, down = (matrix.parts for matrix in made.matrices[made.slots[t, k]])
            inner = native.activate(*(native.linear(made.x[t : t + 1], quant, *parts) for parts in (gate, up)))
            assert np.array_equal(inner[0], act[t, k])
            rows.append(native.linear(inner, quant, *down)[0])
    where = np.arange(len(rows), dtype=np.int32).reshape(made.slots.shape)
    assert np.array_equal(out, native.combine(np.stack(rows), where, made.weights, made.mid))


@bits
@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("tokens", [1, 6])
def test_nan_stays_nan(bits, value, tokens):
    matrix = Stored(np.random.default_rng(0), 9, 192, Quant(4, 64), "BF16")
    x = np.ones((tokens, 192), np.float32)
    x[0, 100] = value
    got = product(x, Quant(4, 64), matrix.parts, bits)
    assert not np.isfinite(got[0]).any() and np.isfinite(got[1:]).all()


@bits
def test_zeros_and_ends(bits):
    """The largest value of a group may have either sign, and a group of zeros has no largest value."""
    matrix = Stored(np.random.default_rng(0), 9, 192, Quant(4, 64), "BF16")
    for peak in (1.0, -1.0, 1e30, -1e-25, 0.0):
        x = np.full((1, 192), -peak, np.float32)
        x[0, 70] = peak
        error = np.abs(product(x, Quant(4, 64), matrix.parts, bits) - x.astype(np.float64) @ matrix.values.T)
        assert (error <= 2e-6 * np.abs(x.astype(np.float64)) @ matrix.largest.T).all()


@pytest.mark.parametrize("quant, kind", [(Quant(5, 64), "BF16"), (Quant(2, 32), "F16")])
def test_other_forms_are_exact(quant, kind):
    rng = np.random.default_rng(0)
    matrix, x = Stored(rng, 9, 256, quant, kind), rng.standard_normal((3, 256), dtype=np.float32)
    assert np.array_equal(product(x, quant, matrix.parts, 8), product(x, quant, matrix.parts, native.EXACT))


def test_the_choice_ends_with_its_block():
    rng = np.random.default_rng(0)
    matrix, x = Stored(rng, 9, 256, Quant(4, 64), "BF16"), rng.standard_normal((3, 256), dtype=np.float32)
    exact = native.linear(x, Quant(4, 64), *matrix.parts)
    with pytest.raises(KeyError), native.activations(8):
        with native.activations(native.EXACT):
            assert np.array_equal(native.linear(x, Quant(4, 64), *matrix.parts), exact)
        assert not np.array_equal(native.linear(x, Quant(4, 64), *matrix.parts), exact)
        raise KeyError
    assert np.array_equal(native.linear(x, Quant(4, 64), *matrix.parts), exact)


def test_other_bits_are_refused():
    matrix, x = Stored(np.random.default_rng(0), 9, 64, Quant(4, 64), "BF16"), np.ones((1, 64), np.float32)
    with pytest.raises(ValueError, match="activations of 12 bits, expected 8, 16 or 24"), native.activations(12):
        native.linear(x, Quant(4, 64), *matrix.parts)
    with pytest.raises(ValueError, match="12 bits"), native.activations(12):
        native.expert_gate_up(x, np.zeros((2, 3 * 576), np.uint32), np.zeros((1, 2), np.int32), Record.make(64, 64))


def arm_compiler():
    """Returns a command that compiles for AArch64, if there is one."""
    if gcc := shutil.which("aarch64-linux-gnu-gcc"):
        return [gcc]
    zig = [sys.executable, "-m", "ziglang", "cc", "-target", "aarch64-linux-musl"]
    return zig if importlib.util.find_spec("ziglang") else None


NATIVE = Path(__file__).resolve().parents[2] / "native"
HERE, ARM = shutil.which("gcc") or shutil.which("clang"), arm_compiler()


@pytest.mark.full
@pytest.mark.skipif(not HERE, reason="needs gcc or clang")
@pytest.mark.skipif(not ARM, reason="needs gcc-aarch64-linux-gnu or ziglang, which compile for AArch64")
@pytest.mark.skipif(not shutil.which("qemu-aarch64"), reason="needs qemu-user, which emulates AArch64")
def test_an_emulated_arm_has_the_same_bits(tmp_path):
    """Compares both of AArch64's instruction sets with all of this processor's."""
    kernels = [NATIVE / f"{name}.c" for name in ("avx512", "avx2", "portable", "rounded", "paths")]
    sources, flags = [Path(__file__).with_name("rounded_bits.c"), *kernels], ["-O2", "-std=gnu11", "-ffp-contract=fast"]

    def digests(compiler, *runner):
        subprocess.run([*compiler, *flags, "-w", *sources, "-o", tmp_path / "program", "-lm"], check=True)
        done = subprocess.run([*runner, tmp_path / "program"], capture_output=True, text=True, check=True)
        lines, paths = done.stdout.splitlines(), done.stderr.split()
        each = len(lines) // len(paths)
        assert all(lines[i * each : (i + 1) * each] == lines[:each] for i in range(len(paths))), paths
        return lines[:each], paths

    here, paths = digests([HERE])
    assert paths == PATHS
    there, paths = digests([*ARM, "-static"], "qemu-aarch64")
    assert paths == ["i8mm", "dotprod"] and there == here and len(set(here)) == 42

"""The native CPU kernels against the float64 oracle, on every instruction path this processor has.

Run as a script it repeats the same checks without pytest and MLX (the sanitized build does that):
    python test_native.py sweep [EXTENSION]      python test_native.py fork
"""

import importlib.machinery
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import threading
import types
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted(set((ROOT / "native").glob("*.c")) - {ROOT / "native" / "reads.c"})


def load_bare(extension=None):
    """Loads moeflux_mlx.ops.native, or another build of it, without the package's __init__, which imports MLX."""
    package = types.ModuleType("moeflux_mlx")
    package.__path__ = [str(ROOT / "moeflux_mlx")]
    sys.modules["moeflux_mlx"] = package
    if extension:
        loader = importlib.machinery.ExtensionFileLoader("moeflux_mlx.ops._native", extension)
        spec = importlib.util.spec_from_file_location("moeflux_mlx.ops._native", extension, loader=loader)
        sys.modules["moeflux_mlx.ops._native"] = importlib.util.module_from_spec(spec)
        loader.exec_module(sys.modules["moeflux_mlx.ops._native"])
    return importlib.import_module("moeflux_mlx.ops.native")


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
    native = load_bare(*sys.argv[2:])
else:
    import pytest
    from hypothesis import HealthCheck, given, settings
    from hypothesis import strategies as st

    from moeflux_mlx.ops import interrupt, native
    from moeflux_mlx.packing.gguf_forms import repacked
    from moeflux_mlx.quant import GGUF_MODES

    pytestmark = pytest.mark.skipif(not native.available(), reason="the extension is not built")

import oracle  # noqa: E402

from moeflux_mlx.formats.record import Record  # noqa: E402
from moeflux_mlx.kinds import SILU  # noqa: E402
from moeflux_mlx.ops.tiles import MAX_TOKENS  # noqa: E402
from moeflux_mlx.quant import EXPERTS, Quant  # noqa: E402

PATHS = native.instruction_paths() if native.available() else []
F = np.float32
BYTES = Quant(8, 64)
TOLERANCE = 2e-6  # relative to the sum of magnitudes: float32 rounding of a few hundred terms stays below


def close(actual, expected, magnitude, tolerance=TOLERANCE):
    """Checks that every element is within `tolerance` times its sum of magnitudes, plus the smallest normal float32."""
    assert actual.dtype == np.float32 and actual.shape == expected.shape
    return bool((np.abs(actual - expected) <= tolerance * magnitude + 1e-37).all())


def weights(rng, rows, width, wide_range=False):
    """Returns random words, and scales and biases as bfloat16 bits, over 2^-60..2^60 if `wide_range`."""
    w = rng.integers(0, 2**32, (rows, width // 8), dtype=np.uint32)
    exponent = rng.integers(-60, 60, (2, rows, width // 64)) if wide_range else -5
    s, b = oracle.f32_to_bf16(rng.standard_normal((2, rows, width // 64)) * 2.0**exponent)
    return w, s, b


def blocks(rng, count, hidden, width, padding):
    """Returns `count` packed records, each followed by `padding` words: uint32 [count, words]."""
    parts = []
    for _ in range(count):
        for rows, cols in ((width, hidden), (width, hidden), (hidden, width)):
            parts += [a.reshape(-1).view(np.uint32) for a in weights(rng, rows, cols)]
        parts.append(np.full(padding, 0xFFFFFFFF, np.uint32))
    return np.concatenate(parts).reshape(count, -1)


def unpacked(blob, slot, hidden, width):
    """Returns gate, up and down of one record as float64."""
    size = 27 * hidden * width // 16  # bytes: three matrices of half a byte and a sixteenth per weight
    parts = oracle.unpack_expert_block(blob[slot].tobytes()[:size], hidden, width)
    return [
        oracle.dequantize(*(parts[f"{p}_proj.{c}"] for c in ("weight", "scales", "biases")))
        for p in ("gate", "up", "down")
    ]


def force(path):
    native.use_path(path)


# ---- one check per operation, each on random values of a given shape ----


def check_qmv4(tokens, rows, groups, seed, wide_range=False, f32=False, fault=None):
    rng = np.random.default_rng(seed)
    w, s, b = weights(rng, rows, 64 * groups, wide_range)
    x = rng.standard_normal((tokens, 64 * groups), dtype=np.float32)
    q = oracle.unpack_bits(w, 4).astype(np.float64)
    scale, bias = (np.repeat(oracle.bf16_to_f32(a), 64, -1).astype(np.float64) for a in (s, b))
    magnitude = np.abs(x) @ (np.abs(scale) * 15 + np.abs(bias)).T
    expected = x.astype(np.float64) @ (q * scale + bias).T
    if fault:
        w, s, b = fault(w, s, b)
    if f32:
        s, b = oracle.bf16_to_f32(s), oracle.bf16_to_f32(b)
    assert close(native.linear(x, EXPERTS, w, s, b), expected, magnitude)


def check_linear8(tokens, rows, groups, seed, f32=False):
    """Checks 8-bit codes, and a dense matrix that is made of them."""
    rng = np.random.default_rng(seed)
    _, s, b = weights(rng, rows, 64 * groups)
    w = rng.integers(0, 2**32, (rows, 16 * groups), dtype=np.uint32)
    x = rng.standard_normal((tokens, 64 * groups), dtype=np.float32)
    scale, bias = (np.repeat(oracle.bf16_to_f32(a), 64, -1) for a in (s, b))
    dense = oracle.unpack_bits(w, 8) * scale.astype(float) + bias
    expected, magnitude = x @ dense.T, np.abs(x) @ (255 * np.abs(scale) + np.abs(bias)).T.astype(float)
    if f32:
        s, b = oracle.bf16_to_f32(s), oracle.bf16_to_f32(b)
    assert close(native.linear(x, BYTES, w, s, b), expected, magnitude)
    assert close(native.dequantize(BYTES, w, s, b), dense, 255 * np.abs(scale) + np.abs(bias))
    dense = dense.astype(np.float32)
    assert close(native.linear(x, None, dense), x.astype(float) @ dense.T, np.abs(x) @ np.abs(dense).T)


def check_combine(tokens, top_k, rows, width, seed, with_shared=True):
    rng = np.random.default_rng(seed)
    y, where = rng.standard_normal((rows, width), dtype=np.float32), rng.integers(0, rows, (tokens, top_k))
    weight = rng.random((tokens, top_k), dtype=np.float32)
    mid, shared = rng.standard_normal((2, tokens, width), dtype=np.float32)
    out = native.combine(y, where.astype(np.int32), weight, mid, shared if with_shared else None)
    for t in range(tokens):
        expected = oracle.combine(*(a.astype(float) for a in (mid[t], y[where[t]], weight[t], shared[t] * with_shared)))
        assert close(out[t], expected, np.full(width, 20.0))


def check_rope(tokens, heads, half, rest, neighbours, seed):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((tokens, heads, 2 * half + rest), dtype=np.float32)
    angle = rng.uniform(-3, 3, (tokens, half))
    cosine, sine = np.cos(angle), np.sin(angle)
    turned = x[..., : 2 * half].astype(float)
    parts = (turned[..., ::2], turned[..., 1::2]) if neighbours else (turned[..., :half], turned[..., half:])
    z = (parts[0] + 1j * parts[1]) * (cosine + 1j * sine)[:, None]
    expected = np.stack([z.real, z.imag], -1 if neighbours else -2).reshape(tokens, heads, 2 * half)
    out = native.rope(x, cosine.astype(F), sine.astype(F), neighbours)
    assert close(out, np.concatenate([expected, x[..., 2 * half :]], -1), np.full(x.shape, 5.0))


def check_dequantize(rows, groups, seed, f32=False):
    w, s, b = weights(np.random.default_rng(seed), rows, 64 * groups)
    expected = oracle.dequantize(w, s, b)
    if f32:
        s, b = oracle.bf16_to_f32(s), oracle.bf16_to_f32(b)
    np.testing.assert_allclose(native.dequantize(EXPERTS, w, s, b), expected, rtol=1e-6, atol=1e-6)


def check_experts(tokens, top_k, hidden, width, records, padding, seed, with_shared=True):
    rng = np.random.default_rng(seed)
    blob = blocks(rng, records, hidden, width, padding)
    blob.flags.writeable = False
    slots = rng.integers(0, records, (tokens, top_k), dtype=np.int32)
    x = rng.standard_normal((tokens, hidden), dtype=np.float32)
    weight = rng.random((tokens, top_k), dtype=np.float32)
    mid, shared = rng.standard_normal((2, tokens, hidden), dtype=np.float32)
    record = Record.make(hidden, width)
    act = native.expert_gate_up(x, blob, slots, record)
    out = native.expert_down_combine(act, blob, slots, record, weight, mid, shared if with_shared else None)
    matrices = {slot: unpacked(blob, slot, hidden, width) for slot in set(slots.flat)}
    for t in range(tokens):
        y = np.zeros((top_k, hidden))
        for k, slot in enumerate(slots[t]):
            gate, up, down = matrices[slot]
            expected = oracle.silu(x[t] @ gate.T) * (x[t] @ up.T)
            size = (np.abs(x[t]) @ np.abs(gate).T + 1) * (np.abs(x[t]) @ np.abs(up).T)
            assert close(act[t, k], expected, size)
            y[k] = act[t, k].astype(np.float64) @ down.T
        expected = oracle.combine(mid[t].astype(float), y, weight[t].astype(float), shared[t] * float(with_shared))
        size = max(np.abs(act[t]).max() * np.abs(matrices[s][2]).sum(1).max() for s in slots[t])
        assert close(out[t], expected, size)


def check_small(tokens, rows, width, seed):
    rng = np.random.default_rng(seed)
    gate, up = 4 * rng.standard_normal((2, rows, 16 * width + 5), dtype=np.float32)
    assert close(native.activate(gate, up), oracle.silu(gate.astype(float)) * up, np.abs(gate * up))
    x, w = rng.standard_normal((rows, 16 * width), dtype=np.float32), rng.random(16 * width, dtype=np.float32)
    expected = oracle.rms_norm(x.astype(float), w, 1e-6)
    assert close(native.rms_norm(x, w, 1e-6), expected, np.abs(expected))
    state, x = (
        np.zeros((3, 16 * width), np.float32),
        rng.standard_normal((tokens, 16 * width), dtype=np.float32),
    )
    taps = rng.standard_normal((4, 16 * width), dtype=np.float32)
    halves, following = [], state
    for part in (x[: tokens // 2], x[tokens // 2 :]):
        half, following = native.conv_silu(following, part, taps)
        halves.append(half)
    plain = oracle.causal_conv(x.astype(float), taps.T)
    size = oracle.causal_conv(np.abs(x).astype(float), np.abs(taps.T)) + 1
    assert close(np.concatenate(halves), oracle.silu(plain), size)
    assert (following == np.concatenate([state, x])[-3:]).all()


def check_attend(tokens, kv_heads, group, length, spare, dk, dv, window, seed):
    """Checks attention with sinks of both signs, with a window or without (None)."""
    rng = np.random.default_rng(seed)
    q = rng.standard_normal((tokens, kv_heads * group, dk), dtype=np.float32)
    k = rng.standard_normal((kv_heads, length + spare, dk), dtype=np.float32)
    v = rng.standard_normal((kv_heads, length + spare, dv), dtype=np.float32)
    sinks = None if window is None else 3 * rng.standard_normal(kv_heads * group, dtype=np.float32)
    out = native.attend(q, k, v, length, dk**-0.5, window=window, sinks=sinks)
    for t in range(tokens):
        end = length - tokens + t + 1
        seen = slice(0 if window is None else max(end - window, 0), end)
        for h in range(kv_heads * group):
            scores = k[h // group, seen].astype(float) @ q[t, h] * dk**-0.5
            p = oracle.softmax(scores if sinks is None else np.append(scores, sinks[h]))[: len(scores)]
            assert close(out[t, h], p @ v[h // group, seen], np.abs(v).max(), 4e-6)


def check_attend_step(kv_heads, group, begun, used, widths, half, window, seed):
    """Compares bit by bit with the single operations, for any place of the newest positions, also in a ring."""
    rng = np.random.default_rng(seed)
    heads, shapes, length = kv_heads * group, [(kv_heads, width) for width in widths], begun + used + 1
    q, k, v = (rng.standard_normal(shape, dtype=np.float32) for shape in ((heads, widths[0]), *shapes))
    weights = None if seed % 3 else rng.random((2, widths[0]), dtype=np.float32)
    cosine, sine = rng.standard_normal((2, 1, half), dtype=np.float32)
    sinks = None if window is None else 3 * rng.standard_normal(heads, dtype=np.float32)
    past = [rng.standard_normal((n, length, width), dtype=np.float32) for n, width in shapes]
    room = [np.full((n, used + 3, width), np.nan, np.float32) for n, width in shapes]
    for new, old in zip(room, past, strict=True):
        new[:, :used] = old[:, begun:-1]
    recent = np.concatenate([part.reshape(-1) for part in room])
    capacity = begun + 1 if window is None else window + 8  # with room for a position that is not seen
    rows = np.arange(max(begun - capacity, 0), begun)
    seen = [np.full((n, capacity, width), np.nan, np.float32) for n, width in shapes]
    for kept, old in zip(seen, past, strict=True):
        kept[:, rows % capacity] = old[:, rows]
    norms = None if weights is None else (*weights, 1e-6)
    args = norms, (cosine, sine, seed % 2 == 1), (*seen, begun), recent, length, 0.3
    rotates_first = seed % 6 == 0
    out = native.attend_step(q, k, v, *args, window=window, sinks=sinks, rotates_first=rotates_first)
    if weights is not None and not rotates_first:
        q, k = (native.rms_norm(x, weight, 1e-6) for x, weight in zip((q, k), weights, strict=True))
    q, k = (native.rope(x[None], cosine, sine, seed % 2 == 1) for x in (q, k))
    if rotates_first:
        q, k = (native.rms_norm(x[0], weight, 1e-6)[None] for x, weight in zip((q, k), weights, strict=True))
    for old, new in zip(past, (k[0], v), strict=True):
        old[:, -1] = new
    parts = np.split(recent, [room[0].size])
    for part, empty, old in zip(parts, room, past, strict=True):
        assert (part.reshape(empty.shape)[:, : used + 1] == old[:, begun:]).all()
        assert np.isnan(part.reshape(empty.shape)[:, used + 1 :]).all()
    assert (out == native.attend(q, *past, length, 0.3, window=window, sinks=sinks)[0]).all()


def check_choose(tokens, experts, more, top_k, seed):
    rng = np.random.default_rng(seed)
    logits = rng.integers(-9, 9, (tokens, experts + more)).astype(F)  # many logits are equal
    order = np.argsort(-logits[:, :experts], axis=-1, kind="stable")[:, :top_k]
    p = np.take_along_axis(oracle.softmax(logits[:, :experts].astype(float)), order, -1)
    for normalise in (False, True):
        ids, weights = native.choose(logits, experts, top_k, normalise, 2.5)
        assert (ids == order).all() and ids.dtype == np.int32
        expected = 2.5 * p / (p.sum(-1, keepdims=True) if normalise else 1)
        assert close(weights, expected, expected, 1e-5)


def check_around(tokens, rows, groups, seed):
    """Compares a product between norm and residual bit by bit with the three operations."""
    rng = np.random.default_rng(seed)
    w, s, b = weights(rng, rows, 64 * groups)
    dense = rng.standard_normal((rows, 64 * groups), dtype=np.float32)
    x, norm = rng.standard_normal((tokens, 64 * groups), dtype=np.float32), rng.random(64 * groups, dtype=np.float32)
    residual = rng.standard_normal((tokens, rows), dtype=np.float32)
    normed = native.rms_norm(x, norm, 1e-6)
    for matrix in ((EXPERTS, w, s, b), (None, dense)):
        expected = residual + native.linear(normed, *matrix)
        assert (native.linear(x, *matrix, norm=(norm, 1e-6), residual=residual) == expected).all()


def check_delta(tokens, k_heads, group, dk, dv, seed):
    rng = np.random.default_rng(seed)
    heads = k_heads * group
    q, k = rng.standard_normal((2, tokens, k_heads, dk), dtype=np.float32) / np.float32(np.sqrt(dk))
    v = rng.standard_normal((tokens, heads, dv), dtype=np.float32)
    beta = rng.random((tokens, heads), dtype=np.float32)
    state = rng.standard_normal((heads, dv, dk), dtype=np.float32)
    wide = [np.repeat(a.astype(float), group, 1) for a in (q, k)]
    for decay in (rng.random(beta.shape, dtype=np.float32), rng.random((*beta.shape, dk), dtype=np.float32)):
        expected, last = oracle.gated_delta_recurrence(*wide, v.astype(float), decay, beta, state.astype(float))
        out, following = native.gated_delta(state, q, k, v, decay, beta)
        assert close(out, expected, np.full(out.shape, 10.0))
        assert close(following, last, np.full(state.shape, 10.0))


def check_rounded(tokens, rows, groups, bits, seed):
    """Checks products with rounded activations roughly; test_rounded.py has the exact bounds."""
    rng = np.random.default_rng(seed)
    w, s, b = weights(rng, rows, 64 * groups)
    x = rng.standard_normal((tokens, 64 * groups), dtype=np.float32)
    wide, magnitude = rng.integers(0, 2**32, (rows, 16 * groups), dtype=np.uint32), np.full((tokens, rows), 64 * groups)
    for quant, codes, tolerance in ((EXPERTS, w, 0.05), (BYTES, wide, 0.5)):
        exact = native.linear(x, quant, codes, s, b)
        with native.activations(bits):
            assert close(native.linear(x, quant, codes, s, b), exact, magnitude, tolerance)


def sweep():
    """Checks every operation, path and vector remainder on a few shapes."""
    for path in PATHS:
        force(path)
        for tokens in (1, 2, 3, 9):
            for rows, groups in ((1, 1), (7, 3), (133, 2)):
                for f32 in (False, True):
                    check_qmv4(tokens, rows, groups, 1, f32=f32)
                    check_linear8(tokens, rows, groups, 1, f32=f32)
                    check_dequantize(rows, groups, 1, f32=f32)
            for bits in (8, 16):
                for rows, groups in ((1, 1), (7, 3), (133, 12)):
                    check_rounded(tokens, rows, groups, bits, 1)
            check_experts(tokens, 3, 64, 192, 3, 5, 2)
            check_experts(tokens, 2, 128, 64, 4, 0, 3, with_shared=False)
            check_combine(tokens, 3, 5, 37, 7)
            check_rope(tokens, 2, 17, 3, True, 8)
            check_rope(tokens, 2, 17, 3, False, 8)
            check_small(tokens, 3, 3, 4)
            check_attend(tokens, 2, 13, 11 + tokens, 2, 48, 16, None, 5)
            check_attend_step(2, 3, 5 * tokens, tokens - 1, (48, 16), 17, 6, tokens)
            check_choose(tokens, 37, 2, 5, 1)
            check_around(tokens, 133, 3, 1)
            check_delta(tokens, 2, 3, 32, 8, 6)
        check_small(2, 5, 2100, 7)


def fork():
    """Checks that a child has a team that works, although it does not have its parent's threads."""
    native.set_threads(3)
    check_qmv4(1, 999, 8, 0)
    child = os.fork()
    check_qmv4(1, 999, 8, 0)
    if not child:
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0


if __name__ == "__main__":
    {"sweep": sweep, "fork": fork}[sys.argv[1]]()
    sys.exit(0)


# ---- properties ----

seeds = st.integers(0, 2**32 - 1)
windows = st.none() | st.integers(1, 40)
# All examples of a property use the same forced path, although the health check warns of that.
few = settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(params=PATHS, autouse=True)
def path(request, team):
    force(request.param)
    yield request.param
    force(PATHS[0])


any_path = pytest.mark.parametrize("path", PATHS[:1], indirect=True)


def up_to(*most):
    """Integers from 1 to these."""
    return [st.integers(1, one) for one in most]


sixty_fours = st.integers(1, 3).map(lambda n: 64 * n)
PROPERTIES = {  # what each check takes
    check_qmv4: [*up_to(9, 150, 7), seeds, st.booleans(), st.booleans()],
    check_linear8: [*up_to(70, 150, 4), seeds, st.booleans()],
    check_combine: [*up_to(9, 9, 9, 40), seeds, st.booleans()],
    check_rope: [*up_to(5, 4, 40), st.integers(0, 20), st.booleans(), seeds],
    check_dequantize: [*up_to(70, 7), seeds, st.booleans()],
    check_experts: [*up_to(6, 4), sixty_fours, sixty_fours, *up_to(5), st.integers(0, 9), seeds, st.booleans()],
    check_small: [*up_to(5, 4, 9), seeds],
    check_attend: [
        *(*up_to(3, 2, 11), st.integers(3, 70), st.integers(0, 3)),
        *(st.sampled_from([16, 48, 64]), st.sampled_from([16, 80]), windows, seeds),
    ],
    check_attend_step: [
        *(*up_to(3, 17), st.integers(0, 70), st.integers(0, 31)),
        *(st.tuples(st.sampled_from([16, 80]), st.sampled_from([16, 48])), st.integers(0, 8), windows, seeds),
    ],
    check_choose: [*up_to(9), st.integers(10, 140), st.integers(0, 2), st.integers(0, 10), seeds],
    check_around: [*up_to(9, 150, 7), seeds],
    check_delta: [*up_to(4, 3, 3), st.sampled_from([16, 48]), *up_to(20), seeds],
}


@pytest.mark.parametrize("check", PROPERTIES, ids=lambda check: check.__name__)
@few
@given(data=st.data())
def test_operations(path, check, data):
    check(*data.draw(st.tuples(*PROPERTIES[check])))


@pytest.mark.parametrize(
    "fault",
    [
        lambda w, s, b: (w ^ np.uint32(1 << 28), s, b),
        lambda w, s, b: (w, np.roll(s, 1, -1), b),
        lambda w, s, b: (w, s, np.roll(b, 1, -1)),
        lambda w, s, b: (np.roll(w, 1, -1), s, b),
    ],
    ids=["one bit of a nibble", "scales shifted", "biases shifted", "words shifted"],
)
def test_the_tolerance_sees_faults(path, fault):
    with pytest.raises(AssertionError):
        check_qmv4(2, 64, 6, 0, fault=fault)


@pytest.mark.parametrize("peak", [1.0, 1e30, -1e-25, 1e-30, 0.0])
def test_a_lone_row_of_any_size(path, peak):
    """Checks largest values that are equal, opposite or alone: there integer activations round up to their limit."""
    w, s, b = weights(np.random.default_rng(0), 9, 192)
    dense = oracle.dequantize(w, s, b).astype(float)
    parts = np.repeat(15 * np.abs(oracle.bf16_to_f32(s)) + np.abs(oracle.bf16_to_f32(b)), 64, -1).astype(float)
    for fill in (peak, -peak, peak / 300, 0.0):
        for mantissa in np.linspace(0.5, 1, 40):
            x = np.full((1, 192), fill * mantissa, F)
            x[0, 70] = peak * mantissa
            assert close(
                native.linear(x, EXPERTS, w, s, b), x.astype(float) @ dense.T, np.abs(x).astype(float) @ parts.T
            )


@few
@given(tokens=st.integers(2, MAX_TOKENS + 9), first=st.integers(0, MAX_TOKENS + 8), seed=seeds)
def test_a_row_does_not_depend_on_the_rows_beside_it(path, tokens, first, seed):
    """In a step a row has the bits that it has alone; in a prompt VNNI's float kernels may round it differently."""
    first %= tokens
    rng = np.random.default_rng(seed)
    w, s, b = weights(rng, 21, 192)
    x = rng.standard_normal((tokens, 192), dtype=F)
    others = rng.standard_normal((MAX_TOKENS + 5, 192), dtype=F) * F(100)
    others[4] = x[first]
    got, alone = native.linear(x, EXPERTS, w, s, b)[first], native.linear(x[first : first + 1], EXPERTS, w, s, b)[0]
    prompt = native.linear(others, EXPERTS, w, s, b)[4]
    assert np.array_equal(got, alone if tokens <= MAX_TOKENS else prompt)
    assert np.array_equal(prompt, alone) or path == "avx512vnni"
    np.testing.assert_allclose(got, alone, rtol=1e-4, atol=1e-4)


def test_a_lone_row_with_nan(path):
    w, s, b = weights(np.random.default_rng(0), 9, 192)
    x = np.ones((1, 192), F)
    x[0, 100] = np.nan
    assert np.isnan(native.linear(x, EXPERTS, w, s, b)).all()


@pytest.mark.parametrize("mode", ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"])
def test_nested_scales_of_each_group(path, mode):
    gguf_models = pytest.importorskip("gguf_models")  # without the package gguf
    form = GGUF_MODES[mode.lower()]
    stored = gguf_models.random_blocks(mode, (3, 5 * 256), 0)
    values = gguf_models.values_of(mode, stored)
    got = native.dequantize(Quant(form.bits, form.group_size, mode.lower()), *repacked(mode, stored))
    np.testing.assert_allclose(got, values, rtol=1e-6)


def test_a_choice_among_nans_is_valid(path):
    ids, weights = native.choose(np.full((1, 20), np.nan, F), 20, 4, True)
    assert (ids == [0, 1, 2, 3]).all() and np.isnan(weights).all()


def test_silu_at_the_ends(path):
    gate = np.array([[-1e5, -200, -88, -1e-20, 0, 1e-20, 88, 200, 1e30, np.nan]], np.float32)
    out = native.activate(gate, np.ones_like(gate))
    expected = np.array([0, 0, 0, -5e-21, 0, 5e-21, 88, 200, 1e30], np.float32)
    np.testing.assert_allclose(out[0, :9], expected, rtol=1e-6, atol=1e-30)
    assert np.isnan(out[0, 9])


# ---- same bits ----


@any_path
@pytest.mark.parametrize("tokens", [MAX_TOKENS, MAX_TOKENS + 1, 70])
def test_calls_in_pieces_have_the_same_bits_and_can_be_interrupted(path, tokens, monkeypatch):
    rng = np.random.default_rng(0)
    w, s, b = weights(rng, 32, 128)
    x, residual = rng.standard_normal((tokens, 128), dtype=np.float32), rng.standard_normal((tokens, 32), dtype=F)
    q, k, v = (rng.standard_normal(shape, dtype=np.float32) for shape in ((tokens, 4, 16), *[(2, 90, 16)] * 2))

    def calls():
        yield native.linear(x, EXPERTS, w, s, b, residual=residual)
        yield native.attend(q, k, v, 80, 0.25)
        yield native.attend(q, k, v, 80, 0.25, window=9, sinks=np.ones(4, F))

    whole = list(calls())
    monkeypatch.setattr(interrupt, "PIECE_WORK", 1)
    asked, pieces = [], -(-tokens // MAX_TOKENS)
    with monkeypatch.context() as patch:
        patch.setattr(interrupt, "check", lambda: asked.append(1))
        cut = list(calls())
    assert all(map(np.array_equal, cut, whole)) and len(asked) == 3 * (pieces - 1)
    interrupt.leave(threading.get_ident())
    try:
        for call in (lambda: next(calls()), lambda: native.attend(q, k, v, 80, 0.25)):
            if pieces > 1:
                with pytest.raises(interrupt.Left):
                    call()
    finally:
        interrupt.stay()
    assert np.array_equal(next(calls()), whole[0])


def expert_call(blob, slots, x, weight):
    record = Record.make(192, 128)
    act = native.expert_gate_up(x, blob, slots, record)
    return native.expert_down_combine(act, blob, slots, record, weight, x)


def test_bits_do_not_depend_on_threads_or_slots(path):
    rng = np.random.default_rng(0)
    blob = blocks(rng, 6, 192, 128, 0)
    x, weight = rng.standard_normal((5, 192), dtype=np.float32), rng.random((5, 4), dtype=np.float32)
    slots = rng.integers(0, 6, (5, 4), dtype=np.int32)
    native.set_threads(1)
    expected = expert_call(blob, slots, x, weight)
    for count in (2, 5):
        native.set_threads(count)
        assert (expert_call(blob, slots, x, weight) == expected).all()
    moved = rng.permutation(6)
    assert (expert_call(blob[np.argsort(moved)], moved[slots].astype(np.int32), x, weight) == expected).all()
    alone = [expert_call(blob, slots[t : t + 1], x[t : t + 1], weight[t : t + 1]) for t in range(5)]
    assert np.array_equal(np.concatenate(alone), expected)


@any_path
@pytest.mark.parametrize("threads", [2, 7])
def test_every_piece_is_done_once(path, threads):
    """Also checks more threads than cores: some sleep then, and the others do their chunks."""
    rng = np.random.default_rng(0)
    (w, s, b), x = weights(rng, 2048, 256), rng.standard_normal((3, 256), dtype=np.float32)
    native.set_threads(1)
    expected = native.linear(x, EXPERTS, w, s, b)
    native.set_threads(threads)
    assert all(np.array_equal(native.linear(x, EXPERTS, w, s, b), expected) for _ in range(100))


@any_path
def test_calls_from_many_threads(path):
    rng = np.random.default_rng(0)
    w, s, b = weights(rng, 2000, 512)
    xs = rng.standard_normal((16, 1, 512), dtype=np.float32)
    expected = [native.linear(x, EXPERTS, w, s, b) for x in xs]
    native.set_threads(3)
    with ThreadPoolExecutor(4) as pool:
        for _ in range(10):
            actual = list(pool.map(lambda x: native.linear(x, EXPERTS, w, s, b), xs))
            assert all((a == e).all() for a, e in zip(actual, expected, strict=True))


@any_path
def test_mlx_arrays_and_given_output(path):
    mx = pytest.importorskip("mlx.core")
    w, s, b = mx.quantize(mx.random.normal((96, 128)).astype(mx.bfloat16), group_size=64, bits=4)
    x, out = mx.random.normal((2, 128)), np.empty((2, 96), np.float32)
    assert native.linear(x, EXPERTS, w, s, b, out) is out
    dense = mx.dequantize(w, s.astype(mx.float32), b.astype(mx.float32), 64, 4)
    np.testing.assert_allclose(out, np.array(x) @ np.array(dense).T, rtol=1e-4, atol=1e-4)


# ---- refusals ----


def misaligned(shape, dtype):
    raw = np.zeros(int(np.prod(shape)) * np.dtype(dtype).itemsize + 1, np.uint8)
    return raw[1:].view(dtype).reshape(shape)


def read_only(shape):
    array = np.zeros(shape, F)
    array.flags.writeable = False
    return array


def qmv4_arguments():
    zeros = np.zeros((8, 2), np.uint16)
    return {
        "x": np.zeros((2, 128), F),
        "quant": EXPERTS,
        "w": np.zeros((8, 16), np.uint32),
        "scales": zeros,
        "third": zeros,
    }


BAD = {
    "float64 x": {"x": np.zeros((2, 128))},
    "x too wide": {"x": np.zeros((2, 192), F)},
    "x not contiguous": {"x": np.zeros((2, 256), F)[:, ::2]},
    "x one-dimensional": {"x": np.zeros(128, F), "out": np.zeros((1, 8), F)},
    "x misaligned": {"x": misaligned((2, 128), F)},
    "int32 w": {"w": np.zeros((8, 16), np.int32)},
    "big-endian w": {"w": np.zeros((8, 16), ">u4")},
    "row of 96": {"w": np.zeros((8, 12), np.uint32)},
    "empty row": {"w": np.zeros((8, 0), np.uint32)},
    "w misaligned": {"w": misaligned((8, 16), np.uint32)},
    "too few scales": {"scales": np.zeros((8, 1), np.uint16)},
    "float16 scales beside bfloat16 biases": {"scales": np.zeros((8, 2), np.float16)},
    "scales without biases": {"third": None},
    "7 bits": {"quant": Quant(7, 64), "w": np.zeros((8, 28), np.uint32)},
    "groups of 16": {"quant": Quant(4, 16), **dict.fromkeys(("scales", "third"), np.zeros((8, 8), np.uint16))},
    "the words of other bits": {"quant": Quant(5, 64)},
    "E8M0 scales for other groups": {"scales": np.zeros((8, 2), np.uint8), "third": None},
    "mixed scales": {"scales": np.zeros((8, 2), F)},
    "read-only out": {"out": read_only((2, 8))},
    "short out": {"out": np.zeros((1, 8), F)},
    "float64 out": {"out": np.zeros((2, 8))},
    "misaligned out": {"out": misaligned((2, 8), F)},
    "strided out": {"out": np.zeros((2, 16), F)[:, ::2]},
}
REFUSED = (TypeError, ValueError, BufferError, OverflowError, IndexError)


@any_path
@pytest.mark.parametrize("change", BAD.values(), ids=BAD)
def test_bad_products_are_refused(path, change):
    arguments = qmv4_arguments()
    assert (native.linear(**arguments) == 0).all()
    with pytest.raises(REFUSED):
        native.linear(**(arguments | change))


@any_path
def test_overlap_is_refused(path):
    memory = np.zeros(2 * 128, F)
    with pytest.raises(ValueError, match="overlaps"):
        native.linear(**(qmv4_arguments() | {"x": memory.reshape(2, 128), "out": memory[:16].reshape(2, 8)}))


def expert_arguments():
    return {
        "x": np.zeros((1, 64), F),
        "blob": np.zeros((2, 3 * 576), np.uint32),
        "slots": np.zeros((1, 2), np.int32),
        "record": Record.make(64, 64),
    }


def claimed(words, quant=EXPERTS, dtype="BF16", bias=None):
    """Returns a projection at the given place."""
    codes = [types.SimpleNamespace(dtype=dtype, words=slice(at, at)) for at in words]
    fields = [types.SimpleNamespace(dtype=dtype)] * 2
    field = None if bias is None else types.SimpleNamespace(dtype="F32", words=slice(bias, bias + 64))
    return types.SimpleNamespace(quant=quant, fields=fields, codes=codes, bias=field)


def lying(width=64, gate=(0, 512, 544), up=(576, 1088, 1120), bias=None, activation=SILU):
    """Returns what a record of hidden size 64 could claim: width, first words of gate and up, and the activation."""
    parts = {"gate": claimed(gate, bias=bias), "up": claimed(up, bias=bias)}
    return types.SimpleNamespace(moe_intermediate_size=width, activation=activation, interleaved=False, **parts)


@any_path
@pytest.mark.parametrize("slot", [-1, 2, 2**31 - 1, -(2**31)])
def test_slots_out_of_range_are_refused(path, slot):
    arguments = expert_arguments()
    arguments["slots"][0, 1] = slot
    with pytest.raises(ValueError, match=f"value {slot} at position 1, expected 0 to 1"):
        native.expert_gate_up(**arguments)
    act, weight = np.zeros((1, 2, 64), F), np.zeros((1, 2), F)
    with pytest.raises(ValueError, match="slots"):
        native.expert_down_combine(act, **(arguments | {"weights": weight, "mid": arguments.pop("x")}))


@any_path
@pytest.mark.parametrize(
    "change",
    [
        {"blob": np.zeros((2, 2 * 576 - 1), np.uint32)},
        {"blob": np.zeros((0, 3 * 576), np.uint32)},
        {"blob": np.zeros((2, 0), np.uint32)},
        {"slots": np.zeros((1, 2), np.int64)},
        {"slots": np.zeros((2, 2), np.int32)},
        {"x": np.zeros((1, 96), F)},
        {"x": np.zeros((1, 0), F)},
        {"record": lying(0)},
        {"record": lying(96)},
        {"record": lying(64 * 4)},
        {"record": lying(2**40), "out": np.broadcast_to(F(0), (1, 2, 2**40))},
        {"record": lying(gate=(-1, 512, 544))},
        {"record": lying(gate=(0, 2**62, 544))},
        {"record": lying(up=(3 * 576 - 511, 1088, 1120))},
        {"record": lying(up=(576, 1088, 3 * 576 - 31))},
        {"record": lying(bias=3 * 576 - 63)},
        {"record": lying(bias=-2)},
        {"record": lying(bias=2**62)},
        {"record": lying(activation=types.SimpleNamespace(form="silu", limit="seven", gate_limit=None))},
        {"record": lying(up=())},
        {"record": lying(up=(576, 1088, 1.0))},
        {"record": lying(up=(576, 1088, 2**64))},
    ],
)
def test_bad_expert_calls_are_refused(path, change):
    arguments = expert_arguments()
    assert (native.expert_gate_up(**arguments) == 0).all()
    for right in (lying(up=(1152, 1696, 1664)), lying(bias=3 * 576 - 64)):
        assert (native.expert_gate_up(**(arguments | {"record": right})) == 0).all()
    with pytest.raises(REFUSED):
        native.expert_gate_up(**(arguments | change))


@any_path
@pytest.mark.parametrize("words, down", [(3 * 576 - 1, (1152, 1664, 1696)), (3 * 576, (1153, 1664, 1697)), (576, ())])
def test_a_down_matrix_beyond_its_record_is_refused(path, words, down):
    record = types.SimpleNamespace(down=claimed(down))
    blob, slots = np.zeros((2, words), np.uint32), np.zeros((1, 2), np.int32)
    with pytest.raises(REFUSED):
        native.expert_down_combine(
            np.zeros((1, 2, 64), F), blob, slots, record, np.zeros((1, 2), F), np.zeros((1, 64), F)
        )


@any_path
@pytest.mark.parametrize("place, is_right", [(576, True), (577, False), (-2, False), (2**61, False)])
def test_a_global_scale_beyond_its_record_is_refused(path, place, is_right):
    down = claimed((0, 512, place), Quant(4, 16, "nvfp4", has_global_scale=True), dtype="U8")
    blob, slots, act = np.zeros((2, 577), np.uint32), np.zeros((1, 2), np.int32), np.zeros((1, 2, 64), F)
    given = act, blob, slots, types.SimpleNamespace(down=down), np.zeros((1, 2), F), np.zeros((1, 64), F)
    if is_right:
        assert (native.expert_down_combine(*given) == 0).all()
        return
    with pytest.raises(REFUSED):
        native.expert_down_combine(*given)


@any_path
@pytest.mark.parametrize("length", [0, 1, 6, -1, 2**62])
def test_bad_cache_lengths_are_refused(path, length):
    q, k = np.zeros((2, 4, 16), F), np.zeros((2, 5, 16), F)
    with pytest.raises(ValueError, match=f"n is {length}, expected 2 .* to 5"):
        native.attend(q, k, k, length, 1.0)


@any_path
@pytest.mark.parametrize(
    "change",
    [
        {"length": 4},
        {"length": 8},
        {"length": 2**62},
        {"seen": (*np.zeros((2, 2, 4, 16), F), 5)},
        {"seen": (*np.zeros((2, 2, 4, 16), F), -1)},
        {"seen": (*np.zeros((2, 1, 4, 16), F), 4)},
        {"q": np.zeros((3, 16), F)},
        {"q": np.zeros((4, 32), F)},
        {"v": np.zeros((2, 32), F)},
        {"norms": (np.ones(16, F), np.ones(15, F), 1e-6)},
        {"turn": (*np.zeros((2, 1, 9), F), False)},
        {"turn": (*np.zeros((2, 2, 4), F), False)},
        {"recent": np.zeros((12, 16), F)},
        {"recent": np.zeros(12 * 16 + 8, F)},
        {"recent": read_only((12 * 16,))},
        {"window": -1},
        {"sinks": np.zeros(3, F)},
        {"sinks": np.zeros((4, 1), F)},
    ],
)
def test_bad_steps_are_refused(path, change):
    arguments = {"q": np.zeros((4, 16), F), "k": np.zeros((2, 16), F), "v": np.zeros((2, 16), F)}
    arguments |= {"norms": (*np.ones((2, 16), F), 1e-6), "turn": (*np.zeros((2, 1, 4), F), False), "length": 5}
    arguments |= {"seen": (*np.zeros((2, 2, 4, 16), F), 4), "recent": np.zeros(12 * 16, F), "scale": 1.0}
    assert (native.attend_step(**arguments) == 0).all()
    with pytest.raises(REFUSED):
        native.attend_step(**(arguments | change))


@any_path
def test_bad_small_operations_are_refused(path):
    x = np.zeros((2, 24), F)
    calls = [
        lambda: native.rms_norm(x, None, 1e-6),
        lambda: native.rms_norm(np.zeros((2, 32), F), np.zeros(31, F), 1e-6),
        lambda: native.rms_norm(np.zeros((2, 32), F), None, "eps"),
        lambda: native.activate(x, np.zeros((2, 25), F)),
        lambda: native.conv_silu(np.zeros((3, 24), F), x, np.zeros((4, 24), F)),
        lambda: native.conv_silu(np.zeros((2, 32), F), np.zeros((1, 32), F), np.zeros((4, 32), F)),
        lambda: native.conv_silu(np.zeros((3, 32), F), np.zeros((1, 32), F), np.zeros((4, 32), F), read_only((1, 32))),
        lambda: native.attend(np.zeros((1, 3, 16), F), *np.zeros((2, 2, 4, 16), F), 1, 1.0),
        lambda: native.attend(np.zeros((1, 2, 16), F), *np.zeros((2, 0, 4, 16), F), 1, 1.0),
        lambda: native.linear(np.zeros((1, 24), F), None, np.zeros((4, 24), F)),
        lambda: native.linear(np.zeros((1, 32), F), EXPERTS, np.zeros((4, 32), F), np.zeros((4, 1), np.uint16)),
        lambda: native.linear(
            np.zeros((1, 64), F), EXPERTS, np.zeros((4, 12), np.uint32), *np.zeros((2, 4, 1), np.uint16)
        ),
        lambda: native.dequantize(
            EXPERTS, np.zeros((4, 8), np.uint32), *np.zeros((2, 4, 1), np.uint16), np.zeros((4, 128), F)
        ),
        lambda: native.combine(x, np.array([[2]], np.int32), np.ones((1, 1), F), x[:1]),
        lambda: native.combine(x, np.array([[-1]], np.int32), np.ones((1, 1), F), x[:1]),
        lambda: native.combine(x, np.array([[0]], np.int32), np.ones((1, 2), F), x[:1]),
        lambda: native.rope(np.zeros((1, 2, 8), F), *np.zeros((2, 1, 5), F)),
        lambda: native.rope(np.zeros((1, 2, 8), F), *np.zeros((2, 2, 4), F)),
        lambda: native.choose(x, 25, 2, True),
        lambda: native.choose(x, 0, 0, True),
        lambda: native.choose(x, 4, 5, True),
        lambda: native.linear(np.zeros((2, 32), F), None, np.zeros((4, 32), F), norm=(np.zeros(31, F), 0.0)),
        lambda: native.linear(np.zeros((2, 32), F), None, np.zeros((4, 32), F), residual=np.zeros((1, 4), F)),
        lambda: native.gated_delta(x, *np.zeros((3, 1, 1, 16), F), *np.zeros((2, 1, 1), F)),
        lambda: native.gated_delta(*np.zeros((4, 1, 1, 16), F), np.zeros((1, 1, 15), F), np.zeros((1, 1), F)),
        lambda: native.set_threads(0),
        lambda: native.use_path("sse9"),
        lambda: native.extension().linear(x),
    ]
    for call in calls:
        with pytest.raises(REFUSED):
            call()


@any_path
def test_a_refused_call_releases_its_buffers(path):
    words = bytearray(8 * 64)
    w = memoryview(words).cast("I").cast("B").cast("I", (8, 16))
    with pytest.raises(REFUSED):
        native.linear(**(qmv4_arguments() | {"w": w, "out": np.zeros((1, 8), F)}))
    w.release()
    words.append(0)  # raises BufferError while anything still holds the buffer


# ---- whole process ----


def run(*command, **environment):
    done = subprocess.run(
        [str(c) for c in command], env=os.environ | environment, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stdout + done.stderr


def compile_each(command, folder):
    """Compiles each of the extension's sources to an object file, as in setup.py."""
    objects = [folder / f"{source.stem}.o" for source in SOURCES]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(lambda source, made: run(*command, "-c", source, "-o", made), SOURCES, objects))
    return objects


@any_path
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_fork(path):
    run(sys.executable, "-W", "ignore", __file__, "fork")


@pytest.mark.full
@any_path
@pytest.mark.skipif(sys.platform != "linux" or not shutil.which("gcc"), reason="needs gcc's sanitizers")
def test_sanitized_build(path, tmp_path):
    built = tmp_path / "_native.so"
    include = f"-I{sysconfig.get_path('include')}"
    flags = ["-std=gnu11", "-O0", "-g1", "-ffp-contract=fast", "-Wno-psabi", "-fPIC"]  # half the time of -O1
    checks = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    objects = compile_each(["gcc", *flags, *checks, include], tmp_path)
    run("gcc", *checks, "-shared", "-pthread", *objects, "-o", built)
    library = subprocess.run(["gcc", "-print-file-name=libasan.so"], capture_output=True, text=True).stdout.strip()
    # Python itself leaks at exit; its allocator would hide overruns of small buffers. The second stack that GCC 13
    # looks for uses after return in does not align vectors of 64 bytes, which ends the process.
    options = {"ASAN_OPTIONS": "detect_leaks=0:detect_stack_use_after_return=0"}
    options |= {"LD_PRELOAD": library, "PYTHONMALLOC": "malloc"}
    run(sys.executable, __file__, "sweep", built, **options)


@pytest.mark.full
@any_path
@pytest.mark.skipif(not importlib.util.find_spec("ziglang"), reason="needs ziglang as a cross compiler")
@pytest.mark.parametrize("target", ["aarch64-macos", "aarch64-linux-gnu"])
def test_compiles_for_other_processors(path, tmp_path, target):
    # Debian's pyconfig.h looks for the one of the target, which is missing; this machine's is enough to compile.
    headers = Path(sysconfig.get_path("include"))
    include = shutil.copytree(headers, tmp_path / "include")
    own = headers.parent / (sysconfig.get_config_var("MULTIARCH") or "") / headers.name / "pyconfig.h"
    if own.exists():
        shutil.copy(own, include)
    flags = ["-std=gnu11", "-O1", "-Werror=implicit-function-declaration", f"-I{include}"]
    compile_each([sys.executable, "-m", "ziglang", "cc", "-target", target, *flags], tmp_path)


@any_path
def test_missing_extension_is_reported_once(path, no_extension):
    assert not native.available()
    with pytest.warns(RuntimeWarning, match="install a C compiler"):
        native.warn_if_missing()
    native.warn_if_missing()  # a second warning would be an error here
    with pytest.raises(native.MoefluxError, match="install a C compiler .* then .*install"):
        native.linear(**qmv4_arguments())

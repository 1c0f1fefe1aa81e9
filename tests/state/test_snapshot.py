"""MFLX snapshots: bytes against a writer made from the format's description, exact restores, hostile bytes."""

import struct
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from goldens import FAMILIES
from grids import drawn, examples
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tiny_models import tiny_model

from moeflux_mlx import errors
from moeflux_mlx.caches.recurrent import RecurrentCache
from moeflux_mlx.mixers.delta.spec import Delta
from moeflux_mlx.mixers.latent.spec import Latent
from moeflux_mlx.spec import ModelArgs
from moeflux_mlx.state.snapshot import MAX_LENGTH, load_state, save_state, state_size

DTYPES = (mx.float32, mx.bfloat16, mx.float16)
# Version 2, empty: the header, a length for each attention layer, the states of the linear layers. Then per token.
REAL_SIZES = {
    "qwen3.5-397b-a17b": (195_379_300, 61_440),
    "qwen3.5-122b-a10b": (156_303_448, 49_152),
    "qwen3.5-35b-a3b": (65_863_760, 40_960),
    "cogito-v2-671b": (284, 140_544),
}


def tokens(n, seed=0):
    return mx.array(np.random.default_rng(seed).integers(0, 240, n), mx.uint32)


def after(model, n):
    """Returns caches that have absorbed n tokens, in chunks of 100."""
    cache = model.make_cache()
    for start in range(0, n, 100):
        model(tokens(n)[None, start : start + 100], cache)
    mx.eval([layer.state for layer in cache])
    return cache


def decode(model, cache, n=3):
    """Returns the logits of n tokens, one by one."""
    return [np.array(model(tokens(n, 1)[None, i : i + 1], cache).astype(mx.float32)) for i in range(n)]


def described(args, n, seed=0, version=2):
    """Returns header and random body as the format describes them, and the arrays in it, layer by layer."""
    rng = np.random.default_rng(seed)
    first = args.mixers[0]
    linear, latent = isinstance(first, Delta), isinstance(args.attention, Latent)
    nv, dv, dk = (first.value_heads, first.value_dim, first.key_dim) if linear else (0, 0, 0)
    channels = 2 * first.key_heads * dk + nv * dv if linear else 0
    widths = (args.attention.latent, args.attention.rotation.dims) if latent else (0, 0)
    words = [0x4D464C58, version, len(args.layers), 4 if linear else 1, args.num_key_value_heads]
    words += [args.head_dim, 3 * channels * 4, nv * dv * dk * 4]
    words += widths if version == 2 else []
    data, layers = b"".join(word.to_bytes(4, "little") for word in words), []
    for mixer in args.mixers:
        recurrent = isinstance(mixer, Delta)
        if recurrent:
            shapes = [(3, channels), (nv, dv, dk)]
        elif latent:
            shapes = [(n, width) for width in widths]
        else:
            shapes = [(n, args.num_key_value_heads, args.head_dim)] * 2
        arrays = [rng.standard_normal(shape).astype("<f4") for shape in shapes]
        length = b"" if recurrent else struct.pack("<i", n)
        data += length + b"".join(array.tobytes() for array in arrays)
        layers.append(arrays)
    return data, layers


def held(layer, n):
    """Returns a cache's arrays in the format's order: time first."""
    arrays = [np.array(array.astype(mx.float32)) for array in layer.state[:2]]
    if isinstance(layer, RecurrentCache):
        return [array[0] for array in arrays]
    rows = [array[0, :, :n].swapaxes(0, 1) for array in arrays]
    return [row[:, 0] if "Latent" in type(layer).__name__ else row for row in rows]


def same_states(one, other):
    return all(a is b for x, y in zip(one, other, strict=True) for a, b in zip(x, y, strict=True))


@pytest.mark.parametrize("variant", REAL_SIZES)
def test_sizes_of_real_models(variant):
    args = ModelArgs.from_variant(variant)
    empty, per_token = REAL_SIZES[variant]
    assert state_size(args, 0) == empty
    assert state_size(args, 13_859) == empty + 13_859 * per_token


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("family", FAMILIES)
def test_bytes_made_from_the_description_load(family, version):
    model = tiny_model(family, mx.float32)
    data, layers = described(model.args, 5, version=version)
    cache = model.make_cache()
    if version == 1 and family == "deepseek_v3":
        with pytest.raises(errors.SnapshotError, match="version 1"):
            load_state(model, cache, data)
        return
    load_state(model, cache, data + b"what follows is ignored")
    for layer, arrays in zip(cache, layers, strict=True):
        assert layer.offset == 5
        for got, want in zip(held(layer, 5), arrays, strict=True):
            np.testing.assert_array_equal(got, want)
    assert save_state(model, cache) == described(model.args, 5)[0]


def test_the_key_of_an_indexer_is_behind_the_rotated_key_of_its_position():
    model = tiny_model("deepseek_v32", mx.float32)
    cache = after(model, 5)
    latents, rotated, keys = (np.array(a[0, 0, :5]) for a in (*cache[0].state[:2], cache[1].state[0]))
    wanted = np.concatenate([latents.ravel(), np.concatenate([rotated, keys], axis=-1).ravel()])
    header, length = 3 * 4, 4
    got = np.frombuffer(save_state(model, cache), "<f4", len(wanted), header + length)
    np.testing.assert_array_equal(got, wanted)


def check_exact(model, cache):
    """Saves, decodes, restores and decodes: the bits must be the same, in the same caches and in new ones."""
    data = save_state(model, cache)
    assert len(data) == state_size(model, cache) == state_size(model, cache[-1].offset)
    want = decode(model, cache)
    for target in (cache, model.make_cache()):
        load_state(model, target, data)
        assert save_state(model, target) == data
        for got, wanted in zip(decode(model, target), want, strict=True):
            np.testing.assert_array_equal(got, wanted)


# Two of the families MFLX cannot express.
@pytest.mark.parametrize("family, n", drawn([*FAMILIES, "gpt_oss", "mimo_v2_flash"], [0, 1, 100, 257, 400], turns=2))
def test_a_restored_state_gives_the_same_bits(family, n):
    model = tiny_model(family, mx.float32)
    check_exact(model, after(model, n))


# MLX's half precision is slow on CPUs, so long states are random instead of computed.
@pytest.mark.parametrize("family, n", drawn(FAMILIES, [0, 1, 10, 255, 256, 257, 700], turns=2))
def test_a_restored_bfloat16_state_gives_the_same_bits(family, n):
    model = tiny_model(family, mx.bfloat16)
    cache = after(model, n) if n < 20 else model.make_cache()
    if n >= 20:
        load_state(model, cache, described(model.args, n)[0])
    check_exact(model, cache)


def test_the_comparison_of_bits_sees_one_wrong_float():
    model = tiny_model("qwen3_next", mx.float32)
    cache = after(model, 20)
    data = bytearray(save_state(model, cache))
    want = decode(model, cache)
    data[-4 * 20 * model.args.head_dim - 3] ^= 0x10
    load_state(model, cache, data)
    assert any((got != wanted).any() for got, wanted in zip(decode(model, cache), want, strict=True))


def test_half_precision_survives_exactly():
    for dtype in (mx.bfloat16, mx.float16):
        model = tiny_model("qwen3_next", dtype)
        cache = after(model, 5)
        other = model.make_cache()
        load_state(model, other, save_state(model, cache))
        for one, two in zip(cache, other, strict=True):
            assert [a.dtype for a in one.state[:2]] == [a.dtype for a in two.state[:2]]
            for a, b in zip(held(one, 5), held(two, 5), strict=True):
                np.testing.assert_array_equal(a, b)


def test_a_trimmed_cache_saves_what_is_left():
    model = tiny_model("qwen3_moe", mx.float32)
    cache, shorter = after(model, 90), after(model, 70)
    for layer in cache:
        layer.trim(20)
    got, want = save_state(model, cache), save_state(model, shorter)
    assert len(got) == len(want) and np.allclose(*(np.frombuffer(d, "<f4", offset=40) for d in (got, want)), atol=1e-4)


def set_word(data, index, value):
    return data[: 4 * index] + struct.pack("<I", value) + data[4 * index + 4 :]


def refused(model, data, words):
    """Loading raises an error with these words, and changes nothing."""
    cache = after(model, 4)
    before = [layer.state for layer in cache]
    with pytest.raises(errors.SnapshotError, match=words):
        load_state(model, cache, data)
    assert same_states(before, [layer.state for layer in cache])


@pytest.mark.parametrize("family", FAMILIES)
def test_every_word_of_the_header_is_checked(family):
    model = tiny_model(family, mx.float32)
    good, _ = described(model.args, 3)
    fields = ["num_hidden_layers", "full_attention_interval", "num_key_value_heads", "head_dim"]
    fields += ["linear_conv_bytes", "linear_ssm_bytes", "kv_lora_rank", "qk_rope_head_dim"]
    refused(model, set_word(good, 0, 0x584C464D), "begins with")
    for version in (0, 3, 0xFFFFFFFF):
        refused(model, set_word(good, 1, version), f"has version {version};")
    for i, field in enumerate(fields, start=2):
        refused(model, set_word(good, i, 7), f"has {field} 7;")
    for size in (0, 3, 7, 8, 39):
        refused(model, good[:size], f"{size} bytes is shorter")


def test_lengths_are_checked_before_anything_is_made():
    model = tiny_model("qwen3_next", mx.float32)
    good, _ = described(model.args, 3)
    at = len(good) - 4 - 2 * 3 * model.args.num_key_value_heads * model.args.head_dim * 4
    for value, words in (
        (-1, "layer 3 of the snapshot has -1 positions$"),
        (-(2**31), "layer 3 of the snapshot has -2147483648 positions$"),
        (MAX_LENGTH + 1, "layer 3 .* the format allows"),
        (2**31 - 1, "layer 3 .* the format allows"),
        (MAX_LENGTH, "ends in layer 3"),
        (4, "ends in layer 3"),
    ):
        refused(model, good[:at] + struct.pack("<i", value) + good[at + 4 :], words)
    refused(model, good[:-1], "ends in layer 3")
    refused(model, good[:41], "ends in layer 0")


def test_layers_of_different_lengths_are_refused():
    model = tiny_model("qwen3_moe", mx.float32)
    long, _ = described(model.args, 3)
    short, _ = described(model.args, 2)
    layer = (len(long) - 40) // 3
    refused(model, long[: 40 + 2 * layer] + short[-((len(short) - 40) // 3) :], "2 to 3 positions")


def test_states_that_cannot_be_expressed():
    model = tiny_model("qwen3_next", mx.float32)
    with pytest.raises(errors.SnapshotError, match="no layer has attention"):
        state_size(replace(model.args, layers=model.args.layers[:3]), 0)
    cache = after(model, 4)
    cache[1].offset = 3
    with pytest.raises(errors.SnapshotError, match="3 to 4 tokens"):
        save_state(model, cache)
    batch = model.make_cache()
    model(mx.zeros((2, 3), mx.uint32), batch)
    with pytest.raises(errors.SnapshotError, match="batch of 2"):
        save_state(model, batch)
    for wrong in (cache[:3], tiny_model("qwen3_moe", mx.float32).make_cache()):
        with pytest.raises(errors.RequestError, match="make_cache"):
            load_state(model, wrong, b"")


def test_reads_in_flight_are_awaited(monkeypatch):
    model = tiny_model("qwen3_moe", mx.float32)
    calls = []
    monkeypatch.setattr(model.experts, "drain", lambda: calls.append("drain"), raising=False)
    cache = after(model, 2)
    data = save_state(model, cache)
    assert calls == ["drain"]
    load_state(model, cache, data)
    assert calls == ["drain"] * 2


@pytest.fixture(scope="module")
def saved():
    return {
        family: save_state(tiny_model(family, mx.float32), after(tiny_model(family, mx.float32), 6))
        for family in FAMILIES
    }


@st.composite
def damage(draw, size):
    """Draws a function that cuts, flips a bit of, or overwrites a word of `size` bytes, usually in the header."""
    where = draw(st.integers(0, 79) | st.integers(0, size - 1))
    kind = draw(st.sampled_from(["cut", "flip", "word", "insert"]))
    bit, value = draw(st.integers(0, 7)), draw(st.integers(0, 2**32 - 1) | st.integers(0, 9))
    start = where - where % 4

    def apply(data):
        changed = bytearray(data)
        if kind == "cut":
            del changed[where:]
        elif kind == "flip":
            changed[where] ^= 1 << bit
        elif kind == "word":
            changed[start : start + 4] = struct.pack("<I", value)
        else:
            changed[where:where] = bytes(value % 64)
        return bytes(changed)

    return apply


@pytest.mark.parametrize("family", FAMILIES)
@given(data=st.data())
@settings(max_examples=examples(60))
def test_damaged_bytes_are_refused_or_load_as_they_are(family, saved, data):
    model = tiny_model(family, mx.float32)
    bad = data.draw(damage(len(saved[family])))(saved[family])
    cache = after(model, 2)
    before = [layer.state for layer in cache]
    try:
        load_state(model, cache, bad)
    except errors.SnapshotError:
        assert same_states(before, [layer.state for layer in cache])
        return
    again = save_state(model, cache)
    version = bad[4]
    assert again[:4] + again[8:32] == bad[:4] + bad[8:32]
    assert again[40:] == bad[{1: 32, 2: 40}[version] :][: len(again) - 40]


@given(data=st.binary(max_size=400) | st.binary(max_size=400).map(lambda b: struct.pack("<2I", 0x4D464C58, 2) + b))
@example(data=b"")
@settings(max_examples=examples(60))
def test_arbitrary_bytes_are_refused(data):
    model = tiny_model("qwen3_moe", mx.float32)
    with pytest.raises(errors.SnapshotError):
        load_state(model, model.make_cache(), data)


def test_activation_dtype():
    assert all(tiny_model("qwen3_moe", dtype).activation_dtype == dtype for dtype in DTYPES)

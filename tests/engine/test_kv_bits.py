"""Keys and values in 8 bits: when they are chosen, what they cost, and that no bit depends on when a row was
rounded.
"""

from dataclasses import replace

import goldens
import mlx.core as mx
import numpy as np
import pytest
from grids import drawn
from tiny_models import tiny_directory

from moeflux_mlx import (
    PromptDirectory,
    SequenceRows,
    load_model,
    load_state,
    model_fingerprint,
    reuse_prefix,
    save_state,
)
from moeflux_mlx.convert import convert
from moeflux_mlx.errors import FingerprintError, RequestError, SnapshotError
from moeflux_mlx.mixers.grouped import cache as grouped
from moeflux_mlx.ops import kv_rows
from moeflux_mlx.planning.memory_plan import keeping, state_bytes, state_lines
from moeflux_mlx.spec import ModelArgs, variants
from moeflux_mlx.state.prompt_file import load_prompt, save_prompt
from moeflux_mlx.state.snapshot import state_size

TEXT = np.random.default_rng(0).integers(0, 240, 60)
FAMILIES = ("qwen3_moe", "gpt_oss", "qwen3_next")  # all positions; windows as well; recurrent layers as well
LARGE = {
    *("glm-4.5-air", "glm-4.5v", "qwen3-235b-a22b", "solar-open-100b", "minimax-m2-230b-a10b", "hy3-295b-a21b"),
    *(
        "dots1-142b-a14b",
        "hunyuan-a13b-80b",
        "k2-horizon-mova-36b-a4b",
        "glm-4.7",
        "olmoe-1b-7b",
        "qwen1.5-moe-a2.7b",
        "mixtral-8x7b",
        "mixtral-8x22b",
    ),
}


@pytest.fixture
def opened():
    """Loads models and closes them afterwards."""
    models = []

    def load(family, **options):
        models.append(load_model(tiny_directory(family), **{"kv_bits": 8, **options}))
        return models[-1]

    yield load
    for model in models:
        model.experts.close()


def after(model, tokens, lengths=(40,)):
    """Returns caches that have absorbed the text so far, in calls of these lengths and then one by one."""
    cache, at = model.make_cache(), 0
    for length in (*lengths, *[1] * (tokens - sum(lengths))):
        model(mx.array(TEXT[None, at : at + length]), cache)
        at += length
    return cache


def decoded(model, cache, count=3):
    """Returns the logits of the next tokens of the text, one by one."""
    at = cache[0].offset
    tables = (model(mx.array(TEXT[None, i : i + 1]), cache)[0, -1] for i in range(at, at + count))
    return np.array([np.array(logits.astype(mx.float32)) for logits in tables])


def test_a_model_says_its_bits_if_its_first_layer_attends_to_blocks():
    args = ModelArgs.from_variant("minimax-m3-428b")
    turned = replace(args, layers=args.layers[::-1])
    assert turned.mixers[0].blocks is not None
    assert turned.kv_bits is None and turned.with_kv_bits(8).kv_bits == 8


def test_families_with_large_keys_and_values_use_8_bits_by_default():
    found = {name for name in variants() if keeping(ModelArgs.from_variant(name), "auto", None).kv_bits}
    assert found == LARGE
    for name in LARGE:
        args = ModelArgs.from_variant(name)
        assert keeping(args, "auto", mx.float32) == keeping(args, 16, None) == args
        assert keeping(args, "auto", mx.bfloat16) == keeping(args, "8", mx.float32) == args.with_kv_bits(8)


def test_what_is_refused(opened):
    with pytest.raises(RequestError, match="kv_bits '4' is not one of auto, 8, 16"):
        opened("qwen3_moe", kv_bits="4")
    with pytest.raises(RequestError, match="this deepseek_v3 model keeps latents or states, which are small"):
        opened("deepseek_v3")


@pytest.mark.parametrize("name", ["minimax-m2-230b-a10b", "gpt-oss-120b", "mimo-v2-flash-309b"])
def test_rows_of_8_bits_take_little_more_than_half(name):
    args = ModelArgs.from_variant(name)
    assert state_bytes(args.with_kv_bits(8), 32768, 2) <= 0.54 * state_bytes(args, 32768, 2)
    (line,) = state_lines(args, 32768, 2)
    assert line.endswith("16 are planned")


@pytest.mark.parametrize("family", FAMILIES)
def test_the_plan_equals_what_a_text_takes(opened, family):
    model = opened(family)
    cache = after(model, 60)
    itemsize = model.activation_dtype.size
    assert sum(layer.nbytes for layer in cache) == state_bytes(model.args, 60, itemsize)
    assert len(save_state(model, cache)) == state_size(model, 60)
    if family == "qwen3_moe":  # a head has 64 values
        assert sum(layer.nbytes for layer in cache) <= 0.54 * state_bytes(model.args.with_kv_bits(None), 60, 2)


@pytest.mark.parametrize("family, dtype", drawn(FAMILIES, [None, mx.bfloat16]))
def test_one_set_of_bits_in_every_mode(opened, family, dtype):
    """The bits do not depend on how experts are read, or on whether a step is compiled."""
    ways = [{"expert_io": "mmap"}, {"expert_io": "resident"}, {"expert_io": "pread", "expert_cache_bytes": 1}]
    models = (opened(family, dtype=dtype, **way) for way in ways)
    first, *others = (decoded(model, after(model, 45)) for model in models)
    assert all(np.array_equal(other, first) for other in others)


@pytest.mark.parametrize("family", FAMILIES)
def test_what_was_saved_goes_on_with_the_same_bits(opened, family, tmp_path):
    model = opened(family)
    cache, restored, reused = after(model, 50), model.make_cache(), model.make_cache()
    fingerprint = model_fingerprint(tiny_directory(family), model.activation_dtype, model.cpu_activations, 8)
    store = PromptDirectory(tmp_path, fingerprint)
    store.save(model, cache, TEXT[:50].tolist())
    load_state(model, restored, save_state(model, cache))
    assert reuse_prefix(model, reused, TEXT.tolist(), store) == 50
    want = decoded(model, cache)
    assert np.array_equal(decoded(model, restored), want) and np.array_equal(decoded(model, reused), want)


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_that_were_taken_back_leave_no_trace(opened, family):
    """A row of a step has the bits that it has alone."""
    model = opened(family)
    cache, alone = after(model, 50), after(model, 50)
    for count, keep in ((8, 3), (5, 0), (6, 6)):
        at = cache[0].offset
        step = model.step([SequenceRows(cache, TEXT[at : at + count].tolist())])
        step.rewind(0, keep)
        if keep:
            assert np.array_equal(np.array(step.logits.astype(mx.float32))[:keep], decoded(model, alone, keep))
    assert cache[0].offset == alone[0].offset == 59


def test_a_text_that_is_cut_continues_as_if_it_had_ended_there(opened):
    model = opened("qwen3_moe")
    cache, short = after(model, 58), after(model, 41)
    for layer in cache:
        layer.trim(17)
    assert np.array_equal(decoded(model, cache), decoded(model, short))


def test_a_state_of_values_is_not_taken_for_one_of_bytes(opened, tmp_path):
    path = tiny_directory("qwen3_moe")
    rounded, plain = opened("qwen3_moe"), opened("qwen3_moe", kv_bits=16)
    data = save_state(plain, after(plain, 40))
    with pytest.raises(SnapshotError, match="with the same --kv-bits"):
        load_state(rounded, rounded.make_cache(), data)
    with pytest.raises(RequestError, match="caches do not fit"):
        save_state(rounded, after(plain, 40))
    kinds = [model_fingerprint(path, mx.float32, 8, bits) for bits in (None, 8)]
    assert kinds[0].difference(kinds[1]) == "another --kv-bits" and kinds[0] == model_fingerprint(path, mx.float32, 8)
    save_prompt(tmp_path / "prompt", plain, after(plain, 40), TEXT[:40].tolist(), kinds[0])
    with pytest.raises(FingerprintError, match="another --kv-bits"):
        load_prompt(tmp_path / "prompt", rounded, rounded.make_cache(), kinds[1])


# ---- what they cost


def divergence(reference, other):
    """Returns the mean KL divergence in nats of two tables of logits [N, vocab_size]."""
    one, two = (np.array(table - mx.logsumexp(table, axis=-1, keepdims=True)) for table in (reference, other))
    return float((np.exp(one, dtype=np.float64) * (one - two)).sum(-1).mean())


def costs(folder, family, tokens):
    """Returns the KL divergences of 4-bit weights from 8-bit ones, and of 8-bit keys and values from exact ones."""
    text = mx.array(np.random.default_rng(1).integers(0, 240, (1, tokens)))

    def logits(path, bits=16):
        model = load_model(path, dtype=mx.float32, kv_bits=bits)
        out = model(text)[0]
        mx.eval(out)
        model.experts.close()
        return out

    source = goldens.write_variant(folder / f"{family}-floats", family, "hub")
    fine, coarse = (folder / f"{family}-{bits}" for bits in (8, 4))
    for path, bits in ((fine, 8), (coarse, 4)):
        convert(source, path, q_bits=bits)
    exact = logits(coarse)
    return divergence(logits(fine), exact), divergence(exact, logits(coarse, 8))


OTHERS = ("qwen3_next", "hy_v3", "glm4_moe", "gpt_oss", "solar_open")


@pytest.mark.parametrize(
    "family, tokens",
    [
        ("minimax_m2", 256),
        *[pytest.param(family, 4096, marks=pytest.mark.full) for family in ("qwen3_moe", "minimax_m2", *OTHERS)],
    ],
)
def test_rounding_costs_at_most_a_tenth_of_what_4_bit_weights_do(tmp_path, family, tokens):
    weights, rounded = costs(tmp_path, family, tokens)
    assert 1e-9 < rounded < 0.1 * weights


def test_a_cost_that_is_too_high_is_noticed(tmp_path, monkeypatch):
    """Codes without their last four bits cost too much."""

    def encode(x):
        rows = kv_rows.encode(x)
        return mx.concatenate([rows[..., : x.shape[-1]] // 16 * 16, rows[..., x.shape[-1] :]], axis=-1)

    monkeypatch.setattr(grouped, "encode", encode)
    with pytest.raises(AssertionError):
        test_rounding_costs_at_most_a_tenth_of_what_4_bit_weights_do(tmp_path, "minimax_m2", 256)

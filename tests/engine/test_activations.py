"""The number of bits to which the CPU's products round activations: how it is chosen, and what does not depend on
it.
"""

import mlx.core as mx
import numpy as np
import pytest
from tiny_models import tiny_directory

from moeflux_mlx import load_model, model_fingerprint
from moeflux_mlx.errors import RequestError
from moeflux_mlx.ops import backend, native
from moeflux_mlx.planning import machine
from moeflux_mlx.planning.machine import activation_bits

TOKENS = mx.array(np.random.default_rng(0).integers(0, 256, (1, 40)))
needs_native = pytest.mark.skipif(not backend.computes_natively(mx.float32), reason="MLX computes here")


def logits(cut=40, **options):
    """Returns the logits of TOKENS and then, one by one, of a few more."""
    model = load_model(tiny_directory("qwen3_moe"), **options)
    cache = model.make_cache()
    parts = [TOKENS[:, :cut], TOKENS[:, cut:], *(TOKENS[:, i : i + 1] for i in range(4))]
    outputs = np.concatenate([np.array(model(part, cache))[0] for part in parts if part.size])
    model.experts.close()
    return outputs


@needs_native
def test_how_the_number_of_bits_is_chosen(backend_is):
    assert [activation_bits(asked, None) for asked in ("auto", 8, "16", 24)] == [machine.AUTO_BITS, 8, 16, 24]
    assert activation_bits("auto", mx.float32) == activation_bits("24", mx.float32) == native.EXACT
    assert activation_bits("8", mx.bfloat16) == native.EXACT, "MLX computes those"
    backend_is("cuda")
    assert activation_bits("8", None) == native.EXACT


@pytest.mark.parametrize("asked, dtype", [("12", None), (0, None), ("", None), ("8", mx.float32), (16, mx.float32)])
def test_impossible_bits_are_refused(asked, dtype):
    with pytest.raises(RequestError, match="cpu_activations"):
        activation_bits(asked, dtype)
    with pytest.raises(RequestError, match="cpu_activations"):
        load_model(tiny_directory("qwen3_moe"), dtype=dtype, set={"cpu_activations": asked})


@needs_native
@pytest.mark.parametrize("bits", [8, 16])
def test_same_bits_in_every_mode(bits):
    pool = {"expert_io": "pread", "expert_cache_bytes": 1}
    mapped, exact = logits(expert_io="mmap", set={"cpu_activations": bits}), logits(dtype=mx.float32)
    assert np.array_equal(logits(expert_io="resident", set={"cpu_activations": bits}), mapped)
    assert np.array_equal(logits(**pool, set={"cpu_activations": bits}), mapped)
    error = np.abs(mapped - exact).max() / exact.std()
    assert 1e-6 < error < (0.5 if bits == 8 else 0.01)


@needs_native
@pytest.mark.usefixtures("team")
def test_a_number_of_threads_changes_nothing():
    before = logits(set={"cpu_activations": 8})
    for count in (1, 3):
        native.set_threads(count)
        assert np.array_equal(logits(set={"cpu_activations": 8}), before)


@needs_native
def test_models_of_both_kinds_coexist():
    path = tiny_directory("qwen3_moe")
    exact, rounded = load_model(path, dtype=mx.float32), load_model(path, set={"cpu_activations": 8})
    first = np.array(exact(TOKENS))
    assert not np.array_equal(rounded(TOKENS), first) and np.array_equal(exact(TOKENS), first)


@needs_native
def test_a_saved_prompt_belongs_to_its_activations():
    path = tiny_directory("qwen3_moe")
    exact = model_fingerprint(path, mx.float32)
    rounded = model_fingerprint(path, mx.float32, 8)
    assert exact == model_fingerprint(path, mx.float32, native.EXACT) and exact.dtype == "float32"
    assert rounded.difference(exact) == "another --set cpu_activations"

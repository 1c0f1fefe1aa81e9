"""The compiled decode step against the plain one, on MLX's CPU backend and without native kernels."""

import gc
import re
from concurrent.futures import ThreadPoolExecutor

import goldens
import mlx.core as mx
import numpy as np
import pytest
from tiny_models import tiny_directory, tiny_model, use_plain_operations

from metal import msl
from moeflux_mlx.engine.engine import load_model
from moeflux_mlx.errors import ExpertIOError
from moeflux_mlx.experts import mapped
from moeflux_mlx.model.compiled import DecodeStep
from moeflux_mlx.ops import backend, launch, linear
from moeflux_mlx.ops.experts import Shared

FAMILIES = (*goldens.families(), "gpt_oss")


def make_resident(monkeypatch, family, dtype=mx.float32):
    """A model as on a GPU: MLX operations only, every layer's experts one array, tokens by the compiled step."""
    use_plain_operations(monkeypatch)
    with monkeypatch.context() as patch:
        patch.setattr(mapped, "map_file", copied)
        return load_model(tiny_directory(family), dtype=dtype, expert_io="mmap")


def copied(path, experts, size):
    return mx.array(np.fromfile(path, np.uint32).reshape(experts, -1)), None


@pytest.fixture
def resident_model(monkeypatch, request):
    return make_resident(monkeypatch, request.param)


@pytest.mark.parametrize("resident_model", [*FAMILIES, "mistral4"], indirect=True)
def test_compiled_step_equals_the_plain_one(resident_model):
    model = resident_model
    prompt, rest = list(range(5, 25)), [7, 3, 9, 30]
    plain, fixed = model.make_cache(), model.make_cache()
    for cache in (plain, fixed):
        mx.eval(model(mx.array([prompt]), cache))
    step, model.decode_step = model.decode_step, None
    for token in rest:
        tokens = mx.array([[token]])
        assert step.takes(tokens, fixed)
        want, got = model(tokens, plain), step(tokens, fixed)[0]
        np.testing.assert_allclose(np.array(got), np.array(want), atol=2e-5)
    assert [c.offset for c in fixed] == [c.offset for c in plain]


@pytest.mark.usefixtures("plain_operations")
@msl.needed
@pytest.mark.usefixtures("cpu_device")
@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_on_kernels_equal_those_on_plain_operations(monkeypatch, family):
    """Single tokens of a whole model through every kernel there is, Metal's text executed by the harness."""
    monkeypatch.setattr(linear, "PAYS_FROM", 0)
    model = tiny_model(family, mx.float32)
    caches = [model.make_cache() for _ in range(2)]
    for cache in caches:
        mx.eval(model(mx.array([list(range(5, 25))]), cache))
    for token in ([[7]], [[3]]):
        want = np.array(model(mx.array(token), caches[0]))
        with msl.launching():
            got = np.array(model(mx.array(token), caches[1]))
        np.testing.assert_allclose(got, want, atol=2e-4)


@pytest.mark.parametrize("resident_model", ["qwen3_5_moe", "deepseek_v3"], indirect=True)
def test_capacity_grows_in_the_middle(resident_model):
    """The step that no longer fits the arrays' capacity sees everything before it."""
    model = resident_model
    prompt = (np.arange(255) % 200).tolist()
    plain, fixed = model.make_cache(), model.make_cache()
    for cache in (plain, fixed):
        mx.eval(model(mx.array([prompt]), cache))
    step, model.decode_step = model.decode_step, None
    for token in (1, 2, 3):
        want, got = model(mx.array([[token]]), plain), step(mx.array([[token]]), fixed)[0]
        np.testing.assert_allclose(np.array(got), np.array(want), atol=5e-5)


@msl.needed
@pytest.mark.usefixtures("cpu_device")
@pytest.mark.parametrize("family", ["qwen3_5_moe", "deepseek_v3"])
def test_kernels_give_resident_and_streamed_experts_the_same_bits(monkeypatch, family):
    """The first are chosen in the launch that multiplies them, the others before it."""
    joined, joins = [], Shared.joins
    monkeypatch.setattr(Shared, "joins", lambda *args: joined.append(joins(*args)) or joined[-1])
    models = [make_resident(monkeypatch, family, mx.bfloat16), load_model(tiny_directory(family), dtype=mx.bfloat16)]
    models[0].decode_step = None  # which the harness of the kernels cannot trace
    logits = []
    with msl.launching():
        for model in models:
            cache = model.make_cache()
            parts = [model(mx.array([chunk]), cache) for chunk in ([5, 6, 7], [9])]
            logits.append(mx.concatenate(parts, axis=1))
        assert mx.array_equal(*logits)
    assert joined and all(joined), "the shared expert goes with the routed ones"


def pretended(inputs, output_shapes, output_dtypes, **_):
    """A kernel's outputs, which nobody computes."""
    outputs = [mx.zeros(*output) for output in zip(output_shapes, output_dtypes, strict=True)]
    mx.eval(outputs)
    return mx.depends(outputs, inputs)


@pytest.mark.usefixtures("cpu_device")
@pytest.mark.parametrize(
    "family, most",
    [*((family, 8) for family in goldens.families()), ("mistral4", 9), ("glm4_moe_air", 9), ("gpt_oss", 11)],
)
def test_a_layer_is_at_most_so_many_launches(monkeypatch, tmp_path, family, most):
    """A temperature of queries is one more, and so is a sum of biases, of which a compiled step joins some.

    Counted as scripts/bench/bench_decode.py does: operations of the graph that are no views.
    """
    monkeypatch.setattr(linear, "PAYS_FROM", 0)
    model = make_resident(monkeypatch, family, mx.bfloat16)
    cache = model.make_cache()
    x = mx.zeros((1, 1, model.args.hidden_size), mx.bfloat16)
    mx.eval(model(mx.array([[5, 6, 7]]), cache), x, [layer.state[:2] for layer in cache])
    monkeypatch.setattr(backend, "name", lambda: "metal")
    monkeypatch.setattr(launch, "built", lambda *kernel: pretended)
    for layer in model.args.moe_layers:
        mx.export_to_dot(str(tmp_path / "graph"), model.model.layers[layer](x, cache[layer]))
        names = re.findall(r'label ?= ?"(\w+)", shape=rectangle', (tmp_path / "graph").read_text())
        launched = [name for name in names if name not in ("Reshape", "Slice", "Split", "Broadcast")]
        assert 5 < len(launched) <= most, launched


def test_an_empty_cache_is_not_taken():
    model = load_model(tiny_directory("qwen3_moe"), dtype=mx.float32)
    assert not DecodeStep.takes(mx.array([[1]]), model.make_cache())
    assert not DecodeStep.takes(mx.array([[1, 2]]), [])


def test_nothing_computes_or_is_held_after_close(monkeypatch):
    """The traces of several threads hold every expert as a constant."""
    model = make_resident(monkeypatch, "qwen3_moe")
    cache, token = model.make_cache(), mx.array([[1]])
    mx.eval(model(mx.array([[1, 2, 3]]), cache))
    with ThreadPoolExecutor(1) as pool:
        for call in (lambda: mx.eval(model(token, cache)), lambda: pool.submit(call_in_thread, model).result()):
            call()
        gc.collect()
        before, experts = mx.get_active_memory(), model.experts.layout.total_bytes
        model.experts.close()
        assert before - mx.get_active_memory() >= experts
    with pytest.raises(ExpertIOError, match="closed"):
        model(token, cache)


def call_in_thread(model):
    cache = model.make_cache()
    mx.eval(model(mx.array([[1, 2, 3]]), cache))
    mx.eval(model(mx.array([[1]]), cache))

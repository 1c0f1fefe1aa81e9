"""The compiled decode step against the plain one, on MLX's CPU backend and without native kernels."""

import mlx.core as mx
import numpy as np
import pytest
from tiny_models import tiny_directory

from moeflux_mlx import cpu, native
from moeflux_mlx.decode import DecodeStep
from moeflux_mlx.load import load_model

FAMILIES = ("qwen3_moe", "qwen3_next", "qwen3_5_moe", "deepseek_v3")


@pytest.fixture
def resident_model(monkeypatch, request):
    """A model as on a GPU: MLX operations only, every layer's experts one array."""
    monkeypatch.setattr(native, "available", lambda: False)
    monkeypatch.setattr(native, "warn_if_missing", lambda: None)
    assert not cpu.takes(mx.zeros((1,)))
    model = load_model(tiny_directory(request.param), dtype=mx.float32)
    layers = {}
    for layer, path in ((i, tiny_directory(request.param) / "packed_experts") for i in model.args.moe_layers):
        layout = model.experts.layout
        layers[layer] = mx.array(np.fromfile(path / layout.file_name(layer), np.uint32).reshape(-1, layout.words))
    monkeypatch.setattr(model.experts, "resident", layers.__getitem__)
    return model


@pytest.mark.parametrize("resident_model", FAMILIES, indirect=True)
def test_compiled_step_equals_the_plain_one(resident_model):
    model = resident_model
    prompt, rest = list(range(5, 25)), [7, 3, 9, 30]
    plain, fixed = model.make_cache(), model.make_cache()
    for cache in (plain, fixed):
        mx.eval(model(mx.array([prompt]), cache))
    step = DecodeStep(model)
    for token in rest:
        tokens = mx.array([[token]])
        assert step.takes(tokens, fixed)
        want, got = model(tokens, plain), step(tokens, fixed)
        np.testing.assert_allclose(np.array(got), np.array(want), atol=2e-5)
    assert [c.offset for c in fixed] == [c.offset for c in plain]


@pytest.mark.parametrize("resident_model", ["qwen3_5_moe", "deepseek_v3"], indirect=True)
def test_capacity_grows_in_the_middle(resident_model):
    """The step that no longer fits the arrays' capacity sees everything before it."""
    model = resident_model
    prompt = (np.arange(255) % 200).tolist()
    plain, fixed = model.make_cache(), model.make_cache()
    for cache in (plain, fixed):
        mx.eval(model(mx.array([prompt]), cache))
    step = DecodeStep(model)
    for token in (1, 2, 3):
        want, got = model(mx.array([[token]]), plain), step(mx.array([[token]]), fixed)
        np.testing.assert_allclose(np.array(got), np.array(want), atol=5e-5)


def test_an_empty_cache_is_not_taken():
    model = load_model(tiny_directory("qwen3_moe"), dtype=mx.float32)
    assert not DecodeStep.takes(mx.array([[1]]), model.make_cache())
    assert not DecodeStep.takes(mx.array([[1, 2]]), [])

"""Statistics of the inputs of matrices, compared with plain numpy."""

import goldens
import mlx.core as mx
import numpy as np
import oracle
import pytest
from tiny_models import tiny_directory, tiny_model

from moeflux_mlx.calibration.experts import OneByOne
from moeflux_mlx.calibration.layers import Collecting, LayerRun
from moeflux_mlx.calibration.statistics import LayerStatistics, Statistics
from moeflux_mlx.calibration.weights import open_layers
from moeflux_mlx.errors import RequestError
from moeflux_mlx.experts.routing import Routing
from moeflux_mlx.layers import Weight

pytestmark = pytest.mark.usefixtures("cpu_device")


def collected(family, folder, hessians=True, rows_at_once=1 << 16):
    tokens, _ = goldens.golden(family)
    weights = open_layers(tiny_directory(family, "hub"))
    options = {"collecting": Collecting(hessians), "rows_at_once": rows_at_once}
    LayerRun(weights, [tokens, tokens[:20]], folder, mx.float32, **options).run()
    return Statistics(folder), np.concatenate([tokens, tokens[:20]])


def test_the_first_matrix_s_inputs_are_the_normed_embeddings(tmp_path):
    statistics, tokens = collected("qwen3_moe", tmp_path)
    model = tiny_model("qwen3_moe", mx.float32, "hub")
    norm = model.layers[0].input_layernorm
    x = oracle.rms_norm(np.array(model.model.embed_tokens(mx.array(tokens))), np.array(norm.weight), norm.eps)
    for name in ("q_proj", "k_proj", "v_proj"):  # stored once
        inputs = statistics.inputs(f"model.layers.0.self_attn.{name}")
        assert inputs.rows.tolist() == [len(tokens)]
        assert np.allclose(inputs.mean_square, (x**2).mean(0), rtol=1e-4)
        assert np.allclose(inputs.hessian, x.T @ x, rtol=1e-4, atol=1e-3)


def test_experts_inputs_are_those_of_the_rows_that_chose_them(tmp_path):
    """Each row is counted once for each of its experts."""
    statistics, tokens = collected("qwen3_moe", tmp_path)
    top_k = goldens.top_k("qwen3_moe")
    for layer in range(2):
        parts = {
            name: statistics.inputs(f"model.layers.{layer}.mlp.experts.{name}") for name in ("input", "gate_up", "down")
        }
        assert parts["input"].rows.tolist() == [len(tokens)]
        assert np.array(parts["gate_up"].rows).sum() == np.array(parts["down"].rows).sum() == top_k * len(tokens)
        total = np.array(parts["gate_up"].hessian).sum(0)
        assert np.allclose(total, top_k * np.array(parts["input"].hessian), rtol=1e-4, atol=1e-3)
        for inputs in parts.values():
            rows = np.array(inputs.rows, np.float32).reshape(*inputs.mean_square.shape[:-1], 1)
            diagonal = np.diagonal(np.array(inputs.hessian), axis1=-2, axis2=-1)
            assert np.allclose(diagonal, rows * np.array(inputs.mean_square), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("at_once", [4, 1 << 14])
def test_experts_one_by_one_are_those_of_numpy(tmp_path, monkeypatch, at_once):
    monkeypatch.setattr("moeflux_mlx.calibration.experts.ROWS_AT_ONCE", at_once)
    weights, model = open_layers(tiny_directory("qwen3_moe", "hub")), tiny_model("qwen3_moe", mx.float32, "hub")
    seen = LayerStatistics(1, model.layers[1], tmp_path)
    rng = np.random.default_rng(3)
    T, E, H = 30, weights.args.num_experts, weights.args.hidden_size
    ids = np.stack([rng.permutation(E)[:2] for _ in range(T)])
    chances, x, residual, shared = rng.random((T, 2), np.float32), *rng.standard_normal((3, T, H), np.float32)
    experts = OneByOne(weights, mx.float32)
    experts.observer = seen
    made = experts(Routing(1, ids, chances), x, residual, shared)
    seen.write()
    wanted, squares = residual + shared, np.zeros((E, weights.args.moe_intermediate_size))
    for expert in range(E):
        gate, up, down = map(np.array, weights.expert(1, expert, mx.float32).matrices)
        rows = x[(ids == expert).any(1)]
        gated = rows @ gate.T
        act = gated / (1 + np.exp(-gated)) * (rows @ up.T)
        wanted[(ids == expert).any(1)] += act @ down.T * chances[ids == expert][:, None]
        squares[expert] = (act**2).sum(0) / max(len(act), 1)
    assert np.allclose(made, wanted, atol=1e-4)
    assert np.allclose(
        Statistics(tmp_path).inputs("model.layers.1.mlp.experts.down").mean_square, squares, rtol=1e-3, atol=1e-6
    )


@pytest.mark.parametrize("family", ["deepseek_v3", "deepseek_v4", "qwen4_exp", "nemotron_h_latent"])
def test_each_matrix_of_a_layer_is_seen(tmp_path, family):
    statistics, tokens = collected(family, tmp_path, hessians=False)
    model = tiny_model(family, mx.float32, "hub")
    matrices = {path: one.shape[-1] for path, one in model.named_modules() if isinstance(one, Weight)}
    for path, columns in matrices.items():
        inputs = statistics.inputs(path)
        assert (inputs is None) == (".layers." not in path), path
        if inputs is not None:
            assert inputs.mean_square.shape == (columns,) and inputs.hessian is None
            assert mx.all(inputs.mean_square >= 0) and mx.max(inputs.mean_square) > 0


def test_passes_of_few_rows_give_the_same_sums(tmp_path):
    whole, _ = collected("qwen3_moe", tmp_path / "whole")
    parts, _ = collected("qwen3_moe", tmp_path / "parts", rows_at_once=1)
    for name in ("self_attn.o_proj", "mlp.experts.gate_up", "mlp.experts.down", "mlp.experts.input"):
        one, other = (statistics.inputs(f"model.layers.1.{name}") for statistics in (whole, parts))
        assert np.array_equal(one.rows, other.rows)
        assert np.allclose(one.mean_square, other.mean_square, rtol=1e-4)
        assert np.allclose(one.hessian, other.hessian, rtol=1e-3, atol=1e-4)


def test_a_layer_that_was_not_run_has_no_statistics(tmp_path):
    with pytest.raises(RequestError, match="has not reached layer 7"):
        Statistics(tmp_path).inputs("model.layers.7.self_attn.q_proj")

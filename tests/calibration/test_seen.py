"""What a layer's matrices multiply, compared with plain numpy."""

import goldens
import mlx.core as mx
import numpy as np
import oracle
import pytest
from tiny_models import tiny_directory, tiny_model, write_tokenizer

from moeflux_mlx.calibration.calibrated import Calibration, convert_calibrated, read_texts
from moeflux_mlx.calibration.layers import LayerRun
from moeflux_mlx.calibration.seen import SeenLayer
from moeflux_mlx.calibration.weights import OneByOne, open_layers
from moeflux_mlx.experts.routing import Routing
from moeflux_mlx.layers import Weight
from moeflux_mlx.packing.conversion import ConvertSettings
from moeflux_mlx.packing.located import Located
from moeflux_mlx.packing.recipe import Recipe
from moeflux_mlx.text.tokenizer import load_tokenizer

pytestmark = pytest.mark.usefixtures("cpu_device")


class SeeingRun(LayerRun):
    """Keeps what the matrices of each layer have multiplied."""

    def _pass(self, layer, progress):
        made = self._layer(layer, self.weights)
        self.seen = {**getattr(self, "seen", {}), layer: SeenLayer(layer, made, products=True)}
        with self._tables(layer) as tables:
            self._keep(layer, self._outputs(layer, made, tables, self.seen[layer], progress))


def seen_by(family, folder, rows_at_once=1 << 16):
    tokens, _ = goldens.golden(family)
    weights = open_layers(Located(tiny_directory(family, "hub")))
    run = SeeingRun(weights, [tokens, tokens[:20]], folder, mx.float32, rows_at_once=rows_at_once)
    run.run()
    return run.seen, np.concatenate([tokens, tokens[:20]])


def test_the_first_matrix_s_inputs_are_the_normed_embeddings(tmp_path):
    seen, tokens = seen_by("qwen3_moe", tmp_path)
    model = tiny_model("qwen3_moe", mx.float32, "hub")
    norm = model.layers[0].input_layernorm
    x = oracle.rms_norm(np.array(model.model.embed_tokens(mx.array(tokens))), np.array(norm.weight), norm.eps)
    for name in ("q_proj", "k_proj", "v_proj"):  # kept once
        inputs = seen[0].of(f"model.layers.0.self_attn.{name}")
        assert inputs.weight == len(tokens)
        assert np.allclose(inputs.mean, x.T @ x / len(x), rtol=1e-4, atol=1e-5)


def test_rows_of_experts_are_those_that_chose_them(tmp_path):
    """Each row is there once for each of its experts."""
    seen, tokens = seen_by("qwen3_moe", tmp_path)
    for one in seen.values():
        rows = [
            np.array(one.rows(expert).x)
            for expert in range(tiny_model("qwen3_moe", mx.float32, "hub").args.num_experts)
        ]
        top_k = goldens.top_k("qwen3_moe")
        assert one.input.weight == len(tokens) and sum(map(len, rows)) == top_k * len(tokens)
        total = sum(x.T @ x for x in rows)
        assert np.allclose(total, top_k * one.input.total, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("products", [True, False])
@pytest.mark.parametrize("at_once", [4, 1 << 14])
def test_experts_one_by_one_are_those_of_numpy(monkeypatch, at_once, products):
    monkeypatch.setattr("moeflux_mlx.calibration.weights.ROWS_AT_ONCE", at_once)
    weights = open_layers(Located(tiny_directory("qwen3_moe", "hub")))
    model = tiny_model("qwen3_moe", mx.float32, "hub")
    seen = SeenLayer(1, model.layers[1], products)
    rng = np.random.default_rng(3)
    T, E, H = 30, weights.args.num_experts, weights.args.hidden_size
    ids = np.stack([rng.permutation(E)[:2] for _ in range(T)])
    chances, x, residual, shared = rng.random((T, 2), np.float32), *rng.standard_normal((3, T, H), np.float32)
    experts = OneByOne(weights, mx.float32)
    experts.observer = seen
    made = experts(Routing(1, ids, chances), x, residual, shared)
    wanted, activations, weights_of = residual + shared, [], []
    for expert in range(E):
        gate, up, down = map(np.array, weights.expert(1, expert, mx.float32).matrices)
        rows, weight = x[(ids == expert).any(1)], chances[ids == expert]
        gated = rows @ gate.T
        activations.append(gated / (1 + np.exp(-gated)) * (rows @ up.T))
        weights_of.append(weight)
        wanted[(ids == expert).any(1)] += activations[-1] @ down.T * weight[:, None]
        assert np.array_equal(seen.rows(expert).x, rows) and np.array_equal(seen.rows(expert).weights, weight)
    assert np.allclose(made, wanted, atol=1e-4)
    seen_by_down = np.concatenate(activations), np.concatenate(weights_of)
    for inputs, (rows, w) in ((seen.down, seen_by_down), (seen.input, (x, np.ones(T)))):
        moments = (rows.T * w) @ rows if products else (rows.T**2) @ w
        assert np.allclose(inputs.mean, moments / w.sum(), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("family", ["deepseek_v3", "deepseek_v4", "qwen4_exp", "nemotron_h_latent"])
def test_each_matrix_of_a_layer_is_seen(tmp_path, family):
    seen, _ = seen_by(family, tmp_path)
    model = tiny_model(family, mx.float32, "hub")
    for layer, module in enumerate(model.layers):
        for name, one in module.named_modules():
            if isinstance(one, Weight):
                inputs = seen[layer].of(f"model.layers.{layer}.{name}")
                assert inputs.mean.shape == (one.shape[-1],) * 2 and np.diag(inputs.mean).max() > 0, name


def test_passes_of_few_rows_give_the_same_sums(tmp_path):
    whole, _ = seen_by("qwen3_moe", tmp_path / "whole")
    parts, _ = seen_by("qwen3_moe", tmp_path / "parts", rows_at_once=1)
    path = "model.layers.1.self_attn.o_proj"
    parts_of = [(seen[1].of(path), seen[1].input, seen[1].down) for seen in (whole, parts)]
    for one, other in zip(*parts_of, strict=True):
        assert np.isclose(one.weight, other.weight) and np.allclose(one.total, other.total, rtol=1e-3, atol=1e-4)


def test_a_down_projection_makes_up_for_what_gate_and_up_have_lost(tmp_path):
    """W + W (mean of (a - b) b^T) H^-1 for inputs b of the codes and a of the floats, weighted by the routing, where H
    and the mean are those of as many more rows of all experts as there are columns."""
    path = goldens.write_variant(tmp_path / "model", "qwen3_moe", "hub")
    write_tokenizer(path, "qwen3_style")
    (tmp_path / "text.txt").write_text("The quick brown fox jumps over the lazy dog. " * 24)
    recipe = Recipe.from_json({"gate_up": 2, "down": 8, "default": "float"}, "mine", "test")
    calibration = Calibration(tmp_path / "work", [tmp_path / "text.txt"], "gptq", dtype=mx.float32)
    convert_calibrated(ConvertSettings(path, tmp_path / "out", recipe=recipe), calibration)
    floats, codes = open_layers(Located(path)), open_layers(Located(tmp_path / "out"))
    run = SeeingRun(floats, read_texts(load_tokenizer(path), calibration), tmp_path / "run", mx.float32)
    run.run()
    of_all, better = run.seen[0].down.mean, []
    for expert in range(floats.args.num_experts):
        x, w = run.seen[0].rows(expert)
        (gate, up, down), rounded = (
            [np.array(part) for part in one.expert(0, expert, mx.float32).matrices] for one in (floats, codes)
        )
        a, b = (silu(x @ g.T) * (x @ u.T) for g, u in ((gate, up), rounded[:2]))
        share = w.sum() ** 2 / (w.sum() ** 2 + b.shape[1] * (w**2).sum())
        h = share * (b.T * w) @ b / w.sum() + (1 - share) * of_all
        h += 0.1 * np.diag(h).mean() * np.eye(len(h))
        wanted = down + down @ (share * ((a - b).T * w) @ b / w.sum()) @ np.linalg.inv(h)
        off = [np.square(one - wanted).sum() for one in (rounded[2], down)]
        better.append(off[0] < 0.05 * off[1])
    assert all(better)


def silu(x):
    return x / (1 + np.exp(-x))

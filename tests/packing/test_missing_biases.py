"""Checkpoints without the biases that correct a router's choice, as mlx-lm's conversions of ERNIE 4.5 are."""

import goldens
import mlx.core as mx
import numpy as np
import pytest
from tiny_models import write_tokenizer

from moeflux_mlx import load_model
from moeflux_mlx.convert import main as convert_main
from moeflux_mlx.errors import ModelFileError
from moeflux_mlx.evaluate import main as evaluate_main
from moeflux_mlx.generate.__main__ import main as generate_main
from moeflux_mlx.packing.conversion import convert
from moeflux_mlx.plan import main as plan_main

pytestmark = pytest.mark.usefixtures("cpu_device")
FAMILY, TOLERANCE = "ernie4_5_moe", 2e-4
REFUSAL = r"layers.1.mlp.e_score_correction_bias is missing, .* add --without-correction-bias .* answers are worse"


def lacking(path, variant, kept=()):
    """Writes a checkpoint without correction biases but those of the layers `kept`."""
    goldens.write_variant(path, FAMILY, variant)
    write_tokenizer(path, "qwen3_style")
    tensors = goldens.variant_tensors(FAMILY, variant)
    keep = tuple(f"layers.{layer}." for layer in kept)
    left = {n: t for n, t in tensors.items() if "correction_bias" not in n or any(one in n for one in keep)}
    goldens.write_safetensors(path / "model.safetensors", left)
    return path


def logits(path, **options):
    model = load_model(path, dtype=mx.float32, **options)
    return np.array(model(mx.array(goldens.golden(FAMILY)[0])[None])[0])


@pytest.mark.parametrize("variant", ["mlx4", "hub"])
def test_it_is_refused_unless_it_is_asked_for(tmp_path, variant):
    path = lacking(tmp_path / "model", variant)
    opens = [lambda **options: convert(path, tmp_path / "out", **options)]
    opens += [lambda **options: logits(path, **options)] if variant == "mlx4" else []
    for opened in opens:
        with pytest.raises(ModelFileError, match=REFUSAL):
            opened()
        opened(without_correction_bias=True)
    made = logits(tmp_path / "out")  # it needs no option
    if variant == "mlx4":
        assert np.array_equal(logits(path, without_correction_bias=True), made)
    assert np.abs(made - goldens.golden(FAMILY)[1]).max() > 10 * TOLERANCE  # the biases mattered


def test_the_choice_is_by_scores_alone(tmp_path):
    """As of a model whose biases are zeros."""
    zeros = goldens.write_variant(tmp_path / "zeros", FAMILY, "mlx4")
    tensors = goldens.variant_tensors(FAMILY, "mlx4")
    for name, (kind, array) in tensors.items():
        if "correction_bias" in name:
            tensors[name] = kind, np.zeros_like(array)
    goldens.write_safetensors(zeros / "model.safetensors", tensors)
    path = lacking(tmp_path / "model", "mlx4")
    assert np.array_equal(logits(path, without_correction_bias=True), logits(zeros))


def test_a_single_bias_that_is_missing_is_an_error_anyway(tmp_path):
    path = lacking(tmp_path / "model", "mlx4", kept=[2])
    for allowed in (False, True):
        with pytest.raises(ModelFileError, match=r"layers.1.mlp.e_score_correction_bias is missing$"):
            load_model(path, without_correction_bias=allowed)


def test_commands(tmp_path, capfd):
    path, text = lacking(tmp_path / "model", "mlx4"), tmp_path / "text.txt"
    text.write_text("The quick brown fox jumps over the lazy dog.")
    out = ["--hf-path", str(path), "--mlx-path", str(tmp_path / "out")]
    model = ["--model", str(path)]
    for command, argv in (
        (convert_main, out),
        (generate_main, [*model, "--prompt", "hello", "--max-tokens", "2"]),
        (plan_main, model),
        (evaluate_main, [*model, "--text", str(text)]),
        (evaluate_main, [*model, "--text", str(text), "--layer-by-layer"]),
    ):
        assert command(argv) == 1
        assert "add --without-correction-bias" in capfd.readouterr().err
        assert command([*argv, "--without-correction-bias"]) == 0, (command, capfd.readouterr().err)

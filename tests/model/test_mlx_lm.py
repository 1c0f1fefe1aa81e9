"""Checkpoints that mlx-lm quantised are packed unchanged and give mlx-lm's tokens."""

import json

import goldens
import mlx.core as mx
import numpy as np
import pytest
from grids import one_in_three
from tiny_models import on_cpu

from moeflux_mlx.convert import convert
from moeflux_mlx.files import directory, read_json
from moeflux_mlx.opening.engine import load_model
from moeflux_mlx.spec import variants

RECIPES = {
    "default": {"group_size": 64, "bits": 4},
    "3 bits": {"group_size": 64, "bits": 3},
    "8 bits": {"group_size": 64, "bits": 8},
    "mixed_3_6": {"group_size": 64, "bits": 4},
    "1 bit": {"group_size": 32, "bits": 1},
    "mxfp4": {"group_size": 32, "bits": 4, "mode": "mxfp4"},
    "mxfp8": {"group_size": 32, "bits": 8, "mode": "mxfp8"},
    "nvfp4": {"group_size": 16, "bits": 4, "mode": "nvfp4"},
}
PROMPT, TOKENS = [3, 17, 200, 5, 9, 88, 120, 44], 6


@pytest.fixture(scope="module")
def mlx_lm():
    return pytest.importorskip("mlx_lm.utils"), pytest.importorskip("mlx_lm.convert")


def quantised(mlx_lm, family, name, out):
    """Saves the family's tiny model as `mlx_lm.convert -q` does. Returns mlx-lm's model in float32."""
    utils, convert_module = mlx_lm
    model, config = utils.load_model(goldens.checkpoint_dir(family), lazy=True)
    form = dict(RECIPES[name])
    predicate = convert_module.mixed_quant_predicate_builder(name, model) if name.startswith("mixed") else None
    model, config = utils.quantize_model(
        model, config, form["group_size"], form["bits"], mode=form.get("mode", "affine"), quant_predicate=predicate
    )
    out.mkdir()
    utils.save_model(out, model, donate_model=False)
    utils.save_config(config, out / "config.json")
    model.set_dtype(mx.float32)
    return model


def greedy(step):
    """Returns (logits of the prompt, the tokens that follow it). `step` takes all tokens so far."""
    tokens, first = list(PROMPT), None
    for _ in range(TOKENS):
        logits = np.array(step(mx.array([tokens]))[0].astype(mx.float32))
        first = logits if first is None else first
        tokens.append(int(logits[-1].argmax()))
    return first, tokens


@pytest.mark.parametrize("name", one_in_three(RECIPES))
def test_the_same_greedy_tokens(mlx_lm, tmp_path, name):
    with on_cpu():
        theirs = greedy(quantised(mlx_lm, "qwen3_moe", name, tmp_path / "source"))
        report = convert(tmp_path / "source", tmp_path / "out")
    assert not report.lossy and not report.quantized and not report.made_experts
    layout = json.loads((tmp_path / "out" / "packed_experts" / "layout.json").read_text())
    assert layout["format_version"] == (1 if name == "default" else 2)
    for folder, mode in (("out", "mmap"), ("source", "resident")):
        model = load_model(tmp_path / folder, dtype=mx.float32, expert_io=mode)
        ours = greedy(model)
        assert ours[1] == theirs[1] and np.abs(ours[0] - theirs[0]).max() < 2e-4
        model.experts.close()


def test_named_configurations_have_what_mlx_lm_reads(mlx_lm):
    """Checks the configurations of families that mlx-lm has."""
    utils, _ = mlx_lm
    known = 0
    for name in variants():
        config = read_json(directory("configs") / f"{name}.json")
        try:
            _, args = utils._get_classes(config)
            args.from_dict(config)
        except ValueError:  # a model, or a part of one, that mlx-lm does not have
            continue
        known += 1
    assert known > 20

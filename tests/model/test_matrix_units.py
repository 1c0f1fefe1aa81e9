"""Prompts on matrix units: a model's logits are as near to those in float32 as plain operations in bfloat16 are."""

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from grids import marks
from tile_choices import Chosen
from tiny_models import tiny_directory

from metal import msl
from moeflux_mlx.opening.engine import load_model
from moeflux_mlx.ops import backend, expert_rows
from moeflux_mlx.ops.launch import Reason
from moeflux_mlx.ops.tiles import TILES, using

# By default one family of each form of experts: alone, beside a shared one, with biases, and without a gate.
FAMILIES = {"qwen3_moe": True, "qwen3_5_moe": False, "deepseek_v3": True, "gpt_oss": True, "nemotron_h": True}
FAMILIES |= {"glm4_moe": False, "minimax_m2": False, "k2_horizon": False}


def logits_of(model):
    return np.array(model(mx.array(np.random.default_rng(4).integers(0, 100, (1, 37)))).astype(mx.float32))


@pytest.mark.parametrize("family", [pytest.param(name, marks=marks(runs)) for name, runs in FAMILIES.items()])
def test_logits_are_as_exact_as_those_of_plain_operations(family, monkeypatch):
    """Loads outside the harness, which knows no memory of a GPU."""
    models = [load_model(tiny_directory(family), dtype=mx.bfloat16, expert_io=mode) for mode in ("resident", "pread")]
    exact = logits_of(load_model(tiny_directory(family), dtype=mx.float32))
    refusal, calls = expert_rows.refusal_on, []
    with msl.launching():
        monkeypatch.setattr(expert_rows, "refusal_on", lambda *_: Reason("they take turns"))
        plain = logits_of(models[0])
        monkeypatch.setattr(expert_rows, "refusal_on", lambda *of: calls.append(of) or refusal(*of))
        with using(Chosen({"prompt_experts": replace(TILES[backend.name()]["prompt_experts"], kernel=1)})):
            resident, streamed = map(logits_of, models)
            assert not any(refusal(*of) for of in calls)
    assert calls and np.array_equal(resident, streamed)
    # Medians, because a rounded router sometimes chooses another expert.
    assert np.median(np.abs(resident - exact)) < 1.3 * np.median(np.abs(plain - exact))

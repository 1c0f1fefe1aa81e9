"""Families that are made of the parts of others: their goldens from every form of checkpoint, in every chunking."""

import goldens
import mlx.core as mx
import numpy as np
import pytest
from tiny_models import tiny_model

from moeflux_mlx.ops import native
from moeflux_mlx.ops.experts import MAX_SLOTS

TOLERANCE = 2e-4  # max abs on logits of standard deviation 1, float32


def run(model, family, chunk=None):
    """Logits [T, V] of the golden's tokens, fed `chunk` at a time from their first position on."""
    tokens, cache = mx.array(goldens.golden(family)[0])[None], model.make_cache()
    for layer in cache:
        layer.shift(goldens.first_position(family))
    chunk = chunk or tokens.shape[1]
    parts = [model(tokens[:, i : i + chunk], cache) for i in range(0, tokens.shape[1], chunk)]
    return np.array(mx.concatenate(parts, axis=1)[0].astype(mx.float32))


def error(model, family, chunk=None):
    return np.abs(run(model, family, chunk) - goldens.golden(family)[1]).max()


@pytest.mark.parametrize("computing", ["native", "plain operations"])
@pytest.mark.parametrize("family", goldens.KIN)
def test_logits_match_hugging_face(monkeypatch, family, computing):
    if computing == "plain operations":
        monkeypatch.setattr(native, "available", lambda: False)
        monkeypatch.setattr(native, "warn_if_missing", lambda: None)
        if goldens.text_config(family)["num_experts_per_tok"] > MAX_SLOTS:
            pytest.skip("plain operations take no more slots than the kernels")
    model = tiny_model(family, mx.float32, "hub")
    for chunk in (None, 7, 1):
        assert error(model, family, chunk) < TOLERANCE, chunk


@pytest.mark.parametrize("family", goldens.KIN)
def test_conversions_of_mlx_give_the_same(family):
    assert error(tiny_model(family, mx.float32), family) < TOLERANCE

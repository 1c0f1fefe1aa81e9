"""How far the tiny model of a family is from its golden, also with a mistake in it."""

import goldens
import mlx.core as mx
import numpy as np
from tiny_models import logits_of_calls, tiny_directory

from moeflux_mlx.engine.engine import load_model

TOLERANCE = 2e-4


def error(model, lengths=(64,), *, family):
    """The largest difference of logits in calls of these lengths."""
    tokens, wanted = goldens.golden(family)
    return np.abs(logits_of_calls(model, tokens, lengths) - wanted).max()


def broken(monkeypatch, owner, name, value, lengths=(64,), *, family):
    """Whether the error exceeds the tolerance ten times over if `owner` has `value` in place of `name`."""
    model = load_model(tiny_directory(family, "hub"), dtype=mx.float32)
    monkeypatch.setattr(owner, name, value)
    return error(model, lengths, family=family) > 10 * TOLERANCE

"""How far the tiny model of a family is from its golden, also if a mistake is planted in it."""

import goldens
import mlx.core as mx
import numpy as np
from tiny_models import logits_of_calls, tiny_directory

from moeflux_mlx.opening.engine import load_model

TOLERANCE = 2e-4


def error(model, lengths=(64,), *, family):
    """Returns the largest difference of logits if the tokens are computed in calls of these lengths."""
    tokens, wanted = goldens.golden(family)
    return np.abs(logits_of_calls(model, tokens, lengths) - wanted).max()


def broken(monkeypatch, owner, name, value, lengths=(64,), *, family):
    """Returns whether the error exceeds ten times the tolerance if `name` of `owner` is `value`."""
    model = load_model(tiny_directory(family, "hub"), dtype=mx.float32)
    monkeypatch.setattr(owner, name, value)
    return error(model, lengths, family=family) > 10 * TOLERANCE

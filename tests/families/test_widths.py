"""A model whose rows do not suit the native kernels is computed without them: `ModelArgs.widths` has every width.

Each size of each part of every family is made odd in turn. If `widths` allows the model, no kernel may be given a row
that it refuses.
"""

from dataclasses import fields, is_dataclass, replace

import goldens
import mlx.core as mx
import pytest

from moeflux_mlx.formats.record import ExpertLayout
from moeflux_mlx.opening import launches
from moeflux_mlx.opening.random_weights import Shapes
from moeflux_mlx.ops import native
from moeflux_mlx.spec import ModelArgs

LANES = 16
FAMILIES = sorted({*goldens.FAMILIES, *goldens.KIN})
# What each kernel requires to be whole vectors, by its arguments (native/native.c).
ROWS = {
    "linear": lambda x, *_: [x.shape[-1]],
    "rms_norm": lambda x, *_: [x.shape[-1]],
    "conv_silu": lambda state, x, *_: [x.shape[-1]],
    "attend": lambda q, k, v, *_: [q.shape[-1], v.shape[-1]],
    "attend_step": lambda q, k, v, *_: [q.shape[-1], v.shape[-1]],
    "gated_delta": lambda state, *_: [state.shape[-1]],
    "channel_delta": lambda state, *_: [state.shape[-1]],
}


class OddRowsError(Exception):
    """A kernel was given rows that it refuses."""


class Strict(launches.Extension):
    """Refuses what the extension refuses."""

    def __getattr__(self, name):
        def call(*given):
            odd = [width for width in ROWS.get(name, lambda *_: [])(*given) if width % LANES]
            if odd:
                raise OddRowsError(f"{name}: {odd}")

        return call


def changed(part, path=()):
    """Yields `part` with each of its sizes, and of the parts in it, made odd, and the size's name. The channels of
    n-grams are those of the streams.
    """
    for field in fields(part):
        value, here = getattr(part, field.name), (*path, field.name)
        if type(value) is int and value % LANES == 0 and value and here[-2:] != ("ngrams", "channels"):
            yield replace(part, **{field.name: value + LANES // 2}), ".".join(here)
        elif is_dataclass(value):
            yield from ((replace(part, **{field.name: other}), name) for other, name in changed(value, here))


def models(args):
    """Yields the model with each size of its layers made odd, and the size's name."""
    for layer in dict.fromkeys(args.layers):
        for other, name in changed(layer):
            layers = tuple(other if one == layer else one for one in args.layers)
            yield replace(args, layers=layers), f"{type(layer.mixer).__name__}: {name}"


def run(args):
    """Runs every part of the model for 1 and for 40 tokens. Sizes that contradict each other are passed over."""
    try:
        shapes = Shapes(args, ExpertLayout.from_args(args), {}, mx.float32)
        list(launches.launches_of(shapes, "ops", tokens=(1, 40)))
    except (ValueError, IndexError, ZeroDivisionError, TypeError):
        return False
    return True


@pytest.mark.skipif(not native.available(), reason="the extension is not built")
@pytest.mark.usefixtures("cpu_device")
@pytest.mark.parametrize("family", FAMILIES)
def test_widths_has_every_width_that_a_native_kernel_takes(family, monkeypatch):
    monkeypatch.setattr(launches, "Extension", Strict)
    args = ModelArgs.from_dict(goldens.config(family))
    assert run(args)
    for model, name in models(args):
        try:
            run(model)
        except OddRowsError as error:
            pytest.fail(f"{name} is not in `widths`: {error}")

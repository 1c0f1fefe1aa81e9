"""How a block of positions becomes an entry, or the key of a block: their mean, or a sum that gates weigh."""

from typing import NamedTuple

import mlx.core as mx
import numpy as np

from . import backend
from .backend import Array, library_of, of_kind
from .elementwise import softmax
from .launch import Kernel, Launch, Reason, Shape
from .norm import Norm
from .rope import Rope
from .tiles import planned

POOL = Kernel("entry_pool", "ring bias weight eps periods magnitude offset", "entry")
POOLING = 256  # threads of the threadgroup that makes an entry
WIDEST = 2048  # values of an entry, which it has twice in its memory


class Pool(NamedTuple):
    """How an entry of `width` values is made of blocks of `ratio` positions of a ring (metal/entry_pool.metal).

    values, gates: the first column of each in a row; gates None: positions have equal weights. bias: [ratio, series *
    width] float32, added to the gates. norm, rope: of the entry; None: there is none. rotates_last: the rotation is of
    the last values.
    """

    width: int
    ratio: int
    values: int = 0
    gates: int | None = None
    bias: mx.array | None = None
    series: int = 1
    norm: Norm | None = None
    rope: Rope | None = None
    rotates_last: bool = False

    def entry(self, ring: mx.array, offset: mx.array, is_first: bool) -> mx.array:
        """The entry [1, 1, 1, width] that ends with the token at place `offset`, from ring [1, 1, slots, row]."""
        launch = plan_pool(backend.name(), ring.dtype, ring.shape, self._sizes(is_first))
        weight, eps = (ring, 0.0) if self.norm is None else (self.norm.weight, self.norm.eps)
        periods, magnitude = (ring, 1.0) if self.rope is None else (self.rope.periods, self.rope.magnitude)
        bias = ring if self.bias is None else self.bias
        return launch(ring, bias, weight, eps, periods, magnitude, offset.reshape(1))[0]

    def _sizes(self, is_first: bool) -> tuple[tuple[str, int], ...]:
        """Constants of the kernel's text."""
        dims, interleaved = (0, False) if self.rope is None else (self.rope.dims, self.rope.interleaved)
        sizes = {"W": self.width, "RATIO": self.ratio, "COUNT": self.ratio * (1 if is_first else self.series)}
        sizes |= {"SERIES": self.series, "VALUES": self.values, "GATES": self.gates or 0}
        sizes |= {"GATED": int(self.gates is not None), "NORM": int(self.norm is not None), "DIMS": dims}
        sizes |= {"FROM": self.width - dims if self.rotates_last else 0, "INTERLEAVED": int(interleaved)}
        return tuple(sizes.items())


@planned("entry_pool")
def pool_refusal(target: str, width: int) -> Reason | None:
    """Why no kernel makes entries of this width."""
    return Reason(f"entries of {width} values are wider than {WIDEST}") if width > WIDEST else None


@planned("entry_pool")
def plan_pool(target: str, dtype: mx.Dtype, ring: Shape, sizes: tuple[tuple[str, int], ...]) -> Launch:
    template = {"X": dtype, "SLOTS": ring[2], "ROW": ring[3], "T": POOLING, **dict(sizes)}
    return Launch(target, POOL, template, (1, 1), POOLING, [((1, 1, 1, dict(sizes)["W"]), dtype)])


def pooled(values: Array, gates: Array, bias: mx.array, overlaps: bool, is_first: bool) -> Array:
    """Entries [B, n, W], before their norm, of values and gates [B, n, ratio, S * W] of the positions of each.

    Args:
        bias: [ratio, S * W], added to the gates.
        overlaps: there are two series, the first for the next entry; then values and gates begin with the positions
            before those of the first entry, unless it `is_first` of all: nothing stands in their place.
    """
    library = library_of(values)
    gates = gates.astype(library.float32) + of_kind(bias, gates)
    if overlaps:
        width = values.shape[-1] // 2
        if is_first:
            values = library.concatenate([library.zeros_like(values[:, :1]), values], axis=1)
            gates = library.concatenate([library.full(gates[:, :1].shape, -np.inf, gates.dtype), gates], axis=1)
        values, gates = (
            library.concatenate([part[:, :-1, :, :width], part[:, 1:, :, width:]], axis=2) for part in (values, gates)
        )
    weights = softmax(gates.swapaxes(2, 3))
    return (values.swapaxes(2, 3) * weights.astype(values.dtype)).sum(axis=-1)

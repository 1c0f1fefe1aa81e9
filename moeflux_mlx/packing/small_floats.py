"""Matrices of small floats as publishers store them, whose codes are MLX's byte for byte: two E2M1 codes in a byte, the
first in the low half, or E4M3 codes, with scales of 8 bits.

- mxfp8: `weight` float8 E4M3 with E8M0 scales, `weight_scale_inv`, `weight_scale` or (DeepSeek-V4) `scale`, one for 32
  columns of a row as MLX has them, or one for a block of rows and columns, which is repeated for each 32 columns of
  each of its rows. Those of Hy4's experts in one matrix are `gate_up_proj_scale` and `down_proj_scale`.
- mxfp4: `weight_packed` (compressed-tensors "mxfp4-pack-quantized") or `weight` (DeepSeek-V4), bytes, with such scales
  of 32 columns.
- nvfp4: bytes with E4M3 scales of 16 columns, `weight_scale`, and a float32 for the matrix: ModelOpt's
  `weight_scale_2`, which multiplies all scales, or compressed-tensors' `weight_global_scale`, which divides them.
  Inkling-2-Mini has two, `weight_amax`, which is divided by `weight_outer_scale_denominator`.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import mlx.core as mx
import numpy as np

from ..errors import ModelFileError
from ..formats.checkpoint import Tensor
from ..quant import GLOBAL_UNIT, MODES, Quant
from .matrix import Matrix, finite, shaped, typed

MXFP4, MXFP8, NVFP4 = (Quant(MODES[name].bits, MODES[name].group_size, name) for name in ("mxfp4", "mxfp8", "nvfp4"))
EXPONENTS = ("F8_E8M0", "U8")  # dtypes of E8M0 scales
PACKED = ("U8", "I8")


@dataclass(frozen=True)
class ScaledMatrix(Matrix):
    """nvfp4 whose global scale is published as what multiplies the scales or, if it `divides`, as the inverse; in parts
    if there is a `denominator`, a number for each matrix or one for all.
    """

    divides: bool = False
    denominator: Tensor | None = None

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (*super().tensors, *([] if self.denominator is None else [self.denominator]))

    def _each(self, shape: tuple[int, ...], part: Callable[[Tensor], Tensor]) -> Matrix:
        made, below = super()._each(shape, part), self.denominator
        assert isinstance(made, ScaledMatrix)
        if below is None or len(self.shape) == 2 or math.prod(below.shape) == 1:
            return made
        return replace(made, denominator=part(below))

    def factor(self) -> tuple[mx.array, ...]:
        assert self.global_scale is not None
        published = self.global_scale.read().reshape(*self.shape[:-2], 1, 1)
        if self.denominator is not None:
            below = self.denominator.read()
            published = published / below.reshape(published.shape if below.size == published.size else ())
        return (finite(self.global_scale, GLOBAL_UNIT / published if self.divides else GLOBAL_UNIT * published),)


@dataclass(frozen=True)
class BlockMatrix(Matrix):
    """mxfp8 with a scale for each `block`: rows from `first` on of a matrix of `height`, with shards as in Matrix."""

    first: int = 0
    height: int = 0

    def rows(self, start: int, stop: int) -> Matrix:
        if len(self.shape) > 2:
            return super().rows(start, stop)
        weight = self.weight.rows(start, stop)
        return replace(self, shape=(stop - start, self.shape[1]), weight=weight, first=self.first + start)

    def codes(self) -> tuple[mx.array, ...]:
        weight, stored = super().codes()
        length, (high, wide) = self.height // self.shards, self.block
        row = np.arange(self.first, self.first + self.shape[-2])
        down = row // length * math.ceil(length / high) + row % length // high
        across = np.arange(scales_of(self.shape)) * MXFP8.group_size // wide
        return weight, mx.take(mx.take(stored, mx.array(down), axis=-2), mx.array(across), axis=-1)


def scales_of(shape: tuple[int, ...]) -> int:
    return MXFP8.groups(shape[-1])


def find_small_floats(
    tensors: Mapping[str, Tensor],
    path: str,
    name: str,
    shape: tuple[int, ...],
    block: tuple[int, int],
    shards: int = 1,
) -> Matrix | None:
    """The matrix of a module path whose weight is called `name`, if it is stored in one of these ways.

    Args:
        shape: the logical shape that the model needs.
        block: rows and columns of a block, as config.json states them.
        shards: parts of a fused matrix, each with blocks of its own.

    Raises:
        ModelFileError: a tensor is missing, or has another shape or dtype than the form and the model need.
    """
    weight = tensors.get(f"{path}.weight_packed") or tensors.get(name)
    names = (f"{name}_scale_inv", f"{name}_scale", f"{path}.weight_scale", f"{path}.scale")
    named = (tensors.get(one) for one in names)
    scale = next((one for one in named if one is not None), None)
    if weight is None or scale is None:
        return None
    if weight.dtype == "F8_E4M3" and scale.dtype in EXPONENTS:
        return _mxfp8(weight, scale, shape, block, shards)
    if weight.dtype not in PACKED:
        return None
    if scale.dtype in EXPONENTS:
        return Matrix(shape, _as_words(weight, MXFP4, shape), _as_bytes(scale, MXFP4, shape), quant=MXFP4)
    typed(scale, ("F8_E4M3",))
    ends = ("weight_scale_2", "weight_global_scale", "weight_amax", "weight_outer_scale_denominator")
    multiplies, divides, most, below = (tensors.get(f"{path}.{end}") for end in ends)
    factor = multiplies or divides or (most if below is not None else None)
    if factor is None:
        raise ModelFileError(f"tensor {path}.weight_scale_2 or {path}.weight_global_scale is missing")
    if factor.shape != (*shape[:-2], 1):
        shaped(factor, shape[:-2])
    typed(factor, ("F32",))
    quant, words = replace(NVFP4, has_global_scale=True), _as_words(weight, NVFP4, shape)
    scales = _as_bytes(scale, NVFP4, shape)
    denominator = typed(below, ("F32",)) if below is not None and factor is most else None
    return ScaledMatrix(shape, words, scales, None, quant, factor, divides=factor is divides, denominator=denominator)


def _mxfp8(weight: Tensor, scale: Tensor, shape: tuple[int, ...], block: tuple[int, int], shards: int) -> Matrix:
    words = _as_words(weight, MXFP8, shape)
    if scale.shape == (*shape[:-1], scales_of(shape)):
        return Matrix(shape, words, _as_bytes(scale, MXFP8, shape), quant=MXFP8)
    high, wide = block
    if wide % MXFP8.group_size:
        raise ModelFileError(
            f"{scale.file}: tensor {scale.name} has a scale for {wide} columns; mxfp8 has one for {MXFP8.group_size}"
        )
    rows = shards * math.ceil(shape[-2] / shards / high)
    shaped(scale, (*shape[:-2], rows, math.ceil(shape[-1] / wide)))
    scales = replace(scale, dtype="U8")
    return BlockMatrix(shape, words, scales, quant=MXFP8, block=block, shards=shards, height=shape[-2])


def _as_words(weight: Tensor, quant: Quant, shape: tuple[int, ...]) -> Tensor:
    """Codes in bytes as MLX's words."""
    shaped(weight, (*shape[:-1], shape[-1] * quant.bits // 8))
    shaped(replace(weight, shape=(shape[-1],)), (quant.groups(shape[-1]) * quant.group_size,))
    return replace(weight, dtype="U32", shape=(*shape[:-1], quant.words(shape[-1])))


def _as_bytes(scale: Tensor, quant: Quant, shape: tuple[int, ...]) -> Tensor:
    """8-bit scales, a row's worth for each row."""
    shaped(scale, (*shape[:-1], quant.groups(shape[-1])))
    return replace(scale, dtype="U8")

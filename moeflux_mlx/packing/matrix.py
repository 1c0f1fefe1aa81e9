"""One weight matrix of a checkpoint, however it is stored: floats, block fp8, or quantised groups.

A matrix gives its stored codes unchanged, its values as floats, or freshly quantised codes. It reads
no more than it is asked for, and long matrices are quantised a few rows at a time.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import mlx.core as mx

from ..errors import ModelFileError
from ..formats.checkpoint import Tensor
from ..quant import FLOAT, NAN, Quant

CHUNK_VALUES = 1 << 24  # quantised at a time: 64 MiB as float32


@dataclass(frozen=True)
class Matrix:
    """`shape` [..., rows, cols] is the logical one. With `quant`, the weight holds codes; with
    `inverse`, fp8 codes that are multiplied by a scale for each block; else plain floats."""

    shape: tuple[int, ...]
    weight: Tensor
    scales: Tensor | None = None
    biases: Tensor | None = None
    quant: Quant | None = None
    inverse: Tensor | None = None
    block: tuple[int, int] = (128, 128)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(t for t in (self.weight, self.scales, self.biases, self.inverse) if t is not None)

    @property
    def dtypes(self) -> tuple[str, ...]:
        """Of what `codes` gives."""
        return tuple(t.dtype for t in (self.weight, self.scales, self.biases) if t is not None)

    @property
    def is_kept(self) -> bool:
        """Whether the codes can be computed with, and so are copied."""
        return self.quant is not None and self.quant.is_computed

    def __getitem__(self, index: int) -> "Matrix":
        """One entry of the leading axis of a stack."""
        return self._each(self.shape[1:], lambda tensor: tensor[index])

    def rows(self, start: int, stop: int) -> "Matrix":
        """Rows of the leading axis; not for fp8, whose blocks span rows."""
        return self._each((stop - start, *self.shape[1:]), lambda tensor: tensor.rows(start, stop))

    def _each(self, shape: tuple[int, ...], part: Callable[[Tensor], Tensor]) -> "Matrix":
        scales, biases, inverse = (None if t is None else part(t) for t in (self.scales, self.biases, self.inverse))
        return replace(self, shape=shape, weight=part(self.weight), scales=scales, biases=biases, inverse=inverse)

    def codes(self) -> tuple[mx.array, ...]:
        """Weight, scales and (affine only) biases as they are stored.

        Raises:
            ModelFileError: a scale or bias is NaN or infinite.
        """
        scale = FLOAT if self.quant is None else self.quant.scale
        of_groups = [finite(t, t.read(), scale) for t in (self.scales, self.biases) if t is not None]
        return self.weight.read(), *of_groups

    def values(self, start: int = 0, stop: int | None = None) -> mx.array:
        """Rows `start` to `stop` as stored floats, or in float32 when dequantised.

        Raises:
            ModelFileError: a value or scale is NaN or infinite.
        """
        stop = self.shape[0] if stop is None else stop
        if self.inverse is not None:
            return finite(self.weight, self._from_fp8(start, stop))
        part = self.rows(start, stop)
        return part._dequantized() if part.quant else finite(self.weight, part.weight.read())

    def _dequantized(self) -> mx.array:
        assert self.quant is not None
        kind = self.quant
        weight, scales, *rest = self.codes()
        biases = rest[0].astype(mx.float32) if rest else None
        if rest:  # with float32 scales the arithmetic is in float32
            scales = scales.astype(mx.float32)
        values = mx.dequantize(weight, scales, biases, kind.group_size, kind.bits, kind.mode, dtype=mx.float32)
        return finite(self.weight, values)

    def _from_fp8(self, start: int, stop: int) -> mx.array:
        """codes * scale of their block, in float32; the last block of an axis may be partial."""
        assert self.inverse is not None
        if len(self.shape) == 3:
            return mx.stack([self[index]._from_fp8(0, self.shape[1]) for index in range(start, stop)])
        rows, cols = self.block
        first, last = start // rows, math.ceil(stop / rows)
        stored = self.inverse.rows(first, last)
        scale = finite(stored, stored.read()).astype(mx.float32)
        scale = mx.repeat(scale, rows, axis=0)[start - first * rows : stop - first * rows]
        scale = mx.repeat(scale, cols, axis=1)[:, : self.shape[1]]
        return mx.from_fp8(self.weight.rows(start, stop).read(), mx.float32) * scale

    def quantized(
        self, quant: Quant, start: int = 0, stop: int | None = None, dtype: mx.Dtype = mx.bfloat16
    ) -> tuple[mx.array, ...]:
        """What `mx.quantize` gives for the matrix cast to `dtype`: weight, scales and, in mode affine, biases.

        Rows are quantised independently, so doing a few at a time changes nothing.
        """
        stop = self.shape[0] if stop is None else stop
        step = max(1, CHUNK_VALUES // math.prod(self.shape[1:]))
        parts = []
        for row in range(start, stop, step):
            values = self.values(row, min(row + step, stop))
            if values.dtype != dtype:  # a large float32 becomes infinite here
                values = finite(self.weight, values.astype(dtype))
            parts.append(mx.quantize(values, quant.group_size, quant.bits, quant.mode))
            mx.eval(parts[-1])
        return parts[0] if len(parts) == 1 else tuple(mx.concatenate(list(part)) for part in zip(*parts, strict=True))


@dataclass(frozen=True)
class TransposedMatrix(Matrix):
    """Floats, stored as [..., columns, rows]."""

    def values(self, start: int = 0, stop: int | None = None) -> mx.array:
        return finite(self.weight, self.weight.read().swapaxes(-1, -2)[start:stop])


def typed(tensor: Tensor, wanted: tuple[str, ...]) -> Tensor:
    if tensor.dtype not in wanted:
        raise ModelFileError(f"{tensor.file}: tensor {tensor.name} is {tensor.dtype}; expected {' or '.join(wanted)}")
    return tensor


def shaped(tensor: Tensor, wanted: tuple[int, ...]) -> None:
    if tensor.shape != tuple(wanted):
        raise ModelFileError(
            f"{tensor.file}: tensor {tensor.name} has shape {list(tensor.shape)}; the model needs {list(wanted)}"
        )


def finite(tensor: Tensor, values: mx.array, scale: str = FLOAT) -> mx.array:
    """`values`, once they are known to be numbers; `scale` says what they are if they are scales of 8 bits."""
    nan = NAN.get(scale)
    if nan is not None and (values & nan == nan).any().item():
        raise ModelFileError(f"{tensor.file}: tensor {tensor.name} holds NaN scales; download it again")
    if mx.issubdtype(values.dtype, mx.floating) and not mx.isfinite(values).all().item():
        raise ModelFileError(f"{tensor.file}: tensor {tensor.name} holds NaN or infinite values; download it again")
    return values

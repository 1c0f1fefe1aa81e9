"""Converts matrices of other tools whose codes are the same as MLX's in another order.

- compressed-tensors "pack-quantized": `weight_packed` int32, eight codes each, first in the lowest bits, 8 added to
  every code; `weight_scale`. A weight is scale * (code - 8), which is exactly affine with the bias -8 * scale.
- AWQ: `qweight` int32 [columns, rows / 8], whose nibbles hold rows 0, 2, 4, 6, 1, 3, 5, 7 of eight; `qzeros` alike for
  each group; `scales` [groups, rows]. A weight is scale * (code - zero): affine with the bias -zero * scale, rounded
  once to the scales' dtype.
- mxfp4 as OpenAI publishes it: `_blocks` uint8 [.., rows, groups, 16], two codes each, first in the low half, and
  `_scales` uint8 [.., rows, groups]: MLX's words byte for byte.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import mlx.core as mx
import numpy as np

from ..errors import ModelFileError
from ..formats.checkpoint import Tensor
from ..quant import Quant
from .matrix import Matrix, finite, shaped, taken, typed
from .source_format import SourceFormat

AWQ_NIBBLES = (0, 4, 1, 5, 2, 6, 3, 7)  # places of the codes of eight neighbouring rows in a word
PER_WORD = 8


@dataclass(frozen=True)
class CenteredMatrix(Matrix):
    """Codes that stand for code - 8; `stated` is a tensor that repeats the shape."""

    stated: Tensor | None = None

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (*super().tensors, *([] if self.stated is None else [self.stated]))

    @property
    def dtypes(self) -> tuple[str, ...]:
        return "U32", *[self._scales.dtype] * 2

    @property
    def _scales(self) -> Tensor:
        assert self.scales is not None
        return self.scales

    def codes(self) -> tuple[mx.array, ...]:
        scales = finite(self._scales, self._scales.read())
        return self.weight.read(), scales, finite(self._scales, scales * -8)


@dataclass(frozen=True)
class AwqMatrix(Matrix):
    """`weight`, `scales` and `biases` are AWQ's qweight, scales and qzeros; `first` is where the rows begin."""

    first: int = 0

    @property
    def dtypes(self) -> tuple[str, ...]:
        assert self.scales is not None
        return "U32", *[self.scales.dtype] * 2

    def rows(self, start: int, stop: int) -> "AwqMatrix":
        return replace(self, shape=(stop - start, *self.shape[1:]), first=self.first + start)

    def codes(self) -> tuple[mx.array, ...]:
        assert self.scales is not None and self.biases is not None
        rows = slice(self.first, self.first + self.shape[0])
        codes = unpacked(np.array(self.weight.read()))[:, rows].T
        zeros = unpacked(np.array(self.biases.read()))[:, rows].T
        scales = finite(self.scales, self.scales.read())[:, rows].T
        biases = (scales.astype(mx.float32) * mx.array(-zeros.astype(np.float32))).astype(scales.dtype)
        return mx.array(packed(codes)), mx.contiguous(scales), finite(self.scales, biases)


def unpacked(words: np.ndarray) -> np.ndarray:
    """AWQ's words [n, m / 8] -> codes [n, m]."""
    shifts = np.array(AWQ_NIBBLES, np.uint32) * 4
    return ((words[..., None] >> shifts) & 15).astype(np.uint8).reshape(len(words), -1)


def packed(codes: np.ndarray) -> np.ndarray:
    """4-bit codes [rows, columns] -> MLX's words, the first code in the lowest bits."""
    shifts = np.arange(PER_WORD, dtype=np.uint32) * 4
    eights = codes.reshape(len(codes), -1, PER_WORD).astype(np.uint32)
    return np.bitwise_or.reduce(eights << shifts, axis=-1)


def find_foreign(tensors: Mapping[str, Tensor], path: str, shape: tuple[int, ...], form: SourceFormat) -> Matrix | None:
    """The matrix of a module path, if it is in one of these forms.

    Raises:
        ModelFileError: a tensor is missing, or has another shape or dtype than the form and the model need.
    """
    if f"{path}.weight_packed" in tensors:
        return _centered(tensors, path, shape, form)
    if f"{path}.qweight" in tensors:
        return _awq(tensors, path, shape, form)
    if f"{path}_blocks" in tensors:
        return _blocks(tensors, path, shape)
    return None


def _centered(tensors: Mapping[str, Tensor], path: str, shape: tuple[int, ...], form: SourceFormat) -> Matrix:
    words, scales = taken(tensors, f"{path}.weight_packed"), taken(tensors, f"{path}.weight_scale")
    quant = _grouped(form, path, "compressed-tensors")
    typed(scales, ("BF16", "F16", "F32"))
    shaped(shaped_as_words(words), (*shape[:-1], quant.words(shape[-1])))
    shaped(scales, (*shape[:-1], quant.groups(shape[-1])))
    stated = tensors.get(f"{path}.weight_shape")
    return CenteredMatrix(shape, shaped_as_words(words), scales, quant=quant, stated=stated)


def _awq(tensors: Mapping[str, Tensor], path: str, shape: tuple[int, ...], form: SourceFormat) -> Matrix:
    quant = _grouped(form, path, "awq")
    codes, zeros, scales = (taken(tensors, f"{path}.{part}") for part in ("qweight", "qzeros", "scales"))
    rows, columns = shape
    shaped(codes, (columns, rows // PER_WORD))
    shaped(zeros, (quant.groups(columns), rows // PER_WORD))
    shaped(typed(scales, ("F16", "BF16", "F32")), (quant.groups(columns), rows))
    return AwqMatrix(shape, shaped_as_words(codes), scales, shaped_as_words(zeros), quant)


def _blocks(tensors: Mapping[str, Tensor], path: str, shape: tuple[int, ...]) -> Matrix:
    quant = Quant(4, 32, "mxfp4")
    codes, scales = typed(taken(tensors, f"{path}_blocks"), ("U8",)), typed(taken(tensors, f"{path}_scales"), ("U8",))
    groups = quant.groups(shape[-1])
    shaped(codes, (*shape[:-1], groups, 16))
    shaped(scales, (*shape[:-1], groups))
    return Matrix(shape, replace(codes, dtype="U32", shape=(*shape[:-1], quant.words(shape[-1]))), scales, quant=quant)


def _grouped(form: SourceFormat, path: str, method: str) -> Quant:
    """Raises ModelFileError: config.json is of another method."""
    quant = form.of(path)
    if form.method != method or quant is None:
        raise ModelFileError(
            f"{method}: tensors of {path} are stored in this form, but config.json's quant_method does not say so"
        )
    return quant


def shaped_as_words(tensor: Tensor) -> Tensor:
    """int32 words as uint32."""
    return replace(typed(tensor, ("I32", "U32")), dtype="U32")

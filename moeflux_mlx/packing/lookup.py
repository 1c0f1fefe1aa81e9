"""Finds the tensors of a module path in a checkpoint and makes a `Matrix` of them, all shapes and dtypes checked."""

import math
from collections.abc import Mapping
from dataclasses import replace

from ..errors import ModelFileError
from ..formats.checkpoint import FLOATS, Tensor
from ..quant import FLOAT, MODES, Quant
from .foreign import find_foreign
from .matrix import Matrix, TransposedMatrix, shaped, typed
from .source_format import SourceFormat


def find_matrix(
    tensors: Mapping[str, Tensor],
    path: str,
    shape: tuple[int, ...],
    form: SourceFormat,
    suffix: str = ".weight",
) -> Matrix:
    """The matrix of a module path, its shapes and dtypes checked.

    Args:
        shape: the logical shape that the model needs.
        suffix: of the weight's name; Qwen3.5's fused experts have none.

    Raises:
        ModelFileError: a tensor is missing, or has another shape or dtype than the model needs.
    """
    name = path + suffix
    foreign = None if name in tensors else find_foreign(tensors, path, shape, form)
    if foreign is not None:
        return foreign
    if name not in tensors:
        raise ModelFileError(f"tensor {name} is missing")
    weight = tensors[name]
    inverse = tensors.get(f"{name}_scale_inv") or tensors.get(f"{path}.weight_scale")
    if f"{path}.scales" in tensors:
        return _quantized_matrix(tensors, path, weight, shape, form)
    if inverse is not None:
        return _fp8_matrix(weight, inverse, shape, form)
    shaped(typed(weight, FLOATS), shape)
    return Matrix(shape, weight)


def _fp8_matrix(weight: Tensor, scale: Tensor, shape: tuple[int, ...], form: SourceFormat) -> Matrix:
    """Codes that a scale multiplies: one for each block, or (of shape [] or [1], in a stack [E, 1, 1]) for a matrix."""
    shaped(typed(weight, ("F8_E4M3",)), shape)
    block, lead = form.block, shape[:-2]
    if scale.shape in (lead, (*lead, 1, 1) if lead else (1,)):
        block, scale = (shape[-2], shape[-1]), replace(scale, shape=(*lead, 1, 1))
    shaped(scale, (*lead, *(math.ceil(n / size) for n, size in zip(shape[-2:], block, strict=True))))
    return Matrix(shape, weight, inverse=typed(scale, FLOATS), block=block)


def find_transposed(weight: Tensor, shape: tuple[int, ...]) -> Matrix:
    """Floats that are stored as [..., columns, rows]; `shape` is [..., rows, columns].

    Raises:
        ModelFileError: they have another shape or dtype.
    """
    shaped(typed(weight, FLOATS), (*shape[:-2], shape[-1], shape[-2]))
    return TransposedMatrix(shape, weight)


def _quantized_matrix(
    tensors: Mapping[str, Tensor], path: str, weight: Tensor, shape: tuple[int, ...], form: SourceFormat
) -> Matrix:
    scales = tensors[f"{path}.scales"]
    typed(weight, ("U32",))
    biases, cols, name = tensors.get(f"{path}.biases"), shape[-1], form.mode(path)
    mode = MODES[name]
    if (biases is not None) != mode.has_biases:
        raise ModelFileError(f"tensor {path}.biases {'is missing' if biases is None else f'does not go with {name}'}")
    for tensor in (scales, biases):
        if tensor is not None:
            shaped(tensor, (*shape[:-1], scales.shape[-1] if scales.shape else 0))
            typed(tensor, FLOATS if mode.scale == FLOAT else ("U8",))
    groups, words = scales.shape[-1], weight.shape[-1] if weight.shape else 0
    quant = Quant(32 * words // cols, cols // max(groups, 1), name)
    form.check(path, quant, weight)
    if weight.bits not in (None, quant.bits):
        raise ModelFileError(f"tensor {weight.name} is stored with {quant}; its manifest says {weight.bits} bits")
    if not quant.is_known or groups * quant.group_size != cols:
        raise ModelFileError(
            f"tensor {weight.name} with shape {list(weight.shape)} and {groups} scales for {cols} columns"
        )
    shaped(weight, (*shape[:-1], quant.words(cols)))
    return Matrix(shape, weight, scales, biases, quant)

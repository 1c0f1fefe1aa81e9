"""Finds the tensors of a module path in a checkpoint and makes a `Matrix` of them, all shapes and dtypes checked."""

import math
from collections.abc import Mapping

from ..errors import ModelFileError
from ..formats.checkpoint import FLOATS, Tensor
from ..quant import FLOAT, MODES, Quant
from .foreign import find_foreign
from .matrix import Matrix, shaped, typed
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
    inverse = tensors.get(f"{name}_scale_inv")
    if f"{path}.scales" in tensors:
        return _quantized_matrix(tensors, path, weight, shape, form)
    if inverse is not None:
        matrix = Matrix(shape, typed(weight, ("F8_E4M3",)), inverse=typed(inverse, FLOATS), block=form.block)
        blocks = (math.ceil(n / size) for n, size in zip(shape[-2:], form.block, strict=True))
        shaped(inverse, (*shape[:-2], *blocks))
    else:
        matrix = Matrix(shape, typed(weight, FLOATS))
    shaped(weight, shape)
    return matrix


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

"""Finds the tensors of a module path in a checkpoint and makes a `Matrix` of them, all shapes and dtypes checked."""

import math
from collections.abc import Mapping
from dataclasses import replace

from ..errors import ModelFileError
from ..formats.checkpoint import FLOATS, Tensor
from ..quant import FLOAT, GLOBAL_SCALE, MLX_MODES, Quant
from .foreign import find_foreign
from .gguf_tensors import find_blocks
from .matrix import Matrix, MatrixOfColumns, TransposedMatrix, shaped, taken, typed
from .small_floats import find_small_floats
from .source_format import SourceFormat


def find_matrix(
    tensors: Mapping[str, Tensor],
    path: str,
    shape: tuple[int, ...],
    form: SourceFormat,
    suffix: str = ".weight",
    shards: int = 1,
) -> Matrix:
    """The matrix of a module path, its shapes and dtypes checked.

    Args:
        shape: the logical shape that the model needs.
        suffix: of the weight's name; Qwen3.5's fused experts have none.
        shards: parts of a fused matrix, each with fp8 blocks of its own.

    Raises:
        ModelFileError: a tensor is missing, or has another shape or dtype than the model needs.
    """
    name = path + suffix
    found = find_blocks(tensors, name, shape) or find_small_floats(tensors, path, name, shape, form.block, shards)
    if found is None and name not in tensors:
        found = find_foreign(tensors, path, shape, form)
    if found is not None:
        return found
    weight = taken(tensors, name)
    inverse = tensors.get(f"{name}_scale_inv") or tensors.get(f"{path}.weight_scale")
    if f"{path}.scales" in tensors:
        return _quantized_matrix(tensors, path, weight, shape, form)
    if inverse is not None:
        return _fp8_matrix(weight, inverse, shape, form, shards)
    typed(weight, FLOATS)
    if len(shape) == 2 and len(weight.shape) == 3 and weight.shape[0] * weight.shape[2] == shape[1]:
        shaped(weight, (weight.shape[0], shape[0], weight.shape[2]))
        return MatrixOfColumns(shape, weight)
    shaped(weight, shape)
    return Matrix(shape, weight)


def _fp8_matrix(weight: Tensor, scale: Tensor, shape: tuple[int, ...], form: SourceFormat, shards: int) -> Matrix:
    """Codes that a scale multiplies: one for each block, or (of shape [] or [1], in a stack [E, 1, 1]) for a matrix."""
    shaped(typed(weight, ("F8_E4M3",)), shape)
    block, lead = form.block, shape[:-2]
    if scale.shape in (lead, (*lead, 1, 1) if lead else (1,)):
        block, scale = (shape[-2], shape[-1]), replace(scale, shape=(*lead, 1, 1))
    shaped(scale, (*lead, shards * math.ceil(shape[-2] / shards / block[0]), math.ceil(shape[-1] / block[1])))
    return Matrix(shape, weight, inverse=typed(scale, FLOATS), block=block, shards=shards)


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
    biases, cols = tensors.get(f"{path}.biases"), shape[-1]
    groups, words = (one.shape[-1] if one.shape else 0 for one in (scales, weight))
    name = _mode_of(scales, 32 * words // cols, cols // max(groups, 1))
    mode = MLX_MODES[name]
    if (biases is not None) != mode.has_biases:
        raise ModelFileError(f"tensor {path}.biases {'is missing' if biases is None else f'does not go with {name}'}")
    for tensor in (scales, biases):
        if tensor is not None:
            shaped(tensor, (*shape[:-1], scales.shape[-1] if scales.shape else 0))
            typed(tensor, FLOATS if mode.scale == FLOAT else ("U8",))
    global_scale = tensors.get(f"{path}.{GLOBAL_SCALE}")
    quant = Quant(32 * words // cols, cols // max(groups, 1), name, global_scale is not None)
    if global_scale is not None:
        shaped(typed(global_scale, ("F32",)), shape[:-2])
    form.check(path, quant, weight)
    if weight.bits not in (None, quant.bits):
        raise ModelFileError(f"tensor {weight.name} is stored with {quant}; its manifest says {weight.bits} bits")
    if not quant.is_known or groups * quant.group_size != cols:
        raise ModelFileError(
            f"tensor {weight.name} with shape {list(weight.shape)} and {groups} scales for {cols} columns"
        )
    shaped(weight, (*shape[:-1], quant.words(cols)))
    return Matrix(shape, weight, scales, biases, quant, global_scale)


def _mode_of(scales: Tensor, bits: int, group_size: int) -> str:
    """The mode by its stored parts: only affine has float scales; the others have one width and one group."""
    others = (name for name, mode in MLX_MODES.items() if mode.scale != FLOAT)
    is_small = typed(scales, (*FLOATS, "U8")).dtype == "U8"
    wanted = bits, group_size
    found = (name for name in others if (MLX_MODES[name].bits, MLX_MODES[name].group_size) == wanted)
    return next(found, "mxfp4") if is_small else "affine"

"""Fills a model with its resident tensors: all that do not belong to a routed expert.

Tensors have the model's module paths as names. A matrix is stored dense, or as codes with the other parts of its form;
its shapes determine which, and the configuration must agree.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from ..errors import ModelFileError
from ..layers import Weight
from ..ops import backend
from ..ops.backend import FLOATS
from ..ops.forms import float_scales
from ..ops.matrix import parts_of
from ..quant import FLOAT, Quant, Quantization, of_shapes
from .tensors import TABLE, is_of_matrix, kept_dtype


def read_resident(path: Path) -> dict[str, mx.array]:
    """All tensors of `resident*.safetensors`, lazily.

    Raises:
        ModelFileError: there is no such file, or one cannot be read.
    """
    files = sorted(path.glob("resident*.safetensors"))
    if not files:
        raise ModelFileError(f"{path} has no resident*.safetensors; convert the checkpoint again")
    tensors: dict[str, mx.array] = {}
    for file in files:
        try:
            tensors.update(cast(dict[str, mx.array], mx.load(str(file))))
        except (RuntimeError, ValueError) as error:
            raise ModelFileError(f"{file} cannot be read: {error}") from None
    return tensors


def fill(
    module: nn.Module,
    tensors: dict[str, mx.array],
    quantization: Quantization | None,
    dtype: mx.Dtype,
    path: str = "",
) -> None:
    """Gives every parameter of `module` its tensor, converted once to the form in which it is kept (`tensors`).

    `tensors` is emptied, so that no tensor is in memory twice.

    Args:
        module: a model, a draft head, or a part of one.
        path: of the module in the model, which the names of its tensors begin with.

    Raises:
        ModelFileError: a tensor is missing, unknown, misshapen, of the wrong type, or not finite.
    """
    left, floats = tensors, dict[str, mx.array]()
    matrices = {_below(path, own): one for own, one in module.named_modules() if isinstance(one, Weight)}
    for name, matrix in matrices.items():
        _fill_weight(name, matrix, left, quantization, dtype)
    for own, parameter in cast(list[tuple[str, mx.array]], tree_flatten(module.parameters())):
        name, (owner, _, leaf) = _below(path, own), own.rpartition(".")
        if name.endswith(TABLE):
            block = module_at(module, owner)
            setattr(block, leaf, _take_table(left, name, parameter.shape, block.rule.experts))
        elif not is_of_matrix(name, matrices):
            tensor = floats[name] = _take_float(left, name, parameter.shape)
            setattr(module_at(module, owner), leaf, tensor.astype(kept_dtype(name, tensor, dtype)))
    _check_finite(floats)
    floats.clear()
    arrange(module)
    if left:
        raise ModelFileError(f"{len(left)} tensors do not belong to this model, the first is {min(left)}")
    mx.eval(module.parameters())
    mx.clear_cache()  # frees the original tensors, which would stay wired on a Mac
    backend.settle_weights(module.parameters())


def arrange(model: nn.Module) -> None:
    """Lets modules convert their tensors to other forms after all are loaded."""
    for module in model.modules():
        if hasattr(module, "arrange"):
            module.arrange()


def _below(path: str, name: str) -> str:
    return ".".join(filter(None, (path, name)))


def module_at(model: nn.Module, path: str) -> nn.Module:
    """The part of a model that has this path."""
    module: Any = model
    for part in filter(None, path.split(".")):
        module = module[int(part)] if isinstance(module, list) else getattr(module, part)
    return module


def _fill_weight(
    path: str, module: Weight, left: dict[str, mx.array], quantization: Quantization | None, dtype: mx.Dtype
) -> None:
    weight, stated = _take(left, f"{path}.weight"), (quantization or Quantization()).of(path)
    second = f"{path}.{'scales' if stated is None else stated.parts[1]}"
    if second not in left and weight.dtype in FLOATS:
        _check_float(f"{path}.weight", weight, module.shape)
        module.weight, module.filled = weight.astype(kept_dtype(f"{path}.weight", weight, dtype)), True
        _check_finite({f"{path}.weight": weight}, module.weight)
        return
    if second not in left:
        raise ModelFileError(f"tensor {second} is missing; {path}.weight is {weight.dtype}")
    quant = module.quant = _geometry(path, module.shape, weight, left[second], stated)
    module.weight, floats = weight, dict[str, mx.array]()
    for part in module.tensors()[1:]:
        name = f"{path}.{part}"
        tensor = _beside(name, part, quant, module.shape, left)
        setattr(module, part, tensor.astype(kept_dtype(name, tensor, dtype)))
        if tensor.dtype in FLOATS:
            floats[name] = tensor
    _check_finite(floats, *(module[name] for name in module.tensors()))
    if quant.is_nested:
        for scales in float_scales(quant, *parts_of(module)[1:]):
            _check_finite({second: scales})


def _beside(name: str, part: str, quant: Quant, matrix: tuple[int, ...], left: dict[str, mx.array]) -> mx.array:
    """A part of a stored matrix that is not its codes."""
    tensor, (shape, kind) = _take(left, name), quant.shape_of(part, matrix[:-1], matrix[-1], FLOAT)
    if kind != "U8":
        _check_float(name, tensor, shape)
    else:
        _check_shape(name, tensor, shape)
        if tensor.dtype != mx.uint8:
            raise ModelFileError(f"tensor {name} is {tensor.dtype}; scales of mode {quant.mode} are uint8")
    return tensor


def _geometry(path: str, shape: tuple[int, ...], weight: mx.array, scales: mx.array, stated: Quant | None) -> Quant:
    """The stored form by the shapes, checked against the configuration."""
    if weight.dtype != mx.uint32:
        raise ModelFileError(f"tensor {path}.weight is {weight.dtype}; a quantised weight is uint32")
    words, groups = (tensor.shape[-1] if tensor.ndim else 0 for tensor in (weight, scales))
    is_fixed = stated is not None and not stated.is_of_mlx
    quant = stated if is_fixed else of_shapes(path, shape[-1], words, groups, stated)
    assert quant is not None
    _check_shape(f"{path}.weight", weight, (*shape[:-1], quant.words(shape[-1])))
    return quant


def _take(left: dict[str, mx.array], name: str) -> mx.array:
    if name not in left:
        raise ModelFileError(f"tensor {name} is missing")
    return left.pop(name)


def _check_shape(name: str, tensor: mx.array, wanted: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != tuple(wanted):
        raise ModelFileError(f"tensor {name} has shape {list(tensor.shape)}; the model needs {list(wanted)}")


def _take_float(left: dict[str, mx.array], name: str, shape: tuple[int, ...]) -> mx.array:
    tensor = _take(left, name)
    _check_float(name, tensor, shape)
    return tensor


def _take_table(left: dict[str, mx.array], name: str, shape: tuple[int, ...], count: int) -> mx.array:
    """Ids below `count`, uint32."""
    table = _take(left, name)
    _check_shape(name, table, shape)
    if table.dtype != mx.uint32:
        raise ModelFileError(f"tensor {name} is {table.dtype}; expected uint32")
    largest = int(cast(Any, table.max().item()))
    if largest >= count:
        raise ModelFileError(f"tensor {name} names expert {largest} of {count}; convert the checkpoint again")
    return table


def _check_float(name: str, tensor: mx.array, shape: tuple[int, ...]) -> None:
    _check_shape(name, tensor, shape)
    if tensor.dtype not in FLOATS:
        raise ModelFileError(f"tensor {name} is {tensor.dtype}; expected float32, bfloat16 or float16")


def _check_finite(floats: Mapping[str, mx.array], *beside: mx.array) -> None:
    """Computes the arrays `beside` together with what it checks: each evaluation wakes a thread."""
    finite = {name: mx.isfinite(tensor).all() for name, tensor in floats.items()}
    mx.eval(finite, beside)
    for name, is_finite in finite.items():
        if not is_finite.item():
            raise ModelFileError(f"tensor {name} holds NaN or infinite values; convert the checkpoint again")

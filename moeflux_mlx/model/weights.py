"""Fills a model with its resident tensors: everything that is not a routed expert.

Tensors carry the model's own module paths as names. A matrix is stored dense, or as 4-bit or 8-bit
codes with scales and biases; which, its shapes tell, and the configuration must agree.
"""

from pathlib import Path
from typing import Any, cast

import mlx.core as mx
from mlx.utils import tree_flatten

from ..errors import ModelFileError
from ..ops import cpu
from ..spec import Quantization, Storage
from .decoder import Model
from .linear import Weight

FLOATS = (mx.float32, mx.bfloat16, mx.float16)
KEPT_FLOAT32 = ("A_log", "dt_bias", "e_score_correction_bias")
EMBEDDING = ".embed_tokens"
ROUTERS = (".mlp.gate", ".mlp.shared_expert_gate")


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


def resident_bytes(tensors: dict[str, mx.array], dtype: mx.Dtype) -> int:
    """Bytes of `tensors` as `fill` keeps them; reads nothing."""
    return sum(_kept_bytes(name, tensor, dtype) for name, tensor in tensors.items())


def _kept_bytes(name: str, tensor: mx.array, dtype: mx.Dtype) -> int:
    if tensor.dtype == mx.uint32:
        return tensor.nbytes
    path, _, leaf = name.rpartition(".")
    kept = mx.float32 if leaf in KEPT_FLOAT32 or path.endswith(ROUTERS) else dtype
    if leaf in ("scales", "biases") and not path.endswith(EMBEDDING):
        kept = _affine_dtype(tensor, kept)
    return tensor.size * kept.size


def fill(model: Model, tensors: dict[str, mx.array], quantization: Quantization | None, dtype: mx.Dtype) -> None:
    """Gives every parameter of `model` its tensor, converted once to what the arithmetic needs.

    Scales, biases, norms and dense matrices become `dtype`; the router and the decay parameters float32.
    `tensors` is emptied, so that no tensor is in memory twice.

    Raises:
        ModelFileError: a tensor is missing, unknown, misshapen, of the wrong type, or not finite.
    """
    left = tensors
    matrices = {path: module for path, module in model.named_modules() if isinstance(module, Weight)}
    for path, module in matrices.items():
        _fill_weight(path, module, left, quantization, mx.float32 if path.endswith(ROUTERS) else dtype)
    for name, parameter in cast(list[tuple[str, mx.array]], tree_flatten(model.parameters())):
        path, _, leaf = name.rpartition(".")
        if path not in matrices:
            kept = mx.float32 if leaf in KEPT_FLOAT32 else dtype
            setattr(_module(model, path), leaf, _take_float(left, name, parameter.shape).astype(kept))
    arrange(model)
    if left:
        raise ModelFileError(f"{len(left)} tensors do not belong to this model, the first is {min(left)}")
    mx.eval(model.parameters())
    mx.clear_cache()  # what the tensors were before is not for keeping: on a Mac it would stay wired
    cpu.settle(model)


def arrange(model: Model) -> None:
    """Lets every module that wants its tensors in another form make it, once all have theirs."""
    for module in model.modules():
        if hasattr(module, "arrange"):
            module.arrange()


def _module(model: Model, path: str) -> Any:
    found: Any = model
    for part in path.split("."):
        found = found[int(part)] if isinstance(found, list) else getattr(found, part)
    return found


def _fill_weight(
    path: str, module: Weight, left: dict[str, mx.array], quantization: Quantization | None, dtype: mx.Dtype
) -> None:
    weight = _take(left, f"{path}.weight")
    if f"{path}.scales" not in left and weight.dtype in FLOATS:
        module.weight, module.filled = _checked_float(f"{path}.weight", weight, module.shape).astype(dtype), True
        mx.eval(module.weight)
        return
    if f"{path}.scales" not in left:
        raise ModelFileError(f"tensor {path}.scales is missing; {path}.weight is {weight.dtype}")
    module.group_size, module.bits = _geometry(path, module.shape, weight, left[f"{path}.scales"], quantization)
    module.weight = weight
    grouped = (*module.shape[:-1], module.shape[-1] // module.group_size)
    for name in ("scales", "biases"):
        tensor = _take_float(left, f"{path}.{name}", grouped)
        setattr(module, name, tensor.astype(dtype if path.endswith(EMBEDDING) else _affine_dtype(tensor, dtype)))
    mx.eval(module.weight, module.scales, module.biases)


def _affine_dtype(tensor: mx.array, dtype: mx.Dtype) -> mx.Dtype:
    """Of scales and biases: the CPU reads less when they stay bfloat16, and computes in float32 all the same."""
    on_cpu = dtype == mx.float32 and mx.default_device() == mx.cpu
    return tensor.dtype if on_cpu and tensor.dtype == mx.bfloat16 else dtype


def _geometry(
    path: str, shape: tuple[int, ...], weight: mx.array, scales: mx.array, quantization: Quantization | None
) -> tuple[int, int]:
    """(group_size, bits) from the shapes, checked against the configuration."""
    if weight.dtype != mx.uint32:
        raise ModelFileError(f"tensor {path}.weight is {weight.dtype}; a quantised weight is uint32")
    cols = shape[-1]
    group_size, bits = cols // max(scales.shape[-1], 1), 32 * weight.shape[-1] // cols
    stated = (quantization or Quantization()).of(path)
    if stated != Storage(group_size, bits):
        raise ModelFileError(
            f"{path} has group_size {group_size} and {bits} bits by its shapes; config.json says {stated or 'none'}"
        )
    _check_shape(f"{path}.weight", weight, (*shape[:-1], cols * bits // 32))
    return group_size, bits


def _take(left: dict[str, mx.array], name: str) -> mx.array:
    if name not in left:
        raise ModelFileError(f"tensor {name} is missing")
    return left.pop(name)


def _check_shape(name: str, tensor: mx.array, wanted: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != tuple(wanted):
        raise ModelFileError(f"tensor {name} has shape {list(tensor.shape)}; the model needs {list(wanted)}")


def _take_float(left: dict[str, mx.array], name: str, shape: tuple[int, ...]) -> mx.array:
    return _checked_float(name, _take(left, name), shape)


def _checked_float(name: str, tensor: mx.array, shape: tuple[int, ...]) -> mx.array:
    _check_shape(name, tensor, shape)
    if tensor.dtype not in FLOATS:
        raise ModelFileError(f"tensor {name} is {tensor.dtype}; expected float32, bfloat16 or float16")
    if not mx.isfinite(tensor).all().item():
        raise ModelFileError(f"tensor {name} holds NaN or infinite values; convert the checkpoint again")
    return tensor

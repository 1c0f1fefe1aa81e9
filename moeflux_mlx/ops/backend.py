"""Selects who computes: a GPU's kernels, plain MLX operations, or numpy arrays and native kernels on the CPU.

`enter` chooses the last, once for each forward pass: from there on activations are float32 numpy arrays, and an
operation that meets one computes at once instead of adding to an MLX graph. Weights and caches stay mx.arrays and are
read in place; no operation writes into one.
"""

import ctypes
import math
import sys
from collections.abc import Callable, Iterable
from functools import cache, lru_cache
from types import ModuleType
from typing import Any, TypeAlias, TypeGuard, TypeVar

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten

from . import native
from .launch import Reason
from .stand_ins import stand_ins

# Activations have one of these types through a whole pass: its kind. Where the two only differ in how they are made,
# `of_kind` and `library_of` serve both; an operation asks for the kind only where it has two forms.
Array = TypeVar("Array", mx.array, np.ndarray)
EitherArray: TypeAlias = np.ndarray | mx.array  # where no variable can say which, and both have what is done with it
# The same where both kinds meet in an operation. Its type is not checked, because each operation would have to exist
# for every pair of the two.
AnyArray: TypeAlias = Any

FLOATS = (mx.float32, mx.bfloat16, mx.float16)
FEW = 1 << 16  # largest number of zeros that is kept
LANES = 16  # the native kernels need rows of whole vectors


def name() -> str:
    """The name of MLX's backend: "metal" or "cuda" if the default device is such a GPU, else "ops" (plain
    operations).
    """
    viewed = stand_ins().backend
    if viewed is not None:
        return viewed
    if mx.default_device() == mx.gpu:
        if mx.metal.is_available():
            return "metal"
        if mx.cuda.is_available():
            return "cuda"
    return "ops"


@cache
def capability() -> int:
    """The first number of the NVIDIA GPU's compute capability; 0: there is none."""
    return int(mx.device_info().get("compute_capability_major", 0))


def has_kernels() -> bool:
    """Whether operations run as GPU kernels on the default device."""
    return name() != "ops"


def takes_widths(widths: Iterable[int]) -> bool:
    """Whether the native kernels take a model with rows of these widths."""
    return all(width % LANES == 0 for width in widths)


def computes_natively(dtype: mx.Dtype, widths: Iterable[int] = ()) -> bool:
    """Whether the native kernels run here and compute activations of `dtype`, in rows of these widths."""
    return native_refusal(dtype, widths) is None


def native_refusal(dtype: mx.Dtype, widths: Iterable[int]) -> Reason | None:
    """Why no native form runs here on activations of `dtype`, in rows of these widths."""
    if has_kernels():
        return Reason("a GPU computes")
    if not native.available():
        return Reason("the native extension is not built")
    if dtype != mx.float32:
        return Reason(f"the native forms compute in float32, not in {dtype}".replace("mlx.core.", ""))
    odd = [width for width in widths if width % LANES]
    return Reason(f"rows of {odd[0]} values are not a multiple of {LANES}") if odd else None


def enter(tokens: mx.array, dtype: mx.Dtype) -> AnyArray:
    """`tokens` as numpy if a model with activations in `dtype` runs here natively.

    Warns once if only the missing extension is in the way.
    """
    if dtype != mx.float32 or has_kernels():
        return tokens
    native.warn_if_missing()
    return view(tokens) if native.available() else tokens


def leave(x: EitherArray) -> mx.array:
    """Converts back to an MLX array."""
    return mx.array(x) if isinstance(x, np.ndarray) else x


def of_kind(array: AnyArray, x: Array) -> Array:
    """`array` as an array of x's kind: beside numpy's it is read in place, beside MLX's it is converted."""
    return view(array) if isinstance(x, np.ndarray) else leave(array)


def kernels_take(x: EitherArray, refusal: Callable[..., Reason | None], *case: object) -> TypeGuard[mx.array]:
    """Whether a GPU's kernels compute with x: it is MLX's, and `refusal` has no reason against the case on this
    backend.
    """
    return not isinstance(x, np.ndarray) and not refusal(name(), *case)


def native_takes(x: EitherArray, refusal: Callable[..., Reason | None], *case: object) -> TypeGuard[np.ndarray]:
    """Whether a native form computes with x: it is numpy's, and `refusal` has no reason against the case."""
    return isinstance(x, np.ndarray) and not refusal(*case)


def settle_weights(parameters: object) -> None:
    """Moves weights that the native kernels will read into huge pages."""
    if mx.default_device() == mx.cpu and native.available():
        for weight in dict(tree_flatten(parameters)).values():
            native.huge_pages(weight)


def computes_at_once(x: Array) -> bool:
    """Whether an operation on `x` has computed its result when it returns."""
    return isinstance(x, np.ndarray)


def start(*arrays: object) -> None:
    """Begins to compute the arrays; skips None and computed ones."""
    if stand_ins().backend is None:
        mx.async_eval(arrays)


def finish(x: Array) -> None:
    """Waits until `x` is computed, so that its inputs can be freed."""
    if stand_ins().backend is None:
        mx.eval(x)


def after(x: AnyArray) -> mx.array | None:
    """A small array that is computed after `x` and does not keep it alive; None if `x` is computed already."""
    if computes_at_once(x):
        return None
    marker = x.reshape(-1)[:1] * 1  # an operation, because a view would keep all of it
    mx.async_eval(marker)
    return marker


def give_back(x: Array) -> None:
    """Returns freed numpy memory from the C library to the system.

    glibc keeps pieces of up to 32 MB each: in a long prompt about as much again as the prompt's temporaries.
    """
    trim = _malloc_trim()
    if trim is not None and computes_at_once(x):
        trim(0)


@cache
def _malloc_trim() -> Any:
    """glibc's; None elsewhere."""
    return getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None


def join(parts: "list[tuple[Array, ...]]", axis: int) -> "list[Array]":
    """Joins the corresponding arrays of the tuples along `axis`; empties `parts` on the way."""
    if len(parts) == 1:
        return list(parts.pop())
    columns = [list(column) for column in zip(*parts, strict=True)]
    parts.clear()
    joined: list[Array] = []
    for column in columns:
        joined.append(library_of(column[0]).concatenate(column, axis=axis))
        column.clear()
        start(joined[-1])
    return joined


def contiguous(x: Array) -> Array:
    """`x` row by row in memory, for operations that view rows."""
    return np.ascontiguousarray(x) if isinstance(x, np.ndarray) else mx.contiguous(x)


def view(x: EitherArray) -> np.ndarray:
    """The evaluated array's own memory, row-contiguous; bfloat16 as uint16."""
    if not isinstance(x, np.ndarray):
        x = np.asarray(x.view(mx.uint16) if x.dtype == mx.bfloat16 else x)
    return np.ascontiguousarray(x)


def library_of(x: Array) -> ModuleType:
    """The module whose functions take arrays of x's kind: `mlx.core` or numpy."""
    return np if isinstance(x, np.ndarray) else mx


def dtype_of(x: Array) -> mx.Dtype:
    """The dtype of MLX's or numpy's activations."""
    return mx.float32 if isinstance(x, np.ndarray) else x.dtype


def as_dtype(x: Array, dtype: mx.Dtype) -> Array:
    """Activations of MLX's in `dtype`; numpy's are always float32."""
    return x if isinstance(x, np.ndarray) else x.astype(dtype)


def zeros_like(x: AnyArray, shape: tuple[int, ...] | None = None) -> AnyArray:
    """Zeros of x's kind and dtype, in x's shape or another; for a few rows the array is made once."""
    shape = x.shape if shape is None else shape
    if computes_at_once(x):
        return np.zeros(shape, x.dtype)
    return zeros(shape, x.dtype) if math.prod(shape) <= FEW else mx.zeros(shape, x.dtype)


@cache
def constant(value: float, shape: tuple[int, ...]) -> mx.array:
    """An array of one value, float32, made once: on a GPU the host's numbers come late. Like the following two, it is
    made of values, because a thread that only builds graphs cannot wait for an operation.
    """
    return mx.array(np.full(shape, value, np.float32))


def zeros(shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
    """Zeros of MLX's that are made once, for many operations that only read them."""
    return _zeros(shape, dtype, str(mx.default_device()))


@lru_cache(32)
def _zeros(shape: tuple[int, ...], dtype: mx.Dtype, device: str) -> mx.array:
    return mx.array(np.zeros(shape, np.float32), dtype)


def arange(count: int, library: ModuleType) -> AnyArray:
    """int32 0 .. count - 1 in an array of numpy or MLX; MLX's is made once, because a compiled step would make it again
    in every layer for every token."""
    return np.arange(count, dtype=np.int32) if library is np else _arange(count, str(mx.default_device()))


@lru_cache(64)
def _arange(count: int, device: str) -> mx.array:
    return mx.array(np.arange(count, dtype=np.int32))


def stack(arrays: list[np.ndarray]) -> np.ndarray:
    """np.stack, without a copy of a single array."""
    return arrays[0][None] if len(arrays) == 1 else np.stack(arrays)

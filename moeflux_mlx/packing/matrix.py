"""One weight matrix of a checkpoint, however it is stored: floats, block fp8, or quantised groups.

A matrix gives its stored codes unchanged, its values as floats, or freshly quantised codes. It reads
no more than it is asked for, and long matrices are quantised a few rows at a time.
"""

import math
import reprlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx

from ..errors import ConfigError, ModelFileError
from ..families.names import canonical_name
from ..formats.checkpoint import FLOATS, Tensor
from ..quant import EXPERTS, Quant, entries, is_computed, is_known

CHUNK_VALUES = 1 << 24  # quantised at a time: 64 MiB as float32


class SourceFormat:
    """What config.json states about quantisation.

    Attributes:
        mlx: some matrices are stored as MLX's quantised codes, and what is not is so on purpose.
        block: rows and columns that share one scale of an fp8 checkpoint.
    """

    def __init__(self, config: Mapping[str, Any], layers: int):
        """Raises ConfigError: a quantisation that is not known; `layers` as for `canonical_name`."""
        hub = _object(config, "quantization_config") or _object(_object(config, "text_config"), "quantization_config")
        found = entries(config)
        if not found and hub and "quant_method" not in hub:
            found = entries({"quantization": hub})
        self.mlx = bool(found)
        self.block = (128, 128) if self.mlx else _fp8_block(hub)
        self.default = found.pop("", None)
        names = {path: canonical_name(f"{path}.weight", layers) for path in found}
        self.overrides = {name: found[path] for path, name in names.items() if name is not None}

    def check(self, name: str, found: Quant | None, tensor: Tensor) -> None:
        """Raises ModelFileError: shapes and config.json tell different stories about a matrix."""
        if not self.mlx:
            return
        stated = self.overrides.get(name, self.default)
        if found is not None and stated != found:
            raise ModelFileError(
                f"{tensor.file}: tensor {tensor.name} is stored with {found}; config.json says {stated}"
            )

    @property
    def must_requantize(self) -> bool:
        """Whether, by what is stated, some codes cannot be copied into a packed model."""
        return any(one is not None and not is_computed(one) for one in (self.default, *self.overrides.values()))

    def mode(self, name: str) -> str:
        stated = self.overrides.get(name, self.default)
        return stated.mode if stated else "affine"


def _object(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = config.get(name)
    if value is not None and not isinstance(value, Mapping):
        raise ConfigError(f"config field {name!r} is {reprlib.repr(value)}; expected an object")
    return value or {}


def _fp8_block(config: Mapping[str, Any]) -> tuple[int, int]:
    method = config.get("quant_method")
    if method not in (None, "fp8"):
        raise ConfigError(
            f"quant_method {method!r} cannot be converted; use a bf16, fp8 or MLX checkpoint of this model"
        )
    block = config.get("weight_block_size") or [128, 128]
    if not isinstance(block, list) or len(block) != 2 or not all(type(n) is int and n > 0 for n in block):
        raise ConfigError(f"quantization_config field 'weight_block_size' is {block!r}; expected two sizes")
    return block[0], block[1]


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

    def fits(self, quant: Quant) -> bool:
        """Whether the stored bytes are what a packed expert in the form `quant` holds."""
        return self.quant == quant and all(t is not None and t.dtype == "BF16" for t in (self.scales, self.biases))

    @property
    def is_packed(self) -> bool:
        """Whether they are what a packed expert holds."""
        return self.quant == EXPERTS and self.fits(self.quant)

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
        affine = [finite(t, t.read()) for t in (self.scales, self.biases) if t is not None]
        return self.weight.read(), *affine

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

    def quantized(self, quant: Quant, start: int = 0, stop: int | None = None) -> tuple[mx.array, ...]:
        """What `mx.quantize` gives for the matrix cast to bfloat16: weight, scales, biases.

        Rows are quantised independently, so doing a few at a time changes nothing.
        """
        stop = self.shape[0] if stop is None else stop
        step = max(1, CHUNK_VALUES // math.prod(self.shape[1:]))
        parts = []
        for row in range(start, stop, step):
            values = self.values(row, min(row + step, stop))
            if values.dtype != mx.bfloat16:  # a large float32 becomes infinite here
                values = finite(self.weight, values.astype(mx.bfloat16))
            parts.append(mx.quantize(values, quant.group_size, quant.bits))
            mx.eval(parts[-1])
        return parts[0] if len(parts) == 1 else tuple(mx.concatenate(list(part)) for part in zip(*parts, strict=True))


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
    if name not in tensors:
        raise ModelFileError(f"tensor {name} is missing")
    weight = tensors[name]
    inverse = tensors.get(f"{name}_scale_inv")
    if f"{path}.scales" in tensors:
        return _quantized_matrix(tensors, path, weight, shape, form)
    if inverse is not None:
        matrix = Matrix(shape, _typed(weight, ("F8_E4M3",)), inverse=_typed(inverse, FLOATS), block=form.block)
        blocks = (math.ceil(n / size) for n, size in zip(shape[-2:], form.block, strict=True))
        _shaped(inverse, (*shape[:-2], *blocks))
    else:
        matrix = Matrix(shape, _typed(weight, FLOATS))
    _shaped(weight, shape)
    return matrix


def _quantized_matrix(
    tensors: Mapping[str, Tensor], path: str, weight: Tensor, shape: tuple[int, ...], form: SourceFormat
) -> Matrix:
    scales = tensors[f"{path}.scales"]
    _typed(weight, ("U32",))
    biases, cols, mode = tensors.get(f"{path}.biases"), shape[-1], form.mode(f"{path}.weight")
    if (biases is not None) != (mode == "affine"):
        raise ModelFileError(f"tensor {path}.biases {'is missing' if biases is None else f'does not go with {mode}'}")
    for tensor in (scales, biases):
        if tensor is not None:
            _shaped(tensor, (*shape[:-1], scales.shape[-1] if scales.shape else 0))
            _typed(tensor, FLOATS if mode == "affine" else ("U8",))
    groups, words = scales.shape[-1], weight.shape[-1] if weight.shape else 0
    quant = Quant(32 * words // cols, cols // max(groups, 1), mode)
    form.check(f"{path}.weight", quant, weight)
    if weight.bits not in (None, quant.bits):
        raise ModelFileError(f"tensor {weight.name} is stored with {quant}; its manifest says {weight.bits} bits")
    if mode == "affine" and not is_known(quant) or groups * quant.group_size != cols:
        raise ModelFileError(
            f"tensor {weight.name} with shape {list(weight.shape)} and {groups} scales for {cols} columns"
        )
    _shaped(weight, (*shape[:-1], quant.words(cols)))
    return Matrix(shape, weight, scales, biases, quant)


def _typed(tensor: Tensor, wanted: tuple[str, ...]) -> Tensor:
    if tensor.dtype not in wanted:
        raise ModelFileError(f"{tensor.file}: tensor {tensor.name} is {tensor.dtype}; expected {' or '.join(wanted)}")
    return tensor


def _shaped(tensor: Tensor, wanted: tuple[int, ...]) -> None:
    if tensor.shape != tuple(wanted):
        raise ModelFileError(
            f"{tensor.file}: tensor {tensor.name} has shape {list(tensor.shape)}; the model needs {list(wanted)}"
        )


def finite(tensor: Tensor, values: mx.array) -> mx.array:
    """`values`, once they are known to be numbers; integers pass."""
    if mx.issubdtype(values.dtype, mx.floating) and not mx.isfinite(values).all().item():
        raise ModelFileError(f"{tensor.file}: tensor {tensor.name} holds NaN or infinite values; download it again")
    return values

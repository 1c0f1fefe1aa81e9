"""One weight matrix of a checkpoint, however it is stored: floats, block fp8, or quantised groups.

A matrix can return its stored codes unchanged, its values as floats, or new codes. It reads only the requested rows,
and long matrices are quantised a few rows at a time. `Wanted` says which form a conversion makes of what it finds, and
which codes it keeps; `Rounding`, how it makes codes of floats: it rounds each matrix alone, unless a subclass knows
codes that were made before.
"""

import math
import reprlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import mlx.core as mx

from ..errors import ConfigError, ModelFileError
from ..formats.checkpoint import Tensor
from ..ops.forms import unpacked_float32
from ..quant import DEFAULT, E4M3, FLOAT, MLX_MODES, NAN, SUPPORTED, Mode, Quant
from ..rounding.methods import FIT, METHODS
from .ggml import TYPES, Codes, check, rounded
from .gguf_forms import FORMS
from .recipe import EXPERT_PARTS, PARTS, ROUTER_PART, TABLES, UNIFORM_RECIPE, Recipe

CHUNK_VALUES = 1 << 24  # values quantised at a time: 64 MiB as float32


@dataclass(frozen=True)
class Matrix:
    """`shape` [..., rows, cols] is the logical one. With `quant`, the weight holds codes, and `global_scale`, if the
    form has one, a number for each matrix; with `inverse`, fp8 codes that are multiplied by a scale for each block;
    else plain floats. `shards` are parts of equal length one after another, at each of which the blocks begin anew."""

    shape: tuple[int, ...]
    weight: Tensor
    scales: Tensor | None = None
    biases: Tensor | None = None
    quant: Quant | None = None
    global_scale: Tensor | None = None
    inverse: Tensor | None = None
    block: tuple[int, int] = (128, 128)
    shards: int = 1

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        all_of_it = (self.weight, self.scales, self.biases, self.global_scale, self.inverse)
        return tuple(t for t in all_of_it if t is not None)

    @property
    def dtypes(self) -> tuple[str, ...]:
        """The dtypes of the arrays of `codes`."""
        return tuple(t.dtype for t in (self.weight, self.scales, self.biases, self.global_scale) if t is not None)

    def __getitem__(self, index: int) -> "Matrix":
        """One entry of the leading axis of a stack."""
        return self._each(self.shape[1:], lambda tensor: tensor[index])

    def rows(self, start: int, stop: int) -> "Matrix":
        """Rows of the leading axis; not for fp8, whose blocks span rows."""
        return self._each((stop - start, *self.shape[1:]), lambda tensor: tensor.rows(start, stop))

    def _each(self, shape: tuple[int, ...], part: Callable[[Tensor], Tensor]) -> "Matrix":
        scales, biases, inverse = (None if t is None else part(t) for t in (self.scales, self.biases, self.inverse))
        made = replace(self, shape=shape, weight=part(self.weight), scales=scales, biases=biases, inverse=inverse)
        if self.global_scale is None or len(self.shape) == 2:  # all rows of a matrix share it
            return made
        return replace(made, global_scale=part(self.global_scale))

    def codes(self) -> tuple[mx.array, ...]:
        """Weight, scales and, as the form has them, biases, or a global scale [...], as they are stored.

        Raises:
            ModelFileError: a code, scale or bias is NaN or infinite.
        """
        scale = FLOAT if self.quant is None else self.quant.scale
        of_groups = [finite(t, t.read(), scale) for t in (self.scales, self.biases) if t is not None]
        weight = self.weight.read()
        if self.quant is not None and self.quant.codes == E4M3:
            finite(self.weight, weight.view(mx.uint8), E4M3)
        return weight, *of_groups, *self.factor()

    def factor(self) -> tuple[mx.array, ...]:
        """The global scale, float32 [..., 1, 1] for [..., rows, cols], if the form has one."""
        if self.global_scale is None:
            return ()
        return (finite(self.global_scale, self.global_scale.read()).reshape(*self.shape[:-2], 1, 1),)

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
        return finite(self.weight, unpacked_float32(self.quant, *self.codes()))

    def _from_fp8(self, start: int, stop: int) -> mx.array:
        """codes * scale of their block, in float32; the last block of an axis may be partial."""
        assert self.inverse is not None
        if len(self.shape) == 3:
            return mx.stack([self[index]._from_fp8(0, self.shape[1]) for index in range(start, stop)])
        rows, cols = self.block
        length = self.shape[0] // self.shards
        blocks = [row // length * math.ceil(length / rows) + row % length // rows for row in range(start, stop)]
        stored = self.inverse.rows(blocks[0], blocks[-1] + 1)
        scale = finite(stored, stored.read()).astype(mx.float32)[mx.array(blocks) - blocks[0]]
        scale = mx.repeat(scale, cols, axis=1)[:, : self.shape[1]]
        return mx.from_fp8(self.weight.rows(start, stop).read(), mx.float32) * scale

    def quantized(
        self, quant: Quant, rounding: str, start: int = 0, stop: int | None = None, dtype: mx.Dtype = mx.bfloat16
    ) -> tuple[mx.array, ...]:
        """The matrix `rounded` by the method `rounding`: all parts of the form but a grid, floating ones
        in `dtype`.

        Rows are rounded independently, so doing a few at a time changes nothing.
        """
        stop = self.shape[0] if stop is None else stop
        step = max(1, CHUNK_VALUES // math.prod(self.shape[1:]))
        parts = []
        for row in range(start, stop, step):
            values = self.values(row, min(row + step, stop))
            if values.dtype != dtype:  # a large float32 becomes infinite here
                finite(self.weight, values.astype(dtype))
            parts.append(rounded(values, quant, rounding, dtype=dtype))
            mx.eval(parts[-1])
        return parts[0] if len(parts) == 1 else tuple(mx.concatenate(list(part)) for part in zip(*parts, strict=True))


@dataclass(frozen=True)
class TransposedMatrix(Matrix):
    """Floats, stored as [..., columns, rows]."""

    def values(self, start: int = 0, stop: int | None = None) -> mx.array:
        return finite(self.weight, self.weight.read().swapaxes(-1, -2)[start:stop])


@dataclass(frozen=True)
class MatrixOfColumns(Matrix):
    """Floats, stored as [parts, rows, columns / parts]: columns of each part behind those of the part before."""

    def rows(self, start: int, stop: int) -> Matrix:
        raise NotImplementedError

    def values(self, start: int = 0, stop: int | None = None) -> mx.array:
        parts = self.weight.read()[:, start:stop].swapaxes(0, 1)
        return finite(self.weight, parts.reshape(parts.shape[0], -1))


def taken(tensors: Mapping[str, Tensor], name: str) -> Tensor:
    """The tensor of that name. Raises ModelFileError: it is missing."""
    if name not in tensors:
        raise ModelFileError(f"tensor {name} is missing")
    return tensors[name]


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
    """`values`, once they are known to be numbers; `scale` says what they are if they are floats of 8 bits."""
    nan = NAN.get(scale)
    if nan is not None and (values & nan == nan).any().item():
        raise ModelFileError(f"{tensor.file}: tensor {tensor.name} holds NaN; download it again")
    if mx.issubdtype(values.dtype, mx.floating) and not mx.isfinite(values).all().item():
        raise ModelFileError(f"{tensor.file}: tensor {tensor.name} holds NaN or infinite values; download it again")
    return values


ALL = slice(0, None, 1)


@dataclass(frozen=True)
class Rounding:
    """Makes codes of floats: each matrix by itself, by a method of `rounding.methods`.

    Args:
        method: its name, which goes with what a conversion's bytes depend on.
    """

    method: str

    def codes(self, path: str, matrix: Matrix, quant: Quant, rows: slice = ALL, dtype: mx.Dtype = mx.bfloat16) -> Codes:
        """The codes of some rows of a matrix, all parts of the form but a grid, with floating scales and biases of
        `dtype`; `path`: the module path of what they are stored for.

        Raises:
            ModelFileError: a file cannot be read, or a value is not finite.
        """
        parts = matrix.quantized(quant, self.method, rows.start, rows.stop, dtype)
        return tuple(part[:: rows.step] for part in parts)


# The arguments on which bytes depend, if they are given.
STATED = ("q_bits", "q_group_size", "expert_bits", "down_bits", "q_mode", "q_type", "without_correction_bias")
BESIDE_CODES = Quant(8, 64)  # a checkpoint that is published in codes has kept only its sensitive parts in floats


@dataclass(frozen=True, kw_only=True)
class Forms:
    """The arguments of `convert` that say what becomes of a matrix; `convert` explains them."""

    q_bits: int | None = None
    q_group_size: int | None = None
    q_mode: str = DEFAULT.mode
    q_type: str | None = None
    expert_bits: int | None = None
    down_bits: int | None = None
    recipe: str | Path | Recipe | None = None
    requantize: bool = False
    rounding: str | Rounding = FIT
    without_correction_bias: bool = False


@dataclass(frozen=True)
class Wanted:
    """Args:
    recipe: the forms of what comes as floats.
    requantize: whether codes are quantised again where a layer's experts are stored in several forms.
    named: whether forms of experts are asked for; then `requantize` is for all their codes in another.
    is_usual: whether the forms of resident matrices are nobody's wish.
    options: what was asked for, by the names of `convert`'s arguments: what the bytes depend on.
    keeps_floats: whether resident matrices that come as floats stay floats.
    rounding: how floats become codes.
    without_correction_bias: whether a checkpoint may lack the biases that correct a router's choice.
    """

    recipe: Recipe = UNIFORM_RECIPE
    requantize: bool = False
    named: bool = False
    is_usual: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)
    keeps_floats: bool = False
    rounding: Rounding = Rounding(FIT)
    without_correction_bias: bool = False

    @classmethod
    def of(cls, forms: Forms) -> "Wanted":
        """Raises:
        ConfigError: a form that is not computed, no recipe, or a method of rounding that is not known.
        ModelFileError: the recipe's file is no JSON.
        """
        rounding, recipe, q_type = forms.rounding, forms.recipe, forms.q_type
        if isinstance(rounding, str) and rounding not in METHODS:
            raise ConfigError(f"rounding {rounding!r} is not known; supported: {', '.join(METHODS)}")
        chosen = Recipe.of(recipe or (UNIFORM_RECIPE if q_type is None else "balanced"))
        options = {name: getattr(forms, name) for name in STATED if getattr(forms, name) != getattr(Forms, name)}
        if recipe is not None:
            options["recipe"] = chosen.to_json()
        of_floats = options.keys() & {"q_bits", "q_group_size", "q_mode"}
        if of_floats:
            usual: Mode | Quant = MLX_MODES.get(forms.q_mode, DEFAULT)
            bits = usual.bits if forms.q_bits is None else forms.q_bits
            group = usual.group_size if forms.q_group_size is None else forms.q_group_size
            quant = _checked(Quant(bits, group, forms.q_mode))
            chosen = chosen.with_forms(dict.fromkeys((part for part in PARTS if part != ROUTER_PART), quant))
        if q_type is not None:
            chosen = chosen.with_forms(dict.fromkeys(EXPERT_PARTS, _of_type(q_type)))
        chosen = _with_expert_bits(chosen, forms.expert_bits, forms.down_bits)
        if options.keys() - {"recipe", "without_correction_bias"}:
            chosen = replace(chosen, name="from options")
        return cls(
            chosen,
            forms.requantize,
            named=bool(options.keys() & {"expert_bits", "down_bits", "q_type", "recipe"}),
            is_usual=not (of_floats or options.keys() & {"q_type", "recipe"}),
            options={**options, "requantize": forms.requantize},
            rounding=Rounding(rounding) if isinstance(rounding, str) else rounding,
            without_correction_bias=forms.without_correction_bias,
        )

    def check(self, is_calibrated: bool) -> None:
        """Raises ConfigError: a form of GGUF's cannot be made here, or not without a text."""
        for form in self.recipe.forms:
            check(form, is_calibrated)

    def keeps(self, stored: Quant, form: Quant) -> bool:
        """Whether an expert's codes in the form `stored` are copied, though `form` is wanted of floats."""
        return stored == form or not (self.requantize and self.named)

    def beside_codes(self) -> "Wanted":
        """What is wanted of a checkpoint whose experts are published in codes: 8 bits for the rest, unless options say
        another form.
        """
        if not self.is_usual:
            return self
        kept = (*EXPERT_PARTS, ROUTER_PART, TABLES)
        rest = dict.fromkeys((part for part in PARTS if part not in kept), BESIDE_CODES)
        experts = {part: self.recipe.form(part) for part in (*EXPERT_PARTS, TABLES)}
        return replace(self, recipe=replace(self.recipe.with_forms({**experts, **rest}), name="beside codes"))


def _of_type(name: str) -> Quant:
    """The form of a type of GGUF."""
    if name.upper() not in TYPES:
        raise ConfigError(f"q_type {reprlib.repr(name)} is not made; supported: {', '.join(TYPES)}")
    return FORMS[name.upper()].quant


def _with_expert_bits(recipe: Recipe, expert_bits: int | None, down_bits: int | None) -> Recipe:
    """`expert_bits` for all of the experts' matrices, `down_bits` for down."""
    gate_up, down = EXPERT_PARTS
    for part, bits in ((gate_up, expert_bits), (down, expert_bits), (down, down_bits)):
        quant = recipe.form(part)
        if bits is not None and quant is not None:
            recipe = recipe.with_forms({part: _with_bits(quant, bits)})
    return recipe


def _with_bits(quant: Quant, bits: int) -> Quant:
    """The form with other bits: in mode affine, as the other modes have only one width."""
    if bits == quant.bits:
        return quant
    return _checked(Quant(bits, quant.group_size if quant.mode == DEFAULT.mode else DEFAULT.group_size))


def _checked(quant: Quant) -> Quant:
    if not (quant.is_known and quant.is_of_mlx):
        raise ConfigError(f"{quant.mode}: {quant} is not computed; supported: {SUPPORTED}")
    return quant

"""How a conversion treats what it finds: the forms of floats, and which codes it keeps."""

import reprlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from ..quant import DEFAULT, MLX_MODES, SUPPORTED, Mode, Quant
from ..rounding.methods import FIT, METHODS
from .ggml import TYPES, check
from .gguf_forms import FORMS
from .matrix import Rounding
from .recipe import EXPERT_PARTS, PARTS, ROUTER_PART, TABLES, UNIFORM_RECIPE, Recipe

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

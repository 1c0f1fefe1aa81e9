"""The forms that a conversion's options request for floats, checked."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..errors import ConfigError
from ..formats.record import Quants
from ..quant import DEFAULT, MODES, SUPPORTED, Mode, Quant
from ..rounding.methods import FIT, METHODS


@dataclass(frozen=True)
class Wanted:
    """Args:
    resident: form of matrices other than routed experts.
    experts: forms of the experts' gate, up and down; experts without a gate have the last two.
    requantize: whether codes are quantised again where a layer's experts are stored in several forms.
    named: whether a form of its own is wanted of experts; then `requantize` is for all their codes in another.
    options: what was asked for, by the names of `convert`'s arguments: what the bytes depend on.
    keeps_floats: whether resident matrices that come as floats stay floats.
    rounding: the method by which floats become codes.
    """

    resident: Quant
    experts: Quants
    requantize: bool = False
    named: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)
    keeps_floats: bool = False
    rounding: str = FIT

    @classmethod
    def of(
        cls,
        q_bits: int | None = None,
        q_group_size: int | None = None,
        q_mode: str = "affine",
        expert_bits: int | None = None,
        down_bits: int | None = None,
        requantize: bool = False,
        rounding: str = FIT,
    ) -> "Wanted":
        """Arguments as for `convert`.

        Raises:
            ConfigError: a form that is not computed, or a method of rounding that is not known.
        """
        if rounding not in METHODS:
            raise ConfigError(f"rounding {rounding!r} is not known; supported: {', '.join(METHODS)}")
        usual_sizes: Mode | Quant = MODES.get(q_mode, DEFAULT)
        bits = usual_sizes.bits if q_bits is None else q_bits
        group_size = usual_sizes.group_size if q_group_size is None else q_group_size
        usual = _checked(Quant(bits, group_size, q_mode))
        experts = _with_bits(usual, expert_bits)
        down = _with_bits(experts, down_bits)
        named = expert_bits is not None or down_bits is not None
        forms = {"q_bits": q_bits, "q_group_size": q_group_size, "expert_bits": expert_bits, "down_bits": down_bits}
        options: dict[str, Any] = {name: value for name, value in forms.items() if value is not None}
        if q_mode != DEFAULT.mode:
            options["q_mode"] = q_mode
        options["requantize"] = requantize
        return cls(usual, (experts, experts, down), requantize, named, options, rounding=rounding)

    def keeps(self, stored: Quant, form: Quant) -> bool:
        """Whether an expert's codes in the form `stored` are copied, though `form` is wanted of floats."""
        return stored == form or not (self.requantize and self.named)


def _with_bits(quant: Quant, bits: int | None) -> Quant:
    """The form with other bits: in mode affine, as the other modes have only one width."""
    if bits is None or bits == quant.bits:
        return quant
    return _checked(Quant(bits, quant.group_size if quant.mode == "affine" else DEFAULT.group_size))


def _checked(quant: Quant) -> Quant:
    if not quant.is_known:
        raise ConfigError(f"{quant.mode}: {quant} is not computed; supported: {SUPPORTED}")
    return quant

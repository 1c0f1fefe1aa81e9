"""What families share of reading a `config.json`: typed access to its fields, and those that most models have.

Each field is read as required, optional, or must-equal, and within a range; every failure names the field. Two
generations of spelling are accepted: `rope_theta` + `rope_scaling` or `rope_parameters`, `num_experts`,
`num_local_experts` or `n_routed_experts`.
"""

import math
import reprlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import ConfigError
from ..kinds import Yarn

LARGEST = 2**31 - 1  # MLX counts an array's axes in 32 bits
MOST_LAYERS = 1024  # far beyond any model; what is made for each of them stays small


_MISSING = object()


def out_of_range(name: str, value: Any, wanted: str) -> ConfigError:
    return ConfigError(f"config field {name!r} is {reprlib.repr(value)}; expected {wanted}")


class Fields:
    """Typed access to a config; every failure names the field."""

    def __init__(self, config: Mapping[str, Any]):
        self.config = config

    def _get(self, names: str, kind: type, default: Any) -> tuple[str, Any]:
        """(name, value) of the first of `names` ("a|b") that is present and not null."""
        for name in names.split("|"):
            value = self.config.get(name)
            if value is None:
                continue
            if kind is float and type(value) is int:
                value = float(value) if abs(value) < 2**1023 else math.inf
            if not isinstance(value, kind) or (kind in (int, float) and isinstance(value, bool)):
                raise out_of_range(name, value, kind.__name__)
            if isinstance(value, float) and not math.isfinite(value):
                raise out_of_range(name, value, "a finite number")
            return name, value
        if default is _MISSING:
            raise ConfigError(f"config field {names.split('|')[0]!r} is missing")
        return names, default

    def required(self, names: str, kind: type) -> Any:
        return self._get(names, kind, _MISSING)[1]

    def optional(self, names: str, kind: type, default: Any) -> Any:
        return self._get(names, kind, default)[1]

    def count(self, names: str, default: Any = _MISSING, least: int = 1, most: int = LARGEST) -> Any:
        """An integer from `least` to `most`, or the default."""
        name, value = self._get(names, int, default)
        if value is not default and not least <= value <= most:
            raise out_of_range(name, value, f"an integer from {least} to {most}")
        return value

    def number(self, names: str, default: Any = _MISSING, *, least: float, most: float) -> Any:
        """A float from `least` to `most`, or the default."""
        name, value = self._get(names, float, default)
        if value is not default and not least <= value <= most:
            raise out_of_range(name, value, f"a number from {least:g} to {most:g}")
        return value

    def must_equal(self, name: str, wanted: Any) -> None:
        value = self.config.get(name)
        if value is not None and value != wanted:
            raise ConfigError(f"config field {name!r} is {reprlib.repr(value)}; only {wanted!r} is implemented")


def common(read: Fields) -> dict[str, Any]:
    """Fields that every family so far has, and those that must have the one value that is implemented."""
    for name, wanted in (
        ("hidden_act", "silu"),
        ("attention_bias", False),
        ("tie_word_embeddings", False),
        ("use_sliding_window", False),
    ):
        read.must_equal(name, wanted)
    return {
        "vocab_size": read.count("vocab_size"),
        "hidden_size": read.count("hidden_size"),
        "num_hidden_layers": layer_count(read),
        "num_attention_heads": read.count("num_attention_heads"),
        "num_key_value_heads": read.count("num_key_value_heads"),
        "rms_norm_eps": read.number("rms_norm_eps", 1e-6, least=1e-30, most=1.0),
        "max_position_embeddings": read.count("max_position_embeddings"),
        "num_experts": read.count("num_experts|num_local_experts|n_routed_experts"),
        "num_experts_per_tok": read.count("num_experts_per_tok"),
        "moe_intermediate_size": read.count("moe_intermediate_size"),
        **rope(read),
    }


def layer_count(read: Fields) -> int:
    return read.count("num_hidden_layers", most=MOST_LAYERS)


def rope(read: Fields) -> dict[str, Any]:
    """`rope_parameters` of transformers 5, or `rope_theta` + `rope_scaling` of earlier releases."""
    new = read.optional("rope_parameters", Mapping, None)
    inner = Fields(new if new is not None else read.optional("rope_scaling", Mapping, {}))
    outer = inner if new is not None and new.get("rope_theta") is not None else read
    kind = inner.optional("rope_type|type", str, "default")
    if kind not in ("default", "yarn"):
        raise ConfigError(f"config field 'rope_type' is {kind!r}; only 'default' and 'yarn' are implemented")
    rotary = inner.number("partial_rotary_factor", None, least=1e-6, most=1.0)
    values: dict[str, Any] = {"rope_theta": outer.number("rope_theta", least=2.0, most=1e30)}
    if rotary is None:
        rotary = read.number("partial_rotary_factor", None, least=1e-6, most=1.0)
    if rotary is not None:
        values["partial_rotary_factor"] = rotary
    if kind == "yarn":
        values["rope_scaling"] = Yarn(
            factor=inner.number("factor", least=1.0, most=1e6),
            original_max_position_embeddings=inner.count("original_max_position_embeddings"),
            beta_fast=inner.number("beta_fast", 32.0, least=1e-6, most=1e6),
            beta_slow=inner.number("beta_slow", 1.0, least=1e-6, most=1e6),
            mscale=inner.number("mscale", None, least=0.0, most=1e3),
            mscale_all_dim=inner.number("mscale_all_dim", None, least=0.0, most=1e3),
            attention_factor=inner.number("attention_factor", None, least=1e-6, most=1e3),
            truncate=inner.optional("truncate", bool, True),
        )
    return values


def head_dim(read: Fields) -> int:
    return read.count("head_dim", None) or read.count("hidden_size") // read.count("num_attention_heads")


def sparse_layers(read: Fields) -> tuple[int, ...]:
    step = read.count("decoder_sparse_step", 1)
    dense = read.optional("mlp_only_layers", list, [])
    return tuple(i for i in range(layer_count(read)) if i not in dense and (i + 1) % step == 0)


def dense_width(read: Fields, moe_layers: tuple[int, ...]) -> int:
    return 0 if len(moe_layers) == layer_count(read) else read.count("intermediate_size")


@dataclass(frozen=True)
class Family:
    """One value of `model_type`.

    Args:
        read: the config's text part -> fields of `ModelArgs`, by name.
        zero_centred: norms that Hugging Face's checkpoints store as weight - 1, by the end of their module path.
    """

    read: Callable[[Fields], dict[str, Any]]
    zero_centred: tuple[str, ...] = ()

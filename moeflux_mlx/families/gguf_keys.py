"""Typed access to the keys of a GGUF's architecture, of which each is read or refused: a key that nobody reads would
silently leave out a scale, a window, a cap or a rotation. Lists say which a family need not read.
"""

from collections.abc import Container, Mapping, Sequence
from typing import TypeVar

import numpy as np

from ..errors import ConfigError, ModelFileError
from ..files import JsonObject, JsonValue
from .fields import MOST_LAYERS

T = TypeVar("T")
MISSING = object()
SLOWED = "rope_freqs.weight"
ROTATING = (SLOWED, "rope_factors_long.weight", "rope_factors_short.weight")  # tensors that change rotations
# What llama.cpp does not need of any architecture that is read here, and why.
UNREAD: Mapping[str, str] = {
    "feed_forward_length": "the shapes of tensors say it",
    "expert_feed_forward_length": "the shapes of tensors say it",
    "expert_shared_feed_forward_length": "the shapes of tensors say it",
    "expert_shared_count": "the shapes of tensors say it",
    "vocab_size": "the rows of the embedding say it",
    "attention.layer_norm_epsilon": "only norms with a mean have it; families with some read it",
    "rope.dimension_sections": "all axes have one position in text",
    "rope.scaling.finetuned": "llama.cpp only prints it, except for granitehybrid, which reads it",
    "tensor_data_layout": "the names and shapes of tensors say it",
}
WINDOWLESS = {"attention.sliding_window": "llama.cpp reads none, and all published models see all positions"}
ENCODERS = ("vision.", "audio.")  # what these keys describe is not read
# Values with which a key says what holds without it.
NEUTRAL: Mapping[str, tuple[JsonValue, ...]] = {
    **dict.fromkeys(("logit_scale", "residual_scale", "embedding_scale", "expert_weights_scale"), (0, 1)),
    **dict.fromkeys(("attention.scale", "attention.clamp_kqv", "attention.max_alibi_bias"), (0,)),
    **dict.fromkeys(("attention.temperature_scale", "attention.shared_kv_layers", "attention.sliding_window"), (0,)),
    **dict.fromkeys(("attn_logit_softcapping", "router_logit_softcapping", "final_logit_softcapping"), (0,)),
    **dict.fromkeys(("swiglu_clamp_exp", "swiglu_clamp_shexp", "n_deepstack_layers"), (0,)),
    **dict.fromkeys(("expert_group_count", "expert_group_used_count", "interleave_moe_layer_step"), (0, 1)),
    **dict.fromkeys(("leading_dense_block_count", "embedding_length_per_layer_input"), (0,)),
    **dict.fromkeys(("rope.scaling.alpha", "rope.scaling.yarn_log_multiplier"), (0,)),
    "expert_gating_func": (0, 1),  # none stated, or softmax, as of all routers whose families do not read it
    "attention.causal": (True,),
    "hidden_activation": ("silu",),
}


def shortened(value: object) -> JsonValue:
    """A float, or each of a list, as short as float32 needs it: 1e-6, not 9.999999974752427e-07."""
    if isinstance(value, list):
        return [shortened(one) for one in value]
    return float(str(np.float32(value))) if isinstance(value, float) else value


def is_needed(key: str, entries: Mapping[str, JsonValue], unread: Container[str]) -> bool:
    """Whether a key that nobody has read says something about the model that must be computed or refused.

    Args:
        key: without the architecture.
        entries: all keys of the architecture, likewise.
        unread: keys that this architecture has besides, but need not be read.
    """
    if key in UNREAD or key in unread or key.startswith(ENCODERS):
        return False
    value = entries[key]
    if key.endswith("_swa") and value == entries.get(
        key.removesuffix("_swa")
    ):  # layers with a window are as the others
        return False
    usual = NEUTRAL.get(key, ())
    return not all(one in usual for one in (value if isinstance(value, list) else [value]))


class Keys:
    """Typed access to the metadata of one architecture; every failure names the key.

    Attributes:
        architecture: llama.cpp's name of the family, which begins the keys.
        tensors: names of all tensors.
    """

    def __init__(self, entries: JsonObject, tensors: Container[str] = (), slowed: Sequence[float] = ()):
        """`slowed`: the values of the tensor `rope_freqs.weight`."""
        self._entries, self.tensors, self._slowed = entries, tensors, slowed
        self._read: set[str] = set()
        self.architecture = self.anywhere("general.architecture", str)

    def _value(self, key: str) -> JsonValue:
        """The value of a whole key, which counts as read."""
        self._read.add(key)
        return self._entries.get(key)

    def need_not_read(self, *keys: str) -> None:
        """Says that these keys of the architecture mean nothing beside others that were read."""
        self._read.update(f"{self.architecture}.{key}" for key in keys)

    def check_all_read(self, unread: Container[str]) -> None:
        """Checks that nothing in the file that changes numbers is left out.

        Args:
            unread: keys of the architecture that need not be read, besides those of all.

        Raises:
            ConfigError: a key or a tensor that nobody has read does.
        """
        start = f"{self.architecture}."
        own = {key.removeprefix(start): value for key, value in self._entries.items() if key.startswith(start)}
        for key, value in own.items():
            if start + key not in self._read and is_needed(key, own, unread):
                raise ConfigError(
                    f"GGUF metadata {start}{key} is {str(value)[:60]}, which is not implemented for this architecture"
                )
        for name in ROTATING:
            if name in self.tensors and name not in self._read:
                raise ConfigError(f"GGUF tensor {name} is not implemented for the architecture {self.architecture}")

    @property
    def slowed(self) -> Sequence[float]:
        """What the frequency of each rotated pair is divided by; empty: nothing."""
        self._read.add(SLOWED)
        return self._slowed

    def anywhere(self, key: str, kind: type, default: object = MISSING) -> JsonValue:
        """The value of a whole key.

        Raises:
            ModelFileError: it is missing and has no default, or has another type.
        """
        value = self._value(key)
        if value is None and default is not MISSING:
            return default
        if not isinstance(value, kind) or isinstance(value, bool) and kind is not bool:
            what = "is missing" if value is None else f"is {str(value)[:60]!a}; expected {kind.__name__}"
            raise ModelFileError(f"GGUF metadata {key!a} {what}")
        return value

    def count(self, key: str, default: object = MISSING) -> JsonValue:
        """An integer of this architecture."""
        return self.anywhere(f"{self.architecture}.{key}", int, default)

    def number(self, key: str, default: object = MISSING) -> JsonValue:
        """A float of this architecture."""
        return shortened(self.anywhere(f"{self.architecture}.{key}", float, default))

    def flag(self, key: str, default: object = MISSING) -> JsonValue:
        """A truth value of this architecture."""
        return self.anywhere(f"{self.architecture}.{key}", bool, default)

    def of_layers(self, key: str, layers: int) -> int:
        """An integer that may be given for each layer, where it must be the same in all of them."""
        value = self._value(f"{self.architecture}.{key}")
        if isinstance(value, list):
            if len(value) < layers or len(set(value[:layers])) != 1 or type(value[0]) is not int:
                raise ConfigError(f"GGUF metadata {self.architecture}.{key} differs by layer, which is not implemented")
            return int(value[0])
        return int(self.count(key))

    def each_layer(self, key: str, kind: type[T], default: JsonValue = MISSING) -> list[T]:
        """The values of a key that has one for each layer.

        Raises:
            ConfigError: it has too few, or some of another type.
        """
        values = self.anywhere(f"{self.architecture}.{key}", list, default)
        if values is default:
            return list(values)
        if self.layers > len(values) or any(type(value) is not kind for value in values[: self.layers]):
            raise ConfigError(f"GGUF metadata {self.architecture}.{key} has no {kind.__name__} for each layer")
        return list(values[: self.layers])

    def windows(self, every: int, full_first: bool = False) -> list[bool]:
        """Which layers have a window, by a list, or by a period, of which one layer has none: `full_first`, else its
        last. `every`: the period where the key is missing.

        Raises:
            ConfigError: the list or the period is none.
        """
        key = "attention.sliding_window_pattern"
        if isinstance(self._value(f"{self.architecture}.{key}"), list):
            values = self.anywhere(f"{self.architecture}.{key}", list)[: self.layers]
            if len(values) == self.layers and all(type(one) in (bool, int) and one in (0, 1) for one in values):
                return list(map(bool, values))
            raise ConfigError(f"GGUF metadata {self.architecture}.{key} has no 0 or 1 for each of {self.layers} layers")
        period = self.count(key, every)
        if period < 1:
            raise ConfigError(f"GGUF metadata {self.architecture}.{key} is {period}; expected 1 or more")
        return [layer % period != (0 if full_first else period - 1) for layer in range(self.layers)]

    def of_each(self, key: str) -> list[int]:
        """An integer of each layer, which may be given once for all of them."""
        value = self._value(f"{self.architecture}.{key}")
        return self.each_layer(key, int) if isinstance(value, list) else [self.count(key)] * self.layers

    def of_each_kind(self, key: str, windows: Sequence[bool]) -> tuple[int, int]:
        """An integer of the layers without a window, and that of those with one; of a kind that has no layers, the
        first layer's.

        Args:
            windows: which layers have a window.

        Raises:
            ConfigError: layers of one kind differ.
        """
        counts = self.of_each(key)
        of_kind = dict(zip(windows, counts, strict=True))
        if len(set(zip(windows, counts, strict=True))) > len(of_kind):
            raise ConfigError(f"GGUF metadata {self.architecture}.{key} differs between layers of one kind")
        return of_kind.get(False, counts[0]), of_kind.get(True, counts[0])

    def each_number(self, key: str) -> list[float] | None:
        """The floats of a key that has one for each layer; None: it is missing."""
        values = self.each_layer(key, float, [])
        return [shortened(one) for one in values] or None

    def limit(self, *keys: str) -> float | None:
        """The number that the first of these keys has for all layers; None: it is missing.

        Raises:
            ConfigError: layers differ, or another of the keys has another number.
        """
        numbers = {one for key in keys for one in self.each_number(key) or ()}
        if len(numbers) > 1:
            raise ConfigError(
                f"GGUF metadata {self.architecture}.{keys[0]} has {len(numbers)} numbers, which is not implemented"
            )
        return next(iter(numbers), None)

    def heads_or_none(self) -> list[int]:
        """Key heads of each layer: of those with attention all the same, of the others 0.

        Raises:
            ConfigError: layers with attention differ.
        """
        counts = self.each_layer("attention.head_count_kv", int)
        if len({count for count in counts if count}) > 1:
            raise ConfigError(
                f"GGUF metadata {self.architecture}.attention.head_count_kv differs between layers with attention"
            )
        return counts

    def quotient(self, key: str, parts: int) -> int:
        """An integer divided into equal parts.

        Raises:
            ConfigError: it cannot be.
        """
        whole = self.count(key)
        if parts < 1 or whole % parts:
            raise ConfigError(f"GGUF metadata {self.architecture}.{key} is {whole}, which {parts} parts do not divide")
        return int(whole // parts)

    def must_have(self, **wanted: object) -> None:
        """Raises ConfigError: one of these keys has another value than it has here; it may be missing."""
        for key, value in wanted.items():
            self.must_equal(key, value)

    def must_equal(self, key: str, wanted: object) -> None:
        """Raises ConfigError: the key has another value."""
        value = shortened(self._value(f"{self.architecture}.{key}"))
        if value is not None and value != wanted:
            raise ConfigError(
                f"GGUF metadata {self.architecture}.{key} is {str(value)[:60]}; only {wanted} is implemented"
            )

    @property
    def layers(self) -> int:
        """Layers of the model, without those of draft heads, which are counted as blocks too.

        Raises:
            ConfigError: there are none, or more than any model has.
        """
        blocks, heads = self.count("block_count"), self.count("nextn_predict_layers", 0)
        if not (0 <= heads < blocks and blocks - heads <= MOST_LAYERS):
            raise ConfigError(
                f"GGUF metadata {self.architecture}.block_count is {blocks}, with {heads} blocks of draft heads; "
                f"expected 1 to {MOST_LAYERS} layers"
            )
        return int(blocks - heads)

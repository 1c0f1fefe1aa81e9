"""The common part of reading a `config.json`: typed access to its fields, and readers of the usual ones.

Each field is read as required, optional, or must-equal, and within a range; every failure names the field. Two
generations of spelling are accepted: `rope_theta` + `rope_scaling` or `rope_parameters`, `num_experts`,
`num_local_experts` or `n_routed_experts`.
"""

import math
import reprlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np

from ..errors import ConfigError
from ..files import JsonDict, JsonObject, JsonValue
from ..kinds import Dense, Experts, LayerSpec, Llama3, Mixer, Residual, Rotation, Router, SharedExpert, Yarn
from ..kinds.limits import LARGEST, WIDEST_HEAD
from ..mixers.grouped.spec import GroupedQuery

FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"  # in `layer_types`
MOST_LAYERS = 1024  # far beyond any model; what is made for each of them stays small
PLAIN = Residual()


# The value of a field of the part that a function makes, from the family: its type is the field's.
SpecValue: TypeAlias = Any
_MISSING = object()


def out_of_range(name: str, value: object, wanted: str) -> ConfigError:
    return ConfigError(f"config field {name!r} is {reprlib.repr(value)}; expected {wanted}")


class Fields:
    """Typed access to a config; every failure names the field."""

    def __init__(self, config: JsonObject):
        self.config = config

    def _get(self, names: str, kind: type, default: object) -> tuple[str, JsonValue]:
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

    def with_usual(self, usual: JsonObject) -> "Fields":
        """The fields, with the values of `usual` where one is missing or null."""
        return Fields({**usual, **{name: value for name, value in self.config.items() if value is not None}})

    def required(self, names: str, kind: type) -> JsonValue:
        return self._get(names, kind, _MISSING)[1]

    def optional(self, names: str, kind: type, default: object) -> JsonValue:
        return self._get(names, kind, default)[1]

    def count(self, names: str, default: object = _MISSING, least: int = 1, most: int = LARGEST) -> JsonValue:
        """An integer from `least` to `most`, or the default."""
        name, value = self._get(names, int, default)
        if value is not default and not least <= value <= most:
            raise out_of_range(name, value, f"an integer from {least} to {most}")
        return value

    def number(self, names: str, default: object = _MISSING, *, least: float, most: float) -> JsonValue:
        """A float from `least` to `most`, or the default."""
        name, value = self._get(names, float, default)
        if value is not default and not least <= value <= most:
            raise out_of_range(name, value, f"a number from {least:g} to {most:g}")
        return value

    def must_have(self, **wanted: object) -> None:
        """Raises ConfigError: one of these fields has another value than it has here; it may be missing."""
        for name, value in wanted.items():
            self.must_equal(name, value)

    def must_equal(self, name: str, wanted: object) -> None:
        value = self.config.get(name)
        if value is not None and value != wanted:
            raise ConfigError(f"config field {name!r} is {reprlib.repr(value)}; only {wanted!r} is implemented")


# Kimi's names of fields, which transformers writes for Ling too, and the usual ones.
OF_KIMI = {
    "max_position_embeddings": "model_max_length",
    "n_group": "num_expert_group",
    "norm_topk_prob": "moe_renormalize",
    "num_experts_per_tok": "num_experts_per_token",
}


def as_of_kimi(read: Fields) -> Fields:
    """The fields with the usual names beside Kimi's."""
    return Fields({**{name: read.config.get(theirs) for name, theirs in OF_KIMI.items()}, **read.config})


def common(read: Fields, eps: float = 1e-6, windows: bool = False) -> JsonDict:
    """The fields of `ModelArgs` that all families have, except `layers`; refuses values that no family implements.

    `eps`: that of norms if the field is missing. `windows`: what a file may say in `use_sliding_window`.
    """
    read.must_have(hidden_act="silu", tie_word_embeddings=False, use_sliding_window=windows)
    return sizes(read, eps)


def sizes(read: Fields, eps: float = 1e-6) -> JsonDict:
    """The fields of `ModelArgs` that are numbers, by their usual names; `eps` as in `common`."""
    return {
        "vocab_size": read.count("vocab_size"),
        "hidden_size": read.count("hidden_size"),
        "rms_norm_eps": read.number("rms_norm_eps|layernorm_epsilon", eps, least=1e-30, most=1.0),
        "max_position_embeddings": read.count("max_position_embeddings"),
    }


def layer_count(read: Fields) -> int:
    return read.count("num_hidden_layers", most=MOST_LAYERS)


ROPE_TYPES = ("default", "yarn", "llama3", "proportional", "dynamic")


def rotation(read: Fields, width: int, share: float | None = 1.0, interleaved: bool = False) -> Rotation:
    """The rotation of heads of `width` values. The share `partial_rotary_factor` of them is rotated, or `share` if that
    field is missing; if `share` is None, all of them are. For the type "proportional" it is a share of the pairs, which
    have the frequencies of all. The type "dynamic" is read where an `alpha` fixes it. Reads `rope_parameters` of
    transformers 5, or `rope_theta` and `rope_scaling` of earlier releases.
    """
    new = read.optional("rope_parameters", Mapping, None)
    inner = Fields(new if new is not None else read.optional("rope_scaling", Mapping, {}))
    outer = inner if new is not None and new.get("rope_theta") is not None else read
    kind = inner.optional("rope_type|type", str, "default")
    if kind not in ROPE_TYPES:
        raise ConfigError(
            f"config field 'rope_type' is {kind!r}; only {', '.join(map(repr, ROPE_TYPES))} are implemented"
        )
    theta = outer.number("rope_theta", least=2.0, most=1e30)
    if share is not None:
        share = inner.number("partial_rotary_factor", None, least=1e-6, most=1.0) or read.number(
            "partial_rotary_factor", share, least=1e-6, most=1.0
        )
        if kind == "proportional":
            inner.must_equal("factor", 1.0)
            return Rotation(width, theta, pairs=int(share * width // 2))
        width = int(width * share)
    if kind == "dynamic":
        inner.must_equal("factor", 1.0)
        theta *= inner.number("alpha", least=1.0, most=1e6) ** (width / max(width - 2, 1))
    yarn, llama3 = _yarn(inner) if kind == "yarn" else None, _llama3(inner) if kind == "llama3" else None
    return Rotation(width, theta, yarn, interleaved, llama3)


def by_axes(read: Fields, mixer: GroupedQuery, usual: Sequence[int], alternating: bool) -> GroupedQuery:
    """`mixer`, whose rotary pairs are divided among three axes as `mrope_section` counts them, or as is `usual`.

    `alternating`: the axes take turns, text, row and column, and what rows and columns have no turn left for is the
    text's; else the sections lie one behind the other, and begin again with the text where there are more than three.
    """
    if mixer.rotation is None or mixer.head_dim > WIDEST_HEAD:  # refused later
        return mixer
    inner = Fields(read.optional("rope_parameters|rope_scaling", Mapping, {}))
    counts, pairs = inner.optional("mrope_section", list, list(usual)), mixer.rotation.dims // 2
    if not all(type(n) is int and 0 <= n <= LARGEST for n in counts) or (alternating and len(counts) != 3):
        raise out_of_range("mrope_section", counts, "counts of pairs, of the text, rows and columns")
    if alternating:
        axes = tuple(i % 3 if i < 3 * counts[i % 3] else 0 for i in range(pairs))
    else:
        ends = np.cumsum(counts)
        if not len(ends) or ends[-1] != pairs:
            raise out_of_range("mrope_section", counts, f"counts of pairs that make {pairs} together")
        axes = tuple(int(np.searchsorted(ends, i, side="right")) % 3 for i in range(pairs))
    return replace(mixer, rotation=replace(mixer.rotation, axes=axes))


def of_kind(read: Fields, kind: str) -> Fields:
    """The fields for layers of one kind, for which transformers 5 has `rope_parameters` of their own."""
    rope = read.optional("rope_parameters", Mapping, {})
    return Fields({**read.config, "rope_parameters": rope[kind]}) if isinstance(rope.get(kind), Mapping) else read


def _llama3(read: Fields) -> Llama3:
    low = read.number("low_freq_factor", least=1e-6, most=1e6)
    return Llama3(
        factor=read.number("factor", least=1.0, most=1e6),
        low_freq_factor=low,
        high_freq_factor=read.number("high_freq_factor", least=low, most=1e9),
        original_max_position_embeddings=read.count("original_max_position_embeddings"),
    )


def _yarn(read: Fields) -> Yarn:
    return Yarn(
        factor=read.number("factor", least=1.0, most=1e6),
        original_max_position_embeddings=read.count("original_max_position_embeddings"),
        beta_fast=read.number("beta_fast", 32.0, least=1e-6, most=1e6),
        beta_slow=read.number("beta_slow", 1.0, least=1e-6, most=1e6),
        mscale=read.number("mscale", None, least=0.0, most=1e3),
        mscale_all_dim=read.number("mscale_all_dim", None, least=0.0, most=1e3),
        attention_factor=read.number("attention_factor", None, least=1e-6, most=1e3),
        truncate=read.optional("truncate", bool, True),
    )


def grouped_query(read: Fields, share: float = 1.0, **switches: SpecValue) -> GroupedQuery:
    """Attention with the usual names of its sizes; `share` as in `rotation`, `switches` from the family.

    A family whose `attention_bias` can be true reads it, and passes `bias`.
    """
    if "bias" not in switches:
        read.must_equal("attention_bias", False)
    heads = read.count("num_attention_heads")
    width = read.count("head_dim", None) or read.count("hidden_size") // heads
    turned = rotation(read, width, share)
    return GroupedQuery(heads, read.count("num_key_value_heads"), width, turned, **switches)


WIDTHS = "moe_intermediate_size|expert_hidden_dim"  # names of a routed expert's width


def experts(read: Fields, shared: SharedExpert | None = None, width: str = WIDTHS, **rule: SpecValue) -> Experts:
    """Routed experts with the usual names of their sizes; `rule` has further fields of the router."""
    count, top_k = read.count("num_experts|num_local_experts|n_routed_experts"), read.count("num_experts_per_tok")
    return Experts(Router(count, top_k, **rule), read.count(width), shared)


def shared_expert(read: Fields) -> SharedExpert | None:
    """A shared expert without a gate, as wide as a number of routed ones."""
    width = read.count(WIDTHS) * read.count("n_shared_experts|num_shared_experts", least=0)
    return SharedExpert(width) if width else None


def grouped_experts(read: Fields, **rule: SpecValue) -> Experts:
    """Routed experts in groups with a shared one, in DeepSeek's spelling; `rule` is what the router has besides."""
    return experts(
        read,
        shared_expert(read),
        groups=read.count("n_group", 1),
        kept_groups=read.count("topk_group", 1),
        normalise=read.optional("norm_topk_prob", bool, True),
        scale=scale(read, "routed_scaling_factor"),
        **rule,
    )


def scale(read: Fields, name: str) -> float:
    """The factor of the routing weights."""
    return read.number(name, least=1e-6, most=1e6)


def noaux_experts(read: Fields) -> Experts:
    """`grouped_experts` behind DeepSeek-V3's router: sigmoids, and a correction bias."""
    read.must_have(topk_method="noaux_tc", scoring_func="sigmoid")
    return grouped_experts(read, score="sigmoid", correction_bias=True)


def sparse_layers(read: Fields) -> tuple[int, ...]:
    """The layers with experts, by `decoder_sparse_step` and `mlp_only_layers`."""
    step = read.count("decoder_sparse_step", 1)
    dense = read.optional("mlp_only_layers", list, [])
    return tuple(i for i in range(layer_count(read)) if i not in dense and (i + 1) % step == 0)


def layer_kinds(read: Fields, name: str, known: Sequence[JsonValue]) -> list[JsonValue] | None:
    """A list that has one of the `known` values for each layer, if there is one.

    Raises:
        ConfigError: it has another length, or another value.
    """
    kinds, count = read.optional(name, list, None), layer_count(read)
    if kinds is None:
        return None
    if len(kinds) != count:
        raise ConfigError(f"config field {name!r} has {len(kinds)} entries for {count} layers")
    unknown = [kind for kind in kinds if kind not in known]
    if unknown:
        raise ConfigError(f"config field {name!r} has {reprlib.repr(unknown)}; only {', '.join(map(repr, known))}")
    return kinds


def one_full_in(every: int, count: int) -> list[str]:
    """Kinds of layers of which the last of each `every` sees all positions."""
    return [SLIDING if (i + 1) % every else FULL for i in range(count)]


def rotating_in_windows(read: Fields, usual: Sequence[str], **switches: SpecValue) -> list[GroupedQuery]:
    """Attention whose layers with a window rotate queries and keys, while the others see all positions and encode none.

    Reads `layer_types`; without this field the layers are of the kinds `usual`. `switches` as in `grouped_query`.
    """
    turned = grouped_query(read, **switches)
    parts = {FULL: replace(turned, rotation=None), SLIDING: replace(turned, window=read.count("sliding_window"))}
    return [parts[kind] for kind in layer_kinds(read, "layer_types", tuple(parts)) or usual]


def after_dense_layers(read: Fields, flags: str | None = None) -> Sequence[int]:
    """The layers with experts, by `mlp_layer_types` of transformers 5 or `first_k_dense_replace`.

    `flags`: a field that decides where it is there, a list that has a 1 for each of them and a 0 for each other.
    """
    by_layer = layer_kinds(read, flags, (0, 1)) if flags else None
    if by_layer is not None:
        return [i for i, flag in enumerate(by_layer) if flag]
    kinds, count = layer_kinds(read, "mlp_layer_types", ("dense", "sparse")), layer_count(read)
    if kinds is not None:
        return [i for i, kind in enumerate(kinds) if kind == "sparse"]
    return range(read.count("first_k_dense_replace", least=0, most=count), count)


def layers(
    read: Fields, mixers: Sequence[Mixer], moe: Experts, moe_layers: Sequence[int], residual: Residual = PLAIN
) -> tuple[LayerSpec, ...]:
    """One layer for each mixer: those of `moe_layers` have experts, the others an MLP of `intermediate_size`."""
    count, sparse = len(mixers), frozenset(moe_layers)
    dense = None if len(sparse) == count else Dense(read.count("intermediate_size"))
    parts = (moe if i in sparse else dense or moe for i in range(count))
    return tuple(LayerSpec(mixer, part, residual) for mixer, part in zip(mixers, parts, strict=True))


# {module path that a checkpoint has: ((the model's module path, its rows), ...)} of one layer.
FusedRows = dict[str, tuple[tuple[str, np.ndarray], ...]]


@dataclass(frozen=True)
class HeadNames:
    """The names of a draft head's tensors in a family's checkpoints, and the input of the head.

    Args:
        renames: beginnings of its tensors' names and the head's, as (theirs, ours); "{layers}" stands for the number of
            the model's layers; None: a copy of a matrix that the model has.
        takes_normed: whether it takes hidden states behind the model's last norm, else those before.
    """

    renames: tuple[tuple[str, str | None], ...]
    takes_normed: bool = True


# Of DeepSeek-V3 and GLM: one layer more, with its own copies of embedding and lm_head.
NEXT_LAYER = HeadNames(
    (
        *(("model.layers.{layers}.embed_tokens.", None), ("model.layers.{layers}.shared_head.head.", None)),
        *(("model.layers.{layers}.enorm.", "enorm."), ("model.layers.{layers}.hnorm.", "hnorm.")),
        *(("model.layers.{layers}.eh_proj.", "fc."), ("model.layers.{layers}.shared_head.norm.", "model.norm.")),
        ("model.layers.{layers}.", "model.layers.0."),
    )
)


@dataclass(frozen=True)
class Family:
    """One value of `model_type`: how to read its config.json, and what its checkpoints name and store differently.

    Args:
        read: the config's text part -> fields of `ModelArgs`, by name.
        zero_centred: norms that Hugging Face's checkpoints store as weight - 1, by the end of their module path.
        renames: parts of tensor names that stand for others in the model, as (theirs, the model's): "^..." only at the
            beginning, "...$" only at the end.
        numbered: layers -> renames applied before these, if checkpoints count layers differently.
        fused_rows: (layer, its number, shards) -> matrices that a checkpoint may store as one, which is made of so many
            parts of equal length; {} if it cannot be. Convolutions may be stored so too.
        grouped: matrices that a checkpoint may store in groups of their rows, [groups, rows, columns], by the end of
            their module path.
        either_centred: MLX conversions may have left the norms of `zero_centred` as they were; their values tell.
        longer: vectors and matrices of which a checkpoint may store more values or rows than the model has, which are
            the first of them, by the end of their names.
        in_rows: vectors that a checkpoint may store as several rows, by the end of their names.
        copies: layers -> {name: the names of parameters that have this tensor}, where one tensor is for several.
        interleaved_experts: rows of gate and up alternate where a checkpoint stores them as one, gate's first.
        head: of the family's draft heads; None: none is known.
    """

    read: Callable[[Fields], JsonDict]
    zero_centred: tuple[str, ...] = ()
    renames: tuple[tuple[str, str], ...] = ()
    fused_rows: Callable[[LayerSpec, int, int], FusedRows] = lambda spec, layer, shards: {}
    grouped: tuple[str, ...] = ()
    longer: tuple[str, ...] = ()
    in_rows: tuple[str, ...] = ()
    interleaved_experts: bool = False
    head: HeadNames | None = None
    either_centred: bool = False
    numbered: Callable[[Sequence[LayerSpec]], Sequence[tuple[str, str]]] = lambda layers: ()
    copies: Callable[[Sequence[LayerSpec]], Mapping[str, Sequence[str]]] = lambda layers: {}

    def renames_of(self, layers: Sequence[LayerSpec]) -> Sequence[tuple[str, str]]:
        """All renames for a model of these layers."""
        return *self.numbered(layers), *self.renames

"""What every family's reader of GGUF files uses: metadata, names of tensors, and what llama.cpp changes in weights.

A family's table `GGUF` says for each architecture of llama.cpp how its metadata becomes a config.json, which the
family's own reader then checks, and how its tensors are called. Names and keys are those of the `gguf` package
(`gguf/constants.py`); changes are those of llama.cpp's conversion.
"""

import itertools
import math
import re
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np

from ..errors import ConfigError, ModelFileError
from ..files import JsonDict, JsonObject, JsonValue
from .fields import MOST_LAYERS
from .gguf_keys import is_needed
from .gguf_rope import llama3_scaling

T = TypeVar("T")
MISSING = object()
ROPE_TYPES = ("none", "yarn")
SCALING = (
    "factor",
    "original_context_length",
    "yarn_ext_factor",
    "yarn_attn_factor",
    "yarn_beta_fast",
    "yarn_beta_slow",
)
SLOWED = "rope_freqs.weight"
ROTATING = (SLOWED, "rope_factors_long.weight", "rope_factors_short.weight")  # tensors that change rotations
SIGMOID = 2  # a value of `expert_gating_func`


class Metadata:
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

    def anywhere(self, key: str, kind: type, default: JsonValue = MISSING) -> JsonValue:
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

    def count(self, key: str, default: JsonValue = MISSING) -> JsonValue:
        """An integer of this architecture."""
        return self.anywhere(f"{self.architecture}.{key}", int, default)

    def number(self, key: str, default: JsonValue = MISSING) -> JsonValue:
        """A float of this architecture, as short as float32 needs it: 1e-6, not 9.999999974752427e-07."""
        value = self.anywhere(f"{self.architecture}.{key}", float, default)
        return float(str(np.float32(value))) if isinstance(value, float) else value

    def flag(self, key: str, default: JsonValue = MISSING) -> JsonValue:
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

    def must_equal(self, key: str, wanted: object) -> None:
        """Raises ConfigError: the key has another value."""
        value = self._value(f"{self.architecture}.{key}")
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

    def rope_scaling(self) -> JsonDict | None:
        """`rope_scaling` of config.json.

        Raises:
            ConfigError: a type that is not read, or a factor beside another type.
        """
        kind = self.anywhere(f"{self.architecture}.rope.scaling.type", str, None)
        if kind not in (*ROPE_TYPES, None):
            raise ConfigError(
                f"GGUF metadata {self.architecture}.rope.scaling.type is {kind[:60]!a}; only yarn is read"
            )
        if kind == "yarn":
            return self._yarn()
        self.must_equal("rope.scaling.attn_factor", 1)
        if kind is None:  # llama.cpp takes the factor as that of linear scaling then
            for key in ("rope.scaling.factor", "rope.scale_linear"):
                self.must_equal(key, 1)
        self.need_not_read("rope.scale_linear", *(f"rope.scaling.{name}" for name in SCALING))
        return None

    def _yarn(self) -> JsonDict:
        """As `rope_scaling`. Two factors multiply what is rotated: `attn_factor` beside YaRN's own factor, and
        `yarn_attn_factor` in its place (`attention_factor` of config.json)."""
        self.must_equal("rope.scaling.yarn_ext_factor", 1)
        self.need_not_read("rope.scale_linear")  # it is only for files without the factor
        names = ("beta_fast", "beta_slow")
        values = {name: self.number(f"rope.scaling.yarn_{name}", None) for name in names}
        factor, more = self.number("rope.scaling.factor"), self.number("rope.scaling.attn_factor", 1.0)
        values["attention_factor"] = own = self.number("rope.scaling.yarn_attn_factor", None)
        if more != 1:
            usual = 0.1 * math.log(factor) + 1 if factor > 1 else 1.0
            values["attention_factor"] = more * (usual if own is None else own)
        return {
            "type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": self.count("rope.scaling.original_context_length"),
            **{name: value for name, value in values.items() if value is not None},
        }

    def slowed_scaling(self, width: int) -> JsonDict | None:
        """`rope_scaling` of an architecture of which llama.cpp reads what frequencies are divided by.

        Args:
            width: how many values of a head are rotated.

        Raises:
            ConfigError: as `rope_scaling`, or no scaling has this result, or two do.
        """
        plain, slowed = self.rope_scaling(), self.slowed
        if slowed and len(slowed) != width // 2:
            raise ConfigError(f"GGUF tensor {SLOWED} has {len(slowed)} values; the model needs {width // 2}")
        made = llama3_scaling(slowed, self.theta())
        if made and plain:
            raise ConfigError(f"GGUF tensor {SLOWED} beside {self.architecture}.rope.scaling.type is not implemented")
        return made or plain

    def theta(self) -> float:
        """The base of the frequencies."""
        theta: float = self.number("rope.freq_base", 10000.0)
        return theta

    def sections(self, usual: Sequence[int]) -> list[int]:
        """How many pairs each of three axes rotates.

        Raises:
            ConfigError: a fourth axis rotates some, which is 0 in text.
        """
        counts = self.anywhere(f"{self.architecture}.rope.dimension_sections", list, list(usual))
        if any(counts[3:]):
            raise ConfigError(f"GGUF metadata {self.architecture}.rope.dimension_sections has a fourth axis")
        return list(counts[:3])

    def one_full_in(self, every: int) -> None:
        """Raises ConfigError: the last of each `every` layers is not the one that sees all positions."""
        key = f"{self.architecture}.attention.sliding_window_pattern"
        pattern, usual = self._value(key), [(i + 1) % every != 0 for i in range(self.layers)]
        if pattern not in (None, every) and not (isinstance(pattern, list) and pattern[: self.layers] == usual):
            raise ConfigError(f"GGUF metadata {key} is {str(pattern)[:60]}; only {every} is implemented")

    def leading_dense(self) -> int:
        """How many of the first layers have an MLP."""
        return next(layer for layer in itertools.count() if f"blk.{layer}.ffn_gate.weight" not in self.tensors)

    def sizes(self) -> JsonDict:
        """The fields of config.json that all families have."""
        return {
            "num_hidden_layers": self.layers,
            "hidden_size": self.count("embedding_length"),
            "max_position_embeddings": self.count("context_length"),
            "rms_norm_eps": self.number("attention.layer_norm_rms_epsilon"),
            "vocab_size": self.count("vocab_size", None) or len(self.anywhere("tokenizer.ggml.tokens", list, [])),
        }

    def attention(self) -> JsonDict:
        """The fields of attention with heads of one size."""
        heads = self.of_layers("attention.head_count", self.layers)
        width = self.head_width(heads)
        return {
            "num_attention_heads": heads,
            "num_key_value_heads": self.of_layers("attention.head_count_kv", self.layers),
            "head_dim": width,
            "rope_theta": self.theta(),
            "rope_scaling": self.rope_scaling(),
            **self.rotated(width),
        }

    def head_width(self, heads: int) -> int:
        """Values of a head of queries, of keys and of values."""
        width = self.count("attention.key_length", None) or self.count("embedding_length") // max(heads, 1)
        self.must_equal("attention.value_length", width)
        return int(width)

    def rotated(self, width: int) -> JsonDict:
        """`partial_rotary_factor`, unless all values of a head are rotated."""
        count = self.count("rope.dimension_count", width)
        return {} if count == width else {"partial_rotary_factor": share_of(count, width)}

    def share_rotated(self) -> float:
        """The share of a head's values that are rotated."""
        width = self.count("attention.key_length")
        return share_of(self.count("rope.dimension_count", width), width)

    def noaux(self) -> JsonDict:
        """The fields of DeepSeek-V3's router and shared expert."""
        self.must_equal("expert_gating_func", SIGMOID)
        return {
            **self.experts(),
            "intermediate_size": self.count("feed_forward_length", None),
            "first_k_dense_replace": self.count("leading_dense_block_count", 0),
            "n_shared_experts": self.count("expert_shared_count", 0),
            "n_group": self.count("expert_group_count", 1),
            "topk_group": self.count("expert_group_used_count", 1),
            "routed_scaling_factor": self.number("expert_weights_scale", 1.0),
            "norm_topk_prob": self.flag("expert_weights_norm", False),
        }

    def experts(self) -> JsonDict:
        """The fields of routed experts."""
        return {**self.choice(), "moe_intermediate_size": self.count("expert_feed_forward_length")}

    def choice(self) -> JsonDict:
        """The fields of a router."""
        return {"num_experts": self.count("expert_count"), "num_experts_per_tok": self.count("expert_used_count")}

    def tied(self) -> JsonDict:
        """Whether embeddings make the logits too: then there is no matrix of their own."""
        return {"tie_word_embeddings": "output.weight" not in self.tensors}


def share_of(part: int, whole: int) -> float:
    """The share of which `whole` makes `part` again when the product is cut off."""
    share = part / max(whole, 1)
    return share if int(whole * share) == part else math.nextafter(share, math.inf)


@dataclass(frozen=True)
class Change:
    """What brings a stored tensor to the model's form.

    Args:
        shape: the logical one; None: the stored one.
        rows: which stored row each row is; None: all in order.
        columns: which stored column each column is.
        values: from stored values to the model's.
    """

    shape: tuple[int, ...] | None = None
    rows: np.ndarray | None = None
    columns: np.ndarray | None = None
    values: Callable[[np.ndarray], np.ndarray] | None = None


def neighbours_apart(heads: int, rows: int) -> Change | None:
    """Of rows that llama.cpp orders so that the two of a rotated pair are neighbours, those of a head's first halves
    and then those of the second ones (`LlamaModel.permute`).

    None: the rows are not those of so many heads; the model, which needs others, refuses their number.
    """
    if heads < 1 or rows % (2 * heads):
        return None
    stored = np.arange(rows).reshape(heads, -1, 2)
    return Change(rows=stored.swapaxes(1, 2).reshape(-1))


GgufConfig = JsonDict
Changes = Callable[[GgufConfig, str, tuple[int, ...]], Change | None]


@dataclass(frozen=True)
class GgufFamily:
    """One architecture of llama.cpp.

    Args:
        reader: its metadata -> config.json of the family.
        names: beginnings of tensors' names behind "blk.N.", and what they are behind "model.layers.N.".
        change: (config, name behind "model.layers.N.", stored shape) -> what undoes llama.cpp's change; None: nothing.
            A tensor of another shape than the config says is not changed: the model refuses it by its shape. So no
            number of a file decides how large an array is.
        unread: keys that need not be read, and why, besides `gguf_keys.UNREAD`.
    """

    reader: Callable[[Metadata], GgufConfig]
    names: tuple[tuple[str, str], ...]
    change: Changes = lambda config, name, shape: None
    unread: Mapping[str, str] = field(default_factory=dict)

    def config(self, read: Metadata) -> GgufConfig:
        """The family's config.json.

        Raises:
            ConfigError, ModelFileError: something in the metadata is missing, or not implemented.
        """
        config = self.reader(read)
        read.check_all_read(self.unread)
        return config


FUSED, DOWN = "ffn_gate_up_exps.weight", ("ffn_down_exps.weight", "mlp.experts.down_proj")
OUTER = (
    *(("token_embd.", "model.embed_tokens."), ("output_norm.", "model.norm."), ("output.", "lm_head.")),
    ("token_embd_norm.", "model.norm."),  # of LFM2, in spite of the name
)
ATTENTION = (
    *(("attn_norm.", "input_layernorm."), ("attn_output.", "self_attn.o_proj.")),
    *((f"attn_{one}_norm.", f"self_attn.{one}_norm.") for one in "qk"),
    *((f"attn_{one}.", f"self_attn.{one}_proj.") for one in "qkv"),
)
NORM = (("ffn_norm.", "post_attention_layernorm."),)
OTHER_NORM = (("post_attention_norm.", "post_attention_layernorm."),)  # its name in most newer architectures
DENSE = tuple((f"ffn_{one}.", f"mlp.{one}_proj.") for one in ("gate", "up", "down"))
EXPERTS = (
    *((f"ffn_{one}_exps.", f"mlp.switch_mlp.{one}_proj.") for one in ("gate", "up", "down")),
    *((FUSED, "mlp.experts.gate_up_proj"), ("ffn_gate_inp.", "mlp.gate.")),
)
SHARED_EXPERT = (
    *((f"ffn_{one}_shexp.", f"mlp.shared_expert.{one}_proj.") for one in ("gate", "up", "down")),
    *(("ffn_gate_inp_shexp.", "mlp.shared_expert_gate."), ("exp_probs_b.bias", "mlp.e_score_correction_bias")),
)
BLOCK = re.compile(r"blk\.(\d+)\.(.+)")


def renamed_tensor(name: str, family: GgufFamily, tensors: Container[str] = ()) -> tuple[int | None, str]:
    """A tensor's layer, or None, and its name in a checkpoint; unknown names stay as they are.

    Args:
        tensors: all names: where gate and up are fused, down has another name in a checkpoint too.
    """
    block = BLOCK.fullmatch(name)
    if block is None:
        return None, _begun(name, OUTER)
    layer, is_fused = int(block[1]), f"blk.{block[1]}.{FUSED}" in tensors
    return layer, f"model.layers.{layer}.{_begun(block[2], (DOWN, *family.names) if is_fused else family.names)}"


def _begun(name: str, names: tuple[tuple[str, str], ...]) -> str:
    matches = ((theirs, ours) for theirs, ours in names if name.startswith(theirs))
    theirs, ours = next(matches, ("", ""))
    return ours + name.removeprefix(theirs)

"""What every family's reader of GGUF files uses: metadata, names of tensors, and what llama.cpp changes in weights.

A family's table `GGUF` says for each architecture of llama.cpp how its metadata becomes a config.json, which the
family's own reader then checks, and how its tensors are called. Names and keys are those of the `gguf` package
(`gguf/constants.py`); changes are those of llama.cpp's conversion.
"""

import itertools
import re
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from ..errors import ConfigError, ModelFileError
from ..files import JsonDict, JsonObject, JsonValue

T = TypeVar("T")
MISSING = object()
ROPE_TYPES = ("none", "yarn")
SIGMOID = 2  # a value of `expert_gating_func`


class Metadata:
    """Typed access to the metadata of one architecture; every failure names the key.

    Attributes:
        architecture: llama.cpp's name of the family, which begins the keys.
        tensors: names of all tensors.
        slowed: what the frequency of each rotated pair is divided by (`rope_freqs.weight`); none: nothing.
    """

    def __init__(self, entries: JsonObject, tensors: Container[str] = (), slowed: Sequence[float] = ()):
        self._entries, self.tensors, self.slowed = entries, tensors, slowed
        self.architecture = self.anywhere("general.architecture", str)

    def anywhere(self, key: str, kind: type, default: JsonValue = MISSING) -> JsonValue:
        """The value of a whole key.

        Raises:
            ModelFileError: it is missing and has no default, or has another type.
        """
        value = self._entries.get(key)
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
        value = self._entries.get(f"{self.architecture}.{key}")
        if isinstance(value, list):
            if len(value) < layers or len(set(value[:layers])) != 1 or type(value[0]) is not int:
                raise ConfigError(f"GGUF metadata {self.architecture}.{key} differs by layer, which is not implemented")
            return int(value[0])
        return int(self.count(key))

    def each_layer(self, key: str, kind: type[T]) -> list[T]:
        """The values of a key that has one for each layer.

        Raises:
            ConfigError: it has too few, or some of another type.
        """
        values = self.anywhere(f"{self.architecture}.{key}", list)
        if not 0 < self.layers <= len(values) or any(type(value) is not kind for value in values[: self.layers]):
            raise ConfigError(f"GGUF metadata {self.architecture}.{key} has no {kind.__name__} for each layer")
        return list(values[: self.layers])

    def must_equal(self, key: str, wanted: object) -> None:
        """Raises ConfigError: the key has another value."""
        value = self._entries.get(f"{self.architecture}.{key}")
        if value is not None and value != wanted:
            raise ConfigError(
                f"GGUF metadata {self.architecture}.{key} is {str(value)[:60]}; only {wanted} is implemented"
            )

    @property
    def layers(self) -> int:
        """Layers of the model, without those of draft heads, which are counted as blocks too."""
        layers = self.count("block_count") - self.count("nextn_predict_layers", 0)
        return int(layers)

    def rope_scaling(self) -> JsonDict | None:
        """`rope_scaling` of config.json.

        Raises:
            ConfigError: a type that is not read.
        """
        kind = self.anywhere(f"{self.architecture}.rope.scaling.type", str, "none")
        if kind not in ROPE_TYPES:
            raise ConfigError(
                f"GGUF metadata {self.architecture}.rope.scaling.type is {kind[:60]!a}; only yarn is read"
            )
        if kind == "none":
            return None
        betas = ((name, self.number(f"rope.scaling.yarn_{name}", None)) for name in ("beta_fast", "beta_slow"))
        return {
            "type": kind,
            "factor": self.number("rope.scaling.factor"),
            "original_max_position_embeddings": self.count("rope.scaling.original_context_length"),
            **{name: beta for name, beta in betas if beta is not None},
        }

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
        self.must_equal("attention.value_length", self.count("attention.key_length", None))
        return {
            "num_attention_heads": heads,
            "num_key_value_heads": self.of_layers("attention.head_count_kv", self.layers),
            "head_dim": self.count("attention.key_length", None) or self.count("embedding_length") // max(heads, 1),
            "rope_theta": self.number("rope.freq_base", 10000.0),
            "rope_scaling": self.rope_scaling(),
        }

    def share_rotated(self) -> float:
        """The share of a head's values that are rotated."""
        width = self.count("attention.key_length")
        return float(self.count("rope.dimension_count", width) / max(width, 1))

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
            "routed_scaling_factor": self.weights_scale(),
            "norm_topk_prob": self.flag("expert_weights_norm", False),
        }

    def weights_scale(self) -> float:
        """The factor of the routing weights; 0 means none, as in llama.cpp."""
        return float(self.number("expert_weights_scale", 1.0) or 1.0)

    def experts(self) -> JsonDict:
        """The fields of routed experts."""
        return {**self.choice(), "moe_intermediate_size": self.count("expert_feed_forward_length")}

    def choice(self) -> JsonDict:
        """The fields of a router."""
        return {"num_experts": self.count("expert_count"), "num_experts_per_tok": self.count("expert_used_count")}

    def tied(self) -> JsonDict:
        """Whether embeddings make the logits too: then there is no matrix of their own."""
        return {"tie_word_embeddings": "output.weight" not in self.tensors}


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


def neighbours_apart(heads: int, rows: int) -> Change:
    """Of rows that llama.cpp orders so that the two of a rotated pair are neighbours, those of a head's first halves
    and then those of the second ones (`LlamaModel.permute`)."""
    stored = np.arange(rows).reshape(max(heads, 1), -1, 2)
    return Change(rows=stored.swapaxes(1, 2).reshape(-1))


GgufConfig = JsonDict
Changes = Callable[[GgufConfig, str, tuple[int, ...]], Change | None]


@dataclass(frozen=True)
class GgufFamily:
    """One architecture of llama.cpp.

    Args:
        config: its metadata -> config.json of the family.
        names: beginnings of tensors' names behind "blk.N.", and what they are behind "model.layers.N.".
        change: (config, name behind "model.layers.N.", stored shape) -> what undoes llama.cpp's change; None: nothing.
    """

    config: Callable[[Metadata], GgufConfig]
    names: tuple[tuple[str, str], ...]
    change: Changes = lambda config, name, shape: None


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

"""What every family's reader of GGUF files uses: metadata, names of tensors, and what llama.cpp changes in weights.

A family's table `GGUF` says for each architecture of llama.cpp how its metadata becomes a config.json, which the
family's own reader then checks, and how its tensors are called. Names and keys are those of the `gguf` package
(`gguf/constants.py`); changes are those of llama.cpp's conversion.
"""

import itertools
import math
import re
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field

import numpy as np

from ..errors import ConfigError
from ..files import JsonDict
from .gguf_rope import Rotations

SOFTMAX, SIGMOID, SQRT_SOFTPLUS = 1, 2, 4  # values of `expert_gating_func`


class Metadata(Rotations):
    """What the metadata of one architecture say, as fields of config.json."""

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
        """The fields of config.json that all families have whose norms have no mean."""
        return {**self.lengths(), "rms_norm_eps": self.number("attention.layer_norm_rms_epsilon")}

    def lengths(self) -> JsonDict:
        """The fields of config.json that all families have."""
        return {
            "num_hidden_layers": self.layers,
            "hidden_size": self.count("embedding_length"),
            "max_position_embeddings": self.count("context_length"),
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

    def noaux(self, gating: int = SIGMOID) -> JsonDict:
        """The fields of DeepSeek-V3's router and shared expert; `gating`: how logits become scores."""
        self.must_equal("expert_gating_func", gating)
        return {
            **self.experts(),
            **self.router(),
            "intermediate_size": self.count("feed_forward_length", None),
            "first_k_dense_replace": self.count("leading_dense_block_count", 0),
            "n_shared_experts": self.count("expert_shared_count", 0),
        }

    def router(self) -> JsonDict:
        """The fields of a router with groups of experts."""
        return {
            **self.choice(),
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
        types: the values of `model_type` of the models that llama.cpp stores so; config.json has the first.
        reader: its metadata -> the other fields of the family's config.json.
        names: beginnings of tensors' names behind "blk.N.", and what they are behind "model.layers.N.".
        change: (config, name behind "model.layers.N.", stored shape) -> what undoes llama.cpp's change; None: nothing.
            A tensor of another shape than the config says is not changed: the model refuses it by its shape. So no
            number of a file decides how large an array is.
        unread: keys that need not be read, and why, besides `gguf_keys.UNREAD`.
        joined: tensors that the model has as one, by its name behind "model.layers.N.": theirs in order.
        stem: what stands for "model.layers." in all of this.
        products: ends of names of tensors in which llama.cpp stores the product of two of the model's vectors, with
            those of the other factors, which are ones then.
    """

    types: tuple[str, ...]
    reader: Callable[[Metadata], GgufConfig]
    names: tuple[tuple[str, str], ...]
    change: Changes = lambda config, name, shape: None
    unread: Mapping[str, str] = field(default_factory=dict)
    joined: tuple[tuple[str, tuple[str, ...]], ...] = ()
    stem: str = "model.layers."
    products: tuple[tuple[str, str], ...] = ()

    def ones(self, name: str, columns: int) -> tuple[str, Change] | None:
        """The vector of ones that the model has beside a tensor, by its name, and what makes it of the tensor; None:
        the tensor is no product."""
        ends = ((product, one) for product, one in self.products if name.endswith(product))
        product, one = next(ends, ("", ""))
        made = name.removesuffix(product) + one
        return (made, Change((columns,), values=np.ones_like)) if product else None

    def config(self, read: Metadata) -> GgufConfig:
        """The family's config.json.

        Raises:
            ConfigError, ModelFileError: something in the metadata is missing, or not implemented.
        """
        config = {"model_type": self.types[0], **self.reader(read)}
        read.check_all_read(self.unread)
        return config


FUSED, DOWN = "ffn_gate_up_exps.weight", ("ffn_down_exps.weight", "mlp.experts.down_proj")
OUTER = (
    *(("token_embd.", "model.embed_tokens."), ("output_norm.", "model.norm."), ("output.", "lm_head.")),
    ("token_embd_norm.", "model.norm."),  # of LFM2, in spite of the name
    *((f"output_hc_{one}.weight", f"model.hc_head.{one}") for one in ("fn", "base", "scale")),
    *(("output_hc_norm.", "model.hc_head.hc_norm."), ("output_hc_down.", "model.hc_head.input_mix_weight_down.")),
    *(("output_hc_up.", "model.hc_head.input_mix_weight_up."), ("output_res_score.", "model.hc_head.proj_")),
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
    ("exp_probs_b", "mlp.e_score_correction_bias"),  # of some architectures
)
# Of streams, and what makes one of them of the last layer's.
STREAMS = (
    *((f"hc_{part}_{one}.weight", f"{part}_hc.{one}") for part in ("attn", "ffn") for one in ("fn", "base", "scale")),
)
# Of a draft head, behind the last layer's: names as of the layer more that DeepSeek-V3's checkpoints have.
NEXT = (
    *((f"nextn.{one}.", f"{one}.") for one in ("eh_proj", "enorm", "hnorm", "embed_tokens")),
    *((f"nextn.shared_head_{one}.", f"shared_head.{one}.") for one in ("head", "norm")),
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
    names = (*NEXT, *((DOWN,) if is_fused else ()), *family.names)
    return layer, f"{family.stem}{layer}.{_begun(block[2], names)}"


def _begun(name: str, names: tuple[tuple[str, str], ...]) -> str:
    matches = ((theirs, ours) for theirs, ours in names if name.startswith(theirs))
    theirs, ours = next(matches, ("", ""))
    return ours + name.removeprefix(theirs)

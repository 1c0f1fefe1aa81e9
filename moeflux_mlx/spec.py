"""What a model is: `ModelArgs`, read from a Hugging Face `config.json` of any supported family.

A missing field, a wrong type, or a value that this engine does not implement is a `ConfigError` naming the field,
before anything is made of it. Fields that describe training, vision or dropout are not read. Nothing here knows about
tensors.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from .errors import ConfigError
from .families.fields import LARGEST, Fields
from .families.registry import FAMILIES
from .files import directory, read_json
from .kinds import FULL, LINEAR, Delta, GroupedQuery, Latent, Mixer, Rotation, Router, Yarn
from .quant import EXPERTS, Quantization, of_packed

WIDEST_HEAD = 1 << 16  # far beyond any model's


@dataclass(frozen=True)
class ModelArgs:
    """Hyper-parameters of one model, under their Hugging Face names.

    `num_experts` is DeepSeek's `n_routed_experts`; for DeepSeek, `shared_expert_intermediate_size` is
    `moe_intermediate_size * n_shared_experts`. A width of 0 means that the part does not exist. What a layer is made of
    follows from the fields: `mixers` and `router`.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    norm_topk_prob: bool
    layer_types: tuple[str, ...]
    moe_layers: tuple[int, ...]
    intermediate_size: int = 0
    shared_expert_intermediate_size: int = 0
    partial_rotary_factor: float = 1.0
    rope_scaling: Yarn | None = None
    attn_output_gate: bool = False
    linear_num_key_heads: int = 0
    linear_num_value_heads: int = 0
    linear_key_head_dim: int = 0
    linear_value_head_dim: int = 0
    linear_conv_kernel_dim: int = 0
    q_lora_rank: int = 0
    kv_lora_rank: int = 0
    qk_nope_head_dim: int = 0
    qk_rope_head_dim: int = 0
    v_head_dim: int = 0
    n_group: int = 1
    topk_group: int = 1
    routed_scaling_factor: float = 1.0
    scoring_func: str = "softmax"
    correction_bias: bool = False  # the router's `e_score_correction_bias`
    shared_expert_gate: bool = False
    rope_interleave: bool = False
    quantization: Quantization | None = None
    eos_token_ids: tuple[int, ...] = ()

    @cached_property
    def rotary_dim(self) -> int:
        return self.qk_rope_head_dim or int(self.head_dim * self.partial_rotary_factor)

    @cached_property
    def delta(self) -> Delta:
        """The mixer of layers with linear attention, whether there are any or not."""
        return Delta(
            self.linear_num_key_heads,
            self.linear_num_value_heads,
            self.linear_key_head_dim,
            self.linear_value_head_dim,
            self.linear_conv_kernel_dim,
        )

    @cached_property
    def mixers(self) -> tuple[Mixer, ...]:
        """The token mixer of each layer."""
        rotation = Rotation(self.rotary_dim, self.rope_theta, self.rope_scaling, self.rope_interleave)
        kinds: dict[str, Mixer] = {
            FULL: GroupedQuery(
                self.num_attention_heads, self.num_key_value_heads, self.head_dim, rotation, self.attn_output_gate
            ),
            LINEAR: self.delta,
        }
        if self.kv_lora_rank:
            kinds[FULL] = Latent(
                self.num_attention_heads,
                self.q_lora_rank,
                self.kv_lora_rank,
                self.qk_nope_head_dim,
                self.v_head_dim,
                rotation,
            )
        return tuple(kinds[kind] for kind in self.layer_types)

    @cached_property
    def widths(self) -> frozenset[int]:
        """Of the rows that operations meet."""
        plain = {self.hidden_size, self.intermediate_size, self.shared_expert_intermediate_size}
        return frozenset(plain.union(*(mixer.widths for mixer in self.mixers)))

    @cached_property
    def router(self) -> Router:
        """The rule by which every layer with experts chooses them."""
        return Router(
            experts=self.num_experts,
            top_k=self.num_experts_per_tok,
            score=self.scoring_func,
            correction_bias=self.correction_bias,
            groups=self.n_group,
            kept_groups=self.topk_group,
            normalise=self.norm_topk_prob,
            scale=self.routed_scaling_factor,
        )

    @classmethod
    def from_dict(cls, config: Mapping[str, Any], generation_config: Mapping[str, Any] | None = None) -> "ModelArgs":
        """Args:
            config: a parsed `config.json`.
            generation_config: a parsed `generation_config.json`; its `eos_token_id` wins.

        Raises:
            ConfigError: a field is missing, has the wrong type, or a value not implemented.
        """
        read = Fields(config)
        model_type = read.required("model_type", str).removesuffix("_text")
        if model_type not in FAMILIES:
            raise ConfigError(f"model_type {model_type!r} is not supported; supported: {', '.join(FAMILIES)}")
        text = read.optional("text_config", Mapping, None)
        body = Fields(text) if text is not None else read
        args = cls(
            model_type=model_type,
            quantization=of_packed(config),
            eos_token_ids=_eos_token_ids(generation_config or {}, config, text or {}),
            **FAMILIES[model_type].read(body),
        )
        _check(args)
        return args

    @classmethod
    def from_file(cls, path: str | Path) -> "ModelArgs":
        """Reads `config.json` (and `generation_config.json`, when there is one) of a model directory."""
        path = Path(path)
        generation = path / "generation_config.json"
        return cls.from_dict(read_json(path / "config.json"), read_json(generation) if generation.exists() else None)

    @classmethod
    def from_variant(cls, name: str) -> "ModelArgs":
        """The named configuration that ships with the package; `variants()` lists the names."""
        if name not in variants():
            raise ConfigError(f"no variant {name!r}; there are: {', '.join(variants())}")
        return cls.from_dict(read_json(directory("configs") / f"{name}.json"))


def variants() -> list[str]:
    """Names accepted by `ModelArgs.from_variant`."""
    return sorted(file.stem for file in directory("configs").glob("*.json"))


def _eos_token_ids(*configs: Mapping[str, Any]) -> tuple[int, ...]:
    """The first config that names `eos_token_id` decides; generation_config.json comes first."""
    for config in configs:
        value = config.get("eos_token_id")
        if value is not None:
            ids = value if isinstance(value, list) else [value]
            if not all(type(i) is int and i >= 0 for i in ids):
                raise ConfigError(f"config field 'eos_token_id' is {value!r}; expected token ids")
            return tuple(ids)
    return ()


def _check(args: ModelArgs) -> None:
    """What the fields must satisfy together."""
    if args.num_attention_heads % args.num_key_value_heads:
        raise ConfigError(
            f"num_attention_heads {args.num_attention_heads} is not a multiple of "
            f"num_key_value_heads {args.num_key_value_heads}"
        )
    if not 1 <= args.head_dim <= WIDEST_HEAD:
        raise ConfigError(f"head_dim is {args.head_dim}; expected an integer from 1 to {WIDEST_HEAD}")
    for name, value in _widths(args).items():
        if not 0 < value <= LARGEST:
            raise ConfigError(f"{name} is {value}; expected a width from 1 to {LARGEST}")
    if not args.moe_layers:
        raise ConfigError(f"none of the {args.num_hidden_layers} layers has experts")
    if args.num_experts_per_tok > args.num_experts:
        raise ConfigError(f"num_experts_per_tok {args.num_experts_per_tok} exceeds num_experts {args.num_experts}")
    for name in ("hidden_size", "moe_intermediate_size"):
        if getattr(args, name) % EXPERTS.group_size:
            raise ConfigError(
                f"{name} {getattr(args, name)} is not a multiple of the quantisation group, {EXPERTS.group_size}"
            )
    if not 1 <= args.topk_group <= args.n_group or args.num_experts % args.n_group:
        groups = f"n_group {args.n_group}, topk_group {args.topk_group}"
        raise ConfigError(f"num_experts {args.num_experts}, {groups} do not divide")
    if args.num_experts_per_tok > args.topk_group * (args.num_experts // args.n_group):
        raise ConfigError(
            f"num_experts_per_tok {args.num_experts_per_tok} exceeds the experts of {args.topk_group} of "
            f"{args.n_group} groups"
        )
    if LINEAR in args.layer_types and args.linear_num_value_heads % args.linear_num_key_heads:
        raise ConfigError(
            f"linear_num_value_heads {args.linear_num_value_heads} is not a multiple of "
            f"linear_num_key_heads {args.linear_num_key_heads}"
        )
    if args.rotary_dim <= 0 or args.rotary_dim % 2 or args.rotary_dim > args.head_dim:
        raise ConfigError(f"{args.rotary_dim} rotary dimensions do not fit a head of {args.head_dim}")


def _widths(args: ModelArgs) -> dict[str, int]:
    """Of what projections make: products of fields, each of which is in range."""
    widths = {
        "num_attention_heads * head_dim": args.num_attention_heads * args.head_dim * (1 + args.attn_output_gate),
    }
    if args.shared_expert_intermediate_size:
        widths["shared_expert_intermediate_size"] = args.shared_expert_intermediate_size
    for mixer in args.mixers:
        if isinstance(mixer, Delta):
            widths["linear attention"] = mixer.channels
    if args.kv_lora_rank:
        latent = args.qk_nope_head_dim + args.v_head_dim
        widths["num_attention_heads * (qk_nope_head_dim + v_head_dim)"] = args.num_attention_heads * latent
        widths["kv_lora_rank + qk_rope_head_dim"] = args.kv_lora_rank + args.qk_rope_head_dim
    return widths

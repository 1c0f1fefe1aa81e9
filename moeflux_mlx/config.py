"""Reads a Hugging Face `config.json` into one frozen `ModelArgs`, for every supported family.

Each field is read as required, optional, or must-equal: a missing field, a wrong type, or a value that
this engine does not implement is a `ConfigError` naming the field. Fields that describe training,
vision or dropout are not read. Nothing here knows about tensors.

Two generations of spelling are accepted: `rope_theta` + `rope_scaling` or `rope_parameters`,
`num_experts`, `num_local_experts` or `n_routed_experts`, flat or nested in `text_config`.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from .errors import ConfigError, ModelFileError
from .resources import directory

QWEN3_MOE, QWEN3_NEXT, QWEN3_5_MOE, DEEPSEEK_V3 = "qwen3_moe", "qwen3_next", "qwen3_5_moe", "deepseek_v3"
MODEL_TYPES = (QWEN3_MOE, QWEN3_NEXT, QWEN3_5_MOE, DEEPSEEK_V3)
FULL, LINEAR = "full_attention", "linear_attention"


@dataclass(frozen=True)
class Quantization:
    """How resident linear layers are stored: affine groups of `group_size` along the input axis.

    `overrides` maps a module path to its own (group_size, bits), or to None for "not quantised".
    """

    group_size: int = 64
    bits: int = 4
    overrides: Mapping[str, tuple[int, int] | None] = field(default_factory=dict)

    def of(self, path: str) -> tuple[int, int] | None:
        return self.overrides.get(path, (self.group_size, self.bits))


@dataclass(frozen=True)
class Yarn:
    """YaRN frequency scaling (arXiv:2309.00071), with DeepSeek's two magnitude scales."""

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    attention_factor: float | None = None
    truncate: bool = True


@dataclass(frozen=True)
class ModelArgs:
    """Hyper-parameters of one model, under their Hugging Face names.

    `num_experts` is DeepSeek's `n_routed_experts`; for DeepSeek, `shared_expert_intermediate_size` is
    `moe_intermediate_size * n_shared_experts`. A width of 0 means that the part does not exist.
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
    quantization: Quantization | None = None
    eos_token_ids: tuple[int, ...] = ()

    @cached_property
    def rotary_dim(self) -> int:
        return self.qk_rope_head_dim or int(self.head_dim * self.partial_rotary_factor)

    @cached_property
    def linear_key_dim(self) -> int:
        return self.linear_num_key_heads * self.linear_key_head_dim

    @cached_property
    def linear_value_dim(self) -> int:
        return self.linear_num_value_heads * self.linear_value_head_dim

    @cached_property
    def linear_conv_dim(self) -> int:
        """Channels of the causal convolution: q, k and v side by side."""
        return 2 * self.linear_key_dim + self.linear_value_dim

    @classmethod
    def from_dict(cls, config: Mapping[str, Any], generation_config: Mapping[str, Any] | None = None) -> "ModelArgs":
        """Args:
            config: a parsed `config.json`.
            generation_config: a parsed `generation_config.json`; its `eos_token_id` wins.

        Raises:
            ConfigError: a field is missing, has the wrong type, or a value not implemented.
        """
        read = _Reader(config)
        model_type = read.required("model_type", str).removesuffix("_text")
        if model_type not in MODEL_TYPES:
            raise ConfigError(f"model_type {model_type!r} is not supported; supported: {', '.join(MODEL_TYPES)}")
        text = read.optional("text_config", Mapping, None)
        body = _Reader(text) if text is not None else read
        values = {**_common(body), **_FAMILY[model_type](body)}
        args = cls(
            model_type=model_type,
            quantization=_quantization(config),
            eos_token_ids=_eos_token_ids(generation_config or {}, config, text or {}),
            **values,
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


def read_json(path: Path) -> dict[str, Any]:
    """Raises ModelFileError when the file is missing or is not a JSON object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelFileError(f"{path} does not exist") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ModelFileError(f"{path} cannot be read as JSON: {error}") from None
    if not isinstance(value, dict):
        raise ModelFileError(f"{path} holds a JSON {type(value).__name__}, not an object")
    return value


_MISSING = object()


class _Reader:
    """Typed access to a config; every failure names the field."""

    def __init__(self, config: Mapping[str, Any]):
        self.config = config

    def _get(self, names: str, kind: type, default: Any) -> Any:
        for name in names.split("|"):
            value = self.config.get(name)
            if value is None:
                continue
            if kind is float and type(value) is int:
                value = float(value)
            if not isinstance(value, kind) or (kind in (int, float) and isinstance(value, bool)):
                raise ConfigError(f"config field {name!r} is {value!r}; expected {kind.__name__}")
            if isinstance(value, float) and not math.isfinite(value):
                raise ConfigError(f"config field {name!r} is {value!r}; expected a finite number")
            return value
        if default is _MISSING:
            raise ConfigError(f"config field {names.split('|')[0]!r} is missing")
        return default

    def required(self, names: str, kind: type) -> Any:
        """The first of `names` ("a|b") that is present and not null."""
        return self._get(names, kind, _MISSING)

    def optional(self, names: str, kind: type, default: Any) -> Any:
        return self._get(names, kind, default)

    def must_equal(self, name: str, wanted: Any) -> None:
        value = self.config.get(name)
        if value is not None and value != wanted:
            raise ConfigError(f"config field {name!r} is {value!r}; only {wanted!r} is implemented")


def _common(read: _Reader) -> dict[str, Any]:
    for name, wanted in (
        ("hidden_act", "silu"),
        ("attention_bias", False),
        ("tie_word_embeddings", False),
        ("use_sliding_window", False),
    ):
        read.must_equal(name, wanted)
    return {
        "vocab_size": read.required("vocab_size", int),
        "hidden_size": read.required("hidden_size", int),
        "num_hidden_layers": read.required("num_hidden_layers", int),
        "num_attention_heads": read.required("num_attention_heads", int),
        "num_key_value_heads": read.required("num_key_value_heads", int),
        "rms_norm_eps": read.optional("rms_norm_eps", float, 1e-6),
        "max_position_embeddings": read.required("max_position_embeddings", int),
        "num_experts": read.required("num_experts|num_local_experts|n_routed_experts", int),
        "num_experts_per_tok": read.required("num_experts_per_tok", int),
        "moe_intermediate_size": read.required("moe_intermediate_size", int),
        **_rope(read),
    }


def _rope(read: _Reader) -> dict[str, Any]:
    """`rope_parameters` of transformers 5, or `rope_theta` + `rope_scaling` of earlier releases."""
    new = read.optional("rope_parameters", Mapping, None)
    inner = _Reader(new if new is not None else read.optional("rope_scaling", Mapping, {}))
    outer = inner if new is not None and new.get("rope_theta") is not None else read
    kind = inner.optional("rope_type|type", str, "default")
    if kind not in ("default", "yarn"):
        raise ConfigError(f"config field 'rope_type' is {kind!r}; only 'default' and 'yarn' are implemented")
    rotary = inner.optional("partial_rotary_factor", float, None)
    values: dict[str, Any] = {"rope_theta": outer.required("rope_theta", float)}
    if rotary is None:
        rotary = read.optional("partial_rotary_factor", float, None)
    if rotary is not None:
        values["partial_rotary_factor"] = rotary
    if kind == "yarn":
        values["rope_scaling"] = Yarn(
            factor=inner.required("factor", float),
            original_max_position_embeddings=inner.required("original_max_position_embeddings", int),
            beta_fast=inner.optional("beta_fast", float, 32.0),
            beta_slow=inner.optional("beta_slow", float, 1.0),
            mscale=inner.optional("mscale", float, None),
            mscale_all_dim=inner.optional("mscale_all_dim", float, None),
            attention_factor=inner.optional("attention_factor", float, None),
            truncate=inner.optional("truncate", bool, True),
        )
    return values


def _head_dim(read: _Reader) -> int:
    heads = read.required("num_attention_heads", int)
    return read.optional("head_dim", int, None) or read.required("hidden_size", int) // max(heads, 1)


def _sparse_layers(read: _Reader) -> tuple[int, ...]:
    step = read.optional("decoder_sparse_step", int, 1)
    dense = read.optional("mlp_only_layers", list, [])
    layers = range(read.required("num_hidden_layers", int))
    return tuple(i for i in layers if i not in dense and step > 0 and (i + 1) % step == 0)


def _dense_width(read: _Reader, moe_layers: tuple[int, ...]) -> int:
    if len(moe_layers) == read.required("num_hidden_layers", int):
        return 0
    return read.required("intermediate_size", int)


def _qwen3_moe(read: _Reader) -> dict[str, Any]:
    moe_layers = _sparse_layers(read)
    return {
        "head_dim": _head_dim(read),
        "norm_topk_prob": read.optional("norm_topk_prob", bool, False),
        "layer_types": (FULL,) * read.required("num_hidden_layers", int),
        "moe_layers": moe_layers,
        "intermediate_size": _dense_width(read, moe_layers),
    }


def _layer_types(read: _Reader) -> tuple[str, ...]:
    layers = read.required("num_hidden_layers", int)
    types = read.optional("layer_types", list, None)
    if types is None:
        interval = read.optional("full_attention_interval", int, 4)
        if interval < 1:
            raise ConfigError(f"config field 'full_attention_interval' is {interval}; it must be positive")
        return tuple(FULL if (i + 1) % interval == 0 else LINEAR for i in range(layers))
    if len(types) != layers:
        raise ConfigError(f"config field 'layer_types' has {len(types)} entries for {layers} layers")
    unknown = set(types) - {FULL, LINEAR}
    if unknown:
        raise ConfigError(f"config field 'layer_types' has {sorted(map(str, unknown))}; only {FULL!r} and {LINEAR!r}")
    return tuple(types)


def _qwen3_next(read: _Reader, norm_topk_prob: bool | None = None) -> dict[str, Any]:
    if norm_topk_prob is None:
        norm_topk_prob = read.optional("norm_topk_prob", bool, True)
    read.must_equal("attn_output_gate", True)
    names = (
        "shared_expert_intermediate_size",
        "linear_num_key_heads",
        "linear_num_value_heads",
        "linear_key_head_dim",
        "linear_value_head_dim",
    )
    return {
        **_qwen3_moe(read),
        **{name: read.required(name, int) for name in names},
        "norm_topk_prob": norm_topk_prob,
        "linear_conv_kernel_dim": read.optional("linear_conv_kernel_dim", int, 4),
        "layer_types": _layer_types(read),
        "attn_output_gate": True,
        "partial_rotary_factor": _rope(read).get("partial_rotary_factor", 0.25),
    }


def _qwen3_5_moe(read: _Reader) -> dict[str, Any]:
    """The family always normalises the routing weights, and its config has no field for it."""
    read.must_equal("norm_topk_prob", True)
    return _qwen3_next(read, norm_topk_prob=True)


def _deepseek_v3(read: _Reader) -> dict[str, Any]:
    for name, wanted in (
        ("topk_method", "noaux_tc"),
        ("scoring_func", "sigmoid"),
        ("rope_interleave", True),
        ("moe_layer_freq", 1),
    ):
        read.must_equal(name, wanted)
    layers, first = read.required("num_hidden_layers", int), read.required("first_k_dense_replace", int)
    nope, rope = read.required("qk_nope_head_dim", int), read.required("qk_rope_head_dim", int)
    width = read.required("moe_intermediate_size", int) * read.required("n_shared_experts", int)
    return {
        **{
            name: read.required(name, int)
            for name in ("q_lora_rank", "kv_lora_rank", "v_head_dim", "n_group", "topk_group")
        },
        "head_dim": nope + rope,
        "qk_nope_head_dim": nope,
        "qk_rope_head_dim": rope,
        "norm_topk_prob": read.optional("norm_topk_prob", bool, True),
        "routed_scaling_factor": read.required("routed_scaling_factor", float),
        "shared_expert_intermediate_size": width,
        "layer_types": (FULL,) * layers,
        "moe_layers": tuple(range(first, layers)),
        "intermediate_size": _dense_width(read, tuple(range(first, layers))),
    }


_FAMILY = {
    QWEN3_MOE: _qwen3_moe,
    QWEN3_NEXT: _qwen3_next,
    QWEN3_5_MOE: _qwen3_5_moe,
    DEEPSEEK_V3: _deepseek_v3,
}


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


def _quantization(config: Mapping[str, Any]) -> Quantization | None:
    """MLX's `quantization` object: defaults plus one entry for each module path that differs."""
    value = config.get("quantization")
    if value is None:
        return None
    read = _Reader(value)
    read.must_equal("mode", "affine")
    overrides: dict[str, tuple[int, int] | None] = {}
    group_size, bits = read.required("group_size", int), read.required("bits", int)
    for path, entry in value.items():
        if isinstance(entry, Mapping):
            one = _Reader(entry)
            one.must_equal("mode", "affine")
            overrides[path] = (one.optional("group_size", int, group_size), one.optional("bits", int, bits))
        elif entry is False and path not in ("group_size", "bits", "mode"):
            overrides[path] = None
    return Quantization(group_size, bits, overrides)


POSITIVE = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "num_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "max_position_embeddings",
)


def _check(args: ModelArgs) -> None:
    """What the fields must satisfy together."""
    for name in POSITIVE:
        if getattr(args, name) <= 0:
            raise ConfigError(f"config field {name!r} is {getattr(args, name)}; it must be positive")
    if args.num_attention_heads % args.num_key_value_heads:
        raise ConfigError(
            f"num_attention_heads {args.num_attention_heads} is not a multiple of "
            f"num_key_value_heads {args.num_key_value_heads}"
        )
    if args.num_experts_per_tok > args.num_experts:
        raise ConfigError(f"num_experts_per_tok {args.num_experts_per_tok} exceeds num_experts {args.num_experts}")
    for name in ("hidden_size", "moe_intermediate_size"):
        if getattr(args, name) % 64:
            raise ConfigError(f"{name} {getattr(args, name)} is not a multiple of the quantisation group, 64")
    if not 1 <= args.topk_group <= args.n_group or args.num_experts % args.n_group:
        groups = f"n_group {args.n_group}, topk_group {args.topk_group}"
        raise ConfigError(f"num_experts {args.num_experts}, {groups} do not divide")
    key_heads = args.linear_num_key_heads
    if LINEAR in args.layer_types and (key_heads < 1 or args.linear_num_value_heads % key_heads):
        raise ConfigError(
            f"linear_num_value_heads {args.linear_num_value_heads} is not a multiple of "
            f"linear_num_key_heads {key_heads}"
        )
    if args.rotary_dim <= 0 or args.rotary_dim % 2 or args.rotary_dim > args.head_dim:
        raise ConfigError(f"{args.rotary_dim} rotary dimensions do not fit a head of {args.head_dim}")

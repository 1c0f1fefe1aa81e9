"""Reads a Hugging Face `config.json` into one frozen `ModelArgs`, for every supported family.

Each field is read as required, optional, or must-equal, and within a range: a missing field, a wrong
type, or a value that this engine does not implement is a `ConfigError` naming the field, before anything
is made of it. Fields that describe training, vision or dropout are not read. Nothing here knows about tensors.

Two generations of spelling are accepted: `rope_theta` + `rope_scaling` or `rope_parameters`,
`num_experts`, `num_local_experts` or `n_routed_experts`, flat or nested in `text_config`.
"""

import json
import math
import reprlib
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
LARGEST = 2**31 - 1  # MLX counts an array's axes in 32 bits
MOST_LAYERS, WIDEST_HEAD = 1024, 1 << 16  # far beyond any model; what is made for each of them stays small
AFFINE_GROUPS, AFFINE_BITS = (32, 64, 128), (2, 3, 4, 5, 6, 8)
DEFAULT_STORAGE = {"affine": (64, 4), "mxfp4": (32, 4), "nvfp4": (16, 4), "mxfp8": (32, 8)}  # group size, bits


@dataclass(frozen=True)
class Storage:
    """How the codes of a matrix are stored: groups of `group_size` along the input axis share their scales."""

    group_size: int
    bits: int
    mode: str = "affine"

    def __str__(self) -> str:
        return f"{self.bits} bits, group_size {self.group_size}, mode {self.mode}"


@dataclass(frozen=True)
class Quantization:
    """How resident linear layers are stored; `overrides` by module path, None for "not quantised"."""

    default: Storage = Storage(64, 4)
    overrides: Mapping[str, Storage | None] = field(default_factory=dict)

    def of(self, path: str) -> Storage | None:
        return self.overrides.get(path, self.default)


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


def unquantized(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config without what it says of how tensors are stored."""
    return {key: value for key, value in config.items() if key not in ("quantization", "quantization_config")}


_MISSING = object()


def _out_of_range(name: str, value: Any, wanted: str) -> ConfigError:
    return ConfigError(f"config field {name!r} is {reprlib.repr(value)}; expected {wanted}")


class _Reader:
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
                raise _out_of_range(name, value, kind.__name__)
            if isinstance(value, float) and not math.isfinite(value):
                raise _out_of_range(name, value, "a finite number")
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
            raise _out_of_range(name, value, f"an integer from {least} to {most}")
        return value

    def number(self, names: str, default: Any = _MISSING, *, least: float, most: float) -> Any:
        """A float from `least` to `most`, or the default."""
        name, value = self._get(names, float, default)
        if value is not default and not least <= value <= most:
            raise _out_of_range(name, value, f"a number from {least:g} to {most:g}")
        return value

    def must_equal(self, name: str, wanted: Any) -> None:
        value = self.config.get(name)
        if value is not None and value != wanted:
            raise ConfigError(f"config field {name!r} is {reprlib.repr(value)}; only {wanted!r} is implemented")


def _common(read: _Reader) -> dict[str, Any]:
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
        "num_hidden_layers": _layers(read),
        "num_attention_heads": read.count("num_attention_heads"),
        "num_key_value_heads": read.count("num_key_value_heads"),
        "rms_norm_eps": read.number("rms_norm_eps", 1e-6, least=1e-30, most=1.0),
        "max_position_embeddings": read.count("max_position_embeddings"),
        "num_experts": read.count("num_experts|num_local_experts|n_routed_experts"),
        "num_experts_per_tok": read.count("num_experts_per_tok"),
        "moe_intermediate_size": read.count("moe_intermediate_size"),
        **_rope(read),
    }


def _layers(read: _Reader) -> int:
    return read.count("num_hidden_layers", most=MOST_LAYERS)


def _rope(read: _Reader) -> dict[str, Any]:
    """`rope_parameters` of transformers 5, or `rope_theta` + `rope_scaling` of earlier releases."""
    new = read.optional("rope_parameters", Mapping, None)
    inner = _Reader(new if new is not None else read.optional("rope_scaling", Mapping, {}))
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


def _head_dim(read: _Reader) -> int:
    return read.count("head_dim", None) or read.count("hidden_size") // read.count("num_attention_heads")


def _sparse_layers(read: _Reader) -> tuple[int, ...]:
    step = read.count("decoder_sparse_step", 1)
    dense = read.optional("mlp_only_layers", list, [])
    return tuple(i for i in range(_layers(read)) if i not in dense and (i + 1) % step == 0)


def _dense_width(read: _Reader, moe_layers: tuple[int, ...]) -> int:
    return 0 if len(moe_layers) == _layers(read) else read.count("intermediate_size")


def _qwen3_moe(read: _Reader) -> dict[str, Any]:
    moe_layers = _sparse_layers(read)
    return {
        "head_dim": _head_dim(read),
        "norm_topk_prob": read.optional("norm_topk_prob", bool, False),
        "layer_types": (FULL,) * _layers(read),
        "moe_layers": moe_layers,
        "intermediate_size": _dense_width(read, moe_layers),
    }


def _layer_types(read: _Reader) -> tuple[str, ...]:
    layers = _layers(read)
    types = read.optional("layer_types", list, None)
    if types is None:
        interval = read.count("full_attention_interval", 4)
        return tuple(FULL if (i + 1) % interval == 0 else LINEAR for i in range(layers))
    if len(types) != layers:
        raise ConfigError(f"config field 'layer_types' has {len(types)} entries for {layers} layers")
    unknown = [kind for kind in types if kind not in (FULL, LINEAR)]
    if unknown:
        raise ConfigError(f"config field 'layer_types' has {reprlib.repr(unknown)}; only {FULL!r} and {LINEAR!r}")
    return tuple(types)


def _qwen3_next(read: _Reader, norm_topk_prob: bool | None = None) -> dict[str, Any]:
    if norm_topk_prob is None:
        norm_topk_prob = read.optional("norm_topk_prob", bool, True)
    read.must_equal("attn_output_gate", True)
    names = ("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim")
    return {
        **_qwen3_moe(read),
        **{name: read.count(name) for name in names},
        "shared_expert_intermediate_size": read.count("shared_expert_intermediate_size", least=0),
        "norm_topk_prob": norm_topk_prob,
        "linear_conv_kernel_dim": read.count("linear_conv_kernel_dim", 4, least=2),
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
    layers = _layers(read)
    moe_layers = tuple(range(read.count("first_k_dense_replace", least=0, most=layers), layers))
    nope, rope = read.count("qk_nope_head_dim"), read.count("qk_rope_head_dim")
    return {
        **{name: read.count(name) for name in ("q_lora_rank", "kv_lora_rank", "v_head_dim", "n_group", "topk_group")},
        "head_dim": nope + rope,
        "qk_nope_head_dim": nope,
        "qk_rope_head_dim": rope,
        "norm_topk_prob": read.optional("norm_topk_prob", bool, True),
        "routed_scaling_factor": read.number("routed_scaling_factor", least=1e-6, most=1e6),
        "shared_expert_intermediate_size": read.count("moe_intermediate_size")
        * read.count("n_shared_experts", least=0),
        "layer_types": (FULL,) * layers,
        "moe_layers": moe_layers,
        "intermediate_size": _dense_width(read, moe_layers),
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


def storage(path: str, entry: Mapping[str, Any]) -> Storage:
    """What `entry`, MLX's `quantization` or one module's part of it, says; as mlx-lm reads it.

    A missing or null `group_size` or `bits` means the mode's default, and a missing mode means affine, whatever the
    rest of the file has.

    Raises:
        ConfigError: a value is unknown; `path` says whose.
    """
    mode = "affine" if entry.get("mode") is None else entry["mode"]
    defaults = DEFAULT_STORAGE.get(mode, (None, None)) if isinstance(mode, str) else (None, None)
    group_size, bits = (
        default if entry.get(name) is None else entry[name]
        for name, default in zip(("group_size", "bits"), defaults, strict=True)
    )
    groups, widths = (AFFINE_GROUPS, AFFINE_BITS) if mode == "affine" else ((defaults[0],), (defaults[1],))
    if type(group_size) is not int or type(bits) is not int or group_size not in groups or bits not in widths:
        raise ConfigError(
            f"quantization of {path}: {reprlib.repr(bits)} bits, group_size {reprlib.repr(group_size)}, "
            f"mode {reprlib.repr(mode)} is not known"
        )
    return Storage(group_size, bits, mode)


def quantization_entries(config: Mapping[str, Any], name: str = "quantization") -> dict[str, Storage | None]:
    """By module path, what differs from the rest, which stands under ""; nothing if the field is missing or null.

    Raises:
        ConfigError: the field is no object, or a value in it is unknown.
    """
    value = config.get(name)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise _out_of_range(name, value, "an object")
    found: dict[str, Storage | None] = {"": storage("the model", value)}
    for path, entry in value.items():
        if isinstance(entry, Mapping):
            found[path] = storage(path, entry)
        elif entry is False:
            found[path] = None
    return found


def _quantization(config: Mapping[str, Any]) -> Quantization | None:
    """Of a packed model, where only experts may be stored otherwise than affine."""
    entries = quantization_entries(config)
    for one in filter(None, entries.values()):
        if one.mode != "affine":
            raise ConfigError(f"config field 'mode' is {one.mode!r}; only 'affine' is implemented")
    default = entries.pop("", None)
    return None if default is None else Quantization(default, entries)


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
        if getattr(args, name) % 64:
            raise ConfigError(f"{name} {getattr(args, name)} is not a multiple of the quantisation group, 64")
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
    if LINEAR in args.layer_types:
        widths["linear attention"] = args.linear_conv_dim
    if args.kv_lora_rank:
        latent = args.qk_nope_head_dim + args.v_head_dim
        widths["num_attention_heads * (qk_nope_head_dim + v_head_dim)"] = args.num_attention_heads * latent
        widths["kv_lora_rank + qk_rope_head_dim"] = args.kv_lora_rank + args.qk_rope_head_dim
    return widths

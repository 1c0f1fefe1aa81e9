"""The description of a model: `ModelArgs`, read from a Hugging Face `config.json` of any supported family.

A missing field, a wrong type, or a value that this engine does not implement raises a `ConfigError` that names the
field, before anything else is done. Fields that describe training, vision or dropout are not read. Nothing here knows
about tensors.
"""

import re
import reprlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Literal

from .errors import ConfigError, did_you_mean
from .families.conditions import check_experts
from .families.fields import Fields
from .families.registry import FAMILIES
from .files import JsonObject, directory, read_json
from .kinds import (
    SILU,
    Attending,
    Connections,
    Experts,
    LayerSpec,
    MatrixExperts,
    Mixer,
    NGrams,
    Router,
)
from .quant import Quantization, of_packed


@dataclass(frozen=True)
class ModelArgs:
    """The description of a model: a few sizes under their Hugging Face names, and its layers.

    `draft_head` is the layer of the draft head, if one is loaded. `embedding_scale` multiplies embeddings.
    `embedding_norm`: embeddings are normed, without a weight ("unit") or with a learned one; None: they are not.
    `is_tied`: logits are products with the embeddings' matrix. `logit_scale` multiplies logits. `logit_softcap`: their
    limit, applied like `Router.softcap`; None: no limit.

    The properties that have names of Hugging Face's fields are read from the layers; those about attention are the
    first attention layer's.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    rms_norm_eps: float
    max_position_embeddings: int
    layers: tuple[LayerSpec, ...]
    quantization: Quantization | None = None
    eos_token_ids: tuple[int, ...] = ()
    draft_head: LayerSpec | None = None
    embedding_scale: float = 1.0
    is_tied: bool = False
    logit_softcap: float | None = None
    logit_scale: float = 1.0
    embedding_norm: Literal["unit", "learned"] | None = None

    @property
    def last_matrix(self) -> str:
        """The module path of the matrix whose products are logits."""
        return "model.embed_tokens" if self.is_tied else "lm_head"

    @property
    def stream_scale(self) -> float:
        """The factor of embeddings where they enter the stream."""
        return self.embedding_scale / self.layers[0].residual.scale

    @property
    def last_norm_eps(self) -> float:
        """The epsilon of the norm after the last layer."""
        return self.layers[-1].residual.eps(self.rms_norm_eps, 2 * len(self.layers) + 1)

    @property
    def num_hidden_layers(self) -> int:
        return len(self.layers)

    @cached_property
    def mixers(self) -> tuple[Mixer, ...]:
        """The token mixer of each layer."""
        return tuple(layer.mixer for layer in self.layers)

    @cached_property
    def visits(self) -> tuple[int, ...]:
        """The numbers of the layers in the order in which a token passes them (`LayerSpec.passes`)."""
        stretches = groupby(range(len(self.layers)), lambda i: self.layers[i].passes)
        return tuple(layer for passes, own in stretches for layer in list(own) * passes)

    @cached_property
    def visited(self) -> tuple[Mixer, ...]:
        """The token mixer of each visit: each visit has caches of its own."""
        return tuple(self.mixers[layer] for layer in self.visits)

    @cached_property
    def mixer_counts(self) -> Mapping[Mixer, int]:
        """Each kind of token mixer, and how many visits of layers have it."""
        return Counter(self.visited)

    @cached_property
    def moe_layers(self) -> tuple[int, ...]:
        """The layers with routed experts."""
        return tuple(i for i, layer in enumerate(self.layers) if isinstance(layer.feed_forward, Experts))

    @cached_property
    def experts(self) -> Experts:
        """The feed-forward part of the first layer with routed experts; the others differ in activations at most."""
        return self.experts_of(self.moe_layers[0])

    def experts_of(self, layer: int) -> Experts:
        """The feed-forward part of a layer with routed experts."""
        part = self.layers[layer].feed_forward
        assert isinstance(part, Experts)
        return part

    @property
    def connections(self) -> Connections | None:
        """Between the streams, the same in all layers; None: there is one stream."""
        return self.layers[0].residual.connections

    @cached_property
    def matrix_layers(self) -> tuple[int, ...]:
        """The layers whose mixer has experts of its own."""
        return tuple(i for i, mixer in enumerate(self.mixers) if mixer.experts is not None)

    @cached_property
    def matrix_experts(self) -> MatrixExperts | None:
        """Those experts, the same in all of these layers; None: there are none."""
        return self.mixers[self.matrix_layers[0]].experts if self.matrix_layers else None

    def matrix_set(self, layer: int) -> int:
        """The number of the record set of a mixer's own experts; that of a layer's routed experts is the layer's."""
        return self.num_hidden_layers + layer

    @property
    def record_sets(self) -> tuple[int, ...]:
        """The numbers of all record sets: the experts of one kind in a layer."""
        return *self.moe_layers, *map(self.matrix_set, self.matrix_layers)

    def matrices_of(self, number: int) -> int:
        """The matrices of an expert of a record set."""
        return self.experts.matrices if number < self.num_hidden_layers else 1

    def router_of(self, number: int) -> Router:
        """What chooses among the experts of a record set."""
        if number < self.num_hidden_layers:
            return self.experts.router
        assert self.matrix_experts is not None
        return self.matrix_experts.router

    def passes_of(self, number: int) -> int:
        """How often a token passes the layer of a record set."""
        return self.layers[number % self.num_hidden_layers].passes

    @property
    def num_experts(self) -> int:
        return self.experts.router.experts

    @property
    def num_experts_per_tok(self) -> int:
        return self.experts.router.top_k

    @property
    def expert_size(self) -> int:
        """Values that a routed expert takes and makes."""
        return self.experts.latent or self.hidden_size

    @property
    def moe_intermediate_size(self) -> int:
        return self.experts.width

    @cached_property
    def attention(self) -> Attending | None:
        """The first layer's that has attention."""
        return next((mixer.attention for mixer in self.mixers if mixer.attention is not None), None)

    @property
    def num_attention_heads(self) -> int:
        return self.attention.heads if self.attention else 0

    @property
    def num_key_value_heads(self) -> int:
        return self.attention.kv_heads if self.attention else 0

    @property
    def head_dim(self) -> int:
        return self.attention.head_dim if self.attention else 0

    @property
    def kv_bits(self) -> int | None:
        """Bits to which caches round keys and values; None: unchanged, or there are none."""
        return next((mixer.kv_bits for mixer in self.mixers if mixer.rounds_keys), None)

    @property
    def rounds_keys(self) -> bool:
        """Whether a cache of some layer can round keys and values."""
        return any(mixer.rounds_keys for mixer in self.mixers)

    def with_kv_bits(self, kv_bits: Literal[8] | None) -> "ModelArgs":
        """The same model with keys and values kept in `kv_bits` bits; None: unchanged."""
        layers = (replace(layer, mixer=layer.mixer.with_kv_bits(kv_bits)) for layer in self.layers)
        return replace(self, layers=tuple(layers))

    @property
    def head(self) -> "ModelArgs | None":
        """A draft head as a model of one layer, like the last one with attention but of one stream; None: none is known
        of the family."""
        if FAMILIES[self.model_type].head is None or not self.moe_layers:
            return None
        layers = [layer for layer in self.layers if layer.mixer.attention is not None and layer.mixer.has_own_choice]
        alike = [layer for layer in layers if isinstance(layer.feed_forward, Experts)]
        if not alike:
            return None
        return replace(self, layers=(replace(alike[-1], residual=replace(alike[-1].residual, connections=None)),))

    @cached_property
    def ngrams(self) -> Mapping[int, NGrams]:
        """The n-grams of each layer that has some."""
        return {i: mixer.ngrams for i, mixer in enumerate(self.mixers) if mixer.ngrams is not None}

    @cached_property
    def widths(self) -> frozenset[int]:
        """The widths of the rows that operations take."""
        return frozenset({self.hidden_size}.union(*(layer.widths for layer in set(self.layers))))

    @classmethod
    def from_dict(cls, config: JsonObject, generation_config: JsonObject | None = None) -> "ModelArgs":
        """Args:
            config: a parsed `config.json`.
            generation_config: a parsed `generation_config.json`; its `eos_token_id` wins.

        Raises:
            ConfigError: a field is missing, has the wrong type, or a value not implemented.
        """
        read = Fields(config)
        text = read.optional("text_config", Mapping, None)
        body = Fields(text) if text is not None else read
        model_type = family_name(config)
        args = cls(
            model_type=model_type,
            quantization=of_packed(config),
            eos_token_ids=_eos_token_ids(generation_config or {}, config, text or {}),
            **FAMILIES[model_type].read(body),
        )
        check_args(args)
        return args

    @classmethod
    def from_file(cls, path: str | Path, config: JsonObject | None = None) -> "ModelArgs":
        """Reads `config.json` (and `generation_config.json`, when there is one) of a model directory.

        Args:
            config: replaces what `config.json` says.
        """
        generation = Path(path) / "generation_config.json"
        read = read_json(Path(path) / "config.json") if config is None else config
        return cls.from_dict(read, read_json(generation) if generation.exists() else None)

    @classmethod
    def from_variant(cls, name: str) -> "ModelArgs":
        """The named configuration that ships with the package. `variants()` lists the names; their case is ignored."""
        known = variants()
        if name.lower() not in known:
            meant = did_you_mean(name.lower(), known) or f"; there are: {', '.join(known)}"
            raise ConfigError(f"no variant {name!r}{meant}")
        return cls.from_dict(read_json(directory("configs") / f"{name.lower()}.json"))


def family_name(config: JsonObject) -> str:
    """The `model_type` that a config is read by: of its text part where that runs, else of the whole.

    Raises:
        ConfigError: neither runs.
    """
    read = Fields(config)
    outer = read.required("model_type", str)
    text = Fields(read.optional("text_config", Mapping, {}))
    for name in (text.optional("model_type", str, outer), outer):
        if name.removesuffix("_text") in FAMILIES:
            return name.removesuffix("_text")
    known = "; `moeflux models` lists models that are"
    if re.search("expert|moe", str(config), re.IGNORECASE):
        known = did_you_mean(outer, FAMILIES) or known
    else:
        known = f": it has no experts, and only Mixture-of-Experts models run here{known}"
    raise ConfigError(f"model_type {reprlib.repr(outer)} is not supported{known}")


def variants() -> list[str]:
    """Names accepted by `ModelArgs.from_variant`."""
    return sorted(file.stem for file in directory("configs").glob("*.json"))


def _eos_token_ids(*configs: JsonObject) -> tuple[int, ...]:
    """The first config that names `eos_token_id` decides; generation_config.json comes first."""
    for config in configs:
        value = config.get("eos_token_id")
        if value is not None:
            ids = value if isinstance(value, list) else [value]
            if not all(type(i) is int and i >= 0 for i in ids):
                raise ConfigError(f"config field 'eos_token_id' is {value!r}; expected token ids")
            return tuple(ids)
    return ()


def check_args(args: ModelArgs) -> None:
    """Checks conditions between fields. Raises ConfigError."""
    if len({layer.residual for layer in args.layers}) > 1:
        raise ConfigError("layers differ in their residuals, which is not implemented")
    if not args.moe_layers:
        raise ConfigError(f"none of the {args.num_hidden_layers} layers has experts")
    for i, layer in enumerate(args.layers):
        own = layer.feed_forward
        if isinstance(own, Experts) and own != args.experts and _plain(own) != _plain(args.experts):
            raise ConfigError(f"layer {i} has other experts than layer {args.moe_layers[0]}, which is not implemented")
    for mixer in dict.fromkeys(args.mixers):
        mixer.check()
    check_experts(args.experts, args.hidden_size)


def _plain(experts: Experts) -> Experts:
    """Without what layers may differ in: the limits of activations, and whether experts stand in a table."""
    shared = experts.shared and replace(experts.shared, activation=SILU)
    router = replace(experts.router, table=None, correction_bias=False)
    return replace(experts, activation=SILU, shared=shared, router=router)

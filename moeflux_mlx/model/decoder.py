"""The decoder: one class for every family, built from `ModelArgs`. mx.array in, mx.array out."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from itertools import pairwise
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ..errors import RequestError
from ..experts.routing import RoutedExpertsCall
from ..kinds import Delta, GroupedQuery, Latent, Mixer
from ..ops import backend
from ..ops.backend import Array
from ..ops.tiles import MAX_TOKENS
from ..spec import ModelArgs
from ..state.cache import Cache, Traced, make_cache
from .attention import Attention
from .compiled import DecodeStep
from .delta import GatedDeltaNet
from .latent import MLA
from .layers import MLP, Embedding, Linear, RMSNorm
from .moe import MoE


def check_vocabulary(tokens: np.ndarray | int, vocab_size: int) -> None:
    """Raises RequestError: a token is outside the vocabulary."""
    low, high = (tokens, tokens) if isinstance(tokens, int) else (int(tokens.min()), int(tokens.max()))
    if low < 0 or high >= vocab_size:
        raise RequestError(f"token {low if low < 0 else high} is outside the vocabulary of {vocab_size}")


def mixer_of(mixer: Mixer, args: ModelArgs, split_latent: bool) -> tuple[str, nn.Module]:
    """The module that mixes tokens as `mixer` says, and its name in checkpoints."""
    match mixer:
        case GroupedQuery():
            return "self_attn", Attention(mixer, args.hidden_size, args.rms_norm_eps)
        case Latent():
            return "self_attn", MLA(mixer, args.hidden_size, split_latent)
        case Delta():
            return "linear_attn", GatedDeltaNet(mixer, args.hidden_size, args.rms_norm_eps)


class DecoderLayer(nn.Module):
    """h = x + mixer(norm(x)); out = h + mlp(norm(h)). The MLP adds h itself: the MoE combine includes it."""

    def __init__(self, args: ModelArgs, layer: int, experts: RoutedExpertsCall | None, split_latent: bool):
        super().__init__()
        self._mixer_name, mixer = mixer_of(args.mixers[layer], args, split_latent)
        setattr(self, self._mixer_name, mixer)
        is_moe = layer in args.moe_layers
        self.mlp = MoE(args, layer, experts) if is_moe else DenseMLP(args.hidden_size, args.intermediate_size)
        self.input_layernorm = RMSNorm(args.hidden_size, args.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(args.hidden_size, args.rms_norm_eps)

    def __call__(self, x: Array, cache: Any) -> Array:
        h = x + self[self._mixer_name](self.input_layernorm(x), cache)
        return self.mlp(self.post_attention_layernorm(h), h)


class DenseMLP(MLP):
    """The first layers of DeepSeek-V3: every token, one wide MLP."""

    def __call__(self, x: Array, residual: Array) -> Array:  # type: ignore[override]
        out = residual + super().__call__(x)
        if x.shape[1] > MAX_TOKENS:
            # Layers of experts are waited for to read the routing. Without a wait here the attention of all
            # layers before the first of them would be in memory together.
            backend.finish(out)
        return out


class Decoder(nn.Module):
    """Embedding, layers and final norm: the part that checkpoints call `model`."""

    def __init__(self, args: ModelArgs, experts: RoutedExpertsCall | None, split_latent: bool):
        super().__init__()
        self.embed_tokens = Embedding(args.vocab_size, args.hidden_size)
        self.layers: list[Any] = [DecoderLayer(args, i, experts, split_latent) for i in range(args.num_hidden_layers)]
        self.norm = RMSNorm(args.hidden_size, args.rms_norm_eps)
        for layer, following in pairwise(self.layers[i] for i in args.moe_layers):
            layer.mlp.foresee(following.mlp, following.post_attention_layernorm)


class Model(nn.Module):
    """A language model: `model(tokens [B, L], cache) -> logits [B, L, vocab_size]`.

    Args:
        args: the hyper-parameters.
        experts: who reads and computes routed experts; None for a model that is made for its shapes only.
        split_latent: the checkpoint holds MLA's `embed_q` and `unembed_out` instead of `kv_b_proj`.

    Attributes:
        args: the hyper-parameters.
        experts: the source of routed experts, an `ExpertLoader`.
    """

    def __init__(self, args: ModelArgs, experts: RoutedExpertsCall | None, split_latent: bool = False):
        super().__init__()
        self.args = args
        self.model_type = args.model_type
        self.model = Decoder(args, experts, split_latent)
        self.lm_head = Linear(args.hidden_size, args.vocab_size)
        self.suits_cpu = backend.takes_widths(args.widths)
        self.experts = None if experts is None else experts.source
        self.decode_step: DecodeStep | None = None
        if self.experts is not None and self.experts.is_resident:
            self.decode_step = DecodeStep(self._step)
            self.experts.at_close(self.decode_step.forget)

    def __call__(self, tokens: mx.array, cache: list[Cache] | None = None) -> mx.array:
        """Runs `tokens` after whatever `cache` (from `make_cache`) has seen, and updates it.

        Without a cache the tokens stand alone.

        Args:
            tokens: integers [B, L] of the vocabulary. On a GPU a single token is believed: to look would be to wait.

        Raises:
            RequestError: tokens of another shape or outside the vocabulary, or not one cache for each layer.
            ExpertIOError: experts cannot be read, the loader is closed, or this process was forked.
        """
        return self._in_turn(self._logits, tokens, cache)

    def hidden(self, tokens: mx.array, cache: list[Cache] | None = None) -> mx.array:
        """The normed hidden states [B, L, hidden_size] that `lm_head` turns into logits."""
        return self._in_turn(self.run, tokens, cache)

    def check_process(self) -> None:
        """Raises ExpertIOError: this process was forked from the one that loaded the model."""
        if self.experts is not None:
            self.experts.check_process()

    def _in_turn(
        self, compute: Callable[[mx.array, list[Cache]], mx.array], tokens: mx.array, cache: list[Cache] | None
    ) -> mx.array:
        """`compute`, one thread at a time where threads share the memory of experts."""
        cache = self.make_cache() if cache is None else cache
        count = getattr(tokens, "size", 0)  # `_check` may still refuse them
        with nullcontext(False) if self.experts is None else self.experts.turn(count) as shared:
            self._check(tokens, cache)
            out = backend.leave(compute(tokens, cache))
            if shared:
                mx.eval(out, [layer.state for layer in cache])
        return out

    def _check(self, tokens: mx.array, cache: list[Cache]) -> None:
        if not isinstance(tokens, mx.array) or tokens.ndim != 2 or not mx.issubdtype(tokens.dtype, mx.integer):
            form = f"{tokens.dtype} {tokens.shape}" if isinstance(tokens, mx.array) else type(tokens).__name__
            raise RequestError(f"tokens are {form}; give an mx.array of integers [B, L]")
        if tokens.size == 0:
            raise RequestError(f"tokens are {tokens.shape}; give at least one")
        if len(cache) != len(self.layers):
            raise RequestError(f"{len(cache)} caches for {len(self.layers)} layers; use model.make_cache()")
        if tokens.size > 1 or not backend.has_kernels():
            check_vocabulary(cast(Any, tokens.item()) if tokens.size == 1 else np.array(tokens), self.args.vocab_size)

    def _logits(self, tokens: mx.array, cache: list[Cache]) -> mx.array:
        if self.decode_step is not None and self.decode_step.takes(tokens, cache):
            return self.decode_step(tokens, cache)
        return self._step(tokens, cache)

    def _step(self, tokens: mx.array, cache: Sequence[Cache | Traced]) -> mx.array:
        """Also what is compiled."""
        return self.lm_head(self.run(tokens, cache))

    def run(self, tokens: mx.array, cache: Sequence[Any]) -> Any:
        """`hidden` without taking a turn, on the CPU as a numpy array."""
        if self.suits_cpu:
            tokens = backend.enter(tokens, self.activation_dtype)
        h = self.model.embed_tokens(tokens)
        for layer, layer_cache in zip(self.layers, cache, strict=True):
            h = layer(h, layer_cache)
        return self.model.norm(h)

    @property
    def layers(self) -> list[Any]:
        return self.model.layers

    @property
    def activation_dtype(self) -> mx.Dtype:
        """The dtype that the model computes in and that its attention and convolution caches hold."""
        return self.model.norm.weight.dtype

    def make_cache(self) -> list[Cache]:
        """An empty cache for each layer."""
        return [make_cache(mixer) for mixer in self.args.mixers]

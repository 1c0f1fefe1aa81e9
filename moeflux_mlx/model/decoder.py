"""The decoder: one class for every family, built from `ModelArgs`. mx.array in, mx.array out."""

from collections.abc import Callable
from contextlib import nullcontext
from itertools import pairwise
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ..errors import RequestError
from ..ops import cpu, kernels
from ..spec import LINEAR, ModelArgs
from ..state.cache import Cache, KVCache, LatentCache, RecurrentCache
from .attention import Attention
from .compiled import DecodeStep
from .delta import GatedDeltaNet
from .latent import MLA
from .linear import MLP, Embedding, Linear, RMSNorm
from .moe import MoE, RoutedExpertsCall


def check_vocabulary(tokens: np.ndarray | int, vocab_size: int) -> None:
    """Raises RequestError: a token is outside the vocabulary."""
    low, high = (tokens, tokens) if isinstance(tokens, int) else (int(tokens.min()), int(tokens.max()))
    if low < 0 or high >= vocab_size:
        raise RequestError(f"token {low if low < 0 else high} is outside the vocabulary of {vocab_size}")


class DecoderLayer(nn.Module):
    """h = x + mixer(norm(x)); out = h + mlp(norm(h)). The MLP adds h itself: the MoE combine includes it."""

    def __init__(self, args: ModelArgs, layer: int, experts: RoutedExpertsCall | None, split_latent: bool):
        super().__init__()
        self.is_linear = args.layer_types[layer] == LINEAR
        self.is_latent = bool(args.kv_lora_rank)
        if self.is_linear:
            self.linear_attn = GatedDeltaNet(args)
        else:
            self.self_attn = MLA(args, split_latent) if self.is_latent else Attention(args)
        is_moe = layer in args.moe_layers
        self.mlp = MoE(args, layer, experts) if is_moe else DenseMLP(args.hidden_size, args.intermediate_size)
        self.input_layernorm = RMSNorm(args.hidden_size, args.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(args.hidden_size, args.rms_norm_eps)

    def __call__(self, x: mx.array, cache: Cache) -> mx.array:
        mixer: nn.Module = self.linear_attn if self.is_linear else self.self_attn
        h = x + mixer(self.input_layernorm(x), cache)
        normed = self.post_attention_layernorm(h)
        return self.mlp(normed, h)

    def make_cache(self) -> Cache:
        if self.is_linear:
            return RecurrentCache()
        return LatentCache() if self.is_latent else KVCache()


class DenseMLP(MLP):
    """The first layers of DeepSeek-V3: every token, one wide MLP."""

    def __call__(self, x: mx.array, h_mid: mx.array) -> mx.array:  # type: ignore[override]
        out = h_mid + super().__call__(x)
        if x.shape[1] > kernels.MAX_TOKENS and not cpu.takes(out):
            # Layers of experts are waited for to read the routing. Without a wait here the attention of all
            # layers before the first of them would be in memory together.
            mx.eval(out)
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
        experts: the call behind which routed experts are read and computed; None for a model that never runs.
        split_latent: the checkpoint holds MLA's `embed_q` and `unembed_out` instead of `kv_b_proj`.
    """

    def __init__(self, args: ModelArgs, experts: RoutedExpertsCall | None, split_latent: bool = False):
        super().__init__()
        self.args = args
        self.model_type = args.model_type
        self.model = Decoder(args, experts, split_latent)
        self.lm_head = Linear(args.hidden_size, args.vocab_size)
        self.suits_cpu = cpu.suits(args)
        self.decode_step: DecodeStep | None = None  # set when every expert is in a GPU's memory
        self.experts: Any = None  # the `ExpertLoader`, set by whoever loads the model

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
        with nullcontext(False) if self.experts is None else self.experts.turn() as shared:
            self._check(tokens, cache)
            out = cpu.leave(compute(tokens, cache))
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
        if tokens.size > 1 or not kernels.has_kernels():
            check_vocabulary(cast(Any, tokens.item()) if tokens.size == 1 else np.array(tokens), self.args.vocab_size)

    def _logits(self, tokens: mx.array, cache: list[Cache]) -> mx.array:
        if self.decode_step is not None and self.decode_step.takes(tokens, cache):
            return self.decode_step(tokens, cache)
        return self.lm_head(self.run(tokens, cache))

    def run(self, tokens: mx.array, cache: list[Cache]) -> mx.array:
        """`hidden` without taking a turn, on the CPU as a numpy array."""
        if self.suits_cpu:
            tokens = cpu.enter(tokens, self.model.norm.weight.dtype)
        h = self.model.embed_tokens(tokens)
        for layer, layer_cache in zip(self.layers, cache, strict=True):
            h = layer(h, layer_cache)
        return self.model.norm(h)

    @property
    def layers(self) -> list[Any]:
        return self.model.layers

    def make_cache(self) -> list[Cache]:
        return [layer.make_cache() for layer in self.layers]

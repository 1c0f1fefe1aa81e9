"""The decoder: one class for every family, built from `ModelArgs`. mx.array in, mx.array out."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import pairwise
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ..errors import RequestError
from ..experts.routing import Report, RoutedExpertsCall, ignore_report
from ..experts.source import ExpertLoader
from ..kinds import Delta, Dense, Experts, FeedForward, GroupedQuery, Latent, Mixer
from ..ops import backend, gpu_time, native
from ..ops.backend import Array
from ..ops.limits import within_limits
from ..ops.tiles import CODE, MAX_TOKENS, Tiles, using
from ..spec import ModelArgs
from ..state.cache import Cache, make_cache
from ..state.traced import Traced
from .attention import Attention
from .compiled import DecodeStep
from .delta import GatedDeltaNet
from .latent import MLA
from .layers import MLP, Embedding, Linear, RMSNorm
from .moe import MoE
from .span import PromptSizes, Span
from .step import SequenceRows, Step, checked_rows
from .tokens import check_vocabulary

MIXER_SHARE = 0.3  # of a layer's work, for whoever watches: the experts take the rest


def mixer_of(mixer: Mixer, args: ModelArgs, split_latent: bool) -> tuple[str, nn.Module]:
    """The module that mixes tokens as `mixer` says, and its name in checkpoints."""
    match mixer:
        case GroupedQuery():
            return "self_attn", Attention(mixer, args.hidden_size, args.rms_norm_eps)
        case Latent():
            return "self_attn", MLA(mixer, args.hidden_size, split_latent)
        case Delta():
            return "linear_attn", GatedDeltaNet(mixer, args.hidden_size, args.rms_norm_eps)


def feed_forward_of(
    part: FeedForward, hidden_size: int, layer: int, experts: RoutedExpertsCall | None
) -> "MoE | DenseMLP":
    """The module of a layer's feed-forward part."""
    match part:
        case Experts():
            return MoE(part, hidden_size, layer, experts)
        case Dense():
            return DenseMLP(hidden_size, part.width, part.activation)


class DecoderLayer(nn.Module):
    """h = x + mixer(norm(x)); out = h + mlp(norm(h)). Mixer and MLP add x and h themselves: their last products do."""

    def __init__(self, args: ModelArgs, layer: int, experts: RoutedExpertsCall | None, split_latent: bool):
        super().__init__()
        spec = args.layers[layer]
        self._mixer_name, mixer = mixer_of(spec.mixer, args, split_latent)
        setattr(self, self._mixer_name, mixer)
        self.mlp = feed_forward_of(spec.feed_forward, args.hidden_size, layer, experts)
        self.input_layernorm = RMSNorm(args.hidden_size, args.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(args.hidden_size, args.rms_norm_eps)
        self._step: Callable[[bool], DecodeStep] | None = None

    def compile(self, experts: ExpertLoader) -> None:
        """What a single token needs before its experts becomes one graph, which is held until `experts` close."""
        if isinstance(self.mlp, MoE):
            steps = [DecodeStep(partial(self._choose, predict)) for predict in (False, True)]
            for step in steps:
                experts.at_close(step.forget)
            self._step = lambda predict: steps[predict]

    def __call__(self, x: Array, cache: Any) -> Array:
        if self._step is not None and isinstance(x, mx.array) and DecodeStep.takes(x, [cache]):
            step = self._step(self.mlp.should_predict(1))
            return self.mlp.run_experts(step(x, [cache]))
        return self.mlp.forward(self._mixed(x, cache), self.post_attention_layernorm)

    def _choose(self, predict: bool, x: mx.array, caches: Sequence[Traced]) -> list[mx.array]:
        """What is compiled."""
        return self.mlp.choose(self._mixed(x, caches[0]), self.post_attention_layernorm, predict)

    def _mixed(self, x: Array, cache: Any) -> Array:
        return self[self._mixer_name](x, self.input_layernorm, cache)

    def pass_span(self, x: Array, cache: Cache, span: Span, report: Report) -> Array:
        """The layer over a span: its mixer block by block, its experts over all rows.

        At most two blocks are under way: what they are made of need not be in memory together with the others'.
        """
        parts: list[tuple[Array, ...]] = []
        cache.expect(span.length)
        for start, end in span.blocks(cache):
            h = self._mixed(backend.contiguous(x[:, start:end]), cache)
            part = self.mlp.prepare(h, self.post_attention_layernorm)  # up to where rows of different tokens meet
            backend.start(*part, *cache.state[:2])
            span.passed(span.layer, end, cache)
            if parts:
                backend.finish(parts[-1][0])
            parts.append(part)
            report(MIXER_SHARE * start / span.length)
        joined = backend.join(parts, axis=1)
        return self.mlp.finish(joined, lambda share: report(MIXER_SHARE + (1 - MIXER_SHARE) * share))


class DenseMLP(MLP):
    """The first layers of DeepSeek-V3: every token, one wide MLP."""

    def forward(self, residual: Array, norm: RMSNorm) -> Array:
        """`residual` [B, L, D] and what the MLP makes of it, normed."""
        return self(residual, norm=norm, residual=residual)

    def prepare(self, residual: Array, norm: RMSNorm) -> tuple[Array, ...]:
        """All of it."""
        return (self.forward(residual, norm),)

    def finish(self, parts: Sequence[Array], report: Report = ignore_report) -> Array:
        """What `prepare` gave."""
        return parts[0]


class Decoder(nn.Module):
    """Embedding, layers and final norm: the part that checkpoints call `model`."""

    def __init__(self, args: ModelArgs, experts: RoutedExpertsCall | None, split_latent: bool):
        super().__init__()
        self.embed_tokens = Embedding(args.vocab_size, args.hidden_size)
        self.layers: list[Any] = [DecoderLayer(args, i, experts, split_latent) for i in range(args.num_hidden_layers)]
        self.norm = RMSNorm(args.hidden_size, args.rms_norm_eps)
        for layer, following in pairwise(self.layers[i] for i in args.moe_layers):
            layer.mlp.set_next(following.mlp, following.post_attention_layernorm)


class Model(nn.Module):
    """A language model: `model(tokens [B, L], cache) -> logits [B, L, vocab_size]`.

    Args:
        args: the hyper-parameters.
        experts: who reads and computes routed experts; None for a model that is made for its shapes only.
        split_latent: the checkpoint holds MLA's `embed_q` and `unembed_out` instead of `kv_b_proj`.
        sizes: how prompts are cut.
        tiles: of the kernels, in everything that the model computes.
        cpu_activations: bits to which the native products round activations.

    Attributes:
        args: the hyper-parameters.
        sizes: how prompts are cut.
        tiles: of the kernels.
        cpu_activations: as given.
        experts: the source of routed experts, an `ExpertLoader`.
    """

    def __init__(
        self,
        args: ModelArgs,
        experts: RoutedExpertsCall | None,
        split_latent: bool = False,
        sizes: PromptSizes = PromptSizes(),  # noqa: B008
        tiles: Tiles = CODE,
        cpu_activations: int = native.EXACT,
    ):
        super().__init__()
        self.args, self.sizes, self.tiles, self.cpu_activations = args, sizes, tiles, cpu_activations
        self.model_type = args.model_type
        self.model = Decoder(args, experts, split_latent)
        self.lm_head = Linear(args.hidden_size, args.vocab_size)
        self.suits_cpu = backend.takes_widths(args.widths)
        self.experts = None if experts is None else experts.source
        self.decode_step: DecodeStep | None = None
        if self.experts is not None and self.experts.is_resident:
            self.decode_step = DecodeStep(lambda tokens, cache: [self._step(tokens, cache)])
            self.experts.at_close(self.decode_step.forget)
        elif self.experts is not None and backend.has_kernels():
            for layer in self.layers:
                layer.compile(self.experts)

    def __call__(self, tokens: mx.array, cache: list[Cache] | None = None) -> mx.array:
        """Runs `tokens` after whatever `cache` (from `make_cache`) has seen, and updates it.

        Many tokens in one call are one span: they go through the model layer by layer, and each expert is read once for
        all of them. Without a cache the tokens stand alone.

        Args:
            tokens: integers [B, L] of the vocabulary. On a GPU a single token is believed: to look would be to wait.

        Raises:
            RequestError: tokens of another shape or outside the vocabulary, or not one cache for each layer.
            ExpertIOError: experts cannot be read, the loader is closed, or this process was forked.
            DeviceError: memory or the GPU's time is at an end; caches may hold anything.
        """
        return self._in_turn(self._logits, tokens, cache)

    def hidden(self, tokens: mx.array, cache: list[Cache] | None = None) -> mx.array:
        """As calling the model, but the normed hidden states [B, L, hidden_size] that `lm_head` makes logits of."""
        return self._in_turn(self.run, tokens, cache)

    def step(self, sequences: Sequence[SequenceRows]) -> Step:
        """Runs the next tokens of several sequences, at most `MAX_ROWS` together; the logits of each.

        Sequence after sequence and token after token is computed by a call of its own. So each row has the bits that
        it has alone, whatever the other rows are. If a row cannot be computed, all caches are as they were before.

        Args:
            sequences: each with caches of its own, which may be empty, and with 1 to `MAX_OF_SEQUENCE` tokens in order.

        Raises:
            RequestError: too many rows, or too many of one sequence, none, a cache that is in two sequences, and
                whatever calling the model refuses; no cache has changed.
            ExpertIOError, DeviceError: as calling the model does.
        """
        for rows in sequences:
            self.check_cache(rows.cache)
        step = Step(checked_rows(sequences, self.args.vocab_size))
        try:
            for token, cache in step.rows():
                step.add(self(token, cache)[:, -1])
        except BaseException:
            step.undo()
            raise
        return step

    def check_process(self) -> None:
        """Raises ExpertIOError: this process was forked from the one that loaded the model."""
        if self.experts is not None:
            self.experts.check_process()

    def _in_turn(
        self, compute: Callable[[mx.array, list[Cache]], mx.array], tokens: mx.array, cache: list[Cache] | None
    ) -> mx.array:
        cache = self.make_cache() if cache is None else cache
        with self._turn(tokens, cache) as shared:
            out = backend.leave(compute(tokens, cache))
            if shared:
                mx.eval(out, [layer.state for layer in cache])
        return out

    @contextmanager
    def _turn(self, tokens: mx.array, cache: list[Cache]) -> Iterator[bool]:
        """One thread at a time where threads share the memory of experts; then tells that results must be evaluated."""
        count = getattr(tokens, "size", 0)  # `_check` may still refuse them
        turn = nullcontext(False) if self.experts is None else self.experts.turn(count)
        with within_limits(), native.activations(self.cpu_activations), turn as shared:
            self._check(tokens, cache)
            with using(self.tiles):
                yield shared

    def _check(self, tokens: mx.array, cache: list[Cache]) -> None:
        if not isinstance(tokens, mx.array) or tokens.ndim != 2 or not mx.issubdtype(tokens.dtype, mx.integer):
            form = f"{tokens.dtype} {tokens.shape}" if isinstance(tokens, mx.array) else type(tokens).__name__
            raise RequestError(f"tokens are {form}; give an mx.array of integers [B, L]")
        if tokens.size == 0:
            raise RequestError(f"tokens are {tokens.shape}; give at least one")
        self.check_cache(cache)
        if tokens.size > 1 or not backend.has_kernels():
            check_vocabulary(cast(Any, tokens.item()) if tokens.size == 1 else np.array(tokens), self.args.vocab_size)

    def check_cache(self, cache: object) -> None:
        """Raises RequestError: it is not a list with a cache for each layer."""
        if isinstance(cache, Sequence) and len(cache) == len(self.layers):
            return
        form = f"{len(cache)} caches" if isinstance(cache, Sequence) else f"a cache of type {type(cache).__name__}"
        raise RequestError(f"{form} for {len(self.layers)} layers; use model.make_cache()")

    def _logits(self, tokens: mx.array, cache: list[Cache]) -> mx.array:
        if self.decode_step is not None and self.decode_step.takes(tokens, cache):
            return self.decode_step(tokens, cache)[0]
        return self._step(tokens, cache)

    def _step(self, tokens: mx.array, cache: Sequence[Cache | Traced]) -> mx.array:
        """Also what is compiled."""
        hidden = self.run(tokens, cache)
        count, most = hidden.shape[1], gpu_time.rows_at_once(*self.lm_head.shape)
        if most is None or count <= most:
            return self.lm_head(hidden)
        return mx.concatenate([self.lm_head(hidden[:, at : at + most]) for at in range(0, count, most)], axis=1)

    def run(self, tokens: mx.array, cache: Sequence[Any]) -> Any:
        """The normed hidden states [B, L, hidden_size] before `lm_head`, on the CPU as a numpy array."""
        if tokens.shape[1] > MAX_TOKENS:
            span = Span(tokens, cache[0].offset, self.sizes.block)
            try:
                self._through_layers(span, cache, ignore_report)
            except BaseException:
                span.drop(cache)  # else layers would have seen tokens that others have not
                raise
            return self.model.norm(span.hidden)
        h = self._embedded(tokens)
        for layer, layer_cache in zip(self.layers, cache, strict=True):
            h = layer(h, layer_cache)
        return self.model.norm(h)

    def advance(self, span: Span, cache: list[Cache], report: Report = ignore_report) -> mx.array:
        """Takes a span through the layers that it has not passed; the logits [B, vocab_size] of its last token.

        Args:
            span: tokens after what `cache` has absorbed; it may have come from an earlier call that was stopped.
            cache: from `make_cache`.
            report: told the share of the span's work that is done, after each block and wave. What it raises, like
                any other exception, leaves the span between two layers: `advance` goes on with it,
                `span.drop` undoes it.

        Raises:
            RequestError, ExpertIOError, DeviceError: as calling the model does.
        """
        with self._turn(span.tokens, cache):
            self._through_layers(span, cache, report)
            last = backend.contiguous(span.hidden[:, -1:])
            logits = backend.leave(self.lm_head(self.model.norm(last)))
            mx.eval(logits)
        return logits[:, 0]

    def _through_layers(self, span: Span, cache: Sequence[Any], report: Report) -> None:
        count = len(self.layers)
        if span.hidden is None:
            self._expect(span)
            span.reached = 0, self._embedded(span.tokens)
        while span.layer < count:
            i = span.layer
            span.begin(i, cache[i])
            try:
                h = self.layers[i].pass_span(
                    span.hidden, cache[i], span, lambda share, done=i: report((done + share) / count)
                )
                backend.start(h)
            except BaseException:
                span.undo(i, cache[i])
                raise
            span.reached = i + 1, h
            backend.give_back(h)

    def _expect(self, span: Span) -> None:
        """Lets the experts of the first layer that has any be read while what is before them is computed."""
        first = self.layers[self.args.moe_layers[0]].mlp if self.args.moe_layers else None
        if first is not None and first.experts is not None:
            first.experts.expect(first.layer, span.tokens.size)

    def _embedded(self, tokens: mx.array) -> Any:
        """[B, L, hidden_size], on the CPU as a numpy array."""
        h = self.model.embed_tokens(backend.enter(tokens, self.activation_dtype) if self.suits_cpu else tokens)
        return h.astype(self.activation_dtype) if isinstance(h, mx.array) else h  # mxfp4 says no dtype of its own

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

"""A layer: its mixer and its feed-forward part, over a few tokens, the rows of a step, or a span."""

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..caches.layer_cache import LayerCache
from ..caches.traced import Traced
from ..experts.routing import Report, RoutedExpertsCall
from ..experts.source import ExpertLoader
from ..kinds import Dense, Experts
from ..layers import MixerModule, Output, RMSNorm
from ..mixers.registry import module_of
from ..ops import backend
from ..ops.backend import Array
from ..ops.seen import Chosen
from ..spec import ModelArgs
from .compiled import DecodeStep, by_prediction
from .moe import BeforeExperts, DenseMLP, MoE, NoMLP, moe_of
from .span import MIXER_SHARE, Span
from .streams import StreamsLayer


def feed_forward_of(args: ModelArgs, layer: int, experts: RoutedExpertsCall | None) -> MoE | DenseMLP | NoMLP:
    """The module of a layer's feed-forward part."""
    part, around = args.layers[layer].feed_forward, (args.layers[layer].residual, args.rms_norm_eps)
    match part:
        case Experts():
            return moe_of(part, args.hidden_size, layer, experts, *around)
        case Dense():
            return DenseMLP(part, args.hidden_size, *around)
        case None:
            return NoMLP()


def layer_of(
    args: ModelArgs, layer: int, experts: RoutedExpertsCall | None, split_latent: bool
) -> "DecoderLayer | StreamsLayer":
    """The module of a layer, chosen by its residual."""
    spec, sizes = args.layers[layer], (args.hidden_size, args.rms_norm_eps)
    if spec.residual.connections is None:
        return DecoderLayer(args, layer, experts, split_latent)
    mlp = feed_forward_of(args, layer, experts)
    mixer = module_of(spec.mixer, *sizes, split_latent)
    return StreamsLayer(spec.mixer.module_name, mixer, mlp, spec.residual.connections, *sizes, layer)


class DecoderLayer(nn.Module):
    """h = x + mixer(norm(x)); out = h + mlp(norm(h)). Mixer and MLP add x and h themselves: their last products do.

    A layer without a feed-forward part is h. With `Residual.output_norms` norms stand between:
    h = x + norm(mixer(norm(x))), and the MLP has its own (`Output`).
    """

    def __init__(self, args: ModelArgs, layer: int, experts: RoutedExpertsCall | None, split_latent: bool):
        super().__init__()
        spec = args.layers[layer]
        self._mixer_name = spec.mixer.module_name
        setattr(self, self._mixer_name, module_of(spec.mixer, args.hidden_size, args.rms_norm_eps, split_latent))
        self.mlp = feed_forward_of(args, layer, experts)
        if spec.residual.output_norms:
            self.mixer_output = Output(args.hidden_size, args.rms_norm_eps)
        self.input_layernorm = RMSNorm(args.hidden_size, args.rms_norm_eps)
        if spec.feed_forward is not None:
            self.post_attention_layernorm = RMSNorm(args.hidden_size, args.rms_norm_eps)
        self._step: Callable[[bool], DecodeStep] | None = None

    def compile(self, experts: ExpertLoader) -> None:
        """Compiles the part before the experts of a single token into one graph, which is kept until `experts`
        close.
        """
        if isinstance(self.mlp, MoE):
            self._step = by_prediction(self._choose, experts)

    def __call__(self, x: Array, cache: Any, chosen: Chosen | None = None, tokens: Any = None) -> Array:
        """`chosen`: the choice of the last layer with an indexer for these tokens; None before the first layer."""
        if self._step is not None and isinstance(x, mx.array) and DecodeStep.takes(x, [[cache]]):
            step, chosen = self._step(self.mlp.should_predict(1)), chosen or Chosen()
            chosen.positions, *parts = step(x, [[cache]], *([] if chosen.positions is None else [chosen.positions]))
            return self.mlp.run_experts(BeforeExperts(*parts))
        return self.mlp.forward(self._mixed(x, cache, chosen), self._second_norm)

    def _choose(self, predict: bool, x: mx.array, caches: Sequence[Traced], *positions: mx.array) -> list[Any]:
        """The function that is compiled; `positions`: the choice of the last layer with an indexer, if any."""
        chosen = Chosen(positions[0] if positions else None)
        h = self._mixed(x, caches[0], chosen)
        return [chosen.positions, *self.mlp.choose(h, self._second_norm, predict)]

    def _mixed(self, x: Array, cache: Any, chosen: Chosen | None) -> Array:
        if "mixer_output" not in self:
            return self.mixer(x, self.input_layernorm, cache, chosen)
        return self.mixer_output(x, self.mixer.mixed(x, self.input_layernorm, cache, chosen))

    @property
    def _second_norm(self) -> Any:
        """The norm before the feed-forward part, or None."""
        return self.get("post_attention_layernorm")

    @property
    def mixer(self) -> MixerModule:
        return self[self._mixer_name]

    def pass_span(self, x: Array, cache: LayerCache, span: Span, report: Report) -> Array:
        """The layer over a span: its mixer block by block, its experts over all rows.

        At most two blocks are in flight, so that only their temporaries are in memory.
        """
        parts: list[tuple[Array, ...]] = []
        cache.expect(span.length)
        for start, end in span.blocks(cache):
            self._relieve()
            h = self._mixed(backend.contiguous(x[:, start:end]), cache, span.chosen[start])
            self._relieve()
            part = self.mlp.prepare(h, self._second_norm)  # up to where rows of different tokens meet
            backend.start(*part, *cache.state[:-1])
            span.passed(span.layer, end, cache)
            if parts:
                backend.finish(parts[-1][0])
            parts.append(part)
            report(MIXER_SHARE * start / span.length)
        joined = backend.join(parts, axis=1)
        return self.mlp.finish(joined, lambda share: report(MIXER_SHARE + (1 - MIXER_SHARE) * share))

    def _relieve(self) -> None:
        """Returns memory of experts that the machine is short of before more is taken."""
        if isinstance(self.mlp, MoE) and self.mlp.experts is not None:
            self.mlp.experts.source.relieve()

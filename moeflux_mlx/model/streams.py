"""A layer between several residual streams, and the module that joins the streams after the last layer."""

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ..caches.layer_cache import LayerCache
from ..caches.traced import Traced
from ..experts.routing import Report
from ..experts.source import ExpertLoader
from ..kinds import Connections, GatedConnections, HyperConnections
from ..layers import Linear, RMSNorm, Stack, packed
from ..ops import backend
from ..ops.backend import Array
from ..ops.elementwise import sigmoid
from ..ops.gated_streams import Behind, gated_mean, injected, takes_token, token_mean
from ..ops.rows import RowCaches
from ..ops.streams import Mapping, gathered, gathered_behind, last_sum, mean_of, normed_streams, scattered
from ..ops.tiles import MAX_TOKENS
from .compiled import DecodeStep, by_prediction
from .moe import BeforeExperts, DenseMLP, MoE
from .ngrams import NGramLayer
from .span import MIXER_SHARE, Span
from .tokens import Tokens


class Connection(nn.Module):
    """The weights between the streams and a part of a layer; with `rows` for its input alone, those behind the last."""

    kept_float32: ClassVar[tuple[str, ...]] = ("fn", "base", "scale")

    def __init__(self, rule: HyperConnections, hidden_size: int, eps: float, is_last: bool = False):
        super().__init__()
        n = rule.streams
        rows = n if is_last else n * (n + 2)
        self.rule, self.eps = rule, eps
        self.fn, self.base = mx.zeros((rows, n * hidden_size)), mx.zeros((rows,))
        self.scale = mx.zeros((1 if is_last else 3,))
        self.arrange()

    def arrange(self) -> None:
        """Joins what kernels take at once; called again once it has its tensors."""
        self._pieces = packed(self.base, self.scale)

    @property
    def mapping(self) -> Mapping:
        return Mapping(self.fn, self.base, self.scale, self._pieces)

    def gather(self, h: Any) -> tuple[Any, ...]:
        """The part's input, and how its output is to be added (`gathered`)."""
        return gathered(h, self.mapping, self.rule, self.eps)

    def gather_behind(self, h: Any, out: Any, *mixing: Any) -> tuple[Any, ...]:
        """The streams behind the part before, whose output is `out`, and `gather` of them."""
        return gathered_behind(h, out, mixing[0], self.mapping, self.rule, self.eps)

    def last(self, h: Array) -> Any:
        """The stream behind the last layer (`last_sum`)."""
        return last_sum(h, self.mapping, self.rule, self.eps)

    def scatter(self, h: Array, out: Array, *mixing: Any) -> Any:
        """The streams behind the part (`scattered`)."""
        return scattered(h, out, mixing[0], self.rule)


class StreamsMean(nn.Module):
    """The module after the last layer if the streams are averaged."""

    def __init__(self, streams: int):
        super().__init__()
        self.streams = streams

    def last(self, h: Array) -> Any:
        """The stream behind the last layer."""
        return mean_of(h, self.streams)


class GatedConnection(nn.Module):
    """The same of gated connections; the one behind the last layer gives no weights for an output."""

    def __init__(self, rule: GatedConnections, hidden_size: int, eps: float, is_last: bool = False):
        super().__init__()
        width, self.rule, self.eps = rule.streams * hidden_size, rule, eps
        self.hc_norm = RMSNorm(width, eps)
        self.input_mix_weight_down = Linear(width, rule.rank)
        self.input_mix_weight_up = Linear(rule.rank, width)
        if not is_last:
            self.block_inject_weight = Linear(width, rule.streams)
        self.arrange()

    def arrange(self) -> None:
        """Joins the layers that read the normed streams; called again once they have their tensors."""
        self._inputs = Stack(*(self[name] for name in ("input_mix_weight_down", "block_inject_weight") if name in self))

    def gather(self, h: Array) -> tuple[Any, ...]:
        """The part's input [B, L, D], and the weights [B, L, n] with which its output is added."""
        return self._mean(h)[1:]

    def gather_behind(self, h: Any, out: Any, *mixing: Any) -> tuple[Any, ...]:
        """The streams behind the part before, whose output is `out`, and `gather` of them."""
        return self._mean(h, Behind(out, *mixing))

    def last(self, h: Array) -> Any:
        """The stream behind the last layer. A step's rows are computed one by one, because the kernels take one."""
        count = h.shape[1]
        if not isinstance(h, mx.array) or not 1 < count <= MAX_TOKENS:
            return self._mean(h)[1]
        return mx.concatenate([self._mean(h[:, i : i + 1])[1] for i in range(count)], axis=1)

    def _mean(self, h: Any, behind: Behind | None = None) -> tuple[Any, ...]:
        """The streams h after `behind`, the weighed mean of them, normed, and the weights [B, L, n] for an output."""
        low, up = self._inputs.stacked, self.input_mix_weight_up
        if low is not None and takes_token(h, low, up, self.rule):
            return token_mean(h, self.hc_norm.weight, low, up, self.rule, self.eps, behind)
        h = h if behind is None else injected(h, *behind)
        normed = normed_streams(h, self.hc_norm.weight, self.eps, self.rule.streams)
        _, (down, *inject) = self._inputs(normed)
        act: Any = down / self.rule.streams
        mean = gated_mean(normed, up(act * sigmoid(act)), self.rule.streams)
        return h, mean, *(2 * sigmoid(one / self.rule.streams) for one in inject)

    def scatter(self, h: Array, out: Array, *mixing: Any) -> Any:
        """The streams behind the part (`injected`)."""
        return injected(h, out, *mixing)


def connection(rule: Connections, hidden_size: int, eps: float, is_last: bool = False) -> Any:
    """The module between the streams and a part of a layer, or behind the last layer."""
    if is_last and isinstance(rule, HyperConnections) and rule.mean:
        return StreamsMean(rule.streams)
    kind: Any = Connection if isinstance(rule, HyperConnections) else GatedConnection
    return kind(rule, hidden_size, eps, is_last)


class StreamsLayer(nn.Module):
    """A mixer and experts, or a dense MLP, each between a sum of the streams and a mixture of them; h is
    [B, L, streams * D]."""

    def __init__(self, name: str, mixer: Any, mlp: Any, rule: Connections, hidden_size: int, eps: float, layer: int):
        super().__init__()
        setattr(self, name, mixer)
        self.mlp = mlp
        self._mixer_name = name
        if isinstance(rule, HyperConnections):
            self.input_layernorm, self.post_attention_layernorm = RMSNorm(hidden_size, eps), RMSNorm(hidden_size, eps)
        self.attn_hc, self.ffn_hc = (connection(rule, hidden_size, eps) for _ in range(2))
        ngrams = mixer.mixer.ngrams
        if ngrams is not None:
            self.ple = NGramLayer(ngrams, hidden_size, eps, layer)

        self._step: Callable[[bool], DecodeStep] | None = None

    def compile(self, experts: ExpertLoader) -> None:
        """Compiles the part before the experts of a single token into one graph, which is kept until `experts`
        close.
        """
        if isinstance(self.mlp, MoE):
            self._step = by_prediction(self._choose, experts)

    @property
    def mixer(self) -> Any:
        return self[self._mixer_name]

    def __call__(self, h: Array, cache: Any, chosen: Any = None, tokens: Tokens | None = None) -> Any:
        """The rows of a step meet in the experts alone."""
        if isinstance(cache, RowCaches):
            return self._of_rows(h, cache, tokens)
        if self._step is not None and tokens is not None and isinstance(h, mx.array) and DecodeStep.takes(h, [[cache]]):
            step = self._step(self.mlp.should_predict(1))
            streams, mixing, *parts = step(h, [[cache]], *tokens.arrays(self._tables))
            out = self.mlp.run_experts(BeforeExperts(*parts))
        else:
            streams, x, *mixing = self._to_experts(h, cache, tokens)
            out = self._experts(x, tokens)
        return self.ffn_hc.scatter(streams, out, *mixing)

    def _choose(self, predict: bool, h: mx.array, caches: Sequence[Traced], *arrays: mx.array) -> list[Any]:
        """The function that is compiled; `arrays`: the tokens' arrays."""
        tokens = Tokens.of(self._tables, *arrays)
        streams, x, *mixing = self._to_experts(h, caches[0], tokens)
        return [streams, mixing, *self._chosen(x, tokens, predict)]

    @property
    def _tables(self) -> list[int]:
        """The layers whose tables it reads."""
        return [self.ple.layer] if "ple" in self else []

    def _of_rows(self, h: Array, cache: RowCaches, tokens: Tokens | None) -> Any:
        """Computes each row [B, 1, streams * D] as if it were alone."""
        rows = []
        for i, one in enumerate(cache.caches):
            cache.begin(i)
            rows.append(self._to_experts(h[:, i : i + 1], one, tokens and tokens.at(i, i + 1)))
        library = backend.library_of(h)
        out = self._experts(library.concatenate([x for _, x, *_ in rows], axis=1), tokens)
        made = [self.ffn_hc.scatter(one[0], out[:, i : i + 1], *one[2:]) for i, one in enumerate(rows)]
        return library.concatenate(made, axis=1)

    def _experts(self, x: Any, tokens: Tokens | None) -> Any:
        """The experts' output for x [B, L, D], normed."""
        ids, norm = _ids(tokens, x), self.get("post_attention_layernorm")
        if isinstance(self.mlp, DenseMLP):
            return self.mlp(x, norm=norm)
        if x.shape[0] * x.shape[1] > MAX_TOKENS:
            parts = list(self.mlp.prepare(x, norm, ids))
            parts[0] = backend.zeros_like(x)  # what the experts make is added to several streams
            return self.mlp.finish(parts)
        return self.mlp.run_experts(self._chosen(x, tokens, self.mlp.should_predict(x.shape[0] * x.shape[1])))

    def _chosen(self, x: Any, tokens: Tokens | None, predict: bool) -> BeforeExperts:
        """The input of `MoE.run_experts`; the output is added to several streams later, so here to zeros."""
        before: BeforeExperts = self.mlp.choose(x, self.get("post_attention_layernorm"), predict, _ids(tokens, x))
        return before._replace(residual=backend.zeros_like(x))

    def _to_experts(self, h: Any, cache: Any, tokens: Tokens | None) -> tuple[Any, ...]:
        """The streams behind the mixer, the input of the experts, and how their output is to be added."""
        own = cache
        if "ple" in self:
            h, own = self.ple(h, tokens, cache.beside), cache.own
        x, *mixing = self.attn_hc.gather(h)
        out = self.mixer.mixed(x, self.get("input_layernorm"), own)
        return tuple(self.ffn_hc.gather_behind(h, out, *mixing))

    def pass_span(self, h: Array, cache: LayerCache, span: Span, report: Report) -> Any:
        """The layer over a span: its mixer block by block, its experts over all rows."""
        parts: list[tuple[Any, ...]] = []
        joined: list[Any]
        mixing: list[Any] = []
        cache.expect(span.length)
        for start, end in span.blocks(cache):
            tokens = span.inputs and span.inputs.at(start, end)
            streams, x, *mixing = self._to_experts(backend.contiguous(h[:, start:end]), cache, tokens)
            routed: Sequence[Any] = self._prepared(x, tokens)
            backend.start(streams, *mixing, *routed, *cache.state[:-1])
            span.passed(span.layer, end, cache)
            if parts:
                backend.finish(parts[-1][0])
            parts.append((streams, *mixing, *routed))
            report(MIXER_SHARE * start / span.length)
        count: int = len(mixing)
        streams, *joined = backend.join(parts, axis=1)
        out = self._finished(joined[count:], lambda share: report(MIXER_SHARE + (1 - MIXER_SHARE) * share))
        return self.ffn_hc.scatter(streams, out, *joined[:count])

    def _prepared(self, x: Any, tokens: Tokens | None) -> Sequence[Any]:
        """Computes for many tokens what depends on each token alone, for `_finished`."""
        if isinstance(self.mlp, DenseMLP):
            return [self._experts(x, tokens)]
        return self.mlp.prepare(x, self.get("post_attention_layernorm"), _ids(tokens, x))[1:]

    def _finished(self, parts: Sequence[Any], report: Report) -> Any:
        """The experts' output for all tokens."""
        if isinstance(self.mlp, DenseMLP):
            return parts[0]
        return self.mlp.finish([backend.zeros_like(parts[0]), *parts], report)


def _ids(tokens: Tokens | None, x: Any) -> Any:
    """The ids as an array of x's kind; None: there are none."""
    if tokens is None:
        return None
    return tokens.ids if isinstance(x, mx.array) else np.asarray(tokens.ids)

"""The modules between several residual streams and the parts of a layer, and those after the last layer."""

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import mlx.core as mx
import mlx.nn as nn

from ..kinds import BlockSums, Connections, GatedConnections, HyperConnections, IndependentConnections, Shortcut
from ..layers import Linear, RMSNorm, Stack, packed
from ..ops import backend, block_sums
from ..ops.backend import AnyArray, Array, library_of
from ..ops.elementwise import float32, sigmoid, split
from ..ops.gated_streams import Behind, gated_mean, injected, let_in, takes_messages, takes_token, token_mean
from ..ops.norm import rms_norm
from ..ops.streams import (
    Mapping,
    StreamRule,
    carried,
    found_in,
    gathered,
    gathered_behind,
    last_sum,
    mapped,
    mean_of,
    normed_streams,
    scattered,
    weighed,
)
from ..ops.tiles import MAX_TOKENS


class Connection(nn.Module):
    """The weights between the streams and a part of a layer; with `rows` for its input alone, those behind the last."""

    kept_float32: ClassVar[tuple[str, ...]] = ("fn", "base", "scale")

    def __init__(self, rule: StreamRule, hidden_size: int, eps: float, is_last: bool = False):
        super().__init__()
        n = rule.streams
        rows = n if is_last else rule.weights
        self.rule, self.eps = rule, eps
        self.fn, self.base = mx.zeros((rows, n * hidden_size)), mx.zeros((rows,))
        self.scale = mx.zeros((1 if is_last else rule.kinds,))
        self.arrange()

    def arrange(self) -> None:
        """Joins what kernels take at once; called again once it has its tensors."""
        self._pieces = packed(self.base, self.scale)

    @property
    def mapping(self) -> Mapping:
        return Mapping(self.fn, self.base, self.scale, self._pieces)

    def gather(self, h: Array) -> tuple[Array, ...]:
        """The part's input, and how its output is to be added (`gathered`)."""
        return gathered(h, self.mapping, self.rule, self.eps)

    def gather_behind(self, h: Array, out: Array, *mixing: Array) -> tuple[Array, ...]:
        """The streams behind the part before, whose output is `out`, and `gather` of them."""
        return gathered_behind(h, out, mixing[0], self.mapping, self.rule, self.eps)

    def last(self, h: Array) -> Array:
        """The stream behind the last layer (`last_sum`)."""
        return last_sum(h, self.mapping, self.rule, self.eps)

    def scatter(self, h: Array, out: Array, *mixing: Array) -> Array:
        """The streams behind the part (`scattered`)."""
        return scattered(h, out, mixing[0], self.rule)


class ShiftedConnection(Connection):
    """The same of shifted connections: h [B, L, (n + 1) * D] has the weights of the next part's sum behind the streams.
    In the first layer, `is_first`, that sum is the first stream.
    """

    rule: HyperConnections

    def __init__(self, rule: HyperConnections, hidden_size: int, eps: float, is_first: bool):
        super().__init__(rule, hidden_size, eps)
        self.is_first, self.hidden_size = is_first, hidden_size

    def gather(self, h: AnyArray) -> tuple[AnyArray, ...]:
        """The part's input; the weights of the next part's sum, and how the part's output is to be added."""
        streams, values = split(h, self.fn.shape[-1])
        if self.is_first:
            x = backend.contiguous(h[..., : self.hidden_size])
        else:
            x = weighed(streams, found_in(values, self.rule.streams))
        return x, *mapped(streams, self.mapping, self.rule, self.eps)

    def gather_behind(self, h: AnyArray, out: AnyArray, *mixing: AnyArray) -> tuple[AnyArray, ...]:
        """The streams behind the part before, whose output is `out`, and as `gather` for the next one."""
        weights, own = mixing
        streams = scattered(split(h, self.fn.shape[-1])[0], out, own, self.rule)
        return streams, weighed(streams, weights), *mapped(streams, self.mapping, self.rule, self.eps)

    def scatter(self, h: Array, out: Array, *mixing: Array) -> Array:
        """The streams behind the part, and behind them the weights of the next part's sum."""
        weights, own = mixing
        streams = scattered(h, out, own, self.rule)
        return library_of(h).concatenate([streams, carried(weights, streams, self.hidden_size)], axis=-1)


class LastSum(nn.Module):
    """The module after the last layer of shifted connections, whose sum has weights already."""

    def __init__(self, rule: HyperConnections, hidden_size: int):
        super().__init__()
        self.rule, self.width = rule, rule.streams * hidden_size

    def last(self, h: Array) -> Array:
        """The stream behind the last layer."""
        return _row_by_row(self._sum, h)

    def _sum(self, h: Array) -> Array:
        streams, values = split(h, self.width)
        return weighed(streams, found_in(values, self.rule.streams))


class StreamsMean(nn.Module):
    """The module after the last layer if the streams are averaged."""

    def __init__(self, streams: int):
        super().__init__()
        self.streams = streams

    def last(self, h: Array) -> Array:
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

    def gather(self, h: Array) -> tuple[Array, ...]:
        """The part's input [B, L, D], and the weights [B, L, n] with which its output is added."""
        return self._mean(h)[1:]

    def gather_behind(self, h: Array, out: Array, *mixing: Array) -> tuple[AnyArray, ...]:
        """The streams behind the part before, whose output is `out`, and `gather` of them."""
        return self._mean(h, Behind(out, *mixing))

    def last(self, h: Array) -> Array:
        """The stream behind the last layer. A step's rows are computed one by one, because the kernels take one."""
        return _row_by_row(lambda row: self._mean(row)[1], h)

    def _mean(self, h: AnyArray, behind: Behind | None = None) -> tuple[AnyArray, ...]:
        """The streams h after `behind`, the weighed mean of them, normed, and the weights [B, L, n] for an output."""
        low, up = self._inputs.stacked, self.input_mix_weight_up
        if low is not None and takes_token(h, low, up, self.rule):
            return token_mean(h, self.hc_norm.weight, low, up, self.rule, self.eps, behind)
        h = h if behind is None else injected(h, *behind)
        normed = normed_streams(h, self.hc_norm.weight, self.eps, self.rule.streams)
        _, (down, *inject) = self._inputs(normed)
        act: AnyArray = down / self.rule.streams
        mean = gated_mean(normed, up(act * sigmoid(act)), self.rule.streams)
        return h, mean, *(2 * sigmoid(one / self.rule.streams) for one in inject)

    def scatter(self, h: Array, out: Array, *mixing: Array) -> Array:
        """The streams behind the part (`injected`)."""
        return injected(h, out, *mixing)


class ShortcutConnection(nn.Module):
    """Adds the output of each part to the stream, that of routed experts behind the next layer."""

    def __init__(self, rule: Shortcut, hidden_size: int, eps: float, is_last: bool = False):
        super().__init__()
        self.width = hidden_size

    def gather(self, h: Array) -> tuple[Array, ...]:
        """The part's input, and what is to be added behind this layer."""
        return tuple(split(h, self.width))

    def gather_behind(self, h: Array, out: Array, *mixing: Array) -> tuple[AnyArray, ...]:
        """The stream behind the part before, whose output is `out`, and `gather` of it."""
        stream = h[..., : self.width] + out
        return stream, stream, *mixing

    def last(self, h: Array) -> Array:
        """The stream behind the last layer."""
        return h[..., : self.width]

    def scatter(self, h: Array, out: Array, *mixing: Array) -> Array:
        """The stream h and what is added behind the next layer: `out` has both behind a layer with experts."""
        library = library_of(h)
        if out.shape[-1] == self.width:
            return library.concatenate([h + out + mixing[0], library.zeros_like(h)], axis=-1)
        shared, routed = split(out, self.width)
        return library.concatenate([h + shared, routed], axis=-1)


class BlockSum(nn.Module):
    """The weight between the sums of blocks and a part of a layer, or behind the last layer. `begins`: the mixer before
    the part begins a block.
    """

    def __init__(self, hidden_size: int, eps: float, begins: bool = False):
        super().__init__()
        self.eps, self.begins = eps, begins
        self.norm_weight, self.proj_weight = mx.ones((hidden_size,)), mx.zeros((1, hidden_size))
        self.arrange()

    def arrange(self) -> None:
        """Joins the weights; called again once it has its tensors."""
        self._weight = self.norm_weight.astype(mx.float32) * self.proj_weight[0].astype(mx.float32)
        mx.eval(self._weight)

    def gather(self, h: Array) -> tuple[Array, ...]:
        """The part's input (`block_sums.mixed`)."""
        return (block_sums.mixed(h, self._weight, self.eps),)

    def gather_behind(self, h: Array, out: Array) -> tuple[Array, ...]:
        """The sums behind the part before, whose output is `out`, and `gather` of them."""
        return block_sums.mixed_behind(h, out, self._weight, self.eps, self.begins)

    def last(self, h: Array) -> Array:
        """The stream behind the last layer."""
        return _row_by_row(lambda row: self.gather(row)[0], h)

    def scatter(self, h: Array, out: Array) -> Array:
        """The sums behind the part."""
        return block_sums.added(h, out)


class NormedBlockSum(nn.Module):
    """The queries between the sums of blocks and a part of a layer (`BlockSums.normed`), or behind the last layer; the
    first part of all `takes_one` sum, the embedding, and has none. `begins`: as of `BlockSum`.
    """

    kept_float32: ClassVar[tuple[str, ...]] = ("query",)

    def __init__(self, hidden_size: int, eps: float, inputs: int, begins: bool = False, takes_one: bool = False):
        super().__init__()
        self.eps, self.begins, self.inputs = eps, begins, inputs
        if not takes_one:
            self.query = mx.zeros((inputs, hidden_size) if inputs > 1 else (hidden_size,))
        self.arrange()

    def arrange(self) -> None:
        """Scales the queries; called again once it has its tensors."""
        if "query" in self:
            width = self.query.shape[-1]
            self._queries = self.query.reshape(-1, width).astype(mx.float32) * width**-0.5
            mx.eval(self._queries)

    def gather(self, h: Array) -> tuple[Array, ...]:
        """The part's inputs side by side."""
        if "query" in self:
            return (block_sums.mixed_normed(h, self._queries, self.eps),)
        return (h if self.inputs == 1 else library_of(h).concatenate([h] * self.inputs, axis=-1),)

    def gather_behind(self, h: Array, out: Array) -> tuple[Array, ...]:
        """The sums behind the part before, whose output is `out`, and `gather` of them."""
        return block_sums.mixed_behind(h, out, self._queries, self.eps, self.begins, normed=True)

    def last(self, h: Array) -> Array:
        """The stream behind the last layer."""
        return _row_by_row(lambda row: self.gather(row)[0], h)

    def scatter(self, h: Array, out: Array) -> Array:
        """The sums behind the part."""
        return block_sums.added(h, out)


MIXERS, MLP = ("q", "k", "v"), ("mlp",)  # the gates of a mixer's inputs, and that of a feed-forward part's


class MessageGate(nn.Module):
    """Lets a message into an input of a layer's part (`Messages`)."""

    def __init__(self, hidden_size: int, rank: int, eps: float):
        super().__init__()
        self.eps = eps
        self.down_proj = Linear(2 * hidden_size, rank)
        self.forget_proj, self.gain_proj = (Linear(rank, hidden_size) for _ in range(2))

    def __call__(self, x: Array, message: Array) -> AnyArray:
        """x and `message`, both [B, L, D], as one input."""
        both, library = [float32(x), float32(message)], library_of(x)
        normed = library.concatenate([rms_norm(one, None, self.eps) for one in both], axis=-1)
        low = self.down_proj(normed.astype(x.dtype))
        forget, gain = (library.tanh(float32(matrix(low))) for matrix in (self.forget_proj, self.gain_proj))
        return ((1 - forget) * both[0] + gain * both[1]).astype(x.dtype)


class MessageGates(nn.Module):
    """Those of a layer: for queries, keys, values and its feed-forward part."""

    def __init__(self, hidden_size: int, rank: int, eps: float):
        super().__init__()
        self.eps = eps
        self.q, self.k, self.v, self.mlp = (MessageGate(hidden_size, rank, eps) for _ in range(4))
        self.arrange()

    def arrange(self) -> None:
        """Joins the matrices of gates that are used together; called again once they have their tensors."""
        self._of_mixer, self._of_mlp = (
            (
                Stack(*(self[name].down_proj for name in names)),
                Stack(*(matrix for name in names for matrix in (self[name].forget_proj, self[name].gain_proj))),
            )
            for names in (MIXERS, MLP)
        )

    def __call__(self, names: Sequence[str], inputs: Sequence[Array], messages: Sequence[Array]) -> AnyArray:
        """The inputs [B, L, D] with their messages let in by the gates `names`, `MIXERS` or `MLP`, side by side."""
        low, up = (stack.stacked for stack in (self._of_mlp if names == MLP else self._of_mixer))
        pairs: list[Any] = list(zip(inputs, messages, strict=True))
        if takes_messages(inputs[0], low, up, len(names)):
            assert low is not None and up is not None
            both = mx.concatenate([one for pair in pairs for one in pair], axis=-1)
            return let_in(both, low, up, self.eps, len(names))
        made = [self[name](*pair) for name, pair in zip(names, pairs, strict=True)]
        return made[0] if len(made) == 1 else library_of(made[0]).concatenate(made, axis=-1)


class MessageQueries(nn.Module):
    """The queries of messages (`Messages`) in all layers: two rows of `query` for each, of queries and of the
    feed-forward part, and of `kv_query`, of keys and of values.
    """

    kept_float32: ClassVar[tuple[str, ...]] = ("query", "kv_query")

    def __init__(self, rule: BlockSums, hidden_size: int, eps: float):
        super().__init__()
        assert rule.messages is not None
        self.rule, self.first, self.eps = rule, rule.messages.first, rule.eps or eps
        rows = 2 * (rule.messages.end - self.first)
        self.query, self.kv_query = (mx.zeros((rows, hidden_size)) for _ in range(2))
        self.arrange()

    def arrange(self) -> None:
        """Scales the queries and puts them in order; called again once they have their tensors."""
        width = self.query.shape[1]
        own, pairs = (one.astype(mx.float32).reshape(-1, 2, width) for one in (self.query, self.kv_query))
        self._queries = tuple(mx.concatenate([own[:, :1], pairs, own[:, 1:]], axis=1) * width**-0.5)
        mx.eval(self._queries)

    def messages(self, layer: int, sums: Array) -> list[Array]:
        """The four messages [B, L, D] of a layer, of the sums of the pass before."""
        width = self.query.shape[1]
        made = block_sums.mixed_normed(sums, self._queries[layer - self.first], self.eps)
        return split(made, width, 2 * width, 3 * width)


def _row_by_row(compute: Callable[[Any], Any], h: Array) -> Array:
    """Computes a step's rows of h [B, L, .] one by one, because kernels take one; a prompt's all at once."""
    count = h.shape[1]
    if not isinstance(h, mx.array) or not 1 < count <= MAX_TOKENS:
        return compute(h)
    return mx.concatenate([compute(h[:, i : i + 1]) for i in range(count)], axis=1)


MODULES: dict[type[Connections], Any] = {
    HyperConnections: Connection,
    GatedConnections: GatedConnection,
    IndependentConnections: Connection,
    Shortcut: ShortcutConnection,
}


def connection(rule: Connections, hidden_size: int, eps: float, layer: int | None, inputs: int = 0) -> nn.Module:
    """The module between the streams and a part of a layer; None: behind the last layer. `inputs`: of the mixer, if it
    is the part; else 0.
    """
    assert inputs < 2 or isinstance(rule, BlockSums), "only sums of blocks make several inputs"
    if isinstance(rule, BlockSums) and rule.normed:
        begins = layer is not None and rule.begins(layer)
        return NormedBlockSum(hidden_size, rule.eps or eps, max(inputs, 1), begins, layer == 0 and inputs > 0)
    if isinstance(rule, BlockSums):
        return BlockSum(hidden_size, eps, layer is not None and rule.begins(layer))
    if isinstance(rule, HyperConnections) and rule.shifted:
        if layer is None:
            return LastSum(rule, hidden_size)
        return ShiftedConnection(rule, hidden_size, eps, layer == 0)
    if layer is None and rule.mean:
        return StreamsMean(rule.streams)
    return MODULES[type(rule)](rule, hidden_size, eps, layer is None)

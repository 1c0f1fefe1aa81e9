"""Several residual streams side by side, and manifold-constrained hyper-connections between them (arXiv:2512.24880; the
order of operations is that of DeepSeek-V4's model code in transformers), whose weights are computed in float32.

For a single token, a GPU computes a part's input in two launches, of which the first also adds the output of the part
before; after a layer's last part a launch only adds.
"""

from collections.abc import Sequence
from typing import NamedTuple

import mlx.core as mx

from ..kinds import HyperConnections, IndependentConnections
from . import backend
from .backend import AnyArray, Array, kernels_take, of_kind
from .elementwise import float32, sigmoid, softmax
from .launch import SEVERAL, ArrayPiece, Input, Kernel, Launch, Reason, Shape, ceildiv
from .norm import rms_norm
from .tiles import MAX_TOKENS, planned

PRODUCTS = Kernel("streams_products", "h fn", "made")
StreamRule = HyperConnections | IndependentConnections
GATHER = Kernel("streams_gather", "h made base scale", "x mixing")
NEXT = Kernel("streams_next", "h out mixing fn", "next made")
SCATTER = Kernel("streams_scatter", "h out mixing", "next")
THREADS = 256  # threads of a threadgroup


class Mapping(NamedTuple):
    """Makes the weights of the streams: matrix [O, n * D], biases [O], and scales. `pieces`: the places of biases and
    scales in one array, if they are joined.
    """

    fn: mx.array
    base: mx.array
    scale: mx.array
    pieces: list[ArrayPiece] | None = None

    @property
    def inputs(self) -> Sequence[Input]:
        """A kernel's inputs for biases and scales."""
        return (self.base, self.scale) if self.pieces is None else self.pieces


def spread(x: Array, streams: int) -> Array:
    """[B, L, n * D]: every stream begins as x [B, L, D]."""
    return x if streams == 1 else backend.library_of(x).concatenate([x] * streams, axis=-1)


def gathered(h: AnyArray, by: Mapping, rule: StreamRule, eps: float) -> tuple[AnyArray, AnyArray]:
    """Computes a part's input [B, L, D] from the streams h [B, L, n * D], and the weights for adding its output. These
    are float32 [B, L, n + n * n]: the output's weight in each stream, then the weight of stream j in stream k, with
    those of one j next to each other; or [B, L, n] if the streams are not mixed.
    """
    if _takes_token(h, rule):
        launches = plan_gather(backend.name(), h.shape[-1], h.dtype, rule, eps)
        return _from_products(launches, h, launches.products(h, by.fn)[0], by)
    weights, mixing = _mapped(h, by, rule, eps)
    return _sum(h, weights, rule), mixing


def mapped(h: AnyArray, by: Mapping, rule: HyperConnections, eps: float) -> tuple[AnyArray, AnyArray]:
    """The weights [B, L, n] float32 of a sum of the streams h [B, L, n * D], and those of `gathered`, of shifted
    connections.
    """
    if not _takes_token(h, rule):
        return _mapped(h, by, rule, eps)
    count = rule.streams * (rule.streams + 1)
    launches = plan_gather(backend.name(), h.shape[-1], h.dtype, rule, eps)
    _, mixing = _from_products(launches, h, launches.products(h, by.fn)[0], by)
    return mixing[..., count:], mixing[..., :count]


def _mapped(h: Array, by: Mapping, rule: StreamRule, eps: float) -> tuple[Array, Array]:
    """The weights [B, L, n] float32 of the sum, and those of `gathered`, by plain operations."""
    made, base, scale = _made(h, by, eps)
    n = rule.streams
    weights = sigmoid(made[..., :n] * scale[0] + base[:n]) + rule.eps
    post = rule.magnitude * sigmoid(made[..., n : 2 * n] * scale[1] + base[n : 2 * n])
    if isinstance(rule, IndependentConnections):
        return weights, post + rule.eps
    comb = (made[..., 2 * n :] * scale[2] + base[2 * n :]).reshape(*made.shape[:-1], n, n)
    comb = doubly_stochastic(comb, rule).reshape(*made.shape[:-1], n * n)
    return weights, backend.library_of(h).concatenate([post, comb], axis=-1)


def weighed(h: Array, weights: Array) -> Array:
    """The sum [B, L, D] of the streams h [B, L, n * D] with weights [B, L, n], in float32."""
    return _weighed(float32(h), weights).astype(h.dtype)


def carried(weights: AnyArray, like: AnyArray, width: int) -> AnyArray:
    """Weights [B, L, n] float32 as values [B, L, width] of the dtype of `like`, from which `found_in` gets them back
    without a loss: each in three parts, the later ones of which have what the dtype leaves out.
    """
    library, parts, rest = backend.library_of(like), [], weights
    for _ in range(3):
        parts.append(rest.astype(like.dtype))
        rest = rest - parts[-1].astype(library.float32)
    room = library.zeros((*weights.shape[:2], width - 3 * weights.shape[-1]), like.dtype)
    return library.concatenate([*parts, room], axis=-1)


def found_in(values: Array, count: int) -> Array:
    """The weights [B, L, count] float32 of which `carried` made the values."""
    first, second, third = (float32(values[..., i * count : (i + 1) * count]) for i in range(3))
    return first + second + third


def gathered_behind(
    h: AnyArray, out: AnyArray, mixing: AnyArray, by: Mapping, rule: StreamRule, eps: float
) -> AnyArray:
    """The streams behind a part (`scattered`), and what `gathered` makes of them for the next part."""
    if not _takes_token(h, rule):
        streams = scattered(h, out, mixing, rule)
        return streams, *gathered(streams, by, rule, eps)
    launches = plan_gather(backend.name(), h.shape[-1], h.dtype, rule, eps)
    streams, made = launches.following(h, out, mixing, by.fn)
    return streams, *_from_products(launches, streams, made, by)


def _takes_token(h: Array, rule: StreamRule) -> bool:
    return kernels_take(h, refusal, h.shape[0] * h.shape[1], rule)


@planned("streams")
def refusal(target: str, tokens: int, rule: StreamRule) -> Reason | None:
    """Why the kernels do not take this number of tokens or of streams."""
    if tokens != 1:
        return SEVERAL
    return None if rule.streams in (2, 4) else Reason(f"there are {rule.streams} streams, not 2 or 4")


class Gather(NamedTuple):
    """The launches for a part's input: that of the products that weights are made of; the same where the output of
    another part is added first; and that of the weights and the input.
    """

    products: Launch
    following: Launch
    weights: Launch


def _from_products(launches: Gather, h: mx.array, made: mx.array, by: Mapping) -> tuple[mx.array, mx.array]:
    """`gathered` of one token [1, 1, n * D], from the products with its streams."""
    x, mixing = launches.weights(h, made, *by.inputs)
    return x, mixing


@planned("streams")
def plan_gather(target: str, width: int, dtype: mx.Dtype, rule: StreamRule, eps: float) -> Gather:
    n, D = rule.streams, width // rule.streams
    rows, is_mixed = rule.weights, isinstance(rule, HyperConnections)
    template = {"X": dtype, "N": n, "D": D, "O": rows, "SG": THREADS // 32, "MIXED": int(is_mixed)}
    products = Launch(target, PRODUCTS, template, (rows + 1, 1), THREADS, [((rows + 1,), mx.float32)])
    outputs: list[tuple[Shape, mx.Dtype]] = [((1, 1, width), dtype), *products.outputs]
    following = Launch(target, NEXT, template, (rows + 1, 1), THREADS, outputs)
    template = {"X": dtype, "N": n, "D": D, "O": rows, "T": THREADS, "MIXED": int(is_mixed), "EPS": rule.eps}
    template |= {"ROUNDS": getattr(rule, "iterations", 0), "NORM_EPS": eps, "MAGNITUDE": rule.magnitude}
    is_shifted = isinstance(rule, HyperConnections) and rule.shifted
    template |= {"POST_EPS": 0.0 if is_mixed else rule.eps, "SHIFTED": int(is_shifted)}
    made = [((1, 1, D), dtype), ((1, 1, rows if is_shifted else rows - n), mx.float32)]
    return Gather(products, following, Launch(target, GATHER, template, (ceildiv(D, THREADS), 1), THREADS, made))


@planned("streams")
def plan_scatter(target: str, width: int, dtype: mx.Dtype, streams: int, is_mixed: bool) -> Launch:
    """The launch that adds a part's output, to mixtures of the streams or to the streams themselves."""
    D = width // streams
    template = {"X": dtype, "N": streams, "D": D, "T": THREADS, "MIXED": int(is_mixed)}
    return Launch(target, SCATTER, template, (ceildiv(D, THREADS), 1), THREADS, [((1, 1, width), dtype)])


def normed_streams(h: Array, weight: mx.array, eps: float, streams: int) -> Array:
    """h [B, L, n * D], each of its n streams normed, times weight [n * D]."""
    rows = rms_norm(h.reshape(-1, h.shape[-1] // streams), None, eps).reshape(h.shape)
    return rows * of_kind(weight, h)


def last_sum(h: Array, by: Mapping, rule: StreamRule, eps: float) -> Array:
    """The one stream [B, L, D] behind the last layer."""
    made, base, scale = _made(h, by, eps)
    return _sum(h, sigmoid(made * scale[0] + base) + rule.eps, rule)


def mean_of(h: Array, streams: int) -> Array:
    """The mean [B, L, D] of the streams h [B, L, n * D]."""
    B, L, _ = h.shape
    return h.reshape(B, L, streams, -1).mean(axis=2)


def doubly_stochastic(comb: Array, rule: HyperConnections) -> Array:
    """Positive matrices [..., n, n] whose rows and columns sum to one, of any: a softmax of rows, and then columns and
    rows divided by their sums in turn, columns last."""
    comb = softmax(comb) + rule.eps
    comb = comb / (comb.sum(axis=-2, keepdims=True) + rule.eps)
    for _ in range(rule.iterations - 1):
        comb = comb / (comb.sum(axis=-1, keepdims=True) + rule.eps)
        comb = comb / (comb.sum(axis=-2, keepdims=True) + rule.eps)
    return comb


def scattered(h: AnyArray, out: AnyArray, mixing: AnyArray, rule: StreamRule) -> AnyArray:
    """The streams [B, L, n * D] behind a part whose output is out [B, L, D], added as `gathered` said."""
    (B, L, width), n = h.shape, rule.streams
    if _takes_token(h, rule):
        is_mixed = isinstance(rule, HyperConnections)
        return plan_scatter(backend.name(), width, h.dtype, n, is_mixed)(h, out, mixing)[0]
    if isinstance(rule, IndependentConnections):
        return _added(h, out, mixing)
    if rule.shifted:
        comb = mixing[..., n:].reshape(B, L, n, n).swapaxes(-1, -2)
        mixed = comb @ float32(h).reshape(B, L, n, -1) + mixing[..., :n, None] * float32(out)[:, :, None]
        return mixed.reshape(B, L, width).astype(h.dtype)
    comb = mixing[..., n:].reshape(B, L, n, n).swapaxes(-1, -2).astype(h.dtype)
    mixed = comb @ h.reshape(B, L, n, -1) + mixing[..., :n, None].astype(h.dtype) * out[:, :, None]
    return mixed.reshape(B, L, width)


def _added(h: Array, out: Array, weights: Array) -> Array:
    """h [B, L, n * D] plus out [B, L, D] in each stream, times weights [B, L, n], in float32."""
    made = (weights[..., None] * float32(out)[:, :, None]).reshape(h.shape)
    return (float32(h) + made).astype(h.dtype)


def _made(h: Array, by: Mapping, eps: float) -> tuple[Array, Array, Array]:
    fn, base, scale = (of_kind(part, h) for part in by[:3])
    rows = rms_norm(float32(h), None, eps).reshape(-1, h.shape[-1])
    if 1 < len(rows) <= MAX_TOKENS:  # rows of a step: each has the bits that it has alone
        library = backend.library_of(h)
        made = library.concatenate([rows[i : i + 1] @ fn.T for i in range(len(rows))])
    else:
        made = rows @ fn.T
    return made.reshape(*h.shape[:2], -1), base, scale


def _sum(h: Array, weights: Array, rule: StreamRule) -> Array:
    """Hyper-connections round the weights like the streams; independent ones sum in float32."""
    return weighed(h, weights) if isinstance(rule, IndependentConnections) else _weighed(h, weights.astype(h.dtype))


def _weighed(h: Array, weights: Array) -> Array:
    return (weights[..., None] * h.reshape(*weights.shape, -1)).sum(axis=2)

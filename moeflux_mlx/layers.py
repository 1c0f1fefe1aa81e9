"""The layers that mixers and experts consist of: parameters with their operations.

A matrix is declared only with its sizes; `weights` gives it its tensor and stored form.
"""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import mlx.core as mx
import mlx.nn as nn

from .kinds import SILU, Activation, GatedConnections, Residual, ShortConvolution
from .ops import backend
from .ops.add_normed import Pair, add_normed
from .ops.backend import AnyArray, Array
from .ops.convolution import convolved
from .ops.elementwise import activate, gated, plus, scaled, softcap, split
from .ops.gated_streams import takes_token, token_mean
from .ops.launch import ArrayPiece, pack
from .ops.linear import embed, linear, row_by_row
from .ops.norm import Norm, group_norm, layer_norm, rms_norm
from .ops.route import router_logits
from .ops.rows import AnyCache
from .ops.seen import Chosen
from .quant import GRID, Quant

ALIGNED = 8  # values of 16 bits that kernels read at once, from a multiple of 16 bytes on


def packed(*arrays: mx.array) -> list[ArrayPiece] | None:
    """The pieces of arrays joined into one for a GPU's kernels; None if there are no arrays."""
    return pack(arrays) if backend.has_kernels() else None


class Weight(nn.Module):
    """A matrix [..., rows, cols], dense or quantised in groups along `cols`."""

    def __init__(self, *shape: int):
        super().__init__()
        self._shape = shape
        self.quant: Quant | None = None  # None: dense
        self.filled = False  # True once it has a tensor; until then the weight is zeros that nobody has evaluated
        self.weight = mx.zeros(shape)
        self._pieces: list[ArrayPiece] | None = None
        self._packed: mx.array | None = None  # the weight that `_pieces` are of
        self._members: tuple[Weight, ...] = ()  # of a stack

    @property
    def pieces(self) -> list[ArrayPiece] | None:
        """The pieces of its arrays in a single one, if they are joined and the weight has not been replaced."""
        return self._pieces if self.weight is self._packed else None

    def pack(self) -> None:
        """Joins the arrays of its form into one for a GPU's kernels; they become views of it."""
        if self.quant is None or self.pieces is not None:
            return
        names = self.tensors()
        pieces = packed(*(self[name] for name in names))
        if pieces is None:
            return
        for name, piece in zip(names, pieces, strict=True):
            setattr(self, name, piece.array(*self[name].shape))
        mx.eval([self[name] for name in names])
        self._pieces, self._packed = pieces, self.weight

    @property
    def members(self) -> "tuple[Weight, ...]":
        """The matrices that it consists of; itself, if it is no stack."""
        return self._members or (self,)

    @property
    def shape(self) -> tuple[int, ...]:
        """The logical shape, independent of the stored form."""
        return self._shape

    @property
    def second(self) -> mx.array | None:
        """The second array that holds it, if there is one."""
        return self._array(1)

    @property
    def third(self) -> mx.array | None:
        """The third: biases, a global scale or the like."""
        return self._array(2)

    def _array(self, index: int) -> mx.array | None:
        names = self.tensors()
        return self[names[index]] if len(names) > index else None

    def tensors(self) -> tuple[str, ...]:
        """Names of the arrays that hold it."""
        return ("weight",) if self.quant is None else self.quant.parts


class Linear(Weight):
    """y = x @ W.T + bias with W [out_features, in_features]; `bias` [out_features] is optional."""

    def __init__(self, in_features: int, out_features: int, bias: bool = False):
        super().__init__(out_features, in_features)
        if bias:
            self.bias = mx.zeros((out_features,))

    def is_like(self, other: "Linear") -> bool:
        """Whether both have the same stored form, so that their rows can form one matrix."""
        ours, theirs = ((layer.quant, layer.weight.dtype, "bias" in layer) for layer in (self, other))
        return ours == theirs

    def __call__(self, x: Array, norm: Norm | None = None, residual: Array | None = None) -> Array:
        if "bias" not in self:
            return linear(x, self, norm, residual)
        y = plus(linear(x, self, norm), self.bias)
        return y if residual is None else residual + y


def normed_with_weights(x: Array, norm: Norm | None, weights: Linear) -> tuple[Array, Array]:
    """norm(x) [B, L, D], and its product with `weights`, float32 [B, L, rows of `weights`]."""
    weight, eps = (None, 0.0) if norm is None else (norm.weight, norm.eps)
    normed, made = router_logits(x, weight, eps, weights)
    return normed.reshape(x.shape), made.reshape(*x.shape[:2], -1)


class Stack:
    """Layers that share their input, multiplied at once if they are stored alike: fewer, larger products.

    The layers become views of the stacked arrays, so nothing is kept twice. `aligned`: a kernel reads parts of a row 16
    bytes at a time, so layers whose joined rows begin elsewhere are not stacked.
    """

    def __init__(self, *layers: Linear, aligned: bool = False):
        self.layers = layers
        self.ends = list(accumulate(layer.shape[0] for layer in layers))
        self.stacked: Linear | None = None
        fits = all(layer.is_like(layers[0]) for layer in layers) and not (aligned and self.ends[-1] % ALIGNED)
        if fits and all(layer.quant or layer.filled for layer in layers):
            self.stacked = self._join()

    def _join(self) -> Linear:
        first = self.layers[0]
        joined = Linear(first.shape[1], self.ends[-1], "bias" in first)
        joined.quant, joined._members = first.quant, self.layers
        parts = [part for part in (*joined.tensors(), *(["bias"] if "bias" in first else [])) if part != GRID]
        if GRID in joined.tensors():
            setattr(joined, GRID, first[GRID])
        for part in parts:
            setattr(joined, part, mx.concatenate([layer[part] for layer in self.layers]))
            mx.eval(joined[part])
        joined.pack()
        for part in parts:
            for layer, start, end in zip(self.layers, [0, *self.ends], self.ends, strict=False):
                setattr(layer, part, joined[part][start:end])
        return joined

    def __call__(self, x: Array, norm: Norm | None = None) -> tuple[Array | None, list[Array]]:
        """The output of each layer for norm(x); before these, if the layers are stacked, the joined output of all."""
        return self.parted(self.outputs(x, norm))

    def outputs(self, x: Array, norm: Norm | None = None) -> list[Array]:
        """The outputs for norm(x): one array if the layers are stacked, else one per layer."""
        if self.stacked is not None:
            return [self.stacked(x, norm)]
        x = x if norm is None else norm(x)
        return [layer(x) for layer in self.layers]

    def parted(self, outputs: Sequence[Array]) -> tuple[Array | None, list[Array]]:
        """Splits the results of `outputs` as a call returns them; further items stay behind them."""
        if self.stacked is None:
            return None, list(outputs[: len(self.layers)])
        return outputs[0], split(outputs[0], *self.ends[:-1])


Caches = Sequence[AnyCache]  # of a layer


OwnExperts = Callable[[AnyArray, AnyArray, AnyArray], AnyArray]  # of rows [T, D], ids and weights [T, K]: [T, rows]


class MixerModule(nn.Module):
    """A mixer in three parts: the work before the caches, the mixing, and the work after it.

    `begin` and `end` treat each row by itself and use no cache, so rows of several sequences go through them together.
    """

    def __call__(self, x: Array, norm: "RMSNorm", caches: Caches, *more: Chosen | None) -> Array:
        """x plus the mixer's output for norm(x)."""
        parts = self.begin(x, norm)
        return self.end(self.mix(parts, caches, *more), parts, x)

    def mixed(self, x: Array, norm: "RMSNorm | None", caches: Caches, *more: Chosen | None) -> Array:
        """The mixer's output for norm(x) or x, without the residual."""
        parts = self.begin(x, norm)
        return self.end(self.mix(parts, caches, *more), parts, None)

    def set_experts(self, compute: OwnExperts) -> None:
        """`compute` makes what the mixer's own experts (`Mixer.experts`) make."""
        raise NotImplementedError

    @abstractmethod
    def begin(self, x: Array, norm: "RMSNorm | None") -> list[Array]:
        """The inputs of `mix` and `end`, from norm(x) or x."""

    @abstractmethod
    def mix(self, parts: Sequence[Array], caches: Caches, *more: Chosen | None) -> Array:
        """[B, L, .] from the results of `begin`. The layer's caches absorb the tokens, the mixer's own first; each is a
        `LayerCache`, its traced stand-in, or `StepRows`.
        """

    @abstractmethod
    def end(self, out: Array, parts: Sequence[Array], x: Array | None) -> Array:
        """The projection of the result of `mix`, plus x if it is given."""


class Convolution(nn.Module):
    """The parameters of a causal convolution of each channel by itself: the weight [channels, taps, 1], and a bias
    [channels] if it has one. A publisher's checkpoint stores the weight as [channels, 1, taps].
    """

    def __init__(self, channels: int, taps: int, bias: bool = False):
        super().__init__()
        self.weight = mx.zeros((channels, taps, 1))
        if bias:
            self.bias = mx.zeros((channels,))


class BranchConvolution(Convolution):
    """What the output of a layer's part passes before it is added to `residual`, if that is given."""

    def __init__(self, rule: ShortConvolution):
        super().__init__(rule.channels, rule.taps)
        self.factor = rule.factor

    def __call__(self, x: Array, cache: AnyCache, residual: Array | None = None) -> AnyArray:
        return convolved(x, cache, self.weight, self.factor, residual=residual)


class Embedding(Weight):
    """Rows of W [num_embeddings, dims] by token id, normed if there is an `eps`."""

    def __init__(self, num_embeddings: int, dims: int, eps: float | None = None):
        super().__init__(num_embeddings, dims)
        if eps is not None:
            self.norm = RMSNorm(dims, eps)

    def __call__(self, ids: Array) -> Array:
        rows = embed(ids, self)
        return self.norm(rows) if "norm" in self else rows


@dataclass(frozen=True)
class LastProduct:
    """Logits of normed hidden states [..., D]: the product with a matrix times `scale`, limited to `cap` if there is
    one.
    """

    matrix: Linear | Embedding
    cap: float | None
    scale: float

    def __call__(self, hidden: Array) -> Array:
        logits: Array = linear(hidden, self.matrix)
        return softcap(logits if self.scale == 1.0 else logits * self.scale, self.cap)


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight, in float32 inside (arXiv:1910.07467)."""

    def __init__(self, dims: int, eps: float):
        super().__init__()
        self.weight = mx.ones((dims,))
        self.eps = eps

    def __call__(self, x: Array) -> Array:
        return rms_norm(x, self.weight, self.eps)


class LayerNorm(nn.Module):
    """(x - mean) / sqrt(variance + eps) * weight + bias (arXiv:1607.06450), the bias only if `has_bias`."""

    def __init__(self, dims: int, eps: float, has_bias: bool = True):
        super().__init__()
        self.weight, self.eps = mx.ones((dims,)), eps
        if has_bias:
            self.bias = mx.zeros((dims,))

    def __call__(self, x: Array) -> Array:
        return layer_norm(x, self.weight, self.get("bias"), self.eps)


class GroupNorm(nn.Module):
    """An RMS norm of each of `groups` equal parts of x by itself, with one weight for all."""

    def __init__(self, dims: int, eps: float, groups: int):
        super().__init__()
        self.weight, self.eps, self.groups = mx.ones((dims,)), eps, groups

    def __call__(self, x: Array) -> Array:
        return group_norm(x, self.weight, self.eps, self.groups)


class GatedNorm(nn.Module):
    """y = norm(x), times sigmoid(up(silu(down(y))))."""

    def __init__(self, dims: int, eps: float, rank: int):
        super().__init__()
        self.norm, self.down_proj, self.up_proj = RMSNorm(dims, eps), Linear(dims, rank), Linear(rank, dims)
        self._rule = GatedConnections(1, rank)

    def __call__(self, x: AnyArray) -> AnyArray:
        if takes_token(x[:1, :1], self.down_proj, self.up_proj, self._rule):
            return row_by_row(self._of_rows, x.reshape(-1, x.shape[-1])).reshape(x.shape)
        return self._plain(x)

    def _of_rows(self, x: mx.array) -> mx.array:
        """Of rows x [T, D], or of one, which is the only stream of a gated connection."""
        if len(x) > 1:
            return self._plain(x)
        layers = self.norm.weight, self.down_proj, self.up_proj
        return token_mean(x.reshape(1, 1, -1), *layers, self._rule, self.norm.eps, None)[1].reshape(x.shape)

    def _plain(self, x: Array) -> Array:
        normed = self.norm(x)
        low = self.down_proj(normed)
        return gated(normed, self.up_proj(gated(low, low, "sigmoid")), "sigmoid")


def norm_of(residual: Residual, dims: int, eps: float, rank: int = 0) -> RMSNorm | LayerNorm | GroupNorm | GatedNorm:
    """A norm of such a stream; `rank`: of its gates, 0: it has none."""
    if rank:
        return GatedNorm(dims, eps, rank)
    if residual.norm_groups > 1:
        return GroupNorm(dims, eps, residual.norm_groups)
    return LayerNorm(dims, eps, has_bias=False) if residual.centred else RMSNorm(dims, eps)


class ScaledNorm(nn.Module):
    """x * weight, and then x / sqrt(mean(x^2) + eps)."""

    def __init__(self, dims: int, eps: float):
        super().__init__()
        self.weight, self.eps = mx.ones((dims,)), eps

    def __call__(self, x: Array) -> Array:
        return rms_norm(scaled(x, self.weight), None, self.eps)


class OutputNorm(nn.Module):
    """Adds a part's output to the stream: (h + norm(made)) * layer_scalar, the factor only if `has_scalar`."""

    def __init__(self, dims: int, eps: float, has_scalar: bool = False):
        super().__init__()
        self.norm = RMSNorm(dims, eps)
        if has_scalar:
            self.layer_scalar = mx.ones((1,))

    def __call__(self, h: Array, made: Array | Pair) -> Array:
        return add_normed(h, made, self.norm, self.get("layer_scalar"))


class MLP(nn.Module):
    """down(activation(gate x, up x)); of two `matrices`, down(activation(up x, up x))."""

    def __init__(self, dims: int, hidden_dims: int, activation: Activation = SILU, matrices: int = 3):
        super().__init__()
        self.activation = activation
        if matrices == 3:
            self.gate_proj = Linear(dims, hidden_dims)
        self.up_proj = Linear(dims, hidden_dims)
        self.down_proj = Linear(hidden_dims, dims)
        self.arrange()

    def arrange(self) -> None:
        """Joins the layers that read x; called again once they have their tensors."""
        self._inputs = Stack(self.gate_proj, self.up_proj) if "gate_proj" in self else Stack(self.up_proj)
        self.down_proj.pack()

    @property
    def gate_up(self) -> Linear | None:
        """Gate's rows and then up's, if there is a gate and they are stored alike."""
        return self._inputs.stacked if "gate_proj" in self else None

    def __call__(
        self,
        x: Array,
        scale: Array | None = None,
        norm: Norm | None = None,
        residual: Array | None = None,
        squashed: bool = False,
    ) -> Array:
        """The MLP of norm(x), plus `residual`. `scale` [..., 1] or, if that is `squashed`, its sigmoid multiplies the
        result; it is applied before the last product, with the activation.
        """
        _, made = self._inputs(x, norm)
        return self.down_proj(activate(made[0], made[-1], self.activation, scale, squashed), residual=residual)

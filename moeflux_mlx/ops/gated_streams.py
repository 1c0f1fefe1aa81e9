"""Gated connections between several residual streams (transformers, `Qwen4ExpTextGatedResidual`), and gates that let
messages into inputs of parts (`Messages`).

For a single token a GPU computes a part's input in two launches, of which the first also adds the output of the part
before; after a layer's last part a launch only adds. The kernels compute in float32 up to their results.
"""

from typing import NamedTuple

import mlx.core as mx

from ..kinds import GatedConnections
from ..quant import TABLE, Quant
from . import backend
from .backend import AnyArray, Array, kernels_take
from .elementwise import sigmoid
from .forms import StoredForm, is_read, stored_template
from .launch import LEAST_ELEMENTS, SEVERAL, Kernel, Launch, Reason, Shape, ceildiv
from .matrix import Weights, stored
from .streams import plan_scatter
from .tiles import lanes_of, planned

LOW = Kernel("streams_low", "h out mixing weight eps w scales biases", "made next")
MEAN = Kernel("streams_mean", "h weight made w scales biases", "x mixing")
ROWS, SIMDGROUPS = 2, 4  # of a threadgroup of LOW
THREADS, LANES = 256, 8  # of a threadgroup of MEAN; and of those that share a column, at most


def gated_mean(normed: Array, logits: Array, streams: int) -> Array:
    """The mean [B, L, D] over n streams of normed [B, L, n * D], each value times the sigmoid of its logit."""
    B, L, _ = normed.shape
    return (sigmoid(logits) * normed).reshape(B, L, streams, -1).mean(axis=2)


def injected(h: AnyArray, out: AnyArray, weights: AnyArray) -> AnyArray:
    """h [B, L, n * D] plus out [B, L, D] in each stream, times weights [B, L, n]."""
    (B, L, width), streams = h.shape, weights.shape[-1]
    if kernels_take(h, refusal, B * L):
        return plan_scatter(backend.name(), width, h.dtype, streams, False)(h, out, weights)[0]
    return h + (weights[..., None] * out[:, :, None]).reshape(h.shape)


@planned("gated_streams")
def refusal(target: str, tokens: int) -> Reason | None:
    """Why the kernels do not take this number of tokens."""
    return None if tokens == 1 else SEVERAL


@planned("gated_streams")
def form_refusal(quant: Quant | None, columns: int) -> Reason | None:
    """Why the kernels do not take a matrix with this number of columns."""
    if columns % 8:
        return Reason(f"rows of {columns} columns are not a multiple of 8")
    if quant is not None and (quant.has_global_scale or quant.codes == TABLE or not is_read(quant, columns)):
        return Reason(f"the kernels do not read {quant} in rows of {columns} columns")
    return None


def takes_token(h: Array, low: Weights, up: Weights, rule: GatedConnections) -> bool:
    """Whether `token_mean` takes the streams h [B, L, n * D] and these matrices."""
    if not kernels_take(h, refusal, h.shape[0] * h.shape[1]):
        return False
    D = h.shape[-1] // rule.streams
    return not (D % 8 or form_refusal(low.quant, low.shape[1]) or form_refusal(up.quant, up.shape[1]))


class Behind(NamedTuple):
    """What is added to the streams: a part's output [1, 1, D], and its weight in each stream, [1, 1, n] float32."""

    out: AnyArray
    weights: AnyArray


def token_mean(
    h: mx.array, norm: mx.array, low: Weights, up: Weights, rule: GatedConnections, eps: float, behind: Behind | None
) -> tuple[mx.array, mx.array, mx.array]:
    """The streams h [1, 1, n * D] of a token after `behind`, a part's input [1, 1, D] from them, and the weights
    [1, 1, n] float32 for adding its output.

    Args:
        norm: [n * D], the weight of the norm of the streams.
        low: [rank, n * D], or [rank + n, n * D] if its last rows give the weights; without them these are zeros.
        up: [n * D, rank].
    """
    (w_low, low_form), (w_up, up_form) = stored(low), stored(up)
    shapes, types, forms = (h.shape[-1], low.shape[0]), (h.dtype, norm.dtype), (low_form, up_form)
    products, mean = plan_mean(backend.name(), shapes, types, forms, rule, behind is not None)
    made, following = products(h, *(behind or (h, h)), norm, eps, *w_low)
    h = h if behind is None else following
    x, mixing = mean(h, norm, made, *w_up)
    return h, x, mixing


@planned("gated_streams")
def plan_mean(
    target: str,
    shapes: tuple[int, int],
    types: tuple[mx.Dtype, mx.Dtype],
    forms: tuple[StoredForm, StoredForm],
    rule: GatedConnections,
    adds: bool,
) -> tuple[Launch, Launch]:
    """The launch of the products with the normed streams, which `adds` to them first, and that of the mean."""
    (width, rows), n = shapes, rule.streams
    common = {"X": types[0], "W": types[1], "N": n, "D": width // n, "O": rows}
    template = common | {"R": ROWS, "SG": SIMDGROUPS, "ADDS": int(adds), "GATES": 1} | stored_template(forms[0])
    made: list[tuple[Shape, mx.Dtype]] = [((rows + n,), mx.float32)]
    made += [((1, 1, width if adds else LEAST_ELEMENTS), types[0])]  # streams, if there are new ones
    products = Launch(target, LOW, template, (ceildiv(rows, ROWS), 1), 32 * SIMDGROUPS, made)
    lanes = lanes_of(rule.rank // 8, LANES)
    template = common | {"LOW": rule.rank, "L": lanes, "T": THREADS, "GATES": 0} | stored_template(forms[1])
    outputs = [((1, 1, width // n), types[0]), ((1, 1, n), mx.float32)]
    return products, Launch(target, MEAN, template, (ceildiv(width // n * lanes, THREADS), 1), THREADS, outputs)


def takes_messages(x: Array, low: Weights | None, up: Weights | None, gates: int) -> bool:
    """Whether `let_in` takes inputs [B, L, D] and these matrices; None: they are not joined."""
    if low is None or up is None or not kernels_take(x, refusal, x.shape[0] * x.shape[1]):
        return False
    is_odd = x.shape[-1] % 8 or up.shape[1] % ROWS or low.shape[0] != gates * up.shape[1]
    return not (is_odd or form_refusal(low.quant, low.shape[1]) or form_refusal(up.quant, up.shape[1]))


def let_in(h: mx.array, low: Weights, up: Weights, eps: float, gates: int) -> mx.array:
    """The inputs [1, 1, gates * D] with messages let in.

    Args:
        h: [1, 1, gates * 2 * D], of each gate the input and then the message.
        low: [gates * rank, 2 * D].
        up: [gates * 2 * D, rank], of each gate the rows that forget and then those that gain.
    """
    (w_low, low_form), (w_up, up_form) = stored(low), stored(up)
    sizes = h.shape[-1] // (2 * gates), up.shape[1], gates
    products, mean = plan_messages(backend.name(), sizes, h.dtype, (low_form, up_form))
    made, _ = products(h, h, h, backend.constant(1.0, (2 * sizes[0],)), eps, *w_low)
    x, _ = mean(h, h, made, *w_up)
    return x


@planned("gated_streams")
def plan_messages(
    target: str, sizes: tuple[int, int, int], dtype: mx.Dtype, forms: tuple[StoredForm, StoredForm]
) -> tuple[Launch, Launch]:
    """The launches of `let_in`, for this width, rank, and number of gates."""
    width, rank, gates = sizes
    common = {"X": dtype, "N": 2, "D": width, "GATES": gates, "O": gates * rank}
    template = common | {"W": mx.float32, "R": ROWS, "SG": SIMDGROUPS, "ADDS": 0} | stored_template(forms[0])
    made = [((gates * rank + 2,), mx.float32), ((LEAST_ELEMENTS,), dtype)]  # of one gate with the factors
    products = Launch(target, LOW, template, (ceildiv(gates * rank, ROWS), 1), 32 * SIMDGROUPS, made)
    lanes = lanes_of(rank // 8, LANES)
    template = common | {"LOW": rank, "L": lanes, "T": THREADS} | stored_template(forms[1])
    outputs = [((1, 1, gates * width), dtype), ((LEAST_ELEMENTS,), mx.float32)]
    blocks = gates * ceildiv(width * lanes, THREADS)
    return products, Launch(target, MEAN, template, (blocks, 1), THREADS, outputs)

"""Chooses each token's experts and their weights, always in float32.

Ties are broken by the lowest index, so that a result never depends on the backend.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, cast

import mlx.core as mx
import numpy as np

from ..kinds import Router
from . import backend, native
from .backend import AnyArray, Array, kernels_take, of_kind
from .elementwise import float32, pick, plus, sigmoid, softmax, softplus
from .forms import MULTIPLE, Form, is_read
from .launch import LEAST_ELEMENTS, Input, Kernel, Launch, Reason, Shape, ceildiv
from .linear import linear
from .matrix import Weights, inputs_of
from .norm import rms_norm
from .tiles import MAX_TOKENS, planned, tile_of

# Backends on which the host should read arrays of 8 bytes: on CUDA, MLX keeps these on the host, but moves any other
# array that the host reads to managed memory, whose pages then migrate.
HOST_COPY = {"cuda"}
# Rows of a prompt that the kernel of norm and logits takes. Every row computes its own norm in each threadgroup, but up
# to this number the host decides how long a prompt takes on CUDA, and MLX has six operations for the same.
MOST_ROWS = {"cuda": 256}
TABLE = Kernel("topk_table", "logits table tokens scale", "ids weights")
# The functions of logits, by the names of `Router.score`; kernels number them in this order.
SCORES: dict[str, Any] = {
    "softmax": softmax,
    "sigmoid": sigmoid,
    "sqrtsoftplus": lambda logits: softplus(logits) ** 0.5,
}


@dataclass(frozen=True)
class Choice:
    """The input of a router's choice.

    Args:
        logits: [T, O] float32, of which the first columns are the experts'.
        rule: the router.
        bias: [E] float32, if the rule has a correction bias.
        scales: [E] float32, if it has `expert_scales`.
    """

    logits: AnyArray  # mx.array | np.ndarray
    rule: Router
    bias: mx.array | None = None
    scales: mx.array | None = None


def route(
    logits: Array, rule: Router, bias: mx.array | None = None, scales: mx.array | None = None
) -> tuple[Array, Array]:
    """Chooses each token's experts by its logits, and computes their weights.

    Scores are the softmax over all experts (Qwen3MoeTopKRouter in Hugging Face transformers), sigmoids (DeepSeek-V3,
    arXiv:2412.19437, section 2.1.2) or roots of softplus (DeepSeek-V4's model code in transformers). The correction
    bias takes part in the choice only; a group's score is the sum of its two best experts; those of dropped groups are
    masked with -inf, so a negative score never loses to them.

    Args:
        logits: [T, O] float32, of which the first columns are the experts'.
        rule: the router.
        bias: [E] float32, where the rule has a correction bias.
        scales: [E] float32, where it has `expert_scales`: each expert's weight is multiplied by its own (transformers,
            `Gemma4TextRouter`).

    Returns:
        (ids [T, k], weights [T, k] float32); ids are unsigned integers, largest score first.
    """
    if kernels_take(logits, refusal, rule):
        return route_kernel(logits, rule, bias, scales)
    if isinstance(logits, np.ndarray) and not native_refusal(rule):
        chosen, weights = native.choose(logits, rule.experts, rule.top_k, rule.normalise, rule.scale)
        return chosen, _scaled(weights, chosen, scales)
    logits = logits[:, : rule.experts]
    scores = SCORES[rule.score](logits)
    choice = logits if rule.biases_logits else scores
    choice = choice if bias is None else plus(choice, bias)
    ids = top_k(_of_kept_groups(choice, rule), rule.top_k)
    return ids, _scaled(_weights(pick(scores, ids), rule), ids, scales)


def _scaled(weights: Array, ids: Array, scales: mx.array | None) -> Array:
    """weights [T, k], each times its expert's scale in `scales` [E], if there are any."""
    if scales is None:
        return weights
    return weights * of_kind(scales, ids)[ids]


def route_by_table(logits: AnyArray, rule: Router, table: mx.array, tokens: AnyArray) -> tuple[AnyArray, AnyArray]:
    """As `route`, but a table gives the experts.

    Args:
        logits: [T, O] float32, of which the first columns are the experts'.
        rule: the router, which gives the weights alone.
        table: uint32 [token ids, k], the experts of each.
        tokens: [T] ids.
    """
    if kernels_take(logits, table_refusal, rule):
        ids, weights = plan_table(backend.name(), logits.shape, rule)(logits, table, tokens, rule.scale)
        return ids, weights
    rows = table_rows(table, tokens)
    scores = SCORES[rule.score](logits[:, : rule.experts])
    return rows, _weights(pick(scores, rows), rule)


def table_rows(table: mx.array, tokens: Array) -> Array:
    """The experts [T, k] of T token ids."""
    return of_kind(table, tokens)[tokens]


def _weights(weights: Array, rule: Router) -> Array:
    """The weights of the chosen experts, from their scores."""
    if rule.normalise:
        total = weights.sum(axis=-1, keepdims=True)
        weights = weights / (total if rule.score == "softmax" else total + rule.eps)
    return weights if rule.scale == 1.0 else weights * rule.scale


def top_k(scores: Array, k: int) -> Array:
    """Indices [..., k] of the largest scores, largest first, ties by lowest index (a stable sort)."""
    if isinstance(scores, np.ndarray):
        return np.argsort(-scores, axis=-1, kind="stable")[..., :k]
    return mx.argsort(-scores, axis=-1)[..., :k]


def _of_kept_groups(choice: Array, rule: Router) -> Array:
    """`choice` [T, E], -inf in all but the best groups."""
    if rule.kept_groups == rule.groups:
        return choice
    library = backend.library_of(choice)
    T, E = choice.shape
    groups = choice.reshape(T, rule.groups, E // rule.groups)
    best_two = -library.sort(-groups, axis=-1)[..., : min(2, E // rule.groups)]
    kept = top_k(best_two.sum(axis=-1), rule.kept_groups)  # [T, kept groups]
    keep = (library.arange(rule.groups)[None, :, None] == kept[:, None, :]).any(axis=-1)
    return library.where(keep[..., None], groups, -mx.inf).reshape(T, E)


# ---- the kernel of a choice


def route_kernel(
    logits: mx.array, rule: Router, bias: mx.array | None = None, scales: mx.array | None = None
) -> tuple[AnyArray, AnyArray]:
    """`route` as a kernel: (ids [T, K] uint32, weights [T, K] float32)."""
    launch = plan(backend.name(), logits.shape, rule, bias is not None)
    ids, weights = launch(logits, *beside(Choice(logits, rule, bias, scales)))
    return ids, weights


def route_with_host_copy(
    logits: AnyArray, rule: Router, bias: mx.array | None = None, scales: mx.array | None = None
) -> tuple[AnyArray, AnyArray, Sequence[mx.array]]:
    """`route` with a copy of the choice for `read_host_copy`, for a host that waits. The copy is empty if it would not
    be faster.
    """
    target = backend.name()
    if target not in HOST_COPY or len(logits) > 1:
        chosen = route(logits, rule, bias, scales)
        return chosen[0], chosen[1], []
    launch = plan(target, logits.shape, rule, bias is not None, copies=True)
    ids, weights, *host_copy = launch(logits, *beside(Choice(logits, rule, bias, scales)))
    return ids, weights, host_copy


def read_host_copy(host_copy: Sequence[mx.array]) -> tuple[np.ndarray, np.ndarray]:
    """(ids [1, K] uint32, weights [1, K] float32 to 8 bits), of the evaluated copy of `route_with_host_copy`."""
    words = np.frombuffer(b"".join(cast(Any, host_copy)), np.uint32)[None]
    return words & 0xFFFF, (words & 0xFFFF0000).view(np.float32)


def host_copy_of(rule: Router) -> list[tuple[Shape, mx.Dtype]]:
    """Shapes and dtypes of the arrays with a token's ids that a host reads: of up to 8 bytes (`HOST_COPY`)."""
    dtype = mx.uint8 if rule.experts <= 256 else mx.uint16
    each = 8 // dtype.size
    return [((min(each, rule.top_k - first),), dtype) for first in range(0, rule.top_k, each)]


def read_ids(host_copy: Sequence[mx.array]) -> np.ndarray:
    """The ids [1, K] of a token, once they are computed, from arrays of unsigned integers that have them in turn."""
    return np.frombuffer(b"".join(cast(Any, host_copy)), f"u{host_copy[0].itemsize}")[None]


def beside(choice: Choice) -> tuple[Input, Input]:
    """The text's inputs besides the logits; none may be missing."""
    scale: Input = choice.rule.scale if choice.scales is None else choice.scales
    return choice.logits if choice.bias is None else choice.bias, scale


def choice_template(rule: Router, columns: int, has_bias: bool) -> dict[str, float]:
    """Constants of the text, for logits of `columns` columns."""
    template: dict[str, float] = {"E": rule.experts, "STRIDE": columns, "K": rule.top_k, "SCORE": score_number(rule)}
    by_logits = 2 if has_bias else 3
    template |= {
        "BIAS": by_logits if rule.biases_logits else int(has_bias),
        "GROUPS": rule.groups,
        "KEPT": rule.kept_groups,
    }
    return template | {"NORM": int(rule.normalise), "SCALED": int(rule.expert_scales), "EPS": rule.eps}


def score_number(rule: Router) -> int:
    """`SCORE` of the kernels' texts."""
    return list(SCORES).index(rule.score)


@planned("route")
def table_refusal(target: str, rule: Router) -> Reason | None:
    """Why no kernel weighs the experts that a table gives."""
    if rule.score == "softmax":
        return Reason("the kernel of a table of experts does not know a softmax")
    return Reason(f"a table gives {rule.top_k} experts, more than 32") if rule.top_k > 32 else None


@lru_cache(512)
def plan_table(target: str, shape: Shape, rule: Router) -> Launch:
    tokens, columns = shape
    template: dict[str, float] = {"STRIDE": columns, "K": rule.top_k, "SCORE": score_number(rule)}
    template |= {"NORM": int(rule.normalise), "EPS": rule.eps}
    chosen: Shape = (tokens, rule.top_k)
    return Launch(target, TABLE, template, (1, tokens), 32, [(chosen, mx.uint32), (chosen, mx.float32)])


@planned("route")
def refusal(target: str, rule: Router) -> Reason | None:
    """Why no kernel chooses by the rule: where there are kernels, one does."""
    return None


@planned("route")
def native_refusal(rule: Router) -> Reason | None:
    """Why the native kernel does not choose."""
    if rule.score != "softmax":
        return Reason(f"the native choice knows softmax, not {rule.score}")
    if rule.groups > 1 or rule.correction_bias:
        return Reason("the native choice knows neither groups nor a correction bias")
    return None


@lru_cache(512)
def plan(target: str, shape: Shape, rule: Router, has_bias: bool, copies: bool = False) -> Launch:
    tokens, columns = shape
    chosen: Shape = (tokens, rule.top_k)
    outputs = [(chosen, mx.uint32), (chosen, mx.float32)]
    kernel = Kernel("topk", "logits bias scale", "ids weights")
    if copies:
        host_copy: list[Shape] = [(min(2, rule.top_k - first),) for first in range(0, rule.top_k, 2)]
        outputs += [(shape, mx.uint32) for shape in host_copy]
        kernel = Kernel("topk_host_copy", kernel.inputs, f"{kernel.outputs} host_copy*{len(host_copy)}")
    return Launch(target, kernel, choice_template(rule, columns, has_bias), (1, tokens), 32, outputs)


# ---- the norm and the logits


def router_logits(
    h: Array,
    norm: mx.array | None,
    eps: float,
    w: Weights,
    bias: mx.array | None = None,
    x_norm: mx.array | None = None,
) -> tuple[Array, Array]:
    """The RMS norm of a few rows or of many, and its product with a router's matrix, plus a bias.

    Args:
        h: [..., H], T rows, in MLX's hands float32, bfloat16 or float16; each row at a multiple of 16 bytes.
        norm: [H], the norm's weight; None: there is no norm, and x is h.
        eps: the norm's.
        w: [O, H].
        bias: [O] float32.
        x_norm: [H], the weight of a norm of its own for x; None: `norm`.

    Returns:
        (x [T, H] normed, in h's dtype, logits [T, O] float32).
    """
    shape = h.size // h.shape[-1], h.shape[-1]
    if isinstance(h, mx.array):
        form = None if w.quant is None else Form(w.quant, w.second.dtype)
        weight = h if norm is None else norm
        dtypes = h.dtype, weight.dtype, w.weight.dtype
        launch = plan_logits(backend.name(), shape, dtypes, w.shape, form, bias is not None, norm is not None)
        if not isinstance(launch, Reason):
            x, logits = launch(
                h, weight, weight if x_norm is None else x_norm, eps, weight if bias is None else bias, *inputs_of(w)
            )
            return x, logits
    x = h.reshape(shape) if norm is None else rms_norm(h.reshape(shape), norm, eps)
    logits = linear(float32(x), w)
    x = x if x_norm is None else rms_norm(h.reshape(shape), x_norm, eps)
    return x, logits if bias is None else plus(logits, bias)


@planned("route", 512)
def plan_logits(
    target: str,
    h: Shape,
    dtypes: tuple[mx.Dtype, ...],
    w: Shape,
    form: Form | None,
    has_bias: bool = False,
    has_norm: bool = True,
) -> Launch | Reason:
    tokens, hidden = h
    rows = w[0]
    most = MOST_ROWS.get(target, MAX_TOKENS)
    if tokens > most:
        return Reason(f"there are more than {most} rows")
    if hidden % MULTIPLE:
        return Reason(f"{hidden} columns are not a multiple of {MULTIPLE}")
    if form and not (is_read(form.quant, hidden) and rows * form.quant.fewest(hidden) >= LEAST_ELEMENTS):
        return Reason(f"no kernel reads {rows} rows of {hidden} columns in {form}")
    tile = tile_of(target, "router")
    blocks = ceildiv(rows, tile.rows)
    template = {"X": dtypes[0], "H": hidden, "O": rows, "R": tile.rows, "SG": tile.simdgroups, "BLOCKS": blocks}
    template |= {"BIASED": int(has_bias), "NORM": int(has_norm)}
    kernel = Kernel("router_floats", "h norm x_norm eps bias w", "x logits")
    if form is not None:
        kernel = Kernel("router_codes", "h norm x_norm eps bias w scales biases", "x logits", form.header)
        template |= form.template
    outputs = [((tokens, hidden), dtypes[0]), ((tokens, rows), mx.float32)]
    return Launch(target, kernel, template, (blocks, tokens), 32 * tile.simdgroups, outputs)

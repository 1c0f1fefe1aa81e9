"""Which experts each token uses, and with which weights. Always in float32.

Ties are broken by the lowest index, so that a result never depends on the backend.
"""

from functools import lru_cache

import mlx.core as mx
import numpy as np

from ..kinds import Router
from . import backend
from .backend import Array, view
from .elementwise import pick, sigmoid, softmax
from .launch import Kernel, Launch, Shape

SOFTMAX_TOPK = Kernel("softmax_topk", "logits", "ids weights")


def route(logits: Array, rule: Router, bias: mx.array | None = None) -> tuple[Array, Array]:
    """The experts of each token, by its logits, and their weights.

    Scores are the softmax over all experts (Qwen3MoeTopKRouter in Hugging Face transformers) or sigmoids (DeepSeek-V3,
    arXiv:2412.19437, section 2.1.2). The correction bias takes part in the choice only; a group's score is the sum of
    its two best experts; experts of dropped groups are masked with -inf, so a negative score never loses to them.

    Args:
        logits: [T, E] float32.
        rule: the router.
        bias: [E] float32, where the rule has a correction bias.

    Returns:
        (ids [T, k], weights [T, k] float32); ids are unsigned integers, largest score first.
    """
    is_plain = rule.score == "softmax" and bias is None and rule.groups == 1 and rule.scale == 1.0
    if is_plain and isinstance(logits, mx.array) and backend.has_kernels():
        return softmax_topk(logits, rule.top_k, rule.normalise)
    scores = softmax(logits) if rule.score == "softmax" else sigmoid(logits)
    choice = scores if bias is None else scores + (view(bias) if isinstance(logits, np.ndarray) else bias)
    ids = top_k(_of_kept_groups(choice, rule), rule.top_k)
    weights = pick(scores, ids)
    if rule.normalise:
        total = weights.sum(axis=-1, keepdims=True)
        weights = weights / (total if rule.score == "softmax" else total + 1e-20)
    return ids, weights if rule.scale == 1.0 else weights * rule.scale


def top_k(scores: Array, k: int) -> Array:
    """Indices [..., k] of the largest scores, largest first, ties by lowest index (a stable sort)."""
    if isinstance(scores, np.ndarray):
        return np.argsort(-scores, axis=-1, kind="stable")[..., :k]
    return mx.argsort(-scores, axis=-1)[..., :k]


def _of_kept_groups(choice: Array, rule: Router) -> Array:
    """`choice` [T, E], -inf in all but the best groups."""
    if rule.kept_groups == rule.groups:
        return choice
    library = np if isinstance(choice, np.ndarray) else mx
    T, E = choice.shape
    groups = choice.reshape(T, rule.groups, E // rule.groups)
    best_two = -library.sort(-groups, axis=-1)[..., : min(2, E // rule.groups)]
    kept = top_k(best_two.sum(axis=-1), rule.kept_groups)  # [T, kept groups]
    keep = (library.arange(rule.groups)[None, :, None] == kept[:, None, :]).any(axis=-1)
    return library.where(keep[..., None], groups, -mx.inf).reshape(T, E)


def softmax_topk(logits: mx.array, k: int, norm_topk_prob: bool) -> tuple[mx.array, mx.array]:
    """The kernel for softmax scores: logits [T, E] float32 -> (ids [T, k] uint32, weights [T, k] float32).

    Weights sum to one with `norm_topk_prob`.
    """
    ids, weights = _plan(backend.name(), logits.shape, k, norm_topk_prob)(logits)
    return ids, weights


@lru_cache(512)
def _plan(target: str, shape: Shape, k: int, norm_topk_prob: bool) -> Launch:
    T, E = shape
    template = {"E": E, "K": k, "NORM": int(norm_topk_prob)}
    outputs = [((T, k), mx.uint32), ((T, k), mx.float32)]
    return Launch(target, SOFTMAX_TOPK, template, (1, T), 32, outputs)

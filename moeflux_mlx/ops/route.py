"""The two routers: which experts each token uses, and with which weights. Always in float32.

Ties are broken by the lowest index, so that a result never depends on the backend.
"""

import mlx.core as mx
import numpy as np

from . import cpu, mixer_kernels
from .kernels import has_kernels


def top_k(scores: cpu.Array, k: int) -> cpu.Array:
    """Indices [..., k] of the largest scores, largest first, ties by lowest index (a stable sort)."""
    if cpu.takes(scores):
        return np.argsort(-scores, axis=-1, kind="stable")[..., :k]
    return mx.argsort(-scores, axis=-1)[..., :k]


def softmax_topk(logits: mx.array, k: int, norm_topk_prob: bool) -> tuple[mx.array, mx.array]:
    """Softmax over all experts, then the k largest (Qwen3MoeTopKRouter in Hugging Face transformers).

    Args:
        logits: [T, E] float32.

    Returns:
        (ids [T, k] uint32, weights [T, k] float32), weights summing to 1 when `norm_topk_prob`.
    """
    if has_kernels() and not cpu.takes(logits):
        return mixer_kernels.softmax_topk(logits, k, norm_topk_prob)
    on_cpu = cpu.takes(logits)
    probs = cpu.softmax(logits) if on_cpu else mx.softmax(logits, axis=-1, precise=True)
    ids = top_k(probs, k)
    weights = cpu.pick(probs, ids) if on_cpu else mx.take_along_axis(probs, ids, axis=-1)
    return ids, weights / weights.sum(axis=-1, keepdims=True) if norm_topk_prob else weights


def noaux_tc_topk(
    logits: mx.array,
    correction_bias: mx.array,
    k: int,
    n_group: int,
    topk_group: int,
    norm_topk_prob: bool,
    routed_scaling_factor: float,
) -> tuple[mx.array, mx.array]:
    """DeepSeek-V3's router (arXiv:2412.19437, section 2.1.2).

    The correction bias takes part in the choice only; a group's score is the sum of its two best
    experts; experts of dropped groups are masked with -inf, so a negative score never loses to them.

    Args:
        logits: [T, E] float32.
        correction_bias: [E] float32.

    Returns:
        (ids [T, k] uint32, weights [T, k] float32)
    """
    on_cpu = cpu.takes(logits)
    library = np if on_cpu else mx
    scores = cpu.sigmoid(logits) if on_cpu else mx.sigmoid(logits)
    choice = scores + (cpu.view(correction_bias) if on_cpu else correction_bias)
    if topk_group < n_group:
        T, E = choice.shape
        groups = choice.reshape(T, n_group, E // n_group)
        best_two = -library.sort(-groups, axis=-1)[..., : min(2, E // n_group)]
        kept = top_k(best_two.sum(axis=-1), topk_group)  # [T, topk_group]
        keep = (library.arange(n_group)[None, :, None] == kept[:, None, :]).any(axis=-1)
        choice = library.where(keep[..., None], groups, -mx.inf).reshape(T, E)
    ids = top_k(choice, k)
    weights = cpu.pick(scores, ids) if on_cpu else mx.take_along_axis(scores, ids, axis=-1)
    if norm_topk_prob:
        weights = weights / (weights.sum(axis=-1, keepdims=True) + 1e-20)
    return ids, weights * routed_scaling_factor

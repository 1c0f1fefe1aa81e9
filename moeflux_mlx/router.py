"""The two routers: which experts each token uses, and with which weights. Always in float32.

Ties are broken by the lowest index, so that a result never depends on the backend.
"""

import mlx.core as mx


def top_k(scores: mx.array, k: int) -> mx.array:
    """Indices [..., k] of the largest scores, largest first, ties by lowest index (a stable sort)."""
    return mx.argsort(-scores, axis=-1)[..., :k]


def softmax_topk(logits: mx.array, k: int, norm_topk_prob: bool) -> tuple[mx.array, mx.array]:
    """Softmax over all experts, then the k largest (Qwen3MoeTopKRouter in Hugging Face transformers).

    Args:
        logits: [T, E] float32.

    Returns:
        (ids [T, k] uint32, weights [T, k] float32), weights summing to 1 when `norm_topk_prob`.
    """
    probs = mx.softmax(logits, axis=-1, precise=True)
    ids = top_k(probs, k)
    weights = mx.take_along_axis(probs, ids, axis=-1)
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
    scores = mx.sigmoid(logits)
    choice = scores + correction_bias
    if topk_group < n_group:
        T, E = choice.shape
        groups = choice.reshape(T, n_group, E // n_group)
        best_two = -mx.sort(-groups, axis=-1)[..., : min(2, E // n_group)]
        kept = top_k(best_two.sum(axis=-1), topk_group)  # [T, topk_group]
        keep = (mx.arange(n_group)[None, :, None] == kept[:, None, :]).any(axis=-1)
        choice = mx.where(keep[..., None], groups, -mx.inf).reshape(T, E)
    ids = top_k(choice, k)
    weights = mx.take_along_axis(scores, ids, axis=-1)
    if norm_topk_prob:
        weights = weights / (weights.sum(axis=-1, keepdims=True) + 1e-20)
    return ids, weights * routed_scaling_factor

"""The CPU path: a forward pass on numpy arrays and native kernels.

`enter` chooses it, once for each forward pass: from there on activations are float32 numpy arrays, and a layer
that meets one (`takes`) computes it here, at once, instead of adding to an MLX graph. Weights and caches stay
mx.arrays and are read in place; nothing here writes into one.
"""

from collections.abc import Iterator
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten

from ..spec import ModelArgs
from . import native

if TYPE_CHECKING:
    from ..model.linear import Weight
    from ..state.cache import KVCache

Array = Any  # numpy arrays in fact; callers are typed for MLX, whose arrays take the other branch
LANES = 16  # the native kernels want rows of whole vectors


def suits(args: ModelArgs) -> bool:
    """Whether the native kernels take a model of these sizes."""
    widths = (
        args.hidden_size,
        args.head_dim,
        args.intermediate_size,
        args.shared_expert_intermediate_size,
        args.linear_key_head_dim,
        args.linear_conv_dim,
        args.linear_value_head_dim,
        args.q_lora_rank,
        args.kv_lora_rank,
        args.qk_nope_head_dim,
        args.qk_rope_head_dim,
        args.v_head_dim,
    )
    return all(width % LANES == 0 for width in widths)


def enter(tokens: mx.array, dtype: mx.Dtype) -> Any:
    """`tokens` as numpy if a model with activations in `dtype` runs here: float32, on the CPU.

    Warns once if only the missing extension is in the way.
    """
    if dtype != mx.float32 or mx.default_device() != mx.cpu:
        return tokens
    native.warn_if_missing()
    return view(tokens) if native.available() else tokens


def settle(model: nn.Module) -> None:
    """Moves the weights of a model that will run here into huge pages."""
    if mx.default_device() == mx.cpu and native.available():
        for named in tree_flatten(model.parameters()):
            native.huge_pages(named[1])


def leave(x: Any) -> mx.array:
    """Back in MLX's hands."""
    return mx.array(x) if takes(x) else x


def takes(x: Any) -> bool:
    """Whether `x` is computed here."""
    return isinstance(x, np.ndarray)


def view(x: Any) -> np.ndarray:
    """The evaluated array's own memory, row-contiguous; bfloat16 as uint16."""
    if isinstance(x, mx.array) and x.dtype == mx.bfloat16:
        x = x.view(mx.uint16)
    return np.ascontiguousarray(np.asarray(x))


# ---- layers


def linear(x: Array, weight: "Weight") -> Array:
    """x [..., I] @ W.T -> [..., O]."""
    rows = np.ascontiguousarray(x.reshape(-1, x.shape[-1]))
    out = native.linear(rows, *_parts(weight)) if _is_native(weight) else rows @ _dense(weight).T
    return out.reshape(*x.shape[:-1], -1)


def embed(ids: Array, weight: "Weight") -> Array:
    """Rows of W by id: [...] -> [..., I]."""
    rows = [view(part)[ids.reshape(-1)] for part in _parts(weight)]
    if not weight.bits:
        out = rows[0]
    elif _is_native(weight):
        out = native.dequantize(*rows)
    else:
        out = _dense(weight)[ids.reshape(-1)]
    return out.reshape(*ids.shape, -1)


def rms_norm(x: Array, weight: Any, eps: float) -> Array:
    return native.rms_norm(np.ascontiguousarray(x).reshape(-1, x.shape[-1]), weight, eps).reshape(x.shape)


def silu_mul(gate: Array, up: Array) -> Array:
    """silu(gate) * up, of one shape."""
    rows = [np.ascontiguousarray(a).reshape(-1, a.shape[-1]) for a in (gate, up)]
    return native.silu_mul(*rows).reshape(gate.shape)


def split(x: Array, *ends: int) -> list[Array]:
    """Views of the last axis, cut at `ends`; np.split in a tenth of the time."""
    return [x[..., start:end] for start, end in zip((0, *ends), (*ends, x.shape[-1]), strict=True)]


def pick(x: Array, ids: Array) -> Array:
    """x[t, ids[t, k]] of x [T, E] and ids [T, K]."""
    return x[np.arange(len(x))[:, None], ids]


def float32(x: Any) -> Any:
    """x in float32, whichever kind of array it is."""
    return x if takes(x) else x.astype(mx.float32)


def sigmoid(x: Array) -> Array:
    """By tanh, which cannot overflow."""
    return np.float32(0.5) * np.tanh(np.float32(0.5) * x) + np.float32(0.5)


def softmax(x: Array) -> Array:
    """Over the last axis."""
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def log_softmax(logits: mx.array) -> mx.array:
    """logits - logsumexp(logits) over the last axis; by numpy on the CPU, where MLX's reduction is slow."""
    if logits.dtype != mx.float32 or mx.default_device() != mx.cpu:
        return logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    x = view(logits)
    shifted = x - x.max(axis=-1, keepdims=True)
    return mx.array(shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True)))


# ---- token mixers


@lru_cache(maxsize=16)
def angles(periods: bytes, magnitude: float, offset: int, length: int) -> tuple[Array, Array]:
    """(cosine, sine) [length, R/2] of positions from `offset`; `periods` holds float64 radians per position.

    Kept for a while, because all layers ask for the same positions.
    """
    angle = np.arange(offset, offset + length)[:, None] * np.frombuffer(periods)
    return (magnitude * np.cos(angle)).astype(np.float32), (magnitude * np.sin(angle)).astype(np.float32)


def attend(q: Array, k: Array, v: Array, cache: "KVCache", scale: float) -> Array:
    """Appends k, v [B, L, kv heads, D] to `cache`; q [B, L, heads, D] sees all up to itself -> [B, L, heads, D]."""
    cache.update_and_fetch(mx.array(k.transpose(0, 2, 1, 3)), mx.array(v.transpose(0, 2, 1, 3)))
    mx.eval(cache.keys, cache.values)  # one wait for both
    keys, values = view(cache.keys), view(cache.values)
    return stack([native.attend(q[i], keys[i], values[i], cache.offset, scale) for i in range(len(q))])


def stack(arrays: list[Array]) -> Array:
    """np.stack, without a copy of a single array."""
    return arrays[0][None] if len(arrays) == 1 else np.stack(arrays)


def head_matrices(weight: "Weight", heads: int, rows: slice) -> Iterator[Array]:
    """The dense `rows` of each head's matrix [..., columns] in turn; the memory is used again for the next."""
    if not _is_native(weight) or not weight.bits:
        dense = _dense(weight)
        yield from dense.reshape(heads, -1, dense.shape[-1])[:, rows]
        return
    parts = [view(part) for part in _parts(weight)]
    codes, scales, biases = (part.reshape(heads, -1, part.shape[-1])[:, rows] for part in parts)
    out = np.empty((codes.shape[1], 64 * scales.shape[2]), np.float32)
    for head in range(heads):
        yield native.dequantize(codes[head], scales[head], biases[head], out)


def _is_native(weight: "Weight") -> bool:
    return not weight.bits or (weight.bits in (4, 8) and weight.group_size == 64)


def _dense(weight: "Weight") -> Array:
    """A matrix in a form that the kernels do not read, unpacked in float32 whatever its scales are."""
    if not weight.bits:
        return view(weight.weight)
    scales, biases = weight.scales.astype(mx.float32), weight.biases.astype(mx.float32)
    return view(mx.dequantize(weight.weight, scales, biases, weight.group_size, weight.bits))


def _parts(weight: "Weight") -> list[Any]:
    return [weight[name] for name in weight.tensors()]

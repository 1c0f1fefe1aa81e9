"""Brings the tensors of every known checkpoint to one form, under the model's module paths.

What this form is: norms that multiply as they are; convolutions [channels, taps, 1]; the linear attention projections
flat, [q of all heads | k | v], z, b and a. Nothing here reads a tensor.
"""

from collections.abc import Iterable, Mapping

import mlx.core as mx
import numpy as np

from ..errors import ModelFileError
from ..families.names import canonical_name
from ..families.registry import FAMILIES
from ..formats.checkpoint import Tensor
from ..kinds import Delta
from ..spec import ModelArgs


def canonical_tensors(tensors: Iterable[Tensor], layers: int) -> dict[str, Tensor]:
    """{module path: tensor} of the tensors that are used.

    Raises:
        ModelFileError: two tensors are for the same place.
    """
    found: dict[str, Tensor] = {}
    for tensor in tensors:
        name = canonical_name(tensor.name, layers)
        if name is None:
            continue
        if name in found:
            raise ModelFileError(f"tensors {found[name].name} and {tensor.name} are both {name}")
        found[name] = tensor
    return found


def interleaved_rows(delta: Delta, layer: int) -> dict[str, tuple[tuple[str, np.ndarray], ...]]:
    """{fused module path: ((flat module path, its rows), ...)} for Qwen3-Next's grouped projections.

    Rows are grouped by key head, [q | k | its value heads' v | their z] and [b | a]
    (transformers, `Qwen3NextGatedDeltaNet.fix_query_key_value_ordering`).
    """
    stem = f"model.layers.{layer}.linear_attn.in_proj_"
    heads = delta.key_heads
    ratio = delta.value_heads // heads
    values = ratio * delta.value_dim
    q, k, v, z = _group(heads, [delta.key_dim] * 2 + [values] * 2)
    b, a = _group(heads, [ratio] * 2)
    return {
        f"{stem}qkvz": ((f"{stem}qkv", np.concatenate([q, k, v])), (f"{stem}z", z)),
        f"{stem}ba": ((f"{stem}b", b), (f"{stem}a", a)),
    }


def _group(heads: int, widths: list[int]) -> list[np.ndarray]:
    """Row numbers of each part, all heads after one another."""
    rows = np.arange(heads * sum(widths)).reshape(heads, -1)
    return [part.reshape(-1) for part in np.split(rows, np.cumsum(widths)[:-1], axis=1)]


def has_zero_centred_norms(args: ModelArgs, tensors: Mapping[str, Tensor]) -> bool:
    """True when norms are stored as weight - 1, the Hugging Face form of some families.

    MLX conversions have added the 1 and moved the convolution's axes; the convolution's shape tells.
    """
    if not FAMILIES[args.model_type].zero_centred:
        return False
    layer, delta = next(((i, mixer) for i, mixer in enumerate(args.mixers) if isinstance(mixer, Delta)), (0, None))
    if delta is None:
        return not any(".switch_mlp." in name for name in tensors)
    name = f"model.layers.{layer}.linear_attn.conv1d.weight"
    if name not in tensors:
        raise ModelFileError(f"tensor {name} is missing")
    return tensors[name].shape == (delta.channels, 1, delta.taps)


def is_zero_centred(args: ModelArgs, name: str) -> bool:
    """Whether the norm of this canonical name is one of those that may be stored as weight - 1."""
    return name.endswith(tuple(f"{norm}.weight" for norm in FAMILIES[args.model_type].zero_centred))


def add_one(weight: mx.array) -> mx.array:
    """float32: next to 1, bfloat16 would round away most of a small weight."""
    return weight.astype(mx.float32) + 1.0


def channels_first(convolution: mx.array) -> mx.array:
    """[channels, 1, taps] -> [channels, taps, 1]."""
    return mx.contiguous(convolution.swapaxes(1, 2))

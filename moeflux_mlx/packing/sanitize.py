"""Brings the tensors of every known checkpoint to one form, under the model's module paths.

In this form norms multiply as they are, convolutions are [channels, taps, 1], and matrices that a checkpoint stores as
one are apart. Nothing here reads a tensor.
"""

from collections.abc import Iterable, Mapping

import mlx.core as mx

from ..errors import ModelFileError
from ..families.names import canonical_name
from ..families.registry import FAMILIES
from ..formats.checkpoint import Tensor
from ..kinds import Delta
from ..spec import ModelArgs


def canonical_tensors(tensors: Iterable[Tensor], args: ModelArgs) -> dict[str, Tensor]:
    """{module path: tensor} of the tensors that are used.

    Raises:
        ModelFileError: two tensors are for the same place.
    """
    canonical: dict[str, Tensor] = {}
    renames = FAMILIES[args.model_type].renames
    for tensor in tensors:
        name = canonical_name(tensor.name, args.num_hidden_layers, renames)
        if name is None:
            continue
        if name in canonical:
            raise ModelFileError(f"tensors {canonical[name].name} and {tensor.name} are both {name}")
        canonical[name] = tensor
    return canonical


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

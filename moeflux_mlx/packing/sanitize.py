"""Brings the tensors of every known checkpoint to one form, under the model's module paths.

In this form norms need no added 1, convolutions are [channels, taps, 1], and fused matrices are separate. For a few
families one norm is read to determine the convention.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import cast

import mlx.core as mx

from ..errors import ModelFileError
from ..families.file_forms import telling_convolution
from ..families.names import canonical_name, head_name, renamed
from ..families.registry import FAMILIES
from ..formats.checkpoint import Tensor
from ..spec import ModelArgs
from .matrix import taken

LEAST_MEAN = 0.1  # least mean of a norm's weights


def canonical_tensors(tensors: Iterable[Tensor], args: ModelArgs) -> dict[str, Tensor]:
    """{module path: tensor} of the tensors that are used.

    Raises:
        ModelFileError: two tensors are for the same place.
    """
    canonical: dict[str, Tensor] = {}
    family = FAMILIES[args.model_type]
    renames, grouped = family.renames_of(args.layers), family.grouped
    for tensor in tensors:
        name = canonical_name(tensor.name, args.num_hidden_layers, renames)
        if name is None or (args.is_tied and name.startswith("lm_head.")):  # the embedding once more
            continue
        if name in canonical:
            raise ModelFileError(f"tensors {canonical[name].name} and {tensor.name} are both {name}")
        canonical[name] = _flat(tensor) if name.rpartition(".")[0].endswith(grouped) else tensor
    for name, places in family.copies(args.layers).items():
        if name in canonical:
            tensor = canonical.pop(name)
            canonical |= dict.fromkeys(places, tensor)
    return canonical


def head_tensors(tensors: Iterable[Tensor], args: ModelArgs) -> dict[str, Tensor]:
    """{module path: tensor} of a draft head, as a model of one layer, without the parts that it shares with the model.

    A file of nothing but a head may leave out the beginnings of names.

    Raises:
        ModelFileError: two tensors are for the same place.
    """
    family, tensors = FAMILIES[args.model_type], list(tensors)
    if family.head is None:
        return {}
    for start in ("", "mtp."):
        own: dict[str, Tensor] = {}
        for tensor in tensors:
            name = head_name(start + tensor.name, args.num_hidden_layers, family.head)
            name = name and renamed(name, family.renames)
            if name in own:
                raise ModelFileError(f"tensors {own[name].name} and {tensor.name} are both {name} of the draft head")
            if name is not None:
                own[name] = tensor
        if own:
            return own
    return {}


def _flat(tensor: Tensor) -> Tensor:
    """The tensor with its rows not grouped."""
    return replace(tensor, shape=(math.prod(tensor.shape[:-1]), *tensor.shape[-1:]))


def has_zero_centred_norms(args: ModelArgs, tensors: Mapping[str, Tensor]) -> bool:
    """True when norms are stored as weight - 1, the Hugging Face form of some families.

    MLX conversions have moved the convolution's axes, whose shape tells, and added the 1; or, in a family with either
    convention, may not have, and the values tell.

    Raises:
        ModelFileError: a tensor is missing, or cannot be read.
    """
    family = FAMILIES[args.model_type]
    if not family.zero_centred:
        return False
    telling = ((i, telling_convolution(mixer)) for i, mixer in enumerate(args.mixers))
    convolutions = [(i, *one) for i, one in telling if one is not None]
    if not convolutions:
        by_publisher = not any(".switch_mlp." in name or name.endswith(".part_weight") for name in tensors)
    else:
        layer, leaf, published = convolutions[0]
        name = f"model.layers.{layer}.{leaf}"
        by_publisher = taken(tensors, name).shape == published
    return by_publisher or (family.either_centred and lack_their_one(args, tensors))


def lack_their_one(args: ModelArgs, tensors: Mapping[str, Tensor]) -> bool:
    """True when the norms among `tensors` are stored as weight - 1: by their values, because who converts a model may
    leave all of it, or its draft head, as it was.

    A norm's weights have a positive mean. In Qwen3.6's heads it is 0.27 and 0.56 for `enorm` (jundot/omlx, issue 3742
    and pull request 1507), so that stored as weight - 1 at least this mean is negative.

    Raises:
        ModelFileError: a norm is yet to be downloaded.
    """
    norms = [tensor for name, tensor in tensors.items() if is_zero_centred(args, name)]
    absent = next((norm for norm in norms if not norm.file.exists()), None)
    if absent is not None:
        raise ModelFileError(
            f"the values of {absent.name} are needed to know how norms are stored: download the repository first"
        )
    means = [cast(float, tensor.read().astype(mx.float32).mean().item()) for tensor in norms]
    return bool(means) and min(means) < LEAST_MEAN


def is_zero_centred(args: ModelArgs, name: str) -> bool:
    """Whether the norm of this canonical name is one of those that may be stored as weight - 1."""
    return name.endswith(tuple(f"{norm}.weight" for norm in FAMILIES[args.model_type].zero_centred))

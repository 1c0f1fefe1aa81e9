"""Brings the names of tensors in every known checkpoint to one form: the model's module paths.

This form is `model.layers.N....` and `lm_head....`. Differences of a single family are in that family's file.
"""

import re
from collections.abc import Iterable

from .fields import HeadNames

# What plays no part in generating text, by the beginnings of names: heads that draft tokens, and image encoders.
ASIDE = (
    *("mtp.", "mtp_", "visual.", "vision_tower.", "vision_model."),
    *("multi_modal_projector.", "mm_projector.", "vit_large_projector.", "patch_merge_mlp.", "vision_adapter."),
    *("embed_vision.", "audio_tower.", "audio_encoder.", "embed_audio.", "vit.", "audio."),
    *("vision_encoder.", "vision_language_adapter.", "patch_merger.", "pre_mm_projector_norm.", "vision_projection."),
)
# Frequencies of rotations follow from the configuration; activations are not rounded to 8 bits; tokens of text take no
# bias of images.
UNUSED_ENDING = (
    *(".rotary_emb.inv_freq", "activation_scale", ".input_scale", ".input_global_scale"),
    *(".k_scale", ".v_scale"),  # of keys and values in 8 bits
    *(".input_amax", ".original_shape"),  # what ModelOpt measured, and the shape of what it rounded
    *(".gate.bias_vl", ".e_score_correction_bias_vl"),  # of DeepSeek's routers, for images
    *(".add_attn_alpha", ".add_ffn_alpha"),  # of Muse Spark's sums, which follow from the other weights
)

Renames = Iterable[tuple[str, str]]  # parts of names that stand for others, as (theirs, the model's)


def canonical_name(name: str, layers: int, renames: Renames = ()) -> str | None:
    """The module path of a checkpoint tensor, or None if it does not belong to the text model.

    Args:
        name: as the checkpoint has it.
        layers: of the model; layers from this number on draft tokens.
        renames: as the family has them.
    """
    if name.endswith(UNUSED_ENDING) or is_aside(name, layers):
        return None
    return renamed(_plain(name), renames)


def is_aside(name: str, layers: int) -> bool:
    """Whether a checkpoint tensor is part of an image encoder, or of a head that drafts tokens."""
    name = _plain(name)
    layer = re.match(r"model\.layers\.(\d+)\.", name)
    is_draft = layer is not None and int(layer[1]) >= layers
    return not name.endswith(UNUSED_ENDING) and (is_draft or name.removeprefix("model.").startswith(ASIDE))


def head_name(name: str, layers: int, head: HeadNames) -> str | None:
    """The draft head's name of a checkpoint tensor, or None if the tensor does not belong to it.

    Args:
        name: as the checkpoint has it, or as a file of nothing but the head may have it, without its beginning.
        layers: of the model.
        head: as the family has it.
    """
    name = _plain(name)
    name = name.removeprefix("model.") if name.startswith("model.mtp.") else name
    if name.endswith(UNUSED_ENDING):
        return None
    for theirs, ours in head.renames:
        theirs = theirs.format(layers=layers)
        if name.startswith(theirs):
            return None if ours is None else ours + name.removeprefix(theirs)
    return None


def _plain(name: str) -> str:
    """The name without what stands before that of a text model."""
    name = name.removeprefix("language_model.")
    return name.replace("language_model.", "", 1) if name.startswith("model.language_model.") else name


def renamed(name: str, renames: Renames) -> str:
    """The name with a family's `renames` made, one after another; behind a "^" stands the beginning of a name, before a
    "$" its end."""
    for theirs, ours in renames:
        if theirs.endswith("$"):
            name = name.removesuffix(theirs[:-1]) + ours if name.endswith(theirs[:-1]) else name
        elif theirs.startswith("^"):
            name = ours + name.removeprefix(theirs[1:]) if name.startswith(theirs[1:]) else name
        else:
            name = name.replace(theirs, ours)
    return name

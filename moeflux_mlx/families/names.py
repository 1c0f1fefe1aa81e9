"""Brings the names of tensors in every known checkpoint to one form: the model's module paths.

This form is `model.layers.N....` and `lm_head....`. What differs in one family stands in that family's file.
"""

import re
from collections.abc import Iterable

# What plays no part in generating text, by the beginnings of names: heads that draft tokens, and image encoders.
ASIDE = (
    *("mtp.", "visual.", "vision_tower.", "vision_model."),
    *("multi_modal_projector.", "mm_projector.", "vit_large_projector."),
)
# Frequencies of rotations follow from the configuration; activations are not rounded to 8 bits.
UNUSED_ENDING = (".rotary_emb.inv_freq", "activation_scale", ".input_scale")

Renames = Iterable[tuple[str, str]]  # parts of names that stand for others, as (theirs, the model's)


def canonical_name(name: str, layers: int, renames: Renames = ()) -> str | None:
    """The module path of a checkpoint tensor, or None for one that is no part of the text model.

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


def _plain(name: str) -> str:
    """The name without what stands before that of a text model."""
    name = name.removeprefix("language_model.")
    return name.replace("language_model.", "", 1) if name.startswith("model.language_model.") else name


def renamed(name: str, renames: Renames) -> str:
    """The name with a family's `renames` made, one after another."""
    for theirs, ours in renames:
        name = name.replace(theirs, ours)
    return name

"""Brings the names of tensors in every known checkpoint to one form: the model's module paths.

This form is `model.layers.N....` and `lm_head....`. What differs in one family stands in that family's file.
"""

import re
from collections.abc import Iterable

# Multi-token prediction heads and image encoders play no part in generating text; the rotary
# frequencies that old checkpoints store follow from the configuration; activations are not rounded to 8 bits.
OTHER_PARTS = (
    "mtp.",
    "visual.",
    "vision_tower.",
    "vision_model.",
    "multi_modal_projector.",
    "mm_projector.",
    "vit_large_projector.",
)
UNUSED = (*OTHER_PARTS, *(f"model.{part}" for part in OTHER_PARTS))
UNUSED_ENDING = (".rotary_emb.inv_freq", "activation_scale", ".input_scale")


Renames = Iterable[tuple[str, str]]  # parts of names that stand for others, as (theirs, the model's)


def canonical_name(name: str, layers: int, renames: Renames = ()) -> str | None:
    """The module path of a checkpoint tensor, or None for one that is not used.

    Args:
        name: as the checkpoint has it.
        layers: of the model; layers from this number on are multi-token prediction.
        renames: as the family has them.
    """
    name = name.removeprefix("language_model.")
    if name.startswith("model.language_model."):
        name = name.replace("language_model.", "", 1)
    if name.startswith(UNUSED) or name.endswith(UNUSED_ENDING):
        return None
    layer = re.match(r"model\.layers\.(\d+)\.", name)
    if layer and int(layer[1]) >= layers:
        return None
    return renamed(name, renames)


def renamed(name: str, renames: Renames) -> str:
    """The name with a family's `renames` made, one after another."""
    for theirs, ours in renames:
        name = name.replace(theirs, ours)
    return name

"""Brings the names of tensors in every known checkpoint to one form: the model's module paths.

What this form is: `model.layers.N....`, `lm_head....`; `shared_expert` in the singular; the router's bias beside the
router.
"""

import re

# Multi-token prediction heads and image encoders play no part in generating text; the rotary
# frequencies that old checkpoints store follow from the configuration.
UNUSED = ("mtp.", "model.mtp.", "visual.", "model.visual.", "vision_tower.", "model.vision_tower.")
UNUSED_ENDING = ".rotary_emb.inv_freq"


def canonical_name(name: str, layers: int) -> str | None:
    """The module path of a checkpoint tensor, or None for one that is not used.

    Args:
        name: as the checkpoint has it.
        layers: of the model; layers from this number on are multi-token prediction.
    """
    name = name.removeprefix("language_model.")
    if name.startswith("model.language_model."):
        name = name.replace("language_model.", "", 1)
    if name.startswith(UNUSED) or name.endswith(UNUSED_ENDING):
        return None
    layer = re.match(r"model\.layers\.(\d+)\.", name)
    if layer and int(layer[1]) >= layers:
        return None
    name = name.replace(".mlp.shared_experts.", ".mlp.shared_expert.")
    return name.replace(".mlp.gate.e_score_correction_bias", ".mlp.e_score_correction_bias")

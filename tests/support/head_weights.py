"""The tensors of draft heads: those of the model's last layer with attention, drawn anew, and four of their own.

Does not know: the package under test.
"""

import goldens
import oracle

# Families whose head is one additional layer.
LAYERED = ("deepseek_v3", "glm4_moe", "glm4_moe_lite", "glm5_next", "deepseek_v32", "glm_moe_dsa")


def head_tensors(family):
    """{hub name: Tensor}"""
    c, tensors = goldens.text_config(family), goldens.hub_tensors(family)
    own = "self_attn.indexer.wk.weight" if c.get("indexer_types") else "self_attn.o_proj.weight"
    layer = max(i for i in range(c["num_hidden_layers"]) if _of(family, i) + own in tensors)
    start, D = _of(family, layer), c["hidden_size"]
    norm = "centred_norm" if oracle.norm_offset(c) else "norm"
    names = names_of(family)
    specs = {
        names[""] + name.removeprefix(start): (array.shape, _kind(name, norm))
        for name, (_, array) in tensors.items()
        if name.startswith(start) and ".hc_" not in name
    }
    specs |= {names[own] + "weight": ((D,), norm) for own in ("model.norm.", "enorm.", "hnorm.")}
    specs[names["fc."] + "weight"] = ((D, 2 * D), "linear")
    return {name: goldens._draw(f"{family}/{name}", family, *spec) for name, spec in specs.items()}


def _of(family, layer):
    return f"{goldens._root(family)}layers.{layer}."


def names_of(family):
    if family not in LAYERED:
        own = {"model.norm.": "norm.", "enorm.": "pre_fc_norm_embedding.", "hnorm.": "pre_fc_norm_hidden."}
        return {"": "mtp.layers.0.", "fc.": "mtp.fc.", **{name: "mtp." + theirs for name, theirs in own.items()}}
    start = _of(family, goldens.text_config(family)["num_hidden_layers"])
    own = {"model.norm.": "shared_head.norm.", "enorm.": "enorm.", "hnorm.": "hnorm.", "fc.": "eh_proj."}
    return {"": start, **{name: start + theirs for name, theirs in own.items()}}


def _kind(name, norm):
    kinds = {"q_a_layernorm.weight": "norm", "norm.weight": norm, "correction_bias": "correction_bias"}
    kinds |= {".gate.weight": "router", ".bias": "bias"}
    return next((kind for end, kind in kinds.items() if name.endswith(end)), "linear")

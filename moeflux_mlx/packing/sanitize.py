"""Brings tensor names and layouts of every known checkpoint to one form: the model's module paths.

What this form is: `model.layers.N....`, `lm_head....`; `shared_expert` in the singular; the router's
bias beside the router; norms that multiply as they are; convolutions [channels, taps, 1]; the linear
attention projections flat, [q of all heads | k | v], z, b and a. Nothing here reads a tensor.
"""

import re
from collections.abc import Iterable, Mapping

import mlx.core as mx
import numpy as np

from ..errors import ModelFileError
from ..formats.checkpoint import Tensor
from ..spec import LINEAR, QWEN3_5_MOE, QWEN3_NEXT, ModelArgs

# Multi-token prediction heads and image encoders play no part in generating text; the rotary
# frequencies that old checkpoints store follow from the configuration.
UNUSED = ("mtp.", "model.mtp.", "visual.", "model.visual.", "vision_tower.", "model.vision_tower.")
UNUSED_ENDING = ".rotary_emb.inv_freq"
ZERO_CENTRED = ("input_layernorm", "post_attention_layernorm", "model.norm", "q_norm", "k_norm")


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


def interleaved_rows(args: ModelArgs, layer: int) -> dict[str, tuple[tuple[str, np.ndarray], ...]]:
    """{fused module path: ((flat module path, its rows), ...)} for Qwen3-Next's grouped projections.

    Rows are grouped by key head, [q | k | its value heads' v | their z] and [b | a]
    (transformers, `Qwen3NextGatedDeltaNet.fix_query_key_value_ordering`).
    """
    stem = f"model.layers.{layer}.linear_attn.in_proj_"
    heads = args.linear_num_key_heads
    ratio = args.linear_num_value_heads // heads
    values = ratio * args.linear_value_head_dim
    q, k, v, z = _group(heads, [args.linear_key_head_dim] * 2 + [values] * 2)
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
    """True when norms are stored as weight - 1: the Hugging Face form of Qwen3-Next and Qwen3.5.

    MLX conversions have added the 1 and moved the convolution's axes; the convolution's shape tells.
    """
    if args.model_type not in (QWEN3_NEXT, QWEN3_5_MOE):
        return False
    if LINEAR not in args.layer_types:
        return not any(".switch_mlp." in name for name in tensors)
    name = f"model.layers.{args.layer_types.index(LINEAR)}.linear_attn.conv1d.weight"
    if name not in tensors:
        raise ModelFileError(f"tensor {name} is missing")
    return tensors[name].shape == (args.linear_conv_dim, 1, args.linear_conv_kernel_dim)


def is_zero_centred(name: str) -> bool:
    """Whether the norm of this canonical name is one of those that may be stored as weight - 1."""
    return name.endswith(tuple(f"{norm}.weight" for norm in ZERO_CENTRED))


def add_one(weight: mx.array) -> mx.array:
    """float32: next to 1, bfloat16 would round away most of a small weight."""
    return weight.astype(mx.float32) + 1.0


def channels_first(convolution: mx.array) -> mx.array:
    """[channels, 1, taps] -> [channels, taps, 1]."""
    return mx.contiguous(convolution.swapaxes(1, 2))

"""The flat fields by which the first release described a model, for the digests that its saved prompts hold.

They are frozen: a family that came later is described otherwise (`fingerprint`).
"""

from dataclasses import asdict
from typing import Any

from ..kinds import Dense
from ..spec import ModelArgs

FAMILIES = ("qwen3_moe", "qwen3_next", "qwen3_5_moe", "deepseek_v3")
SIZES = (
    *("model_type", "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *("head_dim", "rms_norm_eps", "max_position_embeddings", "num_experts", "num_experts_per_tok"),
    *("moe_intermediate_size", "moe_layers"),
)
# What only some mixers have; 0 if no layer has such a mixer.
LATENT = "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"
LINEAR = (
    *("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim"),
    "linear_conv_kernel_dim",
)


def of(args: ModelArgs) -> dict[str, Any]:
    """All of them, in values that JSON can say."""
    router, shared = args.experts.router, args.experts.shared
    dense = [layer.feed_forward.width for layer in args.layers if isinstance(layer.feed_forward, Dense)]
    fields: dict[str, Any] = {name: getattr(args, name) for name in SIZES}
    fields |= dict.fromkeys(LATENT + LINEAR, 0) | {"partial_rotary_factor": 1.0, "attn_output_gate": False}
    firsts = {type(mixer): mixer for mixer in reversed(args.mixers)}
    for mixer in firsts.values():
        fields |= mixer.flat_fields
    return fields | {
        "layer_types": ["linear_attention" if mixer.attention is None else "full_attention" for mixer in args.mixers],
        "intermediate_size": dense[0] if dense else 0,
        "shared_expert_intermediate_size": shared.width if shared else 0,
        "norm_topk_prob": router.normalise,
        "n_group": router.groups,
        "topk_group": router.kept_groups,
        "routed_scaling_factor": router.scale,
        "quantization": args.quantization and asdict(args.quantization),
    }

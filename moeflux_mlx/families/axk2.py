"""SK Telecom's A.X-K2: DeepSeek-V3.2, with gates in norms and of attention's values."""

from dataclasses import replace

from ..files import JsonDict
from ..kinds import LayerSpec, Residual
from ..mixers.latent.spec import Latent
from .deepseek import RENAMES as OF_DEEPSEEK
from .deepseek import indexed
from .fields import Family, Fields, FusedRows
from .fused_rows import grouped_rows

# Of transformers' class, where the published file leaves a field out.
USUAL = {
    **{"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "routed_scaling_factor": 2.5, "rope_theta": 1e4},
    **{"index_n_heads": 16, "index_head_dim": 128, "index_topk": 2048, "gated_norm_rank": 16},
}


def _axk2(read: Fields) -> JsonDict:
    read = read.with_usual(USUAL)
    args, residual = indexed(read, interleaved=False), Residual(gate_rank=read.count("gated_norm_rank", most=1 << 12))
    parts = (replace(one, mixer=replace(one.mixer, takes_both=True), residual=residual) for one in args["layers"])
    return {**args, "layers": tuple(parts)}


def _queries_and_gates(spec: LayerSpec, layer: int, shards: int) -> FusedRows:
    """One matrix makes both for each head."""
    mixer, stem = spec.mixer, f"model.layers.{layer}.self_attn."
    if not isinstance(mixer, Latent) or shards > 1:
        return {}
    queries, gates = grouped_rows(mixer.heads, [mixer.head_dim, mixer.value])
    return {f"{stem}q_gate_proj": ((f"{stem}q_b_proj", queries), (f"{stem}g_b_proj", gates))}


RENAMES = (
    *((".self_attn.q_b_proj.", ".self_attn.q_gate_proj."), ("layernorm.W_down.", "layernorm.down_proj.")),
    *(("layernorm.W_up.", "layernorm.up_proj."), *OF_DEEPSEEK),
)
FAMILIES = {"axk2": Family(_axk2, renames=RENAMES, fused_rows=_queries_and_gates)}

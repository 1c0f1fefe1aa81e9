"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1).

Only a latent vector and one rotated key, shared by all heads, are cached for each position. A short
query folds the key projection into itself and attends over the latents; a long one expands the
latents to keys and values first, because that is less arithmetic.
"""

import mlx.core as mx
import mlx.nn as nn

from .cache import LatentCache
from .config import ModelArgs
from .linear import Linear, RMSNorm, Weight
from .rope import RoPE, mscale

ABSORB_AT_MOST = (
    8  # query rows; beyond, expanding costs fewer multiplications than attending over 512-wide latents
)
LORA_NORM_EPS = 1e-6  # of the two latent norms, fixed in the published model code


class MLA(nn.Module):
    """The up-projection from the latent comes in one of two forms, as the checkpoint has it:

    `kv_b_proj` [heads, nope + v, latent] (rows of both kinds, quantised along the latent), or the pair
    `embed_q` [heads, latent, nope] and `unembed_out` [heads, v, latent]. `split_latent` tells which.
    """

    def __init__(self, args: ModelArgs, split_latent: bool = False):
        super().__init__()
        self.heads, self.latent = args.num_attention_heads, args.kv_lora_rank
        self.nope, self.rot, self.v_dim = args.qk_nope_head_dim, args.qk_rope_head_dim, args.v_head_dim
        self.split_latent = split_latent
        D = args.hidden_size
        self.q_a_proj = Linear(D, args.q_lora_rank)
        self.q_a_layernorm = RMSNorm(args.q_lora_rank, LORA_NORM_EPS)
        self.q_b_proj = Linear(args.q_lora_rank, self.heads * (self.nope + self.rot))
        self.kv_a_proj_with_mqa = Linear(D, self.latent + self.rot)
        self.kv_a_layernorm = RMSNorm(self.latent, LORA_NORM_EPS)
        if split_latent:
            self.embed_q = Weight(self.heads, self.latent, self.nope)
            self.unembed_out = Weight(self.heads, self.v_dim, self.latent)
        else:
            self.kv_b_proj = LatentProjection(self.heads, self.nope, self.v_dim, self.latent)
        self.o_proj = Linear(self.heads * self.v_dim, D)
        self.rope = RoPE(args, interleaved=True)
        self.scale = softmax_scale(args)

    def __call__(self, x: mx.array, cache: LatentCache) -> mx.array:
        B, L, _ = x.shape
        q = (
            self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))
            .reshape(B, L, self.heads, -1)
            .transpose(0, 2, 1, 3)
        )
        q_nope, q_pe = mx.split(q, [self.nope], axis=-1)  # [B, heads, L, nope], [B, heads, L, rot]
        latent, k_pe = mx.split(self.kv_a_proj_with_mqa(x), [self.latent], axis=-1)
        latent = self.kv_a_layernorm(latent)[:, None]  # [B, 1, L, latent]
        q_pe = self.rope(q_pe, cache.offset)
        k_pe = self.rope(k_pe[:, None], cache.offset)
        latent, k_pe = cache.update_and_fetch(latent, k_pe)
        attend = self._absorbed if L <= ABSORB_AT_MOST else self._expanded
        out = attend(q_nope, q_pe, latent, k_pe)
        return self.o_proj(out.transpose(0, 2, 1, 3).reshape(B, L, -1))

    def _absorbed(self, q_nope: mx.array, q_pe: mx.array, latent: mx.array, k_pe: mx.array) -> mx.array:
        q = self._key_weight(q_nope, into_latent=True)
        scores = (q @ latent.swapaxes(-1, -2) + q_pe @ k_pe.swapaxes(-1, -2)) * self.scale
        return self._value_weight(_softmax_causal(scores) @ latent)

    def _expanded(self, q_nope: mx.array, q_pe: mx.array, latent: mx.array, k_pe: mx.array) -> mx.array:
        k = self._key_weight(latent, into_latent=False)  # [B, heads, N, nope]
        v = self._value_weight(latent)
        scores = (q_nope @ k.swapaxes(-1, -2) + q_pe @ k_pe.swapaxes(-1, -2)) * self.scale
        return _softmax_causal(scores) @ v

    def _key_weight(self, x: mx.array, into_latent: bool) -> mx.array:
        """nope -> latent for queries, latent -> nope for keys; both read the same matrix."""
        if self.split_latent:
            return self.embed_q.multiply(x, transpose=into_latent)
        return self.kv_b_proj.key(x, transpose=not into_latent)

    def _value_weight(self, x: mx.array) -> mx.array:
        if self.split_latent:
            return self.unembed_out.multiply(x, transpose=True)
        return self.kv_b_proj.value(x)


class LatentProjection(Weight):
    """kv_b_proj viewed by head: the first `nope` rows make keys, the other `v_dim` rows values."""

    def __init__(self, heads: int, nope: int, v_dim: int, latent: int):
        super().__init__(heads * (nope + v_dim), latent)
        self.heads, self.nope = heads, nope

    def key(self, x: mx.array, transpose: bool) -> mx.array:
        return self._rows(slice(None, self.nope)).multiply(x, transpose)

    def value(self, x: mx.array) -> mx.array:
        return self._rows(slice(self.nope, None)).multiply(x, transpose=True)

    def _rows(self, rows: slice) -> Weight:
        part = Weight(0)
        part.bits, part.group_size = self.bits, self.group_size
        for name in ("weight", "scales", "biases") if self.bits else ("weight",):
            tensor = self[name]
            setattr(part, name, tensor.reshape(self.heads, -1, tensor.shape[-1])[:, rows])
        return part


def softmax_scale(args: ModelArgs) -> float:
    """head_dim^-1/2, times YaRN's mscale_all_dim magnitude squared (DeepSeek-V2's model code)."""
    scale = args.head_dim**-0.5
    yarn = args.rope_scaling
    if yarn is not None and yarn.mscale_all_dim:
        scale *= mscale(yarn.factor, yarn.mscale_all_dim) ** 2
    return scale


def _softmax_causal(scores: mx.array) -> mx.array:
    """scores [B, heads, L, N]; query row i is at position N - L + i and sees no later key."""
    L, N = scores.shape[-2:]
    if L > 1:
        later = mx.arange(N)[None] > mx.arange(N - L, N)[:, None]
        scores = mx.where(later, mx.array(-mx.inf, scores.dtype), scores)
    return mx.softmax(scores, axis=-1, precise=True)

"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1).

Only a latent vector and one rotated key, shared by all heads, are cached for each position. A short
query folds the key projection into itself and attends over the latents; a long one expands the
latents to keys and values first, because that is less arithmetic.
"""

from collections.abc import Iterator

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ..ops import cpu, kernels, native
from ..ops.rope import RoPE, mscale
from ..spec import ModelArgs
from ..state.cache import LatentCache
from .linear import Linear, RMSNorm, Weight

ABSORB_AT_MOST = 8  # query rows; beyond, expanding costs fewer multiplications than attending over 512-wide latents
Mask = mx.array | str | None
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
        if cpu.takes(x):
            return self.o_proj(self._native(x, cache))
        q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x))).reshape(B, L, self.heads, -1).transpose(0, 2, 1, 3)
        q_nope, q_pe = mx.split(q, [self.nope], axis=-1)  # [B, heads, L, nope], [B, heads, L, rot]
        latent, k_pe = mx.split(self.kv_a_proj_with_mqa(x), [self.latent], axis=-1)
        latent = self.kv_a_layernorm(latent)[:, None]  # [B, 1, L, latent]
        q_pe = self.rope(q_pe, cache.offset)
        k_pe = self.rope(k_pe[:, None], cache.offset)
        latent, k_pe = cache.update_and_fetch(latent, k_pe)
        attend = self._absorbed if L <= ABSORB_AT_MOST else self._expanded
        out = attend(q_nope, q_pe, latent, k_pe, cache.mask(L))
        return self.o_proj(out.transpose(0, 2, 1, 3).reshape(B, L, -1))

    def _absorbed(self, q_nope: mx.array, q_pe: mx.array, latent: mx.array, k_pe: mx.array, mask: Mask) -> mx.array:
        q = self._key_weight(q_nope, into_latent=True)
        scores = (q @ latent.swapaxes(-1, -2) + q_pe @ k_pe.swapaxes(-1, -2)) * self.scale
        return self._value_weight(_softmax(scores, mask) @ latent)

    def _expanded(self, q_nope: mx.array, q_pe: mx.array, latent: mx.array, k_pe: mx.array, mask: Mask) -> mx.array:
        k = self._key_weight(latent, into_latent=False)  # [B, heads, N, nope]
        v = self._value_weight(latent)
        scores = (q_nope @ k.swapaxes(-1, -2) + q_pe @ k_pe.swapaxes(-1, -2)) * self.scale
        return _softmax(scores, mask) @ v

    def _native(self, x: cpu.Array, cache: LatentCache) -> cpu.Array:
        """All but the last projection on the CPU: x [B, L, D] -> [B, L, heads * v_dim]."""
        B, L, _ = x.shape
        q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x))).reshape(B, L, self.heads, -1)
        q_nope, q_pe = cpu.split(q, self.nope)
        latent, k_pe = cpu.split(self.kv_a_proj_with_mqa(x), self.latent)
        q_pe = self.rope.rotate(q_pe, cache.offset)
        k_pe = self.rope.rotate(k_pe[:, :, None], cache.offset).reshape(B, 1, L, -1)
        cache.update_and_fetch(mx.array(self.kv_a_layernorm(latent)[:, None]), mx.array(k_pe))
        latent, k_pe = (cpu.view(part)[:, 0, : cache.offset] for part in (cache.keys, cache.values))
        attend = self._absorbed_native if L <= ABSORB_AT_MOST else self._expanded_native
        return cpu.stack([attend(q_nope[i], q_pe[i], latent[i], k_pe[i]) for i in range(B)]).reshape(B, L, -1)

    def _absorbed_native(self, q_nope: cpu.Array, q_pe: cpu.Array, latent: cpu.Array, k_pe: cpu.Array) -> cpu.Array:
        """q [L, heads, ...] over the latents [N, ...], which are keys and values of all heads alike."""
        L, N = len(q_nope), len(latent)
        q = np.empty((L, self.heads, self.latent + self.rot), np.float32)
        for head, matrix in enumerate(self._key_matrices()):
            q[:, head, : self.latent] = q_nope[:, head] @ matrix
        q[..., self.latent :] = q_pe
        mixed = native.attend(q, np.concatenate([latent, k_pe], axis=-1)[None], latent[None], N, self.scale)
        out = np.empty((L, self.heads, self.v_dim), np.float32)
        for head, matrix in enumerate(self._value_matrices()):
            out[:, head] = mixed[:, head] @ matrix.T
        return out

    def _expanded_native(self, q_nope: cpu.Array, q_pe: cpu.Array, latent: cpu.Array, k_pe: cpu.Array) -> cpu.Array:
        N = len(latent)
        k = np.empty((self.heads, N, self.nope + self.rot), np.float32)
        v = np.empty((self.heads, N, self.v_dim), np.float32)
        for head, (key, value) in enumerate(zip(self._key_matrices(), self._value_matrices(), strict=True)):
            k[head, :, : self.nope] = latent @ key.T
            v[head] = latent @ value.T
        k[..., self.nope :] = k_pe
        return native.attend(np.concatenate([q_nope, q_pe], axis=-1), k, v, N, self.scale)

    def _key_matrices(self) -> Iterator[cpu.Array]:
        """Each head's [nope, latent]."""
        if not self.split_latent:
            return cpu.head_matrices(self.kv_b_proj, self.heads, slice(None, self.nope))
        return (matrix.T for matrix in cpu.head_matrices(self.embed_q, self.heads, slice(None)))

    def _value_matrices(self) -> Iterator[cpu.Array]:
        """Each head's [v, latent]."""
        if not self.split_latent:
            return cpu.head_matrices(self.kv_b_proj, self.heads, slice(self.nope, None))
        return cpu.head_matrices(self.unembed_out, self.heads, slice(None))

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
    """kv_b_proj by head: the first `nope` rows make keys, the other `v_dim` rows values."""

    def __init__(self, heads: int, nope: int, v_dim: int, latent: int):
        super().__init__(heads * (nope + v_dim), latent)
        self.heads, self.nope = heads, nope

    def arrange(self) -> None:
        """On a GPU, once it has its tensors: two arrays take their place, because CUDA's products want no gaps."""
        if not kernels.has_kernels():
            return
        self.halves = [self._half(0), self._half(1)]
        for name in self.tensors():
            for half in self.halves:
                setattr(half, name, mx.contiguous(half[name]))
                mx.eval(half[name])
            self.pop(name)

    def key(self, x: mx.array, transpose: bool) -> mx.array:
        return self._half(0).multiply(x, transpose)

    def value(self, x: mx.array) -> mx.array:
        return self._half(1).multiply(x, transpose=True)

    def _half(self, index: int) -> Weight:
        """The keys' (0) or the values' (1) part, [heads, rows, latent]."""
        if "halves" in self:
            return self.halves[index]
        part = Weight(0)
        part.bits, part.group_size = self.bits, self.group_size
        rows = slice(self.nope, None) if index else slice(None, self.nope)
        for name in self.tensors():
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


def _softmax(scores: mx.array, mask: Mask) -> mx.array:
    """scores [B, heads, L, N]; "causal": query row i is at position N - L + i and sees no later key."""
    if isinstance(mask, str):
        L, N = scores.shape[-2:]
        mask = mx.arange(N)[None] <= mx.arange(N - L, N)[:, None]
    if mask is not None:
        scores = mx.where(mask, scores, mx.array(-mx.inf, scores.dtype))
    return mx.softmax(scores, axis=-1, precise=True)

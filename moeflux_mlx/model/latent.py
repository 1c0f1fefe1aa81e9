"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1): the projections before and after its core
operation.
"""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from ..kinds import Latent
from ..ops import backend
from ..ops.backend import Array
from ..ops.latent import HeadMatrices, Queries, Up, attend_latent
from ..ops.matrix import part_of_heads, parts_of
from ..ops.positions import Steps
from ..ops.rope import Rope, mscale
from ..ops.rows import RowCaches
from .layers import Linear, MixerModule, RMSNorm, Stack, Weight


class MLA(MixerModule):
    """The up-projection from the latent comes in one of two forms, as the checkpoint has it:

    `kv_b_proj` [heads, nope + v, latent] (rows of both kinds, quantised along the latent), or the pair
    `embed_q` [heads, latent, nope] and `unembed_out` [heads, v, latent]. `split_latent` says which.
    """

    def __init__(self, mixer: Latent, hidden_size: int, split_latent: bool = False):
        super().__init__()
        self.mixer, self.heads, self.latent, self.nope = mixer, mixer.heads, mixer.latent, mixer.nope
        self.split_latent = split_latent
        self.query_scale = mixer.query_scale
        queries = self.heads * mixer.head_dim
        if mixer.q_latent is None:
            self.q_proj = Linear(hidden_size, queries)
        else:
            self.q_a_proj = Linear(hidden_size, mixer.q_latent)
            self.q_a_layernorm = RMSNorm(mixer.q_latent, mixer.norm_eps)
            self.q_b_proj = Linear(mixer.q_latent, queries)
        self.kv_a_proj_with_mqa = Linear(hidden_size, self.latent + mixer.rotated)
        self.kv_a_layernorm = RMSNorm(self.latent, mixer.norm_eps)
        if split_latent:
            self.embed_q = Weight(self.heads, self.latent, self.nope)
            self.unembed_out = Weight(self.heads, mixer.value, self.latent)
        else:
            self.kv_b_proj = LatentProjection(self.heads, self.nope, mixer.value, self.latent)
        self.o_proj = Linear(self.heads * mixer.value, hidden_size)
        self.rope = Rope(mixer.rotation) if mixer.rotation else None
        self.scale = softmax_scale(mixer)

        self.arrange()

    def arrange(self) -> None:
        """Joins the layers that read x, and what kernels take at once; called again once all have their tensors."""
        self._inputs = Stack(*self._reading_x())
        if "q_b_proj" in self:
            self.q_b_proj.pack()
        self.o_proj.pack()

    def _reading_x(self) -> list[Linear]:
        """The layers that are joined: of queries, of latents, and perhaps others."""
        return [self.q_proj if "q_proj" in self else self.q_a_proj, self.kv_a_proj_with_mqa]

    def begin(self, x: Array, norm: RMSNorm | None) -> list[Array]:
        return self._inputs.outputs(x, norm)

    def mix(self, parts: Sequence[Array], cache: Steps | RowCaches, *more: Any) -> Array:
        _, (q, kv) = self._inputs.parted(parts)
        up = Up(self.q_b_proj, self.q_a_layernorm) if "q_b_proj" in self else None
        queries = Queries(self.heads, up, self.query_scale)
        around: Any = {"norm": self.kv_a_layernorm, "rope": self.rope, "scale": self.scale}
        return attend_latent(q, kv, cache, queries, self._key(), self._value(), **around)

    def end(self, out: Array, parts: Sequence[Array], x: Array | None) -> Array:
        return self.o_proj(out, residual=x)

    def _key(self) -> HeadMatrices:
        """Each head's [nope, latent]."""
        return HeadMatrices(self.embed_q, self.heads, transposed=True) if self.split_latent else self.kv_b_proj.key

    def _value(self) -> HeadMatrices:
        """Each head's [v, latent]."""
        return HeadMatrices(self.unembed_out, self.heads) if self.split_latent else self.kv_b_proj.value


class LatentProjection(Weight):
    """kv_b_proj by head: the first `nope` rows make keys, the other `v_dim` rows values."""

    def __init__(self, heads: int, nope: int, v_dim: int, latent: int):
        super().__init__(heads * (nope + v_dim), latent)
        self.heads, self._rows = heads, (slice(None, nope), slice(nope, None))

    def arrange(self) -> None:
        """On a GPU, splits the loaded matrix into two arrays, because CUDA's products need arrays without gaps."""
        if not backend.has_kernels():
            return
        self.halves = [Weight(0), Weight(0)]
        parts = [part_of_heads(self, self.heads, rows) for rows in self._rows]
        for half, part in zip(self.halves, parts, strict=True):
            half.quant = self.quant
            for name, array in zip(self.tensors(), parts_of(part), strict=True):
                setattr(half, name, mx.contiguous(array))
                mx.eval(half[name])
        for name in self.tensors():
            self.pop(name)

    @property
    def key(self) -> HeadMatrices:
        """Each head's [nope, latent]."""
        return self._matrices(0)

    @property
    def value(self) -> HeadMatrices:
        """Each head's [v_dim, latent]."""
        return self._matrices(1)

    def _matrices(self, index: int) -> HeadMatrices:
        if "halves" in self:
            return HeadMatrices(self.halves[index], self.heads)
        return HeadMatrices(self, self.heads, self._rows[index])


def softmax_scale(mixer: Latent) -> float:
    """head_dim^-1/2, times YaRN's mscale_all_dim magnitude squared (DeepSeek-V2's model code)."""
    scale = mixer.head_dim**-0.5
    yarn = mixer.rotation.yarn if mixer.rotation else None
    if yarn is not None and yarn.mscale_all_dim:
        scale *= mscale(yarn.factor, yarn.mscale_all_dim) ** 2
    return scale

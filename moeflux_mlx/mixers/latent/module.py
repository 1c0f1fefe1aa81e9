"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1): the projections before and after its core
operation; and the projections of an indexer, where it attends to chosen positions or blocks.
"""

from collections.abc import Sequence
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn

from ...layers import Caches, Linear, MixerModule, RMSNorm, Stack, Weight, normed_with_weights
from ...ops import backend
from ...ops.backend import AnyArray, Array, library_of
from ...ops.elementwise import float32, gated, split
from ...ops.index import Projections
from ...ops.matrix import part_of_heads, parts_of
from ...ops.norm import ConstantNorm, Norm
from ...ops.observe import observe
from ...ops.rope import Rope, mscale
from ...ops.rows import StepRows, each_alone
from ...ops.seen import Chosen
from .chosen_op import attend_indexed, attend_pools
from .op import HeadMatrices, Queries, Up, attend_latent, beside_normed
from .scoring import Growth, PoolScoring, Scoring
from .spec import Latent

# The ends of names of parameters that stay float32, and names of tensors that tell another stored form.
KEPT_FLOAT32: tuple[str, ...] = ("ape",)
FORMS: tuple[str, ...] = ("embed_q",)


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
            width = mixer.q_latent * (1 + mixer.takes_both)
            self.q_b_proj = Linear(width, queries)
            if mixer.takes_both:
                self.g_b_proj = Linear(width, self.heads * mixer.value)
        if not mixer.borrows:
            self.kv_a_proj_with_mqa = Linear(hidden_size, self.latent + mixer.rotated)
        self.kv_a_layernorm = RMSNorm(self.latent, mixer.norm_eps)
        if mixer.key_norm:
            self.k_rope_norm = RMSNorm(mixer.rotated, mixer.norm_eps)
        if split_latent:
            self.embed_q = Weight(self.heads, self.latent, self.nope)
            self.unembed_out = Weight(self.heads, mixer.value, self.latent)
        else:
            self.kv_b_proj = LatentProjection(self.heads, self.nope, mixer.value, self.latent)
        self.o_proj = Linear(self.heads * mixer.value, hidden_size)
        if mixer.gate is not None:
            self.g_proj = Linear(hidden_size, mixer.gates)
        if mixer.sinks:
            self.sinks = mx.zeros((self.heads,))
        self.rope = Rope(mixer.rotation) if mixer.rotation else None
        if mixer.rotation and mixer.rotation.learned:
            self.rotary_alpha = mx.zeros((mixer.rotated // 2,))
        if mixer.grows:
            self.softmax_scaling = Growth(self.heads)
        self.scale = softmax_scale(mixer)

        self.arrange()

    def arrange(self) -> None:
        """Joins the layers that read x, and what kernels take at once; called again once all have their tensors."""
        self._inputs = Stack(*self._reading_x(), aligned=True)  # for `latent_query`
        if "q_b_proj" in self:
            self.q_b_proj.pack()
        if "g_b_proj" in self:
            self._of_both = Stack(self.q_b_proj, self.g_b_proj)
        self.o_proj.pack()
        self._latent_norm: Norm = self.kv_a_layernorm
        if self.mixer.latent_gain != 1.0:
            weight = self.kv_a_layernorm.weight
            weight = (self.mixer.latent_gain * weight.astype(mx.float32)).astype(weight.dtype)
            mx.eval(weight)
            self._latent_norm = ConstantNorm(weight, self.kv_a_layernorm.eps)
        if "rotary_alpha" in self:
            for rope in self._ropes():
                rope.learn(self.rotary_alpha)

    def _ropes(self) -> list[Rope]:
        """Those that a learned rotation changes."""
        return [self.rope] if self.rope else []

    def _reading_x(self) -> list[Linear]:
        """The layers that are joined: of queries, of latents, and perhaps others."""
        gates = [self.g_proj] if "g_proj" in self else []
        latents = [] if self.mixer.borrows else [self.kv_a_proj_with_mqa]
        return [self.q_proj if "q_proj" in self else self.q_a_proj, *latents, *gates]

    def begin(self, x: Array, norm: RMSNorm | None) -> list[Array]:
        return self._with_queries(self._inputs.outputs(x, norm))

    def _with_queries(self, outputs: list[Array]) -> list[Array]:
        """The outputs, and behind them queries and gates where both latents make them."""
        if not self.mixer.takes_both:
            return outputs
        q: AnyArray = self._inputs.parted(outputs)[1][0]
        return [*outputs, *self._of_both.outputs(beside_normed(q, self.q_a_layernorm))]

    def _queries_and_gates(self, parts: Sequence[Array]) -> list[Array]:
        """Those of `_with_queries`."""
        return self._of_both.parted(parts[-1 if self._of_both.stacked else -2 :])[1]

    def mix(self, parts: Sequence[Array], caches: Caches, *more: Chosen | None) -> Array:
        _, (q, kv, *_) = self._inputs.parted(parts)
        self._show(kv)
        kv = self._with_normed_key(kv)
        around: Any = {"norm": self._latent_norm, "rope": self.rope, "scale": self.scale, "sinks": self.get("sinks")}
        around["window"] = self.mixer.window
        q = self._queries_and_gates(parts)[0] if self.mixer.takes_both else q
        return attend_latent(q, kv, caches[0], self._queries(), self._key(), self._value(), **around)

    def _with_normed_key(self, kv: Array) -> Array:
        """Latents and keys [B, L, N + R], with the keys normed if they have a norm."""
        if not self.mixer.key_norm:
            return kv
        latents, keys = split(kv, self.latent)
        return library_of(kv).concatenate([latents, self.k_rope_norm(keys)], axis=-1)

    def _queries(self) -> Queries:
        has_up = "q_b_proj" in self and not self.mixer.takes_both
        up = Up(self.q_b_proj, self.q_a_layernorm) if has_up else None
        return Queries(self.heads, up, self.query_scale)

    def end(self, out: Array, parts: Sequence[Array], x: Array | None) -> Array:
        if self.mixer.gate is not None:
            out = gated(out, self._outputs(parts)[2], self.mixer.gate)
        if self.mixer.takes_both:
            out = gated(out, self._queries_and_gates(parts)[1], "sigmoid")
        return self.o_proj(out, residual=x)

    def _outputs(self, parts: Sequence[Array]) -> list[Array]:
        """Of the results of `begin` those of the layers that are joined."""
        return self._inputs.parted(parts)[1]

    def _show(self, kv: Array) -> None:
        """Shows an observer what the up-projection multiplies, which is folded into other products."""
        if not self.split_latent:
            observe(self.kv_b_proj, kv[..., : self.latent], self._latent_norm)

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
        halves = [Weight(self.heads, one.height, self.shape[1]) for one in (self.key, self.value)]
        parts = [part_of_heads(self, self.heads, rows) for rows in self._rows]
        self.halves = halves
        for half, part in zip(halves, parts, strict=True):
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
    """head_dim^-1/2, times the queries' gain and YaRN's mscale_all_dim magnitude squared (DeepSeek-V2's model code)."""
    scale = mixer.head_dim**-0.5 * mixer.query_gain
    yarn = mixer.rotation.yarn if mixer.rotation else None
    if yarn is not None and yarn.mscale_all_dim:
        scale *= mscale(yarn.factor, yarn.mscale_all_dim) ** 2
    return scale


class IndexedMLA(MLA):
    """`MLA` over the positions that an indexer chooses."""

    def __init__(self, mixer: Latent, hidden_size: int, split_latent: bool = False):
        assert mixer.indexer is not None
        super().__init__(mixer, hidden_size, split_latent)
        self.rule = mixer.indexer
        if not self.rule.reuses:
            self.indexer = Scoring(self.rule, mixer, hidden_size)
            self.arrange()

    def _reading_x(self) -> list[Linear]:
        return [*super()._reading_x(), *([self.indexer.wk] if "indexer" in self else [])]

    def _ropes(self) -> list[Rope]:
        own = [self.indexer.rope] if "indexer" in self and self.indexer.rope else []
        return [*super()._ropes(), *own]

    def begin(self, x: Array, norm: RMSNorm | None) -> list[Array]:
        if self.rule.reuses:
            return super().begin(x, norm)
        made: tuple[Array, Array] = normed_with_weights(x, norm, self.indexer.weights_proj)
        own: list[Any] = [self.indexer.of_input(made[0])] if self.rule.from_input else []
        return [made[1], *own, *self._with_queries(self._inputs.outputs(made[0]))]

    def _outputs(self, parts: Sequence[Array]) -> list[Array]:
        return super()._outputs(parts if self.rule.reuses else parts[1 + self.rule.from_input :])

    def mix(self, parts: Sequence[Array], caches: Caches, *more: Chosen | None) -> Array:
        """As `MLA.mix`; `more`: what the last layer with an indexer chose for these tokens."""
        chosen = (more and more[0]) or Chosen()
        if isinstance(caches[0], StepRows):
            return each_alone(caches, parts, lambda i, own, *row: self._mix(row, own, chosen.of_row(i)))
        return self._mix(parts, caches, chosen)

    def _mix(self, parts: Sequence[Array], caches: Caches, chosen: Chosen) -> Array:
        q, *others = cast(list[Any], self._outputs(parts))
        own = caches[0]
        kv = self._with_normed_key(self._latents(others, chosen))
        made = None if self.rule.reuses else self._scored(q, others[-1], parts, own)
        self._show(kv)
        q = self._queries_and_gates(parts)[0] if self.mixer.takes_both else q
        return attend_indexed(
            *(q if not self.mixer.grows else self.softmax_scaling(q, own.position), kv, caches),
            *(self._queries(), self._key(), self._value()),
            made=made,
            indexer=self.rule,
            chosen=chosen,
            norm=self._latent_norm,
            rope=self.rope,
            scale=self.scale,
            sinks=self.get("sinks"),
        )

    def _latents(self, others: Sequence[Array], chosen: Chosen) -> Array:
        """Latents and keys [B, L, N + R], of the layer's own matrix or handed on by an earlier layer."""
        slot = "latents" if self.rope else "unrotated"
        if self.mixer.borrows:
            return getattr(chosen, slot)
        if self.mixer.shares:
            setattr(chosen, slot, others[0])
        return others[0]

    def _scored(self, q: Array, keys: Array, parts: Sequence[Array], own: Any) -> Projections:
        """What the indexer makes of the tokens; queries only if one of them does not attend to all."""
        queries: Array | None = None
        if own.whole(q.shape[1]) < q.shape[1]:
            queries = parts[1] if self.rule.from_input else self.indexer.wq_b(q, self.q_a_layernorm)
            queries = self.indexer.softmax_scaling(queries, own.position) if self.mixer.grows else queries
        return self.indexer(queries, keys, parts[0])


class PooledMLA(MLA):
    """`MLA` over the blocks of positions that an indexer chooses."""

    def __init__(self, mixer: Latent, hidden_size: int, split_latent: bool = False):
        assert mixer.blocks is not None
        super().__init__(mixer, hidden_size, split_latent)
        self.blocks = mixer.blocks
        self.indexer = PoolScoring(mixer.blocks, mixer, hidden_size)
        self.arrange()

    def arrange(self) -> None:
        """Joins the layers that read x; called again once all have their tensors."""
        super().arrange()
        if "indexer" in self:
            self._floats = Stack(self.indexer.weights_proj, self.indexer.wgate)

    def _reading_x(self) -> list[Linear]:
        return [*super()._reading_x(), *([self.indexer.wk] if "indexer" in self else [])]

    def begin(self, x: Array, norm: RMSNorm | None) -> list[Array]:
        weights_proj, wgate = self._floats.layers
        made: tuple[Array, Array] = normed_with_weights(x, norm, self._floats.stacked or weights_proj)
        more: list[Any] = [] if self._floats.stacked else [wgate(float32(made[0]))]
        return [*made[1:], *more, *self._inputs.outputs(made[0])]

    def mix(self, parts: Sequence[Array], caches: Caches, *more: Chosen | None) -> Array:
        if isinstance(caches[0], StepRows):
            return each_alone(caches, parts, lambda _, own, *row: self.mix(row, own))
        own, of_blocks = caches
        _, floats = self._floats.parted(parts)
        _, (q, kv, keys) = self._inputs.parted(parts[1 if self._floats.stacked else 2 :])
        latent = None if own.whole(q.shape[1]) == q.shape[1] else q
        self._show(kv)
        return attend_pools(
            *(q, kv, own, self._queries(), self._key(), self._value()),
            made=self.indexer(latent, self.q_a_layernorm, keys, floats, of_blocks),
            blocks=self.blocks,
            norm=self._latent_norm,
            rope=self.rope,
            scale=self.scale,
        )


def make_module(mixer: Latent, hidden_size: int, eps: float, forms: frozenset[str]) -> nn.Module:
    """The module of a layer with this mixer, for hidden states of `hidden_size` values. `forms`: with "embed_q" a
    checkpoint has the up-projection in two (`MLA`).
    """
    kind = PooledMLA if mixer.blocks else MLA if mixer.indexer is None else IndexedMLA
    is_gated = mixer.gate or mixer.sinks or mixer.takes_both
    assert kind is not PooledMLA or not is_gated, "no family has gates or sinks and blocks"
    assert kind is MLA or mixer.window is None, "no family has a window and an indexer"
    assert kind is IndexedMLA or not (mixer.grows or mixer.shares or mixer.borrows), "no family has these without"
    return kind(mixer, hidden_size, "embed_q" in forms)

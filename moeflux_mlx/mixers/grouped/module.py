"""Grouped-query attention: projections with norms, biases, sinks and gate, and those of an indexer that chooses blocks
of positions.
"""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ...caches.traced import PLAIN, OnKernels
from ...kinds import HeadBlocks, KeyBlocks, Rotation, Router
from ...layers import Caches, Convolution, Linear, MixerModule, OwnExperts, RMSNorm, Stack, normed_with_weights, packed
from ...ops.backend import AnyArray, Array, kernels_take, library_of, of_kind
from ...ops.convolution import convolved
from ...ops.elementwise import GATES, float32, gated, split
from ...ops.entry_pool import Pool
from ...ops.index import IndexTerms, Projections, refusal
from ...ops.norm import Norm, UnitNorm, rms_norm
from ...ops.rope import Rope
from ...ops.route import route
from ...ops.rows import AnyCache, StepRows, each_alone
from ...ops.seen import Chosen
from .biased_op import attend_biased
from .blocks_op import attend_blocks, block_keys
from .op import attend
from .spec import GroupedQuery
from .terms import Terms

# The ends of names of parameters that stay float32, and names of tensors that tell another stored form.
KEPT_FLOAT32: tuple[str, ...] = ()
FORMS: tuple[str, ...] = ()


class BlockIndexer(nn.Module):
    """Scores blocks of positions: makes queries and keys from the input, normed and rotated."""

    def __init__(self, blocks: KeyBlocks, rotation: Rotation, hidden_size: int, eps: float):
        super().__init__()
        self.blocks, indexer = blocks, blocks.indexer
        self.index_qk_proj = Linear(hidden_size, (indexer.heads + 1) * indexer.dim)
        self.q_layernorm, self.k_layernorm = RMSNorm(indexer.dim, eps), RMSNorm(indexer.dim, eps)
        self.rope, self.block_rope = Rope(rotation), Rope(rotation, blocks.ratio)

    @property
    def layers(self) -> list[Linear]:
        """The layers that read the input."""
        return [self.index_qk_proj]

    def __call__(self, outputs: Sequence[Array], cache: AnyCache) -> Projections:
        """For `attend_blocks`, of what `layers` made of tokens, whose keys `cache` absorbs."""
        queries, keys = split(outputs[0], self.blocks.indexer.heads * self.blocks.indexer.dim)
        kernels, width = PLAIN, keys.shape[-1]
        if keys.shape[:2] == (1, 1) and kernels_take(keys, refusal, True, self.blocks):
            kernels = OnKernels(pool=Pool(width, self.blocks.ratio, norm=self.k_layernorm, rope=self.block_rope).entry)
        _, _, of_blocks = cache.absorb(keys, self._keys, kernels)
        terms = IndexTerms(None, self.rope, self.blocks.indexer.dim**-0.5, self.q_layernorm)
        return Projections(queries, of_blocks, None, terms)

    def _keys(self, rows: Array, first: int | mx.array, count: int) -> Array:
        """Keys of so many blocks from number `first` on, of their positions' index keys."""
        return block_keys(rows, self.k_layernorm, self.block_rope, first, self.blocks.ratio)


class HeadIndexer(nn.Module):
    """Scores blocks of positions for each key head: makes queries and keys from the input, normed and rotated."""

    def __init__(self, blocks: HeadBlocks, rotation: Rotation, hidden_size: int, eps: float):
        super().__init__()
        heads, width = blocks.indexer.heads, blocks.indexer.dim
        self.q_proj, self.k_proj = Linear(hidden_size, heads * width), Linear(hidden_size, width)
        self.q_norm, self.k_norm = RMSNorm(width, eps), RMSNorm(width, eps)
        self.rope = Rope(rotation)

    @property
    def layers(self) -> list[Linear]:
        """The layers that read the input."""
        return [self.q_proj, self.k_proj]

    def __call__(self, outputs: Sequence[Array], cache: AnyCache) -> Projections:
        """For `attend_blocks`, of what `layers` made of tokens."""
        queries, keys = outputs
        return Projections(queries, keys, None, IndexTerms(self.k_norm, self.rope, query_norm=self.q_norm))


class HeadClip(nn.Module):
    """Shortens each of `heads` heads of x [B, L, heads, width] that is longer than `limit` to it, in float32; first a
    learned factor multiplies each value, if it `scales`.
    """

    def __init__(self, heads: int, width: int, limit: float, scales: bool):
        super().__init__()
        self.limit = limit
        if scales:
            self.weight = mx.ones((heads, width))

    def __call__(self, x: Array) -> Array:
        wide: Array = float32(x)
        if "weight" in self:
            wide = wide * float32(of_kind(self.weight, x))
        library = library_of(x)
        length = library.sqrt((wide * wide).sum(axis=-1, keepdims=True))
        return (wide * library.minimum(self.limit / (length + 1e-6), 1.0)).astype(x.dtype)


class ValueExperts(nn.Module):
    """Makes a token's values by the matrices that its router chooses, which `set_experts` brings."""

    def __init__(self, rule: Router, hidden_size: int):
        super().__init__()
        self.rule = rule
        self.gate = Linear(hidden_size, rule.experts)
        self.e_score_correction_bias = mx.zeros((rule.experts,))

    def __call__(self, x: Array, norm: Norm | None = None) -> Array:
        """[B, L, width] for norm(x) [B, L, hidden_size]."""
        normed, logits = normed_with_weights(x, norm, self.gate)
        rows = normed.reshape(-1, x.shape[-1])
        ids, weights = route(logits.reshape(len(rows), -1), self.rule, self.e_score_correction_bias)
        return self._compute(rows, ids, weights).reshape(*x.shape[:-1], -1)

    def set_experts(self, compute: OwnExperts) -> None:
        """As `MixerModule.set_experts`."""
        self._compute = compute


class StaticConvolution(Convolution):
    """The taps of keys or values, the same for all tokens."""

    def __init__(self, channels: int, taps: int, heads: int, hidden_size: int):
        super().__init__(channels, taps)


class DynamicConvolution(nn.Module):
    """The taps of keys or values: `static_w` [taps, channels] for all tokens, the first for the newest input, and those
    of a token for each head.
    """

    def __init__(self, channels: int, taps: int, heads: int, hidden_size: int):
        super().__init__()
        self.static_w, self.weight_proj = mx.zeros((taps, channels)), Linear(hidden_size, heads * taps)

    @property
    def weight(self) -> mx.array:
        """As of a `Convolution`."""
        return self.static_w[::-1].T[..., None]


BESIDE = {"gates": "g_proj", "distances": "r_proj", "sinks": "sink_proj"}  # what reads x besides q, k and v


class Attention(MixerModule):
    """Softmax attention of any family; its switches are `GroupedQuery`'s."""

    def __init__(self, mixer: GroupedQuery, hidden_size: int, eps: float):
        super().__init__()
        self.mixer, self.eps = mixer, eps
        queries, keys = mixer.heads * mixer.head_dim, mixer.kv_heads * mixer.head_dim
        self.q_proj = Linear(hidden_size, queries * (2 if mixer.gate == "joined" else 1), mixer.bias)
        self.k_proj = Linear(hidden_size, keys, mixer.bias)
        if mixer.value_experts is not None:
            self.value_experts = ValueExperts(mixer.value_experts, hidden_size)
        elif not mixer.value_is_key:
            self.v_proj = Linear(hidden_size, mixer.kv_heads * mixer.value_width, mixer.bias)
        self.o_proj = Linear(mixer.heads * mixer.value_width, hidden_size, mixer.output_bias)
        if mixer.gate in GATES:
            self.g_proj = Linear(hidden_size, mixer.gates)
        if mixer.relative is not None:
            self.r_proj = Linear(hidden_size, mixer.heads * mixer.relative.width)
            self.rel_proj = mx.zeros((mixer.relative.width, mixer.relative.extent))
            if mixer.relative.clip is not None:
                self.r_norm = HeadClip(mixer.heads, mixer.relative.width, mixer.relative.clip, scales=True)
        if mixer.token_sinks:
            self.sink_proj = Linear(hidden_size, mixer.heads)
        if mixer.convolution is not None:
            kind: Any = DynamicConvolution if mixer.convolution.dynamic else StaticConvolution
            given = mixer.convolution.taps, mixer.kv_heads, hidden_size
            self.k_sconv, self.v_sconv = kind(keys, *given), kind(mixer.kv_heads * mixer.value_width, *given)
        if mixer.gate_bias:
            self.gate_bias = mx.zeros((mixer.heads,))
        if mixer.sinks:
            self.sinks = mx.zeros((mixer.heads,))
        if mixer.norm in ("head", "flat"):
            by_head = mixer.norm == "head"
            self.q_norm: Any = RMSNorm(mixer.head_dim if by_head else queries, eps)
            self.k_norm = RMSNorm(mixer.head_dim if by_head else keys, eps)
        if mixer.norm == "clip":
            self.q_norm = HeadClip(mixer.heads, mixer.head_dim, mixer.clip, scales=True)
            self._key_clip = HeadClip(mixer.kv_heads, mixer.head_dim, mixer.clip, scales=False)
        self.rope = Rope(mixer.rotation) if mixer.rotation else None
        if mixer.blocks is not None and mixer.rotation is not None:
            indexer: Any = HeadIndexer if isinstance(mixer.blocks, HeadBlocks) else BlockIndexer
            self.indexer = indexer(mixer.blocks, mixer.rotation, hidden_size, eps)
        self.arrange()

    def arrange(self) -> None:
        """Joins the layers that read x, and the arrays that kernels take together; called when all tensors are
        loaded.
        """
        self._stack_inputs()
        self.o_proj.pack()
        self._gate_bias = None
        if self.mixer.gate_bias:
            self._gate_bias = mx.repeat(self.gate_bias, self.mixer.gates // self.mixer.heads)[:, None]
            mx.eval(self._gate_bias)
        if self.mixer.convolution is not None:
            self._taps = mx.concatenate([self.k_sconv.weight, self.v_sconv.weight])
            mx.eval(self._taps)
        self._unit, self._weights = UnitNorm(mx.ones((self.mixer.head_dim,)), self.eps), None
        if self.rope is not None and "v_proj" in self:
            weights = [norm.weight for norm in self._norms if norm is not None]
            self._weights = packed(*weights, self.rope.periods) if weights else None

    def _stack_inputs(self) -> None:
        """Joins the layers that read x."""
        own = {"q": self.q_proj, "k": self.k_proj} | ({"v": self.v_proj} if "v_proj" in self else {})
        more = {name: self[layer] for name, layer in BESIDE.items() if layer in self}
        apart: dict[str, Any] = {"v": self.value_experts} if "value_experts" in self else {}
        if "indexer" in self:
            more |= {f"index {i}": layer for i, layer in enumerate(self.indexer.layers)}
        alike = {name: layer for name, layer in more.items() if layer.is_like(self.q_proj)}
        self._inputs = Stack(*own.values(), *alike.values())
        apart |= {name: layer for name, layer in more.items() if name not in alike}
        self._apart = lambda: list(apart.values())  # in a function, so that they do not become submodules twice
        self._names = [*own, *alike, *apart]

    @property
    def _norms(self) -> tuple[Norm | None, Norm | None]:
        """The norms of each head of queries and of keys."""
        if self.mixer.norm == "unit":
            return self._unit, self._unit
        if self.mixer.norm == "clip":
            return self.q_norm, self._key_clip
        return (self.q_norm, self.k_norm) if self.mixer.norm == "head" else (None, None)

    def set_experts(self, compute: OwnExperts) -> None:
        self.value_experts.set_experts(compute)

    def begin(self, x: Array, norm: RMSNorm | None) -> list[Array]:
        outputs: list[Array] = self._inputs.outputs(x, norm)
        return outputs + [layer(x, norm) for layer in self._apart()]

    def _named(self, parts: Sequence[AnyArray]) -> tuple[Any, dict[str, Any]]:
        """Of the results of `begin` the joined ones, if there are any, and each by its name."""
        joined, outputs = self._inputs.parted(parts)
        apart = parts[len(parts) - len(self._apart()) :]
        return joined, dict(zip(self._names, [*outputs, *apart], strict=True))

    def mix(self, parts: Sequence[Array], caches: Caches, *more: Chosen | None) -> Array:
        if self.mixer.blocks is not None and isinstance(caches[0], StepRows):
            return each_alone(caches, parts, lambda _, own, *row: self.mix(row, own))
        B, L, _ = parts[0].shape
        joined, outputs = self._named(parts)
        q, k, v = (outputs[name] for name in ("q", "k", "k" if self.mixer.value_is_key else "v"))
        mixer, heads, kv_heads = self.mixer, self.mixer.heads, self.mixer.kv_heads
        if mixer.convolution is not None:
            k, v = self._convolved(k, v, outputs, caches[1])
            joined = None
        if mixer.norm == "flat":
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (part.reshape(B, L, n, -1) for part, n in ((q, heads), (k, kv_heads), (v, kv_heads)))
        if mixer.relative is not None:
            states = outputs["distances"].reshape(B, L, heads, -1)
            beside = states, outputs.get("sinks"), self.rel_proj
            return attend_biased(q, k, v, *beside, caches[0], self._terms, self.get("r_norm"))
        joined = joined if self._weights else None
        if mixer.blocks is not None:
            v = rms_norm(v, None, self.eps) if mixer.value_norm else v
            made = self.indexer([output for name, output in outputs.items() if name.startswith("index")], caches[1])
            joined = None if mixer.value_norm else joined
            return attend_blocks(q, k, v, caches, made, mixer.blocks, self._terms, joined)
        return attend(q, k, v, caches[0], self._terms, joined)

    def _convolved(self, k: Array, v: Array, outputs: dict[str, Any], cache: AnyCache) -> Sequence[Array]:
        """Keys and values [B, L, heads * width] behind their convolution."""
        rule, library, more = self.mixer.convolution, library_of(k), None
        assert rule is not None
        if rule.dynamic:
            own = (outputs[name].reshape(*k.shape[:2], -1, rule.taps) for name in ("k taps", "v taps"))
            more = library.concatenate(list(own), axis=2)
        made = convolved(library.concatenate([k, v], axis=-1), cache, self._taps, rule.factor, more)
        return split(made, k.shape[-1])

    @property
    def _terms(self) -> Terms:
        mixer, norms = self.mixer, self._norms
        return Terms(
            *norms,
            self.rope,
            mixer.head_dim**-0.5 if mixer.scale is None else mixer.scale,
            mixer.window,
            self.get("sinks"),
            self.eps if mixer.value_norm and mixer.blocks is None else None,
            self._weights,
            mixer.query_scale,
            mixer.chunked,
            mixer.rotates_first,
        )

    def end(self, out: Array, parts: Sequence[Array], x: Array | None) -> Array:
        if self.mixer.value_scale != 1.0:
            out = out * self.mixer.value_scale
        if self.mixer.output_norm:
            heads = out.reshape(*out.shape[:-1], self.mixer.heads, -1)
            out = rms_norm(heads, None, self.eps).reshape(out.shape)
        if self.mixer.gate in GATES:
            out = gated(out, self._named(parts)[1]["gates"], self.mixer.gate, self._gate_bias)
        return self.o_proj(out, residual=x)


class AttentionOfInputs(Attention):
    """Attention whose queries, keys and values have inputs of their own, side by side, each with its norm, or which may
    have them or one input, with the layer's norm (`parted`).
    """

    def __init__(self, mixer: GroupedQuery, hidden_size: int, eps: float):
        super().__init__(mixer, hidden_size, eps)
        if mixer.inputs > 1:
            self.q_input_norm, self.k_input_norm, self.v_input_norm = (RMSNorm(hidden_size, eps) for _ in range(3))

    def _stack_inputs(self) -> None:
        more = {name: self[layer] for name, layer in BESIDE.items() if layer in self}
        keys, values = {"k": self.k_proj}, {"v": self.v_proj}
        if self.mixer.convolution is not None and self.mixer.convolution.dynamic:
            keys["k taps"], values["v taps"] = self.k_sconv.weight_proj, self.v_sconv.weight_proj
        own: list[dict[str, Linear]] = [{"q": self.q_proj, **more}, keys, values]
        self._own, self._names = (
            [Stack(*layers.values()) for layers in own],
            [name for layers in own for name in layers],
        )

    def begin(self, x: Array, norm: RMSNorm | None) -> list[Array]:
        width = self.q_proj.shape[1]
        inputs: Sequence[Array] = [x] * 3 if x.shape[-1] == width else split(x, width, 2 * width)
        has_own = self.mixer.inputs > 1
        norms = [self.q_input_norm, self.k_input_norm, self.v_input_norm] if has_own else [norm] * 3
        parts = zip(self._own, inputs, norms, strict=True)
        return [output for stack, own, of_own in parts for output in stack(own, of_own)[1]]

    def _named(self, parts: Sequence[Array]) -> tuple[Any, dict[str, Any]]:
        return None, dict(zip(self._names, parts, strict=True))


def make_module(mixer: GroupedQuery, hidden_size: int, eps: float, forms: frozenset[str]) -> nn.Module:
    """The module of a layer with this mixer, for hidden states of `hidden_size` values."""
    kind = AttentionOfInputs if mixer.inputs > 1 or mixer.parted else Attention
    return kind(mixer, hidden_size, eps)

"""Gated DeltaNet (arXiv:2412.06464) and Kimi Delta Attention (arXiv:2510.26692), linear-attention token mixers: the
projections round their core."""

from collections.abc import Sequence

import mlx.core as mx
import mlx.nn as nn

from ...layers import Caches, Convolution, Linear, MixerModule, RMSNorm, Stack, packed
from ...ops.backend import Array, library_of
from ...ops.elementwise import split
from ...ops.linear import grouped_linear
from ...ops.seen import Chosen
from .op import DeltaWeights, delta
from .spec import Delta

# The ends of names of parameters that stay float32, and names of tensors that tell another stored form.
KEPT_FLOAT32: tuple[str, ...] = ("A_log", "dt_bias")
FORMS: tuple[str, ...] = ()


class GatedDeltaNet(MixerModule):
    """Projections are stored flat: [q of all heads | k | v], z, b and a."""

    def __init__(self, mixer: Delta, hidden_size: int, eps: float):
        super().__init__()
        self.mixer = mixer
        self.in_proj_qkv = Linear(hidden_size, mixer.channels)
        self.in_proj_z = Linear(hidden_size, mixer.value_width)
        self.in_proj_b = Linear(hidden_size, mixer.value_heads)
        self.in_proj_a = Linear(hidden_size, mixer.value_heads)
        self.conv1d = Convolution(mixer.channels, mixer.taps)
        self.A_log = mx.zeros((mixer.value_heads,))
        self.dt_bias = mx.zeros((mixer.value_heads,))
        self.norm = RMSNorm(mixer.value_dim, eps)
        self.out_proj = Linear(mixer.value_width, hidden_size)
        self.arrange()

    def arrange(self) -> None:
        """Joins the layers that read x, and what kernels take at once; called again once all have their tensors."""
        self._inputs = Stack(self.in_proj_qkv, self.in_proj_z, self.in_proj_b, self.in_proj_a)
        self.out_proj.pack()
        self._weights = packed(self.A_log, self.dt_bias, self.conv1d.weight, self.norm.weight)

    def begin(self, x: Array, norm: RMSNorm | None) -> list[Array]:
        return self._inputs.outputs(x, norm)

    def mix(self, parts: Sequence[Array], caches: Caches, *more: Chosen | None) -> Array:
        joined, (qkv, z, b, a) = self._inputs.parted(parts)
        parameters = self.conv1d.weight, self.A_log, self.dt_bias, self.norm.weight, self.norm.eps
        weights = DeltaWeights(*parameters, self._weights)
        return delta(qkv, z, b, a, caches[0], weights, self.mixer, joined)

    def end(self, out: Array, parts: Sequence[Array], x: Array | None) -> Array:
        return self.out_proj(out, residual=x)


class KimiDelta(MixerModule):
    """The delta rule with a decay for each channel: q, k and v have projections and convolutions of their own, decays
    and gates two matrices of a low rank each, or one."""

    def __init__(self, mixer: Delta, hidden_size: int, eps: float):
        super().__init__()
        assert mixer.channel_decay is not None
        self.mixer, decay = mixer, mixer.channel_decay
        for name, width in (("q", mixer.key_width), ("k", mixer.key_width), ("v", mixer.value_width)):
            setattr(self, f"{name}_proj", Linear(hidden_size, width))
            setattr(self, f"{name}_conv1d", Convolution(width, mixer.taps))
        self.b_proj = Linear(hidden_size, mixer.value_heads)
        ranks = {"f": decay.rank, "g": None if decay.has_full_gate else decay.rank}
        for (name, rank), width in zip(ranks.items(), (mixer.key_width, mixer.value_width), strict=True):
            if rank is None:
                setattr(self, f"{name}_proj", Linear(hidden_size, width))
            else:
                setattr(self, f"{name}_a_proj", Linear(hidden_size, rank))
                setattr(self, f"{name}_b_proj", Linear(rank, width))
        self.A_log = mx.zeros((mixer.value_heads,))
        self.dt_bias = mx.zeros((mixer.key_width,))
        self.o_norm = RMSNorm(mixer.value_dim, eps)
        self.o_proj = Linear(mixer.value_width, hidden_size)
        self.arrange()

    def arrange(self) -> None:
        """Joins the layers that read x, those that read the low ranks, and the convolutions; called again once all have
        their tensors.
        """
        decays, gates = (f"{name}_a_proj" if f"{name}_a_proj" in self else f"{name}_proj" for name in "fg")
        self._inputs = Stack(self.q_proj, self.k_proj, self.v_proj, self.b_proj, self[decays], self[gates])
        self.o_proj.pack()
        self._raised = Stack(self.f_b_proj, self.g_b_proj) if "g_b_proj" in self else None
        self._taps = mx.concatenate([one.weight for one in (self.q_conv1d, self.k_conv1d, self.v_conv1d)])
        self._weights = packed(self.A_log, self.dt_bias, self._taps, self.o_norm.weight)

    def begin(self, x: Array, norm: RMSNorm | None) -> list[Array]:
        joined, (q, k, v, b, low, gate) = self._inputs(x, norm)
        library = library_of(x)
        qkv = library.concatenate([q, k, v], axis=-1) if joined is None else joined[..., : self.mixer.channels]
        if self._raised is None:
            return [qkv, gate, b, self.f_b_proj(low) if "f_b_proj" in self else low]
        raised, widths = self._raised.stacked, (self.mixer.key_width, self.mixer.value_width)
        if joined is None or raised is None or widths[0] != widths[1]:
            return [qkv, self.g_b_proj(gate), b, self.f_b_proj(low)]
        a, z = split(grouped_linear(joined[..., -2 * low.shape[-1] :], raised, 2), widths[0])
        return [qkv, z, b, a]

    def mix(self, parts: Sequence[Array], caches: Caches, *more: Chosen | None) -> Array:
        parameters = self._taps, self.A_log, self.dt_bias, self.o_norm.weight, self.o_norm.eps
        weights = DeltaWeights(*parameters, self._weights)
        qkv, z, b, a = parts
        return delta(qkv, z, b, a, caches[0], weights, self.mixer)

    def end(self, out: Array, parts: Sequence[Array], x: Array | None) -> Array:
        return self.o_proj(out, residual=x)


def make_module(mixer: Delta, hidden_size: int, eps: float, forms: frozenset[str]) -> nn.Module:
    """The module of a layer with this mixer, for hidden states of `hidden_size` values."""
    return (GatedDeltaNet if mixer.channel_decay is None else KimiDelta)(mixer, hidden_size, eps)

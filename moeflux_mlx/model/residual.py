"""How the residual runs through a layer: around its mixer, and behind its feed-forward part.

A residual refers to modules that the layer holds and names. Of the streams h it makes the feed-forward part's input,
and with what it kept of them it adds the part's output.
"""

from collections.abc import Callable
from typing import Any, ClassVar

import mlx.core as mx
import mlx.nn as nn

from ..kinds import WeighedSum
from ..layers import BranchConvolution, Caches, MixerModule, OutputNorm, RMSNorm, ScaledNorm
from ..ops.add_normed import add_weighed
from ..ops.backend import AnyArray, Array, library_of
from ..ops.elementwise import split
from ..ops.seen import Chosen
from .streams import MIXERS, MLP


class OneStream:
    """h + mixer(norm(h)), where the mixer adds h; the feed-forward part adds its own input. Their last products do."""

    takes_rows: ClassVar[bool] = True  # whether `mixed` takes the rows of a step at once

    def __init__(self, mixer: MixerModule, norm: Any):
        self.mixer, self.norm = mixer, norm

    def mixed(self, h: Array, caches: Caches, chosen: Chosen) -> tuple[Array, ...]:
        """The feed-forward part's input, and what `added` takes with its output."""
        return (self.mixer(h, self.norm, caches, chosen),)

    def added(self, out: Array, *kept: AnyArray) -> Array:
        """The streams behind the layer, from the feed-forward part's output."""
        return out


class NormedStream(OneStream):
    """One stream with a norm before the addition: h + norm(mixer(norm(h))). The feed-forward part has its own."""

    def __init__(self, mixer: MixerModule, norm: Any, output: OutputNorm):
        super().__init__(mixer, norm)
        self.output = output

    def mixed(self, h: Array, caches: Caches, chosen: Chosen) -> tuple[Array, ...]:
        return (self.output(h, self.mixer.mixed(h, self.norm, caches, chosen)),)


class NormedApart(OneStream):
    """One stream with norms that no product takes along: h = x + mixer(norm(x)), h + mlp(behind(h)); without `behind`
    both parts take the same norm: x + mixer(norm(x)) + mlp(norm(x)).
    """

    def __init__(self, mixer: MixerModule, norm: Any, behind: Any):
        super().__init__(mixer, norm)
        self.behind = behind

    def mixed(self, h: Array, caches: Caches, chosen: Chosen) -> tuple[Array, ...]:
        """The feed-forward part's input, and the stream with the mixer's output."""
        x = self.norm(h)
        parts = self.mixer.begin(x, None)
        h = self.mixer.end(self.mixer.mix(parts, caches, chosen), parts, h)
        return x if self.behind is None else self.behind(h), h

    def added(self, out: Array, *kept: Array) -> Array:
        return kept[0] + out


class ConvolvedStream(OneStream):
    """One stream, to which convolved outputs are added: h + c(mixer(norm(h))). Another convolution is behind the
    feed-forward part, which `added` gets. The mixer's layer has the cache of this one last.
    """

    def __init__(self, mixer: MixerModule, norm: Any, convolution: BranchConvolution):
        super().__init__(mixer, norm)
        self.convolution = convolution

    def mixed(self, h: Array, caches: Caches, chosen: Chosen) -> tuple[Array, ...]:
        """The stream with the mixer's output, as the feed-forward part's input, and once more for `added`."""
        out = self.mixer.mixed(h, self.norm, caches, chosen)
        h = self.convolution(out, caches[-1], h)
        return h, h

    def added(self, out: Array, *kept: Array) -> Array:
        return kept[0] + out


class WeighedParts(nn.Module):
    """Adds a part's output to the stream as `WeighedSum` says; `has_scale`: it is multiplied by a weight first."""

    kept_float32: ClassVar[tuple[str, ...]] = ("part_weight",)

    def __init__(self, dims: int, rule: WeighedSum, has_scale: bool):
        super().__init__()
        self.rule, self.part_weight = rule, mx.zeros((dims,))
        if has_scale:
            self.norm = ScaledNorm(dims, rule.eps)
        self.arrange()

    def arrange(self) -> None:
        """Makes the weights of the stream; called again once those of the part have their values."""
        part = self.part_weight
        self._stream_weight = mx.sqrt(mx.maximum((1 - part) * (1 + part), self.rule.least))
        mx.eval(self._stream_weight)

    def __call__(self, h: Array, made: Array) -> AnyArray:
        scale = self.norm.weight if "norm" in self else None
        return add_weighed(h, made, (self._stream_weight, self.part_weight), self.rule.eps, scale)


class WeighedStream(NormedApart):
    """One stream to which parts are added with weights: h = first(x, mixer(norm(x))), second(h, mlp(behind(h)))."""

    def __init__(self, mixer: MixerModule, norm: Any, behind: Any, first: WeighedParts, second: WeighedParts):
        super().__init__(mixer, norm, behind)
        self.first, self.second = first, second

    def mixed(self, h: Array, caches: Caches, chosen: Chosen) -> tuple[Array, ...]:
        h = self.first(h, self.mixer.mixed(h, self.norm, caches, chosen))
        return self.behind(h), h

    def added(self, out: Array, *kept: Array) -> Array:
        return self.second(kept[0], out)


class SeveralStreams:
    """Each part gets one input from all streams, and a `connection` adds its output to them; h is
    [B, L, streams * D].
    """

    takes_rows: ClassVar[bool] = False

    def __init__(
        self, mixer: MixerModule, norm: RMSNorm | None, before: Any, behind: Any, convolution: BranchConvolution | None
    ):
        """`convolution`: what the mixer's output passes, as in `ConvolvedStream`; None: nothing."""
        self.mixer, self.norm, self.before, self.behind = mixer, norm, before, behind
        self.convolution = convolution

    def mixed(self, h: Array, caches: Caches, chosen: Chosen) -> tuple[Array, ...]:
        """The feed-forward part's input, and for `added` the streams behind the mixer and how they are mixed."""
        x, *mixing = self.before.gather(h)
        return self._behind_mixer(h, x, caches, chosen, *mixing)

    def _behind_mixer(self, h: Array, x: Array, caches: Caches, chosen: Chosen, *mixing: Array) -> tuple[Array, ...]:
        out = self.mixer.mixed(x, self.norm, caches, chosen)
        out = out if self.convolution is None else self.convolution(out, caches[-1])
        streams, x, *mixing = self.behind.gather_behind(h, out, *mixing)
        return x, streams, *mixing

    def added(self, out: Array, *kept: Array) -> Array:
        streams, *mixing = kept
        return self.behind.scatter(streams, out, *mixing)


class ToldStreams(SeveralStreams):
    """The same in a pass over layers after the first: behind the sums of h are those that the pass before has made, of
    width `told` in all (`Messages`). The last layer of a pass takes them away, because what is left then, the sums
    before the first layer and those of this pass, is what the next pass begins with.

    Args:
        one: of the first pass.
        messages: makes the messages of those sums.
        gates: let them in.
        is_last: whether the layer is the last one of the pass.
    """

    def __init__(
        self, one: SeveralStreams, messages: Callable[[Any], list[AnyArray]], gates: Any, told: int, is_last: bool
    ):
        super().__init__(one.mixer, one.norm, one.before, one.behind, one.convolution)
        self.messages, self.gates, self.told, self.is_last = messages, gates, told, is_last

    def mixed(self, h: Array, caches: Caches, chosen: Chosen) -> tuple[Array, ...]:
        streams, sums = split(h, h.shape[-1] - self.told)
        *of_inputs, of_mlp = self.messages(sums)
        (x,), width = self.before.gather(streams), of_mlp.shape[-1]
        inputs = [x] * 3 if x.shape[-1] == width else split(x, width, 2 * width)
        x = self.gates(MIXERS, inputs, of_inputs)
        x, streams = self._behind_mixer(streams, x, caches, chosen)
        return self.gates(MLP, [x], [of_mlp]), streams, sums

    def added(self, out: Array, *kept: Array) -> Array:
        streams, sums = kept
        made = super().added(out, streams)
        return made if self.is_last else library_of(out).concatenate([made, sums], axis=-1)


ResidualWay = OneStream | SeveralStreams

"""A span: prompt tokens that go through the model together, layer after layer, and how far they have come.

Between two layers the state of a span is only its hidden states, so it can stop and continue there. Within a layer the
mixer handles one block of tokens after the other, and states that cannot be cut later are kept between blocks.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from ..caches.layer_cache import Arrays, LayerCache
from ..ops.backend import AnyArray
from ..ops.seen import Chosen
from .images import NO_IMAGES, Images
from .tokens import Tokens

MIXER_SHARE = 0.3  # share of a layer's work, for progress reports; the experts take the rest


@dataclass(frozen=True)
class PromptSizes:
    """How prompts are cut: at most `span` tokens go through the model together, at most `block` of them through a
    mixer.
    """

    span: int = 8192
    block: int = 4096


@dataclass
class Span:
    """Tokens [B, N] on their way through the model.

    Args:
        tokens: as the model takes them.
        start: number of tokens in the caches before them.
        block: tokens that a mixer handles at once.
        keep: ascending numbers of the span's tokens after which the states of layers that cannot be cut are kept.
        images: of the text, at places as the caches count them.

    Attributes:
        reached: number of finished layers, and the output of the last of them, [B, N, hidden_size]; None at first.
        inputs: the layers' inputs besides hidden states; None until the span begins.
        chosen: for the start of each block, what layers hand on to later ones.
        kept: for each of `keep` the states of the layers that cannot be cut, by layer.
    """

    tokens: mx.array
    start: int
    block: int
    keep: Sequence[int] = ()
    images: Images = NO_IMAGES
    reached: tuple[int, Any] = (0, None)
    inputs: Tokens | None = None
    chosen: dict[int, Chosen] = field(default_factory=lambda: defaultdict(Chosen))
    kept: dict[int, dict[int, Arrays]] = field(default_factory=dict)
    _before: dict[int, Arrays | None] = field(default_factory=dict)  # states of layers that are done or in work

    @property
    def length(self) -> int:
        return self.tokens.shape[1]

    @property
    def layer(self) -> int:
        """The next layer to pass."""
        return self.reached[0]

    @property
    def hidden(self) -> AnyArray:
        return self.reached[1]

    @property
    def nbytes(self) -> int:
        """Bytes that a span holds between two layers."""
        pairs = [*self._before.values(), *(pair for states in self.kept.values() for pair in states.values())]
        states = sum(array.nbytes for pair in pairs for array in pair or () if array is not None)
        chosen = sum(array.nbytes for one in self.chosen.values() for array in one.handed if array is not None)
        chosen += sum(rows.nbytes for rows in self.inputs.tables.values()) if self.inputs else 0
        return states + chosen + (0 if self.hidden is None else self.hidden.nbytes)

    def blocks(self, cache: LayerCache) -> Iterator[tuple[int, int]]:
        """Start and end of what the mixer of `cache` takes in turn: blocks, cut where its state is to be kept.

        The cache knows the rotary positions of the images in each, and of what follows them.
        """
        ends = set(range(self.block, self.length, self.block)) | {self.length}
        if not cache.is_trimmable():
            ends |= set(self.keep)
        start = 0
        for end in sorted(ends):
            cache.axes = self.images.positions(self.start + start, self.start + end)
            yield start, end
            cache.axes = None
            for place, by in self.images.shifts(self.start + start, self.start + end):
                cache.shift(by, place)
            start = end

    def begin(self, layer: int, cache: LayerCache) -> None:
        """Begins a layer; if the layer was interrupted in an earlier attempt, that is undone."""
        self.undo(layer, cache)
        self._before[layer] = cache.kept()

    def passed(self, layer: int, end: int, cache: LayerCache) -> None:
        """Records that the mixer of `layer` has absorbed the first `end` tokens."""
        kept = cache.kept() if end in self.keep else None
        if kept is not None:
            self.kept.setdefault(end, {})[layer] = kept

    def undo(self, layer: int, cache: LayerCache) -> None:
        """Takes the cache of a layer that has begun back to where the span starts."""
        cache.axes = None
        if layer in self._before:
            cache.go_back(self.start, self._before[layer])
            for states in self.kept.values():
                states.pop(layer, None)
            del self._before[layer]  # last, so that an interruption before leaves a way back

    def drop(self, caches: Sequence[LayerCache]) -> None:
        """Takes all caches back to the start of the span."""
        for layer in list(self._before):
            self.undo(layer, caches[layer])
        self.reached, self.kept = (0, None), {}
        self.chosen.clear()

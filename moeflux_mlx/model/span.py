"""A span: prompt tokens that go through the model together, layer after layer, and how far they have come.

Between two layers the state of a span is only its hidden states, so it can stop and continue there. Within a layer the
mixer handles one block of tokens after the other, and states that cannot be cut later are kept between blocks.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

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
        keep: ascending numbers of the span's tokens after which the states of caches that cannot be cut are kept.
        images: of the text, at places as the caches count them.

    Attributes:
        reached: number of finished layers, and the output of the last of them, [B, N, hidden_size]; None at first.
        inputs: the layers' inputs besides hidden states; None until the span begins.
        chosen: for the start of each block, what layers hand on to later ones.
        kept: for each of `keep` the states of the caches that cannot be cut, by their number in the text.
    """

    tokens: mx.array
    start: int
    block: int
    keep: Sequence[int] = ()
    images: Images = NO_IMAGES
    reached: tuple[int, AnyArray] = (0, None)
    inputs: Tokens | None = None
    chosen: dict[int, Chosen] = field(default_factory=lambda: defaultdict(Chosen))
    kept: dict[int, dict[int, Arrays]] = field(default_factory=dict)
    _before: dict[int, Arrays | None] = field(default_factory=dict)  # states of caches that have begun
    _first: int = 0  # the number of the layer's first cache among those of the text

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

    def blocks(self, caches: Sequence[LayerCache]) -> Iterator[tuple[int, int]]:
        """Start and end of what the mixer with these caches takes in turn: blocks, cut where its state is to be kept.

        The caches know the rotary positions of the images in each, and of what follows them.
        """
        ends = set(range(self.block, self.length, self.block)) | {self.length}
        if not all(cache.is_trimmable() for cache in caches):
            ends |= set(self.keep)
        start = 0
        for end in sorted(ends):
            axes = self.images.positions(self.start + start, self.start + end)
            for cache in caches:
                cache.axes = axes
            yield start, end
            for cache in caches:
                cache.axes = None
                for place, by in self.images.shifts(self.start + start, self.start + end):
                    cache.shift(by, place)
            start = end

    def begin(self, first: int, caches: Sequence[LayerCache]) -> None:
        """Begins a layer, whose caches are those from number `first` of the text on; if the layer was interrupted in an
        earlier attempt, that is undone.
        """
        self._first = first
        self.undo(first, caches)
        self._before |= {i: cache.kept() for i, cache in enumerate(caches, first)}

    def passed(self, end: int, caches: Sequence[LayerCache], first: int = 0) -> None:
        """Records that caches of the layer, from number `first` on, have absorbed the first `end` tokens."""
        for i, cache in enumerate(caches, self._first + first):
            kept = cache.kept() if end in self.keep else None
            if kept is not None:
                self.kept.setdefault(end, {})[i] = kept

    def undo(self, first: int, caches: Sequence[LayerCache]) -> None:
        """Takes the caches of a layer, from number `first` of the text on, back to where the span starts."""
        for i, cache in enumerate(caches, first):
            self._undo(i, cache)

    def _undo(self, i: int, cache: LayerCache) -> None:
        cache.axes = None
        if i in self._before:
            cache.go_back(self.start, self._before[i])
            for states in self.kept.values():
                states.pop(i, None)
            del self._before[i]  # last, so that an interruption before leaves a way back

    def drop(self, caches: Sequence[LayerCache]) -> None:
        """Takes all caches of the text back to the start of the span."""
        for i in list(self._before):
            self._undo(i, caches[i])
        self.reached, self.kept = (0, None), {}
        self.chosen.clear()

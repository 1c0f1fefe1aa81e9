"""Builds the graph of a short prompt's next layer in a second thread, while the first one hands a layer over to MLX.

On CUDA both take as long as the layer itself or longer, and MLX lets Python go on while it takes a graph. The second
thread only builds graphs: a lazy array may be made by any thread with the first one's stream, but MLX evaluates it only
in the first. So it takes spans for which the host needs no value before the last layer. Between two pieces, and when
the span is left, it does nothing.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import copy_context
from copy import copy
from queue import SimpleQueue
from threading import Event, Thread
from typing import Any

import mlx.core as mx

from ..caches.layer_cache import LayerCache
from ..experts.routing import Pieces, finished
from ..kinds import Mixer
from ..ops import backend
from ..ops.attend_span import takes_span
from ..ops.backend import AnyArray
from ..ops.seen import Chosen
from ..ops.stand_ins import standing_in
from ..ops.tiles import MAX_TOKENS
from .layer import DecoderLayer
from .span import Span

LONGEST = 512  # tokens; a GPU takes longer than the host for a layer over more
# Values of a layer that may be in memory at once: two parts of scores (`ops/causal_parts.py`), as elsewhere. Here all
# parts of a layer may be.
MOST_VALUES = 1 << 28
Built = tuple[AnyArray, list[AnyArray]]  # the output of a layer, and what its caches hold behind it


class LayersAhead:
    """The layers of a model, as a token passes them. `numbers`: those of each one's caches; `mixers`: those of all."""

    def __init__(self, layers: Sequence[DecoderLayer], numbers: Sequence[range], mixers: Iterable[Mixer]):
        self._layers, self._numbers, self._mixers = layers, numbers, mixers
        self._are_lazy: dict[mx.Dtype, bool] = {}

    def takes(self, span: Span, dtype: mx.Dtype) -> bool:
        """Whether `pass_span` takes the span, with activations of `dtype`."""
        fits = MAX_TOKENS < span.tokens.size <= LONGEST and span.length <= span.block and not span.images.placed
        fits = fits and all(_fits(one, span, dtype) for one in self._mixers)
        if not fits or span.layer == len(self._layers) or backend.name() != "cuda":
            return False
        if dtype not in self._are_lazy:
            self._are_lazy[dtype] = all(layer.is_lazy(dtype, LONGEST) for layer in self._layers)
        return self._are_lazy[dtype]

    def pass_span(self, span: Span, caches: Sequence[Sequence[LayerCache]]) -> Pieces[None]:
        """Takes the span through its remaining layers, with the caches of each. An error leaves it between two."""
        handed, count = dict[int, dict[int, Chosen]](), len(caches)

        def build(i: int, h: AnyArray) -> Built:
            h = finished(self._layers[i].pass_span(h, caches[i], span))
            return h, [array for cache in caches[i] for array in cache.state[:-1]]

        def begin(i: int, h: AnyArray) -> None:
            handed[i] = {start: copy(chosen) for start, chosen in span.chosen.items()}
            span.begin(self._numbers[i].start, caches[i])  # may evaluate a state
            asked.put((i, h))

        try:
            with _builder(build) as (asked, made):
                begin(span.layer, span.hidden)
                for i in range(span.layer, count):
                    built = made.get()
                    if isinstance(built, BaseException):
                        raise built
                    h, states = built
                    yield i / count
                    if i + 1 < count:
                        begin(i + 1, h)
                    backend.start(h, *states)
                    backend.finish(span.hidden)  # a GPU gets at most two layers at a time
                    span.reached = i + 1, h
                    del handed[i]
        except BaseException:
            built = None  # an error in its own frame would stay until a collection, and with it all arrays
            if span.layer in handed:
                span.chosen.clear()
                span.chosen.update(handed[span.layer])
            for i in range(span.layer, count):
                span.undo(self._numbers[i].start, caches[i])
            raise


def _fits(mixer: Mixer, span: Span, dtype: mx.Dtype) -> bool:
    """Whether memory suffices for all that a mixer makes of a span, behind the tokens that its texts have."""
    (texts, length), positions = span.tokens.shape, span.start + span.length
    if mixer.span_heads and takes_span(mixer.span_heads[1:], dtype, length, False):
        return mixer.attends_at_once(texts * positions)
    values = mixer.temporaries(length, positions) + mixer.scores(length, positions)
    return texts * values <= MOST_VALUES


@contextmanager
def _builder(build: Callable[..., Built]) -> Iterator[tuple[SimpleQueue[Any], SimpleQueue[Any]]]:
    """A thread that calls `build` with what comes in the first queue, and puts the results or errors into the second;
    it has ended at the end of the block, whatever interrupts come meanwhile: until then it writes to caches.

    Queues, because an executor's futures take twice as long to hand a layer over.
    """
    stream, target, ended = mx.default_stream(mx.default_device()), backend.name(), Event()
    asked, made = SimpleQueue[Any](), SimpleQueue[Any]()

    def work() -> None:
        try:
            mx.set_default_stream(stream)
            with standing_in(backend=target):  # nothing is evaluated
                for given in iter(asked.get, None):
                    made.put(build(*given))
        except BaseException as error:
            made.put(error)  # nothing is asked for after it
        finally:
            ended.set()
        mx.clear_streams()  # as at the end of the thread of all models

    thread = Thread(target=copy_context().run, args=(work,), name="moeflux-layers", daemon=True)
    try:
        thread.start()
        yield asked, made
    finally:
        asked.put(None)
        while thread.is_alive():
            with suppress(KeyboardInterrupt):
                ended.wait()  # an interrupted join would take the thread for ended
                thread.join()

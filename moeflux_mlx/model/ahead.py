"""Builds the graph of a short prompt's next layer in a second thread, while the first one hands a layer over to MLX.

On CUDA both take as long as the layer itself or longer, and MLX lets Python go on while it takes a graph. The second
thread only builds graphs: a lazy array may be made by any thread with the first one's stream, but MLX evaluates it only
in the first. So it takes spans for which the host needs no value before the last layer. Between two pieces, and when
the span is left, it does nothing.
"""

import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from contextvars import copy_context
from copy import copy

import mlx.core as mx

from ..caches.layer_cache import LayerCache
from ..experts.routing import Pieces, finished
from ..kinds import Mixer
from ..ops import backend
from ..ops.backend import AnyArray
from ..ops.seen import Chosen
from ..ops.stand_ins import standing_in
from ..ops.tiles import MAX_TOKENS
from .layer import DecoderLayer
from .span import Span

LONGEST = 512  # tokens; a GPU takes longer than the host for a layer over more
# Tokens times positions: with 128 heads two parts of scores (`ops/causal_parts.py`), as many as are in memory at once
# elsewhere. Here all parts of a layer may be; where few heads attend at a time, one thread computes.
MOST_SCORED = 1 << 21
Built = tuple[AnyArray, list[AnyArray]]  # the output of a layer, and what its caches hold behind it


class LayersAhead:
    """The layers of a model, as a token passes them. `numbers`: those of each one's caches; `mixers`: those of all."""

    def __init__(self, layers: Sequence[DecoderLayer], numbers: Sequence[range], mixers: Iterable[Mixer]):
        self._layers, self._numbers, self._mixers = layers, numbers, mixers
        self._are_lazy: dict[mx.Dtype, bool] = {}

    def takes(self, span: Span, dtype: mx.Dtype) -> bool:
        """Whether `pass_span` takes the span, with activations of `dtype`."""
        fits = MAX_TOKENS < span.tokens.size <= LONGEST and span.length <= span.block and not span.images.placed
        end = span.start + span.length
        fits = fits and span.tokens.size * end <= MOST_SCORED and all(one.attends_at_once(end) for one in self._mixers)
        if not fits or span.layer == len(self._layers) or backend.name() != "cuda":
            return False
        if dtype not in self._are_lazy:
            self._are_lazy[dtype] = all(layer.is_lazy(dtype, LONGEST) for layer in self._layers)
        return self._are_lazy[dtype]

    def pass_span(self, span: Span, caches: Sequence[Sequence[LayerCache]]) -> Pieces[None]:
        """Takes the span through its remaining layers, with the caches of each. An error leaves it between two."""
        jobs, handed, count = list[Future[Built]](), dict[int, dict[int, Chosen]](), len(caches)
        context, target = copy_context(), backend.name()

        def build(i: int, h: AnyArray) -> Built:
            with standing_in(backend=target):  # nothing is evaluated
                h = finished(self._layers[i].pass_span(h, caches[i], span))
                return h, [array for cache in caches[i] for array in cache.state[:-1]]

        def begin(i: int, h: AnyArray) -> None:
            handed[i] = {start: copy(chosen) for start, chosen in span.chosen.items()}
            span.begin(self._numbers[i].start, caches[i])  # may evaluate a state
            jobs.append(thread.submit(context.run, build, i, h))

        try:
            with _builder() as thread:
                begin(span.layer, span.hidden)
                for i in range(span.layer, count):
                    h, states = jobs[0].result()
                    jobs.clear()
                    yield i / count
                    if i + 1 < count:
                        begin(i + 1, h)
                    backend.start(h, *states)
                    backend.finish(span.hidden)  # a GPU gets at most two layers at a time
                    span.reached = i + 1, h
                    del handed[i]
        except BaseException:
            _end(jobs)
            if span.layer in handed:
                span.chosen.clear()
                span.chosen.update(handed[span.layer])
            for i in range(span.layer, count):
                span.undo(self._numbers[i].start, caches[i])
            raise


def _end(jobs: Sequence[Future[Built]]) -> None:
    """Waits for the jobs, whatever interrupts come meanwhile: until then they write to caches."""
    has_ended = False
    while not has_ended:
        with suppress(KeyboardInterrupt):
            has_ended = all(job.done() for job in jobs)
            time.sleep(0 if has_ended else 0.001)


@contextmanager
def _builder() -> Iterator[ThreadPoolExecutor]:
    """A thread that builds graphs for this one; it has ended at the end of the block."""
    stream = mx.default_stream(mx.default_device())
    with ThreadPoolExecutor(1, "moeflux-layers", mx.set_default_stream, (stream,)) as thread:
        try:
            thread.submit(bool)  # starts it: an interrupt in its start would lose the job
            yield thread
        finally:
            thread.submit(mx.clear_streams)  # as at the end of the thread of all models

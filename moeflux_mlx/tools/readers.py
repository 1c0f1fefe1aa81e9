"""How `evaluate` reads texts with a model: with an engine, or layer by layer where the model does not fit in memory."""

import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from ..calibration.layers import LayerRun
from ..calibration.weights import open_layers
from ..driving.prefill import span_lengths
from ..model.decoder import Model
from ..opening.engine import Engine
from ..ops import backend, native
from ..packing.located import Located
from ..planning.machine import checked_dtype

TokensDone = Callable[[int], object]  # called with the number of tokens done


@dataclass(frozen=True)
class Head:
    """The last matrix of a model, kept after the rest is closed."""

    matrix: Callable[[Any], Any]
    dtype: mx.Dtype
    suits_cpu: bool
    bits: int

    @classmethod
    def of(cls, model: Model) -> "Head":
        return cls(model.last_product, model.activation_dtype, model.suits_cpu, model.cpu_activations)

    def log_probabilities(self, hidden: np.ndarray) -> mx.array:
        """[N, vocab_size] float32 of rows [N, hidden_size] in float32."""
        rows = mx.array(hidden).astype(self.dtype)
        with native.activations(self.bits):
            logits = backend.leave(self.matrix(backend.enter(rows, self.dtype) if self.suits_cpu else rows))
        logits = logits.astype(mx.float32)
        return logits - mx.logsumexp(logits, axis=-1, keepdims=True)


class EngineReader:
    """Reads with a loaded model; each window goes through it in the spans of the memory plan."""

    def __init__(self, engine: Engine):
        self._engine, self.args, self.tokenizer = engine, engine.model.args, engine.tokenizer

    def hidden(self, windows: Sequence[list[int]], report: TokensDone) -> Iterator[np.ndarray]:
        model, done = self._engine.model, 0
        for window in windows:
            tokens, cache, at, rows = mx.array([window]), model.make_cache(), 0, []
            for length in span_lengths(len(window), self._engine.plan.sizes.span):
                hidden = model.hidden(tokens[:, at : at + length], cache).astype(mx.float32)
                mx.eval(hidden, [layer.state for layer in cache])
                rows.append(np.array(hidden[0]))
                at += length
            yield np.concatenate(rows)
            done += len(window)
            report(done)

    def head(self) -> Head:
        return Head.of(self._engine.model)

    def close(self) -> None:
        """Closes the source of the experts."""
        self._engine.experts.close()


class LayerReader:
    """A `TextReader` that has one layer's weights and one expert in memory at a time, in floats (`LayerRun`).

    Args:
        located: a packed model, or a checkpoint in any form that `convert` reads.
        dtype: of activations; None: as for `load`.
        without_correction_bias: as for `load`.

    Raises:
        ConfigError, ModelFileError, TokenizerError: the directory cannot be used. RequestError: no such dtype.
    """

    def __init__(self, located: Located, dtype: mx.Dtype | None = None, without_correction_bias: bool = False):
        self._weights = open_layers(located, without_correction_bias)
        self._dtype = checked_dtype(dtype)
        self.args, self.tokenizer = self._weights.args, located.tokenizer
        self._folder = tempfile.TemporaryDirectory(prefix="moeflux-layers-")
        self._run: LayerRun | None = None

    def hidden(self, windows: Sequence[list[int]], report: TokensDone) -> Iterator[np.ndarray]:
        total = sum(map(len, windows))
        texts = [np.array(window) for window in windows]
        self._run = LayerRun(self._weights, texts, Path(self._folder.name), self._dtype)
        self._run.run(lambda share: report(int(share * total)))
        for rows in self._run.hidden():
            yield np.array(rows.astype(mx.float32))

    def head(self) -> Head:
        assert self._run is not None, "nothing has been read"
        return Head(self._run.head(), self._dtype, backend.takes_widths(self.args.widths), native.EXACT)

    def close(self) -> None:
        """Removes the run's files."""
        self._folder.cleanup()


# A model that reads windows of text: `hidden` yields the rows [N, hidden_size] float32 that the head takes, of each
# window; `head` is the head, which outlasts the reader.
TextReader = EngineReader | LayerReader

"""Measures how well a model predicts a text, and how far it is from another model: perplexity, KL divergence, first
choices.

The text is cut into independent windows, which are read with an engine, or layer by layer where the model does not fit
in memory. With two models, only one is open at a time: the inputs of the first model's last matrix are kept in a
temporary file (hidden_size float32 values per token), and that matrix stays in memory next to the second model. The
logits of both are then computed from these, a few rows at a time, so nothing is left out and no table of whole
vocabularies is stored.
"""

import contextlib
import math
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any, NamedTuple

import mlx.core as mx
import numpy as np

from ..calibration.layers import LayerRun
from ..calibration.weights import open_layers
from ..driving.loop import Progress
from ..driving.prefill import span_lengths
from ..errors import RequestError
from ..model.decoder import Model
from ..opening.engine import Engine
from ..ops import backend, native
from ..packing.located import Located
from ..planning.machine import checked_dtype
from ..spec import ModelArgs

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


WINDOW = 1024
LOGITS_BYTES = 64 << 20  # bytes of one model's logits at a time, in float32

Opens = Callable[[], Engine | TextReader]  # a `LayerReader` is for models that do not fit in memory


@dataclass(frozen=True)
class Losses:
    """The result for one model and text; arrays have an entry for each predicted token.

    Args:
        tokens: number of tokens of the text that were read, in windows of `window`; the last one may be shorter.
        nll: minus the natural logarithm of the probability that the model gave the token, float64.
        text: number of the text that the token is of, from 0.
        reference_nll: the other model's.
        kl: the divergence of the other model's distribution from this one's, in nats, float64.
        same: whether both models' first choices agree.
    """

    tokens: int
    window: int
    nll: np.ndarray
    text: np.ndarray
    reference_nll: np.ndarray | None = None
    kl: np.ndarray | None = None
    same: np.ndarray | None = None

    def where(self, chosen: np.ndarray) -> "Losses":
        """The result for some of the predicted tokens, bool [predicted]."""
        arrays: Any = {name: one[chosen] for name, one in vars(self).items() if isinstance(one, np.ndarray)}
        return replace(self, **arrays)

    @property
    def perplexity(self) -> float:
        return perplexity(self.nll)

    @property
    def error(self) -> float:
        """The standard error of the perplexity, from the spread of the tokens' logarithms."""
        return self.perplexity * float(self.nll.std()) / math.sqrt(self.nll.size)


def perplexity(nll: np.ndarray) -> float:
    return float(np.exp(nll.mean()))


@dataclass(frozen=True)
class Reference:
    """The results of the first model: its tokens, its head, and in `file` the head's input rows."""

    windows: list[list[int]]
    head: Head
    args: ModelArgs
    file: IO[bytes]

    def rows(self, count: int) -> np.ndarray:
        """Reads the next rows, [count, hidden_size]."""
        width = self.args.hidden_size
        return np.fromfile(self.file, np.float32, count * width).reshape(count, width)

    def check(self, windows: list[list[int]], args: ModelArgs) -> None:
        if self.windows != windows or self.args.vocab_size != args.vocab_size:
            raise RequestError("the two models cut the text into different tokens; compare models of one tokenizer")


def evaluate(
    opens: Opens,
    text: str | Sequence[str],
    *,
    against: Opens | None = None,
    window: int = WINDOW,
    most: int | None = None,
    progress: Progress = lambda done, total: None,
) -> Losses:
    """Measures the model that `opens` opens on `text`, and its distance from the one that `against` opens.

    Args:
        opens: opens the model; it is closed again.
        text: or several texts, each of which stands alone.
        against: opens the reference model.
        window: number of tokens that are read together, at least 2.
        most: number of tokens to read from each text's beginning; None: all.
        progress: called with tokens done and tokens in all, each model's counted.

    Raises:
        RequestError: a text of fewer than two tokens, a window out of range, or models with different tokens.
        MoefluxError: a model cannot be opened or read.
    """
    for name, value in (("window", window), ("tokens", most)):
        if value is not None and value < 2:
            raise RequestError(f"{name} is {value}; it must be at least 2, because a token is predicted from others")
    texts = [text] if isinstance(text, str) else list(text)
    if against is None:
        with _opened(opens) as reader:
            return _measured(reader, _cut(reader, texts, window, most), window, None, progress)
    with tempfile.TemporaryFile(prefix="moeflux-") as file:
        with _opened(against) as reader:
            cut = _cut(reader, texts, window, most)
            for hidden in reader.hidden(cut.windows, lambda done: progress(done, 2 * cut.tokens)):
                hidden[:-1].tofile(file)
            reference = Reference(cut.windows, reader.head(), reader.args, file)
        file.seek(0)
        del reader
        with _opened(opens) as reader:
            reference.check(_cut(reader, texts, window, most).windows, reader.args)
            return _measured(reader, cut, window, reference, progress)


@contextlib.contextmanager
def _opened(opens: Opens) -> Iterator[TextReader]:
    """Opens a model for reading; at the end it is closed."""
    model = opens()
    reader = EngineReader(model) if isinstance(model, Engine) else model
    try:
        yield reader
    finally:
        reader.close()
        mx.clear_cache()


class _Cut(NamedTuple):
    """Texts as windows of token ids, and the number of each window's text."""

    windows: list[list[int]]
    texts: list[int]

    @property
    def tokens(self) -> int:
        return sum(map(len, self.windows))


def _cut(reader: TextReader, texts: Sequence[str], window: int, most: int | None) -> _Cut:
    limit = reader.args.max_position_embeddings
    if window > limit:
        raise RequestError(f"window {window} exceeds the {limit} tokens that the model takes")
    cut = _Cut([], [])
    for number, text in enumerate(texts):
        ids = reader.tokenizer.encode(text)[:most]
        if len(ids) % window == 1:  # a single token predicts nothing
            ids.pop()
        if len(ids) < 2:
            raise RequestError(f"the text has {len(ids)} tokens; give one with at least 2")
        windows = [ids[start : start + window] for start in range(0, len(ids), window)]
        cut.windows.extend(windows)
        cut.texts.extend([number] * len(windows))
    return cut


def _measured(reader: TextReader, cut: _Cut, window: int, reference: Reference | None, progress: Progress) -> Losses:
    passed, total = (0, cut.tokens) if reference is None else (cut.tokens, 2 * cut.tokens)
    columns, head = [], None
    step = max(1, LOGITS_BYTES // (4 * reader.args.vocab_size))
    hidden = reader.hidden(cut.windows, lambda done: progress(passed + done, total))
    for ids, states in zip(cut.windows, hidden, strict=True):
        head = head or reader.head()
        wanted, states = np.array(ids[1:], np.int64), states[:-1]
        right = None if reference is None else reference.rows(len(wanted))
        for rows in (slice(start, start + step) for start in range(0, len(wanted), step)):
            chances = head.log_probabilities(states[rows])
            others = chances if reference is None or right is None else reference.head.log_probabilities(right[rows])
            columns.append(_columns(chances, others, mx.array(wanted[rows])))
    nll, reference_nll, kl, same = (np.concatenate(column) for column in zip(*columns, strict=True))
    text = np.repeat(cut.texts, [len(ids) - 1 for ids in cut.windows])
    against = {} if reference is None else {"reference_nll": reference_nll, "kl": kl, "same": same}
    return Losses(cut.tokens, window, nll, text, **against)


def _columns(q: mx.array, p: mx.array, wanted: mx.array) -> list[np.ndarray]:
    """From log-probabilities [N, vocab_size]: -log q and -log p of the `wanted` tokens, KL(p || q), and whether the
    first choices agree.
    """
    places = wanted[:, None]
    nll, reference_nll = (-mx.take_along_axis(chances, places, axis=1)[:, 0] for chances in (q, p))
    kl = mx.sum(mx.exp(p) * (p - q), axis=-1)
    same = mx.argmax(p, axis=-1) == mx.argmax(q, axis=-1)
    return [*(np.array(one, np.float64) for one in (nll, reference_nll, kl)), np.array(same)]

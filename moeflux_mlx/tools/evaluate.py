"""Measures how well a model predicts a text, and how far it is from another model: perplexity, KL divergence, first
choices.

The text is cut into independent windows. With two models, only one is open at a time: the inputs of the first model's
last matrix are kept in a temporary file (hidden_size float32 values per token), and that matrix stays in memory next to
the second model. The logits of both are then computed from these, a few rows at a time, so nothing is left out and no
table of whole vocabularies is stored.
"""

import contextlib
import math
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import IO, Any

import mlx.core as mx
import numpy as np

from ..engine.engine import Engine
from ..engine.prefill import Progress, span_lengths
from ..errors import RequestError
from ..model.decoder import Model
from ..ops import backend, native
from ..spec import ModelArgs

WINDOW = 1024
LOGITS_BYTES = 64 << 20  # bytes of one model's logits at a time, in float32

Opens = Callable[[], Engine]


@dataclass(frozen=True)
class Measured:
    """The result for one model and text; arrays have an entry for each predicted token.

    Args:
        tokens: number of tokens of the text that were read, in windows of `window`; the last one may be shorter.
        nll: minus the natural logarithm of the probability that the model gave the token, float64.
        place: of the token within its window, from 1.
        reference_nll: the other model's.
        kl: the divergence of the other model's distribution from this one's, in nats, float64.
        same: whether both models' first choices agree.
    """

    tokens: int
    window: int
    nll: np.ndarray
    place: np.ndarray
    reference_nll: np.ndarray | None = None
    kl: np.ndarray | None = None
    same: np.ndarray | None = None

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


@dataclass(frozen=True)
class Reference:
    """The results of the first model: its tokens, its head, and in `file` the head's input rows."""

    ids: list[int]
    head: Head
    args: ModelArgs
    file: IO[bytes]

    def rows(self, count: int) -> np.ndarray:
        """Reads the next rows, [count, hidden_size]."""
        width = self.args.hidden_size
        return np.fromfile(self.file, np.float32, count * width).reshape(count, width)

    def check(self, ids: list[int], args: ModelArgs) -> None:
        if self.ids != ids or self.args.vocab_size != args.vocab_size:
            raise RequestError("the two models cut the text into different tokens; compare models of one tokenizer")


def evaluate(
    opens: Opens,
    text: str,
    *,
    against: Opens | None = None,
    window: int = WINDOW,
    most: int | None = None,
    progress: Progress = lambda done, total: None,
) -> Measured:
    """Measures the model that `opens` opens on `text`, and its distance from the one that `against` opens.

    Args:
        opens: opens the model; it is closed again.
        against: opens the reference model.
        window: number of tokens that are read together, at least 2.
        most: number of tokens to read from the text's beginning; None: all.
        progress: called with tokens done and tokens in all, each model's counted.

    Raises:
        RequestError: fewer than two tokens, a window out of range, or models with different tokens.
        MoefluxError: a model cannot be opened or read.
    """
    if window < 2 or (most is not None and most < 2):
        raise RequestError(f"window {window}, tokens {most}: both must be at least 2; a token is predicted from others")
    if against is None:
        with _opened(opens) as engine:
            return _measured(engine, _ids(engine, text, window, most), window, None, progress)
    with tempfile.TemporaryFile(prefix="moeflux-") as file:
        with _opened(against) as engine:
            ids = _ids(engine, text, window, most)
            for done, hidden in _hidden(engine, ids, window):
                hidden.tofile(file)
                progress(done, 2 * len(ids))
            reference = Reference(ids, Head.of(engine.model), engine.model.args, file)
        file.seek(0)
        del engine
        with _opened(opens) as engine:
            reference.check(_ids(engine, text, window, most), engine.model.args)
            return _measured(engine, ids, window, reference, progress)


@contextlib.contextmanager
def _opened(opens: Opens) -> Iterator[Engine]:
    """Opens an engine; at the end it is closed with its source of experts."""
    engine = opens()
    try:
        yield engine
    finally:
        engine.experts.close()
        mx.clear_cache()


def _ids(engine: Engine, text: str, window: int, most: int | None) -> list[int]:
    limit = engine.model.args.max_position_embeddings
    if window > limit:
        raise RequestError(f"window {window} exceeds the {limit} tokens that the model takes")
    ids = engine.tokenizer.encode(text)[:most]
    if len(ids) % window == 1:  # a single token predicts nothing
        ids.pop()
    if len(ids) < 2:
        raise RequestError(f"the text has {len(ids)} tokens; give one with at least 2")
    return ids


def _hidden(engine: Engine, ids: Sequence[int], window: int) -> Iterator[tuple[int, np.ndarray]]:
    """Yields for each window the number of tokens done, and the rows [N - 1, hidden_size] that predict its tokens after
    the first.
    """
    model, span = engine.model, engine.plan.sizes.span
    for start in range(0, len(ids), window):
        tokens, cache, at, rows = mx.array([ids[start : start + window]]), model.make_cache(), 0, []
        for length in span_lengths(tokens.shape[1], span):
            hidden = model.hidden(tokens[:, at : at + length], cache).astype(mx.float32)
            mx.eval(hidden, [layer.state for layer in cache])
            rows.append(np.array(hidden[0]))
            at += length
        yield start + tokens.shape[1], np.concatenate(rows)[:-1]


def _measured(engine: Engine, ids: list[int], window: int, reference: Reference | None, progress: Progress) -> Measured:
    head, before, columns = Head.of(engine.model), 0, []
    passed = 0 if reference is None else len(ids)
    step = max(1, LOGITS_BYTES // (4 * engine.model.args.vocab_size))
    for done, hidden in _hidden(engine, ids, window):
        wanted = np.array(ids[before + 1 : done], np.int64)
        right = None if reference is None else reference.rows(len(wanted))
        for rows in (slice(start, start + step) for start in range(0, len(wanted), step)):
            chances = head.log_probabilities(hidden[rows])
            others = chances if reference is None or right is None else reference.head.log_probabilities(right[rows])
            columns.append(_columns(chances, others, mx.array(wanted[rows])))
        before = done
        progress(passed + done, passed + len(ids))
    nll, reference_nll, kl, same = (np.concatenate(column) for column in zip(*columns, strict=True))
    place = np.arange(len(ids)) % window
    against = {} if reference is None else {"reference_nll": reference_nll, "kl": kl, "same": same}
    return Measured(len(ids), window, nll, place[place > 0], **against)


def _columns(q: mx.array, p: mx.array, wanted: mx.array) -> list[np.ndarray]:
    """From log-probabilities [N, vocab_size]: -log q and -log p of the `wanted` tokens, KL(p || q), and whether the
    first choices agree.
    """
    places = wanted[:, None]
    nll, reference_nll = (-mx.take_along_axis(chances, places, axis=1)[:, 0] for chances in (q, p))
    kl = mx.sum(mx.exp(p) * (p - q), axis=-1)
    same = mx.argmax(p, axis=-1) == mx.argmax(q, axis=-1)
    return [*(np.array(one, np.float64) for one in (nll, reference_nll, kl)), np.array(same)]

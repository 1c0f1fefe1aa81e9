"""A model that makes vectors of texts beside the chat model: mlx-vlm's, in a thread of its own.

It is read at the first request. A few texts are computed at a time, and while answers are computed the thread rests
between two such pieces, so that it takes at most a sixth of the time. It knows nothing of HTTP and of the chat model.
"""

import asyncio
import importlib.util
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import mlx.core as mx
import numpy as np
from tokenizers import Tokenizer

from ..errors import BadRequestError, ModelFileError, MoefluxError
from ..files import JsonDict, read_json
from ..ops import backend
from .faults import report
from .model_thread import ModelThread

T = TypeVar("T")
# The most tokens, with those of the padding, that are computed at once, unless one text is longer; on a CPU, where MLX
# needs ten milliseconds for each of a small model, fewer.
PIECE_TOKENS, CPU_SHARE = 4096, 16
REST = 5  # times the seconds of a piece that the thread rests while answers are computed
LONGEST = 8192  # tokens of a text, if the model does not say less
MOST_CHARS = 64  # characters per token of the limit that are looked at
MOST_WAITING = 16  # requests
MOST_VALUES = 1 << 22  # of all vectors of a request; as JSON they are up to 90 MB
WORK_BYTES = 1 << 29  # temporaries of a piece, and the libraries that mlx-vlm imports

Given = str | Sequence[int]  # a text, or its token ids


def is_installed() -> bool:
    return all(importlib.util.find_spec(name) is not None for name in ("mlx_vlm", "transformers", "PIL"))


def memory_of(path: Path, config: JsonDict | None = None) -> int:
    """Bytes of the model in `path` while it computes. `config`: its config.json, if that is read already.

    Raises:
        ModelFileError: it has no weights.
    """
    sizes = [file.stat().st_size for file in path.rglob("*.safetensors")]
    if not sizes or not (path / "tokenizer.json").exists():
        raise ModelFileError(f"{path} holds no embedding model: it needs *.safetensors and tokenizer.json")
    config = read_json(path / "config.json") if config is None else config
    # Without kernels each head's scores of the longest text are in memory.
    scores = 0 if backend.has_kernels() else 4 * config.get("num_attention_heads", 0) * _longest(path, config) ** 2
    return sum(sizes) + WORK_BYTES + scores


def _longest(path: Path, config: JsonDict) -> int:
    """The most tokens of a text."""
    file = path / "tokenizer_config.json"
    said = (read_json(file) if file.exists() else {}).get("model_max_length")
    said = config.get("max_position_embeddings") if said is None else said
    return int(min(said, LONGEST)) if isinstance(said, (int, float)) and said > 0 else LONGEST


class Embedder:
    """Args:
        name: the name that clients see.
        path: the model's directory.
        is_busy: whether answers are computed.

    Attributes:
        state: "unloaded", "loading" or "loaded".
        nbytes: as `memory_of` says.
    """

    def __init__(self, name: str, path: Path, is_busy: Callable[[], bool]):
        self.name, self._path, self._is_busy = name, path, is_busy
        self._config = read_json(path / "config.json")
        self.state, self.nbytes = "unloaded", memory_of(path, self._config)
        self._thread, self._waiting = ModelThread("embed"), 0
        self._rest_until = 0.0
        self._thread.start()
        self._model: Any = None
        self._tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self.limit = _longest(path, self._config)

    async def __call__(
        self, given: Sequence[Given], *, truncate: bool = False, dimensions: int | None = None
    ) -> tuple[np.ndarray, int]:
        """The vectors [N, dimensions] float32 of length 1, and the number of tokens.

        Args:
            truncate: whether a text that is too long is cut; else it is refused.
            dimensions: how many of the first values to keep.

        Raises:
            BadRequestError: a text is too long or empty, there are fewer dimensions, the model cannot be loaded, or too
                many requests wait.
        """
        if self._waiting >= MOST_WAITING:
            raise BadRequestError(f"{self._waiting} requests for embeddings wait; try again later", None, 429)
        self._waiting += 1
        done: Future[tuple[np.ndarray, int]] = Future()
        held = [given]  # emptied at the end: the queue keeps no texts of a client that has left
        del given
        try:
            self._thread.run(partial(_settle, done, partial(self._embed, held, truncate, dimensions, done)))
            return await asyncio.wrap_future(done)
        finally:
            done.cancel()
            held.clear()
            self._waiting -= 1

    def stop(self, seconds: float) -> bool:
        """Ends the thread; returns whether it ended in time."""
        self._model = None
        return self._thread.stop(seconds)

    @property
    def status(self) -> JsonDict:
        return {"name": self.name, "state": self.state, "bytes": self.nbytes}

    def _embed(
        self, held: Sequence[Sequence[Given]], truncate: bool, dimensions: int | None, done: "Future[Any]"
    ) -> tuple[np.ndarray, int]:
        tokens: list[Sequence[int]] = []
        for number, one in enumerate(next(iter(held), ())):
            if done.cancelled():
                break
            tokens.append(self._tokens(one, number, truncate))
        check_size(len(tokens), dimensions or self._config.get("hidden_size") or 1)
        model = self._loaded()
        vectors: dict[int, np.ndarray] = {}
        for piece in _pieces(tokens):
            self._rest(done)
            if done.cancelled():
                break
            began = time.perf_counter()
            vectors |= dict(zip(piece, compute(model, [tokens[i] for i in piece], self._pad), strict=True))
            now = time.perf_counter()
            self._rest_until = now + REST * (now - began)
        made = np.stack([vectors[i] for i in range(len(tokens))]) if len(vectors) == len(tokens) else np.zeros((0, 0))
        return _shortened(made, dimensions), sum(map(len, tokens))

    def _rest(self, done: "Future[Any]") -> None:
        """Leaves the time after the last piece, also of an earlier request, to answers that are computed."""
        while self._is_busy() and not done.cancelled() and (left := self._rest_until - time.perf_counter()) > 0:
            time.sleep(min(left, 0.1))

    def _tokens(self, given: Given, number: int, truncate: bool) -> Sequence[int]:
        where = f"input[{number}]"
        if not given:
            raise BadRequestError(f"{where} is empty; expected some text", "input")
        ids: Sequence[int]
        if isinstance(given, str):
            if len(given) > MOST_CHARS * self.limit and not truncate:
                message = f"{where} has {len(given)} characters and this embedding model takes {self.limit} tokens"
                raise BadRequestError(f"{message}; shorten it", "input")
            ids = self._tokenizer.encode(given[: MOST_CHARS * self.limit]).ids
        else:
            ids = given
            if max(given) >= (size := self._tokenizer.get_vocab_size()):
                raise BadRequestError(f"{where} has token {max(given)}; the largest is {size - 1}", "input")
        if len(ids) <= self.limit:
            return ids
        if not truncate:
            raise BadRequestError(
                f"{where} has {len(ids)} tokens and this embedding model takes {self.limit}; shorten it", "input"
            )
        added = self._tokenizer.num_special_tokens_to_add(False) if isinstance(given, str) else 0
        return [*ids[: self.limit - 1], ids[-1]] if added else ids[: self.limit]

    @property
    def _pad(self) -> int:
        pad = self._config.get("pad_token_id")
        return pad if type(pad) is int else 0

    def _loaded(self) -> Any:
        if self._model is None:
            self.state = "loading"
            try:
                self._model = _load(self._path)
            except Exception as error:  # whatever mlx-vlm raises for files that it cannot use
                report("the embedding model cannot be loaded", error)
                message = f"the embedding model {self.name} cannot be loaded; look at the server's log"
                raise BadRequestError(message, "model", 500, "server_error") from error
            finally:
                self.state = "unloaded" if self._model is None else "loaded"
        return self._model


def _settle(done: "Future[T]", work: Callable[[], T]) -> None:
    """Gives the result of `work`, or its error, to `done`, unless nobody waits for it."""
    try:
        result = work() if not done.cancelled() else None
    except Exception as error:
        if not isinstance(error, MoefluxError):
            report("embedding failed", error)
        with suppress(InvalidStateError):
            done.set_exception(error)
        return
    if result is not None:
        with suppress(InvalidStateError):
            done.set_result(result)


def _load(path: Path) -> Any:
    from mlx_vlm.embedding_loader import load_embedding_model
    from mlx_vlm.models.pooling import read_pooling_config

    model = load_embedding_model(path)
    model.pooling_config = read_pooling_config(path)
    return model


def _pieces(tokens: Sequence[Sequence[int]]) -> Iterator[list[int]]:
    """The numbers of texts that are computed together: those of similar lengths."""
    most = PIECE_TOKENS if backend.has_kernels() else PIECE_TOKENS // CPU_SHARE
    piece: list[int] = []
    for i in sorted(range(len(tokens)), key=lambda i: len(tokens[i])):
        if piece and (len(piece) + 1) * len(tokens[i]) > most:
            yield piece
            piece = []
        piece.append(i)
    yield piece


def check_size(texts: int, values: int) -> None:
    """Raises BadRequestError: so many vectors of so many values are too large a reply."""
    if texts * values > MOST_VALUES:
        most = MOST_VALUES // values
        raise BadRequestError(
            f"input has {texts} texts; this server answers at most {most} of {values} values", "input"
        )


def compute(model: Callable[..., object], tokens: Sequence[Sequence[int]], pad: int) -> list[np.ndarray]:
    """The vectors of texts, of which shorter ones are padded with `pad`.

    Raises:
        BadRequestError: the model makes none, or values that are not finite.
    """
    longest = max(map(len, tokens))
    ids = np.full((len(tokens), longest), pad, np.int32)
    mask = np.zeros((len(tokens), longest), np.int32)
    for row, own in enumerate(tokens):
        ids[row, : len(own)], mask[row, : len(own)] = own, 1
    vectors = getattr(model(mx.array(ids), attention_mask=mx.array(mask)), "text_embeds", None)
    if vectors is None or vectors.ndim != 2:
        raise BadRequestError("this embedding model does not make one vector of a text", "model")
    made = np.array(vectors.astype(mx.float32))
    if not np.isfinite(made).all():
        message = "this embedding model made values that are not finite; use another checkpoint of it"
        raise BadRequestError(message, "model", 500, "server_error")
    return list(made)


def _shortened(vectors: np.ndarray, dimensions: int | None) -> np.ndarray:
    """The first `dimensions` values of each vector, with length 1 again."""
    if dimensions is None or not len(vectors):
        return vectors
    if dimensions > vectors.shape[1]:
        raise BadRequestError(f"dimensions is {dimensions}; this model has {vectors.shape[1]}", "dimensions")
    cut = vectors[:, :dimensions]
    return cut / np.maximum(np.linalg.norm(cut, axis=1, keepdims=True), 1e-9)

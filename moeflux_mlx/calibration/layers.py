"""Runs a model over texts one layer at a time: only one layer's dense weights are in memory, and one of its experts.

The hidden states of all texts are in a file of the run's folder. When a layer has finished, a new file with its output
replaces that of the layer before, so a run that was killed continues with the last finished layer, to the same bytes.
"""

import fcntl
import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import numpy as np

from ..errors import RequestError
from ..experts.routing import as_share, finished
from ..experts.tables import open_readers
from ..files import read_json
from ..kinds import streams_before
from ..layers import LastProduct
from ..mixers.registry import make_caches, stored_forms
from ..model.decoder import Model
from ..model.layer import DecoderLayer, MixedRows
from ..model.moe import MoE
from ..model.span import PromptSizes, Span
from ..model.tables import Tables
from ..model.tokens import Tokens, check_vocabulary
from ..model.weights import fill
from ..ops import backend, native
from ..ops.backend import EitherArray
from ..ops.forms import NAMES
from ..ops.limits import within_limits
from ..ops.observe import observing
from ..ops.seen import HANDED, Chosen
from ..packing.sources import WrittenTensor
from .seen import SeenLayer, read_tensors, write_json, write_rows, write_tensors, writing
from .weights import LayerWeights, OneByOne

EMBEDDING, LAST = "model.embed_tokens", ("model.norm", "model.hc_head")  # parts of a model outside of its layers
RUN, LOCK = "run.json", "run.lock"
Report = Callable[[float], object]  # called with the share of the work that is done
ROWS_AT_ONCE = 65536  # tokens that go through a layer's experts together; more would read each expert less often


class LayerRun:
    """A model on its way over texts.

    Args:
        weights: of the model.
        texts: the token ids of each; each stands alone and has at least one token.
        folder: for the files of the run; one that holds part of the same run continues it.
        dtype: of activations.
        rows_at_once: tokens that go through a layer's experts together, at least those of one text. Each expert is read
            once for them. It decides the memory that the run needs, and the order of sums.
        name: says which weights these are; a run continues only with those of the same name.

    Raises:
        RequestError: a text is empty, longer than the model takes or has unknown tokens, or `folder` holds another run.
    """

    def __init__(
        self,
        weights: LayerWeights,
        texts: Sequence[np.ndarray],
        folder: Path,
        dtype: mx.Dtype,
        *,
        rows_at_once: int = ROWS_AT_ONCE,
        name: str = "",
    ):
        self.weights, self.args, self.folder, self.dtype = weights, weights.args, folder, dtype
        has_again = len(self.args.visits) > self.args.num_hidden_layers
        if self.args.matrix_layers or has_again:
            raise RequestError(
                f"{self.args.model_type} has {'layers that run several times' if has_again else 'value experts'}, "
                "which do not run layer by layer: convert it without a text, and evaluate the converted model"
            )
        self.texts, self._rows_at_once = texts, rows_at_once
        self._forms, self._suits_cpu = stored_forms(weights.names), backend.takes_widths(self.args.widths)
        self._check_texts()
        self._begin(name)

    def _check_texts(self) -> None:
        longest = self.args.max_position_embeddings
        for text in self.texts:
            if not 0 < len(text) <= longest:
                raise RequestError(f"a text has {len(text)} tokens; the model takes 1 to {longest}")
            check_vocabulary(text, self.args.vocab_size)
        if not self.texts:
            raise RequestError("there are no texts; give at least one")

    def _begin(self, name: str) -> None:
        """Writes what the run depends on, or compares that with what the folder holds."""
        ours = {
            "weights": name,
            "texts": digest_of(self.texts),
            "dtype": str(self.dtype),
            "backend": backend.name(),
            "rows_at_once": self._rows_at_once,
        }
        with writing(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
        file = self.folder / RUN
        if not file.exists():
            write_json(file, ours)
            return
        theirs = read_json(file)
        differing = sorted(key for key in ours if theirs.get(key) != ours[key])
        if differing:
            raise RequestError(
                f"{self.folder} holds another run: its {', '.join(differing)} differ; continue that run, or remove it"
            )

    @property
    def outside(self) -> LayerWeights:
        """Where what lies outside of layers is read."""
        return self.weights

    @property
    def finished(self) -> int | None:
        """The number of layers that have finished; None: the texts are not embedded yet."""
        return max(
            (int(file.stem.rpartition("-")[2]) for file in self.folder.glob("hidden-*.safetensors")), default=None
        )

    @within_limits()
    def run(self, progress: Report = lambda share: None) -> None:
        """Takes the texts through the layers that they have not passed.

        Raises:
            ModelFileError, ExpertIOError: weights cannot be read. RequestError: files cannot be written, or another
                process runs in the folder. DeviceError: memory is exhausted.
        """
        count = self.args.num_hidden_layers
        with _locked(self.folder), native.activations(native.EXACT):
            self._remove_unfinished()
            if self.finished is None:
                write_rows(self._file(0), self._form(0), self._embedded())
            for layer in range(cast(int, self.finished), count):
                self._pass(layer, lambda share, done=layer: progress((done + share) / count))  # type: ignore[misc]

    def _remove_unfinished(self) -> None:
        """Removes what a run that was killed left behind."""
        for kind in ("hidden", "chosen", "codes", "errors"):
            for file in self.folder.glob(f".{kind}-*"):
                file.unlink()

    def hidden(self) -> Iterator[mx.array]:
        """The normed hidden states [L, hidden_size] of each text, the input of `head`; the run must have finished."""
        outer = self._outer(*LAST)
        for number in range(len(self.texts)):
            state = self._state(self.args.num_hidden_layers, number)
            yield backend.leave(outer.model.normed(state))[0]

    def head(self) -> LastProduct:
        """Makes logits from what `hidden` gives."""
        return self._outer(*LAST, EMBEDDING if self.args.is_tied else "lm_head").last_product

    # ---- between layers

    def _file(self, layer: int) -> Path:
        """Holds the hidden states after that number of layers."""
        return self.folder / f"hidden-{layer:05d}.safetensors"

    def _form(self, layer: int) -> dict[str, WrittenTensor]:
        """The tensors of `_file`."""
        width = self.args.hidden_size * streams_before(self.args.connections, layer)
        kind = NAMES[self.dtype]
        shapes = {f"text.{i}": (1, len(text), width) for i, text in enumerate(self.texts)}
        return {name: WrittenTensor(name, kind, shape) for name, shape in shapes.items()}

    def _state(self, layer: int, number: int) -> Any:
        """The hidden states [1, L, .] of a text after that number of layers, as the layers take them."""
        return self._entered(read_tensors(self._file(layer))[f"text.{number}"])

    def _entered(self, array: mx.array) -> EitherArray:
        return backend.enter(array, self.dtype) if self._suits_cpu else array

    def _embedded(self) -> Iterator[mx.array]:
        outer = self._outer(EMBEDDING, *LAST)
        for text in self.texts:
            yield backend.leave(outer.embedded(_ids(text)))

    def _outer(self, *paths: str) -> Model:
        """A model without layers, and with these of its parts alone."""
        outer = Model(replace(self.args, layers=self.args.layers[:1]), None, self._forms)
        outer.model.layers, outer.suits_cpu = [], self._suits_cpu
        if "norm" in outer.model:
            outer.model.norm.eps = self.args.last_norm_eps
        for path in {EMBEDDING, *LAST, "lm_head"}.difference(paths):
            owner, name = (outer.model, path.removeprefix("model.")) if "." in path else (outer, path)
            owner.pop(name, None)
        weights = self.outside
        tensors = {name: one for path in paths for name, one in weights.resident(path).items()}
        fill(outer, tensors, weights.args.quantization, self.dtype)
        return outer

    # ---- one layer

    def _pass(self, layer: int, progress: Report) -> None:
        """Takes all texts through a layer."""
        made = self._layer(layer, self.weights)
        with self._tables(layer) as tables:
            self._keep(layer, self._outputs(layer, made, tables, None, progress))

    def _layer(self, layer: int, weights: LayerWeights) -> DecoderLayer:
        """A layer with these weights."""
        made = DecoderLayer(self.args, layer, OneByOne(weights, self.dtype), self._forms)
        path = f"model.layers.{layer}"
        fill(made, weights.resident(path), weights.args.quantization, self.dtype, path)
        return made

    def _keep(self, layer: int, rows: Iterator[mx.array]) -> None:
        """Writes what a layer makes of each text; the layer has then finished."""
        write_rows(self._file(layer + 1), self._form(layer + 1), rows)
        for old in (self._file(layer), self._chosen_file(layer)):
            old.unlink(missing_ok=True)
        mx.clear_cache()

    @contextmanager
    def _tables(self, layer: int) -> Iterator[Tables | None]:
        """The n-grams of a layer, if it has any."""
        readers = open_readers({i: files for i, files in self.weights.tables.items() if i == layer})
        try:
            yield Tables({layer: self.args.ngrams[layer]}, readers) if readers else None
        finally:
            for reader in readers.values():
                reader.close()

    def _outputs(
        self,
        layer: int,
        made: DecoderLayer,
        tables: Tables | None,
        seen: SeenLayer | None,
        report: Report,
    ) -> Iterator[mx.array]:
        """The hidden states [1, L, .] of each text after a layer; `seen` keeps what its matrices multiply."""
        if isinstance(made.mlp, MoE) and isinstance(made.mlp.experts, OneByOne):
            made.mlp.experts.observer = seen
        chosen, done, total = _Choices(self._chosen_file(layer)), 0, sum(map(len, self.texts))
        for numbers in self._groups():
            parts = []
            with observing(seen.observe) if seen is not None else nullcontext():
                for number in numbers:
                    parts.append(self._mixed(layer, number, made, tables, chosen))
            behind = tuple(chain.from_iterable(part.behind for part in parts))
            rows = MixedRows(backend.join([tuple(part.arrays) for part in parts], axis=-2), parts[0].kept, behind)
            parts.clear()
            count = sum(len(self.texts[number]) for number in numbers)
            with observing(seen.observe) if seen is not None else nullcontext():
                out = finished(as_share(made.finish_rows(rows), done / total, count / total), report)
                backend.finish(out)
            done += count
            report(done / total)
            start = 0
            for number in numbers:
                end = start + len(self.texts[number])
                yield mx.contiguous(backend.leave(out[:, start:end])).astype(self.dtype)
                start = end
        chosen.write(self._chosen_file(layer + 1))

    def _groups(self) -> Iterator[list[int]]:
        """The numbers of texts that go through the experts together."""
        group, rows = list[int](), 0
        for number, text in enumerate(self.texts):
            if group and rows + len(text) > self._rows_at_once:
                yield group
                group, rows = [], 0
            group.append(number)
            rows += len(text)
        yield group

    def _mixed(
        self, layer: int, number: int, made: DecoderLayer, tables: Tables | None, chosen: "_Choices"
    ) -> MixedRows:
        """A text's rows behind the mixer of a layer."""
        tokens, caches = _ids(self.texts[number]), make_caches(self.args.mixers[layer])
        inputs = Tokens(tokens, tables.begin(np.array(tokens), {layer: caches}) if tables else {})
        span = Span(tokens, 0, PromptSizes().block, reached=(layer, None), inputs=inputs)
        span.chosen.update(chosen.of(number, self._entered))
        mixed = finished(made.mix_span(self._state(layer, number), caches, span))
        mx.eval(mixed.arrays)
        chosen.keep(number, span)
        return mixed

    def _chosen_file(self, layer: int) -> Path:
        """Holds what the last layer with an indexer chose, for a layer that reuses it."""
        return self.folder / f"chosen-{layer:05d}.safetensors"


def digest_of(texts: Sequence[np.ndarray]) -> str:
    """Tells texts apart, and how they are cut into windows."""
    return hashlib.sha256(b"".join(np.asarray([len(text), *text], np.int64).tobytes() for text in texts)).hexdigest()


class _Choices:
    """What layers hand on to later ones, of each text and block of it (`Chosen`)."""

    def __init__(self, file: Path):
        self._tensors = read_tensors(file) if file.exists() else {}
        self._kept: dict[str, mx.array] = {}

    def of(self, number: int, entered: Callable[[mx.array], Any]) -> dict[int, Chosen]:
        prefix = f"text.{number}."
        chosen: dict[int, Chosen] = {}
        for name, one in self._tensors.items():
            if name.startswith(prefix):
                start, _, part = name.removeprefix(prefix).partition(".")
                array = one.view(mx.int32) if one.dtype == mx.uint32 else one
                setattr(chosen.setdefault(int(start), Chosen()), part, entered(array))
        return chosen

    def keep(self, number: int, span: Span) -> None:
        for start, one in span.chosen.items():
            for part, handed in zip(HANDED, one.handed, strict=True):
                if handed is not None:
                    array = backend.leave(handed)
                    is_choice = mx.issubdtype(array.dtype, mx.integer)
                    array = array.astype(mx.int32).view(mx.uint32) if is_choice else array
                    self._kept[f"text.{number}.{start}.{part}"] = array

    def write(self, file: Path) -> None:
        if self._kept:
            write_tensors(file, self._kept)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Keeps other processes, and other runs of this one, out of the folder.

    Raises:
        RequestError: one is in it.
    """
    with writing(folder):
        lock = open(folder / LOCK, "wb")  # noqa: SIM115
    with lock as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise RequestError(f"another process runs in {folder}; wait for it, or give another folder") from None
        yield


def _ids(text: np.ndarray) -> mx.array:
    return mx.array(np.asarray(text, np.uint32)[None])

"""What a layer's matrices multiply in a run, kept in memory until the layer is rounded or measured; and the safetensors
files of a run, written beside their names, made durable and renamed, so that each is whole or not there.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, cast

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ..errors import ExpertIOError, ModelFileError, RequestError
from ..files import replace_file
from ..formats.checkpoint import Tensor
from ..layers import Weight
from ..ops.backend import AnyArray, Array, library_of, of_kind
from ..ops.elementwise import float32
from ..ops.forms import NAMES
from ..ops.matrix import Weights
from ..packing.resident import TensorFile
from ..packing.sources import WrittenTensor


@dataclass(frozen=True)
class _Given:
    """Tensors that are given as arrays, one after the other."""

    written: tuple[WrittenTensor, ...]
    rows: Iterable[mx.array]
    tensors: tuple[Tensor, ...] = ()

    def arrays(self) -> Iterator[mx.array]:
        return iter(self.rows)


def write_tensors(path: Path, tensors: Mapping[str, mx.array]) -> None:
    """Writes tensors that are in memory, in the order of their names.

    Raises:
        RequestError: the system refuses.
    """
    names = sorted(tensors)
    form = {name: WrittenTensor(name, NAMES[tensors[name].dtype], tuple(tensors[name].shape)) for name in names}
    write_rows(path, form, map(tensors.__getitem__, names))


def write_rows(path: Path, form: Mapping[str, WrittenTensor], rows: Iterable[mx.array]) -> None:
    """Writes tensors one after the other as `rows` yields them, so that they need not be in memory together.

    Args:
        form: the name, dtype and shape of each, in the order of `rows`.

    Raises:
        RequestError: the system refuses. Errors of `rows`.
    """
    file = TensorFile(path.name, (_Given(tuple(form.values()), rows),))
    _replace(path, map(memoryview, file.chunks()))


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Raises RequestError: the system refuses to write there."""
    try:
        yield
    except ExpertIOError:
        raise
    except OSError as error:
        reason = error.strerror or error
        raise RequestError(f"{path} cannot be written: {reason}; choose a place that can be") from None


def _replace(path: Path, chunks: Iterable[bytes | memoryview]) -> None:
    with writing(path):
        replace_file(path, chunks)


def read_tensors(path: Path) -> dict[str, mx.array]:
    """The tensors of a file, lazily. Raises ModelFileError: it cannot be read."""
    try:
        return cast(dict[str, mx.array], mx.load(str(path)))
    except (RuntimeError, ValueError) as error:
        raise ModelFileError(f"{path} cannot be read: {error}") from None


def write_json(path: Path, content: Mapping[str, object]) -> None:
    """Raises RequestError: the system refuses."""
    _replace(path, [json.dumps(content, indent=2, sort_keys=True).encode()])


INPUT = ""  # the name of what a layer's routed experts have as input; modules have longer ones


@dataclass
class Sums:
    """Weighted sums over rows of the inputs of a matrix.

    Args:
        total: float32, the sum of `moments`.
        weight: of all rows; a row's weight is 1 if nothing else is said.
    """

    total: np.ndarray
    weight: float = 0.0

    @property
    def mean(self) -> np.ndarray:
        """The moments of the mean row; zeros if there is no row."""
        return self.total / np.float32(self.weight or 1)

    def add(self, x: Array, weights: np.ndarray | None = None) -> None:
        """Adds rows [N, columns] float32, with weights float32 [N]."""
        products = self.total.ndim == 2
        self.total += moments(x, products) if weights is None else moments(weighted(x, weights), products)
        self.weight += len(x) if weights is None else float(weights.sum(dtype=np.float64))


def moments(x: Array, products: bool) -> np.ndarray:
    """Sums over rows x [N, columns]: of x x^T [columns, columns] if `products` are wanted, else of x^2 [columns]."""
    return np.array(x.T @ x if products else (x * x).sum(axis=0))


def weighted(x: Array, weights: np.ndarray) -> Array:
    """Rows x [N, columns], so that the moments of each have a weight [N]."""
    factors = np.sqrt(weights)[:, None]
    return x * of_kind(factors, x)


def sums(columns: int, products: bool) -> Sums:
    return Sums(np.zeros((columns, columns) if products else columns, np.float32))


class ExpertInputs(NamedTuple):
    """The rows of one expert: their inputs [n, H], numpy's or MLX's, and their routing weights, float32 [n]."""

    x: AnyArray
    weights: np.ndarray


class SeenLayer:
    """The inputs of one layer's matrices: sums over the rows, and the rows of its routed experts.

    Args:
        layer: its number, and `module`: the layer.
        products: whether sums of x x^T are wanted, or only those of x^2.

    Attributes:
        down: sums over the inputs of all experts' down projections, with routing weights; None: no row has been seen.
    """

    def __init__(self, layer: int, module: nn.Module, products: bool):
        self.products = products
        stem = f"model.layers.{layer}."
        self._paths = {id(one): stem + name for name, one in module.named_modules() if isinstance(one, Weight)}
        self._sums: dict[str, Sums] = {}
        self._alike: dict[str, str] = {}  # by path: that of a matrix with the same inputs
        self.down: Sums | None = None
        self._inputs = list[AnyArray]()
        self._ids, self._weights = list[np.ndarray](), list[np.ndarray]()

    def observe(self, matrix: Weights, x: Array) -> None:
        """Adds the rows x [..., columns] of a matrix or a stack of matrices of the layer; an `Observer`."""
        members = getattr(matrix, "members", ())
        paths = sorted(self._paths[id(one)] for one in members if id(one) in self._paths)
        if not paths:
            return
        self._alike.update(dict.fromkeys(paths[1:], paths[0]))
        self._add(paths[0], x)

    def observe_input(self, x: Array, ids: np.ndarray, weights: np.ndarray) -> None:
        """Keeps rows of the routed experts' input [N, H], with the experts and weights [N, K] of each."""
        self._add(INPUT, x)
        self._inputs.append(x)
        self._ids.append(ids)
        self._weights.append(weights)

    def observe_expert(self, activations: Array, weights: np.ndarray) -> None:
        """Adds an expert's activations [N, I] to the sums over all experts, with routing weights [N]."""
        if self.down is None:
            self.down = sums(activations.shape[1], self.products)
        self.down.add(rows_of(activations), weights)

    def of(self, path: str) -> Sums | None:
        """The sums over the inputs of the matrix at a module path; None: it has multiplied nothing."""
        return self._sums.get(self._alike.get(path, path))

    @property
    def input(self) -> Sums | None:
        """The sums over all inputs of the layer's routed experts; None: it has none."""
        return self.of(INPUT)

    def rows(self, expert: int) -> ExpertInputs:
        """The rows that chose an expert."""
        xs, weights = [], []
        for x, ids, of_ids in zip(self._inputs, self._ids, self._weights, strict=True):
            tokens, places = np.nonzero(ids == expert)
            xs.append(rows_at(x, tokens))
            weights.append(of_ids[tokens, places])
        return ExpertInputs(library_of(xs[0]).concatenate(xs), np.concatenate(weights))

    def _add(self, path: str, x: Array) -> None:
        rows = rows_of(x)
        if path not in self._sums:
            self._sums[path] = sums(rows.shape[1], self.products)
        self._sums[path].add(rows)


def rows_at(x: Array, numbers: np.ndarray) -> Array:
    """The rows with these numbers, of x's kind."""
    return x[of_kind(numbers.astype(np.int32), x)]


def rows_of(x: Array) -> Array:
    """[N, columns] float32, of x's kind: numpy's products are faster on the CPU than MLX's."""
    return float32(x.reshape(-1, x.shape[-1]))

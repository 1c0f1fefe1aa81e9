"""Statistics of the inputs of a model's matrices, one safetensors file (or two) per layer.

`statistics-00003.safetensors` has for each matrix of layer 3 that is not a routed expert's, by its module path:

    PATH.mean_square  [columns] float32, the mean of x^2 over the rows x that it multiplied, for each column
    PATH.rows         [1] uint32, their number
    PATH.hessian      [columns, columns] float32, the sum of x x^T, if hessians were asked for

For matrices that multiply the same rows (queries, keys and values, say) this is stored once, and for each of the others
a tensor `alike.OTHER/PATH` without meaning says where. For the routed experts, EXPERTS = model.layers.3.mlp.experts:

    EXPERTS.gate_up.mean_square [E, H], EXPERTS.gate_up.rows [E]    of the rows that chose each expert
    EXPERTS.down.mean_square    [E, I], EXPERTS.down.rows    [E]    of what its down projection multiplies
    EXPERTS.input.mean_square   [H], .rows [1] and .hessian [H, H]  of all rows, whichever experts they chose

and, if hessians were asked for, `hessians-00003.safetensors` has `EXPERTS.gate_up.hessian` [E, H, H] and
`EXPERTS.down.hessian` [E, I, I], which are large: 4 E (H^2 + I^2) bytes. An expert that no row chose has zeros.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ..errors import ModelFileError, RequestError
from ..layers import Weight
from ..model.moe import MoE
from ..ops.backend import Array
from ..ops.elementwise import float32
from .files import SumsFile, read_tensors, write_tensors

ALIKE = "alike."  # begins the name of a tensor that says of which matrix the inputs are the same


@dataclass
class Sums:
    """Sums over the rows of one matrix, or of one of several: of x^2, float64; and of x x^T, float32, None if it is not
    wanted.
    """

    squares: np.ndarray
    rows: int = 0
    hessian: np.ndarray | None = None

    def add(self, x: Any) -> None:
        """Adds rows [N, columns] float32."""
        self.squares += np.array((x * x).sum(axis=0), np.float64)
        self.rows += len(x)
        if self.hessian is not None:
            self.hessian += np.array(x.T @ x)


def sums(columns: int, hessian: bool) -> Sums:
    return Sums(np.zeros(columns), 0, np.zeros((columns, columns), np.float32) if hessian else None)


def experts_path(layer: int) -> str:
    """The path that the names of the routed experts' statistics begin with."""
    return f"model.layers.{layer}.mlp.experts"


class LayerStatistics:
    """Collects the statistics of one layer.

    Args:
        layer: its number, and `module`: the layer.
        folder: for its files.
        hessians: whether sums of x x^T are wanted.
    """

    def __init__(self, layer: int, module: nn.Module, folder: Path, hessians: bool = False):
        self.layer, self._folder, self._hessians = layer, folder, hessians
        stem = f"model.layers.{layer}."
        self._paths = {id(one): stem + name for name, one in module.named_modules() if isinstance(one, Weight)}
        self._dense: dict[str, Sums] = {}
        self._alike: dict[str, str] = {}
        self._gate_up: dict[int, Sums] = {}
        self._down: dict[int, Sums] = {}
        block = module.get("mlp")
        self._experts = block.rule.experts if isinstance(block, MoE) else 0
        self._file: SumsFile | None = None

    def observe(self, matrix: Any, x: Any) -> None:
        """Adds the rows x [..., columns] of a matrix or a stack of matrices of the layer; an `Observer`."""
        members = getattr(matrix, "members", ())
        paths = sorted(self._paths[id(one)] for one in members if id(one) in self._paths)
        if not paths:
            return
        self._alike.update(dict.fromkeys(paths[1:], paths[0]))
        self._add(paths[0], rows_of(x))

    def observe_input(self, x: Array, ids: np.ndarray, weights: np.ndarray) -> None:
        """Adds rows of the routed experts' input [N, H], each once, whichever experts [N, K] they chose."""
        self._add(f"{experts_path(self.layer)}.input", rows_of(x))

    def observe_expert(self, expert: int, x: Array, activations: Array) -> None:
        """Adds rows that chose an expert: its input [N, H], and its activations [N, I]."""
        for name, of_experts, rows in (("gate_up", self._gate_up, x), ("down", self._down, activations)):
            rows = rows_of(rows)
            of_experts.setdefault(expert, sums(rows.shape[1], False)).add(rows)
            if self._hessians:
                self._hessian_file(x.shape[1], activations.shape[1]).add(
                    f"{experts_path(self.layer)}.{name}.hessian", expert, np.array(rows.T @ rows)
                )

    def write(self) -> None:
        """Writes the layer's files. Raises RequestError: the system refuses."""
        if self._file is not None:
            self._file.finish()
        tensors = {f"{ALIKE}{path}/{first}": mx.zeros((1,), mx.uint32) for path, first in self._alike.items()}
        for path, one in self._dense.items():
            tensors[f"{path}.mean_square"] = mx.array(_mean(one).astype(np.float32))
            tensors[f"{path}.rows"] = mx.array([one.rows], mx.uint32)
            if one.hessian is not None:
                tensors[f"{path}.hessian"] = mx.array(one.hessian)
        for name, of_experts in (("gate_up", self._gate_up), ("down", self._down)):
            tensors |= self._of_experts(f"{experts_path(self.layer)}.{name}", of_experts)
        write_tensors(statistics_path(self._folder, self.layer), tensors)

    def _add(self, path: str, x: Any) -> None:
        if path not in self._dense:
            self._dense[path] = sums(x.shape[1], self._hessians)
        self._dense[path].add(x)

    def _of_experts(self, path: str, of_experts: Mapping[int, Sums]) -> dict[str, mx.array]:
        if not of_experts:
            return {}
        columns = len(next(iter(of_experts.values())).squares)
        squares = np.zeros((self._experts, columns), np.float32)
        rows = np.zeros(self._experts, np.uint32)
        for expert, one in of_experts.items():
            squares[expert], rows[expert] = _mean(one), one.rows
        return {f"{path}.mean_square": mx.array(squares), f"{path}.rows": mx.array(rows)}

    def _hessian_file(self, hidden: int, width: int) -> SumsFile:
        if self._file is None:
            stem, count = experts_path(self.layer), self._experts
            shapes = {f"{stem}.gate_up.hessian": (count, hidden, hidden), f"{stem}.down.hessian": (count, width, width)}
            self._file = SumsFile(hessians_path(self._folder, self.layer), shapes)
        return self._file


def rows_at(x: Any, numbers: np.ndarray) -> Any:
    """The rows with these numbers, of x's kind."""
    return x[numbers] if isinstance(x, np.ndarray) else x[mx.array(numbers.astype(np.int32))]


def rows_of(x: Any) -> Any:
    """[N, columns] float32, of x's kind: numpy's products are faster on the CPU than MLX's."""
    return float32(x.reshape(-1, x.shape[-1]))


def _mean(one: Sums) -> np.ndarray:
    return one.squares / max(one.rows, 1)


def statistics_path(folder: Path, layer: int) -> Path:
    return folder / f"statistics-{layer:05d}.safetensors"


def hessians_path(folder: Path, layer: int) -> Path:
    return folder / f"hessians-{layer:05d}.safetensors"


@dataclass(frozen=True)
class Inputs:
    """What is known of the inputs of a matrix, or of the same matrix of all experts.

    Args:
        mean_square: [columns] or [E, columns] float32.
        rows: [1] or [E] uint32.
        hessian: the sum of x x^T, [columns, columns] or [E, columns, columns] float32; None: it was not asked for.
    """

    mean_square: mx.array
    rows: mx.array
    hessian: mx.array | None


@dataclass(frozen=True)
class Statistics:
    """The statistics in a folder. Arrays are read when they are needed."""

    folder: Path
    _layers: dict[int, dict[str, mx.array]] = field(default_factory=dict)

    def inputs(self, path: str) -> Inputs | None:
        """Those of the module `path` as in `model.layers.3.self_attn.o_proj`, or of a name of `statistics` as in
        `model.layers.3.mlp.experts.down`; None: nothing has been seen of it.

        Raises:
            RequestError: the layer has not been run. ModelFileError: a file cannot be read.
        """
        number = re.match(r"model\.layers\.(\d+)\.", path)
        if number is None:
            return None
        tensors = self._of_layer(int(number[1]))
        prefix = f"{ALIKE}{path}/"
        path = next((name.removeprefix(prefix) for name in tensors if name.startswith(prefix)), path)
        if f"{path}.rows" not in tensors:
            return None
        return Inputs(tensors[f"{path}.mean_square"], tensors[f"{path}.rows"], tensors.get(f"{path}.hessian"))

    def _of_layer(self, layer: int) -> dict[str, mx.array]:
        if layer not in self._layers:
            file, large = statistics_path(self.folder, layer), hessians_path(self.folder, layer)
            if not file.exists():
                raise RequestError(f"{file} does not exist: the calibration run has not reached layer {layer}")
            tensors = read_tensors(file) | (read_tensors(large) if large.exists() else {})
            if not all(name.startswith((ALIKE, "model.layers.")) for name in tensors):
                raise ModelFileError(f"{file} holds other tensors than statistics of a layer")
            self._layers[layer] = tensors
        return self._layers[layer]

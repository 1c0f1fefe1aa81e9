"""Rounds a model layer by layer, each matrix for the inputs that it really has.

A layer is first computed in floats over the texts, which shows what its matrices multiply. Then they are rounded, and
the layer is computed once more with the result, so that the next layer is rounded for the inputs that it will have.

The codes of layer 3 are in `codes-00003.safetensors`, those of the head, if it is rounded, in `codes-head.safetensors`.
They are named by module path, with an expert's number and projection behind `model.layers.3.mlp.experts`.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from ..kinds import Experts
from ..model.tensors import layer_of
from ..ops.forms import DTYPES, unpacked_float32
from ..packing.ggml import Codes, rounded, tables
from ..packing.layer_files import LayerFile
from ..packing.matrix import ALL, Matrix, Rounding
from ..packing.plan import ConversionPlan
from ..packing.sources import MatrixSource
from ..quant import INTEGER, Quant
from ..rounding.gptq import TURNS, damped, gptq
from ..rounding.methods import FIT
from .layers import LayerRun, Report
from .seen import ExpertInputs, SeenLayer, Sums, moments, read_tensors, rows_of, sums, weighted, write_tensors
from .weights import CheckpointWeights, FloatExpert, RoundedWeights

GPTQ = "gptq"
CALIBRATED_METHODS = (FIT, GPTQ)
HEAD, HEAD_FILE = "lm_head", "codes-head.safetensors"


def codes_path(folder: Path, layer: int) -> Path:
    return folder / f"codes-{layer:05d}.safetensors"


@dataclass(frozen=True)
class Calibrated(Rounding):
    """The codes that a `RoundingRun` has left in a folder, and for what it has not
    rounded, such as an embedding, those of the least squared error.
    """

    folder: Path

    def codes(self, path: str, matrix: Matrix, quant: Quant, rows: slice = ALL, dtype: mx.Dtype = mx.bfloat16) -> Codes:
        """As `Rounding.codes`. Raises ModelFileError: a file cannot be read."""
        tensors, parts = self._tensors(path), list[mx.array]()
        while (part := tensors.get(f"{path}.{len(parts)}")) is not None:
            parts.append(part)
        if not parts:
            return Rounding(FIT).codes(path, matrix, quant, rows, dtype)
        return tuple(parts)

    def _tensors(self, path: str) -> Mapping[str, mx.array]:
        """What the run has left of a layer, or of what is outside of layers."""
        layer = layer_of(path)
        file = self.folder / HEAD_FILE if layer is None else codes_path(self.folder, layer)
        return _tensors_of(file, file.stat().st_mtime_ns) if file.exists() else {}


@lru_cache(1)  # codes are asked for layer by layer
def _tensors_of(file: Path, changed: int) -> Mapping[str, mx.array]:
    return read_tensors(file)


@dataclass(frozen=True)
class Rounder:
    """Rounds matrices for the inputs that they have.

    Args:
        method: "fit" weighs the squared error of each column by its mean square; "gptq" is `rounding.gptq`.
        damping: of GPTQ.
    """

    method: str
    damping: float = 0.1  # with few rows less damping fits their accidents (docs/quality.md)

    @property
    def products(self) -> bool:
        """Whether it needs the sums of x x^T over inputs x, or only those of x^2."""
        return self.method == GPTQ

    def settings(self, together: int) -> str:
        """What codes depend on besides matrices and inputs, if so many matrices are rounded side by side: the sums of
        batched products differ by that."""
        if not self.products:
            return self.method
        return f"{self.method}, damping {self.damping:g}, {TURNS} turns, {together} side by side"

    def alone(self, values: mx.array, quant: Quant, inputs: Sums | None) -> Codes:
        """The codes of a matrix [rows, cols]; `inputs`: over what it multiplies, None: nothing is known."""
        if inputs is None or not inputs.weight:
            return rounded(values, quant, FIT)
        return self.rounded(values, quant, mx.array(inputs.mean))

    def rounded(self, values: mx.array, quant: Quant, moments: mx.array, dtype: mx.Dtype = mx.bfloat16) -> Codes:
        """The codes of matrices [..., rows, cols].

        Args:
            moments: of each matrix's inputs x: means of x x^T [..., cols, cols] if `products`, else of x^2 [..., cols].
        """
        if not self.products:
            return rounded(values, quant, FIT, moments, dtype)
        if quant.codes == INTEGER and quant.is_of_mlx:
            return gptq(values, quant, moments, self.damping, dtype)
        return rounded(values, quant, FIT, mx.diagonal(moments, axis1=-2, axis2=-1), dtype)


class RoundingRun(LayerRun):
    """A run that rounds the layers that it passes.

    Args:
        weights, texts, folder, dtype, rows_at_once, name: as of `LayerRun`.
        plan: of the conversion, whose `rounding` is a `Calibrated` of `folder`.
        rounder: rounds the matrices.
        together: routed experts that are rounded side by side.
    """

    def __init__(
        self,
        weights: CheckpointWeights,
        plan: ConversionPlan,
        texts: Sequence[np.ndarray],
        folder: Path,
        dtype: mx.Dtype,
        rounder: Rounder,
        *,
        together: int,
        **more: Any,
    ):
        self._floats, self._target, self._rounder = weights, RoundedWeights(weights.args, plan), rounder
        self._together = together
        super().__init__(weights, texts, folder, dtype, **more)

    @property
    def outside(self) -> RoundedWeights:
        """The embedding as it is stored, so that the first layer sees what it will see."""
        return self._target

    def run(self, progress: Report = lambda share: None) -> None:
        """As `LayerRun.run`; then the head is rounded."""
        super().run(progress)
        if (self.folder / HEAD_FILE).exists():
            return
        codes: dict[str, mx.array] = {}
        for source in self._rounded_sources(HEAD):
            inputs: Sums | None = None
            for x in self.hidden():
                rows = rows_of(x)
                inputs = inputs or sums(rows.shape[1], self._rounder.products)
                inputs.add(rows)
            codes |= self._of_source(source, inputs)
        write_tensors(self.folder / HEAD_FILE, codes)

    def _pass(self, layer: int, progress: Report) -> None:
        made = self._layer(layer, self.weights)
        seen = SeenLayer(layer, made, self._rounder.products)
        with self._tables(layer) as tables:
            for _ in self._outputs(layer, made, tables, seen, lambda share: progress(share / 3)):
                pass  # only what it shows is wanted
            del made
            write_tensors(codes_path(self.folder, layer), dict(self._codes(layer, seen)))
            del seen
            progress(2 / 3)
            rounded = self._layer(layer, self._target)
            rows = self._outputs(layer, rounded, tables, None, lambda share: progress((2 + share) / 3))
            self._keep(layer, rows)

    def _codes(self, layer: int, seen: SeenLayer) -> Iterator[tuple[str, mx.array]]:
        """The codes of all matrices of a layer, by name."""
        for source in self._rounded_sources(f"model.layers.{layer}"):
            yield from self._of_source(source, seen.of(source.pieces[0][0])).items()
        if layer in self._target.units:
            yield from self._of_experts(layer, seen)

    def _of_source(self, source: MatrixSource, inputs: Sums | None) -> dict[str, mx.array]:
        assert source.made is not None
        values = source.matrix.values()
        if values.ndim != 2 or (inputs is not None and len(inputs.total) != values.shape[-1]):
            return {}
        parts = self._rounder.alone(values, source.made, inputs)
        return {f"{source.pieces[0][0]}.{i}": part for i, part in enumerate(parts)}

    def _of_experts(self, layer: int, seen: SeenLayer) -> Iterator[tuple[str, mx.array]]:
        unit, part = self._target.units[layer], self.args.layers[layer].feed_forward
        assert isinstance(part, Experts)
        wanted = [i for i, one in enumerate(unit.geometry.projections) if unit.is_rounded(i)]
        if not wanted or seen.input is None or seen.down is None:
            return
        for first in range(0, unit.layout.num_experts, self._together):
            numbers = range(first, min(first + self._together, unit.layout.num_experts))
            yield from _Group(self._rounder, unit, seen, numbers, part, self._floats).codes(wanted)

    def _rounded_sources(self, path: str) -> list[MatrixSource]:
        """Those of the matrices of a module that are rounded."""
        sources = self._target.sources(path)
        return [one for one in sources if isinstance(one, MatrixSource) and one.made is not None]


@dataclass(frozen=True)
class _Group:
    """Some experts of a layer, which are rounded side by side."""

    rounder: Rounder
    unit: LayerFile
    seen: SeenLayer
    numbers: Sequence[int]
    part: Experts
    weights: CheckpointWeights

    def codes(self, wanted: Sequence[int]) -> Iterator[tuple[str, mx.array]]:
        """The codes of the projections with these indices, by name."""
        experts = [self.weights.expert(self.unit.layer, number, mx.float32) for number in self.numbers]
        rows = [self.seen.rows(number) for number in self.numbers]
        dtype, last = DTYPES[self.unit.geometry.dtype], len(self.unit.geometry.projections) - 1
        inputs = mx.stack([self._blended(one, self.seen.input) for one in rows])
        made: dict[int, Codes] = {}
        if first := [index for index in wanted if index < last]:  # rows of one matrix: they have the same inputs
            stacked = [mx.concatenate([expert.matrices[index] for index in first]) for expert in experts]
            codes = self._rounded(first[0], mx.stack(stacked), inputs, dtype)
            split = [mx.split(part, len(first), axis=1) for part in codes]
            made = {index: tuple(part[i] for part in split) for i, index in enumerate(first)}
        if last in wanted:
            downs, means = [], []
            for i, (expert, own) in enumerate(zip(experts, rows, strict=True)):
                matrices = list(expert.matrices)
                for index, codes in made.items():
                    quant = self.unit.geometry.projections[index].quant
                    matrices[index] = unpacked_float32(quant, *(part[i] for part in codes), *tables(quant))
                down, mean = self._of_down(expert, FloatExpert(tuple(matrices), expert.biases), own)
                downs.append(down)
                means.append(mean)
            made[last] = self._rounded(last, mx.stack(downs), mx.stack(means), dtype)
        mx.eval([part for codes in made.values() for part in codes])
        for index, codes in made.items():
            for i, number in enumerate(self.numbers):
                path = self.unit.path(number, index)
                yield from ((f"{path}.{n}", part[i]) for n, part in enumerate(codes))

    def _rounded(self, index: int, values: mx.array, moments: mx.array, dtype: mx.Dtype) -> Codes:
        return self.rounder.rounded(values, self.unit.geometry.projections[index].quant, moments, dtype)

    def _of_down(self, expert: FloatExpert, changed: FloatExpert, rows: ExpertInputs) -> tuple[mx.array, mx.array]:
        """The down projection W to be rounded, and the mean moments of its inputs.

        Its inputs b are what the rounded gate and up give, which differ from those of the floats, a. With GPTQ's H of
        b, W + W (mean of (a - b) b^T) H^-1 has the products nearest to W a.
        """
        x, act = rows_of(rows.x), self.part.activation
        given = ExpertInputs(changed.activations(x, act), rows.weights)
        mean, down = self._blended(given, self.seen.down), expert.matrices[-1]
        if not self.rounder.products:
            return down, mean
        off = np.array(expert.activations(x, act) - given.x) * _shares(rows.weights, mean.shape[-1])[0][:, None]
        products = down @ mx.array(off.T @ np.array(given.x))
        hessian = damped(mean, self.rounder.damping)
        return down + mx.linalg.solve(hessian, products.T, stream=mx.cpu).T, mean

    def _blended(self, rows: ExpertInputs, of_all: Sums | None) -> mx.array:
        """The mean moments of a matrix's inputs."""
        assert of_all is not None
        x = rows_of(rows.x)
        shares, rest = _shares(rows.weights, x.shape[1])
        return mx.array(moments(weighted(x, shares), self.seen.products) + of_all.mean * rest)


def _shares(weights: np.ndarray, columns: int) -> tuple[np.ndarray, np.float32]:
    """How much an expert's rows count, float32 [N], and what all experts' mean row counts; together 1.

    Rows count by their routing weights, and as if there were as many more rows of all experts as the matrix has
    columns. Rows of different weights w count as fewer ones, (sum w)^2 / sum w^2.
    """
    weight, squares = weights.sum(dtype=np.float64), np.square(weights).sum(dtype=np.float64)
    share = weight**2 / (weight**2 + columns * squares) if weight else 0.0
    return weights * np.float32(share / (weight or 1)), np.float32(1 - share)

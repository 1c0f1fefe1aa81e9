"""How much each stored form of the routed experts would change what their layer gives, measured on texts.

The errors of layer 3 are in `errors-00003.json`: by part of the recipe and form, the sum over the texts' tokens of the
squared change of the experts' output, over the sum of the squared hidden states behind the layer.

`spend` chooses bits within a budget: where they lessen the error most for their bytes.
"""

import heapq
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import mlx.core as mx
import numpy as np

from ..errors import ConfigError
from ..files import JsonObject, read_json
from ..kinds import Experts
from ..ops.forms import unpacked_float32
from ..packing.recipe import EXPERT_PARTS
from ..quant import Quant
from ..rounding.methods import FIT, rounded
from .layers import LayerRun, Report
from .seen import SeenLayer, rows_at, write_json
from .weights import CheckpointWeights, FloatExpert

# The forms that are compared. Wider groups are of use where bits are few.
FORMS = (Quant(2, 128), Quant(2, 64), Quant(3, 128), Quant(3, 64), Quant(4, 64), Quant(5, 64), Quant(6, 64))
SAMPLE = 128  # rows of an expert whose outputs are compared


@dataclass(frozen=True)
class Option:
    """One way to store a part of a layer's routed experts: its form, the bytes, and the relative squared error."""

    quant: Quant
    nbytes: int
    error: float


def errors_path(folder: Path, layer: int) -> Path:
    return folder / f"errors-{layer:05d}.json"


class MeasuringRun(LayerRun):
    """A run in floats that measures the forms `FORMS` of the routed experts, each part alone."""

    _squares = 0.0

    def _pass(self, layer: int, progress: Report) -> None:
        made, self._squares = self._layer(layer, self.weights), 0.0
        seen = SeenLayer(layer, made, products=False)
        with self._tables(layer) as tables:
            rows = self._outputs(layer, made, tables, seen, progress)
            self._keep(layer, self._measured(layer, rows, seen))

    def _measured(self, layer: int, rows: Iterator[mx.array], seen: SeenLayer) -> Iterator[mx.array]:
        """Yields the rows; the layer's file is complete before the last of them is taken."""
        for row in rows:
            self._squares += float(np.array(mx.square(row.astype(mx.float32)).sum()))
            yield row
        if seen.input is not None:
            sums = self._sums(layer, seen)
            content = {part: {key: one / self._squares for key, one in errors.items()} for part, errors in sums.items()}
            write_json(errors_path(self.folder, layer), content)

    def _sums(self, layer: int, seen: SeenLayer) -> Mapping[str, Mapping[str, float]]:
        """The squared errors by part and form."""
        assert isinstance(self.weights, CheckpointWeights)
        feed_forward = self.args.layers[layer].feed_forward
        assert isinstance(feed_forward, Experts)
        sums: dict[str, dict[str, float]] = {part: {} for part in EXPERT_PARTS}
        for number in range(self.weights.layout.num_experts):
            x, weights = seen.rows(number)
            if not len(weights):
                continue
            some = np.linspace(0, len(weights) - 1, min(SAMPLE, len(weights))).astype(np.int32)
            rows = mx.array(rows_at(x, some)).astype(mx.float32)
            factors = mx.array(weights[some])[:, None]
            expert = self.weights.expert(layer, number, mx.float32)
            share = len(weights) / len(some)
            for part, key, error in _of_expert(expert, rows, factors, feed_forward):
                sums[part][key] = sums[part].get(key, 0.0) + error * share
        return sums


def _of_expert(
    expert: FloatExpert, x: mx.array, factors: mx.array, feed_forward: Experts
) -> Iterator[tuple[str, str, float]]:
    """Part, form, and squared error of an expert's weighted outputs for rows x."""
    activations = expert.activations(x, feed_forward.activation)
    wanted, last = expert.down(activations), len(expert.matrices) - 1
    seen = [mx.square(rows).mean(0) for rows in (x, activations)]
    for quant in FORMS:
        for part, indices, inputs in ((EXPERT_PARTS[0], range(last), seen[0]), (EXPERT_PARTS[1], [last], seen[1])):
            if inputs.size % quant.group_size:
                continue
            matrices = list(expert.matrices)
            for index in indices:
                matrices[index] = unpacked_float32(quant, *rounded(matrices[index], quant, FIT, inputs))
            changed = FloatExpert(tuple(matrices), expert.biases)
            made = changed.down(
                activations if part == EXPERT_PARTS[1] else changed.activations(x, feed_forward.activation)
            )
            yield part, key_of(quant), float(np.array(mx.square((made - wanted) * factors).sum()))


def key_of(quant: Quant) -> str:
    """A form's name in a file."""
    return f"{quant.bits}/{quant.group_size}"


def read_options(
    folder: Path, layers: Sequence[int], weights: Mapping[str, int]
) -> dict[tuple[int, str], list[Option]]:
    """The options for each layer and part, by what a finished `MeasuringRun` has written.

    Args:
        weights: the number of weights of each part in a layer.
    """
    options: dict[tuple[int, str], list[Option]] = {}
    for layer in layers:
        content: JsonObject = read_json(errors_path(folder, layer))
        for part, errors in content.items():
            own = [(quant, errors[key_of(quant)]) for quant in FORMS if key_of(quant) in errors]
            options[layer, part] = [Option(quant, bytes_of(quant, weights[part]), error) for quant, error in own]
    return options


def bytes_of(quant: Quant, weights: int) -> int:
    """The bytes of so many weights, with bfloat16 scales and biases."""
    return weights * quant.bits // 8 + weights // quant.group_size * 4


Where = TypeVar("Where")


def spend(options: Mapping[Where, Sequence[Option]], budget: int) -> dict[Where, Option]:
    """Chooses an option for each key, so that the sum of errors is small and that of bytes is at most `budget`.

    It begins with the smallest options and takes the steps along each key's lower convex hull in the order of error
    saved per byte, as far as they fit. That is the least sum of errors but for the last steps.

    Raises:
        ConfigError: the smallest options take more.
    """
    hulls = {key: hull(given) for key, given in options.items()}
    chosen = {key: 0 for key in hulls}
    left = budget - sum(one[0].nbytes for one in hulls.values())
    if left < 0:
        raise ConfigError(
            f"the smallest forms of the routed experts take {budget - left:,} bytes; the budget is {budget:,}"
        )
    order = {key: number for number, key in enumerate(hulls)}  # keys need not compare
    steps = [(-_gain(one, 0), order[key], key) for key, one in hulls.items() if len(one) > 1]
    heapq.heapify(steps)
    while steps:
        _, number, key = heapq.heappop(steps)
        at, one = chosen[key], hulls[key]
        price = one[at + 1].nbytes - one[at].nbytes
        if price > left:
            continue  # another key's step may be smaller
        left, chosen[key] = left - price, at + 1
        if at + 2 < len(one):
            heapq.heappush(steps, (-_gain(one, at + 1), number, key))
    return {key: hulls[key][at] for key, at in chosen.items()}


def hull(options: Sequence[Option]) -> list[Option]:
    """The options of the lower convex hull, by size: each saves less error per byte than the one before."""
    kept: list[Option] = []
    for one in sorted(options, key=lambda option: (option.nbytes, option.error)):
        if kept and one.error >= kept[-1].error:
            continue
        while len(kept) > 1 and _between(kept[-1], one) >= _between(kept[-2], kept[-1]):
            kept.pop()
        kept.append(one)
    return kept


def _between(one: Option, other: Option) -> float:
    """The error that the larger option saves for each of its additional bytes."""
    return (one.error - other.error) / (other.nbytes - one.nbytes)


def _gain(options: Sequence[Option], at: int) -> float:
    return _between(options[at], options[at + 1])

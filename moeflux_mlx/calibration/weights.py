"""The weights of a model directory, one layer or one expert at a time and in floats: of a checkpoint in any stored
form, or of a packed model. Opening reads headers only.

Computes the routed experts of a layer in floats, one after the other, each over all rows that chose it.
"""

from dataclasses import dataclass, replace

import mlx.core as mx
import numpy as np

from ..errors import NotPackedError
from ..experts.routing import Pieces, Routing, finished
from ..experts.source import IoMode
from ..experts.whole import WholeExperts
from ..formats.checkpoint import Checkpoint, check_folders, open_checkpoint, read_bytes
from ..formats.packed import open_packed
from ..formats.record import BIAS
from ..formats.tables import open_tables
from ..kinds import Activation, Experts
from ..model.weights import read_resident
from ..ops.backend import AnyArray, Array, as_dtype, library_of, of_kind
from ..ops.dequantize import dense, linear_biases
from ..ops.elementwise import activate, float32, plus
from ..ops.experts import Shared
from ..ops.forms import unpacked_float32
from ..ops.linear import linear
from ..ops.matrix import Part
from ..ops.records import Records
from ..packing.layer_files import LayerFile
from ..packing.located import Located
from ..packing.matrix import Forms, Wanted
from ..packing.plan import ConversionPlan, make_plan, read_args
from ..packing.sources import Source, read_all
from ..spec import ModelArgs
from .seen import SeenLayer


@dataclass(frozen=True)
class FloatExpert:
    """One routed expert in floats.

    Args:
        matrices: of gate, if it has one, up [I, H] and down [H, I].
        biases: what each product adds, [rows]; empty: nothing.
    """

    matrices: tuple[mx.array, ...]
    biases: tuple[mx.array, ...]

    def activations(self, x: Array, activation: Activation) -> Array:
        """The input [N, I] of down for rows x [N, H], as an array of x's kind."""
        made = [self._product(x, i) for i in range(len(self.matrices) - 1)]
        return activate(made[0], made[-1], activation)

    def down(self, activations: Array) -> Array:
        """[N, H] of the result of `activations`."""
        return self._product(activations, len(self.matrices) - 1)

    def _product(self, x: Array, index: int) -> Array:
        product = linear(x, Part(None, self.matrices[index]))
        return plus(product, self.biases[index]) if self.biases else product


def open_layers(located: Located, without_correction_bias: bool = False) -> "LayerWeights":
    """The weights of a packed model, or of a checkpoint in any form that `convert` reads.

    Args:
        without_correction_bias: as for `load`.

    Raises:
        ConfigError, ModelFileError: a file is missing or wrong, or uses a feature that is not implemented.
    """
    if not located.is_packed:
        checkpoint = open_checkpoint(located.path, located.shards_in)
        return CheckpointWeights(checkpoint, read_args(checkpoint), without_correction_bias)
    check_folders(located.shards_in)  # which a packed model does not read
    return PackedWeights(located)


class PlannedWeights:
    """The resident tensors of a checkpoint as a conversion's plan stores them.

    Attributes:
        units: the experts of each layer, by layer.
    """

    def __init__(self, args: ModelArgs, plan: ConversionPlan):
        self.args, self._sources = plan.stored(args), plan.sources
        self.units = {unit.layer: unit for unit in plan.units if isinstance(unit, LayerFile)}
        self.names = frozenset(one.name for source in self._sources for one in source.written)
        self.layout, self.tables = plan.layout, {table.layer: table.in_place() for table in plan.tables}

    def sources(self, path: str) -> list[Source]:
        """Those of the tensors of the module `path`."""
        return [source for source in self._sources if source.written[0].name.startswith(f"{path}.")]

    def resident_bytes(self, path: str) -> int:
        """Bytes of the tensors of the module `path`."""
        return sum(one.nbytes for source in self.sources(path) for one in source.written)

    def resident(self, path: str) -> dict[str, mx.array]:
        return read_all(self.sources(path))


class CheckpointWeights(PlannedWeights):
    """`LayerWeights` of a checkpoint; floats stay as they are stored."""

    def __init__(self, checkpoint: Checkpoint, args: ModelArgs, without_correction_bias: bool = False):
        """`args`: the checkpoint's."""
        if checkpoint.packed is not None:
            raise NotPackedError(
                f"{checkpoint.packed} holds another tool's packed experts; convert it first, and give the result"
            )
        self.without_correction_bias = without_correction_bias
        wanted = Wanted.of(Forms(requantize=True, without_correction_bias=without_correction_bias))
        super().__init__(args, make_plan(checkpoint, args, replace(wanted, keeps_floats=True)))

    def expert(self, layer: int, expert: int, dtype: mx.Dtype) -> FloatExpert:
        parts = [part.values(dtype) for part in self.units[layer].experts.parts(expert)]
        return FloatExpert(tuple(rows for rows, _ in parts), tuple(bias for _, bias in parts if bias is not None))


class RoundedWeights(PlannedWeights):
    """`LayerWeights` of a checkpoint as a conversion stores it."""

    def expert(self, layer: int, expert: int, dtype: mx.Dtype) -> FloatExpert:
        unit, matrices, biases = self.units[layer], [], []
        for index, projection in enumerate(unit.geometry.projections):
            arrays = unit.arrays(expert, index)
            codes = (arrays[part] for part in projection.quant.parts)
            matrices.append(unpacked_float32(projection.quant, *codes).astype(dtype))
            biases += [arrays[BIAS].astype(dtype)] if BIAS in arrays else []
        return FloatExpert(tuple(matrices), tuple(biases))


class PackedWeights:
    """`LayerWeights` of a packed model; experts are dequantised."""

    def __init__(self, located: Located):
        path = self._path = located.path
        self.args = located.args
        self._files = open_packed(path, self.args)
        self.names = frozenset(read_resident(path))
        self.layout, self.tables = self._files.layout, open_tables(path, self.args)

    def resident(self, path: str) -> dict[str, mx.array]:
        return {name: tensor for name, tensor in read_resident(self._path).items() if name.startswith(f"{path}.")}

    def expert(self, layer: int, expert: int, dtype: mx.Dtype) -> FloatExpert:
        record, blob = self.layout.records[layer], bytearray(self.layout.records[layer].stride)
        for piece in self._files.pieces(layer, expert):
            blob[piece.place : piece.place + piece.length] = read_bytes(piece.path, piece.offset, piece.length)
        records, alone = Records(mx.array(np.frombuffer(blob, np.uint32)[None]), record), np.zeros(1, np.int32)
        parts = zip(record.projections, dense(records, alone, mx.float32), strict=True)
        matrices = tuple(unpacked_float32(one.quant, *part)[0].astype(dtype) for one, part in parts)
        return FloatExpert(matrices, tuple(bias[0] for bias in linear_biases(records, alone, dtype) or ()))


# The weights of a model, read when they are needed: `resident` are the tensors of a module path, `expert` is one expert
# in a dtype; `args.quantization` is that of the resident tensors, whose `names` are known before they are read.
LayerWeights = CheckpointWeights | RoundedWeights | PackedWeights


ROWS_AT_ONCE = 16384  # rows of an expert in one product; limits temporary memory for any distribution of rows


class NoRecords(WholeExperts):
    """A source without records, for modules that ask the source for nothing else."""

    mode = IoMode.RESIDENT


class OneByOne:
    """Implements `routing.RoutedExpertsCall` with one expert in memory at a time.

    Sums are float32, in the order of the experts' numbers.

    Args:
        weights: where the experts are.
        dtype: in which experts are multiplied.

    Attributes:
        observer: sees the rows, those of an expert in parts; None: nobody does.
    """

    def __init__(self, weights: LayerWeights, dtype: mx.Dtype):
        self.source = NoRecords(weights.layout, "experts are read one by one")
        self._weights, self._dtype = weights, dtype
        self.observer: SeenLayer | None = None

    def wants_guess(self, layer: int, tokens: int) -> bool:
        return False

    def expect(self, layer: int, tokens: int) -> None:
        """Does nothing: each expert is read when it is computed."""

    def __call__(self, routing: Routing, x: Array, residual: Array, shared: Array | Shared | None) -> Array:
        return finished(self.in_pieces(routing, x, residual, shared))

    def in_pieces(self, routing: Routing, x: Array, residual: Array, shared: Array | Shared | None) -> Pieces[Array]:
        ids, weights = np.array(routing.ids), np.array(routing.weights, np.float32)
        rows = as_dtype(x, self._dtype)
        added = shared.rows(x) if isinstance(shared, Shared) else shared
        out = _zeros(rows, (len(rows), residual.shape[-1]))
        used = np.unique(ids)
        if self.observer is not None:
            self.observer.observe_input(rows, ids, weights)
        for done, expert in enumerate(used.tolist()):
            out = self._added(out, routing.layer, expert, rows, np.where(ids == expert, weights, 0), ids == expert)
            yield (done + 1) / len(used)
        for part in (residual, added):
            if part is not None:
                out = out + float32(part.reshape(out.shape))
        made = out.reshape(residual.shape)
        return made.astype(residual.dtype)

    def _added(
        self, out: AnyArray, layer: int, expert: int, x: Array, weights: np.ndarray, chosen: np.ndarray
    ) -> AnyArray:
        """`out` [T, H] plus the expert's output for the rows that chose it, times their weights [T, K]."""
        loaded = self._weights.expert(layer, expert, self._dtype)
        part = self._weights.args.layers[layer].feed_forward
        assert isinstance(part, Experts)
        tokens, factors = np.flatnonzero(chosen.any(axis=1)), weights.sum(axis=1)
        for start in range(0, len(tokens), ROWS_AT_ONCE):
            some = tokens[start : start + ROWS_AT_ONCE]
            where = of_kind(some.astype(np.int32), x)
            rows = x[where]
            act = loaded.activations(rows, part.activation)
            if self.observer is not None:
                self.observer.observe_expert(act, factors[some])
            made = float32(loaded.down(act))
            if isinstance(made, np.ndarray):
                out[where] += made * factors[some, None]
                continue
            out = out.at[where].add(made * mx.array(factors[some, None]))
            mx.eval(out)
        return out


def _zeros(like: Array, shape: tuple[int, int]) -> Array:
    """float32, of the same kind of array as `like`."""
    library = library_of(like)
    return library.zeros(shape, library.float32)

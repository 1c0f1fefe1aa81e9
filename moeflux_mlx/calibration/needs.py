"""What a calibrated conversion takes, before it begins."""

from dataclasses import dataclass

import mlx.core as mx

from ..errors import ConfigError
from ..files import shown_gb
from ..formats.checkpoint import ITEM_BYTES
from ..packing.plan import ConversionPlan
from ..packing.sources import MatrixSource
from ..rounding.gptq import CHUNK_VALUES
from .layers import ROWS_AT_ONCE
from .rounding import GPTQ, HEAD
from .weights import CheckpointWeights, PlannedWeights, RoundedWeights

WORKING_BYTES = 1 << 30  # of the experts that are rounded side by side, if no limit says otherwise
# float32 copies while GPTQ rounds: of a matrix, of which large ones are rounded some rows at a time, and of its Hessian
MATRICES, SQUARES = 9, 5


@dataclass(frozen=True)
class Needs:
    """What a calibration takes.

    Args:
        tokens: of the text.
        memory: an estimate, in bytes.
        disk: in bytes, at most, with the model that is written, beside which the codes lie until it is whole.
        together: routed experts that are rounded side by side.
        factorisations: of Hessians, on the CPU; 0 without GPTQ.
        columns: of the largest of these.
    """

    tokens: int
    memory: int
    disk: int
    together: int
    factorisations: int
    columns: int

    def __str__(self) -> str:
        """A line such as "calibrating for 16,384 tokens: about 2.1 GB of memory, 3.4 GB of disk"."""
        sizes = f"about {shown_gb(self.memory)} of memory, {shown_gb(self.disk)} of disk"
        more = f", {self.factorisations:,} factorisations of up to {self.columns:,} columns"
        line = f"calibrating for {self.tokens:,} tokens: {sizes}{more if self.factorisations else ''}"
        return f"{line}; {self.together} experts side by side"


def needs_of(
    weights: CheckpointWeights, plan: ConversionPlan, tokens: int, method: str, dtype: mx.Dtype, limit: int | None
) -> Needs:
    """The needs of a run that rounds: in memory are the hidden states, a layer's dense weights and Hessians, and what
    is made of the experts that are rounded side by side, or of the largest dense matrix; on the disk the hidden states
    twice, the codes, and the model.

    Args:
        limit: bytes of memory that it may take, by which the number of experts side by side is chosen; None: 1 GiB for
            these.

    Raises:
        ConfigError: the limit is too small for a single expert, or for a dense matrix.
    """
    args, target, squares = weights.args, RoundedWeights(weights.args, plan), method == GPTQ
    paths = [f"model.layers.{i}" for i in range(args.num_hidden_layers)]
    row = args.hidden_size * (args.connections.streams if args.connections else 1)
    experts = [
        one for unit in target.units.values() for i, one in enumerate(unit.geometry.projections) if unit.is_rounded(i)
    ]
    dense = [one for path in (*paths, HEAD) for one in _matrices(target, path) if one.made is not None]
    columns = squares * max((one.columns for one in experts), default=0)
    weights_of = [sum(one.rows * one.columns for one in record.projections) for record in plan.layout.records.values()]
    each = (4 * max(weights_of, default=0) + _rounding_bytes(_largest(target), columns)) if experts else 0
    alone = max((_working_bytes(one, squares) for one in dense), default=0)
    layer = max(map(weights.resident_bytes, paths), default=0)
    sums = squares * max((_squares(weights, path) for path in paths), default=0)
    hidden = tokens * row * dtype.size
    fixed = 2 * hidden + 8 * min(tokens, ROWS_AT_ONCE) * row + 2 * layer + 4 * (sums + 2 * columns**2)
    least = fixed + max(each, alone)
    if limit is not None and limit < least:
        raise ConfigError(
            f"calibration for {tokens:,} tokens takes at least {least / 1e9:.2f} GB of memory; the limit is "
            f"{limit / 1e9:.2f} GB; give more, or fewer --calibrate-tokens"
        )
    together = (WORKING_BYTES if limit is None else limit - fixed) // max(each, 1)
    together = max(1, min(together, args.num_experts))
    codes = sum(tensor.nbytes for one in dense for tensor in one.written)
    codes += sum(field.size for one in experts for field in one.codes) * args.num_experts
    memory, disk = fixed + max(together * each, alone), 2 * hidden + codes + plan.total_bytes
    count = squares * (len(dense) + 2 * args.num_experts * len(args.moe_layers))
    return Needs(
        tokens, memory, disk, together, count, squares * max([columns, *(one.matrix.shape[-1] for one in dense)])
    )


def _matrices(weights: PlannedWeights, path: str) -> list[MatrixSource]:
    """Those of a module."""
    return [one for one in weights.sources(path) if isinstance(one, MatrixSource) and len(one.matrix.shape) == 2]


def _squares(weights: PlannedWeights, path: str) -> int:
    """Values of the Hessians of a layer's dense matrices, at most: some matrices share one."""
    return sum(one.matrix.shape[-1] ** 2 for one in _matrices(weights, path))


def _working_bytes(source: MatrixSource, squares: bool) -> int:
    """What the rounding of a dense matrix takes: its values, its codes twice, and the copies that GPTQ makes."""
    matrix = source.matrix
    rows, columns = matrix.shape
    item = ITEM_BYTES[matrix.weight.dtype] if matrix.quant is None and matrix.inverse is None else 4
    kept = rows * columns * item + 2 * sum(one.nbytes for one in source.written)
    return kept + squares * (4 * columns**2 + _rounding_bytes(rows * columns, columns))


def _rounding_bytes(values: int, columns: int) -> int:
    """What GPTQ makes for a matrix of so many values."""
    return 4 * (MATRICES * min(values, CHUNK_VALUES) + SQUARES * columns**2)


def _largest(target: RoundedWeights) -> int:
    """Values of an expert's largest matrix; gate and up are rounded as one, because they have the same inputs."""
    sizes = [[one.rows * one.columns for one in unit.geometry.projections] for unit in target.units.values()]
    return max((max(sum(first), down) for *first, down in sizes), default=0)

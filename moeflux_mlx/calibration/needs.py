"""What a calibrated conversion takes, before it begins."""

from dataclasses import dataclass

import mlx.core as mx

from ..errors import ConfigError
from ..packing.plan import ConversionPlan
from .layers import ROWS_AT_ONCE
from .rounding import GPTQ
from .weights import CheckpointWeights

WORKING_BYTES = 1 << 30  # of the experts that are rounded side by side, if no limit says otherwise
MATRICES, SQUARES = 9, 5  # float32 copies of an expert's largest matrix, and of its Hessian, while it is rounded
DENSE = 5  # Hessians of a layer besides those of its experts: of queries, outputs, router, experts' inputs and downs


@dataclass(frozen=True)
class Needs:
    """What a calibration takes.

    Args:
        tokens: of the text.
        memory: an estimate, in bytes.
        disk: in bytes, at most, with the model that is written.
        together: routed experts that are rounded side by side.
        factorisations: of their Hessians, on the CPU; 0 without GPTQ.
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
        sizes = f"about {self.memory / 1e9:.1f} GB of memory, {self.disk / 1e9:.1f} GB of disk"
        more = f", {self.factorisations:,} factorisations of up to {self.columns:,} columns"
        line = f"calibrating for {self.tokens:,} tokens: {sizes}{more if self.factorisations else ''}"
        return f"{line}; {self.together} experts side by side"


def needs_of(
    weights: CheckpointWeights, plan: ConversionPlan, tokens: int, method: str, dtype: mx.Dtype, limit: int | None
) -> Needs:
    """The needs of a run that rounds: in memory are the hidden states, a layer's dense weights and Hessians, and what
    is made of the experts that are rounded side by side; on the disk the hidden states twice, and the codes.

    Args:
        limit: bytes of memory that it may take, by which the number of experts side by side is chosen; None: 1 GiB for
            these.

    Raises:
        ConfigError: the limit is too small for a single expert.
    """
    args, resident = weights.args, weights.resident_bytes
    row = args.hidden_size * (args.connections.streams if args.connections else 1)
    projections = [one for record in weights.layout.records.values() for one in record.projections]
    largest = max((one.rows * one.columns for one in projections), default=0)
    columns = max((one.columns for one in projections), default=0) if method == GPTQ else 0
    each = 4 * (MATRICES * largest + SQUARES * columns**2)
    layer = max((resident(f"model.layers.{i}") for i in range(args.num_hidden_layers)), default=0)
    hidden = tokens * row * dtype.size
    fixed = 2 * hidden + 8 * min(tokens, ROWS_AT_ONCE) * row + 2 * layer + DENSE * 4 * columns**2
    together = (WORKING_BYTES if limit is None else limit - fixed) // max(each, 1)
    if limit is not None and together < 1:
        raise ConfigError(
            f"calibration for {tokens:,} tokens takes at least {(fixed + each) / 1e9:.2f} GB of memory; the limit is "
            f"{limit / 1e9:.2f} GB; give more, or fewer --calibrate-tokens"
        )
    together = max(1, min(together, args.num_experts))
    count = 2 * args.num_experts * len(args.moe_layers) if method == GPTQ else 0
    return Needs(tokens, fixed + together * each, 2 * hidden + plan.total_bytes, together, count, columns)

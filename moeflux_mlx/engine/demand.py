"""A user's demand for memory: all settings that determine how much a model needs."""

from dataclasses import dataclass, replace

import mlx.core as mx

from ..errors import RequestError
from ..experts.tables import KEPT_BYTES
from ..ops.backend import computes_natively
from ..spec import ModelArgs
from ..vision.vision import NoVision, VisionFiles


@dataclass(frozen=True)
class Demand:
    """What a user asks for: everything that decides how much memory is needed.

    Args:
        resident: bytes of all weights that are not routed experts, as they are kept in memory, of a draft head, and of
            the newest rows of tables of n-grams.
        context: positions that the caches hold at most; None: 8192, or less if there is no room.
        itemsize: bytes of one activation or cache entry.
        span: prompt tokens that go through the model together; None: as many as there is room for.
        prefill_step_size: of a span, tokens that a mixer handles at once, at most; None: as many as there is room for.
        native: the CPU's native kernels compute, which read packed records where they are and keep no scores.
        expert_io: forces a mode; None or "auto" decides.
        expert_cache_bytes: forces the pool's size.
        best_pool: the size from which on a larger pool is no faster, where that was measured.
        drafts: rows that a step may have to take back, besides its first.
        head: of `resident`, what a draft head takes, with its experts.
        encoding: bytes that encoding an image takes at once, before the model computes.
        in_place: experts lie in pieces in a checkpoint, or in several directories, so that files cannot be mapped.
    """

    resident: int
    context: int | None = None
    itemsize: int = 4
    span: int | None = None
    prefill_step_size: int | None = None
    native: bool = False
    expert_io: str | None = None
    expert_cache_bytes: int | None = None
    in_place: bool = False
    best_pool: int | None = None
    drafts: int = 0
    head: int = 0
    encoding: int = 0

    def with_vision(self, vision: VisionFiles | NoVision, dtype: mx.Dtype, rows: int) -> "Demand":
        """What is needed together with an image encoder in `dtype`, for images of at most so many rows."""
        if isinstance(vision, NoVision):
            return self
        resident = self.resident + vision.nbytes(dtype)
        return replace(self, resident=resident, encoding=vision.work_bytes(dtype, rows))

    @property
    def forced(self) -> bool:
        return self.expert_io not in (None, "auto")


def demand_of(
    args: ModelArgs,
    resident: int,
    dtype: mx.Dtype,
    *,
    context: int | None = None,
    span: int | None = None,
    prefill_step_size: int | None = None,
    expert_io: str = "auto",
    expert_cache_bytes: int | None = None,
    in_place: bool = False,
) -> Demand:
    """What running a model with activations in `dtype` needs; None means what the plan finds best. `resident`: bytes of
    its resident tensors.

    Raises:
        RequestError: a number of tokens or bytes is none, or the context is longer than the model's.
    """
    asked = {"context": context, "span": span, "prefill_step_size": prefill_step_size}
    for name, value in (*asked.items(), ("expert_cache_bytes", expert_cache_bytes)):
        if value is not None and (not isinstance(value, int) or value < 1):
            raise RequestError(f"{name} is {value!r}; it must be a positive integer, or None for what is best")
    limit = args.max_position_embeddings
    if context is not None and context > limit:
        raise RequestError(f"context is {context} and the model takes {limit} tokens; give at most {limit}")
    return Demand(
        resident=resident + len(args.ngrams) * KEPT_BYTES,
        context=context,
        itemsize=dtype.size,
        span=span,
        prefill_step_size=prefill_step_size,
        native=computes_natively(dtype, args.widths),
        expert_io=expert_io,
        expert_cache_bytes=expert_cache_bytes,
        in_place=in_place,
    )

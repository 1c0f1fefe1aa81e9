"""A user's demand for memory: all settings that determine how much a model needs."""

from dataclasses import dataclass, replace

import mlx.core as mx

from ..vision.vision import NoVision, VisionFiles


@dataclass(frozen=True)
class Demand:
    """A user's settings and what else determines how much memory a model needs.

    Args:
        resident: bytes in memory of all weights that are not routed experts, a draft head, and the newest rows of
            tables of n-grams.
        context: positions that the caches hold at most; None: 8192, or less if there is no room.
        itemsize: bytes of one activation or cache entry.
        span: prompt tokens that go through the model together; None: as many as there is room for.
        prefill_step_size: the most tokens of a span that a mixer handles at once; None: as many as there is room for.
        native: whether the CPU's native kernels compute; they read packed records in place and keep no scores.
        on_units: whether matrix units multiply a prompt's experts from their codes, if their form suits.
        dense: bytes of the largest layer's matrices, without routed experts, if prompts dequantise them; else 0.
        expert_io: forces a mode; None or "auto" lets the plan decide.
        expert_cache_bytes: forces the pool's size.
        host_bytes: the most bytes of experts that stay in the host's memory, where that is not the device's; None: as
            many as have room.
        best_pool: the measured size above which a larger pool is no faster; None if it was not measured.
        drafts: number of rows after the first that a step may take back.
        head: the part of `resident` that a draft head and its experts take.
        encoding: temporary bytes of encoding an image, before the model computes.
        in_place: whether experts are pieces of a checkpoint or in several directories, so that files cannot be mapped.
        wired: what may lie in Metal's residency sets, one of `wired.MODES`.
        beside: the part of `resident` that is not the model's and may not be taken yet.
    """

    resident: int
    context: int | None = None
    itemsize: int = 4
    span: int | None = None
    prefill_step_size: int | None = None
    native: bool = False
    on_units: bool = False
    dense: int = 0
    expert_io: str | None = None
    expert_cache_bytes: int | None = None
    host_bytes: int | None = None
    in_place: bool = False
    best_pool: int | None = None
    drafts: int = 0
    head: int = 0
    encoding: int = 0
    wired: str = "pool"
    beside: int = 0

    def with_vision(self, vision: VisionFiles | NoVision, dtype: mx.Dtype, rows: int) -> "Demand":
        """The demand including an image encoder in `dtype`, for images of at most `rows` rows."""
        if isinstance(vision, NoVision):
            return self
        resident = self.resident + vision.nbytes(dtype)
        return replace(self, resident=resident, encoding=vision.work_bytes(dtype, rows))

    @property
    def forced(self) -> bool:
        return self.expert_io not in (None, "auto")

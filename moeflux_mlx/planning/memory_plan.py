"""The memory plan of a running model: what takes how many bytes, how prompts are cut, and how experts are read. A
`Demand` has all settings that determine how much a model needs.
"""

from dataclasses import dataclass, replace

import mlx.core as mx

from ..experts.source import IoMode
from ..model.span import PromptSizes
from ..vision.vision import NoVision, VisionFiles
from .expert_io import describe
from .machine import Figures, in_gb


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


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes of everything that is in memory while a model runs, how prompts are cut, and how experts are read.

    `context` is the requested one or the default, or less if there is no room. `runtime` is the memory of the process
    itself. `pool` is the size of the pool of experts while a prompt fills the whole context, `most` its size while
    nothing else needs the memory; both are 0 if all experts are in memory, mapped or read once. `reason` says why they
    cannot be. `host` is the size of the experts that stay in the host's memory, where that is another one.
    """

    mode: IoMode
    reason: str
    figures: Figures
    demand: Demand
    context: int
    longest: int
    sizes: PromptSizes
    experts: int
    state: int
    activations: int
    runtime: int
    pool: int
    most: int
    slots: int
    headroom: int
    host: int = 0

    @property
    def fixed(self) -> int:
        """Bytes of everything but the experts."""
        return self.demand.resident + self.state + self.activations + self.runtime

    @property
    def decision(self) -> str:
        """One line that says how experts are read, and why."""
        return describe(self.mode, self.experts, self.figures, self.demand.forced, self.reason, self.demand.in_place)

    @property
    def shortened(self) -> str:
        """A message if the context had to be shorter than the default, else an empty string."""
        if self.demand.context is not None or self.context == self.longest:
            return ""
        return f"note: memory is planned for a context of {self.context} tokens, not {self.longest}: there is no more"

    @property
    def enlarged(self) -> str:
        """A message if the requested pool is smaller than the smallest one, else an empty string."""
        asked = self.demand.expert_cache_bytes
        if asked is None or asked >= self.pool:
            return ""
        return f"an expert pool of {in_gb(asked, 3)} is too small; the smallest one is used, of {in_gb(self.pool, 3)}"

    @property
    def prompts(self) -> str:
        """One line that says how prompts are cut, and how many bytes a span reads at most."""
        return (
            f"prompts: spans of up to {self.sizes.span} tokens, in blocks of {self.sizes.block}; "
            f"a span reads each expert that it uses once, {in_gb(self.experts)} at most"
        )

    @property
    def total(self) -> int:
        """Expected peak memory of this process in bytes, without mapped files."""
        return max(self.fixed + self.pool, self.demand.resident + self.runtime + self.most) + self.copied

    @property
    def copied(self) -> int:
        """Bytes of experts if all of them are copied into this process's memory, else 0."""
        mapped = self.mode is IoMode.MMAP and self.figures.copies
        return self.experts if mapped or self.mode is IoMode.RESIDENT else 0

    @property
    def stays(self) -> bool:
        """Whether experts stay in memory once read."""
        mapped = self.mode is IoMode.MMAP and self.fixed + self.experts <= self.figures.memory
        return mapped or self.mode is IoMode.RESIDENT

    @property
    def wired(self) -> int | None:
        """Bytes that Metal may keep wired: everything that runs on the GPU, up to its recommended limit; None on other
        devices.
        """
        if self.figures.working_set is None:
            return None
        experts = self.pool if self.mode is IoMode.PREAD else self.experts
        return min(self.figures.working_set, self.demand.resident + self.state + self.activations + experts)

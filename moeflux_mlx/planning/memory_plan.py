"""The memory plan of a running model: what takes how many bytes, how prompts are cut, and how experts are read."""

from dataclasses import dataclass

from ..experts.source import IoMode
from ..model.span import PromptSizes
from .demand import Demand
from .expert_io import describe
from .machine import Figures, in_gb


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

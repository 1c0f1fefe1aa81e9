"""What several commands say of a memory plan: its lines, the bytes that a token reads, the figures of a machine, and
the speed of the disk. Nothing is loaded.
"""

import time
from collections import deque

import numpy as np

from ..errors import ExpertIOError
from ..experts.memory import page_aligned
from ..experts.reader import ExpertReader
from ..experts.reads import Read
from ..experts.source import IoMode
from ..formats.in_place import ExpertFiles
from ..formats.page_cache import drop_files
from ..formats.record import ExpertLayout
from ..planning.machine import Figures, in_gb, machine_figures
from ..planning.memory_plan import MemoryPlan
from ..spec import ModelArgs
from .options import gigabytes

ASSUMED_DISK = int(5e9)  # bytes per second where none is measured or given, about what drives of Macs read
FASTEST_DISK = 20e9  # bytes per second; no drive of 2026 reads more, and memory does
MEASURED_BYTES = 1 << 30
IN_FLIGHT = 16  # reads queued at once for each drive when it is measured


def figures(ram_gb: float | None, memory_gb: float | None = None) -> Figures:
    """The figures of this machine, or of one with `ram_gb` of memory, on a Mac with proportional GPU limits.
    `memory_gb`: limit of the whole process.
    """
    nbytes, own = gigabytes("--ram-gb", ram_gb), machine_figures(gigabytes("--memory-gb", memory_gb))
    if nbytes is None:
        return own
    limits = (own.working_set, own.buffer)
    working_set, buffer = (None if limit is None else limit * nbytes // own.memory for limit in limits)
    return Figures(nbytes, working_set, buffer, operations=own.operations, limit=own.limit)


def memory_lines(plan: MemoryPlan, layout: ExpertLayout) -> list[str]:
    demand, memory = plan.demand, plan.figures.memory
    rows = [
        ("resident weights", demand.resident - demand.head, ""),
        *([("draft head", demand.head, "")] if demand.head else []),
        ("state", plan.state, f"  for a context of {plan.context}"),
        ("temporary", plan.activations, f"  for prompts in spans of {plan.sizes.span}, blocks of {plan.sizes.block}"),
        ("runtime", plan.runtime, ""),
    ]
    if plan.mode is IoMode.PREAD:
        each = layout.num_experts + layout.num_values
        share = f"{plan.slots / len(layout.moe_layers):.1f} of {each} a layer"
        rows.append(("expert pool", plan.pool, f"  {plan.slots} slots, {share}"))
        kept = f"  {plan.host / plan.experts:.0%} of the experts, in the computer's memory, not in the GPU's"
        rows += [("on the host", plan.host, kept)] if plan.host else []
    else:
        rows.append(("experts", plan.experts, "" if plan.copied else "  mapped: in the system's cache of files"))
    total = memory_in_all(plan)
    rows += [("in all", total, ""), ("left", memory - total, f"  of {in_gb(memory, 3)} {plan.figures.name}")]
    lines = [plan.decision, *(f"{name:18} {in_gb(nbytes, 3):>11}{remark}" for name, nbytes, remark in rows)]
    if total > memory:
        lines.append(
            f"warning: {in_gb(total - memory, 3)} more than there is, so that mapped experts are read again and again; "
            "--expert-io pread keeps as many as fit, and a shorter --context leaves room for more"
        )
    return lines


def memory_in_all(plan: MemoryPlan) -> int:
    """Bytes that a model takes while it runs, mapped experts included."""
    return plan.total - plan.copied + (0 if plan.mode is IoMode.PREAD else plan.experts)


def reading_line(args: ModelArgs, layout: ExpertLayout, dense: int) -> str:
    """The line on what one token reads; `dense`: bytes of other weights than routed experts."""
    routed = in_gb(layout.token_bytes(args), 3)
    return f"a token reads {routed} of experts, from the disk or from memory, and {in_gb(dense, 3)} of other weights"


def measure_disk(files: ExpertFiles) -> float:
    """Bytes per second of reading different experts of all layers in random order, up to a gibibyte: of all drives
    that hold them together. What the system has of them in its cache is dropped first.

    Raises:
        ExpertIOError: a file cannot be opened, or was read faster than a disk can be.
    """
    drop_files(files.sizes)
    layout, reader = files.layout, ExpertReader(files)
    in_flight = IN_FLIGHT * reader.drives
    every = [(layer, expert) for layer in layout.records for expert in range(layout.count(layer))]
    count = max(min(MEASURED_BYTES // layout.held_bytes, len(every)), 1)
    memory, waiting, nbytes = page_aligned(in_flight, layout.held_bytes // 4), deque[Read](), 0
    start = time.perf_counter()
    for i, choice in enumerate(np.random.default_rng(0).permutation(len(every))[:count]):
        if len(waiting) == in_flight:  # the oldest read is the one that fills this row
            nbytes += waiting.popleft().result()
        layer, expert = every[choice]
        target = memoryview(memory[i % in_flight]).cast("B")
        waiting.append(reader.submit(reader.prepare(layer, expert, target)))
    nbytes += sum(read.result() for read in waiting)
    seconds = time.perf_counter() - start
    reader.close()
    return plausible(nbytes / seconds, reader.drives)


def plausible(rate: float, drives: int = 1) -> float:
    """The rate of reading from so many drives, if it can be theirs.

    Raises:
        ExpertIOError: it cannot.
    """
    if rate > FASTEST_DISK * drives:
        raise ExpertIOError(
            f"the files were read at {rate / 1e9:.1f} GB/s, from the cache and not from the disk (a drive reads at "
            f"most {FASTEST_DISK / 1e9:.0f}); empty the cache, on a Mac with `sudo purge`, and measure again"
        )
    return rate

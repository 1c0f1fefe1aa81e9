"""Divides the memory before anything is loaded: what stays resident, the size of the pool, and whether expert files are
mapped, read when experts are needed, or read once. A plan that cannot work is refused.

This is arithmetic on a configuration and a few figures; it opens no file and allocates nothing.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from ..errors import RequestError
from ..experts.shares import slots_within, taken
from ..experts.source import IoMode
from ..formats.record import ExpertLayout
from ..model.span import PromptSizes
from ..ops.gpu_time import block_size
from ..spec import ModelArgs
from .demand import Demand
from .expert_io import describe, reason_to_read, select_io_mode
from .machine import Figures, in_gb
from .needs import (
    BLOCK,
    HEADROOM_SHARE,
    KV_STEP,
    LEAST_HEADROOM,
    SMALL_MACHINE,
    activation_bytes,
    headroom_bytes,
    least_pool,
    least_slots,
    room,
    runtime_bytes,
    state_bytes,
)
from .settings import OPERATIONS, OWN, Gathered

EXPERTS_OF = {IoMode.MMAP: "mapped experts", IoMode.PREAD: "expert pool", IoMode.RESIDENT: "experts"}
DEFAULT_CONTEXT, LEAST_CONTEXT = 8192, 512
SPANS = tuple(512 << i for i in range(6, -1, -1))  # possible span lengths, 32768 to 512
LEAST_BLOCK = 64
# If a span is longer than this, or if the pool cannot get its memory back afterwards, it takes at most 1 / PROMPT_SHARE
# of the pool's bytes.
EASY_SPAN, PROMPT_SHARE = 8192, 4
LAYER_OPERATIONS = 5  # a layer takes more
WORD_BYTES = 4  # the records of a mapped layer are one array of uint32


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes of everything that is in memory while a model runs, how prompts are cut, and how experts are read.

    `context` is the requested one or the default, or less if there is no room. `runtime` is the memory of the process
    itself. `pool` is the size of the pool of experts while a prompt fills the whole context, `most` its size while
    nothing else needs the memory; both are 0 if all experts are in memory, mapped or read once. `reason` says why they
    cannot be.
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


def plan_memory(args: ModelArgs, layout: ExpertLayout, figures: Figures, demand: Demand) -> MemoryPlan:
    """Divides the memory among the parts of a running model.

    If it does not fit, the sizes that the user did not set are reduced in this order: the span, the block, the context.

    Raises:
        RequestError: the model does not fit, or a value is impossible; the message has the figures and the nearest
            settings that fit.
    """
    context, sizes = _cut_to_fit(args, layout, figures, demand)
    state = state_bytes(args, context, demand.itemsize)
    activations = activation_bytes(args, layout, demand, context, sizes)
    runtime = runtime_bytes(layout, demand)
    fixed = demand.resident + state + activations + runtime
    headroom = headroom_bytes(figures.memory)
    reason = _reads(layout, figures, demand, fixed)
    mode = _mode(layout, figures, demand, reason)
    pool = most = 0
    if mode is IoMode.PREAD:
        pool = most = _pool_bytes(args, layout, room(figures) - fixed, demand)
        if demand.expert_cache_bytes is None and figures.breathes:
            most = _pool_bytes(args, layout, room(figures) - demand.resident - runtime, demand)
    if fixed + max(pool, _least(args, layout, figures, mode)) > room(figures):
        raise RequestError(_refusal(args, layout, figures, demand, mode, context, state, fixed))
    slots = slots_within(layout, pool, least_slots(args)) if pool else 0
    return MemoryPlan(
        mode, reason, figures, demand, context, default_context(args), sizes, layout.total_bytes, state, activations,
        runtime, pool, most, slots, headroom,
    )  # fmt: skip


def longest_context(
    args: ModelArgs, layout: ExpertLayout, figures: Figures, demand: Demand, share: float, least: int = 0
) -> int:
    """The longest context with which the pool of experts keeps `share` of its size at the default context.

    The candidates are the model's limit and its halves; the I/O mode must stay the same. The result is at least
    `least`, even if the pool then gets smaller.

    Raises:
        RequestError: not even the default fits.
    """
    base = plan_memory(args, layout, figures, demand)
    context = args.max_position_embeddings
    while context > max(base.context, least):
        try:
            plan = plan_memory(args, layout, figures, replace(demand, context=context))
        except RequestError:
            context //= 2
            continue
        if plan.mode is base.mode and plan.pool >= share * base.pool:
            return context
        context //= 2
    return max(base.context, least)


def _mode(layout: ExpertLayout, figures: Figures, demand: Demand, reason: str) -> IoMode:
    """The requested mode, or the fastest that `reason` allows."""
    mode = IoMode.PREAD if reason else IoMode.RESIDENT if demand.in_place else IoMode.MMAP
    if demand.forced:
        mode = select_io_mode(layout.total_bytes, figures.memory, demand.expert_io)
    if mode is not IoMode.PREAD and figures.buffer is not None and layout.largest_layer > figures.buffer:
        raise RequestError(
            f"experts cannot be {'mapped' if mode is IoMode.MMAP else 'resident'}: a layer of "
            f"{in_gb(layout.largest_layer)} exceeds Metal's max_buffer_length, {in_gb(figures.buffer)}; "
            "give --expert-io auto or pread"
        )
    return mode


def _cut_to_fit(args: ModelArgs, layout: ExpertLayout, figures: Figures, demand: Demand) -> tuple[int, PromptSizes]:
    """Chooses the context and how prompts are cut.

    The sizes affect the bits, so they do not depend on the requested mode or pool size. Only if a requested pool does
    not fit beside them are they reduced.
    """
    least = least_pool(args, layout)
    wanted = max(demand.expert_cache_bytes or 0, least)
    if demand.expert_io == IoMode.RESIDENT:
        wanted = layout.total_bytes
    elif demand.expert_io == IoMode.MMAP and not figures.copies:
        wanted = max(wanted, _least(args, layout, figures, IoMode.MMAP))
    context, sizes = _largest(args, layout, figures, demand, least)
    need = state_bytes(args, context, demand.itemsize) + activation_bytes(args, layout, demand, context, sizes)
    if demand.resident + runtime_bytes(layout, demand) + need + wanted > room(figures):
        context, sizes = _largest(args, layout, figures, demand, wanted)
    return context, sizes


def _largest(
    args: ModelArgs, layout: ExpertLayout, figures: Figures, demand: Demand, pool: int
) -> tuple[int, PromptSizes]:
    """The largest context and sizes that fit in memory beside a pool of `pool` bytes, else the smallest ones. Sizes
    that leave room for all experts are preferred to larger ones that do not.
    """
    longest = longest_block(args, figures, demand)
    for context in contexts(args, demand):
        fixed = demand.resident + runtime_bytes(layout, demand) + state_bytes(args, context, demand.itemsize)
        spare = room(figures) - fixed - pool
        ways = cuts(context, demand, longest)
        needs = {sizes: activation_bytes(args, layout, demand, context, sizes) for sizes in ways}
        needs = {sizes: need for sizes, need in needs.items() if need <= spare} or needs
        mapped = {sizes: need for sizes, need in needs.items() if not _reads(layout, figures, demand, fixed + need)}
        for sizes, need in (mapped or needs).items():
            share = 1 if figures.breathes and sizes.span <= EASY_SPAN else PROMPT_SHARE
            if need <= spare // share:
                return context, sizes
        if min(needs.values()) <= spare:
            return context, sizes
    return context, sizes


def _reads(layout: ExpertLayout, figures: Figures, demand: Demand, fixed: int) -> str:
    """Why the experts cannot all be in memory beside `fixed` bytes; empty if they can."""
    headroom = headroom_bytes(figures.memory)
    return reason_to_read(layout.total_bytes, layout.largest_layer, fixed, figures, headroom, demand.in_place)


def contexts(args: ModelArgs, demand: Demand) -> list[int]:
    """The requested context, or the default one and its halves."""
    if demand.context is not None:
        return [demand.context]
    longest = default_context(args)
    return [longest >> i for i in range(5) if i == 0 or longest >> i >= LEAST_CONTEXT]


def longest_block(args: ModelArgs, figures: Figures, demand: Demand) -> int:
    """The requested block size, or the default; on a Mac it is smaller if the default would block the screen for too
    long.
    """
    asked = BLOCK if demand.prefill_step_size is None else demand.prefill_step_size
    return asked if figures.operations is None else block_size(args, asked, figures.operations)


def cuts(context: int, demand: Demand, longest: int) -> Iterator[PromptSizes]:
    """The possible ways to cut prompts, largest first, within the requested sizes and blocks of at most `longest`
    tokens.
    """
    spans: Sequence[int] = [span for span in SPANS if span < 2 * context] or SPANS[-1:]
    if demand.span is not None:
        spans = [demand.span]
    for span in spans:
        yield PromptSizes(span, min(longest, span))
    if demand.prefill_step_size is None:
        block = min(longest, spans[-1])
        while block > LEAST_BLOCK:
            block //= 2
            yield PromptSizes(spans[-1], block)


def _pool_bytes(args: ModelArgs, layout: ExpertLayout, spare: int, demand: Demand) -> int:
    """Bytes of the pool, in whole slots: the requested size, or all spare memory up to the best measured size; never
    more than all experts.
    """
    wanted = demand.expert_cache_bytes
    nbytes = max(spare, 0) if wanted is None else max(wanted, least_pool(args, layout))
    if wanted is None and demand.best_pool is not None:
        nbytes = min(nbytes, max(demand.best_pool, least_pool(args, layout)))
    return taken(layout, nbytes, least_slots(args)) if nbytes >= least_pool(args, layout) else 0


def _least(args: ModelArgs, layout: ExpertLayout, figures: Figures, mode: IoMode) -> int:
    """Bytes of experts that must be in memory."""
    if mode is IoMode.PREAD:
        return least_pool(args, layout)
    if figures.copies or mode is IoMode.RESIDENT:
        return layout.total_bytes
    return 0 if figures.working_set is None else _at_once(layout, figures.gathered)


def _at_once(layout: ExpertLayout, gathered: Gathered) -> int:
    """Bytes of the mapped layers to which one command buffer refers at most, by MLX's count of operations and words;
    Metal wires them together.
    """
    words = layout.largest_layer // WORD_BYTES >> 20
    layers = min(gathered.operations // LAYER_OPERATIONS, gathered.words // max(words, 1) + 1)
    return min(layout.total_bytes, layers * layout.largest_layer)


def default_context(args: ModelArgs) -> int:
    """The planned number of positions if the user gives none."""
    return min(DEFAULT_CONTEXT, args.max_position_embeddings)


def _refusal(
    args: ModelArgs,
    layout: ExpertLayout,
    figures: Figures,
    demand: Demand,
    mode: IoMode,
    context: int,
    state: int,
    fixed: int,
) -> str:
    """The message that says why the model does not fit and what would: a smaller pool, a shorter context, more memory.
    `state` is the bytes of caches for `context` positions, `fixed` the bytes of everything but the experts.
    """
    least, kept = _least(args, layout, figures, mode), figures.memory - room(figures)
    why = "headroom" if kept == headroom_bytes(figures.memory) else "beyond what Metal recommends to use"
    if room(figures) == figures.limit:
        why = "beyond --memory-gb"
    pool = max(demand.expert_cache_bytes or 0, least) if mode is IoMode.PREAD else least
    text = (
        f"this does not fit {figures.name} of {in_gb(figures.memory)}: {in_gb(demand.resident)} resident weights, "
        f"{in_gb(state)} for a context of {context}, {in_gb(fixed - demand.resident - state)} temporary, "
        f"{in_gb(pool)} {EXPERTS_OF[mode]}, {in_gb(kept)} {why}"
    )
    spare = room(figures) - fixed
    fewer = figures.gathered._replace(operations=OWN.operations)
    if mode is IoMode.MMAP and figures.working_set is not None and _at_once(layout, fewer) <= spare:
        text += f"; with {OPERATIONS}={OWN.operations} in the environment a command buffer uses fewer layers, which fit"
    if spare >= least and pool > spare:
        return f"{text}; an expert pool of {in_gb(spare)} fits"
    shorter = _longest_context(args, layout, figures, demand, context, pool)
    if shorter:
        return f"{text}; a context of {shorter} fits"
    need = (fixed + pool) / (1 - HEADROOM_SHARE)
    if need > SMALL_MACHINE:
        need = max(need, fixed + pool + LEAST_HEADROOM)
    if figures.usable_working_set is not None:  # other Macs allow a similar share of their memory
        need = max(need, (fixed + pool) * figures.memory / figures.usable_working_set)
    text += f"; {in_gb(need)} of memory would do"
    streams = mode is not IoMode.PREAD and spare >= least_pool(args, layout)
    return f"{text}; --expert-io pread needs no more than there is" if streams else text


def _longest_context(
    args: ModelArgs, layout: ExpertLayout, figures: Figures, demand: Demand, asked: int, pool: int
) -> int:
    """The longest context below `asked`, in whole steps of the caches; 0 if not even one step fits."""
    left = room(figures) - demand.resident - runtime_bytes(layout, demand) - pool

    longest = longest_block(args, figures, demand)

    def fits(steps: int) -> bool:
        context = steps * KV_STEP
        smallest = list(cuts(context, demand, longest))[-1]
        need = state_bytes(args, context, demand.itemsize)
        return need + activation_bytes(args, layout, demand, context, smallest) <= left

    low, high = 0, -(-min(asked, args.max_position_embeddings) // KV_STEP)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low * KV_STEP

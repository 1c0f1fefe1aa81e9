"""Divides the memory before anything is loaded: what stays resident, the size of the pool, and whether expert files are
mapped, read when experts are needed, or read once. A plan that cannot work is refused.

`cache_room` says how many sequences a plan has room for at once, and how many bytes their caches may take together. All
is arithmetic on a configuration and a few figures; it opens no file and allocates nothing.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from ..errors import RequestError
from ..experts.shares import slots_within, taken
from ..experts.source import IoMode
from ..formats.record import ExpertLayout
from ..mixers.registry import untrimmable_bytes
from ..model.span import PromptSizes
from ..model.step import MAX_ROWS
from ..ops import backend
from ..ops.gpu_time import block_size
from ..spec import ModelArgs
from .machine import Figures, in_gb, reason_to_read, select_io_mode
from .memory_plan import (
    BLOCK,
    HEADROOM_SHARE,
    KV_STEP,
    LEAST_HEADROOM,
    SMALL_MACHINE,
    Demand,
    MemoryPlan,
    activation_bytes,
    headroom_bytes,
    least_pool,
    least_slots,
    room,
    runtime_bytes,
    state_bytes,
)
from .settings import OPERATIONS, OWN, BufferLimits

EXPERTS_OF = {IoMode.MMAP: "mapped experts", IoMode.PREAD: "expert pool", IoMode.RESIDENT: "experts"}
DEFAULT_CONTEXT, LEAST_CONTEXT = 8192, 512
SPANS = tuple(512 << i for i in range(6, -1, -1))  # possible span lengths, 32768 to 512
LEAST_BLOCK = 64
# If a span is longer than this, or if the pool cannot get its memory back afterwards, it takes at most 1 / PROMPT_SHARE
# of the pool's bytes.
EASY_SPAN, PROMPT_SHARE = 8192, 4
LAYER_OPERATIONS = 5  # a layer takes more
WORD_BYTES = 4  # the records of a mapped layer are one array of uint32


def plan_memory(args: ModelArgs, layout: ExpertLayout, figures: Figures, demand: Demand) -> MemoryPlan:
    """Divides the memory among the parts of a running model; errors are those of `Planner.plan`."""
    return Planner(args, layout, figures, demand).plan()


@dataclass(frozen=True)
class Planner:
    """Divides the memory of a machine among the parts of a running model.

    Attributes:
        args, layout: of the model and of its experts that this process reads.
        figures: of the machine.
        demand: what the user and the model demand.
        pool_share: if the demand has no context, memory is planned for `longest_context`; None: for the default one.
        least_context: a lower bound for that context.
    """

    args: ModelArgs
    layout: ExpertLayout
    figures: Figures
    demand: Demand
    pool_share: float | None = None
    least_context: int = 0

    def plan(self) -> MemoryPlan:
        """The memory plan.

        If it does not fit, the sizes that the user did not set are reduced in this order: the span, the block, the
        context.

        Raises:
            RequestError: the model does not fit, or a value is impossible; the message has the figures and the nearest
                settings that fit.
        """
        if self.demand.context is None and self.pool_share is not None:
            return self._with_context(self.longest_context())._divide()
        return self._divide()

    def longest_context(self) -> int:
        """The longest context with which the pool of experts keeps `pool_share` of its size at the default context.

        The candidates are the model's limit and its halves; the I/O mode must stay the same. The result is at least
        `least_context`, even if the pool then gets smaller.

        Raises:
            RequestError: not even the default fits.
        """
        base, share = self._divide(), self.pool_share or 0.0
        context = self.args.max_position_embeddings
        while context > max(base.context, self.least_context):
            try:
                plan = self._with_context(context)._divide()
            except RequestError:
                context //= 2
                continue
            if plan.mode is base.mode and plan.pool >= share * base.pool:
                return context
            context //= 2
        return max(base.context, self.least_context)

    def _with_context(self, context: int) -> "Planner":
        """The planner for a demand of this context."""
        return replace(self, demand=replace(self.demand, context=context))

    @property
    def _room(self) -> int:
        return room(self.figures)

    @property
    def _least_pool(self) -> int:
        return least_pool(self.args, self.layout)

    @property
    def _runtime(self) -> int:
        return runtime_bytes(self.layout, self.demand)

    def _state(self, context: int) -> int:
        return state_bytes(self.args, context, self.demand.itemsize)

    def _activations(self, context: int, sizes: PromptSizes) -> int:
        return activation_bytes(self.args, self.layout, self.demand, context, sizes)

    def _divide(self) -> MemoryPlan:
        """The plan for the context of the demand."""
        figures, demand, layout = self.figures, self.demand, self.layout
        context, sizes = self._cut_to_fit()
        state, activations, runtime = self._state(context), self._activations(context, sizes), self._runtime
        fixed = demand.resident + state + activations + runtime
        reason = self._reason_to_read(fixed)
        mode = self._mode(reason)
        pool = most = 0
        if mode is IoMode.PREAD:
            pool = most = self._pool_bytes(self._room - fixed)
            if demand.expert_cache_bytes is None and figures.breathes:
                most = self._pool_bytes(self._room - demand.resident - runtime)
        if fixed + max(pool, self._least(mode)) > self._room:
            raise RequestError(self._refusal(mode, context, state, fixed))
        slots = slots_within(layout, pool, least_slots(self.args)) if pool else 0
        return MemoryPlan(
            mode, reason, figures, demand, context, default_context(self.args), sizes, layout.total_bytes, state,
            activations, runtime, pool, most, slots, headroom_bytes(figures.memory), self._host_bytes(mode),
        )  # fmt: skip

    def _host_bytes(self, mode: IoMode) -> int:
        """Bytes of experts that stay in the host's memory: all, or as many as are requested and have room."""
        if mode is not IoMode.PREAD:
            return 0
        spare, asked = max(self.figures.host - headroom_bytes(self.figures.host), 0), self.demand.host_bytes
        return taken(self.layout, min(self.layout.total_bytes if asked is None else asked, spare), 0)

    def _mode(self, reason: str) -> IoMode:
        """The requested mode, or the fastest that `reason` allows."""
        figures, demand, layout = self.figures, self.demand, self.layout
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

    def _cut_to_fit(self) -> tuple[int, PromptSizes]:
        """Chooses the context and how prompts are cut.

        The sizes affect the bits, so they do not depend on the requested mode or pool size. Only if a requested pool
        does not fit beside them are they reduced.
        """
        demand, least = self.demand, self._least_pool
        wanted = max(demand.expert_cache_bytes or 0, least)
        if demand.expert_io == IoMode.RESIDENT:
            wanted = self.layout.total_bytes
        elif demand.expert_io == IoMode.MMAP and not self.figures.copies:
            wanted = max(wanted, self._least(IoMode.MMAP))
        context, sizes = self._largest(least)
        need = self._state(context) + self._activations(context, sizes)
        if demand.resident + self._runtime + need + wanted > self._room:
            context, sizes = self._largest(wanted)
        return context, sizes

    def _largest(self, pool: int) -> tuple[int, PromptSizes]:
        """The largest context and sizes that fit in memory beside a pool of `pool` bytes, else the smallest ones. Sizes
        that leave room for all experts are preferred to larger ones that do not.
        """
        longest = self._longest_block()
        for context in self._contexts():
            fixed = self.demand.resident + self._runtime + self._state(context)
            spare = self._room - fixed - pool
            needs = {sizes: self._activations(context, sizes) for sizes in self._cuts(context, longest)}
            needs = {sizes: need for sizes, need in needs.items() if need <= spare} or needs
            mapped = {sizes: need for sizes, need in needs.items() if not self._reason_to_read(fixed + need)}
            for sizes, need in (mapped or needs).items():
                share = 1 if self.figures.breathes and sizes.span <= EASY_SPAN else PROMPT_SHARE
                if need <= spare // share:
                    return context, sizes
            if min(needs.values()) <= spare:
                return context, sizes
        return context, sizes

    def _reason_to_read(self, fixed: int) -> str:
        """Why the experts cannot all be in memory beside `fixed` bytes; empty if they can."""
        layout, headroom = self.layout, headroom_bytes(self.figures.memory)
        return reason_to_read(
            layout.total_bytes, layout.largest_layer, fixed, self.figures, headroom, self.demand.in_place
        )

    def _contexts(self) -> list[int]:
        """The requested context, or the default one and its halves."""
        if self.demand.context is not None:
            return [self.demand.context]
        longest = default_context(self.args)
        return [longest >> i for i in range(5) if i == 0 or longest >> i >= LEAST_CONTEXT]

    def _longest_block(self) -> int:
        """The requested block size, or the default; on a Mac it is smaller if the default would block the screen for
        too long.
        """
        asked = BLOCK if self.demand.prefill_step_size is None else self.demand.prefill_step_size
        operations = self.figures.operations
        return asked if operations is None else block_size(self.args, asked, operations)

    def _cuts(self, context: int, longest: int) -> Iterator[PromptSizes]:
        """The possible ways to cut prompts, largest first, within the requested sizes and blocks of at most `longest`
        tokens.
        """
        spans: Sequence[int] = [span for span in SPANS if span < 2 * context] or SPANS[-1:]
        if self.demand.span is not None:
            spans = [self.demand.span]
        for span in spans:
            yield PromptSizes(span, min(longest, span))
        if self.demand.prefill_step_size is None:
            block = min(longest, spans[-1])
            while block > LEAST_BLOCK:
                block //= 2
                yield PromptSizes(spans[-1], block)

    def _pool_bytes(self, spare: int) -> int:
        """Bytes of the pool, in whole slots: the requested size, or all of `spare` bytes up to the best measured size;
        never more than all experts.
        """
        wanted, least, best = self.demand.expert_cache_bytes, self._least_pool, self.demand.best_pool
        nbytes = max(spare, 0) if wanted is None else max(wanted, least)
        if wanted is None and best is not None:
            nbytes = min(nbytes, max(best, least))
        return taken(self.layout, nbytes, least_slots(self.args)) if nbytes >= least else 0

    def _least(self, mode: IoMode) -> int:
        """Bytes of experts that must be in memory."""
        if mode is IoMode.PREAD:
            return self._least_pool
        if self.figures.copies or mode is IoMode.RESIDENT:
            return self.layout.total_bytes
        return 0 if self.figures.working_set is None else _at_once(self.layout, self.figures.gathered)

    def _refusal(self, mode: IoMode, context: int, state: int, fixed: int) -> str:
        """The message that says why the model does not fit and what would: a smaller pool, a shorter context, more
        memory. `state` is the bytes of caches for `context` positions, `fixed` the bytes of everything but the experts.
        """
        figures, resident = self.figures, self.demand.resident
        least, kept = self._least(mode), figures.memory - self._room
        why = "headroom" if kept == headroom_bytes(figures.memory) else "beyond what Metal recommends to use"
        whole, kept_text = f"{figures.name} of {in_gb(figures.memory)}", f", {in_gb(kept)} {why}"
        if self._room == figures.limit:
            whole, kept_text = f"--memory-gb, {in_gb(figures.limit)}", ""
        pool = max(self.demand.expert_cache_bytes or 0, least) if mode is IoMode.PREAD else least
        text = (
            f"this does not fit {whole}: {in_gb(resident)} resident weights, "
            f"{in_gb(state)} for a context of {context}, {in_gb(fixed - resident - state)} temporary, "
            f"{in_gb(pool)} {EXPERTS_OF[mode]}{kept_text}"
        )
        spare = self._room - fixed
        fewer = figures.gathered._replace(operations=OWN.operations)
        if mode is IoMode.MMAP and figures.working_set is not None and _at_once(self.layout, fewer) <= spare:
            text += f"; with {OPERATIONS}={OWN.operations} in the environment a command buffer uses fewer layers, "
            text += "which fit"
        if spare >= least and pool > spare:
            return f"{text}; an expert pool of {in_gb(spare)} fits"
        shorter = self._context_beside(pool, context)
        if shorter:
            return f"{text}; a context of {shorter} fits"
        need = (fixed + pool) / (1 - HEADROOM_SHARE)
        if need > SMALL_MACHINE:
            need = max(need, fixed + pool + LEAST_HEADROOM)
        if figures.usable_working_set is not None:  # other Macs allow a similar share of their memory
            need = max(need, (fixed + pool) * figures.memory / figures.usable_working_set)
        if fixed + pool <= room(replace(figures, limit=None)):  # only the limit is too low
            text += f"; --memory-gb {math.ceil((fixed + pool) / 1e7) / 100:.2f} would do"
        else:
            text += f"; {in_gb(need)} of memory would do" + ("" if kept_text else ", without --memory-gb")
        streams = mode is not IoMode.PREAD and spare >= self._least_pool
        return f"{text}; --expert-io pread needs no more than there is" if streams else text

    def _context_beside(self, pool: int, asked: int) -> int:
        """The longest context of at most `asked` positions that fits beside a pool of `pool` bytes, in whole steps of
        the caches; 0 if not even one step fits.
        """
        left = self._room - self.demand.resident - self._runtime - pool
        longest = self._longest_block()

        def fits(steps: int) -> bool:
            context = steps * KV_STEP
            smallest = list(self._cuts(context, longest))[-1]
            return self._state(context) + self._activations(context, smallest) <= left

        low, high = 0, -(-min(asked, self.args.max_position_embeddings) // KV_STEP)
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if fits(middle) else (low, middle - 1)
        return low * KV_STEP


def _at_once(layout: ExpertLayout, gathered: BufferLimits) -> int:
    """Bytes of the mapped layers to which one command buffer refers at most, by MLX's count of operations and words;
    Metal wires them together.
    """
    words = layout.largest_layer // WORD_BYTES >> 20
    layers = min(gathered.operations // LAYER_OPERATIONS, gathered.words // max(words, 1) + 1)
    return min(layout.total_bytes, layers * layout.largest_layer)


def default_context(args: ModelArgs) -> int:
    """The planned number of positions if the user gives none."""
    return min(DEFAULT_CONTEXT, args.max_position_embeddings)


MOST_STREAMED = 8  # sequences while experts are read; more sequences share fewer experts
POOL_SHARE = 4  # 1/4 of the pool may be used for the caches of several sequences


@dataclass(frozen=True)
class CacheRoom:
    """The memory for the caches of all sequences that are computed at once.

    Args:
        args, plan: of the model.
        nbytes: bytes for all caches together, at least those of one sequence that fills the planned context.
    """

    args: ModelArgs
    plan: MemoryPlan
    nbytes: int

    def needs(self, tokens: int) -> int:
        """Bytes of the caches of a sequence of `tokens` tokens, limited to the planned context. A GPU also needs two
        copies of states that several sequences share (`caches.recurrent.joined_arrays`).
        """
        itemsize = self.plan.demand.itemsize
        copies = 2 * untrimmable_bytes(self.args.mixer_counts, itemsize) if backend.has_kernels() else 0
        return state_bytes(self.args, min(tokens, self.plan.context), itemsize) + copies

    @property
    def sequences(self) -> int:
        """How many sequences of the default context fit, at least one."""
        most = MOST_STREAMED if self.plan.mode is IoMode.PREAD else MAX_ROWS
        return max(min(self.nbytes // self.needs(DEFAULT_CONTEXT), most), 1)


def cache_room(args: ModelArgs, layout: ExpertLayout, plan: MemoryPlan) -> CacheRoom:
    """The memory that `plan` leaves to caches: that of the planned context, plus unused memory or a part of a pool that
    can shrink.

    A pool that can shrink makes room by itself.
    """
    if plan.mode is IoMode.PREAD:
        spare = plan.pool // POOL_SHARE if plan.figures.breathes else 0
        spare = min(spare, plan.pool - least_pool(args, layout))
    else:
        spare = room(plan.figures) - plan.fixed - plan.experts
    return CacheRoom(args, plan, plan.state + max(spare, 0))

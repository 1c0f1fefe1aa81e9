"""Who gets which bytes, decided before anything is loaded: what stays resident, what the pool may take, whether expert
files are mapped, read as experts are wanted, or read once, what cannot work.

Arithmetic on a configuration and a few figures; it opens no file and allocates nothing. Only `from_environment` looks
at the environment, for the public functions and commands that call it.
"""

import os
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import mlx.core as mx

from ..errors import MoefluxWarning, RequestError
from ..experts.reader import in_pieces_bytes
from ..experts.shares import slots_within, taken
from ..experts.source import IoMode
from ..experts.waves import UNDER_WAY, wave_size
from ..formats.record import ExpertLayout
from ..kinds import Mixer
from ..model.span import PromptSizes
from ..ops.attend import SCORES
from ..ops.backend import computes_natively, takes_widths
from ..ops.gpu_time import block_size
from ..ops.grouped import NATIVE_ROWS, PIECE_ROWS, STEPS
from ..ops.tiles import LEASED_TOKENS, MAX_TOKENS
from ..spec import ModelArgs
from ..state.cache import KVCache, make_cache, untrimmable_bytes
from ..state.layer_cache import FLOAT_BYTES
from .machine import WORKING_SET_SHARE, Figures

EXPERTS_OF = {IoMode.MMAP: "mapped experts", IoMode.PREAD: "expert pool", IoMode.RESIDENT: "experts"}
MODES = ("auto", "mmap", "pread", "resident")
HEADROOM_SHARE = 0.15  # of memory, for the system, other programs and the page cache
LEAST_HEADROOM = 1 << 30
SMALL_MACHINE = 4 << 30  # up to here the share alone counts
PROCESS_BYTES = 100 << 20  # the interpreter, MLX, numpy, the tokenizer and allocators' slack, on a Linux CPU
KV_STEP = KVCache.step  # positions by which caches grow
DEFAULT_CONTEXT, LEAST_CONTEXT = 8192, 512
SPANS = tuple(512 << i for i in range(6, -1, -1))  # the sizes that a span comes in, 32768 to 512
BLOCK, LEAST_BLOCK = 4096, 64
# A span that is longer than this, or whose memory the pool cannot have back afterwards, takes one part in so many of
# what the pool could have.
EASY_SPAN, PROMPT_SHARE = 8192, 4
# Layers whose mapped files one command buffer refers to, at most; Metal wires them together. MLX commits after 50
# operations, and a layer takes more than five.
LAYERS_AT_ONCE = 10
SCORES_COPIES = 2  # attention without a kernel of its own keeps scores and their softmax
ROUTING_BYTES = 40  # of one row: its expert, weight, places, and what sorting needs


def select_io_mode(total_expert_bytes: int, physical_ram_bytes: int, override: str | None = None) -> IoMode:
    """MMAP while the experts fit in three quarters of memory (4 * total <= 3 * ram, exact in integers).

    Args:
        total_expert_bytes: bytes of all packed expert files.
        physical_ram_bytes: bytes of physical memory.
        override: "mmap", "pread" or "resident" to force a mode; None or "auto" to decide.

    Raises:
        RequestError: `override` is anything else.
    """
    if override not in (None, "auto"):
        try:
            return IoMode(override)
        except ValueError:
            raise RequestError(f"expert_io {override!r} is not one of {', '.join(MODES)}") from None
    return IoMode.MMAP if 4 * total_expert_bytes <= 3 * physical_ram_bytes else IoMode.PREAD


def reason_to_read(
    total: int, layer_bytes: int, fixed: int, figures: Figures, headroom: int = 0, in_place: bool = False
) -> str:
    """Why experts cannot all be in memory, mapped or read once, with the figure that decides; empty if they can.

    Args:
        total: bytes of all expert files.
        layer_bytes: of one of them.
        fixed: of everything else that is in memory.
        headroom: to be left alone where mapping copies, or nothing is mapped.
        in_place: the files are a checkpoint's, which are not mapped but read once.
    """
    if not in_place and select_io_mode(total, figures.memory) is IoMode.PREAD:
        return f"experts exceed three quarters of {figures.name}"
    if (figures.copies or in_place) and fixed + total + headroom > figures.memory:
        rest = f"{_gb(fixed)} of resident weights and state"
        return f"experts and {rest} leave less than {_gb(headroom)} of {figures.name}"
    usable = figures.usable_working_set
    if usable is not None and fixed + total > usable:
        return (
            f"experts and {_gb(fixed)} of resident weights and state exceed {_gb(usable)}, "
            f"{WORKING_SET_SHARE:.0%} of max_recommended_working_set_size"
        )
    if figures.buffer is not None and layer_bytes > figures.buffer:
        return f"a layer file of {_gb(layer_bytes)} exceeds max_buffer_length {_gb(figures.buffer)}"
    return ""


def describe(mode: IoMode, total: int, figures: Figures, forced: bool, reason: str, in_place: bool = False) -> str:
    """One line with the figures behind the decision, and the one that decided if it is another."""
    why = "forced" if forced else "auto"
    text = (
        f"expert I/O: {mode.value} ({why}): experts {_gb(total)}{' in place' if in_place else ''}, "
        f"{figures.name} {_gb(figures.memory)} ({figures.memory / 2**30:.1f} GiB)"
    )
    if not in_place and mode is not IoMode.RESIDENT:
        text += f", threshold {_gb(figures.memory * 3 // 4)}"
    if forced and mode is IoMode.MMAP and reason:
        return f"{text}; warning: {reason}, so this will page and may run many times slower; --expert-io pread fits"
    return f"{text}; {reason}" if reason and not forced else text


def from_environment(option: str) -> str:
    """`option`, or if that is "auto", what `MOEFLUX_EXPERT_IO` says; an unknown value there warns and means auto."""
    value = os.environ.get("MOEFLUX_EXPERT_IO") or "auto"
    if option != "auto" or value in MODES:
        return value if option == "auto" else option
    message = f"MOEFLUX_EXPERT_IO={value!r} is not {', '.join(MODES[:-1])} or {MODES[-1]}; using auto"
    warnings.warn(message, MoefluxWarning, stacklevel=2)
    return "auto"


@dataclass(frozen=True)
class Demand:
    """What a user asks for: everything that decides how much memory is needed.

    Args:
        resident: bytes of all weights that are not routed experts, as they are kept in memory.
        context: positions that the caches hold at most; None: 8192, or less if there is no room.
        itemsize: bytes of one activation or cache entry.
        span: prompt tokens that go through the model together; None: as many as there is room for.
        prefill_step_size: of a span, tokens that a mixer handles at once, at most; None: as many as there is room for.
        native: the CPU's native kernels compute, which read packed records where they are and keep no scores.
        expert_io: forces a mode; None or "auto" decides.
        expert_cache_bytes: forces the pool's size.
        in_place: experts lie in pieces in a checkpoint, so that files cannot be mapped.
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

    @property
    def forced(self) -> bool:
        return self.expert_io not in (None, "auto")


def demand_of(
    args: ModelArgs,
    resident: int,
    dtype: mx.Dtype,
    *,
    context: int | None,
    span: int | None,
    prefill_step_size: int | None,
    expert_io: str,
    expert_cache_bytes: int | None,
    in_place: bool = False,
) -> Demand:
    """What running a model with activations in `dtype` needs; None means what the plan finds best.

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
        resident=resident,
        context=context,
        itemsize=dtype.size,
        span=span,
        prefill_step_size=prefill_step_size,
        native=computes_natively(dtype) and takes_widths(args.widths),
        expert_io=expert_io,
        expert_cache_bytes=expert_cache_bytes,
        in_place=in_place,
    )


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes of everything that is in memory while a model runs, how prompts are cut, and how experts are read.

    `context` is what was asked for, or `longest`, or less where there is no room. `runtime` is what the process takes
    without any of the others. `pool` is what the experts have while
    a prompt fills the whole context, `most` what they may have while nothing else needs it; both are 0 when all experts
    are in memory, mapped or read once. `reason` says what forbids that.
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
        """All but the experts."""
        return self.demand.resident + self.state + self.activations + self.runtime

    @property
    def decision(self) -> str:
        """One line on how experts are read, and why."""
        return describe(self.mode, self.experts, self.figures, self.demand.forced, self.reason, self.demand.in_place)

    @property
    def shortened(self) -> str:
        """What to say of a context that had to be less than the default; empty if nothing."""
        if self.demand.context is not None or self.context == self.longest:
            return ""
        return f"note: memory is planned for a context of {self.context} tokens, not {self.longest}: there is no more"

    @property
    def prompts(self) -> str:
        """One line on how prompts are cut, and what a pass over the experts takes from the disk."""
        return (
            f"prompts: spans of up to {self.sizes.span} tokens, in blocks of {self.sizes.block}; "
            f"a span reads each expert that it uses once, {_gb(self.experts)} at most"
        )

    @property
    def total(self) -> int:
        """What this process is expected to hold at its peak, in bytes; mapped files not counted."""
        return max(self.fixed + self.pool, self.demand.resident + self.runtime + self.most) + self.copied

    @property
    def copied(self) -> int:
        """Bytes of experts that are all in memory of this process's own."""
        mapped = self.mode is IoMode.MMAP and self.figures.copies
        return self.experts if mapped or self.mode is IoMode.RESIDENT else 0

    @property
    def stays(self) -> bool:
        """Whether experts stay in memory once they have been read."""
        mapped = self.mode is IoMode.MMAP and self.fixed + self.experts <= self.figures.memory
        return mapped or self.mode is IoMode.RESIDENT

    @property
    def wired(self) -> int | None:
        """Bytes that Metal may keep wired: all that runs on the GPU, within what it recommends; None elsewhere."""
        if self.figures.working_set is None:
            return None
        experts = self.pool if self.mode is IoMode.PREAD else self.experts
        return min(self.figures.working_set, self.demand.resident + self.state + self.activations + experts)


def plan_memory(args: ModelArgs, layout: ExpertLayout, figures: Figures, demand: Demand) -> MemoryPlan:
    """Divides memory among what a model needs.

    What nobody has asked for gives way, in this order: the span, the block, the context.

    Raises:
        RequestError: it does not fit, or a value is impossible; the message has the figures and the
            nearest that fits.
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


def longest_context(args: ModelArgs, layout: ExpertLayout, figures: Figures, demand: Demand, share: float) -> int:
    """The longest context beside which the pool of experts keeps `share` of what it has beside the default context.

    Experts that would be mapped stay so. It is the model's limit, or that halved a few times.

    Raises:
        RequestError: not even the default fits.
    """
    base = plan_memory(args, layout, figures, demand)
    context = args.max_position_embeddings
    while context > base.context:
        try:
            plan = plan_memory(args, layout, figures, replace(demand, context=context))
        except RequestError:
            context //= 2
            continue
        if plan.mode is base.mode and plan.pool >= share * base.pool:
            return context
        context //= 2
    return base.context


def _mode(layout: ExpertLayout, figures: Figures, demand: Demand, reason: str) -> IoMode:
    """The one asked for, or the best that `reason` does not forbid."""
    mode = IoMode.PREAD if reason else IoMode.RESIDENT if demand.in_place else IoMode.MMAP
    if demand.forced:
        mode = select_io_mode(layout.total_bytes, figures.memory, demand.expert_io)
    if mode is not IoMode.PREAD and figures.buffer is not None and layout.largest_layer > figures.buffer:
        raise RequestError(
            f"experts cannot be {'mapped' if mode is IoMode.MMAP else 'resident'}: a layer of "
            f"{_gb(layout.largest_layer)} exceeds Metal's max_buffer_length, {_gb(figures.buffer)}; "
            "give --expert-io auto or pread"
        )
    return mode


def _cut_to_fit(args: ModelArgs, layout: ExpertLayout, figures: Figures, demand: Demand) -> tuple[int, PromptSizes]:
    """The context, and how prompts are cut.

    Neither the mode nor the size of the pool that is asked for has a say, because the sizes show in the bits; only
    where such a pool finds no room beside them, they give way.
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
    """The largest context and sizes that memory allows beside a pool of so many bytes, else the smallest.

    Cuts that leave room for all experts come before larger ones that do not.
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
    """Why experts cannot all be in memory beside so many bytes; empty if they can."""
    headroom = headroom_bytes(figures.memory)
    return reason_to_read(layout.total_bytes, layout.largest_layer, fixed, figures, headroom, demand.in_place)


def contexts(args: ModelArgs, demand: Demand) -> list[int]:
    """The one asked for, or the default and its halves."""
    if demand.context is not None:
        return [demand.context]
    longest = default_context(args)
    return [longest >> i for i in range(5) if i == 0 or longest >> i >= LEAST_CONTEXT]


def longest_block(args: ModelArgs, figures: Figures, demand: Demand) -> int:
    """The block that is asked for, or the usual one; less where a Mac's GPU would hold the screen up with it."""
    asked = BLOCK if demand.prefill_step_size is None else demand.prefill_step_size
    return asked if figures.operations is None else block_size(args, asked, figures.operations)


def cuts(context: int, demand: Demand, longest: int) -> Iterator[PromptSizes]:
    """The ways to cut prompts, largest first, with what is asked for, in blocks of at most `longest` tokens."""
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


class Breath:
    """How much memory the pool of experts may have from call to call: what nobody else needs for the moment.

    Args:
        args, layout, plan: of the model.
    """

    def __init__(self, args: ModelArgs, layout: ExpertLayout, plan: MemoryPlan):
        self.args, self.layout, self.plan = args, layout, plan
        self._needs: dict[int, int] = {}

    def __call__(self, tokens: int, held: int) -> int:
        """Bytes of the pool during a call of so many tokens; `held` of MLX's arrays are the pool's own."""
        used, cached = mx.get_active_memory() - self.plan.figures.others - held, mx.get_cache_memory()
        rounded = -(-tokens // KV_STEP) * KV_STEP if tokens > MAX_TOKENS else MAX_TOKENS
        if rounded not in self._needs:
            self._needs[rounded] = self._need(rounded)
        left = room(self.plan.figures) - self.plan.runtime - used - max(self._needs[rounded], cached)
        return max(min(left, self.plan.most), least_pool(self.args, self.layout))

    def _need(self, tokens: int) -> int:
        """Temporaries, and what the caches grow by."""
        demand, sizes = self.plan.demand, PromptSizes(tokens, min(self.plan.sizes.block, tokens))
        growth = state_bytes(self.args, tokens + KV_STEP, demand.itemsize)
        context = max(self.plan.context, tokens)
        return growth + activation_bytes(self.args, self.layout, demand, context, sizes)


def _pool_bytes(args: ModelArgs, layout: ExpertLayout, spare: int, demand: Demand) -> int:
    """Whole slots: what is asked for, or all that is to spare; never more than all experts take."""
    wanted = demand.expert_cache_bytes
    nbytes = max(spare, 0) if wanted is None else max(wanted, least_pool(args, layout))
    return taken(layout, nbytes, least_slots(args)) if nbytes >= least_pool(args, layout) else 0


def least_slots(args: ModelArgs) -> int:
    """Experts that one request may ask for: all that `LEASED_TOKENS` tokens can use."""
    return min(args.num_experts, LEASED_TOKENS * args.num_experts_per_tok)


def least_pool(args: ModelArgs, layout: ExpertLayout) -> int:
    """Bytes of the smallest pool."""
    return taken(layout, 0, least_slots(args))


def _least(args: ModelArgs, layout: ExpertLayout, figures: Figures, mode: IoMode) -> int:
    """Bytes of experts that must be in memory."""
    if mode is IoMode.PREAD:
        return least_pool(args, layout)
    if figures.copies or mode is IoMode.RESIDENT:
        return layout.total_bytes
    return 0 if figures.working_set is None else min(layout.total_bytes, LAYERS_AT_ONCE * layout.largest_layer)


def default_context(args: ModelArgs) -> int:
    """Positions that are planned for unless somebody asks."""
    return min(DEFAULT_CONTEXT, args.max_position_embeddings)


def room(figures: Figures) -> int:
    """Bytes that this process may take: what the headroom leaves, and no more than a Mac's GPU may use."""
    free = figures.memory - headroom_bytes(figures.memory)
    return free if figures.usable_working_set is None else min(free, figures.usable_working_set)


def headroom_bytes(memory: int) -> int:
    share = int(memory * HEADROOM_SHARE)
    return share if memory <= SMALL_MACHINE else max(share, LEAST_HEADROOM)


def runtime_bytes(layout: ExpertLayout, demand: Demand) -> int:
    """Of the process itself, and of what reads experts that lie in pieces."""
    return PROCESS_BYTES + (in_pieces_bytes(layout) if demand.in_place else 0)


def state_bytes(args: ModelArgs, context: int, itemsize: int) -> int:
    """Caches of one sequence with `context` positions, in whole steps in which they grow."""
    return sum(make_cache(mixer).bytes_for(context, itemsize) for mixer in args.mixers)


def activation_bytes(args: ModelArgs, layout: ExpertLayout, demand: Demand, context: int, sizes: PromptSizes) -> int:
    """The largest set of temporaries that a span needs.

    That is the span's hidden states before and after a layer's mixer, normed, and the shared expert's output, and the
    states that it began with, for the way back; with them either one block in a mixer, and a cache that is copied as it
    grows, or all experts' outputs and the waves under way.
    """
    span = min(sizes.span, context)
    streams = 5 * span * args.hidden_size * demand.itemsize + untrimmable_bytes(args.mixers, demand.itemsize)
    block = _mixer_bytes(args, min(sizes.block, span), demand, context)
    block += max(make_cache(mixer).bytes_for(context, demand.itemsize) for mixer in args.mixers)
    return streams + max(block, _experts_bytes(args, layout, demand, span))


def _mixer_bytes(args: ModelArgs, tokens: int, demand: Demand, context: int) -> int:
    """Of the layer that needs most: its mixer, or the MLP that every token goes through."""

    def values(mixer: Mixer) -> int:
        scores = 0 if demand.native else SCORES_COPIES * min(mixer.scores(tokens, context), SCORES)
        return mixer.temporaries(tokens, context) + scores

    mlp = 3 * tokens * max(layer.feed_forward.row_width for layer in args.layers)
    blocks = 1 if demand.native else 2  # a GPU has been given the next one before this one is done
    return blocks * (demand.itemsize * max(mlp, *map(values, args.mixers)) + FLOAT_BYTES * tokens * args.hidden_size)


def _experts_bytes(args: ModelArgs, layout: ExpertLayout, demand: Demand, tokens: int) -> int:
    """Routing, the outputs of all experts, and the waves that are under way."""
    D, inner, K = args.hidden_size, args.moe_intermediate_size, args.num_experts_per_tok
    rows = tokens * K
    routing = rows * ROUTING_BYTES + 4 * min(tokens, BLOCK) * args.num_experts
    if demand.native:
        return routing + rows * D * demand.itemsize + min(rows, NATIVE_ROWS) * (4 * D + 2 * inner) * demand.itemsize
    wave = wave_size(layout, K)
    dense = wave * 3 * D * inner * demand.itemsize
    piece = min(rows, PIECE_ROWS) * (2 * D + 4 * inner) * demand.itemsize
    outputs = rows * D * demand.itemsize * (STEPS + 1) // STEPS
    # The outputs of all waves are joined once the last wave is done.
    return routing + outputs + max(outputs, UNDER_WAY * (wave * layout.held_bytes + dense + piece))


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
    """Why it does not fit, and the nearest that does: a smaller pool, a shorter context, more memory.

    `state` bytes for a context of `context` were planned, `fixed` for all but the experts.
    """
    least, kept = _least(args, layout, figures, mode), figures.memory - room(figures)
    why = "headroom" if kept == headroom_bytes(figures.memory) else "beyond what Metal recommends to use"
    pool = max(demand.expert_cache_bytes or 0, least) if mode is IoMode.PREAD else least
    text = (
        f"this does not fit {figures.name} of {_gb(figures.memory)}: {_gb(demand.resident)} resident weights, "
        f"{_gb(state)} for a context of {context}, {_gb(fixed - demand.resident - state)} temporary, "
        f"{_gb(pool)} {EXPERTS_OF[mode]}, {_gb(kept)} {why}"
    )
    spare = room(figures) - fixed
    if spare >= least and pool > spare:
        return f"{text}; an expert pool of {_gb(spare)} fits"
    shorter = _longest_context(args, layout, figures, demand, context, pool)
    if shorter:
        return f"{text}; a context of {shorter} fits"
    need = (fixed + pool) / (1 - HEADROOM_SHARE)
    if need > SMALL_MACHINE:
        need = max(need, fixed + pool + LEAST_HEADROOM)
    if figures.usable_working_set is not None:  # its share of memory is much the same on other Macs
        need = max(need, (fixed + pool) * figures.memory / figures.usable_working_set)
    text += f"; {_gb(need)} of memory would do"
    streams = mode is not IoMode.PREAD and spare >= least_pool(args, layout)
    return f"{text}; --expert-io pread needs no more than there is" if streams else text


def _longest_context(
    args: ModelArgs, layout: ExpertLayout, figures: Figures, demand: Demand, asked: int, pool: int
) -> int:
    """Below `asked`, in whole steps of the caches; 0 if not even one fits."""
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


def _gb(nbytes: float) -> str:
    return f"{nbytes / 1e9:.2f} GB"

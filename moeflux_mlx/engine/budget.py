"""Who gets which bytes, decided before anything is loaded: what stays resident, what the pool may take, whether expert
files are mapped or read, what cannot work.

Arithmetic on a configuration and a few figures; it opens no file and allocates nothing. Only `from_environment` looks
at the environment, for the public functions and commands that call it.
"""

import os
import warnings
from dataclasses import dataclass, replace

import mlx.core as mx

from ..errors import MoefluxWarning, RequestError
from ..experts.source import IoMode
from ..experts.waves import WAVE_BYTES
from ..formats.record import ExpertLayout
from ..ops.backend import computes_natively, takes_widths
from ..ops.tiles import MAX_TOKENS
from ..spec import ModelArgs
from ..state.cache import KVCache, kind_of
from .generation import PREFILL_STEP_SIZE
from .machine import WORKING_SET_SHARE, Figures

MODES = ("auto", "mmap", "pread")
HEADROOM_SHARE = 0.15  # of memory, for the system, other programs and the page cache
LEAST_HEADROOM = 1 << 30
SMALL_MACHINE = 4 << 30  # up to here the share alone counts
RUNTIME_BYTES = 100 << 20  # the interpreter, MLX, numpy, the tokenizer and allocators' slack, on a Linux CPU
KV_STEP = KVCache.step  # positions by which caches grow
DEFAULT_CONTEXT = 8192


def select_io_mode(total_expert_bytes: int, physical_ram_bytes: int, override: str | None = None) -> IoMode:
    """MMAP while the experts fit in three quarters of memory (4 * total <= 3 * ram, exact in integers).

    Args:
        total_expert_bytes: bytes of all packed expert files.
        physical_ram_bytes: bytes of physical memory.
        override: "mmap" or "pread" to force a mode; None or "auto" to decide.

    Raises:
        RequestError: `override` is anything else.
    """
    if override not in (None, "auto"):
        try:
            return IoMode(override)
        except ValueError:
            raise RequestError(f"expert_io {override!r} is not one of {', '.join(MODES)}") from None
    return IoMode.MMAP if 4 * total_expert_bytes <= 3 * physical_ram_bytes else IoMode.PREAD


def reason_to_read(total: int, layer_bytes: int, fixed: int, figures: Figures, headroom: int = 0) -> str:
    """Why files must not be mapped, with the figure that decides; empty if they may be.

    Args:
        total: bytes of all expert files.
        layer_bytes: of one of them.
        fixed: of everything else that is in memory.
        headroom: to be left alone where mapping copies.
    """
    if select_io_mode(total, figures.memory) is IoMode.PREAD:
        return f"experts exceed three quarters of {figures.name}"
    if figures.copies and fixed + total + headroom > figures.memory:
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


def describe(mode: IoMode, total: int, figures: Figures, forced: bool, reason: str) -> str:
    """One line with the three figures behind the decision, and the one that decided if it is another."""
    why = "forced" if forced else "auto"
    text = (
        f"expert I/O: {mode.value} ({why}): experts {_gb(total)}, {figures.name} {_gb(figures.memory)} "
        f"({figures.memory / 2**30:.1f} GiB), threshold {_gb(figures.memory * 3 // 4)}"
    )
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
        context: positions that the caches hold at most.
        itemsize: bytes of one activation or cache entry.
        in_place: prefill reads packed records where they are (native CPU kernels), not from unpacked copies.
        expert_io: forces a mode; None or "auto" decides.
        expert_cache_bytes: forces the pool's size.
    """

    resident: int
    context: int = DEFAULT_CONTEXT
    itemsize: int = 4
    prefill_step_size: int = PREFILL_STEP_SIZE
    in_place: bool = False
    expert_io: str | None = None
    expert_cache_bytes: int | None = None

    @property
    def forced(self) -> bool:
        return self.expert_io not in (None, "auto")


def demand_of(
    args: ModelArgs,
    resident: int,
    dtype: mx.Dtype,
    *,
    context: int | None,
    prefill_step_size: int,
    expert_io: str,
    expert_cache_bytes: int | None,
) -> Demand:
    """What running a model with activations in `dtype` needs; `context` None means what is planned by default."""
    return Demand(
        resident=resident,
        context=default_context(args) if context is None else context,
        itemsize=dtype.size,
        prefill_step_size=prefill_step_size,
        in_place=computes_natively(dtype) and takes_widths(args.widths),
        expert_io=expert_io,
        expert_cache_bytes=expert_cache_bytes,
    )


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes of everything that is in memory while a model runs, and how experts are read.

    `pool` is 0 when files are mapped: the page cache holds them. `reason` says what forbids mapping.
    """

    mode: IoMode
    reason: str
    figures: Figures
    demand: Demand
    experts: int
    state: int
    activations: int
    pool: int
    slots: int
    headroom: int

    @property
    def fixed(self) -> int:
        """All but the experts."""
        return self.demand.resident + self.state + self.activations + RUNTIME_BYTES

    @property
    def decision(self) -> str:
        """One line on how experts are read, and why."""
        return describe(self.mode, self.experts, self.figures, self.demand.forced, self.reason)

    @property
    def total(self) -> int:
        """What this process is expected to hold at its peak, in bytes; mapped files not counted."""
        return self.fixed + self.pool + self.copied

    @property
    def copied(self) -> int:
        """Bytes of mapped experts that are copied into memory."""
        return self.experts if self.figures.copies and self.mode is IoMode.MMAP else 0

    @property
    def wired(self) -> int | None:
        """Bytes that Metal may keep wired: all that runs on the GPU, within what it recommends; None elsewhere."""
        if self.figures.working_set is None:
            return None
        experts = self.experts if self.mode is IoMode.MMAP else self.pool
        return min(self.figures.working_set, self.demand.resident + self.state + self.activations + experts)


def plan_memory(args: ModelArgs, layout: ExpertLayout, figures: Figures, demand: Demand) -> MemoryPlan:
    """Divides memory among what a model needs.

    Raises:
        RequestError: it does not fit, or a value is impossible; the message has the figures and the
            nearest that fits.
    """
    for name, value in (("context", demand.context), ("prefill_step_size", demand.prefill_step_size)):
        if value < 1:
            raise RequestError(f"{name} is {value}; it must be positive")
    state = state_bytes(args, demand.context, demand.itemsize)
    activations = activation_bytes(args, layout, demand)
    fixed = demand.resident + state + activations + RUNTIME_BYTES
    headroom = headroom_bytes(figures.memory)
    reason = reason_to_read(layout.total_bytes, layout.largest_layer, fixed, figures, headroom)
    mode = IoMode.PREAD if reason else IoMode.MMAP
    if demand.forced:
        mode = select_io_mode(layout.total_bytes, figures.memory, demand.expert_io)
    if mode is IoMode.MMAP and figures.buffer is not None and layout.largest_layer > figures.buffer:
        raise RequestError(
            f"experts cannot be mapped: a layer file of {_gb(layout.largest_layer)} exceeds Metal's max_buffer_length, "
            f"{_gb(figures.buffer)}; give --expert-io auto or pread"
        )
    pool = 0
    if mode is IoMode.PREAD:
        pool = _pool_bytes(args, layout, room(figures) - fixed, demand)
    if fixed + max(pool, _least(args, layout, figures, mode)) > room(figures):
        raise RequestError(_refusal(args, layout, figures, demand, mode))
    slots = pool // layout.expert_stride
    return MemoryPlan(
        mode, reason, figures, demand, layout.total_bytes, state, activations, pool, slots, headroom
    )  # fmt: skip


def _pool_bytes(args: ModelArgs, layout: ExpertLayout, spare: int, demand: Demand) -> int:
    """Whole slots: what is asked for, or all that is to spare; never more than all experts take."""
    wanted = demand.expert_cache_bytes
    nbytes = max(spare, 0) if wanted is None else max(wanted, least_pool(args, layout))
    return min(nbytes, layout.total_bytes) // layout.expert_stride * layout.expert_stride


def least_slots(args: ModelArgs) -> int:
    """Experts that one request may ask for: all that the largest decode call can use."""
    return min(args.num_experts, MAX_TOKENS * args.num_experts_per_tok)


def least_pool(args: ModelArgs, layout: ExpertLayout) -> int:
    return least_slots(args) * layout.expert_stride


def _least(args: ModelArgs, layout: ExpertLayout, figures: Figures, mode: IoMode) -> int:
    """Bytes of experts that must be in memory."""
    if mode is IoMode.PREAD:
        return least_pool(args, layout)
    return layout.total_bytes if figures.copies else 0


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


def state_bytes(args: ModelArgs, context: int, itemsize: int) -> int:
    """Caches of one sequence with `context` positions, in whole steps in which they grow."""
    return sum(kind_of(mixer).bytes_for(mixer, context, itemsize) for mixer in args.mixers)


def activation_bytes(args: ModelArgs, layout: ExpertLayout, demand: Demand) -> int:
    """The largest set of temporaries that one prefill step needs, beside the residual stream.

    That is a chunk's expert outputs with one wave of unpacked experts, or the attention of one layer.
    """
    tokens, item = min(demand.prefill_step_size, demand.context), demand.itemsize
    wave = 0 if demand.in_place else min(4 * max(WAVE_BYTES, layout.expert_stride), 3 * layout.largest_layer)
    rows = tokens * args.num_experts_per_tok
    experts = 2 * rows * args.hidden_size * item + rows * args.moe_intermediate_size * item + wave
    return max(experts, _attention_bytes(args, tokens, demand)) + 6 * tokens * args.hidden_size * item


def _attention_bytes(args: ModelArgs, tokens: int, demand: Demand) -> int:
    """Of the layer that needs most."""
    return demand.itemsize * max(mixer.temporaries(tokens, demand.context) for mixer in args.mixers)


def _refusal(args: ModelArgs, layout: ExpertLayout, figures: Figures, demand: Demand, mode: IoMode) -> str:
    """Why it does not fit, and the nearest that does: a smaller pool, a shorter context, more memory."""
    least = _least(args, layout, figures, mode)
    state = state_bytes(args, demand.context, demand.itemsize)
    temporary = activation_bytes(args, layout, demand) + RUNTIME_BYTES
    fixed, kept = demand.resident + state + temporary, figures.memory - room(figures)
    why = "headroom" if kept == headroom_bytes(figures.memory) else "beyond what Metal recommends to use"
    pool = max(demand.expert_cache_bytes or 0, least) if mode is IoMode.PREAD else least
    text = (
        f"this does not fit {figures.name} of {_gb(figures.memory)}: {_gb(demand.resident)} resident weights, "
        f"{_gb(state)} for a context of {demand.context}, {_gb(temporary)} temporary, "
        f"{_gb(pool)} expert pool, {_gb(kept)} {why}"
    )
    spare = room(figures) - fixed
    if spare >= least and pool > spare:
        return f"{text}; an expert pool of {_gb(spare)} fits"
    context = _longest_context(args, layout, figures, demand, pool)
    if context:
        return f"{text}; a context of {context} fits"
    need = (fixed + pool) / (1 - HEADROOM_SHARE)
    if need > SMALL_MACHINE:
        need = max(need, fixed + pool + LEAST_HEADROOM)
    if figures.usable_working_set is not None:  # its share of memory is much the same on other Macs
        need = max(need, (fixed + pool) * figures.memory / figures.usable_working_set)
    return f"{text}; {_gb(need)} of memory would do"


def _longest_context(args: ModelArgs, layout: ExpertLayout, figures: Figures, demand: Demand, pool: int) -> int:
    """In whole steps of the caches; 0 if not even one fits."""
    left = room(figures) - demand.resident - RUNTIME_BYTES - pool

    def fits(steps: int) -> bool:
        shorter = replace(demand, context=steps * KV_STEP)
        need = state_bytes(args, shorter.context, demand.itemsize) + activation_bytes(args, layout, shorter)
        return need <= left

    low, high = 0, -(-min(demand.context, args.max_position_embeddings) // KV_STEP)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low * KV_STEP


def _gb(nbytes: float) -> str:
    return f"{nbytes / 1e9:.2f} GB"

"""Plans memory before anything is loaded: what stays resident, what the pool may take, what cannot work.

Pure arithmetic on a configuration and a few figures; it opens no file and allocates nothing.
"""

from dataclasses import dataclass, replace

from ..errors import RequestError
from ..experts.routed import DECODE_ROWS, WAVE_BYTES
from ..formats.record import ExpertLayout
from ..spec import FULL, ModelArgs
from ..state.cache import KVCache
from .generation import PREFILL_STEP_SIZE
from .io_mode import Figures, IoMode, describe, reason_to_read, select_io_mode

HEADROOM_SHARE = 0.15  # of memory, for the system, other programs and the page cache
LEAST_HEADROOM = 1 << 30
SMALL_MACHINE = 4 << 30  # up to here the share alone counts
RUNTIME_BYTES = 100 << 20  # the interpreter, MLX, numpy, the tokenizer and allocators' slack, on a Linux CPU
KV_STEP = KVCache.step  # positions by which caches grow
DEFAULT_CONTEXT = 8192


@dataclass(frozen=True)
class Demand:
    """What a user asks for: everything that decides how much memory is needed.

    Args:
        resident: bytes of all weights that are not routed experts, as they are kept in memory.
        context: positions that the caches hold at most.
        itemsize: bytes of one activation or cache entry.
        in_place: prefill reads packed blocks where they are (native CPU kernels), not from unpacked copies.
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
    reason = reason_to_read(layout.total_bytes, layout.layer_bytes, fixed, figures, headroom)
    mode = IoMode.PREAD if reason else IoMode.MMAP
    if demand.forced:
        mode = select_io_mode(layout.total_bytes, figures.memory, demand.expert_io)
    if mode is IoMode.MMAP and figures.buffer is not None and layout.layer_bytes > figures.buffer:
        raise RequestError(
            f"experts cannot be mapped: a layer file of {_gb(layout.layer_bytes)} exceeds Metal's max_buffer_length, "
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
    """Blocks that one request may ask for: every expert that the largest decode call can use."""
    return min(args.num_experts, DECODE_ROWS * args.num_experts_per_tok)


def least_pool(args: ModelArgs, layout: ExpertLayout) -> int:
    return least_slots(args) * layout.expert_stride


def _least(args: ModelArgs, layout: ExpertLayout, figures: Figures, mode: IoMode) -> int:
    """Bytes of experts that must be in memory."""
    if mode is IoMode.PREAD:
        return least_pool(args, layout)
    return layout.total_bytes if figures.copies else 0


def room(figures: Figures) -> int:
    """Bytes that this process may take: what the headroom leaves, and no more than a Mac's GPU may use."""
    free = figures.memory - headroom_bytes(figures.memory)
    return free if figures.usable_working_set is None else min(free, figures.usable_working_set)


def headroom_bytes(memory: int) -> int:
    share = int(memory * HEADROOM_SHARE)
    return share if memory <= SMALL_MACHINE else max(share, LEAST_HEADROOM)


def state_bytes(args: ModelArgs, context: int, itemsize: int) -> int:
    """Caches of one sequence with `context` positions, rounded up to the steps in which they grow."""
    positions = -(-context // KV_STEP) * KV_STEP
    if args.kv_lora_rank:
        return args.num_hidden_layers * positions * (args.kv_lora_rank + args.qk_rope_head_dim) * itemsize
    full = args.layer_types.count(FULL)
    linear = args.num_hidden_layers - full
    conv = max(args.linear_conv_kernel_dim - 1, 0) * args.linear_conv_dim * itemsize
    matrix = args.linear_value_dim * args.linear_key_head_dim * 4
    return full * positions * 2 * args.num_key_value_heads * args.head_dim * itemsize + linear * (conv + matrix)


def activation_bytes(args: ModelArgs, layout: ExpertLayout, demand: Demand) -> int:
    """The largest set of temporaries that one prefill step needs, beside the residual stream.

    That is a chunk's expert outputs with one wave of unpacked experts, or the attention of one layer.
    """
    tokens, item = min(demand.prefill_step_size, demand.context), demand.itemsize
    wave = 0 if demand.in_place else min(4 * max(WAVE_BYTES, layout.expert_stride), 3 * layout.layer_bytes)
    rows = tokens * args.num_experts_per_tok
    experts = 2 * rows * args.hidden_size * item + rows * args.moe_intermediate_size * item + wave
    return max(experts, _attention_bytes(args, tokens, demand)) + 6 * tokens * args.hidden_size * item


def _attention_bytes(args: ModelArgs, tokens: int, demand: Demand) -> int:
    """Scores of one layer; MLA adds two, and expands its latents to keys and values of every head."""
    scores = args.num_attention_heads * tokens * demand.context * demand.itemsize * (2 if args.kv_lora_rank else 1)
    widths = args.qk_nope_head_dim + args.v_head_dim if args.kv_lora_rank else 0
    return scores + args.num_attention_heads * demand.context * widths * demand.itemsize


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

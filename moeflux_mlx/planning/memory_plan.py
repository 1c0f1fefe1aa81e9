"""The memory plan of a running model: what takes how many bytes, how prompts are cut, and how experts are read. A
`Demand` has all settings that determine how much a model needs.

Everything is calculated from a configuration. Nothing here opens a file or allocates, and nothing is decided but the
number of bits in which caches keep keys and values.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import mlx.core as mx

from ..caches.growing import Growing
from ..caches.layer_cache import FLOAT_BYTES
from ..errors import RequestError
from ..experts.reader import in_pieces_bytes
from ..experts.shares import taken
from ..experts.source import IoMode
from ..experts.waves import UNDER_WAY, wave_size
from ..formats.record import ExpertLayout
from ..kinds import Mixer
from ..mixers.registry import each_cache, make_caches, untrimmable_bytes
from ..model.span import PromptSizes
from ..ops.arrangement import STEPS
from ..ops.attend_span import piece_values, width_refusal
from ..ops.causal_parts import SCORES
from ..ops.expert_rows import form_refusal
from ..ops.grouped import NATIVE_ROWS, PIECE_ROWS
from ..ops.kv_rows import BITS
from ..ops.tiles import LEASED_TOKENS
from ..ops.value_experts import COPIED
from ..spec import ModelArgs
from ..vision.vision import NoVision, VisionFiles
from .machine import Figures, describe, in_gb


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
        fused: whether a GPU attends to all positions without scores, if the widths of heads suit.
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
    fused: bool = False
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


HEADROOM_SHARE = 0.15  # share of memory kept free for the system, other programs and the page cache
LEAST_HEADROOM = 1 << 30
SMALL_MACHINE = 4 << 30  # up to this size only the share counts; bytes beyond it are kept free up to the least headroom
PROCESS_BYTES = 100 << 20  # the interpreter, MLX, numpy, the tokenizer and allocators' slack, on a Linux CPU
KV_STEP = Growing.step  # positions by which caches grow
BLOCK = 4096  # the most tokens that a mixer handles at once by default
SCORES_COPIES = 2  # attention without a kernel of its own keeps scores and their softmax
INDEX_BYTES = 4  # per position that an indexer chose
ROUTING_BYTES = 40  # per row: its expert, weight, places, and temporaries of sorting


def least_slots(args: ModelArgs) -> int:
    """The most experts of one request: all of a record set that `LEASED_TOKENS` tokens can use."""
    routers = {args.router_of(number) for number in args.record_sets}
    return max(min(router.experts, LEASED_TOKENS * router.top_k) for router in routers)


def least_pool(args: ModelArgs, layout: ExpertLayout) -> int:
    """Bytes of the smallest pool."""
    return taken(layout, 0, least_slots(args))


def room(figures: Figures) -> int:
    """Bytes that this process may take: the memory without the headroom, a Mac's GPU limit or the user's, whichever is
    least.
    """
    limits = [figures.memory - headroom_bytes(figures.memory), figures.usable_working_set, figures.limit]
    return min(limit for limit in limits if limit is not None)


def headroom_bytes(memory: int) -> int:
    """Bytes of `memory` that are kept free. More memory never leaves less for the process."""
    share, beyond = int(memory * HEADROOM_SHARE), memory - SMALL_MACHINE
    return share if beyond <= 0 else max(share, min(LEAST_HEADROOM, int(SMALL_MACHINE * HEADROOM_SHARE) + beyond))


def runtime_bytes(layout: ExpertLayout, demand: Demand) -> int:
    """Bytes of the process itself, and of the buffers for reading experts in pieces."""
    return PROCESS_BYTES + (in_pieces_bytes(layout) if demand.in_place else 0)


def state_bytes(args: ModelArgs, context: int, itemsize: int) -> int:
    """Bytes of one sequence's caches with `context` positions, in whole growth steps, including a draft head's."""
    head = make_caches(args.draft_head.mixer) if args.draft_head else ()
    caches = [*each_cache(args.mixer_counts), *((cache, 1) for cache in head)]
    return sum(count * cache.bytes_for(context, itemsize) for cache, count in caches)


def activation_bytes(args: ModelArgs, layout: ExpertLayout, demand: Demand, context: int, sizes: PromptSizes) -> int:
    """Bytes of the largest set of temporaries that a span needs, or the image that is encoded before it.

    The span always needs its hidden states before and after a layer's mixer, in all streams, and normed; the shared
    expert's output; the states to rewind to; what layers hand on; and the rows of n-grams. In addition it needs either
    one block in a mixer, with a copy of a growing cache and the dequantised part of a quantised one, or all experts'
    outputs and the waves in flight. Where a GPU multiplies by dequantised matrices those of two layers are added,
    because it gets the next layer before this one is done; but not to the experts of several blocks. This holds for any
    number of operations that MLX gathers in a command buffer: on a GPU, blocks, parts of them and waves are waited for.
    """
    span = min(sizes.span, context)
    on_units = demand.on_units and not any(map(form_refusal, layout.records.values()))
    demand = replace(demand, on_units=on_units)
    ways = (1 + demand.drafts) * untrimmable_bytes(args.mixer_counts, demand.itemsize)
    count = _streams(args)
    # Experts add to zeros before a norm or a projection, or beside the stream.
    zeros = args.experts.latent is not None or any(
        layer.residual.output_norms or layer.residual.adds_itself for layer in args.layers
    )
    streams = (2 * count + 3 + zeros) * span * args.hidden_size * demand.itemsize + ways
    chosen = INDEX_BYTES * max(mixer.handed_on for mixer in args.mixer_counts)
    lent = 2 * demand.itemsize * max(mixer.lent for mixer in args.mixer_counts)  # with rotated keys, and without
    streams += span * (chosen + lent + sum(part.row_bytes for part in args.ngrams.values()))
    dense = 2 * demand.dense
    block = _mixer_bytes(args, min(sizes.block, span), demand, context) + mixing_bytes(args, sizes.block, span, demand)
    layers = [make_caches(mixer) for mixer in args.mixer_counts]
    block += max(sum(cache.bytes_for(context, demand.itemsize) for cache in caches) for caches in layers)
    block += max(sum(cache.fetched_bytes(context, demand.itemsize) for cache in caches) for caches in layers)
    experts = _experts_bytes(args, layout, demand, span) + (dense if span <= sizes.block else 0)
    # A shorter prompt, which is one block, may need more.
    alone = PromptSizes(sizes.block, sizes.block)
    least = activation_bytes(args, layout, demand, context, alone) if span > sizes.block else demand.encoding
    return max(streams + max(block + dense, experts), least)


def _streams(args: ModelArgs) -> int:
    return args.connections.streams if args.connections else 1


def _mixer_bytes(args: ModelArgs, tokens: int, demand: Demand, context: int) -> int:
    """Bytes of the layer that needs most: its mixer or its dense MLP."""

    def values(mixer: Mixer) -> int:
        of_values, heads = value_temporaries(args.hidden_size, mixer, tokens, demand), mixer.span_heads
        if demand.fused and heads and not width_refusal(heads[1:]):
            pieces = FLOAT_BYTES * piece_values(tokens * heads[0], heads[2]) // demand.itemsize
            return of_values + mixer.fused_temporaries(tokens, context) + pieces
        scores = SCORES_COPIES * min(mixer.scores(tokens, context), SCORES)
        if demand.native:
            # They compute at once: what the block leaves behind, in all streams and for the experts, is not there yet.
            own = mixer.native_temporaries(tokens, context) + (0 if mixer.attends_natively else scores)
            return of_values + own - (_streams(args) + 2) * tokens * args.hidden_size
        return of_values + mixer.temporaries(tokens, context) + scores

    mlp = 3 * tokens * max(layer.row_width for layer in args.layers)
    blocks = 1 if demand.native else 2  # a GPU gets the next block before this one is done
    return blocks * (
        demand.itemsize * max(mlp, *map(values, args.mixer_counts)) + FLOAT_BYTES * tokens * args.hidden_size
    )


def value_temporaries(hidden_size: int, mixer: Mixer, tokens: int, demand: Demand) -> int:
    """Values that a block's value experts take and make: their inputs, products, gates and activations, the sums of
    these, and where no kernels multiply them copies of some matrices, on a GPU dequantised too.
    """
    own = mixer.experts
    if own is None:
        return 0
    pairs = tokens * own.router.top_k
    copied = 0 if demand.on_units else 2 * COPIED * own.rows * (2 if demand.dense else 1)
    taken = min(pairs, NATIVE_ROWS) if demand.native else pairs + copied
    return taken * hidden_size + (3 * pairs + 2 * tokens) * own.rows


def mixing_bytes(args: ModelArgs, block: int, span: int, demand: Demand) -> int:
    """Bytes of the streams on their way into and out of both parts of a layer, of two blocks if the span has several.
    The CPU frees each array as soon as it is used.
    """
    if demand.native or args.connections is None:
        return 0
    streams = args.connections.copies * args.connections.streams
    return 2 * streams * min(2 * block, span) * args.hidden_size * demand.itemsize


def _experts_bytes(args: ModelArgs, layout: ExpertLayout, demand: Demand, tokens: int) -> int:
    """Bytes of the routing, the outputs of all experts, and the waves in flight."""
    D, inner, K = args.expert_size, args.moe_intermediate_size, args.num_experts_per_tok
    rows = tokens * K
    routing = rows * ROUTING_BYTES + 4 * min(tokens, BLOCK) * args.num_experts
    if args.experts.output_eps is not None:
        routing += 2 * rows * D * demand.itemsize  # the outputs multiplied by the norm's weight, and normed
    if demand.native:
        return routing + rows * D * demand.itemsize + min(rows, NATIVE_ROWS) * (4 * D + 2 * inner) * demand.itemsize
    wave = wave_size(layout, K)
    if demand.on_units:
        outputs, act = rows * D * demand.itemsize, rows * inner * demand.itemsize
        before = min(rows, PIECE_ROWS) * (D + inner) * demand.itemsize  # a short prompt's layer before is still there
        return routing + before + outputs + max(outputs, act + UNDER_WAY * wave * layout.held_bytes)
    dense = wave * 3 * D * inner * demand.itemsize
    piece = min(rows, PIECE_ROWS) * (2 * D + 4 * inner) * demand.itemsize
    outputs = rows * D * demand.itemsize * (STEPS + 1) // STEPS
    # The outputs of all waves are joined once the last wave is done.
    return routing + outputs + max(outputs, UNDER_WAY * (wave * layout.held_bytes + dense + piece))


KV_BITS = ("auto", "8", "16")
# If a token adds at least this many bytes of keys and values in 16 bits, 8 bits are the default: 64,000 tokens would
# take 8 GB. This concerns families with full attention in most of 46 or more layers.
LARGE_TOKEN = 128 << 10
LONG = 1 << 20  # number of positions, longer than any window


def keeping(args: ModelArgs, asked: int | str, dtype: mx.Dtype | None) -> ModelArgs:
    """The model's arguments with the chosen number of bits for keys and values.

    Args:
        asked: 8, 16 (as they are, in the dtype of activations) or "auto", as a number or in digits.
        dtype: the dtype that the user gave, or None.

    Raises:
        RequestError: `asked` is none of them, or 8 where no layer keeps keys and values.
    """
    if str(asked) not in KV_BITS:
        raise RequestError(f"kv_bits {asked!r} is not one of {', '.join(KV_BITS)}")
    if str(asked) == "auto":
        is_exact = dtype is not None and dtype == mx.float32
        return args if is_exact or token_bytes(args) < LARGE_TOKEN else args.with_kv_bits(BITS)
    if str(asked) == "16":
        return args
    if not args.rounds_keys:
        raise RequestError(
            f"kv_bits 8 is for keys and values, and this {args.model_type} model keeps latents or states, which are "
            "small, or keys of which an indexer chooses; leave it out"
        )
    return args.with_kv_bits(BITS)


def token_bytes(args: ModelArgs) -> int:
    """Bytes of keys and values in 16 bits that a token adds to a long text."""
    mixers = (mixer for mixer in args.with_kv_bits(None).visited if mixer.rounds_keys)
    caches = (cache for mixer in mixers for cache in make_caches(mixer))
    return sum((cache.bytes_for(2 * LONG, 2) - cache.bytes_for(LONG, 2)) // LONG for cache in caches)


def state_lines(args: ModelArgs, context: int, itemsize: int) -> Iterator[str]:
    """Lines that say how much one text's state takes with keys and values in 8 bits and unchanged; none if there are no
    keys and values.
    """
    if not args.rounds_keys:
        return
    small, large = (in_gb(state_bytes(args.with_kv_bits(bits), context, itemsize), 3) for bits in (BITS, None))
    bits = 8 * itemsize
    chosen = BITS if args.kv_bits else bits
    yield f"with keys and values in {BITS} bits the state takes {small}, in {bits} {large}: {chosen} are planned"

"""How many bytes each part of a running model takes, and how many there are: arithmetic on a configuration.

It opens no file, allocates nothing, and decides nothing.
"""

from ..experts.reader import in_pieces_bytes
from ..experts.shares import taken
from ..experts.waves import UNDER_WAY, wave_size
from ..formats.record import ExpertLayout
from ..kinds import Mixer
from ..model.span import PromptSizes
from ..ops.attend import SCORES
from ..ops.grouped import NATIVE_ROWS, PIECE_ROWS, STEPS
from ..ops.tiles import LEASED_TOKENS
from ..spec import ModelArgs
from ..state.cache import KVCache, make_cache, untrimmable_bytes
from ..state.layer_cache import FLOAT_BYTES
from .demand import Demand
from .machine import Figures

HEADROOM_SHARE = 0.15  # of memory, for the system, other programs and the page cache
LEAST_HEADROOM = 1 << 30
SMALL_MACHINE = 4 << 30  # up to here the share alone counts
PROCESS_BYTES = 100 << 20  # the interpreter, MLX, numpy, the tokenizer and allocators' slack, on a Linux CPU
KV_STEP = KVCache.step  # positions by which caches grow
BLOCK = 4096  # tokens that a mixer handles at once, at most, unless somebody asks for more
SCORES_COPIES = 2  # attention without a kernel of its own keeps scores and their softmax
ROUTING_BYTES = 40  # of one row: its expert, weight, places, and what sorting needs


def least_slots(args: ModelArgs) -> int:
    """Experts that one request may ask for: all that `LEASED_TOKENS` tokens can use."""
    return min(args.num_experts, LEASED_TOKENS * args.num_experts_per_tok)


def least_pool(args: ModelArgs, layout: ExpertLayout) -> int:
    """Bytes of the smallest pool."""
    return taken(layout, 0, least_slots(args))


def room(figures: Figures) -> int:
    """Bytes that this process may take: what the headroom leaves, no more than a Mac's GPU may use or the user says."""
    limits = [figures.memory - headroom_bytes(figures.memory), figures.usable_working_set, figures.limit]
    return min(limit for limit in limits if limit is not None)


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

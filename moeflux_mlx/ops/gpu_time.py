"""Estimates how long a Mac's GPU needs for a part of a prompt, and limits the work of one command buffer.

macOS ends a command buffer that holds the GPU for about five seconds ("Caused GPU Timeout Error"), or keeps the screen
waiting ("Impacting Interactivity", a limit that is not documented). MLX commits a command buffer after a number of
operations, regardless of their duration. So on Metal this module counts the floating-point operations that are
committed together, and keeps them below `SECONDS` at the GPU's full rate: kernels that reach only a tenth of that rate
are still in time. Memory traffic is not counted; most of it is the sum of the experts' outputs of a span: 19 GB for
32,768 tokens of DeepSeek-V3, 0.3 s at an M1's 68 GB/s. Other backends have no limit. Nothing here has run on an Apple
GPU.
"""

import re
from collections.abc import Sequence

import mlx.core as mx

from ..kinds import Mixer, product_operations
from ..spec import ModelArgs
from . import backend
from .chips import CHIPS, FAMILY

SECONDS = 0.5  # the most time of one command buffer
SLOWEST = min(chip.tflops for chip in CHIPS.values())
CLASS = re.compile(rf"{FAMILY}M\d+( Pro| Max| Ultra)")  # the Pro of another family, such as the A18 Pro, may be slower
# A command buffer holds at most a layer's work on one block, with one part of its attention and the latents expanded
# for it, or one piece of a wave. The plan limits a block by the chip; the other pieces are equal on every Apple GPU.
BLOCK_SHARE = 0.5
AT_ONCE = 0.25 * SECONDS * SLOWEST * 1e12  # operations of one piece, or of one expansion


def rate(chip: str) -> float:
    """Operations per second of a GPU, by Metal's name; an unknown Pro, Max or Ultra counts as the slowest of them, and
    any other unknown one as the slowest of all.
    """
    if chip in CHIPS:
        return 1e12 * CHIPS[chip].tflops
    kind = CLASS.fullmatch(chip)
    return 1e12 * (min(one.tflops for name, one in CHIPS.items() if name.endswith(kind[1])) if kind else SLOWEST)


def rows_at_once(inner: int, outer: int) -> int | None:
    """How many rows may be multiplied together with matrices of `inner` * `outer` values; None: any number."""
    return None if backend.name() != "metal" else max(int(AT_ONCE / product_operations(1, inner, outer)), 1)


def commit(tokens: int, *arrays: mx.array) -> None:
    """On Metal, submits the gathered work for `arrays`, so that later work goes into another command buffer. It does
    nothing for a single token, which is little work and may be in the middle of a trace."""
    if tokens > 1 and backend.name() == "metal":
        backend.start(*arrays)


def in_turn(tokens: int, parts: Sequence[mx.array]) -> None:
    """Begins to compute the newest of the parts into which some tokens' attention is divided, and waits for the one
    before it: the temporaries of two parts are in memory, and on Metal a command buffer holds one. Like `commit`, it
    does nothing for a single token."""
    if tokens > 1 and backend.has_kernels():
        backend.start(parts[-1])
        for before in parts[-2:-1]:
            backend.finish(before)


def block_size(args: ModelArgs, longest: int, operations: float) -> int:
    """`longest`, halved until a block fits its share of a command buffer."""
    while longest > 1 and max(block(args, mixer, longest) for mixer in args.mixer_counts) > BLOCK_SHARE * operations:
        longest //= 2
    return longest


def block(args: ModelArgs, mixer: Mixer, tokens: int) -> float:
    """A layer over a block of a span: its mixer but for scores, router and shared expert, or a dense MLP."""
    width = max(layer.row_width for layer in args.layers)
    mlp = product_operations(tokens, args.hidden_size, 3 * width + args.num_experts)
    return mlp + product_operations(tokens, args.hidden_size, mixer.columns) + mixer.own_operations(tokens)

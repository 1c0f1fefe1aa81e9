"""What a known model should reach on a Mac: the bytes, launches and operations of a token and of a prompt, and the
tokens per second that a chip's public figures allow.

This is arithmetic on a configuration and on `ops/chips.py`; nothing is measured. It needs no Mac.
"""

from contextlib import closing
from dataclasses import dataclass
from functools import cached_property
from math import prod

import mlx.core as mx

from ..errors import RequestError
from ..experts.source import IoMode
from ..formats.record import ExpertLayout
from ..kinds import product_operations
from ..mixers.registry import each_cache
from ..model.tensors import layer_of, needed, variant_bytes
from ..ops import gpu_time
from ..ops.chips import CHIPS, FAMILY, Chip, gpu_limits
from ..ops.stand_ins import standing_in
from ..planning.budget import plan_memory
from ..planning.machine import Figures
from ..planning.memory_plan import keeping
from ..spec import ModelArgs
from .launches import launches_of
from .load_settings import LoadSettings
from .random_weights import Shapes

POSITIONS = 4096  # that a token attends to
DTYPE = mx.bfloat16
STREAMED, RESIDENT = "experts, streamed", "experts, resident"  # parts of a model, of which it runs one
# What is usual of a chip's figures: good kernels read at 80 % of the bandwidth. mlx-lm reaches half of the arithmetic
# in prompts of Qwen3-30B-A3B on an M4 Max (mlx-lm#406). A launch that waits for the one before it costs about 4.5 us
# beside its bytes, and a wait of the host for the GPU 0.2 to 0.35 ms on an M4 (mlx-lm#1438). None of it was measured
# with this program.
BANDWIDTH_SHARE, RATE_SHARE, LAUNCH_SECONDS, WAIT_SECONDS = 0.8, 0.5, 4.5e-6, 0.3e-3
ASSUMED_SHARE = 0.5  # of the experts that are in memory, where all would fit


@dataclass(frozen=True)
class Speed:
    """Tokens per second: `most` at a chip's full figures, `about` at what is usual of them."""

    most: float
    about: float

    @classmethod
    def of(cls, tokens: int, most: float, about: float) -> "Speed":
        """Of `tokens` tokens in these seconds."""
        return cls(tokens / most, tokens / about)


@dataclass(frozen=True)
class Mac:
    """A Mac with one of Apple's chips.

    Args:
        name: of the chip, without "Apple".
        chip: its figures.
        memory: bytes.
        disk: bytes per second.
    """

    name: str
    chip: Chip
    memory: int
    disk: float

    @classmethod
    def of(cls, name: str, memory: int | None = None, disk: float | None = None) -> "Mac":
        """The Mac with the chip `name`, such as "M4 Max" in any case; by default with the least memory of 16 GiB or
        more, and with the usual drive.

        Raises:
            RequestError: the chip is not known.
        """
        known = {key.removeprefix(FAMILY).lower(): key for key in CHIPS}
        key = known.get(name.lower().removeprefix(FAMILY.lower()))
        if key is None:
            names = ", ".join(one.removeprefix(FAMILY) for one in CHIPS)
            raise RequestError(f"the chip {name!r} is not known; give one of {names}")
        chip = CHIPS[key]
        return cls(key.removeprefix(FAMILY), chip, memory or chip.memory << 30, disk or 1e9 * chip.disk)

    @property
    def figures(self) -> Figures:
        """What a memory plan knows of it."""
        operations = gpu_time.SECONDS * gpu_time.rate(FAMILY + self.name)
        return Figures(self.memory, *gpu_limits(self.memory), operations=operations)

    @property
    def rate(self) -> float:
        """Operations per second of products with many rows."""
        return 1e12 * (self.chip.matrix_tflops or self.chip.tflops)

    @property
    def bandwidth(self) -> float:
        return 1e9 * self.chip.bandwidth


class Reach:
    """The work of a known model's tokens and prompts, in 4 bits, and the speed of a Mac with it.

    Args:
        name: of the variant.

    Attributes:
        dense: bytes of all weights that a token reads besides routed experts; of the embedding it reads a row.

    Raises:
        RequestError: there is no such variant.
    """

    def __init__(self, name: str):
        self.name, self.args = name, keeping(ModelArgs.from_variant(name), "auto", None)
        self.layout = ExpertLayout.from_args(self.args)
        with standing_in(backend="metal"):
            self.dense = variant_bytes(self.args, DTYPE, of_token=True)
            self._demand = LoadSettings().demand(self.args, variant_bytes(self.args, DTYPE), DTYPE)

    @cached_property
    def _launches(self) -> dict[str, int]:
        """Kernels of one token by part, in all of its layers."""
        counts: dict[str, int] = {}
        shapes = Shapes.of_variant(self.name, DTYPE)
        with standing_in(backend="metal"), closing(launches_of(shapes, "metal", tokens=(1,))) as steps:
            for step in steps:
                if not step.is_special:
                    visits = sum(map(self.args.passes_of, step.layers)) or 1
                    counts[step.part] = counts.get(step.part, 0) + sum(step.runs.values()) * visits
        return counts

    @property
    def routed(self) -> int:
        """Bytes of the experts that a token uses."""
        return self.layout.token_bytes(self.args)

    @property
    def state(self) -> int:
        """Bytes that a token reads and writes of caches with `POSITIONS` positions."""
        caches = each_cache(self.args.mixer_counts)
        return sum(count * cache.step_bytes(POSITIONS, DTYPE.size) for cache, count in caches)

    @property
    def token(self) -> int:
        """Bytes that a token moves if all experts are in memory."""
        return self.dense + self.routed + self.state

    @property
    def waits(self) -> int:
        """How often the host waits for the GPU in a streamed token: for each choice of a router."""
        return sum(map(self.args.passes_of, self.layout.records))

    def launches(self, streamed: bool) -> int:
        """Kernels of a token; MLX adds a few of its own, such as the embedding."""
        return sum(count for part, count in self._launches.items() if part != (RESIDENT if streamed else STREAMED))

    def used(self, tokens: int) -> int:
        """Bytes of the different experts that a prompt uses, if the routers use all equally often."""
        routers = {number: self.args.router_of(number) for number in self.layout.records}
        used = {number: 1 - (1 - one.top_k / one.experts) ** tokens for number, one in routers.items()}
        return int(sum(self.layout.layer_bytes(number) * share for number, share in used.items()))

    def operations(self, tokens: int) -> float:
        """Multiplications and additions of a prompt: matrices, routed experts, and scores of earlier positions."""
        args = self.args
        weights = {i: sum(one.rows * one.columns for one in r.projections) for i, r in self.layout.records.items()}
        experts = {number: args.passes_of(number) * args.router_of(number).top_k for number in weights}
        each = self._matrices + sum(experts[number] * count for number, count in weights.items())
        # Half of a prompt's pairs are in order, and a multiply-add is two operations.
        scores = sum(count * mixer.attended(tokens, tokens) for mixer, count in args.mixer_counts.items())
        return product_operations(tokens, each, 1) + scores + product_operations(1, args.hidden_size, args.vocab_size)

    @cached_property
    def _matrices(self) -> int:
        """Values of the matrices of all layers that a token passes, without routed experts."""
        layers = ((layer_of(path), shape) for path, shape in needed(self.args).matrices.items())
        return sum(self.args.passes_of(layer) * prod(shape) for layer, shape in layers if layer is not None)

    def share(self, mac: Mac) -> float | None:
        """The share of the experts that is in memory on this Mac, 1 if they all are; None: the model does not fit."""
        with standing_in(backend="metal"):
            try:
                plan = plan_memory(self.args, self.layout, mac.figures, self._demand)
            except RequestError:
                return None
        return plan.pool / self.layout.total_bytes if plan.mode is IoMode.PREAD else 1.0

    def decode(self, mac: Mac, share: float = 1.0) -> Speed:
        """The speed of one token after the other with this share of the experts in memory. At most, reads from the disk
        and the GPU's work happen at the same time; about, one after the other.
        """
        moved, read, streamed = self.token / mac.bandwidth, (1 - share) * self.routed / mac.disk, share < 1
        added = self.launches(streamed) * LAUNCH_SECONDS + (self.waits * WAIT_SECONDS if streamed else 0)
        return Speed.of(1, max(moved, read), moved / BANDWIDTH_SHARE + added + read)

    def prompt(self, mac: Mac, tokens: int, share: float = 1.0) -> Speed:
        """The speed of a prompt with this share of the experts in memory. Every weight is moved once; reads from the
        disk and the GPU's work happen at the same time.
        """
        moved, read = (self.dense + self.used(tokens)) / mac.bandwidth, (1 - share) * self.used(tokens) / mac.disk
        computed = self.operations(tokens) / mac.rate
        about = max(moved / BANDWIDTH_SHARE, computed / RATE_SHARE, read)
        return Speed.of(tokens, max(moved, computed, read), about)

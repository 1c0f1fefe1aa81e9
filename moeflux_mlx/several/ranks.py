"""This process as one of several that run a model: comparing settings, planning, loading and waiting for the others.

Before they load a model, all ranks compare their settings: it must be the same one, used in the same way. Every rank
gets all settings, so a difference raises the same error everywhere. Chips and versions of MLX may differ; then all
ranks use rank 0's choice of experts.
"""

import importlib.metadata
import platform
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields, replace

import mlx.core as mx
import numpy as np

from ..errors import RankError, RequestError
from ..experts.source import ExpertLoader
from ..formats.record import ExpertLayout
from ..opening.weights import ModelWeights
from ..ops import backend, native
from ..planning.budget import Planner
from ..planning.memory_plan import MemoryPlan
from ..state.prompt_file import Fingerprint
from .experts import RankedExperts
from .group import FAILED, FINE, Exchange
from .owners import MOST_SHARE, Dealing, Owners

HELLO, SETTINGS = 5, 6  # kinds of messages
PROTOCOL = 2
REMEDIES = {
    "package": "install the same moeflux-mlx everywhere",
    "model": "give all ranks a copy of the same model directory",
    "dtype": "give all ranks the same --dtype",
    "rounding": "give all ranks the same --set cpu_activations=BITS",
    "kv_bits": "give all ranks the same --kv-bits",
    "context": "give all ranks the same --context",
}
MAY_DIFFER = {"mlx": "MLX versions", "chip": "chips"}


@dataclass(frozen=True)
class Settings:
    """The settings of a rank.

    Args:
        package, mlx, chip, model, dtype: digests of names and versions.
        rounding: number of bits to which the CPU's products round activations.
        kv_bits: number of bits of cached keys and values; 0: unchanged.
        context: number of positions for which memory is planned.
        span, block: the largest sizes for which this rank has room.
        shares_routing: whether the user requested rank 0's choice of experts.
        slots: number of slots of a pool into which this rank can read any expert; 0: it has only its own experts.
    """

    package: int
    mlx: int
    chip: int
    model: int
    dtype: int
    rounding: int
    kv_bits: int
    context: int
    span: int
    block: int
    shares_routing: int
    slots: int


NAMES = [field.name for field in fields(Settings)]


@dataclass(frozen=True)
class Agreement:
    """The agreed settings: the smallest span and block, a message to print once, and the slots of all pools if every
    rank can read every expert.
    """

    span: int
    block: int
    shares_routing: bool
    note: str
    slots: tuple[int, ...] = ()


def digest(text: str) -> int:
    """32 bits of a name."""
    return zlib.crc32(text.encode())


def digests(model: Fingerprint, dtype: mx.Dtype) -> dict[str, int]:
    """The settings that are names and versions."""
    return {
        "package": digest(_package()),
        "mlx": digest(importlib.metadata.version("mlx")),
        "chip": digest(_chip()),
        "model": digest(model.model + model.tokenizer),
        "dtype": digest(str(dtype)),
    }


def _package() -> str:
    try:
        return importlib.metadata.version("moeflux-mlx")
    except importlib.metadata.PackageNotFoundError:  # run from a source directory
        return ""


def _chip() -> str:
    """What determines the last bits: the GPU, or the CPU's instruction set."""
    if backend.has_kernels():
        return str(mx.device_info()["device_name"])
    return f"{platform.machine()} {native.instruction_paths()[:1]}"


def greet(exchange: Exchange, share: int) -> tuple[int, ...]:
    """Exchanges the ranks' shares in the first message.

    Raises:
        RankError: a share is invalid, or a rank has another version.
    """
    hello = exchange(HELLO, np.array([PROTOCOL, len(NAMES), share], np.uint32)).words
    for rank, theirs in enumerate(hello.tolist()):
        if theirs[:2] != hello[0, :2].tolist():
            raise RankError(f"rank {rank} speaks protocol {theirs[0]}, rank 0 {hello[0, 0]}; {REMEDIES['package']}")
        if not 1 <= theirs[2] <= MOST_SHARE:
            raise RankError(f"rank {rank} asks for a share of {theirs[2]}; it must be from 1 to {MOST_SHARE}")
    return tuple(hello[:, 2].tolist())


def agree(exchange: Exchange, own: Settings | None) -> Agreement:
    """Compares the settings of all ranks; None means that this rank has failed, and tells the others.

    Raises:
        RankError: settings differ that must be equal; every rank gets the same message.
    """
    words = np.array([0 if own is None else getattr(own, name) for name in NAMES], np.uint32)
    gathered = exchange(SETTINGS, words, flag=FINE if own else FAILED)
    if (failed := gathered.first(FAILED)) is not None:
        raise RankError(f"rank {failed} cannot take part; its own message says why")
    settings = [Settings(*row) for row in gathered.words.tolist()]
    _check(settings)
    unlike = [name for name in MAY_DIFFER if len({getattr(one, name) for one in settings}) > 1]
    differing = " and ".join(MAY_DIFFER[name] for name in unlike)
    note = f"note: the ranks have different {differing}; all use rank 0's choice of experts" if unlike else ""
    return Agreement(
        min(one.span for one in settings),
        min(one.block for one in settings),
        bool(unlike) or any(one.shares_routing for one in settings),
        note,
        tuple(one.slots for one in settings) if all(one.slots for one in settings) else (),
    )


def _check(settings: Sequence[Settings]) -> None:
    for rank, one in enumerate(settings):
        for name, remedy in REMEDIES.items():
            theirs, first = getattr(one, name), getattr(settings[0], name)
            if theirs != first:
                figures = f" ({theirs}, and rank 0 {first})" if name == "context" else ""
                raise RankError(f"rank {rank} has another {name} than rank 0{figures}; {remedy}")


READY = 7  # kind of a message
OPENING_SECONDS = 600.0  # until all have read the headers of their models, or fetched these
LEAST_SECONDS = 60.0  # how much later than the others a rank may always be
SLOW_DISK = 50e6  # bytes a second; less is taken for a failure
SLOW_TOKENS = 100.0  # least number of a span's tokens that a mixer processes per second


@dataclass(frozen=True)
class Party:
    """What the ranks agreed on before they load a model; the plan is this rank's."""

    exchange: Exchange
    plan: MemoryPlan
    owners: Owners
    shares_routing: bool
    slots: tuple[int, ...] = ()

    def experts(self, source: ExpertLoader, prefetch: str) -> RankedExperts:
        """The object that computes routed experts in place of `RoutedExperts`."""
        dealing = Dealing(self.owners, self.slots) if self.slots else None
        return RankedExperts(source, self.exchange, self.owners, prefetch, self.shares_routing, dealing)

    @contextmanager
    def loading(self, nbytes: int) -> Iterator[None]:
        """A context manager in which a model of `nbytes` is loaded; at its end it waits for the others.

        Raises:
            RankError: another rank could not load it.
        """
        exchange = self.exchange
        flag, before = FINE, exchange.group.limit
        exchange.group.limit = before + OPENING_SECONDS + nbytes / SLOW_DISK
        try:
            yield
        except BaseException:
            flag = FAILED
            raise
        finally:
            gathered = exchange(READY, np.zeros(1, np.uint32), flag=flag)
            exchange.group.limit = before
        if (failed := gathered.first(FAILED)) is not None:
            raise RankError(f"rank {failed} could not load the model; its own message says why")


@dataclass(frozen=True)
class Ranks:
    """The processes, and the part of this one.

    Args:
        exchange: with the others.
        share: this rank's share of the experts, relative to the others' shares.
        shares_routing: all ranks use rank 0's choice of experts; if the machines differ, they do so anyway.
        seconds: how much later than the others a rank may be; None: calculated from the plan.
        say: called once with a message for the user.
    """

    exchange: Exchange
    share: int = 1
    shares_routing: bool = False
    seconds: float | None = None
    say: Callable[[str], None] = lambda text: None

    @property
    def leads(self) -> bool:
        """Whether this is rank 0."""
        return self.exchange.group.rank == 0

    def io_mode(self, asked: str, weights: ModelWeights) -> str:
        """The I/O mode of a rank: a CPU maps experts; otherwise they go into a pool, which may hold all of the rank's
        experts.

        Raises:
            RequestError: a mode in which this rank would hold the others' experts too.
        """
        gpu = backend.has_kernels()
        if asked == "resident" or (asked == "mmap" and gpu):
            raise RequestError(f"--expert-io {asked} holds every expert, and a rank only its own; leave it at auto")
        return "pread" if asked == "auto" and (gpu or weights.in_place) else asked

    def meet(
        self,
        weights: ModelWeights,
        planner: Planner,
        dtype: mx.Dtype,
        bits: int,
    ) -> "Party":
        """Plans memory for this rank's experts, with the smallest span of all ranks, and checks that the ranks'
        settings agree.

        Raises:
            RankError: the ranks cannot run one model, or another has no room. RequestError: this one has none.
        """
        exchange, rank = self.exchange, self.exchange.group.rank
        exchange.group.limit = OPENING_SECONDS
        owners = Owners(greet(exchange, self.share))
        layout = weights.experts.layout
        most = max(len(owners.experts(layer, rank, layout.num_experts)) for layer in layout.moe_layers)
        own = replace(layout, num_experts=most)
        try:
            planned = replace(planner, layout=own).plan()
            settings = Settings(
                **digests(weights.fingerprint(mx.float32), dtype),
                rounding=bits,
                kv_bits=planner.args.kv_bits or 0,
                context=planned.context,
                span=planned.sizes.span,
                block=planned.sizes.block,
                shares_routing=self.shares_routing,
                slots=_slots_to_deal(planned, own),
            )
        except BaseException:
            with suppress(RankError):  # which tells the others; the message here gives the reason
                agree(exchange, None)
            raise
        agreed = agree(exchange, settings)
        if agreed.note:
            self.say(agreed.note)
        demand = replace(planner.demand, context=planned.context, span=agreed.span, prefill_step_size=agreed.block)
        planned = replace(planner, layout=own, demand=demand).plan()
        slow = layout.largest_layer / SLOW_DISK + agreed.span / SLOW_TOKENS
        exchange.group.limit = LEAST_SECONDS + slow if self.seconds is None else self.seconds
        return Party(exchange, planned, owners, agreed.shares_routing, agreed.slots)


def _slots_to_deal(plan: MemoryPlan, own: ExpertLayout) -> int:
    """Slots of a pool that takes any expert; 0 if the pool has room for all experts of this rank, which then stay in
    it, or if value experts, which every rank reads for itself, are in it too.
    """
    return 0 if own.num_values or plan.slots >= own.total_experts else plan.slots

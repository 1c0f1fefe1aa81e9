"""This process as one of several that run a model: planning, loading and waiting for the others."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace

import mlx.core as mx
import numpy as np

from ..errors import RankError, RequestError
from ..experts.source import ExpertLoader
from ..formats.record import ExpertLayout
from ..opening.weights import ModelWeights
from ..ops import backend
from ..planning.budget import Planner
from ..planning.memory_plan import MemoryPlan
from .experts import RankedExperts
from .group import FAILED, FINE, Exchange
from .handshake import Settings, agree, digests, greet
from .owners import Dealing, Owners

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

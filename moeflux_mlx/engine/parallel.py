"""How many sequences a plan has room for at a time, and how many bytes their caches may have together."""

from dataclasses import dataclass

from ..experts.source import IoMode
from ..formats.record import ExpertLayout
from ..model.step import MAX_ROWS
from ..spec import ModelArgs
from .budget import DEFAULT_CONTEXT, MemoryPlan
from .needs import least_pool, room, state_bytes

MOST_STREAMED = 8  # sequences while experts are read: the more there are, the fewer experts they have in common
POOL_SHARE = 4  # one part in so many of the pool gives way to the caches of several sequences


@dataclass(frozen=True)
class CacheRoom:
    """The memory for caches of all sequences that are computed at a time.

    Args:
        args, plan: of the model.
        nbytes: that caches may have together, at least those of one sequence that fills the planned context.
    """

    args: ModelArgs
    plan: MemoryPlan
    nbytes: int

    def needs(self, tokens: int) -> int:
        """Bytes of a sequence of so many tokens, at most the planned context."""
        return state_bytes(self.args, min(tokens, self.plan.context), self.plan.demand.itemsize)

    @property
    def sequences(self) -> int:
        """How many of the usual length there is room for, at least one."""
        most = MOST_STREAMED if self.plan.mode is IoMode.PREAD else MAX_ROWS
        return max(min(self.nbytes // self.needs(DEFAULT_CONTEXT), most), 1)


def cache_room(args: ModelArgs, layout: ExpertLayout, plan: MemoryPlan) -> CacheRoom:
    """What `plan` leaves to caches: the planned context's, and what nobody else has, or a part of a pool that breathes.

    A pool that breathes makes room by itself: it has what the caches leave.
    """
    if plan.mode is IoMode.PREAD:
        spare = plan.pool // POOL_SHARE if plan.figures.breathes else 0
        spare = min(spare, plan.pool - least_pool(args, layout))
    else:
        spare = room(plan.figures) - plan.fixed - plan.experts
    return CacheRoom(args, plan, plan.state + max(spare, 0))

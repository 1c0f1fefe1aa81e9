"""How many sequences a plan has room for at once, and how many bytes their caches may take together."""

from dataclasses import dataclass

from ..experts.source import IoMode
from ..formats.record import ExpertLayout
from ..mixers.registry import untrimmable_bytes
from ..model.step import MAX_ROWS
from ..ops import backend
from ..spec import ModelArgs
from .budget import DEFAULT_CONTEXT
from .memory_plan import MemoryPlan
from .needs import least_pool, room, state_bytes

MOST_STREAMED = 8  # sequences while experts are read; more sequences share fewer experts
POOL_SHARE = 4  # 1/4 of the pool may be used for the caches of several sequences


@dataclass(frozen=True)
class CacheRoom:
    """The memory for the caches of all sequences that are computed at once.

    Args:
        args, plan: of the model.
        nbytes: bytes for all caches together, at least those of one sequence that fills the planned context.
    """

    args: ModelArgs
    plan: MemoryPlan
    nbytes: int

    def needs(self, tokens: int) -> int:
        """Bytes of the caches of a sequence of `tokens` tokens, limited to the planned context. A GPU also needs two
        copies of states that several sequences share (`caches.recurrent.joined_arrays`).
        """
        itemsize = self.plan.demand.itemsize
        copies = 2 * untrimmable_bytes(self.args.mixer_counts, itemsize) if backend.has_kernels() else 0
        return state_bytes(self.args, min(tokens, self.plan.context), itemsize) + copies

    @property
    def sequences(self) -> int:
        """How many sequences of the default context fit, at least one."""
        most = MOST_STREAMED if self.plan.mode is IoMode.PREAD else MAX_ROWS
        return max(min(self.nbytes // self.needs(DEFAULT_CONTEXT), most), 1)


def cache_room(args: ModelArgs, layout: ExpertLayout, plan: MemoryPlan) -> CacheRoom:
    """The memory that `plan` leaves to caches: that of the planned context, plus unused memory or a part of a pool that
    can shrink.

    A pool that can shrink makes room by itself.
    """
    if plan.mode is IoMode.PREAD:
        spare = plan.pool // POOL_SHARE if plan.figures.breathes else 0
        spare = min(spare, plan.pool - least_pool(args, layout))
    else:
        spare = room(plan.figures) - plan.fixed - plan.experts
    return CacheRoom(args, plan, plan.state + max(spare, 0))

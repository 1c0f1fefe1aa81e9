"""How much memory the pool of experts may have from call to call."""

import mlx.core as mx

from ..formats.record import ExpertLayout
from ..model.span import PromptSizes
from ..ops.tiles import MAX_TOKENS
from ..spec import ModelArgs
from .budget import MemoryPlan
from .needs import KV_STEP, activation_bytes, least_pool, room, state_bytes


class Breath:
    """How much memory the pool of experts may have from call to call: what nobody else needs for the moment.

    Args:
        args, layout, plan: of the model.
    """

    def __init__(self, args: ModelArgs, layout: ExpertLayout, plan: MemoryPlan):
        self.args, self.layout, self.plan = args, layout, plan
        self._needs: dict[int, int] = {}

    def __call__(self, tokens: int, held: int) -> int:
        """Bytes of the pool during a call of so many tokens; `held` of MLX's arrays are the pool's own."""
        used, cached = mx.get_active_memory() - self.plan.figures.others - held, mx.get_cache_memory()
        rounded = -(-tokens // KV_STEP) * KV_STEP if tokens > MAX_TOKENS else MAX_TOKENS
        if rounded not in self._needs:
            self._needs[rounded] = self._need(rounded)
        left = room(self.plan.figures) - self.plan.runtime - used - max(self._needs[rounded], cached)
        return max(min(left, self.plan.most), least_pool(self.args, self.layout))

    def _need(self, tokens: int) -> int:
        """Temporaries, and what the caches grow by."""
        demand, sizes = self.plan.demand, PromptSizes(tokens, min(self.plan.sizes.block, tokens))
        growth = state_bytes(self.args, tokens + KV_STEP, demand.itemsize)
        context = max(self.plan.context, tokens)
        return growth + activation_bytes(self.args, self.layout, demand, context, sizes)

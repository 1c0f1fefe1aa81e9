"""Sets the size of the pool of experts for each call of the model."""

from dataclasses import replace

import mlx.core as mx

from ..errors import DeviceError, MoefluxError, RequestError
from ..formats.record import ExpertLayout
from ..model.span import PromptSizes
from ..ops.tiles import MAX_TOKENS
from ..spec import ModelArgs
from .machine import in_gb
from .memory_plan import KV_STEP, MemoryPlan, activation_bytes, least_pool, room, state_bytes
from .pressure import PoolLimit


class Breath:
    """Computes the bytes that the pool of experts may take: what nothing else in this process needs.

    Args:
        args, layout, plan: of the model.
        limit: how much memory the machine leaves to the pool.
    """

    def __init__(self, args: ModelArgs, layout: ExpertLayout, plan: MemoryPlan, limit: PoolLimit):
        self.args, self.layout, self.plan, self.limit = args, layout, plan, limit
        self._least = least_pool(args, layout)
        self._needs: dict[int, int] = {}

    def __call__(self, tokens: int, held: int) -> int:
        """Bytes of the pool during a call of `tokens` tokens; `held` is how many bytes of MLX's arrays belong to the
        pool.

        Raises:
            DeviceError: the machine has too little memory for the call, even with the smallest pool.
        """
        needed = self._needed(tokens)
        self._check(tokens, needed, DeviceError)
        self.limit.begin(needed)
        if self.plan.most == self.plan.pool:
            return self.plan.pool
        used, cached = mx.get_active_memory() - self.plan.figures.others - held, mx.get_cache_memory()
        left = room(self.plan.figures) - self.plan.runtime - self.plan.demand.beside - used - max(needed, cached)
        return max(min(left, self.plan.most), self._least)

    def check_prompt(self, tokens: int) -> None:
        """Raises RequestError: not even the smallest pool leaves a prompt of so many new tokens its memory."""
        span, itemsize = min(tokens, self.plan.sizes.span), self.plan.demand.itemsize
        behind = state_bytes(self.args, tokens, itemsize) - state_bytes(self.args, span, itemsize)
        self._check(tokens, self._needed(span) + behind, RequestError)

    def _needed(self, tokens: int) -> int:
        """Bytes of a call of so many tokens, beside the pool."""
        rounded = -(-tokens // KV_STEP) * KV_STEP if tokens > MAX_TOKENS else MAX_TOKENS
        if rounded not in self._needs:
            self._needs[rounded] = self._need(rounded)
        return self._needs[rounded]

    def _check(self, tokens: int, needed: int, kind: type[MoefluxError]) -> None:
        """Refuses a call if the system would end the process for its memory."""
        need = needed + self._least
        if need > self.limit.room:
            raise kind(
                f"{tokens} tokens need {in_gb(need)} for computing and the smallest pool of experts, and the memory "
                f"limit of this process leaves {in_gb(max(self.limit.room, 0))}; raise the limit, end other programs, "
                "or give a smaller --set span=TOKENS or a shorter prompt"
            )

    def _need(self, tokens: int) -> int:
        """Bytes of temporaries and of the caches' growth."""
        demand, sizes = self.plan.demand, PromptSizes(tokens, min(self.plan.sizes.block, tokens))
        if tokens <= MAX_TOKENS:  # no image is encoded
            demand = replace(demand, encoding=0)
        growth = state_bytes(self.args, tokens + KV_STEP, demand.itemsize)
        context = max(self.plan.context, tokens)
        return growth + activation_bytes(self.args, self.layout, demand, context, sizes)

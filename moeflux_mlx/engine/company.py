"""What an engine needs from the other processes that run one model with it; nothing here knows the transport."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import mlx.core as mx

from ..experts.routing import RoutedExpertsCall
from ..experts.source import ExpertLoader
from ..formats.record import ExpertLayout
from ..model.decoder import Model
from ..ops.tiles import Tiles
from ..spec import ModelArgs
from ..text.tokenizer import TokenizerWrapper
from .budget import MemoryPlan
from .demand import Demand
from .session import Session
from .weights import Weights


class Agreed(Protocol):
    """What the processes have in common before they load a model, and what this one plans."""

    @property
    def plan(self) -> MemoryPlan: ...

    @property
    def tiles(self) -> Tiles:
        """How the kernels of all cut their matrices."""
        ...

    def experts(self, source: ExpertLoader, prefetch: str) -> RoutedExpertsCall:
        """Who computes routed experts, in place of `RoutedExperts`."""
        ...

    def loading(self, nbytes: int) -> AbstractContextManager[None]:
        """Loads a model of so many bytes inside, and then waits for the others."""
        ...


class Company(Protocol):
    """The processes, this one among them."""

    def io_mode(self, asked: str, weights: Weights) -> str:
        """How one of several reads experts, where `asked` was asked for."""
        ...

    def meet(
        self,
        weights: Weights,
        args: ModelArgs,
        dtype: mx.Dtype,
        bits: int,
        demand: Demand,
        plan: Callable[[ExpertLayout, Demand], MemoryPlan],
        tiles: Tiles,
    ) -> Agreed:
        """Plans memory for this process's experts, and compares what must be alike."""
        ...


class Leading(Protocol):
    """Whoever has the others take every step of this process's sessions."""

    def session(self, model: Model, tokenizer: TokenizerWrapper, **options: Any) -> Session:
        """A new text; `options` as for `Session`."""
        ...

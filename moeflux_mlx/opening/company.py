"""Interfaces of the other processes that run the same model with this one. Nothing here knows the transport."""

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol

import mlx.core as mx

from ..driving.session import Session, SessionOptions
from ..experts.routing import RoutedExpertsCall
from ..experts.source import ExpertLoader
from ..model.decoder import Model
from ..planning.budget import Planner
from ..planning.memory_plan import MemoryPlan
from ..text.tokenizer import TokenizerWrapper
from .weights import ModelWeights

if TYPE_CHECKING:
    from typing_extensions import Unpack


class Agreed(Protocol):
    """What the processes agreed on before loading a model, and the memory plan of this one."""

    @property
    def plan(self) -> MemoryPlan: ...

    def experts(self, source: ExpertLoader, prefetch: str) -> RoutedExpertsCall:
        """The object that computes routed experts in place of `RoutedExperts`."""

    def loading(self, nbytes: int) -> AbstractContextManager[None]:
        """A context manager in which a model of `nbytes` is loaded; at its end it waits for the other processes."""


class Company(Protocol):
    """All processes that run the model, including this one."""

    def io_mode(self, asked: str, weights: ModelWeights) -> str:
        """The I/O mode of this process if the user asked for `asked`."""

    def meet(
        self,
        weights: ModelWeights,
        planner: Planner,
        dtype: mx.Dtype,
        bits: int,
    ) -> Agreed:
        """Plans memory for this process's experts, from the planner for all, and checks that all processes agree."""


class Leading(Protocol):
    """The leading process, which makes the others repeat every step of its sessions."""

    def session(self, model: Model, tokenizer: TokenizerWrapper, **options: "Unpack[SessionOptions]") -> Session:
        """Starts a new text; `options` as for `Session`."""

"""The cache of an indexer's keys of all positions."""

from abc import abstractmethod

from ..kinds import Indexer
from ..ops.backend import EitherArray
from ..ops.launch import Shape
from ..ops.positions import RECENT, Rows
from .growing import Stepping
from .layer_cache import LayerPart


class KeyCache(Stepping[LayerPart]):
    """An indexer's keys [B, 1, N, dim] of all positions, normed and rotated; its second array is empty. `part` is the
    mixer that has the indexer.
    """

    @property
    @abstractmethod
    def indexer(self) -> Indexer:
        """The indexer whose keys these are."""

    @property
    def rows(self) -> Rows:
        return (1, self.indexer.dim), (1, 0)

    @property
    def recent_shape(self) -> Shape:
        return RECENT, self.indexer.dim

    def parts(self, recent: EitherArray, length: int) -> tuple[EitherArray, EitherArray]:
        keys = recent[None, None, :length]
        return keys, keys[..., :0]

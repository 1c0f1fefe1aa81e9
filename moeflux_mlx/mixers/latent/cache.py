"""The caches of latent attention: latents and rotated keys; and with them the keys by which positions or blocks are
chosen."""

from ...caches.entries import EntriesCache
from ...caches.growing import Stepping
from ...caches.keys import KeyCache
from ...caches.layer_cache import LayerCache
from ...caches.ring import Ring
from ...kinds import Indexer
from ...ops import index
from ...ops.backend import EitherArray
from ...ops.launch import Shape
from ...ops.positions import RECENT, Rows
from . import op as latent
from .spec import Latent


def make_caches(mixer: Latent) -> tuple[LayerCache, ...]:
    """The empty caches of a layer with this mixer: latents; and the keys of its indexer or those of blocks."""
    if mixer.blocks is not None:
        return LatentCache(mixer), EntriesCache(mixer.blocks)
    if mixer.window is not None:
        return (WindowLatentCache(mixer),)
    has_keys = mixer.indexer is not None and not mixer.indexer.reuses
    return LatentCache(mixer), *([LatentKeyCache(mixer)] if has_keys else [])


def _takes_steps(part: Latent) -> bool:
    """Whether there are kernels for a token alone of the attention, and of its indexer."""
    takes = latent.takes_step(part.latent, part.rotated)
    return takes and (part.rule is None or index.takes_step(part.rule))


class LatentCache(Stepping[Latent]):
    """MLA: the normed latent [B, 1, N, latent] and the rotated shared key [B, 1, N, rotated]."""

    @property
    def rows(self) -> Rows:
        return (1, self.part.latent), (1, self.part.rotated)

    def takes_steps(self) -> bool:
        return _takes_steps(self.part)

    @property
    def recent_shape(self) -> Shape:
        return RECENT, self.part.latent + self.part.rotated

    def parts(self, recent: EitherArray, length: int) -> tuple[EitherArray, EitherArray]:
        entries, width = recent[None, None, :length], self.part.latent
        return entries[..., :width], entries[..., width:]


class WindowLatentCache(Ring[Latent], LatentCache):
    """The same of a window."""

    def __init__(self, part: Latent):
        assert part.window is not None
        super().__init__(part, part.window)


class LatentKeyCache(KeyCache[Latent]):
    """The keys by which positions are chosen. A snapshot has each behind the rotated key of its position."""

    extends_rows = True

    @property
    def indexer(self) -> Indexer:
        assert self.part.indexer is not None
        return self.part.indexer

    def takes_steps(self) -> bool:
        return _takes_steps(self.part)

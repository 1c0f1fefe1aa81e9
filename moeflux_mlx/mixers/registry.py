"""All ways of mixing tokens: the caches of a layer with one, and its module. Nothing else knows them all.

A cache has mlx-lm's protocol and is made for the part of a layer that it serves. Most caches of attention grow in steps
and can be trimmed; a `Ring` holds the newest positions and goes back a few; a `RecurrentCache` holds a state that has
absorbed every token and goes back to states that were kept.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from types import ModuleType
from typing import TypeVar

import mlx.nn as nn

from ..caches.layer_cache import LayerCache
from ..kinds import Mixer
from .compressed import cache as compressed_cache
from .compressed import module as compressed
from .compressed.spec import Compressed
from .conv import cache as conv_cache
from .conv import module as conv
from .conv.spec import ShortConv
from .delta import cache as delta_cache
from .delta import module as delta
from .delta.spec import Delta
from .grouped import cache as grouped_cache
from .grouped import module as grouped
from .grouped.spec import GroupedQuery
from .latent import cache as latent_cache
from .latent import module as latent
from .latent.spec import Latent
from .mamba import cache as mamba_cache
from .mamba import module as mamba
from .mamba.spec import Mamba2

T = TypeVar("T")
PARTS_OF: dict[type[Mixer], tuple[ModuleType, ModuleType]] = {
    GroupedQuery: (grouped_cache, grouped),
    Latent: (latent_cache, latent),
    Compressed: (compressed_cache, compressed),
    Delta: (delta_cache, delta),
    Mamba2: (mamba_cache, mamba),
    ShortConv: (conv_cache, conv),
}

KEPT_FLOAT32 = frozenset(name for _, module in PARTS_OF.values() for name in module.KEPT_FLOAT32)
USUAL: frozenset[str] = frozenset()  # no other form than the usual ones
FORMS = frozenset(name for _, module in PARTS_OF.values() for name in module.FORMS)


def make_caches(mixer: Mixer) -> tuple[LayerCache, ...]:
    """The empty caches of a layer with this mixer, the mixer's own first."""
    cache, _ = PARTS_OF[type(mixer)]
    made: tuple[LayerCache, ...] = cache.make_caches(mixer)
    return made


def cache_numbers(mixers: Sequence[Mixer]) -> tuple[range, ...]:
    """For each layer, the numbers of its caches among all of a text."""
    counts = [len(make_caches(mixer)) for mixer in mixers]
    return tuple(range(end - count, end) for count, end in zip(counts, accumulate(counts), strict=True))


def by_layer(numbers: Iterable[range], cache: Sequence[T]) -> list[Sequence[T]]:
    """The caches of each layer, of all of a text; `numbers`: from `cache_numbers`."""
    return [cache[own.start : own.stop] for own in numbers]


def each_cache(mixers: Mapping[Mixer, int]) -> Iterator[tuple[LayerCache, int]]:
    """An empty cache of each kind in a model, and how many there are. `mixers`: number of layers of each kind."""
    return ((cache, count) for mixer, count in mixers.items() for cache in make_caches(mixer))


def stored_forms(names: Iterable[str]) -> frozenset[str]:
    """Which other forms of mixers' tensors than the usual ones a checkpoint has, by the names of its tensors."""
    return FORMS.intersection(part for name in names for part in name.split("."))


def module_of(mixer: Mixer, hidden_size: int, eps: float, forms: frozenset[str]) -> nn.Module:
    """The module of a layer with this mixer, for hidden states of `hidden_size` values. `forms`: those that
    `stored_forms` found in its checkpoint.
    """
    _, module = PARTS_OF[type(mixer)]
    made: nn.Module = module.make_module(mixer, hidden_size, eps, forms)
    return made


def untrimmable_bytes(mixers: Mapping[Mixer, int], itemsize: int) -> int:
    """Bytes of one text's states in the layers whose caches cannot be cut, with entries of `itemsize` bytes. `mixers`:
    number of layers of each kind.
    """
    return sum(count * cache.kept_bytes(itemsize) for cache, count in each_cache(mixers))

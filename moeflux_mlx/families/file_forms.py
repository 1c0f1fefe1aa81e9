"""What some files say of ways of mixing tokens in a form of their own; their readers ask here."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from ..kinds import Mixer
from ..mixers.delta.spec import Delta
from ..mixers.grouped.spec import GroupedQuery
from ..mixers.latent.spec import Latent
from ..mixers.mamba.spec import Mamba2


class Mflx(NamedTuple):
    """What the header of MFLX, moeflux's format of a text's state, says of a layer besides its heads (the format stands
    in `state/snapshot.py`): the values of the two states of a layer that does not attend; the values per position of a
    layer that caches latents, and of its rotated keys. 0: the layer has no such thing.
    """

    conv: int = 0
    state: int = 0
    latent: int = 0
    rotated: int = 0


def mflx_of(mixer: Mixer) -> Mflx | None:
    """What MFLX says of a layer with this mixer; None: MFLX cannot express its state."""
    if isinstance(mixer, GroupedQuery):
        is_plain = mixer.window is None and mixer.value_width == mixer.head_dim and mixer.blocks is None
        return Mflx() if is_plain else None
    if isinstance(mixer, Latent):
        is_whole = mixer.indexer is None and mixer.blocks is None and mixer.window is None
        return Mflx(latent=mixer.latent, rotated=mixer.rotated) if is_whole else None
    if isinstance(mixer, Delta | Mamba2) and mixer.ngrams is None:
        return Mflx(conv=math.prod(mixer.conv_shape), state=math.prod(mixer.state_shape))
    return None


def telling_convolution(mixer: Mixer) -> tuple[str, tuple[int, int, int]] | None:
    """The name, behind the layer's, of a convolution [channels, 1, taps] that MLX conversions store with its axes
    moved, and its published shape: it tells who wrote a checkpoint. None: there is no such tensor.
    """
    if not isinstance(mixer, Delta) or mixer.channel_decay:
        return None
    return "linear_attn.conv1d.weight", (mixer.channels, 1, mixer.taps)


class HeadStack(NamedTuple):
    """Some rows of every head of a matrix [heads * rows, columns], as a stack [heads, rows, columns], or [heads,
    columns, rows] if `swapped`: from the row `first` on, `number` of them. `name`: of the stack.
    """

    name: str
    first: int
    number: int
    swapped: bool = False


def stacks_of_heads(mixer: Mixer) -> tuple[str, int, Sequence[HeadStack]] | None:
    """The name of a matrix, its number of heads, and the stacks that mlx-lm stores instead; None: there is none."""
    if not isinstance(mixer, Latent):
        return None
    keys = HeadStack("embed_q", 0, mixer.nope, swapped=True)
    return "kv_b_proj", mixer.heads, (keys, HeadStack("unembed_out", mixer.nope, mixer.value))

"""What every way of mixing tokens answers about itself."""

from typing import Any, Literal, NamedTuple, Protocol

from .ngrams import NGrams
from .rotation import Rotation


class Attending(Protocol):
    """A mixer that attends to earlier positions: how many heads of queries it has, and how many of keys and values; the
    width of a query; and how queries and keys are rotated, None: positions are not encoded.
    """

    @property
    def heads(self) -> int: ...

    @property
    def kv_heads(self) -> int: ...

    @property
    def head_dim(self) -> int: ...

    @property
    def rotation(self) -> Rotation | None: ...


class Recurrent(Protocol):
    """A mixer that keeps a state of fixed size for each text. It has two parts: the last inputs of the convolution, and
    the matrices that all tokens have changed.
    """

    @property
    def conv_shape(self) -> tuple[int, int]: ...

    @property
    def state_shape(self) -> tuple[int, int, int]: ...


class Mflx(NamedTuple):
    """What the header of MFLX, moeflux's format of a text's state, says of a layer besides its heads (the format stands
    in `state/snapshot.py`): the values of the two states of a layer that does not attend; the values per position of a
    layer that caches latents, and of its rotated keys. 0: the layer has no such thing.
    """

    conv: int = 0
    state: int = 0
    latent: int = 0
    rotated: int = 0


class Mixer:
    """The base class of all ways of mixing tokens, which are frozen dataclasses.

    It has no fields. A property of it must not have the name of a field that has no default: the dataclass would take
    the property for the field's default.
    """

    @property
    def attention(self) -> Attending | None:
        """The mixer itself if it attends to earlier positions; None: it keeps a state of fixed size."""
        return None

    @property
    def has_own_choice(self) -> bool:
        """Whether it needs no layer before it to choose the positions that it attends to."""
        return True

    @property
    def ngrams(self) -> NGrams | None:
        """The n-grams that are added before it; None: none."""
        return None

    @property
    def rounds_keys(self) -> bool:
        """Whether its cache can round keys and values to 8 bits."""
        return False

    @property
    def kv_bits(self) -> Literal[8] | None:
        """Bits to which its cache rounds keys and values; None: unchanged, or there are none."""
        return None

    def with_kv_bits(self, kv_bits: Literal[8] | None) -> "Mixer":
        """The mixer with keys and values rounded to so many bits, None: unchanged; itself if it cannot round them."""
        return self

    @property
    def mflx(self) -> Mflx | None:
        """What MFLX says of a layer with it; None: MFLX cannot express its state."""
        return None

    @property
    def flat_fields(self) -> dict[str, Any]:
        """The fields by which the first release described it, for digests in saved prompts. They never change; a mixer
        that came later has none.
        """
        return {}

    @property
    def convolution(self) -> tuple[str, tuple[int, int, int]] | None:
        """The name, behind the layer's, of a convolution [channels, 1, taps] that MLX conversions store with its axes
        moved, and its published shape: it tells who wrote a checkpoint. None: there is no such tensor.
        """
        return None

    def check(self) -> None:
        """Checks the conditions between its fields. Raises ConfigError with the names of the configuration's fields."""
        raise NotImplementedError

    @property
    def widths(self) -> tuple[int, ...]:
        """The widths of the rows that its operations take."""
        raise NotImplementedError

    def temporaries(self, tokens: int, positions: int) -> int:
        """Number of values that exist at once while `tokens` attend over `positions`, without scores."""
        raise NotImplementedError

    def scores(self, tokens: int, positions: int) -> int:
        """Number of scores that exist at once while `tokens` attend over `positions`."""
        raise NotImplementedError

"""What every way of mixing tokens answers about itself."""

from typing import Protocol

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


class Mixer:
    """The base class of all ways of mixing tokens, which are frozen dataclasses.

    It has no fields. A property of it must not have the name of a field that has no default: the dataclass would take
    the property for the field's default.
    """

    @property
    def attention(self) -> Attending | None:
        """The mixer itself if it attends to earlier positions; None: it keeps a state of fixed size."""
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

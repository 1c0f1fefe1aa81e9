"""What every way of mixing tokens answers about itself."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Literal, Protocol

from .convolution import ShortConvolution
from .feed_forward import MatrixExperts
from .ngrams import NGrams
from .rotation import Rotation


def product_operations(rows: int, inner: int, outer: int) -> float:
    """[rows, inner] times [inner, outer]: a multiplication and an addition for each."""
    return 2.0 * rows * inner * outer


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


class Mixer(ABC):
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
    def inputs(self) -> int:
        """How many inputs it has, side by side. If there are several, their norms are the mixer's, not the layer's."""
        return 1

    @property
    def branches(self) -> ShortConvolution | None:
        """What both parts of its layer make passes this before it is added to the stream; None: nothing. The last two
        caches of the layer are theirs.
        """
        return None

    @property
    def experts(self) -> MatrixExperts | None:
        """Experts of its own, whose records lie with those of routed experts; None: none."""
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

    @abstractmethod
    def check(self) -> None:
        """Checks the conditions between its fields. Raises ConfigError with the names of the configuration's fields."""

    @property
    @abstractmethod
    def widths(self) -> tuple[int, ...]:
        """The widths of the rows that its operations take."""

    def seeing_all(self, first: int, count: int) -> int:
        """How many of `count` tokens from the place `first` on attend to all that they see; by default each does."""
        return count

    @abstractmethod
    def temporaries(self, tokens: int, positions: int) -> int:
        """Number of values that exist at once while `tokens` are mixed and `positions` are seen, without scores."""

    def scores(self, tokens: int, positions: int) -> int:
        """Scores of all heads that exist at once besides `temporaries`; by default there are none."""
        return 0

    @property
    def span_heads(self) -> tuple[int, int, int] | None:
        """Its heads of queries, and the widths of their keys and values, if tokens of a prompt attend to all that they
        see: then a GPU may keep no scores. None: it keeps them, or there are none.
        """
        return None

    def fused_temporaries(self, tokens: int, positions: int) -> int:
        """`temporaries` of a GPU that keeps no scores; by default they are the same."""
        return self.temporaries(tokens, positions)

    def attends_at_once(self, positions: int) -> bool:
        """Whether such a GPU attends to so many positions, of all texts, with all heads at once; by default it does."""
        return True

    # ---- what it costs

    @property
    @abstractmethod
    def columns(self) -> int:
        """Columns of the projections from the hidden state and back to it."""

    def own_operations(self, tokens: int) -> float:
        """Other multiplications and additions for `tokens` tokens. Those that a GPU does more slowly than products
        count for more. By default there are none.
        """
        return 0.0

    def attended(self, tokens: int, positions: int) -> float:
        """Multiply-adds of scores, and of the sums weighed by them, if each of `tokens` tokens sees `positions`. By
        default there are none.
        """
        return 0.0

    def native_temporaries(self, tokens: int, positions: int) -> int:
        """`temporaries` of the CPU's native kernels, which compute at once; by default they are the same."""
        return self.temporaries(tokens, positions)

    @property
    def attends_natively(self) -> bool:
        """Whether those kernels also attend, without all scores at once; otherwise MLX's operations do."""
        return True

    @property
    def handed_on(self) -> int:
        """How many positions a token chooses of which later layers reuse the choice; by default none."""
        return 0

    @property
    def borrowed(self) -> int:
        """Values of each entry that it takes from an earlier layer; by default it takes none."""
        return 0

    @property
    def lent(self) -> int:
        """Values of each token that it hands on to later layers; by default none."""
        return 0

    # ---- how it is called

    @property
    def module_name(self) -> str:
        """The name of its module in checkpoints."""
        return "self_attn"

    @property
    @abstractmethod
    def title(self) -> str:
        """Its name for users."""

    def moments(self, longest: int) -> Iterator[tuple[str, int]]:
        """The states of a text of at most `longest` positions in which a token runs other kernels than at its start, as
        (name, number of positions before the token). By default only the first in which the token does not attend to
        all that it sees.
        """
        seen = self.seeing_all(0, longest)
        if seen < longest:
            yield "chosen positions", seen

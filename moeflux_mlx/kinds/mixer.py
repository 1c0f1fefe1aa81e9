"""What every way of mixing tokens answers about itself."""

from collections.abc import Iterator


def product(rows: int, inner: int, outer: int) -> float:
    """[rows, inner] times [inner, outer]: a multiplication and an addition for each."""
    return 2.0 * rows * inner * outer


class Mixer:
    """A way of mixing tokens: a part of a layer in which tokens meet. Each is a frozen dataclass of its switches.

    The base class has no fields, because saved prompts are known by the names of classes and fields.
    """

    @property
    def widths(self) -> tuple[int, ...]:
        """The widths of the rows that its operations take."""
        raise NotImplementedError

    def seeing_all(self, first: int, count: int) -> int:
        """How many of `count` tokens from the place `first` on attend to all that they see; by default each does."""
        return count

    def temporaries(self, tokens: int, positions: int) -> int:
        """Number of values that exist at once while `tokens` are mixed and `positions` are seen, without scores."""
        raise NotImplementedError

    def scores(self, tokens: int, positions: int) -> int:
        """Scores of all heads that exist at once besides `temporaries`; by default there are none."""
        return 0

    # ---- what it costs

    @property
    def columns(self) -> int:
        """Columns of the projections from the hidden state and back to it."""
        raise NotImplementedError

    def own_operations(self, tokens: int) -> float:
        """Other multiplications and additions in proportion to `tokens`: as many as a GPU does at its full rate in the
        time that they take. By default there are none.
        """
        return 0.0

    def attended(self, tokens: int) -> float:
        """Multiplications and additions of a prompt's scores, and of the sums weighed by them: half of the pairs of its
        tokens are in order. By default there are none.
        """
        return 0.0

    def native_temporaries(self, tokens: int, positions: int) -> int:
        """`temporaries` of the CPU's native kernels, which compute at once; by default they are the same."""
        return self.temporaries(tokens, positions)

    @property
    def handed_on(self) -> int:
        """How many positions a token chooses of which later layers reuse the choice; by default none."""
        return 0

    # ---- how it is listed

    @property
    def title(self) -> str:
        """Its name for users."""
        raise NotImplementedError

    def moments(self, longest: int) -> Iterator[tuple[str, int]]:
        """The states of a text of at most `longest` positions in which a token runs other kernels than at its start, as
        (name, number of positions before the token). By default only the first in which the token does not attend to
        all that it sees.
        """
        seen = self.seeing_all(0, longest)
        if seen < longest:
            yield "chosen positions", seen

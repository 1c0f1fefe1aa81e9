"""What all traced stand-ins of caches have in common, and what makes them."""

from typing import Any, ClassVar, Protocol, TypeAlias

# Of a token of a step: an array, a position, or a function that gives the mask of what the token sees.
StepInput: TypeAlias = Any


class Traced:
    """The traced stand-in of a cache, in a class of its own.

    A cache decides in Python by its position whether its arrays must grow, where a ring wraps round, and whether an
    entry ends; while a graph is traced, a position is an array without a value. One class for both would have two
    branches in each of these methods. The class is also a part of the key by which each token's graph is found.

    Attributes:
        num_inputs: number of arrays that it is made of, before the first token's place.
        num_later: number of arrays besides its place that each later token of the same step has.
        num_outputs: length of `arrays`.
        arrays: of fixed shape, as they are after the token.
        offset, position: the token's place and rotary position, int32 arrays of no axes.
    """

    num_inputs: ClassVar[int] = 2
    num_later: ClassVar[int] = 0
    num_outputs: ClassVar[int] = 2
    arrays: list[Any]
    offset: Any
    position: Any

    def __init__(self, *given: StepInput):
        """`given`: the arrays, and what `go_on` takes of the first token."""
        count = len(given) - self.num_later - 3
        self.arrays = list(given[:count])
        self.go_on(*given[count:])

    def go_on(self, *later: StepInput) -> None:
        """Begins a token: its `num_later` arrays, place, rotary position, and a function that gives the mask
        [1, 1, 1, capacity] of what it sees, the same for all layers.
        """
        self.offset, self.position, self._seen = later


class Elsewhere(Traced):
    """The stand-in of a cache whose arrays are joined with those of other sequences."""

    num_inputs, num_outputs = 0, 0


class TracedKind(Protocol):
    """Makes stand-ins for the tokens of a step from their arrays; the numbers are those of `Traced`."""

    @property
    def num_inputs(self) -> int: ...

    @property
    def num_later(self) -> int: ...

    @property
    def num_outputs(self) -> int: ...

    def __call__(self, *given: StepInput) -> Traced: ...

"""How queries are scaled by their positions, so that attention stays as sharp in long texts."""

from dataclasses import dataclass


@dataclass(frozen=True)
class QueryScale:
    """The factor of a query at position p: 1 + beta * ln(1 + floor((p + first) / original_max_position_embeddings)).

    Llama 4 has it, with `first` 1 (transformers, `Llama4TextAttention`), and others with longer contexts than they were
    trained on.
    """

    beta: float
    original_max_position_embeddings: int
    first: int = 0


@dataclass(frozen=True)
class QueryGrowth:
    """The factor of a query at position p: (1 + (p + 1) / length) ** exponent (transformers, `BeamAttention`)."""

    exponent: float
    length: int


@dataclass(frozen=True)
class QueryLog:
    """The factor of a query at position p: 1 + beta * ln(max((p + 1) / floor, 1)) (transformers, Inkling)."""

    beta: float
    floor: int


QueryFactor = QueryScale | QueryGrowth | QueryLog

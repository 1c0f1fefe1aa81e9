"""How queries and keys are rotated by their positions."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Yarn:
    """YaRN frequency scaling (arXiv:2309.00071), with DeepSeek's two magnitude scales."""

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    attention_factor: float | None = None
    truncate: bool = True


@dataclass(frozen=True)
class Llama3:
    """Llama 3.1's frequency scaling: slow frequencies are divided by `factor`, with a ramp between two wavelengths."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True)
class Rotation:
    """Rotary position embedding of the first `dims` values of a head; `interleaved` pairs neighbours.

    `pairs`: how many pairs are rotated, those with the highest frequencies of a full head (Gemma 4's "proportional"
    rotation, `_compute_proportional_rope_parameters` of transformers); None: all. `axes`: for each pair of values, the
    position that rotates it: 0, that in the text, 1, an image's row, or 2, its column; for a token of text all three
    are equal (Qwen2-VL, arXiv:2409.12191, section 2.1). None: the first. `learned`: the frequency of each pair is
    multiplied by exp of a number that the model has learned.
    """

    dims: int
    theta: float
    yarn: Yarn | None = None
    interleaved: bool = False
    llama3: Llama3 | None = None
    axes: tuple[int, ...] | None = None
    pairs: int | None = None
    learned: bool = False

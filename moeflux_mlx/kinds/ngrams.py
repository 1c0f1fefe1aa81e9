"""N-grams, which may stand beside a layer's mixer."""

from dataclasses import dataclass

from .limits import check_width

NUMBER_BYTES = 16  # per row of a table: its number, and its place among the rows that are read


@dataclass(frozen=True)
class NGrams:
    """Rows of large tables that are chosen by a token and those before it, and added to all streams of a layer before
    its mixer (transformers, `Qwen4ExpTextPLELayer`).

    For 2-grams, then 3-grams and so on, there are equally many heads; each takes a row of `width` values out of its own
    part of the table, by a hash. The result goes through a causal convolution of `taps` inputs, whose distance is the
    length of the longest n-gram.

    Attributes:
        sizes: rows of each head's part, which follow one another.
        multipliers: odd factors of a token and of those before it, the newest first; as many as the longest n-gram has
            tokens.
        rows: number of rows of the table, including unused ones.
        end: the token that ends a text; no n-gram goes back beyond one. It also stands for those before the first.
        taps: 0: there is no convolution (DeepSeek-V4.1's Engram; mlx-vlm 0.7.10, `deepseek_v41/engram.py`).
        channels: channels of the convolution, those of all streams.
        ends_texts: False: `end` only stands for the tokens before the first.
        compressed: tokens are replaced by one of so many numbers before they are hashed, which tokens share that are
            spelt alike; a file of the checkpoint says which. 0: they are not.
        rounds: rows are rounded to 8 bits in blocks (`ops/block_rounding.py`).
    """

    sizes: tuple[int, ...]
    multipliers: tuple[int, ...]
    rows: int
    width: int
    end: int
    taps: int
    channels: int
    ends_texts: bool = True
    compressed: int = 0
    rounds: bool = False

    def check(self) -> None:
        """Checks the conditions between its fields. Raises ConfigError with the names of the configuration's fields."""
        check_width("hc_count * hidden_size", self.channels)
        check_width("ple_embed_dim", self.embedded)

    @property
    def longest(self) -> int:
        """Tokens of the longest n-gram."""
        return len(self.multipliers)

    @property
    def remembered(self) -> int:
        """Inputs of the convolution before the newest that it sees."""
        return max(self.taps - 1, 0) * self.longest

    @property
    def embedded(self) -> int:
        """Values of all rows of a token."""
        return len(self.sizes) * self.width

    @property
    def row_bytes(self) -> int:
        """Bytes of all rows of a token, and of their numbers."""
        return 2 * self.embedded + NUMBER_BYTES * len(self.sizes)

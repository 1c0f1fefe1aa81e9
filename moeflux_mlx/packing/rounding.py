"""How a conversion makes codes of floats: by rounding each matrix alone, or by codes that were made before."""

from dataclasses import dataclass
from typing import Protocol

import mlx.core as mx

from ..quant import Quant
from ..rounding.methods import FIT
from .ggml import Codes
from .matrix import Matrix

ALL = slice(0, None, 1)


class Rounding(Protocol):
    """Makes codes of floats."""

    @property
    def method(self) -> str:
        """Its name, which goes with what a conversion's bytes depend on."""

    def codes(self, path: str, matrix: Matrix, quant: Quant, rows: slice = ALL, dtype: mx.Dtype = mx.bfloat16) -> Codes:
        """The codes of some rows of a matrix, all parts of the form but a grid, with floating scales and biases of
        `dtype`; `path`: the module path of what they are stored for.

        Raises:
            ModelFileError: a file cannot be read, or a value is not finite.
        """


@dataclass(frozen=True)
class Alone:
    """Rounds each matrix by itself, by a method of `rounding.methods`."""

    method: str = FIT

    def codes(self, path: str, matrix: Matrix, quant: Quant, rows: slice = ALL, dtype: mx.Dtype = mx.bfloat16) -> Codes:
        parts = matrix.quantized(quant, self.method, rows.start, rows.stop, dtype)
        return tuple(part[:: rows.step] for part in parts)

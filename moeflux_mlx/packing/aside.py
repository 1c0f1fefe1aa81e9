"""Keeps a checkpoint's image encoders and draft heads unchanged in a separate file.

Nothing here knows what a tensor is for; `families/names.py` does. `vision` reads image encoders from it.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from ..families.names import is_aside
from ..formats.checkpoint import Tensor, read_bytes
from .resident import TensorFile
from .sources import WrittenTensor

NAME = "aside.safetensors"


@dataclass(frozen=True)
class Copied:
    """A tensor of any dtype under its own name."""

    tensor: Tensor

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.tensor,)

    @property
    def written(self) -> tuple[WrittenTensor, ...]:
        return (WrittenTensor(self.tensor.name, self.tensor.dtype, self.tensor.shape),)

    def arrays(self) -> Iterator[mx.array]:
        """Yields the tensor's bytes."""
        data = read_bytes(self.tensor.file, self.tensor.offset, self.tensor.nbytes)
        yield mx.array(np.frombuffer(data, np.uint8))


def aside_files(tensors: Iterable[Tensor], layers: int) -> list[TensorFile]:
    """The file of those `tensors` of a checkpoint that are kept, or no file. `layers`: number of the model's layers."""
    kept = sorted((one for one in tensors if is_aside(one.name, layers)), key=lambda one: one.name)
    return [TensorFile(NAME, tuple(map(Copied, kept)))] if kept else []

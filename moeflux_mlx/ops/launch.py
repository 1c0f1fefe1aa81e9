"""The launcher of GPU kernels: text from `metal/`, built by MLX, called with what depends on shapes alone.

Kernels are written once, in Metal Shading Language: `mx.fast.metal_kernel` builds them on Apple GPUs,
`mx.fast.cuda_kernel` builds the same text behind `metal/cuda_shim.h` on NVIDIA GPUs. A kernel that does not build
raises when it is evaluated; nothing falls back in silence. Which kernel and tile runs depends on the backend and the
shapes alone, so the bits of a result do not depend on slot numbers or on what else memory holds.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import mlx.core as mx

from ..errors import RequestError
from ..files import directory

SHARED_BYTES = 32768  # of a threadgroup's memory, on every GPU
LEAST_ELEMENTS = 8  # MLX hands Metal an input of fewer as `constant`, which the text does not take

Shape = tuple[int, ...]


def require(condition: bool, message: str) -> None:
    """Raises RequestError with `message` unless `condition` holds."""
    if not condition:
        raise RequestError(message)


def ceildiv(a: int, b: int) -> int:
    return -(-a // b)


def _text(name: str) -> str:
    """A file of `metal/` without comments and indentation: MLX copies and hashes a kernel's text at every call."""
    lines = (line.strip() for line in (directory("metal") / name).read_text("ascii").splitlines())
    return "\n".join(line for line in lines if line and not line.startswith("//")) + "\n"


@cache
def _headers() -> list[str]:
    return sorted(file.name for file in directory("metal").iterdir() if file.name.endswith(".h.metal"))


def _used(source: str, form: str) -> list[str]:
    """The headers that a text needs, itself or for one of them; that of `form` stands behind codes.h.metal."""
    own = f"{form}.h.metal"
    used: list[str] = []
    for name in sorted(_headers(), key=lambda name: "codes.h.metal~" if name == own else name, reverse=True):
        if name == own or f"{name.split('.')[0]}_" in source:
            used.insert(0, name)
            source += _text(name)
    return used


@dataclass(frozen=True)
class Kernel:
    """`metal/{name}.metal`: the names of its inputs and outputs, separated by spaces.

    `name*3` in place of a name: three arrays, which the text has as name[0] to name[2].
    `form`: `metal/{form}.h.metal` goes in too, where several headers define the same functions, each for other codes.
    """

    name: str
    inputs: str
    outputs: str
    form: str = ""

    def build(self, target: str) -> Any:
        """MLX's object for it, compiled at first use with each set of template arguments.

        A header `metal/{name}.h.metal` goes in where a word begins with its name: what it defines does. It may use
        headers whose names come before its own. CUDA's build hashes the whole text at every launch.
        """
        source = _text(f"{self.name}.metal")
        header = "".join(map(_text, _used(source, self.form)))
        (inputs, joined), (outputs, also) = _pieces(self.inputs), _pieces(self.outputs)
        make: Any = mx.fast.metal_kernel
        if target == "cuda":
            header = _text("cuda_shim.h") + header
            make = mx.fast.cuda_kernel
        return make(
            name=f"moeflux_{self.name}{self.form}",
            input_names=inputs,
            output_names=outputs,
            header=header,
            source=joined + also + source,
        )


def _pieces(names: str) -> tuple[list[str], str]:
    """What is passed for `names`, and the lines of text that join what is passed in pieces."""
    passed, lines = [], ""
    for name, _, count in (name.partition("*") for name in names.split()):
        pieces = [f"{name}{i}" for i in range(int(count))] if count else [name]
        passed += pieces
        lines += f"decltype({name}0) {name}[] = {{{', '.join(pieces)}}};\n" if count else ""
    return passed, lines


@cache
def _built(target: str, kernel: Kernel) -> Any:
    return kernel.build(target)


@dataclass(frozen=True)
class Launch:
    """Everything of a kernel call but its inputs. Depends on shapes and dtypes only, so it is made once for each.

    Args:
        target: "metal" or "cuda".
        kernel: what runs.
        template: arguments of the text, by name.
        groups: threadgroups along both axes; MLX counts its grid in threads.
        threads: of a threadgroup.
        outputs: shape and dtype of each.
    """

    target: str
    kernel: Kernel
    template: dict[str, Any]
    groups: tuple[int, int]
    threads: int
    outputs: Sequence[tuple[Shape, mx.Dtype]]

    @cached_property
    def arguments(self) -> dict[str, Any]:
        return {
            "template": list(self.template.items()),
            "grid": (self.groups[0] * self.threads, self.groups[1], 1),
            "threadgroup": (self.threads, 1, 1),
            "output_shapes": [shape for shape, _ in self.outputs],
            "output_dtypes": [dtype for _, dtype in self.outputs],
        }

    def __call__(self, *inputs: mx.array) -> list[mx.array]:
        return _built(self.target, self.kernel)(inputs=list(inputs), **self.arguments)


@cache
def count(n: int) -> mx.array:
    """The number of steps or rows as an array: not a template argument, or each length would be compiled.

    Made from values, not by an operation: what is not evaluated yet belongs to the thread that made it.
    """
    return mx.array([n] * LEAST_ELEMENTS, mx.int32)


@cache
def number(value: float) -> mx.array:
    """A float as an array that a kernel takes."""
    return mx.array([value] * LEAST_ELEMENTS, mx.float32)

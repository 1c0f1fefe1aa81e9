"""The launcher of GPU kernels: text from `metal/`, built by MLX, called with what depends on shapes alone.

Kernels are written once, in Metal Shading Language: `mx.fast.metal_kernel` builds them on Apple GPUs,
`mx.fast.cuda_kernel` builds the same text behind `metal/cuda_shim.h` on NVIDIA GPUs. A kernel that does not build
raises when it is evaluated; nothing falls back in silence. Which kernel and tile runs depends on the backend and the
shapes alone, so the bits of a result do not depend on slot numbers or on what else memory holds.
"""

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import accumulate, starmap
from math import prod
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from ..errors import RequestError
from ..files import directory
from .stand_ins import stand_ins

SHARED_BYTES = 32768  # of a threadgroup's memory, on every GPU
LEAST_ELEMENTS = 8  # MLX hands Metal an input of fewer as `constant`, which the text does not take
NEEDS = "// needs: "  # begins the first line of a text that uses headers
ALIGNED = 256  # bytes: where each of several arrays in one begins
# Of a threadgroup. A kernel that needs many registers has fewer than 1,024 on Apple's GPUs before the M3: 384 at least.
MOST_THREADS = {"metal": 256, "cuda": 1024}
TYPES = {
    **{mx.float32: "float", mx.bfloat16: "bfloat16_t", mx.float16: "float16_t"},
    **{mx.uint32: "uint32_t", mx.int32: "int32_t", mx.uint8: "uint8_t"},
}

Shape = tuple[int, ...]


class ArrayPiece(NamedTuple):
    """Values of `dtype` that lie one after another in `whole`, from byte `start` on."""

    whole: mx.array
    start: int
    dtype: mx.Dtype

    def array(self, *shape: int) -> mx.array:
        """A view of so many values."""
        first, size = self.start // self.whole.itemsize, prod(shape) * self.dtype.size // self.whole.itemsize
        return self.whole.reshape(-1)[first : first + size].view(self.dtype).reshape(shape)


def pack(arrays: Sequence[mx.array]) -> list[ArrayPiece]:
    """Copies arrays into one, so that a kernel takes them as one input: where each lies in it."""
    starts, parts = [0], []
    for array in arrays:
        codes = array.reshape(-1).view(mx.uint8)
        parts += [codes, mx.zeros(-codes.size % ALIGNED, mx.uint8)]
        starts.append(starts[-1] + codes.size + parts[-1].size)
    whole = mx.concatenate(parts)
    mx.eval(whole)
    return [ArrayPiece(whole, start, array.dtype) for start, array in zip(starts, arrays, strict=False)]


def in_turn(joined: mx.array, *parts: mx.array) -> list[ArrayPiece]:
    """Where `parts` lie in `joined`, which holds them one after another."""
    starts = accumulate((part.nbytes for part in parts), initial=0)
    return [ArrayPiece(joined, start, joined.dtype) for start, _ in zip(starts, parts, strict=False)]


# What a kernel is given under a name: an array, a part of one, or a number, which becomes a constant of the text.
Input = mx.array | ArrayPiece | float
# Of an input: its array among those that are handed over, and the byte and type that it begins with; or its value.
Place = tuple[int, int, mx.Dtype | None] | float


def placed(inputs: Sequence[Input]) -> tuple[list[mx.array], tuple[Place, ...]]:
    """The arrays that inputs lie in, each once, and where each input lies in them.

    What MLX does for a launch on the host grows with the arrays that it takes.
    """
    arrays: list[mx.array] = []
    places: list[Place] = []
    for given in inputs:
        if isinstance(given, float):
            places.append(given)
            continue
        whole, start, dtype = given if isinstance(given, ArrayPiece) else (given, 0, None)
        index = next((i for i, array in enumerate(arrays) if array is whole), len(arrays))
        if index == len(arrays):
            arrays.append(whole)
        places.append((index, start, dtype))
    return arrays, tuple(places)


def require(condition: bool, message: str) -> None:
    """Raises RequestError with `message` unless `condition` holds."""
    if not condition:
        raise RequestError(message)


def ceildiv(a: int, b: int) -> int:
    return -(-a // b)


def text_of(name: str) -> str:
    """A file of `metal/` without comments and indentation: MLX copies and compares a kernel's text at every call."""
    lines = (line.strip() for line in (directory("metal") / name).read_text("ascii").splitlines())
    return "\n".join(line for line in lines if line and not line.startswith("//")) + "\n"


@cache
def needs_of(name: str) -> list[str]:
    """The headers that a file of `metal/` names in its first line; {form} is a parameter of the kernel."""
    first = (directory("metal") / name).read_text("ascii").partition("\n")[0]
    return first.removeprefix(NEEDS).split() if first.startswith(NEEDS) else []


def headers_of(name: str, form: str) -> list[str]:
    """The headers that a file needs with `metal/{form}.h.metal`, each behind those that it needs itself."""
    ordered: list[str] = []
    for header in (one.format(form=form) for one in needs_of(name)):
        if not (directory("metal") / header).is_file():
            raise FileNotFoundError(f"metal/{name} needs {header}, which is not there")
        ordered += [one for one in (*headers_of(header, form), header) if one not in ordered]
    return ordered


@dataclass(frozen=True)
class Kernel:
    """`metal/{name}.metal`: the names of its inputs and outputs, separated by spaces.

    `name*3` in place of a name: three arrays, which the text has as name[0] to name[2].
    `form`: of `metal/{form}.h.metal`, for a text that needs it: such headers define the same functions, each for other
    codes.
    """

    name: str
    inputs: str
    outputs: str
    form: str = ""

    def build(self, target: str, constants: str, threads: int, places: tuple[Place, ...]) -> Any:
        """MLX's object for it, compiled at first use.

        The headers that the text needs go before it. CUDA's build hashes the text at every launch, so it is given the
        names of the files only. On Metal the header ends with an attribute of the kernel, which MLX begins right
        behind it (`threads_named`).
        """
        (names, first), (outputs, output_lines) = self._named(places), _several(self.outputs)
        source, first = text_of(f"{self.name}.metal"), constants + first + output_lines
        headers = headers_of(f"{self.name}.metal", self.form)
        make: Any = mx.fast.metal_kernel
        header = "".join(map(text_of, headers)) + threads_named(threads)
        if target == "cuda":
            make = mx.fast.cuda_kernel
            header = "".join(map(_include, ["cuda_shim.h", *headers]))
            source = _include(f"{self.name}.metal")
        return make(
            name=f"moeflux_{self.name}{self.form}_{threads}_{zlib.crc32(first.encode()):x}",
            input_names=names,
            output_names=outputs,
            header=header,
            source=first + source,
        )

    def _named(self, places: tuple[Place, ...]) -> tuple[list[str], str]:
        """Names of the arrays that are handed over, and the lines that declare inputs which are none of them."""
        names: dict[int, str] = {}
        inputs, joined = _several(self.inputs)
        named_places = list(zip(inputs, places, strict=True))
        for name, place in named_places:
            if not isinstance(place, float):
                index, _, dtype = place
                names.setdefault(index, name if dtype is None else f"{name}_")
        lines = []
        for name, place in named_places:
            if isinstance(place, float):
                lines.append(f"const float {name}[1] = {{{np.float32(place).item()!r}f}};\n")
            elif place[2] is not None:
                pointer = f"const device {TYPES[place[2]]}*"
                lines.append(f"{pointer} {name} = ({pointer})((const device char*){names[place[0]]} + {place[1]});\n")
            elif name != names[place[0]]:
                lines.append(f"auto {name} = {names[place[0]]};\n")
        return list(names.values()), "".join(lines) + joined


def threads_named(threads: int) -> str:
    """The end of a header that lets Metal's compiler keep to registers of which there are enough for `threads`."""
    return f"[[max_total_threads_per_threadgroup({threads})]]\n"


def _include(name: str) -> str:
    return f'#include "{directory("metal") / name}"\n'


def _several(names: str) -> tuple[list[str], str]:
    """What is passed for `names`, and the lines of text that join what several arrays stand for."""
    passed, lines = [], ""
    for name, _, count in (name.partition("*") for name in names.split()):
        arrays = [f"{name}{i}" for i in range(int(count))] if count else [name]
        passed += arrays
        lines += f"decltype({name}0) {name}[] = {{{', '.join(arrays)}}};\n" if count else ""
    return passed, lines


def _constant(name: str, value: int | float | mx.Dtype) -> str:
    """A line of text that declares it."""
    if isinstance(value, mx.Dtype):
        return f"using {name} = {TYPES[value]};\n"
    if isinstance(value, float):
        return f"constexpr float {name} = {np.float32(value).item()!r}f;\n"
    return f"constexpr int {name} = {value};\n"


@cache
def built(
    build: Callable[..., Any] | None,
    target: str,
    kernel: Kernel,
    constants: str,
    threads: int,
    places: tuple[Place, ...],
) -> Any:
    """What a launch calls: made by `build`, or by `Kernel.build`, once."""
    return (build or Kernel.build)(kernel, target, constants, threads, places)


@dataclass(frozen=True)
class Launch:
    """Everything of a kernel call but its inputs. Depends on shapes and dtypes only, so it is made once for each.

    Args:
        target: "metal" or "cuda".
        kernel: what runs.
        template: constants of the text by name, numbers and types.
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

    def __post_init__(self) -> None:
        assert self.threads <= MOST_THREADS[self.target], f"{self.kernel.name} asks for {self.threads} threads"

    @cached_property
    def constants(self) -> str:
        """The template as text: what MLX makes a template of cannot have the attribute that `Kernel.build` gives it."""
        return "".join(starmap(_constant, self.template.items()))

    @cached_property
    def arguments(self) -> dict[str, Any]:
        return {
            "grid": (self.groups[0] * self.threads, self.groups[1], 1),
            "threadgroup": (self.threads, 1, 1),
            "output_shapes": [shape for shape, _ in self.outputs],
            "output_dtypes": [dtype for _, dtype in self.outputs],
        }

    def __call__(self, *inputs: Input) -> list[mx.array]:
        arrays, places = placed(inputs)
        call = built(stand_ins().build, self.target, self.kernel, self.constants, self.threads, places)
        return call(inputs=arrays, **self.arguments)


class Reason(str):
    """Why a chooser takes no kernel, in a few words."""


NO_KERNELS = Reason("the default device has no kernels")


@cache
def count(n: int) -> mx.array:
    """The number of steps or rows as an array: not a template argument, or each length would be compiled.

    Made from values, not by an operation: what is not evaluated yet belongs to the thread that made it.
    """
    return mx.array([n] * LEAST_ELEMENTS, mx.int32)

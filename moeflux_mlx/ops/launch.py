"""Launches GPU kernels: reads their text from `metal/`, has MLX build it, and calls it with constants that depend on
shapes alone.

Kernels are written once, in Metal Shading Language: `mx.fast.metal_kernel` builds them on Apple GPUs,
`mx.fast.cuda_kernel` builds the same text behind `metal/cuda_shim.h` on NVIDIA GPUs. A kernel that does not build
raises an error when it is evaluated; there is no silent fallback. The kernel and tile depend only on the backend and
the shapes, so the bits of a result do not depend on slot numbers or other contents of memory.
"""

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, cached_property, partial
from itertools import accumulate, starmap
from math import prod
from typing import Any, NamedTuple, cast

import mlx.core as mx
import numpy as np

from ..errors import RequestError
from ..files import directory
from .stand_ins import stand_ins

SHARED_BYTES = 32768  # bytes of a threadgroup's memory on every GPU
MOST_ARRAYS = 31  # inputs and outputs that Metal passes to a kernel
LEAST_ELEMENTS = 8  # MLX passes smaller inputs to Metal as `constant`, which the text does not accept
NEEDS = "// needs: "  # begins the first line of a text that uses headers
ALIGNED = 256  # bytes: where each of several arrays in one begins
# Of a threadgroup. A kernel that needs many registers has fewer than 1,024 on Apple's GPUs before the M3: 384 at least.
MOST_THREADS = {"metal": 256, "cuda": 1024}
ROW = "threadgroup_position_in_grid.z"
WHOLE = {mx.array}  # the types of inputs none of which is a part or a number
ARRAYS = ("*", "@")  # signs in a name that stands for several arrays (`Kernel`)
TYPES = {
    **{mx.float32: "float", mx.bfloat16: "bfloat16_t", mx.float16: "float16_t"},
    **{mx.uint32: "uint32_t", mx.int32: "int32_t", mx.uint8: "uint8_t", mx.uint64: "uint64_t"},
}

# Metal's compiler makes one operation of a product and a sum where it chooses to, in every math mode, and may choose
# differently in two texts that must give the same bits. A text says metal::fma where it means one operation.
UNFUSED = "#pragma METAL fp contract(off)\n"
LEAST_NAMED = 64  # an Apple compiler dropped barriers of kernels that name at most 32 threads (MoltenVK issue 2711)
ANY_THREADS = 256  # of NVIDIA's GPUs: with 255 registers each

Shape = tuple[int, ...]
Built = Callable[..., list[mx.array]]  # a compiled kernel: MLX's object, or what a stand-in makes
Template = dict[str, Any]  # constants of a text by name: numbers, and types of MLX or of a header
Outputs = Sequence[tuple[Shape, mx.Dtype]]  # shape and dtype of each


class ArrayPiece(NamedTuple):
    """Consecutive values of `dtype` in `whole`, from byte `start` on."""

    whole: mx.array
    start: int
    dtype: mx.Dtype

    def array(self, *shape: int) -> mx.array:
        """A view of these values with the shape `shape`."""
        first, size = self.start // self.whole.itemsize, prod(shape) * self.dtype.size // self.whole.itemsize
        return self.whole.reshape(-1)[first : first + size].view(self.dtype).reshape(shape)


def pack(arrays: Sequence[mx.array]) -> list[ArrayPiece]:
    """Copies arrays into one, so that a kernel takes them as one input; returns the piece of each."""
    starts, parts = [0], []
    for array in arrays:
        codes = array.reshape(-1).view(mx.uint8)
        parts += [codes, mx.zeros(-codes.size % ALIGNED, mx.uint8)]
        starts.append(starts[-1] + codes.size + parts[-1].size)
    whole = mx.concatenate(parts)
    mx.eval(whole)
    return [ArrayPiece(whole, start, array.dtype) for start, array in zip(starts, arrays, strict=False)]


def in_turn(joined: mx.array, *parts: mx.array) -> list[ArrayPiece]:
    """The pieces of the first row of each part in `joined` [..., n], where rows of all parts are one after another."""
    count = joined.size // joined.shape[-1]
    starts = accumulate((part.nbytes // count for part in parts), initial=0)
    return [ArrayPiece(joined, start, joined.dtype) for start, _ in zip(starts, parts, strict=False)]


# The value of a kernel's input: an array, a part of one, or a number, which becomes a constant of the text.
Input = mx.array | ArrayPiece | float
# An input's array index, first byte and type; or its value.
InputPlace = tuple[int, int, mx.Dtype | None] | float


def placed(inputs: Sequence[Input], apart: Sequence[int] = ()) -> tuple[list[mx.array], tuple[InputPlace, ...]]:
    """The arrays that contain the inputs, each once, and the place of each input. MLX's work on the host grows with the
    number of arrays. `apart`: inputs that always get their own array, because a text must not depend on whether two
    of them happen to be the same.
    """
    if set(map(type, inputs)) == WHOLE and len(set(map(id, inputs))) == len(inputs):
        return list(cast(Sequence[mx.array], inputs)), _in_order(len(inputs))
    arrays: list[mx.array] = []
    places: list[InputPlace] = []
    indices: dict[int, int] = {}
    for number, given in enumerate(inputs):
        if isinstance(given, float):
            places.append(given)
            continue
        whole, start, dtype = given if isinstance(given, ArrayPiece) else (given, 0, None)
        index = indices.setdefault(id(whole), len(arrays))
        if number in apart:
            index = len(arrays)
        if index == len(arrays):
            assert dtype is None or whole.size >= LEAST_ELEMENTS, f"a part of an array of {whole.size} values"
            arrays.append(whole)
        places.append((index, start, dtype))
    return arrays, tuple(places)


@cache
def _in_order(arrays: int) -> tuple[InputPlace, ...]:
    """The places of inputs that are different arrays."""
    return tuple((i, 0, None) for i in range(arrays))


def require(condition: bool, message: str) -> None:
    """Raises RequestError with `message` unless `condition` holds."""
    if not condition:
        raise RequestError(message)


def ceildiv(a: int, b: int) -> int:
    return -(-a // b)


@cache
def text_of(name: str) -> str:
    """A file of `metal/` without comments and indentation: MLX copies and compares a kernel's text at every call."""
    lines = (line.strip() for line in (directory("metal") / name).read_text("ascii").splitlines())
    return "\n".join(line for line in lines if line and not line.startswith("//")) + "\n"


@cache
def needs_of(name: str) -> list[str]:
    """The headers that a file of `metal/` names in its first line; {form} and {units} are parameters of the kernel."""
    first = (directory("metal") / name).read_text("ascii").partition("\n")[0]
    return first.removeprefix(NEEDS).split() if first.startswith(NEEDS) else []


def headers_of(name: str, form: str, units: str = "") -> list[str]:
    """The headers that a file needs with these parameters, each behind those that it needs itself."""
    ordered: list[str] = []
    for header in (one.format(form=form, units=units) for one in needs_of(name)):
        if not (directory("metal") / header).is_file():
            raise FileNotFoundError(f"metal/{name} needs {header}, which does not exist")
        ordered += [one for one in (*headers_of(header, form, units), header) if one not in ordered]
    return ordered


@dataclass(frozen=True)
class KernelText:
    """The arguments of `mx.fast.metal_kernel` and `mx.fast.cuda_kernel`. A name is never that of two texts."""

    name: str
    input_names: Sequence[str]
    output_names: Sequence[str]
    header: str
    source: str


@dataclass(frozen=True)
class Kernel:
    """`metal/{name}.metal`: the names of its inputs and outputs, separated by spaces.

    `name*3` in place of a name: three arrays, which the text has as name[0] to name[2]. `name@3`: an array for each of
    three rows of a step, along the grid's last axis; the text has its own row's as `name`. `name+SIZE`: an array with
    SIZE values, a constant of the template, for each row; `name` points to those of its own row.
    `form`: of `metal/{form}.h.metal`, for a text that needs it: such headers define the same functions, each for other
    codes.
    `units`: of `metal/{units}.h.metal`, likewise: each for products of small matrices on another GPU.
    `memory`: bytes of a threadgroup's memory of a text that has none by itself on CUDA, where that may be larger.
    """

    name: str
    inputs: str
    outputs: str
    form: str = ""
    units: str = ""
    memory: int = 0

    @cached_property
    def apart(self) -> Sequence[int]:
        """The inputs that stand for one of several arrays."""
        several = [bool(one.arrays) for one in inputs_of(self.inputs) for _ in one.passed]
        return [i for i, is_one_of_several in enumerate(several) if is_one_of_several]

    def build(self, target: str, constants: str, threads: int, places: tuple[InputPlace, ...]) -> Built:
        """MLX's object for it, compiled at first use."""
        make: Any = mx.fast.metal_kernel
        if target == "cuda":
            make = partial(mx.fast.cuda_kernel, shared_memory=self.memory)
        return make(**asdict(self.text(target, constants, threads, places)))

    def text(self, target: str, constants: str, threads: int, places: tuple[InputPlace, ...]) -> "KernelText":
        """What MLX is given of it.

        The headers that the text needs go before it. CUDA's build hashes the text at every launch, so it is given the
        names of the files only. On Metal the header begins with UNFUSED and ends with an attribute of the kernel, which
        MLX begins right behind it (`threads_named`).
        """
        (names, first), (outputs, output_lines) = self._named(places), _several(self.outputs)
        source, first = text_of(f"{self.name}.metal"), constants + first + output_lines
        headers = headers_of(f"{self.name}.metal", self.form, self.units)
        if target == "cuda":
            headers = ["cuda_shim.h", *headers]
        texts = [*map(text_of, headers), source]
        digest = hashlib.sha256("\0".join([first, *texts]).encode()).hexdigest()[:16]
        name = f"moeflux_{self.name}{self.form}_{threads}_{digest}"
        if target == "cuda":
            header = "".join(map(_include, headers)) + threads_bound(threads)
            return KernelText(name, names, outputs, header, first + _include(f"{self.name}.metal"))
        header = "".join([UNFUSED, *texts[:-1], threads_named(threads)])
        return KernelText(name, names, outputs, header, first + source)

    def _named(self, places: tuple[InputPlace, ...]) -> tuple[list[str], str]:
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
    """The end of a header that makes Metal's compiler use few enough registers for `threads` threads."""
    return f"[[max_total_threads_per_threadgroup({max(threads, LEAST_NAMED)})]]\n"


def threads_bound(threads: int) -> str:
    """The same for CUDA, where MLX begins a kernel with __global__. It is for numbers of warps that four do not divide:
    of nine, three share 16,384 registers, and CUDA's compiler expects two. The others start as it makes them.
    """
    bounds = f"__location__(global) __launch_bounds__({threads})"
    return f"#undef __global__\n#define __global__ {bounds}\n" if threads > ANY_THREADS and threads % 128 else ""


def _include(name: str) -> str:
    return f'#include "{directory("metal") / name}"\n'


class InputName(NamedTuple):
    """What a name of a kernel's text stands for: an array, unless fields say more.

    Args:
        arrays: several arrays, and so many; 0: one.
        by_row: each row of a step has one of them.
        size: of one array, the constant with the number of values that each row of a step has; "": all have all.
    """

    name: str
    arrays: int = 0
    by_row: bool = False
    size: str = ""

    @property
    def passed(self) -> list[str]:
        """The names of the arrays that are passed for it."""
        return [f"{self.name}{i}" for i in range(self.arrays)] or [self.name]

    @property
    def lines(self) -> str:
        """The lines of text that define the name by these."""
        name = self.name
        if self.size:
            return f"{name} += size_t({ROW}) * {self.size};\n"
        if self.by_row:
            others = (f"if ({ROW} == {i}) {{ {name} = {name}{i}; }}\n" for i in range(1, self.arrays))
            return f"auto {name} = {name}0;\n" + "".join(others)
        return f"decltype({name}0) {name}[] = {{{', '.join(self.passed)}}};\n" if self.arrays else ""


def inputs_of(names: str) -> list[InputName]:
    """Reads names as `Kernel` describes them."""
    return [
        InputName(name, int(of), sign == "@") if sign in ARRAYS else InputName(name, size=of)
        for name, sign, of in re.findall(r"(\w+)([*@+]?)(\w*)", names)
    ]


def _several(names: str) -> tuple[list[str], str]:
    """The inputs for `names`, and the lines of text that join several arrays under one name."""
    inputs = inputs_of(names)
    return [name for one in inputs for name in one.passed], "".join(one.lines for one in inputs)


def _constant(name: str, value: int | float | mx.Dtype | str) -> str:
    """A line of text that declares it: a number, or a type, of MLX's or of a header."""
    if isinstance(value, mx.Dtype | str):
        return f"using {name} = {value if isinstance(value, str) else TYPES[value]};\n"
    if isinstance(value, float):
        return f"constexpr float {name} = {np.float32(value).item()!r}f;\n"
    return f"constexpr int {name} = {value};\n"


@cache
def built(kernel: Kernel, target: str, constants: str, threads: int, places: tuple[InputPlace, ...]) -> Built:
    """The function that a launch calls, made once. What a stand-in makes is not kept, as it would keep the stand-in."""
    return kernel.build(target, constants, threads, places)


@dataclass(frozen=True)
class Launch:
    """A kernel call without its inputs. It depends only on shapes and dtypes, so it is made once for each.

    Args:
        target: "metal" or "cuda".
        kernel: what runs.
        template: constants of the text by name, numbers and types.
        groups: threadgroups along two axes, and for several rows a third; MLX counts its grid in threads.
        threads: of a threadgroup.
        outputs: shape and dtype of each.
    """

    target: str
    kernel: Kernel
    template: Template
    groups: tuple[int, ...]
    threads: int
    outputs: Outputs

    def __post_init__(self) -> None:
        assert self.threads <= MOST_THREADS[self.target], f"{self.kernel.name} asks for {self.threads} threads"

    @cached_property
    def constants(self) -> str:
        """The template as text: what MLX makes a template of cannot have the attribute that `Kernel.build` gives it."""
        return "".join(starmap(_constant, self.template.items()))

    @cached_property
    def arguments(self) -> dict[str, Sequence[object]]:
        return {
            "grid": (self.groups[0] * self.threads, *self.groups[1:], *([1] * (3 - len(self.groups)))),
            "threadgroup": (self.threads, 1, 1),
            "output_shapes": [shape for shape, _ in self.outputs],
            "output_dtypes": [dtype for _, dtype in self.outputs],
        }

    def of_rows(self, own: Mapping[str, str], count: int, sizes: Mapping[str, int], outputs: Outputs) -> "Launch":
        """The launch for several rows of a step; each row runs the text that it has alone.

        Args:
            own: of the kernel's names those of what rows have of their own, as `Kernel` then has them.
            sizes: constants that these name.
            outputs: shape and dtype of each.
        """
        rows = self.with_arrays(own, sizes, outputs)
        return replace(rows, groups=(*self.groups, count))

    def with_arrays(self, own: Mapping[str, str], sizes: Mapping[str, int], outputs: Outputs) -> "Launch":
        """The launch with other names of the kernel's arrays, as in `of_rows`, but with the same groups."""
        named = (self.kernel.inputs, self.kernel.outputs)
        taken, made = (" ".join(own.get(name, name) for name in names.split()) for names in named)
        kernel = replace(self.kernel, inputs=taken, outputs=made)
        return replace(self, kernel=kernel, template={**self.template, **sizes}, outputs=outputs)

    def __call__(self, *inputs: Input) -> list[mx.array]:
        arrays, places = placed(inputs, self.kernel.apart)
        count = len(arrays) + len(self.outputs)
        assert self.target == "cuda" or count <= MOST_ARRAYS, f"{self.kernel.name} has {count} arrays"
        build = stand_ins().build or built
        call = build(self.kernel, self.target, self.constants, self.threads, places)
        return call(inputs=arrays, **self.arguments)


class Reason(str):
    """Why a chooser chooses no kernel, in a few words."""


NO_KERNELS = Reason("the default device has no kernels")
SEVERAL = Reason("there are several tokens")


@cache
def count(n: int) -> mx.array:
    """The number of steps or rows as an array: as a template argument each length would be compiled. It is made from
    values, not by an operation, because an unevaluated array belongs to the thread that made it.
    """
    return mx.array([n] * LEAST_ELEMENTS, mx.int32)

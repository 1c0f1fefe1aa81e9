"""Compiles and runs on the host the Metal source that MLX generates for a `mx.fast.metal_kernel`.

Needs clang++ 14 or newer on Linux x86-64. `run` raises Failure for anything that the compiler or a check finds. What
this proves and what it cannot is in README.md.
"""

import contextlib
import ctypes
import functools
import hashlib
import os
import pathlib
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from grids import is_full

from moeflux_mlx.ops import backend
from moeflux_mlx.ops import launch as launcher

from . import fast

HERE = pathlib.Path(__file__).parent
BUILD = pathlib.Path(os.environ.get("MSL_BUILD", pathlib.Path(tempfile.gettempdir()) / f"msl-{os.getuid()}"))
COMPILER = os.environ.get("MSL_CLANG", "clang++")
# A GPU machine without clang runs the kernels on its GPU instead. Any other Linux machine must have clang.
AVAILABLE = (
    sys.platform == "linux"
    and platform.machine() == "x86_64"
    and (shutil.which(COMPILER) is not None or not mx.is_available(mx.gpu))
)
needed = pytest.mark.skipif(not AVAILABLE, reason="Metal's text is executed on Linux x86-64 only")
ORDERS = (0, 1, 7)  # first to last, last to first, with `--full` shuffled with this seed
FLAGS = [
    *("-x", "cl", "-cl-std=clc++2021", "-cl-no-stdinc", "-cl-single-precision-constant"),
    *("-Xclang", "-cl-ext=+cl_khr_fp16,-cl_khr_fp64,-__opencl_c_fp64", "-mf16c", "-mfma", "-O1", "-fPIC"),
    *(
        "-ftrivial-auto-var-init=pattern",
        "-fno-vectorize",
        "-fno-slp-vectorize",
        "-Wall",
        "-Wextra",
        "-Wc++98-c++11-c++14-compat",  # macOS 14 and 15 compile a text as C++14
        "-Werror",
    ),
    *("-Wno-unknown-attributes", "-Wno-sign-compare", "-Wno-unused-function", "-Wno-unused-parameter"),
    *("-Wno-unused-local-typedef", "-Wno-unused-variable"),  # constants of a launch that this source does not use
    "-fsanitize=thread,shift,array-bounds,integer-divide-by-zero,float-cast-overflow",
]
# How products and sums are contracted: as by Metal's compiler, which does it where a text does not forbid it, or never.
# The second has no checks and is not optimised, because its bytes alone are looked at.
CONTRACTED = ("-Xclang", "-ffp-contract=fast-honor-pragmas")
UNFUSED = ("-ffp-contract=off", "-fno-sanitize=all", "-O0")
BUILDS: Sequence[Sequence[str]] = (CONTRACTED,)  # in which a kernel runs; all must give the same bytes
LINES = ("-g1",)  # for the line of what a check finds; without them compiling takes a sixth less
RUNTIME_FLAGS = ["-std=c++17", "-O2", "-fPIC", "-Wall", "-Wextra", "-Werror"]
SPACES = {  # the address spaces that msl_host.h gives as OpenCL's, for messages
    "__local": "device",
    "__constant": "constant",
    "__global": "threadgroup",
    " __private": "",
    "__private ": "thread ",
}


class Failure(Exception):
    """Raised if the compiler refuses the source, or if a check fails while it runs."""


# ---- the source


@contextlib.contextmanager
def _captured_stdout() -> Iterator[Any]:
    """Captures in a file what C++ writes to stdout, which sys.stdout never sees."""
    libc = ctypes.CDLL(None)
    with open(os.memfd_create("stdout"), "w+") as file:
        saved = os.dup(1)
        libc.fflush(None)
        os.dup2(file.fileno(), 1)
        try:
            yield file
        finally:
            libc.fflush(None)
            os.dup2(saved, 1)
            os.close(saved)


def generate(kernel: Any, inputs: Sequence[mx.array], **call: Any) -> str:
    """Returns the source that MLX would give Metal for these inputs, of which only shapes and dtypes matter.

    MLX's CPU build refuses to call a Metal kernel except while it traces a function for export.
    """

    def traced(*arrays: mx.array) -> list[mx.array]:
        return kernel(inputs=list(arrays), verbose=True, **call)

    with _captured_stdout() as file:
        mx.export_function(os.devnull, traced, *inputs)
        file.seek(0)
        printed = file.read()
    return re.search(r"```\n(.*)\n```", printed, re.S).group(1)


def parse(text: str) -> tuple[str, list[tuple[str, str, str]]]:
    """Returns (the instance to call, [(type, name, attribute)]) of generated source."""
    name, body = re.search(r"\[\[kernel\]\] void (\w+)\((.*?)\) \{\n", text, re.S).groups()
    parameters = re.findall(r"^\s*(.+?)\s*\b(\w+) \[\[(\w+)(?:\(\d+\))?\]\]", body, re.M)
    instance = re.search(r"decltype\((\w+<.*?>)\) ", text)
    return instance.group(1) if instance else name, parameters


def host_text(text: str) -> str:
    """Returns the source after the three edits that no macro can make: MLX's instantiation line, which clang refuses,
    is removed; `threadgroup` becomes MSL_TG_ARRAY where it declares an array of the kernel; and Metal's pragmas about
    floats become clang's."""
    text = re.sub(r"^template \[\[host_name\(.*$", "", text, flags=re.M)
    text = re.sub(r"^#pragma METAL fp\b", "#pragma clang fp", text, flags=re.M)
    return re.sub(r"\bthreadgroup(?=\s+[\w:]+(?:<[^;()]*>)?\s+\w+\s*[\[;,=])", "MSL_TG_ARRAY", text)


def lint(text: str) -> None:
    """Checks that every pointer and reference has an address space: Metal requires it, clang's OpenCL mode does not.
    And that a kernel with barriers does not name 32 threads or fewer: an Apple compiler has dropped the barriers then
    (MoltenVK issue 2711)."""
    code = re.sub(r"//.*|/\*.*?\*/", "", text)
    scalar = r"(?:half|float|bool|bfloat|u?(?:char|short|int|long))[234]?|\w+_t|[A-Z]\w*(?=[*&])"
    match = re.search(rf"(?m)(?:^|[;{{}}(,])\s*(?:const\s+)?(?:{scalar})\s*[*&]+\s*\w+\s*[=;,)]", code)
    if match:
        words = re.sub(r"^\W+", "", match[0])
        raise Failure(f"error: pointer without an address space: {words}")
    named = re.search(r"\[\[max_total_threads_per_threadgroup\((\d+)\)\]\]", code)
    if named and int(named[1]) <= 32 and "_barrier(" in code:
        raise Failure(f"error: a kernel with barriers names {named[1]} threads; it must name more than 32")


def _argument(kind: str, attribute: str, name: str, buffer: int) -> str:
    if attribute == "buffer":
        pointer = kind.replace("&", "*")
        return f"({'*' if '&' in kind else ''}({pointer})a[{buffer}])"
    if kind == "uint3":
        return f"uint3(t->{attribute}[0], t->{attribute}[1], t->{attribute}[2])"
    return f"t->{attribute}"


def translation_unit(text: str) -> str:
    """Returns msl_host.h, the edited source, and a function with a fixed signature that calls the kernel."""
    call, parameters = parse(text)
    arguments, buffers = [], 0
    for kind, name, attribute in parameters:
        arguments.append(_argument(kind, attribute, name, buffers))
        buffers += attribute == "buffer"
    if buffers > launcher.MOST_ARRAYS:
        raise Failure(f"error: {buffers} arrays; Metal passes at most {launcher.MOST_ARRAYS} to a kernel")
    addresses = any("uint64_t" in kind for kind, _, _ in parameters)  # numbers that become pointers, as on CUDA
    defined = "#define CODES_ADDRESSES\n" if addresses else ""
    return (
        f'#include "msl_host.h"\n{defined}#line 1 "generated"\n{host_text(text)}\n#line 1 "trampoline"\n'
        'extern "C" __attribute__((visibility("default"), no_sanitize("thread")))\n'
        f"void msl_entry(const ulong* a, const MslThread* t) {{\n  {call}({', '.join(arguments)});\n}}\n"
    )


# ---- compiling


def require_compiler() -> None:
    if shutil.which(COMPILER) is None:
        raise Failure(f"{COMPILER} is not installed: `apt-get install clang`, or name one in MSL_CLANG")


def _make(out: pathlib.Path, *command: Any) -> pathlib.Path:
    """Runs the command unless its result is cached. clang's names for address spaces become Metal's in messages."""
    if out.exists():
        return out
    partial = out.with_suffix(f".{os.getpid()}")
    partial.touch()  # a check writes nothing
    done = subprocess.run([*command, "-o", partial], capture_output=True, text=True)
    if done.returncode:
        message = done.stderr
        for theirs, ours in SPACES.items():
            message = message.replace(theirs, ours)
        raise Failure(message)
    os.replace(partial, out)
    return out


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join([COMPILER, *parts]).encode()).hexdigest()[:20]


@functools.cache
def _header(flags: Sequence[str]) -> pathlib.Path:
    """Returns msl_host.h precompiled by clang, because reading it takes as long as reading a kernel.

    It is valid for these very files.
    """
    files = HERE / "msl_host.h", HERE / "msl_abi.h"
    key = _digest(*FLAGS, *flags, *(f"{file} {file.stat().st_mtime_ns}" for file in files))
    return _make(BUILD / f"{key}.pch", COMPILER, *FLAGS, *flags, "-x", "cl-header", files[0])


@functools.cache
def compile_text(text: str, flags: Sequence[str] = CONTRACTED, action: str = "-c") -> pathlib.Path:
    """Returns the object file of generated source, or an empty file if the action only looks for faults. It is cached
    by content."""
    require_compiler()
    lint(text)
    unit = translation_unit(text)
    headers = [(HERE / name).read_text() for name in ("msl_abi.h", "msl_host.h")]
    key = _digest(unit, *FLAGS, *flags, action, *headers)
    BUILD.mkdir(parents=True, exist_ok=True)
    source = BUILD / f"{key}.cl"
    source.write_text(unit)
    included = f"-I{HERE}", "-include-pch", _header(flags)
    return _make(BUILD / f"{key}.o", COMPILER, *FLAGS, *flags, *included, action, source)


@functools.cache
def _runtime() -> tuple[pathlib.Path, pathlib.Path]:
    """Returns the library that runs kernels, and the object that tells it where those of one library are."""
    simt, image = HERE / "simt.cpp", HERE / "image.cpp"
    key = _digest(*(file.read_text() for file in (simt, image, HERE / "msl_abi.h")), *RUNTIME_FLAGS)
    compiler = COMPILER, *RUNTIME_FLAGS
    library = _make(BUILD / f"simt-{key}.so", *compiler, "-shared", "-Wl,--no-as-needed", simt, "-lm")
    return library, _make(BUILD / f"image-{key}.o", *compiler, "-c", image)


@functools.cache
def build(text: str, flags: Sequence[str] = CONTRACTED) -> ctypes.CDLL:
    """Returns a loaded library with the kernel of generated source."""
    kernel = compile_text(text, flags)
    runtime, image = _runtime()
    path = BUILD / f"{kernel.stem}-{runtime.stem}.so"
    return ctypes.CDLL(str(_make(path, "ld", "-shared", "-Bsymbolic", kernel, image, runtime)))


# ---- running


_launching = threading.Lock()  # the runner is the same for all kernels


class _Buffer(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("size", ctypes.c_uint64),
        ("writable", ctypes.c_uint32),
        ("pad", ctypes.c_uint32),
    ]


class _Launch(ctypes.Structure):
    _fields_ = [
        ("grid", ctypes.c_uint32 * 3),
        ("group", ctypes.c_uint32 * 3),
        ("order", ctypes.c_uint32),
        ("n_buffers", ctypes.c_uint32),
        ("buffers", ctypes.POINTER(_Buffer)),
        ("image", ctypes.c_void_p),
        ("error", ctypes.c_char * 512),
    ]


def _aligned(nbytes: int) -> np.ndarray:
    raw = np.empty(nbytes + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + nbytes]


def _located(text: str, error: str) -> str:
    """Replaces "[pc 0x...]" in an error by the line of the source."""
    match = re.search(r"\[pc 0x(\w+)\]", error)
    if not match:
        return error
    address = hex(int(match[1], 16) - 1)
    library = build(text, (*CONTRACTED, *LINES))
    done = subprocess.run(["addr2line", "-e", library._name, address], capture_output=True, text=True)
    return error.replace(match[0], "at " + done.stdout.strip().rsplit("/", 1)[-1])


def launch(
    text: str,
    inputs: Sequence[np.ndarray],
    outputs: Sequence[tuple[tuple[int, ...], Any]],
    grid: Sequence[int],
    threadgroup: Sequence[int],
    order: int = 0,
    flags: Sequence[str] = CONTRACTED,
) -> list[np.ndarray]:
    """Runs generated source once. `outputs` is [(shape, dtype)]; they start as 0xFF bytes, which read as NaN."""
    held = []
    for array in inputs:
        held.append(_aligned(max(array.nbytes, 1)))
        held[-1][: array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    for shape, dtype in outputs:
        held.append(_aligned(int(np.prod(shape)) * np.dtype(dtype).itemsize))
        held[-1][:] = 0xFF
    buffers = [_Buffer(b.ctypes.data, b.nbytes, i >= len(inputs), 0) for i, b in enumerate(held)]
    kernel, runtime = build(text, flags), ctypes.CDLL(str(_runtime()[0]))
    image = ctypes.addressof(ctypes.c_char.in_dll(kernel, "msl_image"))
    record = _Launch((*grid,), (*threadgroup,), order, len(held), (_Buffer * len(held))(*buffers), image)
    with _launching:
        failed = runtime.msl_launch(ctypes.byref(record))
    if failed:
        raise Failure(_located(text, record.error.decode()))
    results = held[len(inputs) :]
    return [b.view(dtype).reshape(shape) for b, (shape, dtype) in zip(results, outputs, strict=True)]


def _as_numpy(array: mx.array) -> np.ndarray:
    """Returns a numpy array; numpy has no bfloat16, so such an array is returned as its bits."""
    return np.asarray(mx.view(array, mx.uint16)) if array.dtype == mx.bfloat16 else np.asarray(array)


def _extras(name: str, array: mx.array) -> dict[str, np.ndarray]:
    """Returns what MLX passes after an input if the source mentions its shape, strides or ndim."""
    shape = array.shape
    strides = [int(np.prod(shape[i + 1 :])) for i in range(len(shape))]
    return {
        f"{name}_shape": np.int32(shape),
        f"{name}_strides": np.int64(strides),
        f"{name}_ndim": np.int32([len(shape)]),
    }


def _bound(text: str, inputs: Sequence[mx.array]) -> list[np.ndarray]:
    """Returns the input buffers in the order of the generated signature."""
    bound: list[np.ndarray] = []
    extras: dict[str, np.ndarray] = {}
    rest = list(inputs)
    for _, name, attribute in parse(text)[1]:
        if name in extras:
            bound.append(extras[name])
        elif attribute == "buffer" and rest:
            array = rest.pop(0)
            extras = _extras(name, array)
            bound.append(_as_numpy(array))
    return bound


NUMPY = {
    **{mx.bfloat16: np.uint16, mx.float16: np.float16, mx.float32: np.float32},
    **{mx.uint32: np.uint32, mx.int32: np.int32, mx.uint16: np.uint16, mx.uint8: np.uint8},
}


def run(
    kernel: Any,
    inputs: Sequence[mx.array],
    *,
    grid: Sequence[int],
    threadgroup: Sequence[int],
    output_shapes: Sequence[tuple[int, ...]],
    output_dtypes: Sequence[mx.Dtype],
    orders: Sequence[int] | None = None,
    **call: Any,
) -> list[np.ndarray]:
    """Runs `kernel(...)` on the host, once per scheduling order (by default `ORDERS`), and once in each further build
    (`BUILDS`). All must give the same bytes."""
    orders = orders or ORDERS[: 3 if is_full() else 2]
    text = generate(
        kernel,
        inputs,
        grid=grid,
        threadgroup=threadgroup,
        output_shapes=output_shapes,
        output_dtypes=output_dtypes,
        **call,
    )
    bound = _bound(text, inputs)
    outputs = [(s, NUMPY[d]) for s, d in zip(output_shapes, output_dtypes, strict=True)]
    result, *reordered = (launch(text, bound, outputs, grid, threadgroup, order) for order in orders)
    rebuilt = [launch(text, bound, outputs, grid, threadgroup, orders[0], flags) for flags in BUILDS[1:]]
    for cause, results in ("the order in which threads run", reordered), ("contraction", rebuilt):
        for other in results:
            if any(a.tobytes() != b.tobytes() for a, b in zip(result, other, strict=True)):
                raise Failure(f"the result depends on {cause}")
    return result


class HostKernel:
    """Replaces what `mx.fast.metal_kernel` returns: generates the source, runs it here, returns mx.arrays."""

    make = staticmethod(mx.fast.metal_kernel)

    def __init__(self, **definition: Any) -> None:
        self.kernel = HostKernel.make(**definition)

    def __call__(
        self,
        *,
        inputs: Sequence[mx.array],
        output_shapes: Sequence[tuple[int, ...]],
        output_dtypes: Sequence[mx.Dtype],
        **call: Any,
    ) -> list[mx.array]:
        arrays = [a if isinstance(a, mx.array) else mx.array(a) for a in inputs]
        mx.eval(arrays)
        results = run(self.kernel, arrays, output_shapes=output_shapes, output_dtypes=output_dtypes, **call)
        bits = [mx.array(r) for r in results]
        return [b.view(d) if d == mx.bfloat16 else b for b, d in zip(bits, output_dtypes, strict=True)]


class TextKernel(HostKernel):
    """Lets the compiler check the source without running it and returns zeros. `texts` keeps the generated
    sources since `launching` began."""

    texts: list[str] = []

    def __call__(self, *, inputs: Any, output_shapes: Any, output_dtypes: Any, **call: Any) -> list[mx.array]:
        text = generate(self.kernel, inputs, output_shapes=output_shapes, output_dtypes=output_dtypes, **call)
        compile_text(text, action="-fsyntax-only")
        TextKernel.texts.append(text)
        return [mx.zeros(s, d) for s, d in zip(output_shapes, output_dtypes, strict=True)]


def plant(monkeypatch: pytest.MonkeyPatch, file: str, old: str, new: str) -> None:
    """Replaces `old` by `new` in the source `file` of a kernel. `old` must occur in it."""
    text = launcher.text_of
    assert old in text(file)
    monkeypatch.setattr(launcher, "text_of", lambda name: text(name).replace(old, new) if name == file else text(name))


@contextlib.contextmanager
def launching(kind: type[HostKernel] = HostKernel) -> Iterator[None]:
    """Gives the launch code a GPU: this harness in place of Metal, or the machine's own GPU."""
    TextKernel.texts.clear()
    if AVAILABLE:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(mx.fast, "metal_kernel", lambda **definition: kind(**definition))
            patch.setattr(backend, "name", lambda: "metal")
            patch.setattr(mx.fast, "rope", fast.rope)
            launcher.built.cache_clear()
            try:
                yield
            finally:
                launcher.built.cache_clear()
    elif mx.is_available(mx.gpu):
        before = mx.default_device()
        mx.set_default_device(mx.gpu)
        try:
            yield
        finally:
            mx.set_default_device(before)
    else:
        pytest.skip("neither a GPU nor Linux x86-64")

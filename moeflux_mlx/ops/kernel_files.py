"""Keeps compiled CUDA kernels between processes, in the files where MLX looks for them.

MLX compiles a custom kernel when it is first evaluated, one after the other, and keeps none. But before compiling it
looks into its directory of compiled kernels (mlx/backend/cuda/jit_module.cpp, version 0.32), which `MLX_PTX_CACHE_DIR`
names. So the same compiler is called here, on all cores, and its output written there in the form of MLX's own entries:
`NAME.ptx` holds the machine code, `NAME.txt` the kernel's name in C++ and in the machine code. NAME ends with
`std::hash` of the text that MLX makes of the kernel. A version of MLX that makes another text or uses another hash
finds no entry and compiles as usual.
"""

import ctypes
import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import mlx.core as mx

from ..files import replace_file
from .launch import KernelText

TYPES = {
    **{mx.float32: "float", mx.bfloat16: "__nv_bfloat16", mx.float16: "__half"},
    **{mx.uint32: "uint32_t", mx.int32: "int32_t", mx.uint64: "uint64_t", mx.bool_: "bool"},
    **{mx.uint16: "uint16_t", mx.uint8: "uint8_t"},
}
# Replaces headers of MLX and CUDA that take most of a compilation; our kernels use nothing else of them.
HEADERS = {
    "mlx/backend/cuda/device/utils.cuh": """#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
typedef signed char int8_t;
typedef unsigned char uint8_t;
typedef unsigned short uint16_t;
typedef int int32_t;
typedef unsigned int uint32_t;
typedef long long int64_t;
typedef unsigned long long uint64_t;
""",
    "cooperative_groups.h": "#pragma once\nnamespace cooperative_groups {}\n",
}
NAMESPACE = "mlx::core::cu::"
HASH_SEED = 0xC70F6907  # the seed of std::hash in libstdc++
Compiled = tuple[str, bytes]  # a kernel's name in the machine code, and the code


@dataclass(frozen=True)
class Program:
    """A kernel for arrays of certain dtypes: the text that MLX compiles.

    Args:
        kernel: the text.
        inputs: the dtypes of its inputs.
        outputs: the dtypes of its outputs.
        few: for each input whether it has fewer than `LEAST_ELEMENTS` elements, on which MLX's text for Metal depends.
        threads: of a threadgroup, as many as its launch asks for.
    """

    kernel: KernelText
    inputs: Sequence[mx.Dtype]
    outputs: Sequence[mx.Dtype]
    few: Sequence[bool] = ()
    threads: int = 0

    @property
    def key(self) -> tuple[object, ...]:
        """Equal for programs that are compiled to the same."""
        return self.kernel.name, tuple(self.inputs), tuple(self.outputs), tuple(self.few)

    @property
    def function(self) -> str:
        return f"custom_kernel_{self.kernel.name}"

    @cached_property
    def text(self) -> str:
        """The text that CUDA's compiler takes, as `build_kernel` of mlx/backend/cuda/custom_kernel.cpp makes it."""
        kernel = self.kernel
        taken = [f"    const {TYPES[one]}* {name}" for name, one in zip(kernel.input_names, self.inputs, strict=True)]
        made = [f"    {TYPES[one]}* {name}" for name, one in zip(kernel.output_names, self.outputs, strict=True)]
        return (
            '\n#include "mlx/backend/cuda/device/utils.cuh"\n\n#include <cooperative_groups.h>\n\n'
            f"{kernel.header}namespace mlx::core::cu {{\n\nnamespace cg = cooperative_groups;\n\n"
            f"__global__ void {self.function}(\n" + ",\n".join(taken + made) + ") {\n"
            f"{kernel.source}\n}}\n\n}} // namespace mlx::core::cu\n"
        )

    @property
    def file(self) -> str:
        """The name under which MLX looks for the machine code, without its ending."""
        return f"{self.function}_{hash_of(self.text):x}"


def hash_of(text: str) -> int:
    """`std::hash<std::string>` of libstdc++, which MLX's build for Linux uses."""
    function = ctypes.CDLL("libstdc++.so.6")._ZSt11_Hash_bytesPKvmm
    function.restype, function.argtypes = ctypes.c_size_t, [ctypes.c_char_p, ctypes.c_size_t, ctypes.c_size_t]
    data = text.encode()
    return int(function(data, len(data), HASH_SEED))


class Compiler:
    """NVRTC, the compiler that MLX uses.

    Args:
        architecture: of the machine code, as MLX names it: "sm_80", "sm_90a".
        library: the file of NVRTC.
        include: directories of CUDA's headers.

    Raises:
        OSError: there is no such library.
    """

    def __init__(self, architecture: str, library: str, include: Sequence[Path]):
        self._nvrtc = ctypes.CDLL(library)
        self.architecture = architecture
        paths = [f"--include-path={path}" for path in include]
        self._options = _strings([f"--gpu-architecture={architecture}", "--device-as-default-execution-space", *paths])

    @property
    def version(self) -> str:
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._nvrtc.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
        return f"{major.value}.{minor.value}"

    def compile(self, program: Program) -> Compiled | None:
        """The kernel's name in the machine code, and the code; None if it does not compile, which MLX will report."""
        nvrtc, handle = self._nvrtc, ctypes.c_void_p()
        headers = len(HEADERS), _strings(HEADERS.values()), _strings(HEADERS)
        text, file = program.text.encode(), f"{program.function}.cu".encode()
        if nvrtc.nvrtcCreateProgram(ctypes.byref(handle), text, file, *headers):
            return None
        try:
            name = f"{NAMESPACE}{program.function}".encode()
            lowered, size = ctypes.c_char_p(), ctypes.c_size_t()
            if (
                nvrtc.nvrtcAddNameExpression(handle, name)
                or nvrtc.nvrtcCompileProgram(handle, len(self._options), self._options)
                or nvrtc.nvrtcGetLoweredName(handle, name, ctypes.byref(lowered))
                or nvrtc.nvrtcGetCUBINSize(handle, ctypes.byref(size))
            ):
                return None
            code = ctypes.create_string_buffer(size.value)
            return None if nvrtc.nvrtcGetCUBIN(handle, code) else ((lowered.value or b"").decode(), code.raw)
        finally:
            nvrtc.nvrtcDestroyProgram(ctypes.byref(handle))


def _strings(texts: Iterable[str]) -> Any:
    encoded = [text.encode() for text in texts]
    return (ctypes.c_char_p * len(encoded))(*encoded)


def keep(compiler: Compiler, programs: Iterable[Program], folder: Path) -> None:
    """Compiles the programs that `folder` lacks, on all cores, and writes them there; write errors are ignored."""

    def add(program: Program) -> None:
        target = folder / program.file
        compiled = None if target.with_suffix(".ptx").exists() else compiler.compile(program)
        if compiled is None:
            return
        name, code = compiled
        with suppress(OSError):  # a full disk: MLX compiles
            replace_file(target.with_suffix(".txt"), [f"{NAMESPACE}{program.function}\t{name}\n".encode()])
            replace_file(target.with_suffix(".ptx"), [code])  # the last: MLX looks for it first

    with ThreadPoolExecutor(max(os.cpu_count() or 1, 1)) as pool:
        list(pool.map(add, programs))

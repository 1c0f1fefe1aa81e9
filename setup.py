"""The optional native code, CPU kernels and Linux's reads; everything else is in pyproject.toml.

Without a C compiler the build goes on and the package runs on the MLX twins, and reads with Python's calls.
"""

import sys

from setuptools import Extension, setup

# Contraction to fused multiply-add is wanted on every path; clang keeps it off across statements by default.
FLAGS = ["-std=gnu11", "-O3", "-ffp-contract=fast", "-Wno-psabi"]

kernels = Extension(
    "moeflux_mlx.ops._native",
    sources=["native/native.c"],
    depends=["native/kernels.h", "native/planes.h", "native/rounded.h", "native/team.h", "native/vnni.h"],
    extra_compile_args=FLAGS,
    extra_link_args=["-pthread"],
    optional=True,
)
reads = Extension(
    "moeflux_mlx.experts._reads", sources=["native/reads.c"], extra_compile_args=["-std=gnu11"], optional=True
)

setup(ext_modules=[kernels, *([reads] if sys.platform == "linux" else [])])

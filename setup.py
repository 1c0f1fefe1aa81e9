"""The optional native CPU kernels; everything else is in pyproject.toml.

Without a C compiler the build goes on and the package runs on the MLX twins.
"""

from setuptools import Extension, setup

# Contraction to fused multiply-add is wanted on every path; clang keeps it off across statements by default.
FLAGS = ["-std=gnu11", "-O3", "-ffp-contract=fast", "-Wno-psabi"]

setup(
    ext_modules=[
        Extension(
            "moeflux_mlx.ops._native",
            sources=["native/native.c"],
            depends=["native/kernels.h", "native/team.h", "native/vnni.h"],
            extra_compile_args=FLAGS,
            extra_link_args=["-pthread"],
            optional=True,
        )
    ]
)

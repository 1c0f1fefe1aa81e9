"""The optional native CPU kernels; everything else is in pyproject.toml.

Without a C compiler the build goes on and the package runs on the MLX twins.
"""

from setuptools import Extension, setup

# Contraction to fused multiply-add is wanted on every path; clang keeps it off across statements by default.
FLAGS = ["-std=gnu11", "-O3", "-ffp-contract=fast", "-Wno-psabi"]

setup(
    ext_modules=[
        Extension(
            "moeflux_mlx._native",
            sources=["moeflux_mlx/_native.c"],
            depends=["moeflux_mlx/_native_kernels.h", "moeflux_mlx/_native_team.h", "moeflux_mlx/_native_vnni.h"],
            extra_compile_args=FLAGS,
            extra_link_args=["-pthread"],
            optional=True,
        )
    ]
)

"""The optional native code, CPU kernels and Linux's reads; everything else is in pyproject.toml.

Without a C compiler the build goes on and the package runs on the MLX twins, reads with Python's calls, and rearranges
GGUF's blocks with numpy.
"""

import os
import runpy
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from zlib import crc32

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist
from setuptools.modified import newer_group

# Contraction to fused multiply-add is wanted on every path; clang keeps it off across statements by default. Debugging
# information (Python's own flags ask for it) would be a third of the time to compile.
FLAGS = ["-std=gnu11", "-O3", "-g0", "-ffp-contract=fast", "-Wno-psabi"]

kernels = Extension(
    "moeflux_mlx.ops._native",
    sources=[
        f"native/{name}.c" for name in ("rounded", "avx512", "avx2", "portable", "native", "paths")
    ],  # longest first
    depends=[
        f"native/{name}.h"
        for name in ("paths", "nested", "grids", "tables", "kernels", "planes", "lookups", "rounded", "team", "vnni")
    ],
    extra_compile_args=FLAGS,
    extra_link_args=["-pthread"],
    optional=True,
)
# Every processor must round to the same bits, so products and sums are not fused.
fit = Extension(
    "moeflux_mlx.rounding._fit",
    sources=["native/fit_avx512.c", "native/fit_avx2.c", "native/fit.c"],
    depends=["native/fit.h"],
    extra_compile_args=[*FLAGS, "-ffp-contract=off"],
    optional=True,
)
blocks = Extension(
    "moeflux_mlx.packing._blocks",
    sources=["native/blocks.c"],
    depends=["native/blocks.h"],
    extra_compile_args=FLAGS,
    optional=True,
)
reads = Extension(
    "moeflux_mlx.experts._reads", sources=["native/reads.c"], extra_compile_args=["-std=gnu11"], optional=True
)


class BuildSideBySide(build_ext):
    """Compiles the sources of an extension side by side, and only those that changed since the last build."""

    def finalize_options(self):
        super().finalize_options()
        # pip builds in a temporary folder; in this one the next installation finds what was compiled.
        self.build_temp = f"build/temp.{self.plat_name}-{sysconfig.get_config_var('SOABI')}"

    def build_extensions(self):
        compile_one = self.compiler.compile

        def compile_changed(sources, output_dir, depends, extra_postargs, **options):
            command = repr([self.compiler.compiler_so, extra_postargs])
            folder = f"{output_dir}/{crc32(command.encode()):08x}"
            objects = self.compiler.object_filenames(sources, output_dir=folder)
            changed = [s for s, made in zip(sources, objects, strict=True) if newer_group([s, *depends], made)]
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                list(pool.map(lambda s: compile_one([s], folder, extra_postargs=extra_postargs, **options), changed))
            return objects

        self.compiler.compile = compile_changed
        super().build_extensions()


def write_commit(tree):
    """Notes the commit in the package below `tree`, if it is known."""
    version = runpy.run_path("moeflux_mlx/version.py")
    if (commit := version["commit"]()) is not None:
        with open(os.path.join(tree, "moeflux_mlx", version["FILE"]), "w") as file:
            file.write(commit)


class BuildWithCommit(build_py):
    """Copies the package; a copy knows its commit, a tree that is installed in place asks git."""

    def run(self):
        super().run()
        if not self.editable_mode:
            write_commit(self.build_lib)


class SourcesWithCommit(sdist):
    def make_release_tree(self, base_dir, files):
        super().make_release_tree(base_dir, files)
        write_commit(base_dir)


setup(
    ext_modules=[kernels, fit, blocks, *([reads] if sys.platform == "linux" else [])],
    cmdclass={"build_ext": BuildSideBySide, "build_py": BuildWithCommit, "sdist": SourcesWithCommit},
)

"""Compiled kernels that are stored where MLX looks for them."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import mlx.core as mx
import pytest
from tiny_models import tiny_directory

from moeflux_mlx.engine import engine, kernel_cache
from moeflux_mlx.engine.machine import machine_figures
from moeflux_mlx.engine.random_weights import Shapes
from moeflux_mlx.engine.weights import open_weights
from moeflux_mlx.model.step import SequenceRows
from moeflux_mlx.ops import kernel_files, launch, linear
from moeflux_mlx.ops.kernel_files import Program, hash_of, keep
from moeflux_mlx.ops.launch import Kernel, KernelText
from moeflux_mlx.ops.stand_ins import standing_in
from moeflux_mlx.ops.tiles import CODE

needs_cuda = pytest.mark.skipif(not mx.cuda.is_available(), reason="MLX's CUDA build runs it")


def program(value, name="one"):
    text = KernelText(name, ["x"], ["y"], "// a header\n", f"y[0] = {value}.0f;")
    return Program(text, [mx.bfloat16], [mx.float32])


class Fake:
    """A compiler whose output names its input. `fails`: the functions that it does not compile."""

    def __init__(self, *fails):
        self.compiled, self.fails, self.lock = [], fails, threading.Lock()

    def compile(self, program):
        with self.lock:
            self.compiled.append(program.function)
        return None if program.function in self.fails else (f"_Z{program.function}", program.text.encode())


def test_the_hash_is_that_of_libstdcxx():
    assert hash_of("hello") == 2762169579135187400  # std::hash<std::string>{}("hello") with GCC 12 on x86-64
    assert hash_of("") == 6142509188972423790


def test_the_text_is_the_one_that_mlx_makes():
    assert program(1).text == (
        '\n#include "mlx/backend/cuda/device/utils.cuh"\n\n#include <cooperative_groups.h>\n\n'
        "// a header\nnamespace mlx::core::cu {\n\nnamespace cg = cooperative_groups;\n\n"
        "__global__ void custom_kernel_one(\n    const __nv_bfloat16* x,\n    float* y) {\n"
        "y[0] = 1.0f;\n}\n\n} // namespace mlx::core::cu\n"
    )


def test_each_kernel_is_compiled_once_and_stored_in_two_files(tmp_path):
    programs, compiler = [program(i, f"k{i}") for i in range(5)], Fake("custom_kernel_k3")
    keep(compiler, programs, tmp_path)
    assert sorted(compiler.compiled) == [one.function for one in programs]
    kept = [one for one in programs if one.function != "custom_kernel_k3"]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        f"{one.file}.{ending}" for one in kept for ending in ("ptx", "txt")
    )
    assert (tmp_path / f"{kept[0].file}.ptx").read_bytes() == kept[0].text.encode()
    assert (tmp_path / f"{kept[0].file}.txt").read_text() == "mlx::core::cu::custom_kernel_k0\t_Zcustom_kernel_k0\n"
    again = Fake()
    keep(again, programs, tmp_path)
    assert again.compiled == ["custom_kernel_k3"]


def test_a_kernel_without_its_machine_code_is_compiled_again(tmp_path):
    """A process died between the two files."""
    keep(Fake(), [program(1)], tmp_path)
    code = tmp_path / f"{program(1).file}.ptx"
    code.unlink()
    keep(Fake(), [program(1)], tmp_path)
    assert code.read_bytes() == program(1).text.encode()


def test_a_full_disk_stores_nothing_and_stops_nothing(tmp_path, monkeypatch):
    def full(*given):
        raise OSError("no space left on device")

    monkeypatch.setattr(kernel_files, "replace_file", full)
    keep(Fake(), [program(1)], tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_names_tell_constants_and_included_texts_apart(monkeypatch):
    kernel, text_of = Kernel("gated_norm", "x z weight", "y"), launch.text_of

    def name(constants="constexpr int D = 64;\n"):
        return kernel.text("cuda", constants, 64, ((0, 0, None), (1, 0, None), (2, 0, None))).name

    before, other = name(), name("constexpr int D = 128;\n")
    monkeypatch.setattr(launch, "text_of", lambda name: text_of(name) + " ")
    assert len({before, other, name()}) == 3


def shapes_of(directory, dtype=mx.bfloat16):
    weights = open_weights(directory)
    return Shapes.of(weights.args, weights.experts.layout, weights.shapes, dtype)


def test_a_model_has_programs_for_one_token_and_many():
    programs = kernel_cache.programs_of(shapes_of(tiny_directory("qwen3_5_moe")), CODE)
    names = " ".join(one.function for one in programs)
    assert len({one.text for one in programs}) == len(programs) > 10
    assert "attend_step" in names and "expert_down_combine" in names and "delta_step" in names


@pytest.fixture
def noted(monkeypatch):
    """Returns the names of the kernels that are built. Without CUDA they compute nothing."""
    names, text, build = [], Kernel.text, Kernel.build

    def record(kernel, *given):
        names.append(text(kernel, *given).name)

    def real(kernel, *given):
        record(kernel, *given)
        return build(kernel, *given)

    def none(kernel, *given):
        record(kernel, *given)
        return lambda *, output_shapes, output_dtypes, **_: list(map(mx.zeros, output_shapes, output_dtypes))

    if mx.cuda.is_available():
        monkeypatch.setattr(Kernel, "build", real)
        yield names
        return
    figures = machine_figures()
    monkeypatch.setattr(engine, "machine_figures", lambda *_: figures)
    monkeypatch.setattr(kernel_cache, "compiler_here", lambda: None)
    with standing_in(backend="cuda", build=none):
        yield names


@pytest.mark.parametrize("family", ["qwen3_5_moe", "deepseek_v3", "gpt_oss", "mimo_v2_flash"])
def test_kernels_are_known_when_a_model_is_loaded(family, noted, monkeypatch):
    """Checks all kernels that one token, prompts and several sequences use. On a CPU a router is stored in another
    form, so its kernel differs."""
    monkeypatch.setattr(linear, "PAYS_FROM", 1)
    directory = tiny_directory(family)
    known = {one.kernel.name for one in kernel_cache.programs_of(shapes_of(directory), CODE)}
    model = engine.load_model(directory, dtype=mx.bfloat16, expert_io="resident")
    noted.clear()
    cache = model.make_cache()
    for tokens in (40, 1, 1, 3):
        mx.eval(model(mx.ones((1, tokens), mx.int32), cache))
    for count in (5, 13):
        caches = [model.make_cache() for _ in range(count)]
        for _ in range(2):  # in the first step there is nothing to replay
            mx.eval(model.step([SequenceRows(cache, [1]) for cache in caches]).logits)
    here = [name for name in noted if mx.cuda.is_available() or "router_codes" not in name]
    assert here and not set(here) - known


def test_nothing_is_compiled_where_no_cuda_computes(monkeypatch):
    monkeypatch.setattr(kernel_cache, "compiler_here", lambda: pytest.fail("a compiler was asked for"))
    if not mx.cuda.is_available():
        with kernel_cache.compiling(shapes_of(tiny_directory("qwen3_5_moe")), CODE):
            pass


# ---- on an NVIDIA GPU


def run(code, folder):
    paths = [str(Path(__file__).parents[1]), *sys.path]
    environment = os.environ | {kernel_cache.VARIABLE: str(folder), "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


ONE = """
import mlx.core as mx
call = mx.fast.cuda_kernel(name="one", input_names=["x"], output_names=["y"], header="// a header\\n",
                           source="y[0] = 1.0f;")
y = call(inputs=[mx.zeros(8, mx.bfloat16)], grid=(1, 1, 1), threadgroup=(1, 1, 1),
         output_shapes=[(1,)], output_dtypes=[mx.float32])[0]
print(y.item())
"""


@needs_cuda
def test_mlx_takes_stored_files(tmp_path):
    """The file with this text's name contains the machine code of another text."""
    compiler = kernel_cache.compiler_here()
    keep(compiler, [program(2)], tmp_path)
    for ending in (".ptx", ".txt"):
        (tmp_path / f"{program(2).file}{ending}").rename(tmp_path / f"{program(1).file}{ending}")
    assert run(ONE, tmp_path) == "2.0" and run(ONE, tmp_path / "empty") == "1.0"

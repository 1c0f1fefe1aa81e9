"""Compiled kernels that are stored where MLX looks for them."""

import os
import subprocess
import sys
import threading
from contextlib import closing
from dataclasses import asdict
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from grids import drawn
from tiny_models import tiny_directory

from metal import msl
from moeflux_mlx.caches.recurrent import RecurrentCache
from moeflux_mlx.experts import memory, resident, routed
from moeflux_mlx.model.step import SequenceRows
from moeflux_mlx.opening import engine, kernel_cache, launches
from moeflux_mlx.opening.random_weights import Shapes
from moeflux_mlx.opening.weights import open_weights
from moeflux_mlx.ops import kernel_files, launch
from moeflux_mlx.ops.kernel_files import Program, hash_of, keep
from moeflux_mlx.ops.launch import Kernel, KernelText
from moeflux_mlx.ops.stand_ins import standing_in
from moeflux_mlx.ops.tiles import CODE
from moeflux_mlx.packing.located import Located
from moeflux_mlx.planning.machine import machine_figures

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
    kernel = Kernel("gated_norm", "x z weight", "y")

    def name(constants="constexpr int D = 64;\n"):
        return kernel.text("cuda", constants, 64, ((0, 0, None), (1, 0, None), (2, 0, None))).name

    before, other = name(), name("constexpr int D = 128;\n")
    msl.plant(monkeypatch, "lane.h.metal", "\n", " \n")
    assert len({before, other, name()}) == 3


def load_on_the_host(patch):
    """Models are planned and loaded as here, whatever computes."""
    figures = machine_figures()
    patch.setattr(engine, "machine_figures", lambda *_: figures)
    for module in (memory, resident):
        patch.setattr(module, "adopt", lambda rows, *said: mx.array(rows))


def shapes_of(directory, dtype=mx.bfloat16):
    weights = open_weights(Located(directory))
    return Shapes.of(weights.args, weights.experts.layout, weights.shapes, dtype)


def test_a_model_has_programs_for_one_token_and_many():
    programs = kernel_cache.programs_of(shapes_of(tiny_directory("qwen3_5_moe")), CODE)
    names = " ".join(one.function for one in programs)
    assert len({one.text for one in programs}) == len(programs) > 10
    assert "attend_matrix" in names and "expert_down_combine" in names and "delta_step" in names


@pytest.mark.parametrize("family", ["qwen3_5_moe", "deepseek_v4", "nemotron_h"])
def test_every_text_for_metal_forbids_contraction_from_its_first_line_on(family):
    programs = kernel_cache.programs_of(shapes_of(tiny_directory(family)), CODE, target="metal")
    assert len(programs) > 10
    assert all(one.kernel.header.startswith("#pragma METAL fp contract(off)\n") for one in programs)


TARGETS = ["cuda", "metal"]


@pytest.fixture(params=TARGETS)
def target(request):
    """A GPU's backend: this machine's, or one that computes nothing."""
    here = next((name for name in ("cuda", "metal") if getattr(mx, name).is_available()), request.param)
    if here != request.param:
        pytest.skip(f"{here} computes here")
    return request.param


def compiled_as(program):
    """Returns what MLX's text of a program depends on, beside the number of elements."""
    return program.key[:3]


@pytest.fixture
def noted(target, monkeypatch):
    """Returns the programs that are launched, as `compiled_as` has them. Without a GPU they compute nothing."""
    programs, text, build = [], Kernel.text, Kernel.build

    def noting(kernel, given, launch):
        def call(*, inputs, output_dtypes, **rest):
            programs.append(compiled_as(Program(text(kernel, *given), [one.dtype for one in inputs], output_dtypes)))
            return launch(inputs=inputs, output_dtypes=output_dtypes, **rest)

        return call

    def real(kernel, *given):
        return noting(kernel, given, build(kernel, *given))

    def none(kernel, *given):
        return noting(kernel, given, nothing)

    def nothing(*, output_shapes, output_dtypes, **_):
        return list(map(mx.zeros, output_shapes, output_dtypes))

    if mx.is_available(mx.gpu):
        monkeypatch.setattr(Kernel, "build", real)
        yield programs
        return
    monkeypatch.setattr(kernel_cache, "compiler_here", lambda: None)
    load_on_the_host(monkeypatch)
    with standing_in(backend=target, build=none):
        yield programs


@pytest.mark.filterwarnings("ignore:invalid value encountered in divide")  # of weights that nothing has computed
@pytest.mark.parametrize(
    "family, expert_io, target",
    drawn(
        ["qwen3_5_moe", "deepseek_v3", "gpt_oss", "mimo_v2_flash", "nemotron_h"],
        ["resident", "pread"],
        TARGETS,
        turns=2,
    ),
    indirect=["target"],
)
def test_kernels_are_known_when_a_model_is_loaded(family, expert_io, target, noted, monkeypatch, small_products):
    """Checks all kernels that one token, prompts and several sequences use."""
    directory = tiny_directory(family)
    known = {compiled_as(one) for one in kernel_cache.programs_of(shapes_of(directory), CODE, target=target)}
    model = engine.load_model(directory, dtype=mx.bfloat16, expert_io=expert_io)
    if not mx.is_available(mx.gpu):  # what was not computed names one expert several times
        ids = np.arange(model.args.num_experts_per_tok, dtype=np.uint32)[None]
        monkeypatch.setattr(routed, "read_host_copy", lambda copy: (ids, mx.zeros(ids.shape)))
    noted.clear()
    cache = model.make_cache()
    for tokens in (40, 1, 1, 3):
        mx.eval(model(mx.ones((1, tokens), mx.int32), cache))
    for count in (5, 13):
        caches = [model.make_cache() for _ in range(count)]
        for _ in range(2):  # in the first step there is nothing to replay
            mx.eval(model.step([SequenceRows(cache, [1]) for cache in caches]).logits)
    assert noted and set(noted) - known == set()


@pytest.mark.filterwarnings("ignore:invalid value encountered in divide")
@pytest.mark.parametrize("family", ["qwen3_5_moe", "nemotron_h", "lfm2_moe"])
@pytest.mark.usefixtures("noted")
def test_recurrent_states_of_several_sequences_are_joined(family):
    """A GPU computes them; elsewhere only the arrays' shapes are tested."""
    model = engine.load_model(tiny_directory(family), dtype=mx.bfloat16, expert_io="resident")
    texts = [[model.make_cache() for _ in range(3)] for _ in range(2)]
    for caches in texts:
        for i, cache in enumerate(caches):
            mx.eval(model(mx.array([[5 + i, 6, 7]]), cache))
    together, alone = texts
    for token in (1, 2, 3):
        got = model.step([SequenceRows(cache, [token]) for cache in together]).logits
        want = mx.concatenate([model.step([SequenceRows(cache, [token])]).logits for cache in alone])
        assert mx.array_equal(got, want, equal_nan=True)
        assert all((one.joined is not None) == one.joins for one in together[1] if isinstance(one, RecurrentCache))
    assert any(one.joins for one in together[0])
    for one, other in zip(together[1], alone[1], strict=True):
        assert all(mx.array_equal(*pair, equal_nan=True) for pair in zip(one.state[:-1], other.state[:-1], strict=True))


def test_nothing_is_compiled_where_no_gpu_computes(monkeypatch):
    monkeypatch.setattr(kernel_cache, "compiler_here", lambda: pytest.fail("a compiler was asked for"))
    built = Built(monkeypatch)
    if not mx.is_available(mx.gpu):
        with kernel_cache.compiling(shapes_of(tiny_directory("qwen3_5_moe")), CODE):
            pass
    assert not built.names


# ---- Metal's kernels, which are built while weights are read


class Built:
    """Stands in for `threads_allowed`: the names of the kernels that were built, by which MLX finds them."""

    def __init__(self, monkeypatch, enough=1 << 30, until=None):
        self.names, self.threads, self.enough, self.done, self.until = [], set(), enough, threading.Event(), until
        monkeypatch.setattr(kernel_cache, "threads_allowed", self)

    def __call__(self, program):
        self.names.append(program.kernel.name)
        self.threads.add(threading.current_thread())
        if len(self.names) == self.enough:
            self.done.set()
            assert self.until is None or self.until.wait(60)


def test_every_kernel_is_built_once_while_weights_are_read(monkeypatch):
    shapes = shapes_of(tiny_directory("qwen3_5_moe"))
    programs = kernel_cache.programs_of(shapes, CODE, target="metal")
    built = Built(monkeypatch, len(programs))
    with standing_in(backend="metal"), kernel_cache.compiling(shapes, CODE):
        assert built.done.wait(60)
    assert built.names == [one.kernel.name for one in programs] and len({one.key for one in programs}) == len(programs)
    assert threading.current_thread() not in built.threads and not any(one.is_alive() for one in built.threads)


def test_kernels_of_a_token_and_of_a_prompt_are_built_first():
    shapes = shapes_of(tiny_directory("qwen3_5_moe"))
    needed = set()
    for tokens in ((1,), (512,)):
        with closing(launches.launches_of(shapes, "metal", CODE, tokens)) as steps:
            needed |= {program.key for step in steps for program in step.programs}
    first = [one.key for one in kernel_cache.programs_of(shapes, CODE, drafts=True, target="metal")]
    assert 10 < len(needed) < len(first) and set(first[: len(needed)]) == needed


def test_loading_does_not_wait_for_kernels(monkeypatch):
    """At the end of loading the kernel that is being built is the last; the others are built at first use."""
    shapes, is_over = shapes_of(tiny_directory("qwen3_5_moe")), threading.Event()
    built = Built(monkeypatch, 2, is_over)
    with standing_in(backend="metal"), kernel_cache.compiling(shapes, CODE):
        assert built.done.wait(60)
        threading.Timer(0.2, is_over.set).start()
    assert len(built.names) == 2


@pytest.mark.parametrize("name", ["threads_allowed", "programs_of"])
def test_what_cannot_be_built_is_left_to_the_first_use(name, monkeypatch, capfd):
    def fails(*given):
        raise RuntimeError("[metal::Device] Unable to build metal library from source")

    monkeypatch.setattr(kernel_cache, name, fails)
    with standing_in(backend="metal"), kernel_cache.compiling(shapes_of(tiny_directory("qwen3_5_moe")), CODE):
        pass
    assert capfd.readouterr() == ("", "")


def test_an_error_of_loading_ends_the_building(monkeypatch):
    built = Built(monkeypatch)
    with (
        pytest.raises(OSError),
        standing_in(backend="metal"),
        kernel_cache.compiling(shapes_of(tiny_directory("qwen3_5_moe")), CODE),
    ):
        raise OSError
    assert not any(one.is_alive() for one in built.threads)


def generated(kernel, inputs, outputs, shapes, folder, capfd):
    """Returns the source that MLX makes of a Metal kernel and hands to Apple's compiler under a name with its hash."""
    capfd.readouterr()
    make = mx.fast.metal_kernel(**asdict(kernel))
    call = {"grid": (1, 1, 1), "threadgroup": (1, 1, 1), "output_shapes": shapes, "output_dtypes": outputs}
    mx.export_function(str(folder / "kernel"), lambda *given: make(inputs=given, verbose=True, **call), *inputs)
    return capfd.readouterr().out


@pytest.mark.skipif(mx.is_available(mx.gpu), reason="the device's own build computes")
@pytest.mark.parametrize("family", ["qwen3_5_moe", "deepseek_v3"])
def test_small_arrays_build_the_kernel_that_the_model_s_arrays_use(family, monkeypatch, tmp_path, capfd):
    """The text depends on dtypes, and on whether an array has at least 8 elements."""
    handed, used = [], {}
    text = Kernel.text

    def build(kernel, target, *given):
        def call(*, inputs, output_shapes, output_dtypes, **_):
            few = [array.size < launch.LEAST_ELEMENTS for array in inputs]
            one = Program(text(kernel, target, *given), [array.dtype for array in inputs], output_dtypes, few)
            used[one.key] = one, [array.shape for array in inputs], output_shapes
            return list(map(mx.zeros, output_shapes, output_dtypes))

        return call

    def metal_kernel(**text):
        def call(*, inputs, **given):
            handed.append((KernelText(**text), inputs, given))
            raise RuntimeError("[metal_kernel] No Metal back-end.")

        return call

    programs = kernel_cache.programs_of(shapes_of(tiny_directory(family)), CODE, target="metal")
    load_on_the_host(monkeypatch)
    Built(monkeypatch)
    with standing_in(backend="metal", build=build):
        model = engine.load_model(tiny_directory(family), dtype=mx.bfloat16, expert_io="resident")
        cache = model.make_cache()
        for tokens in (40, 1, 1):
            mx.eval(model(mx.ones((1, tokens), mx.int32), cache))
    monkeypatch.undo()
    with monkeypatch.context() as patch:
        patch.setattr(mx.fast, "metal_kernel", metal_kernel)
        for program in programs:
            with pytest.raises(RuntimeError, match="No Metal"):
                kernel_cache.threads_allowed(program)
    compared = 0
    for program, (kernel, inputs, given) in zip(programs, handed, strict=True):
        assert given["threadgroup"][0] > 1024 and all(array.size <= 8 for array in inputs)
        if program.key in used:
            one, shapes, outputs = used[program.key]
            real = [mx.zeros(shape, dtype) for shape, dtype in zip(shapes, one.inputs, strict=True)]
            small = generated(kernel, inputs, given["output_dtypes"], given["output_shapes"], tmp_path, capfd)
            assert small == generated(kernel, real, one.outputs, outputs, tmp_path, capfd) and "[[kernel]]" in small
            compared += 1
    assert compared > 5


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

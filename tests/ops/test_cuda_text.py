"""CUDA's compiler accepts every kernel of some models, at real shapes and in every stored form, without a GPU.

It needs NVIDIA's compiler: pip install '.[nvrtc]'.
"""

import re
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import pytest

from moeflux_mlx.formats.record import ExpertLayout
from moeflux_mlx.model.tensors import needed, stored_as
from moeflux_mlx.opening.kernel_cache import NVRTC, programs_of
from moeflux_mlx.opening.random_weights import Shapes
from moeflux_mlx.ops import attend_span, backend
from moeflux_mlx.ops.kernel_files import Compiler, Program
from moeflux_mlx.ops.launch import KernelText, ceildiv
from moeflux_mlx.ops.tiles import CODE
from moeflux_mlx.quant import AFFINE_BITS, GGUF_MODES, Quant, Quantization
from moeflux_mlx.spec import ModelArgs

TOOLKIT = next((path for path in (Path(entry) / "nvidia/cu13" for entry in sys.path) if path.is_dir()), None)
FORMS = [*(Quant(bits, 64) for bits in AFFINE_BITS)]
FORMS += [Quant(4, 32, "mxfp4"), Quant(8, 32, "mxfp8"), Quant(4, 16, "nvfp4")]
FORMS += [Quant(GGUF_MODES[name].bits, GGUF_MODES[name].group_size, name) for name in ("q3_k", "q4_k", "q6_k")]
VARIANTS = ("cogito-v2-671b", "gpt-oss-20b", "minimax-m2-230b-a10b", "laguna-xs-2.1-33b", "step-3.5-flash-196b")
VARIANTS += ("gemma-4-26b-a4b", "glm-5.3-flash-321b", "qwen3.8-flash-next-125b", "deepseek-v4-flash")
VARIANTS += ("nemotron-3-super-120b-a12b", "deepseek-v3.2", "lfm2-8b-a1b", "hunyuan-a13b-80b")
CASES = [("qwen3.6-35b-a3b", form) for form in FORMS] + [(variant, Quant(4, 64)) for variant in VARIANTS]

pytestmark = [pytest.mark.full, pytest.mark.skipif(TOOLKIT is None, reason="pip install '.[nvrtc]' brings a compiler")]


@pytest.fixture(scope="module")
def compiler():
    return Compiler("sm_90a", str(TOOLKIT / "lib" / NVRTC), [TOOLKIT / "include"])


@pytest.fixture(autouse=True)
def sizes_of_units(monkeypatch):
    """Those of the architecture that is compiled for."""
    monkeypatch.setitem(attend_span.SIZES, backend.capability(), attend_span.SIZES[9])


def programs(variant, form):
    args = replace(ModelArgs.from_variant(variant), quantization=Quantization(form))
    quants = {path: stored_as(args, path, shape[-1], form) for path, shape in needed(args).matrices.items()}
    layout = ExpertLayout.from_args(args, {layer: (form,) * 3 for layer in args.moe_layers})
    return programs_of(Shapes(args, layout, quants, mx.bfloat16), CODE)


@pytest.mark.parametrize(("variant", "form"), CASES, ids=str)
def test_every_kernel_compiles(variant, form, compiler):
    wanted = programs(variant, form)
    with ThreadPoolExecutor() as pool:
        compiled = list(pool.map(compiler.compile, wanted))
    assert wanted and not [one.function for one, code in zip(wanted, compiled, strict=True) if code is None]
    assert not [one.function for one, code in zip(wanted, compiled, strict=True) if not may_start(one.threads, code[1])]


def may_start(threads, code):
    """Whether a kernel's threads have enough registers: a quarter of a multiprocessor has 16,384, of which a warp takes
    whole 256 (CUDA C++ Programming Guide, compute capabilities 8.0 to 9.0).
    """
    (count,) = re.findall(rb"\x04\x2f\x08\x00.{4}(.{4})", code, re.DOTALL)  # of the attribute EIATTR_REGCOUNT
    warps = ceildiv(ceildiv(threads, 32), 4)
    return warps * ceildiv(32 * int.from_bytes(count, "little"), 256) * 256 <= 16384


def test_a_kernel_with_too_many_registers_is_noticed(compiler):
    (one, *_) = (one for one in programs("hunyuan-a13b-80b", Quant(4, 64)) if one.threads == 288)
    header = one.kernel.header.replace("__launch_bounds__(288)", "")
    _, code = compiler.compile(replace(one, kernel=replace(one.kernel, header=header)))
    assert header != one.kernel.header and not may_start(288, code)


def test_an_error_in_the_source_is_reported(compiler):
    text = KernelText("fault", ["x"], ["y"], "", "y[0] = simd_sum(x[0]);")
    assert compiler.compile(Program(text, [mx.float32], [mx.float32])) is None

"""Unpacking 4-bit codes through halves, which a tile chooses: the values, and a count of instructions against the
built-in way.
"""

import re
import subprocess
from collections import Counter

import mlx.core as mx
import numpy as np
import pytest
from grids import drawn, one_in_three
from test_kernels import FLOATS, LIMITS, Experts, Fused, error

from metal import msl
from moeflux_mlx.ops import launch, linear
from moeflux_mlx.ops.forms import Form
from moeflux_mlx.ops.matrix import Part
from moeflux_mlx.ops.tiles import TILES, TRIED, Tiles, using
from moeflux_mlx.quant import EXPERTS, Quant

pytestmark = pytest.mark.usefixtures("cpu_device")
HALVES = Tiles(next(one for one in TRIED["metal"] if "halves" in one["qmv"]))


@pytest.fixture
def host():
    with msl.launching(), using(HALVES):
        yield


# ---- values


@pytest.mark.parametrize("sizes, dtype", drawn([(1, 3, 256, 128), (2, 4, 128, 192)], FLOATS))
def test_experts_match_oracle(host, sizes, dtype):
    T, K, H, I = sizes
    e = Experts([T, K], T, K, H, I, dtype)
    assert error(e.gate_up(), e.want_act()) < LIMITS[dtype]
    assert error(e.down_combine(), e.want_out()) < LIMITS[dtype]


@pytest.mark.parametrize("what, dtype", drawn(["", "norm", "sum"], FLOATS))
def test_products_match_oracle(host, what, dtype):
    assert Fused(what, 24, 512, dtype).error() < LIMITS[dtype]


def test_a_row_has_the_same_bits_alone_and_in_company(host):
    case = Fused("norm", 24, 256, mx.bfloat16)
    x = mx.concatenate([case.x, 2 * case.x, -case.x])
    product = lambda x: linear.qmv(x, Part(EXPERTS, *case.matrix.arrays()), norm=case.norm)  # noqa: E731
    assert mx.array_equal(product(x), mx.concatenate([product(x[t : t + 1]) for t in range(3)]))


def test_every_code_is_exact_in_every_place(host):
    """A column of x at a time gives that column of the matrix, which holds each code in each place of a word."""
    codes = np.array([[(code + place) % 16 for place in range(64)] for code in range(16)], np.uint32)
    words = (codes.reshape(16, 8, 8) << (4 * np.arange(8, dtype=np.uint32))).sum(-1, dtype=np.uint32)
    ones, zeros = mx.ones((16, 1)), mx.zeros((16, 1))
    for first in range(0, 64, 16):
        x = mx.eye(64)[first : first + 16]
        got = linear.qmv(x, Part(EXPERTS, mx.array(words), ones, zeros))
        assert np.array_equal(np.array(got), codes.T[first : first + 16])


def test_only_integers_of_four_bits_are_unpacked_in_this_way():
    tile = HALVES.tile("metal", "qmv")
    forms = [Quant(4, 64), Quant(4, 32), Quant(8, 64), Quant(4, 32, "mxfp4")]
    names = [Form(quant, mx.bfloat16).header_of(tile) for quant in forms]
    assert names == ["affine4_halves", "affine4_halves", "affine", "e2m1"]
    assert Form(Quant(4, 64), mx.bfloat16).header_of(TILES["metal"]["qmv"]) == "affine4"


FAULTS = {
    "x of the second place is not divided": ("j = 1; j < 8", "j = 9; j < 8"),
    "the second four codes are the first": (">> (4 * j)", ">> (0 * j)"),
    "places are exchanged": ("float(odd.x), v[j + 1]", "float(odd.y), v[j + 1]"),
    "the sum of x misses a column": ("+ v[7]))", "))"),
}


@msl.needed
@pytest.mark.parametrize("name", one_in_three(FAULTS))
def test_planted_fault_is_caught(host, monkeypatch, name):
    msl.plant(monkeypatch, "affine4_halves.h.metal", *FAULTS[name])
    assert Fused("", 24, 512, mx.float32).error() > LIMITS[mx.float32]


# ---- a count of instructions

# What an instruction of LLVM's costs on an Apple GPU beside a multiplication and addition, 1: shifts take four times as
# long (philipturner/metal-benchmarks, M1 and M2), a half may be an operand of an instruction for floats (Mesa,
# agx_optimizer.c), and half of a word is a register. Loads are the same both ways.
SHIFTS, OTHERS = {"shl", "lshr"}, {"and", "or", "add", "fadd", "fsub", "fmul", "llvm.fma"}
FREE = {"load", "store", "getelementptr", "bitcast", "extractelement", "fpext", "ret"}


def instructions(form, rows, norm, x="bfloat16_t"):
    """Counts the instructions that multiply one chunk of 32 columns of `rows` rows."""
    flags = [flag for flag in msl.FLAGS if not re.match("-fsanitize|-ftrivial-auto|-O|-g", flag)]
    source = f"""extern "C" void probe(const thread uint* code, const thread float* scale, const thread float* bias,
        const device {x}* x, const device {x}* norm, thread float* acc, thread float* squares) {{
      const input_row<{norm}, {x}, {x}> row = {{x, norm, 0, squares}};
      codes_dot<{rows}, 4, 64, 32>(code, scale, bias, row, acc);
    }}"""
    unrolled = '#include "msl_host.h"\n#undef MLX_MTL_PRAGMA_UNROLL\n#define MLX_MTL_PRAGMA_UNROLL _Pragma("unroll")\n'
    text = unrolled + "".join(map(launch.text_of, launch.headers_of("qmv.metal", form))) + source
    command = [msl.COMPILER, *flags, "-O2", "-mllvm", "-inline-threshold=99999", f"-I{msl.HERE}"]
    done = subprocess.run(
        [*command, "-S", "-emit-llvm", "-o", "-", "-"], input=text, capture_output=True, text=True, check=True
    )
    body = re.search(r"define [^\n]*@probe\(.*?\n}", done.stdout, re.S)[0]
    named = re.findall(r"^ +(?:%\S+ = )?(?:tail )?(?:call [^@]*@(llvm\.\w+)|(\w+))", body, re.M)
    counts = Counter(intrinsic or name for intrinsic, name in named)
    assert counts.keys() <= SHIFTS | OTHERS | FREE
    return counts


def slots(counts):
    """The time in multiplications and additions: with one instruction after the other, and with shifts beside the
    others.
    """
    shifts, others = (sum(counts[name] for name in names) for names in (SHIFTS, OTHERS))
    return np.array([4 * shifts + others, max(4 * shifts, shifts + others)])


@msl.needed
def test_halves_take_a_third_fewer_instructions():
    """For the 4 rows that a simdgroup has in most products, of `qmv` and of gate and up."""
    before, after = (slots(instructions(form, 4, 0)) / 128 for form in ("affine4", "affine4_halves"))
    assert (after < before * 2 / 3).all(), (before, after)
    assert before == pytest.approx([6.65, 4.0], abs=0.01) and after == pytest.approx([3.12, 2.38], abs=0.01)


@msl.needed
def test_the_count_for_more_rows_of_a_normed_product():
    """By a seventh less arithmetic for each weight (ops/tiles.py)."""
    each = [slots(instructions("affine4", rows, 1))[0] / (32 * rows) for rows in (4, 8)]
    assert each == pytest.approx([7.84, 6.73], abs=0.01)

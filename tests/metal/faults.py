"""A sample kernel and the ways to break it: each fault names the check that must catch it.

The kernel, in `sample/`, has everything that the harness must get right: threadgroup memory behind a barrier, simdgroup
sums, vector loads, an input that may be `constant` or `device`, helpers in a header. It computes silu(gate x) * (up x)
for the experts in idx, from a blob of 4-bit weights.
"""

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from . import msl

BODY = (msl.HERE / "sample/swiglu.metal").read_text()
HEADER = (msl.HERE / "sample/swiglu.h.metal").read_text()
BARRIER = "  threadgroup_barrier(mem_flags::mem_threadgroup);\n"
LIMITS = {mx.float32: 2e-6, mx.float16: 1e-3, mx.bfloat16: 4e-3}  # largest error over largest value


# ---- the sample kernel on random data


@dataclass
class Sample:
    """One launch of the kernel, and the result that it must give."""

    inputs: list[mx.array]
    want: np.ndarray
    call: dict[str, Any]
    dtype: mx.Dtype

    def error(self, out: np.ndarray) -> float:
        got = bfloat16_values(out) if self.dtype == mx.bfloat16 else out
        return float(np.max(np.abs(got.astype(np.float64) - self.want)) / np.max(np.abs(self.want)))


def bfloat16_values(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def bfloat16_bits(values: np.ndarray) -> np.ndarray:
    u = np.asarray(values, np.float32).view(np.uint32)
    return ((u + 0x7FFF + ((u >> 16) & 1)) >> 16).astype(np.uint16)


def _matrix(rng: np.random.Generator, rows: int, columns: int) -> tuple[list[np.ndarray], np.ndarray]:
    """Returns (codes, scales, biases) as words, and the matrix that they store."""
    codes = rng.integers(0, 2**32, (rows, columns // 8), dtype=np.uint32)
    scales = bfloat16_bits(rng.uniform(0.002, 0.02, (rows, columns // 64)))
    biases = bfloat16_bits(rng.uniform(-0.15, 0.0, (rows, columns // 64)))
    nibbles = (codes[:, :, None] >> (4 * np.arange(8, dtype=np.uint32))) & 15
    values = nibbles.reshape(rows, columns // 64, 64) * bfloat16_values(scales)[..., None].astype(np.float64)
    values += bfloat16_values(biases)[..., None]
    return [codes.reshape(-1), *(a.reshape(-1).view(np.uint32) for a in (scales, biases))], values.reshape(rows, -1)


def sample(dtype: mx.Dtype, H: int, I: int, slots: int = 8, experts: int = 4) -> Sample:
    rng = np.random.default_rng([H, I, slots])
    words, matrices = [], []
    for _ in range(2 * experts):
        packed, values = _matrix(rng, I, H)
        words += packed
        matrices.append(values)
    idx = rng.integers(0, experts, slots).astype(np.int32)
    x = mx.array(rng.normal(size=H).astype(np.float32)).astype(dtype)
    exact = np.array(x.astype(mx.float32)).astype(np.float64)
    gate = np.stack([matrices[2 * e] @ exact for e in idx])
    up = np.stack([matrices[2 * e + 1] @ exact for e in idx])
    template = [("T", dtype), ("H", H), ("I", I), ("R", 4), ("SG", 4)]
    call = {"grid": (32, I // 4, slots), "threadgroup": (32, 4, 1), "template": template}
    call |= {"output_shapes": [(slots, I)], "output_dtypes": [dtype]}
    inputs = [mx.array(np.concatenate(words)), x, mx.array(idx)]
    return Sample(inputs, gate / (1 + np.exp(-gate)) * up, call, dtype)


def kernel(body: str = BODY, header: str = HEADER) -> Any:
    names = ["blob", "x", "idx"]
    return mx.fast.metal_kernel(name="swiglu", input_names=names, output_names=["out"], header=header, source=body)


# ---- faults


@dataclass
class Fault:
    caught_by: str  # "compiler", "checks" or "oracle"
    body: str = BODY
    header: str = HEADER
    slots: int = 8


def replaced(text: str, old: str, new: str) -> str:
    assert old in text, old
    return text.replace(old, new, 1)


def body(caught_by: str, old: str, new: str) -> Fault:
    return Fault(caught_by, body=replaced(BODY, old, new))


def header(caught_by: str, old: str, new: str) -> Fault:
    return Fault(caught_by, header=replaced(HEADER, old, new))


def before_barrier(line: str) -> str:
    return f"  {line}\n{BARRIER}"


FIXED_SPACE = replaced(
    replaced(HEADER, "template <typename P>\n", ""), "expert_of(P idx", "expert_of(const device int32_t* idx"
)
FIRST_POINTER = "const device uint32_t* gs ="
STORE = "      out[slot"
FIRST_STORE_LOOP = "  for (uint r = 0; r < R; r++) {\n    const float gate"

FAULTS = {
    "missing barrier": body("checks", BARRIER, ""),
    "barrier with mem_none": body("checks", "mem_flags::mem_threadgroup", "mem_flags::mem_none"),
    "threadgroup memory written after its readers": body(
        "checks", FIRST_STORE_LOOP, "  xs[lane] = 0;\n" + FIRST_STORE_LOOP
    ),
    "barrier in a divergent branch": body(
        "checks", BARRIER, "  if (simdgroup_index_in_threadgroup == 0) " + BARRIER.lstrip()
    ),
    "return before the barrier": body(
        "checks", BARRIER, before_barrier("if (thread_index_in_threadgroup == 63) return;")
    ),
    "simd_sum in a divergent branch": body(
        "checks",
        "const float up = simd_sum(u[r]);",
        "const float up = lane < 16 ? simd_sum(u[r]) :\n simd_sum(u[r]);",
    ),
    "lane leaves before simd_sum": body(
        "oracle",
        "const float gate = simd_sum(g[r]);",
        "if (lane == 5 && r == 2) break;\n const float gate = simd_sum(g[r]);",
    ),
    "all lanes write the result": body("checks", "if (lane == 0) {", "{"),
    "misaligned vector load": body("checks", "(gw + word)", "(gw + 1 + word)"),
    "read past the blob": body("checks", "(row0 + r) * HW + c;", "(row0 + r + 1) * HW + c + 3 * EW;"),
    "const cast away from an input": body("checks", STORE, "      ((device uint32_t*)blob)[0] = 1; out[slot"),
    "40 KiB of threadgroup memory": body("checks", "xs[H];", "xs[40 * H];"),
    "threadgroup scalar shared without barrier": body(
        "checks",
        "  const uint lane =",
        "  threadgroup float total; total = 0;\n  if (total < 0) return;\n  const uint lane =",
    ),
    "constant idx to device helper": Fault("compiler", header=FIXED_SPACE, slots=4),
    "threadgroup pointer as device": body(
        "compiler", FIRST_POINTER, f"const device float* bad = xs; (void)bad; {FIRST_POINTER}"
    ),
    "device pointer to thread helper": body("compiler", "q4_dot(a.x, xv)", "q4_dot(a.x, (const device float*)gw)"),
    "threadgroup pointer to thread helper": body("compiler", "q4_dot(a.x, xv)", "q4_dot(a.x, xs)"),
    "unqualified pointer": body("compiler", FIRST_POINTER, f"const float* bad = xs; (void)bad; {FIRST_POINTER}"),
    "write through const input": body("compiler", STORE, "      blob[0] = 1; out[slot"),
    "float to bfloat implicitly": body(
        "compiler", "T(gate / (1 + metal::exp(-gate)) * up)", "gate / (1 + metal::exp(-gate)) * up"
    ),
    "if constexpr, which C++14 lacks": body("compiler", "if (row0 >= I) {", "if constexpr (I % R) if (row0 >= I) {"),
    "structured binding, which C++14 lacks": body(
        "compiler", "if (row0 >= I) {", "const uint2 both = {lane, row0};\n  const auto [l, r] = both;\n  if (r >= I) {"
    ),
    "static_assert without a message": body(
        "compiler", "if (row0 >= I) {", "static_assert(R > 0);\n  if (row0 >= I) {"
    ),
    "misspelt function": body("compiler", "simd_sum(u[r])", "simdgroup_sum(u[r])"),
    "double": body("compiler", "const float up =", "const double up ="),
    "private array index out of bounds": body("checks", "i < 32; i++) {\n      xv[i]", "i < 33; i++) {\n      xv[i]"),
    "32 threads named": Fault("compiler", header=HEADER + "[[max_total_threads_per_threadgroup(32)]]\n"),
    "simd_sum missing": body("oracle", "simd_sum(u[r])", "u[r]"),
    "wrong nibble order": header("oracle", "(4 * j)", "(28 - 4 * j)"),
    "scale halves swapped": header("oracle", "(i & 1u) * 16u", "(~i & 1u) * 16u"),
    "gate and up swapped": body("oracle", "gate / (1 + metal::exp(-gate)) * up", "up / (1 + metal::exp(-up)) * gate"),
    "group of 128": body("oracle", "c / 8;", "c / 16;"),
    "bias forgotten": body("oracle", " + bf16_at(ub, group) * xsum", " + 0 * bf16_at(ub, group)"),
    "x loaded with a fixed stride": body("oracle", "32 * simdgroups_per_threadgroup", "32 * SG"),
    "accumulator not initialised": body("oracle", "float u[R] = {0};", "float u[R];"),
}


def caught_by(fault: Fault) -> str:
    """Returns what catches the fault: "compiler", "checks", "oracle", or "nobody"."""
    case = sample(mx.bfloat16, 256, 136, fault.slots)
    try:
        (out,) = msl.run(kernel(fault.body, fault.header), case.inputs, **case.call)
    except msl.Failure as e:
        return "compiler" if "error:" in str(e) else "checks"
    return "nobody" if case.error(out) < LIMITS[case.dtype] else "oracle"

"""Products of a short prompt's rows with a quantised matrix on CUDA's matrix units, from its codes.

For more rows it is faster to dequantise the matrix once for MLX's dense product.
"""

from math import prod

import mlx.core as mx

from ..quant import Quant
from .forms import Form, is_read
from .launch import LEAST_ELEMENTS, NO_KERNELS, Kernel, Launch, Reason, Shape, ceildiv
from .tiles import planned, tile_of

PIECE = 8  # columns that are unpacked at once; a tile's `ahead` is the number of such pieces, its `rows` that of eights
MOST_ROWS = 256


@planned()
def refusal(target: str, dtype: mx.Dtype, shape: Shape, quant: Quant | None) -> Reason | None:
    """Why the kernel does not multiply rows of `dtype` with a matrix of this shape and form."""
    if target != "cuda":
        return NO_KERNELS if target == "ops" else Reason("MLX's product of several rows is left alone on Metal")
    if dtype == mx.float32:
        return Reason("the matrix units do not multiply float32")
    if quant is None or len(shape) > 2:
        return Reason("the matrix holds floats" if quant is None else f"the matrix has {len(shape)} axes")
    if not is_read(quant, shape[1]):
        return Reason(f"no kernel reads {quant} in rows of {shape[1]} columns")
    scales = shape[0] * quant.groups(shape[1])
    return Reason(f"{scales} scales are fewer than {LEAST_ELEMENTS}") if scales < LEAST_ELEMENTS else None


@planned(512)
def plan(target: str, x: Shape, dtype: mx.Dtype, rows: int, form: Form, adds: bool) -> Launch:
    """The launch for rows x [..., I] and a matrix [`rows`, I]. `adds`: a residual is added."""
    tokens, columns = prod(x[:-1]), x[-1]
    tile = tile_of(target, "qmm", f"{rows}x{columns} {form}")
    template = {"X": dtype, "O": rows, "I": columns, "ADD": int(adds), "TILES": tile.rows, "SG": tile.simdgroups}
    template |= {"STEP": min(tile.ahead, form.chunk // PIECE), **form.template}
    groups = (ceildiv(rows, 16 * tile.simdgroups), ceildiv(tokens, 8 * tile.rows))
    kernel = Kernel("qmm", "x w scales biases residual count", "y", form.header)
    return Launch(target, kernel, template, groups, 32 * tile.simdgroups, [((*x[:-1], rows), dtype)])

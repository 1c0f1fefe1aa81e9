"""Finds scales and biases of experts that are NaN or infinite: a single one would silently spoil every answer.

It looks at records in memory and knows nothing of files.
"""

import numpy as np

from ..quant import GRID, MODES, NAN
from .record import Field, Record

# Of a dtype, or of a kind of scale: the type of a value's bits, and those that are all set in NaN and infinity.
EXPONENTS = {
    "BF16": ("<u2", 0x7F80),
    "F16": ("<u2", 0x7C00),
    "F32": ("<u4", 0x7F800000),
    **{scale: ("<u1", bits) for scale, bits in NAN.items()},
}


def not_finite(record: Record, rows: np.ndarray) -> tuple[int, Field] | None:
    """The first row and field of `rows`, uint8 [n, at least the record's size], that hold NaN or infinity, if any."""
    for projection in record.projections:
        for field in (one for one in projection.fields[1:] if one.part != GRID):
            is_nested = projection.quant.is_nested and field.dtype == "U8"
            small = "F16" if is_nested else projection.quant.scale
            kind, exponent = EXPONENTS[small if field.dtype == "U8" else field.dtype]
            bits = rows[:, field.offset : field.end].view(kind)
            if is_nested:
                mode = MODES[projection.quant.mode]
                bits = bits.reshape(len(rows), -1, mode.nested // 2)[..., : mode.header].reshape(len(rows), -1)
            spoilt = (bits & exponent == exponent).any(axis=1)
            if spoilt.any():
                return int(spoilt.argmax()), field
    return None

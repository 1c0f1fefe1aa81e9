"""Improves the codes and scales of a rounded matrix, with its errors' effect on typical inputs in view: coordinate
descent on tr((W - Q) H (W - Q)^T), one group after the other.

GPTQ cannot take back what it has done to earlier columns, and fits a group's scale before it knows the group's codes.
Here a group first gets the scale and bias of least error for its codes, given all other groups, then each of its codes
the best value, given all other codes. But for the rounding of scales, no step makes the error larger.
"""

from collections.abc import Sequence

import mlx.core as mx

from ..quant import Quant
from .affine import Line, codes_of

LEAST = 1e-6  # of the determinant of two equations, relative to its first term: they are then taken as dependent


def refined(
    w: mx.array,
    hessian: mx.array,
    codes: Sequence[mx.array],
    lines: Sequence[Line],
    quant: Quant,
    dtype: mx.Dtype,
    turns: int,
) -> tuple[list[mx.array], list[Line]]:
    """Improves all groups `turns` times.

    Args:
        w: the values, float32 [matrices, rows, cols].
        hessian: float32 [matrices, cols, cols], symmetric and positive definite.
        codes: of each group, float32 [matrices, rows, group_size].
        lines: scale and bias of each group, float32 [matrices, rows], as stored.
        quant: of mode "affine".
        dtype: of stored scales and biases.

    Returns:
        codes and lines, as they were given.
    """
    made, found = list(codes), list(lines)
    off = w - mx.concatenate([_values(*one) for one in zip(made, found, strict=True)], axis=-1)
    pull = off @ hessian  # minus half of the error's gradient by Q
    for _ in range(turns):
        for group, (own, line) in enumerate(zip(made, found, strict=True)):
            part = slice(group * quant.group_size, (group + 1) * quant.group_size)
            h, old = hessian[:, part, part], _values(own, line)
            line = _best_line(own, line, pull[..., part], h, dtype)
            moved = pull[..., part] - (_values(own, line) - old) @ h
            made[group], found[group] = _best_codes(own, line, moved, h, float(2**quant.bits - 1)), line
            pull = pull - (_values(made[group], line) - old) @ hessian[:, part]
            mx.eval(pull, made[group], line)
    return made, found


def _values(codes: mx.array, line: Line) -> mx.array:
    return line[0][..., None] * codes + line[1][..., None]


def _best_line(codes: mx.array, line: Line, pull: mx.array, h: mx.array, dtype: mx.Dtype) -> Line:
    """The scale and bias of least error for a group's codes [matrices, rows, group_size], as stored.

    The change (s, b) of scale and bias solves q H q s + q H 1 b = q pull and q H 1 s + 1 H 1 b = 1 pull. The scale is
    rounded, then the bias is the best for it.
    """
    by_codes = codes @ h
    qq, q1, one = (by_codes * codes).sum(-1), by_codes.sum(-1), h.sum((-2, -1))[:, None]
    of_scale, of_bias = (pull * codes).sum(-1), pull.sum(-1)
    determinant = qq * one - q1 * q1
    is_line = determinant > LEAST * qq * one
    step = (of_scale * one - of_bias * q1) / mx.where(is_line, determinant, 1)
    scale = (line[0] + mx.where(is_line, step, 0)).astype(dtype).astype(mx.float32)
    bias = (line[1] + (of_bias - q1 * (scale - line[0])) / one).astype(dtype).astype(mx.float32)
    return scale, bias


def _best_codes(codes: mx.array, line: Line, pull: mx.array, h: mx.array, top: float) -> mx.array:
    """A group's codes [matrices, rows, group_size], each the best one given all others."""
    made: list[mx.array] = []
    for column in range(codes.shape[-1]):
        old = codes[..., column]
        wanted = line[0] * old + line[1] + pull[..., 0] / h[:, column, column, None]
        made.append(codes_of(wanted, *line, top))
        change = (made[-1] - old) * line[0]
        pull = pull[..., 1:] - change[..., None] * h[:, None, column, column + 1 :]
    return mx.stack(made, axis=-1)

"""GPTQ (Frantar et al., 2022, arXiv:2210.17323): rounds the columns of a matrix one after the other, and moves the
error of each to the columns that are not rounded yet, so that the products with typical inputs change least. Then all
groups are improved by turns.

`refined` improves the codes and scales of a rounded matrix, with its errors' effect on typical inputs in view:
coordinate descent on tr((W - Q) H (W - Q)^T), one group after the other.

GPTQ cannot take back what it has done to earlier columns, and fits a group's scale before it knows the group's codes.
Here a group first gets the scale and bias of least error for its codes, given all other groups, then each of its codes
the best value, given all other codes. But for the rounding of scales, no step makes the error larger.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import mlx.core as mx

from ..quant import INTEGER, Quant
from .affine import Fitted, Line, codes_of, fit_affine, packed
from .weights import group_weights

BLOCK = 128  # columns whose errors reach the columns behind them in one product; whole groups
CHUNK_VALUES = 1 << 24  # of a matrix that are rounded at a time, in whole rows: 64 MiB as float32
TURNS = 4  # of `refined`; more have less than 0.5 % less error


def gptq(
    values: mx.array,
    quant: Quant,
    hessian: mx.array,
    damping: float = 0.01,
    dtype: mx.Dtype = mx.bfloat16,
    turns: int = TURNS,
) -> tuple[mx.array, mx.array, mx.array]:
    """Rounds matrices W so that tr((W - Q) H (W - Q)^T) becomes small, where H is the sum of x x^T over inputs x.

    The scale and bias of a group are fitted when its first column is reached, to the values as they are then, with H's
    diagonal as the importance of the columns. If H is a multiple of the identity, that is the result of `rounded`.
    Rows do not depend on one another, so large matrices are rounded some rows at a time, with one factor.

    Args:
        values: [..., rows, cols] of a floating dtype, finite. Matrices are rounded side by side, which keeps a GPU
            busy.
        quant: of mode "affine"; its groups divide `cols`.
        hessian: [..., cols, cols], symmetric and positive semidefinite, of any scale. A column whose diagonal is zero
            never had an input: it gets its nearest codes.
        damping: added to the diagonal, as a part of its mean.
        dtype: of scales and biases.
        turns: of improvements after GPTQ.

    Returns:
        words, scales and biases, as `mx.quantize` returns them.

    Raises:
        ValueError: the form is not affine, or the shapes do not fit.
    """
    *lead, rows, columns = values.shape
    if quant.codes != INTEGER or columns % quant.group_size or hessian.shape != (*lead, columns, columns):
        raise ValueError(f"GPTQ of {quant}: values are {values.shape}, the Hessian is {hessian.shape}")
    w = values.reshape(-1, rows, columns)
    h = hessian.reshape(-1, columns, columns).astype(mx.float32)
    h, importance = damped(h, damping), mx.diagonal(h, axis1=-2, axis2=-1)
    u, step, parts = _factor(h), max(1, CHUNK_VALUES // columns), []
    for row in range(0, rows, step):
        made = _Rounded(quant, dtype)
        parts.append(made.rounded(w[:, row : row + step].astype(mx.float32), h, u, importance, turns))
        mx.eval(parts[-1])
    words, scales, biases = (
        mx.concatenate(list(part), axis=1).reshape(*lead, rows, -1) for part in zip(*parts, strict=True)
    )
    return words, scales, biases


def damped(hessian: mx.array, damping: float) -> mx.array:
    """A Hessian [..., cols, cols] with a part of its diagonal's mean added to the diagonal, so that it has an inverse;
    the whole mean is added where no input has been."""
    diagonal = mx.diagonal(hessian, axis1=-2, axis2=-1)
    mean = diagonal.mean(-1, keepdims=True)
    mean = mx.where(mean > 0, mean, 1)
    added = damping * mean + mx.where(diagonal > 0, 0, mean)
    return hessian + added[..., None] * mx.eye(hessian.shape[-1])


def _factor(hessian: mx.array) -> mx.array:
    """The upper triangle U for which U^T U is the inverse of the Hessian.

    H = V V^T with an upper triangle V, which is the Cholesky factor of H with rows and columns in reverse order; U is
    its inverse.
    """
    lower = mx.linalg.cholesky(hessian[:, ::-1, ::-1], stream=mx.cpu)
    return mx.linalg.tri_inv(lower[:, ::-1, ::-1], upper=True, stream=mx.cpu)


@dataclass
class _Rounded:
    """Rows of matrices, of which some columns are rounded so far."""

    quant: Quant
    dtype: mx.Dtype
    codes: list[mx.array] = field(default_factory=list)  # float32 [matrices, rows]
    lines: list[Line] = field(default_factory=list)  # of groups, each float32 [matrices, rows]

    def rounded(self, w: mx.array, h: mx.array, u: mx.array, importance: mx.array, turns: int) -> Fitted:
        """The words, scales and biases of w [matrices, rows, cols]; `u`: the factor of the Hessian `h`."""
        left, columns = w, w.shape[-1]
        for start in range(0, columns, BLOCK):
            stop = min(start + BLOCK, columns)
            errors = self.block(left[..., : stop - start], u[:, start:stop, start:stop], importance[:, start:stop])
            left = left[..., stop - start :] - errors @ u[:, start:stop, stop:]
        codes, lines = refined(w, h, self.groups(), self.lines, self.quant, self.dtype, turns)
        words = packed(mx.concatenate(codes, axis=-1).astype(mx.uint8), self.quant.bits)
        scales, biases = (mx.stack([line[part] for line in lines], axis=-1).astype(self.dtype) for part in (0, 1))
        return words, scales, biases

    def block(self, w: mx.array, u: mx.array, importance: mx.array) -> mx.array:
        """Rounds the columns of a block.

        Args:
            w: [matrices, rows, columns], the values, with the errors of earlier blocks.
            u: [matrices, columns, columns], the block's part of the factor.
            importance: [matrices, columns].

        Returns:
            [matrices, rows, columns], the errors, to be multiplied by the factor's rows behind the block.
        """
        errors: list[mx.array] = []
        size, top = self.quant.group_size, float(2**self.quant.bits - 1)
        for column in range(w.shape[-1]):
            if column % size == 0:
                self.lines.append(self._fitted(w[..., :size], importance[:, column : column + size]))
            x, (scale, bias) = w[..., 0], self.lines[-1]
            code = codes_of(x, scale, bias, top)
            error = (x - (scale * code + bias)) / u[:, column, column, None]
            w = w[..., 1:] - error[..., None] * u[:, column, None, column + 1 :]
            self.codes.append(code)
            errors.append(error)
        mx.eval(self.codes, errors)
        return mx.stack(errors, axis=-1)

    def _fitted(self, w: mx.array, importance: mx.array) -> Line:
        """The scales and biases of groups w [matrices, rows, group_size]."""
        size = self.quant.group_size
        weights = group_weights(importance, size, size)
        fits = [fit_affine(one, self.quant, of_it, self.dtype) for one, of_it in zip(w, weights, strict=True)]
        scale, bias = (mx.stack([fit[part][:, 0] for fit in fits]).astype(mx.float32) for part in (1, 2))
        return scale, bias

    def groups(self) -> list[mx.array]:
        """The codes of each group, [matrices, rows, group_size]."""
        size = self.quant.group_size
        return [mx.stack(self.codes[at : at + size], axis=-1) for at in range(0, len(self.codes), size)]


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

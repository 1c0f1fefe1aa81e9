"""GPTQ (Frantar et al., 2022, arXiv:2210.17323): rounds the columns of a matrix one after the other, and moves the
error of each to the columns that are not rounded yet, so that the products with typical inputs change least.
"""

from dataclasses import dataclass, field

import mlx.core as mx

from ..quant import INTEGER, Quant
from .affine import Line, codes_of, fit_affine
from .codes import packed
from .weights import group_weights

BLOCK = 128  # columns whose errors reach the columns behind them in one product; whole groups


def gptq(
    values: mx.array, quant: Quant, hessian: mx.array, damping: float = 0.01, dtype: mx.Dtype = mx.bfloat16
) -> tuple[mx.array, mx.array, mx.array]:
    """Rounds matrices W so that tr((W - Q) H (W - Q)^T) becomes small, where H is the sum of x x^T over inputs x.

    The scale and bias of a group are fitted when its first column is reached, to the values as they are then, with H's
    diagonal as the importance of the columns. If H is a multiple of the identity, the result is that of `rounded`.

    Args:
        values: [..., rows, cols] of a floating dtype, finite. Matrices are rounded side by side, which keeps a GPU
            busy.
        quant: of mode "affine"; its groups divide `cols`.
        hessian: [..., cols, cols], symmetric and positive semidefinite, of any scale. A column whose diagonal is zero
            never had an input: it gets its nearest codes.
        damping: added to the diagonal, as a part of its mean.
        dtype: of scales and biases.

    Returns:
        words, scales and biases, as `mx.quantize` returns them.

    Raises:
        ValueError: the form is not affine, or the shapes do not fit.
    """
    *lead, rows, columns = values.shape
    if quant.codes != INTEGER or columns % quant.group_size or hessian.shape != (*lead, columns, columns):
        raise ValueError(f"GPTQ of {quant}: values are {values.shape}, the Hessian is {hessian.shape}")
    w = values.reshape(-1, rows, columns).astype(mx.float32)
    h = hessian.reshape(-1, columns, columns).astype(mx.float32)
    u, importance = _factor(h, damping), mx.diagonal(h, axis1=-2, axis2=-1)
    made = _Rounded(quant, dtype)
    for start in range(0, columns, BLOCK):
        stop = min(start + BLOCK, columns)
        errors = made.block(w[..., : stop - start], u[:, start:stop, start:stop], importance[:, start:stop])
        w = w[..., stop - start :] - errors @ u[:, start:stop, stop:]
    words, scales, biases = (part.reshape(*lead, rows, -1) for part in made.parts())
    return words, scales, biases


def _factor(hessian: mx.array, damping: float) -> mx.array:
    """The upper triangle U for which U^T U is the inverse of the damped Hessian.

    H = V V^T with an upper triangle V, which is the Cholesky factor of H with rows and columns in reverse order; U is
    its inverse.
    """
    diagonal = mx.diagonal(hessian, axis1=-2, axis2=-1)
    mean = diagonal.mean(-1, keepdims=True)
    mean = mx.where(mean > 0, mean, 1)
    added = damping * mean + mx.where(diagonal > 0, 0, mean)
    damped = hessian + added[..., None] * mx.eye(hessian.shape[-1])
    lower = mx.linalg.cholesky(damped[:, ::-1, ::-1], stream=mx.cpu)
    return mx.linalg.tri_inv(lower[:, ::-1, ::-1], upper=True, stream=mx.cpu)


@dataclass
class _Rounded:
    """The columns that are rounded so far."""

    quant: Quant
    dtype: mx.Dtype
    codes: list[mx.array] = field(default_factory=list)  # uint8 [matrices, rows]
    lines: list[Line] = field(default_factory=list)  # of groups, each float32 [matrices, rows]

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
            self.codes.append(code.astype(mx.uint8))
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

    def parts(self) -> tuple[mx.array, mx.array, mx.array]:
        """Words, scales and biases, each [matrices, rows, ...]."""
        scales, biases = (mx.stack([line[part] for line in self.lines], axis=-1).astype(self.dtype) for part in (0, 1))
        return packed(mx.stack(self.codes, axis=-1), self.quant.bits), scales, biases

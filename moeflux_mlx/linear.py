"""Linear layers and the embedding, dense or affine-quantised, with the same call for both.

A layer is declared with its sizes only; `weights` fills it and tells it how its tensor is stored.
"""

import mlx.core as mx
import mlx.nn as nn


class Weight(nn.Module):
    """A matrix [..., rows, cols], dense or quantised in groups along `cols`."""

    def __init__(self, *shape: int):
        super().__init__()
        self._shape = shape
        self.bits = 0  # 0: dense
        self.group_size = 0
        self.weight = mx.zeros(shape)

    @property
    def shape(self) -> tuple[int, ...]:
        """The logical shape, whatever the storage."""
        return self._shape

    def multiply(self, x: mx.array, transpose: bool) -> mx.array:
        """x @ W.T (`transpose`) or x @ W; leading axes broadcast."""
        if not self.bits:
            weight = self.weight.swapaxes(-1, -2) if transpose else self.weight
            return x @ weight
        return mx.quantized_matmul(
            x, self.weight, self.scales, self.biases, transpose, self.group_size, self.bits
        )  # fmt: skip

    def dequantized(self) -> mx.array:
        if not self.bits:
            return self.weight
        return mx.dequantize(self.weight, self.scales, self.biases, self.group_size, self.bits)


class Linear(Weight):
    """y = x @ W.T with W [out_features, in_features]; no bias vector: no supported model has one."""

    def __init__(self, in_features: int, out_features: int):
        super().__init__(out_features, in_features)

    def __call__(self, x: mx.array) -> mx.array:
        return self.multiply(x, transpose=True)


class Embedding(Weight):
    """Rows of W [num_embeddings, dims] by token id."""

    def __init__(self, num_embeddings: int, dims: int):
        super().__init__(num_embeddings, dims)

    def __call__(self, ids: mx.array) -> mx.array:
        if not self.bits:
            return self.weight[ids]
        return mx.dequantize(
            self.weight[ids], self.scales[ids], self.biases[ids], self.group_size, self.bits
        )  # fmt: skip


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight, in float32 inside (arXiv:1910.07467)."""

    def __init__(self, dims: int, eps: float):
        super().__init__()
        self.weight = mx.ones((dims,))
        self.eps = eps

    def __call__(self, x: mx.array) -> mx.array:
        return mx.fast.rms_norm(x, self.weight, self.eps)


class MLP(nn.Module):
    """down(silu(gate x) * up x) (SwiGLU, arXiv:2002.05202)."""

    def __init__(self, dims: int, hidden_dims: int):
        super().__init__()
        self.gate_proj = Linear(dims, hidden_dims)
        self.up_proj = Linear(dims, hidden_dims)
        self.down_proj = Linear(hidden_dims, dims)

    def __call__(self, x: mx.array) -> mx.array:
        return self.down_proj(nn.silu(self.gate_proj(x)) * self.up_proj(x))

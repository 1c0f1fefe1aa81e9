"""Linear layers and the embedding, dense or affine-quantised, with the same call for both.

A layer is declared with its sizes only; `weights` fills it and tells it how its tensor is stored.
"""

from itertools import accumulate

import mlx.core as mx
import mlx.nn as nn

from ..ops import cpu, kernels


class Weight(nn.Module):
    """A matrix [..., rows, cols], dense or quantised in groups along `cols`."""

    def __init__(self, *shape: int):
        super().__init__()
        self._shape = shape
        self.bits = 0  # 0: dense
        self.group_size = 0
        self.filled = False  # True once it has a tensor; until then the weight is zeros that nobody has evaluated
        self.weight = mx.zeros(shape)

    @property
    def shape(self) -> tuple[int, ...]:
        """The logical shape, whatever the storage."""
        return self._shape

    def tensors(self) -> tuple[str, ...]:
        """Names of the arrays that hold it."""
        return ("weight", "scales", "biases") if self.bits else ("weight",)

    def multiply(self, x: mx.array, transpose: bool) -> mx.array:
        """x @ W.T (`transpose`) or x @ W; leading axes broadcast."""
        # Dense too where a row is a single group: MLX 0.32.4's CUDA product leaves its output unwritten there.
        if not self.bits or (self.scales.shape[-1] == 1 and kernels.backend() == "cuda"):
            weight = self.dequantized()
            return x @ (weight.swapaxes(-1, -2) if transpose else weight)
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
        if cpu.takes(x):
            return cpu.linear(x, self)
        rows = x.size // x.shape[-1]
        if self.bits == 4 and self.group_size == kernels.GROUP and kernels.qmv4_pays(rows, *self.shape):
            y = kernels.qmv4(x.reshape(rows, -1), self.weight, self.scales, self.biases)
            return y.reshape(*x.shape[:-1], -1)
        return self.multiply(x, transpose=True)


class Stack:
    """Layers that share their input, multiplied at once if they are stored alike: fewer, larger products.

    The layers become views of the stacked arrays, so nothing is kept twice.
    """

    def __init__(self, *layers: Linear):
        self.layers = layers
        self.ends = list(accumulate(layer.shape[0] for layer in layers))
        self.stacked: Linear | None = None
        alike = len({(layer.bits, layer.group_size, layer.weight.dtype) for layer in layers}) == 1
        if alike and all(layer.bits or layer.filled for layer in layers):
            self.stacked = self._join()

    def _join(self) -> Linear:
        joined = Linear(self.layers[0].shape[1], self.ends[-1])
        joined.bits, joined.group_size = self.layers[0].bits, self.layers[0].group_size
        for part in joined.tensors():
            setattr(joined, part, mx.concatenate([layer[part] for layer in self.layers]))
            mx.eval(joined[part])
            for layer, start, end in zip(self.layers, [0, *self.ends], self.ends, strict=False):
                setattr(layer, part, joined[part][start:end])
        return joined

    def __call__(self, x: mx.array) -> list[mx.array]:
        if self.stacked is None:
            return [layer(x) for layer in self.layers]
        if cpu.takes(x):
            return cpu.split(self.stacked(x), *self.ends[:-1])
        return list(mx.split(self.stacked(x), self.ends[:-1], axis=-1))


class Embedding(Weight):
    """Rows of W [num_embeddings, dims] by token id."""

    def __init__(self, num_embeddings: int, dims: int):
        super().__init__(num_embeddings, dims)

    def __call__(self, ids: mx.array) -> mx.array:
        if cpu.takes(ids):
            return cpu.embed(ids, self)
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
        if cpu.takes(x):
            return cpu.rms_norm(x, self.weight, self.eps)
        return mx.fast.rms_norm(x, self.weight, self.eps)


class MLP(nn.Module):
    """down(silu(gate x) * up x) (SwiGLU, arXiv:2002.05202)."""

    def __init__(self, dims: int, hidden_dims: int):
        super().__init__()
        self.gate_proj = Linear(dims, hidden_dims)
        self.up_proj = Linear(dims, hidden_dims)
        self.down_proj = Linear(hidden_dims, dims)
        self.arrange()

    def arrange(self) -> None:
        """Joins the layers that read x; called again once they have their tensors."""
        self._inputs = Stack(self.gate_proj, self.up_proj)

    def __call__(self, x: mx.array, scale: mx.array | None = None) -> mx.array:
        """`scale` [..., 1] multiplies the result: before the last product, where MLX fuses it with the SwiGLU."""
        gate, up = self._inputs(x)
        act = cpu.silu_mul(gate, up) if cpu.takes(x) else nn.silu(gate) * up
        return self.down_proj(act if scale is None else (act * scale).astype(act.dtype))

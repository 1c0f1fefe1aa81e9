"""Computes the routed experts from packed blocks, wherever the loader keeps them.

A few tokens (decode) go through kernels that read packed blocks by slot. More tokens (prefill) go
expert by expert: rows are sorted by expert, and waves of a few experts are unpacked into dense stacks,
so that the temporary memory is known in advance. Which path and which waves depend on the tokens and
the sizes only, never on what happens to be in memory: the result has the same bits in every I/O mode.
"""

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from . import kernels
from .layout import BITS, GROUP_SIZE, ExpertLayout
from .loader import ExpertLoader

DECODE_ROWS = 8  # up to this many tokens the kernels re-read an expert for each token that uses it
WAVE_BYTES = 128 << 20  # of packed blocks unpacked at a time


class RoutedExperts:
    """Implements `moe.RoutedExpertsCall` over an `ExpertLoader`."""

    def __init__(self, loader: ExpertLoader):
        self.loader = loader
        self.layout = loader.layout

    def __call__(
        self,
        layer: int,
        x: mx.array,
        ids: mx.array,
        weights: mx.array,
        h_mid: mx.array,
        shared: mx.array | None,
    ) -> mx.array:
        if x.shape[0] <= DECODE_ROWS:
            return self._decode(layer, x, ids, weights, h_mid, shared)
        return self._prefill(layer, x, ids, weights, h_mid, shared)

    def _decode(
        self,
        layer: int,
        x: mx.array,
        ids: mx.array,
        weights: mx.array,
        h_mid: mx.array,
        shared: mx.array | None,
    ) -> mx.array:
        blob, slots = self.loader.resident(layer), ids
        if blob is None:
            batch = self.loader.acquire(layer, np.array(ids))
            blob, slots = batch.blob, mx.array(batch.slots)
        act = kernels.expert_gate_up(x, blob, slots, moe_intermediate_size=self.layout.moe_intermediate_size)
        return kernels.expert_down_combine(act, blob, slots, weights, h_mid, shared)

    def _prefill(
        self,
        layer: int,
        x: mx.array,
        ids: mx.array,
        weights: mx.array,
        h_mid: mx.array,
        shared: mx.array | None,
    ) -> mx.array:
        T, K = ids.shape
        flat = np.array(ids).reshape(-1)
        order = np.argsort(flat, kind="stable")  # rows of one expert become neighbours, in token order
        by_expert = flat[order]
        outputs = []
        for start, stop in waves(by_expert, max(1, WAVE_BYTES // self.layout.expert_stride)):
            used, local = np.unique(by_expert[start:stop], return_inverse=True)
            stack = self._stack(layer, used)
            rows = x[mx.array(order[start:stop] // K)]
            outputs.append(grouped_ffn(rows, stack, mx.array(local.astype(np.uint32)), self.layout))
            mx.async_eval(outputs[-1])
        back = mx.array(np.argsort(order))
        expert_out = mx.concatenate(outputs)[back].reshape(T, K, -1)  # [T, K, H]
        return kernels.moe_combine(expert_out, weights, h_mid, shared)

    def _stack(self, layer: int, experts: np.ndarray) -> mx.array:
        """The packed blocks [n, words] of `experts`, in order."""
        blob = self.loader.resident(layer)
        if blob is not None:
            return blob[mx.array(experts)]
        batch = self.loader.acquire(layer, experts)
        return batch.blob[mx.array(batch.slots)]


def waves(sorted_ids: np.ndarray, experts_per_wave: int) -> list[tuple[int, int]]:
    """Cuts rows sorted by expert into [start, stop) ranges of at most `experts_per_wave` experts each."""
    firsts = np.flatnonzero(np.diff(sorted_ids, prepend=-1))
    starts = firsts[::experts_per_wave].tolist()
    return list(zip(starts, [*starts[1:], len(sorted_ids)], strict=True))


def grouped_ffn(rows: mx.array, blob: mx.array, local: mx.array, layout: ExpertLayout) -> mx.array:
    """down(silu(gate x) * up x) with each row's own expert.

    Args:
        rows: [N, H], sorted by expert.
        blob: [n, words] packed blocks.
        local: [N] uint32 index into `blob`, ascending.
    """
    x = rows[:, None]
    parts = [_dense(blob, layout, i, rows.dtype) for i in range(0, 9, 3)]

    def project(x: mx.array, part: tuple[mx.array, mx.array, mx.array]) -> mx.array:
        return mx.gather_qmm(
            x, *part, rhs_indices=local, transpose=True, group_size=GROUP_SIZE, bits=BITS, sorted_indices=True
        )

    return project(nn.silu(project(x, parts[0])) * project(x, parts[1]), parts[2])[:, 0]


def _dense(
    blob: mx.array, layout: ExpertLayout, first: int, dtype: mx.Dtype
) -> tuple[mx.array, mx.array, mx.array]:
    """weight, scales, biases of one projection as dense stacks [n, rows, ...]; scales in `dtype`."""
    weight, *affine = (
        blob[:, c.offset // 4 : (c.offset + c.size) // 4] for c in layout.components[first : first + 3]
    )
    shape = (blob.shape[0], *layout.components[first].shape)
    scales, biases = (
        mx.view(mx.contiguous(a), mx.bfloat16).reshape(*shape[:2], -1).astype(dtype) for a in affine
    )
    return mx.contiguous(weight).reshape(shape), scales, biases

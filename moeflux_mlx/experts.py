"""Computes the routed experts from packed blocks, wherever the loader keeps them.

A few tokens (decode) go through kernels that read packed blocks by slot. More tokens (prefill) go
expert by expert: rows are sorted by expert, and waves of a few experts are unpacked into dense stacks,
so that the temporary memory is known in advance. Which path and which waves depend on the tokens and
the sizes only, never on what happens to be in memory: the result has the same bits in every I/O mode.
"""

from collections.abc import Iterator

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from . import cpu, kernels, native
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
        if blob is None and cpu.takes(x):
            return self._decode_native(layer, x, ids, weights, h_mid, shared)
        if blob is None:
            batch = self.loader.acquire(layer, np.array(ids))
            batch.wait()
            rows, where = batch.weights()
            used, local = np.unique(where, return_inverse=True)
            blob, slots = mx.array(rows[used]), mx.array(local.reshape(where.shape).astype(np.uint32))
            batch.release()
        act = kernels.expert_gate_up(x, blob, slots, moe_intermediate_size=self.layout.moe_intermediate_size)
        return kernels.expert_down_combine(act, blob, slots, weights, h_mid, shared)

    def _decode_native(
        self,
        layer: int,
        x: mx.array,
        ids: mx.array,
        weights: mx.array,
        h_mid: mx.array,
        shared: mx.array | None,
    ) -> mx.array:
        """Gate and up of the experts in memory run while the others are read."""
        batch = self.loader.acquire(layer, cpu.view(ids))
        blob, slots = batch.weights()
        rows, width = cpu.view(x), self.layout.moe_intermediate_size
        ready = batch.ready[0]
        if len(rows) > 1 or ready.all() or not ready.any():
            batch.wait()
            act = native.expert_gate_up(rows, blob, slots, width)
        else:
            act = np.empty((*slots.shape, width), np.float32)
            act[:, ready] = native.expert_gate_up(rows, blob, np.ascontiguousarray(slots[:, ready]), width)
            batch.wait()
            act[:, ~ready] = native.expert_gate_up(rows, blob, np.ascontiguousarray(slots[:, ~ready]), width)
        mid = cpu.view(h_mid)
        out = native.expert_down_combine(
            act, blob, slots, cpu.view(weights), mid, None if shared is None else cpu.view(shared)
        )
        batch.release()
        return mx.array(out)

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
        rows = order // K  # of x
        native_path = cpu.takes(x)
        compute = self._native_wave if native_path else self._gpu_wave
        outputs = [compute(layer, x, rows[part], flat[order][part]) for part in self._waves(layer, flat[order])]
        back = np.argsort(order)
        if native_path:
            expert_out = np.concatenate(outputs)[back].reshape(T, K, -1)
            return cpu.combine(expert_out, weights, h_mid, shared)
        expert_out = mx.concatenate(outputs)[mx.array(back)].reshape(T, K, -1)  # [T, K, H]
        return kernels.moe_combine(expert_out, weights, h_mid, shared)

    def _waves(self, layer: int, by_expert: np.ndarray) -> Iterator[slice]:
        """Row ranges of a few experts each; the next wave is read while the caller computes this one."""
        ranges = waves(by_expert, max(1, WAVE_BYTES // self.layout.expert_stride))
        for this, following in zip(ranges, [*ranges[1:], None], strict=True):
            if following is not None:
                self.loader.prefetch_next(layer, np.unique(by_expert[this]), np.unique(by_expert[following]))
            yield this

    def _native_wave(self, layer: int, x: mx.array, rows: np.ndarray, experts: np.ndarray) -> np.ndarray:
        """Expert outputs [N, H] of the wave's rows, expert by expert."""
        batch = self.loader.acquire(layer, experts)
        batch.wait()
        blob, slots = batch.weights()
        inputs, outputs = cpu.view(x)[rows], []
        for part in waves(slots, 1):
            outputs.append(cpu.expert_ffn(inputs[part], blob, slots[part], self.layout))
        batch.release()
        return np.concatenate(outputs)

    def _gpu_wave(self, layer: int, x: mx.array, rows: np.ndarray, experts: np.ndarray) -> mx.array:
        used, local = np.unique(experts, return_inverse=True)
        out = grouped_ffn(x[mx.array(rows)], self._stack(layer, used), mx.array(local.astype(np.uint32)), self.layout)
        mx.async_eval(out)
        return out

    def _stack(self, layer: int, experts: np.ndarray) -> mx.array:
        """The packed blocks [n, words] of `experts`, in order."""
        blob = self.loader.resident(layer)
        if blob is not None:
            return blob[mx.array(experts)]
        batch = self.loader.acquire(layer, experts)
        batch.wait()
        rows, where = batch.weights()
        stack = mx.array(rows[where]) if isinstance(rows, np.ndarray) else rows[mx.array(where)]
        batch.release(stack)
        return stack


def waves(grouped: np.ndarray, groups_per_wave: int) -> list[slice]:
    """Cuts rows whose equal ids are neighbours into ranges of at most `groups_per_wave` different ids."""
    starts = np.flatnonzero(np.diff(grouped.astype(np.int64), prepend=-1))[::groups_per_wave].tolist()
    return [slice(*ends) for ends in zip(starts, [*starts[1:], len(grouped)], strict=True)]


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


def _dense(blob: mx.array, layout: ExpertLayout, first: int, dtype: mx.Dtype) -> tuple[mx.array, mx.array, mx.array]:
    """weight, scales, biases of one projection as dense stacks [n, rows, ...]; scales in `dtype`."""
    weight, *affine = (blob[:, c.offset // 4 : (c.offset + c.size) // 4] for c in layout.components[first : first + 3])
    shape = (blob.shape[0], *layout.components[first].shape)
    scales, biases = (mx.view(mx.contiguous(a), mx.bfloat16).reshape(*shape[:2], -1).astype(dtype) for a in affine)
    return mx.contiguous(weight).reshape(shape), scales, biases

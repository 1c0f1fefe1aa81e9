"""Computes the routed experts from packed blocks, wherever the loader keeps them.

A few tokens (decode) go through kernels that read packed blocks by slot. More tokens (prefill) go
expert by expert: rows are sorted by expert, and waves of a few experts are taken apart into dense stacks,
so that the temporary memory is known in advance. The result has the same bits in every I/O mode: which path runs
depends on the tokens and the sizes only, never on what happens to be in memory, and so do waves where they show.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import cast

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ..engine.io_mode import IoMode
from ..formats.record import BITS, GROUP_SIZE, ExpertLayout
from ..model.moe import Routing
from ..ops import cpu, kernels, native
from .lookahead import Predictor, Trial
from .source import ExpertBatch, ExpertLoader

DECODE_ROWS = 8  # up to this many tokens the kernels re-read an expert for each token that uses it
WAVE_BYTES = 128 << 20  # of packed blocks taken apart at a time; of a wave that was read, four times as much exists
LARGEST_INDEX = 2**31 - 1
# Rows of an expert that one product takes. CUDA's packed product reads an expert once for each block, at the price
# of 16 rows or more, and its bits do not depend on the other blocks. On an H200, four layers of 256 experts at 512
# tokens: 16.5 ms, 35.8 by single rows, 17.6 and 18.9 by 32 and 64. Metal's has tiles for sorted single rows; not
# measured.
BLOCK_ROWS = {"cuda": 16, "metal": 1, "ops": 1}
NEARLY_ALL = 0.9  # share of a layer's experts in use from which the next layer's first ones are read unseen


class RoutedExperts:
    """Implements `moe.RoutedExpertsCall` over an `ExpertLoader`.

    Args:
        loader: where the experts are.
        prefetch: "lookahead" reads ahead what the next layer's router foresees, "previous" what the next
            layer used for the previous token, "off" nothing.
    """

    def __init__(self, loader: ExpertLoader, prefetch: str = "lookahead"):
        self.loader = loader
        self.layout = loader.layout
        self.prefetch = prefetch if loader.mode is IoMode.PREAD else "off"
        self.predictor, self.trial = Predictor(), Trial()
        self._started = 0.0
        self._ahead: dict[int, list[int]] = {}  # experts read ahead for a layer, to be judged when it runs

    def __call__(self, routing: Routing, x: mx.array, h_mid: mx.array, shared: mx.array | None) -> mx.array:
        if x.shape[0] > DECODE_ROWS:
            return self._prefill(routing, x, h_mid, shared)
        blob = self.loader.resident(routing.layer)
        if blob is not None:
            return self._kernels(blob, routing.ids, routing, x, h_mid, shared)
        if routing.guess is not None:
            mx.eval(routing.ids, routing.guess.ids, routing.guess.weights)  # one wait for both
        ids = np.array(routing.ids)
        decode = self._decode_native if cpu.takes(x) else self._decode_gpu
        with self.loader.acquire(routing.layer, ids) as batch:
            self._read_ahead(routing, ids)
            return decode(batch, routing, x, h_mid, shared)

    def wants_guess(self, layer: int, tokens: int) -> bool:
        return self.prefetch == "lookahead" and tokens == 1 and self.trial.ahead and self.predictor.pays(layer)

    def _read_ahead(self, routing: Routing, ids: np.ndarray) -> None:
        """For the next layer, after this one's experts have been asked for."""
        guess = routing.guess
        if self.loader.mode is IoMode.PREAD and len(ids) == 1:
            self._judge(routing.layer, ids[0])
        if guess is not None:
            wanted = self.predictor.confident(np.array(guess.ids), np.array(guess.weights))
            self._ahead[guess.layer] = self.loader.prefetch(guess.layer, wanted)
        elif self.prefetch == "previous" and len(ids) == 1:
            self._read_previous(routing.layer, ids)

    def _judge(self, layer: int, ids: np.ndarray) -> None:
        """Learns from what was read ahead for `layer`, and makes room where it is not worth keeping.

        In a pool smaller than one token's experts each layer keeps its share only: least-recently-used order
        alone would evict every block just before its layer comes round again.
        """
        self._time_token(layer)
        ahead = self._ahead.pop(layer, [])
        self.predictor.judge(layer, ahead, ids)
        self.loader.demote(layer, [expert for expert in ahead if expert not in ids])
        guesses = 0 if self.prefetch == "off" else len(ids)
        share = self.loader.slots_per_layer(spare=guesses)
        if share < len(ids):
            self.loader.demote(layer, ids[share:].tolist())

    def _time_token(self, layer: int) -> None:
        """Tells the trial how long a token took from its first layer's request to its last layer's."""
        if layer == self.layout.moe_layers[0]:
            self._started = time.perf_counter()
        elif layer == self.layout.moe_layers[-1] and self.prefetch != "off":
            self.trial.token(time.perf_counter() - self._started)

    def _read_previous(self, layer: int, ids: np.ndarray) -> None:
        """Reads ahead what the next layer used for the previous token."""
        self.predictor.observe(layer, ids)
        following = self.layout.next_moe_layer(layer)
        if following is not None and self.trial.ahead and self.predictor.pays(following):
            self._ahead[following] = self.loader.prefetch(following, self.predictor.previous(following))

    def _kernels(
        self, blob: mx.array, slots: mx.array, routing: Routing, x: mx.array, h_mid: mx.array, shared: mx.array | None
    ) -> mx.array:
        act = kernels.expert_gate_up(x, blob, slots, moe_intermediate_size=self.layout.moe_intermediate_size)
        return kernels.expert_down_combine(act, blob, slots, routing.weights, h_mid, shared)

    def _decode_gpu(
        self, batch: ExpertBatch, routing: Routing, x: mx.array, h_mid: mx.array, shared: mx.array | None
    ) -> mx.array:
        batch.wait()
        blob, slots = batch.weights()
        if isinstance(blob, np.ndarray):  # the CPU without native kernels: MLX gets a copy of what is needed
            used, local = np.unique(slots, return_inverse=True)
            blob, slots = mx.array(blob[used]), local.reshape(slots.shape)
        out = self._kernels(blob, mx.array(slots.astype(np.uint32)), routing, x, h_mid, shared)
        batch.release(out)
        return out

    def _decode_native(
        self, batch: ExpertBatch, routing: Routing, x: cpu.Array, h_mid: cpu.Array, shared: cpu.Array | None
    ) -> cpu.Array:
        """Gate and up of the experts in memory run while the others are read."""
        blob, slots = batch.weights()
        width = self.layout.moe_intermediate_size
        ready = batch.ready[0]
        if len(x) > 1 or ready.all() or not ready.any():
            batch.wait()
            act = native.expert_gate_up(x, blob, slots, width)
        else:
            act = np.empty((*slots.shape, width), np.float32)
            act[:, ready] = native.expert_gate_up(x, blob, np.ascontiguousarray(slots[:, ready]), width)
            batch.wait()
            act[:, ~ready] = native.expert_gate_up(x, blob, np.ascontiguousarray(slots[:, ~ready]), width)
        return native.expert_down_combine(act, blob, slots, routing.weights, h_mid, shared)

    def _prefill(self, routing: Routing, x: cpu.Array, h_mid: cpu.Array, shared: cpu.Array | None) -> cpu.Array:
        T, K = routing.ids.shape
        flat = np.array(routing.ids).reshape(-1)
        order = np.argsort(flat, kind="stable")  # rows of one expert become neighbours, in token order
        rows, by_expert = order // K, flat[order]
        back = np.argsort(order)
        each = ((rows[wave.part], by_expert[wave.part], wave) for wave in self._waves(routing.layer, flat, K))
        if cpu.takes(x):
            found = np.concatenate([self._native_wave(x, *wave) for wave in each])
            return native.combine(found, back.reshape(T, K).astype(np.int32), routing.weights, h_mid, shared)
        outs, places = zip(*(self._gpu_wave(x, *wave) for wave in each), strict=True)
        starts = np.cumsum([0, *map(len, outs)])
        place = np.concatenate([start + own for start, own in zip(starts[:-1], places, strict=True)])
        expert_out = mx.concatenate(outs)[mx.array(place[back])].reshape(T, K, -1)  # [T, K, H]
        return kernels.moe_combine(expert_out, routing.weights, h_mid, shared)

    def _waves(self, layer: int, ids: np.ndarray, top_k: int) -> "Iterator[Wave]":
        """A few experts each, ascending; `ids` [T * K] is what the chunk uses.

        Afterwards the experts with the most tokens are still in the pool, as many as are this layer's share.
        """
        size = self._wave_size(layer, top_k)
        counts = np.bincount(ids, minlength=self.layout.num_experts)
        used = np.flatnonzero(counts)
        kept = set(np.argsort(-counts, kind="stable")[: self.loader.slots_per_layer(spare=2 * size)].tolist())
        ends = np.cumsum(counts)
        groups = [used[cut : cut + size].tolist() for cut in range(0, len(used), size)]
        nexts = [(layer, group) for group in groups[1:]] + [self._first_wave_after(layer, len(used), size)]
        for group, following in zip(groups, nexts, strict=True):
            rows = slice(ends[group[0]] - counts[group[0]], ends[group[-1]])
            yield Wave(layer, rows, following)
            self.loader.demote(layer, [expert for expert in group if expert not in kept])

    def _wave_size(self, layer: int, top_k: int) -> int:
        """Experts of a wave. Where bits do not depend on it, a layer in memory goes in few and large ones: four
        layers in waves of 128 take 17.9 ms, of 32 32.2 (as for BLOCK_ROWS)."""
        if BLOCK_ROWS[kernels.backend()] > 1 and self.loader.resident(layer) is not None:
            return self.layout.experts_within(2 * WAVE_BYTES, at_most=self.layout.num_experts)
        return self.layout.experts_within(WAVE_BYTES, at_most=DECODE_ROWS * top_k // 2)

    def _first_wave_after(self, layer: int, used: int, size: int) -> tuple[int, list[int]]:
        """What the next layer will want first, if this one wanted nearly everything."""
        following = self.layout.next_moe_layer(layer)
        if following is None or self.prefetch == "off" or used < NEARLY_ALL * self.layout.num_experts:
            return layer, []
        return following, list(range(min(size, self.layout.num_experts)))

    @contextmanager
    def _wave(self, experts: np.ndarray, wave: "Wave") -> "Iterator[ExpertBatch]":
        """The wave's experts, in memory; the next wave's are being read."""
        with self.loader.acquire(wave.layer, experts) as batch:
            self.loader.prefetch(*wave.following)
            batch.wait()
            yield batch

    def _native_wave(self, x: mx.array, rows: np.ndarray, experts: np.ndarray, wave: "Wave") -> np.ndarray:
        """Expert outputs [N, H] of the wave's rows, expert by expert."""
        N, ones, zeros = len(rows), np.ones((len(rows), 1), np.float32), np.zeros((len(rows), x.shape[1]), np.float32)
        with self._wave(experts, wave) as batch:
            blob, slots = cast(tuple[np.ndarray, np.ndarray], batch.weights())
            where = slots.reshape(N, 1)
            act = native.expert_gate_up(x[rows], blob, where, self.layout.moe_intermediate_size)
            return native.expert_down_combine(act, blob, where, ones, zeros)

    def _gpu_wave(
        self, x: mx.array, rows: np.ndarray, experts: np.ndarray, wave: "Wave"
    ) -> tuple[mx.array, np.ndarray]:
        """Expert outputs [P, H] in blocks, and where among them those of the wave's rows are, [N]."""
        used, local = np.unique(experts, return_inverse=True)
        size = BLOCK_ROWS[kernels.backend()]
        source, owners, places = in_blocks(local, size)
        blocks = x[mx.array(rows[source])].reshape(len(owners), size, -1)
        out = grouped_ffn(blocks, *self._dense(used, wave, x.dtype), mx.array(owners))
        mx.async_eval(out)
        return out.reshape(len(source), -1), places

    def _dense(self, experts: np.ndarray, wave: "Wave", dtype: mx.Dtype) -> "tuple[Dense, Dense, Dense]":
        """gate, up and down of `experts`, in order.

        Evaluated at once if they were read: the slots are free again, and waves do not pile up.
        """
        blob = self.loader.resident(wave.layer)
        if blob is not None:
            return dense(blob, experts, self.layout, dtype)
        with self._wave(experts, wave) as batch:
            found, where = batch.weights()
            if isinstance(found, np.ndarray):  # the CPU without native kernels
                found, where = mx.array(found[where]), np.arange(len(where))
            parts = dense(found, where, self.layout, dtype)
            mx.eval(parts)
        return parts


@dataclass(frozen=True)
class Wave:
    """Rows `part` (sorted by expert) of a few experts of `layer`; `following` is what is wanted next."""

    layer: int
    part: slice
    following: tuple[int, list[int]]


def in_blocks(local: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Cuts rows into blocks of `size` that have one expert each; what an expert's last block lacks repeats row 0.

    Args:
        local: [N] each row's expert, ascending from 0 without gaps.

    Returns:
        The row at each place of the B blocks, int32 [B * size]; each block's expert, uint32 [B]; each row's place,
        int32 [N].
    """
    counts = np.bincount(local)
    blocks = -(-counts // size)
    starts, firsts = np.cumsum(counts) - counts, np.cumsum(blocks) - blocks
    places = firsts[local] * size + np.arange(len(local)) - starts[local]
    source = np.zeros(blocks.sum() * size, np.int32)
    source[places] = np.arange(len(local))
    return source, np.repeat(np.arange(len(counts)), blocks).astype(np.uint32), places.astype(np.int32)


Dense = tuple[mx.array, mx.array, mx.array]  # a projection's weight, scales and biases [n, rows, ...]


def dense(blob: mx.array, where: np.ndarray, layout: ExpertLayout, dtype: mx.Dtype) -> tuple[Dense, Dense, Dense]:
    """gate, up and down of the packed blocks `where` of `blob` [S, words], each array dense; scales in `dtype`."""
    made, first = [], where[0]
    run = np.array_equal(where, np.arange(first, first + len(where)))  # copied faster
    if not run and blob.size > LARGEST_INDEX:
        # MLX's gather counts in 32 bits where the view is small, whatever lies between its rows.
        blob, first, run = mx.take(blob, mx.array(where), axis=0), 0, True
    for component in layout.components:
        columns = blob[:, component.offset // 4 : (component.offset + component.size) // 4]
        words = mx.contiguous(columns[first : first + len(where)]) if run else mx.take(columns, mx.array(where), axis=0)
        if component.dtype == "BF16":
            words = mx.view(words, mx.bfloat16).astype(dtype)
        made.append(words.reshape(len(where), component.shape[0], -1))
    gate, up, down = zip(made[0::3], made[1::3], made[2::3], strict=True)
    return gate, up, down


def grouped_ffn(x: mx.array, gate: Dense, up: Dense, down: Dense, owners: mx.array) -> mx.array:
    """down(silu(gate x) * up x) with each block's own expert: [B, size, H].

    Args:
        x: [B, size, H], sorted by expert.
        gate, up, down: as `dense` gives them.
        owners: [B] uint32 index into them, ascending.
    """
    act = nn.silu(_multiply(x, gate, owners)) * _multiply(x, up, owners)
    return _multiply(act, down, owners)


def _multiply(x: mx.array, part: Dense, owners: mx.array) -> mx.array:
    return mx.gather_qmm(
        x, *part, rhs_indices=owners, transpose=True, group_size=GROUP_SIZE, bits=BITS, sorted_indices=True
    )

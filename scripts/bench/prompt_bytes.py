#!/usr/bin/env python3
"""Prints how many bytes a layer's experts move in prompts of several lengths on Metal, computed without a GPU.

    scripts/bench/prompt_bytes.py --variant qwen3.6-35b-a3b --tokens 64 512 2048 4096

Each way is traced to the operations and kernels that it gives MLX: our default, our own kernel, and
mlx-lm's module. Nothing is computed, so no weights are needed. Each token's experts are drawn at random, all equally
often.

What is counted: an operation reads each of its inputs once and writes its output once; of the experts' matrices it
reads those of the experts that have rows. A view moves nothing. A product that needs a view's rows next to each other
copies all of them. What a GPU reads again, or finds in its caches, is not counted.
"""

import argparse
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models.switch_layers import SwitchGLU

from moeflux_mlx.experts.waves import wave_size, waves_of
from moeflux_mlx.formats.record import ExpertLayout, Projection, Record
from moeflux_mlx.ops.experts import Records
from moeflux_mlx.ops.grouped import GroupedRows
from moeflux_mlx.ops.stand_ins import standing_in
from moeflux_mlx.spec import ModelArgs

VIEWS = ("Broadcast", "ExpandDims", "Flatten", "Reshape", "Slice", "Split", "Squeeze", "Transpose", "Unflatten", "View")
READERS = ("moeflux_expert_rows", "moeflux_expert_dequantize")  # kernels that read records
SORTED_FROM = 4  # rows an expert from which MLX multiplies sorted single rows together (GatherQMM in its quantized.cpp)
DTYPE = mx.bfloat16


@dataclass
class Traffic:
    """Collects the bytes of traced operations.

    Args:
        record: the geometry of the experts.

    Attributes:
        weights: bytes of the experts' matrices that are read as they are stored.
        others: all other bytes: activations, indices, copies, and weights in floats.
    """

    record: Record
    weights: int = 0
    others: int = 0
    _sizes: dict[str, int] = field(default_factory=dict)
    _apart: set[str] = field(default_factory=set)  # views whose rows are not next to each other

    def __call__(self, event: dict[str, Any]) -> None:
        """Takes an event of `mx.export_function`."""
        if event["type"] in ("inputs", "constants"):
            for name, *of in event[event["type"]]:
                self._sizes[name] = of[0].nbytes if len(of) == 1 else _nbytes(*of)
        if event["type"] == "primitive":
            self._add(event["name"], event["arguments"], event["inputs"], event["outputs"])

    def _add(self, name: str, arguments: Sequence[Any], inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
        for made, shape, dtype in outputs:
            self._sizes[made] = _nbytes(shape, dtype)
        if name in VIEWS:
            (source, shape, _), (made, of, _) = inputs[0], outputs[0]
            if name == "Broadcast":
                self._sizes[made] = self._sizes[source]
            if source in self._apart or (name == "Slice" and of[1:] != shape[1:]):
                self._apart.add(made)
            return
        if name == "Gather":
            (_, *whole), *indices = inputs
            inputs = [outputs[0], *indices]
        if name == "GatherQMM":
            inputs = self._products(inputs, is_sorted=bool(arguments[-1]))
        if name == "CustomKernel" and arguments[0].startswith(tuple(f"custom_kernel_{one}" for one in READERS)):
            inputs = self._records(inputs, outputs[0][1])
        self.others += sum(self._sizes[one] for one, *_ in (*inputs, *outputs))

    def _products(self, inputs: Sequence[Any], is_sorted: bool) -> list[Any]:
        """Adds the copies of a product; `count_products` adds what it reads. Returns its other inputs."""
        x, *matrices, left, right = inputs
        if is_sorted and x[1][-2] == 1 and prod(right[1]) >= max(SORTED_FROM * matrices[0][1][0], 16):
            self.others += sum(2 * self._sizes[one] for one, *_ in matrices if one in self._apart)
        return [x, left, right]

    def _records(self, inputs: Sequence[Any], made: tuple[int, ...]) -> list[Any]:
        """Adds the matrices that a kernel reads: those of down, or the others, by its output. Returns its other
        inputs.
        """
        own = (self.record.down,) if made[1] == self.record.hidden_size else self.record.firsts
        blob, slots = (next(one for one in inputs if test(one)) for test in (_is_blob, _is_slots))
        self.weights += prod(slots[1]) * sum(map(_stored, own))
        return [one for one in inputs if one is not blob]

    @contextmanager
    def count_products(self) -> Iterator[None]:
        """A context manager in which the matrices that MLX's packed products read are added."""
        original = mx.gather_qmm

        def counted(x: mx.array, w: mx.array, scales: mx.array, biases: Any = None, *given: Any, **named: Any) -> Any:
            owners = named.get("rhs_indices", given[1] if len(given) > 1 else None)
            nbytes = w.nbytes + scales.nbytes + (0 if biases is None else biases.nbytes)
            self.weights += len(np.unique(np.array(owners))) * nbytes // len(w)
            return original(x, w, scales, biases, *given, **named)

        mx.gather_qmm = counted
        try:
            yield
        finally:
            mx.gather_qmm = original


def _nbytes(shape: Sequence[int], dtype: mx.Dtype) -> int:
    return prod(shape) * dtype.size


def _is_blob(given: tuple[str, tuple[int, ...], mx.Dtype]) -> bool:
    return given[2] == mx.uint32 and len(given[1]) == 2


def _is_slots(given: tuple[str, tuple[int, ...], mx.Dtype]) -> bool:
    """The first array of numbers."""
    return len(given[1]) == 1


def _stored(matrix: Projection) -> int:
    return sum(part.size for part in matrix.codes)


# ---- the ways


Way = tuple[Callable[..., mx.array], list[mx.array]]  # a function and zeros for its inputs


def ours(layout: ExpertLayout, ids: np.ndarray, on_units: bool) -> Way:
    """Our products of a prompt's experts, all of them in memory: by our kernel at once, else in waves."""
    record, counts = next(iter(layout.records.values())), np.bincount(ids.reshape(-1), minlength=layout.num_experts)
    waves = waves_of(counts, layout.num_experts if on_units else wave_size(layout, ids.shape[1]))

    def run(x: mx.array, blob: mx.array, weights: mx.array, residual: mx.array) -> mx.array:
        rows = GroupedRows(x, ids, counts, waves, record, on_units=on_units)
        for i, wave in enumerate(waves):
            rows.multiply(i, wave, Records(blob, record))
        return rows.combined(weights, residual, None)

    blob = mx.zeros((layout.num_experts, record.stride // 4), mx.uint32)
    return run, [_zeros(ids, record), blob, *_beside(ids, record)]


def of_mlx_lm(layout: ExpertLayout, ids: np.ndarray) -> Way:
    """mlx-lm's `SwitchGLU` and the sum that its models compute."""
    record = next(iter(layout.records.values()))
    module = SwitchGLU(record.hidden_size, record.moe_intermediate_size, layout.num_experts)
    module.set_dtype(DTYPE)
    quant = record.gate.quant
    nn.quantize(module, quant.group_size, quant.bits, mode=quant.mode)
    names, arrays = zip(*tree_flatten(module.parameters()), strict=True)

    def run(x: mx.array, weights: mx.array, residual: mx.array, *parameters: mx.array) -> mx.array:
        module.update(tree_unflatten(list(zip(names, parameters, strict=True))))
        y = module(x, mx.array(ids.astype(np.uint32)))
        return residual + (y * weights[..., None]).sum(axis=-2)

    return run, [_zeros(ids, record), *_beside(ids, record), *(mx.zeros(one.shape, one.dtype) for one in arrays)]


def _zeros(ids: np.ndarray, record: Record) -> mx.array:
    return mx.zeros((len(ids), record.hidden_size), DTYPE)


def _beside(ids: np.ndarray, record: Record) -> list[mx.array]:
    """The experts' weights and the residual."""
    return [mx.zeros(ids.shape, DTYPE), _zeros(ids, record)]


def traffic(way: str, layout: ExpertLayout, ids: np.ndarray) -> Traffic:
    """What the first layer with experts moves in the way "mlx-lm", "default" or "kernel" for the ids [T, K]."""
    counted = Traffic(next(iter(layout.records.values())))
    with standing_in(backend="metal"), counted.count_products():
        run, inputs = of_mlx_lm(layout, ids) if way == "mlx-lm" else ours(layout, ids, way == "kernel")
        mx.export_function(counted, run, *inputs)
    return counted


def drawn(tokens: int, experts: int, top_k: int) -> np.ndarray:
    """The experts of some tokens, [T, K], all equally likely."""
    random = np.random.default_rng(tokens)
    return np.argsort(random.random((tokens, experts)), axis=1)[:, :top_k]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--variant", default="qwen3.6-35b-a3b")
    parser.add_argument("--tokens", type=int, nargs="+", default=[64, 512, 2048, 4096])
    options = parser.parse_args(argv)
    args = ModelArgs.from_variant(options.variant)
    layout = ExpertLayout.from_args(args)
    print("| tokens | experts in use | mlx-lm | our default | our kernel |\n|---|---|---|---|---|")
    for tokens in options.tokens:
        ids = drawn(tokens, args.num_experts, args.num_experts_per_tok)
        each = [traffic(way, layout, ids) for way in ("mlx-lm", "default", "kernel")]
        first, *rest = [(one.weights + one.others) / 1e6 for one in each]
        ratios = " | ".join(f"{one:,.0f} MB, {one / first:.2f}x" for one in rest)
        print(f"| {tokens:,} | {len(np.unique(ids))} | {first:,.0f} MB | {ratios} |")


if __name__ == "__main__":
    main()

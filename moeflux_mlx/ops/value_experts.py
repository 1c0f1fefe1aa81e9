"""Values of chosen matrices: the sum of silu(W x) over a token's experts, weighed (IFM's K2 Horizon, MoVA).

The matrices are records. In a step the kernels of the routed experts' last product read them in place, a row for each
pair of a token and an expert. In a prompt the CPU does the same with the pairs of each expert, and so do a GPU's
kernels (`expert_rows`); where they do not run, MLX multiplies all rows of an expert by a copy of its matrix. A pair's
product depends on nothing else, so records may come in any groups.
"""

from typing import Any, cast

import mlx.core as mx
import numpy as np

from . import backend
from .backend import AnyArray, Array, computes_at_once, library_of, of_kind
from .dequantize import dense
from .elementwise import sigmoid
from .expert_rows import down_rows, refusal, sort_by_expert, starts_of
from .experts import each_down, expert_down_combine, of_kinds
from .grouped import NATIVE_ROWS, combined
from .linear import multiply
from .matrix import Part
from .records import Records

COPIED = 8  # matrices that are copied at a time; at most two such groups are in memory


def step_values(x: Array, slots: np.ndarray, weights: Array, records: Records) -> Array:
    """[T, rows] of the rows of a step, x [T, D], slots of the records and weights [T, K]."""
    records, slots = of_kinds(x, records, slots)
    (T, K), library = slots.shape, library_of(x)
    made = each_down(library.repeat(x, K, axis=0), slots, records, alone=True).astype(x.dtype)
    return _weighed(made, backend.arange(T * K, library).reshape(T, K), weights)


def _weighed(products: AnyArray, where: AnyArray, weights: AnyArray) -> AnyArray:
    """[T, rows] of products [P, rows] and `where` each of a token's is, int32 [T, K]."""
    act = products * sigmoid(products)
    return combined(act, where, weights, backend.zeros_like(act, (len(where), act.shape[1])), None)


def prompt_values(x: mx.array, ids: mx.array, weights: mx.array, records: Records) -> mx.array:
    """[T, rows] of a prompt's rows by the kernels, where the records of all experts are there: nothing waits for the
    ids [T, K].
    """
    starts, source, places = sort_by_expert(ids, records.blob.shape[0])
    every = backend.arange(records.blob.shape[0], mx)
    return _weighed(down_rows(x[source], starts, every, records), places, weights)


class ValueRows:
    """The values of a prompt's tokens, whose experts may come in groups.

    Args:
        x: [T, D].
        ids: [T, K], the experts of each token.

    Attributes:
        experts: the different ones among them.
    """

    def __init__(self, x: AnyArray, ids: np.ndarray):
        self._x, self._shape = x, ids.shape
        self.experts, self._counts = np.unique(ids, return_counts=True)
        self._ends = np.cumsum([0, *self._counts])
        self._order = np.argsort(ids.reshape(-1), kind="stable").astype(np.int32)
        self._made: list[Any] = []

    def least_used(self, kept: int) -> np.ndarray:
        """The experts without the `kept` ones that the most tokens use."""
        order = np.argsort(self._counts, kind="stable")
        return self.experts[order[: max(len(order) - kept, 0)]]

    def multiply(self, some: slice, records: Records, slots: np.ndarray) -> AnyArray:
        """The products of the tokens of `some` of the experts, which are next; `slots` are those of their records."""
        if computes_at_once(self._x):
            self._made += self._native(some, slots, records)
            return self._made[-1]
        if not refusal(self._x.dtype, records.record):
            own = self._rows(self._ends[some.start], self._ends[some.start + len(slots)])
            starts = mx.array(starts_of(self._counts[some]))
            self._made.append(down_rows(own, starts, mx.array(slots.astype(np.int32)), records))
            return self._made[-1]
        for first in range(0, len(slots), COPIED):
            self._made.append(self._copied(some.start + first, slots[first : first + COPIED], records))
            backend.start(self._made[-1])
            if len(self._made) > 1:
                backend.finish(self._made[-2])
        return self._made[-1]

    def _rows(self, start: int, stop: int) -> AnyArray:
        """The rows of x of the pairs from `start` to `stop` in the order of the experts."""
        return self._x[of_kind(self._order[start:stop] // self._shape[1], self._x)]

    def _native(self, some: slice, slots: np.ndarray, records: Records) -> list[np.ndarray]:
        first, owners, made = self._ends[some.start], np.repeat(slots, self._counts[some]).astype(np.int32), []
        for i in range(0, len(owners), NATIVE_ROWS):
            own = owners[i : i + NATIVE_ROWS, None]
            x = self._rows(first + i, first + i + len(own))
            ones, zeros = np.ones(own.shape, np.float32), np.zeros((len(own), records.record.hidden_size), np.float32)
            made.append(expert_down_combine(x[:, None], own, records, ones, zeros, alone=False))
        return made

    def _copied(self, first: int, slots: np.ndarray, records: Records) -> mx.array:
        """The products of the experts from number `first` on, one for each of the slots."""
        records, slots = records.for_mlx(slots)
        quant, (parts,) = records.record.down.quant, dense(records, slots, self._x.dtype)
        ends = self._ends[first : first + len(slots) + 1]
        rows = mx.split(self._rows(ends[0], ends[-1]), (ends[1:-1] - ends[0]).tolist())
        matrices = (Part(quant, *cast(Any, [part[i] for part in parts])) for i in range(len(slots)))
        return mx.concatenate([multiply(x, one, transpose=True) for x, one in zip(rows, matrices, strict=True)])

    def weighed(self, weights: Array) -> Array:
        """[T, rows], with weights [T, K], when all experts were multiplied."""
        where = np.empty(self._order.size, np.int32)
        where[self._order] = np.arange(self._order.size, dtype=np.int32)
        made = library_of(self._made[0]).concatenate(self._made)
        self._made.clear()
        return _weighed(made, where.reshape(self._shape), weights)

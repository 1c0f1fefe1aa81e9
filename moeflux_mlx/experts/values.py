"""Computes the values of tokens by the experts of one matrix that they choose, from any source of records."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from ..ops.backend import AnyArray, Array, join
from ..ops.expert_rows import refusal
from ..ops.records import Records
from ..ops.tiles import LEASED_TOKENS, MAX_TOKENS
from ..ops.value_experts import ValueRows, prompt_values, step_values
from .source import ExpertLoader


@dataclass(frozen=True)
class ValuesOf:
    """Called with rows x [T, D], ids and weights [T, K]: [T, rows of a matrix], with the same bits from every source.

    A step requests all of its experts at once, a prompt as many at a time as `LEASED_TOKENS` tokens can use.

    Args:
        source: where the records are.
        number: the record set.
    """

    source: ExpertLoader
    number: int

    @property
    def may_be_traced(self) -> bool:
        """Whether the records are one array, so that nothing waits for the ids."""
        return self.source.whole(self.number) is not None

    def __call__(self, x: AnyArray, ids: AnyArray, weights: AnyArray) -> AnyArray:
        whole = self.source.whole(self.number)
        if len(x) > MAX_TOKENS:
            if whole is None or isinstance(x, np.ndarray) or refusal(x.dtype, whole.record):
                return self._of_prompt(x, np.array(ids), weights)
            return prompt_values(x, ids, weights, whole)
        if whole is not None:
            return step_values(x, ids, weights, whole)
        parts, host = -(-len(x) // LEASED_TOKENS), np.array(ids)
        ends = [len(x) * part // parts for part in range(parts + 1)]
        made = [(self._of_rows(x[rows], host[rows], weights[rows]),) for rows in map(slice, ends, ends[1:])]
        return join(made, axis=0)[0]

    def _of_rows(self, x: Array, ids: np.ndarray, weights: Array) -> Array:
        """Those of up to `LEASED_TOKENS` rows."""
        return self._with(ids, lambda records, slots: step_values(x, slots, weights, records))

    def _of_prompt(self, x: Array, ids: np.ndarray, weights: Array) -> Array:
        rows, few = ValueRows(x, ids), LEASED_TOKENS * ids.shape[1]
        for first in range(0, len(rows.experts), few):
            some = slice(first, first + few)
            self._with(rows.experts[some], partial(rows.multiply, some))
        share = self.source.slots_per_layer(layer=self.number)
        if share:  # the next layers evict the others first
            self.source.give_way(self.number, rows.least_used(share).tolist())
        return rows.weighed(weights)

    def _with(self, ids: np.ndarray, compute: Callable[[Records, AnyArray], AnyArray]) -> AnyArray:
        """`compute` with the records of `ids`, which stay in place until its result is there, and their slots."""
        whole = self.source.whole(self.number) or self.source.without_lease(self.number, ids)
        if whole is not None:
            return compute(whole, ids.astype(np.int32))
        with self.source.request(self.number, ids) as lease:
            lease.wait()
            records, slots = lease.records()
            out = compute(records, slots)
            lease.release(None if records.lasting else out)
        return out

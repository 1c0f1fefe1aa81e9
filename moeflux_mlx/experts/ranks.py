"""The routed experts of a layer over several processes, each with its own part of them on its own disk.

Every process has the router, the attention and the caches; each computes the rows of the experts that it owns, rows are
gathered, and everybody sums them in the routing's order. So all hold the same numbers, and the bits are those of one
machine: a row is computed as it is there, and no sum depends on how many processes there are.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import mlx.core as mx
import numpy as np

from ..errors import RankError, RankStopped
from ..ops.backend import Array, leave
from ..ops.combine import combine
from ..ops.experts import Records, Shared, expert_down_combine, expert_gate_up, shared_rows
from ..ops.tiles import MAX_TOKENS
from .group import FAILED, FINE, STOPPED, Exchange, Told
from .lookahead import Lookahead
from .routing import Report, Routing, unheard
from .source import ExpertLoader
from .waves import expect, multiplied

ROUTING, ROWS = 1, 2  # kinds of messages; the layer is counted from 0 beside them
KINDS = 16
PIECE_WORDS = 1 << 22  # of one message of a prompt: what is in memory twice


@dataclass(frozen=True)
class Owners:
    """Who owns which expert: (expert + layer) modulo the sum of the shares, so that layers differ.

    Args:
        shares: of each rank, small integers; equal ones for equal machines.
    """

    shares: tuple[int, ...]

    @property
    def turns(self) -> np.ndarray:
        """The ranks of one round, spread as evenly as their shares allow."""
        places = [((i + 0.5) / share, rank) for rank, share in enumerate(self.shares) for i in range(share)]
        return np.array([rank for _, rank in sorted(places)], np.int32)

    def of(self, layer: int, ids: np.ndarray) -> np.ndarray:
        """The rank of each expert, in the ids' shape."""
        turns = self.turns
        return turns[(ids.astype(np.int64) + layer) % len(turns)]

    def experts(self, layer: int, rank: int, count: int) -> list[int]:
        """Those of `count` experts that a rank owns."""
        return np.flatnonzero(self.of(layer, np.arange(count)) == rank).tolist()


class RankedExperts:
    """Implements `routing.RoutedExpertsCall` over a group of processes.

    Args:
        source: where this process's experts are; no others are asked for.
        exchange: with the other processes.
        owners: who has which experts.
        prefetch: "lookahead", "previous" or "off", as `Lookahead` has it.
        shares_routing: the machines differ, so that everybody takes rank 0's choice of experts, residual and shared
            expert, which costs one more exchange for each layer.

    Attributes:
        differing: how many tokens' experts this process would have chosen otherwise than rank 0.
    """

    def __init__(
        self,
        source: ExpertLoader,
        exchange: Exchange,
        owners: Owners,
        prefetch: str = "lookahead",
        shares_routing: bool = False,
    ):
        self.source, self.exchange, self.owners, self.shares_routing = source, exchange, owners, shares_routing
        self.rank = exchange.group.rank
        self.lookahead = Lookahead(source, prefetch, self._owned)
        self.differing = 0

    def _owned(self, layer: int, ids: Sequence[int]) -> list[int]:
        """Those of `ids` that are this process's."""
        found = np.array(ids, np.int64)
        return found[self.owners.of(layer, found) == self.rank].tolist()

    def wants_guess(self, layer: int, tokens: int) -> bool:
        return self.lookahead.wants_guess(layer, tokens)

    def expect(self, layer: int, tokens: int) -> None:
        if self.lookahead.prefetch != "off":
            expect(self.source, layer, tokens, self._owned)

    def __call__(
        self, routing: Routing, x: Array, residual: Array, shared: Array | Shared | None, report: Report = unheard
    ) -> Array:
        if isinstance(shared, Shared):
            shared = shared_rows(x, shared, self.source.layout.records[routing.layer], routing.ids.shape[1])
        if routing.guess is not None:
            mx.eval(routing.ids, routing.guess.ids, routing.guess.weights)
        ids, weights = np.array(routing.ids), np.array(routing.weights, np.float32)
        if self.shares_routing:
            ids, weights, residual, shared = self._of_first(routing.layer, ids, weights, residual, shared)
        rows, where = self._all_rows(routing, ids, weights, x, report)
        if not isinstance(x, np.ndarray):
            given = np.ones_like(weights) if len(x) <= MAX_TOKENS else weights  # rows of few tokens are weighted
            return combine(mx.array(rows), where, mx.array(given), residual, shared)
        return combine(rows, where, weights, residual, shared)

    def _all_rows(
        self, routing: Routing, ids: np.ndarray, weights: np.ndarray, x: Array, report: Report
    ) -> tuple[np.ndarray, np.ndarray]:
        """Every pair's row, and which of them each pair's is, int32 [T, K]."""
        owner = self.owners.of(routing.layer, ids)
        counts = np.bincount(owner.reshape(-1), minlength=self.exchange.group.size)
        mine, failure = np.flatnonzero(owner == self.rank), None

        def watched(share: float) -> None:
            report(share)
            self._stop_if_wanted()

        try:
            self._stop_if_wanted()
            rows = self._own_rows(routing, ids, weights, x, mine, watched)
            self._stop_if_wanted()
        except BaseException as error:  # the others wait for this process's rows and must hear of it
            failure, rows = error, np.zeros((len(mine), x.shape[1]), np.float32)
        gathered = self._gather(routing.layer, ids, counts, rows, failure)
        first = np.argsort(owner.reshape(-1), kind="stable")
        where = np.empty(ids.size, np.int32)
        where[first] = np.arange(ids.size)
        return gathered, where.reshape(ids.shape)

    def _stop_if_wanted(self) -> None:
        if self.exchange.pending is not None:
            raise self.exchange.pending

    def _own_rows(
        self, routing: Routing, ids: np.ndarray, weights: np.ndarray, x: Array, mine: np.ndarray, report: Report
    ) -> np.ndarray:
        """What this process's experts make of the pairs `mine`, [len(mine), H]."""
        layer, tokens, own = routing.layer, mine // ids.shape[1], ids.reshape(-1)[mine]
        if len(x) > MAX_TOKENS and len(mine):
            reads_ahead = self.lookahead.prefetch != "off"
            found = multiplied(
                self.source, layer, own[:, None], x, ids.shape[1], reads_ahead, report, tokens, self._owned
            )
            return _float32(found.outputs())
        with self.source.request(layer, own) as lease:  # before what may be wanted next is read
            if len(x) <= MAX_TOKENS:
                self.lookahead.requested(routing, ids)
            if not len(mine):
                return np.zeros((0, x.shape[1]), np.float32)
            lease.wait()
            records, slots = lease.records()
            rows = _rows(x, tokens, slots, records, weights.reshape(-1)[mine])
            return _float32(rows)

    def _gather(
        self, layer: int, ids: np.ndarray, counts: np.ndarray, rows: np.ndarray, failure: BaseException | None
    ) -> np.ndarray:
        """Everybody's rows [T * K, H] float32, by rank, in pieces of equal length for all."""
        H = rows.shape[1]
        step = max(PIECE_WORDS // H, 1)
        found = np.empty((int(counts.sum()), H), np.float32)
        starts = np.cumsum(counts) - counts
        is_stop = failure is self.exchange.pending or not isinstance(failure, Exception)
        flag = FINE if failure is None else STOPPED if is_stop else FAILED
        for start in range(0, max(int(counts.max()), 1), step):
            length = min(step, int(counts.max()) - start)
            piece = np.zeros((length, H), np.float32)
            own = rows[start : start + length]
            piece[: len(own)] = own
            told = self.exchange(ROWS + KINDS * layer, piece.view(np.uint32).reshape(-1), ids, flag)
            self._raise(told, failure)
            theirs = told.words.view(np.float32).reshape(-1, length, H)
            for rank, (first, count) in enumerate(zip(starts, counts, strict=True)):
                took = min(max(int(count) - start, 0), length)
                found[first + start : first + start + took] = theirs[rank, :took]
        return found

    def _raise(self, told: Told, failure: BaseException | None) -> None:
        """Ends the pass on every rank if one could not go on."""
        self.exchange.has_ended = any(told.flags)
        if failure is not None:
            self.exchange.pending = None
            raise failure
        failed, stopped = told.first(FAILED), told.first(STOPPED)
        if failed is not None:
            raise RankError(f"rank {failed} could not compute its experts; its own message says why")
        if stopped is not None:
            raise RankStopped(f"rank {stopped} stopped")

    def _of_first(
        self, layer: int, ids: np.ndarray, weights: np.ndarray, residual: Array, shared: Array | None
    ) -> tuple[np.ndarray, np.ndarray, Array, Array | None]:
        """Rank 0's choice, residual and shared expert, in place of one's own."""
        streams: list[Any] = [residual] if shared is None else [residual, shared]
        parts = [ids.astype(np.uint32), weights.view(np.uint32), *(_float32(s).view(np.uint32) for s in streams)]
        told = self.exchange(ROUTING + KINDS * layer, np.concatenate([part.reshape(-1) for part in parts]))
        ends = np.cumsum([part.size for part in parts])[:-1]
        got = [part.reshape(own.shape) for part, own in zip(np.split(told.words[0], ends), parts, strict=True)]
        self.differing += int((got[0] != parts[0]).any(axis=1).sum())
        theirs: list[Any] = [
            part.view(np.float32) if isinstance(own, np.ndarray) else mx.array(part.view(np.float32)).astype(own.dtype)
            for part, own in zip(got[2:], streams, strict=True)
        ]
        return got[0].astype(ids.dtype), got[1].view(np.float32), theirs[0], theirs[1] if shared is not None else None


def _float32(rows: Any) -> np.ndarray:
    return rows if isinstance(rows, np.ndarray) else np.array(leave(rows).astype(mx.float32))


def _rows(x: Array, tokens: np.ndarray, slots: np.ndarray, records: Records, weights: np.ndarray) -> Array:
    """expert(slots[p])(x[tokens[p]]) for each pair, float32 [P, H]; on MLX's side times its weight.

    A pair goes through the kernels as it does among all of its token's, so its bits are the same: on MLX's side the
    weighted row is rounded before it is summed, on the CPU the sum multiplies.
    """
    if isinstance(x, np.ndarray):
        return _native_rows(x, tokens, slots, records)
    copies, index = records.for_mlx(slots) if isinstance(records.blob, np.ndarray) else (records, slots)
    parts = []
    for start in range(0, len(tokens), MAX_TOKENS):
        part = slice(start, start + MAX_TOKENS)
        own = mx.array(index[part].astype(np.uint32))[:, None]
        taken = mx.contiguous(x[mx.array(tokens[part])])
        act = expert_gate_up(taken, own, copies)
        zeros = mx.zeros((len(own), x.shape[1]), mx.float32)
        parts.append(expert_down_combine(act, own, copies, mx.array(weights[part])[:, None], zeros))
    return cast(Array, mx.concatenate(parts))


def _native_rows(x: np.ndarray, tokens: np.ndarray, slots: np.ndarray, records: Records) -> np.ndarray:
    """As `_rows`; the native kernels may multiply a call's only token otherwise than one of several."""
    if len(x) == 1:
        return np.concatenate([_weighted_once(x, slots[p : p + 1], records) for p in range(len(slots))])
    several = np.resize(np.arange(len(slots)), max(len(slots), 2))  # a lone pair beside itself
    return _weighted_once(x[tokens[several]], slots[several], records)[: len(slots)]


def _weighted_once(x: np.ndarray, slots: np.ndarray, records: Records) -> np.ndarray:
    """expert(slots[t])(x[t]) of each row, [T, H]."""
    ones, zeros = np.ones((len(x), 1), np.float32), np.zeros(x.shape, np.float32)
    act = expert_gate_up(x, slots[:, None], records)
    return expert_down_combine(act, slots[:, None], records, ones, zeros)

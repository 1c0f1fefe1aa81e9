"""The routed experts of a layer over several processes, each with its own part of them on its own disk.

Every process has the router, the attention and the caches. Each computes the rows of the experts that it owns; the rows
are gathered, and every process sums them in the order of the routing. So all processes hold the same numbers, and the
bits are those of one machine: each row is computed in the same way, and no sum depends on the number of processes.
"""

from collections.abc import Sequence
from typing import Any, cast

import mlx.core as mx
import numpy as np

from ..errors import RankError, RankStopped
from ..experts.lookahead import Lookahead
from ..experts.routing import Pieces, Routing, finished, in_parts
from ..experts.source import ExpertLoader
from ..experts.waves import expect, multiplied
from ..ops.backend import AnyArray, Array, computes_at_once, constant, library_of, of_kind
from ..ops.combine import combined
from ..ops.elementwise import float32
from ..ops.experts import Shared, expert_down_combine, expert_gate_up, shared_rows
from ..ops.gather_rows import gather_rows
from ..ops.grouped import native_rows
from ..ops.records import Records
from ..ops.tiles import LEASED_TOKENS, MAX_TOKENS
from .group import FAILED, FINE, STOPPED, Exchange, Gathered
from .owners import Dealing, Owners

ROUTING, ROWS = 1, 2  # kinds of messages, to which the number of the layer is added
KINDS = 16
PIECE_WORDS = 1 << 22  # bytes of one message of a prompt, which are in memory twice


class RankedExperts:
    """Implements `routing.RoutedExpertsCall` over a group of processes.

    Args:
        source: the source of this process's experts.
        exchange: the exchange with the other processes.
        owners: which process owns which experts.
        prefetch: "lookahead" or "off", as `Lookahead` has it.
        shares_routing: the machines differ, so all ranks use rank 0's choice of experts, residual and shared expert;
            this takes one more exchange per layer.
        dealing: assigns the reads of a few tokens, if every process can read every expert.
    """

    def __init__(
        self,
        source: ExpertLoader,
        exchange: Exchange,
        owners: Owners,
        prefetch: str = "lookahead",
        shares_routing: bool = False,
        dealing: Dealing | None = None,
    ):
        self.dealing = dealing
        self.source, self.exchange, self.owners, self.shares_routing = source, exchange, owners, shares_routing
        self.rank = exchange.group.rank
        self.lookahead = Lookahead(source, prefetch, self._expected)

    def _owned(self, layer: int, ids: Sequence[int]) -> list[int]:
        """The experts among `ids` that this process owns."""
        experts = np.array(ids, np.int64)
        return experts[self.owners.of(layer, experts) == self.rank].tolist()

    def _expected(self, layer: int, ids: Sequence[int]) -> list[int]:
        """The experts among `ids` that this process would compute."""
        if self.dealing is None:
            return self._owned(layer, ids)
        experts = np.array(ids, np.int64)
        return experts[self.dealing.expected(layer, experts) == self.rank].tolist()

    def dealt_to(self, layer: int, ids: np.ndarray) -> np.ndarray:
        """The process that computes each pair of token and expert, in the ids' shape; the same on all processes."""
        if self.dealing is not None and len(ids) <= MAX_TOKENS:
            return self.dealing.deal(layer, ids)
        if self.dealing is not None:
            self.dealing.note(layer, ids)
        return self.owners.of(layer, ids)

    def wants_guess(self, layer: int, tokens: int) -> bool:
        return self.lookahead.wants_guess(layer, tokens)

    def expect(self, layer: int, tokens: int) -> None:
        if self.lookahead.prefetch != "off":
            expect(self.source, layer, tokens, self._owned)

    def __call__(self, routing: Routing, x: Array, residual: Array, shared: AnyArray) -> Array:
        if len(x) > LEASED_TOKENS:
            return in_parts(self, routing, x, residual, shared)
        if isinstance(shared, Shared):
            shared = shared_rows(x, shared, self.source.layout.records[routing.layer], routing.ids.shape[1])
        return finished(self.in_pieces(routing, x, residual, shared))

    def in_pieces(self, routing: Routing, x: Array, residual: Array, shared: Array | None) -> Pieces[Array]:
        weighed = routing.weights
        routing = on_host(routing)
        ids, weights = cast(np.ndarray, routing.ids), cast(np.ndarray, routing.weights)
        if self.shares_routing:
            ids, weights, residual, shared = self._of_first(routing.layer, ids, weights, residual, shared)
            weighed = of_kind(weights, x)
        if routing.norm is not None:  # rows are weighed behind it
            weights = np.ones_like(weights)
        elif not computes_at_once(x) and len(x) <= MAX_TOKENS:
            weighed = constant(1.0, weights.shape)
        rows, where = yield from self._all_rows(routing, ids, weights, x)
        rest = residual.reshape(len(x), -1)
        return combined(rows, where, weighed, rest, shared, routing.norm).reshape(residual.shape)

    def _all_rows(
        self, routing: Routing, ids: np.ndarray, weights: np.ndarray, x: Array
    ) -> Pieces[tuple[Any, np.ndarray]]:
        """The rows of all pairs, and the index of each pair's row, int32 [T, K]."""
        owner = self.dealt_to(routing.layer, ids)
        counts = np.bincount(owner.reshape(-1), minlength=self.exchange.group.size)
        mine, failure = np.flatnonzero(owner == self.rank), None
        try:
            self._stop_if_wanted()
            rows = yield from self.own_rows(routing, ids, weights, x, mine)
            self._stop_if_wanted()
        except BaseException as error:  # the other processes wait for these rows and must learn of the error
            failure, rows = error, _no_rows(x, len(mine))
        gathered = self._gather(routing.layer, np.stack([ids, owner]), int(counts.max()), rows, failure)
        first, starts = np.argsort(owner.reshape(-1), kind="stable"), np.cumsum(counts) - counts
        where = np.empty(ids.size, np.int32)  # each rank's rows are padded to the largest number
        where[first] = np.arange(ids.size) + np.repeat(np.arange(len(counts)) * counts.max() - starts, counts)
        return gathered, where.reshape(ids.shape)

    def _stop_if_wanted(self) -> None:
        if self.exchange.pending is not None:
            raise self.exchange.pending

    def own_rows(
        self, routing: Routing, ids: np.ndarray, weights: np.ndarray, x: Array, mine: np.ndarray
    ) -> Pieces[Array]:
        """The outputs of this process's experts for the pairs `mine`, [len(mine), H]: in x's dtype if there are many,
        else float32.
        """
        layer, tokens, own = routing.layer, mine // ids.shape[1], ids.reshape(-1)[mine]
        if len(x) > MAX_TOKENS and len(mine):
            reads_ahead = self.lookahead.prefetch != "off"
            given = own[:, None], x, ids.shape[1]
            grouped = yield from multiplied(self.source, layer, *given, reads_ahead, tokens, self._owned, ids)
            return of_kind(grouped.outputs(), x)
        with self.source.request(layer, own) as lease:  # before reading ahead
            if len(x) <= MAX_TOKENS:
                self.lookahead.requested(routing, ids)
            if not len(mine):
                return _no_rows(x, 0)
            lease.wait()
            records, slots = lease.records()
            rows = pair_rows(x, tokens, slots, records, weights.reshape(-1)[mine])
            lease.release(None if records.lasting else rows)
            return rows

    def _gather(self, layer: int, agreed: np.ndarray, most: int, rows: Array, failure: BaseException | None) -> Array:
        """Gathers the rows of all processes, [size * most, H], in pieces of equal length; `agreed` determines the
        order.
        """
        words: AnyArray = rows.view(library_of(rows).uint32)
        words = words if self.exchange.group.on_device else np.asarray(words)
        step = max(PIECE_WORDS // words.shape[1], 1)
        is_stop = failure is self.exchange.pending or not isinstance(failure, Exception)
        flag = FINE if failure is None else STOPPED if is_stop else FAILED
        pieces = []
        for start in range(0, max(most, 1), step):
            piece = _filled(words[start : start + step], min(step, max(most, 1) - start))
            gathered = self.exchange(ROWS + KINDS * layer, piece.reshape(-1), agreed, flag)
            self._raise(gathered, failure)
            pieces.append(gathered.words.reshape(self.exchange.group.size, *piece.shape))
        gathered = pieces[0] if len(pieces) == 1 else library_of(words).concatenate(pieces, axis=1)
        gathered = gathered.reshape(-1, words.shape[1])
        return of_kind(gathered, rows).view(rows.dtype)

    def _raise(self, gathered: Gathered, failure: BaseException | None) -> None:
        """Ends the pass on every rank if one could not go on."""
        self.exchange.has_ended = any(gathered.flags)
        if failure is not None:
            self.exchange.pending = None
            raise failure
        failed, stopped = gathered.first(FAILED), gathered.first(STOPPED)
        if failed is not None:
            raise RankError(f"rank {failed} could not compute its experts; its own message says why")
        if stopped is not None:
            raise RankStopped(f"rank {stopped} stopped")

    def _of_first(
        self, layer: int, ids: np.ndarray, weights: np.ndarray, residual: Array, shared: Array | None
    ) -> tuple[np.ndarray, np.ndarray, Array, Array | None]:
        """Replaces choice, residual and shared expert by those of rank 0."""
        streams = [residual] if shared is None else [residual, shared]
        parts = [ids.astype(np.uint32), weights.view(np.uint32)]
        parts += [np.asarray(float32(stream)).view(np.uint32) for stream in streams]
        gathered = self.exchange(ROUTING + KINDS * layer, np.concatenate([part.reshape(-1) for part in parts]))
        ends = np.cumsum([part.size for part in parts])[:-1]
        got = [part.reshape(own.shape) for part, own in zip(np.split(gathered.words[0], ends), parts, strict=True)]
        theirs = [
            of_kind(part.view(np.float32), own).astype(own.dtype) for part, own in zip(got[2:], streams, strict=True)
        ]
        return got[0].astype(ids.dtype), got[1].view(np.float32), theirs[0], theirs[1] if shared is not None else None


def on_host(routing: Routing) -> Routing:
    """The same routing and guess as numpy arrays. From a GPU all arrays come at once, because each wait is
    expensive.
    """
    if isinstance(routing.ids, np.ndarray):
        return routing
    routings = [routing, routing.guess] if routing.guess is not None else [routing]
    arrays = [array for one in routings for array in (one.ids, one.weights)]
    flat = np.array(mx.concatenate([cast(mx.array, array).reshape(-1).view(mx.uint32) for array in arrays]))
    ends = np.cumsum([array.size for array in arrays])[:-1]
    parts = [part.reshape(array.shape) for part, array in zip(np.split(flat, ends), arrays, strict=True)]
    guess = None if routing.guess is None else Routing(routing.guess.layer, parts[2], parts[3].view(np.float32))
    return Routing(routing.layer, parts[0], parts[1].view(np.float32), guess, norm=routing.norm)


def _filled(words: Array, length: int) -> Array:
    """`words` [n, W] and as many more rows as make `length`."""
    if len(words) == length:
        return words
    library = library_of(words)
    rest = library.zeros((length - len(words), words.shape[1]), library.uint32)
    return library.concatenate([words, rest])


def _no_rows(x: Array, count: int) -> Array:
    """Zeros in the place of so many of the rows that `own_rows` makes of x."""
    library = library_of(x)
    return library.zeros((count, x.shape[1]), library.float32 if len(x) <= MAX_TOKENS else x.dtype)


def pair_rows(x: Array, tokens: np.ndarray, slots: np.ndarray, records: Records, weights: np.ndarray) -> Array:
    """expert(slots[p])(x[tokens[p]]) for each pair, float32 [P, H]; on MLX's side times its weight.

    A pair goes through the kernels as it does among all of its token's, so its bits are the same: on MLX's side the
    weighted row is rounded before it is summed, on the CPU the sum multiplies.
    """
    if isinstance(x, np.ndarray):
        return native_rows(np.ascontiguousarray(x[tokens]), slots.astype(np.int32), records, alone=True)
    copies, index = records.for_mlx(slots)
    n, parts = len(tokens), []
    sent = mx.array(np.concatenate([index, tokens, weights.view(np.uint32)]).astype(np.uint32, copy=False))
    own, where, weighed = sent[:n, None], sent[n : 2 * n], sent[2 * n :].view(mx.float32)[:, None]
    for start in range(0, n, MAX_TOKENS):
        part = slice(start, start + MAX_TOKENS)
        taken = gather_rows(x, where[part])
        act = expert_gate_up(taken, own[part], copies)
        zeros = constant(0.0, (MAX_TOKENS, x.shape[1]))[: len(taken)]
        parts.append(expert_down_combine(act, own[part], copies, weighed[part], zeros))
    return parts[0] if len(parts) == 1 else mx.concatenate(parts)

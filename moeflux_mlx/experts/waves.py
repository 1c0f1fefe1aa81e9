"""Computes many tokens with a layer's experts, in waves: a few experts of the layer that are in memory together.

Rows are sorted by expert, so each expert is requested once and the temporary memory is known in advance. Which experts
form a wave depends only on the tokens and the sizes, never on the contents of memory, because the bits of a product may
depend on what is multiplied together with it.
"""

from collections import deque
from typing import Any, cast

import numpy as np

from ..formats.record import ExpertLayout, Key
from ..ops import backend
from ..ops.backend import Array, EitherArray
from ..ops.expert_rows import refusal
from ..ops.grouped import GroupedRows
from ..ops.tiles import LEASED_TOKENS
from .routing import Pieces, Routing
from .source import ExpertLoader, Owned, all_of

WAVE_BYTES = 128 << 20  # the most bytes of records that are multiplied together
NEARLY_ALL = 0.9  # share of a layer's experts in use; from it on the next layer's are read before its router chooses
AHEAD = 4  # 1/4 of the pool is for reading ahead; the rest keeps records for decoding
UNDER_WAY = 2  # waves that a GPU is given at a time


def in_waves(
    source: ExpertLoader,
    routing: Routing,
    x: Array,
    residual: Array,
    shared: Array | None,
    reads_ahead: bool,
) -> Pieces[Array]:
    """residual + sum_k weights[:, k] * expert(ids[:, k])(x) + shared, all [T, H]; each expert is requested once.

    Afterwards the experts with the most tokens are still in the pool, up to this layer's share.

    Args:
        reads_ahead: whether the next layer's experts may be read before its router has run.
    """
    ids = np.array(routing.ids)
    weights = cast(Array, routing.weights)
    rows = yield from multiplied(source, routing.layer, ids, x, ids.shape[1], reads_ahead)
    return rows.combined(weights, residual, shared, routing.norm)


def multiplied(
    source: ExpertLoader,
    layer: int,
    ids: np.ndarray,
    x: Array,
    top_k: int,
    reads_ahead: bool,
    tokens: np.ndarray | None = None,
    owned: Owned = all_of,
    every: np.ndarray | None = None,
) -> Pieces[GroupedRows]:
    """The outputs of the experts for the rows of x, as `in_waves` needs them; a piece is a wave.

    Args:
        ids: [T, K], the experts of each token of x; with `tokens` [P, 1], `ids[p]` belongs to row `tokens[p]` of x.
        top_k: number of experts per token, which determines the waves.
        owned: selects the experts that the source serves.
        every: the routing [T, K] of all ranks; `ids` is this rank's part. It alone decides the waves, so all ranks cut
            alike.
    """
    counts = np.bincount(ids.reshape(-1), minlength=source.layout.num_experts)
    total = counts if every is None else np.bincount(every.reshape(-1), minlength=len(counts))
    whole = [wave for wave in waves_of(total, wave_size(source.layout, top_k)) if counts[wave].any()]
    waves = [wave[counts[wave] > 0] for wave in whole]
    among = [(total[wave], np.flatnonzero(counts[wave])) for wave in whole]
    record = source.layout.records[layer]
    rows = GroupedRows(x, ids, counts, waves, record, tokens, among, not refusal(backend.dtype_of(x), record))
    path = _Path(source, layer, waves, counts, len(x), reads_ahead, owned)
    under_way: deque[Any] = deque()
    done = 0
    try:
        for i, wave in enumerate(waves):
            under_way.append(_run(source, layer, wave, rows, i, path))
            if len(under_way) == UNDER_WAY:
                backend.finish(under_way.popleft())
            done += int(counts[wave].sum())
            yield done / ids.size
        path.leave_before(len(waves))
    finally:
        source.intend(layer, ())
    return rows


def waves_of(counts: np.ndarray, size: int) -> list[np.ndarray]:
    """The experts in use, `size` at a time, those with the fewest rows first; `counts` [E] says how many each has.

    Experts with similar row counts are multiplied together, and the last ones stay in memory.
    """
    order = np.argsort(counts, kind="stable")
    used = order[np.searchsorted(counts[order], 1) :]
    return [used[start : start + size] for start in range(0, len(used), size)]


def wave_size(layout: ExpertLayout, top_k: int) -> int:
    """Number of experts in a wave, which fits in the smallest pool."""
    return layout.experts_within(WAVE_BYTES, at_most=LEASED_TOKENS * top_k)


def expect(source: ExpertLoader, layer: int, tokens: int, owned: Owned = all_of) -> None:
    """Begins to read `layer` in file order if `tokens` tokens will use nearly all of its experts."""
    if tokens >= source.layout.num_experts:
        source.hint(_whole(source.layout, layer, owned)[: source.slots_of(layer) // AHEAD])


def _run(
    source: ExpertLoader, layer: int, wave: np.ndarray, rows: GroupedRows, index: int, path: "_Path"
) -> EitherArray:
    """Multiplies one wave while the next records are read; the returned array is computed when the wave is."""
    records = source.whole(layer)
    if records is not None:
        return rows.multiply(index, wave, records)
    path.leave_before(index)
    with source.request(layer, wave) as lease:
        path.read_on(index)
        lease.wait()
        records, slots = lease.records()
        done = rows.multiply(index, slots, records, source.relieve)
        lease.release(None if records.lasting else backend.after(done))
    return done


class _Path:
    """What to read ahead and what to evict on the way through a layer's waves and on to the next layer."""

    def __init__(
        self,
        source: ExpertLoader,
        layer: int,
        waves: list[np.ndarray],
        counts: np.ndarray,
        tokens: int,
        reads_ahead: bool,
        owned: Owned,
    ):
        self.source, self.layer, self.waves = source, layer, waves
        size = max(len(wave) for wave in waves)
        self._room = _room_ahead(source, layer, size)
        used = np.concatenate(waves).tolist()
        self._keys: list[Key] = [(layer, expert) for expert in used]
        self._ends = np.cumsum([len(wave) for wave in waves]).tolist()
        share = source.slots_per_layer(spare=self._room + size)
        source.intend(layer, used)
        source.note_prompt(layer, counts, tokens)
        self._kept = set(np.argsort(-counts, kind="stable")[:share].tolist())
        following = source.layout.next_moe_layer(layer)
        if reads_ahead and following is not None and len(used) >= NEARLY_ALL * len(_whole(source.layout, layer, owned)):
            self._keys += _whole(source.layout, following, owned)

    def leave_before(self, index: int) -> None:
        """Makes the records of the wave before `index` the first to be evicted, except those that decoding will
        probably use.
        """
        if index:
            before = self.waves[index - 1].tolist()
            self.source.give_way(self.layer, [expert for expert in before if expert not in self._kept])

    def read_on(self, index: int) -> None:
        """Reads ahead what comes after wave `index`, which has been requested."""
        end = self._ends[index]
        self.source.hint(self._keys[end : end + self._room])


def _whole(layout: ExpertLayout, layer: int, owned: Owned) -> list[Key]:
    return [(layer, expert) for expert in owned(layer, range(layout.num_experts))]


def _room_ahead(source: ExpertLoader, layer: int, size: int) -> int:
    """Number of records that may be read ahead while a wave of `size` experts is in use."""
    slots = source.slots_of(layer)
    return max(min(max(size, slots // AHEAD), slots - size), 0)

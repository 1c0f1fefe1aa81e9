"""Which record is evicted: the one that was used least of late, but never one that is leased."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_packed import tiny_args

from moeflux_mlx.experts.pool import SlotPool
from moeflux_mlx.experts.ranking import HALF_LIFE
from moeflux_mlx.formats.record import ExpertLayout

LAYOUT = ExpertLayout.from_args(tiny_args())


def filled(slots, copied=False):
    """Returns a full pool of records (0, 0), (0, 1), ..., without uses."""
    pool = SlotPool(LAYOUT.held_bytes, slots, slots if copied else None)
    for expert in range(slots):
        slot = pool.take()
        pool.places.row(slot.row)[:] = expert
        pool.put((0, expert), slot)
        pool.arrived((0, expert))
    assert copied or pool.take() is None
    return pool


@pytest.mark.parametrize("copied", [False, True])
@pytest.mark.parametrize("for_guess", [False, True])
def test_a_pinned_record_is_not_evicted(copied, for_guess):
    pool = filled(3, copied)
    pool.finish_copies()
    first, second, third, again = ([(0, expert)] for expert in (0, 1, 2, 0))
    pool.pin(first)
    pool.pin(second)
    assert pool.victim(for_guess) == (0, 2)
    pool.pin(third)
    assert pool.victim(for_guess) is None
    pool.pin(again)
    for _ in range(2):
        pool.unpin(first)
    assert pool.victim(for_guess) is None, "pinned twice, it is still pinned once"
    pool.unpin(again)
    assert pool.victim(for_guess) == (0, 0)


@given(
    uses=st.lists(st.integers(0, 3), max_size=20),
    pinned=st.sets(st.integers(0, 3)),
    foretold=st.sets(st.integers(0, 3)),
    first=st.none() | st.integers(0, 3),
)
def test_the_record_used_least_of_late_is_evicted(uses, pinned, foretold, first):
    pool, counts = filled(4), dict.fromkeys(range(4), 0.0)
    for expert in uses:
        pool.ranking.pass_time(4.0)
        pool.ranking.use((0, expert))
        counts = {key: count * 2 ** (-4.0 / HALF_LIFE) for key, count in counts.items()}
        counts[expert] += 1
    for expert in pinned:
        pool.unpin(held := [(0, expert)])
        pool._leased[id(held)] = held
    pool.foretold = {(0, expert) for expert in foretold}
    if first is not None:
        pool.demote((0, first))
        counts[first] = -1.0
    order = sorted(counts, key=lambda expert: (expert in foretold, counts[expert], expert))
    free = [(0, expert) for expert in order if expert not in pinned]
    assert pool.victim(for_guess=False) == (free[0] if free else None)
    assert pool.victim(for_guess=True) == next((key for key in free if key[1] not in foretold), None)


def test_the_row_of_a_dropped_record_is_reused():
    pool = filled(2)
    pool.drop((0, 1))
    slot = pool.take()
    assert np.all(pool.places.row(slot.row) == 1) and (0, 1) not in pool and (0, 0) in pool

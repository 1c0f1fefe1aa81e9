"""Layers that are queued ahead give the bits of waiting, however late they run.

Here nothing is computed when it is queued, but only when the host reads a choice, which is as late as a GPU can be. In
between, records go and others are read, memory is cut and grows back, reads fail and calls are interrupted, in a random
order. Faults in what keeps queued layers and records apart are planted, and must change a bit.
"""

import os
import random
import sys

import mlx.core as mx
import numpy as np
import pytest
from test_optimistic import TOP_K, opened, queue_by, run, tokens_of
from tiny_models import use_plain_operations

from moeflux_mlx.errors import ExpertIOError
from moeflux_mlx.experts.places import Buffers
from moeflux_mlx.experts.record_table import SlotTable, Tables
from moeflux_mlx.model.optimistic import Grouping
from moeflux_mlx.model.step import SequenceRows
from moeflux_mlx.ops.records import MISSING

FAMILY, RECORDS, MOST = "qwen3_moe", 40, 1 << 30
INTERRUPTED = KeyboardInterrupt, ExpertIOError


@pytest.fixture(autouse=True)
def late(monkeypatch):
    use_plain_operations(monkeypatch)
    monkeypatch.setattr(mx, "async_eval", lambda *_: None)


@pytest.fixture(scope="module")
def want():
    with pytest.MonkeyPatch.context() as patch:
        use_plain_operations(patch)
        model = opened(FAMILY, ahead=False)
        logits = run(model, tokens_of(FAMILY))
        model.experts.close()
    return logits


class Rough:
    """A model in buffers to which things happen, at random, whenever queued layers are accepted.

    Args:
        seed: of what happens.
        breaks: whether reads fail and calls are interrupted too.
    """

    def __init__(self, seed, breaks=True):
        self.rng, self.breaks, self.limit, self.is_rough = random.Random(seed), breaks, MOST, False
        self.model = opened(
            FAMILY, RECORDS, preadv=self.read, in_buffers=True, prefetch="lookahead", least_slots=2 * TOP_K
        )
        self.source, self.pool = self.model.experts, self.model.experts.pools[0]
        self.accept, self.source.accept = self.source.accept, self.happen
        self.source.limit = lambda held: self.limit

    def read(self, fd, buffers, offset):
        if self.is_rough and self.breaks and self.rng.random() < 0.02:
            raise OSError(5, "Input/output error")
        return os.preadv(fd, buffers, offset)

    def happen(self, layer, ids, table):
        is_hit = self.accept(layer, ids, table)
        if self.is_rough and self.rng.random() < 0.3:
            self.rng.choice([self.drop, self.cut, self.interrupt])()
        return is_hit

    def drop(self):
        """Some records go, and others are read."""
        keys = [key for key in self.pool.records() if not self.pool.pinned(key) and self.pool[key].read is None]
        for key in self.rng.sample(keys, min(len(keys), 6)):
            self.pool.drop(key)
        every = [(layer, expert) for layer in range(len(self.model.layers)) for expert in range(16)]
        self.source.hint(self.rng.sample(every, 12))
        self.source.reads.take_in(self.source.in_flight)

    def cut(self):
        self.limit = self.rng.choice([self.source.pools.nbytes // 2, self.source.pools.nbytes * 3 // 4, MOST])

    def interrupt(self):
        if self.breaks and self.rng.random() < 0.3:
            raise KeyboardInterrupt

    def logits(self):
        """Those of the tokens; a step that fails is repeated."""
        cache, rows = self.model.make_cache(), []
        for token in tokens_of(FAMILY):
            self.is_rough = True
            while True:
                try:
                    rows.append(np.array(self.model.step([SequenceRows(cache, [token])]).logits[0]))
                    break
                except INTERRUPTED:
                    self.is_rough = False
        return np.stack(rows)


def is_right(want, seed, **options):
    """Returns whether all bits of three texts are right."""
    rough = Rough(seed, **options)
    right = all(np.array_equal(rough.logits(), want) for _ in range(3))
    assert rough.model.optimistic.share > 0
    rough.source.close()
    return right


@pytest.mark.parametrize("grouping", [Grouping(0.0, 2, 0, 2), Grouping(0.0, 1, 0, 3)])
def test_late_groups_change_no_bit(want, monkeypatch, grouping):
    queue_by(monkeypatch, grouping)
    assert all(is_right(want, seed) for seed in range(3))


def not_noted(monkeypatch):
    """A table is not told of a move."""
    note = Tables.note

    def deaf(tables, key):
        if sys._getframe(1).f_code.co_name != "_move":
            note(tables, key)

    monkeypatch.setattr(Tables, "note", deaf)


def early(monkeypatch):
    """A place is given away when the group before the last one that may read it has been read."""
    queued = Buffers.queued
    monkeypatch.setattr(Buffers, "queued", lambda places, outputs: queued(places, outputs[:-1]))


def beside(monkeypatch):
    """A table has the slot behind a record's."""
    written = SlotTable.written

    def wrong(table, changed, slots):
        made = written(table, changed, slots)
        return mx.where(made == MISSING, made, made ^ 1)

    monkeypatch.setattr(SlotTable, "written", wrong)


@pytest.mark.parametrize("plant", [not_noted, early, beside])
def test_a_planted_fault_is_caught(want, monkeypatch, plant):
    queue_by(monkeypatch, Grouping(0.0, 1, 0, 3))
    plant(monkeypatch)
    assert not all(is_right(want, seed, breaks=False) for seed in range(4))

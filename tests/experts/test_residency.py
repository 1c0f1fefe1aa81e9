"""What lies in a Mac's residency sets while a model loads, answers and is cut short of memory, in stand-ins: `Mac` of
`test_buffers` for the memory, `Sets` for MLX's allocator.
"""

import weakref

import numpy as np
import pytest
from residency import Sets
from test_breathing import on_host
from test_buffers import LAYERS, SLOTS, Mac, read
from test_source import write_packed

from moeflux_mlx.experts import places
from moeflux_mlx.experts.memory import private_pages
from moeflux_mlx.experts.streamed import StreamedExperts
from moeflux_mlx.planning import wired

WORKING_SET = 1 << 40
WEIGHTS = [5000, 40_000, 300, 1 << 20, 2 << 20, 12_345_678]


class Array(np.ndarray):
    """As MLX's array over adopted memory: it is in the allocator's count as long as it lives, and keeps the memory."""


class WiredMac(Mac):
    """A Mac that also counts what lies in residency sets."""

    def __init__(self, room, seed=0):
        super().__init__(room)
        self.sets, self.buffers = Sets(seed), {}

    def adopt(self, rows, words):
        memory, _ = super().adopt(rows, words)
        return memory, self._track(memory)

    def _track(self, memory):
        number = self.sets.adopt(memory.nbytes)
        self.buffers[number] = memory.nbytes
        array = memory.view(Array)
        array.owner = memory
        weakref.finalize(array, self._untrack, number)
        return array

    def _untrack(self, number):
        self.sets.release(number)
        del self.buffers[number]

    def adopt_again(self, memory):
        return self._track(memory[:])

    def filler(self, rows, words):
        memory = np.frombuffer(private_pages(4 * rows * words), np.uint32).reshape(rows, words)
        number = self.sets.adopt(memory.nbytes)
        weakref.finalize(memory, self.sets.release, number)
        return memory, memory


class Model:
    """A model on a Mac, with the states of several answers; `load` as `open_with` does it."""

    def __init__(self, packed, monkeypatch, seed=0):
        self.stride = packed.layout.record.stride
        self.nbytes = SLOTS * self.stride
        self.mac, self.rng, self.states = WiredMac(self.nbytes, seed), np.random.default_rng(seed), {}
        self.sets, self.limit = self.mac.sets, wired.WiredLimit()
        monkeypatch.setattr(wired, "mx", self.sets.mx)
        monkeypatch.setattr(wired, "adopted_pages", self.mac.filler)
        monkeypatch.setattr(places, "adopt_again", self.mac.adopt_again)
        self.loader = StreamedExperts(packed, cache_bytes=self.nbytes, least_slots=8, adopt=self.mac.adopt)
        self.loader.limit = self.mac.limit(self.nbytes)

    def load(self):
        for nbytes in [*WEIGHTS, *WEIGHTS]:  # the checkpoint's tensors, and the form in which they are kept
            kept = self.sets.malloc(nbytes)
            if len(self.states.setdefault("weights", [])) < len(WEIGHTS):
                self.states["weights"].append(kept)
            else:
                self.sets.free(kept)
        self.loader.take_memory()
        self.release = self.limit.wire_lasting(WORKING_SET)

    def answer(self, steps, answers=3):
        """Steps of several answers: each appends to its caches, uses temporaries, and some end and are evicted."""
        for step in range(steps):
            self.mac.now += 1
            self.loader.relieve(may_grow=True)
            with self.loader.turn(1):
                for layer in range(LAYERS):
                    read(self.loader, layer, self.rng.choice(40, 4, replace=False)).release()
            for name in range(answers):
                work = [self.sets.malloc(int(size)) for size in self.rng.integers(16, 1 << 20, 4)]
                if step % 5 == name:
                    self._grow(name)
                for one in work:
                    self.sets.free(one)
            if step % 17 == 16:  # a kept prompt is evicted
                for one in self.states.pop(step % answers, []):
                    self.sets.free(one)
                self.sets.clear_cache()

    def _grow(self, name):
        grown = [self.sets.malloc(int(size)) for size in self.rng.integers(4096, 8 * self.stride, 4)]
        for one in self.states.get(name, []):
            self.sets.free(one)
        self.states[name] = grown

    def outside(self):
        """Buffers of the pool, and weights, that are in no residency set."""
        return [one for one in [*self.mac.buffers, *self.states["weights"]] if one not in self.sets.inside]


@pytest.fixture(params=range(2))
def model(request, tmp_path, monkeypatch):
    made = Model(write_packed(tmp_path, experts=40), monkeypatch, request.param)
    made.load()
    yield made
    made.loader.close()


def test_loading_leaves_nothing_out_and_no_room(model):
    assert not model.outside() and model.mac.adopted == model.nbytes
    assert model.sets.limit - model.sets.wired < 16384
    assert model.sets.commits < 20


def test_answers_touch_no_set(model):
    before = model.sets.commits
    model.answer(100)
    assert model.sets.commits == before and not model.outside()


@on_host
def test_a_buffer_that_is_cut_and_grown_is_in_a_set_again(model):
    """Although three answers have caches that no set holds; and their steps touch none before or after."""
    model.answer(20)
    for share in (1 / 8, 3 / 8):
        model.mac.others = int(share * model.nbytes)
        model.answer(25)
        cut = model.mac.adopted
        assert cut < model.nbytes and not model.outside()
        model.mac.others, before = 0, model.sets.commits
        model.answer(40)
        assert model.sets.commits == before, "while the pool is small, its room in the sets stays taken"
        model.answer(250)
        assert model.mac.adopted == model.nbytes and not model.outside()
        before = model.sets.commits
        model.answer(100)
        assert model.sets.commits == before


@on_host
def test_memory_that_is_adopted_twice_is_not_kept_when_its_buffer_goes(model):
    """The pool is cut until one buffer is left, in any order of buffers, and gives back its memory each time."""
    for slots in (56, 40, 24, 8, 64, 16, 64):
        model.loader.resize(slots * model.stride)
        model.loader.take_memory()
        assert model.mac.adopted == slots * model.stride and not model.outside()
        assert model.sets.limit - model.sets.wired < 16384


def test_a_server_that_rests_leaves_the_sets_and_wakes_with_the_whole_pool(model):
    """Its kept prompts are larger than anything else, and may come first when sets are filled again."""
    model.answer(30)
    model.states["kept"] = [model.sets.malloc(40 << 20) for _ in range(20)]
    model.limit.rest()
    assert not model.sets.inside
    before = model.sets.commits
    model.limit.rest()
    model.limit.wake()
    assert not model.outside() and model.sets.limit - model.sets.wired < 16384
    assert model.sets.commits - before < 20
    model.limit.wake()


def test_a_closed_model_leaves_no_limit(model):
    model.release()
    assert model.sets.limit == 0 and not model.sets.inside

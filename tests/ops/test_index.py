"""The kernels that score positions by an indexer and choose the best, against plain operations and float64."""

import contextlib

import mlx.core as mx
import numpy as np
import pytest
from floats import wide
from grids import one_in_three

from metal import msl
from moeflux_mlx.kinds import HeadBlocks, Indexer, KeyBlocks, Rotation, Yarn
from moeflux_mlx.layers import LayerNorm, RMSNorm
from moeflux_mlx.mixers.grouped.blocks_op import choose_by_head
from moeflux_mlx.mixers.grouped.spec import GroupedQuery
from moeflux_mlx.mixers.latent.spec import Latent
from moeflux_mlx.mixers.registry import make_caches
from moeflux_mlx.ops import backend, index
from moeflux_mlx.ops.launch import Launch
from moeflux_mlx.ops.rope import Rope

pytestmark = pytest.mark.usefixtures("cpu_device")
ROTATION = Rotation(16, 1e4)
LIMITS = {mx.float32: 1e-5, mx.bfloat16: 2e-2}
CASES = {  # heads, width, rotation
    "halves": (3, 40, ROTATION),
    "pairs, two turns of heads": (40, 128, Rotation(64, 1e4, Yarn(4.0, 32, attention_factor=1.7), interleaved=True)),
}


class Layer:
    """Random keys and queries of one layer; `top` of its positions are chosen."""

    def __init__(self, heads, width, rotation, dtype=mx.float32, top=7):
        self.rng, self.dtype, self.rotation = np.random.default_rng([heads, width]), dtype, rotation
        self.indexer, norm = Indexer(heads, width, top, rotation.interleaved), LayerNorm(width, 0.1)
        norm.weight, norm.bias = self.normal(width), self.normal(width)
        self.terms = index.IndexTerms(norm, Rope(rotation), 0.3)
        self.cache = make_caches(Latent(1, 8, 8, 8, 8, rotation, indexer=self.indexer))[1]

    def normal(self, *shape):
        return mx.array(self.rng.normal(size=shape).astype(np.float32)).astype(self.dtype)

    def draw(self, tokens=1):
        heads, width = self.indexer.heads, self.indexer.dim
        made = self.normal(1, tokens, heads * width), self.normal(1, tokens, width)
        return index.Projections(*made, self.normal(1, tokens, heads).astype(mx.float32), self.terms)

    def fill(self, tokens):
        """Appends the keys of some tokens."""
        keys = self.terms.keys(self.draw(tokens).keys, self.cache.offset)[:, None]
        self.cache.update_and_fetch(keys, keys[..., :0])

    def wanted(self, made, offset):
        """Returns the float64 scores of all positions for a token that the cache has absorbed."""
        rope, turn = self.terms.rope, lambda x: rope(x.astype(mx.float32), offset)
        queries = wide(turn(made.queries.reshape(1, -1, 1, self.indexer.dim)))[0, :, 0]
        keys = wide(self.cache.state[0])[0, 0, : offset + 1]
        return 0.3 * wide(made.weights)[0, 0] @ np.maximum(queries @ keys.T, 0)

    def error(self, monkeypatch, before, steps):
        """Returns the largest difference of scores and keys, relative to the largest value."""
        if before:
            self.fill(before)
        found, call = [], Launch.__call__
        monkeypatch.setattr(Launch, "__call__", lambda own, *given: found.append(call(own, *given)) or found[-1])
        for _ in range(steps):
            found.clear()
            made, offset = self.draw(), self.cache.offset
            chosen = index.choose_step(made, self.cache, self.indexer)
        scores, want = found[0][0][: offset + 1], self.wanted(made, offset)
        key = wide(self.terms.keys(made.keys.astype(mx.float32), offset))[0, 0]
        assert mx.array_equal(chosen[0, 0], index.best(scores, self.indexer.top, mx))
        errors = want - np.array(scores), key - wide(self.cache.state[0])[0, 0, offset]
        return max(np.abs(error).max() / np.abs(of).max() for error, of in zip(errors, (want, key), strict=True))


@msl.needed
@pytest.mark.parametrize("case, dtype", [("halves", mx.float32), ("pairs, two turns of heads", mx.bfloat16)])
def test_a_token_chooses_by_its_scores(monkeypatch, case, dtype):
    with msl.launching():
        assert Layer(*CASES[case], dtype).error(monkeypatch, 20, 2) < LIMITS[dtype]


@msl.needed
@pytest.mark.parametrize("before", [8, 31, 126, 254])
def test_wherever_pieces_and_arrays_end(monkeypatch, before):
    with msl.launching():
        assert Layer(*CASES["halves"]).error(monkeypatch, before, 3) < LIMITS[mx.float32]


@msl.needed
def test_a_token_that_chooses_nothing_appends_its_key():
    one, other = (Layer(*CASES["halves"]) for _ in range(2))
    with msl.launching():
        for layer in (one, other):
            layer.fill(140)
        made = one.draw()
        assert index.choose_step(made._replace(queries=None), one.cache, one.indexer) is None
        assert index.choose_step(made, other.cache, one.indexer) is not None
        assert mx.array_equal(one.cache.state[0][:, :, :141], other.cache.state[0][:, :, :141])


def norm_of(width, rng):
    norm = RMSNorm(width, 0.1)
    norm.weight = mx.array(rng.normal(size=width).astype(np.float32))
    return norm


def check_blocks_by_head(before=70, heads=26, width=40, ratio=8, chosen=3):
    """Checks that a token chooses for each head as plain operations do.

    One key is not yet in the cache's large arrays.
    """
    rng, blocks = np.random.default_rng(before), HeadBlocks(ratio, Indexer(heads, width, chosen + 1))
    terms = index.IndexTerms(norm_of(width, rng), Rope(ROTATION), query_norm=norm_of(width, rng))
    cache = make_caches(GroupedQuery(heads, heads, 32, ROTATION, blocks=blocks))[1]
    keys, *rows = (mx.array(rng.normal(size=(1, n, width)).astype(np.float32)) for n in (before - 1, 1, 1))
    index.append_keys(cache, terms.keys(keys, 0))
    for row in rows:
        queries = mx.array(rng.normal(size=(1, 1, heads * width)).astype(np.float32))
        offset, made = cache.offset, index.Projections(queries, row, None, terms)
        found = index.choose_step(made, cache, blocks)
    made = index.Index(terms.queries(queries, heads, offset), cache.state[0][:, 0, : offset + 1], None)
    assert mx.array_equal(found, choose_by_head(made, mx.array([offset // ratio]), blocks))


@msl.needed
@pytest.mark.parametrize("before, ratio", [(70, 8), (128, 8), (600, 128)])
def test_blocks_that_each_head_chooses(before, ratio):
    with msl.launching():
        check_blocks_by_head(before, ratio=ratio)


def check_key_blocks(offset=40, rotates_last=False):
    """Checks that a token chooses blocks as plain operations do, by keys that follow 16 other values of a row."""
    rng, blocks, heads, width = np.random.default_rng(offset), KeyBlocks(4, Indexer(3, 40, 5)), 3, 40
    terms = index.IndexTerms(None, Rope(ROTATION), 0.3, norm_of(width, rng), rotates_last)
    queries, keys = (mx.array(rng.normal(size=(1, *shape)).astype(np.float32)) for shape in ((1, 120), (256, 56)))
    position, made = offset + 7, index.Projections(queries, keys, None, terms)
    place = index.TokenPlace(mx.array([offset, 0, 256, position], mx.int32))
    if rotates_last:
        place = index.TokenPlace(mx.array([offset]), mx.array([position]))
    found = index.choose_blocks_step(made, place, blocks)
    made = index.Index(terms.queries(queries, heads, position), keys[..., 16:], mx.ones((1, 1, heads)))
    assert mx.array_equal(found, index.choose(made, mx.array([(offset + 1) // 4]), blocks.indexer))


@msl.needed
@pytest.mark.parametrize("offset", [38, 39, 40])
@pytest.mark.parametrize("rotates_last", [False, True])
def test_blocks_with_keys_of_their_own(offset, rotates_last):
    """Their scores are sums over heads with equal weights."""
    with msl.launching():
        check_key_blocks(offset, rotates_last)


def check_ring(offset=13, slots=5, width=40):
    """Checks that a normed key and gates are written to their slot, and that the other rows stay."""
    rng, norm = np.random.default_rng(offset), LayerNorm(width, 0.1)
    norm.weight, norm.bias = (mx.array(rng.normal(size=width).astype(np.float32)) for _ in range(2))
    ring, key, gates = (
        mx.array(rng.normal(size=shape).astype(np.float32))
        for shape in ((1, 1, slots, 2 * width), (1, 1, width), (1, 1, width))
    )
    got = index.put_in_ring(key, gates, norm)(ring, mx.array(offset))
    want = np.array(ring)
    want[0, 0, offset % slots] = np.concatenate([np.array(norm(key))[0, 0], np.array(gates)[0, 0]])
    np.testing.assert_allclose(np.array(got), want, atol=1e-5)


@msl.needed
@pytest.mark.parametrize("offset", [13, 15, 19])
def test_the_row_of_a_token_in_a_ring(offset):
    with msl.launching():
        check_ring(offset)


def chosen_of(scores, top):
    """Returns the kernel's choice."""
    scores = mx.array(scores, mx.float32)
    kinds = index.Kinds(True, True, 0, 2)
    terms = backend.name(), (mx.float32, mx.float32), Indexer(1, 8, top), kinds, (256, 8), (8, False)
    positions = mx.array([len(scores) - 1] * 4, mx.int32)
    return index.plan(*terms)[1](scores, positions)[0][0, 0]


SCORES = {
    "all equal": np.zeros(300),
    "a few values": np.random.default_rng(0).integers(-2, 3, 700) / 2,
    "zeros of both signs": np.where(np.arange(40) % 3, -0.0, 0.0),
    "of all sizes": np.random.default_rng(1).normal(size=1500) * 10.0 ** (np.arange(1500) % 60 - 30),
    "no number": np.where(np.arange(60) % 7, np.arange(60) - 30.0, -np.inf),
}


@msl.needed
@pytest.mark.parametrize("name", SCORES)
@pytest.mark.parametrize("top", [1, 8, 33])
def test_the_best_are_chosen_and_the_first_of_equal_ones(name, top):
    scores = SCORES[name]
    with msl.launching():
        found = np.array(chosen_of(scores, top))
    assert found.tolist() == np.sort(np.argsort(-scores.astype(np.float32), kind="stable")[:top]).tolist()


@msl.needed
def test_as_many_as_there_are_are_chosen():
    with msl.launching():
        assert np.array(chosen_of(np.arange(9.0), 9)).tolist() == list(range(9))


FAULTS = {
    "no mean": ("index.h", "mean = lane_sum<32>(mean) / float(D)", "mean = 0"),
    "no bias": ("index.h", "float(bias[first])", "0.0f"),
    "no bias of the second of a pair": ("index.h", "float(bias[second])", "0.0f"),
    "turned backwards": ("rotate.h", "-(b * sine)", "b * sine"),
    "pairs of the other kind": ("index.h", "(INTERLEAVED ? 2 * i", "(!INTERLEAVED ? 2 * i"),
    "the first values rotated": ("index.h", "turned ? FROM + (", "turned ? ("),
    "the values before a key": ("index_scores", "* STRIDE + FIRST", "* STRIDE"),
    "no magnitude": ("index_scores", "magnitude[0] * metal::fast::sin", "metal::fast::sin"),
    "negative products": ("index_scores", "metal::fmax(product, 0.0f)", "product"),
    "weights of the first head": ("index_scores", "weights[h]", "weights[0]"),
    "not scaled": ("index_scores", "* scale[0] :", ":"),
    "the first heads again": ("index_scores", "q + h * D", "q + (h - begin) * D"),
    "its own key is left out": ("index_scores", "next[used + i] = X(own[i])", "next[used + i] = recent[i]"),
    "the newest are forgotten": ("index_scores", "next[i] = recent[i]", "next[i] = key[0]"),
    "the newest are old": ("index_scores", "at < begun ?", "at <= begun ?"),
    "its own key is an older one": ("index_scores", "column < D && !is_own", "column < D"),
    "the least of a block": ("index_scores", "product > largest", "product < largest"),
    "a block of one position": ("index_scores", "RATIO + i]", "1 + i]"),
    "the blocks of the first threadgroup": ("index_scores", "scores[(top / RATIO + pair", "scores[(pair"),
    "scores of another head": ("index_scores", "* H + begin + pair / WHOLE", "* H + pair / WHOLE"),
    "missing barrier": ("index_scores", "threadgroup_barrier(mem_flags::mem_threadgroup);", ""),
    "a ring without slots": ("index_ring", "% SLOTS * ROW", "* ROW"),
    "gates of the first column": ("index_ring", "gates[i - at - D]", "gates[0]"),
    "the last of equal ones": ("index_choose", "key == high && equal < left", "key == high"),
    "bins that overlap": ("index_choose", "low += found[0] << shift", "low += found[0] << (shift / 2)"),
    "those of higher bins again": ("index_choose", "left -= found[1]", "left -= 0"),
    "a thread's range again": ("index_choose", "equal += sums[T + i]", "equal += 0"),
}


BY_HEAD = ("the least of a block", "a block of one position", "the blocks of the first threadgroup")
BY_HEAD += ("scores of another head",)


@msl.needed
@pytest.mark.parametrize("name", one_in_three(FAULTS))
def test_planted_fault_is_caught(monkeypatch, name):
    file, old, new = FAULTS[name]
    msl.plant(monkeypatch, f"{file}.metal", old, new)
    with contextlib.suppress(msl.Failure), msl.launching():
        if file == "index_choose":
            with pytest.raises(AssertionError):
                test_the_best_are_chosen_and_the_first_of_equal_ones("a few values", 200)
            return
        if file == "index_ring":
            with pytest.raises(AssertionError):
                check_ring()
            return
        if name in ("the first values rotated", "the values before a key"):
            with pytest.raises(AssertionError):
                check_key_blocks(rotates_last=True)
            return
        if name in BY_HEAD:
            with pytest.raises(AssertionError):
                check_blocks_by_head(600)
            return
        layers = (Layer(*CASES["halves"]), Layer(*CASES["pairs, two turns of heads"]))
        with pytest.raises(AssertionError):
            for layer in layers:
                assert layer.error(monkeypatch, 20, 2) < LIMITS[mx.float32]

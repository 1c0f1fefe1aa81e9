"""The kernels of compressed attention for one token, against float64."""

from dataclasses import dataclass

import mlx.core as mx
import numpy as np
import pytest
from floats import wide

from metal import fast, msl
from moeflux_mlx.kinds import Indexer, Rotation
from moeflux_mlx.layers import RMSNorm
from moeflux_mlx.mixers.compressed import op as compressed
from moeflux_mlx.mixers.compressed.op import Seen
from moeflux_mlx.mixers.compressed.spec import Compressed, Compressor
from moeflux_mlx.ops import backend
from moeflux_mlx.ops.block_rounding import to_e4m3
from moeflux_mlx.ops.rope import Rope

pytestmark = pytest.mark.usefixtures("cpu_device")
LIMITS = {mx.float32: 2e-5, mx.bfloat16: 2e-2}
EPS = 1e-3


@dataclass(frozen=True)
class Case:
    """A token at place `offset`, with a ring of `slots` rows, room for `entries` entries, of which `top` are chosen."""

    heads: int
    width: int
    offset: int
    slots: int
    ratio: int = 0
    entries: int = 0
    top: int = 0
    dtype: mx.Dtype = mx.float32
    interleaved: bool = True
    borrows: bool = False

    @property
    def mixer(self):
        rotation = Rotation(16, 1e4, interleaved=self.interleaved)
        of_v4 = {"overlaps": self.top > 0 and not self.borrows, "borrows": self.borrows, "indexer": self.indexer}
        compressor = Compressor(self.ratio, **of_v4) if self.ratio else None
        own = {"norms_queries": not self.borrows, "rounds": self.borrows}
        return Compressed(self.heads, self.width, 64, rotation, 130, 2, 64, compressor, **own)

    @property
    def indexer(self):
        return Indexer(2, 32, self.top, reuses=True) if self.borrows else None


CASES = [
    Case(6, 72, 9, 141),  # most slots are empty
    Case(4, 64, 400, 141, dtype=mx.bfloat16),
    Case(2, 40, 0, 1, interleaved=False),  # the first token of a text
    Case(3, 64, 1199, 141, 4, 320),  # 300 entries
    Case(4, 64, 1199, 141, 2, 640, top=137, borrows=True),  # of DeepSeek-V4.1
    Case(8, 64, 1200, 141, 4, 320, top=137),
]


def rotated(rows, position, rope, interleaved):
    """Rotates the last 16 values of rows [..., D] (arXiv:2104.09864)."""
    cosine, sine = fast.turns(position, rope)
    tail = rows[..., -16:].reshape(*rows.shape[:-1], *((8, 2) if interleaved else (2, 8)))
    a, b = np.moveaxis(tail, -1 if interleaved else -2, 0)
    pair = a * cosine - b * sine, a * sine + b * cosine
    joined = np.stack(pair, -1).reshape(*a.shape[:-1], 16) if interleaved else np.concatenate(pair, -1)
    return np.concatenate([rows[..., :-16], joined], axis=-1)


def error(got, want):
    return np.abs(wide(got).reshape(want.shape) - want).max() / np.abs(want).max()


def inputs_error(case, position=37):
    """Returns the error of the queries, and of the row that the cache stores."""
    mixer, rng = case.mixer, np.random.default_rng(case.offset)
    q, raw = (mx.array(rng.normal(size=(1, 1, n))).astype(case.dtype) for n in (case.heads * case.width, mixer.row))
    norm = RMSNorm(case.width, EPS)
    norm.weight = mx.array(rng.normal(size=case.width)).astype(case.dtype)
    rope = Rope(mixer.rotation)
    query, row = compressed.token_inputs(q, raw, norm, rope, position, mixer)

    def normed(rows):
        return rows / np.sqrt((rows**2).mean(-1, keepdims=True) + EPS)

    queries = wide(q).reshape(case.heads, -1)
    want = rotated(queries if case.borrows else normed(queries), position, rope, case.interleaved)
    key = rotated(normed(wide(raw)[0, 0, : case.width]) * wide(norm.weight), position, rope, case.interleaved)
    if case.borrows:
        key = to_e4m3(key.astype(np.float32), 32)
    return max(error(query, want), error(row, np.concatenate([key, wide(raw)[0, 0, case.width :]])))


def attention_error(case, position=5):
    """Returns the error of the result, rotated back by a position that differs from the place, as after a shift."""
    mixer, rng = case.mixer, np.random.default_rng(case.offset)
    shapes = (
        (1, 1, case.heads, case.width),
        (1, case.slots, mixer.row),
        (1, max(case.entries, 1), mixer.entry or mixer.borrowed),
    )
    q, ring, entries = (mx.array(2 * rng.normal(size=shape)).astype(case.dtype) for shape in shapes)
    sinks, made = mx.array(8 + rng.normal(size=case.heads)), (case.offset + 1) // case.ratio if case.ratio else 0
    chosen = np.sort(rng.permutation(made)[: case.top]) if case.top else np.arange(made)
    given = mx.array(chosen.astype(np.int32))[None, None] if case.top else None
    seen = Seen(mx.array(case.offset), ring, None, entries if case.ratio else None, given)
    back = Rope(mixer.rotation, -1)
    got = compressed.attend_token(q, seen, sinks, back, position, mixer)
    positions = np.arange(max(case.offset - mixer.window + 1, 0), case.offset + 1)
    rows = [wide(ring)[0, positions % case.slots, : case.width]]
    if case.ratio:
        rows.append(wide(entries)[0, chosen, : case.width])
    keys = np.concatenate(rows)
    weights = np.exp(wide(q)[0, 0] @ keys.T * case.width**-0.5)
    mixed = weights @ keys / (weights.sum(-1, keepdims=True) + np.exp(wide(sinks))[:, None])
    return error(got, rotated(mixed, position, back, case.interleaved))


@msl.needed
@pytest.mark.parametrize("case", CASES)
def test_a_token_on_kernels(case):
    with msl.launching():
        assert not compressed.refusal(backend.name(), 1, case.mixer)
        assert inputs_error(case) < LIMITS[case.dtype]
        assert attention_error(case) < LIMITS[case.dtype]


@msl.needed
@pytest.mark.parametrize(
    "file, old, new",
    [
        ("rotate.h.metal", "2 * i : i", "i : i"),
        ("compressed_inputs.metal", "float(weight[i])", "1.0f"),
        ("compressed_attend.metal", "age < WINDOW", "age <= WINDOW"),
        pytest.param("compressed_attend.metal", "uint(chosen[top + i])", "top + i", marks=pytest.mark.full),
        pytest.param("compressed_attend.metal", "share < SHARES", "share < SHARES - 1", marks=pytest.mark.full),
        pytest.param(
            "compressed_combine.metal", "total = metal::fast::exp(sink - largest)", "total = 0", marks=pytest.mark.full
        ),
        ("compressed_combine.metal", "RINGS + (entries + P - 1) / P", "RINGS + entries / P"),
    ],
)
def test_a_planted_fault_is_caught(monkeypatch, file, old, new):
    msl.plant(monkeypatch, file, old, new)
    with msl.launching(), pytest.raises((AssertionError, msl.Failure)):
        assert max(inputs_error(CASES[-1]), attention_error(CASES[-1])) < 1e-3

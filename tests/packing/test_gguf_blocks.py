"""Rearranging blocks of GGUF's types: the native form has the bytes of the numpy form, in place and with other memory
around it."""

import numpy as np
import pytest

from moeflux_mlx.packing import gguf_forms
from moeflux_mlx.packing.gguf_forms import FORMS, rearrange, repacked

needs_native = pytest.mark.skipif(gguf_forms.extension is None, reason="the native form is not built")
COUNTS = (1, 2, 31, 32, 33, 100)  # the native form copies up to 32 blocks before it rearranges them


def blocks_of(kind, count):
    return np.random.default_rng(count).integers(0, 256, (count, FORMS[kind].nbytes), dtype=np.uint8)


def by_numpy(kind, blocks):
    parts = FORMS[kind].unpack(blocks)
    return [np.ascontiguousarray(part).reshape(-1).view(np.uint8) for part in parts]


@needs_native
@pytest.mark.parametrize("is_portable", [False, True])
@pytest.mark.parametrize("kind", FORMS)
def test_bytes_are_those_of_numpy(kind, is_portable):
    """In place, in the middle of other bytes, which stay as they are; the last part is moved away from the others."""
    for count in COUNTS:
        blocks = blocks_of(kind, count)
        parts = by_numpy(kind, blocks)
        sizes, start, gap = [part.size for part in parts], 48, 16
        places = [start, *(start + np.cumsum(sizes[:-1])).tolist()]
        places[-1] += gap
        memory = np.full(start + blocks.size + gap + 32, 7, np.uint8)
        memory[start : start + blocks.size] = blocks.reshape(-1)
        wanted = memory.copy()
        for place, part in zip(places, parts, strict=True):
            wanted[place : place + part.size] = part
        gguf_forms.extension.rearrange(kind, memory, is_portable, start, count, *places[1:])
        is_free = slice(places[-1] - gap, places[-1])  # the blocks' last bytes may lie there
        memory[is_free] = wanted[is_free]
        assert np.array_equal(memory, wanted), count


@pytest.mark.parametrize("kind", FORMS)
def test_without_the_extension_the_bytes_are_the_same(kind, monkeypatch):
    rows = blocks_of(kind, 24).reshape(2, 3, -1)
    made = repacked(kind, rows)
    monkeypatch.setattr(gguf_forms, "extension", None)
    again = repacked(kind, rows)
    assert [part.dtype for part in made] == [part.dtype for part in again]
    assert [part.tobytes() for part in made] == [part.tobytes() for part in again]  # NaN too
    assert made[0].shape == (2, 3, FORMS[kind].quant.words(4 * FORMS[kind].weights))


@needs_native
@pytest.mark.parametrize(
    ("kind", "start", "count", "places"),
    [
        ("Q4_K", 0, 11, (1280, 0)),
        ("Q4_K", 1, 10, (1280, 0)),
        ("Q4_K", -1, 1, (128, 0)),
        ("Q4_K", 0, -1, (128, 0)),
        ("Q4_K", 0, 10, (1281, 0)),
        ("Q4_K", 0, 10, (-1, 0)),
        ("Q6_K", 0, 5, (0, 1431)),
        ("Q4_0", 0, 50, (1341, 0)),
        ("Q4_0", 0, 2**62, (0, 0)),
        ("F32", 0, 1, (0, 0)),
    ],
)
def test_what_leaves_the_memory_is_refused(kind, start, count, places):
    memory = np.zeros(1440, np.uint8)
    with pytest.raises(ValueError, match=f"blocks of type {kind} at byte {start} do not fit in 1440 bytes"):
        gguf_forms.extension.rearrange(kind, memory, False, start, count, *places)


def test_read_only_memory_is_refused():
    memory = np.zeros(144, np.uint8)
    memory.flags.writeable = False
    with pytest.raises((ValueError, TypeError, BufferError)):
        rearrange("Q4_K", memory, [0, 128])

"""The parts of a causal attention that MLX computes one after another, so that not all scores exist at once."""

from collections.abc import Iterator

import mlx.core as mx

# Scores that exist at once: without fused attention, MLX keeps all scores of a call. With the widest heads they take an
# M1's GPU 0.05 s at its full rate (gpu_time).
SCORES = 1 << 27
LEAST_ROWS = 256  # least rows of a part of an attention with a window


def in_parts(
    heads: int,
    rows: int,
    positions: int,
    mask: mx.array | str | None,
    window: int | None = None,
    first: int | None = None,
) -> Iterator[tuple[slice, slice, mx.array | str | None]]:
    """Cuts the rows of a causal attention so that each part's scores are within `SCORES`.

    Yields the rows of a part, the positions that they see, and their mask. Only a causal attention of many rows is cut.
    With a window, a part has at most as many rows as the window, or `LEAST_ROWS`, so that few of its positions are
    masked. Or the first query's position is `first`, and each sees only positions of its own chunk, of which one begins
    at each multiple of `window`.
    """
    if first is not None and window is not None and not isinstance(mask, mx.array):
        yield from _in_chunks(heads, rows, positions, window, first)
        return
    size = max(SCORES // (heads * positions), 1)
    if window is not None:
        size = min(size, max(window, LEAST_ROWS))
    if mask != "causal" or (rows <= size and window is None):
        yield slice(0, rows), slice(0, positions), mask
        return
    before = positions - rows
    for start in range(0, rows, size):
        stop = min(start + size, rows)
        first = 0 if window is None else max(before + start - window + 1, 0)
        seen = slice(first, before + stop)
        if window is not None and seen.stop - first > window and stop - start > 1:
            yield slice(start, stop), seen, _band(stop - start, seen.stop - first, window)
        else:
            yield slice(start, stop), seen, "causal" if stop - start > 1 else None


def _in_chunks(
    heads: int, rows: int, positions: int, chunk: int, offset: int
) -> Iterator[tuple[slice, slice, mx.array | str | None]]:
    """`in_parts` of each chunk for itself."""
    before, start = positions - rows, 0
    while start < rows:
        past = (offset + start) % chunk
        first, stop = before + start - past, min(start + chunk - past, rows)
        mask = "causal" if stop - start > 1 else None
        for own, seen, own_mask in in_parts(heads, stop - start, before + stop - first, mask):
            yield _later(own, start), _later(seen, first), own_mask
        start = stop


def _later(places: slice, by: int) -> slice:
    return slice(places.start + by, places.stop + by)


def _band(rows: int, positions: int, window: int) -> mx.array:
    """The mask [rows, positions] of the last positions' queries, each of which sees `window` positions."""
    age = mx.arange(positions - rows, positions)[:, None] - mx.arange(positions)
    return (age >= 0) & (age < window)

"""The choice among the entries of blocks that an earlier layer has marked, against a choice one by one."""

import mlx.core as mx
import numpy as np
import pytest

from moeflux_mlx.kinds import Indexer
from moeflux_mlx.ops.index import Index, choose_in_blocks

TOP, SIZE, COUNT, SEEN = 3, 4, 30, (17, 25, 30)


def case():
    """Returns an index of three tokens and 30 entries, and the scores [3, 30]."""
    rng = np.random.default_rng(2)
    queries, keys = rng.normal(size=(1, 3, 2, 16)), rng.normal(size=(1, COUNT, 16))
    weights = rng.uniform(0.1, 1, (1, 3, 2))
    scores = (weights[0][..., None] * np.maximum(queries[0] @ keys[0].T, 0)).sum(1)
    return [array.astype(np.float32) for array in (queries, keys, weights)], scores


def by_hand(scores, seen, marked):
    """Returns the blocks of one token and the entries of its choice among them, or among `marked`."""
    inside = np.where(np.arange(COUNT) < seen, scores, -np.inf)
    if marked is None:
        largest = [max(inside[at : at + SIZE]) for at in range(0, COUNT, SIZE)]
        largest[(seen - 1) // SIZE] = np.inf
        return sorted(np.argsort(largest)[-TOP:]), sorted(np.argsort(inside)[-5:])
    allowed = np.isin(np.arange(COUNT) // SIZE, marked)
    return marked, sorted(np.argsort(np.where(allowed, inside, -np.inf))[-5:])


@pytest.mark.parametrize("make", [np.array, mx.array])
def test_blocks_are_marked_and_used(make):
    arrays, scores = case()
    index, indexer = Index(*map(make, arrays)), Indexer(2, 16, 5)
    chosen, marked = choose_in_blocks(index, make(np.array(SEEN)), indexer, (TOP, SIZE), None)
    wanted = [by_hand(row, seen, None) for row, seen in zip(scores, SEEN, strict=True)]
    assert np.array(marked)[0].tolist() == [blocks for blocks, _ in wanted]
    assert np.array(chosen)[0].tolist() == [entries for _, entries in wanted]
    later = Index(index.queries[:, :, ::-1], index.keys, index.weights)
    scores = (arrays[2][0][..., None] * np.maximum(arrays[0][0][:, ::-1] @ arrays[1][0].T, 0)).sum(1)
    chosen, kept = choose_in_blocks(later, make(np.array(SEEN)), indexer, (0, SIZE), marked)
    rows = zip(scores, SEEN, np.array(marked)[0], strict=True)
    assert np.array(chosen)[0].tolist() == [by_hand(row, seen, blocks)[1] for row, seen, blocks in rows]
    assert np.array_equal(np.array(kept), np.array(marked))


def test_no_block_is_marked_if_all_would_be():
    arrays, _ = case()
    index = Index(*arrays)
    for blocks in ((8, SIZE), (0, SIZE), None):
        assert choose_in_blocks(index, np.array(SEEN), Indexer(2, 16, 5), blocks, None)[1] is None

"""Assigned reads of experts: even, by the process that has the expert, and with the bits of one process."""

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_ranked_experts import logits_of, ranked, together
from tiny_models import tiny_directory

from moeflux_mlx.errors import RankError
from moeflux_mlx.opening.engine import load_model
from moeflux_mlx.ops import backend
from moeflux_mlx.several.owners import Dealing, Owners

EXPERTS = 24
tokens = st.lists(st.integers(0, EXPERTS - 1), min_size=1, max_size=8, unique=True)


@given(st.lists(st.tuples(st.integers(0, 2), tokens), max_size=30), st.integers(2, 4), st.integers(1, 40))
def test_known_records_stay_and_the_rest_is_even(asked, ranks, slots):
    dealing, twin = (Dealing(Owners((1,) * ranks), [slots] * ranks) for _ in range(2))
    home = {}
    for layer, experts in asked:
        ids = np.array([experts])
        before = dict(dealing.home)
        dealt = dealing.deal(layer, ids)
        assert np.array_equal(dealt, twin.deal(layer, ids))
        for expert, rank in zip(experts, dealt[0].tolist(), strict=True):
            assert before.get((layer, expert), rank) == rank
            home[layer, expert] = rank
        new = [rank for expert, rank in zip(experts, dealt[0].tolist(), strict=True) if (layer, expert) not in before]
        loads = np.bincount(new, minlength=ranks)
        assert loads.max() - loads.min() <= 1
        assert max(map(len, dealing.held)) <= max(int(slots * 7 / 8), 1)
        assert {key: rank for rank, held in enumerate(dealing.held) for key in held} == dealing.home
        assert all(home[key] == rank for key, rank in dealing.home.items())


def test_a_rank_with_a_larger_share_reads_more():
    dealing = Dealing(Owners((3, 1)), [100, 100])
    ranks = np.concatenate([dealing.deal(layer, np.arange(8)[None])[0] for layer in range(4)])
    assert np.bincount(ranks).tolist() == [24, 8]


def test_a_prompt_leaves_its_experts_with_their_owners():
    owners = Owners((1, 1))
    dealing = Dealing(owners, [100, 100])
    ids = np.arange(8).reshape(1, 8)
    dealing.note(1, ids)
    assert np.array_equal(dealing.deal(1, ids), owners.of(1, ids))


@pytest.mark.skipif(backend.has_kernels(), reason="threads of one process share its GPU")
@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_the_bits_of_one_process(family):
    """The pools have evicted records that the account still has."""
    lengths = (1, 31, 5)
    alone = logits_of(load_model(tiny_directory(family), dtype=mx.float32), lengths, 12)
    dealt = set()

    def work(rank, exchange):
        small = {"expert_io": "pread", "expert_cache_bytes": 1, "prefetch": ["auto", "off", "auto"][rank]}
        model = ranked(family, exchange, owners := Owners((1, 1, 1)), **small)
        dealing = Dealing(owners, [20, 20, 5])
        for layer in model.args.moe_layers:
            experts = model.layers[layer].mlp.experts
            experts.dealing = dealing
            right = experts.dealt_to
            experts.dealt_to = lambda layer, ids, right=right: seen(layer, ids, right(layer, ids))
        return logits_of(model, lengths, 12)

    def seen(layer, ids, ranks):
        dealt.add(bool((ranks != Owners((1, 1, 1)).of(layer, ids)).any()))
        return ranks

    assert together(3, work) == [alone] * 3
    assert True in dealt


@pytest.mark.skipif(backend.has_kernels(), reason="threads of one process share its GPU")
def test_accounts_that_differ_are_an_error_on_all():
    def work(rank, exchange):
        model = ranked("qwen3_moe", exchange, Owners((1, 1)), expert_io="pread")
        for layer in model.args.moe_layers:
            model.layers[layer].mlp.experts.dealing = Dealing(Owners((1, 1 + 2 * rank)), [20, 20])
        logits_of(model)

    assert all(isinstance(error, RankError) for error in together(2, work))

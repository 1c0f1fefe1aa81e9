"""The comparison of ranks before they load a model: every relevant difference is the same error on all of them."""

from dataclasses import replace

import numpy as np
import pytest
from test_ranked_experts import together

from moeflux_mlx.errors import RankError
from moeflux_mlx.several import ranks
from moeflux_mlx.several.ranks import REMEDIES, Settings, agree, greet

OWN = Settings(
    package=1,
    mlx=2,
    chip=3,
    model=4,
    dtype=5,
    rounding=8,
    kv_bits=0,
    context=777,
    span=512,
    block=256,
    shares_routing=0,
    slots=0,
)


def agreed(*settings):
    return together(len(settings), lambda rank, exchange: agree(exchange, settings[rank]))


@pytest.mark.parametrize("name", REMEDIES)
def test_a_difference_is_an_error_that_names_the_rank_and_the_remedy(name):
    errors = agreed(OWN, OWN, replace(OWN, **{name: 99}))
    assert all(isinstance(error, RankError) for error in errors) and len({str(error) for error in errors}) == 1
    assert str(errors[0]).startswith(f"rank 2 has another {name} than rank 0") and REMEDIES[name] in str(errors[0])


@pytest.mark.parametrize("name, said", [("mlx", "different MLX versions"), ("chip", "different chips")])
def test_different_machines_use_the_choice_of_the_first(name, said):
    agreements = agreed(OWN, replace(OWN, **{name: 99}))
    assert all(one.shares_routing and said in one.note for one in agreements)


def test_all_take_the_smallest_span_and_block():
    one, other = agreed(replace(OWN, span=4096), replace(OWN, block=64))
    assert one == other and (one.span, one.block, one.shares_routing, one.note) == (512, 64, False, "")
    assert all(agreement.shares_routing for agreement in agreed(OWN, replace(OWN, shares_routing=1)))


def test_reads_are_assigned_if_every_rank_has_room_for_any_expert():
    assert {one.slots for one in agreed(replace(OWN, slots=7), replace(OWN, slots=9))} == {(7, 9)}
    assert {one.slots for one in agreed(replace(OWN, slots=7), OWN)} == {()}


def test_a_rank_that_cannot_take_part_is_named_to_all():
    assert all("rank 1 cannot take part" in str(error) for error in agreed(OWN, None))


def test_shares_are_exchanged_and_checked():
    assert together(2, lambda rank, exchange: greet(exchange, rank + 1)) == [(1, 2)] * 2
    assert all("asks for a share of 65" in str(error) for error in together(2, lambda rank, e: greet(e, 1 + 64 * rank)))


def test_another_protocol_is_refused(monkeypatch):
    """The second rank answers like a future version."""

    def work(rank, exchange):
        if rank == 0:
            return greet(exchange, 1)
        return exchange(ranks.HELLO, np.array([ranks.PROTOCOL + 1, len(ranks.NAMES), 1], np.uint32))

    assert "rank 1 speaks protocol 3, rank 0 2; install the same" in str(together(2, work)[0])

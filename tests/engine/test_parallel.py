"""How many sequences a plan has room for, and that their caches are planned."""

import contextlib

import pytest
from grids import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from test_budget import named

from moeflux_mlx.errors import RequestError
from moeflux_mlx.experts.source import IoMode
from moeflux_mlx.mixers.registry import untrimmable_bytes
from moeflux_mlx.model.step import MAX_ROWS
from moeflux_mlx.ops.stand_ins import standing_in
from moeflux_mlx.planning.budget import MOST_STREAMED, cache_room, plan_memory
from moeflux_mlx.planning.machine import Figures
from moeflux_mlx.planning.memory_plan import Demand, least_pool, room
from moeflux_mlx.spec import variants

GB = 10**9


@settings(max_examples=examples(60))
@given(
    name=st.sampled_from(variants()),
    memory=st.integers(8 * GB, 2000 * GB),
    context=st.none() | st.integers(512, 100_000),
    is_mac=st.booleans(),
    in_place=st.booleans(),
)
def test_the_caches_of_all_sequences_have_room(name, memory, context, is_mac, in_place):
    args, layout = named(name)
    figures = Figures(memory, working_set=memory * 3 // 4 if is_mac else None)
    with contextlib.suppress(RequestError):
        plan = plan_memory(args, layout, figures, Demand(2 * GB, context, in_place=in_place))
        caches = cache_room(args, layout, plan)
        rest, streams = plan.fixed - plan.state + caches.nbytes, plan.mode is IoMode.PREAD
        experts = least_pool(args, layout) if streams else plan.experts
        assert caches.nbytes >= plan.state and plan.state <= caches.needs(plan.context) == caches.needs(10**9)
        assert caches.nbytes == plan.state or rest + experts <= room(figures)
        assert 1 <= caches.sequences <= (MOST_STREAMED if streams else MAX_ROWS)
        assert caches.sequences == 1 or caches.sequences * caches.needs(8192) <= caches.nbytes


@pytest.mark.parametrize(("memory", "most"), [(24 * GB, MOST_STREAMED), (1000 * GB, MAX_ROWS)])
def test_a_machine_with_enough_memory_answers_the_largest_number(memory, most):
    args, layout = named("qwen3.6-35b-a3b")
    with standing_in(backend="ops"):  # a GPU needs room for copies of joined states too
        plan = plan_memory(args, layout, Figures(memory), Demand(2 * GB))
        caches = cache_room(args, layout, plan)
    assert (plan.mode is IoMode.PREAD) == (most == MOST_STREAMED) and caches.sequences == most
    if most == MOST_STREAMED:
        assert caches.nbytes - plan.state == plan.pool // 4


def test_a_gpu_needs_room_for_copies_of_joined_states():
    args, layout = named("qwen3.6-35b-a3b")
    caches = cache_room(args, layout, plan_memory(args, layout, Figures(24 * GB), Demand(2 * GB)))
    with standing_in(backend="ops"):
        alone = caches.needs(100)
    with standing_in(backend="cuda"):
        assert (
            caches.needs(100) == alone + 2 * untrimmable_bytes(args.mixer_counts, caches.plan.demand.itemsize) > alone
        )

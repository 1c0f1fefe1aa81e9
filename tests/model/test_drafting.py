"""The controller of drafts, with invented times and acceptance of steps."""

import random

import pytest

from moeflux_mlx.model.drafting import MOST_DRAFTS, Drafting


def run(drafting, seconds, luck, tokens, seed=0, proposals=1.0):
    """Returns the tokens per second of a text.

    A step takes `seconds(depth)`, and each draft is accepted with the probability `luck`.
    """
    draw, said, spent, depths = random.Random(seed), 0, 0.0, []
    while said < tokens:
        depth = drafting.depth if draw.random() < proposals else 0
        taken = 0
        while taken < depth and draw.random() < luck:
            taken += 1
        step = seconds(depth) * draw.uniform(0.9, 1.1)
        drafting.add(depth, taken, step)
        depths.append(depth)
        said, spent = said + taken + 1, spent + step
    return said / spent, depths


def shared(depth):
    """Returns the time of a step whose rows share most of the work."""
    return 1 + 0.15 * depth


def alone(depth):
    """Returns the time of a step whose rows share little of the work."""
    return 1 + 0.8 * depth


@pytest.mark.parametrize("seed", range(5))
def test_the_fastest_depth_is_used(seed):
    rate, depths = run(Drafting("head"), shared, 0.8, 2000, seed)
    best = max(sum(0.8**i for i in range(d + 1)) / shared(d) for d in range(MOST_DRAFTS + 1))
    assert rate > 0.93 * best and max(depths[len(depths) // 2 :], key=depths.count) >= 3


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    "step, luck", [(alone, 1 / 3), (alone, 0.0), (shared, 0.0), (lambda depth: 1 + 2.0 * depth, 0.9)]
)
def test_drafts_that_do_not_pay_cost_little(seed, step, luck):
    rate, depths = run(Drafting("head"), step, luck, 600, seed)
    assert rate > 0.97 and depths.count(0) > 0.9 * len(depths)


def test_chance_does_not_favour_drafts():
    """The time of a step varies by 40 %, as where experts have to be read, and drafts cost a sixth."""
    draw = random.Random(0)
    noisy = lambda depth: (1 + 1.15 * depth) * draw.lognormvariate(0, 0.4)  # noqa: E731
    plain = run(Drafting(), noisy, 0.0, 4000)[0]
    rates = [run(Drafting("head"), noisy, 0.8, 200, seed)[0] / plain for seed in range(20)]
    assert sorted(rates)[5] > 0.93 and sum(rates) / len(rates) > 0.96


def test_the_time_of_steps_that_fill_a_pool_counts_for_nothing():
    drafting = Drafting("head")
    for _ in range(100):
        drafting.add(drafting.depth, 0, 5.0, is_cold=True)
    assert drafting.depth == 0 and drafting.steps[0] == 100
    drafting.add(0, 0, 1.0)
    _, depths = run(drafting, alone, 1 / 3, 100)
    assert depths.count(0) > 0.9 * len(depths)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("cold", [4, 12, 40])
def test_steps_that_become_faster_do_not_favour_drafts(seed, cold):
    """The first steps read nearly all of their experts, and so they are slow."""
    steps = iter(range(10**6))
    filling = lambda depth: (1 + depth) * (3 if next(steps) < cold else 1)  # noqa: E731
    _, depths = run(Drafting("head"), filling, 0.8, 400, seed)
    assert depths[cold + 60 :].count(0) > 0.8 * len(depths[cold + 60 :])


def test_a_text_that_changes_is_noticed():
    drafting = Drafting("lookup")
    run(drafting, shared, 0.0, 600)
    _, depths = run(drafting, shared, 1.0, 1500, 1)
    assert set(depths[-100:]) <= {3, 4} or depths[-100:].count(4) > 90
    _, depths = run(drafting, alone, 0.0, 600, 2)
    assert depths[-100:].count(0) > 90


def test_one_long_pause_changes_nothing():
    drafting = Drafting("head")
    run(drafting, shared, 0.8, 300)
    before = drafting.rate(3)
    drafting.add(3, 3, 1000.0)
    assert drafting.rate(3) > 0.8 * before


def test_off_never_drafts_and_fixed_always_does():
    assert run(Drafting(), shared, 1.0, 50)[1] == [0] * 50
    rate, depths = run(Drafting("head", 2, fixed=True), alone, 0.0, 50)
    assert set(depths) == {2}


def test_counts():
    drafting = Drafting("head", fixed=True)
    for taken in (4, 2, 0):
        drafting.add(4, taken, 1.0)
    drafting.add(0, 0, 1.0)
    assert (drafting.checked, drafting.taken, list(drafting.steps)) == (12, 6, [1, 0, 0, 0, 3])

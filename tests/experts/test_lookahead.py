"""The predictor's record of guesses, and the trial by time."""

from types import SimpleNamespace

import numpy as np
from grids import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from moeflux_mlx.experts.lookahead import RETRY, TURN, TURNS, VERDICT, WARMUP, Lookahead, Predictor, Trial


def test_confidence_cuts_the_tail():
    ids, weights = np.array([[3, 9, 1, 4]]), np.array([[0.2, 0.5, 0.04, 0.1]])
    assert Predictor(confidence=0.3).confident(ids, weights) == [9, 3]
    assert Predictor(confidence=0.0).confident(ids, weights) == [9, 3, 4, 1]


def test_confident_experts_of_several_rows_come_once_the_nearest_first():
    """The sum of a row's weights does not matter."""
    ids, weights = np.array([[5, 2, 7], [9, 5, 2]]), np.array([[0.5, 0.4, 0.1], [8.0, 2.8, 1.6]])
    assert Predictor(confidence=0.3).confident(ids, weights) == [5, 9, 2]


def test_a_layer_whose_guesses_are_wrong_is_switched_off_and_tried_again():
    predictor = Predictor()
    for _ in range(2 * WARMUP):
        predictor.judge(0, [1], np.array([1]))
        predictor.judge(1, [1], np.array([2]))
    assert predictor.pays(0) and not predictor.pays(1)
    assert any(predictor.pays(1) for _ in range(RETRY))


def run(trial, tokens, with_guesses, without):
    """Returns how often tokens ran with reading ahead."""
    ahead = 0
    for _ in range(tokens):
        ahead += trial.ahead
        trial.token(with_guesses if trial.ahead else without)
    return ahead


@settings(max_examples=examples(50))
@given(faster=st.floats(0.001, 1), slower=st.floats(1.01, 10))
def test_the_faster_way_wins(faster, slower):
    trial = Trial()
    run(trial, TURN * TURNS, faster, slower)
    assert run(trial, VERDICT, faster, slower) == VERDICT
    trial = Trial()
    run(trial, TURN * TURNS, slower, faster)
    assert run(trial, VERDICT, slower, faster) == 0


def test_a_verdict_is_revised_when_conditions_change():
    trial = Trial()
    run(trial, TURN * TURNS + VERDICT, 2.0, 1.0)
    run(trial, TURN * TURNS, 1.0, 2.0)
    assert run(trial, VERDICT, 1.0, 2.0) == VERDICT


def test_a_token_with_layers_that_were_queued_is_not_timed():
    calls = {"give_way": lambda layer, ids: None, "slots_per_layer": lambda spare: 99}
    ahead = Lookahead(
        SimpleNamespace(layout=SimpleNamespace(moe_layers=[0, 1]), reads_ahead=True, **calls), "lookahead"
    )
    times = []
    ahead.trial.token = times.append
    for queued in (True, False):
        ahead.requested(SimpleNamespace(guess=None, layer=0), np.array([[1]]))
        if queued:
            ahead.skipped(1)
        ahead.requested(SimpleNamespace(guess=None, layer=1), np.array([[1]]))
    assert len(times) == 1


def test_a_loss_is_small():
    """In the long run, reading ahead that doubles the time of a token costs less than 3 %."""
    period = TURN * TURNS + VERDICT
    ahead = run(Trial(), 10 * period, 2.0, 1.0)
    assert ahead / (10 * period) < 0.03

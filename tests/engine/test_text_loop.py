"""The loop: a text that is paused, ended or dropped at any moment holds nothing, and the others go on as if alone."""

import gc
import threading

import mlx.core as mx
import numpy as np
import pytest
from driving import events_of
from hypothesis import given, settings
from hypothesis import strategies as st
from test_decoding import PROMPTS, answered_alone, same, session_of
from test_streaming import TOP_K, streamed
from tiny_models import tiny_directory

from moeflux_mlx.driving.loop import Loop, first_come
from moeflux_mlx.model.span import Span
from moeflux_mlx.ops import backend

COUNT = 6
ACTIONS = st.one_of(
    st.tuples(st.just("step"), st.integers(1, 4)),
    st.tuples(st.sampled_from(["add", "pause", "end", "drop"]), st.integers(0, len(PROMPTS) - 1)),
)


def another_thread(work):
    """Whether another thread can do some work that needs a turn."""
    done = threading.Event()
    thread = threading.Thread(target=lambda: work() or done.set(), daemon=True)
    thread.start()
    return done.wait(20)


def take_a_turn(model):
    with model.experts.turn(1):
        pass


@pytest.fixture(scope="module")
def model():
    model = streamed(tiny_directory("qwen3_next"), least_slots=8 * TOP_K, cache_bytes=1)
    yield model
    model.experts.close()


@pytest.mark.skipif(backend.has_kernels(), reason="threads of one process share its GPU")
def test_texts_that_are_left_at_any_moment_hold_nothing(model):
    cuts = {"span": 20, "prefill_step_size": 8}
    alone = [answered_alone(model, prompt, **cuts) for prompt in PROMPTS]

    @given(st.lists(ACTIONS, min_size=4, max_size=24))
    @settings(max_examples=10)
    def at_random(actions):
        loop, told, texts = Loop(), {}, {}
        for name, number in actions:
            if name == "step":
                for event in (event for _ in range(number) for event in loop.step()):
                    assert event.error is None
                    if event.token is not None:
                        told[event.text].append((event.token, event.logprobs))
            elif name == "add" and number not in texts:
                session = session_of(model, **cuts)
                texts[number] = session.answer(PROMPTS[number], max_tokens=COUNT)
                told[texts[number]] = []
                loop.add(texts[number])
            elif name == "pause" and number in texts:
                texts[number].pause()
            elif number in texts and name != "add":
                text = texts.pop(number)
                del told[text]
                if name == "end":
                    loop.remove(text)
                    offsets = {layer.offset for layer in text.cache}
                    assert text.session.half or offsets == {len(text.session.tokens)}
                else:
                    loop.texts.remove(text)
            assert not any(pool.is_leased for pool in model.experts.pools)
            assert another_thread(lambda: take_a_turn(model))
        for event in events_of(loop):
            if event.token is not None:
                told[event.text].append((event.token, event.logprobs))
        for number, text in texts.items():
            assert same(told[text], alone[number]) and text.is_over

    at_random()


@pytest.mark.parametrize("end", ["closed", "dropped", "raised"])
def test_a_span_that_is_left_lets_another_thread_begin_one(model, end):
    tokens = mx.array([list(range(40))])
    pieces = model.advance(Span(tokens, 0, 8), model.make_cache())
    next(pieces)
    if end == "closed":
        pieces.close()
    elif end == "raised":
        with pytest.raises(ZeroDivisionError):
            pieces.throw(ZeroDivisionError())
    else:
        del pieces
        gc.collect()
    assert another_thread(lambda: model.experts.begin_span().__exit__())


def test_a_thread_waits_for_another_ones_span(model):
    pieces = model.advance(Span(mx.array([list(range(40))]), 0, 8), model.make_cache())
    next(pieces)
    begun = threading.Event()
    thread = threading.Thread(target=lambda: model.experts.begin_span() and begun.set(), daemon=True)
    thread.start()
    assert not begun.wait(0.1)
    pieces.close()
    assert begun.wait(20)
    thread.join(20)


@given(st.lists(st.integers(1, 60), min_size=1, max_size=4))
@settings(max_examples=4)
def test_prompts_are_computed_in_the_order_in_which_they_came(model, lengths):
    loop, ended = Loop(first_come), []
    texts = [session_of(model, span=20, prefill_step_size=8).answer(list(range(n)), max_tokens=2) for n in lengths]
    for text in texts:
        loop.add(text)
    for event in events_of(loop):
        if event.token is not None and len(event.text.tokens) == 1:
            ended.append(event.text)
    assert ended == texts and not loop.texts and all(len(text.tokens) == 2 for text in texts)


def test_a_text_of_no_shared_steps_is_advanced_by_itself(model):
    loop = Loop()
    answers = [session_of(model).answer(prompt, max_tokens=COUNT) for prompt in PROMPTS]
    answers[1].shares_steps = False
    for answer in answers:
        loop.add(answer)
    told = {answer: [] for answer in answers}
    for event in events_of(loop):
        if event.token is not None:
            told[event.text].append((event.token, np.array(event.logprobs)))
    for answer, prompt in zip(answers, PROMPTS, strict=True):
        assert same(told[answer], answered_alone(model, prompt))

"""Computing one token ahead: the same tokens, and after a stop caches that hold what was reported."""

import gc
import inspect
from types import GeneratorType

import mlx.core as mx
import numpy as np
import pytest
from test_decode import FAMILIES, SOME_CHOOSING, make_resident
from tiny_models import tiny_directory

from moeflux_mlx.driving.conversation import Conversation
from moeflux_mlx.driving.generation import generate_step, stream_generate
from moeflux_mlx.driving.session import Session
from moeflux_mlx.errors import ModelFileError
from moeflux_mlx.text.tokenizer import load_tokenizer

PROMPT = list(range(5, 25))


@pytest.fixture
def model(monkeypatch, request):
    return make_resident(monkeypatch, request.param)


def steps(model, count, cache=None, prompt=PROMPT, **options):
    responses = generate_step(prompt, model, max_tokens=count, prompt_cache=cache, **options)
    return [(token, np.array(logprobs)) for token, logprobs in responses]


def unchanged(tokens, logits):
    """A processor on the host. With a processor, nothing is computed ahead."""
    return logits


def states(cache):
    return [(layer.offset, [np.array(a) for a in layer.stored()]) for layer in cache if not layer.is_trimmable()]


@pytest.mark.parametrize("model", (*FAMILIES, *SOME_CHOOSING), indirect=True)
def test_same_bits_as_one_by_one(model):
    ahead, plain = steps(model, 9), steps(model, 9, logits_processors=[unchanged])
    assert [token for token, _ in ahead] == [token for token, _ in plain]
    assert all(np.array_equal(one, other) for (_, one), (_, other) in zip(ahead, plain, strict=True))


@pytest.mark.parametrize("reported", [1, 4])
@pytest.mark.parametrize("model", (*FAMILIES, *SOME_CHOOSING), indirect=True)
def test_caches_hold_what_was_reported_after_a_stop(model, reported):
    cache, whole = model.make_cache(), steps(model, reported + 3)
    running = generate_step(PROMPT, model, max_tokens=-1, prompt_cache=cache)
    told = [next(running)[0] for _ in range(reported)]
    running.close()
    assert {layer.offset for layer in cache} == {len(PROMPT) + reported - 1}
    plain = model.make_cache()
    steps(model, reported, plain, logits_processors=[unchanged])
    for (offset, pair), (want, wanted) in zip(states(cache), states(plain), strict=True):
        assert offset == want and all(np.array_equal(a, b) for a, b in zip(pair, wanted, strict=True))
    rest = steps(model, 3, cache, prompt=told[-1:])
    assert [token for token, _ in rest] == [token for token, _ in whole[reported:]]


def running_answers(model):
    """Yields answers of every kind to a new text, and the caches that they fill."""
    tokenizer, cache = load_tokenizer(tiny_directory("qwen3_next")), model.make_cache()
    yield generate_step(PROMPT, model, max_tokens=-1, prompt_cache=cache), cache
    cache = model.make_cache()
    yield stream_generate(model, tokenizer, PROMPT, max_tokens=-1, prompt_cache=cache), cache
    session = Session(model, tokenizer)
    yield session.respond(PROMPT, max_tokens=-1), session.cache
    session = Session(model, tokenizer)
    yield Conversation(session, tokenizer, {}).ask("Hello"), session.cache


def under_way():
    """Returns this package's generators that have begun. The list keeps them from being collected."""
    every = [one for one in gc.get_objects() if isinstance(one, GeneratorType)]
    return [one for one in every if is_suspended(one) and "moeflux_mlx" in one.gi_code.co_filename]


def is_suspended(generator):
    return inspect.getgeneratorstate(generator) == inspect.GEN_SUSPENDED


@pytest.mark.parametrize("model", ["qwen3_next"], indirect=True)
def test_closing_an_answer_ends_what_it_consists_of(model):
    """They end at once, also if a generator outlives the one that uses it, as in CPython 3.12.3."""
    for answer, cache in running_answers(model):
        before = under_way()
        next(answer)
        parts, absorbed = [one for one in under_way() if one not in before], cache[0].offset
        answer.close()
        assert parts and not any(map(is_suspended, parts))
        assert {layer.offset for layer in cache} == {absorbed - 1}


@pytest.mark.parametrize("model", ["qwen3_next"], indirect=True)
@pytest.mark.parametrize("count", [1, 2, 5])
def test_no_token_is_computed_that_is_not_requested(model, count):
    calls, step = [], model.decode_step

    class Counting:
        takes = staticmethod(step.takes)

        def __call__(self, *given):
            calls.append(1)
            return step(*given)

    model.decode_step = Counting()
    steps(model, count)
    assert len(calls) == count - 1


@pytest.mark.parametrize("model", ["qwen3_next"], indirect=True)
def test_a_session_keeps_no_state_beyond_its_tokens(model):
    tokenizer = load_tokenizer(tiny_directory("qwen3_next"))
    session = Session(model, tokenizer, checkpoint_every=1)
    answer = session.respond(PROMPT, max_tokens=-1)
    told = [next(answer).token for _ in range(6)]
    answer.close()
    assert session.tokens == PROMPT + told[:-1] and max(session.points.positions) == len(session.tokens)
    again = [r.token for r in session.respond([*PROMPT, *told], max_tokens=3)]
    assert again == [token for token, _ in steps(model, 9)][6:] and session.reuse.computed == 1


@pytest.mark.parametrize("model", ["qwen3_next"], indirect=True)
def test_nan_logits_are_reported_at_once(model):
    responses = generate_step(PROMPT, model, max_tokens=5)
    next(responses)
    model.lm_head.weight = mx.full(model.lm_head.shape, float("nan"))
    model.lm_head.quant = None
    model.decode_step.forget()
    next(responses)  # it had already begun
    with pytest.raises(ModelFileError, match="NaN"):
        next(responses)

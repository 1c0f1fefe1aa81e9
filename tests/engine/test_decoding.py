"""Decodings and answers that are advanced in turn, or together in one step, give what each gives alone."""

import contextlib
import itertools

import mlx.core as mx
import numpy as np
import pytest
from driving import absorbed, advance, next_token, pieces_of
from test_decode import FAMILIES, make_resident
from tiny_models import tiny_directory, tiny_model

from moeflux_mlx.driving.decoding import Decoding, choose_likeliest
from moeflux_mlx.driving.generation import generate_step
from moeflux_mlx.driving.prefill import Prefill
from moeflux_mlx.driving.session import Session
from moeflux_mlx.text.tokenizer import load_tokenizer

PROMPTS = [list(range(5, 25)), [3, 1, 4], list(range(60, 20, -3))]
COUNT = 6


def decoding_of(model, prompt):
    cache, tokens = model.make_cache(), mx.array(prompt, mx.uint32)
    logits = absorbed(Prefill(model, cache, tokens))
    # A decoding with a processor computes nothing ahead.
    return Decoding(model, cache, tokens, logits, logits_processors=[lambda seen, logits: logits])


def decoded_alone(model, prompt):
    return [(token, np.array(logprobs)) for token, logprobs in generate_step(prompt, model, max_tokens=COUNT)]


def session_of(model, **options):
    return Session(model, load_tokenizer(tiny_directory("qwen3_next")), **options)


def answered_alone(model, prompt, **options):
    responses = session_of(model, **options).respond(prompt, max_tokens=COUNT)
    return [(response.token, np.array(response.logprobs)) for response in responses]


def same(said, wanted):
    assert [token for token, _ in said] == [token for token, _ in wanted]
    return all(np.array_equal(np.array(one), other) for (_, one), (_, other) in zip(said, wanted, strict=True))


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_the_likeliest_tokens_of_rows_are_those_of_each_row_alone(dtype):
    logits = np.random.default_rng(1).standard_normal((5, 20011), np.float32) * 8
    logits[1] = np.round(logits[1])  # several are the largest
    logits[2, 7] = np.nan
    logits[3, :20000] = -np.inf
    rows = mx.array(logits).astype(dtype)
    together = choose_likeliest(rows)
    for i, chosen in enumerate(together):
        (alone,) = choose_likeliest(rows[i : i + 1])
        for one, other in zip(chosen, alone, strict=True):
            assert one.shape == other.shape and np.array_equal(np.array(one), np.array(other), equal_nan=i == 2)
        assert chosen[2].item() == (i == 2) and chosen[0].nbytes <= 8
        assert i == 2 or chosen[0].item() == logits[i].argmax() or dtype == mx.bfloat16


@pytest.mark.parametrize("family", FAMILIES)
def test_several_answers_share_a_step(family):
    """The first tokens come from the prompts. Each step then takes a row of every decoding."""
    model = tiny_model(family, mx.float32)
    decodings = [decoding_of(model, prompt) for prompt in PROMPTS]
    said = [[next_token(decoding)] for decoding in decodings]
    for _ in range(COUNT - 1):
        step = model.step([decoding.rows for decoding in decodings])
        for i, decoding in enumerate(decodings):
            decoding.take_rows(step, i)
            said[i].append(next_token(decoding))
    assert all(same(told, decoded_alone(model, prompt)) for told, prompt in zip(said, PROMPTS, strict=True))


@pytest.mark.parametrize("ahead", [False, True])
def test_answers_in_turn_equal_each_alone(monkeypatch, ahead):
    model = make_resident(monkeypatch, "qwen3_next") if ahead else tiny_model("qwen3_next", mx.float32)
    answers = [session_of(model).answer(prompt, max_tokens=COUNT) for prompt in PROMPTS]
    said = [[] for _ in answers]
    order = np.random.default_rng(0).permutation([i for i in range(len(answers)) for _ in range(COUNT)])
    for i in order:
        response = advance(answers[i])
        said[i].append((response.token, response.logprobs))
        assert response.finish_reason == (None if len(said[i]) < COUNT else "length")
    for answer, told, prompt in zip(answers, said, PROMPTS, strict=True):
        assert same(told, answered_alone(model, prompt))
        assert answer.session.tokens == prompt + [token for token, _ in told[:-1]]
        answer.end()
        assert {layer.offset for layer in answer.session.cache} == {len(answer.session.tokens)}


def test_an_answer_whose_prompt_was_left_goes_on():
    """While the answer waits, another one is given from the first token to the last."""
    model = tiny_model("qwen3_next", mx.float32)
    other = session_of(model).answer(PROMPTS[0], max_tokens=COUNT)
    session = session_of(model, span=20, prefill_step_size=8)
    answer = session.answer(PROMPTS[0], max_tokens=COUNT)
    with contextlib.closing(pieces_of(answer)) as pieces:
        before = next(done for done in pieces if done > 5)
    known = session.known(PROMPTS[0])
    assert 0 < known <= before < len(PROMPTS[0])
    said = [advance(other).token for _ in range(COUNT)]
    with contextlib.closing(pieces_of(answer)) as pieces:
        assert min(itertools.islice(pieces, 1, None)) >= known, "a layer that was done is not computed again"
    assert [advance(answer).token for _ in range(COUNT)] == said


def test_nothing_is_computed_before_an_answer_is_advanced():
    session = session_of(tiny_model("qwen3_next", mx.float32))
    answer = session.answer(PROMPTS[1])
    assert session.tokens == [] and {layer.offset for layer in session.cache} == {0}
    answer.end()
    assert session.tokens == [] and session.last is None


def test_an_answer_that_failed_leaves_a_session_that_goes_on():
    session = session_of(tiny_model("qwen3_next", mx.float32))

    def fails(tokens, logits):
        if len(tokens) > len(PROMPTS[0]) + 2:
            raise OSError("unplugged")
        return logits

    answer = session.answer(PROMPTS[0], logits_processors=[fails])
    said = [advance(answer).token for _ in range(3)]
    with pytest.raises(OSError, match="unplugged"):
        advance(answer)
    answer.end()
    assert {layer.offset for layer in session.cache} == {len(session.tokens)}
    wanted = [token for token, _ in answered_alone(session.model, PROMPTS[0])]
    assert said == wanted[:3]
    assert [response.token for response in session.respond(PROMPTS[0] + said, max_tokens=3)] == wanted[3:]


def test_a_text_ends_without_memory_for_states_of_its_own():
    decoding = decoding_of(tiny_model("qwen3_next"), [1, 2, 3])
    next_token(decoding)

    def fail():
        raise RuntimeError("cudaMalloc failed: out of memory")

    decoding.cache[0].separate = fail
    decoding.close()
    decoding.close()  # nothing is left to take back

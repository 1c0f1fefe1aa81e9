"""Texts generated together, some inserted or removed meanwhile, equal those of each prompt alone."""

import mlx.core as mx
import pytest
from grids import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from test_decoding import PROMPTS
from tiny_models import tiny_directory, tiny_model

from moeflux_mlx import BatchGenerator, BatchResponse, batch_generate, generate, make_sampler
from moeflux_mlx.driving.generation import generate_step
from moeflux_mlx.errors import RequestError
from moeflux_mlx.state.snapshot import save_state
from moeflux_mlx.text.tokenizer import load_tokenizer


@pytest.fixture(scope="module")
def model():
    return tiny_model("qwen3_5_moe", mx.float32)


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(tiny_directory("qwen3_5_moe"))


def alone(model, prompt, count, cache=None, seed=None):
    """Returns tokens, their log-probabilities, and the state before the last token."""
    cache = model.make_cache() if cache is None else cache
    sampler = None if seed is None else make_sampler(0.9, key=mx.random.key(seed))
    steps = list(generate_step(prompt, model, max_tokens=count, prompt_cache=cache, sampler=sampler))
    return [token for token, _ in steps], [float(chances[token]) for token, chances in steps], save_state(model, cache)


def test_texts_tokens_and_logprobs_are_those_of_each_prompt_alone(model, tokenizer, capsys):
    counts = [3, 6, 1]
    made = batch_generate(
        *(model, tokenizer, PROMPTS),
        max_tokens=counts,
        verbose=True,
        return_prompt_caches=True,
        return_token_ids=True,
        return_logprobs=True,
        completion_batch_size=2,
        samplers=[None, make_sampler(0.9, key=mx.random.key(7)), None],
    )
    for i, (prompt, count) in enumerate(zip(PROMPTS, counts, strict=True)):
        tokens, chances, state = alone(model, prompt, count, seed=7 if i == 1 else None)
        if tokens[-1] in tokenizer.eos_token_ids:
            tokens, chances = tokens[:-1], chances[:-1]
        assert made.token_ids[i] == tokens and made.logprobs[i] == chances
        assert save_state(model, made.caches[i]) == state
    assert made.texts[0] == generate(model, tokenizer, PROMPTS[0], max_tokens=3)
    assert made.stats.prompt_tokens == sum(map(len, PROMPTS)) and made.stats.generation_tokens == sum(counts)
    assert made.stats.generation_tps > 0 and "10 tokens" in capsys.readouterr().out
    plain = batch_generate(model, tokenizer, PROMPTS[:1], max_tokens=2)
    assert (plain.caches, plain.token_ids, plain.logprobs) == (None, None, None)


def test_a_given_cache_does_not_change(model, tokenizer):
    cache = model.make_cache()
    list(generate_step(PROMPTS[0], model, max_tokens=1, prompt_cache=cache))
    before = save_state(model, cache)
    made = batch_generate(model, tokenizer, PROMPTS[1:], [cache, cache], 4, return_token_ids=True)
    assert save_state(model, cache) == before
    for prompt, tokens in zip(PROMPTS[1:], made.token_ids, strict=True):
        own = model.make_cache()
        list(generate_step(PROMPTS[0], model, max_tokens=1, prompt_cache=own))
        assert alone(model, prompt, 4, own)[0][: len(tokens)] == tokens


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 5), st.integers(0, 6)), min_size=1, max_size=6), st.data())
@settings(max_examples=examples(8))
def test_texts_come_and_go(texts, data):
    """Each text has a prompt, a number of tokens and the round in which it is inserted. Some texts are removed."""
    model = tiny_model("qwen3_5_moe", mx.float32)
    generator = BatchGenerator(model, completion_batch_size=data.draw(st.integers(1, 4)))
    numbers, told, ended = {}, {}, {}
    for turn in range(7):
        now = [(prompt, count) for prompt, count, begins in texts if begins == turn]
        uids = generator.insert([PROMPTS[prompt] for prompt, _ in now], [count for _, count in now])
        numbers |= dict(zip(uids, now, strict=True))
        for one in generator.next():
            told.setdefault(one.uid, []).append(one.token)
            if one.finish_reason:
                ended[one.uid] = one.prompt_cache
        if numbers and data.draw(st.booleans()):
            ended |= generator.remove([data.draw(st.sampled_from(sorted(numbers)))])
    for uid, cache in ended.items():
        prompt, count = numbers[uid]
        assert told[uid] == alone(model, PROMPTS[prompt], count)[0][: len(told[uid])]
        assert save_state(model, cache) == alone(model, PROMPTS[prompt], len(told[uid]))[2]
    generator.close()
    assert generator.next() == []


def test_an_error_ends_one_text(model, tokenizer):
    def fails(seen, logits):
        raise OSError("unplugged")

    generator = BatchGenerator(model, max_tokens=3)
    bad, good = generator.insert(PROMPTS[:2], logits_processors=[[fails], []])
    told = [one for round_ in generator for one in round_]
    assert [(one.finish_reason, str(one.error)) for one in told if one.uid == bad] == [("error", "unplugged")]
    assert [one.token for one in told if one.uid == good] == alone(model, PROMPTS[1], 3)[0]
    with pytest.raises(OSError, match="unplugged"):
        batch_generate(model, tokenizer, PROMPTS[:2], logits_processors=[[fails], []])


def test_a_text_ends_after_any_of_its_stops(model):
    tokens = alone(model, PROMPTS[0], 6)[0]
    stop = next(n for n in range(2, 7) if tokens[:n].count(tokens[n - 1]) == 1)  # its first occurrence
    generator = BatchGenerator(model, max_tokens=6, stop_tokens=[tokens[stop - 2 : stop]])
    generator.insert(PROMPTS[:1])
    assert [one.finish_reason for round_ in generator for one in round_] == [None] * (stop - 1) + ["stop"]


@pytest.mark.parametrize(
    "options, inserted, message",
    [
        ({"completion_batch_size": 17}, {}, "1 to 16"),
        ({"max_tokens": 0}, {}, "max_tokens is 0"),
        ({}, {"prompts": [[]]}, "prompt is empty"),
        ({}, {"prompts": [[1]], "max_tokens": [1, 2]}, "list has another length"),
        ({}, {"prompts": [[1]], "caches": [[]]}, "0 caches"),
    ],
)
def test_refusals(model, options, inserted, message):
    with pytest.raises(RequestError, match=message):
        BatchGenerator(model, **options).insert(**inserted)


def test_names_are_mlx_lms():
    theirs = pytest.importorskip("mlx_lm.generate")
    assert list(BatchResponse.__dataclass_fields__) == list(theirs.BatchResponse.__dataclass_fields__)

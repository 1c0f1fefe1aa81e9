"""Several answers in one reply: each has the bits that it has alone, and a prompt is computed once for all of them."""

import types

import openai
import pytest
from live_server import FakeEngine, Live, demo_engine, wait_for
from tiny_models import tiny_directory

from moeflux_mlx.errors import BadRequestError
from moeflux_mlx.opening.engine import open_engine
from moeflux_mlx.server.admission import Admission
from moeflux_mlx.server.prepare import PreparedRequest, fill_in
from moeflux_mlx.server.request import Request
from moeflux_mlx.server.running import Job, Running, SharedPrompt, Totals
from moeflux_mlx.server.sessions import Sessions

OWLS = "Mira knew an owl that lived by the lake, and one evening it said to her that"
DRAWN = {"model": "m", "max_tokens": 8, "temperature": 0.9, "logprobs": 2}
ENGINES = {
    "demo": demo_engine,
    "read": lambda: open_engine(tiny_directory("qwen3_moe"), expert_io="pread", expert_cache_bytes=1),
    "recurrent": lambda: open_engine(tiny_directory("qwen3_5_moe")),
}


@pytest.fixture(scope="module", params=ENGINES)
def live(request):
    with Live(ENGINES[request.param], parallel=3) as live:
        yield live


@pytest.fixture
def client(live):
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key="any", max_retries=0) as client:
        yield client


def forget(live):
    wait_for(lambda: not live.worker.running)
    live.worker.sessions.kept.clear()


def alone(live, client, prompt, seed):
    """Returns the text and log-probabilities of one answer, whose prompt is computed whole."""
    forget(live)
    return said(client.completions.create(prompt=prompt, seed=seed, **DRAWN).choices[0])


def said(choice):
    return choice.text, choice.logprobs.token_logprobs


def test_each_answer_has_the_bits_that_it_has_alone(live, client):
    """More of them than run at once, with seeds that are counted up."""
    singles = [alone(live, client, OWLS, seed) for seed in range(5, 10)]
    forget(live)
    before = live.models.totals.computed_tokens
    reply = client.completions.create(prompt=OWLS, n=5, seed=5, **DRAWN)
    assert [choice.index for choice in reply.choices] == list(range(5))
    assert [said(choice) for choice in reply.choices] == singles and len({text for text, _ in singles}) > 1
    assert live.models.totals.computed_tokens - before <= reply.usage.prompt_tokens
    assert reply.usage.completion_tokens > 5 and reply.usage.prompt_tokens_details.cached_tokens == 0


def test_prompts_of_a_list_are_answered_in_order(live, client):
    prompts = [OWLS, "The lake", "An owl"]
    singles = [alone(live, client, prompt, seed) for prompt in prompts for seed in (1, 2)]
    forget(live)
    reply = client.completions.create(prompt=prompts, n=2, seed=1, **DRAWN)
    assert [said(choice) for choice in reply.choices] == singles
    tokens = [client.completions.create(prompt=prompt, **DRAWN).usage.prompt_tokens for prompt in prompts]
    assert reply.usage.prompt_tokens == sum(tokens)


def test_a_stream_has_all_answers_one_usage_and_one_id(live, client):
    forget(live)
    whole = client.completions.create(prompt=OWLS, n=3, seed=5, **DRAWN)
    forget(live)
    options = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = list(client.completions.create(prompt=OWLS, n=3, seed=5, **options, **DRAWN))
    texts = ["", "", ""]
    for chunk in chunks:
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == [choice.text for choice in whole.choices] and len({chunk.id for chunk in chunks}) == 1
    assert [chunk.usage for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_chats_have_several_answers(live, client):
    if live.models.loaded.engine.tokenizer.chat_template is None:
        pytest.skip("a model without a chat template")
    ask = {"model": "m", "messages": [{"role": "user", "content": OWLS}], "max_tokens": 6, "temperature": 0.9}
    forget(live)
    one = client.chat.completions.create(**ask, seed=4).choices[0].message
    forget(live)
    reply = client.chat.completions.create(**ask, seed=3, n=2)
    assert [choice.index for choice in reply.choices] == [0, 1] and reply.choices[1].message == one


def test_all_answers_end_when_the_client_leaves(live, client):
    cancelled = live.models.totals.cancelled
    stream = client.completions.create(prompt=OWLS, n=5, stream=True, model="m", max_tokens=500, temperature=0.9)
    next(iter(stream))
    stream.close()
    wait_for(lambda: not live.worker.running and not live.worker.queue)
    assert live.models.totals.cancelled > cancelled and not any(kept.busy for kept in live.worker.sessions.kept)


def test_a_suffix_is_for_models_with_marks(live, client):
    with pytest.raises(openai.BadRequestError, match="no marks for filling in"):
        client.completions.create(model="m", prompt="def f(", suffix="return x")


def test_the_marks_of_each_family():
    assert fill_in("a", "b", {"<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"}) == (
        "<|fim_prefix|>a<|fim_suffix|>b<|fim_middle|>"
    )
    assert fill_in("a", "b", {"<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"}) == (
        "<｜fim▁begin｜>a<｜fim▁hole｜>b<｜fim▁end｜>"
    )
    assert fill_in("a", "b", {"[PREFIX]", "[SUFFIX]", "<|fim_prefix|>"}) == "[SUFFIX]b[PREFIX]a"
    assert fill_in("a", "b", {"<|fim_prefix|>", "<|fim_suffix|>"}) is None


def test_the_prompt_from_which_answers_begin_takes_memory():
    room = Admission(4, 1000, lambda tokens: tokens)
    prepared = PreparedRequest(None, [0] * 400, max_tokens=100)
    room.check(prepared, 2)
    with pytest.raises(BadRequestError, match="n is 2; this prompt beside an answer takes .* are planned"):
        room.check(PreparedRequest(None, [0] * 400, max_tokens=300), 2)
    job = Job(prepared, print, shared=SharedPrompt(1))
    running = [types.SimpleNamespace(length=400, set_aside=500, job=job)]
    room.begin(running[0])
    assert room.choose([Job(PreparedRequest(None, [0] * 150, max_tokens=0), print)], running) is None
    job.shared.begin()
    assert room.choose([Job(PreparedRequest(None, [0] * 150, max_tokens=0), print)], running) is not None


def test_an_answer_of_several_ranks_keeps_no_end_of_its_prompt():
    """It is alone in its steps, and the other ranks could not repeat a copy between the prompt and its first token."""
    prepared = PreparedRequest(Request("completions", "m"), [1, 2, 3], max_tokens=2)
    engine = FakeEngine(lambda prompt: "An owl.")
    one = Running(Job(prepared, print, shared=SharedPrompt(2)), Sessions(engine.session, 2, 1 << 30), Totals())
    answer = one.begin()
    assert not answer.shares_steps and not answer.keeps_end


def test_the_end_of_a_prompt_counts_before_and_between_its_answers():
    room = Admission(4, 1000, lambda tokens: tokens)
    other = types.SimpleNamespace(length=100, set_aside=100, job=Job(PreparedRequest(None, [0] * 100), print))
    several = Job(PreparedRequest(None, [0] * 500), print, shared=SharedPrompt(3))
    assert room.choose([several], [other]) is None, "the prompt is kept twice"
    first = types.SimpleNamespace(length=500, set_aside=500, job=several)
    room.begin(first)
    several.shared.begin()
    small = Job(PreparedRequest(None, [0] * 450), print)
    assert room.choose([small], [other]) is None, "the next answer has not begun"
    del first, several
    assert room.choose([small], [other]) is small, "its client has left"

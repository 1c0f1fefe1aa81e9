"""Settings of other servers' requests: what is here changes the text as in the library, the rest is refused by name."""

import itertools

import pytest
from live_server import Live, demo_engine
from three_apis import APIS, Clients

from moeflux_mlx import generate, make_logits_processors
from moeflux_mlx.errors import BadRequestError
from moeflux_mlx.foreign import UNSERVED
from moeflux_mlx.server.wire import chat, completions, messages, responses
from moeflux_mlx.server.wire.settings import LARGEST

HI = [{"role": "user", "content": "Tell me a story about Mira, who can talk to owls."}]
READERS = [(chat, {"messages": HI}), (completions, {"prompt": "a"}), (messages, {"messages": HI})]
READERS += [(responses, {"input": "hi"})]
SCHEMA = {"type": "object"}
# (name, values that ask for nothing, values that ask for something), as mlx-lm's, llama.cpp's and vLLM's servers read.
FIELDS = [
    ("typical_p", [1, 1.0], [0.9]),
    ("tfs_z", [1], [0.5]),
    ("top_n_sigma", [-1, 0.0], [1.5]),
    ("dynatemp_range", [0], [0.5]),
    ("mirostat", [0], [1, 2, "2"]),
    ("dry_multiplier", [0.0], [0.8]),
    ("adaptive_target", [-1.0], [0.5]),
    ("use_beam_search", [False], [True]),
    ("samplers", [["dry", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature"]], [["top_k"], [], "k"]),
    ("min_keep", [0, 1], [2]),
    ("bad_words", [[]], [["owl"]]),
    ("allowed_token_ids", [[]], [[1]]),
    ("logits_processors", [[]], [["x"]]),
    ("grammar", [""], ['root ::= "a"']),
    ("json_schema", [{}], [SCHEMA]),
    ("structured_outputs", [{}], [{"json": SCHEMA}]),
    ("guided_json", [{}], [SCHEMA]),
    ("guided_regex", [""], ["a+"]),
    ("guided_choice", [[]], [["a"]]),
    ("guided_grammar", [""], ["x"]),
    ("ignore_eos", [False], [True]),
    ("min_tokens", [0], [5]),
    ("n_indent", [0], [2]),
    ("t_max_predict_ms", [0, -1], [100]),
    ("stop_token_ids", [[]], [[2]]),
    ("include_stop_str_in_output", [False], [True]),
    ("reasoning_format", ["auto", "deepseek"], ["none"]),
    ("thinking_forced_open", [False], [True]),
    ("parse_tool_calls", [True], [False]),
    ("reasoning_budget_tokens", [-1], [0, 100]),
    ("thinking_budget_tokens", [-1], [100]),
    ("n", [1], [0, "2", 65]),
    ("best_of", [1], [3]),
    ("n_cmpl", [1], [0]),
    ("echo", [False], [True]),
    ("truncate_prompt_tokens", [-1], [10]),
    ("adapters", [""], ["path"]),
    ("lora", [[]], [[{"id": 0, "scale": 1}]]),
    ("repetition_penalty", [0, 1], [1e-9, -1, "1"]),
    ("repeat_penalty", [0, 1], [101]),
    ("repetition_context_size", [20], [0, 2.5, -1]),
    ("presence_context_size", [20], [0]),
    ("frequency_context_size", [20], [0]),
    ("repeat_last_n", [64, 0, -1], [-2]),
    ("xtc_probability", [0], [1.5]),
    ("xtc_threshold", [0, 0.1, 1], [-0.1]),
    ("logit_bias", [{}, []], [[[1, 1.0]]]),
]
HARMLESS = {"cache_prompt": False, "store": True, "user": "u", "id_slot": 3, "n_probs": 2, "return_tokens": True}
HARMLESS |= {"mirostat_tau": 9, "dry_base": 3, "dynatemp_exponent": 2, "num_draft_tokens": 5, "draft_model": "x"}
PENALTIES = ("repetition", "presence", "frequency")


def read(api, body, **fields):
    return api.read({**body, **fields})


@pytest.mark.parametrize(("name", "neutral", "asking"), FIELDS, ids=lambda value: value if type(value) is str else "")
def test_a_field_asks_for_nothing_or_is_refused_by_its_name(name, neutral, asking):
    for (api, body), value in itertools.product(READERS, [None, *neutral]):
        read(api, body, **{name: value})
    for (api, body), value in itertools.product(READERS, asking):
        with pytest.raises(BadRequestError, match=rf"^{name} is .*; expected ") as caught:
            read(api, body, **{name: value})
        assert caught.value.param == name


def test_only_openais_older_apis_give_several_answers():
    for api, body in READERS[:2]:
        assert read(api, body, n=3).answers == read(api, body, n_cmpl=3).answers == 3
    for api, body in READERS[2:]:
        with pytest.raises(BadRequestError, match="^n is 3; expected 1: this API gives one answer"):
            read(api, body, n=3)


def test_every_refused_field_is_among_these():
    assert {name for fields in UNSERVED.values() for name in fields} <= {name for name, _, _ in FIELDS}


def test_fields_that_change_no_text_are_accepted():
    for api, body in READERS:
        assert read(api, body, **HARMLESS).sampling == read(api, body).sampling


def sizes(**fields):
    for api, body in READERS:
        sampling = read(api, body, **fields).sampling
        yield tuple(getattr(sampling, f"{name}_context_size") for name in PENALTIES)


def test_context_sizes_are_mlx_lms_or_llama_cpps():
    assert {*sizes()} == {(None, None, None)}
    assert {*sizes(repetition_context_size=64)} == {(64, None, None)}
    assert {*sizes(presence_context_size=5, frequency_context_size=6.0)} == {(None, 5, 6)}
    assert {*sizes(repeat_last_n=64, presence_context_size=5)} == {(64, 5, 64)}
    assert {*sizes(repeat_last_n=0)} == {(0, 0, 0)}
    assert {*sizes(repeat_last_n=-1)} == {(LARGEST, LARGEST, LARGEST)}


def test_xtc():
    for api, body in READERS:
        sampling = read(api, body, xtc_probability=0.5, xtc_threshold=0.9).sampling
        assert (sampling.xtc_probability, sampling.xtc_threshold) == (0.5, 0.5)
        assert read(api, body).sampling.xtc_probability is None


@pytest.fixture(scope="module")
def clients():
    with Live(demo_engine) as live:
        yield Clients(live.url)


@pytest.fixture(scope="module")
def answer():
    """Returns a function that gives the library's text with penalties."""
    engine = demo_engine()

    def answered(prompt, **penalties):
        processors = make_logits_processors(**penalties)
        return generate(engine.model, engine.tokenizer, prompt, max_tokens=24, logits_processors=processors)

    chat_prompt = engine.tokenizer.apply_chat_template(HI, add_generation_prompt=True)
    return lambda **penalties: (answered(chat_prompt, **penalties), answered(HI[0]["content"], **penalties))


def said(clients, **fields):
    """Returns the three chats' texts, all alike, and the completion's."""
    texts = {clients.ask(api, HI, max_tokens=24, temperature=0, **fields).text for api in APIS}
    options = {"model": "m", "prompt": HI[0]["content"], "max_tokens": 24, "temperature": 0, "extra_body": fields}
    (text,) = texts
    return text, clients.openai.completions.create(**options).choices[0].text


STRONG = {"repetition_penalty": 1.5, "presence_penalty": 1.5, "frequency_penalty": 0.5}


def test_a_wider_context_changes_the_text_as_in_the_library(clients, answer):
    narrow, wide = (answer(repetition_penalty=1.5, repetition_context_size=size) for size in (20, 200))
    assert not {*narrow} & {*wide}
    assert said(clients, repetition_penalty=1.5) == narrow
    assert said(clients, repetition_penalty=1.5, repetition_context_size=200) == wide
    assert said(clients, repeat_penalty=1.5, repeat_last_n=-1) == wide


def test_repeat_last_n_is_the_size_of_all_three(clients, answer):
    penalised = answer(**STRONG, **{f"{name}_context_size": 7 for name in PENALTIES})
    assert said(clients, **STRONG, repeat_last_n=7) == penalised
    assert said(clients, **STRONG, repeat_last_n=0) == answer() != penalised


def test_xtc_changes_the_text_and_is_repeatable(clients):
    options = {"temperature": 0.5, "seed": 1, "max_tokens": 20}
    texts = [clients.ask("chat", HI, **options, xtc_probability=p, xtc_threshold=0.05).text for p in (0, 1, 1)]
    assert texts[0] != texts[1] == texts[2]

"""Decodings that share steps, join, leave, wait and fail at random: each gives what it gives alone, bit by bit."""

import os
from dataclasses import dataclass

import mlx.core as mx
import pytest
from driving import absorbed, advance, events_of, next_token
from grids import drawn
from hypothesis import given, settings
from hypothesis import strategies as st
from test_decode import FAMILIES, make_resident
from test_decoding import PROMPTS, same, session_of
from test_step import plain_model
from test_streaming import TOP_K, streamed
from tiny_models import tiny_directory, tiny_model

from moeflux_mlx.driving.decoding import Decoding
from moeflux_mlx.driving.loop import Loop, advance_together
from moeflux_mlx.driving.prefill import Prefill
from moeflux_mlx.driving.sampling import make_sampler
from moeflux_mlx.errors import ExpertIOError, ModelFileError, RequestError
from moeflux_mlx.formats.packed import open_packed
from moeflux_mlx.model.decoder import Model
from moeflux_mlx.state.snapshot import save_state

LONGEST = 6  # tokens


@dataclass(frozen=True)
class Text:
    """Args: prompt: which of `PROMPTS`. seed: the seed of its sampler; None takes the likeliest token. fault: the error
    when a certain token is chosen: a processor raises, or returns NaN.
    """

    prompt: int
    seed: int | None
    fault: tuple[str, int] | None
    has_processor: bool

    def decoding(self, model):
        cache, tokens = model.make_cache(), mx.array(PROMPTS[self.prompt], mx.uint32)
        logits = absorbed(Prefill(model, cache, tokens))
        sampler = None if self.seed is None else make_sampler(0.8, key=mx.random.key(self.seed))
        processors = [self.process] if self.has_processor or self.fault else []
        return Decoding(model, cache, tokens, logits, max_tokens=LONGEST, sampler=sampler, logits_processors=processors)

    def process(self, seen, logits):
        if self.fault is None or len(seen) < len(PROMPTS[self.prompt]) + self.fault[1]:
            return logits
        if self.fault[0] == "nan":
            return logits * float("nan")
        raise OSError("unplugged")


TEXTS = st.builds(
    Text,
    st.integers(0, len(PROMPTS) - 1),
    st.none() | st.integers(0, 2),
    st.none() | st.tuples(st.sampled_from(["nan", "raises"]), st.integers(0, LONGEST - 1)),
    st.booleans(),
)


class Alone:
    """Returns what a text gives when nothing else is computed."""

    def __init__(self, model):
        self.model, self.known = model, {}

    def __call__(self, text):
        """Returns [(token, logprobs)], and the error that ends the text."""
        if text not in self.known:
            decoding, told = text.decoding(self.model), []
            outcome = None
            while not (decoding.is_done or isinstance(outcome, Exception)):
                (outcome,) = advance_together([decoding])
                if not isinstance(outcome, Exception):
                    told.append(outcome)
            self.known[text] = told, outcome
        return self.known[text]

    def state(self, text, count):
        """Returns the state of the caches after this number of tokens."""
        decoding = text.decoding(self.model)
        for _ in range(count):
            next_token(decoding)
        decoding.close()
        return save_state(self.model, decoding.cache)


def check(model, alone, texts, rounds):
    """Runs `rounds`, which are the numbers of the texts in each round. A new text joins with its prompt's logits."""
    decodings, told, ended = [text.decoding(model) for text in texts], [[] for _ in texts], {}
    for present in rounds:
        taking = [i for i in sorted(present) if i < len(texts) and i not in ended and not decodings[i].is_done]
        for i, outcome in zip(taking, advance_together([decodings[i] for i in taking]), strict=True):
            if isinstance(outcome, Exception):
                ended[i] = outcome
            else:
                told[i].append(outcome)
    for i, text in enumerate(texts):
        wanted, error = alone(text)
        assert len(told[i]) <= len(wanted)
        assert same(told[i], wanted[: len(told[i])])
        assert type(ended.get(i)) is (type(error) if i in ended else type(None))
        decodings[i].close()
        if i not in ended:
            assert save_state(model, decodings[i].cache) == alone.state(text, len(told[i]))


MODELS = {
    "native": lambda family, patch: tiny_model(family, mx.float32),
    "streamed": lambda family, patch: streamed(tiny_directory(family), least_slots=8 * TOP_K, cache_bytes=1),
    "plain": lambda family, patch: plain_model(family),
    "compiled": lambda family, patch: make_resident(patch, family),
}


@pytest.mark.parametrize("family, kind", drawn([*FAMILIES, "mimo_v2_flash"], MODELS))
def test_other_rows_change_nothing(monkeypatch, family, kind):
    model = MODELS[kind](family, monkeypatch)
    alone = Alone(model)

    @given(
        st.lists(TEXTS, min_size=2, max_size=5),
        st.lists(st.sets(st.integers(0, 4), min_size=1), min_size=3, max_size=10),
    )
    @settings(max_examples=2)
    def company(texts, rounds):
        check(model, alone, texts, rounds)

    company()


def test_a_failed_read_ends_only_rows_that_chose_that_expert(monkeypatch):
    directory, broken, chosen = tiny_directory("qwen3_moe"), set(), []

    def preadv(fd, buffers, offset):
        if (os.fstat(fd).st_ino, offset) in broken:
            raise OSError(5, "unplugged")
        return os.preadv(fd, buffers, offset)

    texts = [Text(i, None, None, False) for i in range(len(PROMPTS))]
    alone = Alone(tiny_model("qwen3_moe", mx.float32))
    wanted = [alone(text)[0] for text in texts]
    model = streamed(directory, "off", preadv, least_slots=8 * TOP_K, cache_bytes=1)
    decodings = [text.decoding(model) for text in texts]
    for decoding in decodings:
        next_token(decoding)
    request = model.experts.request

    def noted(layer, ids):
        chosen[-1] |= {(layer, int(expert)) for expert in ids.ravel()}
        return request(layer, ids)

    with monkeypatch.context() as patch:
        patch.setattr(model.experts, "request", noted)
        for decoding in decodings:  # the tokens that each is about to choose
            chosen.append(set())
            model.step([decoding.rows]).undo()
    layer, expert = min(chosen[0] - chosen[1] - chosen[2])
    packed = open_packed(directory, model.args)
    broken.add((packed.paths[layer].stat().st_ino, expert * packed.layout.record.stride))
    model.experts.invalidate()
    outcomes = advance_together(decodings)
    assert isinstance(outcomes[0], ExpertIOError)
    assert same(outcomes[1:], [told[1] for told in wanted[1:]])
    for decoding, text, count in zip(decodings, texts, (1, 2, 2), strict=True):
        assert save_state(model, decoding.cache) == alone.state(text, count), "the error changed no state"


def test_a_refused_row_ends_only_its_own_text(monkeypatch):
    """The model refuses it in a step begun ahead, in one for all texts, and alone."""
    model, texts = make_resident(monkeypatch, "qwen3_next"), [Text(i, None, None, False) for i in range(3)]
    wanted, step = [Alone(model)(text)[0] for text in texts], Model.step
    decodings = [text.decoding(model) for text in texts]

    def refusing(self, sequences):
        if any(rows.cache is decodings[1].cache for rows in sequences):
            raise RequestError("refused")
        return step(self, sequences)

    monkeypatch.setattr(Model, "step", refusing)
    advance_together(decodings)  # the first tokens need no row
    outcomes = advance_together(decodings)
    assert isinstance(outcomes[1], RequestError)
    assert same(outcomes[::2], [told[1] for told in wanted[::2]])


def test_rows_that_cannot_share_a_step_are_refused_and_continue():
    model = tiny_model("qwen3_moe", mx.float32)
    text = Text(0, None, None, False)
    one, other = text.decoding(model), text.decoding(plain_model("qwen3_moe"))
    twin = text.decoding(model)
    twin.cache[-1] = one.cache[-1]
    for decodings, message in [([one, other], "different models"), ([one, twin], "in two"), ([one] * 17, "at most 16")]:
        with pytest.raises(RequestError, match=message):
            advance_together(decodings)
    assert advance_together([]) == []
    assert same(advance_together([one]), Alone(model)(text)[0][:1])


def test_a_decoding_that_is_a_token_ahead_joins_others(monkeypatch):
    model = make_resident(monkeypatch, "qwen3_next")
    alone, texts = Alone(model), [Text(0, None, None, False), Text(1, 1, None, False), Text(2, None, None, True)]
    check(model, alone, texts, [{0}, {1}, {0, 1}, {0, 1, 2}, {1}, {0, 2}, {0, 1, 2}, {2}])


def test_answers_share_steps_and_fail_alone():
    model = tiny_model("qwen3_next", mx.float32)
    texts = [Text(0, None, None, False), Text(1, None, ("raises", 3), False), Text(2, None, ("nan", 2), False)]

    def answer_of(text):
        return session_of(model).answer(PROMPTS[text.prompt], max_tokens=LONGEST, logits_processors=[text.process])

    answers = [answer_of(text) for text in texts]
    told, kinds, loop = [[] for _ in answers], {}, Loop()
    for answer in answers:
        loop.add(answer)
    for event in events_of(loop):
        if event.error is not None:
            kinds[answers.index(event.text)] = type(event.error)
        elif event.token is not None:
            told[answers.index(event.text)].append(event)
    assert kinds == {1: OSError, 2: ModelFileError} and told[0][-1].finish_reason == "length"
    for answer, text, responses in zip(answers, texts, told, strict=True):
        alone = answer_of(text)
        wanted = [advance(alone) for _ in responses]
        assert same(*([(one.token, one.logprobs) for one in told] for told in (responses, wanted)))
        for one in (alone, answer):
            one.end()
        whole = PROMPTS[text.prompt] + [one.token for one in responses[:-1]]
        reached = len(answer.session.tokens)  # a failed answer goes back to the last kept state
        assert answer.session.tokens == whole[:reached] and (reached == len(whole) or text.fault)
        assert {layer.offset for layer in answer.session.cache} == {len(answer.session.tokens)}

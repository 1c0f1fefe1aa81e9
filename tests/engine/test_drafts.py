"""Drafts change when a token is computed, never which: texts, logprobs and states have the same bits without them."""

import itertools
from dataclasses import replace

import goldens
import mlx.core as mx
import numpy as np
import pytest
from grids import drawn, examples, marks
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from test_decode import make_resident
from test_interrupts import interrupted
from tiny_models import tiny_directory, tiny_model

from moeflux_mlx.caches import growing, recurrent, ring
from moeflux_mlx.caches.layer_cache import MOST_DRAFTS
from moeflux_mlx.driving import decoding, session
from moeflux_mlx.driving.drafts import LONGEST, Lookup
from moeflux_mlx.driving.generation import generate_step, stream_generate
from moeflux_mlx.driving.sampling import Constraint, make_logits_processors, make_sampler
from moeflux_mlx.driving.session import Session
from moeflux_mlx.errors import RequestError
from moeflux_mlx.mixers.grouped import cache as grouped
from moeflux_mlx.mixers.registry import untrimmable_bytes
from moeflux_mlx.model import step as model_step
from moeflux_mlx.model.drafting import Drafting
from moeflux_mlx.model.span import PromptSizes
from moeflux_mlx.model.step import Step
from moeflux_mlx.opening.engine import load_model
from moeflux_mlx.opening.load_settings import LoadSettings
from moeflux_mlx.ops.backend import has_kernels
from moeflux_mlx.planning.memory_plan import activation_bytes
from moeflux_mlx.state.snapshot import save_state
from moeflux_mlx.text.tokenizer import load_tokenizer

FAMILIES = (*goldens.FAMILIES, "gpt_oss", "mimo_v2_flash", "deepseek_v32", "deepseek_v4")
PROMPT = list(range(5, 25))
SOURCES = {"mapped": {}, "read": {"expert_io": "pread", "expert_cache_bytes": 1}}


class Told:
    """Proposes the text's known continuation, with some wrong tokens."""

    def __init__(self, text, answers, right):
        self.text, self.answers, self.right = list(text), answers, itertools.cycle(right)

    def add(self, token, hidden=None):
        self.text.append(token)

    def may_propose(self):
        return bool(self.propose(1))

    def propose(self, count):
        known = next((whole for whole in self.answers if whole[: len(self.text)] == self.text), self.text)
        rest = known[len(self.text) : len(self.text) + max(count, 0)]
        return [token if next(self.right) else (token + 1) % 200 for token in rest]


def drafts(patch, model, answers=(), right=(True,), most=4):
    """Makes `model` check as many drafts as there are: of `answers`, or looked up."""
    patch.setattr(model, "drafting", Drafting("lookup", most, fixed=True))
    if answers:
        patch.setattr(decoding, "Lookup", lambda text: Told(text, answers, right))


def session_of(model, family, **options):
    return Session(model, load_tokenizer(tiny_directory(family)), checkpoint_every=8, **options)


def choice(seed, penalty=None):
    sampler = make_sampler() if seed is None else make_sampler(temp=1.0, top_k=40, key=mx.random.key(seed))
    return {"sampler": sampler, "logits_processors": make_logits_processors(repetition_penalty=penalty)}


def said_by(session, prompt, count, stop, **options):
    """Returns tokens and logprobs. The caller stops after `stop` tokens."""
    responses, said = session.respond(prompt, max_tokens=count, **options), []
    for response in itertools.islice(responses, stop):
        said.append((response.token, np.array(response.logprobs)))
    responses.close()
    return said


def state(session):
    """Returns everything that a later prompt can continue from."""
    kept = [stored(session, position) for position in session.points.positions]
    return session.tokens, session.points.positions, kept, save_state(session.model, session.cache)


def stored(session, position):
    """Returns the kept states of the layers that cannot be cut."""
    layers = []
    for i, pair in session.points.states_at(position).items():
        layers.append(session.cache[i].copy())
        layers[-1].go_back(position, pair)
    return [np.array(array).tobytes() for layer in layers for array in layer.stored()]


def same(got, want):
    return len(got) == len(want) and all(
        one[0] == other[0] and np.array_equal(one[1], other[1]) for one, other in zip(got, want, strict=True)
    )


def check_texts(model, family, turns, seed, penalty, right, most):
    """Checks several answers, each stopped after some tokens: with drafts they equal those without."""
    plain, drafted, answers = session_of(model, family), session_of(model, family), []
    for i, (count, stop, back, more) in enumerate(turns):
        prompt = [*(plain.tokens or PROMPT), *more]
        options = choice(None if seed is None else seed + i, penalty)
        whole = said_by(session_of(model, family), prompt, count, count, **options)
        answers.append([*prompt, *(token for token, _ in whole)])
        want = said_by(plain, prompt, count, stop, **choice(None if seed is None else seed + i, penalty))
        with pytest.MonkeyPatch.context() as patch:
            drafts(patch, model, answers, right, most)
            got = said_by(drafted, prompt, count, stop, **choice(None if seed is None else seed + i, penalty))
        assert same(got, want)
        assert state(drafted) == state(plain)
        assert drafted.rewind(len(drafted.tokens) - back) == plain.rewind(len(plain.tokens) - back)
        assert state(drafted) == state(plain)


turns = st.lists(
    st.tuples(st.integers(1, 20), st.integers(1, 20), st.integers(0, 6), st.lists(st.integers(0, 60), min_size=1)),
    min_size=1,
    max_size=2,
)


@pytest.mark.parametrize("family, source", drawn(FAMILIES, SOURCES))
def test_texts_logprobs_and_states_are_those_without_drafts(family, source):
    model = tiny_model(family, mx.float32)
    if SOURCES[source]:
        model = load_model(tiny_directory(family), dtype=mx.float32, **SOURCES[source])

    @given(
        turns=turns,
        seed=st.none() | st.integers(0, 99),
        penalty=st.sampled_from([None, 1.3]),
        right=st.lists(st.booleans(), min_size=1, max_size=5),
        most=st.integers(1, 4),
    )
    @settings(max_examples=2, phases=[Phase.explicit, Phase.generate])
    def texts(turns, seed, penalty, right, most):
        check_texts(model, family, turns, seed, penalty, right, most)

    texts()


ALSO_AHEAD = ("deepseek_v3", "gpt_oss")
TURNS = [(12, 12, 0, []), (9, 5, 2, [3, 4]), (20, 20, 0, [9])]


@pytest.mark.parametrize("family", ["gpt_oss", "qwen3_next"])
def test_drafts_that_were_not_taken_shorten_no_way_back(family):
    """A ring has overwritten the positions that rejected drafts replaced."""
    plans = [[(1, 1, 0, [0]), (13, 11, 3, [0]), (1, 1, 0, [0, 0])], [(9, 9, 3, [0]), (12, 9, 4, [0]), (3, 3, 6, [1])]]
    for turns, most in itertools.product(plans, (1, 4)):
        check_texts(tiny_model(family, mx.float32), family, turns, None, None, (False,), most)


counted_on_a_cpu = pytest.mark.skipif(
    has_kernels(), reason="a GPU computes a token ahead, so that other rows are in a check"
)


@counted_on_a_cpu
def test_a_state_that_is_due_where_the_prompt_ends_is_kept_as_without_drafts(monkeypatch):
    model, prompt = tiny_model("qwen3_next", mx.float32), PROMPT[:16]
    plain, drafted = (session_of(model, "qwen3_next") for _ in range(2))
    want = said_by(plain, prompt, 7, 7, boundaries=[8])
    drafts(monkeypatch, model, [[*prompt, *(token for token, _ in want)]])
    assert same(said_by(drafted, prompt, 7, 7, boundaries=[8]), want)
    assert drafted.points.positions == plain.points.positions == [8, 17]


@pytest.mark.parametrize("family", ["qwen3_next", *(pytest.param(name, marks=marks(False)) for name in ALSO_AHEAD)])
def test_a_model_that_computes_ahead_gives_the_same(monkeypatch, family):
    model = make_resident(monkeypatch, family)
    check_texts(model, family, TURNS, None, None, (True, True, False), 3)
    check_texts(model, family, TURNS[:2], 7, None, (True, False), 4)


def faulty_rewind(self, sequence, rows):
    """Restores a state that is one row late."""
    absorbing = self._absorbing[sequence]
    late = min(rows + 1, len(absorbing.ways) - 1)
    for layer, way in zip(absorbing.cache, absorbing.ways[late], strict=True):
        layer.go_back(absorbing.start + rows, way)


def one_too_many(self, token):
    """Follows a row that the text did not take."""
    self.followed += 1
    return bool(self.rows_left)


def drawn_twice(self, logits, take=decoding.Decoding.take):
    """Asks the sampler once more than there are tokens."""
    self.sampler(mx.zeros_like(logits))
    take(self, logits)


def compare():
    check_texts(tiny_model("qwen3_next", mx.float32), "qwen3_next", TURNS[:2], 3, None, (True, False), 3)


def test_the_comparison_holds_without_faults():
    compare()


@pytest.mark.parametrize("fault", ["late", "too many", "twice"])
def test_the_comparison_sees_faults(monkeypatch, fault):
    if fault == "late":
        monkeypatch.setattr(Step, "rewind", faulty_rewind)
    elif fault == "too many":
        monkeypatch.setattr(decoding.OwnStep, "follow", one_too_many)
    else:
        set_drafts = drafts

        def also_twice(patch, *rest):
            set_drafts(patch, *rest)
            patch.setattr(decoding.Decoding, "take", drawn_twice)

        monkeypatch.setitem(globals(), "drafts", also_twice)
    with pytest.raises(AssertionError):
        compare()


@pytest.mark.parametrize("family", ["qwen3_next", "gpt_oss"])
def test_an_error_among_drafts_leaves_a_session_that_goes_on(monkeypatch, family):
    model = tiny_model(family, mx.float32)
    want = said_by(session_of(model, family), PROMPT, 12, 12)
    drafts(monkeypatch, model, [[*PROMPT, *(token for token, _ in want)]])

    def fails(tokens, logits):
        if len(tokens) == len(PROMPT) + 6:
            raise OSError("unplugged")
        return logits

    session = session_of(model, family)
    with pytest.raises(OSError, match="unplugged"):
        list(session.respond(PROMPT, max_tokens=12, logits_processors=[fails]))
    known = len(session.tokens)
    assert {layer.offset for layer in session.cache} == {known}
    assert session.tokens == [*PROMPT, *(token for token, _ in want)][:known]
    rest = said_by(session, [*PROMPT, *(token for token, _ in want[:6])], 6, 6)
    assert [token for token, _ in rest] == [token for token, _ in want[6:]]


@pytest.mark.parametrize("family", ["qwen3_next", "gpt_oss"])
def test_an_answer_with_drafts_may_be_interrupted_at_any_line(monkeypatch, family):
    """After any interruption the session continues like one with the same known text."""
    model, modules = tiny_model(family, mx.float32), (decoding, model_step, session, growing, recurrent, ring, grouped)
    want = [token for token, _ in said_by(session_of(model, family), PROMPT, 12, 12)]
    drafts(monkeypatch, model, [[*PROMPT, *want]], (True, False, True, True))
    for at in range(0, 400, 47):
        one = session_of(model, family)
        responses = one.respond(PROMPT, max_tokens=12)
        next(responses)
        interrupted(lambda rest=responses: list(rest), at=at, files={module.__file__ for module in modules})
        known = len(one.tokens)
        assert one.tokens == [*PROMPT, *want][:known]
        rest = [token for token, _ in said_by(one, [*PROMPT, *want[:6]], 6, 6)]
        assert rest == want[6:] and {layer.offset for layer in one.cache} == {len(one.tokens)}


def count_rows(monkeypatch):
    rows = []

    def counted(self, sequences, step=decoding.Model.step):
        rows.append(sum(one.count for one in sequences))
        return step(self, sequences)

    monkeypatch.setattr(decoding.Model, "step", counted)
    return rows


def test_accepted_drafts_share_a_step_and_are_marked(monkeypatch):
    model, tokenizer = tiny_model("qwen3_moe", mx.float32), load_tokenizer(tiny_directory("qwen3_moe"))
    want = [token for token, _ in generate_step(PROMPT, model, max_tokens=11)]
    drafts(monkeypatch, model, [[*PROMPT, *want]])
    rows = count_rows(monkeypatch)
    responses = list(stream_generate(model, tokenizer, PROMPT, max_tokens=11))
    assert [response.token for response in responses] == want
    assert rows == [5, 5], "no draft that max_tokens excludes"
    assert [response.from_draft for response in responses] == [False, *([True] * 4 + [False]) * 2]
    assert (model.drafting.checked, model.drafting.taken) == (8, 8)


def test_no_draft_goes_beyond_the_context(monkeypatch):
    model = load_model(tiny_directory("qwen3_moe"), dtype=mx.float32)
    want = [token for token, _ in generate_step(PROMPT, model, max_tokens=8)]
    drafts(monkeypatch, model, [[*PROMPT, *want]])
    rows = count_rows(monkeypatch)
    limit = len(PROMPT) + 3
    model.args = replace(model.args, max_position_embeddings=limit)
    assert [token for token, _ in generate_step(PROMPT, model, max_tokens=6)] == want[:6]
    assert rows[0] == 3 and set(rows[1:]) == {1}


class Grammar:
    """Allows even tokens, and tells so for later tokens too."""

    def __init__(self):
        self.asked = []

    def allowed(self):
        return np.arange(256) % 2 == 0

    def redirected(self):
        return None

    def consume(self, token):
        assert token % 2 == 0

    def accepts(self, tokens):
        self.asked.append(list(tokens))
        return next((i for i, token in enumerate(tokens) if token % 2), len(tokens))


def test_no_draft_is_checked_that_a_grammar_excludes(monkeypatch):
    model = tiny_model("qwen3_moe", mx.float32)
    constrained = lambda: {"logits_processors": [Constraint(Grammar())]}  # noqa: E731
    want = [token for token, _ in generate_step(PROMPT, model, max_tokens=9, **constrained())]
    assert not any(token % 2 for token in want)
    drafts(monkeypatch, model, [[*PROMPT, *want]], right=(True, False))
    rows = count_rows(monkeypatch)
    assert [token for token, _ in generate_step(PROMPT, model, max_tokens=9, **constrained())] == want
    assert max(rows) == 2, "every other draft is odd"


@counted_on_a_cpu
@pytest.mark.parametrize("right, kept", [([False], [1, 1]), ([True, False], [2])])
def test_experts_are_taken_back_after_the_rows_that_stay(monkeypatch, right, kept):
    model, rows = tiny_model("qwen3_moe", mx.float32), []
    want = [token for token, _ in generate_step(PROMPT, model, max_tokens=4)]
    drafts(monkeypatch, model, [[*PROMPT, *want]], right, most=2)
    monkeypatch.setattr(model.experts, "take_back", rows.append)
    list(generate_step(PROMPT, model, max_tokens=4))
    assert rows == kept


@given(text=st.lists(st.integers(0, 3), min_size=1, max_size=60), count=st.integers(-1, 5))
@settings(max_examples=examples(150))
def test_lookup_proposes_what_followed_the_longest_repeated_end(text, count):
    lookup = Lookup(text[:1])
    for token in text[1:]:
        lookup.add(token)
    ends = {n: i for n in range(2, LONGEST + 1) for i in range(n, len(text)) if text[i - n : i] == text[-n:]}
    proposed = lookup.propose(count)
    if not ends or count < 1:
        assert proposed == []
        return
    start = ends[max(ends)]
    more = text[start:]
    while len(more) < count:
        more += more
    assert proposed == more[:count]


def test_lookup_checks_drafts_of_a_text_that_repeats(monkeypatch):
    model = tiny_model("qwen3_moe", mx.float32)
    prompt = PROMPT * 3
    want = [token for token, _ in generate_step(prompt, model, max_tokens=40)]
    drafts(monkeypatch, model)
    assert [token for token, _ in generate_step(prompt, model, max_tokens=40)] == want
    assert model.drafting.checked > 0


def test_states_to_return_to_are_planned():
    for family, rows in (("qwen3_next", MOST_DRAFTS), ("deepseek_v3", 0)):
        args, sizes = tiny_model(family, mx.float32).args, PromptSizes(64, 64)
        layout = tiny_model(family, mx.float32).experts.layout
        plain = LoadSettings().demand(args, 0, mx.float32)
        drafted = replace(plain, drafts=MOST_DRAFTS)
        more = activation_bytes(args, layout, drafted, 64, sizes) - activation_bytes(args, layout, plain, 64, sizes)
        assert more == rows * untrimmable_bytes(args.mixer_counts, 4)
        assert (more > 0) == (rows > 0)


def test_an_unknown_source_of_drafts_is_refused():
    with pytest.raises(RequestError, match="draft 'luck' is neither one of auto, off, lookup, head nor a directory"):
        load_model(tiny_directory("qwen3_moe"), draft="luck")


@pytest.mark.parametrize("seed, penalty, together", [(None, None, 3), (7, None, 0), (None, 1.2, 0)])
def test_greedy_tokens_of_a_check_are_chosen_together(monkeypatch, seed, penalty, together):
    """So that the host waits once for all of them. Other choices depend on a key, or on the tokens before."""
    model = tiny_model("qwen3_moe", mx.float32)
    plain = [token for token, _ in generate_step(PROMPT, model, max_tokens=8, **choice(seed, penalty))]
    drafts(monkeypatch, model, [[*PROMPT, *plain]], most=2)
    made, take = [], decoding.Decoding.take_rows

    def noted(self, *given, **named):
        take(self, *given, **named)
        made.append((self._step.drafted, len(self._step.chosen)))

    monkeypatch.setattr(decoding.Decoding, "take_rows", noted)
    list(generate_step(PROMPT, model, max_tokens=4, **choice(seed, penalty)))
    assert made[0] == (2, together)

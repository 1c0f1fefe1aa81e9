"""Sessions of rank 0 and their twins, here in threads: equal caches after anything that happens on rank 0."""

import threading

import mlx.core as mx
import numpy as np
import pytest
from driving import Stopped
from hypothesis import given, settings
from hypothesis import strategies as st
from image_models import random_image
from test_ranked_experts import Meeting, ranked
from tiny_models import tiny_directory

from moeflux_mlx.driving.prompt import with_images
from moeflux_mlx.driving.session import Session
from moeflux_mlx.errors import ExpertIOError, PromptCacheError, RankError
from moeflux_mlx.opening.engine import load_model
from moeflux_mlx.opening.weights import model_fingerprint
from moeflux_mlx.ops import backend
from moeflux_mlx.several.experts import Owners
from moeflux_mlx.several.follow import Follower
from moeflux_mlx.several.group import Exchange, Order, receive_order, send_order
from moeflux_mlx.several.lead import Lead, LeadSession
from moeflux_mlx.text.tokenizer import load_tokenizer

pytestmark = pytest.mark.skipif(backend.has_kernels(), reason="threads of one process share its GPU")
FAMILIES = ("qwen3_moe", "qwen3_5_moe", "gpt_oss")


class Pair:
    """Rank 0, and rank 1 in a thread."""

    def __init__(self, family):
        meeting = Meeting(2)
        path = tiny_directory(family)
        self.tokenizer = load_tokenizer(path)
        exchanges = [Exchange(meeting.member(rank)) for rank in range(2)]
        self.models = [ranked(family, exchange, Owners((1, 1)), set={"span": 16}) for exchange in exchanges]
        self.said, self.ends = [], []
        self.follower = Follower(self.models[1], self.tokenizer, exchanges[1], self.said.append)
        self.lead = Lead(exchanges[0], self.ends.append)
        self.code = None
        self.thread = threading.Thread(target=self._follow)
        self.thread.start()

    def _follow(self):
        try:
            self.code = self.follower.run()
        except RankError as error:
            self.code = error

    def session(self, **options):
        return LeadSession(self.lead, self.models[0], self.tokenizer, checkpoint_every=8, **options)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.lead.quit(7)
        assert "ranks-idle" not in {thread.name for thread in threading.enumerate()}, "it holds on to the group"
        self.thread.join(30)
        assert not self.thread.is_alive()


def state(session):
    """Returns the bytes of all caches, and the tokens that they hold."""
    arrays = [array for layer in session.cache for array in layer.state[:2] if array is not None]
    return list(session.tokens), session.points.positions, [np.array(a.astype(mx.float32)).tobytes() for a in arrays]


def twins(pair, session):
    """Returns the session's contents on both ranks, after rank 1 has carried out all orders."""
    pair.lead.send(Order.IDLE, 0)
    return state(session), state(pair.follower.sessions[session.number])


def answer(session, prompt, tokens=4, stop_at=None, close_at=None):
    """Returns the tokens of an answer, which may be stopped during the prompt or closed after some tokens."""

    def progress(done, total):
        if stop_at is not None and done >= stop_at:
            raise Stopped

    produced = []
    steps = session.respond(prompt, max_tokens=tokens, prompt_progress_callback=progress)
    try:
        for response in steps:
            produced.append(response.token)
            if len(produced) == close_at:
                break
    except Stopped:
        pass
    steps.close()
    return produced


def prompt_of(length, salt=0):
    return [(i * 7 + salt * 13) % 200 for i in range(length)]


ACTIONS = st.one_of(
    st.tuples(st.just("answer"), st.integers(1, 60), st.integers(0, 1)),
    st.tuples(st.just("stop"), st.integers(2, 60), st.integers(0, 50)),
    st.tuples(st.just("close"), st.integers(1, 30), st.integers(1, 3)),
    st.tuples(st.just("rewind"), st.integers(0, 60), st.just(0)),
    st.tuples(st.just("fork"), st.integers(0, 60), st.just(0)),
    st.tuples(st.just("keep"), st.just(0), st.just(0)),
)


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=4)
@given(actions=st.lists(ACTIONS, min_size=1, max_size=6))
def test_caches_are_the_same_whatever_happens(family, actions):
    with Pair(family) as pair:
        alone = Session(load_model(tiny_directory(family), dtype=mx.float32, set={"span": 16}), pair.tokenizer)
        session = pair.session()
        for name, number, more in actions:
            if name == "answer":
                prompt = prompt_of(number, more)
                assert answer(session, prompt) == answer(alone, prompt)
            elif name == "stop":
                answer(session, prompt_of(number), stop_at=more)
            elif name == "close":
                answer(session, prompt_of(number), close_at=more)
            elif name == "rewind":
                session.rewind(number)
            elif name == "fork":
                session = session.fork(number)
            else:
                session.keep()
            mine, theirs = twins(pair, session)
            assert mine == theirs, name
    assert pair.code == 7 and not pair.said and not pair.ends


def test_a_prompt_that_was_stopped_continues():
    with Pair("qwen3_moe") as pair:
        session, prompt = pair.session(), prompt_of(48)
        answer(session, prompt, stop_at=20)
        assert session.points.set_aside > 0 and pair.follower.sessions[session.number].half is not None
        alone = Session(load_model(tiny_directory("qwen3_moe"), dtype=mx.float32, set={"span": 16}), pair.tokenizer)
        assert answer(session, prompt) == answer(alone, prompt)


def test_a_failing_sampler_leaves_usable_sessions():
    def fails(logprobs):
        raise ExpertIOError("no such luck")

    with Pair("qwen3_5_moe") as pair:
        session = pair.session()
        with pytest.raises(ExpertIOError, match="no such luck"):
            list(session.respond(prompt_of(20), sampler=fails))
        assert answer(session, prompt_of(30))
        mine, theirs = twins(pair, session)
        assert mine == theirs


def test_an_error_inside_rank_0s_model_ends_all():
    with Pair("qwen3_moe") as pair:
        session = pair.session()
        layer = pair.models[0].layers[1]
        right = layer.pass_span

        def interrupted(*given):
            layer.pass_span = right
            raise KeyboardInterrupt

        layer.pass_span = interrupted
        with pytest.raises(KeyboardInterrupt):
            list(session.respond(prompt_of(20)))
        with pytest.raises(RankError, match="connection between the ranks is lost"):
            list(session.respond(prompt_of(20)))
        pair.follower.exchange.group.meeting.barrier.abort()  # as a transport fails when a process ends
    assert isinstance(pair.code, RankError)


def test_a_saved_text_with_images_is_refused_before_anything_changes(tmp_path):
    family, path = "qwen3_5_moe", tmp_path / "text"
    fingerprint = model_fingerprint(tiny_directory(family), mx.float32)
    with Pair(family) as pair:
        alone = Session(load_model(tiny_directory(family), dtype=mx.float32), pair.tokenizer)
        answer(alone, with_images([1, 245, 2, 3], [random_image(family)], 245))
        alone.save(path, fingerprint, {})
        session = pair.session()
        said = answer(session, prompt_of(20))
        before = state(session)
        with pytest.raises(PromptCacheError, match="with images, which several ranks do not support"):
            session.load(path, fingerprint)
        assert twins(pair, session) == (before, before)
        assert answer(session, prompt_of(20)) == said


def test_sessions_that_are_forgotten_are_dropped_by_all():
    with Pair("qwen3_moe") as pair:
        for _ in range(3):
            session = pair.session()
            answer(session, prompt_of(5))
        twins(pair, session)
        assert list(pair.follower.sessions) == [2]


@pytest.mark.parametrize("words, said", [([99, 0], "ordered 99"), ([4, 1 << 50], "not a known order")])
def test_an_invalid_order_is_refused(words, said):
    class Echo:
        rank, size, on_device = 0, 1, False

        def gather(self, sent):
            gathered = sent.copy()[None]
            gathered[0, 5:9] = np.array(words, np.uint64).view(np.uint32)
            return gathered

    with pytest.raises(RankError, match=said):
        receive_order(Exchange(Echo()))


def test_payloads_of_any_length_arrive():
    meeting = Meeting(2)
    lead, other = (Exchange(meeting.member(rank)) for rank in range(2))
    for length in (1, 3, 4, 4097, (4 << 20) + 5):
        sent = np.random.default_rng(length).bytes(length)
        thread = threading.Thread(target=send_order, args=(lead, Order.STATE, 5), kwargs={"payload": sent})
        thread.start()
        received = receive_order(other)
        thread.join()
        assert received.payload == sent and received.values[0] == 5
    with pytest.raises(RankError, match="announced 9"):
        type(received)(Order.RESPOND, (1, 9), b"1234").tokens(9)

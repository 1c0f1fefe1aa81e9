"""Which session a prompt continues, and which ones are dropped."""

import types

import pytest
from live_server import FakeSession

from moeflux_mlx.server.sessions import Sessions

SHARED = list(range(200))


@pytest.fixture
def sessions():
    return make(3)


def make(count, max_bytes=1 << 30):
    engine = types.SimpleNamespace(model=None, tokenizer=None)
    return Sessions(lambda: FakeSession(engine), count, max_bytes)


def answered(sessions, prompt, answer=(7, 8, 9), hint=None):
    """Answers a prompt. Returns the session, and how much of the prompt it knew."""
    kept = sessions.take(prompt, hint)
    known = kept.session.known(prompt)
    kept.session.tokens = [*prompt, *answer]
    sessions.give_back(kept, len(prompt) - 1)
    return kept.session, known


def test_a_conversation_continues_in_its_session(sessions):
    first, _ = answered(sessions, SHARED)
    second, known = answered(sessions, [*SHARED, 7, 8, 9, 1, 2])
    assert second is first and known == 203 and len(sessions) == 1


def test_an_answer_may_be_regenerated(sessions):
    first, _ = answered(sessions, SHARED, range(1000, 2000))
    again, known = answered(sessions, [*SHARED, 5])
    assert again is first and known == 200


def test_agents_that_share_a_beginning_get_copies(sessions):
    first, _ = answered(sessions, [*SHARED, *range(500, 700)])
    second, known = answered(sessions, [*SHARED, *range(700, 900)])
    assert second is not first and known == 200
    assert first.tokens[200] == 500, "what the first one knew must stay"
    third, known = answered(sessions, [*SHARED, *range(500, 700), 7, 8, 9, 3])
    assert third is first and known == 403


def test_separate_texts_get_separate_sessions(sessions):
    used = [answered(sessions, list(range(1000 * n, 1000 * n + 200)))[0] for n in range(3)]
    assert len({id(session) for session in used}) == 3
    answered(sessions, list(range(1000, 1200)))  # used again, so it is not the oldest any more
    answered(sessions, list(range(9000, 9200)))
    assert len(sessions) == 3
    assert answered(sessions, list(range(1000, 1201)))[1] == 200
    assert answered(sessions, list(range(200)))[1] == 0


def test_titles_do_not_evict_conversations(sessions):
    long = list(range(400))
    answered(sessions, long)
    for n in range(1, 6):
        answered(sessions, list(range(1000 * n, 1000 * n + 50)))
    assert answered(sessions, [*long, 7, 8, 9, 1])[1] == 403


def test_a_branch_that_was_left_is_dropped_before_another_conversation(sessions):
    """As when a template leaves out the reasoning of earlier turns: each question begins a branch."""
    other, _ = answered(sessions, list(range(1000, 1400)))
    for n in range(4):
        answered(sessions, [*SHARED, *range(300, 300 + 10 * n), *range(2000 + 100 * n, 2080 + 100 * n)])
    assert other in [kept.session for kept in sessions.kept]


def test_a_session_in_use_is_nobody_else_s(sessions):
    busy = sessions.take(SHARED)
    busy.session.tokens = list(SHARED)
    other = sessions.take([*SHARED, 1])
    assert other.session is not busy.session
    alone = make(1)
    first, second = alone.take(SHARED), alone.take(SHARED)
    assert first.session is not second.session


def test_the_last_token_of_a_running_answer_is_not_copied(sessions):
    """The state at the last token may also hold drafts."""
    answering = sessions.take(SHARED)
    answering.session.tokens, answering.is_answering = list(SHARED), True
    assert sessions.known([*SHARED, 1]) == 199
    assert sessions.take([*SHARED, 1]).session.tokens == SHARED[:199]


def test_idle_sessions_are_dropped_when_they_hold_too_much():
    sessions = make(4, max_bytes=250)
    for n in range(3):
        kept = sessions.take(list(range(1000 * n, 1000 * n + 200)))
        kept.session.tokens, kept.session.nbytes = list(range(1000 * n, 1000 * n + 200)), 100
        sessions.give_back(kept, 200)
    assert len(sessions) == 2 and sessions.nbytes == 200


def test_a_hint_decides_between_equals(sessions):
    one, two = sessions.take(SHARED, "a"), sessions.take(SHARED, "b")
    for kept in (one, two):
        kept.session.tokens = list(SHARED)
        sessions.give_back(kept, len(SHARED))
    assert answered(sessions, [*SHARED, 1], hint="a")[0] is one.session


def test_further_answers_drop_no_other_conversation(sessions):
    """Each answers in a session of its own, which is kept where there is a free place."""
    others = [answered(sessions, list(range(1000 * n, 1000 * n + 300)))[0] for n in (1, 2)]
    first = sessions.take(SHARED)
    more = [sessions.hold(first.session.fork(0)) for _ in range(3)]
    for kept in (*more, first):
        kept.session.tokens = [*SHARED, 7]
        sessions.give_back(kept, len(SHARED))
    assert [kept.session for kept in sessions.kept] == [*others, first.session]
    alone = make(2)
    alone.give_back(held := alone.hold(first.session), 200)
    assert alone.kept == [held]

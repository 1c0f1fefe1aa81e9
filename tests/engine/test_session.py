"""Sessions: after any reuse, rewind or interruption, the answer is that of a fresh computation."""

import goldens
import mlx.core as mx
import numpy as np
import pytest
from driving import Stopped, absorb_into
from grids import drawn, examples, marks
from hypothesis import given, settings
from hypothesis import strategies as st
from test_decode import make_resident
from test_interrupts import interrupted
from tiny_models import tiny_directory, tiny_model

from moeflux_mlx import PromptDirectory, load, model_fingerprint, stream_generate
from moeflux_mlx.caches import growing, layer_cache, recurrent, ring
from moeflux_mlx.caches.recurrent import RecurrentCache
from moeflux_mlx.driving import session as session_module
from moeflux_mlx.driving.session import Session
from moeflux_mlx.errors import RequestError
from moeflux_mlx.mixers.delta import op as delta
from moeflux_mlx.mixers.delta.spec import Delta
from moeflux_mlx.mixers.grouped import cache as grouped
from moeflux_mlx.mixers.grouped.cache import KVCache
from moeflux_mlx.mixers.grouped.spec import GroupedQuery
from moeflux_mlx.ops import backend
from moeflux_mlx.state import rewind
from moeflux_mlx.state.rewind import RewindPoints
from moeflux_mlx.text.tokenizer import load_tokenizer

RECURRENT = "qwen3_next"
N = 60
WINDOWED = "gpt_oss"  # some of its layers see 6 positions and hold 14
FAMILIES = (*goldens.FAMILIES, WINDOWED)
KINDS = [  # each kind of cache by default: a recurrent state, latents, windows, and growing keys and values with them
    pytest.param(family, marks=marks(family in (RECURRENT, "deepseek_v3", WINDOWED))) for family in FAMILIES
]
INDEXED = "deepseek_v32"  # its layers have two caches
TOLERANCES = dict.fromkeys((*FAMILIES, INDEXED), 2e-4)
if backend.has_kernels():  # a GPU sums other chunks in another order: 2.2e-4 was seen here, 0.8e-4 in the others
    TOLERANCES["qwen3_5_moe"] = 5e-4


def text(n=N, seed=0):
    return np.random.default_rng(seed).integers(0, 240, n).tolist()


def make(family, **options):
    return Session(tiny_model(family, mx.float32), load_tokenizer(tiny_directory(family)), **options)


def fresh(session, prompt, n=6):
    """Returns tokens and logprobs of a computation that reuses nothing."""
    responses = list(stream_generate(session.model, session.tokenizer, prompt, max_tokens=n))
    return [r.token for r in responses], [np.array(r.logprobs) for r in responses]


def check(session, prompt, **options):
    """Checks that the session's answer is the fresh one, up to the rounding that other chunks cause."""
    responses = list(session.respond(prompt, max_tokens=6, **options))
    tokens, logprobs = fresh(session, prompt)
    assert [r.token for r in responses] == tokens
    for response, wanted in zip(responses, logprobs, strict=True):
        np.testing.assert_allclose(np.array(response.logprobs), wanted, atol=TOLERANCES[session.model.args.model_type])
    assert session.tokens == list(prompt) + tokens[:-1]
    assert {layer.offset for layer in session.cache} == {len(session.tokens)}
    states = [array.nbytes for layer in session.cache for array in layer.state[:2]]
    assert session.nbytes == sum(states) + session.points.nbytes, "nothing is kept for a way back into the answer"
    return session.reuse


@pytest.mark.parametrize("family", KINDS)
def test_a_text_that_continues_computes_only_its_new_tokens(family):
    session = make(family)
    first = check(session, text())
    assert (first.memory, first.disk, first.computed) == (0, 0, N)
    more = [*session.tokens, *text(10, 1)]
    assert check(session, more).computed == 10


@pytest.mark.parametrize("family", KINDS)
def test_a_text_that_diverges_goes_back_to_the_boundary(family):
    session = make(family)
    check(session, text(), boundaries=[40])
    other = text()[:50] + text(20, 2)
    reuse = check(session, other, boundaries=[55])
    assert reuse.memory == (50 if session.points.can_trim else 40)
    reuse = check(session, other[:30])
    assert reuse.memory == (29 if session.points.can_trim else 0)


def test_states_are_kept_at_regular_distances():
    session = make(RECURRENT, checkpoint_every=16, span=24, prefill_step_size=8)
    check(session, text())
    assert session.points.positions == [16, 32, 48, N - 1]
    assert check(session, text()[:50] + [1, 2]).memory == 48
    list(session.respond(text(), max_tokens=40))
    assert session.points.positions == [16, 32, 48, N + 4, N + 20, N + 36], "the prompt's end is near to its start, 48"


def test_a_turn_is_not_cut_near_its_start():
    """The answer's end serves as its message's end, which is a few tokens later; the turn's own end is kept."""
    session = make(RECURRENT)
    check(session, text())
    known, turn = len(session.tokens), [*session.tokens, *text(40, 1)]
    check(session, turn, boundaries=[known + 16, known + 17])
    assert session.points.positions == [N - 1, known, known + 17] and known in session.points.ends
    assert check(session, [*turn[: known + 8], *text(9, 2)]).memory == known


def test_the_same_prompt_again_computes_one_token():
    session = make(RECURRENT)
    check(session, text())
    assert check(session, text()).computed == 1


@pytest.mark.parametrize("family", [RECURRENT, "qwen3_5_moe"])
def test_the_comparison_sees_a_state_that_is_one_percent_off(family):
    session = make(family)
    check(session, text(), boundaries=[40])
    states = session.points.states_at(40)
    states |= {i: (conv, recurrent * 1.01) for i, (conv, recurrent) in states.items()}
    with pytest.raises(AssertionError):
        check(session, text()[:50])


def test_going_back_to_the_end_changes_nothing():
    session = make(RECURRENT)
    check(session, text())
    length = len(session.tokens)
    assert session.rewind(length) == length == session.cache[0].offset
    assert session.rewind(length - 1) == N - 1 == session.cache[0].offset == len(session.tokens)
    check(session, text())


def test_without_room_for_states_everything_is_computed_again():
    session = make(RECURRENT, checkpoint_bytes=1000)
    check(session, text())
    assert session.points.positions == []
    assert check(session, text()).computed == N


@pytest.mark.parametrize("family", [RECURRENT, "deepseek_v3"])
def test_a_failure_between_layers_does_no_harm(family, monkeypatch):
    session = make(family)
    monkeypatch.setattr(session.model, "decode_step", None)  # the compiled step of a GPU calls no layers
    check(session, text())
    layer = type(session.model.layers[2])
    call, calls = layer.__call__, []

    def failing(self, *args):
        calls.append(self)
        if len(calls) == 11:  # the third layer of the third call: the first two layers are one token ahead
            raise OSError("unplugged")
        return call(self, *args)

    with monkeypatch.context() as patch, pytest.raises(OSError, match="unplugged"):
        patch.setattr(layer, "__call__", failing)
        list(session.respond([*session.tokens, 5, 6], max_tokens=6))
    assert {one.offset for one in session.cache} == {len(session.tokens)}
    check(session, [*text(), 7])


def test_stopping_keeps_what_was_computed():
    session = make(RECURRENT, span=20)

    def stop(done, total):
        if done >= 50:
            raise Stopped

    with pytest.raises(Stopped):
        list(session.respond(text(), prompt_progress_callback=stop))
    assert session.tokens == text()[:40]
    assert check(session, text()).memory == 40


def stop_at(done_wanted):
    def stop(done, total):
        if done >= done_wanted:
            raise Stopped

    return stop


@pytest.mark.parametrize("family", [RECURRENT, "qwen3_moe", WINDOWED, INDEXED])
def test_a_prompt_that_begins_with_the_same_span_goes_on_in_its_middle(family, monkeypatch):
    session = make(family, span=40, prefill_step_size=16)
    with pytest.raises(Stopped):
        list(session.respond(text(), prompt_progress_callback=stop_at(20)))
    assert session.tokens == [] and 0 < session.half.span.layer < len(session.model.layers)
    assert session.points.set_aside == session.half.span.nbytes > 0
    done, layer = session.half.span.layer, type(session.model.layers[0])
    calls, pass_span = [], layer.pass_span
    monkeypatch.setattr(
        layer, "pass_span", lambda self, *rest: calls.append(rest[0].shape[1]) or pass_span(self, *rest)
    )
    longer = [*text(), 1, 2, 3]
    assert session.known(longer) == session.half.span.length * done // len(session.model.layers)
    list(session.respond(longer, max_tokens=1))
    layers = len(session.model.layers)
    assert calls == [30] * (layers - done) + [33] * layers, "the layers before were computed again"
    assert session.points.set_aside == 0 and session.points.set_aside == 0
    check(session, [*longer, 5])


@pytest.mark.parametrize("family", [RECURRENT, "qwen3_moe"])
def test_after_a_failure_nothing_of_the_span_is_taken_for_known(family, monkeypatch):
    """The arrays of the span may be those that failed."""
    session = make(family, span=40, prefill_step_size=16)
    check(session, text(20, 3))
    known, held = list(session.tokens), session.nbytes

    def fail(rows):
        raise OSError("unplugged")

    with monkeypatch.context() as patch, pytest.raises(OSError, match="unplugged"):
        patch.setattr(session.model.layers[2], "finish_rows", fail)
        list(session.respond(known + text()))
    assert session.known(known + text()) == len(known) and session.nbytes <= held
    check(session, known + text())


@pytest.mark.parametrize("use", ["another text", "rewind", "save"])
@pytest.mark.parametrize("family", [RECURRENT, "qwen3_moe"])
def test_any_other_use_drops_a_span_that_is_half_done(family, use, tmp_path):
    session = make(family, span=40, prefill_step_size=16)
    check(session, text(20, 3))
    known = list(session.tokens)
    with pytest.raises(Stopped):
        list(session.respond(known + text(), prompt_progress_callback=stop_at(len(known) + 15)))
    assert session.tokens == known and session.points.set_aside > 0
    if use == "rewind":
        assert session.rewind(len(known)) == len(known)
    elif use == "save":
        session.save(tmp_path / "saved", model_fingerprint(tiny_directory(family), mx.float32), {})
    else:
        check(session, known + text(30, 4))
    assert session.points.set_aside == 0 and {layer.offset for layer in session.cache} == {len(session.tokens)}
    check(session, known + text(9, 5))


@pytest.mark.parametrize("family", [RECURRENT, "qwen3_moe"])
def test_a_span_half_done_after_another_text_is_not_gone_on_with(family):
    """The same tokens follow another text of the same length."""
    session = make(family, span=40, prefill_step_size=16)
    check(session, text(20, 3))
    known = list(session.tokens)
    with pytest.raises(Stopped):
        list(session.respond(known + text(30, 6), prompt_progress_callback=stop_at(len(known) + 15)))
    assert session.points.set_aside > 0
    check(session, text(len(known), 4) + text(30, 6))


def test_an_answer_cut_off_inside_a_recurrent_layer_does_no_harm(monkeypatch):
    """The state of the layer is already new, but its position is not."""
    session = make(RECURRENT)
    monkeypatch.setattr(session.model, "decode_step", None)
    check(session, text())
    whole, calls = delta.delta, []

    def cut_off(qkv, z, b, a, state, *rest):
        offset, out = state.offset, whole(qkv, z, b, a, state, *rest)
        calls.append(state)
        if len(calls) == 7:
            state.offset = offset
            raise KeyboardInterrupt
        return out

    monkeypatch.setattr("moeflux_mlx.mixers.delta.module.delta", cut_off)
    with pytest.raises(KeyboardInterrupt):
        list(session.respond([*session.tokens, 5, 6], max_tokens=9))
    monkeypatch.undo()
    check(session, [*session.tokens, 9])


@pytest.mark.parametrize("at", range(0, 60, 13))
@pytest.mark.parametrize("family", [RECURRENT, "qwen3_moe", WINDOWED])
def test_going_back_may_be_interrupted_at_any_line(family, at):
    """The session is then where it was, or where it was going, and its caches get there with the next prompt."""
    session = make(family, checkpoint_every=16, span=24)
    list(session.respond(text(), max_tokens=3))
    files = {module.__file__ for module in (session_module, rewind, layer_cache, growing, recurrent, ring, grouped)}
    interrupted(lambda: session.rewind(20), at=at, files=files)
    check(session, [*session.tokens, *text(5, 9)])


@pytest.mark.parametrize("family", [RECURRENT, "qwen3_moe", WINDOWED])
def test_an_interruption_while_a_saved_prompt_is_loaded_does_no_harm(family, tmp_path, monkeypatch):
    store = PromptDirectory(tmp_path, model_fingerprint(tiny_directory(family), mx.float32))
    check(make(family, store=store), text(50, 6))
    session = make(family)
    check(session, text(50, 5))
    session.store, restore = store, session_module.restore_prefix

    def interrupted(*args):
        restore(*args)
        raise KeyboardInterrupt

    monkeypatch.setattr(session_module, "restore_prefix", interrupted)
    with pytest.raises(KeyboardInterrupt):
        list(session.respond(text(50, 6), max_tokens=1))
    monkeypatch.undo()
    session.store = None
    check(session, text(50, 5) + [1])


def test_a_span_that_keeps_no_state_where_one_is_wanted_is_not_gone_on_with(tmp_path):
    store = PromptDirectory(tmp_path, model_fingerprint(tiny_directory(RECURRENT), mx.float32))
    session = make(RECURRENT, store=store, span=60)
    with pytest.raises(Stopped):
        list(session.respond(text(), boundaries=[50], prompt_progress_callback=stop_at(20)))
    list(session.respond(text() + [1, 2], boundaries=[40], max_tokens=1))
    assert session.save_error is None and 40 in session.points.positions
    assert session.reuse.prompt == session.reuse.computed == N + 2
    assert check(make(RECURRENT, store=store), text()[:41] + [7]).disk == 40


def test_a_span_whose_start_is_not_kept_is_not_gone_on_with():
    """If that state is to stand for a wanted one."""
    session = make(RECURRENT, span=64, prefill_step_size=16)
    check(session, text())
    known, turn = len(session.tokens), [*session.tokens, *text(40, 1)]
    with pytest.raises(Stopped):
        list(session.respond(turn, prompt_progress_callback=stop_at(known + 15)))
    assert session.half is not None and known not in session.points.positions
    check(session, turn, boundaries=[known + 2])
    assert known in session.points.ends
    assert check(session, [*turn[: known + 8], *text(9, 2)]).memory == known


def test_a_span_larger_than_the_session_s_bytes_is_not_kept():
    session = make(RECURRENT, checkpoint_bytes=1000, span=40)
    with pytest.raises(Stopped):
        list(session.respond(text(), prompt_progress_callback=stop_at(20)))
    assert session.points.set_aside == 0 and {layer.offset for layer in session.cache} == {0}
    check(session, text())


@pytest.mark.parametrize("family, sizes", drawn(FAMILIES, [(200, 200), (200, 7), (13, 13), (13, 5)]))
def test_what_sessions_promise_at_every_span_and_block(family, sizes):
    """Checks one block, several blocks and several spans."""
    span, block = sizes
    session = make(family, span=span, prefill_step_size=block, checkpoint_every=16)
    check(session, text(), boundaries=[40])
    assert check(session, text()[:50] + text(20, 2), boundaries=[55]).memory >= 40
    with pytest.raises(Stopped):
        list(session.respond(text(50, 8), prompt_progress_callback=stop_at(23)))
    check(session, text(50, 8)[:30] + [7, 8])
    check(session, text(50, 8))


def test_closing_an_answer_keeps_what_was_computed():
    session = make(RECURRENT)
    responses = session.respond(text(), max_tokens=20)
    given_out = [next(responses).token for _ in range(5)]
    responses.close()
    assert session.tokens == text() + given_out[:4]
    assert check(session, text() + given_out).computed == 1


def test_closing_an_answer_keeps_no_state_that_is_ahead_of_it(monkeypatch):
    model = make_resident(monkeypatch, RECURRENT)
    session = Session(model, load_tokenizer(tiny_directory(RECURRENT)), checkpoint_every=1)
    responses = session.respond(text(), max_tokens=20)
    for _ in range(5):
        next(responses)
    ahead = session.points.positions[-1]
    responses.close()
    assert len(session.tokens) == N + 4 == ahead - 1 == session.points.positions[-1]


def test_processors_see_tokens_that_were_not_computed():
    session, seen = make("qwen3_moe"), []

    def look(tokens, logits):
        seen.append(tokens.tolist())
        return logits

    list(session.respond(text(), max_tokens=2))
    list(session.respond(text() + [3, 4], max_tokens=1, logits_processors=[look]))
    assert seen == [text() + [3, 4]]


def test_progress_and_rates_count_the_whole_prompt():
    session, reports = make("qwen3_moe"), []
    report = lambda done, total: reports.append((done, total))  # noqa: E731
    list(session.respond(text(), max_tokens=1))
    last = list(session.respond(text() + [1] * 20, max_tokens=2, prompt_progress_callback=report))[-1]
    assert reports[0] == (N, N + 20) and reports[-1] == (N + 20, N + 20)
    assert last.prompt_tokens == N + 20 and last.generation_tokens == 2


@pytest.mark.parametrize("family", [RECURRENT, "qwen3_moe"])
def test_states_of_a_text_that_another_one_replaced_are_gone(family, tmp_path):
    """A prompt found on disk replaces a text whose states are kept in memory."""
    path = tiny_directory(family)
    store = PromptDirectory(tmp_path, model_fingerprint(path, mx.float32))
    common, other, stored = text(10, 5), text(50, 6), text(45, 7)
    check(make(family, store=store), common + stored)
    session = make(family, checkpoint_every=8, span=16, prefill_step_size=4)
    check(session, common + other)
    session.store = store
    assert check(session, common + stored + [1, 2]).disk > 40
    session.store = None
    assert check(session, common + stored[:20] + [3]).memory <= 30


def test_an_empty_prompt_is_refused():
    with pytest.raises(RequestError, match="empty"):
        list(make("qwen3_moe").respond([]))


def test_saved_sessions_go_on(tmp_path):
    path = tiny_directory(RECURRENT)
    fingerprint = model_fingerprint(path, mx.float32)
    model, tokenizer = load(path, dtype=mx.float32)
    session = Session(model, tokenizer)
    check(session, text())
    session.save(tmp_path / "saved", fingerprint, {"who": "me"})
    other = Session(model, tokenizer)
    assert other.load(tmp_path / "saved", fingerprint).extra == {"who": "me"}
    assert other.tokens == session.tokens
    assert check(other, [*session.tokens, 9, 9]).computed == 2


def test_a_loaded_text_has_no_rows_of_the_earlier_text(tmp_path):
    session, fingerprint = make(RECURRENT), model_fingerprint(tiny_directory(RECURRENT), mx.float32)
    absorb_into(session, text())
    session.save(tmp_path / "saved", fingerprint, {})
    absorb_into(session, text(20, 1))
    session.load(tmp_path / "saved", fingerprint)
    assert session.rewind(40) == 0 == session.cache[0].offset
    check(session, text())


@given(
    room=st.integers(0, 6),
    start=st.integers(0, 100),
    length=st.integers(1, 200),
    wanted=st.lists(st.integers(0, 300), max_size=4),
    every=st.integers(1, 60),
)
def test_positions_are_chosen_within_the_room(room, start, length, wanted, every):
    points = RewindPoints(fake_caches(), room * 32)
    chosen = points.choose(start, start + length, wanted, every, 32)
    inside = sorted({n for n in wanted if rewind.after(start) < n <= start + length})
    assert chosen == sorted(set(chosen)) and all(start < n <= start + length for n in chosen)
    assert len(chosen) <= room and set(inside[-room:] if room else []) <= set(chosen)
    if len(inside) < room and any(n not in inside for n in range(start + 1, start + length) if n % every == 0):
        assert set(chosen) - set(inside), "there was room for more"
    assert RewindPoints(fake_caches()[1:], 10**6).choose(start, start + length, wanted, 1, 1) == []


def fake_caches():
    return [RecurrentCache(Delta(1, 1, 2, 2, 2)), KVCache(GroupedQuery(1, 1, 2, None))]


def advance(caches, n):
    """Makes the recurrent state equal to its own position."""
    recurrent, attention = caches
    recurrent.offset += n
    recurrent.arrays = [mx.full((1, 4), recurrent.offset)] * 2
    attention.update_and_fetch(mx.zeros((1, 1, n, 2)), mx.zeros((1, 1, n, 2)))


@given(
    steps=st.lists(st.tuples(st.sampled_from(["go", "keep", "back"]), st.integers(1, 40)), max_size=40),
    room=st.integers(0, 5),
)
@settings(max_examples=examples(60))
def test_rewinding_always_reaches_a_true_state(steps, room):
    caches = fake_caches()
    points, position = RewindPoints(caches, room * 32), 0
    for kind, n in steps:
        if kind == "go":
            advance(caches, n)
            position += n
        elif kind == "keep":
            points.keep(position)
        else:
            wanted = max(0, position - n)
            nearest = max((p for p in points.positions if p <= wanted), default=0)
            position = points.rewind(wanted)
            assert position == nearest
            assert all(p <= position for p in points.positions)
        assert points.nbytes <= room * 32
        assert [layer.offset for layer in caches] == [position] * 2
        state = caches[0].recurrent
        assert state is None if position == 0 and state is None else position in (0, int(state[0, 0].item()))


def test_states_spread_out_when_room_is_short():
    caches = fake_caches()
    points = RewindPoints(caches, 3 * 32)
    for n in (100, 1, 1, 100, 100):
        advance(caches, n)
        points.keep(caches[0].offset)
    assert points.positions == [102, 202, 302]


def test_states_where_messages_end_are_dropped_last():
    session = make(RECURRENT, checkpoint_every=8)
    session.points.max_bytes = 5 * session._state_bytes()
    check(session, text(40), boundaries=[18, 21])
    check(session, [*session.tokens, *text(30, 1)], boundaries=[65])
    assert {18, 21, 65} <= set(session.points.positions)
    assert check(session.fork(65), [*session.tokens[:22], 7]).memory == 21


def test_states_are_dropped_when_others_need_their_memory():
    caches = fake_caches()
    points = RewindPoints(caches, 4 * 32)
    for _ in range(4):
        advance(caches, 10)
        points.keep(caches[0].offset)
    assert len(points.positions) == 4
    points.set_apart(2 * 32)
    assert len(points.positions) == 2
    advance(caches, 10)
    points.keep(50)
    assert len(points.positions) == 2 and 50 in points.positions


@pytest.mark.parametrize("family", KINDS)
def test_a_fork_continues_independently(family):
    session = make(family)
    check(session, text(), boundaries=[20, 40])
    before = session.tokens.copy()
    other = session.fork(45)
    reached = 45 if other.points.can_trim else 40
    assert other.tokens == before[:reached] and session.tokens == before
    assert check(other, [*before[:reached], *text(10, 3)]).memory == reached
    assert check(session, [*before, *text(8, 4)]).computed == 8
    assert check(other.fork(25), [*before[:20], 7]).memory == 20
    assert other.rewind(reached) == reached


@pytest.mark.parametrize("family", [RECURRENT, "qwen3_moe"])
def test_a_fork_has_nothing_of_a_span_that_is_half_done(family):
    session = make(family, span=40, prefill_step_size=16)
    check(session, text(20, 3))
    known = session.tokens.copy()
    with pytest.raises(Stopped):
        list(session.respond(known + text(), prompt_progress_callback=stop_at(len(known) + 15)))
    other = session.fork(len(known) + 10)
    assert other.tokens == known[: len(other.tokens)] and len(other.tokens) >= 19
    assert {layer.offset for layer in other.cache} == {len(other.tokens)}
    check(other, [*known, 5])


@pytest.mark.parametrize("family", KINDS)
def test_a_fork_of_all_that_is_known(family):
    session = make(family)
    check(session, text())
    known = session.tokens.copy()
    other = session.fork(len(known))
    assert other.points.positions == session.points.positions
    assert other.known([*known, 1, 2]) == len(known)
    assert check(other, [*known, *text(8, 4)]).computed == 8
    assert check(session, [*known, *text(9, 5)]).computed == 9


@pytest.mark.parametrize("family", KINDS)
def test_a_prompt_brought_in_by_itself_is_answered_alike(family):
    """The known part of the prompt is not computed again."""
    session, whole = make(family), make(family)
    logits, want = absorb_into(session, text()), next(iter(whole.respond(text(), max_tokens=1)))
    logprobs = np.array(logits[0] - mx.logsumexp(logits[0].astype(mx.float32)))
    np.testing.assert_allclose(logprobs, np.array(want.logprobs), atol=1e-5)
    assert session.tokens == text() and session.reuse.computed == N
    told = []
    more = [*text(), *text(10, 1)]
    absorb_into(session, more, lambda done, total: told.append((done, total)))
    assert session.reuse.computed == 10 and told[0] == (N, N + 10) and session.tokens == more
    check(session, [*more, 3])


def test_a_prompt_that_was_stopped_goes_on_in_the_middle():
    session = make(RECURRENT, span=16)

    def stop(done, total):
        if done > 20:
            raise Stopped

    with pytest.raises(Stopped):
        absorb_into(session, text(), stop)
    assert len(session.tokens) < session.known(text()) < N
    assert np.array_equal(
        np.array(absorb_into(session, text())), np.array(absorb_into(make(RECURRENT, span=16), text()))
    )


def test_a_count_out_of_range_is_refused_before_the_prompt_is_computed():
    session = make(RECURRENT)
    with pytest.raises(RequestError, match="max_tokens is 0"):
        next(session.respond(text(), max_tokens=0))
    assert session.tokens == []

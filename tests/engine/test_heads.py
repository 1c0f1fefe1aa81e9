"""Draft heads: what they compute, what they know about a text, and that they change no bit of it."""

import contextlib
import functools
import itertools
import json
from dataclasses import replace

import goldens
import mlx.core as mx
import numpy as np
import oracle
import pytest
import tiny_heads
from driving import Stopped, absorb_into, events_of
from grids import drawn, marks
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st
from test_decode import copied, use_compiled_steps
from test_drafts import PROMPT, SOURCES, Told, choice, said_by, same, state, turns
from test_interrupts import interrupted
from tiny_heads import HEADED, headed_directory
from tiny_models import tiny_directory

from moeflux_mlx.caches import growing
from moeflux_mlx.convert import convert
from moeflux_mlx.driving import decoding, head_drafts
from moeflux_mlx.driving.generation import generate_step
from moeflux_mlx.driving.head_drafts import HeadDrafts
from moeflux_mlx.driving.loop import Loop
from moeflux_mlx.driving.session import Session
from moeflux_mlx.errors import ModelFileError, RequestError
from moeflux_mlx.experts import held, mapped
from moeflux_mlx.model import head as model_head
from moeflux_mlx.model.drafting import Drafting
from moeflux_mlx.model.step import SequenceRows
from moeflux_mlx.opening import heads
from moeflux_mlx.opening.engine import load, load_model, open_engine
from moeflux_mlx.opening.weights import model_fingerprint
from moeflux_mlx.state.prompt_store import PromptDirectory
from moeflux_mlx.state.snapshot import save_state
from moeflux_mlx.text.tokenizer import load_tokenizer

TOKENS = np.arange(5, 45)
LIST = TOKENS.tolist()


def headed(family, path=None, draft="head", **options):
    """Loads a model with its head or without. It checks as many drafts as there are."""
    known = loaded(family, draft) if path is None and not options and draft in ("head", "off") else None
    directory = path or headed_directory(family)
    model = known or load_model(directory, **{"dtype": mx.float32, "draft": draft, **options})
    model.drafting = Drafting("off" if model.head is None else "head", fixed=True)
    return model


@functools.cache
def loaded(family, draft):
    return load_model(headed_directory(family), dtype=mx.float32, draft=draft)


def logits_of(model, out):
    return np.array(model._compute_logits(out))[0]


# ---- what a head computes ----


@pytest.mark.parametrize("family", [name for name in HEADED if name in goldens.FAMILIES])
def test_a_head_computes_what_the_paper_says(monkeypatch, family):
    monkeypatch.setattr(mx, "quantize", functools.partial(mx.quantize, stream=mx.cpu))  # GPUs round differently
    model = headed(family, headed_directory(family))
    hidden = np.array(model.hidden(mx.array(TOKENS[None])))
    weights = goldens.dequantised(family)
    root = "model.language_model." if family == "qwen3_5_moe" else "model."
    embedded = weights[root + "embed_tokens.weight"][TOKENS[1:]]
    wanted, _ = tiny_heads.drafted(family, embedded, hidden[0, :-1].astype(np.float64), weights["lm_head.weight"])
    one, several, cache = model.head.make_cache(), model.head.make_cache(), model.head.make_cache()
    rows = [model.head.absorb([hidden[:, i : i + 1]], [LIST[i + 1]], one)[0] for i in range(len(TOKENS) - 1)]
    assert np.abs(np.concatenate([logits_of(model, row) for row in rows]) - wanted).max() < 2e-4
    model.head.absorb([hidden[:, :30]], LIST[1:31], several)
    last, _ = model.head.absorb([hidden[:, 30:-2], hidden[:, -2:-1]], LIST[31:], several)
    whole, drafted = model.head.absorb([hidden[:, :-1]], LIST[1:], cache, draft=True)
    assert np.abs(logits_of(model, last) - wanted[-1]).max() < 2e-4
    assert np.abs(logits_of(model, whole) - wanted[-1]).max() < 2e-4
    assert drafted.item() == wanted[-1].argmax()


def test_what_a_head_drafts_next_follows_from_its_own_state():
    family = "qwen3_next"
    model, c = headed(family), goldens.text_config(family)
    hidden = np.array(model.hidden(mx.array(TOKENS[None])))
    drafts = shown(model, LIST)
    first, second, third = np.array(drafts.propose(3)).tolist()
    weights, plus = goldens.dequantised(family), oracle.norm_offset(c)
    states, tokens = hidden[0, :-1].astype(np.float64), LIST
    for proposed in (first, second, third):
        embedded = weights["model.embed_tokens.weight"][tokens[1:]]
        logits, out = tiny_heads.drafted(family, embedded, states, weights["lm_head.weight"])
        assert np.sort(logits[-1])[-2:] @ [-1, 1] > 1e-3, "a near tie says nothing"
        assert proposed == logits[-1].argmax()
        states, tokens = np.concatenate([states, out[-1:]]), [*tokens, proposed]
    assert np.array(drafts.propose(3)).tolist() == [first, second, third] and plus == 1.0


@pytest.mark.parametrize("family", ["qwen3_next", *(pytest.param(name, marks=marks(False)) for name in HEADED[1:])])
def test_norms_of_either_convention_are_told_apart(tmp_path, family):
    """Norms that are stored without their 1, and with it, give the same head."""
    own = tiny_heads.head_tensors(family)
    added = {}
    for name, (kind, values) in own.items():
        is_norm = values.ndim == 1 and name.endswith("norm.weight") | name.endswith(
            ("embedding.weight", "hidden.weight")
        )
        if is_norm and oracle.norm_offset(goldens.text_config(family)) and not name.endswith("q_a_layernorm.weight"):
            kind, values = "F32", oracle.bf16_to_f32(values) + np.float32(1)
        added[name] = kind, values
    goldens.write_safetensors(tmp_path / "head.safetensors", added)
    plain, other = headed(family), headed(family, draft=str(tmp_path))
    for (name, one), (_, two) in zip(flat(plain.head), flat(other.head), strict=True):
        assert np.array_equal(one, two), name


def flat(module):
    from mlx.utils import tree_flatten

    return [(name, np.array(value.astype(mx.float32))) for name, value in tree_flatten(module.parameters())]


def test_a_head_as_mlx_stores_it_in_a_file_of_its_own_keeps_its_codes(tmp_path):
    """The names have no beginning, and the experts are stacked. Checks the head in place and packed."""
    own = {name.removeprefix("mtp."): mx.array(goldens.as_float(one)) for name, one in head_of("qwen3_next").items()}
    gates = [mx.stack([own.pop(f"layers.0.mlp.experts.{e}.{name}_proj.weight") for e in range(16)]) for name in PARTS]
    own |= {f"layers.0.mlp.switch_mlp.{name}_proj.weight": gate for name, gate in zip(PARTS, gates, strict=True)}
    tensors = {}
    for name, value in own.items():
        if value.ndim < 2:
            tensors[name] = value
            continue
        parts = mx.quantize(value.astype(mx.bfloat16), group_size=64, bits=8 if ".gate." in name else 6)
        tensors |= dict(zip((name, *(name[:-6] + part for part in ("scales", "biases"))), parts, strict=True))
    mx.save_safetensors(str(tmp_path / "model.safetensors"), tensors)
    (tmp_path / "config.json").write_text(json.dumps({"quantization": {"group_size": 64, "bits": 6}}))
    packed = headed("qwen3_next", draft=str(tmp_path))
    folder = goldens.write_variant(tmp_path / "model", "qwen3_next", "mlx4")
    in_place = load_model(folder, dtype=mx.float32, draft=str(tmp_path))
    record = packed.head._experts.source.layout.records[0]
    assert {one.bits for one in record.quants} == {6} and packed.head.fc.quant.bits == 6
    for (name, one), (_, two) in zip(flat(packed.head), flat(in_place.head), strict=True):
        assert np.array_equal(one, two), name
    assert list(generate_step(PROMPT, in_place, max_tokens=4))


def test_a_head_of_a_checkpoint_in_place_is_that_of_the_packed_model(tmp_path):
    """The head has floats in a checkpoint of MLX's codes. Its experts are quantised like the model's."""
    checkpoint = tiny_heads.write_headed(tmp_path / "checkpoint", "qwen3_next", "mlx4")
    convert(checkpoint, tmp_path / "packed")
    in_place, packed = (headed("qwen3_next", path=path) for path in (checkpoint, tmp_path / "packed"))
    for (name, one), (_, two) in zip(flat(packed.head), flat(in_place.head), strict=True):
        assert np.array_equal(one, two), name
    assert {one.bits for one in in_place.head._experts.source.layout.records[0].quants} == {4}
    assert in_place.head.fc.quant.bits == 8


PARTS = ("gate", "up", "down")


def head_of(family):
    return tiny_heads.head_tensors(family)


# ---- what it knows of a text ----


def shown(model, text, start=0):
    """Returns a head that has been shown a text from a position on, except its last token."""
    drafts = HeadDrafts(model)
    hidden = np.array(model.hidden(mx.array([text])))
    drafts.begin(text[:-1])
    drafts.show(hidden[:, start:-1], start)
    drafts.add(text[-1])
    return drafts


def rows_of(drafts, count):
    """Returns the keys or latents of the first `count` rows."""
    return [np.array(array[..., :count, :]) for array in drafts.cache[0].state[:2]]


def check_rows(session, model, apart):
    """Checks that the head's rows are those of a head that sees the text for the first time. `apart` are the positions
    where the text once continued differently: such a row has the token that was there, and a cache that could not go
    back so far begins there.
    """
    drafts = session.drafts
    drafts.propose(1)
    start = drafts.start
    assert start == 0 or (start - 1 in apart and not all(one.is_trimmable() for one in drafts.cache))
    fresh = shown(model, drafts.tokens, start)
    fresh.propose(1)
    assert drafts.rows == fresh.rows == len(drafts.tokens) - 1 - start
    kept = [row for row in range(drafts.rows) if start + row not in apart]
    for own, wanted in zip(rows_of(drafts, drafts.rows), rows_of(fresh, drafts.rows), strict=True):
        assert np.abs(own[..., kept, :] - wanted[..., kept, :]).max(initial=0) < 2e-3


class Guided(HeadDrafts):
    """A head that computes its proposals, and then returns given ones."""

    told: Told

    def propose(self, count):
        own = super().propose(count)
        self.told.text = list(self.tokens)
        return self.told.propose(count) if len(own) else []


def guide(patch, answers, right):
    patch.setattr(head_drafts, "HeadDrafts", Guided)
    patch.setattr(Guided, "told", Told([], answers, right), raising=False)


def session_of(model, family, **options):
    return Session(model, load_tokenizer(headed_directory(family)), checkpoint_every=8, **options)


def check_texts(model, plain, family, turns, seed, right, most):
    """Checks several answers, each stopped after some tokens.

    With a head they equal those without, and the head knows them.
    """
    model.drafting = Drafting("head", most, fixed=True)
    answers, apart = [], set()
    with pytest.MonkeyPatch.context() as patch:
        guide(patch, answers, right)
        with_head, without = session_of(model, family), session_of(plain, family)
        for i, (count, stop, back, more) in enumerate(turns):
            prompt = [*(without.tokens or PROMPT), *more]
            picked = [choice(None if seed is None else seed + i) for _ in range(3)]
            whole = said_by(session_of(plain, family), prompt, count, count, **picked[0])
            answers.append([*prompt, *(token for token, _ in whole)])
            want = said_by(without, prompt, count, stop, **picked[1])
            got = said_by(with_head, prompt, count, stop, **picked[2])
            assert same(got, want) and state(with_head) == state(without)
            assert with_head.rewind(len(with_head.tokens) - back) == without.rewind(len(without.tokens) - back)
            assert state(with_head) == state(without)
            check_rows(with_head, model, apart)
            apart.add(len(without.tokens) - 1)


@pytest.mark.parametrize("family, source", drawn(HEADED, SOURCES))
def test_texts_logprobs_and_states_are_those_without_a_head(family, source):
    model, plain = headed(family, **SOURCES[source]), headed(family, draft="off", **SOURCES[source])

    @given(
        turns=turns,
        seed=st.none() | st.integers(0, 99),
        right=st.lists(st.booleans(), min_size=1, max_size=5),
        most=st.integers(1, 4),
    )
    @example(
        turns=[(8, 4, 6, [0, 46, 4, 44]), (20, 17, 4, [7, 22, 52])], seed=95, right=[False], most=1
    )  # back to the middle of a block
    @settings(max_examples=2, phases=[Phase.explicit, Phase.generate])
    def texts(turns, seed, right, most):
        check_texts(model, plain, family, turns, seed, right, most)

    texts()


@pytest.fixture
def compiled(monkeypatch):
    """Models that are mapped compute tokens by a compiled step, as on a GPU."""
    use_compiled_steps(monkeypatch)
    monkeypatch.setattr(mapped, "map_file", copied)
    monkeypatch.setattr(held, "kept", mx.array)


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("family", ["qwen3_next", pytest.param("deepseek_v3", marks=marks(False))])
def test_a_model_that_runs_ahead_says_the_same_with_a_head(family):
    """As on a GPU, the head's step from its own state is one compiled graph."""
    model, plain = headed(family, expert_io="mmap"), headed(family, draft="off", expert_io="mmap")
    assert model.decode_step is not None
    check_texts(model, plain, family, TURNS, None, (True, True, False), 3)
    check_texts(model, plain, family, TURNS[:2], 7, (True, False), 4)
    drafts = shown(model, LIST)
    compiled = np.array(drafts.propose(4))
    assert all(step.graphs for step in model.head._steps)
    model.head._steps = []
    assert np.array_equal(shown(model, LIST).propose(4), compiled)


@pytest.mark.parametrize("resident", [False, True])
def test_a_head_sees_the_steps_that_a_text_shares(request, resident):
    family, prompts = "qwen3_next", [PROMPT, [9, 8, 7, *PROMPT]]
    if resident:
        request.getfixturevalue("compiled")
    model = headed(family, expert_io="mmap")
    plain = headed(family, draft="off", expert_io="mmap")
    want = [[token for token, _ in said_by(session_of(plain, family), one, 8, 8)] for one in prompts]
    sessions = [session_of(model, family) for _ in prompts]
    answers = [session.answer(one, max_tokens=8) for session, one in zip(sessions, prompts, strict=True)]
    loop = Loop()
    for answer in answers:
        loop.add(answer)
    said = [[] for _ in answers]
    for event in events_of(loop):
        if event.token is not None:
            said[answers.index(event.text)].append(event.token)
    assert said == want
    for session in sessions:
        check_rows(session, model, ())


TURNS = [(12, 12, 0, []), (9, 5, 2, [3, 4]), (20, 20, 0, [9])]


def late(self):
    """Gives the head the state of the row before."""
    return self.hidden[:, max(self.followed - 1, 0)][:, None]


def twice(self, token, hidden=None, add=HeadDrafts.add):
    """Draws a key twice."""
    add(self, token, None if hidden is None else mx.concatenate([hidden, hidden], axis=1))


def too_many(self, token, add=decoding.OwnStep.follow):
    """Follows a row that the text did not take."""
    self.followed += 1
    return bool(self.rows_left)


FAULTS = {"late": (decoding.OwnStep, "next_hidden", property(late)), "twice": (HeadDrafts, "add", twice)}
FAULTS |= {"too many": (decoding.OwnStep, "follow", too_many)}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_comparison_sees_faults(monkeypatch, fault):
    model, plain = headed("qwen3_next"), headed("qwen3_next", draft="off")
    check_texts(model, plain, "qwen3_next", TURNS, 3, (True, True, False), 3)
    monkeypatch.setattr(*FAULTS[fault])
    with pytest.raises(AssertionError):
        check_texts(model, plain, "qwen3_next", TURNS, 3, (True, True, False), 3)


def test_a_head_that_is_not_asked_absorbs_many_rows_at_once(monkeypatch):
    model = headed("qwen3_next")
    want = [token for token, _ in generate_step(PROMPT, headed("qwen3_next", draft="off"), max_tokens=24)]
    model.drafting = Drafting("head", fixed=True)
    monkeypatch.setattr(Drafting, "depth", 0)
    monkeypatch.setattr(head_drafts, "MOST_WAITING", 6)
    counts, absorb = [], model.head.absorb

    def counted(hidden, tokens, cache, draft=False):
        counts.append(len(tokens))
        return absorb(hidden, tokens, cache, draft)

    monkeypatch.setattr(model.head, "absorb", counted, raising=False)
    assert [token for token, _ in generate_step(PROMPT, model, max_tokens=24)] == want
    assert counts[0] == len(PROMPT) - 1 and set(counts[1:]) == {6}


def test_what_a_head_was_not_shown_it_does_without():
    """A cache that another call has filled, or a restored text, has rows only from where the head is shown the text."""
    model = headed("deepseek_v3")
    cache = model.make_cache()
    model(mx.array([PROMPT]), cache)
    want = [token for token, _ in generate_step([7, 8, 9, 10, 11], headed("deepseek_v3", draft="off"), max_tokens=8,
                                                 prompt_cache=copies(cache))]  # fmt: skip
    assert [token for token, _ in generate_step([7, 8, 9, 10, 11], model, max_tokens=8, prompt_cache=cache)] == want
    assert model.drafting.checked > 0
    session = session_of(model, "deepseek_v3")
    said_by(session, PROMPT, 4, 4)
    model.step([SequenceRows(session.cache, [3, 4, 5])])
    session.tokens += [3, 4, 5]
    said_by(session, [*session.tokens, 6, 7], 4, 4)
    assert session.drafts.start == len(PROMPT) + 3 + 3, "what it said but for the last token, and the step's tokens"


def copies(cache):
    return [layer.copy() for layer in cache]


def test_rows_begin_anew_where_the_cache_does_not_go_back():
    """The cache of blocks of positions can go back only a few positions."""
    model = headed("glm5_next")
    drafts, hidden = shown(model, LIST), np.array(model.hidden(mx.array(TOKENS[None])))
    assert len(drafts.propose(2)) and drafts.saved(36) and not drafts.saved(10)
    drafts.begin(LIST[:36])
    assert (drafts.start, drafts.rows, drafts.shown) == (0, 36, 36)
    drafts.begin(LIST[:10])
    assert (drafts.start, drafts.rows, drafts.shown) == (10, 0, 10) and not len(drafts.propose(1))
    drafts.show(hidden[:, 10:12], 10)
    for token in LIST[10:13]:
        drafts.add(token)
    assert len(drafts.propose(1)) and (drafts.start, drafts.rows) == (10, 2)


@pytest.mark.parametrize("family", ["qwen3_5_moe"])
def test_forks_know_what_their_text_knows(family):
    model = headed(family)
    session = session_of(model, family)
    said_by(session, PROMPT, 9, 9)
    other = session.fork(len(session.tokens))
    prompt = [*session.tokens, 5, 6]
    assert same(said_by(other, prompt, 6, 6), said_by(session, prompt, 6, 6))
    check_rows(other, model, ())
    check_rows(session, model, ())
    known = other.drafts.saved(len(prompt))
    said_by(session, PROMPT[::-1], 1, 1)
    assert other.drafts.saved(len(prompt)) == known


@pytest.mark.parametrize("family", ["qwen3_next", pytest.param("deepseek_v3", marks=marks(False))])
def test_a_prompt_in_spans_may_be_stopped_and_an_answer_interrupted_at_any_line(monkeypatch, family):
    """After any interruption the session and its head continue like ones with the same known text."""
    model, plain = headed(family), headed(family, draft="off")
    prompt = [*PROMPT, *PROMPT]
    want = [token for token, _ in said_by(session_of(plain, family, span=8), prompt, 12, 12)]
    guide(monkeypatch, [[*prompt, *want]], (True, False, True, True))
    modules = {module.__file__ for module in (decoding, head_drafts, model_head, growing)}
    for at in range(0, 500, 125):
        session, calls = session_of(model, family, span=8), iter(range(at // 71))

        def stop(done, total, left=calls):
            if next(left, None) is None:
                raise Stopped

        with contextlib.suppress(Stopped):
            absorb_into(session, prompt, stop)
        responses = session.respond(prompt, max_tokens=12)
        assert next(responses).token == want[0]
        interrupted(lambda rest=responses: list(rest), at=at, files=modules)
        assert session.tokens == [*prompt, *want][: len(session.tokens)]
        rest = [token for token, _ in said_by(session, [*prompt, *want[:6]], 6, 6)]
        assert rest == want[6:]
        check_rows(session, model, {len(prompt) + 5, *range(len(prompt), len(session.tokens))})


@pytest.mark.parametrize(
    "family, kv_bits", [("qwen3_next", 8), pytest.param("qwen3_next", 16, marks=marks(False)), ("deepseek_v3", "auto")]
)
def test_what_a_head_knows_is_saved_with_a_prompt(tmp_path, family, kv_bits):
    """Checks a file and a directory, whole and cut. A model without a head reads and writes the same files."""
    model, plain = headed(family, kv_bits=kv_bits), headed(family, draft="off", kv_bits=kv_bits)
    print_ = model_fingerprint(headed_directory(family), mx.float32, model.cpu_activations, model.args.kv_bits)
    session = session_of(model, family)
    said_by(session, PROMPT, 9, 9)
    session.save(tmp_path / "with", print_, {})
    for other in (model, plain):
        loaded = session_of(other, family)
        loaded.load(tmp_path / "with", print_)
        assert save_state(other, loaded.cache) == save_state(model, session.cache)
        if other is model:
            rows = loaded.drafts.rows
            assert rows == len(session.tokens) == session.drafts.rows
            for own, wanted in zip(rows_of(loaded.drafts, rows), rows_of(session.drafts, rows), strict=True):
                assert np.array_equal(own, wanted)
        loaded.save(tmp_path / "without", print_, {})
    loaded = session_of(model, family)
    loaded.load(tmp_path / "without", print_)
    assert loaded.drafts.rows == 0 and same(said_by(loaded, [*loaded.tokens, 5], 5, 5), next_of(session, [5]))
    longer = [*PROMPT, *PROMPT]
    for used, known in ((model, True), (plain, False)):
        store = PromptDirectory(tmp_path / str(known), print_)
        said_by(session_of(used, family, store=store), longer, 6, 6)
        again = session_of(model, family, store=store)
        said_by(again, longer[:-1] + [3, 4], 3, 3)
        assert again.reuse.disk > 0 and (again.drafts.start == 0) == known


def next_of(session, more):
    return said_by(session, [*session.tokens, *more], 5, 5)


def test_rows_of_another_head_are_ignored():
    model = headed("qwen3_next")
    drafts = shown(model, LIST)
    saved = drafts.saved(len(LIST))
    other = HeadDrafts(model)
    for damaged in (b"", b"HEAD", saved[:-1], saved + b"0", b"HEAD\xff\xff\xff\xff" + saved[8:], b"TAIL" + saved[4:]):
        other.restore(damaged, LIST)
        assert other.rows == 0 and other.propose(2) == []
    other.restore(saved, LIST)
    assert other.rows == len(LIST) - 1


# ---- which head, and whether ----


def test_automatic_takes_a_head_and_else_looks_up(monkeypatch):
    has, lacks = headed_directory("qwen3_next"), tiny_directory("qwen3_moe")
    engine = open_engine(has, dtype=mx.float32, draft="auto")
    assert engine.model.drafting.kind == "head" and engine.drafts.startswith("drafts come from a head of ")
    head = engine.plan.demand.head
    assert head == heads.HeadWeights.nbytes(heads._head(engine.weights, engine.model.args, None), mx.float32)
    assert engine.plan.state > open_engine(has, dtype=mx.float32, draft="off").plan.state, "its cache is planned"
    engine = open_engine(lacks, draft="auto")
    assert engine.model.drafting.kind == "lookup" and engine.model.head is None
    monkeypatch.setattr(heads, "LEAST_SHARE", 1.01)
    engine = open_engine(has, draft="auto", expert_io="pread")
    assert engine.model.drafting.kind == "off" and "would take too much from the experts" in engine.drafts


def test_a_head_that_is_not_whole_is_refused_where_it_was_asked_for(tmp_path):
    own = head_of("qwen3_next")
    del own["mtp.fc.weight"]
    goldens.write_safetensors(tmp_path / "head.safetensors", own)
    with pytest.raises(ModelFileError, match="tensor fc.weight is missing"):
        headed("qwen3_next", draft=str(tmp_path))
    with pytest.raises(ModelFileError, match="holds no draft head for this model; draft can be auto or lookup"):
        load_model(tiny_directory("qwen3_moe"), draft="head")
    with pytest.raises(RequestError, match="nor a directory"):
        load_model(tiny_directory("qwen3_moe"), draft=str(tmp_path / "none"))
    engine = open_engine(tiny_directory("qwen3_next", "hub"), draft="auto")  # the head is a few tensors
    assert engine.model.head is None and "the draft head cannot be used: no tensor has " in engine.drafts
    assert replace(engine.plan.demand, head=0) == engine.plan.demand


def test_half_a_head_is_taken_before_the_last_norm_where_a_family_says_so(monkeypatch):
    """This is a field of the family."""
    from moeflux_mlx.families.registry import FAMILIES

    family = FAMILIES["qwen3_next"]
    monkeypatch.setitem(FAMILIES, "qwen3_next", replace(family, head=replace(family.head, takes_normed=False)))
    model = headed("qwen3_next", dtype=mx.float32)  # a new model: on a GPU the compiled step would remember the field
    want = [token for token, _ in generate_step(PROMPT, headed("qwen3_next", draft="off"), max_tokens=8)]
    seen, add = [], HeadDrafts.add

    def noted(self, token, hidden=None):
        seen.append(hidden)
        add(self, token, hidden)

    monkeypatch.setattr(HeadDrafts, "add", noted)
    assert [token for token, _ in generate_step(PROMPT, model, max_tokens=8)] == want
    last = next(one for one in seen if one is not None)
    normed = np.array(model.hidden(mx.array([[*PROMPT, want[0]]])))[0, -1]
    assert not np.allclose(np.array(last)[0, 0], normed, atol=1e-3)
    assert np.allclose(np.array(model.model.norm(last))[0, 0], normed, atol=1e-3)


def test_the_demo_models_head_is_mostly_right():
    """On the model's own text, a head that is given wrong states is mostly wrong."""
    (model, tokenizer), (plain, _) = load(dtype=mx.float32, draft="auto"), load(dtype=mx.float32)
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": "Tell me a story about Tom."}])
    model.drafting = Drafting("head", 1, fixed=True)
    said = [token for token, _ in generate_step(prompt, model, max_tokens=80)]
    assert said == [token for token, _ in generate_step(prompt, plain, max_tokens=80)]
    assert model.drafting.taken > 0.6 * model.drafting.checked > 20


def test_drafts_share_steps_with_a_head(monkeypatch):
    """Accepted drafts share a step and are marked."""
    model = headed("qwen3_next")
    want = [token for token, _ in generate_step(PROMPT, headed("qwen3_next", draft="off"), max_tokens=11)]
    guide(monkeypatch, [[*PROMPT, *want]], (True,))
    assert [token for token, _ in generate_step(PROMPT, model, max_tokens=11)] == want
    assert model.drafting.checked == model.drafting.taken >= 7  # a GPU is a token ahead when drafts begin
    assert max(itertools.compress(range(5), model.drafting.steps)) == 4

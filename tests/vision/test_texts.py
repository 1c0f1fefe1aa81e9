"""Images among the tokens of a text: places and positions, reuse, saving, stopping. The rows are random."""

import json
from dataclasses import replace

import goldens
import mlx.core as mx
import numpy as np
import pytest
from driving import Stopped, absorb_into
from grids import marks
from hypothesis import given, settings
from hypothesis import strategies as st
from image_models import random_image
from test_drafts import Told, choice, said_by
from test_drafts import same as same_bits
from tiny_heads import headed_directory
from tiny_models import tiny_directory, tiny_model

from moeflux_mlx import PromptDirectory, batch_generate, model_fingerprint, save_state, stream_generate
from moeflux_mlx.driving import decoding, head_drafts
from moeflux_mlx.driving.head_drafts import HeadDrafts
from moeflux_mlx.driving.prompt import FIRST_KEY, Prompt, with_images
from moeflux_mlx.driving.session import Session
from moeflux_mlx.errors import PromptCacheError, RequestError, SnapshotError
from moeflux_mlx.model.drafting import Drafting
from moeflux_mlx.model.images import Images
from moeflux_mlx.model.step import SequenceRows
from moeflux_mlx.opening.engine import load_model
from moeflux_mlx.ops import backend
from moeflux_mlx.state.prompt_file import _shifts, read_prompt_header
from moeflux_mlx.text.tokenizer import load_tokenizer
from moeflux_mlx.vision.pixels import Processor
from moeflux_mlx.vision.reader import ReadImage

ROW = 245
FAMILY = "qwen3_5_moe"  # some of its layers cannot be cut


def prompt_of(family, *seeds, tail=6, grid=(3, 4)):
    """Returns a text, then an image for each seed, each followed by text."""
    draw, tokens = np.random.default_rng(0), []
    for _ in seeds:
        tokens += [*draw.integers(0, 240, 9).tolist(), ROW]
    tokens += draw.integers(0, 240, tail).tolist()
    by_axes = tiny_model(family, mx.float32).args.attention.rotation.axes is not None
    return with_images(tokens, [random_image(family, seed, grid, by_axes=by_axes) for seed in seeds], ROW)


def make(family=FAMILY, **options):
    return Session(tiny_model(family, mx.float32), load_tokenizer(tiny_directory(family)), **options)


def answer(session, prompt, n=4, **options):
    return [(one.token, np.array(one.logprobs)) for one in session.respond(prompt, max_tokens=n, **options)]


def same(ours, theirs, atol=2e-4):
    assert [token for token, _ in ours] == [token for token, _ in theirs]
    for (_, one), (_, other) in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(one, other, atol=atol)


# ---- places and positions


def slow_positions(images, length, by):
    """Counts positions token by token, as transformers' `get_rope_index` does."""
    rows, position, place = [], by, 0
    starts = dict(images)
    while place < length:
        image = starts.get(place)
        if image is None:
            rows.append((position,) * 3)
            place, position = place + 1, position + 1
            continue
        down, across = image.grid
        rows += [(position, position + r, position + c) for r in range(down) for c in range(across)]
        place, position = place + image.length, position + max(down, across)
    return np.array(rows)[:length].T, position - place


@settings(max_examples=30)
@given(st.data())
def test_positions_are_those_of_transformers_wherever_a_text_is_cut(data):
    placed, place = [], 0
    for seed in range(data.draw(st.integers(1, 3))):
        place += data.draw(st.integers(0, 4))
        grid = data.draw(st.tuples(st.integers(1, 4), st.integers(1, 5)))
        placed.append((place, random_image(FAMILY, seed, grid)))
        place += grid[0] * grid[1]
    by = data.draw(st.integers(-3, 9))
    length = place + data.draw(st.integers(1, 4))
    images = Images(placed, by)
    wanted, last = slow_positions(placed, length, by)
    cuts = sorted({0, length, *data.draw(st.lists(st.integers(1, length - 1), max_size=4))})
    shift = by
    for start, end in zip(cuts, cuts[1:], strict=False):
        positions = images.positions(start, end)
        if positions is None:
            positions = np.repeat(np.arange(start, end)[None] + shift, 3, axis=0)
        np.testing.assert_array_equal(positions, wanted[:, start:end])
        shift = ([shift] + [by for _, by in images.shifts(start, end)])[-1]
    assert shift == last


def test_keys_depend_on_the_image_and_are_beyond_any_vocabulary():
    one, again, other = (prompt_of(FAMILY, seed) for seed in (1, 1, 2))
    assert one == again and one != other and one.tokens.tolist() == other.tokens.tolist()
    keys = [key for key in one if key >= FIRST_KEY]
    assert len(set(keys)) == 12 and not set(keys) & set(other)
    assert max(one.tokens.tolist()) < 256


def test_images_of_the_same_bytes_in_other_sizes_differ():
    """The bytes are those of a black picture."""
    processor = Processor("area", 2, 1, 1, 1, 1 << 10, (0.5,) * 3, (0.5,) * 3)

    def black(*size, **more):
        return ReadImage(np.zeros((*size, 3), np.uint8), replace(processor, **more), by_axes=False)

    images = [black(4, 6), black(6, 4), black(2, 12), black(4, 6, patch=1), black(4, 6, mean=(0.4,) * 3)]
    assert len({image.digest for image in images}) == 5 and black(4, 6).digest == images[0].digest


def test_as_many_images_as_places():
    with pytest.raises(RequestError, match="2 places for images, but 1 images were given"):
        with_images([1, ROW, ROW], [random_image(FAMILY)], ROW)


# ---- sessions


ALSO = [pytest.param(family, marks=marks(False)) for family in ("deepseek_v3", "gpt_oss")]


@pytest.mark.parametrize("family", ["qwen3_moe", FAMILY, *ALSO])
def test_a_prefix_with_another_image_is_another_prefix(family):
    session, prompt = make(family), prompt_of(family, 1, 2)
    first = answer(session, prompt)
    images = [image for _, image in prompt.images.placed]
    assert all(image.asked and image.forgotten == 1 for image in images)
    same(answer(session, prompt_of(family, 1, 2)), first)
    reused = session.reuse.memory
    assert reused == len(prompt) - 1 if session.points.can_trim else reused > 9
    other = prompt_of(family, 1, 3)
    got = answer(session, other)
    assert session.reuse.memory <= 9 + 12 + 9, "up to the image that is another"
    same(got, answer(make(family), other))
    assert np.abs(got[0][1] - first[0][1]).max() > 1e-2


def test_a_text_continues_after_its_image_without_encoding_it_again():
    session, prompt = make(), prompt_of(FAMILY, 1)
    said = answer(session, prompt)
    longer = prompt_of(FAMILY, 1)
    more = [*longer.tokens.tolist(), *(token for token, _ in said[:-1]), 3, 4, 5]
    fresh = Prompt(mx.array(more, mx.uint32), longer.images)
    image = longer.images.placed[0][1]
    got = answer(session, fresh)
    assert session.reuse.computed == 3 and not image.asked
    same(got, answer(make(), fresh))
    assert session.cache[0].position - session.cache[0].offset == 4 - 12


@pytest.mark.parametrize("family", [FAMILY, pytest.param("qwen3_moe", marks=marks(False))])
def test_a_prompt_that_is_stopped_within_an_image_continues_there(family):
    session, prompt = make(family, span=8), prompt_of(family, 1)

    def stop(done, total):
        if done >= 15:
            raise Stopped

    with pytest.raises(Stopped):
        absorb_into(session, prompt, stop)
    assert 9 < len(session.tokens) < 21, "within the image"
    same(answer(session, prompt), answer(make(family, span=8), prompt), atol=0)


def after(session, token):
    """The logits after one more token."""
    return np.array(session.model.step([SequenceRows(session.cache, [token])]).logits)


def test_texts_decode_together_as_alone():
    model, tokenizer = tiny_model(FAMILY, mx.float32), load_tokenizer(tiny_directory(FAMILY))
    prompts = [prompt_of(FAMILY, 1), prompt_of(FAMILY, 2, 3), Prompt(mx.array([5, 6, 7], mx.uint32))]
    together = batch_generate(model, tokenizer, prompts, max_tokens=5, return_token_ids=True).token_ids
    for prompt, tokens in zip(prompts, together, strict=True):
        alone = [one.token for one in stream_generate(model, tokenizer, prompt, max_tokens=5)]
        assert tokens == [token for token in alone if token not in tokenizer.eos_token_ids]


def test_a_prompt_after_what_a_cache_has_seen():
    model, tokenizer = tiny_model(FAMILY, mx.float32), load_tokenizer(tiny_directory(FAMILY))
    whole, cache = prompt_of(FAMILY, 1, 2), model.make_cache()
    alone = [np.array(one.logprobs) for one in stream_generate(model, tokenizer, whole, max_tokens=3)]
    first = prompt_of(FAMILY, 1, tail=0)
    second = Prompt(
        whole.tokens[len(first) :], Images([(place - len(first), one) for place, one in whole.images.placed[1:]])
    )
    list(stream_generate(model, tokenizer, first, max_tokens=1, prompt_cache=cache))
    got = [
        np.array(one.logprobs) for one in stream_generate(model, tokenizer, second, max_tokens=3, prompt_cache=cache)
    ]
    for one, other in zip(got, alone, strict=True):
        np.testing.assert_allclose(one, other, atol=2e-4)


# ---- drafts


class GuidedHead(HeadDrafts):
    """Computes its proposals, and returns given ones."""

    told: Told

    def propose(self, count):
        self.told.text = list(self.tokens)
        return self.told.propose(count) if len(super().propose(count)) else []


@pytest.mark.parametrize("kind", ["lookup", "head"])
def test_drafts_behind_images_change_no_bit(monkeypatch, kind):
    """There are two turns with an image each. The second one reuses the first, and every third draft is wrong."""
    headed = load_model(headed_directory(FAMILY), dtype=mx.float32, draft="head")
    answers, checked = [], []
    drafting, off = Drafting(kind, most=2, fixed=True), Drafting()
    told = lambda text: Told(text, answers, (True, True, False))  # noqa: E731
    monkeypatch.setattr(decoding, "Lookup", told)
    monkeypatch.setattr(head_drafts, "HeadDrafts", GuidedHead)
    monkeypatch.setattr(GuidedHead, "told", told([]), raising=False)
    tokenizer = load_tokenizer(tiny_directory(FAMILY))

    def session(how):
        headed.drafting = how
        return Session(headed, tokenizer, checkpoint_every=8)

    def said(session, how, count, stop, seed):
        headed.drafting = how
        return said_by(session, prompt, count, stop, **choice(seed))

    with_drafts, without = session(drafting), session(off)
    for seed, prompt in [(None, prompt_of(FAMILY, 1)), (3, prompt_of(FAMILY, 1, 2))]:
        known = prompt if kind == "head" else prompt.tokens.tolist()
        answers[:] = [[*known, *(token for token, _ in said(session(off), off, 7, 7, seed))]]
        want, got = said(without, off, 7, 5, seed), said(with_drafts, drafting, 7, 5, seed)
        assert same_bits(got, want) and with_drafts.tokens == without.tokens
        assert with_drafts.cache[0].position == without.cache[0].position
        assert with_drafts.reuse == without.reuse
        checked.append(drafting.checked)
    assert with_drafts.reuse.memory > 9 + 12, "up to what is said behind the first image"
    assert 0 < checked[0] < checked[1] and 0 < drafting.taken < drafting.checked
    assert np.array_equal(after(with_drafts, 7), after(without, 7))


@pytest.mark.skipif(backend.has_kernels(), reason="a GPU is a token ahead when drafts begin")
def test_an_image_that_was_looked_up_is_no_draft_that_is_taken(monkeypatch):
    """An image follows the end of the text. The model would say its tokens if it said what is proposed."""
    model, tokenizer = tiny_model(FAMILY, mx.float32), load_tokenizer(tiny_directory(FAMILY))
    prompt = with_images([5, 6, ROW, 7, 8, 5], [random_image(FAMILY, 1)], ROW)
    always = lambda logprobs: mx.array([6])  # noqa: E731
    want = said_by(Session(model, tokenizer), prompt, 3, 3, sampler=always)
    drafting = Drafting("lookup", fixed=True)
    monkeypatch.setattr(model, "drafting", drafting)
    got = said_by(Session(model, tokenizer), prompt, 3, 3, sampler=always)
    assert same_bits(got, want) and drafting.checked and not drafting.taken


# ---- on disk


def store(tmp_path, family):
    fingerprint = model_fingerprint(tiny_directory(family), mx.float32)
    return PromptDirectory(tmp_path, fingerprint)


@pytest.mark.parametrize("family", [FAMILY, pytest.param("qwen3_moe", marks=marks(False))])
def test_a_saved_prompt_is_found_by_its_images(tmp_path, family):
    prompt = prompt_of(family, 1, 2)
    wanted = answer(make(family, store=store(tmp_path, family)), prompt)
    files = list(tmp_path.glob("*.prompt"))
    shifts = read_prompt_header(files[0]).shifts
    by_axes = tiny_model(family, mx.float32).args.attention.rotation.axes is not None
    assert len(files) == 1 and shifts == (((21, -8), (42, -16)) if by_axes else ())
    session = make(family, store=store(tmp_path, family))
    same(answer(session, prompt_of(family, 1, 2)), wanted)
    assert session.reuse.disk == len(prompt) - 1
    other = make(family, store=store(tmp_path, family))
    same(answer(other, prompt_of(family, 3, 2)), answer(make(family), prompt_of(family, 3, 2)))
    assert other.reuse.disk <= 9


def test_a_session_is_saved_with_its_positions(tmp_path):
    session, prompt = make(), prompt_of(FAMILY, 1)
    answer(session, prompt)
    fingerprint = model_fingerprint(tiny_directory(FAMILY), mx.float32)
    session.save(tmp_path / "text", fingerprint, {})
    other = make()
    other.load(tmp_path / "text", fingerprint)
    assert other.tokens == session.tokens
    assert np.array_equal(after(other, 7), after(session, 7))
    with pytest.raises(SnapshotError, match="as after an image, and a snapshot cannot say so"):
        save_state(session.model, session.cache)


@pytest.mark.parametrize("pairs", [None, [[1]], [[1, "x"]], [[True, 2]], [[5, -9]], [[99, 0]], [[3, 1 << 30]], {}])
def test_damaged_shifts_are_refused(tmp_path, pairs):
    with pytest.raises(PromptCacheError, match="damaged"):
        _shifts(tmp_path, json.loads(json.dumps(pairs)), 20)


def test_hidden_size_of_the_stand_ins():
    assert random_image(FAMILY).rows(None).embeddings.shape == (12, goldens.text_config(FAMILY)["hidden_size"])

"""Texts with images compared with transformers: pixels and every logit, for any cut and every source of experts."""

import itertools

import image_goldens
import mlx.core as mx
import numpy as np
import pytest
from driving import absorbed
from grids import drawn, marks
from image_models import golden_prompt, image_directory, needs_encoder, quantised_in_place
from tiny_models import use_plain_operations

from moeflux_mlx.driving.prefill import Prefill
from moeflux_mlx.experts.routing import finished
from moeflux_mlx.model import images
from moeflux_mlx.model.span import Span
from moeflux_mlx.opening.engine import load_model
from moeflux_mlx.ops import backend
from moeflux_mlx.packing.located import Located
from moeflux_mlx.vision.vision import open_reader

pytestmark = needs_encoder
TOLERANCE = 5e-4 if backend.has_kernels() else 2e-4
FAMILIES = image_goldens.FAMILIES
CUTS = [{}, {"block": 7}, {"span": 9}, {"span": 5, "block": 1}]


@pytest.fixture(scope="module")
def models():
    """Makes the model of each family when it is requested."""
    made = {}

    def model(family):
        if family not in made:
            made[family] = load_model(image_directory(family), dtype=mx.float32)
        return made[family]

    return model


def logits_of(model, prompt):
    """Returns the logits [T, V] of a prompt that is computed in one call."""
    cache = model.make_cache()
    span = Span(prompt.tokens[None], 0, 4096, images=prompt.images)
    finished(model.advance(span, cache))
    return np.array(backend.leave(model.lm_head(model.model.normed(span.hidden)))[0].astype(mx.float32))


def error(model, family, count=2):
    prompt, wanted = golden_prompt(family, model.vision, count)
    return np.abs(logits_of(model, prompt) - wanted).max()


@pytest.mark.parametrize("family", FAMILIES)
def test_pixels_are_those_of_transformers(models, family):
    vision, stored = models(family).vision, image_goldens.stored(family)
    processor = vision.reader.processor
    mean, deviation = (np.array(values)[:, None, None] for values in (processor.mean, processor.deviation))
    for number in range(2):
        image = vision.image(image_goldens.png(family, number))
        patches = processor.patches(image.levels)
        levels = (patches if patches.ndim == 4 else patches[:, :, 0]) * deviation + mean
        np.testing.assert_array_equal(np.rint(levels * 255), stored[f"pixels{number}"])
        _, down, across = stored[f"grid{number}"]
        assert image.length * 4 == down * across and image.grid in (None, (down // 2, across // 2))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_reader_without_the_encoder_reads_what_the_model_encodes(models, family):
    model, path = models(family), image_directory(family)
    reader = open_reader(Located(path))
    prompt, wanted = golden_prompt(family, reader, 2)
    assert prompt == golden_prompt(family, model.vision, 2)[0]
    assert np.abs(logits_of(model, prompt) - wanted).max() < TOLERANCE


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("count", [pytest.param(1, marks=marks(False)), 2])
def test_logits_match_hugging_face(models, family, count):
    assert error(models(family), family, count) < TOLERANCE


@pytest.mark.parametrize("family, cut, computing", drawn(FAMILIES, CUTS, ["native", "plain operations"]))
def test_any_cut_gives_them_and_text_goes_on(monkeypatch, models, family, cut, computing):
    """Compares the last logits, and those of the tokens after the last image, which are computed one by one."""
    if computing == "plain operations":
        use_plain_operations(monkeypatch)
    model = models(family)
    prompt, wanted = golden_prompt(family, model.vision, 2)
    behind, cache = len(prompt) - 3, model.make_cache()
    last = absorbed(Prefill(model, cache, prompt.tokens[:behind], images=prompt.images, **cut))
    outputs = [last, *(model(prompt.tokens[i : i + 1][None], cache)[:, -1] for i in range(behind, len(prompt)))]
    got = np.array(mx.concatenate(outputs).astype(mx.float32))
    np.testing.assert_allclose(got, wanted[behind - 1 :], atol=TOLERANCE)


WHERE = [("qwen3_5_moe", "pread"), ("glm4v_moe", "resident"), ("kimi_k25", "in place")]


@pytest.mark.parametrize(
    "family, expert_io",
    [
        pytest.param(family, where, marks=marks((family, where) in WHERE))
        for family, where in itertools.product(FAMILIES, ["pread", "resident", "in place"])
    ],
)
def test_wherever_experts_are(models, family, expert_io):
    path = image_directory(family)
    if expert_io == "in place":
        model = load_model(quantised_in_place(family), dtype=mx.float32)
    else:
        model = load_model(path, dtype=mx.float32, expert_io=expert_io)
    prompt, _ = golden_prompt(family, models(family).vision, 2)
    assert np.array_equal(logits_of(model, prompt), logits_of(models(family), prompt))


# ---- mistakes, each of which must exceed the tolerance


def deaf(*names):
    def forget(monkeypatch):
        for name in names:
            monkeypatch.setattr(images.Images, name, FORGOTTEN[name])

    return forget


FORGOTTEN = {
    "positions": lambda self, start, end: None,
    "shifts": lambda self, start, end: [],
    "deepened": lambda self, hidden, start, layer, encoder: hidden,
    "embedded": lambda self, hidden, start, encoder: hidden,
}
BY_AXES = ("qwen3_vl_moe", "qwen3_5_moe", "glm4v_moe")
MISTAKES = [*((family, "positions") for family in BY_AXES), ("kimi_k25", "embedded"), ("qwen3_vl_moe", "deepened")]


@pytest.mark.parametrize("family, name", MISTAKES)
def test_omissions_show(monkeypatch, models, family, name):
    deaf(name)(monkeypatch)
    assert error(models(family), family) > 10 * TOLERANCE


@pytest.mark.parametrize("family", BY_AXES)
def test_positions_after_an_image_that_are_places_show(monkeypatch, models, family):
    monkeypatch.setattr(images.Images, "shifts", FORGOTTEN["shifts"])
    model = models(family)
    prompt, wanted = golden_prompt(family, model.vision, 1)
    cache, behind = model.make_cache(), len(prompt) - 2
    absorbed(Prefill(model, cache, prompt.tokens[:behind], images=prompt.images))
    got = np.array(model(prompt.tokens[behind : behind + 1][None], cache)[0, -1].astype(mx.float32))
    assert np.abs(got - wanted[behind]).max() > 10 * TOLERANCE


def test_axes_in_another_order_show(monkeypatch, models):
    positions = images.Images.positions
    monkeypatch.setattr(
        images.Images, "positions", lambda *args: None if (axes := positions(*args)) is None else axes[::-1].copy()
    )
    assert error(models("qwen3_vl_moe"), "qwen3_vl_moe") > 10 * TOLERANCE

"""Models with images that are not downloaded yet, and models with images on several ranks."""

import re
from contextlib import nullcontext
from types import SimpleNamespace

import image_goldens
import mlx.core as mx
import pytest
from grids import marks
from image_models import image_directory, needs_encoder, quantised_in_place
from small_hub import SmallHub, connected

from moeflux_mlx.driving.prompt import prompt_with_images
from moeflux_mlx.errors import BadRequestError, RequestError
from moeflux_mlx.experts.routed import RoutedExperts
from moeflux_mlx.generate.__main__ import main as generate
from moeflux_mlx.opening.engine import open_engine
from moeflux_mlx.packing.resident import ASIDE
from moeflux_mlx.plan import main as plan
from moeflux_mlx.server.prepare import Defaults, Preparer
from moeflux_mlx.server.request import Sampling
from moeflux_mlx.server.wire import chat

FAMILY = "qwen3_vl_moe"
REFUSED = "^images are off on several ranks; start one$"


def in_plan(capfd, model, *more):
    """Returns the lines of a plan, except those of the download and of a GPU's free memory, which others share."""
    assert plan(["--model", model, "--dtype", "float32", *more]) == 0
    out = re.sub(r".*free GPU memory.*", "", capfd.readouterr().out)
    return [line for line in out.splitlines() if not line.startswith("org/model: ")]


@needs_encoder
@pytest.mark.parametrize(
    "directory, more",
    [
        (image_directory, []),
        (quantised_in_place, []),
        pytest.param(image_directory, ["--no-vision"], marks=marks(False)),
    ],
)
def test_the_encoder_is_planned_from_headers(tmp_path, capfd, directory, more):
    path = directory(FAMILY)
    with SmallHub(path) as hub, connected(hub, tmp_path / "cache"):
        there = in_plan(capfd, "org/model", *more)
        assert not hub.fetched()
    assert there == in_plan(capfd, str(path), *more)


@needs_encoder
def test_a_model_that_was_downloaded_reads_images(tmp_path, capfd):
    path, picture = image_directory(FAMILY), tmp_path / "0.png"
    picture.write_bytes(image_goldens.png(FAMILY, 0))
    asked = ["--prompt", "what is it?", "--max-tokens", "3", "--image", str(picture), "--dtype", "float32"]
    with SmallHub(path) as hub, connected(hub, tmp_path / "cache"):
        assert generate([*asked, "--model", "org/model", "--image-tokens", "0"]) == 1
        assert "image_tokens is 0" in capfd.readouterr().err and not hub.fetched()
        assert generate([*asked, "--model", "org/model"]) == 0
        assert ASIDE in hub.fetched()


class Company:
    """A company of one process."""

    def io_mode(self, asked, weights):
        return asked

    def meet(self, weights, planner, dtype, bits):
        experts = lambda source, prefetch: RoutedExperts(source, prefetch)  # noqa: E731
        planned = planner.plan()
        return SimpleNamespace(plan=planned, experts=experts, loading=lambda nbytes: nullcontext())


def test_several_ranks_read_no_images_and_plan_none():
    engine = open_engine(image_directory(FAMILY), dtype=mx.float32, ranks=Company())
    without = open_engine(image_directory(FAMILY), dtype=mx.float32, vision=False)
    assert engine.plan.demand == without.plan.demand
    with pytest.raises(RequestError, match=REFUSED):
        prompt_with_images([1, 2], image_goldens.png(FAMILY, 0), engine.model)
    defaults = Defaults(Sampling(temperature=0.0), {})
    prepare = Preparer(engine.tokenizer, 256, 4096, defaults, engine.model.vision)
    content = [{"type": "image_url", "image_url": {"url": "http://127.0.0.1/a.png"}}, {"type": "text", "text": "?"}]
    with pytest.raises(BadRequestError, match=REFUSED):
        prepare(chat.read({"messages": [{"role": "user", "content": content}]}))

"""What the server says about a model, so that a client offers only what the model has."""

import json

import pytest
from live_server import FakeEngine, Live, demo_engine, tokenizer_of

from moeflux_mlx.server.choice import Features, features_of
from moeflux_mlx.server.prepare import Defaults, Preparer
from moeflux_mlx.server.request import Sampling


def features(template, vision=None):
    tokenizer = tokenizer_of(template)
    return features_of(Preparer(tokenizer, 256, 4096, Defaults(Sampling(), {}), vision))


@pytest.mark.parametrize(
    "template, thinking, efforts",
    [
        ("qwen35_style", True, []),
        ("minimax_style", False, []),
        ("minimax3_style", True, []),
        ("mistral_style", True, []),
        ("hunyuan_style", True, ["low", "high"]),
        ("nemotron_style", True, ["low", "high"]),
        ("qwen38_style", True, ["low", "medium", "xhigh"]),
        ("harmony_style", False, ["low", "medium", "high"]),
        ("glm53_style", False, ["low", "high", "max"]),
    ],
)
def test_a_template_has_a_switch_for_reasoning_and_words_for_its_effort(template, thinking, efforts):
    assert features(template) == Features(demo=False, images=False, thinking=thinking, efforts=efforts)


def test_images_need_an_encoder():
    assert features("qwen35_style", vision=object()).images


def test_the_list_of_models_has_the_features_of_those_that_have_been_loaded():
    loads = {"told": lambda: FakeEngine(lambda prompt: "yes"), "other": demo_engine}
    with Live(loads) as live:
        assert listed(live) == [{"demo": False, "images": False, "thinking": True, "efforts": []}, None]
        hello = [{"role": "user", "content": "Hi"}]
        live.post("/v1/chat/completions", {"model": "other", "messages": hello, "max_tokens": 1})
        assert listed(live)[1] == {"demo": True, "images": False, "thinking": False, "efforts": []}


def listed(live):
    return [model["features"] for model in json.loads(live.get("/v1/models"))["data"]]

"""What mlx-lm's users type: its functions and arguments exist, or an error and the manual say what replaces them."""

import inspect
import re
from pathlib import Path

import mlx.core as mx
import pytest
from tiny_models import tiny_directory

import moeflux_mlx
from moeflux_mlx.engine.keywords import REPLACED, WITHOUT_INFLUENCE
from moeflux_mlx.public import REPLACED_NAMES

MANUAL = (Path(__file__).resolve().parents[2] / "docs" / "library.md").read_text(encoding="utf-8")
DIFFERENCES = MANUAL[MANUAL.index("\n## What differs from mlx-lm\n") :].split("\n## ")[1]
FUNCTIONS = {
    "load": ("mlx_lm.utils", "load"),
    "load_model": ("mlx_lm.utils", "load_model"),
    "generate": ("mlx_lm.generate", "generate", "stream_generate", "generate_step", "speculative_generate_step"),
    "stream_generate": ("mlx_lm.generate", "stream_generate", "generate_step", "speculative_generate_step"),
    "batch_generate": ("mlx_lm.generate", "batch_generate", "BatchGenerator"),
    "BatchGenerator": ("mlx_lm.generate", "BatchGenerator"),
    "make_sampler": ("mlx_lm.sample_utils", "make_sampler"),
    "make_logits_processors": ("mlx_lm.sample_utils", "make_logits_processors"),
    "make_prompt_cache": ("mlx_lm.models.cache", "make_prompt_cache"),
}


@pytest.fixture(scope="module")
def loaded():
    return moeflux_mlx.load(tiny_directory("qwen3_moe"), dtype=mx.float32)


def parameters(function):
    return {
        name: one for name, one in inspect.signature(function).parameters.items() if one.kind is not one.VAR_KEYWORD
    }


@pytest.mark.parametrize("function", FUNCTIONS)
def test_every_argument_of_mlx_lm_exists_or_is_replaced(function):
    module, *names = FUNCTIONS[function]
    peers = [getattr(pytest.importorskip(module), name) for name in names]
    theirs = set().union(*map(parameters, peers)) - {"model_path"}  # the name of a positional argument
    missing = theirs - set(parameters(getattr(moeflux_mlx, function)))
    assert missing <= set(REPLACED)
    assert [name for name in missing if f"`{name}`" not in DIFFERENCES] == []


def test_every_replaced_argument_is_one_of_mlx_lm():
    peers = [getattr(pytest.importorskip(module), name) for module, *names in FUNCTIONS.values() for name in names]
    assert set(REPLACED) <= set().union(*map(parameters, peers)) and set(REPLACED) > WITHOUT_INFLUENCE


def test_every_function_for_caches_exists_or_is_replaced():
    theirs = pytest.importorskip("mlx_lm.models.cache")
    public = {name for name, one in vars(theirs).items() if inspect.isfunction(one) and name.endswith("_prompt_cache")}
    assert public - set(moeflux_mlx.__all__) == set(REPLACED_NAMES)
    for name, remedy in REPLACED_NAMES.items():
        assert f"`{name}`" in DIFFERENCES
        with pytest.raises(ImportError, match=re.escape(f"moeflux_mlx has no {name}: {remedy}")):
            exec(f"from moeflux_mlx import {name}")


def test_the_first_arguments_stand_where_mlx_lm_has_them():
    for function in ("generate", "stream_generate", "batch_generate", "make_prompt_cache", "make_sampler"):
        module, name, *_ = FUNCTIONS[function]
        peer = getattr(pytest.importorskip(module), name)
        ours, theirs = (
            [one.name for one in parameters(each).values() if one.kind is one.POSITIONAL_OR_KEYWORD]
            for each in (getattr(moeflux_mlx, function), peer)
        )
        assert ours == theirs[: len(ours)], function


def test_help_shows_what_is_passed_on():
    for function in (moeflux_mlx.generate, moeflux_mlx.stream_generate):
        assert {"max_tokens", "sampler", "image", "prompt_cache", "span"} < set(parameters(function))
    assert {"samplers", "completion_batch_size", "span"} < set(parameters(moeflux_mlx.batch_generate))


CALLS = {
    "load": lambda model, tokenizer, **more: moeflux_mlx.load(tiny_directory("qwen3_moe"), **more),
    "load_model": lambda model, tokenizer, **more: moeflux_mlx.load_model(tiny_directory("qwen3_moe"), **more),
    "generate": lambda model, tokenizer, **more: moeflux_mlx.generate(model, tokenizer, "a", max_tokens=1, **more),
    "stream_generate": lambda model, tokenizer, **more: list(
        moeflux_mlx.stream_generate(model, tokenizer, "a", 1, **more)
    ),
    "batch_generate": lambda model, tokenizer, **more: moeflux_mlx.batch_generate(
        model, tokenizer, ["a"], max_tokens=1, **more
    ),
    "BatchGenerator": lambda model, tokenizer, **more: moeflux_mlx.BatchGenerator(model, **more),
    "make_sampler": lambda model, tokenizer, **more: moeflux_mlx.make_sampler(**more),
    "make_prompt_cache": lambda model, tokenizer, **more: moeflux_mlx.make_prompt_cache(model, **more),
}


@pytest.mark.parametrize("function", CALLS)
def test_a_wrong_keyword_names_the_function_that_was_called(function, loaded):
    with pytest.raises(TypeError, match=rf"^{function}\(\) has no argument 'no_such'; it takes "):
        CALLS[function](*loaded, no_such=1)


@pytest.mark.parametrize(
    "function, wrong, right",
    [
        ("generate", "max_token", "max_tokens"),
        ("stream_generate", "processors", "logits_processors"),
        ("batch_generate", "logit_processors", "logits_processors"),
        ("load", "expert_cache", "expert_cache_bytes"),
        ("make_sampler", "temperature", "temp"),
    ],
)
def test_the_nearest_argument_is_named(function, wrong, right, loaded):
    with pytest.raises(TypeError, match=rf"^{function}\(\) has no argument '{wrong}'; did you mean {right}\?$"):
        CALLS[function](*loaded, **{wrong: 1})


def test_what_replaces_an_argument_of_mlx_lm_is_named(loaded):
    with pytest.raises(TypeError, match=r"^generate\(\) has no argument 'kv_bits': .*load\(kv_bits=8\)$"):
        CALLS["generate"](*loaded, kv_bits=4)
    with pytest.raises(TypeError, match=r"^load\(\) has no argument 'adapter_path': .*mlx_lm\.fuse$"):
        CALLS["load"](*loaded, adapter_path="adapters")
    with pytest.raises(moeflux_mlx.RequestError, match=r"^max_kv_size is 4096; caches keep every position"):
        moeflux_mlx.make_prompt_cache(loaded[0], 4096)


def test_what_asks_for_nothing_is_accepted(loaded):
    nothing = {"max_kv_size": None, "kv_bits": None, "kv_group_size": 64, "quantized_kv_start": 5000}
    assert CALLS["generate"](*loaded, **nothing) == CALLS["generate"](*loaded)
    model, _ = CALLS["load"](*loaded, tokenizer_config={}, lazy=False, adapter_path=None)
    model.experts.close()


def test_a_list_of_texts_is_encoded_as_one_text_is(loaded):
    texts = ["Once upon", "a", "<|im_start|>user"]
    together = moeflux_mlx.batch_generate(*loaded, texts, max_tokens=5).texts
    assert together == [moeflux_mlx.generate(*loaded, text, max_tokens=5) for text in texts]

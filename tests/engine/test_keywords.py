"""What mlx-lm's users type: its functions and arguments exist, or an error and the manual say what replaces them."""

import inspect
import re
import typing
from pathlib import Path

import mlx.core as mx
import pytest
from tiny_models import tiny_directory

import moeflux_mlx
from moeflux_mlx.driving.batch_generation import BatchGenerator, BatchOptions
from moeflux_mlx.driving.generation import GenerationOptions, generate_step
from moeflux_mlx.foreign import BATCHES, GENERATION, LOADING, REPLACED_NAMES

MANUAL = (Path(__file__).resolve().parents[2] / "docs" / "library.md").read_text(encoding="utf-8")
DIFFERENCES = MANUAL[MANUAL.index("\n## What differs from mlx-lm\n") :].split("\n## ")[1]
STEPS = ("generate_step", "speculative_generate_step")
# Our function: the arguments of mlx-lm that are replaced, and mlx-lm's functions that take the same calls.
FUNCTIONS = {
    "load": (LOADING, "mlx_lm.utils", "load"),
    "load_model": (LOADING, "mlx_lm.utils", "load_model"),
    "generate": (GENERATION, "mlx_lm.generate", "generate", "stream_generate", *STEPS),
    "stream_generate": (GENERATION, "mlx_lm.generate", "stream_generate", *STEPS),
    "batch_generate": (BATCHES, "mlx_lm.generate", "batch_generate", "BatchGenerator"),
    "BatchGenerator": (BATCHES, "mlx_lm.generate", "BatchGenerator"),
    "make_sampler": ({}, "mlx_lm.sample_utils", "make_sampler"),
    "make_logits_processors": ({}, "mlx_lm.sample_utils", "make_logits_processors"),
    "make_prompt_cache": ({}, "mlx_lm.models.cache", "make_prompt_cache"),
}
UNNAMED = ("stream", "get_model_classes", "draft_model")  # their defaults in mlx-lm are objects, or there is none


@pytest.fixture(scope="module")
def loaded():
    return moeflux_mlx.load(tiny_directory("qwen3_moe"), dtype=mx.float32)


def parameters(function):
    return {
        name: one for name, one in inspect.signature(function).parameters.items() if one.kind is not one.VAR_KEYWORD
    }


@pytest.mark.parametrize("function", FUNCTIONS)
def test_every_argument_of_mlx_lm_exists_or_is_replaced(function):
    replaced, module, *names = FUNCTIONS[function]
    theirs = {}
    for name in reversed(names):
        theirs |= parameters(getattr(pytest.importorskip(module), name))
    ours = parameters(getattr(moeflux_mlx, function))
    missing = set(theirs) - set(ours) - {"model_path"}  # the name of a positional argument
    assert missing <= set(replaced)
    assert [name for name in missing if f"`{name}`" not in DIFFERENCES] == []
    defaults = {name: theirs[name].default for name in missing if name not in UNNAMED}
    assert defaults == {name: replaced[name].default for name in defaults}


def test_every_replaced_argument_is_one_of_mlx_lm():
    for table in (LOADING, GENERATION, BATCHES):
        peers = [
            getattr(pytest.importorskip(module), name)
            for replaced, module, *names in FUNCTIONS.values()
            for name in names
            if replaced is table
        ]
        assert set(table) <= set().union(*map(parameters, peers))


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
        _, module, name, *_ = FUNCTIONS[function]
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
    first = next(iter(parameters(getattr(moeflux_mlx, function))))
    with pytest.raises(TypeError, match=rf"^{function}\(\) has no argument 'no_such'; it takes {first}"):
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


def test_the_default_of_mlx_lm_is_accepted_and_no_other_value(loaded):
    nothing = {"max_kv_size": None, "kv_bits": None, "kv_group_size": 64, "quantized_kv_start": 5000}
    assert CALLS["generate"](*loaded, **nothing) == CALLS["generate"](*loaded)
    CALLS["load_model"](*loaded, strict=True, lazy=False).experts.close()
    with pytest.raises(TypeError, match=r"^load_model\(\) has no argument 'strict': tensors .* always refused$"):
        CALLS["load_model"](*loaded, strict=False)
    with pytest.raises(TypeError, match=r"^generate\(\) has no argument 'kv_group_size'"):
        CALLS["generate"](*loaded, kv_group_size=32)
    with pytest.raises(TypeError, match=r"^make_sampler\(\) has no argument 'lazy'; it takes temp"):
        CALLS["make_sampler"](*loaded, lazy=False)
    with pytest.raises(TypeError, match=r"^generate\(\) has no argument 'input_embeddings'"):
        CALLS["generate"](*loaded, input_embeddings=mx.zeros((2, 3)))


@pytest.mark.parametrize(
    "name, remedy",
    [
        ("temp", "sampler=make_sampler(temp=...)"),
        ("temperature", "sampler=make_sampler(temp=...)"),
        ("xtc_threshold", "sampler=make_sampler(xtc_threshold=...)"),
        ("repetition_penalty", "logits_processors=make_logits_processors(repetition_penalty=...)"),
    ],
)
def test_settings_of_the_sampler_are_sent_to_it(name, remedy, loaded):
    with pytest.raises(TypeError, match=re.escape(f"generate() has no argument {name!r}: give {remedy}")):
        CALLS["generate"](*loaded, **{name: 0.5})


def test_arguments_that_do_not_fit_are_an_error_of_the_function_that_was_called(loaded):
    model, tokenizer = loaded
    with pytest.raises(TypeError, match=r"^load\(\): too many positional arguments$"):
        moeflux_mlx.load("path", {"eos_token": "x"})
    with pytest.raises(TypeError, match=r"^stream_generate\(\): missing a required argument: 'prompt'$"):
        moeflux_mlx.stream_generate(model, tokenizer, max_tokens=1)


def test_the_types_are_those_of_the_signature():
    hints = typing.get_type_hints(moeflux_mlx.generate)
    assert hints["max_tokens"] is int and hints["span"] == int | None and hints["return"] is str
    assert set(GenerationOptions.__annotations__) == set(parameters(generate_step)) - {"prompt", "model", "max_tokens"}
    assert set(BatchOptions.__annotations__) == set(parameters(BatchGenerator)) - {
        *("model", "max_tokens", "logits_processors")
    }


def test_one_text_is_not_a_list_of_its_letters(loaded):
    with pytest.raises(moeflux_mlx.RequestError, match="prompts is one text; give a list of texts"):
        moeflux_mlx.batch_generate(*loaded, "Hello")


def test_processors_are_for_all_prompts_or_for_each(loaded):
    processors = moeflux_mlx.make_logits_processors(logit_bias={7: 100.0})
    for_all = moeflux_mlx.batch_generate(
        *loaded, ["a", "b"], max_tokens=2, return_token_ids=True, logits_processors=processors
    )
    assert for_all.token_ids == [[7, 7], [7, 7]]
    of_each = moeflux_mlx.batch_generate(
        *loaded, ["a", "b"], max_tokens=2, return_token_ids=True, logits_processors=[processors, []]
    )
    assert of_each.token_ids[0] == [7, 7] != of_each.token_ids[1]


def test_a_list_of_texts_is_encoded_as_one_text_is(loaded):
    texts = ["Once upon", "a", "<|im_start|>user"]
    together = moeflux_mlx.batch_generate(*loaded, texts, max_tokens=5).texts
    assert together == [moeflux_mlx.generate(*loaded, text, max_tokens=5) for text in texts]


def test_messages_are_no_prompt(loaded):
    for wrong, kind in (([{"role": "user", "content": "Hi"}], "dict"), (["Hi"], "str"), ([None], "NoneType")):
        with pytest.raises(moeflux_mlx.RequestError, match=rf"^the prompt is a list of {kind}; .*apply_chat_template"):
            moeflux_mlx.generate(*loaded, wrong, max_tokens=1)

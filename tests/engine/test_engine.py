"""A loaded model: public functions keep their signatures, and nothing is set after loading."""

import dataclasses
import inspect
import shutil

import mlx.core as mx
import numpy as np
import pytest
from tiny_models import tiny_directory

import moeflux_mlx
from moeflux_mlx.errors import ExpertIOError, ModelFileError, RequestError, TokenizerError
from moeflux_mlx.experts import whole
from moeflux_mlx.experts.whole import MappedExperts
from moeflux_mlx.opening import engine as opening
from moeflux_mlx.opening.engine import open_engine

DEFAULTS = {
    "path_or_hf_repo": None,
    "dtype": None,
    "kv_bits": "auto",
    "draft": "off",
    "expert_io": "auto",
    "expert_cache_bytes": None,
    "prefetch": "auto",
    "warm_start": "auto",
    "context": None,
    "prefill_step_size": None,
    "revision": None,
    "progress": None,
    "memory_bytes": None,
    "shards_in": (),
    "tokenizer": None,
    "without_correction_bias": False,
    "ranks": None,
    "wired": "pool",
    "vision": True,
    "image_tokens": 1024,
    "set": None,
    "beside": 0,
}


@pytest.mark.parametrize("function, gives", [("load", "tuple"), ("load_model", "Model")])
def test_public_signatures(function, gives):
    signature = inspect.signature(getattr(moeflux_mlx, function))
    assert {name: one.default for name, one in signature.parameters.items()} == DEFAULTS
    assert [one.kind.name for one in signature.parameters.values()] == ["POSITIONAL_OR_KEYWORD"] + ["KEYWORD_ONLY"] * (
        len(DEFAULTS) - 1
    )
    assert signature.return_annotation.__name__ == gives
    assert getattr(moeflux_mlx, function).__doc__


def test_loaded_models_answer_as_before(capsys):
    model, tokenizer = moeflux_mlx.load(tiny_directory("qwen3_moe"), dtype=mx.float32, expert_io="pread")
    cache = model.make_cache()
    assert model(mx.array([[1, 2]]), cache).shape == (1, 2, model.args.vocab_size)
    assert len(model.layers) == len(cache) == model.args.num_hidden_layers
    assert isinstance(model.experts, moeflux_mlx.ExpertLoader) and isinstance(model.args, moeflux_mlx.ModelArgs)
    assert model.experts.mode is moeflux_mlx.IoMode.PREAD and model.experts.slots > 0
    assert model.experts.stats.misses > 0 and model.experts.stats.bytes_read > 0
    model.experts.reset_stats()
    assert model.experts.stats.misses == model.experts.stats.bytes_read == 0
    assert tokenizer.decode(tokenizer.encode("abc")) == "abc"
    model.experts.close()


def test_a_model_without_a_tokenizer_loads_alone(tmp_path):
    path = shutil.copytree(tiny_directory("qwen3_moe"), tmp_path / "model")
    (path / "tokenizer.json").unlink()
    assert moeflux_mlx.load_model(path).args.num_hidden_layers
    with pytest.raises(TokenizerError, match=r"has no tokenizer\.json"):
        moeflux_mlx.load(path)


def test_an_engine_does_not_change():
    engine = open_engine(tiny_directory("qwen3_moe"), dtype=mx.float32)
    assert engine.tokenizer is engine.tokenizer and engine.fingerprint.dtype == "float32"
    assert engine.model.experts is engine.experts and engine.plan.mode is engine.experts.mode
    with pytest.raises(dataclasses.FrozenInstanceError):
        engine.plan = None


def test_kept_states_of_a_text_take_a_quarter_of_the_headroom():
    engine = open_engine(tiny_directory("qwen3_next"), dtype=mx.float32)
    assert engine.session().points.max_bytes == min(1 << 30, engine.plan.headroom // 4)
    assert engine.session(checkpoint_bytes=7).points.max_bytes == 7


def test_a_load_that_fails_keeps_no_experts(tmp_path, monkeypatch):
    """A model that compiles its steps and the experts in a GPU's memory refer to each other."""
    path = shutil.copytree(tiny_directory("qwen3_moe"), tmp_path / "model")
    (file,) = path.glob("resident*.safetensors")
    mx.save_safetensors(str(file), {**mx.load(str(file)), "surplus": mx.zeros((1,))})
    made = []
    monkeypatch.setattr(
        whole, "map_file", lambda path, n, size: (mx.array(np.fromfile(path, np.uint32).reshape(n, -1)), None)
    )
    monkeypatch.setattr(opening, "MappedExperts", lambda *args: made.append(MappedExperts(*args)) or made[-1])
    with pytest.raises(ModelFileError, match="surplus"):
        moeflux_mlx.load_model(path, expert_io="mmap")
    assert made and not made[0].layers
    with pytest.raises(ExpertIOError, match="closed"):
        made[0].request(0, np.array([0]))


@pytest.mark.parametrize(
    "given, words",
    [
        ({"path_or_hf_repo": 5}, "'5' cannot be used as a path"),
        ({"dtype": "float32"}, "dtype is 'float32'; give mlx.core.float32, bfloat16 or float16, or None"),
        ({"dtype": mx.int32}, "dtype is mlx.core.int32; give mlx.core.float32"),
        ({"context": "5"}, "context is '5'; it must be a positive integer"),
        ({"set": {"span": 2.5}}, "span is 2.5; it must be a positive integer"),
        ({"set": {"host_bytes": -1}}, "host_bytes is -1; it must be 0, a positive integer, or None"),
        ({"set": {"keep_warm": "yes"}}, "keep_warm 'yes' is not one of on, off"),
        ({"set": {"spam": 1}}, "there is no setting 'spam' to set; did you mean span?"),
        ({"set": {"x": 1}}, "there is no setting 'x' to set; it takes cpu_activations, host_bytes, "),
        ({"prefill_step_size": 0}, "prefill_step_size is 0; it must be a positive integer"),
        ({"expert_cache_bytes": "1GB", "expert_io": "pread"}, "expert_cache_bytes is '1GB'; it must be"),
        ({"context": 99999}, r"context is 99999 and the model takes \d+ tokens; give at most"),
    ],
)
def test_arguments_of_other_types(given, words):
    with pytest.raises(RequestError, match=words):
        open_engine(**{"path_or_hf_repo": tiny_directory("qwen3_moe"), **given})

"""Models with matrices in any stored form: logits compared with float64, and the same bits for every source of
experts.
"""

import geometries
import goldens
import mlx.core as mx
import numpy as np
import oracle
import pytest
from geometries import MXFP4, recipe, uniform
from grids import drawn, marks
from test_model import TOLERANCE, run
from test_streaming import streamed
from tiny_models import on_cpu

from moeflux_mlx.convert import convert
from moeflux_mlx.errors import ModelFileError
from moeflux_mlx.opening.engine import load_model
from moeflux_mlx.ops.backend import of_kind
from moeflux_mlx.quant import Quant

FORMS = {
    "2 bits": uniform(Quant(2, 64)),
    "3 bits": uniform(Quant(3, 64)),
    "5 bits": uniform(Quant(5, 64)),
    "6 bits, groups of 32": uniform(Quant(6, 32)),
    "8 bits": uniform(Quant(8, 64)),
    "4 bits, groups of 32, float16": uniform(Quant(4, 32), mx.float16),
    "4 bits, float32": uniform(Quant(4, 64), mx.float32),
    "mxfp4": uniform(MXFP4),
    "mixed 3 and 6": recipe(Quant(3, 64), Quant(6, 64)),
    "mxfp4 and 5": recipe(MXFP4, Quant(5, 64)),
    "1 bit and mxfp8": recipe(Quant(1, 64), Quant(8, 32, "mxfp8")),
    "nvfp4 and mxfp8": recipe(Quant(4, 16, "nvfp4"), Quant(8, 32, "mxfp8")),
}
BY_DEFAULT = ("3 bits", "6 bits, groups of 32", "4 bits, groups of 32, float16", "mxfp4 and 5", "nvfp4 and mxfp8")
CASES = [pytest.param("qwen3_moe", name, marks=marks(name in BY_DEFAULT)) for name in FORMS]
CASES += drawn(("qwen3_5_moe", "deepseek_v3"), ("3 bits", "mxfp4", "mixed 3 and 6"))


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Returns the packed model of a case, and its logits in float64."""
    kept = {}

    def make(family, name):
        if (family, name) not in kept:
            folder = tmp_path_factory.mktemp("geometry")
            with on_cpu():
                weights = geometries.write(folder / "source", family, FORMS[name], prefix="language_model.")
                report = convert(folder / "source", folder / "out")
            assert not report.lossy and not report.quantized and not report.made_experts
            tokens = goldens.golden(family)[0]
            kept[family, name] = folder / "out", tokens, oracle.forward(goldens.config(family), weights, tokens)
        return kept[family, name]

    return make


@pytest.mark.parametrize("family, name", CASES)
def test_logits_match_float64_and_every_source_gives_the_same_bits(made, family, name, wave_bytes):
    path, tokens, wanted = made(family, name)
    tokens = mx.array(tokens).reshape(1, -1)
    wave_bytes(2 * 16384)
    mapped, read = load_model(path, dtype=mx.float32, expert_io="mmap"), streamed(path, least_slots=16, cache_bytes=1)
    for text, chunk in ((tokens, tokens.shape[1]), (tokens[:, :12], 1)):
        got = run(mapped, text, chunk)
        assert np.abs(got - wanted[: text.shape[1]]).max() < TOLERANCE
        assert np.array_equal(run(read, text, chunk), got)
    mapped.experts.close()
    read.experts.close()


def test_a_wrong_scale_shows(made, tmp_path):
    """This shows that the comparison with float64 can fail: one exponent of mxfp4 differs in one expert."""
    path, tokens, wanted = made("qwen3_moe", "mxfp4")
    model = load_model(path, dtype=mx.float32, expert_io="mmap")
    projection = model.experts.layout.records[1].down
    held = model.experts.layers[1].memory
    blob = np.array(held)
    blob.view(np.uint8)[:, projection.fields[1].offset : projection.fields[1].offset + 8] += 1
    model.experts.add(1, of_kind(blob, held))
    assert np.abs(run(model, mx.array(tokens).reshape(1, -1), 40) - wanted).max() > 10 * TOLERANCE
    model.experts.close()


# ---- resident matrices


def broken(made, tmp_path, change):
    """Returns the packed mxfp4 model with its resident tensors changed by `change`."""
    path = made("qwen3_moe", "mxfp4")[0]
    copy = tmp_path / "model"
    copy.mkdir()
    for file in path.iterdir():
        (copy / file.name).symlink_to(file)
    tensors = mx.load(str(path / "resident.safetensors"))
    change(tensors)
    (copy / "resident.safetensors").unlink()
    mx.save_safetensors(str(copy / "resident.safetensors"), tensors)
    return copy


@pytest.mark.parametrize(
    ("name", "make", "words"),
    [
        (
            "lm_head.scales",
            lambda t: t.astype(mx.float32),
            "lm_head.scales is .*; scales of mode mxfp4 are uint8",
        ),
        ("lm_head.scales", lambda t: t[:, :-1], r"lm_head.weight has 4 bits, group_size 42, mode mxfp4 by its shapes"),
        ("lm_head.scales", lambda t: t[:-1], r"lm_head.scales has shape \[255, 4\]; the model needs \[256, 4\]"),
        ("lm_head.scales", lambda t: mx.array(1, mx.uint8), "lm_head.weight has 4 bits, group_size 128"),
        ("lm_head.weight", lambda t: t[:, :-1], "lm_head.weight has 3 bits, group_size 32, mode mxfp4 by its shapes"),
        ("lm_head.biases", lambda t: mx.zeros((256, 4)), "1 tensors do not belong to this model.*lm_head.biases"),
    ],
)
def test_resident_tensors_that_do_not_fit_their_form(made, tmp_path, name, make, words):
    def change(tensors):
        tensors[name] = make(tensors.get(name))

    with pytest.raises(ModelFileError, match=words):
        load_model(broken(made, tmp_path, change))


def test_scales_of_mode_mxfp4_stay_as_they_are(made):
    model = load_model(made("qwen3_moe", "mxfp4")[0], dtype=mx.bfloat16)
    assert model.lm_head.scales.dtype == mx.uint8 and model.lm_head.quant == MXFP4
    assert "biases" not in model.lm_head
    model.experts.close()

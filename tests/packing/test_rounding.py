"""How a conversion rounds floats: by fit or min-max, the same when it is resumed, and never codes that are stored."""

import json

import goldens
import mlx.core as mx
import numpy as np
import pytest

from moeflux_mlx.convert import convert, main
from moeflux_mlx.errors import ConfigError, ModelFileError
from moeflux_mlx.formats.checkpoint import read_header
from moeflux_mlx.formats.packed import STATE
from moeflux_mlx.quant import PARTS, Quant
from moeflux_mlx.rounding.methods import METHODS, rounded

pytestmark = pytest.mark.usefixtures("cpu_device")
LAYER = "packed_experts/layer_01.bin"


@pytest.fixture(scope="module")
def floats(tmp_path_factory):
    return goldens.write_variant(tmp_path_factory.mktemp("floats") / "source", "qwen3_moe", "hub")


@pytest.fixture(scope="module")
def codes(tmp_path_factory):
    return goldens.write_variant(tmp_path_factory.mktemp("codes") / "source", "qwen3_moe", "mlx4")


def tree(path):
    """Returns the bytes of every file but the state's, which says where the checkpoint is."""
    return {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*.*") if file.name != STATE}


def stop(done, total, name):
    if done:
        raise KeyboardInterrupt


def interrupted(source, out, **options):
    with pytest.raises(KeyboardInterrupt):
        convert(source, out, **options, progress=stop)


@pytest.mark.parametrize("options", [{}, {"rounding": "minmax"}], ids=["fit", "minmax"])
def test_experts_and_resident_matrices_are_rounded_as_asked_for(tmp_path, floats, options):
    convert(floats, tmp_path / "out", **options)
    given, quant = read_header(floats / "model.safetensors"), Quant(4, 64)
    written = read_header(tmp_path / "out" / "resident.safetensors")
    for name in ("lm_head", "model.layers.1.self_attn.o_proj"):
        parts = rounded(given[f"{name}.weight"].read(), quant, options.get("rounding", "fit"))
        for part, wanted in zip(PARTS, parts, strict=True):
            assert mx.array_equal(written[f"{name}.{part}"].read(), wanted), name
    expert = rounded(
        given["model.layers.1.mlp.experts.0.gate_proj.weight"].read(), quant, options.get("rounding", "fit")
    )
    words = np.array(expert[0]).tobytes()
    assert (tmp_path / "out" / LAYER).read_bytes()[: len(words)] == words


def test_stored_codes_are_copied_by_every_method(tmp_path, codes):
    for method in METHODS:
        convert(codes, tmp_path / method, rounding=method)
    fit, minmax = (tmp_path / method for method in METHODS)
    assert tree(fit) == tree(minmax)
    options = [json.loads((out / STATE).read_text())["options"] for out in (fit, minmax)]
    assert options[0] == options[1] == {"requantize": False}  # as before there was a choice
    convert(codes, fit, rounding="minmax")  # it makes no difference


def test_codes_that_are_quantised_again_are_rounded_by_the_method(tmp_path, codes):
    for method in METHODS:
        report = convert(codes, tmp_path / method, rounding=method, requantize=True, expert_bits=3)
        assert report.lossy
    assert (tmp_path / "fit" / LAYER).read_bytes() != (tmp_path / "minmax" / LAYER).read_bytes()


@pytest.mark.parametrize(("method", "other"), [METHODS, METHODS[::-1]])
def test_a_resumed_conversion_mixes_no_methods(tmp_path, floats, method, other):
    out = tmp_path / "out"
    interrupted(floats, out, rounding=method)
    with pytest.raises(ModelFileError, match="begun with other options"):
        convert(floats, out, rounding=other)
    convert(floats, out, rounding=method)
    convert(floats, tmp_path / "at once", rounding=method)
    assert tree(out) == tree(tmp_path / "at once")


def test_the_command_takes_a_method(tmp_path, floats, capsys):
    given = ["--hf-path", str(floats), "--mlx-path", str(tmp_path / "out")]
    assert main([*given, "--rounding", "minmax"]) == 0
    convert(floats, tmp_path / "same", rounding="minmax")
    assert tree(tmp_path / "out") == tree(tmp_path / "same")
    with pytest.raises(ConfigError, match="rounding 'nearest' is not known; supported: fit, minmax"):
        convert(floats, tmp_path / "no", rounding="nearest")

"""Version 4 of layout.json: biases, two matrices and global scales are written, read and checked, field by field."""

import hashlib
import json
from dataclasses import replace

import pytest
from grids import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from test_layout_file import EXPERTS, LAYERS, stating, through, varied
from test_record import FORMS, GLOBAL, MXFP4, WIDTHS

from moeflux_mlx.errors import ConfigError, ModelFileError
from moeflux_mlx.formats.layout_file import from_json, to_json
from moeflux_mlx.formats.record import (
    PROJECTIONS,
    SCALE_DTYPES,
    UNIFORM,
    ExpertLayout,
    expert_path,
)
from moeflux_mlx.quant import DEFAULT, GGUF_MODES, Quant, Quantization


def having(by_layer, biases=False, **sizes):
    """Returns the args of a model whose experts have a matrix for each form of `by_layer`, and perhaps biases."""
    args = stating({}, **sizes)
    matrices = len(by_layer[0])
    layers = [
        replace(one, feed_forward=replace(one.feed_forward, biases=biases, matrices=matrices)) for one in args.layers
    ]
    overrides = {
        expert_path(layer, projection): quant
        for layer, quants in by_layer.items()
        for projection, quant in zip(PROJECTIONS[-matrices:], quants, strict=True)
    }
    return replace(args, layers=tuple(layers), quantization=Quantization(DEFAULT, overrides))


def everything(dtype="F16"):
    """Returns two matrices with biases, one of them with a global scale. Layers differ."""
    by_layer = {0: (GLOBAL, MXFP4), 1: (Quant(6, 32), GLOBAL), 2: (GLOBAL, MXFP4)}
    args = having(by_layer, biases=True)
    return args, ExpertLayout.from_args(args, by_layer, dtype)


@settings(max_examples=examples(80))
@given(data=st.data(), matrices=st.sampled_from([2, 3]), biases=st.booleans(), hidden=WIDTHS, inner=WIDTHS)
def test_what_is_written_is_read_again(data, matrices, biases, hidden, inner):
    forms = FORMS | st.just(Quant(4, 64))
    by_layer = {layer: data.draw(st.tuples(*[forms] * matrices)) for layer in range(LAYERS)}
    dtypes = {layer: data.draw(st.sampled_from(SCALE_DTYPES)) for layer in by_layer}
    args = having(by_layer, biases, hidden=hidden, inner=inner)
    layout = ExpertLayout.from_args(args, by_layer, dtypes)
    assert through(layout, args) == layout
    factor = any(quant.has_global_scale for quants in by_layer.values() for quant in quants)
    plain = {*by_layer.values()} == {UNIFORM} and {*dtypes.values()} == {"BF16"}
    usual = matrices == 3 and not biases and not factor
    assert to_json(layout)["format_version"] == ((1 if plain else 2) if usual else 4)


GGUF = [Quant(mode.bits, mode.group_size, name) for name, mode in GGUF_MODES.items()]


@settings(max_examples=examples(40))
@given(data=st.data(), biases=st.booleans(), dtype=st.sampled_from(SCALE_DTYPES))
def test_forms_of_gguf_are_read_again(data, biases, dtype):
    """Their factors stay float16 beside scales and biases of any dtype."""
    forms = st.sampled_from([*GGUF, Quant(4, 64), MXFP4])
    by_layer = {layer: data.draw(st.tuples(forms, forms, forms)) for layer in range(LAYERS)}
    args = having(by_layer, biases, hidden=256, inner=512)
    layout = ExpertLayout.from_args(args, by_layer, dtype)
    assert through(layout, args) == layout
    fields = {field.part for record in layout.records.values() for field in record.fields}
    plain = {*by_layer.values()} == {UNIFORM} and dtype == "BF16"
    usual = not fields & {"supers", "bias"}
    assert to_json(layout)["format_version"] == ((1 if plain else 2) if usual else 4)
    for record in layout.records.values():
        assert {field.dtype for field in record.fields if field.part == "supers"} <= {"F16"}
        assert all(field.dtype == dtype for field in record.fields if field.part in ("biases", "bias"))


@pytest.mark.parametrize(
    ("layout", "digest"),
    [
        (varied(dict.fromkeys(range(LAYERS), UNIFORM))[1], "0240a7e3b1cdd302"),
        (varied()[1], "62ef16b2f8b1da26"),
        (varied(dict.fromkeys(range(LAYERS), UNIFORM), "F16")[1], "e1d1f69bbb0eabcd"),
        (varied(hidden=192, experts=6)[1], "82714e5b7423dba5"),
    ],
)
def test_versions_1_and_2_keep_their_bytes(layout, digest):
    """Digests of files written before version 4 existed."""
    written = json.dumps(to_json(layout), indent=2).encode()
    assert hashlib.sha256(written).hexdigest()[:16] == digest


def test_how_a_field_is_written():
    stated = to_json(everything()[1])
    assert stated.keys() == {"format_version", "num_layers", "num_experts", "geometries"}
    first, second = stated["geometries"]
    assert (first["layers"], second["layers"]) == ([0, 2], [1])
    assert first["fields"][3] == {
        "name": "up_proj.global_scale", "offset": 4736, "size": 4, "dtype": "F32", "shape": [1],
        "group_size": 16, "bits": 4, "mode": "nvfp4", "global_scale": True,
    }  # fmt: skip
    assert [one["name"] for one in second["fields"]] == [
        "up_proj.weight", "up_proj.scales", "up_proj.biases", "up_proj.bias",
        "down_proj.weight", "down_proj.scales", "down_proj.bias", "down_proj.global_scale",
    ]  # fmt: skip


def test_a_plain_geometry_may_be_stated_in_version_4():
    args, layout = varied()
    assert from_json({**to_json(layout), "format_version": 4}, args, "layout.json") == layout


def test_config_json_decides_which_fields_there_are():
    args, layout = everything()
    quants = {layer: record.quants for layer, record in layout.records.items()}
    with pytest.raises(ModelFileError, match="layer 0 has 7 fields; the model's config.json gives 5"):
        from_json(to_json(layout), having(quants), "layout.json")
    three = having({layer: (MXFP4, *of) for layer, of in quants.items()}, biases=True)
    with pytest.raises(ModelFileError, match="layer 0 has 7 fields; the model's config.json gives 10"):
        from_json(to_json(layout), three, "layout.json")
    uniform = to_json(varied(dict.fromkeys(range(LAYERS), UNIFORM))[1])
    with pytest.raises(ModelFileError, match="expert_size is"):
        from_json(uniform, having(dict.fromkeys(range(LAYERS), UNIFORM), biases=True), "layout.json")


def test_version_1_cannot_describe_biases():
    args = having(dict.fromkeys(range(LAYERS), UNIFORM), biases=True)
    record = ExpertLayout.from_args(args).record
    fields = [{key: one[key] for key in ("name", "offset", "size", "dtype", "shape")} for one in
              to_json(ExpertLayout.from_args(args))["geometries"][0]["fields"]]  # fmt: skip
    lie = {"expert_size": record.size, "num_experts": EXPERTS, "components": fields}
    with pytest.raises(ModelFileError, match="format_version is 1; what the model's config.json gives takes 4"):
        from_json(lie, args, "layout.json")


def test_a_group_that_does_not_divide():
    with pytest.raises(ConfigError, match="down_proj has 4 bits, group_size 128.*its 64 columns are not a multiple"):
        ExpertLayout.from_args(having({0: (MXFP4, MXFP4)}), dict.fromkeys(range(LAYERS), (MXFP4, Quant(4, 128))))

"""layout.json: what is written is read again, version 1 is used where it suffices, and every value is checked."""

import json
from dataclasses import replace

import pytest
from grids import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from test_packed import tiny_args

from moeflux_mlx.errors import ConfigError, ModelFileError
from moeflux_mlx.formats.layout_file import from_json, to_json
from moeflux_mlx.formats.record import (
    BLOCK_BYTES,
    PROJECTIONS,
    SCALE_DTYPES,
    STRIDE_ALIGNMENT,
    UNIFORM,
    ExpertLayout,
    Record,
    expert_path,
)
from moeflux_mlx.quant import AFFINE_BITS, DEFAULT, Quant, Quantization

LAYERS, EXPERTS = 3, 4
MXFP4 = Quant(4, 32, "mxfp4")
forms = st.builds(Quant, st.sampled_from(AFFINE_BITS), st.sampled_from([32, 64])) | st.just(MXFP4)
quants = st.tuples(forms, forms, forms)


def stating(by_layer, experts=EXPERTS, **sizes):
    """Returns the args of a model whose config.json says how each layer's experts are stored."""
    args = tiny_args(LAYERS, experts, **sizes)
    overrides = {
        expert_path(layer, projection): quant
        for layer, of in by_layer.items()
        for projection, quant in zip(PROJECTIONS, of, strict=True)
    }
    return replace(args, quantization=Quantization(DEFAULT, overrides))


def varied(by_layer=None, dtype="BF16", **sizes):
    by_layer = by_layer or {0: (Quant(3, 64), Quant(3, 64), Quant(6, 64)), 1: UNIFORM, 2: (MXFP4, MXFP4, Quant(8, 32))}
    args = stating(by_layer, **sizes)
    return args, ExpertLayout.from_args(args, by_layer, dtype)


def through(layout, args):
    return from_json(json.loads(json.dumps(to_json(layout))), args, "layout.json")


@settings(max_examples=examples(60))
@given(first=quants, second=quants, dtype=st.sampled_from(SCALE_DTYPES), dtypes=st.booleans())
def test_what_is_written_is_read_again(first, second, dtype, dtypes):
    by_layer = {0: first, 1: second, 2: first}
    args = stating(by_layer)
    layout = ExpertLayout.from_args(args, by_layer, {0: dtype, 1: "BF16", 2: dtype} if dtypes else dtype)
    assert through(layout, args) == layout
    stated = to_json(layout)
    uniform = first == second == UNIFORM and dtype == "BF16"
    assert stated["format_version"] == (1 if uniform else 2)
    assert uniform or not {"expert_size", "components", "expert_stride"} & stated.keys()


def test_version_1_is_written_whenever_it_can_be():
    args, layout = varied(dict.fromkeys(range(LAYERS), UNIFORM))
    assert to_json(layout)["format_version"] == 1 and layout == ExpertLayout.from_args(args)
    assert to_json(varied(dict.fromkeys(range(LAYERS), UNIFORM), "F16")[1])["format_version"] == 2


def test_geometries_are_listed_once():
    _, layout = varied()
    geometries = to_json(layout)["geometries"]
    assert [one["layers"] for one in geometries] == [[0], [1], [2]]
    again = dict.fromkeys((0, 2), (MXFP4,) * 3) | {1: UNIFORM}
    assert [one["layers"] for one in to_json(varied(again)[1])["geometries"]] == [[0, 2], [1]]


def test_a_reader_of_version_1_finds_no_field_that_it_knows():
    stated = to_json(varied()[1])
    assert stated["format_version"] == 2 and stated.keys().isdisjoint({"expert_size", "components"})


@pytest.mark.parametrize("experts", [4, 6, 8, 10])
def test_files_are_whole_pages_and_records_whole_blocks(experts):
    _, layout = varied(experts=experts, hidden=192)
    for layer, record in layout.records.items():
        assert layout.layer_bytes(layer) % STRIDE_ALIGNMENT == 0 and record.stride % BLOCK_BYTES == 0
        assert 0 <= record.stride - record.size < (BLOCK_BYTES if experts % 4 == 0 else STRIDE_ALIGNMENT)
        assert record.held_bytes - record.size < BLOCK_BYTES


def test_a_stride_of_more_blocks_is_taken_as_it_is():
    args, layout = varied()
    stated = to_json(layout)
    stated["geometries"][2]["record_stride"] += BLOCK_BYTES
    reread = from_json(stated, args, "layout.json")
    assert reread.records[2].stride == layout.records[2].stride + BLOCK_BYTES
    assert reread.records[2].fields == layout.records[2].fields and reread.records[0] == layout.records[0]


def test_a_group_that_does_not_divide():
    with pytest.raises(ConfigError, match="down_proj has 4 bits, group_size 128.*its 64 columns are not a multiple"):
        varied(dict.fromkeys(range(LAYERS), (Quant(4, 128),) * 3))


def test_a_geometry_that_config_json_contradicts():
    args, layout = varied()
    lies = (
        (None, "config.json says that model.layers.0.mlp.switch_mlp.gate_proj is not quantised"),
        (Quantization(), "bits of gate_proj.weight in layer 0 is 3; the model's config.json gives 4"),
    )
    for quantization, words in lies:
        with pytest.raises(ModelFileError, match=words):
            from_json(to_json(layout), replace(args, quantization=quantization), "layout.json")


def test_records_that_are_alike_are_one_object():
    assert Record.make(128, 64) is Record.make(128, 64)


def test_the_experts_of_one_rank_are_refused():
    args, layout = varied()
    stated = {**to_json(layout), "held": {"shares": [1, 1], "rank": 0}}
    with pytest.raises(ModelFileError, match=r"x/layout.json: held: the files have one rank's experts only"):
        from_json(stated, args, "x/layout.json")
    with pytest.raises(ModelFileError, match=r"format_version 3 is not 1, 2 or 4"):
        from_json({**stated, "format_version": 3}, args, "x/layout.json")

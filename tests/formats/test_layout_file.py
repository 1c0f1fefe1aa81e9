"""layout.json: what is written is read again, the lowest version is used that suffices, and every value is checked: a
wrong one is refused in one line that names it."""

import copy
import hashlib
import json
from dataclasses import replace

import pytest
from grids import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from test_packed import tiny_args
from test_record import FORMS, GLOBAL, MXFP4, WIDTHS

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
from moeflux_mlx.quant import AFFINE_BITS, DEFAULT, GGUF_MODES, Quant, Quantization

LAYERS, EXPERTS = 3, 4
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
    with pytest.raises(ConfigError, match="down_proj has 4 bits, group_size 128.*its 64 columns are not a multiple"):
        ExpertLayout.from_args(having({0: (MXFP4, MXFP4)}), dict.fromkeys(range(LAYERS), (MXFP4, Quant(4, 128))))


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


# ---- version 4: biases, two matrices and global scales


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
def test_what_is_written_in_version_4_is_read_again(data, matrices, biases, hidden, inner):
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


# ---- wrong values

FIELD = ["geometries", 0, "fields"]
SCALE = [*FIELD, 3]  # up_proj.global_scale
IN_VERSION_2 = [
    (["format_version"], 5, "format_version 5 is not 1, 2 or 4"),
    (["format_version"], 0, "format_version 0 is not 1, 2 or 4"),
    (["format_version"], True, "format_version True"),
    (["format_version"], "2", "format_version '2'"),
    (["format_version"], 1, "expert_size is None"),
    (["num_experts"], 5, "num_experts is 5"),
    (["num_layers"], None, "num_layers is None"),
    (["geometries"], {}, "geometries is not a list"),
    (["geometries"], [1], "geometries is not a list"),
    (["geometries"], [], "layer 0 has no geometry"),
    (["geometries", 1, "layers"], [], "layer 1 has no geometry"),
    (["geometries", 1, "layers"], [1, 1], "layer 1 has two geometries"),
    (["geometries", 1, "layers"], [7], "are not some of the model's layers"),
    (["geometries", 1, "layers"], [True], "are not some of the model's layers"),
    (["geometries", 1, "layers"], 1, "are not some of the model's layers"),
    (["geometries", 1, "layers"], [0], "layer 0 has two geometries"),
    (["geometries", 0, "fields"], 3, "fields is not a list"),
    (["geometries", 0, "fields"], [3], "fields is not a list"),
    (
        ["geometries", 0, "fields"],
        [{"name": f"{p}.weight", **MXFP4.entry()} for p in PROJECTIONS],
        "layer 0 has 3 fields;",
    ),
    (["geometries", 0, "fields"], [], "layer 0 has 0 fields; the model's config.json gives 9"),
    (["geometries", 0, "fields", 0, "bits"], 7, "bits of gate_proj.weight in layer 0 is 7"),
    (["geometries", 0, "fields", 1, "bits"], 4, "bits of gate_proj.scales in layer 0 is 4"),
    (["geometries", 0, "fields", 0, "mode"], "nvfp4", "mode of gate_proj.weight"),
    (["geometries", 0, "fields", 0, "mode"], [], "mode of gate_proj.weight in layer 0 is []"),
    (["geometries", 0, "fields", 0, "group_size"], 64.0, "group_size of gate_proj.weight in layer 0 is 64.0"),
    (["geometries", 0, "fields", 0, "name"], ["x"], "name of gate_proj.weight in layer 0 is ['x']"),
    (["geometries", 0, "fields", 1, "dtype"], "F32", "size of gate_proj.scales in layer 0 is"),
    (["geometries", 0, "fields", 1, "offset"], 1 << 70, "offset of gate_proj.scales in layer 0 is"),
    (["geometries", 0, "fields", 2, "shape"], [[]], "shape of gate_proj.biases in layer 0 is"),
    (["geometries", 1, "fields", 0, "name"], None, "name of gate_proj.weight in layer 1"),
    (["geometries", 0, "record_size"], 1, "record_size of layer 0 is 1"),
    (["geometries", 0, "experts"], [0, 2], "records that differ within a layer are not implemented"),
    (["geometries", 0, "record_stride"], 0, "record_stride 0 does not hold"),
    (["geometries", 0, "record_stride"], 1 << 70 | 1, "does not hold"),
    (["geometries", 0, "record_stride"], "16384", "does not hold"),
]
IN_VERSION_4 = [
    (["format_version"], 2, "format_version is 2; what the model's config.json gives takes 4"),
    (["format_version"], 1, "expert_size is None"),
    (["format_version"], 1 << 70, "format_version 1180591620717411303424 is not 1, 2 or 4"),
    ([*SCALE, "offset"], 4732, "offset of up_proj.global_scale in layer 0 is 4732"),  # overlaps the bias
    ([*FIELD, 4, "offset"], 4740, "offset of down_proj.weight in layer 0 is 4740"),  # misaligned
    ([*FIELD, 4, "offset"], 4768, "offset of down_proj.weight in layer 0 is 4768"),  # too large a gap
    ([*SCALE, "offset"], -16, "offset of up_proj.global_scale in layer 0 is -16"),
    ([*SCALE, "size"], 1 << 64, "size of up_proj.global_scale in layer 0 is 18446744073709551616"),
    ([*SCALE, "shape"], [1 << 62, 4], "shape of up_proj.global_scale in layer 0"),
    ([*SCALE, "shape"], [], "shape of up_proj.global_scale in layer 0 is []"),
    ([*SCALE, "dtype"], "BF16", "dtype of up_proj.global_scale in layer 0 is 'BF16'"),
    ([*SCALE, "dtype"], "F8_E5M2", "dtype of up_proj.global_scale in layer 0 is 'F8_E5M2'"),
    ([*SCALE, "name"], "up_proj.signs", "name of up_proj.global_scale in layer 0 is 'up_proj.signs'"),
    ([*SCALE, "global_scale"], 1, "global_scale of up_proj.global_scale in layer 0 is 1"),
    ([*SCALE, "mode"], "mxfp4", "mode of up_proj.global_scale in layer 0 is 'mxfp4'"),
    ([*SCALE, "sparse"], True, "a geometry has the unknown key 'sparse'"),
    (["geometries", 0, "rotation"], 1, "a geometry has the unknown key 'rotation'"),
    ([*FIELD, 2, "dtype"], "F32", "size of up_proj.bias in layer 0 is 128; the model's config.json gives 256"),
    ([*FIELD, 2, "dtype"], [], "dtype of up_proj.bias in layer 0 is []"),
    (["geometries", 0, "experts"], [0, 1], "of the experts [0, 1] of 4; records that differ within a layer"),
    (["geometries", 0, "experts"], None, "of the experts None of 4; records that differ within a layer"),
    (["geometries", 0, "record_size"], 9632, "record_size of layer 0 is 9632"),
    (["geometries", 0, "record_stride"], 16, "record_stride 16 does not hold"),
]
LIES = [*((varied, *lie) for lie in IN_VERSION_2), *((everything, *lie) for lie in IN_VERSION_4)]


def changed(stated, path, value):
    """Returns `stated` with one value replaced."""
    reread = copy.deepcopy(stated)
    part = reread
    for key in path[:-1]:
        part = part[key]
    part[path[-1]] = value
    return reread


@pytest.mark.parametrize(("geometry", "path", "value", "words"), LIES)
def test_a_wrong_layout_is_refused(geometry, path, value, words):
    args, layout = geometry()
    with pytest.raises(ModelFileError) as failure:
        from_json(changed(to_json(layout), path, value), args, "x/layout.json")
    text = str(failure.value)
    assert text.startswith("x/layout.json: ") and words in text and "\n" not in text and len(text) < 250


def test_fields_that_are_missing_doubled_or_in_another_order():
    args, layout = everything()
    stated = to_json(layout)
    fields = stated["geometries"][0]["fields"]
    for lie in (fields[:-1], [*fields, fields[-1]], [fields[1], fields[0], *fields[2:]], []):
        with pytest.raises(ModelFileError, match=r"layer 0.*the model's config\.json gives"):
            from_json(changed(stated, FIELD, lie), args, "layout.json")


values = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3)
values = values | st.lists(values, max_size=3) | st.dictionaries(st.text(max_size=3), values, max_size=2)
values |= st.just([[{"name": ["x" * 100] * 10}] * 10] * 10)


@pytest.mark.parametrize("geometry", [varied, everything])
@settings(max_examples=examples(150))
@given(data=st.data())
def test_any_change_is_refused_or_harmless(geometry, data):
    args, layout = geometry()
    stated = to_json(layout)
    path, part = [], stated
    while True:
        keys = list(part) if isinstance(part, dict) else list(range(len(part)))
        path.append(data.draw(st.sampled_from(keys)))
        part = part[path[-1]]
        if not isinstance(part, dict | list) or not part or data.draw(st.booleans()):
            break
    lie = changed(stated, path, data.draw(values))
    try:
        reread = from_json(lie, args, "layout.json")
    except ModelFileError as error:
        assert "\n" not in str(error) and len(str(error)) < 400
        return
    for layer, record in layout.records.items():
        assert reread.records[layer].fields == record.fields
        assert reread.records[layer].stride >= record.size and reread.records[layer].stride % BLOCK_BYTES == 0

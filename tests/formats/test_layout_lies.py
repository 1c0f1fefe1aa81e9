"""Every value in a layout.json is checked: a wrong one is refused in one line that names it."""

import copy

import pytest
from grids import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from test_layout_file import MXFP4, varied
from test_layout_version_4 import everything

from moeflux_mlx.errors import ModelFileError
from moeflux_mlx.formats.layout_file import from_json, to_json
from moeflux_mlx.formats.record import BLOCK_BYTES, PROJECTIONS

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

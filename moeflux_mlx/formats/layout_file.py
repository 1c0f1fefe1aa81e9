"""`layout.json`: the geometry of the records in a packed model.

Version 1, which flash-moe and moeflux write and read: one geometry for all layers, 4-bit codes in groups of 64 with
scales and biases in bfloat16. `expert_size`, `num_layers`, `num_experts` and `components` (name, offset, size, dtype
and shape of each tensor of a record); ours adds `moe_layers`, `expert_stride` (records back to back where it is
missing), `format_version`, `group_size` and `bits`. It is written whenever it can express the geometry.

Version 2: `format_version`, `num_layers`, `num_experts`, and `geometries`, one for each different record: `layers`
that have it, `record_size` and `record_stride` in bytes, and `fields` as version 1's components, each with the `bits`,
`group_size` and `mode` of its matrix. It has neither `expert_size` nor `components`, so that a reader that looks only
for those fails instead of reading nonsense. Its fields are weight, scales and biases of gate, up and down.

Version 4 has the keys of version 2. A record can have any fields: `fields`
lists them in the order of the file, by name, dtype, shape, offset and size. The additional fields that we know are
`supers`, `minima` and `grid`, as `Quant` says, `bias` [rows] and `global_scale` [1], a float32, of a matrix (which then
has `global_scale`: true next to its `mode`); a record may have no gate. Fields begin at multiples of 16 bytes and do
not overlap; gaps are zero. A geometry may name `experts`, those of its `layers` that have it; without this key all have
it. In each layer every expert has one geometry, and its record begins where the previous record ends: at the sum of the
`record_stride`s of the experts with smaller numbers. A geometry may name `directories`, which hold the records of its
layers in turn: of n directories, number i has the experts i, i + n, i + 2n, ... without gaps, in a file with the
layer's usual name. The first is ".", the directory of layout.json; the others are paths. A geometry may have `values`,
a number: then it is not that of its layers' routed experts but of so many value experts of each of them, whose only
matrix is `v_proj`, and which lie in files called values_NN.bin. Version 4 is written only if versions 1 and 2 cannot
express the geometry. A new field, key, dtype or mode needs no further version: a reader refuses what it does not know.

We do not read records that differ within a layer. Only strides and the dtype of floating scales are taken from such a
file: every other field must equal what the model's config.json gives.
"""

import reprlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..errors import ModelFileError
from ..files import JsonDict, JsonObject
from ..quant import GLOBAL_SCALE, PARTS
from ..spec import ModelArgs
from .record import (
    BLOCK_BYTES,
    LOAD_BYTES,
    PROJECTIONS,
    ExpertLayout,
    Field,
    Projection,
    Quants,
    Record,
    floating_dtype,
    projections_of,
    set_path,
    stated_quants,
)

UNIFORM_VERSION, VERSION, OPEN_VERSION = VERSIONS = 1, 2, 4
GEOMETRY_KEYS = ("layers", "experts", "record_size", "record_stride", "fields", "directories", "values")
OWN_DIRECTORY = "."
_SHORT = reprlib.Repr()
_SHORT.maxlevel = 1  # shows only that nested values exist
FIELD_KEYS = ("name", "offset", "size", "dtype", "shape", "bits", "group_size", "mode", GLOBAL_SCALE)


def to_json(layout: ExpertLayout, also: Sequence[str] = ()) -> JsonDict:
    """The contents of `layout.json`. `also`: the other directories that hold records."""
    version = _least_version(layout)
    if also:
        content = _varied(layout, OPEN_VERSION)
        for geometry in content["geometries"]:
            geometry["directories"] = [OWN_DIRECTORY, *also]
        return content
    return _uniform(layout) if version == UNIFORM_VERSION else _varied(layout, version)


def _least_version(layout: ExpertLayout) -> int:
    """The first that can say the geometry of a whole model's records."""
    if layout.is_uniform:
        return UNIFORM_VERSION
    return VERSION if all(map(_has_usual_fields, set(layout.records.values()))) else OPEN_VERSION


def _has_usual_fields(record: Record) -> bool:
    named = [projection.name for projection in record.projections]
    return named == [*PROJECTIONS] and all(field.part in PARTS for field in record.fields)


def directories_of(content: JsonObject, where: object) -> list[str]:
    """The directories that hold records beside that of the file `where`; of a content that `from_json` has read.

    Raises:
        ModelFileError: it names none that make sense, or others for some layers.
    """
    stated = [geometry.get("directories", [OWN_DIRECTORY]) for geometry in content.get("geometries", [{}])]
    names = stated[0]
    if any(one != names for one in stated):
        raise ModelFileError(f"{where}: its geometries name other directories; that is not implemented")
    if (
        not isinstance(names, list)
        or names[:1] != [OWN_DIRECTORY]
        or not all(isinstance(name, str) and name for name in names)
        or len(set(names)) < len(names)
    ):
        raise ModelFileError(f'{where}: directories {_SHORT.repr(names)} are not different paths, the first "."')
    return names[1:]


def from_json(content: JsonObject, args: ModelArgs, where: object) -> ExpertLayout:
    """The layout that `content`, what the file `where` holds, states.

    Raises:
        ModelFileError: it is of another version, or contradicts the model's configuration.
        ConfigError: a width in that is no multiple of a group.
    """
    version = content.get("format_version", UNIFORM_VERSION)
    if type(version) is not int or version not in VERSIONS:
        raise ModelFileError(f"{where}: format_version {_SHORT.repr(version)} is not 1, 2 or 4")
    if "held" in content:  # version 3 had it, and 4 might
        raise ModelFileError(f"{where}: held: the files have one rank's experts only; convert the checkpoint again")
    layout = _read_uniform(content, args, where) if version == UNIFORM_VERSION else _read_varied(content, args, where)
    least = _least_version(layout)
    if version < least:
        raise ModelFileError(f"{where}: format_version is {version}; what the model's config.json gives takes {least}")
    return layout


# ---- version 1


def _uniform(layout: ExpertLayout) -> JsonDict:
    record = layout.record
    return {
        "expert_size": record.size,
        "num_layers": layout.num_layers,
        "num_experts": layout.num_experts,
        "components": [_component(field) for field in record.fields],
        "moe_layers": list(layout.moe_layers),
        "expert_stride": record.stride,
        "format_version": UNIFORM_VERSION,
        "group_size": record.down.quant.group_size,
        "bits": record.down.quant.bits,
    }


def _component(field: Field) -> JsonDict:
    return {
        "name": field.name,
        "offset": field.offset,
        "size": field.size,
        "dtype": field.dtype,
        "shape": list(field.shape),
    }


def _read_uniform(content: JsonObject, args: ModelArgs, where: object) -> ExpertLayout:
    layout = ExpertLayout.from_args(args)
    record = layout.record
    stride = content.get("expert_stride", record.size)
    if type(stride) is not int or stride < record.size or stride % LOAD_BYTES:
        raise ModelFileError(
            f"{where}: expert_stride {_SHORT.repr(stride)} does not hold {record.size}-byte experts "
            f"at multiples of {LOAD_BYTES}"
        )
    checked = replace(layout, records={layer: one.spaced(stride) for layer, one in layout.records.items()})
    for key, wanted in _uniform(checked).items():
        if key == "components":
            _agree_components(where, _objects(content, key, where), wanted)
        else:
            _agree(where, key, content.get(key, None if key in ("expert_size", "num_experts") else wanted), wanted)
    return checked


def _agree_components(where: object, stated: list[JsonObject], wanted: list[JsonDict]) -> None:
    """Extra keys in another tool's file do no harm."""
    if len(stated) != len(wanted):
        raise ModelFileError(f"{where}: it has {len(stated)} components; the model's config.json gives {len(wanted)}")
    for one, component in zip(stated, wanted, strict=True):
        for key, value in component.items():
            _agree(where, f"{key} of {component['name']}", one.get(key), value)


# ---- versions 2 and 4


def _varied(layout: ExpertLayout, version: int) -> JsonDict:
    sets: dict[Any, list[int]] = {}  # by geometry
    for number, record in layout.records.items():
        sets.setdefault(record.geometry, []).append(number)
    return {
        "format_version": version,
        "num_layers": layout.num_layers,
        "num_experts": layout.num_experts,
        "geometries": [_geometry(layout, having) for having in sets.values()],
    }


def _geometry(layout: ExpertLayout, sets: list[int]) -> JsonDict:
    record = layout.records[sets[0]]
    stated = {
        "layers": [number % layout.num_layers for number in sets],
        "record_size": record.size,
        "record_stride": record.stride,
        "fields": [{**_component(field), **projection.quant.entry()} for projection, field in _fields(record)],
    }
    return stated if sets[0] < layout.num_layers else {**stated, "values": layout.num_values}


def _fields(record: Record) -> Iterator[tuple[Projection, Field]]:
    return ((projection, field) for projection in record.projections for field in projection.fields)


def _read_varied(content: JsonObject, args: ModelArgs, where: object) -> ExpertLayout:
    geometries: dict[int, JsonObject] = {}  # by set, as `dtypes`
    dtypes: dict[int, str] = {}
    for geometry in _objects(content, "geometries", where):
        fields = _objects(geometry, "fields", where)
        _check_experts(geometry, args, where)
        if content["format_version"] == OPEN_VERSION:
            _check_keys(geometry, where)
        dtype = floating_dtype((one.get("name"), one.get("dtype")) for one in fields)
        for number in _sets(geometry, args, where):
            if number in geometries:
                raise ModelFileError(f"{where}: {_named(number, args)} has two geometries")
            geometries[number], dtypes[number] = geometry, dtype
    if len(geometries) < len(args.record_sets):
        missing = _named(min(set(args.record_sets) - set(geometries)), args)
        raise ModelFileError(f"{where}: {missing} has no geometry; the model's config.json gives it experts")
    for key, wanted in (("num_layers", args.num_hidden_layers), ("num_experts", args.num_experts)):
        _agree(where, key, content.get(key), wanted)
    quants = {number: _stated(number, args, where) for number in args.record_sets}
    layout = ExpertLayout.from_args(args, quants, dtypes)
    checked = {
        number: _spaced(record, _named(number, args), geometries[number], where)
        for number, record in layout.records.items()
    }
    return replace(layout, records=checked)


def _named(number: int, args: ModelArgs) -> str:
    """A record set in messages."""
    layer = f"layer {number % args.num_hidden_layers}"
    return layer if number < args.num_hidden_layers else f"{layer}, of value experts,"


def _objects(parent: JsonObject, key: str, where: object) -> list[JsonObject]:
    objects = parent.get(key)
    if not isinstance(objects, list) or not all(isinstance(one, Mapping) for one in objects):
        raise ModelFileError(f"{where}: {key} is not a list of objects")
    return objects


def _sets(geometry: JsonObject, args: ModelArgs, where: object) -> list[int]:
    """The numbers of the record sets with this geometry."""
    layers, values, experts = geometry.get("layers"), "values" in geometry, args.matrix_experts
    having = args.matrix_layers if values else args.moe_layers
    if not isinstance(layers, list) or not all(type(i) is int and i in having for i in layers):
        raise ModelFileError(
            f"{where}: layers {_SHORT.repr(layers)} are not some of the model's layers with "
            f"{'value ' * values}experts, {_SHORT.repr(having)}"
        )
    if values:
        _agree(where, "values", geometry["values"], 0 if experts is None else experts.router.experts)
    return list(map(args.matrix_set, layers)) if values else layers


def _check_experts(geometry: JsonObject, args: ModelArgs, where: object) -> None:
    """Raises ModelFileError: the geometry is not that of all experts of its layers."""
    if "experts" in geometry and ("values" in geometry or geometry["experts"] != list(range(args.num_experts))):
        raise ModelFileError(
            f"{where}: a geometry is of the experts {_SHORT.repr(geometry['experts'])} of {args.num_experts}; "
            "records that differ within a layer are not implemented"
        )


def _check_keys(geometry: JsonObject, where: object) -> None:
    """Raises ModelFileError if there are unknown keys, which could mean anything."""
    for one, known in ((geometry, GEOMETRY_KEYS), *((field, FIELD_KEYS) for field in geometry["fields"])):
        unknown = next((key for key in one if key not in known), None)
        if unknown is not None:
            raise ModelFileError(f"{where}: a geometry has the unknown key {_SHORT.repr(unknown)}")


def _stated(number: int, args: ModelArgs, where: object) -> Quants:
    """The stored form of each of an expert's matrices in config.json."""
    matrices = args.matrices_of(number)
    quants = (None,) * matrices if args.quantization is None else stated_quants(args, args.quantization, number)
    for projection, quant in zip(projections_of(matrices), quants, strict=True):
        if quant is None:
            path = set_path(args, number, projection)
            raise ModelFileError(f"{where}: config.json says that {path} is not quantised")
    return tuple(quant for quant in quants if quant is not None)


def _spaced(record: Record, name: str, geometry: JsonObject, where: object) -> Record:
    """The record with the stride that the file states, once everything else in it is what `record` has."""
    fields, wanted = geometry["fields"], list(_fields(record))
    if len(fields) != len(wanted):
        raise ModelFileError(f"{where}: {name} has {len(fields)} fields; the model's config.json gives {len(wanted)}")
    for stated, (projection, field) in zip(fields, wanted, strict=True):
        for key, value in {**projection.quant.entry(), **_component(field)}.items():
            _agree(where, f"{key} of {field.name} in {name}", stated.get(key), value)
    _agree(where, f"record_size of {name}", geometry.get("record_size"), record.size)
    stride = geometry.get("record_stride")
    if type(stride) is not int or stride < record.size or stride % BLOCK_BYTES:
        raise ModelFileError(
            f"{where}: record_stride {_SHORT.repr(stride)} does not hold {record.size}-byte experts "
            f"at multiples of {BLOCK_BYTES}"
        )
    return record.spaced(stride)


def _agree(where: object, key: str, value: Any, wanted: Any) -> None:
    if type(value) is not type(wanted) or value != wanted:
        raise ModelFileError(
            f"{where}: {key} is {_SHORT.repr(value)}; the model's config.json gives {_SHORT.repr(wanted)}"
        )

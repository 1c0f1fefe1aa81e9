"""`layout.json`: how a packed model says the geometry of its experts' records.

Version 1, which flash-moe and moeflux write and read: one geometry for all layers, 4-bit codes in groups of 64 with
scales and biases in bfloat16. `expert_size`, `num_layers`, `num_experts` and `components` (name, offset, size, dtype
and shape of each tensor of a record); ours adds `moe_layers`, `expert_stride` (records back to back where it is
missing), `format_version`, `group_size` and `bits`. It is written whenever it can say the geometry.

Version 2: `format_version`, `num_layers`, `num_experts`, and `geometries`, one for each different record: `layers`
that have it, `record_size` and `record_stride` in bytes, and `fields` as version 1's components, each with the `bits`,
`group_size` and `mode` of its matrix. It has neither `expert_size` nor `components`, so that a reader that looks only
for those fails instead of reading nonsense.

Version 3 is version 2 with `held`: the files hold the experts of one of several ranks only, `rank` of those that have
`shares`, and nothing but zeros and samples where the others would be. Offsets and lengths are those of a whole model.

Nothing in such a file is believed: it must be what the model's config.json gives, field by field.
"""

import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..errors import ConfigError, ModelFileError
from ..quant import SUPPORTED, Quant, is_computed
from ..spec import ModelArgs
from .owners import MOST_RANKS, MOST_SHARE, Owners, Share
from .record import (
    BLOCK_BYTES,
    LOAD_BYTES,
    PROJECTIONS,
    SCALE_DTYPES,
    ExpertLayout,
    Field,
    Quants,
    Record,
    expert_path,
    stated_quants,
)

UNIFORM_VERSION, VERSION, SHARE_VERSION = 1, 2, 3


def to_json(layout: ExpertLayout, share: Share | None = None) -> dict[str, Any]:
    """The contents of `layout.json`; with `share`, of a directory that holds no more than that."""
    if share is not None:
        held = {"shares": list(share.owners.shares), "rank": share.rank}
        return {**_varied(layout), "format_version": SHARE_VERSION, "held": held}
    return _uniform(layout) if layout.is_uniform else _varied(layout)


def held_by(found: Mapping[str, Any], where: object) -> Share | None:
    """The share that the file `where` says the directory holds; None: everything.

    Raises:
        ModelFileError: it says nothing that makes sense.
    """
    if found.get("format_version") != SHARE_VERSION:
        return None
    held: Any = found.get("held")
    shares, rank = (held.get("shares"), held.get("rank")) if isinstance(held, Mapping) else (None, None)
    if not isinstance(shares, list) or not all(type(one) is int and 1 <= one <= MOST_SHARE for one in shares):
        raise ModelFileError(f"{where}: held {reprlib.repr(held)} has no shares, integers from 1 to {MOST_SHARE}")
    if type(rank) is not int or not 0 <= rank < len(shares) <= MOST_RANKS:
        raise ModelFileError(f"{where}: held {reprlib.repr(held)} names no rank of its {len(shares)}")
    return Share(Owners(tuple(shares)), rank)


def from_json(found: Mapping[str, Any], args: ModelArgs, where: object) -> ExpertLayout:
    """The layout that `found`, the file `where`, states.

    Raises:
        ModelFileError: it is of another version, or contradicts the model's configuration.
    """
    version = found.get("format_version", UNIFORM_VERSION)
    if type(version) is not int or version not in (UNIFORM_VERSION, VERSION, SHARE_VERSION):
        raise ModelFileError(f"{where}: format_version {reprlib.repr(version)} is not 1, 2 or 3")
    return _read_uniform(found, args, where) if version == UNIFORM_VERSION else _read_varied(found, args, where)


# ---- version 1


def _uniform(layout: ExpertLayout) -> dict[str, Any]:
    record = layout.record
    return {
        "expert_size": record.size,
        "num_layers": layout.num_layers,
        "num_experts": layout.num_experts,
        "components": [_component(field) for field in record.fields],
        "moe_layers": list(layout.moe_layers),
        "expert_stride": record.stride,
        "format_version": UNIFORM_VERSION,
        "group_size": record.gate.quant.group_size,
        "bits": record.gate.quant.bits,
    }


def _component(field: Field) -> dict[str, Any]:
    return {
        "name": field.name,
        "offset": field.offset,
        "size": field.size,
        "dtype": field.dtype,
        "shape": list(field.shape),
    }


def _read_uniform(found: Mapping[str, Any], args: ModelArgs, where: object) -> ExpertLayout:
    layout = ExpertLayout.from_args(args)
    record = layout.record
    stride = found.get("expert_stride", record.size)
    if type(stride) is not int or stride < record.size or stride % LOAD_BYTES:
        raise ModelFileError(
            f"{where}: expert_stride {reprlib.repr(stride)} does not hold {record.size}-byte experts "
            f"at multiples of {LOAD_BYTES}"
        )
    checked = replace(layout, records=dict.fromkeys(layout.records, record.spaced(stride)))
    for key, wanted in _uniform(checked).items():
        value = found.get(key, wanted if key not in ("expert_size", "num_experts", "components") else None)
        if key == "components":
            value = _compared(value, wanted)
        _agree(where, key, value, wanted)
    return checked


# ---- version 2


def _varied(layout: ExpertLayout) -> dict[str, Any]:
    layers: dict[Record, list[int]] = {}
    for layer, record in layout.records.items():
        layers.setdefault(record, []).append(layer)
    return {
        "format_version": VERSION,
        "num_layers": layout.num_layers,
        "num_experts": layout.num_experts,
        "geometries": [_geometry(record, found) for record, found in layers.items()],
    }


def _geometry(record: Record, layers: list[int]) -> dict[str, Any]:
    return {
        "layers": layers,
        "record_size": record.size,
        "record_stride": record.stride,
        "fields": [
            {**_component(field), **projection.quant.entry()}
            for projection in (record.gate, record.up, record.down)
            for field in projection.fields
        ],
    }


def _read_varied(found: Mapping[str, Any], args: ModelArgs, where: object) -> ExpertLayout:
    geometries = found.get("geometries")
    if not isinstance(geometries, list) or not all(isinstance(one, Mapping) for one in geometries):
        raise ModelFileError(f"{where}: geometries is no list of objects")
    records: dict[int, Record] = {}
    for geometry in geometries:
        record = _record(geometry, args, where)
        for layer in _layers(geometry, args, where):
            if layer in records:
                raise ModelFileError(f"{where}: layer {layer} has two geometries")
            _check_stated(record, layer, args, where)
            records[layer] = record
    if sorted(records) != list(args.moe_layers):
        missing = sorted(set(args.moe_layers) - set(records))
        raise ModelFileError(f"{where}: layer {missing[0]} has no geometry; the model's config.json gives it experts")
    for key, wanted in (("num_layers", args.num_hidden_layers), ("num_experts", args.num_experts)):
        _agree(where, key, found.get(key), wanted)
    ordered = {layer: records[layer] for layer in args.moe_layers}
    return ExpertLayout(ordered, args.num_experts, args.num_hidden_layers)


def _layers(geometry: Mapping[str, Any], args: ModelArgs, where: object) -> list[int]:
    layers = geometry.get("layers")
    if not isinstance(layers, list) or not all(type(i) is int and i in args.moe_layers for i in layers):
        raise ModelFileError(
            f"{where}: layers {reprlib.repr(layers)} are not some of the model's layers with experts, "
            f"{reprlib.repr(args.moe_layers)}"
        )
    return layers


def _record(geometry: Mapping[str, Any], args: ModelArgs, where: object) -> Record:
    """Raises ModelFileError: the stated fields are not what their quantisation gives for this model."""
    fields = geometry.get("fields")
    if not isinstance(fields, list) or not all(isinstance(one, Mapping) for one in fields):
        raise ModelFileError(f"{where}: fields is no list of objects")
    quants, dtype = _quants(fields, where), _scale_dtype(fields)
    try:
        layout = ExpertLayout.from_args(args, dict.fromkeys(args.moe_layers, quants), dtype)
    except ConfigError as error:
        raise ModelFileError(f"{where}: {error}") from None
    record = layout.record
    _agree_fields(where, fields, _geometry(record, [])["fields"])
    _agree(where, "record_size", geometry.get("record_size"), record.size)
    stride = geometry.get("record_stride")
    if type(stride) is not int or stride < record.size or stride % BLOCK_BYTES:
        raise ModelFileError(
            f"{where}: record_stride {reprlib.repr(stride)} does not hold {record.size}-byte experts "
            f"at multiples of {BLOCK_BYTES}"
        )
    return record.spaced(stride)


def _quants(fields: Sequence[Mapping[str, Any]], where: object) -> Quants:
    found = []
    for projection in PROJECTIONS:
        name = f"{projection}.weight"
        entry = next((one for one in fields if one.get("name") == name), {})
        stated = tuple(entry.get(key) for key in ("bits", "group_size", "mode"))
        quant = Quant(*stated) if [type(value) for value in stated] == [int, int, str] else None  # type: ignore[arg-type]
        if quant is None or not is_computed(quant):
            raise ModelFileError(
                f"{where}: {name} is stored with bits, group_size, mode {reprlib.repr(stated)}; supported: {SUPPORTED}"
            )
        found.append(quant)
    gate, up, down = found
    return gate, up, down


def _scale_dtype(fields: Sequence[Mapping[str, Any]]) -> str:
    """The first that scales may have in mode affine; all fields are compared afterwards."""
    return next((dtype for one in fields for dtype in SCALE_DTYPES if one.get("dtype") == dtype), "BF16")


def _check_stated(record: Record, layer: int, args: ModelArgs, where: object) -> None:
    """config.json must say the same, matrix by matrix."""
    stated = (None,) * 3 if args.quantization is None else stated_quants(args.quantization, layer)
    for projection, quant, wanted in zip(PROJECTIONS, record.quants, stated, strict=True):
        if quant != wanted:
            raise ModelFileError(
                f"{where}: {expert_path(layer, projection)} is stored with {quant}; "
                f"config.json says {wanted or 'not quantised'}"
            )


def _agree(where: object, key: str, value: Any, wanted: Any) -> None:
    if type(value) is not type(wanted) or value != wanted:
        raise ModelFileError(
            f"{where}: {key} is {reprlib.repr(value)}; the model's config.json gives {reprlib.repr(wanted)}"
        )


def _agree_fields(where: object, fields: list[Any], wanted: list[dict[str, Any]]) -> None:
    if len(fields) != len(wanted):
        raise ModelFileError(f"{where}: {len(fields)} fields; their quantisation gives {len(wanted)}")
    for i, (found, one) in enumerate(zip(_compared(fields, wanted), wanted, strict=True)):
        for key, value in one.items():
            _agree(where, f"{key} of field {i}", found[key], value)


def _compared(value: Any, wanted: list[dict[str, Any]]) -> Any:
    """`value` with only the keys that are compared, so that extra ones in another tool's file do no harm."""
    if not isinstance(value, list) or not all(isinstance(one, Mapping) for one in value):
        return value
    return [{key: one.get(key) for key in wanted[0]} for one in value]

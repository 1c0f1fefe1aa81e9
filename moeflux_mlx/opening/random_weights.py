"""Makes random weights in the stored forms of a model whose shapes alone are known."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten

from ..experts.whole import HeldExperts
from ..formats.record import ExpertLayout, Record
from ..layers import Weight
from ..model.tensors import TABLE, is_of_matrix, kept_dtype, needed, stored_as
from ..model.weights import arrange, module_at
from ..ops import backend
from ..ops.forms import DTYPES, settings
from ..ops.records import Records
from ..quant import FLOAT, GLOBAL_SCALE, GLOBAL_UNIT, GRID, MODES, SUPERS, Quant, Quantization
from ..spec import ModelArgs

Fill = Callable[[Weight, Quant | None, mx.Dtype], None]


@dataclass(frozen=True)
class Shapes:
    """The shapes of a model without its weights.

    Args:
        args: the model's sizes.
        layout: the layout of its experts.
        quants: how each matrix is stored, by module path; None, or no entry: as floats.
        dtype: the dtype of its activations.
    """

    args: ModelArgs
    layout: ExpertLayout
    quants: Mapping[str, Quant | None]
    dtype: mx.Dtype

    @classmethod
    def of(cls, args: ModelArgs, layout: ExpertLayout, tensors: Iterable[str], dtype: mx.Dtype) -> "Shapes":
        """The shapes of a model whose resident tensors have these names."""
        stated = args.quantization or Quantization()
        stored = {name.rpartition(".")[0] for name in tensors if name.endswith((".scales", f".{SUPERS}"))}
        return cls(args, layout, {path: stated.of(path) for path in stored}, dtype)

    @classmethod
    def of_args(cls, args: ModelArgs, dtype: mx.Dtype) -> "Shapes":
        """The shapes of a model with this configuration, as a conversion stores it."""
        quants = {path: stored_as(args, path, shape[-1]) for path, shape in needed(args).matrices.items()}
        return cls(args, ExpertLayout.from_args(args), quants, dtype)

    @classmethod
    def of_variant(cls, name: str, dtype: mx.Dtype) -> "Shapes":
        """Those of the known model `name`."""
        return cls.of_args(ModelArgs.from_variant(name), dtype)


SCALE_BYTE = 0x21  # of all bytes that have scales of groups in GGUF's forms
TYPICAL_VALUES = {  # of weights in units of d, in forms with tables
    **{"iq4_nl": 60, "iq4_xs": 900, "iq3_xxs": 96, "iq3_s": 96, "iq2_xxs": 48, "iq2_xs": 12, "iq2_s": 12},
    **{"iq1_s": 5, "iq1_m": 5, "tq1_0": 1, "tq2_0": 1},
}
TYPICAL = {"q2_k": (1, 2), "q3_k": (-24, 1), "q4_k": (33, 33), "q6_k": (33, 1)}  # S and M in such bytes, about


def randomise(module: nn.Module, path: str, shapes: Shapes, fill: Fill | None = None) -> None:
    """Gives every parameter of `module`, at `path` in the model, random values of the size found in trained models.
    `fill`: makes the values of matrices instead, from a form and a dtype.
    """
    matrices = {name: part for name, part in module.named_modules() if isinstance(part, Weight)}
    for name, matrix in matrices.items():
        kept = kept_dtype(f".{path}{name}.weight", matrix.weight, shapes.dtype)
        (fill or fill_randomly)(matrix, shapes.quants.get(path + name), kept)
    for name, value in cast(list[tuple[str, mx.array]], tree_flatten(module.parameters())):
        owner, _, leaf = name.rpartition(".")
        if f".{name}".endswith(TABLE):
            ids = mx.random.randint(0, shapes.args.num_experts, value.shape, mx.uint32)
            setattr(module_at(module, owner), leaf, ids)
        elif not is_of_matrix(name, matrices):
            values = mx.random.normal(value.shape) * 0.1 + (leaf == "weight")
            setattr(module_at(module, owner), leaf, values.astype(kept_dtype(f".{path}{name}", values, shapes.dtype)))
    arrange(cast(Any, module))


def fill_randomly(matrix: Weight, quant: Quant | None, dtype: mx.Dtype) -> None:
    """Random codes of `quant`, or values, whose product keeps the size of its input."""
    matrix.quant, matrix.filled = quant, True
    if quant is None:
        matrix.weight = (mx.random.normal(matrix.shape) * matrix.shape[-1] ** -0.5).astype(dtype)
        return
    for name, part in zip(quant.parts, random_parts(quant, matrix.shape, dtype), strict=True):
        setattr(matrix, name, part)


def random_parts(quant: Quant, shape: Sequence[int], dtype: mx.Dtype) -> list[mx.array]:
    """The parts of a random matrix [..., rows, columns]."""
    *rows, columns = shape
    groups = (*rows, quant.groups(columns))
    codes = _random_words((*rows, quant.words(columns)))
    if not quant.is_of_mlx and not quant.has_biases:
        return [codes, *_random_scales(quant, rows, columns), *_random_grid(quant)]
    if not quant.has_biases:
        scales = mx.quantize(mx.random.normal((1, columns)) * columns**-0.5, **settings(quant))[1]
        factor = [mx.full((*rows, 1), float(GLOBAL_UNIT))] if quant.has_global_scale else []
        return [codes, mx.full(groups, scales[0, 0]), *factor]
    steps = 2**quant.bits - 1
    scale, dtype = 3.4 / (steps * columns**0.5), dtype if quant.scale == FLOAT else mx.float16
    return [codes, mx.full(groups, scale, dtype), mx.full(groups, -scale * steps / 2, dtype)]


def _random_scales(quant: Quant, rows: Sequence[int], columns: int) -> list[mx.array]:
    """The other parts of a matrix in a form of GGUF. The bytes that have scales are all equal."""
    steps, (S, M) = 2**quant.bits - 1, TYPICAL.get(quant.scale, (1, 1))
    unit = 3.4 / (steps * columns**0.5)
    floats, mode = np.array([unit / S, unit * steps / 2 / M], np.float16), MODES[quant.mode]
    if quant.mode in TYPICAL_VALUES:
        floats = np.array([columns**-0.5 / TYPICAL_VALUES[quant.mode]], np.float16)
    nested = np.full(mode.nested, SCALE_BYTE, np.uint8)
    nested[: 2 * mode.header] = floats[: mode.header].view(np.uint8)
    parts = [nested] * quant.is_nested + [floats[: mode.supers]] * quant.has_supers
    made = [np.tile(part, columns // quant.multiple) for part in parts]
    return [mx.broadcast_to(mx.array(part), (*rows, len(part))) for part in made]


def _random_grid(quant: Quant) -> list[mx.array]:
    """The grid, of two of its values, if the form has one."""
    if not quant.grid:
        return []
    least, most = {1: (120, 136), 2: (8, 43), 3: (3, 11) if quant.mode == "iq3_s" else (12, 20)}[quant.bits]
    return [(least + (most - least) * mx.random.randint(0, 2, quant.grid)).astype(mx.uint8)]


def _random_words(shape: Sequence[int]) -> mx.array:
    """Random uint32 values, in two halves: `mx.random.randint` is exact up to 16 bits."""
    halves = mx.random.randint(0, 1 << 16, (*shape[:-1], 2 * shape[-1]), dtype=mx.uint16)
    return halves.view(mx.uint32)


def random_experts(layout: ExpertLayout) -> HeldExperts:
    """Random experts of all record sets of `layout`, in memory."""
    experts = HeldExperts(layout, {})
    for number, record in layout.records.items():
        blob = random_records(record, layout.count(number)).blob
        mx.eval(blob)
        experts.add(number, blob if backend.has_kernels() else np.array(blob))
    return experts


def random_records(record: Record, count: int) -> Records:
    parts, end = list[mx.array](), 0
    for projection in record.projections:
        quant, kind = projection.quant, DTYPES[projection.fields[1].dtype]
        shape = count, projection.rows, projection.columns
        arrays = dict(zip(quant.parts, random_parts(quant, shape, kind), strict=True))
        for field in projection.fields:
            array = arrays[field.part] if field.part in arrays else mx.zeros((count, *field.shape), DTYPES[field.dtype])
            if field.part == GRID:
                array = mx.broadcast_to(array, (count, *field.shape))
            if field.part == GLOBAL_SCALE:
                array = array[:, :1]
            gap = mx.zeros((count, (field.offset - end) // 4), mx.uint32)
            parts += [gap, array.reshape(count, -1).view(mx.uint32)]
            end = field.end
    parts.append(mx.zeros((count, (record.stride - end) // 4), mx.uint32))
    return Records(mx.concatenate(parts, axis=1), record)
